"""`cupy.linalg`: NumPy's functions, with CuPy's names and parameters only, its silence about failures and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupyx
import numpy as np

from . import _api, _functions
from ._array import ndarray, wrap

FAILS = {"cholesky": ("potrf", 0), "inv": ("getrf", 0), "solve": ("getrf", 1)}
"""Functions of which CuPy ignores what cuSOLVER reports: the routine, and the argument whose shape the result has."""
BATCHED = 256
"""The most rows for which `solve` of stacks calls cuBLAS once."""
JACOBI = 32
"""The most rows for which Jacobi's method, of which CuPy has eigenvectors of stacks, is as exact as LAPACK here."""


def __getattr__(name: str) -> Any:
    if f"linalg.{name}" not in _api.FUNCTIONS:
        raise AttributeError(f"module 'cupy.linalg' has no attribute {name!r}")
    function = _functions.function(f"linalg.{name}")
    if name in FAILS:
        return _silent(name, function)
    return SPECTRAL[name](function) if name in SPECTRAL else function


def _silent(name: str, function: Any) -> Any:
    routine, like = FAILS[name]

    def device_function(*args: Any) -> Any:
        if name == "solve":
            _refuse_sides(*args)
        try:
            return function(*args)
        except np.linalg.LinAlgError as error:
            if "dim" in str(error):  # of shapes
                raise
            if cupyx._linalg() == "raise":
                batched, library = ("Batched", "cuBLAS") if args[0].ndim > 2 else ("", "cuSOLVER")
                raise np.linalg.LinAlgError(
                    f"Error reported by d{routine}{batched} in {library}. infoArray/devInfoArray = [1]. Please refer "
                    f"to the {library} documentation."
                ) from None
            return wrap(np.full(args[like].shape, np.nan, args[0].dtype))

    device_function.__name__ = name
    return device_function


def _refuse_sides(a: Any, b: Any) -> None:
    """Refuse what `cupy.linalg.solve` refuses of right-hand sides: other stacks than of matrices, and none at all."""
    if isinstance(a, ndarray) and isinstance(b, ndarray) and b.ndim > 1:
        if a.shape[:-1] != b.shape[:-1]:
            raise ValueError("a must have (..., M, M) shape and b must have (..., M, K) for multidimensional b")
        if a.ndim > 2 and a.shape[-1] <= BATCHED and a.size and not b.size:
            raise ZeroDivisionError("division by zero")


def _noise(x: np.ndarray, size: float) -> np.ndarray:
    """Return x with relative errors of this size."""
    errors = np.random.default_rng(0).uniform(-size, size, x.shape)
    return (x * (1 + errors)).astype(x.dtype)


def _unscaled(a: np.ndarray) -> float:
    """Return the relative error of what is made of matrices whose squares leave the range: cuSOLVER scales none."""
    limits, largest = np.finfo(a.dtype), float(np.abs(a).max(initial=0))
    small = float(limits.tiny) ** 0.5 / float(limits.eps)
    return 0.0 if not largest or small <= largest <= 1 / small else 1e4 * len(a) * float(limits.eps)


def _svd(function: Any) -> Callable[..., Any]:
    def svd(a: Any, full_matrices: bool = True, compute_uv: bool = True) -> Any:
        found = function(a, full_matrices, compute_uv)
        if not (error := _unscaled(a._a)):
            return found
        return tuple(wrap(_noise(x._a, error)) for x in found) if compute_uv else wrap(_noise(found._a, error))

    return svd


def _eigh(function: Any) -> Callable[..., Any]:
    def eigh(a: Any, UPLO: str = "L") -> Any:
        w, v = function(a, UPLO)
        n, error = a.shape[-1], _unscaled(a._a)
        if a.ndim > 2 and n > JACOBI:
            error = max(error, 30 * n * float(np.finfo(a.dtype).eps))
        return (w, v) if not error else (w, wrap(_noise(v._a, error)))

    return eigh


def _eigvalsh(function: Any) -> Callable[..., Any]:
    def eigvalsh(a: Any, UPLO: str = "L") -> Any:
        w, error = function(a, UPLO), _unscaled(a._a)
        return w if not error else wrap(_noise(w._a, error))

    return eigvalsh


SPECTRAL = {"svd": _svd, "eigh": _eigh, "eigvalsh": _eigvalsh}
