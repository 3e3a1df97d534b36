"""Drawings show every span where it is, simulated and measured."""

from __future__ import annotations

import builtins
import json
from typing import Any
from xml.etree import ElementTree

import pytest

from parlinalg.errors import ConfigError, ScheduleError
from parlinalg.pipeline import Op, make_schedule
from parlinalg.pipeline.drawing import chrome, lanes, overlay, png, staircase, svg
from parlinalg.pipeline.simulate import Costs, Simulation, Span, simulate

pytestmark = pytest.mark.serial

SVG = "{http://www.w3.org/2000/svg}"


def boxes(drawn: str, colours: set[str]) -> list[tuple[float, float, str]]:
    """Left, width and colour of all rectangles that are spans."""
    found = [e.attrib for e in ElementTree.fromstring(drawn).iter(f"{SVG}rect") if e.get("stroke") == "#ffffff"]
    assert {e["fill"] for e in found} <= colours
    return [(float(e["x"]), float(e["width"]), e["fill"]) for e in found]


def words(drawn: str) -> list[str]:
    return ["".join(e.itertext()) for e in ElementTree.fromstring(drawn).iter(f"{SVG}text")]


def delayed(simulation: Simulation) -> list[tuple[object, ...]]:
    """Spans as of a run that took twice the time, by a clock of its own."""
    return [tuple(s._replace(start=2 * s.start + 50, stop=2 * s.stop + 50)) for s in simulation.spans]


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "chimera"])
def test_svg(name: str) -> None:
    simulation = simulate(make_schedule(name, 2, 3), Costs(forward=1, backward=3, weight=1, step=1))
    colours = {box.colour for lane in lanes(simulation) for box in lane.boxes}
    found = boxes(svg(simulation), colours)
    left, right = min(x for x, _, _ in found), max(x + w for x, w, _ in found)
    assert 0 < left < right < float(ElementTree.fromstring(svg(simulation)).attrib["viewBox"].split()[2])
    scale = (right - left) / simulation.makespan
    wanted = [((s.start * scale) + left, (s.stop - s.start) * scale) for s in simulation.spans]
    assert [(x, w) for x, w, _ in found] == [pytest.approx(box, abs=0.011) for box in wanted]
    said = words(svg(simulation))
    assert {"rank 0", "rank 1"} < set(said)
    assert any(f"idle {100 * simulation.bubble:.1f}%" in w for w in said)
    assert {"1f1b": "F2", "zb-v": "W2b", "chimera": "B2a"}[name] in said
    assert svg(simulation) == svg(simulate(make_schedule(name, 2, 3), Costs(forward=1, backward=3, weight=1, step=1)))


def test_a_measured_run_lies_under_the_simulated_one() -> None:
    simulation = simulate(make_schedule("1f1b", 2, 3))
    half = len(simulation.of_rank(0))
    drawn = overlay(simulation, delayed(simulation))
    assert drawn == svg(simulation, delayed(simulation))
    assert words(drawn).count("measured") == 2
    found = boxes(drawn, {box.colour for lane in lanes(simulation) for box in lane.boxes})
    assert len(found) == 4 * half
    left = min(x for x, _, _ in found)
    for k in range(half):  # rank 0 simulated, rank 0 measured
        assert found[half + k][0] - left == pytest.approx(2 * (found[k][0] - left), abs=0.03)
        assert found[half + k][1] == pytest.approx(2 * found[k][1], abs=0.03)
        assert found[half + k][2] == found[k][2]
    run = lanes(simulation, delayed(simulation))
    assert [(lane.rank, lane.measured) for lane in run] == [(0, False), (0, True), (1, False), (1, True)]
    assert run[1].boxes[0].span.start == 0
    for wrong in (Span(2, Op.FORWARD, 0, 0, 0, 1), Span(0, Op.FORWARD, 1, 0, 0, 1)):
        with pytest.raises(ScheduleError, match=r"1f1b has ranks 0 to 1 with \[1, 1\] chunks"):
            overlay(simulation, [wrong])


def test_chrome_trace() -> None:
    simulation = simulate(make_schedule("chimera", 2, 2))
    events = json.loads(chrome(simulation, delayed(simulation), microseconds=1000))["traceEvents"]
    for pid, scale in ((0, 1000), (1, 2000)):
        mine = [e for e in events if e["pid"] == pid and e["ph"] == "X"]
        assert [(e["tid"], e["ts"], e["dur"]) for e in mine] == [
            (s.rank, s.start * scale, (s.stop - s.start) * scale) for s in simulation.spans
        ]
        assert mine[0]["args"] == {"microbatch": 0, "stage": 0, "copy": 0}
        assert [e["name"] for e in mine if e["tid"] == 1] == ["F1b", "F0a", "B0a", "B1b"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["chimera", "measured"]


def test_png() -> None:
    simulation = simulate(make_schedule("zb-h1", 3, 4))
    pictures = [png(simulation), png(simulation, delayed(simulation))]
    assert all(p.startswith(b"\x89PNG") for p in pictures)
    heights = [int.from_bytes(p[20:24], "big") for p in pictures]
    assert heights[1] > heights[0]


def test_png_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'parlinalg\[train\]', or draw SVG"):
        png(simulate(make_schedule("1f1b", 2, 2)))


def test_staircases_of_any_costs() -> None:
    half = staircase(simulate(make_schedule("1f1b", 2, 2), Costs(forward=0.5, backward=1.5)))
    assert half.splitlines() == [
        "rank 0  F0 F1 .  .  .  B0------ .  B1------",
        "rank 1  .  F0 B0------ F1 B1------ .  .  .",
    ]
    odd = staircase(
        simulate(make_schedule("1f1b", 3, 12), Costs(forward=0.70001, backward=[1.90003, 2.1, 1], weight=0))
    )
    assert all(f"{op}{j}" in line for line in odd.splitlines() for op in "FB" for j in range(12))
    assert max(map(len, odd.splitlines())) < 300
    free = staircase(simulate(make_schedule("gpipe", 1, 2), Costs(forward=0, backward=0, weight=0)))
    assert free == "rank 0"
    no_forward = staircase(simulate(make_schedule("gpipe", 1, 2), Costs(forward=0, backward=2)))
    assert no_forward == "rank 0  B0 B1"
    many = staircase(simulate(make_schedule("gpipe", 11, 1))).splitlines()
    assert many[0].startswith("rank  0  F0 ")
    assert many[10].startswith("rank 10  .  ")
