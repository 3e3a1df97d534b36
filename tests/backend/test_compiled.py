"""Compiled loops give what NumPy's chains give."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import numpy as np
import pytest

from parlinalg import tunables
from parlinalg.backend import compiled
from parlinalg.backend.kernels import activations, attention, norms, optimizers, rows
from parlinalg.backend.kernels.attention.blocks import Blocks
from parlinalg.backend.kernels.attention.visibility import Visible
from parlinalg.random import counter, normals

pytest.importorskip("numba")
pytestmark = pytest.mark.ranks(1)

DTYPES = [np.float32, np.float64]
SHAPES = [(1, 1), (3, 5), (130, 33), (2, 7, 129), (300, 0), (0, 4)]


@pytest.fixture(params=DTYPES, ids=lambda d: d.__name__)
def both(request, monkeypatch, tune):
    """Runs a function by loops, whatever the size, and by NumPy, and compares; counts the calls of loops."""
    calls, call = [], compiled.Loop.__call__

    def counted(loop, *args):
        calls.append(loop.name.removeprefix("_").removesuffix("_loop"))
        return call(loop, *args)

    monkeypatch.setattr(compiled.Loop, "__call__", counted)

    def compare(function, *blocks, near=20, uses=None, **more):
        results = []
        for available in (True, False):
            monkeypatch.setattr(compiled, "available", lambda available=available: available)
            tune(COMPILED_SIZE=1)
            results.append(function(*(b.copy() if isinstance(b, np.ndarray) else b for b in blocks), **more))
        if uses is not None and blocks[0].size:
            assert uses in calls
        for fast, plain in zip(*(flattened(r) for r in results), strict=True):
            assert fast.dtype == plain.dtype
            assert fast.shape == plain.shape
            size = np.abs(plain[np.isfinite(plain)]).max(initial=1)
            eps = np.finfo(plain.dtype).eps
            np.testing.assert_allclose(fast, plain, rtol=near * eps, atol=near * eps * size)
        return results[0]

    compare.dtype = np.dtype(request.param)
    return compare


def flattened(result):
    if isinstance(result, np.ndarray):
        return [result]
    return [a for part in result if part is not None for a in flattened(part)]


def numbers(shape, dtype, seed=0, spread=3.0):
    return (spread * np.random.default_rng([seed, *shape]).standard_normal(shape)).astype(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("approximate", [True, False])
def test_gelu(both, shape, approximate):
    x = numbers(shape, both.dtype)
    y, _ = both(activations.gelu_and_slope, x, approximate, uses=f"gelu_{'tanh' if approximate else 'erf'}_slope")
    again = both(activations.gelu, x, approximate, uses=f"gelu_{'tanh' if approximate else 'erf'}")
    if both.dtype == np.float64:
        exact = [v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in x.reshape(-1).tolist()]
        assert approximate or np.allclose(y.reshape(-1), exact, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(again, y, rtol=4 * np.finfo(both.dtype).eps, atol=1e-6)


def test_gelu_is_bit_for_bit_that_of_its_slope(tune):
    tune(COMPILED_SIZE=1)
    for dtype in DTYPES:
        for n in (1, 15, 4097):
            x = numbers((n,), dtype)
            for approximate in (True, False):
                y = activations.gelu(x, approximate)
                np.testing.assert_array_equal(activations.gelu_and_slope(x, approximate)[0], y)
                np.testing.assert_array_equal(
                    activations.gelu(x[n // 2 :], approximate), y[n // 2 :]
                )  # wherever it lies


def bitwise(make, tune):
    """Compute by loops and by NumPy's operations; both must give the same bits."""
    found = []
    for size in (0, 1 << 62):
        tune(must=False, COMPILED_SIZE=size)
        found.append(make())
    assert found[0].dtype == found[1].dtype
    assert found[0].shape == found[1].shape
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_running_sums_are_those_of_numpy(shape, dtype, tune):
    x = numbers(shape, dtype)
    bitwise(lambda: rows.running_sum(x), tune)
    bitwise(lambda: rows.running_sum(x.T), tune)
    bitwise(lambda: rows.running_sum(-np.zeros(shape, dtype)), tune)


@pytest.mark.parametrize("bits", [64, 32])
@pytest.mark.parametrize("start", [0, 1, 4093, 2**40 + 3, 2**63 + 5])
def test_random_words_are_those_of_numpys_generator(bits, start, tune):
    key = counter.stream_key(3, "words")
    bitwise(lambda: counter.RandomStream(key, bits).take(start, 5001), tune)


def test_normal_numbers_are_bit_for_bit_the_same(tune):
    key = counter.stream_key(4, "normals")
    apart = np.random.default_rng(0).integers(0, 2**62, 3001)
    bitwise(lambda: counter.philox(key, apart, 5), tune)

    def drawn():
        out = np.empty(100_003)
        normals.write_normals(key, (300_000,), [range(11, 100_014)], out)
        return out

    bitwise(drawn, tune)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exponentials(dtype):
    def exp(x):
        y = np.empty((1, x.size), dtype)
        rows._row_exp_loop(x[None], np.zeros(1, dtype), np.ones(1, dtype), y)
        return y[0]

    info = np.finfo(dtype)
    top = math.log(info.max)
    x = np.concatenate([np.linspace(-0.98 * top, 0.99 * top, 200001), [0, -0.0, 1e-30, 1, -1]]).astype(dtype)
    y = exp(x)
    exact = np.exp(x.astype(np.longdouble))
    assert (np.abs(y - exact) / np.spacing(exact.astype(dtype))).max() < 2
    ends = np.array([-np.inf, -2 * top, -1.1 * top, 1.01 * top, np.inf, np.nan, 0], dtype)
    np.testing.assert_array_equal(exp(ends), np.array([0, 0, 0, np.inf, np.inf, np.nan, 1], dtype))


