"""Attention by cuDNN: what its graphs are asked for, on a stand-in that computes on the host, and cuDNN itself."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from parlinalg.backend import cuda, cudnn
from parlinalg.backend.kernels import attention
from parlinalg.backend.kernels.attention import device
from parlinalg.backend.kernels.attention.visibility import TokenPositions, Visible

pytestmark = pytest.mark.serial
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16), "float": np.dtype(np.float32)}
Array = np.ndarray[Any, Any]


class Unsupported(Exception):
    """As `cudnn.cudnnGraphNotSupportedError`."""


class Tensor:
    """A tensor of a graph: where its elements lie, from an address that is told when the graph runs."""

    def __init__(self, **given: Any) -> None:
        self.dim, self.stride, self.data_type, self.uid = (given.get(k) for k in ("dim", "stride", "data_type", "uid"))
        self.output = False

    def _set(self, name: str, value: Any) -> Tensor:
        setattr(self, name, value)
        return self

    def set_output(self, value: bool) -> Tensor:
        return self._set("output", value)

    def set_dim(self, value: list[int]) -> Tensor:
        return self._set("dim", value)

    def set_stride(self, value: list[int]) -> Tensor:
        return self._set("stride", value)

    def set_data_type(self, value: str) -> Tensor:
        return self._set("data_type", value)

    def set_uid(self, value: int) -> Tensor:
        return self._set("uid", value)

    def at(self, address: int) -> Array:
        """Return the tensor's elements."""
        assert self.dim is not None
        assert self.stride is not None
        assert len(self.dim) == len(self.stride) == 4
        assert self.stride[-1] == 1
        dtype = DTYPES[str(self.data_type)]
        if dtype.itemsize == 2:
            assert address % 16 == 0
            assert not any(s % 8 for s in self.stride[:-1])
        assert min(self.stride) > 0  # others are not defined
        most = 1 + sum((n - 1) * s for n, s in zip(self.dim, self.stride, strict=True))
        held = (ctypes.c_char * (most * dtype.itemsize)).from_address(address)
        steps = [s * dtype.itemsize for s in self.stride]
        return np.ndarray(self.dim, dtype, held, strides=steps)


