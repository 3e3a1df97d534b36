"""What `parlinalg doctor --machine` measures, with few and short points, and the errors of its path."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from parlinalg.cli import doctor, measure
from parlinalg.errors import ConfigError
from parlinalg.planning.machine import OPERATIONS, STEPS, load_machine, machine_text, parse_machine


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few points, each measured for a moment."""
    monkeypatch.setattr(measure, "GEMMS", measure.GEMMS[:3])
    monkeypatch.setattr(measure, "ON_GPU", ())  # too large for the stand-in
    monkeypatch.setattr(measure, "SUMS", measure.SUMS[:2])
    monkeypatch.setattr(measure, "RECEIVED", measure.RECEIVED[:3])
    monkeypatch.setattr(measure, "POINT_SECONDS", 0.002)


@pytest.mark.timeout(150)
def test_measured_machine(brief, world) -> None:
    found = measure.measure_machine(world, "here")
    assert parse_machine(machine_text(found), "here.toml").name == "here"
    assert len(found.gemm["float32"].points) == 3
    assert found.kernels.rates["exp"] > 1e6
    assert 1e-7 < found.kernels.overhead < 1e-2
    if world.size > 1:
        link = found.node if found.network is None else found.network
        for op in OPERATIONS:
            rows = link.operation(op).points
            assert {p for p, _, _ in rows} >= {2}
            assert all(seconds > 0 for _, _, seconds in rows)
            p, nbytes, seconds = rows[-1]
            again = found.transfer(op, nbytes, p, p, found.ranks_per_node, world.size).total
            assert again == pytest.approx(seconds, rel=1e-6)


@pytest.mark.serial
def test_steps_are_found() -> None:
    """Latencies that grow with the ranks less one are a ring's; bytes reach a share of the bandwidth."""
    for steps, count in STEPS.items():
        rows = [(p, n, 1e-5 * count(p) + n / 5e8) for p in (2, 4, 8, 16) for n in (8.0, 1e6)]
        found = measure._operation(rows, 1e9).algorithms[0]
        assert found.steps == {"there and back": "ring"}.get(steps, steps)  # twice as many steps of a ring
        assert found.latency * STEPS[found.steps](8) == pytest.approx(1e-5 * count(8), rel=0.01)
        assert found.efficiency == pytest.approx(0.5, rel=0.01)


@pytest.mark.serial
def test_formula_of_products_is_found() -> None:
    shapes = [(m, n, k) for m in (8, 64, 1024) for n in (8, 64, 1024) for k in (8, 64, 1024)]
    rates = {f"{m} {n} {k}": 1e11 * m / (m + 16) * n / (n + 8) * k / (k + 32) for m, n, k in shapes}
    found = measure._fitted(rates, "by hand")
    assert found.rate == pytest.approx(1e11)
    assert found.half == (16, 8, 32)


@pytest.mark.serial
def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the name of a machine's file ends with \.toml"):
        doctor.run(argparse.Namespace(clean=False, gpu=False, machine=tmp_path / "here.json"))
    with pytest.raises(ConfigError, match=r"cannot write .*here.toml: No such file or directory"):
        doctor.run(argparse.Namespace(clean=False, gpu=False, machine=tmp_path / "no" / "here.toml"))
    assert load_machine("laptop").cores == 2
