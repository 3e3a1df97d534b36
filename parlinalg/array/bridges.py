"""Distributed arrays in other libraries: SciPy's linear operators, and plain arrays of NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.backend import backend_of
from parlinalg.comm.check import compare, sample_checksum
from parlinalg.layout import Layout

RIGHT = (
    "every rank makes the same calls with the same vectors: give a method of SciPy that begins with random numbers "
    "the same ones on all ranks, by v0=, X= or rng="
)


def asnumpy(x: Any) -> Any:
    """Return the global array as a NumPy array on every rank.  Collective if it is distributed.

    Parameters
    ----------
    x : DistArray, Tensor, array or number
        Arrays of NumPy and numbers are returned as they are, arrays of CuPy copied to the host.

    Examples
    --------
    >>> import parlinalg as pla
    >>> pla.asnumpy(pla.arange(3))
    array([0, 1, 2])
    """
    if hasattr(x, "gather") and hasattr(x, "layout"):
        return x.gather()
    return backend_of(x).to_host(x) if hasattr(x, "__cuda_array_interface__") else x


def linear_operator(a: DistArray) -> Any:
    """Return the `scipy.sparse.linalg.LinearOperator` of a matrix (see `DistArray.as_linear_operator`)."""
    from scipy.sparse.linalg import LinearOperator

    if a.ndim != 2:
        raise ValueError(f"a linear operator is made of a matrix, not of an array of shape {a.shape}")
    whole = a.summed()
    matrix = whole.sharing(whole.block, order=whole.order)  # what is written to `a` later is not seen
    conjugated = matrix.dtype.kind == "c"

    def product(matrix: DistArray, x: Any) -> Any:
        """Return the product with vectors, or columns of them, that every rank holds whole."""
        grid, x = matrix.grid, np.asarray(x)
        facts = {"shape": list(x.shape), "dtype": x.dtype.name, "the vectors' checksum": sample_checksum(x)}
        compare(grid.world, "a linear operator", facts, RIGHT, always=True)
        # X[c, :]: every rank cuts out the part that meets its block
        layout = Layout(matrix.layout.dims[1], *[()] * (x.ndim - 1))
        held = tuple(slice(r.start, r.stop) for r in grid.block(layout, x.shape))
        block = grid.backend.from_host(np.array(x[held], order="C"))
        y: Any = matrix @ DistArray(block, x.shape, layout, grid)
        return y.gather()

    def adjoint(x: Any) -> Any:
        return product(matrix.T, x.conj()).conj() if conjugated else product(matrix.T, x)

    class Operator(LinearOperator):
        """A matrix in blocks over a grid, as a linear operator on vectors that every rank holds whole."""

        def __init__(self) -> None:
            super().__init__(matrix.dtype, matrix.shape)

        def _matvec(self, x: Any) -> Any:
            return product(matrix, np.asarray(x).reshape(-1))

        def _rmatvec(self, x: Any) -> Any:
            return adjoint(np.asarray(x).reshape(-1))

        def _matmat(self, X: Any) -> Any:
            return product(matrix, X)

        def _rmatmat(self, X: Any) -> Any:
            return adjoint(np.asarray(X))

    return Operator()
