"""The CUDA kernels, compiled for the host: each thread of a block is one of the processor's."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.backend import cuda, select_backend
from parlinalg.backend.kernels import attention, optimizers
from parlinalg.backend.kernels.activations import erf, gelu, gelu_grad, swiglu, swiglu_grad
from parlinalg.backend.kernels.attention import device
from parlinalg.backend.kernels.attention.visibility import Visible
from parlinalg.backend.kernels.norms import norm, norm_grad
from parlinalg.backend.kernels.optimizers import adam
from parlinalg.backend.kernels.rows import add_to, row_exp, row_exp_sum, row_max, row_sums
from parlinalg.cli.gpu import kernel_checks
from parlinalg.planning.trace import Kernel
from parlinalg.random import Bernoulli, dropping

pytestmark = pytest.mark.serial
THREADS = 64
SHIM = r"""
#include <barrier>
#include <cmath>
#include <thread>
#include <vector>
using std::sqrt; using std::exp; using std::tanh; using std::erf; using std::erfc;
struct Index { long x, y; };
static unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
static thread_local Index threadIdx;
static Index blockIdx, blockDim;
static std::barrier<>* all;
#define __global__
#define __device__ static
#define __shared__ static
#define __syncthreads() all->arrive_and_wait()
#define T double
#define W double
static W lanes[1024];
static W __shfl_xor_sync(unsigned, W v, int step) {
    lanes[threadIdx.x] = v;
    all->arrive_and_wait();
    W other = lanes[threadIdx.x ^ step];
    all->arrive_and_wait();
    return other;
}
template <class F> void launch(long width, long height, int threads, F kernel) {
    blockDim.x = threads;
    for (long y = 0; y < height; ++y)
        for (long x = 0; x < width; ++x) {
            blockIdx.x = x; blockIdx.y = y;
            std::barrier<> barrier(threads);
            all = &barrier;
            std::vector<std::thread> run;
            for (int i = 0; i < threads; ++i) run.emplace_back([=] { threadIdx.x = i; kernel(); });
            for (auto& thread : run) thread.join();
        }
}
"""
C_TYPES: dict[type, Any] = {np.int64: ctypes.c_longlong, np.int32: ctypes.c_int, np.float64: ctypes.c_double,
                           np.uint64: ctypes.c_ulonglong}  # fmt: skip


@pytest.fixture(scope="module")
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Launches a kernel on NumPy's arrays."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("cannot be had here: g++, which compiles the kernels for the host")
    program = cuda.source("float64")
    text = SHIM + program
    for name, listed in re.findall(r"__global__ void (pla_\w+)\((.*?)\)", program, re.DOTALL):
        names = ", ".join(p.split()[-1].lstrip("*") for p in listed.split(","))
        text += f'extern "C" void host_{name}(long across, long down, int threads, {listed}) {{'
        text += f" launch(across, down, threads, [=] {{ {name}({names}); }}); }}\n"
    folder = tmp_path_factory.mktemp("cuda")
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    Path(source).write_text(text)
    subprocess.run([compiler, "-std=c++20", "-shared", "-fPIC", "-pthread", source, "-o", library], check=True)
    functions = ctypes.CDLL(str(library))

    def run(name: str, like: np.ndarray, grid: tuple[int, ...], *args: Any) -> None:
        width, height = (*grid, 1)[:2]
        given = [
            ctypes.c_void_p(a.ctypes.data) if isinstance(a, np.ndarray) else C_TYPES[type(a)](a) for a in args
        ]  # fmt: skip
        assert all(a.flags.c_contiguous for a in args if isinstance(a, np.ndarray))
        getattr(functions, f"host_pla_{name}")(ctypes.c_long(width), ctypes.c_long(height), THREADS, *given)

    return run


def flattened(result: Any) -> list[Any]:
    return [a for part in result for a in flattened(part)] if isinstance(result, tuple) else [result]


def equal(found: Any, right: Any) -> None:
    for mine, known in zip(flattened(found), flattened(right), strict=True):
        if known is not None:
            np.testing.assert_allclose(mine, known, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", [(3, 2, 7), (17, 70)], ids=str)
def test_cuda_kernels_compute_what_numpy_does(
    shape: tuple[int, ...], on_host: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tune: Any
) -> None:
    monkeypatch.setattr(cuda, "launch_kernel", on_host)
    monkeypatch.setattr(cuda, "ready", lambda *blocks: True)
    tune(CUDA_THREADS=THREADS)
    random, n = np.random.default_rng(0), shape[-1]
    x, g, (w, b) = random.normal(3, size=shape), random.normal(size=shape), random.normal(size=(2, n))
    for centred, bias in ((True, b), (True, None), (False, None)):
        known = norm.plain(x, w, bias, n, 1e-5, centred=centred, total=None)
        equal(norm(x, w, bias, n, 1e-5, centred=centred, total=None), known)
        found, right = (f(x, g, w, known[1], n, total=None)[: 2 + centred] for f in (norm_grad, norm_grad.plain))
        equal(found, right)
    top, factor = row_max(x), random.normal(size=shape[:-1])
    equal(row_exp_sum(x, top), row_exp_sum.plain(x, top))
    rows = random.normal(size=(35, 70))
    equal(row_sums(rows), row_sums.plain(rows))
    for f in (factor, None):
        equal(row_exp(x, top, f), row_exp.plain(x, top, f))
    v, z = 4 * g, 4 * random.normal(size=(*shape, 2))
    for tanh in (True, False):
        equal(gelu(v, tanh), gelu.plain(v, tanh))
        equal(gelu_grad(v, x, tanh), gelu_grad.plain(v, x, tanh))
    equal(erf(v), erf.plain(v))
    askew = v.reshape(-1)[1:]  # not at a multiple of 16 bytes
    equal(gelu(askew, True), gelu.plain(askew, True))
    for other in (g, b):
        ends = []
        for add in (add_to, add_to.plain):
            ends.append(x.copy())
            add(ends[-1], other)
        equal(*ends)
    total = v.copy()
    add_to(total.reshape(-1)[1:], x.reshape(-1)[:-1])
    equal(total.reshape(-1)[1:], askew + x.reshape(-1)[:-1])
    add_to(total.T, x.T)  # in Fortran's order the plain form adds
    equal(total.reshape(-1)[1:], askew + x.reshape(-1)[:-1] + x.reshape(-1)[1:])
    equal(swiglu(z), swiglu.plain(z))
    equal(swiglu_grad(z, g), swiglu_grad.plain(z, g))
    for decoupled in (True, False):
        ends = []
        for ready in (True, False):
            monkeypatch.setattr(cuda, "ready", lambda *blocks, ready=ready: ready)
            state = tuple(a.reshape(-1).copy() for a in (x, g, g / 2, g * g))
            adam(*state, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, decoupled=decoupled, step=3)
            ends.append(state)
        equal(*ends)


def test_gradients_of_16_bits_are_cast_for_the_fused_update_of_masters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A part at a time, with the numbers of the plain form; an imagined GPU makes two kernels of it, not twenty."""
    random, ends = np.random.default_rng(0), []
    x, g, m = (a.astype(np.float32) for a in random.normal(size=(3, 70)))
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "decoupled": True, "step": 3}
    for cuda_ in (False, True):
        state = x.copy(), g.astype(np.float16), m.copy(), m * m
        with monkeypatch.context() as patch:
            if cuda_:
                patch.setattr(optimizers, "CAST", 16)
                of = SimpleNamespace(cuda=True, values=True, cpu=True, host_memory=True)
                patch.setattr(optimizers, "backend_of", lambda _, of=of: of)
            adam(*state, **options, factor=0.5)
        ends.append(state)
    for found, right in zip(*ends, strict=True):
        np.testing.assert_array_equal(found, right)
    with pla.imagine(1, target="gpu") as world:
        empty = world.device.empty
        state = tuple(empty(70, kind) for kind in ("float32", "float16", "float32", "float32"))
        with world.trace() as trace:
            adam(*state, **options)
    assert [e.name for e in trace.events if isinstance(e, Kernel)] == ["astype", "optimizers.adam_step"]


