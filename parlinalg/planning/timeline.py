"""Timelines: when the ranks of traces compute, communicate and wait on a machine, and what bounds their step.  Pure.

`timeline` runs traces on a machine, each of one rank that stands for others.  An operation between ranks begins when
all of them have started it; it takes its latency, then its bytes take their time on a link, of which each of the
operations that are on it at the same time has an equal share.  Of one communicator a device's operations follow each
other; those of a machine that makes progress at polls only, as MPI's, are under way together.  Between `Start` and
`Wait` the rank computes on.  At a poll an operation advances by one message, at most `window` bytes.

Where ranks outnumber cores each shares one with as many others, by chance: equally with those that compute, and with
those that wait as far as they poll.  Transport takes its seconds of a core for each byte from the rank that computes
meanwhile, at most half of its share; an operation that needs more is slower by as much.

`parlinalg.planning.pipeline_timeline` times the instructions of a pipeline schedule in this way.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from os import PathLike
from typing import Any, NamedTuple

from parlinalg.errors import ConfigError
from parlinalg.pipeline import drawing
from parlinalg.pipeline.simulate import Simulation
from parlinalg.planning.machine import OFFLOADS, Machine, Transfer, load_machine
from parlinalg.planning.trace import Attention, Gemm, Kernel, Memory, Span, Start, Test, Trace, Wait

COMPUTED = ("products", "other kernels")
"""The causes of time in which a rank computes."""
TRANSPORT_SHARE = 0.5
"""The most of a computing rank's processor that transport takes.

