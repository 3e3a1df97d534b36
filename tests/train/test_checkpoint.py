"""Checkpoints: what is in them, what is read of them, and what becomes of damaged ones and of disks that fail."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.comm import SingleComm
from parlinalg.errors import CheckpointError, ConfigError
from parlinalg.nn.pretrained import Writer, read_header
from parlinalg.train import Checkpoints, launch
from parlinalg.train.checkpoint import read_index
from parlinalg.train.config import parse
from tests.train.trainings import Training

BASE: dict[str, Any] = {
    "dtype": "float64", "batch_size": 47, "steps": 6, "model": {"hidden": (31, 13), "dropout": 0.2},
    "optimizer": {"name": "adamw", "lr": 5e-3},
}  # fmt: skip
SERIAL = SingleComm()


def go_on(job: Training, stop: int) -> list[str]:
    return [repr(step) for step in job.steps(stop)]


def save(job: Training) -> None:
    job.save(job.made)
    job.saving.close()


def everything(job: Training) -> dict[str, Any]:
    states = job.optimizer.state_dict()["states"]
    arrays = {f"optimizer.{n}.{s}": a for n, named in states.items() for s, a in named.items()}
    return arrays | {f"model.{n}": a for n, a in job.model.state_dict().items()}


@pytest.fixture
def small(tune: Any) -> None:
    """Pages and parts so small that everything has several."""
    tune(CHECKPOINT_PAGE=256, CHECKPOINT_SPLIT=1000)


@pytest.fixture
def start(seven: Path, folder: Path, world: Any, backend: str) -> Iterator[Callable[..., Training]]:
    """Makes a training."""
    meshes: list[Any] = []

    def make(comm: Any = world, out: Path = folder, **more: Any) -> Training:
        settings = {**BASE, "data": str(seven), **more}
        meshes.append(launch(settings, comm, backend if comm is world else "numpy"))
        return Training(meshes[-1], out, comm)

    yield make
    for mesh in reversed(meshes):
        mesh.close()


# ---------------------------------------------------------------------------------------------- every kind of state
KINDS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": {"name": "sgd", "lr": 0.1, "momentum": 0.9}},
    "plain": {"optimizer": {"name": "sgd", "lr": 0.1}},
    "lamb": {"optimizer": "lamb"},
    "lars": {"optimizer": "lars", "zero": 1},
    "groups": {"optimizer": {"name": "adamw", "lr": 5e-3, "weight_decay": 0.5, "no_decay": True}, "zero": 1},
    "masters, loss scale": {
        "dtype": "float32", "precision": {"dtype": "fp16", "loss_scale": {"start": 2.0**17, "growth_every": 2}},
        "zero": 2,
    },
    "bfloat16": {"dtype": "float32", "precision": "bf16"},
    "states on a disk": {"offload": {"optimizer": "disk"}},
    "all on a disk": {"offload": {"optimizer": "disk", "parameters": "disk"}, "zero": 0},
}  # fmt: skip
ONLY = {"lars": (3,), "masters, loss scale": (1, 3), "all on a disk": (1,)}  # numbers of ranks beside 2


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.ranks(2, *ONLY.get(kind, ()))) for kind in KINDS],
)
def test_every_kind_of_state_comes_back(kind: str, start: Any, small: None, world: Any, folder: Path) -> None:
    job = start(**KINDS[kind])
    with job.away():
        go_on(job, 2)
        save(job)
        found = everything(job)
        want = go_on(job, 4)
    again = start(out=folder, **{**KINDS[kind], "offload": None})
    again.saving.resume()
    for name, array in everything(again).items():
        assert array.tobytes() == found[name].tobytes(), name
    assert go_on(again, 4) == want


@pytest.mark.ranks(2, 4)
def test_each_element_is_written_once_and_shared_out(start: Any, small: None, folder: Path, world: Any) -> None:
    job = start(zero=1)
    go_on(job, 1)
    save(job)
    index = read_index(folder / "checkpoints" / "step-00000001")
    arrays = everything(job)
    assert set(index.tensors) == set(arrays)
    for name, entry in index.tensors.items():
        seen = np.zeros(entry.shape, int)
        for rectangle in entry.rectangles:
            seen[tuple(slice(r.start, r.stop) for r in rectangle.region)] += 1
            assert len(rectangle.checksums) == -(-math.prod(rectangle.sizes) * 8 // 256)
        assert (seen == 1).all(), name
    written = [f.nbytes - f.header for f in index.files.values()]
    assert len(written) == world.size
    assert sum(written) == sum(a.nbytes for a in arrays.values())
    assert max(written) < 1.2 * sum(written) / world.size
    for file in index.files:  # safetensors, as others read them
        for stored in read_header(folder / "checkpoints" / "step-00000001" / file).values():
            name, _, part = stored.name.partition("[")
            ranges = [r.split(":") for r in part.rstrip("]").split(",")] if part else []
            cut = tuple(slice(int(a), int(b)) for a, b in ranges)
            np.testing.assert_array_equal(stored.mapped(), arrays[name][cut])


@pytest.mark.ranks(4)
def test_a_rank_reads_what_it_needs(start: Any, small: None, folder: Path, world: Any) -> None:
    job = start(parallel={"tensor": {"mode": "2d"}}, model={"hidden": (64, 64)})
    go_on(job, 1)
    save(job)
    again = start(parallel={"tensor": {"mode": "2d", "shape": (4, 1)}}, model={"hidden": (64, 64)})
    found = again.saving.checkpoints.load()
    assert found is not None
    index = read_index(found.path)
    entries = again.optimizer.arrange()
    needed = sum(p.block.nbytes for p in again.optimizer.parameters) + 2 * sum(e.size for e in entries) * 8
    rectangles = [c for e in index.tensors.values() for c in e.rectangles]
    headers = sum(f.header for f in index.files.values())
    total = sum(f.nbytes for f in index.files.values())
    assert found.bytes_read <= needed + 2 * 256 * len(rectangles) + headers
    assert found.bytes_read < 0.6 * total
    least = sum(world.share(found.bytes_read))
    assert least >= total - headers, "all of it was read by somebody"


# ---------------------------------------------------------------------------------------------- damage
@pytest.fixture
def two(start: Any, small: None, folder: Path) -> Training:
    """A training with checkpoints of steps 1 and 2."""
    job = start(SERIAL)
    for step in (1, 2):
        go_on(job, step)
        save(job)
    return job


def damaged(job: Training, *parts: str, fall_back: bool = True) -> None:
    """The last checkpoint is refused, with words; the one before it loads."""
    with pytest.raises(CheckpointError) as caught:
        job.saving.resume()
    for part in parts:
        assert part in str(caught.value)
    if fall_back:
        assert "after step 1" in job.saving.resume(fall_back=True)
        assert job.made == 1


@pytest.mark.serial
def test_a_flipped_byte_anywhere_is_detected(two: Training, folder: Path, full: bool) -> None:
    last = folder / "checkpoints" / "step-00000002"
    index = read_index(last)
    (shard,) = index.files
    random = np.random.default_rng(3)
    for name in (shard, "index.json"):
        whole = (last / name).read_bytes()
        n = len(whole)
        places = range(0, n, 41) if full else [0, 9, n // 2, n - 2, *random.integers(0, n - 1, 20)]
        for at in places:
            bytes_ = bytearray(whole)
            bytes_[at] ^= 1 << int(random.integers(8))
            (last / name).write_bytes(bytes_)
            with pytest.raises(CheckpointError, match=name) as caught:
                two.saving.checkpoints.load()
            if name == shard and at >= index.files[shard].header:
                assert repr(index.tensor_at(shard, at)) in str(caught.value)
        (last / name).write_bytes(whole)
    assert two.saving.checkpoints.load() is not None
    (last / shard).write_bytes(b"\0" * len((last / shard).read_bytes()))
    damaged(two, shard, "its header")


@pytest.mark.serial
def test_what_is_cut_short_missing_or_foreign_is_refused(two: Training, folder: Path) -> None:
    last, before = folder / "checkpoints" / "step-00000002", folder / "checkpoints" / "step-00000001"
    index = read_index(last)
    (shard,) = index.files
    whole, text = (last / shard).read_bytes(), (last / "index.json").read_text()
    middle = len(whole) // 2
    (last / shard).write_bytes(whole[:middle])
    damaged(two, shard, "cut short", f"{middle} bytes instead of {len(whole)}", repr(index.tensor_at(shard, middle)))
    (last / shard).write_bytes(whole + b"\0")
    damaged(two, "longer")
    (other,) = read_index(before).files
    (last / shard).write_bytes((before / other).read_bytes())
    damaged(two, shard, "differs")
    (last / shard).unlink()
    damaged(two, shard, "model.", "No such file")
    (last / shard).write_bytes(whole)

    def rewritten(change: Callable[[Any], None]) -> str:
        body = json.loads(text)
        change(body)
        return json.dumps(body)

    for what, contents, part in (
        ("short", text[: len(text) // 2], "cut short"),
        ("foreign", json.dumps({"metadata": {}, "weight_map": {"a": "model.safetensors"}}), "is not an index"),
        ("later", rewritten(lambda b: b.update(version=2)), "version 2"),
        ("changed", rewritten(lambda b: b["body"].update(step=7)), "checksum of its contents"),
    ):
        (last / "index.json").write_text(contents)
        damaged(two, "index.json", part)
        assert what
    shutil.copy(before / "index.json", last / "index.json")
    damaged(two, "index.json", "is of step 1, which would be in the folder step-00000001")
    (before / "index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not an index of a checkpoint"):
        two.saving.resume(fall_back=True)


@pytest.mark.serial
def test_a_checkpoint_of_another_training_is_refused(two: Training, start: Any, folder: Path) -> None:
    for more, message in (
        ({"model": {"hidden": (31, 13, 5)}}, r"missing: model\.\d.*misshapen|missing"),
        ({"model": {"hidden": (30, 13)}}, r"misshapen: .*\(13, 31\) instead of \(13, 30\)"),
        ({"model": {"hidden": (31,)}}, r"unexpected: model\."),
        ({"optimizer": "lamb"}, "has states of AdamW, which LAMB cannot go on from"),
        ({"optimizer": "sgd"}, "has states of AdamW"),
        ({"batch_size": 46}, "batch_size=47, this one has batch_size=46"),
        ({"seed": 1}, "seed=0, this one has seed=1"),
    ):
        with pytest.raises(CheckpointError, match=message):
            start(SERIAL, **more).saving.resume()
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 9; it has \[1, 2\]"):
        two.saving.checkpoints.load(9)
    assert two.saving.checkpoints.load(1).step == 1
    alone = Checkpoints(two.saving.folder, SERIAL, two.saving.checkpoints.parameters)
    assert alone.load().step == 2, "parameters alone"


# ---------------------------------------------------------------------------------------------- disks that fail
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_is_an_error_on_all_ranks(
    background: bool, start: Any, folder: Path, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the last rank the disk is full after a few tensors."""
    job = start(checkpoint={"background": background})
    go_on(job, 1)
    save(job)
    want = everything(job)
    go_on(job, 2)
    plain, written = Writer.write, []

    def write(self: Any, name: str, tensor: Any) -> None:
        written.append(name)
        if len(written) == 3 and world.rank == world.size - 1:
            self._file.close()
            self._file = Path("/dev/full").open("wb")  # what is buffered is refused when it is closed, too
        plain(self, name, tensor)

    monkeypatch.setattr(Writer, "write", write)
    with pytest.raises(
        CheckpointError, match=f"rank {world.size - 1}, saving step 2: .*No space left.*are free.*keep.*earlier"
    ):
        save(job)
    monkeypatch.setattr(Writer, "write", plain)
    world.barrier()
    there = sorted(p.name for p in (folder / "checkpoints").iterdir() if p.name != ".parlinalg.lock")
    assert there == ["step-00000001"], "nothing is left of it"
    assert "after step 1" in job.saving.resume()
    np.testing.assert_equal(everything(job), want)
    save(job)
    world.barrier()


