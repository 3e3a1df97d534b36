"""Configurations: what is refused, and that the message says what would be right."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg.errors import ConfigError
from parlinalg.parallel import DataParallel
from parlinalg.train import TrainingConfig, config, resolve
from parlinalg.train.config import (
    Choice,
    LossScaleConfig,
    OffloadConfig,
    PrecisionConfig,
    ScheduleConfig,
    ZeroConfig,
    examples,
    load,
    parse,
)
from parlinalg.train.schema import Section, Short, documentation, integer, key, override, text

pytestmark = pytest.mark.serial


def refused(call: Any, *parts: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), f"{part!r} is missing in: {caught.value}"


SHARED = [
    (None, 4, {"data": 4}, "data × serial"),
    ({"tensor": 1}, 3, {"data": 3}, "data × serial"),
    ({"tensor": {"size": 1, "mode": "2d"}}, 1, {"r": 1, "c": 1}, "2d"),
    ({"data": {"size": 1}, "pipeline": 1, "sequence": {"size": 1, "ulysses": 1}}, 1, {"data": 1}, "data × serial"),
    ({"tensor": {"size": 4, "mode": "1d"}}, 4, {"t": 4}, "1d"),
    ({"tensor": {"mode": "1d", "sequence_parallel": True}}, 4, {"t": 4}, "1d with sequence cuts"),
    ({"tensor": {"size": 4, "mode": "1d", "sequence_parallel": False}}, 4, {"t": 4}, "1d"),
    ({"tensor": {"size": 4, "mode": "2d"}}, 8, {"data": 2, "r": 2, "c": 2}, "data × 2d"),
    ({"tensor": {"mode": "2d", "shape": (1, 3)}}, 3, {"r": 1, "c": 3}, "2d"),
    ({"tensor": {"mode": "2d", "shape": [1, 3]}}, 6, {"data": 2, "r": 1, "c": 3}, "data × 2d"),
    ({"tensor": {"mode": "2d"}}, 6, {"r": 2, "c": 3}, "2d"),
    ({"data": 4, "tensor": {"mode": "2d"}}, 4, {"data": 4, "r": 1, "c": 1}, "data × 2d"),
    ({"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}, 8, {"d": 2, "r": 2, "c": 2}, "2.5d, depth on the batch"),
    ({"tensor": {"mode": "2.5d", "depth": 2, "depth_on": "k"}}, 8, {"d": 2, "r": 2, "c": 2}, "2.5d, depth on k"),
    ({"tensor": {"mode": "2.5d", "shape": (3, 1, 2)}}, 6, {"d": 3, "r": 1, "c": 2}, "2.5d, depth on the batch"),
    ({"tensor": {"mode": "3d", "shape": (1, 2, 3)}}, 6, {"i": 1, "j": 2, "l": 3}, "3d"),
    ({"tensor": {"size": 8, "mode": "3d"}}, 8, {"i": 2, "j": 2, "l": 2}, "3d"),
    ({"sequence": 4}, 4, {"s": 4}, "s × serial"),
    ({"tensor": {"mode": "sequence"}}, 4, {"s": 4}, "sequence"),
    ({"sequence": {"size": 4, "ulysses": 4}}, 4, {"u": 4}, "u × serial"),
    ({"sequence": {"size": 4, "ulysses": 2}}, 8, {"data": 2, "s": 2, "u": 2}, "data × s × u × serial"),
    ({"data": 1, "sequence": 2, "tensor": {"mode": "2d"}}, 8, {"s": 2, "r": 2, "c": 2}, "s × 2d"),
    ({"pipeline": 2}, 4, {"data": 2}, "data × serial"),
    ({"pipeline": {"size": 2}, "tensor": {"mode": "1d"}}, 8, {"t": 4}, "1d"),
    (
        {"data": 2, "pipeline": {"size": 2}, "sequence": {"size": 2, "ulysses": 1}, "tensor": {"mode": "2d"}},
        32, {"data": 2, "s": 2, "r": 2, "c": 2}, "data × s × 2d",
    ),
    ({"pipeline": {"tensor": [{"size": 2, "mode": "1d"}] * 2}}, 4, {"t": 2}, "1d"),
]  # fmt: skip


@pytest.mark.parametrize(("parallel", "ranks", "axes", "scheme"), SHARED)
def test_ranks_are_shared_out(parallel: Any, ranks: int, axes: dict[str, int], scheme: str) -> None:
    found = resolve({"parallel": parallel}, ranks)
    assert (found.axes, found.scheme.name) == (axes, scheme)
    assert found.data * found.pipeline * found.sequence * found.tensor == ranks
    assert set(found.scheme.axes) == set(found.axes)


WRONG_SHARES = [
    ({"tensor": 4}, 4, ("no mode", "4 ranks allow the modes '1d'", "'2d'", "'3d' (with a shape")),
    ({"tensor": 4}, 1, ("no mode",)),
    ({"tensor": 6}, 6, ("'2d' (with a shape: (1, 6), (2, 3), (3, 2) or (6, 1))",)),
    ({"tensor": {"size": 6, "mode": "2d"}}, 6, ("needs a shape: (1, 6), (2, 3), (3, 2) or (6, 1)",)),
    ({"tensor": {"size": 4, "mode": "2.5d"}}, 4, ("needs a depth: 1 or 4",)),
    ({"tensor": {"size": 4, "mode": "2d", "shape": (4, 4)}}, 4, ("(4, 4)", "(2, 2)")),
    ({"tensor": {"size": 4, "mode": "4d"}}, 4, ("parallel.tensor.mode", "'2.5d'", "not '4d'")),
    ({"tensor": {"mode": "2d", "depth": 2}}, 4, ("depth=2 is for mode '2.5d'",)),
    ({"tensor": {"mode": "2d", "sequence_parallel": True}}, 4, ("sequence_parallel=True", "leave it out")),
    ({"tensor": {"shape": (1, 1)}}, 1, ("shape", "needs a mode")),
    ({"tensor": {"sequence_parallel": True}}, 1, ("needs mode='1d'",)),
    ({"tensor": {"siez": 4}}, 4, ("parallel.tensor", "'siez'", "did you mean 'size'", "depth_on")),
    ({"tensr": 4}, 4, ("parallel", "'tensr'", "did you mean 'tensor'", "data, pipeline, sequence, tensor")),
    ({"data": {"sise": 4}}, 4, ("parallel.data", "did you mean 'size'")),
    ({"data": 3}, 4, ("there are 4 ranks", "use data=4 or leave it out", "mpiexec -n 3")),
    ({"data": 2, "tensor": {"size": 4, "mode": "1d"}}, 4, ("2 × 1 × 4 = 8", "4 ranks", "use data=1")),
    ({"tensor": {"size": 3, "mode": "1d"}}, 4, ("does not divide the 4 ranks", "1, 2 or 4")),
    ({"data": 0}, 1, ("parallel.data.size", "at least 1", "0")),
    ({"data": True}, 1, ("parallel.data", "True")),
    ({"experts": 3}, 4, ("parallel.experts=3 does not divide the 4 data parallel ranks", "1, 2 or 4")),
    ({"experts": 4, "pipeline": 2}, 4, ("parallel.experts=4 does not divide the 2 data parallel ranks", "1 or 2")),
    ({"experts": 0}, 4, ("parallel.experts", "at least 1", "0")),
    ({"tensor": "4"}, 4, ("parallel.tensor", "'4'")),
    ({"pipeline": 2}, 3, ("pipeline × sequence × tensor = 2 does not divide the 3 ranks", "mpiexec -n 2")),
    ({"pipeline": {"size": 2, "partion": "time"}}, 2, ("parallel.pipeline", "did you mean 'partition'", "tensor")),
    ({"pipeline": {"size": 0}}, 2, ("parallel.pipeline.size", "at least 1")),
    (
        {"pipeline": {"size": 2, "partition": "even"}},
        2,
        ("pipeline.partition", "'uniform', 'parameters', 'flops' or 'time'"),
    ),
    ({"pipeline": {"size": 2, "partition": 3}}, 2, ("pipeline.partition", "a list of the layers of each stage", "3")),
    ({"pipeline": {"size": 2, "partition": [3, -1]}}, 2, ("pipeline.partition[1]", "at least 0", "-1")),
    ({"pipeline": {"partition": [3, 4]}}, 2, ("partition=[3, 4]", "the pipeline has one rank", "size=2")),
    ({"pipeline": {"size": 3, "tensor": [1, 1]}}, 2, ("lists 2 grids for a pipeline of 3 ranks", "give 3")),
    ({"pipeline": {"tensor": [1, 2]}}, 3, ("parallel.pipeline.tensor[1] has size 2 but no mode",)),
    ({"pipeline": {"tensor": [1, {"mode": "1d"}]}}, 3, ("pipeline.tensor[1] needs a size or a shape",)),
    ({"pipeline": {"tensor": [1, {"mode": "sequence", "size": 2}]}}, 3, ("pipeline.tensor[1].mode='sequence'",)),
    ({"pipeline": {"tensor": {"size": 2}}}, 2, ("pipeline.tensor must be a list",)),
    ({"pipeline": {"tensor": [1, 1]}, "tensor": 1}, 2, ("parallel.tensor and parallel.pipeline.tensor", "give one")),
    ({"data": 2, "pipeline": {"tensor": [1, {"mode": "1d", "size": 2}]}}, 3, ("1 × (1 + 2) = 3", "mpiexec -n 6")),
    ({"sequence": {"size": 12, "ulysses": 5}}, 12, ("ulysses=5 does not divide", "size=12", "1, 2, 3, 4, 6 or 12")),
    ({"sequence": {"ulysses": 2}}, 2, ("ulysses=2", "give size too, as in sequence=dict(size=2, ulysses=2)")),
    ({"sequence": {"size": 2, "order": "zebra"}}, 2, ("parallel.sequence.order", "'striped'", "'zebra'")),
    ({"sequence": 2, "tensor": {"mode": "sequence"}}, 4, ("the short form of parallel.sequence", "alone")),
    ({"sequence": 3}, 4, ("does not divide the 4 ranks", "multiple of 3 ranks")),
    ([4], 4, ("parallel must be a dict",)),
]


@pytest.mark.parametrize(("parallel", "ranks", "parts"), WRONG_SHARES)
def test_wrong_shares_say_what_would_be_right(parallel: Any, ranks: int, parts: tuple[str, ...]) -> None:
    refused(lambda: resolve({"parallel": parallel}, ranks), *parts)


WRONG = [
    ({"modle": {}}, ("unknown key 'modle'", "did you mean 'model'", "optimizer")),
    ({"xyzzy": 1}, ("unknown key 'xyzzy'", "The known ones are parallel")),
    ({"tensor": 2}, ("parallel=dict(tensor=…)",)),
    ({"model": {"name": "mlp", "hiden": 3}}, ("model (mlp)", "did you mean 'hidden'")),
    ({"model": {"name": "mlpp"}}, ("model.name", "'mlp'")),
    ({"model": {"hidden": (3, 0)}}, ("model.hidden[1]", "at least 1", "0")),
    ({"model": {"dropout": 1.0}}, ("model.dropout", "below 1")),
    ({"optimizer": "adamx"}, ("optimizer.name", "'adamw', 'lamb', 'lars', 'muon', 'shampoo', 'soap' or 'sgd'")),
    ({"optimizer": {"name": "adamw", "momentum": 0.9}}, ("optimizer (adamw)", "'momentum'", "betas")),
    ({"optimizer": {"lr": float("nan")}}, ("optimizer.lr", "nan")),
    ({"optimizer": {"lr": -1}}, ("optimizer.lr", "at least 0")),
    ({"lr_schedule": {"warmup": 3}}, ("lr_schedule needs a name", "'cosine'")),
    ({"data": {"name": "npz"}}, ("needs a path",)),
    ({"data": {"name": "digits", "test": 0}}, ("data.test", "above 0")),
    ({"data": 2}, ("data must be a dict",)),
    ({"dtype": "int8"}, ("dtype", "'bfloat16' or 'float16'")),
    ({"backend": "torch"}, ("backend", "'numpy'")),
    ({"batch_size": 0}, ("batch_size", "at least 1")),
    ({"sample": {"prompt": "It \ud83d"}}, ("sample.prompt", "UTF-8", r"'It \ud83d'", "surrogate")),
    ({"batch_size": 1.5}, ("batch_size", "whole number")),
    ({"steps": 0}, ("steps", "at least 1")),
    ({"zero": {"stage": 4}}, ("zero.stage", "3 (parameters too)", "4")),
    ({"zero": {"stge": 1}}, ("zero", "did you mean 'stage'")),
    ({"zero": {"stage": 2, "within": 0}}, ("zero.within", "at least 1")),
    ({"parallel": {"experts": 2}, "model": "gpt"}, ("parallel.experts=2", "the model has none", "num_local_experts=…")),
    (
        {"parallel": {"experts": 4}, "model": {"name": "llama", "num_local_experts": 3}},
        ("parallel.experts=4 data parallel ranks for 3 experts leaves ranks without one", "at most 3"),
    ),
    (
        {"parallel": {"experts": 2}, "model": {"name": "gpt", "num_local_experts": 3, "expert_axis": "s"}},
        ("parallel.experts=2", "expert_axis='s' does not", "leave one of them out"),
    ),
    ({"zero": {"stage": 2, "accumulate": "all"}}, ("zero.accumulate", "'reduce-scatter' or 'whole'")),
    ({"precision": "int8"}, ("precision.dtype", "'bf16', 'fp16'", "'int8'")),
    ({"precision": {"dtype": "fp16", "loss_scale": "big"}}, ("precision.loss_scale", "'dynamic'", "'big'")),
    ({"precision": {"dtype": "fp16", "loss_scale": {"strat": 1}}}, ("did you mean 'start'",)),
    ({"precision": {"communicate": "int8"}}, ("precision.communicate", "'bfloat16'")),
    ({"precision": "fp16", "dtype": "bfloat16"}, ("dtype='bfloat16'", "give dtype='float32' or 'float64'")),
    ({"clip_grad_norm": 1.0, "clip_grad_value": 1.0}, ("clip_grad_value=1.0", "give one of them")),
    ({"clip_grad_value": 0}, ("clip_grad_value", "above 0")),
    ({"skip_nonfinite": 1}, ("skip_nonfinite", "True or False")),
    ({"schedule": {"name": "pipedream"}}, ("schedule='pipedream' steps within a batch", "leave the schedule out")),
    ({"schedule": "pipedream", "parallel": {"pipeline": {"size": 1}}}, ("schedule='pipedream' steps within a batch",)),
    ({"schedule": "1b1f"}, ("schedule.name", "'1f1b'", "'zb-v'", "not '1b1f'")),
    ({"schedule": {"nam": "1f1b"}}, ("schedule", "did you mean 'name'", "microbatches")),
    ({"schedule": 3}, ("schedule must be a dict",)),
    ({"schedule": {"microbatches": 0}}, ("schedule.microbatches", "at least 1", "0")),
    (
        {"parallel": {"pipeline": 2}, "schedule": {"microbatches": 4}, "gradient_accumulation": 2},
        ("gradient_accumulation=2 and schedule.microbatches=4", "give one of them"),
    ),
    ({"offload": {"optimizer": "tape"}}, ("offload.optimizer", "'host' or 'disk'")),
    ({"offload": {"parameters": "disk"}, "zero": 2}, ("offload.parameters", "zero stage 2", "use stage 3")),
    ({"offload": {"path": "x"}}, ("offload has a path", "optimizer='disk'")),
    ({"offload": {"memory": "4 lots"}}, ("offload.memory", "4GiB")),
    ({"gradient_handler": [{"type": "Moe"}]}, ("gradient_handler[0].type", "'DataParallel'", "'Moe'")),
    ({"gradient_handler": {"type": "ZeRO"}}, ("gradient_handler must be a list",)),
    ({"gradient_handler": [{"type": "ZeRO", "stge": 2}]}, ("gradient_handler[0] (ZeRO)", "did you mean 'stage'")),
    ({"gradient_handler": [{"type": "ZeRO", "stage": 3}]}, ("zero=dict(stage=3)",)),
    ({"gradient_handler": [{"type": "ZeRO"}], "zero": 1}, ("gradient_handler names ZeRO too",)),
    ({"gradient_handler": [{"type": "SharedParameters"}]}, ("gradient_handler[0]", "'names'")),
    ({"parallel": 4}, ("parallel must be a dict",)),
    ({"data": "text", "model": "mlp"}, ("'mlp' does not read the data 'text'", "'gpt' or 'llama'")),
    ({"model": "llama", "data": "digits"}, ("'llama' does not read the data 'digits'",)),
    ({"model": {"name": "gpt", "hiden_size": 3}}, ("model (gpt)", "did you mean 'hidden_size'")),
    ({"model": {"name": "gpt", "expert_axis": ["data", 3]}}, ("model.expert_axis[1] must be a text, not 3",)),
    ({"model": {"name": "gpt", "expert_axis": []}}, ("model.expert_axis",)),
    ({"data": {"name": "text", "sequence_length": 0}}, ("data.sequence_length", "at least 1")),
    ({"sample": {"temprature": 1}}, ("sample", "did you mean 'temperature'")),
    ({"validate_every": 0}, ("validate_every", "at least 1")),
]


@pytest.mark.parametrize(("values", "parts"), WRONG)
def test_wrong_values_say_what_would_be_right(values: Any, parts: tuple[str, ...]) -> None:
    refused(lambda: parse(values), *parts)


def test_pipelines_of_a_configuration() -> None:
    """Schedules, microbatches and partitions, as they are given and as they are not."""

    def made(ranks: int, **keys: Any) -> Any:
        return resolve(keys, ranks).schedule

    assert made(1) is None
    assert made(4) is None
    found = made(8, parallel={"pipeline": 4})
    assert (found.name, found.ranks, found.microbatches, found.stages) == ("1f1b", 4, 4, 4)
    assert made(4, parallel={"pipeline": 4}, gradient_accumulation=6).microbatches == 6
    assert made(4, parallel={"pipeline": 4}, gradient_accumulation=8, schedule={"microbatches": 8}).microbatches == 8
    assert parse({"parallel": {"pipeline": 2}, "schedule": "gpipe"}).schedule == ScheduleConfig("gpipe")
    given = {"name": "interleaved", "microbatches": 4, "chunks": 3}
    assert made(2, parallel={"pipeline": 2}, schedule=given).stages == 6
    assert made(2, parallel={"pipeline": {"size": 2, "partition": [1] * 6}}, schedule=given).stages == 6
    assert made(2, parallel={"pipeline": 2}, schedule={"name": "pipedream", "microbatches": 4, "every": 2}).asynchronous
    refused(
        lambda: made(2, parallel={"pipeline": {"size": 2, "partition": [3, 3]}}, schedule=given),
        "partition=[3, 3] has 2 numbers", "'interleaved' has 6 stages (2 ranks × 3 chunks)", "give 6 numbers",
    )  # fmt: skip
    refused(
        lambda: made(2, parallel={"pipeline": 2}, schedule={"chunks": 2}),
        "schedule: 1f1b with chunks=2", "leave chunks out, or take the schedule interleaved",
    )  # fmt: skip
    refused(
        lambda: made(4, parallel={"pipeline": 4}, schedule={"name": "interleaved", "microbatches": 6}),
        "interleaved over 4 ranks with microbatches=6: it takes multiples of 4, such as 4 or 8",
    )
    refused(lambda: made(3, parallel={"pipeline": 3}, schedule="chimera"), "it takes an even number of them")
    refused(lambda: made(2, parallel={"pipeline": 2}, schedule={"name": "1f1b", "every": 2}), "it steps once")


def test_unlike_grids_are_shared_out() -> None:
    each = [{"size": 2, "mode": "1d"}, {"mode": "2d", "shape": (2, 2)}]
    found = resolve({"parallel": {"sequence": 2, "pipeline": {"tensor": each}}}, 24)
    assert (found.data, found.pipeline, found.sequence) == (2, 2, 2)
    assert found.grids == ({"data": 2, "s": 2, "t": 2}, {"data": 2, "s": 2, "r": 2, "c": 2})
    assert [found.at(p).scheme.name for p in range(2)] == ["data × s × 1d", "data × s × 2d"]


def test_every_key_is_optional_and_what_means_off_passes() -> None:
    assert parse({}) == TrainingConfig()
    off = {"parallel": None, "zero": {"stage": 0}, "precision": None, "gradient_handler": [], "offload": None}
    assert parse(off) == TrainingConfig()
    assert parse({"gradient_handler": [{"type": "DataParallel"}]}).gradient_handler == (DataParallel(),)


def test_short_forms_of_precision_and_zero() -> None:
    assert parse({"zero": 2}).zero == parse({"zero": {"stage": 2}}).zero == ZeroConfig(2)
    assert parse({"precision": "bf16"}).precision == PrecisionConfig("bfloat16")
    assert parse({"precision": "fp16"}).precision == PrecisionConfig("float16", LossScaleConfig())
    assert parse({"precision": {"dtype": "fp16", "loss_scale": 8, "communicate": 16}}).precision == PrecisionConfig(
        "float16", 8.0, "float16"
    )
    assert parse({"precision": {"communicate": "16"}}).precision == PrecisionConfig(None, None, "bfloat16")
    for same in (32, "32", "float32"):
        assert parse({"precision": {"communicate": same}}).precision.communicate == "float32"
    assert parse({"precision": "fp16", "dtype": "float64"}).model_dtype == "float16"
    offload = parse({"offload": {"optimizer": "disk", "memory": "1KiB"}}).offload
    assert offload == OffloadConfig(optimizer="disk", memory=1024)


def test_data_and_model_follow_from_each_other() -> None:
    assert parse({"model": {"name": "llama"}}).data == Choice("text", {})
    assert parse({"data": "notes.txt"}).model == Choice("gpt", {})
    assert parse({"data": {"path": "notes"}}).data == Choice("text", {"path": "notes"})
    assert parse({"data": {"path": "x.npz"}}) == parse({"data": "x.npz"})
    assert parse({"data": "x.npz"}).model == Choice("mlp", {})


def test_examples_are_right() -> None:
    assert {"digits", "text"} <= set(examples())
    for name in examples():
        config = load(name)
        for ranks in range(8, 17, 8) if name == "hybrid" else range(1, 13):
            found = resolve(config, ranks)
            assert name == "hybrid" or found.tensor == ranks


@pytest.mark.parametrize(
    ("text", "value"),
    [("4", 4), ("2.5d", "2.5d"), ("2d", "2d"), ("1e-3", 1e-3), ("(1, 3)", (1, 3)), ("None", None), ("True", True),
     ("dict(a=dict(b=1))", {"a": {"b": 1}}), ("a b", "a b"), ("", ""), ("f(1)", "f(1)"), ("dict(1)", "dict(1)")],
)  # fmt: skip
def test_values_of_the_command_line(text: str, value: object) -> None:
    assert config.override({}, [f"model.hidden={text}"]) == {"model": {"hidden": value}}


def test_settings_replace_values_and_leave_the_original_alone() -> None:
    given = {"parallel": {"tensor": 4}, "optimizer": "sgd"}
    settings = ["parallel.tensor.mode=2.5d", "parallel.tensor.depth=1", "optimizer.lr=0.1", "model.hidden=(3,)"]
    assert config.override(given, settings) == {
        "parallel": {"tensor": {"size": 4, "mode": "2.5d", "depth": 1}},
        "optimizer": {"name": "sgd", "lr": 0.1},
        "model": {"hidden": (3,)},
    }
    assert given == {"parallel": {"tensor": 4}, "optimizer": "sgd"}


@pytest.mark.parametrize("setting", ["a", "=1", "a..b=1", ".a=1"])
def test_settings_without_key_or_value_are_refused(setting: str) -> None:
    refused(lambda: config.override({}, [setting]), "KEY=VALUE", setting)


def test_a_dict_that_contains_itself_is_refused() -> None:
    given: dict[str, Any] = {"seed": 1}
    refused(lambda: load(given | {"model": given}), "unknown key 'seed'")  # twice, but not within itself
    given["parallel"] = {"data": 1, "tensor": given}
    refused(lambda: load(given), "parallel.tensor is the configuration itself")
    tensor: dict[str, Any] = {"size": 1}
    tensor["shape"] = tensor
    refused(lambda: load({"parallel": {"tensor": tensor}}), "parallel.tensor.shape is the dict parallel.tensor itself")
    refused(lambda: parse({"parallel": {"tensor": tensor}}), "parallel.tensor.shape must be a list or tuple")


def test_settings_are_checked_as_the_file_is(tmp_path: Path) -> None:
    file = tmp_path / "config.py"
    file.write_text("import math\nfrom os import path\n_width = 7\nmodel = dict(hidden=[_width])\ndef f(): pass\n")
    assert load(file).model.options == {"hidden": (7,)}
    assert load(file, ["seed=3"]).seed == 3
    refused(lambda: load(file, ["sed=3"]), "did you mean 'seed'")
    refused(lambda: load(file, ["model.hidden.x=3"]), "without keys")


def test_files_that_are_missing_or_fail_are_named(tmp_path: Path) -> None:
    refused(lambda: load("dgits"), "'dgits'", "shipped example", "digits")
    file = tmp_path / "config.py"
    file.write_text("seed = 1\nseed = seed / 0\n")
    refused(lambda: load(file), "config.py", "line 2", "ZeroDivisionError")
    file.write_text("seed = = 1\n")
    refused(lambda: load(file), "line 1", "SyntaxError")
    file.write_text("import sys\nsys.exit(3)\n")
    refused(lambda: load(file), "config.py fails near line 2", "SystemExit: 3")
    file.write_text("seed = 1\nfrom pathlib import Path\nPath('nowhere/else.txt').read_text()\n")
    refused(lambda: load(file), "config.py fails near line 3", "FileNotFoundError")  # its own line, not pathlib's
    file.write_text("seed = 1\0")
    refused(lambda: load(file), "config.py fails: ", "null bytes")  # a ValueError or a SyntaxError


def test_messages_have_no_traces_of_code() -> None:
    for values, _ in WRONG:
        with pytest.raises(ConfigError) as caught:
            parse(values)
        assert not re.search(r"<function|<class|object at 0x", str(caught.value))


SECTIONS = [c for c in vars(config).values() if isinstance(c, type) and issubclass(c, Section) and c is not Section]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda c: c.__name__)
def test_every_key_has_a_meaning_and_a_default_that_is_valid(section: type[Section]) -> None:
    for name, doc, _ in documentation(section):
        assert doc, name
    assert section.parse("here", {f.name: f.default for f in fields(section)}) == section()
    assert section().given() == {}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda c: c.__name__)
def test_every_key_refuses_an_array(section: type[Section]) -> None:
    """NumPy's, whose comparison with a value is no truth value."""
    for each in fields(section):
        for array in (np.array([1, 2]), np.array(["a", "b"]), np.zeros((2, 0))):
            refused(lambda name=each.name, value=array: section.parse("here", {name: value}), f"here.{each.name}")


