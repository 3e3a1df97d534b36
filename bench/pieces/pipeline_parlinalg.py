"""One piece of `bench/pipeline.py`: parlinalg's pipelines, a rank a core.

usage: mpiexec -n P python pipeline_parlinalg.py SCHEDULE SIZES MICROBATCHES COUNTS WARM STEPS [BATCHES]

COUNTS are the layers of each stage (embedding, blocks, head), such as 3,3; there may be several stages a rank.  An
asynchronous schedule passes BATCHES batches between two flushes, with a step of the optimizer each.

After the steps were timed, what each stage takes is measured apart from any schedule, all ranks at the same time; from
that the schedule is simulated.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from gpt import LEARNING_RATE, Memory, Sizes, batches, timed, weights

import parlinalg as pla
from parlinalg import nn
from parlinalg.autograd import no_sync, ops
from parlinalg.datasets import Batch
from parlinalg.pipeline import AsynchronousWorker, Op, make_schedule, split
from parlinalg.pipeline.model import Stage
from parlinalg.pipeline.run import InFlight
from parlinalg.pipeline.simulate import Costs, predict
from parlinalg.pipeline.worker import Worker

REPEATS = 9


class Text:
    """A language model as a worker trains it."""

    def context(self, batch: Batch) -> Any:
        return nullcontext([])

    def losses_of(self, output: Any, batch: Batch) -> Any:
        return *ops.cross_entropy_sum(output, batch.y), {}


@dataclass
class Prepared:
    """A pipeline, and its data as microbatches."""

    mesh: Any
    worker: Worker
    optimizer: Any
    data: list[list[Batch]]

    def step(self, number: int) -> float:
        """The mean loss of one run of the schedule."""
        parts = self.data[number % len(self.data)]
        count, stepping = sum(part.count for part in parts), self.worker.schedule.asynchronous
        told = self.worker.step(parts, Text(), number, 1.0 if stepping else 1 / count)
        if not stepping:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return told["loss"] / count


def prepared(name: str, sizes: Sizes, microbatches: int, counts: list[int], runs: int) -> Prepared:
    """All that trains, on this rank."""
    mesh = pla.launch({"parallel": {"pipeline": ranks()}}, backend="numpy")
    size = mesh.topology.size
    late = name.startswith("pipedream")
    chunks = len(counts) // size if name == "interleaved" else None
    schedule = make_schedule(
        name, size, microbatches * (runs if late else 1), chunks, every=microbatches if late else None
    )
    whole = nn.GPT(
        vocab_size=sizes.vocab, max_position_embeddings=sizes.seq, hidden_size=sizes.d,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, grid=mesh.grid, scheme=mesh.scheme,
        tie_word_embeddings=False,
    )  # fmt: skip
    model = split(whole, mesh.topology, schedule, counts).initialize(0)
    model.load_state_dict(
        {n: value.reshape(model.inventory[n].shape) for n, value in weights(sizes, tied=False).items()}
    )
    optimizer = pla.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    reducer = pla.parallel.GradientReducer(model.parameters())
    if late:
        worker: Worker = AsynchronousWorker(model, schedule, optimizer, reducer)
    else:
        worker = Worker(model, schedule, reducer)
    every = [cut(batch, microbatches, whole) for batch in batches(sizes)]
    if late:
        every = [[part for i in range(runs) for part in every[(first + i) % len(every)]] for first in range(len(every))]
    return Prepared(mesh, worker, optimizer, every)


def ranks() -> int:
    from parlinalg.comm import open_comm

    comm = open_comm()
    size = comm.size
    comm.free()
    return size


def cut(batch: tuple[np.ndarray, np.ndarray], microbatches: int, model: Any) -> list[Batch]:
    """The microbatches of a batch."""
    layouts = model.ids_layout, model.targets_layout
    found, at = [], 0
    for parts in zip(*(np.array_split(part, microbatches) for part in batch), strict=True):
        x, y = (pla.distribute(part, model.grid, layout) for part, layout in zip(parts, layouts, strict=True))
        found.append(Batch(x, y, at))
        at += len(x.block)
    return found


# ------------------------------------------------------------------ what stages take
def costs(made: Prepared, sizes: Sizes) -> Costs:
    """Return the seconds of passes of one microbatch, of messages and of steps: medians."""
    worker, place = made.worker, made.mesh.topology
    batch = made.data[0][0]
    mine = [[stage.number, *passes(stage, batch, made, sizes)] for stage in worker.model.chunks]
    told = worker.comm.share([mine, *steps(made)])
    by_stage: dict[int, list[list[float]]] = {}
    for theirs, _, _ in told:
        for number, *times in theirs:
            by_stage.setdefault(number, []).append(times)
    mean = [np.mean(by_stage[number], axis=0).tolist() for number in sorted(by_stage)]
    forward, backward, weight = (list(column) for column in zip(*mean, strict=True))
    latency = messages(made, sizes) if place.size > 1 else 0.0
    return Costs(forward, backward, [min(w, b) for w, b in zip(weight, backward, strict=True)], latency,
                 reduce=[theirs[1] for theirs in told], step=[theirs[2] for theirs in told])  # fmt: skip


def passes(stage: Stage, batch: Batch, made: Prepared, sizes: Sizes) -> tuple[float, float, float]:
    """Seconds of a stage's forward pass, of its backward pass, in one part or two as the schedule has it, and of the
    part of that for the weights."""
    shape = (len(batch), sizes.seq, sizes.d)
    x = np.random.default_rng(0).standard_normal(shape, np.float32)
    found: list[list[float]] = []
    for i in range(2 * REPEATS):
        later = i % 2 == 1
        given = [pla.Tensor(pla.distribute(x, made.mesh.grid, made.mesh.scheme.residual), requires_grad=True)]
        made.mesh.world.barrier()
        times = [perf_counter()]
        with no_sync(), nn.training_step(0):
            y = stage(batch.x if stage.first else given[0])
            if stage.last:
                passage = InFlight(made.mesh.grid, given)
                passage.add(Text().losses_of(y, batch)[0], 1.0)
            else:
                passage = InFlight(made.mesh.grid, given, [y])
            times.append(perf_counter())
            passage.backward(() if stage.last else [x.copy()], later=later)
            times.append(perf_counter())
            if later:
                passage.parameters()
            times.append(perf_counter())
        made.optimizer.zero_grad()
        found.append(np.diff(times).tolist())
    whole, apart = found[0::2], found[1::2]
    split_up = any(i.op is Op.BACKWARD_WEIGHT for i in made.worker.schedule.orders[0])
    backward = median(t[1] + t[2] for t in apart) if split_up else median(t[1] for t in whole)
    return median(t[0] for t in found), backward, median(t[2] for t in apart)


def steps(made: Prepared) -> tuple[float, float]:
    """Seconds of settling gradients, and of a step of the optimizer, with a copy of the weights where that is made."""
    worker, settling, found = made.worker, [], []
    for _ in range(REPEATS):
        for p in worker.model.parameters():
            p.grad = p.data.like(np.zeros_like(p.block), p.layout)
        worker.settle()  # now they lie where a backward pass leaves them
        made.mesh.world.barrier()
        start = perf_counter()
        worker.settle()
        settling.append(perf_counter() - start)
        made.mesh.world.barrier()
        start = perf_counter()
        if isinstance(worker, AsynchronousWorker) and worker.schedule.versions[worker.topology.rank] > 1:
            stash = worker.stash
            stash.begin()
            stash.advance(keep=True)
            made.optimizer.step()
            stash.drop(0)
        else:
            made.optimizer.step()
        made.optimizer.zero_grad()
        found.append(perf_counter() - start)
    return median(settling), median(found)


def messages(made: Prepared, sizes: Sizes) -> float:
    """Seconds that a microbatch's activations take from one rank to the next."""
    place, comm = made.mesh.topology, made.worker.comm
    block = np.zeros((len(made.data[0][0]), sizes.seq, sizes.d), np.float32)
    pair = (place.ranks[0][0], place.ranks[1][0])
    found = [0.0]
    for _ in range(REPEATS if comm.rank in pair else 0):
        start = perf_counter()
        if comm.rank == pair[0]:
            comm.send(block, pair[1], tag=1)
            comm.receive(block, pair[1], tag=1)
        else:
            comm.receive(block, pair[0], tag=1)
            comm.send(block, pair[0], tag=1)
        found.append((perf_counter() - start) / 2)
    told: list[float] = comm.share(median(found[1:] or found))
    return told[pair[0]]


def main() -> None:
    name, sizes, microbatches = sys.argv[1], Sizes.parse(sys.argv[2]), int(sys.argv[3])
    counts, warm, steps = [int(n) for n in sys.argv[4].split(",")], int(sys.argv[5]), int(sys.argv[6])
    runs = int(sys.argv[7]) if len(sys.argv) > 7 else 1
    made = prepared(name, sizes, microbatches, counts, runs)
    mesh, worker = made.mesh, made.worker
    barrier: Callable[[], Any] = mesh.world.barrier
    told = timed(made.step, warm, steps, barrier, False, Memory(), threads=mesh.grid.threads)
    found = costs(made, sizes)
    simulated = predict(worker.schedule, found)
    told |= {
        "batches": worker.schedule.microbatches // microbatches, "predicted": simulated.makespan,
        "bubble": simulated.bubble, "peaks": simulated.peaks, "versions": worker.schedule.versions,
        "costs": {k: getattr(found, k) for k in ("forward", "backward", "weight", "latency", "reduce", "step")},
    }  # fmt: skip
    if mesh.world.rank == 0:
        print(json.dumps(told), flush=True)
    worker.close()
    mesh.close()


if __name__ == "__main__":
    main()
