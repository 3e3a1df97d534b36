"""From a number of ranks to the sizes of a scheme's axes, with errors that list what would be right.  Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from parlinalg.errors import ConfigError
from parlinalg.grid import factorizations

SHOWN = 12


class NeedsShape(ConfigError):
    """The ranks fall into no square or cube, so that the user has to choose; `options` says among what."""

    def __init__(self, mode: str, size: int, options: str) -> None:
        super().__init__(f"{mode} tensor parallelism over {size} ranks needs {options}")
        self.options = options


def only(mode: str, size: int, axes: Sequence[str], shape: Sequence[int] | None, depth: int | None) -> dict[str, int]:
    """Return the sizes of a scheme of one axis (or none, for one rank), which has no shape to choose."""
    no_depth(mode, depth)
    if not axes:
        if size != 1:
            raise ConfigError(f"without a mode there is 1 tensor rank, not {size}: give a mode")
        return {}
    if shape is not None and tuple(shape) != (size,):
        raise ConfigError(f"{mode} over {size} ranks has one axis: leave out shape={tuple(shape)}, which is for grids")
    return {axes[0]: size}


def equal_sizes(mode: str, size: int, axes: Sequence[str], shape: Sequence[int] | None) -> dict[str, int]:
    """Return the sizes of the axes given by `shape`; by default all equal, for square or cubic numbers of ranks."""
    if shape is None:
        side = round(size ** (1 / len(axes)))
        if side ** len(axes) != size:
            raise NeedsShape(mode, size, f"a shape: {listed_sizes(factorizations(size, len(axes)))}")
        shape = (side,) * len(axes)
    return given(mode, size, axes, shape)


def given(mode: str, size: int, axes: Sequence[str], shape: Sequence[int]) -> dict[str, int]:
    """Return the sizes of the axes from a shape, checked."""
    whole = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in shape)
    if not whole or len(shape) != len(axes) or math.prod(shape) != size:
        fitting = listed_sizes(factorizations(size, len(axes)))
        raise ConfigError(
            f"shape={tuple(shape)} does not fit {mode} tensor parallelism over {size} ranks, whose axes are "
            f"({', '.join(axes)}): it may be {fitting}"
        )
    return dict(zip(axes, shape, strict=True))


def deep(size: int, axes: Sequence[str], shape: Sequence[int] | None, depth: int | None) -> dict[str, int]:
    """Return the sizes of the axes (depth, rows, columns) of 2.5D: from the shape, or a depth that leaves a square."""
    mode = "2.5d"
    if shape is not None:
        sizes = given(mode, size, axes, shape)
        if depth is not None and depth != sizes[axes[0]]:
            raise ConfigError(
                f"depth={depth} contradicts shape={tuple(shape)}, whose depth is {sizes[axes[0]]}: give one"
            )
        return sizes
    if depth is None:
        depths = [d for d, r, c in factorizations(size, 3) if r == c]
        or_shape = f"a shape: {listed_sizes(factorizations(size, 3))}"
        options = f"a depth: {listed_sizes(depths)} for square layers; or {or_shape}" if depths else or_shape
        raise NeedsShape(mode, size, options)
    divisors = [d for d in range(1, size + 1) if size % d == 0]
    if isinstance(depth, bool) or depth not in divisors:
        raise ConfigError(
            f"depth={depth!r} does not divide the {size} ranks of {mode} tensor parallelism: "
            f"it may be {listed_sizes(divisors)}"
        )
    side = math.isqrt(size // depth)
    if side * side * depth != size:
        shapes = [(depth, *rest) for rest in factorizations(size // depth, 2)]
        raise NeedsShape(mode, size, f"a shape where depth={depth} leaves no square: {listed_sizes(shapes)}")
    return dict(zip(axes, (depth, side, side), strict=True))


def no_depth(mode: str, depth: int | None) -> None:
    """Refuse a depth where the scheme has none."""
    if depth is not None:
        raise ConfigError(f"depth={depth} is for mode '2.5d'; {mode} has no depth, leave it out")


def listed_sizes(options: Sequence[object]) -> str:
    """Return the options as text: "(1, 6), (2, 3) or (6, 1)", cut short where there are many.

    >>> listed_sizes([1, 2, 4])
    '1, 2 or 4'
    """
    texts = [str(o) for o in options]
    if len(texts) > SHOWN:
        return ", ".join(texts[:SHOWN]) + ", …"
    return " or ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
