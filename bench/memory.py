"""What a rank holds in training under ZeRO's stages 0 to 3: at rest between steps, and at the most within one.

    python bench/memory.py [--ranks 1 2 4 8] [--stages 0 1 2 3] [--dtype float32] [--json FILE]
    python bench/memory.py --imagined [--forms "2d" "ZeRO 2"] [--json FILE]

For every number of ranks and stage a GPT is trained with AdamW, each run in processes of its own.  Of the rank that has
the most: bytes of NumPy's arrays between two steps, beside the formula's table of dtypes; at the most within a step,
beside table + two gathered blocks + one block's gradients + buckets + what the tape holds; and the process's VmHWM,
less what it had before the model was made.

With `--imagined` 4 ranks train under each of `FORMS`: ZeRO's stages, schemes, recomputation, offload and pipelines.
Beside what each rank's arrays are measured to take stands what the same program holds on imagined ranks
(`pla.imagine`); the peaks may differ by 3%.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
import numpy as np

MIB = 2**20
REST, PEAK = 0.01, 0.10
"""By how much what is measured may exceed the formula."""
IMAGINED = 0.03
"""By how much the peak of a real rank may differ from that of an imagined one."""


class Form(NamedTuple):
    """A way for 4 ranks to train: a scheme, the sizes of its axes, and what is done about memory; or a schedule."""

    scheme: str
    sizes: dict[str, int]
    stage: int = 0
    recompute: str | None = None
    offload: bool = False
    schedule: str | None = None


FORMS = {
    **{f"ZeRO {stage}" if stage else "data": Form("data", {"data": 4}, stage) for stage in range(3)},
    "ZeRO 3": Form("zero3", {"data": 4}, 3),
    "ZeRO 1, states on the host": Form("data", {"data": 4}, 1, None, True),
    "1d": Form("1d", {"t": 4}),
    "1d with sequence cuts": Form("1d with sequence cuts", {"t": 4}),
    "2d": Form("2d", {"r": 2, "c": 2}),
    "2.5d, depth on the batch": Form("2.5d, depth on the batch", {"d": 2, "r": 2, "c": 1}),
    "2.5d, depth on k": Form("2.5d, depth on k", {"d": 2, "r": 2, "c": 1}),
    "3d": Form("3d", {"i": 2, "j": 2, "l": 1}),
    "ring attention": Form("sequence", {"s": 4}),
    "ZeRO 1 × 1d": Form("1d", {"data": 2, "t": 2}, 1),
    "ZeRO 2 × 2d": Form("2d", {"data": 2, "r": 2, "c": 1}, 2),
    "ZeRO 2, attention recomputed": Form("data", {"data": 4}, 2, "attention"),
    "ZeRO 2, blocks recomputed": Form("data", {"data": 4}, 2, "block"),
    "ZeRO 3, blocks recomputed": Form("zero3", {"data": 4}, 3, "block"),
    "2d, blocks recomputed": Form("2d", {"r": 2, "c": 2}, 0, "block"),
    **{
        f"pipeline of 4, {name}": Form("serial", {}, schedule=name)
        for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "chimera")
    },
    "pipeline of 4, gpipe, blocks recomputed": Form("serial", {}, 0, "block", schedule="gpipe"),
    "pipeline of 4, 1f1b, blocks recomputed": Form("serial", {}, 0, "block", schedule="1f1b"),
}


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


class Training(NamedTuple):
    """A model that is trained."""

    parameters: list[Any]
    gatherer: Any
    forward: Callable[[], Any]
    step: Callable[[], None]


def training(args: argparse.Namespace, form: Form, grid: Any) -> Training:
    """Return a GPT on a grid with all that trains it."""
    import parlinalg as pla
    from parlinalg import nn, offload, optim
    from parlinalg.autograd import ops
    from parlinalg.parallel import GradientReducer, WeightGatherer, ZeRO
    from parlinalg.schemes import discover

    stage, scheme = form.stage, discover()[form.scheme].SCHEME
    if "data" in form.sizes and "data" not in scheme.axes:
        scheme = scheme.with_data("data")
    model = nn.GPT(
        vocab_size=args.vocabulary, max_position_embeddings=args.sequence, hidden_size=args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.heads, scheme=scheme, grid=grid, dtype=args.dtype,
        seed=1, recompute=form.recompute,
    )  # fmt: skip
    parameters = list(model.parameters())
    bucket = int(args.bucket * MIB)
    GradientReducer(parameters, [ZeRO(stage=stage)] if stage else [], bucket, bucket)
    gatherer = WeightGatherer(model) if stage == 3 else None
    optimizer = optim.AdamW(parameters, lr=1e-4, master=True)
    if form.offload:
        optimizer.place(offload.HostStates())
    numbers = np.random.default_rng(0).integers(0, args.vocabulary, (2, args.batch, args.sequence))
    ids, targets = (pla.distribute(a, grid, model.ids_layout) for a in numbers)

    def forward() -> Any:
        loss, count = ops.cross_entropy_sum(model(ids), targets)
        return loss * (1 / count)

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    return Training(parameters, gatherer, forward, step)


@contextmanager
def stepping(args: argparse.Namespace, form: Form, comm: Any, backend: str) -> Iterator[Callable[[], None]]:
    """Give the step of a training; a pipeline cuts a batch into as many microbatches as it has samples."""
    import parlinalg as pla
    from parlinalg import nn
    from parlinalg.autograd import ops

    if form.schedule is None:
        with pla.Grid(form.sizes, comm, backend) as grid:
            yield training(args, form, grid).step
        return
    schedule = {"name": form.schedule, "microbatches": args.batch}
    config = {"parallel": {"pipeline": comm.size}, "schedule": schedule, "batch_size": args.batch}
    with pla.launch(config, comm, backend) as mesh:
        model = nn.GPT(
            vocab_size=args.vocabulary, max_position_embeddings=args.sequence, hidden_size=args.hidden,
            num_hidden_layers=args.layers, num_attention_heads=args.heads, scheme=mesh.scheme, grid=mesh.grid,
            dtype=args.dtype, seed=1, recompute=form.recompute,
        )  # fmt: skip
        engine, *_ = pla.initialize(model, criterion=ops.cross_entropy_sum, mesh=mesh)
        numbers = np.random.default_rng(0).integers(0, args.vocabulary, (2, args.batch, args.sequence))

        def step() -> None:
            engine.zero_grad()
            engine.execute_schedule(iter([tuple(numbers)]), return_output_label=False)
            engine.step()

        yield step


def measured(memory: Any, step: Callable[[], None]) -> tuple[int, int]:
    """Return the bytes of this rank's arrays between two steps, and at the most within one, after three more."""
    for _ in range(3):
        step()
    gc.collect()
    rest = memory.held
    memory.reset_peak()
    step()
    return rest, memory.peak


