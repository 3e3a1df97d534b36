"""The errors users meet.  Each message gives the values at fault and says what would be right."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from types import FrameType

PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
"""The folder of parlinalg's own code."""
_PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\](numpy|scipy)?(?![^/\\])")
_STANDARD_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


class ParlinalgError(Exception):
    """Base of all errors raised on purpose by parlinalg."""


class LayoutError(ParlinalgError, ValueError):
    """A layout does not fit an operation, an array or a grid."""


class GridError(ParlinalgError, ValueError):
    """A processor grid does not fit the ranks, or arrays live on different grids."""


class PlanError(ParlinalgError, ValueError):
    """A plan of a product contradicts itself, its operands or a memory limit."""


class CommError(ParlinalgError, RuntimeError):
    """Ranks disagree about a communication, or one cannot be carried out."""


class ConfigError(ParlinalgError, ValueError):
    """A configuration has unknown keys, or values that contradict each other or the ranks."""


class ScheduleError(ConfigError):
    """A pipeline schedule cannot take the numbers given, contradicts itself, or makes ranks wait for each other."""


class EngineError(ParlinalgError, RuntimeError):
    """An engine's calls come in a wrong order, or it is given what it cannot train with."""


class CheckpointError(ConfigError):
    """A checkpoint is damaged, foreign or incomplete, does not fit, or cannot be written or read."""


class FileError(ParlinalgError, OSError):
    """An array's file cannot be written or read: missing, damaged, cut short, a full disk, no such dataset."""


class OffloadError(ParlinalgError, OSError):
    """Offloaded data cannot be written or read: a disk is full, a folder not writable, a file cut short or damaged."""


class ValuesNeeded(ParlinalgError, TypeError):
    """A program that runs on imagined arrays, which have no values, asks for values."""


def user_line(frame: FrameType | None) -> str:
    """Return `file:line` of the innermost frame outside parlinalg, NumPy, SciPy and the standard library.

    If there is none, it is the innermost frame outside parlinalg, or the outermost frame if all are inside.
    """
    last, outside = "an unknown line", ""
    here = os.getcwd() + os.sep
    while frame is not None:
        name = frame.f_code.co_filename
        last = f"{name.removeprefix(here)}:{frame.f_lineno}"
        if not name.startswith((PACKAGE, "<frozen ")):
            if not _of_a_library(name):
                return last
            outside = outside or last
        frame = frame.f_back
    return outside or last


def _of_a_library(name: str) -> bool:
    """Return True if a file is NumPy's, SciPy's or the standard library's."""
    package = _PACKAGES.search(name)
    return name.startswith(_STANDARD_LIBRARY) if package is None else package[1] is not None


def enumerated(words: Sequence[str]) -> str:
    """Return words as an enumeration.

    >>> enumerated(["a"]), enumerated(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return " and ".join([*[", ".join(words[:-1])] * (len(words) > 1), *words[-1:]])


def counted(number: int, what: str) -> str:
    """Return a count and its noun, given in the singular, which is made plural unless the count is 1.

    >>> counted(1, "rank"), counted(4, "rank")
    ('1 rank', '4 ranks')
    """
    return f"{number} {what}{'s' * (number != 1)}"


def brief(value: object, most: int = 200) -> str:
    """Return the `repr` of a value for a message, cut to `most` characters.

    >>> brief([1, 2]), brief("x" * 300, 6)
    ('[1, 2]', "'xxxxx…")
    """
    try:
        text = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deep"
    except ValueError:  # an integer of thousands of digits
        return f"a {type(value).__name__} too long to write"
    return text if len(text) <= most else f"{text[:most]}…"
