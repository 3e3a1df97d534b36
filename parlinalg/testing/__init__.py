"""Testing code that runs on processor grids: a pytest plugin, and assertions about distributed results.

PYTEST_DONT_REWRITE: a test file may import this before pytest loads it as a plugin.

Put `pytest_plugins = ["parlinalg.testing"]` into the topmost `conftest.py` of the tests.  Then

- the fixture `grid` runs a test once on every grid of the ranks at hand, `serial_grid` has its twin of one rank, and
  `make_grid` makes grids of a test's own;
- a test that fails on one rank fails on all ranks, at the same point, and rank 0 alone prints;
- the markers and options of pytest-mpi work, whether it is installed or not: `@pytest.mark.mpi(min_size=2)`,
  `mpi_skip`, `mpi_xfail`, `--with-mpi`, `--only-mpi`.

`python -m pytest` runs the tests on one rank and starts no MPI; `mpiexec -n 4 python -m pytest --with-mpi` runs them on
four.  The guide is docs/guide/testing.md.
"""

from __future__ import annotations

from parlinalg.testing.agreement import FailedElsewhereError, agreed, once
from parlinalg.testing.equality import assert_equal_to_serial
from parlinalg.testing.memory import array_memory

__all__ = ["FailedElsewhereError", "agreed", "array_memory", "assert_equal_to_serial", "once"]

pytest_plugins = ["parlinalg.testing.plugin"]
