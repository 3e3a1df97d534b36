"""Parameters, gradients and activations elsewhere: the same bits; what a memory limit decides."""

from __future__ import annotations

import gc
import os
import re
import weakref
from pathlib import Path
from threading import Event

import numpy as np
import pytest

from parlinalg import nn, offload
from parlinalg.autograd.saved import saved
from parlinalg.errors import ConfigError, OffloadError
from parlinalg.offload import OffloadedActivations, OffloadedParameters
from parlinalg.offload.activations import Held
from parlinalg.offload.disk import DiskFile, checksum
from parlinalg.offload.plan import ORDER, decide
from parlinalg.offload.stores import DiskStore
from parlinalg.parallel import GradientReducer, WeightGatherer, ZeRO, clip_gradient_norm, clip_gradient_value, examine
from parlinalg.parallel.memory import MemoryTable
from parlinalg.pipeline.run import InFlight
from parlinalg.units import format_bytes
from tests.models import loss_of, make
from tests.offload.runs import SCHEME, everything, go_on, sizes, start, unlike


@pytest.mark.ranks(2)
def test_values_in_buckets_are_not_offloaded(make_grid, world, folder, backend):
    model, update = start(make_grid(sizes(world.size)), handlers=(ZeRO(1),))
    rest = OffloadedParameters(folder if backend == "numpy" else None, least=1, gradients=False)
    with pytest.raises(ConfigError, match=r"stages 1 and 2 keep the values in buckets.*zero=dict\(stage=0\)"):
        rest.place(model.parameters())
    if backend == "numpy":
        assert "parameters" not in offload.plan(model, update, memory="140kB", path=folder).places


@pytest.mark.ranks(2, 4)
def test_shares_too_small_to_be_offloaded_are_named(make_grid, world, folder, backend):
    """With ZeRO's stage 3, where what is not cut would be large enough."""
    grid = make_grid(sizes(world.size))
    model = make("gpt", SCHEME.with_weights_cut("data"), grid)
    WeightGatherer(model, axes="data")
    GradientReducer(model.parameters(), (ZeRO(3),), 2000, 4000)
    cut = max(p.block.nbytes for p in model.parameters() if p.storage.owner is None)
    rest, small = OffloadedParameters(folder if backend == "numpy" else None, least=cut + 1), format_bytes(cut + 1)
    with pytest.raises(ConfigError, match=rf"stage 3 leaves .* fewer than {small} stays.*zero stage 0"):
        rest.place(model.parameters())


def windows():
    gc.collect()  # arrays of earlier tests that lie in cycles
    return Path("/proc/self/maps").read_text().count(".window") if Path("/proc/self/maps").exists() else 0


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("kind", "what", "options"), [
    ("gpt", "parameters", {"p": 0.1}),
    ("llama", "activations", {"recompute": True, "p": 0.1, "num_hidden_layers": 2}),
    ("gpt", "all", {"p": 0.1, "num_hidden_layers": 2}),
    ("llama", "gradients", {"p": 0.1}),
    ("gpt", "activations, states", {"handlers": (ZeRO(2),), "dtype": "float32", "master": "float64"}),
])  # fmt: skip
def test_every_bit_as_in_memory(make_grid, world, folder, backend, kind, options, what):
    grid = make_grid(sizes(world.size))
    alone = what in ("parameters", "all", "gradients")  # offloaded gradients are settled one by one
    model, update = start(grid, kind, reduce=not alone, **options)
    losses = go_on(model, update, range(3))
    want = everything(model, update)
    model, update = start(grid, kind, **options)
    path = folder if backend == "numpy" else None
    made = []
    if alone:
        made.append(OffloadedParameters(path, least=1000, values=what != "gradients"))
        made[-1].place(model.parameters())
        assert len(made[-1].parameters) > 5
    if what not in ("parameters", "gradients"):
        made.append(OffloadedActivations(path, least=0))
        made[-1].place(model.blocks)
    if what.endswith(("all", "states")) and backend == "numpy":
        made.append(offload.DiskStates(folder, tile=4096))
        update.place(made[-1])
    found = go_on(model, update, range(3))
    assert windows() == 0
    state = everything(model, update)
    update.place(offload.HostStates())
    for each in made:
        each.close()
    assert not list(folder.glob(f"*.{world.rank}.*"))
    assert found == losses
    assert not unlike(state, want)
    assert not unlike(everything(model, update), state)


