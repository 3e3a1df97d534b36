"""This machine, measured: a machine's file, its disk, and the constants of the model of factorizations."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time

import numpy as np

from parlinalg.backend import Backend
from parlinalg.backend.blas import cores_of, gemm_rate, host_and_cores
from parlinalg.comm import Comm, open_comm
from parlinalg.comm.together import together
from parlinalg.errors import OffloadError, counted
from parlinalg.grid import Grid
from parlinalg.linalg.tile_sizes import Constants
from parlinalg.offload.disk import DiskFile, aligned, free_bytes, process_number
from parlinalg.planning import kernel_rates
from parlinalg.planning.kernel_rates import (
    fitted_products,
    fused_attention_rates,
    fused_table,
    operation_costs,
    overhead,
    piece_seconds,
    product_rates,
    rate_rows,
    seconds_of,
)
from parlinalg.planning.link_times import (
    collectives,
    hidden_window,
    measured_link,
    poll_slowdown,
    turn_costs,
    waiting_shares,
)
from parlinalg.planning.machine import LIBRARY, Disk, FusedAttention, GemmRate, Kernels, Link, Machine, Overlap

ROUNDS = 3
"""Rounds of measurements of all products and kernels, whose medians count: a shared host can be half as fast for
seconds on end."""
DISK_FILE, DISK_TILE = 1 << 28, 1 << 23
"""Bytes of the file that a rank writes and reads, and of each access, as large as those of offloaded states."""


def measure_constants(dtype: str) -> tuple[Constants, float]:
    """Return the constants of the model of factorizations on this machine, and the operations a second of a product.

    Collective over all ranks; the slowest one counts.  On one rank words and calls keep their usual constants.
    """
    comm = open_comm()
    with Grid({"ranks": comm.size}, comm) as grid:
        rate = min(comm.share(gemm_rate(grid.backend, dtype), others="alike"))
        found = Constants.tuned()
        if comm.size > 1:
            rows = {name: row for name, *row in collectives(comm, grid.backend)}
            latency, bandwidth = rows["all_gather"][0], min(rows["all_gather"][1], rows["broadcast"][1])
            word = np.dtype(dtype).itemsize / bandwidth
            found = found._replace(word=word * rate, call=latency / math.log2(comm.size) * rate)
    return found, rate


def measure_machine(comm: Comm, name: str, device: str = "auto") -> Machine:
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
            f"measured by parlinalg doctor --machine on {counted(comm.size, 'rank')} of {counted(len(nodes), 'node')}: "
            f"{backend.device}, {platform.machine()}, {counted(grid.threads, 'BLAS thread')} a rank"
        )
        crowd = max(1.0, (comm.size if shared else per_node) / units)
        gemm, attention, operations = _computation(comm, backend, at_work, crowd > 1, source)
        within = [r for r in range(comm.size) if here[r] == here[comm.rank]]
        node = measured_link(comm, backend, within, units, source, crowd)
        if node is None:
            node = Link(1e-6, operations.bandwidth / 2, units, f"half the memory's bandwidth: {source}", 0.0)
        network = None
        if len(nodes) > 1:
            across = [r for r in range(comm.size) if here[:r].count(here[r]) == turn]
            network = measured_link(comm, backend, across, 1, source, crowd)
        memory = backend.memory_total()
        if not backend.cuda:
            memory //= comm.size if shared else per_node
        waiting, receiving = waiting_shares(comm, backend, at_work) if crowd > 1 else (1.0, 1.0)
        overlap = Overlap(
            "polls", source, hidden_window(comm, backend, network or node), waiting=waiting, receiving=receiving,
            turns=turn_costs(comm, backend), slowdown=poll_slowdown(comm, backend) if network is not None else 0.0,
        )  # fmt: skip
        about = (
            f"{counted(len(nodes), 'node')} of {counted(per_node, 'rank')} with {counted(units, 'core')}, "
            f"{backend.device}, as measured"
        )
        place = "world" if shared else "node"
        return Machine(
            name, about, per_node, units, memory, gemm, operations, node, overlap, network, place, bound,
            attention=attention, fused_attention=LIBRARY if attention else False,
        )  # fmt: skip


def _computation(
    comm: Comm, backend: Backend, at_work: bool, crowded: bool, source: str
) -> tuple[dict[str, GemmRate], dict[str, FusedAttention], Kernels]:  # fmt: skip
    """Return the rates of products by dtype, of fused attention, and of kernels, as the ranks at work measure them."""
    floor, processors = 0.0, 0
    if backend.cuda:
        xp, number = backend.xp, backend.xp.cuda.get_device_id()
        small = backend.zeros(8, np.float32)
        shortest = partial(seconds_of, lambda: xp.add(small, small), backend, 0.02)
        floor = _agreed(comm, at_work, lambda: {"seconds": shortest()})["seconds"]
        processors = int(xp.cuda.runtime.getDeviceProperties(number)["multiProcessorCount"])
    dtypes = ("float64", "float32", *(("float16", "bfloat16") if backend.cuda else ()))
    rounds: list[list[dict[str, float]]] = []
    for _ in range(ROUNDS):
        rates = [_agreed(comm, at_work, partial(product_rates, backend, dtype)) for dtype in dtypes]
        products = fitted_products(rates[dtypes.index("float32")], source, processors, floor)
        fused = _agreed(comm, at_work, partial(fused_attention_rates, backend))
        rounds.append([*rates, fused, _agreed(comm, at_work, partial(operation_costs, backend, products))])
    *rates, fused, found = ({key: median(each[key] for each in kind) for key in kind[0]} for kind in zip(*rounds))
    gemm = {d: fitted_products(each, source, processors, floor) for d, each in zip(dtypes, rates, strict=True)}
    attention = fused_table(fused, source)
    if crowded:  # the ranks push each other's data out of the caches too
        every = _agreed(comm, True, lambda: {"overhead": overhead(backend, gemm["float32"], thread_time)})
        found["overhead"] = max(found["overhead"], every["overhead"])
    operations = Kernels(
        overhead=found["overhead"], bandwidth=found[f"sum {kernel_rates.SUMS[-1]}"], source=source, call=found["call"],
        floor=floor, asynchronous=backend.cuda,
        points=tuple((float(n), found[f"sum {n}"]) for n in kernel_rates.SUMS),
        rates=rate_rows(found),
    )  # fmt: skip
    if not backend.cuda:  # on a GPU each copy is a launch
        pieces = _agreed(comm, at_work, lambda: {"seconds": piece_seconds(backend)})["seconds"]
        passed = 2 * 4 * math.prod(kernel_rates.PIECE)
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


def measure_disk(comm: Comm, folder: Path) -> Disk:
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
    on = counted(comm.size, "rank")
    source = f"measured by parlinalg doctor --machine --disk on {on} at once, {direct} the page cache"
    return Disk(read, write, size, source)


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
