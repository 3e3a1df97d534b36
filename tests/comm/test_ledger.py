"""The ledger counts what the rank receives, exactly."""

from __future__ import annotations

import numpy as np
import pytest

from parlinalg.comm import Comm, ledger


def test_every_operation(comm: Comm, sub: Comm, wait: bool) -> None:
    counts = [3 * r + 1 for r in range(comm.size)]
    n, own = sum(counts), counts[sub.rank]
    with ledger(comm) as book:
        sub.all_gather(np.zeros(own, np.float32), np.zeros(n, np.float32), counts, wait=wait).wait()
        sub.reduce_scatter(np.zeros(n), np.zeros(own), counts, wait=wait).wait()
        sub.all_reduce(np.zeros(11, np.float16), wait=wait).wait()
        sub.broadcast(np.zeros((2, 5)), 0, wait=wait).wait()
        sub.all_to_all(
            np.zeros(2 * n), [2 * c for c in counts], np.zeros(2 * own * comm.size), [2 * own] * comm.size, wait=wait
        ).wait()
        sub.barrier()
        sub.share("nothing")
    if comm.size == 1:
        assert book.calls.total() == book.words.total() == book.bytes.total() == 0
        return
    piece = 11 // comm.size + (sub.rank < 11 % comm.size)
    words = {
        "all_gather": n - own,
        "reduce_scatter": n - own,
        "all_reduce": 2 * (11 - piece),
        "broadcast": 10 * (sub.rank != 0),
        "all_to_all": 2 * own * (comm.size - 1),
    }
    sizes = {"all_gather": 4, "reduce_scatter": 8, "all_reduce": 2, "broadcast": 8, "all_to_all": 8}
    assert book.words == {(op, ("r",)): w for op, w in words.items()}
    assert book.bytes == {(op, ("r",)): w * sizes[op] for op, w in words.items()}
    assert book.calls == {(op, ("r",)): 1 for op in words}
    assert f"{book.words.total():,}" in str(book)
    assert str(book).splitlines()[0].split() == ["operation", "axes", "calls", "words", "bytes"]


@pytest.mark.mpi(min_size=2)
def test_messages(comm: Comm) -> None:
    with ledger(comm) as book:
        if comm.rank == 0:
            comm.send(np.zeros(5), 1)
        if comm.rank == 1:
            comm.receive(np.zeros(5), 0)
    expected = {0: {("send", ()): 0}, 1: {("receive", ()): 5}}.get(comm.rank, {})
    assert dict(book.words) == expected


def test_ledgers_nest_and_close(comm: Comm) -> None:
    with ledger(comm) as outer:
        comm.all_reduce(np.zeros(4))
        with ledger(comm) as inner:
            comm.all_reduce(np.zeros(4))
        comm.all_reduce(np.zeros(4))
    comm.all_reduce(np.zeros(4))
    some = comm.size > 1
    assert (outer.calls.total(), inner.calls.total()) == (3 * some, 1 * some)
    assert comm.books == []
