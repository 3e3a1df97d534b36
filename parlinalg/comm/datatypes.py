"""What MPI calls the elements of blocks, and the sums of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from parlinalg.comm.base import Block
from parlinalg.errors import CommError

CARRIERS: dict[int, MPI.Datatype] = {
    1: MPI.UINT8_T,
    2: MPI.UINT16_T,
    4: MPI.UINT32_T,
    8: MPI.UINT64_T,
    16: MPI.C_DOUBLE_COMPLEX,
}
"""By item size, the datatype that moves elements of any dtype."""

NUMBERS: dict[str, MPI.Datatype] = {
    "float32": MPI.FLOAT,
    "float64": MPI.DOUBLE,
    "complex64": MPI.C_FLOAT_COMPLEX,
    "complex128": MPI.C_DOUBLE_COMPLEX,
    "int8": MPI.INT8_T,
    "int16": MPI.INT16_T,
    "int32": MPI.INT32_T,
    "int64": MPI.INT64_T,
    "uint8": MPI.UINT8_T,
    "uint16": MPI.UINT16_T,
    "uint32": MPI.UINT32_T,
    "uint64": MPI.UINT64_T,
    "bool": MPI.UINT8_T,
}
"""The dtypes MPI can reduce; booleans have max and min only."""

SATURATES = MPI.get_vendor()[0] == "Open MPI"
"""True if the MPI library's sums of 8- and 16-bit integers may stop at the largest one, as Open MPI's AVX kernels do
(https://github.com/open-mpi/ompi/issues/8045)."""

REDUCTIONS: dict[str, MPI.Op] = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}

_number_of: dict[Any, MPI.Datatype] = {}


def number(dtype: Any) -> MPI.Datatype:
    """The MPI datatype that reduces `dtype`."""
    known = _number_of.get(dtype)
    if known is None:
        if dtype.name not in NUMBERS:
            raise CommError(
                f"MPI cannot reduce arrays of dtype {dtype}; it can reduce {', '.join(NUMBERS)}, float16 and bfloat16"
            )
        known = _number_of[dtype] = NUMBERS[dtype.name]
    return known


def carrier(block: Block) -> MPI.Datatype:
    """The MPI datatype that moves the elements of `block`."""
    if block.dtype.hasobject or block.itemsize not in CARRIERS:
        raise CommError(
            f"arrays of dtype {block.dtype} cannot be sent; convert to a number type of 1, 2, 4, 8 or 16 bytes"
        )
    return CARRIERS[block.itemsize]


def lies_in(whole: Block, at: int, part: Block) -> bool:
    """Whether a part of a block lies in it, from element `at` on."""
    if part.base is None or not (part.base is whole or part.base is whole.base):
        return False
    if isinstance(whole, np.ndarray):
        return bool(part.ctypes.data == whole.ctypes.data + at * whole.itemsize)
    return bool(part.data.ptr == whole.data.ptr + at * whole.itemsize)
