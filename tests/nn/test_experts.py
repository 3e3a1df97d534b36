"""Mixtures of experts are those of plain loops over tokens, under every scheme and on every grid."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from parlinalg.autograd import check_gradients
from parlinalg.autograd.ops import Queues, Routing
from parlinalg.errors import ConfigError, LayoutError
from parlinalg.optim import AdamW
from parlinalg.parallel import GradientReducer
from tests.agreement import once
from tests.cases import placed
from tests.models import CLOSE, alone, anything, differences, every_scheme, loss_of, make
from tests.training import sizes_for

BATCH, SEQUENCE, HIDDEN, INNER, EXPERTS = 5, 7, 6, 9, 3
SERIAL = schemes.discover()["serial"].SCHEME
EVERY = pytest.mark.ranks(*range(1, 9), 12)
KINDS: dict[str, dict[str, Any]] = {
    "two": {"top_k": 2, "capacity_factor": 1.25, "activation": "gelu_tanh"},
    "one, dropping": {"top_k": 1, "capacity_factor": 0.5, "activation": "swiglu"},
    "every token": {"top_k": 2, "capacity_factor": None, "activation": "relu", "bias": False},
    "many": {"top_k": 2, "capacity_factor": 0.8, "activation": "swiglu", "experts": 7},
    "four": {"top_k": 4, "capacity_factor": 0.8, "activation": "swiglu", "experts": 7, "bias": False},
    "probabilities": {"top_k": 3, "normalize_gates": False, "activation": "gelu_tanh", "experts": 7},
    "all": {"top_k": 3, "capacity_factor": None, "activation": "relu", "normalize_gates": False},
    "one, normalized": {"top_k": 1, "normalize_gates": True, "activation": "swiglu"},
    "shared": {"top_k": 2, "capacity_factor": 0.8, "activation": "gelu_tanh", "shared": 5},
    "gated, shared": {"top_k": 3, "activation": "swiglu", "shared": 4, "shared_gate": True, "bias": False},
}


DROPPING = ("one, dropping", "many", "four", "probabilities", "one, normalized", "shared")


def layer(scheme: Any, grid: Any, *, experts: int = EXPERTS, **options: Any) -> Any:
    """Experts with terms of the loss, and values that none of their parts can do without."""
    made = nn.MixtureOfExperts(
        HIDDEN, INNER, experts, scheme, grid, aux_loss_coef=0.3, z_loss_coef=0.05, dtype="float64", **options
    )
    made.start_from(lambda name, declared: nn.init.Normal(0.7))
    return made.initialize(5)


def inputs() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.normal(size=(BATCH, SEQUENCE, HIDDEN)), rng.normal(size=(BATCH, SEQUENCE, HIDDEN))


def passed(scheme: Any, grid: Any, order: np.ndarray | None = None, **options: Any) -> dict[str, pla.DistArray]:
    """What the layer gives, the terms it adds, and all gradients; with an order, of tokens that lie in it."""
    module = layer(scheme, grid, **options)
    GradientReducer(module.parameters())
    x, weights = (a if order is None else a[:, order] for a in inputs())
    x = pla.Tensor(placed(x, grid, scheme.residual), requires_grad=True)
    with nn.added_losses() as added, nullcontext() if order is None else nn.sequence_positions(order):
        y = module(x)
    terms = added.total()
    ((y * placed(weights, grid, scheme.residual)).sum() + terms).backward()
    assert y.layout == scheme.residual
    assert x.grad is not None
    found = {"y": y.data, "terms": terms.data, "x": x.grad}
    return found | {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


# ------------------------------------------------------------------ loops over tokens and experts, no library code
def activated(z: np.ndarray, activation: str) -> np.ndarray:
    if activation == "swiglu":
        return z[..., 0] / (1 + np.exp(-z[..., 0])) * z[..., 1]
    if activation == "relu":
        return np.maximum(z, 0)
    return 0.5 * z * (1 + np.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def by_loops(
    x: np.ndarray, state: dict[str, np.ndarray], top_k: int, capacity_factor: float | None, activation: str,
    normalize_gates: bool,
) -> tuple[np.ndarray, float, int]:  # fmt: skip
    """The layer's result, the terms of the loss and how many assignments are dropped."""
    experts = state["router"].shape[1]
    capacity = x.shape[1] if capacity_factor is None else math.ceil(top_k * x.shape[1] * capacity_factor / experts)
    none = np.zeros(experts)
    y, balance, squares, dropped = np.zeros_like(x), 0.0, 0.0, 0
    for b, sequence in enumerate(x):
        scores = sequence @ state["router"]
        odds = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        ranked = np.argsort(-scores, axis=1, kind="stable")
        held = [0] * experts
        for j in range(top_k):
            for t, token in enumerate(sequence):
                e = ranked[t, j]
                held[e] += 1
                if held[e] > capacity:
                    dropped += 1
                    continue
                gate = odds[t, e] / (odds[t, ranked[t, :top_k]].sum() if normalize_gates else 1)
                z = np.tensordot(token, state["expand"][e], 1) + state.get("expand_bias", none)[e]
                out = activated(z, activation) @ state["contract"][e]
                y[b, t] += gate * (out + state.get("contract_bias", none)[e])
        if "shared.0.weight" in state:
            z = np.tensordot(sequence, state["shared.0.weight"], 1) + state.get("shared.0.bias", 0)
            out = activated(z, activation) @ state["shared.2.weight"] + state.get("shared.2.bias", 0)
            y[b] += out / (1 + np.exp(-sequence @ state["shared_gate"])) if "shared_gate" in state else out
        for e in range(experts):
            balance += experts * np.mean(ranked[:, :top_k] == e) * odds[:, e].mean() / len(x)
        squares += (np.log(np.exp(scores).sum(1)) ** 2).mean() / len(x)
    return y, 0.3 * balance + 0.05 * squares, dropped


