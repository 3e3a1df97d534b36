"""Text to train a language model on, read alike by every rank."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path

import numpy as np

from parlinalg.datasets.tokens import Tokenizer, tokenizer
from parlinalg.errors import ConfigError

VALIDATION_SHARE = 0.1
BUILT_IN = "pydoc_data.topics"
BETWEEN = "\n\n"  # files, and topics of the built-in text
LETTERS = 3
"""Letters of a word at least: shorter ones occur by chance."""
_WORD = re.compile(rf"[^\W\d_]{{{LETTERS},}}")
_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Text:
    """A text as token ids, whole on every rank, in host memory.

    Attributes
    ----------
    name : str
    content : str
        All of it.
    tokenizer : Tokenizer
    train, validation : ndarray
        Ids, [n]: of the text up to a place, and of the rest.
    validation_bytes : int
        Bytes of UTF-8 in the rest.
    train_starts, validation_starts : ndarray, optional
        The starts of the documents in each, if they are kept apart.
    """

    name: str
    content: str = field(repr=False)
    tokenizer: Tokenizer
    train: np.ndarray
    validation: np.ndarray
    validation_bytes: int
    train_starts: np.ndarray | None = None
    validation_starts: np.ndarray | None = None

    @cached_property
    def words(self) -> frozenset[str]:
        """The words that occur in the text."""
        return frozenset(words_of(self.content))

    def __str__(self) -> str:
        unit = self.tokenizer.unit
        return (
            f"{self.name}: {len(self.train):,} {unit}s to train and {len(self.validation):,} to validate, vocabulary "
            f"{self.tokenizer.vocab_size:,}"
        )


def text(
    path: str | Path | None = None, tokenizer_path: str | Path | None = None, validation: float = VALIDATION_SHARE,
    *, packed: bool = False,
) -> Text:  # fmt: skip
    """Load a text of one's own, or the one that comes with Python.

    Parameters
    ----------
    path : str or Path, optional
        A file of UTF-8, or a folder of them: all files in it and below, those with hidden names left out, in the order
        of their names, with an empty line between two.  By default the documentation of the language in
        `pydoc_data.topics` of Python's standard library: half a megabyte of English, no download.
    tokenizer_path : str or Path, optional
        A `tokenizer.json`, or its folder; by default every byte is a token.
    validation : float
        The share of the text, from its end, that is kept for validation.
    packed : bool
        True if files (topics, of the built-in text) are documents of their own, with nothing between two: what
        `train_starts` and `validation_starts` tell.

    Raises
    ------
    ConfigError
        If there is nothing to read, a file is not UTF-8 or holds a zero byte (named with its place), the share leaves
        one of the two parts without text, or the text has what no token stands for.
    """
    tokens = tokenizer(tokenizer_path)
    name, documents = (BUILT_IN, topics()) if path is None else (Path(path).name or str(path), read_text(path))
    content = BETWEEN.join(documents)
    cut = len(content) - round(validation * len(content))
    parts = content[:cut], content[cut:]
    if not all(parts):
        raise ConfigError(
            f"{name}: a share of {validation} of {len(content)} characters leaves {len(parts[0])} to train and "
            f"{len(parts[1])} to validate; both need some"
        )
    if not packed:
        train, held = (tokens.encode(part) for part in parts)
        return Text(name, content, tokens, train, held, len(parts[1].encode()))
    before, after = _divided(documents, cut)
    (train, starts), (held, held_starts) = _encoded(tokens, before), _encoded(tokens, after)
    return Text(name, content, tokens, train, held, sum(len(d.encode()) for d in after), starts, held_starts)


def _divided(documents: list[str], cut: int) -> tuple[list[str], list[str]]:
    """Return the documents up to a character of the content, and from it on; one may be in both."""
    before, after, start = [], [], 0
    for document in documents:
        at = min(max(0, cut - start), len(document))
        before.append(document[:at])
        after.append(document[at:])
        start += len(document) + len(BETWEEN)
    return [d for d in before if d], [d for d in after if d]


def _encoded(tokens: Tokenizer, documents: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of documents one after the other, and where each begins."""
    ids = [tokens.encode(document) for document in documents]
    lengths = [len(i) for i in ids]
    return np.concatenate(ids), np.cumsum([0, *lengths[:-1]])


def topics() -> list[str]:
    """Return the built-in text: the topics of Python's `help()`, in the order of their names."""
    try:
        found: dict[str, str] = import_module(BUILT_IN).topics
    except ImportError as error:
        raise ConfigError(
            f"this Python comes without {BUILT_IN}, the built-in text: give data=dict(name='text', path='FILE')"
        ) from error
    *some, last = (found[name].strip() for name in sorted(found))
    return [*some, last + "\n"]


def read_text(path: str | Path) -> list[str]:
    """Return the content of a file of UTF-8, or of each file of a folder; see `text`."""
    place = Path(path)
    if place.is_file():
        return [_decoded(place)]
    if not place.is_dir():
        raise ConfigError(f"there is no text {str(path)!r} (looked in {Path.cwd()}): give a file or a folder")
    names = sorted(f.relative_to(place) for f in place.rglob("*") if f.is_file())
    files = [place / n for n in names if not any(part.startswith(".") for part in n.parts)]
    if not files:
        raise ConfigError(f"the folder {str(path)!r} holds no files to read text from")
    return [_decoded(file) for file in files]


def _decoded(file: Path) -> str:
    data = file.read_bytes()
    start = len(_MARK) if data.startswith(_MARK) else 0
    if (zero := data.find(b"\0")) >= 0:
        raise ConfigError(f"{file} is not text: it holds a zero byte at offset {zero:,} of {len(data):,}")
    try:
        return data[start:].decode()
    except UnicodeDecodeError as error:
        at = start + error.start
        raise ConfigError(
            f"{file} is not UTF-8: {error.reason} (0x{data[at]:02x}) at byte offset {at:,} of {len(data):,}; leave the "
            "file out, or write it anew as UTF-8"
        ) from error


def words_of(text: str) -> list[str]:
    """Return the words of at least three letters, in order and as written.

    >>> words_of("An if_clause, in 3.11: Guido's")
    ['clause', 'Guido']
    """
    return _WORD.findall(text)


def known_share(text: str, known: Collection[str]) -> tuple[float, int]:
    """Return the share of a text's words that are known, and their number; 0 where there is none."""
    found = words_of(text)
    return sum(word in known for word in found) / max(1, len(found)), len(found)
