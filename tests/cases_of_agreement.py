"""Tests that fail on some ranks, run by `test_agreement.py` on three ranks; not collected by themselves."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import parlinalg as pla
from parlinalg.testing import assert_equal_to_serial
from tests.agreement import agreed

CASE = os.environ.get("CASE", "")


def test_passes(world: Any) -> None:
    world.barrier()


if CASE == "example":

    @given(st.integers(0, 100))
    @agreed
    def test_an_example_fails_on_one_rank(world: Any, n: int) -> None:
        total = np.ones(1)
        world.all_reduce(total)
        assert not (world.rank == 1 and n > 50), "an example of rank 1"


if CASE == "alike":

    def test_fails_alike(world: Any) -> None:
        assert world.size == 1, "the same everywhere"


if CASE == "one":

    def test_fails_on_one_rank(world: Any) -> None:
        assert world.rank != 1, "this is rank 1"


if CASE in ("waiting", "two waited for"):

    def test_fails_before() -> None:
        raise AssertionError("the same everywhere")

    def test_fails_while_the_others_wait_for_it(world: Any) -> None:
        assert world.rank == 0 or (CASE == "waiting" and world.rank == 2), f"this is rank {world.rank}"
        world.barrier()


if CASE == "timeout":

    @pytest.mark.timeout(8)
    def test_fails_late(world: Any) -> None:
        if world.rank == 1:
            time.sleep(3)
            raise AssertionError("this is rank 1")
        world.barrier()


if CASE == "compare":

    def test_fails_before_a_comparison(world: Any) -> None:
        assert world.rank != 1, "this is rank 1"
        assert_equal_to_serial(np.ones(3), np.ones(3))


if CASE == "return":

    def test_returns_before_a_comparison(world: Any) -> None:
        if world.rank != 1:
            assert_equal_to_serial(np.ones(3), np.ones(3))


if CASE == "skip":

    def test_is_skipped_on_one_rank(world: Any) -> None:
        if world.rank == 1:
            pytest.skip("cannot be had here: only on rank 1")


if CASE == "xfail":

    @pytest.mark.xfail(reason="of rank 1")
    def test_is_expected_to_fail(world: Any) -> None:
        assert world.rank != 1


if CASE == "exit":

    def test_ends_the_session_of_one_rank(world: Any) -> None:
        if world.rank == 1:
            pytest.exit("rank 1 has had enough")
        world.barrier() if world.size == 1 else None


if CASE == "collect":

    @pytest.mark.parametrize("n", [int(os.environ.get("PMI_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))) == 1])
    def test_is_another_one_on_rank_1(n: bool) -> None:
        pass


if CASE == "replicas":

    def test_replicas_differ_by_little(make_grid: Any) -> None:
        grid = make_grid({"a": 3})
        A = pla.DistArray(np.ones(4) + (grid.rank == 2) * 1e-15, (4,), pla.Layout(None), grid)
        assert_equal_to_serial({"A": A}, {"A": np.ones(4)})


def test_comes_after(world: Any) -> None:
    world.barrier()
