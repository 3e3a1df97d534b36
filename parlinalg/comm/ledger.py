"""The ledger: calls, words and bytes that this rank received, by operation and axes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from parlinalg.comm.base import Handle

Key = tuple[str, tuple[str, ...]]


class Book:
    """Counts of what this rank received.

    Words are elements: an all-gather or reduce-scatter of n elements receives n − own, an all-reduce 2(n − own) (`own`
    is this rank's piece), a broadcast n (0 at its root), an all-to-all what comes from others, a receive n, a send 0.

    Attributes
    ----------
    calls, words, bytes : collections.Counter
        By (operation, axes), such as `("all_gather", ("r",))`; `.total()` adds them up.
    """

    def __init__(self) -> None:
        self.calls: Counter[Key] = Counter()
        self.words: Counter[Key] = Counter()
        self.bytes: Counter[Key] = Counter()

    def note(self, op: str, axes: tuple[str, ...], words: int, size: int) -> None:
        """Add one call that receives `words` elements, `size` bytes."""
        key = (op, axes)
        self.calls[key] += 1
        self.words[key] += words
        self.bytes[key] += size

    def watch(self, op: str, axes: tuple[str, ...], began: float, handle: Handle) -> Handle:
        """Return the handle of a noted call, which began at that time; a `TimedBook` returns one that notes the end."""
        return handle

    def __str__(self) -> str:
        rows = [("operation", "axes", "calls", "words", "bytes")]
        for op, axes in sorted(self.calls):
            key = (op, axes)
            rows.append(
                (op, " ".join(axes) or "-", f"{self.calls[key]:,}", f"{self.words[key]:,}", f"{self.bytes[key]:,}")
            )
        rows.append(("total", "", f"{self.calls.total():,}", f"{self.words.total():,}", f"{self.bytes.total():,}"))
        wide = [max(len(row[c]) for row in rows) for c in range(5)]
        lines = [
            "  ".join(
                cell.ljust(w) if c < 2 else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, wide, strict=True))
            ).rstrip()
            for row in rows
        ]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


@contextmanager
def ledger(where: Any) -> Iterator[Book]:
    """Count what this rank receives while the context is open.

    Parameters
    ----------
    where : Grid or Comm
        A grid, or a communicator; everything made from the same communicator is counted.

    Yields
    ------
    Book
        `print(book)` shows a table.  Ledgers may be nested; each counts what happens while it is open.
    """
    book = Book()
    with opened(where, book):
        yield book


@contextmanager
def opened(where: Any, book: Book) -> Iterator[None]:
    """Count in a book what happens on a grid or a communicator, within a `with` block."""
    books: list[Book] = where.books if hasattr(where, "books") else where.world.books
    books.append(book)
    try:
        yield
    finally:
        books[:] = [b for b in books if b is not book]
