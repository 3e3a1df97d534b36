"""The programs of the numerical tour print the same on any number of ranks: no number differs by 1e-12 of itself."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.launching import ROOT, launch

pytestmark = [pytest.mark.serial, pytest.mark.timeout(150)]

PROGRAMS = {
    "conjugate_gradients": "257", "kmeans": "1001 3 7", "pagerank": "211", "heat": "47 31 60", "kernel": "199",
    "large_files": ". 1003 13", "ridge": "97", "gaussian_process": "97", "pca": "401 17 3",
}  # fmt: skip
RUN = """
import runpy, sys
import parlinalg as pla
for line in sys.argv[1:]:
    sys.argv = line.split()
    pla.print0("==", sys.argv[0], flush=True)
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:e[-+]?\d+)?")


def printed(ranks: int, folder: Path) -> list[str]:
    """The lines that all programs print, one program after the other on the same ranks (0: without MPI)."""
    lines = [f"{ROOT / 'docs' / 'examples' / name}.py {sizes}" for name, sizes in PROGRAMS.items()]
    done = launch(ranks, ["-c", RUN, *lines], timeout=120, cwd=folder)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return printed(0, tmp_path_factory.mktemp("alone"))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_programs_print_the_same_on_any_number_of_ranks(ranks, alone, tmp_path):
    lines = printed(ranks, tmp_path)
    assert [NUMBER.sub("#", line) for line in lines] == [NUMBER.sub("#", line) for line in alone]
    for line, right in zip(lines, alone, strict=True):
        for a, b in zip(NUMBER.findall(line), NUMBER.findall(right), strict=True):
            assert a == b or ("." in a + b and math.isclose(float(a), float(b), rel_tol=1e-12)), (line, right)


def test_every_program_is_shown_on_a_page():
    page = (ROOT / "docs" / "guide" / "numerical.md").read_text()
    for name in PROGRAMS:
        assert (ROOT / "docs" / "examples" / f"{name}.py").read_text().strip() in page, name


def test_no_program_knows_layouts():
    for name in PROGRAMS:
        text = (ROOT / "docs" / "examples" / f"{name}.py").read_text()
        assert not re.search(r"(?i)layout|grid|\.rank\b|\.block\b|gather|mpi4py", text.split("\n", 1)[1]), name


@pytest.mark.one_in(3)
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])  # on 4 they are the table on the page, which another test makes
def test_formulas_of_the_table_of_words(ranks):
    done = launch(ranks, [str(ROOT / "docs" / "examples" / "communication.py")], timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
