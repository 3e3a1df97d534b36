"""Every function of the namespace given tensors: differentiable, constant, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import DistArray, Grid, Layout, LayoutError, Tensor
from parlinalg.array import extras, namespace
from parlinalg.array.functions import HANDLED
from parlinalg.autograd import primitives
from tests.autograd.cases import agree, close, cut, numbers, tensor, value_and_gradients
from tests.autograd.decompositions import EXAMPLES

X, Y = numbers(5, 7), numbers(5, 7, seed=1)
P = np.abs(numbers(5, 7, seed=2)) + 0.5
Q = np.tanh(X) * 0.9  # within (-1, 1)
Z, W = X + 1j * numbers(5, 7, seed=3), Y + 1j * numbers(5, 7, seed=4)
HOLES = np.where(np.abs(X) < 0.4, 0.0, X)  # with zeros, several in some rows
ROW, COLUMN, LINE = numbers(7), numbers(5, 1), numbers(11)
CUBE, SQUARE = numbers(4, 3, 5), numbers(5, 5)
VECTORS = numbers(5, 3)
INDEX = np.array([[0, 2], [4, -1], [2, 2]])

#: Layouts to try, by the number of dims.
LAYOUTS = {
    0: [Layout()],
    1: [Layout("a"), Layout(("b", "a")), Layout(None)],
    2: [Layout("a", "b"), Layout(("b", "a"), None), Layout(None, ("a", "b")), Layout(None, None)],
    3: [Layout("a", None, "b"), Layout(None, "b", "a"), Layout(None, None, None)],
}


class Case:
    """A function of tensors, and arrays for it; `whole` names dims of all of them that are not cut."""

    def __init__(self, function: Callable[..., Any], *arrays: np.ndarray, whole: tuple[int, ...] = ()) -> None:
        self.function, self.arrays, self.whole = function, arrays, whole

    def layouts(self) -> list[list[Layout]]:
        """One layout for each array, so many times as there are to try; operands that broadcast lie alike."""
        found = []
        ndim = max(a.ndim for a in self.arrays)
        for full in LAYOUTS[ndim]:
            each = []
            for array in self.arrays:
                dims = full.dims[ndim - array.ndim :]
                kept = [() if n == 1 else cut for n, cut in zip(array.shape, dims, strict=True)]
                for d in self.whole:
                    if -array.ndim <= d < array.ndim:
                        kept[d] = ()
                each.append(Layout(*kept))
            if each not in found:
                found.append(each)
        return found


def one(function: Callable[..., Any], *, at: np.ndarray = X, z: np.ndarray = Z * 0.5) -> list[Case]:
    """The function of real and of complex numbers."""
    return [Case(function, at), Case(function, z)]


def two(function: Callable[..., Any], *, at: tuple[np.ndarray, np.ndarray] = (X, Y)) -> list[Case]:
    a, b = at
    return [
        Case(function, a, b),
        Case(function, a, ROW**2 + 0.5),
        Case(function, COLUMN**2 + 0.5, b),
        Case(lambda x: function(x, 2.5), a),
        Case(lambda x: function(2.5, x), b),
    ]


def along(function: Callable[..., Any], *arrays: np.ndarray) -> list[Case]:
    """A reduction over dims, with and without keepdims."""
    return [
        Case(lambda x, o=options: function(x, **o), a)
        for a in (arrays or (X, Z))
        for options in ({}, {"axis": 0}, {"axis": -1, "keepdims": True}, {"axis": (0, 1)})
    ]


def transforms(name: str, *, real: bool = False, lines: bool = True) -> list[Case]:
    function = getattr(pla.fft, name)
    arrays = (X,) if real else (X, Z)
    if not lines:
        return [
            Case(lambda x, o=o: function(x, **o), a)
            for a in arrays
            for o in ({}, {"s": (4, 9), "axes": (0, 1), "norm": "ortho"}, {"norm": "forward"})
        ]
    given: tuple[dict[str, Any], ...] = (
        {}, {"axis": 0, "norm": "ortho"}, {"n": 4, "norm": "forward"}, {"n": 9}, {"n": 10, "axis": 0}
    )  # fmt: skip
    return [Case(lambda x, o=o: function(x, **o), a) for a in arrays for o in given]


REGULAR = SQUARE / 5 + np.diag(np.arange(2.0, 7))
STACK = numbers(4, 5, 5, seed=8) / 5 + 2 * np.eye(5)


def positive(x: Tensor) -> Tensor:
    """Positive definite matrices."""
    y = x @ x.mT.conj()
    return y + pla.eye(x.shape[-1], grid=x.grid, layout=Layout(*y.layout.dims[-2:]))


def product_of(x: Tensor, y: Tensor) -> Tensor:
    return x * y.redistribute(x.layout)


DIFFERENTIABLE: dict[str, list[Case]] = {
    "abs": one(pla.abs),
    "acos": one(pla.acos, at=Q),
    "acosh": one(pla.acosh, at=P + 1),
    "add": [*two(pla.add), Case(pla.add, X, Z)],
    "asin": one(pla.asin, at=Q),
    "asinh": one(pla.asinh),
    "astype": [Case(lambda x: pla.astype(x, np.complex128) * 1j, X)],
    "asarray": [Case(lambda x: pla.asarray(x) * 2, X)],
    "atan": one(pla.atan),
    "atan2": two(pla.atan2),
    "atanh": one(pla.atanh, at=Q),
    "broadcast_arrays": [Case(lambda x, y: product_of(*pla.broadcast_arrays(x, y)), X, ROW, whole=(0, 1))],
    "broadcast_to": [
        Case(lambda x: pla.broadcast_to(x, (3, 5, 7)), ROW),
        Case(lambda x: pla.broadcast_to(x, (5, 7)), COLUMN),
        Case(lambda x: pla.broadcast_to(x, (5, 7)), X),
    ],
    "clip": [
        Case(lambda x: pla.clip(x, -0.5, 0.7), X),
        Case(lambda x: pla.clip(x, max=0.7), X),
        Case(lambda x, y: pla.clip(x, y, y + 1), X, Y),
    ],
    "concat": [
        Case(lambda x, y: pla.concat([x, y, x], axis=1), X, Y, whole=(1,)),
        Case(lambda x, y: pla.concat([x, y]), X, Z, whole=(0,)),
        Case(lambda x, y: pla.concat([x, y], axis=None), X, Y, whole=(0, 1)),
    ],
    "conj": one(pla.conj),
    "copysign": two(pla.copysign),
    "cos": one(pla.cos),
    "cosh": one(pla.cosh),
    "cumulative_prod": [
        Case(lambda x: pla.cumulative_prod(x, axis=1), X),
        Case(lambda x: pla.cumulative_prod(x, axis=0), HOLES),
        Case(lambda x: pla.cumulative_prod(x, axis=1), Z),
        Case(pla.cumulative_prod, LINE),
    ],
    "cumulative_sum": [
        Case(lambda x: pla.cumulative_sum(x, axis=0), X),
        Case(pla.cumulative_sum, LINE),
        Case(lambda x: pla.cumulative_sum(x, axis=1, include_initial=True), Z, whole=(1,)),
    ],
    "diff": [
        Case(lambda x: pla.diff(x), X),
        Case(lambda x: pla.diff(x, axis=0, n=3), X),
        Case(lambda x: pla.diff(x, n=0), X),
        Case(lambda x, y: pla.diff(x, prepend=y), X, COLUMN, whole=(1,)),
    ],
    "divide": two(pla.divide, at=(X, P)) + [Case(pla.divide, Z, W), Case(pla.divide, X, W)],
    "exp": one(pla.exp),
    "expand_dims": [
        Case(lambda x: pla.expand_dims(x, axis=1) * 2, X),
        Case(lambda x: pla.expand_dims(x, axis=(0, -1)), Z),
    ],
    "expm1": one(pla.expm1),
    "flip": [Case(pla.flip, X), Case(lambda x: pla.flip(x, axis=1), Z), Case(lambda x: pla.flip(x, axis=0), X)],
    "hypot": two(pla.hypot),
    "imag": one(pla.imag),
    "log": one(pla.log, at=P),
    "log10": one(pla.log10, at=P),
    "log1p": one(pla.log1p, at=P),
    "log2": one(pla.log2, at=P),
    "logaddexp": two(pla.logaddexp),
    "matmul": [Case(pla.matmul, X, Y.T), Case(pla.matmul, Z, W.T.copy()), Case(pla.matmul, X, W.T.copy())],
    "matrix_transpose": [Case(pla.matrix_transpose, X), Case(pla.matrix_transpose, CUBE)],
    "max": along(pla.max, X),
    "maximum": two(pla.maximum),
    "mean": along(pla.mean),
    "meshgrid": [Case(lambda x, y: product_of(*pla.meshgrid(x, y)), ROW, LINE, whole=(0,))],
    "min": along(pla.min, X),
    "minimum": two(pla.minimum),
    "moveaxis": [Case(lambda x: pla.moveaxis(x, 0, -1), CUBE)],
    "multiply": [*two(pla.multiply), Case(pla.multiply, Z, W), Case(pla.multiply, X, W), Case(lambda x: x * 2j, X)],
    "negative": one(pla.negative),
    "permute_dims": [Case(lambda x: pla.permute_dims(x, (2, 0, 1)), CUBE)],
    "positive": one(pla.positive),
    "pow": [*two(pla.pow, at=(P, Y)), Case(lambda x: pla.pow(x, 3), X), Case(lambda x: 2.0**x, X), Case(pla.pow, Z, W)],
    "prod": along(pla.prod, X, Z, HOLES, CUBE[:1]),
    "real": one(pla.real),
    "reciprocal": one(pla.reciprocal, at=P, z=Z + 4),
    "remainder": [Case(pla.remainder, X, P), Case(lambda x: x % 0.7, X), Case(lambda x: 3.1 % x, P)],
    "repeat": [
        Case(lambda x: pla.repeat(x, 3, axis=1), X),
        Case(lambda x: pla.repeat(x, np.array([0, 2, 1, 0, 3]), axis=0), X),
        Case(lambda x: pla.repeat(x, 2), LINE),
    ],
    "reshape": [
        Case(lambda x: pla.reshape(x, (5, 1, 7)), X),
        Case(lambda x: pla.reshape(x, (-1,)), X, whole=(0, 1)),
        Case(lambda x: pla.reshape(x, (12, 5)), CUBE, whole=(0, 1)),
    ],
    "roll": [
        Case(lambda x: pla.roll(x, 2, axis=1), X),
        Case(lambda x: pla.roll(x, (1, -3), axis=(0, 1)), Z),
        Case(lambda x: pla.roll(x, 3), LINE),
    ],
    "sin": one(pla.sin),
    "sinh": one(pla.sinh),
    "sort": [
        Case(lambda x: pla.sort(x), X),
        Case(lambda x: pla.sort(x, axis=0, descending=True), X),
        Case(pla.sort, LINE),
    ],
    "sqrt": one(pla.sqrt, at=P),
    "square": one(pla.square),
    "squeeze": [Case(lambda x: pla.squeeze(x, axis=1), COLUMN)],
    "stack": [Case(lambda x, y: pla.stack([x, y], axis=1), X, Y)],
    "std": [
        Case(lambda x, o=o: pla.std(x, **o), a)
        for a in (X, Z)
        for o in ({}, {"axis": 0, "correction": 1}, {"axis": 1, "keepdims": True})
    ],
    "subtract": [*two(pla.subtract), Case(pla.subtract, Z, X)],
    "sum": [*along(pla.sum), Case(lambda x: pla.sum(x, axis=0, dtype=np.complex128), X)],
    "take": [
        Case(lambda x: pla.take(x, np.array([3, 0, 3, -1]), axis=1), X),
        Case(lambda x: pla.take(x, INDEX, axis=0), Z),
        Case(lambda x: pla.take(x, np.array([], int), axis=0), X),
    ],
    "take_along_axis": [
        Case(lambda x: pla.take_along_axis(x, pla.asarray(np.argsort(X, 0)[:3], grid=x.grid), axis=0), X),
        Case(lambda x: pla.take_along_axis(x, pla.asarray(np.zeros((1, 4), int), grid=x.grid), axis=1), Z),
    ],
    "tan": one(pla.tan, at=Q),
    "tanh": one(pla.tanh),
    "tensordot": [
        Case(lambda x, y: pla.tensordot(x, y, axes=([1], [1])), X, Y),
        Case(lambda x, y: pla.tensordot(x, y, axes=2), X, Y),
        Case(lambda x, y: pla.tensordot(x, y, axes=((2, 0), (1, 2))), CUBE, numbers(3, 5, 4)),
        Case(lambda x, y: pla.tensordot(x, y, axes=([0], [0])), Z, W),
    ],
    "tile": [
        Case(lambda x: pla.tile(x, (2, 3)), X),
        Case(lambda x: pla.tile(x, (2, 1, 2)), X),
        Case(lambda x: pla.tile(x, (2,)), CUBE),
    ],
    "tril": [Case(lambda x: pla.tril(x, k=1), X), Case(pla.tril, CUBE)],
    "triu": [Case(lambda x: pla.triu(x, k=-1), Z)],
    "unstack": [Case(lambda x: pla.multiply(*pla.unstack(x, axis=0)[1:3]), X, whole=(0,))],
    "var": [
        Case(lambda x, o=o: pla.var(x, **o), a)
        for a in (X, Z)
        for o in ({}, {"axis": 0, "correction": 1}, {"axis": 1, "keepdims": True})
    ],
    "vecdot": [Case(pla.vecdot, X, Y), Case(pla.vecdot, Z, W), Case(lambda x, y: pla.vecdot(x, y, axis=-2), X, W)],
    "where": [
        Case(lambda x, y: pla.where(x > 0.2, x, y), X, Y),
        Case(lambda x: pla.where(x > 0, x, 0.5), X),
        Case(lambda x, y: pla.where(pla.real(x) > 0, x, y), Z, W),
    ],
    "linalg.cross": [
        Case(pla.linalg.cross, VECTORS, numbers(5, 3, seed=5)),
        Case(lambda x, y: pla.linalg.cross(x, y, axis=-2), VECTORS.T.copy(), numbers(3, 5, seed=6)),
    ],
    "linalg.diagonal": [Case(lambda x: pla.linalg.diagonal(x, offset=k), a) for k in (0, 2, -1) for a in (X, CUBE)],
    "linalg.matmul": [
        Case(pla.linalg.matmul, X, Y.T.copy()),
        Case(pla.linalg.matmul, CUBE, numbers(1, 5, 2), whole=(0,)),
        Case(pla.linalg.matmul, ROW, Y.T.copy()),
    ],
    "linalg.matrix_norm": [
        Case(lambda x, o=o: pla.linalg.matrix_norm(x, ord=o), a) for o in ("fro", 1, -1, np.inf) for a in (X, CUBE)
    ],
    "linalg.matrix_power": [Case(lambda x, n=n: pla.linalg.matrix_power(x, n), SQUARE) for n in (0, 1, 3)],
    "linalg.matrix_transpose": [Case(pla.linalg.matrix_transpose, X)],
    "linalg.multi_dot": [Case(lambda *x: pla.linalg.multi_dot(x), X, Y.T.copy(), X)],
    "linalg.norm": [
        *(Case(lambda x, o=o: pla.linalg.norm(x, o), X) for o in (None, 1, "nuc")),
        Case(lambda x: pla.linalg.norm(x, axis=(2, 0), keepdims=True), CUBE),
        Case(lambda x: pla.linalg.norm(x, 3, axis=-1), Z),
    ],
    "linalg.outer": [Case(pla.linalg.outer, ROW, LINE, whole=(0,))],
    "linalg.tensordot": [Case(lambda x, y: pla.linalg.tensordot(x, y, axes=([0], [0])), X, Y)],
    "linalg.tensorinv": [Case(lambda x: pla.linalg.tensorinv(x, 1), REGULAR)],
    "linalg.tensorsolve": [Case(pla.linalg.tensorsolve, REGULAR, SQUARE[0], whole=(-1,))],
    "linalg.trace": [Case(lambda x: pla.linalg.trace(x, offset=k), a) for k in (0, 1) for a in (SQUARE, CUBE)],
    "linalg.vecdot": [Case(pla.linalg.vecdot, X, Y)],
    "linalg.vector_norm": [
        *along(pla.linalg.vector_norm),
        *(
            Case(lambda x, o=o: pla.linalg.vector_norm(x, axis=1, ord=o), a)
            for o in (1, 3, 0.5, np.inf, -np.inf)
            for a in (X, Z)
        ),
    ],
    "linalg.solve": [
        Case(pla.linalg.solve, REGULAR, SQUARE),
        Case(lambda a, b: pla.linalg.solve(a, b), REGULAR, SQUARE[0], whole=(-1,)),
        Case(pla.linalg.solve, STACK, CUBE.swapaxes(1, 2).copy()),
        Case(pla.linalg.solve, REGULAR * (1 + 0.3j), SQUARE * 1j),
    ],
    "linalg.solve_triangular": [
        Case(lambda a, b, o=o: pla.linalg.solve_triangular(a, b, **o), a, SQUARE + a.dtype.type(0))
        for a in (REGULAR, REGULAR * (1 + 0.3j))
        for o in ({}, {"lower": True}, {"adjoint": True}, {"unit_diagonal": True, "lower": True, "adjoint": True})
    ],
    "linalg.lu_solve": [
        Case(lambda a, b, t=t: pla.linalg.lu_solve(pla.linalg.lu_factor(a), b, adjoint=t), a, SQUARE + a.dtype.type(0))
        for a in (REGULAR, REGULAR * (1 + 0.3j))
        for t in (False, True)
    ],
    "linalg.cho_solve": [
        Case(lambda a, b: pla.linalg.cho_solve(pla.linalg.cho_factor(positive(a)), b), SQUARE, SQUARE)
    ],
    "linalg.inv": [
        Case(pla.linalg.inv, REGULAR),
        Case(pla.linalg.inv, STACK),
        Case(pla.linalg.inv, REGULAR * (1 + 2j)),
    ],
    "linalg.det": [Case(pla.linalg.det, a) for a in (SQUARE, STACK, SQUARE * (0.5 + 1j))],
    "linalg.slogdet": [Case(lambda x: pla.linalg.slogdet(x).logabsdet, a) for a in (SQUARE, STACK)],
    "linalg.cholesky": [
        Case(
            lambda x, u=u: pla.linalg.cholesky(positive(x), upper=u),
            a,
        )
        for a in (SQUARE, STACK, SQUARE * (0.5 + 1j))
        for u in (False, True)
    ],
    **{f"fft.{name}": transforms(name) for name in ("fft", "ifft", "irfft", "hfft")},
    **{f"fft.{name}": transforms(name, real=True) for name in ("rfft", "ihfft")},
    **{f"fft.{name}": transforms(name, lines=False) for name in ("fftn", "ifftn", "irfftn", "fft2", "ifft2", "irfft2")},
    **{f"fft.{name}": transforms(name, real=True, lines=False) for name in ("rfftn", "rfft2")},
    "fft.fftshift": [Case(pla.fft.fftshift, X), Case(lambda x: pla.fft.fftshift(x, axes=1), Z)],
    "fft.ifftshift": [Case(pla.fft.ifftshift, X)],
}

#: Functions of which a tensor gives a DistArray (or what they give of one), by calls with one.
CONSTANT: dict[str, Callable[[Any], Any]] = {
    **{
        name: getattr(pla, name)
        for name in (
            "argmax",
            "argmin",
            "argsort",
            "ceil",
            "floor",
            "trunc",
            "round",
            "sign",
            "signbit",
            "isfinite",
            "isinf",
            "isnan",
            "logical_not",
            "nonzero",
            "count_nonzero",
            "all",
            "any",
            "zeros_like",
            "ones_like",
            "empty_like",
            "result_type",
        )
    },
    **{
        name: lambda x, f=getattr(pla, name): f(x, 0.3)
        for name in (
            "equal",
            "not_equal",
            "less",
            "less_equal",
            "greater",
            "greater_equal",
            "floor_divide",
            "full_like",
        )
    },
    **{name: lambda x, f=getattr(pla, name): f(x, x > 0) for name in ("logical_and", "logical_or", "logical_xor")},
    "linalg.matrix_rank": pla.linalg.matrix_rank,
    "isin": lambda x: pla.isin(x, x),
    "searchsorted": lambda x: pla.searchsorted(pla.asarray(np.arange(3.0), grid=x.grid), x),
    "can_cast": lambda x: pla.can_cast(x, np.complex128),
    "finfo": lambda x: pla.finfo(x).bits,
}

REFUSED: dict[str, Callable[[Any], Any]] = {
    "nextafter": lambda x: pla.nextafter(x, 1.0),
    **{name: getattr(pla, name) for name in ("unique_all", "unique_counts", "unique_inverse", "unique_values")},
    **{f"linalg.{name}": getattr(pla.linalg, name) for name in ("hessenberg", "schur")},
    **{
        f"linalg.{name}": lambda x, name=name: getattr(pla.linalg, name)(x, x)
        for name in ("cg", "eigsh", "gmres", "lobpcg", "lsqr", "minres", "range_finder", "svd_lowrank", "svds")
    },
}

#: No functions of arrays of floating dtypes: constants, dtypes, functions that make arrays or take integers.
OTHER = {
    *("arange", "bool", "broadcast_shapes", "complex64", "complex128", "e", "empty", "eye", "float32", "float64"),
    *("from_dlpack", "full", "iinfo", "inf", "int8", "int16", "int32", "int64", "isdtype", "linspace", "nan"),
    *("newaxis", "ones", "pi", "uint8", "uint16", "uint32", "uint64", "zeros", "fft.fftfreq", "fft.rfftfreq"),
    *("bitwise_and", "bitwise_invert", "bitwise_left_shift", "bitwise_or", "bitwise_right_shift", "bitwise_xor"),
    "fft.plan_fft",
    "linalg.LinAlgError",
}


#: NumPy's names beyond the standard that take tensors, with their tests; and those that refuse them.
EXTRAS: dict[str, list[Case]] = {
    "append": [Case(lambda x, y: pla.append(x, y, axis=0), X, Y, whole=(0,))],
    "array_split": [Case(lambda x: pla.array_split(x, 2, axis=0)[1], X, whole=(0,))],
    "average": [Case(lambda x: pla.average(x, axis=0), X)],
    "cov": [
        Case(pla.cov, X),
        Case(lambda x: pla.cov(x, rowvar=False, bias=True), Z),
        Case(lambda x, y: pla.cov(x, y), X, Y, whole=(0,)),
    ],
    "cross": [
        Case(pla.cross, VECTORS, VECTORS[::-1] ** 2, whole=(1,)),
        Case(lambda x, y: pla.cross(x, y, axisa=0), VECTORS.T.copy(), numbers(3), whole=(0, -1)),
    ],
    "cumprod": [Case(lambda x: pla.cumprod(x, 1), X)],
    "cumsum": [Case(lambda x: pla.cumsum(x, 0), X)],
    "diag": [Case(pla.diag, X), Case(pla.diag, LINE)],
    "diagonal": [Case(pla.diagonal, X)],
    "dot": [Case(pla.dot, X, Y.T.copy())],
    "einsum": [
        Case(lambda x, y: pla.einsum("ij,kj->ik", x, y), X, Y),
        Case(lambda x, y: pla.einsum("ij,kj->ik", x, y), Z, W),
        Case(lambda x: pla.einsum("ij->j", x), X),
        Case(lambda x: pla.einsum("ii->i", x), SQUARE),
        Case(lambda x: pla.einsum("ii", x), SQUARE),
        Case(lambda x, y: pla.einsum("...ij,jk->...ik", x, y), CUBE, numbers(5, 2)),
        Case(lambda x, y: pla.einsum(x, [0, 1], y, [0, 1], [1]), X, Y),
        Case(lambda x, y: pla.einsum("ij,ij,kj->ik", x, x, y), X, Y),
    ],
    "fliplr": [Case(pla.fliplr, X)],
    "flipud": [Case(pla.flipud, X)],
    "gradient": [
        Case(lambda x: pla.gradient(x, 0.5, axis=0), X),
        Case(lambda x: pla.gradient(x, axis=1), Z),
        Case(lambda x: sum(pla.gradient(x, 2.0, 3.0)), X),
        Case(pla.gradient, LINE),
    ],
    "hsplit": [Case(lambda x: pla.hsplit(x, [3])[1], X, whole=(1,))],
    "hstack": [Case(lambda x, y: pla.hstack([x, y]), X, Y, whole=(1,))],
    "inner": [Case(pla.inner, X, Y), Case(pla.inner, LINE, LINE * 2)],
    "kron": [Case(pla.kron, X, Y[:2, :3].copy()), Case(pla.kron, Z, ROW), Case(pla.kron, LINE, ROW)],
    "outer": [Case(pla.outer, ROW, LINE, whole=(0,))],
    "ravel": [Case(pla.ravel, LINE)],
    "select": [Case(lambda x, y: pla.select([x.data > 0.5, x.data < -0.5], [x * y, y]), X, Y)],
    "split": [Case(lambda x: pla.split(x, [2], axis=0)[0], X, whole=(0,))],
    "swapaxes": [Case(lambda x: pla.swapaxes(x, 0, 1), X)],
    "transpose": [Case(pla.transpose, X)],
    "vdot": [Case(pla.vdot, Z, W)],
    "vsplit": [Case(lambda x: pla.vsplit(x, [2])[0], X, whole=(0,))],
    "vstack": [Case(lambda x, y: pla.vstack([x, y]), X, Y, whole=(0,))],
}
EXTRAS_CONSTANT = {"allclose", "array_equal", "around", "flatnonzero", "isclose"}
EXTRAS_REFUSED = set(extras.NAMES) - set(EXTRAS) - EXTRAS_CONSTANT


def public() -> set[str]:
    homes = {"": namespace.__all__, "linalg.": pla.linalg.__all__, "fft.": pla.fft.__all__}
    return {home + name for home, names in homes.items() for name in names}


@pytest.mark.serial
def test_every_function_is_differentiable_constant_or_refused() -> None:
    factorizations = {f"linalg.{name}" for name in EXAMPLES} - set(DIFFERENTIABLE)
    kinds = [set(DIFFERENTIABLE) - {"matmul"}, factorizations, set(CONSTANT), set(REFUSED), OTHER]
    assert set.union(*kinds) == public()
    assert sum(map(len, kinds)) == len(public()), "a function is listed twice"


def check(cases: list[Case], grid: Grid, serial: Grid) -> None:
    """Hold values and gradients in every layout against those on one rank, and one of them against differences."""
    for case in cases:
        whole = [Layout(*[None] * a.ndim) for a in case.arrays]
        known = value_and_gradients(case.function, case.arrays, whole, serial)
        for i, layouts in enumerate(case.layouts()):
            found = value_and_gradients(case.function, case.arrays, layouts, grid)
            for mine, right in zip(found, known, strict=True):
                close(mine, right)
            if not i:
                inputs = [tensor(a, grid, layout) for a, layout in zip(case.arrays, layouts, strict=True)]
                pla.check_gradients(case.function, inputs, directions=2 if grid.size == 1 else 1)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients(name: str, grid: Grid, serial: Grid) -> None:
    check(DIFFERENTIABLE[name], grid, serial)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", EXTRAS)
def test_gradients_of_other_names(name: str, grid: Grid, serial: Grid) -> None:
    check(EXTRAS[name], grid, serial)


@pytest.mark.serial
def test_other_names_are_known() -> None:
    """Those that are not refused have a line in the table, or are made of functions that have one."""
    for name in extras.NAMES:
        there = getattr(np, name) in primitives.TABLE or getattr(np, name) in primitives.COMPOSED
        assert there == (name not in EXTRAS_REFUSED), name
    x = Tensor(pla.ones((3, 3)))
    for name in EXTRAS_REFUSED:
        with pytest.raises(TypeError, match=f"{name} of a Tensor is not defined"):
            primitives.call_numpy(getattr(np, name), (x,), {})


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", CONSTANT)
def test_constants(name: str, widest: Grid) -> None:
    """Of a tensor they give what they give of its value."""
    x = tensor(X, widest, LAYOUTS[2][0])
    found, right = CONSTANT[name](x), CONSTANT[name](x.data)
    assert type(found) is type(right)
    assert not isinstance(found, Tensor)
    for mine, theirs in zip(*([v] if not isinstance(v, tuple) else v for v in (found, right)), strict=True):
        if name == "empty_like":
            assert (mine.shape, mine.layout) == (theirs.shape, theirs.layout)
        elif isinstance(mine, DistArray):
            np.testing.assert_array_equal(mine.gather(), theirs.gather())
        else:
            assert mine == theirs


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, widest: Grid) -> None:
    with pytest.raises(TypeError, match=name.removeprefix("linalg.")):
        REFUSED[name](tensor(X, widest, LAYOUTS[2][0]))


#: Functions of NumPy under names that the namespace does not have, and of arguments that it does not take.
NUMPY: dict[str, list[Case]] = {
    "ufuncs": [
        *(
            Case(f, a)
            for f, a in (
                (np.exp2, X),
                (np.cbrt, X),
                (np.deg2rad, X),
                (np.degrees, X),
                (np.fabs, X),
                (np.radians, X),
                (np.rad2deg, X),
                (np.conjugate, Z),
                (np.exp, Z),
            )
        ),
        *(Case(f, X, Y) for f in (np.fmax, np.fmin, np.logaddexp2, np.matmul) if f is not np.matmul),
        Case(np.fmod, X, P),
        Case(np.matmul, X, Y.T.copy()),
        Case(np.vecdot, Z, W),
        Case(np.matvec, X, ROW, whole=(-1,)),
        Case(np.matvec, CUBE, numbers(4, 5), whole=(0, 1, 2)),
        Case(np.vecmat, numbers(4, 3), CUBE, whole=(0, 1, 2)),
        Case(lambda x: np.add.reduce(x, axis=1), X),
        Case(lambda x: np.float64(2) * x - np.arange(3)[1], X),
    ],
    "reductions": [
        Case(lambda x: np.sum(x, 0), X),
        Case(lambda x: np.mean(x, 1, keepdims=True), X),
        Case(lambda x: np.std(x, 0, ddof=1), X),
        Case(lambda x: np.max(x, axis=1), X),
        Case(lambda x: np.prod(x, 0), X),
        Case(lambda x: np.cumsum(x, axis=1), X),
        Case(lambda x: np.cumprod(x, 0), X),
        Case(np.trace, SQUARE),
        *(Case(lambda x, o=o: np.linalg.norm(x, o), X) for o in (None, "fro", 1, -np.inf)),
        *(Case(lambda x, o=o: np.linalg.norm(x, o, 1), Z) for o in (None, 1, 3, np.inf)),
        Case(lambda x: np.linalg.norm(x, 1, (0, 2), True), CUBE),
    ],
    "shapes": [
        Case(np.transpose, CUBE),
        Case(lambda x: np.swapaxes(x, 0, 1), X),
        Case(np.squeeze, COLUMN),
        Case(np.ravel, LINE),
        Case(lambda x, y: np.hstack([x, y]), X, Y, whole=(1,)),
        Case(lambda x, y: np.vstack([x, y]), X, Y, whole=(0,)),
        Case(lambda x, y: np.append(x, y, axis=0), X, Y, whole=(0,)),
        Case(np.fliplr, X),
        Case(np.flipud, X),
        Case(np.diag, X),
        Case(np.diag, LINE),
        Case(lambda x: np.diagonal(x, 1, 1, 0), X),
        Case(np.copy, X),
        Case(np.real, Z),
        Case(np.imag, Z),
        Case(lambda x: np.multiply(*np.split(x, 2, axis=0)), numbers(6, 4), whole=(0,)),
        Case(lambda x: np.array_split(x, 3, axis=1)[1], X, whole=(1,)),
        *(
            Case(lambda x, m=m: np.pad(x, ((1, 2), (0, 3)), m), X)
            for m in ("constant", "edge", "reflect", "symmetric", "wrap")
        ),
        Case(lambda x: np.sort(x, axis=None), X, whole=(0, 1)),
        Case(lambda x: np.where(x.data > 0, x, 2 * x), X),
    ],
    "products": [
        Case(np.dot, X, Y.T.copy()),
        Case(np.dot, LINE, LINE[::-1].copy()),
        Case(np.dot, numbers(2, 5), numbers(4, 5, 3), whole=(0, 1, 2)),
        Case(np.vdot, Z, W),
        Case(lambda x: np.dot(x, 2.0), X),
        Case(lambda x: np.fft.fft(x, 8, 0), X),
        Case(lambda x: np.fft.rfftn(x, norm="ortho"), X),
        Case(np.fft.fftshift, X),
    ],
}


@pytest.mark.one_in(8)
@pytest.mark.parametrize("kind", NUMPY)
def test_functions_of_numpy(kind: str, grid: Grid, serial: Grid) -> None:
    check(NUMPY[kind], grid, serial)


METHODS = [
    Case(lambda x: x.sum(1, keepdims=True) * x.mean(1, keepdims=True), X),
    Case(lambda x: x.max(0) * x.min(0), X),
    Case(lambda x: x.prod(1) + x.var(1) + x.std(1, ddof=1), X),
    Case(lambda x: x.T @ x, X),
    Case(lambda x: x.mT, CUBE),
    Case(lambda x: x.conj().T * x.H, Z),
    Case(lambda x: x.real * x.imag, Z),
    Case(lambda x: abs(x) ** 1.5 - (+x), P),
    Case(lambda x: x.clip(-1, 1), X),
    Case(lambda x: x.squeeze(1), COLUMN),
    Case(lambda x: x.swapaxes(0, 1), X),
    Case(lambda x: x.trace(), SQUARE),
    Case(lambda x: x.diagonal() * x.diagonal(1, 1, 0).sum(), SQUARE),
    Case(lambda x: x.cumsum(0) * x.cumprod(axis=1), X),
    Case(lambda x: x.take([1, 1, 4], 0) * x.repeat(2, 1).take([0, 3], axis=1).sum(), X),
    Case(lambda x: x.take(x.argsort(0)[0], 0) * x.take(x.argmax(1), 1).sum(), X),
    Case(lambda x: x.ravel()[x.nonzero()[0]] * x.take(x.argmin()), X, whole=(0, 1)),
    Case(lambda x: x.ravel(), X, whole=(0, 1)),
    Case(lambda x: x.flatten() * 2, LINE),
    Case(lambda x: x.reshape(5, 7, 1), X),
    Case(lambda x: x.dot(x.T), X),
    Case(lambda x: 2**x % 3, X),
    Case(lambda x: x * (x > 0) + x * (x // 0.5), X),
    Case(lambda x: sum(row * i for i, row in enumerate(x)), X, whole=(0,)),
    Case(lambda x: x.astype(np.complex128) * (1 + 2j), X),
    Case(lambda x: cut(Y, x.grid, x.layout) * x - np.float64(3) / x, P),
]


def test_methods_and_operators(grid: Grid, serial: Grid) -> None:
    check(METHODS, grid, serial)


def test_tensors_become_numbers_and_text(grid: Grid) -> None:
    """As PyTorch's do, and arrays: `float(loss)`, `f"{loss:.3f}"`, and `print` shows values."""
    x = tensor(X, grid, LAYOUTS[2][0])
    loss = (x * x).sum()
    want = float((X * X).sum())
    assert abs(float(loss) - want) < 1e-12
    assert (int(loss), complex(loss), round(loss, 2)) == (int(want), complex(loss.item()), round(want, 2))
    assert f"{loss:.3f} {loss:>9.2e}" == f"{want:.3f} {want:>9.2e}"
    assert str(x) == f"{x}" == f"{x!r}\n{str(x.data).partition(chr(10))[2]}"
    assert str(loss) == f"{loss!r}\n{np.array2string(np.asarray(loss.item()))}"
    for convert in (float, int, complex, round):
        with pytest.raises(TypeError, match=r"only an array without dims becomes a Python scalar; .* shape \(5, 7\)"):
            convert(x)
    with pytest.raises(TypeError, match=r"the format '.3f' is for numbers; this array has shape \(5, 7\)"):
        f"{x:.3f}"


