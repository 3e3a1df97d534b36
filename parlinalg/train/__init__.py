"""Training: configurations, the mesh of ranks they ask for, recipes, engines, and the trainer with its hooks."""

from typing import TYPE_CHECKING

from parlinalg import hints
from parlinalg.train.checkpoint import Checkpoints
from parlinalg.train.config import Config
from parlinalg.train.engine import Engine
from parlinalg.train.feed import Feed
from parlinalg.train.hooks import CheckpointHook, EarlyStopHook, EvaluateHook, Hook, LogHook
from parlinalg.train.initialize import initialize
from parlinalg.train.launch import Mesh, launch
from parlinalg.train.losses import accuracy
from parlinalg.train.pipeline_schedules import InterleavedPipelineSchedule, NonPipelineSchedule, PipelineSchedule
from parlinalg.train.progress import ProgressHook
from parlinalg.train.recipes import Recipe, recipe
from parlinalg.train.report import RunHook
from parlinalg.train.trainer import Trainer

__all__ = [
    "CheckpointHook",
    "Checkpoints",
    "Config",
    "EarlyStopHook",
    "Engine",
    "EvaluateHook",
    "Feed",
    "Hook",
    "InterleavedPipelineSchedule",
    "LogHook",
    "Mesh",
    "NonPipelineSchedule",
    "PipelineSchedule",
    "ProgressHook",
    "Recipe",
    "RunHook",
    "Trainer",
    "accuracy",
    "initialize",
    "launch",
    "recipe",
]

if not TYPE_CHECKING:  # names of other libraries
    __getattr__ = hints.missing(__name__)