@pytest.mark.ranks(1, 2)
def test_values_are_loaded_to_where_they_rest(make_grid, world, folder, backend):
    model, _ = start(make_grid(sizes(world.size)), reduce=False)
    want = {name: 2 * value for name, value in model.state_dict().items()}
    with OffloadedParameters(folder if backend == "numpy" else None, least=1000, gradients=False) as rest:
        rest.place(model.parameters())
        assert rest.parameters
        model.load_state_dict(want)
        assert not unlike(model.state_dict(), want)


@pytest.mark.ranks(1, 2)
def test_gradients_are_clipped_where_they_rest(make_grid, world, folder, backend):
    def clipped(rest):
        model, _ = start(make_grid(sizes(world.size)), reduce=False)
        if rest is not None:
            rest.place(model.parameters())
            assert len(rest.parameters) > 5
        found = []
        for clip in (lambda ps: [*examine(ps), clip_gradient_norm(ps, 0.1)], lambda ps: clip_gradient_value(ps, 0.001)):
            loss_of(model).backward()
            found += [clip(list(model.parameters())), *(p.grad.gather() for p in model.parameters())]
            model.zero_grad()
        return found

    want = clipped(None)
    with OffloadedParameters(folder if backend == "numpy" else None, least=1000) as rest:
        for got, right in zip(clipped(rest), want, strict=True):
            np.testing.assert_array_equal(got, right)


@pytest.mark.ranks(2)
def test_a_model_with_nothing_large_is_left_in_memory(make_grid, world, folder, backend):
    """Stage 3 shards what is small: it is no reason to refuse."""
    model, _ = start(make_grid(sizes(world.size)), handlers=(ZeRO(3),))
    with OffloadedParameters(folder if backend == "numpy" else None, gradients=False) as rest:
        rest.place(model.parameters())
        assert not rest.parameters


@pytest.mark.serial
def test_blocks_keep_nothing_in_memory(make_grid, tmp_path):
    model, _ = start(make_grid(sizes(1)), num_hidden_layers=3)
    held = {r.op: r.nbytes for r in saved(loss_of(model))}
    with OffloadedActivations(tmp_path, least=1) as away:
        away.place(model.blocks)
        loss = loss_of(model)
        left = {r.op: r.nbytes for r in saved(loss)}
        assert "attention" in held
        assert "attention" not in left
        assert sum(left.values()) < 0.4 * sum(held.values())
        loss.backward()
        del loss
        used = away._store._end
        loss_of(model).backward()
        assert away._store._end == used  # places are used again


@pytest.mark.serial
def test_what_weights_need_stays_away_until_their_turn(make_grid, tmp_path):
    """A walk that leaves the gradients of parameters for later reads none of what they alone need."""

    def gradients(away):
        model, _ = start(make_grid(sizes(1)), reduce=False)
        if away is not None:
            away.place(model.blocks)
        with nn.training_step(0):
            passage = InFlight(model.grid, [])
            passage.add(loss_of(model), 1.0)
        if away is not None:
            away._store._settle(0)  # all is written
        passage.backward(later=True)
        if away is not None:
            waiting = [each.away for each in passage._walk.saved() if isinstance(each, Held)]
            assert waiting
            assert not any(a.got for a in waiting)
        passage.parameters()
        return {name: p.grad.gather() for name, p in model.named_parameters()}

    want = gradients(None)
    with OffloadedActivations(tmp_path, least=1) as away:
        assert not unlike(gradients(away), want)


