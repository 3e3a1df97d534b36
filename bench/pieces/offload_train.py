"""Trains a GPT on one core, in memory or with everything offloaded, under a hard limit of address space if asked.

    python bench/pieces/offload_train.py '{"mode": "disk", "path": "/tmp/o", "layers": 9, "hidden": 256, "steps": 2}'

`mode` is "memory", "states" (the optimizer's states on disk) or "disk" (parameters and gradients too).  `limit`, in
bytes, is what may be added to the address space that the interpreter, its libraries and the started grid take
(RLIMIT_AS, as `ulimit -v` sets).  Tells a digest of all values and states, and times, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np


def address_space() -> int:
    """Bytes of address space in use."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def digest(model: Any, optimizer: Any) -> str:
    """Return a digest of all values and states, one at a time."""
    found = hashlib.blake2b(digest_size=16)
    entries = {e.parameter.name: e for e in optimizer.arrange()}
    for name, p in model.named_parameters():
        found.update(np.ascontiguousarray(p.block).data)
        for state in entries[name].names:
            found.update(np.ascontiguousarray(optimizer.flat.states.read(entries[name], state)).data)
    return found.hexdigest()


def main(options: dict[str, Any]) -> dict[str, Any]:
    """Train; returns what is told."""
    import parlinalg as pla
    from parlinalg import nn, offload, optim, schemes
    from parlinalg.autograd import ops
    from parlinalg.parallel.clip import clipping, examine

    threading.stack_size(1 << 18)  # a thread's stack counts as address space too
    scheme = schemes.discover()["serial"].SCHEME
    grid = pla.Grid({"axis": 1}, backend="numpy")
    np.ones((256, 256), np.float32) @ np.ones((256, 256), np.float32)  # OpenBLAS takes its buffers
    baseline = address_space()
    if options.get("limit"):
        resource.setrlimit(resource.RLIMIT_AS, (baseline + options["limit"],) * 2)
    batch, sequence, vocabulary, hidden = options.get("batch", 1), options.get("sequence", 16), 256, options["hidden"]
    model = nn.GPT(
        vocab_size=vocabulary, max_position_embeddings=sequence, hidden_size=hidden, num_attention_heads=4,
        num_hidden_layers=options["layers"], scheme=scheme, grid=grid, dtype="float32",
    )  # fmt: skip
    with ExitStack() as stack:
        if options["mode"] == "disk":
            parameters = stack.enter_context(offload.OffloadedParameters(options["path"]))
            parameters.initialize(model, 1)
        else:
            model.initialize(1)
        update = optim.AdamW(model.parameters(), 1e-3)
        if options["mode"] != "memory":
            tile = options.get("tile", 1 << 20)
            update.place(stack.enter_context(offload.DiskStates(options["path"], tile=tile)))
        rng, losses, times, updates = np.random.default_rng(0), [], [], []
        for step in range(options["steps"]):
            ids = rng.integers(0, vocabulary, (batch, sequence + 1))
            start = time.perf_counter()
            with nn.training_step(step):
                x, y = (pla.distribute(a, grid, model.ids_layout) for a in (ids[:, :-1].copy(), ids[:, 1:].copy()))
                loss = ops.cross_entropy(model(x), y)
                loss.backward()
            losses.append(loss.item())
            del loss
            middle = time.perf_counter()
            update.step(clipping(examine(model.parameters()).norm, 1.0))
            update.zero_grad()
            times.append(time.perf_counter() - start)
            updates.append(time.perf_counter() - middle)
        told = {
            "losses": losses, "digest": digest(model, update), "seconds": times, "update": updates,
            "parameters": sum(p.size for p in model.parameters()), "states": update.flat.states.nbytes,
            "baseline": baseline, "peak": _peak(), "limit": options.get("limit"),
        }  # fmt: skip
        if options["mode"] == "disk":
            parameters.discard()  # they do not fit in memory
    return told


def _peak() -> int:
    """The most address space that was in use."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmPeak"))) * 1024


if __name__ == "__main__":
    try:
        told = main(json.loads(sys.argv[1]))
    except MemoryError as error:
        told = {"failed": f"MemoryError: {error}"}
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
