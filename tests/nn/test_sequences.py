"""Sequences cut every way, within every scheme: rings, Ulysses, both, tokens in any order, packed documents."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes, sequence_order
from parlinalg.autograd import ops
from parlinalg.errors import ConfigError, PlanError
from parlinalg.grid import factorizations
from parlinalg.layout import span_of
from parlinalg.nn import attention
from parlinalg.optim import AdamW
from parlinalg.parallel import GradientReducer
from parlinalg.schemes import Scheme
from parlinalg.sequence import BatchPositions
from tests.agreement import once
from tests.cases import placed
from tests.models import BATCH, CLOSE, HEADS, SEQUENCE, VOCABULARY, alone, make

EVERY = pytest.mark.ranks(*range(2, 9), 12)
KINDS = ("gpt", "llama")
ORDERS = ("contiguous", "striped", "zigzag")
NAMES = ("serial", "1d", "1d with sequence cuts", "2d", "2.5d, depth on the batch", "2.5d, depth on k", "3d")
SERIAL = schemes.discover()["serial"].SCHEME
KEY_HEADS = {"gpt": HEADS, "llama": 2}
#: The documents packed into each sequence, by their lengths.
PACKED = [(3, 4), (7,), (1, 5, 1), (2, 2, 3), (6, 1)]

Case = tuple[str, str, dict[str, int], str]  # model, scheme, grid, order


def cut(name: str, ulysses: bool = True) -> Scheme:
    """A scheme within Ulysses, and both within a ring."""
    scheme = schemes.discover()[name].SCHEME
    return (scheme.with_sequence("u", ulysses=True) if ulysses else scheme).with_sequence("s")


def fits(kind: str, name: str, sizes: dict[str, int]) -> bool:
    """Whether there are heads enough for Ulysses."""
    over = span_of(schemes.discover()[name].SCHEME.inner.dims[-1], sizes)
    return sizes["u"] == 1 or (sizes["u"] * over <= HEADS and KEY_HEADS[kind] % over == 0)


def cases(ranks: int, full: bool) -> list[Case]:
    """All, or of each kind of cut some with either model."""
    draw, found = random.Random(ranks), []
    for name in NAMES:
        axes = cut(name).axes
        for shape in factorizations(ranks, len(axes)):
            sizes = dict(zip(axes, shape, strict=True))
            if sizes["s"] * sizes["u"] > 1:
                found += [(k, name, sizes, order) for k in KINDS for order in ORDERS if fits(k, name, sizes)]
    if full:
        return found
    rings = [c for c in found if c[2]["u"] == 1 and c[1] != "serial"]
    both = [c for c in found if c[2]["u"] > 1 and c[2]["s"] > 1]
    rest = [c for c in found if c[2]["s"] == 1 or c[1] == "serial"]
    return [draw.choice(some) for some in (rings, both, rest) if some]


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    ids, targets = np.random.default_rng(step).integers(0, VOCABULARY, (2, BATCH, SEQUENCE))
    return ids, targets


def losses(kind: str, scheme: Scheme, grid: Any, order: str = "contiguous", **options: Any) -> list[float]:
    """The losses of ten steps with AdamW, with dropout everywhere, the tokens in some order."""
    model = make(kind, scheme, grid, p=0.1, **options)
    GradientReducer(model.parameters(), first_bucket=2000, bucket=4000)
    optimizer, found = AdamW(model.parameters(), 0.01), []
    places = sequence_order(SEQUENCE, grid.sizes.get("s", 1), order)
    for step in range(10):
        ids, targets = (placed(a[:, places], grid, model.ids_layout) for a in batch(step % 3))
        with nn.training_step(step), nn.sequence_positions(places):
            loss = ops.cross_entropy(model(ids), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.fixture(scope="module")
def known(world: Any) -> Any:
    """The losses of one rank alone, on tokens in their order."""

    @cache
    def found(kind: str) -> list[float]:
        with alone(world) as grid:
            return losses(kind, SERIAL, grid)

    return lambda kind: once(lambda: found(kind))


def error(found: list[float], want: list[float]) -> float:
    return max(abs(f / w - 1) for f, w in zip(found, want, strict=True))


@pytest.mark.core
@EVERY
def test_losses_are_those_of_one_rank(make_grid: Any, world: Any, known: Any, full: bool) -> None:
    wrong = []
    for i, (kind, name, sizes, order) in enumerate(cases(world.size, full)):
        grid, recompute = make_grid(sizes), ("block", None, "attention")[i % 3]
        try:
            found = losses(kind, cut(name), grid, order, recompute=recompute)
        except Exception as problem:
            problem.add_note(f"{kind}, {name}, {sizes}, {order}")
            raise
        grid.close()
        if error(found, known(kind)) > CLOSE:
            wrong.append(f"{kind}, {name}, {sizes}, {order}: {found} for {known(kind)}")
    assert not wrong, "\n".join(wrong)


def forgetful(given: Any) -> Any:
    """Where tokens come from, forgotten."""
    return lambda *args: BatchPositions(None, given(*args).documents)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("where", ["attention", "dropout", "embedding"])
def test_a_planted_bug_is_caught(where: str, make_grid: Any, known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = __import__(f"parlinalg.nn.{where}", fromlist=["token_positions"])
    monkeypatch.setattr(module, "token_positions", forgetful(module.token_positions))
    grid = make_grid({"s": 2, "u": 2})
    assert error(losses("gpt", cut("serial"), grid, "zigzag"), known("gpt")) > 1e-6


# ---------------------------------------------------------------------------------------------------- packed documents
def packed_losses(kind: str, scheme: Scheme, grid: Any, order: str) -> list[float]:
    """The losses of training on packed documents."""
    places = sequence_order(SEQUENCE, grid.sizes.get("s", 1), order)
    documents = np.stack([np.repeat(np.arange(len(n)), n) for n in PACKED])[:, places]

    def loss(model: Any, ids: np.ndarray, targets: np.ndarray) -> pla.Tensor:
        shown, wanted = (placed(a[:, places], grid, model.ids_layout) for a in (ids, targets))
        with nn.sequence_positions(places, documents):
            return ops.cross_entropy(model(shown), wanted)

    return trained(make(kind, scheme, grid, recompute="block"), loss)


def unpacked_losses(kind: str, grid: Any) -> list[float]:
    """The same, each document by itself."""

    def loss(model: Any, ids: np.ndarray, targets: np.ndarray) -> pla.Tensor:
        total = None
        for row, lengths in enumerate(PACKED):
            ends = np.cumsum(lengths)
            for start, stop in zip(ends - lengths, ends, strict=True):
                part = (slice(row, row + 1), slice(start, stop))
                shown, wanted = (placed(a[part], grid, model.ids_layout) for a in (ids, targets))
                found, _ = ops.cross_entropy_sum(model(shown), wanted)
                total = found if total is None else total + found
        assert total is not None
        return total * (1 / ids.size)

    return trained(make(kind, SERIAL, grid), loss)


def trained(model: Any, loss: Any) -> list[float]:
    GradientReducer(model.parameters())
    optimizer, found = AdamW(model.parameters(), 0.01), []
    for step in range(4):
        value = loss(model, *batch(step))
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.item())
    return found


@pytest.mark.ranks(1, 2, 4, 6)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_as_alone(kind: str, make_grid: Any, world: Any) -> None:
    with alone(world) as grid:
        want = unpacked_losses(kind, grid)
    sizes = {1: (1, 1, 1), 2: (2, 1, 1), 4: (2, 2, 1), 6: (3, 1, 2)}[world.size]
    grid = make_grid(dict(zip(("s", "u", "t"), sizes, strict=True)))
    for order in ("zigzag", "striped") if world.size < 6 else ("zigzag",):
        assert error(packed_losses(kind, cut("1d"), grid, order), want) < CLOSE


# ---------------------------------------------------------------------------------------------------- words
def layer_words(grid: Any, scheme: Scheme, length: int, **options: Any) -> Iterator[dict[tuple[str, Any], int]]:
    """Words by op and axes that this rank receives in attention's forward, and in its backward."""
    layer = nn.Attention(24, 12, scheme, grid, bias=False, dtype="float64", seed=1, name="a", causal=True, **options)
    x = pla.Tensor(placed(np.random.default_rng(0).normal(size=(2, length, 24)), grid, scheme.residual), True)
    with pla.ledger(grid) as book:
        y = layer(x)
    yield dict(book.words)
    with pla.ledger(grid) as book:
        y.sum().backward()
    yield dict(book.words)


