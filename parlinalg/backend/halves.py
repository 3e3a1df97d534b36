"""16-bit floats: which dtypes they are, in which they are computed, and their products, summed in float32.

CuPy hands two matrices of one 16-bit dtype to cuBLAS as they are, which sums in float32 and rounds once; stacks of
matrices it casts to float32 (float16) or refuses (bfloat16), in versions up to 14 (cupy/cupy pull request 10317).  So
the large matrices of a stack are handed to it one pair at a time.  Whether it sums in float32 is asked once for a
dtype, by a product whose sum 16 bits cannot hold.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np

from parlinalg import tunables
from parlinalg.backend import backend_of, namespace

Block = Any
TERMS = 4096  # ones that sum up to themselves in float32 only: float16 stops at 2048, bfloat16 at 256


def is_half(dtype: Any) -> bool:
    """Return True if a dtype is one of 16-bit floats."""
    return bool(dtype.itemsize == 2 and dtype.name in ("float16", "bfloat16"))


def work_dtype(dtype: Any) -> np.dtype[Any]:
    """Return the dtype in which blocks of `dtype` are computed: float32 for 16-bit floats."""
    dtype = np.dtype(dtype)
    return np.dtype(np.float32) if is_half(dtype) else dtype


def product(x: Block, w: Block) -> Block | None:
    """Return `x @ w` in the dtype of both, or None where they are to be cast to float32 first.

    Parameters
    ----------
    x, w : array
        Matrices, contiguous or transposed, of one 16-bit float dtype, or equally long stacks of large ones.
    """
    xp, backend = namespace(x), backend_of(x)
    lead = x.shape[:-2]
    if backend.cpu or x.ndim < 2 or x.dtype != w.dtype or w.shape[:-2] != lead or not x.size or not w.size:
        return None
    if lead and x.shape[-2] * x.shape[-1] * w.shape[-1] < tunables.STACKED_PRODUCT:
        return None
    # A GPU that is imagined (arrays without values) does as cuBLAS does.
    if backend.values and not sums_in_single(xp, x.dtype):
        return None
    if not lead:
        return xp.matmul(x, w)
    y = xp.empty((*x.shape[:-1], w.shape[-1]), x.dtype)
    for i in np.ndindex(lead):
        xp.matmul(x[i], w[i], out=y[i])
    return y


@cache
def sums_in_single(xp: Any, dtype: np.dtype[Any]) -> bool:
    """Return True if this namespace multiplies matrices of the dtype, and sums in float32."""
    try:
        ones = xp.ones((2, TERMS), dtype)
        found = xp.matmul(ones, ones.T)
        right = found.dtype == dtype and bool((found.astype(np.float32) == TERMS).all())
        why = f"{TERMS} ones add up to {found.astype(np.float32).max()}"
    except Exception as error:  # what CuPy raises depends on its version
        right, why = False, str(error)
    if not right:
        warnings.warn(f"products of {dtype} are cast to float32 on this device: {why}", stacklevel=2)
    return right
