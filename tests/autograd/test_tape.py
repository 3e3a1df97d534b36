"""The walk: order, gradients of parameters, microbatches, and what a wrong rule is caught by."""

from __future__ import annotations

import gc
import weakref
from itertools import permutations
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Grid, Layout, LayoutError, Parameter, Plan, Tensor
from parlinalg.autograd import Part, ops, record, settle, start_walk
from parlinalg.autograd.check import GradientError
from parlinalg.autograd.gradients import GradientAccumulator
from parlinalg.grid import factorizations
from tests.autograd.cases import TERMS, cut, gradient_of_terms, numbers, tensor, term

X, W, V = numbers(6, 5), numbers(5, 4), numbers(4)
ROWS = Plan((("a", "b"),), (None,), (None,), Layout(("a", "b"), None), Layout(None, None), Layout(("a", "b"), None))
IDS = np.arange(6) % 4


def parameters(grid: Grid) -> tuple[Parameter, Parameter]:
    return Parameter(cut(W, grid, ROWS.w), "w"), Parameter(cut(V, grid, Layout(None)), "v")


def loss_of(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    y = ops.gelu(ops.matmul(x, w, ROWS) + v)
    return ops.cross_entropy(y + ops.matmul(x, w, ROWS) * v, cut(IDS, x.grid, Layout(("a", "b"))))


def known(serial: Grid) -> list[np.ndarray]:
    x, w, v = tensor(X, serial, ROWS.x), *parameters(serial)
    loss_of(x, w, v).backward()
    return [t.grad.gather() for t in (x, w, v) if t.grad is not None]


class Recorder:
    """A reducer that settles at the end, and remembers what came."""

    def __init__(self, *parameters: Parameter) -> None:
        self.parameters = parameters
        self.came: list[tuple[Parameter, Any, Layout]] = []
        self.polls = self.finished = 0
        for p in parameters:
            p.reducer = self

    def ready(self, parameter: Parameter, block: Any, layout: Layout, *, sync: bool) -> None:
        self.came.append((parameter, block, layout))

    def poll(self) -> None:
        self.polls += 1

    def finish(self, *, sync: bool) -> None:
        self.finished += 1
        for p, block, layout in self.came:
            p.deposit(pla.DistArray(block, p.shape, layout, p.grid).summed().block.copy())


def test_gradients_of_parameters_stay_partial_until_their_reducer_settles_them(grid: Grid, serial: Grid) -> None:
    x, w, v = tensor(X, grid, ROWS.x), *parameters(grid)
    reducer = Recorder(w, v)
    loss_of(x, w, v).backward()
    assert [p.name for p, _, _ in reducer.came] == ["v", "w"]  # once each, when their last terms have arrived
    assert reducer.finished == 1
    assert reducer.polls > 5
    axes = tuple(a for a in ("a", "b") if grid.sizes[a] > 1)
    assert all(layout == Layout(*[None] * p.ndim, partial=axes) for p, _, layout in reducer.came)
    for found, right in zip((x, w, v), known(serial), strict=True):
        np.testing.assert_allclose(found.grad.gather(), right, rtol=0, atol=1e-14)  # type: ignore[union-attr]


def test_microbatches_share_one_reduction(grid: Grid, serial: Grid) -> None:
    w, v = parameters(grid)
    half = [tensor(X, grid, ROWS.x, wants=False) for _ in range(3)]
    for twice in range(2):
        with pla.ledger(grid) as book, pla.no_sync():
            for x in half[:2]:
                (loss_of(x, w, v) / 3).backward()
        assert w.grad is not None
        assert set(w.grad.layout.partial) == {a for a in ("a", "b") if grid.sizes[a] > 1}
        within = book.calls.total()
        with pla.ledger(grid) as book:
            (loss_of(half[2], w, v) / 3).backward()
        if grid.size > 1:
            assert book.calls.total() == within // 2 + 2  # w and v, once each
        for p, right in zip((w, v), known(serial)[1:], strict=True):
            assert p.grad is not None
            assert not p.grad.layout.partial
            np.testing.assert_allclose(p.grad.gather(), right * (twice + 1), rtol=0, atol=1e-13)


def test_parameters_reached_by_a_part_of_the_microbatches_only(grid: Grid) -> None:
    w, v = parameters(grid)
    x = tensor(X, grid, ROWS.x, wants=False)
    with pla.no_sync():
        (ops.matmul(x, w, ROWS) * v).sum().backward()
    ops.matmul(x, w, ROWS).sum().backward()
    assert v.grad is not None
    settle([w, v])
    np.testing.assert_allclose(v.grad.gather(), (X @ W).sum(0), rtol=1e-12)
    assert w.grad is not None
    np.testing.assert_allclose(w.grad.gather(), np.outer(X.sum(0), V + 1), rtol=1e-12)


@pytest.mark.always
@pytest.mark.parametrize("several", [2, 3, 4])
def test_terms_partial_over_unlike_axes_count_once(several: int, make_grid: Any, world: Any) -> None:
    """A term that lacks one of the axes or both counts on one rank along each, whichever came first."""
    for a, b in factorizations(world.size, 2):
        grid = make_grid({"a": a, "b": b})
        for kinds in permutations(TERMS, several):
            w = Parameter(cut(W, grid, ROWS.w), "w")
            terms = [term(axes, w, seed) for seed, axes in enumerate(kinds)]
            sum(terms[1:], start=terms[0]).backward()
            assert w.grad is not None
            want = gradient_of_terms(W.shape, range(several))
            np.testing.assert_allclose(w.grad.gather(), want, rtol=1e-12, err_msg=f"{a} × {b}: {kinds}")
            with pla.no_sync():  # the terms stay partial, over the axes of all of them
                terms = [term(axes, w, seed) for seed, axes in enumerate(kinds)]
                sum(terms[1:], start=terms[0]).backward()
                term(kinds[0], w, 7).backward()
            term(kinds[1], w, 8).backward()
            want = 2 * want + gradient_of_terms(W.shape, (7, 8))
            np.testing.assert_allclose(w.grad.gather(), want, rtol=1e-12, err_msg=f"{a} × {b}: {kinds}, by passes")


def test_parameters_can_wait_for_later(grid: Grid, serial: Grid) -> None:
    """Zero-bubble schedules run the parameters' part of the walk apart, with the gathered gradient kept between."""
    x, w, v = tensor(X, grid, ROWS.x), *parameters(grid)
    reducer = Recorder(w)
    walk = start_walk(loss_of(x, w, v), later=True)
    walk.run()
    assert x.grad is not None
    assert w.grad is v.grad is None
    assert not reducer.finished
    walk.run_parameters()
    assert reducer.finished == 1
    for found, right in zip((x, w, v), known(serial), strict=True):
        np.testing.assert_allclose(found.grad.gather(), right, rtol=0, atol=1e-14)  # type: ignore[union-attr]


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_weights_made_of_parameters_wait_for_later_too(again: bool, grid: Grid) -> None:
    """Those that keep no arrays, in the order of an uncut pass."""
    ids = cut(IDS, grid, Layout(("a", "b")))

    def leaves() -> list[Tensor]:
        return [tensor(X, grid, ROWS.x), Parameter(cut(W.T, grid, ROWS.w), "w"), parameters(grid)[1]]

    def loss_of(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        right, bias, gate = w.T * 0.5, (v.astype("float32").astype("float64") + v)[None], ops.tanh(v)

        def product(x: Tensor) -> Tensor:
            return ops.matmul(ops.matmul(x, right, ROWS), w, ROWS)

        y = pla.autograd.recompute(product, x) if again else product(x)
        return ops.cross_entropy(ops.matmul(y, right, ROWS) * gate + bias, ids)

    whole, parted = leaves(), leaves()
    loss_of(*whole).backward()
    walk = start_walk(loss_of(*parted), later=True)
    walk.run()
    assert {node.op for node in walk.nodes if node.sources and not node.used} == {
        "transpose", "multiply", "astype", "add", "getitem"
    }  # fmt: skip
    assert parted[1].grad is parted[2].grad is None
    walk.run_parameters()
    assert all(node.used for node in walk.nodes if node.sources)
    for one, other in zip(whole, parted, strict=True):
        np.testing.assert_array_equal(one.grad.gather(), other.grad.gather())  # type: ignore[union-attr]


def test_of_a_stage_that_is_first_only_parameters_wait(grid: Grid) -> None:
    """All of its values are made of parameters and constants."""
    table, v = Parameter(cut(numbers(4, 3), grid, Layout(None, None)), "table"), parameters(grid)[1]
    rows = Layout(("a", "b"), None)
    plan = Plan((("a", "b"),), (None,), (None,), rows, Layout(None, None), rows)
    y = ops.gelu(ops.embedding(cut(IDS, grid, Layout(("a", "b"))), table, plan))
    walk = start_walk((ops.exp(ops.matmul(y, table.T, plan) + v)).sum(), later=True)
    walk.run()
    assert [node.op for node in walk.nodes if node.sources and not node.used] == ["transpose"]
    walk.run_parameters()
    assert v.grad is not None


def test_unequal_terms_are_brought_together_and_moved_once(grid: Grid) -> None:
    """Three partial gradients and a whole one cost one all-reduce."""
    axes = tuple(a for a in grid.axes if grid.sizes[a] > 1)
    x = tensor(W, grid, Layout(None, None))
    parts: list[Any] = [lambda g, a=a: (g, Layout(None, None, partial=a)) for a in axes for _ in range(2)]
    parts.append(lambda g: (g, Layout(None, None)))
    y = record("several", x.data * 1, [x] * len(parts), parts)
    with pla.ledger(grid) as book:
        y.backward(pla.ones(W.shape, grid, Layout(None, None)))
    assert x.grad is not None
    np.testing.assert_array_equal(x.grad.gather(), 1 + sum(2 * grid.sizes[a] for a in axes))
    assert book.calls.total() == (1 if axes else 0)


def test_the_ranks_issue_the_same_collectives_in_the_same_order(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where most ranks hold nothing; a tape kept in a set would not."""
    issued: list[list[Any]] = []
    comms = {id(c): c for c in (grid.comm(("a",)), grid.comm(("b",)), grid.comm(("a", "b"))) if c.size > 1}
    for comm in comms.values():
        for op in ("all_gather", "reduce_scatter", "all_reduce"):

            def spy(*args: Any, run: Any = getattr(comm, op), what: Any = (comm, op), **kwargs: Any) -> Any:
                issued.append([*what, args[0].dtype.name])
                return run(*args, **kwargs)

            monkeypatch.setattr(comm, op, spy)
    for rows in (6, 1):
        plan = Plan(("a",), ("b",), (None,), Layout("a", "b"), Layout("a", "b"), Layout("a", "b"))
        x, w = tensor(X[:rows], grid, plan.x), Parameter(cut(W, grid, plan.w))
        branches = [ops.matmul(x * i, w, plan) for i in range(1, 4)]
        total = branches[2] + branches[0] * branches[1]
        ops.cross_entropy(total, cut(IDS[:rows], grid, Layout("a"))).backward()
    monkeypatch.undo()
    assert grid.size == 1 or len(issued) >= 10
    for comm in comms.values():  # a communicator all of whose ranks hold nothing may be left out
        mine = [rest for at, *rest in issued if at is comm]
        assert all(theirs == mine for theirs in comm.share(mine))


def test_a_wrong_rule_is_caught(widest: Grid) -> None:
    """A gradient that lacks its sum over the ranks, one that is off by a factor, and one that is NaN."""
    x = tensor(X, widest, ROWS.x)
    v = tensor(numbers(5), widest, Layout(None))
    over = ROWS.x.dims[0]

    def scale(factor: Any, partial: tuple[str, ...]) -> Any:
        def times(x: Tensor, v: Tensor) -> Tensor:
            y = x.data * v.data
            rest = Layout(None, partial=partial)
            wide = x.layout
            dx, dv = (lambda g, v: (g * v, wide)), (lambda g, x: ((g * x).sum(0) * factor, rest))
            return record("scaled", y, [x, v], [Part(dx, v.block), Part(dv, x.block)])

        return times

    pla.check_gradients(scale(1, over), [x, v], directions=2)
    wrong = [scale(1.001, over), scale(np.nan, over)] + ([scale(1, ())] if widest.size > 1 else [])
    for function in wrong:
        with pytest.raises(GradientError, match="the gradient of input 1 along"):
            pla.check_gradients(function, [x, v], directions=2)
    with pytest.raises(TypeError, match="need float64"):
        pla.check_gradients(lambda x: x, [tensor(X.astype(np.float32), widest, ROWS.x)])


def test_gradients_add_up_and_share_no_memory(grid: Grid) -> None:
    x, y = tensor(X, grid, ROWS.x), tensor(X, grid, ROWS.x)
    for _ in range(2):
        (x + y + x).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    np.testing.assert_array_equal(x.grad.gather(), np.full(X.shape, 4.0))
    np.testing.assert_array_equal(y.grad.gather(), np.full(X.shape, 2.0))
    x.grad = y.grad = None
    z = x + y
    grad = pla.ones(X.shape, grid, ROWS.x)
    z.backward(grad)
    assert x.grad is not None
    x.grad.block[...] = 7
    assert y.grad is not None
    assert (y.grad.gather() == 1).all()
    assert (grad.gather() == 1).all()
    x.grad = None
    x.backward(grad)
    np.testing.assert_array_equal(x.grad.gather(), np.ones(X.shape))


def test_nothing_is_recorded_or_kept_without_need(widest: Grid) -> None:
    x, w = tensor(X, widest, ROWS.x), Parameter(cut(W, widest, ROWS.w))
    with pla.no_grad():
        y = ops.matmul(x, w, ROWS)
    assert not y.requires_grad
    assert not ops.relu(tensor(X, widest, ROWS.x, wants=False)).requires_grad
    assert not x.detach().requires_grad
    with pytest.raises(RuntimeError, match="wants no gradient"):
        y.sum().backward()
    z = ops.gelu(ops.matmul(x, w, ROWS))
    kept = weakref.ref(z.block)
    total = (z * z).sum()
    del z
    assert kept() is not None
    total.backward()
    gc.collect()
    assert kept() is None  # freed as the walk went, though `total` lives
    with pytest.raises(RuntimeError, match="retain=True"):
        total.backward()
    again = (w * w).sum()
    w.grad = None
    again.backward(retain=True)
    again.backward()
    assert w.grad is not None
    np.testing.assert_allclose(w.grad.gather(), 4 * W)


def test_backward_says_what_it_lacks(widest: Grid) -> None:
    x = tensor(X, widest, ROWS.x)
    with pytest.raises(ValueError, match=r"shape \(6, 5\) needs its gradient"):
        (x * 2).backward()
    with pytest.raises(ValueError, match=r"gradient of shape \(6,\)"):
        (x * 2).backward(pla.ones((6,), widest, Layout(None)))
    if widest.size > 1:
        with pytest.raises(LayoutError, match=r"redistribute\(Layout\(\('a', 'b'\), None\)\)"):
            (x * 2).backward(pla.ones(X.shape, widest, Layout(None, None)))
    with pytest.raises(LayoutError, match=r"astype\('float64'\)"):
        x.data = x.data.astype(np.float32)
    with pytest.raises(TypeError, match="distribute it first"):
        Tensor(X)  # type: ignore[arg-type]


@pytest.mark.mpi(min_size=2)
def test_ranks_outside_the_grid_make_every_call(make_grid: Any, world: Any, serial: Grid) -> None:
    grid = make_grid({"a": world.size - 1, "b": 1, "c": 1})
    x, w, v = tensor(X, grid, ROWS.x), *parameters(grid)
    loss = loss_of(x, w, v)
    loss.backward()
    right = known(serial)
    for found, want in zip((x, w, v), right, strict=True):
        assert found.grad is not None
        np.testing.assert_allclose(found.grad.gather(), want, rtol=0, atol=1e-14)
    assert loss.item() == pytest.approx(loss_of(tensor(X, serial, ROWS.x), *parameters(serial)).item(), rel=1e-13)


@pytest.mark.parametrize("owned", [(True, False), (False, True), (False, False), (True, True)])
def test_only_what_is_nobody_elses_takes_in_another_term(widest: Grid, owned: tuple[bool, bool]) -> None:
    layout = Layout(None, None)
    blocks = [X.copy(), 2 * X]
    sums = GradientAccumulator(X.shape, layout, X.dtype, widest)
    for block, ours in zip(blocks, owned, strict=True):
        sums.add((block, layout), owned=ours)
    total, _ = sums.settled()
    assert np.array_equal(total, 3 * X)
    assert any(total is block for block in blocks) == any(owned)
    for block, right, ours in zip(blocks, (X, 2 * X), owned, strict=True):
        assert ours or np.array_equal(block, right)
