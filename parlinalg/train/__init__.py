"""Training: configurations, the mesh of ranks they ask for, engines, and the job that trains a model."""

from typing import TYPE_CHECKING

from parlinalg import hints
from parlinalg.train.checkpoint import Checkpoints
from parlinalg.train.config import Config
from parlinalg.train.engine import Engine
from parlinalg.train.feed import Feed
from parlinalg.train.hooks import CheckpointHook, EarlyStopHook, EvaluateHook, Hook, LogHook
from parlinalg.train.initialize import initialize
from parlinalg.train.launch import Mesh, launch
from parlinalg.train.pipeline_schedules import InterleavedPipelineSchedule, NonPipelineSchedule, PipelineSchedule
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
    "Trainer",
    "initialize",
    "launch",
]

if not TYPE_CHECKING:  # names of other libraries
    __getattr__ = hints.missing(__name__)
