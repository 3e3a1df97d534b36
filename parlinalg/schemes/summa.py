"""2D SUMMA on r×c: every matrix is cut both ways (van de Geijn and Watts, 1997; Xu et al., Optimus, 2021).

Row of the table: x AG c; w AG r; dx RS c; dw RS r.
"""

from __future__ import annotations

from collections.abc import Sequence

from parlinalg.layout import Layout
from parlinalg.schemes.scheme import Scheme, table
from parlinalg.schemes.shapes import equal_sizes, no_depth

_plan = table(
    ("r", None), n="c", k=None,
    x=Layout("r", None, "c"), w=Layout("r", "c"), y=Layout("r", None, "c"),
)  # fmt: skip

MODE: str | None = "2d"
OPTIONS: dict[str, object] = {}
SCHEME = Scheme("2d", ("r", "c"), _plan, _plan)


def sizes(size: int, shape: Sequence[int] | None = None, depth: int | None = None) -> dict[str, int]:
    """Return the sizes of the axes over `size` ranks: `shape` is (r, c), by default a square."""
    no_depth("2d tensor parallelism", depth)
    return equal_sizes("2d", size, SCHEME.axes, shape)
