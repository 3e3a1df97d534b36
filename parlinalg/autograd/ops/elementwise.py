"""Functions of one tensor, element by element; each derivative beside its function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from parlinalg.array.core import mismatch
from parlinalg.array.reductions import summed
from parlinalg.autograd.gradients import Term, conjugated
from parlinalg.autograd.rule import Part
from parlinalg.autograd.tape import recording, walking
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.backend import backend_of, namespace
from parlinalg.backend.kernels import activations
from parlinalg.errors import ConfigError
from parlinalg.layout import Layout

Block = Any


def _of_value(
    name: str, x: Any, forward: Callable[[Block], Block], derivative: Callable[[Block, Block], Block]
) -> Tensor:
    """Return forward(x), with a derivative in terms of the value, `derivative(g, y)`; x is not kept.

    Partial x is refused.
    """
    x = as_tensor(x)
    data = summed(x.data, name)
    y = data.like(forward(data.block))
    rest = data.layout
    return record(name, y, [x], [Part(lambda g, y: (conjugated(derivative, g, y), rest), y.block)])


def _of_argument(
    name: str, x: Any, forward: Callable[[Block], Block], derivative: Callable[[Block, Block], Block]
) -> Tensor:
    """Return forward(x), with a derivative in terms of the argument, `derivative(g, x)`; y is not kept."""
    x = as_tensor(x)
    data = summed(x.data, name)
    rest = data.layout
    part = Part(lambda g, x: (conjugated(derivative, g, x), rest), data.block)
    return record(name, data.like(forward(data.block)), [x], [part])


def exp(x: Any) -> Tensor:
    """Return e to the power x."""
    return _of_value("exp", x, lambda b: namespace(b).exp(b), lambda g, y: g * y)


def log(x: Any) -> Tensor:
    """Return the natural logarithm."""
    return _of_argument("log", x, lambda b: namespace(b).log(b), lambda g, x: g / x)


def sqrt(x: Any) -> Tensor:
    """Return the square root."""
    return _of_value("sqrt", x, lambda b: namespace(b).sqrt(b), lambda g, y: g / (2 * y))


def abs(x: Any) -> Tensor:
    """Return the absolute value; its derivative at 0 is taken as 0."""
    return _of_argument("abs", x, lambda b: namespace(b).abs(b), lambda g, x: g * namespace(x).sign(x))


def sin(x: Any) -> Tensor:
    """Return the sine."""
    return _of_argument("sin", x, lambda b: namespace(b).sin(b), lambda g, x: g * namespace(x).cos(x))


def cos(x: Any) -> Tensor:
    """Return the cosine."""
    return _of_argument("cos", x, lambda b: namespace(b).cos(b), lambda g, x: -g * namespace(x).sin(x))


def tanh(x: Any) -> Tensor:
    """Return the hyperbolic tangent."""
    return _of_value("tanh", x, lambda b: namespace(b).tanh(b), lambda g, y: activations.tanh_grad(y, g))


def sigmoid(x: Any) -> Tensor:
    """Return 1 / (1 + exp(-x))."""
    return _of_value("sigmoid", x, activations.sigmoid, lambda g, y: activations.sigmoid_grad(y, g))


def silu(x: Any) -> Tensor:
    """Return x sigmoid(x) (Elfwing et al., 2018; also called swish)."""

    def derivative(g: Block, x: Block) -> Block:
        s = activations.sigmoid(x)
        return g * (s * (1 + x * (1 - s)))

    return _of_argument("silu", x, lambda b: b * activations.sigmoid(b), derivative)


def relu(x: Any) -> Tensor:
    """Return max(x, 0)."""
    return _of_value("relu", x, activations.relu, lambda g, y: activations.relu_grad(y, g))


def erf(x: Any) -> Tensor:
    """Return the error function."""
    c = 1.1283791670955126  # 2/√π
    return _of_argument("erf", x, activations.erf, lambda g, x: g * (c * namespace(x).exp(-x * x)))


def _spent() -> bool:
    """Return True if the running backward pass is the last that reads saved arrays, so that they may be written to."""
    walk = walking()
    return walk is not None and not walk.retain


def gelu(x: Any, approximate: str = "none") -> Tensor:
    """Return x Φ(x), with Φ the distribution function of the standard normal (Hendrycks and Gimpel, 2016).

    Parameters
    ----------
    approximate : {"none", "tanh"}
        "tanh" is 0.5 x (1 + tanh(√(2/π) (x + 0.044715 x³))), as in GPT-2.

    On the host the forward pass keeps the derivative in place of x, so that tanh or erf is taken once.  16-bit floats
    keep x, of which the derivative is had without a rounding of its own.
    """
    if approximate not in ("none", "tanh"):
        raise ConfigError(f"gelu: approximate is 'none' or 'tanh', not {approximate!r}")
    fast = approximate == "tanh"
    x = as_tensor(x)
    if backend_of(x.block).cpu and x.dtype.itemsize > 2 and recording() and x.requires_grad:
        data = summed(x.data, "gelu")
        y, slope = activations.gelu_and_slope(data.block, fast)
        rest = data.layout

        def part(g: Block, slope: Block) -> Term:
            ours = slope.base is None and slope.flags.writeable  # offloaded activations come back in others' memory
            into = slope if ours and _spent() and slope.dtype == g.dtype else None
            return namespace(g).multiply(g, slope, out=into), rest

        return record("gelu", data.like(y), [x], [Part(part, slope)])
    return _of_argument("gelu", x, lambda b: activations.gelu(b, fast), lambda g, x: activations.gelu_grad(x, g, fast))


def swiglu(x: Any) -> Tensor:
    """Return silu(x[..., 0]) x[..., 1]: a gate and what passes it lie side by side in the last dim.

    See Shazeer, "GLU variants improve transformer", 2020.

    Raises
    ------
    ValueError, LayoutError
        If the last dim is not 2, or cut.
    """
    x = as_tensor(x)
    data = summed(x.data, "swiglu")
    if not x.ndim or x.shape[-1] != 2:
        raise ValueError(f"swiglu of shape {x.shape}; it takes [..., 2]: a gate and a value for each result")
    whole = data.layout.with_dim(-1, None)
    if data.grid.effective(data.layout) != data.grid.effective(whole):
        raise mismatch("swiglu: gates and values are cut apart", data.layout, whole)
    inside, rest = data.grid.inside, data.layout
    if inside:
        y = activations.swiglu(data.block)
    else:
        y = data.grid.backend.zeros((0,) * (x.ndim - 1), x.dtype)
    value = data.like(y, Layout(*rest.dims[:-1]), x.shape[:-1])
    part = Part(lambda g, z: (activations.swiglu_grad(z, g) if inside else z, rest), data.block)
    return record("swiglu", value, [x], [part])
