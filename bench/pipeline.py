"""Training a GPT through pipelines: every schedule against what the simulator says, and against PyTorch.

PyTorch's `torch.distributed.pipelining` (1F1B, over gloo) and our schedules train the same GPT in float32 from the same
weights on the same batches, cut into the same stages and microbatches, one BLAS thread a rank, and must tell the same
losses (but for the asynchronous ones, whose weights are older).  All take turns: every round runs each of them once;
figures are medians over all rounds.

After its steps each of our pieces measures what its stages' passes, messages and steps take, apart from any schedule
and all ranks at the same time; of these the simulator makes the prediction.

    python bench/pipeline.py                        # 2 ranks, all schedules: about 15 minutes
    python bench/pipeline.py --ranks 2 4            # on 4 ranks too
    python bench/pipeline.py --pieces torch:1f1b:2 parlinalg:1f1b:2 --rounds 3

Asynchronous schedules pass several batches (`--batches`) between two flushes, with a step of the optimizer each, so
that they do as much arithmetic a step as the others; their time is that of one batch.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from typing import Any

import harness
from harness import BENCH, Unavailable

sys.path.insert(0, str(BENCH / "pieces"))
from gpt import Sizes
from train import free_port

MODEL = "512x4x8x256x8x2048"
"""d, layers, heads, sequence, batch, vocabulary; the head is not tied to the embedding: 14.8 million parameters."""
OURS = ["gpipe", "1f1b", "interleaved", "chimera", "zb-h1", "zb-v", "pipedream", "pipedream-2bw"]
LATE = ("pipedream", "pipedream-2bw")
THEIRS = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe"}
CHUNKS = {"interleaved": 2, "zb-v": 2}
"""Stages a rank, where it is not one."""
OF_TORCH = 1.1
"""The least tokens/s of our best schedule, as a multiple of PyTorch's 1F1B."""
OF_PREDICTION = 0.1
"""How far the measured time may lie from the simulator's, relative."""
LOSSES = 1e-3
"""How far losses may lie apart after a few steps, relative."""


def pieces_on(ranks: int) -> list[str]:
    """Return what is run on so many ranks: library, schedule and ranks."""
    return [f"torch:1f1b:{ranks}", *(f"parlinalg:{name}:{ranks}" for name in OURS)]


def counts(layers: int, stages: int) -> list[int]:
    """The layers of each stage: as many blocks in each as in the others, the first ones one more; the embedding with
    the first, the head with the last."""
    if layers < stages:
        raise ValueError(f"{layers} blocks do not fill {stages} stages; take a model of at least {stages} layers")
    shared = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    shared[0] += 1
    shared[-1] += 1
    return shared


