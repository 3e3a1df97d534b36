"""Measurements of this machine in seconds: collectives, products and kernels, and a machine's file of them all."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median, median_low
from time import perf_counter, sleep, thread_time
from typing import Any

import numpy as np

from parlinalg.array.create import dtype_named, ones
from parlinalg.autograd import Tensor
from parlinalg.backend import Backend, cudnn, kernels
from parlinalg.backend.blas import cores_of, gemm_rate, host_and_cores
from parlinalg.backend.shapes import ShapesBackend
from parlinalg.comm import Comm, SingleComm, open_comm
from parlinalg.comm.together import together
from parlinalg.errors import OffloadError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.linalg import blocks
from parlinalg.linalg.blocks import Machine
from parlinalg.nn import GELU, LayerNorm, Linear, Sequential
from parlinalg.offload.disk import DiskFile, aligned, free_bytes, process_number
from parlinalg.planning import machine as planning
from parlinalg.planning.imagine import TraceRecorder, imagine
from parlinalg.planning.machine import (
    OPERATIONS,
    STEPS,
    Algorithm,
    FusedAttention,
    GemmRate,
    Kernels,
    Link,
    Operation,
    Overlap,
)
from parlinalg.planning.trace import Gemm, Kernel, Trace
from parlinalg.schemes import discover

LATENCY_BYTES, BANDWIDTH_BYTES = 8, 4 * 2**20


def collectives(comm: Comm, backend: Backend) -> list[tuple[str, float, float]]:
    """Return each operation's name, its seconds for 8 bytes a rank, and the bytes a rank receives a second.

    Collective; the slowest rank's time counts.
    """
    rows = []
    for name in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"):
        short = _timed(comm, _call(comm, backend, name, LATENCY_BYTES)[0], calls=50)
        call, received = _call(comm, backend, name, BANDWIDTH_BYTES)
        rows.append((name, short, received / _timed(comm, call, calls=4)))
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


def _timed(comm: Comm, call: Callable[[], Any], calls: int) -> float:
    """Return the seconds of a call on the slowest rank, in the best of three rounds."""
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
    (1024, 16, 1024), (64, 64, 16), (1024, 32, 256), (256, 32, 1024), (8, 512, 512), (2048, 512, 2048),
    (512, 2048, 2048), (2048, 512, 512), (2048, 512, 1024), (1024, 512, 2048), (512, 256, 2048), (1024, 256, 256),
    (128, 256, 1024), (64, 256, 64), (64, 64, 256),
)  # fmt: skip
"""The shapes m, n, k of the products that are measured."""
ON_GPU = (
    (4096, 4096, 4096), (8192, 8192, 8192), (8192, 1024, 4096), (2048, 8192, 1024), (8192, 8192, 128),
    (8192, 2048, 2048), (8192, 8192, 2048),
)  # fmt: skip
"""More shapes on a GPU."""
TILES = (
    (256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (256, 64, 0.85), (64, 256, 0.85), (128, 64, 0.75),
    (64, 128, 0.75), (64, 64, 0.6),
)  # fmt: skip
"""The tiles by which a GPU's library multiplies, and the shares of the rate that they reach, as in machines' files."""
ATTENTION, HEADS = (4, 2048, 2048), (64, 128)
"""The sequences, tokens and features by which a GPU's fused attention is measured, and the features of a head."""
LAUNCHES = 3.0
"""Products on a GPU that take fewer times as long as the shortest kernel say nothing of its rate."""
UFUNCS = ("exp", "log", "tanh", "sqrt", "power", "divide")
RECEIVED = (256, 1 << 12, 1 << 15, *(1 << k for k in range(17, 23)))
"""About the bytes that a rank receives in the operations that are measured."""
POINT_SECONDS = 0.05
"""Seconds in which a point is measured again and again."""
SLOW = 0.2
"""Seconds of an operation from which no longer ones are measured."""
LEAST_ELEMENTS = 1 << 14
"""Elements of a kernel's call from which on it is counted."""
ROUND_SECONDS, LEAST_CALLS, MOST_CALLS = 0.03, 3, 50
"""Seconds of a round of operations between ranks, and the numbers of operations of one."""
DISK_FILE, DISK_TILE = 1 << 28, 1 << 23
"""Bytes of the file that a rank writes and reads, and of each access, as large as those of offloaded states."""
PASSES, MORE_PASSES, LONG_PASSES = 3, 4, 2
"""The number of times that ranks' turns and waits are measured, that operations between ranks are, and that those are
which are longer than one that takes a round: they repeat well."""
ALIKE = 1.25
"""Bytes that differ by less than this ratio count as equal: groups of several sizes do not cut a block alike."""
BESIDE, BESIDE_BYTES = ("all_gather", "reduce_scatter", "all_reduce"), 1 << 20
"""The operations that are also measured in flight together, and the bytes that a rank receives in one."""
POLL_SECONDS = 0.004
"""Seconds for which ranks compute between two polls of them."""
TURN_SECONDS, TURNS, TURN_BYTES = (0.0005, 0.001, 0.002, 0.004), 8, 1 << 16
"""Seconds of products before an operation, how often they follow each other, and the bytes that a rank receives in one,
by which the wait of ranks for each other is measured."""
AHEAD_SECONDS = 0.002
"""Seconds of the product that keeps a GPU busy while the host launches what is timed."""
FAR, MOST_FAR = 1 << 26, 64
"""Bytes of operands and results that a measurement goes through in turn, so that they come from memory as in a step,
and the most sets of them."""
ROWS = ((512, 256), (2048, 512))
"""The sizes at which kernels are measured: blocks that fit into a core's cache, and larger ones."""
ROWS_ON_GPU = ((2048, 512), (8192, 2048))
"""Likewise on a GPU, where a block of a million elements is over as soon as it is begun."""
SHORT = (64, 256)
"""The size at which attention is measured too: its many operations on tiles take their time however short they are."""
SUMS = tuple(3 << k for k in range(13, 27, 2))
"""Bytes read and written by the sums that measure the bandwidth."""
CHAIN, SIDE, PASSED, PIECE = 8, 64, 1 << 20, (64, 128)
"""The layers by which the overhead of an operation is measured, the sides of their matrices, the bytes that pass
through the cache between two operations, and the sides of the pieces by which the overhead of copies is measured."""


