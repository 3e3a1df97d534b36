"""Times of planned factorizations on a machine: the routine itself, on imagined ranks."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import parlinalg as pla
from parlinalg import linalg
from parlinalg.errors import ConfigError, PlanError
from parlinalg.linalg.planner import ROUTINES, plan_linalg
from parlinalg.planning import routines
from parlinalg.planning.machine import load_machine
from parlinalg.planning.timeline import timeline
from parlinalg.planning.trace import Factorization, Kernel, Span, Start, Trace, Wait, cut

pytestmark = pytest.mark.serial


@pytest.mark.parametrize("machine", ["laptop", "hosts_1gbit", "h100"])
@pytest.mark.parametrize("routine", ROUTINES)
def test_every_routine_has_a_time(routine, machine):
    plan = plan_linalg(routine, 70, ranks=4, sides=3, machine=load_machine(machine))
    found = plan.foreseen
    assert found is not None
    assert found.run is not None
    assert found.seconds == found.run.seconds > 0
    assert all(each.foreseen.seconds >= found.seconds for each in plan.slower)
    assert f" on {machine}: " in plan.explain()
    assert len({(each.deal.D, each.deal.R, each.deal.C) for each in (plan, *plan.slower)}) == 1 + len(plan.slower)


def test_the_time_is_that_of_the_traces_of_all_ranks():
    """Of the public function, as a user would imagine it."""
    machine = load_machine("hosts_1gbit")
    plan = plan_linalg("cholesky", 600, sizes={"r": 2, "c": 4}, machine=machine, depth=1)
    traces = []
    for rank in range(8):
        with pla.imagine(8, rank, node=machine.ranks_on_node(8), what_if=pla.WhatIf()) as world:
            grid = pla.Grid(plan.sizes)
            a = pla.zeros((600, 600), grid, plan.layout)
            with world.trace() as trace:
                linalg.cholesky(a, depth=1)
        traces.append(replace(trace, stands_for=(rank,)))
    assert plan.foreseen.seconds == pytest.approx(timeline(traces, machine).seconds)


def test_grids_and_layers_are_chosen_by_time():
    """A network on which words cost nothing, and calls much, wants fewer layers than one on which words cost much."""
    machine = load_machine("hosts_200mbit")
    plans = [
        plan_linalg("cholesky", 1500, ranks=16, near=False, machine=each)
        for each in (machine, replace(machine, network=replace(machine.network, bandwidth=1e15, latency=1e-9)))
    ]
    for plan in plans:
        times = [each.foreseen.seconds for each in (plan, *plan.slower)]
        assert times == sorted(times)
        assert len(times) > 1
    assert "time: " not in plans[0].explain()
    assert re.search(r"others +.*: (\d+% more time|as fast)", plans[0].explain())


def test_tiles_and_memory_that_are_given_hold():
    plan = plan_linalg("lu", 700, ranks=4, block=32, machine=load_machine("laptop"))
    assert plan.block == 32
    assert plan.foreseen.run is not None
    least = plan_linalg("cholesky", 2048, ranks=16, near=False)
    tight = plan_linalg(
        "cholesky", 2048, ranks=16, near=False, memory=least.need - 1, machine=load_machine("hosts_1gbit")
    )
    assert tight.need < least.need
    assert all(each.need < least.need for each in tight.slower)


def test_routines_of_many_steps_are_timed_by_words_calls_and_operations(monkeypatch):
    plan = plan_linalg("eigh", 5000, ranks=64, machine=load_machine("a100"))
    assert plan.foreseen.run is None
    assert plan.foreseen.seconds == pytest.approx(sum(plan.foreseen.parts.values()))
    assert "by operations, words and calls: products " in plan.explain()
    assert {"all-reduces", "all-gathers"} <= set(plan.foreseen.parts)
    known = plan_linalg("lu", 2000, ranks=16, machine=load_machine("hosts_1gbit"))
    monkeypatch.setattr(routines, "MOST_STEPS", 1)
    about = plan_linalg("lu", 2000, sizes=known.sizes, machine=load_machine("hosts_1gbit"))
    assert 0.3 < about.foreseen.seconds / known.foreseen.seconds < 3


def test_factorizations_of_blocks_take_the_time_of_their_operations():
    """Not of their bytes alone: LAPACK on one rank takes no less than the products of so many operations."""
    machine, n = load_machine("laptop"), 1000
    with pla.imagine(1, what_if=pla.WhatIf()) as world:
        a = pla.zeros((n, n), pla.Grid({"r": 1}))
        with world.trace() as trace:
            linalg.cholesky(a)
    (found,) = [e for e in trace.events if isinstance(e, Factorization)]
    assert (found.name, found.flops) == ("potrf", n**3 // 3)
    assert machine.kernel_seconds(found) > found.flops / machine.best_rate("float64")
    assert machine.kernel_seconds(found) > machine.kernel_seconds(Kernel("copy", found.nbytes, n * n, "float64"))
    complex_ = replace(found, dtype="complex128")
    assert machine.kernel_seconds(complex_) > 3 * machine.kernel_seconds(found)
    measured = replace(machine, kernels=replace(machine.kernels, rates={"potrf": 1e9}))
    assert measured.kernel_seconds(found) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("keywords", "error", "match"),
    [
        ({"machine": "h100"}, PlanError, "machine='h100' is no Machine: give what pla.load_machine returns"),
        (
            {"machine": load_machine("h100"), "depth": 2},
            PlanError,
            "depth=2: the ranks of h100 are GPUs, which form one layer",
        ),
        ({"machine": load_machine("h100"), "rate": 1e9}, PlanError, "constants .--measure. or a machine, not both"),
        ({"machine": load_machine("laptop"), "memory": "1KiB"}, PlanError, "more than 1.00 KiB"),
    ],
    ids=["kind", "depth", "rate", "memory"],
)
def test_wrong_arguments(keywords, error, match):
    with pytest.raises(error, match=match):
        plan_linalg("cholesky", 99, ranks=4, **keywords)


def test_a_machine_without_a_rate_is_refused():
    machine = load_machine("h100")
    machine = replace(machine, gemm={"bfloat16": machine.gemm["bfloat16"]})
    with pytest.raises(ConfigError, match="no rate of products in float64"):
        plan_linalg("lu", 99, ranks=4, machine=machine)


def test_an_empty_matrix_takes_the_time_of_its_calls():
    plan = plan_linalg("lu", 0, ranks=4, machine=load_machine("laptop"))
    assert plan.foreseen.seconds < 1e-3
    assert plan.slower == ()
    assert "the matrix is empty" in plan.explain()


def test_on_the_command_line(capsys):
    from parlinalg.cli import main

    assert main(["plan", "cholesky", "300", "--ranks", "4", "--machine", "laptop"]) == 0
    assert re.search(r"time +\S+ ms on laptop: ", capsys.readouterr().out)
    assert main(["plan", "cholesky", "300", "--ranks", "4", "--machine", "b100"]) != 0
    assert "there is no machine 'b100'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "cholesky", "300", "--ranks", "4", "--machine", "laptop", "--measure"])


def test_ranks_wait_for_the_root_of_a_broadcast():
    """Whose panel comes late; traces of all ranks meet in broadcasts as in other collective operations."""
    machine = load_machine("hosts_1gbit")
    work = Kernel("work", 1 << 30, 1, "float64")
    traces = [
        Trace(rank, 2, [*[work] * (rank == 1), Start(1, "broadcast", (), (0, 1), n, 8000 - n, 1), Wait(1)], (rank,))
        for rank, n in ((0, 8000), (1, 0))
    ]
    run = timeline(traces, machine)
    assert run.causes[0]["idle"] == pytest.approx(machine.kernel_seconds(work), rel=0.01)
    parts = cut(Trace(0, 2, [Span("x", True), *traces[0].events, Span("x", False)]), "x", messages=False)
    assert len(parts[0].events) == 2
