"""Imagined ranks against real ones: the calls, words and bytes of the same programs, on every rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, optim, schemes
from parlinalg.autograd import ops
from parlinalg.parallel import GradientReducer, WeightGatherer, ZeRO
from tests.models import every_scheme
from tests.training import sizes_for

pytestmark = pytest.mark.ranks(1, 4, full=(8, 16))

Program = Callable[[], Any]


def rows(book: Any) -> dict[Any, tuple[int, int, int]]:
    return {key: (book.calls[key], book.words[key], book.bytes[key]) for key in sorted(book.calls)}


def both(world: Any, sizes: dict[str, int], program: Callable[[Any], None], **options: Any) -> Any:
    """Run a program on a real grid, and imagined as every rank is; their ledgers are equal row by row.

    Returns
    -------
    Book
        That of the imagined run.
    """
    with pla.ledger(world) as real:
        grid = pla.Grid(sizes, world, "numpy", idle=True)
        program(grid)
        grid.close()
    with pla.imagine(world.size, world.rank, node=world.local_size, **options) as found, pla.ledger(found.comm) as book:
        program(pla.Grid(sizes, idle=True))
    assert rows(book) == rows(real), sizes
    return book


def train_gpt(
    grid: Any,
    scheme: Any,
    stage: int = 0,
    steps: int = 2,
    *,
    kind: Any = nn.GPT,
    gathered: bool = False,
    **options: Any,
) -> None:
    sizes = {"vocab_size": 53, "max_position_embeddings": 16, "hidden_size": 24, "num_hidden_layers": 2}
    model = kind(
        **{**sizes, "num_attention_heads": 4, "dtype": "float32", "seed": 1, **options}, scheme=scheme, grid=grid
    )
    parameters = list(model.parameters())
    GradientReducer(parameters, [ZeRO(stage=stage)] if stage else [], 2000, 4000)
    if gathered:
        WeightGatherer(model)
    optimizer = optim.AdamW(parameters, lr=1e-3)
    numbers = np.random.default_rng(0).integers(0, 53, (2, 6, 16))
    ids, targets = (pla.distribute(a, grid, model.ids_layout) for a in numbers)
    for step in range(steps):
        with nn.training_step(step):
            loss, count = ops.cross_entropy_sum(model(ids), targets)
            (loss * (1 / count)).backward()
        optimizer.step()
        optimizer.zero_grad()


def cases(ranks: int, full: bool) -> list[tuple[str, Any, dict[str, int], int]]:
    """Schemes, grids and stages: of every scheme one grid and stage, or three with all stages."""
    draw = random.Random(ranks)
    found = []
    ulysses = {
        name: schemes.discover()[name].SCHEME.with_sequence("s", ulysses=True) for name in ("serial", "1d", "2d")
    }
    ulysses |= {f"data × {name}": scheme.with_data("data") for name, scheme in ulysses.items()}
    for name, scheme in (every_scheme() | {f"Ulysses × {name}": scheme for name, scheme in ulysses.items()}).items():
        shapes = sizes_for(scheme, ranks, 10**6)
        stages = [0, 1, 2] if "data" in scheme.axes and "weights cut" not in name else [0]
        for sizes in draw.sample(shapes, min(3 if full else 1, len(shapes))):
            found += [(name, scheme, sizes, s) for s in (stages if full else [draw.choice(stages)])]
    return found


@pytest.mark.always
def test_ledgers_of_training_are_those_of_real_ranks(world, full):
    words = 0
    for name, scheme, sizes, stage in cases(world.size, full):
        gathered = name == "zero3" or "weights cut" in name
        book = both(world, sizes, partial(train_gpt, scheme=scheme, stage=stage, gathered=gathered))
        words += book.words.total()
    assert world.size == 1 or words
