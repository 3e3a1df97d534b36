"""One piece of `bench/foresight/measured.py`: training steps of several configurations, in turn on the same ranks.

usage: mpiexec -n P python planned.py FILE STEPS

FILE has a list of configurations as JSON; the seconds of the steps of each are written beside it, as FILE.told.
"""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

from parlinalg.comm import Comm, open_comm
from parlinalg.train.config import parse
from parlinalg.train.hooks import Hook
from parlinalg.train.mesh import launch
from parlinalg.train.recipes import recipe
from parlinalg.train.run import trainer_of

WARM = 2


class Clock(Hook):
    """Times steps from a barrier to the last rank's end."""

    def __init__(self, world: Comm) -> None:
        self.world, self.seconds = world, list[float]()

    def before_train_iter(self, trainer: Any) -> None:
        self.world.barrier()
        self.start = perf_counter()

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: float) -> None:
        self.seconds.append(max(self.world.share(perf_counter() - self.start)))


def timed(values: dict[str, Any], steps: int, world: Comm, folder: Path) -> list[float]:
    """Return the seconds of a configuration's steps."""
    clock = Clock(world)
    with ExitStack() as stack:
        mesh = stack.enter_context(launch(parse(values), world))
        trainer, feed = trainer_of(mesh, recipe(mesh.config, mesh, folder), folder, [clock])
        trainer.fit(feed, steps=WARM + steps)
    return clock.seconds[WARM:]


def main() -> None:
    path, steps = Path(sys.argv[1]), int(sys.argv[2])
    world = open_comm()
    with tempfile.TemporaryDirectory() as folder:
        told = [timed(values, steps, world, Path(folder)) for values in json.loads(path.read_text())]
    if world.rank == 0:
        path.with_name(path.name + ".told").write_text(json.dumps(told))
    world.free()


if __name__ == "__main__":
    main()
