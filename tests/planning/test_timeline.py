"""Timelines of traces made by hand: times, overlap, contention, pipelines, files."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import parlinalg as pla
from parlinalg.errors import ConfigError
from parlinalg.pipeline.schedules import make_schedule
from parlinalg.pipeline.simulate import Costs, Dependencies, SharedCores
from parlinalg.planning import trace as events_of
from parlinalg.planning.machine import Algorithm, FusedAttention, Machine, Operation, load_machine
from parlinalg.planning.pipeline_timeline import Stage, pipeline_timeline, sharing
from parlinalg.planning.timeline import Timeline, timeline
from parlinalg.planning.trace import Attention, Event, Gemm, Kernel, Memory, Span, Start, Trace, Wait, cut
from tests.planning.machines import round_machine

pytestmark = pytest.mark.serial

SECOND = Gemm(1, 1000, 1000, 500, "float32")  # of the round machine


def kernel(seconds: float) -> Kernel:
    return Kernel("add", round(seconds * 1e6), 1, "float32")


def gather(call: int, seconds: float, ranks: tuple[int, ...] = (0, 1), axis: str = "c") -> Start:
    """An all-gather that takes so many seconds of a free link: within a node, or between nodes of 2 ranks."""
    crosses = len({r // 2 for r in ranks}) > 1
    share = 1 if len({r // 2 for r in ranks}) < len(ranks) or not crosses else 2  # the other group of the node
    return Start(call, "all_gather", (axis,), ranks, round(seconds * (1e5 / share if crosses else 1e6)))


def run(*events: Event, machine: Machine | None = None, size: int = 2, **figures: float | str) -> Timeline:
    return timeline(Trace(0, size, list(events)), machine or round_machine(**figures))


def test_computing_adds_up() -> None:
    found = run(SECOND, kernel(0.5), SECOND, overhead=0.25)
    assert found.seconds == pytest.approx(2.5 + 3 * 0.25)
    assert found.causes[0] == pytest.approx({"products": 2.5, "other kernels": 0.75})
    assert found.exposed == found.idle == 0
    assert found.utilisation() == pytest.approx(2 / 3.25)  # both ranks do the same
    assert found.throughput(6.5) == pytest.approx(2)


def test_copies_of_pieces_have_less_overhead_than_operations() -> None:
    """The first of copies that follow each other is an operation, the others are pieces; so with others in flight."""
    copy = Kernel("copy", 500_000, 1, "float32")
    machine = round_machine(overhead=0.25)
    pieces = replace(machine, kernels=replace(machine.kernels, piece=0.0625))
    events = [copy, copy, copy, kernel(0.5), copy]
    assert run(*events, machine=pieces).seconds == pytest.approx(5 * 0.5 + 3 * 0.25 + 2 * 0.0625)
    assert run(*events, machine=machine).seconds == pytest.approx(5 * 0.5 + 5 * 0.25)
    free = replace(pieces, kernels=replace(pieces.kernels, overhead=0.0))  # as for bounds
    assert run(*events, machine=free).seconds == pytest.approx(5 * 0.5)
    started = [gather(0, 1.0), *events, Wait(0)]  # the start is a call of the host
    assert run(*started, machine=pieces).seconds == pytest.approx(0.25 + 5 * 0.5 + 3 * 0.25 + 2 * 0.0625)
    between = [copy, gather(0, 1.0), Wait(0), copy]
    assert run(*between, machine=pieces).seconds == pytest.approx(2 * 0.5 + 3 * 0.25 + 1)


def test_an_operation_takes_what_the_rank_takes_that_receives_the_most() -> None:
    uneven = replace(gather(0, 0.0), most=gather(0, 2.0).nbytes)
    assert run(uneven, Wait(0)).seconds == pytest.approx(2)


def test_fused_attention_is_one_product() -> None:
    """With fused attention its products take no time of their own; those of float32, and others, take theirs."""
    rates = FusedAttention(((64, 1e6),), ((64, 1e6),), "by hand")
    machine = replace(round_machine(), attention={"bfloat16": rates})
    events: list[Event] = [
        Gemm(1, 1000, 1000, 500, "float32"), Gemm(2, 1000, 1000, 500, "float32", 2, "bfloat16"),
        Attention("attention.forward", 8, 4, "float32", 3 * 10**6, 64, "bfloat16"),
        Gemm(1, 1000, 1000, 500, "float32", 1, "float32"),
        Attention("attention.forward", 4 * 10**6, 4, "float32", 3 * 10**6, 64, "float32"),
    ]  # fmt: skip
    plain = timeline(Trace(0, 1, events), machine)
    assert plain.seconds == pytest.approx(1 + 2 + 8e-6 + 1 + 4)
    fused = timeline(Trace(0, 1, events), machine.with_fused_attention())
    assert fused.seconds == pytest.approx(1 + 3 + 1 + 4)
    assert dict(fused.shares())["products"] == pytest.approx(5 / 9)
    library = machine.with_fused_attention("library")
    assert timeline(Trace(0, 1, events), library).seconds == plain.seconds
    taken = [replace(e, fused=True) if isinstance(e, Gemm | Attention) else e for e in events]
    assert timeline(Trace(0, 1, taken), library).seconds == fused.seconds


def test_blocking_communication_is_exposed() -> None:
    found = run(SECOND, gather(0, 3.0), Wait(0))
    assert found.seconds == pytest.approx(4)
    assert found.exposed == pytest.approx(3)
    assert found.bound() == "all-gathers over axis c: 75% of the step; products 25%"


def test_nonblocking_communication_is_hidden() -> None:
    found = run(gather(0, 1.5), SECOND, Wait(0), SECOND)
    assert found.seconds == pytest.approx(2.5)
    assert found.exposed == pytest.approx(0.5)
    assert run(gather(0, 0.5), SECOND, Wait(0)).seconds == pytest.approx(1)


def test_operations_of_a_link_share_it() -> None:
    """The first of 1 s alone takes 2 s beside the other, which then has the link for itself."""
    found = run(gather(0, 1.0, axis="a"), gather(1, 2.0, axis="b"), Wait(0), Wait(1))
    ends = {i.axes: i.stop for i in found.intervals if i.kind == "communication"}
    assert ends == pytest.approx({("a",): 2.0, ("b",): 3.0})


def test_operations_of_a_communicator_follow_each_other() -> None:
    found = run(gather(0, 1.0), gather(1, 2.0), Wait(1), Wait(0))
    ends = [(i.start, i.stop) for i in found.intervals if i.kind == "communication"]
    assert ends == [pytest.approx((0.0, 1.0)), pytest.approx((1.0, 3.0))]


def test_levels_of_links_do_not_share() -> None:
    inside, across = gather(0, 2.0, (0, 1), "a"), gather(1, 2.0, (0, 2), "b")
    assert run(inside, across, Wait(0), Wait(1), size=4).seconds == pytest.approx(2)


def test_ranks_of_a_node_share_its_interface() -> None:
    """Both ranks of a node send to the other node at once, as all ranks do the same."""
    across = Start(0, "all_gather", ("b",), (0, 2), 10**5)
    assert run(across, Wait(0), size=4).seconds == pytest.approx(2)
    alone = Start(0, "all_gather", ("b",), (0, 1), 10**5)
    assert timeline(Trace(0, 2, [alone, Wait(0)]), round_machine(ranks_per_node=1)).seconds == pytest.approx(1)


def test_rings_leave_a_node_once() -> None:
    """A ring over all 4 ranks of 2 nodes has the whole interface."""
    ring = Start(0, "all_gather", ("w",), (0, 1, 2, 3), 10**5)
    assert run(ring, Wait(0), size=4).seconds == pytest.approx(1)


def test_ranks_wait_for_the_last() -> None:
    """Two classes: the first is idle until the other has started, then both wait for the bytes."""
    early = Trace(0, 2, [gather(0, 1.0), Wait(0)])
    late = Trace(1, 2, [SECOND, SECOND, gather(0, 1.0), Wait(0), SECOND])
    found = timeline([early, late], round_machine())
    assert found.seconds == pytest.approx(4)
    assert found.causes[0] == pytest.approx({"idle": 3.0, "all-gathers over axis c": 1.0})
    assert found.slowest == 1


def test_messages_meet() -> None:
    sender = Trace(0, 2, [SECOND, Start(5, "send", ("p",), (0, 1), 0, sent=10**6, peer=1, tag=3), SECOND, Wait(5)])
    receiver = Trace(1, 2, [Start(0, "receive", ("p",), (0, 1), 10**6, peer=0, tag=3), Wait(0), SECOND])
    found = timeline([sender, receiver], round_machine())
    assert found.seconds == pytest.approx(3)
    assert found.causes[1] == pytest.approx({"idle": 1.0, "receives over axis p": 1.0, "products": 1.0})


def test_progress_at_polls_only() -> None:
    """Of 4 messages one is sent after each poll; the rest when the rank waits."""
    ranks = (0, 1, 2, 3, 4)
    start = Start(0, "all_gather", ("c",), ranks, 4 * 10**6)
    machine = round_machine(ranks_per_node=5, rails=5, progress="polls")
    computing = [SECOND] * 10
    unpolled = timeline(Trace(0, 5, [start, *computing, Wait(0)]), machine)
    assert unpolled.seconds == pytest.approx(10 + 3)
    polled = [event for _ in range(3) for event in (SECOND, events_of.Test(0))]
    assert timeline(Trace(0, 5, [start, *polled, *computing[3:], Wait(0)]), machine).seconds == pytest.approx(10)
    hidden = timeline(Trace(0, 5, [start, *computing, Wait(0)]), round_machine(ranks_per_node=5, rails=5))
    assert hidden.seconds == pytest.approx(10)


def test_windows_limit_progress() -> None:
    start = Start(0, "all_gather", ("c",), (0, 1), 4 * 10**6)
    machine = round_machine(progress="polls", window=10**6)
    assert timeline(Trace(0, 2, [start, *[SECOND] * 9, Wait(0)]), machine).seconds == pytest.approx(9 + 3)


def test_transport_takes_the_processor() -> None:
    """TCP: 2 s on the link cost 1 s of the core that computes; a link faster than the core is not used up."""
    across = Start(0, "all_gather", ("b",), (0, 1), 2 * 10**5)
    figures = {"ranks_per_node": 1, "processor": 0.5e-5}
    found = run(across, *[SECOND] * 4, Wait(0), machine=round_machine(**figures))
    assert found.seconds == pytest.approx(5)
    slow = round_machine(ranks_per_node=1, processor=3e-5)
    assert run(across, Wait(0), machine=slow).seconds == pytest.approx(6)


def test_transport_and_computing_share_the_processor() -> None:
    """2 s of transport in 1 s on the link: they take a half each, and together as long as the sum of both."""
    across = Start(0, "all_gather", ("b",), (0, 1), 10**5)
    machine = round_machine(ranks_per_node=1, processor=2e-5)
    assert run(across, *[SECOND] * 2, Wait(0), machine=machine).seconds == pytest.approx(4)
    found = run(across, *[SECOND] * 3, Wait(0), machine=machine)  # neither is over before the other has had its half
    assert [i.stop for i in found.intervals if i.kind == "gemm"] == pytest.approx([2, 4, 5])
    assert [i.stop for i in found.intervals if i.kind == "communication"] == pytest.approx([4])
    assert run(across, *[SECOND] * 4, Wait(0), machine=machine).seconds == pytest.approx(6)


def test_computing_slows_down_beside_communication() -> None:
    found = run(gather(0, 1.5), *[SECOND] * 3, Wait(0), slowdown=0.5)
    assert found.seconds == pytest.approx(3.5)


def test_ranks_beyond_the_cores_take_turns() -> None:
    found = timeline(Trace(0, 4, [SECOND]), round_machine(ranks_per_node=4, cores=2))
    assert found.seconds == pytest.approx(2)
    spread = replace(round_machine(ranks_per_node=1, cores=2), cores_of="world")
    assert timeline(Trace(0, 8, [SECOND]), spread).seconds == pytest.approx(4)


@pytest.mark.parametrize(("waiting", "receiving"), [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.5, 0.25)])
def test_ranks_that_wait_take_cores_as_far_as_they_poll(waiting: float, receiving: float) -> None:
    """Two ranks on a core: one computes while the other waits, by a message and in a collective operation."""
    overlap = replace(round_machine().overlap, waiting=waiting, receiving=receiving)
    machine = replace(round_machine(cores=1), overlap=overlap)
    late = Trace(0, 2, [SECOND, SECOND, gather(0, 1.0), Wait(0)])
    early = Trace(1, 2, [gather(0, 1.0), Wait(0)])
    assert timeline([late, early], machine).seconds == pytest.approx(2 * (1 + waiting) + 1)
    sender = Trace(0, 2, [SECOND, Start(5, "send", ("p",), (0, 1), 0, sent=10**6, peer=1), Wait(5)])
    receiver = Trace(1, 2, [Start(0, "receive", ("p",), (0, 1), 10**6, peer=0), Wait(0)])
    assert timeline([sender, receiver], machine).seconds == pytest.approx(1 + receiving + 1)
    both = [Trace(r, 2, [SECOND, gather(0, 1.0), Wait(0)]) for r in range(2)]
    assert timeline(both, machine).seconds == pytest.approx(3)


@pytest.mark.parametrize(("at_work", "seconds"), [(1, 1.0), (2, 6 / 5), (3, 3 / 2), (4, 2.0)])
def test_ranks_stay_on_their_cores(at_work: int, seconds: float) -> None:
    """Four ranks on two cores: beside each is one of the others by chance, who may wait while two share a core."""
    overlap = replace(round_machine().overlap, waiting=0.0, receiving=0.0)
    machine = replace(round_machine(ranks_per_node=4, cores=2), overlap=overlap)
    traces = [Trace(r, 4, [SECOND] if r < at_work else []) for r in range(4)]
    assert timeline(traces, machine).seconds == pytest.approx(seconds)
    half = replace(machine, overlap=replace(overlap, receiving=0.5))
    beside = [1, *[0.5] * (at_work - 1), *[1 / 1.5] * (4 - at_work)]
    assert timeline(traces, half).seconds == pytest.approx(3 / sum(beside[1:]))


def test_cores_are_dealt_out_among_many_ranks() -> None:
    """Six ranks on four cores: a half of them has one beside it; ranks of one class count each."""
    overlap = replace(round_machine().overlap, waiting=0.0, receiving=0.0)
    machine = replace(round_machine(ranks_per_node=6, cores=4), overlap=overlap)
    traces = [Trace(0, 6, [SECOND], stands_for=(0, 1, 2)), Trace(3, 6, [], stands_for=(3, 4, 5))]
    beside = (2 / 5) / 2 + 3 / 5  # one of the five others, two of which compute
    assert timeline(traces, machine).seconds == pytest.approx(1 / ((1 + beside) / 2))


@pytest.mark.parametrize(("at_work", "seconds"), [((0, 1), 1.0), ((0, 2), 2.0), ((0, 1, 3), 2.0), ((1, 3, 4), 2.0)])
def test_ranks_that_are_bound_keep_a_core(at_work: tuple[int, ...], seconds: float) -> None:
    """Five ranks on two cores in turn: those with even numbers share one; the slowest counts."""
    overlap = replace(round_machine().overlap, waiting=0.0, receiving=0.0)
    machine = replace(round_machine(ranks_per_node=5, cores=2), overlap=overlap, bound=True)
    assert machine.crowd(5, 5) == 3
    traces = [Trace(r, 5, [SECOND] if r in at_work else []) for r in range(5)]
    assert timeline(traces, machine).seconds == pytest.approx(seconds)
    assert timeline(Trace(0, 5, [SECOND]), machine).seconds == pytest.approx(3)
    spread = replace(machine, ranks_per_node=1, cores_of="world")
    assert timeline(traces, spread).seconds == pytest.approx(seconds)
    assert [machine.pool(r, 3) for r in range(6)] == [0, 1, 0, 2, 3, 2]
    assert [replace(machine, bound=False).pool(r, 3) for r in range(6)] == [0, 0, 0, 1, 1, 1]


def test_cores_are_shared_within_a_node() -> None:
    """Of two nodes with a core and two ranks each, the one whose second rank sleeps computes twice as fast."""
    overlap = replace(round_machine().overlap, waiting=0.0, receiving=0.0)
    machine = replace(round_machine(cores=1), overlap=overlap)
    group = (0, 1, 2, 3)
    events = gather(0, 0.0, group), Wait(0)
    traces = [Trace(r, 4, [*[SECOND] * n, *events]) for r, n in enumerate((3, 0, 1, 1))]
    assert timeline(traces, machine).seconds == pytest.approx(3)
    shared = replace(machine, cores_of="world")
    assert timeline(traces, shared).seconds == pytest.approx(5)


def test_ranks_that_have_computed_wait_for_each_other() -> None:
    """Half a second more after one of computing, less after less, and none for what follows an operation."""
    overlap = replace(round_machine().overlap, turns=((1.0, 0.5), (4.0, 2.0)))
    machine = replace(round_machine(), overlap=overlap)
    assert run(SECOND, gather(0, 1.0), Wait(0), machine=machine).seconds == pytest.approx(2.5)
    assert run(kernel(0.5), gather(0, 1.0), Wait(0), machine=machine).seconds == pytest.approx(1.75)
    again = run(SECOND, gather(0, 1.0), Wait(0), gather(1, 1.0), Wait(1), machine=machine)
    assert again.seconds == pytest.approx(3.5)
    assert run(*[SECOND] * 2, gather(0, 1.0), Wait(0), machine=machine).seconds == pytest.approx(4)
    assert run(*[SECOND] * 9, gather(0, 1.0), Wait(0), machine=machine).seconds == pytest.approx(12)
    hidden = run(gather(0, 0.5), SECOND, Wait(0), machine=machine)
    assert hidden.seconds == pytest.approx(1)  # it is over when the rank looks
    late = run(gather(0, 1.5), SECOND, Wait(0), machine=machine)
    assert late.seconds == pytest.approx(2)  # half of it is left, and half a second more


def test_the_host_begins_operations_between_ranks() -> None:
    """That takes it as long as another operation, unless it runs ahead of a device."""
    found = run(gather(0, 1.0), Wait(0), SECOND, overhead=0.25)
    assert found.seconds == pytest.approx(2.5)
    assert found.causes[0]["other kernels"] == pytest.approx(0.25)
    assert run(gather(0, 1.0), gather(1, 1.0), Wait(0), Wait(1), overhead=0.25).seconds == pytest.approx(2.25)
    assert run(gather(0, 1.0), Wait(0), overhead=0.25, asynchronous="true").seconds == pytest.approx(1)


def test_two_ranks_that_wait_for_one_operation_do_so_once() -> None:
    overlap = replace(round_machine().overlap, turns=((1.0, 0.5),))
    machine = replace(round_machine(), overlap=overlap)
    traces = [Trace(r, 2, [SECOND, gather(0, 1.0), Wait(0)], (r,)) for r in range(2)]
    assert timeline(traces, machine).seconds == pytest.approx(2.5)


def test_operations_beside_computing_take_longer() -> None:
    ways = Operation((Algorithm("one", 0.0),), beside=2.0)
    machine = replace(round_machine(), node=replace(round_machine().node, all_gather=ways))
    assert run(gather(0, 1.0), Wait(0), machine=machine).seconds == pytest.approx(1)
    assert run(gather(0, 1.0), SECOND, Wait(0), machine=machine).seconds == pytest.approx(2)
    assert run(gather(0, 1.0), SECOND, Wait(0)).seconds == pytest.approx(1)


@pytest.mark.parametrize("latency", [0.0, 0.5])
def test_operations_advance_slowly_while_ranks_compute(latency: float) -> None:
    """A quarter of a second's work is done, latency or bytes, in the second in which the ranks compute."""
    ways = Operation((Algorithm("one", latency),), computing=4.0)
    machine = replace(round_machine(), node=replace(round_machine().node, all_gather=ways))
    assert run(gather(0, 1.0 - latency), Wait(0), machine=machine).seconds == pytest.approx(1)
    assert run(gather(0, 1.0 - latency), SECOND, Wait(0), machine=machine).seconds == pytest.approx(1.75)
    late = run(gather(0, 1.0 - latency), *[SECOND] * 5, Wait(0), machine=machine)
    assert [i.stop for i in late.intervals if i.kind == "communication"] == pytest.approx([4])