class Graph:
    """A graph of one operation."""

    def __init__(self, library: SimpleNamespace, **given: Any) -> None:
        self.library, self.tensors, self.given, self.asked = library, [], given, []

    def tensor(self, **given: Any) -> Tensor:
        self.tensors.append(Tensor(**given))
        return self.tensors[-1]

    def _operation(self, run: Any, parts: dict[str, Tensor], made: int, options: dict[str, Any]) -> list[Tensor]:
        self.run, self.parts, self.options = run, parts, options
        self.made = [Tensor() for _ in range(made)]
        self.tensors += self.made
        return self.made

    def sdpa(self, *, q: Tensor, k: Tensor, v: Tensor, generate_stats: bool, **options: Any) -> list[Tensor]:
        assert generate_stats
        return self._operation(self._forward, {"q": q, "k": k, "v": v}, 2, options)

    def sdpa_backward(self, *, use_deterministic_algorithm: bool, **given: Any) -> list[Tensor]:
        assert use_deterministic_algorithm
        parts = {name: given.pop(name) for name in ("q", "k", "v", "o", "dO", "stats")}
        return self._operation(self._backward, parts, 3, given)

    def validate(self) -> None:
        self.asked.append("validate")
        assert sorted(t.uid for t in self.tensors) == list(range(1, 1 + len(self.tensors)))
        assert all(t.output for t in self.made)

    def build_operation_graph(self) -> None:
        self.asked.append("operation")

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes[0] == "A"
        self.asked.append("plans")

    def check_support(self) -> None:
        self.asked.append("support")
        if self.library.refuses:
            raise Unsupported("no kernel\nin this library")

    def build_plans(self) -> None:
        assert self.asked == ["validate", "operation", "plans", "support"]
        self.library.built += 1

    def get_workspace_size(self) -> int:
        return 48

    def execute(self, addresses: dict[int, int], room: int, handle: str) -> None:
        assert handle == "handle"
        assert room
        assert set(addresses) == {t.uid for t in self.tensors}
        inputs = {name: t.at(addresses[t.uid]).astype(np.float64) for name, t in self.parts.items()}
        group = inputs["q"].shape[1] // inputs["k"].shape[1]
        scores = self._scores(inputs["q"], np.repeat(inputs["k"], group, 1))
        for tensor, result in zip(self.made, self.run(inputs, group, scores), strict=True):
            tensor.at(addresses[tensor.uid])[...] = result
        self.library.run += 1

    def _scores(self, q: Array, k: Array) -> Array:
        scores = self.options["attn_scale"] * (q @ k.swapaxes(-1, -2))
        assert set(self.options) <= {
            "attn_scale", "diagonal_alignment", "diagonal_band_right_bound", "diagonal_band_left_bound",
        }  # fmt: skip
        i, j = np.ogrid[: q.shape[2], : k.shape[2]]
        if (right := self.options.get("diagonal_band_right_bound")) is not None:
            assert self.options["diagonal_alignment"] == "top left"
            scores[..., j > i + right] = -np.inf
        if (left := self.options.get("diagonal_band_left_bound")) is not None:
            scores[..., j <= i - left] = -np.inf
        return scores

    def _forward(self, x: dict[str, Array], group: int, scores: Array) -> list[Array]:
        lse = np.log(np.exp(scores).sum(-1, keepdims=True))
        return [np.exp(scores - lse) @ np.repeat(x["v"], group, 1), lse]

    def _backward(self, x: dict[str, Array], group: int, scores: Array) -> list[Array]:
        p = np.exp(scores - x["stats"])
        dp = x["dO"] @ np.repeat(x["v"], group, 1).swapaxes(-1, -2)
        ds = self.options["attn_scale"] * p * (dp - (x["dO"] * x["o"]).sum(-1, keepdims=True))
        dq = ds @ np.repeat(x["k"], group, 1)
        b, h, n, e = x["k"].shape
        dk, dv = (
            (s.swapaxes(-1, -2) @ y).reshape(b, h, group, n, e).sum(2) for s, y in ((ds, x["q"]), (p, x["dO"]))
        )  # fmt: skip
        return [dq, dk, dv]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tune: Any) -> Iterator[SimpleNamespace]:
    """The package's stand-in, for blocks of NumPy."""
    names = {"HALF": "float16", "BFLOAT16": "bfloat16", "FLOAT": "float"}
    found = SimpleNamespace(
        data_type=SimpleNamespace(**names), heur_mode=SimpleNamespace(A="A", FALLBACK="fallback"), refuses=False,
        diagonal_alignment=SimpleNamespace(TOP_LEFT="top left"), built=0, run=0, create_handle=lambda: "handle",
        set_stream=lambda handle, stream: None, cudnnGraphNotSupportedError=Unsupported,
    )  # fmt: skip
    found.pygraph = lambda **given: Graph(found, **given)

    class Namespace:
        cuda = SimpleNamespace(get_device_id=lambda: 0, get_current_stream=lambda: SimpleNamespace(ptr=7))

        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

    xp = Namespace()
    monkeypatch.setattr(cudnn, "_library", lambda: found)
    monkeypatch.setattr(cudnn, "namespace", lambda *blocks: xp)
    monkeypatch.setattr(cudnn, "_address", lambda x: x.ctypes.data)
    monkeypatch.setattr(cuda, "ready", lambda *blocks: True)
    monkeypatch.setattr(device, "DeviceTask", None)
    tune(must=False, FUSED_QUERIES=4)
    for kept in (cudnn._graph, cudnn._handle):
        kept.cache_clear()
    yield found
    for kept in (cudnn._graph, cudnn._handle):
        kept.cache_clear()


CASES = {
    "full": (12, 9, Visible()),
    "causal": (12, 12, Visible(causal=True)),
    "causal, more keys": (12, 16, Visible(causal=True)),
    "causal, fewer keys": (12, 7, Visible(causal=True)),
    "window": (12, 12, Visible(causal=True, window=5)),
    "a window as long as the sequence": (12, 12, Visible(causal=True, window=12)),
    "later positions": (5, 7, Visible(causal=True, places=(TokenPositions(np.arange(4, 9)),
                                                           TokenPositions(np.arange(4, 11))))),
}  # fmt: skip
OTHERS = {
    "keys before the queries": Visible(causal=True, start=2),
    "a window both ways": Visible(window=3),
    "documents": Visible(causal=True, documents=(np.zeros((2, 12), int), np.zeros((2, 12), int))),
    "some keys": Visible(keep=(np.ones((1, 1, 1, 1, 12), bool),)),
    "two runs": Visible(causal=True, places=(TokenPositions(np.r_[0:6, 18:24]),) * 2),
    "no order": Visible(causal=True, places=(TokenPositions(np.random.default_rng(0).permutation(12)),) * 2),
}


