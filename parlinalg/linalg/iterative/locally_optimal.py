"""Extreme eigenvalues by preconditioned gradients of blocks of vectors: `lobpcg`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parlinalg.array.core import DistArray, whole
from parlinalg.array.dispatch import primitive
from parlinalg.layout import Layout
from parlinalg.linalg.iterative.products import one_by_one, whole_values
from parlinalg.linalg.iterative.vectors import (
    Operator,
    Scaled,
    Vectors,
    applied,
    assumed_steps,
    check_callback,
    lead_of,
    met_odd,
    precise,
    product,
    shifted,
    tolerance,
)
from parlinalg.linalg.matrices import LinAlgError
from parlinalg.linalg.spectral import EighResult

AGAIN = 4
"""Steps of `lobpcg` after which products with the vectors are computed, in place of combined from those before."""


@primitive
def lobpcg(
    A: Operator, X: DistArray, B: Operator | None = None, M: Operator | None = None, *, tol: float | None = None,
    maxiter: int = 20, largest: bool = True, callback: Callable[[DistArray], Any] | None = None,
) -> EighResult:  # fmt: skip
    """Return extreme eigenvalues of A x = w B x and their eigenvectors [n, k], by LOBPCG (Knyazev 2001).

    The directions of the last step are kept orthonormal to the vectors (Duersch and others 2018).

    Parameters
    ----------
    A : DistArray [n, n] or [..., n, n], or function of a DistArray [n, k]
        Hermitian.
    X : DistArray [n, k] or [..., n, k]
        Where to begin: k independent vectors, of which 3 k are at most n.  The vectors lie like it.
    B : DistArray or function, optional
        Hermitian positive definite; the identity by default.
    M : DistArray or function, optional
        About the inverse of A.
    tol : float, optional
        It ends when every ‖A x − w B x‖ ≤ tol; by default √eps n.
    maxiter : int
        What is found by then is returned.
    largest : bool
        The largest eigenvalues, falling, else the smallest, rising.
    callback : function, optional
        Called with the eigenvalues after each iteration, on all ranks.

    A step takes a product of A (and B, M) with k columns, and two all-reduces of at most 18 k² numbers.  Every
    fourth step takes a product of A (and B) with 2 k columns more, so that rounding errors do not add up.  The matrices
    of stacks, whose leading dims are broadcast, are taken one after the other.
    """
    if not isinstance(X, DistArray) or X.ndim < 2:
        given = f"one of shape {X.shape}" if isinstance(X, DistArray) else f"a {type(X).__name__}"
        raise ValueError(f"lobpcg takes X as a DistArray [..., n, k], not {given}")
    check_callback("lobpcg", callback)
    (n, k), maxiter = X.shape[-2:], whole("lobpcg: maxiter", maxiter, 0)
    if n < 3:
        raise ValueError(f"lobpcg takes vectors of at least 3 elements, not {n}; eigh has all of them")
    if not 1 <= k <= n // 3:
        raise ValueError(f"lobpcg takes 1 to {n // 3} vectors of {n} elements, not {k}; eigh has all of them")
    dtype = precise(A, X, B)
    if any(map(lead_of, (A, X, B, M))):
        options: Any = {"tol": tol, "maxiter": maxiter, "largest": largest, "callback": callback}
        shapes = [("values", (k,)), ("m", (n, k))]
        return EighResult(*one_by_one(lambda *each: lobpcg(*each, **options), [A, X, B, M], shapes, dtype))
    pencil = _Pencil(A, B, M, X, dtype)
    limit = float(np.finfo(dtype).eps) ** 0.5 * n if tol is None else tolerance("lobpcg: tol", tol)
    xp, back, vectors = pencil.xp, X.grid.backend.from_host, pencil.vectors
    assumed = assumed_steps(vectors.like)
    s, a_s, b_s, both = pencil.start()
    with np.errstate(over="ignore"):
        limit = float(np.ldexp(limit, pencil.residual_power))
    arguments = {"A": A, "X": X, "B": B, "M": M}
    w, c, _ = _rayleigh_ritz(both, k, dtype, largest, assumed, arguments)
    x, ax, bx = (each @ back(c) for each in (s, a_s, b_s))
    p = ap = bp = x[:, :0]
    for turn in range(maxiter):
        r = ax - bx * back(w.astype(dtype))
        sizes = vectors.sums(lambda: [(abs(pencil.wide(r)) ** 2).sum(axis=0)], k)()  # noqa: B023
        if (np.sqrt(sizes.real) <= limit).all() if assumed is None else turn == assumed:
            break
        r = pencil.preconditioned(r, first=turn == 0)
        s, a_s, b_s = (
            xp.concatenate(each, axis=1)
            for each in ((x, r, p), (ax, pencil.times("A", r), ap), (bx, pencil.times("B", r), bp))
        )
        w, c, more = _rayleigh_ritz(pencil.products(s, a_s, b_s), k, dtype, largest, assumed, arguments)
        x, ax, bx, p, ap, bp = (each @ back(m) for m in (c, more) for each in (s, a_s, b_s))
        if turn % AGAIN == AGAIN - 1:  # what was combined is computed, before its errors have values of their own
            s = xp.concatenate([x, p], axis=1)
            (ax, ap), (bx, bp) = ((y[:, :k], y[:, k:]) for y in (pencil.times("A", s), pencil.times("B", s)))
        if callback is not None:
            callback(pencil.eigenvalues(w))
    return EighResult(pencil.eigenvalues(w), pencil.eigenvectors(x))


class _Pencil:
    """A x = w B x, and M, as products with columns that lie like X; A, B and M are multiplied by powers of two.

    They are 1 unless squares would leave the range.  Columns are blocks of this rank; a rank outside of the grid has
    columns without elements.
    """

    def __init__(self, a: Any, b: Any, m: Any, x: DistArray, dtype: np.dtype[Any]) -> None:
        self.grid, self.dtype, (n, k) = x.grid, dtype, x.shape
        self.n, self.layout = n, Layout(x.layout.dims[0], None)
        steps = {name: applied(v, f"lobpcg's {name}", n) for name, v in (("A", a), ("B", b), ("M", m)) if v is not None}
        start = x.redistribute(self.layout).astype(dtype)
        start = shifted(start, Vectors(start).measured(start)[1][0])
        self.xp = start.xp
        self.first = start.block if x.grid.inside else x.grid.backend.empty((0, k), dtype)
        one = DistArray(self.first[:, 0].copy(), (n,), Layout(self.layout.dims[0]), x.grid)
        self.vectors = Vectors(one)

        def checked(name: str) -> Scaled:
            def times(y: DistArray) -> DistArray:
                return product(steps[name](y), y.shape, x, self.layout, dtype, f"lobpcg: {name} x")

            return Scaled(times, self.vectors)

        self.steps = {name: checked(name) for name in steps}

    def held(self, block: Any) -> Any:
        """Return a block; of ranks outside of the grid, which have columns without elements here, the empty one."""
        return block if self.grid.inside else block[:, :0]

    def columns(self, block: Any) -> DistArray:
        """Return the columns of which this rank has a block."""
        return DistArray(self.held(block), (self.n, block.shape[1]), self.layout, self.grid)

    def times(self, name: str, block: Any) -> Any:
        """Return the block of the product of A, B or M with columns; B and M are the identity if they are not given."""
        if name not in self.steps:
            return block
        y = self.steps[name](self.columns(block))
        return y.block if self.grid.inside else block

    def wide(self, block: Any) -> Any:
        """Return a block in double precision, in which all sums are made."""
        return block.astype(self.vectors.dtype, copy=False)

    def products(self, s: Any, a_s: Any, b_s: Any) -> np.ndarray:
        """Return Sᴴ A S and Sᴴ B S, [2, width, width]."""
        width, wide = s.shape[1], self.wide
        terms = lambda: [wide(s).conj().T @ wide(y) for y in (a_s, b_s)]  # noqa: E731
        with np.errstate(over="ignore", invalid="ignore"):  # until A and B are in range
            return self.vectors.sums(terms, 2 * width * width)().reshape(2, width, width)

    def start(self) -> tuple[Any, Any, Any, np.ndarray]:
        """Return X, A X, B X and their products, and choose the powers of A and B by these."""
        s = self.first
        while True:
            a_s, b_s = self.times("A", s), self.times("B", s)
            both, fitted = self.products(s, a_s, b_s), False
            for name, found in zip("AB", both, strict=True):
                if name in self.steps and self.steps[name].fit(self.columns(s), np.abs(found).max()):
                    self.steps[name].exponents &= ~1  # even: vectors are divided by the root
                    fitted = True
            if not fitted:
                return s, a_s, b_s, both

    def preconditioned(self, r: Any, first: bool) -> Any:
        """Return M r; the `first` chooses the power of M."""
        z = self.times("M", r)
        if first and "M" in self.steps and self.steps["M"].fit_image(self.columns(r), self.columns(z)):
            z = self.times("M", r)
        return z

    def power(self, name: str) -> int:
        """Return the exponent of the power of two by which A, B or M is multiplied."""
        return int(self.steps[name].exponents) if name in self.steps else 0

    @property
    def residual_power(self) -> int:
        """The exponent of the power of two by which A x - w B x is multiplied, of vectors for which xᴴ B x = 1."""
        return self.power("A") - self.power("B") // 2

    def eigenvalues(self, w: np.ndarray) -> DistArray:
        """Return those of A and B as they are given."""
        with np.errstate(over="ignore"):
            w = np.ldexp(w, self.power("B") - self.power("A"))
            return whole_values(w, self.vectors.like)

    def eigenvectors(self, x: Any) -> DistArray:
        """Return those with xᴴ B x = 1 for B as it is given."""
        found = self.columns(self.xp.ascontiguousarray(x))
        return shifted(found, self.power("B") // 2)


def _rayleigh_ritz(
    both: np.ndarray, k: int, dtype: np.dtype[Any], largest: bool, assumed: int | None, given: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Return k Ritz values, and the coefficients of their vectors and of directions that are orthonormal to these.

    Parameters
    ----------
    both : array [2, width, width]
        Sᴴ A S and Sᴴ B S, of which the first k columns of S are vectors so far.
    given : dict
        The arguments of `lobpcg`, of which NaNs and infinities are reported.
    """
    width, eps = both.shape[-1], float(np.finfo(dtype).eps)
    if assumed is not None:
        return np.ones(k), np.ones((width, k), dtype), np.ones((width, k), dtype)
    if not np.isfinite(both).all():
        raise met_odd("lobpcg", **given)
    t, g = (part + part.conj().T for part in both / 2)
    inner, beside, sizes = g[:k, :k], g[:k, k:], np.diag(g).real
    first = _orthonormal(inner, sizes[:k], 10 * width * eps)
    if (found := first.shape[1]) < k:
        raise LinAlgError(f"lobpcg: X has only {found} independent vectors of {k}, or B is not definite")
    # What lies beside X is made orthogonal to it.  Directions of which rounding leaves few digits are dropped: they
    # would have Ritz values of their own.
    along = first @ (first.conj().T @ beside)
    others = _orthonormal(g[k:, k:] - beside.conj().T @ along, sizes[k:], eps**0.5)
    basis = np.vstack([np.hstack([first, -along @ others]), np.hstack([np.zeros((width - k, k)), others])])
    w, c = np.linalg.eigh(basis.conj().T @ t @ basis)
    at = np.arange(len(w))[::-1][:k] if largest else np.arange(k)
    c, more = c[:, at], c[:, at].copy()
    more[:k] = 0
    more = np.linalg.qr(np.hstack([c, more]))[0][:, k:]
    directions = np.zeros((width, k), dtype)
    directions[:, : more.shape[1]] = basis @ more
    return w[at], (basis @ c).astype(dtype), directions


def _orthonormal(g: np.ndarray, sizes: np.ndarray, limit: float) -> np.ndarray:
    """Return orthonormal combinations of vectors, by their inner products, without what is small beside their sizes.

    Parameters
    ----------
    g : array [m, m]
        The inner products of what is left of the vectors.
    sizes : array [m]
        The squared lengths that they had.
    limit : float
        Combinations of at most this squared length are left out.
    """
    scale = np.sqrt(np.where(sizes > 0, sizes, 1))
    d, q = np.linalg.eigh(g / scale[:, None] / scale[None, :])
    kept = d > limit
    found: np.ndarray = q[:, kept] / np.sqrt(d[kept]) / scale[:, None]
    return found
