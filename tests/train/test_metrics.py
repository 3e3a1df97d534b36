"""Counting right answers, and what a training leaves behind."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg import distribute
from parlinalg.grid import factorizations
from parlinalg.layout import Layout
from parlinalg.train.metrics import correct
from parlinalg.train.plots import centred_mean, half_width, plot
from parlinalg.train.progress import Progress
from tests.conftest import SIZE
from tests.train.trainings import batches


@pytest.mark.parametrize("layout", [Layout("r", "c"), Layout(None, ("c", "r")), Layout(("r", "c"), None)])
def test_right_answers_are_counted_on_any_grid(layout: Layout, make_grid: Callable[..., Any]) -> None:
    random = np.random.default_rng(1)
    for classes in (3, 11):
        logits, targets = random.normal(size=(17, classes)), random.integers(0, classes, 17)
        for r, c in factorizations(SIZE, 2):
            grid = make_grid({"r": r, "c": c})
            found = correct(
                distribute(logits, grid, layout), distribute(targets, grid, Layout(layout.dims[0]))
            )  # fmt: skip
            assert found == (logits.argmax(1) == targets).sum()


@pytest.mark.serial
@pytest.mark.parametrize("with_bar", [True, False])
def test_metrics_are_written_line_by_line(
    with_bar: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_bar:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    step = {"loss": 1.5, "accuracy": 0.25, "lr": 0.1, "samples_per_s": 100.0}
    with Progress(tmp_path, 2, speaks=True) as progress:
        for number in (1, 2):
            progress.add({"step": number, **step}, 0.0)
            assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == number
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == progress.history
    with Progress(tmp_path, 1, speaks=True) as overflown:
        overflown.add({"step": 1, "loss": float("nan"), "grad_norm": float("inf")}, 0.0)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": None, "grad_norm": None}
    shown = capsys.readouterr().err
    assert ("2/2" if with_bar else "step 2 of 2: loss 1.5000, accuracy 0.250, samples/s 100") in shown


@pytest.mark.serial
def test_ranks_that_do_not_speak_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(tmp_path, 1, speaks=False) as progress:
        progress.add({"step": 1}, 0.0)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err == ""


@pytest.mark.serial
def test_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history: list[dict[str, Any]] = [{"step": i, "loss": 1 / i, "tokens_per_s": 1 - 1 / i} for i in range(1, 50)]
    history[-1]["test_loss"] = 0.1
    curves = {"loss": "test_loss", "tokens_per_s": ""}
    assert plot(tmp_path / "a.png", history, curves, "title") == ""
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "no step" in plot(tmp_path / "b.png", [], curves, "title")
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert "pip install 'parlinalg[train]'" in plot(tmp_path / "c.png", history, curves, "title")


@pytest.mark.serial
def test_the_thick_line_of_a_picture_does_not_lag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is drawn: on a line, and half-way down a fall, in short runs and long ones."""
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    plain = Axes.plot

    def keep(self: Any, *args: Any, **options: Any) -> Any:
        drawn.append(args)
        return plain(self, *args, **options)

    monkeypatch.setattr(Axes, "plot", keep)
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)
    for n in (1, 2, 3, 10, 30, 100, 1000):
        steps = np.arange(1, n + 1)
        for loss in (5.0 - 3.0 * steps / n, 1.0 / (1.0 + np.exp(8.0 * (steps / n - 0.5)))):
            drawn.clear()
            history = [{"step": int(s), "loss": float(v)} for s, v in zip(steps, loss, strict=True)]
            assert plot(tmp_path / "a.png", history, {"loss": ""}, "title") == ""
            (_, thin), (_, thick) = drawn
            assert thin == [h["loss"] for h in history]
            atol = 1e-12 if loss[0] > 1.5 else 0.02  # the curvature's
            np.testing.assert_allclose(thick, loss, rtol=0, atol=atol)
    noisy = [1.0 + (-1) ** i for i in range(200)]
    assert max(abs(v - 1.0) for v in centred_mean(noisy, half_width(200))[10:-10]) < 0.05, "it is smooth"
    assert centred_mean([1.0, np.nan, 3.0, np.inf, 5.0], 1) == [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.serial
def test_steps_go_on_over_epochs() -> None:
    class Two:
        def __len__(self) -> int:
            return 2

        def epoch(self, number: int, parts: int, skip: int) -> list[tuple[int, int]]:
            return [(number, i) for i in range(skip, 2)]

    want = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    for start in range(7):
        assert list(batches(Two(), 5, 1, start)) == want[start:]  # type: ignore[arg-type,comparison-overlap]
