"""Elementwise operations on distributed arrays, through NumPy's `__array_ufunc__`.

Operands of unlike layouts are brought together (`parlinalg.array.align`).  Scalars go with everything.  Partial arrays,
whose terms are not summed yet, stay so in linear operations: + and - of two with equal layouts, sign change,
conjugation, and multiplication or division by a finite scalar, where the dtype of the result does not change the sum
(`parlinalg.array.core.terms_add`); for other operations they are summed first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from parlinalg.array.align import broadcast_shape, is_explicit, together
from parlinalg.array.core import DistArray, check_out, delivered, mismatch, native, same_grid, terms_add
from parlinalg.backend.shapes import has_values
from parlinalg.errors import LayoutError
from parlinalg.grid import Grid
from parlinalg.layout import Layout

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
    if method == "accumulate":
        return _accumulated(ufunc, *inputs, **kwargs)
    if method == "outer" and ufunc.signature is None:
        first, second = (operand(value, ufunc.__name__) for value in inputs)
        behind = (..., *(None,) * second.ndim) if isinstance(second, DistArray) else ...
        return apply(ufunc, "__call__", [first[behind] if isinstance(first, DistArray) else first, second], kwargs)
    if method == "at" and ufunc in _SUMS:
        return _added_at(ufunc, *inputs)
    if method != "__call__":
        raise TypeError(
            f"np.{ufunc.__name__}.{method} is not defined on distributed arrays; gather() first, or use a plain call, "
            "reduce, accumulate or outer, or np.add.at and np.subtract.at"
        )
    if ufunc is np.matmul and not kwargs:
        return PRODUCT[0](*inputs)
    if ufunc.signature is not None:
        from parlinalg.array.products import generalized

        return generalized(ufunc, inputs, kwargs)
    if kwargs.get("where", True) is not True:
        return _where(ufunc, inputs, kwargs)
    kwargs.pop("where", None)
    return _elementwise(ufunc, inputs, kwargs)


def _added_at(ufunc: np.ufunc, a: Any, key: Any, values: Any) -> None:
    """Add values to the elements that `key` chooses, or subtract them, each as often as it is chosen."""
    from parlinalg.array.indexing import expanded, is_mask, setitem
    from parlinalg.array.joining import brought

    name = f"np.{ufunc.__name__}.at"
    if not isinstance(a, DistArray):
        raise TypeError(f"{name} changes a DistArray here, not {type(a).__name__}")
    if not isinstance(values, int | float | complex):
        values = brought(values, a)
    kind = np.result_type(a.dtype, values if not isinstance(values, DistArray) else values.dtype)
    if not np.can_cast(kind, a.dtype, "same_kind"):
        raise TypeError(f"{name}: the result would be {kind}, which an array of {a.dtype} does not hold")
    if not isinstance(values, DistArray):
        values = np.asarray(values, kind)[()]
    if any(isinstance(i, DistArray | np.ndarray) and not is_mask(i) for i in expanded(key, a)):
        setitem(a, key, values if ufunc is np.add else ufunc(np.zeros_like(values), values), add=True)
    else:  # no element is chosen twice
        a[key] = ufunc(a[key], values)


def _elementwise(ufunc: np.ufunc, inputs: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the result of a call without a mask, element by element; `kwargs` may have `out` and `dtype`."""
    name = ufunc.__name__
    out, dtype = kwargs.pop("out", None), kwargs.get("dtype")
    if dtype is not None:
        native(np.dtype(dtype))
    operands = [operand(value, name) for value in inputs]
    arrays = [o for o in operands if isinstance(o, DistArray)]
    if not arrays:
        raise TypeError(f"out= of np.{name} is distributed, but its operands are not")
    grid = same_grid(arrays)
    shape = broadcast_shape([a.shape for a in arrays], name)
    for target in out or ():
        wide = isinstance(target, DistArray) and shape != target.shape and fits(shape, target.shape)
        check_out(target, target.shape if wide else shape, name)
        same_grid([arrays[0], target])
        if wide:  # the result is repeated into it
            from parlinalg.array.joining import broadcast_to

            first = next(i for i, o in enumerate(operands) if isinstance(o, DistArray))
            operands[first] = broadcast_to(arrays[0], target.shape)
            return _elementwise(ufunc, operands, {**kwargs, "out": out})
    layout, operands = _aligned(ufunc, operands, arrays, dtype, out)
    if ufunc is np.power and dtype is None:
        _check_power(operands[0], operands[1], math.prod(shape), grid)
    unlike = next((t for t in out or () if grid.effective(t.layout) != grid.effective(layout)), None)
    if unlike is not None:
        if is_explicit():
            raise mismatch(f"out= of np.{name} (shape {shape})", unlike.layout, layout)
        found = ufunc(*operands, **kwargs)
        results = [delivered(r, t, name) for r, t in zip(found if ufunc.nout > 1 else (found,), out, strict=True)]
        return tuple(results) if ufunc.nout > 1 else results[0]
    if out is not None:
        into = tuple(target.destination() for target in out)
        _on_blocks(ufunc, operands, grid, kwargs, into)
        for target, block in zip(out, into, strict=True):
            target.adopt(block)
        return out[0] if len(out) == 1 else out
    result = _on_blocks(ufunc, operands, grid, kwargs)
    if isinstance(result, tuple):
        return tuple(arrays[0].like(r, layout, shape) for r in result)
    return arrays[0].like(result, layout, shape)


