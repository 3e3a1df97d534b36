"""The plugin in a project of a user's own: the guide's files, and others, in a folder outside the repository."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.launching import ROOT, launch
from tests.test_docs import BLOCK

pytestmark = [pytest.mark.serial, pytest.mark.timeout(200)]

GUIDE = ROOT / "docs" / "guide" / "testing.md"
PLUGIN = 'pytest_plugins = ["parlinalg.testing"]\n'
WITHOUT = ("-p", "no:pytest_mpi", "-p", "no:zarr")  # others that import NumPy


def run(folder: Path, ranks: int, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder; the warnings that the plugin might cause are errors."""
    arguments = ["-m", "pytest", "-p", "no:cacheprovider", "-W", "error", "--color=no", *options]
    return launch(ranks, arguments, env={"PARLINALG_TEST_GRACE": "2", **env}, timeout=150, cwd=folder)


@pytest.fixture
def guide(tmp_path: Path) -> Path:
    for block in BLOCK.findall(GUIDE.read_text()):
        (tmp_path / block.partition("\n")[0].removeprefix("# ")).write_text(block)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conftest.py", "test_gram.py"]
    return tmp_path


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [(), WITHOUT], ids=["pytest-mpi", "alone"])
def test_the_guides_tests(guide: Path, options: tuple[str, ...]) -> None:
    plain = run(guide, 0, "-rs", *options)
    assert "4 passed, 3 skipped" in plain.stdout, plain.stdout + plain.stderr  # grids of one rank: 1, 1×1 and 1×1×1
    assert "need --with-mpi option to run" in plain.stdout
    done = run(guide, 4, "--with-mpi", "-v", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("parlinalg: 4 ranks, which agree on every outcome") == 1, "rank 0 alone prints"
    assert " 23 passed" in done.stdout  # ten grids of one to three axes, twice, and three of two
    for name in ("test_gram[4]", "test_gram[2x2]", "test_gram[2x1x2]", "test_gradients[2x2]", "test_ranks_differ[4x1]"):
        assert done.stdout.count(f"::{name} PASSED") == 1, name


def test_the_markers_of_pytest_mpi(tmp_path: Path) -> None:
    """They do the same where pytest-mpi is loaded and where it is not, and however this plugin is loaded."""
    (tmp_path / "test_marks.py").write_text(
        "import pytest\n"
        "@pytest.mark.mpi\ndef test_any(): pass\n"
        "@pytest.mark.mpi(min_size=2)\ndef test_two(): pass\n"
        "@pytest.mark.mpi(min_size=3)\ndef test_three(): pass\n"
        "@pytest.mark.mpi_skip\ndef test_skip(world): assert world.size == 1\n"
        "@pytest.mark.mpi_xfail\ndef test_xfail(world): assert world.size == 1\n"
        "def test_plain(): pass\n"
    )
    for loaded in (WITHOUT, ()):
        done = run(tmp_path, 2, "--with-mpi", "-rA", "-p", "parlinalg.testing", *loaded)
        assert "3 passed, 2 skipped, 1 xfailed" in done.stdout, done.stdout + done.stderr
    only = run(tmp_path, 0, "--only-mpi", "-p", "parlinalg.testing", *WITHOUT)
    assert "1 passed, 5 skipped" in only.stdout, only.stdout
    neither = run(tmp_path, 0, "-p", "parlinalg.testing", *WITHOUT)
    assert "3 passed, 3 skipped" in neither.stdout, neither.stdout


def test_a_failure_on_one_rank_is_one_on_all(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "test_fails.py").write_text(
        "import numpy as np, parlinalg as pla\n"
        "from parlinalg.testing import assert_equal_to_serial\n"
        "def test_block(grid):\n"
        "    A = pla.distribute(np.arange(12.0), grid, pla.Layout(grid.axes))\n"
        "    if grid.rank == 2 and len(grid.axes) == 2:\n"
        "        A.block[1] += 1e-6\n"
        "    assert_equal_to_serial({'A': A}, {'A': np.arange(12.0)})\n"
        "def test_alone(make_grid, world):\n"
        "    grid = make_grid({'a': world.size})\n"
        "    assert grid.rank != 1, 'this is rank 1'\n"
    )
    done = run(tmp_path, 4, "--with-mpi", "-rA", *WITHOUT)
    assert done.returncode not in (0, 124), done.stdout + done.stderr
    assert "4 failed, 7 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("= short test summary info =") == 1, "rank 0 alone prints"
    assert (
        "on rank 2 of 4:\nE       the result['A'] differs by 1e-06 at index (7,): 7.000001 instead of 7" in done.stdout
    )
    assert "on rank 1 of 4:\n" in done.stdout
    assert "AssertionError: this is rank 1" in done.stdout
    one = run(tmp_path, 0, *WITHOUT)
    assert "4 passed" in one.stdout, one.stdout


def test_a_failure_that_others_wait_for_is_named(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "test_waits.py").write_text(
        "def test_waits(world):\n    assert world.rank != 1, 'this is rank 1'\n    world.barrier()\n"
    )
    done = run(tmp_path, 4, "--with-mpi")
    assert done.returncode not in (0, 124), done.stdout + done.stderr
    assert "test_waits.py::test_waits failed on rank 1 of 4; ranks 0, 2, 3 did not come to its end" in done.stderr
    assert "this is rank 1" in done.stderr


def test_who_does_not_ask_for_the_plugin_gets_none_of_it(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "import sys\ndef test_other(): assert not {'parlinalg', 'mpi4py', 'numpy'} & set(sys.modules)\n"
    )
    done = run(tmp_path, 0, *WITHOUT)
    assert "1 passed" in done.stdout, done.stdout
    assert "parlinalg" not in run(tmp_path, 0, "--fixtures", *WITHOUT).stdout


def test_asking_for_the_plugin_starts_no_mpi_on_one_rank(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PLUGIN)
    (tmp_path / "test_one.py").write_text(
        "import sys\ndef test_one(grid, serial_grid, mpi_tmp_path): assert 'mpi4py.MPI' not in sys.modules\n"
    )
    done = run(tmp_path, 0, *WITHOUT)
    assert "3 passed" in done.stdout, done.stdout


KEPT = """
import sys
import numpy as np
from parlinalg.testing import array_memory

with array_memory() as memory:
    np.kept, sys.kept = np.ones(100_000), np.ones(100)
    before = memory.held
    del np.kept
    assert before - memory.held == 800_000
"""


def test_arrays_that_outlive_their_count_are_freed_at_the_end() -> None:
    """Then no function of Python's can be called, which frees them before."""
    assert launch(0, ["-c", KEPT], timeout=50).returncode == 0
