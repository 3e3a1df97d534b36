"""Orders of the tokens of a sequence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlinalg import sequence_order
from parlinalg.layout import piece

pytestmark = pytest.mark.serial
SIZES = st.integers(0, 70), st.integers(1, 9)


def blocks(length, ranks, name):
    order = sequence_order(length, ranks, name)
    return [order[piece(length, ranks, r).start : piece(length, ranks, r).stop] for r in range(ranks)]


@given(*SIZES, st.sampled_from(["contiguous", "striped", "zigzag"]))
def test_permutes(length, ranks, name):
    np.testing.assert_array_equal(np.sort(sequence_order(length, ranks, name)), np.arange(length))


@given(*SIZES)
def test_striped_blocks(length, ranks):
    for r, block in enumerate(blocks(length, ranks, "striped")):
        np.testing.assert_array_equal(block, np.arange(r, length, ranks))


@given(*SIZES)
def test_zigzag_blocks(length, ranks):
    """Rank r holds parts r and 2P - 1 - r of 2P contiguous ones, whose lengths differ by at most one."""
    parts = []
    for block in blocks(length, ranks, "zigzag"):
        half = -(-len(block) // 2)
        parts += [block[:half], block[half:]]
    in_order = [*parts[::2], *parts[1::2][::-1]]
    np.testing.assert_array_equal(np.concatenate(in_order), np.arange(length))
    lengths = [len(c) for c in in_order]
    assert max(lengths) - min(lengths) <= 1