def command(piece: str, sizes: Sizes, model: str, args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the command that starts a piece, and its environment: one BLAS thread a rank."""
    library, schedule, ranks = piece.split(":")
    env = harness.environment(int(ranks), dict.fromkeys(
        ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
    ))  # fmt: skip
    stages = int(ranks) * (CHUNKS.get(schedule, 1) if library == "parlinalg" else 1)
    said = [model, str(args.microbatches), ",".join(map(str, counts(sizes.layers, stages)))]
    said += [str(args.warm), str(args.steps)]
    if library == "torch":
        env["GLOO_SOCKET_IFNAME"] = "lo"
        run = ["-m", "torch.distributed.run", "--nproc-per-node", ranks, "--master-addr", "127.0.0.1"]
        program = str(BENCH / "pieces" / "pipeline_torch.py")
        return [sys.executable, *run, "--master-port", str(free_port()), program, THEIRS[schedule], *said], env
    program = str(BENCH / "pieces" / "pipeline_parlinalg.py")
    return [*harness.mpiexec(), "-n", ranks, sys.executable, program, schedule, *said, str(args.batches)], env


def missing(pieces: list[str], sizes: Sizes) -> dict[str, str]:
    """Pieces that cannot be had here, with the reason."""
    lacks: dict[str, str] = {}
    for piece in pieces:
        library, schedule, ranks = piece.split(":")
        stages = int(ranks) * (CHUNKS.get(schedule, 1) if library == "parlinalg" else 1)
        if stages > sizes.layers:
            lacks[piece] = f"{stages} stages, but the model has {sizes.layers} blocks: take one of more layers"
        elif library == "torch" and find_spec("torch") is None:
            lacks[piece] = "no PyTorch: pip install torch --index-url https://download.pytorch.org/whl/cpu"
        elif library == "parlinalg":
            try:
                harness.mpiexec()
            except Unavailable as reason:
                lacks[piece] = str(reason)
    return lacks


def measure(pieces: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """The pieces in turns."""
    told: dict[str, list[dict[str, Any]]] = {piece: [] for piece in pieces}
    sizes, others = Sizes.parse(args.model), []
    for turn in range(args.rounds):
        for piece in pieces:
            others.append(harness.busy(0.2))
            line, env = command(piece, sizes, args.model, args)
            told[piece].append(harness.run(line, env, timeout=300 + 60 * (args.warm + args.steps)))
        print(
            f"round {turn + 1} of {args.rounds}, others used {100 * max(others):.0f}% of the cores at most",
            file=sys.stderr,
        )
    return {
        "sizes": vars(sizes), "microbatches": args.microbatches, "tokens": sizes.tokens, "flops": sizes.flops,
        "rows": [row(piece, runs, sizes) for piece, runs in told.items()],
        "busy_before": {"median": harness.spread(others)[1], "most": max(others)},
    }  # fmt: skip


def row(piece: str, runs: list[dict[str, Any]], sizes: Sizes) -> dict[str, Any]:
    """The figures of one piece: seconds are those of one batch."""
    batches = runs[0].get("batches", 1)
    low, middle, high = harness.spread([s / batches for r in runs for s in r["seconds"]])
    found = {
        "piece": piece, "ranks": int(piece.rpartition(":")[2]), "median_s": middle, "quartiles_s": [low, high],
        "tokens_per_s": sizes.tokens / middle, "gflops": sizes.flops / middle / 1e9, "losses": runs[0]["losses"],
        "runs": runs,
    }  # fmt: skip
    if "predicted" in runs[0]:
        found["predicted_s"] = harness.spread([r["predicted"] / batches for r in runs])[1]
        found["bubble"] = harness.spread([r["bubble"] for r in runs])[1]
        found["of_predicted"] = middle / found["predicted_s"]
    return found


def schedule_of(row: dict[str, Any]) -> str:
    name: str = row["piece"].split(":")[1]
    return name


def best(rows: list[dict[str, Any]], ranks: int) -> dict[str, Any] | None:
    """Our fastest synchronous schedule on so many ranks."""
    ours = [
        r for r in rows if r["ranks"] == ranks and r["piece"].startswith("parlinalg") and schedule_of(r) not in LATE
    ]
    return max(ours, key=lambda r: r["tokens_per_s"], default=None)


def theirs(rows: list[dict[str, Any]], ranks: int) -> dict[str, Any] | None:
    """PyTorch's 1F1B on so many ranks."""
    return next((r for r in rows if r["piece"] == f"torch:1f1b:{ranks}"), None)


def show(result: dict[str, Any]) -> str:
    lines = []
    for r in result["rows"]:
        torch = theirs(result["rows"], r["ranks"])
        predicted = f"{1e3 * r['predicted_s']:.0f}" if "predicted_s" in r else ""
        off = f"{100 * (r['of_predicted'] - 1):+.1f}%" if "of_predicted" in r else ""
        bubble = f"{r['bubble']:.3f}" if "bubble" in r else ""
        ratio = f"{r['tokens_per_s'] / torch['tokens_per_s']:.2f}" if torch else ""
        lines.append((
            r["piece"], f"{r['tokens_per_s']:.0f}", f"{1e3 * r['median_s']:.0f}",
            f"{1e3 * r['quartiles_s'][0]:.0f}–{1e3 * r['quartiles_s'][1]:.0f}", predicted, off, bubble, ratio,
            f"{r['losses'][0]:.4f} → {r['losses'][-1]:.4f}",
        ))  # fmt: skip
    head = ("piece", "tokens/s", "median ms", "quartiles", "predicted ms", "off by", "bubble", "of torch", "loss")
    s, crowd = result["sizes"], result["busy_before"]
    title = (
        f"d {s['d']}, {s['layers']} layers, {s['heads']} heads, sequence {s['seq']}, batch {s['batch']}, vocabulary "
        f"{s['vocab']}; float32, {result['microbatches']} microbatches, {result['flops'] / 1e9:.1f} GFLOP a batch"
    )
    others = f"Others used {100 * crowd['median']:.0f}% of the cores between pieces (median)"
    return f"{title}\n\n{harness.table(head, lines)}\n\n{others}; most {100 * crowd['most']:.0f}%."


def verdicts(result: dict[str, Any]) -> list[str]:
    """Return what falls short of the goals, and losses that do not agree."""
    rows, short = result["rows"], []
    for ranks in sorted({r["ranks"] for r in rows}):
        ours, torch = best(rows, ranks), theirs(rows, ranks)
        if ours and torch and ranks == 2:
            ratio = ours["tokens_per_s"] / torch["tokens_per_s"]
            if not ratio >= OF_TORCH:
                short.append(
                    f"{ours['piece']}, our best, is {ratio:.3f} × {torch['piece']}; the goal is {OF_TORCH}"
                )  # fmt: skip
    for r in rows:
        if "of_predicted" in r and r["ranks"] <= harness.cores() and not abs(r["of_predicted"] - 1) <= OF_PREDICTION:
            short.append(
                f"{r['piece']} took {1e3 * r['median_s']:.0f} ms, the simulator says {1e3 * r['predicted_s']:.0f}; the "
                f"goal is within {OF_PREDICTION:.0%}"
            )
    prompt = [r for r in rows if schedule_of(r) not in LATE]
    return short + harness.disagreements(prompt, LOSSES)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="d, layers, heads, sequence, batch, vocabulary (%(default)s)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2], help="of all pieces, unless --pieces names them")
    parser.add_argument(
        "--pieces", nargs="+", type=harness.piece, help="library:schedule:ranks, such as parlinalg:zb-h1:2"
    )
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--batches", type=int, default=4, help="between two flushes of an asynchronous schedule")
    harness.in_turns(parser)
    args = parser.parse_args()
    args.pieces = args.pieces or [piece for ranks in args.ranks for piece in pieces_on(ranks)]
    return args


def main() -> int:
    args = arguments()
    begun = harness.begin(args, lambda: missing(args.pieces, Sizes.parse(args.model)))
    if begun is None:
        return 1
    share, lacks = begun
    result = measure([p for p in args.pieces if p not in lacks], args)
    print(f"\n{show(result)}\n", flush=True)
    short = verdicts(result)
    print("\n".join(short) or "All goals are reached, and all losses agree.")
    if args.json:
        harness.write_json(args.json, {"busy_at_start": share, "missing": lacks, **result, "short": short})
    return 0


if __name__ == "__main__":
    sys.exit(main())