No machine has a figure for it: what lets operations progress and the products are both ready to run all the time, and
the system gives each of two such threads a half of the core.
"""
_SOON = 1e-15
_CALL = Kernel("call", 0, 0, "")
"""The work of the host to begin an operation between ranks: the overhead of a kernel, and no more."""


class Interval(NamedTuple):
    """A stretch of time in the run of a rank.

    Attributes
    ----------
    rank : int
    kind : {"gemm", "kernel", "communication", "exposed", "idle", "span"}
        A product; another operation; an operation between ranks, from its beginning to its end; the part of it in which
        the rank waited; the time in which the rank waited for others to begin it; a named stretch of the program.
    name : str
    axes : tuple of str
        Of communication.
    start, stop : float
        Seconds.
    nbytes : int
        Bytes received, or of a kernel.
    """

    rank: int
    kind: str
    name: str
    axes: tuple[str, ...]
    start: float
    stop: float
    nbytes: int = 0

    @property
    def cause(self) -> str:
        """The cause of the time, in words."""
        if self.kind == "gemm":
            return "products"
        if self.kind == "kernel":
            return self.name if self.name in OFFLOADS else "other kernels"
        return f"{self.name.replace('_', '-')}{'s' if self.name[-1] != 's' else ''}{_over(self.axes)}"


def _over(axes: Sequence[str]) -> str:
    return "" if not axes else f" over axis {axes[0]}" if len(axes) == 1 else f" over axes {', '.join(axes)}"


@dataclass(frozen=True)
class Timeline:
    """The predicted run of a stretch of a program, usually a training step.

    Attributes
    ----------
    machine : Machine
    seconds : float
        From 0 to the end of the last rank.
    intervals : tuple of Interval
        By rank, in the order of their beginnings.
    causes : dict of int to dict of str to float
        By rank, the seconds that went into each cause: computing, exposed communication, idle time.  They add up to
        `seconds`.
    flops : int
        Operations of all products, over the ranks that the traces stand for.
    dtype : str
        That of the most operations.
    ranks : int
        The size of the world.
    memory : dict of int to tuple
        By rank, when a category's bytes change: seconds, category, bytes from then on.
    simulation : Simulation, optional
        Of the pipeline.
    """

    machine: Machine
    seconds: float
    intervals: tuple[Interval, ...]
    causes: Mapping[int, Mapping[str, float]]
    flops: int
    dtype: str
    ranks: int
    memory: Mapping[int, tuple[tuple[float, str, int], ...]] = field(default_factory=dict)
    simulation: Simulation | None = None

    # -------------------------------------------------------------------------------------------- figures
    @property
    def slowest(self) -> int:
        """The rank that works and communicates the longest."""
        return max(self.causes, key=lambda rank: self.seconds - self.causes[rank].get("idle", 0.0))

    def spent(self, *kinds: str, rank: int | None = None) -> float:
        """Return the seconds of a rank (by default the slowest) in intervals of these kinds."""
        rank = self.slowest if rank is None else rank
        return sum(i.stop - i.start for i in self.intervals if i.rank == rank and i.kind in kinds)

    @property
    def compute(self) -> float:
        """Seconds in which the slowest rank computes."""
        causes = self.causes[self.slowest]
        return sum(causes.get(name, 0.0) for name in COMPUTED)

    @property
    def idle(self) -> float:
        """Seconds in which the slowest rank waits for other ranks; of a pipeline, its bubble."""
        return self.causes[self.slowest].get("idle", 0.0)

    @property
    def exposed(self) -> float:
        """Seconds in which the slowest rank does nothing but wait for communication that is under way."""
        others = (*COMPUTED, "idle", "launching", *OFFLOADS)
        return sum(s for cause, s in self.causes[self.slowest].items() if cause not in others)

    @property
    def bubble(self) -> float:
        """The idle share of a pipeline's ranks; without a pipeline, of the slowest rank's time."""
        if self.simulation is not None:
            return self.simulation.bubble
        return self.idle / self.seconds if self.seconds else 0.0

    def throughput(self, units: float) -> float:
        """Return the samples or tokens a second, by the number that a step takes."""
        return units / self.seconds if self.seconds else math.inf

    def utilisation(self, flops: float | None = None, peak: float | None = None) -> float:
        """Return the share of the ranks' peak rate that the model's operations make up.

        Parameters
        ----------
        flops : float, optional
            The operations of a step that the model needs, over all ranks (`model.flops`); by default all that the
            traces have, recomputation included.
        peak : float, optional
            Operations a second of one rank; by default what the machine's large products reach.
        """
        peak = self.machine.peak(self.dtype) if peak is None else peak
        total = self.flops if flops is None else flops
        return total / (self.seconds * self.ranks * peak) if self.seconds else 0.0

    def shares(self) -> list[tuple[str, float]]:
        """Return the causes of the slowest rank's time and their shares of it, the largest first."""
        found = self.causes[self.slowest]
        return sorted(((c, s / self.seconds) for c, s in found.items() if s > 0), key=lambda x: (-x[1], x[0]))

    def bound(self) -> str:
        """Return the bound of the step, as a line of text.

        Such as "all-gathers over axis c: 41% of the step; products 38%, other kernels 15%, idle 6%".
        """
        found = [(cause, f"{100 * share:.0f}%") for cause, share in self.shares()]
        if not found:
            return "nothing takes time"
        first = f"{found[0][0]}: {found[0][1]} of the step"
        rest = ", ".join(f"{cause} {share}" for cause, share in found[1:6])
        return f"{first}; {rest}" if rest else first

    # -------------------------------------------------------------------------------------------- files
    def chrome(self) -> str:
        """Return the timeline as JSON for chrome://tracing or ui.perfetto.dev; ranks are processes."""
        if self.simulation is not None:
            return drawing.chrome(self.simulation)
        events: list[dict[str, Any]] = []
        for rank in self.causes:
            events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        for number, i in enumerate(self.intervals):
            common = {"name": i.name, "cat": i.kind, "pid": i.rank, "tid": _track(i)}
            args = {"axes": " ".join(i.axes), "bytes": i.nbytes}
            start, length = round(1e6 * i.start, 3), round(1e6 * (i.stop - i.start), 3)
            if i.kind in ("communication", "span"):  # several at once
                events.append({**common, "ph": "b", "id": number, "ts": start, "args": args})
                events.append({**common, "ph": "e", "id": number, "ts": round(start + length, 3)})
            else:
                events.append({**common, "ph": "X", "ts": start, "dur": length, "args": args})
        for rank, rows in self.memory.items():
            for at, category, held in rows:
                about = {"ph": "C", "name": f"memory: {category}", "pid": rank, "ts": round(1e6 * at, 3)}
                events.append({**about, "args": {"bytes": held}})
        return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")) + "\n"

    def svg(self) -> str:
        """Return the timeline as SVG: each rank's computing, and its communication by axes."""
        if self.simulation is not None:
            return drawing.svg(self.simulation)
        rows: dict[tuple[int, str], list[Interval]] = defaultdict(list)
        for i in self.intervals:
            if i.kind != "span":
                rows[i.rank, _track(i)].append(i)
        until = self.seconds or 1.0
        scale = (drawing.WIDTH - drawing.LEFT - drawing.RIGHT) / until
        parts, y = [], drawing.TOP
        for (rank, track), found in sorted(rows.items(), key=lambda r: (r[0][0], r[0][1] != "compute", r[0][1])):
            y += drawing.GAP if track == "compute" else 0.0
            name = f"rank {rank}" if track == "compute" else track.partition(" ")[2] or track
            parts.append(drawing.written(drawing.LEFT - 8, y + 13, name, 10, "end"))
            parts.append(drawing.rectangle(drawing.LEFT, y, until * scale, drawing.LOW, drawing.PALE, "none"))
            for start, stop, kind in _merged(found, 0.5 / scale):
                x, width = drawing.LEFT + start * scale, max(0.2, (stop - start) * scale)
                parts.append(drawing.rectangle(x, y, width, drawing.LOW, COLOURS[kind], "none"))
            y += drawing.LOW
        parts += drawing.time_axis(y, until, scale)
        parts += drawing.legend_keys(list(COLOURS.items()), y + 30)
        return drawing.page(f"{self.seconds:.4g} s on {self.machine.name}: {self.bound()}", parts, y + 50)

    def write(self, path: str) -> None:
        """Write the timeline: as SVG if the name ends with .svg, else as a trace for Chrome.

        Raises
        ------
        ConfigError
            If the file cannot be written.
        """
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(self.svg() if str(path).endswith(".svg") else self.chrome())
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None


