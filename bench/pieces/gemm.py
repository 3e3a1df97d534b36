"""One piece of `bench/train.py`: NumPy's float32 GEMM in one process, at the model's products and at 2048³.

usage: python gemm.py SIZES REPEATS

Tells seconds of all the products with weights that a step makes, forward and backward, and of one 2048³ product.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
from gpt import Sizes


def fastest(product: Callable[[], object], repeats: int) -> float:
    """The median seconds of a product, after one that is not counted."""
    product()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def blas() -> str:
    """NumPy's BLAS and the architecture whose kernels it runs."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return "unknown"
    found = next((i for i in threadpool_info() if i["user_api"] == "blas"), {})
    return " ".join(str(found[name]) for name in ("internal_api", "version", "architecture") if found.get(name))


def main() -> None:
    sizes, repeats = Sizes.parse(sys.argv[1]), int(sys.argv[2])
    rng = np.random.default_rng(0)

    def filled(*shape: int) -> np.ndarray:
        return rng.uniform(-1, 1, shape).astype(np.float32)

    seconds = flops = 0.0
    for (m, n, k), times in Counter(sizes.products).items():
        x, w, y = filled(m, k), filled(k, n), filled(m, n)
        each = fastest(lambda: np.matmul(x, w, out=y), repeats)  # noqa: B023
        each += fastest(lambda: np.matmul(y, w.T, out=x), repeats)  # noqa: B023
        each += fastest(lambda: np.matmul(x.T, y, out=w), repeats)  # noqa: B023
        seconds += times * each
        flops += times * 6 * m * n * k
    x, w, y = (filled(2048, 2048) for _ in range(3))
    square = fastest(lambda: np.matmul(x, w, out=y), repeats)
    told = {"products": seconds, "products_gflops": flops / seconds / 1e9, "square": square,
            "square_gflops": 2 * 2048**3 / square / 1e9, "blas": blas()}  # fmt: skip
    print(json.dumps({"seconds": [square], **told}), flush=True)


if __name__ == "__main__":
    main()