MASK = X > 0.3
KEYS: list[Any] = [
    (INDEX,),
    (slice(None), np.array([1, 1, 6])),
    (INDEX[0], INDEX[1]),
    (np.array([[0], [3]]), np.array([2, 2])),
    (MASK,),
    (MASK[:, 0],),
    (slice(None), MASK[0]),
    (None, np.array([2, 0])),
    ([0, 4, 4],),
    (..., np.array(3)),
    (np.array([], int),),
    (slice(1, 4), np.array([0, 0, 5])),
    (2, np.array([0, 0, 5])),
    (np.zeros((5, 7), bool),),
]


@pytest.mark.parametrize("i", range(len(KEYS)))
def test_index_arrays_and_masks(i: int, grid: Grid, serial: Grid) -> None:
    """Elements that are chosen several times get the sum of their gradients."""
    key = KEYS[i]
    for layout in LAYOUTS[2]:
        agree(lambda x: x[key] * 2, [X], [layout], grid, serial, expected=2 * X[key], numeric=True)
    whole = LAYOUTS[2][0]
    agree(lambda x: x[cut(np.array([4, 0, 4]), x.grid, Layout("a"))], [X], [whole], grid, serial, expected=X[[4, 0, 4]])
    agree(lambda x: x[x > 0.3], [X], [whole], grid, serial, expected=X[MASK])