def _aligned(
    ufunc: np.ufunc, operands: list[Any], arrays: Sequence[DistArray], dtype: Any, out: Sequence[Any] | None
) -> tuple[Layout, list[Any]]:  # fmt: skip
    """Return the layout of the result, and the operands with their arrays in layouts that fit it.

    Partial arrays stay partial where the ufunc of their terms gives terms of the right sum; otherwise they are summed,
    or in explicit code refused.
    """
    grid = arrays[0].grid
    if any(grid.effective(a.layout).partial for a in arrays):
        try:
            _check_partial(ufunc, operands, dtype, out)
            return arrays[0].layout, operands
        except LayoutError:
            if is_explicit():
                raise
    goal = out[0].layout.with_partial(()) if out else None
    _, layout, moved = together(arrays, ufunc.__name__, goal)
    ready = iter(moved)
    return layout, [next(ready) if isinstance(o, DistArray) else o for o in operands]


def _on_blocks(
    ufunc: np.ufunc, operands: Sequence[Any], grid: Grid, kwargs: dict[str, Any], into: tuple[Any, ...] | None = None
) -> Any:  # fmt: skip
    """Return the ufunc of this rank's blocks, written to the blocks `into` if they are given."""
    values: Sequence[Any] = [o.block if isinstance(o, DistArray) else o for o in operands]
    if grid.backend.values and not (kwargs or grid.backend.host_memory):
        values = _cast(ufunc, values, grid.backend.xp)
    if ufunc not in _EXACT:
        return ufunc(*values, **kwargs, **({} if into is None else {"out": into}))
    result = _EXACT[ufunc](*values, **kwargs)
    if into is not None:
        into[0][...] = result
    return result


def _cast(ufunc: np.ufunc, values: Sequence[Any], xp: Any) -> Sequence[Any]:
    """Return the operands in dtypes for which CuPy's ufunc of this name computes what NumPy's computes of `values`."""
    on_device = getattr(xp, ufunc.__name__, None)
    if on_device is None:
        return values
    goals = _goals(ufunc, on_device, tuple(map(_kind, values)))
    return [
        v if to is None else v != 0 if to.kind == "b" else v.astype(to, copy=False) if hasattr(v, "astype") else v
        for v, to in zip(values, goals, strict=True)
    ]


def _kind(value: Any) -> Any:
    """Return the dtype of an operand, or the type of a Python number, which takes on the dtype of the others."""
    if hasattr(value, "dtype"):
        return value.dtype
    return np.dtype(bool) if isinstance(value, bool) else next(t for t in (int, float, complex) if isinstance(value, t))