COLOURS = {
    "gemm": "#5fa8dc", "kernel": "#a9d6f5", "communication": "#d9c8ee", "exposed": "#e4a3b8", "idle": "#c9ccd3",
}  # fmt: skip


def _track(i: Interval) -> str:
    if i.kind == "communication":
        return " ".join(("communication", *i.axes))
    return "span" if i.kind == "span" else "compute"


def _merged(found: Iterable[Interval], least: float) -> list[tuple[float, float, str]]:
    """Return the boxes of a lane: neighbours of one kind that are closer than a pixel are one."""
    boxes: list[tuple[float, float, str]] = []
    for i in sorted(found, key=lambda i: i.start):
        if i.stop <= i.start:
            continue
        if boxes and boxes[-1][2] == i.kind and i.start - boxes[-1][1] < least:
            boxes[-1] = (boxes[-1][0], max(i.stop, boxes[-1][1]), i.kind)
        else:
            boxes.append((i.start, i.stop, i.kind))
    return boxes


# ------------------------------------------------------------------------------------------------ a run of traces
def timeline(
    traces: Sequence[Trace] | Trace, machine: Machine | str | PathLike[str], *, on_node: int | None = None,
    pending: bool = False,
) -> Timeline:  # fmt: skip
    """Return the run of traces on a machine.

    Parameters
    ----------
    traces : sequence of Trace
        Of one rank, or of a representative of each class of ranks that differ.  Operations of several representatives'
        classes wait for all of them; others begin at once, as ranks of one class are at the same place.
    machine : Machine, str or path
        A machine, the name of a shipped one, or its file.
    on_node : int, optional
        Ranks of the world on a node, by default the machine's; ranks are placed node by node.
    pending : bool
        True if messages from other nodes, which are in no trace, are awaited all the time, and polled where progress
        is made so.

    Raises
    ------
    ConfigError
        If a rank waits for what was not started, or for what another one never starts, or there is no such machine.

    Examples
    --------
    >>> from parlinalg.planning.machine import load_machine
    >>> trace = Trace(0, 1, [Gemm(1, 4096, 4096, 4096, "float16")])
    >>> timeline(trace, load_machine("a100")).bound()
    'products: 99% of the step; launching 1%'
    """
    given = [traces] if isinstance(traces, Trace) else list(traces)
    if not given:
        raise ConfigError("a timeline of no trace: give one for each class of ranks")
    size = given[0].size
    if any(trace.size != size for trace in given):
        raise ConfigError(f"traces of worlds of {sorted({t.size for t in given})} ranks: give those of one world")
    machine = load_machine(machine)
    on_node = min(size, machine.ranks_per_node if on_node is None else on_node)
    return _Run(given, machine, on_node, pending).result()


@dataclass(eq=False)
class _Operation:
    """An operation between ranks: its transfer, who takes part, and how far it is."""

    start: Start
    transfer: Transfer
    members: frozenset[int]
    group: tuple[Any, ...]
    posted: dict[int, Start] = field(default_factory=dict)  # the calls of the representatives that have started it
    begun: float = math.inf
    ended: float = math.inf
    latency: float = 0.0  # seconds left of it
    left: float = 0.0  # seconds of bytes left, alone on the link
    turned: bool = False  # a rank that has computed waits for it
    computing: float = 1.0  # times as long as it takes while its ranks compute
    delay: float = 0.0  # seconds that it still takes longer if its ranks go on computing
    credit: dict[int, float] = field(default_factory=dict)  # the share that may pass until a representative polls again

    @property
    def moving(self) -> bool:
        """True if bytes are on a link, or would be if it were polled."""
        return self.begun < math.inf and self.ended == math.inf and max(self.latency, self.delay) <= _SOON


