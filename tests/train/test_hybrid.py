"""Everything at once: data × pipeline × sequence × tensor, ZeRO, precision; a GPT on text as on one rank.

Started as a program, this file is one of the ranks that `test_on_ranks_of_its_own` starts.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.comm import SingleComm
from parlinalg.errors import ConfigError, ParlinalgError
from parlinalg.train import launch
from tests.conftest import BACKEND
from tests.launching import launch as start
from tests.train.conftest import TEXT
from tests.train.trainings import Training, main

CLOSE = 1e-12
BASE: dict[str, Any] = {
    "dtype": "float64",
    "batch_size": 8,
    "steps": 3,
    "gradient_accumulation": 4,
    "optimizer": {"name": "adamw", "lr": 5e-3},
    "lr_schedule": {"name": "cosine", "warmup": 2},
    "clip_grad_norm": 0.5,
    "model": {
        "name": "gpt", "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 22,
        "embd_pdrop": 0.1, "attn_pdrop": 0.1, "resid_pdrop": 0.1, "max_position_embeddings": 11,
    },
}  # fmt: skip
GRID: dict[str, Any] = {"size": 4, "mode": "2d"}
HYBRIDS: list[tuple[int, dict[str, Any]]] = [
    (2, {"parallel": {"pipeline": 2}}),
    (3, {"parallel": {"pipeline": {"tensor": [{"size": 1}, {"size": 2, "mode": "1d"}]}}}),
    (2, {"parallel": {"pipeline": 2}, "offload": {"optimizer": "disk", "parameters": "disk"}}),
    (
        4,
        {
            "parallel": {"data": 2, "pipeline": 2},
            "zero": 1,
            "schedule": {"name": "zb-v"},
            "offload": {"optimizer": "disk"},
        },
    ),
    (4, {"parallel": {"pipeline": 2, "sequence": 2}, "schedule": "zb-h1"}),
    (4, {"parallel": {"pipeline": 2, "sequence": 2}, "zero": 3}),
    (4, {"parallel": {"pipeline": 2, "sequence": {"size": 2, "ulysses": 2}}, "zero": 2, "schedule": "zb-v"}),
    (6, {"parallel": {"pipeline": {"size": 3, "partition": [1, 3, 1]}, "tensor": {"size": 2, "mode": "1d"}}}),
    (8, {"parallel": {"pipeline": 2, "tensor": GRID}}),
]
OWN: dict[int, dict[str, Any]] = {
    2: {"parallel": {"pipeline": 2}, "schedule": "zb-h1"},
    16: {"parallel": {"data": 2, "pipeline": 2, "tensor": GRID}, "zero": 1},
}


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    path = folder / "tale.txt"
    return {**BASE, "data": {"name": "text", "path": str(path), "sequence_length": 7, "validation": 0.15}, **more}


def trained(comm: Any, config: dict[str, Any], backend: str, out: Path) -> tuple[list[float], str]:
    """Losses and norms of the steps, the loss of the validation, and a text that the model writes."""
    with launch(config, comm, backend) as mesh:
        training = Training(mesh, out)
        with training.away():
            found = [number for step in training.steps() for number in (step.loss, step.norm)]
            return [*found, training.held()["loss"]], training.write("It was", 4, top_k=9, seed=3)


_known: dict[str, tuple[list[float], str]] = {}


def serial(folder: Path, **more: Any) -> tuple[list[float], str]:
    key = repr(more)
    if key not in _known:
        _known[key] = trained(SingleComm(), settings(folder, **more), "numpy", folder)
    return _known[key]


@pytest.mark.parametrize(
    "given", [pytest.param(given, marks=pytest.mark.ranks(n), id=f"{n}-{given}") for n, given in HYBRIDS]
)
def test_losses_and_texts_equal_those_of_one_rank(
    given: dict[str, Any], tale: Path, world: Any, backend: str
) -> None:  # fmt: skip
    found, text = trained(world, settings(tale, **given), backend, tale)
    want, words = serial(tale)
    assert want[-3] < want[0]
    np.testing.assert_allclose(found, want, rtol=CLOSE)
    assert text == words


@pytest.mark.serial
@pytest.mark.timeout(300)
def test_on_ranks_of_its_own(full: bool, tmp_path: Path) -> None:
    """With --full data 2 × pipeline 2 × 2D 2×2, on cores that 16 ranks share; else a pipeline of 2."""
    (tmp_path / "tale.txt").write_text(TEXT)
    done = start(16 if full else 2, [__file__, str(tmp_path)], timeout=290, env={"PARLINALG_TIMEOUT": "280"})
    assert done.returncode == 0, done.stderr[-4000:]
    found, text = json.loads((tmp_path / "found.json").read_text())
    want, words = serial(tmp_path)
    np.testing.assert_allclose(found, want, rtol=CLOSE)
    assert text == words


@pytest.mark.ranks(4)
def test_experts_over_two_axes(tale: Path, world: Any, backend: str) -> None:
    model = {**BASE["model"], "num_local_experts": 3}
    cut = {**model, "expert_axis": ["data", "s"]}
    found, _ = trained(world, settings(tale, parallel={"data": 2, "sequence": 2}, model=cut), backend, tale)
    np.testing.assert_allclose(found, serial(tale, model=model)[0], rtol=CLOSE)


@pytest.mark.ranks(8)
@pytest.mark.parametrize(("zero", "schedule"), [(0, "1f1b"), (1, "zb-v"), (2, "interleaved"), (3, "zb-h1")])
def test_experts_over_groups_of_data_ranks(zero: int, schedule: str, tale: Path, world: Any, backend: str) -> None:
    model = {**BASE["model"], "num_local_experts": 3, "shared_expert_intermediate_size": 7}
    given = {"parallel": {"data": 4, "pipeline": 2, "experts": 2}, "zero": zero, "schedule": {"name": schedule}}
    found, _ = trained(world, settings(tale, **given, model=model), backend, tale)
    np.testing.assert_allclose(found, serial(tale, model=model)[0], rtol=CLOSE)


@pytest.mark.ranks(3)
def test_a_model_that_one_stage_cannot_have_is_refused_on_all_ranks(tale: Path, world: Any, backend: str) -> None:
    """The grid of the second rank of the pipeline has no axis "t"."""
    each = {"tensor": [{"size": 2, "mode": "1d"}, {"size": 1}]}
    model = {**BASE["model"], "num_local_experts": 3, "expert_axis": "t"}
    told = "rank 2, declaring the model: .*expert_axis='t', but the grid has the axes {'data': 1}: give one of these"
    with pytest.raises(ConfigError, match=told):
        trained(world, settings(tale, parallel={"pipeline": each}, model=model), backend, tale)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("precision", "zero"), [("bf16", 2), ("fp16", 3)][BACKEND != "numpy" :])
def test_lower_precision(precision: str, zero: int, tale: Path, world: Any, backend: str) -> None:
    """The losses of one rank but for the rounding of 16 bits."""
    more = {"precision": precision, "dtype": "float32", "schedule": {"name": "1f1b"}, "steps": 2}
    given = {"parallel": {"data": 2, "pipeline": 2}, "zero": zero}
    found, _ = trained(world, settings(tale, **given, **more), backend, tale)
    want, _ = serial(tale, **{k: v for k, v in more.items() if k != "schedule"})
    np.testing.assert_allclose(found[::2], want[::2], rtol=1e-2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_asynchronous_schedules_learn(name: str, tale: Path, world: Any, backend: str) -> None:
    model = {**BASE["model"], "tie_word_embeddings": False}
    more = {"parallel": {"pipeline": 2}, "schedule": {"name": name}, "model": model, "steps": 8}
    with pytest.raises(ConfigError, match=f"clip_grad_norm with the schedule '{name}': its stages make their steps"):
        trained(world, settings(tale, **more), backend, tale)
    found, _ = trained(world, settings(tale, **more, clip_grad_norm=None), backend, tale)
    assert found[-1] < 0.9 * found[0]
    assert np.isnan(found[1])  # there is no norm of the whole model's gradient


@pytest.mark.ranks(2)
def test_the_main_job(tale: Path, world: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """`parlinalg train`: metrics on all of the model, a sample through the pipeline, classifiers too."""
    sample = {"prompt": "It", "max_new_tokens": 7}
    config = settings(tale, parallel={"pipeline": 2}, sample=sample, validate_every=2)
    assert main(config, tale / "text", comm=world) == 0
    digits = {"data": "digits", "parallel": {"pipeline": 2}, "steps": 2, "schedule": {"microbatches": 4}}
    assert main(digits, tale / "digits", comm=world) == 0
    world.barrier()
    told = [json.loads(line) for line in (tale / "text" / "metrics.jsonl").read_text().splitlines()]
    want, _ = serial(tale)
    np.testing.assert_allclose([t["loss"] for t in told], want[0:-1:2], rtol=CLOSE)
    np.testing.assert_allclose(told[-1]["validation_loss"], want[-1], rtol=CLOSE)
    assert all(0 < t["mfu"] < 1 and t["tokens_per_s"] > 0 for t in told)
    assert (tale / "text" / "sample.txt").read_text().startswith("It")
    told = [json.loads(line) for line in (tale / "digits" / "metrics.jsonl").read_text().splitlines()]
    assert 0 <= told[-1]["test_accuracy"] <= 1
    if world.rank == 0:
        assert "in 4 microbatches" in capsys.readouterr().out


@cache
def forms() -> list[tuple[dict[str, Any], dict[str, int]]]:
    """The forms of a configuration on 4 ranks, and the sizes that they mean."""
    pipeline = {"pipeline": 2, "data": 2, "tensor": 1, "sequence": 1}
    return [
        ({"parallel": {"pipeline": 2}}, pipeline),
        ({"parallel": {"pipeline": {"size": 2}, "tensor": 1}}, pipeline),
        ({"parallel": {"data": 2, "pipeline": {"size": 2}, "sequence": {"size": 1, "ulysses": 1}}}, pipeline),
        ({"parallel": {"pipeline": 2, "tensor": {"size": 1, "mode": "2d"}}}, pipeline),
        ({"parallel": {"pipeline": 2, "sequence": {"size": 2, "ulysses": 2}}}, {"pipeline": 2, "sequence": 2}),
        ({"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "sequence"}}}, {"pipeline": 2, "sequence": 2}),
        ({"parallel": {"pipeline": 2, "tensor": {"mode": "2d", "shape": (1, 2)}}}, {"pipeline": 2, "tensor": 2}),
        ({"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "2.5d", "shape": (2, 1, 1)}}}, {"tensor": 2}),
        ({"parallel": {"pipeline": 2}, "gradient_handler": [{"type": "DataParallel"}], "zero": {"stage": 0}}, pipeline),
        ({"parallel": {"pipeline": 2}, "zero": {"stage": 1}}, pipeline),
        ({"parallel": {"pipeline": 4}, "schedule": {"name": "1f1b", "microbatches": 4}}, {"pipeline": 4}),
        ({"parallel": {"pipeline": 2}, "schedule": {"name": "interleaved", "chunks": 2}}, pipeline),
    ]


@pytest.mark.ranks(4)
def test_forms_of_the_configuration(world: Any, backend: str) -> None:
    """Each trains, and gives the loss of one rank."""
    x, y = np.random.default_rng(0).normal(size=(8, 5, 7)), np.arange(40).reshape(8, 5) % 3

    def losses(config: dict[str, Any], comm: Any) -> list[Any]:
        config = {"dtype": "float64", "clip_grad_norm": 0.1, **config}
        with pla.launch(config, comm, backend if comm is world else "numpy") as mesh:
            for name, size in (sizes if comm is world else {}).items():
                assert mesh.size(name) == size
                assert 0 <= mesh.rank(name) < size
            model = pla.nn.MLP((7, 6, 5, 3), mesh.scheme, mesh.grid, dtype=np.float64)
            engine, train, _, _ = pla.initialize(model, train_dataloader=[(x, y)] * 2)
            assert engine.schedule is not None
            found = []
            data_iter = iter(train)
            for _ in range(2):
                found.append(engine.schedule.forward_backward_step(engine, data_iter)[2])
                engine.step()
            return found

    sizes: dict[str, int] = {}
    want = losses({}, SingleComm())
    for config, sizes in forms() if BACKEND == "numpy" else forms()[-2:]:
        np.testing.assert_allclose(losses(config, world), want, rtol=CLOSE, err_msg=repr(config))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"parallel": {"pipeline": 3}}, r"does not divide the 4 ranks"),
    ({"parallel": {"pipeline": 2}, "schedule": {"name": "1f2b"}}, r"schedule.name must be one of '1f1b'"),
    (
        {"parallel": {"pipeline": 2}, "schedule": {"name": "interleaved", "microbatches": 3}},
        r"interleaved over 2 ranks with microbatches=3: it takes multiples of 2",
    ),
    ({"parallel": {"pipeline": 2}, "schedule": {"name": "1f1b", "chunks": 2}}, r"1f1b with chunks=2"),
    ({"schedule": "pipedream"}, r"steps within a batch, and a pipeline of one rank does not"),
    (
        {"parallel": {"pipeline": {"size": 2, "partition": [1, 2, 3]}}},
        r"partition=\[1, 2, 3\] has 3 numbers, but the schedule '1f1b' has 2 stages",
    ),
    ({"parallel": {"pipeline": 4}}, r"a pipeline of 4 stages needs as many layers, but the model has 3"),
    ({"pipeline": 2}, r"write it inside parallel=dict\(pipeline=…\)"),
]


@pytest.mark.ranks(4)
def test_wrong_forms_are_told(world: Any, backend: str) -> None:
    for config, why in WRONG:
        with pytest.raises(ParlinalgError, match=why), pla.launch(config, world, backend) as mesh:
            pla.initialize(pla.nn.MLP((7, 3, 3), mesh.scheme, mesh.grid))


if __name__ == "__main__":  # one of the ranks
    from parlinalg.comm import open_comm

    everyone = open_comm()
    folder_given = Path(sys.argv[1])
    result = trained(everyone, settings(folder_given, **OWN[everyone.size]), "numpy", folder_given)
    if everyone.rank == 0:
        (folder_given / "found.json").write_text(json.dumps(result))
