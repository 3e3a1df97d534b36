"""A training step of a GPT under every scheme: time, words, and memory a rank, in one run.

    mpiexec -n 8 python bench/schemes.py                                            # ranks of one machine
    python bench/cluster/hosts.py run --hosts 8 --rate 200mbit --timeout 1500 -- \\
        python bench/schemes.py --rate 200                                          # emulated hosts, Mbit/s a link
    … bench/schemes.py --rate 200 --steps 3 --schemes zero1 "zero1 overlap" zero2 "zero2 overlap"

The schemes take turns: every round makes one step of each, from a barrier to the last rank's end; figures are medians.
With `--steps 3` a turn has three steps after an uncounted one, and the figure is a third of their time, so that what a
step leaves in flight is counted to the steps after it.
Per rank, of the one that has the most: words received in a step (counted), the floor of the step's time that they make
at the link's rate, weights, what the tape keeps for the backward pass, the peak over the state before a step
(tracemalloc: all of NumPy's memory), and the most that is held: that peak, and weights, buckets of gradients and the
optimizer's states, which lie between steps.  "agree" compares the bytes of the weights with the layouts' sum, exactly,
and what forward passes keep with the sum of the tensors that the tape saves, within 3 %; ZeRO-3, whose weights are
gathered ahead, may have two blocks' besides.  Gradients are summed in buckets of 1 MiB.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import harness
import numpy as np

import parlinalg as pla
from parlinalg import nn, optim
from parlinalg.autograd import Tensor, ops
from parlinalg.autograd.saved import saved
from parlinalg.autograd.storage import owners
from parlinalg.comm import Comm, open_comm
from parlinalg.parallel import GradientReducer, WeightGatherer, ZeRO
from parlinalg.schemes import Scheme, discover

SHAPES: dict[int, dict[str, tuple[str, tuple[int, ...]]]] = {
    2: {"1d": ("1d", (2,)), "2d 2×1": ("2d", (2, 1)), "2d 1×2": ("2d", (1, 2)), "data": ("data", (2,))},
    4: {
        "1d": ("1d", (4,)), "1d with sequence cuts": ("1d with sequence cuts", (4,)), "2d 2×2": ("2d", (2, 2)),
        "2d 4×1": ("2d", (4, 1)), "data": ("data", (4,)), "data 2 × 1d": ("data × 1d", (2, 2)),
    },
    8: {
        "1d": ("1d", (8,)), "1d with sequence cuts": ("1d with sequence cuts", (8,)), "2d 2×4": ("2d", (2, 4)),
        "2d 4×2": ("2d", (4, 2)), "2.5d 2×2×2": ("2.5d, depth on the batch", (2, 2, 2)),
        "2.5d on k 2×2×2": ("2.5d, depth on k", (2, 2, 2)),
        "3d 2×2×2": ("3d", (2, 2, 2)), "data": ("data", (8,)), "data 2 × 2d 2×2": ("data × 2d", (2, 2, 2)),
        "zero3": ("zero3", (8,)),
    },
}  # fmt: skip
"""For a number of ranks: the cases, each a scheme and the sizes of its axes."""

ZERO = {
    f"zero{stage}{' overlap' * overlap}": ZeRO(stage, overlap_gather=overlap)
    for stage in (1, 2)
    for overlap in (False, True)
}
"""Further cases, data parallel on all ranks, to be asked for by `--schemes`."""

MARGIN = 1.15
"""Floors that differ by more than this ratio should order the step times."""


@dataclass
class Case:
    """A model in training under one scheme."""

    name: str
    grid: pla.Grid
    model: Any
    optimizer: optim.Optimizer
    reducer: GradientReducer
    gatherer: WeightGatherer | None
    ids: pla.DistArray
    targets: pla.DistArray
    seconds: list[float] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def forward(self) -> Tensor:
        loss, count = ops.cross_entropy_sum(self.model(self.ids), self.targets)
        return loss * (1 / count)

    def step(self) -> float:
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.item())


def scheme_of(name: str) -> Scheme:
    """A scheme by name; "data × …" is one with a data axis around it."""
    outer, _, inner = name.rpartition(" × ")
    scheme = discover()[inner].SCHEME
    return scheme.with_data("data") if outer else scheme


def make(name: str, world: Comm, args: argparse.Namespace) -> Case:
    """A case with its model, the same weights and data in all."""
    scheme_name, sizes = ("data", (world.size,)) if name in ZERO else SHAPES[world.size][name]
    scheme = scheme_of(scheme_name)
    grid = pla.Grid(dict(zip(scheme.axes, sizes, strict=True)), world, "numpy")
    model = nn.GPT(
        vocab_size=args.vocabulary, max_position_embeddings=args.sequence, hidden_size=args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.heads, scheme=scheme, grid=grid, dtype=args.dtype,
        seed=1,
    )  # fmt: skip
    for layer in model.modules():
        if isinstance(layer, nn.Linear):
            layer.keep = args.keep
    parameters = list(model.parameters())
    reducer = GradientReducer(parameters, [ZERO[name]] if name in ZERO else None, bucket=1 << 20)
    gatherer = WeightGatherer(model) if scheme_name == "zero3" else None
    optimizer = optim.AdamW(parameters, lr=1e-3)
    numbers = np.random.default_rng(0).integers(0, args.vocabulary, (2, args.batch, args.sequence))
    ids, targets = (pla.distribute(a, grid, model.ids_layout) for a in numbers)
    return Case(name, grid, model, optimizer, reducer, gatherer, ids, targets)


def count(case: Case) -> None:
    """Words and memory of a step, on this rank."""
    grid, figures = case.grid, case.figures
    parameters = list(case.model.parameters())
    figures["weights"] = sum(p.block.nbytes for p in parameters)
    figures["weights by layout"] = sum(
        int(np.prod(grid.block_shape(p.layout, p.shape))) * p.dtype.itemsize for p in parameters
    )
    buckets = sum(b.data.nbytes for b in case.reducer.buckets if b.data is not None)
    figures["rest"] = figures["weights"] + buckets + case.optimizer.flat.states.nbytes
    case.step()  # what reads of the weights have awaited is in flight again
    with pla.ledger(grid) as book:
        case.step()
    figures["words"] = book.words.total()
    figures["bytes"] = book.bytes.total()
    figures["calls"] = book.calls.total()
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    loss = case.forward()
    gc.collect()
    figures["kept"] = tracemalloc.get_traced_memory()[0] - before
    figures["gathered"] = 2 * case.gatherer.limit if case.gatherer else 0
    tape = saved(loss)
    figures["saved"] = sum(row.nbytes for row in tape)
    figures["table"] = [(row.op, repr(row.layout), row.tensors, row.nbytes) for row in tape]
    del tape
    tracemalloc.reset_peak()
    loss.backward()
    case.optimizer.step()
    figures["peak"] = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    case.optimizer.zero_grad()


def timed(cases: list[Case], rounds: int, steps: int, world: Comm) -> Iterator[int]:
    """Time a step of each case a round, or the mean of several after an uncounted one."""
    for number in range(rounds):
        for case in cases:
            world.barrier()
            if steps > 1:  # no barrier after it, in which what is in flight would progress uncounted
                case.step()
            start = perf_counter()
            for _ in range(steps):
                case.step()
            if steps == 1:
                world.barrier()
            case.seconds.append(max(world.share((perf_counter() - start) / steps)))
            for owner in owners(case.model.parameters()):
                owner.finish()
        yield number


def gathered(case: Case, world: Comm, args: argparse.Namespace) -> dict[str, Any]:
    """The row of a case, from all ranks' figures."""
    case.figures["most"] = case.figures["rest"] + case.figures["peak"]
    everyone = world.share(case.figures)
    low, median, high = harness.spread(case.seconds)
    row = {"scheme": case.name, "seconds": median, "quartiles": [low, high], "samples": case.seconds}
    for name in ("words", "bytes", "calls", "weights", "rest", "kept", "saved", "peak", "most"):
        row[name] = max(f[name] for f in everyone)
    row["floor"] = row["bytes"] * 8 / (args.rate * 1e6) if args.rate else None
    row["tokens/s"] = args.batch * args.sequence / median
    row["agree"] = all(
        f["weights"] == f["weights by layout"]
        and -1 <= (f["kept"] - f["saved"]) / (0.03 * f["kept"] + 100_000) <= 1 + f["gathered"] / (0.03 * f["kept"])
        for f in everyone
    )
    row["table"] = everyone[0]["table"]
    return row


