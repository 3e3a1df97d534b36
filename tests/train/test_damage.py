"""Checkpoints changed in every way: refused by a CheckpointError on all ranks, before anything is loaded."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, optim
from parlinalg.errors import CheckpointError
from parlinalg.optim.schedules import Cosine, Scheduler

BAD = [
    -1, -(2**63), 2**31, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, 0.5, 1e300, float("nan"), float("inf"), True, None,
    "", "0", "../../x", "/etc/passwd", "\ud800", "\0", "é" * 5000, [], [0], [[]], {}, {"a": 1}, [2**40] * 70, [-1, 3],
]  # fmt: skip
SECONDS = 20.0  # for any of them, on a crowded machine


@pytest.fixture
def saved(folder: Path, world: Any, backend: str, tune: Any) -> Any:
    """Makes a training with checkpoints of steps 1 and 2 in `folder`, cut into rectangles of at most 64 bytes."""
    tune(CHECKPOINT_SPLIT=64)
    sizes = {1: {}, 2: {"tensor": {"mode": "1d", "size": 2}}, 4: {"tensor": {"mode": "2d", "size": 4}}}
    mesh = pla.launch({"parallel": sizes.get(world.size, {})}, world, backend)
    grid = mesh.grid
    model = nn.Sequential(nn.Linear(6, 5, mesh.scheme, grid), nn.Linear(5, 4, mesh.scheme, grid)).initialize(0)
    parameters = dict(model.named_parameters())
    for p in parameters.values():
        p.grad = pla.zeros(p.shape, grid, p.layout, p.dtype)
    checkpoints = pla.Checkpoints(folder, mesh.world, parameters, optim.AdamW(parameters.values()), background=False)
    for step in (1, 2):
        fill(checkpoints, 1000 * step)
        checkpoints.save(step, {"optimizer": {"kind": "AdamW"}, "metrics": {"loss": 1.0 / step}})
    checkpoints.finish()
    world.barrier()
    yield checkpoints
    mesh.close()


class Held(NamedTuple):
    """A block of a parameter, or what this rank has of a state of it."""

    state: bool
    dtype: np.dtype[Any]
    size: int
    read: Callable[[], Any]
    write: Callable[[np.ndarray], object]


def held(checkpoints: pla.Checkpoints) -> list[Held]:
    """What this rank holds of parameters and states, flat and in host memory."""
    found, update = [], checkpoints.optimizer
    assert update is not None

    def write_block(p: pla.Parameter, values: np.ndarray) -> None:
        p.block[...] = p.grid.backend.from_host(values.reshape(p.block.shape))
        p.written()

    entries = update.arrange()
    for p in checkpoints.parameters.values():
        read = partial(lambda p: p.grid.backend.to_host(p.block).reshape(-1), p)
        found.append(Held(False, p.dtype, p.block.size, read, partial(write_block, p)))
    place = update.flat.states
    for entry in entries:
        backend = entry.data.grid.backend
        for state in entry.names:
            read = partial(lambda e, s, b: b.to_host(place.read(e, s)).reshape(-1), entry, state, backend)
            write = partial(lambda e, s, b, values: place.write(e, s, b.from_host(values)), entry, state, backend)
            found.append(Held(True, entry.dtype, entry.size, read, write))
    return found


def fill(checkpoints: pla.Checkpoints, start: float) -> None:
    """Give this rank's parameters and states numbers from here on."""
    for each in held(checkpoints):
        each.write(np.arange(each.size, dtype=each.dtype) + each.dtype.type(start))


def values(checkpoints: pla.Checkpoints) -> list[list[float]]:
    """This rank's blocks of parameters and states."""
    return [each.read().tolist() for each in held(checkpoints)]


