"""Functions of arrays that take tensors: one table from each function to what it does with them.

A function of `parlinalg.array` that is a `primitive`, a ufunc or a function of NumPy hands a call with a tensor among
its arguments to `call`.  There it is one of these:

- differentiable: an operation of `ops`, or rules written with functions of distributed arrays (`differentiable`);
- constant: the result does not change with small changes of its arguments, and is a DistArray (`constant`);
- refused, with the reason (`refused`).

All other functions are composed of these, and take tensors because their bodies do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array import DistArray, functions
from parlinalg.array.align import explicit, unmoved
from parlinalg.autograd.gradients import Term, conjugated
from parlinalg.autograd.ops.arithmetic import Frame, to_input
from parlinalg.autograd.rule import Part, is_array
from parlinalg.autograd.tensor import Tensor, record, refuse_out
from parlinalg.linalg.factors import Factor

Block = Any
Function = Callable[..., Any]

TABLE: dict[Function, Function] = {}
"""The operation on tensors of each function."""
COMPOSED: dict[Function, None] = {}
"""The functions of NumPy whose bodies take tensors."""
REFUSED: dict[Function, str] = {}


def call(function: Function, args: Any, kwargs: Any) -> Any:
    """Return the result of a function that has a tensor among its arguments.

    Raises
    ------
    TypeError
        If the function has no derivative; the message names it.
    """
    refuse_out(kwargs.get("out"))
    found = TABLE.get(function)
    if found is None:
        raise TypeError(
            f"{name_of(function)} of a Tensor is not defined: "
            f"{REFUSED.get(function, 'it has no derivative')}; give it the value, x.data, where no gradient is wanted"
        )
    return found(*args, **kwargs)


def call_numpy(function: Function, args: Any, kwargs: Any) -> Any:
    """Return the result of a function of NumPy that has a tensor among its arguments."""
    refuse_out(kwargs.get("out"))
    if function in TABLE:
        return TABLE[function](*args, **kwargs)
    if function in COMPOSED or function not in functions.HANDLED:
        return functions.call(function, args, kwargs)
    return call(function, args, kwargs)


def call_ufunc(ufunc: np.ufunc, method: str, inputs: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of a ufunc that has a tensor among its arguments."""
    given = {key: value for key, value in kwargs.items() if value is not np._NoValue}
    for out in given.pop("out", ()):
        refuse_out(out)
    if method == "reduce":
        from parlinalg.array.reductions import reduce_ufunc

        return reduce_ufunc(ufunc, inputs[0], given)
    if method != "__call__" or given.pop("where", True) is not True:
        what = f"np.{ufunc.__name__}(where=)" if method == "__call__" else f"np.{ufunc.__name__}.{method}"
        raise TypeError(f"{what} of a Tensor is not defined")
    dtype = given.pop("dtype", None)
    found = call(ufunc, inputs, given)
    return found if dtype is None else found.astype(dtype)


def name_of(function: Function) -> str:
    """Return the name of a function as users write it, as far as it has one."""
    home = getattr(function, "__module__", None) or "numpy"
    name = function.__name__.lstrip("_")
    return f"np.{name}" if isinstance(function, np.ufunc) or home.startswith("numpy") else name


