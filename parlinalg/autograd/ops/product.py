"""Products by a plan.  One gather of the gradient of y serves both derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.core import effective, mismatch, same_grid
from parlinalg.autograd.arrivals import Term
from parlinalg.autograd.ops.weights import Fetched, fetched, weight_at_work
from parlinalg.autograd.rule import Part
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.autograd.unformed import Unformed
from parlinalg.backend.kernels.rows import row_sums
from parlinalg.errors import LayoutError, PlanError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.matmul.local import as_matrix, gemm, local_product, local_product_on
from parlinalg.matmul.product import at_work, check_operands, result_shape
from parlinalg.plan import Plan
from parlinalg.redistribute import redistribute

Block = Any


def matmul(x: Any, w: Any, plan: Plan | None = None, *, keep: str = "xw", bias: Any = None) -> Tensor:
    """`y[*b, *m, *n] = sum over k of x[*b, *m, *k] w[*b, *k, *n]`, and `bias[*n]` added to it.

    Parameters
    ----------
    x, w : Tensor
    plan : Plan, optional
        Which axes cut b, m, n and k at work, and the layouts at rest; its groups b, m, n and k may have any number of
        dims.  By default shapes follow NumPy's `@`, the axes are assigned so that the fewest words move
        (`parlinalg.matmul.assign`), and y rests as `A @ B` of distributed arrays does.
    keep : {"xw", "x", "w", ""}
        Which operands stay gathered for the backward pass; the others are gathered again in it, which moves their words
        once more and saves the memory.  Of operands that rest as they work nothing is held twice.  A weight with a
        fetcher is never kept.
    bias : Tensor, optional
        Added in place to y as it rests, and cut as it; a product with one takes a plan.

    In the backward pass the gradient of y is brought to work once.  That of x is partial over the axes that cut n at
    work, that of w over those that cut m, until they settle; that of the bias over those that cut m in y at rest.

    Raises
    ------
    LayoutError
        If an operand does not rest as the plan says; the message names the `redistribute` that mends it.
    """
    x, w = as_tensor(x), as_tensor(w)
    if plan is None and bias is not None:
        return matmul(x, w, keep=keep) + bias
    if set(keep) - set("xw"):
        raise PlanError(f"matmul: keep = {keep!r} names operands to keep gathered: 'xw', 'x', 'w' or ''")
    return _assigned(x, w, keep) if plan is None else _planned(x, w, plan, keep, bias)


def _assigned(x: Tensor, w: Tensor, keep: str) -> Tensor:
    """The product with NumPy's rules for shapes."""
    from parlinalg.matmul.assign import assign

    if not x.ndim or not w.ndim:
        raise ValueError(f"matmul of shapes {x.shape} and {w.shape}: an operand without dims multiplies by *")
    if x.ndim == 1 or w.ndim == 1:
        return _with_vector(x, w, keep)
    for name, t in (("x", x), ("w", w)):
        if effective(t.layout, t.grid).partial:
            raise LayoutError(
                f"matmul: {name} is {t.layout!r}, not summed yet; sum it by "
                f".redistribute({t.layout.with_partial(())!r})"
            )
    if w.ndim > 2 and x.ndim == 2:  # transposed, the batch is the left operand's alone
        return _assigned(w.mT, x.T, keep.translate(str.maketrans("xw", "wx"))).mT
    shared = w.ndim - 2
    if shared and (x.ndim != w.ndim or x.shape[:shared] != w.shape[:shared]):
        raise ValueError(
            f"matmul: leading dims of shapes {x.shape} and {w.shape} differ; they must be equal, or missing in one"
        )
    if x.shape[-1] != w.shape[-2]:
        raise ValueError(
            f"matmul: shapes {x.shape} and {w.shape} do not multiply: {x.shape[-1]} columns meet {w.shape[-2]} rows"
        )
    plan = assign(x.layout, w.layout, x.shape, w.shape, tuple(x.grid.sizes.items()), None, shared)
    return _planned(x, w, plan, keep)


