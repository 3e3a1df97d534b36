"""Versions of the weights: the newest one, which the optimizer updates, and older ones that microbatches still need
("weight stashing": Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", 2019)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parlinalg.array import DistArray
from parlinalg.autograd import Owner, Parameter
from parlinalg.backend.views import address
from parlinalg.errors import ConfigError
from parlinalg.optim import Optimizer

Block = Any


class Stash:
    """Versions of the values of an optimizer's parameters, numbered by the steps behind them.

    Before a step whose old version is still needed, the newest values move to other memory, a copy; so what the tape
    holds of the old ones stays as it is.  Memory of versions that are dropped is used again.

    Parameters
    ----------
    optimizer : Optimizer

    Raises
    ------
    ConfigError
        If values do not rest where they are worked with: fetched ahead (ZeRO-3) or offloaded.

    Attributes
    ----------
    newest : int
        The steps behind the newest version, since `begin`.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters = [p for p in optimizer.parameters if p.requires_grad]
        for p in self.parameters:
            if p.gatherer is not None or p.data.RESTS:
                how = "fetched ahead of their use" if p.gatherer is not None else "offloaded"
                raise ConfigError(
                    f"asynchronous schedules keep versions of weights in memory, and {p.name!r} is {how}; use zero "
                    "stage 0, 1 or 2 and no offload of parameters, or a synchronous schedule such as 1f1b"
                )
        self._free: dict[tuple[int, str], list[Block]] = {}
        self._made: set[int] = set()
        """The addresses of memory that is this stash's own."""
        self.begin()

    def begin(self) -> None:
        """Begin to count again: the values as they are now are version 0, and the only one."""
        self.newest = 0
        self._versions: dict[int, list[DistArray]] = {0: [p.data for p in self.parameters]}
        self._used = 0

    def __len__(self) -> int:
        """How many versions there are."""
        return len(self._versions)

    def use(self, version: int) -> None:
        """Have the parameters be a version."""
        if version != self._used:
            for p, data in zip(self.parameters, self._versions[version], strict=True):
                p.data = data
            self._used = version

    def advance(self, keep: bool) -> None:
        """Be ready for a step that makes the next version, of the newest.  Collective over the axes of shards.

        Parameters
        ----------
        keep : bool
            Whether the one before stays.
        """
        self.use(self.newest)
        before = [p.data for p in self.parameters]
        self.optimizer.arrange()  # where the optimizer wants them; at the first step they move there, copied
        if keep:
            self._move([p for p, old in zip(self.parameters, before, strict=True) if p.data is old])
            self._versions[self.newest] = before
        else:
            del self._versions[self.newest]
        self.newest += 1
        self._versions[self.newest] = [p.data for p in self.parameters]
        self._used = self.newest

    def drop(self, version: int) -> None:
        """Forget a version that is not the newest; nothing may need it any more."""
        for place, base in _bases(self._versions.pop(version)).items():
            if place in self._made:
                self._free.setdefault((base.size, base.dtype.str), []).append(base)

    def _move(self, parameters: Sequence[Parameter]) -> None:
        """Copy the values to other memory, side by side as they are."""
        places = _bases([p.data for p in parameters])
        fresh = {place: self._copy(base, parameters[0].grid.backend) for place, base in places.items()}
        for p in parameters:
            base = _base(p.block)
            place = address(base)
            at = (address(p.block) - place) // p.dtype.itemsize
            block = fresh[place][at : at + p.block.size].reshape(p.block.shape)
            p.data = DistArray(block, p.shape, p.layout, p.grid)
        owners: dict[int, Owner] = {id(o): o for p in parameters if p.shard is not None and (o := p.shard.owner)}
        for owner in owners.values():
            owner.moved(fresh)
        self.optimizer.moved()

    def _copy(self, base: Block, backend: Any) -> Block:
        free = self._free.get((base.size, base.dtype.str))
        new = free.pop() if free else backend.empty(base.size, base.dtype)
        self._made.add(address(new))
        new[...] = base.reshape(-1)
        return new


def _base(block: Block) -> Block:
    """The array whose memory a block is in."""
    return block if block.base is None else block.base


def _bases(versions: Sequence[DistArray]) -> dict[int, Block]:
    """The arrays in which blocks lie, by their addresses; none without elements."""
    return {address(base): base for base in (_base(data.block) for data in versions) if base.size}
