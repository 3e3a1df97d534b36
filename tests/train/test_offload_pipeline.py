"""Activations of a pipeline's stages elsewhere, several microbatches of them at a time: the same bits."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg.errors import ConfigError
from parlinalg.offload import OffloadedParameters
from parlinalg.offload.activations import Held, Packer
from parlinalg.offload.stores import OffloadedBytes
from parlinalg.random.draws import current_draws
from parlinalg.train import launch
from tests.train.test_hybrid import settings
from tests.train.trainings import Training

SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "interleaved": {"schedule": {"name": "interleaved", "chunks": 2}},
    "zb-h1": {"schedule": "zb-h1"},
    "zb-v": {"schedule": "zb-v"},
    "chimera": {"schedule": "chimera"},
    "recompute": {},
    "pipedream-2bw": {"schedule": "pipedream-2bw", "clip_grad_norm": None},
}


Result = tuple[list[float], dict[str, np.ndarray], dict[str, str] | None]


def run(config: dict[str, Any], world: Any, backend: str, out: Path) -> Result:
    """The losses of steps, all values after them, and what is offloaded where."""
    with launch(config, world, backend) as mesh:
        training = Training(mesh, out)
        with training.away():
            found = [step.loss for step in training.steps()]
            found.append(training.held()["loss"])
        places = None if training.offload is None else training.offload.places
        return found, training.model.state_dict(), places


def same(found: Any, want: Any) -> None:
    assert found[0] == want[0]
    assert found[1].keys() == want[1].keys()
    assert not [name for name in want[1] if found[1][name].tobytes() != want[1][name].tobytes()]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.ranks(*((2, 4) if n in ("1f1b", "zb-h1") else (2,)))) for n in SCHEDULES]
)
def test_every_bit_as_in_memory(
    name: str, tale: Path, world: Any, backend: str, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    if not full and name not in ("interleaved", "zb-h1"):
        return  # with --full
    parallel: dict[str, Any] = {"pipeline": 2}
    if world.size == 4:
        parallel["tensor"] = {"size": 2, "mode": "1d"}
    config = settings(tale, parallel=parallel, **SCHEDULES[name])
    config["model"] = {**config["model"], "num_hidden_layers": 4, "tie_word_embeddings": name != "pipedream-2bw"}
    if name == "recompute":
        config["model"]["recompute"] = "block"
    want = run(config, world, backend, tale)
    flight: list[int] = []
    lines: list[int] = []
    away: dict[int, weakref.WeakSet[OffloadedBytes]] = {}  # by microbatch
    draws: list[Any] = []  # alive, so that no two have the same number
    original = Packer.pack

    def pack(self: Packer, array: Any) -> Any:
        self.least = 0
        held = original(self, array)
        if isinstance(held, Held):
            draws.append(current_draws())
            away.setdefault(id(draws[-1]), weakref.WeakSet()).add(held.away)
        flight.append(sum(map(bool, map(len, away.values()))))
        lines.append(sum(map(len, away.values())))
        return held

    monkeypatch.setattr(Packer, "pack", pack)
    where = "disk" if backend == "numpy" else "host"
    found = run({**config, "offload": {"activations": where}}, world, backend, tale)
    same(found, want)
    assert found[2] == {"activations": where}
    assert max(lines) > 1, "something is away"
    if world.rank < world.size // 2:
        assert max(flight) > 1, "several microbatches are away at once"
    assert not list(tale.rglob("*.extents"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["zb-h1", "pipedream-2bw"])
def test_gradients_alone_rest_elsewhere(
    name: str, tale: Path, world: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    config = settings(tale, parallel={"pipeline": 2}, **SCHEDULES[name])
    config["model"] = {**config["model"], "tie_word_embeddings": False}
    want = run(config, world, backend, tale)
    monkeypatch.setattr(OffloadedParameters, "_large", lambda self, p: True)
    where = "disk" if backend == "numpy" else "host"
    found = run({**config, "offload": {"gradients": where}}, world, backend, tale)
    same(found, want)
    assert found[2] == {"gradients": where}
    told = r"gradients that a reducer shares out .* leave offload\.gradients out, or take zero stage 0"
    with pytest.raises(ConfigError, match=told):
        run({**config, "parallel": {"data": 2}, "schedule": None, "zero": 2, "clip_grad_norm": None,
             "offload": {"gradients": where}}, world, backend, tale)  # fmt: skip


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["parameters", "gradients", "optimizer", "activations"])
def test_a_stage_without_parameters_offloads_none(
    kind: str, seven: Path, folder: Path, world: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stage between the two linear layers of a perceptron is its activation."""
    monkeypatch.setattr(OffloadedParameters, "_large", lambda self, p: True)
    config: dict[str, Any] = {"data": str(seven), "batch_size": 8, "steps": 2, "parallel": {"pipeline": 3}}
    config["model"] = {"hidden": (9,)}
    want = run(config, world, backend, folder)
    where = "disk" if backend == "numpy" else "host"
    same(run({**config, "offload": {kind: where}}, world, backend, folder), want)
