"""Rules of differentiation: functions, and the arrays that are saved for them until the backward pass.

A rule never finds an array in its closure.  It is given its arrays: so the tape can say which arrays it keeps and how
many bytes, and hooks can put something else in their place meanwhile (PyTorch's `saved_tensors_hooks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np

Block = Any


class Part:
    """One part of a rule: a function, and the arrays that it needs in the backward pass.

    Parameters
    ----------
    function : callable
        Takes what the part is given, as a rule the gradient, and then the saved arrays.  It must not hold arrays
        itself: these would neither be counted nor go through hooks.
    *saved : array or None or number
        What is not an array passes as it is.
    takes : bool
        The function is given the gradient in a list and takes it out, so that it can free the memory.

    Examples
    --------
    >>> Part(lambda g, x: g * x, np.array([1.0, 2.0]))(3.0)
    array([3., 6.])
    """

    __slots__ = ("function", "saved", "takes")

    def __init__(self, function: Callable[..., Any], *saved: Any, takes: bool = False) -> None:
        self.function = function
        self.saved = saved
        self.takes = takes

    def __call__(self, *given: Any) -> Any:
        return self.function(*given, *self.saved)


class PackedPart(Part):
    """A part of which some of the saved arrays are packed."""

    __slots__ = ()

    def __call__(self, *given: Any) -> Any:
        return self.function(*given, *[s.array() if type(s) is PackedArray else s for s in self.saved])


class PackedArray:
    """A saved array as `pack` returned it, until a part needs the array; parts may share one."""

    __slots__ = ("_unpack", "value")

    def __init__(self, value: Any, unpack: Callable[[Any], Block]) -> None:
        self.value = value
        self._unpack: Callable[[Any], Block] | None = unpack

    @property
    def waits(self) -> bool:
        """True until the array is needed."""
        return self._unpack is not None

    def array(self) -> Block:
        """Return the array, unpacked once."""
        if self._unpack is not None:
            self.value, self._unpack = self._unpack(self.value), None
        return self.value


class Hooks(NamedTuple):
    """The functions of `saved_arrays_hooks`."""

    pack: Callable[[Block], Any]
    unpack: Callable[[Any], Block]


_hooks: ContextVar[Hooks | None] = ContextVar("saved arrays hooks", default=None)


@contextmanager
def saved_arrays_hooks(pack: Callable[[Block], Any], unpack: Callable[[Any], Block]) -> Iterator[None]:
    """Pass every array that operations save for the backward pass through `pack`, and through `unpack` when needed.

    This is PyTorch's `torch.autograd.graph.saved_tensors_hooks`, for the blocks of this rank.

    Parameters
    ----------
    pack : callable
        Takes an array that an operation within the context saves, and returns what is kept in its place.  An array that
        several parts of one rule need is packed once.  Blocks of parameters that an operation is given are not saved
        arrays: they stay in memory anyway.
    unpack : callable
        Takes what `pack` returned, and returns an array of the same shape and dtype.  It is called in the backward pass
        when a part of a rule first needs the array; parts for gradients of parameters may run much later than others.

    Of nested contexts the innermost counts.  Arrays of values that are computed again in the backward pass are used at
    once, and not packed.

    Examples
    --------
    >>> import numpy as np, parlinalg as pla
    >>> from parlinalg.autograd import saved_arrays_hooks
    >>> grid = pla.Grid({"r": 1})
    >>> x = pla.Tensor(pla.distribute(np.arange(3.0), grid, pla.Layout("r")), requires_grad=True)
    >>> with saved_arrays_hooks(lambda a: a.astype("float32"), lambda a: a.astype("float64")):
    ...     y = (x * x).sum()
    >>> y.backward()
    >>> x.grad.gather()
    array([0., 2., 4.])
    """
    token = _hooks.set(Hooks(pack, unpack))
    try:
        yield
    finally:
        _hooks.reset(token)


@contextmanager
def without_hooks() -> Iterator[None]:
    """Save arrays as they are within the context."""
    token = _hooks.set(None)
    try:
        yield
    finally:
        _hooks.reset(token)


def packing(stays: Iterable[Block] = ()) -> Callable[[Part], Part] | None:
    """Return what packs the parts of one rule by the hooks in force, each array once; None without hooks.

    Parameters
    ----------
    stays : iterable of array
        Arrays in whose memory nothing is packed.
    """
    hooks = _hooks.get()
    if hooks is None:
        return None
    left = {id(memory(array)) for array in stays}
    done: dict[int, PackedArray] = {}

    def packed(value: Any) -> Any:
        if not is_array(value) or id(memory(value)) in left:
            return value
        if id(value) not in done:
            done[id(value)] = PackedArray(hooks.pack(value), hooks.unpack)
        return done[id(value)]

    return lambda part: PackedPart(part.function, *map(packed, part.saved), takes=part.takes)


def is_array(value: Any) -> bool:
    """Return True if a value is an array of a backend, and not one of NumPy's scalars."""
    if isinstance(value, np.ndarray):
        return True
    return hasattr(value, "dtype") and hasattr(value, "flags") and not isinstance(value, np.generic)


def memory(array: Block) -> Block:
    """Return the array whose memory a view keeps."""
    while is_array(base := getattr(array, "base", None)):
        array = base
    return array
