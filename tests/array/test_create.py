"""Making arrays, and taking them apart again: every creation function, on every grid, in every layout."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.errors import LayoutError
from parlinalg.layout import Layout
from tests.cases import DTYPES, check, eps, grids, held, layouts, numbers, pairs, same


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["one axis", "two axes", "three axes"])
def grid(request, world, backend):
    return pla.Grid(grids(world.size)[request.param], world, backend, idle=True)


def test_constants_and_functions(grid):
    for shape in ((), (5,), (0,), (4, 7), (2, 0, 3)):
        for layout, _ in pairs(layouts(grid.axes, len(shape)), [0], 6):
            check(pla.zeros(shape, grid, layout), np.zeros(shape))
            check(pla.ones(shape, grid, layout, np.float32), np.ones(shape, np.float32))
            check(pla.full(shape, 7, grid, layout), np.full(shape, 7))
            made = pla.from_function(lambda *at: sum((d + 2) * i for d, i in enumerate(at)), shape, grid, layout, float)
            check(
                made,
                np.fromfunction(lambda *at: sum((d + 2) * i for d, i in enumerate(at)), shape)
                if shape
                else np.zeros(()),
            )
            assert pla.empty(shape, grid, layout, np.int8).dtype == np.int8
    for layout, _ in pairs(layouts(grid.axes, 2), [0], 8):
        check(pla.eye(5, grid=grid, layout=layout), np.eye(5))
        check(pla.eye(3, 6, grid=grid, layout=layout, dtype=np.complex64), np.eye(3, 6, dtype=np.complex64))
    assert pla.zeros(4, grid, Layout(None)).shape == (4,)
    assert pla.full((2,), 1.5, grid, Layout(None)).dtype == np.float64
    assert pla.full((2,), True, grid, Layout(None)).dtype == np.bool_
    with pytest.raises(ValueError, match=r"no negative sizes: \(2, -1\)"):
        pla.zeros((2, -1), grid, Layout(None, None))


BAD_SHAPES = {
    (3.5, 4): (TypeError, r"the shape \(3.5, 4\) has the size 3.5"),
    (4, "2"): (TypeError, "has the size '2'"),
    (True, 4): (TypeError, "has the size True"),
    (2, None): (TypeError, "has the size None"),
    (2, (3,)): (TypeError, r"has the size \(3,\)"),
    None: (TypeError, "not (None|2.0)"),
    2.0: (TypeError, "not 2.0"),
    (4, -1): (ValueError, r"no negative sizes: \(4, -1\)"),
    (2**40, 2**40): (ValueError, f"would have {2**80} elements"),
}


@pytest.mark.parametrize("shape", BAD_SHAPES, ids=str)
def test_bad_shapes_are_named_by_every_function(grid, shape):
    kind, text = BAD_SHAPES[shape]
    whole = Layout(None, None)
    block = np.zeros(grid.block_shape(whole, (4, 4)))
    for make in (
        lambda: pla.zeros(shape, grid, whole),
        lambda: pla.ones(shape, grid, whole),
        lambda: pla.empty(shape, grid, whole),
        lambda: pla.full(shape, 7, grid, whole),
        lambda: pla.from_function(lambda i, j: i + j, shape, grid, whole),
        lambda: pla.from_blocks(block, grid, whole, shape or 2.0),
        lambda: pla.random.uniform(shape, grid, whole),
        lambda: pla.random.integers(shape, grid, whole, 0, 9),
    ):
        with pytest.raises(kind, match=text):
            make()
    if isinstance(shape, tuple) and None not in shape:
        with pytest.raises(kind, match=text):
            pla.eye(*shape, grid=grid, layout=whole)
        with pytest.raises((TypeError, ValueError)):
            pla.zeros((4, 4), grid, whole).reshape(*shape[:1], 3)
    assert pla.zeros((np.int64(2), np.uint8(3)), grid, whole).shape == (2, 3)
    assert pla.zeros(np.array([2, 3]), grid, whole).shape == (2, 3)
    assert pla.zeros((2, 6), grid, whole).reshape(np.int64(3), np.int64(-1)).shape == (3, 4)


def test_masks_are_not_lost(grid, world):
    """On all ranks, also where one alone holds the array."""
    plain, layout = np.arange(4.0).reshape(2, 2), Layout(None, None)
    masked = np.ma.masked_greater(plain, 1)
    alone = masked if world.rank == 0 else None
    mixed = masked if world.rank == 0 else plain
    for make in (
        lambda: pla.distribute(masked, grid, layout),
        lambda: pla.distribute(alone, grid, layout, root=0),
        lambda: pla.distribute(mixed, grid, layout),
        lambda: pla.from_blocks(masked, grid, layout),
        lambda: pla.from_blocks(mixed, grid, layout),
        lambda: pla.from_function(lambda i, j: np.ma.masked_greater(i + j, 1), (2, 2), grid, layout),
        lambda: pla.full((2, 2), np.ma.masked, grid, layout),
    ):
        with pytest.raises(TypeError, match=r"its mask would be lost: give array\.filled"):
            make()
    for value in (np.ma.masked, masked):
        with pytest.raises(TypeError):
            pla.distribute(plain, grid, layout) + value
    check(pla.distribute(masked.filled(0), grid, layout), np.array([[0.0, 1], [0, 0]]))


def test_distribute_from_every_rank_and_from_one(grid, world):
    for i, dtype in enumerate(DTYPES):
        shape = ((5, 6), (1, 7), (0, 3), (4,), ())[i % 5]
        expected = numbers(shape, dtype, seed=i)
        for layout, _ in pairs(layouts(grid.axes, len(shape), partial=dtype.kind != "b"), [0], 3, seed=i):
            array = pla.distribute(expected, grid, layout)
            assert (array.shape, array.dtype, array.layout, array.grid) == (shape, dtype, layout, grid)
            check(array, expected)
            root = i % world.size
            alone = pla.distribute(expected if world.rank == root else None, grid, layout, root=root)
            assert alone.dtype == dtype
            check(alone, expected)
            everywhere, there = array.gather(), array.gather(root=root)
            np.testing.assert_array_equal(everywhere, expected)
            assert everywhere.dtype == dtype
            if world.rank == root:
                np.testing.assert_array_equal(there, expected)
            else:
                assert there is None


def test_distribute_copies(make_grid, world):
    grid = make_grid({"a": world.size})
    mine = numbers((6,))
    array = pla.distribute(mine, grid, Layout("a"))
    mine[:] = 99
    check(array, numbers((6,)))
    gathered = pla.distribute(numbers((6,)), grid, Layout(None)).gather()
    gathered[:] = 5
    check(array, numbers((6,)))


def test_distribute_takes_lists_and_views(make_grid, world):
    grid = make_grid({"a": world.size})
    same(pla.distribute([[1, 2, 3], [4, 5, 6]], grid, Layout(None, "a")), np.array([[1, 2, 3], [4, 5, 6]]))
    same(pla.distribute(2.5, grid, Layout()), np.array(2.5))
    view = numbers((6, 8))[::2, ::-1].T
    same(pla.distribute(view, grid, Layout("a", None)), view)


@pytest.mark.parametrize("order", ["<", ">"])
def test_arrays_of_any_byte_order(grid, world, order):
    """Blocks have the machine's: what travels, and what is summed, is read alike on all ranks."""
    for i, dtype in enumerate(d for d in DTYPES if d.itemsize > 1 and d.kind in "fiuc"):
        other = dtype.newbyteorder(order)
        values = numbers((5, 6), other, seed=i)
        for layout, then in pairs(layouts(grid.axes, 2), layouts(grid.axes, 2), 3, seed=i):
            root = i % world.size
            summed = layout.with_partial(())
            part = tuple(slice(r.start, r.stop) for r in grid.block(summed, (5, 6)))
            for x in (
                pla.distribute(values, grid, layout),
                pla.distribute(values if world.rank == root else None, grid, layout, root=root),
                pla.from_function(lambda i, j, values=values: values[i, j], (5, 6), grid, layout),
                pla.from_function(lambda i, j, values=values: values[i, j], (5, 6), grid, layout, other),
                pla.distribute(values, grid, layout).astype(other),
                pla.from_blocks(values[part], grid, summed, (5, 6)),
            ):
                assert x.dtype.isnative
                assert x.block.dtype.isnative
                same(x, values.astype(dtype))
                check(x.redistribute(then), values)
                same(x.sum(0), values.sum(0), eps(dtype))
        for x in (pla.zeros(3, grid, Layout(None), other), pla.full(3, 2, grid, Layout(None), other),
                  pla.empty(3, grid, Layout(None), other),
                  pla.eye(3, grid=grid, layout=Layout(None, None), dtype=other),
                  np.zeros_like(pla.ones(3, grid, Layout(None)), dtype=other)):  # fmt: skip
            assert x.dtype == dtype
            assert x.block.dtype.isnative


