"""The one function that runs a plan: operands come to work, one GEMM, and the result goes to where it rests.

`A @ B` runs it, the products of the tape run it, and their backward passes run it on `plan.grad_x` and `plan.grad_w`.
By default whole panels are gathered, between the ranks of one node in memory that they have in common: a gather is then
one write of this rank's piece to its place in the whole, whatever dim is cut, and a reduce-scatter a sum of the terms
where they lie; the ledger counts the words they stand for.  Within a limit of memory panels are streamed
(`parlinalg.matmul.stream`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.core import effective, same_grid
from parlinalg.backend.halves import is_half
from parlinalg.comm.shared import common
from parlinalg.errors import LayoutError
from parlinalg.exchange import local
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.matmul.local import DeferredGemm
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
        if effective(array.layout, grid) != effective(want, grid):
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
        Whether a local product that is y at rest may be returned as a `DeferredGemm`.
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
        y += bias.astype(y.dtype, copy=False)
    return y


@contextmanager
def _in_common_memory(array: DistArray, work: Layout, step: Step) -> Iterator[DistArray]:
    """Provide the operand at work, within a `with` block; not to be written.

    It lies in memory that the ranks of the node have in common, where that can be had.
    """
    grid, shape, order = array.grid, array.shape, array.order
    comm = grid.comm(step.axes)
    target = grid.block_shape(work, shape)
    stored = target if order is None else tuple(target[d] for d in order)
    with common(comm, stored, array.block.dtype) as whole:
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
    """Return this rank's block of y at rest, from the local product."""
    dtype = product.dtype
    step = _only("reduce_scatter", plan.y_work, plan.y, grid)
    if step is not None and not is_half(dtype) and dtype.kind != "b":
        comm = grid.comm(step.axes)
        with common(comm, (comm.size, *product.shape), dtype) as terms:
            if terms is not None:
                product.put(terms[comm.rank])
                comm.barrier()
                part = local(grid.block(plan.y, shape), grid.block(plan.y_work, shape))
                out = grid.backend.empty(grid.block_shape(plan.y, shape), dtype)
                _sum([term[part] for term in terms], out)
                comm.count("reduce_scatter", terms[0].size - out.size, out.itemsize)
                return out
    return redistribute(product.formed(), plan.y_work, plan.y, shape, grid, owned=True)


def _only(op: str, src: Layout, dst: Layout, grid: Grid) -> Step | None:
    """Return the step from `src` to `dst`, if it is a single one of this kind between blocks in host memory."""
    if not grid.backend.host_memory:
        return None
    steps = moves(src, dst, grid.sizes)
    return steps[0] if len(steps) == 1 and steps[0].op == op else None


def _sum(terms: list[Block], out: Block) -> None:
    """Return the sum of the terms, in their order."""
    rows = max(1, CHUNK // max(1, math.prod(out.shape[1:])))
    for start in range(0, len(out), rows):
        part = slice(start, start + rows)
        total = out[part]
        total[...] = terms[0][part]
        for term in terms[1:]:
            total += term[part]
