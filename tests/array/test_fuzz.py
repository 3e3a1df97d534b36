"""Random chains of array operations, compared with NumPy after each step.

A step is one line of Python.  It runs twice, on NumPy arrays and on DistArrays of the same names; what differs between
the two (how an array is made, cut, or left partial) stands behind a few functions that NumPy's side ignores.  After
each step the arrays that the line names have NumPy's values, shapes and dtypes, every rank holds the block that the
layout gives it, and no other array has changed.  A failure prints the lines that led to it.
"""

from __future__ import annotations

import json
import math
import re
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.array import DistArray
from parlinalg.grid import Grid
from parlinalg.layout import Layout

STEPS = 20
SIZES = (0, 1, 1, 2, 3, 4, 5, 6, 7, 8, 11)
DTYPES = (
    "bool",
    "int8",
    "int32",
    "int64",
    "uint8",
    "uint32",
    "float32",
    "float64",
    "float64",
    "complex64",
    "complex128",
)
TOLERANCE = {"float16": 4e-3, "float32": 2e-5, "float64": 1e-12, "complex64": 2e-5, "complex128": 1e-12}
LARGE = 1e6
GRIDS: dict[int, list[dict[str, int]]] = {
    1: [{"a": 1}, {"a": 1, "b": 1}],
    2: [{"a": 2}, {"a": 1, "b": 2}, {"a": 1}],
    3: [{"a": 3, "b": 1}, {"a": 3}, {"a": 1, "b": 2, "c": 1}],
    4: [{"a": 2, "b": 2}, {"a": 4}, {"a": 1, "b": 3}],
    6: [{"a": 2, "b": 3}, {"a": 6}, {"a": 2, "b": 2}, {"a": 3, "b": 1, "c": 2}],
}  # fmt: skip


@dataclass
class Entry:
    """An array of the pool, on both sides, and a copy of this rank's block as it was."""

    plain: np.ndarray
    cut: DistArray
    grid: int
    block: Any = None

    def remember(self) -> None:
        self.block = np.array(self.cut.grid.backend.to_host(self.cut.block), copy=True)

    def unchanged(self) -> bool:
        now = self.cut.grid.backend.to_host(self.cut.block)
        same = now.dtype == self.block.dtype and now.shape == self.block.shape
        return same and np.ascontiguousarray(now).tobytes() == np.ascontiguousarray(self.block).tobytes()


