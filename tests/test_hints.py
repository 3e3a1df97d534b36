"""What other libraries' names and keys are here: told where they are asked for, and right."""

from __future__ import annotations

import importlib
import re
from dataclasses import fields
from typing import Any

import pytest

import parlinalg as pla
from parlinalg import hints
from parlinalg.errors import ConfigError
from parlinalg.train import TrainingConfig, choices, resolve
from parlinalg.train.config import ParallelConfig, TensorConfig

pytestmark = pytest.mark.serial

PACKAGES = ("", ".nn", ".optim", ".parallel", ".pipeline", ".train", ".datasets", ".autograd.ops")


@pytest.mark.parametrize("package", PACKAGES)
def test_names_of_other_libraries(package: str) -> None:
    module = importlib.import_module(f"parlinalg{package}")
    for name in hints.NAMES:
        if not hasattr(module, name):
            with pytest.raises(AttributeError, match=re.escape(f"has no {name!r}; here it is {hints.NAMES[name]}")):
                getattr(module, name)
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing_of_the_kind'$"):
        module.nothing_of_the_kind
    assert not hasattr(module, "__wrapped__")


def test_imports_of_other_names() -> None:
    with pytest.raises(ImportError, match=r"parlinalg\.nn has no 'Linear1D_Col'; here it is nn.Linear"):
        exec("from parlinalg.nn import Linear1D_Col")
    with pytest.raises(ImportError, match=r"here it is the mesh that pla\.launch"):
        exec("from parlinalg import Grid, gpc")
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        exec("from parlinalg.nn import Nothing")
    exec("from parlinalg.train import checkpoint, hooks")  # modules, whatever others call so
    with pytest.raises(AttributeError, match="did you mean 'Linear'"):
        pla.nn.Linaer  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ({"NUM_MICRO_BATCHES": 4}, "schedule=dict(name="),
        ({"BATCH_SIZE": 4}, "here it is batch_size, of all ranks together"),
        ({"fp16": {"mode": "torch"}}, 'here it is precision="fp16"'),
        ({"zero": {"model_config": {}}}, "zero has an unknown key 'model_config': here it is zero=dict(stage=3)"),
        ({"parallel": {"tensor_model_parallel_size": 2}}, 'parallel=dict(tensor=dict(size=…, mode="1d"))'),
        ({"parallel": {"expert_model_parallel_size": 8}}, "parallel=dict(experts=…), of the data parallel ranks"),
        (
            {"model": {"name": "llama", "n_shared_experts": 2}},
            "model=dict(shared_expert_intermediate_size=…), the common width of all shared experts",
        ),
        ({"train_micro_batch_size_per_gpu": 2}, "batch_size is that of a whole step"),
        ({"batchsize": 3}, "did you mean 'batch_size'?"),
    ],
)
def test_keys_of_other_libraries(given: dict[str, Any], right: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(right)):
        resolve(given, 4)


def test_a_configuration_of_others_as_far_as_it_is_ours() -> None:
    given = {
        "parallel": {"pipeline": {"size": 1}, "tensor": {"size": 4, "mode": "2.5d", "depth": 1}},
        "gradient_accumulation": 4, "clip_grad_norm": 1.0,
    }  # fmt: skip
    assert resolve(given, 4).mode == "2.5d"


def test_what_is_named_exists() -> None:
    """Every `pla.…` and `nn.…` of the tables; every key of a configuration at the head of a hint, with its own keys."""
    for text in [*hints.NAMES.values(), *hints.KEYS.values()]:
        for dotted in re.findall(r"\bpla\.([\w.]+)|\b(nn\.\w+)", text):
            found: Any = pla
            for part in (dotted[0] or dotted[1]).rstrip(".").split("."):
                found = getattr(found, part)
    inner = {
        k
        for t in (choices.DATASETS, choices.MODELS, choices.OPTIMIZERS, choices.LR_SCHEDULES)
        for kind in t.values()
        for k in kind.options
    }
    more = {
        "name",
        "size",
        "stage",
        "dtype",
        "loss_scale",
        "microbatches",
        "chunks",
        "every",
        "optimizer",
        "parameters",
        "start",
    }
    keys = {f.name for f in fields(TrainingConfig)}
    known = keys.union(inner, more, (f.name for section in (ParallelConfig, TensorConfig) for f in fields(section)))
    for text in hints.KEYS.values():
        assert set(re.findall(r"(\w+)=", text)) <= known, text
    for key in hints.KEYS:
        assert key not in keys
