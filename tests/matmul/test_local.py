"""Products that are formed where they go: in their place in a bucket, or added to what it has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.autograd import no_sync, recompute
from parlinalg.autograd.ops import product
from parlinalg.matmul.local import DeferredGemm, copy_or_add
from parlinalg.parallel import GradientReducer
from tests.conftest import SIZE
from tests.training import SIZES, batch, every_scheme, mean_loss


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64])
def test_put(backend_array: Any, dtype: type, lead: tuple[int, ...], add: bool) -> None:
    rng = np.random.default_rng(3)
    a, b, had = (rng.integers(-5, 6, (*lead, *shape)).astype(dtype) for shape in ((9, 6), (6, 10), (9, 2, 5)))
    gemm = DeferredGemm(backend_array(a), backend_array(b), np.dtype(dtype), had.shape)
    want = (a @ b).reshape(had.shape) + (had if add else 0)
    wide = np.zeros((*lead, 9, 2, 7), dtype)
    for out in (had.copy(), had.astype(np.float64), np.asfortranarray(had), wide):
        target = backend_array(out)
        view = target[..., :5] if out is wide else target
        view[...] = backend_array(had.astype(view.dtype))
        copy_or_add(gemm, view, add=add)
        found = target if isinstance(target, np.ndarray) else target.get()
        np.testing.assert_array_equal(found[..., :5], want)
        assert not found[..., 5:].any()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_transposed(backend_array: Any, dtype: type) -> None:
    """Rows and columns are exchanged without forming the product, which lies in memory as it is asked to."""
    rng = np.random.default_rng(3)
    a, b = (backend_array(rng.integers(-5, 6, shape).astype(dtype)) for shape in ((2, 6, 3), (2, 3, 20)))
    shape, order = (2, 6, 5, 4), (0, 2, 3, 1)
    gemm = DeferredGemm(a, b, np.dtype(dtype), shape)
    turned = gemm.transpose(order)
    assert isinstance(turned, DeferredGemm)
    assert turned.formed().flags.c_contiguous
    lying = DeferredGemm(a, b, np.dtype(dtype), shape, order=order).formed()
    assert lying.transpose(order).flags.c_contiguous
    assert turned.shape == (2, 5, 4, 6)
    assert turned.transpose((0, 3, 1, 2)).shape == shape
    right = (a @ b).reshape(shape).transpose(order)
    for found in (turned.formed(), lying.transpose(order), gemm.transpose((3, 2, 1, 0)).transpose(3, 1, 0, 2)):
        assert found.shape == right.shape
        assert (found == right).all()


@pytest.fixture
def backend_array(backend: str) -> Any:
    if backend == "numpy":
        return lambda array: array.copy(order="K")
    cupy = pytest.importorskip("cupy")
    return cupy.asarray


@pytest.mark.parametrize("again", [False, True], ids=["", "recompute"])
def test_weights_gradients_are_formed_in_their_buckets(
    world: Any, backend: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    formed: list[tuple[int, ...]] = []
    real = DeferredGemm.formed

    deferred: list[Any] = []
    execute = product.execute

    def noted(*args: Any, **options: Any) -> Any:
        deferred.append(execute(*args, **options))
        return deferred[-1]

    def counting(found: DeferredGemm) -> Any:
        if any(found is each for each in deferred):
            formed.append(found.shape)
        return real(found)

    monkeypatch.setattr(product, "execute", noted)
    monkeypatch.setattr(DeferredGemm, "formed", counting)
    scheme = every_scheme()["data"]
    with pla.Grid({"data": SIZE}, world, backend=backend) as grid:
        model = nn.MLP(SIZES, scheme, grid, "tanh", dtype=np.float64, seed=2)
        function = (lambda x: recompute(model, x)) if again else model
        reducer = GradientReducer(model.parameters())

        def walk() -> None:
            mean_loss(function, *batch(grid, scheme)).backward()

        walk()
        once = [p.grad.gather() for p in model.parameters()]
        assert len(formed) == len(SIZES) - 1  # there were no buckets yet
        model.zero_grad()
        with no_sync():
            walk()
        walk()
        assert len(formed) == len(SIZES) - 1
        for p, before in zip(model.parameters(), once, strict=True):
            np.testing.assert_allclose(p.grad.gather(), 2 * before, rtol=0, atol=1e-13 * np.abs(before).max())
        reducer.detach()