class Chain:
    """A chain of steps: its random numbers, its pool of arrays, and the lines so far."""

    def __init__(self, seed: int, grids: list[Grid]) -> None:
        self.seed, self.grids = seed, grids
        self.rng = np.random.default_rng(seed)
        self.pool: dict[str, Entry] = {}
        self.lines: list[str] = []
        self.made = 0
        self.sizes = [int(n) for n in self.rng.choice(SIZES, 3)]
        self.tolerant = False
        self.plain = {"np": np, "xp": np, "D": _plain, "R": _copied, "P": _summed, "G": _copied, "Layout": Layout,
                      "inf": math.inf, "nan": math.nan, "descending": _descending}  # fmt: skip
        self.cut = {**self.plain, "xp": pla, "D": self.distributed, "R": _moved, "P": _partial, "G": self.on_grid,
                    "descending": lambda a, d: pla.sort(a, axis=d, descending=True)}  # fmt: skip
        self.world = grids[0].world

    # ------------------------------------------------------------------ what differs
    def distributed(self, values: Any, dtype: str, grid: int, layout: Layout) -> DistArray:
        return pla.distribute(_plain(values, dtype), self.grids[grid], layout)

    def on_grid(self, a: DistArray, grid: int, layout: Layout) -> DistArray:
        return a.to_grid(self.grids[grid], layout)

    # ------------------------------------------------------------------ choices
    def int(self, low: int, high: int) -> int:
        """Return a number from `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def one(self, options: Any) -> Any:
        options = list(options)
        return options[self.int(0, len(options) - 1)]

    def shape(self, most: int = 3) -> tuple[int, ...]:
        return tuple(1 if self.chance(0.15) else self.one(self.sizes) for _ in range(self.int(0, most)))

    def layout(self, ndim: int, grid: int, partial: float = 0.08) -> Layout:
        cuts: list[list[str]] = [[] for _ in range(ndim)]
        terms = []
        for axis in self.rng.permutation(list(self.grids[grid].sizes)):
            if ndim and self.chance(0.75):
                cuts[self.int(0, ndim - 1)].append(str(axis))
            elif self.chance(partial / 0.25):
                terms.append(str(axis))
        return Layout(*cuts, partial=terms)

    def values(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        kind = np.dtype(dtype).kind
        if kind == "b":
            return self.rng.integers(0, 2, shape).astype(bool)
        few = self.one((2, 5, 20))
        found = self.rng.integers(0 if kind == "u" else -few, few + 1, shape)
        if kind in "iu":
            return found.astype(dtype)
        some = found + self.rng.integers(0, 4, shape) / 4
        if kind == "c":
            some = some + 1j * self.rng.integers(-2, 3, shape)
        elif self.chance(0.05):
            some = np.where(self.rng.random(shape) < 0.2, self.one((np.nan, np.inf, -np.inf)), some)
        return np.asarray(some).astype(dtype)

    def literal(self, values: np.ndarray, grid: int, partial: float = 0.08) -> str:
        """Return the source of an array made from these values."""
        text = repr(values.reshape(-1).tolist())
        if values.ndim != 1:
            text = f"np.reshape({text}, {values.shape})" if values.ndim else repr(values.item())
        return f"D({text}, {values.dtype.name!r}, {grid}, {self.layout(values.ndim, grid, partial)!r})"

    def pick(self, test: Callable[[np.ndarray], Any] = lambda a: True, grid: int | None = None) -> str:
        """Return the name of an array of the pool that passes a test; raise `Unfit` if there is none."""
        names = [n for n, e in self.pool.items() if test(e.plain) and grid in (None, e.grid)]
        if not names:
            raise Unfit
        return str(self.one(names))

    def new(self) -> str:
        self.made += 1
        return f"x{self.made}"

    def axis(self, ndim: int) -> int:
        if self.chance(0.03):
            return self.one((ndim, -ndim - 1))
        if not ndim:
            raise Unfit
        return self.int(-ndim, ndim - 1)

    def axes(self, ndim: int) -> Any:
        if not ndim or self.chance(0.3):
            return None
        if self.chance(0.7):
            return self.axis(ndim)
        dims = self.rng.permutation(ndim)[: self.int(0, ndim)]
        return tuple(int(d) - ndim * self.int(0, 1) for d in dims)

    # ------------------------------------------------------------------ running
    def run(self, steps: int = STEPS) -> int:
        done = 0
        for _ in range(3):
            self.step(make)
        while done < steps:
            try:
                self.step(STEPS_BY_WEIGHT[self.int(0, len(STEPS_BY_WEIGHT) - 1)])
            except Unfit:
                continue
            done += 1
        return done

    def step(self, maker: Callable[[Chain], str]) -> None:
        line = maker(self)
        self.lines.append(line)
        names = sorted({n for n in re.findall(r"\bx\d+\b", line) if n in self.pool}, key=lambda n: int(n[1:]))
        grid = self.pool[names[0]].grid if names else 0
        if found := re.search(r", (\d+), Layout", line):
            grid = int(found[1])
        plain = {**self.plain, **{n: e.plain.copy() for n, e in self.pool.items()}}
        cut = {**self.cut, **{n: e.cut for n, e in self.pool.items()}}
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            expected, raised = _tried(line, plain), _tried(line, cut)
        changed = {n for n in self.pool if _writes(line, n)}
        problem = ""
        if expected is None and "reshape([]" in line and "does not broadcast" in str(raised):
            return  # NumPy takes any values without elements where none is wanted, of too many dims as well
        if (expected is None) != (raised is None):
            problem = f"NumPy: {_said(expected)}; parlinalg: {_said(raised)}"
        elif raised is not None and not _alike(expected, raised):
            problem = f"NumPy raises {_said(expected)}, parlinalg {_said(raised)}"
        others = set(self.pool) if raised is not None else set(self.pool) - changed
        wrong = [n for n in sorted(others) if cut[n] is not self.pool[n].cut or not self.pool[n].unchanged()]
        if wrong and not problem:
            problem = f"{wrong} changed, which the step does not name as its target"
        agreed = self.world.share(problem)
        if any(agreed):
            self.fail(next(f"rank {r}: {text}" for r, text in enumerate(agreed) if text))
        if raised is not None:
            return
        fresh = {n for n in cut if re.fullmatch(r"x\d+", n) and n not in self.pool}
        scale = self.scale(line, plain)
        kept: dict[str, Entry] = {}
        for name in sorted(changed | fresh, key=lambda n: int(n[1:])):
            whole, said = self.compared(name, plain[name], cut[name], scale)
            agreed = self.world.share([said, zlib.crc32(_canonical(whole)) if whole is not None else 0])
            if any(text for text, _ in agreed):
                self.fail(f"{name}: " + next(f"rank {r}: {t}" for r, (t, _) in enumerate(agreed) if t))
            if len({number for _, number in agreed}) > 1:
                self.fail(f"{name}: ranks gather different values: {agreed}")
            kept[name] = Entry(whole, cut[name], grid if name in fresh else self.pool[name].grid)
        for name, entry in kept.items():
            entry.remember()
            self.pool[name] = entry
            large = np.abs(entry.plain[np.isfinite(entry.plain)]).astype(float) if entry.plain.size else np.zeros(0)
            if (entry.plain.dtype.kind in "fc" and large.size and large.max() > LARGE) or entry.plain.size > 600:
                del self.pool[name]
        while len(self.pool) > 6:
            del self.pool[self.one(sorted(self.pool))]

    def scale(self, line: str, plain: dict[str, Any]) -> float:
        """Return the magnitude of the terms that a step may have summed."""
        most = 1.0
        for name in set(re.findall(r"\bx\d+\b", line)):
            value = plain.get(name)
            value = self.pool[name].plain if name in self.pool else value
            if isinstance(value, np.ndarray) and value.size:
                finite = np.abs(value[np.isfinite(value)].astype(complex))
                most = max(most, float(finite.sum()) if finite.size else 0.0)
        return most

    def compared(self, name: str, plain: Any, cut: Any, scale: float) -> tuple[Any, str]:
        """Return the gathered array, and what is wrong with it."""
        plain = np.asarray(plain)
        if not isinstance(cut, DistArray):
            return None, f"the result is {type(cut).__name__}"
        if cut.shape != plain.shape or cut.dtype != plain.dtype:
            return None, f"{cut.shape} {cut.dtype}, NumPy's {plain.shape} {plain.dtype}"
        held = cut.grid.block_shape(cut.layout, cut.shape)
        block = cut.grid.backend.to_host(cut.block)
        whole = cut.gather()
        if block.shape != held or block.dtype != plain.dtype:
            return whole, f"a block of {block.shape} {block.dtype}, where {cut.layout!r} gives {held}"
        if whole.shape != plain.shape or whole.dtype != plain.dtype:
            return whole, f"gathered {whole.shape} {whole.dtype}"
        if not cut.layout.partial and cut.grid.inside:
            part = whole[tuple(slice(r.start, r.stop) for r in cut.grid.block(cut.layout, cut.shape))]
            if not np.array_equal(part, block, equal_nan=plain.dtype.kind in "fc"):
                return whole, f"this rank's block is not the part of the array in {cut.layout!r}: replicas differ"
        if plain.dtype.kind in "fc":
            tolerance = TOLERANCE[plain.dtype.name]
            if plain.dtype.kind == "c" and not cut.grid.backend.cpu and re.search("/|divide", self.lines[-1]):
                # a GPU has no number where a complex division by zero gives NumPy infinities
                plain = np.where(np.isinf(plain) & np.isnan(whole), whole, plain)
            if not np.allclose(whole, plain, rtol=tolerance, atol=tolerance * scale, equal_nan=True):
                return whole, f"values\n{whole!r}\nNumPy's\n{plain!r}\nlayout {cut.layout!r}"
        elif not np.array_equal(whole, plain):
            return whole, f"values\n{whole!r}\nNumPy's\n{plain!r}\nlayout {cut.layout!r}"
        return whole, ""

    def story(self) -> str:
        """Return the lines that lead to the last one."""
        needed: set[str] = set()
        kept = []
        for i, line in enumerate(reversed(self.lines)):
            names = set(re.findall(r"\bx\d+\b", line))
            made = set(re.findall(r"\bx\d+\b", line.split("=")[0])) if "=" in line else names
            if i == 0 or made & needed:
                kept.append(line)
                needed |= names
        return "\n".join(kept[::-1]) + "\n"

    def fail(self, problem: str) -> None:
        about = {n: repr(self.pool[n].cut) for n in re.findall(r"\bx\d+\b", self.lines[-1]) if n in self.pool}
        grids = [g.sizes for g in self.grids]
        pytest.fail(
            f"seed {self.seed}, step {len(self.lines)}, grids {grids}: {problem}\n{self.story()}"
            f"{json.dumps(about, indent=1)}",
            pytrace=False,
        )


class Unfit(Exception):
    """No array of the pool fits a step."""


def _tried(line: str, names: dict[str, Any]) -> Exception | None:
    try:
        exec(line, names)
    except Exception as error:
        return error
    return None


def _said(error: Exception | None) -> str:
    return "no error" if error is None else f"{type(error).__name__}: {error}"


def _alike(expected: Exception, raised: Exception) -> bool:
    """Return True if both errors are of one kind; operands may be wrong in shape and in dtype at once."""
    if isinstance(expected, np.exceptions.AxisError):
        return isinstance(raised, np.exceptions.AxisError)
    if type(raised) is type(expected):
        return True
    return any(isinstance(expected, k) and isinstance(raised, k) for k in (IndexError, (TypeError, ValueError)))


def _writes(line: str, name: str) -> bool:
    """Return True if the line changes the array of this name in place."""
    return bool(re.match(rf"{name}(\[.*\] [-+]?=|\s*[-+*/%&|^@<>]+=)", line)) or f"out={name})" in line


def _canonical(a: np.ndarray) -> bytes:
    """Return the bytes of an array with one zero and one NaN."""
    if a.dtype.kind not in "fc":
        return np.ascontiguousarray(a).tobytes()
    return np.where(np.isnan(a), a.dtype.type(np.nan), a + a.dtype.type(0)).tobytes()


def _plain(values: Any, dtype: str, grid: int = 0, layout: Layout | None = None) -> np.ndarray:
    return np.array(values, dtype)


def _copied(a: np.ndarray, *_: Any) -> np.ndarray:
    return a.copy()


def _moved(a: DistArray, layout: Layout) -> DistArray:
    return a.redistribute(layout)


def _summed(a: np.ndarray, axis: Any, keepdims: bool) -> Any:
    return a.sum(axis, keepdims=keepdims)


def _partial(a: DistArray, axis: Any, keepdims: bool) -> DistArray:
    return a.sum(axis, keepdims=keepdims, partial=True)


def _descending(a: np.ndarray, axis: int) -> np.ndarray:
    return np.flip(np.sort(a, axis=axis, kind="stable"), axis=axis)


# ------------------------------------------------------------------------------------------------ the steps
STEPS_BY_WEIGHT: list[Callable[[Chain], str]] = []


def step(weight: int = 1) -> Callable[[Callable[[Chain], str]], Callable[[Chain], str]]:
    def register(maker: Callable[[Chain], str]) -> Callable[[Chain], str]:
        STEPS_BY_WEIGHT.extend([maker] * weight)
        return maker

    return register


def number(a: np.ndarray) -> bool:
    return a.dtype.kind != "b"


def real(a: np.ndarray) -> bool:
    return a.dtype.kind in "iuf"


def ordered(a: np.ndarray) -> bool:
    return a.dtype.kind in "biuf"


def whole(a: np.ndarray) -> bool:
    return a.dtype.kind in "iu"


def dims(a: np.ndarray) -> bool:
    return a.ndim > 0


@step(8)
def make(c: Chain) -> str:
    grid = 0 if c.chance(0.9) else c.int(0, len(c.grids) - 1)
    shape = c.shape()
    if c.pool and c.chance(0.3):
        shape = c.pool[c.pick()].plain.shape
    return f"{c.new()} = {c.literal(c.values(shape, c.one(DTYPES)), grid)}"


@step(6)
def redistribute(c: Chain) -> str:
    x = c.pick()
    e = c.pool[x]
    return f"{c.new()} = R({x}, {c.layout(e.plain.ndim, e.grid)!r})"


@step()
def to_grid(c: Chain) -> str:
    x, grid = c.pick(), c.int(0, len(c.grids) - 1)
    return f"{c.new()} = G({x}, {grid}, {c.layout(c.pool[x].plain.ndim, grid)!r})"


# ---------------------------------------------------------------------------------- indexing
def slice_of(c: Chain, n: int) -> str:
    if c.chance(0.3):
        return ":"

    def end() -> str:
        return "" if c.chance(0.3) else str(c.int(-n - 2, n + 2))

    found = f"{end()}:{end()}"
    return found if c.chance(0.4) else f"{found}:{c.one((-3, -2, -1, -1, 1, 2, 3))}"


def key(c: Chain, x: str, arrays: bool = True) -> tuple[str, ...]:
    """Return the items of an index of an array, as source."""
    e = c.pool[x]
    shape = e.plain.shape
    if arrays and c.chance(0.1):  # a mask of leading dims
        n = c.int(0, len(shape))
        mask = c.rng.random(shape[:n]) < c.one((0.2, 0.8))
        return (c.literal(np.asarray(mask), e.grid),)
    items: list[str] = []
    d, index = 0, c.shape(2)
    fancy = arrays and c.chance(0.4)
    while d < len(shape):
        n = shape[d]
        if c.chance(0.08):
            items.append("None")
        if "..." not in items and c.chance(0.1):
            items.append("...")
            d += c.int(0, len(shape) - d)
            continue
        if c.chance(0.1):
            break
        what = c.rng.random()
        if fancy and what < 0.4 and n:
            shape_ = tuple(1 if c.chance(0.2) else m for m in index)
            values = c.rng.integers(-n, n, shape_[c.int(0, len(shape_)) :] if c.chance(0.2) else shape_)
            if c.chance(0.03) and values.size:
                values.reshape(-1)[c.int(0, values.size - 1)] = c.one((n, -n - 1))
            values = np.asarray(values, c.one(("int64", "int64", "int32")))
            items.append(c.literal(values, e.grid) if c.chance(0.6) else f"np.array({values.tolist()!r}, int)")
        elif fancy and what < 0.5:
            m = c.int(1, min(2, len(shape) - d))
            mask = np.asarray(c.rng.random(shape[d : d + m]) < 0.4)
            items.append(
                c.literal(mask, e.grid)
                if c.chance(0.6)
                else f"np.reshape(np.array({mask.reshape(-1).tolist()}, bool), {mask.shape})"
            )
            d += m - 1
        elif what < 0.7 and n:
            items.append(str(c.int(-n, n - 1) if c.chance(0.97) else c.one((n, -n - 1))))
        else:
            items.append(slice_of(c, n))
        d += 1
    return tuple(items)


def written(items: tuple[str, ...]) -> str:
    return "()" if not items else ", ".join(items) + ("," if len(items) == 1 else "")


@step(16)
def get(c: Chain) -> str:
    x = c.pick()
    return f"{c.new()} = {x}[{written(key(c, x))}]"


def broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(shape, full) == full
    except ValueError:
        return False


def settable(c: Chain) -> str:
    names = [n for n, e in c.pool.items() if not e.cut.layout.partial]
    if not names:
        raise Unfit
    return str(c.one(names))


@step(16)
def put(c: Chain) -> str:
    x = settable(c)
    e, items = c.pool[x], written(key(c, x))
    kind = e.plain.dtype.name
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shape = np.shape(eval(f"x[{items}]", {**c.plain, "x": e.plain}))
    except (IndexError, ValueError):
        shape = ()
    if c.chance(0.3):
        return f"{x}[{items}] = {c.values((), kind).item()!r}"
    if c.chance(0.05) and shape:
        fits = lambda a: np.can_cast(a.dtype, kind, "same_kind") and broadcasts(a.shape, shape)  # noqa: E731
        return f"{x}[{items}] = {c.pick(fits, e.grid)}"
    lead = c.int(0, len(shape)) if c.chance(0.3) else 0
    shape = tuple(1 if c.chance(0.15) else n for n in shape[lead:])
    if c.chance(0.05) and shape and "bool" not in items:
        shape = (1, *shape)
    if c.chance(0.03) and shape and "D(False" not in items:
        shape = (shape[0] + 1, *shape[1:])
    if c.chance(0.2) and np.dtype(kind).kind in "fi":
        kind = "int8"
    return f"{x}[{items}] = {c.literal(c.values(shape, kind), e.grid)}"


@step(2)
def put_part_of_itself(c: Chain) -> str:
    x = settable(c)
    a = c.pool[x].plain
    if not a.ndim:
        raise Unfit
    return c.one((f"{x}[...] = {x}[::-1]", f"{x}[::-1] = {x}", f"{x}[1:] = {x}[:-1]", f"{x}[:, ...] = {x}[:1]"))


@step(2)
def put_where(c: Chain) -> str:
    x = settable(c)
    if not ordered(c.pool[x].plain) or c.pool[x].plain.dtype.kind == "b":
        raise Unfit
    return c.one((f"{x}[{x} > 1] = 0", f"{x}[{x} > 1] = {x}[{x} > 1] % 2", f"{x}[{x} <= 0] += 3"))


# ---------------------------------------------------------------------------------- elementwise
BINARY = ("+", "+", "-", "*", "*", "/", "<", "<=", "==", "!=", ">", ">=", "&", "|", "^", "//", "%", "**")
BY_NAME = ("np.maximum", "np.minimum", "np.hypot", "np.logical_and", "np.logical_xor", "np.arctan2", "np.copysign",
           "np.fmax", "np.fmin")  # fmt: skip


def partner(c: Chain, x: str) -> str:
    """Return an array that broadcasts with another, mostly."""
    e = c.pool[x]

    def fits(a: np.ndarray) -> bool:
        try:
            return math.prod(np.broadcast_shapes(a.shape, e.plain.shape)) < 600
        except ValueError:
            return c.chance(0.02)

    if c.chance(0.5):
        return c.pick(fits, e.grid)
    shape = tuple(1 if c.chance(0.25) else n for n in e.plain.shape)[c.int(0, e.plain.ndim) if c.chance(0.2) else 0 :]
    return c.literal(c.values(shape, c.one((*DTYPES, e.plain.dtype.name, e.plain.dtype.name))), e.grid)


def finite(a: np.ndarray) -> bool:
    return bool(np.isfinite(a).all())


@step(20)
def binary(c: Chain) -> str:
    x = c.pick()
    y = repr(c.one((2, 0, -1, 1.5, True, 3, 0.25))) if c.chance(0.15) else partner(c, x)
    x, y = (x, y) if c.chance(0.5) else (y, x)
    sign = c.one(BINARY)
    names = [n for n in re.findall(r"\bx\d+\b", f"{x} {y}") if not finite(c.pool[n].plain)]
    if sign in ("//", "%") and (names or "inf" in x + y or "nan" in x + y):
        raise Unfit  # the standard's quotients of infinities differ from NumPy's
    if sign in ("//", "%") and c.chance(0.9):
        y = f"({y} * 0 + 3)"
    if sign == "**":
        names = re.findall(r"\bx\d+\b", f"{x} {y}")
        if "bool" in x + y or any(c.pool[n].plain.dtype.kind == "b" for n in names):
            raise Unfit  # NumPy's square of a boolean is an int8, its power an int64
        y = c.one((f"({y} * 0 + 2)", f"({y} % 3)", "2", "3", "0.5", "-1", y))
        if not re.search(r"x\d|D", x + y):
            raise Unfit
    if c.chance(0.15):
        return f"{c.new()} = {c.one(BY_NAME)}({x}, {y})"
    if c.chance(0.1):
        return f"{c.new()} = np.where({c.pick(lambda a: True, grid_of(c, x, y))}, {x}, {y})"
    return f"{c.new()} = {x} {sign} {y}"


def grid_of(c: Chain, *names: str) -> int | None:
    """Return the number of the grid that the source of operands names."""
    found = [c.pool[n].grid for n in re.findall(r"\bx\d+\b", " ".join(names))]
    found += [int(n) for n in re.findall(r", (\d+), Layout", " ".join(names))]
    return found[0] if found else None


@step(14)
def in_place(c: Chain) -> str:
    x = c.pick()
    if c.chance(0.3):
        y = repr(c.one((2, 0, -1, 1.5, True)))
    elif c.chance(0.15) and c.pool[x].plain.ndim:
        y = c.one((f"{x}[::-1]", f"{x}.T", f"{x}[:1]", f"{x}[0]"))
    else:
        y = partner(c, x)
    return f"{x} {c.one(('+', '+', '-', '*', '*', '/', '&', '|'))}= {y}"


@step(5)
def out(c: Chain) -> str:
    x = c.pick()
    e = c.pool[x]
    target = c.pick(lambda a: a.shape == e.plain.shape or c.chance(0.01), e.grid)
    if c.chance(0.3):
        return f"np.{c.one(('negative', 'square', 'absolute', 'conjugate', 'sqrt', 'isnan'))}({x}, out={target})"
    y = c.pick(lambda a: a.shape == e.plain.shape, e.grid) if c.chance(0.7) else partner(c, x)
    return f"np.{c.one(('add', 'subtract', 'multiply', 'less', 'maximum'))}({x}, {y}, out={target})"


UNARY = ("-", "+", "abs", "np.sqrt", "np.conj", "np.isnan", "np.sign", "np.square", "np.floor", "np.logical_not", "~",
         "np.exp", "np.real", "np.imag", "np.isfinite", "np.cos", "np.copy", "np.signbit", "np.positive", "np.arctan",
         "np.rint", "np.reciprocal", "np.cbrt")  # fmt: skip


@step(8)
def unary(c: Chain) -> str:
    x = c.pick()
    f = c.one(UNARY)
    return f"{c.new()} = {f}({x})"


@step(5)
def astype(c: Chain) -> str:
    x, kind = c.pick(), c.one(DTYPES)
    a = c.pool[x].plain
    fits = finite(a) and (not a.size or (a.real.min() >= 0 and a.real.max() <= 100))
    if a.dtype.kind in "fc" and np.dtype(kind).kind in "iu" and not fits:
        raise Unfit
    return f"{c.new()} = {x}.astype({kind!r})"


@step(3)
def clipped(c: Chain) -> str:
    x = c.pick(real)
    how = c.one(("np.clip({}, 0, 2)", "np.clip({}, None, 1)", "np.round({})", "np.clip({}, 1, 3)"))
    return f"{c.new()} = {how.format(x)}"


# ---------------------------------------------------------------------------------- reductions
@step(12)
def reduction(c: Chain) -> str:
    name = c.one(("sum", "sum", "mean", "var", "std", "max", "min", "any", "all", "prod", "count_nonzero"))
    tests: dict[str, Any] = {"max": ordered, "min": ordered}
    x = c.pick(tests.get(name, lambda a: True))
    a = c.pool[x].plain
    if name in ("var", "std") and not finite(a):
        raise Unfit
    if name == "prod" and (not finite(a) or np.abs(a.astype(complex)).max(initial=0) > 6 or a.size > 30):
        raise Unfit
    more = c.one(("", "", ", keepdims=True"))
    if name == "sum" and c.chance(0.2):
        kind = c.one(("float64", "int64", "float32"))
        if not (a.dtype.kind == "c" or (a.dtype.kind == "f" and kind == "int64")):
            more += f", dtype={kind!r}"
    return f"{c.new()} = np.{name}({x}, axis={c.axes(a.ndim)}{more})"


@step(3)
def method(c: Chain) -> str:
    name = c.one(("sum", "mean", "max", "min", "any", "all", "prod"))
    x = c.pick(ordered)
    a = c.pool[x].plain
    if name == "prod" and (not finite(a) or np.abs(a.astype(complex)).max(initial=0) > 6 or a.size > 30):
        raise Unfit
    return f"{c.new()} = {x}.{name}({c.axes(a.ndim)})"


@step(3)
def reduction_into(c: Chain) -> str:
    name = c.one(("sum", "mean", "max", "min", "any"))
    x = c.pick(lambda a: ordered(a) and a.ndim)
    e = c.pool[x]
    axis = c.int(0, e.plain.ndim - 1)
    shape = tuple(n for d, n in enumerate(e.plain.shape) if d != axis)
    kinds = (e.plain.dtype,) if e.plain.dtype.kind == "f" else (np.dtype("float64"),)
    target = c.pick(lambda a: a.shape == shape and a.dtype in kinds, e.grid)
    return f"np.{name}({x}, axis={axis}, out={target})"


@step(4)
def partial(c: Chain) -> str:
    x = c.pick(dims)
    return f"{c.new()} = P({x}, {c.axes(c.pool[x].plain.ndim)}, {c.chance(0.5)})"


@step(4)
def arg(c: Chain) -> str:
    x = c.pick(lambda a: a.dtype.kind != "c" or finite(a))
    a = c.pool[x].plain
    axis = None if c.chance(0.3) or not a.ndim else c.axis(a.ndim)
    return f"{c.new()} = np.{c.one(('argmax', 'argmin'))}({x}, axis={axis}{c.one(('', ', keepdims=True'))})"


# ---------------------------------------------------------------------------------- sorts, scans, sets
@step(8)
def sorts(c: Chain) -> str:
    x = c.pick(lambda a: a.ndim and (a.dtype.kind != "c" or finite(a)))
    axis = c.axis(c.pool[x].plain.ndim)
    how = c.one(("np.sort({}, axis={})", "np.argsort({}, axis={}, kind='stable')", "descending({}, {})"))
    if c.chance(0.1):
        return f"{c.new()} = np.sort({x}, axis=None)"
    return f"{c.new()} = {how.format(x, axis)}"


@step(4)
def sets(c: Chain) -> str:
    x = c.pick()
    how = c.one(
        ("{0} = np.unique({4})", "{0}, {1}, {2}, {3} = np.unique({4}, True, True, True)",
         "{0}, {1} = xp.unique_counts({4})", "{0}, {1} = xp.unique_inverse({4})")
    )  # fmt: skip
    a = c.pool[x].plain
    if not finite(a) and "xp" in how:
        raise Unfit  # the standard counts NaNs apart as np.unique_counts does, but in no order
    return how.format(c.new(), c.new(), c.new(), c.new(), x)


@step(5)
def scans(c: Chain) -> str:
    x = c.pick()
    a = c.pool[x].plain
    name = c.one(("cumsum", "cumsum", "cumprod"))
    if name == "cumprod" and (not finite(a) or np.abs(a.astype(complex)).max(initial=0) > 4 or a.size > 30):
        raise Unfit
    axis = None if c.chance(0.2) or not a.ndim else c.axis(a.ndim)
    more = ", dtype='float64'" if c.chance(0.2) and a.dtype.kind != "c" else ""
    if c.chance(0.3) and axis is not None and a.ndim:
        return f"{c.new()} = xp.cumulative_sum({x}, axis={axis}, include_initial={c.chance(0.5)})"
    return f"{c.new()} = np.{name}({x}, axis={axis}{more})"


@step(4)
def searched(c: Chain) -> str:
    x = c.pick(lambda a: a.ndim == 1 and a.dtype.kind in "iuf" and finite(a))
    e = c.pool[x]
    v = c.pick(lambda a: a.dtype.kind in "iuf" and finite(a), e.grid)
    return f"{c.new()} = np.searchsorted(np.sort({x}), {v}, side={c.one(('left', 'right'))!r})"


@step(3)
def differences(c: Chain) -> str:
    x = c.pick(lambda a: a.ndim)
    a = c.pool[x].plain
    if c.chance(0.3):
        shape = list(a.shape)
        axis = c.int(0, a.ndim - 1)
        shape[axis] = c.int(1, 2)
        values = c.values(tuple(shape), a.dtype.name)
        return (
            f"{c.new()} = np.diff({x}, axis={axis}, {c.one(('append', 'prepend'))}={c.literal(values, c.pool[x].grid)})"
        )
    return f"{c.new()} = np.diff({x}, {c.int(1, 2)}, {c.axis(a.ndim)})"


@step(3)
def found(c: Chain) -> str:
    x = c.pick()
    a = c.pool[x].plain
    if not a.ndim:
        raise Unfit
    if c.chance(0.4):
        return f"{c.new()} = np.flatnonzero({x})"
    return ", ".join(c.new() for _ in range(a.ndim)) + f", = np.nonzero({x})"


@step(2)
def members(c: Chain) -> str:
    x = c.pick(lambda a: finite(a) and a.dtype.kind != "c")
    y = c.pick(lambda a: finite(a) and a.dtype.kind != "c", c.pool[x].grid)
    return f"{c.new()} = xp.isin({x}, {y})"


# ---------------------------------------------------------------------------------- shapes
@step(10)
def reshaped(c: Chain) -> str:
    x = c.pick()
    n = c.pool[x].plain.size
    shape: list[int] = []
    left = n
    while left > 1 and len(shape) < 4:
        m = c.one([d for d in range(1, left + 1) if left % d == 0])
        shape.insert(c.int(0, len(shape)), m)
        left //= m
    if left != 1:
        shape.append(left)
    if c.chance(0.2):
        shape.insert(c.int(0, len(shape)), 1)
    if shape and c.chance(0.2):
        shape[c.int(0, len(shape) - 1)] = -1
    if c.chance(0.02):
        shape.append(2)
    return f"{c.new()} = {x}.reshape({tuple(shape)})"


@step(6)
def turned(c: Chain) -> str:
    x = c.pick()
    n = c.pool[x].plain.ndim
    how = [f"{x}.T", f"{x}.transpose({tuple(int(d) for d in c.rng.permutation(n))})", f"np.ravel({x})"]
    if n:
        how += [f"np.swapaxes({x}, {c.axis(n)}, {c.axis(n)})", f"np.moveaxis({x}, {c.axis(n)}, {c.axis(n)})"]
        how += [f"np.expand_dims({x}, {c.int(-n - 1, n)})", f"np.squeeze({x})", f"np.flip({x}, {c.axes(n)})"]
        how += [f"np.roll({x}, {c.int(-9, 9)}, {c.axis(n)})", f"np.roll({x}, {c.int(-9, 9)})"]
        how += [f"np.roll({x}, (1, {c.int(-3, 3)}), ({c.axis(n)}, {c.axis(n)}))"]
    return f"{c.new()} = {c.one(how)}"


@step(8)
def joined(c: Chain) -> str:
    x = c.pick(dims)
    e = c.pool[x]
    a = e.plain
    axis = c.int(0, a.ndim - 1)

    def other() -> str:
        shape = tuple(c.one(c.sizes) if d == axis else n for d, n in enumerate(a.shape))
        return c.literal(c.values(shape, c.one(DTYPES)), e.grid)

    same = c.pick(lambda b: b.shape == a.shape, e.grid)
    return f"{c.new()} = " + c.one(
        (f"np.concatenate([{x}, {other()}], {axis})", f"np.concatenate([{other()}, {x}, {x}], axis={axis - a.ndim})",
         f"np.concatenate([{x}, {other()}], axis=None)", f"np.stack([{x}, {same}], axis={c.int(-a.ndim - 1, a.ndim)})")
    )  # fmt: skip


@step(5)
def repeated(c: Chain) -> str:
    x = c.pick(lambda a: a.size < 100)
    a = c.pool[x].plain
    how = [f"np.tile({x}, {tuple(c.int(0, 2) + 1 for _ in range(c.int(0, 3)))})"]
    how += [f"np.repeat({x}, {c.int(0, 3)}, axis=None)"]
    if a.ndim:
        d = c.int(0, a.ndim - 1)
        n = a.shape[d]
        how += [f"np.repeat({x}, {[c.int(0, 2) for _ in range(n)]}, axis={d})"]
        how += [f"np.repeat({x}, {c.int(0, 3)}, axis={c.axis(a.ndim)})"]
        widths = [(c.int(0, 2), c.int(0, 2)) for _ in range(a.ndim)]
        how += [f"np.pad({x}, {widths})", f"np.pad({x}, {c.int(0, 2)}, 'constant', constant_values=3)"]
        if 0 not in a.shape:
            how += [f"np.pad({x}, {widths}, mode={c.one(('edge', 'wrap', 'reflect', 'symmetric'))!r})"]
    return f"{c.new()} = {c.one(how)}"


@step(5)
def taken(c: Chain) -> str:
    x = c.pick(lambda a: a.ndim and a.size)
    e = c.pool[x]
    a = e.plain
    d = c.int(0, a.ndim - 1)
    n = a.shape[d]
    if c.chance(0.4):
        shape = tuple(c.int(0, 4) if i == d else m for i, m in enumerate(a.shape))
        index = np.asarray(c.rng.integers(-n, n, shape))
        return f"{c.new()} = np.take_along_axis({x}, {c.literal(index, e.grid)}, axis={d})"
    axis = c.one((d, d - a.ndim, None))
    n = a.size if axis is None else n
    index = np.asarray(c.rng.integers(-n, n, c.shape(2)))
    return f"{c.new()} = np.take({x}, {c.literal(index, e.grid)}, axis={axis})"


@step(4)
def matrices(c: Chain) -> str:
    x = c.pick(lambda a: a.ndim >= 2)
    a = c.pool[x].plain
    how = [f"np.linalg.norm({x})", f"np.linalg.matrix_transpose({x})"] if finite(a) else []
    how += [f"np.tril({x}, {c.int(-2, 2)})", f"np.triu({x}, {c.int(-2, 2)})"]
    d = [int(d) for d in c.rng.permutation(a.ndim)[:2]]
    how += [f"np.diagonal({x}, {c.int(-2, 2)}, {d[0]}, {d[1]})"]
    if a.ndim == 2:
        how += [f"np.trace({x})", f"np.diag({x}, {c.int(-2, 2)})"]
    return f"{c.new()} = {c.one(how)}"


@step(3)
def broadcast(c: Chain) -> str:
    x = c.pick(lambda a: a.size < 100)
    a = c.pool[x].plain
    shape = tuple(c.int(1, 3) if n == 1 else n for n in a.shape)
    return f"{c.new()} = np.broadcast_to({x}, {(*(c.int(1, 3) for _ in range(c.int(0, 2))), *shape)})"


@step(2)
def split(c: Chain) -> str:
    x = c.pick(dims)
    a = c.pool[x].plain
    d = c.int(0, a.ndim - 1)
    if c.chance(0.5):
        return f"{c.new()}, {c.new()}, {c.new()} = np.array_split({x}, 3, {d})"
    at = sorted(c.int(-1, a.shape[d] + 1) for _ in range(2))
    return f"{c.new()}, {c.new()}, {c.new()} = np.split({x}, {at}, axis={d})"


@step(8)
def product(c: Chain) -> str:
    x = c.pick(lambda a: a.ndim and number(a) and finite(a))
    e = c.pool[x]
    a = e.plain
    k = a.shape[-1]
    shape: tuple[int, ...] = (k, c.one(c.sizes))
    if c.chance(0.3):
        shape = (k,)
    elif c.chance(0.2) and a.ndim == 3:
        shape = (a.shape[0], *shape)
    elif c.chance(0.1):
        shape = (c.int(1, 2), *shape)
    kind = c.one((a.dtype.name, a.dtype.name, "float64", "int32", "complex128"))
    y = c.literal(c.values(shape, kind), e.grid)
    if "nan" in y or "inf" in y:
        raise Unfit
    if c.chance(0.15):
        z = c.literal(c.values(a.shape, kind), e.grid)
        if "nan" in z or "inf" in z:
            raise Unfit
        return f"{c.new()} = xp.vecdot({x}, {z})"
    if c.chance(0.2):
        return f"{c.new()} = np.{c.one(('dot', 'matmul'))}({x}, {y})"
    if c.chance(0.15) and len(shape) == 2:
        return f"{c.new()} = xp.tensordot({x}, {y}, axes=1)"
    if c.chance(0.2):
        return f"{c.new()} = {x}.T @ {x}"
    return f"{c.new()} = {x} @ {y}"


# ---------------------------------------------------------------------------------- NumPy's other names
@step(6)
def statistic(c: Chain) -> str:
    x = c.pick(lambda a: a.dtype.kind in "iuf" and a.size and finite(a) and 0 not in a.shape)
    a = c.pool[x].plain
    axis = c.axes(a.ndim)
    method = c.one(("linear", "lower", "hazen", "nearest", "median_unbiased"))
    how = [f"np.median({x}, axis={axis})", f"np.ptp({x}, axis={axis})", f"np.average({x}, axis={axis})"]
    how += [f"np.quantile({x}, {c.one((0.0, 0.3, 0.5, 1.0, [0.25, 0.5]))}, axis={axis}, method={method!r})"] * 2
    how += [f"np.histogram({x}, {c.int(1, 5)})[{c.int(0, 1)}]", f"np.histogram({x}, [-3, 0, 1, 9])[0]"]
    how += [f"np.digitize({x}, [-2, 0, 1.5])", f"np.nan_to_num({x})"]
    if a.dtype.kind == "u":
        how = how[:5]
    return f"{c.new()} = {c.one(how)}"


@step(4)
def without_nans(c: Chain) -> str:
    x = c.pick(lambda a: a.dtype.kind in "iuf" and not np.isinf(a).any())
    name = c.one(("nansum", "nanmean", "nanvar", "nancumsum", "nanmedian"))
    a = c.pool[x].plain
    if not a.size:
        raise Unfit
    if name == "nancumsum":
        return f"{c.new()} = np.nancumsum({x}, axis={None if not a.ndim else c.axis(a.ndim)})"
    return f"{c.new()} = np.{name}({x}, axis={c.axes(a.ndim)})"


@step(6)
def masked_reduction(c: Chain) -> str:
    x = c.pick(lambda a: a.dtype.kind in "iuf" and finite(a))
    e = c.pool[x]
    name = c.one(("sum", "sum", "max", "min", "any", "mean"))
    mask = c.literal(np.asarray(c.rng.random(e.plain.shape) < 0.6), e.grid, 0)
    more = ", initial=1" if name in ("max", "min") or (name == "sum" and c.chance(0.5)) else ""
    return f"{c.new()} = np.{name}({x}, axis={c.axes(e.plain.ndim)}, where={mask}{more})"


@step(5)
def contraction(c: Chain) -> str:
    x = c.pick(lambda a: 0 < a.ndim <= 3 and number(a) and finite(a) and a.size < 100)
    e = c.pool[x]
    a = e.plain
    y = c.pick(lambda b: 0 < b.ndim <= 2 and number(b) and finite(b) and b.size < 30, e.grid)
    letters = "ijk"[: a.ndim]
    b = c.pool[y].plain
    sizes = dict(zip(letters, a.shape, strict=True))
    other = "".join(next((s for s in c.rng.permutation(list(letters)) if sizes[s] == n), "pq"[d])
                    for d, n in enumerate(b.shape))  # fmt: skip
    every = sorted(set(letters + other))
    out = "".join(str(s) for s in c.rng.permutation(every)[: c.int(0, len(every))])
    if c.chance(0.2):
        return f"{c.new()} = np.kron({x}, {y})" if a.size * b.size < 600 else f"{c.new()} = np.outer({x}, {y})"
    return f"{c.new()} = np.einsum('{letters},{other}->{out}', {x}, {y})"


@step(4)
def by_neighbours(c: Chain) -> str:
    x = c.pick(lambda a: a.ndim and a.dtype.kind in "if" and finite(a) and min(a.shape) > 2)
    a = c.pool[x].plain
    axis = c.axis(a.ndim)
    how = [f"np.gradient({x}, 0.5, axis={axis})", f"np.trapezoid({x}, axis={axis})"]
    how += [f"np.interp({x}, [-2, 0, 1, 4], [1, -1, 0, 2])", f"np.maximum.accumulate({x}, {axis})"]
    if a.ndim == 1:
        y = c.pick(lambda b: b.ndim == 1 and b.dtype.kind in "if" and b.size and finite(b), c.pool[x].grid)
        how += [f"np.convolve({x}, {y}, {c.one(('full', 'same', 'valid'))!r})"] * 2
        how += [f"np.correlate({x}, {y}, {c.one(('full', 'same', 'valid'))!r})"] * 2
    return f"{c.new()} = {c.one(how)}"


@step(5)
def edited(c: Chain) -> str:
    x = c.pick(dims)
    a = c.pool[x].plain
    axis = c.int(0, a.ndim - 1)
    n = a.shape[axis]
    how = [f"np.insert({x}, {c.int(0, n)}, 1, axis={axis})", f"np.insert({x}, [0, {c.int(0, n)}], 1, axis={axis})"]
    how += [f"np.resize({x}, {(c.int(0, 3), c.int(1, 5))})", f"np.atleast_3d({x})", f"np.argwhere({x})"]
    if n:
        how += [f"np.delete({x}, {c.int(-n, n - 1)}, axis={axis})", f"np.delete({x}, [0, {n - 1}], axis={axis})"]
        how += [f"np.delete({x}, slice({c.int(0, n)}, {c.int(0, n)}), {axis})"]
    if a.ndim > 1:
        how += [f"np.rot90({x}, {c.int(-1, 5)})", f"np.block([[{x}, {x}], [{x}, {x}]])", f"np.dstack([{x}, {x}])"]
    return f"{c.new()} = {c.one(how)}"


# ------------------------------------------------------------------------------------------------ the tests
@pytest.fixture
def chains(world: Any, make_grid: Callable[..., Grid], backend: str, tune: Any) -> Callable[[int, int], int]:
    """`chains(first, steps)` runs chains from this seed on until so many steps are done, on every grid in turn.

    In half of them arrays move in small pieces.
    """
    grids = [make_grid(sizes, backend=backend) for sizes in GRIDS[world.size]]

    def run(first: int, steps: int) -> int:
        done, seed = 0, first
        while done < steps:
            tune(ranks=2, MOVE_BUFFER=5 if seed % 2 else 1 << 19, MOVE_SHARE=1 << 30)
            turn = seed % len(grids)
            done += Chain(seed, grids[turn:] + grids[:turn]).run()
            seed += 1
        return done

    return run


@pytest.mark.ranks(1, 2, 3, 4, 6)
@pytest.mark.timeout(1800)
def test_chains(chains: Callable[[int, int], int], world: Any, full: bool, request: pytest.FixtureRequest) -> None:
    chains(1000 * request.config.option.seed, 20_000 * len(GRIDS[world.size]) if full else 400)
