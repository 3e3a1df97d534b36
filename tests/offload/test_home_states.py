"""Preconditioners that lie on a disk, at the home rank of their parameter: every bit as in memory, whole steps only."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import partial

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, optim, schemes
from parlinalg.errors import OffloadError
from parlinalg.offload import DiskStates, HostStates, plan, recover
from parlinalg.parallel.memory import estimate
from parlinalg.train import Checkpoints
from tests.conftest import BACKEND
from tests.offload.runs import failing
from tests.optim.test_muon import give, numbers, parameters, sharded

pytestmark = pytest.mark.one_in(8)

KINDS = {
    "shampoo": partial(optim.Shampoo, precondition_frequency=2, block_size=6, grafting="adam"),
    "soap": partial(optim.SOAP, precondition_frequency=2),
    "momentum alone": partial(optim.Shampoo, max_precond_dim=1, block_size=None),
}
STEPS = 4


@pytest.fixture
def grid(make_grid, world):
    return make_grid({"r": 1, "c": world.size // 2 or 1, "d": min(2, world.size)}) if world.size != 3 else make_grid(
        {"r": 3, "c": 1, "d": 1}
    )  # fmt: skip


def start(kind, grid, zero=False, **options):
    ps = parameters(grid)
    for p in ps if zero else ():
        sharded(p)
    return ps, KINDS[kind](ps, **options)


def go_on(ps, optimizer, steps, zero=False):
    for t in steps:
        give(ps, numbers(1 + t), zero)
        optimizer.step()


def everything(ps, optimizer, zero=False):
    """The values of this rank, and all states."""
    found = [p.grid.backend.to_host(p.block).copy() for p in ps]
    states = optimizer.state_dict()["states"]
    return found + [states[name][s] for name in sorted(states) for s in sorted(states[name])]


def equal(found, want, kind):
    """Every bit, but for products on a GPU: cuBLAS rounds them in another order where arrays are aligned otherwise."""
    tol = 1e-12 if BACKEND == "gpu" and kind != "momentum alone" else 0.0
    assert len(found) == len(want)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=tol * np.abs(y).max(initial=0))


@pytest.mark.parametrize("zero", [False, True], ids=["whole", "zero"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_as_in_memory(kind, zero, grid, folder, backend):
    ps, optimizer = start(kind, grid, zero)
    go_on(ps, optimizer, range(2), zero)
    middle = everything(ps, optimizer)
    go_on(ps, optimizer, range(2, STEPS), zero)
    want = everything(ps, optimizer)
    disk = DiskStates(folder, tile=4096) if backend == "numpy" else nullcontext(HostStates(tile=4096))
    with disk as place:
        ps, optimizer = start(kind, grid, zero)
        optimizer.place(place)
        go_on(ps, optimizer, range(2), zero)
        equal(everything(ps, optimizer), middle, kind)
        optimizer.place(optim.InMemory())
        go_on(ps, optimizer, range(2, 3), zero)
        optimizer.place(place)
        go_on(ps, optimizer, range(3, STEPS), zero)
        equal(everything(ps, optimizer), want, kind)


@pytest.mark.ranks(1, 2, full=(4,))
@pytest.mark.parametrize("where", ["pwritev", "preadv", "fdatasync"])
@pytest.mark.parametrize("kind", ["shampoo", "soap"])
def test_a_step_that_fails_on_one_rank_is_not_made_on_any(kind, where, grid, world, folder, monkeypatch):
    """At whichever call of the system the disk fails."""
    ps, optimizer = start(kind, grid)
    go_on(ps, optimizer, range(2))
    before = everything(ps, optimizer)
    go_on(ps, optimizer, range(2, 3))
    want = everything(ps, optimizer)
    fail, calls = 0, 0

    def fails():
        nonlocal calls
        calls += 1
        return world.rank == world.size - 1 and calls == fail

    failing(monkeypatch, where, fails)
    number = failed = 0
    step = 1
    while failed == number:
        fail, calls = 0, 0
        with DiskStates(folder, tile=4096) as states:
            ps, optimizer = start(kind, grid)
            optimizer.place(states)
            go_on(ps, optimizer, range(2))
            number, calls, fail = number + 1, 0, 1 + number * step
            with suppress(OffloadError):
                go_on(ps, optimizer, range(2, 3))
            failed += optimizer.steps == 2
            assert len(set(world.share(failed))) == 1
            fail = 0
            if failed == number:
                assert optimizer.steps == 2
                equal(everything(ps, optimizer), before, kind)
                go_on(ps, optimizer, range(2, 3))
            equal(everything(ps, optimizer), want, kind)
        step = 7 if where != "fdatasync" else 1
    assert failed > (0 if where == "fdatasync" else 2)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("kind", ["shampoo", "soap"])
def test_they_are_recovered_and_part_of_checkpoints(kind, grid, world, folder):
    ps, optimizer = start(kind, grid)
    with DiskStates(folder / "states", tile=4096, keep=True) as states:
        optimizer.place(states)
        go_on(ps, optimizer, range(3))
        saved = Checkpoints(folder / "saved", world, {p.name: p for p in ps}, optimizer, background=False)
        saved.save(3)
        saved.settle()
        want = everything(ps, optimizer)
    others, again = start(kind, grid)
    assert recover(folder / "states", again) == 3
    equal(everything(others, again), want, kind)
    third, update = start(kind, grid)
    with DiskStates(folder / "more", tile=8192) as states:
        update.place(states)
        go_on(third, update, range(1))
        Checkpoints(folder / "saved", world, {p.name: p for p in third}, update).load()
        update.steps = 3
        equal(everything(third, update), want, kind)
        go_on(third, update, range(3, 5))
        found = everything(third, update)
    go_on(others, again, range(3, 5))
    equal(found, everything(others, again), kind)


def test_the_plan_offloads_them(make_grid, world, folder, backend):
    grid = make_grid({"data": world.size})
    model = nn.MLP([30, 40, 50, 4], schemes.discover()["data"].SCHEME, grid, seed=1, dtype="float64")
    optimizer = optim.SOAP(model.parameters())
    table = estimate(model, optimizer)
    home = {n: 8 * (1 + 2 * m * n + 2 * m * m + 2 * n * n) for m, n in ((30, 40), (40, 50))}
    assert table.home == home[50]
    assert table.states == 8 * 2 * (40 + 50 + 50 * 4 + 4) + (home[40] * (world.size == 1) + home[50])
    if not grid.backend.host_memory:
        return
    found = plan(model, optimizer, memory=table.total - 1, path=folder)
    assert "optimizer" in found.places or world.size > 1
    found = plan(model, optimizer, optimizer_states="disk", path=folder)
    offload = found.apply()
    for p in model.parameters():
        p.grad = pla.distribute(np.ones(p.shape), grid, p.layout)
    optimizer.step()
    assert isinstance(optimizer.flat.states, DiskStates)
    states = optimizer.state_dict()["states"]
    assert abs(states["0.weight"]["left"]).max() > 0
    offload.close()
