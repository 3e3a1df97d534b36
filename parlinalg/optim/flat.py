"""Parameters and optimizer states as views into flat buffers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from parlinalg.array import DistArray
from parlinalg.autograd import Parameter
from parlinalg.backend.kernels_optim import address, follows, joined, work_dtype

Block = Any


@dataclass
class Entry:
    """A parameter in a flat buffer, with its states."""

    parameter: Parameter
    data: DistArray
    states: dict[str, Block] = field(default_factory=dict)

    @property
    def current(self) -> bool:
        """Whether the parameter's value still is the view into the buffer."""
        return self.parameter.data is self.data

    def state(self, name: str) -> DistArray:
        """A state of the parameter, which is cut as the parameter is."""
        return DistArray(self.states[name], self.data.shape, self.data.layout, self.data.grid)


@dataclass
class Run:
    """Parameters that lie side by side, their gradients too: flat views of both and of the states."""

    p: Block
    g: Block
    states: dict[str, Block]


def flatten(parameters: Sequence[Parameter], states: Sequence[str], old: dict[int, Entry]) -> list[Entry]:
    """Move the parameters of each dtype into one flat buffer, in the order in which their gradients lie in memory.

    Parameters
    ----------
    states : sequence of str
        The states to make, zero, each flat as the parameters are; `old` entries' values are kept.
    """
    groups: dict[tuple[int, str], list[Parameter]] = {}
    for p in _as_gradients_lie(parameters):
        groups.setdefault((id(p.grid.backend), p.dtype.str), []).append(p)
    entries = []
    for group in groups.values():
        backend, dtype = group[0].grid.backend, group[0].dtype
        n = sum(p.block.size for p in group)
        data = backend.empty(n, dtype)
        flats = {name: backend.zeros(n, work_dtype(dtype)) for name in states}
        at = 0
        for p in group:
            part, shape = slice(at, at + p.block.size), p.block.shape
            at += p.block.size
            view = data[part].reshape(shape)
            view[...] = p.block
            kept = old.get(id(p))
            entry = Entry(p, DistArray(view, p.shape, p.layout, p.grid))
            for name, flat in flats.items():
                entry.states[name] = flat[part].reshape(shape)
                if kept is not None:
                    entry.states[name][...] = kept.states[name]
            p.data = entry.data
            entries.append(entry)
    return entries


def _as_gradients_lie(parameters: Sequence[Parameter]) -> list[Parameter]:
    bases: dict[int, int] = {}

    def place(indexed: tuple[int, Parameter]) -> tuple[float, int]:
        index, p = indexed
        if p.grad is None or p.grad.block.base is None:
            return math.inf, -index  # gradients arrive in reverse order of use
        base = bases.setdefault(id(p.grad.block.base), len(bases))
        return base, address(p.grad.block)

    return [p for _, p in sorted(enumerate(parameters), key=place)]


def runs(entries: Sequence[Entry]) -> list[Run]:
    """The entries that have gradients and are not empty, joined where they and their gradients lie side by side."""
    chains: list[list[tuple[Entry, Block]]] = []
    for entry in entries:
        grad = entry.parameter.grad
        if grad is None or not grad.block.size:
            continue
        last = chains[-1][-1] if chains else None
        if last is not None and follows(last[0].data.block, entry.data.block) and follows(last[1], grad.block):
            chains[-1].append((entry, grad.block))
        else:
            chains.append([(entry, grad.block)])
    return [
        Run(
            joined([e.data.block for e, _ in chain]),
            joined([g for _, g in chain]),
            {name: joined([e.states[name] for e, _ in chain]) for name in chain[0][0].states},
        )
        for chain in chains
    ]
