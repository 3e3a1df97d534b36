"""ZeRO's gathers that go on in the next forward pass: the same bits, awaited when a value is read and not before."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, optim
from parlinalg.autograd import no_grad
from parlinalg.autograd.storage import owners
from parlinalg.backend import backend_of
from parlinalg.comm import Handle
from parlinalg.parallel import GradientReducer, WeightGatherer, ZeRO, clip_gradient_norm, zero
from parlinalg.train.checkpoint_pieces import pieces_of
from tests.conftest import BACKEND
from tests.launching import launch as start
from tests.models import loss_of, make
from tests.parallel.test_zero import LIMITS, check_steps_with_masters, go_on, with_data
from tests.training import sizes_for

L = pla.Layout
STAGES = [1, 2]
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: optim.SGD(ps, 0.1, 0.9, nesterov=True),
    "adamw": lambda ps: optim.AdamW(ps, 0.01),
    "master": lambda ps: optim.AdamW(ps, 0.01, master="float64"),
    "lamb": lambda ps: optim.LAMB(ps, 0.01),
    "muon": lambda ps: optim.Muon(ps, 0.01),
    "shampoo": lambda ps: optim.Shampoo(ps, 0.01),
    "groups": lambda ps: optim.AdamW(optim.decay_groups(ps, 0.1), 0.01),
}


class Latest(Handle):
    """An all-gather that brings nothing before it is awaited; until then the others' parts are NaN."""

    def __init__(self, bucket: Any) -> None:
        self.bucket = bucket
        own = bucket.own
        self.mine = bucket.values[own.start : own.stop].copy()
        bucket.values[...] = np.nan
        bucket.values[own.start : own.stop] = self.mine

    def wait(self) -> None:
        if self.bucket is not None:
            self.bucket.comm.all_gather(self.mine, self.bucket.values, self.bucket.lengths)
            self.bucket = None

    def test(self) -> bool:
        return False


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that other ranks have updated arrive as late as they can."""
    monkeypatch.setattr(zero, "_gather", Latest)


def trained(kind, scheme, grid, handler, optimizer="adamw", steps=3, *, clip=0.5, microbatches=2, **options):
    """The losses and weights of a training with an evaluation and the states' dict between steps."""
    model = make(kind, scheme, grid, p=0.1, **options)
    if handler.stage == 3:
        WeightGatherer(model, axes="data")
    reducer = GradientReducer(model.parameters(), [handler], **LIMITS)
    update = OPTIMIZERS[optimizer](model.named_parameters())
    losses = go_on(model, reducer, update, range(steps), clip, microbatches=microbatches)
    with no_grad():
        losses.append(loss_of(model, 7).item())
    state = update.state_dict()
    losses += go_on(model, reducer, update, range(steps, steps + 2), clip, microbatches=microbatches)
    return losses, state, model.state_dict()


def check_alike(got, want, what):
    for one, other in zip(flattened(got), flattened(want), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=what)


def flattened(value):
    """The arrays and numbers in a value, on the host."""
    if isinstance(value, dict):
        return [each for v in value.values() for each in flattened(v)]
    if isinstance(value, list | tuple):
        return [each for v in value for each in flattened(v)]
    return [backend_of(value).to_host(value) if hasattr(value, "dtype") else value]


def grids(ranks, stage, full):
    """Schemes with a data axis, each on a grid of several data parallel ranks."""
    for i, (name, scheme) in enumerate(with_data().items()):
        shapes = [sizes for sizes in sizes_for(scheme, ranks, 10**6) if sizes["data"] > 1]
        if shapes and (full or name in ("data", "data × 1d", "data × 2d")):
            yield name, scheme, shapes[(i + stage) % len(shapes)]