@pytest.mark.ranks(2, 3, 4, 6)
@pytest.mark.parametrize("kv_heads", [12, 6, 2])
def test_words_of_ulysses(kv_heads: int, make_grid: Any, world: Any) -> None:
    """(2 h + 2 h_kv) (N / P) (1 - 1/P) words a layer and pass; h_kv as wide as P heads where there are fewer."""
    ranks, length = world.size, 12
    forward, backward = layer_words(
        make_grid({"u": ranks}), SERIAL.with_sequence("u", ulysses=True), length, kv_heads=kv_heads
    )
    heads_of_keys = max(kv_heads, ranks)
    if heads_of_keys % ranks or (kv_heads < ranks and ranks % kv_heads):
        return  # some ranks receive more than others
    want = 2 * (2 * 12 + 2 * heads_of_keys) * 2 * length * (ranks - 1) // ranks**2
    assert sum(forward.values()) == want
    assert sum(n for (_, axes), n in backward.items() if axes == ("u",)) - own_gradients(backward, ranks) == want


def own_gradients(words: dict[tuple[str, Any], int], ranks: int) -> int:
    """Those of sums, which are of the loss."""
    return sum(n for (op, _), n in words.items() if op == "all_reduce")


@pytest.mark.ranks(2, 3, 4, 6)
def test_words_of_cuts_around_tensor_parallelism(make_grid: Any, world: Any) -> None:
    """Megatron's: an all-gather and a reduce-scatter where 1D all-reduces, of as many words together."""
    ranks, (batch_, length, hidden) = world.size, (2, 12, 24)
    grid = make_grid({"t": ranks})
    found = {}
    for name in ("1d", "1d with sequence cuts"):
        scheme = schemes.discover()[name].SCHEME
        block = nn.TransformerBlock(hidden, 12, 48, scheme, grid, dtype="float64", causal=True)
        block.initialize(1)
        x = pla.Tensor(placed(np.random.default_rng(0).normal(size=(batch_, length, hidden)), grid, scheme.residual))
        with pla.ledger(grid) as book, pla.no_grad():
            block(x)
        found[name] = dict(book.words)
    each = batch_ * length * hidden * (ranks - 1) // ranks
    assert found["1d with sequence cuts"] == {("all_gather", ("t",)): 2 * each, ("reduce_scatter", ("t",)): 2 * each}
    assert found["1d"] == {("all_reduce", ("t",)): 4 * each}


