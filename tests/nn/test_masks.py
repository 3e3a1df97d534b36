"""Masks of pairs, blocks, windows and padding under every scheme, with the sequence cut by rings and by Ulysses."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from parlinalg.schemes import Scheme
from tests.agreement import once
from tests.models import alone, differences
from tests.training import every_scheme, sizes_for

BATCH, SEQUENCE, HIDDEN, HEADS = 3, 7, 12, 4
_RNG = np.random.default_rng(0)
X, G = _RNG.normal(size=(2, BATCH, SEQUENCE, HIDDEN))
PAIRS, REAL = _RNG.random((BATCH, HEADS, SEQUENCE, SEQUENCE)) > 0.4, _RNG.random((BATCH, SEQUENCE)) > 0.3
TABLE = _RNG.random((HEADS, 3, 3)) > 0.4
#: What the block is called with; "window" is of the block itself.
SEEN: dict[str, dict[str, Any]] = {
    "pairs": {"mask": PAIRS},
    "pairs alike in all items and heads": {"mask": PAIRS[0, 0]},
    "pairs repeated": {"mask": np.broadcast_to(PAIRS[:, :1], PAIRS.shape), "key_padding": REAL},
    "pairs and padding": {"mask": PAIRS, "key_padding": REAL},
    "blocks by head": {"mask": nn.BlockMask(TABLE, 3)},
    "blocks": {"mask": nn.BlockMask(TABLE[0], 3), "key_padding": REAL},
    "window": {},
    "padding": {"key_padding": REAL},
}
SERIAL = schemes.discover()["serial"].SCHEME

Case = tuple[int, str, dict[str, int]]  # heads of keys, scheme, grid


def cut_every_way() -> dict[str, Scheme]:
    """All schemes; and within a ring, within Ulysses, and within both."""
    found = every_scheme()
    for name, scheme in list(found.items()):
        if not {"s", "data"} & set(scheme.axes):
            found[f"ring of {name}"] = scheme.with_sequence("s")
            found[f"Ulysses of {name}"] = within = scheme.with_sequence("u", ulysses=True)
            found[f"both of {name}"] = within.with_sequence("s")
    return found


SCHEMES = cut_every_way()


def fits(scheme: Scheme, kv_heads: int, sizes: dict[str, int]) -> bool:
    """Whether there are heads enough for Ulysses."""
    heads = [sizes[a] for a in scheme.inner.dims[-1]]
    ranks, over = int(np.prod([sizes[a] for a in scheme.ulysses])), int(np.prod(heads))
    return ranks == 1 or (ranks * over <= HEADS and kv_heads % over == 0)


def cases(seen: str, ranks: int, full: bool) -> list[Case]:
    """All, or two: one with the sequence cut, one with any scheme."""
    found = [
        (kv, name, sizes)
        for kv in (HEADS, 2)
        for name, scheme in SCHEMES.items()
        for sizes in sizes_for(scheme, ranks, 10**6)
        if fits(scheme, kv, sizes)
    ]
    if full:
        return found
    draw = random.Random(f"{seen} on {ranks}")  # the same on all ranks
    exchanged = [c for c in found if any(c[2][a] > 1 for a in SCHEMES[c[1]].inner.dims[1])]
    return [draw.choice(exchanged), draw.choice(found)]


def results(scheme: Scheme, grid: Any, seen: str, kv_heads: int) -> dict[str, pla.DistArray]:
    """The value and all gradients of a training step of a block, with dropout in attention."""
    window = {"causal": True, "window": 3} if seen == "window" else {}
    block = nn.TransformerBlock(
        HIDDEN, HEADS, 8, scheme, grid, kv_heads=kv_heads, head_dim=4, attention_dropout=0.2, dtype="float64", **window
    ).initialize(3)
    x = pla.Tensor(pla.distribute(X, grid, scheme.residual), requires_grad=True)
    with nn.training_step(2):
        y = block(x, **SEEN[seen])
    y.backward(pla.distribute(G, grid, y.layout))
    found = {"y": y.data, "x": x.grad} | {name: p.grad for name, p in block.named_parameters()}
    return {name: value.summed() for name, value in found.items()}


@pytest.fixture(scope="module")
def known(world: Any) -> Any:
    """What one rank alone computes."""

    @cache
    def found(seen: str, kv_heads: int) -> dict[str, np.ndarray]:
        with alone(world) as grid:
            return {name: value.gather() for name, value in results(SERIAL, grid, seen, kv_heads).items()}

    return lambda *case: once(lambda: found(*case))


@pytest.mark.ranks(2, 4, 6)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seen", SEEN)
def test_equals_one_rank(seen: str, make_grid: Any, world: Any, known: Any, full: bool) -> None:
    wrong = []
    for kv_heads, name, sizes in cases(seen, world.size, full):
        case = f"{kv_heads} heads of keys, {name}, {sizes}"
        want, grid = known(seen, kv_heads), make_grid(sizes)
        try:
            found = results(SCHEMES[name], grid, seen, kv_heads)
        except Exception as problem:
            problem.add_note(case)
            raise
        wrong += [f"{case}: {w}" for w in differences(found, want)]
        grid.close()
    assert not wrong, "\n".join(wrong)
