"""Machines: how fast one multiplies, passes over memory and communicates.  Pure.

A machine is a file `machines/NAME.toml`: the rates of products by shape and dtype, those of kernels by bytes and
elements, what an operation costs beside its work, the links within a node and between nodes, the cost of each
collective operation, and what overlaps.  `load_machine` reads a shipped one by name, or any by path;
`parlinalg doctor --machine FILE` measures this one.

Rates come from a formula and measured points.  A formula says how a rate falls where dims or messages are short; at a
measured point the point holds, and near it the formula is corrected by the point's ratio to it.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from parlinalg.errors import ConfigError
from parlinalg.files import read_bytes
from parlinalg.matmul.planner import Factors, MatmulPlan, Seconds
from parlinalg.planning.machine_schema import (
    boolean,
    key,
    lines_of,
    many,
    number,
    numbers,
    points,
    read,
    rising,
    room,
    table,
    whole,
    word,
    wrong,
)
from parlinalg.planning.trace import Attention, Factorization, Gemm, Kernel
from parlinalg.units import ITEMSIZE

if TYPE_CHECKING:
    from parlinalg.linalg.planner import LinalgPlan
    from parlinalg.planning.routines import RoutineTime

FOLDER = Path(__file__).parent / "machines"
GEMM_DTYPES = ("float64", "float32", "bfloat16", "float16")
HALVES = ("bfloat16", "float16")
HOST_COPY, DISK_READ, DISK_WRITE = "copies to and from host memory", "reads from a disk", "writes to a disk"
LIBRARY = "library"
"""The value of `fused_attention` for the attention that this library computes in a fused kernel."""
OFFLOADS = (HOST_COPY, DISK_READ, DISK_WRITE)
"""The kernels that move what is offloaded; their names are the causes of a step's time."""
OPERATIONS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "send")
STEPS: dict[str, Callable[[int], float]] = {
    "one": lambda p: 1.0,
    "log": lambda p: math.ceil(math.log2(max(2, p))),
    "ring": lambda p: p - 1.0,
    "there and back": lambda p: 2.0 * (p - 1),
}
"""By name, the messages that one rank of p sends after each other in a collective operation."""

MOST_FILE = 1 << 20
SPLIT = 256  # the least length of a part of k
_REACH = 2.0  # a point's ratio holds within about so many doublings of a dim or of the bytes


# ------------------------------------------------------------------------------------------------ measured points
class Correction:
    """Ratios of measured points to a formula, between the points weighted by distance, and 1 far from all of them.

    Distances are in doublings of the coordinates.  A point itself has its own ratio.

    >>> near = Correction([((8.0, 8.0), 0.5)])
    >>> near((8.0, 8.0)), near((1e9, 1e9)) > 0.99
    (0.5, True)
    """

    def __init__(self, found: Iterable[tuple[Sequence[float], float]]) -> None:
        self._known = [(tuple(math.log2(x) for x in at), math.log2(ratio)) for at, ratio in found]

    def __call__(self, at: Sequence[float]) -> float:
        """Return the ratio at a place of positive coordinates."""
        if not self._known:
            return 1.0
        place = [math.log2(x) for x in at]
        total, above = _REACH**-4, 0.0
        for known, ratio in self._known:
            distance = sum((a - b) ** 2 for a, b in zip(place, known, strict=True))
            if distance < 1e-18:
                return float(2.0**ratio)
            total += distance**-2
            above += ratio * distance**-2
        return float(2.0 ** (above / total))


def between(known: Sequence[tuple[float, float]], x: float) -> float:
    """Return the value at x of points (x, value) in order, from the nearest two by logarithm; that of the end beyond.

    >>> between([(1.0, 2.0), (4.0, 8.0)], 2.0), between([(1.0, 2.0), (4.0, 8.0)], 9.0)
    (4.0, 8.0)
    """
    if x <= known[0][0]:
        return known[0][1]
    if x >= known[-1][0]:
        return known[-1][1]
    at = next(i for i, (size, _) in enumerate(known) if size >= x)
    (x0, y0), (x1, y1) = known[at - 1], known[at]
    return float(y0 * (y1 / y0) ** (math.log(x / x0) / math.log(x1 / x0)))


# ------------------------------------------------------------------------------------------------ parts of a machine
def where_fused(where: str, value: Any) -> bool | str:
    """Check which attention is counted as a fused kernel: true (all), "library" or false (none)."""
    if not isinstance(value, bool) and value != LIBRARY:
        raise wrong(where, value, f'true (all of 16-bit floats), "{LIBRARY}" (what this library fuses) or false')
    found: bool | str = value
    return found


