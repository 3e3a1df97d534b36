"""Criteria: each returns a sum and the count of its terms, whose quotient over a whole step is the mean.

Means of means are wrong where targets are ignored or batches uneven: a training step divides the sums of all its
microbatches by the step's count.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.core import mismatch, same_grid
from parlinalg.array.reductions import summed
from parlinalg.autograd.gradients import Term
from parlinalg.autograd.ops.softmax import Pieces
from parlinalg.autograd.rule import Part
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.backend import backend_of
from parlinalg.backend.halves import work_dtype
from parlinalg.backend.kernels import rows as kernels
from parlinalg.backend.shapes import has_values, places_of
from parlinalg.errors import ConfigError
from parlinalg.layout import Cut, Layout

Block = Any


def cross_entropy_sum(
    logits: Any, targets: Any, ignore_index: int = -100, label_smoothing: float = 0.0
) -> tuple[Tensor, int]:
    """Return the sum over all targets of -log softmax(logits)[target], and their number.

    Parameters
    ----------
    logits : Tensor
        Shape [*lead, classes]; any dim may be cut, the classes too.  They are not changed.
    targets : DistArray or Tensor
        Class ids, integers in 0 … classes - 1 or `ignore_index`, of shape [*lead], cut as the leading dims of `logits`.
    ignore_index : int
        Targets with this id do not count.
    label_smoothing : float
        The share ε in 0 … 1 of the target that is spread evenly over all classes.

    Returns
    -------
    loss : Tensor
        Without dims, whole; float32 for 16-bit logits.
    count : int
        How many targets are not ignored.

    Raises
    ------
    LayoutError
        If the targets are not cut as the logits' leading dims.
    ValueError, TypeError
        If a target is no class id.

    Cut classes take two all-reduces of a few numbers a target (Narayanan et al., Megatron-LM, 2021).
    """
    logits = as_tensor(logits)
    z = summed(logits.data, "cross_entropy")
    if not 0 <= label_smoothing <= 1:
        raise ConfigError(f"cross_entropy: label_smoothing is a share in 0 to 1, not {label_smoothing}")
    ids = _class_ids(z, targets, ignore_index)
    grid, xp, block, classes = z.grid, z.xp, z.block, z.shape[-1]
    pieces = Pieces(z)
    here = grid.block(z.layout, z.shape)[-1]
    counts = ids != ignore_index
    inside = counts & (ids >= here.start) & (ids < here.stop)
    rows = places_of(inside.reshape(-1), len(here) / max(1, classes))
    columns = ids.reshape(-1)[rows].astype(np.int64) - here.start
    local = (ids.size, block.shape[-1])
    rest, work = z.layout, work_dtype(z.dtype)

    top = pieces.max(kernels.row_max(block))
    picked = xp.zeros(ids.size, work)
    picked[rows] = block.reshape(local)[rows, columns]
    terms = [kernels.row_exp_sum(block, top).reshape(-1), picked]
    if label_smoothing:
        terms.append(xp.asarray(block.sum(axis=-1, dtype=work)).reshape(-1))
    sums = pieces.sum(xp.stack(terms)).reshape((len(terms), *ids.shape))
    log_sum = xp.log(sums[0]) + top
    losses = log_sum - (1 - label_smoothing) * sums[1]
    if label_smoothing:
        losses -= (label_smoothing / classes) * sums[2]
    losses = xp.where(counts, losses, work.type(0))
    loss, count = _totals(z, [losses.sum(dtype=np.float64), counts.sum()], pieces.lead, math.prod(z.shape[:-1]))

    def part(g: Block, block: Block, log_sum: Block, counts: Block, rows: Block, columns: Block) -> Term:
        scale = counts * g.astype(work)
        d = kernels.row_exp(block, log_sum, scale)
        at = d.reshape(local)
        if label_smoothing:
            d -= ((label_smoothing / classes) * scale)[..., None].astype(d.dtype)
        at[rows, columns] -= ((1 - label_smoothing) * scale.reshape(-1)[rows]).astype(d.dtype)
        return d, rest

    kept = Part(part, block, log_sum, counts, rows, columns)
    return record("cross_entropy_sum", DistArray(loss.astype(work), (), Layout(), grid), [logits], [kept]), int(count)


def cross_entropy(logits: Any, targets: Any, ignore_index: int = -100, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean of `cross_entropy_sum` over the targets that count; 0 where none does."""
    loss, count = cross_entropy_sum(logits, targets, ignore_index, label_smoothing)
    return loss * (1 / max(1, count))


