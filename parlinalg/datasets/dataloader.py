"""Data loaders of which every rank reads its own rows alone.

Which rows are a rank's own follows from the layout of the batch: axes that cut its first dim share the rows out, ranks
along other axes read the same ones, and axes that cut a further dim, such as a sequence, cut it after the reading.  All
ranks agree on the shapes of every batch, so that what goes wrong on one is an error on all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, NoReturn, Protocol
from zlib import crc32

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.create import dtype_named
from parlinalg.comm import Comm
from parlinalg.datasets.collate import Form, collate, form_of, form_text, host_array, leaves, mapped, shaped
from parlinalg.datasets.loader import Batch, Sampler
from parlinalg.errors import ConfigError, EngineError, ParlinalgError
from parlinalg.grid import Grid
from parlinalg.layout import Layout, index_of, piece, span
from parlinalg.redistribute import check_given


class Dataset(Protocol):
    """Samples by their numbers (map-style), as PyTorch's `torch.utils.data.Dataset` has them.

    A sample is a pair (inputs, label), each an array, a number, a tensor of PyTorch, or a tuple or dict of these; with
    a `collate_fn` it may be anything.
    """

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return sample number `index`, from 0 on."""
        ...


@dataclass(frozen=True)
class Placement:
    """The ranks and layouts that the rows of batches go to.

    Attributes
    ----------
    grid : Grid
        The grid of the arrays.
    world : Comm
        All ranks that train; in a pipeline more than the grid's.
    inputs : callable
        From the dtype and the number of dims of an array of the inputs, its layout.
    dtype : dtype or None
        Of floating inputs.
    needs : tuple of bool
        True if this rank needs the inputs, and the labels: in a pipeline its first and its last stage do.
    group : int
        The pipeline rank.
    data : tuple of str
        The axes of data parallelism.
    counts : callable
        From a host array of labels (or a tree), the targets in it that count.
    """

    grid: Grid
    world: Comm
    inputs: Callable[[np.dtype[Any], int], Layout]
    dtype: np.dtype[Any] | None = None
    needs: tuple[bool, bool] = (True, True)
    group: int = 0
    data: tuple[str, ...] = ()
    counts: Callable[[Any], int] = lambda label: sum(int(leaf.size) for leaf in leaves(label))

    def cuts(self, form: Form) -> list[Layout]:
        """Return the layouts of the inputs of batches of this form."""
        return list(leaves(shaped(lambda dtype, rest, _: self._layout(dtype, rest), form[1])))

    def _layout(self, dtype: str, rest: tuple[int, ...]) -> Layout:
        found = self.inputs(dtype_named(dtype), 1 + len(rest))
        if found.ndim != 1 + len(rest):
            raise EngineError(
                f"the model's inputs have the layout {found!r}, of {found.ndim} dims, and the loader gives arrays of "
                f"{1 + len(rest)}: {dtype}[…, {', '.join(map(str, rest))}]"
            )
        return found

    def labels(self, form: Form) -> Layout:
        """Return the layout of an array of labels of one dim: the rows of the first array of the inputs."""
        return Layout(self.cuts(form)[0].dims[0])

    def first(self, besides: Iterable[str] = ()) -> bool:
        """Return True if this rank is the first along all axes but these."""
        return self.grid.inside and not any(n for axis, n in self.grid.coords.items() if axis not in set(besides))


class Labels(DistArray):
    """Labels with the rows of the inputs, as a loader reads them; an engine brings them to the outputs' layout."""

    __slots__ = ()


@dataclass
class LocalBatch:
    """A microbatch as a rank has read it.

    Attributes
    ----------
    tree : tuple or None
        Inputs and labels of some of the rows, as host arrays; None of no rows.
    held : array of int
        The places of these rows in the microbatch.
    rows : int
        The rows on all ranks; with a loader that gives each rank its own, known once all have told theirs.
    count : int
        The targets that this rank is to count.
    """

    tree: Any
    held: np.ndarray = field(default_factory=lambda: np.arange(0))
    rows: int = 0
    count: int = 0


