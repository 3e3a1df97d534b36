"""Handlers: which axes, which op, and what does not fit."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.parallel import DataParallel, GradientReducer, SequenceParallel, SharedParameters, ZeRO
from parlinalg.parallel.buckets import in_order
from parlinalg.parallel.handlers import Treatment, check, treatment

L = pla.Layout
SIZES = {"replica": 2, "data": 3, "s": 2, "t": 4, "one": 1}


@pytest.mark.serial
@pytest.mark.parametrize(("handlers", "layout", "want"), [
    ([], L(None), Treatment()),
    ([DataParallel(), SequenceParallel()], L(None, "t"), Treatment()),
    ([ZeRO(1)], L(None, "t"), Treatment(("data",), (), 1, "whole")),
    ([ZeRO(2)], L("t"), Treatment(("data",), (), 2, "reduce-scatter")),
    ([ZeRO(2, accumulate="whole")], L("t"), Treatment(("data",), (), 2, "whole")),
    ([ZeRO(3)], L(("t", "data")), Treatment()),
    ([ZeRO(2, ("data", "t", "one"))], L("t"), Treatment(("data",), (), 2, "reduce-scatter")),
    ([ZeRO(2, ("replica", "data"))], L("t"), Treatment(("replica", "data"), (), 2, "reduce-scatter")),
    ([SharedParameters(["head.*"], ("t", "s"))], L("s"), Treatment((), ("t",))),
    ([SharedParameters(["tail"], "t"), ZeRO(1)], L(None), Treatment(("data",), (), 1, "whole")),
])  # fmt: skip
def test_treatments(handlers, layout, want):
    check(handlers, SIZES)
    assert treatment(handlers, "head.weight", layout, SIZES) == want


@pytest.mark.serial
@pytest.mark.parametrize(("make", "told"), [
    (lambda: ZeRO(True), "stages 1, 2 and 3, not True"),
    (lambda: SharedParameters("head", "t"), "list of parameters. names, such as"),
    (lambda: check([DataParallel("batch")], SIZES), r"DataParallel is over \('batch',\), but the grid has"),
    (lambda: check([ZeRO(1), DataParallel()], SIZES), "ZeRO and DataParallel are both over axis 'data'"),
    (lambda: check(["ZeRO"], SIZES), "one of DataParallel, SequenceParallel, SharedParameters, ZeRO, not 'ZeRO'"),
])  # fmt: skip
def test_what_does_not_fit_is_told(make, told):
    with pytest.raises(pla.ConfigError, match=told):
        make()


@pytest.mark.serial
def test_buckets_fill_in_order():
    items = [("a", 1), ("b", 5), ("a", 2), ("a", 2), ("b", 5), ("a", 9), ("b", 1)]
    found = list(in_order(items, lambda i: i[0], lambda i: i[1], 3, 10))
    assert found == [
        [("b", 5)], [("a", 1), ("a", 2)], [("a", 2), ("a", 9)], [("b", 5), ("b", 1)],
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
        assert found.size == (len(range(5)[parameter.shard.start : parameter.shard.stop]) if parameter.shard else 5)
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
