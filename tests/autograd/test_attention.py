"""Attention and rotary positions on every grid."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Layout, LayoutError
from parlinalg.autograd import ops
from tests.autograd.cases import agree, cut, numbers, tensor

B, S, T, H, G, E = 3, 7, 5, 3, 2, 4
PACKED = [
    Layout("a", None, "b", None, None), Layout(None, None, ("b", "a"), None, None), Layout(("a", "b"), *4 * [None])
]  # fmt: skip
I, J = np.arange(S)[:, None], np.arange(S)[None]
PADDING = np.random.default_rng(3).random((B, S)) > 0.3
PADDING[1] = False
PAIRS = np.random.default_rng(4).random((B, H * G, S, S)) > 0.4
TABLE = np.random.default_rng(5).random((H * G, 3, 3)) > 0.4
BLOCKS = np.repeat(np.repeat(TABLE, 3, 1), 3, 2)[:, :S, :S]

MASKS = {
    "all": ({}, np.True_),
    "causal": ({"causal": True}, J <= I),
    "window": ({"causal": True, "window": 3}, (J <= I) & (J > I - 3)),
    "padding": ({"key_padding": PADDING}, PADDING[:, None, None, None, :]),
    "pairs": ({"mask": PAIRS, "key_padding": PADDING}, PAIRS.reshape(B, H, G, S, S) & PADDING[:, None, None, None, :]),
    "alike": ({"mask": PAIRS[0, 0], "causal": True}, PAIRS[0, 0] & (J <= I)),
    "repeated": (
        {"mask": np.broadcast_to(PAIRS[:, :1], PAIRS.shape), "key_padding": PADDING},
        PAIRS[:, :1, None] & PADDING[:, None, None, None, :],
    ),
    "blocks": ({"mask": ops.BlockMask(TABLE, 3)}, BLOCKS.reshape(H, G, S, S)),
}


def plainly(q, k, v, seen=np.True_):
    s = np.where(seen, np.einsum("bihge,bjhe->bhgij", q, k) / np.sqrt(E), -np.inf)
    p = np.exp(s - np.maximum(s.max(-1, keepdims=True), -1e300))
    return np.einsum("bhgij,bjhe->bihge", p / np.maximum(p.sum(-1, keepdims=True), 1e-300), v)


@pytest.mark.parametrize(
    ("name", "layout"),
    [*((name, PACKED[0]) for name in MASKS), *(("pairs", layout) for layout in PACKED[1:])],
    ids=repr,
)
def test_packed(name, layout, grid, serial):
    options, seen = MASKS[name]
    z = numbers(B, S, H, G + 2, E)
    expected = plainly(z[..., :G, :], z[..., G, :], z[..., G + 1, :], seen)
    numeric = name in ("pairs", "blocks") and layout == PACKED[0]
    agree(lambda z: ops.attention(z, **options), [z], [layout], grid, serial, expected=expected, numeric=numeric)


@pytest.mark.parametrize("keep_scores", [False, True])
def test_queries_that_share_a_key_are_cut(keep_scores, grid, serial):
    q, kv = numbers(B, S, H, G, E), numbers(B, T, H, 2, E, seed=1)
    layouts = [Layout("a", None, "b", "c", None), Layout("a", None, "b", None, None)]
    if grid.sizes["c"] == 1:
        layouts = [Layout(None, None, "b", "a", None), Layout(None, None, "b", None, None)]
    agree(
        lambda q, kv: ops.attention(q, kv, keep_scores=keep_scores, scale=E**-0.5), [q, kv], layouts, grid, serial,
        expected=plainly(q, kv[..., 0, :], kv[..., 1, :]), numeric=keep_scores,
    )  # fmt: skip


def test_distributed_masks(grid, serial):
    z = numbers(B, S, H, 3, E)
    layout = Layout("a", None, "b", None, None)
    pairs = PAIRS[:, :H]
    expected = plainly(z[..., :1, :], z[..., 1, :], z[..., 2, :], pairs[:, :, None] & PADDING[:, None, None, None, :])
    for lay, pad in [(Layout("a", "b", None, None), Layout("a", None)), (Layout.replicated(4), Layout.replicated(2))]:
        mask = {"mask": cut(pairs, grid, lay), "key_padding": cut(PADDING, grid, pad)}
        found = ops.attention(tensor(z, grid, layout), **mask).gather()
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_refused_layouts_and_shapes(grid):
    z = numbers(B, S, H, G + 2, E)
    if grid.sizes["a"] > 1:
        with pytest.raises(LayoutError, match=r"redistribute\(Layout\(None, None, .*'a'.*, None, None\)\)"):
            ops.attention(tensor(z, grid, Layout(None, "a", "b", None, None)))
        with pytest.raises(LayoutError, match=r"redistribute"):
            ops.attention(tensor(z, grid, Layout(None, None, None, None, "a")))
        padding = cut(PADDING, grid, Layout(None, "a"))
        with pytest.raises(LayoutError, match=r"redistribute\(Layout\(None, None\)\)"):
            ops.attention(tensor(z, grid, Layout(None, None, "b", None, None)), key_padding=padding)
        with pytest.raises(LayoutError, match=r"redistribute"):
            ops.rotary(tensor(z, grid, Layout(None, None, None, "a", None)))
    whole = tensor(z, grid, Layout.replicated(5))
    with pytest.raises(ValueError, match=r"key_padding has shape \(3, 2\), not .* \(3, 7\)"):
        ops.attention(whole, key_padding=np.ones((3, 2), bool))
    with pytest.raises(ValueError, match=r"does not broadcast to .* \(3, 6, 7, 7\)"):
        ops.attention(whole, mask=np.ones((7, 6), bool))
    with pytest.raises(TypeError, match="bools"):
        ops.attention(whole, key_padding=np.ones((3, 7), int))
    with pytest.raises(TypeError, match=r"mask is an array .* of bools, \[b, heads, s, t\], .* not a list"):
        ops.attention(whole, mask=[[True] * 7] * 7)
    with pytest.raises(TypeError, match=r"key_padding is an array .* of bools, \[b, t\], not a list"):
        ops.attention(whole, key_padding=[[True] * 7] * 3)
    with pytest.raises(TypeError, match=r"key_padding is an array .* of bools, \[b, t\], not a list"):
        ops.ring_attention(tensor(z, grid, Layout(None, "a", None, None, None)), axis="a", key_padding=[[True] * 7] * 3)
    with pytest.raises(ValueError, match=r"table of shape \(4, 4\)"):
        ops.attention(whole, mask=ops.BlockMask(np.ones((3, 3), bool), 2))
    with pytest.raises(ValueError, match="window"):
        ops.attention(whole, window=0)
    with pytest.raises(ValueError, match="odd"):
        ops.rotary(tensor(numbers(2, 3, 1, 3, 5), grid, Layout.replicated(5)))


@pytest.mark.parametrize("parts", [None, 2])
def test_rotary(parts, grid, serial):
    z = numbers(B, S, H, 3, E)
    angles = (np.arange(S)[:, None] + 2) * ops.rotary_frequencies(E, 100.0)
    turn = np.exp(1j * angles)[:, None, None]
    turned = (z[..., : E // 2] + 1j * z[..., E // 2 :]) * turn
    right = z.copy()
    right[..., : parts or 2, :] = np.concatenate([turned.real, turned.imag], -1)[..., : parts or 2, :]
    for layout in [Layout("a", "b", None, None, None), Layout(None, None, ("a", "b"), None, None)]:
        rotate = lambda z: ops.rotary(z, 100.0, start=2, parts=parts)  # noqa: E731
        agree(rotate, [z], [layout], grid, serial, expected=right, numeric=parts is None)


def test_nothing_is_kept_within_no_grad(serial):
    z = tensor(numbers(B, S, H, 3, E), serial, Layout.replicated(5))
    with pla.no_grad():
        assert not ops.attention(z, keep_scores=True).requires_grad
