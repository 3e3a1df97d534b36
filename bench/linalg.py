"""Solve, factor, decompose: parlinalg against ScaLAPACK, LAPACK in one process, Heat and Dask, in one run; on a GPU
against CuPy and PyTorch.

The libraries take turns: every round runs each of them once on every number of ranks.  BLAS threads × ranks = cores;
LAPACK has all cores, and Dask as many threads as ranks.  parlinalg starts from arrays at rest and ends with such,
ScaLAPACK's matrices lie block-cyclic from the start.  Give both the same BLAS kernels: OPENBLAS_CORETYPE=Haswell, where
Debian's library knows no newer.  With --memory a run more tells what a rank holds at the most in a run, over its blocks
of the arrays that go in and come out.

    OPENBLAS_CORETYPE=Haswell python bench/linalg.py                       # hours at 4096 by ScaLAPACK's svd
    OPENBLAS_CORETYPE=Haswell python bench/linalg.py --sizes 2048 --routines lu solve --ranks 1 2 --dtype float32
    python bench/linalg.py --pieces parlinalg --rounds 0 --memory --ranks 1 2 4
    python bench/linalg.py --sizes 11000 --routines cg --ranks 1 2         # an iteration, and reading the matrix once
    python bench/linalg.py --device cuda                                   # one GPU, float64 and float32: 2 minutes

On a GPU one rank of parlinalg has it, each library has a process a round, and CuPy and PyTorch have the same matrices
on the device.  What would take a library longer than --longest it does not run.

SciPy's `cg` is in the place of LAPACK's.  A GB/s of it is the bytes of the matrix by the time of an iteration.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import harness
from harness import BENCH, Unavailable

LIBRARIES = ("parlinalg", "scalapack", "heat", "dask")
SQUARE = {
    "cholesky": ("scalapack", "dask"),
    "lu": ("scalapack", "dask"),
    "solve": ("scalapack", "dask"),
    "triangular": ("scalapack", "heat", "dask"),
    "qr": ("scalapack", "heat"),
    "pivoted-qr": ("scalapack",),
    "eigh": ("scalapack", "heat"),
    "svd": ("scalapack", "heat"),
    "pinv": (),
    "cg": (),
}
"""The libraries that have a routine for square matrices, beside parlinalg and LAPACK."""
TALL = {
    "lu": ("scalapack",),
    "qr": ("scalapack", "heat", "dask"),
    "pivoted-qr": ("scalapack",),
    "lstsq": ("scalapack", "dask"),
    "svd": ("scalapack", "heat", "dask"),
}
"""Those that have it for tall ones; Heat's `lstsq` and `solve` take matrices that are not distributed."""
ROUTINES = tuple(dict.fromkeys((*SQUARE, *TALL)))
ON_GPU = ("parlinalg", "cupy", "torch")
NAMES = {"parlinalg": "parlinalg", "cupy": "CuPy", "torch": "PyTorch"}
OPERATIONS = {
    "cholesky": lambda m, n: n**3 / 3,
    "lu": lambda m, n: n * n * (m - n / 3),
    "solve": lambda m, n: 2 * n**3 / 3 + 32 * n * n,
    "triangular": lambda m, n: 16 * n * n,
    "qr": lambda m, n: 4 * n * n * (m - n / 3),
    "pivoted-qr": lambda m, n: 4 * n * n * (m - n / 3),
    "lstsq": lambda m, n: 2 * n * n * (m - n / 3),
}
"""Floating-point operations of the routines for which all count the same ones, by Householder's QR."""
REPEATS = {"eigh": 1, "svd": 1, "pinv": 1}
"""Timed repeats a round, where not 3."""


def built(build: Path, dtype: str) -> Path:
    """ScaLAPACK's program, compiled."""
    compiler = shutil.which("mpicc.openmpi") or shutil.which("mpicc")
    if compiler is None or shutil.which("mpirun.openmpi") is None:
        raise Unavailable("no mpicc.openmpi: apt-get install libscalapack-openmpi-dev libopenmpi-dev openmpi-bin gcc")
    target = build / "scalapack"
    source = str(BENCH / "pieces" / "scalapack.c")
    single = ["-DSINGLE"] if dtype == "float32" else []
    command = [compiler, "-O2", *single, "-o", str(target), source, "-lscalapack-openmpi", "-lm"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise Unavailable(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1:]}")
    return target


