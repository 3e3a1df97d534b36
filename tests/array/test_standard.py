"""data-apis' own suite of the Python Array API standard, on several numbers of ranks.

It is not a part of this project: `ARRAY_API_TESTS` names its folder, which is else looked for as `array-api-tests`
beside the project or in a folder beside it.  Without it these tests are skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.launching import mpiexec

pytestmark = [pytest.mark.serial, pytest.mark.timeout(3600), pytest.mark.one_in(4)]

ROOT = Path(__file__).resolve().parents[2]
VERSION = "2025.12"
LATER = [
    "cholesky",
    "det",
    "eig",
    "eigh",
    "eigvals",
    "eigvalsh",
    "inv",
    "matrix_rank",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
    "svdvals",
]  #: Functions of the extension linalg that parlinalg does not have yet.
EXPECTED = {
    "test_dlpack.py::test_dunder_dlpack": "several ranks: an array in blocks on several ranks is no one memory",
}


def suite() -> Path | None:
    """Return the folder of the suite, if there is one."""
    found = [Path(os.environ["ARRAY_API_TESTS"])] if "ARRAY_API_TESTS" in os.environ else []
    found += [ROOT.parent / "array-api-tests", *sorted(ROOT.parent.glob("*/array-api-tests"))]
    return next((p for p in found if (p / "array_api_tests").is_dir()), None)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_conforms(ranks: int, full: bool, tmp_path: Path) -> None:
    folder = suite()
    if folder is None:
        pytest.skip("cannot be had here: data-apis' array-api-tests; ARRAY_API_TESTS=FOLDER names them")
    if missing := [name for name in ("ndindex", "pytest_jsonreport") if find_spec(name) is None]:
        pytest.skip(f"cannot be had here: {', '.join(missing)}, which data-apis' suite needs")
    options = [] if full else ["--max-examples", "2"]
    without = f"not ({' or '.join(LATER)})"
    for name in EXPECTED if ranks > 1 else ():
        options += ["--deselect", f"array_api_tests/{name}"]
    command = [
        *mpiexec(), "-n", str(ranks), sys.executable, "-m", "pytest", "-q", "--with-mpi",
        "-p", "tests.array.standard_plugin", "-p", "no:cacheprovider", "--timeout", "600",
        "-k", without, *options, "array_api_tests",
    ]  # fmt: skip
    environment = {
        **os.environ, "ARRAY_API_TESTS_MODULE": "parlinalg", "ARRAY_API_TESTS_VERSION": VERSION,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "PYTHONHASHSEED": "0",
    }  # fmt: skip
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    summary = re.findall(r"^(?:FAILED|ERROR) .*|^.*\d+ passed.*$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, "\n".join([*summary[:40], done.stderr[-2000:]])
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 1000, done.stdout[-2000:]
