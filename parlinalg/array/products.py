"""Products by NumPy's other names: vecdot, matvec, vecmat, dot and vdot, and the arguments of `np.matmul`.

All but `vecdot`, a sum over one dim, are `A @ B` on dims that are permuted, added or merged before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parlinalg.array.align import together
from parlinalg.array.core import DistArray, axis_of, delivered, same_grid
from parlinalg.array.dispatch import primitive
from parlinalg.array.reductions import reduced, settled
from parlinalg.array.shapes import reshape
from parlinalg.array.ufuncs import PRODUCT, operand
from parlinalg.backend.halves import work_dtype
from parlinalg.layout import Layout
from parlinalg.redistribute import redistribute

DEFAULTS = {"order": ("K", "C", "A"), "subok": (True, False), "casting": ("same_kind", "safe", "unsafe", "no", "equiv")}
"""The values of arguments of NumPy's ufuncs that mean nothing here, or are heeded."""


def generalized(ufunc: np.ufunc, inputs: Any, options: dict[str, Any]) -> DistArray:
    """Return the result of a generalised ufunc of NumPy, whose core dims are not elementwise.

    Parameters
    ----------
    options : dict
        NumPy's keyword arguments: `out`, `axes`, `axis`, `keepdims`, `dtype` and `casting`.
    """
    name, given = ufunc.__name__, dict(options)
    if name not in _CORE or getattr(np, name, None) is not ufunc:
        raise TypeError(
            f"{name}, with the signature {ufunc.signature}, is not defined on distributed arrays; those that are: "
            f"{', '.join(_CORE)}. Or take the global arrays by gather()"
        )
    (out,) = given.pop("out", (None,))
    axes, axis, keepdims = given.pop("axes", None), given.pop("axis", None), given.pop("keepdims", False)
    dtype, casting = given.pop("dtype", None), given.get("casting", "same_kind")
    for key, value in given.items():
        if value not in DEFAULTS.get(key, ()):
            raise TypeError(f"np.{name}({key}={value!r}) is not defined on distributed arrays")
    if name != "vecdot" and (axis is not None or keepdims):
        raise TypeError(f"np.{name} takes axes=, not {'axis' if axis is not None else 'keepdims'}=")
    a, b = _operands(name, inputs)
    if dtype is not None:
        a, b = (x.astype(dtype, casting=casting, copy=False) for x in (a, b))
    function, *cores = _CORE[name]
    for x, core in zip((a, b), cores, strict=True):
        if x.ndim < (1 if name == "matmul" else core):
            raise ValueError(f"np.{name}: an operand of shape {x.shape} has fewer dims than {ufunc.signature} names")
    if name == "matmul" and axes is None:
        return PRODUCT[0](a, b, out=out)
    if axis is not None:
        if axes is not None:
            raise TypeError(f"np.{name} takes axis= or axes=, not both")
        axes = [(axis,), (axis,), (axis,) if keepdims else ()]
    counts = [min(core, x.ndim) for x, core in zip((a, b), cores, strict=True)]
    counts.append(sum(counts) - 2 if name != "vecdot" else 1 if keepdims else 0)
    places = [tuple(range(-n, 0)) for n in counts] if axes is None else _places(name, axes, counts)
    a, b = (_last(x, dims) for x, dims in zip((a, b), places, strict=False))
    y = function(a, b)
    if keepdims:
        y = y[..., None]
    if places[2]:
        y = _back(y, places[2])
    return delivered(y, out, name)


def _operands(name: str, values: Any) -> list[DistArray]:
    arrays = [operand(value, name) for value in values]
    for value in arrays:
        if not isinstance(value, DistArray):
            raise ValueError(f"np.{name} takes arrays with dims, not the scalar {value!r}; multiply by it with *")
    same_grid(arrays)  # type: ignore[arg-type]
    return [settled(value, name) for value in arrays]  # type: ignore[arg-type]


def _places(name: str, axes: Any, counts: list[int]) -> list[tuple[int, ...]]:
    """Return NumPy's `axes=` as a tuple of dims for each operand and the result."""
    given = [tuple(each) if isinstance(each, tuple | list) else (each,) for each in axes]
    if len(given) == 2:
        given.append(given[0][:1] if name == "vecdot" and counts[2] else ())
    if [len(each) for each in given] != counts:
        raise ValueError(
            f"np.{name}(axes={axes!r}) names {[len(each) for each in given]} dims of the operands and the result, not "
            f"{counts}"
        )
    return given


def _last(x: DistArray, dims: tuple[int, ...]) -> DistArray:
    """Return the array with these dims last."""
    last = [axis_of(d, x.ndim) for d in dims]
    return x.transpose([d for d in range(x.ndim) if d not in last] + last)


def _back(y: DistArray, dims: tuple[int, ...]) -> DistArray:
    """Return the array whose last dims are put at these places."""
    at = [axis_of(d, y.ndim) for d in dims]
    lead = iter(range(y.ndim))
    order = [y.ndim - len(at) + at.index(d) if d in at else next(lead) for d in range(y.ndim)]
    return y.transpose(order)


