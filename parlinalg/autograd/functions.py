"""The derivatives of the functions of arrays: one line beside each (see `parlinalg.autograd.primitives`).

A rule gets the gradient `g` of the result and what its parameters name, as DistArrays, and returns the gradient by the
argument whose name it bears.  At points without a derivative: `abs` and norms of zero, and `std` of equal numbers, have
the gradient 0; of equal numbers `maximum` and `minimum`, and so `clip` at its bounds, lead it to the first operand;
`max` and `min` share it evenly.  Those of linear algebra are in `parlinalg.autograd.linalg`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from parlinalg import fft, linalg
from parlinalg.array import (
    DistArray,
    contraction,
    create,
    from_function,
    indexing,
    joining,
    namespace,
    products,
    reductions,
)
from parlinalg.array import functions as numpy_functions
from parlinalg.array import sorting as sorts
from parlinalg.array.core import Axis
from parlinalg.array.reductions import sorted_dims
from parlinalg.array.rows import store
from parlinalg.array.shapes import reshape
from parlinalg.autograd import ops
from parlinalg.autograd.ops.arithmetic import Frame
from parlinalg.autograd.ops.shapes import getitem, is_plain
from parlinalg.autograd.primitives import as_op, composed, constant, differentiable, refused
from parlinalg.autograd.tensor import Tensor, as_tensor
from parlinalg.layout import Layout
from parlinalg.matmul import matmul

np_: Any = np  # whose functions return DistArrays and Tensors, which its types do not know


def nonzero(x: DistArray) -> DistArray:
    """Return the array with 1 in the place of 0, to divide by."""
    return np_.where(x == 0, x.dtype.type(1), x)


def zeros(like: Frame, dtype: Any) -> DistArray:
    """Return zeros that lie as an argument of a function."""
    return DistArray(like.grid.backend.zeros(like.grid.block_shape(like.layout, like.shape), dtype), *like)


# ------------------------------------------------------------------------------------------------ elementwise
as_op(np.exp)(ops.exp)
as_op(np.log)(ops.log)
as_op(np.sqrt)(ops.sqrt)
as_op(np.absolute)(ops.abs)
as_op(np.sin)(ops.sin)
as_op(np.cos)(ops.cos)
as_op(np.tanh)(ops.tanh)
as_op(np.negative)(ops.negative)
as_op(np.add)(ops.add)
as_op(np.subtract)(ops.subtract)
as_op(np.multiply)(ops.multiply)
as_op(np.true_divide)(ops.divide)
as_op(np.maximum)(ops.maximum)
as_op(np.minimum)(ops.minimum)
as_op(np.positive)(lambda x: x)

differentiable(np.arccos, x=lambda g, x: -g / np_.sqrt(1 - x * x))
differentiable(np.arccosh, x=lambda g, x: g / (np_.sqrt(x - 1) * np_.sqrt(x + 1)))
differentiable(np.arcsin, x=lambda g, x: g / np_.sqrt(1 - x * x))
differentiable(np.arcsinh, x=lambda g, x: g / np_.sqrt(1 + x * x))
differentiable(np.arctan, x=lambda g, x: g / (1 + x * x))
differentiable(np.arctanh, x=lambda g, x: g / (1 - x * x))
differentiable(np.cbrt, x=lambda g, y: g / (3 * y * y))
differentiable(np.conjugate, x=lambda g: g.conj(), conjugate=False)
differentiable(np.cosh, x=lambda g, x: g * np_.sinh(x))
differentiable(np.deg2rad, x=lambda g: g * (math.pi / 180))
differentiable(np.degrees, x=lambda g: g * (180 / math.pi))
differentiable(np.exp2, x=lambda g, y: g * y * math.log(2))
differentiable(np.expm1, x=lambda g, y: g * (y + 1))
differentiable(np.fabs, x=lambda g, x: g * np_.sign(x))
differentiable(np.log10, x=lambda g, x: g / (x * math.log(10)))
differentiable(np.log1p, x=lambda g, x: g / (1 + x))
differentiable(np.log2, x=lambda g, x: g / (x * math.log(2)))
differentiable(np.rad2deg, x=lambda g: g * (180 / math.pi))
differentiable(np.radians, x=lambda g: g * (math.pi / 180))
differentiable(np.reciprocal, x=lambda g, y: -g * y * y)
differentiable(np.sinh, x=lambda g, x: g * np_.cosh(x))
differentiable(np.square, x=lambda g, x: 2 * g * x)
differentiable(np.tan, x=lambda g, y: g * (1 + y * y))

differentiable(
    np.arctan2, x1=lambda g, x1, x2: g * x2 / (x1 * x1 + x2 * x2), x2=lambda g, x1, x2: -g * x1 / (x1 * x1 + x2 * x2)
)
differentiable(np.copysign, x1=lambda g, x1, x2: g * np_.sign(x1) * np_.copysign(1.0, x2), x2=lambda g: 0 * g)
differentiable(np.fmax, x1=lambda g, y, x1: g * (x1 == y), x2=lambda g, x1, y: g * (x1 != y))
differentiable(np.fmin, x1=lambda g, y, x1: g * (x1 == y), x2=lambda g, x1, y: g * (x1 != y))
differentiable(np.fmod, x1=lambda g: g, x2=lambda g, x1, x2: -g * np_.trunc(x1 / x2))
differentiable(np.hypot, x1=lambda g, y, x1: g * x1 / nonzero(y), x2=lambda g, y, x2: g * x2 / nonzero(y))
differentiable(np.logaddexp, x1=lambda g, y, x1: g * np_.exp(x1 - y), x2=lambda g, y, x2: g * np_.exp(x2 - y))
differentiable(np.logaddexp2, x1=lambda g, y, x1: g * np_.exp2(x1 - y), x2=lambda g, y, x2: g * np_.exp2(x2 - y))
differentiable(np.remainder, x1=lambda g: g, x2=lambda g, x1, x2: -g * np_.floor(x1 / x2))
power_of_tensors = differentiable(
    np.power,
    x1=lambda g, x1, x2: g * x2 * np_.where(np_.equal(x2, 0), 1.0, x1) ** np_.where(np_.equal(x2, 0), 1.0, x2 - 1),
    x2=lambda g, y, x1: g * y * np_.log(nonzero(x1) if isinstance(x1, DistArray) else x1 or 1.0),
)
as_op(np.power, np.float_power)(ops.power)


real = differentiable(namespace.real, x=lambda g: g, conjugate=False)
imag = differentiable(namespace.imag, x=lambda g: 1j * g, conjugate=False)

constant(
    np.ceil, np.equal, np.floor, np.floor_divide, np.greater, np.greater_equal, np.isfinite, np.isinf, np.isnan,
    np.less, np.less_equal, np.logical_and, np.logical_not, np.logical_or, np.logical_xor, np.not_equal, np.rint,
    np.sign, np.signbit, np.trunc, np.heaviside, np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.invert,
    np.left_shift, np.right_shift, np.gcd, np.lcm, numpy_functions._round, np.isclose, np.allclose, np.array_equal,
)  # fmt: skip
refused("its results are neighbours in rounding, not a function that has a derivative", np.nextafter, np.spacing)
refused("it has several results, of which one is a constant; take them apart", np.modf, np.frexp, np.divmod)


@as_op(numpy_functions._where)
def where(condition: Any, x: Any = None, y: Any = None) -> Any:
    """Return x where the condition holds, y elsewhere; the places where it holds without both."""
    if x is None and y is None:
        return sorts.nonzero(as_tensor(condition).data)
    if isinstance(x, Tensor | DistArray) or isinstance(y, Tensor | DistArray):
        return ops.where(condition, x, y)
    return Tensor(np_.where(as_tensor(condition).data, x, y))


@as_op(create.asarray)
def asarray(obj: Tensor, /, *, dtype: Any = None, device: Any = None, copy: Any = None, grid: Any = None,
            layout: Layout | None = None) -> Tensor:  # fmt: skip
    """Return the tensor, in another dtype and layout if these are given."""
    if grid is not None and grid is not obj.grid:
        raise TypeError(f"asarray of a tensor on {obj.grid!r} stays there; it has no derivative on {grid!r}")
    obj = obj if layout is None else obj.redistribute(layout)
    return obj if dtype is None else obj.astype(dtype)


# ------------------------------------------------------------------------------------------------ reductions
def spread(g: DistArray, axis: Axis, ndim: int, keepdims: Any) -> DistArray:
    """Return the gradient of a reduction with the reduced dims, of size 1."""
    return g if keepdims else joining.expand_dims(g, sorted_dims(axis, ndim))


@as_op(reductions.total)
def total(
    a: Tensor, axis: Axis, dtype: Any = None, keepdims: bool = False, partial: bool = False, out: None = None
) -> Tensor:
    """Return the sum over dims."""
    return a.sum(axis, dtype, out, keepdims, partial=partial)


@as_op(reductions.mean)
def mean(a: Tensor, axis: Axis, dtype: Any = None, keepdims: bool = False, out: None = None) -> Tensor:
    """Return the mean over dims."""
    return a.mean(axis, dtype, out, keepdims)


def of_variance(
    g: DistArray, y: DistArray, a: DistArray, axis: Axis, ddof: float, keepdims: bool, root: bool
) -> DistArray:
    dims = sorted_dims(axis, a.ndim)
    count = max(0, math.prod(a.shape[d] for d in dims) - ddof)
    g = g / nonzero(y) if root else 2 * g  # the deviations are 0 where y is
    return spread(g, dims, a.ndim, keepdims) * (a - reductions.mean(a, dims, None, True)) / (count or math.nan)


_variance = differentiable(reductions.variance, a=of_variance)


@as_op(reductions.variance)
def variance(
    a: Any, axis: Axis = None, ddof: float = 0, keepdims: bool = False, dtype: Any = None, root: bool = False,
    where: Any = True, center: Any = None,
) -> Tensor:  # fmt: skip
    """Return the variance or standard deviation over dims."""
    a = as_tensor(a) if dtype is None else as_tensor(a).astype(dtype)
    if where is True and center is None:
        return _variance(a, axis, ddof, keepdims, None, root)
    if center is None:
        center = np_.mean(a, axis=axis, keepdims=True, where=where)
    squares = abs(a - center) ** 2
    ones = np_.ones_like(a.data) if where is True else np_.where(where, np_.ones_like(a.data), 0.0)
    chosen = squares if where is True else np_.where(where, squares, 0.0)
    found = chosen.sum(axis, keepdims=keepdims) / np_.maximum(ones.sum(axis, keepdims=keepdims) - ddof, 0.0)
    return np_.sqrt(found) if root else found


def of_product(g: DistArray, a: DistArray, axis: Axis, keepdims: bool) -> DistArray:
    """Return g times the product of the other elements, for each element."""
    dims, zero = sorted_dims(axis, a.ndim), a == 0
    many = zero.sum(dims, keepdims=True)
    others = np_.prod(nonzero(a), axis=dims, keepdims=True) / nonzero(a)
    return spread(g, dims, a.ndim, keepdims) * np_.where((many == 0) | ((many == 1) & zero), others, a.dtype.type(0))


def prod(a: DistArray, axis: Axis, keepdims: bool) -> DistArray:
    return reductions.extreme(a, "prod", axis, keepdims)


product = differentiable(prod, a=of_product)


@as_op(reductions.extreme)
def extreme(a: Tensor, name: str, axis: Axis, keepdims: bool = False) -> Any:
    """Return the max, min or product over dims; of any and all the value."""
    if name == "prod":
        return product(a, axis, keepdims)
    if name in ("any", "all"):
        return reductions.extreme(a.data, name, axis, keepdims)
    return ops.max(a, axis, keepdims) if name == "max" else ops.min(a, axis, keepdims)


def summed_behind(g: DistArray, axis: int) -> DistArray:
    """Return the sum of each element and those behind it along a dim."""
    return joining.flip(sorts.cumulative(joining.flip(g, axis), axis), axis)


def of_cumulative(g: DistArray, y: DistArray, a: DistArray, axis: int, name: str) -> DistArray:
    if name == "add":
        return summed_behind(g, axis)
    zero = a == 0
    before = sorts.cumulative(zero.astype(np.int64), axis)  # zeros up to each element
    first = zero & (before == 1)
    alone = np_.where(first, a.dtype.type(1), a)
    at_first = summed_behind(g * sorts.cumulative(alone, axis, "multiply"), axis)
    return np_.where(
        first, at_first, np_.where(before == 0, summed_behind(g * y, axis) / nonzero(a), a.dtype.type(0))
    )  # behind a zero all products are 0, whatever the element


_running = differentiable(sorts.cumulative, a=of_cumulative)


@as_op(sorts.cumulative)
def cumulative(a: Tensor, axis: int, name: str = "add", dtype: Any = None) -> Tensor:
    """Return the running sums or products along a dim."""
    return _running(a if dtype is None else a.astype(dtype), axis, name)


differentiable(
    joining.differences, a=lambda g, n, d: (-1) ** n * joining.differences(joining.padded(g, edges(g.ndim, d, n)), n, d)
)


def edges(ndim: int, d: int, n: int) -> list[tuple[int, int]]:
    """Return the widths of a padding by n items before and behind dim d."""
    return [(n, n) if i == d else (0, 0) for i in range(ndim)]


# ------------------------------------------------------------------------------------------------ sorting and indexing
differentiable(
    sorts.sort,
    a=lambda g, a, axis, descending: joining.take_along_axis(
        g, sorts.argsort(sorts.argsort(a, axis, descending), axis), axis
    ),
)
constant(
    sorts.argsort, sorts.arg_extreme, sorts.nonzero, sorts.searchsorted, namespace.searchsorted, namespace.isin,
    np.searchsorted, moves=True,
)  # fmt: skip
constant(reductions.number_of, np.count_nonzero, np.shape, np.ndim, np.size)
constant(np.zeros_like, np.ones_like, np.empty_like, np.full_like)
refused(
    "what it finds depends on which elements are equal; x[unique_all(x.data).indices] has a derivative",
    sorts.unique, namespace.unique_all, namespace.unique_counts, namespace.unique_inverse, namespace.unique_values,
)  # fmt: skip


def placed(like: Frame, g: DistArray, key: Any) -> DistArray:
    """Return zeros to which g is added at the places of an index."""
    out = zeros(like, g.dtype)
    indexing.setitem(out, key, g, add=True)
    return out


_chosen = differentiable(indexing.getitem, a=lambda g, like, key: placed(like, g, key), moves=True)


@as_op(indexing.getitem)
def chosen(a: Tensor, key: Any) -> Tensor:
    """Return the elements that an index chooses; slices and integers on cut dims are an error."""
    return getitem(a, key) if is_plain(key) else _chosen(a, value_key(key))


def value_key(key: Any) -> Any:
    """Return an index with the values of tensors in it, which are masks or integers."""
    if isinstance(key, tuple):
        return tuple(map(value_key, key))
    return key.data if isinstance(key, Tensor) else key


def along(like: Frame, g: DistArray, indices: Any, axis: int) -> DistArray:
    out = zeros(like, g.dtype)
    if not isinstance(indices, DistArray):
        indices = create.asarray(np.asarray(indices), grid=g.grid)
    store(out, range(out.ndim), joining.lines_along(out.shape, indices, axis), g, add=True)
    return out


differentiable(joining.take_along_axis, a=lambda g, like, indices, axis: along(like, g, indices, axis))


# ------------------------------------------------------------------------------------------------ manipulation
@as_op(reshape)
def reshaped(a: Tensor, shape: Any, layout: Layout | None = None) -> Tensor:
    """Return the same elements in another shape, where blocks stay blocks."""
    y = ops.reshape(a, shape)
    return y if layout is None else y.redistribute(layout)


def of_concatenation(g: DistArray, likes: list[Frame], i: int, axis: int | None) -> DistArray:
    if axis is None:
        start = sum(math.prod(like.shape) for like in likes[:i])
        return reshape(g[start : start + math.prod(likes[i].shape)], likes[i].shape)
    start, d = sum(like.shape[axis] for like in likes[:i]), axis % g.ndim
    return g[(*(slice(None),) * d, slice(start, start + likes[i].shape[d]))]


def of_tile(g: DistArray, like: Frame, reps: Any) -> DistArray:
    times = (reps,) if isinstance(reps, int | np.integer) else tuple(reps)
    n = max(len(like.shape), len(times))
    shape = (1,) * (n - len(like.shape)) + like.shape
    times = (1,) * (n - len(times)) + times
    apart = reshape(g, tuple(m for pair in zip(times, shape, strict=True) for m in pair))
    return reshape(apart.sum(tuple(range(0, 2 * n, 2))), like.shape)


def of_diagonal(g: DistArray, like: Frame, offset: int, axis1: int, axis2: int) -> DistArray:
    n = len(like.shape)
    d, e = axis1 % n, axis2 % n
    order = [i for i in range(n) if i not in (d, e)] + [d, e]
    shape = tuple(like.shape[i] for i in order)
    out, line = zeros(Frame(shape, like.layout.permuted(order), like.grid), g.dtype), np.arange(g.shape[-1])
    lines = [line + max(0, -offset), line + max(0, offset)]
    store(out, [n - 2, n - 1], lines, g.transpose((g.ndim - 1, *range(g.ndim - 1))))
    return out.transpose([order.index(i) for i in range(n)])


def inner(g: DistArray, widths: Any) -> DistArray:
    """Return the array without the items that a padding put before and behind."""
    return g[tuple(slice(b, n - e) for n, (b, e) in zip(g.shape, widths, strict=True))]


differentiable(joining.broadcast_to, a=lambda g: g)
differentiable(joining.concatenate, arrays=of_concatenation)
differentiable(joining.diagonal, a=of_diagonal)
differentiable(joining.diagonal_matrix, v=lambda g, k: joining.diagonal(g, offset=k))
differentiable(joining.expand_dims, a=lambda g, like: reshape(g, like.shape))
differentiable(joining.flip, a=joining.flip)
differentiable(joining.padded, a=inner)
differentiable(joining.roll, a=lambda g, shift, axis: joining.roll(g, np.negative(shift).tolist(), axis))
differentiable(joining.tile, a=of_tile, moves=True)
differentiable(joining.triangle, a=joining.triangle)


# ------------------------------------------------------------------------------------------------ products
@as_op(matmul, np.matmul, linalg.matmul)
def product_of_matrices(a: Any, b: Any, **options: Any) -> Tensor:
    """Return the product of matrices."""
    return ops.matmul(a, b, **options)


def of_left(g: DistArray, like: Frame, x2: DistArray, axes: Any) -> DistArray:
    left, right = contraction.pairs_of_dims(like.shape, x2.shape, axes)
    rest = [d for d in range(x2.ndim) if d not in right]
    n = g.ndim - len(rest)  # the other dims of x1
    y = namespace.tensordot(g, x2, axes=(list(range(n, g.ndim)), rest))
    at = {left[right.index(d)]: n + i for i, d in enumerate(sorted(right))}
    return arranged(y, at, iter(range(n)))


def of_right(g: DistArray, like: Frame, x1: DistArray, axes: Any) -> DistArray:
    left, right = contraction.pairs_of_dims(x1.shape, like.shape, axes)
    rest = [d for d in range(x1.ndim) if d not in left]
    y = namespace.tensordot(x1, g, axes=(rest, list(range(len(rest)))))
    at = {right[left.index(d)]: i for i, d in enumerate(sorted(left))}
    return arranged(y, at, iter(range(len(left), y.ndim)))


def arranged(y: DistArray, at: dict[int, int], others: Iterator[int]) -> DistArray:
    """Return the array whose dim d is dim `at[d]` of y, or the next of the others."""
    return y.transpose([at[d] if d in at else next(others) for d in range(y.ndim)])


tensordot = differentiable(namespace.tensordot, x1=of_left, x2=of_right, moves=True)


as_op(np.tensordot)(lambda a, b, axes=2: tensordot(a, b, axes=axes))
as_op(np.linalg.tensordot)(lambda x1, x2, axes=2: tensordot(x1, x2, axes=axes))
as_op(np.linalg.multi_dot, contraction.multi_dot)(lambda arrays, out=None: einsum(contraction.chain(arrays), *arrays))


def contraction_of(arrays: list[DistArray], inputs: list[str], output: str) -> DistArray:
    return contraction.einsum(",".join(inputs) + "->" + output, *arrays)


def of_contraction(
    g: DistArray, arrays: list[DistArray], likes: list[Frame], i: int, inputs: list[str], output: str
) -> DistArray:
    """Return the contraction of g and the other operands to the dims of operand i; repeated and summed ones spread."""
    mine, like = inputs[i], likes[i]
    others = [(part, a) for j, (part, a) in enumerate(zip(inputs, arrays, strict=True)) if j != i]
    known = output + "".join(part for part, _ in others)
    for label, n in zip(mine, like.shape, strict=True):
        if label not in known:  # it was summed, alone
            others.append((label, create.ones((n,), g.grid, Layout(None), dtype=g.dtype)))
            known += label
    once = "".join(dict.fromkeys(mine))
    y = contraction.einsum(",".join([output, *(part for part, _ in others)]) + "->" + once, g, *(a for _, a in others))
    at = 0
    while len(once) < len(mine):  # a diagonal goes back to where it was
        at = next(d for d, label in enumerate(mine) if mine.index(label) != d)
        once_more = mine[:at] + mine[at + 1 :]
        if len(set(once_more)) != len(once_more):
            raise TypeError("einsum of a Tensor with a subscript three times in one operand has no derivative here")
        d = once.index(mine[at])
        shape, zero = (*y.shape[:at], y.shape[d], *y.shape[at:]), g.dtype.type(0)
        index = [np.arange(y.shape[d]).reshape([-1 if k == p else 1 for k in range(len(shape))]) for p in (d, at)]
        wide = create.asarray(index[0] == index[1], grid=g.grid)
        y = np_.where(wide, joining.expand_dims(y, at), zero)
        once = mine
    return y if y.shape == like.shape else narrowed(y, like)


def narrowed(y: DistArray, like: Frame) -> DistArray:
    """Return the array summed over the dims that had one item, and were repeated."""
    over = tuple(d for d, (n, m) in enumerate(zip(y.shape, like.shape, strict=True)) if m == 1 != n)
    return y.sum(over, keepdims=True)


_contraction = differentiable(contraction_of, arrays=of_contraction, moves=True)


@as_op(np.einsum)
def einsum(*operands: Any, optimize: Any = False) -> Tensor:
    """Return the sum of products of arrays that subscripts describe."""
    values = [x.data if isinstance(x, Tensor) else x for x in operands]
    inputs, output, arrays = contraction.parsed(values)
    given = [next(x for x in operands if x is a or (isinstance(x, Tensor) and x.data is a)) for a in arrays]
    return _contraction(given, inputs, output)


def of_kron(g: DistArray, a: DistArray, other: DistArray, first: bool) -> DistArray:
    """Return the gradient of a Kronecker product by one operand, of a's shape."""
    n = g.ndim
    mine, theirs = ((1,) * (n - x.ndim) + x.shape for x in (a, other))
    pairs = zip(mine, theirs, strict=True) if first else zip(theirs, mine, strict=True)
    apart = reshape(g, tuple(m for pair in pairs for m in pair))
    labels = [(2 * d, 2 * d + 1) if first else (2 * d + 1, 2 * d) for d in range(n)]
    y = contraction.einsum(
        apart, list(range(2 * n)), reshape(other, theirs), [b for _, b in labels], [a for a, _ in labels]
    )
    return reshape(y, a.shape)


