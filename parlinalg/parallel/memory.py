"""Memory of training on each rank: values, gradients, optimizer states, activations, and what moves.

`table` is pure arithmetic on layouts and dtypes; `estimate` asks the storages of a model's parameters, the gradient
reducer and the weight gatherer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np

from parlinalg.autograd.gradients import most_bytes
from parlinalg.backend.halves import work_dtype
from parlinalg.grid import worlds
from parlinalg.layout import Cut, Layout, index_of, piece, span_of
from parlinalg.nn import Module
from parlinalg.optim import Optimizer
from parlinalg.optim.flat import BUFFER, master_dtype, states_of
from parlinalg.parallel.buckets import MIB, full_from, in_order
from parlinalg.parallel.gatherer import WeightGatherer
from parlinalg.parallel.handlers import Handler, ReductionPolicy, policy_of
from parlinalg.parallel.reducer import GradientReducer, replaceable


@dataclass(frozen=True)
class ActivationMemory:
    """Bytes that a rank keeps for the backward passes of a step, the most at one time.

    Attributes
    ----------
    most : int
        Bytes for all microbatches in flight.
    stays : int
        What of them stays in memory where the activations of blocks are offloaded, the most at one time.
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


NOTHING = ActivationMemory(0)


@dataclass(frozen=True)
class MemoryTable:
    """Bytes that a rank holds in training, the largest of all ranks.

    Attributes
    ----------
    values, gradients, states, activations : int
    largest : int
        The largest block of a parameter; of 16 bits, in the 32 that products and updates work in.
    block : int
        What one block of the model keeps for the backward pass, of one microbatch.
    fixed : int
        Bytes of values and gradients that stay in memory whatever is offloaded.
    stays : int
        Bytes of activations that stay in memory where those of blocks are offloaded.
    older : int
        Older versions of the values, of asynchronous schedules.
    transient : int
        Temporary bytes during a pass: whole gradients and weights of which parts are stored, and the arrays that sums
        are formed in.
    transient_buckets : int
        The part of `transient` that is not needed when gradients are reduced one by one, without buckets.
    updated : int
        Bytes of the values that the rank has optimizer states of.
    step : int
        Temporary bytes of the optimizer's step, which begins when the passes have ended.
    home : int
        The states of one parameter that lie whole on the rank; they come to memory together where they are offloaded.
    first_step : int
        Temporary bytes in the first step, besides values and gradients: it moves them to where they lie side by
        side, a buffer at a time.
    """

    values: int
    gradients: int
    states: int
    activations: int = 0
    largest: int = 0
    block: int = 0
    fixed: int = 0
    stays: int = 0
    older: int = 0
    transient: int = 0
    transient_buckets: int = 0
    updated: int = 0
    step: int = 0
    home: int = 0
    first_step: int = 0

    @property
    def total(self) -> int:
        """All that a step holds with nothing offloaded."""
        rest = self.values + self.older + self.gradients + self.states
        return rest + max(self.activations + self.transient, self.step)


