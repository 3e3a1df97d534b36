"""DistArray: a global array in blocks over a grid, with NumPy's elementwise operations, reductions and slicing."""

from parlinalg.array.align import explicit, plan_elementwise
from parlinalg.array.bridges import asnumpy
from parlinalg.array.core import DistArray
from parlinalg.array.create import array, distribute, empty, eye, from_blocks, from_function, full, ones, zeros
from parlinalg.array.files import load, save
from parlinalg.array.printing import print0

__all__ = [
    "DistArray",
    "array",
    "asnumpy",
    "distribute",
    "empty",
    "explicit",
    "eye",
    "from_blocks",
    "from_function",
    "full",
    "load",
    "ones",
    "plan_elementwise",
    "print0",
    "save",
    "zeros",
]
