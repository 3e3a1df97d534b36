"""One run of a schedule: the passes of one batch's microbatches through this rank's stages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import Tensor, no_sync
from parlinalg.autograd.rule import Part
from parlinalg.autograd.tape import Node, Walk, reachable, recording
from parlinalg.comm.watch import slot
from parlinalg.datasets import Batch
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.nn import training_step
from parlinalg.nn.added_losses import term_weights
from parlinalg.pipeline.p2p import Edge, Incoming, TreeSpec, summed, tree_flatten, tree_unflatten
from parlinalg.pipeline.schedule import AHEAD, COMPUTE, RECEIVES, Chunk, Instruction, Op, Schedule
from parlinalg.pipeline.simulate import Span

if TYPE_CHECKING:
    from parlinalg.pipeline.worker import Task, Worker

Block = Any


class InFlight:
    """The state of a microbatch on a stage between its forward and its backward pass.

    Parameters
    ----------
    grid : Grid
    inputs : sequence of Tensor
        The stage's inputs, leaves of its tape.
    outputs : sequence of Tensor
        The stage's outputs, of which only the nodes on the tape are kept.
    """

    def __init__(self, grid: Grid, inputs: Sequence[Tensor], outputs: Sequence[Tensor] = ()) -> None:
        self.grid = grid
        self.inputs = [t.node for t in inputs]  # the rules keep their values
        self.outputs = [t.node for t in outputs]
        self.terms: list[tuple[Node, float]] = []
        """Terms of the loss on this stage, with the gradient of each."""
        self._walk: Walk | None = None

    def add(self, term: Tensor | float, factor: float) -> None:
        """Add a term of the loss, whose gradient is `factor`."""
        if isinstance(term, Tensor) and term.node is not None:
            self.terms.append((term.node, factor))

    def backward(self, grads: Sequence[Block | None] = (), *, later: bool = False, starts: bool = False) -> None:
        """Run the backward pass from the gradients of all outputs at once, and from the terms of the loss.

        Parameters
        ----------
        grads : sequence of array or None
            This rank's blocks, which may be overwritten.  None where there is no gradient.
        later : bool
            Defer the gradients of parameters to `parameters`.
        starts : bool
            Start to reduce gradients as they are complete: no other pass adds to them before they are settled.
        """
        sources: list[Node] = []
        parts: list[Part] = []
        for node, grad in zip(self.outputs, grads or [None] * len(self.outputs), strict=True):
            if node is not None and grad is not None:
                sources.append(node)
                parts.append(_constant_part(grad, node.layout.with_partial(())))
        for node, factor in self.terms:
            shape = self.grid.block_shape(node.layout, node.shape)
            grad = self.grid.backend.from_host(np.full(shape, factor, node.dtype))
            sources.append(node)
            parts.append(_constant_part(grad, node.layout.with_partial(())))
        self.outputs, self.terms = [], []
        if sources:
            start = DistArray(self.grid.backend.zeros((), np.float32), (), Layout(), self.grid)
            root = Node(start, tuple(sources), tuple(parts))
            walk = Walk(root, (start.block, start.layout), later=later, starts=starts)
            walk.run()
            if later:
                self._walk = walk

    def parameters(self) -> None:
        """Compute the gradients of parameters that `backward` deferred."""
        walk, self._walk = self._walk, None
        if walk is not None:
            walk.run_parameters()

    def holders(self) -> list[Node | Walk]:
        """Return the holders of arrays for later passes: nodes of the tape, or the walk with deferred gradients."""
        if self._walk is not None:
            return [self._walk]
        roots = [*(node for node in self.outputs if node is not None), *(node for node, _ in self.terms)]
        found = {node.age: node for root in roots for node in reachable(root)}
        return [found[age] for age in sorted(found)]

    def input_gradients(self) -> list[DistArray | None]:
        """Return the gradients of the stage's inputs, and drop the inputs."""
        grads = [None if node is None else node.grad for node in self.inputs]
        self.inputs = []
        return grads


