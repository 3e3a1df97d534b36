"""BLAS: the threads it may start, so that the ranks on one machine do not crowd its cores, what NumPy does not ask of
it, and the rate of products."""

from __future__ import annotations

import ctypes
import math
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from functools import cache
from pathlib import Path
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np

from parlinalg.backend import Backend, compiled, namespace
from parlinalg.backend.shapes import ShapeArray

LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def cores() -> set[int]:
    """Return the cores this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def host_and_cores() -> list[str]:
    """Return the host and the cores of this process, as bits of a hexadecimal number, for `sharing` on other ranks."""
    return [socket.gethostname(), f"{sum(1 << core for core in cores()):x}"]


def sharing(places: Sequence[Sequence[str]], rank: int, local_ranks: int = 0) -> int:
    """Return how many ranks run on the cores of rank number `rank`, itself included, by the places of all ranks.

    Where the launcher started more on the node than have places here, `local_ranks`, the others are taken to be placed
    alike.

    >>> places = [["a", "3"], ["a", "3"], ["a", "c"], ["b", "3"]]
    >>> sharing(places, 0), sharing(places, 2), sharing(places, 0, local_ranks=6)
    (2, 1, 4)
    """
    host, own = places[rank]
    on_host = [int(theirs, 16) for name, theirs in places if name == host]
    known = sum(bool(int(own, 16) & theirs) for theirs in on_host)
    return max(known, -(-known * local_ranks // len(on_host)))


def cores_of(places: Sequence[Sequence[str]], host: str) -> int:
    """Return how many cores of a host the ranks at these places may run on.

    >>> cores_of([["a", "3"], ["a", "6"], ["b", "f"]], "a")
    3
    """
    every = 0
    for name, theirs in places:
        every |= int(theirs, 16) if name == host else 0
    return every.bit_count()


def set_blas_threads(local_ranks: int) -> int:
    """Give this process's BLAS its share of the cores, and return the number of threads.

    Parameters
    ----------
    local_ranks : int
        The number of ranks that share this process's cores.

    The share is the cores in this process's affinity mask divided by the ranks that share them, at least one, and
    never above what OMP_NUM_THREADS (or OpenBLAS's or MKL's own variable) allows.  It is set through threadpoolctl
    where that is installed, which knows every BLAS, else in the OpenBLAS that comes with NumPy and with SciPy.
    """
    threads = max(1, len(cores()) // max(1, local_ranks))
    threads = min([threads, *(limit for name in LIMITS if (limit := _limit(name)))])
    _set_threads(threads)
    _given[:] = [threads]
    return threads


_given: list[int] = []
"""The threads that `set_blas_threads` gave last, if it was called."""


@cache
def scipy_linalg() -> Any:
    """Return `scipy.linalg`, whose BLAS and LAPACK start as many threads as NumPy's does now.

    SciPy's wheel has a BLAS of its own, which takes all cores when it is loaded: with the first factorization, long
    after the grid was made.  Other libraries keep the threads that they have, which the program may have changed since.
    """
    loaded = _loaded()
    import scipy.linalg
    import scipy.linalg.cython_blas
    import scipy.linalg.cython_lapack

    for given in _given:
        _set_threads(blas_threads() or given, loaded)
    return scipy.linalg


def _loaded() -> list[str]:
    """Return the files of the BLAS that are loaded, without SciPy's, as far as threadpoolctl tells."""
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        return []
    own = [str(folder.resolve()) for folder in _folders("scipy")] if "scipy.linalg" in sys.modules else []
    files = [each["filepath"] for each in threadpool_info() if each["user_api"] == "blas"]
    return [each for each in files if str(Path(each).parent) not in own]


def _set_threads(threads: int, leave: Sequence[str] = ()) -> None:
    """Set the threads of every BLAS that is loaded, but for those in the files to leave."""
    try:
        from threadpoolctl import ThreadpoolController
    except ImportError:
        _set_openblas(threads)
    else:
        for library in ThreadpoolController().select(user_api="blas").lib_controllers:
            if library.filepath not in leave:
                library.set_num_threads(threads)


def _limit(name: str) -> int | None:
    """Return the value of an environment variable such as `4` or, by nesting level, `4,2`; None for no limit."""
    first = os.environ.get(name, "").partition(",")[0].strip()
    return int(first) if first.isdigit() and int(first) > 0 else None


