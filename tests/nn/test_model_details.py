"""Models apart from their gradients: 16 bits, states, layers, counts, initial values, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from parlinalg.autograd import settle
from parlinalg.optim import AdamW
from tests.cases import placed
from tests.models import (
    BATCH,
    HEADS,
    HIDDEN,
    KINDS,
    SEQUENCE,
    VOCABULARY,
    alone,
    combinations,
    every_scheme,
    loss_of,
    make,
    stepped,
)

SUMMA = schemes.for_mode("2d").SCHEME
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


def other(ranks: int, turn: int) -> tuple[str, dict[str, int]]:
    """A scheme and a grid of so many ranks."""
    _, name, sizes = random.Random(10 * ranks + turn).choice(list(combinations(ranks, False)))
    return name, sizes


def steps(model: Any, optimizer: Any, first: int, count: int) -> list[float]:
    """The losses of training steps."""
    return stepped(model, optimizer, range(first, first + count), 2)


def norm(arrays: Any) -> float:
    return math.sqrt(sum(float(np.square(a.astype(np.float64)).sum()) for a in arrays))


def mild(name: str, declared: Any) -> Any:
    return nn.init.Normal(0.1, float(declared.init == nn.init.ones))


def test_16_bits_agree_with_float32(make_grid: Any, world: Any, full: bool) -> None:
    """Losses of three steps, and the gradient of the first, to a hundredth, from the same weights."""
    turns = list(itertools.product(KINDS, ("bfloat16", "float16")))
    wrong = []
    for turn, (kind, dtype) in enumerate(turns if full else turns[world.size % 4 :: 4]):
        name, sizes = other(world.size, turn)
        losses, grads, state = [], [], {}
        with make_grid(sizes) as grid:
            for each in (dtype, "float32"):
                model = make(kind, every_scheme()[name], grid, mild, p=0.1, dtype=each)
                state = state or model.state_dict()
                model.load_state_dict(state)
                assert all(str(p.dtype) == each for p in model.parameters())
                loss_of(model.eval()).backward()
                grads.append({n: p.grad.gather() for n, p in model.named_parameters()})
                assert all(str(g.dtype) == each for g in grads[-1].values())
                model.zero_grad()
                losses.append(steps(model.train(), AdamW(model.parameters(), 0.01), 0, 3))
        off = [grads[0][n].astype(np.float32) - g for n, g in grads[1].items()]
        error = max(abs(a / b - 1) for a, b in zip(*losses, strict=True)), norm(off) / norm(grads[1].values())
        if not max(error) <= 1e-2:
            wrong.append((kind, dtype, name, sizes, error))
    assert not wrong


def test_states_move_from_grid_to_grid(make_grid: Any, world: Any) -> None:
    """A training goes on, on another grid, as it would have where it began."""
    kind = KINDS[world.size % 4]
    (first, first_sizes), (second, second_sizes) = other(world.size, 100), other(world.size, 101)
    model = make(kind, every_scheme()[first], make_grid(first_sizes), p=0.1)
    optimizer = AdamW(model.parameters(), 0.01)
    steps(model, optimizer, 0, 2)
    states = model.state_dict(), optimizer.state_dict()
    there = make(kind, every_scheme()[second], make_grid(second_sizes), p=0.1, recompute="attention")
    further = AdamW(there.parameters(), 0.5)
    there.load_state_dict(states[0])
    further.load_state_dict(states[1])
    assert all(np.array_equal(a, there.state_dict()[n]) for n, a in states[0].items())
    for name, arrays in further.state_dict()["states"].items():
        assert all(np.array_equal(a, states[1]["states"][name][s]) for s, a in arrays.items())
    np.testing.assert_allclose(steps(there, further, 2, 2), steps(model, optimizer, 2, 2), rtol=1e-12)


@pytest.mark.parametrize("kind", ["gpt", "vit"])
def test_microbatches_drop_what_the_whole_batch_drops(kind: str, make_grid: Any, world: Any) -> None:
    name, sizes = other(world.size, 7)
    model = make(kind, every_scheme()[name], make_grid(sizes), p=0.2, recompute="block", num_hidden_layers=2)
    with nn.training_step(4):
        whole = loss_of(model)
    found = 0.0
    for rows in (slice(0, 2), slice(2, 3), slice(3, 5)):
        with nn.training_step(4, rows.start), pla.no_sync():
            part = loss_of(model, rows=rows) * ((rows.stop - rows.start) / BATCH)
            part.backward()
        found += part.item()
    assert abs(found / whole.item() - 1) < 1e-13
    settle(list(model.parameters()))
    parts = [p.grad.gather() for p in model.parameters()]
    model.zero_grad()
    whole.backward()
    for p, g in zip(model.parameters(), parts, strict=True):
        np.testing.assert_allclose(g, p.grad.gather(), rtol=0, atol=1e-13 * np.abs(g).max())


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_images_of_any_dtype_are_computed_with_in_the_models(dtype: str, make_grid: Any, world: Any) -> None:
    model = make("vit", SUMMA, make_grid({"r": world.size, "c": 1}), dtype=dtype)
    whole = np.random.default_rng(0).integers(0, 9, (BATCH, 2, 6, 9))
    want = model(placed(whole.astype(model.dtype), model.grid, model.images_layout))
    for given in ("float64", "float32", "uint8"):
        shown = placed(whole.astype(given), model.grid, model.images_layout)
        images = pla.Tensor(shown, requires_grad=given != "uint8")
        assert model.embed(images).dtype == model.dtype
        logits = model(images)
        assert logits.dtype == model.dtype
        assert np.array_equal(logits.gather(), want.gather())
        if images.requires_grad:
            logits.sum().backward()
            assert images.grad is not None
            assert images.grad.dtype == given


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_its_layers(kind: str, make_grid: Any, world: Any) -> None:
    grid = make_grid({"r": 1, "c": world.size})
    model = make(kind, SUMMA, grid, num_hidden_layers=3)
    layers = model.layers()
    assert [layer.name for layer in layers] == ["embedding", "blocks.0", "blocks.1", "blocks.2", "head"]
    used = {id(p) for layer in layers for module in layer.modules for p in module.parameters()}
    assert used == {id(p) for p in model.parameters()}
    if kind == "vit":
        x: Any = placed(np.random.default_rng(0).normal(size=(BATCH, 2, 6, 9)), grid, model.images_layout)
    else:
        x = placed(np.arange(BATCH * SEQUENCE).reshape(BATCH, -1) % VOCABULARY, grid, model.ids_layout)
    whole = model.logits(model(x)) if kind == "bert" else model(x)
    for layer in layers:
        x = layer.forward(x)
    assert np.array_equal(x.block, whole.block)
    assert x.layout == whole.layout


@pytest.mark.serial
def test_flops_are_those_of_products_and_pairs() -> None:
    with pla.Grid({"r": 1, "c": 1}) as grid:
        gpt = nn.GPT(
            vocab_size=2048, max_position_embeddings=256, hidden_size=512, num_hidden_layers=4, num_attention_heads=8,
            scheme=SUMMA, grid=grid,
        )  # fmt: skip
        tokens = 8 * 256
        assert gpt.flops(8, 256) == tokens * (6 * (4 * 12 * 512**2 + 2048 * 512) + 12 * 4 * 512 * 256)
        assert gpt.nbytes == 4 * (4 * (12 * 512**2 + 13 * 512) + (2048 + 256 + 2) * 512)
        llama = make("llama", SUMMA, grid)
        weights = HIDDEN * 2 * (2 + 2) * 6 + HEADS * 6 * HIDDEN + 3 * HIDDEN * 13 + HIDDEN * VOCABULARY
        assert llama.flops(BATCH, SEQUENCE) == 6 * BATCH * SEQUENCE * (weights + 2 * SEQUENCE * HEADS * 6)
        vit = make("vit", SUMMA, grid)
        weights = 7 * (4 * HIDDEN**2 + 2 * HIDDEN * 13 + 2 * 7 * HIDDEN) + HIDDEN * (6 * 18 + VOCABULARY)
        assert vit.flops(BATCH) == 6 * BATCH * weights


@pytest.mark.serial
def test_gpt_starts_from_the_weights_of_gpt_2() -> None:
    with pla.Grid({"r": 1, "c": 1}) as grid:
        model = nn.GPT(
            vocab_size=500, max_position_embeddings=100, hidden_size=96, num_hidden_layers=8, num_attention_heads=4,
            tie_word_embeddings=False, scheme=SUMMA, grid=grid, seed=0,
        )  # fmt: skip
        for name, p in model.named_parameters():
            value, part = p.gather(), name.rpartition(".")[2]
            if value.ndim == 1 or part == "bias":
                assert np.all(value == ("norm" in name and part == "weight")), name
            else:
                std = 0.02 / 4 if name.endswith(("out.weight", "mlp.2.weight")) else 0.02
                assert abs(value.std() / std - 1) < 0.05, (name, value.std(), std)


def frequencies(width: int, base: float, scaling: dict[str, Any] | None) -> np.ndarray:
    """The angles a position of a model's attention, for the pairs of a head's features."""
    with pla.Grid({"r": 1, "c": 1}) as grid:
        model = nn.Llama(
            vocab_size=2, max_position_embeddings=2, hidden_size=width, num_hidden_layers=1, num_attention_heads=1,
            intermediate_size=1, rope_theta=base, rope_scaling=scaling, scheme=SUMMA, grid=grid,
        )  # fmt: skip
        found: np.ndarray = model.blocks[0].attention.rotary
        return found


@pytest.mark.serial
def test_rotary_positions_are_scaled_as_in_transformers() -> None:
    """llama3: turned often, as they are; seldom, by the factor; and between."""
    plain, scaled = frequencies(128, 5e5, None), frequencies(128, 5e5, LLAMA3)
    turns = 8192 * plain / (2 * math.pi)
    assert np.array_equal(scaled[turns > 4], plain[turns > 4])
    np.testing.assert_allclose(scaled[turns < 1], plain[turns < 1] / 8, rtol=1e-15)
    between = (turns >= 1) & (turns <= 4)
    smooth = (turns[between] - 1) / 3
    np.testing.assert_allclose(scaled[between], plain[between] * (smooth + (1 - smooth) / 8), rtol=1e-15)
    np.testing.assert_allclose(
        frequencies(8, 1e4, {"rope_type": "linear", "factor": 4.0}) * 4, frequencies(8, 1e4, None)
    )


@pytest.mark.serial
@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("gpt", {"n_head": 3}, "GPT has no argument 'n_head'; it has vocab_size, max_position"),
        ("gpt", {"hiden_act": "gelu"}, "hiden_act: hidden_act perhaps"),
        ("gpt", {"num_attention_heads": 3}, "hidden_size=20 .* num_attention_heads=3 .* 1, 2, 4, 5, 10, 20"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads=4 .* num_key_value_heads=3 .* 1, 2, 4"),
        ("bert", {"intermediate_size": 0}, "intermediate_size is a whole number of at least 1, not 0"),
        ("gpt", {"hidden_size": 20.0}, r"hidden_size is a whole number of at least 1, not 20\.0"),
        ("gpt", {"hidden_act": "gelo"}, "hidden_act is one of .*'gelu_new', .* not 'gelo'"),
        ("vit", {"patch_size": 4}, "6 × 9 do not fall into patches of 4 × 4"),
        ("gpt", {"recompute": "all"}, "'attention' or 'block', not 'all'"),
        ("llama", {"rope_scaling": {"rope_type": "yarn"}}, "'yarn' is not supported; it may be default, linear"),
        ("llama", {"rope_scaling": "linear"}, r"rope_scaling is an object such as .*'factor': 2\.0}, not 'linear'"),
        ("llama", {"rope_scaling": {"factor": 2.0}}, "rope_scaling has no rope_type, which is one of default"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "'linear' lacks factor"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0}}, "factor is a number above 0, not 0"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": "2"}}, "factor is a number above 0, not '2'"),
        ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, r"low_freq_factor is below .*1\.0 and 1\.0"),
        ("llama", {"rope_scaling": {**LLAMA3, "rope_theta": 5e5}}, r"500000\.0 of rope_scaling is not .* 10000\.0"),
        ("llama", {"rope_theta": -1.0}, r"rope_theta is a number above 0, not -1\.0"),
        ("gpt", {"attn_pdrop": 1.5}, "below 1, not 1.5"),
        ("gpt", {"embd_pdrop": "x"}, "embd_pdrop is a number of at least 0 and below 1, not 'x'"),
        ("gpt", {"layer_norm_eps": "x"}, "layer_norm_eps is a number of at least 0, not 'x'"),
        ("bert", {"layer_norm_eps": -1.0}, r"layer_norm_eps is a number of at least 0, not -1\.0"),
        ("vit", {"initializer_range": -1}, "initializer_range is a number of at least 0, not -1"),
        ("gpt", {"initializer_range": float("nan")}, "initializer_range is a number of at least 0, not nan"),
        ("llama", {"rms_norm_eps": -1.0}, r"rms_norm_eps is a number of at least 0, not -1\.0"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings is True or False, not 'yes'"),
        ("gpt", {"num_hidden_layers": True}, "num_hidden_layers is a whole number of at least 1, not True"),
        ("gpt", {"hidden_size": None}, "hidden_size is a whole number of at least 1, not None"),
        ("gpt", {"hidden_act": ["gelu"]}, r"hidden_act is one of .* not \['gelu'\]"),
        ("vit", {"dtype": "int8"}, "dtype is one of float64, .* not 'int8'"),
    ],
)
def test_settings_that_make_no_model_are_refused(kind: str, options: dict[str, Any], says: str) -> None:
    with pla.Grid({"r": 1, "c": 1}) as grid, pytest.raises(pla.ConfigError, match=says):
        make(kind, SUMMA, grid, **options)


@pytest.mark.serial
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_numpy_are_plain_numbers(kind: str) -> None:
    def of_numpy(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(of_numpy, value))
        return {int: np.int64, float: np.float32, bool: np.bool_}.get(type(value), lambda v: v)(value)

    with pla.Grid({"r": 1, "c": 1}) as grid:
        plain = make(kind, SUMMA, grid)
        model = make(kind, SUMMA, grid, **{name: of_numpy(value) for name, value in plain.config.items()})
        assert json.loads(json.dumps(model.config)).keys() == plain.config.keys()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert json.dumps(p.shape) == json.dumps(q.shape)
        same = loss_of(model).item() - loss_of(plain).item()
        assert abs(same) < 1e-6


@pytest.mark.parametrize("kind", ["gpt", "llama", "bert"])
def test_ids_that_do_not_fit_are_refused(kind: str, make_grid: Any, world: Any) -> None:
    model = make(kind, SUMMA, make_grid({"r": world.size, "c": 1}))
    with pytest.raises(ValueError, match=r"10 .* 9 positions"):
        model(placed(np.zeros((BATCH, 10), int), model.grid, model.ids_layout))
    with pytest.raises(ValueError, match=r"shape \[batch, sequence\], not \(5,\)"):
        model(placed(np.zeros(5, int), model.grid, pla.Layout(None)))
    if kind == "bert":
        ids = placed(np.zeros((BATCH, SEQUENCE), int), model.grid, model.ids_layout)
        with pytest.raises(TypeError, match=r"attention_mask is an array .* not a list"):
            model(ids, [[1] * SEQUENCE] * BATCH)
    with alone(world) as grid:
        model = make(kind, schemes.for_mode(None).SCHEME, grid)
        wrong = np.zeros((BATCH, SEQUENCE), int)
        wrong[3, 4] = VOCABULARY
        with pytest.raises(ValueError, match=r"11.*3, 4.*11"):
            model(placed(wrong, grid, model.ids_layout))


@pytest.mark.ranks(2, 4)
def test_ranks_outside_the_grid_make_every_call(make_grid: Any, world: Any) -> None:
    grid, found = make_grid({"r": 1, "c": world.size - 1}), []
    for kind in KINDS:
        model = make(kind, SUMMA, grid, p=0.1, recompute="block")
        found.append(steps(model, AdamW(model.parameters(), 0.01), 0, 2))
    assert all(theirs == found for theirs in world.share(found))
