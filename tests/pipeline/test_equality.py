"""Every synchronous schedule on every kind of grid gives the losses of one rank."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pipeline.running import SYNCHRONOUS, differs, pipeline, serial


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_two_stages(name: str, world: Any, backend: str) -> None:
    layers = 3
    want, norms = serial(world, layers)
    with pipeline(world, backend, name, {"pipeline": 2, "data": 1}, 2, layers) as p:
        found = [p.step(step) for step in range(10)]
    assert not differs([f[0] for f in found], want)
    assert not differs([f[1] for f in found], norms)