def can_import(python: str, module: str) -> None:
    """Raise Unavailable if a Python cannot import a module."""
    try:
        done = subprocess.run(
            [python, "-c", f"import {module}"], capture_output=True, text=True, timeout=300, check=False
        )
    except OSError as error:
        raise Unavailable(str(error)) from None
    if done.returncode:
        library = module.partition(".")[0]
        raise Unavailable(f"{python} cannot import {module}; give a Python that can by --{library}")


class Pieces:
    """The libraries that can be had, and how to run one routine by one of them."""

    def __init__(self, names: list[str], args: argparse.Namespace, build: Path) -> None:
        self.args = args
        self.missing: dict[str, str] = {}
        self.program = build
        for name in names:
            try:
                if name == "scalapack":
                    self.program = built(build, args.dtype)
                elif name in ("heat", "dask"):
                    can_import(self._python(name), {"heat": "heat", "dask": "dask.array"}[name])
            except Unavailable as reason:
                self.missing[name] = str(reason)
        self.names = [name for name in names if name not in self.missing]

    def _python(self, name: str) -> str:
        return {"heat": self.args.heat, "dask": self.args.dask}.get(name, sys.executable)

    def have(self, routine: str, shape: tuple[int, int]) -> list[str]:
        """The libraries that have a routine for matrices of a shape."""
        known = (SQUARE if shape[0] == shape[1] else TALL)[routine]
        found = [name for name in self.names if name == "parlinalg" or name in known]
        if routine == "svd" and min(shape) > self.args.longest_svd:
            found = [name for name in found if name != "scalapack"]
        return found

    def run(self, name: str, routine: str, shape: tuple[int, int], ranks: int, *more: str) -> Any:
        """Run a routine by one library."""
        repeats = str(REPEATS.get(routine, 3))
        sizes = [str(n) for n in shape]
        env = harness.environment(1 if name == "lapack" else ranks)
        if name == "scalapack":
            env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
            yielding = ["--mca", "mpi_yield_when_idle", "1"] if ranks > harness.cores() else []
            bind = ["--bind-to", "core" if ranks == harness.cores() else "none"]
            program = [str(self.program), routine, *sizes, repeats, str(self.args.block)]
            return harness.run(
                ["mpirun.openmpi", "--oversubscribe", *bind, *yielding, "-n", str(ranks), *program], env, timeout=3000
            )
        python = self._python(name)
        command = [python, str(BENCH / "pieces" / "linalg.py"), name, routine, *sizes, repeats, self.args.dtype, *more]
        if name in ("heat", "dask"):
            env["PYTHONPATH"] = ""
        if name == "dask":
            env.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"), BENCH_WORKERS=str(ranks))
        if name in ("parlinalg", "heat"):
            command = [*harness.mpiexec(python), "-n", str(ranks), *command]
        return harness.run(command, env, timeout=3000)


