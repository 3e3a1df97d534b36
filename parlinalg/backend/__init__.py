"""Arrays: where blocks live and how they are made, NumPy's in host memory, CuPy's on a GPU, or shapes alone.

Code above this layer computes in the namespace of its blocks (`namespace(block)`), and asks the grid's `Backend` for
new blocks and for copies between the host and the device.  Besides this package only the NCCL transport imports CuPy.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.backend.memory import keep_freed
from parlinalg.backend.numpy import NUMPY
from parlinalg.backend.shapes import ShapeArray, ShapesBackend
from parlinalg.errors import ConfigError

__all__ = ["NAMES", "Array", "Backend", "backend_of", "namespace", "select_backend"]

Array = Any  # a block: an array of one of the backends
NAMES = ("auto", "numpy", "cupy", "shapes")


class Backend(Protocol):
    """The place where the blocks of a grid live, and what can be done with them.

    Attributes
    ----------
    name : str
        "numpy", "cupy" or "shapes".
    xp : module
        The namespace that computes on the blocks.
    fft : module
        The Fourier transforms of blocks: SciPy's or CuPy's.
    device : str
        The device, for people to read.
    host_memory : bool
        Blocks are NumPy arrays in this process's memory, which MPI, files and the other ranks of the node reach.
    cpu : bool
        A CPU computes: chains of operations run best in tiles that stay in its cache, and a tanh or an exp takes
        longer than to read a number that was kept.
    cuda : bool
        A CUDA GPU computes: CUDA kernels run on the blocks, and NCCL carries them.
    adds_products : bool
        BLAS can multiply onto what an array holds (`parlinalg.backend.blas.added`).
    values : bool
        Blocks have values; those of imagined ranks have shapes alone (`parlinalg.backend.shapes`), and imitate a CPU or
        a GPU by the other flags.

    What code may do with blocks it asks of these flags, never of the name, which is for messages and configurations.
    """

    @property
    def name(self) -> str: ...
    @property
    def xp(self) -> Any: ...
    @property
    def fft(self) -> Any: ...
    @property
    def device(self) -> str: ...
    @property
    def host_memory(self) -> bool: ...
    @property
    def cpu(self) -> bool: ...
    @property
    def cuda(self) -> bool: ...
    @property
    def adds_products(self) -> bool: ...
    @property
    def values(self) -> bool: ...

    def empty(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return a new C-contiguous block with arbitrary values."""

    def zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> Array:
        """Return a new C-contiguous block of zeros."""

    def from_host(self, array: np.ndarray) -> Array:
        """Return the block with an array's values: the array itself where blocks are host arrays."""

    def to_host(self, block: Array) -> np.ndarray:
        """Return a host array with a block's values, complete on return: the block itself where it is a host array."""

    def synchronize(self) -> None:
        """Wait until all work issued on this thread's stream is done."""

    def staging(self, n: int, dtype: DTypeLike) -> np.ndarray:
        """Return a flat host array of n elements to send blocks through, page-locked where that makes copies faster."""

    def copy_to_host(self, block: Array, out: np.ndarray) -> None:
        """Copy a block into a C-contiguous host array of as many elements of the same dtype; complete on return."""

    def copy_from_host(self, array: np.ndarray, out: Array) -> None:
        """Copy a C-contiguous host array into a block of as many elements of the same dtype; complete on return."""

    def memory_total(self) -> int:
        """Return the bytes that blocks may take at most: the memory of the host or its container, or of the GPU."""

    def assume(self, name: str, why: str) -> Any:
        """Return the answer to what only values could tell, on a backend without values; an error where none is given.

        Parameters
        ----------
        name : str
            An attribute of `parlinalg.backend.shapes.WhatIf`.
        why : str
            What depends on values, for the message of the error.
        """


def namespace(block: Array) -> Any:
    """Return the module whose functions compute on a block: `numpy`, or `cupy`.

    >>> namespace(np.ones(3)).__name__
    'numpy'

    Raises
    ------
    TypeError
        If it is no array of a backend.
    """
    if isinstance(block, (np.ndarray, np.generic)):
        return np
    return backend_of(block).xp


def backend_of(block: Array) -> Backend:
    """Return the backend on which a block lives.

    Raises
    ------
    TypeError
        If it is no array of a backend.
    """
    if isinstance(block, (np.ndarray, np.generic)):
        return NUMPY
    if isinstance(block, ShapeArray):
        return block.device
    if type(block).__module__.partition(".")[0] == "cupy":
        from parlinalg.backend.cupy import on_device

        return on_device(block.device.id)
    raise TypeError(f"a block is a NumPy or a CuPy array, not {type(block).__module__}.{type(block).__qualname__}")


def select_backend(name: str, local_rank: int = 0) -> Backend:
    """Return the backend called `name` for the rank that is number `local_rank` on its machine.

    Parameters
    ----------
    name : {"auto", "numpy", "cupy", "shapes"}
        "auto" is "cupy" where it can be imported and a GPU answers, else "numpy".
    local_rank : int
        Ranks on one machine take its GPUs in turn: rank i takes GPU i modulo the number of those that CUDA shows, which
        CUDA_VISIBLE_DEVICES chooses and orders.

    Raises
    ------
    ConfigError
        If there is no such backend, or "cupy" is asked for and cannot be used; the message says why.
    """
    if name not in NAMES:
        raise ConfigError(f"there is no backend {name!r}; a grid's backend is one of {', '.join(map(repr, NAMES))}")
    if name == "numpy":
        return _host()
    if name == "shapes":
        return ShapesBackend()
    from importlib.util import find_spec

    if find_spec("cupy") is None:
        problem = "CuPy is not installed (pip install 'parlinalg[cupy13]' for CUDA 13, 'parlinalg[cupy12]' for CUDA 12)"
    else:
        try:
            from parlinalg.backend.cupy import for_local_rank
        except ImportError as error:
            problem = f"CuPy cannot be imported ({error})"
        else:
            found = for_local_rank(local_rank)
            if not isinstance(found, str):
                return found
            problem = found
    if name == "cupy":
        raise ConfigError(f"backend 'cupy' cannot be used: {problem}; backend='numpy' always can")
    return _host()


def _host() -> Backend:
    keep_freed()
    return NUMPY
