"""2.5D with the depth on the batch: d layers of a 2D grid, each with a part of the batch (Wang et al., Tesseract,
2021).

Row of the table: x AG c; w AG r; dx RS c; dw RS r, AR d.
"""

from __future__ import annotations

from collections.abc import Sequence

from parlinalg.layout import Layout
from parlinalg.schemes.scheme import Scheme, table
from parlinalg.schemes.shapes import deep

_plan = table(
    (("d", "r"), None), n="c", k=None,
    x=Layout(("d", "r"), None, "c"), w=Layout("r", "c"), y=Layout(("d", "r"), None, "c"),
)  # fmt: skip

MODE: str | None = "2.5d"
OPTIONS: dict[str, object] = {"depth_on": "batch"}
SCHEME = Scheme("2.5d, depth on the batch", ("d", "r", "c"), _plan, _plan)


def sizes(size: int, shape: Sequence[int] | None = None, depth: int | None = None) -> dict[str, int]:
    """Return the sizes of the axes over `size` ranks: `shape` is (d, r, c), or `depth` leaves a square."""
    return deep(size, SCHEME.axes, shape, depth)
