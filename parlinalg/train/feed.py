"""Data loaders of an engine: batches of inputs and labels, in microbatches, placed on the grid of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypeVar
from zlib import crc32

import numpy as np

from parlinalg.array import DistArray, distribute
from parlinalg.autograd import Tensor
from parlinalg.comm import Comm
from parlinalg.datasets import Batch, DataLoader, Loader, Passages, Sharded
from parlinalg.datasets.collate import converted, mapped, rebuilt
from parlinalg.datasets.dataloader import Labels, Placement, set_epoch
from parlinalg.errors import ConfigError, EngineError, ParlinalgError
from parlinalg.grid import Grid
from parlinalg.layout import Layout, piece
from parlinalg.nn import Module
from parlinalg.schemes import Scheme

Pair = tuple[Any, Any] | Batch
Result = TypeVar("Result")
Looks = tuple[int, str, int]
"""What ranks compare of a batch: its rows, its dtypes and shapes, and a checksum of its values."""


class Feed:
    """A data loader: every `iter()` of it is another epoch.

    Parameters
    ----------
    source : iterable
        Of pairs (inputs, labels): host arrays or tensors of PyTorch, the same on every rank, or `DistArray`s;
        or a loader of `parlinalg.datasets`, whose epochs have orders of their own: a `DataLoader`, of which each rank
        reads its own rows alone, or `Sharded`, a loader that gives each data rank its own.
    world : Comm
        All ranks that iterate it.

    Raises
    ------
    ConfigError
        If it cannot be iterated.
    """

    def __init__(self, source: Any, world: Comm) -> None:
        check_loader(source)
        self.source: Any = source
        self.world = world
        self.epochs = 0
        """Epochs begun."""
        self._begun: tuple[Any, Iterator[Any]] | None = None
        self._unplaced = source if isinstance(source, DataLoader | Sharded) else None
        self.alike = isinstance(source, Loader | Passages)
        """True for loaders whose batches follow from a seed: ranks compare none but the first batch of an epoch."""

    def place(self, placement: Callable[[], Placement]) -> Feed:
        """Make each rank read the rows that it needs, where the source is a loader that does so.  Collective.

        Raises
        ------
        ConfigError
            On all ranks, if their data sets differ in length.
        """
        if self._unplaced is not None:
            self.source = self._unplaced.placed(placement())
        return self

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.source)

    def reported(self) -> int:
        """Return the number of batches of an epoch that the source reports; 0 where it reports none."""
        try:
            return len(self.source)
        except TypeError:
            return 0

    def __iter__(self) -> Pass:
        self.epochs += 1
        return Pass(self, self.epochs - 1)

    def order(self) -> dict[str, int]:
        """Return what the order of its batches follows from, as far as it is known: seed, batch size, batches an epoch.

        A training goes on from a checkpoint with the same only.
        """
        source, found = getattr(self.source, "loader", self.source), {"batches": len(self.source)}
        if isinstance(source, Loader | Passages | DataLoader):
            seed = getattr(getattr(source, "sampler", source), "seed", None)
            found = {**({} if seed is None else {"seed": int(seed)}), "batch_size": int(source.batch_size), **found}
        return found

    def at(self, epoch: int, skip: int = 0) -> Pass:
        """Return an epoch by its number, without its first `skip` batches; loaders of parlinalg do not read these."""
        return Pass(self, epoch, skip)

    def first(self, parts: int = 1) -> Any:
        """Return the first of so many microbatches of the first batch, which iterations still include.  Collective.

        Raises
        ------
        StopIteration
            If there is no batch.
        EngineError
            On all ranks, if there is none on some, or no pair.
        """

        def draw() -> Any:
            if callable(getattr(self.source, "epoch", None)):
                return next(iter(self.source.epoch(0, parts)))[0]
            if self._begun is None:
                iterator = iter(self.source)
                self._begun = _pair(next(iterator)), iterator
            return cut(self._begun[0], parts)[0]

        return agreed(self.world, lambda: [draw()], lambda found: look_at(found, values=False))[0]

    def opened(self) -> Iterator[Any]:
        """Return an iterator of the source; the first one includes the batch that `first` has drawn."""
        begun, self._begun = self._begun, None
        return iter(self.source) if begun is None else chain(begun[:1], begun[1])


def check_loader(source: Any) -> None:
    """Raise a ConfigError unless batches can come from it."""
    if not isinstance(source, Iterable) or isinstance(source, str | bytes | Mapping):
        raise ConfigError(
            f"a dataloader is an iterable of pairs (inputs, labels), not {type(source).__name__}; a list of pairs is "
            "one, or a loader of parlinalg.datasets"
        )


def length_of(loader: Any, what: str) -> int:
    """Return the number of batches of an epoch; raise a ConfigError if the loader has no length."""
    try:
        return len(loader)
    except TypeError:
        raise ConfigError(
            f"{what}, but a {type(loader).__name__} has no len(): give a list of pairs, or a loader with a length"
        ) from None


class Pass:
    """The batches of one epoch, each as it is (`next()`) or in microbatches (`take`)."""

    def __init__(self, feed: Feed, epoch: int, skip: int = 0) -> None:
        self.feed, self.epoch = feed, epoch
        self.given, self._skip = skip, skip
        self.cuts = callable(getattr(feed.source, "epoch", None))
        """True if the loader cuts its batches into microbatches itself."""
        self._parts = 0
        if not self.cuts:
            set_epoch(feed.source, epoch)
        self._iterator: Iterator[Any] = iter(()) if self.cuts else islice(feed.opened(), skip, None)

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        if self.cuts:
            return self._next_cut(1)[0]
        begins = self.begins
        return agreed(self.feed.world, self._next, lambda x: (0, kind_of(x), content(x) if begins else 0))

    @property
    def begins(self) -> bool:
        """True if none of its batches is taken yet."""
        return self.given == self._skip

    def take(self, parts: int) -> list[Any]:
        """Return the next batch in so many microbatches, or as many as it has rows, if these are fewer.

        Raises
        ------
        StopIteration
            At the end of the epoch; the ranks do not agree on it.
        """
        return self._next_cut(parts) if self.cuts else cut(self._next(), parts)

    def _next_cut(self, parts: int) -> list[Any]:
        """Return the next batch of a loader that cuts its batches itself: nothing moves."""
        if parts != self._parts:
            self._parts = parts
            self._iterator = iter(self.feed.source.epoch(self.epoch, parts, self.given))
        found: list[Any] = next(self._iterator)
        self.given += 1
        return found

    def _next(self) -> Any:
        pair = _pair(next(self._iterator))
        self.given += 1
        return pair


def _pair(given: Any) -> Any:
    """Return an item of an iterator as a pair; raise an EngineError if it is none."""
    if isinstance(given, Batch):
        return given
    if isinstance(given, tuple | list) and len(given) == 2:
        return converted(given)
    what = type(given).__name__ + (f" of {len(given)}" if isinstance(given, tuple | list) else "")
    raise EngineError(f"a dataloader gives pairs (inputs, labels), not a {what}")


def agreed(world: Comm, draw: Callable[[], Result], look: Callable[[Result], Looks] | None = None) -> Result:
    """Return the result of `draw`, once all ranks have one that looks the same.  Collective.

    Raises
    ------
    StopIteration
        If it ends on all of them.
    EngineError
        On all ranks, if it ends or fails on some, or what it gives differs.
    """
    made: list[Result] = []
    own: list[Any] = ["", 0, "", 0]
    try:
        made.append(draw())
        own[1:] = own[1:] if look is None else look(made[0])
    except StopIteration:
        own[0] = "ends"
    except ParlinalgError as error:
        own[0] = str(error)
    everyone = world.share(own, others="alike")
    if all(what == "ends" for what, *_ in everyone):
        raise StopIteration
    rule = "all ranks iterate the same batches, whole, and each cuts its own block"
    _, first_rows, first_kind, first_values = everyone[0]
    for rank, (what, rows, kind, values) in enumerate(everyone):
        if what == "ends":
            raise EngineError(f"the batches of rank {rank} end, those of other ranks go on: {rule}")
        if what:
            raise EngineError(what if all(each[0] for each in everyone) else f"rank {rank}: {what}")
        if rows != first_rows:
            raise EngineError(f"rank {rank} has a batch of {rows} rows, rank 0 one of {first_rows}: {rule}")
        if kind != first_kind:
            raise EngineError(f"rank {rank} has a batch of {kind}, rank 0 one of {first_kind}: {rule}")
        if values != first_values:
            raise EngineError(
                f"rank {rank} has other values in its batch than rank 0: {rule}; shuffle by the same seed on all, and "
                "give no rank a share of its own, or say that the loader does: parlinalg.datasets.Sharded(loader)"
            )
    return made[0]


def look_at(parts: Sequence[Any], values: bool) -> Looks:
    """Return what ranks compare of a batch: its rows, the dtypes and shapes of the first microbatch, and a checksum of
    the values, or 0 where these are not compared."""
    return sum(rows_of(x) for x, _ in parts), kind_of(parts[0]), content(parts) if values else 0


def kind_of(given: Any) -> str:
    """Return the dtypes and shapes of a batch, or of a tree of arrays: "(float64[6, 3], int64[6])"."""
    if isinstance(given, Mapping):
        return f"{{{', '.join(f'{key}: {kind_of(value)}' for key, value in given.items())}}}"
    if isinstance(given, tuple | list | Batch):
        parts = list(given)
        return f"({', '.join(kind_of(each) for each in parts[:16])}{', …' if len(parts) > 16 else ''})"
    array = given if hasattr(given, "dtype") and hasattr(given, "shape") else np.asarray(given)
    return f"{array.dtype}{list(array.shape)}"


def content(given: Any) -> int:
    """Return a checksum of the host arrays of a batch, or of a tree; `DistArray`s, whose blocks differ, count 0."""
    if isinstance(given, Mapping):
        given = list(given.values())
    if isinstance(given, tuple | list):
        return crc32(repr([content(each) for each in given]).encode())
    if isinstance(given, DistArray | Tensor | Batch) or (host := np.asarray(given)).dtype.hasobject:
        return 0
    return crc32(np.ascontiguousarray(host).reshape(-1).view(np.uint8).data) if host.size else 0


def drawn(data_iter: Iterator[Any], parts: int, world: Comm, check: bool = False) -> list[Any]:
    """Return the next batch of an iterator, in at most so many microbatches.  Collective.

    With `check`, and where an epoch begins, ranks compare the values too.

    Raises
    ------
    EngineError
        On all ranks, if the iterator has ended or gives no pair on any.
    """

    def draw() -> list[Any]:
        if isinstance(data_iter, Pass):
            return data_iter.take(parts)
        if not isinstance(data_iter, Iterator):
            raise EngineError(
                f"data_iter is an iterator, iter(train_dataloader), not {type(data_iter).__name__}: a loader itself "
                "would begin again at every step"
            )
        return cut(_pair(next(data_iter)), parts)

    check = check or (isinstance(data_iter, Pass) and data_iter.begins)
    try:
        if isinstance(data_iter, Pass) and data_iter.feed.alike and not check:
            return draw()
        return agreed(world, draw, lambda found: look_at(found, check))
    except StopIteration:
        given = f" after {data_iter.given} batches" if isinstance(data_iter, Pass) else ""
        if isinstance(data_iter, Pass) and (reported := data_iter.feed.reported()) > data_iter.given:
            raise EngineError(
                f"epoch {data_iter.epoch} of the dataloader ends{given}, and its len() is {reported}: let __len__ "
                "return the batches that each iteration gives, and each iter() of it begin anew, unlike that of an "
                "iterator"
            ) from None
        raise EngineError(
            f"data_iter ends{given}, and a step needs another batch: make at most len(train_dataloader) steps of an "
            "iterator, and a new one by iter(train_dataloader) for the next epoch"
        ) from None


def rows_of(x: Any) -> int:
    """Return the number of rows of a batch's inputs: of the first array in a tree."""
    if isinstance(x, Mapping):
        x = list(x.values())
    if isinstance(x, tuple | list) and x:
        return rows_of(x[0])
    if isinstance(x, tuple | list):
        raise EngineError("a batch's inputs, or its labels, are an empty tuple, list or dict: give arrays")
    shape = np.shape(x) if not hasattr(x, "shape") else tuple(x.shape)
    if not shape:
        raise EngineError(f"a batch's inputs and labels are arrays whose first dim counts samples, not {x!r}")
    return int(shape[0])