# ---------------------------------------------------------------------------------------------------- generation
@pytest.mark.ranks(2, 4)
def test_generation_over_a_cut_sequence(make_grid: Any, world: Any) -> None:
    prompts = [[1, 2, 3], [4], [5, 6, 7]]
    with alone(world) as grid:
        want = nn.generate(make("llama", SERIAL, grid), prompts, 4)
    grid = make_grid({"s": 2, "u": world.size // 2})
    for cached in (True, False):
        found = nn.generate(make("llama", cut("serial"), grid), prompts, 4, use_cache=cached)
        assert [f.tolist() for f in found] == [w.tolist() for w in want]


# ---------------------------------------------------------------------------------------------------- what is refused
@pytest.mark.mpi(min_size=3)
def test_heads_that_cannot_be_cut_are_refused(make_grid: Any, world: Any) -> None:
    grid = make_grid({"u": world.size})
    scheme = SERIAL.with_sequence("u", ulysses=True)
    with pytest.raises(ConfigError, match=rf"Ulysses over {world.size} ranks cuts 2 heads.* use ulysses=[12] and"):
        nn.Attention(8, 2, scheme, grid)
    if world.size % 2 == 0:
        grid = make_grid({"u": world.size // 2, "t": 2})
        scheme = schemes.discover()["1d"].SCHEME.with_sequence("u", ulysses=True)
        with pytest.raises(ConfigError, match=r"shares 1 heads of keys, which 2 tensor ranks do not cut evenly"):
            nn.Attention(48, 24, scheme, grid, kv_heads=1)


@pytest.mark.serial
def test_wrong_tokens_are_refused(world: Any) -> None:
    ring = SERIAL.with_sequence("s")
    with pytest.raises(PlanError, match=r"has a ring over 's'; 'z' cannot be a second one"):
        ring.with_sequence("z")
    with pytest.raises(PlanError, match=r"add the axis of Ulysses, 'u', before it"):
        ring.with_sequence("u", ulysses=True)
    for wrong, said in (
        ({"positions": np.array([0, 2])}, r"no permutation of 0 to length - 1"),
        ({"documents": np.zeros(3, int)}, r"integers of shape \[batch, sequence\], not int64 of shape \(3,\)"),
        ({"positions": np.arange(3), "documents": np.zeros((1, 4), int)}, r"4 documents are given for .* 3 tokens"),
    ):
        with pytest.raises(ConfigError, match=said), nn.sequence_positions(**wrong):
            pass
    with alone(world) as grid:
        layer = nn.Attention(8, 2, SERIAL, grid, seed=1, name="a")
        x = pla.Tensor(pla.ones((1, 4, 8), grid, SERIAL.residual, "float32"))
        with nn.sequence_positions(np.arange(3)), pytest.raises(ConfigError, match=r"3 positions .* of 4 tokens"):
            layer(x)
        with (
            nn.sequence_positions(np.arange(4)), pla.no_grad(),
            pytest.raises(ConfigError, match=r"attention takes no cache"),
        ):  # fmt: skip
            layer(x, cache=nn.KeyValueCache(4))
    assert attention.token_positions().natural
