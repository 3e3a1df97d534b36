"""The gradient reducer: right sums, exact words, one order, flat buffers."""

from __future__ import annotations

import tracemalloc
from itertools import permutations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, optim
from parlinalg.grid import factorizations
from parlinalg.layout import piece
from parlinalg.parallel import GradientReducer, clip_gradient_norm, clip_gradient_value, gradient_norm
from parlinalg.train import TrainingConfig
from tests.autograd.cases import TERMS, gradient_of_terms, term
from tests.training import batch, every_scheme, mean_loss, sizes_for

L = pla.Layout


@pytest.fixture(autouse=True, params=["messages", "in common"])
def how(request, tune):
    """Buckets are summed by messages, and where they lie in memory that the ranks have in common."""
    tune(must=False, SHARED_BYTES=1 if request.param == "in common" else 1 << 62)
    return request.param


DATA = every_scheme()["data"]


def model_on(grid, scheme, sizes=(7, 11, 5)):
    return nn.MLP(sizes, scheme, grid, "tanh", dtype=np.float64, seed=2)


def backward(model, grid, scheme, step=0):
    mean_loss(model, *batch(grid, scheme, step)).backward()


def gradients(model):
    return {n: p.grad.gather() for n, p in model.named_parameters()}


def close(got, want):
    assert got.keys() == want.keys()
    for n in want:
        np.testing.assert_allclose(got[n], want[n], rtol=0, atol=1e-13 * np.abs(want[n]).max())


