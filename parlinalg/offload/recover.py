"""States and values from the files of a run that ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from parlinalg.errors import OffloadError
from parlinalg.offload.agreement import agree, number, worlds
from parlinalg.offload.chunks import ChunkFile
from parlinalg.offload.disk import aligned
from parlinalg.offload.disk_states import file_of
from parlinalg.offload.places import Places
from parlinalg.optim import Optimizer
from parlinalg.optim.flat import Entry


def recover(path: str | Path, optimizer: Optimizer, *, name: str = "states") -> int:
    """Take states and values that `DiskStates` left in a folder, as of the last step that all ranks had completed.

    On as many ranks, with the model on the same grid and the same optimizer.  The files stay as they are; the states
    may lie in memory or in another folder by now.  Collective.

    Parameters
    ----------
    path : str or Path
    optimizer : Optimizer
        Of the model, before its first step.
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
    entries = optimizer.arrange()
    comms = worlds(e.data.grid for e in entries)
    kinds = {(e.parameter.name, e.start): e for e in entries}
    file: ChunkFile | None = None
    problem: OffloadError | None = None
    try:
        if any(e.size and e.names for e in entries):
            file = ChunkFile.open(file_of(Path(path), name, number(comms)))
            _check(file, kinds)
    except OffloadError as error:
        problem = error
    steps = 0
    try:
        agree(comms, problem, f"reading {path}")
        made = [file.note["steps"] if file is not None else None]
        for comm in comms:
            made += comm.share(made[0])
        steps = min(s for s in made if s is not None)
        try:
            if file is not None:
                if file.note["steps"] > steps:  # another rank ended before it completed the last step
                    file.older()
                if file.note["steps"] != steps:
                    raise OffloadError(
                        f"{file.path} has step {file.note['steps']}, and another rank's file has {steps}"
                    )
                _take(file, kinds, None)
        except OffloadError as error:
            problem = error
        agree(comms, problem, f"reading {path}")  # all is known to be whole before anything is changed
        if file is not None:
            try:
                _take(file, kinds, optimizer)
            except OffloadError as error:
                problem = error
        agree(comms, problem, f"taking what {path} has")
    finally:
        if file is not None:
            file.close(remove=False)
    optimizer.steps = steps
    return steps


def _check(file: ChunkFile, kinds: dict[tuple[str, int], Entry]) -> None:
    """Raise unless the file is of these entries."""
    theirs = {(row[0], row[2]): row for row in file.label["entries"]}
    strange = sorted({name for name, start in theirs if (name, start) not in kinds})
    if strange:
        raise OffloadError(
            f"{file.path} is of another model, grid or optimizer: it has states of {', '.join(map(repr, strange))}, as "
            "this rank does not"
        )
    for key, e in kinds.items():
        if e.size and e.names:
            mine = [key[0], e.size, key[1], list(e.names), e.dtype.name, e.data.dtype.name]
            if theirs.get(key) != mine:
                raise OffloadError(
                    f"{file.path} is of another model, grid or optimizer: of {key[0]!r} it has {theirs.get(key)}, this "
                    f"rank needs {mine} (name, elements, first element, states, their dtype, the values')"
                )


def _take(file: ChunkFile, kinds: dict[tuple[str, int], Entry], optimizer: Optimizer | None) -> None:
    """Read all chunks; with an optimizer, into it."""
    ordered: Sequence[Entry] = [kinds[row[0], row[2]] for row in file.label["entries"]]
    places = Places(ordered, file.label["chunk"], values=file.parts[1] > 0)
    buffer = aligned(sum(file.parts))
    if optimizer is None:
        for chunk in range(file.count):
            file.read(chunk, buffer)
        return
    for e in ordered:
        parts = {n: np.empty(e.size, e.dtype) for n in e.names}
        values = np.empty(e.size, e.data.dtype)
        recorded = False
        for piece in places.of(e):
            file.read(piece.chunk, buffer)
            for n, block in parts.items():
                block[piece.part] = piece.stretch.state(buffer, n)[piece.inside]
            if file.parts[1] and piece.stretch.recorded:
                recorded = True
                values[piece.part] = piece.stretch.values(buffer, file.parts[0])[piece.inside]
        backend = e.data.grid.backend
        for n, block in parts.items():
            optimizer.states_place.write(e, n, backend.from_host(block))
        if "master" in parts:
            values, recorded = parts["master"].astype(e.data.dtype), True
        if recorded:
            value = e.parameter.updated[0]
            backend.copy_from_host(values, value)
            if e.data.RESTS:
                e.data.put(value, e.start)  # type: ignore[attr-defined]
    for owner in optimizer._owners():
        owner.gather()
