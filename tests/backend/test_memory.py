"""Freed memory is used again, unless the user has said what malloc does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from parlinalg.backend import memory

pytestmark = pytest.mark.serial

PROGRAM = """
import resource, numpy as np, parlinalg as pla
with pla.Grid({"one": 1}):
    def steps(n):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(n):
            a = np.ones(1 << 23)  # 64 MiB
            b = a + 1
            del a, b
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    steps(2)
    print(steps(3))
"""


@pytest.mark.skipif(memory._glibc() is None, reason="cannot be had here: glibc")
@pytest.mark.parametrize("users", [False, True])
def test_large_arrays_are_new_memory_once(users: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in memory.SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if users:
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 20))
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=50, check=True)
    least = 3 * 2 * (64 << 20) // (2 << 20)  # huge pages of 2 MiB; with small ones there are more
    assert (int(done.stdout) >= least) == users
