"""The environment variables that parlinalg reads, and what they may be.  Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches

SWITCH = ("0", "1")

ALLOWED: dict[str, tuple[str, ...] | str] = {
    "PARLINALG_CHECK": SWITCH,
    "PARLINALG_COMPILED": SWITCH,
    "PARLINALG_CUDA_AWARE_MPI": SWITCH,
    "PARLINALG_EXPLICIT": SWITCH,
    "PARLINALG_MAX_COUNT": "a whole number of elements from 1 to 2147483647",
    "PARLINALG_MPI": SWITCH,
    "PARLINALG_NCCL": ("0", "1", "auto"),
    "PARLINALG_SHARED": SWITCH,
    "PARLINALG_TIMEOUT": "a number of seconds, or 0 for no limit",
}
"""The values of each variable; of numbers, in words."""

OTHERS = ("PARLINALG_TEST_", "PARLINALG_CLUSTER")
"""Variables of the tests and benchmarks begin so."""


def wrong_setting(environ: Mapping[str, str] | None = None) -> str:
    """Return the fault of the values of parlinalg's variables; an empty text if there is none.

    A variable that is set to nothing counts as not set.

    >>> wrong_setting({"PARLINALG_CHECK": "yes"})
    "PARLINALG_CHECK='yes' is not one of '0', '1'"
    """
    env = os.environ if environ is None else environ
    for name, allowed in ALLOWED.items():
        text = env.get(name, "")
        if text and isinstance(allowed, tuple) and text not in allowed:
            return f"{name}={text!r} is not one of {', '.join(map(repr, allowed))}"
        if text and isinstance(allowed, str) and not _number(name, text):
            return f"{name}={text!r} should be {allowed}"
    return ""


def unknown_settings(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return a sentence about each variable that begins with PARLINALG_ and is not one of parlinalg's.

    >>> unknown_settings({"PARLINALG_TIMEOUTS": "3"})
    ['PARLINALG_TIMEOUTS is not a variable of parlinalg; did you mean PARLINALG_TIMEOUT?']
    """
    env = os.environ if environ is None else environ
    sentences = []
    for name in sorted(env):
        if name.startswith("PARLINALG_") and name not in ALLOWED and not name.startswith(OTHERS):
            near = get_close_matches(name, ALLOWED, 1, 0.8)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(ALLOWED)}"
            sentences.append(f"{name} is not a variable of parlinalg; {hint}")
    return sentences


def _number(name: str, text: str) -> bool:
    if name == "PARLINALG_MAX_COUNT":
        return text.isdecimal() and 1 <= int(text) <= 2**31 - 1
    try:
        return 0 <= float(text) < float("inf")
    except ValueError:
        return False
