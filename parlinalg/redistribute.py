"""The one place where a change of layout becomes communication.

`parlinalg.moves` says which steps lead from one layout to another; here each step is a generator that communicates and
yields its handles, so that the same code runs to the end at once, or starts now and finishes later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple

from parlinalg.comm import Handle
from parlinalg.comm.group import Group
from parlinalg.errors import GridError, LayoutError
from parlinalg.exchange import exchange_blocks, local, piece_size
from parlinalg.grid import Grid
from parlinalg.layout import Layout, coordinates, cut_lengths, index_of
from parlinalg.moves import Step, moves

Block = Any
Shape = tuple[int, ...]
Work = Generator[Handle, None, Block]
Order = tuple[int, ...] | None


class Posting(NamedTuple):
    """The way in which a move posts its communication.

    Attributes
    ----------
    wait : bool
        Whether it waits for each step.
    tag : int
        The tag of its messages.
    group : Group, optional
        Where its gathers and reduce-scatters wait for those of other moves.
    """

    wait: bool
    tag: int = 0
    group: Group | None = None


class Move:
    """A redistribution in progress.  `wait()` finishes it and returns the new block.

    A move may take several steps, of which each is posted when the last one is done.  Only `wait()` posts them, so that
    ranks which wait for their moves in the same order also communicate in the same order, whatever `test()` told each.
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._handle: Handle | None = None
        self._block: Block = None
        self._next()

    def _next(self) -> None:
        try:
            self._handle = next(self._work)
        except StopIteration as end:
            self._handle, self._block = None, end.value

    def test(self) -> bool:
        """Return True if the step in progress is done: `wait()` would return at once, or go on to the next step."""
        return self._handle is None or self._handle.test()

    def wait(self) -> Block:
        """Wait for the new block, and return it."""
        while self._handle is not None:
            self._handle.wait()
            self._next()
        return self._block


def redistribute(
    block: Block, src: Layout, dst: Layout, shape: Shape, grid: Grid, *, owned: bool = False, order: Order = None
) -> Block:
    """Return the block of an array of global `shape` in layout `dst`, from its block in layout `src`.

    No rank receives more elements than its target block lacks (sums: reduce-scatter n - own, all-reduce 2 (n - own)).
    Where nothing moves the result may share memory with `block`.  Collective over the axes the layouts differ in.

    Beside its source and its target each step of a move holds two pieces, one sent and one received, of at most
    `tunables.MOVE_BUFFER` elements or a sixteenth (`tunables.MOVE_SHARE`) of its larger block, whichever is more: the
    number of messages does not grow with the blocks.  One row of the longest uncut dim is the least piece there is.
    Up to 16 ranks of one node hand over pieces of `tunables.MOVE_COMMON` elements a rank in shared memory instead.

    Parameters
    ----------
    block : array
        This rank's block in layout `src`; it is not changed, unless `owned` says that it may be.
    order : tuple of int, optional
        The permutation of dims under which the blocks of all ranks lie in C order: they travel so, and are not copied
        to another order first.  A transposed matrix has (1, 0).
    """
    if src == dst or not grid.inside:
        return block
    return Move(_ordered(block, src, dst, shape, grid, owned, order, Posting(True))).wait()


def start(
    block: Block, src: Layout, dst: Layout, shape: Shape, grid: Grid, *, owned: bool = False, order: Order = None,
    group: Group | None = None,
) -> Move:  # fmt: skip
    """Start `redistribute`: post the first communication, and return a `Move` whose `wait()` finishes it.

    All ranks of the grid start their moves in one order, and wait for them in one order.  Moves with one `group` make
    one call of their gathers over the same axes, and one of their reduce-scatters, when the group starts.
    """
    return Move(_ordered(block, src, dst, shape, grid, owned, order, Posting(False, grid.ticket(), group)))


def count(src: Layout, dst: Layout, shape: Shape, grid: Grid, dtype: Any) -> None:
    """Enter a change of layout that is made through shared memory in the ledger, as that of `redistribute`."""
    for step in moves(src, dst, grid.sizes) if math.prod(shape) else ():
        if step.op not in ("mask", "embed", "slice"):
            op = "all_to_all" if step.op == "exchange" else step.op
            grid.comm(step.axes).count(op, step.words(shape, grid.sizes, grid.coords), dtype.itemsize)


def _ordered(
    block: Block, src: Layout, dst: Layout, shape: Shape, grid: Grid, owned: bool, order: Order, how: Posting
) -> Work:
    if grid.world.checked:
        src.check(shape, grid.sizes)
        check_block_replicas(block, src, grid)
    if order is None:
        return (yield from _steps(block, src, dst, shape, grid, owned, how))
    stored = tuple(shape[d] for d in order)
    out = yield from _steps(block.transpose(order), src.permuted(order), dst.permuted(order), stored, grid, owned, how)
    return out.transpose(tuple(order.index(d) for d in range(len(order))))