def rate_of_kernel(where: str, value: Any) -> float | tuple[tuple[float, float], ...]:
    """Check a rate of elements a second, or rows of elements and the rate at so many."""
    rate = number(1e3, 1e15, "elements a second", above=True)
    if isinstance(value, list) and value:
        rows: tuple[tuple[float, float], ...] = rising(number(1, 1e15, "elements"), rate)(where, value)
        return rows
    if isinstance(value, list):
        raise wrong(where, value, "a number, elements a second, or rows of elements and the rate at so many")
    found: float = rate(where, value)
    return found


RATE = number(1e6, 1e18, "floating-point operations a second of a rank", above=True, such="1.65e14 for 165 TFLOP/s")
BYTES = number(1e3, 1e15, "bytes a second", above=True, such="3.1e9 for 25 Gbit/s")
DISK_BYTES = number(1e4, 1e12, "bytes a second of a disk", such="2e9 for 2 GB/s")
LATENCY = number(0.0, 1.0, "seconds", such="5e-6 for 5 µs")
SECONDS = number(0.0, 10.0, "seconds")
POSITIVE = number(0.0, 10.0, "seconds", above=True)
SHARE = number(1e-6, 1.0, "a share of the bandwidth")
DIM = number(1, 1e9, "a dim of a matrix")
SIZE = number(1, 1e15, "bytes")
RANKS = whole(1, 1 << 24, "ranks")


@dataclass(frozen=True)
class GemmRate:
    """The rate of products of one dtype: `rate` m/(m + mh) n/(n + nh) k/(k + kh), mended by measured points.

    A device with `tiles` takes the one that wastes the least: of the tiles at the result's edges, and of the processors
    in the last round (NVIDIA, "Matrix multiplication background user's guide": tile and wave quantization).  A result
    of few tiles is cut along k too, as cuBLAS does (split-K).  Without points, products take as long as their operands
    and results pass through memory at least; products with vectors take just that.
    """

    rate: float = key(RATE, "the operations a second of large products")
    source: str = key(word(), "where the figures are from")
    half: tuple[float, float, float] = key(
        numbers(*[number(0, 1e6, "the dim at which the rate is a half")] * 3),
        "m, n and k at which the rate is a half", (0.0, 0.0, 0.0),
    )  # fmt: skip
    tiles: tuple[tuple[int, int, float], ...] = key(
        points(
            whole(1, 1 << 16, "rows of a tile"), whole(1, 1 << 16, "columns of a tile"),
            number(1e-6, 1.0, "a share of the rate"),
        ),
        "rows m, n, share of the rate: the tiles of a result that a processor of the device computes at a time", (),
    )  # fmt: skip
    units: int = key(whole(1, 1 << 16, "processors"), "the processors of the device, each with a tile at a time", 1)
    points: tuple[tuple[float, float, float, float], ...] = key(
        points(DIM, DIM, DIM, RATE), "rows m, n, k, operations a second, as measured", ()
    )

    def at(self, m: float, n: float, k: float, batch: float = 1) -> float:
        """Return the operations a second of products of m×k and k×n matrices, a batch of them in one call."""
        return self._formula(m, n, k, batch) * self._correction((m, n, k))

    def _formula(self, m: float, n: float, k: float, batch: float = 1) -> float:
        if not self.tiles:
            return self.rate * self._begun(m, n, k)
        found = []
        for rows, columns, share in self.tiles:
            tiles, filled = math.ceil(m / rows) * math.ceil(n / columns) * batch, m * n * batch / (rows * columns)
            parts = 1
            while parts == 1 or (tiles * parts <= self.units and parts * SPLIT <= k):
                rounds = math.ceil(tiles * parts / self.units)
                found.append(share * filled * parts / (rounds * self.units) * self._begun(m, n, k / parts))
                parts *= 2
        return self.rate * max(found)

    def _begun(self, m: float, n: float, k: float) -> float:
        """Return the share of the rate that dims of this length reach."""
        return math.prod(x / (x + h) for x, h in zip((m, n, k), self.half, strict=True))

    @cached_property
    def _correction(self) -> Correction:
        return Correction(((m, n, k), rate / self._formula(m, n, k)) for m, n, k, rate in self.points)


@dataclass(frozen=True)
class FusedAttention:
    """A kernel that computes attention of 16-bit floats in their own products, as FlashAttention does.

    The operations are those of the pairs of queries and keys that are seen: two products forward, and five backward.
    """

    forward: tuple[tuple[float, float], ...] = key(
        points(DIM, RATE), "rows features of a head, operations a second of the forward pass"
    )
    backward: tuple[tuple[float, float], ...] = key(points(DIM, RATE), "likewise of the backward pass")
    source: str = key(word(), "where the figures are from")