class DataLoader:
    """Batches of a data set, of which every rank reads its own rows alone.

    `initialize` and `Trainer.fit` take it as it is: they know the model, and with it which rows a rank needs.  A
    training loop without them places it by `on`.

    Parameters
    ----------
    dataset : Dataset
        Has `__len__` and `__getitem__`; PyTorch's have.
    batch_size : int
        Samples a batch over all ranks; the last one may be smaller.
    shuffle : bool
        True if every epoch takes the samples in another order.
    sampler : Sampler, optional
        Gives the order instead.
    seed : int
        The seed of the order.
    drop_last : bool
        True if a smaller batch at the end is left out.
    collate_fn : callable, optional
        From the list of a rank's samples to a pair (inputs, labels) of arrays, or trees of them, whose first dims count
        these samples; by default `collate`.  The shapes of a batch without its rows must agree on all ranks: pad to a
        length that does not depend on the rows.

    Raises
    ------
    ConfigError
        If the data set has no length or no items, or a number is out of range.

    Examples
    --------
    >>> import parlinalg as pla
    >>> squares = [(np.full(3, float(i)), i * i) for i in range(5)]
    >>> loader = DataLoader(squares, batch_size=2)
    >>> grid = pla.Grid({"data": 1})
    >>> [y.gather().tolist() for x, y in loader.on(grid, pla.Layout("data", None))]
    [[0, 1], [4, 9], [16]]
    """

    def __init__(
        self, dataset: Any, batch_size: int = 1, shuffle: bool = False, *, sampler: Sampler | None = None,
        seed: int = 0, drop_last: bool = False, collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> None:  # fmt: skip
        count = samples_of(dataset)
        if sampler is not None and shuffle:
            raise ConfigError("DataLoader: the sampler gives the order of the samples: give it, or shuffle=True")
        if sampler is not None and not callable(getattr(sampler, "order", None)):
            raise ConfigError(
                "DataLoader: a sampler has order(epoch), the numbers of all samples of an epoch, the same on every "
                f"rank; {type(sampler).__name__} has none: make a subclass of parlinalg.datasets.Sampler"
            )
        if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
            raise ConfigError(f"batch_size must be at least 1, not {batch_size!r}")
        if collate_fn is not None and not callable(collate_fn):
            raise ConfigError(f"DataLoader: collate_fn is a function of a list of samples, not {collate_fn!r}")
        self.dataset, self.batch_size, self.drop_last = dataset, int(batch_size), bool(drop_last)
        self.sampler = Sampler(count, shuffle=shuffle, seed=seed) if sampler is None else sampler
        self.collate_fn = collate if collate_fn is None else collate_fn

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return batches_in(len(self.sampler), self.batch_size, self.drop_last)

    def __iter__(self) -> NoReturn:
        """Raise: which rows are to be read is known once the loader is placed."""
        unplaced(self)

    def batches(self, epoch: int, skip: int = 0) -> Iterator[np.ndarray]:
        """Return the sample numbers of each batch of an epoch, over all ranks, but for the first `skip` batches."""
        order = self.sampler.order(epoch)
        for number in range(skip, batches_in(len(order), self.batch_size, self.drop_last)):
            yield order[number * self.batch_size : (number + 1) * self.batch_size]

    def on(
        self, grid: Grid, inputs: Layout | Callable[[np.dtype[Any], int], Layout], *, dtype: Any = None,
        world: Comm | None = None,
    ) -> OwnRows:  # fmt: skip
        """Return the loader placed on a grid, for a training loop without an engine.

        Parameters
        ----------
        grid : Grid
        inputs : Layout or callable
            The layout of an input array, or a function that returns it for a dtype and a number of dims.  Labels have
            its rows.
        dtype : dtype, optional
            The dtype of floating inputs.
        world : Comm, optional
            By default the grid's ranks.
        """
        layout = (lambda *_: inputs) if isinstance(inputs, Layout) else inputs
        return self.placed(
            Placement(
                grid, grid.world if world is None else world, layout, None if dtype is None else dtype_named(dtype)
            )
        )

    def placed(self, place: Placement) -> OwnRows:
        """Return the loader as this rank reads it.  Collective.

        Raises
        ------
        ConfigError
            On all ranks, if their data sets differ in length, or their batches in size.
        """
        facts = place.world.share(
            [samples_of(self.dataset), len(self.sampler), self.batch_size, self.drop_last], others="alike"
        )
        names = ("samples", "samples in its order", "rows a batch", "for drop_last")
        for rank, theirs in enumerate(facts):
            for name, found, first in zip(names, theirs, facts[0], strict=True):
                if found != first:
                    raise ConfigError(
                        f"the data loader of rank {rank} has {found} {name}, that of rank 0 {first}: every rank is "
                        "given the same data set, and reads its own rows of it"
                    )
        return OwnRows(self, place)


class Sharded:
    """A loader of which each data parallel rank gives its own rows, as PyTorch's with a `DistributedSampler`.

    The batch of all ranks is that of data rank 0, then that of rank 1, …; ranks that differ along other axes only give
    the same rows.  For any other loader, all ranks give the whole batch.

    Parameters
    ----------
    loader : iterable
        Of pairs (inputs, labels), host arrays or tensors of PyTorch, or trees of them, with this rank's rows; make it
        for `mesh.size("data")` replicas and rank `mesh.rank("data")`.  Where its sampler has `set_epoch`, it is called.

    Raises
    ------
    ConfigError
        If it cannot be iterated.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        if not isinstance(loader, Iterable) or isinstance(loader, str | bytes | dict | DataLoader):
            raise ConfigError(
                f"Sharded takes a loader of pairs (inputs, labels) with this rank's rows, not {type(loader).__name__}"
            )
        self.loader: Any = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> NoReturn:
        """Raise: where the rows go is known once the loader is placed."""
        unplaced(self)

    def placed(self, place: Placement) -> ShardedRows:
        """Return the loader on this rank."""
        return ShardedRows(self, place)


class Rows(ABC):
    """A placed loader: batches of distributed arrays, epoch by epoch."""

    def __init__(self, place: Placement) -> None:
        self.place = place
        self._form: Form | None = None

    @abstractmethod
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]:
        """Return an iterator over the batches of the first epoch.  Collective."""
        for (batch,) in self.epoch(0):
            yield batch

    @abstractmethod
    def epoch(self, epoch: int, parts: int = 1, skip: int = 0) -> Iterator[list[Batch]]:
        """Yield the batches of an epoch but for the first `skip`, each as at most `parts` microbatches.  Collective.

        Raises
        ------
        EngineError
            On all ranks, if rows cannot be read on any, or their shapes differ.
        """

    def _agreed(self, read: Callable[[], list[LocalBatch]], tells: list[Any]) -> tuple[list[LocalBatch], list[Any]]:
        """Return the microbatches that are read here, and what all ranks report of theirs: a problem, of each
        microbatch [form, rows held, targets], the pipeline rank, what it needs, and what `tells` has after the
        reading.  Collective; an error on one rank is raised on all.
        """
        parts: list[LocalBatch] = []
        problem, cause = "", None
        try:
            parts = read()
        except ParlinalgError as error:
            problem, cause = str(error), error
        facts = [[None if p.tree is None else form_of(p.tree), len(p.held), p.count] for p in parts]
        needs = self.place.needs if self.place.grid.inside else (False, False)
        everyone = self.place.world.share([problem, facts, self.place.group, needs, *tells], others="by rank")
        for rank, (text, *_) in enumerate(everyone):
            if text:
                same = all(t[0] for t in everyone) or text.startswith("rank ")
                raise EngineError(text if same else f"rank {rank}: {text}") from cause
        return parts, everyone

    def _batches(self, parts: Sequence[LocalBatch], everyone: Sequence[Any]) -> list[Batch]:
        """Return the microbatches as distributed arrays, once all ranks know their shapes."""
        counted = min((group for _, _, group, needs, *_ in everyone if needs[1]), default=0)
        made, offset = [], 0
        for j, part in enumerate(parts):
            facts = [(rank, told_[1][j], told_[2]) for rank, told_ in enumerate(everyone) if j < len(told_[1])]
            form, first = next(((f[0], rank) for rank, f, _ in facts if f[0] is not None), (None, 0))
            for rank, fact, _ in facts:
                if fact[0] not in (None, form) and form is not None:
                    raise EngineError(
                        f"the rows that rank {rank} reads of a batch are {form_text(fact[0])}, those of rank {first} "
                        f"{form_text(form)}: every rank needs the same shapes; pad to a length that does not depend on "
                        "the rows"
                    )
            if form is None:
                raise EngineError("no rank has read any rows of a batch")
            if self._form is not None and _kinds(form) != _kinds(self._form):
                raise EngineError(f"a batch is {form_text(form)}, and the first one was {form_text(self._form)}")
            self._form = form
            targets = sum(fact[2] for _, fact, group in facts if group == counted)
            made.append(self._batch(part, form, offset, targets))
            offset += part.rows
        return made

    def _batch(self, part: LocalBatch, form: Form, offset: int, targets: int) -> Batch:
        """Return a microbatch, from the rows that are held here."""
        place, rows = self.place, self.place.labels(form)

        def x(dtype: str, rest: tuple[int, ...], leaf: Any) -> DistArray:
            to = dtype_named(dtype)
            if place.dtype is not None and (to.kind == "f" or to.name == "bfloat16"):
                to = place.dtype
            return self._cut(part, leaf, rest, place._layout(dtype, rest), to, DistArray, place.needs[0])

        def y(dtype: str, rest: tuple[int, ...], leaf: Any) -> DistArray:
            layout = Layout(rows.dims[0], *[None] * len(rest))
            return self._cut(part, leaf, rest, layout, dtype_named(dtype), Labels, place.needs[1])

        inputs, labels = part.tree or (None, None)
        return Batch(shaped(x, form[1], inputs), shaped(y, form[2], labels), offset, targets=targets)

    def _cut(
        self, part: LocalBatch, leaf: Any, rest: tuple[int, ...], layout: Layout, dtype: np.dtype[Any],
        kind: type[DistArray], needed: bool,
    ) -> DistArray:  # fmt: skip
        """Return the block of an array of the batch; one that no stage here takes is not made."""
        grid, shape = self.place.grid, (part.rows, *rest)
        layout.check(shape, grid.sizes)
        mine, *others = grid.block(layout, shape)
        sizes = (len(mine), *map(len, others))
        if not needed or leaf is None:
            void = np.zeros((), dtype) if dtype.kind in "iub" else np.full((), np.nan, dtype)
            block = grid.backend.from_host(np.broadcast_to(void, sizes))
        else:
            at = np.searchsorted(part.held, np.arange(mine.start, mine.stop))
            rows = leaf[at][:, *(slice(r.start, r.stop) for r in others)]
            block = grid.backend.from_host(np.array(rows, dtype=dtype, order="C"))
        if needed:
            right = "a data set gives the same sample for a number on every rank, augmented or not"
            check_given("the rows of a batch", block, layout, shape, grid, right)
        return kind(block, shape, layout, grid)


class OwnRows(Rows):
    """A `DataLoader` on a rank: it asks the data set for this rank's rows only, each once an epoch.

    The rank that holds the first row of the first batch reads it before the others, and tells them its form, from which
    follow the layouts, and so the rows of each.
    """

    def __init__(self, loader: DataLoader, place: Placement) -> None:
        super().__init__(place)
        self.loader = loader
        self._early: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self, epoch: int, parts: int = 1, skip: int = 0) -> Iterator[list[Batch]]:
        for numbers in self.loader.batches(epoch, skip):
            if self._form is None:
                self._probe(int(numbers[0]))
            cuts = [c for c in (piece(len(numbers), parts, i) for i in range(parts)) if c]
            sample_order = crc32(np.ascontiguousarray(numbers, np.int64).data)
            read, everyone = self._agreed(
                partial(self._read_all, [numbers[c.start : c.stop] for c in cuts]), [sample_order]
            )
            odd = next((rank for rank, each in enumerate(everyone) if each[4] != everyone[0][4]), None)
            if odd is not None:
                raise EngineError(
                    f"the order of rank {odd} takes other samples for a batch than that of rank 0: give the data "
                    "loaders of all ranks the same seed, or sampler"
                )
            yield self._batches(read, everyone)

    def _probe(self, number: int) -> None:
        """Find the form of batches from the first sample, which one rank that needs it reads.  Collective."""
        world, place = self.place.world, self.place
        able = world.share(bool(place.first() and any(place.needs)), others="by rank")
        reader = able.index(True)
        problem, form, cause = "", None, None
        if world.rank == reader:
            try:
                self._early = {number: self.loader.dataset[number]}
                form = form_of(self._collated([self._early[number]]))
            except ParlinalgError as error:
                problem, cause = str(error), error
        problem, form = world.share([problem, form], others="alike")[reader]
        if problem:
            raise EngineError(problem) from cause
        self._form = form

    def _read_all(self, microbatches: Sequence[np.ndarray]) -> list[LocalBatch]:
        return [self._read(numbers) for numbers in microbatches]

    def _read(self, numbers: np.ndarray) -> LocalBatch:
        """Return this rank's rows of a microbatch."""
        place, rows = self.place, len(numbers)
        if self._form is None or not any(place.needs) or not place.grid.inside:
            return LocalBatch(None, rows=rows)
        cuts = [layout.dims[0] for layout in place.cuts(self._form)]
        spans = [span(rows, cut, place.grid.sizes, place.grid.coords) for cut in cuts]
        held = np.unique(np.concatenate([np.arange(r.start, r.stop) for r in spans]))
        if not len(held):
            return LocalBatch(None, rows=rows)
        tree = self._collated([self._item(int(number)) for number in numbers[held]])
        count = 0
        if place.needs[1] and place.first(cuts[0]):
            own = np.searchsorted(held, np.arange(spans[0].start, spans[0].stop))
            count = int(place.counts(mapped(lambda leaf: leaf[own], tree[1])))
        return LocalBatch(tree, held, rows, count)

    def _item(self, number: int) -> Any:
        return self._early.pop(number) if number in self._early else self.loader.dataset[number]

    def _collated(self, items: list[Any]) -> Any:
        """Return samples as a pair of arrays, or trees of them."""
        found = self.loader.collate_fn(items)
        if not (isinstance(found, tuple | list) and len(found) == 2):
            given = "a sample" if self.loader.collate_fn is collate else "what collate_fn gives"
            raise EngineError(
                f"{given} is a pair (inputs, label), not {_what(found)}: give a collate_fn that makes a pair, such as "
                "lambda samples: (inputs, labels)"
            )
        return _checked(found, len(items), "collate_fn gives", "samples")


class ShardedRows(Rows):
    """A `Sharded` loader on a rank."""

    def __init__(self, sharded: Sharded, place: Placement) -> None:
        super().__init__(place)
        self.loader = sharded.loader
        self.index = index_of(place.data, place.grid.sizes, place.grid.coords) if place.grid.inside else 0
        self.ranks = int(np.prod([place.grid.sizes[axis] for axis in place.data], dtype=int))

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self, epoch: int, parts: int = 1, skip: int = 0) -> Iterator[list[Batch]]:
        set_epoch(self.loader, epoch)
        needed = any(self.place.needs) and self.place.grid.inside
        iterator = islice(iter(self.loader), skip, None) if needed else iter(())
        first = True
        while True:
            tells = [self.index, True, 0]
            mine, everyone = self._agreed(partial(self._drawn, iterator, parts, tells, first), tells)
            readers = [(rank, each) for rank, each in enumerate(everyone) if any(each[3])]
            if all(each[5] for _, each in readers):
                return
            self._check(readers)
            yield self._batches(self._whole(mine, readers), everyone)
            first = False

    def _drawn(self, iterator: Iterator[Any], parts: int, tells: list[Any], first: bool) -> list[LocalBatch]:
        """Return the next batch of this rank, in microbatches; none at the end."""
        for given in iterator:
            pair = pair_of(given)
            tells[1:] = False, _checksum(pair) if first else 0
            return self._parts(pair, parts)
        return []

    def _parts(self, pair: Any, parts: int) -> list[LocalBatch]:
        """Return this rank's rows in microbatches, some of which may have none."""
        rows = len(next(leaves(pair[0])))
        found = []
        for i in range(parts):
            c = piece(rows, parts, i)
            tree = mapped(lambda leaf, c=c: leaf[c.start : c.stop], pair)  # type: ignore[misc]
            counts = self.place.needs[1] and self.place.first(self.place.data)
            found.append(LocalBatch(tree, np.arange(len(c)), 0, int(self.place.counts(tree[1])) if counts else 0))
        return found

    def _check(self, readers: Sequence[tuple[int, Any]]) -> None:
        """Raise where ranks that should give the same rows give others, or batches end on some."""
        seen: dict[int, tuple[int, Any]] = {}
        for rank, (_, facts, _, _, index, ended, checksum) in readers:
            if ended:
                raise EngineError(f"the batches of rank {rank} end, those of other ranks go on: all need as many")
            looks = [fact[:2] for fact in facts], checksum
            other, theirs = seen.setdefault(index, (rank, looks))
            if theirs != looks:
                raise EngineError(
                    f"ranks {other} and {rank} are of the same data rank, {index}, and give different rows: make the "
                    "loader with num_replicas=mesh.size('data') and rank=mesh.rank('data')"
                )

    def _whole(self, mine: Sequence[LocalBatch], readers: Sequence[tuple[int, Any]]) -> list[LocalBatch]:
        """Return the microbatches with the rows of all ranks; empty ones are left out on all."""
        lengths: dict[int, list[int]] = {}
        for _, (_, facts, _, _, index, *_) in readers:
            lengths[index] = [fact[1] for fact in facts]
        every = [lengths.get(d, []) for d in range(self.ranks)]
        found = []
        for j, column in enumerate(zip(*every, strict=True)):
            part = mine[j] if j < len(mine) else LocalBatch(None)
            start, part.rows = sum(column[: self.index]), sum(column)
            part.held = start + np.arange(column[self.index])
            axes = self.place.data
            for d, n in enumerate(column):
                if n != len(piece(part.rows, self.ranks, d)):
                    raise EngineError(
                        f"data rank {d} gives {n} rows of a batch of {part.rows} over {self.ranks} ranks: rows are to "
                        f"be distributed evenly over {axes}, the first ranks one more where they do not divide; give "
                        f"{[len(piece(part.rows, self.ranks, i)) for i in range(self.ranks)]}"
                    )
            found.append(part)
        return [part for part in found if part.rows]

    def _batches(self, parts: Sequence[LocalBatch], everyone: Sequence[Any]) -> list[Batch]:
        sizes = self.place.grid.sizes
        data = [axis for axis in self.place.data if sizes[axis] > 1]
        form = next(form for _, facts, *_ in everyone for form, *_ in facts if form is not None)
        for layout in self.place.cuts(form):
            cut = [axis for axis in layout.dims[0] if sizes[axis] > 1]
            if cut[: len(data)] != data:
                raise EngineError(
                    f"Sharded: the rows of the model's inputs are cut over {cut}, not over {data} first, so that no "
                    "data rank has rows of its own: give whole batches, or a DataLoader"
                )
        return super()._batches(parts, everyone)


