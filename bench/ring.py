"""Ring attention by the order of the tokens: how causal work is balanced, counted, and what it takes.

    python bench/ring.py [--ranks 1 2 4] [--lengths 4096] [--rounds 5] [--json FILE]     # about a minute

"balance" is a rank's share of all pairs that causality leaves, over the scores that the busiest rank computes, forward
and backward: FLOPs counted, with those spent at the edges of blocks.  Times are of a forward and a backward pass,
medians over rounds in which the orders take turns, from one barrier to the next.  With more ranks than cores the ranks
share cores, and balance no longer shows in the time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import harness
import numpy as np

LIMIT = 0.97


def pass_of(world: Any, grid: Any, order: str, args: argparse.Namespace) -> dict[str, Any]:
    """One forward and backward pass in an order; what all ranks computed and received."""
    import parlinalg as pla
    from parlinalg import Layout
    from parlinalg.autograd import ops
    from parlinalg.backend.kernels.attention import counting

    shape = (args.batch, args.length, args.heads, 3, args.width)
    layout = Layout(None, "s", None, None, None)
    block = np.random.default_rng(world.rank).standard_normal(grid.block_shape(layout, shape), np.float32)
    z = pla.Tensor(pla.from_blocks(block, grid, layout, shape), requires_grad=True)
    at = pla.sequence_order(args.length, world.size, order)
    world.barrier()
    start = time.perf_counter()
    with counting() as work, pla.ledger(grid) as book:
        y = ops.ring_attention(z, axis="s", causal=True, positions=at)
        y.backward(y.data)
    here = time.perf_counter() - start
    world.barrier()
    seconds = time.perf_counter() - start
    flops = [w * args.batch * args.heads for w in (4 * args.width, 10 * args.width)]
    everyone = world.share([work.forward, work.backward, work.flops(args.width), book.words.total(), here])
    ideal = args.length * (args.length + 1) / 2 / world.size
    return {
        "order": order, "seconds": seconds, "by_rank": [e[4] for e in everyone], "words": max(e[3] for e in everyone),
        "forward": ideal * args.batch * args.heads / max(e[0] for e in everyone),
        "backward": ideal * args.batch * args.heads / max(e[1] for e in everyone),
        "flops": [e[2] for e in everyone], "ideal_flops": ideal * sum(flops),
    }  # fmt: skip


def piece(args: argparse.Namespace) -> int:
    """All rounds on the ranks of this run; rank 0 tells."""
    import parlinalg as pla
    from parlinalg.comm import open_comm
    from parlinalg.sequence import ORDERS

    world = open_comm()
    found: dict[str, list[dict[str, Any]]] = {order: [] for order in ORDERS}
    with pla.Grid({"s": world.size}, world) as grid:
        for turn in range(args.rounds + 1):
            for i in range(len(ORDERS)):
                order = ORDERS[(turn + i) % len(ORDERS)]
                found[order].append(pass_of(world, grid, order, args))
    if world.rank == 0:
        rows = []
        for passes in found.values():
            low, middle, high = harness.spread([p["seconds"] for p in passes[1:]])
            rows.append({**passes[0], "low": low, "seconds": middle, "high": high})
        print(json.dumps({"ranks": world.size, "rows": rows}), flush=True)
    world.free()
    return 0


def show(results: Sequence[dict[str, Any]]) -> str:
    lines = []
    for result in results:
        rows = {row["order"]: row for row in result["rows"]}
        contiguous = rows["contiguous"]["seconds"]
        for order, row in rows.items():
            lines.append(
                (
                    result["length"], result["ranks"], order, f"{100 * row['forward']:.1f}%",
                    f"{100 * row['backward']:.1f}%", f"{1000 * row['seconds']:.0f} ms",
                    f"{1000 * row['low']:.0f}–{1000 * row['high']:.0f}", f"{contiguous / row['seconds']:.2f}",
                    f"{row['words']:,}",
                )
            )  # fmt: skip
    head = (
        "tokens", "ranks", "order", "balance forward", "backward", "time", "quartiles", "× contiguous", "words",
    )  # fmt: skip
    return harness.table(head, lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64, help="features of a head")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wait", type=float, default=120.0, help="seconds to wait for idle cores")
    parser.add_argument("--crowded", action="store_true", help="measure although others use the cores")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--piece", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.piece:
        return piece(args)
    harness.stop_cleanly()
    share = harness.busy_at_start(args.wait, args.crowded)
    if share is None:
        return 1
    results = []
    for length in args.lengths:
        for ranks in args.ranks:
            options = [f"--{name}={getattr(args, name)}" for name in ("batch", "heads", "width", "rounds")]
            command = [*harness.mpiexec(), "-n", str(ranks), sys.executable, __file__, "--piece", f"--length={length}"]
            results.append({"length": length, **harness.run([*command, *options], harness.environment(ranks))})
    print(show(results), flush=True)
    if args.json:
        harness.write_json(args.json, {"busy": share, "results": results})
    zigzag = [row for result in results for row in result["rows"] if row["order"] == "zigzag"]
    short = [row for row in zigzag if not min(row["forward"], row["backward"]) >= LIMIT]
    return 1 if short and min(args.lengths) >= 4096 else 0


if __name__ == "__main__":
    raise SystemExit(main())
