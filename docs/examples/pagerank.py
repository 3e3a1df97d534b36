# PageRank: mpiexec -n 4 python pagerank.py 700
import sys

import numpy as np

import parlinalg as pla

n = int(sys.argv[1]) if len(sys.argv) > 1 else 700

rng = np.random.default_rng(0)
source, target = rng.integers(n, size=5 * n), rng.integers(n, size=5 * n) ** 2 // n  # the first pages are popular

links = pla.zeros((n, n))
links[target, source] = 1.0
count = pla.sum(links, axis=0)
P = pla.where(count > 0, links / pla.maximum(count, 1), 1 / n)  # a page without links leads anywhere

rank, last = pla.full(n, 1 / n), pla.zeros(n)
while pla.max(abs(rank - last)) > 1e-16:
    rank, last = 0.85 * (P @ rank) + 0.15 / n, rank

best = pla.argsort(rank, descending=True)[:5]
pla.print0("the best pages:", best.tolist())
pla.print0("their ranks:", rank[best].tolist())
half = pla.searchsorted(pla.cumulative_sum(rank), 0.5)
pla.print0("half of the ranks are on the first", int(half), "pages")
