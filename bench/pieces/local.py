"""One piece of `bench/matmul.py`: NumPy's GEMM in one process, with as many threads as the environment says.

usage: python local.py M N K REPEATS
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np


def main() -> None:
    m, n, k, repeats = (int(a) for a in sys.argv[1:])
    rng = np.random.default_rng(0)
    a, b, c = rng.uniform(-1, 1, (m, k)), rng.uniform(-1, 1, (k, n)), rng.uniform(-1, 1, (m, n))
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        np.matmul(a, b, out=c)
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"seconds": seconds[1:]}), flush=True)


if __name__ == "__main__":
    main()
