"""One piece of `bench/matmul.py`: Heat's matmul, on the ranks it is started with.

usage: mpiexec -n P python heat_product.py M N K REPEATS
"""

from __future__ import annotations

import json
import os
import sys
import time

import heat as ht
import torch
from mpi4py import MPI


def main() -> None:
    m, n, k, repeats = (int(a) for a in sys.argv[1:])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    comm = MPI.COMM_WORLD
    a = ht.random.rand(m, k, dtype=ht.float64, split=0)
    b = ht.random.rand(k, n, dtype=ht.float64, split=0)
    seconds = []
    c = None
    for _ in range(repeats + 1):
        del c
        comm.Barrier()
        start = time.perf_counter()
        c = ht.matmul(a, b)
        seconds.append(comm.allreduce(time.perf_counter() - start, MPI.MAX))
    if comm.rank == 0:
        print(json.dumps({"seconds": seconds[1:], "split": c.split}), flush=True)


if __name__ == "__main__":
    main()