def test_distribute_refuses(make_grid, world):
    grid = make_grid({"a": world.size})
    with pytest.raises(
        TypeError, match=r"dtype <U1 cannot|dtype str\d* cannot be distributed; it may be one of bool, int8"
    ):
        pla.distribute(np.array(["x"]), grid, Layout("a"))
    with pytest.raises(TypeError, match="dtype object cannot be distributed"):
        pla.distribute(np.array([None]) if world.rank == 0 else None, grid, Layout("a"), root=0)
    with pytest.raises(TypeError, match=r"is a DistArray already: use \.redistribute\(layout\) or \.to_grid"):
        pla.distribute(pla.zeros((2,), grid, Layout("a")), grid, Layout("a"))
    with pytest.raises(LayoutError, match=r"describes 1 dims, but the array has shape \(2, 2\)"):
        pla.distribute(np.zeros((2, 2)), grid, Layout("a"))
    with pytest.raises(LayoutError, match=r"Layout\('z'\) names axis 'z', but the grid has the axes"):
        pla.zeros((3,), grid, Layout("z"))
    with pytest.raises(LayoutError, match=f"root {world.size} is not one of the {world.size} ranks, 0 to"):
        pla.distribute(np.zeros(2), grid, Layout("a"), root=world.size)


@pytest.mark.mpi(min_size=2)
def test_distribute_finds_that_ranks_pass_different_arrays(make_grid, world):
    grid = make_grid({"a": world.size})
    with pytest.raises(
        LayoutError, match=r"rank 0 float64\(3,\), rank 1 float64\(4,\); pass the same global array, or root="
    ):
        pla.distribute(np.zeros(4 if world.rank == 1 else 3), grid, Layout("a"))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("n", [1, 4, 700, 5000])