@pytest.mark.ranks(1, 2)
def test_a_folder_that_cannot_be_written(start: Any, folder: Path, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = start()
    go_on(job, 1)
    save(job)
    if world.rank == 0:
        (folder / "checkpoints" / "step-00000002").write_text("a file")
    go_on(job, 2)
    with pytest.raises(CheckpointError, match="step-00000002"):
        save(job)
    go_on(job, 3)
    plain = Path.replace

    def replace(self: Path, target: Path) -> Path:
        if target.name == "index.json":
            raise OSError("no index today")
        return plain(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(CheckpointError, match="no index today"):
        save(job)
    world.barrier()
    assert not (folder / "checkpoints" / "step-00000003").exists()
    assert job.saving.checkpoints.steps() == [1]


@pytest.mark.serial
def test_states_that_are_changed_while_files_are_written_are_not_in_them(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    job = start(SERIAL)
    go_on(job, 1)
    want, gate = everything(job), threading.Event()
    plain = Writer.write

    def write(self: Any, name: str, tensor: Any) -> None:
        assert gate.wait(20)
        plain(self, name, tensor)

    monkeypatch.setattr(Writer, "write", write)
    job.save(1)
    go_on(job, 3)
    job.saving.checkpoints.poll()
    assert job.saving.checkpoints.steps() == [], "no index before all is written"
    gate.set()
    job.saving.close()
    job.saving.resume()
    np.testing.assert_equal(everything(job), want)


# ---------------------------------------------------------------------------------------------- which ones stay
@pytest.mark.ranks(1, 2)
def test_the_last_ones_and_the_best_stay(start: Any, folder: Path, world: Any) -> None:
    losses = {1: 5.0, 2: 1.0, 3: 4.0, 4: math.nan, 5: 2.0, 6: 3.0}
    job = start(checkpoint={"every": 1, "keep": 2, "best": "test_loss"})
    for step, loss in losses.items():
        go_on(job, step)
        job.saving.after(step, {"test_loss": loss})
    job.saving.close()
    world.barrier()
    assert job.saving.checkpoints.steps() == [2, 5, 6]
    assert Checkpoints(folder / "checkpoints", SERIAL, {}).load(2).training["metrics"]["test_loss"] == 1.0
    again = start(checkpoint={"keep": 1, "best": "test_loss"})
    again.saving.resume()
    assert again.saving.best == 1.0
    again.saving.after(7, {"test_loss": 1.5})  # neither due nor the best
    assert again.saving.checkpoints.steps() == [2, 5, 6]
    again.saving.after(8, {"test_loss": 0.5})
    again.saving.close()
    world.barrier()
    assert again.saving.checkpoints.steps() == [8]


@pytest.mark.serial
def test_settings() -> None:
    def made(value: Any) -> Any:
        return parse({"checkpoint": value}).checkpoint

    assert made(False).on is False
    assert made(7).every == 7
    assert str(made(7)) == "every 7 steps and at the end; the last 3 stay"
    assert str(made({"keep": None})) == "at the end; all stay"
    assert made({"every": 100, "keep": None, "background": False}).keep is None
    with pytest.raises(ConfigError, match="did you mean 'every'"):
        made({"evry": 3})
    with pytest.raises(ConfigError, match=r"must be a dict .*, or a number of steps, or False for none, not 'daily'"):
        made("daily")


@pytest.mark.serial
def test_the_best_is_a_metric_that_there_is(start: Any) -> None:
    with pytest.raises(ConfigError, match=r"'validation_loss' is not a metric .*'test_loss' or 'test_accuracy'"):
        start(SERIAL, checkpoint={"best": "validation_loss"})


@pytest.mark.ranks(1, 2, 3, 4)
def test_replicas_share_out_tensors_of_any_shape(folder: Path, make_grid: Any, world: Any, tune: Any) -> None:
    """Those above a limit are cut for all that hold them, along the first dim that is longer than 1."""
    tune(CHECKPOINT_SPLIT=64)
    grid = make_grid({"data": world.size})
    shapes = {"row": (1, 40), "token": (1, 1, 33), "table": (5, 8), "flat": (41,), "empty": (0, 3), "one": (1, 1)}
    values = {name: 1 + np.arange(float(np.prod(shape))).reshape(shape) for name, shape in shapes.items()}
    held = {n: pla.Parameter(pla.distribute(a, grid, pla.Layout(*[None] * a.ndim)), n) for n, a in values.items()}
    checkpoints = pla.Checkpoints(folder / "saved", grid.world, held, pla.optim.SGD(list(held.values()), lr=0.1))
    checkpoints.save(1, {})
    checkpoints.finish()
    for p in held.values():
        p.block[...] = -1
    assert checkpoints.load().step == 1
    for name, p in held.items():
        np.testing.assert_array_equal(p.gather(), values[name], err_msg=name)
