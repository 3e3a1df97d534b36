"""Whether the interfaces of emulated hosts receive what the ledger says: collectives, a product of every scheme,
attention over sequences that are cut, and steps of training, data parallel with every stage of ZeRO.

    python bench/cluster/hosts.py run --hosts 8 --rate 1gbit -- python bench/cluster/received.py [--mb 8] [--json FILE]

Every rank reads its interface's counter of received bytes around an operation, between barriers, and subtracts what the
barriers alone bring.  Frames carry headers, and acknowledgements come back: a few per cent are theirs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import harness
import numpy as np
import words

import parlinalg as pla
from parlinalg.autograd.ops import cross_entropy
from parlinalg.comm import Comm, open_comm
from parlinalg.parallel import GradientReducer, WeightGatherer, ZeRO
from parlinalg.schemes import discover

COUNTER = Path("/sys/class/net/e0/statistics/rx_bytes")
SETTLE = 0.05  # seconds in which the last acknowledgements arrive


def received() -> int:
    return int(COUNTER.read_text())


def around(comm: Comm, action: Callable[[], Any]) -> tuple[int, float]:
    """Bytes that this host's interface receives from a barrier before `action` to one after it, and the seconds."""
    comm.barrier()
    time.sleep(SETTLE)
    before = received()
    comm.barrier()  # nobody sends before everybody has read
    start = time.perf_counter()
    action()
    comm.barrier()
    seconds = time.perf_counter() - start
    time.sleep(SETTLE)
    return received() - before, seconds


