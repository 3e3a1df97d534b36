"""Iterative methods for linear systems and least squares, which use a matrix by its products alone.

A matrix is a DistArray or a function of vectors.  All decisions are made on sums over the ranks, alike everywhere, and
scalars that one step needs are summed by one all-reduce.  Vectors lie like the right-hand side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array.core import DistArray
from parlinalg.array.create import zeros
from parlinalg.array.dispatch import primitive
from parlinalg.array.shapes import reshape
from parlinalg.matmul import matmul

Apply = Callable[[DistArray], DistArray]
Operator = DistArray | Apply
Block = Any
LinAlgError = np.linalg.LinAlgError


class Vectors:
    """Inner products of vectors that lie alike, several by one all-reduce.

    Parameters
    ----------
    like : DistArray [n]
    """

    def __init__(self, like: DistArray) -> None:
        self.like, self.grid, self.layout = like, like.grid, like.layout
        self.dtype = np.dtype(np.complex128 if like.dtype.kind == "c" else np.float64)
        axes = tuple(a for a in like.layout.dims[0] if like.grid.sizes[a] > 1)
        self.comm = like.grid.comm(axes) if like.grid.inside else None

    def made(self, block: Block) -> DistArray:
        """Return the vector whose part on this rank is `block`."""
        return self.like.like(block)

    def sums(self, terms: Callable[[], Sequence[Any]], n: int) -> Callable[[], np.ndarray]:
        """Begin to sum n numbers over the ranks; what is returned waits for the sums and gives them to all ranks."""
        found, handle = np.zeros(n, self.dtype), None
        if self.comm is not None:
            host = self.grid.backend.to_host
            found[:] = np.concatenate([np.asarray(host(t)).reshape(-1) for t in terms()])
            handle = self.comm.all_reduce(found, wait=False)

        def wait() -> np.ndarray:
            if handle is not None:
                handle.wait()
            if self.grid.size == self.grid.world.size:
                return found
            told = self.grid.world.share(found if handle is not None else None, others="alike")
            return next(each for each in told if each is not None)

        return wait

    def products(self, *pairs: tuple[DistArray, DistArray]) -> list[Any]:
        """Return the inner products xᴴ y of pairs of vectors."""
        return self.begin(*pairs)().tolist()

    def begin(self, *pairs: tuple[DistArray, DistArray]) -> Callable[[], np.ndarray]:
        """Begin the inner products of pairs of vectors; what is returned waits for them."""
        xp = self.like.xp
        return self.sums(lambda: [xp.vdot(x.block, y.block) for x, y in pairs], len(pairs))

    def norm(self, x: DistArray) -> float:
        """Return the length of a vector."""
        return float(np.sqrt(np.maximum(self.products((x, x))[0].real, 0)))


class Basis:
    """Orthonormal vectors that lie alike, in one array a rank: projections are two products of matrices.

    Parameters
    ----------
    vectors : Vectors
    most : int
        How many there is room for.
    """

    def __init__(self, vectors: Vectors, most: int) -> None:
        self.vectors, self.count = vectors, 0
        self.rows = vectors.grid.backend.empty((most, *vectors.like.block.shape), vectors.like.dtype)

    def __getitem__(self, i: int) -> DistArray:
        return self.vectors.made(self.rows[i].copy())

    def append(self, x: DistArray, size: float) -> None:
        """Add a vector of this length."""
        self.rows[self.count] = x.block / size if size else 0
        self.count += 1

    def orthogonalized(self, w: DistArray) -> tuple[DistArray, np.ndarray, float]:
        """Return what a vector has beside these, its coefficients here, and the length of the rest.

        Classical Gram-Schmidt, twice (Giraud and others, 2005); two all-reduces.
        """
        rows, xp, n = self.rows[: self.count], w.xp, self.count
        block, found = w.block.copy(), np.zeros(n, self.vectors.dtype)
        for again in (False, True):
            with_length = lambda: [rows.conj() @ block, *([xp.vdot(block, block)] if again else [])]  # noqa: B023, E731
            told = self.vectors.sums(with_length, n + again)()
            part = told[:n]
            found += part
            block -= w.grid.backend.from_host(part.astype(w.dtype)) @ rows if n else 0
        left = told[n].real - float(np.vdot(part, part).real)
        return self.vectors.made(block), found, float(np.sqrt(np.maximum(left, 0)))

    def combined(self, coefficients: np.ndarray) -> DistArray:
        """Return the sum of the vectors, each times its coefficient."""
        c = self.vectors.grid.backend.from_host(np.ascontiguousarray(coefficients, self.vectors.like.dtype))
        return self.vectors.made(c @ self.rows[: len(coefficients)])

    def turn(self, coefficients: np.ndarray) -> None:
        """Replace the first vectors by their combinations, one a column of `coefficients`."""
        m, k = coefficients.shape
        c = self.vectors.grid.backend.from_host(np.ascontiguousarray(coefficients.T, self.vectors.like.dtype))
        self.rows[:k] = c @ self.rows[:m]


def applied(a: Any, name: str, n: int | None = None, square: bool = True) -> Apply:
    """Return the function that multiplies by a matrix, or the function that is given for it.

    Raises
    ------
    TypeError, LinAlgError
        If it is neither, or not a square matrix (or not of n columns).
    """
    if isinstance(a, DistArray):
        if a.ndim != 2 or (square and a.shape[0] != a.shape[1]) or n not in (None, a.shape[1]):
            wanted = "a square matrix" if n is None else f"a matrix of shape ({n}, {n})"
            raise LinAlgError(f"{name} takes {wanted if square else f'a matrix of {n} columns'}, not {a.shape}")
        whole = a.summed()
        return lambda x: matmul(whole, x)
    if not callable(a):
        raise TypeError(f"{name} takes a DistArray or a function of DistArrays for a matrix, not {type(a).__name__}")
    return a


class _System:
    """A x = b as a method has it: b, the first x and its residual as vectors, and products that lie like them."""

    def __init__(self, name: str, a: Any, b: Any, x0: Any, m: Any, rtol: float, atol: float, maxiter: Any) -> None:
        if not isinstance(b, DistArray) or b.ndim not in (1, 2) or (b.ndim == 2 and b.shape[1] != 1):
            what = f"a DistArray of shape {b.shape}" if isinstance(b, DistArray) else type(b).__name__
            raise ValueError(f"{name} takes a right-hand side of shape (n,) or (n, 1), a DistArray, not {what}")
        for label, value in (("rtol", rtol), ("atol", atol)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}: {label} is a number of at least 0, not {value!r}")
        if maxiter is not None and (isinstance(maxiter, bool) or not isinstance(maxiter, int) or maxiter < 0):
            raise ValueError(f"{name}: maxiter is a whole number of at least 0, not {maxiter!r}")
        self.name, self.shape, n = name, b.shape, b.shape[0]
        kinds = [getattr(v, "dtype", np.dtype(np.float32)) for v in (a, b, x0)]
        self.dtype = np.result_type(*kinds, np.float32 if max(k.itemsize for k in kinds) <= 4 else np.float64)
        b = (b if b.ndim == 1 else reshape(b, (n,))).summed().astype(self.dtype, copy=False)
        self.b, self.layout, self.n = b, b.layout, n
        self._a, self._m = applied(a, name, n), None if m is None else applied(m, f"{name}'s M", n)
        self.vectors = Vectors(b)
        self.maxiter = 10 * n if maxiter is None else maxiter
        if x0 is None:
            self.x = zeros((n,), dtype=self.dtype, grid=b.grid, layout=b.layout)
            self.r = b.copy()
        else:
            if getattr(x0, "shape", None) not in ((n,), (n, 1)):
                raise ValueError(f"{name}: x0 has the shape of b, {self.shape}, not {getattr(x0, 'shape', x0)}")
            self.x = self._like(reshape(x0, (n,)), "x0").copy()
            self.r = b - self.times(self.x)
        norm = self.vectors.norm(b)
        if not math.isfinite(norm):
            raise ValueError(f"{name} takes finite numbers; the right-hand side has NaNs or infinities")
        self.limit = max(rtol * norm, atol)

    def times(self, x: DistArray) -> DistArray:
        """Return A x."""
        return self._like(self._a(x), "A x")

    def preconditioned(self, r: DistArray) -> DistArray:
        """Return M r."""
        return r if self._m is None else self._like(self._m(r), "M r")

    def _like(self, y: Any, what: str) -> DistArray:
        if not isinstance(y, DistArray) or y.shape != (self.n,) or y.grid is not self.b.grid:
            told = f"of shape {y.shape}" if isinstance(y, DistArray) else f"a {type(y).__name__}"
            raise ValueError(f"{self.name}: {what} is to be a DistArray of shape ({self.n},) on b's grid, not {told}")
        return y.redistribute(self.layout).astype(self.dtype, copy=False)

    def result(self, info: int) -> tuple[DistArray, int]:
        """Return the solution in the shape of b, and 0 or the number of iterations that did not suffice."""
        return (self.x if len(self.shape) == 1 else reshape(self.x, self.shape)), info

    def finite(self, value: float, step: int) -> float:
        """Return a number that decides; raise an error if it is none."""
        if not math.isfinite(value):
            raise LinAlgError(f"{self.name} met NaNs or infinities in iteration {step}")
        return value


@primitive
def cg(
    A: Operator, b: DistArray, x0: DistArray | None = None, *, rtol: float = 1e-5, atol: float = 0.0,
    maxiter: int | None = None, M: Operator | None = None, callback: Callable[[DistArray], Any] | None = None,
    pipelined: bool = False,
) -> tuple[DistArray, int]:  # fmt: skip
    """Solve A x = b for a Hermitian positive definite matrix by conjugate gradients.

    Parameters
    ----------
    A : DistArray [n, n], or function of a DistArray [n]
    b : DistArray [n] or [n, 1]
        The solution lies like it.
    x0 : DistArray, optional
        Where to begin; zeros by default.
    rtol, atol : float
        It ends when ‖b − A x‖ ≤ max(rtol ‖b‖, atol).
    maxiter : int, optional
        10 n by default.
    M : DistArray or function, optional
        About the inverse of A; Hermitian positive definite.
    callback : function, optional
        Called with x after each iteration, on all ranks.
    pipelined : bool
        Sum the scalars of a step while the next product is computed (Ghysels and Vanroose 2014).  That takes one
        product more, eight vectors in place of four, and loses some digits of the residual that can be reached.

    Returns
    -------
    x : DistArray
    info : int
        0, or the number of iterations that did not suffice.

    A step takes one product, and one all-reduce of three numbers (Chronopoulos and Gear 1989).  Arguments and results
    are those of `scipy.sparse.linalg.cg`.

    Raises
    ------
    LinAlgError
        If a step finds that A or M is not positive definite.
    """
    s = _System("cg", A, b, x0, M, rtol, atol, maxiter)
    r, x = s.r, s.x
    u = s.preconditioned(r)
    w = s.times(u)
    p = q = z = t = r
    gamma, alpha, first = 1.0, 1.0, True
    for step in range(s.maxiter + 1):
        summing = s.vectors.begin((r, u), (w, u), (r, r))
        if pipelined:
            m = s.preconditioned(w)
            n = s.times(m)
        before, (gamma, delta, rr) = gamma, (float(v.real) for v in summing())
        s.x = x
        if math.sqrt(max(0.0, s.finite(rr, step))) <= s.limit:
            return s.result(0)
        if step == s.maxiter:
            break
        beta = 0.0 if first else gamma / before
        curvature = delta if first else delta - beta * gamma / alpha
        if (gamma <= 0 or curvature <= 0) and not first:  # by rounding, if it is so no more with the true residual
            r = s.b - s.times(x)
            u = s.preconditioned(r)
            w, first = s.times(u), True
            continue
        if gamma <= 0 or curvature <= 0:
            what, value = ("M: rᴴ M r", gamma) if gamma <= 0 else ("A: pᴴ A p", curvature)
            raise LinAlgError(f"cg takes positive definite {what} = {value:.3g} in iteration {step + 1}")
        alpha = gamma / curvature
        p, q = (u, w) if first else (u + beta * p, w + beta * q)
        if pipelined:
            z, t = (n, m) if first else (n + beta * z, m + beta * t)
        first = False
        x, r = x + alpha * p, r - alpha * q
        if pipelined:
            u, w = u - alpha * t, w - alpha * z
        else:
            u = s.preconditioned(r)
            w = s.times(u)
        if callback is not None:
            callback(x)
    return s.result(s.maxiter)


@primitive
def minres(
    A: Operator, b: DistArray, x0: DistArray | None = None, *, rtol: float = 1e-5, atol: float = 0.0,
    maxiter: int | None = None, M: Operator | None = None, callback: Callable[[DistArray], Any] | None = None,
) -> tuple[DistArray, int]:  # fmt: skip
    """Solve A x = b for a Hermitian matrix, which may be indefinite, by minimal residuals (Paige and Saunders 1975).

    Arguments and results are those of `cg`; with M, residuals are measured as (rᴴ M r)½.  A step takes one product and
    two all-reduces of one number.
    """
    s = _System("minres", A, b, x0, M, rtol, atol, maxiter)
    v, x = s.r, s.x
    z = s.preconditioned(v)
    size = _length(s, v, z, 0)
    if M is not None:
        s.limit = max(rtol * _length(s, s.b, s.preconditioned(s.b), 0), atol)
    old_v, old_size, left = v, 1.0, size
    w = old_w = zeros((s.n,), dtype=s.dtype, grid=b.grid, layout=s.layout)
    c = old_c = 1.0
    sine = old_sine = 0.0
    for step in range(s.maxiter):
        if abs(left) <= s.limit:
            break
        z = z * (1 / size)
        y = s.times(z)
        delta = s.finite(float(s.vectors.products((z, y))[0].real), step)
        new = y - (delta / size) * v - (size / old_size if step else 0.0) * old_v
        old_v, v = v, new
        following = s.preconditioned(v)
        old_size, size, current = size, _length(s, v, following, step), size
        first = c * delta - old_c * sine * current
        second, third = sine * delta + old_c * c * current, old_sine * current
        whole = math.hypot(first, size)
        if not whole:
            raise LinAlgError(f"minres: the matrix is singular, found in iteration {step + 1}")
        old_c, c, old_sine, sine = c, first / whole, sine, size / whole
        old_w, w = w, (z - third * old_w - second * w) * (1 / whole)
        x = x + (c * left) * w
        left, z = -sine * left, following
        s.x = x
        if callback is not None:
            callback(x)
        if not size:
            break
    return s.result(0 if abs(left) <= s.limit or not size else s.maxiter)


def _length(s: _System, v: DistArray, z: DistArray, step: int) -> float:
    squared = s.finite(float(s.vectors.products((v, z))[0].real), step)
    if squared < 0:
        raise LinAlgError(f"{s.name} takes positive definite M: rᴴ M r = {squared:.3g} in iteration {step + 1}")
    return math.sqrt(squared)


@primitive
def gmres(
    A: Operator, b: DistArray, x0: DistArray | None = None, *, rtol: float = 1e-5, atol: float = 0.0,
    restart: int | None = None, maxiter: int | None = None, M: Operator | None = None,
    callback: Callable[[DistArray], Any] | None = None,
) -> tuple[DistArray, int]:  # fmt: skip
    """Solve A x = b for any square matrix by generalized minimal residuals (Saad and Schultz 1986).

    Arguments and results are those of `cg` but for these:

    Parameters
    ----------
    restart : int, optional
        Products after which it begins anew from the solution so far; as many vectors are held.  20 by default.
    maxiter : int, optional
        The most restarts; 10 n by default.
    M : DistArray or function, optional
        About the inverse of A, applied from the right, so that residuals are those of A x = b.  It may differ from step
        to step (Saad 1993), for which its results are held too.
    callback : function, optional
        Called with x after each restart.

    A step takes one product and two all-reduces, of as many numbers as there are vectors.
    """
    s = _System("gmres", A, b, x0, M, rtol, atol, maxiter)
    if restart is not None and (isinstance(restart, bool) or not isinstance(restart, int) or restart < 1):
        raise ValueError(f"gmres: restart is a whole number of at least 1, not {restart!r}")
    most = min(20 if restart is None else restart, max(1, s.n))
    steps = 0
    for turn in range(s.maxiter + 1):
        size = s.finite(s.vectors.norm(s.r), steps)
        if size <= s.limit:
            return s.result(0)
        if turn == s.maxiter:
            break
        basis, h = Basis(s.vectors, most + 1), np.zeros((most + 1, most), s.vectors.dtype)
        directions = basis if M is None else Basis(s.vectors, most)
        basis.append(s.r, size)
        right, j = np.zeros(most + 1, s.vectors.dtype), 0
        right[0] = size
        for j in range(most):
            z = s.preconditioned(basis[j])
            if M is not None:
                directions.append(z, 1.0)
            w, h[: j + 1, j], length = basis.orthogonalized(s.times(z))
            h[j + 1, j] = s.finite(length, steps)
            steps += 1
            y, left = _least(h[: j + 2, : j + 1], right[: j + 2])
            if left <= s.limit or length <= np.finfo(s.dtype).eps * abs(h[: j + 1, j]).max(initial=0):
                break
            basis.append(w, length)
        s.x = s.x + directions.combined(y)
        s.r = s.b - s.times(s.x)
        if callback is not None:
            callback(s.x)
    return s.result(max(steps, 1))


def _least(h: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, float]:
    """Return y for which ‖right − H y‖ is least, and that length; small, and the same on all ranks."""
    y = np.linalg.lstsq(h, right)[0]
    return y, float(np.linalg.norm(right - h @ y))


class LsqrResult(NamedTuple):
    """The result of `lsqr`, in SciPy's order: the solution, why it ended, iterations, and norms.

    `istop` is 0 if x = 0 is the solution, 1 if A x = b is solved to the tolerances, 2 if the least squares are, and 7
    if the iterations did not suffice.  `r1norm` is ‖b − A x‖, `r2norm` has the damping in it, `anorm` and `acond`
    estimate A's Frobenius norm and condition, `arnorm` is ‖Aᴴ r‖, `xnorm` ‖x‖.
    """

    x: DistArray
    istop: int
    itn: int
    r1norm: float
    r2norm: float
    anorm: float
    acond: float
    arnorm: float
    xnorm: float


@primitive
def lsqr(
    A: DistArray | tuple[Apply, Apply], b: DistArray, damp: float = 0.0, atol: float = 1e-6, btol: float = 1e-6,
    *, iter_lim: int | None = None, callback: Callable[[DistArray], Any] | None = None,
) -> LsqrResult:  # fmt: skip
    """Return the x for which ‖b − A x‖² + damp² ‖x‖² is least (Paige and Saunders 1982).

    Parameters
    ----------
    A : DistArray [m, n], or two functions
        Of x and of y: A x and Aᴴ y.
    b : DistArray [m]
    damp : float
    atol, btol : float
        It ends when ‖r‖ ≤ btol ‖b‖ + atol ‖A‖ ‖x‖, or ‖Aᴴ r‖ ≤ atol ‖A‖ ‖r‖.
    iter_lim : int, optional
        2 n by default.
    callback : function, optional
        Called with x after each iteration.

    A step takes a product with A and one with Aᴴ, and three all-reduces of a number or two.
    """
    if isinstance(A, DistArray):
        if A.ndim != 2 or not isinstance(b, DistArray) or b.shape != A.shape[:1]:
            raise LinAlgError(f"lsqr takes a matrix [m, n] and b [m], not {A.shape} and {getattr(b, 'shape', b)}")
        adjoint = A.summed().mT.conj()
        forward, backward = applied(A, "lsqr", A.shape[1], False), applied(adjoint, "lsqr", A.shape[0], False)
    elif isinstance(A, tuple) and len(A) == 2 and all(map(callable, A)):
        forward, backward = A
    else:
        raise TypeError(f"lsqr takes a DistArray or two functions (of x and of y: A x, Aᴴ y), not {type(A).__name__}")
    if not isinstance(b, DistArray) or b.ndim != 1:
        raise ValueError(f"lsqr takes b as a DistArray of one dim, not {getattr(b, 'shape', type(b).__name__)}")
    kinds = [b.dtype, *([A.dtype] if isinstance(A, DistArray) else [])]
    dtype = np.result_type(*kinds, np.float32 if max(k.itemsize for k in kinds) <= 4 else np.float64)
    u = b.summed().astype(dtype)
    high = Vectors(u)

    def scaled(x: DistArray, vectors: Vectors) -> tuple[DistArray, float]:
        size = vectors.norm(x)
        if not math.isfinite(size):
            raise LinAlgError("lsqr met NaNs or infinities")
        return (x * (1 / size) if size else x), size

    u, beta = scaled(u, high)
    v = backward(u).summed().astype(dtype, copy=False)
    wide = Vectors(v)
    v, alpha = scaled(v, wide)
    x, w = v * 0.0, v.copy()
    norm, rho_bar, phi_bar = beta, alpha, beta
    frobenius = directions = damped = x_length = 0.0
    iterations = 2 * v.shape[0] if iter_lim is None else iter_lim
    istop, done, r2, ar = (0 if not alpha * beta else 7), 0, beta, alpha * beta
    while istop == 7 and done < iterations:
        done += 1
        u, beta = scaled(forward(v).redistribute(u.layout).astype(dtype, copy=False) - alpha * u, high)
        frobenius = math.hypot(frobenius, alpha, beta, damp)
        v, alpha = scaled(backward(u).redistribute(v.layout).astype(dtype, copy=False) - beta * v, wide)
        turned = math.hypot(rho_bar, damp)
        damped = math.hypot(damped, damp / turned * phi_bar)
        phi_bar *= rho_bar / turned
        rho = math.hypot(turned, beta)
        c, s = turned / rho, beta / rho
        theta, rho_bar, phi, phi_bar = s * alpha, -c * alpha, c * phi_bar, s * phi_bar
        x = x + (phi / rho) * w
        squares = wide.products((w, w), (x, x))
        directions += squares[0].real / rho**2
        x_length = math.sqrt(squares[1].real)
        w = v - (theta / rho) * w
        if callback is not None:
            callback(x)
        r2, ar = math.hypot(phi_bar, damped), alpha * abs(s * phi)
        if r2 <= btol * norm + atol * frobenius * x_length:
            istop = 1
        elif ar <= atol * frobenius * r2:
            istop = 2
    r1 = math.sqrt(max(0.0, r2**2 - (damp * x_length) ** 2))
    return LsqrResult(x, istop, done, r1, r2, frobenius, frobenius * math.sqrt(directions), ar, x_length)
