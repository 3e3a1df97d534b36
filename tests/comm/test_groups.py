"""Communicators made of others, agreement about errors, and resources given back."""

from __future__ import annotations

import gc
import os
import sys

import numpy as np
import pytest

from parlinalg.comm import Comm, SingleComm, check_replicas, open_comm, ranks_map
from parlinalg.errors import CommError


def test_cartesian(comm: Comm) -> None:
    made = comm.cartesian({"r": 1, "c": comm.size})
    assert made is not None
    assert (made.rank, made.size, made.axes) == (comm.rank, comm.size, ("r", "c"))
    assert (made.local_rank, made.local_size) == (comm.local_rank, comm.local_size)
    made.free()
    with pytest.raises(CommError, match=f"need {comm.size + 1} ranks, but there {'is' if comm.size == 1 else 'are'}"):
        comm.cartesian({"r": comm.size + 1})


@pytest.mark.mpi(min_size=2)
def test_ranks_left_over(comm: Comm) -> None:
    made = comm.cartesian({"r": comm.size - 1})
    assert (made is None) == (comm.rank == comm.size - 1)
    if made is not None:
        made.barrier()
        made.free()


def test_parts_of_each_kind(comm: Comm) -> None:
    """Even and odd ranks form groups of their own at the same time."""
    ranks = range(comm.rank % 2, comm.size, 2)
    made = comm.sub(ranks, ("x",))
    total = np.array([comm.rank])
    made.all_reduce(total)
    assert total[0] == sum(ranks)
    made.free()


def test_wrong_ranks(comm: Comm) -> None:
    with pytest.raises(CommError, match="rank"):
        comm.sub([comm.size], ())
    with pytest.raises(CommError, match="rank"):
        comm.sub([0, 0], ())


@pytest.mark.mpi(min_size=2)
def test_use_after_free(comm: Comm) -> None:
    made = comm.sub(range(comm.size), ("r",))
    made.free()
    made.free()
    with pytest.raises(CommError, match="freed"):
        made.all_reduce(np.zeros(2))


@pytest.mark.ranks(1, 2, 4)
def test_more_communicators_than_mpi_has(comm: Comm) -> None:
    for _ in range(2100):
        comm.sub(range(comm.size), ("r",)).free()


@pytest.mark.ranks(1, 2, 4)
def test_many_small_operations_leave_nothing(comm: Comm, full: bool) -> None:
    block = np.zeros(8, np.float32)
    half = np.zeros(8, np.float16)
    others = set(comm._under_way)  # that another test left
    for _ in range(200):
        comm.all_reduce(block)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(10_000 if full else 1000):
        comm.all_reduce(block)
        comm.broadcast(block, 0, wait=False).wait()
    for _ in range(200):
        comm.all_reduce(half, wait=False).wait()
    gc.collect()
    assert len(gc.get_objects()) - before < 100
    assert set(comm._under_way) <= others


def test_open(comm: Comm) -> None:
    assert open_comm(comm) is comm
    assert [place["rank"] for place in ranks_map(comm)] == list(comm.world_ranks)
    assert ranks_map(comm)[comm.rank]["pid"] == os.getpid()


def test_without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARLINALG_MPI", "0")
    single = open_comm()
    assert isinstance(single, SingleComm)
    assert (single.size, single.world_ranks, single.local_size) == (1, (0,), 1)


