"""The parts of a checkpoint's tensors that each rank holds, as rectangles, and which rank writes which.

A rank holds a block of a parameter; of the optimizer's states it holds the elements it updates, which with ZeRO's
stages 1 and 2 are a range of the flattened block.  A range is cut into rectangles, at most 2·dims − 1 of them, so that
a file knows nothing of the ranges that wrote it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from parlinalg import tunables
from parlinalg.autograd import Parameter
from parlinalg.autograd.storage import owners
from parlinalg.backend.views import flat
from parlinalg.errors import ConfigError
from parlinalg.exchange import Corner, Rect, rectangles, volume
from parlinalg.optim import Optimizer
from parlinalg.optim.flat import HomeState, InMemory

Shape = tuple[int, ...]


@dataclass(eq=False)
class Piece:
    """The part of a tensor that one rank holds: elements `start` to `stop` of the flattened block.

    Attributes
    ----------
    name : str
        In the checkpoint: "model.NAME", "optimizer.NAME.STATE".
    dtype : numpy.dtype
    shape : tuple of int
        The tensor's.
    block : tuple of ranges
        The global indices of the block.
    start, stop : int
    group : int
        The same number for all ranks of one grid, and the least for the one that owns the tensor, where ranks of
        several hold it.
    counted : bool
        Over the ranks of a grid that say so, each element is in the same rectangle of all that hold it.
    resident : bool
        Whether it is in memory already.
    read : callable
        Gives a slice of these elements, flat and in host memory; it may be a view.
    write : callable
        Takes them all.
    """

    name: str
    dtype: np.dtype[Any]
    shape: Shape
    block: Rect
    start: int
    stop: int
    group: int
    counted: bool
    resident: bool
    read: Callable[[slice], np.ndarray]
    write: Callable[[np.ndarray], None]

    def rectangles(self) -> list[tuple[Corner, slice]]:
        """Return the rectangles in the tensor, each with the place of its elements in what `read` gives."""
        first = tuple(r.start for r in self.block)
        found, at = [], 0
        for offsets, sizes in rectangles(tuple(len(r) for r in self.block), self.start, self.stop):
            n = math.prod(sizes)
            corner = tuple(a + o for a, o in zip(first, offsets, strict=True)), sizes
            found.append((corner, slice(at, at + n)))
            at += n
        return found

    def where(self, corner: Corner) -> slice:
        """Return the place of a rectangle's elements among these; it is one of them, or a part without gaps."""
        for (offsets, sizes), place in self.rectangles():
            shift = [c - o for c, o in zip(corner[0], offsets, strict=True)]
            if all(s >= 0 and s + n <= m for s, n, m in zip(shift, corner[1], sizes, strict=True)):
                start = place.start + sum(s * math.prod(sizes[d + 1 :]) for d, s in enumerate(shift))
                return slice(start, start + math.prod(corner[1]))
        raise ValueError(f"{self.name!r}: no rectangle of this rank has {corner}")


# ---------------------------------------------------------------------------------------------- of a training


def pieces_of(parameters: Mapping[str, Parameter], optimizer: Optimizer | None) -> list[Piece]:
    """Return the pieces that this rank holds.  Collective over axes along which updates are newly shared."""
    for owner in owners(parameters.values()):
        owner.finish()  # ranks read different parts of the values
    entries = [] if optimizer is None else optimizer.arrange()  # first: it moves values
    found = [_value(name, p) for name, p in parameters.items()]
    if optimizer is None:
        return found
    names = {id(p): name for name, p in parameters.items()}
    resident = isinstance(optimizer.flat.states, InMemory)
    homes = optimizer.home_states()
    for p in (*(e.parameter for e in entries), *(home.parameter for home in homes)):
        if id(p) not in names:
            raise ConfigError(f"the optimizer has the parameter {p.name!r}, which is not one of the model's")
    for entry in entries:
        p = entry.parameter
        for state in entry.names:
            found.append(
                Piece(
                    f"optimizer.{names[id(p)]}.{state}", entry.dtype, p.shape, _block(p), entry.start,
                    entry.start + entry.size, _group(p), p.counted, resident, _reads(optimizer, entry, state),
                    _writes(optimizer, entry, state),
                )
            )  # fmt: skip
    for home in homes:
        p, mine = home.parameter, home.entry is not None
        block = tuple(range(n if mine else 0) for n in home.shape)
        found.append(
            Piece(
                f"optimizer.{names[id(p)]}.{home.name}", home.dtype, home.shape, block, 0, volume(block), _group(p),
                mine, resident, _read_home(home), home.take,
            )
        )  # fmt: skip
    return found


def _read_home(home: HomeState) -> Callable[[slice], np.ndarray]:
    backend = home.parameter.grid.backend
    return lambda part: backend.to_host(home.read()[part])