@cache
def _goals(ufunc: np.ufunc, on_device: Any, kinds: tuple[Any, ...]) -> tuple[np.dtype | None, ...]:
    """Return the dtypes to which operands of these dtypes must be cast for CuPy's ufunc; None where they need no cast.

    CuPy's ufuncs lack some of NumPy's loops, have others that NumPy has not (`sign` of truth values), and take the
    first one that operands can be cast to.  Where NumPy has none its error is raised.
    """
    if any(getattr(kind, "name", "") == "bfloat16" for kind in kinds):  # NumPy's loops for it are not NumPy's own
        return (None,) * ufunc.nin
    want = ufunc.resolve_dtypes((*kinds, *(None,) * ufunc.nout))[: ufunc.nin]
    known = [to if isinstance(kind, type) else kind for kind, to in zip(kinds, want, strict=True)]
    loops = [[np.dtype(c) for c in t.split("->")[0]] for t in on_device.types if not set(t) & set("EV")]
    fits = (loop for loop in loops if all(np.can_cast(kind, to) for kind, to in zip(known, loop, strict=True)))
    if next(fits, None) == list(want):
        return (None,) * ufunc.nin
    if ufunc.__name__.startswith("logical") and any(to.kind == "c" for to in want):
        want = (np.dtype(bool),) * ufunc.nin
    return tuple(None if to == kind else to for kind, to in zip(kinds, want, strict=True))


