"""Value semantics: an operation in place changes the array that is named, and no other, on every grid and layout."""

from __future__ import annotations

import copy
import operator

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.layout import Layout
from parlinalg.offload.arrays import DiskHome, OffloadedArray
from tests.cases import check, grids, held, layouts, numbers, pairs, same

SHAPE = (4, 1, 6)

#: Expressions whose results NumPy or a free change of layout would let share memory with x.
RESULTS = {
    "transpose": lambda x: x.T,
    "mT": lambda x: x.mT,
    "H": lambda x: x.H if isinstance(x, pla.DistArray) else x.conj().T,
    "permuted": lambda x: x.transpose(2, 0, 1),
    "np.transpose": lambda x: np.transpose(x, (1, 0, 2)),
    "swapaxes": lambda x: np.swapaxes(x, 0, 1),
    "moveaxis": lambda x: np.moveaxis(x, 0, 1),
    "conj": lambda x: x.conj(),
    "real": lambda x: x.real,
    "np.real": lambda x: np.real(x),
    "astype": lambda x: x.astype(x.dtype, copy=False),
    "whole slice": lambda x: x[:],
    "ellipsis": lambda x: x[...],
    "new dim": lambda x: x[None],
    "slice": lambda x: x[1:3],
    "steps": lambda x: x[:, :, ::2],
    "item": lambda x: x[2],
    "items": lambda x: x[1, 0],
    "one": lambda x: x[1, 0, 2],
    "empty": lambda x: x[3:1],
    "same shape": lambda x: x.reshape(x.shape),
    "reshape": lambda x: x.reshape(4, 6),
    "squeeze": lambda x: np.squeeze(x),
    "expand_dims": lambda x: np.expand_dims(x, 1),
    "broadcast": lambda x: np.broadcast_to(x, (2, 4, 1, 6)),
    "clip": lambda x: np.clip(x, None, 99),
    "positive": lambda x: +x,
    "copy": lambda x: x.copy(),
    "copy.copy": copy.copy,
    "copy.deepcopy": copy.deepcopy,
    "view of a view": lambda x: x.T[1:].T[:3],
    "part of a broadcast": lambda x: np.broadcast_to(x, (2, 4, 1, 6))[0, 1:],
}
MOVES = ["redistribute", "summed", "to_grid", "function"]
WRITES = {
    "+=": lambda y: operator.iadd(y, 1),
    "*=": lambda y: operator.imul(y, -3),
    "out=": lambda y: np.subtract(5, y, out=y),
}  # fmt: skip


@pytest.fixture(scope="module", params=[0, 1], ids=["one axis", "two axes"])
def grid(request, world, backend):
    return pla.Grid(grids(world.size)[request.param], world, backend, idle=True)


def written(write, values):
    """NumPy's answer on an array of its own."""
    mine = np.array(values)
    return write(mine)


def both_ways(x, values, make, want):
    """Write to the result and then to the source of `make`, and look at the other."""
    for write in WRITES.values():
        y = make(x)
        check(y, want)
        y = write(y)
        check(y, written(write, want))
        check(x, values)
        kept, twin, source = make(x), make(x), x.copy()
        inner = kept[...]
        again = make(source)
        source = write(source)
        check(source, written(write, values))
        check(again, want)
        write(kept)  # a result that is kept beside others of the same memory
        check(twin, want)
        check(inner, want)
        check(x, values)


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_shares_no_value_with_its_source(grid, name):
    make = RESULTS[name]
    values = numbers(SHAPE, seed=3)
    want = np.asarray(make(values))
    for layout, _ in pairs(layouts(grid.axes, 3), [0], 5, seed=len(name)):
        x = pla.distribute(values, grid, layout)
        try:
            make(x)
        except pla.LayoutError:  # a reshape of what is cut
            continue
        if layout.partial:
            y = make(x)
            y *= -3
            check(x, values)
            continue
        both_ways(x, values, make, want)


@pytest.mark.parametrize("name", MOVES)
def test_a_change_of_layout_shares_no_value_with_its_source(grid, name):
    values = numbers((5, 6), seed=4)
    every = layouts(grid.axes, 2, partial=False)
    other = pla.Grid(dict(grid.sizes), grid.world, grid.backend.name, idle=True)
    for src, dst in pairs(every, every, 12, seed=5):
        x = pla.distribute(values, grid, src)
        make = {
            "redistribute": lambda x, dst=dst: x.redistribute(dst),
            "summed": lambda x: x.summed(),
            "to_grid": lambda x, dst=dst: x.to_grid(other, dst),
            "function": lambda x, dst=dst: pla.redistribute(x, dst),
        }[name]
        both_ways(x, values, make, values)
    x = pla.distribute(values, grid, Layout(None, None))
    later = x.redistribute(Layout(None, None, partial=grid.axes))
    later *= 2
    check(x, values)
    check(later, 2 * values)
    other.close()


