"""The safetensors format: eight bytes with the length of a header, the header in JSON, and the tensors' bytes.

It is read by mapping the file, so that only the pages of the part asked for are touched, and written tensor by tensor,
so that no rank ever holds more than one.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parlinalg.array.create import dtype_named
from parlinalg.errors import ConfigError, brief
from parlinalg.files import open_regular, parse_json

Shape = tuple[int, ...]
#: The format's names of dtypes that weights have, and the counts that batch norms keep.
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64"}
MOST_HEADER = 100 * 10**6  # bytes; the limit of the format's reference implementation
MOST_DIMS, LARGEST = 64, (1 << 63) - 1


@dataclass(frozen=True)
class Stored:
    """A tensor in a file.

    Attributes
    ----------
    path : Path
    name : str
    code : str
        The format's name of its dtype.
    shape : tuple of int
    offset : int
        The place of its first byte in the file.
    """

    path: Path
    name: str
    code: str
    shape: Shape
    offset: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype.

        Raises
        ------
        ConfigError
            If weights cannot have it.
        """
        if self.code not in DTYPES:
            raise ConfigError(
                f"tensor {self.name!r} in {self.path} has the dtype {self.code}; weights are read as "
                f"{', '.join(f'{code} ({name})' for code, name in DTYPES.items())}"
            )
        return dtype_named(DTYPES[self.code])

    def mapped(self) -> np.ndarray:
        """Return the tensor, read as it is used: only the pages of what is taken from it.

        Raises
        ------
        ConfigError
            If the file has been cut short since its header was read.
        """
        if not math.prod(self.shape):
            return np.empty(self.shape, self.dtype)
        try:
            return np.memmap(self.path, self.dtype, "r", self.offset, self.shape)
        except (ValueError, OverflowError) as error:
            raise ConfigError(f"{self.path} was changed, and does not have all of {self.name!r}: {error}") from None


def read_header(path: Path) -> dict[str, Stored]:
    """Return the tensors of a file, by name.

    Raises
    ------
    ConfigError
        If the file is cut short, or is not of this format.
    """
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or 8 + length > size:
                raise ConfigError(
                    f"{path} is cut short, or is not a safetensors file: it has {size} bytes"
                    + (f", its header alone {8 + length}" if size >= 8 else "")
                )
            if length > MOST_HEADER:
                raise ConfigError(
                    f"{path} is not a safetensors file: its header has {length} bytes, above {MOST_HEADER}"
                )
            text = file.read(length)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    try:
        header = parse_json(text)
        header.pop("__metadata__", None)
        tensors = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
        last = _end(sorted(tuple(entry["data_offsets"]) for entry in header.values()))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, MemoryError) as error:
        why = error.args[0] if error.args else type(error).__name__
        raise ConfigError(
            f"{path} is not a safetensors file: its header cannot be understood ({str(why)[:200]})"
        ) from None
    if size != 8 + length + last:
        fault = "is cut short" if size < 8 + length + last else "is longer than its tensors"
        raise ConfigError(f"{path} {fault}: it has {size} bytes, its header speaks of {8 + length + last}")
    return tensors


def _stored(path: Path, name: str, entry: Mapping[str, Any], data: int) -> Stored:
    code, shape, (first, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    what = f"tensor {brief(name, 80)}"
    if not isinstance(code, str) or len(code) > 16:
        raise ValueError(f"{what} has the dtype {brief(code, 40)}")
    if len(shape) > MOST_DIMS or any(type(n) is not int or not 0 <= n <= LARGEST for n in (*shape, first, stop)):
        raise ValueError(f"{what} has the shape {brief(entry['shape'], 80)} and the bytes {[first, stop]}")
    if code in DTYPES and stop - first != math.prod(shape) * dtype_named(DTYPES[code]).itemsize:
        raise ValueError(f"{what} of {code} and shape {brief(shape, 80)} is said to lie in bytes {first} to {stop}")
    return Stored(path, name, code, shape, data + first)


def _end(offsets: Sequence[tuple[int, int]]) -> int:
    """Return the end of the last tensor, or raise if one does not begin where the one before it ends (no gaps)."""
    at = 0
    for first, stop in offsets:
        if first != at or stop < first:
            raise ValueError(f"a tensor lies in bytes {first} to {stop}, and the one before it ends at {at}")
        at = stop
    return at


class Writer:
    """A file in the making: written aside, tensor by tensor in the order of `shapes`.

    Parameters
    ----------
    path : Path
        Under this name the file appears at last.
    shapes : dict of str to tuple of int
        The tensors.
    dtypes : dict of str to dtype
    """

    def __init__(self, path: Path, shapes: Mapping[str, Shape], dtypes: Mapping[str, np.dtype[Any]]) -> None:
        self.path, self.dtypes = path, dtypes
        self.left = dict(shapes)
        self._aside = path.with_name(f".{path.name}.{os.getpid()}")
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, shape in shapes.items():
            stop = at + math.prod(shape) * dtypes[name].itemsize
            header[name] = {"dtype": code(dtypes[name]), "shape": list(shape), "data_offsets": [at, stop]}
            at = stop
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
        self._file = self._aside.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: np.ndarray) -> None:
        """Write a tensor: the next one."""
        if next(iter(self.left), None) != name or tensor.shape != self.left.pop(name):
            raise ValueError(f"tensor {name!r} of shape {tensor.shape} is not the next one of {self.path}")
        self._file.write(np.ascontiguousarray(tensor, self.dtypes[name]).reshape(-1).view(np.uint8).data)

    def close(self) -> None:
        """Put everything on the disk."""
        if self.left:
            raise ValueError(f"{self.path} still lacks {', '.join(self.left)}")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def appear(self) -> None:
        """Give the file its name."""
        self._aside.replace(self.path)

    def discard(self) -> None:
        """Forget what was written."""
        with suppress(OSError):  # closing writes what is buffered, and fails where writing did, as on a full disk
            self._file.close()
        self._aside.unlink(missing_ok=True)


def code(dtype: np.dtype[Any]) -> str:
    """Return the format's name of a dtype."""
    found = next((code for code, name in DTYPES.items() if name == dtype.name), None)
    if found is None:
        raise ConfigError(f"weights of dtype {dtype} cannot be saved; they may be {', '.join(DTYPES.values())}")
    return found