kron = differentiable(
    contraction.kron,
    a=lambda g, a, b: of_kron(g, a, b, True),
    b=lambda g, a, b: of_kron(g, b, a, False),
    moves=True,
)
as_op(np.kron)(lambda a, b: kron(a, b) if np.ndim(a) and np.ndim(b) else a * b)


@as_op(np.inner)
def inner_product(a: Any, b: Any) -> Tensor:
    """Return the sums of products over the last dims of both."""
    return tensordot(a, b, axes=(-1, -1)) if np.ndim(a) and np.ndim(b) else a * b


@as_op(np.outer, np.linalg.outer)
def outer(a: Any, b: Any) -> Tensor:
    """Return the products of every element of one array with every element of another."""
    return a.reshape(-1, 1) * b.reshape(1, -1)


@as_op(np.cov)
def cov(
    m: Any, y: Any = None, rowvar: bool = True, bias: bool = False, ddof: int | None = None, fweights: None = None,
    aweights: None = None, dtype: Any = None,
) -> Tensor:  # fmt: skip
    """Return the covariances of variables: the rows, or with `rowvar=False` the columns."""
    if fweights is not None or aweights is not None:
        raise TypeError("cov of a Tensor with weights is not defined")
    rows = [v if v.ndim == 2 else v.reshape(1, -1) for v in (m, y) if v is not None]
    rows = [v if rowvar or (v.shape[0] == 1 and u.ndim < 2) else v.T for v, u in zip(rows, (m, y), strict=False)]
    x = rows[0] if len(rows) == 1 else np_.concatenate(rows)
    x = x if dtype is None else x.astype(dtype)
    x = x - np_.mean(x, axis=1, keepdims=True)
    return np_.squeeze((x @ x.T.conj()) / (x.shape[1] - ((0 if bias else 1) if ddof is None else ddof)))


