"""One piece of `bench/train.py`: the GEMM alone, at the model's products and at a large square.

usage: python gemm.py SIZES REPEATS [DEVICE DTYPE]

NumPy's in float32 in this process, at 2048³ too; on a GPU (DEVICE cuda) cuBLAS's, through PyTorch, at 8192³.
Tells seconds of all the products with weights that a step makes, forward and backward, and of the square one.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from typing import Any

import numpy as np
from gpt import Sizes


class Host:
    """NumPy's matrices."""

    square = 2048

    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def filled(self, *shape: int) -> Any:
        return self.rng.uniform(-1, 1, shape).astype(np.float32)

    def seconds(self, x: Any, w: Any, out: Any) -> float:
        start = time.perf_counter()
        np.matmul(x, w, out=out)
        return time.perf_counter() - start


class Gpu(Host):
    """PyTorch's."""

    square = 8192

    def __init__(self, dtype: str) -> None:
        import torch

        self.torch, self.dtype = torch, getattr(torch, dtype)

    def filled(self, *shape: int) -> Any:
        return self.torch.rand(shape, device="cuda").sub_(0.5).to(self.dtype)

    def seconds(self, x: Any, w: Any, out: Any) -> float:
        self.torch.cuda.synchronize()
        start = time.perf_counter()
        self.torch.matmul(x, w, out=out)
        self.torch.cuda.synchronize()
        return time.perf_counter() - start


def median(on: Host, repeats: int, x: Any, w: Any, out: Any) -> float:
    """The median seconds of a product, after one that is not counted."""
    return float(np.median([on.seconds(x, w, out) for _ in range(repeats + 1)][1:]))


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
    device, dtype = sys.argv[3:5] or ("cpu", "float32")
    on = Gpu(dtype) if device == "cuda" else Host()
    seconds = flops = 0.0
    for (m, n, k), times in Counter(sizes.products).items():
        x, w, y = on.filled(m, k), on.filled(k, n), on.filled(m, n)
        for product in ((x, w, y), (y, w.T, x), (x.T, y, w)):
            seconds += times * median(on, repeats, *product)
        flops += times * 6 * m * n * k
    x, w, y = (on.filled(on.square, on.square) for _ in range(3))
    square = median(on, repeats, x, w, y)
    told = {
        "seconds": [square],
        "products": seconds,
        "products_gflops": flops / seconds / 1e9,
        "square": on.square,
        "square_gflops": 2 * on.square**3 / square / 1e9,
        "blas": blas() if device == "cpu" else "cuBLAS",
    }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
