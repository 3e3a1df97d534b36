"""Every synchronous schedule on every kind of grid gives the losses of one rank, with dropout, or refuses the numbers.

Drawn is a sample in which every two of a schedule, a number of stages, of microbatches, and a kind of grid meet.
"""

from __future__ import annotations

import re
from functools import cache
from itertools import combinations, product
from typing import Any, NamedTuple

import pytest

from parlinalg.errors import ScheduleError
from parlinalg.pipeline import make_schedule
from tests.conftest import SIZE
from tests.pipeline.running import SYNCHRONOUS, differs, pipeline, serial

GRIDS: dict[str, dict[str, Any]] = {
    "data 2": {"data": 2},
    "1D 2": {"tensor": {"size": 2, "mode": "1d"}},
    "2D 2×2": {"tensor": {"size": 4, "mode": "2d"}},
    "ZeRO 1": {"data": 2},
    "sequence 2": {"sequence": 2},
}
ALONE = "one rank a stage"
STAGES, MICROBATCHES, MOST = (1, 2, 4), (2, 4, 8, 3), 12


class Case(NamedTuple):
    schedule: str
    stages: int
    microbatches: int
    grid: str

    @property
    def ranks(self) -> int:
        return self.stages * (1 if self.grid == ALONE else 4 if self.grid == "2D 2×2" else 2)

    @property
    def taken(self) -> bool:
        """Whether the schedule takes these numbers."""
        try:
            make_schedule(self.schedule, self.stages, self.microbatches)
        except ScheduleError:
            return False
        return True

    def pairs(self) -> set[tuple[Any, ...]]:
        """The pairs that meet in it; one rank a stage is nothing to be covered."""
        return {(i, self[i], j, self[j]) for i, j in combinations(range(4), 2) if ALONE not in (self[i], self[j])}

    def cost(self) -> float:
        """About how long it takes on few cores."""
        layers = make_schedule(self.schedule, self.stages, self.microbatches).stages
        return self.microbatches * layers * self.ranks / self.stages * (1 + 0.15 * self.ranks)


def every_case(stages: Any = STAGES, microbatches: Any = MICROBATCHES, grids: Any = GRIDS) -> list[Case]:
    cases = (Case(*each) for each in product(SYNCHRONOUS, stages, microbatches, grids))
    return [case for case in cases if 1 < case.ranks <= MOST and case.taken]


@cache
def sample() -> list[Case]:
    """Cases in which all pairs meet that meet anywhere, the cheapest for the pairs they add."""
    cases = {case: (case.pairs(), case.cost() ** 0.5) for case in every_case(grids=[*GRIDS, ALONE])}
    left = set().union(*(pairs for pairs, _ in cases.values()))
    found = []
    while left:
        best = max(cases, key=lambda case: len(cases[case][0] & left) / cases[case][1])
        left -= cases[best][0]
        found.append(best)
    return found


def chosen(full: bool) -> list[Case]:
    cases = every_case((1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 8), [*GRIDS, ALONE]) if full else sample()
    return [case for case in cases if case.ranks == SIZE]


def told(case: Case) -> str:
    return f"{case.schedule}, {case.stages} stages, {case.microbatches} microbatches, {case.grid}"


def check(case: Case, world: Any, backend: str, steps: int = 10) -> list[str]:
    stages = make_schedule(case.schedule, case.stages, case.microbatches).stages
    layers = max(1, stages - 2)
    losses, norms = serial(world, layers, clip=0.5)
    parallel = {"pipeline": case.stages, **GRIDS.get(case.grid, {"data": 1})}
    zero = 1 if case.grid == "ZeRO 1" else 0
    with pipeline(world, backend, case.schedule, parallel, case.microbatches, layers, zero=zero) as p:
        found = [p.step(step, clip=0.5) for step in range(steps)]
    wrong = differs([loss for loss, _ in found], losses[:steps]) + differs([norm for _, norm in found], norms[:steps])
    return [f"{told(case)}: {text}" for text in wrong]


@pytest.mark.ranks(2, 4, 8)
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_as_one_rank(name: str, world: Any, backend: str, full: bool) -> None:
    wrong = [text for case in chosen(full) if case.schedule == name for text in check(case, world, backend)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.ranks(3, 6, 12)
def test_three_stages(world: Any, backend: str, full: bool) -> None:
    grid = {3: ALONE, 6: "sequence 2", 12: "2D 2×2"}[SIZE]
    cases = [case for case in every_case((3,), (3, 4), [grid]) if full or case.schedule == "zb-v"]
    wrong = [text for case in cases for text in check(case, world, backend, 10 if full else 3)]
    assert cases
    assert not wrong, "\n".join(wrong)


@pytest.mark.serial
def test_the_sample_has_all_pairs() -> None:
    every, drawn = every_case(), sample()
    assert set().union(*(case.pairs() for case in every)) == set().union(*(case.pairs() for case in drawn))
    assert len(drawn) < len(every) / 4
    assert {case.schedule for case in drawn} == set(SYNCHRONOUS)
    assert {case.ranks for case in drawn} == {2, 4, 8}


@pytest.mark.serial
def test_other_numbers_are_refused_with_those_taken() -> None:
    refused = 0
    for name, stages, microbatches in product(SYNCHRONOUS, (2, 3, 4), range(2, 10)):
        case = Case(name, stages, microbatches, ALONE)
        if not case.taken:
            refused += 1
            with pytest.raises(ScheduleError) as error:
                make_schedule(name, stages, microbatches)
            numbers = {int(n) for n in re.findall(r"\d+", str(error.value))}
            others = [case._replace(**{key: n}) for n in numbers if n for key in ("stages", "microbatches")]
            assert any(other.taken for other in others), str(error.value)
    assert refused
