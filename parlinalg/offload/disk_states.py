"""Optimizer states on a disk, and their recovery from the files of a run that ended."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from parlinalg.comm.together import together
from parlinalg.errors import OffloadError
from parlinalg.grid import worlds
from parlinalg.offload.disk import Closing, aligned, process_number, raise_together
from parlinalg.offload.states import Piece, TiledStates, TileLayout
from parlinalg.offload.tiles import Stream, TileFile
from parlinalg.optim import Optimizer
from parlinalg.optim.flat import Entry, Run, value_state


class DiskStates(TiledStates, Closing):
    """States in files, one a rank, through which the optimizer goes tile by tile.

    Tiles are read ahead of their use and written behind it, on threads, through `buffers` buffers.  A step counts as
    a whole or not at all: if on any rank a file cannot be written or read, all ranks raise an `OffloadError`, and
    states and values are what they were before the step.  If the process ends in the middle of a step, `recover` finds
    the states and values of the last one completed.

    Parameters
    ----------
    path : str or Path
        The folder of the files; made if it is not there.  Of this run alone.
    tile : int or str
        Bytes of a tile's states.
    buffers : int
        How many tiles are in memory at a time, at least 2: one worked on, and those being read and written.
    values : bool
        Keep the values beside the states, for `recover` and for undoing a step that failed.  Without, such a step
        leaves the values partly updated; then the states are refused until a checkpoint is loaded.  Parameters with a
        master need no values: the master is a state.
    keep : bool
        Leave the files when closed.
    name : str
        What the files' names begin with; each optimizer in a folder needs one of its own.

    A file takes twice the bytes of states and values: each tile has two places (see `parlinalg.offload.tiles`).
    """

    def __init__(
        self, path: str | Path, *, tile: SupportsIndex | str = "8MiB", buffers: int = 4, values: bool = True,
        keep: bool = False, name: str = "states",
    ) -> None:  # fmt: skip
        super().__init__(tile)
        self.path = Path(path)
        self.buffers, self.keep, self.name = buffers, keep, name
        self.VALUES = values
        self.file: TileFile | None = None
        self._stream: Stream | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._buffer: tuple[int, np.ndarray] | None = None
        self._dirty = False
        self._touched: set[int] = set()
        self._known: dict[int, tuple[int, int]] = {}
        self._broken = ""
        self._begun = False  # whether all that was set before the current step is a generation

    # ------------------------------------------------------------------ files
    def make(self, entries: Sequence[Entry]) -> None:
        """Make the files, of zeros.  Collective over the grids of the parameters.

        Raises
        ------
        OffloadError
            On all ranks, if a folder cannot be written or a disk is too small anywhere.
        """
        self.close()
        super().make(entries)
        self._worlds = worlds(e.data.grid for e in entries)
        number = process_number(self._worlds) if self._worlds else 0  # a stage may have no parameters
        try:
            together(self._worlds, lambda: self._make(number), f"making {self.path}", (OffloadError,))
        except OffloadError:
            self.close()
            raise

    def _make(self, number: int) -> None:
        if not self.layout.count:
            return
        backend = self.layout.groups[0].backend
        path = file_of(self.path, self.name, number)
        self.file = TileFile(path, self.layout.count, self.layout.parts, self._label())
        self._stream = Stream(self.file, sum(self.layout.parts), backend, self.buffers)
        self._buffer = (-1, aligned(sum(self.layout.parts), backend))
        self._end = weakref.finalize(self, _close, self.file, self._stream, self.keep)

    def _label(self) -> dict[str, Any]:
        return {"entries": self.layout.label(), "tile": self.tile}

    def close(self) -> None:
        """Close the files and end the threads; the files are taken away unless they are to be kept."""
        if self._end is not None:
            self._end()
        self.file = self._stream = self._end = self._buffer = None
        self.layout = TileLayout((), self.tile, values=False)
        self._touched, self._known, self._broken, self._dirty, self._begun = set(), {}, "", False, False

    # ------------------------------------------------------------------ a step
    def windows(self, runs: Iterable[Run]) -> Iterator[Run]:
        self._refuse_broken()
        problem: OffloadError | None = None
        done = False
        try:
            self._prepare()
            yield from super().windows(runs)
            done = True
        except OffloadError as error:
            problem = error
        finally:
            if not done and problem is None:  # the optimizer broke off
                self._undo()
        try:
            raise_together(self._worlds, problem, f"offloading to {self.path}")
        except OffloadError:
            self._undo()
            raise

    def iterate_tiles(self, tiles: Sequence[int], *, values: bool) -> Iterator[tuple[int, np.ndarray]]:
        if self._stream is None:
            return
        for tile, buffer in self._stream.iterate_tiles(tiles, read=sum(self.layout.parts[: 1 + values])):
            self._touched.add(tile)
            yield tile, buffer

    def complete(self, steps: int) -> None:
        """Make what the step wrote count, on all ranks or on none.  Collective over the grids of the parameters.

        Raises
        ------
        OffloadError
            On all ranks, if it cannot be done on one; all is then as before the step.
        """
        before = 0 if self.file is None else self.file.generation

        def commit() -> None:
            if self.file is not None:
                self._flush()
                self.file.commit({"steps": steps})

        try:
            together(self._worlds, commit, f"offloading to {self.path}", (OffloadError,))
        except OffloadError:
            if self.file is not None and self.file.generation > before:
                self.file.older()
            self._undo()
            raise
        self._touched.clear()
        self._begun = False

    def undo(self) -> None:
        """Put states and values back to the last generation, if the step has changed any."""
        self._undo()

    def _prepare(self) -> None:
        """Make a generation before a step: of what was set since the last one, and of values changed by others.

        They go through the tile buffer: a tile that cannot be written stays there, and nothing that was set is lost.
        """
        if self.file is None or self._touched:  # a second pass of one step
            return
        self._begun = False
        for entry in self.layout.entries if self.VALUES else ():
            if entry.home:
                continue
            known = entry.parameter.writes, id(entry.parameter.data)
            if self._known.get(id(entry.parameter)) != known:
                for piece in self.layout.of(entry):
                    if piece.group.recorded:
                        buffer = self.tile_buffer(piece.tile, write=True)
                        kept = piece.group.values(buffer, self.layout.parts[0])[piece.inside]
                        piece.group.backend.copy_to_host(entry.parameter.updated[0][piece.part], kept)
                self._known[id(entry.parameter)] = known
        self._flush()
        if self.file.changed or not self.file.generation:
            self.file.commit({"steps": self.steps})
        self._begun = True

    def _undo(self) -> None:
        """Put states and values back to the last generation, if the step has changed any."""
        if self.file is None or not self._begun:
            return
        if self._buffer is not None:  # a tile of the step that was not written yet
            self._buffer, self._dirty = (-1, self._buffer[1]), False
        self.file.rollback()
        touched, self._touched = sorted(self._touched), set()
        if touched and not self.VALUES and any(s.recorded for s in self.layout.groups):
            self._broken = "a step failed half-way, and values are partly updated (values=False)"
            return
        buffer = aligned(sum(self.layout.parts))
        try:
            for tile in touched:
                self.file.read(tile, buffer)
                for entry in self.layout.entries:
                    for piece in self.layout.of(entry) if not entry.home else ():
                        if piece.tile == tile:
                            self._restore(piece, entry, buffer)
        except OffloadError as error:
            self._broken = f"a step failed half-way, and cannot be undone: {error}"

    def _restore(self, piece: Piece, entry: Entry, buffer: np.ndarray) -> None:
        group = piece.group
        exact = value_state(group.names)
        if exact is None:
            kept = group.values(buffer, self.layout.parts[0])[piece.inside]
        else:
            kept = group.state(buffer, exact)[piece.inside].astype(group.value)
        value, data = entry.parameter.updated[0][piece.part], entry.parameter.data
        group.backend.copy_from_host(np.ascontiguousarray(kept), value)
        data.put(value, entry.start + piece.at)

    def _refuse_broken(self) -> None:
        if self._broken:
            raise OffloadError(f"{self._broken}; load a checkpoint")

    # ------------------------------------------------------------------ one at a time
    def tile_buffer(self, tile: int, *, write: bool) -> np.ndarray:
        self._refuse_broken()
        if self.file is None or self._buffer is None:
            raise OffloadError(f"the states in {self.path} are closed")
        at, buffer = self._buffer
        if at != tile:
            self._flush()
            self._buffer = (-1, buffer)
            self.file.read(tile, buffer)
            self._buffer = (tile, buffer)
        self._dirty = self._dirty or write
        if write and self._begun:
            self._touched.add(tile)
        return buffer

    def _flush(self) -> None:
        """Write the tile in the buffer if it was changed, and empty the buffer."""
        if self._buffer is not None and self.file is not None:
            tile, buffer = self._buffer
            if self._dirty:
                self.file.write(tile, buffer)
            self._buffer, self._dirty = (-1, buffer), False


def file_of(folder: Path, name: str, rank: int) -> Path:
    """Return the file of a rank."""
    return folder / f"{name}.{rank}.tiles"


def _close(file: TileFile, stream: Stream, keep: bool) -> None:
    with suppress(OSError):
        stream.close()
    file.close(remove=not keep)


def recover(path: str | Path, optimizer: Optimizer, *, name: str = "states") -> int:
    """Take states and values that `DiskStates` left in a folder, as of the last step that all ranks had completed.

    On as many ranks, with the model on the same grid and the same optimizer.  The files stay as they are; the states
    may lie in memory or in another folder by now.  Collective.

    Parameters
    ----------
    path : str or Path
    optimizer : Optimizer
        The optimizer of the model, before its first step.
    name : str
        As that of the `DiskStates`.

    Returns
    -------
    int
        The number of steps made.

    Raises
    ------
    OffloadError
        On all ranks, if a file is missing, cut short or damaged, or of another model or grid; nothing is changed then.
        Also if the states cannot be written to where they lie now; then load a checkpoint.
    """
    entries = [*optimizer.arrange(), *optimizer.flat.homes]
    comms = worlds(e.data.grid for e in entries)
    kinds = {(e.parameter.name, e.start, e.key[1]): e for e in entries}
    file: TileFile | None = None

    def open_() -> None:
        nonlocal file
        if any(e.size and e.names for e in entries):
            file = TileFile.open(file_of(Path(path), name, process_number(comms)))
            _check(file, kinds)

    def check(steps: int) -> None:
        if file is not None:
            if file.note["steps"] > steps:  # another rank ended before it completed the last step
                file.older()
            if file.note["steps"] != steps:
                raise OffloadError(f"{file.path} has step {file.note['steps']}, and another rank's file has {steps}")
            _take(file, kinds, None)

    def take() -> None:
        if file is not None:
            _take(file, kinds, optimizer)

    try:
        together(comms, open_, f"reading {path}", (OffloadError,))
        made = [file.note["steps"] if file is not None else None]
        for comm in comms:
            made += comm.share(made[0], others="alike")
        steps = min(s for s in made if s is not None)
        together(comms, lambda: check(steps), f"reading {path}", (OffloadError,))  # all before anything is changed
        together(comms, take, f"taking what {path} has", (OffloadError,))
        optimizer.flat.gather()
    finally:
        if file is not None:
            file.close(remove=False)
    optimizer.steps = steps
    return steps


Known = dict[tuple[str, int, str], Entry]


def _key(row: list[Any]) -> tuple[str, int, str]:
    """Return the key of a row of a file's label: name, first element, and the state if it is at home."""
    return row[0], row[2], row[3][0] if row[6:] else ""