def _with_vector(x: Tensor, w: Tensor, keep: str) -> Tensor:
    """A vector is a matrix of one row (left) or one column (right), whose dim is dropped from the result."""
    left = x.reshape(1, *x.shape) if x.ndim == 1 else x
    right = w.reshape(*w.shape, 1) if w.ndim == 1 else w
    y = _assigned(left, right, keep)
    drop = ([y.ndim - 2] if x.ndim == 1 else []) + ([y.ndim - 1] if w.ndim == 1 else [])
    layout = y.layout
    for d in drop:
        layout = layout.with_dim(d, None)
    return y.redistribute(layout).reshape(tuple(n for d, n in enumerate(y.shape) if d not in drop))


def _planned(x: Tensor, w: Tensor, plan: Plan, keep: str, bias: Any = None) -> Tensor:
    grid = check_operands(plan, x.data, w.data)
    shape = result_shape(plan, x.shape, w.shape)
    dtype = np.result_type(x.dtype, w.dtype)
    inputs = [x, w] if bias is None else [x, w, fitting_bias(bias, plan, w, grid)]
    if not grid.inside:
        block = grid.backend.zeros((0,) * len(shape), dtype)
        return record("matmul", DistArray(block, shape, plan.y, grid), inputs, [nothing(t) for t in inputs])
    nb, nm, nk = len(plan.b), len(plan.m), len(plan.k)
    at = Layouts.of(plan)
    source = fetched(w)
    xs, ws = at_work(x.data, at.x), weight_at_work(w, at.w)
    turned = ws.ndim == 2 and nk == 1 and not ws.flags.c_contiguous and ws.flags.f_contiguous
    y = None
    if bias is not None and effective(at.y, grid) == effective(plan.y, grid):
        y = local_product_on(plan, xs, ws, dtype, inputs[2].block)
    if y is None:
        y = redistribute(local_product(plan, xs, ws, dtype), at.y, plan.y, shape, grid, owned=True)
        if bias is not None:
            y += inputs[2].block.astype(dtype, copy=False)
    x_kept, x_again = kept(xs, x.data, at.x, "x" in keep)
    w_kept, w_again = kept(ws, w.data, at.w, "w" in keep, source)
    if source is not None:
        inputs[1] = source.parameter

    def gathered(g: Block) -> tuple[Block, Block]:
        # dy[b, m, n] at work, for both products, and at rest, for the bias
        return redistribute(g, at.rest, at.dy, shape, grid), g

    def dx(grads: tuple[Block, Block], w_kept: Block) -> Term:
        # dx[b, m, k] = dy[b, m, n] wᵀ[b, n, k], partial over the axes that cut n
        dy, _ = grads
        ws = w_again(w_kept)
        d = gemm(as_matrix(dy, nb, nm), as_matrix(ws, nb, nk).swapaxes(-1, -2), dtype)
        return d.reshape((*dy.shape[: nb + nm], *ws.shape[nb : nb + nk])), at.dx

    def dw(grads: tuple[Block, Block], x_kept: Block) -> Term:
        # dw[b, k, n] = xᵀ[b, k, m] dy[b, m, n], partial over the axes that cut m
        dy, _ = grads
        xs = x_again(x_kept)
        if source is not None and source.order == (1, 0) and nb == 0 and nk == 1:
            # dwᵀ[n, k] = dyᵀ[n, m] x[m, k]: that of a transposed view, as its parameter lies
            return gemm(as_matrix(dy, 0, nm).T, as_matrix(xs, 0, nm), dtype), at.dw.permuted((1, 0))
        if turned:  # the gradient of a transposed view lies as it does, to be added to others of what it is a view of
            d = gemm(as_matrix(dy, 0, nm).T, as_matrix(xs, 0, nm), dtype).T
        else:
            left, right = as_matrix(xs, nb, nm).swapaxes(-1, -2), as_matrix(dy, nb, nm)
            if nb == 0 and source is None:
                return Unformed(left, right, dtype, (*xs.shape[nm:], *dy.shape[nm:])), at.dw
            d = gemm(left, right, dtype)
        term = d.reshape((*dy.shape[:nb], *xs.shape[nb + nm :], *dy.shape[nb + nm :])), at.dw
        return term if source is None else source.term(term)

    def db(grads: tuple[Block, Block]) -> Term:
        # db[n] = sum over m of dy[m, n] at rest, partial over the axes that cut m there
        return bias_term(grads[1], at.rest, nm, grid)

    parts = [Part(dx, w_kept), Part(dw, x_kept), Part(db)]
    return record("matmul", DistArray(y, shape, plan.y, grid), inputs, parts[: len(inputs)], gathered)


