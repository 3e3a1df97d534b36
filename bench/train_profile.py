"""Where the time of a training step goes: the share of every function, with the array operations it calls itself.

OMP_NUM_THREADS=1 python bench/train_profile.py                       # one core, the GPT of bench/train.py
OMP_NUM_THREADS=1 mpiexec -n 2 python bench/train_profile.py --mode 1d    # rank 0's
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
from pathlib import Path
from time import process_time

import harness

sys.path.insert(0, str(harness.BENCH / "pieces"))
from gpt import Sizes
from gpt_parlinalg import prepared


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="512x4x8x256x8x2048", help="d, layers, heads, sequence, batch, vocabulary")
    parser.add_argument("--mode", default="serial", help="serial, data, 1d, 2d, …")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--least", type=float, default=0.5, help="per cent of a step from which a function is shown")
    args = parser.parse_args()
    mesh, step = prepared(args.mode, Sizes.parse(args.model), "numpy", "float32")
    for i in range(2):
        step(i)
    start = process_time()
    for i in range(args.steps):
        step(i)
    plain = (process_time() - start) / args.steps
    profile = cProfile.Profile(process_time, builtins=False)
    profile.enable()
    for i in range(args.steps):
        step(i)
    profile.disable()
    if mesh.grid.rank == 0:
        print(report(pstats.Stats(profile), args.steps, plain, args.least))
    mesh.close()


def report(stats: pstats.Stats, steps: int, plain: float, least: float) -> str:
    """The functions, the longest first; times are of the processor."""
    total = sum(own for _, _, own, _, _ in stats.stats.values())  # type: ignore[attr-defined]
    rows = [
        (f"{100 * own / total:.1f}", f"{1e3 * own / steps:.1f}", calls // steps, f"{short(file)}:{line}", name)
        for (file, line, name), (_, calls, own, _, _) in sorted(
            stats.stats.items(),
            key=lambda item: -item[1][2],  # type: ignore[attr-defined]
        )
        if 100 * own >= least * total
    ]
    head = f"A step takes {1e3 * plain:.0f} ms of the processor ({1e3 * total / steps:.0f} under the profiler)."
    return f"{head}\n\n{harness.table(('%', 'ms', 'calls', 'where', 'function'), rows)}"


def short(file: str) -> str:
    """A file's path within the package."""
    path = Path(file)
    return str(path.relative_to(harness.ROOT)) if path.is_relative_to(harness.ROOT) else path.name


if __name__ == "__main__":
    main()