def measure_machine(comm: Comm, name: str, device: str = "auto") -> planning.Machine:
    """Return this machine as its ranks see it, measured in about three minutes where links are slow.  Collective.

    Products and kernels are measured on as many ranks at once as there are cores, the links by operations among 2, 4, …
    and all ranks of a node, and among one rank of each node.  `device` names the backend.
    """
    with Grid({"ranks": comm.size}, comm, device) as grid:
        backend = grid.backend
        here, nodes = list(comm.nodes), sorted(set(comm.nodes))
        per_node = max(here.count(n) for n in nodes)
        turn = here[: comm.rank].count(here[comm.rank])
        sets = comm.share(host_and_cores())
        shared, units, at_work, bound = _placed(sets, here, comm.rank, grid.threads)
        if backend.cuda:  # one a GPU
            shared, units, at_work, bound = False, per_node, True, False
        source = (
            f"measured by parlinalg doctor --machine on {comm.size} ranks of {len(nodes)} nodes: {backend.device}, "
            f"{platform.machine()}, {grid.threads} BLAS threads a rank"
        )
        crowd = max(1.0, (comm.size if shared else per_node) / units)
        gemm, attention, operations = _computation(comm, backend, at_work, crowd > 1, source)
        node = _link(comm, backend, [r for r in range(comm.size) if here[r] == here[comm.rank]], units, source, crowd)
        if node is None:
            node = Link(1e-6, operations.bandwidth / 2, units, f"half the memory's bandwidth: {source}", 0.0)
        network = None
        if len(nodes) > 1:
            across = [r for r in range(comm.size) if here[:r].count(here[r]) == turn]
            network = _link(comm, backend, across, 1, source, crowd)
        memory = backend.memory_total()
        if not backend.cuda:
            memory //= comm.size if shared else per_node
        waiting, receiving = _waits(comm, backend, at_work) if crowd > 1 else (1.0, 1.0)
        overlap = Overlap(
            "polls", source, _window(comm, backend, network or node), waiting=waiting, receiving=receiving,
            turns=_turns(comm, backend), slowdown=_slowdown(comm, backend) if network is not None else 0.0,
        )  # fmt: skip
        about = f"{len(nodes)} nodes of {per_node} ranks with {units} cores, {backend.device}, as measured"
        place = "world" if shared else "node"
        return planning.Machine(
            name, about, per_node, units, memory, gemm, operations, node, overlap, network, place, bound,
            attention=attention, fused_attention=planning.LIBRARY if attention else False,
        )  # fmt: skip


