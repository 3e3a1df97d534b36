"""Random arrays are the same on every grid, whatever the cut."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.grid import factorizations
from parlinalg.random import counter
from parlinalg.random.distributions import normal_quantile

L = pla.Layout
SHAPES = {
    (): [L()],
    (13,): [L("a"), L(("b", "a")), L(None)],
    (5, 7, 3): [L("a", None, "b"), L(("a", "b"), None, None), L(None, "b", None), L(None, ("b", "a"), None),
                L(None, "a", None, partial="b")],
}  # fmt: skip
DRAWS = {
    "uniform": lambda *a, **k: pla.random.uniform(*a, low=-2, high=3, dtype=np.float32, **k),
    "normal": lambda *a, **k: pla.random.normal(*a, mean=1, std=2, **k),
    "half": lambda *a, **k: pla.random.normal(*a, dtype=np.float16, **k),
    "bernoulli": lambda *a, **k: pla.random.bernoulli(*a, 0.3, **k),
    "integers": lambda *a, **k: pla.random.integers(*a, -3, 9, **k),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_same_bits_on_every_grid(draw, make_grid, world):
    one = pla.Grid({"a": 1, "b": 1}, alone(world))
    for a, b in pairs(world.size):
        grid = make_grid({"a": a, "b": b})
        for shape, layouts in SHAPES.items():
            want = DRAWS[draw](shape, one, L.replicated(len(shape)), seed=3, name="w").gather()
            for layout in layouts:
                if layout.partial and draw in ("bernoulli",):
                    continue
                got = DRAWS[draw](shape, grid, layout, seed=3, name="w")
                assert got.dtype == want.dtype
                assert got.gather().tobytes() == want.tobytes()


def test_a_microbatch_draws_its_part_of_the_batch(make_grid, world):
    grid = make_grid({"a": world.size})
    whole = pla.random.normal((11, 3), grid, L("a", None), seed=1, name="x", step=4, call=2).gather()
    part = pla.random.normal((5, 3), grid, L(None, "a"), seed=1, name="x", step=4, call=2, start=4).gather()
    assert part.tobytes() == whole[4:9].tobytes()


@pytest.mark.serial
def test_every_part_of_the_key_counts():
    keys = {
        tuple(counter.stream_key(*k))
        for k in [(0, "a", 0, 0), (1, "a", 0, 0), (0, "b", 0, 0), (0, "a", 1, 0), (0, "a", 0, 1)]
    }
    assert len(keys) == 5


@pytest.mark.serial
@pytest.mark.parametrize(("jump", "tile"), [(1 << 10, 1 << 15), (3, 16), (0, 5)])
def test_a_block_takes_the_words_of_its_indices(tune, jump, tile):
    tune(RANDOM_JUMP=jump, RANDOM_TILE=tile)
    rng = np.random.default_rng(0)
    for _ in range(300):
        shape = tuple(int(n) for n in rng.integers(1, 9, rng.integers(1, 5)))
        block = [
            range(*sorted(int(i) for i in rng.integers(0, n + 1, 2))) if rng.random() < 0.6 else range(n) for n in shape
        ]
        bits, start = int(rng.choice([32, 64])), int(rng.integers(0, 4))
        row = int(np.prod(shape[1:]))
        key = counter.stream_key(1, "x")
        whole = counter.RandomStream(key, bits).take(0, (start + shape[0]) * row)[start * row :].reshape(shape)
        want = whole[tuple(slice(r.start, r.stop) for r in block)]
        got = [(at, w) for at, w in counter.block_words(counter.RandomStream(key, bits), shape, block, start)]
        assert [at for at, _ in got] == [0, *np.cumsum([len(w) for _, w in got])[:-1].tolist()][: len(got)]
        assert np.array_equal(np.concatenate([w for _, w in got] or [want.reshape(-1)]), want.reshape(-1))


@pytest.mark.serial
def test_the_words_are_those_of_philox():
    raw = np.random.Philox(key=counter.stream_key(5, "n"), counter=0).random_raw(100)
    assert np.array_equal(counter.RandomStream(counter.stream_key(5, "n")).take(7, 60), raw[7:67])


@pytest.mark.serial
def test_distributions():
    with pla.Grid({"a": 1}) as grid:
        z = pla.random.normal(200_000, grid, L(None), seed=1).block
        u = pla.random.uniform(200_000, grid, L(None), seed=2).block
        b = pla.random.bernoulli(200_000, grid, L(None), 0.25, seed=3).block
        n = pla.random.integers(200_000, grid, L(None), 0, 5, seed=4).block
        assert pla.random.bernoulli(9, grid, L(None), 1.0).block.all()
        assert not pla.random.bernoulli(9, grid, L(None), 0.0).block.any()
        with pytest.raises(ValueError, match="between 0 and 1"):
            pla.random.bernoulli(3, grid, L(None), 1.5)
        with pytest.raises(TypeError, match="float32"):
            pla.random.normal(3, grid, L(None), dtype=np.int32)
        with pytest.raises(ValueError, match=r"2\*\*32"):
            pla.random.integers(3, grid, L(None), 4, 4)
    for value, want, slack in [(z.mean(), 0, 0.01), (z.std(), 1, 0.01), ((z**4).mean(), 3, 0.1), (u.mean(), 0.5, 0.003),
                               (u.var(), 1 / 12, 0.002), (b.mean(), 0.25, 0.005)]:  # fmt: skip
        assert abs(value - want) < slack
    assert 0 <= u.min() < u.max() < 1
    assert np.all(np.abs(np.bincount(n) / n.size - 0.2) < 0.005)


@pytest.mark.serial
def test_normal_quantile_against_scipy():
    from scipy.special import ndtri

    tails = 2.0 ** -np.arange(1, 53)
    p = np.concatenate([np.linspace(1e-6, 1 - 1e-6, 10_001), tails, 1 - tails])
    want = ndtri(p)
    assert np.all(np.abs(normal_quantile(p) - want) <= 3e-15 * np.maximum(1, np.abs(want)))


def test_permutation():
    order = pla.random.permutation(101, seed=3, epoch=2)
    assert sorted(order) == list(range(101))
    assert not np.array_equal(order, pla.random.permutation(101, seed=3, epoch=3))
    assert np.array_equal(order, pla.random.permutation(101, seed=3, epoch=2))


def pairs(size):
    return factorizations(size, 2)


def alone(world):
    """A communicator of this rank alone."""
    return world.sub((world.rank,), ())
