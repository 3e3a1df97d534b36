"""Epochs as an engine takes them: each batch once, whole or in parts, from any batch on, and where its rows belong."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.datasets import Batch, Loader, Windows

ROWS, BATCH = 23, 5
TAKEN = [(1,), (2,), (3, 1, 2), (0, 2, 0, 3), (7, 0)]
"""How many parts the batches of an epoch are taken in, in turn; 0: by `next`."""


def source(kind: str, grid: Any) -> Any:
    """Batches of numbered rows."""
    rows = np.arange(ROWS)
    two, one = pla.Layout(grid.axes[0], None), pla.Layout(grid.axes[0])
    if kind == "loader":
        return Loader(rows[:, None], rows, BATCH, grid, two, one, dtype=np.float64, seed=4)
    if kind == "windows":
        return Windows(np.arange(200), 7, BATCH, grid, two, two, seed=4)
    pairs = [(rows[at : at + BATCH, None].astype(float), rows[at : at + BATCH]) for at in range(0, ROWS, BATCH)]
    if kind == "pairs":
        return pairs
    return [
        Batch(pla.distribute(x, grid, two), pla.distribute(y, grid, one), 100 * i) for i, (x, y) in enumerate(pairs)
    ]


def labels(part: Any) -> list[int]:
    y = part.y if isinstance(part, Batch) else part[1]
    return (y if isinstance(y, np.ndarray) else y.gather()).reshape(len(y), -1)[:, 0].tolist()


def taken(batches: Any, turns: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Of each batch that is left of an epoch its labels, and the offsets of its parts, which lie one after another."""
    found = []
    for parts in cycle(turns):
        try:
            got = batches.take(parts) if parts else [next(batches)]
        except StopIteration:
            return found
        whole: list[int] = []
        first = got[0].offset if isinstance(got[0], Batch) else 0
        for part in got:
            if isinstance(part, Batch):
                assert part.offset == first + len(whole)
            whole += labels(part)
        assert max(map(len, map(labels, got))) - min(map(len, map(labels, got))) <= 1
        assert len(got) == min(max(1, parts), len(whole))
        found.append((whole, [first]))
    raise AssertionError


@pytest.mark.parametrize("kind", ["loader", "windows", "pairs", "batches"])
def test_an_epoch_taken_in_parts_gives_each_batch_once(kind: str, world: Any, backend: str) -> None:
    with pla.launch({"parallel": {"data": world.size}, "dtype": "float64"}, world, backend) as mesh:
        model = nn.MLP((1, 2), mesh.scheme, mesh.grid, dtype=np.float64)
        _, train, _, _ = pla.initialize(model, None, None, source(kind, mesh.grid))
        assert train is not None
        for epoch in (0, 1):
            want = taken(train.at(epoch), (0,))
            assert len(want) == len(train)
            if kind != "windows":
                assert sorted(row for rows, _ in want for row in rows) == list(range(ROWS))
            if kind == "batches":
                assert [first for _, (first,) in want] == [100 * i for i in range(len(want))]
            for turns in TAKEN:
                assert taken(train.at(epoch), turns) == want
                for skip in range(len(want) + 1):
                    assert taken(train.at(epoch, skip), turns) == want[skip:]
                    part = train.at(epoch, skip)
                    assert part.begins
                    if skip < len(want):
                        part.take(2)
                        assert not part.begins
                        assert part.given == skip + 1
        if kind == "loader":
            assert taken(iter(train), (2,)) == taken(train.at(0), (1,)) != taken(iter(train), (3,))


def test_rows_of_cut_batches_know_their_places(world: Any, backend: str) -> None:
    """Dropout of a batch that lies at an offset is that of its rows, in whatever number of microbatches."""
    x, y = np.random.default_rng(0).normal(size=(9, 4)), np.arange(9) % 3

    def losses(parts: int) -> list[float]:
        with pla.launch({"parallel": {"data": world.size}, "dtype": "float64"}, world, backend) as mesh:
            model = nn.MLP((4, 16, 3), mesh.scheme, mesh.grid, dropout=0.5, dtype=np.float64)
            criterion = pla.autograd.ops.cross_entropy_sum
            loader = Loader(x, y, 9, mesh.grid, pla.Layout("data", None), pla.Layout("data"), dtype=np.float64)
            engine, train, _, _ = pla.initialize(model, None, criterion, loader)
            schedule, batches = pla.PipelineSchedule(parts), iter(train)
            loss = schedule.forward_backward_step(engine, batches, return_output_label=False)[2]
            engine.step()
            return [loss, engine.gradient_norm]

    want = losses(1)
    for parts in (2, 4, 9):
        np.testing.assert_allclose(losses(parts), want, rtol=1e-12)
