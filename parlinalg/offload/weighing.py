"""What a rank keeps for backward passes, and what of it could be put away."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsIndex

import numpy as np

from parlinalg.autograd import Parameter
from parlinalg.autograd.rule import memory
from parlinalg.autograd.saved import arrays
from parlinalg.backend import Backend
from parlinalg.nn import Module
from parlinalg.offload.activations import OffloadedActivations
from parlinalg.offload.extents import Away, InMemory, Store


@dataclass(frozen=True)
class Keeps:
    """Bytes that a rank keeps for the backward passes of a step, at the most at once.

    Attributes
    ----------
    most : int
        Of all microbatches that are under way.
    stays : int
        Of them, at once, what stays in memory where the activations of blocks are offloaded.
    block : int
        What one block keeps of one microbatch.
    versions : int
        Versions of the weights that an asynchronous schedule keeps, all in memory; 0: the schedule is synchronous, and
        weights may rest elsewhere.
    """

    most: int
    stays: int = 0
    block: int = 0
    versions: int = 0


class Weight(NamedTuple):
    """Bytes: all, and those that would stay in memory."""

    whole: int
    stays: int


def reckoned(found: Mapping[int, int], rows: int) -> int:
    """The bytes that so many rows keep, from those of one or two other numbers of rows.  Pure.

    >>> reckoned({1: 30, 2: 40}, 5), reckoned({2: 40}, 5)
    (70, 100)
    """
    (n, one), *more = sorted(found.items())
    if rows in found:
        return found[rows]
    if not more:
        return -(-one * rows // n)
    m, two = more[0]
    return max(two, two - (one - two) * (rows - m) // (m - n))


class Weighing(InMemory):
    """Puts nothing away: arrays stay, and what would have left is known."""

    def __init__(self) -> None:
        self.away: weakref.WeakSet[Away] = weakref.WeakSet()
        self.nbytes = 0

    def put(self, raw: np.ndarray) -> Away:
        away = Away(raw.nbytes)
        away.hold = raw
        self.away.add(away)
        self.nbytes += raw.nbytes
        return away

    def close(self) -> None:
        """There is nothing to end."""


class WeighedActivations(OffloadedActivations):
    """Finds what would be put away of the activations of modules, and what would stay; nothing is.

    Parameters
    ----------
    parameters : iterable of Parameter
        Those of the whole model, which do not count.
    least : int
        Arrays of fewer bytes would stay.

    Attributes
    ----------
    block : int
        The most bytes that a module would put away of one forward pass.
    """

    def __init__(self, parameters: Iterable[Parameter], least: SupportsIndex | str = "64KiB") -> None:
        super().__init__(None, least=least)
        self._weights = {id(memory(p.block)) for p in parameters if not p.data.RESTS}
        self._weighing = Weighing()
        self.block = 0

    def _open(self, backend: Backend, number: int) -> Store:
        return self._weighing

    def _around(self, call: Callable[..., Any], module: Module, *args: Any, **kwargs: Any) -> Any:
        before = self._weighing.nbytes
        result = super()._around(call, module, *args, **kwargs)
        self.block = max(self.block, self._weighing.nbytes - before)
        return result

    def begin(self) -> None:
        """A forward pass begins, whose arrays are told from those of others."""
        self._weighing.away = weakref.WeakSet()

    @property
    def away(self) -> weakref.WeakSet[Away]:
        """What would have been put away since `begin`, as far as it is still needed."""
        return self._weighing.away

    def weigh(self, holders: Iterable[Any], away: Iterable[Away]) -> Weight:
        """What values on the tape, walks and the like keep in memory, and with what they would have put away."""
        here = {key: a for key, a in arrays(holders).items() if key not in self._weights}
        there = {id(memory(a.hold)): memory(a.hold) for a in away}
        stays = sum(int(a.nbytes) for a in here.values())
        return Weight(stays + sum(int(a.nbytes) for key, a in there.items() if key not in here), stays)
