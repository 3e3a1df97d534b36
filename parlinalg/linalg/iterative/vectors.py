"""Vectors, bases and linear functions of iterative methods, on all ranks of a grid.

Inner products of several vectors, and of many systems, are summed by one all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parlinalg.array.core import DistArray, same_grid
from parlinalg.array.namespace import broadcast_to, where
from parlinalg.array.shapes import reshape
from parlinalg.backend.shapes import has_values
from parlinalg.layout import Layout
from parlinalg.linalg import kernels
from parlinalg.linalg.matrices import NONFINITE, LinAlgError, real_number
from parlinalg.linalg.tiles import worst
from parlinalg.matmul import matmul
from parlinalg.matmul.assign import assign
from parlinalg.matmul.execute import execute
from parlinalg.plan import Plan

Apply = Callable[[DistArray], DistArray]
Operator = DistArray | Apply
Block = Any

BLUE = 600
"""Squares of float64 numbers times 2 to this power, or its inverse, are in range if those of the numbers are not."""


class Vectors:
    """Inner products of vectors that lie alike, several by one all-reduce.

    Parameters
    ----------
    like : DistArray [n] or [..., n, k]
        A vector, or the vectors of many systems as columns.

    Attributes
    ----------
    systems : tuple of int
        () for one vector, else [..., k]: the shape of what every inner product gives, on all ranks.
    """

    def __init__(self, like: DistArray) -> None:
        self.like, self.grid, self.layout = like, like.grid, like.layout
        self.dtype = np.dtype(np.complex128 if like.dtype.kind == "c" else np.float64)
        self.one = like.ndim == 1
        self.systems = () if self.one else (*like.shape[:-2], like.shape[-1])
        axes = tuple(a for a in like.layout.cut_axes if like.grid.sizes[a] > 1)
        self.comm = like.grid.comm(axes) if like.grid.inside else None
        here = like.grid.block(like.layout, like.shape)
        self._mine = () if self.one else tuple(slice(r.start, r.stop) for r in (*here[:-2], here[-1]))

    def made(self, block: Block) -> DistArray:
        """Return the vector whose part on this rank is `block`."""
        return self.like.like(block)

    def factor(self, values: Any) -> Any:
        """Return numbers, one a system, as what a vector can be multiplied by."""
        if self.one:
            return np.asarray(values).item()
        values = np.broadcast_to(values, self.systems)
        real = self.like.dtype if np.iscomplexobj(values) else np.zeros(0, self.like.dtype).real.dtype
        block = np.ascontiguousarray(values[self._mine][..., None, :], real)
        *lead, _, last = self.layout.dims
        shape = (*self.systems[:-1], 1, self.systems[-1])
        return DistArray(self.grid.backend.from_host(block), shape, Layout(*lead, None, last), self.grid)

    def chosen(self, mask: np.ndarray, x: DistArray, y: DistArray) -> DistArray:
        """Return x of the systems where the mask is True, and y of the others; they may have NaNs."""
        if self.one:
            return x if mask else y
        return where(self.factor(np.where(mask, 1.0, 0.0)) > 0, x, y)

    def plus(self, x: DistArray, factor: Any, y: DistArray) -> DistArray:
        """Return x + factor y of vectors that lie alike, for what `factor` returns."""
        block = factor.block if isinstance(factor, DistArray) else factor
        return self.made(x.block + block * y.block)

    def sums(self, terms: Callable[[], Sequence[Any]], n: int, wait: bool = False) -> Callable[[], np.ndarray]:
        """Begin to sum n numbers a system over the ranks; what is returned waits, and gives all ranks the sums.

        Terms are numbers of this rank's systems, or arrays of those; the sums are an array [n, *systems].  With `wait`
        they are there already, which takes less than to begin and to wait.
        """
        found, handle = np.zeros((n, *self.systems), self.dtype), None
        if self.comm is not None:
            here = [np.asarray(self._numbers(t)) for t in terms()]
            each = [t.reshape(-1) if self.one else t if t.ndim > len(self.systems) else t[None] for t in here]
            found[(slice(None), *self._mine)] = np.concatenate(each)
            handle = self.comm.all_reduce(found, wait=wait)

        def summed() -> np.ndarray:
            if handle is not None:
                handle.wait()
            if not self.grid.backend.values:
                found[...] = 1  # none decides: an iteration takes the steps that are assumed
                return found
            if self.grid.size == self.grid.world.size:
                return found
            mine = None if self.comm is None else found.view(np.float64).ravel().tolist()
            told = self.grid.world.share(mine, others="alike")  # ranks outside of the grid have none
            every = np.array(next(each for each in told if each is not None), np.float64)
            return every.view(self.dtype).reshape(found.shape)

        return summed

    def _numbers(self, block: Block) -> np.ndarray:
        found = self.grid.backend.to_host(block)
        return found if has_values(found) else np.ones(found.shape, found.dtype)

    def dots(self, x: Block, y: Block) -> Any:
        """Return this rank's terms of the inner products xᴴ y, in double precision.

        Squares of single precision leave its range beyond 1e19 and below 1e-19.
        """
        if x.dtype != self.dtype:
            x, y = (wide := x.astype(self.dtype)), wide if y is x else y.astype(self.dtype)
        return self.like.xp.vdot(x, y) if self.one else (x.conj() * y).sum(axis=-2)

    def products(self, *pairs: tuple[DistArray, DistArray]) -> np.ndarray:
        """Return the inner products xᴴ y of pairs of vectors, [pairs, *systems]."""
        return self.begin(*pairs, wait=True)()

    def begin(self, *pairs: tuple[DistArray, DistArray], wait: bool = False) -> Callable[[], np.ndarray]:
        """Begin the inner products of pairs of vectors; what is returned waits for them; see `sums`."""
        return self.sums(lambda: [self.dots(x.block, y.block) for x, y in pairs], len(pairs), wait)

    def norm(self, x: DistArray) -> Any:
        """Return the length of a vector, or of each system's."""
        return np.sqrt(np.maximum(self.products((x, x))[0].real, 0))

    def measured(self, *vectors: DistArray) -> tuple[np.ndarray, np.ndarray]:
        """Return the lengths of vectors times powers of two, and the exponents of these, both [vectors, *systems].

        The exponents are 0 of lengths whose squares are well in range.  One all-reduce of three numbers a length: the
        sums of squares of the elements, and of these times a small and a large number (Blue 1978).
        """
        lifts = (0, -BLUE, BLUE) if self.like.dtype.itemsize == self.dtype.itemsize else (0,)

        def terms() -> list[Any]:
            blocks = [x.block * 2.0**lift if lift else x.block for x in vectors for lift in lifts]
            return [self.dots(block, block) for block in blocks]

        with np.errstate(all="ignore"):
            sums = self.sums(terms, len(vectors) * len(lifts), wait=True)().real
        sums = np.maximum(sums, 0).reshape(len(vectors), len(lifts), *self.systems)
        found, exponents = np.sqrt(sums[:, 0]), np.zeros(sums[:, 0].shape, np.int64)
        if len(lifts) > 1:
            near = 2.0 ** (BLUE * 3 // 4)
            large, small = ~(found < near), found < 1 / near
            found = np.where(large, np.sqrt(sums[:, 1]), np.where(small, np.sqrt(sums[:, 2]), found))
            exponents = np.where(large, BLUE, np.where(small, -BLUE, 0))
        sizes = np.where(found > 0, _exponent(found) + exponents, 0)
        powers = kernels.shifts(sizes, self.like.dtype, squares=True)
        return np.ldexp(found, exponents + powers), powers


def _exponent(sizes: Any) -> np.ndarray:
    """Return the binary exponents of numbers, and 0 of NaNs and infinities."""
    found: np.ndarray = np.frexp(np.where(np.isfinite(sizes), sizes, 0))[1].astype(np.int64)
    return found


def shifted(x: DistArray, exponents: Any) -> DistArray:
    """Return vectors times powers of two, one a system, which need not be in range themselves."""
    exponents = np.asarray(exponents)
    if not exponents.any():
        return x
    factor, most = Vectors(x).factor, np.finfo(x.dtype).maxexp - 2
    with np.errstate(over="ignore", under="ignore"):
        while exponents.any():
            step = np.clip(exponents, -most, most)
            x, exponents = x * factor(np.ldexp(1.0, step)), exponents - step
    return x


class Scaled:
    """A linear function of vectors, times a power of two a system, half of which goes to what the function takes.

    Parameters
    ----------
    apply : function
    vectors : Vectors
        Like what the function gives.

    Attributes
    ----------
    exponents : array of int [*systems]
        Of the powers; 0 unless squares of what the function gives, or products, would leave the range.
    """

    def __init__(self, apply: Apply, vectors: Vectors) -> None:
        self._apply, self._vectors = apply, vectors
        self.exponents = np.zeros(vectors.systems, np.int64)

    def __call__(self, x: DistArray) -> DistArray:
        """Return what the function gives for x, times the powers."""
        half = self.exponents // 2
        return shifted(self._apply(shifted(x, half)), self.exponents - half)

    def fit(self, x: DistArray, size: Any) -> bool:
        """Choose the powers that bring a `size` near 1 if its square is near underflow or overflow.

        Parameters
        ----------
        x : DistArray
            Vectors whose lengths are well in range.
        size : array [*systems]
            A number in proportion to what the function gives for x, such as its length.  Of one that is 0, or not
            finite, the length is computed anew, by one more product and one all-reduce.

        Returns
        -------
        bool
            True, on all ranks, if a power has changed, so that what was computed by the function has to be again.
        """
        if not self._vectors.grid.backend.values:
            return False
        size = np.asarray(size)
        doubt, exponents = (size == 0) | ~np.isfinite(size), _exponent(size)
        if doubt.any():
            lift = np.where(size == 0, 1, -1) * (np.finfo(x.dtype).maxexp // 2) * doubt
            (found,), (power,) = self._vectors.measured(self(shifted(x, lift)))
            exponents = np.where(doubt & (found > 0) & np.isfinite(found), _exponent(found) - power - lift, exponents)
        change = kernels.shifts(exponents, x.dtype, squares=True)
        self.exponents = self.exponents + change
        return bool(change.any())

    def fit_image(self, x: DistArray, y: DistArray, active: Any = True) -> bool:
        """Choose the powers by the length of y, which the function gave for x, as `fit` does; one all-reduce.

        Those of systems that are not `active` stay.
        """
        (size,), (power,) = self._vectors.measured(y)
        return self.fit(x, np.where(active, np.ldexp(size, -power), 1.0))


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

    def append(self, x: DistArray, size: Any) -> None:
        """Add a vector of this length, or of each system; of one whose length is 0 zeros."""
        inverse = np.divide(1.0, size, out=np.zeros(self.vectors.systems), where=np.asarray(size) > 0)
        self.rows[self.count] = (x * self.vectors.factor(inverse)).block
        self.count += 1

    def orthogonalized(self, w: DistArray) -> tuple[DistArray, np.ndarray, Any]:
        """Return what a vector has beside these, its coefficients here, and the length of the rest.

        Classical Gram-Schmidt, twice (Giraud and others, 2005); two all-reduces.
        """
        vectors, n = self.vectors, self.count
        block, found = w.block.copy(), np.zeros((n, *vectors.systems), vectors.dtype)
        with np.errstate(over="ignore", invalid="ignore"):  # callers ask whether numbers are finite
            for again in (False, True):
                with_length = lambda: [self._onto(block), *([vectors.dots(block, block)] if again else [])]  # noqa: B023, E731
                told = vectors.sums(with_length, n + again, wait=True)()
                part = told[:n]
                found += part
                if n:
                    block -= self.combined(part).block
            left = told[n].real - (np.abs(part) ** 2).sum(axis=0)
            return vectors.made(block), found, np.sqrt(np.maximum(left, 0))

    def _onto(self, block: Block) -> Any:
        rows = self.rows[: self.count]
        if self.vectors.one:
            return rows.conj() @ block
        return self.vectors.like.xp.einsum("j...nk,...nk->j...k", rows.conj(), block)

    def combined(self, coefficients: np.ndarray) -> DistArray:
        """Return the sum of the vectors, each times its coefficient, or [vectors, *systems] of them."""
        vectors, rows = self.vectors, self.rows[: len(coefficients)]
        c = np.ascontiguousarray(coefficients[(slice(None), *vectors._mine)], vectors.like.dtype)
        c = vectors.grid.backend.from_host(c)
        return vectors.made(c @ rows if vectors.one else vectors.like.xp.einsum("j...k,j...nk->...nk", c, rows))

    def turn(self, coefficients: np.ndarray) -> None:
        """Replace the first vectors by their combinations, one a column of `coefficients`."""
        m, k = coefficients.shape
        c = self.vectors.grid.backend.from_host(np.ascontiguousarray(coefficients.T, self.vectors.like.dtype))
        self.rows[:k] = c @ self.rows[:m]


class Product:
    """The function that multiplies by a matrix; how it multiplies vectors that lie alike is found once."""

    def __init__(self, a: DistArray) -> None:
        self._a = a
        self._layout: Layout | None = None
        self._column = Layout()
        self._plan: Plan | None = None

    def __call__(self, x: DistArray) -> DistArray:
        """Return A x, of vectors like x."""
        a, layout = self._a, x.layout
        if a.ndim != 2 or x.ndim != 1 or layout.partial or x.shape[0] != a.shape[1] or not a.grid.inside:
            return matmul(a, x)
        if self._plan is None or layout != self._layout:
            self._layout, self._column = layout, Layout(layout.dims[0], None)
            sizes = tuple(a.grid.sizes.items())
            self._plan = assign(a.layout, self._column, a.shape, (a.shape[1], 1), sizes, self._column)
        block = execute(self._plan, a, x.like(x.block[:, None], self._column, (a.shape[1], 1)))
        return x.like(block[:, 0], layout, (a.shape[0],))


def applied(a: Any, name: str, n: int | None = None, square: bool = True, stacks: bool = False) -> Apply:
    """Return the function that multiplies by a matrix, or the function that is given for it.

    Raises
    ------
    TypeError, LinAlgError
        If it is neither, or not a square matrix (or not of n columns), or more than one without `stacks`.
    """
    if isinstance(a, DistArray):
        odd = a.ndim < 2 or (a.ndim > 2 and not stacks)
        if odd or (square and a.shape[-2] != a.shape[-1]) or n not in (None, a.shape[-1]):
            wanted = "a square matrix" if n is None else f"a matrix of shape ({n}, {n})"
            raise LinAlgError(f"{name} takes {wanted if square else f'a matrix of {n} columns'}, not {a.shape}")
        return Product(a.summed())
    refuse_scipy(a, name)
    if not callable(a):
        raise TypeError(f"{name} takes a DistArray or a function of DistArrays for a matrix, not {type(a).__name__}")
    return a


def refuse_scipy(a: Any, name: str) -> None:
    """Raise TypeError of SciPy's operators and sparse matrices, which are callable or not: they take NumPy's arrays."""
    if any(kind.__module__.startswith(("scipy.sparse", "cupyx.scipy.sparse")) for kind in type(a).__mro__):
        dense = "distribute it by parlinalg.asarray(A.toarray()), or " if hasattr(a, "toarray") else ""
        raise TypeError(
            f"{name} takes DistArrays and functions of DistArrays for matrices, not SciPy's {type(a).__name__}, which "
            f"multiplies arrays of NumPy; {dense}write what multiplies DistArrays"
        )


def met_odd(name: str, when: str = "", /, **arguments: Any) -> LinAlgError:
    """Return the error of a method that met NaNs or infinities, and name the argument that has them.  Collective."""
    for argument, value in arguments.items():
        if isinstance(value, DistArray) and worst(value.grid, [not kernels.finite(value.block)])[0]:
            return LinAlgError(f"{name} takes finite numbers; {argument} has {NONFINITE}")
    return LinAlgError(f"{name} met {NONFINITE}{when}")


def converted(y: DistArray, dtype: np.dtype[Any], what: str) -> DistArray:
    """Return a vector in the dtype in which a method computes; raise TypeError if that would lose imaginary parts."""
    if y.dtype.kind == "c" and dtype.kind != "c":
        raise TypeError(f"{what} is {y.dtype}, but the method computes in {dtype}; begin with complex vectors")
    return y.astype(dtype, copy=False)


def product(
    y: Any, shape: tuple[int | None, ...], like: DistArray, layout: Layout | None, dtype: np.dtype[Any], what: str
) -> DistArray:  # fmt: skip
    """Return what a function gave for a product, in a layout and a dtype; None in `shape` is any number of rows.

    Raises
    ------
    ValueError
        If it is no array of this shape on the grid of `like`.
    TypeError
        If the dtype would lose imaginary parts.
    """
    fits = isinstance(y, DistArray) and y.ndim == len(shape) and y.grid is like.grid
    if not fits or any(n not in (None, k) for n, k in zip(shape, y.shape, strict=True)):
        given = f"of shape {y.shape}" if isinstance(y, DistArray) else f"a {type(y).__name__}"
        given += " on another grid" if isinstance(y, DistArray) and y.grid is not like.grid else ""
        wanted = str(shape).replace("None", "m")
        raise ValueError(f"{what} is to be a DistArray of shape {wanted} on the grid of the vectors, not {given}")
    return converted(y.summed() if layout is None else y.redistribute(layout), dtype, what)


def tolerance(name: str, value: Any) -> float:
    """Return a tolerance; raise ValueError if it is no number of at least 0."""
    found = real_number(value)
    if found is None or not 0 <= found < math.inf:
        raise ValueError(f"{name} is a number of at least 0, not {value!r}")
    return found


def check_callback(name: str, callback: Any) -> None:
    """Raise TypeError unless a callback is a function, or None."""
    if callback is not None and not callable(callback):
        raise TypeError(f"{name}: callback is a function, or None, not {callback!r}")


def precise(*arrays: Any) -> np.dtype[Any]:
    """Return the dtype in which methods compute with these: float32 stays, integers and booleans become float64."""
    kinds = [x.dtype for x in arrays if isinstance(x, DistArray)]
    return np.result_type(*(np.float64 if kind.kind in "biu" else kind for kind in kinds), np.float32)


def lead_of(a: Any) -> tuple[int, ...]:
    """Return the leading dims of a stack of matrices; none of a function."""
    return a.shape[:-2] if isinstance(a, DistArray) else ()


def columns(name: str, b: Any, matrices: Sequence[Any]) -> tuple[DistArray, Callable[[DistArray], DistArray]]:
    """Return right-hand sides as vectors, and what gives a solution the shape and layout that was asked for.

    One system has a vector [n], and many have [..., n, k], cut in the leading dims as the matrices are.

    Raises
    ------
    ValueError
        If the leading dims do not fit to each other.
    """
    if not isinstance(b, DistArray) or b.ndim < 1:
        what = f"a DistArray of shape {b.shape}" if isinstance(b, DistArray) else type(b).__name__
        raise ValueError(f"{name} takes a right-hand side of shape (n,) or (..., n, k), a DistArray, not {what}")
    same_grid([b, *(a for a in matrices if isinstance(a, DistArray))])
    b = b.summed()
    rest, leads = b.layout, [lead_of(a) for a in matrices]
    if not any(leads) and (b.ndim == 1 or (b.ndim == 2 and b.shape[1] == 1)):
        shape = b.shape
        home = Layout(*(rest.dims[:1] if b.ndim == 1 else (rest.dims[0], None)))
        back = lambda x: reshape(x, (x.shape[0], *shape[1:])).redistribute(home)  # noqa: E731
        return (b if b.ndim == 1 else reshape(b, shape[:1])), back
    try:
        lead = np.broadcast_shapes(b.shape[:-2], *leads)
    except ValueError:
        shapes = " and ".join(str(each) for each in (*filter(None, leads), b.shape))
        raise ValueError(f"{name}: the leading dims of matrices and right-hand sides do not fit: {shapes}") from None
    flat = b.ndim == 1
    wide = broadcast_to(b[:, None] if flat else b, (*lead, b.shape[0 if flat else -2], 1 if flat else b.shape[-1]))
    first = max((a for a in matrices if lead_of(a)), key=lambda a: a.ndim, default=None)
    cuts = list(wide.layout.dims)
    if first is not None:  # products with the matrices then need no trips between systems
        cuts[: len(lead)] = [()] * (len(lead) - len(lead_of(first))) + list(first.layout.dims[:-2])
        taken = {a for cut in cuts[: len(lead)] for a in cut}
        cuts[len(lead) :] = [tuple(a for a in cut if a not in taken) for cut in cuts[len(lead) :]]
    final = wide.layout

    def shaped(x: DistArray) -> DistArray:
        m, n = x.shape[-2], wide.shape[-2]
        x = x.redistribute(final if m == n else Layout(*final.dims[:-2], None, final.dims[-1]))
        return reshape(x, (*lead, m)) if flat else x

    return wide.redistribute(Layout(*cuts)), shaped


def assumed_steps(
    like: DistArray, name: str = "iterations", why: str = "how many iterations suffice"
) -> int | None:  # fmt: skip
    """Return the steps that are assumed, under a name of `WhatIf`, of arrays without values; None where values tell."""
    backend = like.grid.backend
    return None if backend.values else int(backend.assume(name, why))
