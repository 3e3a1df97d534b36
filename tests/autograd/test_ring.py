"""Ring attention equals attention on one rank, in every order of the tokens."""

from __future__ import annotations

import weakref
from collections import Counter
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import parlinalg as pla
from parlinalg import Layout, LayoutError
from parlinalg.autograd import ops
from parlinalg.autograd.ops import ring as module
from parlinalg.backend.kernels.attention import counting, merge
from parlinalg.comm import Comm
from parlinalg.layout import pieces
from tests.autograd.cases import agree, close, cut, numbers, tensor, value_and_gradients

pytestmark = pytest.mark.timeout(180)  # the first one compiles loops

B, H, G, E = 3, 3, 2, 4
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"causal": True, "window": 5}, "sides": {"window": 4}}
ORDERS = ("contiguous", "striped", "zigzag")
LENGTHS = (2, 19, 70)
CASES = list(product(MASKS, ORDERS, LENGTHS, (True, False)))
SAMPLE = [case for i, case in enumerate(CASES) if i % 7 == 0]


def cut_axis(grid):
    """The axis that cuts the sequence: the last one of more than one rank."""
    return next((a for a in "cba" if grid.sizes[a] > 1), "a")


def layouts(grid, packed=True):
    """The sequence cut by that axis, the heads and the batch by the others."""
    ring = cut_axis(grid)
    heads, batch = (a for a in "abc" if a != ring)
    return ring, [Layout(batch, ring, heads, None, None)] * (1 if packed else 2)


def inputs(length, packed=True, dtype=np.float64):
    z = numbers(B, length, H, G + 2, E).astype(dtype)
    return [z] if packed else [np.ascontiguousarray(z[..., :G, :]), np.ascontiguousarray(z[..., G:, :])]


def attend(serial, ring, **options):
    """Attention on one rank, ring attention elsewhere."""

    def function(*tensors):
        if tensors[0].grid is serial:
            return ops.attention(*tensors, **options)
        return ops.ring_attention(*tensors, axis=ring, **options)

    return function


@pytest.mark.parametrize(("name", "order", "length", "packed"), SAMPLE)
def test_equals_attention_on_one_rank(name, order, length, packed, grid, serial):
    same(name, order, length, packed, grid, serial)


def test_all_cases(full, grid, serial):
    for case in CASES if full else []:
        same(*case, grid, serial)


def same(name, order, length, packed, grid, serial):
    ring, cuts = layouts(grid, packed)
    at = pla.sequence_order(length, grid.sizes[ring], order)
    options = {**MASKS[name], "positions": None if order == "contiguous" else at}
    arrays = inputs(length, packed)
    agree(attend(serial, ring, **options), [a[:, at] for a in arrays], cuts, grid, serial)
    # and what is permuted is what it would be in its order
    right = value_and_gradients(attend(serial, ring, **MASKS[name]), arrays, cuts, serial)[0]
    found = attend(serial, ring, **options)(*(tensor(a[:, at], grid, c) for a, c in zip(arrays, cuts, strict=True)))
    close(found.gather(), right[:, at])


