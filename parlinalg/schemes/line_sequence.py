"""1D with sequence cuts: as 1D, but the residual stream rests cut along the sequence (Korthikanti et al., "Reducing
activation recomputation in large transformer models", 2022: Megatron's sequence parallelism).

Row of the table, expand / contract: x AG t / –; y – / RS t; grad y – / AG t; dx RS t / –.
"""

from __future__ import annotations

from collections.abc import Sequence

from parlinalg.layout import Layout
from parlinalg.schemes.scheme import Scheme, table
from parlinalg.schemes.shapes import only

MODE: str | None = "1d"
OPTIONS: dict[str, object] = {"sequence_parallel": True}
SCHEME = Scheme(
    "1d with sequence cuts",
    ("t",),
    expand=table(
        (None, None), n="t", k=None,
        x=Layout(None, "t", None), w=Layout(None, "t"), y=Layout(None, None, "t"),
    ),
    contract=table(
        (None, None), n=None, k="t",
        x=Layout(None, None, "t"), w=Layout("t", None), y=Layout(None, "t", None),
    ),
)  # fmt: skip


def sizes(size: int, shape: Sequence[int] | None = None, depth: int | None = None) -> dict[str, int]:
    """Return the sizes of the axes over `size` ranks: one axis takes them all."""
    return only("1d tensor parallelism", size, SCHEME.axes, shape, depth)
