"""Optimizers against their papers, written out plainly."""

from __future__ import annotations

import inspect

import ml_dtypes
import numpy as np
import pytest

import parlinalg as pla
from parlinalg import optim, tunables
from parlinalg.parallel.buckets import Bucket, Slot
from parlinalg.parallel.handlers import ReductionPolicy
from parlinalg.parallel.zero import SharedStorage
from tests.conftest import BACKEND

L = pla.Layout
SHAPES = [(7, 11), (5,), (3, 2, 4)]


def textbook_sgd(p, grads, lr, momentum=0.0, nesterov=False, weight_decay=0.0):
    m = np.zeros_like(p)
    for g in grads:
        d = g + weight_decay * p
        m = momentum * m + d
        p = p - lr * (d + momentum * m if nesterov else m)
    return p


def textbook_adam(p, grads, lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=False):
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, 1):
        if decoupled:
            p = p - lr * weight_decay * p
        else:
            g = g + weight_decay * p
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        p = p - lr * (m / (1 - betas[0] ** t)) / (np.sqrt(v / (1 - betas[1] ** t)) + eps)
    return p


def textbook_adamw(p, grads, lr, weight_decay=0.01, **options):
    return textbook_adam(p, grads, lr, weight_decay=weight_decay, decoupled=True, **options)


CASES = [
    (optim.SGD, textbook_sgd, {"lr": 0.1}),
    (optim.SGD, textbook_sgd, {"lr": 0.1, "weight_decay": 0.1}),
    (optim.SGD, textbook_sgd, {"lr": 0.1, "momentum": 0.9}),
    (optim.SGD, textbook_sgd, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (optim.SGD, textbook_sgd, {"lr": 0.1, "momentum": 0.5, "nesterov": True}),
    (optim.Adam, textbook_adam, {"lr": 0.01}),
    (optim.Adam, textbook_adam, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-4}),
    (optim.AdamW, textbook_adamw, {"lr": 0.01}),
    (optim.AdamW, textbook_adamw, {"lr": 0.01, "weight_decay": 0.2, "betas": (0.8, 0.95)}),
]


def values(seed):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=s) for s in SHAPES]


def parameters(grid, dtype=np.float64):
    layouts = [L("a", None), L("a"), L(None, "a", None)]
    return [
        pla.Parameter(pla.distribute(v.astype(dtype), grid, layout), f"p{i}")
        for i, (v, layout) in enumerate(zip(values(0), layouts, strict=True))
    ]


def shared_storage(p, axis):
    """The storage of a parameter alone in its bucket, of which ranks along an axis update a part each."""
    bucket = Bucket(p.grid, p.dtype, ReductionPolicy(scatter=(axis,), stage=1), ())
    bucket.slots.append(Slot(p, bucket, 0, p.block.size, p.block.shape))
    return SharedStorage(p.storage, None, bucket.slots[0])


def give(ps, grads):
    for p, g in zip(ps, grads, strict=True):
        p.grad = pla.distribute(g.astype(p.dtype), p.grid, p.layout)


@pytest.mark.parametrize(("kind", "textbook", "options"), CASES)
def test_optimizers_follow_their_papers(kind, textbook, options, make_grid, world, backend, tune):
    name = "OPTIMIZER_TILE" if backend == "numpy" else "OPTIMIZER_DEVICE_TILE"
    cuda = BACKEND == "gpu" and kind in (optim.Adam, optim.AdamW)
    tune(must=tunables.COMPILED_SIZE > 1 and not cuda, **{name: 10})  # compiled loops and kernels take no tiles
    ps = parameters(make_grid({"a": world.size}))
    optimizer = kind(ps, **options)
    steps = [values(1 + t) for t in range(5)]
    for grads in steps:
        give(ps, grads)
        optimizer.step()
    for i, (p, start) in enumerate(zip(ps, values(0), strict=True)):
        want = textbook(start, [g[i] for g in steps], **options)
        np.testing.assert_allclose(p.gather(), want, rtol=1e-12, atol=1e-13)


EVERY = list(optim.discover().values())
MORE = {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True, "eps": 1e-4, "trust": 0.1}


def variants():
    """Every optimizer there is, plain and with all the options that it takes."""
    for kind in EVERY:
        takes = inspect.signature(kind).parameters
        options = {key: value for key, value in MORE.items() if key in takes}
        for chosen in ({}, options, {k: v for k, v in options.items() if k != "nesterov"}):
            yield pytest.param(kind, chosen, id=f"{kind.__name__} {chosen}")