@pytest.mark.parametrize(
    ("how", "order"),
    [("lengths", "zigzag"), ("each", "striped"), ("numbers", "zigzag"), ("cut", "zigzag"), ("whole", "striped")],
)
def test_documents_are_kept_apart(how, order, grid, serial):
    s, (ring, cuts) = 23, layouts(grid)
    at = pla.sequence_order(s, grid.sizes[ring], order)
    each = [[5, 0, 11, 7], [23], [1, 21, 1]]
    each = [each[0]] * B if how == "lengths" else each
    ids = np.stack([np.repeat([7, 3, 100000, 4][: len(n)], n) for n in each])[:, at]
    padding = np.random.default_rng(1).random((B, s)) > 0.3
    padding[1] = False
    seen = (ids[:, None, :, None] == ids[:, None, None, :]) & padding[:, None, None, :]
    causal = at[:, None] >= at
    z = inputs(s)[0]
    right = value_and_gradients(lambda z: ops.attention(z, mask=seen & causal), [z], cuts, serial)
    for where, op in ((serial, "attention"), (grid, "ring_attention")):
        given = {"lengths": each[0], "each": each, "numbers": ids}.get(how)
        if given is None:
            given = cut(ids, where, Layout(cuts[0].dims[0], ring if op != "attention" else None))
            given = given if how == "cut" else cut(ids, where, Layout(None, None))
        real = cut(padding, where, Layout(None, ring if op != "attention" else None)) if how == "cut" else padding
        named = {"axis": ring} if op != "attention" else {}
        options = {"documents": given, "key_padding": real, "causal": True, "positions": at, **named}
        found = value_and_gradients(lambda z, op=op, o=options: getattr(ops, op)(z, **o), [z], cuts, where)
        for mine, known in zip(found, right, strict=True):
            close(mine, known)


@pytest.mark.parametrize("order", ORDERS)
def test_drops_what_one_rank_drops(order, grid, serial):
    s, (ring, cuts) = 21, layouts(grid)
    at = pla.sequence_order(s, grid.sizes[ring], order)
    factor = (np.random.default_rng(2).random((B, H, G, s, s)) > 0.3) / 0.7

    def draw(shape, indices):
        assert shape == factor.shape
        return grid.backend.from_host(np.ascontiguousarray(factor[np.ix_(*indices)]))

    z = inputs(s)[0]
    plain = {"causal": True, "dropout": draw}
    right = value_and_gradients(attend(serial, ring, **plain), [z], cuts, serial)
    found = value_and_gradients(attend(serial, ring, **plain, positions=at), [z[:, at]], cuts, grid)
    close(found[0], right[0][:, at])
    again = value_and_gradients(attend(serial, ring, **plain, positions=at), [z[:, at]], cuts, serial)
    close(found[1], again[1])


def test_positions_in_any_order(grid, serial):
    s, (ring, cuts) = 40, layouts(grid)
    at = np.random.default_rng(3).permutation(s)
    options = {"causal": True, "window": 17, "positions": at}
    agree(attend(serial, ring, **options), [inputs(s)[0][:, at]], cuts, grid, serial)


