"""Elementwise operations on distributed arrays, through NumPy's `__array_ufunc__`.

Operands have equal layouts, dim by dim; a dim that is broadcast (of size 1, or missing) is whole.  Scalars go with
everything.  Partial arrays, whose terms are not summed yet, take linear operations only: + and - of two with equal
layouts, sign change, conjugation, and multiplication or division by a finite scalar, where the dtype of the result does
not change the sum (`parlinalg.array.core.terms_add`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from parlinalg.array.core import DistArray, check_out, effective, mismatch, native, same_grid, terms_add
from parlinalg.errors import LayoutError
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout

Scalar = int | float | complex | np.generic

_UNARY_LINEAR = {np.negative, np.positive, np.conjugate}
_SUMS = {np.add, np.subtract}

#: Set by `parlinalg.matmul`, a layer above this one: the product behind `@`.
PRODUCT: list[Callable[..., Any]] = []


def apply(ufunc: np.ufunc, method: str, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of a ufunc call with a DistArray among its inputs or outputs."""
    if method == "reduce":
        from parlinalg.array.reductions import reduce_ufunc

        return reduce_ufunc(ufunc, inputs[0], kwargs)
    if method != "__call__":
        raise TypeError(
            f"np.{ufunc.__name__}.{method} is not defined on distributed arrays; gather() first, or use a plain call "
            "or reduce"
        )
    if ufunc is np.matmul and not kwargs:
        return PRODUCT[0](*inputs)
    if ufunc.signature is not None:
        from parlinalg.array.products import generalized

        return generalized(ufunc, inputs, kwargs)
    if kwargs.get("where", True) is not True:
        raise TypeError(f"np.{ufunc.__name__}(where=) is not defined on distributed arrays; use np.where")
    out, dtype = kwargs.pop("out", None), kwargs.get("dtype")
    if dtype is not None:
        native(np.dtype(dtype))
    operands = [operand(value, ufunc.__name__) for value in inputs]
    arrays = [o for o in operands if isinstance(o, DistArray)]
    if not arrays:
        raise TypeError(f"out= of np.{ufunc.__name__} is distributed, but its operands are not")
    grid = same_grid(arrays)
    shape, layout = broadcast_layout(arrays, ufunc.__name__)
    if layout.partial:
        _check_partial(ufunc, operands, dtype, out)
    if out is not None:
        for target in out:
            check_out(target, shape, ufunc.__name__)
            same_grid([arrays[0], target])
            if effective(target.layout, grid) != effective(layout, grid):
                raise mismatch(f"out= of np.{ufunc.__name__} (shape {shape})", target.layout, layout)
        kwargs["out"] = tuple(target.destination() for target in out)
    result = ufunc(*(o.block if isinstance(o, DistArray) else o for o in operands), **kwargs)
    if out is not None:
        for target, block in zip(out, kwargs["out"], strict=True):
            target.adopt(block)
        return out[0] if len(out) == 1 else out
    if isinstance(result, tuple):
        return tuple(arrays[0].like(r, layout, shape) for r in result)
    return arrays[0].like(result, layout, shape)


def operand(value: Any, name: str) -> DistArray | Scalar:
    """Return the value as a DistArray or a scalar; arrays held by each rank for itself are refused."""
    if isinstance(value, DistArray | int | float | complex | np.generic):
        return value
    if isinstance(value, np.ndarray) and value.ndim == 0 and not np.ma.isMaskedArray(value):
        return value.dtype.type(value[()])
    if hasattr(value, "shape") and not isinstance(value, type):
        raise TypeError(
            f"{name}: an array of shape {value.shape} of this rank alone meets a DistArray; distribute it first: "
            "parlinalg.distribute(array, grid, layout)"
        )
    raise TypeError(f"{name}: a DistArray takes DistArrays and scalars, not {type(value).__name__}")


