"""Published training systems: a row is traced and timed as the page of validation says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from parlinalg.planning.machine import load_machine
from parlinalg.planning.trace import Kernel, Start
from tests.launching import ROOT

pytestmark = pytest.mark.serial
PAGE = ROOT / "docs" / "foresight_validation.md"


@pytest.fixture
def systems(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "foresight"))
    import systems

    yield systems
    sys.modules.pop("systems", None)


@pytest.fixture
def published(systems: Any) -> Iterator[Any]:
    import published

    yield published
    for name in ("published", "measured", "more_systems"):
        sys.modules.pop(name, None)


def test_the_page_is_what_its_script_writes(published: Any) -> None:
    assert PAGE.read_text() == published.page()


def test_a_row_is_what_the_page_says(systems: Any) -> None:
    row = systems.KORTHIKANTI[0]
    line = next(each for each in PAGE.read_text().splitlines() if each.startswith(f"| {row.name} |"))
    published, own, _, theirs = (cell.strip() for cell in line.split("|")[2:6])
    machine = load_machine("a100")
    assert float(published) == row.seconds
    assert row.run.predict(machine).seconds == pytest.approx(float(own), rel=0.01)
    assert row.run.predict(machine, systems.Megatron).seconds == pytest.approx(float(theirs), rel=0.01)


@pytest.mark.one_in(3)
def test_a_row_of_h100s_is_what_the_page_says(systems: Any) -> None:
    row = systems.NVIDIA[0]
    line = next(each for each in PAGE.read_text().splitlines() if each.startswith(f"| {row.name} |"))
    published, own, _, fused = (cell.strip() for cell in line.split("|")[2:6])
    assert float(published) == pytest.approx(row.seconds, abs=0.01)
    made = row.run.predict_fused(load_machine("h100"))
    assert [each.seconds for each in made] == pytest.approx([float(own), float(fused)], rel=0.01)


def test_rows_of_schedules_are_what_the_page_says(systems: Any) -> None:
    """1F1B and ZB-H1 of the same microbatches; with Megatron-LM's kernels scores are kept."""
    machine = load_machine("a100")
    for row in (systems.ZERO_BUBBLE[0], systems.ZERO_BUBBLE[6]):
        line = next(each for each in PAGE.read_text().splitlines() if each.startswith(f"| {row.name} |"))
        published, own, _, theirs = (cell.strip() for cell in line.split("|")[2:6])
        assert float(published) == pytest.approx(row.seconds, abs=0.01)
        planned = row.run.predict(machine)
        assert planned.candidate.schedule == row.run.schedule
        assert planned.seconds == pytest.approx(float(own), rel=0.01)
        kept = row.run.predict(machine, systems.Megatron).seconds
        assert kept == pytest.approx(float(theirs), rel=0.01)
        assert kept < replace(row.run, kept=False).predict(machine, systems.Megatron).seconds


def test_traces_are_taken_again_on_another_machine(systems: Any) -> None:
    """A Llama on a ring: the traces of the first prediction serve for the second, which is that of a run of its own."""
    run = systems.Run(
        64, 2, 4, 8, 8, tensor=2, context=2, sequence=64, vocabulary=256, cuts=True, dtype="bfloat16", dropout=0.0,
        kv_heads=2, intermediate=96,
    )  # fmt: skip
    machine = load_machine("h100")
    both = run.predict_fused(machine)
    alone = run.predict(machine), run.predict(machine.with_fused_attention())
    assert [each.seconds for each in both] == [each.seconds for each in alone]
    assert both[1].seconds < both[0].seconds
    assert both[0].config.model.options["num_key_value_heads"] == 2
    assert (run.data, both[0].candidate.sequence) == (2, 2)


