"""Plans as data: roles, layouts at work, the two products of the backward pass, words, and what is refused."""

from __future__ import annotations

import pytest

from parlinalg.errors import PlanError
from parlinalg.layout import Layout, coordinates
from parlinalg.plan import Plan

pytestmark = pytest.mark.serial
SUMMA = Plan(m=("r",), n=("c",), k=(None,), x=Layout("r", "c"), w=Layout("r", "c"), y=Layout("r", "c"))
SPLIT_K = Plan(
    m=("r",), n=("c",), k=("d",), x=Layout("r", ("d", "c")), w=Layout(("d", "r"), "c"), y=Layout("r", ("c", "d"))
)
BATCH = Plan(
    b=("d",), m=("r",), n=("c",), k=(None,),
    x=Layout("d", "r", "c"), w=Layout("d", "r", "c"), y=Layout("d", "r", "c"),
)  # fmt: skip


def test_layouts_at_work():
    assert (SUMMA.x_work, SUMMA.w_work, SUMMA.y_work) == (Layout("r", None), Layout(None, "c"), Layout("r", "c"))
    assert SPLIT_K.x_work == Layout("r", "d")
    assert SPLIT_K.y_work == Layout("r", "c", partial="d")
    assert BATCH.y_work == Layout("d", "r", "c")


@pytest.mark.parametrize("plan", [SUMMA, SPLIT_K, BATCH])
def test_backward_products_are_the_same_product_with_roles_permuted(plan):
    dx, dw = plan.grad_x, plan.grad_w
    assert (dx.m, dx.n, dx.k, dx.b) == (plan.m, plan.k, plan.n, plan.b)
    assert (dw.m, dw.n, dw.k, dw.b) == (plan.k, plan.n, plan.m, plan.b)
    assert dx.y == plan.x
    assert dw.y == plan.w
    assert dx.x == dw.w == plan.y
    assert dx.x_work.with_partial(()) == plan.y_work.with_partial(())
    assert dx.grad_x.y == plan.y  # the gradient of the gradient is the product again
    assert plan.transposed().transposed() == plan


def test_the_gradient_of_an_unsummed_result_is_whole():
    plan = Plan(
        m=("r",), n=(None,), k=("c",), x=Layout("r", "c"), w=Layout("c", None), y=Layout("r", None, partial="c")
    )
    assert plan.grad_x.x == plan.grad_w.w == Layout("r", None)


def test_what_is_left_of_the_result():
    """Nothing of it moved; or cut as it rests, and not summed over axes that do not cut it there."""
    assert SUMMA.unsummed is SUMMA
    assert SPLIT_K.unsummed.y == SPLIT_K.y_work
    assert SPLIT_K.scattered == SPLIT_K
    dw = Plan(
        m=(("d", "r"),), n=("c",), k=(None,), x=Layout(("d", "r"), "c"), w=Layout("r", "c"), y=Layout(("d", "r"), "c")
    ).grad_w
    assert dw.y_work == Layout(None, "c", partial=("d", "r"))
    assert dw.scattered.y == Layout("r", "c", partial="d")
    sizes, at, x, w = {"d": 2, "r": 2, "c": 2}, {"d": 1, "r": 0, "c": 1}, (8, 16), (16, 12)
    assert dw.unsummed.words(x, w, sizes, at) == dw.words(x, w, sizes, at) - 8 * 6 // 2 - 2 * (4 * 6 // 2)
    assert dw.scattered.words(x, w, sizes, at) == dw.words(x, w, sizes, at) - 2 * (4 * 6 // 2)


def test_shapes():
    assert BATCH.result_shape((2, 3, 4), (2, 4, 5)) == (2, 3, 5)
    with pytest.raises(ValueError, match=r"shapes \(3, 4\) and \(5, 6\) do not multiply.*\(4,\) and \(5,\)"):
        SUMMA.result_shape((3, 4), (5, 6))
    with pytest.raises(ValueError, match="does not fit a plan of 0 batch dims, 1 m, 1 k and 1 n"):
        SUMMA.result_shape((2, 3, 4), (4, 5))


def test_several_dims_a_group():
    plan = Plan(
        m=("r", None), n=("c", None), k=(None,),
        x=Layout("r", None, "c"), w=Layout("r", "c", None), y=Layout("r", None, "c", None),
    )  # fmt: skip
    assert plan.w_transpose == (1, 2, 0)
    assert plan.x_transpose == (2, 0, 1)
    assert plan.grad_x.w == Layout("c", None, "r")
    assert plan.grad_w.x == Layout("c", "r", None)
    assert plan.grad_w.y == plan.w


def test_words_are_those_of_its_three_moves():
    sizes = {"d": 2, "r": 2, "c": 2}
    m, n, k = 8, 12, 16
    for at in coordinates(("d", "r", "c"), sizes):
        assert SPLIT_K.words((m, k), (k, n), sizes, at) == m * k // 8 + k * n // 8 + m * n // 8
        assert SUMMA.words((m, k), (k, n), sizes, at) == m * k // 4 + k * n // 4
        assert BATCH.words((2, m, k), (2, k, n), sizes, at) == m * k // 4 + k * n // 4


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"n": ("r",)}, "axis 'r' cuts both m and n at work; an axis cuts at most one"),
        ({"x": Layout("r")}, r"x = Layout\('r'\) has 1 dims, but this plan's x\[b, m, k\] has 2"),
        ({"x": Layout("r", None, partial="c")}, "rests unsummed; a product takes summed operands"),
        ({"y": Layout("r", None, partial="c")}, r"partial over \['c'\], which do not cut k at work"),
    ],
)
def test_contradictions_are_refused(change, sentence):
    parts = {"m": ("r",), "n": ("c",), "k": (None,), "x": SUMMA.x, "w": SUMMA.w, "y": SUMMA.y, **change}
    with pytest.raises(PlanError, match=sentence):
        Plan(**parts)
