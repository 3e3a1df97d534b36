"""The one function that runs a plan: operands come to work, one GEMM, and the result goes to where it rests.

`A @ B` runs it, the products of the tape run it, and their backward passes run it on `plan.grad_x` and `plan.grad_w`.
By default whole panels are gathered, between the ranks of one node in shared memory: a gather is then
one write of this rank's piece to its place in the whole, whatever dim is cut, and in a reduce-scatter each rank writes
the terms of the others' sums where they add them.  The ledger counts the words that this stands for.  Within a limit of
memory panels are streamed (`parlinalg.matmul.stream`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.core import same_grid
from parlinalg.backend import backend_of
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.kernels.rows import add_to
from parlinalg.comm import Comm
from parlinalg.comm.shared import shared_array
from parlinalg.errors import LayoutError
from parlinalg.exchange import local
from parlinalg.grid import Grid
from parlinalg.layout import Layout, cut_lengths
from parlinalg.matmul.local import DeferredGemm, copy_or_add
from parlinalg.matmul.stream import choose, stream
from parlinalg.moves import Step, moves
from parlinalg.plan import Plan, Shape
from parlinalg.redistribute import redistribute

Block = Any
CHUNK = 1 << 15
"""Elements that are summed over all terms before the next ones, so that they stay in cache."""


def check_operands(plan: Plan, x: DistArray, w: DistArray) -> Shape:
    """Return the global shape of y; raise a LayoutError unless x and w rest as the plan says, on one grid."""
    grid = same_grid([x, w])
    for name, array, want in (("x", x, plan.x), ("w", w, plan.w)):
        if array.layout == want:
            continue
        want.check(array.shape, grid.sizes)
        if grid.effective(array.layout) != grid.effective(want):
            raise LayoutError(
                f"matmul: {name} has {array.layout!r}, the plan takes {want!r}; mend it by .redistribute({want!r})"
            )
    shape = plan.result_shape(x.shape, w.shape)
    plan.y.check(shape, grid.sizes)
    return shape


def execute(
    plan: Plan, x: DistArray, w: DistArray, *, bias: Block = None, out: Block = None, memory: int | str | None = None,
    defer: bool = False, order: tuple[int, ...] | None = None,
) -> Block:  # fmt: skip
    """Return this rank's block of `y[*b, *m, *n] = sum over k of x[*b, *m, *k] w[*b, *k, *n]`, as it rests.

    Collective over the plan's axes.  Without `memory` a rank holds the blocks at work of x, w and y beside those that
    it is given.

    Parameters
    ----------
    plan : Plan
    x, w : DistArray
        At rest as the plan says, at work already, or in any other layout without partial axes.
    bias : array, optional
        A block [*n], cut as y at rest, that is added; for a plan without batch dims whose y is summed.
    out : array, optional
        Receives the block, if the local product is y at rest; then it is returned.  Contiguous, and of y's dtype.
    memory : int or str, optional
        Bytes a rank may use beside the blocks that it is given and the one that it returns.
    defer : bool
        True if a local product that is y at rest may be returned as a `DeferredGemm`.
    order : tuple of int, optional
        The permutation of dims under which a local product that is y at rest should lie in C order (`DeferredGemm`).

    Raises
    ------
    PlanError
        If no kernel takes so little memory.
    """
    grid = x.grid
    dtype, other = x.dtype, w.dtype
    dtype = dtype if dtype is other else np.result_type(dtype, other)
    if not grid.inside:
        return grid.backend.empty((0,) * plan.y.ndim, dtype)
    if memory is not None:
        kernel, width = choose(_as_given(plan, x, w), x.shape, w.shape, dtype, memory, grid)
        if kernel.stationary is not None:
            return _plus(stream(plan, x, w, kernel.stationary, width), bias)
    x_moves, w_moves = x.layout is not plan.x_work, w.layout is not plan.w_work
    if x_moves and (step := _only("all_gather", x.layout, plan.x_work, grid)) is not None:
        with _in_common_memory(x, plan.x_work, step) as lent:
            return execute(plan, lent, w, bias=bias, out=out, order=order)
    if w_moves and (step := _only("all_gather", w.layout, plan.w_work, grid)) is not None:
        with _in_common_memory(w, plan.w_work, step) as lent:
            return execute(plan, x, lent, bias=bias, out=out, order=order)
    xs, ws = x.block_in(plan.x_work) if x_moves else x.block, w.block_in(plan.w_work) if w_moves else w.block
    product = DeferredGemm.of(plan, xs, ws, dtype, order)
    if plan.y is not plan.y_work and (grid.world.checked or moves(plan.y_work, plan.y, grid.sizes)):
        return _plus(_at_rest(product, plan, plan.result_shape(x.shape, w.shape), grid), bias)
    if defer:
        return product
    if out is not None:
        product.put(out)
        return out
    if bias is not None and (y := product.onto(bias)) is not None:
        return y
    return _plus(product.formed(), bias)


def _as_given(plan: Plan, x: DistArray, w: DistArray) -> Plan:
    """Return the plan with the layouts in which x and w are."""
    return plan if plan.x == x.layout and plan.w == w.layout else replace(plan, x=x.layout, w=w.layout)


def _plus(y: Block, bias: Block | None) -> Block:
    if bias is not None:
        add_to(y, bias)
    return y


@contextmanager
def _in_common_memory(array: DistArray, work: Layout, step: Step) -> Iterator[DistArray]:
    """Provide the operand at work, within a `with` block; not to be written.

    It lies in memory that the ranks of the node share, where that can be had.
    """
    grid, shape, order = array.grid, array.shape, array.order
    comm = grid.comm(step.axes)
    target = grid.block_shape(work, shape)
    stored = target if order is None else tuple(target[d] for d in order)
    with shared_array(comm, stored, array.block.dtype) as whole:
        if whole is not None:
            if order is not None:
                whole = whole.transpose(tuple(order.index(d) for d in range(len(order))))
            whole[local(grid.block(array.layout, shape), grid.block(work, shape))] = array.block
            comm.count("all_gather", whole.size - array.block.size, whole.itemsize)
            comm.barrier()
            yield DistArray(whole, shape, work, grid, order)
            return
    yield DistArray(array.block_in(work), shape, work, grid, order)


def _at_rest(product: DeferredGemm, plan: Plan, shape: Shape, grid: Grid) -> Block:
    """Return this rank's block of y at rest, from the local product.

    On one node each rank multiplies the part of y that another one keeps into shared memory, so that
    no rank holds the whole product; then it adds the terms of its own part, in the order of the ranks.
    """
    dtype = product.dtype
    step = _only("reduce_scatter", plan.y_work, plan.y, grid)
    if step is not None and work_dtype(dtype) == dtype and dtype.kind != "b":
        comm, whole = grid.comm(step.axes), product.shape
        lengths = cut_lengths(whole[step.dim], step.axes, grid.sizes)
        most = max(lengths) * math.prod((*whole[: step.dim], *whole[step.dim + 1 :]))
        with shared_array(comm, (comm.size, comm.size - 1, most), dtype) as memory:
            if memory is not None:
                return _scattered(product, step.dim, lengths, memory, comm)
    return redistribute(product.formed(), plan.y_work, plan.y, shape, grid, owned=True)


def _scattered(product: DeferredGemm, dim: int, lengths: Sequence[int], memory: Block, comm: Comm) -> Block:
    """Return the sum over the ranks of this rank's part of their products, whose dim is cut in parts of these lengths.

    `memory`, [to, from, elements], is shared by the ranks.
    """
    me, starts = comm.rank, [0, *accumulate(lengths)]
    shape = (*product.shape[:dim], lengths[me], *product.shape[dim + 1 :])
    out = backend_of(product.a).empty(shape, product.dtype)

    def term(to: int, sender: int) -> Block:
        part = (*product.shape[:dim], lengths[to], *product.shape[dim + 1 :])
        return memory[to, sender - (sender > to)][: math.prod(part)].reshape(part)

    formed = product.formed() if product.part(dim, 0, 0) is None else None
    for to in sorted(range(comm.size), key=lambda to: to == me):
        start, stop = starts[to], starts[to + 1]
        part = product.part(dim, start, stop) if formed is None else formed[(*(slice(None),) * dim, slice(start, stop))]
        copy_or_add(part, out if to == me else term(to, me))
    comm.barrier()
    terms = [term(me, sender) for sender in range(comm.size) if sender != me]
    _sum(terms[:me], terms[me:], out)
    comm.count("reduce_scatter", math.prod(product.shape) - out.size, out.itemsize)
    return out


def _only(op: str, src: Layout, dst: Layout, grid: Grid) -> Step | None:
    """Return the step from `src` to `dst`, if it is a single one of this kind between blocks in host memory."""
    if not grid.backend.host_memory:
        return None
    steps = moves(src, dst, grid.sizes)
    return steps[0] if len(steps) == 1 and steps[0].op == op else None


def _sum(before: list[Block], behind: list[Block], out: Block) -> None:
    """Add the terms before and behind that of `out` to it, so that all are summed in their order.

    The first term is overwritten; to exchange the two terms of a sum changes no bit.
    """
    rows = max(1, CHUNK // max(1, math.prod(out.shape[1:])))
    for start in range(0, len(out), rows):
        part = slice(start, start + rows)
        for term in before[1:]:
            head = before[0][part]
            head += term[part]
        total = out[part]
        for term in (*before[:1], *behind):
            total += term[part]