@pytest.mark.serial
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_does_what_loops_do(world: Any, kind: str) -> None:
    options = KINDS[kind]
    with alone(world) as grid:
        found = passed(SERIAL, grid, **options)
        state = layer(SERIAL, grid, **options).state_dict()
    plain = {k: v for k, v in options.items() if k in ("top_k", "activation", "normalize_gates")}
    plain = {"normalize_gates": options["top_k"] > 1, "capacity_factor": options.get("capacity_factor", 1.25)} | plain
    y, terms, dropped = by_loops(inputs()[0], state, **plain)
    assert (dropped > 0) == (kind in DROPPING)
    np.testing.assert_allclose(found["y"].gather(), y, atol=1e-13)
    np.testing.assert_allclose(found["terms"].item(), terms, rtol=1e-13)


@pytest.mark.serial
def test_derivatives_are_those_of_differences(world: Any) -> None:
    with alone(world) as grid:
        for kind in KINDS.values():
            module = layer(SERIAL, grid, **kind)
            x = pla.Tensor(placed(inputs()[0], grid, SERIAL.residual), requires_grad=True)

            weights = list(module.parameters())

            def value(x: Any, *given: Any, module: Any = module, weights: Any = weights) -> Any:
                for p, values in zip(weights, given, strict=True):
                    p.data = values.data
                with nn.added_losses() as terms:
                    y = module(x)
                return (y * y).sum() + terms.total()

            check_gradients(value, [x, *weights], directions=4)


@pytest.mark.serial
def test_equal_scores_and_dropped_tokens(world: Any) -> None:
    """Of equal scores the first expert is chosen; what it does not take adds nothing."""
    with alone(world) as grid:
        module = layer(SERIAL, grid, top_k=1, capacity_factor=0.5)
        module.router.block[...] = 0
        y = module(pla.Tensor(placed(inputs()[0], grid, SERIAL.residual))).gather()
    capacity = math.ceil(SEQUENCE * 0.5 / EXPERTS)
    assert np.all(np.any(y[:, :capacity] != 0, axis=2))
    assert not y[:, capacity:].any()


