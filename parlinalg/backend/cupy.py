"""Blocks on a GPU.  Imported only where CuPy is asked for or found."""

from __future__ import annotations

from functools import cache
from typing import Any

import cupy
import numpy as np
from numpy.typing import DTypeLike

from parlinalg.backend.views import flat_view


class CupyBackend:
    """CuPy arrays on one GPU, the current one of the threads that use it.

    Kernels run on CuPy's current stream; every copy to or from the host waits for that stream, so that MPI never reads
    values that are still being computed, and never overwrites a page-locked buffer that is still being read.
    """

    name = "cupy"
    xp: Any = cupy
    fft: Any = cupy.fft
    host_memory = False
    cpu = False
    cuda = True
    adds_products = False
    values = True

    def __init__(self, device: int) -> None:
        self.id = device
        properties = cupy.cuda.runtime.getDeviceProperties(device)
        self.device = f"GPU {device} ({properties['name'].decode()})"

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
        return cupy.empty(shape, dtype)

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Any:
        return cupy.zeros(shape, dtype)

    def from_host(self, array: np.ndarray) -> Any:
        block = cupy.asarray(array)
        self.synchronize()
        return block

    def to_host(self, block: Any) -> np.ndarray:
        return cupy.asnumpy(block, order="C", blocking=True)

    def synchronize(self) -> None:
        cupy.cuda.get_current_stream().synchronize()

    def staging(self, n: int, dtype: DTypeLike) -> np.ndarray:
        kind = np.dtype(dtype)
        memory = cupy.cuda.alloc_pinned_memory(max(1, n * kind.itemsize))
        return np.frombuffer(memory, np.uint8, n * kind.itemsize).view(kind)

    def copy_to_host(self, block: Any, out: np.ndarray) -> None:
        if block.dtype != out.dtype or block.size != out.size:
            raise ValueError(f"cannot copy {block.size} × {block.dtype} into {out.size} × {out.dtype}")
        if block.size:
            block.get(out=flat_view(out).reshape(block.shape), blocking=True)

    def copy_from_host(self, array: np.ndarray, out: Any) -> None:
        if array.dtype != out.dtype or array.size != out.size:
            raise ValueError(f"cannot copy {array.size} × {array.dtype} into {out.size} × {out.dtype}")
        if not out.size:
            return
        host = flat_view(array).reshape(out.shape)
        if out.flags.c_contiguous:
            out.set(host)
        else:
            out[...] = cupy.asarray(host)
        self.synchronize()

    def memory_total(self) -> int:
        with cupy.cuda.Device(self.id):
            return int(cupy.cuda.runtime.memGetInfo()[1])

    def assume(self, name: str, why: str) -> Any:
        raise TypeError(f"{why} is known where blocks have values")

    def __repr__(self) -> str:
        return f"CupyBackend({self.id})"


@cache
def on_device(device: int) -> CupyBackend:
    """Return the backend of one GPU, by its number among the visible ones."""
    return CupyBackend(device)


def for_local_rank(local_rank: int) -> CupyBackend | str:
    """Return the backend for a rank, or a text that says why there is none."""
    try:
        devices = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:  # CuPy imports without a driver, and says so only when used
        return f"CUDA answers {error}"
    if devices == 0:
        return "CUDA shows no GPU (CUDA_VISIBLE_DEVICES hides them, or there is none)"
    device = local_rank % devices
    cupy.cuda.Device(device).use()
    return on_device(device)


def devices() -> list[str]:
    """Return a line for people about each visible GPU: name, compute capability and memory."""
    found = []
    for i in range(cupy.cuda.runtime.getDeviceCount()):
        p = cupy.cuda.runtime.getDeviceProperties(i)
        memory = p["totalGlobalMem"] / 2**30
        found.append(f"{p['name'].decode()}, compute capability {p['major']}.{p['minor']}, {memory:.1f} GiB")
    return found


def versions() -> dict[str, str]:
    """Return the versions of the driver, CUDA, CuPy and NCCL."""
    runtime = cupy.cuda.runtime
    nccl: Any = getattr(cupy.cuda, "nccl", None)
    ready = getattr(nccl, "available", False)
    return {
        "CuPy": cupy.__version__,
        "CUDA of the driver": _dotted(runtime.driverGetVersion(), 1000, 10),
        "CUDA of CuPy": _dotted(runtime.runtimeGetVersion(), 1000, 10),
        "NCCL": _dotted(nccl.get_version(), 10000, 100) if ready else "none (pip install nvidia-nccl-cu13)",
    }


def _dotted(number: int, major: int, minor: int) -> str:
    """Return CUDA's or NCCL's number of a version as people write it."""
    return f"{number // major}.{number % major // minor}"
