"""Numerical linear algebra and model training on MPI processor grids."""

from typing import TYPE_CHECKING

from parlinalg import autograd, datasets, hints, nn, optim, parallel, pipeline, random
from parlinalg.array import DistArray, distribute, empty, eye, from_blocks, from_function, full, ones, zeros
from parlinalg.autograd import Parameter, Tensor, check_gradients, no_grad, no_sync, ops
from parlinalg.comm import ledger, trace
from parlinalg.errors import CommError, ConfigError, EngineError, GridError, LayoutError, ParlinalgError, PlanError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.matmul import plan_matmul
from parlinalg.plan import Plan
from parlinalg.sequence import sequence_order
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
    initialize,
    launch,
)

from parlinalg.autograd import matmul, redistribute  # isort: skip  # functions, once the modules of these names are imported

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
    "autograd",
    "check_gradients",
    "datasets",
    "distribute",
    "empty",
    "eye",
    "from_blocks",
    "from_function",
    "full",
    "initialize",
    "launch",
    "ledger",
    "matmul",
    "nn",
    "no_grad",
    "no_sync",
    "ones",
    "ops",
    "optim",
    "parallel",
    "pipeline",
    "plan_matmul",
    "random",
    "redistribute",
    "sequence_order",
    "trace",
    "zeros",
]

if not TYPE_CHECKING:  # names of other libraries
    __getattr__ = hints.missing(__name__)
