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
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "pb": 10**15, "pib": 2**50,
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

    >>> parse_bytes("4GiB"), parse_bytes("1.5 kB"), parse_bytes("1,023.50 KiB"), parse_bytes(100)
    (4294967296, 1500, 1048064, 100)
    """
    right = 'memory is a number of bytes of at least 0, or text such as "4GiB", "512MiB" or "100 MB"'
    if isinstance(amount, str):
        match = re.fullmatch(r"\s*((?:\d{1,3}(?:,\d{3})+|\d+)\.?\d*(?:e\d+)?)\s*([kmgtp]?i?b?)\s*", amount.lower())
        unit = match[2] if match else None
        if unit in ("k", "m", "g", "t", "p", "ki", "mi", "gi", "ti", "pi"):
            unit += "b"
        if match is None or unit not in _UNITS:
            raise ValueError(f"{right}, not {amount!r}")
        number = match[1].replace(",", "")  # as `format_bytes` writes thousands
        if not math.isfinite(float(number) * _UNITS[unit]):
            raise ValueError(f"{right}, and within the range of floats, not {brief(amount)}")
        return int(number) * _UNITS[unit] if number.isdigit() else int(float(number) * _UNITS[unit])
    if isinstance(amount, bool) or not isinstance(amount, SupportsIndex):
        raise ValueError(f"{right}, not {amount!r}")
    value = amount.__index__()
    if value < 0:
        raise ValueError(f"{right}, not {value}")
    return value


def format_bytes(n: float, *, up: bool = False) -> str:
    """Return an amount of memory as text, rounded to the nearest, or up: to no less memory than there is to be.

    >>> format_bytes(1000), format_bytes(3 * 2**20), format_bytes(3 * 2**20 + 1, up=True)
    ('1000 B', '3.00 MiB', '3.01 MiB')
    """
    if abs(n) < 2**10:
        return f"{n:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        n /= 2**10
        if abs(n) < 2**10 or unit == "PiB":
            break
    return f"{math.ceil(100 * n) / 100 if up else n:,.2f} {unit}"


def format_seconds(seconds: float) -> str:
    """Return a time as text, with three digits below a thousand seconds.

    >>> format_seconds(0.00123), format_seconds(12), format_seconds(4130), format_seconds(5e-7)
    ('1.23 ms', '12.0 s', '4,130 s', '0.500 µs')
    """
    if round(seconds) >= 1000:
        return f"{seconds:,.0f} s"
    if not seconds:
        return "0 s"
    rounded = float(f"{seconds:.3g}")  # 999.9 µs are a ms
    unit, scale = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e3)) if rounded * s >= 1), ("µs", 1e6))
    return f"{three_digits(seconds * scale)} {unit}"


def format_flops(flops: float, unit: str = "FLOP/s") -> str:
    """Return operations, by default of a second, as text.

    >>> format_flops(5.312e14), format_flops(3.4e9), format_flops(2e6, "FLOP")
    ('531 TFLOP/s', '3.40 GFLOP/s', '2.00 MFLOP')
    """
    rounded = float(f"{flops:.3g}")
    name, size = next(((n, s) for n, s in (("P", 1e15), ("T", 1e12), ("G", 1e9)) if rounded >= s), ("M", 1e6))
    return f"{three_digits(flops / size)} {name}{unit}"


def three_digits(x: float) -> str:
    """Return a number with three significant digits, and as many as it has before the point.

    >>> three_digits(5.3), three_digits(0.0123), three_digits(897.3), three_digits(18220)
    ('5.30', '0.0123', '897', '18,220')
    """
    return f"{x:,.0f}" if abs(x) >= 999.5 else f"{x:#.3g}".rstrip(".")


def format_count(n: int, noun: str) -> str:
    """Return a number of things as text.

    >>> format_count(1, "rank"), format_count(2048, "rank")
    ('1 rank', '2,048 ranks')
    """
    return f"{n:,} {noun}{'s' * (n != 1)}"
