"""NumPy's functions beyond those of the Array API standard, which `parlinalg` exports under NumPy's names.

A name of the table below is `numpy`'s function for distributed arrays: `pla.einsum("ij,jk", A, B)` is
`np.einsum("ij,jk", A, B)`, with its signature, but refuses to run where no argument is a DistArray.  To export another
one, register it by `parlinalg.array.functions.handles` and add its name.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from parlinalg.array import functions, numpy_names  # noqa: F401  # which registers more functions
from parlinalg.array.core import DistArray
from parlinalg.array.statistics import top_k

NAMES = (
    "allclose", "angle", "append", "apply_along_axis", "argpartition", "argwhere", "around", "array_equal",
    "array_equiv", "array_split", "atleast_1d", "atleast_2d", "atleast_3d", "average", "bincount", "block", "choose",
    "column_stack", "compress", "convolve", "corrcoef", "correlate", "cov", "cross", "cumprod", "cumsum", "delete",
    "diag", "diagflat", "diagonal", "digitize", "dot", "dstack", "ediff1d", "einsum", "einsum_path", "extract",
    "fill_diagonal", "fix", "flatnonzero", "fliplr", "flipud", "gradient", "histogram", "histogram2d",
    "histogram_bin_edges", "hsplit", "hstack", "inner", "insert", "interp", "intersect1d", "isclose", "kron", "lexsort",
    "median", "nan_to_num", "nanargmax", "nanargmin", "nancumprod", "nancumsum", "nanmax", "nanmean", "nanmedian",
    "nanmin", "nanpercentile", "nanprod", "nanquantile", "nanstd", "nansum", "nanvar", "outer", "partition",
    "percentile", "piecewise", "polyval", "ptp", "put_along_axis", "quantile", "ravel", "ravel_multi_index", "resize",
    "rot90", "select", "setdiff1d", "setxor1d", "sinc", "split", "swapaxes", "transpose", "trapezoid", "trim_zeros",
    "union1d", "unique", "unravel_index", "vander", "vdot", "vsplit", "vstack",
)  # fmt: skip


def _exported(name: str) -> Callable[..., Any]:
    theirs = getattr(np, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if not _distributed((args, kwargs)):
            raise TypeError(
                f"parlinalg.{name} takes a DistArray, and none is given; make one by asarray, or use np.{name}"
            )
        return theirs(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__module__ = __name__
    summary = next((line.strip() for line in (theirs.__doc__ or "").splitlines() if line.strip()), "")
    call.__doc__ = f"Return what `numpy.{name}` does, of distributed arrays."
    if "(" not in summary:
        call.__doc__ += f"\n\n    NumPy: {summary}\n    "
    with contextlib.suppress(TypeError, ValueError):  # of functions written in C, which have none
        call.__signature__ = inspect.signature(theirs)  # type: ignore[attr-defined]
    return call


def _distributed(value: Any) -> bool:
    """Return True if there is a distributed array among the arguments: a DistArray or what holds one."""
    if isinstance(value, dict):
        return any(map(_distributed, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_distributed, value))
    return isinstance(value, DistArray) or (
        hasattr(type(value), "__array_function__") and not isinstance(value, np.ndarray)
    )


for _name in NAMES:
    assert getattr(np, _name) in functions.HANDLED, _name
    globals()[_name] = _exported(_name)

__all__ = ["top_k"]
__all__ += list(NAMES)
