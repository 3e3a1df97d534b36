"""Training: configurations, the mesh of ranks they ask for, recipes, engines, and the trainer with its hooks."""

from typing import TYPE_CHECKING

from parlinalg import hints
from parlinalg.train.checkpoint import Checkpoints
from parlinalg.train.config import TrainingConfig
from parlinalg.train.engine import Engine
from parlinalg.train.feed import Feed
from parlinalg.train.hooks import CheckpointHook, EarlyStopHook, EvaluateHook, Hook, LogHook
from parlinalg.train.initialize import initialize
from parlinalg.train.losses import accuracy
from parlinalg.train.mesh import Mesh, MeshSpec, launch, resolve
from parlinalg.train.progress import ProgressHook
from parlinalg.train.recipes import Recipe, recipe
from parlinalg.train.run import RunHook
from parlinalg.train.schedules import InterleavedPipelineSchedule, NonPipelineSchedule, PipelineSchedule
from parlinalg.train.trainer import Trainer

__all__ = [
    "CheckpointHook",
    "Checkpoints",
    "EarlyStopHook",
    "Engine",
    "EvaluateHook",
    "Feed",
    "Hook",
    "InterleavedPipelineSchedule",
    "LogHook",
    "Mesh",
    "MeshSpec",
    "NonPipelineSchedule",
    "PipelineSchedule",
    "ProgressHook",
    "Recipe",
    "RunHook",
    "Trainer",
    "TrainingConfig",
    "accuracy",
    "initialize",
    "launch",
    "recipe",
    "resolve",
]

if not TYPE_CHECKING:  # names of other libraries
    __getattr__ = hints.missing(__name__)