@dataclass(frozen=True)
class Kernels:
    """Operations on blocks that are no products."""

    overhead: float = key(LATENCY, "seconds of an operation beside its work: the interpreter, the launch")
    bandwidth: float = key(BYTES, "bytes read and written a second where blocks are large")
    source: str = key(word(), "where the figures are from")
    call: float = key(LATENCY, "seconds of one of the calls of a batched product beside its work", 0.0)
    floor: float = key(LATENCY, "the least seconds of a kernel or a product on a device", 0.0)
    asynchronous: bool = key(
        boolean, "true if the host launches operations ahead of the device, which hides the overhead", False
    )
    points: tuple[tuple[float, float], ...] = key(
        points(SIZE, BYTES), "rows bytes, bytes a second, as measured: caches are faster", ()
    )
    rates: Mapping[str, float | tuple[tuple[float, float], ...]] = key(
        table(rate_of_kernel),
        "by kernel, the elements a second that computing them allows, whatever the bandwidth; or rows elements, "
        "elements a second, as measured with what they read and write", MappingProxyType({}),
    )  # fmt: skip
    piece: float | None = key(
        LATENCY,
        "of copies that follow each other, as of the pieces of a block, the seconds of each but the first beside its "
        "bytes, at most the overhead; left out, each takes the overhead",
        None,
    )

    def beside_work(self, event: Gemm | Kernel, before: object) -> float:
        """Return the seconds of an operation beside its work, by what comes just before it in the trace."""
        if self.piece is None or not (isinstance(event, Kernel) and event.name == "copy"):
            return self.overhead
        follows = isinstance(before, Kernel) and before.name == "copy"
        return min(self.piece, self.overhead) if follows else self.overhead

    def seconds(self, kernel: Kernel) -> float:
        """Return the seconds of a kernel's work, its overhead aside."""
        rate = self.rates.get(kernel.name)
        if isinstance(rate, tuple):
            return max(self.floor, kernel.elements / between(rate, max(1, kernel.elements)))
        through = kernel.nbytes / self.bandwidth_at(kernel.nbytes) if kernel.nbytes > 0 else 0.0
        return max(self.floor, through, kernel.elements / rate if rate else 0.0)

    def bandwidth_at(self, nbytes: float) -> float:
        """Return the bytes a second of a kernel that reads and writes so many: from the nearest measured points by
        logarithm, `bandwidth` beyond the last."""
        known = self._sorted
        return self.bandwidth if not known or nbytes >= known[-1][0] else between(known, nbytes)

    @cached_property
    def _sorted(self) -> list[tuple[float, float]]:
        return sorted({size: (size, rate) for size, rate in self.points}.values())


@dataclass(frozen=True)
class Algorithm:
    """A way to carry out a collective operation: `latency` a step, and the bytes at a share of the bandwidth."""

    steps: str = key(word(*STEPS), "the messages one after the other among p ranks, as a word")
    latency: float = key(LATENCY, "seconds of a step")
    efficiency: float = key(
        number(1e-6, 2.0, "a share of the bandwidth"),
        "the share of the link's bandwidth that long messages reach, of what a rank receives without a switch "
        "that adds: above 1 where one does",
        1.0,
    )


@dataclass(frozen=True)
class Operation:
    """An operation between ranks: the fastest of its algorithms counts, mended by measured points."""

    algorithms: tuple[Algorithm, ...] = key(many(partial(read, Algorithm)), "the ways to carry it out")
    points: tuple[tuple[int, float, float], ...] = key(
        points(RANKS, SIZE, SECONDS), "rows ranks, bytes that a rank receives, seconds, as measured", ()
    )
    beside: float = key(
        number(0.1, 100, "a ratio"),
        "how many times as long it takes when others of the same ranks are in flight with it",
        1.0,
    )
    computing: float = key(
        number(1, 1000, "a ratio"),
        "how many times as long it takes while its ranks compute, each of its messages waiting for who passes it on",
        1.0,
    )
    delay: float = key(SECONDS, "the seconds that it takes longer while its ranks compute, whatever its bytes", 0.0)


def _usual(latency: float, op: str) -> Operation:
    """Return the algorithms of MPI and NCCL, at full bandwidth."""
    steps = {
        "all_gather": ("ring", "log"), "reduce_scatter": ("ring", "log"), "all_reduce": ("there and back", "log"),
        "broadcast": ("log",), "all_to_all": ("ring",), "send": ("one",),
    }  # fmt: skip
    return Operation(
        tuple(Algorithm(name, latency * (1 + (op == "all_reduce" and name == "log"))) for name in steps[op])
    )


