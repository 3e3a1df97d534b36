"""A test that changes a tunable fails unless the library reads it; nothing imports one by name."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from parlinalg import tunables
from tests.launching import ROOT
from tests.tuning import NAMES, Tuning


@pytest.mark.serial
def test_no_module_imports_a_tunable_by_name() -> None:
    for path in (ROOT / "parlinalg").rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "parlinalg.tunables" in text else ():
            if isinstance(node, ast.ImportFrom) and node.module == "parlinalg.tunables":
                raise AssertionError(f"{path}:{node.lineno}: read tunables.NAME, imported as a module")


def test_values_that_are_not_read_are_an_error(world: Any) -> None:
    before = {name: getattr(tunables, name) for name in NAMES}
    tuning = Tuning(world.size)
    with pytest.raises(AttributeError, match=r"parlinalg.tunables has no \['NONE'\]; it has \['ATTENTION_POLL', "):
        tuning(NONE=1)
    tuning(MOVE_BUFFER=7, RANDOM_JUMP=3)
    tuning(MOVE_BUFFER=8)
    tuning(ranks=world.size + 1, CHAIN_PIECE=3)
    tuning(must=False, CUDA_THREADS=3)
    with pytest.raises(AttributeError, match=r"module 'parlinalg\.tunables' has no attribute 'NONE'"):
        _ = tunables.NONE  # type: ignore[attr-defined]
    if world.rank == world.size - 1:  # one rank is enough
        assert tunables.MOVE_BUFFER == 8
    tuning.restore()
    assert {name: getattr(tunables, name) for name in NAMES} == before
    with pytest.raises(AssertionError, match=r"the test changes \['RANDOM_JUMP'\], which nothing reads in it"):
        tuning.check(world)
