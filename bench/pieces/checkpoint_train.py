"""Trains a GPT with and without a save in the background, in turns, and tells how long the steps took, as JSON.

    mpiexec -n 2 python bench/pieces/checkpoint_train.py '{"path": "/tmp/c", "hidden": 512, "layers": 13, "steps": 50}'

The ranks are data parallel.  The time is that of all steps until the checkpoint is complete.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def main(options: dict[str, Any]) -> dict[str, Any]:
    """Train; returns what is told."""
    import parlinalg as pla
    from parlinalg import nn, optim, schemes
    from parlinalg.autograd import ops
    from parlinalg.comm import open_comm
    from parlinalg.parallel import GradientReducer
    from parlinalg.train.checkpoint import Checkpoints

    world = open_comm()
    scheme = schemes.discover()["serial"].SCHEME.with_data("data")
    grid = pla.Grid({"data": world.size}, world, "numpy")
    batch, sequence, vocabulary = options["batch"], options["sequence"], 256
    model = nn.GPT(
        vocab_size=vocabulary, max_position_embeddings=sequence, hidden_size=options["hidden"], num_attention_heads=8,
        num_hidden_layers=options["layers"], scheme=scheme, grid=grid, dtype="float32",
    ).initialize(1)  # fmt: skip
    GradientReducer(model.parameters())
    update = optim.AdamW(model.parameters(), 1e-3)
    folder = Path(options["path"])
    checkpoints = Checkpoints(folder, world, dict(model.named_parameters()), update, keep=1)
    rng, number = np.random.default_rng(0), 0

    def steps(count: int, save_at: int = -1) -> dict[str, float]:
        nonlocal number
        copied = 0.0
        world.barrier()
        start = time.perf_counter()
        for i in range(count):
            number += 1
            ids = rng.integers(0, vocabulary, (batch, sequence + 1))
            with nn.training_step(number):
                x, y = (pla.distribute(a, grid, model.ids_layout) for a in (ids[:, :-1].copy(), ids[:, 1:].copy()))
                loss = ops.cross_entropy(model(x), y)
                loss.backward()
            update.step()
            update.zero_grad()
            if save_at >= 0:
                checkpoints.poll()
            if i == save_at:
                before = time.perf_counter()
                checkpoints.save(number)
                copied = time.perf_counter() - before
        checkpoints.finish()
        world.barrier()
        return {"seconds": time.perf_counter() - start, "copying": copied}

    steps(2, 0)  # everything is there, and a file has been written
    found: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    for turn in range(options["rounds"]):
        for kind in ("without", "with") if turn % 2 == 0 else ("with", "without"):
            found[kind].append(steps(options["steps"], options["steps"] // 5 if kind == "with" else -1))
    nbytes = sum(file.stat().st_size for file in folder.rglob("*.safetensors")) if world.rank == 0 else 0
    complete = checkpoints.steps()
    grid.close()
    return {"bytes": nbytes, "parameters": sum(p.size for p in model.parameters()), "complete": complete, **found}


if __name__ == "__main__":
    told = main(json.loads(sys.argv[1]))
    if told["bytes"]:  # rank 0
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