def compared(args: argparse.Namespace) -> dict[str, Any]:
    """One form on real ranks, and on imagined ones; returns the figures of the rank whose peaks differ most."""
    import parlinalg as pla
    from parlinalg.backend import compiled
    from parlinalg.comm import open_comm
    from parlinalg.testing import array_memory

    os.environ["PARLINALG_SHARED"] = "0"
    (name,), world = args.forms, open_comm()
    form = FORMS[name]
    compiled.about()
    with array_memory() as memory, stepping(args, form, world, "numpy") as step:
        step()
        rest, peak = measured(memory, step)
        del step

    def imagined(found: Any) -> dict[str, int]:
        with stepping(args, form, found.comm, "auto") as step:
            for _ in range(3):
                step()
            held = sum(found.memory.values())
            found.reset_peak()
            step()
            return {"imagined_rest": held, "imagined_peak": found.peak_memory}

    gc.collect()
    if form.schedule is not None:  # stages tell each other what they send
        every = pla.imagine_together(imagined, world.size, node=world.local_size, what_if=pla.WhatIf())
        mine = {"rest": rest, "peak": peak, **every[world.rank]}
    else:
        with pla.imagine(world.size, world.rank, node=world.local_size) as found:
            mine = {"rest": rest, "peak": peak, **imagined(found)}
    everyone = world.share(mine)
    worst = max(everyone, key=lambda each: abs(each["imagined_peak"] / each["peak"] - 1))
    world.barrier()
    return {"form": name, **worst} if world.rank == 0 else {}


