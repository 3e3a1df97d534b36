"""Blocks in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.backend.memory import host_memory
from parlinalg.backend.views import flat_view


class NumpyBackend:
    """NumPy arrays: host and device are one, so that copies between them are no copies."""

    name = "numpy"
    xp: Any = np
    device = "CPU"
    host_memory = True
    cpu = True
    cuda = False
    adds_products = True
    values = True

    @property
    def fft(self) -> Any:
        try:
            import scipy.fft
        except ImportError:
            raise ImportError("Fourier transforms of NumPy blocks need SciPy: pip install scipy") from None
        return scipy.fft

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        return np.empty(shape, dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        return np.zeros(shape, dtype)

    def from_host(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(array)

    def to_host(self, block: np.ndarray) -> np.ndarray:
        return np.asarray(block)

    def synchronize(self) -> None:
        pass

    def staging(self, n: int, dtype: DTypeLike) -> np.ndarray:
        return np.empty(n, dtype)

    def copy_to_host(self, block: np.ndarray, out: np.ndarray) -> None:
        np.copyto(flat_view(out), block.reshape(-1), casting="no")

    def copy_from_host(self, array: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, array.reshape(out.shape), casting="no")

    def memory_total(self) -> int:
        return host_memory()

    def assume(self, name: str, why: str) -> Any:
        raise TypeError(f"{why} is known where blocks have values")

    def __repr__(self) -> str:
        return "NumpyBackend()"


NUMPY = NumpyBackend()
