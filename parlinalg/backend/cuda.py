"""CUDA kernels: one launch where a chain of CuPy's operations would pass over memory many times.

The text of each stands beside the kernel in `parlinalg.backend.kernels` whose CUDA form launches it, and all are
compiled as one program for each dtype: T is the dtype of blocks, W the one they are computed in.  A block of threads
takes a row and keeps its sums in registers; no kernel uses atomics, so that sums are the same on every run.  The
names' prefix keeps them apart from CUDA's own, such as `norm`.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

import numpy as np

from parlinalg import tunables
from parlinalg.backend import backend_of, namespace
from parlinalg.backend.halves import work_dtype

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
_COMMON = r"""
typedef long long Int;

__device__ inline W block_sum(W v) {
    // the sum over all threads of the block, on each of them; blockDim.x is a multiple of 32, at most 1024
    __shared__ W warps[32];
    for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(0xffffffffu, v, step);
    __syncthreads();  // a sum before this one has been read
    if ((threadIdx.x & 31) == 0) warps[threadIdx.x >> 5] = v;
    __syncthreads();
    W total = 0;
    for (int i = 0; i < (int)(blockDim.x >> 5); ++i) total += warps[i];
    return total;
}

#define ELEMENTS(i, n) \
    Int i = (Int)blockIdx.x * blockDim.x + threadIdx.x; \
    if (i >= n) return;

// 16 bytes, which a thread reads or writes at once: of 2 bytes a thread, memory would run at half its rate
#define LANES ((Int)(16 / sizeof(T)))
struct alignas(16) Pack { T v[16 / sizeof(T)]; };
#define PACKED(at, n, address) (at + LANES <= n && ((address) & 15) == 0)
#define ADDRESS(x) ((unsigned long long)(x))

template <class F> __device__ inline void each(const T* x, T* y, Int n, F f) {
    // y = f(x), LANES elements a thread
    Int at = ((Int)blockIdx.x * blockDim.x + threadIdx.x) * LANES;
    if (PACKED(at, n, ADDRESS(x) | ADDRESS(y))) {
        Pack a = *(const Pack*)(x + at), out;
        for (int i = 0; i < (int)LANES; ++i) out.v[i] = (T)f((W)a.v[i]);
        *(Pack*)(y + at) = out;
    } else
        for (Int i = at; i < at + LANES && i < n; ++i) y[i] = (T)f((W)x[i]);
}

template <class F> __device__ inline void each_of_two(const T* x, const T* g, T* y, Int n, F f) {
    // y = f(x, g), likewise
    Int at = ((Int)blockIdx.x * blockDim.x + threadIdx.x) * LANES;
    if (PACKED(at, n, ADDRESS(x) | ADDRESS(g) | ADDRESS(y))) {
        Pack a = *(const Pack*)(x + at), b = *(const Pack*)(g + at), out;
        for (int i = 0; i < (int)LANES; ++i) out.v[i] = (T)f((W)a.v[i], (W)b.v[i]);
        *(Pack*)(y + at) = out;
    } else
        for (Int i = at; i < at + LANES && i < n; ++i) y[i] = (T)f((W)x[i], (W)g[i]);
}
"""


def ready(*blocks: Block) -> bool:
    """Return True if the CUDA kernels can be used on these blocks, which have one dtype."""
    first = blocks[0]
    return (
        backend_of(first).cuda
        and first.dtype.name in _TYPES
        and all(b.dtype == first.dtype for b in blocks)
        and first.size > 0
        and (not backend_of(first).values or _module(namespace(first), first.dtype.name) is not None)
    )


def source(name: str) -> str:
    """Return the text of all kernels for blocks of the dtype of that name."""
    from parlinalg.backend.kernels import kernels

    stored, work, headers = _TYPES[name]
    return f"{headers}#define T {stored}\n#define W {work}\n{_COMMON}{''.join(k.program for k in kernels())}"


@cache
def _module(xp: Any, name: str) -> Any:
    """Return the compiled kernels for a dtype; None where CuPy cannot compile them."""
    if not hasattr(xp, "RawModule"):
        return None
    module = xp.RawModule(code=source(name), options=OPTIONS)
    try:
        module.compile()
    except Exception as error:  # no compiler, no headers: what CuPy raises depends on its version
        warnings.warn(f"CUDA kernels for {name} cannot be compiled, and run unfused: {error}", stacklevel=2)
        return None
    return module


@cache
def _function(xp: Any, dtype: str, name: str) -> Any:
    return _module(xp, dtype).get_function(f"pla_{name}")


def launch_kernel(name: str, like: Block, grid: tuple[int, ...], *args: Any) -> None:
    """Launch the kernel of this name for blocks like one of the arguments."""
    _function(namespace(like), like.dtype.name, name)(grid, (tunables.CUDA_THREADS,), args)


def lanes(dtype: Any) -> int:
    """Return how many elements a thread of the kernels by `each` reads at once."""
    return 16 // int(dtype.itemsize)


def elementwise(name: str, *blocks: Block, shape: tuple[int, ...] | None = None, packed: bool = False) -> Block:
    """Return a new block of this shape (by default the first block's), an element a thread; if `packed`, by `each`."""
    xp = namespace(blocks[0])
    given = [xp.ascontiguousarray(b) for b in blocks]
    out = xp.empty(blocks[0].shape if shape is None else shape, blocks[0].dtype)
    n = blocks[-1].size if name.endswith("_grad") else out.size
    size = tunables.CUDA_THREADS * (lanes(out.dtype) if packed else 1)
    launch_kernel(name, out, (-(-n // size),), *given, out, np.int64(n))
    return out


def numbers(vector: Block, dtype: Any) -> Block:
    """Return a vector as the kernels read it, contiguous and in the working dtype."""
    return namespace(vector).ascontiguousarray(vector.astype(work_dtype(dtype), copy=False))
