"""Training with states, gradients and parameters on a disk: under a hard limit, how fast, and what a limit decides.

python bench/offload.py --path /tmp/offload                       # all parts
python bench/offload.py --path /tmp/offload --parts limit         # states of 4 times what `ulimit -v` leaves
python bench/offload.py --path /tmp/offload --parts budget        # what `memory=` offloads, and what is then held

One core, and two ranks where a pipeline is in the table.  The disk's own bandwidth is measured beside it, past the page
cache (O_DIRECT), in tiles of the same size, and reads are of what was written before and is in no cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import harness

sys.path.insert(0, str(harness.ROOT))
from parlinalg.offload.disk import DiskFile, aligned, free_bytes

#: glibc's arenas would count as address space in use.
ALONE = {
    "MALLOC_ARENA_MAX": "1",
    "PARLINALG_MPI": "0",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
}

PARTS = ["limit", "speed", "budget"]
#: Limits of one rank alone, then of two ranks as the stages of a pipeline.
BUDGETS = [
    *((None, limit) for limit in ("275MiB", "230MiB", "180MiB", "100MiB")),
    *((schedule, limit) for schedule in ("1f1b", "zb-h1") for limit in ("170MiB", "120MiB", "60MiB")),
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", required=True, help="a folder on the disk; a new folder in it is used")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--limit-model", default="256x20x1x16", help="hidden, layers, batch, sequence")
    parser.add_argument("--model", default="512x20x8x128")
    parser.add_argument("--budget-model", default="384x8x2x128")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tile", type=int, default=8 << 20, help="bytes of a tile of states")
    parser.add_argument("--ratio", type=float, default=4, help="states over the limit")
    parser.add_argument("--json")
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for idle cores")
    parser.add_argument("--crowded", action="store_true")
    args = parser.parse_args()
    harness.stop_cleanly()
    share = harness.busy_at_start(args.wait, args.crowded)
    if share is None:
        return 1
    folder = Path(args.path) / f"parlinalg-{os.getpid()}"
    folder.mkdir(parents=True)
    found: dict[str, Any] = {"busy_at_start": share}
    try:
        if "limit" in args.parts:
            found["limit"] = limited(folder, args)
        if "speed" in args.parts:
            found["speed"] = fast(folder, args)
        if "budget" in args.parts:
            found["budget"] = budgets(folder, args)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.json:
        harness.write_json(args.json, found)
    return 0 if all(found[part]["same"] for part in ("limit", "speed") if part in found) else 1


def trained(folder: Path, model: str, mode: str, **options: Any) -> dict[str, Any]:
    """Return what the piece reports."""
    hidden, layers, batch, sequence = map(int, model.split("x"))
    sizes = {"hidden": hidden, "layers": layers, "batch": batch, "sequence": sequence}
    text = json.dumps({"mode": mode, "path": str(folder), **sizes, **options})
    piece = harness.BENCH / "pieces" / "offload_train.py"
    return dict(harness.run([sys.executable, str(piece), text], harness.environment(1, ALONE), 1800))


def limited(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A model whose states need `ratio` times the memory that a hard limit leaves."""
    options = {"steps": 3, "tile": min(args.tile, 1 << 18)}
    whole = trained(folder, args.limit_model, "memory", **options)
    limit = int(whole["states"] / args.ratio)
    without = trained(folder, args.limit_model, "memory", limit=limit, **options)
    try:
        within = trained(folder, args.limit_model, "disk", limit=limit, **options)
    except RuntimeError as error:  # it could not even say that memory ran out
        within = {"failed": str(error)}
    same = (within.get("losses"), within.get("digest")) == (whole["losses"], whole["digest"])
    rows = [
        ("in memory", "none", mib(whole["peak"] - whole["baseline"]), whole["digest"][:12]),
        ("in memory", mib(limit), "-", without.get("failed", "trains")[:24]),
    ]
    if "failed" in within:
        rows.append(("all on disk", mib(limit), "-", within["failed"].splitlines()[0][:60]))
    else:
        rows.append(("all on disk", mib(limit), mib(within["peak"] - within["baseline"]), within["digest"][:12]))
    print(
        f"\nGPT of {whole['parameters']:,} parameters, Adam's states {mib(whole['states'])} MiB; the limit is counted "
        f"from the {mib(whole['baseline'])} MiB of address space of the interpreter, OpenBLAS and a grid.\n"
    )
    print(harness.table(("states", "limit MiB", "most taken MiB", "digest of values and states"), rows))
    if "failed" in within:
        print(f"\nWith all on the disk it FAILS within the limit: {within['failed']}")
    else:
        print(f"\nThe results are {'the same bits' if same else 'DIFFERENT'}.")
    return {"limit": limit, "same": same, "whole": whole, "without": without, "within": within}


