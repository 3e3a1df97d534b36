"""A step of Muon by each execution, and by the simplest one: every rank gathers all matrices and iterates on all.

    python bench/cluster/hosts.py run --hosts 8 --rate 200mbit -- python bench/muon.py --rate 200

A step is that of the optimizer alone, from a barrier to the last rank's end, after a backward pass of a small batch.
The executions take turns: every round makes a step of each; figures are medians.  Words are those of the rank that
receives most in a step, counted (with ZeRO, which gathers what was updated, that too), and the floor is the time in
which a link of `--rate` Mbit/s carries them.  All executions must make the same step, to rounding.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cached_property
from time import perf_counter
from typing import Any

import harness
import numpy as np

import parlinalg as pla
from parlinalg import nn, optim
from parlinalg.autograd import ops
from parlinalg.comm import Comm, open_comm
from parlinalg.optim.flat import Entry
from parlinalg.optim.matrices import Exchange, Slots, at_home
from parlinalg.optim.newton_schulz import AtHome, Team, executions
from parlinalg.parallel import GradientReducer, ZeRO
from parlinalg.schemes import discover

CASES: dict[int, dict[str, tuple[str, tuple[int, ...], int]]] = {
    2: {"1d": ("1d", (2,), 0), "data, ZeRO 1": ("data", (2,), 1)},
    4: {"1d": ("1d", (4,), 0), "2d 2×2": ("2d", (2, 2), 0), "data, ZeRO 1": ("data", (4,), 1)},
    8: {
        "1d": ("1d", (8,), 0), "2d 4×2": ("2d", (4, 2), 0), "3d 2×2×2": ("3d", (2, 2, 2), 0),
        "data, ZeRO 1": ("data", (8,), 1), "data": ("data", (8,), 0),
    },
}  # fmt: skip
"""For a number of ranks: the cases, each a scheme, the sizes of its axes, and ZeRO's stage."""


class Everywhere(AtHome):
    """Every rank has all matrices at work."""

    NAME = "gather"

    def at_work(self) -> list[Slots]:
        return at_home(self.team.matrices, [0] * len(self.team.matrices), 1) * self.grid.size

    @cached_property
    def back(self) -> Exchange:
        axes = self.team.grid.axes
        return Exchange(self.grid, self.slots, self.team.rest, [axes] * len(self.team.entries), moves=False)


class GatheringMuon(optim.Muon):
    """Muon of which every rank gathers all matrices."""

    def directions(self, entries: Sequence[Entry], buffer: Any) -> None:
        grid = entries[0].data.grid
        place = id(grid), entries[0].dtype.str
        if self.changed(entries, grid):
            self.executions[place] = Everywhere(Team(entries, grid, [self._iteration(e) for e in entries]))
        self.executions[place].run(buffer)


class Case:
    """A model in training by one execution of Muon."""

    def __init__(self, name: str, execution: str, world: Comm, args: argparse.Namespace) -> None:
        scheme_name, sizes, stage = CASES[world.size][name]
        scheme = discover()[scheme_name].SCHEME
        self.name, self.execution, self.seconds = name, execution, list[float]()
        self.grid = pla.Grid(dict(zip(scheme.axes, sizes, strict=True)), world, "numpy")
        self.model = nn.GPT(
            vocab_size=args.vocabulary, max_position_embeddings=args.sequence, hidden_size=args.hidden,
            num_hidden_layers=args.layers, num_attention_heads=args.heads, scheme=scheme, grid=self.grid,
            dtype=args.dtype, seed=1,
        )  # fmt: skip
        parameters = list(self.model.parameters())
        self.reducer = GradientReducer(parameters, [ZeRO(stage)] if stage else [])
        if execution == "gather":
            self.optimizer: optim.Muon = GatheringMuon(parameters)
        else:
            self.optimizer = optim.Muon(parameters, execution=None if execution == "chosen" else execution)
        numbers = np.random.default_rng(0).integers(0, args.vocabulary, (2, args.batch, args.sequence))
        self.ids, self.targets = (pla.distribute(a, self.grid, self.model.ids_layout) for a in numbers)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        ops.cross_entropy(self.model(self.ids), self.targets).backward()

    def step(self, world: Comm) -> float:
        """Make a step; return its time, from a barrier to the last rank's end."""
        self.backward()
        world.barrier()
        start = perf_counter()
        self.optimizer.step()
        world.barrier()
        return max(world.share(perf_counter() - start))

    def counted(self, world: Comm) -> int:
        """Make a step, and return the words of the rank that receives most."""
        self.backward()
        with pla.ledger(self.grid) as book:
            self.optimizer.step()
        return max(world.share(book.words.total()))

    def weights(self) -> list[np.ndarray]:
        """This rank's blocks."""
        return [p.block.copy() for p in self.model.parameters()]


def measured(name: str, world: Comm, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One scheme by all executions, in turns."""
    cases = [Case(name, execution, world, args) for execution in args.executions]
    words = [case.counted(world) for case in cases]
    first = cases[0].weights()
    mine = [max(float(np.abs(a - b).max()) for a, b in zip(first, case.weights(), strict=True)) for case in cases]
    apart = np.max(world.share(mine), axis=0).tolist()
    for _ in range(args.rounds):
        for case in cases:
            case.seconds.append(case.step(world))
    rows = []
    for case, received, off in zip(cases, words, apart, strict=True):
        low, median, high = harness.spread(case.seconds)
        used = {e.NAME for e in case.optimizer.executions.values()}
        rows.append({
            "scheme": name, "execution": case.execution, "used": "/".join(sorted(used)), "words": received,
            "floor": received * np.dtype(args.dtype).itemsize * 8 / (args.rate * 1e6) if args.rate else None,
            "seconds": median, "quartiles": [low, high], "samples": case.seconds, "apart": off,
        })  # fmt: skip
        case.grid.close()
    return rows


def show(rows: list[dict[str, Any]]) -> str:
    base = {r["scheme"]: r["seconds"] for r in rows if r["execution"] == "gather"}
    head = ["scheme", "execution", "words", "floor s", "step s", "quartiles", "× gather's speed"]
    return harness.table(head, [
        (
            r["scheme"], r["execution"] + (f" ({r['used']})" if r["execution"] == "chosen" else ""),
            f"{r['words']:,}", "" if r["floor"] is None else f"{r['floor']:.3f}", f"{r['seconds']:.3f}",
            f"{r['quartiles'][0]:.3f}–{r['quartiles'][1]:.3f}",
            f"{base[r['scheme']] / r['seconds']:.2f}" if r["scheme"] in base else "",
        )
        for r in rows
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schemes", nargs="+", help="only these cases")
    every = ["gather", "chosen", *executions()]
    parser.add_argument("--executions", nargs="+", default=every, choices=every)
    parser.add_argument("--rate", type=float, help="of a link between hosts, Mbit/s: gives the floor of a step's time")
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()
    world = open_comm()
    if world.size not in CASES:
        parser.error(f"start it on {', '.join(map(str, CASES))} ranks, not on {world.size}")
    rows = [row for name in args.schemes or CASES[world.size] for row in measured(name, world, args)]
    if world.rank == 0:
        link = f", links of {args.rate:g} Mbit/s" if args.rate else ""
        print(
            f"A step of Muon for a GPT, hidden {args.hidden}, {args.layers} layers, {args.dtype}, {world.size} ranks"
            f"{link}\n\n{show(rows)}\n\nthe updates of all executions differ by {max(r['apart'] for r in rows):.1e} "
            "at most"
        )
        if args.json:
            harness.write_json(args.json, {"ranks": world.size, "arguments": vars(args), "rows": rows})
    world.free()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
