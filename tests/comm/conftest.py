"""Fixtures of the communication tests, which run on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from parlinalg.backend import Backend, select_backend
from parlinalg.comm import Comm, open_comm

BACKEND: Backend = select_backend("numpy" if os.environ.get("PARLINALG_TEST_BACKEND", "numpy") == "numpy" else "cupy")
put, got, zeros = BACKEND.from_host, BACKEND.to_host, BACKEND.zeros

REAL = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
NUMBERS = [np.dtype(t) for t in [*REAL, np.complex64, np.complex128, *INTEGERS]]
ORDERED = [np.dtype(t) for t in [*REAL, *INTEGERS, np.bool_]]
DTYPES = [*NUMBERS, np.dtype(np.bool_)]
UNSPLIT = {"test_share", "test_a_rank_writes_to_itself"}  # tests of what is never split


@pytest.fixture(scope="session")
def comm() -> Comm:
    return open_comm()


@pytest.fixture(params=[None, 7], ids=["whole", "split at 7"])
def limit(request: pytest.FixtureRequest, tune: Any) -> None:
    """Run the test with messages of any length, and with messages split into pieces."""
    if request.param is not None:
        tune(ranks=2, must=request.node.originalname not in UNSPLIT, MAX_COUNT=request.param)


@pytest.fixture(params=[True, False], ids=["wait", "nowait"])
def wait(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=["even", "uneven", "zeros first", "nothing"])
def counts(request: pytest.FixtureRequest, comm: Comm) -> list[int]:
    """One count a rank."""
    return {
        "even": [5] * comm.size,
        "uneven": [(3 * r + 1) % 7 + 2 for r in range(comm.size)],
        "zeros first": [0 if r % 2 == 0 else 9 + r for r in range(comm.size)],
        "nothing": [0] * comm.size,
    }[request.param]


@pytest.fixture
def sub(comm: Comm) -> Iterator[Comm]:
    """All ranks in reverse order."""
    made = comm.sub(range(comm.size)[::-1], ("r",))
    yield made
    made.free()


def values(n: int, rank: int, dtype: np.dtype) -> np.ndarray:
    """Small whole numbers, different on every rank, whose sums over the ranks every dtype holds exactly."""
    numbers = (np.arange(n) * 3 + rank * 5) % 7
    if dtype.kind == "c":
        return (numbers + 1j * ((numbers + rank) % 4)).astype(dtype)
    return (numbers % 2 == 1) if dtype.kind == "b" else numbers.astype(dtype)