class _Rank:
    """The state of a representative: at work until it is done, waiting for an operation, or at its end."""

    def __init__(self, number: int, trace: Trace) -> None:
        self.number, self.events, self.next = number, trace.events, 0
        self.clock = self.host = 0.0
        self.work = 0.0  # left of the event at work, at full speed
        self.at_work: Gemm | Kernel | None = None
        self.began = 0.0
        self.waits: _Operation | None = None
        self.since = 0.0
        self.computed = 0.0  # seconds since it last waited
        self.called = False  # has spent what the host needs to begin the next operation between ranks
        self.calls: dict[int, _Operation] = {}
        self.flying: dict[_Operation, None] = {}

    @property
    def over(self) -> bool:
        return self.next >= len(self.events) and self.at_work is None and self.waits is None


def _about(event: Gemm | Kernel, machine: Machine) -> tuple[str, str]:
    fused = isinstance(event, Attention) and machine.fuses(event.given, event.fused)  # its work is products'
    return ("gemm", "product") if fused or isinstance(event, Gemm) else ("kernel", event.name)


@lru_cache(maxsize=4096)
def speed_beside(others: int, at_work: int, waiting: float, cores: int) -> float:
    """Return the mean speed of a rank that shares cores, dealt out in equal parts by chance, with others.

    Of the others `at_work` compute; those that wait take the share `waiting` of what these do.
    """
    here = max(0.0, (1 + others) / cores - 1)  # the others on its core
    few = math.floor(here)
    speed = 0.0
    for number, share in ((few, few + 1 - here), (few + 1, here - few)):
        if share > 0:
            ways = range(max(0, number - (others - at_work)), min(number, at_work) + 1)
            speed += share / math.comb(others, number) * sum(
                math.comb(at_work, n) * math.comb(others - at_work, number - n) / (1 + n + (number - n) * waiting)
                for n in ways
            )  # fmt: skip
    return speed


