"""A training that was saved goes on on any grid as if it had not stopped: 10 more losses, in float64, dropout on."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train import checkpoints as cp

# What is saved, and by what it is loaded: ranks, `parallel`, stage of ZeRO.
Grid = tuple[int, dict[str, Any], int]
SERIAL: Grid = (1, {}, 0)
FROM: dict[int, Grid] = {
    2: (2, {"data": 2}, 2),
    4: (4, {"data": 2, "tensor": {"size": 2, "mode": "1d"}}, 1),
    8: (8, {"data": 4, "tensor": {"size": 2, "mode": "1d"}}, 1),
}
TO: dict[int, list[Grid]] = {
    2: [SERIAL, (2, {"tensor": {"mode": "2d", "shape": (1, 2)}}, 0)],
    4: [SERIAL, (4, {"tensor": {"mode": "2d"}}, 0), (3, {"data": 3}, 3)],
    8: [SERIAL, (4, {"tensor": {"mode": "2d"}}, 0), (8, {"tensor": {"size": 8, "mode": "3d"}}, 0), (8, {"data": 8}, 3)],
}


@pytest.fixture(scope="module")
def tale(world: Any) -> Iterator[Path]:
    made = tempfile.mkdtemp(prefix="parlinalg-") if world.rank == 0 else ""
    path = Path(world.share(made)[0]) / "tale.txt"
    if world.rank == 0:
        path.write_text(cp.TEXT)
    world.barrier()
    yield path
    if made:
        shutil.rmtree(made, ignore_errors=True)


@pytest.mark.ranks(2, 4, 8)
def test_a_training_goes_on_on_any_grid(tale: Path, folder: Path, world: Any, backend: str, full: bool) -> None:
    ranks, parallel, zero = FROM[world.size]
    settings, more = cp.config(tale, parallel, zero), 10 if full else 3
    want = cp.saved(world, settings, folder, backend, more)
    assert cp.gone_on(world, settings, folder, backend, more) == want, "the same grid goes on bit for bit"
    for ranks, parallel, zero in TO[world.size]:
        comm = cp.part_of(world, ranks)
        if comm is not None:
            cp.close(cp.gone_on(comm, cp.config(tale, parallel, zero), folder, backend, more), want)
        world.barrier()
