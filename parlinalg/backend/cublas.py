"""Products of stacks of matrices on a GPU by cuBLAS, of 16-bit floats too, whose sums it can leave in float32.

CuPy's `matmul` casts stacks of 16-bit matrices to float32 or refuses them, and its results are of the operands' dtype.
"""

from __future__ import annotations

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
    kind, computed = KINDS[a.dtype.name], np.float64 if a.dtype.itemsize == 8 else np.float32
    how = cublas.CUBLAS_COMPUTE_64F if computed is np.float64 else cublas.CUBLAS_COMPUTE_32F
    alpha, beta = np.array(scale, computed), np.array(add, computed)
    # cuBLAS has matrices in columns: rows of out = a b are columns of outᵀ = bᵀ aᵀ
    (turn_a, step_a, apart_a), (turn_b, step_b, apart_b), (_, step, apart) = map(_lines, (a, b, out))
    cublas.gemmStridedBatchedEx(
        get_cublas_handle(), turn_b, turn_a, n, m, k, alpha.ctypes.data, b.data.ptr, kind, step_b, apart_b,
        a.data.ptr, kind, step_a, apart_a, beta.ctypes.data, out.data.ptr, KINDS[out.dtype.name], step, apart,
        size, how, DEFAULT,
    )  # fmt: skip
    return out


def _lines(x: Block) -> tuple[int, int, int]:
    """Return whether a matrix's columns are contiguous, not its rows, and the steps from one row (or column) to the
    next and from one matrix to the next, in elements."""
    batch, heads, rows, columns = x.shape
    *_, outer, apart, down, across = (step // x.itemsize for step in x.strides)
    if heads == 1:
        apart = outer
    elif batch > 1 and outer != heads * apart:
        raise ValueError(f"matrices at steps {x.strides} of a stack {x.shape} do not follow each other at equal steps")
    if across == 1 or columns == 1:
        return PLAIN, max(down, columns), apart
    if down == 1 or rows == 1:
        return TURNED, max(across, rows), apart
    raise ValueError(f"neither rows nor columns are contiguous at steps {x.strides} of a stack {x.shape}")
