"""Text to token ids and back: bytes, or the tokenizer of a `tokenizer.json` file."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from parlinalg.errors import ConfigError
from parlinalg.files import read_json

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer(Protocol):
    """A tokenizer: text to ids from 0 to `vocab_size` − 1, and back.

    Attributes
    ----------
    unit : str
        The unit of an id, for messages: "byte" or "token".
    """

    unit: str

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        """Return the ids of a text, [n]; with `special` those that the tokenizer sets around a text too."""
        ...

    def decode(self, ids: Any) -> str:
        """Return the text of ids, without special ones; bytes that are no UTF-8 become U+FFFD."""
        ...

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json`, which Hugging Face's `tokenizers` and `transformers` read."""
        ...


class Bytes:
    """Every byte of UTF-8 is a token: 256 of them, and nothing to install."""

    unit = "byte"
    vocab_size = 256

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Any) -> str:
        # a model may know more ids than there are bytes: 255 is in no UTF-8
        return np.minimum(ids, 255).astype(np.uint8).tobytes().decode(errors="replace")

    def save(self, folder: Path) -> None:
        (folder / TOKENIZER_FILE).write_text(
            json.dumps(byte_file(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )


class FromFile:
    """The tokenizer of a `tokenizer.json`, by Hugging Face's `tokenizers`.

    Texts are never cut or padded, whatever lengths the file asks for.  What it saves sets no special tokens around a
    text, since the model saved with it has seen none.

    Raises
    ------
    ConfigError
        If the file is no tokenizer, the package is not installed, or (of `encode`) a text has what no token stands for.
    """

    unit = "token"

    def __init__(self, file: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                f"{file} needs the package tokenizers, which is not installed: pip install 'parlinalg[text]'"
            ) from error
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the package raises Exception itself
            raise ConfigError(f"{file} cannot be read as a tokenizer: {error}") from error
        self._file = file
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def vocab_size(self) -> int:
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, *, special: bool = False) -> np.ndarray:
        try:
            found = self._tokenizer.encode(text, add_special_tokens=special)
        except Exception as error:  # as above
            raise ConfigError(f"{self._file} cannot make tokens of the text: {error}") from error
        return np.array(found.ids, np.int32)

    def decode(self, ids: Any) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        content = {**json.loads(self._tokenizer.to_str()), "post_processor": None}
        (folder / TOKENIZER_FILE).write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def tokenizer(path: str | Path | None = None) -> Tokenizer:
    """Load the tokenizer of a `tokenizer.json`, or of the folder it is in; without a path, return one of bytes.

    Raises
    ------
    ConfigError
        If there is no such file, it is no tokenizer, or `tokenizers` is not installed; a file that `Bytes` wrote needs
        no package.
    """
    if path is None:
        return Bytes()
    file = Path(path) / TOKENIZER_FILE if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ConfigError(f"there is no tokenizer {str(file)!r}: give a tokenizer.json, or nothing to train on bytes")
    try:
        content = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as a tokenizer: it is not JSON ({error})") from error
    return Bytes() if content == byte_file() else FromFile(file)


@cache
def byte_file() -> dict[str, Any]:
    """Return a `tokenizer.json` whose ids are bytes: byte-level BPE (Radford et al., 2019) without merges."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in plain]  # written as the characters from U+0100 on, in this order
    signs = {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {signs[b]: b for b in range(256)},
            "merges": [],
        },
    }
