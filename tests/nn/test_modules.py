"""Modules, apart from training."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from tests.training import SIZES, every_scheme, sizes_for

L = pla.Layout
SUMMA = schemes.for_mode("2d").SCHEME


def acting(layout, grid):
    """The axes of more than one rank that cut each dim, and those over which terms are not summed."""
    dims = [tuple(a for a in axes or () if grid.sizes[a] > 1) for axes in layout.dims]
    return dims, {a for a in layout.partial if grid.sizes[a] > 1}


@pytest.mark.parametrize("name", every_scheme())
def test_linear_is_x_w_plus_b(name, make_grid, world):
    scheme = every_scheme()[name]
    grid = make_grid(sizes_for(scheme, world.size, 1)[0])
    for kind in ("expand", "contract"):
        layer = nn.Linear(7, 11, scheme, grid, kind, dtype="float64", seed=1, bias_init=nn.init.ones)
        state = layer.state_dict()
        for lead in [(), (13,), (5, 3), (5, 3, 2)]:
            plan = layer.plan(len(lead))
            x = np.random.default_rng(0).normal(size=(*lead, 7))
            y = layer(pla.Tensor(pla.distribute(x, grid, plan.x)))
            np.testing.assert_allclose(y.gather(), x @ state["weight"] + state["bias"], rtol=1e-13, atol=1e-13)
            assert acting(y.layout, grid) == acting(plan.y, grid)
            assert layer.weight.layout == plan.w


def test_linear_with_groups_of_features(make_grid, world):
    grid = make_grid({"r": 1, "c": world.size})
    layer = nn.Linear((2, 3), (5, 4), SUMMA, grid, dtype="float64", seed=1)
    x = np.random.default_rng(0).normal(size=(6, 2, 3))
    y = layer(pla.Tensor(pla.distribute(x, grid, layer.plan(1).x)))
    np.testing.assert_allclose(y.gather(), np.tensordot(x, layer.weight.gather(), 2), rtol=1e-13, atol=1e-13)


def test_names_seeds_and_repeated_initialization(make_grid, world):
    grid = make_grid({"r": world.size, "c": 1})
    model = nn.Sequential(nn.MLP(SIZES, SUMMA, grid), nn.Linear(5, 5, SUMMA, grid, bias=False))
    with pytest.raises(pla.ConfigError, match=r"0\.0\.weight.*initialize"):
        list(model.parameters())
    bytes_before = model.nbytes
    model.initialize(seed=3, prefix="stage")
    assert [n for n, _ in model.named_parameters()] == ["0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias", "1.weight"]
    assert [p.name for p in model.parameters()][-1] == "stage.1.weight"
    assert model.nbytes == bytes_before == sum(p.block.nbytes for p in model.parameters())
    same = nn.Linear(5, 5, SUMMA, grid, bias=False, seed=3, name="stage.1")
    assert np.array_equal(same.weight.gather(), model[1].weight.gather())
    held = list(model.parameters())
    model.initialize(seed=4, prefix="stage")
    assert all(p is q for p, q in zip(held, model.parameters(), strict=True))
    assert not np.array_equal(same.weight.gather(), model[1].weight.gather())


def test_state_moves_from_grid_to_grid(make_grid, world):
    a = nn.MLP(SIZES, SUMMA, make_grid({"r": 1, "c": world.size}), seed=1)
    b = nn.MLP(SIZES, SUMMA, make_grid({"r": world.size, "c": 1}), seed=2)
    b.load_state_dict(a.state_dict())
    assert all(np.array_equal(v, b.state_dict()[n]) for n, v in a.state_dict().items())
    state = a.state_dict()
    state["x"] = state.pop("0.bias")
    state["2.bias"] = np.zeros(3)
    with pytest.raises(
        pla.ConfigError, match=r"missing: 0.bias; unexpected: x; misshapen: 2.bias \(3,\) instead of \(5,\)"
    ):
        b.load_state_dict(state)


@pytest.mark.parametrize(
    ("bias", "says"),
    [
        (np.array(["a", "b", "c", "d", "e"]), "no real numbers: 2.bias of <U1"),
        (np.ones(5, complex), "no real numbers: 2.bias of complex128"),
        ([[1], [2, 3]], "2.bias is not an array"),
    ],
)
def test_a_state_that_is_no_numbers_changes_nothing(bias, says, make_grid, world):
    model = nn.MLP(SIZES, SUMMA, make_grid({"r": 1, "c": world.size}), seed=1)
    before = model.state_dict()
    wrong = {name: value + 1 for name, value in before.items()}
    if world.rank == world.size - 1:
        wrong["2.bias"] = bias
    with pytest.raises(pla.ConfigError, match=says):
        model.load_state_dict(wrong)
    assert all(np.array_equal(value, before[name]) for name, value in model.state_dict().items())
    mixed = {"0.bias": before["0.bias"].astype(ml_dtypes.bfloat16), "2.bias": [1, 0, 1, 0, 1]}
    model.load_state_dict({**before, **mixed})
    assert model.state_dict()["2.bias"].tolist() == [1, 0, 1, 0, 1]


def test_dropout_by_calls_steps_and_modes(make_grid, world):
    grid = make_grid({"a": world.size})
    model = nn.Sequential(nn.Dropout(0.25), nn.Dropout(0.25)).initialize(1)
    ones = pla.Tensor(pla.ones((40, 30), grid, L("a", None)), requires_grad=True)

    def masks():
        return [model[0](ones).gather(), model[0](ones).gather(), model[1](ones).gather()]

    with nn.training_step(3):
        first = masks()
    with nn.training_step(3):
        again = masks()
    with nn.training_step(4):
        later = masks()
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    distinct = [*first, *later]
    assert not any(np.array_equal(a, b) for i, a in enumerate(distinct) for b in distinct[:i])
    assert set(np.unique(first[0])) == {0, 1 / 0.75}
    assert abs(first[0].mean() - 1) < 0.05
    assert not np.array_equal(model[0](ones).gather(), model[0](ones).gather())
    with nn.training_step(3):
        y = model[0](ones)
    y.backward(pla.ones((40, 30), grid, L("a", None)))
    assert np.array_equal(ones.grad.gather(), first[0])
    assert model.eval()(ones) is ones
    assert model.train()[0].training


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(), (5, 3)])
def test_dropout_keeps_the_dtype(dtype, shape, make_grid, world):
    grid = make_grid({"a": world.size})
    layout = L("a", None) if shape else L()
    x = pla.Tensor(pla.ones(shape, grid, layout, dtype), requires_grad=True)
    drop = nn.Dropout(0.5).initialize(3)
    y = drop(x)
    assert y.dtype == dtype
    assert set(np.unique(y.gather().astype(float))) <= {0.0, 2.0}
    y.backward(pla.ones(shape, grid, layout, dtype))
    assert x.grad.dtype == dtype
    assert np.array_equal(x.grad.gather(), y.gather())


@pytest.mark.serial
def test_initializers_have_their_scale():
    with pla.Grid({"r": 1, "c": 1}) as grid:
        for init, std in [
            (nn.init.Kaiming(), math.sqrt(2 / 300)), (nn.init.Kaiming(distribution="normal"), math.sqrt(2 / 300)),
            (nn.init.Xavier(), math.sqrt(2 / 500)), (nn.init.Xavier(distribution="normal"), math.sqrt(2 / 500)),
            (nn.init.Normal(0.3), 0.3), (nn.init.Uniform(-1, 1), 1 / math.sqrt(3)), (nn.init.zeros, 0.0),
        ]:  # fmt: skip
            w = nn.Linear(300, 200, SUMMA, grid, weight_init=init, seed=1).weight.block
            assert abs(w.std() - std) <= 0.02 * std
            assert abs(w.mean()) <= 0.02 * std


@pytest.mark.serial
def test_what_is_wrong_is_said():
    with pla.Grid({"r": 1, "c": 1}) as grid:
        layer = nn.Linear(4, 3, SUMMA, grid)
        x = pla.Tensor(pla.zeros((2, 4), grid, L("r", "c"), np.float32))
        with pytest.raises(pla.ConfigError, match=r"initialize\(seed\)"):
            layer(x)
        with pytest.raises(pla.LayoutError, match=r"\[\.\.\., 4\], not \(2, 5\)"):
            layer(pla.Tensor(pla.zeros((2, 5), grid, L("r", "c"))))
        with pytest.raises(pla.ConfigError, match="initialize"):
            nn.Dropout(0.1)(x)
        with pytest.raises(pla.ConfigError, match="below 1, not 1"):
            nn.Dropout(1)
        with pytest.raises(pla.ConfigError, match="'gelu'"):
            nn.MLP((4, 3, 2), SUMMA, grid, "swish")
        with pytest.raises(pla.ConfigError, match="at least"):
            nn.MLP((4,), SUMMA, grid)
        with pytest.raises(pla.ConfigError, match=r"a size of an MLP is a whole number of at least 1, not 2\.5"):
            nn.MLP((4, 2.5, 4), SUMMA, grid)
        with pytest.raises(pla.ConfigError, match=r"layer's out_features is a whole number, not 2\.5"):
            nn.Linear(4, (2, 2.5), SUMMA, grid)
        with pytest.raises(pla.ConfigError, match=r"dropout's p is a number .* below 1, not 'x'"):
            nn.Dropout("x")
        with pytest.raises(pla.ConfigError, match="eps is a number of at least 0, not -1"):
            nn.LayerNorm(4, SUMMA, grid, -1)
        with pytest.raises(AttributeError, match="no attribute 'wieght'"):
            _ = layer.wieght


@pytest.mark.serial
def test_a_module_without_super_init_is_told():
    class Bad(nn.Module):
        def __init__(self):
            self.inner = nn.ReLU()

    with pytest.raises(pla.ConfigError, match="super"):
        Bad()
