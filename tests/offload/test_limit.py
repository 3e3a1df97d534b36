"""A model whose optimizer states need four times the memory limit trains under it, to the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: One core; no address space that is only reserved, as arenas are: `ulimit -v` counts it; no numba, which takes some.
ALONE = {"MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PARLINALG_MPI": "0",
         "PARLINALG_COMPILED": "0"}  # fmt: skip


def trained(path, mode, **options):
    told = subprocess.run(
        [sys.executable, str(ROOT / "bench/pieces/offload_train.py"),
         json.dumps({"mode": mode, "path": str(path), "hidden": 192, "layers": 20, "sequence": 8, "steps": 2,
                     "tile": 1 << 18, **options})],
        env={**os.environ, **ALONE, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    return json.loads(told.stdout)


@pytest.mark.one_in(3)
@pytest.mark.serial
@pytest.mark.timeout(280)
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="cannot be had here: no /proc")
def test_states_of_four_times_the_limit(tmp_path):
    whole = trained(tmp_path, "memory")
    limit = whole["states"] // 4
    assert "MemoryError" in trained(tmp_path, "memory", limit=limit)["failed"]
    limited = trained(tmp_path, "disk", limit=limit)
    assert (limited["losses"], limited["digest"]) == (whole["losses"], whole["digest"])
    assert limited["states"] == whole["states"]
    assert not list(tmp_path.iterdir())
