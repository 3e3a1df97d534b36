"""Training a GPT in float32: parlinalg against PyTorch on the same cores, one BLAS thread a rank, in one run.

PyTorch 2 eager: one core; tensor parallel by DTensor (blocks by columns and rows, embedding and head by vocabulary) on
2 and 4 ranks; DistributedDataParallel on 2; with fused attention and AdamW; and our ZeRO.  All start from the same
weights, see the same batches, and must tell the same losses.  They take turns: every round runs each of them once, so
that a change in the machine's speed meets all alike; figures are medians of steps over all rounds.

    python bench/train.py                           # d 512 × 4 layers, then d 1024 × 2 layers: about 15 minutes
    python bench/train.py --pieces torch:serial:1 parlinalg:serial:1 --rounds 3
    python bench/train.py --models 512x4x8x256x8x2048   # d, layers, heads, sequence, batch, vocabulary
    python bench/train.py --device cuda             # one GPU, bfloat16: against PyTorch eager and compiled

Memory is the peak resident set of the slowest rank's process over all steps, less what it was before the first.
"""

from __future__ import annotations

import argparse
import socket
import sys
from importlib.util import find_spec
from typing import Any

import harness
from harness import BENCH, Unavailable

sys.path.insert(0, str(BENCH / "pieces"))
from gpt import Sizes

MODELS = {"d512": "512x4x8x256x8x2048", "d1024": "1024x2x16x256x4x2048", "gpu": "2048x16x16x2048x4x32768"}
PIECES = [
    "gemm:-:1", "torch:serial:1", "parlinalg:serial:1", "torch:tensor:2", "parlinalg:1d:2", "torch:tensor:4",
    "parlinalg:1d:4", "torch:data:2", "parlinalg:data:2", "parlinalg:zero1:2", "parlinalg:zero2:2", "parlinalg:zero3:2",
]  # fmt: skip
"""What is run, in turns: library, mode and ranks."""
ON_GPU = ["gemm:-:1", "torch:serial:1", "torch:compiled:1", "parlinalg:serial:1"]

GOALS = {("parlinalg:serial:1", "torch:serial:1"): 1.05, ("parlinalg:1d:2", "torch:tensor:2"): 1.1,
         ("parlinalg:1d:4", "torch:tensor:4"): 1.1, ("parlinalg:data:2", "torch:data:2"): 1.0,
         ("parlinalg:zero3:2", "parlinalg:data:2"): 0.85}  # fmt: skip
GOALS_ON_GPU = {("parlinalg:serial:1", "torch:compiled:1"): 1.0}
"""Least ratios of tokens/s."""
OF_CORES = 0.95
"""The least share of twice one core's tokens/s that data parallelism should reach on 2 ranks."""
OF_GEMM = 0.85
"""The least share of the local GEMM's rate that one core should reach over the model's FLOPs."""
OF_MEMORY = 1.1
"""The most memory of a step on one rank, as a multiple of PyTorch's."""
LOSSES = 1e-3
LOSSES_IN_HALVES = 3e-2
"""How far losses may lie apart after a few steps, relative: in float32, and in 16 bits."""


