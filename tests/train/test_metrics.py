"""Counting right answers, and what a training leaves behind."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg import distribute
from parlinalg.comm import SingleComm
from parlinalg.errors import ConfigError
from parlinalg.grid import factorizations
from parlinalg.layout import Layout
from parlinalg.train import accuracy, launch
from parlinalg.train.progress import plot
from parlinalg.train.recipes import recipe
from tests.conftest import SIZE
from tests.train.trainings import Training, batches, in_update, main


@pytest.mark.parametrize("layout", [Layout("r", "c"), Layout(None, ("c", "r")), Layout(("r", "c"), None)])
def test_right_answers_are_counted_on_any_grid(layout: Layout, make_grid: Callable[..., Any]) -> None:
    random = np.random.default_rng(1)
    for classes in (3, 11):
        logits, targets = random.normal(size=(17, classes)), random.integers(0, classes, 17)
        for r, c in factorizations(SIZE, 2):
            grid = make_grid({"r": r, "c": c})
            found = accuracy(
                distribute(logits, grid, layout), distribute(targets, grid, Layout(layout.dims[0]))
            )  # fmt: skip
            assert found == (logits.argmax(1) == targets).sum()


SETTINGS: dict[str, Any] = {
    "steps": 2, "batch_size": 47, "model": {"hidden": (9,)}, "checkpoint": False, "backend": "numpy",
}  # fmt: skip


def told(out: Path) -> list[dict[str, Any]]:
    """What `metrics.jsonl` says."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.serial
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("with_bar", [True, False])
def test_metrics_are_written_line_by_line(
    with_bar: bool, seven: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not with_bar:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    settings, seen = {**SETTINGS, "data": str(seven)}, []
    with launch(settings, SingleComm()) as mesh:
        want = [(step.loss, step.norm, step.lr) for step in Training(mesh, tmp_path / "steps").steps()]
    in_update(monkeypatch, 2, lambda: seen.append([m["step"] for m in told(tmp_path)]))
    assert main(settings, tmp_path, comm=SingleComm()) == 0
    assert seen == [[1]], "the first line is there before the second step ends"
    found = told(tmp_path)
    assert [m["step"] for m in found] == [1, 2]
    assert [(m["loss"], m["grad_norm"], m["lr"]) for m in found] == want
    shown = capfd.readouterr().err
    last = found[-1]
    line = f"step 2 of 2: loss {last['loss']:.4f}, accuracy {last['accuracy']:.3f}, samples/s "
    assert ("2/2" if with_bar else f"{line}{last['samples_per_s']:.0f}") in shown


@pytest.mark.ranks(1, 2)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("for_good", [True, False])
def test_a_full_disk_does_not_end_a_training(
    for_good: bool, seven: Path, folder: Path, world: Any, backend: str, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Lines wait until there is space.  Where there is none to the end, all ranks report that then."""
    kept: list[int] = []

    def move(to: Callable[[int], int]) -> None:
        """Have the file's descriptor be another file's."""
        file = str((folder / "metrics.jsonl").resolve())
        numbers = [int(n) for n in os.listdir("/proc/self/fd") if n not in map(str, kept)]
        (mine,) = kept or [n for n in numbers if os.path.realpath(f"/proc/self/fd/{n}") == file]
        there = to(mine)
        os.dup2(there, mine)
        os.close(there)

    def fill(mine: int) -> int:
        nonlocal saved
        kept.append(mine)
        saved = os.dup(mine)
        return os.open("/dev/full", os.O_WRONLY)

    saved = -1
    in_update(monkeypatch, 2, lambda: None if world.rank else move(fill))
    in_update(monkeypatch, 4, lambda: None if world.rank or for_good else move(lambda mine: saved))
    settings = {**SETTINGS, "steps": 5, "data": str(seven), "backend": backend}
    if for_good:
        with pytest.raises(ConfigError, match=r"has ended, and lines of .*metrics.jsonl are missing: .*No space left"):
            main(settings, folder, comm=world)
    else:
        assert main(settings, folder, comm=world) == 0
    world.barrier()
    assert [m["step"] for m in told(folder)] == ([1] if for_good else [1, 2, 3, 4, 5])
    warned = capfd.readouterr().err.count("metrics.jsonl cannot be written ([Errno 28] No space left on device)")
    assert warned == (world.rank == 0)


@pytest.mark.ranks(1, 2)
@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (500, "3 steps of 160 samples, all that there are to train on (batch_size=500 is more) in 4 microbatches"),
        (47, "3 steps of 47 samples (the last of an epoch: 19) in 4 microbatches"),
        (80, "3 steps of 80 samples in 4 microbatches"),
    ],
)
def test_the_samples_of_a_step_are_those_that_there_are(
    batch: int, text: str, seven: Path, folder: Path, world: Any, backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {
        **SETTINGS, "data": str(seven), "backend": backend, "batch_size": batch, "steps": 3, "gradient_accumulation": 4,
    }  # fmt: skip
    assert main(settings, folder, comm=world) == 0
    assert (f"training    {text}, adamw" in capfd.readouterr().out) == (world.rank == 0)
    with launch(settings, world) as mesh:
        sample = recipe(mesh.config, mesh).sample
        assert sample is not None
        assert sample().shape[0] == -(-min(batch, 160) // 4), "by which memory is estimated"


@pytest.mark.serial
@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow", "ignore:divide by zero")
def test_numbers_that_are_not_finite_are_null(seven: Path, tmp_path: Path) -> None:
    """JSON has none of them."""
    settings = {**SETTINGS, "data": str(seven), "skip_nonfinite": True, "optimizer": {"name": "adamw", "lr": 1e300}}
    assert main(settings, tmp_path, comm=SingleComm()) == 0
    first, second = told(tmp_path)
    assert None not in first.values()
    assert second["loss"] is None
    assert second["grad_norm"] is None


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("quick")
def test_ranks_that_do_not_speak_write_nothing(
    seven: Path, tmp_path: Path, world: Any, backend: str, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)  # each rank's own
    assert main({**SETTINGS, "data": str(seven), "backend": backend}, Path("out"), comm=world) == 0
    heard = capfd.readouterr()
    if world.rank == 0:
        assert [m["step"] for m in told(Path("out"))] == [1, 2]
        assert "step" in heard.err
    else:
        assert not list(tmp_path.iterdir())
        assert (heard.out, heard.err) == ("", "")


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

    def thick_line(values: list[float]) -> list[float]:
        drawn.clear()
        assert plot(tmp_path / "a.png", [{"step": i, "loss": v} for i, v in enumerate(values)], {"loss": ""}, "") == ""
        found: list[float] = drawn[1][1]
        return found

    noisy = [1.0 + (-1) ** i for i in range(200)]
    assert max(abs(v - 1.0) for v in thick_line(noisy)[10:-10]) < 0.05, "it is smooth"
    gaps = [1.0, np.nan, 3.0, np.inf, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert thick_line(gaps) == [1.0, 2.0, 3.0, 4.0, 5.5, 6.0, 7.0, 8.0, 9.0, 10.0], "of what is finite"


@pytest.mark.serial
def test_steps_go_on_over_epochs() -> None:
    class Two:
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Any:
            raise NotImplementedError

        def epoch(self, number: int, parts: int, skip: int) -> list[tuple[int, int]]:
            return [(number, i) for i in range(skip, 2)]

    want = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    for start in range(7):
        assert list(batches(Two(), 5, 1, start)) == want[start:]  # type: ignore[arg-type,comparison-overlap]
