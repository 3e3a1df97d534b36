"""`parlinalg doctor --gpu` on the stand-in for CuPy, and what it compares."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

import numpy as np
import pytest

from parlinalg import schemes
from parlinalg.backend import cuda, select_backend
from parlinalg.backend.kernels import activations
from parlinalg.cli import gpu
from tests.launching import ROOT, launch

pytestmark = [pytest.mark.serial, pytest.mark.timeout(250)]
PARTS = ("devices", "rates", "kernels", "collectives", "products", "training")


def doctor(**env: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join((str(ROOT / "tests" / "standin"), str(ROOT)))
    arguments = ["-m", "parlinalg", "doctor", "--gpu", "--rows", "8"]
    return launch(0, arguments, env={"PYTHONPATH": paths, **env}, timeout=240)


@pytest.mark.one_in(5)
def test_doctor_examines_gpus_on_the_ranks_that_it_starts() -> None:
    done = doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all checks passed" in done.stdout, done.stdout
    assert re.findall(r"^(\w+) {3}", done.stdout, re.MULTILINE) == list(PARTS)
    for dtype in cuda.DTYPES:
        assert f"{dtype} " in done.stdout
    for check in gpu.kernel_checks(8):
        assert len(re.findall(rf"^ +{check.name} +[\d.]+ roundings +[\d.]+ ms", done.stdout, re.MULTILINE)) == 4
    for scheme in schemes.discover():
        assert re.search(rf"{scheme}, [\d×]+ +losses within \d", done.stdout), scheme
    assert "NCCL                              not tried: " in done.stdout


def test_without_a_gpu_it_says_what_it_would_do() -> None:
    done = doctor(STANDIN_GPUS="0")
    assert done.returncode == 0, done.stderr
    assert "no GPU can be used here" in done.stdout
    assert re.findall(r"^  (\w+) {2}", done.stdout, re.MULTILINE) == list(PARTS)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_numpy_itself_is_within_the_roundings_allowed(dtype: str) -> None:
    for check in gpu.kernel_checks(33, 70):
        error, seconds, size = gpu.error_of(check, select_backend("numpy"), dtype)
        assert error <= gpu.ALLOWED[dtype] / 4, check.name
        assert seconds > 0
        assert size > 0


def test_a_kernel_that_computes_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = activations.gelu, []

    def wrong(x: Any, approximate: bool) -> Any:
        calls.append(x.dtype)
        return right(x, approximate) * x.dtype.type(1.0001 if x.dtype == np.float32 else 1)

    monkeypatch.setattr(activations, "gelu", wrong)
    rows = [row for row in gpu.kernel_rows(select_backend("numpy"), 33) if row.problem]
    assert [row.what.strip() for row in rows] == ["gelu, tanh", "gelu"]
    assert all("roundings of float32, of which" in row.problem for row in rows)
    assert calls


@pytest.mark.parametrize("op", list(gpu.CALLS))
def test_wrong_values_of_a_collective_are_seen(op: str, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = select_backend("numpy")
    assert gpu.collective_is_right(world, backend, op, "int64")
    monkeypatch.setattr(type(backend), "to_host", lambda self, block: np.asarray(block) + 1)
    assert not gpu.collective_is_right(world, backend, op, "int64")
