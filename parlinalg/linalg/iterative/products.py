"""Matrices and functions in their place, for methods that use both products, and stacks of matrices one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array.core import DistArray, whole
from parlinalg.array.create import zeros
from parlinalg.array.joining import stack
from parlinalg.array.shapes import reshape
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout
from parlinalg.linalg.iterative.vectors import (
    Apply,
    Vectors,
    lead_of,
    precise,
    product,
    refuse_scipy,
    shifted,
)
from parlinalg.linalg.matrices import LinAlgError, distributed, naming
from parlinalg.matmul import matmul


def count_of(k: Any, shape: tuple[int, int], name: str, most: int, what: str = "k") -> int:
    """Return k, a number of values of a matrix; raise ValueError unless it is from 1 to `most`."""
    m, n = shape
    side = f"{min(m, n)} {'row' if m < n else 'column'}{'s' * (min(m, n) != 1)}"
    if most < 1:
        raise ValueError(f"{name}: a matrix with {side} is too small for any {what}; take svd or eigh")
    return whole(f"{name}: of {side} {what}", k, 1, most)


class Products(NamedTuple):
    """The products of a matrix [..., m, n] and its adjoint with columns, and how the rows of what it takes lie."""

    forward: Apply
    backward: Apply
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    rows: Cut
    grid: Grid


def products_with(a: Any, name: str, vector: Any, what: str) -> Products:
    """Return the products of a matrix, or stack of them, or of two functions, for which a vector [n] says n.

    Raises
    ------
    LinAlgError
        If it is no matrix.
    ValueError
        If a vector of the right shape lacks, or the functions give no arrays of the right shapes.
    """
    if isinstance(a, DistArray) and a.ndim > 1:
        a, adjoint = a.summed(), a.summed().mT.conj()
        forward, backward = (lambda x: matmul(a, x)), (lambda y: matmul(adjoint, y))
        return Products(forward, backward, a.shape[-2:], precise(a), a.layout.dims[-1], a.grid)
    refuse_scipy(a, name)
    if not isinstance(a, tuple) or len(a) != 2 or not all(map(callable, a)):
        raise LinAlgError(
            f"{name} takes a matrix, a DistArray, or a stack of them, or two functions (of x and of y: A x, Aᴴ y), not "
            f"{a.shape if isinstance(a, DistArray) else type(a).__name__}"
        )
    if not isinstance(vector, DistArray) or vector.ndim != 1:
        raise ValueError(f"{name} of functions takes a DistArray {what} [n], which says n and how vectors lie")
    v, (n,) = vector.summed(), vector.shape

    def checked(function: Apply, rows: int | None, label: str) -> Apply:
        def times(x: DistArray) -> DistArray:
            y = function(x)
            dtype = np.result_type(x.dtype, getattr(y, "dtype", x.dtype))
            return product(y, (rows, x.shape[1]), v, None, dtype, f"{name}: {label}")

        return times

    one = near_one(v.astype(precise(v)))[:, None]
    image = checked(a[0], None, "A x")(one)
    m, dtype = image.shape[0], np.result_type(one.dtype, image.dtype)
    return Products(checked(a[0], m, "A x"), checked(a[1], n, "Aᴴ y"), (m, n), dtype, v.layout.dims[0], v.grid)


def one_by_one(
    solve: Callable[..., Sequence[DistArray]], matrices: Sequence[Any], shapes: Sequence[tuple[str, tuple[int, ...]]],
    dtype: np.dtype[Any],
) -> list[DistArray]:  # fmt: skip
    """Return the results of a method for each matrix of a stack, stacked, with the stack's dims cut as they are.

    Parameters
    ----------
    matrices : sequence
        Arguments of `solve`: stacks, of which each call gets a matrix, and what all calls get.
    shapes : sequence of (str, tuple of int)
        Of each result: "values", which are real and whole on all ranks, or the dims "m" and "n" whose rows lie as
        those of the matrices, and its shape.
    """
    stacks = [a for a in matrices if lead_of(a)]
    try:
        lead = np.broadcast_shapes(*map(lead_of, stacks))
    except ValueError:
        given = " and ".join(str(a.shape) for a in stacks)
        raise ValueError(f"the leading dims of the stacks do not fit to each other: {given}") from None
    first = max(stacks, key=lambda a: a.ndim)

    def picked(a: Any, at: tuple[int, ...]) -> Any:
        own = lead_of(a)
        return a[tuple(i if n > 1 else 0 for i, n in zip(at[len(at) - len(own) :], own, strict=True))] if own else a

    found = []
    for at in np.ndindex(*lead):
        with naming(at):
            found.append(solve(*(picked(a, at) for a in matrices)))
    cuts, results = first.layout.dims[: len(lead)], []
    for i, (kind, shape) in enumerate(shapes):
        inner = {"values": (None,), "m": (first.layout.dims[-2], None), "n": (None, first.layout.dims[-1])}[kind]
        layout, whole = Layout(*cuts, *inner), (*lead, *shape)
        if not found:
            real = np.zeros(0, dtype).real.dtype if kind == "values" else dtype
            results.append(zeros(whole, dtype=real, grid=first.grid, layout=layout))
            continue
        results.append(reshape(stack([each[i] for each in found]), whole).redistribute(layout))
    return results


def near_one(v: DistArray) -> DistArray:
    """Return a vector times a power of two, unless its square and its products with matrices are well in range."""
    return shifted(v, Vectors(v).measured(v)[1][0])


def whole_values(w: np.ndarray, like: DistArray) -> DistArray:
    """Return real values that all ranks have as an array, in the precision of another one."""
    return distributed(np.ascontiguousarray(w, np.zeros(0, like.dtype).real.dtype), Layout(None), like.grid)
