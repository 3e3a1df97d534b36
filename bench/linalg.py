"""Solve, factor, decompose in float64: parlinalg against ScaLAPACK, LAPACK in one process and Heat, in one run.

The libraries take turns: every round runs each of them once on every number of ranks.  BLAS threads × ranks = cores;
LAPACK has all cores.  parlinalg starts from arrays at rest and ends with such, ScaLAPACK's matrices lie block-cyclic
from the start.  Give both the same BLAS kernels: OPENBLAS_CORETYPE=Haswell, where Debian's library knows no newer.

    OPENBLAS_CORETYPE=Haswell python bench/linalg.py                       # hours at 4096 by ScaLAPACK's svd
    OPENBLAS_CORETYPE=Haswell python bench/linalg.py --sizes 2048 --routines lu solve --ranks 1 2
    python bench/linalg.py --sizes 11000 --routines cg --ranks 1 2         # an iteration, and reading the matrix once

SciPy's `cg` is in the place of LAPACK's.  A GB/s of it is the bytes of the matrix by the time of an iteration.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
from harness import BENCH, Unavailable

ROUTINES = ("cholesky", "lu", "solve", "qr", "lstsq", "eigh", "svd", "cg")
SQUARE = ("cholesky", "lu", "solve", "eigh", "cg")
LIBRARIES = ("parlinalg", "scalapack", "heat")
REPEATS = {"eigh": 1, "svd": 1}
"""Timed repeats a round, where not 3."""


def built(build: Path) -> Path:
    """ScaLAPACK's program, compiled."""
    compiler = shutil.which("mpicc.openmpi") or shutil.which("mpicc")
    if compiler is None or shutil.which("mpirun.openmpi") is None:
        raise Unavailable("no mpicc.openmpi: apt-get install libscalapack-openmpi-dev libopenmpi-dev openmpi-bin gcc")
    target = build / "scalapack"
    source = str(BENCH / "pieces" / "scalapack.c")
    command = [compiler, "-O2", "-o", str(target), source, "-lscalapack-openmpi", "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1:]}")
    return target


class Pieces:
    """The libraries that can be had, and how to run one routine by one of them."""

    def __init__(self, names: list[str], args: argparse.Namespace, build: Path) -> None:
        self.args = args
        self.missing: dict[str, str] = {}
        self.program = build
        for name in names:
            try:
                if name == "scalapack":
                    self.program = built(build)
                elif name == "heat":
                    self._has_heat()
            except Unavailable as reason:
                self.missing[name] = str(reason)
        self.names = [name for name in names if name not in self.missing]

    def _has_heat(self) -> None:
        try:
            done = subprocess.run(
                [self.args.heat, "-c", "import heat"], capture_output=True, text=True, timeout=300, check=False
            )
        except OSError as error:
            raise Unavailable(str(error)) from None
        if done.returncode:
            raise Unavailable(f"{self.args.heat} cannot import heat; give a Python that can by --heat")

    def run(self, name: str, routine: str, shape: tuple[int, int], ranks: int) -> Any:
        """Run a routine by one library."""
        repeats = str(REPEATS.get(routine, 3))
        sizes = [str(n) for n in shape]
        env = harness.environment(ranks)
        piece = [str(BENCH / "pieces" / "linalg.py"), name, routine, *sizes, repeats, self.args.dtype]
        if name == "lapack":
            return harness.run([sys.executable, *piece], harness.environment(1))
        if name == "scalapack":
            env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
            yielding = ["--mca", "mpi_yield_when_idle", "1"] if ranks > harness.cores() else []
            bind = ["--bind-to", "core" if ranks == harness.cores() else "none"]
            program = [str(self.program), routine, *sizes, repeats, str(self.args.block)]
            return harness.run(
                ["mpirun.openmpi", "--oversubscribe", *bind, *yielding, "-n", str(ranks), *program], env, timeout=3000
            )
        python = self.args.heat if name == "heat" else sys.executable
        if name == "heat":
            env["PYTHONPATH"] = ""
        return harness.run([*harness.mpiexec(python), "-n", str(ranks), python, *piece], env, timeout=3000)


