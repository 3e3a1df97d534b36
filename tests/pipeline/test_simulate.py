"""The simulator against the formulas of the schedules' papers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest

from parlinalg.errors import ScheduleError
from parlinalg.pipeline import Op, make_schedule
from parlinalg.pipeline.schedules import discover
from parlinalg.pipeline.simulate import Costs, SharedCores, Simulation, Span, measured_costs, predict, simulate

pytestmark = [pytest.mark.serial, pytest.mark.timeout(300)]

TIMES = ((1, 2), (0.7, 1.9))  # of a forward and a backward pass
PARTS = ((1, 1, 1), (1, 2, 2), (3, 2, 1))  # F, and the two parts of B


def numbers(full: bool) -> Iterator[tuple[int, int]]:
    if full:
        yield from ((p, m) for p in range(1, 9) for m in range(1, 17))
    else:
        yield from ((1, 1), (1, 5), (2, 1), (2, 4), (3, 2), (3, 7), (4, 3), (4, 4), (6, 5), (5, 11))


def run(name: str, p: int, m: int, v: int | None = None, *, every: int | None = None, **costs: float) -> Simulation:
    return simulate(make_schedule(name, p, m, v, every=every), Costs(**costs))


def close(value: float) -> object:
    return pytest.approx(value, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubbles_and_peaks_of_flushed_schedules(name: str, full: bool) -> None:
    for p, m in numbers(full):
        for forward, backward in TIMES:
            found = run(name, p, m, forward=forward, backward=backward, weight=0)
            assert found.bubble == close((p - 1) / (m + p - 1))
            assert found.makespan == close((m + p - 1) * (forward + backward))
            assert found.peaks == tuple(m if name == "gpipe" else min(p - r, m) for r in range(p))


def test_bubbles_and_peaks_of_interleaved_schedules(full: bool) -> None:
    sample = [(1, 2), (2, 2), (2, 6), (3, 6), (4, 8)]
    for p, m in [(p, k * p) for p in range(1, 9) for k in range(1, 5)] if full else sample:
        for v in (2, 3):
            for forward, backward in TIMES:
                found = run("interleaved", p, m, v, forward=forward, backward=backward, weight=0)
                assert found.bubble == close((p - 1) / (v * m + p - 1))
            held = [min(v * m, 2 * (p - r - 1) + (v - 1) * p + 1) for r in range(p)]
            assert found.held == tuple(held)
            assert found.peaks == close([h / v for h in held])


def test_bubbles_and_peaks_of_chimera() -> None:
    for p in (2, 4, 6):
        for backward, factor in ((1, 2), (2, 1.5)):
            found = run("chimera", p, p, backward=backward)
            assert found.bubble == close((p - 2) / (factor * p + p - 2))
            assert found.peaks == tuple(p / 2 + 1 + min(r, p - 1 - r) for r in range(p))
        for units in (2, 3):  # joined without a bubble where all passes take the same time
            found = run("chimera", p, units * p, backward=1)
            assert found.bubble == close((p - 2) / (2 * units * p + p - 2))


def test_bubbles_and_peaks_of_split_backward_passes(full: bool) -> None:
    for p, m in numbers(full):
        for forward, inward, weight in PARTS:
            found = run("zb-h1", p, m, forward=forward, backward=inward + weight, weight=weight)
            assert found.peaks == (min(p, m),) * p
            if m >= p and weight <= min(forward, inward):
                for r in range(p):
                    assert found.makespan - found.busy(r) == close((p - 1) * (forward + inward - weight))
                flushed = run("1f1b", p, m, forward=forward, backward=inward + weight, weight=weight)
                assert found.makespan < flushed.makespan or p == 1
        found = run("zb-v", p, m, forward=1, backward=2, weight=1)
        assert found.bubble >= (p - 1) / (6 * m + p - 1) - 1e-12
        assert max(found.peaks) <= p
        if m >= 2 * p - 1:
            assert [found.gaps(r) for r in range(p)] == close([0.0] * p)
            assert found.bubble == close((p - 1) / (6 * m + p - 1))
            assert found.peaks == (p,) * p


def test_asynchronous_schedules_are_never_idle_once_all_ranks_work() -> None:
    for name, every in (("pipedream", 1), ("pipedream-2bw", 4)):
        for p in (1, 2, 4):
            for forward, backward in TIMES:
                found = run(name, p, 12, every=every, forward=forward, backward=backward, weight=0)
                for r in range(p):
                    spans = found.of_rank(r)
                    first = next(k for k, s in enumerate(spans) if s.op is Op.BACKWARD)
                    last = max(k for k, s in enumerate(spans) if s.op is Op.FORWARD)
                    assert all(a.stop == close(b.start) for a, b in pairwise(spans[first : last + 1]))
                flushes = sum(
                    run("1f1b", p, every, forward=forward, backward=backward, weight=0).makespan
                    for _ in range(12 // every)
                )
                assert found.makespan < flushes or p == 1
                assert found.peaks == tuple(min(p - r, 12) for r in range(p))


def test_costs_by_stage_and_latencies() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    found = simulate(schedule, Costs(forward=[1, 3], backward=[2, 5], weight=[0, 1], latency=10))
    assert [tuple(s)[1:] for s in found.spans] == [
        (Op.FORWARD, 0, 0, 0, 1), (Op.FORWARD, 0, 1, 1, 2), (Op.BACKWARD, 0, 0, 32, 34), (Op.BACKWARD, 0, 1, 37, 39),
        (Op.FORWARD, 0, 0, 11, 14), (Op.FORWARD, 0, 1, 14, 17),
        (Op.BACKWARD, 0, 0, 17, 22), (Op.BACKWARD, 0, 1, 22, 27),
    ]  # fmt: skip
    assert found.makespan == 39
    assert found.bubble == (39 - 6 + 39 - 16) / 78
    assert (found.gaps(0), found.gaps(1)) == (33, 0)
    one_way = simulate(schedule, Costs(forward=[1, 3], backward=[2, 5], weight=0, latency={(1, 0): 4}))
    assert one_way.makespan == 1 + 6 + 10 + 4 + 2
    turn = simulate(
        make_schedule("zb-v", 1, 1),
        Costs(forward=[1, 2], backward=[5, 7], weight=[1, 2], latency=100, reduce=3, step=[4]),
    )
    assert [(s.op.value, s.start, s.stop) for s in turn.spans] == [
        ("F", 0, 1), ("F", 1, 3), ("I", 3, 8), ("W", 8, 10), ("I", 10, 14), ("W", 14, 15), ("reduce gradients", 15, 18),
        ("step", 18, 22),
    ]  # fmt: skip


def test_ranks_that_share_cores() -> None:
    schedule = make_schedule("1f1b", 3, 4)
    alone = simulate(schedule)
    assert simulate(schedule, cores=3).spans == alone.spans
    assert simulate(schedule, cores=7).spans == alone.spans
    one = simulate(schedule, cores=1)
    assert one.makespan == close(3 * 4 * 3)  # the core is never idle: always some rank has work
    assert one.peaks == alone.peaks
    two = simulate(make_schedule("gpipe", 2, 2), Costs(forward=1, backward=4, weight=0), cores=1)
    assert [(s.rank, s.op.value, s.start, s.stop) for s in two.spans] == [
        (0, "F", 0, 1), (0, "F", 1, 3), (0, "B", 8, 16), (0, "B", 16, 20),
        (1, "F", 1, 3), (1, "F", 3, 4), (1, "B", 4, 8), (1, "B", 8, 16),
    ]  # fmt: skip
    late = simulate(make_schedule("gpipe", 2, 1), Costs(forward=1, backward=2, latency=3), cores=1)
    assert late.makespan == simulate(make_schedule("gpipe", 2, 1), Costs(forward=1, backward=2, latency=3)).makespan
    with pytest.raises(ScheduleError, match="cores=0: ranks work on a whole number of cores of at least 1"):
        simulate(schedule, cores=0)


def test_ranks_of_a_kind_share_cores_with_their_like() -> None:
    """Ranks 0 and 2 share a core, and ranks 1 and 3: each pair by itself, at half the speed if both of it work."""
    pairs = SharedCores([0, 1, 0, 1], lambda kind, working: 1.0 / working[kind])
    found = simulate(make_schedule("gpipe", 4, 2), Costs(forward=1, backward=1, weight=0), pairs)
    assert [(s.op.value, s.start, s.stop) for s in found.of_rank(0)] == [
        ("F", 0, 1), ("F", 1, 2), ("B", 8, 9), ("B", 9, 10),
    ]  # fmt: skip
    assert [(s.op.value, s.start, s.stop) for s in found.of_rank(2)] == [
        ("F", 2, 3), ("F", 3, 4), ("B", 6, 7), ("B", 7, 8),
    ]  # fmt: skip
    late = simulate(make_schedule("gpipe", 4, 3), Costs(forward=1, backward=1, weight=0), pairs)
    assert late.of_rank(0)[2][4:] == (2, 4)  # beside the first one of rank 2
    assert late.of_rank(2)[0][4:] == (2, 4)


def test_costs_that_do_not_fit_are_refused() -> None:
    schedule = make_schedule("interleaved", 2, 2)

    def refused(message: str, **costs: object) -> None:
        with pytest.raises(ScheduleError, match=message):
            simulate(schedule, Costs(**costs))  # type: ignore[arg-type]

    refused(r"2 costs forward=\[1, 2\]: interleaved takes one number, or 4, one for each stage", forward=[1, 2])
    refused(r"1 costs step=\[1\]: interleaved takes one number, or 2, one for each rank", step=[1])
    refused("a cost backward=-1: times are finite numbers of at least 0", backward=-1)
    refused("a cost latency=nan", latency=float("nan"))
    refused("a cost latency=inf", latency={(0, 1): float("inf")})
    refused("stage 2: weight=3 is a part of backward=2", weight=[1, 1, 3, 1])


def test_measured_spans_give_the_costs_of_a_prediction() -> None:
    for name in ("1f1b", "zb-v", "chimera"):
        schedule = make_schedule(name, 2, 4)
        per_stage = [1.0 + s for s in range(schedule.stages)]
        costs = Costs(per_stage, [3 * c for c in per_stage], [1.5 * c for c in per_stage], 0.25, [0.5, 0.25], 0.125)
        real = simulate(schedule, costs)
        spans = [tuple(s._replace(start=s.start + 100, stop=s.stop + 100)) for s in real.spans]
        again = predict(schedule, spans, latency=0.25)
        assert again.makespan == close(real.makespan)
        assert again.costs.weight == close(list(costs.weight))  # type: ignore[call-overload]
        assert predict(schedule, costs).makespan == real.makespan
    late = [Span(0, Op.FORWARD, 0, j, j, j + (9 if j == 1 else 2)) for j in range(3)]
    back = [Span(0, Op.BACKWARD, 0, j, j, j + 4) for j in range(3)]
    assert measured_costs(make_schedule("gpipe", 1, 3), late + back).forward == [2]
    with pytest.raises(ScheduleError, match="no measured span of a forward and a backward pass of stage 0 of gpipe"):
        measured_costs(make_schedule("gpipe", 1, 3), late)


@pytest.mark.parametrize("name", sorted(discover()))
def test_ranks_with_a_core_each_run_as_by_their_dependencies(name: str) -> None:
    """The walk through a schedule's dependencies finds what ranks do that are run beside each other."""
    schedule = make_schedule(name, 4, 8)
    costs = Costs(
        forward=[1.0 + s / 7 for s in range(schedule.stages)], backward=[2.5 - s / 9 for s in range(schedule.stages)],
        weight=0.75, latency={(0, 1): 0.3, (2, 1): 4.0}, reduce=0.5, step=[0.25, 0.0, 0.5, 0.125],
    )  # fmt: skip
    apart, beside = simulate(schedule, costs), simulate(schedule, costs, cores=4)
    assert apart.held == beside.held
    assert apart.makespan == pytest.approx(beside.makespan)
    for one, other in zip(apart.spans, beside.spans, strict=True):
        assert one[:4] == other[:4]
        assert one[4:] == pytest.approx(other[4:])
