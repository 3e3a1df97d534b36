"""The attention kernel against the softmax written plainly."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from parlinalg.backend import compiled
from parlinalg.backend.kernels import attention as kernel
from parlinalg.backend.kernels.attention.blocks import Blocks
from parlinalg.backend.kernels.attention.visibility import TokenPositions, Visible

pytestmark = [pytest.mark.serial, pytest.mark.timeout(180)]  # the first one compiles loops

B, S, T, H, G, E = 2, 37, 41, 2, 2, 4
SMALL = kernel.Limits(rows=16, keys=7, scores=300)
I, J = np.arange(S)[:, None], np.arange(T)[None]
TABLE = np.random.default_rng(5).random((H, G, 10, 11)) > 0.6
KEEP = np.random.default_rng(6).random((B, 1, 1, 1, T)) > 0.4
KEEP[1] = False
WIDE = np.repeat(np.repeat(TABLE, 4, -2), 4, -1)[..., :S, :T]

MASKS = {
    "all": ({}, np.True_),
    "causal": ({"causal": True}, J <= I),
    "causal, later": ({"causal": True, "start": 4}, J <= I + 4),
    "window": ({"causal": True, "window": 5}, (J <= I) & (J > I - 5)),
    "both sides": ({"window": 6, "start": 9}, abs(I + 9 - J) < 6),
    "keys": ({"keep": (KEEP,), "causal": True}, KEEP & (J <= I)),
    "blocks": ({"table": TABLE[:1, :1], "size": 4}, WIDE[0, 0]),
    "blocks by head": ({"table": TABLE, "size": 4, "causal": True}, WIDE & (J <= I)),
}


@pytest.fixture(autouse=True, params=["loops", "plain"])
def how(request, tune):
    """Blocks of any size go through compiled loops where these can compute them, and then none does."""
    if request.param == "loops" and not compiled.available():
        pytest.skip("cannot be had here: numba is not installed, or PARLINALG_COMPILED is 0")
    tune(must=False, COMPILED_SIZE=0 if request.param == "loops" else 1 << 62)
    return request.param


def numbers(dtype=np.float64, large=1.0):
    rng = np.random.default_rng(1)
    shapes = (B, S, H, G, E), (B, T, H, E), (B, T, H, E), (B, S, H, G, E)
    q, k, v, dout = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    return q * dtype(large), k, v, dout


def plainly(q, k, v, dout, seen, scale, factor=1.0):
    """The result and the gradients by whole arrays of scores."""
    s = np.where(seen, np.einsum("bihge,bjhe->bhgij", q, k) * scale, -np.inf)
    p = np.exp(s - np.maximum(s.max(-1, keepdims=True), -1e300))
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-300)
    out = np.einsum("bhgij,bjhe->bihge", p * factor, v)
    dp = np.einsum("bihge,bjhe->bhgij", dout, v) * factor
    ds = p * (dp - (dp * p).sum(-1, keepdims=True)) * scale
    return (
        out,
        np.einsum("bhgij,bjhe->bihge", ds, k),
        np.einsum("bhgij,bihge->bjhe", ds, q),
        np.einsum("bhgij,bihge->bjhe", p * factor, dout),
    )


def computed(q, k, v, dout, visible, scale=0.5, dropped=None, limits=None, keep=False):
    with np.errstate(all="raise", under="ignore"):
        out, lse, kept = kernel.forward(q, k, v, visible, scale, dropped, limits, keep)
        grads = tuple(np.full_like(x, np.nan) for x in (q, k, v))
        kernel.backward(dout, q, k, v, out, lse, visible, scale, grads, dropped, limits, kept)
    return out, *grads


def close(found, right, tol=1e-12):
    for a, b in zip(found, right, strict=True):
        error = np.abs(a.astype(np.float64) - b).max() / np.abs(b).max()
        assert error <= tol, error


@pytest.mark.parametrize("limits", [None, SMALL], ids=["", "small"])
@pytest.mark.parametrize("name", MASKS)
def test_equals_the_plain_softmax(name, limits):
    options, seen = MASKS[name]
    for large in (1.0, 200.0):  # with large scores a maximum is sought
        arrays = numbers(large=large)
        right = plainly(*arrays, seen, 0.5)
        close(computed(*arrays, Visible(**options), limits=limits), right)
        close(computed(*arrays, Visible(**options), limits=limits, keep=True), right)
    if name == "keys":
        assert not computed(*arrays, Visible(**options))[0][1].any()  # no key is seen: zeros


@pytest.mark.parametrize("limits", [None, SMALL], ids=["", "small"])
def test_dropped_probabilities(limits):
    factor = (np.random.default_rng(2).random((B, H, G, S, T)) > 0.3) / 0.7
    dropped = lambda b, h, rows, keys: factor[b, h, :, rows, keys]  # noqa: E731
    arrays = numbers()
    right = plainly(*arrays, J <= I, 0.5, factor)
    for keep in (False, True):
        close(computed(*arrays, Visible(causal=True), dropped=dropped, limits=limits, keep=keep), right)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_narrow_dtypes_are_computed_in_float32(dtype):
    arrays = numbers(dtype)
    right = plainly(*(a.astype(np.float64) for a in arrays), J <= I, 0.5)
    found = computed(*arrays, Visible(causal=True))
    assert all(a.dtype == dtype for a in found)
    close(found, right, {2: float(ml_dtypes.finfo(dtype).eps), 4: 2e-6}[np.dtype(dtype).itemsize])


def placed(positions, keys):
    """What queries and keys at these positions see: causal, and within a window."""
    return Visible(causal=True, window=30, places=(TokenPositions(positions), TokenPositions(keys)))


PLACES = {
    "zigzag": (np.r_[0:20, 24:41], np.r_[0:15, 20:46]),
    "striped": (np.arange(1, 2 * S, 2), np.arange(0, 2 * T, 2)),
    "runs": (np.r_[40:60, 0:17], np.r_[30:60, 3:14]),
    "shuffled": (np.random.default_rng(3).permutation(S), np.random.default_rng(4).permutation(T)),
}


@pytest.mark.parametrize("limits", [None, SMALL], ids=["", "small"])
@pytest.mark.parametrize("name", PLACES)
def test_positions_in_runs_and_in_no_order(name, limits):
    rows, keys = PLACES[name]
    ahead = rows[:, None] - keys[None]
    arrays = numbers()
    right = plainly(*arrays, (ahead >= 0) & (ahead < 30), 0.5)
    close(computed(*arrays, placed(rows, keys), limits=limits), right)


@pytest.mark.parametrize("name", [*MASKS, *PLACES])
def test_loops_compute_what_positions_in_runs_say(name, how):
    visible = Visible(**MASKS[name][0]) if name in MASKS else placed(*PLACES[name])
    blocks = Blocks.of(*numbers()[:3], visible, 0.5, None)
    by_loops = {"all", "causal", "causal, later", "window", "both sides", "zigzag", "striped", "runs"}
    assert (blocks is not None) == (how == "loops" and name in by_loops)


def test_loops_leave_what_they_do_not_take_to_numpy(how):
    q, k, v, _ = numbers()
    of = lambda *arrays: Blocks.of(*arrays, Visible(causal=True), 0.5, None)  # noqa: E731
    assert of(q[:, :3], k, v) is None  # a few queries, as in generation
    assert of(q, k[..., ::-1], v) is None  # features that BLAS cannot go along
    assert of(q, k, v.astype(np.float32)) is None
    assert of(q[::-1], k, v) is None  # backwards
    assert (of(q, k, v) is not None) == (how == "loops")


@pytest.mark.parametrize("limits", [None, SMALL], ids=["", "small"])
def test_adds_to_gradients_and_asks_now_and_then(limits, how, tune):
    tune(must=how == "loops", ATTENTION_POLL=50, COMPILED_SIZE=0 if how == "loops" else 1 << 62)
    asked = []
    arrays = numbers()
    visible = Visible(causal=True, window=9)
    right = plainly(*arrays, (J <= I) & (J > I - 9), 0.5)
    packed = np.random.default_rng(8).standard_normal((B, S, H, G + 2, E))  # views, of which BLAS is told how they lie
    packed[..., :G, :] = arrays[0]
    q, dout = packed[..., :G, :], arrays[3]
    for add in ((False, False), (True, False), (False, True), (True, True)):
        out, lse, _ = kernel.forward(q, *arrays[1:3], visible, 0.5, limits=limits, poll=lambda: asked.append(1))
        close([out], right[:1])
        start = [np.random.default_rng(7).standard_normal(x.shape) for x in arrays[:3]]
        into = tuple(x.copy() for x in start)
        poll = lambda: asked.append(1)  # noqa: E731
        kernel.backward(dout, q, *arrays[1:3], out, lse, visible, 0.5, into, limits=limits, add=add, poll=poll)
        for found, before, more, term in zip(into, start, (add[0], add[1], add[1]), right[1:], strict=True):
            close([found], [before + term if more else term])
    assert len(asked) >= 16


def guarded(shape, dtype):
    """An array with a margin around it, and the margin."""
    whole = np.full(tuple(n + 2 for n in shape), 7, dtype)
    inner = (slice(1, -1),) * len(shape)
    mask = np.ones(whole.shape, bool)
    mask[inner] = False
    return whole[inner], lambda: whole[mask]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("keys", [63, 64, 65, 200, 1023, 1025])
@pytest.mark.parametrize("e", [3, 128])
def test_at_the_edges_of_spans_and_products(keys, e, dtype):
    """Loops go over whole spans of keys, BLAS over small products of them, blocks over a thousand keys."""
    rng = np.random.default_rng(keys)
    s = 70
    q, dout = (rng.standard_normal((1, s, 1, 2, e)).astype(dtype) for _ in range(2))
    k, v = (rng.standard_normal((1, keys, 1, e)).astype(dtype) for _ in range(2))
    i, j = np.arange(s)[:, None] + keys - s, np.arange(keys)[None]
    window = 50 if keys == 200 else keys
    visible = Visible(causal=True, start=keys - s, window=window)
    seen = (j <= i) & (j > i - window)
    right = plainly(*(x.astype(np.float64) for x in (q, k, v, dout)), seen, 0.3)
    out, lse, _ = kernel.forward(q, k, v, visible, 0.3)
    into, margins = zip(*(guarded(x.shape, dtype) for x in (q, k, v)), strict=True)
    kernel.backward(dout, q, k, v, out, lse, visible, 0.3, into)
    close((out, *into), right, 2e-5 if dtype is np.float32 else 1e-12)
    assert all((margin() == 7).all() for margin in margins)


ONE = slice(0, 1)


def test_blocks_that_are_not_seen_cost_nothing():
    visible = Visible(table=np.eye(8, dtype=bool)[None, None], size=16)
    assert visible.spans(ONE, ONE, slice(32, 48), 128, 1024) == [(32, 48)]
    assert visible.spans(ONE, ONE, slice(32, 64), 128, 10) == [(32, 42), (42, 52), (52, 62), (62, 64)]
    assert Visible(causal=True, window=20).spans(ONE, ONE, slice(64, 128), 1000, 1024) == [(45, 128)]


@pytest.mark.parametrize("shape", [(0, 5, 2, 1), (2, 5, 0, 1), (2, 0, 2, 1), (2, 5, 2, 0)])
def test_nothing_to_attend(shape):
    b, s, h, g = shape
    q, k = np.ones((b, s, h, g, E)), np.ones((b, T, h, E))
    out, *grads = computed(q, k, k.copy(), q, Visible(causal=True))
    assert out.shape == q.shape
    assert not any(np.isnan(x).any() or x.any() for x in grads)


def test_holds_one_block_of_scores():
    n, h, e = 2048, 2, 16
    q, k, v, dout = np.random.default_rng(0).standard_normal((4, 1, n, h, 1, e), np.float32)
    k, v = k[:, :, :, 0], v[:, :, :, 0]
    computed(q, k, v, dout, Visible(causal=True))  # what the first call loads is not its memory
    tracemalloc.start()
    computed(q, k, v, dout, Visible(causal=True))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    block = kernel.HOST.scores * 4
    assert peak <= 2 * block + 10 * q.nbytes  # scores and their gradient; a head's whole scores are 16 MiB
