"""Parameter groups: each is updated as an optimizer of its own would, wherever parameters and states lie."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, optim, schemes
from parlinalg.offload import DiskStates, HostStates
from parlinalg.optim.schedules import Cosine
from parlinalg.parallel import GradientReducer, ZeRO
from tests.models import alone, loss_of, make

STEPS = 4  # eps: gradients of biases of keys are zero, and Adam would divide rounding by rounding
KINDS = {
    "sgd": (optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"lr": 0.03, "momentum": 0.0, "weight_decay": 0.1}),
    "adam": (optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-5}, {"weight_decay": 0.0, "eps": 1e-4}),
    "adamw": (optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-5}, {"betas": (0.8, 0.95), "lr": 0.002}),
    "lamb": (optim.LAMB, {"lr": 0.01, "eps": 1e-5}, {"lr": 0.03, "weight_decay": 0.3}),
    "lars": (optim.LARS, {"lr": 1.0, "weight_decay": 0.1}, {"momentum": 0.5, "trust": 0.1}),
}


def halves(model):
    """Every other parameter, so that groups never lie side by side."""
    held = list(model.parameters())
    return held[::2], held[1::2]


def trained(kind, grid, scheme, *, zero=0, groups=True, dtype="float64", place=None, master=False):
    """The parameters after some steps: of one optimizer with two groups, or of two optimizers."""
    if zero == 3:
        scheme = scheme.with_weights_cut("data")
    model = make("gpt", scheme, grid, dtype=dtype)
    GradientReducer(model.parameters(), [ZeRO(zero)] if zero else [], 2000, 4000)
    make_one, first, second = KINDS[kind]
    one, two = halves(model)
    if groups:
        made = [make_one([{"params": one}, {"params": two, **second}], **first, master=master)]
        if place is not None:
            made[0].place(place)
    else:
        made = [make_one(one, **first, master=master), make_one(two, **{**first, **second}, master=master)]
    rates = [optim.Scheduler(each, Cosine(9, 0.1)) for each in made]
    for step in range(STEPS):
        loss_of(model, step).backward()
        for each in made:
            each.step(0.5)
        for each, rate in zip(made, rates, strict=True):
            each.zero_grad()
            rate.step()
    return model.state_dict(), made


def check(got, want, close=1e-12):
    for name, value in want.items():
        scale = max(1.0, float(np.abs(value).max()))
        np.testing.assert_allclose(
            got[name].astype(float), value.astype(float), rtol=0, atol=close * scale, err_msg=name
        )


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_is_updated_as_by_an_optimizer_of_its_own(kind, zero, make_grid, world):
    line = schemes.for_mode("1d").SCHEME
    tensor = 2 if world.size % 2 == 0 else 1
    scheme = line.with_data("data")
    grid = make_grid({"data": world.size // tensor, line.axes[0]: tensor})
    got, _ = trained(kind, grid, scheme, zero=zero)
    with alone(world) as one:
        want, _ = trained(kind, one, schemes.discover()["serial"].SCHEME, groups=False)
    check(got, want)


def test_masters_and_states_put_away(make_grid, world, folder):
    grid, scheme = make_grid({"data": world.size}), schemes.discover()["data"].SCHEME
    with alone(world) as one:
        serial = schemes.discover()["serial"].SCHEME
        want, _ = trained("adamw", one, serial, groups=False)
        half, _ = trained("adamw", one, serial, groups=False, dtype="bfloat16", master=True)
    for place in (DiskStates(folder, tile=512), HostStates(tile=512)):
        got, (optimizer,) = trained("adamw", grid, scheme, zero=1, place=place)
        check(got, want)
        place.close()
        del optimizer
    got, _ = trained("adamw", grid, scheme, dtype="bfloat16", master=True)
    # Two trainings in bfloat16 whose sums are in other orders, as cuBLAS has them by where operands lie, differ as each
    # differs from float64: Adam divides by the size of the gradient, so that roundings of small ones move all the way.
    names = list(want)
    right, half, got = (np.concatenate([x[n].astype(float).ravel() for n in names]) for x in (want, half, got))
    rounding, difference = np.abs(half - right), np.abs(got - half)
    assert difference.max() <= 2 * rounding.max()
    assert difference.mean() <= 2 * rounding.mean()


def pair(grid, seed=0):
    rng = np.random.default_rng(seed)
    return [
        pla.Parameter(pla.distribute(rng.normal(size=shape), grid, pla.Layout.replicated(len(shape))), name)
        for name, shape in [("a.weight", (3, 4)), ("a.bias", (4,)), ("norm.weight", (4,)), ("b.bias", (2, 2))]
    ]


def test_groups_are_read_written_and_scheduled(make_grid, world):
    w, b, n, c = pair(make_grid({"a": world.size}))
    optimizer = optim.AdamW([{"params": [("w", w)], "lr": 0.5}, {"params": iter([b, b])}], lr=0.1, weight_decay=0.3)
    first, second = optimizer.param_groups
    assert (first["params"], second["params"], optimizer.parameters) == ([w], [b], [w, b])
    assert first == {"params": [w], "lr": 0.5, "weight_decay": 0.3, "betas": (0.9, 0.999), "eps": 1e-8}
    assert optimizer.lr == 0.5
    rate = optim.Scheduler(optimizer, lambda step: 1 / (1 + step))
    optimizer.add_param_group({"params": n, "lr": 0.2})
    rate.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.25, 0.05, 0.1]
    optimizer.weight_decay = 0.0
    second["betas"] = (0.5, 0.5)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.0] * 3
    other = optim.AdamW([{"params": [w]}, {"params": [b]}, {"params": [n]}])
    other.load_state_dict(optimizer.state_dict())
    assert other.options() == optimizer.options()
    again = optim.Scheduler(other, lambda step: 1.0)
    again.load_state_dict(rate.state_dict())
    assert [g["lr"] for g in other.param_groups] == [0.5, 0.1, 0.2]
    assert optim.AdamW([("c", c), ("w", w)]).parameters == [c, w]
    assert optim.SGD([{"params": []}, {"params": [w]}], 0.1).parameters == [w]


def test_a_group_added_later_starts_from_zeros(make_grid, world):
    grid = make_grid({"a": world.size})
    (w, b, *_), (v, d, *_) = pair(grid), pair(grid)
    joined, one, two = optim.Adam([w], 0.1), optim.Adam([v], 0.1), optim.Adam([d], 0.3)
    for step in range(3):
        if step == 1:
            joined.add_param_group({"params": [b], "lr": 0.3})
        for p in (w, b, v, d):
            p.grad = pla.distribute(np.cos(np.arange(p.size) + step).reshape(p.shape), grid, p.layout)
        for each in (joined, one):
            each.step()
        if step >= 1:
            two.steps = step
            two.step()
    assert np.array_equal(w.gather(), v.gather())
    assert np.array_equal(b.gather(), d.gather())


def test_no_decay_in_one_line(make_grid, world):
    w, b, n, c = pair(make_grid({"a": world.size}))

    def split(given, **options):
        return [[p.name for p in g["params"]] for g in optim.decay_groups(given, 0.1, **options)]

    assert split([w, b, n, c]) == [["a.weight"], ["a.bias", "norm.weight", "b.bias"]]
    assert split([("x", w), ("y", b)]) == [["a.weight"], ["a.bias"]]
    assert split([w, b, n, c], no_decay=["norm"]) == [["a.weight", "a.bias", "b.bias"], ["norm.weight"]]
    assert split([w, b, n, c], no_decay=["*.bias", "a."]) == [["norm.weight"], ["a.weight", "a.bias", "b.bias"]]
    assert split([b]) == [[], ["a.bias"]]
    groups = optim.SGD(optim.decay_groups([w, b], 0.1, lr=0.5), lr=0.2).param_groups
    assert [(g["weight_decay"], g["lr"]) for g in groups] == [(0.1, 0.5), (0.0, 0.5)]


@pytest.mark.serial
def test_what_is_wrong_is_told():
    with pla.Grid({"a": 1}) as grid:
        w, b, n, _ = pair(grid)
        for given, words in [
            ([{"params": [w]}, {"params": [b, w]}], r"'a\.weight' is in the parameter groups 0 and 1: list it in one"),
            ([{"params": [w], "weight_decy": 0.0}],
             r"unknown option 'weight_decy' \(did you mean 'weight_decay'\?\): .* lr, weight_decay, betas, eps$"),
            ([{"params": [w], "momentum": 0.0}], "unknown option 'momentum'"),
            ([{"lr": 1}], "parameter group 0 has no 'params'"),
            ([{"params": [w]}, b], "parameter group 1 is a Parameter among dicts"),
            ([w, {"params": [b]}], "parameter group 0 is a Parameter among dicts"),
            ({"params": [w]}, "not one dict"),
            (w, "not one Parameter"),
            ([{"params": {w, b}}], "listed in the same order on all ranks"),
            ([{"params": []}], "at least one parameter"),
            ([{"params": [3]}], "takes Parameters.*, not int"),
            ([{"params": [w], "lr": -1}], "lr is at least 0, not -1"),
            ([{"params": [w], "betas": (0.9, 1)}], "beta2 is at least 0 and below 1, not 1"),
            ([{"params": [w], "betas": 0.9}], r"betas are two numbers, such as \(0\.9, 0\.999\), not 0\.9"),
        ]:  # fmt: skip
            with pytest.raises(pla.ConfigError, match=words):
                optim.AdamW(given)
        with pytest.raises(pla.ConfigError, match="momentum above 0"):
            optim.SGD([{"params": [w], "momentum": 0.0}, {"params": [b]}], 0.1, 0.9, nesterov=True)
        for wrong, said in [
            ("norm", r"\['norm'\], not 'norm'"), ([3], r"\['bias'\], not \[3\]"), (3, r"\['bias'\], not 3"),
            (["bias", ""], r"\['bias'\], not \['bias', ''\]"), (True, r"\['bias'\], not True"),
            (iter(["bias"]), r"\['bias'\], not <list_iterator.*"),
        ]:  # fmt: skip
            with pytest.raises(pla.ConfigError, match=f"^no_decay is a list of parts of names, such as {said}$"):
                optim.decay_groups([w], 0.1, no_decay=wrong)
        with pytest.raises(pla.ConfigError, match=r"no_decay has 'embed', which is in no .* 'a\.bias'$"):
            optim.decay_groups([w, b], 0.1, no_decay=["bias", "embed"])
        optimizer = optim.AdamW([{"params": [w]}, {"params": [b]}])
        with pytest.raises(pla.ConfigError, match="groups 1 and 2"):
            optimizer.add_param_group({"params": [b]})
        rate = optim.Scheduler(optimizer, Cosine(3))
        state = optimizer.state_dict()
        for other, words in [
            ([{"params": [w, b]}], "of 2 parameter groups, and this optimizer has 1"),
            (
                [{"params": [b]}, {"params": [w]}],
                r"other parameters in group 0 than this optimizer: a\.bias, a\.weight",
            ),
        ]:
            with pytest.raises(pla.ConfigError, match=words):
                optim.AdamW(other).load_state_dict(state)
        with pytest.raises(pla.ConfigError, match="with 2 parameter groups, and this one has 1"):
            optim.Scheduler(optim.AdamW([w, n]), Cosine(3)).load_state_dict(rate.state_dict())


@pytest.mark.serial
def test_norms_of_a_model_do_not_decay():
    with pla.Grid({"a": 1}) as grid:
        model = make("llama", schemes.discover()["serial"].SCHEME, grid)
        decayed, others = optim.decay_groups(model, 0.1)
        assert all(p.ndim > 1 for p in decayed["params"])
        norms = [p for m in model.modules() if isinstance(m, nn.RMSNorm) for p in m.parameters()]
        assert {id(p) for p in norms} <= {id(p) for p in others["params"]}


@pytest.mark.serial
def test_arguments_that_no_optimizer_has(make_grid):
    model = make("gpt", schemes.discover()["serial"].SCHEME, make_grid({"axis": 1}))
    for kind, _, _ in KINDS.values():
        with pytest.raises(TypeError, match=f"{kind.__name__} has no argument 'masters'"):
            kind(model.parameters(), lr=0.1, masters=True)
