"""`default_rng`: NumPy's Generator on any number of ranks, with the same bits on every grid."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
from scipy import stats

import parlinalg as pla
from parlinalg.array.create import dtype_named
from parlinalg.layout import Layout
from parlinalg.random import generator
from parlinalg.random.counter import RandomStream, stream_key
from parlinalg.random.distributions import words_at
from tests.cases import grids, layouts, pairs

pytestmark = pytest.mark.one_in(6)

SHAPES = [(), (1,), (13,), (5, 7), (3, 0, 2)]
N = 20_000

#: A draw, and the distribution that SciPy knows of it.
CONTINUOUS = {
    "random": (lambda g, **k: g.random(**k), stats.uniform()),
    "uniform": (lambda g, **k: g.uniform(-2, 3, **k), stats.uniform(-2, 5)),
    "standard_normal": (lambda g, **k: g.standard_normal(**k), stats.norm()),
    "normal": (lambda g, **k: g.normal(1, 2, **k), stats.norm(1, 2)),
    "lognormal": (lambda g, **k: g.lognormal(0.5, 0.3, **k), stats.lognorm(0.3, scale=np.exp(0.5))),
    "standard_exponential": (lambda g, **k: g.standard_exponential(**k), stats.expon()),
    "exponential": (lambda g, **k: g.exponential(3, **k), stats.expon(scale=3)),
    "laplace": (lambda g, **k: g.laplace(1, 2, **k), stats.laplace(1, 2)),
    "logistic": (lambda g, **k: g.logistic(1, 2, **k), stats.logistic(1, 2)),
    "gumbel": (lambda g, **k: g.gumbel(1, 2, **k), stats.gumbel_r(1, 2)),
    "rayleigh": (lambda g, **k: g.rayleigh(2, **k), stats.rayleigh(scale=2)),
    "weibull": (lambda g, **k: g.weibull(1.5, **k), stats.weibull_min(1.5)),
    "pareto": (lambda g, **k: g.pareto(3, **k), stats.lomax(3)),
    "power": (lambda g, **k: g.power(3, **k), stats.powerlaw(3)),
    "standard_cauchy": (lambda g, **k: g.standard_cauchy(**k), stats.cauchy()),
    "triangular": (lambda g, **k: g.triangular(-1, 0, 3, **k), stats.triang(0.25, -1, 4)),
    "standard_gamma": (lambda g, **k: g.standard_gamma(0.7, **k), stats.gamma(0.7)),
    "gamma": (lambda g, **k: g.gamma(2, 3, **k), stats.gamma(2, scale=3)),
    "chisquare": (lambda g, **k: g.chisquare(3, **k), stats.chi2(3)),
    "beta": (lambda g, **k: g.beta(2, 0.5, **k), stats.beta(2, 0.5)),
    "standard_t": (lambda g, **k: g.standard_t(4, **k), stats.t(4)),
}
DISCRETE = {
    "geometric": (lambda g, **k: g.geometric(0.3, **k), stats.geom(0.3)),
    "poisson": (lambda g, **k: g.poisson(4.5, **k), stats.poisson(4.5)),
    "binomial": (lambda g, **k: g.binomial(9, 0.3, **k), stats.binom(9, 0.3)),
    "integers": (lambda g, **k: g.integers(-3, 9, **k), stats.randint(-3, 9)),
    "integers, endpoint": (lambda g, **k: g.integers(5, endpoint=True, **k), stats.randint(0, 6)),
}
#: Ranges whose words are often rejected, and those of a whole dtype.
INTEGERS = [
    (np.int64, -(2**63), 2**63 - 1), (np.uint64, 0, 2**64 - 1), (np.uint64, 3, 2**63 + 5), (np.int64, -5, 3 * 2**61),
    (np.uint32, 0, 2**32 - 1), (np.int32, -(2**31), 5), (np.int8, -128, 127), (np.uint8, 3, 3), (np.bool_, 0, 1),
    (np.int16, 0, 3 * 2**12), (">i4", 0, 3 * 2**29),
]  # fmt: skip


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["one axis", "two axes", "three axes"])
def grid(request, world, backend):
    return pla.Grid(grids(world.size)[min(request.param, len(grids(world.size)) - 1)], world, backend, idle=True)


@pytest.fixture(scope="module")
def one(world):
    return pla.Grid({"r": 1}, world.sub((world.rank,), ()), "numpy")


def alike(draw, grid, one, shape, most=3):
    """A draw has the same bits in any layout on the grid as on one rank."""
    want = draw(pla.random.default_rng(3), size=shape, grid=one).gather()
    for layout, _ in pairs(layouts(grid.axes, len(shape), partial=want.dtype != bool), [0], most, seed=len(shape)):
        got = draw(pla.random.default_rng(3), size=shape, grid=grid, layout=layout)
        assert got.shape == shape
        assert got.layout == layout
        assert got.dtype == want.dtype
        assert got.gather().tobytes() == want.tobytes(), layout
    return want


@pytest.mark.parametrize("name", [*CONTINUOUS, *DISCRETE])
def test_the_same_bits_on_every_grid(grid, one, name):
    for shape in SHAPES:
        alike((CONTINUOUS | DISCRETE)[name][0], grid, one, shape)


@pytest.mark.parametrize(("dtype", "low", "high"), INTEGERS, ids=str)
def test_integers_of_any_range(grid, one, dtype, low, high):
    for shape in (), (7, 11), (997,):
        values = alike(lambda g, **k: g.integers(low, high, dtype=dtype, endpoint=True, **k), grid, one, shape)
        assert values.dtype == np.dtype(dtype).newbyteorder("=")
        assert values.size == 0 or (low <= int(values.min()) and int(values.max()) <= high)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_floating_dtypes(grid, one, dtype):
    for name in ("random", "uniform", "normal", "standard_normal", "standard_exponential", "standard_gamma"):
        values = alike(lambda g, **k: CONTINUOUS[name][0](g, dtype=dtype_named(dtype), **k),
                       grid, one, (13, 5), 3)  # fmt: skip
        assert values.dtype.name == dtype
        if name == "random":
            assert (values >= 0).all()
            assert (values < 1).all()


def test_parameters_are_arrays(grid, one):
    loc, scale = np.arange(5.0), np.arange(1.0, 4.0)[:, None]

    def drawn(g, on, layout=None):
        rng = pla.random.default_rng(1)
        far = pla.asarray(loc, grid=on)
        wide = pla.asarray(np.array([[2**40], [9], [2**63 - 1]]), grid=on)
        return [
            rng.normal(far, scale, grid=on).gather(), rng.normal(far, 1.0, size=(3, 5)).gather(),
            rng.exponential(scale, (3, 4), grid=on).gather(), rng.poisson(pla.asarray(loc, grid=on)).gather(),
            rng.integers(np.arange(4), wide, grid=on).gather(), rng.integers([1, 2], [3, 5], (6, 2), grid=on).gather(),
            rng.integers(pla.asarray(np.array([0, 2**63], np.uint64), grid=on), 2**64 - 1, (99, 2), np.uint64, True),
        ]  # fmt: skip

    *got, wide = drawn(pla.random.default_rng(1), grid)
    *want, whole = drawn(pla.random.default_rng(1), one)
    for a, b in zip([*got, wide.gather()], [*want, whole.gather()], strict=True):
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()
    z = pla.random.default_rng(1).standard_normal((3, 5), grid=one).gather()
    assert np.array_equal(got[0], loc + scale * z)
    assert ((got[4] >= np.arange(4)) & (got[4] < [[2**40], [9], [2**63 - 1]])).all()
    assert ((got[5] >= [1, 2]) & (got[5] < [3, 5])).all()
    assert (whole.gather()[:, 1] >= 2**63).all()


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_distributions(world, one, name):
    draw, distribution = CONTINUOUS[name]
    values = draw(pla.random.default_rng(11), size=N, grid=one).block
    assert stats.kstest(values, distribution.cdf).pvalue > 1e-3


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_distributions(one, name):
    draw, distribution = DISCRETE[name]
    values = draw(pla.random.default_rng(11), size=N, grid=one).block
    found, counts = np.unique(values, return_counts=True)
    expected = distribution.pmf(found) * N
    often = expected >= 5
    seen, want = counts[often], expected[often]
    assert (
        stats.chisquare([*seen, N - seen.sum()], [*want, N - want.sum()]).pvalue > 1e-3
        if not often.all()
        else (stats.chisquare(seen, want * seen.sum() / want.sum()).pvalue > 1e-3)
    )


@pytest.mark.serial
@pytest.mark.parametrize(("dtype", "most"), [(np.uint64, 3 * 2**62 - 1), (np.uint32, 3 * 2**30 - 1)])
def test_no_integer_is_more_likely(one, dtype, most):
    """Of three fourths of the words a modulo would make the first third twice as likely."""
    with np.errstate(all="raise"):
        values = pla.random.default_rng(5).integers(0, most, N, dtype, endpoint=True, grid=one).block
    thirds = np.bincount((values // dtype((most + 1) // 3)).astype(int), minlength=3)
    assert stats.chisquare(thirds).pvalue > 1e-3
    wide = pla.random.default_rng(5).integers(np.zeros(1, dtype), np.full(1, most, dtype), N, dtype, True, grid=one)
    assert stats.chisquare(np.bincount((wide.block // dtype((most + 1) // 3)).astype(int), minlength=3)).pvalue > 1e-3


@pytest.mark.serial
def test_quantiles_of_counts_are_scipys(one):
    u = np.random.default_rng(0).random(4000)
    from scipy import special

    for lam in (0.0, 1e-3, 0.7, 4.5, 60.0, 4e4):
        assert np.array_equal(generator._counts(special.pdtrik, special.pdtr)(u, lam), stats.poisson.ppf(u, lam))
    for n, p in ((1, 0.5), (9, 0.3), (500, 0.01), (500, 0.999)):
        assert np.array_equal(generator._counts(special.bdtrik, special.bdtr)(u, n, p), stats.binom.ppf(u, n, p))
    rng = pla.random.default_rng(0)
    assert np.array_equal(rng.binomial([0, 5, 5], [0.5, 0.0, 1.0], grid=one).gather(), [0, 0, 5])
    assert rng.geometric(1.0, 9, grid=one).gather().tolist() == [1] * 9


@pytest.mark.serial
def test_words_of_single_numbers(tune):
    tune(RANDOM_JUMP=3, RANDOM_TILE=16)
    key = stream_key(1, "x")
    whole = RandomStream(key, 32).take(0, 400)
    numbers = np.flatnonzero(np.random.default_rng(0).random(400) < 0.3)
    assert np.array_equal(words_at(RandomStream(key, 32), numbers), whole[numbers])


# ------------------------------------------------------------------------------------------------ orders
@pytest.mark.parametrize("bits", [64, 3], ids=["keys", "equal keys"])
def test_permutations(grid, one, monkeypatch, bits):
    monkeypatch.setattr(generator, "KEY_BITS", bits)
    for n in (0, 1, 2, 37):
        want = pla.random.default_rng(n).permutation(n, grid=one).gather()
        got = pla.random.default_rng(n).permutation(n, grid=grid)
        assert got.dtype == np.int64
        assert got.gather().tolist() == want.tolist()
        assert sorted(want) == list(range(n))
    values = np.arange(35.0).reshape(5, 7)
    for layout, _ in pairs(layouts(grid.axes, 2), [0], 3 if bits == 64 else 1, seed=bits):
        x = pla.distribute(values, grid, layout)
        for axis in (0, 1, -1):
            want = pla.random.default_rng(2).permutation(5 if axis == 0 else 7, grid=one).gather()
            y = pla.random.default_rng(2).permutation(x, axis)
            assert y.layout == layout.with_partial(())
            np.testing.assert_array_equal(y.gather(), values.take(want, axis))
            if not layout.partial:
                z = x.copy()
                pla.random.default_rng(2).shuffle(z, axis)
                np.testing.assert_array_equal(z.gather(), values.take(want, axis))
        for axis in (None, 0, 1):
            y = pla.random.default_rng(2).permuted(x, axis).gather()
            want = pla.random.default_rng(2).permuted(pla.distribute(values, one, Layout(None, None)), axis).gather()
            np.testing.assert_array_equal(y, want)
            np.testing.assert_array_equal(np.sort(y, axis), np.sort(values, axis))
            assert not np.array_equal(y, values)
        np.testing.assert_array_equal(x.gather(), values)


@pytest.mark.parametrize("bits", [64, 2], ids=["keys", "equal keys"])
def test_all_orders_are_equally_likely(one, monkeypatch, bits):
    monkeypatch.setattr(generator, "KEY_BITS", bits)
    rng = pla.random.default_rng(9)
    counts: dict[tuple[int, ...], int] = {}
    if bits == 2:
        orders = [rng.permutation(3, grid=one).gather() for _ in range(600)]
    else:
        orders = list(rng.permuted(pla.asarray(np.tile(np.arange(3), (6000, 1)), grid=one), 1).gather())
    for order in orders:
        counts[tuple(order.tolist())] = counts.get(tuple(order.tolist()), 0) + 1
    assert len(counts) == 6
    assert stats.chisquare(list(counts.values())).pvalue > 1e-3


# ------------------------------------------------------------------------------------------------ choice
CHOICES = {
    "of many": lambda g, on: g.choice(10**12, (5, 3), grid=on),
    "few of many": lambda g, on: g.choice(10**12, 40, replace=False, grid=on),
    "most": lambda g, on: g.choice(23, 19, replace=False, grid=on),
    "a third": lambda g, on: g.choice(90, (6, 5), replace=False, grid=on),
    "all": lambda g, on: g.choice(23, (23,), replace=False, grid=on),
    "none": lambda g, on: g.choice(23, (0, 3), replace=False, grid=on),
    "one": lambda g, on: g.choice(7, grid=on),
    "weights": lambda g, on: g.choice(4, (7, 9), p=[0.1, 0.0, 0.7, 0.2], grid=on),
    "weights once": lambda g, on: g.choice(4, 3, replace=False, p=[0.1, 0.0, 0.7, 0.2], grid=on),
    "cut weights": lambda g, on: g.choice(99, 50, p=pla.full(99, 1 / 99, on), grid=on),
    "items": lambda g, on: g.choice(pla.asarray(np.arange(35.0).reshape(5, 7), grid=on), 3, axis=1),
    "an item": lambda g, on: g.choice(pla.asarray(np.arange(35.0).reshape(5, 7), grid=on)),
    "items in a shape": lambda g, on: g.choice(np.arange(35.0).reshape(5, 7), (2, 2), replace=False, axis=1, grid=on),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices(grid, one, name):
    want = CHOICES[name](pla.random.default_rng(4), one).gather()
    rng = pla.random.default_rng(4)
    got = CHOICES[name](rng, grid)
    np.testing.assert_array_equal(got.gather(), want)
    if name in ("few of many", "most", "a third", "all"):
        assert len(np.unique(want)) == want.size
    shape = {"items": (5, 3), "an item": (7,), "items in a shape": (5, 2, 2)}.get(name)
    assert shape is None or got.shape == shape


@pytest.mark.parametrize("replace", [True, False])
def test_choices_by_weights(one, replace):
    weights = np.array([0.1, 0.0, 0.5, 0.4])
    rng = pla.random.default_rng(8)
    if replace:
        counts = np.bincount(rng.choice(4, N, p=weights, grid=one).block, minlength=4)
        assert counts[1] == 0
        assert stats.chisquare(counts[weights > 0], N * weights[weights > 0]).pvalue > 1e-3
        return
    pairs = [tuple(rng.choice(4, 2, False, weights, grid=one).gather().tolist()) for _ in range(1500)]
    expected = {
        (i, j): weights[i] * weights[j] / (1 - weights[i]) for i in range(4) for j in range(4)
        if i != j and weights[i] * weights[j]
    }  # fmt: skip
    assert set(pairs) == set(expected)
    assert stats.chisquare([pairs.count(k) for k in expected], [1500 * v for v in expected.values()]).pvalue > 1e-3


def test_choices_without_repeats_are_equally_likely(one):
    rng = pla.random.default_rng(8)
    for k in (2, 4):  # by drawing until enough differ, and by a permutation
        firsts = np.zeros((5, k), int)
        for _ in range(600):
            firsts[rng.choice(5, k, replace=False, grid=one).gather(), np.arange(k)] += 1
        assert stats.chisquare(firsts, axis=None).pvalue > 1e-3


# ------------------------------------------------------------------------------------------------ the stream
def test_draws_go_on_and_are_repeated(grid):
    rng = pla.random.default_rng(5)
    first, second = (rng.random(9, grid=grid).gather() for _ in range(2))
    assert not np.array_equal(first, second)
    again = pla.random.default_rng(5)
    state = json.loads(json.dumps(again.state_dict()))
    rng.choice(50, 20, replace=False, grid=grid)
    rng.permutation(50, grid=grid)
    assert np.array_equal(again.random(9, grid=grid).gather(), first)
    for other in (copy.deepcopy(rng), pickle.loads(pickle.dumps(rng)), pla.random.default_rng()):
        other.load_state_dict(rng.state_dict())
        assert repr(other) == repr(rng)
        assert np.array_equal(
            other.normal(size=9, grid=grid).gather(), copy.copy(rng).normal(size=9, grid=grid).gather()
        )
    again.load_state_dict(state)
    assert np.array_equal(again.random(9, grid=grid).gather(), first)
    assert pla.random.default_rng(again) is again
    with pytest.raises(ValueError, match="seed, path, calls and spawned"):
        rng.load_state_dict({"seed": 1})


def test_children_are_independent(one):
    rng = pla.random.default_rng(5)
    children = [*rng.spawn(2), *rng.spawn(1), *rng.spawn(0)]
    children += children[0].spawn(1)
    drawn = {g.random(4, grid=one).gather().tobytes() for g in (rng, *children)}
    assert len(drawn) == 5
    other = pla.random.default_rng(5)
    other.random(3, grid=one)
    assert other.spawn(3)[2].random(4, grid=one).gather().tobytes() in drawn


def test_seeds(world, one):
    assert pla.random.default_rng().seed != pla.random.default_rng().seed
    assert len(set(world.share(pla.random.default_rng().seed))) == 1
    for seed in (2**200, [1, 2], np.random.SeedSequence(3)):
        assert pla.random.default_rng(seed).seed == pla.random.default_rng(seed).seed
    with pytest.raises(ValueError, match="seed is a whole number of at least 0"):
        pla.random.default_rng(-1)
    with pytest.raises(TypeError, match=r"not 1\.5"):
        pla.random.default_rng(1.5)
    with pytest.raises(TypeError, match="give a seed"):
        pla.random.default_rng(np.random.default_rng(1))


@pytest.mark.mpi(min_size=2)
def test_seeds_that_differ_are_noticed(world, make_grid):
    grid = make_grid({"a": world.size})
    with pytest.raises(pla.CommError, match="seed and the number of calls"):
        pla.random.default_rng(world.rank).normal(size=4, grid=grid)
    rng = pla.random.default_rng(1)
    if world.rank == 0:
        rng.random(3, grid=pla.Grid({"a": 1}, world.sub((0,), ())))
    with pytest.raises(pla.CommError, match="the same calls of it"):
        rng.random(3, grid=grid)
    with pytest.raises(pla.CommError, match="parameters"):
        pla.random.default_rng(1).normal(float(world.rank), size=3, grid=grid)


def test_results_are_given_a_place(grid):
    out = pla.zeros((5, 3), grid, Layout(grid.axes, None))
    result = pla.random.default_rng(1).standard_normal(out=out)
    assert result is out
    assert np.array_equal(out.gather(), pla.random.default_rng(1).standard_normal((5, 3), grid=grid).gather())
    half = pla.zeros((5, 3), grid, dtype=np.float32)
    pla.random.default_rng(1).random(dtype=np.float32, out=half)
    with pytest.raises(ValueError, match="out="):
        pla.random.default_rng(1).random((3, 3), out=out)


ERRORS = [
    (lambda g: g.integers(0), ValueError, "high <= 0"), (lambda g: g.integers(5, 5), ValueError, "low >= high"),
    (lambda g: g.integers(0, 300, dtype=np.int8), ValueError, "high is out of bounds for int8"),
    (lambda g: g.integers(-1, 3, dtype=np.uint8), ValueError, "low is out of bounds for uint8"),
    (lambda g: g.integers([1, 2], [3, 1]), ValueError, "low >= high"),
    (lambda g: g.integers([1, 2], 300, dtype=np.uint8), ValueError, "high is out of bounds for uint8"),
    (lambda g: g.integers(3, dtype=float), TypeError, "Unsupported dtype"),
    (lambda g: g.normal(scale=-1), ValueError, "scale < 0"), (lambda g: g.uniform(2, 1), ValueError, "high - low < 0"),
    (lambda g: g.normal(scale=[1, -1]), ValueError, "scale < 0"),
    (lambda g: g.uniform(0, np.inf), OverflowError, "range exceeds"), (lambda g: g.random(-1), ValueError, "negative"),
    (lambda g: g.random(dtype=int), TypeError, "int64"), (lambda g: g.beta(-1, 1), ValueError, "a <= 0"),
    (lambda g: g.normal([1, 2, 3], size=2), ValueError, "broadcast"), (lambda g: g.geometric(0), ValueError, "p <= 0"),
    (lambda g: g.normal([[1], [2]], size=2), ValueError, "do not broadcast to size"),
    (lambda g: g.triangular(1, 0, 2), ValueError, "left > mode"), (lambda g: g.poisson([-1]), ValueError, "lam < 0"),
    (lambda g: g.binomial(3, 1.5), ValueError, "p < 0, p > 1"), (lambda g: g.spawn(-1), ValueError, "at least 0"),
    (lambda g: g.choice(0), ValueError, "positive integer"), (lambda g: g.choice(2.5), ValueError, "or an integer"),
    (lambda g: g.choice([]), ValueError, "cannot be empty"),
    (lambda g: g.choice(3, 5, False), ValueError, "larger sample"),
    (lambda g: g.choice(3, p=[0.5, 0.5]), ValueError, "same size"),
    (lambda g: g.choice(2, p=[0.5, 0.6]), ValueError, "sum to 1"),
    (lambda g: g.choice(2, p=[-0.5, 1.5]), ValueError, "not non-negative"),
    (lambda g: g.choice(2, p=[[0.5, 0.5]]), ValueError, "1-dimensional"),
    (lambda g: g.choice(2, p=[np.nan, 1]), ValueError, "NaN"),
    (lambda g: g.choice(3, 2, False, [1, 0, 0]), ValueError, "Fewer non-zero"),
    (lambda g: g.permutation(2.5), np.exceptions.AxisError, "out of bounds"),
    (lambda g: g.permuted(np.ones((2, 2)), 2), np.exceptions.AxisError, "out of bounds"),
    (lambda g: g.shuffle(np.ones(3)), TypeError, "takes a DistArray"), (lambda g: g.permuted(5), TypeError, "unsized"),
]  # fmt: skip


def test_errors_are_numpys(make_grid, world):
    with make_grid({"a": world.size}):
        for call, error, text in ERRORS:
            with pytest.raises(error, match=text):
                call(pla.random.default_rng(1))


def test_a_rank_computes_its_own_block(make_grid, world):
    """Drawing a cut array moves a checksum, and sorting what a permutation moves: no rank holds it whole."""
    grid = make_grid({"a": world.size})
    n = 4096 * world.size
    with pla.ledger(grid) as book:
        pla.random.default_rng(1).normal(size=n, grid=grid)
    assert not book.words.total()
    with pla.ledger(grid) as book:
        pla.random.default_rng(1).permutation(n, grid=grid)
    assert book.words.total() <= 8 * n / world.size
    with pla.ledger(grid) as book:
        pla.random.default_rng(1).choice(10**15, 64, replace=False, grid=grid)
    assert book.words.total() <= 4000