@pytest.mark.parametrize("shape", [(0, 7), (5, 0), (1, 1), (1, 13)], ids=str)
def test_empty_and_uneven_sizes(shape: tuple[int, int], grid: Grid, serial: Grid) -> None:
    x = numbers(*shape) + 3
    functions: list[Callable[[Any], Any]] = [
        pla.log1p,
        lambda x: pla.sum(x, axis=0),
        lambda x: pla.cumulative_sum(x, axis=1),
        lambda x: pla.prod(x, axis=1),
        lambda x: pla.sort(x, axis=0),
        lambda x: pla.roll(x, 1, axis=0),
        lambda x: pla.flip(x),
        lambda x: pla.tile(x, (2, 1)),
        lambda x: pla.take(x, np.zeros(0 if not x.shape[0] else 2, int), axis=0),
        lambda x: x[x > 3],
        pla.tril,
        pla.linalg.diagonal,
        pla.linalg.vector_norm,
        lambda x: pla.tensordot(x, x, axes=([1], [1])),
        lambda x: pla.vecdot(x, x),
        lambda x: pla.where(x > 3, x, 0),
        lambda x: np.pad(x, 1),
        lambda x: pla.broadcast_to(x, (2, *x.shape)),
        lambda x: x**x,
    ]
    for function in functions:
        for layout in LAYOUTS[2][:3]:
            agree(function, [x], [layout], grid, serial)


