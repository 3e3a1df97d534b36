"""Llama with fewer heads of keys than tensor ranks: all ranks work, and the numbers are those of one rank."""

from __future__ import annotations

import math
import warnings
from functools import cache
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from parlinalg.backend.kernels import attention as kernel
from parlinalg.nn.pretrained import read_header
from parlinalg.schemes import Scheme
from tests.agreement import once
from tests.models import CLOSE, HEADS, alone, differences, gradients, losses, make

PROMPTS = [[1, 2, 3, 4], [5], [6, 7, 8]]
PLAIN = {name: file.SCHEME for name, file in schemes.discover().items()}
#: Ranks: the scheme, the grid, heads of keys.
RUNS: list[tuple[int, Scheme, dict[str, int], int]] = [
    (2, PLAIN["1d"], {"t": 2}, 1),
    (2, PLAIN["1d with sequence cuts"], {"t": 2}, 1),
    (3, PLAIN["1d"], {"t": 3}, 1),
    (4, PLAIN["1d"], {"t": 4}, 1),
    (4, PLAIN["1d"].factored("t", ("t", "u")), {"t": 2, "u": 2}, 2),
    (4, PLAIN["1d"].with_data("data").with_weights_cut("data"), {"data": 2, "t": 2}, 1),
    (4, PLAIN["2d"], {"r": 2, "c": 2}, 1),
    (4, PLAIN["1d"].with_sequence("s"), {"s": 2, "t": 2}, 1),
    (4, PLAIN["3d"], {"i": 1, "j": 2, "l": 2}, 1),
]


def runs(test: Any) -> Any:
    """With every run, on as many ranks."""
    ids = [f"{scheme.name} {sizes}" for _, scheme, sizes, _ in RUNS]
    return pytest.mark.ranks(2, 3, 4)(
        pytest.mark.parametrize(("ranks", "scheme", "sizes", "keys"), RUNS, ids=ids)(test)
    )


@pytest.fixture(scope="module")
def known(world: Any) -> Any:
    """What one rank alone computes: gradients, the losses of a training, what is written."""

    @cache
    def found(keys: int) -> tuple[dict[str, np.ndarray], list[float], list[list[int]]]:
        options: dict[str, Any] = {"num_key_value_heads": keys, "packed": False}
        with alone(world) as grid:
            grads = {name: g.gather() for name, g in gradients("llama", PLAIN["serial"], grid, **options).items()}
            trained = losses("llama", PLAIN["serial"], grid, 4, p=0.1, **options)
            return grads, trained, written(make("llama", PLAIN["serial"], grid, **options))

    return lambda keys: once(lambda: found(keys))


def written(model: Any) -> list[list[int]]:
    return [row.tolist() for row in nn.generate(model, PROMPTS, 4)]


@runs
def test_equals_one_rank(
    ranks: int, scheme: Scheme, sizes: dict[str, int], keys: int, make_grid, world, known, monkeypatch
) -> None:
    if ranks != world.size:
        return
    grid, options = make_grid(sizes), {"num_key_value_heads": keys, "packed": False}
    grads, trained, tokens = known(keys)
    here, forward = set(), kernel.forward

    def noted(q: Any, *args: Any, **named: Any) -> Any:
        here.add(q.shape[2] * q.shape[3])
        return forward(q, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(kernel, "forward", noted)
        found = gradients("llama", scheme, grid, **options)
    assert not differences(found, grads)
    across = math.prod(sizes[a] for a in scheme.inner.dims[-1])
    assert here <= {HEADS // across, -(-HEADS // across)}  # every rank has its share
    for got, want in zip(losses("llama", scheme, grid, 4, p=0.1, **options), trained, strict=True):
        assert abs(got / want - 1) <= CLOSE
    assert written(make("llama", scheme, grid, **options)) == tokens


@runs
def test_folders_are_read_and_written(
    ranks: int, scheme: Scheme, sizes: dict[str, int], keys: int, make_grid, world, folder
) -> None:
    if ranks != world.size:
        return
    grid, biases = make_grid(sizes), {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": keys}
    ids = np.arange(12).reshape(3, 4) % 11
    with alone(world) as one:
        model = make("llama", PLAIN["serial"], one, **biases)
        want = model(pla.distribute(ids, one, model.ids_layout)).gather()
        if world.rank == 0:
            model.save_pretrained(folder / "packed")
    world.barrier()
    read = nn.Llama.from_pretrained(folder / "packed", scheme, grid, packed=False)
    assert "blocks.0.attention.kv.bias" in dict(read.named_parameters())
    got = read(pla.distribute(ids, grid, read.ids_layout)).gather()
    assert np.abs(got - want).max() <= CLOSE * np.abs(want).max()
    read.save_pretrained(folder / "apart")
    world.barrier()
    files = [read_header(folder / name / "model.safetensors") for name in ("packed", "apart")]
    assert files[0].keys() == files[1].keys()
    assert all(np.array_equal(stored.mapped(), files[1][name].mapped()) for name, stored in files[0].items())
    texts = [(folder / name / "config.json").read_text() for name in ("packed", "apart")]
    assert texts[0] == texts[1]


@pytest.mark.ranks(2, 4)
def test_idle_ranks_are_told_of(make_grid, world) -> None:
    grid, ranks = make_grid({"t": world.size}), world.size
    idle = "attention's 4 heads share {} heads of keys, which {} ranks cut: {} of the ranks have no heads. {}"
    apart, two = "With packed=False they distribute the queries too", "Take the axis as two, the outer one of at most 2"
    for packed, keys, said in [
        (True, 1, idle.format(1, ranks, ranks - 1, apart)),
        (False, 1, None),
        (True, 2, idle.format(2, ranks, 2, apart) if ranks == 4 else None),
        (False, 2, idle.format(2, ranks, 2, two) if ranks == 4 else None),
        (True, HEADS, None),
    ]:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("default")
            make("llama", PLAIN["1d"], grid, num_key_value_heads=keys, packed=packed, num_hidden_layers=2)
        texts = [str(w.message) for w in heard]
        assert len(texts) == (said is not None and world.rank == 0), texts
        assert all(text.startswith(said) for text in texts), texts
