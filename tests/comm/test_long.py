"""All-reduces of long blocks between nodes, in two steps, are those of MPI."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.ranks(2, 3, 4, 8)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("n", [1, 5, 1000])
def test_an_all_reduce_in_two_steps(op: str, n: int, world, monkeypatch: pytest.MonkeyPatch) -> None:
    from parlinalg.comm import ledger, mpi

    terms = np.arange(world.size)[:, None] * 7 % 5 + np.arange(n) % 11.0
    expected = getattr(terms, op)(0)
    monkeypatch.setattr(mpi, "LONG", 1)
    monkeypatch.setattr(world, "local_size", 1)
    buffer = terms[world.rank].copy()
    with ledger(world) as book:
        world.all_reduce(buffer, op=op)
    assert np.array_equal(buffer, expected)
    own = n // world.size + (world.rank < n % world.size)
    assert dict(book.words) == {("all_reduce", world.axes): 2 * (n - own)}
