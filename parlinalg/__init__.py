"""Numerical linear algebra and model training on MPI processor grids."""

from typing import TYPE_CHECKING

from parlinalg import autograd, fft, hints, linalg, random
from parlinalg.array import (
    DistArray,
    asnumpy,
    distribute,
    explicit,
    extras,
    from_blocks,
    from_function,
    load,
    namespace,
    plan_elementwise,
    print0,
    save,
)
from parlinalg.array.extras import *  # noqa: F403
from parlinalg.array.namespace import *  # noqa: F403
from parlinalg.array.namespace import __array_api_version__, __array_namespace_info__
from parlinalg.autograd import Parameter, Tensor, check_gradients, no_grad, no_sync, ops
from parlinalg.backend.shapes import WhatIf
from parlinalg.comm import ledger, trace
from parlinalg.errors import (
    CommError,
    ConfigError,
    EngineError,
    FileError,
    GridError,
    LayoutError,
    ParlinalgError,
    PlanError,
    ValuesNeeded,
)
from parlinalg.grid import Grid, default_grid, set_default_grid
from parlinalg.layout import Layout
from parlinalg.linalg.planner import plan_linalg
from parlinalg.matmul import plan_matmul
from parlinalg.plan import Plan
from parlinalg.sequence import sequence_order

if TYPE_CHECKING:  # what only training and planning need is imported when it is first asked for
    from parlinalg import datasets, nn, optim, parallel, pipeline
    from parlinalg.planning.imagine import classes_of_stages, imagine, imagine_together
    from parlinalg.planning.machine import load_machine
    from parlinalg.planning.search import plan_training
    from parlinalg.train import (
        CheckpointHook,
        Checkpoints,
        EarlyStopHook,
        Engine,
        EvaluateHook,
        Hook,
        InterleavedPipelineSchedule,
        LogHook,
        Mesh,
        NonPipelineSchedule,
        PipelineSchedule,
        ProgressHook,
        RunHook,
        Trainer,
        launch,
    )
    from parlinalg.train.initialize import initialize
else:
    __getattr__ = hints.missing(__name__, later={
        **dict.fromkeys((
            "datasets", "nn", "offload", "optim", "parallel", "pipeline", "planning", "schemes", "state_dict", "train",
        ), ""),
        **dict.fromkeys(("classes_of_stages", "imagine", "imagine_together"), "planning.imagine"),
        "load_machine": "planning.machine",
        "plan_training": "planning.search",
        **dict.fromkeys((
            "CheckpointHook", "Checkpoints", "EarlyStopHook", "Engine", "EvaluateHook", "Hook",
            "InterleavedPipelineSchedule", "LogHook", "Mesh", "NonPipelineSchedule", "PipelineSchedule", "ProgressHook",
            "RunHook", "Trainer", "initialize", "launch",
        ), "train"),
    })  # fmt: skip

# functions, once the modules of these names are imported
from parlinalg.array import array  # isort: skip
from parlinalg.autograd import matmul, redistribute  # isort: skip

__version__ = "0.1.0"

__all__ = [
    "CheckpointHook",
    "Checkpoints",
    "CommError",
    "ConfigError",
    "DistArray",
    "EarlyStopHook",
    "Engine",
    "EngineError",
    "EvaluateHook",
    "FileError",
    "Grid",
    "GridError",
    "Hook",
    "InterleavedPipelineSchedule",
    "Layout",
    "LayoutError",
    "LogHook",
    "Mesh",
    "NonPipelineSchedule",
    "Parameter",
    "ParlinalgError",
    "PipelineSchedule",
    "Plan",
    "PlanError",
    "ProgressHook",
    "RunHook",
    "Tensor",
    "Trainer",
    "ValuesNeeded",
    "WhatIf",
    "array",
    "asnumpy",
    "autograd",
    "check_gradients",
    "classes_of_stages",
    "datasets",
    "__array_api_version__",
    "__array_namespace_info__",
    "default_grid",
    "distribute",
    "explicit",
    "fft",
    "from_blocks",
    "from_function",
    "imagine",
    "imagine_together",
    "initialize",
    "launch",
    "ledger",
    "linalg",
    "load",
    "load_machine",
    "matmul",
    "nn",
    "no_grad",
    "no_sync",
    "ops",
    "optim",
    "parallel",
    "pipeline",
    "plan_elementwise",
    "plan_linalg",
    "plan_matmul",
    "plan_training",
    "print0",
    "random",
    "redistribute",
    "save",
    "sequence_order",
    "set_default_grid",
    "trace",
]
__all__ += namespace.__all__
__all__ += extras.__all__


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
