"""Random arrays are the same on every grid, whatever the cut."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

import parlinalg as pla
from parlinalg.grid import factorizations
from parlinalg.random import counter, normals

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


@pytest.mark.parametrize(("chunk", "tile"), [(1 << 13, 1 << 15), (100, 300)])
def test_normals_that_take_further_words(make_grid, world, tune, monkeypatch, chunk, tile):
    """Of so many numbers some hundred lie outside of what one word decides, some of them in the tail."""
    shape, key = (37, 41, 61), {"seed": 1, "name": "x", "step": 4}
    one = pla.Grid({"a": 1, "b": 1}, alone(world))
    whole = pla.random.normal(shape, one, L(None, None, None), **key).gather()
    assert (np.abs(whole) > float(normals.BASE)).any()
    monkeypatch.setattr(normals, "CHUNK", chunk)
    tune(RANDOM_TILE=tile)
    for a, b in pairs(world.size):
        grid = make_grid({"a": a, "b": b})
        for layout in L("a", None, "b"), L(None, ("b", "a"), None), L(None, None, "a"):
            assert pla.random.normal(shape, grid, layout, **key).gather().tobytes() == whole.tobytes()
            part = pla.random.normal((8, 41, 61), grid, layout, mean=2.0, std=3.0, start=5, **key).gather()
            assert part.tobytes() == (whole[5:13] * 3.0 + 2.0).tobytes()


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
def test_single_counters_are_those_of_philox():
    key = counter.stream_key(5, "n")
    for number, again in (1, 0), (7, 3), (2**40 + 1, 1):
        before = np.array([number - 1, 0, 0, again], np.uint64)  # NumPy counts before it makes words
        want = np.random.Philox(key=key, counter=before).random_raw(4)
        assert np.array_equal(counter.philox(key, np.array([0, number]), again)[:, 1], want)


@pytest.mark.serial
def test_layers_have_one_area():
    scale, inner, curve = normals.layers()
    width = scale * 2.0**52
    assert np.array_equal(width[1:], inner[:-1])
    assert inner[-1] == curve[0] == 0
    np.testing.assert_allclose(curve[1:], np.exp(-0.5 * inner**2), rtol=2e-15)
    np.testing.assert_allclose(width * np.diff(curve), float(normals.AREA), rtol=4e-14)
    np.testing.assert_allclose(normals.TAIL, stats.norm.sf(float(normals.BASE)), rtol=1e-14)
    tail = np.sqrt(2 * np.pi) * normals.TAIL
    np.testing.assert_allclose(inner[0] * curve[1] + tail, float(normals.AREA), rtol=1e-14)


@pytest.mark.serial
def test_normals_are_normally_distributed():
    n = 1 << 22
    z = np.empty(n)
    normals.write_normals(counter.stream_key(2), (n,), (range(n),), z)
    assert stats.kstest(z, "norm").pvalue > 1e-3
    for moment, want, variance in (1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170):
        assert abs((z**moment).mean() - want) < 4 * np.sqrt(variance / n)
    edges = np.concatenate([np.arange(0, 3.0, 0.05), normals.layers()[1][:5][::-1], [4, 4.5]])
    for side in z[z > 0], -z[z < 0]:  # each in many bins, the edges of layers and the tail among them
        seen, sure = np.histogram(side, [*edges, np.inf])[0], np.diff(-stats.norm.sf([*edges, np.inf]))
        assert stats.chisquare(seen, n * sure * (seen.sum() / (n * sure.sum()))).pvalue > 1e-3
    far, expected = (np.abs(z) > 4).sum(), 2 * n * stats.norm.sf(4)
    assert abs(far - expected) < 4 * np.sqrt(expected)


@pytest.mark.serial
@pytest.mark.parametrize("layer", [0, 1, 2, 100, 254, 255])
def test_numbers_of_a_layer(layer):
    """Those of a place above the curve are of the tail or the wedge, or else drawn anew."""
    n, (scale, inner, curve) = 200_000, normals.layers()
    width, key = scale[layer] * 2.0**52, counter.stream_key(3)
    x = inner[layer] + (width - inner[layer]) * np.random.default_rng(0).random(n)
    found, sure = normals.raised(np.full(n, layer), x, counter.RandomStream(key).take(0, n))
    kept = found[sure]
    if not layer:
        assert sure.all()
        assert stats.kstest(kept, stats.truncnorm(float(normals.BASE), np.inf).cdf).pvalue > 1e-3
        back = normals.raised(np.zeros(3, int), -np.ones(3), np.array([1, 2**63, 2**64 - 1], np.uint64))[0]
        assert np.allclose(stats.norm.cdf(back), normals.TAIL * np.array([2.0**-53, 0.5, 1]), rtol=1e-9)
        return
    grid = np.linspace(inner[layer], width, 2001)
    density = np.exp(-0.5 * grid**2) - curve[layer]
    mass = np.concatenate([[0], np.cumsum((density[1:] + density[:-1]) / 2)])
    assert stats.kstest(kept, lambda v: np.interp(v, grid, mass / mass[-1])).pvalue > 1e-3
    share = np.trapezoid(density, grid) / ((curve[layer + 1] - curve[layer]) * (width - inner[layer]))
    assert abs(sure.mean() - share) < 4 * np.sqrt(share / n)
    again = normals.settled(key, np.arange(n), np.full(n, layer), x)
    anew = again[np.abs(again) > width]  # only numbers drawn anew lie farther out
    if layer < 255:
        assert abs(len(anew) / n - (1 - share) * 2 * stats.norm.sf(width)) < 4 * np.sqrt(1 / n)


@pytest.mark.serial
def test_normal_quantile_against_scipy():
    from scipy.special import ndtri

    tails = 2.0 ** -np.arange(1, 53)
    p = np.concatenate([np.linspace(1e-6, 1 - 1e-6, 10_001), tails, 1 - tails])
    want = ndtri(p)
    assert np.all(np.abs(normals.normal_quantile(p) - want) <= 3e-15 * np.maximum(1, np.abs(want)))


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
