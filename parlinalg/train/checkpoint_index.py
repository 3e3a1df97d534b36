"""The index of a checkpoint: what is in it, and where.  Pure.

A checkpoint is a folder: safetensors files, one for each rank that wrote anything, and `index.json`, which is written
last: without it there is no checkpoint.  For each tensor the index has the dtype, the global shape, and the rectangles
of the global array that make it up (under the key "chunks"); for each rectangle its file, the byte where it begins and
a checksum of every `page` bytes of it; for each file its length and the checksum of its header.  The index has a
checksum of itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any

from parlinalg.errors import CheckpointError, brief
from parlinalg.exchange import Rect, rect_at
from parlinalg.files import parse_json
from parlinalg.units import ITEMSIZE

Shape = tuple[int, ...]
FORMAT, VERSION = "parlinalg checkpoint", 1
INDEX = "index.json"
DTYPES = ("float64", "float32", "float16", "bfloat16", "int64")
LARGEST = (1 << 63) - 1
"""The largest step, length or place in a file."""
MOST_DIMS, MOST_HEADER, MOST_CORNERS = 64, 10**8, 1 << 24


@dataclass(frozen=True)
class Rectangle:
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
    def size(self) -> int:
        """Its elements."""
        return math.prod(self.sizes)

    @property
    def region(self) -> Rect:
        """The tensor's indices that it has, for each dim."""
        return rect_at(self.offsets, self.sizes)

    def to_json(self) -> dict[str, Any]:
        """Return the form of the index in JSON."""
        crcs = "".join(f"{crc:08x}" for crc in self.checksums)
        return {"file": self.file, "at": self.at, "offsets": self.offsets, "sizes": self.sizes, "crc32": crcs}

    @classmethod
    def from_json(cls, given: Any) -> Rectangle:
        """Make one from its form in the index.

        Raises
        ------
        ValueError, KeyError
            If a value is missing, or of a wrong type.
        """
        known = _dict("a rectangle", given)
        text = known["crc32"]
        if not isinstance(text, str) or re.fullmatch("[0-9a-f]*", text) is None or len(text) % 8:
            raise ValueError(f"the checksums of a rectangle are {brief(text, 40)}, not 8 digits of hexadecimals each")
        crcs = tuple(int(text[i : i + 8], 16) for i in range(0, len(text), 8))
        offsets, sizes = (_shape(f"the {name} of a rectangle", known[name]) for name in ("offsets", "sizes"))
        return cls(_name("file", known["file"]), _whole("the place of a rectangle", known["at"]), offsets, sizes, crcs)


@dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint.

    Attributes
    ----------
    dtype : str
    shape : tuple of int
    rectangles : tuple of Rectangle
        Each element lies in one of them.
    """

    dtype: str
    shape: Shape
    rectangles: tuple[Rectangle, ...]


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
    """The contents of a checkpoint.

    Attributes
    ----------
    step : int
    training : dict
        JSON: all that is no tensor.
    files : dict of str to File
    tensors : dict of str to Entry
    page : int
        Bytes that a checksum is of.
    digest : str
        The checksum of all that, where it was read.
    """

    step: int
    training: Mapping[str, Any]
    files: Mapping[str, File]
    tensors: Mapping[str, Entry]
    page: int
    digest: str = field(default="", compare=False)

    def text(self) -> str:
        """Return the contents of `index.json`."""
        body = {
            "step": self.step,
            "training": self.training,
            "page": self.page,
            "files": {n: [f.nbytes, f.header, f.checksum] for n, f in self.files.items()},
            "tensors": {
                name: {"dtype": e.dtype, "shape": e.shape, "chunks": [r.to_json() for r in e.rectangles]}
                for name, e in self.tensors.items()
            },
        }
        head = {"format": FORMAT, "version": VERSION, "digest": _digest(body)}
        return f'{json.dumps(head)[:-1]}, "body":\n{json.dumps(body)}}}\n'

    @classmethod
    def parse(cls, text: str | bytes, path: object) -> Index:
        """Return an index from the contents of its file.

        Raises
        ------
        CheckpointError
            Naming the file: it is cut short, damaged, of another program or of a later version.
        """
        try:
            whole = parse_json(text)
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged or cut short: it is not JSON ({error})") from None
        if not isinstance(whole, dict) or whole.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not an index of a checkpoint of parlinalg: it has no format={FORMAT!r}")
        if whole.get("version") != VERSION:
            raise CheckpointError(
                f"{path} has version {brief(whole.get('version'))} of the format, this program knows version {VERSION}"
            )
        body: Any = whole.get("body")
        try:
            digest = _digest(body)
        except (RecursionError, MemoryError):
            raise CheckpointError(f"{path} is damaged: it is nested too deep, or too large") from None
        if whole.get("digest") != digest:
            raise CheckpointError(f"{path} is damaged: the checksum of its contents differs")
        try:
            return replace(_index(body), digest=digest)
        except KeyError as error:
            raise CheckpointError(f"{path} is malformed: it lacks {error}") from None
        except ValueError as error:
            raise CheckpointError(f"{path} is malformed: {error}") from None

    def tensor_at(self, file: str, byte: int) -> str:
        """Return the name of the tensor that has this byte of a file, or ends after it; for messages."""
        places = sorted((r.at, name) for name, e in self.tensors.items() for r in e.rectangles if r.file == file)
        after = [name for at, name in places if at > byte]
        before = [name for at, name in places if at <= byte]
        return before[-1] if before else after[0] if after else "no tensor"


def checksums(data: memoryview, page: int) -> tuple[int, ...]:
    """Return the CRC-32 of every page of these bytes."""
    return tuple(zlib.crc32(data[i : i + page]) for i in range(0, len(data), page))


def name_of(step: int) -> str:
    """Return the name of the folder of a step's checkpoint.

    >>> name_of(100)
    'step-00000100'
    """
    return f"step-{step:08}"


def _digest(body: object) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# ---------------------------------------------------------------------------------------------- what may stand in one


def _index(body: Any) -> Index:
    """Return the index of its values in JSON.

    Its checksum says that nobody changed it by accident, not that it is right.

    Raises
    ------
    ValueError, KeyError
        If a value is missing or wrong, or the rectangles of a tensor do not have each of its elements once.
    """
    known = _dict("its body", body)
    page = _whole("page", known["page"], 1)
    files = {_name("file", name): _file(name, numbers) for name, numbers in _dict("files", known["files"]).items()}
    tensors = {
        _name("tensor", name): _entry(name, given, files, page)
        for name, given in _dict("tensors", known["tensors"]).items()
    }
    if sum(map(_corners, tensors.values())) > max(MOST_CORNERS, 64 * sum(len(e.rectangles) for e in tensors.values())):
        raise ValueError("its tensors are cut along too many dims")
    for name, entry in tensors.items():
        _check_cover(name, entry)
    _check_apart(tensors)
    return Index(_whole("step", known["step"]), _dict("training", known["training"]), files, tensors, page)


def _file(name: str, numbers: Any) -> File:
    if not isinstance(numbers, list) or len(numbers) != 3:
        raise ValueError(f"the file {name!r} is described by {brief(numbers)}, not by three numbers")
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise ValueError(f"the file {name!r} is not one in the folder of the checkpoint")
    nbytes = _whole(f"the length of {name!r}", numbers[0])
    header = _whole(f"the length of the header of {name!r}", numbers[1], 0, min(nbytes, MOST_HEADER))
    return File(nbytes, header, _whole(f"the checksum of {name!r}", numbers[2], 0, (1 << 32) - 1))


def _entry(name: str, given: Any, files: Mapping[str, File], page: int) -> Entry:
    known = _dict(f"the tensor {name!r}", given)
    dtype, shape, rectangles = known["dtype"], _shape(f"the shape of {name!r}", known["shape"]), known["chunks"]
    if dtype not in DTYPES:
        raise ValueError(f"the tensor {name!r} has the dtype {brief(dtype)}, not one of {', '.join(DTYPES)}")
    if math.prod(shape) * ITEMSIZE[dtype] > LARGEST:
        raise ValueError(f"the tensor {name!r} of shape {brief(shape)} has too many elements")
    if not isinstance(rectangles, list):
        raise ValueError(f"the rectangles of {name!r} are {brief(rectangles)}, not a list")
    found = tuple(map(Rectangle.from_json, rectangles))
    for rectangle in found:
        _check_rectangle(name, rectangle, shape, ITEMSIZE[dtype], files, page)
    return Entry(dtype, shape, found)


def _check_rectangle(
    name: str, rectangle: Rectangle, shape: Shape, itemsize: int, files: Mapping[str, File], page: int
) -> None:  # fmt: skip
    """Raise a ValueError unless a rectangle lies within its tensor, and within its file."""
    where = f"a rectangle of {name!r} at {brief(rectangle.offsets)} of size {brief(rectangle.sizes)}"
    within = len(rectangle.offsets) == len(rectangle.sizes) == len(shape)
    if not within or any(a + n > m for a, n, m in zip(rectangle.offsets, rectangle.sizes, shape, strict=True)):
        raise ValueError(f"{where} does not lie within the shape {brief(shape)}")
    if rectangle.file not in files:
        raise ValueError(f"{where} is said to lie in {brief(rectangle.file)}, which is not one of its files")
    file, nbytes = files[rectangle.file], rectangle.size * itemsize
    if rectangle.at < file.header or rectangle.at + nbytes > file.nbytes:
        raise ValueError(
            f"{where} is said to lie in bytes {rectangle.at} to {rectangle.at + nbytes} of {rectangle.file!r}, whose "
            f"tensors lie in bytes {file.header} to {file.nbytes}"
        )
    if len(rectangle.checksums) != -(-nbytes // page):
        raise ValueError(f"{where} has {len(rectangle.checksums)} checksums for {-(-nbytes // page)} pages")


def _cut(entry: Entry) -> list[int]:
    """Return the dims along which a tensor is cut into rectangles."""
    found = [r.sizes for r in entry.rectangles if r.size]
    return [d for d, n in enumerate(entry.shape) if any(sizes[d] != n for sizes in found)]


def _corners(entry: Entry) -> int:
    return len(entry.rectangles) << len(_cut(entry))


def _check_cover(name: str, entry: Entry) -> None:
    """Raise a ValueError unless each element lies in one rectangle.

    The sum of the rectangles' indicator functions is that of the tensor where their differences along all dims are the
    same, and those of a rectangle are its corners with alternating signs.  So the time is linear in the rectangles.
    """
    rectangles = [r for r in entry.rectangles if r.size]
    have, want = sum(r.size for r in rectangles), math.prod(entry.shape)
    if have != want:
        raise ValueError(f"the rectangles of {name!r} have {have} elements, the tensor has {want}")
    if len(rectangles) < 2:
        return
    cut, corners = _cut(entry), dict[Shape, int]()
    parts = [(1, r.offsets, r.sizes) for r in rectangles]
    for sign, offsets, sizes in [*parts, (-1, (0,) * len(entry.shape), entry.shape)]:
        for ends in product((0, 1), repeat=len(cut)):
            corner = tuple(offsets[d] + end * sizes[d] for d, end in zip(cut, ends, strict=True))
            corners[corner] = corners.get(corner, 0) + sign * (-1) ** sum(ends)
    if any(corners.values()):
        raise ValueError(f"the rectangles of {name!r} overlap, and leave elements out")


def _check_apart(tensors: Mapping[str, Entry]) -> None:
    """Raise a ValueError if two rectangles lie in the same bytes of a file."""
    places = sorted(
        (r.file, r.at, r.size * ITEMSIZE[entry.dtype], name)
        for name, entry in tensors.items()
        for r in entry.rectangles
        if r.size
    )
    for (file, at, nbytes, name), (other, start, _, after) in pairwise(places):
        if file == other and at + nbytes > start:
            raise ValueError(f"rectangles of {name!r} and {after!r} lie in the same bytes of {file!r}")


def _whole(what: str, value: Any, least: int = 0, most: int = LARGEST) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{what} is {brief(value)}, not a whole number from {least} to {most}")
    return value


def _shape(what: str, value: Any) -> Shape:
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) > MOST_DIMS:
        raise ValueError(f"{what} is {brief(value)}, not a list of at most {MOST_DIMS} numbers")
    return tuple(_whole(what, n) for n in value)


def _dict(what: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} is {brief(value)}, not an object")
    return value


def _name(what: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > 4096 or not value.isprintable():
        raise ValueError(f"a {what} is named {brief(value)}, not by a text that can be printed")
    return value