def disordered(rows: list[dict[str, Any]]) -> list[str]:
    """Pairs whose floors differ by more than `MARGIN`, and whose times are ordered the other way."""
    return [
        f"{a['scheme']} ({a['seconds']:.2f} s, floor {a['floor']:.2f}) and {b['scheme']} ({b['seconds']:.2f} s, floor "
        f"{b['floor']:.2f})"
        for a in rows
        for b in rows
        if a["floor"] * MARGIN < b["floor"] and a["seconds"] > b["seconds"]
    ]


def show(rows: list[dict[str, Any]], args: argparse.Namespace, ranks: int) -> str:
    first = next(r for r in rows if r["scheme"] == "1d") if any(r["scheme"] == "1d" for r in rows) else rows[0]
    mib = 2**20
    text = harness.table(
        (
            "scheme", "step s", "quartiles", "floor s", f"× {first['scheme']}", "tokens/s", "words", "calls",
            "weights MiB", "kept MiB", "peak MiB", "most MiB", "agree",
        ),
        [
            (
                r["scheme"], f"{r['seconds']:.3f}", f"{r['quartiles'][0]:.3f}–{r['quartiles'][1]:.3f}",
                "" if r["floor"] is None else f"{r['floor']:.3f}", f"{first['seconds'] / r['seconds']:.2f}",
                f"{r['tokens/s']:.0f}", f"{r['words']:,}", r["calls"], f"{r['weights'] / mib:.2f}",
                f"{r['saved'] / mib:.2f}", f"{r['peak'] / mib:.2f}", f"{r['most'] / mib:.2f}",
                "yes" if r["agree"] else "NO",
            )
            for r in sorted(rows, key=lambda r: r["seconds"])
        ],
    )  # fmt: skip
    link = f", links of {args.rate:g} Mbit/s" if args.rate else ""
    head = (
        f"GPT, hidden {args.hidden}, {args.layers} layers, {args.heads} heads, batch {args.batch} × sequence "
        f"{args.sequence}, vocabulary {args.vocabulary}, {args.dtype}, AdamW, {ranks} ranks{link}"
    )
    return f"{head}\n\n{text}"


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1, help="of a turn that are counted; several follow another one")
    parser.add_argument("--rate", type=float, help="of a link between hosts, Mbit/s: gives the floor of a step's time")
    parser.add_argument(
        "--keep", default="xw", choices=["xw", "x", "w", ""], help="operands kept gathered: Linear.keep"
    )
    parser.add_argument("--schemes", nargs="+", help="only these cases")
    parser.add_argument("--tables", action="store_true", help="print what the tape saves, per operation and layout")
    parser.add_argument("--json", help="write the result here")
    return parser.parse_args(given)


