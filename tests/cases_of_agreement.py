"""Tests that fail on some ranks, run by `test_agreement.py` on three ranks; not collected by themselves."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

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


if CASE == "waiting":

    def test_fails_while_the_others_wait_for_it(world: Any) -> None:
        assert world.rank != 1, "this is rank 1"
        world.barrier()


def test_comes_after(world: Any) -> None:
    world.barrier()