def _computation(
    comm: Comm, backend: Backend, at_work: bool, crowded: bool, source: str
) -> tuple[dict[str, GemmRate], dict[str, FusedAttention], Kernels]:  # fmt: skip
    """Return the rates of products by dtype, of fused attention, and of kernels, as the ranks at work measure them."""
    floor, processors = 0.0, 0
    if backend.cuda:
        xp, number = backend.xp, backend.xp.cuda.get_device_id()
        small = backend.zeros(8, np.float32)
        shortest = partial(_seconds, lambda: xp.add(small, small), backend, 0.02)
        floor = _agreed(comm, at_work, lambda: {"seconds": shortest()})["seconds"]
        processors = int(xp.cuda.runtime.getDeviceProperties(number)["multiProcessorCount"])
    gemm = {
        dtype: _fitted(_agreed(comm, at_work, partial(_products, backend, dtype)), source, processors, floor)
        for dtype in ("float64", "float32", *(("float16", "bfloat16") if backend.cuda else ()))
    }
    attention = _fused_rates(_agreed(comm, at_work, partial(_fused_attention, backend)), source)
    found = _agreed(comm, at_work, partial(_operations, backend, gemm["float32"]))
    if crowded:  # the ranks push each other's data out of the caches too
        every = _agreed(comm, True, lambda: {"overhead": _overhead(backend, gemm["float32"], thread_time)})
        found["overhead"] = max(found["overhead"], every["overhead"])
    operations = Kernels(
        overhead=found["overhead"], bandwidth=found[f"sum {SUMS[-1]}"], source=source, call=found["call"],
        floor=floor, asynchronous=backend.cuda,
        points=tuple((float(n), found[f"sum {n}"]) for n in SUMS),
        rates=_rates(found),
    )  # fmt: skip
    if not backend.cuda:  # on a GPU each copy is a launch
        pieces = _agreed(comm, at_work, lambda: {"seconds": _pieces(backend)})["seconds"]
        passed = 2 * 4 * math.prod(PIECE)
        operations = replace(operations, piece=max(0.0, pieces - passed / operations.bandwidth_at(passed)))
    return gemm, attention, operations


