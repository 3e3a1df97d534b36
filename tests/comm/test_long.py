"""All-reduces and broadcasts of long blocks between nodes give what those of MPI give."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = pytest.mark.ranks(2, 3, 4, 8)


@pytest.mark.parametrize("op", ["sum", "max", "min"])
@pytest.mark.parametrize("n", [1, 5, 1000])
def test_an_all_reduce_in_two_steps(op: str, n: int, world, monkeypatch: pytest.MonkeyPatch, tune) -> None:
    from parlinalg.comm import ledger

    terms = np.arange(world.size)[:, None] * 7 % 5 + np.arange(n) % 11.0
    expected = getattr(terms, op)(0)
    tune(LONG_SUM=1)
    monkeypatch.setattr(world, "local_size", 1)
    buffer = terms[world.rank].copy()
    with ledger(world) as book:
        world.all_reduce(buffer, op=op)
    assert np.array_equal(buffer, expected)
    own = n // world.size + (world.rank < n % world.size)
    assert dict(book.words) == {("all_reduce", world.axes): 2 * (n - own)}


@pytest.mark.parametrize("n", [1, 5, 1000])
def test_broadcasts_along_a_chain_overlap(n: int, world, monkeypatch: pytest.MonkeyPatch, tune) -> None:
    from parlinalg.comm import ledger

    tune(LONG_MESSAGE=1)
    tune(ranks=3, CHAIN_PIECE=64)
    monkeypatch.setattr(world, "local_size", 1)
    roots = list(range(world.size))
    blocks = [np.arange(n) * 1.5 + root if world.rank == root else np.full(n, np.nan) for root in roots]
    with ledger(world) as book:
        handles = [world.broadcast(block, root, wait=False) for root, block in zip(roots, blocks, strict=True)]
        for handle in handles:
            while world.rank % 2 and not handle.test():
                pass
            handle.wait()
            handle.wait()
    for root, block in zip(roots, blocks, strict=True):
        assert np.array_equal(block, np.arange(n) * 1.5 + root)
        again = block.copy() if world.rank == root else np.full(n, np.nan)
        world.broadcast(again, root)
        assert np.array_equal(again, block)
    assert book.words.total() == n * (world.size - 1)
    assert not world._under_way


@pytest.mark.parametrize("n", [3, 4, 8, 40, 4000])
def test_a_chain_has_about_two_pieces_a_rank(n: int, world, monkeypatch: pytest.MonkeyPatch, tune) -> None:
    from parlinalg.comm import algorithms

    tune(CHAIN_LEAST=32)
    if n >= 4:
        tune(ranks=3, CHAIN_PIECE=800)
    monkeypatch.setattr(world, "local_size", 1)
    found = []
    monkeypatch.setattr(algorithms.Chain, "_pass_on", _counting(algorithms.Chain._pass_on, found))
    block = np.arange(n * world.size) if world.rank == 0 else np.zeros(n * world.size, int)
    world.broadcast(block, 0)
    assert np.array_equal(block, np.arange(n * world.size))
    size = min(800, max(32, 4 * n))
    expected = -(-8 * n * world.size // size) if n >= 4 and world.size > 2 else 0
    assert len(found) == expected


def _counting(function, found):
    def counted(self):
        found.append(self)
        function(self)

    return counted
