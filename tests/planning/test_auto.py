"""`parallel="auto"`: what is chosen when a training starts, on all ranks alike, and what a checkpoint keeps of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from parlinalg.errors import ConfigError, PlanError
from parlinalg.planning import auto, measure
from parlinalg.planning.candidates import Candidate
from parlinalg.planning.machine import load_machine, machine_text
from parlinalg.train.checkpoint_files import complete, read_index
from parlinalg.train.checkpoint_index import name_of
from parlinalg.train.config import parse
from parlinalg.train.mesh import launch, resolve
from tests.launching import launch as start

MLP = {
    "model": {"name": "mlp", "hidden": [24, 16]}, "data": "digits", "batch_size": 24, "zero": 0, "epochs": 1,
    "parallel": {"auto": True, "pipeline": 1}, "gradient_accumulation": 1, "machine": "laptop",
}  # fmt: skip


def test_all_ranks_take_one_choice_that_fits_them(world):
    made = auto.choose(MLP, world)
    assert not made.config.parallel.auto
    assert made.config.parallel.pipeline.ranks == 1
    assert resolve(made.config, world.size).data == made.config.parallel.data.size
    everyone = world.share([repr(made.config), made.lines["parallel"], json.dumps(made.notes)])
    assert everyone == [everyone[0]] * world.size
    assert list(made.lines) == ["parallel", "because"]
    assert Candidate.from_note(made.notes["plan"]["choice"]).note() == made.notes["plan"]["choice"]
    with launch(made.config, world) as mesh:
        assert mesh.world.size == world.size


def test_what_is_given_is_taken_as_it_is(world):
    given = {**MLP, "parallel": {"data": world.size}}
    made = auto.choose(given, world)
    assert made.config == parse(given)
    assert not made.lines
    assert not made.notes


def test_errors_reach_all_ranks(world):
    with pytest.raises(ConfigError, match="there is no machine 'laptopp'"):
        auto.choose({**MLP, "machine": "laptopp"}, world)
    with pytest.raises(ConfigError, match=r"parallel must be 'auto', or a dict with the keys data, .*, not 'atuo'"):
        auto.choose({**MLP, "parallel": "atuo"}, world)
    if world.size in (2, 3, 4):
        fixed = {"auto": True, "pipeline": 1, "sequence": 1, "tensor": 1}
        with pytest.raises(PlanError, match=r"a batch of 7 samples cannot be split evenly"):
            auto.choose({**MLP, "batch_size": 7, "parallel": fixed}, world)


def test_other_configurations_on_some_ranks_are_refused(world):
    if world.size == 1:
        return
    with pytest.raises(ConfigError, match="rank 1 reads another configuration than rank 0"):
        auto.choose({**MLP, "seed": int(world.rank == 1)}, world)


def test_a_machine_is_measured_once(world, monkeypatch, tmp_path):
    calls = []

    def measured(comm, name, device="auto"):
        calls.append(device)
        return load_machine("laptop")

    folder = world.share(str(tmp_path))[0]
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    monkeypatch.setattr(auto, "measure_machine", measured)
    first, again = (auto.measured_machine(world, "numpy") for _ in range(2))
    assert machine_text(first) == machine_text(again) == machine_text(load_machine("laptop"))
    assert calls == ["numpy"]
    world.barrier()
    if not world.rank:
        (file,) = Path(folder, "parlinalg", "machines").iterdir()
        file.write_text("cores = 'damaged'")
    world.barrier()
    auto.measured_machine(world, "numpy")
    assert len(calls) == 2
    monkeypatch.setattr(auto.np, "__version__", "0")  # another NumPy is another machine
    auto.measured_machine(world, "numpy")
    assert len(calls) == 3


def test_a_folder_that_cannot_be_written_is_no_obstacle(world, monkeypatch, tmp_path):
    folder = Path(world.share(str(tmp_path))[0])
    if not world.rank:
        (folder / "parlinalg").write_text("a file in the way")
    world.barrier()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(auto, "measure_machine", lambda *args: load_machine("laptop"))
    assert auto.measured_machine(world).name == "laptop"


def test_elsewhere_the_sizes_must_be_given(world):
    with pytest.raises(ConfigError, match="parallel='auto' is chosen when `parlinalg train` starts; elsewhere give"):
        launch({"parallel": "auto"}, world)


@pytest.mark.serial
def test_measure_is_what_doctor_measures():
    assert auto.measure_machine is measure.measure_machine


SMALL = [
    "--set", "parallel=auto", "--set", "machine=laptop", "--set", "zero=0", "--set", "batch_size=32", "--set",
    "model.hidden=(24,16)", "--set", "gradient_accumulation=1", "--steps",
]  # fmt: skip


def trained(ranks: int, folder: Path, steps: int, *more: str) -> str:
    done = start(ranks, ["-m", "parlinalg", "train", "digits", "--out", "run", *SMALL, str(steps), *more], timeout=90,
                 cwd=folder)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def noted(folder: Path) -> dict:
    at = folder / "run" / "checkpoints"
    return dict(read_index(at / name_of(complete(at)[-1])).training["plan"])


@pytest.mark.one_in(5)
@pytest.mark.serial
@pytest.mark.timeout(400)
def test_a_training_chooses_says_so_and_goes_on(tmp_path):
    text = trained(4, tmp_path, 2)
    line = re.search(r"^parallel +(.*): \S+ m?s a step on laptop, .* the fastest of \d+ candidates", text, re.MULTILINE)
    assert line, text
    assert re.search(r"^because +next is .*: ", text, re.MULTILINE)
    note = noted(tmp_path)
    assert (note["candidate"], note["ranks"]) == (line[1], 4)
    text = trained(4, tmp_path, 4, "--resume")
    assert f"parallel    {note['candidate']}, as in the last checkpoint" in text
    assert "going on after step 2" in text
    assert noted(tmp_path) == note
    text = trained(4, tmp_path, 5, "--resume", "--set", "machine=v100")  # chosen anew
    assert "as in the last checkpoint" not in text
    text = trained(2, tmp_path, 6, "--resume")  # other ranks: chosen anew
    assert "going on after step 5" in text
    assert noted(tmp_path)["ranks"] == 2
