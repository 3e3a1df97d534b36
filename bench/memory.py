"""What a rank holds in training under ZeRO's stages 0 to 3: at rest between steps, and at the most within one.

    python bench/memory.py [--ranks 1 2 4 8] [--stages 0 1 2 3] [--dtype float32] [--json FILE]

For every number of ranks and stage a GPT is trained with AdamW, each run in processes of its own.  Of the rank that has
the most: bytes of NumPy's arrays (tracemalloc's domain) between two steps, beside the formula's table of dtypes; at the
most within a step, beside table + two gathered blocks + one block's gradients + buckets + what the tape holds; and the
process's VmHWM, less what it had before the model was made.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
import numpy as np

MIB = 2**20
REST, PEAK = 0.01, 0.10
"""By how much what is measured may exceed the formula."""


def numpy_bytes() -> int:
    """Bytes of all arrays that NumPy has made since tracing began, and not freed."""
    domain = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([domain]).traces)


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def table(parameters: list[Any], stage: int, ranks: int, dtype: str) -> dict[str, float]:
    """Bytes a rank at rest by the formula, Ψ parameters over N ranks: values, gradients and AdamW's states."""
    psi = sum(int(np.prod(p.shape)) for p in parameters)
    size = 8 if dtype == "float64" else 2 if dtype in ("bfloat16", "float16") else 4
    states = 3 * 4 if size == 2 else 2 * size
    shared = [stage >= 3, stage >= 2, stage >= 1]
    parts = zip(("values", "gradients", "states"), (size, size, states), shared, strict=True)
    return {name: psi * each / (ranks if cut else 1) for name, each, cut in parts}


def piece(args: argparse.Namespace) -> dict[str, Any]:
    """One run, on every rank of it; returns the figures of the rank that has the most."""
    import parlinalg as pla
    from parlinalg import nn, optim
    from parlinalg.autograd import ops
    from parlinalg.autograd.saved import saved
    from parlinalg.backend import compiled
    from parlinalg.comm import open_comm
    from parlinalg.parallel import GradientReducer, WeightGatherer, ZeRO
    from parlinalg.schemes import discover

    os.environ["PARLINALG_SHARED"] = "0"  # buckets that the ranks have in common are not in tracemalloc's books
    world, stage = open_comm(), args.stages[0]
    grid = pla.Grid({"data": world.size}, world, "numpy")
    scheme = discover()["zero3" if stage == 3 else "data"].SCHEME
    compiled.about()  # numba is loaded: it is the process's, not the training's
    before = resident("VmRSS")
    tracemalloc.start()
    model = nn.GPT(
        vocab_size=args.vocabulary, max_position_embeddings=args.sequence, hidden_size=args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.heads, scheme=scheme, grid=grid, dtype=args.dtype,
        seed=1,
    )  # fmt: skip
    parameters = list(model.parameters())
    bucket = int(args.bucket * MIB)
    GradientReducer(parameters, [ZeRO(stage=stage)] if stage else [], bucket, bucket)
    gatherer = WeightGatherer(model) if stage == 3 else None
    optimizer = optim.AdamW(parameters, lr=1e-4, master=True)
    numbers = np.random.default_rng(0).integers(0, args.vocabulary, (2, args.batch, args.sequence))
    ids, targets = (pla.distribute(a, grid, model.ids_layout) for a in numbers)

    def forward() -> Any:
        loss, count = ops.cross_entropy_sum(model(ids), targets)
        return loss * (1 / count)

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    tape = sum(row.nbytes for row in saved(forward()))
    for _ in range(3):
        step()
    gc.collect()
    rest, python = numpy_bytes(), tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    step()
    peak = tracemalloc.get_traced_memory()[1] - (python - rest)
    formula = table(parameters, stage, world.size, args.dtype)
    block = 0 if gatherer is None else gatherer.limit
    allowed = sum(formula.values()) + 3 * block + 2 * bucket + tape
    mine = {"rest": rest, "peak": peak, "hwm": resident("VmHWM") - before, "tape": tape}
    everyone = world.share(mine)
    found = {name: max(each[name] for each in everyone) for name in mine}
    grid.close()
    world.barrier()
    return {
        "ranks": world.size, "stage": stage, "parameters": sum(int(np.prod(p.shape)) for p in parameters), **found,
        "table": sum(formula.values()), "formula": formula, "allowed": allowed, "block": block,
        "rest_ok": found["rest"] <= (1 + REST) * sum(formula.values()),
        "peak_ok": found["peak"] <= (1 + PEAK) * allowed,
    } if world.rank == 0 else {}  # fmt: skip


def show(rows: list[dict[str, Any]]) -> str:
    body = [
        (
            r["ranks"], r["stage"], f"{r['table'] / MIB:.1f}", f"{r['rest'] / MIB:.1f}",
            f"{100 * (r['rest'] / r['table'] - 1):+.2f}%", f"{r['allowed'] / MIB:.1f}", f"{r['peak'] / MIB:.1f}",
            f"{100 * (r['peak'] / r['allowed'] - 1):+.1f}%", f"{r['hwm'] / MIB:.0f}",
        )
        for r in rows
    ]  # fmt: skip
    head = ("ranks", "stage", "table MiB", "at rest MiB", "off", "allowed MiB", "peak MiB", "off", "VmHWM MiB")
    return harness.table(head, body)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--stages", type=int, nargs="+", choices=range(4), default=[0, 1, 2, 3])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=16)
    parser.add_argument("--bucket", type=float, default=4, help="of the gradient reducer, MiB")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--piece", action="store_true", help="used by this script itself")
    args = parser.parse_args()
    if args.piece:
        if found := piece(args):
            print(json.dumps(found))
        return 0
    harness.stop_cleanly()
    options = [f"--{n}={getattr(args, n)}" for n in (
        "hidden", "layers", "heads", "vocabulary", "batch", "sequence", "bucket", "dtype",
    )]  # fmt: skip
    rows = []
    for ranks in args.ranks:
        for stage in args.stages:
            program = [sys.executable, __file__, "--piece", "--stages", str(stage), *options]
            launcher = [*harness.mpiexec(), "-n", str(ranks)]
            rows.append(harness.run([*launcher, *program], harness.environment(ranks), 900))
            print(show(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(f"GPT of {rows[0]['parameters'] / 1e6:.1f}M parameters, {args.dtype}, AdamW\n\n{show(rows)}")
    wrong = [f"{r['ranks']} ranks, stage {r['stage']}" for r in rows if not (r["rest_ok"] and r["peak_ok"])]
    print(f"\nwithin {REST:.0%} at rest and {PEAK:.0%} at the most: " + (f"NO: {'; '.join(wrong)}" if wrong else "yes"))
    if args.json:
        harness.write_json(args.json, {"arguments": vars(args), "rows": rows})
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