def test_zeros_and_ties(grid: Grid) -> None:
    """Where there is no derivative the documented choice stands in for it."""
    rows = np.array([[0.0, 0, 0], [1, 1, 1], [2, 1, 2]])

    def gradient(function: Callable[[Tensor], Tensor]) -> np.ndarray:
        x = tensor(rows, grid, Layout("a", "b"))
        function(x).sum().backward()
        assert x.grad is not None
        return x.grad.gather()

    close(gradient(lambda x: pla.linalg.vector_norm(x, axis=1)), rows / np.array([[1], [3**0.5], [3]]))
    nothing = tensor(np.zeros((0, 3)), grid, Layout("a", "b"))
    close(pla.linalg.vector_norm(nothing, axis=0, ord=np.inf).data.gather(), np.zeros(3))  # as of arrays
    close(gradient(lambda x: pla.std(x, axis=1))[:2], np.zeros((2, 3)))
    close(gradient(pla.abs), np.sign(rows))
    close(gradient(lambda x: pla.clip(x, 1, 2)), (rows >= 1) * 1.0)
    close(gradient(lambda x: pla.maximum(x, x.detach())), np.ones((3, 3)))
    close(gradient(lambda x: pla.min(x, axis=1)), [[1 / 3] * 3, [1 / 3] * 3, [0, 1, 0]])
    close(gradient(lambda x: pla.hypot(x, 0 * x)), np.sign(rows))
    close(gradient(lambda x: pla.prod(x, axis=1)), [[0, 0, 0], [1, 1, 1], [2, 4, 2]])


