"""Loops over host blocks that numba compiles, where it is installed (`pip install 'parlinalg[fast]'`).

Chains of NumPy's operations pass over their tiles once an operation; a loop reads what it needs once and writes its
results once.  What they compute is the same, but for rounding.  A loop is a Python function marked `@loop()` beside
the kernel whose compiled form calls it; numba is imported, and the loop compiled, when it is first called with a
dtype.  Arrays of one call have one dtype, float32 or float64, in which all is computed.  The environment's
PARLINALG_COMPILED=0 turns loops off.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np

from parlinalg import tunables
from parlinalg.backend import namespace
from parlinalg.backend.shapes import ShapeArray
from parlinalg.backend.views import flat

Block = Any

_DTYPES = (np.dtype(np.float32), np.dtype(np.float64))

AS_WRITTEN = {"forceinline": True, "fastmath": False}
"""For parts of loops: without `fastmath` they would have that of the first loop in which they are compiled."""


class Loop:
    """A function that numba compiles when it is first called, or first met in another loop.

    Attributes
    ----------
    name : str
    function : callable
        The function as it is written, for blocks that loops do not take.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any]) -> None:
        self.name, self.function = function.__name__, function
        self._options = options

    def __call__(self, *args: Any) -> Any:
        if args and isinstance(args[0], ShapeArray):  # blocks without values get none
            return None
        return self._dispatcher(*args)

    @cached_property
    def _dispatcher(self) -> Any:
        from numba import njit

        from parlinalg.backend import primitives  # noqa: F401  (tells numba what `exp` is)

        try:
            return njit(self.function, **self._options)
        except RuntimeError:  # no folder for the code can be written
            return njit(self.function, **{**self._options, "cache": False})

    @property
    def _numba_type_(self) -> Any:
        """Return numba's type of the compiled function, for loops that call this one by a global name."""
        return self._dispatcher._numba_type_


def loop(*, sums: bool = False) -> Callable[[Callable[..., Any]], Loop]:
    """Mark a function as a loop: its code is kept on disk where a place for it can be written.

    With `sums` terms may be added in another order, without which sums do not vectorize.  Without, every operation is
    rounded as written, so that a number's result does not depend on where in a block it lies.
    """
    flags = {"reassoc", "contract", "nsz"} if sums else False
    return lambda function: Loop(function, {"cache": True, "nogil": True, "error_model": "numpy", "fastmath": flags})


def inlined(function: Callable[..., Any]) -> Loop:
    """Mark a function as a part of loops, compiled into each; its operations are rounded as written."""
    return Loop(function, AS_WRITTEN)


def elementwise(loop: Loop, shape: tuple[int, ...], *blocks: Block) -> Block:
    """Return a new block of this shape from a loop over flat blocks."""
    made = namespace(blocks[0]).empty(shape, blocks[0].dtype)
    loop(*map(flat, blocks), made.reshape(-1))
    return made


def exp(x: Any) -> Any:
    """Return exp(x) in the dtype of x: only within loops."""
    raise NotImplementedError


def high_product(a: Any, b: Any) -> Any:
    """Return the high 64 bits of the product of two uint64: only within loops."""
    raise NotImplementedError


FEW_ROWS = (8, 6)
"""Rows of a matrix whose products with 32 and with 64 bytes of columns are found together."""


def few_rows_product(
    y: Any, first: int, column: int, scale: float, a: Any, top: int, rows: int, left: int, length: int, x: Any
) -> None:  # fmt: skip
    """y[first : first + rows, column:] += scale * a[top : top + rows, some] @ x[some]: only within loops.

    `some` are columns from `left` on.  The elements of a row lie together, those of x are 32 or 64 bytes, as many as
    are added to in a row of y.  At most as many rows as FEW_ROWS says are found; terms are added in the order of the
    columns, so that a row's result does not depend on where it lies.
    """
    raise NotImplementedError


def few_rows_solution(x: Any, a: Any, first: int, lower: bool, unit: bool) -> None:
    """Replace as many rows of x as FEW_ROWS says by the solution with the triangle in a, whose diagonal may be ones.

    Only within loops; `first` is the first row of x, and the first row and column of the triangle.
    """
    raise NotImplementedError


def few_rows_quotients(y: Any, first: int, column: int, rows: int, t: Any, top: int, ones: Any) -> None:
    """Replace z = y[first : first + rows, column:], of 32 bytes a row, by the solution x of `x (D t) = z`.

    Only within loops.  t, whose rows from `top` on count, is a triangle without its diagonal of ones; the reciprocals
    of the diagonal matrix D are ones[0, top:].
    """
    raise NotImplementedError


def ready(*blocks: Block, kind: Any = np.ndarray) -> bool:
    """Return True if loops can compute on these blocks.

    The blocks are host arrays of float32 or all of float64, the first of them not small.  With `kind` they are arrays
    without values, in place of such: then numba is not imported.
    """
    first = blocks[0]
    if type(first) is not kind or first.size < tunables.COMPILED_SIZE or first.dtype not in _DTYPES:
        return False
    if any(type(b) is not kind or b.dtype != first.dtype for b in blocks[1:]):
        return False
    return available() if kind is np.ndarray else _wanted()


@contextmanager
def as_loop(name: str, like: Block, *blocks: Block) -> Iterator[None]:
    """Count what is done within as one kernel that passes over these blocks, if `like` is an array without values that
    stands for such as loops take: with real ones a loop does it."""
    if not (ready(like, kind=ShapeArray) and like.device.cpu):
        yield
        return
    device = like.device
    with device.one_kernel():
        yield
    device.kernel(name, sum(block.nbytes for block in blocks), max(block.size for block in blocks), blocks[0].dtype)


def _wanted() -> bool:
    """Return True if numba is installed and not turned off."""
    return os.environ.get("PARLINALG_COMPILED", "1") != "0" and _installed()


@cache
def _installed() -> bool:
    return find_spec("numba") is not None


@cache
def available() -> bool:
    """Return True if numba is installed, works, and is not turned off; a warning says why it does not work."""
    if not _wanted():
        return False
    try:
        from parlinalg.backend import primitives  # noqa: F401
    except Exception as error:  # what numba raises depends on its version and NumPy's
        warnings.warn(f"numba is installed but cannot be used, and kernels run unfused: {error}", stacklevel=2)
        return False
    return True


def about() -> str:
    """Return a description of the compiler of kernels on CPUs, for people to read."""
    if not available():
        return "NumPy's operations in tiles"
    from importlib.metadata import version

    return f"loops compiled by numba {version('numba')}"
