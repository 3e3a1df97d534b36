"""Embeddings, norms, gated units, patches and classifiers: the same under every scheme as on one rank."""

from __future__ import annotations

import inspect
from functools import partial

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Layout, nn, schemes
from parlinalg.autograd import check_gradients, ops
from parlinalg.comm import SingleComm
from parlinalg.grid import Grid
from parlinalg.nn import activations
from parlinalg.nn.activations import ACTIVATIONS
from tests.training import every_scheme, sizes_for

SERIAL = schemes.for_mode(None).SCHEME
VOCABULARY, HIDDEN, BATCH, SEQUENCE = 11, 6, 5, 7
#: Of a GPT.
SIZES = {
    "vocab_size": 5,
    "max_position_embeddings": 4,
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


class Everything(nn.Module):
    """All the layers on one residual stream, and those of images."""

    def __init__(self, scheme, grid):
        super().__init__()
        wide, here = {"dtype": "float64", "std": 1.0}, (scheme, grid)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, *here, **wide)
        self.positions = nn.Positions(9, HIDDEN, *here, **wide)
        self.norm = nn.LayerNorm(HIDDEN, *here, dtype="float64")
        self.rms = nn.RMSNorm(HIDDEN, *here, dtype="float64")
        self.mlps = nn.ModuleDict({a: nn.MLP((HIDDEN, 7, HIDDEN), *here, a, dtype="float64") for a in ACTIVATIONS})
        self.patches = nn.PatchEmbedding((4, 6), 2, 3, HIDDEN, *here, **wide)
        self.first = nn.Classifier(HIDDEN, 5, *here, dtype="float64")
        self.mean = nn.Classifier(HIDDEN, 5, *here, "mean", dtype="float64")
        self.initialize(1)

    def losses(self, ids, targets, images, labels):
        x = self.positions(self.embedding(ids), 1)
        x = x + self.mlps["swiglu"](self.norm(x))
        for mlp in self.mlps.values():
            x = x + mlp(self.rms(x))
        of_text = ops.cross_entropy(self.embedding.logits(x), targets)
        y = self.norm(self.patches(images))
        of_images = ops.cross_entropy(self.first(y), labels) + ops.cross_entropy(self.mean(y), labels)
        return of_text, of_images


def values_and_gradients(scheme, grid):
    random = np.random.default_rng(0)
    model, tokens = Everything(scheme, grid), Layout(*scheme.inner.dims[:2])
    given = [
        (random.integers(0, VOCABULARY, (BATCH, SEQUENCE)), tokens),
        (random.integers(0, VOCABULARY, (BATCH, SEQUENCE)), tokens),
        (random.normal(size=(BATCH, 3, 4, 6)), model.patches.images_layout),
        (random.integers(0, 5, BATCH), model.first.targets_layout),
    ]
    text, images = model.losses(*(pla.distribute(a, grid, layout) for a, layout in given))
    (text + images).backward()
    return {"text": text.item(), "images": images.item()} | {
        name: p.grad.gather() for name, p in model.named_parameters()
    }


@pytest.fixture(scope="module")
def serial(backend):
    """What one rank finds."""
    return values_and_gradients(SERIAL, Grid({"axis": 1}, comm=SingleComm(), backend=backend))


@pytest.mark.parametrize("name", every_scheme())
def test_every_scheme_gives_what_one_rank_does(name, make_grid, world, serial, full):
    scheme = every_scheme()[name]
    for sizes in sizes_for(scheme, world.size, 99 if full else 1):
        found = values_and_gradients(scheme, make_grid(sizes))
        for what, right in serial.items():
            error = np.abs(found[what] - right).max() / np.abs(right).max()
            assert error <= 1e-12, f"{what}: a relative difference of {error:.2g}"


def test_ranks_outside_the_grid_make_every_call(make_grid, world, serial):
    found = values_and_gradients(every_scheme()["2d"], make_grid({"r": 1, "c": max(1, world.size - 1)}))
    assert abs(found["text"] - serial["text"]) <= 1e-12 * abs(serial["text"])


@pytest.mark.serial
def test_swiglu_and_gelu_are_those_of_their_papers():
    with Grid({"axis": 1}) as grid:
        x = np.random.default_rng(1).normal(size=(4, 3))
        given = pla.Tensor(pla.distribute(x, grid, Layout(None, None)))
        for activation in ("swiglu", "gelu_tanh"):
            mlp = nn.MLP((3, 5, 2), SERIAL, grid, activation, dtype="float64", seed=1)
            state = mlp.state_dict()
            z = np.tensordot(x, state["0.weight"], 1) + state["0.bias"]
            if activation == "swiglu":
                z = z[..., 0] / (1 + np.exp(-z[..., 0])) * z[..., 1]
            else:
                z = z / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
            np.testing.assert_allclose(mlp(given).gather(), z @ state["2.weight"] + state["2.bias"], rtol=1e-12)


@pytest.mark.serial
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_have_their_derivatives(name):
    with Grid({"axis": 1}) as grid:
        module = nn.activation(name)
        z = np.random.default_rng(2).normal(size=(4, 3, 2) if module.gated else (4, 6))
        check_gradients(module, [pla.Tensor(pla.distribute(z, grid, Layout.replicated(z.ndim)), requires_grad=True)])