def carry(
    block: Block, src: Layout, dst: Layout, shape: Shape, grid: Grid, wait: bool, owned: bool = False, tag: int = 0
) -> Work:
    """Run `redistribute` as a generator: yield the handle of each communication, and return the new block.

    Messages between two ranks carry `tag`: moves in progress at the same time need different ones.  Replicas are not
    compared here: of a panel, not all ranks that hold one take part.
    """
    return (yield from _steps(block, src, dst, shape, grid, owned, Posting(wait, tag)))


def _steps(block: Block, src: Layout, dst: Layout, shape: Shape, grid: Grid, owned: bool, how: Posting) -> Work:
    src.check(shape, grid.sizes)
    dst.check(shape, grid.sizes)
    if not grid.inside:
        return block
    for step in moves(src, dst, grid.sizes):
        if step.op in _COLLECTIVE and not math.prod(shape):
            block, owned = grid.backend.zeros(grid.block_shape(step.dst, shape), block.dtype), True
            continue
        before = block
        block = yield from _STEPS[step.op](block, step, shape, grid, owned, how)
        owned = owned or (block is not before and step.op != "slice")
    return block


def check_block_replicas(block: Block, layout: Layout, grid: Grid, what: str = "") -> None:
    """Checked mode: raise a CommError on all ranks if blocks that should be replicas differ."""
    axes = tuple(a for a in grid.axes if a not in layout.axes and grid.sizes[a] > 1)
    if axes and grid.inside:
        from parlinalg.comm.check import check_replicas as compare

        compare(grid.comm(axes), block, what or f"the blocks of an array in {layout!r}")


def check_given(
    what: str,
    block: Block,
    layout: Layout,
    shape: Shape,
    grid: Grid,
    right: str,
    *,
    replicas: bool = False,
    **facts: Any,
) -> None:
    """Checked mode: raise a CommError on all ranks of the grid unless they make one array.

    Shape, dtype, layout and `facts` should be equal on all, and blocks of the same part too.  `what` and `right` are
    for the message.  With `replicas`, some elements of blocks of the same part are compared without the checked mode.
    """
    always = replicas and any(a not in layout.axes and n > 1 for a, n in grid.sizes.items())
    if (grid.world.checked or always) and grid.inside:
        from parlinalg.comm.check import compare

        given = {"shape": list(shape), "dtype": str(block.dtype), "layout": repr(layout), **facts}
        compare(grid.everyone, what, given, right, block, part_of(layout, grid), always=always)


def part_of(layout: Layout, grid: Grid) -> list[int]:
    """Return the number of the part that lies here: the same on ranks that hold replicas.  Inside the grid."""
    return [index_of(cut, grid.sizes, grid.coords) for cut in (*layout.dims, layout.partial)]


def _mask(block: Block, step: Step, shape: Shape, grid: Grid, owned: bool, how: Posting) -> Work:
    yield from ()  # a generator, like the steps that communicate
    return grid.backend.zeros(block.shape, block.dtype) if any(grid.coords[a] for a in step.axes) else block


def _embed(block: Block, step: Step, shape: Shape, grid: Grid, owned: bool, how: Posting) -> Work:
    before, after = grid.block(step.src, shape), grid.block(step.dst, shape)
    out = grid.backend.zeros(tuple(len(r) for r in after), block.dtype)
    out[local(before, after)] = block
    yield from ()
    return out


def _slice(block: Block, step: Step, shape: Shape, grid: Grid, owned: bool, how: Posting) -> Work:
    yield from ()
    return block[local(grid.block(step.dst, shape), grid.block(step.src, shape))]


def _all_reduce(block: Block, step: Step, shape: Shape, grid: Grid, owned: bool, how: Posting) -> Work:
    if not (owned and block.flags.c_contiguous):
        block = block.copy(order="C")
    terms, op = _terms(block)
    handle = grid.comm(step.axes).all_reduce(terms, op=op, wait=how.wait)
    if not how.wait:
        yield handle
    return block


def _terms(block: Block) -> tuple[Block, str]:
    """Return the terms in a dtype that is communicated, and the reduction that sums them: of booleans True is the most.

    The terms lie in the memory of the block.
    """
    return (block.view("u1"), "max") if block.dtype.kind == "b" else (block, "sum")


def _lengths(step: Step, longer: Layout, shape: Shape, grid: Grid) -> list[int]:
    """Return the lengths of the pieces of the step's dim, where `longer` leaves it uncut by the step's axes."""
    return cut_lengths(len(grid.block(longer, shape)[step.dim]), step.axes, grid.sizes)


def _flat(block: Block) -> Block:
    """Return the block in C order, copied only if needed: what is sent must not depend on one rank's memory layout."""
    return block if block.flags.c_contiguous else block.copy(order="C")


