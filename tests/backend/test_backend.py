"""Blocks travel between host and device unchanged, on every backend."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from parlinalg.backend import Backend, backend_of, namespace, select_backend
from parlinalg.errors import ConfigError

DTYPES = [
    np.dtype(t)
    for t in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex64, np.complex128)
    + (np.int8, np.int32, np.int64, np.bool_)
]
SHAPES = [(), (0,), (5,), (3, 4), (2, 0, 3), (2, 3, 4)]


@pytest.fixture
def on(backend: str) -> Backend:
    return select_backend(backend)


def some(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return np.asarray(np.arange(np.prod(shape, dtype=int)) % 5).reshape(shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_round_trips(on: Backend, shape: tuple[int, ...], dtype: np.dtype) -> None:
    values = some(shape, dtype)
    block = on.from_host(values)
    assert (block.shape, block.dtype) == (shape, dtype)
    assert namespace(block) is on.xp
    assert backend_of(block) is on
    np.testing.assert_array_equal(on.to_host(block), values)
    assert isinstance(on.to_host(block), np.ndarray)

    buffer = on.staging(values.size, dtype)
    assert (buffer.shape, buffer.dtype) == ((values.size,), dtype)
    on.copy_to_host(block, buffer)
    np.testing.assert_array_equal(buffer.reshape(shape), values)
    other = on.zeros(shape, dtype)
    np.testing.assert_array_equal(on.to_host(other), np.zeros(shape, dtype))
    on.copy_from_host(buffer, other)
    buffer[...] = 0
    on.synchronize()
    np.testing.assert_array_equal(on.to_host(other), values)


def test_views_travel(on: Backend) -> None:
    values = some((3, 4), np.dtype(np.float64))
    block = on.from_host(values)
    buffer = on.staging(12, np.float64)
    on.copy_to_host(block.T, buffer)
    np.testing.assert_array_equal(buffer.reshape(4, 3), values.T)
    target = on.zeros((3, 4), np.float64)
    on.copy_from_host(buffer, target.T)
    np.testing.assert_array_equal(on.to_host(target), values)


def test_new_blocks_are_contiguous(on: Backend) -> None:
    for block in (on.empty((3, 4), "float32"), on.zeros(7, np.complex64)):
        assert block.flags.c_contiguous


@pytest.mark.parametrize("call", ["copy_to_host", "copy_from_host"])
def test_a_copy_never_converts(on: Backend, call: str) -> None:
    block, host = on.zeros((3,), np.float64), np.zeros(3, np.float32)
    with pytest.raises((TypeError, ValueError)):
        on.copy_to_host(block, host) if call == "copy_to_host" else on.copy_from_host(host, block)


def test_the_device_has_a_name_and_memory(on: Backend) -> None:
    assert on.memory_total() > 0
    assert on.device


def test_scalars_are_numpys() -> None:
    assert namespace(np.float32(1)) is np
    assert namespace(np.zeros(2)) is np


@pytest.mark.parametrize("what", [1.0, [1, 2], None, "text"])
def test_what_is_no_block(what: Any) -> None:
    with pytest.raises(TypeError, match="a NumPy or a CuPy array, not"):
        namespace(what)


@pytest.mark.serial
def test_an_unknown_backend_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no backend 'jax'.*'auto', 'numpy', 'cupy'"):
        select_backend("jax")
