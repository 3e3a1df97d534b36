"""Random small models of `transformers`, and what PyTorch computes with them.

PyTorch is imported on rank 0 alone, which leaves what it finds in a folder for all; and on 1 and 4 ranks only.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import BACKEND, RANKS

MISSING = [name for name in ("torch", "transformers") if find_spec(name) is None]
# The runs on one rank under mpiexec and on the stand-in for CuPy would show nothing more.
collect_ignore_glob = ["test_*.py"] if RANKS == 1 or BACKEND == "cupy" else []


@pytest.fixture(scope="session")
def peer_folder(world: Any) -> Iterator[Path]:
    """A folder that all ranks see."""
    if MISSING:
        pytest.skip(f"cannot be had here: {' and '.join(MISSING)}; pip install 'parlinalg[peers]'")
    with tempfile.TemporaryDirectory() as made:
        yield Path(world.share(made)[0])
        world.barrier()


@pytest.fixture(scope="session")
def torch(world: Any, peer_folder: Path) -> Any:
    """The module, on rank 0; None elsewhere."""
    if world.rank:
        return None
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    return torch
