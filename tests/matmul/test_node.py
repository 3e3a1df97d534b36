"""Products through memory that ranks have in common are those of messages, and count the same words."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Layout

pytestmark = pytest.mark.ranks(1, 2, 3, 4, 6, 8)
GRIDS = {1: (1, 1, 1), 2: (1, 2, 1), 3: (1, 1, 3), 4: (2, 1, 2), 6: (3, 2, 1), 8: (2, 2, 2)}
RESTS = [
    (Layout("m", ("k", "n")), Layout(("k", "m"), "n")),
    (Layout(("m", "n"), "k"), Layout("k", ("n", "m"))),
    (Layout(None, ("k", "m", "n")), Layout(("n", "m", "k"), None)),
]


@pytest.mark.core
@pytest.mark.parametrize("rests", RESTS, ids=["planned", "rows", "mixed"])
@pytest.mark.parametrize("dtype", ["float64", "complex64", "int32", "float16"])
@pytest.mark.parametrize("turned", [False, True])
def test_same_products_and_words_as_by_messages(
    rests, dtype: str, turned: bool, make_grid, world, backend: str, tune
) -> None:
    grid = make_grid(dict(zip("mnk", GRIDS[world.size])))
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-5, 6, shape).astype(dtype) for shape in ((13, 17), (17, 11)))

    def laid(array, layout):
        if turned:
            return pla.distribute(np.ascontiguousarray(array.T), grid, layout.T).T
        return pla.distribute(array, grid, layout)

    x, w = laid(a, rests[0]), laid(b, rests[1])
    found = {}
    for least in (1, 1 << 60):
        tune(ranks=2, must=backend == "numpy" and dtype != "float16", SHARED_BYTES=least)
        for _ in range(3):
            with pla.ledger(grid) as book:
                y = x @ w
        found[least] = (y.gather(), dict(book.words), dict(book.bytes), dict(book.calls))
        assert y.block.flags.owndata or y.block.base is not None
        y.block[...] = 0  # the result is this rank's own
    (common, *counted), (messages, *expected) = found.values()
    assert np.array_equal(common, a @ b)
    assert np.array_equal(messages, a @ b)
    assert counted == expected


def test_common_memory_is_used(make_grid, world, backend: str, tune) -> None:
    if world.size == 1 or world.local_size != world.size or backend != "numpy" or world.checked:
        return  # the checked mode compares messages
    tune(SHARED_BYTES=1)
    grid = make_grid(dict(zip("mnk", GRIDS[world.size])))
    x, w = (pla.random.normal((24, 24), grid, layout, seed=i) for i, layout in enumerate(RESTS[0]))
    y = x @ w
    axes = [axis for axis, n in grid.sizes.items() if n > 1]
    assert all(grid.comm((axis,)).shared is not None for axis in axes)
    again = (x @ w).gather()
    assert np.array_equal(y.gather(), again)