@pytest.mark.serial
def test_processes_that_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delenv("PARLINALG_MPI", raising=False)
        patch.setenv("OMPI_COMM_WORLD_SIZE", "4")
        patch.setitem(sys.modules, "mpi4py", None)
        with pytest.raises(CommError, match="4 processes were started together"):
            open_comm()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda c: c.all_reduce(np.zeros((4, 6))[:, ::2]), "not C-contiguous"),
        (lambda c: c.all_reduce(np.zeros(3), op="mean"), "'sum', 'max' and 'min'"),
        (lambda c: c.all_reduce(np.zeros(3, bool)), "booleans have no sum"),
        (lambda c: c.all_reduce(np.zeros(3, complex), op="max"), "complex128 has no max"),
        (lambda c: c.broadcast(np.zeros(3), c.size), "root="),
        (lambda c: c.send(np.zeros(3), -1), "to=-1"),
        (lambda c: c.all_gather(np.zeros(2), np.zeros(2 * c.size + 1), [2] * c.size), "one count a rank"),
        (lambda c: c.all_gather(np.zeros(2), np.zeros(c.size), [1] * c.size), "they should be equal"),
        (lambda c: c.all_gather(np.zeros(1), np.zeros(c.size, int), [1] * c.size), "they should be the same"),
        (lambda c: c.reduce_scatter(np.zeros(c.size), np.zeros(2), [1] * c.size), "they should be equal"),
        (lambda c: c.all_to_all(np.zeros(3), [1] * (c.size + 2), np.zeros(3), [1] * c.size), "one count a rank"),
    ],
)
def test_wrong_arguments(comm: Comm, call, sentence: str) -> None:
    with pytest.raises(CommError, match=sentence):
        call(comm)


@pytest.mark.mpi(min_size=2)
def test_dtypes_that_do_not_travel(comm: Comm) -> None:
    with pytest.raises(CommError, match="cannot be sent"):
        comm.broadcast(np.array([None, 1], object), 0)
    with pytest.raises(CommError, match="MPI cannot reduce"):
        comm.all_reduce(np.zeros(3, "M8[s]"), op="max")


@pytest.fixture
def checked(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> Comm:
    monkeypatch.setattr(comm, "checked", True)
    return comm


def test_checked_mode_lets_right_calls_pass(checked: Comm) -> None:
    size, rank = checked.size, checked.rank
    counts = list(range(size))
    recv = np.zeros(sum(counts))
    checked.all_gather(np.full(rank, rank), recv := np.zeros(sum(counts), int), counts)
    np.testing.assert_array_equal(recv, np.repeat(counts, counts))
    checked.reduce_scatter(np.ones(recv.size), np.zeros(rank), counts)
    checked.all_to_all(np.zeros(sum(counts)), counts, np.zeros(rank * size), [rank] * size)
    checked.broadcast(np.zeros(2), 0)
    checked.all_reduce(np.zeros(2), op="max")
    checked.barrier()
    check_replicas(checked, np.arange(3), "x")


@pytest.mark.mpi(min_size=2)
def test_checked_mode_finds_wrong_calls(checked: Comm) -> None:
    """Every difference raises on all ranks, and names the lines."""
    size, me = checked.size, checked.rank == 1
    with pytest.raises(CommError, match=r"rank 1: barrier\(\) at .*test_groups.py:\d+"):
        checked.barrier() if me else checked.all_reduce(np.zeros(3))
    with pytest.raises(CommError, match="float32"):
        checked.all_reduce(np.zeros(3, np.float32 if me else np.float64))
    with pytest.raises(CommError, match="counts 4"):
        checked.all_reduce(np.zeros(4 if me else 3))
    with pytest.raises(CommError, match="reduction=max"):
        checked.all_reduce(np.zeros(3), op="max" if me else "sum")
    with pytest.raises(CommError, match="root=1"):
        checked.broadcast(np.zeros(3), 1 if me else 0)
    counts, other = [2] * size, [1, *[2] * (size - 1)]
    mine = other if me else counts
    with pytest.raises(CommError, match=r"\[1, 2"):
        checked.all_gather(np.zeros(mine[checked.rank]), np.zeros(sum(mine)), mine)
    gives = [1] * size
    gets = [2 if me else 1, *[1] * (size - 1)]
    with pytest.raises(CommError, match=r"rank 0 sends rank 1 1 elements .* expects 2"):
        checked.all_to_all(np.zeros(sum(gives)), gives, np.zeros(sum(gets)), gets)
    with pytest.raises(CommError, match=r"the bias .* rank 1: checksum"):
        check_replicas(checked, np.full(3, float(me)), "the bias")
    checked.barrier()