@dataclass(frozen=True)
class Inner(Section):
    SHORT = Short(int, "size", "a size")
    size: int = key(3, integer(1), "how large")
    name: str | None = key(None, text, "its name", "none")


@dataclass(frozen=True)
class Outer(Section):
    inner: Inner = key(Inner(), Inner, "what is inside")
    maybe: Inner | None = key(None, Inner, "what may be inside")


def test_a_new_key_is_one_declaration() -> None:
    """Its check, its place in `--set`, the hints of unknown keys and its row in the guide follow from the field."""
    assert Outer.parse("", None) == Outer.parse("", {"inner": None, "maybe": None}) == Outer()
    found = Outer.parse("", override(Outer, {"inner": 4}, ["inner.name=x", "maybe.size=5"]))
    assert found == Outer(Inner(4, "x"), Inner(5))
    assert Outer.parse("", found) is found
    assert Outer.parse("", found.given()) == found
    assert found.given() == {"inner": {"size": 4, "name": "x"}, "maybe": {"size": 5}}
    refused(lambda: Outer.parse("", {"inner": {"sise": 1}}), "inner has an unknown key 'sise': did you mean 'size'?")
    refused(lambda: Outer.parse("", {"inner": 0}), "inner.size must be a whole number of at least 1, not 0")
    refused(
        lambda: Outer.parse("", {"inner": "x"}), "inner must be a dict with the keys size, name, or a size, not 'x'"
    )
    refused(lambda: Outer.parse("", {"inner": True}), "inner must be a dict", "not True")
    refused(lambda: Outer.parse("", {"inner": {"size": None}}), "inner.size must be a whole number")
    refused(lambda: override(Outer, {"inner": [1]}, ["inner.name=x"]), "inner is [1], without keys")
    assert documentation(Inner) == [("`size`", "how large", "`3`"), ("`name`", "its name", "none")]


def test_settings_go_through_short_forms() -> None:
    assert load({"zero": 2, "checkpoint": 5}, ["zero.within=4", "checkpoint.keep=None"]).given() == {
        "zero": {"stage": 2, "within": 4}, "checkpoint": {"every": 5, "keep": None},
    }  # fmt: skip
    assert load({"precision": "fp16"}, ["precision.communicate=16"]) == load(
        {"precision": {"dtype": "fp16", "communicate": 16}}
    )


@pytest.mark.parametrize("pipeline", [1, {"size": 1}, {"tensor": [{"mode": "1d"}]}])
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "chimera", "zb-h1", "zb-v"])
def test_over_one_rank_a_schedules_microbatches_are_accumulated(name, pipeline):
    for schedule, parts in (({"name": name, "microbatches": 5}, 5), (name, 3)):
        config = parse({"schedule": schedule, "parallel": {"pipeline": pipeline}, "gradient_accumulation": parts})
        assert config.schedule is None
        assert config.gradient_accumulation == parts
    config = parse({"schedule": {"name": name, "microbatches": 5}, "parallel": {"pipeline": pipeline}})
    assert config.gradient_accumulation == 5