def test_ranks_that_make_different_arrays_are_told(make_grid, world, n):
    """Random numbers without a common seed, handed in or computed, in small arrays and large ones."""
    grid = make_grid({"a": world.size})
    rng = np.random.default_rng(world.rank)
    mine, odd = rng.random((n, 3)), world.rank == world.size - 1
    last = world.size - 1
    with pytest.raises(LayoutError, match=r"ranks pass different arrays to distribute: rank 0 .*checksum .*root="):
        pla.distribute(mine, grid, Layout("a", None))
    tail = np.zeros((n, 3))
    tail[-1, -1] = odd
    with pytest.raises(LayoutError, match=rf"different arrays to distribute: rank 0 .*, rank {last} "):
        pla.distribute(tail, grid, Layout(None, None))
    with pytest.raises(LayoutError, match=rf"rank 0 with layout .*None.* and root=None, rank {last} with .*root=0"):
        pla.distribute(tail, grid, Layout(None, None), root=0 if odd else None)
    with pytest.raises(LayoutError, match=rf"distribute differently: rank 0 with .*, rank {last} with"):
        pla.distribute(np.zeros((n, 3)), grid, Layout(None, "a") if odd else Layout("a", None))
    with pytest.raises(
        pla.CommError, match=r"from_function makes blocks .* that should be replicas.*parlinalg\.random"
    ):
        pla.from_function(lambda i, j: rng.random((n, 3)), (n, 3), grid, Layout(None, None))
    with pytest.raises(pla.CommError, match=r"full makes blocks .* rank"):
        pla.full((n, 3), rng.random(), grid, Layout(None, None))
    with pytest.raises(pla.CommError, match="from_function different values of dtype"):
        pla.from_function(lambda i, j: i + (0.5 if odd else 0), (n, 3), grid, Layout(None, None))
    with pytest.raises(LayoutError, match=r"from_blocks: ranks 0 and \d hold the same part of .* different blocks"):
        pla.from_blocks(mine, grid, Layout(None, None))
    check(pla.from_function(lambda i, j: rng.random((1, 1)) * 0 + i, (n, 3), grid, Layout("a", None)),
          np.broadcast_to(np.arange(n, dtype=float)[:, None], (n, 3)))  # fmt: skip
    terms_of = pla.from_blocks(mine, grid, Layout(None, None, partial="a"))
    assert terms_of.layout.partial == ("a",)


