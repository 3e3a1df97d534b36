"""Every operation on every rank count: `mpiexec -n 4 python -m pytest --with-mpi tests/comm`."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest

from parlinalg.comm import Comm, Handle, ledger
from parlinalg.comm.group import Group
from parlinalg.errors import CommError
from tests.comm.conftest import DTYPES, NUMBERS, ORDERED, got, put, values, zeros

pytestmark = pytest.mark.usefixtures("limit")


def finish(handle: Handle, wait: bool) -> None:
    if wait:
        assert handle.test()
    handle.test()
    handle.wait()
    assert handle.test()
    handle.wait()


def run(counts: list[int], rank: int) -> slice:
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def test_all_gather(comm: Comm, counts: list[int], wait: bool) -> None:
    for dtype in DTYPES:
        recv = zeros(sum(counts), dtype)
        finish(comm.all_gather(put(values(counts[comm.rank], comm.rank, dtype)), recv, counts, wait=wait), wait)
        np.testing.assert_array_equal(got(recv), np.concatenate([values(n, r, dtype) for r, n in enumerate(counts)]))


def test_all_gather_where_the_parts_lie(comm: Comm, counts: list[int], wait: bool) -> None:
    want = np.concatenate([values(n, r, np.dtype(np.float32)) for r, n in enumerate(counts)])
    recv, own = zeros(sum(counts), np.dtype(np.float32)), run(counts, comm.rank)
    recv[own] = put(values(counts[comm.rank], comm.rank, np.dtype(np.float32)))
    finish(comm.all_gather(recv[own], recv, counts, wait=wait), wait)
    np.testing.assert_array_equal(got(recv), want)


def test_reduce_scatter(comm: Comm, counts: list[int], wait: bool) -> None:
    for dtype in NUMBERS:
        n = sum(counts)
        recv = zeros(counts[comm.rank], dtype)
        finish(comm.reduce_scatter(put(values(n, comm.rank, dtype)), recv, counts, wait=wait), wait)
        total = sum(values(n, r, dtype) for r in range(comm.size))
        np.testing.assert_array_equal(got(recv), total[run(counts, comm.rank)])


@pytest.mark.parametrize("packed", [True, False])
def test_a_group_of_calls(comm: Comm, counts: list[int], tune: Any, packed: bool) -> None:
    """Gathers are one call, and reduce-scatters of each dtype; blocks that are too long to be packed start alone."""
    pieces = [counts, counts[::-1], [1] * comm.size, [0] * comm.size, [2 * n for n in counts]]
    tune(ranks=2, must=False, GROUPED_PIECE=1 << 16 if packed else 0)
    dtypes = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.complex128)]
    group, checks = Group(), []

    def same(handle: Handle, recv: Any, want: np.ndarray) -> None:
        handle.wait()
        assert handle.test()
        np.testing.assert_array_equal(got(recv), want)

    with ledger(comm) as book:
        for dtype in dtypes:
            for each in pieces:
                send, recv = put(values(each[comm.rank], comm.rank, dtype)), zeros(sum(each), dtype)
                want = np.concatenate([values(n, r, dtype) for r, n in enumerate(each)])
                checks.append((comm.all_gather(send, recv, each, wait=False, group=group), recv, want))
                send, recv = put(values(sum(each), comm.rank, dtype)), zeros(each[comm.rank], dtype)
                want = sum(values(sum(each), r, dtype) for r in range(comm.size))[run(each, comm.rank)]
                checks.append((comm.reduce_scatter(send, recv, each, wait=False, group=group), recv, want))
        few = 2 * len(dtypes)
        least = sum(not any(each) for each in pieces) * few  # those without elements
        assert len(group) == (0 if comm.size == 1 else few * len(pieces) if packed else least)
        handle, recv, want = checks.pop(6)
        same(handle, recv, want)  # which starts the others too
        assert len(group) == group.nbytes == 0
        for handle, recv, want in checks[::-1] if packed else checks:
            same(handle, recv, want)
    if comm.size > 1:
        alone = 0 if packed else few * len(pieces) - least
        assert book.calls.total() == few + alone
        assert group.calls == few
        each_words = sum(2 * (sum(each) - each[comm.rank]) for each in pieces)
        assert book.words.total() == len(dtypes) * each_words
        assert book.bytes.total() == sum(dtype.itemsize for dtype in dtypes) * each_words


def test_a_group_without_calls_and_one_that_fails(comm: Comm) -> None:
    """An error within the block leaves the calls that wait, which others have not started either."""
    with ledger(comm) as book, Group():
        pass
    recv, counts, group = np.full(comm.size, -1.0), [1] * comm.size, Group()

    def fail() -> None:
        with group:
            comm.all_gather(np.ones(1), recv, counts, wait=False, group=group)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert book.calls.total() == group.calls == 0
    if comm.size > 1:
        np.testing.assert_array_equal(recv, -1)
    comm.all_gather(np.ones(1), recv, counts, group=group)  # with waiting it takes no part
    np.testing.assert_array_equal(recv, 1)


def test_all_reduce(comm: Comm, wait: bool) -> None:
    for dtype, shape in product(NUMBERS, [(0,), (), (1,), (3, 5)]):
        n = math.prod(shape)
        buffer = put(values(n, comm.rank, dtype).reshape(shape))
        finish(comm.all_reduce(buffer, wait=wait), wait)
        total = sum(values(n, r, dtype) for r in range(comm.size))
        np.testing.assert_array_equal(got(buffer), total.reshape(shape))


@pytest.mark.parametrize("op", ["max", "min"])
def test_extremes(comm: Comm, op: str, wait: bool) -> None:
    for dtype in ORDERED:
        expected = getattr(np, op)([values(11, r, dtype) for r in range(comm.size)], axis=0)
        buffer = put(values(11, comm.rank, dtype))
        finish(comm.all_reduce(buffer, op=op, wait=wait), wait)
        np.testing.assert_array_equal(got(buffer), expected)
        counts = [11, *[0] * (comm.size - 1)]
        recv = zeros(counts[comm.rank], dtype)
        finish(comm.reduce_scatter(put(values(11, comm.rank, dtype)), recv, counts, op=op, wait=wait), wait)
        np.testing.assert_array_equal(got(recv), expected[: counts[comm.rank]])


def test_broadcast(comm: Comm, wait: bool) -> None:
    for dtype in DTYPES:
        for root in range(comm.size):
            buffer = put(values(12, comm.rank, dtype).reshape(3, 4))
            finish(comm.broadcast(buffer, root, wait=wait), wait)
            np.testing.assert_array_equal(got(buffer).reshape(-1), values(12, root, dtype))


def test_all_to_all(comm: Comm, wait: bool) -> None:
    for dtype in DTYPES:

        def between(giver: int, taker: int) -> np.ndarray:
            return values((3 * giver + 5 * taker) % 11, giver * 7 + taker, dtype)

        gives = [between(comm.rank, r) for r in range(comm.size)]
        gets = [between(r, comm.rank) for r in range(comm.size)]
        recv = zeros(sum(map(len, gets)), dtype)
        handle = comm.all_to_all(
            put(np.concatenate(gives)), list(map(len, gives)), recv, list(map(len, gets)), wait=wait
        )
        finish(handle, wait)
        np.testing.assert_array_equal(got(recv), np.concatenate(gets))


def test_send_and_receive(comm: Comm, wait: bool) -> None:
    for dtype in DTYPES:
        left, right = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        first, second = zeros(10, dtype), zeros((2, 3), dtype)
        handles = [
            comm.send(put(values(10, comm.rank, dtype)), right, tag=1, wait=False),
            comm.send(put(values(6, comm.rank + 1, dtype).reshape(2, 3)), right, tag=2, wait=False),
            comm.receive(second, left, tag=2, wait=wait),
            comm.receive(first, left, tag=1, wait=wait),
        ]
        for handle in handles:
            handle.wait()
        np.testing.assert_array_equal(got(first), values(10, left, dtype))
        np.testing.assert_array_equal(got(second).reshape(-1), values(6, left + 1, dtype))


@pytest.mark.mpi(min_size=2)
def test_blocking_send(comm: Comm) -> None:
    """A token goes round: rank 0 sends first."""
    token = put(np.full(20, comm.rank))
    if comm.rank == 0:
        comm.send(token, 1)
        comm.receive(token, comm.size - 1)
        np.testing.assert_array_equal(got(token), 0)
    else:
        comm.receive(token, comm.rank - 1)
        comm.send(token, (comm.rank + 1) % comm.size)


def test_several_under_way(comm: Comm) -> None:
    """Nonblocking operations of all kinds may overlap, and finish in any order."""
    half = [put(np.full(20 + i, comm.rank + i, np.float16)) for i in range(3)]
    whole = put(np.full(8, comm.rank, np.float64))
    handles = [comm.all_reduce(half[0], wait=False), comm.all_reduce(whole, wait=False)]
    handles += [comm.all_reduce(half[1], wait=False), comm.broadcast(half[2], comm.size - 1, wait=False)]
    if comm.rank % 2:
        handles[0].test()
    comm.barrier()
    for handle in handles[::-1]:
        handle.wait()
    ranks = sum(range(comm.size))
    np.testing.assert_array_equal(got(half[0]), ranks)
    np.testing.assert_array_equal(got(half[1]), ranks + comm.size)
    np.testing.assert_array_equal(got(half[2]), comm.size + 1)
    np.testing.assert_array_equal(got(whole), ranks)


def test_ranks_may_wait_in_different_orders(comm: Comm) -> None:
    """The second phases of 16-bit all-reduces start in one order on all ranks, whatever each waits for first."""
    blocks = [put(np.full(20, comm.rank + 10 * i, np.float16)) for i in range(4)]
    handles = [comm.all_reduce(block, wait=False) for block in blocks]
    for handle in handles[:: -1 if comm.rank % 2 else 1]:
        handle.wait()
    for i, block in enumerate(blocks):
        np.testing.assert_array_equal(got(block), sum(range(comm.size)) + 10 * i * comm.size)


def test_a_forgotten_handle_keeps_its_buffers(comm: Comm) -> None:
    for _ in range(20):
        comm.all_reduce(put(np.full(1000, comm.rank, np.float64)), wait=False)
    after = put(np.full(1000, comm.rank))
    comm.all_reduce(after)
    np.testing.assert_array_equal(got(after), sum(range(comm.size)))


def test_reverse_order(comm: Comm, sub: Comm) -> None:
    assert sub.rank == comm.size - 1 - comm.rank
    assert sub.world_ranks == comm.world_ranks[::-1]
    assert (sub.axes, sub.books is comm.books) == (("r",), True)
    recv = zeros(comm.size, int)
    sub.all_gather(put(np.array([comm.rank])), recv, [1] * comm.size)
    np.testing.assert_array_equal(got(recv), range(comm.size)[::-1])


def test_sums_of_16_bits_are_formed_in_32(comm: Comm) -> None:
    """In 16 bits 2048 + 1 = 2048; the sum of many ones must not be lost, and is rounded once."""
    for dtype, big in ((np.dtype("float16"), 2048.0), (DTYPES[1], 256.0)):
        terms = np.full(7, big if comm.rank == 0 else 1.0).astype(dtype)
        expected = np.float32(big + comm.size - 1).astype(dtype)
        for wait in (True, False):
            buffer = put(terms.copy())
            comm.all_reduce(buffer, wait=wait).wait()
            np.testing.assert_array_equal(got(buffer), expected)


@pytest.mark.parametrize("saturates", [False, True])
def test_sums_of_integers_wrap_around(comm: Comm, wait: bool, saturates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As NumPy's do, also where the MPI library's own would stop at the largest number."""
    if comm.size > 1:
        from parlinalg.comm import mpi

        monkeypatch.setattr(mpi, "SATURATES", saturates or mpi.SATURATES)
    for dtype in filter(lambda d: d.kind in "iu", NUMBERS):
        n, top = 100, np.iinfo(dtype).max
        terms = np.array([np.arange(n).astype(dtype) + dtype.type(top // 2 + r) for r in range(comm.size)])
        want = np.add.reduce(terms, dtype=dtype)
        block, own = put(terms[comm.rank].copy()), zeros(n, dtype)
        finish(comm.all_reduce(block, wait=wait), wait)
        np.testing.assert_array_equal(got(block), want)
        send = put(np.tile(terms[comm.rank], comm.size))
        finish(comm.reduce_scatter(send, own, [n] * comm.size, wait=wait), wait)
        np.testing.assert_array_equal(got(own), want)


def test_share(comm: Comm) -> None:
    got = comm.share({"rank": comm.rank, "text": "é" * 300 * comm.rank})
    assert got == [{"rank": r, "text": "é" * 300 * r} for r in range(comm.size)]
    assert comm.share(None) == [None] * comm.size


def test_a_rank_writes_to_itself(comm: Comm) -> None:
    block = zeros(3, float)
    with pytest.raises(CommError, match="send first"):
        comm.receive(block, comm.rank)
    comm.send(put(np.arange(3.0)), comm.rank)
    comm.receive(block, comm.rank)
    np.testing.assert_array_equal(got(block), np.arange(3.0))
