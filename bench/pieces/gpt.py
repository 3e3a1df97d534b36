"""What the pieces of `bench/train.py` share: the GPT's sizes, its weights and data, the timed loop, memory.

Every piece starts from the same weights and sees the same batches, so that their losses must agree.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Sizes:
    """A GPT and its batch: `parse("512x4x8x256x8x2048")` is d, layers, heads, sequence, batch, vocabulary."""

    d: int
    layers: int
    heads: int
    seq: int
    batch: int
    vocab: int

    @staticmethod
    def parse(text: str) -> Sizes:
        return Sizes(*map(int, text.split("x")))

    @property
    def head_dim(self) -> int:
        return self.d // self.heads

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq

    @property
    def products(self) -> list[tuple[int, int, int]]:
        """m, n, k of the products with weights in one forward pass; a backward pass has two of each."""
        t, d = self.tokens, self.d
        block = [(t, 3 * d, d), (t, d, d), (t, 4 * d, d), (t, d, 4 * d)]
        return block * self.layers + [(t, self.vocab, d)]

    @property
    def flops(self) -> int:
        """Model FLOPs of a step: products with weights, and attention counted whole (Chowdhery et al., PaLM, 2022)."""
        attention = 2 * 2 * self.layers * self.tokens * self.seq * self.d
        return 3 * (sum(2 * m * n * k for m, n, k in self.products) + attention)


def weights(sizes: Sizes, seed: int = 0, *, tied: bool = True) -> dict[str, np.ndarray]:
    """All parameters in float32, by parlinalg's names; products are x @ w, qkv's outputs are [heads, 3, head_dim].

    The head is the embedding's table, unless it is not `tied`.
    """
    rng, d = np.random.default_rng(seed), sizes.d

    def normal(*shape: int, std: float = 0.02) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) * np.float32(std)

    made = {"embedding.weight": normal(sizes.vocab, d), "positions.weight": normal(sizes.seq, d)}
    deep = 0.02 / (2 * sizes.layers) ** 0.5
    for i in range(sizes.layers):
        block = {
            "norm1.weight": np.ones(d, np.float32), "norm1.bias": np.zeros(d, np.float32),
            "attention.qkv.weight": normal(d, 3 * d), "attention.qkv.bias": np.zeros(3 * d, np.float32),
            "attention.out.weight": normal(d, d, std=deep), "attention.out.bias": np.zeros(d, np.float32),
            "norm2.weight": np.ones(d, np.float32), "norm2.bias": np.zeros(d, np.float32),
            "mlp.0.weight": normal(d, 4 * d), "mlp.0.bias": np.zeros(4 * d, np.float32),
            "mlp.2.weight": normal(4 * d, d, std=deep), "mlp.2.bias": np.zeros(d, np.float32),
        }  # fmt: skip
        made.update({f"blocks.{i}.{name}": value for name, value in block.items()})
    made.update({"norm.weight": np.ones(d, np.float32), "norm.bias": np.zeros(d, np.float32)})
    return made if tied else made | {"head.weight": normal(d, sizes.vocab)}


def batches(sizes: Sizes, count: int = 2, seed: int = 1) -> list[tuple[np.ndarray, np.ndarray]]:
    """Token ids and the next ones; few batches, in turn, so that the loss falls."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, sizes.vocab, (count, sizes.batch, sizes.seq + 1))
    return [(np.ascontiguousarray(i[:, :-1]), np.ascontiguousarray(i[:, 1:])) for i in ids]


class Memory:
    """Bytes resident, of this process."""

    def start(self) -> int:
        """Bytes now, once what is free went back to the system; the peak is counted from here on."""
        gc.collect()
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
        with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return _status("VmRSS")

    def peak(self) -> int:
        """The most bytes since `start()`."""
        return _status("VmHWM")


def timed(
    step: Callable[[int], float],
    warm: int,
    steps: int,
    barrier: Callable[[], Any],
    tell: bool,
    memory: Memory,
    **said: Any,
) -> dict[str, Any]:
    """Run `warm` steps uncounted, then `steps` timed ones; seconds, processor seconds and losses, which one rank is to
    tell as JSON.

    Memory is the peak over all steps, the first included, less that before the first.
    """
    barrier()
    before = memory.start()
    losses = [step(i) for i in range(warm)]
    seconds, busy = [], []
    for i in range(steps):
        barrier()
        start, began = time.perf_counter(), time.process_time()
        losses.append(step(warm + i))
        seconds.append(time.perf_counter() - start)
        busy.append(time.process_time() - began)
    used = {"before": before, "peak": memory.peak() - before}
    told = {"seconds": seconds, "cpu": busy, "losses": losses, "memory": used, **said}
    if tell:
        print(json.dumps(told), flush=True)
    return told


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def one_thread() -> int:
    """The BLAS threads the environment allows."""
    return int(os.environ.get("OMP_NUM_THREADS", "1"))