def test_errors_name_the_function(widest: Grid) -> None:
    x = tensor(X, widest, LAYOUTS[2][3])
    with pytest.raises(TypeError, match=r"np\.polyfit is not defined on distributed arrays"):
        np.polyfit(x, x, 1)
    with pytest.raises(TypeError, match="no out="):
        np.add(x, x, out=x.data)
    with pytest.raises(TypeError, match="no out="):
        np.sum(x, out=x.data)
    with pytest.raises(TypeError, match=r"np\.modf of a Tensor"):
        np.modf(x)
    with pytest.raises(TypeError, match=r"where="):
        np.exp(x, where=x.data > 0)
    with pytest.raises(AttributeError, match="x\\.data"):
        x.resident


@pytest.mark.serial
def test_a_primitive_without_a_rule_is_refused_by_name(serial: Grid) -> None:
    from parlinalg.array.dispatch import primitive

    @primitive
    def mystery(x: Any) -> Any:
        return x

    with pytest.raises(TypeError, match="mystery of a Tensor is not defined: it has no derivative"):
        mystery(tensor(X, serial, LAYOUTS[2][3]))
    with pytest.raises(TypeError, match="take_along_axis has no derivative by indices"):
        pla.take_along_axis(cut(X, serial, LAYOUTS[2][3]), tensor(X, serial, LAYOUTS[2][3]))


