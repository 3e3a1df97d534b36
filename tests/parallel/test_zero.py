"""ZeRO: the losses of one rank alone, the words of an all-reduce, and parts of everything that is shared."""

from __future__ import annotations

import random

import ml_dtypes
import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, optim, schemes
from parlinalg.autograd import no_sync
from parlinalg.layout import piece
from parlinalg.parallel import GradientReducer, ZeRO, clip_gradient_norm, clip_gradient_value, gradient_norm, table
from tests.agreement import once
from tests.models import BATCH, KINDS, alone, every_scheme, loss_of, make
from tests.training import sizes_for

L = pla.Layout
LIMITS = {"first_bucket": 2000, "bucket": 4000}
WAYS = [(1, "whole"), (2, "reduce-scatter"), (2, "whole")]


def train(
    kind, scheme, grid, handlers=(), steps=10, *, p=0.0, clip=0.0, limit=0.0, microbatches=1, dtype=None, book=None,
    optimizer=optim.AdamW, **options,
):  # fmt: skip
    """The losses of training, and what was trained."""
    model = make(kind, scheme, grid, p=p, **options)
    reducer = GradientReducer(model.parameters(), handlers, **LIMITS, dtype=dtype)
    update = optimizer(model.parameters(), 0.01)
    return go_on(model, reducer, update, range(steps), clip, limit, microbatches), model, reducer, update


