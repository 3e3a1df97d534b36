"""One piece of `bench/train.py`: parlinalg's GPT, on the ranks it is started with.

usage: mpiexec -n P python gpt_parlinalg.py SCHEME SIZES WARM STEPS [BACKEND DTYPE]

SCHEME is serial, 1d, 2d, data, …: a mode of `parlinalg.launch`, with a shape as in 2d/1x2 where the number of ranks
does not give one; or zero1, zero2, zero3: data parallel with that stage.  In zero1-overlap and zero2-overlap gathers go
on in the next forward pass, and no barrier stands before a step, since they would progress in it uncounted; compare
with zero1-await and zero2-await, which have no barrier either.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from gpt import LEARNING_RATE, Memory, Sizes, batches, timed, weights

import parlinalg as pla
from parlinalg import tunables
from parlinalg.autograd import ops
from parlinalg.backend.kernels import activations


def prepared(mode: str, sizes: Sizes, backend: str, dtype: str) -> tuple[pla.Mesh, Callable[[int], float]]:
    """The mesh, and what makes step number i and returns its loss."""
    mesh = pla.launch({"parallel": parallel(mode)}, backend=backend)
    grid, stage = mesh.grid, int(mode[4]) if mode.startswith("zero") else 0
    model = pla.nn.GPT(
        vocab_size=sizes.vocab, max_position_embeddings=sizes.seq, hidden_size=sizes.d,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, grid=grid, dtype=dtype, seed=0,
        scheme=mesh.scheme.with_weights_cut("data") if stage == 3 else mesh.scheme,
    )  # fmt: skip
    shapes = {name: p.shape for name, p in model.named_parameters()}
    model.load_state_dict({name: value.reshape(shapes[name]) for name, value in weights(sizes).items()})
    handlers = [pla.parallel.ZeRO(stage, overlap_gather=overlaps(mode))] if stage else None
    pla.parallel.GradientReducer(model.parameters(), handlers)
    if stage == 3:
        pla.parallel.WeightGatherer(model)
    optimizer = pla.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    data = [tuple(pla.distribute(part, grid, model.ids_layout) for part in batch) for batch in batches(sizes)]

    def step(number: int) -> float:
        ids, targets = data[number % len(data)]
        loss = ops.cross_entropy(model(ids), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    return mesh, step


def main() -> None:
    mode, sizes = sys.argv[1], Sizes.parse(sys.argv[2])
    warm, steps = int(sys.argv[3]), int(sys.argv[4])
    backend, dtype = sys.argv[5:7] or ("numpy", "float32")
    mesh, step = prepared(mode, sizes, backend, dtype)
    grid = mesh.grid
    # numba is loaded once, as PyTorch is: both are there before memory is counted
    activations.gelu(np.linspace(-1, 1, tunables.COMPILED_SIZE, dtype=np.float32), approximate=True)
    memory = Memory() if backend == "numpy" else Pool(grid.backend.xp)
    barrier = (lambda: None) if mode.endswith(("-overlap", "-await")) else grid.world.barrier
    timed(step, warm, steps, barrier, grid.rank == 0, memory, threads=grid.threads, grid=grid.sizes)
    mesh.close()


def overlaps(mode: str) -> bool:
    """Whether gathers of a step overlap the next one."""
    return mode.endswith("-overlap")


class Pool(Memory):
    """The memory of CuPy's pool, which keeps what was once in use."""

    def __init__(self, cupy: Any) -> None:
        self.pool = cupy.get_default_memory_pool()

    def start(self) -> int:
        self.pool.free_all_blocks()
        return int(self.pool.used_bytes())

    def peak(self) -> int:
        return int(self.pool.total_bytes())


def parallel(mode: str) -> dict[str, object]:
    """The configuration of a mode on all ranks."""
    from parlinalg.comm import open_comm

    comm = open_comm()
    size = comm.size
    comm.free()
    if mode == "serial":
        return {}
    if mode == "data" or mode.startswith("zero"):
        return {"data": size}
    name, _, shape = mode.partition("/")
    given = {"shape": [int(n) for n in shape.split("x")]} if shape else {}
    return {"tensor": {"size": size, "mode": name, **given}}


if __name__ == "__main__":
    main()