def some_rows(x: Any) -> int:
    """Return the number of rows of a batch to train on; raise an EngineError if there are none."""
    if not (rows := rows_of(x)):
        raise EngineError("a batch of no rows: there is nothing to train on; leave such batches out")
    return rows


def cut(pair: Pair, parts: int) -> list[Pair]:
    """Return a batch in microbatches of nearly equal numbers of rows, at most as many as it has rows.

    Blocks of `DistArray`s move, since each microbatch is cut over the same axes; host arrays do not.
    """
    if parts == 1:
        return [pair]
    x, y = pair
    rows = rows_of(x)
    if rows_of(y) != rows:
        raise EngineError(f"a batch has {rows} rows of inputs and {rows_of(y)} of labels; their first dims must agree")
    pieces = [p for p in (piece(rows, parts, i) for i in range(parts)) if p]
    if not isinstance(pair, Batch):
        return [(_rows(x, p), _rows(y, p)) for p in pieces]
    if pair.ignored or pair.targets is not None:
        raise EngineError(
            f"a Batch of which {pair.ignored or y.size - pair.count} targets do not count cannot be cut: which ones is "
            "not known; give the engine the loader itself, which cuts its batches"
        )
    return [pair.piece(p, _rows(x, p), _rows(y, p)) for p in pieces]


