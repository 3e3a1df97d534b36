"""Mixed precision: the losses, scales and skipped steps of one rank with the same casts, on every grid."""

from __future__ import annotations

import math

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from parlinalg.optim import AdamW
from parlinalg.parallel import GradientReducer, LossScaler, ZeRO, examine, overflowing
from tests.agreement import once
from tests.models import alone, every_scheme, loss_of, make

STEPS, BAD = 10, 4
LOW = {"float16": (True, 1e-2), "bfloat16": (True, 1e-2), "float32": ("float64", 1e-5)}
CASES = [
    (1, "data", {"data": 1}, 2), (2, "data", {"data": 2}, 1), (2, "2d", {"r": 2, "c": 1}, 0), (3, "1d", {"t": 3}, 0),
    (4, "data × 1d", {"data": 2, "t": 2}, 2), (4, "2d", {"r": 2, "c": 2}, 0),
    (6, "data × 2d, weights cut", {"data": 3, "r": 1, "c": 2}, 3), (8, "3d", {"i": 2, "j": 2, "l": 2}, 0),
]  # fmt: skip


def run(scheme, grid, low, stage=0, communicate=None, steps=STEPS):
    """Losses, scales before each step, and which steps were skipped; in step `BAD` one rank's gradient overflows."""
    model = make("gpt", scheme, grid, dtype=low, p=0.1)
    parameters = list(model.parameters())
    zero = [ZeRO(stage)] if stage else []
    GradientReducer(parameters, zero, 2000, 4000, dtype=communicate)
    optimizer = AdamW(parameters, 0.01, master=LOW[low][0])
    scaler, found = LossScaler(2.0**10, growth_every=3), []
    for step in range(steps):
        scale = scaler.scale
        with nn.training_step(step), overflowing():
            loss = loss_of(model, step % 3)
            (loss * scale).backward()
        if step == BAD and grid.rank == grid.size - 1:
            next(p.updated[1] for p in parameters if p.updated[1].size)[:1] = math.inf
        got = examine(parameters, scale)
        assert math.isfinite(got.norm) == got.finite or step == BAD
        if got.finite:
            optimizer.step(min(1.0, 1.0 / (got.norm + 1e-6)) / scale)
        scaler.update(got.finite)
        optimizer.zero_grad()
        found.append((loss.item(), scale, got.finite))
    return tuple(np.array(column) for column in zip(*found, strict=True))


@pytest.fixture(scope="module")
def serial(world):
    known = {}

    def of(low):
        if low not in known:

            def losses():
                with alone(world) as grid:
                    return run(schemes.discover()["serial"].SCHEME, grid, low)

            known[low] = once(losses)
        return known[low]

    return of


@pytest.mark.parametrize(
    ("name", "sizes", "stage", "number"),
    [pytest.param(*c[1:], i, marks=pytest.mark.ranks(c[0]), id=f"{c[0]}-{c[1]}") for i, c in enumerate(CASES)],
)
def test_losses_scales_and_skipped_steps_are_those_of_one_rank(name, sizes, stage, number, make_grid, serial, full):
    grid = make_grid(sizes)
    for i, low in enumerate(LOW):
        if full or i == number % 3:
            check(every_scheme()[name], grid, stage, low, serial)


def check(scheme, grid, stage, low, serial):
    losses, scales, finite = run(scheme, grid, low, stage)
    want, want_scales, want_finite = serial(low)
    np.testing.assert_allclose(losses, want, rtol=LOW[low][1])
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_array_equal(finite, want_finite)
    assert finite.tolist() == [step != BAD for step in range(STEPS)], "a rank's overflow is every rank's, once"
    assert scales.tolist() == [2.0**k for k in (10, 10, 10, 11, 11, 10, 10, 10, 11, 11)]
    assert losses[-1] < losses[0]


@pytest.mark.ranks(2, 4)
def test_gradients_may_travel_in_other_bits(make_grid, world, serial):
    scheme, grid = every_scheme()["data"], make_grid({"data": world.size})
    for low, communicate, stage in (("bfloat16", "float32", 0), ("float32", "bfloat16", 2)):
        losses, _, _ = run(scheme, grid, low, stage, communicate, 4)
        np.testing.assert_allclose(losses, serial(low)[0][:4], rtol=1e-2)


def test_what_is_not_finite_is_known_to_all_ranks(make_grid, world):
    grid = make_grid({"data": world.size})
    for bad, finite in ((1.0, True), (math.nan, False), (-math.inf, False), (1e200, True)):
        p = pla.Parameter(pla.zeros(5, grid, pla.Layout(None)))  # each rank has a copy
        p.grad = pla.full(5, 1.0, grid, pla.Layout(None))
        if world.rank == world.size - 1:
            p.grad.block[...] = bad
        got = examine([p, p], 2.0)
        assert got.finite is finite
        if bad == 1.0:
            assert got.norm == pytest.approx(math.sqrt(5) / 2, rel=1e-14)
    p.grad = pla.DistArray(p.block, (5,), pla.Layout(None, partial="data"), grid)
    with pytest.raises(pla.LayoutError, match="no_sync"):
        examine([p])


@pytest.mark.serial
def test_scales_grow_fall_and_stay_within_bounds():
    scaler = LossScaler(4.0, growth_every=2, least=2.0, most=8.0)
    told = [True] * 7 + [False, True, False, False, False, True, True]
    scales = []
    for finite in told:
        scaler.update(finite)
        scales.append(scaler.scale)
    assert scales == [4, 8, 8, 8, 8, 8, 8, 4, 4, 2, 2, 2, 2, 4]
    assert (scaler.skipped, scaler.good) == (4, 0)
    other = LossScaler(4.0, growth_every=2, least=2.0, most=8.0)
    other.load_state_dict(scaler.state_dict())
    for finite in (True, True, False):
        scaler.update(finite)
        other.update(finite)
        assert other.state_dict() == scaler.state_dict()
    with pytest.raises(pla.ConfigError, match="this lacks scale, skipped, and has 'good'"):
        other.load_state_dict({"good": 1})
    assert other.state_dict() == scaler.state_dict()
    still = LossScaler(3.0, dynamic=False, growth_every=1)
    still.update(True)
    still.update(False)
    assert (still.scale, still.skipped) == (3.0, 1)
    assert LossScaler().scale == 2.0**16


@pytest.mark.serial
@pytest.mark.parametrize(
    ("options", "message"),
    [({"scale": 0.0}, "scale is a number above 0, not 0.0"), ({"growth_every": 0}, "at least 1, not 0"),
     ({"scale": 2.0**30}, r"between its least, 1, and its most, 1.67772e\+07"),
     ({"most": math.inf}, "most is a number")],
)  # fmt: skip
def test_scales_that_cannot_be_are_refused(options, message):
    with pytest.raises(pla.ConfigError, match=message):
        LossScaler(**options)
