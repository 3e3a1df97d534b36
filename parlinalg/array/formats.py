"""Formats of arrays in files: `.npy`, HDF5 and Zarr, on one rank; nothing here communicates."""

from __future__ import annotations

import itertools
import math
import mmap
import os
import shutil
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np

from parlinalg import tunables
from parlinalg.array.create import dtype_named
from parlinalg.exchange import Rect, Runs, volume
from parlinalg.files import open_regular, replace, sync, sync_folder
from parlinalg.layout import piece
from parlinalg.units import ITEMSIZE

Shape = tuple[int, ...]
FAR_RUNS = 1 << 10
"""Runs of a mapped file that are read at a time: each may bring a stretch of the file into memory."""
COLUMNS = 1 << 8
"""Columns of a transposed array that are copied at a time."""


# ------------------------------------------------------------------------------------------ parts of arrays


def _pieces(part: Rect, most: int, chunks: Shape, d: int = 0) -> Iterator[Rect]:
    """Cut a rectangle into pieces of at most `most` elements, or a chunk, in C order: outer dims first, at chunks."""
    n = volume(part)
    if n <= most or d == len(part):
        if n:
            yield part
        return
    r, chunk = part[d], chunks[d]
    step = max(1, most // (n // len(r) * chunk)) * chunk
    start = r.start
    while start < r.stop:
        stop = min(r.stop, start // chunk * chunk + step)
        yield from _pieces((*part[:d], range(start, stop), *part[d + 1 :]), most, chunks, d + 1)
        start = stop


def _run(part: Rect, shape: Shape) -> int:
    """Return the elements of a rectangle that lie one after the other in an array of `shape`."""
    n = 1
    for r, length in zip(reversed(part), reversed(shape), strict=True):
        n *= len(r)
        if len(r) < length:
            break
    return n


def long_dim(shape: Shape, ranks: int) -> int:
    """Return the first dim that has an item for every rank, else the longest."""
    return next((d for d, n in enumerate(shape) if n >= ranks), max(range(len(shape)), key=lambda d: shape[d]))


def _fitting_chunks(blocks: Sequence[Rect]) -> Shape:
    """Return the shape of chunks of which the blocks consist, as far as they can, of at most a piece's elements."""
    lengths = [max(1, *(len(r) for r in ranges)) for ranges in zip(*blocks, strict=True)]
    for d, length in enumerate(lengths):
        count = min(length, -(-math.prod(lengths) // tunables.MOVE_BUFFER))
        count = next((k for k in range(count, 2 * count) if length % k == 0), count)
        lengths[d] = -(-length // count)
    return tuple(lengths)


def _to_chunks(r: range, n: int, chunk: int) -> range:
    """Return the indices, of `n`, of the chunks that begin within a range."""
    return range(min(n, -(-r.start // chunk) * chunk), min(n, -(-r.stop // chunk) * chunk))


# ------------------------------------------------------------------------------------------ formats


class ArrayFile(ABC):
    """An array in a file.

    `open`, `read` and `close` are for reading.  A file is written by `arrange` on all ranks, `create` on the first,
    `attach`, `write` and `finish` on all, and `appear` on the first; `discard` takes back what was written.

    Parameters
    ----------
    path : str or path
    dataset : str, optional
    token : str
        Tells the files of two programs apart that write to one path.

    Attributes
    ----------
    shape : tuple of int
    dtype : numpy.dtype
        That of the elements in the file; its byte order may be foreign.
    chunks : tuple of int
        What is read or written at once at least.
    """

    suffixes: ClassVar[tuple[str, ...]]
    package: ClassVar[str] = ""
    extra: ClassVar[str] = ""
    compressions: ClassVar[tuple[str, ...]] = ()

    def __init__(self, path: str | os.PathLike[str], dataset: str | None = None, token: str = "") -> None:
        self.path, self.dataset = os.fspath(path), None if dataset is None else dataset.strip("/")
        if self.dataset is not None and {"", ".", ".."} & set(self.dataset.split("/")):
            raise ValueError(f"dataset={dataset!r} is not a name, or names of groups and one with / between")
        folder, name = os.path.split(self.path)
        self.aside = os.path.join(folder, f".{name}.{token}")
        self.shape: Shape = ()
        self.dtype: np.dtype[Any] = np.dtype(np.float64)
        self.chunks: Shape = ()
        self.compression: str | None = None

    def __str__(self) -> str:
        return self.path if self.dataset is None else f"{self.path}, dataset {self.dataset!r},"

    @abstractmethod
    def open(self) -> None:
        """Find the array, its shape and its dtype."""

    @abstractmethod
    def read(self, part: Rect, out: np.ndarray) -> None:
        """Fill a host array with a rectangle of the array."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the file."""

    def pieces(self, part: Rect) -> Iterator[Rect]:
        """Return the pieces in which a rectangle is read or written."""
        return _pieces(part, tunables.MOVE_BUFFER, self.chunks)

    def arrange(self, blocks: Sequence[Rect], chunks: Sequence[int] | None, compression: str | None) -> None:
        """Settle the chunks of a file to be written, and their compression."""
        if compression is not None and compression not in self.compressions:
            names = ", ".join(map(repr, self.compressions)) or "none"
            raise ValueError(f"compression={compression!r}: {self.suffixes[0]} files have {names}")
        if chunks is not None:
            chunks = tuple(chunks)
            if len(chunks) != len(self.shape) or not all(isinstance(n, int | np.integer) and n > 0 for n in chunks):
                raise ValueError(f"chunks={chunks}: an array of shape {self.shape} has a positive integer for each dim")
            chunks = tuple(min(int(n), max(1, length)) for n, length in zip(chunks, self.shape, strict=True))
        self.compression = compression
        self.chunks = self._chunks(blocks, chunks)

    @abstractmethod
    def _chunks(self, blocks: Sequence[Rect], chunks: Shape | None) -> Shape: ...

    @abstractmethod
    def parts(self, blocks: list[Rect]) -> list[Rect]:
        """Return the rectangle that each rank writes, where the ranks hold these."""

    def create(self) -> None:
        """Begin the file aside."""
        folder = os.path.dirname(self.path)
        if not os.path.isdir(folder):
            raise FileNotFoundError(f"there is no folder {folder}")
        with suppress(FileNotFoundError):
            os.close(open_regular(self.path))

    @abstractmethod
    def attach(self) -> None:
        """Open the file that the first rank has created."""

    @abstractmethod
    def write(self, part: Rect, values: np.ndarray) -> None:
        """Write a rectangle."""

    @abstractmethod
    def finish(self) -> None:
        """Put what this rank has written on the disk."""

    def appear(self) -> None:
        """Give the file its name."""
        with suppress(OSError):
            shutil.copymode(self.path, self.aside)
        replace(self.aside, self.path)

    def discard(self, remove: bool) -> None:
        """Let go of the file, and take away what was written."""
        with suppress(Exception):
            self.close()
        if remove:
            with suppress(OSError):
                os.unlink(self.aside)


def _known(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of an array's elements in a file: two bytes without a type are bfloat16."""
    if dtype.kind == "V" and dtype.itemsize == 2 and dtype.names is None:
        return dtype_named("bfloat16")
    if dtype.name not in ITEMSIZE:
        raise TypeError(f"it holds {dtype}; arrays have one of {', '.join(ITEMSIZE)}")
    return dtype


def _plain(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype of NumPy's own with the same bytes."""
    return np.dtype("V2") if dtype.name == "bfloat16" else dtype


def _in_order(values: np.ndarray) -> np.ndarray:
    """Return a host array in C order; a transposed one is copied by columns few enough to stay in the cache."""
    if values.ndim < 2 or values.strides[-1] == values.itemsize:
        return np.ascontiguousarray(values).reshape(values.shape)
    out = np.empty(values.shape, values.dtype)
    for start in range(0, values.shape[-1], COLUMNS):
        out[..., start : start + COLUMNS] = values[..., start : start + COLUMNS]
    return out


def _slices(part: Rect) -> tuple[slice, ...]:
    return tuple(slice(r.start, r.stop) for r in part)


def _chosen(name: str | None, names: Sequence[str]) -> str:
    """Return the name of the one dataset of a file, in which there is none of the name that is asked for."""
    listed = ", ".join(map(repr, names)) or "none"
    if name is not None:
        raise KeyError(f"it has no such dataset; it has {listed}")
    if len(names) != 1:
        raise KeyError(f"dataset= is needed: it has the datasets {listed}")
    return names[0]


class NpyFile(ArrayFile):
    """NumPy's own format: a header and the elements, in C or Fortran order."""

    suffixes = (".npy",)

    def __init__(self, path: str | os.PathLike[str], dataset: str | None = None, token: str = "") -> None:
        if dataset is not None:
            raise ValueError(f"dataset={dataset!r}: an .npy file holds one array, which has no name")
        super().__init__(path, dataset, token)
        self._fortran, self._offset, self._descriptor = False, 0, -1
        self._map: mmap.mmap | None = None
        self._elements: np.ndarray | None = None

    def open(self) -> None:
        with open(open_regular(self.path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            version = np.lib.format.read_magic(file)
            header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            if version not in ((1, 0), (2, 0), (3, 0)):
                raise ValueError(f"its version {version} is unknown")
            self.shape, self._fortran, dtype = header(file)
            self.dtype, self.chunks, self._offset = _known(dtype), (1,) * len(self.shape), file.tell()
            if any(n < 0 for n in self.shape):
                raise ValueError(f"its header is damaged: the shape is {self.shape}")
            whole = self._offset + math.prod(self.shape) * dtype.itemsize
            if size != whole:
                raise ValueError(
                    f"it {'is cut short' if size < whole else 'is longer than its array'}: it has {size} bytes, "
                    f"{dtype} of shape {self.shape} takes {whole}"
                )
            if not math.prod(self.shape):
                return
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        stored = self.shape[::-1] if self._fortran else self.shape
        elements: np.ndarray = np.ndarray(stored, self.dtype, self._map, self._offset)
        self._elements = elements.T if self._fortran else elements

    def pieces(self, part: Rect) -> Iterator[Rect]:
        order = slice(None, None, -1 if self._fortran else 1)
        most = min(tunables.MOVE_BUFFER, FAR_RUNS * _run(part[order], self.shape[order]))
        return (found[order] for found in _pieces(part[order], most, self.chunks))

    def read(self, part: Rect, out: np.ndarray) -> None:
        assert self._elements is not None
        assert self._map is not None
        out[...] = self._elements[_slices(part)]
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)  # pages that were read would count as this process's

    def close(self) -> None:
        self._elements = None
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _chunks(self, blocks: Sequence[Rect], chunks: Shape | None) -> Shape:
        if chunks is not None:
            raise ValueError("chunks: .npy files have none")
        return (1,) * len(self.shape)

    def parts(self, blocks: list[Rect]) -> list[Rect]:
        """Return the blocks themselves if their runs in the file are long, else as many rows for each rank."""
        least = tunables.FILE_RUN // self.dtype.itemsize
        if all((run := _run(b, self.shape)) >= least or run == volume(b) for b in blocks):
            return blocks
        d, ranks = long_dim(self.shape, len(blocks)), len(blocks)
        whole = tuple(map(range, self.shape))
        return [(*whole[:d], piece(self.shape[d], ranks, i), *whole[d + 1 :]) for i in range(ranks)]

    def _header(self) -> dict[str, Any]:
        descr = np.lib.format.dtype_to_descr(_plain(self.dtype))
        return {"descr": descr, "fortran_order": False, "shape": self.shape}

    def create(self) -> None:
        super().create()
        with open(self.aside, "xb") as file:
            np.lib.format.write_array_header_1_0(file, self._header())
            file.truncate(file.tell() + math.prod(self.shape) * self.dtype.itemsize)

    def attach(self) -> None:
        with open(self.aside, "rb") as file:
            np.lib.format.read_magic(file)
            np.lib.format.read_array_header_1_0(file)
            self._offset = file.tell()
        self._descriptor = os.open(self.aside, os.O_WRONLY | os.O_CLOEXEC)

    def write(self, part: Rect, values: np.ndarray) -> None:
        runs, itemsize = Runs.of(part, self.shape), self.dtype.itemsize
        data = memoryview(_in_order(values).reshape(-1).view(np.uint8).data)
        n = runs.length * itemsize
        for i, start in enumerate(runs.starts.tolist()):
            _write_at(self._descriptor, data[i * n : (i + 1) * n], self._offset + start * itemsize)

    def finish(self) -> None:
        os.fsync(self._descriptor)
        self.close()


def _write_at(descriptor: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], at + done)


class HDF5File(ArrayFile):
    """A dataset of an HDF5 file, by h5py.  Every rank reads; the first one alone writes."""

    suffixes = (".h5", ".hdf5")
    package, extra = "h5py", "hdf5"
    compressions = ("gzip", "lzf")

    def __init__(self, path: str | os.PathLike[str], dataset: str | None = None, token: str = "") -> None:
        super().__init__(path, dataset, token)
        self._file: Any = None
        self._dataset: Any = None
        self._chunked = False

    def open(self) -> None:
        import h5py

        os.close(open_regular(self.path))
        self._file = h5py.File(self.path, "r", locking="best-effort")
        found = None if self.dataset is None else self._file.get(self.dataset)
        if not isinstance(found, h5py.Dataset):
            names: list[str] = []
            self._file.visititems(lambda name, node: names.append(name) if isinstance(node, h5py.Dataset) else None)
            self.dataset = _chosen(self.dataset, names)
            found = self._file[self.dataset]
        self._dataset = found
        if self._dataset.shape is None:
            raise ValueError("it is empty, without a shape")
        self.shape, self.dtype = self._dataset.shape, _known(self._dataset.dtype)
        self.chunks = self._dataset.chunks or (1,) * len(self.shape)

    def read(self, part: Rect, out: np.ndarray) -> None:
        values = np.asarray(self._dataset[_slices(part)])
        out[...] = values.view(self.dtype) if values.dtype.kind == "V" else values

    def close(self) -> None:
        file, self._file, self._dataset = self._file, None, None
        if file is not None:
            file.close()

    def _chunks(self, blocks: Sequence[Rect], chunks: Shape | None) -> Shape:
        self.dataset = self.dataset or "data"
        self._chunked = math.prod(self.shape) > 0 < len(self.shape) and (chunks or self.compression) is not None
        if self._chunked:
            return chunks or _fitting_chunks(blocks)
        return (1,) * len(self.shape)

    def parts(self, blocks: list[Rect]) -> list[Rect]:
        whole, nothing = tuple(map(range, self.shape)), tuple(range(0) for _ in self.shape)
        return [whole, *[nothing] * (len(blocks) - 1)]

    def create(self) -> None:
        import h5py

        super().create()
        if os.path.lexists(self.path):
            with h5py.File(self.path, "r", locking="best-effort") as old:
                alone = list(old) == [self.dataset] and isinstance(old[self.dataset], h5py.Dataset) and not old.attrs
            if not alone:
                shutil.copyfile(self.path, self.aside)
        self._file = h5py.File(self.aside, "a", locking="best-effort")
        if self.dataset in self._file:
            if not isinstance(self._file[self.dataset], h5py.Dataset):
                raise ValueError("it is a group: choose another name")
            del self._file[self.dataset]
        options = {"chunks": self.chunks, "compression": self.compression, "fletcher32": True} if self._chunked else {}
        self._dataset = self._file.create_dataset(self.dataset, self.shape, _plain(self.dtype), **options)

    def attach(self) -> None:
        """Do nothing: the rank that writes has the file open."""

    def write(self, part: Rect, values: np.ndarray) -> None:
        self._dataset[_slices(part)] = _in_order(values).view(_plain(self.dtype))

    def finish(self) -> None:
        if self._file is not None:
            self.close()
            sync(self.aside)


class ZarrFile(ArrayFile):
    """A folder with an array's chunks in files of their own, by zarr; or with a group of arrays.

    Each chunk is written by one rank, with a checksum.  An attribute says that all chunks are there, so that one that
    is lost is not taken for zeros.
    """

    suffixes = (".zarr",)
    package, extra = "zarr", "zarr"
    compressions = ("zstd", "gzip", "blosc")

    def __init__(self, path: str | os.PathLike[str], dataset: str | None = None, token: str = "") -> None:
        super().__init__(path, dataset, token)
        self._array: Any = None
        self._complete = False
        self._written: list[str] = []

    def open(self) -> None:
        import zarr

        if not os.path.isdir(self.path):
            raise FileNotFoundError("there is no such folder")
        node: Any = zarr.open(store=self.path, mode="r")
        if isinstance(node, zarr.Group):
            found = None if self.dataset is None else node.get(self.dataset)
            if not isinstance(found, zarr.Array):
                names = [name for name, each in node.members(max_depth=None) if isinstance(each, zarr.Array)]
                self.dataset = _chosen(self.dataset, sorted(names))
                found = node[self.dataset]
            node = found
        elif self.dataset is not None:
            raise KeyError("it is one array, without datasets: leave out dataset=")
        self._array = node
        attributes = node.attrs.get("parlinalg", {})
        self._complete = attributes.get("complete", False)
        self.shape = tuple(node.shape)
        self.dtype = dtype_named("bfloat16") if attributes.get("dtype") == "bfloat16" else _known(node.dtype)
        self.chunks = tuple(node.shards or node.chunks)

    def _keys(self, part: Rect) -> Iterator[str]:
        """Return the files of the chunks that have elements of a rectangle."""
        ranges = (range(r.start // c, -(-r.stop // c)) for r, c in zip(part, self.chunks, strict=True))
        for at in itertools.product(*ranges):
            yield self._array.metadata.encode_chunk_key(at)

    def _settings(self) -> Any:
        """Return a context in which no more chunks are in memory than a piece has elements, and all are written."""
        import zarr

        count = max(1, tunables.MOVE_BUFFER // max(1, math.prod(self.chunks)))
        return zarr.config.set({"async.concurrency": count, "array.write_empty_chunks": True})

    def read(self, part: Rect, out: np.ndarray) -> None:
        if self._complete:
            folder = os.path.join(self.path, self.dataset or "")
            for key in self._keys(part):
                if not os.path.exists(os.path.join(folder, key)):
                    raise FileNotFoundError(f"its chunk {key} is missing")
        with self._settings():
            values = np.asarray(self._array[_slices(part)])
        out[...] = values.view(self.dtype) if self.dtype.name == "bfloat16" else values

    def close(self) -> None:
        self._array = None

    def _chunks(self, blocks: Sequence[Rect], chunks: Shape | None) -> Shape:
        return _fitting_chunks(blocks) if chunks is None else chunks

    def parts(self, blocks: list[Rect]) -> list[Rect]:
        """Return for each rank the chunks that begin in its block."""
        return [tuple(map(_to_chunks, block, self.shape, self.chunks)) for block in blocks]

    def create(self) -> None:
        import zarr
        from zarr import codecs

        if os.path.lexists(self.path):
            self._check_old(zarr)
        elif not os.path.isdir(os.path.dirname(self.path)):
            raise FileNotFoundError(f"there is no folder {os.path.dirname(self.path)}")
        kinds = {"zstd": codecs.ZstdCodec, "gzip": codecs.GzipCodec, "blosc": codecs.BloscCodec}
        bits = self.dtype.name == "bfloat16"
        zarr.create_array(
            store=self.aside, shape=self.shape, chunks=self.chunks, dtype=np.uint16 if bits else self.dtype,
            compressors=[*([kinds[self.compression]()] if self.compression else []), codecs.Crc32cCodec()],
            attributes={"parlinalg": {"complete": True, "dtype": self.dtype.name}},
        )  # fmt: skip

    def _check_old(self, zarr: Any) -> None:
        """Raise unless the array can take the place of what has its name."""
        if not os.path.isdir(self.path):
            raise NotADirectoryError("it is a file, not a folder")
        if not os.listdir(self.path):
            return
        old = zarr.open(store=self.path, mode="r")  # refuses folders of another kind
        if isinstance(old, zarr.Array):
            if self.dataset is not None:
                raise ValueError("the folder is one array: leave out dataset=, or choose another folder")
        elif self.dataset is None:
            raise ValueError("it is a group of arrays: give dataset=")
        elif isinstance(old.get(self.dataset), zarr.Group):
            raise ValueError("it is a group: choose another name")

    def attach(self) -> None:
        import zarr

        with self._settings():
            self._array = zarr.open_array(store=self.aside, mode="r+")

    def write(self, part: Rect, values: np.ndarray) -> None:
        self._written += self._keys(part)
        values = _in_order(values)
        with self._settings():
            self._array[_slices(part)] = values.view(np.uint16) if self.dtype.name == "bfloat16" else values

    def finish(self) -> None:
        files = [os.path.join(self.aside, key) for key in ("zarr.json", *self._written)]
        for file in files:
            sync(file)
        for folder in {os.path.dirname(file) for file in files}:
            sync_folder(folder)
        self.close()

    def appear(self) -> None:
        import zarr

        if self.dataset is None:
            return super().appear()
        group, _, name = self.dataset.rpartition("/")
        root: Any = zarr.open_group(store=self.path, mode="a")
        if group:
            root.require_group(group)
        replace(self.aside, os.path.join(self.path, group, name))
        if root.metadata.consolidated_metadata is not None:
            with warnings.catch_warnings(action="ignore"):  # not in Zarr's specification yet
                zarr.consolidate_metadata(self.path)
        return None

    def discard(self, remove: bool) -> None:
        self.close()
        if remove:
            shutil.rmtree(self.aside, ignore_errors=True)


FORMATS: tuple[type[ArrayFile], ...] = (NpyFile, HDF5File, ZarrFile)
