"""How long a sequence ranks can train on in the same memory a rank: ring attention against one rank.

    python bench/long.py [--ranks 1 2 4 8] [--limit 96] [--layers 8] [--hidden 128] [--json FILE]

The limit is on all that Python and NumPy hold of a rank at the most (tracemalloc's peak: parameters, gradients, AdamW's
states, activations, blocks on their way round the ring), measured in whole training steps of a Llama without
recomputation.  For every number of ranks the longest sequence within the limit is sought; what one rank can hold is
trained by all, to the same losses; and the activations that the tape keeps a token of a rank are told.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import harness
import numpy as np

MIB = 2**20
WANTED = 6.5
"""How many times as long a sequence eight ranks are to train on."""
EQUAL = 1e-12


class Rank:
    """A model in training on sequences of any length, cut over all ranks."""

    def __init__(self, args: argparse.Namespace) -> None:
        import parlinalg as pla
        from parlinalg import nn, optim
        from parlinalg.autograd import ops
        from parlinalg.comm import open_comm
        from parlinalg.parallel import GradientReducer
        from parlinalg.schemes import discover

        os.environ["PARLINALG_SHARED"] = "0"  # what the ranks have in common is not in tracemalloc's books
        self.args, self.world = args, open_comm()
        ranks = self.world.size
        scheme = discover()["serial"].SCHEME
        if args.ulysses > 1:
            scheme = scheme.with_sequence("u", ulysses=True)
        if ranks > args.ulysses:
            scheme = scheme.with_sequence("s")
        self.ring = ranks // args.ulysses
        self.grid = pla.Grid({"s": self.ring, "u": args.ulysses}, self.world, "numpy")
        self.pla, self.nn, self.ops = pla, nn, ops

        def make(layers: int) -> None:
            self.model = nn.Llama(
                vocab_size=args.vocabulary, max_position_embeddings=2**30, hidden_size=args.hidden,
                num_hidden_layers=layers, num_attention_heads=args.heads, intermediate_size=args.hidden * 8 // 3,
                scheme=scheme, grid=self.grid, dtype=args.dtype, seed=1,
            )  # fmt: skip
            GradientReducer(self.model.parameters(), first_bucket=MIB // 4, bucket=MIB)
            self.optimizer = optim.AdamW(self.model.parameters(), lr=1e-3)
            self.steps = 0

        make(1)
        self.step(64 * ranks)  # what is imported, compiled and remembered then is no part of a training
        tracemalloc.start()
        make(args.layers)

    def loss(self, length: int) -> Any:
        """The mean loss of a sequence, whose tokens each rank cuts out of it in the order that balances the ring."""
        from parlinalg.sequence import sequence_order

        numbers = np.random.default_rng(self.steps).integers(0, self.args.vocabulary, (2, 1, length), dtype=np.int32)
        order = sequence_order(length, self.ring, self.args.order)
        ids, targets = (self.pla.distribute(a[:, order], self.grid, self.model.ids_layout) for a in numbers)
        with self.nn.training_step(self.steps), self.nn.sequence_positions(order):
            return self.ops.cross_entropy(self.model(ids), targets)

    def step(self, length: int) -> float:
        loss = self.loss(length)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return float(loss.item())

    def peak(self, length: int) -> int:
        """Bytes that the rank which has the most holds in a step."""
        gc.collect()
        tracemalloc.reset_peak()
        self.step(length)
        return int(max(self.world.share(tracemalloc.get_traced_memory()[1])))

    def longest(self, limit: int) -> dict[str, int]:
        """The longest sequence within the limit, a multiple of 2 tokens a rank, and what it takes."""
        self.step(64)  # makes the optimizer's states
        each = 2 * self.world.size
        low, high = 1, 0
        peaks = {8: self.peak(8 * each), 64: self.peak(64 * each)}
        if peaks[8] > limit:
            raise SystemExit(f"{8 * each} tokens take {peaks[8] / MIB:.1f} MiB already: give a higher --limit")
        while not high or high - low > max(1, low // 200):
            if not high:  # from the line through the last two
                a, b = sorted(peaks)[-2:]
                slope = max(1, (peaks[b] - peaks[a]) // (b - a))
                guess = max(b + 1, b + (limit - peaks[b]) // slope)
            else:
                guess = (low + high) // 2
            peaks[guess] = self.peak(guess * each)
            fits = [n for n, p in peaks.items() if p <= limit]
            low, high = max(fits, default=0), min((n for n, p in peaks.items() if p > limit), default=0)
        return {"length": low * each, "peak": peaks[low], "beyond": high * each, "beyond_peak": peaks[high]}

    def kept(self, length: int) -> int:
        """Bytes that the tape keeps of a forward pass, of the rank that has the most."""
        from parlinalg.autograd.saved import saved

        return int(max(self.world.share(sum(row.nbytes for row in saved(self.loss(length))))))


def piece(args: argparse.Namespace) -> dict[str, Any]:
    """The work for one number of ranks."""
    rank = Rank(args)
    found: dict[str, Any] = {"ranks": rank.world.size}
    if args.lengths:
        found["losses"] = [rank.step(args.lengths[0]) for _ in range(3)]
    else:
        found |= rank.longest(int(args.limit * MIB))
        found["kept"] = {n: rank.kept(n * rank.world.size) for n in args.tokens}
    rank.world.barrier()
    return found if rank.world.rank == 0 else {}


def show(rows: list[dict[str, Any]], tokens: list[int]) -> str:
    base = rows[0]["length"] / rows[0]["ranks"]
    head = ("ranks", "longest", "peak MiB", "times one rank", *(f"KiB a token, s/P = {n}" for n in tokens))
    body = [
        (
            r["ranks"], r["length"], f"{r['peak'] / MIB:.1f}", f"{r['length'] / base:.2f}",
            *(f"{r['kept'][str(n)] / n / 1024:.2f}" for n in tokens),
        )
        for r in rows
    ]  # fmt: skip
    return harness.table(head, body)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--limit", type=float, default=96, help="MiB a rank")
    parser.add_argument("--ulysses", type=int, default=1, help="of the ranks, those that exchange heads")
    parser.add_argument("--order", default="zigzag")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=256)
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 64, 128], help="s/P of the tape's bytes")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--lengths", type=int, nargs="+", help="used by this script itself")
    parser.add_argument("--piece", action="store_true", help="used by this script itself")
    args = parser.parse_args()
    if args.piece:
        if found := piece(args):
            print(json.dumps(found))
        return 0
    harness.stop_cleanly()
    options = [f"--{n}={getattr(args, n)}" for n in (
        "limit", "order", "layers", "hidden", "heads", "vocabulary", "dtype",
    )]  # fmt: skip
    options += ["--tokens", *map(str, args.tokens)]

    def run(ranks: int, *more: str) -> Any:
        ulysses = args.ulysses if ranks % args.ulysses == 0 else 1
        program = [sys.executable, __file__, "--piece", f"--ulysses={ulysses}", *options, *more]
        return harness.run([*harness.mpiexec(), "-n", str(ranks), *program], harness.environment(ranks), 1200)

    rows = []
    for ranks in args.ranks:
        rows.append(run(ranks))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    shared = rows[0]["length"]
    losses = {
        ranks: run(ranks, "--lengths", str(shared))["losses"]
        for ranks in dict.fromkeys((args.ranks[0], args.ranks[-1]))
    }
    first, last = losses[args.ranks[0]], losses[args.ranks[-1]]
    error = max(abs(a / b - 1) for a, b in zip(first, last, strict=True))
    ratio = rows[-1]["length"] / rows[0]["length"]
    enough = ratio >= WANTED * rows[-1]["ranks"] / 8 / rows[0]["ranks"] and error <= EQUAL
    print(f"Llama, {args.layers} layers, hidden {args.hidden}, {args.dtype}, {args.limit:g} MiB a rank\n")
    print(show(rows, args.tokens))
    print(
        f"\n{rows[-1]['ranks']} ranks: {ratio:.2f} times as long ({WANTED} are wanted of 8); losses of {shared} tokens "
        f"differ by {error:.1e}: {'yes' if enough else 'NO'}"
    )
    if args.json:
        harness.write_json(args.json, {"arguments": vars(args), "rows": rows, "ratio": ratio, "error": error})
    return not enough


if __name__ == "__main__":
    sys.exit(main())
