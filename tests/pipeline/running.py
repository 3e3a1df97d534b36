"""A small language model trained through a pipeline, and alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

import parlinalg as pla
from parlinalg import nn, schemes, sequence_order
from parlinalg.autograd import ops
from parlinalg.datasets import Batch
from parlinalg.layout import piece
from parlinalg.optim import AdamW
from parlinalg.parallel import GradientReducer, WeightGatherer, ZeRO, examine
from parlinalg.pipeline import Schedule, Worker, discover, make_schedule, split
from parlinalg.train import Mesh, launch
from tests.cases import placed
from tests.models import alone

ROWS, LENGTH, VOCABULARY = 9, 6, 11
SERIAL = schemes.discover()["serial"].SCHEME
SYNCHRONOUS = [name for name, file in discover().items() if "pipedream" not in name]


def model_on(scheme: Any, grid: Any, layers: int, **options: Any) -> nn.GPT:
    """A GPT with dropout, declared."""
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "hidden_size": 12, "num_attention_heads": 4}
    drops = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), 0.1)
    given = {**sizes, **drops, "num_hidden_layers": layers, "dtype": "float64", **options}
    return nn.GPT(scheme=scheme, grid=grid, **given)


def clipping(norm: float, most: float | None) -> float:
    """What gradients of a norm are multiplied by, so that it is at most `most`."""
    return 1.0 if most is None else min(1.0, most / (norm + 1e-6))


class Text:
    """What a worker is to do with a language model."""

    def __init__(self, added: bool = False) -> None:
        self.added = added

    @contextmanager
    def context(self, batch: Batch) -> Iterator[Any]:
        asked = nn.added_losses() if self.added else nullcontext([])
        with nn.sequence_positions(batch.positions), asked as terms:
            yield terms

    def losses_of(self, output: Any, batch: Batch) -> tuple[pla.Tensor, int, dict[str, float]]:
        total, count = ops.cross_entropy_sum(output, batch.y)
        return total, count, {"targets": float(count)}


def batches(model: Any, step: int, parts: int, order: np.ndarray | None = None, rows: int = ROWS) -> list[Batch]:
    """The microbatches of a step; some targets do not count."""
    ids, targets = np.random.default_rng(step).integers(0, VOCABULARY, (2, rows, LENGTH))
    targets[np.random.default_rng(step).random(targets.shape) < 0.2] = -100
    places = slice(None) if order is None else order
    found = []
    for i in range(parts):
        cut = piece(rows, parts, i)
        if cut:
            x, y = ids[cut.start : cut.stop, places], targets[cut.start : cut.stop, places]
            here, there = placed(x, model.grid, model.ids_layout), placed(y, model.grid, model.targets_layout)
            found.append(Batch(here, there, cut.start, order, None, int((y == -100).sum())))
    return found


_serial: dict[str, tuple[list[float], list[float]]] = {}


def serial(
    world: Any, layers: int, steps: int = 10, clip: float | None = None, added: bool = False, **options: Any
) -> tuple[list[float], list[float]]:  # fmt: skip
    """The losses and the norms without a pipeline, on one rank; known to all ranks."""
    key = repr((layers, steps, clip, added, sorted(options.items())))
    if key not in _serial:
        found = None
        with alone(world) as grid:
            if world.rank == 0:
                found = _trained_alone(grid, layers, steps, clip, added, options)
        _serial[key] = world.share(found)[0]
    return _serial[key]


def _trained_alone(
    grid: Any, layers: int, steps: int, clip: float | None, added: bool, options: Mapping[str, Any]
) -> tuple[list[float], list[float]]:
    model = model_on(SERIAL, grid, layers, **options).initialize(5)
    optimizer, work, losses, norms = AdamW(model.parameters(), 0.01), Text(added), [], []
    for step in range(steps):
        (batch,) = batches(model, step, 1)
        with nn.training_step(step), work.context(batch) as terms:
            total, count, _ = work.losses_of(model(batch.x), batch)
        loss = total * (1 / count)
        for term in terms:
            loss = loss + term
        loss.backward()
        losses.append(loss.item())
        norms.append(examine(model.parameters()).norm)
        optimizer.step(clipping(norms[-1], clip))
        optimizer.zero_grad()
    return losses, norms


class Pipeline:
    """A model in a pipeline with all that trains it."""

    def __init__(
        self, mesh: Mesh, schedule: Schedule, layers: int, *, zero: int = 0, added: bool = False,
        accumulate: str = "reduce-scatter", partition: Any = "uniform", **options: Any,
    ) -> None:  # fmt: skip
        scheme = mesh.scheme.with_weights_cut("data") if zero == 3 else mesh.scheme
        self.mesh, self.schedule = mesh, schedule
        self.model = split(model_on(scheme, mesh.grid, layers, **options), mesh.topology, schedule, partition)
        self.model.initialize(5)
        handlers = [ZeRO(zero, "data", accumulate)] if zero else []
        chunks = [chunk.parameters() for chunk in self.model.chunks]
        self.reducer = GradientReducer(self.model.parameters(), handlers, 2000, 4000, chunks=chunks)
        self.gatherer = WeightGatherer(self.model, accumulate=accumulate) if zero == 3 else None
        self.worker = Worker(self.model, schedule, self.reducer)
        self.optimizer = AdamW(self.model.parameters(), 0.01)
        self.work = Text(added)
        ring = mesh.spec.ring
        self.order = sequence_order(LENGTH, ring, "zigzag") if ring > 1 else None

    def batches(self, step: int, parts: int | None = None, rows: int = ROWS) -> list[Batch]:
        return batches(self.model.full_model, step, parts or self.schedule.microbatches, self.order, rows)

    def step(self, step: int, clip: float | None = None) -> tuple[float, float]:
        """One step; its loss and norm."""
        parts = self.batches(step)
        count = sum(part.count for part in parts)
        sums = self.worker.step(parts, self.work, step, 1 / count)
        assert sums["targets"] == count
        norm = self.worker.examine(self.optimizer.parameters).norm
        self.optimizer.step(clipping(norm, clip))
        self.optimizer.zero_grad()
        return sums["loss"] / count, norm

    def close(self) -> None:
        self.worker.close()


@contextmanager
def pipeline(
    world: Any, backend: str, name: str, parallel: Mapping[str, Any], microbatches: int, layers: int, *,
    chunks: int | None = None, **options: Any,
) -> Iterator[Pipeline]:  # fmt: skip
    """A pipeline over all ranks."""
    with launch({"parallel": {**parallel}}, world, backend) as mesh:
        made = Pipeline(mesh, make_schedule(name, mesh.topology.size, microbatches, chunks), layers, **options)
        yield made
        made.close()


def differs(found: Sequence[float], want: Sequence[float], tol: float = 1e-12) -> list[str]:
    """Where numbers are not the same."""
    return [
        f"step {i}: {a!r}, not {b!r}" for i, (a, b) in enumerate(zip(found, want, strict=True))
        if not abs(a - b) <= tol * abs(b)
    ]  # fmt: skip
