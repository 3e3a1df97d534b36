"""Every layout to every other: exact values, exactly the words the target lacks, bounded memory."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import tunables
from parlinalg.comm.group import Group
from parlinalg.errors import CommError, LayoutError
from parlinalg.exchange import _split, piece_size, volume
from parlinalg.layout import Layout
from parlinalg.moves import moves, words
from parlinalg.redistribute import _parts, redistribute, start
from tests.cases import DTYPES, EVERY_SIZE, check, grids, held, lacks, layouts, numbers, pairs, terms

SHAPES = {1: [(7,), (1,), (0,)], 2: [(5, 3), (1, 7), (0, 4)], 3: [(3, 2, 5)]}
SAMPLE = {1: 400, 2: 400, 3: 330, 4: 330, 6: 120, 8: 60, 12: 25}  # of 92² pairs on three axes; --full: all


@pytest.mark.core
@pytest.mark.ranks(*EVERY_SIZE)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ndim", [1, 2, 3])
@pytest.mark.parametrize("which", [0, 1, 2], ids=["one axis", "two axes", "three axes"])
def test_any_layout_to_any_other(make_grid, world, full, tune, which, ndim):
    grid = make_grid(grids(world.size)[which])
    every = layouts(grid.axes, ndim)
    shapes, sources = SHAPES[ndim], {}
    most = None if full and ndim < 3 else SAMPLE[world.size]
    for t, (src, dst) in enumerate(pairs(every, every, most, seed=ndim)):
        for shape in shapes if full else shapes[t % len(shapes) :][:1]:
            tune(ranks=2, must=ndim > 1, MOVE_BUFFER=1 << 19 if t % 2 else 7)
            tune(must=False, SHARED_BYTES=1 << (1 if t % 4 else 18), MOVE_COMMON=3 * world.size)  # small pieces there
            expected = numbers(shape, seed=3)
            if (src, shape) not in sources:
                sources[src, shape] = terms(expected, grid, src)
            with pla.ledger(grid) as book:
                moved = sources[src, shape].redistribute(dst)
            assert moved.layout == dst
            check(moved, expected)
            got = book.words.total()
            steps = moves(src, dst, grid.sizes)
            assert got == words(src, dst, shape, grid.sizes, grid.coords), (src, dst, shape, steps)
            if not src.partial and not dst.partial:
                assert got == lacks(src, dst, shape, grid), (src, dst, shape, steps)
    for (src, shape), array in sources.items():
        check(array, numbers(shape, seed=3))  # no source was changed
        assert array.layout == src


def test_sums_count_as_the_collectives_do(make_grid, world):
    grid = make_grid({"a": world.size})
    n = 11
    src = Layout(None, partial="a")
    array = terms(numbers((n,)), grid, src)
    own = len(range(n)[grid.coords["a"] :: world.size])  # as long as its balanced piece
    for dst, expected in ((Layout("a"), n - own), (Layout(None), 2 * (n - own) if world.size > 1 else 0)):
        with pla.ledger(grid) as book:
            array.redistribute(dst)
        assert book.words.total() == (expected if world.size > 1 else 0)


@pytest.mark.parametrize("buffer", [3, 1 << 19])
def test_started_moves_finish_later(make_grid, world, tune, buffer):
    tune(ranks=2, MOVE_BUFFER=buffer)
    grid = make_grid(grids(world.size)[1])
    shape, expected = (5, 6), numbers((5, 6))
    every = layouts(grid.axes, 2)
    under_way = []
    for src, dst in pairs(every, every, 24, seed=7):
        array = terms(expected, grid, src)
        under_way.append((array, dst, start(array.block, src, dst, shape, grid)))
        if len(under_way) == 3:  # several at once, finished in the order of their start
            for array, dst, move in under_way:
                while grid.rank == 0 and not move.test():
                    pass
                block = move.wait()
                assert move.test()
                assert move.wait() is block
                check(pla.DistArray(block, shape, dst, grid), expected)
            under_way.clear()


@pytest.mark.parametrize("piece", [0, 1 << 16])
def test_moves_of_a_group_start_together(make_grid, world, tune, piece):
    """Of any layouts, shapes and dtypes: gathers and reduce-scatters over the same axes are one call, words stay."""
    tune(ranks=2, GROUPED_PIECE=piece)
    grid = make_grid(grids(world.size)[1])
    found = {ndim: list(pairs(*(layouts(grid.axes, ndim),) * 2, 24, seed=9)) for ndim in SHAPES}
    for number in range(8):
        started, group, alone = [], Group(), 0
        with pla.ledger(grid) as book:
            for ndim, shapes in SHAPES.items():
                for src, dst in found[ndim][3 * number : 3 * number + 3]:
                    shape, dtype = shapes[number % len(shapes)], (np.float64, np.float32)[number % 2]
                    array = terms(numbers(shape).astype(dtype), grid, src)
                    with pla.ledger(grid) as single:
                        array.redistribute(dst)
                    alone += single.calls.total()
                    move = start(array.block, src, dst, shape, grid, group=group)
                    started.append((move, dst, shape, numbers(shape).astype(dtype)))
            group.start()
            for move, dst, shape, expected in started:
                check(pla.DistArray(move.wait(), shape, dst, grid), expected)
        assert book.calls.total() <= 2 * alone

    shape, src, dst = (7, 4), Layout(grid.axes, None), Layout(None, None)
    unsummed = dst.with_partial(grid.axes)
    arrays = [terms(numbers(shape, seed=i), grid, src) for i in range(3)]
    view = terms(np.ascontiguousarray(numbers(shape, seed=3).T), grid, src.T).T
    with pla.ledger(grid) as book, Group() as group:
        gathers = [start(a.block, src, dst, shape, grid, group=group) for a in arrays]
        gathers.append(start(view.block, src, dst, shape, grid, order=view.order, group=group))
        parts = [terms(numbers(shape, seed=i), grid, unsummed) for i in range(2)]
        sums = [start(a.block, unsummed, src, shape, grid, group=group) for a in parts]
    for i, move in enumerate(gathers):
        check(pla.DistArray(move.wait(), shape, dst, grid), numbers(shape, seed=i))
    for i, move in enumerate(sums):
        check(pla.DistArray(move.wait(), shape, src, grid), numbers(shape, seed=i))
    if world.size > 1:
        assert book.calls.total() == (2 if piece else 6)
        received = 2 * words(unsummed, src, shape, grid.sizes, grid.coords)
        assert book.words.total() == 4 * lacks(src, dst, shape, grid) + received


def test_transposed_blocks_travel_in_their_own_order(make_grid, world):
    grid = make_grid(grids(world.size)[1])
    shape, expected = (5, 6), numbers((5, 6))
    every = layouts(grid.axes, 2)
    for src, dst in pairs(every, every, 40, seed=8):
        view = terms(np.ascontiguousarray(expected.T), grid, src.T).T
        assert view.order == (1, 0)
        with pla.ledger(grid) as book:
            moved = view.redistribute(dst)
        check(moved, expected)
        assert book.words.total() == words(src, dst, shape, grid.sizes, grid.coords) or src.partial
        three = pla.distribute(
            numbers((2, 5, 3)), grid, Layout("a", None, "b") if "b" in grid.axes else Layout("a", None, None)
        )
        turned = three.transpose(2, 0, 1)
        check(turned.redistribute(Layout(grid.axes, None, None)), numbers((2, 5, 3)).transpose(2, 0, 1))


def test_moves_are_adjoint_to_their_reverse(make_grid, world):
    """⟨Fx, y⟩ = ⟨x, F*y⟩, where the adjoint of a sum is a copy: whole and partial exchange roles."""
    grid = make_grid(grids(world.size)[-1])
    shape = (4, 5)

    def dual(layout):
        free = [a for a in grid.axes if a not in layout.axes]
        return Layout(*layout.dims, partial=free)

    def inner(one, other):
        local = float(np.vdot(held(one), held(other))) if grid.inside else 0.0
        return sum(grid.world.share(local))

    every = layouts(grid.axes, 2)
    for t, (src, dst) in enumerate(pairs(every, every, 60, seed=9)):
        x = terms(numbers(shape, seed=t), grid, src, seed=5 * t)
        y = terms(numbers(shape, seed=t + 1), grid, dual(dst), seed=7 * t)
        forward, backward = x.redistribute(dst), y.redistribute(dual(src))
        assert inner(forward, y) == inner(x, backward), (src, dst)


def test_one_element_type_is_as_good_as_another(make_grid, world):
    grid = make_grid(grids(world.size)[1])
    axes = grid.axes
    src, dst = Layout(axes[0], axes[1] if len(axes) > 1 else None), Layout(None, axes)
    for dtype in DTYPES:
        expected = numbers((6, 7), dtype)
        array = pla.distribute(expected, grid, src)
        for goal in (dst, Layout(None, None), src.T):
            moved = array.redistribute(goal)
            assert moved.dtype == dtype
            check(moved, expected)
        if dtype.kind != "b":
            check(terms(expected, grid, Layout(None, None, partial=axes)).redistribute(dst), expected)


def test_wrong_layouts_are_refused(make_grid, world):
    grid = make_grid({"a": world.size})
    x = pla.zeros((4, 5), grid, Layout("a", None))
    with pytest.raises(LayoutError, match=r"names axis 'z', but the grid has the axes .*'a'"):
        x.redistribute(Layout("z", None))
    with pytest.raises(LayoutError, match=r"describes 1 dims, but the array has shape \(4, 5\): give one entry a dim"):
        x.redistribute(Layout("a"))
    with pytest.raises(LayoutError, match=r"a layout is a Layout, such as"):
        x.redistribute("a")
    with pytest.raises(LayoutError, match="names axis 'a' twice"):
        x.redistribute(Layout("a", "a"))


@pytest.mark.mpi(min_size=2)
def test_checked_mode_finds_unequal_replicas(world, backend, monkeypatch):
    monkeypatch.setenv("PARLINALG_CHECK", "1")
    checked = world.sub(range(world.size), ("all",))
    checked.checked = True
    with pla.Grid({"a": world.size}, checked, backend) as grid:
        x = pla.distribute(numbers((4,)), grid, Layout(None))
        x.redistribute(Layout("a"))
        z = pla.distribute(numbers((4,)) * (1 + 2j), grid, Layout(None))
        z.imag.redistribute(Layout("a"))  # a view, whose elements lie apart
        if world.rank == 1:
            x.block[2] = 77
        with pytest.raises(CommError, match=r"should be the same on all ranks over \('a',\), but it is not"):
            x.redistribute(Layout("a"))
    checked.free()


@pytest.mark.timeout(120)
def test_memory_is_two_blocks_and_a_buffer(make_grid, world, backend, tune, full):
    """The peak beside the source is the target, its intermediate sums, a few bounded buffers, and two pieces."""
    if backend != "numpy":
        return  # device memory is not traced
    grid = make_grid(grids(world.size)[1])
    side = 1500 if full else 420
    expected = np.arange(side * side, dtype=float).reshape(side, side)
    buffer = 2000
    tune(ranks=2, MOVE_BUFFER=buffer)
    every = layouts(grid.axes, 2, partial=False)
    for src, dst in pairs(every, every, None if full else 12, seed=4):
        array = pla.distribute(expected, grid, src)
        tracemalloc.start()
        moved = redistribute(array.block, src, dst, array.shape, grid)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        blocks = array.block.nbytes + moved.nbytes  # the source is held already, and is not counted in the peak
        steps = moves(src, dst, grid.sizes)
        largest = max((math.prod(grid.block_shape(at, array.shape)) for s in steps for at in (s.src, s.dst)), default=0)
        bounded = 8 * (8 * max(buffer, side * world.size // 2) + 2 * -(-largest // tunables.MOVE_SHARE)) + 60_000
        assert peak <= blocks + bounded, (src, dst, moves(src, dst, grid.sizes), peak, blocks)


@pytest.mark.serial
def test_the_pieces_of_a_large_block_are_as_many_as_of_a_small_one():
    """GPT-3's MLP weight, and a model's worth of it, on 2 to 64 ranks: counted by shapes alone."""
    for rows in (12288, 96 * 12288):
        for ranks in (2, 8, 64):
            pieces = list(_parts((rows, 49152 // ranks), 1, 49152))
            assert sum(len(range(rows)[part[0]]) for part in pieces) == rows
            assert 16 <= len(pieces) <= 17
            for piece in pieces:
                assert len(range(rows)[piece[0]]) * 49152 <= piece_size(rows * 49152)
            mine, whole = rows * 49152 // ranks, (range(rows // ranks), range(49152 // ranks))
            parts = list(_split(whole, piece_size(mine)))
            assert sum(map(volume, parts)) == volume(whole)
            assert len(parts) <= max(1, 17 // ranks + 1)
            assert max(map(volume, parts)) <= piece_size(mine)
    assert piece_size(1 << 20) == tunables.MOVE_BUFFER  # small blocks go in pieces as before


@pytest.mark.parametrize("shape", [(64, 64), (256, 256), (5, 300)], ids=str)
def test_a_large_move_takes_few_messages(make_grid, world, tune, shape):
    """As many for 16 times the elements, and of uneven blocks; the words are those of the formula."""
    tune(ranks=2, MOVE_BUFFER=16)
    grid, p = make_grid({"a": world.size}), world.size
    for src, dst in ((Layout("a", None), Layout(None, "a")), (Layout(None, "a"), Layout(None, None)),
                     (Layout(None, None, partial="a"), Layout(None, "a"))):  # fmt: skip
        expected = numbers(shape, seed=3)
        array = terms(expected, grid, src)
        with pla.ledger(grid) as book:
            moved = array.redistribute(dst)
        check(moved, expected)
        assert book.words.total() == words(src, dst, shape, grid.sizes, grid.coords)
        if p > 1:
            assert book.calls.total() <= max(2 * (16 + p), 17)


@pytest.mark.ranks(1, 2, 4)
def test_the_function_of_the_package(make_grid, world):
    """Of tensors with their derivative, of arrays as arrays; the module of the same name is imported from as before."""
    grid = make_grid({"r": world.size})
    x = np.arange(15.0).reshape(5, 3)
    array = pla.distribute(x, grid, Layout("r", None))
    moved = pla.redistribute(array, Layout(None, "r"))
    assert isinstance(moved, pla.DistArray)
    assert moved.layout == Layout(None, "r")
    np.testing.assert_array_equal(moved.gather(), x)
    tensor = pla.Tensor(array, True)
    pla.ops.sum(pla.redistribute(tensor, Layout(None, "r")) * tensor.redistribute(Layout(None, "r"))).backward()
    np.testing.assert_array_equal(tensor.grad.gather(), 2 * x)
    assert tensor.grad.layout == Layout("r", None)
    with pytest.raises(TypeError, match="takes a Tensor or a DistArray, not ndarray"):
        pla.redistribute(x, Layout(None, "r"))