def _rows(x: Any, part: range) -> Any:
    """Return these rows of an array or of all arrays in a tree."""

    def cut_out(leaf: Any) -> Any:
        given = leaf.data if isinstance(leaf, Tensor) else leaf
        return (given if isinstance(given, DistArray) else np.asarray(given))[part.start : part.stop]

    return mapped(cut_out, x)


def joined(arrays: Sequence[Any]) -> Any:
    """Return the arrays of several microbatches, or trees of them, joined along their rows.  Collective."""
    first = arrays[0]
    if len(arrays) == 1:
        return first
    if isinstance(first, dict):
        return {key: joined([a[key] for a in arrays]) for key in first}
    if isinstance(first, tuple | list):
        return rebuilt(first, [joined(list(column)) for column in zip(*arrays, strict=True)])
    if not isinstance(first, DistArray):
        return np.concatenate(arrays)
    uncut = first.layout.with_dim(0, None)
    together: Any = np.concatenate([a.redistribute(uncut) for a in arrays])
    return together.redistribute(first.layout)


def placed(x: Any, grid: Grid, layout: Layout | None, dtype: np.dtype[Any] | None = None) -> Any:
    """Return a batch's host arrays as `DistArray`s; `DistArray`s are returned as they are.  Collective.

    Parameters
    ----------
    x : array, DistArray, Tensor, or a tree of them
    layout : Layout or None
        For arrays of its number of dims; others are cut by its first dims and not along the rest.
    dtype : dtype, optional
        The dtype of floating arrays.
    """
    return mapped(lambda leaf: _placed(leaf, grid, layout, dtype), x)


