"""A limit of memory with a pipeline: what will be under way is known before, the limit holds, losses stay the same."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg.autograd.saved import arrays, memory
from parlinalg.errors import ConfigError
from parlinalg.pipeline.run import ScheduleRun
from parlinalg.train import launch
from tests.train.conftest import TEXT
from tests.train.test_hybrid import settings
from tests.train.test_offload_pipeline import SCHEDULES, run
from tests.train.trainings import Training, main

ASYNCHRONOUS: dict[str, Any] = {"name": "pipedream-2bw", "every": 2}


def config_of(name: str, folder: Path, **more: Any) -> dict[str, Any]:
    """A GPT in a pipeline of two ranks."""
    options = {**SCHEDULES[name], **({"schedule": ASYNCHRONOUS} if name == "pipedream-2bw" else {})}
    config = settings(folder, **{"parallel": {"pipeline": 2}, **options, **more})
    config["model"] = {**config["model"], "num_hidden_layers": 4, "tie_word_embeddings": name != "pipedream-2bw"}
    if name == "recompute":
        config["model"]["recompute"] = "block"
    return config


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", SCHEDULES)
def test_what_is_kept_at_once_is_known(
    name: str, tale: Path, world: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Of microbatches of any size, from one and two rows; on four ranks with ZeRO."""
    more: dict[str, Any] = {"offload": {"memory": "1GiB"}, "batch_size": 20}
    if world.size == 4:
        more |= {"parallel": {"data": 2, "pipeline": 2}, "zero": 1 if name == "pipedream-2bw" else 3}
    seen: list[int] = []
    original = ScheduleRun.report

    def report(self: ScheduleRun, *given: Any) -> None:
        stage = self.worker.model.parameters()
        values = [*(p.data for p in stage), *(d for v in _versions(self) for d in v)]
        weights = {id(memory(data.block)) for data in values}
        held = arrays(h for passage in self.in_flight.values() for h in passage.holders())
        seen.append(sum(a.nbytes for key, a in held.items() if key not in weights))
        original(self, *given)

    with launch(config_of(name, tale, **more), world, backend) as mesh:
        training = Training(mesh, tale)
        assert not training.offload.places
        monkeypatch.setattr(ScheduleRun, "report", report)
        training.steps(1)
        table = training.offload.table
        assert max(mesh.grid.world.share(max(seen))) == pytest.approx(table.activations, rel=0.02)
        assert table.older == (table.values if name == "pipedream-2bw" else 0)


def _versions(run: ScheduleRun) -> list[Any]:
    stash = getattr(run, "stash", None)
    return [] if stash is None else list(stash._versions.values())


def least_of(config: dict[str, Any], world: Any, backend: str, out: Path) -> int:
    """The least limit that works, as an error tells on all ranks."""
    told = r"a rank of stages? \d( and \d)* holds .*; the least limit that works is (\d+) bytes$"
    with pytest.raises(ConfigError, match=told) as raised:
        run({**config, "offload": {"memory": 1000}}, world, backend, out)
    assert len(set(world.share(str(raised.value)))) == 1
    return int(re.search(told, str(raised.value))[2])  # type: ignore[index]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", [n for n in SCHEDULES if n != "recompute"])
@pytest.mark.usefixtures("quick")
def test_a_limit_holds(
    name: str, tale: Path, world: Any, backend: str, full: bool, capfd: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """NumPy's memory at the most in a step is below the limit, and the losses are those without one.

    A block that is computed again is not in the plan.
    """
    if not full and name != ("1f1b" if world.size == 2 else "zb-h1"):
        return  # with --full
    if world.rank == 0:
        (tale / "tale.txt").write_text(TEXT * 8)
    world.barrier()
    config = config_of(name, tale, batch_size=16, steps=2)
    hidden = 48 * world.size
    if world.size == 4:
        config["parallel"] = {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}
    config["data"] = {**config["data"], "sequence_length": 32}
    config["model"] = {**config["model"], "hidden_size": hidden, "num_hidden_layers": 8 - world.size,
                       "intermediate_size": 4 * hidden, "max_position_embeddings": 32}  # fmt: skip
    least = least_of(config, world, backend, tale)
    want = run(config, world, backend, tale)[0]
    limit = int(1.2 * least)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    with launch({**config, "offload": {"memory": limit}}, world, backend) as mesh:
        training = Training(mesh, tale)
        assert "optimizer" in training.offload.places
        assert training.offload.table.total > limit
        found, most = [], []
        with training.away():
            for batch in training.batches():
                tracemalloc.reset_peak()
                found.append(training.step(batch).loss)
                most.append(tracemalloc.get_traced_memory()[1] - before)
            found.append(training.held()["loss"])
    tracemalloc.stop()
    capfd.readouterr()
    config |= {"steps": 1, "offload": {"memory": limit}, "backend": backend, "sample": {"max_new_tokens": 0}}
    assert main(config, tale / "out", comm=world) == 0
    said = world.share(capfd.readouterr().out)[0]
    assert all(re.search(rf"stages? (\d, )*{stage}.*: offloaded for a limit of", said) for stage in range(2))
    np.testing.assert_allclose(found, want, rtol=1e-12)
    if backend == "numpy":  # asynchronous plans leave little of the limit for what a step works with
        assert max(most) < limit * (1.1 if name == "pipedream-2bw" else 1)


@pytest.mark.ranks(2)
def test_versions_of_weights_are_not_offloaded(tale: Path, world: Any, backend: str) -> None:
    config = config_of("pipedream-2bw", tale, offload={"parameters": "disk"})
    with pytest.raises(ConfigError, match=r"offload\.parameters='disk' with the schedule 'pipedream-2bw'.*'1f1b'"):
        run(config, world, backend, tale)