def estimate(model: Module, optimizer: Optimizer, activations: ActivationMemory = NOTHING) -> MemoryTable:
    """Return the memory of a rank with nothing offloaded, the largest over all ranks of its grid.  Collective."""
    parameters = list(model.parameters())
    mine = dict.fromkeys((each.name for each in fields(MemoryTable)), 0)
    numbers, moves = optimizer.flat.numbers(), 0
    states = [len(optimizer.states_of(group)) for group in optimizer.param_groups]
    for p in parameters:
        names = states[numbers[id(p)]] if id(p) in numbers else 0
        dtype, mastered = states_of(p.dtype, optimizer.flat.master)
        held = p.storage.nbytes(p.data)
        mine["values"] += held.value
        mine["updated"] += held.updated
        mine["gradients"] += held.gradient
        mine["states"] += held.updated // p.dtype.itemsize * (names + mastered) * dtype.itemsize
        mine["largest"] = max(mine["largest"], held.value // p.dtype.itemsize * work_dtype(p.dtype).itemsize)
        if p.storage.owner is not None:
            mine["fixed"] += held.value + held.gradient
            continue
        moves += held.value
        mine["fixed"] += 0 if replaceable(p.reducer) else held.gradient
    home: dict[int, int] = {}
    for s in optimizer.home_states():
        home[id(s.parameter)] = home.get(id(s.parameter), 0) + s.nbytes
    mine["states"] += sum(home.values())
    mine["home"] = max(home.values(), default=0)
    mine["step"] = optimizer.step_bytes
    mine["activations"], mine["stays"], mine["block"] = activations.most, activations.stays, activations.block
    mine["older"] = max(0, activations.versions - 1) * mine["values"]
    reducers = {id(p.reducer): p.reducer for p in parameters if isinstance(p.reducer, GradientReducer)}
    gatherers = {id(g): g for p in parameters if isinstance(g := p.storage.gatherer, WeightGatherer)}
    bucketed = sum(r.transient_bytes for r in reducers.values())
    mine["transient"] = bucketed + sum(g.transient_bytes for g in gatherers.values())
    settled = sum(r.transient_bytes for r in reducers.values() if replaceable(r))
    mine["transient_buckets"] = max(0, settled - 3 * mine["largest"] // 4)  # one gradient's sum in 16 bits remains
    bucket = max((r.full_from(p) for r in reducers.values() for p in r.parameters), default=0) + mine["largest"]
    mine["first_step"] = min(moves, max(BUFFER, bucket))
    rows = list(mine.values())
    for comm in worlds(p.grid for p in parameters):
        rows = [max(column) for column in zip(*comm.share(rows, others="by rank"), strict=True)]
    return MemoryTable(*rows)


class Described(Protocol):
    """An array described: a parameter, or one that is declared only."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...


def table(
    parameters: Iterable[Described], handlers: Sequence[Handler] = (), *, states: int = 2, master: Any = False,
    sizes: Mapping[str, int] | None = None, coords: Mapping[str, int] | None = None, first_bucket: int = MIB,
    bucket: int | None = None,
) -> dict[str, int]:  # fmt: skip
    """Return the bytes at rest on one rank: of the values, the gradients and the optimizer's states of its parts.

    With Ψ parameters on N ranks, v bytes a value and gradient and s a state: v Ψ + v Ψ + k s Ψ where nothing is shared;
    ZeRO-1 v Ψ + v Ψ + k s Ψ/N; ZeRO-2 v Ψ + (v + k s) Ψ/N; ZeRO-3 (2 v + k s) Ψ/N.  For 16-bit values with float32
    masters v = 2, s = 4, k = 3; for float32 v = 4, s = 4, k = 2.

    Parameters
    ----------
    parameters : iterable
        Parameters in the order of the reducer's, or anything with `shape`, `layout` and `dtype`.
    handlers : sequence
        As of `GradientReducer`.
    states : int
        The arrays that the optimizer keeps of each parameter, but for masters: 2 of Adam, 1 of SGD with momentum.
    master : bool or dtype
        As of `Optimizer`.
    sizes, coords : dict of str to int, optional
        The grid's axes and this rank's place on them; by default those of the parameters' grid.
    first_bucket, bucket : int, optional
        As of `GradientReducer`: parts are of buckets, so the exact bytes depend on them.

    Returns
    -------
    dict of str to int
        "values", "gradients", "states" and "total", in bytes.
    """
    arrays = list({id(p): p for p in parameters}.values())
    if sizes is None or coords is None:
        grid = arrays[0].grid  # type: ignore[attr-defined]
        sizes, coords = grid.sizes, grid.coords
    wide = master_dtype(master)

    def policy(p: Described) -> ReductionPolicy:
        return policy_of(handlers, getattr(p, "name", ""), p.layout, sizes)

    def elements(p: Described) -> int:
        return math.prod(p.layout.block_shape(tuple(p.shape), sizes, coords))

    def key(p: Described) -> tuple[str, ReductionPolicy, Cut]:
        return np.dtype(p.dtype).str, policy(p), p.layout.cut_axes

    found = dict.fromkeys(("values", "gradients", "states"), 0)

    def nbytes(p: Described) -> int:
        return most_bytes(p.layout, tuple(p.shape), sizes, np.dtype(p.dtype).itemsize)

    def limit(p: Described) -> int:
        return full_from(p.layout, policy(p), sizes) if bucket is None else bucket

    grouped = in_order(arrays[::-1], key, nbytes, first_bucket, limit)
    for group in grouped:
        dtype, how, n = np.dtype(group[0].dtype), policy(group[0]), sum(map(elements, group))
        axes = how.scatter
        mine = len(piece(n, span_of(axes, sizes), index_of(axes, sizes, coords)))
        state, mastered = states_of(dtype, wide)
        found["values"] += n * dtype.itemsize
        found["gradients"] += (mine if how.stage >= 2 else n) * dtype.itemsize
        found["states"] += mine * state.itemsize * (states + mastered)
    return {**found, "total": sum(found.values())}
