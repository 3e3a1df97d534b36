"""Optimizers over flat buffers, and schedules of their learning rates."""

from typing import TYPE_CHECKING

from parlinalg import hints
from parlinalg.optim import schedules
from parlinalg.optim.adam import Adam, AdamW
from parlinalg.optim.flat import FlatParameters, InMemory, States
from parlinalg.optim.groups import Option, decay_groups
from parlinalg.optim.layerwise import LAMB, LARS
from parlinalg.optim.optimizer import Optimizer
from parlinalg.optim.schedules import Scheduler
from parlinalg.optim.sgd import SGD

__all__ = [
    "LAMB", "LARS", "SGD", "Adam", "AdamW", "FlatParameters", "InMemory", "Optimizer", "Option", "Scheduler", "States",
    "decay_groups", "schedules",
]  # fmt: skip

if not TYPE_CHECKING:  # names of other libraries
    __getattr__ = hints.missing(__name__)
