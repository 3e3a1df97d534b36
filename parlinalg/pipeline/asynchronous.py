"""Asynchronous schedules: the weights change while microbatches are under way (PipeDream, PipeDream-2BW)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from parlinalg.datasets import Batch
from parlinalg.errors import ConfigError
from parlinalg.nn.auxiliary import term_weights
from parlinalg.optim import Optimizer
from parlinalg.parallel.reducer import GradientReducer
from parlinalg.pipeline.model import PipelineModel
from parlinalg.pipeline.run import Run
from parlinalg.pipeline.schedule import Instruction, Op, Schedule
from parlinalg.pipeline.stash import Stash
from parlinalg.pipeline.versions import kept
from parlinalg.pipeline.worker import Work, Worker

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
        Of the parameters held here.
    reducer : GradientReducer, optional
    update : callable, optional
        Makes a step of the optimizer and forgets the gradients, once for each of the schedule's; by default that alone.

    Raises
    ------
    ConfigError
        On all ranks, if stages share parameters, or values do not rest where they are worked with (see `Stash`).
    ScheduleError
        On all ranks, if the schedule is wrong.
    """

    def __init__(
        self, model: PipelineModel, schedule: Schedule, optimizer: Optimizer, reducer: GradientReducer | None = None,
        update: Callable[[], object] | None = None,
    ) -> None:  # fmt: skip
        refuse(model, schedule)
        self.optimizer = optimizer
        self.stash = Stash(optimizer)
        self.update = update or self._update
        super().__init__(model, schedule, reducer)

    def _update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, batches: Sequence[Batch], work: Work, step: int, factor: float = 1.0) -> dict[str, float]:
        """A run: as many steps of the optimizer as the schedule has.  Collective.

        Parameters
        ----------
        batches : sequence of Batch
            The microbatches, as for `Worker.step`; fewer end with a step of those that are left.
        work : Work
        step : int
            The number of the run, for dropout.
        factor : float
            Gradients are those of the mean loss of a step's microbatches times it.

        Returns
        -------
        dict of str to float
            The sums of the "loss" and of the measures over all microbatches, each as it passed; on every rank.
        """
        return super().step(batches, work, step, factor)

    def _fewer(self, microbatches: int) -> Schedule:
        return shorter(self.schedule, microbatches)

    def _run(self, schedule: Schedule, batches: Sequence[Batch], work: Work) -> Run:
        steps = any(i.op is Op.STEP for i in schedule.orders[self.place.rank])
        return AsynchronousRun(self, schedule, batches, work) if steps else super()._run(schedule, batches, work)


class AsynchronousRun(Run):
    """Does a rank's order, with the version of the weights that each pass is to have."""

    def __init__(
        self, worker: AsynchronousWorker, schedule: Schedule, batches: Sequence[Batch], work: Work
    ) -> None:  # fmt: skip
        super().__init__(worker, schedule, batches, work)
        self.updates, self.stash = worker.update, worker.stash
        rank = worker.place.rank
        self.version = [schedule.weights_of(rank, j) for j in range(len(batches))]
        self.place = {i: at for at, i in enumerate(self.order)}
        self.last_use = {self.version[i.microbatch]: at for i, at in self.place.items() if i.op in USES}
        """Of each version, the place of the last pass that has it."""
        self.shares, self.weights = shares(
            self.order, [len(batch) for batch in batches], [batch.count for batch in batches]
        )
        for op in USES:
            self.does[op] = self._with_version(self.does[op])
        self.does[Op.STEP] = self.make_step
        self.timed = self.timed | {Op.STEP}

    def training(self, step: int, factor: float) -> None:
        super().training(step, factor)
        self.whole = factor

    def go(self) -> None:
        self.stash.begin()
        try:
            super().go()
        finally:
            self.stash.use(self.stash.newest)

    def _with_version(self, does: Callable[[Instruction], None]) -> Callable[[Instruction], None]:
        def done(i: Instruction) -> None:
            version = self.version[i.microbatch]
            self.stash.use(version)
            self.factor = self.whole * self.shares[i.microbatch]
            does(i)
            if self.last_use[version] == self.place[i] and version != self.stash.newest:
                self.stash.drop(version)

        return done

    def make_step(self, i: Instruction) -> None:
        """A step of the optimizer: the newest version is changed, and stays where it is still needed."""
        newest = self.stash.newest
        self.stash.advance(keep=self.last_use.get(newest, -1) > self.place[i])
        self.updates()


def refuse(model: PipelineModel, schedule: Schedule) -> None:
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


def shares(
    order: Sequence[Instruction], rows: Sequence[int], counts: Sequence[int]
) -> tuple[list[float], list[float]]:  # fmt: skip
    """For each microbatch one over the losses of its step, and the weight of the terms that layers add.

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


def shorter(schedule: Schedule, microbatches: int) -> Schedule:
    """The first microbatches of an asynchronous schedule; those that make no whole step make one at the end."""
    orders = []
    for order in schedule.orders:
        own = [i for i in order if i.microbatch < microbatches]
        last = max((i.microbatch for i in own if i.op is Op.STEP), default=-1)
        if last < microbatches - 1:
            own += [Instruction(op, 0, microbatches - 1) for op in (Op.REDUCE_GRADIENTS, Op.STEP)]
        orders.append(tuple(own))
    weights = tuple(of_rank[:microbatches] for of_rank in schedule.weights)
    versions = tuple(kept(order, used) for order, used in zip(orders, weights, strict=True))
    return replace(schedule, microbatches=microbatches, orders=tuple(orders), versions=versions, weights=weights)
