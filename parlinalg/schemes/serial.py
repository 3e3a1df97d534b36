"""No tensor parallelism: every rank holds all there is.

Row of the table: nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence

from parlinalg.layout import Layout
from parlinalg.schemes.scheme import Scheme, table
from parlinalg.schemes.shapes import only

_plan = table((None, None), n=None, k=None, x=Layout.replicated(3), w=Layout.replicated(2), y=Layout.replicated(3))

MODE: str | None = None
OPTIONS: dict[str, object] = {}
SCHEME = Scheme("serial", (), _plan, _plan)


def sizes(size: int, shape: Sequence[int] | None = None, depth: int | None = None) -> dict[str, int]:
    """Return the sizes of the axes over `size` ranks, of which there may be one."""
    return only("serial", size, SCHEME.axes, shape, depth)
