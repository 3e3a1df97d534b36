"""Arrays in files: `.npy`, HDF5 and Zarr, of which each rank reads and writes its own part in bounded pieces.

The suffix of a path names the format, a subclass of `ArrayFile`.  A file is written aside and given its name when all
ranks are done, so that the old one stays whole until then; an error on one rank is raised on all.
"""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from parlinalg.array import transfer
from parlinalg.array.core import DistArray, native
from parlinalg.array.create import dtype_named, placed
from parlinalg.array.formats import FORMATS, ArrayFile, long_dim
from parlinalg.backend import backend_of
from parlinalg.comm import Comm
from parlinalg.comm.together import together
from parlinalg.errors import FileError
from parlinalg.exchange import Rect, local, volume
from parlinalg.files import free_space
from parlinalg.grid import Grid, default_grid
from parlinalg.layout import Layout
from parlinalg.redistribute import check_given, redistribute

Result = TypeVar("Result")


def load(
    path: str | os.PathLike[str], *, grid: Grid | None = None, layout: Layout | None = None, dtype: Any = None,
    dataset: str | None = None,
) -> DistArray:  # fmt: skip
    """Return the array of a file, of which each rank reads its own block.  Collective.

    Beside its block a rank holds a piece of at most `tunables.MOVE_BUFFER` elements, or a chunk of the file if that is
    more.  It does not matter on which grid the file was written.

    Parameters
    ----------
    path : str or path
        `.npy`, `.h5` or `.hdf5` (needs h5py), or `.zarr`, a folder (needs zarr); seen by all ranks.
    grid : Grid, optional
    layout : Layout, optional
        Where blocks lie; by default on the default grid, in its default layout for the shape.
    dtype : dtype, optional
        Another dtype than the file's, to which the conversion loses nothing (NumPy's "safe").
    dataset : str, optional
        The name of the array in an HDF5 file, or in a Zarr group.  It is needed where there are several.

    Raises
    ------
    FileError
        On all ranks, if any cannot read its part: the file or dataset is missing, damaged or cut short, or holds
        something other than numbers and bools.
    TypeError
        If the conversion to `dtype` is not safe.
    ImportError
        On all ranks, if the format's package is missing on any.

    Examples
    --------
    >>> import tempfile, parlinalg as pla
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pla.save(f"{folder}/x.npy", pla.ones((4, 3)))
    ...     pla.load(f"{folder}/x.npy").shape
    (4, 3)
    """
    grid = default_grid() if grid is None else grid
    comm, what = grid.world, "reading"
    file = _format(path, comm)(path, dataset)
    with ExitStack() as stack:

        def begin() -> list[Any]:
            stack.callback(file.close)
            with _named(file, "read"):
                file.open()
                return [list(file.shape), file.dtype.str if file.dtype.kind != "V" else file.dtype.name]

        facts = comm.share(_agreed(comm, what, begin), others="alike")
        odd = next((rank for rank, theirs in enumerate(facts) if theirs != facts[0]), None)
        if odd is not None:
            raise FileError(
                f"{file}: rank 0 finds {facts[0][1]}{tuple(facts[0][0])}, rank {odd} {facts[odd][1]}"
                f"{tuple(facts[odd][0])}; all ranks must see the same file"
            )
        kind = native(file.dtype) if dtype is None else dtype_named(dtype)
        if not np.can_cast(file.dtype, kind, "safe"):
            raise TypeError(
                f"{file} holds {native(file.dtype)}, which {kind} cannot hold without loss: load it as it is, and "
                f'convert it by .astype("{kind}")'
            )
        shape, grid, layout = placed(file.shape, grid, layout)
        cut = layout.with_partial(())
        block = _agreed(comm, what, lambda: _read(file, grid.block(cut, shape), kind, grid))
    check_given("load", block, cut, shape, grid, "give all ranks the same file", partial=layout.partial)
    return DistArray(redistribute(block, cut, layout, shape, grid), shape, layout, grid)


def _read(file: ArrayFile, mine: Rect, dtype: np.dtype[Any], grid: Grid) -> Any:
    """Return this rank's block, read piece by piece."""
    with _named(file, "read"):
        block = grid.backend.empty(tuple(len(r) for r in mine), dtype)
        for part in file.pieces(mine) if grid.inside else ():
            place = (*local(part, mine), ...)  # a view of 0-d blocks too
            if grid.backend.host_memory:
                file.read(part, block[place])
            else:
                values = np.empty(tuple(len(r) for r in part), dtype)
                file.read(part, values)
                block[place] = grid.backend.from_host(values)
    return block


