"""The changes that CONTRIBUTING.md shows: each is of one file of the package and one of the tests, and passes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = {
    title: blocks
    for title, text in re.findall(
        r"^### (Adding .*?)\n(.*?)(?=^##|\Z)", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S
    )
    if (blocks := re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S))
}

pytestmark = [pytest.mark.serial, pytest.mark.one_in(3)]


def changed(text: str, lines: list[str], path: str) -> str:
    """A file's text with the added lines: after the unchanged ones before them, or at its end."""
    kept, at = text.splitlines(), None
    for line in lines:
        if line.startswith("+"):
            kept.insert(len(kept) if at is None else at, line[1:])
            at = None if at is None else at + 1
        else:
            assert line[1:] in kept[at or 0 :], f"{path} has no line {line[1:]!r}"
            at = kept.index(line[1:], at or 0) + 1
    return "\n".join(kept) + "\n"


@pytest.mark.parametrize("title", SECTIONS)
@pytest.mark.timeout(300)
def test_shown_changes_work(title, tmp_path):
    for name in ("parlinalg", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    files = [
        f for block in SECTIONS[title] for f in re.findall(r"^--- .*\n\+\+\+ b/(.*)\n((?:[+ ].*\n|\n)*)", block, re.M)
    ]
    paths = [path for path, _ in files]
    assert [path.split("/")[0] for path in paths] == ["parlinalg", "tests"], paths
    names = []
    for path, lines in files:
        file = tmp_path / path
        before = file.read_text() + "\n\n" if file.exists() else ""
        file.write_text(changed(before, [line or " " for line in lines.splitlines()], path))
        names += re.findall(r"^\+def (test_\w+)", lines, re.M)
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", paths[1], "-k", " or ".join(names)]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout), done.stdout
