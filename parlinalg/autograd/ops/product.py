"""Products by a plan: the forward pass runs the plan, the backward pass runs `plan.grad_x` and `plan.grad_w`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.align import broadcast_shape
from parlinalg.array.core import mismatch, same_grid
from parlinalg.array.joining import broadcast_to
from parlinalg.autograd.gradients import Term
from parlinalg.autograd.parameter import Parameter
from parlinalg.autograd.rule import Part
from parlinalg.autograd.tape import tracing
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.backend.kernels.rows import row_sums
from parlinalg.errors import LayoutError, PlanError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.matmul.api import by_shapes
from parlinalg.matmul.execute import check_operands, execute
from parlinalg.matmul.stream import choose
from parlinalg.moves import moves
from parlinalg.plan import Plan, Shape
from parlinalg.redistribute import redistribute

Block = Any
SWAPPED = str.maketrans("xw", "wx")


def matmul(
    x: Any, w: Any, plan: Plan | None = None, *, keep: str | None = None, bias: Any = None,
    memory: int | str | None = None,
) -> Tensor:  # fmt: skip
    """Return `y[*b, *m, *n] = sum over k of x[*b, *m, *k] w[*b, *k, *n]`, and `bias[*n]` added to it.

    Parameters
    ----------
    x, w : Tensor
    plan : Plan, optional
        Which axes cut b, m, n and k at work, and the layouts at rest; its groups b, m, n and k may have any number of
        dims.  By default shapes follow NumPy's `@`, the axes are assigned so that the fewest words move
        (`parlinalg.matmul.assign`), and y rests as `A @ B` of distributed arrays does.
    keep : {"xw", "x", "w", ""}, optional
        Which operands stay gathered for the backward pass; the others are gathered again in it, which moves their words
        once more and saves the memory.  Of operands that rest as they work nothing is held twice.  A weight with a
        gatherer of its own (ZeRO-3) is never kept.  By default "xw", or "" with `memory`.
    bias : Tensor, optional
        Added in place to y as it rests, and cut as it; a product with one takes a plan.
    memory : int or str, optional
        Bytes a rank may use for each of the three products, forward and backward, beside the blocks at rest and what is
        kept or prefetched, such as `"64MiB"`.  Where gathered panels would take more, panels are streamed instead, and
        the gradient of y is then streamed twice.

    The backward pass runs `plan.grad_x` and `plan.grad_w`, with the gradient of y brought to work once for both.  That
    of x is partial over the axes that cut n at work, that of w over those that cut m, until they settle; that of the
    bias over those that cut m in y at rest.  With `memory` they are reduced at once over the axes that cut x and w at
    rest.

    Raises
    ------
    LayoutError
        If an operand does not rest as the plan says; the message names the `redistribute` that mends it.
    PlanError
        If one of the three products does not fit `memory`; the message says the least that would do.
    """
    x, w = as_tensor(x), as_tensor(w)
    if plan is None and bias is not None:
        return matmul(x, w, keep=keep, memory=memory) + bias
    if plan is None and x.ndim > 2 < w.ndim and x.shape[:-2] != w.shape[:-2]:
        lead = broadcast_shape([x.shape[:-2], w.shape[:-2]], "matmul")
        x, w = (broadcast_to(t, (*lead, *t.shape[-2:])) for t in (x, w))
    if keep is None:
        keep = "xw" if memory is None else ""
    if set(keep) - set("xw"):
        raise PlanError(f"matmul: keep = {keep!r} names operands to keep gathered: 'xw', 'x', 'w' or ''")
    if plan is not None:
        return MatrixProduct(plan, x, w, memory).record(x, w, keep, bias)

    def run(x: Tensor, w: Tensor, plan: Plan, swapped: bool) -> Tensor:
        return MatrixProduct(plan, x, w, memory).record(x, w, keep.translate(SWAPPED) if swapped else keep)

    return by_shapes(x, w, run)


class Product:
    """A product by a plan on the tape: the forward pass, and the two products of the backward pass.

    Parameters
    ----------
    plan : Plan
    shape : tuple of int
        The global shape of y.
    x_work : Layout
        Of x at work.
    """

    op = ""
    """The operation's name."""

    def __init__(self, plan: Plan, shape: Shape, x_work: Layout) -> None:
        self.plan, self.shape, self.x_work = plan, shape, x_work

    def forward(self, x: DistArray, w: DistArray, bias: Block) -> Block:
        """Return this rank's block of y at rest, from operands at rest or at work."""
        raise NotImplementedError

    def dx(self, dy: DistArray, w: DistArray) -> Term:
        """Return a term of the gradient of x."""
        raise NotImplementedError

    def dw(self, x: DistArray, dy: DistArray) -> Term:
        """Return a term of the gradient of w."""
        raise NotImplementedError

    def gathers(self, x: DistArray, w: DistArray, wanted: Sequence[bool]) -> bool:
        """Return True if the gradient of y is brought to work once, for x and w, of which some want a gradient."""
        return True

    def record(self, x: Tensor, w: Tensor, keep: str, bias: Any = None) -> Tensor:
        """Run the forward pass, and return y with its rule."""
        plan, shape, grid = self.plan, self.shape, x.grid
        inputs = [x, w] if bias is None else [x, w, fitting_bias(bias, plan, w, grid)]
        if not grid.inside:
            block = grid.backend.zeros((0,) * len(shape), np.result_type(x.dtype, w.dtype))
            return record(self.op, DistArray(block, shape, plan.y, grid), inputs, [nothing(t) for t in inputs])
        weight = gathered_weight(w)
        left = _operand(x.data, self.x_work, "x" in keep)
        if weight is not None:
            right = weight.at_work(plan.w_work)
            inputs[1] = weight.parameter
        else:
            right = _operand(w.data, plan.w_work, "w" in keep)
        y = self.forward(left, right, None if bias is None else inputs[2].block)
        x_saved, x_again = _saved(left)
        w_saved, w_again = _saved(right) if weight is None else (None, lambda _: weight.at_work(plan.w_work))
        rest, at = plan.grad_x.x, plan.grad_x.x_work
        if not self.gathers(left, right, [t.requires_grad and tracing() for t in inputs]):
            at = rest

        def prepare(g: Block) -> tuple[Block, Block]:
            # dy[b, m, n] at work, for both products, and at rest, for the bias
            return redistribute(g, rest, at, shape, grid), g

        def dx(grads: tuple[Block, Block], saved: Block) -> Term:
            return self.dx(DistArray(grads[0], shape, at, grid), w_again(saved))

        def dw(grads: tuple[Block, Block], saved: Block) -> Term:
            term = self.dw(x_again(saved), DistArray(grads[0], shape, at, grid))
            return term if weight is None else weight.term(term)

        def db(grads: tuple[Block, Block]) -> Term:
            # db[n] = sum over m of dy[m, n] at rest, partial over the axes that cut m there
            return bias_term(grads[1], rest, len(plan.m), grid)

        parts = [Part(dx, w_saved), Part(dw, x_saved), Part(db)]
        return record(self.op, DistArray(y, shape, plan.y, grid), inputs, parts[: len(inputs)], prepare)


