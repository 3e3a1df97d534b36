"""Times of operations between ranks, beside each other and beside computing, measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, pairwise
from statistics import median, median_low
from time import perf_counter, sleep
from typing import Any

import numpy as np

from parlinalg.backend import Backend
from parlinalg.comm import Comm, SingleComm
from parlinalg.grid import Grid
from parlinalg.planning import kernel_rates
from parlinalg.planning.kernel_rates import Passes, seconds_of, small_layers
from parlinalg.planning.machine import OPERATIONS, STEPS, Algorithm, Link, Operation

LATENCY_BYTES, BANDWIDTH_BYTES = 8, 4 * 2**20
RECEIVED = (256, 1 << 12, 1 << 15, *(1 << k for k in range(17, 23)))
"""About the bytes that a rank receives in the operations that are measured."""
ROUND_SECONDS, LEAST_CALLS, MOST_CALLS = 0.03, 3, 50
"""Seconds of a round of operations between ranks, and the numbers of operations of one."""
PASSES, MORE_PASSES, LONG_PASSES = 3, 4, 2
"""The number of times that ranks' turns and waits are measured, that operations between ranks are, and that those are
which are longer than one that takes a round: they repeat well."""
SLOW = 0.2
"""Seconds of an operation from which no longer ones are measured."""
ALIKE = 1.25
"""Bytes that differ by less than this ratio count as equal: groups of several sizes do not cut a block alike."""
BESIDE, BESIDE_BYTES = ("all_gather", "reduce_scatter", "all_reduce"), 1 << 20
"""The operations that are also measured in flight together, and the bytes that a rank receives in one."""
POLL_SECONDS = 0.004
"""Seconds for which ranks compute between two polls of them."""
DELAYED_BYTES, DELAYED_SECONDS, DELAYED = 1 << 16, 0.05, 5
"""The bytes of a short operation in flight while ranks compute, the seconds for which they do, and how often."""
BESIDE_SUMS, HIDDEN = (1 << 12, 1 << 18), 2.0
"""The elements of sums that are in flight while products are computed, and for how many times as long as they take."""
TURN_SECONDS, TURNS, TURN_BYTES = (0.0005, 0.001, 0.002, 0.004), 8, 1 << 16
"""Seconds of products before an operation, how often they follow each other, and the bytes that a rank receives in one,
by which the wait of ranks for each other is measured."""
WAIT_SECONDS = 0.15
"""Seconds for which some ranks compute while the others wait."""


def collectives(comm: Comm, backend: Backend) -> list[tuple[str, float, float]]:
    """Return each operation's name, its seconds for 8 bytes a rank, and the bytes a rank receives a second.

    Collective; the median of the ranks counts.
    """
    rows = []
    for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"):
        short = _together(comm, _call(comm, backend, name, LATENCY_BYTES)[0])
        call, received = _call(comm, backend, name, BANDWIDTH_BYTES)
        rows.append((name, short, received / _together(comm, call)))
    return rows


def _call(comm: Comm, backend: Backend, name: str, size: int, wait: bool = True) -> tuple[Callable[[], Any], int]:
    """Return a call whose whole buffer has `size` bytes (at least 8 a rank), and the bytes a rank receives in it."""
    p = comm.size
    each = max(1, size // 8 // p)
    whole, own = (backend.zeros(n, np.float64) for n in (each * p, each))
    counts = [each] * p
    received = 8 * each * (p - 1)
    if name == "all_gather":
        return lambda: comm.all_gather(own, whole, counts, wait=wait), received
    if name == "reduce_scatter":
        return lambda: comm.reduce_scatter(whole, own, counts, wait=wait), received
    if name == "all_reduce":
        return lambda: comm.all_reduce(whole, wait=wait), 2 * received
    if name == "broadcast":
        return lambda: comm.broadcast(whole, 0, wait=wait), 8 * each * p
    out = backend.zeros(each * p, np.float64)
    return lambda: comm.all_to_all(whole, counts, out, counts, wait=wait), received


def measured_link(
    comm: Comm, backend: Backend, members: Sequence[int], rails: int, source: str, crowd: float
) -> Link | None:  # fmt: skip
    """Return the link between these ranks, measured while the other groups measure theirs; None for one rank.

    Of several passes over all points the median of each counts.  Where ranks share cores an operation takes longer or
    shorter by the order in which the system runs them; a step has many operations, which take their mean together.
    """
    most = min(comm.share(len(members)))
    if most < 2:
        return None
    place, across = members.index(comm.rank), len({comm.nodes[r] for r in members}) > 1
    times: dict[str, dict[tuple[int, int], list[float]]] = {op: {} for op in OPERATIONS}
    ratios: dict[str, list[tuple[float, float, float]]] = {op: [] for op in BESIDE}
    sizes = sorted({*(2**k for k in range(1, most.bit_length())), most})
    starts = [place // size * size for size in sizes]
    groups = [
        comm.sub([members[i] for i in range(start, min(start + size, len(members)))], ("measured",))
        for start, size in zip(starts, sizes, strict=True)
    ]
    for number in range(MORE_PASSES):
        for group, size in zip(groups, sizes, strict=True):
            for op in OPERATIONS if size == 2 else OPERATIONS[:-1]:
                for nbytes in RECEIVED:
                    sets = max(1, min(8, kernel_rates.FAR // 4 // nbytes))
                    several = [_received(group, backend, op, nbytes, size) for _ in range(sets)]
                    at, calls = (size, several[0][1]), cycle([call for call, _ in several])
                    seconds = _together(comm, partial(_next, calls) if group.size == size else lambda: None)
                    times[op].setdefault(at, []).append(seconds / (2 if op == "send" else 1))
                    if seconds > (SLOW if number < LONG_PASSES else ROUND_SECONDS):
                        break
        for op in BESIDE:
            ratios[op].append(_beside(comm, backend, groups[-1], op, sizes[-1], across))
    processor = _processor(comm, backend, groups[-1], most)
    for group in groups:
        group.free()
    own = {op: [(p, float(n), median_low(s)) for (p, n), s in found.items()] for op, found in times.items()}
    first = comm.share(own)[members[0]]  # whose groups are whole; the last of an odd number has one without a partner
    points = {op: [(p, n, s) for p, n, s in rows] for op, rows in first.items()}
    latency = min(s for _, _, s in points["send"])
    _, longest, seconds = max(points["send"])
    bandwidth = longest / max(seconds - latency, 1e-9)
    found = {op: _operation(rows, bandwidth) for op, rows in points.items()}
    for op, passes in ratios.items():
        *both, delay = (median(each) for each in zip(*passes, strict=True))
        beside, computing = (min(10.0, max(1.0, ratio)) for ratio in both)
        found[op] = replace(found[op], beside=beside, computing=computing, delay=min(1.0, max(0.0, delay)))
    return Link(latency, bandwidth, rails, source, processor / crowd, **found)


def _beside(
    comm: Comm, backend: Backend, group: Comm, op: str, size: int, across: bool
) -> tuple[float, float, float]:  # fmt: skip
    """Return how many times as long operations take that are in flight together, each waited for in its turn, as those
    that are made one after the other; then of operations whose ranks compute meanwhile how many times as long as that
    their bytes take, and the seconds that one takes longer, whatever its bytes.

    The last two are 1 and 0 within a node, where operations advance at polls only.
    """
    nbytes = BESIDE_BYTES * size // (size - 1) // (2 if op == "all_reduce" else 1)
    calls = [[_call(group, backend, op, nbytes, wait)[0] for _ in range(4)] for wait in (True, False)]
    a = backend.zeros((256, 256), np.float32)
    here = group.size == size

    def together(products: int = 0) -> None:
        handles = [call() for call in calls[1]] if here else []
        while products and handles:
            for _ in range(products):
                backend.xp.matmul(a, a)
            while handles and handles[0].test():
                del handles[0]
        for handle in handles:
            handle.wait()

    def in_turn() -> None:
        for call in calls[0] if here else ():
            call()

    apart, turned = _together(comm, together), _together(comm, in_turn)
    if not across:
        return apart / max(turned, 1e-9), 1.0, 0.0
    product = _together(comm, lambda: backend.xp.matmul(a, a))
    computing = _together(comm, partial(together, max(1, int(POLL_SECONDS / product))))
    short = [_call(group, backend, op, DELAYED_BYTES, wait)[0] for wait in (True, False)]
    alone = _together(comm, short[0] if here else lambda: None)

    def delayed() -> float:
        comm.barrier()
        for _ in range(2):  # so that all compute when it starts
            backend.xp.matmul(a, a)
        start, handle, found = perf_counter(), short[1]() if here else None, math.nan
        for _ in range(math.ceil(DELAYED_SECONDS / product)):
            backend.xp.matmul(a, a)
            if handle is not None and handle.test():
                handle, found = None, perf_counter() - start
        if handle is not None:
            handle.wait()
            found = perf_counter() - start
        return median(s for s in comm.share(found) if math.isfinite(s))

    delay = median(delayed() for _ in range(DELAYED)) - alone
    return apart / max(turned, 1e-9), (computing - delay) / max(apart, 1e-9), delay


def _next(calls: Iterator[Callable[[], Any]]) -> None:
    """Make the next call, with blocks that were not used in the last one."""
    next(calls)()


def _received(group: Comm, backend: Backend, op: str, nbytes: int, p: int) -> tuple[Callable[[], Any], int]:
    """Return a call in which a rank receives about so many bytes, and their number; two messages for "send".

    Each rank's part has a power of two of bytes, as blocks of models have: MPI changes its ways at such sizes, and
    messages just below them can take twice as long as longer ones.
    """
    if op == "send":
        block = backend.zeros(nbytes, np.uint8)

        def there_and_back() -> None:
            for way in (group.send, group.receive) if group.rank == 0 else (group.receive, group.send):
                way(block, 1 - group.rank)

        return there_and_back, nbytes
    part = nbytes / (p - 1) / (2 if op == "all_reduce" else 1)
    return _call(group, backend, op, nbytes if op == "broadcast" else p << max(3, round(math.log2(part))))


def _together(comm: Comm, call: Callable[[], Any]) -> float:
    """Return the seconds of a call, of calls that follow each other: the median of rounds, and of the ranks that take
    part.  A round has the mean of short calls, and the median of long ones, of which some take twice their time.

    Ranks that outnumber their cores begin a round one after the other, and the first call brings them into step: it is
    not counted.
    """
    rounds: list[float] = []
    calls = LEAST_CALLS
    while len(rounds) < 3:
        comm.barrier()
        call()
        times = [perf_counter()]
        for _ in range(calls):
            call()
            times.append(perf_counter())
        own = median(b - a for a, b in pairwise(times)) if calls == LEAST_CALLS else (times[-1] - times[0]) / calls
        every = comm.share(own)
        seconds = median(s for s in every if 2 * s >= max(every))
        if seconds > ROUND_SECONDS:  # long, and its beginning no matter
            return seconds
        if calls == LEAST_CALLS and seconds * calls < ROUND_SECONDS:
            calls = max(calls + 1, min(MOST_CALLS, int(ROUND_SECONDS / seconds)))
        else:
            rounds.append(seconds)
    return median(rounds)


def bounded(rows: Iterable[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    """Return points (ranks, bytes, seconds) in order, each with the least time of those of no fewer ranks and bytes.

    Where ranks share cores the system runs them in an order, for a second or so, in which every operation takes ten
    times as long.  What takes less among more ranks, or for more bytes, shows that a point was measured in such a time.
    A message that is a little shorter bounds it in proportion to the bytes.

    >>> bounded([(2, 256.0, 9.0), (2, 4096.0, 1.0), (4, 240.0, 2.0), (4, 4080.0, 4.0)])
    [(2, 256.0, 1.0), (2, 4096.0, 1.0), (4, 240.0, 2.0), (4, 4080.0, 4.0)]
    >>> bounded([(2, 120.0, 9.0), (4, 100.0, 2.0)])
    [(2, 120.0, 2.4), (4, 100.0, 2.0)]
    """
    rows = sorted(rows)
    return [(p, n, min(t * max(1, n / k) for q, k, t in rows if q >= p and ALIKE * k >= n)) for p, n, _ in rows]


def _operation(rows: Iterable[tuple[int, float, float]], bandwidth: float) -> Operation:
    """Return the formula of a collective whose steps fit the short messages best, and the measured points."""
    rows = bounded(rows)
    least, most = min(n for _, n, _ in rows), max(n for _, n, _ in rows)
    short = [(p, s) for p, n, s in rows if n <= 2 * least]
    fits = []
    for order, (steps, count) in enumerate(STEPS.items()):
        logs = [math.log(s / count(p)) for p, s in short]
        mean = sum(logs) / len(logs)
        fits.append((round(sum((x - mean) ** 2 for x in logs), 9), order, steps, math.exp(mean)))
    _, _, steps, latency = min(fits)
    shares = [n / bandwidth / max(s - latency * STEPS[steps](p), 0.1 * s) for p, n, s in rows if n > most / 2]
    share = sorted(shares)[len(shares) // 2]
    return Operation((Algorithm(steps, latency, min(1.0, max(0.01, share))),), tuple(rows))


def _processor(comm: Comm, backend: Backend, group: Comm, size: int) -> float:
    """Return the seconds of a core, shared as it is, that each byte costs which arrives while a rank computes.

    All ranks compute the same number of products, with a poll after each, while two sums are in flight, and then wait
    for them.  What long sums take more than short ones is what sockets, copies, additions and whatever lets the sums
    progress take for their bytes.
    """
    here = group.size == size
    a = backend.zeros((256, 256), np.float32)
    blocks = [[backend.zeros(n, np.float32) for _ in range(2)] for n in BESIDE_SUMS]
    alone = _together(comm, (lambda: group.all_reduce(blocks[-1][0])) if here else lambda: None)
    count = max(1, int(HIDDEN * 2 * alone / _together(comm, lambda: backend.xp.matmul(a, a))))

    def hidden(sums: Sequence[Any]) -> float:
        comm.barrier()
        start = perf_counter()
        handles = [group.all_reduce(x, wait=False) for x in sums] if here else []
        for _ in range(count):
            backend.xp.matmul(a, a)
            for handle in handles:
                handle.test()
        for handle in handles:
            handle.wait()
        return float(max(comm.share(perf_counter() - start)))

    few, many = (2 * 2 * x[0].nbytes * (size - 1) / size for x in blocks)
    costs = [[hidden(x) for x in blocks] for _ in range(9)]
    return max(0.0, median(more - less for less, more in costs) / (many - few))


def turn_costs(comm: Comm, backend: Backend) -> tuple[tuple[float, float], ...]:
    """Return rows of seconds in which ranks compute, and of those by which an operation between them then takes longer
    than one that follows another.

    Ranks that share a core wait until the others have had their turn, and take it from those that compute; with a core
    each they wait out the system's pauses.
    """
    if comm.size < 2:
        return ()
    a = backend.zeros((64, 64), np.float32)
    one = median([seconds_of(partial(backend.xp.matmul, a, a), backend, 0.01) for _ in range(3)])
    one = median(comm.share(one))
    pair = comm.sub([r for r in (comm.rank & ~1, comm.rank | 1) if r < comm.size], ("measured",))
    calls = [_received(c, backend, "all_gather", TURN_BYTES, c.size)[0] for c in (comm, pair) if c.size > 1]
    calls += [lambda: None] * (2 - len(calls))

    def timed(count: int, call: Callable[[], Any]) -> float:
        comm.barrier()
        start = perf_counter()
        for _ in range(TURNS):
            for _ in range(count):
                backend.xp.matmul(a, a)
            call()
        return float(max(comm.share((perf_counter() - start) / TURNS)))

    counts = [0, *(max(1, int(seconds / one)) for seconds in TURN_SECONDS)]
    every = [(count, call) for count in counts for call in (lambda: None, *calls)]
    passes = [[timed(count, call) for count, call in every] for _ in range(6 * PASSES)]  # a difference of long times
    middle = [median(times) for times in zip(*passes, strict=True)]
    table = [middle[i : i + 3] for i in range(0, len(middle), 3)]
    alone = sum(table[0][1:])
    rows = [(base, max(1e-7, (sum(more) - alone) / 2 - base)) for base, *more in table[1:]]
    pair.free()
    return tuple(rows)


def poll_slowdown(comm: Comm, backend: Backend) -> float:
    """Return the share by which computing takes longer while an operation between nodes is in flight, whatever its
    bytes: polls, and the thread of each rank that lets it progress.

    All ranks compute while each awaits a message that is sent only when all are done: small layers, whose time is the
    interpreter's, and as long products, as in a step of small blocks.
    """
    a = backend.zeros((256, 256), np.float32)
    token = backend.zeros(1, np.float64)
    passes = Passes(backend, perf_counter)
    with Grid({"own": 1}, SingleComm(), backend=backend.name) as grid:
        grid.polled.append(passes)
        layers = small_layers(grid)
        product = median(comm.share(seconds_of(lambda: backend.xp.matmul(a, a), backend)))
        chain = median(comm.share(seconds_of(layers, backend)))
        rounds, products = max(1, round(WAIT_SECONDS / 2 / chain)), max(1, round(chain / product))

        def timed(pending: bool) -> float:
            comm.barrier()
            awaited = comm.receive(token, (comm.rank - 1) % comm.size, wait=False) if pending else None
            passes.also = awaited.test if awaited is not None else lambda: False
            start = perf_counter()
            for _ in range(rounds):
                layers()
                for _ in range(products):
                    backend.xp.matmul(a, a)
                    passes.also()
            seconds = perf_counter() - start
            comm.barrier()
            if awaited is not None:
                comm.send(token, (comm.rank + 1) % comm.size)
                awaited.wait()
            return max(comm.share(seconds))

        ratios = [timed(True) / timed(False) for _ in range(3 * PASSES)]  # of two long times that are nearly alike
    return min(10.0, max(0.0, median(ratios) - 1))


def waiting_shares(comm: Comm, backend: Backend, at_work: bool) -> tuple[float, float]:
    """Return the shares of a core that ranks take while they wait in a collective operation, and for a message, of what
    they take computing.

    As many ranks as there are cores compute while the others sleep, and while they wait: of those that sleep nothing is
    taken.
    """
    a = backend.zeros((64, 64), np.float32)
    workers = [r for r, there in enumerate(comm.share(at_work)) if there]
    others = [r for r in range(comm.size) if r not in workers]
    served = {r: [o for i, o in enumerate(others) if workers[i % len(workers)] == r] for r in workers}
    mine = next((w for w, theirs in served.items() if comm.rank in theirs), comm.rank)
    token = backend.zeros(1, np.float64)

    def speed() -> float:
        count, start = 0, perf_counter()
        while perf_counter() < start + WAIT_SECONDS:
            for _ in range(8):
                backend.xp.matmul(a, a)
            count += 1
        return count / (perf_counter() - start)

    def asleep() -> float:
        if at_work:
            return speed()
        sleep(WAIT_SECONDS)
        return 0.0

    def in_a_collective() -> float:
        found = speed() if at_work else 0.0
        comm.all_reduce(token)
        return found

    def for_a_message() -> float:
        found = speed() if at_work else 0.0
        if at_work:
            for r in served[comm.rank]:
                comm.send(token, r)
        else:
            comm.receive(token, mine, wait=False).wait()
        return found

    rates: dict[Callable[[], float], list[float]] = {asleep: [], in_a_collective: [], for_a_message: []}
    for _ in range(PASSES):
        for way, found in rates.items():
            comm.barrier()
            found.append(sum(comm.share(way())))
    alone, polled, received = (median(found) for found in rates.values())
    many = len(others) / len(workers)
    return tuple(min(1.0, max(0.0, (alone / slower - 1) / many)) for slower in (polled, received))  # type: ignore[return-value]


def hidden_window(comm: Comm, backend: Backend, link: Link) -> float:
    """Return the bytes of an operation that arrive while its ranks compute without a call, at least 1."""
    if comm.size < 2:
        return 1e15
    pair = [0, next((r for r in range(comm.size) if comm.nodes[r] != comm.nodes[0]), 1)]
    arrived = 0.0
    if comm.rank in pair:
        group = comm.sub(pair, ("measured",))
        n = int(min(1 << 25, max(1 << 18, 0.3 * link.bandwidth)))
        own, both = backend.zeros(n, np.uint8), backend.zeros(2 * n, np.uint8)
        alone = []
        for _ in range(2):
            group.barrier()
            start = perf_counter()
            group.all_gather(own, both, [n, n])
            alone.append(perf_counter() - start)
        group.barrier()
        handle = group.all_gather(own, both, [n, n], wait=False)
        until = perf_counter() + 1.5 * alone[-1]
        while perf_counter() < until:
            pass
        start = perf_counter()
        handle.wait()
        arrived = n * max(0.0, 1 - (perf_counter() - start) / alone[-1])
        group.free()
    return float(max(1.0, *comm.share(arrived)))