def test_operations_whose_ranks_compute_wait_for_turns() -> None:
    """Half a second, unless the ranks wait before; that of the second operation passes while the first has the link."""
    ways = Operation((Algorithm("one", 0.0),), delay=0.5)
    machine = replace(round_machine(), node=replace(round_machine().node, all_gather=ways))
    assert run(gather(0, 1.0), Wait(0), machine=machine).seconds == pytest.approx(1)
    assert run(gather(0, 1.0), SECOND, Wait(0), machine=machine).seconds == pytest.approx(1.5)
    assert run(gather(0, 1.0), kernel(0.25), Wait(0), machine=machine).seconds == pytest.approx(1.25)
    assert run(gather(0, 0.0), SECOND, Wait(0), machine=machine).seconds == pytest.approx(1)
    both = run(gather(0, 1.0), gather(1, 1.0), *[SECOND] * 2, Wait(0), Wait(1), machine=machine)
    assert both.seconds == pytest.approx(2.5)


def test_operations_of_mpi_share_the_link_and_those_of_a_device_follow_each_other() -> None:
    events = gather(0, 1.0), gather(1, 1.0), Wait(0), SECOND, Wait(1)
    for progress, ends in (("asynchronous", [1, 2]), ("polls", [2, 2])):
        found = run(*events, progress=progress)
        assert [i.stop for i in found.intervals if i.kind == "communication"] == pytest.approx(ends)
        assert found.seconds == pytest.approx(ends[0] + 1)


