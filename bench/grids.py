"""Cholesky, LU and QR on every grid of the ranks: time, words counted, and the time that these take on the links.

    python bench/cluster/hosts.py run --hosts 8 --rate 200mbit -- python bench/grids.py --rate 200

The grids take turns: every round runs each once, from a barrier to the last rank's end and from arrays at rest to
arrays at rest; figures are medians.  Words are those of the rank that receives most, by the ledger; "plan" is yes where
`linalg.costs` says the same for every rank.  The floor is the time in which a link of `--rate` Mbit/s carries them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from math import prod
from time import perf_counter
from typing import Any

import harness

import parlinalg as pla
from parlinalg.comm import Comm, open_comm
from parlinalg.linalg import costs
from parlinalg.linalg.costs import Costs
from parlinalg.linalg.planner import dealt

MARGIN = 1.15
"""Words that differ by more than this ratio should order the times."""
Operation = Callable[[], Any]


def grids(ranks: int) -> list[tuple[int, ...]]:
    """Return the sizes of two axes that make up so many ranks, and those of three longer than 1."""
    two = [(r, ranks // r) for r in range(1, ranks + 1) if not ranks % r]
    return two + [s for s in product(range(2, ranks), repeat=3) if prod(s) == ranks]


class Case:
    """One routine on one grid."""

    def __init__(self, routine: str, grid: pla.Grid, n: int, dtype: str) -> None:
        self.routine, self.grid, self.n = routine, grid, n
        rng = pla.random.default_rng(0)
        a = rng.uniform(-1, 1, size=(n, n), grid=grid).astype(dtype)
        self.a = a + 2 * n * pla.eye(n, dtype=a.dtype, grid=grid) if routine == "cholesky" else a
        self.seconds: list[float] = []

    def run(self) -> Any:
        linalg, one = pla.linalg, {} if self.routine == "qr" else {"depth": 1}  # one layer of ranks, on every grid
        return {"cholesky": linalg.cholesky, "lu": linalg.lu_factor, "qr": linalg.qr}[self.routine](self.a, **one)

    def counted(self) -> dict[str, Any]:
        """Run once, and return this rank's words, calls, and whether the plan has the same."""
        with pla.ledger(self.grid) as book:
            factor = self.run()
        deal = dealt(self.routine, self.n, self.n, self.grid.sizes, None, False)
        plan, a = Costs(deal, self.a.dtype.itemsize), self.a
        if self.routine == "cholesky":
            costs.cholesky(plan, a.layout, self.n)
        elif self.routine == "lu":
            winners = costs.winners_of(factor.positions, deal, self.n)
            costs.lu_factor(plan, a.layout, a.shape, winners=winners)
        else:
            costs.qr(plan, a.layout, a.shape)
        words, calls = book.words.total(), book.calls.total()
        rank = self.grid.everyone.rank
        return {"words": words, "calls": calls, "agree": (words, calls) == (plan.words[rank], plan.calls[rank]),
                "work": f"{deal.R}×{deal.C}", "tile": deal.size}  # fmt: skip


def timed(case: Case, world: Comm) -> None:
    world.barrier()
    start = perf_counter()
    found = case.run()
    world.barrier()
    case.seconds.append(max(world.share(perf_counter() - start)))
    del found


def row(case: Case, said: dict[str, Any], world: Comm, rate: float | None) -> dict[str, Any]:
    """The figures of a case, from all ranks' counts."""
    everyone = world.share(said)
    low, median, high = harness.spread(case.seconds)
    words = max(s["words"] for s in everyone)
    return {
        "routine": case.routine, "grid": "×".join(map(str, case.grid.sizes.values())), "work": said["work"],
        "tile": said["tile"], "words": words, "calls": max(s["calls"] for s in everyone),
        "floor": words * case.a.dtype.itemsize * 8 / (rate * 1e6) if rate else None, "seconds": median,
        "quartiles": [low, high], "samples": case.seconds, "agree": all(s["agree"] for s in everyone),
    }  # fmt: skip


def disordered(rows: list[dict[str, Any]]) -> list[str]:
    """Grids whose words differ by more than `MARGIN`, and whose times are ordered the other way."""
    return [
        f"{a['routine']}: {a['grid']} ({a['words']:,} words, {a['seconds']:.2f} s) and {b['grid']} "
        f"({b['words']:,} words, {b['seconds']:.2f} s)"
        for a in rows
        for b in rows
        if a["routine"] == b["routine"] and a["words"] * MARGIN < b["words"] and a["seconds"] > b["seconds"]
    ]


def show(rows: list[dict[str, Any]]) -> str:
    head = ["routine", "grid", "at work", "tile", "words", "calls", "floor s", "s", "quartiles", "plan"]
    return harness.table(head, [
        (
            r["routine"], r["grid"], r["work"], r["tile"], f"{r['words']:,}", r["calls"],
            "" if r["floor"] is None else f"{r['floor']:.3f}", f"{r['seconds']:.3f}",
            f"{r['quartiles'][0]:.3f}–{r['quartiles'][1]:.3f}", "yes" if r["agree"] else "NO",
        )
        for r in sorted(rows, key=lambda r: (r["routine"], r["seconds"]))
    ])  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routines", nargs="+", default=["cholesky", "lu", "qr"], choices=["cholesky", "lu", "qr"])
    parser.add_argument("--size", type=int, default=1536, help="rows and columns of the matrix")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", type=float, help="of a link between hosts, Mbit/s: gives the floor of the time")
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()
    world = open_comm()
    every = [pla.Grid(dict(zip("abc", sizes)), world, "numpy") for sizes in grids(world.size)]
    cases = [Case(routine, grid, args.size, args.dtype) for routine in args.routines for grid in every]
    said = [case.counted() for case in cases]
    for _ in range(args.rounds):
        for case in cases:
            timed(case, world)
    rows = [row(case, counts, world, args.rate) for case, counts in zip(cases, said, strict=True)]
    wrong = disordered(rows)
    if world.rank == 0:
        link = f", links of {args.rate:g} Mbit/s" if args.rate else ""
        print(f"matrix of {args.size} × {args.size}, {args.dtype}, {world.size} ranks{link}\n\n{show(rows)}\n")
        print(f"words that differ by more than {MARGIN - 1:.0%} order the times: {'NO' if wrong else 'yes'}")
        print("\n".join(wrong))
        if args.json:
            harness.write_json(args.json, {"ranks": world.size, "arguments": vars(args), "rows": rows})
    for grid in every:
        grid.close()
    world.free()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
