"""LAMB and LARS against their papers, written out plainly: norms of whole parameters, however they are cut."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import optim
from parlinalg.layout import piece
from parlinalg.offload import DiskStates, HostStates
from tests.optim.test_optimizers import give, parameters, shared_storage, values


def norm_ratio(a, b):
    return a / b if a and b else 1.0


def textbook_lamb(p, grads, lr, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01):
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(grads, 1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        u = m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + eps) + weight_decay * p
        p = p - lr * norm_ratio(np.linalg.norm(p), np.linalg.norm(u)) * u
    return p


def textbook_lars(p, grads, lr, momentum=0.9, weight_decay=0.0, trust=1e-3):
    m = np.zeros_like(p)
    for g in grads:
        value, slope = np.linalg.norm(p), np.linalg.norm(g)
        rate = lr * (trust * value / (slope + weight_decay * value) if value and slope else 1.0)
        m = momentum * m + rate * (g + weight_decay * p)
        p = p - m
    return p


CASES = [
    (optim.LAMB, textbook_lamb, {"lr": 0.01}),
    (optim.LAMB, textbook_lamb, {"lr": 0.1, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-4}),
    (optim.LARS, textbook_lars, {"lr": 10.0, "weight_decay": 0.1}),
    (optim.LARS, textbook_lars, {"lr": 1.0, "momentum": 0.0, "trust": 0.1}),
]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("kind", "textbook", "options"), CASES)
def test_steps_are_those_of_the_paper(kind, textbook, options, sharded, make_grid, world):
    grid = make_grid({"a": world.size, "b": 1} if not sharded else {"b": 1, "a": 1, "data": world.size})
    ps = parameters(grid)
    ps[1].block[...] = 0  # a norm of 0 counts as a quotient of 1
    optimizer = kind(ps, **options)
    steps = [values(1 + t) for t in range(4)]
    for grads in steps:
        give(ps, [2 * g for g in grads])
        if sharded:
            for p in ps:
                shard(p, world)
        with pla.ledger(grid) as book:
            optimizer.step(0.5)
        assert book.calls.total() == (world.size > 1), "all norms in one call"
    for i, (p, start) in enumerate(zip(ps, values(0), strict=True)):
        want = textbook(start * (i != 1), [g[i] for g in steps], **options)
        found = p.updated[0] if sharded else p.gather().reshape(-1)
        mine = slice(*p.storage.partition(p.data)[:2]) if sharded else slice(None)
        np.testing.assert_allclose(
            grid.backend.to_host(grid.backend.xp.asarray(found)), want.reshape(-1)[mine], 1e-12, 1e-13
        )


@pytest.mark.parametrize(("kind", "textbook", "options"), CASES[::2])
def test_states_that_come_in_tiles_give_the_same_steps(kind, textbook, options, make_grid, world, folder, backend):
    """Gradients lie side by side, as in a bucket, so that a tile begins within one parameter and ends in another."""
    grid, whole = make_grid({"a": world.size}), pla.Layout(None)
    rng = np.random.default_rng(3)
    starts = [rng.standard_normal(n) for n in (300, 5, 700, 411)]
    ps = [pla.Parameter(pla.distribute(v, grid, whole), f"p{i}") for i, v in enumerate(starts)]
    optimizer = kind(ps, **options)
    steps = [[rng.standard_normal(len(v)) for v in starts] for _ in range(3)]
    with DiskStates(folder, tile=4096) if backend == "numpy" else nullcontext(HostStates(tile=4096)) as place:
        optimizer.place(place)
        for grads in steps:
            bucket = grid.backend.from_host(np.concatenate(grads))
            for p, g in zip(ps, grads, strict=True):
                p.grad = pla.DistArray(bucket[: len(g)], g.shape, whole, grid)
                bucket = bucket[len(g) :]
            optimizer.step()
        for i, (p, start) in enumerate(zip(ps, starts, strict=True)):
            want = textbook(start, [g[i] for g in steps], **options)
            np.testing.assert_allclose(p.gather(), want, 1e-12, 1e-13)


def shard(p, world):
    """Share a parameter's update over the data axis; its settled gradient is the shard's."""
    mine = piece(p.block.size, world.size, world.rank)
    grad = p.grad.block.reshape(-1)[mine.start : mine.stop]
    p.storage, p.grad = shared_storage(p, "data"), None
    p.storage.mine = grad


def test_a_gradient_of_zeros_and_ranks_without_elements(make_grid, world):
    grid = make_grid({"a": world.size})
    ps = parameters(grid)
    give(ps, [0 * v for v in values(0)])
    before = [p.gather() for p in ps]
    optim.LAMB(ps, 0.1, weight_decay=0.0).step()
    for p, want in zip(ps, before, strict=True):
        np.testing.assert_array_equal(p.gather(), want)
    with pytest.raises(pla.ConfigError, match="momentum is at least 0 and below 1, not 1"):
        optim.LARS(ps, 0.1, 1.0)
    with pytest.raises(pla.ConfigError, match="eps is above 0, not 0"):
        optim.LAMB(ps, 0.1, eps=0)
