"""Keys and values of the tokens that came before."""

from __future__ import annotations

from typing import Any

from parlinalg.array import DistArray
from parlinalg.errors import LayoutError
from parlinalg.layout import Layout

Block = Any


class KeyValueCache:
    """The keys and values that one attention layer has made so far, for generation: `attention(x, cache=cache)`.

    Every call appends those of its tokens, and its queries meet all of them; used within `no_grad`.

    Parameters
    ----------
    max_length : int
        The most tokens; room for them is made at once, at the first call.

    Attributes
    ----------
    length : int
        How many tokens it holds; setting it back forgets the later ones.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self.length = 0
        self._block: Block = None
        self._shape: tuple[int, ...] = ()
        self._layout = Layout()

    def append(self, new: DistArray) -> DistArray:
        """Add keys and values, [b, s, kv heads, 2, e], cut on b and the heads; and return all, [b, t, …], a view.

        Raises
        ------
        ValueError
            If there is no room, or the batch or the heads are not those of the first call.
        LayoutError
            If the layout is not that of the first call.
        """
        batch, tokens, *rest = new.shape
        block, grid = new.block, new.grid
        if self._block is None:
            self._shape, self._layout = (batch, *rest), new.layout
            self._block = grid.backend.zeros((block.shape[0], self.max_length, *block.shape[2:]), block.dtype)
        if self._shape != (batch, *rest):
            raise ValueError(
                f"a cache of keys and values of shape [b, s, …] with b, … = {self._shape} is given {(batch, *rest)}; "
                "make a new one for another batch"
            )
        if self._layout != new.layout:
            raise LayoutError(f"a cache that lies as {self._layout!r} is given keys that lie as {new.layout!r}")
        end = self.length + tokens
        if end > self.max_length:
            raise ValueError(
                f"a cache for {self.max_length} tokens holds {self.length} and is given {tokens} more; make it longer: "
                f"KeyValueCache({end})"
            )
        if grid.inside:
            self._block[:, self.length : end] = block
        self.length = end
        return DistArray(self._block[:, :end], (batch, end, *rest), new.layout, grid)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part; 0 before the first call."""
        return 0 if self._block is None else int(self._block.nbytes)
