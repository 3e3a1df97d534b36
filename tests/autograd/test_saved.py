"""Arrays saved for the backward pass: which, for which part of a rule, and what hooks make of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Grid, Layout, Parameter, Plan, Tensor
from parlinalg.autograd import Part, ops, recompute, record, saved_arrays_hooks, start_walk
from parlinalg.autograd.rule import memory
from parlinalg.autograd.saved import saved
from tests.autograd.cases import cut, numbers, tensor
from tests.closures import arrays_held, none_held

X, W, V = numbers(6, 5), numbers(5, 4), numbers(4)
ROWS = Plan((("a", "b"),), (None,), (None,), Layout(("a", "b"), None), Layout(None, None), Layout(("a", "b"), None))


class Hooks:
    """Packs every array as a number."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self.unpacked: list[int] = []

    def pack(self, array: Any) -> int:
        self.arrays.append(array)
        return len(self.arrays) - 1

    def unpack(self, number: int) -> Any:
        self.unpacked.append(number)
        return self.arrays[number]

    def of(self, array: Any) -> list[int]:
        """The numbers of views of an array's memory."""
        return [i for i, a in enumerate(self.arrays) if memory(a) is memory(array)]


def loss_of(x: Tensor, w: Parameter, v: Parameter) -> Tensor:
    y = ops.tanh(ops.matmul(x, w, ROWS)) * v
    return ops.softmax(ops.layer_norm(y, v)).sum() + (ops.maximum(y, 2 * y) / (y * y + 1)).sum()


def made(grid: Grid) -> tuple[Tensor, Parameter, Parameter]:
    w, v = Parameter(cut(W, grid, Layout(None, None)), "w"), Parameter(cut(V, grid, Layout(None)), "v")
    return tensor(X, grid, ROWS.x), w, v


def gradients(*leaves: Tensor) -> list[bytes]:
    return [leaf.grad.gather().tobytes() for leaf in leaves if leaf.grad is not None]


def test_saved_arrays_go_through_hooks(grid: Grid) -> None:
    """Each once a rule, when it is saved and when it is needed; blocks of parameters do not."""
    leaves = made(grid)
    loss_of(*leaves).backward()
    want = gradients(*leaves)
    x, w, v = leaves = made(grid)
    hooks = Hooks()
    with saved_arrays_hooks(hooks.pack, hooks.unpack):
        loss = loss_of(*leaves)
    assert len(hooks.arrays) > 10
    assert not hooks.unpacked
    assert len(hooks.of(x.block)) == 1
    assert not hooks.of(w.block)
    assert not hooks.of(v.block)
    assert sum(row.nbytes for row in saved(loss)) == 0, "nothing is in memory for the tape itself"
    loss.backward()
    assert sorted(hooks.unpacked) == list(range(len(hooks.arrays)))
    assert gradients(*leaves) == want


def test_what_pack_gives_is_what_is_kept(widest: Grid) -> None:
    x = tensor(X, widest, Layout(None, None))
    with saved_arrays_hooks(lambda a: a.astype("float32"), lambda a: a.astype("float64")):
        y = ops.exp(x)
        y = y * y
    assert [(row.op, row.nbytes) for row in saved(y)] == [("exp", 4 * y.size), ("multiply", 4 * y.size)]
    y.backward(pla.ones(X.shape, widest, y.layout))
    np.testing.assert_allclose(x.grad.gather(), 2 * np.exp(2 * X), rtol=1e-6)  # type: ignore[union-attr]


def test_the_innermost_hooks_count_and_none_where_nothing_is_recorded(widest: Grid) -> None:
    x, outer, inner = tensor(X, widest, Layout(None, None)), Hooks(), Hooks()
    with saved_arrays_hooks(outer.pack, outer.unpack):
        y = ops.exp(x)
        with saved_arrays_hooks(inner.pack, inner.unpack):
            z = ops.sin(y)
        with pla.no_grad():
            ops.exp(z)
        ops.exp(x.detach())
    assert [len(outer.arrays), len(inner.arrays)] == [1, 1]
    z.sum().backward(retain=True)
    z.sum().backward()
    assert [outer.unpacked, inner.unpacked] == [[0], [0]], "once, also of several backward passes"
    np.testing.assert_allclose(x.grad.gather(), 2 * np.exp(X) * np.cos(np.exp(X)))  # type: ignore[union-attr]