def _matmul(a: DistArray, b: DistArray) -> DistArray:
    return PRODUCT[0](a, b)


def vecdot(a: DistArray, b: DistArray) -> DistArray:
    """Return the sum over the last dim of `conj(a) * b`; the other dims broadcast."""
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"np.vecdot: shapes {a.shape} and {b.shape} do not end in the same number of items")
    shape, layout, (a, b) = together([a, b], "vecdot")
    dtype = np.result_type(a.dtype, b.dtype)
    work = np.dtype(np.int64) if dtype.kind == "b" else work_dtype(dtype)
    x, y = a.block.astype(work, copy=False), b.block.astype(work, copy=False)
    if a.grid.inside:
        block = a.xp.matmul(x.conj()[..., None, :] if work.kind == "c" else x[..., None, :], y[..., None])[..., 0, 0]
    else:
        block = a.grid.backend.zeros((0,) * (len(shape) - 1), work)
    like = DistArray(block, shape, layout, a.grid)
    rest, whole, over = reduced(like, (len(shape) - 1,), False)
    block = redistribute(a.xp.asarray(block), whole.with_partial(over), whole, rest, a.grid)
    return like.like(block.astype(dtype, copy=False), whole, rest)


def matvec(a: DistArray, x: DistArray) -> DistArray:
    """Return the product of matrices [..., m, n] and vectors [..., n]."""
    if x.ndim == 1:
        return PRODUCT[0](a, x)
    if a.ndim == 2:
        return PRODUCT[0](x, a.T)
    a, x = _broadcast(a, x, "matvec")
    return PRODUCT[0](a, x[..., None])[..., 0]


def vecmat(x: DistArray, a: DistArray) -> DistArray:
    """Return the product of conjugated vectors [..., n] and matrices [..., n, m]."""
    x = x.conj()
    if x.ndim == 1 or a.ndim == 2:
        return PRODUCT[0](x, a)
    a, x = _broadcast(a, x, "vecmat")
    return PRODUCT[0](x[..., None, :], a)[..., 0, :]


def _broadcast(a: DistArray, x: DistArray, name: str) -> tuple[DistArray, DistArray]:
    """Return matrices and vectors with the same leading dims."""
    from parlinalg.array.joining import broadcast_to

    try:
        lead = np.broadcast_shapes(a.shape[:-2], x.shape[:-1])
    except ValueError:
        raise ValueError(f"np.{name}: the leading dims of shapes {a.shape} and {x.shape} do not broadcast") from None
    return broadcast_to(a, (*lead, *a.shape[-2:])), broadcast_to(x, (*lead, *x.shape[-1:]))


@primitive
def dot(a: Any, b: Any, out: Any = None) -> DistArray:
    """Return the sum over the last dim of a and the last but one of b (of a vector the only one); `a * b` of scalars.

    Where b has three dims and more, those that the sum leaves come after those of a.
    """
    a, b = operand(a, "dot"), operand(b, "dot")
    if not (isinstance(a, DistArray) and isinstance(b, DistArray)) or not a.ndim or not b.ndim:
        return delivered(a * b, out, "dot")
    a, b = _operands("dot", (a, b))
    if b.ndim <= 2:
        return delivered(PRODUCT[0](a, b), out, "dot")
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(f"np.dot: shapes {a.shape} and {b.shape}: {a.shape[-1]} items meet {b.shape[-2]} in dim -2")
    rest = (*b.shape[:-2], b.shape[-1])
    turned = b.transpose((b.ndim - 2, *range(b.ndim - 2), b.ndim - 1))
    shape = (b.shape[-2], int(np.prod(rest, dtype=np.int64)))
    matrix = reshape(turned, shape)
    y = PRODUCT[0](a, matrix, layout=Layout(*a.layout.dims[:-1], None))
    return delivered(reshape(y, (*a.shape[:-1], *rest)), out, "dot")


@primitive
def vdot(a: Any, b: Any) -> DistArray:
    """Return the sum of `conj(a) * b` over all elements, in C order, of two arrays of equal size."""
    a, b = _operands("vdot", (a, b))
    if a.size != b.size:
        raise ValueError(f"np.vdot takes arrays of equal size, not of shapes {a.shape} and {b.shape}")
    if a.shape != b.shape:
        a, b = reshape(a, (-1,)) if a.ndim != 1 else a, reshape(b, (-1,)) if b.ndim != 1 else b
    dtype = np.result_type(a.dtype, b.dtype)
    if dtype.kind == "b":
        return (a & b).any()
    work = work_dtype(dtype)
    products = a.astype(work, copy=False).conj() * b.astype(work, copy=False)
    return products.sum(dtype=work).astype(dtype, copy=False)


_CORE: dict[str, tuple[Callable[[DistArray, DistArray], DistArray], int, int]] = {
    "matmul": (_matmul, 2, 2),
    "vecdot": (vecdot, 1, 1),
    "matvec": (matvec, 2, 1),
    "vecmat": (vecmat, 1, 2),
}
"""By name the function, and the number of core dims of each operand."""
