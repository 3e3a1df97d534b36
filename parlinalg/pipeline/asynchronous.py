"""Asynchronous schedules: the weights change while microbatches are in flight (PipeDream, PipeDream-2BW).

A rank keeps versions of its weights: the newest one, which the optimizer updates, and older ones that microbatches
still need ("weight stashing": Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", 2019).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from parlinalg.array import DistArray
from parlinalg.autograd import Parameter
from parlinalg.autograd.storage import owners
from parlinalg.backend.views import address
from parlinalg.comm.together import together
from parlinalg.datasets import Batch
from parlinalg.errors import ConfigError
from parlinalg.nn.added_losses import term_weights
from parlinalg.optim import Optimizer
from parlinalg.parallel.reducer import GradientReducer
from parlinalg.pipeline.model import PipelineModel
from parlinalg.pipeline.run import ScheduleRun
from parlinalg.pipeline.schedule import Instruction, Op, Schedule, versions_kept
from parlinalg.pipeline.worker import Task, Worker

Block = Any


class WeightStash:
    """Versions of the values of an optimizer's parameters, numbered by the steps behind them.

    Before a step whose old version is still needed, the newest values move to other memory, a copy; so what the tape
    holds of the old ones stays as it is.  Memory of versions that are dropped is used again.

    Parameters
    ----------
    optimizer : Optimizer

    Raises
    ------
    ConfigError
        If values do not rest where they are worked with: fetched ahead (ZeRO-3) or offloaded.

    Attributes
    ----------
    newest : int
        The steps behind the newest version, since `begin`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters = [p for p in optimizer.parameters if p.requires_grad]
        for p in self.parameters:
            gathered = p.storage.gatherer is not None
            if gathered or p.data.resident is None:
                how = "fetched ahead of their use" if gathered else "offloaded"
                raise ConfigError(
                    f"asynchronous schedules keep versions of weights in memory, and {p.name!r} is {how}; use zero "
                    "stage 0, 1 or 2 and no offload of parameters, or a synchronous schedule such as 1f1b"
                )
        self._free: dict[tuple[int, str], list[Block]] = {}
        self._made: set[int] = set()
        """The addresses of memory that is this stash's own."""
        self.begin()

    def begin(self) -> None:
        """Restart the count: the present values are version 0, and the only one."""
        self.newest = 0
        self._versions: dict[int, list[DistArray]] = {0: [p.data for p in self.parameters]}
        self._used = 0

    def __len__(self) -> int:
        """Return the number of versions."""
        return len(self._versions)

    def use(self, version: int) -> None:
        """Switch the parameters to a stored version."""
        if version != self._used:
            for p, data in zip(self.parameters, self._versions[version], strict=True):
                p.data = data
            self._used = version

    def advance(self, keep: bool) -> None:
        """Prepare for a step, which makes the next version from the newest.  Collective over the axes of shards.

        Parameters
        ----------
        keep : bool
            Keep the version before.
        """
        self.use(self.newest)
        before = [p.data for p in self.parameters]
        self.optimizer.arrange()  # where the optimizer wants them; at the first step they move there, copied
        if keep:
            self._move([p for p, old in zip(self.parameters, before, strict=True) if p.data is old])
            self._versions[self.newest] = before
        else:
            del self._versions[self.newest]
        self.newest += 1
        self._versions[self.newest] = [p.data for p in self.parameters]
        self._used = self.newest

    def drop(self, version: int) -> None:
        """Forget a version that is not the newest; nothing may need it any more."""
        for place, base in _bases(self._versions.pop(version)).items():
            if place in self._made:
                self._free.setdefault((base.size, base.dtype.str), []).append(base)

    def _move(self, parameters: Sequence[Parameter]) -> None:
        """Copy the values to other memory, side by side as they are."""
        places = _bases([p.data for p in parameters])
        fresh = {place: self._copy(base, parameters[0].grid.backend) for place, base in places.items()}
        for p in parameters:
            base = _base(p.block)
            if not base.size:  # nothing that a step could change
                continue
            place = address(base)
            at = (address(p.block) - place) // p.dtype.itemsize
            block = fresh[place][at : at + p.block.size].reshape(p.block.shape)
            p.data = DistArray(block, p.shape, p.layout, p.grid)
        for owner in owners(parameters):
            owner.moved(fresh)
        self.optimizer.flat.moved()

    def _copy(self, base: Block, backend: Any) -> Block:
        free = self._free.get((base.size, base.dtype.str))
        new = free.pop() if free else backend.empty(base.size, base.dtype)
        self._made.add(address(new))
        new[...] = base.reshape(-1)
        return new


def _base(block: Block) -> Block:
    return block if block.base is None else block.base


def _bases(versions: Sequence[DistArray]) -> dict[int, Block]:
    """Return the arrays in which blocks lie, by their addresses; none without elements."""
    return {address(base): base for base in (_base(data.block) for data in versions) if base.size}


USES = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})