class MatrixProduct(Product):
    """A product of matrices; its backward pass is the same product by `plan.grad_x` and `plan.grad_w`."""

    op = "matmul"

    def __init__(self, plan: Plan, x: Tensor, w: Tensor, memory: int | str | None) -> None:
        super().__init__(plan, check_operands(plan, x.data, w.data), plan.x_work)
        self.memory = memory
        self.order = w.data.order
        """The gradient of a transposed view lies as what it is a view of."""
        x_plan, w_plan = plan.grad_x, plan.grad_w
        self.plans = (x_plan.unsummed, w_plan.unsummed) if memory is None else (x_plan.scattered, w_plan.scattered)

    def forward(self, x: DistArray, w: DistArray, bias: Block) -> Block:
        return execute(self.plan, x, w, bias=bias, memory=self.memory)

    def dx(self, dy: DistArray, w: DistArray) -> Term:
        # dx[b, m, k] = dy[b, m, n] wᵀ[b, n, k], partial over the axes that cut n
        plan = self.plans[0]
        wt = _transposed(w, self.plan.w_transpose, self.plan.w_work, plan.w_work)
        return execute(plan, dy, wt, memory=self.memory), plan.y

    def dw(self, x: DistArray, dy: DistArray) -> Term:
        # dw[b, k, n] = xᵀ[b, k, m] dy[b, m, n], partial over the axes that cut m
        plan = self.plans[1]
        xt = _transposed(x, self.plan.x_transpose, self.plan.x_work, plan.x_work)
        return execute(plan, xt, dy, memory=self.memory, defer=True, order=self.order), plan.y

    def gathers(self, x: DistArray, w: DistArray, wanted: Sequence[bool]) -> bool:
        if self.memory is None:
            return True
        xt, wt = x.transpose(self.plan.x_transpose), w.transpose(self.plan.w_transpose)
        runs = (
            (replace(self.plans[0], w=wt.layout), self.shape, wt.shape),
            (replace(self.plans[1], x=xt.layout), xt.shape, self.shape),
        )
        dtype = np.result_type(x.dtype, w.dtype)
        found = [choose(*run, dtype, self.memory, x.grid)[0] for run, want in zip(runs, wanted, strict=False) if want]
        return all(kernel.stationary is None for kernel in found)


