"""The events of Megatron-LM's training step as of 2021, by hand, from the shapes of its layers.

As in Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM" (SC 2021):
1D tensor parallelism, attention with stored scores, fused kernels (scale, mask and softmax; bias and GELU; bias, dropout
and residual), recomputation of each layer from its input, interleaved 1F1B with messages that are scattered over the
tensor axis and gathered in the node, fp16 with a float32 copy in Adam.  Communication is not overlapped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from parlinalg.pipeline.schedules import make_schedule
from parlinalg.planning.machine import Machine
from parlinalg.planning.timeline import Stage, Timeline, pipeline_timeline, timeline
from parlinalg.planning.trace import Event, Gemm, Kernel, Start, Trace, Wait

HALF = 2  # bytes of float16


@dataclass(frozen=True)
class Megatron:
    """A model and its split: `tensor` × `pipeline` × `data` ranks, `batch` sequences a step."""

    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    ranks: int
    batch: int
    sequence: int = 2048
    vocabulary: int = 51200
    microbatch: int = 1
    chunks: int = 1
    recompute: bool = True
    dtype: str = "float16"

    @property
    def data(self) -> int:
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def microbatches(self) -> int:
        return self.batch // (self.data * self.microbatch)

    @property
    def flops(self) -> float:
        """Operations of a step as the paper counts them, recomputation included: 96 B s l h² (1 + s/6h + V/16lh)."""
        b, s, l, h, v = self.batch, self.sequence, self.layers, self.hidden, self.vocabulary
        return (96 if self.recompute else 72) * b * s * l * h**2 * (1 + s / (6 * h)) + 6 * b * s * h * v

    @property
    def layer_parameters(self) -> int:
        """Of one layer on one rank."""
        h, t = self.hidden, self.tensor
        return 12 * h * h // t + (4 + 3) * h // t + 6 * h

    def memory(self) -> float:
        """Bytes of the first pipeline rank, about: 18 a parameter, inputs of layers, one layer's activations."""
        h, t, m = self.hidden, self.tensor, self.microbatch * self.sequence
        own = self.layer_parameters * self.layers // self.pipeline + self.vocabulary * h // t
        flying = min(self.microbatches * self.chunks, 2 * self.pipeline + (self.chunks - 1) * self.pipeline)
        inputs = flying * (self.layers // (self.pipeline * self.chunks)) * m * h * HALF
        inside = m * h * (10 + 24 / t + 5 * self.heads * self.sequence / (h * t))
        logits = m * self.vocabulary / t * 10 if self.pipeline == 1 else 0
        return 18 * own + (inputs + inside if self.recompute else flying * inside) + logits

    # ------------------------------------------------------------------------------------------- groups of ranks
    @cached_property
    def tensor_ranks(self) -> tuple[int, ...]:
        return tuple(range(self.tensor))

    @cached_property
    def data_ranks(self) -> tuple[int, ...]:
        return tuple(range(0, self.tensor * self.data, self.tensor))

    # ------------------------------------------------------------------------------------------- events
    def _kernel(self, name: str, nbytes: float) -> Kernel:
        return Kernel(name, round(nbytes), round(nbytes) // HALF, self.dtype)

    def _gemm(self, m: int, n: int, k: int, batch: int = 1) -> Gemm:
        return Gemm(batch, m, n, k, self.dtype)

    def _reduce(self, nbytes: float, call: int) -> list[Event]:
        """The all-reduce of an activation over the tensor axis."""
        t = self.tensor
        if t == 1:
            return []
        received = round(2 * nbytes * (t - 1) / t)
        return [Start(call, "all_reduce", ("tensor",), self.tensor_ranks, received, received), Wait(call)]

    def layer_forward(self, call: int) -> Iterator[Event]:
        s, h, t = self.sequence, self.hidden, self.tensor
        m, heads = self.microbatch * s, self.microbatch * self.heads // t
        scores = heads * s * s
        yield self._kernel("layer norm", 2 * m * h * HALF)
        yield self._gemm(m, 3 * h // t, h)
        yield self._kernel("bias", 2 * m * 3 * h // t * HALF)
        yield self._gemm(s, s, h // self.heads, heads)
        yield self._kernel("scale, mask, softmax", 2 * scores * HALF)
        yield self._kernel("dropout", scores * (2 * HALF + 1))
        yield self._gemm(s, h // self.heads, s, heads)
        yield self._kernel("transpose", 2 * m * h // t * HALF)
        yield self._gemm(m, h, h // t)
        yield from self._reduce(m * h * HALF, call)
        yield self._kernel("bias, dropout, residual", m * h * (3 * HALF + 1))
        yield self._kernel("layer norm", 2 * m * h * HALF)
        yield self._gemm(m, 4 * h // t, h)
        yield self._kernel("bias, gelu", 2 * m * 4 * h // t * HALF)
        yield self._gemm(m, h, 4 * h // t)
        yield from self._reduce(m * h * HALF, call + 1)
        yield self._kernel("bias, dropout, residual", m * h * (3 * HALF + 1))

    def _both(self, m: int, n: int, k: int, batch: int = 1) -> list[Event]:
        """The two products of the gradients of y[m, n] = x[m, k] w[k, n]; a weight's is added to the others' sum."""
        found: list[Event] = [self._gemm(m, k, n, batch), self._gemm(k, n, m, batch)]
        return [*found, self._kernel("add gradient", 3 * k * n * HALF)] if batch == 1 else found

    def layer_backward(self, call: int) -> Iterator[Event]:
        s, h, t = self.sequence, self.hidden, self.tensor
        m, heads = self.microbatch * s, self.microbatch * self.heads // t
        scores = heads * s * s
        if self.recompute:
            yield from self.layer_forward(call)
            call += 2
        yield self._kernel("dropout, backward", m * h * (2 * HALF + 1))
        yield from self._both(m, h, 4 * h // t)
        yield self._kernel("gelu, backward", 3 * m * 4 * h // t * HALF)
        yield self._kernel("bias, backward", m * 4 * h // t * HALF)
        yield from self._both(m, 4 * h // t, h)
        yield from self._reduce(m * h * HALF, call)
        yield self._kernel("layer norm, backward", 4 * m * h * HALF)
        yield self._kernel("residual, backward", 3 * m * h * HALF)
        yield self._kernel("dropout, backward", m * h * (2 * HALF + 1))
        yield from self._both(m, h, h // t)
        yield self._kernel("transpose", 2 * m * h // t * HALF)
        yield from self._both(s, h // self.heads, s, heads)
        yield self._kernel("dropout, backward", scores * (2 * HALF + 1))
        yield self._kernel("softmax, backward", 3 * scores * HALF)
        yield from self._both(s, s, h // self.heads, heads)
        yield self._kernel("bias, backward", m * 3 * h // t * HALF)
        yield from self._both(m, 3 * h // t, h)
        yield from self._reduce(m * h * HALF, call + 1)
        yield self._kernel("layer norm, backward", 4 * m * h * HALF)
        yield self._kernel("residual, backward", 3 * m * h * HALF)

    def _message(self, call: int) -> Iterator[Event]:
        """A microbatch's output to the next rank of the pipeline, a t-th by each rank, gathered in its node."""
        nbytes, t = self.microbatch * self.sequence * self.hidden * HALF, self.tensor
        away = self.tensor * self.data
        yield Start(call, "send", ("pipeline",), (0, away), 0, nbytes // t, peer=away)
        yield Wait(call)
        if t > 1:
            rest = nbytes * (t - 1) // t
            yield Start(call + 1, "all_gather", ("tensor",), self.tensor_ranks, rest, rest)
            yield Wait(call + 1)

    def _head(self, backward: bool, call: int) -> Iterator[Event]:
        """The logits and their loss, in float32 over the parts of the vocabulary."""
        m, h, v = self.microbatch * self.sequence, self.hidden, self.vocabulary // self.tensor
        if backward:
            yield self._kernel("cross-entropy, backward", m * v * (4 + 4 + HALF))
            yield from self._both(m, v, h)
            yield from self._reduce(m * h * HALF, call)
        else:
            yield self._kernel("layer norm", 2 * m * h * HALF)
            yield self._gemm(m, v, h)
            yield self._kernel("cross-entropy", m * v * (HALF + 4 + 4 * 5))

    def _embedding(self, backward: bool, call: int) -> Iterator[Event]:
        m, h = self.microbatch * self.sequence, self.hidden
        yield self._kernel("embedding", m * h * (3 * HALF + 1))
        if backward:
            yield self._kernel("add gradient", 3 * self.vocabulary // self.tensor * h * HALF)
        else:
            yield from self._reduce(m * h * HALF, call)

    def _pass(self, stage: int, stages: int, backward: bool) -> Trace:
        events: list[Event] = []
        call = 0
        around = (self._head, stage == stages - 1), (self._embedding, stage == 0)
        if backward and around[0][1]:
            events += self._head(True, 10**6)
        if not backward and around[1][1]:
            events += self._embedding(False, 10**6 + 10)
        for _ in range(self.layers // stages):
            events += (self.layer_backward if backward else self.layer_forward)(call)
            call += 8
        if not backward and around[0][1]:
            events += self._head(False, 10**6)
        if backward and around[1][1]:
            events += self._embedding(True, 10**6 + 10)
        if stages > 1 and not (around[1][1] if backward else around[0][1]):
            events += self._message(10**6 + 20)
        return Trace(0, self.ranks, events)

    def update(self, rank: int) -> Trace:
        """The sum of the gradients over the data axis, and Adam with float32 copies (apex's fused one)."""
        own = self.layer_parameters * self.layers // self.pipeline
        table = (self.vocabulary + self.sequence) * self.hidden // self.tensor
        if rank in (0, self.pipeline - 1):
            own += table
        events: list[Event] = []
        if self.data > 1:
            received = round(2 * own * HALF * (self.data - 1) / self.data)
            events += [Start(0, "all_reduce", ("data",), self.data_ranks, received, received), Wait(0)]
        if self.pipeline > 1 and rank in (0, self.pipeline - 1):
            away = self.tensor * self.data * (self.pipeline - 1)
            shared = self.vocabulary * self.hidden // self.tensor * HALF
            events += [Start(1, "all_reduce", ("embedding",), (0, away), shared, shared), Wait(1)]
        for name, nbytes in (
            ("unscale", 6), ("norm", 4), ("clip", 8), ("adam", 28), ("copy", 6), ("zero", 2),
        ):  # fmt: skip
            events.append(self._kernel(name, own * nbytes))
        return Trace(0, self.ranks, events)

    def step(self, machine: Machine) -> Timeline:
        """Return a step's timeline."""
        stages = self.pipeline * self.chunks
        if self.pipeline == 1:
            forward, backward = self._pass(0, 1, False), self._pass(0, 1, True)
            one, update = (timeline(Trace(0, self.ranks, e), machine) for e in (
                [*forward.events, *(_moved(x) for x in backward.events)], self.update(0).events,
            ))  # fmt: skip
            causes = {
                name: one.causes[0].get(name, 0) * self.microbatches + update.causes[0].get(name, 0)
                for name in {*one.causes[0], *update.causes[0]}
            }
            seconds = one.seconds * self.microbatches + update.seconds
            return replace(one, seconds=seconds, causes={0: causes}, intervals=(), flops=one.flops * self.microbatches)
        schedule = make_schedule(
            "1f1b" if self.chunks == 1 else "interleaved", self.pipeline, self.microbatches,
            None if self.chunks == 1 else self.chunks,
        )  # fmt: skip
        passes = {}
        for stage in {0, 1, stages - 1}:
            passes[stage] = Stage(self._pass(stage, stages, False), self._pass(stage, stages, True))
        inner = passes[1 if stages > 2 else 0]
        first, last = self.update(0), self.update(min(1, self.pipeline - 2) if self.pipeline > 2 else 0)
        updates = [first if r in (0, self.pipeline - 1) else last for r in range(self.pipeline)]
        each = [passes.get(s, inner) if s in (0, stages - 1) else inner for s in range(stages)]
        return pipeline_timeline(schedule, each, machine, step=updates)


def _moved(event: Event) -> Event:
    """The event with a call number that the forward pass has not."""
    if isinstance(event, Start):
        return replace(event, call=event.call + 10**8)
    return Wait(event.call + 10**8) if isinstance(event, Wait) else event
