"""DistArray: a global array in blocks over a grid, with NumPy's elementwise operations, reductions and slicing."""

from parlinalg.array.align import explicit
from parlinalg.array.core import DistArray
from parlinalg.array.create import distribute, empty, eye, from_blocks, from_function, full, ones, zeros
from parlinalg.array.files import load, save

__all__ = [
    "DistArray",
    "distribute",
    "empty",
    "explicit",
    "eye",
    "from_blocks",
    "from_function",
    "full",
    "load",
    "ones",
    "save",
    "zeros",
]
