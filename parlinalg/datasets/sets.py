"""Labelled samples for a classifier, split into training and test data alike on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from parlinalg.errors import ConfigError
from parlinalg.random.counter import check_seed

TEST_SHARE = 0.2
ARRAYS = ("x", "y", "x_test", "y_test")
TRAIN = {"x_train": "x", "y_train": "y"}  # names that are taken too
MOST_CLASSES = 1 << 24


@dataclass(frozen=True)
class Samples:
    """Samples and labels, whole on every rank, in host memory.

    Attributes
    ----------
    name : str
    x, x_test : ndarray
        [samples, features], floating.
    y, y_test : ndarray
        [samples], integers from 0 to `classes` − 1.
    classes : int
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    classes: int

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Samples and labels, those of the test last."""
        return self.x, self.y, self.x_test, self.y_test

    @property
    def features(self) -> int:
        return int(self.x.shape[1])

    def __str__(self) -> str:
        return (
            f"{self.name}: {len(self.x)} samples to train and {len(self.x_test)} to test, {self.features} features, "
            f"{self.classes} classes"
        )


DIGITS = "digits.csv.gz"


def digits(seed: int = 0, test: float = TEST_SHARE) -> Samples:
    """Load the 1,797 8×8 images of digits that come with scikit-learn (Alpaydin and Kaynak, UCI, 1998); no download.

    Parameters
    ----------
    seed : int
        The seed of the split.
    test : float
        The share of samples kept for the test.

    Raises
    ------
    ConfigError
        If scikit-learn is not installed.
    """
    found = find_spec("sklearn")
    file = Path(next(iter((found and found.submodule_search_locations) or [""]))) / "datasets" / "data" / DIGITS
    if file.is_file():  # the package itself takes seconds to import, on every rank
        table = np.loadtxt(file, delimiter=",")
        x, y = table[:, :-1], table[:, -1]
    else:
        x, y = _imported_digits()
    return _split("digits", np.asarray(x) / 16.0, np.asarray(y, np.int64), seed, test)


def npz(path: str | Path, seed: int = 0, test: float = TEST_SHARE) -> Samples:
    """Load a data set from a `.npz` file with arrays x [samples, …] and y [samples], and maybe x_test and y_test.

    `x_train` and `y_train` are taken for x and y.  Dims of x after the first are flattened into features.  Without
    x_test and y_test a share of the samples is kept for the test, chosen by the seed.

    Raises
    ------
    ConfigError
        If the file is missing or unreadable, an array is missing, lengths differ, x holds NaN or infinities, or labels
        are not integers from 0 to 2²⁴ − 1; the message names the array and the first sample at fault.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"there is no data file {str(path)!r} (looked in {Path.cwd()})")
    try:
        with np.load(file, allow_pickle=False) as arrays:
            names = list(arrays)
            found = {TRAIN.get(name, name): arrays[name] for name in (*TRAIN, *ARRAYS) if name in arrays}
    except Exception as error:
        right = "write it by numpy.savez(file, x=x, y=y)"
        raise ConfigError(f"{file} cannot be read as a .npz file: {error}; {right}") from error
    for name in ("x", "y"):
        if name not in found:
            has = ", ".join(names) or "none"
            raise ConfigError(
                f"{file} has the arrays {has}, but needs x (samples) and y (labels), or x_train and y_train"
            )
    if ("x_test" in found) != ("y_test" in found):
        raise ConfigError(f"{file} has one of x_test and y_test; give both or neither")
    x, y = _samples(file, "x", found["x"]), _labels(file, "y", found["y"], len(found["x"]))
    if "x_test" not in found:
        return _split(file.name, x, y, seed, test)
    x_test = _samples(file, "x_test", found["x_test"])
    y_test = _labels(file, "y_test", found["y_test"], len(x_test))
    if x_test.shape[1] != x.shape[1]:
        raise ConfigError(f"{file}: x has {x.shape[1]} features and x_test {x_test.shape[1]}; they must agree")
    return Samples(file.name, x, y, x_test, y_test, _classes(y, y_test))


def _samples(file: Path, name: str, array: np.ndarray) -> np.ndarray:
    """Return x as [samples, features], once it is checked."""
    if array.ndim < 2 or len(array) == 0 or array.size == 0:
        raise ConfigError(
            f"{file}: {name} has shape {array.shape}; it must be [samples, features], at least one of each"
        )
    if array.dtype.kind not in "fiub":
        raise ConfigError(f"{file}: {name} has dtype {array.dtype}; it must hold real numbers")
    flat: np.ndarray = array.reshape(len(array), -1)
    if array.dtype.kind == "f":
        bad = ~np.isfinite(flat).all(axis=1)
        if bad.any():
            at = int(bad.argmax())
            value = flat[at][~np.isfinite(flat[at])][0]
            raise ConfigError(
                f"{file}: {name} holds {value} in sample {at} ({int(bad.sum())} of {len(flat)} samples are not "
                "finite); remove or replace them"
            )
    return flat


def _labels(file: Path, name: str, array: np.ndarray, samples: int) -> np.ndarray:
    """Return y as [samples] of int64, once it is checked; whole numbers stored as floats are taken."""
    if array.ndim != 1:
        raise ConfigError(f"{file}: {name} has shape {array.shape}; it must be [samples], one class number a sample")
    if len(array) != samples:
        raise ConfigError(f"{file}: {name} has {len(array)} labels for {samples} samples; the lengths must agree")
    if array.dtype.kind not in "fiub":
        raise ConfigError(f"{file}: {name} has dtype {array.dtype}; labels are integers from 0")
    wrong = ~np.isfinite(array) if array.dtype.kind == "f" else np.zeros(samples, bool)
    if array.dtype.kind == "f":
        wrong |= array != np.floor(array)
    wrong |= array < 0
    if wrong.any():
        at = int(wrong.argmax())
        raise ConfigError(
            f"{file}: {name} holds {array[at]} for sample {at} ({int(wrong.sum())} labels like it); labels are "
            "integers from 0, without NaN and negative numbers"
        )
    if (large := array >= MOST_CLASSES).any():
        at = int(large.argmax())
        raise ConfigError(
            f"{file}: {name} holds {array[at]} for sample {at}, and with it there would be more than {MOST_CLASSES:,} "
            "classes; number the classes that there are from 0: y = numpy.unique(y, return_inverse=True)[1]"
        )
    return array.astype(np.int64)


def _split(name: str, x: np.ndarray, y: np.ndarray, seed: int, test: float) -> Samples:
    count = round(test * len(x))
    if not 0 < count < len(x):
        raise ConfigError(f"{name}: a share of {test} of {len(x)} samples leaves {count} to test; both uses need some")
    order = np.random.Generator(np.random.Philox(key=np.array([check_seed(seed), 0], np.uint64))).permutation(len(x))
    held, rest = np.sort(order[:count]), np.sort(order[count:])
    return Samples(name, x[rest], y[rest], x[held], y[held], _classes(y))


def _classes(*labels: Any) -> int:
    return 1 + max(int(part.max()) for part in labels)


def _imported_digits() -> tuple[Any, Any]:
    """Return images and labels as scikit-learn gives them."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "the digits data set comes with scikit-learn, which is not installed: pip install 'parlinalg[train]'"
        ) from error
    x, y = load_digits(return_X_y=True)
    return x, y
