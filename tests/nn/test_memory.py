"""What a model in training holds: its weights, and what the tape keeps, are what their layouts say."""

from __future__ import annotations

import gc
import math
import tracemalloc

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.autograd import ops
from parlinalg.autograd.saved import saved
from tests.training import every_scheme, sizes_for

BATCH, SEQUENCE, HIDDEN, LAYERS, VOCABULARY = 13, 33, 60, 3, 37
SCHEMES = every_scheme()


def made(grid, scheme, **options):
    model = nn.GPT(
        vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, hidden_size=HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=5, scheme=scheme, grid=grid, dtype=np.float64, seed=1, **options,
    )  # fmt: skip
    numbers = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, SEQUENCE))
    return model, pla.distribute(numbers, grid, model.ids_layout)


def loss_of(model, ids):
    loss, count = ops.cross_entropy_sum(model(ids), ids)
    return loss * (1 / count)


@pytest.mark.ranks(1, 3, 4)
@pytest.mark.parametrize("name", [name for name in sorted(SCHEMES) if "×" not in name] + ["data × 2d"])
def test_weights_and_kept_activations_are_the_layouts_sum(make_grid, world, backend, name):
    scheme = SCHEMES[name]
    grid = make_grid(sizes_for(scheme, world.size, most=1)[0])
    model, ids = made(grid, scheme)
    parameters = list(model.parameters())
    assert sum(p.block.nbytes for p in parameters) == model.nbytes
    assert model.nbytes == sum(8 * math.prod(grid.block_shape(p.layout, p.shape)) for p in parameters)
    loss_of(model, ids).backward()  # communicators and what is made once
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    loss = loss_of(model, ids)
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    rows = saved(loss)
    total = sum(row.nbytes for row in rows)
    assert {"product", "attention", "gelu", "cross_entropy_sum"} <= {row.op.removeprefix("ring_") for row in rows}
    if backend == "numpy":
        assert abs(kept - total) <= 0.03 * total + 100_000, (kept, total, rows)


@pytest.mark.ranks(1, 4)
def test_recompute_keeps_a_blocks_input_alone(make_grid, world):
    grid = make_grid({"t": world.size})
    scheme = SCHEMES["1d"]
    plain, again = (sum(r.nbytes for r in saved(loss_of(*made(grid, scheme, recompute=r)))) for r in (None, "block"))
    stream = BATCH * SEQUENCE * HIDDEN * 8
    block = (plain - again) / LAYERS + stream
    assert again <= 1.1 * (LAYERS * stream + block), (again, LAYERS * stream, block)
    assert again < plain / 2 or world.size > 2
