"""DistArray: a global array in blocks over a grid, with NumPy's elementwise operations, reductions and slicing."""

from parlinalg.array.core import DistArray
from parlinalg.array.create import distribute, empty, eye, from_blocks, from_function, full, ones, zeros

__all__ = ["DistArray", "distribute", "empty", "eye", "from_blocks", "from_function", "full", "ones", "zeros"]