FIRST = """
import numpy as np
from parlinalg import tunables
from parlinalg.backend.kernels.rows import _row_exp_sum_loop
z = np.random.default_rng(0).standard_normal((50, 33))
top, out = z.max(axis=1), np.empty(50)
_row_exp_sum_loop(z, top, out)
print(np.abs(out / np.exp(z - top[:, None]).sum(axis=1) - 1).max())
"""


def test_leave_to_reorder_sums_does_not_reach_exponentials(tmp_path):
    # compiled for the first time from a loop of sums, in a process of its own without code on disk
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", FIRST], check=True, env=env, capture_output=True, text=True, timeout=50
    )
    assert float(done.stdout) < 1e-14, done.stderr


def test_a_number_that_is_none_stays_so(both):
    x = numbers((40, 3), both.dtype)
    x[7, 1] = np.nan
    x[9, 2] = np.inf
    y = both(activations.gelu, x, True)
    assert np.isnan(y[7, 1])
    assert y[9, 2] == np.inf
    assert np.isnan(both(activations.swiglu, x.reshape(-1, 2))).any()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gated(both, shape):
    z, g = numbers((*shape, 2), both.dtype), numbers(shape, both.dtype, 1)
    both(activations.swiglu, z, uses="swiglu")
    both(activations.swiglu_grad, z, g, uses="swiglu_grad")


@pytest.mark.parametrize("shape", SHAPES[:-2], ids=str)
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("centred", [True, False])
def test_norms(both, shape, centred, pieces):
    x, g = numbers(shape, both.dtype) + 1, numbers(shape, both.dtype, 1)
    w, b = numbers(shape[-1:], both.dtype, 2), numbers(shape[-1:], both.dtype, 3) if centred else None
    n = pieces * shape[-1]
    total = None if pieces == 1 else (lambda numbers: numbers * pieces)  # the other piece is like this one

    def run(x, g):
        y, at = norms.norm(x, w, b, n, 1e-5, centred=centred, total=total)
        return y, *norms.norm_grad(x, g, w, at, n, total=total), at.scale

    both(run, x, g, near=2000 if shape[-1] == 1 else 200, uses="norm_grad")


@pytest.mark.parametrize("shape", SHAPES[:-2], ids=str)
def test_rows(both, shape):
    z, scale = numbers(shape, both.dtype), numbers(shape[:-1], both.dtype, 1)
    both(rows.row_exp_sum, z, z.max(axis=-1), near=100, uses="row_exp_sum")
    both(rows.row_exp, z, z.max(axis=-1), scale, uses="row_exp")
    both(rows.row_exp, z, z.max(axis=-1), uses="row_exp")


@pytest.mark.parametrize("decoupled", [True, False])
def test_adam(both, decoupled):
    p, g, m = (numbers((1003,), both.dtype, i) for i in range(3))
    v = np.abs(numbers((1003,), both.dtype, 3))

    def run(p, g, m, v):
        optimizers.adam(
            p, g, m, v, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, decoupled=decoupled, step=3, factor=0.5
        )
        return p, m, v

    both(run, p, g, m, v, near=0, uses="adam")  # the same bits: optimizers may go over tiles, of which some are small


@pytest.mark.parametrize("spread", [0.3, 30.0])  # calm scores, and such as need a maximum
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("group", [1, 2])
def test_attention(both, causal, group, spread, monkeypatch):
    """What masks and kept scores go through; test_attention.py compares whole blocks of scores with a softmax."""
    monkeypatch.setattr(Blocks, "of", lambda *asked: None)
    shape = (2, 37, 3, group, 8)
    q, dout = numbers(shape, both.dtype, 0, spread), numbers(shape, both.dtype, 1)
    k, v = (numbers((2, 37, 3, 8), both.dtype, i, spread) for i in (2, 3))
    limits = attention.Limits(rows=8, keys=16, scores=1 << 9)

    def run(q, k, v, dout):
        found = []
        for keep in (False, True):
            see = Visible(causal=causal)
            out, lse, kept = attention.forward(q, k, v, see, 0.35, limits=limits, keep=keep)
            into = tuple(np.empty_like(a) for a in (q, k, v))
            attention.backward(dout, q, k, v, out, lse, see, 0.35, into, limits=limits, kept=kept)
            found += [out, *into]
        return found

    both(run, q, k, v, dout, near=400, uses="softmax_grad")


def test_small_blocks_and_other_dtypes_are_numpys(monkeypatch):
    x = numbers((tunables.COMPILED_SIZE,), np.float32)
    assert compiled.ready(x)
    assert not compiled.ready(x[1:])
    assert not compiled.ready(x.astype(np.float16))
    assert not compiled.ready(x.astype(">f4"))
    assert not compiled.ready(x, x.astype(float))
    monkeypatch.setenv("PARLINALG_COMPILED", "0")
    compiled.available.cache_clear()
    assert not compiled.ready(x)
    compiled.available.cache_clear()
