"""Ten steps of a GPT with Muon, Shampoo and SOAP equal those of their papers' formulas in NumPy, on every mesh."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg.comm import SingleComm
from parlinalg.optim.matrices import split_of
from parlinalg.train import launch
from tests.agreement import once
from tests.optim.test_muon import TEXT, textbook_muon
from tests.optim.test_optimizers import textbook_adamw
from tests.optim.test_preconditioned import textbook_blocks, textbook_soap
from tests.train.trainings import Training

pytestmark = [pytest.mark.timeout(120), pytest.mark.one_in(8)]

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "muon": {"lr": 0.02, "weight_decay": 0.01, "adamw_lr": 3e-3},
    "shampoo": {"lr": 0.05, "precondition_frequency": 3, "block_size": 20, "grafting": "adam", "adamw_lr": 3e-3},
    "soap": {"lr": 3e-3, "precondition_frequency": 3, "max_precond_dim": 30},
}
BASE: dict[str, Any] = {
    "dtype": "float64", "batch_size": 8, "steps": 10, "clip_grad_norm": 1.0,
    "model": {
        "name": "gpt", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 22,
        "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "max_position_embeddings": 9,
    },
}  # fmt: skip


def tensor(mode: str, **more: Any) -> dict[str, Any]:
    return {"parallel": {"tensor": {"mode": mode, **more}}}


MESHES: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, tensor("1d", size=2)),
    (2, {"parallel": {"data": 2}, "zero": 3}),
    (2, {"parallel": {"pipeline": 2}, "schedule": {"name": "1f1b", "microbatches": 2}}),
    (2, {"parallel": {"pipeline": 2}, "offload": {"optimizer": "disk"}}),
    (4, {"parallel": {"data": 2, "tensor": {"size": 2, "mode": "1d"}}, "zero": 1, "offload": {"optimizer": "disk"}}),
    (4, tensor("2d", shape=(2, 2))),
    (4, tensor("2.5d", shape=(2, 2, 1))),
    (4, tensor("2.5d", shape=(2, 1, 2), depth_on="k")),
    (4, tensor("3d", shape=(1, 2, 2))),
    (4, tensor("3d", shape=(2, 2, 1))),
    (4, {"parallel": {"data": 4}, "zero": 1}),
    (4, {"parallel": {"data": 4}, "zero": 2}),
    (4, {"parallel": {"data": 4}, "zero": 3}),
    (4, {"parallel": {"data": 2, "tensor": {"size": 2, "mode": "1d"}}, "zero": 3}),
    (4, {"parallel": {"data": 2, "pipeline": 2}, "zero": 2, "schedule": {"name": "1f1b", "microbatches": 2}}),
    (4, {"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, "schedule": {"name": "zb-h1"}}),
    (6, tensor("3d", shape=(1, 3, 2))),
    (8, tensor("3d", shape=(2, 2, 2))),
    (8, tensor("2.5d", shape=(2, 2, 2))),
    (8, {"parallel": {"data": 2, "tensor": {"mode": "2d", "shape": (2, 2)}}, "zero": 3}),
]


def textbook(p: Any, start: np.ndarray, grads: list[np.ndarray], group: dict[str, Any], name: str) -> np.ndarray:
    """The value of a parameter after as many steps as there are gradients."""
    decay, betas, eps = group["weight_decay"], group["betas"], group["eps"]
    if not group["matrices"]:
        return textbook_adamw(start, grads, group["lr"], weight_decay=decay, betas=betas, eps=eps)
    if name == "muon":
        return textbook_muon(start, grads, split_of(p), lr=group["lr"], weight_decay=decay)
    batch, inputs = split_of(p)
    shape = start.shape
    flat = (-1, math.prod(shape[batch : batch + inputs]), math.prod(shape[batch + inputs :]))
    every, most = group["precondition_frequency"], group["max_precond_dim"]
    found = []
    for one, *theirs in zip(*(v.reshape(flat) for v in (start, *grads)), strict=True):
        if name == "shampoo":
            options = {"size": group["block_size"], "grafting": group["grafting"], "every": every}
            found.append(textbook_blocks(one, theirs, group["lr"], **options))
        else:
            found.append(textbook_soap(one, theirs, group["lr"], every=every, most=most))
    return np.stack(found).reshape(shape)


def losses(comm: Any, settings: dict[str, Any], backend: str, out: Path, reference: bool = False) -> list[float]:
    """The losses and norms of all steps; of a reference values are what the formulas make of all gradients so far."""
    with launch(settings, comm, backend) as mesh:
        training = Training(mesh, out)
        if training.offload is not None and backend == "numpy":
            assert training.offload.places["optimizer"] == "disk"
        if reference:
            optimizer, name = training.optimizer, settings["optimizer"]["name"]
            groups = [(p, group) for group in optimizer.param_groups for p in group["params"]]
            starts, grads = [p.gather() for p, _ in groups], [[] for _ in groups]

            def apply() -> None:
                for (p, group), start, given in zip(groups, starts, grads, strict=True):
                    given.append(p.grad.gather() * optimizer.factor)
                    p.block[...] = textbook(p, start, given, group, name)
                    p.written()

            optimizer.apply = apply
        with training.away():
            return [number for step in training.steps() for number in (step.loss, step.norm)]


_known: dict[str, list[float]] = {}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "given", [pytest.param(given, marks=pytest.mark.ranks(n), id=f"{n}-{given}") for n, given in MESHES]
)
def test_ten_steps(name: str, given: dict[str, Any], world: Any, folder: Path, backend: str) -> None:
    path = folder / "tale.txt"
    if world.rank == 0:
        path.write_text(TEXT * 2)
    world.barrier()
    data = {"name": "text", "path": str(path), "sequence_length": 7, "validation": 0.15}
    settings = {**BASE, "data": data, "optimizer": {"name": name, **OPTIMIZERS[name]}}
    if name not in _known:
        _known[name] = once(lambda: losses(SingleComm(), settings, "numpy", folder / "alone", reference=True))
    found = losses(world, {**settings, **given}, backend, folder)
    assert _known[name][-2] < 0.95 * _known[name][0]
    np.testing.assert_allclose(found, _known[name], rtol=1e-10)