def piece(args: argparse.Namespace) -> dict[str, Any]:
    """One run, on every rank of it; returns the figures of the rank that has the most."""
    import parlinalg as pla
    from parlinalg.autograd.saved import saved
    from parlinalg.backend import compiled
    from parlinalg.comm import open_comm
    from parlinalg.testing import array_memory

    os.environ["PARLINALG_SHARED"] = "0"  # buckets that the ranks have in common are no arrays of NumPy's
    world, stage = open_comm(), args.stages[0]
    grid = pla.Grid({"data": world.size}, world, "numpy")
    compiled.about()  # numba is loaded: it is the process's, not the training's
    before = resident("VmRSS")
    form = Form("zero3" if stage == 3 else "data", {"data": world.size}, stage)
    bucket = int(args.bucket * MIB)
    with array_memory() as memory:
        parameters, gatherer, forward, step = training(args, form, grid)
        step()
        tape = sum(row.nbytes for row in saved(forward()))
        rest, peak = measured(memory, step)
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


def show_imagined(rows: list[dict[str, Any]]) -> str:
    head = ("form", "at rest MiB", "imagined", "off", "peak MiB", "imagined", "off")
    body = [
        tuple(
            each
            for what in ("rest", "peak")
            for each in (
                f"{r[what] / MIB:.1f}", f"{r[f'imagined_{what}'] / MIB:.1f}",
                f"{100 * (r[f'imagined_{what}'] / r[what] - 1):+.1f}%",
            )
        )
        for r in rows
    ]  # fmt: skip
    return harness.table(head, [(r["form"], *each) for r, each in zip(rows, body, strict=True)])


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
    parser.add_argument("--imagined", action="store_true", help="compare with imagined ranks instead, on 4 ranks")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS), help="those that are compared")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--piece", action="store_true", help="used by this script itself")
    args = parser.parse_args()
    if args.piece:
        if found := compared(args) if args.imagined else piece(args):
            print(json.dumps(found))
        return 0
    harness.stop_cleanly()
    options = [f"--{n}={getattr(args, n)}" for n in (
        "hidden", "layers", "heads", "vocabulary", "batch", "sequence", "bucket", "dtype",
    )]  # fmt: skip
    rows = []
    if args.imagined:
        return compare(args, options)
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


def compare(args: argparse.Namespace, options: list[str]) -> int:
    """Compare the forms that are asked for, each in processes of its own."""
    rows = []
    for name in args.forms:
        program = [sys.executable, __file__, "--piece", "--imagined", "--forms", name, *options]
        rows.append(harness.run([*harness.mpiexec(), "-n", "4", *program], harness.environment(4), 900))
        print(show_imagined(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(f"GPT {args.hidden}x{args.layers}, {args.batch} sequences of {args.sequence}, {args.dtype}, AdamW, 4 ranks\n")
    print(show_imagined(rows))
    wrong = [r["form"] for r in rows if abs(r["imagined_peak"] / r["peak"] - 1) > IMAGINED]
    print(f"\npeaks within {IMAGINED:.0%}: " + (f"NO: {'; '.join(wrong)}" if wrong else "yes"))
    if args.json:
        harness.write_json(args.json, {"arguments": vars(args), "rows": rows})
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