def mse_sum(x: Any, target: Any) -> tuple[Tensor, int]:
    """Return the sum of (x - target)² over all elements, and their number.

    Parameters
    ----------
    x : Tensor
    target : DistArray or Tensor
        A constant, of the shape and layout of x, without NaN.
    """
    x = as_tensor(x)
    a, t = summed(x.data, "mse_loss"), summed(as_tensor(target).data, "mse_loss")
    same_grid([a, t])
    if t.shape != a.shape:
        raise ValueError(f"mse_loss: the target has shape {t.shape}, x has {a.shape}; they must be equal")
    if a.grid.effective(t.layout) != a.grid.effective(a.layout):
        raise mismatch("mse_loss: the target's layout is not that of x", t.layout, a.layout)
    p, q = a.block, t.block.astype(a.dtype, copy=False)
    local = kernels.squared_distance(p, q)
    if (
        t.dtype.kind not in "iub"
        and a.grid.backend.values
        and bool(a.xp.isnan(local))
        and bool((bad := a.xp.isnan(q)).any())
    ):
        where = _first(a, bad)
        raise ValueError(
            f"mse_loss: the target is NaN at {where} (rank {a.grid.rank}); targets are finite numbers: leave out or "
            "mask what is missing"
        )
    (loss,) = _totals(a, [local], a.layout.cut_axes, a.size)
    rest = a.layout
    y = DistArray(loss.astype(work_dtype(a.dtype)), (), Layout(), a.grid)
    part = Part(lambda g, p, q: ((p - q) * (2 * g).astype(p.dtype), rest), p, q)
    return record("mse_sum", y, [x], [part]), a.size


def mse_loss(x: Any, target: Any) -> Tensor:
    """Return the mean of (x - target)² over all elements."""
    loss, count = mse_sum(x, target)
    return loss * (1 / max(1, count))


def count_targets(targets: Any, ignore_index: int = -100) -> int:
    """Return the number of targets that are not ignored, over the whole array.  Collective."""
    t = as_tensor(targets).data
    (count,) = _totals(t, [(t.block != ignore_index).sum()], t.layout.cut_axes, t.size)
    return int(count)


def _totals(z: DistArray, numbers: list[Any], axes: Cut, targets: int) -> Any:
    """Return this rank's numbers, summed over the ranks along `axes` in one all-reduce, in float64.

    `targets` are all that there are: what imagined ranks count where this one has none, or targets without values.
    """
    xp = z.xp
    values = xp.stack([xp.asarray(n).astype(np.float64) for n in numbers])
    if z.grid.inside:
        z.grid.comm(axes).all_reduce(values)
    if z.grid.size < z.grid.world.size:  # ranks outside the grid learn the result
        z.grid.world.broadcast(values, 0)
    found = [xp.asarray(values[i]) for i in range(len(numbers))]
    if not z.grid.backend.values:  # a count has a value: other imagined ranks count as large a part of their targets
        cut = [d for d, dim in enumerate(z.layout.dims) if set(dim) & set(axes)]
        own, every = (math.prod(shape[d] for d in cut) for shape in (z.block.shape, z.shape))
        counts = [n.dtype.kind in "iu" for n in numbers]
        return [
            x if not count else round(int(n) * every / own) if own and has_values(n) else targets
            for n, x, count in zip(numbers, found, counts, strict=True)
        ]
    return found


def _class_ids(z: DistArray, targets: Any, ignore_index: int) -> Block:
    """Return the block of targets, once they are known to be class ids that lie as the logits."""
    t = as_tensor(targets).data
    same_grid([z, t])
    classes = z.shape[-1] if z.ndim else 0
    right = f"targets are integer class ids in 0 to {classes - 1}, or ignore_index = {ignore_index}"
    if not z.ndim or t.shape != z.shape[:-1]:
        raise ValueError(
            f"cross_entropy: targets of shape {t.shape} for logits of shape {z.shape}; there is one class id for "
            f"each row of logits: shape {z.shape[:-1]}"
        )
    if t.dtype.kind not in "iu":
        found = " with NaN among them" if t.dtype.kind == "f" and bool(z.xp.isnan(t.block).any()) else ""
        raise TypeError(f"cross_entropy: targets are {t.dtype}{found}; {right}: convert them by .astype('int64')")
    want = Layout(*z.layout.dims[:-1])
    if z.grid.effective(t.layout) != z.grid.effective(want):
        raise mismatch("cross_entropy: targets are not cut as the leading dims of the logits", t.layout, want)
    bad = (t.block != ignore_index) & ((t.block < 0) | (t.block >= classes))
    if any_of(bad, "whether targets are class ids"):
        where = _first(t, bad)
        value = int(t.block[bad][0])
        raise ValueError(f"cross_entropy: target {value} at {where} (rank {z.grid.rank}) is not a class; {right}")
    return t.block


def any_of(bad: Block, why: str) -> bool:
    """Return True if an element is marked as bad; those without values are assumed to be good."""
    if has_values(bad):
        return bool(bad.any())
    backend_of(bad).assume("finite", why)
    return False


def _first(a: DistArray, bad: Block) -> tuple[int, ...]:
    """Return the global index of the first element of this rank's block that is marked."""
    at = a.xp.nonzero(bad)
    starts = [r.start for r in a.grid.block(a.layout, a.shape)]
    return tuple(int(i[0]) + s for i, s in zip(at, starts, strict=True))