@pytest.mark.mpi(min_size=2)
def test_unlike_layouts_stay_errors(widest: Grid) -> None:
    axis = max(widest.sizes, key=lambda a: widest.sizes[a])
    x, y = tensor(X, widest, Layout(axis, None)), tensor(Y, widest, Layout(None, axis))
    for function in (pla.atan2, pla.where, pla.hypot, pla.equal, pla.clip, pla.vecdot, np.fmax):
        with pytest.raises(LayoutError, match="redistribute"):
            function(*((x.data > 0,) if function is pla.where else ()), x, y)
    with pytest.raises(LayoutError, match="redistribute"):
        pla.concat([x, x])
    terms = tensor(X, widest, Layout(None, None, partial=axis))
    with pytest.raises(LayoutError, match="redistribute"):
        pla.expm1(terms)


def test_the_backward_pass_saves_what_rules_name(grid: Grid) -> None:
    """A rule that needs the result keeps that alone, and a linear one nothing."""
    from parlinalg.autograd.saved import saved

    x = tensor(X, grid, Layout("a", "b"))
    assert [row.nbytes for row in saved(pla.roll(x, 1, axis=0).sum())] == []
    assert [row.nbytes for row in saved(pla.tan(x).sum())] == [x.block.nbytes]
    assert [row.nbytes for row in saved(pla.atan2(x, tensor(Y, grid, x.layout, False)).sum())] == [2 * x.block.nbytes]


def test_every_function_of_numpy_is_known(widest: Grid) -> None:
    """Those that take distributed arrays take tensors or name themselves in the error."""
    x = tensor(np.abs(SQUARE), widest, LAYOUTS[2][3])
    complaints = {}
    for function, found in HANDLED.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                function(x)
            except (TypeError, ValueError) as error:
                complaints[found.name] = str(error)
    for name, text in complaints.items():  # more arguments are needed, or it refuses
        known = (name.split(".")[-1], "argument", "axis", "index", "takes", "by itself")
        assert any(word in text for word in known), f"{name}: {text}"