def collectives(comm: Comm, elements: int) -> dict[str, Callable[[], Any]]:
    """Operations whose whole block has so many float64 elements."""
    n, p = elements // comm.size, comm.size
    whole, piece = np.full(n * p, 1.0), np.full(n, 1.0)
    part = [n // p] * p
    send, recv = np.full(n // p * p, 1.0), np.empty(n // p * p)
    return {
        "all_gather": lambda: comm.all_gather(piece, whole, [n] * p),
        "reduce_scatter": lambda: comm.reduce_scatter(whole, piece, [n] * p),
        "all_reduce": lambda: comm.all_reduce(whole),
        "broadcast": lambda: comm.broadcast(whole, 0),
        "broadcast, nonblocking": lambda: comm.broadcast(whole, 0, wait=False).wait(),
        "all_to_all": lambda: comm.all_to_all(send, part, recv, part),
        "composed all_reduce": lambda: (
            comm.reduce_scatter(whole, piece, [n] * p), comm.all_gather(piece, whole, [n] * p),
        ),
    }  # fmt: skip


def products(comm: Comm, side: int) -> dict[str, Callable[[], Any]]:
    """A product of every scheme and its derivatives, x[4, side / 4, side] w[side, side]; the grids stay open."""
    found = {}
    for name, file in discover().items():
        if file.SCHEME.axes:
            grid = pla.Grid(words.sizes_for(file, comm.size), comm)
            plan, x, w = file.SCHEME.expand, (4, side // 4, side), (side, side)
            found[f"product: {name}"] = lambda plan=plan, x=x, w=w, grid=grid: words.counted(plan, x, w, grid)
    return found


def sequences(comm: Comm, tokens: int) -> dict[str, Callable[[], Any]]:
    """Attention's forward and backward pass, causal, of one sequence cut over all hosts, with a head of 64 a host."""
    serial, p = discover()["serial"].SCHEME, comm.size
    both = max(d for d in range(1, p) if p % d == 0)
    cuts = {
        "ring": (serial.with_sequence("s"), {"s": p}),
        "Ulysses": (serial.with_sequence("u", ulysses=True), {"u": p}),
        f"ring {p // both} × Ulysses {both}": (
            serial.with_sequence("u", ulysses=True).with_sequence("s"), {"s": p // both, "u": both},
        ),
        "Megatron's cuts": (discover()["1d with sequence cuts"].SCHEME, {"t": p}),
    }  # fmt: skip
    found = {}
    for name, (scheme, sizes) in cuts.items():
        grid = pla.Grid(sizes, comm)
        layer = pla.nn.Attention(64 * p, p, scheme, grid, causal=True, seed=1, name="a")
        order = pla.sequence_order(tokens, sizes.get("s", 1))
        x = pla.ones((1, tokens, 64 * p), grid, scheme.residual, "float32")

        def passes(layer: Any = layer, order: np.ndarray = order, x: Any = x) -> None:
            with pla.no_sync(), pla.nn.sequence_positions(order):  # weights' gradients are of products, counted above
                layer(pla.Tensor(x, requires_grad=True)).backward(x)

        found[f"attention: {name}"] = passes
    return found


def steps(comm: Comm, hidden: int) -> dict[str, Callable[[], Any]]:
    """A step of a GPT of 2 layers over all hosts, each with a sample of its own; the ledger's words are of weights."""
    found = {}
    for stage in range(4):
        grid = pla.Grid({"data": comm.size}, comm)
        scheme = discover()["zero3" if stage == 3 else "data"].SCHEME
        model = pla.nn.GPT(
            vocab_size=64, max_position_embeddings=4, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4,
            scheme=scheme, grid=grid, dtype="float32", seed=1,
        )  # fmt: skip
        GradientReducer(model.parameters(), [ZeRO(stage)] if stage else [])
        if stage == 3:
            WeightGatherer(model)
        optimizer = pla.optim.AdamW(model.parameters(), lr=1e-3)
        ids = np.random.default_rng(0).integers(0, 64, (comm.size, 4))
        x, y = (pla.distribute(each, grid, model.ids_layout) for each in (ids, ids[:, ::-1].copy()))

        def step(model: Any = model, optimizer: Any = optimizer, x: Any = x, y: Any = y) -> None:
            cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        found[f"step: {f'ZeRO {stage}' if stage else 'data parallel'}"] = step
    return found


def measure(comm: Comm, actions: dict[str, Callable[[], Any]], repeats: int) -> list[dict[str, Any]]:
    rows = []
    for name, action in actions.items():
        action()  # connections and communicators are made on first use
        null = sorted(around(comm, lambda: None)[0] for _ in range(3))[1]
        tries = [around(comm, action) for _ in range(repeats)]
        with pla.ledger(comm) as book:
            action()
        mine = {
            "ledger": book.bytes.total(),
            "received": sorted(t[0] for t in tries)[repeats // 2] - null,
            "seconds": sorted(t[1] for t in tries)[repeats // 2],
        }
        everyone = comm.share(mine)
        ledger, real = (sum(e[key] for e in everyone) for key in ("ledger", "received"))
        rows.append({
            "operation": name, "ledger": ledger, "received": real, "ratio": real / ledger if ledger else None,
            "most": max((e["received"] / e["ledger"] for e in everyone if e["ledger"]), default=None),
            "seconds": max(e["seconds"] for e in everyone),
            "most_bytes": max(e["received"] for e in everyone),
        })  # fmt: skip
    return rows


def show(rows: list[dict[str, Any]], ranks: int) -> str:
    body = [
        (
            r["operation"], f"{r['ledger'] / 1e6:.2f}", f"{r['received'] / 1e6:.2f}",
            f"{r['ratio']:.3f}" if r["ratio"] else "–",
            f"{r['most']:.3f}" if r["most"] else "–", f"{1e3 * r['seconds']:.0f}",
        )
        for r in rows
    ]  # fmt: skip
    head = ("operation", "ledger MB", "received MB", "received / ledger", "of the worst host", "ms")
    return f"Bytes received by {ranks} hosts together\n\n{harness.table(head, body)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=8, help="size of a collective's whole block")
    parser.add_argument("--side", type=int, default=1024, help="of the products' matrices")
    parser.add_argument("--tokens", type=int, default=1024, help="of the sequence that attention meets")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["collectives", "products", "sequences", "steps"])
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()
    if not COUNTER.exists():
        print(f"no {COUNTER}: start this by bench/cluster/hosts.py", file=sys.stderr)
        return 2
    comm = open_comm()
    rows = []
    if args.only in (None, "collectives"):
        rows += measure(comm, collectives(comm, int(args.mb * 1e6 / 8)), args.repeats)
    if args.only in (None, "products"):
        rows += measure(comm, products(comm, args.side), args.repeats)
    if args.only in (None, "sequences"):
        rows += measure(comm, sequences(comm, args.tokens), args.repeats)
    if args.only in (None, "steps"):
        rows += measure(comm, steps(comm, args.side // 4), args.repeats)
    if comm.rank == 0:
        print(show(rows, comm.size), flush=True)
        if args.json:
            harness.write_json(args.json, {"ranks": comm.size, "mb": args.mb, "side": args.side, "rows": rows})
    comm.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
