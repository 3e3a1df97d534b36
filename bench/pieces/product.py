"""One piece of `bench/matmul.py`: `A @ B` of parlinalg, on the ranks it is started with.

usage: mpiexec -n P python product.py M N K REPEATS [PM PN PK]

A, B and C are cut evenly over all ranks, on the grid `plan_matmul` finds unless one is given.  Rank 0 prints JSON: the
seconds of every repeat, the longest over the ranks.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

import parlinalg as pla
from parlinalg import Layout


def main() -> None:
    m, n, k, repeats, *factors = (int(a) for a in sys.argv[1:])
    world = pla.Grid({"p": ranks()})
    plan = pla.plan_matmul(m, n, k, ranks=world.size)
    sizes = dict(zip("mnk", factors)) if factors else plan.sizes
    grid = pla.Grid(sizes, world.world)
    # Whole rows travel in every gather: the pieces lie one after the other in memory and need no packing.
    a = filled((m, k), Layout(("m", "n"), "k"), grid, 0)
    b = filled((k, n), Layout(("k", "m"), "n"), grid, 1)
    seconds = []
    c = a @ b  # not counted: it makes the communicators and loads the BLAS
    for _ in range(repeats):
        grid.world.barrier()
        start = time.perf_counter()
        pla.matmul(a, b, out=c)
        took = time.perf_counter() - start
        grid.world.barrier()  # ranks that are done leave the cores to the others
        seconds.append(max(grid.world.share(took)))
    blocks = grid.world.share([c.block.size, a.block.size, b.block.size])
    with pla.ledger(grid) as book:
        a @ b
    words = grid.world.share(book.words.total())
    residual = check(a, b, c)
    if grid.rank == 0:
        told = {"seconds": seconds, "grid": grid.sizes, "layout": repr(c.layout), "words": max(words),
                "formula": plan.words if plan.sizes == sizes else None, "blocks": blocks, "residual": residual,
                "threads": grid.threads}  # fmt: skip
        print(json.dumps(told), flush=True)
    grid.close()
    world.close()


def ranks() -> int:
    from parlinalg.comm import open_comm

    comm = open_comm()
    size = comm.size
    comm.free()
    return size


def filled(shape: tuple[int, int], layout: Layout, grid: pla.Grid, seed: int) -> pla.DistArray:
    """Uniform random numbers: never zeros, whose pages a system may share."""
    block = np.random.default_rng([seed, grid.rank]).uniform(-1, 1, grid.block_shape(layout, shape))
    return pla.from_blocks(block, grid, layout, shape)


def check(a: pla.DistArray, b: pla.DistArray, c: pla.DistArray) -> float:
    """Return how far C v is from A (B v), by the sizes of the terms: a wrong product must not be fast."""
    v = np.random.default_rng(2).uniform(-1, 1, b.shape[1])
    x = pla.distribute(v, a.grid, Layout(None))
    one, two = (c @ x).gather(), (a @ (b @ x)).gather()
    return float(np.abs(one - two).max() / max(np.abs(two).max(), 1e-300))


if __name__ == "__main__":
    main()