def lies_in_a_file(array):
    """Return True if an array's memory is not NumPy's own, but a file's, which other processes may map too."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array is not None


@pytest.fixture
def reference(world):
    """Gradients on this rank alone, of the sum of steps."""

    def of(steps=(0,)):
        with pla.Grid({"one": 1}, world.sub((world.rank,), ()), "numpy") as grid:
            scheme = every_scheme()["serial"]
            model = model_on(grid, scheme)
            for step in steps:
                backward(model, grid, scheme, step)
            return gradients(model)

    return of


@pytest.mark.core
@pytest.mark.parametrize("name", every_scheme())
def test_gradients_are_those_of_one_rank(name, make_grid, world, reference, how):
    scheme = every_scheme()[name]
    for sizes in sizes_for(scheme, world.size, 2 if world.size < 5 else 1):
        grid = make_grid(sizes)
        model = model_on(grid, scheme)
        reducer = GradientReducer(model.parameters(), first_bucket=100, bucket=300)
        for step in range(3):  # the first makes the buckets, the others fill them on the way
            model.zero_grad()
            backward(model, grid, scheme, step)
            close(gradients(model), reference((step,)))
        flats = [b.data for b in reducer.buckets]
        if grid.backend.host_memory and world.local_size == world.size and not world.checked:
            in_common = [lies_in_a_file(b.data) for b in reducer.buckets if b.axes]
            assert in_common == [how == "in common"] * len(in_common)
        assert all(p.grad.layout == p.layout for p in model.parameters())
        assert all(any(np.may_share_memory(p.grad.block, f) for f in flats) for p in model.parameters() if p.block.size)


@pytest.mark.mpi(min_size=2)
def test_a_planted_wrong_reduction_is_caught(make_grid, world, reference, monkeypatch):
    grid = make_grid({"data": world.size})
    comm = type(grid.comm(("data",)))
    plain = comm.all_reduce
    monkeypatch.setattr(comm, "all_reduce", lambda self, buffer, **options: plain(self, buffer.copy(), **options))
    model = model_on(grid, DATA)
    GradientReducer(model.parameters())
    loss = mean_loss(model, *batch(grid, DATA))
    loss.backward()
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        close(gradients(model), reference((0,)))


def test_gradients_add_up(make_grid, world, reference):
    grid = make_grid({"data": world.size})
    model = model_on(grid, DATA)
    GradientReducer(model.parameters(), first_bucket=100, bucket=300)
    backward(model, grid, DATA, 0)
    backward(model, grid, DATA, 1)
    close(gradients(model), reference((0, 1)))
    with pla.no_sync():
        backward(model, grid, DATA, 2)
    backward(model, grid, DATA, 3)
    close(gradients(model), reference((0, 1, 2, 3)))
    model.zero_grad()
    with pla.no_sync():
        backward(model, grid, DATA, 4)
        backward(model, grid, DATA, 5)
    backward(model, grid, DATA, 6)
    close(gradients(model), reference((4, 5, 6)))


@pytest.mark.always
def test_terms_partial_over_unlike_axes_count_once(make_grid, world):
    """In a bucket too, by several passes: a term that lacks axes of the others counts on one rank along each."""
    shapes = [(5, 4), (3, 2)]
    for a, b in factorizations(world.size, 2):
        grid = make_grid({"a": a, "b": b})
        for kinds in permutations(TERMS, 3):
            ps = [pla.Parameter(pla.zeros(s, grid, L(None, None), np.float64), f"p{i}") for i, s in enumerate(shapes)]
            GradientReducer(ps, first_bucket=10, bucket=1000)
            for again in range(2):  # the first makes the buckets
                for i, axes in enumerate(kinds[:2]):
                    with pla.no_sync():
                        term(axes, ps[0], i).backward()
                (term(kinds[2], ps[0], 2) + term(kinds[again], ps[1], 3)).backward()
                for p, seeds in zip(ps, (range(3), (3,)), strict=True):
                    want = gradient_of_terms(p.shape, seeds)
                    np.testing.assert_allclose(p.grad.gather(), want, rtol=1e-12, err_msg=f"{a} × {b}: {kinds} {again}")
                    p.grad = None


def test_no_sync_moves_nothing(make_grid, world):
    grid = make_grid({"data": world.size})
    model = model_on(grid, DATA)
    GradientReducer(model.parameters())
    loss = mean_loss(model, *batch(grid, DATA))
    with pla.ledger(grid) as book, pla.no_sync():
        loss.backward()
    assert book.words.total() == 0


def test_words_are_those_of_an_all_reduce_a_bucket(make_grid, world):
    grid = make_grid({"data": world.size})
    model = model_on(grid, DATA)
    reducer = GradientReducer(model.parameters(), first_bucket=100, bucket=300)
    for first in (True, False):
        model.zero_grad()
        loss = mean_loss(model, *batch(grid, DATA))
        with pla.ledger(grid) as book:
            loss.backward()
        sizes = [b.data.size for b in reducer.buckets]
        assert sum(sizes) == sum(p.size for p in model.parameters())
        want = sum(2 * (n - len(piece(n, world.size, world.rank))) for n in sizes) if world.size > 1 else 0
        assert book.words.total() == want, first
        assert book.calls.total() == (len(sizes) if world.size > 1 else 0)


@pytest.mark.mpi(min_size=2)
def test_buckets_are_small_first_and_start_in_order_during_the_walk(make_grid, world, monkeypatch):
    grid = make_grid({"data": world.size})
    model = model_on(grid, DATA, (7, 11, 6, 9, 5))
    reducer = GradientReducer(model.parameters(), first_bucket=100, bucket=800)
    names, started = [n for n, _ in model.named_parameters()], []
    backward(model, grid, DATA)
    order = [s.parameter.name for b in reducer.buckets for s in b.slots]
    assert sorted(order) == sorted(names)
    assert {n.split(".")[0] for n in order[:2]} == {"6"}, "the last layer's gradients arrive first"
    assert reducer.buckets[0].data.nbytes >= 100
    assert len(reducer.buckets[0].slots) <= 2
    assert all(b.data.nbytes - b.slots[-1].view.nbytes < 800 for b in reducer.buckets[1:])
    comm = type(grid.comm(("data",)))
    plain, arrives, arrived = comm.all_reduce, reducer.ready, []

    def spy(self, buffer, **options):
        if options.get("wait") is False:
            index = next(i for i, b in enumerate(reducer.buckets) if b.data is buffer)
            started.append((index, len(arrived)))
        return plain(self, buffer, **options)

    def ready(parameter, *args, **options):
        arrived.append(parameter.name)
        arrives(parameter, *args, **options)

    monkeypatch.setattr(comm, "all_reduce", spy)
    reducer.ready = ready
    model.zero_grad()
    backward(model, grid, DATA)
    assert [i for i, _ in started] == list(range(len(reducer.buckets)))
    assert sorted(arrived) == sorted(names)
    assert started[0][1] < len(names), "the first bucket starts before the last gradient has arrived"
    assert all(theirs == world.share(started)[0] for theirs in world.share(started))


def test_parameters_not_reached_contribute_zeros(make_grid, world, reference):
    grid = make_grid({"data": world.size})
    model, spare = model_on(grid, DATA), nn.Linear(3, 4, DATA, grid, dtype=np.float64, seed=1, name="spare")
    reducer = GradientReducer([*model.parameters(), *spare.parameters()], first_bucket=100, bucket=300)
    for step in (0, 1):
        backward(model, grid, DATA, step)
    assert not spare.weight.grad.gather().any()
    close(gradients(model), reference((0, 1)))
    x = pla.Tensor(pla.ones((6, 3), grid, L("data", None)))
    for _ in range(3):  # the spare layer is used from now on, and its gradient partial
        model.zero_grad()
        spare.zero_grad()
        (spare(x).sum() + mean_loss(model, *batch(grid, DATA, 0))).backward()
        np.testing.assert_array_equal(spare.weight.grad.gather(), np.full((3, 4), 6.0))
        close(gradients(model), reference((0,)))
    model.zero_grad()
    spare.zero_grad()
    with pla.no_sync():
        spare(x).sum().backward()
    backward(model, grid, DATA, 0)  # settles what no_sync left in parameters it does not reach
    np.testing.assert_array_equal(spare.weight.grad.gather(), np.full((3, 4), 6.0))
    close(gradients(model), reference((0,)))
    with pytest.raises(pla.ConfigError, match="detach"):
        GradientReducer(model.parameters())
    reducer.detach()
    model.zero_grad()
    backward(model, grid, DATA, 1)
    close(gradients(model), reference((1,)))


@pytest.mark.parametrize("name", every_scheme())
def test_the_norm_counts_each_element_once(name, make_grid, world, reference):
    scheme, want = every_scheme()[name], reference((0,))
    norm = np.sqrt(sum((g**2).sum() for g in want.values()))
    for sizes in sizes_for(scheme, world.size, 2 if world.size < 5 else 1):
        grid = make_grid(sizes)
        model = model_on(grid, scheme)
        backward(model, grid, scheme)
        twice = [*model.parameters(), *model.parameters()]
        np.testing.assert_allclose(gradient_norm(twice), norm, rtol=1e-13)
        np.testing.assert_allclose(clip_gradient_norm(twice, 0.25 * norm), norm, rtol=1e-13)
        close(gradients(model), {n: g * (0.25 * norm / (norm + 1e-6)) for n, g in want.items()})
        assert clip_gradient_norm(model.parameters(), 10 * norm) < norm


def test_buckets_are_made_and_filled_one_after_the_other(make_grid, world, backend):
    """Of the first gradients no more than a bucket's are there twice: NumPy's memory at the most shows it."""
    grid = make_grid({"data": world.size})
    n, size = 12, 1 << 16
    ps = [pla.Parameter(pla.ones(size, grid, L(None)), f"p{i}") for i in range(n)]
    reducer = GradientReducer(ps, None, 1, 1)
    x = pla.Tensor(pla.ones((world.size, 1), grid, L("data", None)))
    loss = sum((x * p).sum() for p in ps[1:])
    loss = loss + (x * ps[0]).sum()
    tracemalloc.start()
    try:
        loss.backward()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    nbytes = ps[0].block.nbytes
    assert len(reducer.buckets) == n
    for p in ps:
        np.testing.assert_array_equal(p.grad.gather(), np.full(size, float(world.size)))
    assert backend != "numpy" or most < (n + 3) * nbytes, most / nbytes


@pytest.mark.parametrize("limit", [0, -1.0, np.nan])
def test_a_limit_to_clip_by_is_above_zero(limit, make_grid, world):
    grid = make_grid({"data": world.size})
    p = pla.Parameter(pla.ones(4, grid, L(None)))
    p.grad = pla.full(4, 4.0, grid, L(None))
    with pytest.raises(pla.ConfigError, match=f"clipped to a norm above 0, not {limit!r}"):
        clip_gradient_norm([p], limit)
    with pytest.raises(pla.ConfigError, match=f"clipped to a value above 0, not {limit!r}"):
        clip_gradient_value([p], limit)
    for clips in ({"clip_grad_norm": limit}, {"clip_grad_value": limit}):
        with pytest.raises(pla.ConfigError, match=f"above 0, not {limit!r}"):
            pla.initialize(nn.Linear(2, 2, DATA, grid), lambda p: optim.SGD(p, 0.1), config=TrainingConfig(**clips))
    assert np.array_equal(p.grad.gather(), np.full(4, 4.0))


@pytest.mark.parametrize("dtype", ["int8", "bf17", "complex64", ">f4", bool, False])
def test_gradients_travel_in_floats(dtype, make_grid, world):
    grid = make_grid({"data": world.size})
    p = pla.Parameter(pla.ones(4, grid, L(None)))
    with pytest.raises(pla.ConfigError, match=r"travel in float16, bfloat16, float32 or float64, not "):
        GradientReducer([p], dtype=dtype)
    assert p.reducer is None
    assert GradientReducer([p], dtype=np.float32).dtype == np.float32


def test_a_norm_that_is_not_finite_changes_nothing(make_grid, world):
    grid = make_grid({"data": world.size})
    p = pla.Parameter(pla.ones(4, grid, L(None)))
    p.grad = pla.full(4, np.nan, grid, L(None))
    q = pla.Parameter(pla.ones(4, grid, L("data")))
    q.grad = pla.ones(4, grid, L("data"))
    assert np.isnan(clip_gradient_norm([p, q], 0.1))
    assert np.array_equal(q.grad.gather(), np.ones(4))
    q.grad = pla.DistArray(q.block, (4,), L(None, partial="data"), grid)
    with pytest.raises(pla.LayoutError, match="no_sync"):
        gradient_norm([q])
