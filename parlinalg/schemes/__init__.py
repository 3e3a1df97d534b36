"""Parallel schemes: pure tables, one scheme a file, found by listing this folder.

A file defines `SCHEME`, the `MODE` of the configuration that selects it (None: not a mode of tensor parallelism), the
`OPTIONS` that tell it from others of the same mode (the first file's are the default), and `sizes(size, shape, depth)`,
the sizes of its axes.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Protocol, cast

from parlinalg.errors import ConfigError
from parlinalg.schemes.scheme import Scheme, adapted, bias, shared, spread_axes
from parlinalg.schemes.shapes import NeedsShape, listed_sizes
from parlinalg.schemes.words import product_words, scheme_words, table_of_schemes, table_row

__all__ = [
    "Scheme", "SchemeFile", "adapted", "as_scheme", "bias", "table_row", "discover", "for_mode", "modes", "modes_for",
    "product_words", "scheme_words", "shared", "spread_axes", "table_of_schemes",
]  # fmt: skip


class SchemeFile(Protocol):
    """The names that a file of this folder defines."""

    MODE: str | None
    OPTIONS: dict[str, object]
    SCHEME: Scheme

    def sizes(self, size: int, shape: Sequence[int] | None = None, depth: int | None = None) -> dict[str, int]: ...


@cache
def _files() -> dict[str, SchemeFile]:
    names = sorted(info.name for info in pkgutil.iter_modules(__path__))
    found = [cast(SchemeFile, m) for m in (import_module(f"{__name__}.{n}") for n in names) if hasattr(m, "SCHEME")]
    return {file.SCHEME.name: file for file in found}


def discover() -> dict[str, SchemeFile]:
    """Return all schemes by name, found by listing the folder."""
    return dict(_files())


def modes() -> list[str]:
    """Return the modes of tensor parallelism that a configuration may name."""
    return sorted({file.MODE for file in _files().values() if file.MODE is not None})


def for_mode(mode: str | None, **options: object) -> SchemeFile:
    """Return the file of the scheme that a mode of the configuration selects.

    Parameters
    ----------
    mode : str or None
        None is no tensor parallelism.
    **options
        Such as `sequence_parallel=True` for "1d" and `depth_on="k"` for "2.5d"; those left out, or None, take the
        default.

    Raises
    ------
    ConfigError
        If there is no such mode, or it has no such option or value; the message lists what there is.
    """
    if mode is None:
        return _files()["serial"]
    files = sorted((f for f in _files().values() if mode == f.MODE), key=lambda f: str(f.OPTIONS))
    if not files:
        raise ConfigError(
            f"there is no mode {mode!r} of tensor parallelism; it may be {listed_sizes([None, *modes()])}"
        )
    wanted = {k: v for k, v in options.items() if v is not None}
    for name, value in wanted.items():
        values = [f.OPTIONS[name] for f in files if name in f.OPTIONS]
        if value not in values and (value or values):  # an option that is off may be said of any mode
            right = f"it may be {listed_sizes([repr(v) for v in values])}" if values else "leave it out"
            raise ConfigError(f"mode {mode!r} does not have {name}={value!r}: {right}")
    return next(f for f in files if all(f.OPTIONS.get(k, v) == v for k, v in wanted.items()))


def as_scheme(given: object) -> Scheme:
    """Return a scheme that is given itself, or by its name: a mode, or a name that `discover` lists.

    Raises
    ------
    ConfigError
        If it is neither; the message lists the names.

    >>> as_scheme("2d").axes
    ('r', 'c')
    """
    if isinstance(given, Scheme):
        return given
    if isinstance(given, str):
        if given in _files():
            return _files()[given].SCHEME
        if given in modes():
            return for_mode(given).SCHEME
    raise ConfigError(
        "a scheme is that of a mesh (mesh.scheme), or a name: "
        f"{listed_sizes([repr(n) for n in sorted({*_files(), *modes()})])}; not {given!r}"
    )


def modes_for(size: int) -> str:
    """Return the modes that `size` ranks allow, as text: '"1d", "2d", "2.5d" (with a depth: 1 or 4 …) …'."""
    texts = []
    for mode in modes():
        try:
            for_mode(mode).sizes(size)
            texts.append(f"'{mode}'")
        except NeedsShape as error:
            texts.append(f"'{mode}' (with {error.options})")
    return ", ".join(texts)