def slopes(f: DistArray, d: int, dx: float) -> DistArray:
    return np_.gradient(f, dx, axis=d)


def of_slopes(g: DistArray, d: int, dx: float) -> DistArray:
    """Return the transpose of central differences inside and one-sided ones at the ends."""
    n, at = g.shape[d], joining.positions(g, d)
    u = g.like(g.block * g.xp.where((at == 0) | (at == n - 1), 1 / dx, 0.5 / dx).astype(g.dtype))
    wide = joining.padded(u, edges(g.ndim, d, 1))
    lead = (slice(None),) * d
    y = wide[(*lead, slice(0, n))] - wide[(*lead, slice(2, None))]
    ends = g.like((g.xp.where(at == n - 1, 1, 0) - g.xp.where(at == 0, 1, 0)).astype(g.dtype) * u.block)
    return y + ends


_slopes = differentiable(slopes, f=of_slopes)


@as_op(np.gradient)
def gradient(f: Tensor, *varargs: Any, axis: Any = None, edge_order: int = 1) -> Any:
    """Return the derivative along dims, at even distances, by central differences and one-sided ones at the ends."""
    if edge_order != 1 or any(np.ndim(v) for v in varargs):
        raise TypeError("gradient of a Tensor takes edge_order=1 and numbers as distances")
    dims = sorted_dims(axis, f.ndim) if axis is None or isinstance(axis, tuple) else (axis % f.ndim,)
    steps = varargs * len(dims) if len(varargs) == 1 else varargs or (1.0,) * len(dims)
    found = [_slopes(f, d, float(dx)) for d, dx in zip(dims, steps, strict=True)]
    return found[0] if len(found) == 1 else tuple(found)


