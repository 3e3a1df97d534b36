"""The NCCL transport, on a stand-in for NCCL that records nothing and moves everything; on GPUs, NCCL itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from parlinalg.comm import Comm, ledger
from parlinalg.comm.group import Group
from parlinalg.errors import CommError
from tests.comm.conftest import DTYPES, NUMBERS, got, put, values, zeros

on_cupy = pytest.mark.skipif(
    os.environ.get("PARLINALG_TEST_BACKEND", "numpy") == "numpy", reason="cannot be had here: blocks of CuPy"
)
pytestmark = [pytest.mark.mpi(min_size=2), on_cupy]


class Event:
    """A CUDA event on a stream that is always up to date."""

    done = True

    def __init__(self, disable_timing: bool = False) -> None:
        pass

    def record(self, stream: Any) -> None:
        pass


@pytest.fixture
def gpus(comm: Comm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Comm]:
    import cupy

    from parlinalg.comm import nccl
    from tests.comm import fake_nccl

    if os.environ["PARLINALG_TEST_BACKEND"] == "gpu":
        made = nccl.nccl_over(comm.sub(range(comm.size), ("g",)))
    else:
        monkeypatch.setattr(nccl, "nccl", fake_nccl)
        monkeypatch.setattr(cupy.cuda, "Event", Event, raising=False)
        monkeypatch.setattr(cupy.cuda.Stream, "wait_event", lambda self, event: None, raising=False)
        monkeypatch.setattr(cupy.cuda.Device, "pci_bus_id", f"0000:{comm.rank}", raising=False)
        inner = comm.sub(range(comm.size), ("g",))
        fake_nccl.members.append(inner.mpi.Dup())
        made = nccl.nccl_over(inner)
    yield made
    made.free()


def test_movement(gpus: Comm, counts: list[int], wait: bool) -> None:
    for dtype in DTYPES:
        parts = [values(n, r, dtype) for r, n in enumerate(counts)]
        recv = zeros(sum(counts), dtype)
        gpus.all_gather(put(parts[gpus.rank]), recv, counts, wait=wait).wait()
        np.testing.assert_array_equal(got(recv), np.concatenate(parts))
        block = put(values(10, gpus.rank, dtype))
        gpus.broadcast(block, gpus.size - 1, wait=wait).wait()
        np.testing.assert_array_equal(got(block), values(10, gpus.size - 1, dtype))
        own = counts[gpus.rank]
        recv = zeros(own * gpus.size, dtype)
        gpus.all_to_all(put(np.concatenate(parts)), counts, recv, [own] * gpus.size, wait=wait).wait()
        np.testing.assert_array_equal(got(recv), np.tile(parts[gpus.rank], gpus.size))


def test_reductions(gpus: Comm, counts: list[int], wait: bool) -> None:
    for dtype in NUMBERS:
        n, before = sum(counts), sum(counts[: gpus.rank])
        total = sum(values(n, r, dtype) for r in range(gpus.size))
        recv = zeros(counts[gpus.rank], dtype)
        gpus.reduce_scatter(put(values(n, gpus.rank, dtype)), recv, counts, wait=wait).wait()
        np.testing.assert_array_equal(got(recv), total[before : before + counts[gpus.rank]])
        block = put(values(n, gpus.rank, dtype))
        gpus.all_reduce(block, wait=wait).wait()
        np.testing.assert_array_equal(got(block), total)


def test_a_group_is_one_call(gpus: Comm, counts: list[int]) -> None:
    """Also of blocks of any length, which nothing packs, of 16 bits, and of a dtype that NCCL does not reduce."""
    long = [n + 40_000 for n in counts]
    for dtype in (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int16)):
        with ledger(gpus) as book, Group() as group:
            found = []
            for each in (counts, [1] * gpus.size, long):
                recv, own = zeros(sum(each), dtype), zeros(each[gpus.rank], dtype)
                parts = [values(n, r, dtype) for r, n in enumerate(each)]
                gpus.all_gather(put(parts[gpus.rank]), recv, each, wait=False, group=group)
                send = put(values(sum(each), gpus.rank, dtype))
                found.append((each, recv, parts, own, gpus.reduce_scatter(send, own, each, wait=False, group=group)))
            assert len(group) == 6
        assert group.calls == book.calls.total() == 2
        for each, recv, parts, own, handle in found:
            handle.wait()
            total, before = sum(values(sum(each), r, dtype) for r in range(gpus.size)), sum(each[: gpus.rank])
            np.testing.assert_array_equal(got(own), total[before : before + each[gpus.rank]])
            np.testing.assert_array_equal(got(recv), np.concatenate(parts))


def test_the_rest(gpus: Comm) -> None:
    """Messages, NumPy blocks and agreement go through the communicator inside; the ledger counts all alike."""
    right, left = (gpus.rank + 1) % gpus.size, (gpus.rank - 1) % gpus.size
    with ledger(gpus) as book:
        block = zeros(5, np.float32)
        handle = gpus.send(put(np.full(5, gpus.rank, np.float32)), right, wait=False)
        gpus.receive(block, left)
        handle.wait()
        np.testing.assert_array_equal(got(block), left)
        total = np.array([gpus.rank])
        gpus.all_reduce(total)
        assert total[0] == sum(range(gpus.size))
        assert gpus.share(gpus.rank) == list(range(gpus.size))
        gpus.barrier()
    assert book.words["receive", ("g",)] == 5


def test_two_ranks_on_one_gpu(gpus: Comm, monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    from parlinalg.comm import nccl

    monkeypatch.setattr(cupy.cuda.Device, "pci_bus_id", "0000:17", raising=False)
    with pytest.raises(CommError, match=r"NCCL needs one GPU a rank: the ranks \[0, 1.*\] share the GPU 0000:17"):
        nccl.nccl_over(gpus)


def test_no_nccl(comm: Comm) -> None:
    from parlinalg.comm import nccl

    with pytest.raises(CommError, match="rank 1: CuPy has no NCCL"):
        nccl.nccl_over(comm)