# ------------------------------------------------------------------ every grid
@pytest.fixture(scope="module")
def known(world: Any) -> Any:
    """What one rank alone finds."""

    @cache
    def found(kind: str) -> dict[str, np.ndarray]:
        with alone(world) as grid:
            return {name: array.gather() for name, array in passed(SERIAL, grid, **KINDS[kind]).items()}

    return lambda kind: once(lambda: found(kind))


def cases(ranks: int, full: bool) -> Iterator[tuple[str, str, dict[str, int], Any]]:
    """(options, scheme, grid, the experts' axes): all, or one of a third of the schemes; others take the others."""
    draw = random.Random(ranks)
    for i, (name, scheme) in enumerate(every_scheme().items()):
        if (i + ranks) % 3 and not full:
            continue
        axes = [None, *scheme.axes, *([scheme.axes[::-1]] if len(scheme.axes) > 1 else [])]
        every = [(k, name, s, a) for k in KINDS for s in sizes_for(scheme, ranks, 10**6) for a in axes]
        cut = [case for case in every if case[3] is not None and case[2].get(case[3], 2) > 1] or every
        yield from every if full else [draw.choice(cut)]


@pytest.mark.core
@EVERY
def test_every_scheme_does_what_one_rank_does(make_grid: Any, world: Any, known: Any, full: bool) -> None:
    every, wrong = every_scheme(), []
    for kind, name, sizes, axis in cases(world.size, full):
        grid = make_grid(sizes)
        try:
            found = passed(every[name], grid, axis=axis, **KINDS[kind])
        except Exception as error:
            error.add_note(f"{kind}, {name}, {sizes}, {axis}")
            raise
        grid.close()
        wrong += [f"{kind}, {name}, {sizes}, {axis}: {each}" for each in differences(found, known(kind))]
    assert not wrong, "\n".join(wrong)


