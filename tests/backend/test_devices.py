"""Which GPU a rank takes, and what is said where there is none; on the stand-in, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launching import ROOT, child_environment

pytestmark = pytest.mark.serial

SELECT = "from parlinalg.backend import select_backend; b = select_backend({name!r}, {rank}); print(b.name, b.device)"


def run(code: str, standin: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    given = child_environment({"PARLINALG_MPI": "0", **env})
    given["PYTHONPATH"] = f"{ROOT}:{ROOT / 'tests' / 'standin'}" if standin else str(ROOT)
    return subprocess.run(
        [sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=50, check=False
    )


@pytest.mark.parametrize(("rank", "gpus", "device"), [(0, 2, 0), (1, 2, 1), (2, 2, 0), (5, 3, 2), (3, 1, 0)])
def test_ranks_take_the_gpus_in_turn(rank: int, gpus: int, device: int) -> None:
    done = run(SELECT.format(name="auto", rank=rank), STANDIN_GPUS=str(gpus))
    assert done.stdout.startswith(f"cupy GPU {device} "), done.stderr


def test_visible_devices_are_honoured() -> None:
    done = run(SELECT.format(name="auto", rank=3), STANDIN_GPUS="4", CUDA_VISIBLE_DEVICES="2,0")
    assert done.stdout.startswith("cupy GPU 1 "), done.stderr  # CUDA numbers the visible ones anew


def test_auto_without_a_gpu_is_numpy() -> None:
    assert run(SELECT.format(name="auto", rank=0), CUDA_VISIBLE_DEVICES="").stdout.split() == ["numpy", "CPU"]


def test_cupy_without_a_gpu_says_why() -> None:
    done = run(SELECT.format(name="cupy", rank=0), CUDA_VISIBLE_DEVICES="")
    assert "backend 'cupy' cannot be used: CUDA answers cudaErrorNoDevice" in done.stderr
    assert "backend='numpy' always can" in done.stderr


def test_cupy_not_installed_says_what_to_install() -> None:
    hide = (
        "import importlib.util as u; r = u.find_spec; u.find_spec = lambda n, *a: None if n == 'cupy' else r(n, *a)\n"
    )
    done = run(hide + SELECT.format(name="cupy", rank=0), standin=False)
    assert "pip install 'parlinalg[cupy13]'" in done.stderr
    assert run(hide + SELECT.format(name="auto", rank=0), standin=False).stdout.split() == ["numpy", "CPU"]


def test_a_broken_cupy_says_why(tmp_path: Path) -> None:
    (tmp_path / "cupy.py").write_text("raise ImportError('libcuda.so.1 is missing')")
    hide = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    done = run(hide + SELECT.format(name="cupy", rank=0), standin=False)
    assert "CuPy cannot be imported (libcuda.so.1 is missing)" in done.stderr
    assert run(hide + SELECT.format(name="auto", rank=0), standin=False).stdout.split() == ["numpy", "CPU"]
