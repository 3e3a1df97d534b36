"""Products by plans: every scheme, any groups of dims, and the words of the backward pass."""

from __future__ import annotations

import re
import tracemalloc
from itertools import product as pairs
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Grid, Layout, LayoutError, Parameter, Plan, PlanError, Tensor
from parlinalg.autograd import gradients, ops
from parlinalg.autograd.ops import product
from parlinalg.autograd.ops.product import MatrixProduct
from parlinalg.matmul.stream import buffers
from parlinalg.schemes import product_words
from tests.autograd.cases import MATRICES, agree, cut, numbers, tensor

Block = Any
A, B = numbers(5, 7), numbers(7, 6, seed=3)

#: Plans on the axes a, b and c: one for each row of the table of schemes, and groups of several dims.
PLANS = {
    "nothing cut": Plan((None,), (None,), (None,), Layout(None, None), Layout(None, None), Layout(None, None)),
    "rows": Plan(("a",), (None,), (None,), Layout("a", None), Layout(None, None), Layout("a", None)),
    "columns": Plan((None,), ("a",), (None,), Layout(None, None), Layout(None, "a"), Layout(None, "a")),
    "inner, all-reduce": Plan((None,), (None,), ("a",), Layout(None, "a"), Layout("a", None), Layout(None, None)),
    "inner, reduce-scatter": Plan((None,), (None,), ("a",), Layout(None, "a"), Layout("a", None), Layout("a", None)),
    "inner, left partial": Plan(
        (None,), (None,), ("a",), Layout(None, "a"), Layout("a", None), Layout(None, None, partial="a")
    ),
    "weights cut at rest": Plan(("a",), (None,), (None,), Layout("a", None), Layout("a", None), Layout("a", None)),
    "SUMMA": Plan(("a",), ("b",), (None,), Layout("a", "b"), Layout("a", "b"), Layout("a", "b")),
    "depth on the batch": Plan(
        (("c", "a"),), ("b",), (None,), Layout(("c", "a"), "b"), Layout("a", "b"), Layout(("c", "a"), "b")
    ),
    "depth on k": Plan(
        ("a",), ("b",), ("c",), Layout("a", ("c", "b")), Layout(("c", "a"), "b"), Layout("a", ("b", "c"))
    ),
    "cube": Plan(("a",), ("b",), ("c",), Layout("a", ("c", "b")), Layout("c", ("b", "a")), Layout(("a", "c"), "b")),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_plans(name: str, grid: Grid, serial: Grid) -> None:
    plan = PLANS[name]
    agree(
        lambda x, w: ops.matmul(x, w, plan), [A, B], [plan.x, plan.w], grid, serial,
        expected=A @ B, numeric=name == "cube",
    )  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_biases(name: str, grid: Grid, serial: Grid) -> None:
    plan, bias = PLANS[name], numbers(6)
    rest = Layout(plan.y.dims[1])

    def biased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return ops.matmul(x, w, plan, bias=b)

    if plan.y.partial:
        with pytest.raises(LayoutError, match="unsummed"):
            biased(tensor(A, grid, plan.x), tensor(B, grid, plan.w), tensor(bias, grid, rest))
        return
    agree(
        biased, [A, B, bias], [plan.x, plan.w, rest], grid, serial, expected=A @ B + bias, numeric=name == "cube"
    )  # fmt: skip


def test_biases_must_fit(serial: Grid, widest: Grid) -> None:
    plan = PLANS["nothing cut"]
    x, w = tensor(A, serial, plan.x), tensor(B, serial, plan.w)
    with pytest.raises(ValueError, match=r"bias of shape \(5,\).*\(6,\)"):
        ops.matmul(x, w, plan, bias=tensor(numbers(5), serial, Layout(None)))
    agree(lambda x, w, b: ops.matmul(x, w, bias=b), [A, B, A[0, :6]], [plan.x, plan.w, Layout(None)], serial, serial)
    axis = max(widest.sizes, key=lambda a: widest.sizes[a])
    if widest.sizes[axis] > 1:
        bias = tensor(numbers(6), widest, Layout(axis))
        with pytest.raises(LayoutError, match=r"bias is not cut as y.*\.redistribute"):
            ops.matmul(tensor(A, widest, plan.x), tensor(B, widest, plan.w), plan, bias=bias)


@pytest.mark.parametrize("keep", ["x", "w", ""])
def test_operands_gathered_again(keep: str, grid: Grid, serial: Grid) -> None:
    plan = PLANS["cube"]
    agree(lambda x, w: ops.matmul(x, w, plan, keep=keep), [A, B], [plan.x, plan.w], grid, serial, expected=A @ B)


def test_groups_of_dims(grid: Grid, serial: Grid) -> None:
    """x[p, s, u, v] w[u, v, h, e], and with a batch dim that both share."""
    x, w = numbers(2, 3, 4, 2), numbers(4, 2, 3, 2, seed=1)
    plan = Plan(
        ("a", None),
        ("b", None),
        ("c", None),
        Layout("a", None, "c", None),
        Layout("c", None, "b", None),
        Layout("a", None, "b", None),
    )
    known = np.einsum("psuv,uvhe->pshe", x, w)
    agree(lambda x, w: ops.matmul(x, w, plan), [x, w], [plan.x, plan.w], grid, serial, expected=known)
    shared = Plan(
        ("b",), ("c",), (None,), Layout("a", "b", "c"), Layout("a", "b", "c"), Layout("a", "b", "c"), b=("a",)
    )
    x, w = numbers(3, 4, 5), numbers(3, 5, 6)
    agree(lambda x, w: ops.matmul(x, w, shared), [x, w], [shared.x, shared.w], grid, serial, expected=x @ w)


def test_assigned(grid: Grid, serial: Grid) -> None:
    """`x @ w` for any layouts at rest, and transposes."""
    for first, second in pairs(MATRICES[::2], MATRICES[:2]):
        agree(lambda x, w: x @ w, [A, B], [first, second], grid, serial, expected=A @ B)
    agree(lambda x, w: x.T @ w.T, [A.T, B.T], MATRICES[:2], grid, serial, expected=A @ B)


def test_vectors_and_leading_dims(grid: Grid, serial: Grid) -> None:
    agree(lambda x, v: x @ v, [A, B[:, 0]], [Layout("a", "b"), Layout("b")], grid, serial, expected=A @ B[:, 0])
    agree(lambda v, w: v @ w, [A[0], B], [Layout("b"), Layout("a", "b")], grid, serial, expected=A[0] @ B)
    agree(lambda v, w: v @ w, [A[0], A[1]], [Layout("a"), Layout("a")], grid, serial, expected=A[0] @ A[1])
    x, w = numbers(3, 4, 7), numbers(3, 7, 2)
    agree(lambda x, w: x @ w, [x, w], [Layout("a", "b", None), Layout("a", None, "b")], grid, serial, expected=x @ w)
    agree(lambda x, w: x @ w, [x, B], [Layout("a", None, "b"), Layout("a", "b")], grid, serial, expected=x @ B)
    agree(lambda x, w: x @ w, [A, w], [Layout("a", "b"), Layout(None, "a", None)], grid, serial, expected=A @ w)


@pytest.mark.parametrize("shapes", [((1, 1), (1, 1)), ((0, 3), (3, 2)), ((2, 0), (0, 3)), ((2, 1), (1, 3))])
def test_blocks_of_size_zero(shapes: tuple[tuple[int, int], ...], grid: Grid, serial: Grid) -> None:
    for name in ("SUMMA", "cube", "inner, reduce-scatter"):
        plan, (x, w) = PLANS[name], (numbers(*s) for s in shapes)
        agree(lambda x, w: ops.matmul(x, w, plan), [x, w], [plan.x, plan.w], grid, serial, expected=x @ w)


@pytest.mark.parametrize("name", [n for n in PLANS if not PLANS[n].y.partial])
def test_words_are_those_of_the_table(name: str, grid: Grid) -> None:
    """The gradient of y is gathered once; x and w are gathered again only where they are not kept."""
    plan = PLANS[name]
    columns = product_words(plan, A.shape, B.shape, grid.sizes, grid.coords)
    for keep in ("x", "w") if name == "cube" else ("xw", ""):
        x, w = tensor(A, grid, plan.x), tensor(B, grid, plan.w)
        y = ops.matmul(x, w, plan, keep=keep)
        grad = pla.ones(y.shape, grid, y.layout.with_partial(()))
        with pla.ledger(grid) as book:
            y.backward(grad)
        want = columns["grad y"] + columns["dx"] + columns["dw"]
        want += sum(columns[operand] for operand in "xw" if operand not in keep)
        assert book.words.total() == want


def test_the_backward_pass_runs_the_plans_of_the_derivatives(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Plan] = []
    execute = product.execute

    def noted(plan: Plan, *args: Any, **options: Any) -> Block:
        ran.append(plan)
        return execute(plan, *args, **options)

    monkeypatch.setattr(product, "execute", noted)
    for plan in PLANS.values():
        x, w = tensor(A, grid, plan.x), tensor(B, grid, plan.w)
        for memory, left in ((None, "unsummed"), ("1GiB", "scattered")):
            ran.clear()
            y = pla.matmul(x, w, plan, memory=memory)
            y.backward(pla.ones(y.shape, grid, y.layout.with_partial(())))
            assert ran == [plan, getattr(plan.grad_x, left), getattr(plan.grad_w, left)]


def derivatives(plan: Plan) -> tuple[tuple[Plan, Any, Any], ...]:
    """The three products of A and B by a plan, with the shapes of their operands."""
    y = (A.shape[0], B.shape[1])
    return (plan, A.shape, B.shape), (plan.grad_x, y, B.T.shape), (plan.grad_w, A.T.shape, y)


@pytest.mark.parametrize("name", [n for n in PLANS if not PLANS[n].y.partial])
def test_streamed_products(name: str, grid: Grid, serial: Grid) -> None:
    """In the least memory that does, and in a little more: the same gradients, and the words of three products."""
    plan = PLANS[name]
    forward, of_x, of_w = (p.words(x, w, grid.sizes, grid.coords) for p, x, w in derivatives(plan))
    dy = product_words(plan, A.shape, B.shape, grid.sizes, grid.coords)["grad y"]
    x, w = tensor(A, grid, plan.x), tensor(B, grid, plan.w)
    least = 0
    try:
        ops.matmul(x, w, plan, memory=0)
    except PlanError:
        ran = (plan, plan.grad_x.scattered, plan.grad_w.scattered)
        shapes = (shapes for _, *shapes in derivatives(plan))
        kernels = [min(k.elements(1) for k in buffers(p, *of, grid)) for p, of in zip(ran, shapes, strict=True)]
        least = max(kernels) * A.itemsize
        with pytest.raises(PlanError, match=re.escape(f"memory={least - 1} is {least - 1}")):
            ops.matmul(x, w, plan, memory=least - 1)
    for memory in (least, least + 40, least + 100, "1GiB"):
        x, w = tensor(A, grid, plan.x), tensor(B, grid, plan.w)
        with pla.ledger(grid) as book:
            y = ops.matmul(x, w, plan, memory=memory)
        assert book.words.total() == forward
        gathered = MatrixProduct(plan, x, w, memory).gathers(x.data, w.data, (True, True))
        grad = pla.ones(y.shape, grid, y.layout.with_partial(()))
        with pla.ledger(grid) as book:
            y.backward(grad)
        assert book.words.total() == of_x + of_w - gathered * dy
        assert gathered or memory != "1GiB"
        agree(
            lambda x, w, memory=memory: pla.matmul(x, w, plan, memory=memory),
            [A, B], [plan.x, plan.w], grid, serial, expected=A @ B,
        )  # fmt: skip


def test_streamed_gradients_of_parameters_stay_partial(grid: Grid) -> None:
    """Over the axes that do not cut them, for the reducer to sum them in buckets."""
    plan = PLANS["rows"]
    x, w = tensor(A, grid, plan.x), Parameter(cut(B, grid, plan.w))
    with pla.no_sync(), pla.ledger(grid) as book:
        y = ops.matmul(x, w, plan, memory=0)
        y.backward(pla.ones(y.shape, grid, y.layout))
    assert not book.words.total()
    assert w.grad is not None
    assert w.grad.layout.partial == ("a",) * (grid.sizes["a"] > 1)
    np.testing.assert_allclose(w.grad.gather(), np.outer(A.sum(0), np.ones(6)), rtol=1e-12)


@pytest.mark.parametrize("name", ["SUMMA", "cube"])
def test_the_memory_given_is_kept_to(name: str, grid: Grid, backend: str, tune: Any) -> None:
    """Forward and backward: the peak beside the blocks at rest is at most 1.2 times what was given."""
    if backend != "numpy":
        return  # device memory is not traced
    tune(ranks=2, must=False, MOVE_BUFFER=1 << 11)
    plan, side = PLANS[name], 480
    a, b = numbers(side, side), numbers(side, side, seed=1)
    x, w = tensor(a, grid, plan.x), tensor(b, grid, plan.w)
    three = (plan, plan.grad_x.scattered, plan.grad_w.scattered)
    kernels = [[k for k in buffers(p, a.shape, b.shape, grid) if k.stationary] for p in three]
    memory = max(min(k.elements(24) for k in found) for found in kernels) * a.itemsize
    gathered = buffers(plan, a.shape, b.shape, grid)[0].elements(1) * a.itemsize
    for most in (memory, "1GiB"):  # communicators and BLAS buffers are made, and modules loaded
        y = ops.matmul(x, w, plan, memory=most)
        grad = pla.ones(y.shape, grid, y.layout)
        y.backward(grad)
    x.grad = w.grad = None
    peaks = []
    for run in (lambda: ops.matmul(x, w, plan, memory=memory), lambda: y.backward(grad)):
        tracemalloc.start()
        found = run()
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        y = y if found is None else found
    resting = y.block.nbytes, x.block.nbytes + w.block.nbytes
    for peak, rest in zip(peaks, resting, strict=True):
        assert peak <= 1.2 * (rest + memory) + 60_000, (peak, rest, memory)
    if grid.size > 1:
        assert memory < 0.7 * gathered
    assert x.grad is not None
    assert w.grad is not None
    np.testing.assert_allclose(x.grad.gather(), np.ones((side, side)) @ b.T, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(w.grad.gather(), a.T @ np.ones((side, side)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("keep", ["xw", "x", ""])
def test_common_memory(keep: str, grid: Grid, backend: str, tune: Any) -> None:
    """Operands that are not kept, and terms of y, meet in memory that the ranks of a node have in common."""
    for name in ("SUMMA", "cube", "weights cut at rest"):
        plan, found = PLANS[name], []
        for least in (1, 1 << 60):
            tune(ranks=2, must=backend == "numpy" and not (keep or grid.world.checked), SHARED_BYTES=least)
            x, w = tensor(A, grid, plan.x), tensor(B, grid, plan.w)
            with pla.ledger(grid) as book:
                y = ops.matmul(x, w, plan, keep=keep)
                y.backward(cut(numbers(*y.shape, seed=9), grid, y.layout))
            assert x.grad is not None
            assert w.grad is not None
            found.append((dict(book.words), y.gather(), x.grad.gather(), w.grad.gather()))
        (common, *values), (messages, *expected) = found
        assert common == messages
        for one, other in zip(values, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-13, atol=1e-13)


def test_half_precision_products_are_summed_in_float32(grid: Grid) -> None:
    import ml_dtypes

    plan = PLANS["SUMMA"]
    x, w = np.ones((2, 4000)), np.ones((4000, 2))
    for dtype in (np.float16, ml_dtypes.bfloat16):
        a, b = tensor(x.astype(dtype), grid, plan.x), tensor(w.astype(dtype), grid, plan.w)
        y = ops.matmul(a, b, plan)
        y.sum().backward()
        assert y.dtype == a.grad.dtype == b.grad.dtype == dtype  # type: ignore[union-attr]
        assert (y.gather() == np.array(4000, dtype)).all()


@pytest.mark.mpi(min_size=2)
def test_operands_must_rest_as_the_plan_says(widest: Grid) -> None:
    axis = max(widest.sizes, key=lambda a: widest.sizes[a])
    plan = Plan((axis,), (None,), (None,), Layout(axis, None), Layout(None, None), Layout(axis, None))
    x, w = tensor(A, widest, Layout(None, axis)), tensor(B, widest, plan.w)
    with pytest.raises(LayoutError) as error:
        ops.matmul(x, w, plan)
    for part in (repr(x.layout), f".redistribute({plan.x!r})"):
        assert part in str(error.value)
    partial = tensor(A, widest, Layout(None, None, partial=axis))
    with pytest.raises(LayoutError, match="not summed yet"):
        partial @ w


def test_constants_and_distributed_arrays_multiply_too(widest: Grid) -> None:
    x, w = cut(A, widest, MATRICES[0]), tensor(B, widest, MATRICES[0])
    y = x @ w
    assert isinstance(y, Tensor)
    y.sum().backward()
    assert w.grad is not None
    np.testing.assert_allclose(w.grad.gather(), np.outer(A.sum(0), np.ones(6)), rtol=1e-12)


def test_terms_of_a_weight_used_as_it_is_and_turned_lie_alike(serial: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a tied embedding, whose sum takes several times as long otherwise."""
    met: list[bool] = []
    add = gradients._sum

    def noted(a: Block, b: Block, into: bool) -> Block:
        met.extend((a.flags.c_contiguous, b.flags.c_contiguous))
        return add(a, b, into)

    monkeypatch.setattr(gradients, "_sum", noted)
    x, w = tensor(A, serial, Layout(None, None)), tensor(numbers(6, 7), serial, Layout(None, None))
    (ops.matmul(x, w.T).sum() + (w * w).sum()).backward()
    assert met
    assert all(met)
    assert w.grad is not None
    np.testing.assert_allclose(w.grad.gather(), A.sum(axis=0) + 2 * numbers(6, 7), rtol=1e-12)
