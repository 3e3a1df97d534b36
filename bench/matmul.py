"""Products in float64: parlinalg on 1, 2, 4 and 8 ranks against one process's GEMM, ScaLAPACK and Heat, in one run.

A, B and C are cut evenly over all ranks; BLAS threads × ranks = cores.  The pieces take turns: every round runs each of
them once, so that a change in the machine's speed meets all alike.  A piece prepares its operands (random, never
zeros), multiplies once uncounted, then times its repeats from a barrier to the last rank's end.  Figures are medians
over all rounds.  What cannot be had is left out, with the reason.

    python bench/matmul.py                               # all shapes, all pieces; about 25 minutes on 2 cores
    python bench/matmul.py --shapes square2048 square4096 --pieces gemm parlinalg
    python bench/matmul.py --heat /opt/heat/bin/python   # a Python that has heat (pip install heat mpich)
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import harness
from harness import BENCH, Unavailable

SHAPES = {
    "square2048": (2048, 2048, 2048),
    "square4096": (4096, 4096, 4096),
    "tall": (16384, 1024, 1024),
    "wide": (1024, 16384, 1024),
    "large-k": (1024, 1024, 16384),
}
"""m, n, k of C[m, n] = A[m, k] B[k, n]."""

RANKS = (1, 2, 4, 8)
GOALS = {("square4096", 2): 95, ("square4096", 4): 92, ("square4096", 8): 88,
         ("square2048", 2): 90, ("square2048", 4): 87, ("square2048", 8): 82}  # fmt: skip
"""Per cent of one process's GEMM rate that parlinalg should reach."""

Runner = Callable[[tuple[int, int, int], int], Any]


class Pieces:
    """The pieces of the benchmark: `run(piece, shape, ranks, repeats)` returns what one reports."""

    def __init__(self, names: list[str], heat: str, block: int, build: Path, grids: dict[int, list[str]]) -> None:
        self.heat, self.block, self.build, self.grids = heat, block, build, grids
        self.missing: dict[str, str] = {}
        self.names = [name for name in names if self._there(name)]

    def _there(self, name: str) -> bool:
        try:
            if name == "scalapack":
                self.program = self._built()
            elif name == "heat":
                self._has_heat()
            elif name == "parlinalg":
                harness.mpiexec()
        except Unavailable as reason:
            self.missing[name] = str(reason)
            return False
        return True

    def _built(self) -> Path:
        """ScaLAPACK's program, compiled if it is not there yet."""
        compiler = shutil.which("mpicc.openmpi") or shutil.which("mpicc")
        if compiler is None or shutil.which("mpirun.openmpi") is None:
            raise Unavailable(
                "no mpicc.openmpi: apt-get install libscalapack-openmpi-dev libopenmpi-dev openmpi-bin gcc"
            )
        target = self.build / "pdgemm"
        command = [compiler, "-O2", "-o", str(target), str(BENCH / "pieces" / "pdgemm.c"), "-lscalapack-openmpi", "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise Unavailable(
                f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1:]}; "
                "apt-get install libscalapack-openmpi-dev libopenmpi-dev"
            )
        return target

    def _has_heat(self) -> None:
        if shutil.which(self.heat) is None:
            raise Unavailable(f"{self.heat} is no program; --heat takes a Python that has heat")
        tried = subprocess.run(
            [self.heat, "-c", "import heat, mpi4py"], capture_output=True, text=True, timeout=300, check=False
        )
        if tried.returncode:
            raise Unavailable(
                f"{self.heat} cannot import heat ({tried.stderr.strip().splitlines()[-1:]}): make an environment with "
                "pip install heat mpich, and give its Python by --heat"
            )
        harness.mpiexec(self.heat)

    def run(self, name: str, shape: tuple[int, int, int], ranks: int, repeats: int) -> Any:
        sizes = [*(str(n) for n in shape), str(repeats)]
        env = harness.environment(ranks)
        if name == "gemm":
            return harness.run([sys.executable, str(BENCH / "pieces" / "local.py"), *sizes], harness.environment(1))
        if name == "parlinalg":
            program = [sys.executable, str(BENCH / "pieces" / "product.py"), *sizes, *self.grids.get(ranks, [])]
            command = [*harness.mpiexec(), "-n", str(ranks), *program]
        elif name == "heat":
            command = [
                *harness.mpiexec(self.heat),
                "-n",
                str(ranks),
                self.heat,
                str(BENCH / "pieces" / "heat_product.py"),
                *sizes,
            ]
            env["PYTHONPATH"] = ""
        else:
            env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
            yielding = ["--mca", "mpi_yield_when_idle", "1"] if ranks > harness.cores() else []
            bind = ["--bind-to", "core" if ranks == harness.cores() else "none"]
            command = [
                "mpirun.openmpi",
                "--oversubscribe",
                *bind,
                *yielding,
                "-n",
                str(ranks),
                str(self.program),
                *sizes,
                str(self.block),
            ]
        return harness.run(command, env)

    def turns(self, ranks: list[int]) -> Iterator[tuple[str, int]]:
        """One round: the pieces of each number of ranks, each lot after one process's GEMM."""
        for p in ranks:
            for name in self.names:
                yield name, p


