"""Lists and dicts of modules, and plain ones that are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from tests.training import every_scheme, sizes_for

SERIAL = schemes.discover()["serial"].SCHEME


class Net(nn.Module):
    """Members in lists and dicts, called in an order of its own."""

    def __init__(self, scheme, grid):
        super().__init__()
        own = {"scheme": scheme, "grid": grid, "dtype": "float64"}
        self.steps = nn.ModuleList(nn.Linear(6, 6, kind=kind, **own) for kind in ("expand", "contract"))
        self.heads = nn.ModuleDict({"act": nn.GELU(), "out": nn.Linear(6, 6, kind="contract", **own)})
        self.heads["in"] = nn.Linear(6, 6, **own)

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return self.heads["out"](self.heads["act"](self.heads["in"](x)))


NAMES = ["steps.0.weight", "steps.0.bias", "steps.1.weight", "steps.1.bias", "heads.out.weight", "heads.out.bias",
         "heads.in.weight", "heads.in.bias"]  # fmt: skip


@pytest.mark.parametrize("name", every_scheme())
def test_members_are_named_computed_and_saved(name, make_grid, world):
    scheme = every_scheme()[name]
    net = Net(scheme, make_grid(sizes_for(scheme, world.size, 1)[0])).initialize(seed=2)
    assert [n for n, _ in net.named_parameters()] == NAMES
    state = net.state_dict()
    x = np.random.default_rng(0).normal(size=(5, 6))
    y = net(pla.Tensor(pla.distribute(x, net.steps[0].weight.grid, scheme.for_dims(2).residual))).gather()
    z = x
    for at in ("steps.0", "steps.1", "heads.in"):
        z = z @ state[f"{at}.weight"] + state[f"{at}.bias"]
    z = z * 0.5 * (1 + np.vectorize(math.erf)(z / np.sqrt(2)))
    np.testing.assert_allclose(y, z @ state["heads.out.weight"] + state["heads.out.bias"], rtol=1e-12, atol=1e-12)
    other = Net(scheme, net.steps[0].weight.grid).initialize(seed=3)
    other.load_state_dict(state)
    assert all(np.array_equal(a, state[n]) for n, a in other.state_dict().items())
    assert not any(m.training for m in net.eval().modules())


@pytest.fixture
def grid():
    with pla.Grid({"one": 1}) as made:
        yield made


@pytest.mark.serial
def test_a_list_of_modules_is_a_list(grid):
    a, b, c, d = (nn.Linear(2, n, SERIAL, grid) for n in (3, 4, 5, 6))
    held = nn.ModuleList([a])
    assert held.append(b) is held
    assert held.extend([c]) is held
    held.insert(0, d)
    assert list(held) == [d, a, b, c]
    assert (len(held), held[-1], held[1], b in held) == (4, c, a, True)
    assert isinstance(held[1:3], nn.ModuleList)
    assert list(held[::-2]) == [c, a]
    assert held.pop() is c
    assert held.pop(0) is d
    held[1] = c
    assert list(held) == [a, c]
    del held[0]
    held += [d]
    assert [n for n, _ in held.named_modules()] == ["", "0", "1"]
    assert list(held + [a]) == [c, d, a]
    assert [n for n, _ in held.initialize(1).named_parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    with pytest.raises(IndexError):
        held[2]
    with pytest.raises(NotImplementedError, match=r"ModuleList defines no forward"):
        held(None)
    for wrong in ([1], 3, {"a": a}, "abc"):
        with pytest.raises(TypeError, match=r"ModuleList (holds modules|takes a list of modules), not a"):
            held.extend(wrong)
    assert list(held) == [c, d]
    chain = nn.Sequential(a, b)
    assert isinstance(chain[:1], nn.Sequential)
    assert list(chain.append(nn.ReLU())[:2]) == [a, b]
    assert "(0): Linear(2 → 5" in repr(held)


@pytest.mark.serial
def test_a_dict_of_modules_is_a_dict(grid):
    a, b = nn.Linear(2, 3, SERIAL, grid), nn.ReLU()
    held = nn.ModuleDict([("a", a)])
    held.update({"b": b})
    assert (list(held), list(held.keys()), list(held.values()), list(held.items())) == (
        ["a", "b"], ["a", "b"], [a, b], [("a", a), ("b", b)]
    )  # fmt: skip
    assert ("a" in held, "c" in held, len(held)) == (True, False, 2)
    assert held.pop("a") is a
    del held["b"]
    assert not held
    for key, error, words in [(1, TypeError, "strings, not 1"), ("a.b", pla.ConfigError, "without dots, not 'a.b'")]:
        with pytest.raises(error, match=words):
            held[key] = a
    with pytest.raises(TypeError, match="ModuleDict holds modules, not a int"):
        held["c"] = 3
    with pytest.raises(KeyError):
        held["c"]


@pytest.mark.serial
@pytest.mark.parametrize(
    ("hold", "where"),
    [
        (lambda a: [a], r"Holder\.held\[0\] is a module \(Linear\) in a plain list"),
        (lambda a: (None, a), r"held\[1\] .* in a plain tuple"),
        (lambda a: {"k": a}, r"held\['k'\] .* in a plain dict"),
        (lambda a: {"k": [3, (a,)]}, r"held\['k'\]\[1\]\[0\] is a module"),
    ],
)
def test_a_plain_container_of_modules_is_refused(hold, where, grid):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.held = hold(nn.Linear(2, 3, SERIAL, grid))

    with pytest.raises(pla.ConfigError, match=where + r"(?s:.*)nn\.ModuleList.*nn\.ModuleDict.*nn\.Sequential"):
        Holder()


@pytest.mark.serial
def test_what_a_plain_list_is_given_later_is_found_when_parameters_are_listed(grid):
    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 3, SERIAL, grid)
            self.order = [self.first]  # known under another name

    model = Later().initialize(1)
    assert len(list(model.parameters())) == 2
    model.order.append(nn.Linear(3, 3, SERIAL, grid))
    for ask in (lambda: list(model.parameters()), lambda: model.initialize(1), model.state_dict):
        with pytest.raises(pla.ConfigError, match=r"Later\.order\[1\] is a module"):
            ask()
    model.order.pop()
    model.order.append(model.first.weight)
    assert len(list(model.parameters())) == 2
    with pytest.raises(pla.ConfigError, match=r"weights\[0\] is a parameter \(Parameter\) in a plain list"):
        model.weights = [pla.Parameter(pla.zeros((2,), grid, pla.Layout(None)))]


@pytest.mark.serial
def test_a_replaced_or_deleted_member_is_forgotten(grid):
    model = nn.Module()
    model.head = nn.Linear(2, 3, SERIAL, grid)
    model.head = None
    assert not list(model.parameters())
    model.head = nn.Linear(2, 3, SERIAL, grid, seed=1)
    assert len(list(model.parameters())) == 2
    del model.head
    assert not hasattr(model, "head")
    model.note = 3
    del model.note
    with pytest.raises(AttributeError):
        del model.note

    class Clash(nn.Module):
        def layers(self):
            return []

    with pytest.raises(pla.ConfigError, match=r"Clash has a method or class attribute 'layers'"):
        Clash().layers = nn.ModuleList()