@pytest.mark.parametrize("small", [0, 1 << 30], ids=["compiled", "plain"])
@pytest.mark.parametrize(("kind", "options"), list(variants()))
def test_a_factor_multiplies_the_gradients(kind, options, small, make_grid, world, backend, tune):
    """A step by a factor is one with gradients multiplied before: to the bit where the factor is a power of two."""
    tune(must=kind in (optim.Adam, optim.AdamW) and backend == "numpy", COMPILED_SIZE=small)
    grid = make_grid({"a": world.size})
    for factor, dtype, tol in ((0.125, np.float64, 0.0), (0.3, np.float64, 1e-14), (0.125, np.float16, 0.0)):
        one, two = parameters(grid, dtype), parameters(grid, dtype)
        first, second = kind(one, 0.01, **options), kind(two, 0.01, **options)
        for step in range(3):
            grads = [np.round(g * 64) / 64 for g in values(step)]  # which 16 bits hold, an eighth of them too
            give(one, grads)
            give(two, [factor * g for g in grads])
            before = [p.grad.gather() for p in one]
            first.step(factor)
            second.step()
            for p, g in zip(one, before, strict=True):
                np.testing.assert_array_equal(p.grad.gather(), g, "gradients are read, not changed")
        mine, theirs = first.state_dict()["states"], second.state_dict()["states"]
        for p, q in zip(one, two, strict=True):
            np.testing.assert_allclose(p.gather().astype(float), q.gather().astype(float), rtol=tol, atol=tol)
            for state, want in theirs[q.name].items():
                np.testing.assert_allclose(mine[p.name][state], want, rtol=tol, atol=tol, err_msg=state)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_other_dtypes_keep_theirs(dtype, make_grid, world):
    ps = parameters(make_grid({"a": world.size}), dtype)
    optimizer = optim.Adam(ps, 0.01)
    grads = values(1)
    give(ps, grads)
    optimizer.step()
    tolerance = {"float32": 1e-5, "float16": 2e-3}.get(np.dtype(dtype).name, 1e-2)
    for i, (p, start) in enumerate(zip(ps, values(0), strict=True)):
        assert p.dtype == dtype
        np.testing.assert_allclose(p.gather().astype(float), textbook_adam(start, [grads[i]], 0.01), atol=tolerance)
    assert optimizer.state_dict()["states"]["p0"]["mean"].dtype == np.float32


def test_parameters_that_lie_side_by_side_are_updated_together(make_grid, world):
    grid = make_grid({"a": world.size})
    ps = [pla.Parameter(pla.distribute(v, grid, L.replicated(v.ndim))) for v in values(0)]
    flat, at = grid.backend.zeros(sum(p.size for p in ps), np.float64), 0
    for p in ps:
        p.grad = pla.DistArray(flat[at : at + p.size].reshape(p.shape), p.shape, p.layout, grid)
        at += p.size
    optimizer = optim.SGD(ps, 0.1, 0.9)
    optimizer.step()
    (joined,) = optimizer.windows()
    assert joined.p.size == joined.g.size == joined.states["momentum"].size == flat.size
    ps[1].grad = None
    assert [r.p.size for r in optimizer.windows()] == [ps[0].size, ps[2].size]


def test_a_parameter_without_a_gradient_stays(make_grid, world):
    ps = parameters(make_grid({"a": world.size}))
    give(ps[:1], values(1)[:1])
    before = ps[1].gather()
    optim.AdamW(ps, 0.1).step()
    assert np.array_equal(ps[1].gather(), before)


def test_new_data_is_taken_and_the_states_stay(make_grid, world):
    ps = parameters(make_grid({"a": world.size}))
    optimizer = optim.SGD(ps, 0.1, 0.5)
    give(ps, values(1))
    optimizer.step()
    for p, v in zip(ps, values(7), strict=True):
        p.data = pla.distribute(v, p.grid, p.layout)
    give(ps, values(2))
    optimizer.step()
    for p, v, g1, g2 in zip(ps, values(7), values(1), values(2), strict=True):
        np.testing.assert_allclose(p.gather(), v - 0.1 * (0.5 * g1 + g2), rtol=1e-12)