def measured(pieces: Pieces, routine: str, shape: tuple[int, int]) -> list[dict[str, Any]]:
    """One routine at one size by all libraries on all numbers of ranks, in turns."""
    args = pieces.args
    seconds: dict[tuple[str, int], list[float]] = {}
    memory: dict[tuple[str, int], int] = {}
    limits: dict[tuple[str, int], dict[str, list[float]]] = {}
    turns = [("lapack", 1), *((name, p) for p in args.ranks for name in pieces.names)]
    for _ in range(args.rounds):
        for name, p in turns:
            slow = name == "scalapack" and routine == "svd" and min(shape) > args.longest_svd
            if slow or (routine == "cg" and name in ("scalapack", "heat")):
                continue
            if name == "heat" and (shape[0] <= 4 * shape[1] or routine not in ("qr", "svd")):
                continue
            said = pieces.run(name, routine, shape, p)
            seconds.setdefault((name, p), []).extend(said["seconds"])
            memory[name, p] = max(memory.get((name, p), 0), said.get("memory", 0))
            for way in ("gemv", "read"):
                if way in said:
                    limits.setdefault((name, p), {}).setdefault(way, []).extend(said[way])
    rows = []
    for (name, p), values in seconds.items():
        low, middle, high = harness.spread(values)
        rows.append({"routine": routine, "shape": shape, "piece": name, "ranks": p, "median_s": middle,
                     "quartiles_s": [low, high], "seconds": values, "memory": memory[name, p],
                     "limits": {w: harness.spread(v)[1] for w, v in limits.get((name, p), {}).items()}})  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """A line a library and number of ranks: time, and its ratio to LAPACK's and to ScaLAPACK's; of `cg` to reading."""
    by = {(r["piece"], r["ranks"]): r for r in rows}
    base, lines = by["lapack", 1]["median_s"], []
    for (name, p), row in by.items():
        other = by.get(("scalapack", p)) if name == "parlinalg" else None
        lines.append([
            name, p, f"{1e3 * row['median_s']:.1f}",
            f"{1e3 * row['quartiles_s'][0]:.1f}–{1e3 * row['quartiles_s'][1]:.1f}",
            f"{100 * base / row['median_s']:.0f}%", f"{other['median_s'] / row['median_s']:.2f}" if other else "",
        ])  # fmt: skip
    head = ["library", "ranks", "median ms", "quartiles", "of LAPACK's speed", "× ScaLAPACK's speed"]
    m, n = rows[0]["shape"]
    if rows[0]["routine"] == "cg":
        size = m * n * (8 if args.dtype == "float64" else 4) / 1e9
        head += ["GB/s", "of products with a vector", "of reading"]
        for line, row in zip(lines, rows, strict=True):
            line.append(f"{size / row['median_s']:.1f}")
            line += [f"{100 * row['limits'][way] / row['median_s']:.0f}%" for way in ("gemv", "read")]
    return f"{rows[0]['routine']} {m} × {n}, {args.dtype}\n\n{harness.table(head, lines)}\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routines", nargs="+", default=list(ROUTINES), choices=ROUTINES)
    parser.add_argument("--sizes", nargs="+", default=["2048", "4096", "65536x256"], help="n, or mxn for a tall one")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--pieces", nargs="+", default=list(LIBRARIES), choices=LIBRARIES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float64", choices=["float64", "float32"], help="ScaLAPACK's is float64")
    parser.add_argument("--block", type=int, default=64, help="ScaLAPACK's block size")
    parser.add_argument("--longest-svd", type=int, default=2048, help="the largest n of ScaLAPACK's svd: it takes long")
    parser.add_argument(
        "--heat", default=os.environ.get("BENCH_HEAT_PYTHON", sys.executable), help="a Python with heat"
    )
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for idle cores")
    parser.add_argument("--crowded", action="store_true", help="measure even if the cores are not idle, and say so")
    parser.add_argument("--json", help="write the result here")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    harness.stop_cleanly()
    share = harness.busy_at_start(args.wait, args.crowded)
    if share is None:
        return 1
    results = []
    with tempfile.TemporaryDirectory() as build:
        wanted = [name for name in args.pieces if name != "scalapack" or args.dtype == "float64"]
        pieces = Pieces(wanted, args, Path(build))
        for name, reason in pieces.missing.items():
            print(f"without {name}: {reason}", file=sys.stderr)
        for size in args.sizes:
            m, n = (int(x) for x in (size if "x" in size else f"{size}x{size}").split("x"))
            for routine in args.routines:
                if (m == n and routine != "lstsq") or (m != n and routine not in SQUARE and routine != "lu"):
                    results.append(measured(pieces, routine, (m, n)))
                    print(show(results[-1], args), flush=True)
    print(f"{args.dtype}; others used {100 * share:.0f}% of the cores at the start; {harness.machine()}")
    if args.json:
        harness.write_json(args.json, {"busy_at_start": share, "missing": pieces.missing, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
