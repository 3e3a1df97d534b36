"""What CuPy offers, as `record.py` wrote it down beside this file."""

from __future__ import annotations

import inspect
from pathlib import Path

FUNCTIONS: dict[str, inspect.Signature] = {}
METHODS: dict[str, inspect.Signature] = {}
UFUNCS: dict[str, tuple[int, int, list[str]]] = {}  # inputs, outputs, loops, in the order in which they are tried
SAME: set[str] = set()  # classes and constants that are NumPy's own

DTYPES = "?bhilqBHILQefdFDE"  # E: bfloat16


def _load() -> None:
    for line in (Path(__file__).parent / "api.txt").read_text().splitlines():
        kind, name, rest = (line + "  ").split(" ", 2)
        if kind in ("function", "method"):
            table = FUNCTIONS if kind == "function" else METHODS
            table[name] = inspect.signature(eval(f"lambda {rest.strip()[1:-1]}: None"))
        elif kind == "ufunc":
            inputs, outputs, loops = rest.split()
            UFUNCS[name] = (int(inputs), int(outputs), loops.split(","))
        elif kind == "same":
            SAME.add(name)


def check_call(what: str, signature: inspect.Signature, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Refuse arguments that CuPy's function of this name does not have, such as `where=` in sums."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"cupy.{what}{signature}: {error}".replace("=0", "=…")) from None


_load()
