"""Pipelines: the layers of a model on ranks that follow one another, and microbatches that pass through them."""

from parlinalg.pipeline.schedule import Chunk, Instruction, Op, Schedule
from parlinalg.pipeline.schedules import discover, make

__all__ = ["Chunk", "Instruction", "Op", "Schedule", "discover", "make"]
