"""Reverse-mode differentiation of computations on distributed arrays."""

from parlinalg.autograd import functions, linalg, ops
from parlinalg.autograd.check import check_gradients
from parlinalg.autograd.parameter import Buffer, Parameter, settle
from parlinalg.autograd.recompute import recompute
from parlinalg.autograd.rule import Part, saved_arrays_hooks
from parlinalg.autograd.storage import Owner, ParameterStorage, Partition, StorageBytes
from parlinalg.autograd.tape import Reducer, no_grad, no_sync, recording
from parlinalg.autograd.tensor import Tensor, as_tensor, matmul, record, redistribute, start_walk

__all__ = [
    "Buffer", "Owner", "Parameter", "ParameterStorage", "Part", "Partition", "Reducer", "StorageBytes", "Tensor",
    "as_tensor", "check_gradients", "functions", "linalg", "matmul", "no_grad", "no_sync", "ops", "record", "recompute",
    "recording", "redistribute", "saved_arrays_hooks", "settle", "start_walk",
]  # fmt: skip
