"""The assertion that a distributed result equals the serial one.  PYTEST_DONT_REWRITE: it asserts nothing."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from typing import Any
from zlib import crc32

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import Tensor
from parlinalg.testing.agreement import agree, current_test, failures_of, verdicts


def assert_equal_to_serial(got: Any, expected: Any, tolerance: float = 1e-12, *, scale: float | None = None) -> None:
    """Raise an AssertionError on every rank unless a distributed result equals the serial one on all of them.

    Every rank compares the block that it holds, replicas included; terms of a partial array are summed first.  Shapes,
    dtypes and the shapes of the blocks must be right too, and replicas must hold the same bits.  Collective over all
    ranks of the run, also those that hold nothing.

    Parameters
    ----------
    got : DistArray, Tensor, array, number, or a dict, list or tuple of them
        The result on the ranks at hand.  Plain arrays and numbers should be whole on every rank.
    expected : the same, of NumPy arrays, numbers, or arrays on a grid of one rank
        The serial result, known to every rank (`parlinalg.testing.once` computes it on rank 0 alone).  A Python number
        may stand for a result of any dtype.
    tolerance : float, optional
        The largest error of an element, relative to `scale`: 1e-12 suits float64, 1e-5 float32.  0 asks for equal
        values, as do integers and booleans.  NaN and infinity must be in the same places.
    scale : float, optional
        By default the magnitude of the largest finite element of each serial array; 1 makes the tolerance absolute, for
        values that cancel to about 0.

    Raises
    ------
    AssertionError
        With what is wrong on each rank.

    Examples
    --------
    >>> import numpy as np
    >>> import parlinalg as pla
    >>> from parlinalg.comm import SingleComm
    >>> A = np.arange(12.0).reshape(4, 3)
    >>> with pla.Grid({"r": 1, "c": 1}, SingleComm()) as grid:
    ...     B = pla.distribute(A, grid, pla.Layout("r", "c"))
    ...     assert_equal_to_serial({"sum": B + B}, {"sum": 2 * A})
    ...     assert_equal_to_serial(B, np.where(A == 5, 5.25, A))
    Traceback (most recent call last):
        ...
    AssertionError: the result differs by 0.25 at index (1, 2): 5.0 instead of 5.25 (tolerance 1e-12 × 11)
    """
    __tracebackhide__ = True
    where = f"a comparison with the serial result in {current_test()}"
    pairs: list[tuple[str, Any, Any]] = []
    _settle(where, lambda: pairs.extend(_paired("the result", got, expected)))  # before anything is communicated
    sums: dict[str, tuple[Any, int]] = {}

    def compare() -> None:
        problems = []
        for name, one, other in pairs:
            problems += _differences(name, one, other, tolerance, scale, sums)
        if problems:
            raise AssertionError("\n".join(problems))

    _settle(where, compare)
    _settle(where, lambda: _check_replicas(sums))


def _settle(where: str, work: Any) -> None:
    """Do this rank's work, and raise an AssertionError on all ranks if it fails on one."""
    __tracebackhide__ = True
    failure, problem = "", None
    try:
        work()
    except AssertionError as error:
        failure = str(error)
    except Exception as error:
        failure, problem = traceback.format_exc(), error
    found = agree(failure, where)
    if any(verdict.failure for verdict in found):
        raise AssertionError(failure if len(found) == 1 else failures_of(found)) from problem