def measure(
    pieces: Pieces, shapes: dict[str, tuple[int, int, int]], ranks: list[int], rounds: int, repeats: int
) -> dict[str, Any]:
    """Seconds of every repeat by shape, piece and ranks, what the pieces told, and how busy others kept the cores."""
    result: dict[str, Any] = {}
    for title, shape in shapes.items():
        seconds: dict[tuple[str, int], list[float]] = {}
        told: dict[tuple[str, int], Any] = {}
        others = []
        for turn in range(rounds):
            for name, p in pieces.turns(ranks):
                others.append(harness.busy(0.2))
                said = pieces.run(name, shape, p, repeats)
                key = (name, 1) if name == "gemm" else (name, p)
                seconds.setdefault(key, []).extend(said.pop("seconds"))
                told[key] = said
            print(
                f"{title}: round {turn + 1} of {rounds}, others used {100 * max(others):.0f}% of the cores at most",
                file=sys.stderr,
            )
        result[title] = summary(title, shape, seconds, told, others)
        print(f"\n{show(result[title])}\n", flush=True)
    return result


def summary(
    title: str,
    shape: tuple[int, int, int],
    seconds: dict[tuple[str, int], list[float]],
    told: dict[tuple[str, int], Any],
    others: list[float],
) -> dict[str, Any]:
    flops = 2 * shape[0] * shape[1] * shape[2]
    base = harness.spread(seconds["gemm", 1])[1]
    rows = []
    for (name, p), values in seconds.items():
        low, middle, high = harness.spread(values)
        rows.append({
            "piece": name, "ranks": p, "median_s": middle, "quartiles_s": [low, high], "samples": len(values),
            "gflops": flops / middle / 1e9, "percent": 100 * base / middle,
            "goal": GOALS.get((title, p)) if name == "parlinalg" else None,
            "seconds": values, "told": told[name, p],
        })  # fmt: skip
    return {
        "title": title,
        "shape": shape,
        "rows": rows,
        "busy_before": {"median": harness.spread(others)[1], "most": max(others)},
    }


def show(result: dict[str, Any]) -> str:
    m, n, k = result["shape"]
    rows = [
        (
            r["piece"], r["ranks"], f"{1e3 * r['median_s']:.1f}",
            f"{1e3 * r['quartiles_s'][0]:.1f}–{1e3 * r['quartiles_s'][1]:.1f}",
            f"{r['gflops']:.1f}", f"{r['percent']:.1f}", r["goal"] or "", r["samples"],
        )
        for r in sorted(result["rows"], key=lambda r: (r["piece"] != "gemm", r["ranks"], r["piece"] != "parlinalg"))
    ]  # fmt: skip
    head = ("piece", "ranks", "median ms", "quartiles", "GFLOP/s", "% of gemm", "goal", "samples")
    crowd = result["busy_before"]
    title = f"{result['title']}: C[{m}, {n}] = A[{m}, {k}] B[{k}, {n}], float64"
    others = f"{100 * crowd['median']:.0f}% of the cores between pieces (median; most {100 * crowd['most']:.0f}%)"
    return f"{title}\n\n{harness.table(head, rows)}\n\nOthers used {others}."


def verdicts(results: dict[str, Any]) -> list[str]:
    """Return what falls short of the goals, or of ScaLAPACK in the same run."""
    short = []
    for title, result in results.items():
        rows = {(r["piece"], r["ranks"]): r for r in result["rows"]}
        for (name, p), row in rows.items():
            if name != "parlinalg":
                continue
            if row["goal"] and not row["percent"] >= row["goal"]:
                short.append(
                    f"{title} on {p} ranks: {row['percent']:.1f}% of one process's GEMM, the goal is {row['goal']}%"
                )
            other = rows.get(("scalapack", p))
            if other and not row["gflops"] >= other["gflops"]:
                short.append(f"{title} on {p} ranks: {row['gflops']:.1f} GFLOP/s, ScaLAPACK {other['gflops']:.1f}")
    return short


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help=f"of {', '.join(SHAPES)}, or MxNxK")
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS))
    parser.add_argument(
        "--pieces",
        nargs="+",
        default=["gemm", "parlinalg", "scalapack", "heat"],
        choices=["gemm", "parlinalg", "scalapack", "heat"],
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5, help="timed products a piece and round; rounds × repeats ≥ 7")
    parser.add_argument(
        "--grids", nargs="*", default=[], help="parlinalg's, where not the planned one: 8=4x2x1 (m, n, k)"
    )
    parser.add_argument("--block", type=int, default=128, help="ScaLAPACK's block size")
    parser.add_argument(
        "--heat", default=os.environ.get("BENCH_HEAT_PYTHON", sys.executable), help="a Python that has heat"
    )
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for idle cores")
    parser.add_argument("--crowded", action="store_true", help="measure even if the cores are not idle, and say so")
    parser.add_argument("--json", help="write the result here")
    return parser.parse_args()


def shape_of(text: str) -> tuple[int, int, int]:
    if text in SHAPES:
        return SHAPES[text]
    m, n, k = (int(part) for part in text.split("x"))
    return m, n, k


def main() -> int:
    args = arguments()
    harness.stop_cleanly()
    share = harness.busy_at_start(args.wait, args.crowded)
    if share is None:
        return 1
    grids = {int(p): factors.split("x") for p, _, factors in (text.partition("=") for text in args.grids)}
    with tempfile.TemporaryDirectory() as build:
        pieces = Pieces(["gemm", *(p for p in args.pieces if p != "gemm")], args.heat, args.block, Path(build), grids)
        for name, reason in pieces.missing.items():
            print(f"without {name}: {reason}", file=sys.stderr)
        results = measure(pieces, {s: shape_of(s) for s in args.shapes}, args.ranks, args.rounds, args.repeats)
    short = verdicts(results)
    print("\n".join(short) or "All goals are reached, and nothing is below ScaLAPACK.")
    if args.json:
        harness.write_json(
            args.json, {"busy_at_start": share, "missing": pieces.missing, "results": results, "short": short}
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