def test_a_function_that_is_not_elementwise_is_named(make_grid, world):
    grid = make_grid({"a": world.size})
    for wrong in ((3, 2), (2, 5, 3), (7,)):
        with pytest.raises(
            ValueError, match=r"from_function: the function returns an array of shape .* for the block of"
        ):
            pla.from_function(lambda i, j, wrong=wrong: np.zeros(wrong), (5, 3), grid, Layout(None, None))


def test_from_blocks(make_grid, world, xp):
    grid = make_grid({"a": world.size})
    n = 2 * world.size + 1
    expected = numbers((n, 3))
    whole = pla.distribute(expected, grid, Layout("a", None))
    check(pla.from_blocks(whole.block, grid, Layout("a", None)), expected)
    check(pla.from_blocks(whole.block, grid, Layout("a", None), shape=(n, 3)), expected)
    check(pla.from_blocks(held(whole), grid, Layout("a", None)), expected)  # a host array goes to the grid's backend
    with pytest.raises(
        LayoutError,
        match=rf"rank 0 gives a block of shape .*global shape \({n + world.size}, 3\) gives it \(3, 3\)|gives it",
    ):
        pla.from_blocks(whole.block, grid, Layout("a", None), shape=(n + world.size, 3))
    with pytest.raises(LayoutError, match="describes 1 dims"):
        pla.from_blocks(whole.block, grid, Layout("a"))


@pytest.mark.mpi(min_size=2)
def test_from_blocks_checks_every_rank(make_grid, world, xp):
    grid = make_grid({"a": world.size})
    odd = world.rank == world.size - 1
    with pytest.raises(LayoutError, match=r"gives a block of shape .* gives it .*pieces of the dims: \[\["):
        pla.from_blocks(xp.zeros(5 if odd else 2), grid, Layout("a"))  # the longer piece comes last
    with pytest.raises(
        LayoutError, match=f"rank {world.size - 1} gives a block of dtype float32, rank 0 one of float64"
    ):
        pla.from_blocks(xp.zeros(2, np.float32 if odd else np.float64), grid, Layout("a"))
    with pytest.raises(LayoutError, match=f"rank {world.size - 1}"):
        pla.from_blocks(xp.zeros((2, 2) if odd else 2), grid, Layout("a"))


def test_from_blocks_copies_nothing(make_grid, world, xp):
    grid = make_grid({"a": world.size})
    block = xp.zeros(3)
    assert pla.from_blocks(block, grid, Layout("a")).block is block


def test_array_is_asarray_with_a_copy(grid):
    for data in ([[1, 2], [3, 4]], np.arange(7.0), 3.5, []):
        check(pla.array(data, grid=grid), np.array(data))
        check(pla.array(data, np.float32, grid=grid), np.array(data, np.float32))
    x = pla.array(range(5), grid=grid)
    y = pla.array(x)
    y += 1
    check(x, np.arange(5))
    assert pla.array(x, copy=False) is x


def test_one_rank_prints(world, backend, capsys):
    grid = pla.Grid({"a": world.size}, world, backend)
    with grid:
        pla.print0("x:", pla.arange(world.size + 1), 2.5, sep="|", end=".\n")
    out = capsys.readouterr().out
    assert (out.startswith("x:|DistArray(") and out.endswith("|2.5.\n")) if world.rank == 0 else not out