class AsynchronousWorker(Worker):
    """This rank's part of a pipeline whose stages update their own weights as soon as they have gradients.

    A run, one call of `step`, begins and ends with weights of one version everywhere.  Within it a microbatch passes
    forward and back through the version that the schedule says; a step of the optimizer changes the newest one by the
    gradient of the mean loss of its microbatches.  Rank r keeps `schedule.versions[r]` versions.

    Parameters
    ----------
    model : PipelineModel
        Initialized; no parameter is held by several stages.
    schedule : Schedule
        An asynchronous one.
    optimizer : Optimizer
        The optimizer of the parameters held here.
    reducer : GradientReducer, optional
    update : callable, optional
        Makes a step of the optimizer and forgets the gradients, once for each of the schedule's; by default that alone.

    Raises
    ------
    ConfigError
        On all ranks, if stages share parameters, or values do not rest where they are worked with (see `WeightStash`).
    ScheduleError
        On all ranks, if the schedule is wrong.
    """

    def __init__(
        self, model: PipelineModel, schedule: Schedule, optimizer: Optimizer, reducer: GradientReducer | None = None,
        update: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        check_trainable(model, schedule)
        self.optimizer = optimizer
        self.stash = together(model.topology.world, lambda: WeightStash(optimizer), "versions of weights")
        self.update = update or self._update
        super().__init__(model, schedule, reducer)

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, batches: Sequence[Batch], task: Task, step: int, factor: float = 1.0) -> dict[str, float]:
        """Run as many steps of the optimizer as the schedule has.  Collective.

        Parameters
        ----------
        batches : sequence of Batch
            The microbatches, as for `Worker.step`; fewer end with a step of those that are left.
        task : Task
        step : int
            The number of the run, for dropout.
        factor : float
            Gradients are those of the mean loss of a step's microbatches times it.

        Returns
        -------
        dict of str to float
            The sums of the "loss" and of the measures over all microbatches, each as it passed; on every rank.
        """
        return super().step(batches, task, step, factor)

    def _fewer(self, microbatches: int) -> Schedule:
        return truncated(self.schedule, microbatches)

    def _run(self, schedule: Schedule, batches: Sequence[Batch], task: Task) -> ScheduleRun:
        steps = any(i.op is Op.STEP for i in schedule.orders[self.topology.rank])
        return AsynchronousRun(self, schedule, batches, task) if steps else super()._run(schedule, batches, task)


class AsynchronousRun(ScheduleRun):
    """The execution of a rank's instructions, each with its version of the weights."""

    def __init__(
        self, worker: AsynchronousWorker, schedule: Schedule, batches: Sequence[Batch], task: Task
    ) -> None:  # fmt: skip
        super().__init__(worker, schedule, batches, task)
        self.updates, self.stash = worker.update, worker.stash
        rank = worker.topology.rank
        self.version = [schedule.weights_of(rank, j) for j in range(len(batches))]
        self.order_index = {i: at for at, i in enumerate(self.order)}
        self.last_use = {self.version[i.microbatch]: at for i, at in self.order_index.items() if i.op in USES}
        """The index of the last pass that uses each version."""
        self.shares, self.weights = loss_weights(
            self.order, [len(batch) for batch in batches], [batch.count for batch in batches]
        )
        for op in USES:
            self.handlers[op] = self._with_version(self.handlers[op])
        self.handlers[Op.STEP] = self.make_step
        self.timed = self.timed | {Op.STEP}

    def training(self, step: int, factor: float) -> None:
        super().training(step, factor)
        self.run_factor = factor

    def go(self) -> None:
        self.stash.begin()
        try:
            super().go()
        finally:
            self.stash.use(self.stash.newest)

    def _with_version(self, handler: Callable[[Instruction], None]) -> Callable[[Instruction], None]:
        def done(i: Instruction) -> None:
            version = self.version[i.microbatch]
            self.stash.use(version)
            self.factor = self.run_factor * self.shares[i.microbatch]
            handler(i)
            if self.last_use[version] == self.order_index[i] and version != self.stash.newest:
                self.stash.drop(version)

        return done

    def make_step(self, i: Instruction) -> None:
        """Make a step of the optimizer: the newest version changes, and is kept where microbatches still need it."""
        newest = self.stash.newest
        self.stash.advance(keep=self.last_use.get(newest, -1) > self.order_index[i])
        self.updates()


def check_trainable(model: PipelineModel, schedule: Schedule) -> None:
    """Raise a ConfigError unless a schedule is asynchronous and a model can be trained by it."""
    if not schedule.asynchronous:
        raise ConfigError(f"the schedule {schedule.name!r} is synchronous: it takes a Worker, which makes no steps")
    if model.shared:
        name, stages = next(iter(model.shared.items()))
        raise ConfigError(
            f"{schedule.name}: {name!r} is held by stages {', '.join(map(str, stages))}, whose steps are not made at "
            "one time; untie it (a language model's head by tie_word_embeddings=False), or take a synchronous "
            "schedule, such as 1f1b"
        )


def loss_weights(
    order: Sequence[Instruction], rows: Sequence[int], counts: Sequence[int]
) -> tuple[list[float], list[float]]:  # fmt: skip
    """Return, by microbatch, one over the number of losses of its step, and the weight of added loss terms.

    Parameters
    ----------
    order : sequence of Instruction
        A rank's.
    rows, counts : sequence of int
        The rows and the losses of each microbatch.
    """
    found: list[float] = []
    weights: list[float] = []
    for i in order:
        if i.op is Op.STEP:
            step = slice(len(found), i.microbatch + 1)
            found += [1 / max(1, sum(counts[step]))] * len(counts[step])
            weights += term_weights(rows[step], counts[step])
    return found, weights


def truncated(schedule: Schedule, microbatches: int) -> Schedule:
    """Return the first microbatches of an asynchronous schedule; an incomplete step is made at the end."""
    orders = []
    for order in schedule.orders:
        own = [i for i in order if i.microbatch < microbatches]
        last = max((i.microbatch for i in own if i.op is Op.STEP), default=-1)
        if last < microbatches - 1:
            own += [Instruction(op, 0, microbatches - 1) for op in (Op.REDUCE_GRADIENTS, Op.STEP)]
        orders.append(tuple(own))
    weights = tuple(of_rank[:microbatches] for of_rank in schedule.weights)
    versions = tuple(versions_kept(order, used) for order, used in zip(orders, weights, strict=True))
    return replace(schedule, microbatches=microbatches, orders=tuple(orders), versions=versions, weights=weights)
