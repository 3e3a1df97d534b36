"""Triangles, adjoints and parts of matrices for rules, and operations whose results are there already."""

from __future__ import annotations

import inspect
from typing import Any

from parlinalg.array import DistArray, joining
from parlinalg.autograd.ops.arithmetic import Frame
from parlinalg.autograd.primitives import differentiable
from parlinalg.autograd.tape import tracing
from parlinalg.autograd.tensor import Tensor
from parlinalg.linalg import congruence
from parlinalg.linalg.systems import triangular_solution
from parlinalg.matmul import matmul


def adjoint(a: DistArray) -> DistArray:
    return a.mT.conj()


def tril(a: DistArray, k: int = 0) -> DistArray:
    return joining.triangle(a, k, lower=True)


def triu(a: DistArray, k: int = 0) -> DistArray:
    return joining.triangle(a, k, lower=False)


def hermitian(a: DistArray) -> DistArray:
    return (a + adjoint(a)) / 2


def skew(a: DistArray) -> DistArray:
    return (a - adjoint(a)) / 2


def halved(a: DistArray) -> DistArray:
    """Return the lower triangles with half their diagonals."""
    return (tril(a) + tril(a, -1)) / 2


def mirrored(a: DistArray) -> DistArray:
    """Return the Hermitian matrices with these upper triangles; of diagonals the real parts count."""
    return adjoint(halved(adjoint(a))) + halved(adjoint(a))


def divided(a: DistArray, r: DistArray) -> DistArray:
    """Return A R⁻ᴴ for upper triangles R; A is spent."""
    return congruence.divided(a, r) if a.ndim == 2 else adjoint(triangular_solution(r, adjoint(a)))


def widened(a: DistArray, m: int, n: int) -> DistArray:
    """Return the matrices with zeros below and right of them, of shape [..., m, n]."""
    more = m - a.shape[-2], n - a.shape[-1]
    return joining.padded(a, [(0, 0)] * (a.ndim - 2) + [(0, k) for k in more]) if any(more) else a


def first(a: DistArray, k: int, dim: int = -1) -> DistArray:
    """Return the first k columns of matrices, or with dim -2 rows; the array itself if it has no more."""
    if a.shape[dim] == k:
        return a
    return a[..., :k] if dim == -1 else a[..., :k, :]


def less(a: DistArray, b: DistArray) -> DistArray:
    """Return A - B, in the memory of B where it can be."""
    if a.layout != b.layout or a.dtype != b.dtype or a.layout.partial:
        return a - b
    block = b.block
    block *= -1
    block += a.block
    return b


def negated(a: DistArray) -> DistArray:
    """Return -A, in its memory."""
    block = a.block
    block *= -1
    return a


def beside(*matrices: DistArray) -> DistArray:
    """Return the columns of all matrices, those without columns left out."""
    wide = [a for a in matrices if a.shape[-1]] or list(matrices[:1])
    return joining.concatenate(wide, axis=-1) if len(wide) > 1 else wide[0]


def below(*matrices: DistArray) -> DistArray:
    """Return the rows of all matrices."""
    return beside(*(a.mT for a in matrices)).mT


def known(name: str, parameters: str, **rules: Any) -> Any:
    """Return the operation that records a result which is there already, as its argument `found`.

    Parameters
    ----------
    name : str
    parameters : str
        The names of its arguments: tensors, `found`, and what else rules need.
    **rules
        As of `differentiable`.
    """
    names = parameters.split()

    def function(*args: Any) -> DistArray:
        return args[names.index("found")]

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    function.__name__ = name
    function.__signature__ = inspect.Signature([inspect.Parameter(each, kind) for each in names])  # type: ignore[attr-defined]
    return differentiable(function, conjugate=False, **rules)


def unformed(like: DistArray, rows: int, columns: int) -> DistArray:
    """Return a stand-in for matrices [..., rows, columns] in the layout of `like`: steps of a rule, never formed."""
    empty = like.grid.backend.empty((0,) * like.ndim, like.dtype)
    return DistArray(empty, (*like.shape[:-2], rows, columns), like.layout.with_partial(()), like.grid)


def times_left(g: DistArray, u: DistArray, like: Frame) -> DistArray:
    """Return U g, for as many columns of U as g has rows."""
    return matmul(first(u, g.shape[-2]), g, layout=like.layout)


def times_right(g: DistArray, vh: DistArray, like: Frame) -> DistArray:
    """Return g Vᴴ, for as many rows of Vᴴ as g has columns."""
    return matmul(g, first(vh, g.shape[-1], -2), layout=like.layout)


def wants(x: Tensor) -> bool:
    return x.requires_grad and tracing()
