"""Trains a GPT within a limit of memory that decides what is offloaded, alone or in a pipeline of all ranks.

    mpiexec -n 2 python bench/pieces/offload_budget.py '{"memory": "120MiB", "schedule": "1f1b", "path": "/tmp/o"}'

Tells for each rank what is offloaded, what the plan says stays, and the bytes of NumPy's arrays (tracemalloc) between
steps and at the most in one, as JSON.
"""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np


def numpy_bytes() -> int:
    """Bytes of all arrays that NumPy has made since tracing began, and not freed."""
    domain = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([domain]).traces)


def configuration(options: dict[str, Any], ranks: int) -> dict[str, Any]:
    hidden, layers, batch, sequence = map(int, options["model"].split("x"))
    pipeline = {}
    if options["schedule"]:
        pipeline = {"parallel": {"pipeline": ranks}, "schedule": {"name": options["schedule"], "microbatches": 4}}
    return {
        **pipeline, "batch_size": 4 * batch if pipeline else batch, "steps": 3, "dtype": "float32", "seed": 0,
        "data": {"name": "text", "sequence_length": sequence, "validation": 0.1},
        "model": {"name": "gpt", "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "offload": {"memory": options["memory"], "path": options["path"]},
    }  # fmt: skip


def main(options: dict[str, Any]) -> list[dict[str, Any]]:
    """Train; returns what each rank has to tell."""
    from parlinalg.backend import compiled
    from parlinalg.comm import open_comm
    from parlinalg.errors import ConfigError
    from parlinalg.train.mesh import launch
    from parlinalg.train.recipes import recipe
    from parlinalg.train.run import trainer_of

    compiled.about()  # numba is loaded: it is the process's, not the training's
    world = open_comm()
    tracemalloc.start()
    try:
        with launch(configuration(options, world.size), world) as mesh:
            made = recipe(mesh.config, mesh)
            gc.collect()
            data = numpy_bytes()  # the text
            trainer, feed = trainer_of(mesh, made, Path(options["path"]))
            plan = trainer.engine.memory_plan
            assert plan is not None
            trainer.fit(feed, steps=1)
            gc.collect()
            rest, everything = numpy_bytes(), tracemalloc.get_traced_memory()[0]
            most = 0
            for number in range(2, 1 + (mesh.config.steps or 0)):
                tracemalloc.reset_peak()
                trainer.fit(feed, steps=number)
                most = max(most, tracemalloc.get_traced_memory()[1] - (everything - rest))
            t = plan.table
            mine = {
                "offloaded": list(plan.places), "stays": plan.rest, "rest": rest - data,
                "most": most - data, "values": t.values, "gradients": t.gradients, "states": t.states,
                "activations": t.activations, "block": t.block,
            }  # fmt: skip
            return world.share(mine)
    except ConfigError as error:
        return [{"error": str(error)}]


if __name__ == "__main__":
    told = main(json.loads(sys.argv[1]))
    from parlinalg.comm import open_comm

    if open_comm().rank == 0:
        sys.stdout.write(json.dumps({"ranks": told}) + "\n")
        sys.stdout.flush()
