"""1D: columns of the weights into a block, rows out of it (Shoeybi et al., Megatron-LM, 2019).

Row of the table, expand / contract: y – / AR t; grad y –; dx AR t / –.
"""

from __future__ import annotations

from collections.abc import Sequence

from parlinalg.layout import Layout
from parlinalg.schemes.scheme import Scheme, table
from parlinalg.schemes.shapes import only

MODE: str | None = "1d"
OPTIONS: dict[str, object] = {"sequence_parallel": False}
SCHEME = Scheme(
    "1d",
    ("t",),
    expand=table(
        (None, None), n="t", k=None,
        x=Layout(None, None, None), w=Layout(None, "t"), y=Layout(None, None, "t"),
    ),
    contract=table(
        (None, None), n=None, k="t",
        x=Layout(None, None, "t"), w=Layout("t", None), y=Layout(None, None, None),
    ),
)  # fmt: skip


def sizes(size: int, shape: Sequence[int] | None = None, depth: int | None = None) -> dict[str, int]:
    """Return the sizes of the axes over `size` ranks: one axis takes them all."""
    return only("1d tensor parallelism", size, SCHEME.axes, shape, depth)
