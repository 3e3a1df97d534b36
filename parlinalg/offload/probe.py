"""Measurement of what a rank keeps for backward passes, and of what of it could be offloaded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, SupportsIndex

import numpy as np

from parlinalg.autograd import Parameter
from parlinalg.autograd.rule import memory
from parlinalg.autograd.saved import arrays
from parlinalg.backend import Backend
from parlinalg.nn import Module
from parlinalg.offload.activations import OffloadedActivations
from parlinalg.offload.stores import InMemory, OffloadedBytes, Store
from parlinalg.parallel.memory import ActivationMemory


def extrapolated(found: Mapping[int, int], rows: int) -> int:
    """Return the bytes that so many rows keep, from those of one or two other numbers of rows.  Pure.

    >>> extrapolated({1: 30, 2: 40}, 5), extrapolated({2: 40}, 5)
    (70, 100)
    """
    (n, one), *more = sorted(found.items())
    if rows in found:
        return found[rows]
    if not more:
        return -(-one * rows // n)
    m, two = more[0]
    return max(two, two - (one - two) * (rows - m) // (m - n))


class ProbeStore(InMemory):
    """A store that offloads nothing: arrays stay in memory, and are counted."""

    def __init__(self) -> None:
        self.away: weakref.WeakSet[OffloadedBytes] = weakref.WeakSet()
        self.nbytes = self.array = 0

    def put(self, raw: np.ndarray) -> OffloadedBytes:
        away = OffloadedBytes(raw.nbytes)
        away.hold = raw
        self.away.add(away)
        self.nbytes += raw.nbytes
        self.array = max(self.array, raw.nbytes)
        return away

    def close(self) -> None:
        """Do nothing: there is nothing to end."""


class ActivationProbe(OffloadedActivations):
    """Measures what of the activations of modules would be offloaded, and what would stay; nothing is offloaded.

    Parameters
    ----------
    parameters : iterable of Parameter
        Those of the whole model, which do not count.
    least : int
        Arrays of fewer bytes would stay.

    Attributes
    ----------
    block : int
        The most bytes of one forward pass of a module that would be offloaded.
    """

    def __init__(self, parameters: Iterable[Parameter], least: SupportsIndex | str = "64KiB") -> None:
        super().__init__(None, least=least)
        self._weights = {id(memory(b)) for p in parameters if (b := p.data.resident) is not None}
        self._probed = ProbeStore()
        self.block = 0

    def _open(self, backend: Backend, number: int | None) -> Store:
        return self._probed

    def _around(self, call: Callable[..., Any], module: Module, *args: Any, **kwargs: Any) -> Any:
        before = self._probed.nbytes
        result = super()._around(call, module, *args, **kwargs)
        self.block = max(self.block, self._probed.nbytes - before)
        return result

    def begin(self) -> None:
        """Begin a forward pass, whose arrays are counted apart from those of others."""
        self._probed.away = weakref.WeakSet()

    @property
    def array(self) -> int:
        """Bytes of the largest array that would have been offloaded."""
        return self._probed.array

    @property
    def away(self) -> weakref.WeakSet[OffloadedBytes]:
        """The arrays since `begin` that would have been offloaded and are still needed."""
        return self._probed.away

    @property
    def nbytes(self) -> int:
        """Bytes of these arrays."""
        return sum(each.nbytes for each in self.away)

    def measure(self, holders: Iterable[Any], away: Iterable[OffloadedBytes]) -> ActivationMemory:
        """Return what values on the tape and walks keep in memory, in all and without what would be offloaded."""
        here = {key: a for key, a in arrays(holders).items() if key not in self._weights}
        there = {id(memory(a.hold)): memory(a.hold) for a in away}
        stays = sum(int(a.nbytes) for a in here.values())
        return ActivationMemory(stays + sum(int(a.nbytes) for key, a in there.items() if key not in here), stays)


def blocks_of(model: Module) -> list[Module]:
    """Return the modules whose activations are offloaded together: the model's `blocks`, else its members.

    A model that is cut into stages may have none with parameters on this rank.
    """
    blocks = list(_members(getattr(model, "blocks", None) if hasattr(model, "blocks") else model))
    found = [b for b in blocks if any(isinstance(p, Parameter) for p in b.parameters())]
    return found if found or model.in_stages else [model]


def _members(module: Any) -> Iterator[Module]:
    with suppress(TypeError):
        yield from (m for m in module if isinstance(m, Module))
        return
    yield from module._modules.values()