def fast(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Steps a second as a fraction of those in memory, beside the disk's bandwidth."""
    disk = bandwidth(folder, args.tile)
    found = {mode: trained(folder, args.model, mode, steps=args.steps, tile=args.tile) for mode in
             ("memory", "states", "disk")}  # fmt: skip
    base, rows = None, []
    for mode, name in (("memory", "in memory"), ("states", "states on disk"), ("disk", "states, gradients, values")):
        told = found[mode]
        step, update = median(told["seconds"][1:]), median(told["update"][1:])
        base = base or step
        moved = 0.0 if mode == "memory" else (2 * told["states"] + 4 * told["parameters"]) / update / 1e6
        rows.append((name, f"{step:.2f}", f"{update:.2f}", f"{base / step:.2f}", f"{moved:.0f}" if moved else "-"))
    print(
        f"\nGPT of {found['memory']['parameters']:,} parameters, float32, batch × sequence of {args.model}, one core.\n"
    )
    print(harness.table(("", "s a step", "s of them update", "of in-memory speed", "states MB/s in update"), rows))
    print(f"\nThe disk: {disk['write']:.0f} MB/s written, {disk['read']:.0f} read, {disk['both']:.0f} both at once.")
    same = len({told["digest"] for told in found.values()}) == 1
    print(f"The results are {'the same bits' if same else 'DIFFERENT'}.")
    return {"bandwidth": disk, "same": same, **found}


def budgets(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return for every rank what a limit offloads, what the plan says stays, and what is then held."""
    found, rows = [], []
    program = [sys.executable, str(harness.BENCH / "pieces" / "offload_budget.py")]
    for schedule, limit in BUDGETS:
        text = json.dumps({"memory": limit, "schedule": schedule, "path": str(folder), "model": args.budget_model})
        ranks = 2 if schedule else 1
        start = [*harness.mpiexec(), "-n", "2", *program, text] if schedule else [*program, text]
        extra = {} if schedule else {"PARLINALG_MPI": "0"}
        told = harness.run(start, harness.environment(ranks, extra), 600)["ranks"]
        found.append({"schedule": schedule, "memory": limit, "ranks": told})
        if "error" in told[0]:
            rows.append((schedule or "-", limit, told[0]["error"].partition(": ")[0][:60], "", "", ""))
            continue
        away = " | ".join(", ".join(t["offloaded"]) or "nothing" for t in told)
        rows.append((schedule or "-", limit, away, *(
            ", ".join(mib(t[name]) for t in told) for name in ("stays", "rest", "most")
        )))  # fmt: skip
    sizes = {name: ", ".join(mib(t[name]) for t in found[0]["ranks"]) for name in
             ("values", "gradients", "states", "activations", "block")}  # fmt: skip
    print(f"\nGPT of {args.budget_model}; alone, in MiB: {', '.join(f'{name} {n}' for name, n in sizes.items())}.\n")
    print(harness.table(("schedule", "memory", "offloaded", "stays by the plan", "at rest", "most in a step"), rows))
    return found


def bandwidth(folder: Path, tile: int, total: int = 1 << 30) -> dict[str, float]:
    """MB/s of writing and reading tiles past the page cache, one after the other and both at once."""
    from concurrent.futures import ThreadPoolExecutor

    total = min(total, free_bytes(folder) // 4) // (2 * tile) * 2 * tile
    buffers = aligned(tile), aligned(tile)
    buffers[0][:] = 7
    found = {}
    with DiskFile(folder / "bandwidth", total) as file:

        def write(first: int, stop: int) -> None:
            for at in range(first, stop, tile):
                file.write(buffers[0], at)
            file.flush()

        def read(first: int, stop: int) -> None:
            for at in range(first, stop, tile):
                file.read(buffers[1], at)

        write(0, total)  # the first time the file system also notes where things lie
        for name, call in (("write", write), ("read", read)):
            start = time.perf_counter()
            call(0, total)
            found[name] = total / (time.perf_counter() - start) / 1e6
        start = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            for future in (pool.submit(write, 0, total // 2), pool.submit(read, total // 2, total)):
                future.result()
        found["both"] = total / (time.perf_counter() - start) / 1e6
        found["direct"] = float(file.direct)
        file.close(remove=True)
    return found


def mib(n: int) -> str:
    """Bytes in MiB."""
    return f"{n / 2**20:.1f}"


if __name__ == "__main__":
    sys.exit(main())