@pytest.mark.serial
def test_an_activation_of_ones_own_serves_models_by_its_name(monkeypatch):
    monkeypatch.setattr(activations, "ACTIVATIONS", dict(ACTIVATIONS))

    @activations.register("squared_relu")
    class SquaredReLU(activations.Activation):
        def forward(self, x):
            y = ops.relu(x)
            return y * y

    with Grid({"axis": 1}) as grid:
        mlp = nn.MLP((3, 5, 2), SERIAL, grid, "squared_relu", dtype="float64", seed=1)
        state, x = mlp.state_dict(), np.random.default_rng(1).normal(size=(4, 3))
        z = np.maximum(x @ state["0.weight"] + state["0.bias"], 0) ** 2
        found = mlp(pla.Tensor(pla.distribute(x, grid, Layout(None, None)))).gather()
        np.testing.assert_allclose(found, z @ state["2.weight"] + state["2.bias"], rtol=1e-12)
        model = nn.GPT(**SIZES, scheme=SERIAL, grid=grid, hidden_act="squared_relu")
        assert any(isinstance(m, SquaredReLU) for m in model.modules())
        with pytest.raises(pla.ConfigError, match=r"hidden_act is one of .*'squared_relu'.*, not 'cubed'"):
            nn.GPT(**SIZES, scheme=SERIAL, grid=grid, hidden_act="cubed")


#: The arguments before `scheme` and `grid`, of every layer and model that takes them.
PLACED = {
    "Attention": (6, 2),
    "BatchNorm1d": (4,),
    "BatchNorm2d": (4,),
    "BertEncoder": {"type_vocab_size": 2},
    "Classifier": (6, 5),
    "Conv2d": (3, 4, 3),
    "Embedding": (5, 6),
    "GPT": {"num_local_experts": 2},
    "LayerNorm": (6,),
    "Linear": (6, 5),
    "Llama": {"intermediate_size": 4},
    "MLP": ((6, 5, 4),),
    "Mixtral": {"intermediate_size": 4},
    "MixtureOfExperts": (6, 5, 2),
    "PatchEmbedding": ((4, 6), 2, 3, 6),
    "Positions": (5, 6),
    "Qwen2Moe": {"intermediate_size": 4},
    "RMSNorm": (6,),
    "ResNet": ("basic", (1,)),
    "TransformerBlock": (6, 2, 8),
    "ViT": {"image_size": 4, "patch_size": 2},
}


@pytest.mark.serial
@pytest.mark.parametrize("name", PLACED)
def test_schemes_by_name(name):
    """A scheme is itself or its name; another value, or a grid without its axes, is said at once."""
    arguments, kind = PLACED[name], getattr(nn, name)
    if isinstance(arguments, dict):
        sizes = {k: v for k, v in SIZES.items() if name != "ViT" or k.startswith(("hidden", "num"))}
        arguments, options = (), sizes | arguments
    else:
        options = {}
    with Grid({"r": 1, "c": 1}) as grid:
        made = kind(*arguments, scheme="2d", grid=grid, **options).initialize(1)
        same = kind(*arguments, scheme=schemes.for_mode("2d").SCHEME, grid=grid, **options).initialize(1)
        assert repr(made) == repr(same)
        assert getattr(made, "scheme", None) == getattr(same, "scheme", None)
        assert [p.layout for p in made.parameters()] == [p.layout for p in same.parameters()]
        for wrong in ("summa", None, schemes.for_mode("2d")):
            with pytest.raises(pla.ConfigError, match=f"^{name}: a scheme is .*'2d'.*; not .*{str(wrong)[:9]}"):
                kind(*arguments, scheme=wrong, grid=grid, **options)
        with pytest.raises(pla.ConfigError, match=f"^{name}: the scheme '1d' is for a grid with the axes t; .* r, c$"):
            kind(*arguments, scheme="1d", grid=grid, **options)
        with pytest.raises(pla.ConfigError, match=f"^{name}: grid is a Grid, .*, not None"):
            kind(*arguments, scheme="2d", grid=None, **options)


@pytest.mark.serial
def test_all_that_take_schemes_are_listed():
    modules = [k for k in map(partial(getattr, nn), nn.__all__) if isinstance(k, type) and issubclass(k, nn.Module)]
    takes = [k.__name__ for k in modules if any("scheme" in inspect.signature(c).parameters for c in k.__mro__[:-1])]
    assert sorted(PLACED) == sorted(takes)


@pytest.mark.serial
def test_what_is_wrong_is_said():
    with Grid({"axis": 1}) as grid:
        here, ids = (SERIAL, grid), pla.distribute(np.array([[0, 4]]), grid, Layout(None, None))
        embedding = nn.Embedding(4, 6, *here).initialize(1)
        with pytest.raises(ValueError, match=r"id 4 at \(0, 1\).*vocabulary of 4"):
            embedding(ids)
        x = pla.Tensor(pla.zeros((1, 5, 6), grid, Layout(None, None, None)))
        with pytest.raises(ValueError, match="5 tokens from position 0 is longer than the 4 positions"):
            nn.Positions(4, 6, *here).initialize(1)(x)
        with pytest.raises(pla.ConfigError, match="10 × 8 do not fall into patches of 4 × 4"):
            nn.PatchEmbedding((10, 8), 4, 3, 6, *here)
        images = pla.zeros((2, 3, 8, 4), grid, Layout(None, None, None, None))
        with pytest.raises(ValueError, match=r"\[batch, 3, 8, 8\], not \(2, 3, 8, 4\)"):
            nn.PatchEmbedding(8, 4, 3, 6, *here).initialize(1)(images)
        with pytest.raises(pla.ConfigError, match="'first' or 'mean', not 'max'"):
            nn.Classifier(6, 5, *here, "max")
        with pytest.raises(pla.LayoutError, match=r"\[batch, sequence, hidden\]"):
            nn.Classifier(6, 5, *here).initialize(1)(pla.Tensor(pla.zeros((2, 6), grid, Layout(None, None))))