def _all_gather(block: Block, step: Step, shape: Shape, grid: Grid, owned: bool, how: Posting) -> Work:
    lengths, dim = _lengths(step, step.dst, shape, grid), step.dim
    n, comm, backend = sum(lengths), grid.comm(step.axes), grid.backend
    out = backend.empty((*block.shape[:dim], n, *block.shape[dim + 1 :]), block.dtype)
    if math.prod(block.shape[:dim]) == 1:  # the pieces lie one after the other in memory
        width = math.prod(block.shape[dim + 1 :])
        counts = [length * width for length in lengths]
        handle = comm.all_gather(_flat(block), out, counts, wait=how.wait, group=how.group)
        if not how.wait:
            yield handle
        return out
    for part in _parts(block.shape, dim, n):
        mine = block[part]
        rows = mine.shape[:dim] + mine.shape[dim + 1 :]
        width = math.prod(rows)
        got = backend.empty((n * width,), block.dtype)
        counts = [length * width for length in lengths]
        handle = comm.all_gather(_flat(mine), got, counts, wait=how.wait, group=how.group)
        if not how.wait:
            yield handle
        _spread(out[part], got, lengths, dim)
    return out


def _spread(out: Block, flat: Block, lengths: list[int], dim: int) -> None:
    """Write pieces that lie one after the other in `flat` to their places along `dim` of `out`."""
    width, start = math.prod(out.shape) // max(1, out.shape[dim]), 0
    lead = (slice(None),) * dim
    for length in lengths:
        shape = (*out.shape[:dim], length, *out.shape[dim + 1 :])
        out[(*lead, slice(start, start + length))] = flat[start * width : (start + length) * width].reshape(shape)
        start += length


def _reduce_scatter(block: Block, step: Step, shape: Shape, grid: Grid, owned: bool, how: Posting) -> Work:
    lengths, dim = _lengths(step, step.src, shape, grid), step.dim
    comm, backend = grid.comm(step.axes), grid.backend
    own = lengths[index_of(step.axes, grid.sizes, grid.coords)]
    out = backend.empty((*block.shape[:dim], own, *block.shape[dim + 1 :]), block.dtype)
    if math.prod(block.shape[:dim]) == 1:
        width = math.prod(block.shape[dim + 1 :])
        (send, op), (got, _) = _terms(_flat(block)), _terms(out)
        counts = [length * width for length in lengths]
        handle = comm.reduce_scatter(send, got, counts, op=op, wait=how.wait, group=how.group)
        if not how.wait:
            yield handle
        return out
    lead = (slice(None),) * dim
    for part in _parts(block.shape, dim, sum(lengths)):
        mine = block[part]
        width = math.prod(mine.shape) // max(1, mine.shape[dim])
        send = backend.empty((sum(lengths) * width,), block.dtype)
        start = 0
        for length in lengths:
            piece = mine[(*lead, slice(start, start + length))]
            send[start * width : (start + length) * width].reshape(piece.shape)[...] = piece
            start += length
        got = backend.empty((*mine.shape[:dim], own, *mine.shape[dim + 1 :]), block.dtype)
        (terms, op), (summed, _) = _terms(send), _terms(got)
        counts = [length * width for length in lengths]
        handle = comm.reduce_scatter(terms, summed, counts, op=op, wait=how.wait, group=how.group)
        if not how.wait:
            yield handle
        out[part] = got
    return out


def _parts(shape: Shape, dim: int, n: int) -> Iterator[tuple[slice, ...]]:
    """Cut the dims but `dim` so that a part, with `dim` grown to n, has at most `piece_size` elements if possible."""
    others = [d for d in range(len(shape)) if d != dim]
    size = n * math.prod(shape[d] for d in others)  # of the larger block: all ranks of the step have the same
    along = max(others, key=lambda d: shape[d])
    rows = max(1, shape[along] * piece_size(size) // max(1, size))
    for at in range(0, shape[along], rows):
        yield tuple(slice(at, min(shape[along], at + rows)) if d == along else slice(None) for d in range(len(shape)))


def _exchange(block: Block, step: Step, shape: Shape, grid: Grid, owned: bool, how: Posting) -> Work:
    sizes = grid.sizes
    peers = [{**grid.coords, **at} for at in coordinates(step.axes, sizes)]
    haves = [step.src.block(shape, sizes, at) for at in peers]
    wants = [step.dst.block(shape, sizes, at) for at in peers]
    comm = grid.comm(step.axes)
    return (yield from exchange_blocks(block, haves, wants, comm, grid.backend, wait=how.wait, tag=how.tag))


_STEPS: dict[str, Callable[[Block, Step, Shape, Grid, bool, Posting], Work]] = {
    "mask": _mask,
    "embed": _embed,
    "slice": _slice,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _exchange,
    "exchange": _exchange,
}
_COLLECTIVE = frozenset(_STEPS) - {"mask", "embed", "slice"}


def fitting(layout: Layout, shape: Shape, grid: Grid) -> Layout:
    """Return the layout, once checked against the shape and the grid."""
    check_kinds(grid, layout)
    layout.check(shape, grid.sizes)
    return layout


def check_kinds(grid: Grid, layout: Layout) -> None:
    """Raise an error unless the one is a grid and the other a layout."""
    if not isinstance(grid, Grid):
        raise GridError(
            f'a grid is a Grid, such as Grid({{"r": 2, "c": 2}}), not {grid!r}'
            + ("; a dtype goes by its name, dtype=" if isinstance(grid, type) else "")
        )
    if not isinstance(layout, Layout):
        raise LayoutError(f'a layout is a Layout, such as Layout("r", None), not {layout!r}')
