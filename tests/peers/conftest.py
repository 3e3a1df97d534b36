"""Random small models of `transformers`, and what PyTorch computes with them.

PyTorch is imported on rank 0 alone, which leaves what it finds in a folder for all; and on 1 and 4 ranks only.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
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
def on_root(world: Any, peer_folder: Path) -> Callable[[Callable[[], object]], None]:
    """`on_root(work)`: rank 0 works, and the others sleep: ranks that wait in MPI would take its core."""
    calls = itertools.count()

    def run(work: Callable[[], object]) -> None:
        done = peer_folder / f"done-{next(calls)}"
        if world.rank == 0:
            try:
                work()
            finally:
                done.touch()
        while not done.exists():
            time.sleep(0.02)
        world.barrier()

    return run


@pytest.fixture(scope="session")
def torch(on_root: Any) -> Any:
    """The module, on rank 0; None elsewhere."""
    modules: list[Any] = []
    on_root(lambda: modules.append(_imported()))
    return modules[0] if modules else None


def _imported() -> Any:
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        import transformers

    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    return torch
