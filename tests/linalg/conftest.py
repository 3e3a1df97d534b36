"""Small matrices take the ways of large ones in some tests, and few ranks those of many; the same ones on all ranks."""

from __future__ import annotations

from zlib import crc32

import pytest

from parlinalg import tunables
from parlinalg.backend import skinny
from parlinalg.comm import shared
from parlinalg.grid import Grid
from parlinalg.linalg import kernels, planner, singular, tile_sizes


@pytest.fixture(autouse=True)
def ways(request, monkeypatch):
    """Half the tests deal few ranks rows too; half have sums and panels in common memory, and short pieces of trips.

    Of a test of several grids it is the one of two axes that deals rows, and the one of one axis that does not.
    Of the ranks of a node all, two or one factor matrices and make them tridiagonal.  In half the tests compiled
    loops, where there are some, compute on small blocks too; in half one rank does what it does with large matrices; in
    half all ranks find the singular values of small matrices too.
    """
    if request.node.get_closest_marker("serial"):
        return
    name = request.node.name
    number = crc32(name.encode())
    monkeypatch.setattr(Grid, "cores", 64 if number & 4 else 1 + (number >> 3) % 2)
    if "two axes" in name or (number & 1 and "one axis" not in name):
        monkeypatch.setattr(tile_sizes, "FEW", 0)
    if number & 2:
        monkeypatch.setattr(tunables, "SHARED_BYTES", 1)
        monkeypatch.setattr(tunables, "TILES_MOVED", 64)
        monkeypatch.setattr(shared, "SMALL", 1)
    if number & 16:
        monkeypatch.setattr(tunables, "COMPILED_SIZE", 1)
        monkeypatch.setattr(skinny, "LEAST", 1)
    if number & 32:
        monkeypatch.setattr(kernels, "LARGE", 1)
    if number & 64:
        for module in (planner, singular):
            monkeypatch.setattr(module, "svd_by_one", lambda *args, **options: False)
