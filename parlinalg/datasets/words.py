"""Words in a text: how much of what a model writes are words that it has read."""

from __future__ import annotations

import re
from collections.abc import Collection

LETTERS = 3  # shorter words occur by chance
_WORD = re.compile(rf"[^\W\d_]{{{LETTERS},}}")


def words(text: str) -> list[str]:
    """The words of at least three letters, in their order and as they are written.

    >>> words("An if_clause, in 3.11: Guido's")
    ['clause', 'Guido']
    """
    return _WORD.findall(text)


def known_share(text: str, known: Collection[str]) -> tuple[float, int]:
    """The share of a text's words that are known, and their number; 0 where there is none."""
    found = words(text)
    return sum(word in known for word in found) / max(1, len(found)), len(found)
