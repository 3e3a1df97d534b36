"""Data parallel: each rank a part of the batch, all the weights (gradients: see `parlinalg.parallel`).

Row of the table: dw AR data.
"""

from __future__ import annotations

from collections.abc import Sequence

from parlinalg.schemes.scheme import Scheme
from parlinalg.schemes.serial import SCHEME as SERIAL
from parlinalg.schemes.shapes import only

_scheme = SERIAL.with_data("data")

MODE: str | None = None
OPTIONS: dict[str, object] = {}
SCHEME = Scheme("data", _scheme.axes, _scheme.expand, _scheme.contract)


def sizes(size: int, shape: Sequence[int] | None = None, depth: int | None = None) -> dict[str, int]:
    """Return the sizes of the axes over `size` ranks: one axis takes them all."""
    return only("data parallelism", size, SCHEME.axes, shape, depth)