def test_the_real_and_the_imaginary_part_are_values_of_their_own(grid):
    values = numbers((4, 5), complex)
    for layout in (Layout(None, None), Layout(grid.axes, None)):
        x = pla.distribute(values, grid, layout)
        for part in ("real", "imag"):
            y = getattr(x, part)
            y += 7
            check(y, getattr(values, part) + 7)
            check(x, values)
            z = getattr(x, part)
            w = x.copy()
            u = getattr(w, part)
            w *= 2j
            check(u, getattr(values, part))
            check(z, getattr(values, part))
        real = pla.distribute(values.real, grid, layout)
        zeros = np.imag(real)
        zeros += 1
        check(zeros, np.ones((4, 5)))
        check(real, values.real)


def test_what_is_written_to_may_be_read_in_the_same_operation(grid):
    values = numbers((5, 5))
    for layout in (Layout(None, None), Layout(grid.axes, None)):
        x = pla.distribute(values, grid, layout)
        same(np.add(x, x[:], out=x), 2 * values)
        view = x[:]
        view += x
        same(view, 4 * values)
        same(x, 2 * values)
    x = pla.distribute(values, grid, Layout(None, None))
    np.add(x.T, 1, out=x)  # in NumPy too the result of whole operands
    same(x, values.T + 1)
    y = pla.distribute(values, grid, Layout(grid.axes, None))
    np.matmul(y, y, out=y)
    same(y, values @ values)
    z = pla.distribute(values, grid, Layout(grid.axes, None))
    turned = z.T
    pla.matmul(z, z, out=z)
    same(turned, values.T)
    held_by = z[...]
    pla.matmul(z, z, out=held_by)
    same(z, values @ values)
    same(held_by, np.linalg.matrix_power(values, 4))
    if grid.backend.name == "cupy":
        return  # CuPy's arrays take one out= in NumPy's ufuncs
    q, r = pla.distribute(values, grid, layout), pla.distribute(values, grid, layout)
    shared = q[:]
    assert np.divmod(q, 3, out=(q, r))[0] is q
    same(shared, values)
    same(q, values // 3)
    same(r, values % 3)


def test_an_operation_that_fails_changes_nothing(grid):
    values = numbers((4, 4), np.int64)
    x = pla.distribute(values, grid, Layout(grid.axes, None))
    y = x.T
    for array in (x, y):
        with pytest.raises(TypeError, match="Cannot cast"):
            array += 1.5
    same(x, values)
    same(y, values.T)


def test_writing_in_place_copies_nothing_where_nobody_else_looks(grid, xp):
    x = pla.distribute(numbers((4, 4)), grid, Layout(None, None))
    block = x.block
    x.T @ x
    x[1:] + x[:-1]
    x += 1
    assert x.block is block  # the results are gone
    y = x.T
    x += 1
    assert x.block is block  # whose memory it is keeps it
    assert not grid.inside or not np.shares_memory(held(y), held(x)) or grid.backend.name != "numpy"
    y += 1
    same(y, numbers((4, 4)).T + 2)


def test_many_views_are_forgotten(grid):
    x = pla.distribute(numbers((4, 4)), grid, Layout(None, None))
    for _ in range(1000):
        x[1:]
    assert len(x._views) < 100


def test_gathered_arrays_are_the_caller_s(grid, world):
    values = numbers((4, 3))
    for layout in (Layout(None, None), Layout(grid.axes, None), Layout(None, None, partial=grid.axes)):
        x = pla.distribute(values, grid, layout)
        whole = x.gather()
        whole += 1
        part = x.gather(root=0)
        if world.rank == 0:
            part += 1
        one = pla.distribute(values if world.rank == 0 else None, grid, layout, root=0)
        one *= 2
        check(x, values)
    mine = numbers((4, 3))
    y = pla.distribute(mine, grid, Layout(None, None), root=0)
    mine += 1
    same(y, values)
    scalar = pla.distribute(np.array(3.0), grid, Layout())
    out = scalar.gather()
    out += 1
    same(scalar, np.array(3.0))


def test_arrays_that_rest_in_a_file_are_values_too(grid, mpi_tmp_path, world):
    shape, layout = (4, 6), Layout(None, None)
    nbytes = 8 * 24
    home = DiskHome(mpi_tmp_path / f"rests.{world.rank}", nbytes)
    x = OffloadedArray(home, 0, np.dtype(float), shape, layout, grid)
    values = numbers(shape)
    x.put(grid.backend.from_host(values.ravel()[: x.block.size]))
    check(x, values)
    turned, part, cut = x.T, x[1:], x.redistribute(Layout(grid.axes, None))
    part += 1
    cut += 1
    check(x, values)
    with pytest.raises(TypeError, match=r"rests in a file or in host memory is not written in place; take a copy"):
        turned += 1
    kept = x[1:]
    if grid.backend.host_memory:
        x += 2
        check(x, values + 2)
    else:
        with pytest.raises(TypeError, match=r"not written in place; take a copy"):
            x += 2
    check(kept, values[1:])
    home.close()