class _Run:
    """A run: the ranks advance together from one change to the next."""

    def __init__(self, traces: Sequence[Trace], machine: Machine, on_node: int, pending: bool) -> None:
        self.machine, self.on_node, self.size = machine, on_node, traces[0].size
        self.polled = machine.overlap.progress == "polls"
        self.slowdown = 1.0 + machine.overlap.slowdown
        self.always = self.slowdown if pending and self.polled else 1.0  # of all computing
        self.crowd = machine.crowd(on_node, self.size)
        # a rank that computes is faster while others wait
        self.uneven = self.crowd > 1 and len(traces) > 1 and min(machine.overlap.waiting, machine.overlap.receiving) < 1
        self.calls_cost = machine.kernels.overhead > 0 and not machine.kernels.asynchronous
        self.ranks = [_Rank(i, trace) for i, trace in enumerate(traces)]
        self.traces = traces
        self.number_of = {trace.rank: i for i, trace in enumerate(traces)}  # others' messages are in no trace
        self.of_class: dict[int, int] = {}
        for i, trace in enumerate(traces):
            self.of_class |= dict.fromkeys((*trace.stands_for, trace.rank), i)
        self.beside = [self._beside(trace.rank) for trace in traces] if self.uneven else []
        self.open: dict[tuple[Any, ...], _Operation] = {}  # not yet started by all, by what their calls have in common
        self.counts: Counter[tuple[int, tuple[Any, ...]]] = Counter()  # calls of a representative in a group
        self.last: dict[tuple[Any, ...], _Operation] = {}  # the operation under way in each group
        self.flying: dict[_Operation, None] = {}  # all that are started and not ended
        self.intervals: list[Interval] = []
        self.spans: dict[tuple[int, str], list[float]] = defaultdict(list)
        self.held: dict[int, Counter[str]] = defaultdict(Counter)
        self.memory: dict[int, list[tuple[float, str, int]]] = defaultdict(list)
        self.now = 0.0
        self._run()

    # -------------------------------------------------------------------------------------------- results
    def result(self) -> Timeline:
        seconds = max((rank.clock for rank in self.ranks), default=0.0)
        causes: dict[int, dict[str, float]] = {}
        for rank, trace in zip(self.ranks, self.traces, strict=True):
            spent: dict[str, float] = defaultdict(float)
            for i in self.intervals:
                if i.rank == trace.rank and i.kind not in ("communication", "span"):
                    spent["idle" if i.kind == "idle" else i.cause] += i.stop - i.start
            rest = seconds - sum(spent.values())  # the end of the others, and a host that is late
            if rest > 1e-12 * max(1.0, seconds):
                late = max(0.0, rest - (seconds - rank.clock))
                spent["launching"] += late
                spent["idle"] += rest - late
            causes[trace.rank] = {name: s for name, s in spent.items() if s > 0}
        flops: Counter[str] = Counter()
        for trace in self.traces:
            stands = max(1, len(set(trace.stands_for) | {trace.rank})) if len(self.traces) > 1 else trace.size
            for event in trace.events:
                if isinstance(event, Gemm):
                    flops[event.dtype] += event.flops * stands
        dtype = flops.most_common(1)[0][0] if flops else next(iter(self.machine.gemm))
        order = {trace.rank: i for i, trace in enumerate(self.traces)}
        intervals = tuple(sorted(self.intervals, key=lambda i: (order[i.rank], i.start, i.stop)))
        memory = {rank: tuple(rows) for rank, rows in self.memory.items()}
        return Timeline(self.machine, seconds, intervals, causes, flops.total(), dtype, self.size, memory)

    def _note(self, rank: _Rank, kind: str, name: str, start: float, stop: float, about: Any = None) -> None:
        axes = about.axes if isinstance(about, Start) else ()
        nbytes = getattr(about, "nbytes", 0)
        self.intervals.append(Interval(self.traces[rank.number].rank, kind, name, axes, start, stop, nbytes))

    # -------------------------------------------------------------------------------------------- the run
    def _run(self) -> None:
        while True:
            while sum(self._go_on(rank) for rank in self.ranks):
                pass
            for op in self.flying:
                if op.delay and not self._computing(op):
                    op.delay = 0.0
            rates = self._rates()
            soonest = min(
                [op.latency / self._drive(op) for op in self.flying if self._latent(op)]
                + [op.delay for op in self.flying if self._delayed(op)]
                + [op.left / rate for op, rate in rates.items() if rate > 0]
                + [c / self._pace(op, rates) for op in self.flying if op.begun < math.inf for c in self._credits(op)]
                + [rank.work / self._speed(rank, rates) for rank in self.ranks if rank.at_work is not None]
                + [rank.clock - self.now for rank in self.ranks if self._ahead(rank)],
                default=math.inf,
            )
            if soonest == math.inf:
                break
            self._pass(soonest, rates)
        stuck = next((rank for rank in self.ranks if not rank.over), None)
        if stuck is not None:
            raise ConfigError(self._stuck(stuck))

    def _ahead(self, rank: _Rank) -> bool:
        return rank.clock > self.now + _SOON and rank.at_work is None and rank.waits is None

    def _stuck(self, rank: _Rank) -> str:
        op = rank.waits
        assert op is not None
        missing = sorted(self.traces[m].rank for m in op.members - op.posted.keys())
        about = f"{op.start.op} over axes {op.start.axes} (call {op.start.call})"
        return f"rank {self.traces[rank.number].rank} waits for {about}, which the ranks {missing} never start"

    def _pass(self, seconds: float, rates: Mapping[_Operation, float]) -> None:
        """Let time pass, in which nothing changes."""
        speeds = [self._speed(rank, rates) if rank.at_work is not None else 0.0 for rank in self.ranks]
        drives = {op: self._drive(op) for op in self.flying}
        self.now += seconds
        for op in self.flying:  # also of those that wait for another one
            if self._delayed(op):
                op.delay = max(0.0, op.delay - seconds)
        for op in [op for op in self.flying if op.begun < math.inf]:  # none that begins now, when another one ends
            rate, used = rates.get(op, 0.0), 0.0
            if self._latent(op):
                used = seconds * drives[op]
                op.latency = max(0.0, op.latency - used)
            elif rate > 0:
                used = seconds * rate
                op.left = max(0.0, op.left - used)
            for m in op.credit:
                if not self._inside(m):
                    op.credit[m] = max(0.0, op.credit[m] - used / op.transfer.total)
            if max(op.latency, op.left, op.delay) <= _SOON:
                self._end(op)
        for rank, speed in zip(self.ranks, speeds, strict=True):
            if rank.at_work is not None:
                rank.work -= seconds * speed
                if rank.work <= max(_SOON, 1e-12 * self.now):
                    kind, name = _about(rank.at_work, self.machine)
                    self._note(rank, kind, name, rank.began, self.now, rank.at_work)
                    rank.at_work, rank.clock = None, self.now

    def _end(self, op: _Operation) -> None:
        op.ended = self.now
        self.flying.pop(op)
        for m in op.members:
            rank = self.ranks[m]
            rank.flying.pop(op, None)
            self._note(rank, "communication", op.posted[m].op, op.begun, op.ended, op.posted[m])
        if self.last.get(op.group) is op:
            del self.last[op.group]
        for other in list(self.flying):  # the next one of the same ranks
            if other.group == op.group and other.begun == math.inf:
                self._begin(other)
                break

    # -------------------------------------------------------------------------------------------- rates
    def _inside(self, rank: int) -> bool:
        """Return True if a rank waits inside a call, or has reached its end, so that what is in flight advances."""
        return not self.polled or self.ranks[rank].waits is not None or self.ranks[rank].over

    def _drive(self, op: _Operation) -> float:
        """Return the share of an operation's pace that is left while its ranks compute."""
        return 1.0 / op.computing if op.computing != 1.0 and self._computing(op) else 1.0

    def _computing(self, op: _Operation) -> bool:
        """Return True if a rank of an operation computes."""
        return any(self.ranks[m].at_work is not None for m in op.members)

    def _delayed(self, op: _Operation) -> bool:
        """Return True if all have started an operation whose messages still wait for ranks that compute."""
        return op.delay > _SOON and op.members == op.posted.keys()

    def _latent(self, op: _Operation) -> bool:
        """Return True if an operation's first bytes are on their way."""
        return op.begun < math.inf and op.latency > _SOON and self._advances(op)

    def _advances(self, op: _Operation) -> bool:
        return not self.polled or all(self._inside(m) or op.credit.get(m, 0.0) > _SOON for m in op.members)

    def _rates(self) -> dict[_Operation, float]:
        """Return the share of its link that each operation has whose bytes are on it."""
        moving = [op for op in self.flying if op.moving and op.left > _SOON and self._advances(op)]
        busy: Counter[tuple[int, str]] = Counter((m, op.transfer.level) for op in moving for m in op.members)
        rates = {op: min(1.0 / busy[m, op.transfer.level] for m in op.members) for op in moving}
        slower = {}
        for rank in self.ranks:
            used = self._transport(rank, rates) if rank.at_work is not None else 0.0
            if used > TRANSPORT_SHARE:
                slower[rank.number] = TRANSPORT_SHARE / used
        if not slower and all(op.computing == 1.0 for op in rates):
            return rates
        return {op: r * min(self._drive(op), *(slower.get(m, 1.0) for m in op.members)) for op, r in rates.items()}

    def _transport(self, rank: _Rank, rates: Mapping[_Operation, float]) -> float:
        """Return the share of a rank's processor that the transport of its operations takes at these rates."""
        used = 0.0
        for op in rank.flying:
            if op.transfer.processor and rates.get(op, 0.0) > 0 and op.transfer.seconds > 0:
                used += op.transfer.processor / op.transfer.seconds * rates[op]
        return used

    def _beside(self, place: int) -> list[int]:
        """Return by representative how many of its ranks share cores with the rank `place`, itself included."""
        counts = [0] * len(self.ranks)
        pool = self.machine.pool(place, self.on_node)
        for r in range(self.size):
            if self.machine.pool(r, self.on_node) == pool:
                counts[self.of_class.get(r, self.of_class[place])] += 1
        return counts

    def _room(self, rank: _Rank) -> float:
        """Return how many times as fast a rank computes as if all that share its cores computed.

        Ranks stay on the cores they have come to, whoever waits on the others: unless they are bound to cores, the
        speed is the mean over all ways in which the cores could be dealt out in equal parts.
        """
        if not self.uneven:
            return 1.0
        counts = list(self.beside[rank.number])
        counts[rank.number] -= 1
        loads = [self._load(other) for other in self.ranks]
        at_work = sum(n for n, load in zip(counts, loads, strict=True) if load == 1.0)
        others = sum(counts)
        waiting = sum(n * load for n, load in zip(counts, loads, strict=True)) - at_work
        mean = waiting / max(1, others - at_work)
        return self.crowd * speed_beside(others, at_work, mean, self.machine.pool_cores)

    def _load(self, rank: _Rank) -> float:
        """Return the share of a core that a rank takes if it can have it."""
        if rank.waits is None and not rank.over:
            return 1.0
        collective = rank.waits is not None and not rank.waits.start.message
        return self.machine.overlap.waiting if collective else self.machine.overlap.receiving

    def _pace(self, op: _Operation, rates: Mapping[_Operation, float]) -> float:
        """Return the share of an operation that is done in a second."""
        return (self._drive(op) if op.latency > _SOON else rates[op]) / op.transfer.total

    def _credits(self, op: _Operation) -> list[float]:
        """Return the progress of an operation until its ranks poll again, if it makes any."""
        if not self.polled or not self._advances(op) or not (op.latency > _SOON or op.moving):
            return []
        return [c for m, c in op.credit.items() if not self._inside(m)]

    def _speed(self, rank: _Rank, rates: Mapping[_Operation, float]) -> float:
        """Return the speed of a rank at work: transport takes a part of its processor, of the memory's bandwidth."""
        transport, slowdown = self._transport(rank, rates), self.slowdown / self.always
        if slowdown != 1.0 and not any(rates.get(op, 0.0) > 0 for op in rank.flying):
            slowdown = 1.0
        return (1.0 - min(TRANSPORT_SHARE, transport)) / slowdown * self._room(rank)

    # -------------------------------------------------------------------------------------------- one rank
    def _go_on(self, rank: _Rank) -> bool:
        """Do what a rank does at this time, up to work or a wait that lasts; return True if anything was done."""
        if rank.waits is not None:
            if rank.waits.ended > self.now:
                return False
            self._finish_wait(rank, rank.waits)
        if rank.at_work is not None or rank.clock > self.now + _SOON:
            return False
        before = rank.next
        while rank.next < len(rank.events):
            event = rank.events[rank.next]
            if isinstance(event, Gemm) and self.machine.fuses(event.attention, event.fused):
                rank.next += 1  # the kernel that follows has its work
                continue
            if isinstance(event, Gemm | Kernel):
                if rank.clock > self.now + _SOON and (rank.flying or self.uneven):
                    break
                rank.next += 1
                if self._compute(rank, event):
                    break
                continue
            if isinstance(event, Start | Test | Wait) and rank.clock > self.now + _SOON and not self._done(rank, event):
                break  # what the others do before comes first
            if isinstance(event, Start) and self.calls_cost and not rank.called:
                rank.called = True
                if self._compute(rank, _CALL):
                    break
                continue
            rank.next += 1
            if isinstance(event, Start):
                rank.called = False
                self._start(rank, event)
            elif isinstance(event, Wait | Test):
                self._poll(rank)
                if isinstance(event, Wait) and not self._waited(rank, event):
                    break
            elif isinstance(event, Span):
                self._mark(rank, event)
            elif isinstance(event, Memory):
                self._remember(rank, event)
        return rank.next > before

    def _done(self, rank: _Rank, event: Start | Test | Wait) -> bool:
        """Return True if an event takes no time and changes nothing, so that a rank may run ahead of the others."""
        if isinstance(event, Start) or event.call not in rank.calls:
            return False
        return not rank.flying and rank.calls[event.call].ended <= self.now

    def _compute(self, rank: _Rank, event: Gemm | Kernel) -> bool:
        """Begin a computation; return False if it is over, as nothing that is in flight bears on it."""
        machine = self.machine
        before = rank.events[rank.next - 2] if rank.next > 1 else None
        times = self.crowd * self.always
        overhead = machine.kernels.beside_work(event, before) * times
        seconds = machine.gemm_seconds(event) if isinstance(event, Gemm) else machine.kernel_seconds(event)
        seconds *= times
        if machine.kernels.asynchronous:
            rank.host += overhead
            rank.clock = max(rank.clock, rank.host)
        else:
            seconds += overhead
        rank.computed += seconds
        if rank.flying or self.uneven:
            late = max(0.0, rank.clock - self.now)
            rank.at_work, rank.work, rank.began = event, max(seconds, 1e-14) + late, self.now
            return True
        stop = rank.clock + seconds
        self._note(rank, *_about(event, self.machine), rank.clock, stop, event)
        rank.clock = stop
        return False

    def _start(self, rank: _Rank, start: Start) -> None:
        if start.call in rank.calls:
            raise ConfigError(f"call {start.call} of rank {self.traces[rank.number].rank} is started twice")
        key, members, group = self._meeting(rank, start)
        op = self.open.get(key)
        if op is None:
            op = self.open[key] = _Operation(start, self._transfer(start), members, group)
            op.latency, op.left = op.transfer.latency, op.transfer.seconds
            if not self._blocks(rank, start):
                op.left *= self.machine.beside(start.op, op.transfer.level)
                op.computing = self.machine.computing(start.op, op.transfer.level)
                op.delay = self.machine.delay(start.op, op.transfer.level)
        op.posted[rank.number] = start
        rank.calls[start.call] = op
        rank.flying[op] = None
        self.flying[op] = None
        if self.polled:
            self._poll(rank)
        if op.members == op.posted.keys():
            del self.open[key]
            self._begin(op)

    def _blocks(self, rank: _Rank, start: Start) -> bool:
        """Return True if a rank waits at once for what it starts."""
        after = rank.events[rank.next] if rank.next < len(rank.events) else None
        return isinstance(after, Wait) and after.call == start.call

    def _begin(self, op: _Operation) -> None:
        """Let an operation begin that all have started.

        A device has one of the same ranks after the other; those of MPI are under way together, and share the link.
        """
        if op.members != op.posted.keys() or (not self.polled and self.last.get(op.group) not in (None, op)):
            return
        self.last[op.group] = op
        op.begun = self.now
        if max(op.latency, op.left, op.delay) <= _SOON:
            self._end(op)

    def _meeting(self, rank: _Rank, start: Start) -> tuple[tuple[Any, ...], frozenset[int], tuple[Any, ...]]:
        """Return what the calls of all ranks of an operation have in common, its representatives, and its group."""
        here = rank.number
        if start.peer is not None and start.message:
            there = self.number_of.get(start.peer, here)
            ends = (here, there) if start.op == "send" else (there, here)
            if here == there:
                return ("alone", here, start.call), frozenset({here}), ("message", here, start.call)
            about = ("message", *ends, start.tag)
            side = (here, ("sent" if start.op == "send" else "received", *about))
            number = self.counts[side]
            self.counts[side] += 1
            return (*about, number), frozenset(ends), (*about, number)
        members = frozenset(self.of_class.get(r, here) for r in start.ranks) | {here}
        group = ("group", tuple(sorted(members)), start.axes, start.ranks if len(members) == 1 else len(start.ranks))
        number = self.counts[here, group]
        self.counts[here, group] += 1
        return (*group, number), members, group

    def _transfer(self, start: Start) -> Transfer:
        if start.peer is not None and start.message:
            me = next((r for r in start.ranks if r != start.peer), start.peer)
            local = 2 if me // self.on_node == start.peer // self.on_node else 1
            nbytes = max(start.nbytes, start.sent)
            return self.machine.transfer(start.op, nbytes, 2, local, self.on_node, self.size)
        nodes = Counter(r // self.on_node for r in start.ranks)
        local = max(nodes.values(), default=1)
        nbytes = max(start.nbytes, start.sent if start.op == "broadcast" else start.most)
        return self.machine.transfer(start.op, nbytes, len(start.ranks), local, self.on_node, self.size)

    def _poll(self, rank: _Rank) -> None:
        """Give what is in flight of a rank a message's worth of progress."""
        if self.polled:
            for op in rank.flying:
                received = max(op.start.nbytes, op.start.sent, 1)
                op.credit[rank.number] = min(1.0 / op.transfer.steps, self.machine.overlap.window / received)

    def _waited(self, rank: _Rank, event: Wait) -> bool:
        """Return True if an operation is over; else the rank waits from now on."""
        op = rank.calls.get(event.call)
        if op is None:
            raise ConfigError(
                f"rank {self.traces[rank.number].rank} waits for call {event.call}, which it has not started"
            )
        if op.ended <= self.now:
            return True
        if not op.turned:
            op.turned = True
            op.latency += self.machine.overlap.turn(rank.computed)
        rank.computed = 0.0
        rank.waits, rank.since = op, self.now
        return False

    def _finish_wait(self, rank: _Rank, op: _Operation) -> None:
        begun = min(max(op.begun, rank.since), self.now)
        start = op.posted[rank.number]
        if begun > rank.since:
            self._note(rank, "idle", start.op, rank.since, begun, start)
        if self.now > begun:
            self._note(rank, "exposed", start.op, begun, self.now, start)
        rank.waits, rank.clock = None, self.now

    def _mark(self, rank: _Rank, event: Span) -> None:
        open_ = self.spans[rank.number, event.name]
        if event.begins:
            open_.append(rank.clock)
        elif open_:
            self._note(rank, "span", event.name, open_.pop(), rank.clock)

    def _remember(self, rank: _Rank, event: Memory) -> None:
        held = self.held[rank.number]
        held[event.category] += event.nbytes
        number = self.traces[rank.number].rank
        self.memory[number].append((rank.clock, event.category, held[event.category]))