@dataclass(frozen=True)
class Link:
    """A connection of the ranks of a node, or of the nodes.

    A rank alone has `bandwidth` bytes a second each way; `rails` ranks of a node can have it at the same time, and more
    share it.
    """

    latency: float = key(LATENCY, "seconds of a short message")
    bandwidth: float = key(BYTES, "bytes a second each way of one rank, or of one network interface")
    rails: int = key(RANKS, "ranks of a node that can have this bandwidth at once; the node's network interfaces")
    source: str = key(word(), "where the figures are from")
    processor: float = key(
        number(0, 1e-3, "seconds a byte"),
        "seconds of a core for each byte that a rank receives while it computes (TCP, copies)", 0.0,
    )  # fmt: skip
    all_gather: Operation | None = key(partial(read, Operation), "as measured", None)
    reduce_scatter: Operation | None = key(partial(read, Operation), "as measured", None)
    all_reduce: Operation | None = key(partial(read, Operation), "as measured", None)
    broadcast: Operation | None = key(partial(read, Operation), "as measured", None)
    all_to_all: Operation | None = key(partial(read, Operation), "as measured", None)
    send: Operation | None = key(partial(read, Operation), "as measured", None)

    def operation(self, op: str) -> Operation:
        """Return how an operation is carried out: as the file says, else as usual at this latency."""
        return getattr(self, op) or _usual(self.latency, op)

    def share(self, ranks: int) -> float:
        """Return the bytes a second of each of so many ranks of a node that communicate at once."""
        return self.bandwidth * min(1.0, self.rails / max(1, ranks))


@dataclass(frozen=True)
class Overlap:
    """Computing and communicating at the same time."""

    progress: str = key(
        word("asynchronous", "polls"),
        'when nonblocking communication advances: "asynchronous", always; "polls", only inside calls of the library',
    )
    source: str = key(word(), "where the figures are from")
    window: float = key(SIZE, "bytes that travel after a poll without another one (the sockets' buffers)", 1e15)
    slowdown: float = key(
        number(0, 10, "a ratio"),
        "the time that computing takes longer while communication is in flight, as a share",
        0.0,
    )
    waiting: float = key(
        number(0, 1, "a share of a core"),
        "where ranks outnumber cores, the share of a core that a rank takes which waits in a collective operation, of "
        "what it takes computing: 1 if it polls without a pause, 0 if it sleeps", 1.0,
    )  # fmt: skip
    receiving: float = key(
        number(0, 1, "a share of a core"), "likewise of a rank that waits for a message, or has ended its step", 1.0
    )
    turns: tuple[tuple[float, float], ...] = key(
        rising(POSITIVE, POSITIVE),
        "rows seconds in which ranks have computed, seconds that an operation between them then takes longer: those "
        "that share cores wait until each has had its turn, others for the system's pauses", (),
    )  # fmt: skip

    def turn(self, computed: float) -> float:
        """Return the seconds by which an operation takes longer after the ranks have computed for so many."""
        if not self.turns or computed <= 0:
            return 0.0
        first, extra = self.turns[0]
        return extra * computed / first if computed < first else between(self.turns, computed)


@dataclass(frozen=True)
class Transfer:
    """The cost of one operation between ranks: `latency` seconds, then `seconds` on a link of the level `level`.

    Of them the processor works `processor` seconds.  It advances in `steps` messages.
    """

    level: str
    latency: float
    seconds: float
    processor: float = 0.0
    steps: int = 1

    @property
    def total(self) -> float:
        """Its seconds when nothing else is in flight."""
        return self.latency + self.seconds


@dataclass(frozen=True)
class Host:
    """The host's memory beside a device: what a rank may offload to, and the way there."""

    bandwidth: float = key(BYTES, "bytes a second that a rank copies each way while all ranks of its node do")
    memory: int = key(room("the host memory"), "the host memory of a rank")
    source: str = key(word(), "where the figures are from")


@dataclass(frozen=True)
class Disk:
    """A disk of each node, on which a rank may let rest what it offloads."""

    read: float = key(DISK_BYTES, "bytes a second that a rank reads while all ranks of its node do")
    write: float = key(DISK_BYTES, "bytes a second that a rank writes while all ranks of its node do")
    size: int = key(room("the space on the disk"), "the space on the disk of a rank")
    source: str = key(word(), "where the figures are from")