def _placed(
    sets: Sequence[Sequence[str]], nodes: Sequence[int], rank: int, threads: int
) -> tuple[bool, int, bool, bool]:
    """Return where ranks run, by the hosts and cores of all (`host_and_cores`) and their nodes.

    Returns
    -------
    shared : bool
        True if nodes share a host's cores, as emulated ones do.
    units : int
        Ranks of so many threads that compute at full speed at once, of a node or of all that share its host.
    at_work : bool
        True if this rank is one of them: the first on its cores.
    bound : bool
        True if there are more ranks, and each keeps the cores of one, in turn.

    >>> _placed([["a", "1"], ["a", "2"], ["a", "1"]], [0, 1, 2], 2, 1)
    (True, 2, False, True)
    """
    hosts = sorted({host for host, _ in sets})
    shared = len(hosts) < len(set(nodes))
    units = max(1, min(cores_of(sets, host) for host in hosts) // threads)
    alike = [r for r in range(rank) if [*sets[r]] == [*sets[rank]] and (shared or nodes[r] == nodes[rank])]
    own = int(sets[rank][1], 16).bit_count()
    bound = units > 1
    for host in hosts:
        here = [cores for name, cores in sets if name == host]
        apart = len(here) > units == len({*here[:units]})
        bound = bound and apart and all(cores == here[r % units] for r, cores in enumerate(here))
    return shared, units, len(alike) < max(1, own // threads), bound


def measure_disk(comm: Comm, folder: Path) -> planning.Disk:
    """Return the disk of a folder as each rank sees it while all write, and then read, files past the page cache.

    Collective; the slowest rank's time counts.

    Raises
    ------
    OffloadError
        On all ranks, if a file cannot be made, written or read on any.
    """
    buffer = aligned(DISK_TILE)
    buffer[:] = 7

    def timed(call: Callable[[np.ndarray, int], None]) -> float:
        def every() -> None:
            for at in range(0, DISK_FILE, DISK_TILE):
                call(buffer, at)
            file.flush()

        comm.barrier()
        start = perf_counter()
        together(comm, every, f"measuring {folder}", (OffloadError,))
        return DISK_FILE / max(comm.share(perf_counter() - start))

    path = folder / f"bandwidth.{process_number([comm])}"
    file = together(comm, lambda: DiskFile(path, DISK_FILE), f"making {path}", (OffloadError,))
    try:
        timed(file.write)  # the first time the file system also notes where things lie
        write, read = timed(file.write), timed(file.read)
        direct = "past" if file.direct else "through"
    finally:
        file.close(remove=True)
    beside = comm.nodes.count(comm.nodes[comm.rank])
    size = min(comm.share(free_bytes(folder) // beside))
    source = f"measured by parlinalg doctor --machine --disk on {comm.size} ranks at once, {direct} the page cache"
    return planning.Disk(read, write, size, source)


def _agreed(comm: Comm, at_work: bool, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Return the means of what the ranks at work measure at once, on all ranks; the others sleep meanwhile.

    They start no operation before: between nodes a thread of each would look a thousand times a second how far it is.
    """
    comm.barrier()
    mine = measure() if at_work else {}
    crowded, comm.crowded = comm.crowded, True  # then a barrier is waited for asleep
    comm.barrier()
    comm.crowded = crowded
    found = [f for f in comm.share(mine) if f]
    return {key: sum(f[key] for f in found) / len(found) for key in found[0] if all(key in f for f in found)}


class DeviceClock:
    """Tells the seconds that the device of a backend takes for a call.

    On a GPU they are those between two events of the stream, behind a long product: when that is over, the host has
    launched all of the call, so that the device waits for no launch.
    """

    def __init__(self, backend: Any) -> None:
        self.backend: Backend = backend
        if backend.cuda:
            self.events = [backend.xp.cuda.Event() for _ in range(2)]
            self.ahead = _long_factor(backend)

    def __call__(self, call: Callable[[], Any]) -> float:
        if not self.backend.cuda:
            start = perf_counter()
            call()
            return perf_counter() - start
        xp, (begin, end) = self.backend.xp, self.events
        xp.matmul(self.ahead, self.ahead)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(xp.cuda.get_elapsed_time(begin, end)) / 1e3


@cache
def _long_factor(backend: Any) -> Any:
    """Return a matrix whose square takes a GPU AHEAD_SECONDS at least."""
    seconds, side = 0.0, 256
    while seconds < AHEAD_SECONDS and side < 1 << 14:
        side *= 2
        block = backend.zeros((side, side), np.float32)
        for _ in range(2):  # the first sets cuBLAS up
            backend.synchronize()
            start = perf_counter()
            backend.xp.matmul(block, block)
            backend.synchronize()
            seconds = perf_counter() - start
    return block


def _seconds(call: Callable[[], Any], backend: Backend, limit: float = POINT_SECONDS) -> float:
    """Return the median of the seconds of a call, called for so many seconds, at least three times."""
    clock = DeviceClock(backend)
    clock(call)
    times: list[float] = []
    begin = perf_counter()
    while len(times) < 3 or perf_counter() - begin < limit:
        times.append(clock(call))
    return median(times)


def _in_turn(function: Callable[..., Any], backend: Backend, arrays: Sequence[Any], nbytes: int) -> Callable[[], None]:
    """Return what calls a function with one set of operands after the other, of so many bytes with the results.

    Each result is kept until its set's next turn, so that a call finds its operands and writes its result where a step
    would: not in the cache, where the last call has left them.
    """
    sets = [[backend.from_host(x.copy()) for x in arrays] for _ in range(min(MOST_FAR, max(1, FAR // nbytes)))]
    kept: list[Any] = [None] * len(sets)
    turns = cycle(range(len(sets)))

    def one() -> None:
        at = next(turns)
        kept[at] = None
        kept[at] = function(*sets[at])

    for _ in sets:
        one()
    return one


def _products(backend: Backend, dtype: str) -> dict[str, float]:
    """Return the operations a second of products, by their shapes: as they are, and with the first or the second
    operand turned, as in a backward pass, a third of each."""
    rng, found = np.random.default_rng(0), {}
    xp, kind = backend.xp, dtype_named(dtype)
    for m, n, k in (*GEMMS[:: 2 if dtype == "float64" else 1], *(ON_GPU if backend.cuda else ())):
        a, b = (rng.random(shape).astype(kind) for shape in ((m, k), (k, n)))
        seconds = 0.0
        for function, arrays in (
            (xp.matmul, (a, b)),
            (lambda a, b: xp.matmul(a.T, b), (np.ascontiguousarray(a.T), b)),
            (lambda a, b: xp.matmul(a, b.T), (a, np.ascontiguousarray(b.T))),
        ):
            call = _in_turn(function, backend, arrays, kind.itemsize * (m * k + k * n + m * n))
            seconds += _seconds(call, backend, POINT_SECONDS / 3) / 3
        found[f"{m} {n} {k}"] = 2 * m * n * k / seconds
    return found


def _fitted(rates: dict[str, float], source: str, processors: int = 0, floor: float = 0.0) -> GemmRate:
    """Return the formula that is nearest to measured points in logarithms, and the points.

    Where a GPU has so many processors, by tiles; products that take little longer than the shortest kernel (`floor`)
    tell no rate then.
    """
    points = [(*map(float, shape.split()), rate) for shape, rate in rates.items()]
    steps = (0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
    halves: Iterable[tuple[float, float, float]] = ((a, b, c) for a in steps for b in steps for c in steps)
    tiles: tuple[tuple[int, int, float], ...] = ()
    if processors:
        tiles, halves = TILES, ((0.0, 0.0, c) for c in (*steps, 256.0, 512.0))
        long = [p for p in points if 2 * math.prod(p[:3]) > LAUNCHES * floor * p[3]]
        points = long or points
    fits = []
    for half in halves:
        one = GemmRate(1.0, source, half=half, tiles=tiles, units=max(1, processors))
        logs = [math.log(rate / one.at(*dims)) for *dims, rate in points]
        mean = sum(logs) / len(logs)
        fits.append((sum((x - mean) ** 2 for x in logs), math.exp(mean), half))
    _, rate, half = min(fits)
    return GemmRate(rate, source, half=half, tiles=tiles, units=max(1, processors), points=tuple(points))  # type: ignore[arg-type]


def _fused_attention(backend: Backend) -> dict[str, float]:
    """Return the operations a second of the fused kernels of causal attention in bfloat16, by pass and the features of
    a head: 0 where the device has no such kernel."""
    found = {f"{step} {e}": 0.0 for step in ("forward", "backward") for e in HEADS}
    batch, n, width = ATTENTION
    for e in HEADS if backend.cuda else ():
        shape = batch, n, width // e, e
        k = backend.from_host(np.random.default_rng(0).random(shape).astype(dtype_named("bfloat16")))
        q, given = k[..., None, :], ((0, -n), e**-0.5)
        if (made := cudnn.attention(q, k, k, *given)) is None:
            continue
        into = tuple(backend.xp.empty(x.shape, x.dtype) for x in (q, k, k))
        if not cudnn.attention_grad(q, q, k, k, *made, into, *given):
            continue
        work = batch * width * n * (n + 1) // 2
        forward = partial(cudnn.attention, q, k, k, *given)
        backward = partial(cudnn.attention_grad, q, q, k, k, *made, into, *given)
        found[f"forward {e}"] = 4 * work / _seconds(forward, backend)
        found[f"backward {e}"] = 10 * work / _seconds(backward, backend)
    return found


def _fused_rates(found: dict[str, float], source: str) -> dict[str, FusedAttention]:
    """Return the table of fused attention in a machine's file, from what `_fused_attention` found."""
    rows = {
        step: tuple((float(e), found[f"{step} {e}"]) for e in HEADS if found[f"{step} {e}"])
        for step in ("forward", "backward")
    }
    return {"bfloat16": FusedAttention(**rows, source=source)} if all(rows.values()) else {}


def _operations(backend: Backend, gemm: GemmRate) -> dict[str, float]:
    """Return the costs of operations: bandwidths by bytes, rates of kernels, and the overhead in seconds."""
    xp, found = backend.xp, {}
    few = backend.zeros((64, 2, 2), np.float32)
    found["call"] = _seconds(lambda: xp.matmul(few, few), backend, 0.02) / len(few)
    overheads = [_overhead(backend, gemm)]  # at three times: for seconds on end a shared host can be half as fast
    for nbytes in SUMS:
        terms = [np.full(nbytes // 12, value, np.float32) for value in (1, 2)]
        found[f"sum {nbytes}"] = nbytes / _seconds(_in_turn(xp.add, backend, terms, nbytes), backend)
    sizes = ROWS_ON_GPU if backend.cuda else ROWS
    for rows, width in sizes:
        x = np.random.default_rng(0).random((rows, width)).astype(np.float32) + np.float32(0.5)
        for name in UFUNCS:
            function = getattr(xp, name)
            call = _in_turn(function, backend, [x] * function.nin, x.nbytes * (function.nin + 1))
            found[f"rate {name} {x.size}"] = x.size / _seconds(call, backend, 0.02)
    overheads.append(_overhead(backend, gemm))
    for rows, width, only in (*((*size, "") for size in sizes), (*SHORT, "attention")):
        found |= {
            f"rate {name} {size}": size / seconds
            for (name, size), seconds in _timed_kernels(backend, rows, width, gemm, found["call"], only).items()
        }
    found["overhead"] = median((*overheads, _overhead(backend, gemm)))
    return found


def _overhead(backend: Backend, gemm: GemmRate, clock: Callable[[], float] = perf_counter) -> float:
    """Return the seconds of an operation beside its work: the interpreter, the tape, layouts and plans.

    Layers of a few thousand elements run forward and backward, and on imagined blocks tell what operations they make.
    Between them other bytes pass through a processor's cache, as those of large products do in a step: what the
    interpreter needs comes from farther away then.  Where a GPU computes meanwhile, these are the seconds of the host.
    """
    passes = _Passes(backend, clock)
    with imagine(1, target="gpu" if backend.cuda else "cpu") as world:
        call = _layers(Grid({"own": 1}, world.comm))
        with world.trace() as trace:
            call()
    gemms = [e for e in trace.events if isinstance(e, Gemm)]
    count = len(gemms) + sum(isinstance(e, Kernel) for e in trace.events)
    work = 0.0 if backend.cuda else sum(e.flops / gemm.at(e.m, e.n, e.k, e.batch) for e in gemms)
    with Grid({"own": 1}, SingleComm(), backend=backend.name) as grid:
        call = _layers(grid)
        if not backend.cuda:
            grid.polled.append(passes)
        times: list[float] = []
        begin = perf_counter()
        while len(times) < 4 or perf_counter() - begin < 0.3:
            start, passes.seconds = clock(), 0.0
            call()
            times.append(clock() - start - passes.seconds)
            backend.synchronize()
    return max(1e-7, median(times[1:]) - work) / count


def _layers(grid: Grid) -> Callable[[], None]:
    """Return a function that runs layers of a few thousand elements forward and backward."""
    scheme = discover()["serial"].SCHEME
    parts = [(LayerNorm(SIDE, scheme, grid), Linear(SIDE, SIDE, scheme, grid), GELU()) for _ in range(CHAIN)]
    own = [Sequential(*part) for part in parts]
    Sequential(*own).initialize(0)
    x = Tensor(ones((1, SIDE, SIDE), grid, Layout(None, None, None), dtype="float32"), requires_grad=True)

    def forward_and_backward() -> None:
        y = x
        for layer in own:
            y = y + layer(y)
        y.sum().backward()

    return forward_and_backward


def _pieces(backend: Backend) -> float:
    """Return the seconds of a copy of a piece of a block, of copies that follow each other, as before an operation
    between ranks."""
    rows, width = PIECE
    size = rows * width

    def pack(block: Any) -> Any:
        packed = backend.empty((CHAIN * size,), block.dtype)
        for i in range(CHAIN):
            packed[i * size : (i + 1) * size].reshape(rows, width)[...] = block[:, i * width : (i + 1) * width]
        return packed

    block = np.zeros((rows, CHAIN * width), np.float32)
    return _seconds(_in_turn(pack, backend, [block], 2 * block.nbytes), backend) / CHAIN


class _Passes:
    """Passes through memory between operations, and the seconds that they take."""

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.blocks = cycle([backend.zeros(PASSED // 4, np.float32) for _ in range(max(1, FAR // PASSED))])
        self.seconds = 0.0
        self.also: Callable[[], bool] = lambda: False

    def poll(self) -> None:
        self.also()
        start = self.clock()
        block = next(self.blocks)
        block += 1
        self.seconds += self.clock() - start


def _rates(found: dict[str, float]) -> dict[str, float | tuple[tuple[float, float], ...]]:
    """Return the measured rates of kernels by their names: rows of elements and elements a second."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for key, rate in found.items():
        if key.startswith("rate "):
            _, name, size = key.split()
            rows.setdefault(name, []).append((float(size), rate))
    return {name: tuple(sorted(points)) for name, points in rows.items()}


CALLS_OF_KERNELS = 9


def _timed_kernels(
    backend: Backend, rows: int, width: int, gemm: GemmRate, call: float, only: str = ""
) -> dict[tuple[str, int], float]:  # fmt: skip
    """Return the seconds of a call of each kernel with its elements, medians over the calls of the examples, or of
    those whose names begin with `only`.

    Attention's are those beside its products.
    """
    plain: Any = kernels.Kernel.__call__
    clock = DeviceClock(backend)
    times: dict[tuple[str, int], list[float]] = {}
    depth = 0

    def timed(self: Any, *args: Any, **named: Any) -> Any:
        nonlocal depth
        if depth:  # a part of another kernel
            return plain(self, *args, **named)
        made: Any = None

        def one() -> None:
            nonlocal made
            made = plain(self, *args, **named)

        depth += 1
        try:
            seconds = clock(one)
        finally:
            depth -= 1
        results = made if isinstance(made, tuple) else (made,)
        size = max((b.size for b in (*args, *results) if hasattr(b, "nbytes")), default=0)
        times.setdefault((self.name, size), []).append(seconds)
        return made

    samples = {
        name: a.astype(np.float32) if a.dtype == np.float64 else a for name, a in kernels.samples(rows, width).items()
    }
    found: dict[tuple[str, int], float] = {}
    for example in kernels.examples():
        if not example.name.startswith(only):
            continue
        given = [samples[name] for name in example.inputs]
        run = _in_turn(example.call, backend, given, 2 * sum(x.nbytes for x in given))
        times.clear()
        kernels.Kernel.__call__ = timed  # type: ignore[method-assign]
        try:
            for _ in range(CALLS_OF_KERNELS):
                run()
        finally:
            kernels.Kernel.__call__ = plain  # type: ignore[method-assign]
        beside = _attention(example, samples, gemm, call)
        for (name, size), taken in times.items():
            elements, products = beside.get(name, (size, 0.0))
            if size >= LEAST_ELEMENTS:
                found[name, elements] = max(0.1 * median(taken), median(taken) - products)
    largest: dict[str, int] = {}
    for name, size in found:
        largest[name] = max(size, largest.get(name, 0))
    return {(name, size): found[name, size] for name, size in largest.items()}


def _attention(
    example: kernels.Example, samples: dict[str, np.ndarray], gemm: GemmRate, call: float
) -> dict[str, tuple[int, float]]:  # fmt: skip
    """Return the scores of the kernels of attention in an example, and the seconds of their products."""
    device, found = ShapesBackend("cpu"), dict[str, tuple[int, float]]()
    trace = Trace(0, 1)
    device.recorder = TraceRecorder(trace)
    if not example.name.startswith("attention"):
        return {}
    example.call(*(device.from_host(samples[name]) for name in example.inputs))
    products = 0.0
    for event in trace.events:
        if isinstance(event, Gemm):
            products += event.flops / gemm.at(event.m, event.n, event.k, event.batch) + call * event.calls
        elif isinstance(event, Kernel):
            if event.name.startswith("attention.") and products:
                found[event.name] = event.elements, products
            products = 0.0
    return found


def _link(
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
    ratios: dict[str, list[tuple[float, float]]] = {op: [] for op in BESIDE}
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
                    sets = max(1, min(8, FAR // 4 // nbytes))
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
        beside, computing = (min(10.0, max(1.0, median(each))) for each in zip(*passes, strict=True))
        found[op] = replace(found[op], beside=beside, computing=computing)
    return Link(latency, bandwidth, rails, source, processor / crowd, **found)


def _beside(
    comm: Comm, backend: Backend, group: Comm, op: str, size: int, across: bool
) -> tuple[float, float]:  # fmt: skip
    """Return how many times as long operations take that are in flight together, each waited for in its turn, as those
    that are made one after the other, and how many times as long as that while their ranks compute.

    The second is 1 within a node, where operations advance at polls only.
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
        return apart / max(turned, 1e-9), 1.0
    products = max(1, int(POLL_SECONDS / _together(comm, lambda: backend.xp.matmul(a, a))))
    computing = _together(comm, partial(together, products))
    return apart / max(turned, 1e-9), computing / max(apart, 1e-9)


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

    >>> bounded([(2, 256.0, 9.0), (2, 4096.0, 1.0), (4, 240.0, 2.0), (4, 4080.0, 4.0)])
    [(2, 256.0, 1.0), (2, 4096.0, 1.0), (4, 240.0, 2.0), (4, 4080.0, 4.0)]
    """
    rows = sorted(rows)
    return [(p, n, min(t for q, k, t in rows if q >= p and ALIKE * k >= n)) for p, n, _ in rows]


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


BESIDE_SUMS, HIDDEN = (1 << 12, 1 << 18), 2.0
"""The elements of sums that are in flight while products are computed, and for how many times as long as they take."""


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


def _turns(comm: Comm, backend: Backend) -> tuple[tuple[float, float], ...]:
    """Return rows of seconds in which ranks compute, and of those by which an operation between them then takes longer
    than one that follows another.

    Ranks that share a core wait until the others have had their turn, and take it from those that compute; with a core
    each they wait out the system's pauses.
    """
    if comm.size < 2:
        return ()
    a = backend.zeros((64, 64), np.float32)
    one = median([_seconds(partial(backend.xp.matmul, a, a), backend, 0.01) for _ in range(3)])
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


WAIT_SECONDS = 0.15
"""Seconds for which some ranks compute while the others wait."""


def _slowdown(comm: Comm, backend: Backend) -> float:
    """Return the share by which computing takes longer while an operation between nodes is in flight, whatever its
    bytes: polls, and the thread of each rank that lets it progress.

    All ranks compute while each awaits a message that is sent only when all are done: small layers, whose time is the
    interpreter's, and as long products, as in a step of small blocks.
    """
    a = backend.zeros((256, 256), np.float32)
    token = backend.zeros(1, np.float64)
    passes = _Passes(backend, perf_counter)
    with Grid({"own": 1}, SingleComm(), backend=backend.name) as grid:
        grid.polled.append(passes)
        layers = _layers(grid)
        product = median(comm.share(_seconds(lambda: backend.xp.matmul(a, a), backend)))
        chain = median(comm.share(_seconds(layers, backend)))
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


def _waits(comm: Comm, backend: Backend, at_work: bool) -> tuple[float, float]:
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
