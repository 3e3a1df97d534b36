"""Memory that the ranks of a node have in common."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from parlinalg.comm import algorithms, ledger, shared
from parlinalg.comm.shared import Meeting, Passing, beside, lasting_array, shared_array, terms

pytestmark = [pytest.mark.ranks(2, 3, 4, 8)]


@pytest.fixture
def group(world, monkeypatch: pytest.MonkeyPatch, tune):
    """A communicator of all ranks, on which the smallest blocks are had in common."""
    if world.local_size != world.size or not Path(shared.FOLDER).is_dir():
        pytest.skip("cannot be had here: the ranks are not on one node with memory in common")
    tune(must=False, SHARED_BYTES=1)
    new = shared._new

    def noted(size: int) -> str:
        files.append(new(size))
        return files[-1]

    files: list[str] = []
    monkeypatch.setattr(shared, "_new", noted)
    comm = world.sub(range(world.size), ("all",))
    comm.checked = False  # the checked mode compares messages
    yield comm
    comm.barrier()
    assert not [path for path in files if path and os.path.exists(path)]
    comm.free()


def test_all_ranks_see_what_each_writes(group) -> None:
    for _ in range(20):  # the memory is used again
        with shared_array(group, (group.size, 5), np.int64) as array:
            array[group.rank] = group.rank
            group.barrier()
            assert np.array_equal(array, np.arange(group.size)[:, None].repeat(5, 1))


def test_it_grows_and_leaves_no_file(group) -> None:
    for length in (8, 1000, 10, 100_000):
        with shared_array(group, (length,), np.float32) as array:
            assert array.shape == (length,)
            array[group.rank] = 1 + group.rank
            group.barrier()
            assert list(array[: group.size]) == [1 + r for r in range(group.size)]


def test_memory_that_lasts_is_used_again_once_no_rank_has_it(group) -> None:
    first = lasting_array(group, 1000, np.float64)
    first[group.rank] = 1 + group.rank
    second = lasting_array(group, 1000, np.float64)  # beside the first
    assert not np.shares_memory(first, second)
    second[:] = 0
    group.barrier()
    assert list(first[: group.size]) == [1 + r for r in range(group.size)]
    at = second.ctypes.data
    del second
    again = lasting_array(group, 900, np.float64)
    assert again.ctypes.data == at


def test_small_nested_and_switched_off_uses_get_none(group, monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_array(group, (0,), np.float64) as nothing:
        assert nothing is None
    with shared_array(group, (4,), np.float64) as outer, shared_array(group, (4,), np.float64) as inner:
        assert outer is not None
        assert inner is None
    monkeypatch.setenv("PARLINALG_SHARED", "0")
    with shared_array(group, (4,), np.float64) as off:
        assert off is None


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("places", [3, 5])
def test_a_block_passed_on_stays_until_all_have_read_it(
    group, monkeypatch: pytest.MonkeyPatch, places, ordered
) -> None:
    """As in a factorization: a rank still reads a block when it passes on the next.  Each rank dawdles in turn."""
    monkeypatch.setattr(shared, "ORDERED", ordered and shared.ORDERED)
    numbers = Meeting.SPREAD * group.size
    with shared_array(group, (places * 4 + numbers,), np.int64) as memory:
        blocks, passing = memory[: places * 4].reshape(places, 4), Passing(group, memory[places * 4 :], places)
        for number in range(40):
            root = number % group.size
            passing.room(number, group.rank == root)
            if group.rank == root:
                blocks[number % places] = number
            handle = passing.passed(number, root)
            handle.test()
            if number:
                if group.rank == number // 3 % group.size:
                    time.sleep(0.002)
                assert np.all(blocks[(number - 1) % places] == number - 1)
            handle.wait()
            handle.wait()
            assert handle.test()
            assert np.all(blocks[number % places] == number)


def test_too_little_memory_is_no_error(group, tune) -> None:
    tune(SHARED_SPARE=1 << 60)
    with shared_array(group, (8,), np.float64) as refused:
        assert refused is None
    tune(SHARED_SPARE=2)
    with shared_array(group, (8,), np.float64) as remembered:
        assert remembered is None
    with shared_array(group, (7,), np.float64) as smaller:
        assert smaller is not None


def test_a_rank_that_cannot_map_it_is_heard(group, monkeypatch: pytest.MonkeyPatch) -> None:
    if group.rank == group.size - 1:
        monkeypatch.setattr(shared, "_mapped", lambda *asked: None)
    with shared_array(group, (8,), np.float64) as refused:
        assert refused is None


def test_counts_as_the_operation_it_stands_for(group) -> None:
    with ledger(group) as book:
        group.count("all_gather", 10, 8)
    assert book.words == {("all_gather", ("all",)): 10}
    assert book.bytes.total() == 80


def numbers(comm, n: int, seed: int, dtype=np.float64) -> tuple[np.ndarray, np.ndarray]:
    """This rank's term, and the sum of all ranks' in their order."""
    each = [np.random.default_rng((seed, r)).standard_normal(n).astype(dtype) for r in range(comm.size)]
    total = each[0].copy()
    for term in each[1:]:
        total += term
    return each[comm.rank], total


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 5, 100_003])
def test_sums_in_place(group, n: int, dtype) -> None:
    own = terms(group, n, dtype)
    for wait in (True, False):
        own[...], right = numbers(group, n, 1, dtype)
        group.all_reduce(own, wait=wait).wait()
        assert np.array_equal(own, right)  # in the order of the ranks, the same bits on all
    part = own[n // 3 : n // 3 + n // 2]
    if part.size:
        own[...], right = numbers(group, n, 2, dtype)
        before = own.copy()
        group.all_reduce(part)
        assert np.array_equal(part, right[n // 3 : n // 3 + n // 2])
        assert np.array_equal(own[: n // 3], before[: n // 3])
        assert np.array_equal(own[n // 3 + n // 2 :], before[n // 3 + n // 2 :])
    own[...], _ = numbers(group, n, 3, dtype)
    group.all_reduce(own, op="max")
    assert np.array_equal(
        own, np.max([np.random.default_rng((3, r)).standard_normal(n) for r in range(group.size)], 0).astype(dtype)
    )


def test_sums_in_place_among_others(group) -> None:
    """Ranks see first phases end in unlike orders, and wait for what they started last first."""
    arrays, rights, handles = [], [], []
    for i in range(6):
        array = terms(group, 1000 + i, np.float32) if i % 3 else np.empty(1000 + i, np.float32 if i else np.float16)
        array[...], right = numbers(group, 1000 + i, i, array.dtype)
        arrays.append(array)
        rights.append(right)
        handles.append(group.all_reduce(array, wait=False))
        if group.rank % 2:
            handles[i // 2].test()
    gathered = np.empty(group.size)
    handles.append(group.all_gather(np.array([group.rank], float), gathered, [1] * group.size, wait=False))
    order = np.random.default_rng(group.rank).permutation(len(handles))
    for i in order:
        handles[i].wait()
        assert handles[i].test()
    for array, right in zip(arrays, rights, strict=True):
        np.testing.assert_allclose(array, right, rtol=1e-2 if array.dtype == np.float16 else 1e-5, atol=1e-2)
    assert list(gathered) == list(range(group.size))


def test_sums_in_place_count_as_others_and_their_memory_goes(group) -> None:
    own = terms(group, 10, np.float64)
    own[...] = group.rank
    with ledger(group) as book:
        group.all_reduce(own)
    other = np.zeros(10)
    with ledger(group) as plain:
        group.all_reduce(other)
    assert book.words == plain.words
    assert beside(group, own).shape == (group.size, 10)
    assert beside(group, other) is None
    assert beside(group, own.view(np.complex128)) is None
    assert terms(group, 10, np.float16) is None  # summed in 32 bits, not where they lie
    assert len([ref for ref in group.terms if ref() is not None]) == 1
    del own
    assert not [ref for ref in group.terms if ref() is not None]


def test_terms_that_cannot_be_had(group, monkeypatch: pytest.MonkeyPatch, tune) -> None:
    tune(SHARED_SPARE=1 << 60)
    assert terms(group, 8, np.float64) is None
    tune(SHARED_SPARE=2)
    if group.rank == 0:
        monkeypatch.setattr(shared, "_mapped", lambda *asked: None)
    assert terms(group, 8, np.float64) is None
    monkeypatch.setenv("PARLINALG_SHARED", "0")
    assert terms(group, 8, np.float64) is None


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_freeing_finishes_sums_that_some_ranks_drove_on(group, world, dtype) -> None:
    comm = world.sub(range(world.size), ("other",))
    comm.checked = False
    own = np.ones(100, dtype) if dtype is np.float16 else terms(comm, 100, dtype)
    own[...] = 1
    handle = comm.all_reduce(own, wait=False)
    if comm.rank == 0:
        until = time.monotonic() + 0.2
        while time.monotonic() < until and not handle.test():
            pass
    comm.free()
    assert (own == comm.size).all()


def test_an_error_between_the_phases_is_no_success(group, monkeypatch: pytest.MonkeyPatch) -> None:
    own = terms(group, 100, np.float64)
    own[...] = 1
    handle = group.all_reduce(own, wait=False)

    def fails(*asked):
        raise MemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(algorithms, "np", SimpleNamespace(empty=fails))
        with pytest.raises(MemoryError):
            handle.wait()
    handle.wait()  # again, and now there is room
    assert (own == group.size).all()
