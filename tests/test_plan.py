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


def test_several_dims_a_group():
    plan = Plan(
        m=("r", None), n=("c", None), k=(None,),
        x=Layout("r", None, "c"), w=Layout("r", "c", None), y=Layout("r", None, "c", None),
    )  # fmt: skip
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