def kept(
    block: Block, data: DistArray, work: Layout, keep: bool, source: Fetched | None = None
) -> tuple[Block, Callable[[Block], Block]]:  # fmt: skip
    """Return what to save of an operand for the backward pass, and what brings it to work from that.

    Parameters
    ----------
    block : array
        The operand at work.
    data : DistArray
        The operand at rest.
    keep : bool
        Whether to save it at work; otherwise it is gathered again.
    source : Fetched, optional
        The weight that the operand is, if it has a fetcher: then nothing is saved.
    """
    if source is not None:
        return None, lambda _: source.at_work(work)
    if data.RESTS:
        return None, lambda _: at_work(data, work)
    if keep:
        return block, lambda held: held
    shape, layout, grid, order = data.shape, data.layout, data.grid, data.order
    return data.block, lambda held: at_work(DistArray(held, shape, layout, grid, order), work)


def fitting_bias(bias: Any, plan: Plan, w: Tensor, grid: Grid) -> Tensor:
    """The bias, once it is known to fit y[*m, *n] at rest."""
    bias = as_tensor(bias)
    same_grid([bias.data, w.data])
    want, shape = Layout(*plan.y.dims[len(plan.m) :]), w.shape[len(plan.k) :]
    if plan.b:
        raise PlanError(f"matmul: a bias is added to a product without batch dims; this plan has {len(plan.b)}")
    if plan.y.partial:
        raise LayoutError(f"matmul: y = {plan.y!r} rests unsummed, and takes no bias; add it once y is summed")
    if bias.shape != shape:
        raise ValueError(f"matmul: a bias of shape {bias.shape} for a result that ends in {shape}; they must be equal")
    if effective(bias.layout, grid) != effective(want, grid):
        raise mismatch("matmul: the bias is not cut as y", bias.layout, want)
    return bias


def bias_term(dy: Block, rest: Layout, rows: int, grid: Grid) -> Term:
    """The gradient of a bias from that of y[*m, *n] at rest, where m has so many dims."""
    sums = row_sums(dy.reshape((math.prod(dy.shape[:rows]), math.prod(dy.shape[rows:]))))
    terms = Layout(*rest.dims[rows:], partial=[a for a in chain(*rest.dims[:rows]) if grid.sizes[a] > 1])
    return sums.reshape(dy.shape[rows:]), terms


class Layouts(NamedTuple):
    """The layouts at work of a plan: of x, w, y and their gradients; `rest` is that of the gradient of y at rest."""

    x: Layout
    w: Layout
    y: Layout
    rest: Layout
    dy: Layout
    dx: Layout
    dw: Layout

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(plan: Plan) -> Layouts:
        x, w, y = plan.x_work, plan.w_work, plan.y_work
        dx, dw = x.with_partial(tuple(chain(*plan.n))), w.with_partial(tuple(chain(*plan.m)))
        return Layouts(x, w, y, plan.y.with_partial(()), y.with_partial(()), dx, dw)


def nothing(x: Tensor) -> Any:
    """The part of the rule on a rank outside the grid."""
    rest, local, dtype, zeros = x.layout.with_partial(()), x.block.shape, x.dtype, x.grid.backend.zeros
    return lambda _: (zeros(local, dtype), rest)