def measured(pieces: Pieces, routine: str, shape: tuple[int, int]) -> list[dict[str, Any]]:
    """One routine at one size by all libraries on all numbers of ranks, in turns."""
    args = pieces.args
    told: dict[tuple[str, int], dict[str, list[float]]] = {}
    turns = [("lapack", 1), *((name, p) for p in args.ranks for name in pieces.have(routine, shape))]
    rounds: list[list[str]] = [[]] * args.rounds + [["memory"]] * args.memory
    for more in rounds:
        for name, p in turns:
            if more and name not in ("parlinalg", "heat"):
                continue
            try:
                found = pieces.run(name, routine, shape, p, *more)
            except RuntimeError as error:
                if name in ("parlinalg", "lapack"):
                    raise
                print(f"{name} on {p}: {' '.join(str(error).split())[-300:]}", file=sys.stderr)
                continue
            for key in ("seconds", "memory", "gemv", "read"):
                if key in found:
                    values = found[key] if isinstance(found[key], list) else [found[key]]
                    told.setdefault((name, p), {}).setdefault(key, []).extend(values)
    rows = []
    for (name, p), found in told.items():
        low, middle, high = harness.spread(found.get("seconds", [math.nan]))
        rows.append({"routine": routine, "shape": shape, "piece": name, "ranks": p, "median_s": middle,
                     "quartiles_s": [low, high], "seconds": found.get("seconds", []),
                     "memory": max(found.get("memory", [math.nan])),
                     "limits": {w: harness.spread(found[w])[1] for w in ("gemv", "read") if w in found}})  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """A line a library and number of ranks: time, and its ratio to LAPACK's and to ScaLAPACK's; of `cg` to reading."""
    by = {(r["piece"], r["ranks"]): r for r in rows}
    base, lines = by["lapack", 1]["median_s"] if ("lapack", 1) in by else math.nan, []
    for (name, p), row in by.items():
        other = by.get(("scalapack", p)) if name == "parlinalg" else None
        lines.append([
            name, p, f"{1e3 * row['median_s']:.1f}",
            f"{1e3 * row['quartiles_s'][0]:.1f}–{1e3 * row['quartiles_s'][1]:.1f}",
            f"{100 * base / row['median_s']:.0f}%",
            f"{other['median_s'] / row['median_s']:.2f}" if other else "",
        ])  # fmt: skip
    head = ["library", "ranks", "median ms", "quartiles", "of LAPACK's speed", "× ScaLAPACK's speed"]
    if args.memory:
        head.append("memory / blocks")
        for line, row in zip(lines, rows, strict=True):
            line.append("" if math.isnan(row["memory"]) else f"{row['memory']:.2f}")
    m, n = rows[0]["shape"]
    if rows[0]["routine"] == "cg":
        size = m * n * (8 if args.dtype == "float64" else 4) / 1e9
        head += ["GB/s", "of products with a vector", "of reading"]
        for line, row in zip(lines, rows, strict=True):
            line.append(f"{size / row['median_s']:.1f}")
            line += [f"{100 * row['limits'][way] / row['median_s']:.0f}%" for way in ("gemv", "read")]
    return f"{rows[0]['routine']} {m} × {n}, {args.dtype}\n\n{harness.table(head, lines)}\n"


