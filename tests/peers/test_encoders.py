"""BERT and ViT with the weights of `transformers` compute what `transformers` computes."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from parlinalg.nn.pretrained.load import Found
from parlinalg.nn.pretrained.settings import Settings
from parlinalg.nn.pretrained.tensorfile import read_header
from tests.peers import tables
from tests.peers.encoders import ENCODERS, inputs, make
from tests.peers.test_transformers import near
from tests.training import sizes_for

pytestmark = [pytest.mark.ranks(1, full=(2, 4)), pytest.mark.timeout(120)]


@pytest.mark.parametrize(("kind", "name"), [("bert", "2d"), ("vit", "2d"), ("bert", "sequence"), ("vit", "3d")])
def test_results_and_gradients(kind, name, torch, on_root, peer_folder, make_grid, world):
    path = peer_folder / f"{kind}-{name}.safetensors"
    on_root(lambda: make(torch, kind, path))
    scheme, config = schemes.discover()[name].SCHEME, ENCODERS[kind]
    grid = make_grid(sizes_for(scheme, world.size, 1)[0])
    model = (nn.BertEncoder if kind == "bert" else nn.ViT)(**config, scheme=scheme, grid=grid, dtype="float64")
    places = getattr(tables, kind)(config)
    model.initialize(values=Found(Settings({}, path), config, places, read_header(path)).make)
    given, want = inputs(kind), np.load(path.with_suffix(".npz"))
    weights = given.pop("weights")
    layout = model.ids_layout if kind == "bert" else model.images_layout
    args = [pla.distribute(a, grid, layout) for a in given.values()]
    result = model(args[0], args[2], args[1]) if kind == "bert" else model(args[0])
    near(result.gather(), want["result"], 1e-10)
    (result * pla.Tensor(pla.distribute(weights, grid, result.layout))).sum().backward()
    for parameter, gradient in model.named_parameters():
        held = gradient.grad.gather()
        for place in places[parameter]:
            near(place.stored(held), want[f"grad {place.tensor}"], 1e-10)
