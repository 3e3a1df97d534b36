"""The page that leads through the source names every file on the way, and few."""

from __future__ import annotations

import importlib
import re
import traceback
from pathlib import Path

import pytest

from parlinalg.train import launch
from tests.train.trainings import Training

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "source_tour.md").read_text()
TOURS = {
    'From `mode="2d"`': ({"parallel": {"tensor": {"mode": "2d"}}}, "parlinalg.matmul.local", ["gemm"]),
    "From `zero=3`": ({"parallel": {"data": 2}, "zero": 3}, "parlinalg.parallel.gatherer", ["redistribute", "start"]),
}


def section(title):
    return next(text for text in PAGE.split("\n## ") if text.startswith(title))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("title", TOURS)
def test_a_tour_passes_the_files_that_it_names(title, world, backend, tmp_path, monkeypatch):
    config, module, functions = TOURS[title]
    named = re.findall(r"^\d+\. `(\S+)`", section(title), re.M)
    assert len(named) <= 20
    assert all((ROOT / "parlinalg" / name).exists() for name in named)
    others = re.findall(r"`(\w+/\S+\.py)`", section(title))
    home, passed = importlib.import_module(module), set()
    for name in functions:
        plain = getattr(home, name)

        def noting(*args, plain=plain, **options):
            frames = [frame.filename for frame in traceback.extract_stack()]
            passed.update(f.removeprefix(f"{ROOT}/parlinalg/") for f in frames if f.startswith(f"{ROOT}/parlinalg/"))
            return plain(*args, **options)

        monkeypatch.setattr(home, name, noting)
    settings = {
        "backend": backend,
        "model": {"name": "mlp", "hidden": (8, 8)},
        "steps": 2,
        "checkpoint": False,
        **config,
    }
    with launch(settings, comm=world) as mesh:
        Training(mesh, tmp_path, world).steps()
    assert f"{module.replace('.', '/').removeprefix('parlinalg/')}.py" in passed
    assert passed <= {*named, *others}, passed - {*named, *others}


@pytest.mark.serial
def test_every_file_of_linear_algebra_is_named():
    named = re.findall(r"`(\w+\.py)`", section("Linear algebra").partition("\n\n`solve")[0])
    there = [path.name for path in (ROOT / "parlinalg" / "linalg").glob("*.py") if path.stem != "__init__"]
    assert sorted(named) == sorted(there)