def test_doctor_tries_every_cuda_kernel(
    on_host: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tune: Any
) -> None:
    checks, launched = kernel_checks(3, 70), set()

    def launch(name: str, *args: Any) -> None:
        launched.add(f"pla_{name}")
        on_host(name, *args)

    known = [check(*check.inputs) for check in checks]
    monkeypatch.setattr(cuda, "launch_kernel", launch)
    monkeypatch.setattr(device, "multiply", multiplied)
    tune(CUDA_THREADS=THREADS)
    monkeypatch.setattr(cuda, "ready", lambda *blocks: blocks[0].dtype == np.float64)
    for check, right in zip(checks, known, strict=True):
        equal(check(*check.inputs), right)
    assert launched == set(re.findall(r"__global__ void (pla_\w+)\(", cuda.source("float64")))


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize(
    ("shape", "indices"),
    [
        ((3, 5, 7), (range(1, 3), range(5), range(2, 7))),
        ((4, 6, 2, 3, 5), (range(4), np.array([5, 0, 3]), range(2), range(1, 3), range(5))),
        ((40,), (range(3, 40),)),
    ],
    ids=["a part", "tokens in another order", "a vector"],
)
def test_dropout_on_cuda_drops_what_the_counted_numbers_say(
    shape: tuple[int, ...], indices: tuple[Any, ...], bits: Any, on_host: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch, tune: Any,
) -> None:  # fmt: skip
    monkeypatch.setattr(cuda, "launch_kernel", on_host)
    tune(CUDA_THREADS=THREADS)
    keep = Bernoulli(0.7, bits, seed=3, name="blocks.0.dropout", call=1, step=9, start=2)
    x = np.random.default_rng(0).normal(size=tuple(map(len, indices)))
    monkeypatch.setattr(cuda, "ready", lambda *blocks: True)
    drop, table = dropping(keep, x, shape, indices, select_backend("numpy", 0))
    found = drop(x, table)
    np.testing.assert_array_equal(found, x * keep.part(shape, indices) * (1 / keep.p))
    assert 0 < np.count_nonzero(found) < x.size


