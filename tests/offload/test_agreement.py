"""What one rank alone knows to be wrong is an error on all, which names the rank and the file; nobody waits."""

from __future__ import annotations

import mmap
import os

import pytest

from parlinalg import optim
from parlinalg.comm import together
from parlinalg.errors import ConfigError, OffloadError
from parlinalg.offload import DiskStates, OffloadedParameters, recover
from tests.offload.runs import everything, failing, go_on, sizes, start, unlike

pytestmark = [pytest.mark.ranks(2), pytest.mark.timeout(60)]


@pytest.fixture
def last(world):
    return world.size - 1


def damaged(path):
    """Bytes of a file's tiles changed behind its back."""
    with path.open("r+b") as held:
        held.seek(-(path.stat().st_size // 2), os.SEEK_END)
        held.write(b"x" * (path.stat().st_size // 2))


def test_kinds_of_errors_and_several_communicators(world, last):
    def fail(error):
        if world.rank == last:
            raise error

    for error, kind in ((OffloadError("a disk"), OffloadError), (ConfigError("a key"), ConfigError),
                        (FileNotFoundError("a file"), ConfigError)):  # fmt: skip
        with pytest.raises(kind, match=f"^rank {last}, looking: {error}$"):
            together(world, lambda error=error: fail(error), "looking", (ConfigError, OffloadError))
    alone = world.sub([world.rank], ("alone",))
    try:
        for comms in ([world, alone], [alone, world]):
            with pytest.raises(OffloadError, match="a disk"):
                together(comms, lambda: fail(OffloadError("a disk")), "looking", (OffloadError,))
        assert together([], lambda: 3) == 3
        with pytest.raises(ConfigError, match="of nobody"):
            together([], lambda: (_ for _ in ()).throw(ConfigError("of nobody")))
    finally:
        alone.free()


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_wrong_keys_of_one_rank(make_grid, world, folder, last, where):
    model, update = start(make_grid(sizes(world.size)))
    if where == "disk":
        update.place(DiskStates(folder, tile=4096))
    go_on(model, update, range(1))
    before = everything(model, update)
    state, values = update.state_dict(), model.state_dict()
    if world.rank == last:
        state["states"]["moon"] = state["states"].pop(next(model.parameters()).name)
        values["sun"] = values.pop(next(iter(values)))
    with pytest.raises(ConfigError, match=f"rank {last}, loading the optimizer's state: .*missing: .*unexpected: moon"):
        update.load_state_dict(state)
    with pytest.raises(ConfigError, match=f"rank {last}, loading the model's state: .*missing: .*unexpected: sun"):
        model.load_state_dict(values)
    if world.rank == last:
        del state["lr"]
    with pytest.raises(ConfigError, match=f"rank {last}, .*has no 'lr': give what state_dict"):
        update.load_state_dict(state)
    assert not unlike(everything(model, update), before)
    update.place(optim.InMemory())


def test_states_damaged_on_one_rank(make_grid, world, folder, last):
    """Reading, loading and moving states, and the masters of values that are loaded."""
    model, update = start(make_grid(sizes(world.size)), dtype="float32", master="float64")
    with DiskStates(folder, tile=4096) as states:
        update.place(states)
        go_on(model, update, range(2))
        state, values = update.state_dict(), model.state_dict()
        world.barrier()
        if world.rank == last:
            damaged(folder / f"states.{last}.tiles")
        told = rf"rank {last}, {{}}.*states\.{last}\.tiles is not what was written.*nothing of it is used"
        with pytest.raises(OffloadError, match=told.format("reading the state ")):
            update.state_dict()
        with pytest.raises(OffloadError, match=told.format("loading the optimizer's state")):
            update.load_state_dict(state)
        with pytest.raises(OffloadError, match=told.format("moving the optimizer's states")):
            update.place(optim.InMemory())
        assert update.flat.states is states
        model.load_state_dict(values)
        with pytest.raises(OffloadError, match=told.format("taking values that were written")):
            update.arrange()


@pytest.mark.parametrize("how", ["missing", "cut", "damaged", "of another model"])
def test_files_that_cannot_be_resumed_from_on_one_rank(make_grid, world, folder, last, how):
    grid = make_grid(sizes(world.size))
    model, update = start(grid)
    with DiskStates(folder, tile=4096, keep=True) as states:
        update.place(states)
        go_on(model, update, range(2))
    world.barrier()
    path = folder / f"states.{last}.tiles"
    if world.rank == last:
        if how == "missing":
            path.unlink()
        elif how == "cut":
            os.truncate(path, path.stat().st_size - 4096)
        elif how == "damaged":
            damaged(path)
    model, update = start(grid)
    if world.rank == last and how == "of another model":
        update.param_groups[0]["params"].pop()
    before = model.state_dict()
    fault = {"missing": "is not there", "cut": "cut short", "damaged": "checksum", "of another model": "of another"}
    with pytest.raises(OffloadError, match=rf"rank {last}, reading .*states\.{last}\.tiles.* {fault[how]}"):
        recover(folder, update)
    assert not unlike(model.state_dict(), before)


def test_values_cut_on_one_rank(make_grid, world, folder, last):
    model, _ = start(make_grid(sizes(world.size)), reduce=False)
    rest = OffloadedParameters(folder, least=1000, gradients=False)
    rest.place(model.parameters())
    values = model.state_dict()
    world.barrier()
    if world.rank == last:
        os.truncate(folder / f"values.{last}.window", 4096)
    for what, call in (("reading", model.state_dict), ("loading", lambda: model.load_state_dict(values))):
        with pytest.raises(OffloadError, match=rf"rank {last}, {what} .*values\.{last}\.window was cut short"):
            call()
    rest.discard()


def test_a_disk_that_fails_on_one_rank_while_values_move(make_grid, world, folder, last, monkeypatch):
    original = mmap.mmap

    def mapped(*args, offset=0, **options):
        if world.rank == last and offset:
            raise OSError("the disk is on fire")
        return original(*args, offset=offset, **options)

    monkeypatch.setattr(mmap, "mmap", mapped)
    model, _ = start(make_grid(sizes(world.size)), reduce=False)
    want = model.state_dict()
    rest = OffloadedParameters(folder, least=1000, gradients=False)
    with pytest.raises(OffloadError, match=rf"rank {last}, writing to .*values\.{last}\.window: bytes .* on fire"):
        rest.place(model.parameters())
    assert not unlike(model.state_dict(), want), "they stay where they are"
    rest.discard()


def test_a_disk_that_fails_on_one_rank_while_states_move(make_grid, world, folder, last, monkeypatch):
    model, update = start(make_grid(sizes(world.size)))
    go_on(model, update, range(1))
    want, held = everything(model, update), update.flat.states
    calls = []

    def third():
        calls.append(0)
        return world.rank == last and len(calls) == 3

    with DiskStates(folder, tile=4096) as states, monkeypatch.context() as patch:
        failing(patch, "pwritev", third)
        with pytest.raises(
            OffloadError, match=rf"rank {last}, moving .*states\.{last}\.tiles cannot be written: .*fire"
        ):
            update.place(states)
        assert update.flat.states is held
    assert not unlike(everything(model, update), want)
