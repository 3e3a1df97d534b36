"""Kernels: what is computed on blocks between the products, each registered once with up to three forms.

A kernel is a function of blocks.  Its plain form is the function itself: operations of the blocks' namespace, which
every backend has.  Beside it may stand a compiled form, by a loop that numba compiles, and a CUDA form, with the text
of its program.  A call takes the form that the backend of the blocks can run; a form that cannot compute these blocks
returns `NotImplemented`, and the plain form does.

A plain form passes over its arrays once an operation, so that on a CPU it goes over tiles that stay in a core's cache;
on a GPU a tile is the whole block.  Blocks of 16-bit floats are computed in float32 and rounded once.

A module of this folder holds a family of kernels.  `examples` are calls of every kernel, with arrays to try it on:
`parlinalg doctor --gpu` and the tests run them all.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import cache, update_wrapper
from importlib import import_module
from typing import Any, ClassVar, Generic, NamedTuple, ParamSpec, TypeVar

import numpy as np

from parlinalg.backend import backend_of, compiled, cuda
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.shapes import ShapeArray, ShapesBackend
from parlinalg.backend.views import flat

Block = Any
P = ParamSpec("P")
R = TypeVar("R")

_KERNELS: list[Kernel] = []
_EXAMPLES: list[Example] = []


class Kernel(Generic[P, R]):
    """A function of blocks, computed by the form that suits the blocks' backend.

    Parameters
    ----------
    plain : callable
        The form for every backend.
    alike : int
        The number of leading arguments that are blocks of one dtype, as the other forms need.

    Attributes
    ----------
    name : str
        The family's name and the function's.
    program : str
        The CUDA text of the CUDA form; empty where there is none.
    around : callable or None
        Of the class: what a call of any kernel is given to instead, with its arguments, to be timed.
    """

    around: ClassVar[Callable[[Kernel[..., Any], tuple[Any, ...], dict[str, Any]], Any] | None] = None

    def __init__(self, plain: Callable[P, R], alike: int) -> None:
        update_wrapper(self, plain)
        self.name = f"{plain.__module__.removeprefix(__name__ + '.')}.{plain.__name__}"
        self.plain, self.alike, self.program = plain, alike, ""
        self._compiled: Callable[P, Any] | None = None
        self._cuda: Callable[P, Any] | None = None
        self._shapes: Callable[..., Any] | None = None

    def __call__(self, *args: P.args, **named: P.kwargs) -> R:
        if Kernel.around is not None:
            return Kernel.around(self, args, named)
        if isinstance(args[0], ShapeArray):
            return self._imagined(args[0].device, *args, **named)
        if self._cuda is not None and cuda.ready(*args[: self.alike]):
            found = self._cuda(*args, **named)
        elif self._compiled is not None and compiled.ready(*args[: self.alike]):
            found = self._compiled(*args, **named)
        else:
            return self.plain(*args, **named)
        return self.plain(*args, **named) if found is NotImplemented else found

    def _imagined(self, device: ShapesBackend, *args: P.args, **named: P.kwargs) -> R:
        """Return the result's shapes, and note one kernel; on a GPU without a CUDA form, each operation's."""
        if self._shapes is not None:
            return self._shapes(device, *args, **named)
        if device.cuda and (self._cuda is None or not cuda.ready(*args[: self.alike])):
            return self.plain(*args, **named)
        found = self.imitate(device, *args, **named)
        results = found if isinstance(found, tuple) else (found,)
        blocks: list[Any] = [b for b in (*args, *results) if hasattr(b, "nbytes")]
        largest = max((b.size for b in blocks), default=0)
        device.kernel(self.name, sum(b.nbytes for b in blocks), largest, blocks[0].dtype)
        return found

    def imitate(self, device: ShapesBackend, *args: P.args, **named: P.kwargs) -> R:
        """Return the result's shapes, and note no work; on a CPU the scratch of the form that it takes counts."""
        with device.one_kernel():
            found: Any = NotImplemented
            if device.cpu and self._compiled is not None and compiled.ready(*args[: self.alike], kind=ShapeArray):
                found = self._compiled(*args, **named)
            return self.plain(*args, **named) if found is NotImplemented else found

    def compiled(self, form: Callable[P, Any]) -> None:
        """Register the form that calls a compiled loop."""
        self._compiled = form

    def shapes(self, form: Callable[..., Any]) -> None:
        """Register the form for blocks without values, which tells their device, its first argument, what would be
        computed; needed only where the plain form asks for values, or takes long."""
        self._shapes = form

    def cuda(self, program: str) -> Callable[[Callable[P, Any]], None]:
        """Register the form that launches CUDA kernels, with their text: T is the blocks' type, W the working one."""
        self.program = program
        return lambda form: setattr(self, "_cuda", form)