def test_a_device_hides_the_host() -> None:
    figures = {"asynchronous": "true", "overhead": 0.25}
    assert run(SECOND, SECOND, SECOND, **figures).seconds == pytest.approx(3.25)
    late = run(kernel(0.1), kernel(0.1), kernel(0.1), **figures)
    assert late.seconds == pytest.approx(0.75 + 0.1)
    assert late.causes[0] == pytest.approx({"other kernels": 0.3, "launching": 0.55})


def test_latency_by_steps() -> None:
    empty = Start(0, "all_gather", ("c",), (0, 1, 2, 3), 0)
    machine = round_machine(ranks_per_node=4, rails=4, latency=0.5)
    assert timeline(Trace(0, 4, [empty, Wait(0)]), machine).seconds == pytest.approx(1)  # log₂ 4 beats 3
    long = replace(empty, nbytes=3 * 10**6)
    assert timeline(Trace(0, 4, [long, Wait(0)]), machine).seconds == pytest.approx(4)


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([Wait(7)], "waits for call 7, which it has not started"),
        ([gather(1, 1.0), gather(1, 1.0)], "call 1 of rank 0 is started twice"),
    ],
)
def test_wrong_traces(events: list[Event], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(*events)


def test_calls_that_nobody_joins() -> None:
    with pytest.raises(ConfigError, match=r"rank 0 waits for all_gather .* the ranks \[1\] never start"):
        timeline([Trace(0, 2, [gather(0, 1.0), Wait(0)]), Trace(1, 2, [SECOND])], round_machine())


def test_no_network() -> None:
    machine = replace(round_machine(), network=None)
    with pytest.raises(ConfigError, match=r"has no \[network\] between nodes"):
        timeline(Trace(0, 4, [gather(0, 1.0, (0, 2)), Wait(0)]), machine)


# ------------------------------------------------------------------------------------------------ properties
@st.composite
def programs(draw: st.DrawFn) -> list[Event]:
    """A program of computing and communication, each operation awaited at some later point."""
    events: list[Event] = []
    flying: list[int] = []
    for call in range(draw(st.integers(1, 8))):
        events.append(draw(st.sampled_from([SECOND, kernel(0.3), Kernel("exp", 700, 50, "float32")])))
        axis, ranks = draw(st.sampled_from([("a", (0, 1)), ("b", (0, 2)), ("w", (0, 1, 2, 3))]))
        op = draw(st.sampled_from(["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]))
        events.append(Start(call, op, (axis,), ranks, draw(st.integers(0, 10**6))))
        flying.append(call)
        if draw(st.booleans()):
            events.append(events_of.Test(call))
        while flying and draw(st.booleans()):
            events.append(Wait(flying.pop(draw(st.integers(0, len(flying) - 1)))))
    return [*events, *map(Wait, flying)]


MACHINES = [
    {}, {"progress": "polls"}, {"progress": "polls", "window": 1e4, "processor": 1e-6, "latency": 0.01},
    {"asynchronous": "true", "overhead": 0.1, "slowdown": 0.2},
]  # fmt: skip


def test_each_operation_in_a_row_takes_its_latency() -> None:
    found = run(gather(0, 0.5, axis="a"), gather(1, 0.001, axis="a"), Wait(0), Wait(1), latency=0.05)
    assert found.seconds == pytest.approx(0.05 + 0.5 + 0.05 + 0.001)


EMPTY_LAST = [gather(0, 0.5, axis="a"), Start(1, "all_gather", ("a",), (0, 1), 0), Wait(0), Wait(1)]
"""The second operation has no bytes, waits for the first one of the same ranks, and ends with it."""


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(programs(), st.sampled_from(MACHINES))
@example(EMPTY_LAST, {})
def test_bounds(events: list[Event], figures: dict[str, float | str]) -> None:
    """A step takes as long as its computing at least, and as computing and all communication one by one at most."""
    machine = round_machine(**figures)
    found = timeline(Trace(0, 4, events), machine)
    bare = timeline(Trace(0, 4, [e for e in events if isinstance(e, Gemm | Kernel)]), machine)
    alone = sum(timeline(Trace(0, 4, [e, Wait(e.call)]), machine).seconds for e in events if isinstance(e, Start))
    slow = 1 + machine.overlap.slowdown
    transport = sum(e.nbytes * 1e-6 for e in events if isinstance(e, Start))
    assert bare.seconds - 1e-9 <= found.seconds <= slow * bare.seconds + alone + transport + 1e-9
    assert sum(found.causes[0].values()) == pytest.approx(found.seconds)
    assert sum(share for _, share in found.shares()) == pytest.approx(1)


@settings(max_examples=40, derandomize=True, database=None, deadline=None)
@given(programs(), st.sampled_from([{}, {"latency": 0.05}, {"asynchronous": "true", "overhead": 0.1}]))
def test_faster_links_are_no_slower(events: list[Event], figures: dict[str, float | str]) -> None:
    times = [timeline(Trace(0, 4, events), round_machine(**figures, network=b)).seconds for b in (5e4, 1e5, 1e6)]
    assert times[0] >= times[1] - 1e-9
    assert times[1] >= times[2] - 1e-9


# ------------------------------------------------------------------------------------------------ files
def step() -> Timeline:
    events = [
        Memory("weights", 100), Span("step", True), gather(0, 0.5), SECOND, Memory("activations", 50), Wait(0),
        gather(1, 1.0), Wait(1), kernel(0.2), Memory("activations", -50), Span("step", False),
    ]  # fmt: skip
    return run(*events)


def test_chrome_trace() -> None:
    found = json.loads(step().chrome())["traceEvents"]
    assert {e["ph"] for e in found} == {"M", "X", "b", "e", "C"}
    assert all({"pid", "name"} <= e.keys() and e.get("ts", 0) >= 0 for e in found)
    boxes = sorted((e["ts"], e["ts"] + e["dur"]) for e in found if e["ph"] == "X")
    assert all(a[1] <= b[0] + 1e-3 for a, b in pairwise(boxes))  # one thing at a time
    assert boxes[-1][1] == pytest.approx(1e6 * step().seconds, abs=1e-2)
    opened = {e["id"]: e["ts"] for e in found if e["ph"] == "b"}
    closed = {e["id"]: e["ts"] for e in found if e["ph"] == "e"}
    assert opened.keys() == closed.keys()
    assert all(opened[i] <= closed[i] for i in opened)
    assert [e["args"]["bytes"] for e in found if e["name"] == "memory: activations"] == [50, 0]


def test_figure(tmp_path) -> None:
    step().write(str(tmp_path / "step.svg"))
    root = xml.parse(tmp_path / "step.svg").getroot()
    assert root.tag.endswith("svg")
    step().write(str(tmp_path / "step.json"))
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    with pytest.raises(ConfigError, match="cannot write"):
        step().write(str(tmp_path / "no" / "step.json"))


# ------------------------------------------------------------------------------------------------ parts, pipelines
def test_cut() -> None:
    send = Start(9, "send", ("p",), (0, 1), 0, sent=8, peer=1)
    events = [
        gather(0, 0.5), Span("forward", True), SECOND, Wait(0), send, Span("forward", False), Wait(9),
        Span("forward", True), kernel(1.0), Span("forward", False),
    ]  # fmt: skip
    first, second = cut(Trace(0, 2, events), "forward", messages=False)
    assert first.events == [events[0], SECOND, Wait(0)]
    assert second.events == [kernel(1.0)]
    assert cut(Trace(0, 2, events), "forward")[0].events[-1] == send


def stage(seconds: float, size: int = 4, message: int = 0) -> Stage:
    """A stage whose backward pass takes twice as long as its forward pass."""
    return Stage(Trace(0, size, [kernel(seconds)]), Trace(0, size, [kernel(2 * seconds)]), None, message)


def test_pipelines() -> None:
    """1F1B: (m + p − 1)(F + B), and the bubble's share (p − 1)/(m + p − 1)."""
    schedule = make_schedule("1f1b", 4, 8)
    update = [Trace(0, 4, [SECOND])] * 4
    found = pipeline_timeline(schedule, [stage(1.0)] * 4, round_machine(), step=update)
    assert found.seconds == pytest.approx(11 * 3 + 1)
    assert found.causes[found.slowest] == pytest.approx({"other kernels": 24.0, "products": 1.0, "idle": 9.0})
    assert found.bubble == pytest.approx(9 / 34)
    assert found.flops == 4 * 10**9
    assert json.loads(found.chrome())["traceEvents"]
    assert "<svg" in found.svg()


@pytest.mark.parametrize(("receiving", "alone"), [(0.0, 1.0), (0.5, 1.5), (1.0, 2.0)])
def test_stages_that_wait_leave_their_cores(receiving: float, alone: float) -> None:
    """Four ranks on two cores, one microbatch: one stage computes at a time, as fast as those that wait let it."""
    overlap = replace(round_machine().overlap, waiting=receiving, receiving=receiving)
    machine = replace(round_machine(ranks_per_node=4, cores=2), overlap=overlap)
    found = pipeline_timeline(make_schedule("gpipe", 4, 1), [stage(1.0)] * 4, machine)
    assert found.seconds == pytest.approx(4 * 3 * alone)
    assert found.causes[0] == pytest.approx({"other kernels": 3 * alone, "idle": 9 * alone})
    many = pipeline_timeline(make_schedule("1f1b", 4, 8), [stage(1.0)] * 4, machine)
    assert 8 * 3 * 2 < many.seconds <= 11 * 3 * 2 + 1e-9  # all compute most of the time


@pytest.mark.parametrize(("places", "seconds"), [(((0, 1), (2, 3)), 2 * 2 * 3), (((0, 2), (1, 3)), 2 * 3)])
def test_stages_share_the_cores_of_their_node(places: tuple[tuple[int, ...], ...], seconds: float) -> None:
    """Two stages of two ranks, one at work at a time, on two nodes with a core each: on one of them, or on both."""
    overlap = replace(round_machine().overlap, waiting=0.0, receiving=0.0)
    machine = replace(round_machine(cores=1), overlap=overlap)
    found = pipeline_timeline(make_schedule("gpipe", 2, 1), [stage(1.0)] * 2, machine, places=places)
    assert found.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(("places", "seconds"), [(((0, 1), (2, 3)), 2 * 3), (((0, 2), (1, 3)), 2 * 2 * 3)])
def test_stages_on_cores_that_they_keep(places: tuple[tuple[int, ...], ...], seconds: float) -> None:
    """Two stages of two ranks each, one at work at a time: both of a stage have a core each, or share one."""
    overlap = replace(round_machine().overlap, waiting=0.0, receiving=0.0)
    machine = replace(round_machine(ranks_per_node=4, cores=2), overlap=overlap, bound=True)
    found = pipeline_timeline(make_schedule("gpipe", 2, 1), [stage(1.0)] * 2, machine, places=places)
    assert found.seconds == pytest.approx(seconds)
    half = replace(machine, overlap=replace(overlap, receiving=0.5))
    found = pipeline_timeline(make_schedule("gpipe", 2, 1), [stage(1.0)] * 2, half, places=places)
    assert found.seconds == pytest.approx(seconds * (1.5 if places[0] == (0, 1) else 1.0))


@pytest.mark.parametrize(("width", "kinds"), [(2, [0] * 16), (1, [0, 1] * 16), (3, [0, 1] * 5), (16, [0, 0])], ids=str)
def test_stages_with_as_many_ranks_on_each_core_are_as_fast(width: int, kinds: list[int]) -> None:
    """The speed of a stage depends on how many stages of its kind work, not on which: few speeds are reckoned."""
    overlap = replace(round_machine().overlap, waiting=0.0, receiving=0.25)
    machine = replace(round_machine(ranks_per_node=1, cores=2), overlap=overlap, bound=True, cores_of="world")
    places = [range(r * width, (r + 1) * width) for r in range(len(kinds))]
    found = sharing(machine, 1, 32, places, computed=0.8)
    assert found is not None
    assert found.kinds == kinds
    on_core = [Counter(r % 2 for r in ranks) for ranks in places]
    busy = set(range(0, len(places), 3))
    working = [sum(kinds[p] == kind for p in busy) for kind in range(max(kinds) + 1)]
    for place in busy:
        takes = [sum((1 if p in busy else 0.25) * own[c] for p, own in enumerate(on_core)) for c in on_core[place]]
        assert found.speed(kinds[place], working) == pytest.approx(1 / (0.8 * max(takes) / 16 + 0.2))


def test_few_speeds_are_reckoned_for_many_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are numbers of stages at work, in a schedule of thousands of instructions."""
    asked = Counter[tuple[int, ...]]()

    def counted(self: Dependencies, costs: Costs, cores: SharedCores) -> Any:
        def speed(kind: int, working: Sequence[int]) -> float:
            asked[kind, *working] += 1
            return cores.speed(kind, working)

        return together(self, costs, SharedCores(cores.kinds, speed))

    together = Dependencies.together
    monkeypatch.setattr(Dependencies, "together", counted)
    overlap = replace(round_machine().overlap, waiting=0.0, receiving=0.25)
    machine = replace(round_machine(ranks_per_node=1, cores=2), overlap=overlap, bound=True, cores_of="world")
    unlike = [stage(1.0 + s / 100) for s in range(16)]
    places = [(2 * r, 2 * r + 1) for r in range(16)]
    found = pipeline_timeline(make_schedule("1f1b", 16, 48), unlike, machine, places=places)
    assert found.seconds > 48 * 3
    assert len(asked) <= 16


def test_awaited_messages_slow_the_passes_of_pipelines() -> None:
    """Between nodes each rank looks for its next message while it computes, but not in its update."""
    update = [Trace(0, 4, [SECOND])] * 4
    machine = round_machine(slowdown=0.25, progress="polls")
    found = pipeline_timeline(make_schedule("gpipe", 4, 1), [stage(1.0)] * 4, machine, step=update)
    assert found.seconds == pytest.approx(1.25 * 4 * 3 + 1)
    near = pipeline_timeline(make_schedule("gpipe", 4, 1), [stage(1.0)] * 4, machine, step=update, on_node=4)
    assert near.seconds == pytest.approx(4 * 3 + 1)
    asked = Trace(0, 4, [gather(0, 1.5), *[SECOND] * 3, Wait(0)])
    assert timeline(asked, machine, pending=True).seconds == pytest.approx(1.25 * 3)  # once, whatever is in flight
    by_itself = round_machine(slowdown=0.25)
    found = pipeline_timeline(make_schedule("gpipe", 4, 1), [stage(1.0)] * 4, by_itself, step=update)
    assert found.seconds == pytest.approx(4 * 3 + 1)


def test_messages_of_pipelines() -> None:
    """A message of 0.1 s within a node and of 2 s between nodes, of which two ranks share the interface."""
    schedule = make_schedule("gpipe", 4, 1)
    found = pipeline_timeline(schedule, [stage(1.0, message=10**5)] * 4, round_machine())
    assert found.seconds == pytest.approx(4 * 3 + 2 * (0.1 + 2.0 + 0.1))


def test_wrong_pipelines() -> None:
    with pytest.raises(ConfigError, match="3 traces stages: 1f1b takes 4, one for each stage"):
        pipeline_timeline(make_schedule("1f1b", 4, 8), [stage(1.0)] * 3, round_machine())


def test_a_machine_is_given_by_its_name_too() -> None:
    trace = Trace(0, 1, [Gemm(1, 512, 512, 512, "float32")])
    assert timeline(trace, "laptop").seconds == timeline(trace, load_machine("laptop")).seconds
    with pytest.raises(ConfigError, match="no machine 'laptpo'"):
        timeline(trace, "laptpo")


def test_ranks_that_are_imagined_together_count_as_often_as_they_stand_for_others() -> None:
    def program(world: Any) -> Trace:
        with pla.launch({"parallel": {"data": 3, "pipeline": 2}}) as mesh, world.trace() as trace:
            square = pla.ones([8 * (1 + world.rank % 2)] * 2, mesh.grid, pla.Layout(None, None))
            pla.matmul(square, square)
        return trace

    found = pla.imagine_together(program, 6, classes=lambda rank: rank % 2)
    assert [trace.stands_for for trace in found.values()] == [(0, 2, 4), (1, 3, 5)]
    assert timeline(list(found.values()), "laptop").flops == 3 * sum(
        e.flops for trace in found.values() for e in trace.events if isinstance(e, Gemm)
    )


def test_a_stage_that_stands_for_others_waits_for_no_message_of_theirs() -> None:
    """The last of four stages receives from one that is not imagined, whose stand sends to another one of its kind."""
    last = [Start(0, "receive", ("pipeline",), (0, 1, 2, 3), 8, 0, 2, 5), Wait(0), SECOND]
    inner = [SECOND, Start(0, "send", ("pipeline",), (0, 1, 2, 3), 0, 8, 2, 5), Wait(0)]
    traces = [Trace(1, 4, inner, stands_for=(1, 2)), Trace(3, 4, last, stands_for=(3,))]
    assert timeline(traces, round_machine()).seconds == pytest.approx(1.0, abs=0.1)
