"""Measurements of this machine in seconds: collectives, products and kernels, and a machine's file of them all."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter, sleep
from typing import Any

import numpy as np

from parlinalg.array.create import dtype_named, ones
from parlinalg.autograd import Tensor
from parlinalg.backend import Backend, kernels
from parlinalg.backend.blas import cores, gemm_rate, host_and_cores
from parlinalg.comm import Comm, SingleComm, open_comm
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.linalg import blocks
from parlinalg.linalg.blocks import Machine
from parlinalg.planning import machine as planning
from parlinalg.planning.machine import OPERATIONS, STEPS, Algorithm, GemmRate, Kernels, Link, Operation, Overlap

LATENCY_BYTES, BANDWIDTH_BYTES = 8, 4 * 2**20


def collectives(comm: Comm, backend: Backend) -> list[tuple[str, float, float]]:
    """Return each operation's name, its seconds for 8 bytes a rank, and the bytes a rank receives a second.

    Collective; the slowest rank's time counts.
    """
    rows = []
    for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"):
        short = _timed(comm, *_call(comm, backend, name, LATENCY_BYTES), calls=50)
        call, received = _call(comm, backend, name, BANDWIDTH_BYTES)
        rows.append((name, short, received / _timed(comm, call, received, calls=4)))
    return rows


def machine(dtype: str) -> tuple[Machine, float]:
    """Return the constants of the model of factorizations on this machine, and the operations a second of a product.

    Collective over all ranks; the slowest one counts.  On one rank words and calls keep their usual constants.
    """
    comm = open_comm()
    with Grid({"ranks": comm.size}, comm) as grid:
        rate = min(comm.share(gemm_rate(grid.backend, dtype), others="alike"))
        found = blocks.machine()
        if comm.size > 1:
            rows = {name: row for name, *row in collectives(comm, grid.backend)}
            latency, bandwidth = rows["all_gather"][0], min(rows["all_gather"][1], rows["broadcast"][1])
            word = np.dtype(dtype).itemsize / bandwidth
            found = found._replace(word=word * rate, call=latency / math.log2(comm.size) * rate)
    return found, rate


def _call(comm: Comm, backend: Backend, name: str, size: int) -> tuple[Callable[[], Any], int]:
    """A call whose whole buffer has `size` bytes (at least 8 a rank), and the bytes a rank receives in it."""
    p = comm.size
    each = max(1, size // 8 // p)
    whole, own = (backend.zeros(n, np.float64) for n in (each * p, each))
    counts = [each] * p
    received = 8 * each * (p - 1)
    if name == "all_gather":
        return lambda: comm.all_gather(own, whole, counts), received
    if name == "reduce_scatter":
        return lambda: comm.reduce_scatter(whole, own, counts), received
    if name == "all_reduce":
        return lambda: comm.all_reduce(whole), 2 * received
    if name == "broadcast":
        return lambda: comm.broadcast(whole, 0), 8 * each * p
    out = backend.zeros(each * p, np.float64)
    return lambda: comm.all_to_all(whole, counts, out, counts), received


def _timed(comm: Comm, call: Callable[[], Any], received: int, calls: int) -> float:
    """Seconds a call, on the slowest rank: the best of three rounds."""
    call()
    best = float("inf")
    for _ in range(3):
        comm.barrier()
        start = perf_counter()
        for _ in range(calls):
            call()
        best = min(best, max(comm.share((perf_counter() - start) / calls, others="alike")))
    return best


# ------------------------------------------------------------------------------------------------ a machine's file
GEMMS = (
    (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 512),
    (2048, 128, 256), (256, 1024, 256), (2048, 256, 32), (64, 64, 1024), (1024, 1024, 32), (16, 1024, 1024),
    (1024, 16, 1024), (64, 64, 16), (1024, 32, 256), (256, 32, 1024), (8, 512, 512),
)  # fmt: skip
"""The shapes m, n, k of the products that are measured."""
ON_GPU = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 1024, 4096), (2048, 8192, 1024), (8192, 8192, 128))
UFUNCS = ("exp", "log", "tanh", "sqrt", "power", "divide")
RECEIVED = (256, 1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22)
"""Bytes that a rank receives in the operations that are measured."""
POINT_SECONDS = 0.05
"""Seconds in which a point is measured again and again."""
SLOW = 0.2
"""Seconds of an operation from which no longer ones are measured."""
BURST = 1 << 19
"""Bytes that a rank receives before a message is timed."""
SUMS = tuple(3 << k for k in range(13, 27, 2))
"""Bytes read and written by the sums that measure the bandwidth."""
CHAIN, EVENTS = 32, 4
"""Links of a chain of products of small tensors, and the operations on blocks that one makes: itself, two products of
its gradient, and their sum with another."""


def measure_machine(comm: Comm, name: str) -> planning.Machine:
    """Return this machine as its ranks see it, measured in less than a minute.  Collective.

    Products and kernels are measured on as many ranks at once as there are cores, the links by operations among 2, 4, …
    and all ranks of a node, and among one rank of each node.
    """
    with Grid({"ranks": comm.size}, comm) as grid:
        backend = grid.backend
        here, nodes = list(comm.nodes), sorted(set(comm.nodes))
        per_node = max(here.count(n) for n in nodes)
        shared = len({host for host, _ in comm.share(host_and_cores())}) < len(nodes) and not backend.cuda
        units = per_node if backend.cuda else max(1, min(comm.share(len(cores()))) // grid.threads)
        turn = here[: comm.rank].count(here[comm.rank])
        at_work = (comm.rank if shared else turn) < units
        source = (
            f"measured by parlinalg doctor --machine on {comm.size} ranks of {len(nodes)} nodes: {backend.device}, "
            f"{platform.machine()}, {grid.threads} BLAS threads a rank"
        )
        gemm = {
            dtype: _fitted(_agreed(comm, at_work, partial(_products, backend, dtype)), source)
            for dtype in ("float64", "float32", *(("float16", "bfloat16") if backend.cuda else ()))
        }
        found = _agreed(comm, at_work, lambda: _operations(backend))
        operations = Kernels(
            overhead=found["overhead"], bandwidth=found[f"sum {SUMS[-1]}"], source=source, call=found["call"],
            floor=found["floor"], asynchronous=backend.cuda,
            points=tuple((float(n), found[f"sum {n}"]) for n in SUMS),
            rates={key.removeprefix("rate "): rate for key, rate in found.items() if key.startswith("rate ")},
        )  # fmt: skip
        crowd = max(1.0, (comm.size if shared else per_node) / units)
        node = _link(comm, backend, [r for r in range(comm.size) if here[r] == here[comm.rank]], units, source, crowd)
        if node is None:
            node = Link(1e-6, operations.bandwidth / 2, units, f"half the memory's bandwidth: {source}", 0.0)
        network = None
        if len(nodes) > 1:
            across = [r for r in range(comm.size) if here[:r].count(here[r]) == turn]
            network = _link(comm, backend, across, 1, source, crowd)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (comm.size if shared else per_node)
        overlap = Overlap("polls", source, _window(comm, backend, network or node))
        about = f"{len(nodes)} nodes of {per_node} ranks with {units} cores, {backend.device}, as measured"
        place = "world" if shared else "node"
        return planning.Machine(
            name, about, per_node, units, memory, gemm, operations, node, overlap, network, place
        )  # fmt: skip


def _agreed(comm: Comm, at_work: bool, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return the means of what the ranks at work measure at once, on all ranks; the others sleep meanwhile."""
    comm.barrier()
    mine = measure() if at_work else {}
    if comm.size > 1:
        handle = comm.all_reduce(np.zeros(1), wait=False)
        while not handle.test():
            sleep(0.02)
    found = [f for f in comm.share(mine) if f]
    return {key: sum(f[key] for f in found) / len(found) for key in found[0] if all(key in f for f in found)}


