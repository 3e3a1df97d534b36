"""Memory that the ranks of a node have in common."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from parlinalg.comm import ledger, shared
from parlinalg.comm.shared import common

pytestmark = [pytest.mark.ranks(2, 3, 4, 8)]


@pytest.fixture
def group(world, monkeypatch: pytest.MonkeyPatch):
    """A communicator of all ranks, on which the smallest blocks are had in common."""
    if world.local_size != world.size or not Path(shared.FOLDER).is_dir():
        pytest.skip("cannot be had here: the ranks are not on one node with memory in common")
    monkeypatch.setattr(shared, "least", 1)
    reserved = shared._reserved

    def noted(size: int) -> str:
        files.append(reserved(size))
        return files[-1]

    files: list[str] = []
    monkeypatch.setattr(shared, "_reserved", noted)
    comm = world.sub(range(world.size), ("all",))
    yield comm
    comm.barrier()
    assert not [path for path in files if path and os.path.exists(path)]
    comm.free()


def test_all_ranks_see_what_each_writes(group) -> None:
    for _ in range(20):  # the memory is used again
        with common(group, (group.size, 5), np.int64) as array:
            array[group.rank] = group.rank
            group.barrier()
            assert np.array_equal(array, np.arange(group.size)[:, None].repeat(5, 1))


def test_it_grows_and_leaves_no_file(group) -> None:
    for length in (8, 1000, 10, 100_000):
        with common(group, (length,), np.float32) as array:
            assert array.shape == (length,)
            array[group.rank] = 1 + group.rank
            group.barrier()
            assert list(array[: group.size]) == [1 + r for r in range(group.size)]


def test_small_nested_and_switched_off_uses_get_none(group, monkeypatch: pytest.MonkeyPatch) -> None:
    with common(group, (0,), np.float64) as nothing:
        assert nothing is None
    with common(group, (4,), np.float64) as outer, common(group, (4,), np.float64) as inner:
        assert outer is not None
        assert inner is None
    monkeypatch.setenv("PARLINALG_SHARED", "0")
    with common(group, (4,), np.float64) as off:
        assert off is None


def test_too_little_memory_is_no_error(group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "SPARE", 1 << 60)
    with common(group, (8,), np.float64) as refused:
        assert refused is None
    monkeypatch.setattr(shared, "SPARE", 2)
    with common(group, (8,), np.float64) as remembered:
        assert remembered is None
    with common(group, (7,), np.float64) as smaller:
        assert smaller is not None


def test_a_rank_that_cannot_map_it_is_heard(group, monkeypatch: pytest.MonkeyPatch) -> None:
    if group.rank == group.size - 1:
        monkeypatch.setattr(shared, "_mapped", lambda path, size: None)
    with common(group, (8,), np.float64) as refused:
        assert refused is None


def test_counts_as_the_operation_it_stands_for(group) -> None:
    with ledger(group) as book:
        group.count("all_gather", 10, 8)
    assert book.words == {("all_gather", ("all",)): 10}
    assert book.bytes.total() == 80