def _check(file: TileFile, kinds: Known) -> None:
    """Raise unless the file is of these entries."""
    theirs = {_key(row): row for row in file.label["entries"]}
    strange = sorted({key[0] for key in theirs if key not in kinds})
    if strange:
        raise OffloadError(
            f"{file.path} is of another model, grid or optimizer: it has states of {', '.join(map(repr, strange))}, as "
            "this rank does not"
        )
    for key, e in kinds.items():
        if e.size and (e.names or key in theirs):
            mine = [key[0], e.size, key[1], list(e.names), e.dtype.name, e.data.dtype.name, *["home"] * e.home]
            if theirs.get(key) != mine:
                raise OffloadError(
                    f"{file.path} is of another model, grid or optimizer: of {key[0]!r} it has {theirs.get(key)}, this "
                    f"rank needs {mine} (name, elements, first element, states, their dtype, the values')"
                )


def _take(file: TileFile, kinds: Known, optimizer: Optimizer | None) -> None:
    """Read all tiles; with an optimizer, into it."""
    ordered: Sequence[Entry] = [kinds[_key(row)] for row in file.label["entries"]]
    layout = TileLayout(ordered, file.label["tile"], values=file.parts[1] > 0)
    buffer = aligned(sum(file.parts))
    if optimizer is None:
        for tile in range(file.count):
            file.read(tile, buffer)
        return
    for e in ordered:
        parts = {n: np.empty(e.size, e.dtype) for n in e.names}
        values = np.empty(e.size, e.data.dtype)
        recorded = False
        for piece in layout.of(e):
            file.read(piece.tile, buffer)
            for n, block in parts.items():
                block[piece.part] = piece.group.state(buffer, n)[piece.inside]
            if file.parts[1] and piece.group.recorded:
                recorded = True
                values[piece.part] = piece.group.values(buffer, file.parts[0])[piece.inside]
        backend = e.data.grid.backend
        for n, block in parts.items():
            optimizer.flat.states.write(e, n, backend.from_host(block))
        if (exact := value_state(parts)) is not None:
            values, recorded = parts[exact].astype(e.data.dtype), True
        if recorded:
            value = e.parameter.updated[0]
            backend.copy_from_host(values, value)
            e.data.put(value, e.start)
