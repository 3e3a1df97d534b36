"""`cupy.cuda.runtime`: STANDIN_GPUS devices (default 2), of which CUDA_VISIBLE_DEVICES may hide some."""

from __future__ import annotations

import os
from typing import Any

GIB = 2**30


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int, text: str = "cudaErrorNoDevice: no CUDA-capable device is detected") -> None:
        super().__init__(text)
        self.status = status


def getDeviceCount() -> int:
    count = int(os.environ.get("STANDIN_GPUS", "2"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        ids = [part.strip() for part in visible.split(",")]
        count = next((i for i, part in enumerate(ids) if not part.isdigit() or int(part) >= count), len(ids))
    if count == 0:
        raise CUDARuntimeError(100)
    return count


def getDeviceProperties(device: int) -> dict[str, Any]:
    return {"name": b"stand-in for a GPU", "totalGlobalMem": GIB, "major": 9, "minor": 0, "multiProcessorCount": 2}


def memGetInfo() -> tuple[int, int]:
    return GIB, GIB


def deviceSynchronize() -> None:
    from cupy import cuda

    cuda.get_current_stream().synchronize()


def driverGetVersion() -> int:
    return 13000


def runtimeGetVersion() -> int:
    return 13000