def _set_openblas(threads: int, packages: Sequence[str] = ("numpy", "scipy.linalg")) -> None:
    """Set the threads of the OpenBLAS in the wheels of packages that are loaded, where there is one."""
    for package in packages:
        for symbol in SETTERS if package in sys.modules else ():
            if (function := _in_openblas(symbol, package)) is not None:
                function(threads)
                break


SETTERS = (
    "scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads", "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)  # fmt: skip
"""The names that OpenBLAS's function has in wheels, newer ones first."""


def _folders(package: str) -> list[Path]:
    """Return where the wheel of a package, which is imported, has its libraries."""
    folder = Path(sys.modules[package].__file__ or "").parent
    return [folder.parent / f"{package}.libs", folder / ".dylibs"]


@cache
def _in_openblas(symbol: str, package: str = "numpy") -> Any:
    """Return a function of the OpenBLAS inside NumPy's wheel, or SciPy's; None where there is none, or not this one."""
    folders = [folder for folder in _folders(package.partition(".")[0]) if folder.is_dir()]
    for path in (file for folder in folders for file in folder.glob("*openblas*")):
        library = ctypes.CDLL(str(path))  # the one already loaded: the path is the same
        if hasattr(library, symbol):
            return getattr(library, symbol)
    return None


def blas_threads() -> int | None:
    """Return the threads of the OpenBLAS inside NumPy's wheel; None if there is none."""
    function = _in_openblas("scipy_openblas_get_num_threads64_")
    return None if function is None else int(function())


class Workers:
    """So many threads of this process, this one among them, that compute side by side."""

    def __init__(self, count: int, others: Executor) -> None:
        self.count, self._others = count, others

    def run(self, tasks: Iterable[Callable[[], Any]]) -> list[Any]:
        """Call functions, in their order as threads become free, and return their results.

        What one of them raises is raised when the others have ended.
        """
        left: SimpleQueue[tuple[int, Callable[[], Any]]] = SimpleQueue()
        for numbered in enumerate(tasks):
            left.put(numbered)
        results = [None] * left.qsize()

        def work() -> None:
            with suppress(Empty):
                while True:
                    i, task = left.get_nowait()
                    results[i] = task()

        others = [self._others.submit(copy_context().run, work) for _ in range(self.count - 1)]
        try:
            work()
        finally:
            wait(others)
        for each in others:
            each.result()
        return results


@contextmanager
def workers(most: int) -> Iterator[Workers]:
    """Return the threads of NumPy's BLAS as `Workers`, and give it one meanwhile; one worker if they are above `most`.

    OpenBLAS shares out every call among its threads and waits for all of them.  Work that is not all products is done
    sooner by threads that each call a BLAS of one thread.  Where NumPy has another BLAS there is one worker.
    """
    threads = blas_threads() or 1
    count = threads if threads <= most else 1
    with ThreadPoolExecutor(max(1, count - 1)) as others:  # starts none before it is used
        if count > 1:
            _set_openblas(1, ["numpy"])
        try:
            yield Workers(count, others)
        finally:
            if count > 1:
                _set_openblas(threads, ["numpy"])


# ------------------------------------------------------------------ products that are added

ADDED = 1 << 16
"""Elements of a term of a sum that is made beside it, where BLAS cannot be asked to add; a sixteenth of it at most."""
ROWS, AS_IT_IS, TURNED, ADJOINT = 101, 111, 112, 113  # CBLAS's names
LEFT, RIGHT, LOWER, UPPER, UNIT, DIAGONAL = 141, 142, 122, 121, 132, 131


def add_product(y: Any, x: Any, w: Any) -> None:
    """Add `x @ w` to y in the dtype of y, of matrices (with leading batch dims) on one backend.

    Two host matrices of float32 or float64 are multiplied by the OpenBLAS in NumPy's wheel, which adds as it
    multiplies; `np.matmul` cannot.  Others in terms of a few rows, which stay in cache and are small beside y.
    """
    if not added(y, x, w):
        size = math.prod(y.shape)
        rows = max(1, min(ADDED, size // 16) * y.shape[-2] // max(1, size))
        xp, w = namespace(y), w.astype(y.dtype, copy=False)
        for start in range(0, y.shape[-2], rows):
            part = (..., slice(start, start + rows), slice(None))
            y[part] += xp.matmul(x[part].astype(y.dtype, copy=False), w)


def added(y: Any, x: Any, w: Any, scale: float = 1) -> bool:
    """Add `scale * (x @ w)` to y if BLAS adds as it multiplies; return True if it did."""
    imagined = isinstance(y, ShapeArray) and y.device.adds_products
    if not ((imagined or isinstance(y, np.ndarray)) and y.ndim == x.ndim == w.ndim == 2) or not (y.size and x.size):
        return False
    if not _in_blas(y) or not (y.dtype == x.dtype == w.dtype):
        return False
    if isinstance(y, ShapeArray):
        y.device.product(1, y.shape[0], y.shape[1], x.shape[1], y.dtype)
        return True
    (turn, ld), (turn_x, ld_x), (turn_w, ld_w) = _lying(y), _lying(x), _lying(w)
    (m, n), k = y.shape, x.shape[1]
    gemm = _cblas("gemm", y.dtype, m, n, k, ld, ld_x, ld_w)
    if gemm is None or turn != AS_IT_IS or not (turn_x and turn_w):
        return False
    sizes = map(ctypes.c_int64, (m, n, k))
    gemm(
        ROWS, turn_x, turn_w, *sizes, _number(y.dtype, scale), _address(x), ctypes.c_int64(ld_x), _address(w),
        ctypes.c_int64(ld_w), _number(y.dtype, 1), _address(y), ctypes.c_int64(ld),
    )  # fmt: skip
    return True


def added_square(y: np.ndarray, x: np.ndarray, scale: float = 1) -> bool:
    """Add `scale * (x @ xᴴ)` to the lower triangle of y, in rows, if BLAS can; return True if it did.

    The upper triangle of y is not changed.
    """
    if not y.size or not x.size or not _in_blas(y) or y.dtype != x.dtype:
        return False
    (turn, ld), (turn_x, ld_x) = _lying(y), _lying(x)
    rank_k = _cblas("herk" if y.dtype.kind == "c" else "syrk", y.dtype, *x.shape, ld, ld_x)
    if rank_k is None or turn != AS_IT_IS or turn_x != AS_IT_IS:
        return False
    real = np.finfo(y.dtype).dtype
    rank_k(
        ROWS, LOWER, AS_IT_IS, *map(ctypes.c_int64, x.shape), _number(real, scale), _address(x), ctypes.c_int64(ld_x),
        _number(real, 1), _address(y), ctypes.c_int64(ld),
    )  # fmt: skip
    return True


def substituted(
    t: np.ndarray, b: np.ndarray, *, right: bool = False, lower: bool = False, adjoint: bool = False,
    unit: bool = False,
) -> bool:  # fmt: skip
    """Replace b by the solution x of `op(t) x = b`, with `right` of `x op(t) = b`, if BLAS can; return True if it did.

    Parameters
    ----------
    t : array [n, n]
        A triangular matrix, in rows or in columns; the other triangle is not read.
    b : array
    lower, unit : bool
        t is a lower triangle; its diagonal is taken to be ones.
    adjoint : bool
        op(t) is the conjugate transpose.
    """
    return _by_triangle("trsm", t, b, right=right, lower=lower, adjoint=adjoint, unit=unit)


def multiplied(t: np.ndarray, b: np.ndarray, *, adjoint: bool = False) -> bool:
    """Replace b by `op(t) @ b` for an upper triangle t, if BLAS can; return True if it did.  See `substituted`."""
    return _by_triangle("trmm", t, b, right=False, lower=False, adjoint=adjoint, unit=False)


def _by_triangle(
    name: str, t: np.ndarray, b: np.ndarray, *, right: bool, lower: bool, adjoint: bool, unit: bool
) -> bool:  # fmt: skip
    if not (t.size and b.size) or not _in_blas(b) or t.dtype != b.dtype:
        return False
    (turn, ld), (turn_t, ld_t) = _lying(b), _lying(t)
    function = _cblas(name, b.dtype, *b.shape, ld, ld_t)
    if function is None or turn != AS_IT_IS or not turn_t:
        return False
    if turn_t == TURNED:  # what lies there is its transpose
        if adjoint and t.dtype.kind == "c":
            return False
        lower, operation = not lower, AS_IT_IS if adjoint else TURNED
    else:
        operation = ADJOINT if adjoint else AS_IT_IS
    function(
        ROWS, RIGHT if right else LEFT, LOWER if lower else UPPER, operation,
        UNIT if unit else DIAGONAL, *map(ctypes.c_int64, b.shape), _number(b.dtype, 1),
        _address(t), ctypes.c_int64(ld_t), _address(b), ctypes.c_int64(ld),
    )  # fmt: skip
    return True


CACHE = 1 << 19
"""Bytes of a matrix that a core reads for one product and finds again near it for another."""


def add_from_both_sides(below: Any, right: Any, a: Any, corner: tuple[int, int], x: Any, z: Any) -> None:
    """Add A x to `below` and Aᴴ z to `right`, for A the rows and columns of matrix `a` from a corner on.

    A is read once for both: by a loop that numba compiles, else some rows at a time, which stay in a core's cache.
    All vectors are contiguous and differ.
    """
    top, left = corner
    if a.flags.c_contiguous and blas_threads() == 1 and compiled.ready(a, below, right, x, z):
        _both_sides(a, top, left, x, z, below, right, False)
        return
    rest, z, xp = a[top:, left:], z.conj(), namespace(a)
    step = max(1, CACHE // max(1, rest.shape[1] * a.itemsize))
    column, row = xp.empty(len(below), a.dtype), xp.zeros(len(right), a.dtype)
    for start in range(0, len(z), step):
        strip, end = rest[start : start + step], start + step
        np.dot(strip, x, out=column[start:end])
        row += z[start:end] @ strip
    below += column
    right += row.conj()


@compiled.loop(sums=True)
def _both_sides(
    a: Any, top: int, left: int, x: Any, z: Any, below: Any, right: Any, triangle: bool
) -> None:  # fmt: skip
    """Add A x to `below` and zᵀ A to `right`, of four rows at once; A is a rectangle.

    Or A x of a symmetric matrix to `below`, which is `right`; its lower triangle is read.
    """
    m, zero = len(z), x.dtype.type(0)
    for turn in range((m + 3) // 4):
        i = 4 * turn
        end = min(i + 4, m)
        n = i if triangle else len(x)
        if end == i + 4:
            row, second, third, last = a[i + top], a[i + top + 1], a[i + top + 2], a[i + top + 3]
            row, second, third, last = row[left:], second[left:], third[left:], last[left:]
            p, q, r, s = z[i], z[i + 1], z[i + 2], z[i + 3]
            b, c, d, e = zero, zero, zero, zero
            for j in range(n):
                b += row[j] * x[j]
                c += second[j] * x[j]
                d += third[j] * x[j]
                e += last[j] * x[j]
                right[j] += (p * row[j] + q * second[j]) + (r * third[j] + s * last[j])
            below[i] += b
            below[i + 1] += c
            below[i + 2] += d
            below[i + 3] += e
        for k in range(i, end):
            row = a[k + top]
            row = row[left:]
            for j in range(n if end == i + 4 else 0, k if triangle else n):
                below[k] += row[j] * x[j]
                right[j] += row[j] * z[k]
            if triangle:
                below[k] += row[k] * x[k]


def has_hermitian(dtype: np.dtype[Any]) -> bool:
    """Return True if `add_hermitian` works for a dtype."""
    return dtype.char in LETTERS and _cblas("hemv" if dtype.kind == "c" else "symv", dtype) is not None


def add_hermitian(y: np.ndarray, a: np.ndarray, top: int, x: np.ndarray) -> None:
    """Add A x to y, for A the rows and columns of a Hermitian matrix in rows from number `top` on.

    The lower triangle is read; vectors are contiguous.
    """
    if not y.size:
        return
    rest = a[top:, top:]
    if a.flags.c_contiguous and blas_threads() == 1 and compiled.ready(a, y, x):
        _both_sides(a, top, top, x, x, y, y, True)
        return
    one = _number(a.dtype, 1)
    _cblas("hemv" if a.dtype.kind == "c" else "symv", a.dtype)(
        ROWS, LOWER, ctypes.c_int64(len(rest)), one, ctypes.c_void_p(rest.ctypes.data),
        ctypes.c_int64(a.strides[0] // a.itemsize), ctypes.c_void_p(x.ctypes.data), ctypes.c_int64(1), one,
        ctypes.c_void_p(y.ctypes.data), ctypes.c_int64(1),
    )  # fmt: skip


def lapack(name: str, dtype: np.dtype[Any], *arguments: Any) -> int | None:
    """Call a function of the LAPACK in NumPy's wheel, whose threads are those of NumPy's products; return its `info`.

    Parameters
    ----------
    name : str
        Without the letter of the dtype.
    *arguments : int, str of a letter or array
        As in Fortran, but for `info`, which comes last; arrays are overwritten.

    Returns None, and does nothing, where this NumPy has no such function.
    """
    function = _in_openblas(f"scipy_{LETTERS[dtype.char]}{name}_64_")
    if function is None:
        return None
    info, letters = ctypes.c_int64(0), 0
    given: list[Any] = []
    for each in arguments:
        if isinstance(each, str):
            given.append(ctypes.c_char_p(each.encode()))
            letters += 1
        elif isinstance(each, int):
            given.append(ctypes.byref(ctypes.c_int64(each)))
        else:
            given.append(ctypes.c_void_p(each.ctypes.data))
    function(*given, ctypes.byref(info), *[ctypes.c_size_t(1)] * letters)
    return info.value


def _in_blas(y: np.ndarray) -> bool:
    return y.dtype.char in LETTERS and y.dtype.isnative and y.flags.writeable


def _number(dtype: np.dtype[Any], value: float) -> Any:
    """Return a number as CBLAS takes it: complex ones by their address."""
    if dtype.char in "fd":
        return {"f": ctypes.c_float, "d": ctypes.c_double}[dtype.char](value)
    return ({"F": ctypes.c_float, "D": ctypes.c_double}[dtype.char] * 2)(value, 0)


def _address(array: np.ndarray) -> ctypes.c_void_p:
    """Return where an array's elements begin; `array.ctypes.data` takes twice as long."""
    return ctypes.c_void_p(array.__array_interface__["data"][0])


LETTERS = {"f": "s", "d": "d", "F": "c", "D": "z"}
"""The letters with which names of BLAS and LAPACK begin, by the characters of dtypes."""


def _cblas(name: str, dtype: np.dtype[Any], *sizes: int) -> Any:
    """Return a function that takes what CBLAS takes, with integers of 64 bits, of matrices in rows; None for none.

    It is CBLAS's in NumPy's wheel, or made of SciPy's BLAS where NumPy was built otherwise.  Triangles are SciPy's in
    any case, but for several threads, which would wait for work in both: up to 256 rows its older OpenBLAS (0.3.30)
    solves 1.1 to 1.5 times as fast as the one of NumPy 2.4 (0.3.31).  SciPy's takes no `sizes` beyond its integers.
    """
    letter, small = LETTERS[dtype.char], max(sizes, default=0) <= LARGEST
    in_wheel = not (name == "trsm" and small and blas_threads() == 1)
    found = _in_openblas(f"scipy_cblas_{letter}{name}64_") if in_wheel else None
    return found or (_of_scipy(name, letter) if small or scipy_integer().itemsize == 8 else None)


ARGUMENTS = {
    "gemm": (1, 0, 3, 2, 4, 5, 8, 9, 6, 7, 10, 11, 12),
    "syrk": range(10), "herk": range(10), "symv": range(10),
    "trsm": (0, 1, 2, 3, 5, 4, 6, 7, 8, 9, 10), "trmm": (0, 1, 2, 3, 5, 4, 6, 7, 8, 9, 10),
}  # fmt: skip
"""The positions of Fortran's arguments among CBLAS's behind the order; rows are the columns of the transpose."""
IN_FORTRAN = {
    AS_IT_IS: b"N", TURNED: b"T", ADJOINT: b"C", LEFT: b"R", RIGHT: b"L", LOWER: b"U", UPPER: b"L", UNIT: b"U",
    DIAGONAL: b"N",
}  # fmt: skip
SQUARED = {"syrk": b"T", "herk": b"C"}
"""Fortran's operation for x @ xᴴ of rows."""


@cache
def _of_scipy(name: str, letter: str) -> Any:
    """Return what `_cblas` does, made of SciPy's BLAS, which is Fortran's; None where it cannot be."""
    if name not in ARGUMENTS or (name == "symv" and letter not in "sd"):
        return None
    order, integer = ARGUMENTS[name], ctypes.c_int64 if scipy_integer().itemsize == 8 else ctypes.c_int
    function = of_scipy("cython_blas", letter + name, len(order))

    def run(rows: int, *given: Any) -> None:
        named = [_to_fortran(each, integer) for each in given]
        if name in SQUARED:
            named[1] = SQUARED[name]
        function(*[named[k] for k in order])

    return run


def _to_fortran(argument: Any, integer: Any) -> Any:
    """Return an argument of CBLAS as Fortran takes it: by its address, sizes as integers of SciPy's BLAS."""
    if isinstance(argument, int):
        return IN_FORTRAN[argument]
    if isinstance(argument, ctypes.c_int64):
        return ctypes.byref(integer(argument.value))
    return argument if isinstance(argument, ctypes.c_void_p) else ctypes.byref(argument)


LARGEST = 2**31 - 1
"""The largest integer of 32 bits."""


@cache
def of_scipy(module: str, name: str, arguments: int) -> Any:
    """Return a function of `cython_blas` or `cython_lapack`, where SciPy has them for Cython.

    It takes addresses; what lies there as an integer is one of `scipy_integer`.
    """
    capsule = getattr(scipy_linalg(), module).__pyx_capi__[name]
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * arguments)(pointer(capsule, _declaration(capsule)))


def _declaration(capsule: Any) -> bytes:
    """Return the declaration in C of a function that Cython shares, such as `void (int *, int *)`."""
    label = ctypes.pythonapi.PyCapsule_GetName
    label.restype, label.argtypes = ctypes.c_char_p, [ctypes.py_object]
    return bytes(label(capsule))


@cache
def scipy_integer() -> np.dtype[Any]:
    """Return the dtype of integers, and of Fortran's logical values, in `cython_blas` and `cython_lapack`.

    They have 64 bits where SciPy, from 1.18 on, was built so ("ILP64"): the declarations say `int64_t`, not `int`.
    """
    declared = _declaration(scipy_linalg().cython_lapack.__pyx_capi__["dgetrf"])
    return np.dtype(np.intc if b"(int *" in declared else np.int64)


@cache
def gemm_address(dtype: np.dtype[Any]) -> int | None:
    """Return the address of gemm for float32 or float64 in the OpenBLAS of NumPy's wheel, with integers of 64 bits."""
    gemm = _in_openblas(f"scipy_cblas_{LETTERS[dtype.char]}gemm64_")
    return None if gemm is None else ctypes.cast(gemm, ctypes.c_void_p).value


def _lying(matrix: np.ndarray) -> tuple[int, int]:
    """Return CBLAS's name for a matrix's order, and the elements from one row (or column) to the next; else (0, 0)."""
    (rows, columns), item = matrix.shape, matrix.itemsize
    down, across = matrix.strides
    if (across == item or columns == 1) and (down >= columns * item or rows == 1) and down % item == 0:
        return AS_IT_IS, max(columns, down // item)
    if (down == item or rows == 1) and (across >= rows * item or columns == 1) and across % item == 0:
        return TURNED, max(rows, across // item)
    return 0, 0


# ------------------------------------------------------------------ how fast products are

SIDE = 768  # of square matrices that a core multiplies at its full rate
LONG = 0.002  # seconds: products that take less do not show the full rate of a GPU
MOST_SIDE = 8192


def gemm_rate(backend: Backend, dtype: str, n: int = SIDE, seconds: float = 0.3, *, sustained: bool = False) -> float:
    """Return the floating-point operations a second of one rank's n×n products, called for so many seconds.

    Parameters
    ----------
    sustained : bool
        Over all calls, as where ranks share cores; by default that of the fastest call.
    """
    a = backend.from_host(np.random.default_rng(0).random((n, n)).astype(dtype))
    b = a.copy()
    a @ b
    backend.synchronize()
    first = before = perf_counter()
    best, calls = float("inf"), 0
    while calls == 0 or before - first < seconds:
        a @ b
        backend.synchronize()
        now = perf_counter()
        best, before, calls = min(best, now - before), now, calls + 1
    return 2 * n**3 / ((before - first) / calls if sustained else best)


def gemm_side(backend: Backend, dtype: str) -> int:
    """Return the side of square matrices that show the full rate of this backend: 768 on CPUs, more on GPUs."""
    n = SIDE
    while n < MOST_SIDE and 2 * n**3 / gemm_rate(backend, dtype, n, 0.0) < LONG:
        n *= 2
    return n
