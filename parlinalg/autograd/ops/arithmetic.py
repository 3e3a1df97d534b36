"""Arithmetic with broadcasting: operands have equal layouts dim by dim, and a dim that is broadcast is whole."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.align import unmoved
from parlinalg.array.reductions import summed
from parlinalg.autograd.gradients import Term, conjugated
from parlinalg.autograd.rule import Part
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.backend import namespace
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.shapes import ShapeArray
from parlinalg.grid import Grid
from parlinalg.layout import Layout

Block = Any
Scalar = int | float | complex


def operand(value: Any, name: str) -> Tensor | Scalar:
    """Return a tensor, or a Python number, which takes the dtype of what it meets."""
    if isinstance(value, Tensor | DistArray):
        return as_tensor(value)
    if isinstance(value, int | float | complex) and not isinstance(value, np.generic):
        return value
    if isinstance(value, np.generic | np.ndarray | ShapeArray) and not value.ndim and value.dtype.kind in "biufc":
        return value.item()
    raise TypeError(
        f"{name}: a tensor takes tensors, DistArrays and numbers, not {type(value).__name__}; an array of this "
        "rank alone becomes one by parlinalg.distribute(array, grid, layout)"
    )


def value_of(x: Tensor | Scalar) -> Any:
    """Return operands as the ufuncs of distributed arrays take them."""
    return x.data if isinstance(x, Tensor) else x


def block_of(x: Tensor | Scalar) -> Any:
    return x.block if isinstance(x, Tensor) else x


def block_sum(block: Block, axes: tuple[int, ...], keepdims: bool = False) -> Block:
    """Return the sum over dims of a block; 16-bit floats are summed in float32."""
    xp = namespace(block)
    total = block.sum(axis=axes, dtype=work_dtype(block.dtype), keepdims=keepdims)
    return xp.asarray(total).astype(block.dtype, copy=False)


class Frame(NamedTuple):
    """Shape, layout and dtype of an array whose elements a rule does not need, so that it is not kept alive."""

    shape: tuple[int, ...]
    layout: Layout
    grid: Grid

    @classmethod
    def of(cls, x: Tensor | DistArray) -> Frame:
        return cls(x.shape, x.layout.with_partial(()), x.grid)


def to_input(grad: Block, y: Frame, x: Frame) -> Term:
    """Return the term of x's gradient from that of y, to whose shape x was broadcast: summed over the dims x lacks.

    The sum over cut dims is left partial over the axes that cut them.
    """
    rest = y.layout
    if x.shape == y.shape:
        return grad, rest
    own = len(x.shape)
    lead = len(y.shape) - own
    stretched = [d for d in range(own) if x.shape[d] == 1 and y.shape[lead + d] != 1]
    dims = (*range(lead), *(lead + d for d in stretched))
    over = [a for d in dims for a in rest.dims[d] if y.grid.sizes[a] > 1]
    layout = Layout(*(() if d in stretched else rest.dims[lead + d] for d in range(own)), partial=over)
    shape = tuple(1 if d in stretched else n for d, n in enumerate(grad.shape[lead:]))
    return block_sum(grad, dims).reshape(shape), layout


def _combined(op: str, y: DistArray, *operands: tuple[Any, ...]) -> Tensor:
    """Return the result y as a tensor.

    Parameters
    ----------
    *operands : (x, derivative, *saved)
        The derivative takes the gradient of y and the saved arrays, and gives a block of y's shape.
    """
    frame = Frame.of(y)

    def part(x: Tensor, derivative: Any, *saved: Any) -> Part:
        shape = Frame.of(x)
        return Part(lambda g, *held: to_input(conjugated(derivative, g, *held), frame, shape), *saved)

    tensors = [each for each in operands if isinstance(each[0], Tensor)]
    return record(op, y, [x for x, *_ in tensors], [part(*each) for each in tensors])


def _two(a: Any, b: Any, name: str) -> tuple[Tensor | Scalar, Tensor | Scalar]:
    a, b = operand(a, name), operand(b, name)
    if not (isinstance(a, Tensor) or isinstance(b, Tensor)):
        raise TypeError(f"{name} of two numbers; at least one operand is a tensor")
    return a, b


def _meeting(function: Callable[[Any, Any], Any], a: Tensor | Scalar, b: Tensor | Scalar) -> Any:
    """Return the result of two operands, which have to lie alike: tensors are not moved implicitly."""
    with unmoved():
        return function(value_of(a), value_of(b))


def add(a: Any, b: Any) -> Tensor:
    """Return `a + b`."""
    a, b = _two(a, b, "add")
    return _combined("add", _meeting(operator.add, a, b), (a, lambda g: g), (b, lambda g: g))


def subtract(a: Any, b: Any) -> Tensor:
    """Return `a - b`."""
    a, b = _two(a, b, "subtract")
    return _combined("subtract", _meeting(operator.sub, a, b), (a, lambda g: g), (b, lambda g: -g))


def multiply(a: Any, b: Any) -> Tensor:
    """Return `a * b`, elementwise."""
    a, b = _two(a, b, "multiply")
    p, q = block_of(a), block_of(b)
    return _combined("multiply", _meeting(operator.mul, a, b), (a, lambda g, q: g * q, q), (b, lambda g, p: g * p, p))


def divide(a: Any, b: Any) -> Tensor:
    """Return `a / b`, elementwise."""
    a, b = _two(a, b, "divide")
    p, q = block_of(a), block_of(b)
    return _combined(
        "divide",
        _meeting(operator.truediv, a, b),
        (a, lambda g, q: g / q, q),
        (b, lambda g, p, q: -(g * p) / (q * q), p, q),
    )


def negative(a: Any) -> Tensor:
    """Return `-a`."""
    a = as_tensor(a)
    return _combined("negative", -a.data, (a, lambda g: -g))


def power(a: Any, exponent: Any) -> Tensor:
    """Return `a ** p`, for a number or a tensor p."""
    a, p = operand(a, "power"), operand(exponent, "power")
    if isinstance(p, Tensor) or not isinstance(a, Tensor):
        from parlinalg.autograd.functions import power_of_tensors

        return power_of_tensors(a, p)
    y = summed(a.data, "power") ** p
    if not p:  # x⁻¹ is not defined at 0
        return _combined("power", y, (a, lambda g: g * 0))
    return _combined("power", y, (a, lambda g, x: g * (p * x ** (p - 1)), a.block))


def maximum(a: Any, b: Any) -> Tensor:
    """Return the larger of a and b, elementwise; where they are equal the gradient is a's."""
    a, b = _two(a, b, "maximum")
    p, q = block_of(a), block_of(b)
    y = _meeting(np.maximum, a, b)
    return _combined("maximum", y, (a, lambda g, p, q: g * (p >= q), p, q), (b, lambda g, p, q: g * (p < q), p, q))


def minimum(a: Any, b: Any) -> Tensor:
    """Return the smaller of a and b, elementwise; where they are equal the gradient is a's."""
    a, b = _two(a, b, "minimum")
    p, q = block_of(a), block_of(b)
    y = _meeting(np.minimum, a, b)
    return _combined("minimum", y, (a, lambda g, p, q: g * (p <= q), p, q), (b, lambda g, p, q: g * (p > q), p, q))


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """Return a where the condition holds, b elsewhere.

    Parameters
    ----------
    condition : DistArray or Tensor
        Of bools, with the layout of a and b.
    a, b : Tensor or number
    """
    a, b = _two(a, b, "where")
    mask = as_tensor(condition).data
    with unmoved():
        y: DistArray = np.where(mask, value_of(a), value_of(b))
    keep, xp, zero = mask.block, y.xp, y.dtype.type(0)
    chosen, others = (lambda g, keep: xp.where(keep, g, zero)), (lambda g, keep: xp.where(keep, zero, g))
    return _combined("where", y, (a, chosen, keep), (b, others, keep))