@as_op(products.dot)
def dot(a: Any, b: Any, out: None = None) -> Tensor:
    """Return the sum over the last dim of a and the last but one of b, or the product with a scalar."""
    if not (np.ndim(a) and np.ndim(b)):
        return a * b
    return ops.matmul(a, b) if b.ndim <= 2 else tensordot(a, b, axes=((-1,), (-2,)))


@as_op(products.vdot)
def vdot(a: Any, b: Any) -> Tensor:
    """Return the sum of conj(a) b over all elements."""
    if a.size != b.size:
        raise ValueError(f"np.vdot takes arrays of equal size, not of shapes {a.shape} and {b.shape}")
    if a.shape != b.shape:
        a, b = a.reshape(-1), b.reshape(-1)
    return (a.conj() * b).sum()


@as_op(np.vecdot, np.linalg.vecdot)
def vecdot(x1: Any, x2: Any, axis: int = -1, keepdims: bool = False) -> Tensor:
    """Return the sums of conj(x1) x2 along a dim."""
    return np_.sum(x1.conj() * x2, axis=axis, keepdims=keepdims)


@as_op(np.matvec)
def matvec(x1: Any, x2: Any) -> Tensor:
    """Return the products of matrices [..., m, n] and vectors [..., n]."""
    return ops.matmul(x1, x2[..., None])[..., 0] if x2.ndim > 1 else ops.matmul(x1, x2)


