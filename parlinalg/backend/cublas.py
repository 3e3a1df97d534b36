"""Products of stacks of matrices on a GPU by cuBLAS, of 16-bit floats too, whose sums it can leave in float32.

CuPy's `matmul` casts stacks of 16-bit matrices to float32 or refuses them, and its results are of the operands' dtype.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from cupy.cuda.device import get_cublas_handle
from cupy_backends.cuda.libs import cublas

Block = Any
KINDS = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 14}
"""CUDA's numbers of the dtypes (`cudaDataType`, library_types.h)."""
PLAIN, TURNED = 0, 1  # cublasOperation_t
DEFAULT = -1  # cublasGemmAlgo_t


def multiply(a: Block, b: Block, out: Block, scale: float = 1.0, *, add: bool = False) -> Block:
    """Write `scale * a @ b` to `out`, or add it there, and return `out`.

    Parameters
    ----------
    a, b : array
        Stacks of matrices, shapes [batch, heads, m, k] and [batch, heads, k, n], of one dtype: float16, bfloat16,
        float32 or float64.  The matrices follow each other at equal steps, their rows or their columns contiguous.
    out : array
        Shape [batch, heads, m, n], likewise, with contiguous rows: of the dtype of a and b, or of float32.
    """
    (m, k), n = a.shape[-2:], b.shape[-1]
    size = out.shape[0] * out.shape[1]
    kind, double = _kind(a.dtype), a.dtype.itemsize == 8
    how = cublas.CUBLAS_COMPUTE_64F if double else cublas.CUBLAS_COMPUTE_32F
    (_, alpha), (_, beta) = _number(float(scale), double), _number(float(add), double)
    # cuBLAS has matrices in columns: rows of out = a b are columns of outᵀ = bᵀ aᵀ
    (turn_a, step_a, apart_a), (turn_b, step_b, apart_b), (_, step, apart) = map(_lines, (a, b, out))
    cublas.gemmStridedBatchedEx(
        get_cublas_handle(), turn_b, turn_a, n, m, k, alpha, b.data.ptr, kind, step_b, apart_b,
        a.data.ptr, kind, step_a, apart_a, beta, out.data.ptr, _kind(out.dtype), step, apart,
        size, how, DEFAULT,
    )  # fmt: skip
    return out


@cache
def _kind(dtype: np.dtype[Any]) -> int:
    return KINDS[dtype.name]


@cache
def _number(value: float, double: bool) -> tuple[np.ndarray, int]:
    """Return a number on the host as cuBLAS reads it, and its address."""
    held = np.array(value, np.float64 if double else np.float32)
    return held, held.ctypes.data


def _lines(x: Block) -> tuple[int, int, int]:
    """Return whether a matrix's columns are contiguous, not its rows, and the steps from one row (or column) to the
    next and from one matrix to the next, in elements."""
    batch, heads, rows, columns = x.shape
    size = x.itemsize
    outer, apart, down, across = [step // size for step in x.strides]
    if heads == 1:
        apart = outer
    elif batch > 1 and outer != heads * apart:
        raise ValueError(f"matrices at steps {x.strides} of a stack {x.shape} do not follow each other at equal steps")
    if across == 1 or columns == 1:
        return PLAIN, max(down, columns), apart
    if down == 1 or rows == 1:
        return TURNED, max(across, rows), apart
    raise ValueError(f"neither rows nor columns are contiguous at steps {x.strides} of a stack {x.shape}")
