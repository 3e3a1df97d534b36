"""What training keeps on each rank between steps, from layouts and dtypes alone.  Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from parlinalg.autograd.gradients import most_bytes
from parlinalg.layout import Cut, Layout, index_of, piece, span_of
from parlinalg.optim.flat import states_of
from parlinalg.parallel.buckets import MIB, in_order
from parlinalg.parallel.handlers import Handler, Treatment, treatment


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
    bucket: int = 25 * MIB,
) -> dict[str, int]:  # fmt: skip
    """Bytes at rest on one rank: of the values, the gradients and the optimizer's states of its parts.

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
    first_bucket, bucket : int
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
    wide = np.dtype(np.float32 if master is True else master) if master else None

    def treated(p: Described) -> Treatment:
        return treatment(handlers, getattr(p, "name", ""), p.layout, sizes)

    def elements(p: Described) -> int:
        return math.prod(p.layout.block_shape(tuple(p.shape), sizes, coords))

    def key(p: Described) -> tuple[str, Treatment, Cut]:
        return np.dtype(p.dtype).str, treated(p), p.layout.cut_axes

    found = dict.fromkeys(("values", "gradients", "states"), 0)

    def nbytes(p: Described) -> int:
        return most_bytes(p.layout, tuple(p.shape), sizes, np.dtype(p.dtype).itemsize)

    grouped = in_order(arrays[::-1], key, nbytes, first_bucket, bucket)
    for group in grouped:
        dtype, how, n = np.dtype(group[0].dtype), treated(group[0]), sum(map(elements, group))
        axes = how.scatter
        mine = len(piece(n, span_of(axes, sizes), index_of(axes, sizes, coords)))
        state, mastered = states_of(dtype, wide)
        found["values"] += n * dtype.itemsize
        found["gradients"] += (mine if how.stage >= 2 else n) * dtype.itemsize
        found["states"] += mine * state.itemsize * (states + mastered)
    return {**found, "total": sum(found.values())}