@as_op(np.vecmat)
def vecmat(x1: Any, x2: Any) -> Tensor:
    """Return the products of conjugated vectors [..., n] and matrices [..., n, m]."""
    return ops.matmul(x1.conj()[..., None, :], x2)[..., 0, :] if x1.ndim > 1 else ops.matmul(x1.conj(), x2)


def of_norm(g: DistArray, y: DistArray, x: DistArray, axis: Axis, keepdims: bool, ord: float) -> DistArray:
    dims = sorted_dims(axis, x.ndim)
    g, y = spread(g, dims, x.ndim, keepdims), spread(y, dims, x.ndim, keepdims)
    if ord == 2:
        return g * x / nonzero(y)
    return g * np_.sign(x) * nonzero(abs(x) / nonzero(y)) ** (ord - 1)


_norm = differentiable(linalg.vector_norm, x=of_norm)


@as_op(linalg.vector_norm)
def vector_norm(x: Tensor, /, *, axis: Any = None, keepdims: bool = False, ord: Any = 2) -> Any:
    """Return the vector norms over dims; that of order 0 is a constant."""
    if ord == 0 or ord is None or isinstance(ord, str):  # the last two are errors
        return linalg.vector_norm(x.data, axis=axis, keepdims=keepdims, ord=ord)
    if math.isfinite(ord):
        return _norm(x, axis=axis, keepdims=keepdims, ord=ord)
    nothing = not math.prod(x.shape[d] for d in sorted_dims(axis, x.ndim))  # whose largest size is 0
    return (np_.min if ord < 0 else np_.sum if nothing else np_.max)(abs(x), axis=axis, keepdims=keepdims)