@pytest.mark.serial
@pytest.mark.parametrize("later", [False, True])
def test_what_a_backward_pass_needs_next_is_read_ahead(make_grid, tmp_path, monkeypatch, later):
    """All but what each of its parts needs first; and not much more than `ahead` bytes at a time."""
    model, _ = start(make_grid(sizes(1)), num_hidden_layers=3, reduce=False)
    ready, under_way, largest = [], [], []
    original = OffloadedActivations._unpack

    def unpack(self, packer, held):
        if isinstance(held, Held):
            back = packer._back.get(held.away)
            ready.append(held.away.got is not None or (back is not None and back() is not None))
            largest.append(held.away.nbytes)
        array = original(self, packer, held)
        if self._ahead is not None:
            under_way.append(sum(a.nbytes for a in self._ahead.waiting if a.got is not None))
        return array

    monkeypatch.setattr(OffloadedActivations, "_unpack", unpack)
    with OffloadedActivations(tmp_path, least=1, ahead=20000) as away:
        away.place(model.blocks)
        with nn.training_step(0):
            passage = InFlight(model.grid, [])
            passage.add(loss_of(model), 1.0)
        away._store._settle(0)  # all is written
        passage.backward(later=later)
        passage.parameters()
    assert len(ready) > 40
    assert ready.count(False) < len(ready) / 8
    assert 20000 < max(under_way) <= 20000 + max(largest) < sum(largest) / 2


@pytest.mark.serial
def test_a_file_of_values_that_is_cut_is_told(make_grid, tmp_path):
    model, _ = start(make_grid(sizes(1)), reduce=False)
    rest = OffloadedParameters(tmp_path, least=1000)
    rest.place(model.parameters())
    (file,) = tmp_path.iterdir()
    with file.open("r+b") as held:
        held.truncate(4096)
    with pytest.raises(OffloadError, match=r"values.0.window was cut short"):
        loss_of(model)
    rest.discard()


@pytest.mark.serial
def test_what_nobody_needs_is_not_written(tmp_path, monkeypatch):
    """A slow disk's writer neither holds it nor spends its time on it."""
    turn, written = Event(), []
    monkeypatch.setattr(DiskFile, "write", lambda self, buffer, at: (turn.wait(20), written.append(at)))
    store = DiskStore(tmp_path / "away", 1 << 30)
    arrays = [np.full(8192, n, np.uint8) for n in range(4)]
    alive = [weakref.ref(each) for each in arrays]
    away = [store.put(each) for each in arrays]
    del arrays
    away[1] = away[2] = None
    gc.collect()
    found = [each() is not None for each in alive]
    turn.set()
    store.close()
    assert found == [True, False, False, True]
    assert written == [away[0].offset, away[3].offset]
    for n in (0, 3):
        assert away[n].written.result() == checksum(np.full(8192, n, np.uint8))


@pytest.mark.serial
def test_a_file_that_grows_while_it_is_looked_at_is_not_cut(tmp_path, monkeypatch):
    """One thread makes it larger while the writing thread asks for its size."""
    with DiskFile(tmp_path / "file", 8192) as file:
        fstat = os.fstat

        def grown_meanwhile(fd):
            size = fstat(fd)
            monkeypatch.undo()
            file.grow(1 << 20)
            return size

        monkeypatch.setattr(os, "fstat", grown_meanwhile)
        file.check()
        assert file.nbytes == 1 << 20
        os.truncate(file.path, 8192)
        with pytest.raises(OffloadError, match=r"cut short by someone else: it has 8192 bytes of 1048576"):
            file.check()


@pytest.mark.serial
def test_a_model_is_made_where_it_rests(make_grid, tmp_path):
    from tests.models import ARGUMENTS, CLASSES

    def made(initialize):
        from tests.offload.runs import SCHEME

        model = CLASSES["gpt"](scheme=SCHEME, grid=grid, num_hidden_layers=1, dtype="float32", **ARGUMENTS["gpt"])
        return initialize(model)

    grid = make_grid(sizes(1))
    want = made(lambda m: m.initialize(3)).state_dict()
    with OffloadedParameters(tmp_path, least=1000) as rest:
        model = made(lambda m: rest.initialize(m, 3))
        assert len(rest.parameters) == 4
        assert not unlike(model.state_dict(), want)


