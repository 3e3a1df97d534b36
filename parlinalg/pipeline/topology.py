"""The topology of a pipeline: which ranks hold which stage's processor grid.

A pipeline rank is a group of processes with a processor grid of its own, on a communicator of these processes alone, so
that all that works on a grid works within it.  World ranks go over data outermost, then over the pipeline, then over
the axes of a stage's grid: tensor groups stay next to one another, within a node.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from parlinalg.comm import Comm, SingleComm
from parlinalg.errors import ConfigError

Sizes = Mapping[str, int]


def arrange(sizes: Sequence[Sizes], outer: Collection[str] = ()) -> tuple[tuple[int, ...], ...]:
    """Return the world ranks of every pipeline rank's grid, in the row-major order of that grid.  Pure.

    Parameters
    ----------
    sizes : sequence of dict of str to int
        The axes of the grids, by pipeline rank.  Those in `outer` stand first, and have the same sizes in all grids.
    outer : collection of str
        The axes outside of the pipeline, such as "data": for each of their indices the stages' ranks follow one
        another.

    Raises
    ------
    ConfigError
        If an outer axis has another size in another grid.

    Examples
    --------
    >>> arrange([{"data": 2, "t": 2}, {"data": 2, "t": 2}], ["data"])
    ((0, 1, 4, 5), (2, 3, 6, 7))
    >>> arrange([{"data": 2, "t": 1}, {"data": 2, "r": 1, "c": 2}], ["data"])
    ((0, 3), (1, 2, 4, 5))
    """
    copies, inner = [], []
    for one in sizes:
        copies.append(math.prod(n for axis, n in one.items() if axis in outer))
        inner.append(math.prod(n for axis, n in one.items() if axis not in outer))
    if any(n != copies[0] for n in copies):
        raise ConfigError(f"the grids of a pipeline's ranks have {copies} data parallel ranks; all need as many")
    whole, start, found = sum(inner), 0, []
    for count, size in zip(copies, inner, strict=True):
        found.append(tuple(d * whole + start + i for d in range(count) for i in range(size)))
        start += size
    return tuple(found)


@dataclass(eq=False)
class PipelineTopology:
    """The pipeline ranks, their processes and grids, and this process's position among them.

    Attributes
    ----------
    world : Comm
        All ranks of the mesh.
    rank, size : int
        This process's pipeline rank, and how many there are.
    ranks : tuple of tuple of int
        By pipeline rank: the world ranks of its grid, in the grid's row-major order.
    sizes : tuple of dict of str to int
        By pipeline rank: the axes of its grid.
    comm : Comm or None
        The ranks at this position in all pipeline ranks, where all grids have the same sizes, else None.
    group : Comm
        The ranks of this pipeline rank, on which its grid is made.
    made : list of Comm
        Those that `close` frees.
    """

    world: Comm
    rank: int
    size: int
    ranks: tuple[tuple[int, ...], ...]
    sizes: tuple[dict[str, int], ...]
    comm: Comm | None
    group: Comm
    made: list[Comm] = field(default_factory=list, repr=False)

    @classmethod
    def of(cls, world: Comm, sizes: Sequence[Sizes], outer: Collection[str] = ()) -> PipelineTopology:
        """Return the topology around this process, with its communicators.  Collective.

        Parameters
        ----------
        world : Comm
        sizes, outer
            As in `arrange`.

        Raises
        ------
        ConfigError
            If the grids do not have as many ranks as there are.
        """
        ranks = arrange(sizes, outer)
        total = sum(map(len, ranks))
        if total != world.size:
            raise ConfigError(
                f"the grids of {len(ranks)} pipeline ranks take {' + '.join(str(len(r)) for r in ranks)} = {total} "
                f"ranks, but there are {world.size}: start with mpiexec -n {total}"
            )
        rank = next(p for p, theirs in enumerate(ranks) if world.rank in theirs)
        axes = tuple(dict(one) for one in sizes)
        if len(ranks) == 1:
            return cls(world, 0, 1, ranks, axes, SingleComm(("pipeline",), books=world.books), world)
        group = world.sub(ranks[rank], tuple(sizes[rank]))
        made, comm = [group], None
        if all(list(one.items()) == list(sizes[0].items()) for one in sizes):
            position = ranks[rank].index(world.rank)
            comm = world.sub([theirs[position] for theirs in ranks], ("pipeline",))
            made.append(comm)
        return cls(world, rank, len(ranks), ranks, axes, comm, group, made)

    @classmethod
    def alone(cls, world: Comm | None = None, sizes: Sizes | None = None) -> PipelineTopology:
        """Return the topology of a run without a pipeline."""
        world = SingleComm() if world is None else world
        return cls.of(world, [{"data": world.size} if sizes is None else sizes])

    def channel(self) -> Comm:
        """Return a communicator of all ranks for messages of one kind, freed with the topology.  Collective."""
        self.made.append(self.world.sub(range(self.world.size), ("pipeline",)))
        return self.made[-1]

    def close(self) -> None:
        """Free the communicators that were made for it.  Collective."""
        for comm in self.made:
            comm.free()
        self.made.clear()