def blocks(xp: Any, dtype: Any, n: int, m: int, group: int, width: int = 8) -> list[Any]:
    """Queries, keys and values as views of packed blocks, and a gradient."""
    random = np.random.default_rng(0)
    cast = lambda *shape: xp.asarray(random.normal(size=shape)).astype(dtype)  # noqa: E731
    if n == m:
        packed = cast(2, n, 3, group + 2, width)
        q, k, v = packed[..., :-2, :], packed[..., -2, :], packed[..., -1, :]
    else:
        kv = cast(2, m, 3, 2, width)
        q, k, v = cast(2, n, 3, group, width), kv[..., 0, :], kv[..., 1, :]
    return [q, k, v, cast(2, n, 3, group, width)]


def right(given: list[Array], visible: Visible, into: list[Array], add: bool) -> list[Array]:
    """Attention and its gradients in float64 by NumPy, of the numbers that were given."""
    q, k, v, d = (np.asarray(x, np.float64) for x in given)
    out, lse, _ = attention.forward(q, k, v, visible, 0.3)
    found = [np.asarray(x, np.float64) for x in into]
    attention.backward(d, q, k, v, out, lse, visible, 0.3, tuple(found), add=(add, add))
    return [out, lse, *found]


def close(found: list[Any], known: list[Array], dtype: Any) -> None:
    """Compare numbers that were rounded to 16 bits a few times."""
    step = float(ml_dtypes.finfo(dtype).eps)
    for mine, exact in zip(found, known, strict=True):
        np.testing.assert_allclose(np.asarray(mine, np.float64), exact, rtol=0, atol=4 * step * np.abs(exact).max())


