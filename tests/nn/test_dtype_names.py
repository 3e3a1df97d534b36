"""Dtypes by name: a configuration's `model_dtype` is what layers take, "bfloat16" too."""

from __future__ import annotations

from typing import Any

import pytest

import parlinalg as pla
from parlinalg import nn


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_layers_take_the_name(precision: str, world: Any, backend: str) -> None:
    with pla.launch({"precision": precision}, world, backend) as mesh:
        name, place = mesh.config.model_dtype, (mesh.scheme, mesh.grid)
        layers = [
            nn.Linear(3, 4, *place, dtype=name), nn.MLP((3, 4, 2), *place, dtype=name),
            nn.LayerNorm(4, *place, dtype=name), nn.RMSNorm(4, *place, dtype=name),
            nn.Embedding(5, 4, *place, dtype=name),
        ]  # fmt: skip
        for layer in layers:
            assert {p.dtype.name for p in layer.initialize(0).parameters()} == {name}
        assert pla.zeros((2, 3), mesh.grid, pla.Layout(None, None), name).dtype.name == name