@settings(max_examples=12)
@given(st.data())
def test_whatever_is_asked_for(grid, serial, data):
    """Sizes of zero, and every option with every other."""
    ring, cuts = layouts(grid, packed := data.draw(st.booleans()))
    b, s, heads, g = (data.draw(st.integers(least, most)) for least, most in ((0, 3), (0, 40), (1, 3), (1, 2)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    at = pla.sequence_order(s, grid.sizes[ring], data.draw(st.sampled_from(ORDERS)))
    lengths = np.diff(np.sort(rng.integers(0, s + 1, data.draw(st.integers(0, 4)))), prepend=0, append=s)
    options = {
        "causal": data.draw(st.booleans()), "window": data.draw(st.sampled_from([None, 1, 7])), "positions": at,
        "documents": data.draw(st.sampled_from([None, lengths])), "scale": data.draw(st.sampled_from([None, 3.0])),
        "key_padding": data.draw(st.sampled_from([None, rng.random((b, s)) > 0.5])),
    }  # fmt: skip
    z = rng.standard_normal((b, s, heads, g + 2, E))
    arrays = [z] if packed else [z[..., :g, :], z[..., g:, :]]
    agree(attend(serial, ring, **options), arrays, cuts, grid, serial)


def test_another_sequence_and_queries_that_are_cut(grid, serial):
    """Keys of another length; the queries that share a key are cut by an axis that repeats the key."""
    ring, _ = layouts(grid)
    spread, batch = (a for a in "abc" if a != ring)
    q, kv = numbers(B, 9, H, G, E), numbers(B, 14, H, 2, E, seed=1)
    cuts = [Layout(batch, ring, None, spread, None), Layout(batch, ring, None, None, None)]
    agree(attend(serial, ring), [q, kv], cuts, grid, serial)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_narrow_dtypes_are_summed_in_float32(dtype, grid, serial):
    s, (ring, cuts) = 33, layouts(grid)
    tol = {4: 1e-5, 2: 8 * float(ml_dtypes.finfo(dtype).eps)}[np.dtype(dtype).itemsize]
    z = inputs(s, dtype=dtype)[0]
    function = attend(serial, ring, causal=True)
    right = value_and_gradients(function, [z.astype(np.float64)], cuts, serial)
    for mine, known in zip(value_and_gradients(function, [z], cuts, grid), right, strict=True):
        assert mine.dtype == dtype
        close(mine.astype(np.float64), known, tol)


def test_large_scores_do_not_overflow(grid, serial):
    """Scores of ±1e4 in float32; a block whose scores are small meets sums of others that are not, and rows that see
    nothing of a block."""
    s, (ring, cuts) = 24, layouts(grid)
    z = inputs(s, dtype=np.float32)[0]
    z[:, : s // 2, :, : G + 1] *= 100.0 / np.abs(z[..., : G + 1, :]).mean()
    z[:, s // 2 :, :, : G + 1] *= 0.1
    for large in (1.0, -1.0):
        z[..., G, :] = np.abs(z[..., G, :]) * large  # keys all of one sign: scores far below 0 too
        z[..., :G, :] = np.abs(z[..., :G, :])
        for causal in (False, True):
            at = pla.sequence_order(s, grid.sizes[ring], "striped")
            function = attend(serial, ring, causal=causal, positions=at, scale=1.0)
            with np.errstate(over="raise", invalid="raise", divide="raise"):
                found = value_and_gradients(function, [z[:, at]], cuts, grid)
            right = value_and_gradients(function, [z[:, at].astype(np.float64)], cuts, serial)
            close(found[0], right[0], 2e-3)  # a score of 1e4 has an error of 5e-4
            assert np.isfinite(found[1]).all()


def test_words_and_held_blocks(grid, monkeypatch):
    """A pass receives what the others have; two foreign blocks are held, and two of gradients."""
    s, (ring, cuts) = 37, layouts(grid)
    live, peak, sizes = Counter(), Counter(), {}
    receive = Comm.receive

    def watched(self, buffer, source, *, tag=0, wait=True):
        base = buffer if buffer.base is None else buffer.base
        if base.size and id(base) not in sizes:
            sizes[id(base)] = base.nbytes
            live[tag] += base.nbytes
            peak[tag] = max(peak[tag], live[tag])

            def gone(key=id(base), tag=tag):
                live[tag] -= sizes.pop(key)

            weakref.finalize(base, gone)
        return receive(self, buffer, source, tag=tag, wait=wait)

    z = tensor(inputs(s)[0], grid, cuts[0])
    width = z.block.shape[0] * z.block.shape[2] * 2 * E
    blocks, me = pieces(s, grid.sizes[ring]), grid.coords[ring]
    monkeypatch.setattr(Comm, "receive", watched)
    with pla.ledger(grid) as forward:
        y = ops.ring_attention(z, axis=ring, causal=True)
    assert {op for op, _ in forward.words} <= {"receive", "send"}
    assert forward.words.total() == (s - blocks[me]) * width
    held = 2 * max(blocks) * width * z.dtype.itemsize
    assert len(peak) <= 1
    assert max(peak.values(), default=0) <= held
    assert not +live
    with pla.ledger(grid) as backward:
        y.backward(cut(numbers(*y.shape), grid, y.layout))
    sums = s - blocks[me - 1]  # of all blocks but the left neighbour's
    assert set(backward.words) <= set(forward.words)
    assert backward.words.total() == (s - blocks[me] + sums) * width
    assert len(peak) <= 3
    assert max(peak.values(), default=0) <= held


@pytest.mark.ranks(4)
def test_causal_work_is_balanced(make_grid, backend):
    """The scores a rank computes, by order: of those that are seen in all, contiguous blocks reach (P + 1) / 2P."""
    s, grid = 4096, make_grid({"s": 4})
    z = pla.Tensor(pla.zeros((1, s, 1, 3, 2), grid, Layout(None, "s", None, None, None), dtype=np.float32), True)
    shares = {}
    for order in ORDERS:
        with counting() as work:
            y = ops.ring_attention(z, axis="s", causal=True, positions=pla.sequence_order(s, 4, order))
            y.backward(y.data)
        everyone = list(zip(*grid.world.share([work.forward, work.backward]), strict=True))
        # on a GPU blocks are larger, and more of what causality hides is computed
        ideal = s * (s + 1) / 2 / 4 if backend == "numpy" else sum(everyone[0]) / 4
        shares[order] = [ideal / max(pairs) for pairs in everyone]
    assert min(shares["zigzag"]) >= (0.97 if backend == "numpy" else 0.9)
    assert min(shares["striped"]) >= 0.9
    assert max(shares["contiguous"]) <= 0.75


@pytest.mark.ranks(3)
@pytest.mark.parametrize("bug", ["unguarded", "unmerged", "forgotten"])
def test_notices_a_planted_bug(bug, grid, serial, monkeypatch):
    ring, cuts = layouts(grid)
    take = module.Sums.take

    def unguarded(out, lse, more, more_lse):
        with np.errstate(all="ignore"):
            share = (1 / (1 + np.exp(lse - more_lse))).transpose(0, 3, 1, 2)[..., None]
            out -= share * (out - more)
            lse += np.log1p(np.exp(more_lse - lse))

    if bug == "forgotten":
        monkeypatch.setattr(module.Sums, "take", lambda *given: (take(*given)[0], False))
    else:
        wrong = unguarded if bug == "unguarded" else lambda out, lse, *more: merge(out, lse.copy(), *more)
        monkeypatch.setattr(module, "merge", wrong)
    at = pla.sequence_order(19, 3, "striped")
    function = attend(serial, ring, window=2, positions=at, key_padding=np.arange(3)[:, None] > 0 * at)
    with pytest.raises(AssertionError, match="difference"):
        agree(function, inputs(19), cuts, grid, serial)


def test_refused(grid):
    s, (ring, cuts) = 8, layouts(grid)
    z = inputs(s)[0]
    here = tensor(z, grid, cuts[0])
    with pytest.raises(LayoutError, match="no axis 'x' in the grid"):
        ops.ring_attention(here, axis="x")
    if grid.sizes[ring] > 1:
        with pytest.raises(LayoutError, match=rf"the sequence by '{ring}'.* mend it by .redistribute\(Layout\("):
            ops.ring_attention(tensor(z, grid, Layout.replicated(5)), axis=ring)
        with pytest.raises(LayoutError, match="documents is"):
            ops.ring_attention(here, axis=ring, documents=cut(np.zeros((B, s), int), grid, Layout(ring, None)))
    for wrong, match in (
        ({"positions": np.arange(7)}, r"shape \[s\] = \(8,\)"),
        ({"positions": np.r_[0, np.arange(7)]}, "a permutation of 0 to 7.*; 7 is not among them"),
        ({"documents": [3, 4]}, r"lengths \[3, 4\], which do not add up to the 8 tokens"),
        ({"documents": [[8], [3, 5]]}, "of 2 items, but there are 3"),
        ({"documents": np.zeros((B, 3), int)}, r"shape \(3, 3\), not \[b, s\] = \(3, 8\)"),
        ({"window": 0}, "window"),
        ({"key_padding": np.ones((2, s), bool)}, r"not \[b, t\] = \(3, 8\)"),
    ):
        with pytest.raises(ValueError, match=match):
            ops.ring_attention(here, axis=ring, **wrong)
    with pytest.raises(pla.ConfigError, match="'zigzag'"):
        pla.sequence_order(8, 2, "spiral")
