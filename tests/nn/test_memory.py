"""What a model in training holds: its weights, and what the tape keeps, are what their layouts say."""

from __future__ import annotations

import gc
import math
import tracemalloc

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
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
    assert {"matmul", "attention", "gelu", "cross_entropy_sum"} <= {row.op.removeprefix("ring_") for row in rows}
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


@pytest.mark.one_in(3)
@pytest.mark.serial
def test_masks_are_held_as_they_were_given(make_grid, backend):
    if backend != "numpy":
        return
    scheme, (b, s, hidden, heads) = schemes.discover()["serial"].SCHEME, (4, 256, 16, 4)
    grid = make_grid({"one": 1})
    blocks = [nn.TransformerBlock(hidden, heads, hidden, scheme, grid).initialize(i, f"{i}") for i in range(3)]
    x = pla.Tensor(pla.ones((b, s, hidden), grid, scheme.residual, "float32"), requires_grad=True)
    pairs, real = np.tri(s, dtype=bool), np.arange(s) < np.full((b, 1), s - 3)

    def run(**seen):
        y = x
        for block in blocks:
            y = block(y, **seen)
        return y

    def once(**seen):
        """Bytes kept, the most at once in inference, and what the tape says that it keeps."""
        run(**seen)
        with pla.no_grad():
            run(**seen)
        gc.collect()
        tracemalloc.start()
        y = run(**seen)
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
        total = sum(row.nbytes for row in saved(y))
        tracemalloc.clear_traces()
        del y
        tracemalloc.reset_peak()
        with pla.no_grad():
            run(**seen)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return np.array([kept, most, total])

    def held(**seen):
        return np.minimum(once(**seen), once(**seen))  # threads that read what other processes print hold bytes too

    held(mask=pairs)  # what is made once, at the first call
    alone = held(mask=pairs)
    repeated = np.broadcast_to(pairs, (b, heads, s, s))
    for seen in ({"mask": pairs, "key_padding": real}, {"mask": repeated}):
        assert (abs(held(**seen) - alone) < pairs.nbytes / 2).all(), (seen.keys(), held(**seen), alone)
    assert held()[2] + pairs.nbytes == alone[2]  # once for all layers


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("activation", "inside"), [("gelu", 2), ("swiglu", 3)])
@pytest.mark.parametrize(("axis", "k", "shared"), [("data", 2, 0), (None, 2, 0), ("data", 4, 80)])
def test_experts_hold_what_their_guide_says(activation, inside, axis, k, shared, world, backend):
    """Exactly the weights; of what is kept all but scores and the places of tokens."""
    h, i, experts, groups, s = 96, 64, 8, 4, 32
    with pla.launch({"parallel": {"data": world.size}}, world, backend) as mesh:
        layer = nn.MixtureOfExperts(
            h, i, experts, mesh.scheme, mesh.grid, top_k=k, shared=shared, activation=activation, axis=axis,
            capacity_factor=1.5, seed=0,
        )  # fmt: skip
        ranks = world.size if axis else 1
        each = inside * h * i + (inside - 1) * i + h
        of_all = inside * h * shared + (inside - 1) * shared + h if shared else 0
        assert sum(p.block.size for p in layer.parameters()) == experts // ranks * each + h * experts + of_all
        x = np.random.default_rng(0).normal(size=(groups, s, h)).astype("float32")
        y = layer(pla.Tensor(pla.distribute(x, mesh.grid, mesh.scheme.residual)))
        queues = experts * layer.capacity(s) * groups // world.size
        tokens = groups // world.size * s
        most = 4 * (queues * (h + inside * i) + k * tokens * h + inside * shared * tokens)
        known = {"matmul", "combine", "swiglu", "gelu"}
        kept = sum(row.nbytes for row in saved(y) if row.op in known) - 4 * groups // world.size * s * h  # the input
        assert most * 0.95 < kept < most * 1.05, (kept, most)