@EVERY
def test_of_equal_scores_the_first_ones_count_on_every_grid(make_grid: Any, world: Any, full: bool) -> None:
    """Scores of integers are exact on any grid; of seven experts, some are as good as others."""
    rng, every, options = np.random.default_rng(3), every_scheme(), KINDS["four"]
    x = rng.integers(-2, 3, (BATCH, SEQUENCE, HIDDEN)).astype(float)
    router = rng.integers(-1, 2, (HIDDEN, 3)).astype(float)[:, [0, 1, 0, 2, 1, 1, 0]]
    with alone(world) as grid:
        state = {**layer(SERIAL, grid, **options).state_dict(), "router": router}
    want = by_loops(x, state, 4, 0.8, "swiglu", True)[0]
    for _, name, sizes, axis in cases(world.size, full):
        grid, scheme = make_grid(sizes), every[name]
        module = layer(scheme, grid, axis=axis, **options)
        module.router.data = placed(router, grid, module.router.layout)
        y = module(pla.Tensor(placed(x, grid, scheme.residual))).gather()
        grid.close()
        np.testing.assert_allclose(y, want, atol=1e-12 * np.abs(want).max(), err_msg=f"{name}, {sizes}, {axis}")


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("axis", ["s", "data"])
def test_tokens_queue_in_the_order_of_their_sequence(make_grid: Any, world: Any, known: Any, axis: Any) -> None:
    """However they lie: in pairs of chunks, as causal rings take them, or dealt out one by one."""
    grid = make_grid({"data": world.size // 2, "s": 2})
    scheme = SERIAL.with_sequence("s").with_data("data")
    want = known("one, dropping")
    for order in (np.array([0, 1, 5, 6, 2, 3, 4]), np.array([0, 2, 4, 6, 1, 3, 5])):
        found = passed(scheme, grid, order, axis=axis, **KINDS["one, dropping"])
        lain = {name: a[:, order] if name in ("x", "y") else a for name, a in want.items()}
        assert not differences(found, lain)


def trained(scheme: Any, grid: Any, kind: str = "gpt", **options: Any) -> list[float]:
    """The losses of five steps of a model with experts, the terms they add among them."""
    model = make(kind, scheme, grid, anything, num_local_experts=3, capacity_factor=0.9, **options)
    GradientReducer(model.parameters(), first_bucket=2000, bucket=4000)
    optimizer = AdamW(model.parameters(), 0.01)
    found = []
    for step in range(5):
        with nn.training_step(step), nn.added_losses() as added:
            loss = loss_of(model, step % 3)
            assert len(added) == len(model.blocks)
            loss = loss + added.total()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def _alone(world: Any, kind: str) -> list[float]:
    with alone(world) as grid:
        return trained(SERIAL, grid, kind, p=0.1)


@EVERY
def test_models_with_experts_train_as_on_one_rank(make_grid: Any, world: Any, full: bool) -> None:
    """With dropout, and recomputed where the one rank keeps."""
    every, draw = every_scheme(), random.Random(world.size)
    found = [case for case in cases(world.size, full) if case[0] == "two" or not full]  # of each grid one
    for kind in ("gpt", "llama") if full else (("gpt", "llama")[world.size % 3 % 2],):
        want = once(partial(_alone, world, kind))
        for _, name, sizes, axis in found if full else [draw.choice(found)]:
            grid = make_grid(sizes)
            got = trained(every[name], grid, kind, p=0.1, recompute="block", expert_axis=axis)
            grid.close()
            error = max(abs(g / w - 1) for g, w in zip(got, want, strict=True))
            assert error <= CLOSE, (kind, name, sizes, axis, error)
            assert want[-1] < want[0]


@pytest.mark.ranks(3)
def test_ranks_outside_of_the_grid_make_every_call(make_grid: Any, known: Any) -> None:
    grid = make_grid({"data": 2})
    found, want = passed(SERIAL.with_data("data"), grid, axis="data", **KINDS["two"]), known("two")
    if grid.inside:
        assert not differences(found, want)


# ------------------------------------------------------------------ words
def by_operation(book: Any) -> dict[str, int]:
    words: dict[str, int] = {}
    for (operation, _), n in book.words.items():
        words[operation] = words.get(operation, 0) + n
    return words


@pytest.mark.ranks(4, 8)
@pytest.mark.parametrize("axis", ["data", "s", ("data", "s")])
def test_the_exchange_moves_as_many_words_as_tokens(
    make_grid: Any, world: Any, axis: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There and back, and twice more in the backward pass, tokens that come from others; and counts, once."""
    grid = make_grid({"data": world.size // 2, "s": 2})
    scheme, seen, init = SERIAL.with_sequence("s").with_data("data"), [], Routing.__init__

    def noted(self: Any, *args: Any) -> None:
        init(self, *args)
        seen.append(self)

    monkeypatch.setattr(Routing, "__init__", noted)
    module = layer(scheme, grid, axis=axis)
    x = pla.Tensor(placed(inputs()[0], grid, scheme.residual), requires_grad=True)
    with pla.ledger(grid) as book:
        y = module(x)
    routing, forward = seen[-1], by_operation(book)
    with pla.no_sync(), pla.ledger(grid) as book:
        y.backward(y.detach())
    me = routing.queues.peers.index(grid.coords)
    come, gone = (int(n.sum() - n[me]) for n in (routing.received, routing.sent))
    assert any(world.share(come))
    counts = [2 * routing.queues.rows(at) * EXPERTS for at in routing.queues.peers]
    assert forward == {"all_to_all": (come + gone) * HIDDEN, "all_gather": sum(counts) - counts[me]}
    assert by_operation(book) == {"all_to_all": (come + gone) * HIDDEN}
    kept, received = (world.share(int(n.sum())) for n in (routing.kept, routing.received))
    assert sum(kept) == sum(received) <= 2 * BATCH * SEQUENCE


@pytest.mark.ranks(4)
def test_tokens_and_not_queues_are_gathered_and_summed(make_grid: Any) -> None:
    """On a tensor grid tokens are gathered before, and summed after, in both passes."""
    full = BATCH * SEQUENCE * HIDDEN
    for name, sizes in (("1d", {"t": 4}), ("1d with sequence cuts", {"t": 4})):
        grid, scheme = make_grid(sizes), schemes.discover()[name].SCHEME
        module = layer(scheme, grid, bias=False)
        x = pla.Tensor(placed(inputs()[0], grid, scheme.residual), requires_grad=True)
        with pla.ledger(grid) as book:
            y = module(x)
        router = BATCH * SEQUENCE * EXPERTS
        own = math.prod(grid.block_shape(scheme.residual, x.shape))
        if name == "1d":
            piece = len(pla.layout.piece(full, 4, grid.rank))
            assert dict(book.words) == {("all_reduce", ("t",)): 2 * (full - piece)}
        else:
            assert book.words[("reduce_scatter", ("t",))] == full - own
            assert book.words[("all_gather", ("t",))] == full - own + router - own // HIDDEN * EXPERTS
        with pla.no_sync(), pla.ledger(grid) as book:
            y.backward(y.detach())
        sums = by_operation(book)
        most = 2 * full + 4 * BATCH * SEQUENCE  # gates have 2 numbers a token
        assert sum(sums.values()) < 1.01 * most, sums


# ------------------------------------------------------------------ mistakes
@pytest.mark.serial
@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_model_names_the_numbers_of_experts_as_it_was_given_them(kind: str, world: Any) -> None:
    told = "num_experts_per_tok=2 with num_local_experts=1: .* give num_experts_per_tok=1, or at least 2 experts"
    with alone(world) as grid, pytest.raises(ConfigError, match=told):
        make(kind, SERIAL, grid, num_local_experts=1)


@pytest.mark.serial
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"top_k": 0}, "top_k is a whole number of at least 1, not 0"),
        ({"top_k": 1.5}, "top_k is a whole number of at least 1, not 1.5"),
        ({"top_k": 4}, "top_k=4 of 3 experts; take a top_k from 1 to 3, or at least 4 experts"),
        ({"experts": 1}, "top_k=2 of 1 experts; take top_k=1"),
        ({"normalize_gates": 1}, "normalize_gates is True or False, not 1"),
        ({"shared": -1}, "shared, the features inside .* of at least 0, not -1"),
        ({"shared_gate": True}, "shared_gate=True of experts without a shared one.* shared=…"),
        ({"experts": 0}, "at least 1, not 0"),
        ({"axis": "data"}, r"'data', but the grid has the axes {'one': 1}.*axis=None"),
        ({"axis": ("one", "one")}, "names an axis twice"),
        ({"capacity_factor": 0}, "capacity_factor is above 0"),
        ({"capacity_factor": math.nan}, "capacity_factor is above 0"),
        ({"capacity_factor": "1"}, "capacity_factor is above 0"),
        ({"activation": "softplus"}, "no activation 'softplus'"),
    ],
)
def test_what_cannot_be_is_told(world: Any, options: dict[str, Any], told: str) -> None:
    with alone(world) as grid, pytest.raises(ConfigError, match=told):
        layer(SERIAL, grid, **options)


@pytest.mark.serial
def test_inputs_of_other_shapes_are_refused(world: Any) -> None:
    with alone(world) as grid:
        with pytest.raises(LayoutError, match=r"\[batch, sequence, 6\], not \(5, 6\)"):
            layer(SERIAL, grid)(pla.Tensor(placed(inputs()[0][:, 0], grid, pla.Layout(None, None))))
        model = make("gpt", SERIAL, grid, num_local_experts=2)
        with pytest.raises(ConfigError, match="num_local_experts=2 is not written"):
            model.save_pretrained("nowhere")


@pytest.mark.ranks(4)
def test_a_planted_bug_is_caught(make_grid: Any, world: Any, known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, scheme = make_grid({"s": 2, "t": 2}), schemes.discover()["1d"].SCHEME.with_sequence("s")
    want, runs = known("one, dropping"), Queues.runs

    def wrong() -> bool:
        found = passed(scheme, grid, axis="t", **KINDS["one, dropping"])
        return any(world.share(differences(found, want)))

    assert not wrong()
    with monkeypatch.context() as planted:  # a gradient lacks a sum over the ranks of the experts
        planted.setattr(Queues, "replicating", ())
        assert wrong()
    with monkeypatch.context() as planted:  # later parts of a sequence queue before earlier ones
        planted.setattr(Queues, "runs", lambda *args: (found := runs(*args))._replace(first=-found.first))
        assert wrong()
