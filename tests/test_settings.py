"""The environment variables: those of the code, of the documentation's table and of `settings.py` are the same."""

from __future__ import annotations

import re

import pytest

import parlinalg as pla
from parlinalg.errors import ConfigError
from parlinalg.settings import ALLOWED, unknown_settings, wrong_setting
from tests.launching import ROOT, launch

pytestmark = pytest.mark.serial


def test_the_table_of_the_documentation_has_them_all() -> None:
    rows = re.findall(r"^\| `(PARLINALG_(?!TEST_)\w+)` ", (ROOT / "docs" / "running.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(ALLOWED)


def test_the_code_reads_no_others() -> None:
    files = [p for p in (ROOT / "parlinalg").rglob("*.py") if p.name != "settings.py"]
    read = {n for p in files for n in re.findall(r"environ[^\n]{0,12}[\"'](PARLINALG_(?!TEST_)\w+)", p.read_text())}
    assert read == set(ALLOWED)


@pytest.mark.parametrize("name", ALLOWED)
def test_other_values_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("yes", "-1", "2 "):
        assert name in wrong_setting({name: text}) or (
            name in ("PARLINALG_TIMEOUT", "PARLINALG_MAX_COUNT") and text == "2 "
        )
    assert wrong_setting({name: "1"}) == wrong_setting({name: ""}) == ""
    monkeypatch.setenv("PARLINALG_MPI", "0")
    monkeypatch.setenv(name, "no")
    with pytest.raises(ConfigError, match=f"{name}='no'"):
        pla.Grid({"r": 1})


def test_misspelt_names_are_warned_of() -> None:
    told = unknown_settings({"PARLINALG_TIMEOUTS": "1", "PARLINALG_XYZ": "1", "PARLINALG_TEST_BACKEND": "gpu"})
    assert told[0].endswith("did you mean PARLINALG_TIMEOUT?")
    assert "PARLINALG_CHECK" in told[1]
    assert len(told) == 2


def test_all_ranks_refuse_alike() -> None:
    program = (
        "import os\nif os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')) == '1':\n"
        "    os.environ['PARLINALG_CHECK'] = 'on'\nimport parlinalg as pla\ntry:\n    pla.Grid({'r': 2})\n"
        "except pla.errors.ConfigError as e:\n    print(e, flush=True)\n"
    )
    done = launch(2, ["-c", program], timeout=60)
    assert done.stdout.count("PARLINALG_CHECK='on' is not one of '0', '1' (the environment of rank 1)") == 2, (
        done.stderr
    )
