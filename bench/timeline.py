"""A timeline of a training step, and the share of its communication that is hidden behind computation.

    python bench/cluster/hosts.py run --hosts 2 --rate 1gbit -- python bench/timeline.py --cases data zero3 \\
        --png docs/figures/timeline.png --chrome timeline.json

For each case: the seconds of a step, those in which the slowest rank did nothing but wait (exposed), and those that the
same operations take with nothing else to do (alone), posted in the same order and awaited one after the other.  Hidden
is 1 - exposed / alone.  The slowest rank is the one that waits least in a step; others wait for it too, however fast
the network is (most).  Figures are medians over the rounds; the cases take turns.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
import numpy as np

import parlinalg as pla
from parlinalg import nn, optim
from parlinalg.autograd import ops
from parlinalg.comm import Comm, TimedBook, open_comm
from parlinalg.parallel import GradientReducer, WeightGatherer, ZeRO
from parlinalg.schemes import discover

GOAL = 0.7
MIB = 2**20


class Case:
    """A GPT in training, data parallel or with its weights cut (ZeRO-3)."""

    def __init__(self, name: str, world: Comm, args: argparse.Namespace) -> None:
        self.name = name
        scheme = discover()["zero3" if name.startswith("zero3") else "data"].SCHEME
        self.grid = pla.Grid({"data": world.size}, world, "numpy")
        self.model = nn.GPT(
            vocab_size=args.vocabulary, max_position_embeddings=args.sequence, hidden_size=args.hidden,
            num_hidden_layers=args.layers, num_attention_heads=args.heads, scheme=scheme, grid=self.grid, seed=1,
        )  # fmt: skip
        handlers = [ZeRO(stage=3)] if name.startswith("zero3") else []
        GradientReducer(self.model.parameters(), handlers, MIB, int(args.bucket * MIB))
        if name == "zero3":
            WeightGatherer(self.model)
        self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-4)
        rng = np.random.default_rng(0)
        numbers = rng.integers(0, args.vocabulary, (2, args.batch * world.size, args.sequence))
        self.ids, self.targets = (pla.distribute(a, self.grid, self.model.ids_layout) for a in numbers)
        self.spans: TimedBook | None = None
        self.seconds: list[float] = []
        self.exposed: list[float] = []
        self.most: list[float] = []
        self.alone: list[float] = []

    def step(self) -> None:
        """A training step with its times noted."""
        with pla.trace(self.grid) as spans, spans.span("step"):
            with spans.span("forward"):
                loss, count = ops.cross_entropy_sum(self.model(self.ids), self.targets)
                loss = loss * (1 / count)
            with spans.span("backward"):
                loss.backward()
            with spans.span("update"):
                self.optimizer.step()
                self.optimizer.zero_grad()
        self.spans = spans

    def measure(self) -> None:
        self.step()
        assert self.spans is not None
        self.seconds.append(next(s.stop - s.start for s in self.spans.spans if s.name == "step"))
        waited = [float(t) for t in self.grid.world.share(self.spans.waited)]
        self.exposed.append(min(waited))
        self.most.append(max(waited))
        with pla.trace(self.grid) as again:
            replay(self.spans, self.grid)
        self.alone.append(again.waited)


def replay(spans: TimedBook, grid: pla.Grid) -> None:
    """Make a step's operations again, each awaited before the next."""

    def numbers(n: int) -> np.ndarray:
        return np.random.default_rng(n).random(n, np.float32)

    done = sorted((s for s in spans.spans if s.kind == "operation"), key=lambda s: s.start)
    for s in done:
        comm = grid.comm(s.axes)
        p = comm.size
        sizes = [int(n) for n in comm.share(s.nbytes)]
        n = max(1, max(sizes) // 4)
        if s.name == "all_reduce":
            comm.all_reduce(numbers(max(1, round(n / 2 / (1 - 1 / p)))), wait=False).wait()
            continue
        piece = max(1, round(n / (p - 1)))
        whole, own = numbers(piece * p), numbers(piece)
        if s.name == "all_gather":
            comm.all_gather(own, whole, [piece] * p, wait=False).wait()
        elif s.name == "reduce_scatter":
            comm.reduce_scatter(whole, own, [piece] * p, wait=False).wait()


def draw(cases: list[Case], everyone: dict[str, list[list[Any]]], path: str) -> None:
    """A step of each case on rank 0: what is computed, what is under way, where the rank waits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(len(cases), 1, figsize=(11, 2.4 * len(cases)), squeeze=False)
    colours = {"forward": "#4c78a8", "backward": "#72b7b2", "update": "#b0b0b0", "all_gather": "#54a24b",
               "reduce_scatter": "#f58518", "all_reduce": "#eeca3b", "wait": "#d62728"}  # fmt: skip
    for (panel,), case in zip(panels, cases, strict=True):
        lanes: list[float] = []
        for kind, name, _, start, stop, _ in sorted(everyone[case.name][0], key=lambda s: s[3]):
            if name == "step":
                continue
            if kind == "span":
                row, colour = 0, colours.get(name, "#999999")
            elif kind == "wait":
                row, colour = 1, colours["wait"]
            else:
                lane = next((i for i, end in enumerate(lanes) if end <= start), len(lanes))
                lanes[lane:] = [stop, *lanes[lane + 1 :]]
                row, colour = 2 + min(lane, 5), colours.get(name, "#999999")
            panel.broken_barh([(1e3 * start, 1e3 * (stop - start))], (-row - 0.4, 0.8), color=colour)
        rows = 2 + min(max(1, len(lanes)), 6)
        panel.set_yticks([0, -1, *(-r for r in range(2, rows))], ["computed", "waits", *["under way"] * (rows - 2)])
        share = 100 * (1 - median(case.exposed) / median(case.alone)) if median(case.alone) else 0
        panel.set_title(f"{case.name}: {share:.0f}% of the communication hidden", fontsize=9, loc="left")
        panel.set_xlabel("ms", fontsize=8)
        panel.tick_params(labelsize=8)
    shown = [n for n in colours if n != "wait"] + ["wait"]
    figure.legend(
        [plt.Rectangle((0, 0), 1, 1, color=colours[n]) for n in shown], shown, loc="lower center", ncol=7, fontsize=8
    )
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=130)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", choices=["data", "zero3", "zero3, no prefetch"], default=["data", "zero3"]
    )
    parser.add_argument("--batch", type=int, default=8, help="sequences a rank")
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--bucket", type=float, default=4, help="of gradients, MiB: the last one is hardly hidden")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--png", help="draw the last round's steps here")
    parser.add_argument("--chrome", help="write the last round's steps here, for chrome://tracing; {case} is its name")
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()
    world = open_comm()
    cases = [Case(name, world, args) for name in args.cases]
    for case in cases:
        for _ in range(3):
            case.step()
    for number in range(args.rounds):
        for case in cases:
            case.measure()
        if world.rank == 0:
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
    rows = []
    spans = {}
    for case in cases:
        assert case.spans is not None
        told = world.share([median(t) for t in (case.seconds, case.exposed, case.alone, case.most)])
        seconds, exposed, alone, most = (max(each) for each in zip(*told, strict=True))
        rows.append({
            "case": case.name, "seconds": seconds, "exposed": exposed, "alone": alone, "most": most,
            "hidden": 1 - exposed / alone if alone else None, "megabytes": case.spans.bytes.total() / 1e6,
        })  # fmt: skip
        spans[case.name] = world.share([list(s) for s in case.spans.spans])
        if args.chrome:
            case.spans.write(args.chrome.replace("{case}", case.name))
    if world.rank == 0:
        body = [
            (r["case"], f"{r['megabytes']:.1f}", f"{r['seconds']:.3f}", f"{r['alone']:.3f}",
             f"{r['exposed']:.3f}", f"{r['most']:.3f}", "–" if r["hidden"] is None else f"{100 * r['hidden']:.0f}%")
            for r in rows
        ]  # fmt: skip
        print(harness.table(("case", "MB a rank", "step s", "alone s", "exposed s", "most s", "hidden"), body))
        short = [r["case"] for r in rows if r["hidden"] is not None and not r["hidden"] >= GOAL]
        print(f"hidden by {GOAL:.0%} or more: " + (f"NO: {', '.join(short)}" if short else "yes"))
        if args.png:
            draw(cases, spans, args.png)
        if args.json:
            harness.write_json(args.json, {"ranks": world.size, "arguments": vars(args), "rows": rows})
    for case in cases:
        case.grid.close()
    world.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
