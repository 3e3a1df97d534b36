"""The index of a checkpoint: what is in it, and where.  Pure.

A checkpoint is a folder: safetensors files, one for each rank that wrote anything, and `index.json`, which is written
last: without it there is no checkpoint.  For each tensor the index has the dtype, the global shape, and the chunks that
make it up, rectangles of the global array; for each chunk its file, the byte where it begins and a checksum of every
`page` bytes of it; for each file its length and the checksum of its header.  The index has a checksum of itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from parlinalg.errors import CheckpointError

Shape = tuple[int, ...]
Rect = tuple[range, ...]

FORMAT, VERSION = "parlinalg checkpoint", 1
INDEX = "index.json"
PAGE = 1 << 18
"""Bytes of a chunk that have a checksum of their own: the least that is read of it."""


@dataclass(frozen=True)
class Chunk:
    """A rectangle of a tensor, in C order in a file.

    Attributes
    ----------
    file : str
    at : int
        The place of its first byte in the file.
    offsets, sizes : tuple of int
        Its first index in the tensor and its length, for each dim.
    checksums : tuple of int
        The CRC-32 of every page of it.
    """

    file: str
    at: int
    offsets: Shape
    sizes: Shape
    checksums: tuple[int, ...]

    @property
    def region(self) -> Rect:
        """The tensor's indices that it has, for each dim."""
        return tuple(range(a, a + n) for a, n in zip(self.offsets, self.sizes, strict=True))

    def to_json(self) -> dict[str, Any]:
        """For the index."""
        crcs = "".join(f"{crc:08x}" for crc in self.checksums)
        return {"file": self.file, "at": self.at, "offsets": self.offsets, "sizes": self.sizes, "crc32": crcs}

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Chunk:
        """From the index."""
        text = given["crc32"]
        crcs = tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8))
        return cls(given["file"], int(given["at"]), tuple(given["offsets"]), tuple(given["sizes"]), crcs)


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint.

    Attributes
    ----------
    dtype : str
    shape : tuple of int
    chunks : tuple of Chunk
        Each element lies in one of them.
    """

    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class File:
    """A file of a checkpoint.

    Attributes
    ----------
    nbytes : int
    header : int
        Bytes before the first tensor's.
    checksum : int
        The CRC-32 of these.
    """

    nbytes: int
    header: int
    checksum: int


@dataclass(frozen=True)
class Index:
    """What is in a checkpoint.

    Attributes
    ----------
    step : int
    training : dict
        JSON: all that is no tensor.
    files : dict of str to File
    tensors : dict of str to Entry
    page : int
        Bytes that a checksum is of.
    """

    step: int
    training: Mapping[str, Any]
    files: Mapping[str, File]
    tensors: Mapping[str, Entry]
    page: int

    def text(self) -> str:
        """The contents of `index.json`."""
        body = {
            "step": self.step,
            "training": self.training,
            "page": self.page,
            "files": {n: [f.nbytes, f.header, f.checksum] for n, f in self.files.items()},
            "tensors": {
                name: {"dtype": e.dtype, "shape": e.shape, "chunks": [c.to_json() for c in e.chunks]}
                for name, e in self.tensors.items()
            },
        }
        head = {"format": FORMAT, "version": VERSION, "digest": _digest(body)}
        return f'{json.dumps(head)[:-1]}, "body":\n{json.dumps(body)}}}\n'

    @classmethod
    def parse(cls, text: str, path: object) -> Index:
        """An index from the contents of its file.

        Raises
        ------
        CheckpointError
            Naming the file: it is cut short, damaged, of another program or of a later version.
        """
        try:
            whole = json.loads(text)
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged or cut short: it is not JSON ({error})") from None
        if not isinstance(whole, dict) or whole.get("format") != FORMAT:
            raise CheckpointError(f"{path} is no index of a checkpoint of parlinalg: it has no format={FORMAT!r}")
        if whole.get("version") != VERSION:
            raise CheckpointError(
                f"{path} has version {whole.get('version')!r} of the format, this program knows version {VERSION}"
            )
        body: Any = whole.get("body")
        if whole.get("digest") != _digest(body):
            raise CheckpointError(f"{path} is damaged: the checksum of its contents differs")
        return cls(
            body["step"],
            body["training"],
            {name: File(*numbers) for name, numbers in body["files"].items()},
            {
                name: Entry(e["dtype"], tuple(e["shape"]), tuple(map(Chunk.from_json, e["chunks"])))
                for name, e in body["tensors"].items()
            },
            body["page"],
        )

    def tensor_at(self, file: str, byte: int) -> str:
        """The name of the tensor that has this byte of a file, or ends after it; for messages."""
        places = sorted((c.at, name) for name, e in self.tensors.items() for c in e.chunks if c.file == file)
        after = [name for at, name in places if at > byte]
        before = [name for at, name in places if at <= byte]
        return before[-1] if before else after[0] if after else "no tensor"


def checksums(data: memoryview, page: int) -> tuple[int, ...]:
    """The CRC-32 of every page of these bytes."""
    return tuple(zlib.crc32(data[i : i + page]) for i in range(0, len(data), page))


def meet(a: Rect, b: Rect) -> Rect:
    """What two rectangles of one array have in common."""
    return tuple(range(max(r.start, s.start), max(min(r.stop, s.stop), r.start, s.start))
                 for r, s in zip(a, b, strict=True))  # fmt: skip


def inside(part: Rect, whole: Rect) -> tuple[slice, ...]:
    """Where a rectangle lies in the block that is another one."""
    return tuple(slice(p.start - w.start, p.stop - w.start) for p, w in zip(part, whole, strict=True))


def volume(rect: Rect) -> int:
    """The number of its elements."""
    return math.prod(len(r) for r in rect)


def _digest(body: object) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