def kernel(alike: int = 1) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Register a function as a kernel."""

    def register(plain: Callable[P, R]) -> Kernel[P, R]:
        _KERNELS.append(Kernel(plain, alike))
        return _KERNELS[-1]

    return register


class Example(NamedTuple):
    """A call of a kernel to try it by.

    Attributes
    ----------
    name : str
    call : callable
        Takes the blocks of `inputs`, and returns a block or a tuple of blocks.
    inputs : tuple of str
        The names of arrays that `samples` makes.
    """

    name: str
    call: Callable[..., Any]
    inputs: tuple[str, ...]


def example(name: str, call: Callable[..., Any], *inputs: str) -> None:
    """Register a call to try a kernel by."""
    _EXAMPLES.append(Example(name, call, inputs))


def samples(rows: int, width: int) -> dict[str, np.ndarray]:
    """Return the arrays that examples take, of float64 or integers."""
    rng = np.random.default_rng(0)
    x, g, m = rng.standard_normal((3, rows, width))
    found = {"x": x, "g": g, "m": m, "weight": 1 + rng.standard_normal(width) / 4, "bias": rng.standard_normal(width)}
    found["z"] = rng.standard_normal((rows, width, 2))
    found["ids"], found["table"] = rng.integers(0, 97, rows), rng.standard_normal((97, width))
    tokens = max(16, min(512, rows), rows // 4)
    found |= dict(zip("qkvd", rng.standard_normal((4, 2, tokens, 4, 64)), strict=True))
    found["heads"] = rng.standard_normal((2, tokens, 4, 2, 64))
    found["images"] = rng.standard_normal((max(1, rows // 32), 9, 8, 16))
    return found


@cache
def _families() -> None:
    for info in pkgutil.iter_modules(__path__):
        import_module(f"{__name__}.{info.name}")


def kernels() -> list[Kernel]:
    """Return all kernels, by families in the order of their names."""
    _families()
    return sorted(_KERNELS, key=lambda k: k.name.partition(".")[0])


def examples() -> list[Example]:
    """Return a call of every kernel to try it by, in the order of the families' names."""
    _families()
    return sorted(_EXAMPLES, key=lambda e: e.call.__module__)


# ------------------------------------------------------------------ plain forms, in tiles
TILE = 1 << 15
"""Elements of a tile on a CPU."""
ROWS_TILE = 1 << 16
"""Elements of a tile of rows on a CPU, in kernels that sum along them."""


def in_tiles(like: Block) -> bool:
    """Return True if kernels go over blocks like this one in tiles: on a CPU, unless there is nothing to compute."""
    backend = backend_of(like)
    return backend.cpu and (not isinstance(backend, ShapesBackend) or backend.in_kernel)


def runs(n: int, step: int, like: Block) -> list[slice]:
    """Return runs of `step` that cover n units of blocks like this one.

    Of blocks without values the first two in a kernel: the others would need the same scratch.
    """
    values = backend_of(like).values
    return [slice(at, min(n, at + step)) for at in range(0, n if values else min(n, 2 * step), step)]


def spans(n: int, like: Block, unit: int = 1, size: int = TILE) -> list[slice]:
    """Return runs that cover n units of so many elements of a block, on a CPU each of about `size` elements."""
    return runs(n, max(1, size // max(1, unit)) if in_tiles(like) else max(1, n), like)


def row_runs(rows: Block) -> list[slice]:
    """Return runs of rows of a matrix, on a CPU each of about ROWS_TILE elements."""
    return spans(len(rows), rows, rows.shape[1], ROWS_TILE)


def fused(chain: Callable[..., None], *blocks: Block, results: int = 1, scratch: int = 0) -> Any:
    """Return new blocks from blocks of one shape by `chain(xp, *tiles, *results, *scratch)`, called for every tile.

    Parameters
    ----------
    results : int
        The number of blocks the chain makes; one is returned as it is, more as a tuple.
    scratch : int
        The number of work arrays of a tile's length.
    """
    first, backend = blocks[0], backend_of(blocks[0])
    xp, work, n = backend.xp, work_dtype(first.dtype), first.size
    made = [xp.empty(first.shape, first.dtype) for _ in range(results)]
    arrays, targets = [flat(b) for b in blocks], [m.reshape(-1) for m in made]
    size = min(n, TILE) if in_tiles(first) else n
    cast = work != first.dtype
    room = [xp.empty(size, work) for _ in range(scratch + results * cast)]
    for part in runs(n, max(1, size), first):
        length = part.stop - part.start
        spare = room if length == size else [r[:length] for r in room]
        into = spare[scratch:] if cast else [t[part] for t in targets]
        given = [a[part] if a.dtype == work else a[part].astype(work) for a in arrays]
        chain(xp, *given, *into, *spare[:scratch])
        if cast:
            for target, values in zip(targets, into, strict=True):
                target[part] = values
    return made[0] if results == 1 else tuple(made)
