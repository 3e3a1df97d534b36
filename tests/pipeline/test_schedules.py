"""Schedules as data: drawn as staircases, complete, free of deadlocks, and refused where they are wrong."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import pytest

from parlinalg.errors import ConfigError, ScheduleError
from parlinalg.pipeline import Chunk, Instruction, Op, Schedule, complete_schedule, discover, make_schedule
from parlinalg.pipeline.drawing import staircase
from parlinalg.pipeline.simulate import Costs, message, simulate, validate

pytestmark = pytest.mark.serial

NAMES = ("1f1b", "chimera", "gpipe", "interleaved", "pipedream", "pipedream-2bw", "zb-h1", "zb-v")
COMPUTE = {Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT}
SENDS, RECEIVES = {Op.SEND_FORWARD, Op.SEND_BACKWARD}, {Op.RECEIVE_FORWARD, Op.RECEIVE_BACKWARD}
EQUAL = Costs(forward=1, backward=1, weight=0)
SPLIT = Costs(forward=1, backward=2, weight=1)  # of split backward passes: all three parts take the same time


def taken(ranks: Iterable[int], microbatches: Iterable[int]) -> Iterator[Schedule]:
    """Every schedule with all numbers of these that it takes."""
    for name in NAMES:
        for p in ranks:
            for m in microbatches:
                for chunks, every in options(name, p, m):
                    yield make_schedule(name, p, m, chunks, every=every)


def options(name: str, p: int, m: int) -> list[tuple[int | None, int | None]]:
    """What may be given beside the ranks and the microbatches: as the pages say, and not as the code finds."""
    if name == "interleaved":
        return [(2, None), (3, None)] if m % p == 0 else []
    if name == "chimera":
        return [(None, None)] if p % 2 == 0 and m >= 2 else []
    if name == "pipedream":
        return [(None, None)] + ([(None, 2)] if m % 2 == 0 else [])
    if name == "pipedream-2bw":
        return [(None, None)] + [(None, k) for k in (1, 2, 3) if m % k == 0 and k >= p - 1]
    return [(None, None)]


def drawn(picture: str) -> str:
    return "\n".join(line.strip() for line in picture.strip().splitlines())


STAIRCASES = {
    ("gpipe", 3, 4): """
        rank 0  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3
        rank 1  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .
        rank 2  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .""",
    ("1f1b", 4, 6): """
        rank 0  F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5
        rank 1  .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5 .
        rank 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 .  .
        rank 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .  .""",
    ("interleaved", 2, 4): """
        rank 0  F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a .   B2b .   B3b B2a B3a
        rank 1  .   F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a .""",
    ("chimera", 4, 4): """
        rank 0  F0a F2a .   F1b B1b F3b B3b B0a .   B2a
        rank 1  .   F0a F1b F2a F3b B1b B0a B3b B2a .
        rank 2  .   F1b F0a F3b F2a B0a B1b B2a B3b .
        rank 3  F1b F3b .   F0a B0a F2a B2a B1b .   B3b""",
    ("zb-h1", 3, 4): """
        rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
        rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
        rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3""",
    ("zb-v", 2, 3): """
        rank 0  F0a F1a F2a F0b I0b W0b F1b I1b W1b I0a W0a F2b I2b W2b I1a W1a I2a W2a .
        rank 1  .   F0a F0b F1a F1b I0b W0b F2a I0a W0a F2b I1b W1b I1a I2b I2a W1a W2b W2a""",
    ("pipedream", 3, 4): """
        rank 0  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
        rank 1  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
        rank 2  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .""",
}


@pytest.mark.parametrize(("name", "ranks", "microbatches"), STAIRCASES, ids=str)
def test_staircases(name: str, ranks: int, microbatches: int) -> None:
    costs = SPLIT if name.startswith("zb") else EQUAL
    picture = staircase(simulate(make_schedule(name, ranks, microbatches), costs))
    assert picture == drawn(STAIRCASES[name, ranks, microbatches])


def test_all_schedules_are_found() -> None:
    assert tuple(sorted(discover())) == NAMES


def test_messages_are_where_they_are_needed() -> None:
    def line(order: tuple[Instruction, ...]) -> str:
        short = {Op.SEND_FORWARD: "sf", Op.RECEIVE_FORWARD: "rf", Op.SEND_BACKWARD: "sb", Op.RECEIVE_BACKWARD: "rb",
                 Op.REDUCE_GRADIENTS: "reduce", Op.STEP: "step"}  # fmt: skip
        return " ".join(short.get(i.op, i.op.value) + (f"{i.microbatch}" if i.microbatch >= 0 else "") for i in order)

    first, middle, last = make_schedule("1f1b", 3, 3).orders
    assert line(first) == "F0 sf0 F1 sf1 F2 sf2 rb0 B0 rb1 B1 rb2 B2 reduce step"
    assert line(middle) == "rf0 F0 sf0 rf1 F1 sf1 rb0 B0 sb0 rf2 F2 sf2 rb1 B1 sb1 rb2 B2 sb2 reduce step"
    assert line(last) == "rf0 F0 B0 sb0 rf1 F1 B1 sb1 rf2 F2 B2 sb2 reduce step"
    turn = make_schedule("zb-v", 2, 1).orders[1]  # stages 1 and 2: what goes from one to the other stays here
    assert line(turn) == "rf0 F0 F0 sf0 rb0 I0 W0 I0 sb0 W0 reduce step"
    assert line(make_schedule("pipedream", 2, 2).orders[1]) == "rf0 F0 B0 sb0 reduce0 step0 rf1 F1 B1 sb1 reduce1 step1"
    up = make_schedule("chimera", 2, 2).orders[1]
    assert line(up) == "F1 sf1 rf0 F0 B0 sb0 rb1 B1 reduce step"


@pytest.mark.timeout(600)
def test_every_instruction_once_and_no_deadlock(full: bool) -> None:
    ranks, microbatches = (range(1, 9), range(1, 17)) if full else ((1, 2, 3, 4), (1, 2, 3, 4, 6))
    seen = Counter()
    for schedule in taken(ranks, microbatches):
        seen[schedule.name] += 1
        split = schedule.name.startswith("zb")
        sent: Counter[object] = Counter()
        received: Counter[object] = Counter()
        done: Counter[tuple[Op, int, int]] = Counter()
        for rank, order in enumerate(schedule.orders):
            for i in order:
                if i.op in COMPUTE:
                    done[i.op, schedule.chunks[rank][i.chunk].stage, i.microbatch] += 1
                elif i.op in SENDS:
                    sent[message(schedule, rank, i), rank, i.peer] += 1
                elif i.op in RECEIVES:
                    received[message(schedule, rank, i), i.peer, rank] += 1
            steps = [i for i in order if i.op in (Op.REDUCE_GRADIENTS, Op.STEP)]
            assert [i.op for i in steps] == [Op.REDUCE_GRADIENTS, Op.STEP] * (len(steps) // 2)
            assert schedule.asynchronous or order[-2:] == tuple(steps)
        ops = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if split else (Op.FORWARD, Op.BACKWARD)
        wanted = {(op, s, j) for op in ops for s in range(schedule.stages) for j in range(schedule.microbatches)}
        assert done == Counter(wanted), schedule.name
        assert sent == received, schedule.name
        validate(schedule)
    assert set(seen) == set(NAMES)
    assert full <= (min(seen.values()) > 50)


def graph(schedule: Schedule) -> dict[tuple[int, int], set[tuple[int, int]]]:
    """What each instruction, (rank, place in its order), comes after: the one before it, and for a receive the send."""
    sends = {
        message(schedule, rank, i): (rank, k)
        for rank, order in enumerate(schedule.orders) for k, i in enumerate(order) if i.op in SENDS
    }  # fmt: skip
    after: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for rank, order in enumerate(schedule.orders):
        for k, i in enumerate(order):
            after[rank, k] = {(rank, k - 1)} if k else set()
            if i.op in RECEIVES:
                after[rank, k].add(sends[message(schedule, rank, i)])
    return after


def swapped(schedule: Schedule, rank: int, a: int, b: int) -> Schedule:
    order = list(schedule.orders[rank])
    order[a], order[b] = order[b], order[a]
    return replace(schedule, orders=(*schedule.orders[:rank], tuple(order), *schedule.orders[rank + 1 :]))


def told_of(schedule: Schedule) -> str | None:
    """What is told of an order by itself: not of ranks that would wait for each other."""
    try:
        simulate(schedule)
    except ScheduleError as error:
        return None if "would hang" in str(error) else str(error)
    return None


@pytest.mark.timeout(600)
def test_swapped_instructions_are_judged_as_the_graph_of_all_ranks_does(full: bool) -> None:
    """An order that lacks what it needs is told of its rank; else what hangs is a cycle of the graph."""
    draw = random.Random(0)
    verdicts: Counter[str] = Counter()
    for schedule in (make_schedule(name, p, m) for name in NAMES for p, m in ((2, 2), (2, 4), (4, 4))):
        for _ in range(300 if full else 12):
            rank = draw.randrange(schedule.ranks)
            a, b = draw.sample(range(len(schedule.orders[rank])), 2)
            wrong = swapped(schedule, rank, a, b)
            if (fault := told_of(wrong)) is not None:
                assert f"rank {rank} " in fault
                verdicts["order"] += 1
                with pytest.raises(ScheduleError, match=re.escape(fault)):
                    simulate(wrong)
                continue
            try:
                tuple(TopologicalSorter(graph(wrong)).static_order())
            except CycleError:
                verdicts["hangs"] += 1
                with pytest.raises(ScheduleError, match="would hang") as caught:
                    simulate(wrong)
                waits = re.findall(r"rank (\d+) waits for rank (\d+)", str(caught.value))
                circle = [a for a, _ in waits]
                assert [b for _, b in waits] == circle[1:] + circle[:1]
                assert str(rank) in circle
            else:
                verdicts["runs"] += 1
                simulate(wrong)
    assert min(verdicts[v] for v in ("order", "hangs", "runs")) >= 5, verdicts


def test_ranks_that_would_wait_for_each_other_are_named() -> None:
    schedule = make_schedule("gpipe", 3, 2)
    order = list(schedule.orders[1])  # rf0 F0 sf0 rf1 F1 sf1 rb0 B0 sb0 rb1 B1 sb1
    order[3], order[4], order[5], order[6], order[7], order[8] = order[6], order[7], order[8], *order[3:6]
    wrong = replace(schedule, orders=(schedule.orders[0], tuple(order), schedule.orders[2]))
    with pytest.raises(ScheduleError) as caught:
        simulate(wrong)
    assert str(caught.value) == (
        "gpipe would hang: rank 1 waits for rank 2 (RECEIVE_BACKWARD of microbatch 0 of stage 1), "
        "rank 2 waits for rank 1 (RECEIVE_FORWARD of microbatch 1 of stage 2)"
    )
    chunks = ((Chunk(0),), (Chunk(1),), (Chunk(2),))

    def orders(first: str, last: str) -> Schedule:
        ops = {"F": Op.FORWARD, "B": Op.BACKWARD}
        each = [[Instruction(ops[w[0]], 0, int(w[1])) for w in o.split()] for o in (first, "F0 F1 B0 B1", last)]
        return complete_schedule("mine", 2, 3, chunks, each)

    validate(orders("F0 F1 B0 B1", "F0 B0 F1 B1"))
    with pytest.raises(ScheduleError, match=r"hang: rank 0 waits for rank 1 .*, rank 1 waits for rank 0 "):
        validate(orders("F0 B0 F1 B1", "F0 B0 F1 B1"))


def changed(
    schedule: Schedule, rank: int, drop: int | None = None, add: tuple[int, Instruction] | None = None
) -> Schedule:
    order = list(schedule.orders[rank])
    if drop is not None:
        del order[drop]
    if add is not None:
        order.insert(*add)
    return replace(schedule, orders=(*schedule.orders[:rank], tuple(order), *schedule.orders[rank + 1 :]))


def place(schedule: Schedule, rank: int, op: Op, microbatch: int = -1) -> int:
    return next(k for k, i in enumerate(schedule.orders[rank]) if i.op is op and i.microbatch == microbatch)


def test_wrong_orders_are_refused_by_name() -> None:
    right = make_schedule("1f1b", 2, 3)
    at = {(op, j): place(right, 1, op, j) for op in (Op.FORWARD, Op.BACKWARD) for j in range(3)}

    def wrong(schedule: Schedule, message: str) -> None:
        with pytest.raises(ScheduleError, match=message):
            simulate(schedule)

    wrong(
        swapped(right, 1, at[Op.FORWARD, 2], at[Op.BACKWARD, 2]),
        "rank 1 does BACKWARD of microbatch 2 of stage 1 before FORWARD of microbatch 2 of stage 1",
    )
    wrong(
        changed(right, 0, drop=place(right, 0, Op.BACKWARD, 2)),
        "rank 0 does REDUCE_GRADIENTS before BACKWARD of microbatch 2 of stage 0",
    )
    wrong(
        changed(right, 1, drop=place(right, 1, Op.SEND_BACKWARD, 1)), "rank 1 never does SEND_BACKWARD of microbatch 1"
    )
    wrong(
        changed(right, 1, drop=place(right, 1, Op.RECEIVE_FORWARD, 1)),
        "rank 1 does FORWARD of microbatch 1 of stage 1 before RECEIVE_FORWARD of microbatch 1",
    )
    wrong(
        changed(right, 1, add=(at[Op.BACKWARD, 1] + 1, Instruction(Op.BACKWARD, 0, 1))),
        "rank 1 does BACKWARD of microbatch 1 of stage 1 twice",
    )
    wrong(changed(right, 0, add=(0, Instruction(Op.FORWARD, 0, 3))), "there are microbatches 0 to 2")
    wrong(changed(right, 0, add=(0, Instruction(Op.FORWARD, 1, 0))), "FORWARD of chunk 1; it holds chunks 0 to 0")
    end = len(right.orders[0])
    wrong(swapped(right, 0, end - 1, end - 2), "rank 0 does STEP before REDUCE_GRADIENTS")
    wrong(changed(right, 0, drop=end - 1), "rank 0 has no REDUCE_GRADIENTS and STEP")
    wrong(changed(right, 0, drop=end - 2), "rank 0 does STEP before REDUCE_GRADIENTS")
    wrong(changed(right, 0, add=(end, Instruction(Op.STEP))), "rank 0 does STEP after its STEP")
    wrong(changed(right, 0, add=(end, Instruction(Op.FORWARD, 0, 0))), "twice")
    wrong(
        changed(right, 0, drop=1, add=(1, Instruction(Op.SEND_FORWARD, 0, 0, peer=0))),
        "SEND_FORWARD of microbatch 0 of stage 0 with rank 0; the neighbouring stage is on rank 1",
    )
    wrong(changed(right, 0, add=(0, Instruction(Op.RECEIVE_FORWARD, 0, 0, peer=1))), "which nobody needs")
    wrong(replace(right, chunks=((Chunk(0),), (Chunk(0),))), "stage 0 of copy 0 is held by 2 ranks")
    wrong(replace(right, stages=3), "stage 2 of copy 0 is held by 0 ranks")
    wrong(replace(right, orders=right.orders[:1]), "orders of 1 ranks, where there are 2")

    split = make_schedule("zb-h1", 2, 2)
    a, b = (place(split, 0, op, 1) for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))
    wrong(swapped(split, 0, a, b), "BACKWARD_WEIGHT of microbatch 1 of stage 0 before BACKWARD_INPUT")
    wrong(changed(split, 0, add=(a + 1, Instruction(Op.BACKWARD, 0, 1))), "twice: as BACKWARD_INPUT too")
    wrong(changed(split, 0, drop=b), "REDUCE_GRADIENTS before BACKWARD of microbatch 1")
    both = make_schedule("chimera", 2, 2)
    wrong(changed(both, 0, add=(0, Instruction(Op.FORWARD, 1, 0))), "passes through copy 0")
    turn = make_schedule("zb-v", 1, 1)
    wrong(swapped(turn, 0, 0, 1), "FORWARD of microbatch 0 of stage 1 before FORWARD of microbatch 0 of stage 0")


def test_wrong_asynchronous_orders_are_refused() -> None:
    right = make_schedule("pipedream", 2, 3)

    def wrong(schedule: Schedule, message: str) -> None:
        with pytest.raises(ScheduleError, match=message):
            simulate(schedule)

    wrong(
        replace(right, weights=((0, 1, 1), (0, 1, 2))),
        r"rank 0 does FORWARD of microbatch 1 .* after 1 STEPs: it has made 0",
    )
    wrong(replace(right, versions=(1, 1)), "rank 0 keeps 1 versions of its weights; it uses 2")
    wrong(replace(right, weights=((0, 0), (0, 1))), "3 microbatches each")
    step = place(right, 0, Op.STEP, 1)
    fewer = changed(right, 0, drop=step)
    wrong(fewer, r"rank 1 makes its STEPs after microbatches \[0, 1, 2\], rank 0 after \[0, 2\]")
    wrong(swapped(right, 0, step, step - 1), "rank 0 does STEP before REDUCE_GRADIENTS")
    wrong(
        swapped(right, 0, step, place(right, 0, Op.BACKWARD, 1)),
        "rank 0 does STEP before BACKWARD of microbatch 1 of stage 0",
    )


def test_numbers_it_cannot_take_are_refused_with_those_it_can() -> None:
    def refused(message: str, *numbers: object, **more: int) -> None:
        with pytest.raises(ScheduleError, match=message):
            make_schedule(*numbers, **more)  # type: ignore[arg-type]

    assert issubclass(ScheduleError, ConfigError)
    refused("no pipeline schedule '1f2b'; there are 1f1b, chimera, gpipe", "1f2b", 2, 2)
    for name in NAMES:
        refused("microbatches=0: it takes a whole number of at least 1", name, 2, 0)
        refused("ranks=0: it takes a whole number of at least 1", name, 0, 2)
        refused("microbatches=2.0: it takes a whole number", name, 2, 2.0)
        refused("microbatches=True: it takes a whole number", name, 2, True)
    for name in ("gpipe", "1f1b", "zb-h1", "pipedream", "pipedream-2bw"):
        refused(f"{name} with chunks=2: a rank holds one stage", name, 2, 2, 2)
        assert make_schedule(name, 2, 2, 1) == make_schedule(name, 2, 2)
    for name in ("chimera", "zb-v"):
        refused(f"{name} with chunks=3: .* give 2", name, 2, 2, 3)
        assert make_schedule(name, 2, 2, 2) == make_schedule(name, 2, 2)
    for name in ("gpipe", "1f1b", "zb-h1", "chimera", "zb-v", "interleaved"):
        refused("every=2: it steps once", name, 2, 2, every=2)
    refused("over 4 ranks with microbatches=6: it takes multiples of 4, such as 4 or 8", "interleaved", 4, 6)
    refused("it takes multiples of 4, such as 4$", "interleaved", 4, 2)
    refused("chunks=1: it takes 2 or more; with one chunk a rank take 1f1b", "interleaved", 2, 2, 1)
    refused("over 3 ranks: it takes an even number of them, such as 2 or 4", "chimera", 3, 4)
    refused("over 1 ranks: it takes an even number of them, such as 2$", "chimera", 1, 4)
    refused("microbatches=1: it takes 2 or more", "chimera", 2, 1)
    refused("microbatches=6 and every=4: .*every may be 1, 2, 3, 6", "pipedream", 2, 6, every=4)
    refused("every=2: .* at least 3 microbatches; of 6 microbatches, every may be 3, 6", "pipedream-2bw", 4, 6, every=2)


def test_names_of_places() -> None:
    schedule = make_schedule("chimera", 4, 6)
    assert schedule.copies == 2
    assert [schedule.copy_of(j) for j in range(4)] == [0, 1, 0, 1]
    assert [schedule.holder(s, 1) for s in range(4)] == [3, 2, 1, 0]
    assert [make_schedule("zb-v", 3, 3).holder(s) for s in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [make_schedule("interleaved", 2, 2, 3).holder(s) for s in range(6)] == [0, 1] * 3
    with pytest.raises(ScheduleError, match="no rank of chimera holds stage 4 of copy 0: it has stages 0 to 3"):
        schedule.holder(4)


def test_weights_of_asynchronous_schedules() -> None:
    """PipeDream: stage s of p uses the weights of t − p + 1 + s; 2BW: all stages those of the step before the last."""
    for p in (1, 2, 3, 5):
        for m in (1, 4, 9, 12):
            schedule = make_schedule("pipedream", p, m)
            for r in range(p):
                assert schedule.weights[r] == tuple(max(0, t - p + 1 + r) for t in range(m))
                assert schedule.versions[r] <= p - r
                assert schedule.versions[r] == p - r or m < 2 * (p - r) - 1
    for p, every in ((1, 1), (2, 1), (3, 2), (4, 3), (4, 6)):
        schedule = make_schedule("pipedream-2bw", p, 4 * every, every=every)
        assert set(schedule.weights) == {tuple(max(0, j // every - 1) for j in range(4 * every))}
        assert set(schedule.versions) == {2}
        steps = [i.microbatch for i in schedule.orders[0] if i.op is Op.STEP]
        assert steps == [k * every + every - 1 for k in range(4)]
    assert make_schedule("1f1b", 2, 2).weights_of(0, 1) == 0
    assert make_schedule("pipedream", 2, 4).weights_of(1, 3) == 3


def test_versions_are_those_still_to_be_used() -> None:
    for name, p, m, every in (("pipedream", 4, 12, 2), ("pipedream", 5, 12, 3), ("pipedream-2bw", 4, 12, 3)):
        schedule = make_schedule(name, p, m, every=every)
        for order, weights, versions in zip(schedule.orders, schedule.weights, schedule.versions):
            most = 0
            for k in range(len(order)):
                steps = sum(i.op is Op.STEP for i in order[: k + 1])
                left = {i.microbatch for i in order[k + 1 :] if i.op is Op.BACKWARD}
                most = max(most, len({steps} | {weights[j] for j in left if weights[j] <= steps}))
            assert versions == most, (name, p, every)
    assert make_schedule("pipedream", 4, 12, every=2).versions == (3, 2, 2, 1)


def test_gradients_are_summed_in_the_order_of_the_microbatches() -> None:
    for schedule in taken((1, 2, 4), (2, 4)):
        for rank, order in enumerate(schedule.orders):
            for c in range(len(schedule.chunks[rank])):
                found = [i.microbatch for i in order if i.chunk == c and i.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)]
                assert all(a < b for a, b in pairwise(found))