def _value(name: str, p: Parameter) -> Piece:
    def read(part: slice) -> np.ndarray:
        return p.grid.backend.to_host(flat(p.block)[part])

    def write(values: np.ndarray) -> None:
        p.data.put(p.grid.backend.from_host(values))
        p.written()

    block, resident = _block(p), p.data.resident is not None
    return Piece(
        f"model.{name}", p.dtype, p.shape, block, 0, volume(block), _group(p), p.counted, resident, read, write
    )


def _reads(optimizer: Optimizer, entry: Any, state: str) -> Callable[[slice], np.ndarray]:
    backend = entry.data.grid.backend
    return lambda part: backend.to_host(optimizer.flat.states.read(entry, state).reshape(-1)[part])


def _writes(optimizer: Optimizer, entry: Any, state: str) -> Callable[[np.ndarray], None]:
    backend = entry.data.grid.backend
    return lambda values: optimizer.flat.states.write(entry, state, backend.from_host(values))


def _block(p: Parameter) -> Rect:
    return p.grid.block(p.layout, p.shape)


def _group(p: Parameter) -> int:
    return p.grid.world.world_ranks[0]


# ---------------------------------------------------------------------------------------------- who writes what


def description(pieces: Sequence[Piece]) -> list[Any]:
    """Describe what a rank holds for the others, as JSON."""
    return [
        [p.name, p.dtype.name, p.shape, p.group, p.counted, p.dtype.itemsize, [corner for corner, _ in p.rectangles()]]
        for p in pieces
    ]


def rectangles_to_write(everyone: Sequence[Sequence[Any]], rank: int) -> dict[str, list[Corner]]:
    """Return the rectangles of each tensor that one rank writes: over all ranks, each element once.  Pure.

    The largest come first, and each goes to the rank that has the least to write so far of those that hold it; one
    above `tunables.CHECKPOINT_SPLIT` bytes is cut for all that hold it.

    Parameters
    ----------
    everyone : sequence
        What `description` gives, of every rank.

    Raises
    ------
    ConfigError
        If ranks hold different tensors under one name, or nobody holds an element.
    """
    shapes: dict[str, tuple[Any, ...]] = {}
    owner: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for r, held in enumerate(everyone):
        for name, dtype, shape, group, _, itemsize, _ in held:
            known = shapes.setdefault(name, (dtype, tuple(shape)))
            if known != (dtype, tuple(shape)):
                raise ConfigError(f"rank {r} holds {name!r} as {dtype}{tuple(shape)}, others as {known[0]}{known[1]}")
            owner[name], sizes[name] = min(owner.get(name, group), group), itemsize
    holders: dict[tuple[str, Shape, Shape], list[int]] = {}
    for owning in (True, False):
        for r, held in enumerate(everyone):
            for name, _, _, group, counts, _, corners in held:
                if (counts and group == owner[name]) is owning:
                    for offsets, lengths in corners:
                        key = name, tuple(offsets), tuple(lengths)
                        if owning or key in holders:  # the other ranks help where they hold the same
                            holders.setdefault(key, []).append(r)
    _complete(shapes, holders)
    cut = [
        (name, corner, ranks)
        for (name, offsets, lengths), ranks in holders.items()
        for corner in _cut(offsets, lengths, sizes[name], len(ranks))
    ]
    cut.sort(key=lambda row: (-math.prod(row[1][1]) * sizes[row[0]], row[0], row[1]))
    loads = [0] * len(everyone)
    mine: dict[str, list[Corner]] = {}
    for name, corner, ranks in cut:
        to = min(ranks, key=lambda r: (loads[r], r))
        loads[to] += math.prod(corner[1]) * sizes[name]
        if to == rank:
            mine.setdefault(name, []).append(corner)
    return mine


def _complete(shapes: Mapping[str, tuple[Any, ...]], holders: Mapping[tuple[str, Shape, Shape], Any]) -> None:
    found = dict.fromkeys(shapes, 0)
    for name, _, lengths in holders:
        found[name] += math.prod(lengths)
    for name, (_, shape) in shapes.items():
        if found[name] != math.prod(shape):
            raise ConfigError(
                f"{name!r} has {math.prod(shape)} elements, of which the ranks that were asked hold {found[name]}: all "
                "ranks that hold parameters take part in saving"
            )


def _cut(offsets: Shape, lengths: Shape, itemsize: int, ranks: int) -> Iterator[Corner]:
    """Yield a rectangle in parts along its first dim of any length."""
    nbytes = math.prod(lengths) * itemsize
    dim = next((d for d, n in enumerate(lengths) if n > 1), None)
    parts = 1 if dim is None else min(ranks, -(-nbytes // tunables.CHECKPOINT_SPLIT), lengths[dim])
    if dim is None or parts < 2:
        yield offsets, lengths
        return
    for i in range(parts):
        first, stop = lengths[dim] * i // parts, lengths[dim] * (i + 1) // parts
        yield (
            (*offsets[:dim], offsets[dim] + first, *offsets[dim + 1 :]),
            (*lengths[:dim], stop - first, *lengths[dim + 1 :]),
        )
