"""Ring attention equals attention on one rank, in every order of the tokens."""

from __future__ import annotations

import pytest

import parlinalg as pla
from parlinalg import Layout
from parlinalg.autograd import ops
from tests.autograd.cases import agree, numbers

B, H, G, E = 3, 3, 2, 4
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"causal": True, "window": 5}, "sides": {"window": 4}}


def cut_axis(grid):
    """The axis that cuts the sequence: the last one of more than one rank."""
    return next((a for a in "cba" if grid.sizes[a] > 1), "a")


def layouts(grid, packed):
    """The sequence cut by that axis, the heads and the batch by others."""
    ring = cut_axis(grid)
    heads, batch = [*(a for a in "abc" if a != ring)]
    return ring, [Layout(batch, ring, heads, None, None)] * (1 if packed else 2)


@pytest.mark.parametrize("length", [2, 19, 70])
@pytest.mark.parametrize("order", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("name", MASKS)
def test_equals_attention_on_one_rank(name, order, length, grid, serial):
    ring, cuts = layouts(grid, packed := (length != 19))
    at = pla.sequence_order(length, grid.sizes[ring], order)
    positions = None if order == "contiguous" else at
    arrays = [numbers(B, length, H, G + 2, E)[:, at]]
    if not packed:
        arrays = [arrays[0][..., :G, :], arrays[0][..., G:, :]]

    def attend(*inputs):
        if inputs[0].grid is serial:
            return ops.attention(*inputs, positions=positions, **MASKS[name])
        return ops.ring_attention(*inputs, axis=ring, positions=positions, **MASKS[name])

    agree(attend, arrays, cuts, grid, serial)
