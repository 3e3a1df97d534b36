"""How much longer steps take with a checkpoint written in the background.

python bench/checkpoint.py --path /tmp/checkpoint                 # a save of 500 MB in 50 steps, 1 and 2 ranks

Steps with a save and without take turns in one process.  The time counts until the checkpoint is complete.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from statistics import median
from typing import Any

import harness

MOST = 1.05
"""The most that steps with a save may take, of those without."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="a folder on the disk; a new folder in it is used")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--model", default="512x14x8x128", help="hidden, layers, batch, sequence")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for idle cores")
    parser.add_argument("--crowded", action="store_true")
    args = parser.parse_args()
    harness.stop_cleanly()
    share = harness.busy_at_start(args.wait, args.crowded)
    if share is None:
        return 1
    rows = [measured(ranks, args) for ranks in args.ranks]
    print(harness.table(("ranks", "MB saved", "s without", "s with", "of that copying", "with / without"), [
        (row["ranks"], f"{row['bytes'] / 1e6:.0f}", f"{row['without']:.2f}", f"{row['with']:.2f}",
         f"{row['copying']:.2f}", f"{row['ratio']:.3f}") for row in rows
    ]))  # fmt: skip
    print(f"\n{args.steps} steps each, medians of {args.rounds} rounds in turns.")
    if args.json:
        harness.write_json(args.json, {"busy_at_start": share, "machine": harness.machine(), "rows": rows})
    late = [row for row in rows if not row["ratio"] <= MOST]
    for row in late:
        print(f"{row['ranks']} ranks: {row['ratio']:.3f} is more than {MOST}")
    return 1 if late and not args.crowded else 0


def measured(ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    """Medians of steps with and without a save; their ratio is the median of the rounds'."""
    hidden, layers, batch, sequence = map(int, args.model.split("x"))
    folder = Path(args.path) / f"parlinalg-{os.getpid()}"
    text = json.dumps({
        "path": str(folder), "hidden": hidden, "layers": layers, "batch": batch, "sequence": sequence,
        "steps": args.steps, "rounds": args.rounds,
    })  # fmt: skip
    piece = [sys.executable, str(harness.BENCH / "pieces" / "checkpoint_train.py"), text]
    command = [*harness.mpiexec(), "-n", str(ranks), *piece] if ranks > 1 else piece
    folder.mkdir(parents=True)
    try:
        told = harness.run(command, harness.environment(ranks), 3600)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    times = {kind: [row["seconds"] for row in told[kind]] for kind in ("without", "with")}
    return {
        "ranks": ranks,
        "bytes": told["bytes"],
        "parameters": told["parameters"],
        **{kind: median(found) for kind, found in times.items()},
        "copying": median(row["copying"] for row in told["with"]),
        "ratio": median(b / a for a, b in zip(times["without"], times["with"], strict=True)),
        "rounds": told,
    }


if __name__ == "__main__":
    sys.exit(main())
