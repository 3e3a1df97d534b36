"""Partitions: every layer in one stage, the dearest stage as cheap as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import numpy as np
import pytest

from parlinalg.errors import ConfigError
from parlinalg.nn import Layer
from parlinalg.pipeline.partition import balanced_partition, block_partition, given_partition, uniform_partition

pytestmark = pytest.mark.serial


def layers(inner: int, ends: tuple[int, int] = (0, 0)) -> list[Layer]:
    kinds = [True] * ends[0] + [False] * inner + [True] * ends[1]
    return [Layer(str(i), lambda x: x, (), end) for i, end in enumerate(kinds)]


@pytest.mark.parametrize(
    ("count", "stages", "want"),
    [(30, 4, (8, 8, 7, 7)), (7, 1, (7,)), (5, 5, (1,) * 5), (9, 4, (3, 2, 2, 2)), (96, 8, (12,) * 8)],
)
def test_uniform(count: int, stages: int, want: tuple[int, ...]) -> None:
    assert uniform_partition(count, stages) == want
    assert balanced_partition([2.5] * count, stages) == want


def test_no_layer_is_ever_lost() -> None:
    for count in range(1, 40):
        for stages in range(1, count + 1):
            found = uniform_partition(count, stages)
            assert (sum(found), len(found), max(found) - min(found) <= 1) == (count, stages, True)
    for blocks in range(1, 20):
        for stages in range(1, blocks + 3):
            found = block_partition(layers(blocks, (1, 1)), stages)
            assert (sum(found), len(found), min(found) >= 1) == (blocks + 2, stages, True)


def test_ends_go_with_the_first_and_the_last_blocks() -> None:
    assert block_partition(layers(30, (1, 1)), 4) == (9, 8, 7, 8)
    assert block_partition(layers(2, (1, 1)), 4) == (1, 1, 1, 1)
    assert block_partition(layers(4, (2, 0)), 2) == (4, 2)


def brute(costs: Sequence[float], stages: int) -> tuple[float, float]:
    """The least dearest stage, and of the cuts that have it the least sum of squares, by trying all."""
    found = []
    for cuts in combinations(range(1, len(costs)), stages - 1):
        parts = [sum(costs[a:b]) for a, b in zip((0, *cuts), (*cuts, len(costs)), strict=True)]
        found.append((max(parts), sum(p * p for p in parts)))
    return min(found)


def test_balanced_cuts_are_the_best_ones() -> None:
    random = np.random.default_rng(1)
    for _ in range(60):
        costs = [float(c) for c in random.integers(0, 9, random.integers(1, 9))]
        stages = int(random.integers(1, len(costs) + 1))
        found = balanced_partition(costs, stages)
        assert (sum(found), len(found), min(found) >= 1) == (len(costs), stages, True)
        parts = [sum(costs[a:b]) for a, b in pairwise(np.cumsum([0, *found]))]
        assert (max(parts), sum(p * p for p in parts)) == brute(costs, stages)


def test_large_partitions() -> None:
    costs = list(np.random.default_rng(2).random(200))
    assert sum(balanced_partition(costs, 16)) == 200


def test_partitions_by_hand() -> None:
    assert given_partition([8, 8, 7, 7], layers(30), 4) == (8, 8, 7, 7)
    assert given_partition([8, 8, 7, 7], layers(30, (1, 1)), 4) == (9, 8, 7, 8)
    assert given_partition([9, 8, 8, 7], layers(30, (1, 1)), 4) == (9, 8, 8, 7)
    assert given_partition([0, 15, 15, 0], layers(30, (1, 1)), 4) == (1, 15, 15, 1)


@pytest.mark.parametrize(
    ("given", "made", "stages", "message"),
    [
        ([8, 8, 8, 7], layers(30), 4, r"has 31 layers .* the model has 30 layers: .*sum to 30, .*\[8, 8, 7, 7\]"),
        ([8, 8], layers(30, (1, 1)), 2, r"has 16 layers .* has 30 blocks \(32 layers with both ends\): .*\[15, 15\]"),
        ([15, 15], layers(30), 4, r"has 2 numbers, but there are 4 stages .* such as \[8, 8, 7, 7\]"),
        ([15, 0, 15], layers(30), 3, r"leaves stage 1 without a layer; .*\[10, 10, 10\]"),
    ],
)  # fmt: skip
def test_wrong_partitions_say_what_is_right(given: list[int], made: list[Layer], stages: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        given_partition(given, made, stages)


def test_more_stages_than_layers() -> None:
    with pytest.raises(ConfigError, match=r"5 stages needs as many layers, but the model has 4: use at most 4"):
        uniform_partition(4, 5)
    with pytest.raises(ConfigError, match=r"5 stages needs as many layers, but the model has 4"):
        block_partition(layers(2, (1, 1)), 5)
    with pytest.raises(ConfigError, match=r"costs of layers are numbers of at least 0, not \[1.0, nan\]"):
        balanced_partition([1.0, float("nan")], 2)