@pytest.mark.parametrize("kind", [lambda p: optim.SGD(p, 0.1, 0.9), lambda p: optim.AdamW(p, 0.01)])
def test_state_moves_from_grid_to_grid(kind, make_grid, world):
    one, two = make_grid({"a": world.size}), make_grid({"b": 1, "a": 1})
    first = parameters(one)
    a = kind(first)
    give(first, values(1))
    a.step()
    state, data = a.state_dict(), [p.gather() for p in first]
    second = [pla.Parameter(pla.distribute(v, two, L.replicated(v.ndim)), f"p{i}") for i, v in enumerate(data)]
    b = kind(second)
    b.load_state_dict(state)
    give(first, values(2))
    give(second, values(2))
    a.step()
    b.step()
    assert b.steps == 2
    for p, q in zip(first, second, strict=True):
        assert np.array_equal(p.gather(), q.gather())


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda s: s["states"]["p1"].update(square=np.array(["a"] * 5)), "no real numbers: p1.square of <U1"),
        (lambda s: s["states"]["p1"].update(mean=np.ones(5, complex)), "no real numbers: p1.mean of complex128"),
        (lambda s: s["states"].update(p1=np.ones(5)), "states are dicts of arrays"),
        (lambda s: s.update(lr="fast"), "steps are a whole number and lr a number, .*, not 1 and 'fast'"),
        (lambda s: s.update(steps=-1), "steps are a whole number and lr a number, both at least 0, not -1 and"),
        (lambda s: s.update(steps=1.5), "steps are a whole number and lr a number, both at least 0, not 1.5 and"),
        (lambda s: s["param_groups"][0].update(lr=-5), "an optimizer's lr is at least 0, not -5"),
        (lambda s: s["param_groups"][0].update(betas=0.9), "an optimizer's betas are two numbers, .*, not 0.9"),
    ],
)
def test_a_state_that_is_no_numbers_changes_nothing(spoil, says, make_grid, world):
    ps = parameters(make_grid({"a": world.size}))
    optimizer = optim.Adam(ps)
    give(ps, values(1))
    optimizer.step()
    before, wrong = optimizer.state_dict(), optimizer.state_dict()
    for arrays in wrong["states"].values():
        arrays["mean"] += 1
    if world.rank == world.size - 1:
        spoil(wrong)
    with pytest.raises(pla.ConfigError, match=says):
        optimizer.load_state_dict(wrong)
    for name, arrays in optimizer.state_dict()["states"].items():
        assert all(np.array_equal(a, before["states"][name][s]) for s, a in arrays.items())


def test_what_does_not_fit_is_named(make_grid, world):
    ps = parameters(make_grid({"a": world.size}))
    optimizer = optim.Adam(ps)
    state = optimizer.state_dict()
    state["states"]["q"] = state["states"].pop("p0")
    state["states"]["p1"]["mean"] = np.zeros(4)
    want = r"missing: p0.mean, p0.square; unexpected: q.mean, q.square; misshapen: p1.mean \(4,\) instead of \(5,\)"
    with pytest.raises(pla.ConfigError, match=want):
        optimizer.load_state_dict(state)
    with pytest.raises(pla.ConfigError, match="at least one parameter"):
        optim.SGD([], 0.1)
    with pytest.raises(pla.ConfigError, match="below 1, not 1"):
        optim.SGD(ps, 0.1, 1.0)
    with pytest.raises(pla.ConfigError, match="momentum above 0"):
        optim.SGD(ps, 0.1, nesterov=True)
    with pytest.raises(pla.ConfigError, match="lr is at least 0, not -1"):
        optim.Adam(ps, -1)
    ps[0].grad = pla.DistArray(ps[1].block, ps[1].shape, L(None, partial="a"), ps[1].grid)
    with pytest.raises(pla.LayoutError, match="no_sync"):
        optimizer.step()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_values_are_rounded_from_masters_of_more_bits(dtype, make_grid, world):
    """Steps below the resolution of 16 bits add up in the master."""
    ps = parameters(make_grid({"a": world.size}), dtype)
    optimizer = optim.SGD(ps, 2.0**-14, master=True)
    for _ in range(64):
        give(ps, [np.ones(s) for s in SHAPES])
        optimizer.step()
    masters = [optimizer.state_dict()["states"][p.name]["master"] for p in ps]
    for p, master, start in zip(ps, masters, values(0), strict=True):
        np.testing.assert_array_equal(master, start.astype(dtype).astype(np.float32) - 2.0**-8)
        np.testing.assert_array_equal(p.gather(), master.astype(dtype))
    ps[0].block[...] = 7  # as loading weights does
    ps[0].written()
    ps[1].data = pla.distribute(np.full(5, 9, dtype), ps[1].grid, ps[1].layout)
    give(ps, [np.ones(s) for s in SHAPES])
    optimizer.step()
    after = optimizer.state_dict()["states"]
    for p, want in zip(ps, (np.full(SHAPES[0], 7.0), np.full(5, 9.0), masters[2]), strict=True):
        np.testing.assert_array_equal(after[p.name]["master"], (want - 2.0**-14).astype(np.float32))


def test_masters_of_other_dtypes_and_their_state(make_grid, world):
    """float32 parameters with float64 masters take the steps of float64."""
    grid = make_grid({"a": world.size})
    ps, exact = parameters(grid, np.float32), parameters(grid)
    for p, q in zip(ps, exact, strict=True):
        q.block[...] = p.block
    one, two = optim.AdamW(ps, 0.01, master="float64"), optim.AdamW(exact, 0.01)
    for step in range(4):
        grads = [g.astype(np.float32).astype(float) for g in values(step)]
        give(ps, grads)
        give(exact, grads)
        if step == 2:
            state, one = one.state_dict(), optim.AdamW(ps, 0.5, master=np.float64)
            one.load_state_dict(state)
        one.step()
        two.step()
    for p, q in zip(ps, exact, strict=True):
        np.testing.assert_array_equal(p.gather(), q.gather().astype(np.float32))
    with pytest.raises(pla.ConfigError, match="'float32' or 'float64', not 'int8'"):
        optim.SGD(ps, 0.1, master="int8")
