"""Pipelines: the layers of a model on ranks that follow one another, and microbatches that pass through them."""

from typing import TYPE_CHECKING

from parlinalg import hints
from parlinalg.pipeline.asynchronous import AsynchronousWorker
from parlinalg.pipeline.build import build_by_hand, build_pipeline_model, build_pipeline_model_from_cfg
from parlinalg.pipeline.model import PipelineModel, Stage, split
from parlinalg.pipeline.registry import register, registered
from parlinalg.pipeline.schedule import Chunk, Instruction, Op, Schedule, complete_schedule
from parlinalg.pipeline.schedules import discover, make_schedule
from parlinalg.pipeline.topology import PipelineTopology
from parlinalg.pipeline.worker import Worker

__all__ = [
    "AsynchronousWorker",
    "Chunk",
    "Instruction",
    "Op",
    "PipelineModel",
    "PipelineTopology",
    "Schedule",
    "Stage",
    "Worker",
    "build_by_hand",
    "build_pipeline_model",
    "build_pipeline_model_from_cfg",
    "complete_schedule",
    "discover",
    "make_schedule",
    "register",
    "registered",
    "split",
]

if not TYPE_CHECKING:  # names of other libraries
    __getattr__ = hints.missing(__name__)
