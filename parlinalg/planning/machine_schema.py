"""The tables of a machine's file: checks of their values, parsing them into objects, and writing them.  Pure."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass
from typing import Any, TypeVar

from parlinalg.errors import ConfigError, brief
from parlinalg.units import parse_bytes

Check = Callable[[str, Any], Any]


def wrong(where: str, value: object, right: str) -> ConfigError:
    """Return the error of a figure, with what would be right."""
    return ConfigError(f"{where} = {brief(value)}: it should be {right}")


def number(low: float, high: float, what: str, *, above: bool = False, such: str = "") -> Check:
    """Return a check of a number from `low` (`above`: not `low` itself) to `high`; `such` is an example."""
    bounds = f"{'more than' if above else 'at least'} {low:g} and at most {high:g}"
    bounds += f", such as {such}" if such else ""

    def check(where: str, value: Any) -> float:
        infinite = isinstance(value, float) and not math.isfinite(value)  # a whole number may be beyond the floats
        if isinstance(value, bool) or not isinstance(value, int | float) or infinite:
            raise wrong(where, value, f"a number ({what}), {bounds}")
        if not low <= value <= high or (above and value == low):
            raise wrong(where, value, f"{what}, {bounds}")
        return float(value)

    return check


def whole(low: int, high: int, what: str) -> Check:
    """Return a check of a whole number from `low` to `high`."""

    def check(where: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise wrong(where, value, f"{what}, a whole number from {low} to {high:g}")
        return value

    return check


def word(*words: str) -> Check:
    """Return a check of one of some words; of any text that is not empty if none are given."""

    def check(where: str, value: Any) -> str:
        if not isinstance(value, str) or not value.strip() or (words and value not in words):
            right = "one of " + ", ".join(f'"{w}"' for w in words) if words else "a text that is not empty"
            raise wrong(where, value, right)
        return value

    return check


def room(what: str) -> Check:
    """Return a check of an amount of bytes from 1 MiB to 1 PiB."""

    def check(where: str, value: Any) -> int:
        try:
            found = parse_bytes(value)
        except ValueError:
            found = 0
        if not 1 << 20 <= found <= 1 << 50:
            raise wrong(where, value, f'{what} of a rank, such as "80GB" or "4GiB", from 1 MiB to 1 PiB')
        return found

    return check


def _row(where: str, value: Any, columns: Sequence[Check]) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) != len(columns):
        raise wrong(where, value, f"a list of {len(columns)} numbers")
    return tuple(check(f"{where}[{i}]", v) for i, (check, v) in enumerate(zip(columns, value, strict=True)))


def points(*columns: Check) -> Check:
    """Return a check of a list of rows, each with these columns."""

    def check(where: str, value: Any) -> tuple[tuple[Any, ...], ...]:
        if not isinstance(value, list):
            raise wrong(where, value, f"a list of rows of {len(columns)} numbers")
        return tuple(_row(f"{where}[{i}]", row, columns) for i, row in enumerate(value))

    return check


def rising(*columns: Check) -> Check:
    """Return a check of a list of rows, which are put in the order of their first column."""
    check = points(*columns)
    return lambda where, value: tuple(sorted(check(where, value)))


def numbers(*columns: Check) -> Check:
    """Return a check of one row."""
    return lambda where, value: _row(where, value, columns)


def table(check: Check) -> Check:
    """Return a check of a table with any keys, whose values this check takes."""

    def checked(where: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong(where, value, "a table")
        return {name: check(f"{where}.{name}", v) for name, v in value.items()}

    return checked


def many(check: Check) -> Check:
    """Return a check of a list that is not empty, each of whose values this check takes."""

    def checked(where: str, value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not value:
            raise wrong(where, value, "a list of one or more")
        return tuple(check(f"{where}[{i}]", v) for i, v in enumerate(value))

    return checked


def boolean(where: str, value: Any) -> bool:
    """Check that a value is true or false."""
    if not isinstance(value, bool):
        raise wrong(where, value, "true or false")
    return value


T = TypeVar("T")


def key(check: Check, doc: str, default: Any = MISSING) -> Any:
    """Declare a key of a machine's file."""
    about = {"check": check, "doc": doc}
    if isinstance(default, Mapping):
        return field(default_factory=lambda: default, metadata=about)
    return field(default=default, metadata=about)


def read(kind: type[T], where: str, value: Any) -> T:
    """Return the object that a table stands for.

    Raises
    ------
    ConfigError
        If a key is missing, unknown, or has a wrong value; it names the file, the key, the value and what is right.
    """
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    if not isinstance(value, dict):
        raise wrong(where, value, f"a table with keys among {', '.join(known)}")
    top = where.endswith(":")
    inside = f"{where} " if top else f"{where}."
    for name in value:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{inside}{name} is no key of a machine{hint}; known here are {', '.join(known)}")
    made = {}
    for name, f in known.items():
        if name in value:
            made[name] = f.metadata["check"](f"{inside}{name}", value[name])
        elif f.default is MISSING and f.default_factory is MISSING:
            doc = f.metadata["doc"]
            place = "; it stands above the first [table]" if top and not doc.startswith("a table") else ""
            raise ConfigError(f"{inside}{name} is missing: {doc}{place}")
    return kind(**made)


def lines_of(made: Any, name: str) -> list[str]:
    """Return the keys of a table, then the tables inside it."""
    pairs = [(f.name, getattr(made, f.name)) for f in fields(made)] if is_dataclass(made) else list(made.items())
    defaults = {f.name: f.default for f in fields(made)} if is_dataclass(made) else {}
    flat: list[tuple[str, Any]] = []
    inner: list[tuple[str, Any]] = []
    for k, value in pairs:
        if value is None or value == {} or (k in defaults and value == defaults[k]):
            continue
        is_table = isinstance(value, Mapping) or (is_dataclass(value) and not isinstance(value, type))
        (inner if is_table else flat).append((k, value))
    lines = [f"{_quoted(k)} = {_value(value)}" for k, value in flat]
    if name and (lines or not inner):
        lines = ["", f"[{name}]", *lines]
    for k, value in inner:
        lines += lines_of(value, f"{name}.{_quoted(k)}" if name else _quoted(k))
    return lines


def _quoted(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return str(int(value)) if value == int(value) and abs(value) < 1e6 else f"{value:.6g}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if is_dataclass(value):
        kept = [(f.name, getattr(value, f.name)) for f in fields(value) if getattr(value, f.name) != f.default]
        return "{ " + ", ".join(f"{k} = {_value(v)}" for k, v in kept) + " }"
    if value and (isinstance(value[0], tuple) or is_dataclass(value[0])):
        return "[\n" + "".join(f"    {_value(v)},\n" for v in value) + "]"
    return "[" + ", ".join(_value(v) for v in value) + "]"