def _seconds(call: Callable[[], Any], backend: Backend, limit: float = POINT_SECONDS) -> float:
    """Return the lower quartile of the seconds of a call, called for so many seconds, at least three times: others may
    be at work on the machine."""
    call()
    backend.synchronize()
    times: list[float] = []
    begin = perf_counter()
    while len(times) < 3 or perf_counter() - begin < limit:
        start = perf_counter()
        call()
        backend.synchronize()
        times.append(perf_counter() - start)
    return sorted(times)[len(times) // 4]


def _products(backend: Backend, dtype: str) -> dict[str, float]:
    """Return the operations a second of products, by their shapes."""
    rng, found = np.random.default_rng(0), {}
    for m, n, k in (*GEMMS, *(ON_GPU if backend.cuda else ())):
        a, b = (backend.from_host(rng.random(shape).astype(dtype_named(dtype))) for shape in ((m, k), (k, n)))
        out = backend.empty((m, n), a.dtype)
        seconds = _seconds(partial(backend.xp.matmul, a, b, out=out), backend)
        found[f"{m} {n} {k}"] = 2 * m * n * k / seconds
    return found


def _fitted(rates: dict[str, float], source: str) -> GemmRate:
    """Return the formula that is nearest to measured points in logarithms, and the points."""
    points = [(*map(float, shape.split()), rate) for shape, rate in rates.items()]
    steps = (0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
    fits = []
    for half in ((a, b, c) for a in steps for b in steps for c in steps):
        logs = [
            math.log(rate) - sum(math.log(x / (x + h)) for x, h in zip(dims, half, strict=True))
            for *dims, rate in points
        ]  # fmt: skip
        mean = sum(logs) / len(logs)
        fits.append((sum((x - mean) ** 2 for x in logs), math.exp(mean), half))
    _, rate, half = min(fits)
    return GemmRate(rate, source, half=half, points=tuple(points))  # type: ignore[arg-type]


def _operations(backend: Backend) -> dict[str, float]:
    """Return what operations cost: bandwidths by bytes, rates of kernels, seconds beside their work."""
    xp, found = backend.xp, {}
    for nbytes in SUMS:
        x, y = (backend.from_host(np.full(nbytes // 12, value, np.float32)) for value in (1, 2))
        found[f"sum {nbytes}"] = nbytes / _seconds(partial(xp.add, x, y), backend)
    x = backend.from_host(np.random.default_rng(0).random((512, 256)).astype(np.float32) + 0.5)
    for name in UFUNCS:
        call = getattr(xp, name)
        found[f"rate {name}"] = x.size / _seconds(partial(call, *[x] * call.nin), backend, 0.02)
    arrays = {
        name: backend.from_host(a.astype(np.float32) if a.dtype == np.float64 else a)
        for name, a in kernels.samples(512, 256).items()
    }  # fmt: skip
    with _timed_kernels(backend) as rates:
        for example in kernels.examples():
            for _ in range(4):
                example.call(*(arrays[name].copy() for name in example.inputs))
    found |= {f"rate {name}": rate for name, rate in rates.items()}
    small, few = backend.zeros(8, np.float32), backend.zeros((64, 2, 2), np.float32)
    found["floor"] = _seconds(lambda: xp.add(small, small), backend, 0.02) if backend.cuda else 0.0
    found["call"] = _seconds(lambda: xp.matmul(few, few), backend, 0.02) / len(few)
    with Grid({"own": 1}, SingleComm(), backend=backend.name) as grid:
        y, w = (Tensor(ones((8,), grid, Layout(None), dtype="float32"), requires_grad=True) for _ in range(2))

        def chain() -> None:
            z = y
            for _ in range(CHAIN):
                z = z * w
            z.sum().backward()

        found["overhead"] = _seconds(chain, backend, 0.3) / (CHAIN * EVENTS)
    return found


@contextmanager
def _timed_kernels(backend: Backend) -> Iterator[dict[str, float]]:
    """Time every call of a kernel; yield the most elements a second of each."""
    plain: Any = kernels.Kernel.__call__
    rates: dict[str, float] = {}

    def timed(self: Any, *args: Any, **named: Any) -> Any:
        backend.synchronize()
        start = perf_counter()
        made = plain(self, *args, **named)
        backend.synchronize()
        seconds = perf_counter() - start
        results = made if isinstance(made, tuple) else (made,)
        largest = max((b.size for b in (*args, *results) if hasattr(b, "nbytes")), default=0)
        if largest >= 1 << 14 and not self.name.startswith("attention."):  # theirs goes by products
            rates[self.name] = max(rates.get(self.name, 0.0), largest / seconds)
        return made

    kernels.Kernel.__call__ = timed  # type: ignore[method-assign]
    try:
        yield rates
    finally:
        kernels.Kernel.__call__ = plain  # type: ignore[method-assign]


def _link(
    comm: Comm, backend: Backend, members: Sequence[int], rails: int, source: str, crowd: float
) -> Link | None:  # fmt: skip
    """Return the link between these ranks, measured while the other groups measure theirs; None for one rank."""
    most = min(comm.share(len(members)))
    if most < 2:
        return None
    place = members.index(comm.rank)
    points: dict[str, list[tuple[int, float, float]]] = {op: [] for op in OPERATIONS}
    for size in sorted({*(2**k for k in range(1, most.bit_length())), most}):
        start = place // size * size
        group = comm.sub([members[i] for i in range(start, min(start + size, len(members)))], ("measured",))
        for op in OPERATIONS if size == 2 else OPERATIONS[:-1]:
            for nbytes in RECEIVED:
                call, received = _received(group, backend, op, nbytes, size)
                before = partial(_drain, group, backend) if nbytes > RECEIVED[0] and group.size == size else None
                seconds = _together(comm, call if group.size == size else lambda: None, before)
                points[op].append((size, float(received), seconds / (2 if op == "send" else 1)))
                if seconds > SLOW:
                    break
        processor = _processor(comm, backend, group, size) if size == most else 0.0
        group.free()
    latency = min(s for _, _, s in points["send"])
    _, longest, seconds = points["send"][-1]
    bandwidth = longest / max(seconds - latency, 1e-9)
    found = {op: _operation(rows, bandwidth) for op, rows in points.items()}
    return Link(latency, bandwidth, rails, source, processor / crowd, **found)


def _received(group: Comm, backend: Backend, op: str, nbytes: int, p: int) -> tuple[Callable[[], Any], int]:
    """Return a call in which a rank receives about so many bytes, and their number; two messages for "send"."""
    if op == "send":
        block = backend.zeros(nbytes, np.uint8)

        def there_and_back() -> None:
            for way in (group.send, group.receive) if group.rank == 0 else (group.receive, group.send):
                way(block, 1 - group.rank)

        return there_and_back, nbytes
    whole = nbytes if op == "broadcast" else nbytes * p // (p - 1) // (2 if op == "all_reduce" else 1)
    return _call(group, backend, op, max(8 * p, whole))


def _drain(group: Comm, backend: Backend) -> None:
    """Send more than what a link lets pass at once after a pause: virtual machines' and shapers' bursts."""
    n = BURST // max(1, group.size - 1)
    group.all_gather(backend.zeros(n, np.uint8), backend.zeros(n * group.size, np.uint8), [n] * group.size)


def _together(comm: Comm, call: Callable[[], Any], before: Callable[[], Any] | None = None) -> float:
    """Return the seconds of a call on the slowest rank, the median of rounds that all ranks begin together."""
    call()
    times: list[float] = []
    while True:
        if before is not None:
            before()
        comm.barrier()
        start = perf_counter()
        call()
        times.append(max(comm.share(perf_counter() - start)))
        if len(times) >= 3 and (len(times) >= 21 or sum(times) > POINT_SECONDS):
            return sorted(times)[len(times) // 2]


def rising(rows: Iterable[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    """Return points (ranks, bytes, seconds) in order, where fewer bytes took longer with the means of both.

    >>> rising([(2, 1.0, 3.0), (2, 2.0, 1.0), (2, 4.0, 5.0)])
    [(2, 1.0, 2.0), (2, 2.0, 2.0), (2, 4.0, 5.0)]
    """
    found: list[tuple[int, float, float]] = []
    rows = sorted(rows)
    for ranks in sorted({p for p, _, _ in rows}):
        runs: list[list[float]] = []
        sizes = [n for p, n, _ in rows if p == ranks]
        for seconds in (t for p, _, t in rows if p == ranks):
            runs.append([seconds])
            while len(runs) > 1 and sum(runs[-2]) / len(runs[-2]) > sum(runs[-1]) / len(runs[-1]):
                last = runs.pop()
                runs[-1] += last
        means = [sum(run) / len(run) for run in runs for _ in run]
        found += [(ranks, n, t) for n, t in zip(sizes, means, strict=True)]
    return found


def _operation(rows: Iterable[tuple[int, float, float]], bandwidth: float) -> Operation:
    """Return the formula of a collective whose steps fit the short messages best, and the measured points."""
    rows = rising(rows)
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

    Small products are computed, with a poll after each, while an operation is in flight and when it is done.
    """
    a = backend.zeros((64, 64), np.float32)
    n = 1 << 20
    own, whole = backend.zeros(n, np.uint8), backend.zeros(n * group.size, np.uint8)

    def computed(until: Callable[[], bool]) -> tuple[int, float]:
        count, start = 0, perf_counter()
        while not until():
            for _ in range(8):
                backend.xp.matmul(a, a)
            count += 1
        return count, perf_counter() - start

    comm.barrier()
    if group.size == size:
        handle = group.all_gather(own, whole, [n] * group.size, wait=False)
        during, took = computed(handle.test)
    else:
        during, took = 0, 0.0
    comm.barrier()
    end = perf_counter() + max(0.1, took)
    alone, base = computed(lambda: perf_counter() > end)
    lost = took - during * base / max(1, alone) if took else 0.0
    found = [x for x in comm.share(max(0.0, lost) / (n * (size - 1)) if took else -1.0) if x >= 0]
    return sorted(found)[len(found) // 2] if found else 0.0


def _window(comm: Comm, backend: Backend, link: Link) -> float:
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
