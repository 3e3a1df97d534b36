"""Loaders of a rank's own rows without an engine, and samples made into batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.datasets import DataLoader, Sampler, collate
from parlinalg.errors import CommError, EngineError


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.ranks(1, 2, 4)
def test_a_loader_on_a_grid(parts: int, make_grid: Any, world: Any) -> None:
    """Each rank's block, and in the order of the sampler; a smaller batch at the end, and microbatches of it."""
    x, y = np.arange(11 * 6.0).reshape(11, 6), np.arange(11)
    grid = make_grid({"r": max(1, world.size // 2), "c": min(2, world.size)})
    read: list[int] = []

    class Data:
        def __len__(self) -> int:
            return 11

        def __getitem__(self, i: int) -> Any:
            read.append(i)
            return {"x": x[i], "more": (x[i, 0], i)}, y[i]

    sampler = Sampler(11, seed=4)
    loader = DataLoader(Data(), 4, sampler=sampler)
    layouts = {1: pla.Layout("r"), 2: pla.Layout("r", "c")}
    placed = loader.on(grid, lambda dtype, ndim: layouts[ndim], dtype=np.float32)
    for epoch, skip in ((0, 0), (1, 2)):
        batches = list(placed.epoch(epoch, parts, skip))
        assert len(batches) == 3 - skip
        for number, batch in enumerate(batches, skip):
            rows = sampler.order(epoch)[4 * number : 4 * number + 4]
            assert [part.offset for part in batch] == np.cumsum([0, *map(len, batch)])[:-1].tolist()
            assert sum(part.count for part in batch) == len(rows)
            got = [(p.x["x"].gather(), p.x["more"][0].gather(), p.x["more"][1].gather(), p.y.gather()) for p in batch]
            for found, want in zip(zip(*got, strict=True), (x[rows], x[rows, 0], rows, y[rows]), strict=True):
                np.testing.assert_array_equal(np.concatenate(found), want)
            assert batch[0].x["x"].dtype == batch[0].x["more"][0].dtype == np.float32
            assert batch[0].x["more"][1].dtype == np.int64
    everyone = world.share([read, grid.coords])
    for column in range(grid.sizes["c"]):
        numbers = [n for theirs, at in everyone if at["c"] == column for n in theirs]
        assert sorted(numbers) == sorted([*range(11), *sampler.order(1)[8:].tolist()])


@pytest.mark.ranks(2, 4)
def test_checked_mode_finds_samples_that_differ(make_grid: Any, world: Any, backend: str, monkeypatch: Any) -> None:
    """Ranks along an axis that does not cut the rows read the same samples: a data set that draws breaks it."""
    monkeypatch.setenv("PARLINALG_CHECK", "1")
    checked = world.sub(range(world.size), ("all",))
    checked.checked = True

    class Drawn:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, i: int) -> Any:
            return np.full(3, i + 0.5 * (world.rank == 1)), i

    with pla.Grid({"r": world.size // 2, "c": 2}, checked, backend) as grid:
        placed = DataLoader(Drawn(), 3).on(grid, lambda dtype, ndim: pla.Layout("r", *[None] * (ndim - 1)))
        with pytest.raises(CommError, match=r"the rows of a batch.*every rank") as caught:
            next(iter(placed))
        assert len(set(world.share(str(caught.value)))) == 1
    checked.free()


@pytest.mark.serial
def test_the_order_of_an_epoch() -> None:
    """By the seed and the epoch alone; each sample once; a subclass gives another."""
    first = [Sampler(50, seed=1).order(epoch) for epoch in range(3)]
    assert all(sorted(order) == list(range(50)) for order in first)
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], Sampler(50, seed=2).order(0))
    np.testing.assert_array_equal(first[2], Sampler(50, seed=1).order(2))

    class Odd(Sampler):
        def __len__(self) -> int:
            return self.length // 2

        def order(self, epoch: int) -> np.ndarray:
            return np.arange(1, self.length, 2)

    loader = DataLoader([0] * 7, 2, sampler=Odd(7))
    assert len(loader) == 2
    assert [b.tolist() for b in loader.batches(0)] == [[1, 3], [5]]
    assert [b.tolist() for b in loader.batches(0, skip=1)] == [[5]]
    assert [b.tolist() for b in DataLoader([0] * 7, 2, sampler=Odd(7), drop_last=True).batches(3)] == [[1, 3]]


@pytest.mark.serial
def test_samples_made_into_batches() -> None:
    x, (a, b), more = collate(
        [([1.0, 2.0], (np.int32(3), {"k": True}), 4), ([5.0, 6.0], (np.int32(7), {"k": False}), 8)]
    )
    np.testing.assert_array_equal(x, [[1, 2], [5, 6]])
    assert a.dtype == np.int32
    assert a.tolist() == [3, 7]
    assert b["k"].tolist() == [True, False]
    assert more.tolist() == [4, 8]
    torch = pytest.importorskip("torch", reason="cannot be had here: torch")
    tensor = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    assert collate([tensor, tensor]).tolist() == [[1, 1], [1, 1]]
    for wrong, right in (
        ([np.zeros(2), np.zeros(3)], r"sample is float64\[2\] in the first and float64\[3\] in number 1"),
        ([(0, {"a": 1}), (0, {"b": 1})], r"sample\[1\] is \['a'\] in the first and \['b'\]"),
        ([(0, 1), (0, 1, 2)], "sample is 2 in the first and 3"),
        (["a", "b"], "dtype <U1, and batches are of real numbers"),
        ([[[1], [1, 2]], [[1], [1]]], r"sample\[1\] is int64\[2\]"),
    ):
        with pytest.raises(EngineError, match=right):
            collate(wrong)