def test_arrays_that_only_parameters_need_wait_for_them(grid: Grid) -> None:
    """x is saved for the gradient of w alone, and not needed before that is computed."""
    hooks, (x, w, v) = Hooks(), made(grid)
    x = ops.exp(x)
    with saved_arrays_hooks(hooks.pack, hooks.unpack):
        y = ops.tanh(ops.matmul(x, w, ROWS) + v)
    (number,) = hooks.of(x.block)
    walk = start_walk(y.sum(), later=True)
    assert number not in [each.value for each in walk.upcoming()]
    walk.run()
    assert hooks.unpacked
    assert number not in hooks.unpacked
    assert number in [value for value in walk.saved() if isinstance(value, int)]
    walk.run_parameters()
    assert number in hooks.unpacked
    assert not list(walk.saved())


def test_inputs_without_a_gradient_keep_nothing(widest: Grid) -> None:
    x, c = tensor(X, widest, Layout(None, None)), tensor(X, widest, Layout(None, None), wants=False)
    y = x * c
    assert y.node is not None
    assert [memory(a) is memory(c.block) for a in y.node.saved()] == [True]
    w = Parameter(cut(W, widest, Layout(None, None)))
    y = ops.matmul(tensor(X, widest, ROWS.x, wants=False), w, ROWS)
    assert [(row.op, row.nbytes) for row in saved(y)] == [("matmul", y.grid.block_shape(ROWS.x, X.shape)[0] * 5 * 8)]


def test_a_walk_says_what_it_will_need_in_order(grid: Grid) -> None:
    hooks, leaves = Hooks(), made(grid)
    with saved_arrays_hooks(hooks.pack, hooks.unpack):
        loss = loss_of(*leaves)
    walk = start_walk(loss)
    coming = [each.value for each in walk.upcoming()]
    walk.run()
    assert list(dict.fromkeys(coming)) == hooks.unpacked
    assert not list(walk.upcoming())


def test_what_is_computed_again_saves_its_inputs(grid: Grid) -> None:
    """Also those within containers; its own arrays are not packed, since they are needed at once."""

    def function(pair: tuple[Tensor, Tensor], scale: Any, *, more: dict[str, Any]) -> Tensor:
        x, y = pair
        return ops.exp(x * y) * scale + more["bias"]

    def run(again: bool) -> tuple[Tensor, list[bytes]]:
        x, y = tensor(X, grid, ROWS.x), tensor(2 * X, grid, ROWS.x)
        given = (ops.sin(x), y), Tensor(cut(X, grid, ROWS.x)), {"bias": cut(X, grid, ROWS.x), "number": 3}
        z = recompute(function, *given[:2], more=given[2]) if again else function(*given[:2], more=given[2])
        z.sum().backward(retain=True)
        return z, gradients(x, y)

    hooks = Hooks()
    with saved_arrays_hooks(hooks.pack, hooks.unpack):
        z, found = run(again=True)
    assert found == run(again=False)[1]
    assert len(hooks.arrays) == 1 + 4  # of sin, and the inputs
    z, _ = run(again=True)
    local = int(np.prod(grid.block_shape(ROWS.x, X.shape)))
    assert {row.op: row.nbytes for row in saved(z)} == ({"sin": 8 * local, "recompute": 4 * 8 * local} if local else {
        "sin": 0, "recompute": 0})  # fmt: skip


def test_an_array_in_a_closure_is_found(widest: Grid) -> None:
    """The check that all tests of operations run under: of arrays, also in containers and tensors."""
    x = tensor(X, widest, Layout(None, None))
    block, rest = x.block, x.layout
    for rule in (lambda g: (g * block, rest), lambda g, held={"x": [x]}: (g * held["x"][0].block, rest)):
        assert list(arrays_held(rule)) == [block]
        with none_held(), pytest.raises(AssertionError, match=r"planted: .* holds an array of shape"):
            record("planted", x.data * x.data, [x], [rule])
    with none_held():
        record("right", x.data * x.data, [x], [Part(lambda g, block: (g * block, rest), block)])
