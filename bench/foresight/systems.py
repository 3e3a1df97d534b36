"""Published training runs, predicted from the library's own traces of the same model and split.

    python bench/foresight/systems.py --hidden 12288 --layers 96 --heads 96 --ranks 1024 --batch 1536 \\
        --tensor 8 --pipeline 8 --chunks 3 --recompute block --machine a100

The library's GPT or Llama, its tape, reducer, ZeRO, pipeline schedule and optimizer run without values on imagined
ranks, one of each class, and the planner's `Predictor.full` times the traces on a machine's file.  `Megatron` has the
same traces with the kernels of the published software in place of the library's: those of Megatron-LM before 2023,
which stores attention's scores.  Later software is predicted with fused attention (`Machine.with_fused_attention`).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parlinalg.planning.candidates import Candidate
from parlinalg.planning.machine import Machine, load_machine
from parlinalg.planning.parts import Part
from parlinalg.planning.predictor import Planned, Predictor
from parlinalg.planning.trace import Event, Gemm, Kernel, Memory, Span, Start, Trace
from parlinalg.planning.traced_model import TracedModel
from parlinalg.train.config import TensorConfig, parse

HALF = 2  # bytes of a 16-bit float
CHAINS = (
    (("add", "dropout.drop", "add"), 3 * HALF + 1),  # bias, dropout with its mask, residual
    (("add", "activations.gelu"), 2 * HALF),
)
"""Kernels that Megatron-LM makes one, and the bytes an element of it reads and writes."""


@dataclass(frozen=True)
class Run:
    """A training run: a model, and how ranks share its step of `batch` sequences.

    `cuts` is Megatron's sequence parallelism, `recompute` as of `nn.GPT`; attention's scores are never kept by the
    library, which is what Megatron's selective recomputation comes to.  With `fused` the published software's products
    add to the gradients of earlier microbatches (`gradient_accumulation_fusion`, in Megatron-LM since 2022).  With an
    `intermediate` size the model is a Llama with so many `kv_heads`, else a GPT.  `schedule` is the pipeline's, by
    default interleaved where there are chunks, else 1F1B.  With `kept` the published software keeps attention's scores
    and recomputes nothing.

    `context` ranks share a sequence: `ulysses` of them by all-to-alls of heads, the rest on a ring.  With `experts` a
    block has so many perceptrons, two for each token, with a `capacity` factor; the data ranks share them.  `within`
    ranks share what ZeRO cuts, by default all data ranks.  Gradients travel in `communicate`, by default their own
    dtype.
    """

    hidden: int
    layers: int
    heads: int
    ranks: int
    batch: int
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    microbatch: int = 1
    sequence: int = 2048
    vocabulary: int = 51200
    cuts: bool = False
    recompute: str | None = None
    zero: int = 0
    dtype: str = "float16"
    dropout: float = 0.1
    fused: bool = False
    kv_heads: int | None = None
    intermediate: int | None = None
    context: int = 1
    ulysses: int = 1
    experts: int | None = None
    capacity: float = 1.25
    within: int | None = None
    communicate: str | None = None
    schedule: str | None = None
    kept: bool = False

    @property
    def data(self) -> int:
        return self.ranks // (self.tensor * self.pipeline * self.context)

    @property
    def microbatches(self) -> int:
        return self.batch // (self.data * self.microbatch)

    @property
    def flops(self) -> float:
        """Operations of a GPT's step as Narayanan et al. count them: 72 B s l h² (1 + s/6h + V/12lh), and with
        recomputed blocks 96 B s l h² (1 + s/6h + V/16lh)."""
        b, s, l, h, v = self.batch, self.sequence, self.layers, self.hidden, self.vocabulary
        return (96 if self.recompute == "block" else 72) * b * s * l * h**2 * (1 + s / (6 * h)) + 6 * b * s * h * v

    def possible(self) -> bool:
        """Return True if microbatches and chunks come out even."""
        even = self.batch % (self.data * self.microbatch) == 0
        return even and (self.chunks == 1 or self.microbatches % self.pipeline == 0)

    def configuration(self) -> dict[str, Any]:
        """Return the keys of the configuration that do not depend on the split."""
        p = self.dropout
        model = {
            "name": "gpt", "vocab_size": self.vocabulary, "max_position_embeddings": self.sequence,
            "hidden_size": self.hidden, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "resid_pdrop": p, "attn_pdrop": p, "embd_pdrop": p,
        }  # fmt: skip
        if self.intermediate is not None:
            model = {k: v for k, v in model.items() if k != "attn_pdrop"}
            model |= {
                "name": "llama", "intermediate_size": self.intermediate, "num_key_value_heads": self.kv_heads,
                "attention_dropout": p,
            }  # fmt: skip
        if self.experts is not None:
            model |= {"num_local_experts": self.experts, "num_experts_per_tok": 2, "capacity_factor": self.capacity}
        precision = {"dtype": self.dtype} | ({} if self.communicate is None else {"communicate": self.communicate})
        zero = {"stage": self.zero} | ({} if self.within is None else {"within": self.within})
        return {
            "model": model, "data": {"name": "text", "sequence_length": self.sequence}, "batch_size": self.batch,
            "precision": precision, "zero": zero,
        }  # fmt: skip

    def candidate(self) -> Candidate:
        """Return the split as the planner's candidate."""
        tensor = TensorConfig()
        if self.tensor > 1:
            tensor = TensorConfig(size=self.tensor, mode="1d", sequence_parallel=self.cuts)
        schedule = None
        if self.pipeline > 1:
            schedule = self.schedule or ("interleaved" if self.chunks > 1 else "1f1b")
        return Candidate(
            self.data, self.pipeline, self.context, self.ulysses, tensor, self.zero, self.microbatches, schedule,
            self.chunks if self.chunks > 1 else None, self.recompute, self.dtype,
            None if self.experts is None else "data" if self.data > 1 else "none",
        )  # fmt: skip

    def predict(
        self, machine: Machine, kind: type[TracedModel] = TracedModel, known: dict[str, Part] | None = None
    ) -> Planned:
        """Return the step on a machine, by the trace of the library's program or of another software's kernels.

        `known` are traces of the library's program of this run, which are taken again, on another machine.
        """
        made = kind(parse(self.configuration()), self.ranks, machine, self.batch)
        if isinstance(made, Megatron):
            made.run = self
        if isinstance(made, Traced):
            made.known = {} if known is None else known
        return Predictor(made).full(self.candidate())

    def predict_fused(self, machine: Machine) -> tuple[Planned, Planned]:
        """Return the step of the library's program on a machine, without and with fused attention."""
        known: dict[str, Part] = {}
        return self.predict(machine, Traced, known), self.predict(machine.with_fused_attention(), Traced, known)