def rewritten(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change an index, and give it the checksum of what it says then."""
    path = folder / "index.json"
    whole = json.loads(path.read_text())
    change(whole["body"])
    text = json.dumps(whole["body"], sort_keys=True, separators=(",", ":"))
    whole["digest"] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    path.write_text(json.dumps(whole))


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values within one of JSON."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]


def mutate(body: dict[str, Any], draw: random.Random) -> str:
    """Change one value of an index; what was done."""
    outside = [p for p in places(body) if p and p[0] != "training"]
    path = draw.choice(outside)
    parent = body
    for key in path[:-1]:
        parent = parent[key]
    key, old = path[-1], parent[path[-1]]
    how = draw.choice(["bad", "bad", "near", "gone", "twice", "swap"])
    if how == "near" and type(old) is int:
        parent[key] = old + draw.choice([-8, -1, 1, 8, 256])
    elif how == "gone":
        parent.pop(key)
    elif how == "twice" and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(old))
    elif how == "swap" and isinstance(parent, dict) and len(parent) > 1:
        other = draw.choice([k for k in parent if k != key])
        parent[key], parent[other] = parent[other], parent[key]
    else:
        parent[key] = copy.deepcopy(draw.choice(BAD))
    return f"{how} at {path}"


def refused(checkpoints: pla.Checkpoints, what: str, *, untouched: bool = True) -> str:
    """The last checkpoint is refused on all ranks, with the same words, and the one before it is loaded instead.

    Parameters
    ----------
    untouched : bool
        Whether nothing was loaded; else each number may be the checkpoint's, states may be 0, and none is any other.
    """
    began = time.monotonic()
    fill(checkpoints, -9000)
    before = values(checkpoints)
    with pytest.raises(CheckpointError) as caught:
        pytest.fail(f"{what}: loaded {checkpoints.load()}")
    for each, old, now in zip(held(checkpoints), before, values(checkpoints), strict=True):
        new = [2000.0 + i for i in range(len(old))]
        zero = [0.0] if each.state else []
        good = all(c in (a, b, *zero) for a, b, c in zip(old, new, now, strict=True))
        assert old == now or (good and not untouched), f"{what}: something was loaded"
    assert len(set(checkpoints.comm.share(str(caught.value)))) == 1, what
    assert len(str(caught.value)) < 2000, what
    found = checkpoints.load(fall_back=True)
    assert found is not None, what
    assert found.step == 1, what
    assert values(checkpoints) == [[1000.0 + i for i in range(len(v))] for v in before], what
    assert time.monotonic() - began < SECONDS, what
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- the index
@pytest.mark.ranks(1, 2, 4)
def test_indexes_changed_at_random(saved: pla.Checkpoints, folder: Path, world: Any, full: bool) -> None:
    """What is not noticed is the same checkpoint."""
    last = folder / "step-00000002"
    text, loaded = (last / "index.json").read_text(), []
    trials = (4000 if full else 300) // world.size**2
    for seed in range(trials):
        done = [""]
        world.barrier()
        if world.rank == 0:
            (last / "index.json").write_text(text)
            draw = random.Random(seed)
            rewritten(last, lambda body: done.append(mutate(body, draw)))
        what = f"{seed}: {world.share(done[-1])[0]}"
        fill(saved, -9000)
        try:
            assert saved.load() is not None
        except CheckpointError:
            refused(saved, what, untouched=False)
        else:
            loaded.append(what)
            assert values(saved) == [[2000.0 + i for i in range(len(v))] for v in values(saved)], what
    assert len(loaded) < trials / 10, loaded


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a step below 0": (lambda b: b.update(step=-2), "step is -2"),
    "a huge step": (lambda b: b.update(step=10**30), "step is 10"),
    "another step": (lambda b: b.update(step=3), "of step 3, which would be in the folder step-00000003"),
    "no step": (lambda b: b.pop("step"), "lacks 'step'"),
    "pages of nothing": (lambda b: b.update(page=0), "page is 0"),
    "another folder": (
        lambda b: renamed(b, "../step-00000001/index.json"), "is not one in the folder of the checkpoint",
    ),
    "an absolute path": (lambda b: renamed(b, "/etc/passwd"), "is not one in the folder of the checkpoint"),
    "a list for the training": (lambda b: b.update(training=[1]), r"training is \[1\], not an object"),
    "another dtype": (lambda b: tensor(b).update(dtype="object"), "dtype 'object'"),
    "another dim": (lambda b: tensor(b)["shape"].append(1), "does not lie within the shape"),
    "a dim too large": (lambda b: tensor(b).update(shape=[2**62, 2**62]), "too many elements"),
    "a rectangle left out": (lambda b: tensor(b)["chunks"].pop(), "elements, the tensor has"),
    "a rectangle twice": (lambda b: tensor(b)["chunks"].append(tensor(b)["chunks"][0]), "elements, the tensor has"),
    "one for another": (lambda b: tensor(b)["chunks"].__setitem__(1, tensor(b)["chunks"][0]), "overlap|elements"),
    "a negative offset": (lambda b: rectangle(b)["offsets"].__setitem__(0, -1), "the offsets of a rectangle is -1"),
    "a negative size": (lambda b: rectangle(b)["sizes"].__setitem__(0, -1), "the sizes of a rectangle is -1"),
    "half an offset": (lambda b: rectangle(b)["offsets"].__setitem__(0, 0.5), "the offsets of a rectangle is 0.5"),
    "beyond the shape": (lambda b: rectangle(b)["offsets"].__setitem__(0, 6), "does not lie within the shape"),
    "fewer offsets": (lambda b: rectangle(b)["offsets"].pop(), "does not lie within the shape"),
    "before the tensors": (lambda b: rectangle(b).update(at=0), "is said to lie in bytes 0 to"),
    "behind the file": (lambda b: rectangle(b).update(at=10**9), "is said to lie in bytes 1000000000 to"),
    "no such file": (lambda b: rectangle(b).update(file="rank-7.safetensors"), "which is not one of its files"),
    "the bytes of another": (lambda b: rectangle(b).update(at=rectangle(b)["at"] + 8), "lie in the same bytes"),
    "checksums that are none": (lambda b: rectangle(b).update(crc32="+1234567"), "checksums of a rectangle"),
    "fewer checksums": (lambda b: rectangle(b).update(crc32=""), "0 checksums for 1 pages"),
    "a huge header": (lambda b: next(iter(b["files"].values())).__setitem__(1, 10**12), "length of the header"),
    "a name twice as long": (lambda b: b["tensors"].update({"x" * 5000: tensor(b)}), "a tensor is named"),
}  # fmt: skip


def tensor(body: Any) -> Any:
    """A tensor of several rectangles."""
    return next(t for t in body["tensors"].values() if len(t["chunks"]) > 1 and len(t["shape"]) > 1)


def rectangle(body: Any) -> Any:
    return tensor(body)["chunks"][0]


def renamed(body: Any, name: str) -> None:
    file = next(iter(body["files"]))
    body["files"][name] = body["files"].pop(file)
    for entry in body["tensors"].values():
        for each in entry["chunks"]:
            each["file"] = name if each["file"] == file else each["file"]


@pytest.mark.ranks(2, 4)
def test_an_index_that_does_not_describe_a_checkpoint(saved: pla.Checkpoints, folder: Path, world: Any) -> None:
    last = folder / "step-00000002"
    text = (last / "index.json").read_text()
    for what, (change, words) in CHANGES.items():
        world.barrier()
        if world.rank == 0:
            (last / "index.json").write_text(text)
            rewritten(last, change)
        world.barrier()
        said = refused(saved, what)
        assert re.search(words, said), f"{what}: {said}"
        assert "step-00000002" in said


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 200_000, "nested too deep"),
        ('{"format": "parlinalg checkpoint", "version": 1, "body": ' + "[" * 900 + "]" * 900 + "}", "damaged"),
        ("\udcff\udcfe", "not UTF-8"),
        ("1" * 100_000, "not JSON"),
        ('{"format": 1, "format": "parlinalg checkpoint"}', "the key 'format' twice"),
        ("", "not JSON"),
        ("null", "not an index"),
        ('{"format": "parlinalg checkpoint", "version": ' + "9" * 4000 + "}", "version 999"),
    ],
)
def test_an_index_that_is_no_json_of_ours(text: str, words: str, saved: pla.Checkpoints, folder: Path) -> None:
    (folder / "step-00000002" / "index.json").write_bytes(text.encode(errors="surrogateescape"))
    assert words in refused(saved, text[:50])


# ---------------------------------------------------------------------------------------------- the files
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("which", ["index.json", "a file"])
def test_what_is_no_file_is_not_waited_for(which: str, saved: pla.Checkpoints, folder: Path, world: Any) -> None:
    last = folder / "step-00000002"
    path = last / (which if which == "index.json" else sorted(p.name for p in last.glob("rank-*"))[0])

    def put(make: Callable[[], object]) -> None:
        world.barrier()
        if world.rank == 0:
            path.unlink() if not path.is_dir() else path.rmdir()
            make()
        world.barrier()

    world.barrier()
    aside = folder / f"aside.{path.suffix}"
    if world.rank == 0:
        shutil.copy(path, aside)
    for make, words in (
        (lambda: os.mkfifo(path), "FIFO"),
        (lambda: path.symlink_to(aside), "symbolic link"),
        (lambda: path.symlink_to(path), "symbolic link"),
        (lambda: path.symlink_to("/dev/zero"), "symbolic link"),
        (path.mkdir, "a folder"),
    ):
        put(make)
        if which == "index.json" and not path.exists():
            assert saved.load().step == 1, "a link that leads nowhere is no checkpoint"
        else:
            assert words in refused(saved, words, untouched=which == "index.json")
    put(lambda: shutil.copy(aside, path))
    assert saved.load().step == 2


@pytest.mark.ranks(2)
def test_folders_that_are_links_or_have_odd_names(saved: pla.Checkpoints, folder: Path, world: Any) -> None:
    last, elsewhere = folder / "step-00000002", folder / "elsewhere"
    if world.rank == 0:
        for name in ("step-" + "9" * 5000)[:250], "step-٠٠٠٠٠٠٠٣", "step-0000000000000000004", "step--0000003":
            (folder / name).mkdir()
            (folder / name / "index.json").write_text("{}")
        last.rename(elsewhere)
        last.symlink_to(elsewhere)
    world.barrier()
    assert saved.steps() == [1, 2]
    assert "is a symbolic link" in refused(saved, "a link")
    saved.keep = 1
    saved.save(3)
    saved.finish()
    world.barrier()
    assert saved.steps()[-1] == 3
    assert len(list(elsewhere.iterdir())) > 1, "what a link leads to is not removed"


@pytest.mark.ranks(1, 2)
def test_files_changed_at_random(saved: pla.Checkpoints, folder: Path, world: Any, full: bool) -> None:
    last = folder / "step-00000002"
    files = sorted(p for p in last.iterdir())
    contents = {path: path.read_bytes() for path in files}
    world.barrier()
    for seed in range((1000 if full else 80) // world.size):
        draw = random.Random(seed)
        path = draw.choice(files)
        data, n = bytearray(contents[path]), len(contents[path])
        how = draw.choice(["short", "long", "flip", "zeros", "shift", "huge"])
        at = draw.randrange(n)
        world.barrier()
        if world.rank == 0:
            if how == "huge":
                os.truncate(path, 1 << 42)  # of nothing
            else:
                changed = {
                    "short": data[:at], "long": data + b"\0" * draw.choice([1, 4096]), "zeros": bytes(n),
                    "flip": data[:at] + bytes([data[at] ^ (1 << draw.randrange(8))]) + data[at + 1 :],
                    "shift": data[1:] + data[:1],
                }  # fmt: skip
                path.write_bytes(changed[how])
        world.barrier()
        refused(saved, f"{how} {path.name} at {at}", untouched=False)
        world.barrier()
        if world.rank == 0:
            path.write_bytes(contents[path])
    world.barrier()
    assert saved.load().step == 2


# ---------------------------------------------------------------------------------------------- what it says beside
@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.clear(), lambda t: t.pop("engine"), lambda t: t.update(engine=3), lambda t: t.update(step=-1),
        lambda t: t.update(step="2"), lambda t: t.update(epoch=1e300), lambda t: t["engine"].update(optimizer=None),
        lambda t: t["engine"]["optimizer"].update(steps=True), lambda t: t["engine"]["optimizer"].update(lr="fast"),
        lambda t: t["engine"]["optimizer"].update(lr=float("nan")),
        lambda t: t.update(lr_scheduler={"steps": None}), lambda t: t.update(batches=10**40),
    ],
)  # fmt: skip
def test_a_training_goes_on_from_what_it_can_understand(
    change: Callable[[Any], object], folder: Path, world: Any, backend: str
) -> None:
    """By a hook; changed in the last checkpoint."""
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(4, 6)), rng.integers(0, 3, 4)) for _ in range(2)]

    def fit(**options: Any) -> pla.Trainer:
        mesh = pla.launch({"dtype": "float64"}, world, backend)
        model = nn.Linear(6, 3, mesh.scheme, mesh.grid, dtype="float64")
        engine, *_ = pla.initialize(model, lambda p: optim.AdamW(p), pla.autograd.ops.cross_entropy_sum)
        rate = Scheduler(engine.optimizer, Cosine(9))
        hooks = [pla.CheckpointHook(folder, 1, **options)]
        trainer = pla.Trainer(engine, pla.NonPipelineSchedule(), lr_scheduler=rate, hooks=hooks)
        trainer.fit(batches, steps=3 if options else 2)
        return trainer

    fit()
    rewritten(folder / "step-00000002", lambda body: change(body["training"]))
    with pytest.raises(CheckpointError, match="step-00000002"):
        fit(resume=True)
    assert fit(resume=True, fall_back=True).step == 3
