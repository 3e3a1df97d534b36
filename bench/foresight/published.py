"""Published tables and measured steps beside what the timeline predicts; writes docs/foresight_validation.md.

    python bench/foresight/published.py                 # predicts all tables, about 15 minutes on one core
    python bench/foresight/published.py narayanan mpt   # some of them
    python bench/foresight/published.py --write         # rewrites the page from what was predicted and measured

Measured memory is what `bench/memory.py --imagined --json results/memory.json` has written.

The machine files of the published tables are those that are shipped: figures of the hardware and of kernels and
collectives, no training step.  Predicted tables are kept in results/tables.json; the measured steps are those that
`measured.py` has written to results/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
PAGE = HERE.parent.parent / "docs" / "foresight_validation.md"
KEPT = HERE / "results" / "tables.json"
MEMORY = HERE / "results" / "memory.json"

import more_systems as more  # noqa: E402
from measured import sections  # noqa: E402
from systems import (  # noqa: E402
    BLOOM,
    KORTHIKANTI,
    LLAMA_3,
    MEGASCALE,
    MPT,
    MPT_H100,
    MT_NLG,
    NVIDIA,
    SHOEYBI,
    SPEEDUPS,
    TORCHTITAN,
    ZERO_BUBBLE,
    Megatron,
    Published,
    Run,
    against_zero_3,
    fastest,
    narayanan,
    zero_3,
)

from parlinalg.planning.machine import Machine, load_machine  # noqa: E402
from parlinalg.planning.part_traces import trace_part  # noqa: E402
from parlinalg.planning.parts import Inputs, Part  # noqa: E402
from parlinalg.planning.timeline import timeline  # noqa: E402
from parlinalg.planning.trace import Start  # noqa: E402
from parlinalg.train.config import parse  # noqa: E402
from parlinalg.units import ITEMSIZE  # noqa: E402


# ------------------------------------------------------------------------------------------------ systems
def bound(causes: Mapping[str, float]) -> str:
    """Return the largest causes in words."""
    return ", ".join(f"{cause} {100 * share:.0f}%" for cause, share in list(causes.items())[:4] if share >= 0.005)


def summary(errors: list[float]) -> str:
    sizes = [abs(e) for e in errors]
    return f"median {100 * statistics.median(sizes):.1f}%, worst {100 * max(sizes):.1f}%"


def rates(rows: Iterable[tuple[str, list[Run], float]], machine: Machine) -> str:
    """Return published rates of runs beside the predictions, of each the fastest of those that it may have been."""
    lines = [
        "| parameters | GPUs | tensor × pipeline × data | microbatch, chunks | published | the library's program "
        "| error | with Megatron-LM's kernels | error | what bounds the library's step |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    own, theirs = [], []
    for name, runs, rate in rows:
        run, planned = fastest(runs, machine) if len(runs) > 1 else (runs[0], runs[0].predict(machine))
        found = [run.flops / p.seconds / run.ranks / 1e12 for p in (planned, run.predict(machine, Megatron))]
        own.append(found[0] / rate - 1)
        theirs.append(found[1] / rate - 1)
        lines.append(
            f"| {name} | {run.ranks} | {run.tensor} × {run.pipeline} × {run.data} | {run.microbatch}, {run.chunks} | "
            f"{rate} | {found[0]:.0f} | {100 * own[-1]:+.1f}% | {found[1]:.0f} | {100 * theirs[-1]:+.1f}% | "
            f"{bound(planned.causes)} |"
        )
    return (
        "\n".join(lines) + f"\n\nThe library's program: {summary(own)}. With Megatron-LM's kernels: {summary(theirs)}."
    )


MEGATRON, FUSED = "with Megatron-LM's kernels", "with fused attention"


def steps(published: Sequence[Published], machine: Machine | Sequence[Machine], other: str | None = None) -> str:
    """Return published seconds of steps beside the predictions, of the library's program and of another one.

    The machine is that of all rows, or there is one for each.
    """
    machines = [machine] * len(published) if isinstance(machine, Machine) else machine
    head = ["run", "published s", "the library's program", "error"]
    head += [other, "error"] * (other is not None) + ["memory a GPU, as predicted", "what bounds it"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    own, theirs = [], []
    for each, nodes in zip(published, machines, strict=True):
        planned, *fused = each.run.predict_fused(nodes) if other == FUSED else [each.run.predict(nodes)]
        own.append(planned.seconds / each.seconds - 1)
        row = [each.name, f"{each.seconds:.2f}", f"{planned.seconds:.2f}", f"{100 * own[-1]:+.1f}%"]
        if other is not None:
            second = fused[0] if fused else each.run.predict(nodes, Megatron)
            theirs.append(second.seconds / each.seconds - 1)
            row += [f"{second.seconds:.2f}", f"{100 * theirs[-1]:+.1f}%"]
            planned = second if fused else planned
        row += [f"{planned.bytes / 1e9:.0f} GB", bound(planned.causes)]
        lines.append("| " + " | ".join(row) + " |")
    text = f"\n\nThe library's program: {summary(own)}."
    return "\n".join(lines) + text + ("" if other is None else f" {other[0].upper()}{other[1:]}: {summary(theirs)}.")


# ------------------------------------------------------------------------------------------------ tensor parallelism
def words_1d(b: float, s: float, h: float, p: int) -> float:
    """Elements a rank receives in a layer's passes: four all-reduces of b s h."""
    return 8 * b * s * h * (1 - 1 / p)


def words_2d(b: float, s: float, h: float, p: int) -> float:
    """2D SUMMA on q × q: x along rows and w along columns forward and for both products of the backward pass.

    The inputs of a layer's products have 7 b s h elements (h, h, h, 4h wide), its weights 12 h².
    """
    return 3 * (7 * b * s * h + 12 * h * h) / p * (p**0.5 - 1)