def go_on(model, reducer, update, steps, clip=0.0, limit=0.0, microbatches=1):
    losses = []
    for step in steps:
        update.zero_grad()
        total = 0.0
        for i in range(microbatches):
            rows = slice(BATCH * i // microbatches, BATCH * (i + 1) // microbatches)
            with nn.training_step(step, rows.start):
                loss = loss_of(model, step % 3, rows) * ((rows.stop - rows.start) / BATCH)
            if i < microbatches - 1:
                with no_sync():
                    loss.backward()
            else:
                loss.backward()
            total += loss.item()
        if clip:
            clip_gradient_norm(model.parameters(), clip)
        if limit:
            clip_gradient_value(model.parameters(), limit)
        update.step()
        losses.append(total)
    return losses


def serial(world, kind, *args, **options):
    def losses():
        with alone(world) as grid:
            return train(kind, schemes.discover()["serial"].SCHEME, grid, *args, **options)[0]

    return once(losses)


def with_data():
    return {n: s for n, s in every_scheme().items() if "data" in s.axes and "weights cut" not in n}


def cases(ranks, full):
    """(model, scheme, sizes, stage, accumulate): all, or some schemes on one grid each, with one model, drawn."""
    draw = random.Random(ranks)
    kind = draw.choice(KINDS)
    for i, (name, scheme) in enumerate(with_data().items()):
        shapes = [s for s in sizes_for(scheme, ranks, 10**6) if full or s["data"] > 1 or ranks == 1]
        if full:
            yield from ((k, name, s, *w) for k in KINDS for s in shapes for w in WAYS)
        elif (i + ranks) % 4 == 0:
            yield kind, name, draw.choice(shapes), *draw.choice(WAYS)


@pytest.mark.core
def test_losses_are_those_of_one_rank(make_grid, world, full):
    want, steps = {}, 10 if full else 5
    for kind, name, sizes, stage, accumulate in cases(world.size, full):
        grid = make_grid(sizes)
        if kind not in want:
            want[kind] = serial(world, kind, steps=steps)
        got = train(kind, with_data()[name], grid, [ZeRO(stage, accumulate=accumulate)], steps)[0]
        grid.close()  # MPI has 2048 communicators
        np.testing.assert_allclose(got, want[kind], rtol=1e-12, err_msg=f"{kind}, {name}, {sizes}, {stage}")


@pytest.mark.parametrize(("stage", "accumulate"), WAYS)
def test_accumulation_clipping_and_dropout(stage, accumulate, make_grid, world):
    options = {"p": 0.2, "clip": 0.5, "limit": 0.02, "microbatches": 2, "steps": 3}
    want = serial(world, "gpt", **options)
    sizes = {"data": world.size} if world.size % 2 else {"data": 2, "t": world.size // 2}
    scheme = with_data()["data" if world.size % 2 else "data × 1d"]
    got = train("gpt", scheme, make_grid(sizes), [ZeRO(stage, accumulate=accumulate)], **options)[0]
    np.testing.assert_allclose(got, want, rtol=1e-12)


@pytest.mark.ranks(4, 8)
@pytest.mark.parametrize("stage", [1, 2])
def test_shared_within_and_copied_across(stage, make_grid, world):
    grid = make_grid({"replica": 2, "data": world.size // 2})
    scheme = schemes.discover()["data"].SCHEME
    scheme = scheme.with_data("replica")
    want = serial(world, "llama", steps=3)
    losses, model, reducer, update = train("llama", scheme, grid, [ZeRO(stage)], 3)
    np.testing.assert_allclose(losses, want, rtol=1e-12)
    assert {b.axes for b in reducer.buckets} == {("data", "replica")}
    n, inner = sum(p.size for p in model.parameters()), world.size // 2
    with pla.ledger(grid) as book:
        backward(model, update)
    within, across = grid.comm(("data",)), grid.comm(("replica",))
    parts = [len(piece(b.size, within.size, within.rank)) for b in reducer.buckets]
    assert book.words["reduce_scatter", within.axes] == n - sum(parts)
    assert book.words["all_gather", within.axes] == n - sum(parts)
    assert book.words["all_reduce", across.axes] == 2 * sum(m - len(piece(m, 2, across.rank)) for m in parts)
    assert inner == within.size


def backward(model, update):
    """One step, but for its loss's forward pass."""
    update.zero_grad()
    loss_of(model).backward()
    update.step()


@pytest.mark.parametrize(("stage", "accumulate"), WAYS)
def test_words_are_those_of_an_all_reduce(stage, accumulate, make_grid, world):
    grid = make_grid({"data": world.size})
    model = make("gpt", with_data()["data"], grid)
    reducer = GradientReducer(model.parameters(), [ZeRO(stage, accumulate=accumulate)], **LIMITS)
    update = optim.AdamW(model.parameters(), 0.01)
    for microbatches in (1, 1, 3):
        update.zero_grad()
        with pla.ledger(grid) as book:
            for i in range(microbatches):
                loss = loss_of(model)
                if i < microbatches - 1:
                    with no_sync():
                        loss.backward()
                else:
                    loss.backward()
            update.step()
        n = sum(p.size for p in model.parameters())
        lacking = n - sum(len(piece(b.size, world.size, world.rank)) for b in reducer.buckets) if world.size > 1 else 0
        times = microbatches if accumulate == "reduce-scatter" else 1
        loss_words = 2 * (2 - len(piece(2, world.size, world.rank))) if world.size > 1 else 0  # its sum and its count
        words = {op: sum(w for (o, _), w in book.words.items() if o == op) for op, _ in book.words}
        want = {"reduce_scatter": times * lacking, "all_gather": lacking, "all_reduce": microbatches * loss_words}
        assert words == (want if world.size > 1 else {})


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("stage", [1, 2])
def test_each_rank_holds_its_part(stage, make_grid, world):
    grid = make_grid({"data": world.size})
    _, model, reducer, update = train("gpt", with_data()["data"], grid, [ZeRO(stage)], 2)
    n = sum(p.size for p in model.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert all(p.storage.mine.size == p.updated[0].size for p in model.parameters() if p.block.size)
    assert sum(world.share(update.flat.states.nbytes)) == 2 * 8 * n
    assert update.flat.states.nbytes <= 2 * 8 * (n // world.size + len(reducer.buckets))
    want = table(model.parameters(), [ZeRO(stage)], **LIMITS)
    assert want["states"] == update.flat.states.nbytes
    assert want["values"] == sum(b.values.nbytes for b in reducer.buckets) == 8 * n
    assert want["gradients"] == sum((b.mine if stage == 2 else b.data).nbytes for b in reducer.buckets)
    assert sum(b.data.nbytes for b in reducer.buckets if b.data is not None) == (8 * n if stage == 1 else 0)
    assert all(np.may_share_memory(p.block, b.values) for b in reducer.buckets for p in [s.parameter for s in b.slots])
    squares = world.share(float(sum((p.storage.mine**2).sum() for p in model.parameters())))
    np.testing.assert_allclose(gradient_norm(model.parameters()), np.sqrt(sum(squares)), rtol=1e-13)


@pytest.mark.mpi(min_size=2)
def test_a_planted_wrong_part_is_caught(make_grid, world, monkeypatch):
    """What the other ranks have updated stays as it was."""
    grid = make_grid({"data": world.size})
    comm = type(grid.comm(("data",)))
    plain = comm.all_gather
    monkeypatch.setattr(comm, "all_gather", lambda self, own, out, *a, **b: plain(self, own, out.copy(), *a, **b))
    got = train("gpt", with_data()["data"], grid, [ZeRO(2)], 4)[0]
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        np.testing.assert_allclose(got, serial(world, "gpt", steps=4), rtol=1e-12)


def test_state_moves_between_grids_and_stages(make_grid, world):
    """Steps here, there and on a third grid are those of one."""
    want = serial(world, "gpt", steps=6)
    first = [make_grid({"data": world.size}), with_data()["data"], [ZeRO(2)]]
    second = [make_grid({"t": world.size}), every_scheme()["1d"], []]
    third = [make_grid({"data": world.size}), with_data()["data"], [ZeRO(1)]]
    losses, model, _, update = train("gpt", first[1], first[0], first[2], 2)
    for (grid, scheme, handlers), steps in ((second, range(2, 4)), (third, range(4, 6))):
        state, weights = update.state_dict(), model.state_dict()
        model = make("gpt", scheme, grid)
        reducer = GradientReducer(model.parameters(), handlers, **LIMITS)
        update = optim.AdamW(model.parameters(), 0.5)
        update.load_state_dict(state)
        model.load_state_dict(weights)
        losses += go_on(model, reducer, update, steps)
    np.testing.assert_allclose(losses, want, rtol=1e-12)


def test_shards_come_and_go_with_the_states(make_grid, world):
    """An optimizer whose parameters are sharded after a step, and whole again later, goes on."""
    want = serial(world, "llama", steps=6)
    losses, model, reducer, update = train("llama", with_data()["data"], make_grid({"data": world.size}), [], 2)
    for handlers, steps in (([ZeRO(2)], range(2, 4)), ([], range(4, 6))):
        reducer.detach()
        update.zero_grad()
        reducer = GradientReducer(model.parameters(), handlers, **LIMITS)
        losses += go_on(model, reducer, update, steps)
    np.testing.assert_allclose(losses, want, rtol=1e-12)


def check_steps_with_masters(ps, starts, grid, handlers, dtype):
    """Two steps whose gradients are 6, in any bits, take 12 from every element."""
    GradientReducer(ps, handlers, first_bucket=1, bucket=20, dtype=dtype)
    update = optim.SGD(ps, 1.0, master=True)
    x = pla.distribute(np.arange(1.0, 4.0)[:, None], grid, L("data", None))
    for _ in range(2):
        first, *rest = ((x.astype(p.dtype) * p).astype("float64").sum() for p in ps)
        sum(rest, first).backward()
        update.step()
        update.zero_grad()
    for p, start in zip(ps, starts, strict=True):
        np.testing.assert_array_equal(p.gather(), (start.astype(float) - 12).astype(p.dtype))


def test_several_dtypes_and_gradients_that_travel_in_16_bits(make_grid, world):
    """Masters of 16-bit values, sums formed in 32: as of gradients that no rank rounds, to 16 bits."""
    grid = make_grid({"data": world.size})
    rng = np.random.default_rng(0)
    kinds = ((7, np.float32), (5, ml_dtypes.bfloat16), (0, np.float32), (1, np.float64))
    starts = [rng.normal(size=n).astype(t) for n, t in kinds]
    for dtype, handlers in (("bfloat16", [ZeRO(2)]), ("float32", [ZeRO(1)]), ("float16", [])):
        ps = [pla.Parameter(pla.distribute(s, grid, L(None)), f"p{i}") for i, s in enumerate(starts)]
        check_steps_with_masters(ps, starts, grid, handlers, dtype)


@pytest.mark.parametrize("handlers", [[], [ZeRO(1)], [ZeRO(2)], [ZeRO(2, accumulate="whole")]], ids=str)
def test_parameters_not_reached_and_reached_by_a_microbatch_only(handlers, make_grid, world):
    grid = make_grid({"data": world.size})
    ps = [pla.Parameter(pla.ones(n, grid, L(None)), f"p{n}") for n in (5, 7, 3)]
    GradientReducer(ps, handlers, first_bucket=1, bucket=60)
    update = optim.SGD(ps, 1.0)
    x = pla.ones((6, 1), grid, L("data", None))
    start = 1.0
    for _ in range(3):
        update.zero_grad()
        with no_sync():  # reaches the first two
            (pla.Tensor(x) * ps[0]).sum().backward()
            (pla.Tensor(x) * ps[1]).sum().backward()
        (pla.Tensor(x) * ps[0]).sum().backward()
        (pla.Tensor(x) * ps[0] * 2).sum().backward()  # adds to what is summed
        update.step()
        start -= 6
        for p, change in zip(ps, (4, 1, 0), strict=True):
            np.testing.assert_array_equal(p.gather(), np.full(p.shape, 1 + change * (start - 1)))
            found = p.updated[1]
            np.testing.assert_array_equal(grid.backend.to_host(found), np.full(found.size, 6.0 * change))


def test_what_cannot_be_done_is_told(make_grid, world):
    class Whole(optim.SGD):
        ELEMENTWISE = False

    class ByMean(optim.Optimizer):
        """Says nothing of how it goes."""

        def update(self, run):
            run.value[...] -= self.lr * run.g / np.abs(run.g).max()

    grid = make_grid({"data": world.size})
    model = make("gpt", with_data()["data"], grid)
    with pytest.raises(pla.ConfigError, match="stages 1, 2 and 3, not 4"):
        ZeRO(4)
    with pytest.raises(pla.ConfigError, match="'reduce-scatter' or 'whole', not 'both'"):
        ZeRO(2, accumulate="both")
    with pytest.raises(pla.ConfigError, match=r"over \('date',\), but the grid has the axes"):
        GradientReducer(model.parameters(), [ZeRO(1, "date")])
    with pytest.raises(pla.ConfigError, match="both over axis 'data'"):
        GradientReducer(model.parameters(), [ZeRO(1), ZeRO(2)])
    GradientReducer(model.parameters(), [ZeRO(1)])
    if world.size > 1:
        with pytest.raises(
            pla.ConfigError, match=r"Whole may update an element from others.*such as SGD, Adam or AdamW"
        ):
            Whole(model.parameters(), 0.1)
        with pytest.raises(pla.ConfigError, match=r"ByMean may update.*\(ZeRO\); .*say ByMean.ELEMENTWISE = True"):
            ByMean(model.parameters(), 0.1, 0.0)
