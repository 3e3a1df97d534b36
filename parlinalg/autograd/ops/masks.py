"""Masks of attention: which keys each query sees, as users give them and as this rank's block takes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.core import effective
from parlinalg.autograd.tensor import Tensor
from parlinalg.backend.visible import Visible
from parlinalg.errors import LayoutError
from parlinalg.layout import Cut, Layout

Block = Any
Mask = np.ndarray | DistArray


@dataclass(frozen=True)
class BlockMask:
    """Blocks of queries and keys that are seen; the others are skipped, and cost nothing.

    Parameters
    ----------
    table : array of bool
        Shape [n, m], or [heads, n, m] where heads differ: entry i, j says whether queries `size` i and following see
        keys `size` j and following.  On every rank alike.
    size : int
        Queries and keys of a block.

    Examples
    --------
    >>> local = BlockMask(np.eye(4, dtype=bool), 16)  # 64 queries, each sees the 16 keys of its own block
    """

    table: np.ndarray
    size: int

    def __post_init__(self) -> None:
        table = np.asarray(self.table)
        if table.dtype != np.bool_ or table.ndim not in (2, 3) or self.size < 1:
            raise ValueError(
                f"a BlockMask takes bools of shape [n, m] or [heads, n, m] and a size of at least 1, not {table.dtype} "
                f"of shape {table.shape} and {self.size}"
            )
        object.__setattr__(self, "table", table)


def visible(
    x: DistArray, shape: tuple[int, ...], keys: int, *, causal: bool, window: int | None, start: int,
    mask: Mask | BlockMask | None, key_padding: Mask | None,
) -> Visible:  # fmt: skip
    """What this rank's queries see.

    Parameters
    ----------
    x : DistArray
        The queries, cut as the result.
    shape : tuple of int
        Of the result: (b, s, kv heads, g, e).
    keys : int
        t.
    """
    b, s, heads, g, _ = shape
    if window is not None and window < 1:
        raise ValueError(f"attention's window is at least 1 (the query's own position), not {window}")
    dims = x.layout.dims
    keep = None
    if key_padding is not None:
        if tuple(key_padding.shape) != (b, keys):
            raise ValueError(f"attention: key_padding has shape {tuple(key_padding.shape)}, not [b, t] = {(b, keys)}")
        here = _here(x, key_padding, (dims[0], ()), "key_padding")
        keep = here[:, None, None, None, :]
    table, size = None, 0
    if isinstance(mask, BlockMask):
        table, size = _table(x, mask, shape, keys), mask.size
    elif mask is not None:
        pairs = _pairs(x, mask, shape, keys)
        keep = pairs if keep is None else keep & pairs
    return Visible(causal=causal, window=window, start=start, table=table, size=size, keep=keep)


def _pairs(x: DistArray, mask: Mask, shape: tuple[int, ...], keys: int) -> Block:
    """A mask of [b, heads, s, t] as this rank's part of [b, kv heads, g, s, t]."""
    b, s, heads, g, _ = shape
    full = (b, heads * g, s, keys)
    given = tuple(mask.shape)
    if len(given) > 4 or any(n not in (1, f) for n, f in zip(given[::-1], full[::-1])):
        raise ValueError(
            f"attention: the mask has shape {given}, which does not broadcast to [b, heads, s, t] = {full}"
        )
    dims = x.layout.dims
    block = mask.block if isinstance(mask, DistArray) else mask
    if isinstance(mask, DistArray):
        if mask.ndim != 4:
            raise ValueError(f"attention: a distributed mask has 4 dims, [b, heads, s, t], not the shape {given}")
        head = mask.layout.dims[1]
        if head and (head != dims[2] or dims[3]):
            raise _unlike(x, "mask", mask.layout, Layout(mask.layout.dims[0], None, None, None))
        cuts = (mask.layout.dims[0], head)
        if mask.layout.dims[2] or mask.layout.dims[3] or mask.layout.partial or cuts[0] not in ((), dims[0]):
            raise _unlike(x, "mask", mask.layout, Layout(dims[0], head, None, None))
    else:
        block = np.asarray(mask).reshape((1,) * (4 - len(given)) + given)
        cuts = ((), ())
    if block.dtype != np.bool_:
        raise TypeError(f"attention: a mask has bools, True where a key is seen, not {block.dtype}")
    ranges = x.grid.block(Layout(*dims), x.shape[:3] + (g, x.shape[4]))
    if not cuts[0] and block.shape[0] > 1:
        block = block[ranges[0].start : ranges[0].stop]
    if block.shape[1] > 1 or (heads * g == 1 and not cuts[1]):
        if cuts[1]:
            block = block.reshape(block.shape[0], -1, g, *block.shape[2:])
        else:
            block = block.reshape(block.shape[0], heads, g, *block.shape[2:])
            block = block[:, ranges[2].start : ranges[2].stop, ranges[3].start : ranges[3].stop]
    else:
        block = block[:, :, None]
    return x.grid.backend.from_host(np.ascontiguousarray(block)) if isinstance(block, np.ndarray) else block


def _here(x: DistArray, mask: Mask, cuts: tuple[Cut, ...], name: str) -> Block:
    """This rank's part of a mask whose dims are to be cut so."""
    if isinstance(mask, Tensor):
        mask = mask.data
    if mask.dtype != np.bool_:
        raise TypeError(f"attention: {name} has bools, True where a key is seen, not {mask.dtype}")
    if isinstance(mask, DistArray):
        have, want = effective(mask.layout, x.grid), effective(Layout(*cuts), x.grid)
        if have == want:
            return mask.block
        if have.partial or any(h not in ((), w) for h, w in zip(have.dims, want.dims)):
            raise _unlike(x, name, mask.layout, Layout(*cuts))
        block, cuts = mask.block, tuple(() if h else w for h, w in zip(have.dims, want.dims))
    else:
        block = np.asarray(mask)
    part = x.grid.block(Layout(*cuts), mask.shape)
    block = block[tuple(slice(r.start, r.stop) for r in part)]
    return x.grid.backend.from_host(np.ascontiguousarray(block)) if isinstance(block, np.ndarray) else block


def _unlike(x: DistArray, name: str, have: Layout, want: Layout) -> LayoutError:
    return LayoutError(
        f"attention: the {name} is {have!r}, and q is {x.layout!r}; each dim is whole or cut as that of q: mend it by "
        f".redistribute({want!r})"
    )


def _table(x: DistArray, mask: BlockMask, shape: tuple[int, ...], keys: int) -> np.ndarray:
    """A table of blocks as this rank's part of [kv heads, g, n, m]."""
    _, s, heads, g, _ = shape
    table = mask.table if mask.table.ndim == 3 else mask.table[None]
    want = (-(-s // mask.size), -(-keys // mask.size))
    if table.shape[1:] != want or table.shape[0] not in (1, heads * g):
        raise ValueError(
            f"attention: a BlockMask of {s} queries and {keys} keys in blocks of {mask.size} has a table of shape "
            f"{want}, or {(heads * g, *want)} by head, not {mask.table.shape}"
        )
    if table.shape[0] == 1:
        return table[None]
    ranges = x.grid.block(Layout(*x.layout.dims), (*x.shape[:3], g, x.shape[4]))
    by_head = table.reshape(heads, g, *want)
    return by_head[ranges[2].start : ranges[2].stop, ranges[3].start : ranges[3].stop]
