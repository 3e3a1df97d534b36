"""The memory that NumPy's arrays take, byte by byte, and the most that they took at once."""

from __future__ import annotations

import atexit
import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

_SET_HANDLER = 304
"""The place of `PyDataMem_SetHandler` in NumPy's table of C functions, which keeps its places."""
_Address, _Size = ctypes.c_void_p, ctypes.c_size_t
_KINDS: dict[str, tuple[Any, ...]] = {
    "malloc": (_Address, _Size),
    "calloc": (_Address, _Size, _Size),
    "realloc": (_Address, _Address, _Size),
    "free": (None, _Address),
}
"""The C library's functions: what each returns, and takes.  NumPy's have a context before, and free the size after."""
_CALLS = {
    name: ctypes.CFUNCTYPE(kinds[0], _Address, *kinds[1:], *[_Size] * (name == "free"))
    for name, kinds in _KINDS.items()
}


class _Handler(ctypes.Structure):
    """NumPy's `PyDataMem_Handler`, of version 1."""

    _fields_ = [
        ("name", ctypes.c_char * 127), ("version", ctypes.c_uint8), ("context", _Address), *_CALLS.items()
    ]  # fmt: skip


class ArrayMemory:
    """The bytes of arrays, as NumPy asks for them and frees them.

    Attributes
    ----------
    held : int
        Bytes now.
    peak : int
        The most bytes at once, since `reset_peak` if that was called.
    """

    def __init__(self) -> None:
        self.held = self.peak = 0
        self._sizes: dict[int, int] = {}
        library = ctypes.CDLL(None)
        for name, (given, *taken) in _KINDS.items():
            function = library[name]  # this object's own, unlike an attribute
            function.restype, function.argtypes = given, taken
            setattr(self, f"_{name}", function)
        calls = (call(getattr(self, name)) for name, call in _CALLS.items())
        self._handler = _Handler(b"counted", 1, None, *calls)

    def reset_peak(self) -> None:
        """Let the peak begin anew, with what is held now."""
        self.peak = self.held

    def _made(self, address: int | None, n: int) -> int | None:
        if address is not None:
            self._sizes[address] = n
            self.held += n
            self.peak = max(self.peak, self.held)
        return address

    def _gone(self, address: int | None) -> None:
        self.held -= self._sizes.pop(address, 0) if address is not None else 0

    def malloc(self, _: Any, n: int) -> int | None:
        return self._made(self._malloc(n), n)  # type: ignore[attr-defined]

    def calloc(self, _: Any, n: int, size: int) -> int | None:
        return self._made(self._calloc(n, size), n * size)  # type: ignore[attr-defined]

    def realloc(self, _: Any, address: int | None, n: int) -> int | None:
        again = self._realloc(address, n)  # type: ignore[attr-defined]
        if again is not None:
            self._gone(address)
        return self._made(again, n)

    def free(self, _: Any, address: int | None, __: int) -> None:
        self._gone(address)
        self._free(address)  # type: ignore[attr-defined]

    def _give_up(self, address: int) -> None:
        """Leave arrays that are still there to another handler: Python's functions cannot be called at its end."""
        start = _Handler.context.offset
        ctypes.memmove(ctypes.addressof(self._handler) + start, address + start, ctypes.sizeof(_Handler) - start)


@cache
def _memory() -> ArrayMemory:
    """Return the one that counts: arrays are freed by it long after its context has ended."""
    found = ArrayMemory()
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(found))  # it outlives all arrays
    return found


@contextmanager
def array_memory() -> Iterator[ArrayMemory]:
    """Count the arrays that this thread makes within a `with` block, until they are freed.

    Unlike `tracemalloc`, whose peak has Python's objects in it, it counts arrays alone.

    >>> with array_memory() as memory:
    ...     before = memory.held
    ...     a = np.zeros(1000)
    ...     b = np.exp(a * 2)[:10]
    ...     del a
    ...     print(memory.held - before, memory.peak - before)
    8000 24000
    """
    first, core = not _memory.cache_info().currsize, np._core  # type: ignore[attr-defined]
    found = _memory()
    new, get = ctypes.pythonapi.PyCapsule_New, ctypes.pythonapi.PyCapsule_GetPointer
    new.restype, new.argtypes = ctypes.py_object, [_Address, ctypes.c_char_p, _Address]
    get.restype, get.argtypes = _Address, [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.cast(get(core._multiarray_umath._ARRAY_API, None), ctypes.POINTER(_Address))
    install = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(table[_SET_HANDLER])
    before = install(new(ctypes.addressof(found._handler), b"mem_handler", None))
    if first:
        atexit.register(found._give_up, get(before, b"mem_handler"))
    found.reset_peak()
    try:
        yield found
    finally:
        install(before)