def main() -> int:
    args = arguments()
    world = open_comm()
    if world.size not in SHAPES:
        print(f"start it on {', '.join(map(str, SHAPES))} ranks, not on {world.size}", file=sys.stderr)
        return 2
    names = args.schemes or list(SHAPES[world.size])
    cases = [make(name, world, args) for name in names]
    for case in cases:
        for _ in range(2):
            case.step()
        count(case)
    for number in timed(cases, args.rounds, args.steps, world):
        if world.rank == 0:
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    rows = [gathered(case, world, args) for case in cases]
    wrong = disordered(rows) if args.rate else []
    if world.rank == 0:
        print(f"\n{show(rows, args, world.size)}")
        for row in rows if args.tables else ():
            print(f"\n{row['scheme']}: what rank 0's tape saves\n")
            body = [(op, layout, n, f"{size / 2**10:.1f}") for op, layout, n, size in row["table"]]
            print(harness.table(("operation", "layout", "tensors", "KiB"), body))
        if args.rate:
            print(
                f"\nfloors that differ by more than {MARGIN - 1:.0%} order the times" + (": NO" if wrong else ": yes")
            )
            print("\n".join(wrong))
        if args.json:
            harness.write_json(
                args.json, {"ranks": world.size, "arguments": vars(args), "rows": rows, "disordered": wrong}
            )
    for case in cases:
        case.grid.close()
    world.free()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