@dataclass(frozen=True)
class Machine:
    """A machine: one rank's speed, and the links between ranks.

    Attributes
    ----------
    name, about : str
    ranks_per_node : int
        Ranks that a node usually has; those of the world are placed node by node.
    cores : int
        Ranks that compute at full speed at once; more take turns.
    cores_of : {"node", "world"}
        Whose ranks share them; those of all nodes on an emulated cluster.
    bound : bool
        True if each of those ranks keeps a core, the first one the first, and so on in turn; else the system places
        them.
    memory : int
        Bytes of a rank.
    gemm : dict of str to GemmRate
        By dtype.
    kernels : Kernels
    node, network : Link
        Within a node, and between nodes; None if it has one node.
    overlap : Overlap
    host : Host or None
        None where blocks are in host memory.
    disk : Disk or None
        None where nothing is to be offloaded to one.
    attention : dict of str to FusedAttention
        By dtype of the queries.
    fused_attention : bool or "library"
        True to count all attention of such queries as this kernel, as other systems have it; "library" to count so what
        this library gives to cuDNN where its package is installed: no dropout, no masks by tables or documents, no
        zigzag rings, no few queries.  Other attention writes blocks of scores to memory.  A file says so, or
        `with_fused_attention`.
    """

    name: str = key(word(), "the machine's name")
    about: str = key(word(), "what it is, in a line")
    ranks_per_node: int = key(RANKS, "the ranks of a node, one a GPU")
    cores: int = key(RANKS, "the ranks that compute at full speed at once: GPUs, or cores")
    memory: int = key(room("the memory"), "the memory of a rank")
    gemm: Mapping[str, GemmRate] = key(
        table(partial(read, GemmRate)), "a table [gemm.DTYPE] a dtype, the rates of products"
    )
    kernels: Kernels = key(partial(read, Kernels), "a table, what other operations cost")
    node: Link = key(partial(read, Link), "a table, what joins the ranks of a node")
    overlap: Overlap = key(partial(read, Overlap), "a table, what goes on at the same time")
    network: Link | None = key(partial(read, Link), "a table, what joins the nodes; left out for one node", None)
    cores_of: str = key(word("node", "world"), "whose ranks share the cores", "node")
    bound: bool = key(
        boolean, "true if each of these ranks keeps one core, in turn; else the system places them", False
    )
    host: Host | None = key(
        partial(read, Host), "a table, the memory beside a device; none: it is the memory",
        None,
    )  # fmt: skip
    disk: Disk | None = key(
        partial(read, Disk), "a table, the disk of a node; none: nothing is offloaded to it",
        None,
    )  # fmt: skip
    attention: Mapping[str, FusedAttention] = key(
        table(partial(read, FusedAttention)),
        "a table [attention.DTYPE] a dtype, the rates of a fused kernel of attention", MappingProxyType({}),
    )  # fmt: skip
    fused_attention: bool | str = key(
        where_fused, 'true to count all attention as that kernel, "library" what this library gives to it', False
    )

    def ranks_on_node(self, ranks: int) -> int:
        """Return how many of so many ranks are on one node: all without a network, else at most as many as it has."""
        return ranks if self.network is None else min(ranks, self.ranks_per_node)

    @property
    def gpus(self) -> bool:
        """True if ranks are GPUs, to which the host launches operations ahead."""
        return self.kernels.asynchronous

    def times_of(self, plans: Sequence[LinalgPlan]) -> list[RoutineTime]:
        """Return the times of planned factorizations, of as many of the first ones as take some seconds to trace.

        Raises
        ------
        ConfigError
            If the machine's file has no rate of products for the dtype.
        """
        from parlinalg.planning.routines import times_on

        return times_on(self, plans)

    def crowd(self, on_node: int, size: int) -> float:
        """Return how many times longer a rank computes because others share its core."""
        each = (on_node if self.cores_of == "node" else size) / self.cores
        return max(1.0, math.ceil(each) if self.bound else each)

    def pool(self, rank: int, on_node: int) -> int:
        """Return the number of the pool of cores that a rank is on: where ranks are bound, the core that it keeps,
        counted over the nodes; else its node, or 0 where all ranks share the cores."""
        node, turn = (0, rank) if self.cores_of == "world" else divmod(rank, on_node)
        return node * self.cores + turn % self.cores if self.bound else node

    @property
    def pool_cores(self) -> int:
        """The cores of a pool, on any of which its ranks may run."""
        return 1 if self.bound else self.cores

    # -------------------------------------------------------------------------------------------- attention
    def with_fused_attention(self, where: bool | str = True) -> Machine:
        """Return the machine with attention of 16-bit floats counted as one kernel of such products.

        Parameters
        ----------
        where : bool or "library"
            True for all such attention, "library" for that which this library computes so.

        Raises
        ------
        ConfigError
            If the machine's file has no rates of such a kernel, or `where` is something else.

        >>> load_machine("h100").with_fused_attention().fuses("bfloat16")
        True
        """
        where = where_fused("fused_attention", where)
        if where and not self.attention:
            raise ConfigError(
                f"the machine {self.name} has no rates of fused attention: add a table [attention.bfloat16] to its file"
            )
        return replace(self, fused_attention=where)

    def fuses(self, dtype: str, library: bool = True) -> bool:
        """Return True if attention of queries of a dtype is counted as one kernel; `library` says that this library
        would compute it so."""
        return self._fused(dtype, library) is not None

    def _fused(self, dtype: str, library: bool) -> FusedAttention | None:
        if not self.fused_attention or (self.fused_attention == LIBRARY and not library):
            return None
        other = {"float16": "bfloat16", "bfloat16": "float16"}.get(dtype, "")
        return self.attention.get(dtype) or self.attention.get(other)

    # -------------------------------------------------------------------------------------------- computing
    def gemm_seconds(self, gemm: Gemm) -> float:
        """Return the seconds of products, their overhead aside.

        Raises
        ------
        ConfigError
            If the machine's file has no rate for the dtype, nor for one that is computed alike.
        """
        if gemm not in self._of_gemms:  # a trace has the same ones many times
            self._of_gemms[gemm] = self._gemm_seconds(gemm)
        return self._of_gemms[gemm]

    @cached_property
    def _of_gemms(self) -> dict[Gemm, float]:
        return {}

    def _gemm_seconds(self, gemm: Gemm) -> float:
        if not gemm.flops:
            return 0.0
        rate, times = self._gemm_rate(gemm.dtype)
        vector = bool(rate.tiles) and min(gemm.m, gemm.n) == 1  # BLAS computes it along rows, not by tiles
        seconds = 0.0 if vector else times * gemm.flops / rate.at(gemm.m, gemm.n, gemm.k, gemm.batch)
        if not rate.points:  # measured ones have it in them
            words = gemm.batch * (gemm.m * gemm.k + gemm.k * gemm.n + gemm.m * gemm.n)
            nbytes = words * ITEMSIZE.get(gemm.dtype, 4)
            seconds = max(seconds, nbytes / self.kernels.bandwidth_at(nbytes))
        return max(self.kernels.floor, seconds) + self.kernels.call * gemm.calls

    def _gemm_rate(self, dtype: str) -> tuple[GemmRate, float]:
        """Return the rates for a dtype, and the real operations that an operation in it stands for."""
        real, times = {"complex64": ("float32", 4.0), "complex128": ("float64", 4.0)}.get(dtype, (dtype, 1.0))
        alike = {"float16": ("bfloat16", "float32"), "bfloat16": ("float16", "float32"), "float32": ("float64",)}
        for name in (real, *alike.get(real, ())):
            if name in self.gemm:
                return self.gemm[name], times
        right = f"add a table [gemm.{real}]" if real in GEMM_DTYPES else f"known are those of {', '.join(GEMM_DTYPES)}"
        raise ConfigError(
            f"the machine {self.name} has no rate of products in {dtype}, only in {', '.join(self.gemm)}: {right}"
        )

    def peak(self, dtype: str) -> float:
        """Return the operations a second of the largest products of a dtype."""
        return self._gemm_rate(dtype)[0].rate

    def best_rate(self, dtype: str) -> float:
        """Return operations a second that no product of a dtype exceeds.

        A rate is a formula, at most `rate`, times a correction, which is a weighted geometric mean of 1 and the ratios
        of measured points to the formula, or one of them: at most the largest of these.
        """
        found = self._gemm_rate(dtype)[0]
        ratios = [rate / found._formula(m, n, k) for m, n, k, rate in found.points]
        return found.rate * max(1.0, *ratios) if ratios else found.rate

    def kernel_seconds(self, kernel: Kernel) -> float:
        """Return the seconds of a kernel, its overhead aside."""
        if kernel.name == HOST_COPY and self.host is not None:
            return kernel.nbytes / self.host.bandwidth
        if self.disk is not None and kernel.name in (DISK_READ, DISK_WRITE):
            return kernel.nbytes / (self.disk.read if kernel.name == DISK_READ else self.disk.write)
        if isinstance(kernel, Attention) and (fused := self._fused(kernel.given, kernel.fused)):
            rates = sorted(fused.backward if kernel.name.endswith("backward") else fused.forward)
            through = kernel.nbytes / self.kernels.bandwidth_at(kernel.nbytes) if kernel.nbytes > 0 else 0.0
            return max(self.kernels.floor, through, kernel.flops / between(rates, kernel.width))
        if isinstance(kernel, Attention):
            kernel = replace(kernel, nbytes=kernel.nbytes + kernel.more)
        if isinstance(kernel, Factorization) and kernel.name not in self.kernels.rates:
            return self.kernels.seconds(kernel) + self._factorization_seconds(kernel)
        return self.kernels.seconds(kernel)

    def _factorization_seconds(self, kernel: Factorization) -> float:
        """Return the seconds of its operations, at the rate of a product with as many and with its inner dim."""
        side = max(1.0, math.sqrt(kernel.flops / (2 * kernel.width)))
        rate, times = self._gemm_rate(kernel.dtype)
        return times * kernel.flops / rate.at(side, side, kernel.width)

    def shared_by(self, on_node: int) -> Machine:
        """Return the machine as each of so many ranks of a node sees what is beside them: host memory and disk."""
        times = self.ranks_per_node / max(self.ranks_per_node, on_node)
        if times == 1:
            return self
        host, disk = self.host, self.disk
        if host is not None:
            host = replace(host, bandwidth=host.bandwidth * times, memory=int(host.memory * times))
        if disk is not None:
            disk = replace(disk, read=disk.read * times, write=disk.write * times, size=int(disk.size * times))
        return replace(self, host=host, disk=disk)

    # -------------------------------------------------------------------------------------------- communicating
    def beside(self, op: str, level: str) -> float:
        """Return how many times as long an operation takes that is not waited for at once."""
        found = self._measured(op, level)
        return 1.0 if found is None else found.beside

    def computing(self, op: str, level: str) -> float:
        """Return how many times as long an operation takes while its ranks compute."""
        found = self._measured(op, level)
        return 1.0 if found is None else found.computing

    def delay(self, op: str, level: str) -> float:
        """Return the seconds that an operation takes longer while its ranks compute, whatever its bytes."""
        found = self._measured(op, level)
        return 0.0 if found is None else found.delay

    def _measured(self, op: str, level: str) -> Operation | None:
        link = self.node if level == "node" or self.network is None else self.network
        return getattr(link, op, None) if op in OPERATIONS else None

    def transfer(self, op: str, nbytes: float, ranks: int, local: int, on_node: int, size: int) -> Transfer:
        """Return the cost of an operation between ranks.

        All nodes are taken to do the same at the same time: as many groups as have room on a node share its links.

        Parameters
        ----------
        op : str
            As in the ledger; `receive` is the other end of `send`.
        nbytes : float
            Bytes that a rank receives; of a send, that it sends.
        ranks : int
            The size of the group; 2 of a message.
        local : int
            Ranks of the group on one node.
        on_node : int
            Ranks of the world on one node.
        size : int
            Ranks of the world.
        """
        name = {"receive": "send", "barrier": "all_reduce", "share": "all_gather", "reduce": "broadcast"}.get(op, op)
        if name not in OPERATIONS:
            raise ConfigError(f"an operation {op!r} in a trace: known are {', '.join(OPERATIONS)}")
        if ranks < 2:
            return Transfer("node", 0.0, 0.0)
        if local < ranks and self.network is None:
            raise ConfigError(
                f"{name} among {ranks} ranks, {local} on a node: the machine {self.name} has no [network] between nodes"
            )
        crowd = self.crowd(on_node, size)
        inside = self.node.operation(name).algorithms
        nodes = -(-ranks // local)
        level = "node" if nodes == 1 or self.network is None else "network"
        link = self.node if level == "node" or self.network is None else self.network
        operation = link.operation(name)
        found: list[Transfer] = []
        for algorithm in operation.algorithms:
            steps = STEPS[algorithm.steps]
            within = next((w for w in inside if w.steps == algorithm.steps), inside[0])
            if level == "node":
                latency, rate = algorithm.latency * steps(ranks), self.node.share(on_node) * algorithm.efficiency
                seconds = nbytes / rate
            else:
                latency = algorithm.latency * steps(nodes) + within.latency * max(0.0, steps(ranks) - steps(nodes))
                seconds = self._across(name, nbytes, ranks, local, on_node, algorithm.efficiency, within.efficiency)
            processor = crowd * link.processor * nbytes
            found.append(Transfer(level, latency, max(seconds, processor), processor, max(1, round(steps(ranks)))))
        best = min(found, key=lambda t: t.total)
        if not operation.points or (level == "network" and local > 1):
            return best
        ratio = self._correction(level, name, size)((ranks, max(1.0, nbytes)))
        return Transfer(level, best.latency * ratio, best.seconds * ratio, best.processor, best.steps)

    def _across(
        self, op: str, nbytes: float, ranks: int, local: int, on_node: int, outside: float, inside: float
    ) -> float:  # fmt: skip
        """Return the seconds in which the bytes that a rank receives pass the links between and within nodes.

        Rings pass through all ranks of a node, and leave it by as many rails as the group's share; what an all-to-all
        or a message sends to other nodes leaves by the rank's own share.
        """
        assert self.network is not None
        own, within = self.network.share(on_node) * outside, self.node.share(on_node) * inside
        if op == "all_to_all":
            away = nbytes * (ranks - local) / (ranks - 1)
            return max(away / own, (nbytes - away) / within)
        if op == "send":
            return nbytes / own
        return nbytes / (own if local == 1 else min(own * local, within))

    @cached_property
    def _corrections(self) -> dict[tuple[str, str, int], Correction]:
        return {}

    def _correction(self, level: str, op: str, size: int) -> Correction:
        """Return the ratios of an operation's measured points to the formula, in a world of so many ranks."""
        known = level, op, size
        if known not in self._corrections:
            link = self.node if level == "node" else self.network
            assert link is not None
            measured = link.operation(op)
            bare_link = replace(link, **{op: replace(measured, points=())})  # type: ignore[arg-type]
            bare = replace(self, **{level: bare_link})  # type: ignore[arg-type]
            found = []
            for ranks, nbytes, seconds in measured.points:
                local = ranks if level == "node" else 1
                crowd = (ranks if level == "node" else 1, size)
                formula = bare.transfer(op, nbytes, ranks, local, *crowd).total
                if formula > 0 and seconds > 0:
                    found.append(((ranks, nbytes), seconds / formula))
            self._corrections[known] = Correction(found)
        return self._corrections[known]


# ------------------------------------------------------------------------------------------------ single products
def product_seconds(plan: MatmulPlan, machine: Machine | str) -> Seconds:
    """Return a function from a grid (pm, pn, pk) to the seconds of a product on it, for `MatmulPlan.explain`.

    They are those of its largest block product and of its communication, one after the other.  Ranks stand in row-major
    order over m, n and k: those along k are next to each other.
    """
    found, itemsize = load_machine(machine), ITEMSIZE.get(plan.dtype, 1)

    def seconds(factors: Factors) -> tuple[float, float]:
        pm, pn, pk = factors
        m, n, k = (-(-extent // p) for extent, p in zip((plan.m, plan.n, plan.k), factors, strict=True))
        size = pm * pn * pk
        node = found.ranks_on_node(size)
        product = found.crowd(node, size) * found.gemm_seconds(Gemm(1, m, n, k, plan.dtype))
        moves = 0.0
        for op, elements, ranks, stride in (
            ("all_gather", m * k, pn, pk), ("all_gather", k * n, pm, pn * pk), ("reduce_scatter", m * n, pk, 1),
        ):  # fmt: skip
            if ranks > 1:
                local = max(1, min(ranks, node // stride))
                nbytes = elements * itemsize * (ranks - 1) / ranks
                moves += found.transfer(op, nbytes, ranks, local, node, size).total
        return product, moves

    return seconds


# ------------------------------------------------------------------------------------------------ files
def machines() -> list[str]:
    """Return the names of the machines that are shipped.

    >>> "a100" in machines()
    True
    """
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load_machine(name: str | PathLike[str] | Machine) -> Machine:
    """Return a machine by the name of a shipped one, or by the path of its file.

    Raises
    ------
    ConfigError
        If there is no such machine or file, or the file has missing, unknown or absurd figures.

    >>> load_machine("a100").ranks_per_node
    8
    """
    if isinstance(name, Machine):
        return name
    if not isinstance(name, str | PathLike):
        raise ConfigError(f"machine={name!r} is no name of a machine, no path of its file and no Machine")
    text = fspath(name)
    path = Path(text)
    if path.suffix != ".toml" and path.name == text:
        if text not in machines():
            near = difflib.get_close_matches(text.lower(), machines(), 1)
            file = f"{text}.toml"
            near = [file] if text and Path(file).is_file() else near
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ConfigError(
                f"there is no machine {text!r}{hint}: shipped are {', '.join(machines())}; a path of a file ends with "
                ".toml, and `parlinalg doctor --machine FILE.toml` writes this machine's"
            )
        path = FOLDER / f"{text}.toml"
    try:
        found = read_bytes(path, MOST_FILE)
    except OSError as error:
        raise ConfigError(f"cannot read the machine file {path}: {error.strerror}") from None
    return parse_machine(found, str(path))


def parse_machine(text: str | bytes, name: str = "machine.toml") -> Machine:
    """Return the machine that a text in TOML describes; `name` stands before the keys in messages."""
    try:
        found = tomllib.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{name} is no TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name} has lists within lists too deeply: a machine's file has rows in lists") from None
    made = read(Machine, f"{name}:", found)
    if not made.gemm:
        raise ConfigError(f"{name}: gemm is empty: add a table [gemm.float32] with the rate of products")
    for dtype in made.gemm:
        if dtype not in GEMM_DTYPES:
            raise ConfigError(f"{name}: gemm.{dtype}: rates are those of the dtypes {', '.join(GEMM_DTYPES)}")
    for dtype, fused in made.attention.items():
        if dtype not in HALVES:
            raise ConfigError(f"{name}: attention.{dtype}: a fused kernel takes the dtypes {', '.join(HALVES)}")
        if not (fused.forward and fused.backward):
            raise ConfigError(
                f"{name}: attention.{dtype}: forward and backward need a row at least, such as [128, 5e14]"
            )
    return made.with_fused_attention(made.fused_attention)


def machine_text(machine: Machine, head: str = "") -> str:
    """Return the text in TOML that describes a machine; `parse_machine` reads it."""
    lines = [*(f"# {line}".rstrip() for line in head.splitlines()), *([""] if head else [])]
    lines += lines_of(machine, "")
    return "\n".join(lines).strip() + "\n"