as_op(np.linalg.vector_norm)(
    lambda x, axis=None, keepdims=False, ord=2: vector_norm(
        x, axis=axis, keepdims=keepdims, ord=2 if ord is None else ord
    )
)


@as_op(reductions.norm)
def norm(x: Tensor, ord: Any = None, axis: Axis = None, keepdims: bool = False) -> Any:
    """Return a norm of vectors or matrices as `np.linalg.norm`."""
    dims = tuple(range(x.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    euclidean = ord is None or (ord in ("f", "fro") and len(dims) == 2)
    if len(dims) == 1 or euclidean:
        return vector_norm(x, axis=dims, keepdims=keepdims, ord=2 if euclidean else ord)
    y = linalg.matrix_norm(np_.moveaxis(x, dims, (-2, -1)), ord=ord, keepdims=keepdims)
    return np_.moveaxis(y, (-2, -1), dims) if keepdims else y


# ------------------------------------------------------------------------------------------------ Fourier transforms
INVERSE = {f"{way}{kind}{n}": f"{back}{kind}{n}"
           for kind in ("fft", "rfft") for n in ("", "2", "n") for way, back in (("", "i"), ("i", ""))}  # fmt: skip
INVERSE |= {"hfft": "ihfft", "ihfft": "hfft"}
NORMS: dict[Any, Any] = {None: "forward", "backward": "forward", "forward": "backward", "ortho": "ortho"}


def of_transform(g: DistArray, like: Frame, name: str, s: Any, axes: Any, norm: Any) -> DistArray:
    """Return the adjoint transform of g: the inverse one, scaled by the other norm.

    A transform between real numbers and half a spectrum counts the elements inside it twice: so they enter the way from
    the spectrum halved, and leave the way to it doubled.
    """
    ndim = len(like.shape)
    if axes is None:
        axes = range(-len(s) if s is not None else -{"n": ndim, "2": 2}.get(name[-1], 1), 0)
    dims = [d % ndim for d in axes]
    points, last = [g.shape[d] for d in dims], dims[-1]
    forward = name.startswith(("rfft", "ihfft"))  # to half a spectrum
    half = forward or name.startswith(("irfft", "hfft"))
    if forward:
        given = None if s is None else s[-1]
        points[-1] = like.shape[last] if given in (None, -1) else given
        g = g * inside(g, last, 0.5, points[-1])
    y = fft._transform(INVERSE[name], g, points, dims, NORMS[norm], None)
    if half and not forward:
        y = y * inside(y, last, 2.0, points[-1])
    for d in dims:
        n, m = y.shape[d], like.shape[d]
        if m < n:
            y = y[(*(slice(None),) * d, slice(m))]
        elif m > n:
            y = joining.padded(y, [(0, m - n) if i == d else (0, 0) for i in range(ndim)])
    return y


def inside(spectrum: DistArray, d: int, factor: float, n: int) -> DistArray:
    """Return `factor` for the elements of half a spectrum of n points that stand for two, and 1 for the others."""
    dtype, layout = spectrum.dtype.type(0).real.dtype, Layout(spectrum.layout.dims[d])
    weights = from_function(
        lambda k: np.where((k > 0) & (2 * k < n), factor, 1.0), (spectrum.shape[d],), spectrum.grid, layout, dtype
    )
    behind = spectrum.ndim - d - 1
    return joining.expand_dims(weights, tuple(range(1, behind + 1))) if behind else weights


differentiable(fft._transform, x=of_transform, conjugate=False)


# ------------------------------------------------------------------------------------------------ made of the others
composed(
    np.all, np.amax, np.amin, np.any, np.append, np.argmax, np.argmin, np.argsort, np.array_split, np.around,
    np.average, np.broadcast_arrays, np.broadcast_to, np.clip, np.concatenate, np.copy, np.cross, np.cumprod, np.cumsum,
    np.diag, np.diagonal, np.diff, np.dot, np.expand_dims, np.flatnonzero, np.flip, np.fliplr, np.flipud, np.hstack,
    np.imag, np.linalg.cholesky, np.linalg.cond, np.linalg.cross, np.linalg.det, np.linalg.diagonal, np.linalg.eig,
    np.linalg.eigh, np.linalg.eigvals, np.linalg.eigvalsh, np.linalg.inv, np.linalg.lstsq, np.linalg.matmul,
    np.linalg.matrix_norm, np.linalg.matrix_power, np.linalg.matrix_transpose, np.linalg.norm, np.linalg.pinv,
    np.linalg.qr, np.linalg.slogdet, np.linalg.solve, np.linalg.svd, np.linalg.svdvals, np.linalg.tensorinv,
    np.linalg.tensorsolve, np.linalg.trace, np.matrix_transpose, np.max, np.mean, np.min, np.moveaxis, np.nonzero,
    np.pad, np.prod, np.ravel, np.real, np.repeat, np.reshape, np.roll, np.rollaxis, np.round, np.select, np.sort,
    np.split, np.hsplit, np.vsplit, np.dsplit, np.squeeze, np.stack, np.std, np.sum, np.swapaxes, np.take,
    np.take_along_axis, np.tile, np.trace, np.transpose, np.tril, np.triu, np.unstack, np.var, np.vdot, np.vstack,
    np.where,
    *(getattr(np.fft, name) for name in (*INVERSE, "fftshift", "ifftshift")),
)  # fmt: skip
