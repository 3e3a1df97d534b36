"""Fused kernels on a GPU: one launch where a chain of CuPy's operations would pass over memory many times.

`ready(block)` says whether they can be had: for blocks of a GPU, of a floating dtype, where CuPy can compile.  What
they compute is what the generic chains beside their callers do.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from parlinalg import tunables
from parlinalg.backend import namespace
from parlinalg.backend.cuda_random import SOURCE as RANDOM
from parlinalg.backend.cuda_source import SOURCE

Block = Any
OPTIONS = ("--std=c++17",)
_TYPES = {
    "float64": ("double", "double", ""),
    "float32": ("float", "float", ""),
    "float16": ("__half", "float", "#include <cuda_fp16.h>\n"),
    "bfloat16": ("__nv_bfloat16", "float", "#include <cuda_bf16.h>\n"),
}
DTYPES = tuple(_TYPES)
"""The names of the dtypes that the kernels are compiled for."""


def ready(*blocks: Block) -> bool:
    """Whether the kernels can be used on these blocks, which have one dtype."""
    xp, dtype = namespace(blocks[0]), blocks[0].dtype
    return (
        xp is not np
        and dtype.name in _TYPES
        and all(b.dtype == dtype for b in blocks)
        and blocks[0].size > 0
        and _module(xp, dtype.name) is not None
    )


def source(name: str) -> str:
    """Return the text of all kernels for blocks of the dtype of that name."""
    stored, work, headers = _TYPES[name]
    return f"{headers}#define T {stored}\n#define W {work}\n{SOURCE}{RANDOM}"


@cache
def _module(xp: Any, name: str) -> Any:
    """The compiled kernels for a dtype; None where CuPy cannot compile them."""
    if not hasattr(xp, "RawModule"):
        return None
    module = xp.RawModule(code=source(name), options=OPTIONS)
    try:
        module.compile()
    except Exception as error:  # no compiler, no headers: what CuPy raises depends on its version
        warnings.warn(f"CUDA kernels for {name} cannot be compiled, and run unfused: {error}", stacklevel=2)
        return None
    return module


def _launch(name: str, like: Block, grid: tuple[int, ...], *args: Any) -> None:
    function = _module(namespace(like), like.dtype.name).get_function(f"pla_{name}")
    function(grid, (tunables.CUDA_THREADS,), args)


def _work(dtype: Any) -> np.dtype[Any]:
    return np.dtype(np.float32) if dtype.itemsize == 2 else np.dtype(dtype)


def elementwise(name: str, *blocks: Block, shape: tuple[int, ...] | None = None) -> Block:
    """A new block of this shape (by default the first block's), an element a thread."""
    xp = namespace(blocks[0])
    given = [xp.ascontiguousarray(b) for b in blocks]
    out = xp.empty(blocks[0].shape if shape is None else shape, blocks[0].dtype)
    n = blocks[-1].size if name.endswith("_grad") else out.size
    _launch(name, out, (-(-n // tunables.CUDA_THREADS),), *given, out, np.int64(n))
    return out


def drop(
    block: Block, table: Block, lengths: Sequence[int], first: Sequence[int], key: Sequence[int], limit: int, bits: int,
    scale: float,
) -> Block:  # fmt: skip
    """The elements that stay times `scale`, and zeros.

    Parameters
    ----------
    table, lengths, first
        Those of `cuda_random.places`, the table on the device.
    key : two int
    limit, bits : int
        An element stays if its number, of so many bits, is below the limit.
    """
    xp = namespace(block)
    x = xp.ascontiguousarray(block)
    out = xp.empty(x.shape, x.dtype)
    _launch(
        "drop", x, (-(-out.size // tunables.CUDA_THREADS),), x, out, table, np.int64(out.size),
        *map(np.int64, lengths[1:]), *map(np.int64, first[1:]), *map(np.uint64, key), np.uint64(limit),
        np.int32(bits), _work(x.dtype).type(scale),
    )  # fmt: skip
    return out


def norm(x: Block, weight: Block, bias: Block, eps: float, centred: bool) -> tuple[Block, Block, Block]:
    """The value, the rows' means (None if not centred) and 1 / their scales; see `kernels_rows.norm`."""
    xp, work = namespace(x), _work(x.dtype)
    x = xp.ascontiguousarray(x)
    n = x.shape[-1]
    rows = x.size // n
    y, scale = xp.empty(x.shape, x.dtype), xp.empty(rows, work)
    mean = xp.empty(rows, work) if centred else None
    gain = _numbers(weight, work)
    shift = gain if bias is None else _numbers(bias, work)
    _launch(
        "norm", x, (rows,), x, gain, shift, y, scale if mean is None else mean, scale, np.int64(n), work.type(eps),
        np.int32(centred), np.int32(bias is not None),
    )  # fmt: skip
    return y, mean, scale


def norm_grad(x: Block, g: Block, weight: Block, mean: Block, scale: Block) -> tuple[Block, Block, Block]:
    """The gradients for x, weight and bias; see `kernels_rows.norm_grad`."""
    xp, work = namespace(x), _work(x.dtype)
    x, g = xp.ascontiguousarray(x), xp.ascontiguousarray(g)
    n = x.shape[-1]
    rows, centred = x.size // n, np.int32(mean is not None)
    mean = scale if mean is None else mean
    dx = xp.empty(x.shape, x.dtype)
    _launch("norm_grad", x, (rows,), x, g, _numbers(weight, work), mean, scale, dx, np.int64(n), centred)
    each = max(16, -(-rows // 256))
    parts = -(-rows // each)
    dw, db = xp.empty((parts, n), work), xp.empty((parts, n), work)
    _launch(
        "norm_sums", x, (-(-n // tunables.CUDA_THREADS), parts), x, g, mean, scale, dw, db, np.int64(rows), np.int64(n),
        np.int64(each), centred,
    )  # fmt: skip
    return dx, dw.sum(axis=0), db.sum(axis=0)


def row_exp_sum(z: Block, top: Block) -> Block:
    """The sum of exp(z - top) over every row; see `kernels.row_exp_sum`."""
    xp = namespace(z)
    out = xp.empty(top.shape, top.dtype)
    z, top = xp.ascontiguousarray(z), xp.ascontiguousarray(top)
    _launch("row_exp_sum", z, (math.prod(z.shape[:-1]),), z, top, out, np.int64(z.shape[-1]))
    return out


def row_exp(z: Block, top: Block, factor: Block) -> Block:
    """exp(z - top), times a number a row (None: 1); see `kernels.row_exp`."""
    xp = namespace(z)
    out = xp.empty(z.shape, z.dtype)
    z, top = xp.ascontiguousarray(z), xp.ascontiguousarray(top)
    scale = top if factor is None else _numbers(factor, top.dtype)
    _launch(
        "row_exp", z, (math.prod(z.shape[:-1]),), z, top, scale, out, np.int64(z.shape[-1]),
        np.int32(factor is not None),
    )  # fmt: skip
    return out


def adam(p: Block, g: Block, m: Block, v: Block, *numbers: float) -> bool:
    """One step of Adam in place, and whether it was taken; see `kernels_optim.adam`.

    `numbers` are β₁, 1 - β₁, β₂, 1 - β₂, the rate and the ε that hold the corrections, the shares of p that are
    added to g and taken off p, and what g is multiplied by.
    """
    if not ready(p, g) or not all(a.flags.c_contiguous for a in (p, g, m, v)):
        return False
    work = _work(p.dtype)
    if (m.dtype, v.dtype) != (work, work):
        return False
    n = p.size
    _launch("adam", p, (-(-n // tunables.CUDA_THREADS),), p, g, m, v, np.int64(n), *map(work.type, numbers))
    return True


def _numbers(vector: Block, work: Any) -> Block:
    return namespace(vector).ascontiguousarray(vector.astype(work, copy=False))
