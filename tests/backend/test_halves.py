"""Products of 16-bit floats on a device: as they are where it sums in float32, else cast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import pytest

from parlinalg import tunables
from parlinalg.backend import halves
from parlinalg.matmul.local import gemm

pytestmark = pytest.mark.ranks(1)
HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@pytest.fixture
def cp() -> Iterator[Any]:
    """CuPy's stand-in, which is asked anew."""
    halves.sums_in_single.cache_clear()
    yield cupy
    halves.sums_in_single.cache_clear()


def counted(cp: Any, monkeypatch: pytest.MonkeyPatch, wrong: Any = None) -> list[Any]:
    """The dtypes of the products that the device is asked for; `wrong` changes what they give."""
    real, seen = cp.matmul, []

    def matmul(x: Any, w: Any, **options: Any) -> Any:
        seen.append(x.dtype)
        y = real(x, w, **options)
        return wrong(y) if wrong is not None and x.dtype.itemsize == 2 else y

    monkeypatch.setattr(cp, "matmul", matmul, raising=False)
    return seen


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_matrices_are_multiplied_as_they_are(cp: Any, monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    x, w = (cp.array(np.random.default_rng(i).normal(size=s).astype(dtype)) for i, s in enumerate(((5, 7), (3, 7))))
    want = x.get().astype(np.float32) @ w.get().astype(np.float32).T
    seen = counted(cp, monkeypatch)
    y = gemm(x, w.T, dtype)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y.get(), want.astype(dtype))
    assert seen == [dtype, dtype]  # asked once whether it sums right
    gemm(x, w.T, dtype)
    assert seen == [dtype] * 3


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_stacks_and_sums_into_an_array_are_cast(cp: Any, monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    x = cp.array(np.random.default_rng(0).normal(size=(2, 5, 7)).astype(dtype))
    seen = counted(cp, monkeypatch)
    assert gemm(x, x.swapaxes(-1, -2), dtype).dtype == dtype
    out = cp.empty((5, 5), np.float32)
    assert gemm(x[0], x[0].T, dtype, out) is out
    assert set(seen) == {np.dtype(np.float32)}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_large_matrices_of_a_stack_are_multiplied_as_they_are(
    cp: Any, monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    monkeypatch.setattr(tunables, "STACKED_PRODUCT", 5 * 7 * 5)
    x = cp.array(np.random.default_rng(0).normal(size=(2, 3, 5, 7)).astype(dtype))
    wide = x.get().astype(np.float32)
    seen = counted(cp, monkeypatch)
    y = gemm(x, x.swapaxes(-1, -2), dtype)
    assert y.dtype == dtype
    np.testing.assert_array_equal(y.get(), (wide @ wide.swapaxes(-1, -2)).astype(dtype))
    assert seen == [dtype] * 7  # one asks whether it sums right
    assert gemm(x, x[0, 0].T, dtype).dtype == dtype  # a stack by one matrix
    assert seen[7:] == [np.dtype(np.float32)]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_device_that_sums_in_16_bits_is_found_out(cp: Any, monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    x = cp.array(np.ones((3, 5), dtype))
    counted(cp, monkeypatch, lambda y: y // 2)
    with pytest.warns(UserWarning, match="are cast to float32 on this device: 4096 ones add up to 2048"):
        y = gemm(x, x.T, dtype)
    assert float(y.get()[0, 0]) == 5


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_device_that_refuses_is_not_asked_again(cp: Any, monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    def refuse(y: Any) -> Any:
        raise TypeError("no such kernel")

    x = cp.array(np.ones((3, 5), dtype))
    seen = counted(cp, monkeypatch, refuse)
    with pytest.warns(UserWarning, match="no such kernel"):
        gemm(x, x.T, dtype)
    assert float(gemm(x, x.T, dtype).get()[0, 0]) == 5
    assert seen == [dtype, np.dtype(np.float32), np.dtype(np.float32)]