@pytest.mark.core
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_the_same_bits_on_every_grid(stage, late, make_grid, world, full):
    for i, (name, scheme, sizes) in enumerate(grids(world.size, stage, full)):
        kind = ("gpt", "llama", "bert", "vit")[i % 4]
        grid = make_grid(sizes)
        want = trained(kind, scheme, grid, ZeRO(stage))
        got = trained(kind, scheme, grid, ZeRO(stage, overlap_gather=True))
        grid.close()  # MPI has 2048 communicators
        check_alike(got, want, f"{kind}, {name}, {sizes}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_bits_of_every_optimizer(optimizer, stage, late, make_grid, world):
    grid = make_grid({"data": world.size})
    options = {"dtype": "float32"} if optimizer == "master" else {}
    found = [
        trained("gpt", with_data()["data"], grid, ZeRO(stage, overlap_gather=overlap), optimizer, **options)
        for overlap in (False, True)
    ]
    check_alike(*found, optimizer)


@pytest.mark.mpi(min_size=2)
def test_the_same_bits_by_mpi_and_of_what_stage_3_leaves_whole(make_grid, world):
    """Gathers as they arrive; stage 3 does not cut norms and biases."""
    grid = make_grid({"data": world.size})
    schemes = with_data()
    cases = [(schemes["data"], 1, "reduce-scatter"), (schemes["data"], 2, "whole")]
    cases.append((schemes["data"].with_weights_cut("data"), 3, "reduce-scatter"))
    for scheme, stage, accumulate in cases:
        found = [
            trained("gpt", scheme, grid, ZeRO(stage, accumulate=accumulate, overlap_gather=overlap))
            for overlap in (False, True)
        ]
        check_alike(*found, f"stage {stage}")


@pytest.mark.mpi(min_size=2)
def test_sixteen_bits_with_masters(late, make_grid, world):
    grid = make_grid({"data": world.size})
    for overlap in (False, True):
        rng = np.random.default_rng(0)
        ps = [
            pla.Parameter(pla.distribute(rng.normal(size=n).astype(ml_dtypes.bfloat16), grid, L(None)), f"p{n}")
            for n in (7, 5, 13)
        ]
        starts = [p.gather() for p in ps]
        check_steps_with_masters(ps, starts, grid, [ZeRO(2, overlap_gather=overlap)], "float32")


# ------------------------------------------------------------------ when they are awaited
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", STAGES)
def test_gathers_are_in_flight_when_the_forward_pass_begins(stage, make_grid, world):
    grid = make_grid({"data": world.size})
    model = make("gpt", with_data()["data"], grid)
    reducer = GradientReducer(model.parameters(), [ZeRO(stage, overlap_gather=True)], **LIMITS)
    update = optim.AdamW(model.parameters(), 0.01)
    (values,) = owners(model.parameters())
    assert len(reducer.buckets) > zero.MOST_IN_FLIGHT + 1
    for step in range(3):
        assert values.in_flight == (zero.MOST_IN_FLIGHT if step else 0)
        assert [b.gathering for b in reducer.buckets] == [bool(step)] * len(reducer.buckets)
        with pla.ledger(grid) as book:
            loss = loss_of(model, step)
        gathers = sum(calls for (op, _), calls in book.calls.items() if op == "all_gather")
        assert gathers == (len(reducer.buckets) - zero.MOST_IN_FLIGHT if step else 0)
        assert values.in_flight == 0
        assert not any(b.gathering for b in reducer.buckets)
        assert values not in grid.polled
        loss.backward()
        update.step()
        assert values in grid.polled
        update.zero_grad()
    values.finish()
    assert values.in_flight == 0
    assert not grid.closing


@pytest.mark.mpi(min_size=2)
def test_the_buckets_that_are_used_first_come_first(make_grid, world, monkeypatch):
    """A read waits for its own bucket; buckets are gathered in the order of the forward pass, two at a time."""
    started = []

    class Noted(Latest):
        def __init__(self, bucket):
            started.append(bucket)
            super().__init__(bucket)

    monkeypatch.setattr(zero, "_gather", Noted)
    grid = make_grid({"data": world.size})
    ps = [pla.Parameter(pla.ones(8 * world.size, grid, L(None)), f"p{i}") for i in range(6)]
    reducer = GradientReducer(ps, [ZeRO(1, overlap_gather=True)], first_bucket=1, bucket=1)
    update = optim.SGD(ps, 1.0)
    x = pla.Tensor(pla.ones((6, 1), grid, L("data", None)))
    sum(((x * p).sum() for p in ps[1:]), start=(x * ps[0]).sum()).backward()
    update.step()
    order = reducer.buckets[::-1]
    assert [b.slots[0].parameter for b in order] == ps
    assert started == order[:2]
    assert (ps[0].shape, ps[3].dtype, ps[2].size, ps[4].layout) == ((8 * world.size,), np.float64, ps[0].size, L(None))
    assert started == order[:2], "what is known of a parameter is no reason to wait"
    np.testing.assert_array_equal(ps[0].gather(), -5.0)
    assert started == order[:3]
    np.testing.assert_array_equal(ps[2].gather(), -5.0)  # while the second one is in flight
    assert [b.gathering for b in order] == [False, True, False, True, True, True]
    assert started == order[:4]
    np.testing.assert_array_equal(ps[5].gather(), -5.0)
    assert started == order
    assert [b.gathering for b in order] == [False, False, False, False, True, False]
    np.testing.assert_array_equal(ps[4].gather(), -5.0)


READS: dict[str, Any] = {
    "p.block": lambda model, update: [p.block.copy() for p in model.parameters()],
    "backwards": lambda model, update: [p.block.copy() for p in list(model.parameters())[::-1]][::-1],
    "p.data.block": lambda model, update: [p.data.block.copy() for p in model.parameters()],
    "p.gather()": lambda model, update: [p.gather() for p in model.parameters()],
    "p.data.gather()": lambda model, update: [p.data.gather() for p in model.parameters()],
    "p.data + 0": lambda model, update: [(p.data + 0).gather() for p in model.parameters()],
    "p.data.T": lambda model, update: [p.data.T.gather() for p in model.parameters()],
    "p.data.copy()": lambda model, update: [p.data.copy().gather() for p in model.parameters()],
    "p.data[...]": lambda model, update: [p.data[-1:].gather() for p in model.parameters()],
    "p.data.redistribute": lambda model, update: [
        p.data.redistribute(L("data", *[None] * (p.ndim - 1))).block.copy() for p in model.parameters()
    ],
    "numpy's functions": lambda model, update: [np.sum(p.data).item() for p in model.parameters()],
    "p.detach()": lambda model, update: [p.detach().gather() for p in model.parameters()],
    "p.updated": lambda model, update: [p.updated[0].copy() for p in model.parameters()],
    "p * 2": lambda model, update: [(p * 2.0).gather() for p in model.parameters()],
    "model.state_dict()": lambda model, update: model.state_dict(),
    "update.state_dict()": lambda model, update: update.state_dict()["states"],
    "a loss": lambda model, update: loss_of(model).item(),
    "an evaluation": lambda model, update: evaluated(model),
    "pieces of a checkpoint": lambda model, update: [
        piece.read(slice(None)).copy() for piece in pieces_of(dict(model.named_state()), update)
    ],
    "pieces without an optimizer": lambda model, update: [
        piece.read(slice(None)).copy() for piece in pieces_of(dict(model.named_state()), None)
    ],
    "a checkpoint of one rank's parts": lambda model, update: one_ranks_parts(model),
    "another step": lambda model, update: (update.step(), model.state_dict())[1],
    "a scaled value": lambda model, update: [scaled(p) for p in model.parameters()],
    "a written value": lambda model, update: [written(p) for p in model.parameters()],
    "without ZeRO": lambda model, update: without_zero(model),
    "a closed grid": lambda model, update: closed(model),
}  # fmt: skip


def evaluated(model):
    with no_grad():
        return loss_of(model).item()


def one_ranks_parts(model):
    """What a rank writes depends on the rank."""
    found = pieces_of(dict(model.named_state()), None)
    size, rank = model.grid.size, model.grid.rank
    return [piece.read(slice(None)).copy() for i, piece in enumerate(found) if i % size == rank]


def scaled(p):
    p.data *= 2.0
    return p.gather()


def written(p):
    p.block[: len(p.block) // 2] *= 2.0
    p.written()
    return p.gather()


def without_zero(model):
    next(iter(model.parameters())).reducer.detach()
    return [p.block.copy() for p in model.parameters()]


def closed(model):
    model.grid.close()
    return [p.block.copy() for p in model.parameters()]


def after_steps(make_grid, world, overlap, read):
    grid = make_grid({"data": world.size})
    model = make("gpt", with_data()["data"], grid)
    reducer = GradientReducer(model.parameters(), [ZeRO(2, overlap_gather=overlap)], **LIMITS)
    update = optim.AdamW(model.parameters(), 0.01)
    go_on(model, reducer, update, range(2))
    found = read(model, update)
    return found, [] if grid._closed else go_on(model, reducer, update, range(2, 3))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", READS)
def test_whoever_reads_a_value_waits_for_it(name, late, make_grid, world):
    found = [after_steps(make_grid, world, overlap, READS[name]) for overlap in (False, True)]
    check_alike(*found, name)


@pytest.mark.mpi(min_size=2)
def test_a_planted_missing_wait_is_caught(late, make_grid, world, monkeypatch):
    def forgotten(self, bucket):
        del self._in_flight[bucket]
        bucket.gathering = False

    monkeypatch.setattr(zero.SharedValues, "_await", forgotten)
    found, _ = after_steps(make_grid, world, True, READS["p.block"])
    assert any(np.isnan(block).any() for block in flattened(found))


@pytest.mark.mpi(min_size=2)
def test_a_value_that_no_pass_reads_is_there_for_the_next_step(late, make_grid, world):
    grid = make_grid({"data": world.size})
    ps = [pla.Parameter(pla.ones(2 * world.size, grid, L(None)), f"p{i}") for i in range(4)]
    GradientReducer(ps, [ZeRO(2, overlap_gather=True)], first_bucket=1, bucket=1)
    update = optim.SGD(ps, 1.0, weight_decay=0.5)
    x = pla.Tensor(pla.ones((6, 1), grid, L("data", None)))
    want = 1.0
    for step in range(3):
        (x * ps[step % 2]).sum().backward()
        clip_gradient_norm(ps, 1e9)
        update.step()
        update.zero_grad()
        want *= 0.5
    np.testing.assert_array_equal(ps[3].gather(), want)
    np.testing.assert_array_equal(ps[2].gather(), want)


@pytest.mark.mpi(min_size=2)
def test_an_exception_in_the_forward_pass_loses_nothing(late, make_grid, world, monkeypatch):
    def fails(*args):
        raise ZeroDivisionError

    grid = make_grid({"data": world.size})
    found = []
    for overlap in (False, True):
        model = make("gpt", with_data()["data"], grid)
        reducer = GradientReducer(model.parameters(), [ZeRO(1, overlap_gather=overlap)], **LIMITS)
        update = optim.AdamW(model.parameters(), 0.01)
        losses = go_on(model, reducer, update, range(2))
        with monkeypatch.context() as patch:
            patch.setattr(nn.LayerNorm, "forward", fails)
            with pytest.raises(ZeroDivisionError):
                loss_of(model)
        found.append((losses, model.state_dict(), go_on(model, reducer, update, range(2, 4))))
    check_alike(*found, "after an exception")


@pytest.mark.mpi(min_size=2)
def test_states_go_on_with_other_gathers(late, make_grid, world):
    """A state that was saved while gathers were in flight goes on without ZeRO, and the other way around."""
    grid = make_grid({"data": world.size})
    losses, model, update = [], None, None
    for i, handlers in enumerate(([ZeRO(2, overlap_gather=True)], [], [ZeRO(1, overlap_gather=True)], [ZeRO(1)])):
        before, model = model, make("gpt", with_data()["data"], grid)
        reducer = GradientReducer(model.parameters(), handlers, **LIMITS)
        state = None if before is None else update.state_dict()
        update = optim.AdamW(model.parameters(), 0.01)
        if before is not None:
            model.load_state_dict(before.state_dict())
            update.load_state_dict(state)
        losses += go_on(model, reducer, update, range(2 * i, 2 * i + 2))
    model = make("gpt", with_data()["data"], grid)
    reducer = GradientReducer(model.parameters(), **LIMITS)
    update = optim.AdamW(model.parameters(), 0.01)
    np.testing.assert_allclose(losses, go_on(model, reducer, update, range(8)), rtol=1e-12)


def test_nothing_is_late_by_default(make_grid, world):
    grid = make_grid({"data": world.size})
    model = make("gpt", with_data()["data"], grid)
    reducer = GradientReducer(model.parameters(), [ZeRO(1)], **LIMITS)
    go_on(model, reducer, optim.AdamW(model.parameters(), 0.01), range(2))
    assert all(type(p.data) is pla.DistArray for p in model.parameters())
    assert all(owner.in_flight == 0 for owner in owners(model.parameters()))
    with pytest.raises(pla.ConfigError, match="overlap_gather is True or False, not 1"):
        ZeRO(1, overlap_gather=1)


END = """
import numpy as np, parlinalg as pla
grid = pla.Grid({"data": 2})
ps = [pla.Parameter(pla.ones(200_000, grid, pla.Layout(None)), f"p{i}") for i in range(8)]
pla.parallel.GradientReducer(ps, [pla.parallel.ZeRO(1, overlap_gather=True)], first_bucket=1, bucket=1)
update = pla.optim.SGD(ps, 1.0)
x = pla.Tensor(pla.ones((6, 1), grid, pla.Layout("data", None)))
sum(((x * p).sum() for p in ps[1:]), start=(x * ps[0]).sum()).backward()
update.step()
print("the last step is made")
"""


@pytest.mark.serial
@pytest.mark.skipif(BACKEND != "numpy", reason="cannot be had here: the program runs on hosts")
def test_a_program_may_end_with_gathers_in_flight(tmp_path):
    script = tmp_path / "end.py"
    script.write_text(END)
    done = start(2, [str(script)])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the last step is made") == 2
    assert not done.stderr
