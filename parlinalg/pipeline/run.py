"""One run of a schedule: the passes of one batch's microbatches through this rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import TYPE_CHECKING, Any

from parlinalg.array import DistArray
from parlinalg.autograd import Tensor, no_sync
from parlinalg.autograd.tape import recording
from parlinalg.comm.watch import slot
from parlinalg.datasets import Batch
from parlinalg.nn import training_step
from parlinalg.nn.auxiliary import term_weights
from parlinalg.pipeline.edges import Edge, Incoming
from parlinalg.pipeline.schedule import COMPUTE, RECEIVES, Chunk, Instruction, Op, Schedule
from parlinalg.pipeline.simulate import Span
from parlinalg.pipeline.stagewalk import Passage
from parlinalg.pipeline.tree import Form, put_together, take_apart

if TYPE_CHECKING:
    from parlinalg.pipeline.worker import Work, Worker

Block = Any
Unit = tuple[int, int]  # a chunk and a microbatch
AHEAD = 2
"""Receives that are posted before they are due."""
WORDS = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.BACKWARD_INPUT: "backward (inputs)",
         Op.BACKWARD_WEIGHT: "backward (weights)", Op.RECEIVE_FORWARD: "forward", Op.RECEIVE_BACKWARD: "backward",
         Op.SEND_FORWARD: "forward", Op.SEND_BACKWARD: "backward"}  # fmt: skip


class Run:
    """Does a rank's order.

    Attributes
    ----------
    sums : list of (int, int, dict)
        By microbatch and stage, the losses and measures.
    doing : str
        What the rank is at: "stage 2, microbatch 3, backward".
    """

    def __init__(self, worker: Worker, schedule: Schedule, batches: Sequence[Batch], work: Work) -> None:
        self.worker, self.schedule, self.batches, self.work = worker, schedule, batches, work
        self.edges, self.grid = worker.edges, worker.grid
        rank = worker.place.rank
        self.order, self.held = schedule.orders[rank], schedule.chunks[rank]
        self.here = {chunk: c for c, chunk in enumerate(self.held)}
        self.learns, self.factor = False, 0.0
        self.weights = term_weights([len(batch) for batch in batches], [batch.count for batch in batches])
        self.step: int | None = None
        self.likes = [_like(batch) for batch in batches]
        self.posted: dict[Instruction, Incoming] = {}
        self.next_receive = 0
        self.inputs: dict[Unit, tuple[Form, list[Tensor]]] = {}
        self.outputs: dict[Unit, tuple[Form, list[Tensor]]] = {}
        self.grads: dict[Unit, list[Block | None]] = {}
        self.back: dict[Unit, list[DistArray | None]] = {}
        self.passages: dict[Unit, Passage] = {}
        self.losses: list[tuple[int, int, Tensor, dict[str, float], float]] = []
        self.sums: list[tuple[int, int, dict[str, float]]] = []
        self.doing = "before the first microbatch"
        self.ends = lasts(self.order)
        self.timed = COMPUTE | {Op.REDUCE_GRADIENTS}
        self.does: dict[Op, Callable[[Instruction], None]] = {
            Op.FORWARD: self.forward,
            Op.BACKWARD: lambda i: self.backward(i, later=False),
            Op.BACKWARD_INPUT: lambda i: self.backward(i, later=True),
            Op.BACKWARD_WEIGHT: self.backward_weight,
            Op.SEND_FORWARD: self.send_forward,
            Op.RECEIVE_FORWARD: self.receive_forward,
            Op.SEND_BACKWARD: self.send_backward,
            Op.RECEIVE_BACKWARD: self.receive_backward,
            Op.REDUCE_GRADIENTS: lambda _: self.worker.settle(),
            Op.STEP: lambda _: None,  # who trains makes the step, of a synchronous schedule
        }

    def training(self, step: int, factor: float) -> None:
        """Learn: this is the number of the step, and what the losses are multiplied by."""
        self.learns, self.step, self.factor = True, step, factor

    def using(self) -> None:
        """Use the model only."""
        self.learns = False

    def go(self) -> None:
        """Do all instructions."""
        spans, start = self.worker.spans, 0.0
        if spans is not None:
            spans.clear()
            self.worker.comm.barrier()
            start = perf_counter()
        self.grid.polled.append(self.edges)
        try:
            with no_sync():
                for at, instruction in enumerate(self.order):
                    self.tell(instruction)
                    self.post_ahead(at)
                    began = perf_counter()
                    self.does[instruction.op](instruction)
                    if spans is not None and instruction.op in self.timed:
                        self.grid.backend.synchronize()
                        spans.append(
                            Span(self.worker.place.rank, instruction.op, instruction.chunk, instruction.microbatch,
                                 began - start, perf_counter() - start)
                        )  # fmt: skip
                self.doing = slot.doing = "after the last microbatch"
                for stage, j, loss, measures, factor in self.losses:
                    self.sums.append((j, stage, {"loss": float(loss.item()) * factor, **measures}))
                self.edges.finish()
        finally:
            self.grid.polled[:] = [each for each in self.grid.polled if each is not self.edges]
            slot.doing = None

    def tell(self, i: Instruction) -> None:
        """Say what this rank is at, for the monitor and for errors."""
        if i.op in WORDS:
            chunk = self.held[i.chunk]
            copy = f" of copy {chunk.copy}" if self.schedule.copies > 1 else ""
            self.doing = f"stage {chunk.stage}{copy}, microbatch {i.microbatch}, {WORDS[i.op]}"
        else:
            self.doing = i.op.value
        slot.doing = self.doing

    # ------------------------------------------------------------------ messages
    def post_ahead(self, at: int) -> None:
        """Post the next receives, as far as it is known what they bring."""
        self.next_receive = max(self.next_receive, at)
        while len(self.posted) < AHEAD and self.next_receive < len(self.order):
            i = self.order[self.next_receive]
            if i.op in RECEIVES:
                edge = self.edge(i)
                if not self.edges.known(edge, self.like(i)):
                    return
                self.posted[i] = self.post(i, edge)
            self.next_receive += 1

    def post(self, i: Instruction, edge: Edge) -> Incoming:
        post = self.edges.post if i.op is Op.RECEIVE_FORWARD else self.edges.post_back
        return post(edge, i.microbatch, i.peer, self.like(i))

    def arrived(self, i: Instruction) -> list[Block]:
        """What a receive brings."""
        incoming = self.posted.pop(i, None)
        if incoming is None:
            incoming = self.post(i, self.edge(i))
        return self.edges.take(incoming)

    def edge(self, i: Instruction) -> Edge:
        """The edge that a message passes."""
        chunk = self.held[i.chunk]
        after = i.op in (Op.SEND_FORWARD, Op.RECEIVE_BACKWARD)
        return Edge(chunk.stage + after, chunk.copy)

    def like(self, i: Instruction) -> Hashable:
        """What a microbatch has in common with those that look alike at every edge."""
        return self.likes[i.microbatch], recording()

    def receive_forward(self, i: Instruction) -> None:
        edge = self.edge(i)
        blocks = self.arrived(i)
        frame = self.edges.frame(edge, self.like(i))
        tensors = [
            Tensor(DistArray(block, leaf.shape, leaf.target, self.grid), leaf.wants)
            for block, leaf in zip(blocks, frame.leaves, strict=True)
        ]
        self.inputs[i.chunk, i.microbatch] = frame.form, tensors

    def send_forward(self, i: Instruction) -> None:
        form, tensors = self.outputs.pop((i.chunk, i.microbatch))
        self.edges.send(self.edge(i), i.microbatch, i.peer, self.like(i), form, tensors)

    def receive_backward(self, i: Instruction) -> None:
        self.grads[i.chunk, i.microbatch] = self.arrived(i)

    def send_backward(self, i: Instruction) -> None:
        grads = self.back.pop((i.chunk, i.microbatch))
        self.edges.send_back(self.edge(i), i.microbatch, i.peer, self.like(i), grads)

    # ------------------------------------------------------------------ passes
    def forward(self, i: Instruction) -> None:
        unit, batch, stage = (i.chunk, i.microbatch), self.batches[i.microbatch], self.worker.model.chunks[i.chunk]
        leaves: list[Tensor] = []
        if stage.first:
            x = batch.x
        else:
            form, leaves = self.inputs.pop(unit)
            x = put_together(form, leaves)
        with ExitStack() as around:
            if self.step is not None:
                around.enter_context(training_step(self.step, batch.offset))
            terms = around.enter_context(self.work.context(batch))
            given = stage(x)
            del x
            if stage.last:
                passage = self.last(i, given, leaves)
            else:
                form, tensors = take_apart(given)
                whole = [t.redistribute(t.layout.with_partial(())) if t.layout.partial else t for t in tensors]
                passage = Passage(self.grid, leaves, whole)
                self.hand_on(i, form, whole)
        if self.learns:
            for term in terms or ():
                passage.add(term, self.factor * self.weights[i.microbatch])
                self.losses.append((stage.number, i.microbatch, term.detach(), {}, self.weights[i.microbatch]))
            self.passages[unit] = passage
            self.worker.held = max(self.worker.held, len(self.passages))

    def last(self, i: Instruction, output: Any, leaves: list[Tensor]) -> Passage:
        """The last stage's output: the loss."""
        loss, _, measures = self.work.losses_of(output, self.batches[i.microbatch])
        if self.worker.outputs is not None:
            self.worker.outputs[i.microbatch] = output
        passage = Passage(self.grid, leaves)
        passage.add(loss, self.factor)
        self.losses.append((self.held[i.chunk].stage, i.microbatch, loss.detach(), measures, 1.0))
        return passage

    def hand_on(self, i: Instruction, form: Form, tensors: list[Tensor]) -> None:
        """To the next stage, if this rank has it; else it waits to be sent."""
        chunk = self.held[i.chunk]
        after = self.here.get(Chunk(chunk.stage + 1, chunk.copy))
        if after is None:
            self.outputs[i.chunk, i.microbatch] = form, tensors
        else:
            leaves = [Tensor(t.data, t.node is not None) for t in tensors]
            self.inputs[after, i.microbatch] = form, leaves

    def backward(self, i: Instruction, *, later: bool) -> None:
        unit, chunk = (i.chunk, i.microbatch), self.held[i.chunk]
        passage = self.passages[unit] if later else self.passages.pop(unit)
        ends = unit in self.ends
        if ends and not later:
            self.worker.starts(i.chunk)
        passage.backward(self.grads.pop(unit, ()), later=later, starts=ends)
        grads = passage.input_gradients()
        if not chunk.stage:
            return
        before = self.here.get(Chunk(chunk.stage - 1, chunk.copy))
        if before is None:
            self.back[unit] = grads
        else:
            self.grads[before, i.microbatch] = [None if g is None else g.block for g in grads]

    def backward_weight(self, i: Instruction) -> None:
        unit = i.chunk, i.microbatch
        if unit in self.ends:
            self.worker.starts(i.chunk)
        self.passages.pop(unit).parameters()


def lasts(order: Sequence[Instruction]) -> frozenset[Unit]:
    """The last passes to give gradients before each REDUCE_GRADIENTS; in them the sums start."""
    found: set[Unit] = set()
    last: Unit | None = None
    for i in order:
        if i.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            last = i.chunk, i.microbatch
        elif i.op is Op.REDUCE_GRADIENTS and last is not None:
            found.add(last)
            last = None
    return frozenset(found)


def _like(batch: Batch) -> Hashable:
    """The shapes and dtypes of a batch."""
    form, tensors = take_apart([batch.x, batch.y])
    return str(form), tuple((t.shape, t.dtype.name) for t in tensors)
