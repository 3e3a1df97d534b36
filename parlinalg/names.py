"""Saved arrays against those that are wanted, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from parlinalg.errors import ConfigError

Shape = tuple[int, ...]


def check_names(what: str, want: Mapping[str, Shape], have: Mapping[str, Shape]) -> None:
    """Raise a ConfigError that lists every name that is missing, unexpected or misshapen in `have`, got from `what`."""
    faults = [
        _listed("missing", (n for n in want if n not in have)),
        _listed("unexpected", (n for n in have if n not in want)),
        _listed("misshapen", (f"{n} {have[n]} instead of {s}" for n, s in want.items() if have.get(n, s) != s)),
    ]
    if any(faults):
        raise ConfigError(f"{what} does not fit: {'; '.join(f for f in faults if f)}")


def _listed(fault: str, names: Iterable[str]) -> str:
    found = list(names)
    return f"{fault}: {', '.join(found)}" if found else ""
