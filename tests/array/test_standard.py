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

pytestmark = [pytest.mark.serial, pytest.mark.timeout(3600), pytest.mark.one_in(12)]

ROOT = Path(__file__).resolve().parents[2]
STANDIN = ROOT / "tests" / "standin"
VERSION = "2025.12"
EXPECTED = {
    "test_data_type_functions.py::test_can_cast": "the test finds no dtype, None, equal to NumPy's dtype('float64')",
}
EXPECTED_ON_GPUS = {
    "test_dlpack.py::test_dunder_dlpack": "it asks for a GPU's memory on the host without a copy",
}


def suite() -> Path | None:
    """Return the folder of the suite, if there is one."""
    found = [Path(os.environ["ARRAY_API_TESTS"])] if "ARRAY_API_TESTS" in os.environ else []
    found += [ROOT.parent / "array-api-tests", *sorted(ROOT.parent.glob("*/array-api-tests"))]
    return next((p for p in found if (p / "array_api_tests").is_dir()), None)


def left_out(gpu: bool) -> list[str]:
    """Return the tests of the suite that are not run."""
    return [*EXPECTED, *(EXPECTED_ON_GPUS if gpu else ())]


@pytest.mark.parametrize(
    ("ranks", "backend"), [(1, "numpy"), (2, "numpy"), (3, "numpy"), (4, "numpy"), (1, "cupy"), (2, "cupy")]
)
def test_conforms(ranks: int, backend: str, full: bool, tmp_path: Path) -> None:
    folder = suite()
    if folder is None:
        pytest.skip("cannot be had here: data-apis' array-api-tests; ARRAY_API_TESTS=FOLDER names them")
    if missing := [name for name in ("ndindex", "pytest_jsonreport") if find_spec(name) is None]:
        pytest.skip(f"cannot be had here: {', '.join(missing)}, which data-apis' suite needs")
    skips = tmp_path / "skips.txt"
    skips.write_text("".join(f"array_api_tests/{name}\n" for name in left_out(backend == "cupy")))
    command = [
        *mpiexec(), "-n", str(ranks), sys.executable, "-m", "pytest", "-q", "--with-mpi",
        "-p", "tests.array.standard_plugin", "-p", "no:cacheprovider", "--timeout", "1200",
        "--skips-file", str(skips), *([] if full else ["--max-examples", "2"]), "array_api_tests",
    ]  # fmt: skip
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ, "ARRAY_API_TESTS_MODULE": "parlinalg", "ARRAY_API_TESTS_VERSION": VERSION,
        "PYTHONPATH": os.pathsep.join([str(STANDIN), *paths] if backend == "cupy" else paths), "PYTHONHASHSEED": "0",
    }  # fmt: skip
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    summary = re.findall(r"^(?:FAILED|ERROR) .*|^.*\d+ passed.*$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, "\n".join([*summary[:40], done.stderr[-2000:]])
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 1000, done.stdout[-2000:]