def _operand(array: DistArray, work: Layout, keep: bool) -> DistArray:
    """Return the operand at work, if it is to be kept so for the backward pass or nothing has to move; else as it is.

    One that does not stay in memory is brought to work each time.
    """
    grid = array.grid
    if array.resident is None or array.layout is work:
        return array
    still = not (grid.world.checked or moves(array.layout, work, grid.sizes))
    if not (keep or still):
        return array
    return DistArray(array.block if still else array.block_in(work), array.shape, work, grid, array.order)


def _transposed(array: DistArray, order: tuple[int, ...], work: Layout, turned: Layout) -> DistArray:
    """Return a transposed view of an operand, conjugated if complex; one at work has the layout `turned` then."""
    if array.dtype.kind == "c":
        array = DistArray(array.block.conj(), array.shape, array.layout, array.grid, array.order)
    if array.layout is not work:
        return array.transpose(order)
    shape = array.shape
    return DistArray(array.block.transpose(order), tuple([shape[d] for d in order]), turned, array.grid)


def _saved(array: DistArray) -> tuple[Block, Callable[[Block], DistArray]]:
    """Return what to save of an operand for the backward pass, and what makes the operand of it again."""
    block = array.resident
    if block is None:
        return None, lambda _: array
    shape, layout, grid, order = array.shape, array.layout, array.grid, array.order
    return block, lambda block: DistArray(block, shape, layout, grid, order)


class GatheredWeight(NamedTuple):
    """A parameter that a weight gatherer brings to work, and the order in which a product sees its dims."""

    parameter: Parameter
    shape: Shape
    order: tuple[int, ...]

    @property
    def back(self) -> tuple[int, ...]:
        """The order that undoes `order`."""
        return tuple(map(self.order.index, range(len(self.order))))

    def at_work(self, work: Layout) -> DistArray:
        """Return the weight in the layout `work`."""
        back = self.back
        block = self.parameter.storage.at_work(self.parameter, work.permuted(back))
        return DistArray(block.transpose(self.order), self.shape, work, self.parameter.grid, back)

    def term(self, gradient: Term) -> Term:
        """Return a term of the parameter's gradient from one of the weight's."""
        block, layout = gradient
        back = self.back
        return gradient if back == tuple(range(len(back))) else (block.transpose(back), layout.permuted(back))


def gathered_weight(w: Tensor) -> GatheredWeight | None:
    """Return the parameter that a weight is, or is a transposed view of, if a weight gatherer has it."""
    parameter, order = w.origin or (w, tuple(range(w.ndim)))
    if isinstance(parameter, Parameter) and parameter.storage.gatherer is not None and parameter.grid.inside:
        return GatheredWeight(parameter, w.shape, order)
    return None


def fitting_bias(bias: Any, plan: Plan, w: Tensor, grid: Grid) -> Tensor:
    """Return the bias, once it is known to fit y[*m, *n] at rest."""
    bias = as_tensor(bias)
    same_grid([bias.data, w.data])
    want, shape = Layout(*plan.y.dims[len(plan.m) :]), w.shape[len(plan.k) :]
    if plan.b:
        raise PlanError(f"matmul: a bias is added to a product without batch dims; this plan has {len(plan.b)}")
    if plan.y.partial:
        raise LayoutError(f"matmul: y = {plan.y!r} rests unsummed, and takes no bias; add it once y is summed")
    if bias.shape != shape:
        raise ValueError(f"matmul: a bias of shape {bias.shape} for a result that ends in {shape}; they must be equal")
    if grid.effective(bias.layout) != grid.effective(want):
        raise mismatch("matmul: the bias is not cut as y", bias.layout, want)
    return bias


def bias_term(dy: Block, rest: Layout, rows: int, grid: Grid) -> Term:
    """Return the gradient of a bias from that of y[*m, *n] at rest, where m has so many dims."""
    sums = row_sums(dy.reshape((math.prod(dy.shape[:rows]), math.prod(dy.shape[rows:]))))
    terms = Layout(*rest.dims[rows:], partial=[a for a in chain(*rest.dims[:rows]) if grid.sizes[a] > 1])
    return sums.reshape(dy.shape[rows:]), terms


def nothing(x: Tensor) -> Any:
    """Return the part of the rule on a rank outside the grid."""
    rest, local, dtype, zeros = x.layout.with_partial(()), x.block.shape, x.dtype, x.grid.backend.zeros
    return lambda _: (zeros(local, dtype), rest)
