"""Array operations in float64: parlinalg on 1, 2 and 4 ranks against NumPy in one process, Heat and Dask, in one run.

The libraries take turns: every round runs each of them once, so that a change in the machine's speed meets all alike.
BLAS threads × ranks = cores; Dask has as many threads as there are ranks.  "of NumPy / cores" is a time over NumPy's
divided by the cores in use: 1 is perfect, and memory bandwidth that NumPy alone uses up cannot be divided.  Files are
written through to the disk by all (`fsync`), and read when no page of them is in memory; "disk" writes and reads as
many bytes one after the other.  Figures are medians over all rounds.  What cannot be had is left out, with the reason.

    python bench/arrays.py                        # about 5 minutes on 2 cores
    python bench/arrays.py --heat /opt/heat/bin/python --dask /opt/dask/bin/python
    python bench/arrays.py --operations sort mask --ranks 2
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from harness import BENCH, Unavailable

OPERATIONS = (
    "elementwise",
    "reduction",
    "sort",
    "running sum",
    "mask",
    "index array",
    "fft 3-d",
    "k-means step",
    "random",
)
FILES = tuple(f"{way} {suffix}" for suffix in (".npy", ".h5", ".zarr") for way in ("save", "load"))
RANKS = (1, 2, 4)


def piece(library: str, python: str, ranks: int, elements: int, repeats: int, folder: Path, names: list[str]) -> Any:
    """Run operations by one library; seconds of every repeat by operation."""
    program = [python, str(BENCH / "pieces" / "arrays.py"), library, str(elements), str(repeats), str(folder), *names]
    under = library in ("parlinalg", "heat") and not (library == "parlinalg" and ranks == 1)
    env = harness.environment(ranks if library != "dask" else 1, {"BENCH_WORKERS": str(ranks)})
    if library == "dask":
        env.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))
    return harness.run([*harness.mpiexec(python), "-n", str(ranks), *program] if under else program, env)


def available(library: str, python: str) -> str:
    """Why a library cannot be had, or an empty string."""
    module = {"numpy": "numpy", "parlinalg": "mpi4py", "heat": "heat", "dask": "dask.array"}[library]
    try:
        tried = subprocess.run(
            [python, "-c", f"import {module}"], capture_output=True, text=True, timeout=300, check=False
        )
    except OSError as error:
        return str(error)
    if tried.returncode:
        return f"{python} cannot import {module}: pip install {library}, and give its Python by --{library}"
    try:
        harness.mpiexec(python) if library in ("parlinalg", "heat") else None
    except Unavailable as reason:
        return str(reason)
    return ""


def disk(folder: Path, size: int) -> dict[str, float]:
    """Seconds that the disk takes to write and to read so many bytes one after the other."""
    path, block = folder / "disk", os.urandom(1 << 20)
    start = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(size >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    wrote = time.perf_counter() - start
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        while file.read(1 << 20):
            pass
    read = time.perf_counter() - start
    path.unlink()
    return {"save": wrote, "load": read}


def measure(args: argparse.Namespace, libraries: dict[str, str]) -> dict[str, Any]:
    """Seconds by operation, library and number of ranks, over all rounds."""
    seconds: dict[str, dict[tuple[str, int], list[float]]] = {name: {} for name in args.operations}
    with tempfile.TemporaryDirectory(dir=args.folder) as made:
        folder = Path(made)
        for turn in range(args.rounds):
            for library, python in libraries.items():
                for ranks in [1] if library == "numpy" else args.ranks:
                    told = piece(library, python, ranks, args.elements, args.repeats, folder, args.operations)
                    for name, values in told.items():
                        seconds[name].setdefault((library, ranks), []).extend(values)
            if any(name in FILES for name in args.operations):
                for way, value in disk(folder, 8 * args.elements).items():
                    for name in args.operations:
                        if name.startswith(way):
                            seconds[name].setdefault(("disk", 1), []).append(value)
            print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
    return {
        name: {f"{library} {ranks}": harness.spread(values) for (library, ranks), values in found.items()}
        for name, found in seconds.items()
    }


def show(result: dict[str, Any]) -> str:
    """A table: milliseconds, and the times over NumPy's divided by the cores in use."""
    columns = list(dict.fromkeys(key for found in result.values() for key in found))
    rows = []
    for name, found in result.items():
        base = found.get("numpy 1", (0, 0, 0))[1]
        row = [name]
        for column in columns:
            if column not in found:
                row.append("")
                continue
            library, _, ranks = column.rpartition(" ")
            middle = found[column][1]
            share = (
                f" ({middle * min(int(ranks), harness.cores()) / base:.2f})" if base and library == "parlinalg" else ""
            )
            row.append(f"{1e3 * middle:.1f}{share}")
        rows.append(row)
    return harness.table(["ms (of NumPy / cores)", *columns], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--operations", nargs="+", default=[*OPERATIONS, *FILES], choices=[*OPERATIONS, *FILES], metavar="NAME"
    )
    parser.add_argument("--elements", type=int, default=1 << 23, help="of the longest arrays (default 8 Mi, 64 MiB)")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3, help="in each round")
    parser.add_argument(
        "--folder", default=None, help="where files are written (default: the system's temporary folder)"
    )
    parser.add_argument("--heat", default=sys.executable, help="a Python that has heat")
    parser.add_argument("--dask", default=sys.executable, help="a Python that has dask")
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for idle cores")
    parser.add_argument("--crowded", action="store_true", help="measure on busy cores")
    parser.add_argument("--json", help="write the figures to this file")
    args = parser.parse_args()
    share = harness.busy_at_start(args.wait, args.crowded)
    if share is None:
        return 1
    pythons = {"numpy": sys.executable, "parlinalg": sys.executable, "heat": args.heat, "dask": args.dask}
    missing = {library: why for library, python in pythons.items() if (why := available(library, python))}
    for library, why in missing.items():
        print(f"without {library}: {why}", file=sys.stderr)
    result = measure(args, {library: python for library, python in pythons.items() if library not in missing})
    print(f"{args.elements} elements; others used {100 * share:.0f}% of the cores at the start; {harness.machine()}\n")
    print(show(result))
    if args.json:
        harness.write_json(args.json, {"machine": harness.machine(), "missing": missing, "seconds": result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
