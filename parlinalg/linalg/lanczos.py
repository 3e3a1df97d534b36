"""A few eigenvalues or singular values of large matrices, by products alone.

The randomized methods take stacks of matrices at once.  `eigsh`, `svds` and `lobpcg` restart, lock and drop vectors
where the values of a matrix say so, and take the matrices of a stack one after the other, each on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array.core import DistArray, whole
from parlinalg.array.create import zeros
from parlinalg.array.dispatch import primitive
from parlinalg.array.joining import stack
from parlinalg.array.reductions import norm
from parlinalg.array.shapes import reshape
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.factors.lu import LUFactor
from parlinalg.linalg.factors.qr import qr
from parlinalg.linalg.matrices import LinAlgError, distributed, naming, real_number
from parlinalg.linalg.singular import SVDResult, svd, svdvals
from parlinalg.linalg.spectral import EighResult
from parlinalg.linalg.tiles import worst
from parlinalg.linalg.vectors import (
    Apply,
    Basis,
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
    refuse_scipy,
    shifted,
    tolerance,
)
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
AGAIN = 4
"""Steps of `lobpcg` after which products with the vectors are computed, in place of combined from those before."""


def _count(k: Any, shape: tuple[int, int], name: str, most: int, what: str = "k") -> int:
    m, n = shape
    side = f"{min(m, n)} {'row' if m < n else 'column'}{'s' * (min(m, n) != 1)}"
    if most < 1:
        raise ValueError(f"{name}: a matrix with {side} is too small for any {what}; take svd or eigh")
    return whole(f"{name}: of {side} {what}", k, 1, most)


class _Products(NamedTuple):
    """The products of a matrix [..., m, n] and its adjoint with columns, and how the rows of what it takes lie."""

    forward: Apply
    backward: Apply
    shape: tuple[int, int]
    dtype: np.dtype[Any]
    rows: Cut
    grid: Grid


def _products(a: Any, name: str, vector: Any, what: str) -> _Products:
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
        return _Products(forward, backward, a.shape[-2:], precise(a), a.layout.dims[-1], a.grid)
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

    one = _near_one(v.astype(precise(v)))[:, None]
    image = checked(a[0], None, "A x")(one)
    m, dtype = image.shape[0], np.result_type(one.dtype, image.dtype)
    return _Products(checked(a[0], m, "A x"), checked(a[1], n, "Aᴴ y"), (m, n), dtype, v.layout.dims[0], v.grid)


def _begin(v0: Any, n: int, grid: Grid, name: str) -> DistArray:
    """Return the vector to begin with; raise ValueError if it is none of n elements on the grid."""
    if not isinstance(v0, DistArray) or v0.shape != (n,) or v0.grid is not grid:
        given = f"of shape {v0.shape}" if isinstance(v0, DistArray) else f"a {type(v0).__name__}"
        given += " on another grid" if isinstance(v0, DistArray) and v0.grid is not grid else ""
        raise ValueError(f"{name}: v0 is a DistArray of shape ({n},) on the grid of A, not {given}")
    return v0.summed()


def _one_by_one(
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
    k, tol = _count(k, (n, n), "eigsh", n - 1), tolerance("eigsh: tol", tol)
    if v0 is not None:
        v0 = _begin(v0, n, A.grid if isinstance(A, DistArray) else v0.grid, "eigsh")
    dtype = precise(A, v0)
    sigma = None if sigma is None else _shift(sigma)
    if lead_of(A):
        options: Any = {"sigma": sigma, "which": which, "v0": v0, "ncv": ncv, "maxiter": maxiter, "tol": tol}
        if not return_eigenvectors:
            one = lambda a: (eigsh(a, k, **options, return_eigenvectors=False),)  # noqa: E731
            return _one_by_one(one, [A], [("values", (k,))], dtype)[0]
        shapes = [("values", (k,)), ("m", (n, k))]
        return EighResult(*_one_by_one(lambda a: eigsh(a, k, **options), [A], shapes, dtype))
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
            w = _values(found[rising], v)
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


def _near_one(v: DistArray) -> DistArray:
    """Return a vector times a power of two, unless its square and its products with matrices are well in range."""
    return shifted(v, Vectors(v).measured(v)[1][0])


def _start(a: DistArray, n: int) -> DistArray:
    """Return a random vector that lies like the rows of a matrix, the same on every grid."""
    return default_rng(0).normal(size=n, grid=a.grid, layout=Layout(a.layout.dims[0]))


def _values(w: np.ndarray, like: DistArray) -> DistArray:
    return distributed(np.ascontiguousarray(w, np.zeros(0, like.dtype).real.dtype), Layout(None), like.grid)


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
    products = _products(A, "svds", v0, "v0")
    m, n = products.shape
    k, error = _count(k, (m, n), "svds", min(m, n) - 1), tolerance("svds: tol", tol)
    v0 = None if v0 is None else _begin(v0, n, products.grid, "svds")
    every = {"U": ("m", (m, k)), "S": ("values", (k,)), "Vh": ("n", (k, n))}
    names = ["S"] if not wanted else ["U", "S"] if wanted == "u" else ["S", "Vh"] if wanted == "vh" else list(every)

    def one(a: DistArray | None) -> list[DistArray]:
        of = products if a is None else _products(a, "svds", v0, "v0")
        start = v0 if a is None or v0 is not None else _start(a if m < n else a.mT, min(m, n))
        given = {"A": A if a is None else a, "v0": v0}
        found = _svds(of, start, k, names, given, ncv, maxiter, error)  # type: ignore[arg-type]
        return [found[name] for name in names]

    if lead_of(A):
        parts = _one_by_one(one, [A], [every[name] for name in names], products.dtype)
    else:
        parts = one(A if isinstance(A, DistArray) else None)
    found = dict(zip(names, parts, strict=True))
    return SVDResult(found.get("U"), found["S"], found.get("Vh")) if wanted else found["S"]  # type: ignore[arg-type]


def _svds(
    of: _Products, start: DistArray, k: int, names: Sequence[str], given: dict[str, Any], *options: Any
) -> dict[str, DistArray]:  # fmt: skip
    """Return the named results of `svds` for one matrix, beginning with a vector of its longer or shorter side.

    `given` and `options` are those of `_lanczos`.
    """
    forward, backward, (m, n), dtype, *_ = of
    start = start.astype(dtype, copy=False)
    start = _near_one(start)
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


@primitive
def range_finder(
    A: DistArray | tuple[Apply, Apply], size: int, *, n_iter: int = 2, seed: int = 0, like: DistArray | None = None
) -> DistArray:  # fmt: skip
    """Return Q [..., m, size] with orthonormal columns that about span what a matrix [..., m, n] mostly maps to.

    Parameters
    ----------
    A : DistArray [..., m, n], or two functions
        Of x [n, s] and of y [m, s] with any number of columns: A x and Aᴴ y.
    size : int
        Some more than the values that are wanted.
    n_iter : int
        Times that A Aᴴ is applied, with orthogonalization between: more for values that fall slowly.
    seed : int
        Of the random matrix, the same on every grid and for every matrix of a stack.
    like : DistArray [n], optional
        Needed with functions: it says n, the dtype and how vectors lie.

    Takes 2 + 2 `n_iter` products of A with `size` columns (Halko, Martinsson and Tropp 2011, algorithm 4.4).
    """
    return _range("range_finder", A, _products(A, "range_finder", like, "like"), size, n_iter, seed)


def _range(name: str, a: Any, of: _Products, size: int, n_iter: int, seed: int) -> DistArray:
    """Return what `range_finder` does for the products of a matrix, and raise the errors of a function of this name."""
    n = of.shape[1]
    size, n_iter = _count(size, of.shape, name, min(of.shape), "size"), whole(f"{name}: n_iter", n_iter, 0)
    y = default_rng(seed).normal(size=(n, size), grid=of.grid, layout=Layout(of.rows, None))

    def orthonormal(y: DistArray) -> DistArray:
        try:
            return qr(y).Q
        except ValueError:  # NaNs or infinities
            raise met_odd(name, A=a) from None

    q = orthonormal(of.forward(y.astype(of.dtype)))
    for _ in range(n_iter):
        q = orthonormal(of.forward(orthonormal(of.backward(q))))
    return q


@primitive
def svd_lowrank(
    A: DistArray | tuple[Apply, Apply], k: int = 6, *, oversamples: int = 10, n_iter: int = 4, seed: int = 0,
    like: DistArray | None = None,
) -> SVDResult:  # fmt: skip
    """Return about the k largest singular values, falling, of [..., m, n], with U [..., m, k] and Vᴴ [..., k, n].

    By `range_finder` with k + `oversamples` columns, whose other arguments are as there: few products, all with many
    columns.  What is found is as good as the values beyond the k + `oversamples`-th are small; for digits that hold
    take `svds`.
    """
    of = _products(A, "svd_lowrank", like, "like")
    least = min(of.shape)
    k, oversamples = _count(k, of.shape, "svd_lowrank", least), whole("svd_lowrank: oversamples", oversamples, 0)
    q = _range("svd_lowrank", A, of, min(least, k + oversamples), n_iter, seed)
    inner = matmul(q.mT.conj(), A) if isinstance(A, DistArray) else of.backward(q).mT.conj()
    u, s, vh = svd(inner, full_matrices=False)
    return SVDResult(matmul(q, u[..., :k]), s[..., :k], vh[..., :k, :])


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
        return EighResult(*_one_by_one(lambda *each: lobpcg(*each, **options), [A, X, B, M], shapes, dtype))
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
            return _values(w, self.vectors.like)

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