def test_a_limit_decides(make_grid, world, folder, backend):
    grid = make_grid(sizes(world.size))
    model, update = start(grid, hidden_size=64)  # on eight ranks too a rank's states are more than the tiles they need
    table = offload.plan(model, update).table
    path = folder if backend == "numpy" else None
    assert str(offload.plan(model, update, memory="1GiB", path=path)).startswith("nothing is offloaded for a limit of")
    told = str(offload.plan(model, update, optimizer_states="host", activations="host"))
    why = "; optimizer and activations rest in host memory in any case, since NumPy computes there"
    assert told.endswith(why) == (backend == "numpy"), told
    with pytest.raises(ConfigError, match=r"the least limit that works is \d+ bytes") as raised:
        offload.plan(model, update, memory=1000, path=path, kept="1kB")
    least = int(re.search(r"works is (\d+)", str(raised.value))[1])
    assert least < table.total
    with pytest.raises(ConfigError, match="optimizer to the disk needs path="):
        offload.plan(model, update, optimizer_states="disk")
    with pytest.raises(ConfigError, match="goes to 'disk' or 'host', not to 'moon'"):
        offload.plan(model, update, parameters="moon")
    if backend == "numpy":
        with pytest.raises(ConfigError, match="path="):
            offload.plan(model, update, memory=1000)
    if backend == "numpy":  # host memory is where states are: they are not counted as away
        with pytest.raises(ConfigError, match="is too little"):
            offload.plan(model, update, memory=least, path=path, kept="1kB", optimizer_states="host")
    chosen = offload.plan(model, update, memory=least, path=path, kept="1kB")
    assert "parameters to" in str(chosen)
    losses = go_on(*start(grid, reduce=False, hidden_size=64), range(2))
    with chosen.apply() as done:
        assert done.states is not None
        found = go_on(model, update, range(2))
        assert found == pytest.approx(losses, rel=1e-12)


@pytest.mark.serial
def test_a_limit_holds(make_grid, tmp_path, tune):
    """NumPy's memory at the most in a step, beside the limit."""
    import tracemalloc

    tune(COMPILED_SIZE=1 << 60)  # loading and compiling loops takes memory too
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    options = {"dtype": "float32", "hidden_size": 128, "num_hidden_layers": 4}
    model, update = start(make_grid(sizes(1)), **options)
    keeps = offload.kept(loss_of(model))
    whole = offload.plan(model, update, kept=keeps).table.total
    plan = offload.plan(model, update, memory=int(0.4 * whole), path=tmp_path, kept=keeps)
    assert len(plan.places) == 3
    with plan.apply() as made:
        assert made.activations is not None
        assert made.activations.pending == made.activations.ahead == max(4096, plan.table.block)
        go_on(model, update, range(1))
        tracemalloc.reset_peak()
        go_on(model, update, range(1, 2))
        assert tracemalloc.get_traced_memory()[1] - before <= 0.4 * whole
    tracemalloc.stop()


@pytest.mark.serial
def test_what_is_offloaded_first():
    table = MemoryTable(values=40, gradients=40, states=80, activations=30, largest=4, block=5)
    assert decide(table, 190, ORDER, 1) == ()
    assert decide(table, 189, ORDER, 1) == ("optimizer",)
    assert decide(table, 113, ORDER, 1) == ("optimizer", "activations")
    assert decide(table, 98, ORDER, 1) == ORDER
    assert decide(table, 30, ORDER, 1) is None
    assert decide(table, 120, ("parameters",), 1) is None
    assert decide(table, 158, ORDER, 1, ["gradients"]) == ("gradients",)
    assert decide(table, 157, ORDER, 1, ["gradients"]) == ("gradients", "optimizer")
    assert decide(table, 82, ORDER, 1, ["gradients"]) == ("gradients", "optimizer", "activations")
    stateless = MemoryTable(values=40, gradients=40, states=0, activations=30, largest=4, block=15)
    assert decide(stateless, 60, ORDER, 1) == ("parameters",), "what frees nothing stays"
