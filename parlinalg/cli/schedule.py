"""`parlinalg schedule`: a simulated pipeline schedule, drawn without running anything."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from parlinalg.cli.parser import Commands, speaks
from parlinalg.comm.streams import tell
from parlinalg.errors import ScheduleError

if TYPE_CHECKING:
    from parlinalg.pipeline.simulate import Simulation


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    schedule = commands.add_parser("schedule", help="draw a pipeline schedule's timeline; needs no MPI")
    schedule.add_argument("name", metavar="NAME", help="such as 1f1b; any other word lists what there is")
    schedule.add_argument("--stages", "-p", type=int, required=True, metavar="P", help="the ranks of the pipeline")
    schedule.add_argument("--microbatches", "-m", type=int, required=True, metavar="M")
    schedule.add_argument("--chunks", type=int, metavar="V", help="stages that each rank holds (interleaved)")
    schedule.add_argument("--every", type=int, metavar="K", help="microbatches of a step (asynchronous schedules)")
    schedule.add_argument(
        "--costs", default="1,2,1", metavar="F,B,W",
        help="times of a stage's forward and backward pass, and of the part of the latter that gives the weights' "
        "gradients (default: %(default)s)",
    )  # fmt: skip
    schedule.add_argument("--latency", type=float, default=0.0, help="of a message (default: 0)")
    schedule.add_argument("--cores", type=int, metavar="C", help="ranks that can work at once (default: all)")
    for kind, what in (("svg", "an SVG"), ("png", "a PNG"), ("chrome", "a trace for Chrome or Perfetto")):
        schedule.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"write the timeline as {what}")
    schedule.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the timeline, and write the files asked for."""
    from parlinalg.pipeline.schedules import make_schedule
    from parlinalg.pipeline.simulate import Costs, simulate

    schedule = make_schedule(args.name, args.stages, args.microbatches, args.chunks, every=args.every)
    forward, backward, weight = _costs(args.costs)
    simulation = simulate(schedule, Costs(forward, backward, weight, args.latency), args.cores)
    if speaks():
        tell(page(simulation))
        for path in _written(simulation, args):
            tell(f"wrote {path}")
    return 0


def page(simulation: Simulation) -> str:
    """Return the timeline, and what it costs."""
    from parlinalg.pipeline.drawing import staircase

    schedule, ranks = simulation.schedule, range(simulation.schedule.ranks)
    work = max(simulation.busy(rank) for rank in ranks)
    lines = [
        staircase(simulation),
        "",
        f"time             {simulation.makespan:g}, of which the busiest rank works {work:g}",
        f"bubble fraction  {simulation.bubble:.4f}",
        f"idle by rank     {' '.join(f'{simulation.makespan - simulation.busy(r):g}' for r in ranks)}",
        f"microbatches     {' '.join(f'{peak:.4g}' for peak in simulation.peaks)} held by rank at most",
    ]
    if schedule.copies > 1:
        lines.append(f"copies           {schedule.copies} of the model")
    if schedule.asynchronous:
        lines.append(f"weights          {' '.join(map(str, schedule.versions))} versions by rank")
    return "\n".join(lines)


def _costs(text: str) -> tuple[float, float, float]:
    try:
        forward, backward, weight = (float(part) for part in text.split(","))
    except ValueError:
        raise ScheduleError(f"--costs {text}: it takes three numbers F,B,W, such as 1,2,1") from None
    return forward, backward, weight


def _written(simulation: Simulation, args: argparse.Namespace) -> list[Path]:
    """Write the files asked for; raise if a folder is missing or not writable."""
    from parlinalg.pipeline.drawing import png, svg

    written = []
    for path, draw in ((args.svg, svg), (args.png, png), (args.chrome, _thousandths)):
        if path is None:
            continue
        drawn = draw(simulation)
        try:
            path.write_bytes(drawn if isinstance(drawn, bytes) else drawn.encode())
        except OSError as error:
            raise ScheduleError(f"cannot write {path}: {error.strerror}") from None
        written.append(path)
    return written


def _thousandths(simulation: Simulation) -> str:
    from parlinalg.pipeline.drawing import chrome

    return chrome(simulation, microseconds=1000.0)
