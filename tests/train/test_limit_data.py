"""A limit of memory with data parallelism and ZeRO: what a pass takes besides is known before, and the limit holds."""

from __future__ import annotations

import gc
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg import optim
from parlinalg.errors import ConfigError
from parlinalg.offload import plan
from parlinalg.parallel import GradientReducer, ZeRO
from parlinalg.train import launch
from tests.models import make
from tests.offload.runs import SCHEME, sizes
from tests.train.test_hybrid import settings
from tests.train.trainings import Training

WHOLE: dict[str, Any] = {"gradient_accumulation": 2}
CASES: dict[str, dict[str, Any]] = {
    "0": {},
    "1": {"zero": 1},
    "2": {"zero": 2},
    "3": {"zero": 3},
    "2 whole": {"zero": {"stage": 2, "accumulate": "whole"}, **WHOLE},
    "3 whole": {"zero": {"stage": 3, "accumulate": "whole"}, **WHOLE},
    "0 bf16": {"precision": "bf16"},
    "1 bf16": {"zero": 1, "precision": "bf16"},
    "3 bf16": {"zero": 3, "precision": "bf16"},
}
#: What products and kernels work with is in no plan; those of 16 bits work in 32.
ROOM = {False: 1.03, True: 1.1}


def config_of(name: str, folder: Path, **more: Any) -> dict[str, Any]:
    config = settings(folder, **{"dtype": "float32", "gradient_accumulation": 1, "batch_size": 4, "steps": 2, **more})
    config["data"] = {**config["data"], "sequence_length": 16}
    config["model"] = {"name": "gpt", "hidden_size": 192, "num_hidden_layers": 4, "num_attention_heads": 4}
    return {**config, **CASES[name]}


def numpy_bytes() -> int:
    """Of arrays alone."""
    domain = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([domain]).traces)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch, tune: Any) -> Any:
    """Buckets that ranks have in common are not in tracemalloc's books, nor is compiling a part of training."""
    monkeypatch.setenv("PARLINALG_SHARED", "0")
    tune(COMPILED_SIZE=1 << 60)
    tracemalloc.start()
    yield
    tracemalloc.stop()


def least_of(config: dict[str, Any], world: Any, backend: str, out: Path) -> int:
    """The least limit that works, as the error tells; nothing of the training is left."""
    try:
        with launch({**config, "offload": {"memory": 1000}}, world, backend) as mesh:
            Training(mesh, out)
    except ConfigError as error:
        return int(re.search(r"the least limit that works is (\d+) bytes", str(error))[1])  # type: ignore[index]
    raise AssertionError("a thousand bytes are too little")


def most_in_a_step(training: Training, world: Any) -> int:
    """Bytes of NumPy's arrays at the most in a step, of the rank that has most."""
    most = []
    for batch in training.batches():
        gc.collect()
        python = tracemalloc.get_traced_memory()[0] - numpy_bytes()
        tracemalloc.reset_peak()
        training.step(batch)
        most.append(tracemalloc.get_traced_memory()[1] - python)
    return max(world.share(max(most)))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", CASES)
def test_a_limit_holds(name: str, tale: Path, world: Any, backend: str, full: bool, traced: Any) -> None:
    if backend != "numpy" or (world.size == 4 and not full and name not in ("1", "2", "3")):
        return
    config = config_of(name, tale)
    limit = int(1.05 * least_of(config, world, backend, tale))
    with launch({**config, "offload": {"memory": limit}}, world, backend) as mesh:
        training = Training(mesh, tale)
        assert "optimizer" in training.offload.places
        with training.away():
            most = most_in_a_step(training, world)
    assert 0.7 * limit < most < ROOM["bf16" in name] * limit


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_is_held_with_nothing_offloaded(make_grid: Callable[..., Any], world: Any, stage: int) -> None:
    """Gradients that are whole, and buckets under way and filling, beside the parts."""
    grid = make_grid(sizes(world.size))
    model = make("gpt", SCHEME, grid, num_hidden_layers=2)
    reducer = GradientReducer(model.parameters(), [ZeRO(stage)] if stage else [], 2000, 4000)
    table = plan(model, optim.SGD(model.parameters(), 0.1)).table
    nbytes = sum(p.block.nbytes for p in model.parameters())
    buckets = sorted((b.size * 8 for b in reducer.buckets), reverse=True)
    kinds = len({(b.policy, b.slots[0].parameter.layout.cut_axes) for b in reducer.buckets})
    assert table.gradients == (nbytes if stage < 2 else pytest.approx(nbytes / 2, rel=0.01))
    passing = sum(buckets[: 2 + kinds]) if stage == 2 else 0
    parts = sum(buckets[:2]) / 2 if stage else 0
    assert table.transient == pytest.approx(passing + parts, abs=32)
    assert table.total == table.values + table.gradients + table.transient


@pytest.mark.ranks(2)
def test_sums_of_16_bits_are_known(make_grid: Callable[..., Any], world: Any) -> None:
    """Terms of the other ranks, and a cast, of one bucket at a time."""
    grid = make_grid(sizes(world.size))
    for dtype, travels, times in (("float32", None, 0), ("bfloat16", None, 1.5), ("float32", "bfloat16", 2.5 / 2)):
        model = make("gpt", SCHEME, grid, num_hidden_layers=2, dtype=dtype)
        reducer = GradientReducer(model.parameters(), bucket=1 << 30, first_bucket=1 << 30, dtype=travels)
        buckets = Counter[Any]()
        for p in model.parameters():
            buckets[p.layout.cut_axes] += p.block.nbytes
        assert reducer.transient_bytes == pytest.approx(times * max(buckets.values()), rel=1e-3)