def words_25d(b: float, s: float, h: float, p: int, depth: int) -> float:
    """2.5D with depth on the batch: 2D on p/depth ranks with a part of the batch, and the sum of weights' gradients."""
    return words_2d(b / depth, s, h, p // depth) + 2 * 12 * h * h / (p // depth) * (1 - 1 / depth)


def words_3d(b: float, s: float, h: float, p: int) -> float:
    """3D on l × l × l: x, w and y of every product, whose outputs have 9 b s h elements, travel along an axis each."""
    return 3 * (16 * b * s * h + 12 * h * h) / p * (round(p ** (1 / 3)) - 1)


@dataclass(frozen=True)
class Layer:
    """A layer's forward and backward pass on one of 64 ranks, traced: the elements it receives, and its seconds."""

    words: int
    seconds: float
    products: float


FORMS = {
    "1D": {"size": 64, "mode": "1d"}, "2D": {"mode": "2d", "shape": (8, 8)},
    "2.5D, depth 4": {"mode": "2.5d", "shape": (4, 4, 4)}, "3D": {"mode": "3d", "shape": (4, 4, 4)},
}  # fmt: skip


def layer(machine: Machine, form: str, batch: int, dtype: str) -> Layer:
    """Return a layer of a GPT with 3,072 features and 64 heads on 512 tokens, under a form of tensor parallelism."""
    run = Run(3072, 3, 64, 64, batch, sequence=512, dropout=0.0)
    keys: dict[str, Any] = {"precision": dtype} if dtype == "float16" else {"precision": None, "dtype": dtype}
    config = parse({**run.configuration(), **keys, "parallel": {"data": 1, "tensor": FORMS[form]}})
    inputs, node = Inputs(True, run.vocabulary, run.sequence), machine.ranks_per_node

    def part(layers: tuple[int, int], given: Any = None) -> Part:
        return trace_part(config, inputs, 64, batch, layers=layers, given=given, node=node, target="gpu", update=False)

    found = part((1, 2), part((0, 1)).output)
    runs = [timeline(found.span(span), machine) for span in ("forward", "backward")]
    starts = [e for span in ("forward", "backward") for e in found.span(span).events if isinstance(e, Start)]
    words = sum(s.nbytes // ITEMSIZE.get(s.dtype, 1) for s in starts)
    return Layer(
        words, sum(r.seconds for r in runs), sum(dict(r.shares()).get("products", 0) * r.seconds for r in runs)
    )


CLAIMS = (
    ("Optimus: 2D against 1D, training", "2D", "1D", 1.48), ("Tesseract: 2.5D against 1D", "2.5D, depth 4", "1D", 1.38),
    ("Tesseract: 2.5D against 2D", "2.5D, depth 4", "2D", 1.53), ("3D: against 1D", "3D", "1D", 2.32),
    ("3D: against 2D", "3D", "2D", 1.57),
)  # fmt: skip
BATCHES = (12, 24, 48, 192)


def claims(machine: Machine, dtype: str) -> str:
    """Return the claimed ratios of times beside those of traced layers."""
    head = "| claim | claimed | " + " | ".join(f"batch {b}" for b in BATCHES) + " |"
    lines = [head, "|---" * (2 + len(BATCHES)) + "|"]
    found = {(f, b): layer(machine, f, b, dtype) for f in FORMS for b in BATCHES}
    for text, new, old, claimed in CLAIMS:
        ratios = " | ".join(f"{found[old, b].seconds / found[new, b].seconds:.2f}" for b in BATCHES)
        lines.append(f"| {text} | {claimed:.2f} | {ratios} |")
    for form in FORMS:
        each = [found[form, b] for b in BATCHES]
        texts = " | ".join(f"{1e3 * e.seconds:.1f} ms, {100 * e.products / e.seconds:.0f}%" for e in each)
        lines.append(f"| {form}: a layer, and products' share of it | | {texts} |")
    return "\n".join(lines)


def words(machine: Machine) -> str:
    """Return the words of traced layers beside those of the formulas, which recompute the forward pass or do not."""
    lines = ["| batch | " + " | ".join(f"{f}: traced | formula" for f in FORMS) + " |", "|---" * 9 + "|"]
    for b in BATCHES:
        row = []
        for form, formula in zip(FORMS, (
            words_1d(b, 512, 3072, 64), words_2d(b, 512, 3072, 64), words_25d(b, 512, 3072, 64, 4),
            words_3d(b, 512, 3072, 64),
        ), strict=True):  # fmt: skip
            row.append(f"{layer(machine, form, b, 'float32').words / 1e6:.1f} | {formula / 1e6:.1f}")
        lines.append(f"| {b} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def of_four(name: str) -> Machine:
    """Return a machine with nodes of 4 ranks, one network interface for the node, as the papers' clusters have."""
    machine = load_machine(name)
    assert machine.network is not None
    return replace(machine, ranks_per_node=4, cores=4, network=replace(machine.network, rails=1))


def jean_zay() -> Machine:
    """Return Jean Zay's nodes of 8 A100s: 4 Omni-Path links of 100 Gbit/s, with the share of them that `v100` takes."""
    machine = load_machine("a100")
    assert machine.network is not None
    return replace(machine, network=replace(machine.network, rails=4, bandwidth=1.16e10))


def dgx_2h() -> Machine:
    """Return nodes of 16 V100s with 8 interfaces of 100 Gbit/s (DGX-2H)."""
    machine = load_machine("v100")
    assert machine.network is not None
    return replace(machine, ranks_per_node=16, cores=16, network=replace(machine.network, rails=8))


def speedups(machine: Machine) -> str:
    """Return how much faster more tensor parallel GPUs make a step of equal size, published and predicted."""
    lines = ["| GPUs | published | the library's program | what bounds it |", "|---|---|---|---|"]
    steps = [(ranks, published, run.predict(machine)) for ranks, run, published in SPEEDUPS]
    alone = steps[0][2].seconds
    for ranks, published, planned in steps:
        lines.append(f"| {ranks} | {published:.2f} | {alone / planned.seconds:.2f} | {bound(planned.causes)} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "narayanan": lambda: rates(narayanan(), load_machine("a100")),
    "split": lambda: rates(against_zero_3(), load_machine("a100")),
    "zero_3": lambda: rates(zero_3(), load_machine("a100")),
    "megascale": lambda: steps(MEGASCALE, load_machine("a100"), MEGATRON),
    "zero_bubble": lambda: steps(ZERO_BUBBLE, load_machine("a100"), MEGATRON),
    "bloom": lambda: steps(BLOOM, jean_zay(), MEGATRON),
    "shoeybi": lambda: steps(SHOEYBI, dgx_2h()),
    "speedups": lambda: speedups(dgx_2h()),
    "korthikanti": lambda: steps(KORTHIKANTI, load_machine("a100"), MEGATRON),
    "mpt": lambda: steps(MPT, load_machine("a100"), FUSED),
    "torchtitan": lambda: steps(TORCHTITAN, load_machine("a100"), FUSED),
    "mt_nlg": lambda: steps(MT_NLG, load_machine("a100"), MEGATRON),
    "mpt_h100": lambda: steps(MPT_H100, load_machine("h100"), FUSED),
    "nvidia": lambda: steps(NVIDIA, load_machine("h100"), FUSED),
    "llama_3": lambda: steps(LLAMA_3, load_machine("h100"), FUSED),
    "grok": lambda: steps(more.GROK, load_machine("h100"), FUSED),
    "xtuner": lambda: steps(more.XTUNER[:5], load_machine("a100"), FUSED),
    "xtuner_70b": lambda: steps(more.XTUNER[5:], load_machine("a100"), FUSED),
    "internlm": lambda: steps(more.INTERNLM, jean_zay(), FUSED),
    "ibm": lambda: steps(more.IBM, more.with_interfaces("a100", 2, 2.5e10), FUSED),
    "ibm_h100": lambda: steps(more.IBM_H100, more.with_interfaces("h100", 2, 5e10), FUSED),
    "ibm_compiled": lambda: steps(more.IBM_COMPILED, load_machine("h100"), FUSED),
    "kempner": lambda: steps(more.KEMPNER, more.four_h200(), FUSED),
    "flagperf": lambda: steps(more.FLAGPERF, more.flagperf_machines(), FUSED),
    "nemotron": lambda: steps(more.NEMOTRON, load_machine("h100"), FUSED),
    "jax": lambda: steps(more.JAX, load_machine("h100"), FUSED),
    "nanotron": lambda: steps(more.NANOTRON, load_machine("h100"), FUSED),
    "deepspeed": lambda: steps(more.DEEPSPEED, more.slower_links("a100", 2 / 3), FUSED),
    "neox": lambda: steps(more.NEOX, more.a100_40gb(), MEGATRON),
    "large": lambda: steps(more.LARGE, more.large_machines(), MEGATRON),
    "llama_65b": lambda: steps(more.LLAMA_65B, load_machine("a100"), FUSED),
    "oneflow": lambda: steps(more.ONEFLOW, more.v100_16gb(), MEGATRON),
    "v100": lambda: claims(of_four("v100"), "float16"),
    "a100": lambda: claims(of_four("a100"), "float32"),
    "eight": lambda: claims(load_machine("v100"), "float16"),
    "words": lambda: words(load_machine("a100")),
}


# ------------------------------------------------------------------------------------------------ how far to trust it
OWN = "the library's program"
STANDING: dict[str, tuple[str, str, str]] = {
    "narayanan": ("Megatron-LM, 2021", "A100", MEGATRON),
    "split": ("Megatron-LM, 2021, against ZeRO 3", "A100", MEGATRON),
    "zero_3": ("DeepSpeed, ZeRO 3, 2021", "A100", MEGATRON),
    "korthikanti": ("Megatron-LM, 2022", "A100", MEGATRON),
    "zero_bubble": ("Pipeline schedules in Megatron-LM, 2023", "A100", MEGATRON),
    "megascale": ("Megatron-LM, 2023, on up to 12,288 GPUs", "A100", MEGATRON),
    "bloom": ("Megatron-DeepSpeed, BLOOM, 2021", "A100", MEGATRON),
    "mpt": ("LLM Foundry, FSDP, 2023", "A100", FUSED),
    "torchtitan": ("torchtitan, FSDP2, 2024", "A100", FUSED),
    "mt_nlg": ("Megatron-DeepSpeed, MT-NLG, 2022", "A100", MEGATRON),
    "shoeybi": ("Megatron-LM, 2019", "V100", OWN),
    "mpt_h100": ("LLM Foundry, FSDP, 2023", "H100", FUSED),
    "nvidia": ("NeMo, 2024", "H100", FUSED),
    "llama_3": ("Meta, Llama 3, 2024", "H100", FUSED),
    "llama_65b": ("Meta, LLaMA 65B, 2023", "A100", FUSED),
    "grok": ("NeMo, experts: Grok-1, 2024", "H100", FUSED),
    "xtuner": ("XTuner, ZeRO 3 with Ulysses, 7B, 2024", "A100", FUSED),
    "xtuner_70b": ("XTuner, 34B and 70B", "A100", FUSED),
    "internlm": ("InternLM, ZeRO 1, 2023", "A100", FUSED),
    "ibm": ("PyTorch FSDP, IBM, 2024", "A100", FUSED),
    "ibm_h100": ("PyTorch FSDP, IBM, 2024", "H100", FUSED),
    "ibm_compiled": ("PyTorch FSDP, IBM, compiled, 2024", "H100", FUSED),
    "kempner": ("KempnerForge, FSDP2 × tensor, 2026", "H200", FUSED),
    "flagperf": ("Megatron-Core, FlagPerf, 2024", "A100, H100, H800", FUSED),
    "nemotron": ("NeMo, Nemotron-4, 2024", "H100", FUSED),
    "jax": ("MaxText and Paxml, 2024", "H100", FUSED),
    "nanotron": ("nanotron, 2024", "H100", FUSED),
    "deepspeed": ("DeepSpeed and Transformers, 2024", "A800", FUSED),
    "neox": ("GPT-NeoX-20B, 2022", "A100 40GB", MEGATRON),
    "large": ("OPT-175B and GLM-130B, 2022", "A100", MEGATRON),
    "oneflow": ("OneFlow, 2021", "V100", MEGATRON),
}
"""The published tables: the system, its GPUs, and the column that stands for it by the kernels of its time."""
BLIND = tuple(STANDING)[tuple(STANDING).index("grok") + 1 :]
"""Tables whose rows, with their column, were written down before any of them was predicted.

So were those of Grok-1 and LLaMA 65B, but what is kept of them was predicted after mends that they led to."""


def errors(table: str, column: str) -> list[float]:
    """Return the errors of a column of a table's text, in percent of the seconds of a step, where it has rates too."""
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line)
    found = [float(row[head.index(column) + 1].removesuffix("%")) for row in rows]
    return found if "published s" in head else [100 * (1 / (1 + e / 100) - 1) for e in found]


def trust(kept: Mapping[str, str]) -> str:
    """Return a row for each published table: how far off the column is that stands for its system."""
    lines = ["| system | GPUs | rows | column | median | worst | too fast |", "|---" * 7 + "|"]
    everything: dict[bool, list[float]] = {False: [], True: []}
    for name, (system, gpus, column) in STANDING.items():
        found = errors(kept[name], column)
        everything[name in BLIND] += found
        sizes = [abs(e) for e in found]
        lines.append(
            f"| {system}{' *' if name in BLIND else ''} | {gpus} | {len(found)} | {column} | "
            f"{statistics.median(sizes):.1f}% | {max(sizes):.1f}% | {sum(e < 0 for e in found)} |"
        )
    for told, found in (("all", everything[False] + everything[True]), ("all with *", everything[True])):
        sizes = sorted(abs(e) for e in found)
        lines.append(
            f"| {told} | | {len(found)} | | {statistics.median(sizes):.1f}% | {sizes[-1]:.1f}% | "
            f"{sum(e < 0 for e in found)} |"
        )
    sizes = [abs(e) for e in everything[True]]
    shares = ", ".join(f"{sum(s <= most for s in sizes) / len(sizes):.0%} within {most}%" for most in (10, 20, 30))
    return "\n".join(lines) + f"\n\nOf the rows with *, {shares}."


# ------------------------------------------------------------------------------------------------ the page
def memory() -> str:
    """Return the memory of real ranks beside that of imagined ones."""
    told = json.loads(MEMORY.read_text())
    given, rows = told["arguments"], told["rows"]
    lines = ["| form | at rest MiB | imagined | off | peak MiB | imagined | off |", "|---" * 7 + "|"]
    for r in rows:
        cells = [r["form"]]
        for what in ("rest", "peak"):
            real, found = r[what], r[f"imagined_{what}"]
            cells += [f"{real / 2**20:.1f}", f"{found / 2**20:.1f}", f"{100 * (found / real - 1):+.2f}%"]
        lines.append("| " + " | ".join(cells) + " |")
    worst = max(abs(r["imagined_peak"] / r["peak"] - 1) for r in rows)
    head = (
        f"A GPT of {given['layers']} layers and {given['hidden']} features, {given['batch']} sequences of "
        f"{given['sequence']} tokens, {given['dtype']}, AdamW, 4 ranks; of the rank whose peaks differ most."
    )
    return head + "\n\n" + "\n".join(lines) + f"\n\nThe peaks differ by {100 * worst:.2f}% at most; the goal is 3%."


def page() -> str:
    """Return the text of the page."""
    kept = json.loads(KEPT.read_text())
    return TEXT.format(measured=sections(), short=SHORT, memory=memory(), trust=trust(kept), **kept)


SHORT = """What the model of time lacks:

- **Schemes on emulated hosts are predicted 1 to 13% too fast**, but for data parallelism at 200 Mbit/s, 7% too slow.
  Ranks come to a sum a few milliseconds apart: over 8 ranks 1 MiB takes 82 ms from the last one's start, 1.12 times the
  link's time, alone 79. Plans there are 11% too slow to 13% too fast.
- **ZeRO 3 at 1 Gbit/s, 12% too fast**: its gathers are in flight while ranks compute. A gather of 64 KiB then takes 11
  ms in place of 0.7, one of 1 MiB 25 in place of 7, one of 4 MiB 49 in place of 31, as each message waits for a rank to
  have the core (`delay`, `computing`), and computing takes 10 to 24% longer, whatever their bytes: each of the 8 ranks
  polls, and has a thread that looks a thousand times a second.
- **Pipelines on emulated hosts compute more slowly.** In a layer's forward pass of 256 tokens ranks computed for 12 to
  13 ms where 9 were predicted: beside seven other ranks products take 10% longer, the interpreter, whose data four
  ranks push out of a core's cache in turn, twice as long, and both up to 20% longer while a message is awaited. Passes
  of pipelines that span nodes take the last (`overlap.slowdown`).
- **Ranks that the system places** stay on the cores they have come to. On 2 cores, 2 and 3 of 4 ranks that compute for
  16 ms while the others wait take 1.4 and 1.7 times as long as alone, as by cores dealt out by chance; for 64 ms they
  take 1.1 and 1.6 times, as the system then moves one of two. The model has no such move.
- **Machines change**: within a day the doctor measured 75 to 130 µs for an operation's overhead, 1.2 to 2.9 ns for a
  byte's work (`processor`). So it runs between the rounds; plans have its files of half an hour before, and two rounds
  of 3 steps. Beside programs that compile or read, pipelines on 2 ranks were up to 24% off, GPTs on 4 ranks 10.8%,
  with pairs in the wrong order. Others' use is the most of a half second before each round (on hosts, after the
  doctor) and of all rounds together.

Ruled out: lost packets (no step waited for a timeout), the order of starts in traces, and Python's lock (a shorter
switch interval changes nothing). Without the thread that lets operations progress, 18% of what ranks compute in a
backward pass of 4 hosts on one core, the step is 7% shorter.

On the emulated hosts 8 ranks share 2 cores, four a core in turn (`bound`), in a control group a core
([why](running.md)). With BBR and longer bursts, as until 2026-11-28, 3D was predicted 7 to 13% too fast and chosen
pipelines at 200 Mbit/s 13 to 17%; with Reno and those bursts, short operations 6 to 15% too slow. Links' bursts, what
they carry in 0.8 ms, were chosen by single operations with these tables in sight, the doctor's medians with an earlier
one. Not compared: two chunks a rank on 4 ranks, whose layers are too few, and hosts with cores of their own.
"""

TEXT = """# Foresight against measured steps and published tables

Written by `python bench/foresight/published.py --write`. What is predicted comes from the events of a step and a
[machine's file](guide/machines.md); the files have figures of the hardware, of kernels and of collectives, with their
sources, and none of a training step.

On real ranks steps of small GPTs are predicted to a few percent in the median, and memory within 3%; every table has
its errors, or its median and worst error below it. Published steps on GPUs were made by other systems: look at the
column with their kernels or with fused attention, not at that of the library's program, whose kernels differ. How
right a plan of your own is depends on its machine's file: [measure it](guide/machines.md#a-file-of-your-own).

## Steps on real ranks

By `bench/foresight/measured.py`: each form's program runs on real ranks, and on imagined ones, whose events run on the
machine that `parlinalg doctor --machine` measures in the same run or just before. The goals are errors of at most 10%
in the median, at worst 10% on one machine and 20% on emulated hosts, and the right order of all pairs further
apart than 10%. The last runs on one machine are shown.

On another machine, 2 cores of an Intel Xeon whose speed changes by a quarter within an hour, predictions for 2 ranks
were off on 2026-11-28 by 8.3% in the median and 12% at worst for training, always too fast, and by 8.0% and 10.4% for
pipelines, always too slow: at worst more than the goal. No pair was in the wrong order.

On a third machine, 2 cores of an AMD EPYC of another family, that day: on 2 ranks training 3.1% in the median and 6.0%
at worst, pipelines 3.1% and 6.6%; on 4 ranks 4.6% and 8.0%, and 0.7% and 2.3%. One pair was in the wrong order:
ZeRO 2 and 3 on 4 ranks (measured 1,075 and 1,211 ms, predicted 1,118 and 1,113).

Until 2026-11-28 emulated hosts had other links ([below](#what-falls-short)): with these, predictions were off by 3.6
to 5.9% in the median and 12 to 18% at worst at 200 Mbit/s, with up to 3 pairs in the wrong order, and by 2.9 to 8.0%
and 7 to 18% at 1 Gbit/s, with one at most.

Until 2026-11-30 operations of MPI that are in flight together had the link one after the other in the model, and no
`delay`. The last predictions without these, on the same machine and day as the tables, were off by 6.0 and 2.9% in the
median and 15.5 and 13.9% at worst at 1 Gbit/s, in two runs, in both with ZeRO 3 before 2.5D on k (309 and 269 ms), and
by 9.1 and 14.6% at 200 Mbit/s, without a wrong pair. They were mended by single operations beside products.

{measured}

### What falls short

{short}

## Memory

By `python bench/memory.py --imagined`: what NumPy's arrays take on a real rank between two steps, and at the most
within one, beside `world.memory` and `world.peak_memory` of the same program on imagined ranks.

{memory}

States on a disk are not compared: what reads or writes files is not imagined.

## How far to trust a prediction of a published step

Each row is a table below, by the column that stands for its system: with Megatron-LM's kernels before 2023, with
fused attention since. Errors are of the seconds of a step; "too fast" counts the rows whose step was predicted
shorter than published. Rows of tables with * were written down, with all that was assumed and with this column,
before any of them was predicted, and no figure or rule was changed by what came out. What the others were chosen or
mended with is told at each; Grok-1, first 70 to 76% too slow, and LLaMA 65B, first 22% too slow, were among those
with *, and each showed a fault of the library that is mended. With the second mend, larger buckets, all tables were
predicted again on 2026-11-30.

{trust}

## Training systems on A100s

The library's GPT is run without values on imagined ranks, by `bench/foresight/systems.py`: its tape, reducer, ZeRO,
pipeline schedules, recomputation and optimizer, one rank of each class. The traces are timed on the file `a100`, the
same for all tables. Up to three predictions stand beside each published figure:

- *The library's program*, as traced, with its own kernels. Attention of 16-bit floats has 16-bit products, between
  which a kernel passes over a block of scores in memory; until 2026-11-26 it was counted as tiles in TF32.
- *With Megatron-LM's kernels*: the same traces with the kernels of Megatron-LM's releases of 2021 and 2022 in place
  of the library's. Attention stores 16-bit scores of all pairs; bias and GELU, and bias, dropout and residual are one
  kernel; Adam is fused; gathered sequences need no copies. The class `Megatron` lists them.
- *With fused attention*, of systems since 2022: the library's program, whose attention counts as one kernel of 16-bit
  products, FlashAttention-2, by the rates in the machine's file: `--fused-attention` of `parlinalg plan train`.

The figures of the file were chosen with the first table in sight (below); Korthikanti's, MosaicML's and MT-NLG's were
then predicted without a change to the file or the model of time. One kernel of the second prediction, the copies of
gathered sequences, was left out after Korthikanti's table had been seen. The third prediction and torchtitan's table
came later, and on 2026-11-27 the tables of ZeRO 3, schedules, MegaScale and BLOOM: predicted with no figure or rule
changed before, but for ZeRO 3's, whose gathers between nodes had become rings by then.

### Megatron-LM, weak scaling

Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM" (SC 2021), table 1:
teraFLOP/s a GPU, by the paper's count of operations. Blocks are recomputed. The table does not have microbatches and
chunks; the prediction takes the fastest by the layers' times that fits 80 GB, among microbatches of 1 to 8 and 1 to 5
chunks.

{narayanan}

How the file was arrived at: in an earlier form of this page, with events written by hand, kernels at 1.6 TB/s and
products by saturating dims alone made the rows 7 to 17% too fast. Three figures of the file were then replaced, none of
them row by row: products by tiles and waves, kernels along rows at 64% of the memory's bandwidth, NCCL's latency by
message size. Since then, two rules of the model were added, and no figure was changed: products with vectors, such as
sums of squares, take the time of one pass through memory, and results of fewer tiles than processors are cut along k.
The first was plainly wrong before (a sum of squares took a thousand times too long), the second changes no row here.
And with Megatron-LM's kernels microbatches after the first add their gradients, which the trace of the first lacks.
The small models' rows are too fast for the library's program since its update is fused: of 1.7 billion parameters on a
rank it is a good part of a step, for which Megatron-LM passes over memory six times, and the library three times.

### Megatron-LM against ZeRO 3

The same paper's table 2: GPT-3 of 174.6 billion parameters and a GPT of 529.6 billion with 8 × 12 and 8 × 35 tensor ×
pipeline ranks, microbatches of one sequence, and the fastest number of chunks, which the table does not have. It was
predicted in November 2026 with the file and the model of time as they were.

{split}

The other half of the table are the same models with ZeRO 3 by DeepSpeed, without tensor or pipeline ranks. Here are the
rows of 174.6 billion parameters; those of 529.6 billion (138, 98 and 48 teraFLOP/s a GPU) were not predicted.

{zero_3}

This misses, the more so the more GPUs: the published steps of 174.6 billion take 82, 67 and 67 s on 384, 768 and 1,536
GPUs, so that they are bound by communication, where the library's gathers hide behind products. A step moves 1,050 GB
to every GPU (each weight twice, each gradient once, in 16 bits), which 8 interfaces of a node bring in 6 s: those runs
took nearly ten times that. What DeepSpeed of 2021 lost it to the paper does not say; it gathered each parameter alone
where the library gathers the large ones of a layer. One cause was the file's, and is mended: groups across nodes
gathered and reduce-scattered along trees, in steps whose number grows with the logarithm of the ranks. NCCL has rings
only, of 1,535 steps among 1,536 ranks, by its own model 3 to 6 ms for each operation (`src/graph/tuning.cc`). The files
of GPUs have them now, with the latencies that they had. No row of an earlier table changed by more than 0.2 points.

### Sequence cuts and selective recomputation

Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022), tables 3 and 5: seconds of a
step of Megatron-LM without data parallelism. "Selective" is the library without recomputation, as it never keeps
scores.

{korthikanti}

22B on one node was 28% and 40% off for the library's program in an earlier form of this page: a step of 4 sequences is
short beside the update of 2.8 billion parameters a GPU, for which the library passed over memory once for each
operation of Adam where gradients have 16 bits and masters 32. Its fused kernel takes them now. What is left of the
second row is the library's too: it gathers and reduce-scatters along the sequence in sixteen pieces, each copied for
every sequence, 56,000 copies a step; in one piece (`tunables.MOVE_SHARE = 1`) the row would be 1.09 s. The memory
predicted for the last rows of 530B and 1T is more than 80 GB: there the library would have to recompute more than
Megatron-LM did.

### Pipeline schedules

Qi et al., "Zero bubble pipeline parallelism" (ICLR 2024), tables 3 and 4: GPTs of 1,024 tokens on pipelines of 8 to 32
A100s without tensor or data parallelism, in Megatron-LM. The paper's 1F1B, its interleaved schedule (a layer is a
chunk), and ZB-1p, which is the library's ZB-H1: its table 5 has equal bubbles for both. The embedding and the head
count as a layer each, in the paper and in the library. ZB-2p, with twice the activations, is no schedule of the
library. The seconds follow from the samples a second of each GPU. By their memory (30, 39, 32 and 43 GB with 1F1B)
those runs recomputed nothing and kept attention's scores, as the second prediction does. The table was chosen and
predicted before any of it had been compared, with the file and the model of time as they were.

{zero_bubble}

What is left has a pattern: with Megatron-LM's kernels 1F1B is met within 3%, and the interleaved schedule is 5 to 11%
too fast, most so on 16 GPUs. Of a message between nodes nothing is waited for in the prediction while a rank has other
work; Megatron-LM of that time sent and received between passes, and with chunks of a layer each pass has a message.

### Megatron-LM on up to 12,288 GPUs

Jiang et al., "MegaScale: scaling large language model training to more than 10,000 GPUs" (NSDI 2024), table 2, rows of
Megatron-LM of 2023: GPT-3 of 175 billion parameters with 128 heads and a vocabulary of 64,000, 8 × 8 tensor × pipeline
ranks of 6 chunks, and equal batches on more and more GPUs. The paper says "Ampere" and gives no nodes: here they are
the file's. Microbatches of one sequence, sequence cuts, selective recomputation and ZeRO 1 are assumed; with blocks
recomputed products alone would take 39 of the 40 s on 256 GPUs. MegaScale's own rows have parallel blocks and
windows of attention, which the library has not.

{megascale}

The fewest GPUs are met; with more of them the published steps lose what the prediction does not have, about 1.5 s a
step at a batch of 768 whatever the GPUs. The paper names stragglers, irregular garbage collection of Python and late
starts of the gradients' reductions.

### BLOOM

BigScience's trials before BLOOM-176B,
[chronicles-prequel.md](https://github.com/bigscience-workshop/bigscience/blob/053adafee86d8b0beb10ddd95e5bbbbe3d702f3c/train/tr11-176B-ml/chronicles-prequel.md),
"Rebalancing layers": seconds of a step of 2,048 sequences on 384 A100-80GB of Jean Zay, by Megatron-DeepSpeed in
bfloat16; width × layers, heads, tensor × pipeline ranks, the rest data parallel, with DeepSpeed's 1F1B and the states
cut over it. Blocks are recomputed, the embedding of 250,880 tokens and the head count as a layer each, as in the
library. The nodes have 4 Omni-Path links of 100 Gbit/s: the file `a100` with these in place of its 8 interfaces. BLOOM
became the row of 14336 × 70 with 112 heads. Position biases (ALiBi) and the norm after the embedding are left out.

{bloom}

All rows are too fast, most by 9 to 15%, which is DeepSpeed's pipeline again (below), beside `CUDA_LAUNCH_BLOCKING=1`,
with which these runs launched each kernel after the end of the one before. What the rows differ by is met: of 14336 ×
70 on 4 × 12 ranks 112 and 128 heads cost 2.4 and 3.8% more than 64, predicted 2.9 and 4.0%, and microbatches of 4 0.2%
more, predicted 4.1%. Two rows are not: 104 heads at 13312 (18% slower than 64, predicted 3%) and microbatches of 2 on
8 × 6 ranks (16% slower than of 4, predicted 2%).

### FSDP

MosaicML, [LLM Foundry's
benchmarks](https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md): MPT models with
fully sharded data parallelism and FlashAttention in bfloat16, on nodes of 8 A100-80GB with 1600 Gbit/s of RoCE. Here
they are the library's GPT of the same sizes with ZeRO 3; rows that recompute do so with blocks. The seconds follow
from the tokens a second of each GPU.

{mpt}

The worst rows of the library's program are those of 7B and 13B that recompute. MosaicML's attention is one kernel, the
library's writes its scores to memory and reads them, and recomputation makes it once more.
With fused attention all rows but one are too fast: the rates are those of FlashAttention-2, and these runs had the
first version, in Triton.

### FSDP of PyTorch

PyTorch, torchtitan's
[report of 2024](https://github.com/pytorch/torchtitan/blob/041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md):
Llama 2 and 3 on 64 A100-80GB with FSDP2 and PyTorch's fused attention, in bfloat16; the rows that recompute all blocks
or none. Here they are the library's Llama with ZeRO 3. The seconds follow from the tokens a second of each GPU.

{torchtitan}

With fused attention all three are a tenth too fast, and the library's program, whose attention is slower than
PyTorch's, is nearer. What these steps spend beside the kernels that the trace has is not in the prediction.

### A system that is slower than the model

Smith et al., "Using DeepSpeed and Megatron to train Megatron-Turing NLG 530B" (2022), section 2.4: seconds of a step of
1,920 sequences on 280, 350 and 420 nodes, 8 × 35 ranks a replica, with DeepSpeed's 1F1B schedule.

{mt_nlg}

This misses. The paper's own figures are 126, 121 and 113 teraFLOP/s a GPU, where Narayanan et al. have 163 for the same
sizes, tensor and pipeline ranks on 2,520 GPUs, and Korthikanti et al. 49.05 s for 280 sequences on 280 GPUs. Against
Narayanan et al. a larger bubble is predicted (240 microbatches for 35 stages without chunks), and, with Megatron-LM's
kernels, that gradients of bfloat16 are added and reduced in float32, 9 ms of a microbatch's 170. DeepSpeed's pipeline
waits for each of its messages, which are cut among the 8 ranks of a stage: by the file about 3 ms a microbatch, not in
the prediction. The published steps leave 215 ms a microbatch, so that some 40 ms have no cause here; the paper does not
say what they are lost to. Reading it as a calibration of the file would make the other tables wrong.

## Megatron-LM on V100s

Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model parallelism" (2019), table
2: days for 68,507 steps of 512 sequences of 1,024 tokens, as seconds of a step, with 1, 2 and 8 tensor ranks, the rest
data parallel; blocks are recomputed. Nodes are DGX-2H: the file `v100` with 16 GPUs and 8 interfaces a node; that these
GPUs have a limit of 450 W, and a peak of 130 teraFLOP/s, is left out. Kernels of 2019 were not those of the class
`Megatron`, so that the library's program stands alone.

{shoeybi}

Table 8 of the paper, how many times as fast a model of 1.2 billion parameters with a batch of 8 is on more GPUs:

{speedups}

Tensor parallelism of so small a model is predicted to gain too much, by a cause that was not found: the file's links
are assumptions in part (its notes say which), and kernels of 2019 were slower for little work.

## A step on an H100

The table "One GPU" is by a machine's file that was measured in the same run. The file `h100`, of datasheets and
published kernels, predicts with `--fused-attention` 29.1, 48.1 and 95.5 ms for the wider three, 10 to 12% too fast (in
another run the last took 103 ms): norms, sums of rows and biases are slower than their bytes tell, and the GPU waits
for the host at the beginning of a step. For the narrow one it predicts 25 ms, where 62 are measured: the host takes
83 µs for an operation, Python's and CuPy's work, and the file assumes 5.

A run twenty minutes before had three of the four predicted 39 to 50% too slow: the doctor had measured the overhead of
an operation once, 160 µs, where the run before that had 111. It is measured at three times since, of which the middle
one counts. Before attention was one kernel of cuDNN's, the GPT of 2048 × 4 layers took 58.7 ms.

## Training systems on H100s

A blind test. No figure of the file `h100` had been compared with a training step when these tables were chosen; they
were predicted with the file and the model of time as they were. The column "the library's program" then had attention
in TF32; now it has what the library does on GPUs since 2026-11-26. Its errors grow with the share of attention, whose
scores go through memory in blocks that a mask hides a part of, where modern systems have a kernel that keeps none and
skips what is hidden. The column "with fused attention" counts it so, by the rates of cuDNN (file `h100`), which are
measurements of this kernel alone: this was added after the first column was known, and no other figure was changed that
bears on a row. With it NeMo's steps are predicted 5 to 13% too slow, Llama 3's between 10% too fast and 4% too slow,
and LLM Foundry's, of 2023, a quarter too fast in the median.

### FSDP on H100s

The same
[benchmarks of LLM Foundry](https://github.com/mosaicml/llm-foundry/blob/main/scripts/train/benchmarking/README.md),
table "H100 80GB BF16": MPT models with fully sharded data parallelism on nodes of 8 H100-80GB, a sample of the rows of
1B and more with 1,024 to 32,768 tokens. Here they are the library's GPT with ZeRO 3, with recomputed blocks where the
table says so.

{mpt_h100}

These steps are slower than today's kernels allow, and the longer the sequences, the more: at 32,768 tokens they take
nearly twice the prediction with fused attention. LLM Foundry's scripts chose FlashAttention of the first version, in
Triton (`attn_impl="triton"`), which reaches 25 to 40% of an A100's peak (Dao, "FlashAttention-2", 2023); of that kernel
on an H100 no figure was found. 13B without recomputation is too fast in either column, by something that the prediction
does not have: there ZeRO's gathers and reductions hide behind products, and gradients travel in bfloat16, where these
runs reduce them in float32. So
the errors of the first column, 12.8% in the median when attention was counted in TF32, were two that cancelled each
other: attention as slow as Triton's by chance, and all else too fast.

### NeMo on H100s

NVIDIA's DGX Cloud benchmarks of early 2025, NeMo 24.09 in bfloat16: GPT-3 175B with 4 tensor × 8 pipeline ranks of 12
chunks; Llama 3.1 8B, 70B (4 × 4, 5 chunks) and 405B (8 × 9, 7 chunks), each sequence of 8,192 tokens on a ring of 2
ranks ("context parallel"). Microbatches are one sequence; with sequence cuts and ZeRO 1. GPT-3's recipe recomputes
nothing, and Llama's are assumed not to either. The seconds of a step are those of the recipes
[nemo_megatron/README_175b.md](https://github.com/NVIDIA/dgxc-benchmarking/tree/0b71cfda5163540778e2a3d2db59858bf62f96f7)
and [llama3.1/README_8b.md, README_70b.md and
README_405b.md](https://github.com/NVIDIA/dgxc-benchmarking/tree/143b90dd91f9be958fed4773ae95d941a3356a82).

{nvidia}

What is left has the same sign in all rows, and causes that are the library's own: gathers and reductions of sequence
cuts are waited for (8 to 12% of a step), which NeMo overlaps with products (`ub_tp_comm_overlap`); rotary positions are
single operations in float32 on a GPU, with what else is in float32 about half of the other kernels of Llama 8B; ZeRO's
gathers are not hidden either, where NeMo has `overlap_param_sync`. The memory is more than these systems need: 405B
fitted 80 GB, where the library would keep 98 to 104 GB.

### Llama 3

Grattafiori et al., "The Llama 3 herd of models" (2024), table 4: 405B on 8,192 and 16,384 H100s with 8 tensor × 16
pipeline ranks, in the last row with 131,072 tokens on a ring of 16 ranks. The seconds follow from the 430, 400 and 380
teraFLOP/s a GPU, with half of the pairs of attention. The paper does not say how many chunks its schedule has: here a
chunk is a layer, the embedding or the head (16 × 8 = 126 + 2, as the paper takes a layer from the first and from the
last rank), and a microbatch one sequence.

{llama_3}

The chunks are no detail: with one chunk, as was tried first, the library's program takes 17.26, 11.40 and 43.50 s, as
ranks idle for 30 to 47% of the step. That NVIDIA's 405B is predicted too slow and Meta's too fast, with the same file
and nearly the same split, is in what was published: counted alike, NVIDIA's steps are 515 to 527 teraFLOP/s a GPU where
Meta's are 380 to 430.

## Further systems

Twelve more systems, on 2026-11-29. Their rows, with what had to be assumed, and the column that stands for each were
written down first (`bench/foresight/more_systems.py`); then each was predicted once, with the files and the model of
time as they were. No figure of a file and no rule of the model was changed since. GPT-NeoX-20B and OneFlow are to be
compared with Megatron-LM's kernels, all others with fused attention. What these systems have and the library has not:
ZeRO over the ranks that share a sequence, too (DeepSpeed), recomputation of every other block or of some operations
(PyTorch, MaxText), attention beside the perceptron (GPT-NeoX), products that overlap with gathers of sequence cuts
(NeMo), more than two experts for a token.

### Experts: Grok-1 on H100s

NVIDIA, NeMo in bfloat16:
[grok1/README_314b.md](https://github.com/NVIDIA/dgxc-benchmarking/blob/143b90dd91f9be958fed4773ae95d941a3356a82/grok1/README_314b.md),
weak scaling of Grok-1's blocks: 6,144 features, 8 experts of 32,768 in each block, two for a token, with capacity 1 and
padding. 4 tensor ranks with sequence cuts; experts are cut over 2 to 8 data ranks, of which 1,024 and 2,048 GPUs have 2
and 4 groups (here ZeRO 1 works within these too); 2 to 8 pipeline ranks of 8 chunks and a ring of 2. Microbatches are
one sequence, of 4,096 tokens on up to 32 GPUs, then 8,192; 1,024 of them a step to 512 GPUs. Nothing is recomputed.

{grok}

These are second predictions. The first were 70 to 76% too slow, and showed a fault of the library: CuPy multiplies
stacks of 16-bit matrices in float32 ([cupy/cupy 10317](https://github.com/cupy/cupy/pull/10317)), and the experts of a
rank were such a stack. Now each large one is a product of its own, in 16 bits. No figure and no rule of the model was
changed, and no other table has such stacks.

### Ulysses: XTuner on A100s

InternLM,
[XTuner's figures](https://github.com/InternLM/xtuner/blob/4d2758ec5738910b130a9c7c62f2b14375f6d90b/docs/zh_cn/acceleration/benchmark.rst)
of 2024: Llama 2 7B, 70B and Yi 34B in float16 with sequences of 8,192 tokens to a million, which so many ranks share by
all-to-alls of heads. Blocks are recomputed and each GPU has a sequence's tokens a step, as in the configurations;
DeepSpeed's ZeRO 3 is assumed. Rows of 70B with more ranks than its 8 key-value heads are left out.

{xtuner}

{xtuner_70b}

The sequences that ranks share are met within 13%, so that long attention and all-to-alls within a node are right. The
step of 70B at 8,192 tokens is not: 22 s are predicted to compute, behind which gathers of 420 GB a GPU hide; the sum
of both at 25 GB/s is the published 38 s. DeepSpeed does not hide them here, as in the table of ZeRO 3 above. ZeRO
shards over the ranks that share a sequence too, as DeepSpeed's does: 70B with 131,072 tokens takes 78 GB a GPU, which
have 80 GB; with shards over data ranks alone it took 311 GB. The rows of shared sequences are predicted with that;
their steps were 0 to 1% longer before.

### InternLM on A100s

[InternLM's table](https://github.com/InternLM/InternLM/blob/20fe5ac297e61c6ee62a8589e0b7fd12e36b590b/doc/en/train_performance.md)
of 2023: a Llama of 7B with a vocabulary of 103,168 and sequences of 2,048 tokens, with FlashAttention and ZeRO 1 over
all data ranks or within a node. Nodes have 4 interfaces of 100 Gbit/s.

{internlm}

On up to 128 GPUs and with states within a node all are met within 12%. With states over 512 and 1,024 GPUs the
published steps lose 1 and 3 s more than predicted: InternLM sends each rank's weights and gradients by broadcasts and
sums of their own, where the library gathers and reduce-scatters.

### FSDP of IBM and PyTorch on A100s and H100s

Two posts of PyTorch's blog of 2024, of which the first is
["Maximizing training throughput using PyTorch FSDP"](https://research.ibm.com/blog/pytorch-fsdp): Llama 2 of 7B,
sharded within a node, 34B (48 layers of 8,192) and 70B, two sequences of 4,096 tokens a GPU, blocks recomputed but for
7B. Compiled rows follow from the posts' shares of the peak. Nodes with A100s have 400 Gbit/s, with
H100s 800:

{ibm}

{ibm_h100}

464 H100s with 3,200 Gbit/s a node:

{ibm_compiled}

Not compiled, A100s are predicted 6 to 11% and H100s 21 to 25% too fast: PyTorch's single kernels of norms, rotary
positions and perceptrons are more of a step where products are faster. Compiled, the errors are 4 to 11%.

### FSDP beside tensor ranks on H200s

Kempner Institute,
[KempnerForge](https://github.com/KempnerInstitute/KempnerForge/blob/9f3f03a070668192230c7c542a3ecebb22d9a20c/benchmarks/mfu_scaling/mfu_scaling_2026-04-05.md)
of 2026: Llamas of 7B to 175B, 4,096 tokens, FSDP2 beside 1 to 4 tensor ranks, blocks recomputed, gradients reduced in
float32, compiled but for 13B without tensor ranks. Nodes of 4 H200s, which no switch joins, each with an interface of
400 Gbit/s; the file `h100` with these and the memory's 4.8 TB/s. Sequence cuts are assumed.

{kempner}

Rows of one node differ by 23% either way without a pattern that the prediction has. Of 70B on 8 nodes gathers and
float32 sums of weights take 10.6 s on one interface a GPU, and are predicted to hide behind 10.5 s of computing: so
narrow a balance does not hold. In a group of 360 GPUs the same are small beside the products.

### Megatron-Core on A100s, H100s and H800s

BAAI,
[FlagPerf](https://github.com/FlagOpen/FlagPerf/tree/main/training/nvidia/llama3_8B-megatron)
of 2024: Llama 3 of 8B (2 pipeline ranks on A100s, 2 tensor ranks on H100s) and 70B (8 × 4), batches of 512 sequences of
8,192 tokens; Llama 2 of 70B, 44 sequences of 4,096. Microbatches of one sequence, sequence cuts and ZeRO 1; nothing
recomputed. H800s have 4/9 of an H100's NVLink, and here interfaces of 200 Gbit/s.

{flagperf}

All rows are met within 13%, those of H800s as well, most too fast. Which of two splits of 70B is faster is predicted.

### Nemotron-4 on H100s

NVIDIA, NeMo in bfloat16,
[nemotron/README_15b.md and README_340b.md](https://github.com/NVIDIA/dgxc-benchmarking/tree/0b71cfda5163540778e2a3d2db59858bf62f96f7/nemotron):
15B with 4 tensor ranks, 4 microbatches of 4; 340B with 8 × 8 ranks of 12 chunks, 16 of one. Their perceptrons have no
gate; here they are a Llama's of two thirds of the width, which have the same weights and products.

{nemotron}

Too slow, 15B most: gathers and sums of sequence cuts are waited for, 14% of the step, where NeMo overlaps them with
products (`ub_tp_comm_overlap`, set for 15B only).

### JAX on H100s

NVIDIA's
[maxtext/README_70b.md and paxml/README_5b.md](https://github.com/NVIDIA/dgxc-benchmarking/tree/143b90dd91f9be958fed4773ae95d941a3356a82):
MaxText's Llama 2 70B, 2 sequences of 4,096 tokens a GPU, sharded over up to 256, else over 128, which keeps attention's
projections and recomputes the rest (here whole blocks); Paxml's GPT of 5B (4,096 × 24), 4 sequences of 2,048 tokens a
GPU, sharded within a node.

{jax}

MaxText is too slow by about what whole blocks recompute more than it does. Why Paxml is too fast is not known; the
error is the same on all GPUs, so that it is within one of them.

### nanotron on H100s

Hugging Face's [runs of nanotron](https://huggingface.co/nanotron): a Llama of a billion parameters (2,048 × 24,
perceptrons of 4,096), 1,024 sequences of 4,096 tokens a step, data × tensor × pipeline ranks, 1F1B, sequence cuts and
ZeRO 1; late steps of the logs.

{nanotron}

Three rows are two thirds too fast: many small microbatches, which Python launches (91 ms for one of 4,096 tokens, where
the file assumes 5 µs a kernel), and 32 sequences a microbatch, which nearly fill the memory. The others are met within
26%, half of them within 10%.

### DeepSpeed and Transformers on A800s

[chenyaofo's table](https://gist.github.com/chenyaofo/d4cd6a20ab4b95cb3a49491747e2139a) of 2024: Llama 7B on 8 A800s (an
A100 with two thirds of the NVLink) of DeepSpeed 0.14.2, 4,096 tokens, bfloat16. The table does not give the unit of its
throughput; of all that are possible for a GPU it must be sequences a second of all 8. Rows that keep states in host
memory are left out: DeepSpeed updates those on the processor.

{deepspeed}

All are a quarter to 40% too fast: Transformers' layers are single operations of PyTorch, with rotary positions, norms
and the loss in float32, where the prediction has the library's kernels.

### GPT-NeoX-20B on A100s

Black et al., "GPT-NeoX-20B" (2022): 150,000 steps of 1,536 sequences in 1,830 hours on 96 A100s of 40 GB, with 2 tensor
× 4 pipeline × 12 data ranks, microbatches of 4, ZeRO 1 and recomputed blocks (`configs/20B.yml`). That is 117
teraFLOP/s a GPU by its own count. Its blocks have attention and perceptron side by side, with one sum for both.

{neox}

Too fast, as all of DeepSpeed's pipelines (BLOOM, MT-NLG); 1,830 hours have also what is not a step.

### OPT-175B, GLM-130B and LLaMA 65B on A100s

One published run each: OPT-175B (Zhang et al. 2022, 992 GPUs, FSDP beside 8 tensor ranks, microbatches of 8, "up to
147 teraFLOP/s"), GLM-130B (Zeng et al. 2022, 768 GPUs of 40 GB, 4 tensor × 8 pipeline ranks, 4,224 sequences, 43.3%
of the GPUs' peak with what is recomputed) and LLaMA 65B (Touvron et al. 2023, 2,048 GPUs, 380 tokens a second a GPU).
The first two are seconds by Narayanan's count of operations; blocks are recomputed. GLM's blocks are here a Llama's
of its size. LLaMA's split is not published: 8 tensor ranks with sequence cuts × 256 data ranks and ZeRO 1 are
assumed.

{large}

{llama_65b}

LLaMA was predicted 28.8% too slow at first (21.8% with fused attention): gradients and values moved in 430 buckets of
25 MiB and more, and a ring of 256 ranks takes the latency of 255 messages for each. Since then buckets have 1 MiB for
each rank that sums them. Of what remains most is that values are gathered at the end of a step, 0.7 s, which
Megatron-LM and FSDP hide behind the next forward pass and the library does not.

### OneFlow on V100s

[DLPerf](https://github.com/Oneflow-Inc/DLPerf/blob/087255cc04313a7353ae18f10e0110dd58d86f88/OneFlow/LanguageModeling/GPT/README.md)
of 2021: GPTs in float16 on nodes of 8 V100s of 16 GB with one interface of 100 Gbit/s; data × tensor × pipeline ranks,
microbatches of 2, with tensor ranks of 8 to 16. Blocks are recomputed.

{oneflow}

Nine of ten rows are met within 17%. The other has 1.1 GB of gradients a node to sum over one interface, predicted to
hide behind the backward pass.

## Strong scaling of tensor parallelism, 64 GPUs

Optimus (Xu et al., "An efficient 2D method for training super-large deep learning models", 2021), Tesseract (Wang et
al., "Tesseract: Parallelize the tensor parallelism efficiently", 2022) and Bian et al., "Maximizing parallelism in
distributed training for huge neural networks" (2021) compare their scheme with Megatron's 1D on 64 GPUs. Here a layer
of a GPT with 3,072 features and 64 heads on 512 tokens is traced under the library's own 1D, 2D (8 × 8), 2.5D (4 × 4
× 4, depth on the batch) and 3D (4 × 4 × 4) schemes, without recomputation, and timed forward and backward. The
papers' batches and software differ and are not all given in them, so that the ratios are shown by batch and are no
targets; a ratio above 1 means that the first one is faster.

Their clusters have nodes of 4 GPUs. With 4 V100s a node and one interface of 100 Gbit/s, in float16:

{v100}

With 4 A100s a node and one interface of 200 Gbit/s, in float32 (TF32):

{a100}

With 8 V100s a node and 4 interfaces of 100 Gbit/s (the file `v100` as it is), in float16:

{eight}

Millions of words that a rank receives in a layer's passes, as traced, and by the formulas of SUMMA as the papers have
it:

{words}

1D's are equal. The traced 2D, 2.5D and 3D have two thirds of the formulas' where the batch divides by all axes (48
and 192): the library keeps for the backward pass what it has gathered of x and w, where SUMMA gathers them again. The
formula of 2.5D includes the sums of the weights' gradients over the depth, 10.6 million words, which the library
makes once at the end of a step.

What does and does not follow:

- The order of all schemes follows on nodes of 4 from a batch of 24 on: 3D before 2D before 1D. At a batch of 24 on 4
  V100s a node the ratios are within 16% of the claimed ones: 2D over 1D, 3D over 1D and 3D over 2D.
- On nodes of 8 with 4 interfaces 1D gains: a ring of 64 ranks leaves each node once, with all its interfaces, while
  columns of an 8 × 8 grid leave it from every rank, each with its share. 2D is then slower than 1D at a batch of 12.
- Tesseract's 1.53 over 2D does not follow for equal batches of up to 24: the traced words of 2.5D and 2D are nearly
  equal there, 59.0 and 63.3 million at 12. The gain grows with the batch, and passes 1.53 between 48 and 192 on nodes
  of 4.
- Optimus' 1.48 does not follow from its own formulas. With broadcasts along trees and each forward pass made again,
  as in the paper, 2D costs (28 b s h + 48 h²) log p / (2 √p), and 1D 12 b s h (p − 1)/p. At p = 64 these are 10.5 b s
  h + 18 h² and 11.8 b s h: 2D gains at most 1.12, where b s is far above h, and loses where b s < 14 h. The claim
  needs broadcasts at their bound, (28 b s h + 48 h²)(√p − 1)/p = 3.1 b s h + 5.3 h², as the library's all-gathers
  have, or a 1D all-reduce that falls short of its own.
- The 3D paper's 2.32 over 1D is less than the words allow (4.9 at a batch of 24), and less than the predicted time.
  """


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES], help="the tables to predict, by default all")
    parser.add_argument("--write", action="store_true", help=f"rewrite {PAGE.name}")
    args = parser.parse_args()
    if args.write:
        PAGE.write_text(page())
        return 0
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for name in args.tables or TABLES:
        kept[name] = TABLES[name]()
        print(f"{name}\n\n{kept[name]}\n", flush=True)
        KEPT.write_text(json.dumps(kept, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
