"""States on a disk: the same bits, and steps that count as a whole or not at all."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from parlinalg import optim
from parlinalg.errors import ConfigError, OffloadError
from parlinalg.offload import DiskStates, HostStates, recover
from parlinalg.optim import InMemory
from parlinalg.parallel import ZeRO
from tests.models import loss_of
from tests.offload.runs import everything, failing, go_on, sizes, start, unlike

CASES = {
    "adamw": {},
    "zero 1": {"handlers": (ZeRO(1),)},
    "zero 2, masters": {"handlers": (ZeRO(2),), "dtype": "float32", "master": "float64"},
    "16 bits, masters": {"dtype": "float16", "master": True},
    "lamb": {"optimizer": optim.LAMB},
}


def threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("parlinalg-offload")]


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.ranks(*((1, 2, 4) if c == "adamw" else (2 + 2 * (i % 2),)))) for i, c in
     enumerate(CASES)],
)  # fmt: skip
def test_every_bit_as_in_memory(make_grid, world, folder, case, backend):
    grid = make_grid(sizes(world.size))
    model, update = start(grid, **CASES[case])
    losses = go_on(model, update, range(3))
    want = everything(model, update)
    for values in (True, False) if case == "adamw" else (True,):
        model, update = start(grid, **CASES[case])
        with DiskStates(folder, tile=4096, buffers=2, values=values) as states:
            update.place(states)
            found = go_on(model, update, range(3))
            assert states.file is None or (states.layout.count > 2 and threads())
            if case == "lamb":  # its norms are sums over tiles
                assert found == pytest.approx(losses, rel=1e-12)
                return
            assert found == losses
            assert not unlike(everything(model, update), want)
    assert not threads()
    assert not list(folder.glob(f"*.{world.rank}.*"))
    model, update = start(grid, **CASES[case])
    update.place(HostStates(5000))
    assert go_on(model, update, range(3)) == losses
    assert not unlike(everything(model, update), want)


@pytest.mark.ranks(1, 2)
def test_a_step_after_the_end_is_refused(make_grid, world, folder):
    model, update = start(make_grid(sizes(world.size)))
    with DiskStates(folder, tile=4096) as states:
        update.place(states)
        go_on(model, update, range(1))
    with pytest.raises(OffloadError, match=r"there are no states of '.*': they were not made, or are closed"):
        go_on(model, update, range(1))


@pytest.mark.ranks(1, 4)
def test_states_move_in_the_middle_of_a_training(make_grid, world, folder, backend):
    grid = make_grid(sizes(world.size))
    model, update = start(grid)
    losses = go_on(model, update, range(4))
    want = everything(model, update)
    model, update = start(grid)
    assert go_on(model, update, range(2)) == losses[:2]
    with DiskStates(folder, tile=4096) as states:
        update.place(states)
        assert go_on(model, update, range(2, 4)) == losses[2:]
        update.place(optim.InMemory())
    assert not unlike(everything(model, update), want)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("where", "master"), [("pwritev", False), ("preadv", "float64"), ("fdatasync", False)])
def test_a_step_that_fails_on_one_rank_is_not_made_on_any(make_grid, world, folder, monkeypatch, where, master):
    grid = make_grid(sizes(world.size))
    options = {"dtype": "float32", "master": master}
    model, update = start(grid, **options)
    losses = go_on(model, update, range(3))
    want = everything(model, update)
    model, update = start(grid, **options)
    with DiskStates(folder, tile=4096) as states:
        update.place(states)
        assert go_on(model, update, range(2)) == losses[:2]
        before = everything(model, update)
        calls = []

        def fails():
            calls.append(0)
            return world.rank == world.size - 1 and len(calls) == (3 if where != "fdatasync" else 2)

        with monkeypatch.context() as patch:
            failing(patch, where, fails)
            with pytest.raises(OffloadError, match="on fire"):
                go_on(model, update, range(2, 3))
        update.zero_grad()
        assert not unlike(everything(model, update), before)
        assert go_on(model, update, range(2, 3)) == losses[2:]
        assert not unlike(everything(model, update), want)
    assert not threads()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("values", "master"), [(True, False), (False, "float64")])
def test_a_state_that_was_loaded_outlives_a_failed_write(make_grid, world, folder, monkeypatch, values, master):
    """At whichever write or flush the first step after the load fails, the loaded state is what is left, not that of
    the steps before it."""
    grid = make_grid(sizes(world.size))
    options = {"dtype": "float32", "master": master}
    other, theirs = start(grid, **options)
    go_on(other, theirs, range(3))
    loaded = other.state_dict(), theirs.state_dict()
    want = everything(other, theirs)
    losses = go_on(other, theirs, range(3, 4))
    after = everything(other, theirs)
    fail, calls = [0], [0]

    def fails():
        calls[0] += 1
        return world.rank == world.size - 1 and calls[0] == fail[0]

    for where in ("pwritev", "fdatasync"):
        failing(monkeypatch, where, fails)
    failed = count = 0
    while failed == count:
        model, update = start(grid, **options)
        with DiskStates(folder, tile=1 << 14, values=values) as states:
            update.place(states)
            go_on(model, update, range(1))
            model.load_state_dict(loaded[0])
            update.load_state_dict(loaded[1])
            calls[0], count = 0, count + 1
            fail[0] = count
            with suppress(OffloadError):
                found = go_on(model, update, range(3, 4))
            failed += any(world.share(fail[0] and calls[0] >= count))
            fail[0] = 0
            if failed == count:
                update.zero_grad()
                assert not unlike(everything(model, update), want), count
                found = go_on(model, update, range(3, 4))
            assert found == losses
            assert not unlike(everything(model, update), after), count
    assert failed > 4, "each write has failed once"
    assert not threads()


def test_without_values_a_step_that_failed_ends_it(make_grid, folder, monkeypatch, world):
    model, update = start(make_grid(sizes(world.size)))
    with DiskStates(folder, tile=4096, values=False) as states:
        update.place(states)
        go_on(model, update, range(1))
        failing(monkeypatch, "pwritev", lambda: True)
        with pytest.raises(OffloadError, match="on fire"):
            go_on(model, update, range(1, 2))
        for use in (update.state_dict, update.step):
            with pytest.raises(OffloadError, match=r"half-way.*load a checkpoint"):
                use()


KILLED = """
import os, signal, sys
import parlinalg as pla
from parlinalg.offload import DiskStates
from tests.offload.runs import *
with pla.Grid(sizes(1), backend="numpy") as grid:
    model, update = start(grid)
    if sys.argv[3] == "late":
        go_on(model, update, range(2))
    update.place(DiskStates(sys.argv[1], tile=4096))
    if sys.argv[3] != "late":
        go_on(model, update, range(2))
    calls, original = [0], os.pwritev
    def write(file, views, offset):
        calls[0] += 1
        if calls[0] == int(sys.argv[2]):
            original(file, [views[0][: len(views[0]) // 4096 // 2 * 4096]], offset)  # half of it
            os.kill(os.getpid(), signal.SIGKILL)
        return original(file, views, offset)
    os.pwritev = write
    go_on(model, update, range(2, 4))
"""


@pytest.mark.serial
@pytest.mark.parametrize(("call", "placed"), [(1, "first"), (5, "first"), (-1, "first"), (-1, "late")])
def test_a_run_that_is_killed_leaves_its_last_step(make_grid, tmp_path, call, placed):
    grid = make_grid(sizes(1))
    model, update = start(grid)
    go_on(model, update, range(2))
    steps = {2: everything(model, update)}
    go_on(model, update, range(2, 3))
    steps[3] = everything(model, update)
    tiles = -(-sum(p.block.size * 16 for p in model.parameters()) // 4096)
    at = tiles + 5 if call < 0 else call  # in the step after the next; of states just placed, in the first one
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), str(at), placed], check=False, capture_output=True, text=True,
        timeout=60, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    model, update = start(grid)
    made = recover(tmp_path, update)
    assert made == update.steps == (3 if call < 0 and placed == "first" else 2)
    assert not unlike(everything(model, update), steps[made])
    file = tmp_path / "states.0.tiles"
    with file.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(OffloadError, match="in use by another process"):
            recover(tmp_path, update)
    whole = file.read_bytes()
    for damage, said in ((whole[:-4096], "cut short"), (whole[:-9000] + b"x" * 9000, "checksum")):
        file.write_bytes(damage)
        model, update = start(grid)
        before = everything(model, update)
        try:
            recover(tmp_path, update)
        except OffloadError as error:
            assert said in str(error) and str(file) in str(error)  # noqa: PT017, PT018
            assert not unlike(everything(model, update), before)
        else:  # the damage was in the half-written part
            assert said == "checksum" and not unlike(everything(model, update), steps[made])  # noqa: PT018
    shutil.rmtree(tmp_path)
    with pytest.raises(OffloadError, match="is not there"):
        recover(tmp_path, update)


@pytest.mark.ranks(1, 4)
def test_a_file_that_is_changed_or_cut_is_told_on_all_ranks(make_grid, world, folder):
    grid = make_grid(sizes(world.size))
    model, update = start(grid)
    with DiskStates(folder, tile=4096) as states:
        update.place(states)
        go_on(model, update, range(2))
        before = model.state_dict()
        mine = folder / f"states.{world.size - 1}.tiles"
        if world.rank == world.size - 1:
            os.truncate(mine, 20000)
        with pytest.raises(OffloadError, match=f"{mine.name}.* cut short"):
            go_on(model, update, range(2, 3))
        assert update.steps == 2
        after = model.state_dict()
        if world.size > 1:  # only the rank with the damage cannot put its part back, and says so
            assert before.keys() == after.keys()
        else:
            with pytest.raises(OffloadError):
                update.state_dict()


@pytest.mark.ranks(1, 4)
def test_a_folder_that_cannot_be_written_is_named_on_all_ranks(make_grid, world, folder):
    model, update = start(make_grid(sizes(world.size)))
    if world.rank == world.size - 1:
        (folder / f"mine.{world.rank}").touch()
    path = folder / (f"mine.{world.rank}" if world.rank == world.size - 1 else "others") / "deeper"
    update.place(DiskStates(path))
    with pytest.raises(OffloadError, match=f"mine.{world.size - 1}.* cannot be used: Not a directory.*give path="):
        go_on(model, update, range(1))
    update.place(optim.InMemory())
    go_on(model, update, range(1))


FULL = """
import resource, sys
import parlinalg as pla
from parlinalg.errors import OffloadError
from parlinalg.offload import DiskStates
from pathlib import Path
from tests.offload.runs import *
if sys.argv[2] == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
folder = Path(sys.argv[1])
with pla.Grid(sizes(1), backend="numpy") as grid:
    model, update = start(grid, hidden_size=96)
    with DiskStates(folder, tile=1 << 16) as states:
        update.place(states)
        try:
            go_on(model, update, range(1))
            print((folder / "states.0.tiles").stat().st_size)
        except OffloadError as error:
            print(error, "| left:", len(list(folder.iterdir())))
"""


@pytest.mark.serial
@pytest.mark.parametrize("kind", ["disk", "limit"])
def test_a_full_disk_is_met_when_the_file_is_made(tmp_path, kind):
    if kind == "disk":
        if os.geteuid() or not shutil.which("unshare"):
            pytest.skip("cannot be had here: only root mounts a small disk")
        command = f'mount -t tmpfs -o size=2m small {tmp_path} && exec "$@"'
        prefix = ["unshare", "-m", "sh", "-c", command, "sh"]
        if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode:
            pytest.skip("cannot be had here: no mount namespaces")
    else:
        prefix = []

    def said(*command):
        done = subprocess.run(
            [*command, sys.executable, "-c", FULL, str(tmp_path), kind if command or kind == "limit" else ""],
            check=False, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    text = said(*prefix)
    assert f"{tmp_path}/states.0.tiles cannot be made" in text
    needed = int(re.search(r"(\d+) bytes", text)[1])
    assert needed > 1 << 21
    assert "left: 0" in text
    assert kind == "limit" or ("No space left" in text and "2097152" in text and needed == int(said()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("back", [0, 1, 2])
def test_ranks_that_ended_at_different_steps_go_on_from_the_earlier_one(make_grid, world, folder, back):
    """Parameters that a step leaves alone, since they have no gradient, keep their values, in tiles of others too."""
    grid, mine = make_grid(sizes(world.size)), folder / f"states.{world.rank}.tiles"
    model, update = start(grid, reduce=False)
    seen, copies = {}, {}
    with DiskStates(folder, tile=4096, keep=True) as states:
        update.place(states)
        for step in range(4):
            loss_of(model, step).backward()
            for i, p in enumerate(model.parameters()):
                if i % 3 == step % 3:
                    p.grad = None
            update.step()
            update.zero_grad()
            seen[step + 1], copies[step + 1] = everything(model, update), mine.read_bytes()
    world.barrier()
    if world.rank == world.size - 1:
        mine.write_bytes(copies[4 - back])
    world.barrier()
    model, update = start(grid, reduce=False)
    if back > 1:  # a rank keeps two
        with pytest.raises(OffloadError, match=r"states\.0\.tiles has step 3, and another rank's file has 2"):
            recover(folder, update)
        return
    assert recover(folder, update) == update.steps == 4 - back
    assert not unlike(everything(model, update), seen[4 - back])


@pytest.mark.ranks(1, 2)
def test_an_update_of_whole_parameters_takes_no_tiles(make_grid, world, folder):
    class ByMean(optim.Optimizer):
        STATES = ("mean",)

        def update(self, run):
            run.value[...] -= self.lr * run.g / np.abs(run.g).max()

    _, update = start(make_grid(sizes(world.size)), optimizer=lambda ps, lr, master: ByMean(ps, lr, 0.0))
    with DiskStates(folder, tile=4096) as disk:
        for states in (HostStates(4096), disk):
            told = rf"ByMean may update .* and {type(states).__name__} bring .*ByMean.ELEMENTWISE = True.* or states in"
            with pytest.raises(ConfigError, match=told):
                update.place(states)
        assert isinstance(update.flat.states, InMemory)
        ByMean.ELEMENTWISE = True
        update.place(disk)
