"""2.5D with the depth on k: each of d layers of a 2D grid sums a part of the products (Solomonik and Demmel, 2011).

Row of the table: x AG c; w AG r; y RS d; grad y AG d; dx RS c; dw RS r.  Contract is expand with c and d exchanged, so
that nothing moves between the two.
"""

from __future__ import annotations

from collections.abc import Sequence

from parlinalg.layout import Layout
from parlinalg.schemes.scheme import Scheme, table
from parlinalg.schemes.shapes import deep

_expand = table(
    ("r", None), n="c", k="d",
    x=Layout("r", None, ("d", "c")), w=Layout(("d", "r"), "c"), y=Layout("r", None, ("c", "d")),
)  # fmt: skip

MODE: str | None = "2.5d"
OPTIONS: dict[str, object] = {"depth_on": "k"}
SCHEME = Scheme("2.5d, depth on k", ("d", "r", "c"), _expand, _expand.renamed({"c": "d", "d": "c"}))


def sizes(size: int, shape: Sequence[int] | None = None, depth: int | None = None) -> dict[str, int]:
    """Return the sizes of the axes over `size` ranks: `shape` is (d, r, c), or `depth` leaves a square."""
    return deep(size, SCHEME.axes, shape, depth)
