"""Elementwise operations and arithmetic with broadcasting."""

from __future__ import annotations

import math

import numpy as np
import pytest

from parlinalg import DistArray, Grid, Layout, LayoutError, Tensor
from parlinalg.autograd import no_grad, ops
from parlinalg.autograd.saved import saved
from parlinalg.backend.kernels import TILE
from parlinalg.backend.kernels.activations import erf, gelu_grad
from tests.autograd.cases import MATRICES, agree, close, cut, numbers, tensor, value_and_gradients

X, Y, POSITIVE = numbers(5, 7), numbers(5, 7, seed=1), np.abs(numbers(5, 7, seed=2)) + 0.5
_erf = np.vectorize(math.erf)

UNARY = {
    "exp": (ops.exp, X, np.exp),
    "log": (ops.log, POSITIVE, np.log),
    "sqrt": (ops.sqrt, POSITIVE, np.sqrt),
    "abs": (ops.abs, X, np.abs),
    "sin": (ops.sin, X, np.sin),
    "cos": (ops.cos, X, np.cos),
    "tanh": (ops.tanh, X, np.tanh),
    "sigmoid": (ops.sigmoid, 5 * X, lambda x: 1 / (1 + np.exp(-x))),
    "silu": (ops.silu, X, lambda x: x / (1 + np.exp(-x))),
    "relu": (ops.relu, X, lambda x: np.maximum(x, 0)),
    "erf": (ops.erf, X, _erf),
    "gelu": (ops.gelu, 2 * X, lambda x: x * (1 + _erf(x / math.sqrt(2))) / 2),
    "gelu tanh": (
        lambda x: ops.gelu(x, "tanh"), 2 * X,
        lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    ),
    "negative": (lambda x: -x, X, np.negative),
    "power": (lambda x: x**3 + x**-1.0 + x**0, POSITIVE, lambda x: x**3 + 1 / x + 1),
    "numbers": (lambda x: 2 * x + 1 - (3 - x) / 4 + np.float64(2) / (x * x + 1), X,
                lambda x: 2 * x + 1 - (3 - x) / 4 + 2 / (x * x + 1)),
}  # fmt: skip

BINARY = {
    "add": (lambda x, y: x + y, np.add),
    "subtract": (lambda x, y: x - y, np.subtract),
    "multiply": (lambda x, y: x * y, np.multiply),
    "divide": (lambda x, y: x / (y * y + 1), lambda x, y: x / (y * y + 1)),
    "maximum": (ops.maximum, np.maximum),
    "minimum": (ops.minimum, np.minimum),
    "where": (lambda x, y: ops.where(x.data > 0, x, y), lambda x, y: np.where(x > 0, x, y)),
    "the same twice": (lambda x, y: x * x * y - x * y, lambda x, y: x * x * y - x * y),
}  # fmt: skip


@pytest.mark.parametrize("name", UNARY)
def test_functions(name: str, widest: Grid, serial: Grid) -> None:
    function, x, known = UNARY[name]
    agree(function, [x], [MATRICES[0]], widest, serial, expected=known(x), numeric=True)


@pytest.mark.parametrize("name", BINARY)
def test_arithmetic(name: str, widest: Grid, serial: Grid) -> None:
    function, known = BINARY[name]
    agree(function, [X, Y], [MATRICES[1]] * 2, widest, serial, expected=known(X, Y), numeric=True)


@pytest.mark.parametrize("layout", MATRICES, ids=repr)
def test_broadcasting_sums_the_gradient_over_the_dims_that_are_missing(
    layout: Layout, grid: Grid, serial: Grid
) -> None:
    row, column, one = numbers(7), numbers(5, 1), numbers(1, 1)
    layouts = [layout, Layout(layout.dims[1]), layout.with_dim(1, None), Layout(None, None)]
    agree(
        lambda x, r, c, o: (x + r) * c - r / (c * c + 1) + o * x, [X, row, column, one], layouts, grid, serial,
        expected=(X + row) * column - row / (column**2 + 1) + one * X, numeric=True,
    )  # fmt: skip


