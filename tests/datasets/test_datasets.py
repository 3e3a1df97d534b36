"""Data sets: what is refused; loaders: the same batches on every grid, cut without communication."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg.comm import ledger
from parlinalg.datasets import Loader, Windows, digits, npz
from parlinalg.errors import ConfigError
from parlinalg.grid import factorizations
from parlinalg.layout import Layout
from parlinalg.nn import Linear
from parlinalg.random import uniform
from parlinalg.schemes import discover
from tests.conftest import SIZE

SERIAL = discover()["serial"].SCHEME
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
    ({**FINE, "y": np.array([0, 1, 2**63, 0, 1, 0], np.uint64)}, ("y holds 9223372036854775808", "unique")),
    ({**FINE, "y": np.array([0, 1, 2**64 - 1, 0, 1, 0], np.uint64)}, ("y holds 18446744073709551615",)),
    ({**FINE, "y": np.array([0, 1, 2, 0, 1, 10**9])}, ("y holds 1000000000 for sample 5", "16,777,216 classes")),
    ({**FINE, "y": np.array([0, 1, 1e30, 0, 1, 0])}, ("y holds 1e+30 for sample 2",)),
    ({**FINE, "y": np.array([0, 1, np.inf, 0, 1, 0])}, ("y holds inf for sample 2",)),
    ({**FINE, "y": np.array([0, 1, None, 0, 1, 0])}, ("cannot be read", "Object arrays")),
    ({"x": np.zeros((0, 3)), "y": np.zeros(0, int)}, ("x has shape (0, 3)", "at least one of each")),
    ({**FINE, "y_test": np.array([2**40]), "x_test": np.ones((1, 4))}, ("y_test holds 1099511627776",)),
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
@pytest.mark.parametrize("seed", [2**64, 2**200, -1, 1e300, 1.5, True, "1", None, 10**5000], ids=range(9))
def test_a_seed_is_a_number_of_64_bits(seed: Any, tmp_path: Path, make_grid: Callable[..., Any]) -> None:
    np.savez(tmp_path / "data.npz", **FINE)
    grid = make_grid({"r": 1})
    loader = (FINE["x"], FINE["y"], 2, grid, Layout(None, None, None), Layout(None))
    text = (np.arange(90), 4, 2, grid, Layout(None, None), Layout(None, None))
    for take in (
        lambda seed: npz(tmp_path / "data.npz", seed, test=0.5), lambda seed: Loader(*loader, seed=seed).order(1),
        lambda seed: Windows(*text, seed=seed).starts(3), lambda seed: uniform(3, grid, Layout(None), seed=seed),
        lambda seed: Linear(3, 2, SERIAL, grid).initialize(seed),
    ):  # fmt: skip
        for good in (0, np.int64(7), 2**63 - 1, 2**63, 2**64 - 1):
            take(good)
        with pytest.raises(ConfigError, match="a seed is a whole number of at least 0 and below 2⁶⁴, not"):
            take(seed)


@pytest.mark.serial
def test_digits() -> None:
    found = digits()
    assert (found.features, found.classes, len(found.x) + len(found.x_test)) == (64, 10, 1797)
    assert 0 <= found.x.min() < found.x.max() == 1
    assert (found.x_test == digits().x_test).all()


@pytest.mark.serial
def test_digits_are_those_that_their_package_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    found = digits(seed=3)
    monkeypatch.setattr(Path, "is_file", lambda self: False)  # as where the package keeps its data elsewhere
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
