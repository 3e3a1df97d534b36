"""Checks of configurations: keys, types and ranges, with messages that say what would be right.  Pure.

A check takes where a value stands (such as "parallel.tensor.size") and the value, and returns the value in the form
the library uses.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import Any

from parlinalg import hints
from parlinalg.errors import ConfigError, brief

Check = Callable[[str, Any], Any]
MOST = 1 << 53  # the largest number that is counted: float64 has all up to here


@dataclass(frozen=True)
class Choice:
    """One of several things that a configuration may name, such as an optimizer, and its options."""

    name: str
    options: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.options.items())})"


def refuse(where: str, value: object, right: str) -> ConfigError:
    """The error of a value that is not what it should be."""
    return ConfigError(f"{where} must be {right}, not {brief(value)}")


def check_keys(where: str, given: Iterable[object], known: Iterable[str]) -> None:
    """Raise a ConfigError that names the first unknown key, the nearest right one, and all that are known."""
    keys = list(known)
    for key in given:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1)
            hint = hints.key_hint(str(key)) or (f"did you mean {near[0]!r}?  " if near else "")
            raise ConfigError(f"{where} has an unknown key {key!r}: {hint}The known ones are {', '.join(keys)}")


def section(where: str, given: object, checks: Mapping[str, Check]) -> dict[str, Any]:
    """A dict with every key known and every value checked; keys left out stay out."""
    if not isinstance(given, Mapping):
        raise refuse(where, given, f"a dict with the keys {', '.join(checks)}")
    check_keys(where, given, checks)
    return {key: checks[key](f"{where}.{key}", given[key]) for key in checks if key in given}


def choice(kinds: Mapping[str, Mapping[str, Check]], default: str | None = None) -> Check:
    """A check of a dict whose `name` says which of `kinds` it is, and with it which options there are.

    A name alone stands for the dict without options.
    """

    def check(where: str, value: Any) -> Choice:
        given = {"name": value} if isinstance(value, str) else value
        if not isinstance(given, Mapping):
            raise refuse(where, value, f"a dict with a name, one of {listed(kinds)}")
        name = given.get("name", default)
        if name is None:
            raise ConfigError(f"{where} needs a name, one of {listed(kinds)}")
        if not isinstance(name, str) or name not in kinds:
            raise refuse(f"{where}.name", name, f"one of {listed(kinds)}")
        options = {key: v for key, v in given.items() if key != "name"}
        check_keys(f"{where} ({name})", options, kinds[name])
        return Choice(name, {key: kinds[name][key](f"{where}.{key}", v) for key, v in options.items()})

    return check


def whole(least: int, most: int = MOST) -> Check:
    """A check of a whole number of at least `least` and at most `most`."""

    def check(where: str, value: Any) -> int:
        try:
            found = None if isinstance(value, bool) else index(value)
        except TypeError:
            found = None
        if found is None or not least <= found <= most:
            above = most != MOST or (found is not None and found > most)
            raise refuse(where, value, f"a whole number of at least {least}" + f" and at most {most:,}" * above)
        return found

    return check


def real(least: float, most: float = math.inf, *, above: bool = False, below: bool = False) -> Check:
    """A check of a number from `least` to `most`; `above` and `below` exclude these themselves."""
    lower = f"above {least:g}" if above else f"of at least {least:g}"
    upper = "" if most == math.inf else f" and below {most:g}" if below else f" and at most {most:g}"

    def check(where: str, value: Any) -> float:
        good, number = not isinstance(value, bool) and hasattr(value, "__float__"), math.nan
        with suppress(TypeError, ValueError, OverflowError):
            number = float(value) if good else number
        edge = (above and number == least) or (below and number == most)
        if not math.isfinite(number) or not least <= number <= most or edge:
            raise refuse(where, value, f"a number {lower}{upper}")
        return number

    return check


def flag(where: str, value: Any) -> bool:
    """A check of True or False."""
    if value is not True and value is not False:
        raise refuse(where, value, "True or False")
    return value


def text(where: str, value: Any) -> str:
    """A check of a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise refuse(where, value, "a text")
    return value


def one_of(*values: object) -> Check:
    """A check of one of a few values."""

    def check(where: str, value: Any) -> Any:
        if not any(value is v or (type(value) is type(v) and value == v) for v in values):
            raise refuse(where, value, f"one of {listed(values)}")
        return value

    return check


def several(check: Check, length: int | None = None, least: int = 0) -> Check:
    """A check of a sequence whose every item passes `check`."""

    def check_all(where: str, value: Any) -> tuple[Any, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise refuse(where, value, "a list or tuple" + (f" of {length}" if length else ""))
        if (length is not None and len(value) != length) or len(value) < least:
            raise refuse(where, value, f"a list or tuple of {length or f'at least {least}'}")
        return tuple(check(f"{where}[{i}]", item) for i, item in enumerate(value))

    return check_all


def optional(check: Check) -> Check:
    """A check that also takes None."""

    def check_or_none(where: str, value: Any) -> Any:
        return None if value is None else check(where, value)

    return check_or_none


def listed(values: Iterable[object]) -> str:
    """Values for people: "'a', 'b' or 'c'"."""
    texts = [repr(v) for v in values]
    return " or ".join(filter(None, [", ".join(texts[:-1]), texts[-1]])) if texts else "nothing"
