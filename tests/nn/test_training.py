"""Training is the same under every scheme, on every grid."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.training import OPTIMIZERS, equal, every_scheme, serial, sizes_for, train


@pytest.fixture(scope="module")
def reference(world):
    return cache(lambda *args, **options: serial(world, *args, **options))


@pytest.mark.parametrize("name", every_scheme())
def test_every_scheme_trains_as_one_rank_does(name, make_grid, world, reference, full):
    """Each optimizer in turn; all of them with --full."""
    scheme, turn = every_scheme()[name], list(every_scheme()).index(name) + world.size
    kinds, grids = list(OPTIMIZERS), sizes_for(scheme, world.size, 99)
    for optimizer in kinds if full else [kinds[turn % len(kinds)]]:
        steps = 20 if full or (optimizer == "sgd" and world.size == 4) else 4
        want = reference(optimizer, steps)
        assert want[0][-1] < want[0][0]
        for sizes in grids if full else grids[turn % len(grids) :][:1]:
            equal(train(make_grid(sizes), scheme, optimizer, steps), want)


@pytest.mark.parametrize("name", every_scheme())
def test_dropout_clipping_and_microbatches_are_those_of_one_rank(name, make_grid, world, reference):
    scheme = every_scheme()[name]
    options = {"dropout": 0.3, "clip": 0.2, "microbatches": 3}
    grid = make_grid(sizes_for(scheme, world.size, 1)[0])
    equal(train(grid, scheme, "sgd", 3, **options), reference("sgd", 3, **options))


@pytest.mark.parametrize("name", every_scheme())
def test_every_grid_starts_from_the_same_weights(name, make_grid, world, reference, full):
    scheme, want = every_scheme()[name], reference("sgd", 0)[1]
    for sizes in sizes_for(scheme, world.size, 99 if full else 1):
        got = train(make_grid(sizes), scheme, "sgd", 0)[1]
        assert all(got[n].tobytes() == a.tobytes() for n, a in want.items())


@pytest.mark.mpi(min_size=2)
def test_ranks_outside_the_grid_make_every_call(make_grid, world, reference):
    scheme = every_scheme()["data × 2d"]
    grid = make_grid({"data": 1, "r": 1, "c": world.size - 1})
    equal(train(grid, scheme, "adam", 3, clip=0.2, dropout=0.1), reference("adam", 3, clip=0.2, dropout=0.1))


def test_microbatches_drop_what_the_whole_batch_drops(world, reference):
    whole, parts = (reference("sgd", 3, dropout=0.4, microbatches=n) for n in (1, 3))
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-12)
