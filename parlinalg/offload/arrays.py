"""Arrays that rest in a file or in host memory, and come window by window when they are used."""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from parlinalg.array import DistArray
from parlinalg.backend import Backend
from parlinalg.backend.views import flat_view
from parlinalg.errors import OffloadError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.offload.disk import DiskFile, whole_pages

Block = Any


AHEAD = 2  # windows


class Home(Protocol):
    """A file or memory in which each block has a place."""

    def window(self, at: int, n: int) -> np.ndarray:
        """Return the n bytes of the place that begins at byte `at`; what is written there stays."""


class DiskHome:
    """A file that is mapped a window at a time: a window takes address space and memory while it is in use.

    Parameters
    ----------
    path : Path
    nbytes : int
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.file = DiskFile(path, nbytes)
        self._last: tuple[int, tuple[int, int]] = (-1, (-1, 0))
        self._then: dict[tuple[int, int], tuple[int, int]] = {}

    def window(self, at: int, n: int) -> np.ndarray:
        if hasattr(os, "posix_fadvise"):
            self._read_ahead(at, n)
        self.file.check()  # to touch a mapped page beyond the end of a file would end the process
        try:
            mapped = mmap.mmap(self.file.fileno(), n, offset=at)
        except (OSError, ValueError) as error:
            raise OffloadError(f"{self.file.path}: bytes {at} to {at + n} cannot be mapped: {error}") from error
        return np.frombuffer(mapped, np.uint8)

    def _read_ahead(self, at: int, n: int) -> None:
        """Start to read the windows that came after this one the last time."""
        before, now = self._last
        self._then[before, now[0]] = (at, n)
        self._last = now[0], (at, n)
        key = self._last[0], at
        for _ in range(AHEAD):
            then = self._then.get(key)
            if then is None:
                break
            os.posix_fadvise(self.file.fileno(), *then, os.POSIX_FADV_WILLNEED)
            key = key[1], then[0]

    def close(self, *, remove: bool = True) -> None:
        """Close the file; windows that are in use stay."""
        self.file.close(remove=remove)


class HostHome:
    """Page-locked host memory, for blocks that live on a GPU."""

    def __init__(self, nbytes: int, backend: Backend) -> None:
        self._memory = backend.staging(nbytes, np.uint8)

    def window(self, at: int, n: int) -> np.ndarray:
        return self._memory[at : at + n]

    def close(self, *, remove: bool = True) -> None:
        """Do nothing: nothing is left to do."""


class OffloadedArray(DistArray):
    """An array whose `block` is a window into a file or host memory, for as long as somebody uses it.

    In host memory what is written to the block is written there; of an array on a GPU `block` is a copy, which `put`
    takes back.

    Parameters
    ----------
    home : Home
    at : int
        The byte where its place begins.
    dtype : numpy.dtype
    shape, layout, grid
        The shape, layout and grid of the array.
    """

    __slots__ = ("_dtype", "_window", "at", "home")

    def __init__(
        self, home: Home, at: int, dtype: np.dtype[Any], shape: tuple[int, ...], layout: Layout, grid: Grid
    ) -> None:  # fmt: skip
        self.home, self.at, self._dtype = home, at, np.dtype(dtype)
        self._shape, self.layout, self.grid, self.order = tuple(shape), layout, grid, None
        self._owner = self._views = None
        self._window: weakref.ref[Any] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    @property
    def local(self) -> tuple[int, ...]:
        """The shape of the block."""
        return self.grid.block_shape(self.layout, self.shape)

    @property
    def nbytes_here(self) -> int:
        """Bytes of the block."""
        return int(np.prod(self.local, dtype=np.int64)) * self._dtype.itemsize

    @property
    def block(self) -> Block:
        """This rank's block."""
        block = self._window() if self._window is not None else None
        if block is None:
            backend = self.grid.backend
            host = self._host()
            block = host if backend.host_memory else backend.from_host(host)
            self._window = weakref.ref(block)
        return block

    @property
    def resident(self) -> None:
        """None: `block` brings it each time."""
        return None

    def _host(self) -> np.ndarray:
        n = self.nbytes_here
        if not n:
            return np.empty(self.local, self._dtype)
        return self.home.window(self.at, n).view(self._dtype).reshape(self.local)

    def put(self, part: Block, start: int = 0) -> None:
        """Write elements of the block, from number `start` on."""
        backend = self.grid.backend
        if not self.nbytes_here:
            return
        window = self._window() if self._window is not None else None
        if window is None or not backend.host_memory or not np.shares_memory(part, window):
            backend.copy_to_host(part, flat_view(self._host())[start : start + part.size])

    def transpose(self, *order: Any) -> DistArray:
        """Return a view with permuted dims, whose block is a view into a window too."""
        dims = order[0] if len(order) == 1 and not isinstance(order[0], int) else order
        dims = tuple(range(self.ndim)[::-1] if not order or dims is None else dims)
        return TransposedArray(self, tuple(d % self.ndim for d in dims))


class TransposedArray(DistArray):
    """A transposed view of an offloaded array."""

    __slots__ = ("dims", "source")

    def __init__(self, source: OffloadedArray, dims: tuple[int, ...]) -> None:
        nothing = np.broadcast_to(np.empty((), source.dtype), source.local)
        plain = DistArray(nothing, source.shape, source.layout, source.grid).transpose(dims)
        self._shape, self.layout, self.grid, self.order = plain.shape, plain.layout, plain.grid, plain.order
        self.source, self.dims = source, dims
        self._owner, self._views = source, None

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.source.dtype

    @property
    def block(self) -> Block:
        """This rank's block."""
        return self.source.block.transpose(self.dims)

    @property
    def resident(self) -> None:
        """None: `block` brings it each time."""
        return None


def room(nbytes: int) -> int:
    """Return the bytes that a place takes."""
    return whole_pages(nbytes)