def multiplied(a: np.ndarray, b: np.ndarray, out: np.ndarray, scale: float = 1.0, *, add: bool = False) -> np.ndarray:
    """What cuBLAS is asked for; it takes stacks at equal steps, with contiguous rows or columns."""
    for x in (a, b, out):
        assert x.strides[-1] == x.itemsize or (x.strides[-2] == x.itemsize and x is not out)
        assert 1 in x.shape[:2] or x.strides[0] == x.shape[1] * x.strides[1]
    out[...] = scale * (a @ b) + (out if add else 0)
    return out


@pytest.mark.parametrize("masks", ["none", "causal", "window", "some keys"])
def test_attention_on_cuda(
    masks: str, on_host: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tune: Any
) -> None:
    """Blocks of queries and runs of keys, groups of queries that share keys, dropout, gradients that are added."""
    random = np.random.default_rng(0)
    q, d = 3 * random.normal(size=(2, 2, 11, 2, 2, 4))
    k, v = random.normal(size=(2, 2, 13, 2, 4))
    seen = random.random((2, 1, 1, 1, 13)) > 0.4
    seen[1] = False
    visible = {
        "none": Visible(), "causal": Visible(causal=True, start=1), "window": Visible(causal=True, window=3),
        "some keys": Visible(causal=True, keep=(seen,)),
    }[masks]  # fmt: skip
    factor = (random.random((2, 2, 2, 11, 13)) > 0.3) / 0.7
    limits = attention.Limits(rows=10, keys=6, scores=100)
    options = {"dropped": None if masks == "window" else lambda b, h, i, j: factor[b, h, :, i, j], "limits": limits}
    monkeypatch.setattr(cuda, "launch_kernel", on_host)
    monkeypatch.setattr(device, "multiply", multiplied)
    tune(must=False, COMPILED_SIZE=1 << 62)
    added = masks == "causal"
    given = [random.normal(size=x.shape) if added else np.full(x.shape, np.nan) for x in (q, k, v)]
    ends = []
    for ready in (True, False):
        monkeypatch.setattr(cuda, "ready", lambda *blocks, ready=ready: ready)
        into = [x.copy() for x in given]
        with attention.counting() as work:
            out, lse, _ = attention.forward(q, k, v, visible, 0.5, **options)
            random = np.random.default_rng(1)
            attention.backward(d, q, k, v, out, lse, visible, 0.5, into, add=(added, added), **options)
        ends.append((out, lse, *into, np.array([work.forward, work.backward])))
    equal(*map(tuple, ends))


def test_blocks_of_the_host_are_not_for_cuda() -> None:
    assert not cuda.ready(np.ones(3))
