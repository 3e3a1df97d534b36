"""Trainings whose values are gathered during the next forward pass: the bits of those that wait, on every grid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import parlinalg as pla
from parlinalg.parallel import zero
from parlinalg.train import launch
from parlinalg.train.config import parse
from tests.parallel.test_overlap_gather import Latest
from tests.train import checkpoints as cp
from tests.train.trainings import Training

TENSOR = {"size": 2, "mode": "1d"}
UNTIED = {**cp.MODEL, "tie_word_embeddings": False}
CASES: list[tuple[int, dict[str, Any]]] = [
    (2, {"parallel": {"data": 2}, "zero": 1}),
    (2, {"parallel": {"data": 2}, "zero": 2, "precision": "bf16", "dtype": "float32"}),
    (2, {"parallel": {"sequence": 2}, "zero": 2}),
    (2, {"parallel": {"data": 2}, "zero": 1, "optimizer": {"name": "muon"}}),
    (4, {"parallel": {"data": 2, "pipeline": 2}, "zero": 1}),
    (4, {"parallel": {"data": 2, "pipeline": 2}, "zero": 2, "schedule": "zb-v"}),
    (4, {"parallel": {"data": 2, "tensor": TENSOR}, "zero": 1, "optimizer": {"name": "lamb", "lr": 1e-2}}),
    (4, {"parallel": {"data": 2, "pipeline": 2}, "zero": 2, "model": UNTIED, "clip_grad_norm": None,
         "schedule": {"name": "pipedream-2bw", "microbatches": 4}, "gradient_accumulation": 1}),
    (4, {"parallel": {"data": 4}, "zero": {"stage": 1, "within": 2}}),
    (8, {"parallel": {"data": 2, "pipeline": 2, "tensor": TENSOR}, "zero": 1}),
    (8, {"parallel": {"data": 2, "pipeline": 2, "tensor": TENSOR}, "zero": 2}),
]  # fmt: skip


def configured(path: Path, overlap: bool, given: dict[str, Any]) -> dict[str, Any]:
    stage = given["zero"] if isinstance(given["zero"], dict) else {"stage": given["zero"]}
    model = {"model": {**given.get("model", cp.MODEL), "num_hidden_layers": 3}}
    return cp.config(path / "tale.txt", **{**given, **model, "zero": {**stage, "overlap_gather": overlap}})


def trained(world: Any, settings: dict[str, Any], out: Path, backend: str) -> list[Any]:
    """The losses around a checkpoint and an evaluation, and the weights."""
    with launch(settings, world, backend) as mesh:
        training = Training(mesh, out, world)
        found = cp.steps(training, cp.SAVED)
        training.save(cp.SAVED)
        found += cp.steps(training, cp.SAVED + 1)
        found.append(training.held()["loss"])
        found += cp.steps(training, cp.SAVED + 3)
        training.saving.close()
        return [*found, *(w.tobytes() for w in training.model.state_dict().values())]


@pytest.mark.parametrize("given", [pytest.param(g, marks=pytest.mark.ranks(n), id=f"{n}-{g}") for n, g in CASES])
def test_the_bits_of_a_training_that_waits(
    given: dict[str, Any], tale: Path, world: Any, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = trained(world, configured(tale, False, given), tale / "waits", backend)
    late = configured(tale, True, given)
    with monkeypatch.context() as patch:
        patch.setattr(zero, "_gather", Latest)
        assert trained(world, late, tale / "late", backend) == want
        again = cp.gone_on(world, late, tale / "late", backend, 1)
    assert trained(world, late, tale / "overlaps", backend) == want
    plain = configured(tale, False, given)
    assert cp.gone_on(world, plain, tale / "late", backend, 1) == again == want[cp.SAVED : cp.SAVED + 1]


@pytest.mark.serial
def test_the_key_of_a_configuration() -> None:
    assert not parse({"zero": 1}).zero.overlap_gather
    assert parse({"zero": {"stage": 2, "overlap_gather": True}}).zero.overlap_gather
    with pytest.raises(pla.ConfigError, match=r"zero.overlap_gather without a stage: nothing is gathered; add stage=1"):
        parse({"zero": {"overlap_gather": True}})
    with pytest.raises(pla.ConfigError, match=r"zero.overlap_gather"):
        parse({"zero": {"stage": 1, "overlap_gather": "yes"}})
