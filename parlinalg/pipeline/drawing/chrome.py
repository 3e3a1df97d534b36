"""A timeline as a trace that Chrome (chrome://tracing) and Perfetto read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from parlinalg.pipeline.drawing.lanes import LOOK, Lane, lanes
from parlinalg.pipeline.schedule import COMPUTE
from parlinalg.pipeline.simulate import Simulation


def chrome(
    simulation: Simulation, measured: Iterable[Sequence[object]] | None = None, *, microseconds: float = 1e6
) -> str:  # fmt: skip
    """The timeline as JSON: the simulation is process 0, a measured run process 1, ranks are their threads.

    Parameters
    ----------
    simulation : Simulation
    measured : iterable of (rank, op, chunk, microbatch, start, stop), optional
    microseconds : float
        In a unit of the costs, by default a second.
    """
    found = lanes(simulation, measured)
    names = [simulation.schedule.name, *(["measured"] if measured is not None else [])]
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in enumerate(names)
    ]
    for lane in found:
        pid = int(lane.measured)
        events.append(
            {"ph": "M", "name": "thread_name", "pid": pid, "tid": lane.rank, "args": {"name": f"rank {lane.rank}"}}
        )
        events += [{**event, "pid": pid, "tid": lane.rank} for event in _events(simulation, lane, microseconds)]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, indent=None, separators=(",", ":")) + "\n"


def _events(simulation: Simulation, lane: Lane, scale: float) -> list[dict[str, object]]:
    events = []
    for box in lane.boxes:
        span = box.span
        args: dict[str, object] = {"microbatch": span.microbatch}
        if span.op in COMPUTE:
            chunk = simulation.schedule.chunks[span.rank][span.chunk]
            args |= {"stage": chunk.stage, "copy": chunk.copy}
        start, length = round(span.start * scale, 3), round((span.stop - span.start) * scale, 3)
        word = LOOK[span.op][0]
        events.append({"ph": "X", "name": box.label, "cat": word, "ts": start, "dur": length, "args": args})
    return events