def _constant_part(block: Block, layout: Layout) -> Part:
    return Part(lambda _, block: (block, layout), block)


Unit = tuple[int, int]  # a chunk and a microbatch
WORDS = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.BACKWARD_INPUT: "backward (inputs)",
         Op.BACKWARD_WEIGHT: "backward (weights)", Op.RECEIVE_FORWARD: "forward", Op.RECEIVE_BACKWARD: "backward",
         Op.SEND_FORWARD: "forward", Op.SEND_BACKWARD: "backward"}  # fmt: skip


class ScheduleRun:
    """The execution of a rank's instructions.

    Attributes
    ----------
    sums : list of (int, int, dict)
        The losses and measures, by microbatch and stage.
    current : str
        The current instruction: "stage 2, microbatch 3, backward".
    """

    def __init__(self, worker: Worker, schedule: Schedule, batches: Sequence[Batch], task: Task) -> None:
        self.worker, self.schedule, self.batches, self.task = worker, schedule, batches, task
        self.p2p, self.grid = worker.p2p, worker.grid
        rank = worker.topology.rank
        self.order, self.chunks = schedule.orders[rank], schedule.chunks[rank]
        self.chunk_index = {chunk: c for c, chunk in enumerate(self.chunks)}
        self.computes_gradients, self.factor = False, 0.0
        self.weights = term_weights([len(batch) for batch in batches], [batch.count for batch in batches])
        self.step: int | None = None
        self.signatures = [_signature(batch) for batch in batches]
        self.posted: dict[Instruction, Incoming] = {}
        self.next_receive = 0
        self.inputs: dict[Unit, tuple[TreeSpec, list[Tensor]]] = {}
        self.outputs: dict[Unit, tuple[TreeSpec, list[Tensor]]] = {}
        self.grads: dict[Unit, list[Block | None]] = {}
        self.input_grads: dict[Unit, list[DistArray | None]] = {}
        self.in_flight: dict[Unit, InFlight] = {}
        self.losses: list[tuple[int, int, Tensor, dict[str, float], float]] = []
        self.sums: list[tuple[int, int, dict[str, float]]] = []
        self.current = "before the first microbatch"
        self.last_passes = last_passes_of(self.order)
        self.timed = COMPUTE | {Op.REDUCE_GRADIENTS}
        self.handlers: dict[Op, Callable[[Instruction], None]] = {
            Op.FORWARD: self.forward,
            Op.BACKWARD: lambda i: self.backward(i, later=False),
            Op.BACKWARD_INPUT: lambda i: self.backward(i, later=True),
            Op.BACKWARD_WEIGHT: self.backward_weight,
            Op.SEND_FORWARD: self.send_forward,
            Op.RECEIVE_FORWARD: self.receive_forward,
            Op.SEND_BACKWARD: self.send_backward,
            Op.RECEIVE_BACKWARD: self.receive_backward,
            Op.REDUCE_GRADIENTS: lambda _: self.worker.settle(),
            Op.STEP: lambda _: None,  # the caller makes the step of a synchronous schedule
        }

    def training(self, step: int, factor: float) -> None:
        """Compute gradients too, in step number `step`, of the losses times `factor`."""
        self.computes_gradients, self.step, self.factor = True, step, factor

    def evaluating(self) -> None:
        """Compute forward passes only."""
        self.computes_gradients = False

    def go(self) -> None:
        """Execute all instructions."""
        spans, start = self.worker.spans, 0.0
        if spans is not None:
            spans.clear()
            self.worker.comm.barrier()
            start = perf_counter()
        self.grid.polled.append(self.p2p)
        try:
            with no_sync():
                for at, instruction in enumerate(self.order):
                    self.report(instruction)
                    self.post_ahead(at)
                    began = perf_counter()
                    self.handlers[instruction.op](instruction)
                    if spans is not None and instruction.op in self.timed:
                        self.grid.backend.synchronize()
                        spans.append(
                            Span(self.worker.topology.rank, instruction.op, instruction.chunk, instruction.microbatch,
                                 began - start, perf_counter() - start)
                        )  # fmt: skip
                self.current = slot.doing = "after the last microbatch"
                for stage, j, loss, measures, factor in self.losses:
                    self.sums.append((j, stage, {"loss": float(loss.item()) * factor, **measures}))
                self.p2p.finish()
        finally:
            self.handlers.clear()  # by their references to this run all that it holds would wait for a collection
            self.grid.polled[:] = [each for each in self.grid.polled if each is not self.p2p]
            slot.doing = None

    def report(self, i: Instruction) -> None:
        """Note this rank's current instruction, for the monitor and for errors."""
        if i.op in WORDS:
            chunk = self.chunks[i.chunk]
            copy = f" of copy {chunk.copy}" if self.schedule.copies > 1 else ""
            self.current = f"stage {chunk.stage}{copy}, microbatch {i.microbatch}, {WORDS[i.op]}"
        else:
            self.current = i.op.value
        slot.doing = self.current

    # ------------------------------------------------------------------ messages
    def post_ahead(self, at: int) -> None:
        """Post the next receives whose form is known."""
        self.next_receive = max(self.next_receive, at)
        while len(self.posted) < AHEAD and self.next_receive < len(self.order):
            i = self.order[self.next_receive]
            if i.op in RECEIVES:
                edge = self.edge(i)
                if not self.p2p.known(edge, self.signature(i)):
                    return
                self.posted[i] = self.post(i, edge)
            self.next_receive += 1

    def post(self, i: Instruction, edge: Edge) -> Incoming:
        post = self.p2p.post if i.op is Op.RECEIVE_FORWARD else self.p2p.post_back
        return post(edge, i.microbatch, i.peer, self.signature(i))

    def arrived(self, i: Instruction) -> list[Block]:
        """Wait for the blocks of a receive, and return them."""
        incoming = self.posted.pop(i, None)
        if incoming is None:
            incoming = self.post(i, self.edge(i))
        return self.p2p.take(incoming)

    def edge(self, i: Instruction) -> Edge:
        """Return the edge that a message crosses."""
        chunk = self.chunks[i.chunk]
        after = i.op in (Op.SEND_FORWARD, Op.RECEIVE_BACKWARD)
        return Edge(chunk.stage + after, chunk.copy)

    def signature(self, i: Instruction) -> Hashable:
        """Return a key that is equal for microbatches with the same form of data at every edge."""
        return self.signatures[i.microbatch], recording()

    def receive_forward(self, i: Instruction) -> None:
        edge = self.edge(i)
        blocks = self.arrived(i)
        spec = self.p2p.spec(edge, self.signature(i))
        tensors = [
            Tensor(DistArray(block, leaf.shape, leaf.target, self.grid), leaf.wants)
            for block, leaf in zip(blocks, spec.leaves, strict=True)
        ]
        self.inputs[i.chunk, i.microbatch] = spec.form, tensors

    def send_forward(self, i: Instruction) -> None:
        form, tensors = self.outputs.pop((i.chunk, i.microbatch))
        self.p2p.send(self.edge(i), i.microbatch, i.peer, self.signature(i), form, tensors)

    def receive_backward(self, i: Instruction) -> None:
        self.grads[i.chunk, i.microbatch] = self.arrived(i)

    def send_backward(self, i: Instruction) -> None:
        grads = self.input_grads.pop((i.chunk, i.microbatch))
        self.p2p.send_back(self.edge(i), i.microbatch, i.peer, self.signature(i), grads)

    # ------------------------------------------------------------------ passes
    def forward(self, i: Instruction) -> None:
        unit, batch, stage = (i.chunk, i.microbatch), self.batches[i.microbatch], self.worker.model.chunks[i.chunk]
        leaves: list[Tensor] = []
        if stage.first:
            x = batch.x
        else:
            form, leaves = self.inputs.pop(unit)
            x = tree_unflatten(form, leaves)
        with ExitStack() as around:
            if self.step is not None:
                around.enter_context(training_step(self.step, batch.offset))
            terms = around.enter_context(self.task.context(batch))
            given = stage(x)
            del x
            if stage.last:
                unit_in_flight = self.last(i, given, leaves)
            else:
                form, tensors = tree_flatten(given)
                whole = summed(tensors)
                unit_in_flight = InFlight(self.grid, leaves, whole)
                self.hand_on(i, form, whole)
        if self.computes_gradients:
            for term in terms or ():
                unit_in_flight.add(term, self.factor * self.weights[i.microbatch])
                self.losses.append((stage.number, i.microbatch, term.detach(), {}, self.weights[i.microbatch]))
            self.in_flight[unit] = unit_in_flight
            self.worker.peak_in_flight = max(self.worker.peak_in_flight, len(self.in_flight))

    def last(self, i: Instruction, output: Any, leaves: list[Tensor]) -> InFlight:
        """Compute the loss of the last stage's output."""
        loss, _, measures = self.task.losses_of(output, self.batches[i.microbatch])
        if self.worker.outputs is not None:
            self.worker.outputs[i.microbatch] = output
        unit_in_flight = InFlight(self.grid, leaves)
        unit_in_flight.add(loss, self.factor)
        self.losses.append((self.chunks[i.chunk].stage, i.microbatch, loss.detach(), measures, 1.0))
        return unit_in_flight

    def hand_on(self, i: Instruction, form: TreeSpec, tensors: list[Tensor]) -> None:
        """Hand a stage's output to the next stage if it is on this rank; else keep it to be sent."""
        chunk = self.chunks[i.chunk]
        after = self.chunk_index.get(Chunk(chunk.stage + 1, chunk.copy))
        if after is None:
            self.outputs[i.chunk, i.microbatch] = form, tensors
        else:
            leaves = [Tensor(t.data, t.node is not None) for t in tensors]
            self.inputs[after, i.microbatch] = form, leaves

    def backward(self, i: Instruction, *, later: bool) -> None:
        unit, chunk = (i.chunk, i.microbatch), self.chunks[i.chunk]
        unit_in_flight = self.in_flight[unit] if later else self.in_flight.pop(unit)
        last = unit in self.last_passes
        if last and not later:
            self.worker.start_reductions(i.chunk)
        unit_in_flight.backward(self.grads.pop(unit, ()), later=later, starts=last)
        grads = unit_in_flight.input_gradients()
        if not chunk.stage:
            return
        before = self.chunk_index.get(Chunk(chunk.stage - 1, chunk.copy))
        if before is None:
            self.input_grads[unit] = grads
        else:
            self.grads[before, i.microbatch] = [None if g is None else g.block for g in grads]

    def backward_weight(self, i: Instruction) -> None:
        unit = i.chunk, i.microbatch
        if unit in self.last_passes:
            self.worker.start_reductions(i.chunk)
        self.in_flight.pop(unit).parameters()


def last_passes_of(order: Sequence[Instruction]) -> frozenset[Unit]:
    """Return the last passes that add gradients before each REDUCE_GRADIENTS; in them the reductions start."""
    found: set[Unit] = set()
    last: Unit | None = None
    for i in order:
        if i.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
            last = i.chunk, i.microbatch
        elif i.op is Op.REDUCE_GRADIENTS and last is not None:
            found.add(last)
            last = None
    return frozenset(found)


def _signature(batch: Batch) -> Hashable:
    form, tensors = tree_flatten([batch.x, batch.y])
    return str(form), tuple((t.shape, t.dtype.name) for t in tensors)
