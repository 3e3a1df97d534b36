"""scikit-learn with `array_api_dispatch=True` takes distributed arrays, on any number of ranks."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from tests.launching import ROOT, launch

pytestmark = [pytest.mark.serial, pytest.mark.one_in(8)]
VIEWS = {"GaussianMixture full": "ill-defined empirical covariance"}
"""Estimators that write to `a[k]` in the belief that it is a view of a; here it is a value."""


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_estimators_and_metrics(ranks: int) -> None:
    if find_spec("sklearn") is None:
        pytest.skip("cannot be had here: scikit-learn")
    program = str(ROOT / "tests" / "array" / "estimators.py")
    done = launch(ranks, [program], env={"SCIPY_ARRAY_API": "1"}, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) > 80
    unlike = {name: text for name, text in found.items() if text != "equal" and name not in VIEWS}
    assert not unlike
    for name, text in VIEWS.items():
        assert text in found[name], (name, found[name])