# ------------------------------------------------------------------------------------------------ kinds of functions
def constant(*many: Function, moves: bool = False) -> None:
    """Let functions take tensors as the arrays they are: their results are the same nearby, and DistArrays.

    Parameters
    ----------
    moves : bool
        Whether elements may move, as in a sort, beyond operands that lie alike.
    """

    def of_values(function: Function) -> Function:
        def run(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if moves else unmoved():
                return function(*value_of(args), **value_of(kwargs))

        return run

    for function in many:
        TABLE[function] = of_values(function)


def composed(*many: Function) -> None:
    """Let functions of NumPy take tensors because what they are made of does."""
    COMPOSED.update(dict.fromkeys(many))


def refused(reason: str, *many: Function) -> None:
    """Let functions refuse tensors, for a reason that the error gives."""
    REFUSED.update(dict.fromkeys(many, reason))


def as_op(*many: Function) -> Callable[[Function], Function]:
    """Let functions run the one that follows when they are given tensors."""

    def register(op: Function) -> Function:
        TABLE.update(dict.fromkeys(many, op))
        return op

    return register


def differentiable(
    function: Function, *, conjugate: bool = True, moves: bool = False, takes: bool = False,
    shared: Callable[..., DistArray] | None = None, **rules: Callable[..., DistArray],
) -> Function:  # fmt: skip
    """Let a function take tensors, by a rule for each argument that may be one.

    Parameters
    ----------
    function : callable
        Its result is one DistArray.
    conjugate : bool
        Whether complex gradients go conjugated through the rules: these are then the transposed derivative of a
        holomorphic function, such as `g * y` of `exp`.  Otherwise a rule gives ∂L/∂u + i ∂L/∂v by u + iv itself.
    moves : bool
        Whether operands of unlike layouts are brought together, as in products.  Otherwise they are an error.
    takes : bool
        Whether rules may spend the gradient that they are given, to free its memory; with `conjugate=False`.
    shared : callable, optional
        A rule that runs before the others, which take what it returns in place of the gradient; with
        `conjugate=False`.  It returns an array of the result's shape.
    **rules : callable
        By the argument's name a function of DistArrays, which returns the gradient by this argument.  It takes the
        gradient of the result, and its other parameters say what it needs, and so what is saved: `y` is the result,
        `like` the `Frame` (shape, layout and grid) of the argument itself, any other the argument of the function of
        this name.  Of a list of arrays `likes` has all frames, and `i` is the place in it.  A gradient of the shape to
        which the argument was broadcast is summed over the dims that it lacks.

    Returns
    -------
    callable
        The function of tensors.
    """
    signature = _signature(function)
    every = rules if shared is None else rules | {"": shared}
    needs = {name: tuple(inspect.signature(rule).parameters)[1:] for name, rule in every.items()}
    label = name_of(function)

    def op(*args: Any, **kwargs: Any) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        refuse_out(given.get("out"))
        for name, value in given.items():
            if name not in rules and (fixed := next(filter(_wants, _flat(value)), None)) is not None:
                raise TypeError(f"{label} has no derivative by {name}; give it the value {name}.data, not {fixed!r}")
        values = {name: value_of(value) for name, value in given.items()}
        bound.arguments.update(values)
        with nullcontext() if moves else unmoved():
            y: DistArray = function(*bound.args, **bound.kwargs)
        out = Frame.of(y)

        def part(name: str, x: Tensor, likes: Any, i: int) -> Part:
            special = {"y": y, "like": Frame.of(x), "likes": likes, "i": i}
            arguments = {n: special[n] if n in special else values[n] for n in needs[name]}
            return _gradient_part(rules[name], arguments, x, out, conjugate, takes)

        inputs: list[Tensor] = []
        parts: list[Part] = []
        for name in rules:
            many = given.get(name)
            each = list(many) if isinstance(many, tuple | list) else [many]
            likes = [Frame.of(x) for x in each if isinstance(x, Tensor | DistArray)]
            for i, x in enumerate(each):
                if isinstance(x, Tensor):
                    inputs.append(x)
                    parts.append(part(name, x, likes, i) if x.node is not None else Part(_none))
        before = None
        if shared is not None and any(x.requires_grad for x in inputs):
            before = _shared_part(shared, {n: y if n == "y" else values[n] for n in needs[""]}, out)
        return record(label, y, inputs, parts, before)

    TABLE[function] = op
    return op


def _gradient_part(
    rule: Callable[..., DistArray], arguments: dict[str, Any], x: Tensor, out: Frame, conjugate: bool, takes: bool
) -> Part:  # fmt: skip
    """Return the part that gives the gradient by x, by a rule and its arguments beside the gradient of the result."""
    saved: list[Any] = []
    kept = {name: _kept(value, saved) for name, value in arguments.items()}
    like, real = Frame.of(x), x.dtype.kind != "c"

    def gradient(g: Any, *held: Block) -> Term:
        with explicit(False):
            given = {name: _given(each, held) for name, each in kept.items()}
            array = DistArray(g.pop() if takes else g, *out)
            d = conjugated(partial(rule, **given), array) if conjugate else rule(array, **given)
            return _term(d, like, real, held)

    return Part(gradient, *saved, takes=takes)


def _shared_part(rule: Callable[..., DistArray], arguments: dict[str, Any], out: Frame) -> Part:
    """Return the part that runs before the others, by a rule and its arguments beside the gradient of the result."""
    saved: list[Any] = []
    kept = {name: _kept(value, saved) for name, value in arguments.items()}

    def prepare(g: Block, *held: Any) -> Block:
        with explicit(False):
            d = rule(DistArray(g, *out), **{name: _given(each, held) for name, each in kept.items()})
            return d.redistribute(out.layout.with_partial(())).block

    return Part(prepare, *saved)


def _signature(function: Function) -> inspect.Signature:
    if not isinstance(function, np.ufunc):
        return inspect.signature(function)
    names = ("x",) if function.nin == 1 else [f"x{i + 1}" for i in range(function.nin)]
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in names])


def _none() -> None:
    """Stand for the rule of an input that wants no gradient."""


def _flat(value: Any) -> list[Any]:
    return [x for each in value for x in _flat(each)] if isinstance(value, tuple | list) else [value]


def _wants(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def value_of(value: Any) -> Any:
    """Return the value of tensors, also within lists, tuples and dicts; everything else as it is."""
    if isinstance(value, Tensor):
        return value.data
    if isinstance(value, dict):
        return {key: value_of(each) for key, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(value_of(each) for each in value)
    return value


class _Place(NamedTuple):
    """The place of an array among those saved, and its frame if it is distributed."""

    at: int
    frame: Frame | None


class _FactorPlace(NamedTuple):
    """The place of the tiles of a factorization among what is saved; what they are joined with lies behind them."""

    at: int


def _kept(value: Any, saved: list[Any]) -> Any:
    """Return a value with its arrays put into `saved`, and their places instead of them."""
    if isinstance(value, Factor):
        saved.extend(value.apart())
        return _FactorPlace(len(saved) - 2)
    if isinstance(value, DistArray):
        saved.append(value.block)
        return _Place(len(saved) - 1, Frame(value.shape, value.layout, value.grid))
    if is_array(value):
        saved.append(value)
        return _Place(len(saved) - 1, None)
    if type(value) in (tuple, list):
        return type(value)(_kept(each, saved) for each in value)
    return value


def _given(value: Any, held: tuple[Any, ...]) -> Any:
    """Undo `_kept`."""
    if isinstance(value, _FactorPlace):
        return held[value.at + 1].joined(held[value.at])
    if isinstance(value, _Place):
        block = held[value.at]
        return block if value.frame is None else DistArray(block, *value.frame)
    if type(value) in (tuple, list):
        return type(value)(_given(each, held) for each in value)
    return value


def _term(d: DistArray, like: Frame, real: bool, held: tuple[Any, ...]) -> Term:
    """Return the gradient that a rule gave as a term for its argument."""
    if real and d.dtype.kind == "c":
        d = d.real
    if d.shape == like.shape:
        block, layout = d.block, d.layout
    else:
        d = d.summed()
        block, layout = to_input(d.block, Frame.of(d), like)
    if any(block is array for array in held):
        block = block.copy()
    return block, layout
