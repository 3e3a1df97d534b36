"""Gradients across ranks: summed in buckets during the backward pass, sharded (ZeRO), and clipped.

A model trains by ZeRO, stage 1 or 2, so:

    GradientReducer(model.parameters(), [ZeRO(stage=2)])
    optimizer = AdamW(model.parameters(), master=True)
    ...
    loss.backward()   # reduce-scatters the gradients
    optimizer.step()  # updates this rank's shards, and all-gathers the values
"""

from typing import TYPE_CHECKING

from parlinalg import hints
from parlinalg.parallel.clip import clip_gradient_norm, clip_gradient_value, examine, gradient_norm
from parlinalg.parallel.gatherer import WeightGatherer
from parlinalg.parallel.handlers import DataParallel, SequenceParallel, SharedParameters, ZeRO
from parlinalg.parallel.memory import ActivationMemory, table
from parlinalg.parallel.precision import LossScaler, overflowing
from parlinalg.parallel.reducer import GradientReducer

__all__ = [
    "ActivationMemory", "DataParallel", "GradientReducer", "LossScaler", "SequenceParallel", "SharedParameters",
    "WeightGatherer", "ZeRO", "clip_gradient_norm", "clip_gradient_value", "examine", "gradient_norm", "overflowing",
    "table",
]  # fmt: skip

if not TYPE_CHECKING:  # names of other libraries
    __getattr__ = hints.missing(__name__)
