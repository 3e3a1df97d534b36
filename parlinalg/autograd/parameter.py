"""Parameters: the leaves that training changes."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from parlinalg.array import DistArray
from parlinalg.autograd.tape import Reducer, WeightGatherer
from parlinalg.autograd.tensor import Tensor
from parlinalg.backend.views import flat
from parlinalg.layout import Cut
from parlinalg.redistribute import check_block_replicas

Block = Any


class Owner(Protocol):
    """What holds the values of sharded parameters."""

    def adopt(self) -> None:
        """Have the values lie where the shards say, also those that were replaced."""

    def gather(self) -> None:
        """Give every rank the elements that the others have updated.  Collective over the shards' axes."""

    def moved(self, arrays: Mapping[int, Block]) -> None:
        """Take the values where they lie now: from the address of an array, the copy in which they lie instead."""


@dataclass(eq=False)
class Shard:
    """The part of a parameter that this rank updates: elements `start` to `stop` of its flattened block.

    Attributes
    ----------
    start, stop : int
    axes : tuple of str
        Axes that do not cut the parameter; along them the ranks' shards make up the block, in the order of the ranks.
    grad : array or None
        The settled gradient of these elements, one-dimensional.
    lengths : tuple of int
        The elements of each rank along `axes`: `stop - start` is one of them.
    owner : Owner or None
        Holds the value, and gathers it after an update.
    """

    start: int
    stop: int
    axes: Cut
    grad: Block = None
    lengths: tuple[int, ...] = ()
    owner: Owner | None = None


class Parameter(Tensor):
    """A leaf that training changes.

    Its gradient stays partial during a backward pass over axes that do not cut it.  Then its reducer settles it,
    together with those of other parameters; without a reducer the backward pass does.

    Parameters
    ----------
    data : DistArray
    name : str
        Its qualified name, unique in a model.

    Attributes
    ----------
    reducer : Reducer or None
    shard : Shard or None
        The part that this rank updates, where ranks that hold the same block share its update (ZeRO).  The settled
        gradient is then the shard's, and `grad` is None.
    gatherer : WeightGatherer or None
        What gives products the value as they work on it, where it does not rest so.
    writes : int
        How often the value was written to in place, but for an optimizer's updates; see `written`.
    """

    __slots__ = ("gatherer", "name", "reducer", "shard", "writes")

    def __init__(self, data: DistArray, name: str = "", requires_grad: bool = True) -> None:
        self.name = name
        self.reducer: Reducer | None = None
        self.shard: Shard | None = None
        self.gatherer: WeightGatherer | None = None
        self.writes = 0
        super().__init__(data, requires_grad)
        if data.grid.world.checked:
            check_block_replicas(
                data.block, data.layout, data.grid, f"the parameter {name!r}" if name else "a parameter"
            )

    @property
    def requires_grad(self) -> bool:
        return self._node is not None

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        Tensor.requires_grad.fset(self, wanted)  # type: ignore[attr-defined]
        if self._node is not None:
            self._node.owner = weakref.ref(self)

    @property
    def grad(self) -> DistArray | None:
        """The gradient that backward passes have added up so far; None forgets that of a shard too."""
        return None if self._node is None else self._node.grad

    @grad.setter
    def grad(self, value: DistArray | None) -> None:
        if value is None and self.shard is not None:
            self.shard.grad = None
        Tensor.grad.fset(self, value)  # type: ignore[attr-defined]

    @property
    def updated(self) -> tuple[Block, Block]:
        """What this rank updates: flat views of that part of the value, and of its gradient (None: there is none)."""
        value = flat(self.block)
        if self.shard is not None:
            return value[self.shard.start : self.shard.stop], self.shard.grad
        return value, None if self.grad is None else flat(self.grad.block)

    def written(self) -> None:
        """Say that the value was written to in place: an optimizer's copy of it in more bits then takes it."""
        self.writes += 1

    def deposit(self, block: Block) -> None:
        """Add a settled gradient, whose block is nobody else's, to `grad`."""
        if self._node is not None:
            self._node.deposit(block)

    def __repr__(self) -> str:
        return f"Parameter({self.name!r}, shape={self.shape}, dtype={self.dtype}, layout={self.layout!r})"


class Buffer(Parameter):
    """A value of a module that no optimizer changes, such as the running mean of a batch norm.

    It is part of a model's state and of checkpoints, and none of its parameters.  Ranks that hold the same block write
    the same values to it.
    """

    __slots__ = ()

    def __init__(self, data: DistArray, name: str = "") -> None:
        super().__init__(data, name, requires_grad=False)

    def __repr__(self) -> str:
        return f"Buffer({self.name!r}, shape={self.shape}, dtype={self.dtype}, layout={self.layout!r})"


def settle(parameters: Sequence[Parameter]) -> None:
    """Sum gradients that `no_sync` left partial, in the order of the parameters.  Collective.

    For parameters that no later backward pass reaches; `backward()` settles all those it reaches.
    """
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout.partial:
            parameter.grad = parameter.grad.summed()
