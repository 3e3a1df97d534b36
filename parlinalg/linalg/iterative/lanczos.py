"""A few eigenvalues or singular values by products alone: `eigsh` and `svds`, by restarted Lanczos processes.

They restart, lock and drop vectors where the values of a matrix say so, and take the matrices of a stack one after
the other, each on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parlinalg.array.core import DistArray, whole
from parlinalg.array.dispatch import primitive
from parlinalg.array.reductions import norm
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.factors.lu import LUFactor
from parlinalg.linalg.iterative.products import Products, count_of, near_one, one_by_one, products_with, whole_values
from parlinalg.linalg.iterative.vectors import (
    Apply,
    Basis,
    Operator,
    Scaled,
    Vectors,
    applied,
    assumed_steps,
    lead_of,
    met_odd,
    precise,
    product,
    shifted,
    tolerance,
)
from parlinalg.linalg.matrices import LinAlgError, real_number
from parlinalg.linalg.singular import SVDResult, svd, svdvals
from parlinalg.linalg.spectral import EighResult
from parlinalg.linalg.tiles import worst
from parlinalg.matmul import matmul
from parlinalg.random.generator import default_rng

WHICH: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "LM": lambda w: -np.abs(w),
    "SM": np.abs,
    "LA": np.negative,
    "SA": lambda w: w,
    "BE": lambda w: np.minimum(2 * np.arange(len(w))[::-1], 2 * np.arange(len(w)) + 1),
}
"""By what eigenvalues, rising, come first; of "BE" the last, the first, the last but one and so on."""
CHECK = 0.3
"""Steps with a new vector, by the products before, that look for copies of eigenvalues in `eigsh`."""


def _begin(v0: Any, n: int, grid: Grid, name: str) -> DistArray:
    """Return the vector to begin with; raise ValueError if it is none of n elements on the grid."""
    if not isinstance(v0, DistArray) or v0.shape != (n,) or v0.grid is not grid:
        given = f"of shape {v0.shape}" if isinstance(v0, DistArray) else f"a {type(v0).__name__}"
        given += " on another grid" if isinstance(v0, DistArray) and v0.grid is not grid else ""
        raise ValueError(f"{name}: v0 is a DistArray of shape ({n},) on the grid of A, not {given}")
    return v0.summed()


@primitive
def eigsh(
    A: Operator, k: int = 6, *, sigma: float | None = None, which: str = "LM", v0: DistArray | None = None,
    ncv: int | None = None, maxiter: int | None = None, tol: float = 0.0, return_eigenvectors: bool = True,
) -> Any:  # fmt: skip
    """Return k eigenvalues, rising, and their eigenvectors [n, k] of a Hermitian matrix.

    Parameters
    ----------
    A : DistArray [n, n] or [..., n, n], or function of a DistArray [n], for which `v0` says n
        The matrices of a stack are taken one after the other.
    sigma : float, optional
        Find the eigenvalues next to it: `which` is of 1 / (w − sigma) then, and A is a DistArray, of which A − sigma I
        is factored once.  It must not be an eigenvalue itself.
    which : {"LM", "SM", "LA", "SA", "BE"}
        The largest or smallest by size, or algebraically, or half of them from both ends, of an odd number one more
        from the high end.  Small ones take many products without `sigma`.
    v0 : DistArray [n], optional
        Where to begin; the vectors lie like it.  Random by default, the same on every grid.
    ncv : int, optional
        Vectors that are held, more than k; max(2 k + 1, 20) by default.
    maxiter : int, optional
        Restarts, 10 n by default.
    tol : float
        Relative accuracy of the eigenvalues; 0 for what the dtype has beside the largest one.
    return_eigenvectors : bool
        False for the eigenvalues alone.

    A step takes one product and two all-reduces (Lanczos with thick restarts and full orthogonalization: Wu and Simon
    2000).  One vector to begin with may miss copies of an eigenvalue that occurs several times.  Once the values have
    converged, three tenths as many products, in one basis at most, begin with a random vector orthogonal to theirs;
    what is better than the last of them is found too, and then this is done again.  It makes copies likely, not
    certain, and is not done for "SM"; `lobpcg` takes several vectors.  Arguments are those of
    `scipy.sparse.linalg.eigsh`.

    Raises
    ------
    LinAlgError
        If they do not converge in `maxiter` restarts, or `sigma` is an eigenvalue but for rounding.
    """
    if not isinstance(A, DistArray):
        applied(A, "eigsh")
    if not isinstance(A, DistArray) and (not isinstance(v0, DistArray) or v0.ndim != 1):
        raise ValueError("eigsh of a function takes a DistArray v0 [n], where to begin: it says n and how vectors lie")
    if not isinstance(which, str) or which not in WHICH:
        raise ValueError(f"eigsh: which is one of {', '.join(map(repr, WHICH))}, not {which!r}")
    n = A.shape[-1] if isinstance(A, DistArray) and A.ndim else v0.shape[0]  # type: ignore[union-attr]
    times = applied(A, "eigsh", n, stacks=True)
    k, tol = count_of(k, (n, n), "eigsh", n - 1), tolerance("eigsh: tol", tol)
    if v0 is not None:
        v0 = _begin(v0, n, A.grid if isinstance(A, DistArray) else v0.grid, "eigsh")
    dtype = precise(A, v0)
    sigma = None if sigma is None else _shift(sigma)
    if lead_of(A):
        options: Any = {"sigma": sigma, "which": which, "v0": v0, "ncv": ncv, "maxiter": maxiter, "tol": tol}
        if not return_eigenvectors:
            one = lambda a: (eigsh(a, k, **options, return_eigenvectors=False),)  # noqa: E731
            return one_by_one(one, [A], [("values", (k,))], dtype)[0]
        shapes = [("values", (k,)), ("m", (n, k))]
        return EighResult(*one_by_one(lambda a: eigsh(a, k, **options), [A], shapes, dtype))
    given = {"A": A, "v0": v0}
    start = _start(A, n) if v0 is None else v0.summed()  # type: ignore[arg-type]
    return _lanczos(
        "eigsh", given, times, k, start.astype(dtype), ncv, maxiter, tol, which=which, sigma=sigma,
        vectors=return_eigenvectors,
    )  # fmt: skip


def _lanczos(
    name: str, given: dict[str, Any], times: Apply, k: int, v: DistArray, ncv: Any, maxiter: Any, tol: float, *,
    which: str = "LM", sigma: float | None = None, vectors: bool = True,
) -> Any:  # fmt: skip
    """Return what `eigsh` does of the products of a matrix, and raise the errors of a function of this name.

    Parameters
    ----------
    given : dict
        The function's arguments by their names, of which NaNs and infinities are reported.
    v : DistArray [n]
        The vector to begin with, of the dtype in which it computes.
    vectors : bool
        Eigenvectors are returned too.
    """
    n, dtype, A = v.shape[0], v.dtype, given["A"]
    inverse = None if sigma is None else _ShiftInvert(A, sigma, dtype)
    held = min(n, max(2 * k + 1, 20)) if ncv is None else whole(f"{name}: of k = {k} ncv", ncv, k + 1, n)
    (size,), (power,) = Vectors(v).measured(v)
    if not np.isfinite(size):
        raise met_odd(name, **given)
    if not size and v.grid.backend.values:
        raise ValueError(f"{name}: v0 is zero; it says where to begin")
    space = _KrylovSpace(times if inverse is None else inverse.solve, shifted(v, power), size, held, name, given)
    eps, assumed = float(np.finfo(dtype).eps), assumed_steps(v)
    maxiter = 10 * n if maxiter is None else whole(f"{name}: maxiter", maxiter, 1)
    turns = maxiter if assumed is None else min(maxiter, assumed)
    known: np.ndarray | None = None  # wanted values that converged, and that a new vector is to confirm
    steps, check = held, which != "SM"
    for turn in range(turns):
        space.expand(steps)
        values, s = np.linalg.eigh(space.t[: space.size, : space.size])
        order = np.argsort(WHICH[which](values), kind="stable")
        wanted = order[:k]
        bounds = np.abs(space.last * s[-1])
        enough = np.maximum(tol * np.maximum(np.abs(values), eps ** (2 / 3) * space.scale), eps * space.scale)
        converged = (bounds[wanted] <= enough[wanted]).all() if assumed is None else turn + 1 + check >= turns
        wanted = np.sort(wanted)
        done = held == n or (converged and (not check or turn + 1 == turns))
        rounding = 10 * n**0.5 * enough[wanted]
        if known is not None and assumed is None and (np.abs(values[wanted] - known) <= rounding).all():
            done, values, s, wanted = True, known, np.eye(space.size), np.arange(k)
        if done:
            power = space.times.exponents
            found = np.ldexp(values[wanted], -power) if inverse is None else inverse.eigenvalues(values[wanted], power)
            rising = np.argsort(found)
            w = whole_values(found[rising], v)
            if not vectors and inverse is None:
                return w
            x = _assembled(space.basis, s[:, wanted[rising]], v)
            if inverse is not None:
                inverse.give_up()
                _check_pairs(A, w, x, sigma, max(eps**0.5, tol))  # type: ignore[arg-type]
            return EighResult(w, x) if vectors else w
        if converged:
            known, steps = values[wanted], min(held, k + math.ceil(CHECK * space.products))
            space.restart(values, s, wanted, anew=True)
        else:
            known, steps = None, held
            space.restart(values, s, order[: min(space.size - 1, k + max(1, (held - k) // 2))])
    count = int((bounds[wanted] <= enough[wanted]).sum())
    what = "eigenvalues" if name == "eigsh" else "singular values"
    raise LinAlgError(f"{name}: {count} of {k} {what} converged in {maxiter} restarts; raise maxiter or ncv")


class _KrylovSpace:
    """An orthonormal basis Q of a Krylov space and T = Qᴴ A Q, with thick restarts (Wu and Simon 2000).

    Parameters
    ----------
    times : function
        The product with A, which is multiplied by a power of two here where squares would leave the range.
    v : DistArray [n]
        The first vector, of length `size`.
    held : int
        The vectors of a basis.
    name, given
        Of errors, as `_lanczos` has them.

    Attributes
    ----------
    t : array [held, held]
    last : float
        The length of the next vector beside the basis; 0 if there is none.
    scale : float
        The largest element of T.
    size, products : int
        The vectors of the basis, and the products that were taken.
    """

    def __init__(
        self, times: Apply, v: DistArray, size: Any, held: int, name: str, given: dict[str, Any]
    ) -> None:  # fmt: skip
        vectors, self.v, self.n, self.held, self.name, self.given = Vectors(v), v, v.shape[0], held, name, given
        self.times = Scaled(lambda x: product(times(x), v.shape, v, v.layout, v.dtype, f"{name}: A x"), vectors)
        self.basis, self.t = Basis(vectors, held + 1), np.zeros((held, held), vectors.dtype)
        self.basis.append(v, size)
        self.draws, self.last, self.scale = default_rng(1), 0.0, 1.0  # other vectors than `_start`
        self.size = self.products = 0

    def expand(self, size: int) -> None:
        """Fill the basis up to so many vectors, and T."""
        basis, t = self.basis, self.t
        self.products += size - basis.count + 1
        self.size = size
        limits, values = np.finfo(self.v.dtype), self.v.grid.backend.values
        eps, tiny = float(limits.eps), float(limits.tiny)
        for j in range(basis.count - 1, size):
            w, h, self.last = basis.orthogonalized(self.times(basis[j]))
            if basis.count == 1 and self.times.fit(basis[0], np.hypot(np.abs(h[0]), self.last)):
                w, h, self.last = basis.orthogonalized(self.times(basis[0]))
            t[: j + 1, j], t[j, : j + 1] = h, h.conj()
            if not np.isfinite([*h, self.last]).all():
                raise met_odd(self.name, **self.given)
            self.scale = max(float(np.abs(t[: j + 1, : j + 1]).max()), tiny)
            if j + 1 == self.n:  # there is no further vector
                self.last = 0.0
            elif self.last <= 4 * self.n**0.5 * eps * self.scale and values:  # rounding: these are a space of their own
                self.last = 0.0
                basis.append(*self._another(eps**0.5))
                continue
            basis.append(w, self.last)

    def _another(self, least: float) -> tuple[DistArray, Any]:
        """Return what a random vector has beside the basis, and its length, which is more than `least`."""
        while True:
            w = self.draws.normal(size=self.n, grid=self.v.grid, layout=self.v.layout).astype(self.v.dtype)
            w, _, size = self.basis.orthogonalized(w)
            if size > least or not self.v.grid.backend.values:
                return w, size

    def restart(self, values: np.ndarray, s: np.ndarray, kept: np.ndarray, anew: bool = False) -> None:
        """Begin again with some of the Ritz vectors, the columns `kept` of Q S, and the next vector.

        With `anew` it is a random one in place of the next, for Ritz vectors that have converged.
        """
        basis, t = self.basis, self.t
        basis.turn(s[:, kept])
        basis.count = len(kept)
        if anew:
            basis.append(*self._another(float(np.finfo(self.v.dtype).eps) ** 0.5))
        else:
            basis.rows[len(kept)] = basis.rows[self.size]
            basis.count += 1
        t[:] = 0
        t[range(len(kept)), range(len(kept))] = values[kept]


class _ShiftInvert:
    """The function (A − sigma I)⁻¹ x, by one factorization, of A times a power of two if it is near underflow."""

    def __init__(self, a: Any, sigma: float, dtype: np.dtype[Any]) -> None:
        if not isinstance(a, DistArray):
            raise TypeError("eigsh with sigma takes a DistArray, which it can factor; give a function of the inverse")
        a = a.astype(dtype, copy=False)
        if worst(a.grid, [not kernels.finite(a.block)])[0]:
            raise met_odd("eigsh", A=a)
        self.unit = _unit(a, abs(sigma))
        a = a if self.unit == 1 else a * self.unit
        self.shift = sigma * float(self.unit)
        factor = LUFactor(a, shift=dtype.type(self.shift))
        try:
            factor.check()
        except LinAlgError as error:
            raise LinAlgError(f"eigsh: sigma = {sigma!r} is an eigenvalue; move it a little ({error})") from None
        self.solve, self.give_up = factor.solution, factor.give_up

    def eigenvalues(self, values: np.ndarray, power: Any) -> np.ndarray:
        """Return those of A, by those of the inverse times 2 to this power."""
        with np.errstate(all="ignore"):
            found: np.ndarray = (self.shift + np.ldexp(1 / values, power)) / float(self.unit)
        return found


def _shift(value: Any) -> float:
    """Return a shift as a number; raise an error if it is not a real and finite one."""
    found = real_number(value)
    if found is None or not math.isfinite(found):
        kind = TypeError if found is None else ValueError
        raise kind(
            "eigsh: sigma is a real number, as the eigenvalues of Hermitian matrices are, and a finite one, "
            f"not {value!r}"
        )
    return found


def _check_pairs(a: DistArray, w: DistArray, x: DistArray, sigma: float, accuracy: float) -> None:
    """Raise LinAlgError if x are no eigenvectors of a: rounding in (A − sigma I)⁻¹ can be as large as they are."""
    unit = _unit(a, squares=True)
    a = a if unit == 1 else a * unit
    rest, size = norm(matmul(a, x) - x * (unit * w), axis=0).max() / unit, norm(a) / unit
    if not a.grid.backend.values or float(rest) <= accuracy * (float(size) + abs(sigma)):
        return
    raise LinAlgError(
        f"eigsh: sigma = {sigma!r} is an eigenvalue but for rounding, so that A − sigma I cannot be solved with "
        f"(residuals up to {float(rest):.1e}, of a matrix of norm {float(size):.1e}); move it by about "
        f"{float(np.finfo(x.dtype).eps) ** (1 / 3) * float(size):.1e}"
    )


def _start(a: DistArray, n: int) -> DistArray:
    """Return a random vector that lies like the rows of a matrix, the same on every grid."""
    return default_rng(0).normal(size=n, grid=a.grid, layout=Layout(a.layout.dims[0]))


def _assembled(basis: Basis, s: np.ndarray, like: DistArray) -> DistArray:
    grid, n, k = like.grid, like.shape[0], s.shape[1]
    basis.turn(s)
    block = like.xp.ascontiguousarray(basis.rows[: k if grid.inside else 0].T)
    return DistArray(block, (n, k), Layout(like.layout.dims[0], None), grid)


@primitive
def svds(
    A: DistArray | tuple[Apply, Apply], k: int = 6, *, v0: DistArray | None = None, ncv: int | None = None,
    maxiter: int | None = None, tol: float = 0.0, return_singular_vectors: bool | str = True,
) -> Any:  # fmt: skip
    """Return the k largest singular values, falling, of a matrix [..., m, n], with U [..., m, k] and Vᴴ [..., k, n].

    By `eigsh` of AᴴA (or A Aᴴ, which is smaller), and the singular values of A on its vectors, so that relative
    accuracy is lost only of values below the square root of eps times the largest.  The matrices of a stack are taken
    one after the other.

    Parameters
    ----------
    A : DistArray [..., m, n], or two functions
        Of x [n, s] and of y [m, s] with any number of columns: A x and Aᴴ y.
    v0 : DistArray [n], optional
        Where to begin; random by default, the same on every grid.  Of functions it says n and how vectors lie.
    ncv, maxiter, tol
        As of `eigsh`.
    return_singular_vectors : {True, False, "u", "vh"}
        False for the singular values alone; "u" or "vh" for one side's vectors, with None for the other's.
    """
    wanted = return_singular_vectors
    if not (isinstance(wanted, bool | np.bool_) or (isinstance(wanted, str) and wanted in ("u", "vh"))):
        raise ValueError(f"svds: return_singular_vectors is True, False, 'u' or 'vh', not {wanted!r}")
    products = products_with(A, "svds", v0, "v0")
    m, n = products.shape
    k, error = count_of(k, (m, n), "svds", min(m, n) - 1), tolerance("svds: tol", tol)
    v0 = None if v0 is None else _begin(v0, n, products.grid, "svds")
    every = {"U": ("m", (m, k)), "S": ("values", (k,)), "Vh": ("n", (k, n))}
    names = ["S"] if not wanted else ["U", "S"] if wanted == "u" else ["S", "Vh"] if wanted == "vh" else list(every)

    def one(a: DistArray | None) -> list[DistArray]:
        of = products if a is None else products_with(a, "svds", v0, "v0")
        start = v0 if a is None or v0 is not None else _start(a if m < n else a.mT, min(m, n))
        given = {"A": A if a is None else a, "v0": v0}
        found = _svds(of, start, k, names, given, ncv, maxiter, error)  # type: ignore[arg-type]
        return [found[name] for name in names]

    if lead_of(A):
        parts = one_by_one(one, [A], [every[name] for name in names], products.dtype)
    else:
        parts = one(A if isinstance(A, DistArray) else None)
    found = dict(zip(names, parts, strict=True))
    return SVDResult(found.get("U"), found["S"], found.get("Vh")) if wanted else found["S"]  # type: ignore[arg-type]


def _svds(
    of: Products, start: DistArray, k: int, names: Sequence[str], given: dict[str, Any], *options: Any
) -> dict[str, DistArray]:  # fmt: skip
    """Return the named results of `svds` for one matrix, beginning with a vector of its longer or shorter side.

    `given` and `options` are those of `_lanczos`.
    """
    forward, backward, (m, n), dtype, *_ = of
    start = start.astype(dtype, copy=False)
    start = near_one(start)
    if m < n:
        start = start if start.shape[0] == m else forward(start[:, None])[:, 0]
        other = {"U": "Vh", "S": "S", "Vh": "U"}
        turned = _svds(
            of._replace(forward=backward, backward=forward, shape=(n, m)), start, k, [other[name] for name in names],
            given, *options,
        )  # fmt: skip
        return {other[name]: x if name == "S" else x.mT.conj() for name, x in turned.items()}
    image = forward(start[:, None])[:, 0]
    one = Scaled(lambda x: forward(x[:, None])[:, 0].redistribute(image.layout), Vectors(image))
    one.fit_image(start, image)
    times, adjoint = Scaled(forward, Vectors(image)), Scaled(backward, Vectors(start))
    times.exponents = adjoint.exponents = one.exponents
    _, v = _lanczos("svds", given, lambda x: adjoint(times(x[:, None]))[:, 0], k, start, *options)
    if names == ["S"]:
        return {"S": shifted(svdvals(times(v)), -times.exponents)}
    u, s, turn = svd(times(v), full_matrices=False)
    found = {"U": u, "S": shifted(s, -times.exponents)}
    return found | {"Vh": matmul(turn, v.mT.conj())} if "Vh" in names else found


def _unit(a: DistArray, least: float = 0.0, *, squares: bool = False) -> Any:
    """Return the power of two of `kernels.units` for the largest element of an array, or a larger number."""
    largest = max(float(abs(a).max()), least)
    return kernels.unit(largest if a.grid.backend.values else 1.0, a.dtype, squares=squares)
