"""Optimizers over flat buffers, and schedules of their learning rates."""

import pkgutil
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from parlinalg import hints
from parlinalg.optim import schedules
from parlinalg.optim.adam import Adam, AdamW
from parlinalg.optim.flat import InMemory, States
from parlinalg.optim.groups import Option, decay_groups, matrix_groups
from parlinalg.optim.layerwise import LAMB, LARS
from parlinalg.optim.muon import Muon
from parlinalg.optim.optimizer import Optimizer
from parlinalg.optim.preconditioned import SOAP, Shampoo
from parlinalg.optim.schedules import Scheduler
from parlinalg.optim.sgd import SGD

__all__ = [
    "LAMB", "LARS", "SGD", "SOAP", "Adam", "AdamW", "InMemory", "Muon", "Optimizer", "Option",
    "Scheduler", "Shampoo", "States", "decay_groups", "discover", "matrix_groups", "schedules",
]  # fmt: skip


@cache
def discover() -> dict[str, type[Optimizer]]:
    """Return the optimizers that have a `NAME`, by it, found by listing this folder."""
    modules = [import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    kinds = [each for module in modules for each in vars(module).values() if isinstance(each, type)]
    return {each.NAME: each for each in kinds if issubclass(each, Optimizer) and "NAME" in vars(each)}


if not TYPE_CHECKING:  # names of other libraries
    __getattr__ = hints.missing(__name__)