def save(
    path: str | os.PathLike[str], array: DistArray, *, dataset: str | None = None,
    chunks: Sequence[int] | None = None, compression: str | None = None,
) -> None:  # fmt: skip
    """Write an array to a file, each element once.  Collective.

    The file appears under its name when it is complete and on the disk; until then, and after any error, a file that
    has the name stays as it was.  Beside its block a rank holds a few pieces of at most `tunables.MOVE_BUFFER`
    elements, or chunks if these are larger; the terms of a partial array are summed into parts of a block.

    Parameters
    ----------
    path : str or path
        `.npy`, `.h5` or `.hdf5` (needs h5py), or `.zarr`, a folder (needs zarr); seen by all ranks.  Ranks write `.npy`
        files and Zarr's chunks at once; rank 0 alone writes HDF5, and gets the others' pieces in turn.
    array : DistArray
        bfloat16 is written as what the formats have: two bytes without a type (V2), as by NumPy, or in Zarr uint16.
    dataset : str, optional
        The name of the array in an HDF5 file (by default "data") or in a Zarr group (by default the array has the
        folder alone).  Other datasets of the file stay.
    chunks : sequence of int, optional
        The shape of the chunks of HDF5 or Zarr.  By default parts of the ranks' blocks, and one piece in an HDF5 file
        without compression.
    compression : str, optional
        "gzip" or "lzf" of HDF5; "zstd", "gzip" or "blosc" of Zarr.

    Raises
    ------
    FileError
        On all ranks, if the file cannot be written on any: no such folder, no right, a full disk.
    ImportError
        On all ranks, if the format's package is missing on any.
    """
    if not isinstance(array, DistArray):
        raise TypeError(f"save takes a DistArray, not {type(array).__name__}; parlinalg.asarray(array) makes one")
    grid, shape = array.grid, array.shape
    comm = grid.world
    kind = _format(path, comm)
    given = [os.fspath(path), dataset, None if chunks is None else list(map(int, chunks)), compression]
    facts = comm.share([given, os.urandom(4).hex(), os.path.realpath(path)], others="by rank")
    odd = next((rank for rank, theirs in enumerate(facts) if theirs[0] != facts[0][0]), None)
    if odd is not None:
        raise FileError(
            f"ranks save differently: rank 0 with (path, dataset, chunks, compression) = {tuple(facts[0][0])}, rank "
            f"{odd} with {tuple(facts[odd][0])}; all ranks write one file"
        )
    _, token, target = facts[0]
    file = kind(target, dataset, token)
    blocks, block = _owned(array)
    file.shape, file.dtype = shape, array.dtype
    file.arrange(blocks, chunks, compression)
    first = comm.rank == 0

    def agreed(function: Callable[[], Result]) -> Result:
        def call() -> Result:
            with _named(file, "written"):
                return function()

        return _agreed(comm, "writing", call)

    try:
        agreed(lambda: file.create() if first else None)
        agreed(file.attach)
        _write(file, block, blocks, grid, agreed)
        agreed(file.finish)
        agreed(lambda: file.appear() if first else None)
    except FileError:  # on all ranks
        file.discard(first)
        comm.barrier()
        raise
    except BaseException:
        file.discard(first)
        raise


def _owned(array: DistArray) -> tuple[list[Rect], Any]:
    """Return the rectangle that each rank has alone, terms summed and replicas cut, and this rank's block of it."""
    grid, shape, layout = array.grid, array.shape, array.layout
    if shape:
        d = long_dim(shape, grid.size)
        more = [a for a in grid.axes if a not in layout.cut_axes]
        layout = layout.with_partial(()).with_dim(d, (*layout.dims[d], *more))
    else:
        layout = Layout()
    return transfer.blocks(layout, shape, grid), array.block_in(layout)


def _write(
    file: ArrayFile, block: Any, blocks: list[Rect], grid: Grid, agreed: Callable[[Callable[[], None]], None]
) -> None:
    parts, mine = file.parts(blocks), blocks[grid.world.rank]
    if parts == blocks:

        def write() -> None:
            for part in file.pieces(mine) if file.shape or grid.world.rank == 0 else ():
                file.write(part, grid.backend.to_host(block[local(part, mine)]))

        agreed(write)
        return
    nothing = tuple(range(0) for _ in file.shape)
    for wants in itertools.zip_longest(*map(file.pieces, parts), fillvalue=nothing):
        agreed(
            partial(_write_part, file, wants[grid.world.rank], transfer.between(block, blocks, wants, grid.world, grid))
        )


def _write_part(file: ArrayFile, part: Rect, block: Any) -> None:
    if volume(part):
        file.write(part, backend_of(block).to_host(block))


def _agreed(comm: Comm, what: str, function: Callable[[], Result]) -> Result:
    return together(comm, function, what, kinds=(FileError,))


@contextmanager
def _named(file: ArrayFile, done: str) -> Iterator[None]:
    """Raise errors as a FileError that names the file and the dataset."""
    try:
        yield
    except Exception as error:  # h5py and zarr raise errors of all kinds
        text = error.strerror if isinstance(error, OSError) else error.args[0] if isinstance(error, KeyError) else None
        text = text or str(error) or type(error).__name__
        free = free_space(error, Path(file.path).parent) if done == "written" else ""
        raise FileError(f"{file} cannot be {done}: {text}{free}") from error


def _format(path: str | os.PathLike[str], comm: Comm) -> type[ArrayFile]:
    """Return the format that a path's suffix names, once all ranks have its package."""
    suffix = os.path.splitext(os.fspath(path).rstrip("/"))[1].lower()
    kind = next((kind for kind in FORMATS if suffix in kind.suffixes), None)
    if kind is None:
        known = ", ".join(suffix for kind in FORMATS for suffix in kind.suffixes)
        raise ValueError(f"{os.fspath(path)!r}: the suffix of a path names its format, one of {known}")
    missing = False
    if kind.package:
        try:
            importlib.import_module(kind.package)
        except ImportError:
            missing = True
    ranks = [rank for rank, lacks in enumerate(comm.share(missing, others="alike")) if lacks]
    if ranks:
        where = "" if len(ranks) == comm.size else f" (missing on rank {', '.join(map(str, ranks))})"
        raise ImportError(
            f"{suffix} files need the package {kind.package}{where}: pip install 'parlinalg[{kind.extra}]'"
        )
    return kind
