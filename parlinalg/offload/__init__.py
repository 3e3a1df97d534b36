"""Optimizer states, gradients, parameters and activations kept outside of the memory that computes on them."""

from parlinalg.offload.activations import OffloadedActivations
from parlinalg.offload.disk_states import DiskStates, recover
from parlinalg.offload.parameters import OffloadedParameters
from parlinalg.offload.plan import Offload, OffloadPlan, kept, plan
from parlinalg.offload.states import HostStates

__all__ = [
    "DiskStates", "HostStates", "Offload", "OffloadPlan", "OffloadedActivations", "OffloadedParameters",
    "kept", "plan", "recover",
]  # fmt: skip