# ------------------------------------------------------------------------------------------------ other kernels
class Traced(TracedModel):
    """Models that take known traces again: they do not depend on the machine's figures."""

    known: dict[str, Part]

    def trace(self, *args: Any, **more: Any) -> Part:
        key = repr((args, more))
        if key not in self.known:
            self.known[key] = super().trace(*args, **more)
        return self.known[key]


class Megatron(TracedModel):
    """Traces with Megatron-LM's kernels of 2021 and 2022 in place of the library's.

    - Attention: products of all pairs in 16 bits, masked ones too, and scores in memory: one kernel for scale, mask and
      softmax, one for dropout.  The library computes in tiles and keeps no scores.
    - Bias and GELU are one kernel; bias, dropout and residual are one.
    - NCCL adds 16-bit terms as they arrive; the library adds them in float32 (`combine_terms`).
    - With sequence cuts the sequence is the first dim, so that gathering needs no copies; here the batch is.
    - Adam is apex's fused kernel, with passes to unscale, for the norm, to clip, to copy and to clear gradients.
    - A microbatch's gradients are added to those before it, where the trace has the first microbatch, which copies.
      With bfloat16 they are added and reduced in float32, as `--bf16` sets `accumulate_allreduce_grads_in_fp32`.

    Communication, the order of all else, the schedule and the memory are the traced ones.
    """

    run: Run

    def trace(self, *args: Any, **more: Any) -> Part:
        part = super().trace(*args, **more)
        left_out = "copy" if self.run.cuts else ""
        traced = [
            e for e in part.trace.events
            if not (isinstance(e, Memory) or (isinstance(e, Kernel) and e.name in ("combine_terms", left_out)))
        ]  # fmt: skip
        events = list(self._update(part, list(_fused(list(self._attention(traced))))))
        events = list(self._accumulated(part, events))
        return replace(part, trace=Trace(part.trace.rank, part.trace.size, events))

    def _attention(self, events: Sequence[Event]) -> Iterator[Event]:
        """Replace the tiles of attention's products and its kernel, which comes after them."""
        tiles: list[Gemm] = []
        s, width = self.run.sequence, self.run.hidden // self.run.heads
        for e in events:
            if isinstance(e, Gemm) and e.attention:
                tiles.append(e)
                continue
            if isinstance(e, Kernel) and e.name.startswith("attention.") and tiles:
                batch = self.run.microbatch * self.run.heads // self.run.tensor
                scores = batch * s * s
                forward = e.name == "attention.forward"
                wide, narrow = (Gemm(batch, s, s, width, self.run.dtype), Gemm(batch, s, width, s, self.run.dtype))
                drops = 2 * HALF + 1 if self.run.dropout else 0
                if not (forward or self.run.recompute or self.run.kept):  # selective: the scores are made again
                    yield from (wide, _kernel("softmax", 2 * HALF * scores), _kernel("dropout", drops * scores))
                if forward:
                    yield wide
                    yield _kernel("softmax", 2 * HALF * scores)
                    yield _kernel("dropout", drops * scores)
                    yield narrow
                else:
                    yield from (wide, narrow)
                    yield _kernel("dropout, backward", drops * scores)
                    yield _kernel("softmax, backward", 3 * HALF * scores)
                    yield from (narrow, narrow)
                yield _kernel("transpose", e.nbytes // 2)
                tiles = []
                continue
            yield from tiles
            tiles = []
            yield e
        yield from tiles

    def _accumulated(self, part: Part, events: list[Event]) -> Iterator[Event]:
        """Add gradients to earlier ones at the end of backward passes; reduce those of bfloat16 in float32."""
        run, reducing = self.run, False
        wide = run.dtype == "bfloat16"
        copied = 2 * HALF  # what the trace has for it
        more = 0 if run.fused or run.microbatches == 1 else (HALF + 8 if wide else 3 * HALF) - copied
        for e in events:
            if isinstance(e, Span) and e.name == "reduce":
                reducing = e.begins
            if isinstance(e, Span) and e.name == "backward" and not e.begins and more:
                yield _kernel("accumulate gradients", more * part.weights // HALF)
            if isinstance(e, Start) and reducing and wide:
                e = replace(e, nbytes=2 * e.nbytes, sent=2 * e.sent, dtype="float32")
            yield e

    def _update(self, part: Part, events: list[Event]) -> Iterator[Event]:
        """Replace the kernels of the update by passes over the parameters; communication stays."""
        inside, own = False, part.weights // HALF
        for e in events:
            if isinstance(e, Span) and e.name == "update":
                inside = e.begins
                yield e
                if inside:
                    for name, nbytes in (
                        ("unscale", 6), ("norm", 4), ("clip", 8), ("adam", 28), ("copy", 6), ("zero", 2),
                    ):  # fmt: skip
                        yield _kernel(name, own * nbytes)
            elif not inside or not isinstance(e, Gemm | Kernel):
                yield e


def _kernel(name: str, nbytes: int) -> Kernel:
    return Kernel(name, nbytes, nbytes // HALF, "float16")


def _fused(events: Sequence[Event]) -> Iterator[Event]:
    """Make chains of kernels one kernel each."""
    at = 0
    while at < len(events):
        for chain, nbytes in CHAINS:
            found = events[at : at + len(chain)]
            if tuple(e.name if isinstance(e, Kernel) else "" for e in found) == chain:
                size = max(e.elements for e in found if isinstance(e, Kernel))
                yield _kernel(", ".join(chain), size * nbytes)
                at += len(chain)
                break
        else:
            yield events[at]
            at += 1


# ------------------------------------------------------------------------------------------------ published tables
@dataclass(frozen=True)
class Published:
    """A published figure of a run: the seconds of a step."""

    name: str
    run: Run
    seconds: float


def narayanan() -> Iterator[tuple[str, list[Run], float]]:
    """Yield the rows of table 1: name, what the run may have been, operations a second of a GPU (10¹²).

    The table does not have microbatches and chunks: the paper's text says that the interleaved schedule was used.
    """
    for name, heads, hidden, layers, tensor, pipeline, ranks, batch, rate in NARAYANAN:
        runs = [
            Run(hidden, layers, heads, ranks, batch, tensor, pipeline, chunks, microbatch, recompute="block")
            for chunks in ((v for v in (1, 2, 3, 4, 5) if layers // pipeline % v == 0) if pipeline > 1 else (1,))
            for microbatch in (1, 2, 4, 8)
        ]
        yield name, [run for run in runs if run.possible()], rate


NARAYANAN = (
    ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137), ("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138),
    ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142), ("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135),
    ("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138), ("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140),
    ("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148), ("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155),
    ("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163), ("1008.0B", 160, 25600, 128, 8, 64, 3072, 3072, 163),
)  # fmt: skip
"""Parameters, heads, hidden, layers, tensor, pipeline, GPUs, batch, TFLOP/s a GPU (Narayanan et al. 2021, table 1)."""

KORTHIKANTI = tuple(
    Published(
        f"{name}, {'selective recomputation, sequence cuts' if cuts else 'full recomputation'}",
        Run(hidden, layers, heads, 8 * pipeline, batch, 8, pipeline, chunks, microbatch, cuts=cuts,
            recompute=None if cuts else "block", fused=True),
        seconds,
    )
    for name, hidden, layers, heads, pipeline, chunks, batch, microbatch, *both in (
        ("22B", 6144, 48, 64, 1, 1, 4, 4, 1.42, 1.10), ("175B", 12288, 96, 96, 8, 3, 64, 1, 18.13, 13.75),
        ("530B", 20480, 105, 128, 35, 3, 280, 1, 49.05, 37.83), ("1T", 25600, 128, 160, 64, 1, 512, 1, 94.42, 71.49),
    )
    for cuts, seconds in zip((False, True), both, strict=True)
)  # fmt: skip
"""Korthikanti et al. 2022, tables 3 and 5."""

MT_NLG = tuple(
    Published(
        f"530B on {ranks}", Run(20480, 105, 128, ranks, 1920, 8, 35, recompute="block", dtype="bfloat16"), seconds
    )
    for ranks, seconds in ((2240, 60.1), (2800, 50.2), (3360, 44.4))
)
"""Smith et al. 2022, section 2.4."""


def _mpt(*rows: tuple[str, tuple[int, int, int], int, int, int, int, bool, int]) -> tuple[Published, ...]:
    """Return rows of MosaicML's tables: name, (width, layers, heads), GPUs, tokens of a sample, microbatch, how many of
    them, whether blocks are recomputed, and tokens a second of a GPU."""
    return tuple(
        Published(
            f"{name}, {sequence} tokens, on {ranks}",
            Run(*sizes, ranks, ranks * microbatch * times, microbatch=microbatch, sequence=sequence, vocabulary=50368,
                recompute="block" if again else None, zero=3, dtype="bfloat16", dropout=0.0),
            microbatch * times * sequence / tokens,
        )
        for name, sizes, ranks, sequence, microbatch, times, again, tokens in rows
    )  # fmt: skip


MPT = _mpt(
    ("1B", (2048, 24, 16), 8, 2048, 14, 4, False, 20513), ("3B", (2560, 32, 20), 8, 2048, 10, 2, False, 10811),
    ("3B", (2560, 32, 20), 8, 4096, 5, 6, False, 9457), ("7B", (4096, 32, 32), 8, 1024, 64, 2, True, 4357),
    ("7B", (4096, 32, 32), 8, 2048, 6, 2, False, 4641), ("7B", (4096, 32, 32), 8, 4096, 16, 2, True, 3684),
    ("13B", (5120, 40, 40), 8, 2048, 2, 3, False, 2262), ("13B", (5120, 40, 40), 8, 4096, 10, 3, True, 2060),
    ("30B", (7168, 48, 56), 8, 1024, 6, 21, True, 946), ("30B", (7168, 48, 56), 8, 2048, 3, 21, True, 916),
    ("30B", (7168, 48, 56), 8, 4096, 1, 21, True, 814), ("70B", (8192, 80, 64), 32, 2048, 2, 16, True, 373),
    ("70B", (8192, 80, 64), 64, 2048, 8, 4, True, 410),
)  # fmt: skip
"""MosaicML, LLM Foundry, scripts/train/benchmarking: A100 80GB, 1600 Gbit/s, a sample of the rows of 1B and more and
of 1,024 to 4,096 tokens."""


MPT_H100 = _mpt(
    ("1B", (2048, 24, 16), 8, 1024, 18, 4, False, 48910), ("1B", (2048, 24, 16), 8, 2048, 14, 1, False, 45455),
    ("1B", (2048, 24, 16), 64, 2048, 20, 1, False, 44402), ("1B", (2048, 24, 16), 8, 8192, 3, 4, False, 29157),
    ("3B", (2560, 32, 20), 16, 2048, 10, 3, False, 24142), ("3B", (2560, 32, 20), 64, 2048, 6, 3, False, 22525),
    ("3B", (2560, 32, 20), 8, 4096, 5, 6, False, 20964), ("3B", (2560, 32, 20), 8, 8192, 3, 6, False, 16578),
    ("7B", (4096, 32, 32), 8, 1024, 64, 2, True, 10203), ("7B", (4096, 32, 32), 8, 2048, 6, 1, False, 10643),
    ("7B", (4096, 32, 32), 8, 4096, 16, 2, True, 8611), ("7B", (4096, 32, 32), 8, 32768, 2, 2, True, 3318),
    ("13B", (5120, 40, 40), 8, 2048, 2, 1, False, 4792), ("13B", (5120, 40, 40), 64, 2048, 2, 1, False, 4800),
    ("13B", (5120, 40, 40), 8, 4096, 10, 3, True, 4717), ("13B", (5120, 40, 40), 8, 16384, 3, 3, True, 2985),
    ("30B", (7168, 48, 56), 8, 2048, 3, 21, True, 2002), ("30B", (7168, 48, 56), 32, 2048, 14, 3, True, 2308),
    ("30B", (7168, 48, 56), 8, 4096, 1, 21, True, 1802), ("70B", (8192, 80, 64), 32, 2048, 2, 16, True, 882),
    ("70B", (8192, 80, 64), 64, 2048, 8, 4, True, 1039),
)  # fmt: skip
"""MosaicML, LLM Foundry, scripts/train/benchmarking: H100 80GB, bfloat16, a sample of the rows of 1B and more."""

MEGASCALE = tuple(
    Published(
        f"175B on {ranks:,}, batch {batch:,}",
        Run(12288, 96, 128, ranks, batch, 8, 8, 6, vocabulary=64000, cuts=True, zero=1, dtype="bfloat16", fused=True),
        seconds,
    )
    for batch, rows in (
        (768, ((256, 40.0), (512, 21.2), (768, 15.2), (1024, 11.9))),
        (6144, ((3072, 29.02), (6144, 14.78), (8192, 12.24), (12288, 8.57))),
    )
    for ranks, seconds in rows
)
"""Jiang et al. 2024, table 2, rows of Megatron-LM; sequence cuts and ZeRO 1 are assumed."""


def _zero_bubble() -> Iterator[Published]:
    """Yield the rows of table 4 of Qi et al. 2024 whose schedules the library has, by samples a second of a GPU."""
    for name, layers, heads, hidden, ranks, microbatch, counts, rows in (
        ("1.5B", 22, 24, 2304, 8, 6, (24, 32, 64), ((11.8, 12.5, 13.6), (13.1, 13.4, 13.9), (12.9, 13.4, 14.2))),
        ("6.2B", 30, 32, 4096, 8, 3, (24, 32, 64), ((3.50, 3.70, 4.03), (4.01, 4.08, 4.19), (3.88, 4.00, 4.20))),
        ("14.6B", 46, 40, 5120, 16, 1, (48, 64, 128), ((1.40, 1.49, 1.64), (1.54, 1.59, 1.66), (1.61, 1.67, 1.76))),
        ("28.3B", 62, 48, 6144, 32, 1, (96, 128, 256), ((0.76, 0.80, 0.88), (0.82, 0.85, 0.90), (0.87, 0.90, 0.96))),
    ):
        stage = (layers + 2) // ranks
        for (schedule, chunks), rates in zip((("1f1b", 1), ("interleaved", stage), ("zb-h1", 1)), rows, strict=True):
            for count, rate in zip(counts, rates, strict=True):
                batch = microbatch * count
                run = Run(hidden, layers, heads, ranks, batch, pipeline=ranks, chunks=chunks, microbatch=microbatch,
                          sequence=1024, schedule=schedule, fused=True, kept=True)  # fmt: skip
                yield Published(f"{name}, {schedule}, {count} microbatches", run, batch / ranks / rate)


ZERO_BUBBLE = tuple(_zero_bubble())
"""Qi et al. 2024, tables 3 and 4."""

BLOOM = tuple(
    Published(
        f"{hidden} × {layers}, {heads} heads, {tensor} × {pipeline}, microbatch {microbatch}",
        Run(hidden, layers, heads, 384, 2048, tensor, pipeline, microbatch=microbatch, vocabulary=250880, zero=1,
            recompute="block", dtype="bfloat16"),
        seconds,
    )
    for hidden, layers, heads, tensor, pipeline, microbatch, seconds in (
        (12288, 106, 64, 4, 12, 2, 116.54), (12288, 106, 96, 4, 12, 2, 118.79), (12288, 106, 128, 4, 12, 2, 121.42),
        (12288, 106, 96, 4, 12, 4, 120.34), (12288, 100, 64, 8, 6, 2, 139.72), (12288, 100, 64, 8, 6, 4, 120.96),
        (13312, 82, 64, 8, 12, 4, 111.79), (13312, 82, 64, 4, 12, 2, 104.45), (13312, 82, 104, 4, 12, 2, 123.71),
        (13312, 82, 128, 4, 12, 2, 108.78), (13312, 82, 64, 4, 12, 4, 104.82), (13312, 94, 128, 4, 12, 2, 124.10),
        (14336, 70, 64, 8, 12, 2, 121.63), (14336, 70, 64, 4, 12, 2, 102.03), (14336, 70, 112, 4, 12, 2, 104.50),
        (14336, 70, 128, 4, 12, 2, 105.89), (14336, 70, 64, 4, 12, 4, 102.27),
    )
)  # fmt: skip
"""BigScience, tr11-176B-ml/chronicles-prequel.md, "Rebalancing layers": tensor × pipeline ranks, seconds."""


SHOEYBI = tuple(
    Published(
        f"{name} on {ranks}",
        Run(hidden, layers, heads, ranks, batch, tensor, microbatch=8, sequence=1024, recompute="block"),
        seconds,
    )
    for name, hidden, layers, heads, ranks, batch, tensor, seconds in (
        ("355M", 1024, 24, 16, 64, 512, 1, 0.86 * 86400 / 68507),
        ("2.5B", 1920, 54, 20, 128, 512, 2, 2.27 * 86400 / 68507),
        ("8.3B", 3072, 72, 24, 512, 512, 8, 2.10 * 86400 / 68507),
    )
)
"""Shoeybi et al. 2019, table 2: days for 68,507 steps."""

SPEEDUPS = tuple(
    (tensor, Run(1536, 40, 16, tensor, 8, tensor, microbatch=8, sequence=1024, recompute="block"), speedup)
    for tensor, speedup in ((1, 1.0), (2, 1.64), (4, 2.34), (8, 2.98))
)
"""Shoeybi et al. 2019, table 8: tensor parallel GPUs, the run, and its speed by that of one GPU."""


def zero_3() -> Iterator[tuple[str, list[Run], float]]:
    """Yield the rows of 174.6B parameters with ZeRO 3, by DeepSpeed, of table 2 of Narayanan et al. 2021.

    They are yielded as `narayanan` yields those of table 1.
    """
    for ranks, microbatch, rate in ((384, 4, 144), (768, 2, 88), (1536, 1, 44)):
        yield "174.6B", [Run(12288, 96, 96, ranks, 1536, microbatch=microbatch, recompute="block", zero=3)], rate


def against_zero_3() -> Iterator[tuple[str, list[Run], float]]:
    """Yield the rows of that table with tensor and pipeline parallelism."""
    for name, hidden, layers, heads, pipeline, ranks, batch, rate in (
        ("174.6B", 12288, 96, 96, 12, 384, 1536, 153), ("174.6B", 12288, 96, 96, 12, 768, 1536, 149),
        ("174.6B", 12288, 96, 96, 12, 1536, 1536, 141), ("529.6B", 20480, 105, 128, 35, 560, 2240, 171),
        ("529.6B", 20480, 105, 128, 35, 1120, 2240, 167), ("529.6B", 20480, 105, 128, 35, 2240, 2240, 159),
    ):  # fmt: skip
        chunks = [v for v in (1, 2, 3, 4, 8) if layers // pipeline % v == 0]
        runs = [Run(hidden, layers, heads, ranks, batch, 8, pipeline, v, recompute="block") for v in chunks]
        yield name, [run for run in runs if run.possible()], rate


LLAMA = {
    "7B": (4096, 32, 32, 32, 11008), "8B": (4096, 32, 32, 8, 14336), "13B": (5120, 40, 40, 40, 13824),
    "70B": (8192, 80, 64, 8, 28672), "405B": (16384, 126, 128, 8, 53248),
}  # fmt: skip
"""Hidden size, layers, heads, kv heads and intermediate size of Llama 2 (7B, 13B, 70B) and 3 (8B, 70B, 405B)."""


def llama(size: str, ranks: int, batch: int, **more: Any) -> Run:
    """Return a run of Llama 3, of which `more` is as of `Run`."""
    hidden, layers, heads, kv_heads, intermediate = LLAMA[size]
    options: dict[str, Any] = {"sequence": 8192, "vocabulary": 128256, "dtype": "bfloat16", "dropout": 0.0, **more}
    return Run(hidden, layers, heads, ranks, batch, kv_heads=kv_heads, intermediate=intermediate, **options)


NVIDIA = (
    *(
        Published(
            f"GPT-3 175B on {ranks}",
            Run(12288, 96, 96, ranks, batch, 4, 8, 12, cuts=True, zero=1, dtype="bfloat16", fused=True), seconds,
        )
        for ranks, batch, seconds in ((128, 256, 8.309), (512, 1024, 8.42), (2048, 4096, 8.49))
    ),
    *(
        Published(f"Llama 3.1 {size} on {ranks}", llama(size, ranks, batch, zero=1, context=2, **split), seconds)
        for size, split, rows in (
            ("8B", {}, ((8, 128, 12.91), (128, 2048, 13.10))),
            ("70B", {"tensor": 4, "pipeline": 4, "chunks": 5, "cuts": True},
             ((64, 128, 14.72), (512, 1024, 14.89), (2048, 4096, 14.98))),
            ("405B", {"tensor": 8, "pipeline": 9, "chunks": 7, "cuts": True},
             ((576, 252, 17.20), (1152, 504, 17.52), (2304, 1008, 17.62))),
        )
        for ranks, batch, seconds in rows
    ),
)  # fmt: skip
"""NVIDIA, dgxc-benchmarking, nemo_megatron/README_175b.md, llama3.1/README_{8b,70b,405b}.md: NeMo 24.09, bfloat16."""


def _meta(ranks: int, batch: int, sequence: int, context: int, rate: float) -> Published:
    """Return a row of Llama 3's table 4 as seconds of a step, from operations a second of a GPU (10¹²).

    The operations are those of the products with the 405 billion weights and of attention, of whose pairs a causal mask
    leaves half.
    """
    hidden, layers = LLAMA["405B"][:2]
    flops = 6 * batch * sequence * (405e9 + layers * sequence * hidden)
    run = llama("405B", ranks, batch, tensor=8, pipeline=16, chunks=8, cuts=True, zero=1, sequence=sequence,
                context=context)  # fmt: skip
    return Published(f"405B, {sequence:,} tokens, on {ranks:,}", run, flops / (ranks * rate * 1e12))


LLAMA_3 = (
    _meta(8192, 2048, 8192, 1, 430), _meta(16384, 2048, 8192, 1, 400), _meta(16384, 128, 131072, 16, 380),
)  # fmt: skip
"""Grattafiori et al. 2024, table 4; chunks of one layer, as 126 layers and the two ends are 16 × 8, are assumed."""

TORCHTITAN = tuple(
    Published(name, replace(llama(size, 64, 64 * rows, microbatch=rows, zero=3), **more), rows * sequence / tokens)
    for name, size, rows, sequence, tokens, more in (
        ("Llama 3 70B, full recomputation", "70B", 1, 8192, 331, {"recompute": "block"}),
        ("Llama 2 13B", "13B", 2, 4096, 2162, {"sequence": 4096, "vocabulary": 32000}),
        ("Llama 2 70B, full recomputation", "70B", 2, 4096, 353,
         {"recompute": "block", "sequence": 4096, "vocabulary": 32000}),
    )
)  # fmt: skip
"""PyTorch, torchtitan, docs/performance.md of 2024: 64 A100 80GB, FSDP2; rows whose recomputation the library has."""


def fastest(runs: list[Run], machine: Machine) -> tuple[Run, Planned]:
    """Return the fastest of runs that fit into the memory, of which a paper does not say which it was.

    Layers are traced for each microbatch, and the pipeline's formula gives the order in which runs are traced in full;
    the first that fits is taken.  Microbatches whose memory is too much without chunks are left out before.
    """
    layers: dict[int, float] = {}
    ranked = []
    for run in runs:
        if run.microbatch not in layers:
            model = TracedModel(parse(run.configuration()), run.ranks, machine, run.batch)
            parts = model.layers_of_one_copy(run.candidate())
            layers[run.microbatch] = sum(model.seconds(p, s) for p in parts for s in ("forward", "backward"))
            if Predictor(model).estimate(replace(run, chunks=1).candidate()).bytes > 0.92 * machine.memory:
                layers[run.microbatch] = math.inf
        passes = run.microbatches + (run.pipeline - 1) / run.chunks
        ranked.append((layers[run.microbatch] / run.pipeline * passes, run))
    for seconds, run in sorted(ranked, key=lambda x: x[0]):
        if seconds == math.inf:
            break
        planned = run.predict(machine)
        if planned.bytes <= 0.92 * machine.memory:
            return run, planned
    raise SystemExit(f"none of {runs} fits {machine.memory / 1e9:.0f} GB a rank")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("hidden", "layers", "heads", "ranks", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name, default in (
        ("tensor", 1), ("pipeline", 1), ("chunks", 1), ("microbatch", 1), ("sequence", 2048), ("vocabulary", 51200),
        ("zero", 0), ("within", None), ("context", 1), ("ulysses", 1), ("kv-heads", None), ("intermediate", None),
        ("experts", None),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--cuts", action="store_true", help="Megatron's sequence cuts")
    parser.add_argument("--recompute", choices=("attention", "block"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--machine", default="a100")
    args = vars(parser.parse_args())
    machine = load_machine(args.pop("machine"))
    run = Run(**args)
    steps = dict(zip(("the library's program", "with fused attention"), run.predict_fused(machine), strict=True))
    if run.intermediate is None and run.context == 1:
        steps["with Megatron-LM's kernels"] = run.predict(machine, Megatron)
    for name, found in steps.items():
        print(
            f"{name}: {found.seconds:.4g} s a step, {found.throughput / run.ranks:.0f} tokens/s "
            f"and {found.rate / 1e12:.0f} teraFLOP/s of the model a rank, {found.bytes / 1e9:.1f} GB\n"
            + "    "
            + ", ".join(f"{cause} {100 * share:.0f}%" for cause, share in found.causes.items() if share > 0.005)
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
