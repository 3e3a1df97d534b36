"""Arrays without values against NumPy's: shapes, dtypes, and what is refused."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from parlinalg.backend import shapes
from parlinalg.backend.shapes import ShapeArray, ShapesBackend, WhatIf

pytestmark = pytest.mark.serial

DTYPES = ("float64", "float32", "float16", "complex64", "int64", "int8", "uint8", "bool")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> ShapesBackend:
    """A device on which integers and booleans have no values either."""
    monkeypatch.setattr(shapes, "SMALL", -1)
    return ShapesBackend("cpu", WhatIf())


def described(found: Any) -> Any:
    if isinstance(found, tuple | list):
        return [described(each) for each in found]
    return tuple(found.shape), np.dtype(found.dtype).name


def compare(device: ShapesBackend, call: Callable[..., Any], *arrays: Any, values: tuple[int, ...] = ()) -> bool:
    """Compare a call with NumPy and the call with shapes; return True if NumPy refuses it, and so do shapes.

    The arguments numbered in `values` keep theirs.
    """
    bare = [
        ShapeArray(device, a.shape, a.dtype) if isinstance(a, np.ndarray) and i not in values else a
        for i, a in enumerate(arrays)
    ]
    try:
        with (
            np.errstate(all="ignore"),
            warnings.catch_warnings(action="ignore", category=RuntimeWarning),
        ):  # means of none
            want = described(call(np, *arrays))
    except (ValueError, TypeError, IndexError):
        with pytest.raises((ValueError, TypeError, IndexError)):
            call(device.xp, *bare)
        return True
    assert described(call(device.xp, *bare)) == want, [described(a) if hasattr(a, "shape") else a for a in arrays]
    return False


REDUCTIONS = ("sum", "prod", "max", "min", "mean", "var", "any", "all", "count_nonzero", "argmax", "argmin")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(device, name, dtype):
    """Over one dim, several, all, one named twice, one that is not there, and of no elements."""
    refused = 0
    for shape in ((2, 3, 4), (3, 0, 2), (5,)):
        for axis in (None, 0, -1, (0, 2), (1, 1), (0, -3), 3, ()):
            if name.startswith("arg") and isinstance(axis, tuple):
                continue
            for keepdims in (False, True):
                a = np.ones(shape, dtype)

                def call(xp: Any, a: Any, axis: Any = axis, keepdims: bool = keepdims) -> Any:
                    return getattr(xp, name)(a, axis=axis, keepdims=keepdims)

                refused += compare(device, call, a)
    assert refused


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["add", "multiply", "maximum", "minimum", "logical_or", "logical_and"])
def test_reductions_and_running_ones_by_ufuncs(device, name, dtype):
    ufunc = getattr(np, name)
    for shape in ((2, 3), (0, 3), (4,)):
        a = np.ones(shape, dtype)
        for axis in (0, -1, 2):
            compare(device, lambda xp, a, axis=axis: ufunc.reduce(a, axis=axis), a)
            compare(device, lambda xp, a, axis=axis: ufunc.accumulate(a, axis=axis), a)
        compare(device, lambda xp, a: ufunc.reduce(a, axis=0, initial=1), a)
    for running in ("cumsum", "cumprod"):
        for axis in (None, 0, 1, 5):
            compare(device, lambda xp, a, axis=axis, f=running: getattr(xp, f)(a, axis=axis), np.ones((2, 3), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_written_in_place_are_those_that_numpy_writes(device, dtype):
    refused = 0
    for other in DTYPES:
        for shape, theirs in (((2, 3), (2, 3)), ((2, 3), (3,)), ((3,), (1, 3)), ((1, 3), (2, 3))):
            for name in ("add", "multiply", "true_divide"):

                def call(xp: Any, a: Any, b: Any, name: str = name) -> Any:
                    return getattr(np, name)(a, b, out=a)

                refused += compare(device, call, np.ones(shape, dtype), np.ones(theirs, other))
    assert refused


@pytest.mark.parametrize("dtype", DTYPES)
def test_functions_that_promote(device, dtype):
    a, b = np.ones((2, 3), dtype), np.ones((3,), dtype)
    for low, high in ((0, 1), (0.5, None), (None, 2), (b, 2), (None, np.ones((4, 1, 3), "float32"))):
        compare(device, lambda xp, a, *to: xp.clip(a, *to), a, low, high)
    if dtype != "bool":  # NumPy's `arctan2` of a number and booleans is one of booleans no more
        compare(device, lambda xp, a: xp.angle(a), a)
    compare(device, lambda xp, a: xp.sinc(a), a)
    if dtype != "complex64":
        compare(device, lambda xp, a: xp.i0(a), a)
    for other in DTYPES:
        compare(device, lambda xp, a, b: xp.where(a, a, b), a, np.ones(3, other))
        for name in ("matmul", "dot", "inner"):
            compare(device, lambda xp, a, b, name=name: getattr(xp, name)(a, b), a, np.ones((3, 3), other))


@pytest.mark.parametrize("shape", [(4,), (2, 4), (3, 0, 2)], ids=str)
def test_dims_that_are_not_there_are_refused(device, shape):
    a, at = np.ones(shape), np.zeros((2, 2), np.int64)
    calls = (
        lambda xp, a, axis: xp.sort(a, axis=axis),
        lambda xp, a, axis: xp.argsort(a, axis=axis),
        lambda xp, a, axis: xp.repeat(a, 2, axis=axis),
        lambda xp, a, axis: xp.concatenate([a, a], axis=axis),
        lambda xp, a, axis: xp.stack([a, a], axis=axis),
        lambda xp, a, axis: xp.diff(a, axis=axis),
        lambda xp, a, axis: xp.flip(a, axis=axis),
        lambda xp, a, axis: xp.expand_dims(a, axis),
    )
    for axis in (0, -1, len(shape), -len(shape) - 1, len(shape) + 1, -len(shape) - 2):
        for call in calls:
            compare(device, call, a, axis)
        if a.size:
            compare(device, lambda xp, a, at, axis: xp.take(a, at, axis=axis), a, at, axis, values=(1,))
    for call in calls[:2]:
        compare(device, call, a, None)
    assert compare(device, lambda xp, a, b: xp.stack([a, b]), a, np.ones((2,)))
    compare(device, lambda xp, a: xp.diag(a), a)
    compare(device, lambda xp, a: xp.tril(a), a)


@pytest.mark.parametrize("seed", range(4))
def test_indices_pick_what_numpy_picks(device, seed):
    """Numbers, slices, new dims, arrays, lists and masks together; some are too many, or beyond their dim."""
    draw = random.Random(seed)
    refused = 0
    for _ in range(300):
        shape = tuple(draw.choice((0, 1, 2, 3, 5)) for _ in range(draw.choice((1, 2, 3))))
        key: list[Any] = []
        for d in range(draw.randint(1, len(shape) + (draw.random() < 0.1))):
            n = shape[d] if d < len(shape) else 2
            at = [draw.randrange(-n - (draw.random() < 0.05), max(1, n)) for _ in range(3)]
            mask = np.array([draw.random() < 0.5 for _ in range(n + (draw.random() < 0.1))], bool)
            some = slice(draw.choice((None, -2, 1)), draw.choice((None, 2, -1)), draw.choice((None, 2, -1)))
            key.append(
                draw.choice((at[0], some, None, ..., np.array(at), at, np.array([at, at]), mask, [], mask * 1.0))
            )
        if sum(k is ... for k in key) < 2:
            a, b = np.ones(shape, "float32"), np.ones((3,), "float32")
            refused += compare(device, lambda xp, a, key=tuple(key): a[key], a)
            refused += compare(device, lambda xp, a, b, key=tuple(key): (a.__setitem__(key, b), a)[1], a, b)
    assert refused > 20


def test_products_of_no_elements(device):
    for left, right in (((2, 0), (0, 3)), ((0, 2), (2, 3)), ((0, 0, 2), (2, 0)), ((0,), (0, 4)), ((2, 3), (4, 2))):
        a, b = np.ones(left), np.ones(right)
        compare(device, lambda xp, a, b: xp.tensordot(a, b, 1), a, b)
        compare(device, lambda xp, a, b: xp.dot(a, b), a, b)


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_scratch_within_one_kernel(target):
    """On a CPU it counts in the peak; on a GPU a peak is what is held before a kernel or after it."""
    device = ShapesBackend(target)
    with device.one_kernel():
        device.xp.exp(device.empty((1000,), "float64"))
        made = device.empty((10,), "float64")
    assert device.peak == (16_000 if target == "cpu" else made.nbytes)
    assert device.held == made.nbytes
    with device.unseen():
        device.empty((4000,), "float64")
    assert device.peak == (16_000 if target == "cpu" else made.nbytes)


def test_shapes_of_other_functions(device):
    a, b = np.ones((3, 4)), np.ones((5,), "float32")
    for mode in ("full", "same", "valid"):
        compare(device, lambda xp, a, b, mode=mode: xp.convolve(a, b, mode), np.ones(3), b)
    for bins in (4, np.linspace(0, 1, 6)):
        compare(device, lambda xp, a, bins: xp.histogram(a, bins)[0], b, bins, values=(1,))
    for widths in (1, ((1, 2), (0, 3))):
        compare(device, lambda xp, a, widths=widths: xp.pad(a, widths), a)
    for repeats in (2, (2, 1), (2, 1, 1)):
        compare(device, lambda xp, a, repeats=repeats: xp.tile(a, repeats), a)
        compare(device, lambda xp, a, repeats=repeats: xp.tile(a, repeats), b)
    for axis in (0, 1, -1):
        at = np.zeros((3, 2) if axis else (2, 4), np.int64)
        compare(device, lambda xp, a, at, axis=axis: xp.take_along_axis(a, at, axis=axis), a, at)
    for rule, shapes_of in (
        ("ij,ij->j", ((3, 4), (3, 1))),
        ("ij,jk", ((3, 4), (4, 2))),
        ("...i,i->...", ((2, 3), (3,))),
    ):
        compare(device, lambda xp, a, b, rule=rule: xp.einsum(rule, a, b), *map(np.ones, shapes_of))
    x = ShapeArray(device, (3, 5), np.complex64)
    for axis, length in ((1, None), (0, None), (1, 7)):
        want = np.fft.irfft(np.ones((3, 5), "complex64"), length, axis)
        found = device.fft.irfft(x, length, axis)
        assert found.shape == want.shape
        assert found.dtype == np.float32  # as SciPy's
