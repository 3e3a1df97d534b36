"""What is computed again in the backward pass gives the same gradients, bit for bit, and keeps its inputs only."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Grid, Layout, LayoutError, Parameter, Plan, Tensor, nn, schemes
from parlinalg.autograd import ops, recompute, start_walk
from parlinalg.parallel import GradientReducer
from parlinalg.random.draws import using_draws
from tests.autograd.cases import cut, numbers, tensor
from tests.cases import held

X, W, V = numbers(6, 4), numbers(4, 4), numbers(4)
ROWS = Plan((("a", "b"),), (None,), (None,), Layout(("a", "b"), None), Layout(None, None), Layout(("a", "b"), None))
Function = Callable[..., Tensor]


def plainly(function: Function, *inputs: Any) -> Tensor:
    return function(*inputs)


def nested(function: Function, *inputs: Any) -> Tensor:
    return recompute(lambda *again: recompute(function, *again) * 1, *inputs)


class Case:
    """Two layers, the second closing over a tensor, on inputs of which one is used by both."""

    def __init__(self, grid: Grid, how: Callable[..., Tensor], reducer: bool = False) -> None:
        self.x, self.c = tensor(X, grid, ROWS.x), tensor(X * 2, grid, ROWS.x)
        self.w, self.v = Parameter(cut(W, grid, ROWS.w), "w"), Parameter(cut(V, grid, Layout(None)), "v")
        self.unused = Parameter(cut(V, grid, Layout(None)), "unused")
        self.how, self.reducer = how, GradientReducer([self.w, self.v]) if reducer else None

    def layer(self, x: Tensor, c: Tensor) -> Tensor:
        return x + ops.gelu(ops.matmul(x, self.w, ROWS) * self.v + c) + ops.tanh(x) * self.v

    def loss(self) -> Tensor:
        y = self.how(self.layer, self.x, self.c)
        y = self.how(lambda y: self.layer(y, self.c), y)
        return (y * y * self.v).sum()

    @property
    def grads(self) -> list[bytes]:
        found = [t.grad for t in (self.x, self.c, self.w, self.v)]
        assert all(g is not None and g.layout.partial == () for g in found)
        return [g.block.tobytes() for g in found if g is not None]


def known(grid: Grid, times: int = 1) -> list[bytes]:
    case = Case(grid, plainly)
    for _ in range(times):
        case.loss().backward()
    return case.grads


@pytest.mark.parametrize("how", [recompute, nested])
@pytest.mark.parametrize("reducer", [False, True], ids=["alone", "reducer"])
def test_gradients_are_those_of_what_is_kept(how: Any, reducer: bool, grid: Grid) -> None:
    case, want = Case(grid, how, reducer), known(grid)
    for _ in range(2):
        case.loss().backward()
        assert case.grads == want
        for t in (case.x, case.c, case.w, case.v):
            t.grad = None


@pytest.mark.parametrize("how", [recompute, nested])
def test_parameters_can_wait_and_values_be_used_twice(how: Any, grid: Grid) -> None:
    case, want = Case(grid, how), known(grid)
    loss = case.loss()
    walk = start_walk(loss, retain=True, later=True)
    walk.run()
    assert case.x.grad is not None
    assert case.w.grad is case.v.grad is None
    walk.run_parameters()
    assert case.grads == want
    loss.backward()
    assert case.grads == known(grid, 2)
    with pytest.raises(RuntimeError, match="retain=True"):
        loss.backward()


def test_reducers_are_told_within_what_is_computed_again(grid: Grid) -> None:
    """Each gradient as soon as it is complete: as early as without, so that its all-reduce overlaps with the rest."""

    class Order:
        def __init__(self) -> None:
            self.events: list[str] = []

        def ready(self, parameter: Parameter, block: Any, layout: Layout, *, sync: bool) -> None:
            self.events.append(parameter.name)

        def poll(self) -> None:
            self.events.append("poll")

        def finish(self, *, sync: bool) -> None:
            self.events.append("finish")

    found = []
    for how in (plainly, recompute):
        order = Order()
        x, ws = tensor(X, grid, ROWS.x), [Parameter(cut(W, grid, ROWS.w), f"w{i}") for i in range(3)]
        for w in ws:
            w.reducer = order

        def layers(x: Tensor, ws: Any = ws) -> Tensor:
            for w in ws:
                x = ops.gelu(ops.matmul(x, w, ROWS))
            return x

        how(layers, x).sum().backward()
        found.append(order.events)
    plain, again = ([e for i, e in enumerate(events) if e != "poll" or events[i - 1] != "poll"] for events in found)
    assert again == plain == ["poll", "w2", "poll", "w1", "poll", "w0", "poll", "finish"]


def test_microbatches_share_one_reduction(grid: Grid) -> None:
    case, plain = Case(grid, recompute), Case(grid, plainly)
    for each in (case, plain):
        with pla.no_sync():
            each.loss().backward()
        assert each.w.grad is not None
        assert set(each.w.grad.layout.partial) == {a for a in ("a", "b") if grid.sizes[a] > 1}
        each.loss().backward()
    assert case.grads == plain.grads


def test_words_are_those_of_a_forward_pass_more(widest: Grid) -> None:
    """Terms of gradients are handed on unsummed: nothing moves twice in the backward pass."""
    plan = Plan(("a",), ("b",), (None,), Layout("a", "b"), Layout("a", "b"), Layout("a", "b"))
    w = Parameter(cut(W, widest, plan.w))

    def counted(how: Any) -> tuple[Any, Any]:
        x, c = tensor(X, widest, plan.x), tensor(X, widest, plan.x)
        with pla.ledger(widest) as forward:
            y = x
            for _ in range(2):
                y = how(lambda y, c: ops.matmul(y, w, plan) + ops.matmul(c, w, plan), y, c)
        with pla.ledger(widest) as backward:
            y.backward(pla.ones(X.shape, widest, plan.y))
        return forward.words, backward.words

    forward, backward = counted(plainly)
    forward_again, backward_again = counted(recompute)
    assert forward_again == forward
    assert backward_again == forward + backward


def test_only_inputs_are_kept(widest: Grid) -> None:
    seen: list[Any] = []
    x = tensor(X, widest, ROWS.x)

    def function(x: Tensor) -> Tensor:
        y = ops.exp(x)
        seen.append(weakref.ref(y.block))
        return y * y

    total = recompute(function, x).sum()
    gc.collect()
    assert seen[0]() is None
    total.backward()
    gc.collect()
    assert len(seen) == 2
    assert seen[1]() is None
    with pla.no_grad():
        assert not recompute(function, x).requires_grad
    assert recompute(lambda x: x, x) is x
    assert not recompute(function, tensor(X, widest, ROWS.x, wants=False)).requires_grad


def test_named_results_and_constants(widest: Grid) -> None:
    """An SVD stays one, and the sign of a determinant, which is no tensor, stays beside its logarithm."""
    x = tensor(X[:4], widest, Layout("a", None))
    recompute(pla.linalg.svd, x).S.sum().backward()
    sign, log = recompute(pla.linalg.slogdet, x)
    (sign * log).backward()
    want = np.linalg.svd(X[:4])
    want = want[0] @ want[2] + np.sign(np.linalg.det(X[:4])) * np.linalg.inv(X[:4]).T
    np.testing.assert_allclose(x.grad.gather(), want, atol=1e-12)


def test_a_function_that_is_not_the_same_again_is_told(widest: Grid) -> None:
    x, c, calls = tensor(X, widest, ROWS.x), tensor(X, widest, ROWS.x), []

    def other(x: Tensor) -> Tensor:
        calls.append(x)
        return x * (c if len(calls) > 1 else 2)

    def narrower(x: Tensor) -> Tensor:
        calls.append(x)
        return (x * 2)[:, : 5 - len(calls)]

    with pytest.raises(RuntimeError, match="must do the same each time"):
        recompute(other, x).sum().backward()
    calls.clear()
    with pytest.raises(LayoutError, match=r"\(6, 4\).*\(6, 3\)"):
        recompute(narrower, x).sum().backward()
    with pytest.raises(TypeError, match="gives Tensors, not float"):
        recompute(lambda x: (x * 2, 1.0), x)


@pytest.mark.parametrize("stepped", [True, False], ids=["in a step", "outside of steps"])
def test_modules_drop_the_same_again(stepped: bool, grid: Grid) -> None:
    """Also where the backward pass comes in another step or mode, and layers have been called in between."""
    scheme = schemes.for_mode("2d").SCHEME
    flat = Grid({"r": 1, "c": grid.size}, grid.world)
    found = []
    for on in (False, True):
        model = nn.Sequential(*(nn.MLP((4, 5, 4), scheme, flat, dropout=0.5, dtype="float64") for _ in range(2)))
        model.initialize(3)
        nn.recompute(model[0], on)
        nn.recompute(model, on)
        x = tensor(X, flat, scheme.for_dims(2).residual)
        outputs = []
        for _ in range(2):
            with nn.training_step(7) if stepped else using_draws(None):
                outputs.append(model(x))
                outputs.append(model(x))
        model.eval()
        with nn.training_step(1):
            (sum(outputs[1:], outputs[0]) ** 2).sum().backward()
        model.train()
        assert not any(m.training is False for m in model.modules())
        drawn = [model(x).block.tobytes()]  # the calls made again do not count
        found.append([x.grad.block.tobytes(), *drawn, *(p.grad.block.tobytes() for p in model.parameters())])  # type: ignore[union-attr]
        distinct = {y.gather().tobytes() for y in outputs}
        assert len(distinct) == (2 if stepped else 4)
    assert found[0] == found[1]
    flat.close()


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_several_results_are_computed_again(used: tuple[int, ...], widest: Grid) -> None:
    """Whichever of them the loss is made of."""
    axes = tuple(widest.sizes)
    values = pla.random.normal((6, 4), widest, Layout(axes, None), seed=1, dtype=np.float64)

    def both(x: pla.Tensor) -> tuple[pla.Tensor, pla.Tensor]:
        y = ops.tanh(x)
        return y * x, (y * y).sum()

    found = []
    for again in (False, True):
        x = pla.Tensor(values, requires_grad=True)
        results = recompute(both, x) if again else both(x)
        loss = results[used[0]].sum()
        for i in used[1:]:
            loss = loss + results[i] * 3
        loss.backward()
        assert x.grad is not None
        found.append(held(x.grad))
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    "function",
    [lambda a: (a, a), lambda a: (a + 0, a), lambda a: (3 * a, a), lambda a: (a, 2 * a)],
    ids=["both", "a sum", "three", "two"],
)
def test_results_that_share_a_gradient_with_other_values(grid: Grid, function: Function) -> None:
    """In z = y + o both terms are one block, which what is computed again may not add to."""
    layout = Layout(("a", "b"), None)
    found = []
    for again in (lambda f, x: f(x), recompute):
        x = tensor(X, grid, layout)
        o = ops.exp(x)  # older than what is computed again: its gradient is settled after
        first, second = again(lambda x: function(x * x), x)
        z = second + o
        (z * 2 + first).sum().backward()
        found.append(x.grad.gather())
    assert np.array_equal(*found)