def _placed(x: Any, grid: Grid, layout: Layout | None, dtype: np.dtype[Any] | None) -> Any:
    if isinstance(x, Labels) and layout is not None:  # with the rows of the inputs
        return x.redistribute(Layout(*layout.dims[: x.ndim], *[None] * (x.ndim - layout.ndim)))
    if isinstance(x, DistArray | Tensor):
        return x
    host = np.asanyarray(x) if np.ma.isMaskedArray(x) else np.asarray(x)  # which `distribute` refuses
    if host.dtype.kind == "f" and dtype is not None:
        host = host.astype(dtype, copy=False)
    dims = () if layout is None else layout.dims[: host.ndim]
    return distribute(host, grid, Layout(*dims, *[None] * (host.ndim - len(dims))))


# ---------------------------------------------------------------------------------------------- a model's inputs
def grid_of(model: Module) -> Grid:
    """Return the grid of a model: its own, or that of the first part which has one."""
    for module in model.modules():
        found = getattr(module, "grid", None)
        if isinstance(found, Grid):
            return found
        for held in module._parameters.values():
            return held.grid
    raise EngineError(
        f"{type(model).__name__} has no parameters, and no grid: there is nothing to train (modules "
        "in a plain list are not found: put them in an nn.Sequential, or in attributes)"
    )


