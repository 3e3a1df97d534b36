"""Attention of 16-bit floats on the device of the run, by whatever kernel it has there, against float64."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from parlinalg.backend import backend_of, cudnn
from parlinalg.backend.kernels import attention
from parlinalg.backend.kernels.attention.visibility import Visible

pytestmark = pytest.mark.ranks(1)
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize(("group", "width"), [(1, 128), (4, 64)])
@pytest.mark.parametrize("case", ["full", "causal", "window", "more keys"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_and_gradients(
    case: str, dtype: str, group: int, width: int, xp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of terms a sum, so that a wrong band or a head's wrong keys are not taken for rounding."""
    kind, calls = np.dtype(DTYPES[dtype]), 0

    def counted(*args: Any) -> bool:
        nonlocal calls
        done = run(*args)
        calls += done
        return done

    run = cudnn._run
    monkeypatch.setattr(cudnn, "_run", counted)
    visible = Visible(causal=case != "full", window=50 if case == "window" else None)
    n, m = 160, 200 if case == "more keys" else 160
    random = np.random.default_rng(0)
    shapes = (2, n, 3, group, width), (2, m, 3, width), (2, m, 3, width), (2, n, 3, group, width)
    given = [random.normal(size=shape).astype(kind) for shape in shapes]
    wide = [x.astype(np.float64) for x in given]
    q, k, v, d = (backend_of(xp.empty(0)).from_host(x) for x in given)
    scale = 1 / math.sqrt(width)
    exact, exact_lse, _ = attention.forward(*wide[:3], visible, scale)
    out, lse, _ = attention.forward(q, k, v, visible, scale)
    close(out, exact, kind)
    close(lse, exact_lse, kind)
    for added in (False, True):
        known = [np.full(x.shape, 0.5 if added else np.nan) for x in wide[:3]]
        attention.backward(wide[3], *wide[:3], exact, exact_lse, visible, scale, tuple(known), add=(added, added))
        ends = []
        for _ in range(2):
            into = [xp.full(x.shape, 0.5 if added else math.nan, kind) for x in (q, k, v)]
            attention.backward(d, q, k, v, out, lse, visible, scale, tuple(into), add=(added, added))
            ends.append([backend_of(x).to_host(x) for x in into])
        for mine, again, right in zip(*ends, known, strict=True):
            close(mine, right, kind)
            np.testing.assert_array_equal(mine, again)  # sums are in the same order on every run
    assert calls == (5 if backend_of(q).cuda and cudnn._library() is not None else 0)


def close(found: Any, exact: np.ndarray[Any, Any], kind: np.dtype[Any]) -> None:
    """Compare numbers that were rounded to 16 bits a few times."""
    step, mine = float(ml_dtypes.finfo(kind).eps), backend_of(found).to_host(found)
    np.testing.assert_allclose(mine.astype(np.float64), exact, rtol=0, atol=4 * step * np.abs(exact).max())