@pytest.mark.ranks(1, 2, 4)
def test_tiles_and_halves_of_the_fused_kernels(serial: Grid) -> None:
    """Blocks longer than a tile, empty ones, and 16-bit ones, which are computed in float32 and rounded once."""
    import ml_dtypes

    big = numbers(3, 25_000)
    for name in ("gelu", "gelu tanh", "sigmoid", "relu", "tanh"):
        function, _, known = UNARY[name]
        value, grad = value_and_gradients(function, [big], [Layout(None, None)], serial)
        close(value, known(big))
        for dtype in (np.float16, ml_dtypes.bfloat16):
            half, _ = value_and_gradients(function, [big[:, :50]], [Layout(None, None)], serial, dtype)
            assert half.dtype == dtype
            close(half.astype(np.float64), known(big[:, :50]), 1e-2)
        value, grad = value_and_gradients(function, [big[:0]], [Layout(None, None)], serial)
        assert value.shape == grad.shape == (0, 25_000)


@pytest.mark.serial
def test_the_error_function_is_right_to_the_last_bits() -> None:
    x = np.concatenate([np.linspace(-7, 7, 20_001), 10.0 ** np.linspace(-300, 2, 500), [0.0, np.inf, -np.inf]])
    right = _erf(x)
    assert (np.abs(erf(x) - right) <= 1e-15 * np.abs(right)).all()
    assert np.isnan(erf(np.array([np.nan]))).all()
    close(erf(x.astype(np.float32)), right, 3e-7)


def test_dtypes_of_gradients(widest: Grid) -> None:
    """A gradient has its value's dtype, whatever it meets."""
    x = Tensor(cut(X.astype(np.float32), widest, MATRICES[0]), requires_grad=True)
    y = tensor(Y, widest, MATRICES[0])
    (x * y * np.float64(2)).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert (x.grad.dtype, y.grad.dtype) == (np.float32, np.float64)
    assert (x * 2.5 + np.float64(1)).dtype == np.float32
    half = x.astype(np.float16)
    x.grad = None
    half.sum().backward()
    assert x.grad.dtype == np.float32


@pytest.mark.mpi(min_size=2)
def test_wrong_layouts_name_both_and_the_way_out(widest: Grid) -> None:
    axis = max(widest.sizes, key=lambda a: widest.sizes[a])
    x, other = tensor(X, widest, Layout(axis, None)), tensor(X, widest, Layout(None, axis))
    with pytest.raises(LayoutError) as error:
        x + other
    for part in (repr(x.layout), repr(other.layout), f".redistribute({x.layout!r})"):
        assert part in str(error.value)
    terms = tensor(X, widest, Layout(None, None, partial=axis))
    for nonlinear in (ops.relu, ops.exp, lambda t: t * t, lambda t: t + x, lambda t: t**2, ops.softmax):
        with pytest.raises(LayoutError, match="redistribute"):
            nonlinear(terms)
    assert (2 * terms + terms / 2).layout.partial == (axis,)


def test_wrong_operands(widest: Grid) -> None:
    x = tensor(X, widest, MATRICES[0])
    with pytest.raises(TypeError, match=r"parlinalg\.distribute"):
        x + X
    with pytest.raises(TypeError, match="compare their values"):
        x == x
    with pytest.raises(TypeError, match="int64 has no gradient"):
        Tensor(cut(np.arange(4), widest, Layout("a")), requires_grad=True)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_keeps_one_array_and_gives_the_same_recorded_or_not(approximate: str, dtype: type, serial: Grid) -> None:
    many = TILE + 5
    block = serial.backend.from_host(np.linspace(-9, 4, many).astype(dtype))
    x = Tensor(DistArray(block, (many,), Layout(None), serial), requires_grad=True)
    y = ops.gelu(x, approximate)
    assert [row.nbytes for row in saved(y.sum())] == [block.nbytes]
    with no_grad():
        plain = ops.gelu(x, approximate)
    y.sum().backward()
    assert (serial.backend.to_host(plain.block) == serial.backend.to_host(y.block)).all()
    assert x.grad is not None
    want = gelu_grad(block, serial.backend.xp.ones_like(block), approximate == "tanh")
    grad = serial.backend.to_host(x.grad.block)
    np.testing.assert_allclose(grad, serial.backend.to_host(want), rtol=0, atol=20 * np.finfo(dtype).eps)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_can_be_walked_back_over_again(grid: Grid, approximate: str) -> None:
    """Its gradient goes where its derivative was only in the last walk."""
    x = tensor(X, grid, Layout(None, None))
    y = (ops.gelu(x, approximate) * tensor(Y, grid, Layout(None, None), False)).sum()
    y.backward(retain=True)
    once = x.grad.gather()
    for times in (2, 3):
        y.backward(retain=times < 3)
        close(x.grad.gather(), times * once)