def samples_of(dataset: Any) -> int:
    """Return the length of a data set.

    Raises
    ------
    ConfigError
        If it has none, or no items by number, or no samples.
    """
    what = type(dataset).__name__
    if not hasattr(dataset, "__getitem__"):
        more = ""
        if isinstance(dataset, Iterable):
            more = (
                "; what gives batches itself, as PyTorch's DataLoader, is given to initialize or Trainer.fit as it is"
            )
        raise ConfigError(f"a data set has __len__ and __getitem__, and {what} has no __getitem__{more}")
    try:
        count = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"the data set, a {what}, has no length: define __len__; an iterable without a length is a source of whole "
            "batches (pairs of arrays, the same on every rank), or with parlinalg.datasets.Sharded of each rank's own"
        ) from error
    if not count:
        raise ConfigError(f"the data set, a {what}, has no samples")
    return int(count)


def batches_in(samples: int, batch_size: int, drop_last: bool) -> int:
    """Return the batches that so many samples make."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


def unplaced(loader: Any) -> NoReturn:
    """Raise: a loader of a rank's own rows is iterated before it is known which these are."""
    raise ConfigError(
        f"a {type(loader).__name__} reads the rows that the model needs on this rank: give it to parlinalg.initialize, "
        "and iterate the train_dataloader that comes back, or to Trainer.fit; without an engine, place a DataLoader by "
        ".on(grid, layout)"
    )


