"""Handlers: which axes, which op, and what does not fit."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.autograd import no_sync
from parlinalg.parallel import DataParallel, GradientReducer, SequenceParallel, SharedParameters, ZeRO

L = pla.Layout
AXES = ("replica", "data", "t", "s")
REDUCE, SCATTER, EACH = "all_reduce", "reduce_scatter", "reduce_scatter of each microbatch"


@pytest.mark.ranks(4, 8)
@pytest.mark.parametrize(("handlers", "layout", "want"), [
    ([], L(None), {}),
    ([DataParallel(), SequenceParallel()], L(None, "t"), {}),
    ([ZeRO(1)], L(None, "t"), {SCATTER: {"data"}}),
    ([ZeRO(2)], L("t"), {EACH: {"data"}}),
    ([ZeRO(2, accumulate="whole")], L("t"), {SCATTER: {"data"}}),
    ([ZeRO(3)], L(("t", "data")), {}),
    ([ZeRO(2, ("data", "t", "s"))], L("t"), {EACH: {"data"}}),
    ([ZeRO(2, ("replica", "data"))], L("t"), {EACH: {"replica", "data"}}),
    ([SharedParameters(["head.*"], ("t", "data"))], L("data"), {REDUCE: {"t"}}),
    ([SharedParameters(["tail"], "t"), ZeRO(1)], L(None), {SCATTER: {"data"}}),
])  # fmt: skip
def test_treatments(handlers, layout, want, make_grid, world):
    """What becomes of a gradient that the layouts call whole: along which axes it is summed, and how often."""
    for sizes in {4: [(1, 2, 2), (2, 2, 1)], 8: [(2, 2, 2), (1, 4, 2)]}[world.size]:
        grid = make_grid(dict(zip(AXES, (*sizes, 1), strict=True)))
        shape, books = (8,) if layout.ndim == 1 else (3, 8), []
        for name in ("alone.weight", "head.weight"):
            p = pla.Parameter(pla.ones(shape, grid, layout), name)
            if name == "head.weight":
                GradientReducer([p], handlers)
            with pla.ledger(grid) as book:
                for microbatch in range(3):
                    with no_sync() if microbatch < 2 else nullcontext():
                        (p * 2.0).sum().backward()
            many = {a for a, n in grid.sizes.items() if n > 1}
            books.append(Counter({(op, frozenset(many & {*axes})): n for (op, axes), n in book.calls.items()}))
        found = books[1] - books[0]  # but for the sums of the loss itself
        expected = {}
        for op, axes in want.items():
            if cut := frozenset(a for a in axes if grid.sizes[a] > 1):
                expected[op.split()[0], cut] = 3 if op == EACH else 1
        assert found == expected, sizes
        scattered = {a for op, axes in want.items() if op != REDUCE for a in axes if grid.sizes[a] > 1}
        assert bool(p.storage.axes) == bool(scattered)


@pytest.mark.serial
@pytest.mark.parametrize(("make", "told"), [
    (lambda: ZeRO(True), "stages 1, 2 and 3, not True"),
    (lambda: SharedParameters("head", "t"), "list of parameters. names, such as"),
    ([DataParallel("batch")], r"DataParallel is over \('batch',\), but the grid has"),
    ([ZeRO(1), DataParallel()], "ZeRO and DataParallel are both over axis 'data'"),
    (["ZeRO"], "one of DataParallel, SequenceParallel, SharedParameters, ZeRO, not 'ZeRO'"),
])  # fmt: skip
def test_what_does_not_fit_is_told(make, told, make_grid):
    grid = make_grid({"data": 1})
    with pytest.raises(pla.ConfigError, match=told):
        make() if callable(make) else GradientReducer([pla.Parameter(pla.ones(3, grid, L(None)))], make)


@pytest.mark.serial
def test_buckets_fill_in_order(make_grid):
    """Gradients of two dtypes, each a multiple of 8 bytes, in the order in which they arrive."""
    grid = make_grid({"one": 1})
    items = [("float64", 1), ("float32", 5), ("float64", 2), ("float64", 2), ("float32", 5), ("float64", 9),
             ("float32", 1)]  # fmt: skip
    ps = [pla.Parameter(pla.ones(8 * n // np.dtype(t).itemsize, grid, L(None), t)) for t, n in items]
    reducer, y = GradientReducer(ps, None, 3 * 8, 10 * 8), pla.Tensor(pla.ones((), grid, L()))
    for p in reversed(ps):  # the last one's gradient arrives first
        y = y * p.astype("float64").sum()
    y.backward()
    found = [[(b.data.dtype.name, s.view.nbytes // 8) for s in b.slots] for b in reducer.buckets]
    assert found == [
        [("float32", 5)], [("float64", 1), ("float64", 2)], [("float64", 2), ("float64", 9)],
        [("float32", 5), ("float32", 1)],
    ]  # fmt: skip


@pytest.mark.parametrize("handlers", [[], [ZeRO(2, "place")]])
def test_copies_used_in_different_places_are_summed(handlers, make_grid, world):
    """Ranks use copies of one parameter on data of their own, which no layout tells of."""
    grid = make_grid({"place": world.size})
    p, q = (pla.Parameter(pla.zeros(5, grid, L(None)), name) for name in ("tied.weight", "plain"))
    GradientReducer([p, q], [SharedParameters(["tied.*"], "place"), *handlers])
    own = pla.DistArray(pla.full(5, 1.0, grid, L(None)).block * (1 + world.rank), (5,), L(None), grid)
    same = pla.ones(5, grid, L(None))
    (pla.Tensor(own) * p + pla.Tensor(same) * q).sum().backward()
    for parameter, want in ((p, world.size * (world.size + 1) // 2), (q, 1)):
        found = parameter.updated[1]
        start, stop = parameter.storage.partition(parameter.data)[:2]
        assert found.size == stop - start == (5 if not parameter.storage.axes else len(range(5)[start:stop]))
        np.testing.assert_array_equal(grid.backend.to_host(found), np.full(found.size, float(want)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("handlers", [[], [ZeRO(1)], [ZeRO(2)]])
def test_a_pass_that_an_error_broke_off_leaves_nothing(handlers, make_grid, world):
    grid = make_grid({"data": world.size})
    ps = [pla.Parameter(pla.ones(3, grid, L(None)), f"p{i}") for i in range(3)]
    reducer = GradientReducer(ps, handlers, first_bucket=1, bucket=1)
    x = pla.ones((4, 3), grid, L("data", None))

    def backward():
        y = pla.Tensor(x)
        for p in ps:
            y = y * p
        y.sum().backward()

    backward()
    for p in ps:
        p.grad = None
    plain, calls = reducer.poll, []

    def broken():
        calls.append(plain())
        if len(calls) == 3:
            raise MemoryError

    reducer.poll = broken
    with pytest.raises(MemoryError):
        backward()
    backward()
    for p in ps:
        np.testing.assert_array_equal(grid.backend.to_host(p.updated[1]), np.full(p.updated[1].size, 4.0))
