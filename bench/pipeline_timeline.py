"""A measured timeline of a pipeline over the simulated one.

    mpiexec -n 4 python bench/pipeline_timeline.py --svg docs/figures/pipeline_measured.svg

A GPT trains for some steps.  What its stages' passes take is told by all steps but the last; with it the schedule is
simulated on as many cores as this machine has.  The last step is drawn under the simulation, and the times of both are
compared.  Where ranks share cores, passes take the longer the more ranks are at work: a stage's cost is then its
shortest pass in a step, the one that had a core for itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "pieces"))

import harness
from gpt import Sizes
from pipeline_parlinalg import prepared, ranks

from parlinalg.pipeline.drawing import chrome, overlay, png
from parlinalg.pipeline.schedule import Op, Schedule
from parlinalg.pipeline.simulate import Costs, Span, measured_costs, predict

MODEL = "512x8x8x256x8x2048"
"""d, layers, heads, sequence, batch, vocabulary."""
CHUNKS = {"interleaved": 2, "zb-v": 2}
"""Stages a rank, where it is not one."""
MS = 1000


def counts(layers: int, stages: int) -> list[int]:
    """The layers of each stage: the embedding with the first block, the head with the last."""
    shared = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    shared[0] += 1
    shared[-1] += 1
    return shared


def typical(schedule: Schedule, steps: Sequence[Sequence[Span]], cores: int) -> Costs:
    """The stages' costs: of each step their medians, or shortest where ranks share cores; of those the medians."""
    alone = cores >= schedule.ranks
    found = [measured_costs(schedule, spans, pick=median if alone else min) for spans in steps]
    times = {
        name: [median(column) for column in zip(*(getattr(costs, name) for costs in found), strict=True)]
        for name in ("forward", "backward", "weight", "reduce")
    }
    return Costs(**times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="1f1b", help="a synchronous one (default: %(default)s)")
    parser.add_argument("--model", default=MODEL, help="d, layers, heads, sequence, batch, vocabulary (%(default)s)")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8, help="after a first one that is not counted")
    for kind in ("svg", "png", "chrome"):
        parser.add_argument(f"--{kind}", type=Path, help="draw the last step here")
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()
    sizes, size = Sizes.parse(args.model), ranks()
    made = prepared(
        args.schedule, sizes, args.microbatches, counts(sizes.layers, size * CHUNKS.get(args.schedule, 1)), 1
    )
    worker, world = made.worker, made.mesh.world
    steps = []
    for number in range(args.steps + 1):
        worker.spans = []
        made.step(number)
        told = world.share([(s.rank, s.op.name, s.chunk, s.microbatch, s.start, s.stop) for s in worker.spans])
        spans = [s for theirs in told for s in theirs]
        steps.append([Span(r, Op[op], c, j, MS * start, MS * stop) for r, op, c, j, start, stop in spans])
    if world.rank == 0:
        schedule, cores = worker.schedule, harness.cores()
        *before, last = steps[1:] if len(steps) > 2 else steps * 2
        simulation = predict(schedule, typical(schedule, before, cores), cores=cores)
        measured = max(s.stop for s in last) - min(s.start for s in last)
        off = measured / simulation.makespan - 1
        print(
            f"{args.schedule} on {size} ranks and {cores} cores: a step's passes took {measured:.1f} ms, the simulator "
            f"says {simulation.makespan:.1f} ms ({100 * off:+.1f}%); idle {100 * simulation.bubble:.1f}%"
        )
        for path, draw in ((args.svg, overlay), (args.png, png)):
            if path:
                drawn = draw(simulation, last)
                path.write_bytes(drawn if isinstance(drawn, bytes) else drawn.encode())
        if args.chrome:
            args.chrome.write_text(chrome(simulation, last, microseconds=1e6 / MS))
        if args.json:
            costs = {n: getattr(simulation.costs, n) for n in ("forward", "backward", "weight", "reduce")}
            harness.write_json(args.json, {
                "schedule": args.schedule, "ranks": size, "cores": cores, "measured_ms": measured,
                "predicted_ms": simulation.makespan, "bubble": simulation.bubble, "costs_ms": costs,
            })  # fmt: skip
    worker.close()
    made.mesh.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
