"""Sequence parallel: each rank a part of every sequence, all the weights (Liu et al., ring attention, 2023; Jacobs et
al., DeepSpeed-Ulysses, 2023).

Row of the table: dw AR s.  Attention alone moves more; it is not a product of this table.
"""

from __future__ import annotations

from collections.abc import Sequence

from parlinalg.schemes.scheme import Scheme
from parlinalg.schemes.serial import SCHEME as SERIAL
from parlinalg.schemes.shapes import only

_scheme = SERIAL.with_sequence("s")

MODE: str | None = "sequence"
OPTIONS: dict[str, object] = {}
SCHEME = Scheme("sequence", _scheme.axes, _scheme.expand, _scheme.contract)


def sizes(size: int, shape: Sequence[int] | None = None, depth: int | None = None) -> dict[str, int]:
    """Return the sizes of the axes over `size` ranks: one axis takes them all."""
    return only("sequence parallelism", size, SCHEME.axes, shape, depth)
