"""The tree's rules: imports go downward, heavy imports stay where they belong."""

from __future__ import annotations

import ast
import doctest
import importlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "parlinalg"
FILES = sorted(PACKAGE.rglob("*.py"))
# Lowest layer first; the units of one layer may import each other.
LAYERS = [
    {"errors"}, {"units", "state_dict", "files", "hints", "settings", "tunables"}, {"backend"}, {"comm"},
    {"layout", "moves"}, {"sequence"}, {"plan"}, {"grid"}, {"exchange", "redistribute"}, {"array"}, {"random"},
    {"matmul"}, {"linalg", "fft"}, {"schemes"}, {"autograd"}, {"nn", "optim"}, {"datasets"}, {"parallel", "offload"},
    {"pipeline"}, {"train", "planning"}, {"testing"}, {"cli", "__main__"},
]  # fmt: skip
PURE = {"errors", "settings", "tunables", "units", "layout", "moves", "plan", "schemes"}  # neither NumPy nor MPI
PLACES = {"cupy": ("backend/", "comm/nccl.py"), "cupyx": ("backend/",), "mpi4py": ("comm/",)}
ROOT_FILES = {"__init__"}

pytestmark = pytest.mark.serial


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def imports(path: Path) -> list[tuple[str, int]]:
    """The absolute names of the modules a file imports anywhere, for types too, with their lines."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            found += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def unit(name: str) -> str | None:
    """The unit of the package that a dotted name belongs to; None for another package."""
    parts = name.split(".")
    return parts[1] if parts[0] == "parlinalg" and len(parts) > 1 else None


def is_unit(name: str | None) -> bool:
    return name is not None and ((PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file())


def rank_of(name: str) -> int:
    for i, layer in enumerate(LAYERS):
        if name in layer:
            return i
    raise AssertionError(f"parlinalg.{name} has no place among the layers: give it one in {__name__}")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_downward(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own in ROOT_FILES:
        return
    for name, line in imports(path):
        other = unit(name)
        if name == "parlinalg.__version__":
            continue
        if name.startswith("parlinalg") and not is_unit(other):
            raise AssertionError(f"{path}:{line}: imports the facade ({name}), which imports everything")
        if other is not None:
            assert rank_of(other) <= rank_of(own), f"{path}:{line}: {own} imports {other}, a layer above it"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_heavy_imports_stay_in_their_place(path: Path) -> None:
    inside = str(path.relative_to(PACKAGE))
    top = inside.split("/", maxsplit=1)[0].removesuffix(".py")
    for name, line in imports(path):
        first = name.split(".")[0]
        places = PLACES.get(first, ("",))
        assert inside.startswith(places), f"{path}:{line}: only {' and '.join(places)} may import {first}"
        assert first != "numpy" or top not in PURE, f"{path}:{line}: {top} is pure data, without NumPy"


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k != "PARLINALG_MPI"}
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**clean, "PYTHONPATH": str(ROOT), **env}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_importing_is_light() -> None:
    done = run_python(
        "import sys, parlinalg; print(sorted({m.split('.')[0] for m in sys.modules} & "
        "{'mpi4py', 'cupy', 'matplotlib', 'scipy', 'numba', 'sklearn', 'tqdm', 'threadpoolctl'})); "
        "late = ('parlinalg.train', 'parlinalg.planning', 'parlinalg.nn'); "
        "print([m for m in sys.modules if m.startswith(late)])"
    )
    assert done.stdout.split() == ["[]", "[]"], done.stdout + done.stderr


def test_all_names_of_the_package_are_there_when_they_are_asked_for() -> None:
    done = run_python(
        "import parlinalg; told = set(dir(parlinalg)); "
        "print([n for n in parlinalg.__all__ if n not in told or not hasattr(parlinalg, n)]); "
        "from parlinalg import *; print(launch.__module__, nn.Linear.__module__)"
    )
    assert done.stdout.split() == ["[]", "parlinalg.train.mesh", "parlinalg.nn.linear"], done.stdout + done.stderr


@pytest.mark.parametrize("block", ["None", "broken"], ids=["not installed", "without a library"])
def test_one_rank_needs_no_mpi(block: str, tmp_path: Path) -> None:
    if block == "broken":
        (tmp_path / "mpi4py").mkdir()
        (tmp_path / "mpi4py" / "__init__.py").touch()
        (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load MPI library')")
        hide = f"sys.path.insert(0, {str(tmp_path)!r})"
    else:
        hide = "sys.modules['mpi4py'] = None"
    done = run_python(
        f"import sys; {hide}\n"
        "import numpy as np\nfrom parlinalg.grid import Grid\n"
        "with Grid({'r': 1, 'c': 1}, backend='numpy') as grid:\n"
        "    x = np.ones(3)\n    grid.world.all_reduce(x)\n    print(grid.world.size, x.sum())"
    )
    assert done.stdout.split() == ["1", "3.0"], done.stderr


def doctested() -> list[str]:
    return [module_of(p) for p in FILES if ">>> " in p.read_text()]


@pytest.mark.parametrize("name", doctested())
def test_doctests(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
