"""`cupy.cuda`: devices without hardware, page-locked memory, one stream whose copies end when it is synchronised."""

from __future__ import annotations

import math
import os
import threading
import weakref
from time import perf_counter
from typing import Any

import numpy as np

from . import nccl as nccl
from . import runtime as runtime

_local = threading.local()
_pending: list[tuple[str, np.ndarray, np.ndarray]] = []  # copies under way: kind, source's values, target
_unfinished = False  # kernels issued since the last synchronisation
copied: list[tuple[str, int]] = []  # what CuPy does not have: each copy, "in" or "out" of the device, and its bytes
_pinned: weakref.WeakValueDictionary[int, PinnedMemoryPointer] = weakref.WeakValueDictionary()


class Device:
    """One of the devices that CUDA_VISIBLE_DEVICES shows."""

    def __init__(self, device: int | None = None) -> None:
        self.id: int = getattr(_local, "device", 0) if device is None else int(device)

    def use(self) -> Device:
        if self.id >= runtime.getDeviceCount():
            raise runtime.CUDARuntimeError(101, "cudaErrorInvalidDevice: invalid device ordinal")
        _local.device = self.id
        return self

    def __enter__(self) -> Device:
        self._outer = Device().id
        return self.use()

    def __exit__(self, *args: object) -> None:
        _local.device = self._outer

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __int__(self) -> int:
        return self.id

    def synchronize(self) -> None:
        get_current_stream().synchronize()

    @property
    def mem_info(self) -> tuple[int, int]:
        return runtime.memGetInfo()

    @property
    def pci_bus_id(self) -> str:
        return f"0000:{self.id:02x}:00.0"

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"


class Stream:
    """The one stream there is."""

    null: Stream
    ptr = 0

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        pass

    def synchronize(self) -> None:
        global _unfinished
        while _pending:
            kind, values, target = _pending.pop(0)
            if kind == "out":
                target[...] = values
            elif not _same(values, target):
                raise RuntimeError(
                    "a page-locked host array was overwritten while it was still being copied to the GPU"
                )
        _unfinished = False

    @property
    def done(self) -> bool:
        return not (_pending or _unfinished)

    def use(self) -> Stream:
        return self

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *args: object) -> None:
        pass


Stream.null = Stream(null=True)


class Event:
    """A point of the stream, and the time when it was reached."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.time = None if disable_timing else math.nan

    def record(self, stream: Stream | None = None) -> None:
        if self.time is not None:
            self.time = perf_counter()

    def synchronize(self) -> None:
        get_current_stream().synchronize()


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Milliseconds."""
    if start_event.time is None or end_event.time is None:
        raise runtime.CUDARuntimeError(400, "cudaErrorInvalidResourceHandle: invalid resource handle")
    if not get_current_stream().done:
        raise runtime.CUDARuntimeError(600, "cudaErrorNotReady: device not ready")
    return 1e3 * (end_event.time - start_event.time)


def get_current_stream(device_id: int = -1) -> Stream:
    return Stream.null


def get_device_id() -> int:
    return Device().id


def is_available() -> bool:
    return runtime.getDeviceCount() > 0


def issued() -> None:
    """Work was put on the stream."""
    global _unfinished
    _unfinished = True


def refuse_unless_aware() -> None:
    """MPI that is not CUDA-aware crashes on a GPU's address; one that is reads values not written yet."""
    if os.environ.get("STANDIN_CUDA_AWARE", "0") == "0":
        raise AttributeError("the memory of a GPU was offered to a library that cannot reach it")
    if not get_current_stream().done:
        raise RuntimeError("the memory of a GPU was offered to a library before the stream was synchronised")


def copy_out(device: np.ndarray, host: np.ndarray, blocking: bool) -> None:
    copied.append(("out", device.nbytes))
    if blocking:
        get_current_stream().synchronize()
        host[...] = device
    else:
        host.reshape(-1).view(np.uint8)[...] = 0xA5
        _pending.append(("out", device.copy(), host))


def copy_in(host: np.ndarray, device: np.ndarray) -> None:
    copied.append(("in", host.nbytes))
    device[...] = host
    if _is_pinned(host):
        _pending.append(("in", host.copy(), host))


def _is_pinned(host: np.ndarray) -> bool:
    at = host.ctypes.data
    return any(start <= at < start + len(memory) for start, memory in _pinned.items())


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.tobytes() == b.tobytes()


class PinnedMemoryPointer(bytearray):
    """Page-locked host memory, a buffer to host code."""

    @property
    def ptr(self) -> int:
        return np.frombuffer(self, np.uint8).ctypes.data


def alloc_pinned_memory(size: int) -> Any:
    memory = PinnedMemoryPointer(max(1, size))
    _pinned[memory.ptr] = memory
    return memory


class MemoryPool:
    """The pools count nothing: blocks are NumPy's."""

    def used_bytes(self) -> int:
        return 0

    def total_bytes(self) -> int:
        return 0

    def free_all_blocks(self) -> None:
        pass

    def n_free_blocks(self) -> int:
        return 0


_pool = MemoryPool()


def get_default_memory_pool() -> MemoryPool:
    return _pool


def get_default_pinned_memory_pool() -> MemoryPool:
    return _pool
