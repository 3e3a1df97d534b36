"""`cusolver`: LAPACK's routines, on matrices in columns at the addresses that are given."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from cupy import cuda
from scipy.linalg import lapack

from . import cublas

DTYPES = {"s": np.float32, "d": np.float64, "c": np.complex64, "z": np.complex128}


def _memory(address: int, count: int, dtype: Any) -> np.ndarray:
    held = (ctypes.c_char * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(held, dtype)


def __getattr__(name: str) -> Any:
    if name[:1] not in DTYPES or name[1:] not in ("potrf", "potrf_bufferSize"):
        raise AttributeError(f"module 'cusolver' has no attribute {name!r}")
    if name.endswith("bufferSize"):
        return lambda handle, fill, n, a, lda: n
    letter = name[0]

    def potrf(handle: int, fill: int, n: int, a: int, lda: int, work: int, size: int, info: int) -> None:
        cuda.issued()
        matrix = _memory(a, lda * n, DTYPES[letter]).reshape(n, lda)[:, :n].T
        lower = fill == cublas.CUBLAS_FILL_MODE_LOWER
        found, minor = getattr(lapack, name)(matrix, lower=lower, clean=False)
        matrix[...] = found
        _memory(info, 1, np.int32)[0] = minor

    return potrf
