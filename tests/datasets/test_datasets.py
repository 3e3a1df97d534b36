"""Data sets: what is refused; loaders: the same batches on every grid, cut without communication."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg.comm import ledger
from parlinalg.datasets import Loader, digits, npz, sets
from parlinalg.errors import ConfigError
from parlinalg.grid import factorizations
from parlinalg.layout import Layout
from parlinalg.schemes import discover
from tests.conftest import SIZE

FINE = {"x": np.arange(24.0).reshape(6, 2, 2), "y": np.arange(6) % 3}
WRONG = [
    ({"y": FINE["y"]}, ("needs x", "y")),
    ({"x": FINE["x"]}, ("needs x (samples) and y",)),
    ({**FINE, "x": np.where(FINE["x"] == 9, np.nan, FINE["x"])}, ("x holds nan in sample 2", "1 of 6")),
    ({**FINE, "x": np.full((6, 2), np.inf)}, ("inf in sample 0",)),
    ({**FINE, "x": np.arange(6.0)}, ("x has shape (6,)", "[samples, features]")),
    ({**FINE, "x": FINE["x"].astype(complex)}, ("complex128", "real numbers")),
    ({**FINE, "y": np.array([0, 1, 2, 0, 1, 0.5])}, ("y holds 0.5 for sample 5", "integers from 0")),
    ({**FINE, "y": np.array([0, 1, np.nan, 0, 1, 0])}, ("y holds nan for sample 2",)),
    ({**FINE, "y": np.array([0, -1, 2, 0, 1, 0])}, ("y holds -1 for sample 1",)),
    ({**FINE, "y": np.arange(5)}, ("5 labels for 6 samples",)),
    ({**FINE, "y": np.zeros((6, 3), int)}, ("y has shape (6, 3)", "one class number a sample")),
    ({**FINE, "y": np.array(list("abcdef"))}, ("y has dtype", "integers from 0")),
    ({**FINE, "x_test": FINE["x"]}, ("one of x_test and y_test",)),
    ({**FINE, "x_test": np.ones((2, 5)), "y_test": np.zeros(2, int)}, ("4 features and x_test 5",)),
]  # fmt: skip


@pytest.mark.serial
@pytest.mark.parametrize(("arrays", "parts"), WRONG)
def test_wrong_files_are_refused_by_name(arrays: dict[str, Any], parts: tuple[str, ...], tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(ConfigError) as caught:
        npz(tmp_path / "data.npz")
    for part in ("data.npz", *parts):
        assert part in str(caught.value)


@pytest.mark.serial
def test_files_that_are_no_archives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no data file .*nothing\.npz"):
        npz(tmp_path / "nothing.npz")
    (tmp_path / "text.npz").write_text("x, y")
    with pytest.raises(ConfigError, match=r"cannot be read as a \.npz file.*numpy\.savez"):
        npz(tmp_path / "text.npz")


@pytest.mark.serial
def test_splits_depend_on_the_seed_alone(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", **FINE)
    one, same, other = (npz(tmp_path / "data.npz", seed, test=0.5) for seed in (1, 1, 2))
    assert (one.x == same.x).all()
    assert not (one.x == other.x).all()
    both = np.concatenate([one.x, one.x_test])
    assert (both[np.argsort(both[:, 0])] == FINE["x"].reshape(6, 4)).all()
    assert one.classes == 3
    with pytest.raises(ConfigError, match=r"leaves 0 to test"):
        npz(tmp_path / "data.npz", test=0.01)


@pytest.mark.serial
def test_digits() -> None:
    found = digits()
    assert (found.features, found.classes, len(found.x) + len(found.x_test)) == (64, 10, 1797)
    assert 0 <= found.x.min() < found.x.max() == 1
    assert (found.x_test == digits().x_test).all()


@pytest.mark.serial
def test_digits_are_those_that_their_package_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    found = digits(seed=3)
    monkeypatch.setattr(sets, "DIGITS", "nowhere")
    want = digits(seed=3)
    for name in ("x", "y", "x_test", "y_test"):
        assert np.array_equal(getattr(found, name), getattr(want, name))


X = np.random.default_rng(3).normal(size=(23, 7))
Y = np.arange(23) % 5


@pytest.mark.parametrize("name", sorted(discover()))
def test_loaders_give_every_grid_the_same_batches(name: str, make_grid: Callable[..., Any]) -> None:
    scheme = discover()[name].SCHEME
    if not scheme.axes:
        scheme = scheme.with_data("data")
    for shape in factorizations(SIZE, len(scheme.axes)):
        grid = make_grid(dict(zip(scheme.axes, shape, strict=True)))
        plan = scheme.for_dims(2).expand
        loader = Loader(X, Y, 9, grid, plan.x, Layout(plan.x.dims[0]), dtype=np.float64, seed=5)
        assert len(loader) == 3
        with ledger(grid) as book:
            epochs = [[list(parts) for parts in loader.epoch(e, parts=2)] for e in range(2)]
        assert book.calls.total() == 0
        for number, epoch in enumerate(epochs):
            order = loader.order(number)
            assert sorted(order) == list(range(23))
            assert [len(part) for parts in epoch for part in parts] == [5, 4, 5, 4, 3, 2]
            assert [part.offset for parts in epoch for part in parts] == [0, 5, 0, 5, 0, 3]
            assert (np.concatenate([p.x.gather() for parts in epoch for p in parts]) == X[order]).all()
            assert (np.concatenate([p.y.gather() for parts in epoch for p in parts]) == Y[order]).all()
        assert (loader.order(0) != loader.order(1)).any()


@pytest.mark.serial
def test_loaders_refuse_what_does_not_fit(make_grid: Callable[..., Any]) -> None:
    grid = make_grid({"r": 1})
    with pytest.raises(ConfigError, match=r"23 samples and y 22"):
        Loader(X, Y[1:], 3, grid, Layout("r", None), Layout("r"))
    with pytest.raises(ConfigError, match=r"batch_size must be at least 1, not 0"):
        Loader(X, Y, 0, grid, Layout("r", None), Layout("r"))
