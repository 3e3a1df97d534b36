"""The attention layer under every scheme."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from parlinalg.comm import SingleComm
from tests.training import every_scheme, sizes_for

B, S, T, HIDDEN, HEADS = 5, 7, 6, 6, 4
MODES = {name: file.SCHEME for name, file in schemes.discover().items()}
GROUPED = {"kv_heads": 2, "causal": True, "rotary": 100.0, "dropout": 0.2}
CROSS = {"cross": True, "dropout": 0.2}
#: Schemes, an axis taken as two, and their sizes.
FACTORED = {
    "1d": ("1d", "t", {"t": 2, "u": 0}),
    "1d, one head of keys": ("1d", None, {"t": 0}),
    "1d with sequence cuts": ("1d with sequence cuts", "t", {"t": 2, "u": 0}),
    "2d": ("2d", "c", {"r": 0, "c": 2, "u": 2}),
    "2.5d, depth on k": ("2.5d, depth on k", None, {"d": 2, "r": 0, "c": 2}),
    "3d": ("3d", "j", {"i": 0, "j": 2, "u": 2, "l": 1}),
}


def layer(scheme, grid, **options):
    return nn.Attention(HIDDEN, HEADS, scheme, grid, head_dim=4, dtype="float64", seed=3, name="a", **options)


def numbers(n, seed=0):
    return np.random.default_rng(seed).standard_normal((B, n, HIDDEN))


def results(attention, scheme, grid):
    """The value and all gradients of a training step, gathered."""

    def tensor(x):
        return pla.Tensor(pla.distribute(x, grid, scheme.residual), requires_grad=True)

    x, context = tensor(numbers(S)), tensor(numbers(T, 1)) if attention.cross else None
    padding = np.random.default_rng(2).random((B, S if context is None else T)) > 0.2
    with nn.training_step(4):
        y = attention(x, context, key_padding=pla.distribute(padding, grid, pla.Layout(*scheme.inner.dims[:2])))
    y.backward(pla.distribute(numbers(S, 9), grid, y.layout))
    inputs = {"x": x} if context is None else {"x": x, "context": context}
    return {"y": y.gather()} | {n: p.grad.gather() for n, p in (inputs | dict(attention.named_parameters())).items()}


def in_steps(attention, scheme, grid):
    """The values for the whole sequence at once, and for a few tokens at a time."""
    attention.eval()
    x = numbers(S)
    cache, parts = nn.KeyValueCache(S), []
    with pla.no_grad():
        whole = attention(pla.Tensor(pla.distribute(x, grid, scheme.residual))).gather()
        for at, stop in [(0, 3), (3, 4), (4, S)]:
            part = pla.Tensor(pla.distribute(x[:, at:stop], grid, scheme.residual))
            parts.append(attention(part, cache=cache).gather())
        with pytest.raises(ValueError, match=r"7 tokens holds 7 and is given 3 more; .*KeyValueCache\(10\)"):
            attention(pla.Tensor(pla.distribute(x[:, :3], grid, scheme.residual)), cache=cache)
    return whole, np.concatenate(parts, 1)


@pytest.fixture(scope="module")
def known(backend):
    """What one rank computes."""
    found = {}

    def serial(**options):
        key = repr(options)
        if key not in found:
            grid = pla.Grid({"replica": 1}, comm=SingleComm(), backend=backend)
            found[key] = results(layer(MODES["serial"], grid, **options), MODES["serial"], grid)
        return found[key]

    return serial


def equal(found, right):
    assert found.keys() == right.keys()
    for name, value in right.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-12 * np.abs(value).max(), err_msg=name)


@pytest.mark.parametrize("name", every_scheme())
def test_equals_one_rank(name, make_grid, world, known, full):
    if not full and name not in (*MODES, "data × 2d"):
        return
    scheme = every_scheme()[name]
    grid = make_grid(sizes_for(scheme, world.size, 1)[0])
    for options in (GROUPED, CROSS) if name in MODES else (GROUPED,):
        attention = layer(scheme, grid, **options)
        equal(results(attention, scheme, grid), known(**options))
        if options is GROUPED:
            whole, parts = in_steps(attention, scheme, grid)
            np.testing.assert_allclose(parts, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FACTORED)
def test_more_ranks_than_heads_of_keys(name, make_grid, world, known):
    mode, axis, shape = FACTORED[name]
    rest, odd = divmod(world.size, max(1, np.prod([n for n in shape.values() if n])))
    if odd:
        return
    scheme = MODES[mode] if axis is None else MODES[mode].factored(axis, (axis, "u"))
    grid = make_grid({a: n or rest for a, n in shape.items()})
    attention = layer(scheme, grid, packed=False, **GROUPED)
    equal(results(attention, scheme, grid), known(packed=False, **GROUPED))
    whole, parts = in_steps(attention, scheme, grid)
    np.testing.assert_allclose(parts, whole, rtol=1e-12, atol=1e-12)
    if name == "1d" and rest > 1:
        assert attention.q.weight.layout == pla.Layout(None, "t", "u", None)
        assert attention.kv.weight.layout == pla.Layout(None, "t", None, None)


def cut_sequences(ranks):
    """A layer's options, and schemes that cut the sequence over a ring, by Ulysses, or both, with their grids."""
    both = MODES["serial"].with_sequence("u", ulysses=True).with_sequence("s")
    one_head, apart = {**GROUPED, "kv_heads": 1}, {**GROUPED, "packed": False}
    yield one_head, both, {"s": 2, "u": ranks // 2}
    yield CROSS, both, {"s": 2, "u": ranks // 2}
    yield CROSS, MODES["2d"].with_sequence("s"), {"s": ranks // 2, "r": 2, "c": 1}
    if ranks % 4 == 0:
        factored = MODES["1d"].factored("t", ("t", "v"))
        yield apart, factored.with_sequence("s"), {"s": ranks // 4, "t": 2, "v": 2}


@pytest.mark.ranks(4, 6, 8)
def test_cut_sequences_with_padding_and_contexts(make_grid, world, known):
    for turn, (options, scheme, sizes) in enumerate(cut_sequences(world.size)):
        if sizes.get("u", 1) <= HEADS and turn % 2 == world.size // 2 % 2:
            grid = make_grid(sizes)
            equal(results(layer(scheme, grid, **options), scheme, grid), known(**options))


@pytest.mark.serial
def test_refused_settings():
    grid = pla.Grid({"replica": 1}, comm=SingleComm())
    for wrong, message in [
        ({"heads": 4, "kv_heads": 3}, "4 heads do not share 3"),
        ({"heads": 4}, "6 features do not fall into 4 heads"),
        ({"heads": 3, "dropout": 1.0}, "dropout"),
    ]:
        with pytest.raises(pla.ConfigError, match=message):
            nn.Attention(6, **wrong, scheme=MODES["serial"], grid=grid)
    attention = layer(MODES["serial"], grid)
    x = pla.Tensor(pla.distribute(numbers(3), grid, MODES["serial"].residual))
    with pytest.raises(pla.ConfigError, match="no context"):
        attention(x, x)
    with pytest.raises(pla.ConfigError, match="no_grad"):
        attention(x, cache=nn.KeyValueCache(3))
    with pytest.raises(pla.PlanError, match="axes"):
        MODES["2d"].factored("t", ("t", "u"))


def test_the_padding_of_a_single_sequence_lies_as_the_sequence(make_grid, world):
    scheme = MODES["2d"]
    grid = make_grid(sizes_for(scheme, world.size, 1)[0])
    attention, real = layer(scheme, grid), np.arange(S)[None] < 4
    x = pla.Tensor(pla.distribute(numbers(S)[:1], grid, scheme.residual))
    cut = attention(x, key_padding=pla.distribute(real, grid, pla.Layout(*scheme.inner.dims[:2])))
    assert np.array_equal(cut.gather(), attention(x, key_padding=real).gather())


@pytest.mark.serial
@pytest.mark.parametrize(("options", "said"), [
    ({"window": 2.5}, r"a whole number of at least 1 .*, not 2\.5"),
    ({"window": "2"}, "a whole number of at least 1 .*, not '2'"),
    ({"head_dim": 0}, "head_dim is a whole number of at least 1, not 0"),
    ({"rotary": -1e4}, r"rotary positions is a number above 0, not -10000\.0"),
])  # fmt: skip
def test_settings_that_make_no_attention_are_refused(options, said, make_grid):
    with pytest.raises(ValueError, match=said):
        nn.Attention(8, 2, schemes.discover()["serial"].SCHEME, make_grid({"one": 1}), **options)
