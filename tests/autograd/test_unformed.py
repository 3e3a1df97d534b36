"""Products that are formed where they go: in their place in a bucket, or added to what it has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.autograd import no_sync, recompute, unformed
from parlinalg.autograd.unformed import Unformed, place
from parlinalg.parallel import GradientReducer
from tests.conftest import SIZE
from tests.training import SIZES, batch, every_scheme, mean_loss


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.int64])
def test_put(backend_array: Any, dtype: type, add: bool) -> None:
    rng = np.random.default_rng(3)
    a, b, had = (rng.integers(-5, 6, shape).astype(dtype) for shape in ((9, 6), (6, 10), (9, 2, 5)))
    product = Unformed(backend_array(a), backend_array(b), np.dtype(dtype), (9, 2, 5))
    want = (a @ b).reshape(9, 2, 5) + (had if add else 0)
    wide = np.zeros((9, 2, 7), dtype)
    for out in (had.copy(), had.astype(np.float64), np.asfortranarray(had), wide):
        target = backend_array(out)
        view = target[..., :5] if out is wide else target
        view[...] = backend_array(had.astype(view.dtype))
        place(product, view, add=add)
        found = target if isinstance(target, np.ndarray) else target.get()
        np.testing.assert_array_equal(found[..., :5], want)
        assert not found[..., 5:].any()


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
    real = Unformed.formed

    def counting(product: Unformed) -> Any:
        formed.append(product.shape)
        return real(product)

    monkeypatch.setattr(unformed.Unformed, "formed", counting)
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
