"""3D on i×j×l: every axis cuts another dim of the product (Agarwal et al., 1995; Bian et al., "Maximizing parallelism
in distributed training for huge neural networks", 2021).

Row of the table: x AG j; w AG i; y RS l; grad y AG l; dx RS j; dw RS i.  Contract is expand with j and l exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

from parlinalg.layout import Layout
from parlinalg.schemes.scheme import Scheme, table
from parlinalg.schemes.shapes import equal_sizes, no_depth

_expand = table(
    ("i", None), n="j", k="l",
    x=Layout(("i", "j"), None, "l"), w=Layout(("l", "i"), "j"), y=Layout(("i", "l"), None, "j"),
)  # fmt: skip

MODE: str | None = "3d"
OPTIONS: dict[str, object] = {}
SCHEME = Scheme("3d", ("i", "j", "l"), _expand, _expand.renamed({"j": "l", "l": "j"}))


def sizes(size: int, shape: Sequence[int] | None = None, depth: int | None = None) -> dict[str, int]:
    """Return the sizes of the axes over `size` ranks: `shape` is (i, j, l), by default a cube."""
    no_depth("3d tensor parallelism", depth)
    return equal_sizes("3d", size, SCHEME.axes, shape)
