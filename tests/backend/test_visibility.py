"""Which keys are seen, against every pair looked at by itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlinalg.backend.kernels.attention.visibility import TokenPositions, Visible

pytestmark = pytest.mark.serial


@st.composite
def placed(draw):
    """Positions: some runs of equal steps, or a few in any order."""
    if draw(st.integers(0, 4)) == 0:
        return np.array(draw(st.permutations(range(draw(st.integers(0, 9))))), int)
    step = draw(st.integers(1, 4))
    starts = draw(st.lists(st.integers(0, 60), min_size=1, max_size=3))
    return np.concatenate([start + step * np.arange(draw(st.integers(1, 9))) for start in starts])


def documents(rng, batch, n, sort):
    found = rng.integers(0, 3, (batch, n))
    return np.sort(found, axis=1) if sort else found


@given(placed(), placed(), st.booleans(), st.sampled_from([None, 1, 3, 17]), st.integers(0, 3), st.integers(0, 9))
def test_pairs(at, keys, causal, window, kind, seed):
    rng = np.random.default_rng(seed)
    batch, n, m = 2, len(at), len(keys)
    seen = np.ones((batch, n, m), bool)
    if causal:
        seen &= keys <= at[:, None]
    if window is not None:
        seen &= abs(keys - at[:, None]) < window
    marks = None
    if kind:
        marks = documents(rng, 1 if kind == 1 else batch, n, kind < 3), documents(rng, batch, m, kind < 3)
        seen &= marks[0][:, :, None] == marks[1][:, None, :]
    visible = Visible(causal=causal, window=window, places=(TokenPositions(at), TokenPositions(keys)), documents=marks)
    heads = slice(0, 1)
    for items in (slice(0, 2), slice(1, 2)):
        found = np.zeros_like(seen[items])
        for rows in visible.rows(n, 4):
            for a, b in visible.spans(items, heads, rows, m, 5):
                scores = np.zeros((items.stop - items.start, 1, 1, rows.stop - rows.start, b - a))
                visible.hide(scores, items, heads, rows, slice(a, b))
                found[:, rows, a:b] = scores[:, 0, 0] == 0
                count = visible.pairs(rows.start, rows.stop, a, b)
                least = int((scores[0] == 0).sum())
                assert count == least or kind or visible.edges(rows, slice(a, b)) is None
                assert least <= count <= scores[0].size
        assert (found == seen[items]).all()


@given(placed())
def test_runs(at):
    places = TokenPositions(at)
    assert [i for run in places.runs for i in range(run.start, run.stop)] == list(range(len(at)))
    for run in places.runs:
        if run.step:
            np.testing.assert_array_equal(at[run.start : run.stop], run.first + run.step * np.arange(run[1] - run[0]))


def test_what_is_not_seen_is_skipped():
    """Of four parts the second rank's queries see their own and the first, unmasked; later ones cost nothing."""
    parts = np.arange(64).reshape(4, 16)
    mine = TokenPositions(np.concatenate([parts[1], parts[2]]))
    theirs = TokenPositions(np.concatenate([parts[0], parts[3]]))
    visible = Visible(causal=True, places=(mine, theirs))
    one = slice(0, 1)
    assert [visible.spans(one, one, rows, 32, 99) for rows in visible.rows(32, 16)] == [[(0, 16)], [(0, 16)]]
    striped = Visible(causal=True, places=(TokenPositions(np.arange(1, 64, 4)), TokenPositions(np.arange(2, 64, 4))))
    assert striped.spans(one, one, slice(8, 12), 16, 99) == [(0, 11)]
    apart = Visible(documents=(np.repeat([[0, 1]], 8, 1), np.repeat([[1, 2]], 8, 1)))
    assert apart.spans(one, one, slice(0, 8), 16, 99) == []
    assert apart.spans(one, one, slice(8, 16), 16, 99) == [(0, 8)]
