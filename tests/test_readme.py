"""The README's Python code runs as it stands, block after block in one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launching import ROOT, launch

pytestmark = pytest.mark.serial


def blocks() -> list[str]:
    readme = ROOT / "README.md"
    return re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.M | re.S) if readme.exists() else []


@pytest.mark.parametrize("ranks", [0, 4], ids=["one process", "4 ranks"])
def test_readme_code_runs(ranks: int, tmp_path: Path) -> None:
    found = blocks()
    assert found or not (ROOT / "README.md").exists(), "the README shows no Python code"
    for i, code in enumerate(found):
        (tmp_path / f"block{i}.py").write_text(code)
        done = launch(ranks, [str(tmp_path / f"block{i}.py")], timeout=50, cwd=tmp_path)
        assert done.returncode == 0, f"block {i} of README.md:\n{code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