@pytest.mark.parametrize("add", [False, True], ids=["", "added"])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_attention_is_asked_of_cudnn(
    case: str, dtype: str, group: int, add: bool, library: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, m, visible = CASES[case]
    kind = DTYPES[dtype]
    given = blocks(np, kind, n, m, group)
    into = [np.full(x.shape, 1.5 if add else np.nan, kind) for x in given[:3]]
    with monkeypatch.context() as plain:
        plain.setattr(cuda, "ready", lambda *blocks: False)
        known = right(given, visible, into, add)
        with attention.counting() as of_blocks:
            right(given, visible, into, add)
    with attention.counting() as work:
        out, lse, kept = attention.forward(*given[:3], visible, 0.3)
        attention.backward(given[3], *given[:3], out, lse, visible, 0.3, tuple(into), add=(add, add))
    assert kept is None
    assert out.dtype == kind
    assert lse.dtype == np.float32
    assert library.run == 2
    close([out, lse, *into], known, kind)
    assert work.forward == work.backward <= of_blocks.forward
    wide, _, _ = attention.forward(*given[:3], visible, 0.3, wide=True)
    assert wide.dtype == np.float32
    assert library.built == 2
    np.testing.assert_array_equal(wide, out.astype(np.float32))


def test_gradients_of_packed_blocks_are_written_where_they_lie(library: SimpleNamespace) -> None:
    given = blocks(np, DTYPES["float16"], 12, 12, 1)
    packed = np.full((2, 12, 3, 3, 8), np.nan, np.float16)
    views = packed[..., :-2, :], packed[..., -2, :], packed[..., -1, :]
    apart = tuple(np.empty(x.shape, np.float16) for x in given[:3])
    for into in (views, apart):
        out, lse, _ = attention.forward(*given[:3], Visible(causal=True), 0.3)
        attention.backward(given[3], *given[:3], out, lse, Visible(causal=True), 0.3, into)
    for mine, known in zip(views, apart, strict=True):
        np.testing.assert_array_equal(mine, known)


@pytest.mark.parametrize("case", OTHERS)
def test_what_no_band_describes_is_not(case: str, library: SimpleNamespace) -> None:
    q, k, v, _ = blocks(np, DTYPES["float16"], 12, 12, 1)
    with pytest.raises(TypeError, match="NoneType"):  # the form by products, taken away here
        attention.forward(q, k, v, OTHERS[case], 0.3)
    assert not library.built


@pytest.mark.parametrize(
    ("change", "options"),
    [
        (lambda x: x[..., :7], {}),
        (lambda x: x[:, :3], {}),
        (lambda x: x.astype(np.float32), {}),
        (lambda x: x, {"dropped": lambda *at: 1.0}),
        (lambda x: x, {"limits": attention.DEVICE}),
    ],
    ids=["seven features", "few queries", "float32", "dropout", "limits"],
)
def test_neither_are_blocks_it_has_no_kernels_for(change: Any, options: Any, library: SimpleNamespace) -> None:
    q, k, v = (change(x) for x in blocks(np, DTYPES["float16"], 12, 12, 1)[:3])
    with pytest.raises(TypeError, match="NoneType"):
        attention.forward(q, k, v, Visible(causal=True), 0.3, **options)
    assert not library.built


def test_blocks_that_lie_askew_are_copied(library: SimpleNamespace) -> None:
    given = blocks(np, DTYPES["float16"], 12, 12, 2, width=16)[:3]
    known = attention.forward(*given, Visible(), 0.3)[0]
    askew = [np.concatenate((x[..., :3], x), axis=-1)[..., 3:] for x in given]
    np.testing.assert_array_equal(attention.forward(*askew, Visible(), 0.3)[0], known)
    odd = [np.concatenate((x.reshape(-1)[:1], x.reshape(-1)))[1:].reshape(x.shape) for x in given]
    assert all(x.flags.c_contiguous for x in odd)
    np.testing.assert_array_equal(attention.forward(*odd, Visible(), 0.3)[0], known)
    back = [x[:, ::-1].copy()[:, ::-1] for x in given]
    np.testing.assert_array_equal(attention.forward(*back, Visible(), 0.3)[0], known)


def test_broadcast_blocks_and_dims_of_one_element(library: SimpleNamespace) -> None:
    """NumPy and CuPy have steps of 0 for both."""
    visible = Visible(causal=True)
    one = [x[0] for x in blocks(np, DTYPES["float16"], 12, 12, 2)]
    given = [x[None] for x in one]
    out, lse, _ = attention.forward(*given[:3], visible, 0.3)
    known = [np.empty(x.shape, np.float16) for x in given[:3]]
    attention.backward(given[3], *given[:3], out, lse, visible, 0.3, tuple(known))
    many = [np.broadcast_to(x, (3, *x.shape)) for x in one]
    found, sums, _ = attention.forward(*many[:3], visible, 0.3)
    into = [np.empty(x.shape, np.float16) for x in many[:3]]
    attention.backward(many[3], *many[:3], found, sums, visible, 0.3, tuple(into))
    for mine, exact in zip((found, sums, *into), (out, lse, *known), strict=True):
        np.testing.assert_array_equal(mine, np.broadcast_to(exact, mine.shape))


def test_a_refusal_is_told_once(library: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    given = blocks(np, DTYPES["bfloat16"], 12, 12, 1)[:3]
    library.refuses = True
    with pytest.warns(UserWarning, match=r"no attention for bfloat16 of shapes \(2, 3, 12, 8\).*no kernel$"):
        assert cudnn.attention(*given, (0, -12), 0.3) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cudnn.attention(*given, (0, -12), 0.3) is None
    monkeypatch.setattr(cudnn, "_library", lambda: None)
    cudnn._graph.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the package is an extra
        assert cudnn.attention(*given, (0, -12), 0.3) is None


@pytest.mark.parametrize("text", ["raise OSError('no libcudnn.so.9')", "raise ImportError('no libcudart')"])
def test_a_package_that_cannot_be_loaded_is_told(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cudnn.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cudnn", raising=False)
    with pytest.warns(UserWarning, match=r"package cannot be loaded; attention runs by products, slower: no libc"):
        assert cudnn._library.__wrapped__() is None
