"""Storages of parameters: they say where value and gradient lie, and which part of them this rank updates.

A parameter asks its storage, and nobody else: products bring a weight to work by it, the backward pass and the gradient
reducer leave gradients with it, and an optimizer learns from it what this rank updates.  `ParameterStorage` has value
and gradient whole, in memory.  Others are subclasses: `parlinalg.parallel.zero` has those of which ranks share the
update (ZeRO), `parlinalg.offload.parameters` those whose gradients lie on a disk or in host memory.  Each takes over
from the storage before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from parlinalg.array import DistArray
from parlinalg.backend.views import flat
from parlinalg.comm.group import Group
from parlinalg.comm.together import together
from parlinalg.errors import ConfigError, OffloadError
from parlinalg.exchange import volume
from parlinalg.grid import worlds
from parlinalg.layout import Cut, Layout

if TYPE_CHECKING:
    from parlinalg.autograd.gradients import GradientAccumulator
    from parlinalg.autograd.parameter import Parameter
    from parlinalg.autograd.tape import Node

Block = Any
Result = TypeVar("Result")


class Gatherer(Protocol):
    """A gatherer of weights that rest cut: it brings each to work for a product, where a plain gather would wait.

    Terms of their gradients go home without waiting too: at most `limit` bytes of them are in flight.

    Attributes
    ----------
    whole : bool
        Whether passes within `no_sync` keep their gradients as they come, to be moved once by the pass after.
    kept : dict
        These sums, with the parameters' nodes, by their ages.
    scatters : Group
        Where the reduce-scatters of one block's gradients wait for each other.
    """

    whole: bool
    kept: dict[int, tuple[Node, GradientAccumulator]]
    scatters: Group

    @property
    def limit(self) -> int:
        """The most bytes of gradients in flight; the same on all ranks."""

    def gather(self, parameter: Parameter, work: Layout) -> Block:
        """Return the parameter's block in the layout `work`.  Every rank asks for the same in the same order."""


class Owner(Protocol):
    """An owner of the values of parameters whose update ranks share: it has them side by side."""

    def adopt(self) -> None:
        """Move values that were replaced to where they belong.  Collective where `gather` does not wait."""

    def gather(self) -> None:
        """Give every rank the elements that the others have updated.  Collective over their axes."""

    def moved(self, arrays: Mapping[int, Block]) -> None:
        """Take the values where they lie now: from the address of an array, the copy in which they lie instead."""

    def finish(self) -> None:
        """Wait until all values are here, where `gather` does not.  Collective over their axes then."""


class Partition(NamedTuple):
    """The elements of a flattened block that a rank updates: `start` to `stop`.

    Attributes
    ----------
    start, stop : int
    axes : tuple of str
        Axes along which ranks with the same block share its update, in the order of the ranks; none if they do not.
    lengths : tuple of int
        The elements of each rank along `axes`.
    """

    start: int
    stop: int
    axes: Cut = ()
    lengths: tuple[int, ...] = ()


class StorageBytes(NamedTuple):
    """The bytes of a parameter on this rank between steps.

    Attributes
    ----------
    value, gradient : int
    updated : int
        Bytes of the value that this rank updates.
    offloaded : int
        Bytes of value and gradient on a disk or in host memory.
    """

    value: int
    gradient: int
    updated: int
    offloaded: int


class ParameterStorage:
    """The storage of a parameter whose value and gradient lie in memory, whole.

    The value is the parameter's `data`, which methods are given where they need it.

    Parameters
    ----------
    before : ParameterStorage, optional
        The parameter's storage so far, whose gatherer and gradient this one takes over.

    Attributes
    ----------
    grad : DistArray or None
        The gradient that backward passes have added up so far; it is partial until it is settled.
    gatherer : Gatherer or None
        It brings the value to work, where it rests cut.
    """

    __slots__ = ("gatherer", "grad")

    axes: Cut = ()
    """Axes along which ranks with the same block share its update."""
    lengths: tuple[int, ...] = ()
    """The elements of each rank along `axes`."""
    owner: Owner | None = None
    """The owner of the value, if ranks share its update."""

    def __init__(self, before: ParameterStorage | None = None) -> None:
        self.gatherer: Gatherer | None = None if before is None else before.gatherer
        self.grad: DistArray | None = None if before is None else before.grad

    def at_work(self, parameter: Parameter, work: Layout) -> Block:
        """Return the value's block in the layout `work`.  Collective."""
        if self.gatherer is not None:
            return self.gatherer.gather(parameter, work)
        return parameter.data.block_in(work)

    # ------------------------------------------------------------------ the gradient
    @property
    def settled(self) -> Block:
        """This rank's part of the settled gradient, or None; call `changed` after writing to it."""
        return None if self.grad is None else self.grad.block

    def changed(self, settled: Block) -> None:
        """Store what was written to `settled`."""

    def forget(self) -> None:
        """Forget the gradient."""
        self.grad = None

    def clear(self, data: DistArray) -> None:
        """Set the settled gradient to zeros."""
        self.grad = data.like(data.grid.backend.zeros(data.block.shape, data.dtype))

    def whole(self, data: DistArray) -> Block:
        """Return a copy of the whole block of the settled gradient.  Collective over `axes`."""
        return self.settled.copy(order="C")

    def replace(self, block: Block) -> None:
        """Take this rank's part of the whole block of a settled gradient."""
        mine = self.settled
        mine[...] = block
        self.changed(mine)

    # ------------------------------------------------------------------ the update
    def partition(self, data: DistArray, rank: int | None = None) -> Partition:
        """Return the elements that a rank of the grid updates, by default this one; no rank is asked."""
        return Partition(0, _elements(data, rank))

    def updated(self, data: DistArray) -> tuple[Block, Block]:
        """Return flat views of the elements that this rank updates, and of their settled gradient or None."""
        settled = self.settled
        return flat(data.block), None if settled is None else flat(settled)

    def nbytes(self, data: DistArray) -> StorageBytes:
        """Return the bytes of value and gradient on this rank between steps."""
        n = _elements(data) * data.dtype.itemsize
        return StorageBytes(n, n, n, n if data.resident is None else 0)


def _elements(data: DistArray, rank: int | None = None) -> int:
    """Return the elements of the block of a rank, by default of this one, without bringing it to memory."""
    if rank is None:
        return math.prod(data.grid.block_shape(data.layout, data.shape))
    return volume(data.layout.block(data.shape, data.grid.sizes, data.grid.coords_of(rank)))


def owners(parameters: Iterable[Parameter]) -> list[Owner]:
    """Return the owners of the values of parameters, once each, in the order of the parameters."""
    found = (p.storage.owner for p in parameters)
    return list({id(owner): owner for owner in found if owner is not None}.values())


def together_on(parameters: Iterable[Parameter | DistArray], function: Callable[[], Result], what: str) -> Result:
    """Call a function that reads or writes values or states, wherever they lie; if it fails on any rank, fail on all.

    Collective over the parameters' grids; the function does not communicate.
    """
    return together(worlds(p.grid for p in parameters), function, what, (ConfigError, OffloadError))
