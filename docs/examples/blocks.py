"""x[4, 5] · w[5, 8] on two ranks under data and model parallelism: every rank's blocks, forward and backward.

Run it by `mpiexec -n 2 python docs/examples/blocks.py data expand` (or `1d expand`, `1d contract`).
"""

import sys
from dataclasses import replace
from itertools import zip_longest

import numpy as np

import parlinalg as pla
from parlinalg.schemes import discover

x = np.arange(20).reshape(4, 5)
w = np.arange(40).reshape(5, 8) % 7
dy = np.arange(32).reshape(4, 8) % 3  # the gradient of a loss with respect to y


def show(name: str, array: pla.DistArray) -> None:
    """Print the blocks of all ranks side by side."""
    columns = []
    for rank, block in enumerate(array.grid.world.share(array.block.tolist())):
        rows, cols = len(block), len(block[0])
        terms = "terms of " if array.layout.partial else ""
        columns.append([f"rank {rank}: {terms}{name}[{rows}, {cols}]", *str(np.array(block)).splitlines()])
    if array.grid.rank == 0:
        width = max(len(line) for column in columns for line in column) + 4
        print()
        for row in zip_longest(*columns, fillvalue=""):
            print("".join(cell.ljust(width) for cell in row).rstrip())


def move(array: pla.DistArray, layout: pla.Layout) -> pla.DistArray:
    """Redistribute, and print what that moved."""
    with pla.ledger(array.grid) as book:
        moved = array.redistribute(layout)
    for (op, axes), count in book.words.items():
        if array.grid.rank == 0:
            print(f"\n{op} along {' '.join(axes)}: rank 0 receives {count} words")
    return moved


def run(scheme: str, kind: str) -> None:
    """One product and its derivatives by a plan of a scheme, whose one axis takes both ranks."""
    chosen = discover()[scheme].SCHEME.leading(1)
    plan = chosen.expand if kind == "expand" else chosen.contract
    with pla.Grid({chosen.axes[0]: 2}) as grid:
        if grid.rank == 0:
            print(f"x {plan.x}, w {plan.w}, y {plan.y}")
        X, W, DY = (pla.distribute(a, grid, layout) for a, layout in ((x, plan.x), (w, plan.w), (dy, plan.y)))
        show("x", X)
        show("w", W)
        # both derivatives are products again, with the plan's roles permuted
        for name, role, a, b, right in (
            ("y", plan, X, W, x @ w),
            ("dx", plan.grad_x, DY, W.T, dy @ w.T),
            ("dw", plan.grad_w, X.T, DY, x.T @ dy),
        ):
            product = pla.matmul(a, b, plan=replace(role, y=role.y_work))  # left at work, to see the terms
            if product.layout.partial:
                show(name, product)
            product = move(product, role.y)
            show(name, product)
            assert np.array_equal(product.gather(), right)


run(*sys.argv[1:])
