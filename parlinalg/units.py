"""Bytes of dtypes, and amounts of memory as people write them.  Pure."""

from __future__ import annotations

import math
import re
from typing import SupportsIndex

from parlinalg.errors import brief

ITEMSIZE = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip
_PYTHON_NAMES = {"float": "float64", "int": "int64", "complex": "complex128"}
_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype given as text, a NumPy dtype or a type.

    Raises
    ------
    ValueError
        If the dtype is unknown; the message lists the known ones.

    >>> dtype_name("float32"), dtype_name(float)
    ('float32', 'float64')
    """
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    name = _PYTHON_NAMES.get(name, name) if isinstance(name, str) else None
    if name not in ITEMSIZE:
        raise ValueError(f"unknown dtype {dtype!r}; it may be one of {', '.join(ITEMSIZE)}")
    return str(name)


def parse_bytes(amount: SupportsIndex | str) -> int:
    """Return an amount of memory in bytes, given as a number of bytes or as text such as "4GiB", "512 MB" or "1.5e9".

    Raises
    ------
    ValueError
        If it is neither, or negative.

    >>> parse_bytes("4GiB"), parse_bytes("1.5 kB"), parse_bytes(100)
    (4294967296, 1500, 100)
    """
    right = 'memory is a number of bytes of at least 0, or text such as "4GiB", "512MiB" or "100 MB"'
    if isinstance(amount, str):
        match = re.fullmatch(r"\s*(\d+\.?\d*(?:e\d+)?)\s*([kmgt]?i?b?)\s*", amount.lower())
        unit = match[2] if match else None
        if unit in ("k", "m", "g", "t", "ki", "mi", "gi", "ti"):
            unit += "b"
        if match is None or unit not in _UNITS:
            raise ValueError(f"{right}, not {amount!r}")
        number = match[1]
        if not math.isfinite(float(number) * _UNITS[unit]):
            raise ValueError(f"{right}, and within the range of floats, not {brief(amount)}")
        return int(number) * _UNITS[unit] if number.isdigit() else int(float(number) * _UNITS[unit])
    if isinstance(amount, bool) or not isinstance(amount, SupportsIndex):
        raise ValueError(f"{right}, not {amount!r}")
    value = amount.__index__()
    if value < 0:
        raise ValueError(f"{right}, not {value}")
    return value


def format_bytes(n: float) -> str:
    """Return an amount of memory as text.

    >>> format_bytes(1000), format_bytes(3 * 2**20)
    ('1000 B', '3.00 MiB')
    """
    if abs(n) < 2**10:
        return f"{n:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        n /= 2**10
        if abs(n) < 2**10:
            return f"{n:.2f} {unit}"
    return f"{n / 2**10:.2f} TiB"