def broadcast_layout(arrays: Sequence[DistArray], name: str) -> tuple[tuple[int, ...], Layout]:
    """Return the broadcast shape of the arrays and its layout; a LayoutError where theirs differ."""
    grid = arrays[0].grid
    if all(a.shape == arrays[0].shape and a.layout == arrays[0].layout for a in arrays[1:]):
        return arrays[0].shape, arrays[0].layout
    try:
        shape = np.broadcast_shapes(*(a.shape for a in arrays))
    except ValueError:
        raise ValueError(
            f"{name}: shapes {', '.join(str(a.shape) for a in arrays)} do not broadcast together"
        ) from None
    dims: list[Cut] = []
    named: dict[str, DistArray] = {}
    for d in range(len(shape)):
        back = d - len(shape)
        cuts = {
            effective(a.layout, grid).dims[back]: a for a in arrays if -back <= a.ndim and a.shape[back] == shape[back]
        }
        if len(cuts) > 1:
            raise _uneven(name, cuts, arrays, shape)
        cut, source = next(iter(cuts.items()))
        if clash := next((axis for axis in cut if axis in named), None):
            whole = source.layout.with_dim(back % source.ndim, None)
            raise mismatch(f"{name}: axis {clash!r} would cut two dims of the result", source.layout, whole)
        cut = tuple(axis for axis in source.layout.dims[back] if axis not in named)  # axes of one rank keep their place
        named |= dict.fromkeys(cut, source)
        dims.append(cut)
        for a in arrays:
            if -back <= a.ndim and a.shape[back] != shape[back] and effective(a.layout, grid).dims[back]:
                raise mismatch(
                    f"{name}: dim {d} is broadcast to size {shape[d]}, and must be whole",
                    a.layout,
                    a.layout.with_dim(back % a.ndim, None),
                )
    partial = max((effective(a.layout, grid).partial for a in arrays), key=len)
    return shape, Layout(*dims, partial=partial)


def _uneven(name: str, cuts: dict[Cut, DistArray], arrays: Sequence[DistArray], shape: tuple[int, ...]) -> LayoutError:
    a, b = list(cuts.values())[:2]
    if a.ndim == b.ndim:
        return mismatch(f"{name}: layouts differ", b.layout, a.layout)
    small, large = sorted((a, b), key=lambda x: x.ndim)
    return mismatch(
        f"{name}: layouts differ on shapes {a.shape} and {b.shape}",
        small.layout,
        Layout(*large.layout.dims[large.ndim - small.ndim :]),
    )


def _check_partial(ufunc: np.ufunc, operands: Sequence[Any], dtype: Any, out: Sequence[Any] | None) -> None:
    """Raise a LayoutError unless the operation on terms, with results of `dtype`, has terms of the right sum."""
    partial = [o for o in operands if isinstance(o, DistArray) and effective(o.layout, o.grid).partial]
    if not partial:
        return
    whole = partial[0].layout.with_partial(())
    others = [o for o in operands if not any(o is p for p in partial)]
    linear = len(operands) == 1 and ufunc in _UNARY_LINEAR
    if ufunc in _SUMS and len(partial) == len(operands):
        grids: Grid = partial[0].grid
        first, second = (effective(p.layout, grids) for p in operands)
        if first != second or operands[0].shape != operands[1].shape:
            raise mismatch(f"{ufunc.__name__}: two arrays not summed yet", second, first)
        linear = True
    elif len(partial) == len(others) == 1 and not isinstance(others[0], DistArray):
        scale = complex(others[0])  # times infinity a term of zero is no number, and the sum is
        finite = math.isfinite(scale.real) and math.isfinite(scale.imag)
        linear = finite and (
            ufunc is np.multiply or (ufunc is np.true_divide and operands[0] is partial[0] and bool(scale))
        )
    if not linear:
        raise LayoutError(
            f"{ufunc.__name__}: an operand is {partial[0].layout!r}, not summed yet, and only linear operations on "
            f"equal layouts take that; sum it by .redistribute({whole!r})"
        )
    kinds = (o.dtype if isinstance(o, DistArray) else o for o in operands)
    result = np.result_type(*kinds, *(1.0,) * (ufunc is np.true_divide)) if dtype is None else np.dtype(dtype)
    for each in (result, *(target.dtype for target in out or ())):
        for p in partial:
            if not terms_add(p.dtype, each):
                raise LayoutError(
                    f"{ufunc.__name__}: an operand is {p.layout!r} of {p.dtype}, not summed yet, and its terms as "
                    f"{each} have another sum; sum it by .redistribute({whole!r})"
                )
