"""What the tests of training share."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom … " * 6


@pytest.fixture
def tale(folder: Path, world: Any) -> Path:
    """A folder with `tale.txt`, one for all ranks."""
    if world.rank == 0:
        (folder / "tale.txt").write_text(TEXT)
    world.barrier()
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pictures: they take longer than the trainings."""
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)


@pytest.fixture(scope="session")
def seven(world: Any) -> Iterator[Path]:
    """A file of 200 samples of 13 features in 7 classes, in a directory of its own; one for all ranks."""
    made = tempfile.mkdtemp(prefix="parlinalg-") if world.rank == 0 else ""
    path = Path(world.share(made)[0]) / "seven.npz"
    if world.rank == 0:
        random = np.random.default_rng(7)
        y = np.arange(200) % 7
        np.savez(path, x=random.normal(size=(200, 13)) + 0.5 * random.normal(size=(7, 13))[y], y=y)
    world.barrier()
    yield path
    if made:
        shutil.rmtree(made, ignore_errors=True)
