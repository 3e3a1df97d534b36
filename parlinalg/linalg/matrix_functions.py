"""Functions of square matrices, the polar decomposition, and bases of ranges and null spaces."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array.core import DistArray, truth
from parlinalg.array.create import arange, eye, ones
from parlinalg.array.dispatch import primitive
from parlinalg.array.joining import stack
from parlinalg.array.shapes import reshape
from parlinalg.backend import namespace, shape_solver
from parlinalg.backend.shapes import has_values
from parlinalg.layout import cut_lengths
from parlinalg.linalg import kernels
from parlinalg.linalg.factors.cholesky import divided
from parlinalg.linalg.factors.lu import LUFactor
from parlinalg.linalg.factors.qr import QRFactor, q_above_identity
from parlinalg.linalg.general import Schur
from parlinalg.linalg.iterative.vectors import assumed_steps
from parlinalg.linalg.matrices import NEGLIGIBLE, LinAlgError, as_matrix, batches, cutoff, naming, refuse_nonfinite
from parlinalg.linalg.ranks import basis, counted, triangle_of
from parlinalg.linalg.reductions.hessenberg import sent_home
from parlinalg.linalg.singular import by_bidiagonal, svd
from parlinalg.linalg.spectral import eigh
from parlinalg.linalg.systems import solve_triangular
from parlinalg.linalg.tiles import worst
from parlinalg.matmul import matmul
from parlinalg.matmul.assign import assign

# ------------------------------------------------------------------------------------------------ exponential
#: By the degree of the Padé approximant the largest norm for which it is as accurate as float64.
THETA = {3: 1.495585217958292e-2, 5: 2.539398330063230e-1, 7: 9.504178996162932e-1, 9: 2.097847961257068, 13: 4.25}
#: By the degree the inverse of the first coefficient of its error.
ERROR = {
    3: 100800.0, 5: 10059033600.0, 7: 4487938430976000.0, 9: 5914384781877411840000.0,
    13: 113250775606021113483283660800000000.0,
}  # fmt: skip


@primitive
def expm(x: DistArray, /) -> DistArray:
    """Return the exponentials of square matrices [..., n, n], in their layout.

    By scaling and squaring with Padé approximants up to degree 13 (Al-Mohy and Higham, "A new scaling and squaring
    algorithm for the matrix exponential", 2009): products and one solution on all ranks.  The scaling is chosen by
    norms of high powers, which are estimated by products with vectors.  Of triangular matrices the diagonal, and what
    is beside it, are computed anew after each squaring, so that small elements are as accurate as large ones.
    """
    x = as_matrix(x, "expm", square=True)
    if x.ndim > 2:
        return batches("expm", lambda xp, a: _exponentials(x, a), expm, x)[0]
    a, layout = _finite(x, "expm"), x.layout.with_partial(())
    n = x.shape[0]
    if not n:
        return a.copy()
    powers, more = _powers(a), 0
    roots = _roots(powers)
    if not all(map(math.isfinite, roots)):  # the powers are out of range: take those of A by 2 to the power of `more`
        del powers
        more = max(1, math.frexp(float(abs(a).max()))[1] + n.bit_length())
        powers = _powers(_halved_often(a, more))
        roots = _roots(powers)
    chosen = _chosen(
        np.array(roots)[:, None], lambda at: _estimate(10, powers[1], powers[2]) ** (1 / 10),
        lambda at, m: _sizes(a, m, more), a.dtype,
    )  # fmt: skip
    degree, squarings = (int(each[0]) for each in chosen)
    if degree == 9:
        powers.append(matmul(powers[1], powers[1], layout=layout))
    odd, even = _pade(a, powers, degree, 2.0**-squarings, more)
    _combine([(odd, [-1, 1]), (even, [1, 1])], [odd, even])
    factor = LUFactor(odd, b=even, spent=True)
    del odd, even
    found = factor.carried(a, last=True)
    del factor
    return _squared(found, a, squarings + more)


def _powers(a: DistArray) -> list[DistArray]:
    """Return A², A⁴ and A⁶, which may be out of range."""
    layout = a.layout.with_partial(())
    with np.errstate(over="ignore", invalid="ignore"):
        found = [matmul(a, a, layout=layout)]
        del a
        found.append(matmul(found[0], found[0], layout=layout))
        found.append(matmul(found[0], found[1], layout=layout))
    return found


def _roots(powers: list[DistArray]) -> tuple[float, float, float]:
    """Return the roots of the norms of A⁴, A⁶ and A⁸, the last of which is estimated."""
    with np.errstate(over="ignore", invalid="ignore"):
        d4, d6 = (_norm(powers[k - 1], 2 * k) ** (1 / (2 * k)) for k in (2, 3))
        return d4, d6, _estimate(8, powers[1], powers[1]) ** (1 / 8)


def _halved_often(a: DistArray, times: int) -> DistArray:
    """Return A divided by 2 to the power of `times`."""
    return a * a.real.dtype.type(2.0**-times) if times else a


def _chosen(roots: Any, d10: Any, sizes: Any, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return degrees and numbers of squarings of matrices, by roots of the norms of A⁴, A⁶ and A⁸, [3, count].

    `d10` is a function that gives the root for A¹⁰, of matrices with these numbers, and `sizes` one that gives what
    `_sizes` does, for a degree too.
    """
    d4, d6, d8 = roots
    degree, squarings, left = np.full(len(d4), 13), np.zeros(len(d4), np.int64), np.ones(len(d4), bool)

    def excess(at: np.ndarray, m: int) -> np.ndarray:
        """Return how many squarings more the degree needs where |A|^(2m + 1) is large beside powers of its norm."""
        largest, one = sizes(at, m)
        some = np.broadcast_to((largest > 0) & (one > 0), at.shape)
        log = np.log2(np.where(some, largest, 1)) + 2 * m * (np.log2(np.where(some, one, 1)) - squarings[at])
        more = np.ceil((log - math.log2(ERROR[m]) - math.log2(float(np.finfo(dtype).eps) / 2)) / (2 * m))
        return np.where(some, np.maximum(0, more), 0).astype(np.int64)

    first, theta = np.maximum(d4, d6), np.maximum(d6, d8)
    for m, limit in ((3, first), (5, first), (7, theta), (9, theta)):
        if len(at := np.flatnonzero(left & (limit <= THETA[m]))):
            at = at[excess(at, m) == 0]
            degree[at], left[at] = m, False
    if len(at := np.flatnonzero(left)):
        theta = np.minimum(theta[at], np.maximum(d8[at], d10(at)))
        squarings[at] = np.maximum(0, np.ceil(np.log2(np.where(theta > 0, theta, 1) / THETA[13])))
        squarings[at] += excess(at, 13)
    return degree, squarings


def _squared(found: DistArray, a: DistArray, squarings: int) -> DistArray:
    """Return the exponential of A from that of A times 2 to the power of minus `squarings`, which may be overwritten.

    Code fragment 2.1 of the paper: squares of a triangle lose what is small on its diagonal beside what is large.
    """
    side = _triangle(a) if squarings else 0
    if side:
        diagonal, beside = (a.diagonal(k).gather() for k in (0, side))
    for turn in range(squarings, -1, -1):
        if turn < squarings:
            found = matmul(found, found, layout=found.layout)
        if side and has_values(diagonal):
            first, last = 0.5 ** (turn // 2), 0.5 ** (turn - turn // 2)  # their product may be out of a float's range
            d, t = (kernels.to_host(each) * first * last for each in (diagonal, beside))
            _set_diagonals(found, d, t, side)
    return found


def _triangle(a: DistArray) -> int:
    """Return 1 of an upper triangle, -1 of a lower one, and 0 of other matrices.  Collective."""
    grid, below, above = a.grid, False, False
    if not grid.backend.values:
        above, below = True, not grid.backend.assume("triangular", "whether the matrix of expm is triangular")
    elif grid.inside:
        xp, (rows, columns) = namespace(a.block), grid.block(a.layout, a.shape)
        step = max(1, TOGETHER // max(1, len(columns))) if isinstance(a.block, np.ndarray) else max(1, len(rows))
        for start in range(0, len(rows), step):
            part, k = a.block[start : start + step], rows.start + start - columns.start
            below, above = below or bool(xp.tril(part, k - 1).any()), above or bool(xp.triu(part, k + 1).any())
            if below and above:
                break
    found_below, found_above = worst(grid, [below, above])
    return 0 if found_below and found_above else -1 if found_below else 1


def _set_diagonals(a: DistArray, d: np.ndarray, t: np.ndarray, side: int) -> None:
    """Set the diagonal of a triangle, and what is beside it, as of the exponential of one that has d and t there."""
    if not a.grid.inside:
        return
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        values = {0: np.exp(d), side: _beside(d, t)}
    block, (rows, columns) = a.writable(), a.grid.block(a.layout, a.shape)
    for k, each in values.items():  # elements (i, i + k)
        up, left = max(k, 0), max(-k, 0)
        at = np.arange(max(rows.start - left, columns.start - up, 0), min(rows.stop - left, columns.stop - up))
        part = a.grid.backend.from_host(each[at].astype(a.dtype))
        block[at + left - rows.start, at + up - columns.start] = part


def _beside(d: np.ndarray, t: np.ndarray) -> np.ndarray:
    """Return what is beside the diagonals of exponentials of triangles that have d [..., n] and t [..., n - 1] there.

    It is that of each [[d₀, t], [0, d₁]]: t (exp d₁ - exp d₀) / (d₁ - d₀), without cancellation.
    """
    one, other = d[..., :-1], d[..., 1:]
    first = one.real >= other.real
    larger, less = np.where(first, one, other), np.where(first, one - other, other - one)
    share = np.where(less == 0, 1, -np.expm1(-less) / np.where(less == 0, 1, less))
    return np.where(t == 0, 0, t * np.exp(larger) * share)


def _pade(
    a: DistArray, powers: list[DistArray], m: int, scale: float, more: int = 0
) -> tuple[DistArray, DistArray]:  # fmt: skip
    """Return the odd and the even part of the numerator of the Padé approximant of degree m of `scale * B`.

    B is A divided by 2 to the power of `more`.

    Parameters
    ----------
    powers : list of DistArray
        Those of the square of B, from the first one on, which lie like A; they are overwritten, and taken out of the
        list.
    """
    layout = powers[0].layout
    for k in range(len(powers) if scale != 1 else 0):
        powers[k].writable()[...] *= a.real.dtype.type(scale ** (2 * k + 2))
    b = _coefficients(m)
    if m < 13:
        odd, even = powers[:2]
        _combine([(odd, b[3::2]), (even, b[2::2])], powers)
    else:
        inner = powers[0].copy()
        _combine([(inner, b[9::2])], powers)
        odd = _times(powers[2], inner)
        del inner
        _combine([(odd, [*b[3:9:2], 1])], [*powers, odd])
        _combine([(powers[0], b[8::2]), (powers[1], b[2:8:2])], powers)
        even = _times(powers.pop(), powers[0])
        _combine([(even, [1, 1])], [even, powers[1]])
    powers.clear()
    for each, constant in ((odd, b[1]), (even, b[0])):
        _add_to_diagonal(each, constant)
    return matmul(_halved_often(a, more), odd, alpha=scale, layout=layout), even


def _coefficients(m: int) -> list[float]:
    """Return the coefficients of the numerator of the Padé approximant of degree m, that of power 0 first."""
    f = math.factorial
    return [f(2 * m - j) * f(m) / (f(2 * m) * f(j) * f(m - j)) for j in range(m + 1)]


STRIPS = 4
"""Parts of a matrix that a product overwrites, one after the other."""


def _times(t: DistArray, x: DistArray) -> DistArray:
    """Replace x by T x, some of every rank's columns at a time, and return it."""
    block, cut, grid, n = x.writable(), x.layout.dims[1], x.grid, x.shape[1]
    lengths = np.array(cut_lengths(n, cut, grid.sizes))
    step = max(1, -(-int(lengths.max()) // STRIPS))
    plan = assign(t.layout, x.layout, t.shape, x.shape, grid.sizes, x.layout)  # that of the whole product
    for start in range(0, int(lengths.max()), step):  # these are a matrix that lies alike
        wide, at = int(np.clip(lengths - start, 0, step).sum()), slice(start, start + step)
        part = DistArray(block[:, at].copy(), (x.shape[0], wide), x.layout, grid)
        block[:, at] = matmul(t, part, plan=plan).block
    return x


TOGETHER = 1 << 14
"""Elements of a block of which sums are made at once."""


def _combine(sums: list[tuple[DistArray, list[float]]], terms: list[DistArray]) -> None:
    """Replace each array by the sum of coefficients times terms.  All lie alike; terms may be among the arrays."""
    real, every = terms[0].real.dtype.type, [each.block for each in terms]
    outs = [each.writable() for each, _ in sums]
    rows = max(1, TOGETHER // max(1, every[0].shape[1]))
    for start in range(0, len(every[0]), rows):
        at = slice(start, start + rows)
        found = [sum(real(c) * x[at] for c, x in zip(some, every, strict=False)) for _, some in sums]
        for out, part in zip(outs, found, strict=True):
            out[at] = part


def _add_to_diagonal(a: DistArray, value: float) -> None:
    """Add a number to the elements of the diagonal of a matrix, in place."""
    if not a.grid.inside:
        return
    block, (rows, columns) = a.writable(), a.grid.block(a.layout, a.shape)
    at = np.arange(max(rows.start, columns.start), min(rows.stop, columns.stop))
    block[at - rows.start, at - columns.start] += a.real.dtype.type(value)


def _norm(a: DistArray, power: int) -> float:
    """Return the largest sum of the absolute values of a column of a power of the matrix."""
    return as_number(abs(a).sum(axis=0).max(), power)


def as_number(norm: DistArray, power: int) -> float:
    """Return a norm of so high a power of the matrix; without values the power of what is assumed."""
    return float(norm) if norm.grid.backend.values else float(norm) ** power


def _estimate(power: int, *factors: DistArray) -> float:
    """Return an estimate of the 1-norm of a product, a power of the matrix, from below (Hager 1984, Higham 1988)."""
    n, like = factors[0].shape[0], factors[0]
    v = ones(n, grid=like.grid, dtype=like.dtype) / like.real.dtype.type(n)
    found, assumed = 0.0, assumed_steps(like)
    for turn in range(1, 6):
        y = v
        for each in reversed(factors):
            y = each @ y
        size = abs(y)
        now = as_number(size.sum(), power)
        if not math.isfinite(now) or (now <= found and assumed is None):
            return max(now, found)
        found = now
        z = y / np.where(size > 0, size, 1) + (size == 0)
        for each in factors:
            z = each.mT.conj() @ z
        size = abs(z)
        largest, at, along = float(size.max()), int(np.argmax(size)), float(np.vdot(z, v).real)
        if largest <= along if assumed is None else turn == assumed:
            break
        v = np.equal(arange(n, grid=v.grid, layout=v.layout), at).astype(v.dtype)
    return found


def _sizes(a: DistArray, m: int, more: int = 0) -> tuple[float, float]:
    """Return the norm of |B|^(2m + 1), of B divided by its norm, and this; B is A by 2 to the power of `more`."""
    size = abs(a)
    if more:
        size *= size.dtype.type(2.0**-more)
    one = as_number(size.sum(axis=0).max(), 1)
    size /= size.dtype.type(one or 1)
    v = ones(a.shape[0], grid=a.grid, dtype=size.dtype)
    for _ in range(2 * m + 1 if one else 0):
        v = v @ size
    return as_number(v.max(), 0), one


# ------------------------------------------------------------------------------------------------ square root
@primitive
def sqrtm(x: DistArray, /) -> DistArray:
    """Return the principal square roots of square matrices [..., n, n]: X X = A, with eigenvalues of real parts ≥ 0.

    A Hermitian matrix is taken apart by `eigh`, any other by its Schur form (Björck and Hammarling 1983; Deadman,
    Higham and Ralha 2013), whose root one rank finds (see `eig`; memory and time are alike).  The residual X X - A is
    of the size n ε ‖X‖².  The root lies like A.

    Positive eigenvalues keep their roots, however small.  Of a complex Hermitian matrix those from -n ε ‖A‖ to 0 count
    as 0, of any real matrix those from -10 n ε ‖A‖: rounding makes such eigenvalues of a matrix that has a real root,
    as of B @ B.T of less than full rank.
    They are elements of the diagonal of the (Schur) form, which is that of A with an error of the size n ε ‖A‖, and
    turning them into 0 changes A by no more than their size in the 2-norm: X is the real root of a matrix as near to A
    as rounding.  `scipy.linalg.sqrtm` returns a complex root there, with imaginary parts up to the root of n ε ‖A‖, as
    `sqrtm(A.astype(complex))` does here.  An eigenvalue whose condition number is large may be further below 0 by
    rounding of A alone, and is refused.

    Raises
    ------
    LinAlgError
        If a real matrix has a negative eigenvalue, so that its root is not real (`x.astype(complex)` has one), or if
        the matrix is singular and has no root.
    """
    x = as_matrix(x, "sqrtm", square=True)
    if x.ndim > 2:
        found = []
        for at in np.ndindex(*x.shape[:-2]):
            with naming(at):
                found.append(sqrtm(x[at]))
        return reshape(stack(found), x.shape).redistribute(x.layout.with_partial(())) if found else x.summed().copy()
    x = _finite(x, "sqrtm")
    layout, n = x.layout, x.shape[0]
    if not n:
        return x.copy()
    if truth((x == x.mT.conj()).all(), "hermitian", "whether the matrix of sqrtm is Hermitian"):
        w, v = eigh(x)
        least, most = float(w.min()), float(abs(w).max())
        rounding = n * float(np.finfo(x.dtype).eps) * most
        if x.dtype.kind != "c" and least < -NEGLIGIBLE * rounding:
            raise _negative(least)
        lowest = -rounding if x.dtype.kind == "c" else -math.inf
        root = np.where((w < 0) & (w >= lowest), w * 0, w)
        root = np.sqrt(root if x.dtype.kind != "c" else root.astype(x.dtype))
        return matmul(v * root, v.mT.conj(), layout=layout)
    form = Schur(x, "sqrtm", balance=False)
    t, form.t = form.t, None
    taken: tuple[Any, float] = (None, 0.0) if t is None else _principal(t, form.values)
    del t
    root, least = taken
    negative, singular = form.tiles.worst([-least, root is not None and not kernels.finite(root)])
    if negative:
        raise _negative(-negative / float(form.scale))
    if singular:
        raise LinAlgError("the matrix is singular and has no square root")
    if root is not None:
        root /= np.sqrt(form.scale)
    s = form.vectors(layout)
    return matmul(matmul(s, sent_home(root, n, x.dtype, layout, x.grid)), s.mT.conj(), layout=layout)


def _negative(value: float) -> LinAlgError:
    return LinAlgError(
        f"the matrix has the eigenvalue {value:.6g}, and so no real square root; x.astype(complex) has one"
    )


def _principal(t: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the principal root of a Schur form with these eigenvalues, NaNs where there is none; and 0.

    Of a real form with an eigenvalue below 0, beyond rounding, return anything and the least one.
    """
    if not has_values(t):
        return shape_solver.square_root(t)
    rounding = len(t) * float(np.finfo(t.dtype).eps) * float(np.linalg.norm(t))
    if t.dtype.kind != "c":
        negative = np.flatnonzero((values.imag == 0) & (values.real < 0))
        least = float(values.real[negative].min(initial=0))
        if least < -NEGLIGIBLE * rounding:
            return t, least
        t[negative, negative] = 0
    return _root(t, NEGLIGIBLE * rounding), 0.0


def _root(t: np.ndarray, rounding: float) -> np.ndarray:
    """Return the root of a Schur form; NaNs where there is none.  Halves are joined by a Sylvester equation.

    Where eigenvalues of both halves are 0, so that the equation is singular, residuals up to `rounding` count as 0.
    """
    n = len(t)
    if n == 1:
        return np.sqrt(t)
    if n == 2 and t[1, 0]:  # a pair of eigenvalues: equal diagonal elements
        mean, size = t[0, 0], math.hypot(t[0, 0], math.sqrt(abs(t[0, 1])) * math.sqrt(abs(t[1, 0])))
        imaginary = math.sqrt(abs(t[0, 1])) * math.sqrt(abs(t[1, 0]))
        real = math.sqrt((size + mean) / 2) if mean >= 0 else imaginary / math.sqrt(2 * (size - mean))
        root = t / (2 * real)
        root[[0, 1], [0, 1]] = real
        return root
    k = n // 2
    k += bool(t[k, k - 1])
    found = np.zeros_like(t, order="F")
    first, last, right = _root(t[:k, :k], rounding), _root(t[k:, k:], rounding), t[:k, k:]
    corner, scale, info = kernels.lapack("trsyl", t.dtype)(first, last, right)
    with np.errstate(all="ignore"):
        corner /= scale
        if info and abs(right).max() <= rounding:
            corner[...] = 0
        elif info and not abs(first @ corner + corner @ last - right).max() <= rounding:
            corner[...] = np.nan
    found[:k, :k], found[k:, k:], found[:k, k:] = first, last, corner
    return found


# ------------------------------------------------------------------------------------------------ polar decomposition
class PolarResult(NamedTuple):
    """U, with orthonormal columns or rows, and the Hermitian positive semidefinite P."""

    U: DistArray
    P: DistArray


@primitive
def polar(a: DistArray, side: str = "right") -> PolarResult:
    """Return U [..., m, n] and P of the polar decomposition A = U P of matrices, or A = P U; like `scipy.linalg.polar`.

    By the QR-based dynamically weighted Halley iteration, at most six or seven steps, of QR factorizations first and
    of Cholesky factorizations once the iterate is well conditioned (Nakatsukasa and Higham, 2013); a matrix that is not
    of full rank, or for which the iteration is not accurate, by singular values.

    Parameters
    ----------
    side : {"right", "left"}
        A = U P with P [..., n, n], or A = P U with P [..., m, m].
    """
    a = as_matrix(a, "polar")
    if not isinstance(side, str) or side not in ("right", "left"):
        raise ValueError(f"polar: side is 'right' or 'left', not {side!r}")
    if a.ndim > 2:
        u = batches("polar", _polar_factor, lambda x: polar(x).U, a)[0]
    else:
        a = _finite(a, "polar")
        (m, n), layout = a.shape, a.layout
        u = _unitary(a) if m >= n else _unitary(a.mT.conj()).mT.conj()
        u = u.redistribute(layout)

    def semidefinite(u: DistArray) -> tuple[DistArray, bool]:
        p = u.mT.conj() @ a if side == "right" else a @ u.mT.conj()
        turned = p.mT.conj().redistribute(p.layout)
        return p / 2 + turned / 2, a.ndim == 2 and skewed(p, turned)  # the sum of both may be out of range

    p, wrong = semidefinite(u)
    if wrong:
        u, _, vh = svd(a, full_matrices=False)
        u = matmul(u, vh, layout=a.layout)
        p, _ = semidefinite(u)
    return PolarResult(u, p.redistribute(a.layout.with_partial(())))


def _polar_factor(xp: Any, a: Any) -> Any:
    u, _, vh = kernels.routines(a).svd(a, full_matrices=False)
    return u @ vh


def _unitary(a: DistArray) -> DistArray:
    """Return the polar factor of a matrix [m, n] with m ≥ n."""
    found = halley(a)
    if found is not None:
        return found
    u, _, vh = svd(a, full_matrices=False)
    return matmul(u, vh)


def skewed(p: DistArray, turned: DistArray) -> bool:
    """Return True if Uᴴ A and its adjoint differ by more than rounding: U is not the polar factor of A.

    Rows of very different sizes in the first factorizations of `halley` can lose digits of a singular A.
    """
    if not p.size:
        return False
    with np.errstate(over="ignore"):
        apart, size = as_number(abs(p - turned).max(), 0), as_number(abs(p).max(), 0)
    return p.grid.backend.values and apart > 100 * p.shape[0] * float(np.finfo(p.dtype).eps) * size


def halley(a: DistArray) -> DistArray | None:
    """Return the polar factor of a matrix [m, n] with m ≥ n; None where its columns do not become orthonormal.

    See `polar` for the iteration.
    """
    (m, n), layout, values = a.shape, a.layout, a.grid.backend.values
    if not values:
        a.grid.backend.assume("condition", "the number of steps of a polar decomposition")
    real = a.real.dtype.type
    eps = float(np.finfo(a.dtype).eps)
    largest = as_number(abs(a).max(), 0) if a.size else 0.0
    if not largest:
        return eye(m, n, dtype=a.dtype, grid=a.grid, layout=layout)
    x = a * kernels.unit(largest, a.dtype)
    x /= real(_frobenius(x))
    low = _least(QRFactor(x, keep=False).R, eps)
    for _ in range(12):
        if abs(low - 1) < 10 * eps:
            break
        d = (4 * (1 - low**2) / low**4) ** (1 / 3)
        root = math.sqrt(1 + d)
        p = root + math.sqrt(max(0.0, 8 - 4 * d + 8 * (2 - low**2) / (low**2 * root))) / 2
        q = (p - 1) ** 2 / 4
        r = p + q - 1
        low = min(1.0, low * (p + q * low**2) / (1 + r * low**2))
        if r > 100:
            upper, lower = q_above_identity(x, math.sqrt(r))
            step, weight = matmul(upper, lower.mT.conj(), layout=layout), (p - q / r) / math.sqrt(r)
            del upper, lower
        else:
            inner = matmul(x.mT.conj(), x, alpha=r, layout=layout)
            _add_to_diagonal(inner, 1)
            step, weight = divided(x, inner), p - q / r
            del inner
        _combine([(x, [q / r, weight])], [x, step])
        del step
    for _ in range(4):
        inner = matmul(x.mT.conj(), x, layout=layout)
        _add_to_diagonal(inner, -1)
        odd = float(abs(inner).max())
        if odd <= 10 * eps or not values:
            return x
        if not odd < 0.5:
            break
        x = x - matmul(x, inner, alpha=0.5, layout=layout)  # Newton and Schulz's step
    if odd <= 100 * n * eps:
        return x
    return None


def _least(r: DistArray, eps: float) -> float:
    """Return a lower bound of the least singular value of R, or of one within rounding of 0 what may stand for it."""
    floor = eps / (10 * r.shape[0])
    try:
        inverse = solve_triangular(r, eye(r.shape[0], dtype=r.dtype, grid=r.grid, layout=r.layout))
    except LinAlgError:
        return floor
    size, backend = _frobenius(inverse), r.grid.backend
    if not backend.values:
        full = backend.assume("conditioned", "the rank of a matrix")
        size = backend.assume("condition", "the condition number of a matrix") if full else math.inf
    return max(floor, 0.9 / size) if math.isfinite(size) else floor


def _frobenius(a: DistArray) -> float:
    """Return the square root of the sum of squares, which may be out of range themselves."""
    largest = as_number(abs(a).max(), 0)
    if not largest or not math.isfinite(largest):
        return largest
    return largest * math.sqrt(as_number((abs(a / a.real.dtype.type(largest)) ** 2).sum(), 0))


# ------------------------------------------------------------------------------------------------ bases
def _rank(name: str, s: DistArray, shape: tuple[int, ...], rcond: float | None) -> int:
    if rcond is None:
        rcond = float(np.finfo(s.dtype).eps) * max(shape)
    rcond = cutoff(name, rcond)
    return counted((s > s.max() * s.dtype.type(rcond)).sum(), s.size) if s.size else 0


def _one(a: DistArray, name: str) -> DistArray:
    a = as_matrix(a, name)
    if a.ndim != 2:
        raise ValueError(f"{name} takes one matrix, not a stack of shape {a.shape}: their bases may differ in number")
    return a


@primitive
def orth(a: DistArray, rcond: float | None = None) -> DistArray:
    """Return an orthonormal basis [m, k] of the range of a matrix [m, n], by singular values, in its layout.

    Those below `rcond` times the largest count as 0, by default max(m, n) times the dtype's eps.
    """
    a = _one(a, "orth")
    if by_bidiagonal(a):
        return basis(a, "left", lambda s: _rank("orth", s, a.shape, rcond), False, "orth")
    u, s, _ = svd(a, full_matrices=False)
    return u[:, : _rank("orth", s, a.shape, rcond)].redistribute(u.layout)


@primitive
def null_space(a: DistArray, rcond: float | None = None) -> DistArray:
    """Return an orthonormal basis [n, k] of the null space of a matrix [m, n], by singular values, in its layout.

    Those below `rcond` times the largest count as 0, by default max(m, n) times the dtype's eps.
    """
    a = _one(a, "null_space")
    shape = a.shape
    if by_bidiagonal(a):
        return basis(a, "right", lambda s: _rank("null_space", s, shape, rcond), True, "null_space")
    a = triangle_of(a, "null_space") if a.shape[0] > a.shape[1] else a  # of the same V
    _, s, vh = svd(a, full_matrices=a.shape[0] < a.shape[1])
    return vh[_rank("null_space", s, shape, rcond) :].mT.conj().redistribute(vh.layout)


# ------------------------------------------------------------------------------------------------ helpers
def _finite(x: DistArray, name: str) -> DistArray:
    """Return the array with its terms summed; refuse NaNs and infinities."""
    x = x.redistribute(x.layout.with_partial(()))
    refuse_nonfinite(not truth(np.isfinite(x).all(), "finite", "whether the elements are finite"), name)
    return x


def _exponentials(x: DistArray, block: Any) -> Any:
    """Return the exponentials of this rank's matrices, by the host."""
    if not has_values(block):
        return shape_solver.exponential(block)
    a = x.grid.backend.to_host(block)
    n, found = a.shape[-1], np.empty(a.shape, a.dtype)
    step = max(1, BATCH // max(1, n * n))
    each, out = (x.reshape(math.prod(a.shape[:-2]), n, n) for x in (a, found))
    for start in range(0, len(each) if n else 0, step):
        out[start : start + step] = _exponentials_of(each[start : start + step])
    return x.grid.backend.from_host(found)


BATCH = 1 << 16
"""Elements of matrices of a stack of which a rank computes the exponentials at once."""


def _exponentials_of(a: np.ndarray) -> np.ndarray:
    """Return the exponentials of matrices [k, n, n] as `expm` does, each by a degree and squarings of its own.

    Norms of high powers are computed.  SciPy's loses two digits of some matrices (1.17.1).
    """
    powers = [a @ a]
    powers.append(powers[0] @ powers[0])
    powers += [powers[0] @ powers[1], powers[1] @ powers[1]]
    roots = [_norms(p) ** (1 / (2 * k + 2)) for k, p in enumerate(powers)]
    found, finite = np.empty_like(a), np.isfinite(roots).all(axis=0)
    if not finite.all():  # powers are out of range
        found[finite], a = _exponentials_of(a[finite]), a[~finite]
        times = np.maximum(1, np.frexp(abs(a).max(axis=(-2, -1)))[1] + a.shape[-1].bit_length())
        found[~finite] = _squares(_exponentials_of(_halved(a, times)), a, times)
        return found
    degree, squarings = _chosen(
        roots[1:], lambda at: _norms(powers[1][at] @ powers[2][at]) ** (1 / 10),
        lambda at, m: _sizes_of(a[at], m), a.dtype,
    )  # fmt: skip
    for m in np.unique(degree).tolist():
        at = np.flatnonzero(degree == m)
        some = [_halved(p[at], (2 * k + 2) * squarings[at]) for k, p in enumerate(powers)]
        odd, even = _pade_parts(_halved(a[at], squarings[at]), some, m)
        found[at] = np.linalg.solve(even - odd, even + odd)
    return _squares(found, a, squarings)


def _norms(a: np.ndarray) -> np.ndarray:
    """Return the largest sums of the absolute values of a column of matrices."""
    found: np.ndarray = abs(a).sum(axis=-2).max(axis=-1).astype(np.float64)
    return found


def _squares(found: np.ndarray, a: np.ndarray, squarings: np.ndarray) -> np.ndarray:
    """Return what `_squared` does of each matrix, each with squarings of its own."""
    upper, lower = ~np.tril(a, -1).any(axis=(-2, -1)), ~np.triu(a, 1).any(axis=(-2, -1))
    for turn in range(int(squarings.max(initial=0)), -1, -1):
        if len(at := np.flatnonzero(squarings > turn)):
            found[at] = found[at] @ found[at]
        for side, which in ((1, upper), (-1, lower & ~upper)):  # code fragment 2.1 of the paper
            if len(at := np.flatnonzero(which & (squarings >= max(1, turn)))):
                line, scale = np.arange(a.shape[-1]), a.real.dtype.type(0.5**turn)
                d, t = (np.diagonal(a[at], k, -2, -1) * scale for k in (0, side))
                found[at[:, None], line, line] = np.exp(d)
                up, left_of = max(side, 0), max(-side, 0)
                line = line[: a.shape[-1] - 1]
                found[at[:, None], line + left_of, line + up] = _beside(d, t)
    return found


def _halved(a: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return matrices divided by 2 to these powers, which may be out of a float's range."""
    if not times.any():
        return a
    part = a.real.dtype.type(0.5) ** (times // 2).astype(a.real.dtype)
    rest = a.real.dtype.type(0.5) ** (times - times // 2).astype(a.real.dtype)
    return a * part[:, None, None] * rest[:, None, None]


def _pade_parts(a: np.ndarray, powers: list[np.ndarray], m: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the odd and the even part of the numerator of the Padé approximant of degree m of matrices."""
    kind, one = a.real.dtype.type, np.eye(a.shape[-1], dtype=a.dtype)

    def total(coefficients: list[float]) -> Any:
        return sum(kind(c) * p for c, p in zip(coefficients, powers, strict=False))

    b = _coefficients(m)
    if m < 13:
        odd, even = total(b[3::2]), total(b[2::2])
    else:
        odd = powers[2] @ total(b[9::2]) + total(b[3:9:2])
        even = powers[2] @ total(b[8::2]) + total(b[2:8:2])
    return a @ (odd + kind(b[1]) * one), even + kind(b[0]) * one


def _sizes_of(a: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Return what `_sizes` does of each matrix."""
    size, one = abs(a), _norms(a)
    size /= np.where(one > 0, one, 1).astype(size.dtype)[:, None, None]
    v = np.ones((len(a), 1, a.shape[-1]), size.dtype)
    for _ in range(2 * m + 1):
        v = v @ size
    return v.max(axis=(-2, -1)).astype(np.float64), one
