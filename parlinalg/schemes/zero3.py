"""ZeRO-3: data parallel with the weights cut at rest and gathered for each product (Rajbhandari et al., ZeRO, 2020).

Row of the table: w AG data; dw RS data.
"""

from __future__ import annotations

from collections.abc import Sequence

from parlinalg.schemes.data import SCHEME as DATA
from parlinalg.schemes.scheme import Scheme
from parlinalg.schemes.shapes import only

_scheme = DATA.with_weights_cut("data")

MODE: str | None = None
OPTIONS: dict[str, object] = {}
SCHEME = Scheme("zero3", _scheme.axes, _scheme.expand, _scheme.contract)


def sizes(size: int, shape: Sequence[int] | None = None, depth: int | None = None) -> dict[str, int]:
    """Return the sizes of the axes over `size` ranks: one axis takes them all."""
    return only("ZeRO-3", size, SCHEME.axes, shape, depth)