def pair_of(given: Any) -> Any:
    """Return a batch of a loader that gives each rank its own rows, as two trees of NumPy arrays."""
    if not (isinstance(given, tuple | list) and len(given) == 2):
        raise EngineError(f"a dataloader gives pairs (inputs, labels), not {_what(given)}")
    x, y = mapped(host_array, tuple(given))
    first = next(leaves(x), None)
    if first is None or not first.ndim:
        raise EngineError(
            f"a batch's inputs and labels are arrays whose first dim counts samples, not {_what(given[0])}"
        )
    return _checked((x, y), len(first), "a batch has", "samples")


def _checked(found: Any, count: int, what: str, of: str) -> tuple[Any, Any]:
    """Return a pair of trees, if all are arrays of so many rows."""
    tree = mapped(host_array, tuple(found))
    for name, part in zip(("inputs", "labels"), tree, strict=True):
        empty = True
        for leaf in leaves(part):
            empty = False
            if not leaf.ndim or len(leaf) != count:
                raise EngineError(f"{what} {name} of shape {leaf.shape} for {count} {of}: the first dim counts them")
        if empty:
            raise EngineError(f"{what} no {name}: an empty tuple, list or dict")
    return tree[0], tree[1]


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell a loader of PyTorch's kind, or its sampler, which epoch begins, where it has `set_epoch`."""
    for each in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
        if callable(getattr(each, "set_epoch", None)):
            each.set_epoch(epoch)  # type: ignore[union-attr]
    inner = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    if callable(getattr(inner, "set_epoch", None)):
        inner.set_epoch(epoch)  # type: ignore[union-attr]


def _checksum(tree: Any) -> int:
    found = 0
    for leaf in leaves(tree):
        found = crc32(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data, found) if leaf.size else found
    return found


def _kinds(form: Form) -> Any:
    """Return a form without lengths."""
    return shaped(lambda dtype, rest, _: (dtype, len(rest)), form)


def _what(given: Any) -> str:
    return f"a {type(given).__name__}" + (f" of {len(given)}" if isinstance(given, tuple | list | dict) else "")