def _paired(name: str, got: Any, expected: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the arrays of a result with their names, beside the expected ones; raise if those are others."""
    if isinstance(got, Mapping):
        if not isinstance(expected, Mapping) or set(got) != set(expected):
            keys = sorted(map(str, expected)) if isinstance(expected, Mapping) else f"a {type(expected).__name__}"
            raise AssertionError(f"{name} has the keys {sorted(map(str, got))}, and the serial one {keys}")
        for key in sorted(got, key=str):
            yield from _paired(f"{name}[{key!r}]", got[key], expected[key])
    elif isinstance(got, list | tuple):
        if not isinstance(expected, list | tuple) or len(got) != len(expected):
            raise AssertionError(f"{name} has {len(got)} items, and the serial one is {expected!r:.200}")
        for i, (one, other) in enumerate(zip(got, expected)):
            yield from _paired(f"{name}[{i}]", one, other)
    else:
        one = got.data if isinstance(got, Tensor) else got
        other = _whole(expected)
        if not isinstance(one, DistArray):
            one = np.asarray(one)
        if tuple(one.shape) != other.shape:
            raise AssertionError(f"{name} has the shape {tuple(one.shape)}, and the serial one {other.shape}")
        if not isinstance(expected, bool | int | float | complex) and one.dtype != other.dtype:
            raise AssertionError(f"{name} has the dtype {one.dtype}, and the serial one {other.dtype}")
        yield name, one, other


def _whole(expected: Any) -> np.ndarray:
    value = expected.data if isinstance(expected, Tensor) else expected
    if isinstance(value, DistArray):
        if value.grid.size > 1:
            raise AssertionError(
                f"the serial result should be on a grid of one rank, not on {value.grid!r}: make it on the fixture "
                "serial_grid, or with NumPy"
            )
        value = value.gather()
    return np.asarray(value)


def _differences(
    name: str, got: Any, expected: np.ndarray, tolerance: float, scale: float | None, sums: dict[str, tuple[Any, int]]
) -> list[str]:
    """Return the problem with this rank's block, if any, and note its checksum."""
    if scale is None and expected.size and expected.dtype.kind not in "iub":
        sizes = np.abs(expected.astype(_wide(expected)))
        scale = float(sizes[np.isfinite(sizes)].max(initial=0.0))
    if not isinstance(got, DistArray):
        sums[name] = ("every rank", _checksum(got))
        return _unequal(name, got, expected, tolerance, scale or 0.0, (0,) * got.ndim)
    grid, array = got.grid, got.summed()
    block = np.asarray(grid.backend.to_host(array.block))
    if not grid.inside:
        return [] if not block.size or not array.ndim else [f"{name} has {block.size} elements outside its grid"]
    own = tuple(slice(r.start, r.stop) for r in grid.block(array.layout, array.shape))
    part = expected[own]
    if block.shape != part.shape:
        return [f"{name} has a block of shape {block.shape}; by {array.layout!r} it has {part.shape}"]
    at = tuple((axis, grid.coords[axis]) for axis in array.layout.axes)
    sums[name] = ((grid.world.world_ranks, tuple(grid.sizes.items()), at), _checksum(block))
    return _unequal(name, block, part, tolerance, scale or 0.0, tuple(s.start for s in own))


def _wide(array: np.ndarray) -> type:
    return np.complex128 if array.dtype.kind == "c" else np.float64


def _unequal(
    name: str, got: np.ndarray, part: np.ndarray, tolerance: float, scale: float, start: tuple[int, ...]
) -> list[str]:
    """Return the worst difference of a block whose first element has the index `start`; an empty list if none."""
    exact = not tolerance or part.dtype.kind in "iub"
    same = got == part
    if part.dtype.kind not in "iub":
        same |= np.isnan(got) & np.isnan(part)
    if exact:
        error = np.where(same, 0.0, np.inf)
    else:
        with np.errstate(invalid="ignore"):
            error = np.where(same, 0.0, np.abs(got.astype(_wide(got)) - part.astype(_wide(part))))
        error = np.where(np.isnan(error), np.inf, error)
    wrong = error > tolerance * scale
    if not wrong.any():
        return []
    at = np.unravel_index(int(np.argmax(error)), got.shape)
    index = tuple(int(i) + s for i, s in zip(at, start))
    by = "" if exact else f" by {error[at]:.3g}"
    limit = "exactly" if exact else f"tolerance {tolerance:g} × {scale:.8g}"
    many = f", and {int(wrong.sum()) - 1} more elements of this block" if wrong.sum() > 1 else ""
    found = f"{got[at].item()} instead of {part[at].item()} ({limit})"
    return [f"{name} differs{by} at index {index}: {found}{many}"]


def _checksum(block: np.ndarray) -> int:
    return crc32(np.ascontiguousarray(block).reshape(-1).view("u1").data)


def _check_replicas(sums: dict[str, tuple[Any, int]]) -> None:
    """Raise on the ranks whose replica of a block has other bits than that of a lower rank."""
    exchange = verdicts()
    if exchange is None:
        return
    first: dict[tuple[str, Any], tuple[int, int]] = {}
    problems = []
    for rank, theirs in enumerate(exchange.gather(sums)):
        for name, (place, checksum) in theirs.items():
            owner, right = first.setdefault((name, place), (rank, checksum))
            if checksum != right and rank == exchange.rank:
                problems.append(f"{name}: this rank's replica has not the bits of rank {owner}'s")
    if problems:
        raise AssertionError("\n".join(problems))
