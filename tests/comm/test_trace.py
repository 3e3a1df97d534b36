"""A trace counts what a ledger counts, and knows when operations were under way and when this rank waited."""

from __future__ import annotations

import json

import numpy as np
import pytest

import parlinalg as pla


@pytest.mark.ranks(2, 3)
def test_waits_and_operations(make_grid, world, folder):
    grid = make_grid({"r": world.size})
    comm = grid.comm(("r",))
    block = grid.backend.from_host(np.ones(6 * world.size, np.float32))
    with pla.trace(grid) as spans, pla.ledger(grid) as book:
        comm.all_reduce(block)
        with spans.span("between"):
            handle = comm.all_reduce(block, wait=False)
        handle.wait()
        handle.wait()
        tested = comm.all_reduce(block, wait=False)
        while not tested.test():
            pass
    assert spans.words == book.words
    assert [s.kind for s in spans.spans[:5]] == ["operation", "wait", "span", "wait", "operation"]
    operations = [s for s in spans.spans if s.kind == "operation"]
    assert {(s.name, s.axes, s.nbytes) for s in operations} == {("all_reduce", ("r",), 48 * (world.size - 1))}
    assert len(operations) == spans.calls.total()
    waits = [s for s in spans.spans if s.kind == "wait"]
    assert spans.waited == pytest.approx(sum(s.stop - s.start for s in waits))
    assert all(0 <= s.start <= s.stop for s in spans.spans)
    spans.write(folder / "trace.json")
    with pytest.raises(pla.errors.FileError, match="none"):
        spans.write(folder / "none" / "trace.json")
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == set(range(world.size))
    assert sum(e["ph"] == "b" for e in events) == sum(e["ph"] == "e" for e in events)
    before = len(spans.spans)
    comm.all_reduce(block)
    assert len(spans.spans) == before