def command(piece: str, model: str, warm: int, steps: int, device: str, dtype: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts a piece, and its environment: one BLAS thread a rank."""
    library, mode, ranks = piece.split(":")
    env = harness.environment(int(ranks), dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
    ))  # fmt: skip
    program = str(BENCH / "pieces" / {"gemm": "gemm.py", "torch": "gpt_torch.py"}.get(library, "gpt_parlinalg.py"))
    if library == "gemm":
        return [sys.executable, program, model, str(max(3, steps)), device, dtype], env
    where = {"cpu": "numpy", "cuda": "cupy"}[device] if library == "parlinalg" else device
    said = [program, mode, model, str(warm), str(steps), where, dtype]
    if library == "torch" and mode != "serial":
        env["GLOO_SOCKET_IFNAME"] = "lo"
        run = ["-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-addr", "127.0.0.1"]
        return [sys.executable, *run, "--master-port", str(free_port()), *said], env
    if ranks == "1":
        env["PARLINALG_MPI"] = "0"
        return [sys.executable, *said], env
    return [*harness.mpiexec(), "-n", ranks, sys.executable, *said], env


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def missing(pieces: list[str]) -> dict[str, str]:
    """Pieces that cannot be had here, with the reason."""
    lacks: dict[str, str] = {}
    for piece in pieces:
        library, _, ranks = piece.split(":")
        if library == "torch" and find_spec("torch") is None:
            lacks[piece] = "no PyTorch: pip install torch --index-url https://download.pytorch.org/whl/cpu"
        elif library == "parlinalg" and ranks != "1":
            try:
                harness.mpiexec()
            except Unavailable as reason:
                lacks[piece] = str(reason)
    return lacks


def measure(title: str, model: str, pieces: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """One model: the pieces in turns."""
    told: dict[str, list[dict[str, Any]]] = {piece: [] for piece in pieces}
    others = []
    rounds, warm, steps = args.rounds, args.warm, args.steps
    for turn in range(rounds):
        for piece in pieces:
            others.append(harness.busy(0.2))
            line, env = command(piece, model, warm, steps, args.device, args.dtype)
            told[piece].append(harness.run(line, env, timeout=300 + 30 * (warm + steps)))
        print(
            f"{title}: round {turn + 1} of {rounds}, others used {100 * max(others):.0f}% of the cores at most",
            file=sys.stderr,
        )
    result = summary(title, Sizes.parse(model), told, others) | {"device": args.device, "dtype": args.dtype}
    print(f"\n{show(result)}\n", flush=True)
    return result


RATES = ("products_gflops", "square_gflops", "square")


def summary(title: str, sizes: Sizes, told: dict[str, list[dict[str, Any]]], others: list[float]) -> dict[str, Any]:
    gemm: dict[str, float] = {}
    blas = "unknown"
    rows = []
    for piece, runs in told.items():
        if piece.startswith("gemm"):
            gemm = {name: harness.spread([r[name] for r in runs])[1] for name in RATES}
            blas = runs[0]["blas"]
            continue
        low, middle, high = harness.spread([s for r in runs for s in r["seconds"]])
        cpu = harness.spread([s for r in runs for s in r["cpu"]])[1]
        rows.append({
            "piece": piece, "ranks": int(piece.rpartition(":")[2]), "median_s": middle, "quartiles_s": [low, high],
            "cpu_s": cpu, "tokens_per_s": sizes.tokens / middle, "gflops": sizes.flops / middle / 1e9,
            "gflops_cpu": sizes.flops / cpu / 1e9, "memory": harness.spread([r["memory"]["peak"] for r in runs])[1],
            "losses": runs[0]["losses"], "runs": runs,
        })  # fmt: skip
    return {
        "title": title, "sizes": vars(sizes), "tokens": sizes.tokens, "flops": sizes.flops, "gemm": gemm, "blas": blas,
        "rows": rows,
        "busy_before": {"median": harness.spread(others)[1], "most": max(others)},
    }  # fmt: skip


def of_gemm(result: dict[str, Any]) -> str:
    """The share of the GEMM's rate that the model's FLOPs reach."""
    alone = next((r for r in result["rows"] if r["piece"] == "parlinalg:serial:1"), None)
    if alone is None:
        return ""
    return f" parlinalg: {100 * alone['gflops'] / result['gemm']['products_gflops']:.0f}% of the former."


def goals(result: dict[str, Any]) -> dict[tuple[str, str], float]:
    """The goals where this result was measured."""
    return GOALS if result["device"] == "cpu" else GOALS_ON_GPU


def partner(result: dict[str, Any], piece: str) -> tuple[str, float] | None:
    """Return what a piece is compared with, and the goal."""
    return next(((theirs, goal) for (ours, theirs), goal in goals(result).items() if ours == piece), None)


def show(result: dict[str, Any]) -> str:
    rows = {r["piece"]: r for r in result["rows"]}
    lines = []
    for r in result["rows"]:
        against = partner(result, r["piece"])
        theirs = rows.get(against[0]) if against else None
        ratio = f"{r['tokens_per_s'] / theirs['tokens_per_s']:.2f}" if theirs else ""
        first, last = r["losses"][0], r["losses"][-1]
        lines.append((
            r["piece"], f"{r['tokens_per_s']:.0f}", f"{1e3 * r['median_s']:.0f}",
            f"{1e3 * r['quartiles_s'][0]:.0f}–{1e3 * r['quartiles_s'][1]:.0f}", f"{1e3 * r['cpu_s']:.0f}",
            f"{r['gflops']:.1f}", ratio, against[1] if theirs and against else "", f"{r['memory'] / 2**20:.0f}",
            f"{first:.4f} → {last:.4f}",
        ))  # fmt: skip
    head = ("piece", "tokens/s", "median ms", "quartiles", "CPU ms", "GFLOP/s", "ratio", "goal", "MiB", "loss")
    s, gemm, crowd = result["sizes"], result["gemm"], result["busy_before"]
    title = (
        f"{result['title']}: d {s['d']}, {s['layers']} layers, {s['heads']} heads, sequence {s['seq']}, "
        f"batch {s['batch']}, vocabulary {s['vocab']}; {result['dtype']}, {result['flops'] / 1e9:.1f} GFLOP a step"
    )
    rates = (
        f"The GEMM alone ({result['blas']}): {gemm['products_gflops']:.1f} GFLOP/s at the model's products, "
        f"{gemm['square_gflops']:.1f} at {gemm['square']:.0f}³.{of_gemm(result)}\n" if gemm else ""
    )  # fmt: skip
    others = f"Others used {100 * crowd['median']:.0f}% of the cores between pieces (median)"
    return f"{title}\n\n{harness.table(head, lines)}\n\n{rates}{others}; most {100 * crowd['most']:.0f}%."


def verdicts(results: list[dict[str, Any]]) -> list[str]:
    """Return what falls short of the goals, and losses that do not agree."""
    short = []
    for result in results:
        rows, title = {r["piece"]: r for r in result["rows"]}, result["title"]
        for (ours, theirs), goal in goals(result).items():
            if ours in rows and theirs in rows:
                ratio = rows[ours]["tokens_per_s"] / rows[theirs]["tokens_per_s"]
                if not ratio >= goal:
                    short.append(f"{title}: {ours} is {ratio:.3f} × {theirs}, the goal is {goal}")
        alone, torch = rows.get("parlinalg:serial:1"), rows.get("torch:serial:1")
        two = rows.get("parlinalg:data:2")
        if alone and two and not two["tokens_per_s"] >= OF_CORES * 2 * alone["tokens_per_s"]:
            share = two["tokens_per_s"] / alone["tokens_per_s"] / 2
            short.append(
                f"{title}: data parallel on 2 ranks is {share:.1%} of twice one core, the goal is {OF_CORES:.0%}"
            )
        if alone and result["gemm"] and result["device"] == "cpu":
            share = alone["gflops"] / result["gemm"]["products_gflops"]
            if not share >= OF_GEMM:
                short.append(f"{title}: one core reaches {share:.1%} of its GEMM's rate, the goal is {OF_GEMM:.0%}")
        if alone and torch and result["device"] == "cpu" and not alone["memory"] <= OF_MEMORY * torch["memory"]:
            short.append(
                f"{title}: a step takes {alone['memory'] / 2**20:.0f} MiB, PyTorch's {torch['memory'] / 2**20:.0f}; "
                f"the goal is {OF_MEMORY} ×"
            )
        tolerance = LOSSES if result["dtype"] == "float32" else LOSSES_IN_HALVES
        # PyTorch's data parallel ranks tell the losses of their own half of the batch
        whole = [r for i, r in enumerate(result["rows"]) if not i or not r["piece"].startswith("torch:data")]
        short += [f"{title}: {odd}" for odd in harness.disagreements(whole, tolerance)]
    return short


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", help=f"of {', '.join(MODELS)}, or dxLxhxsxbxv")
    parser.add_argument("--pieces", nargs="+", type=harness.piece, help="library:mode:ranks, such as parlinalg:2d:4")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", help="by default float32, on a GPU bfloat16")
    harness.in_turns(parser)
    args = parser.parse_args()
    gpu = args.device == "cuda"
    args.models = args.models or (["gpu"] if gpu else ["d512", "d1024"])
    args.pieces = args.pieces or (ON_GPU if gpu else PIECES)
    args.dtype = args.dtype or ("bfloat16" if gpu else "float32")
    return args


def main() -> int:
    args = arguments()
    begun = harness.begin(args, lambda: missing(args.pieces))
    if begun is None:
        return 1
    share, lacks = begun
    pieces = [p for p in args.pieces if p not in lacks]
    results = [
        measure(m, MODELS.get(m, m), pieces, args) for m in args.models
    ]  # fmt: skip
    short = verdicts(results)
    print("\n".join(short) or "All goals are reached, and all losses agree.")
    if args.json:
        harness.write_json(args.json, {"busy_at_start": share, "missing": lacks, "results": results, "short": short})
    return 0


if __name__ == "__main__":
    sys.exit(main())