def _where(ufunc: np.ufunc, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
    """Return the result of a ufunc where a mask is True; elsewhere what `out` held, or zeros."""
    mask, out = options.pop("where"), options.pop("out", None)
    mask = operand(mask, ufunc.__name__)
    with np.errstate(all="ignore"):  # elements that are not wanted are computed too
        found = apply(ufunc, "__call__", inputs, options)
    results: list[Any] = []
    for result, target in zip(found if ufunc.nout > 1 else (found,), out or (None,) * ufunc.nout, strict=True):
        before: Any = result.dtype.type(0) if target is None else target
        chosen: Any = np.where(mask, result, before)
        results.append(chosen if target is None else delivered(chosen.astype(target.dtype), target, ufunc.__name__))
    return tuple(results) if ufunc.nout > 1 else results[0]


def _accumulated(ufunc: np.ufunc, array: Any, axis: int = 0, dtype: Any = None, out: Any = None) -> DistArray:
    """Return the running results of a ufunc along a dim."""
    from parlinalg.array.sorting import SCANS, cumulative

    if ufunc.__name__ not in SCANS or not isinstance(array, DistArray):
        raise TypeError(
            f"np.{ufunc.__name__}.accumulate is not defined on distributed arrays; those that are: {', '.join(SCANS)}"
        )
    target = out[0] if isinstance(out, tuple) else out
    return delivered(cumulative(array, axis, ufunc.__name__, dtype), target, f"{ufunc.__name__}.accumulate")


def fits(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Return True if an array of one shape broadcasts to the other."""
    extra = len(full) - len(shape)
    return extra >= 0 and all(n in (1, m) for n, m in zip(shape, full[extra:], strict=True))


def _check_power(base: Any, exponent: Any, size: int, grid: Grid) -> None:
    """Raise on all ranks, as NumPy does where there are elements, if whole numbers get a negative whole power."""
    kinds = [np.dtype(o.dtype if hasattr(o, "dtype") else type(o)).kind for o in (base, exponent)]
    if kinds[0] not in "biu" or kinds[1] != "i" or (kinds[0] == "u" and type(exponent) is int) or not size:
        return
    here = bool((exponent.block < 0).any()) if isinstance(exponent, DistArray) else exponent < 0
    if any(grid.world.share(here, others="alike")) if isinstance(exponent, DistArray) else here:
        raise ValueError("np.power: integers to negative integer powers are no integers; convert to floats first")


def operand(value: Any, name: str) -> DistArray | Scalar:
    """Return the value as a DistArray or a scalar; arrays held by each rank for itself are refused."""
    if isinstance(value, DistArray | int | float | complex | np.generic):
        return value
    if isinstance(value, np.ndarray) and value.ndim == 0 and not np.ma.isMaskedArray(value):
        return value.dtype.type(value[()])
    if not has_values(value) and value.ndim == 0:  # a number of an imagined array
        return value
    if hasattr(value, "shape") and not isinstance(value, type):
        raise TypeError(
            f"{name}: an array of shape {value.shape} of this rank alone meets a DistArray; distribute it first: "
            "parlinalg.distribute(array[, grid, layout])"
        )
    hint = "; parlinalg.asarray makes an array of it" if isinstance(value, list | tuple) else ""
    raise TypeError(f"{name}: a DistArray takes DistArrays and scalars, not {type(value).__name__}{hint}")


def _check_partial(ufunc: np.ufunc, operands: Sequence[Any], dtype: Any, out: Sequence[Any] | None) -> None:
    """Raise a LayoutError unless the operation on terms, with results of `dtype`, has terms of the right sum."""
    partial = [o for o in operands if isinstance(o, DistArray) and o.grid.effective(o.layout).partial]
    if not partial:
        return
    whole = partial[0].layout.with_partial(())
    others = [o for o in operands if not any(o is p for p in partial)]
    linear = len(operands) == 1 and ufunc in _UNARY_LINEAR
    if ufunc in _SUMS and len(partial) == len(operands):
        first, second = (p.grid.effective(p.layout) for p in operands)
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


def _some(odd: Any) -> bool:
    """Return True if there are elements at an edge; arrays without values count as having none."""
    return has_values(odd) and bool(odd.any())


def _floor_divide(x: Any, y: Any, **kwargs: Any) -> Any:
    """Return `np.floor_divide`, with infinite and vanishing quotients as they are (NumPy: NaN, and 0 or -1)."""
    result = np.floor_divide(x, y, **kwargs)
    if result.dtype.kind == "f":
        infinite = (np.isinf(x) | np.isinf(y)) & ~np.isnan(x) & ~np.isnan(y)
        if _some(infinite):
            with np.errstate(all="ignore"):
                quotient = np.true_divide(x, y)
                result = np.where(infinite, np.copysign(np.floor(np.abs(quotient)), quotient), result)
    return result


def _expm1(x: Any, **kwargs: Any) -> Any:
    """Return `np.expm1`, with the values at the edges of complex numbers that the standard and C's annex G give."""
    result = np.expm1(x, **kwargs)
    if result.dtype.kind == "c":
        odd = (x.imag == 0) | ~np.isfinite(x.real) | ~np.isfinite(x.imag)
        if _some(odd):
            with np.errstate(all="ignore"):
                whole, low, high = np.exp(x), np.isneginf(x.real), np.isposinf(x.real)
                bent = ~np.isfinite(x.imag)
                real = np.where(x.imag == 0, np.expm1(x.real), np.where(bent & ~high, np.nan, whole.real))
                real = np.where(low, -1.0, np.where(high & bent, np.inf, real))
                imag = np.where(x.imag == 0, x.imag, np.where(bent, np.nan, whole.imag))
                imag = np.where(low & bent, 0.0, imag)
                real = np.where((x == 0) & ~np.signbit(x.imag), 0.0, real)
            edges = np.empty_like(result)
            edges.real, edges.imag = real, imag
            result = np.where(odd, edges, result)
    return result


def _tanh(x: Any, **kwargs: Any) -> Any:
    """Return `np.tanh`, with the imaginary part's sign for infinite real parts, as the standard has it."""
    result = np.tanh(x, **kwargs)
    if result.dtype.kind == "c":
        odd = np.isinf(x.real) & np.isfinite(x.imag)
        if _some(odd):
            edges = np.empty_like(result)
            edges.real, edges.imag = result.real, np.copysign(0.0, x.imag)
            result = np.where(odd, edges, result)
    return result


#: Where NumPy gives something else than the Array API standard.
_EXACT: dict[np.ufunc, Callable[..., Any]] = {np.floor_divide: _floor_divide, np.expm1: _expm1, np.tanh: _tanh}
