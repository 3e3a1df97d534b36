"""The elements a rank must hold for a product, by kernel: its blocks at rest and the kernel's buffers.  Pure."""

from __future__ import annotations

from typing import NamedTuple


def _part(n: int, p: int) -> int:
    return -(-n // p)


class Needs(NamedTuple):
    """Elements the fullest rank holds on a pm×pn×pk grid.

    `x`, `w`, `y`: the gathered A, the gathered B, the unsummed C; 0 where the matrix does not move, since the product
    then works on the block at rest.  `rest`: the blocks of A, B and C.  `m`, `n`, `k`: the extents of a rank's brick.
    """

    m: int
    n: int
    k: int
    rest: int
    x: int
    w: int
    y: int

    @classmethod
    def of(cls, m: int, n: int, k: int, pm: int, pn: int, pk: int) -> Needs:
        m, n, k = _part(m, pm), _part(n, pn), _part(k, pk)
        rest = m * _part(k, pn) + _part(k, pm) * n + m * _part(n, pk)
        return cls(m, n, k, rest, m * k * (pn > 1), k * n * (pm > 1), m * n * (pk > 1))

    def streamed(self) -> tuple[tuple[str, int, int, int], ...]:
        """For each matrix that may be kept whole: (its name, the extent streamed, elements besides the panels, panels).

        The last counts two panels of width one: while one is multiplied, the next one arrives.
        """
        m, n, k, rest, x, w, y = self
        return (
            ("y", k, rest + y, 2 * (m * (x > 0) + n * (w > 0))),
            ("x", n, rest + x, 2 * (k * (w > 0) + m * (y > 0))),
            ("w", m, rest + w, 2 * (k * (x > 0) + n * (y > 0))),
        )


class Kernel(NamedTuple):
    """A kernel and the elements a rank needs with it; `panel` and `stationary` are None where all is gathered."""

    kernel: str
    panel: int | None
    stationary: str | None
    words: int


def least_words(needs: Needs) -> int:
    """The fewest elements with which a product can be done: gathered, or streamed with panels of width one."""
    gathered = needs.rest + needs.x + needs.w + needs.y
    return min([gathered, *(base + width for _, extent, base, width in needs.streamed() if extent)])


def kernel_for(needs: Needs, limit: int | None) -> Kernel | None:
    """Whole gathered operands where they fit `limit` elements, else the stream with the fewest panels that does.

    Ties go to the stationary y, then x, then w.  None where nothing fits.
    """
    gathered = needs.rest + needs.x + needs.w + needs.y
    if limit is None or gathered <= limit:
        return Kernel("gather", None, None, gathered)
    fitting: list[tuple[int, int, Kernel]] = []
    for place, (stationary, extent, base, width) in enumerate(needs.streamed()):
        panel = min(extent, (limit - base) // width) if width else 0  # of width 0: nothing moves but what is kept whole
        if panel > 0:
            fitting.append((_part(extent, panel), place, Kernel("stream", panel, stationary, base + panel * width)))
    return min(fitting)[2] if fitting else None