@pytest.mark.one_in(3)
def test_the_fastest_run_that_fits_is_taken(systems: Any) -> None:
    """Each run is also predicted alone; those that do not fit the memory are left out."""
    machine = load_machine("a100")
    runs = [
        systems.Run(64, 4, 4, 4, 16, pipeline=2, chunks=chunks, microbatch=rows, sequence=32, vocabulary=256)
        for chunks, rows in ((1, 1), (1, 8))
    ]
    run, planned = systems.fastest(runs, machine)
    assert run in runs
    assert planned.seconds == run.predict(machine).seconds
    with pytest.raises(SystemExit, match=r"none of .* fits 0 GB a rank"):
        systems.fastest(runs[:1], replace(machine, memory=planned.bytes // 2))


@pytest.mark.one_in(3)
def test_gradients_of_bfloat16_are_added_and_reduced_in_float32(systems: Any) -> None:
    """The first microbatch's are copied; Megatron-LM adds each later one's: 2 bytes more an element, or 6 more."""
    found: dict[str, list[Any]] = {}
    for dtype in ("float16", "bfloat16"):
        parts = found.setdefault(dtype, [])

        class Kept(systems.Megatron):  # type: ignore[misc, name-defined]
            def trace(self, *args: Any, parts: list[Any] = parts, **more: Any) -> Any:
                parts.append(super().trace(*args, **more))
                return parts[-1]

        run = systems.Run(64, 4, 4, 8, 16, pipeline=2, sequence=32, vocabulary=256, recompute="block", dtype=dtype)
        run.predict(load_machine("a100"), Kept)
    for half, wide in zip(found["float16"], found["bfloat16"], strict=True):
        added, reduced = [], []
        for part in (half, wide):
            kernels = [e for e in part.span("backward").events if isinstance(e, Kernel)]
            starts = [e for e in part.span("reduce").events if isinstance(e, Start) and e.axes == ("data",)]
            added.append(sum(e.nbytes for e in kernels if e.name == "accumulate gradients"))
            reduced.append(sum(e.nbytes for e in starts))
        assert added == [half.weights, 3 * half.weights]
        assert reduced[1] == 2 * reduced[0] > 0


def test_the_summary_is_of_the_tables_below(published: Any) -> None:
    """Errors of seconds as in the table; those of rates are turned into seconds."""
    kept = published.json.loads(published.KEPT.read_text())
    lines = published.trust(kept).splitlines()
    assert set(published.STANDING) <= set(kept)
    row = next(line for line in lines if line.startswith("| GPT-NeoX-20B"))
    found = published.errors(kept["neox"], published.MEGATRON)
    assert row.split("|")[3].strip() == "1"
    assert f"{abs(found[0]):.1f}%" in row
    (seconds,) = published.errors("| a | published | x | error |\n|---|---|---|---|\n| b | 100 | 125 | +25.0% |", "x")
    assert seconds == pytest.approx(-20.0)


def test_rows_of_other_splits_reach_the_configuration(systems: Any, published: Any) -> None:
    """Experts within data ranks, ZeRO within groups, Ulysses and the dtype of gradients; and one is as on the page."""
    more = published.more
    grok, ulysses, kempner = more.GROK[-1].run, more.XTUNER[2].run, more.KEMPNER[0].run
    config = grok.candidate().apply(systems.parse(grok.configuration()), grok.batch)
    assert config.model.options["expert_axis"] == "data"
    assert (config.model.options["num_local_experts"], config.model.options["capacity_factor"]) == (8, 1.0)
    assert (config.zero.stage, config.zero.within) == (1, 8)
    config = ulysses.candidate().apply(systems.parse(ulysses.configuration()), ulysses.batch)
    assert (config.parallel.sequence.size, config.parallel.sequence.ulysses) == (8, 8)
    config = kempner.candidate().apply(systems.parse(kempner.configuration()), kempner.batch)
    assert (config.precision.dtype, config.precision.communicate) == ("bfloat16", "float32")
    for row, machine in ((more.XTUNER[0], "a100"), (more.GROK[0], "h100")):
        line = next(each for each in PAGE.read_text().splitlines() if each.startswith(f"| {row.name} |"))
        made = row.run.predict_fused(load_machine(machine))
        cells = line.split("|")
        expected = [float(cells[3]), float(cells[5])]
        assert [each.seconds for each in made] == pytest.approx(expected, rel=0.01)
