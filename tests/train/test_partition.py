"""Partitions that measure or count, with the first batch of what an engine trains on: the training misses none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.autograd import ops
from parlinalg.datasets import Loader
from parlinalg.errors import ConfigError, EngineError
from parlinalg.optim import AdamW
from parlinalg.train import Feed
from tests.train.test_engine import CLOSE, SETTINGS, SIZES, mlp, pairs, samples, serial

pytestmark = pytest.mark.ranks(2, 4)


def settings(partition: Any, size: int) -> dict[str, Any]:
    pipeline = {"size": 2, "partition": partition}
    more = {"tensor": {"size": 2, "mode": "1d"}} if size == 4 else {}
    return {**SETTINGS, "parallel": {"pipeline": pipeline, **more}, "schedule": {"name": "gpipe", "microbatches": 4}}


def source(kind: str, mesh: Any) -> Any:
    """Batches: a list, an iterator that is spent once it is iterated, or a loader that cuts its batches itself."""
    if kind == "loader":
        x, y = samples()
        return Loader(x, y, 11, mesh.grid, pla.Layout(None, None), pla.Layout(None), dtype=np.float64)
    return iter(pairs()) if kind == "once" else pairs()


def trained(
    config: dict[str, Any], kind: str, world: Any, backend: str, made: Callable[[], object] = lambda: None, **more: Any
) -> tuple[list[float], list[int]]:  # fmt: skip
    """The losses of some steps, and how many layers the stages have; `made` is called before the first step."""
    with pla.launch(config, world, backend) as mesh:
        engine, train, _, _ = pla.initialize(
            mlp(mesh), lambda p: AdamW(p, lr=1e-2), ops.cross_entropy_sum, source(kind, mesh), **more
        )  # fmt: skip
        made()
        losses = []
        for _ in range(1 if kind == "once" else 2):
            batches = iter(train)
            for _ in range(2):
                losses.append(engine.execute_schedule(batches)[2])
                engine.step()
            assert next(batches, None) is None
        return losses, list(engine.model.counts)


@pytest.mark.parametrize("partition", ["time", "flops"])
@pytest.mark.parametrize("kind", ["list", "once", "loader"])
def test_the_first_batch_measures_and_is_trained_on(
    partition: str, kind: str, world: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the first layer takes is seen where it is run, and of "flops" the length that the model is asked about."""
    met: list[Any] = []
    plain = nn.Linear.forward

    def forward(self: Any, x: Any) -> Any:
        if x.shape[1] == SIZES[0]:
            met.append(x)
        return plain(self, x)

    def layer_flops(self: Any, batch: int, length: int) -> list[float]:
        asked.append((batch, length))
        return [1.0 + i % 3 for i in range(sum(uniform))]

    def measured() -> None:
        samples = [(x.shape, x.data.gather()) for x in met]
        met.clear()
        if partition == "flops":
            assert asked == [(1, SIZES[0])]
        else:
            assert samples
        for shape, found in samples:
            assert shape == (3, SIZES[0])
            if kind != "loader":
                np.testing.assert_array_equal(found, pairs()[0][0][:3])

    def not_measured() -> None:
        assert not met

    asked: list[tuple[int, int]] = []
    uniform = trained(settings("uniform", world.size), kind, world, backend)[1]
    monkeypatch.setattr(nn.Linear, "forward", forward)
    monkeypatch.setattr(nn.MLP, "layer_flops", layer_flops, raising=False)
    losses, counts = trained(settings(partition, world.size), kind, world, backend, measured)
    met.clear()
    want, same = trained(settings(counts, world.size), kind, world, backend, not_measured)
    assert len(asked) == (partition == "flops")
    assert (losses, counts) == (want, same), "the same bits as without measuring"
    if kind == "list":  # without the schedule of the learning rate the first losses are those of one rank
        np.testing.assert_allclose(losses[0], serial()[0], rtol=CLOSE)


def test_layers_are_measured(world: Any, backend: str) -> None:
    """By the dataloader's batch, or by a sample that is given, which leaves the dataloader alone."""
    config = settings("time", world.size)
    losses, counts = trained(config, "once", world, backend)
    assert sum(counts) == sum(trained(settings("uniform", world.size), "once", world, backend)[1])
    assert trained(settings(counts, world.size), "once", world, backend)[0] == losses
    with pla.launch(config, world, backend) as mesh:
        whole = mlp(mesh)
        given = pla.Tensor(pla.zeros((3, 7), mesh.grid, whole.input_layout(), np.float64))
        for sample in (given, lambda: given):
            batches = iter(pairs())
            _, train, _, _ = pla.initialize(mlp(mesh), lambda p: AdamW(p), None, batches, sample=sample)
            assert train is not None
            assert len(list(batches)) == 2
            pla.initialize(mlp(mesh), lambda p: AdamW(p), sample=sample)
        with pytest.raises(ConfigError, match=r"partition='time' measures.*initialize a train_dataloader, or sample="):
            pla.initialize(mlp(mesh), lambda p: AdamW(p))
        with pytest.raises(ConfigError, match=r"first batch of train_dataloader, which gives none: give sample="):
            pla.initialize(mlp(mesh), lambda p: AdamW(p), train_dataloader=[])
        with pytest.raises(EngineError, match=r"the batches of rank 1 end, those of other ranks go on"):
            pla.initialize(mlp(mesh), lambda p: AdamW(p), train_dataloader=[] if world.rank == 1 else pairs())


@pytest.mark.ranks(1, 2)
def test_a_feed_gives_again_what_it_was_asked_for_first(world: Any) -> None:
    def drawn() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for pair in pairs():
            calls.append(0)
            yield pair

    calls: list[int] = []
    feed = Feed(drawn(), world)
    for parts, rows in ((1, 11), (4, 3), (4, 3)):
        assert len(feed.first(parts)[0]) == rows
    assert len(calls) == 1, "it is drawn once"
    found = list(feed)
    assert len(calls) == len(found) == 2
    for (x, _), (want, _) in zip(found, pairs(), strict=True):
        np.testing.assert_array_equal(x, want)
    again = Feed(pairs(), world)
    again.first(2)
    assert len(list(again.at(0, 1))) == 1
    assert len(list(again)) == 2