def on_gpu(args: argparse.Namespace, sizes: list[tuple[int, int]]) -> dict[str, Any]:
    """All routines at all sizes on one GPU, in both precisions if none is given; tables are printed."""
    missing, told = {}, {}
    jobs = [
        (routine, m, n, dtype)
        for m, n in sorted(sizes, key=lambda s: s[0] * s[1] * s[1])
        for routine in args.routines
        for dtype in ([args.dtype] if args.dtype else ["float64", "float32"])
        if routine in (SQUARE if m == n else TALL)
        and routine not in ("cg", "pivoted-qr", "pinv")
        and not (routine == "svd" and n > 4096)
    ]
    for _ in range(args.rounds):
        for name in [name for name in args.pieces if name not in missing]:
            limits = [str(args.seconds), str(args.longest), "5", "-"]
            command = [sys.executable, str(BENCH / "pieces" / "linalg.py"), name, "gpu", *limits, json.dumps(jobs)]
            try:
                found = harness.run(command, harness.environment(1, {"PARLINALG_MPI": "0"}), timeout=3000)
            except RuntimeError as error:
                if name == "parlinalg":
                    raise
                missing[name] = " ".join(str(error).split())[-300:]
                print(f"without {name}: {missing[name]}", file=sys.stderr)
                continue
            for job, seconds in zip(jobs, found, strict=True):
                told.setdefault(job, {}).setdefault(name, []).extend(seconds)
    rows, names = [], [name for name in args.pieces if name not in missing]
    for dtype in dict.fromkeys(job[3] for job in jobs):
        lines = []
        for routine, m, n, _ in (job for job in jobs if job[3] == dtype):
            seconds = told[routine, m, n, dtype]
            middle = {name: harness.spread(seconds[name])[1] if seconds.get(name) else math.nan for name in names}
            rows.append({"routine": routine, "shape": (m, n), "dtype": dtype, "seconds": seconds, "median_s": middle})
            own, count = middle.get("parlinalg", math.nan), OPERATIONS.get(routine)
            cells = [f"{1e3 * middle[name]:.2f}" for name in names]
            cells += [f"{count(m, n) / own / 1e9:.0f}" if count else ""]
            cells += [f"{middle[name] / own:.2f}" for name in names if name != "parlinalg"]
            lines.append([routine, f"{m} × {n}", *(cell if cell != "nan" else "" for cell in cells)])
        head = ["routine", "shape", *(f"{NAMES[name]} ms" for name in names), "GFLOP/s"]
        head += [f"× {NAMES[name]}'s speed" for name in names if name != "parlinalg"]
        print(f"one GPU, {dtype}\n\n{harness.table(head, lines)}\n", flush=True)
    return {"missing": missing, "results": rows}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routines", nargs="+", default=list(ROUTINES), choices=ROUTINES)
    parser.add_argument(
        "--sizes", nargs="+", help="n, or mxn for a tall one; by default 2048 4096 65536x256, on a GPU 8192"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4, 8])
    parser.add_argument("--pieces", nargs="+", choices=dict.fromkeys((*LIBRARIES, *ON_GPU)))
    parser.add_argument("--rounds", type=int, help="by default 3, on a GPU 1")
    parser.add_argument("--dtype", choices=["float64", "float32"], help="by default float64, on a GPU both")
    parser.add_argument("--seconds", type=int, default=40, help="after which a library begins nothing more on a GPU")
    parser.add_argument("--longest", type=int, default=8, help="the most seconds of a run on a GPU")
    parser.add_argument("--block", type=int, default=64, help="ScaLAPACK's block size")
    parser.add_argument("--longest-svd", type=int, default=2048, help="the largest n of ScaLAPACK's svd: it takes long")
    for name in ("heat", "dask"):
        python = os.environ.get(f"BENCH_{name.upper()}_PYTHON", sys.executable)
        parser.add_argument(f"--{name}", default=python, help=f"a Python with {name}")
    parser.add_argument("--memory", action="store_true", help="tell what ranks of parlinalg and Heat hold at the most")
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for idle cores")
    parser.add_argument("--crowded", action="store_true", help="measure even if the cores are not idle, and say so")
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()
    gpu = args.device == "cuda"
    args.sizes = args.sizes or ["2048", "4096", *(["8192"] if gpu else []), "65536x256"]
    args.pieces = args.pieces or list(ON_GPU if gpu else LIBRARIES)
    args.rounds = args.rounds if args.rounds is not None else 1 if gpu else 3
    args.dtype = args.dtype or (None if gpu else "float64")
    return args


def main() -> int:
    args = arguments()
    harness.stop_cleanly()
    share = harness.busy_at_start(args.wait, args.crowded)
    if share is None:
        return 1
    sizes = [tuple(int(x) for x in (size if "x" in size else f"{size}x{size}").split("x")) for size in args.sizes]
    if args.device == "cuda":
        found = on_gpu(args, sizes)
        print(f"others used {100 * share:.0f}% of the cores at the start; {harness.machine()}")
        if args.json:
            harness.write_json(args.json, {"busy_at_start": share, **found})
        return 0
    results = []
    with tempfile.TemporaryDirectory() as build:
        pieces = Pieces(args.pieces, args, Path(build))
        for name, reason in pieces.missing.items():
            print(f"without {name}: {reason}", file=sys.stderr)
        for m, n in sizes:
            for routine in args.routines:
                if routine in (SQUARE if m == n else TALL):
                    results.append(measured(pieces, routine, (m, n)))
                    print(show(results[-1], args), flush=True)
    print(f"{args.dtype}; others used {100 * share:.0f}% of the cores at the start; {harness.machine()}")
    if args.json:
        harness.write_json(args.json, {"busy_at_start": share, "missing": pieces.missing, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