def inputs_layout(model: Module, x: Any) -> Layout:
    """Return the layout of a host array of a model's inputs.

    A model may define `ids_layout`, `images_layout` or `input_layout(ndim)`; of the first two the one that has as many
    dims as the array.  Otherwise floating arrays are cut as the residual stream of the scheme of its first part that
    has one, and integers as ids, which have no features.
    """
    integers, ndim = np.asarray(x).dtype.kind in "iub", np.ndim(x)
    given = (getattr(model, name, None) for name in ("ids_layout", "images_layout"))
    known = [found for found in given if isinstance(found, Layout)]
    if known:
        return next((found for found in known if found.ndim == ndim), known[0])
    if callable(getattr(model, "input_layout", None)):
        layout: Layout = model.input_layout(ndim)
        return layout
    scheme = next((m.scheme for m in model.modules() if isinstance(getattr(m, "scheme", None), Scheme)), None)
    if scheme is None:
        raise EngineError(
            f"{type(model).__name__} does not define how its inputs are cut: give it an input_layout(ndim), or pass "
            "DistArrays"
        )
    return scheme.leading(ndim).tokens if integers else scheme.for_dims(ndim).residual


def placement(model: Module, grid: Grid, world: Comm, counts: Callable[[Any], int] | None = None) -> Placement:
    """Return the placement of the rows of batches that a model on this rank needs.

    Parameters
    ----------
    counts : callable, optional
        From a host array of labels, or a tree of them, the targets in it that count.
    """
    declared, needs = getattr(model, "full_model", model), getattr(model, "batch_needs", (True, True))
    mesh: Any = grid.mesh
    data = tuple(axis for axis in ("data",) if axis in grid.axes) if mesh is None else mesh.axes("data")
    group = 0 if mesh is None else mesh.topology.rank
    more = {} if counts is None else {"counts": counts}
    return Placement(
        grid, world, lambda dtype, ndim: inputs_layout(declared, np.empty((0,) * ndim, dtype)), dtype_of(model), needs,
        group, data, **more,
    )  # fmt: skip


def dtype_of(model: Module) -> np.dtype[Any] | None:
    """Return the dtype of a model's first parameter, of any stage; None without parameters."""
    if hasattr(type(model), "input_dtype"):  # where other ranks have other stages
        found: np.dtype[Any] | None = model.input_dtype
        return found
    return next((np.dtype(p.dtype) for m in model.modules() for p in m._parameters.values()), None)


def place_inputs(model: Module, x: Any, grid: Grid, dtype: np.dtype[Any] | None) -> Any:
    """Return a model's inputs, arrays or a tree, as `DistArray`s, floating ones in this dtype.  Collective."""

    def place(leaf: Any) -> Any:
        return leaf if isinstance(leaf, Tensor | DistArray) else _placed(leaf, grid, inputs_layout(model, leaf), dtype)

    return mapped(place, x)
