"""Optimizers that update the matrices of hidden layers as wholes, and all other parameters by AdamW."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, SupportsIndex

from parlinalg.autograd import Parameter
from parlinalg.backend.kernels import optimizers
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.optim.flat import Entry, Run, segments, states_of
from parlinalg.optim.groups import Option, check_names, check_patterns, ordered, split_matrices, with_names
from parlinalg.optim.matrices import Matrix, matrices_of, split_of
from parlinalg.optim.optimizer import Optimizer, check_moments

Block = Any
Key = tuple[Any, ...]


class Matrixwise(Optimizer):
    """An optimizer whose step for a matrix depends on all its elements, wherever they are.

    A step is two passes over the pieces that a rank updates.  The first writes what becomes the directions of the
    matrices side by side to a buffer, and makes AdamW's step for all other parameters; then `directions` computes on
    whole matrices; the second pass makes the matrices' steps.

    Parameters
    ----------
    parameters : iterable of Parameter, or of dict
        See `Optimizer`.  A group with an option "matrices" is updated as it says; others are split by `matrix_groups`.
    adamw : sequence of str
        As of `matrix_groups`.
    adamw_lr : float, optional
        As of `matrix_groups`.
    betas, eps
        Of AdamW.
    **options
        As of `Optimizer`.
    """

    matrices = Option[bool]()
    betas = Option[tuple[float, float]]()
    eps = Option[float]()
    OTHERS: ClassVar[tuple[str, ...]] = ("mean", "square")
    """The states of parameters that AdamW updates."""

    def __init__(
        self, parameters: Iterable[Any], lr: float, weight_decay: float, *, adamw: Sequence[str],
        adamw_lr: float | None, **options: Any,
    ) -> None:  # fmt: skip
        check_names("adamw", adamw, "embedding")
        self._split = partial(split_matrices, adamw=adamw, adamw_lr=adamw_lr)
        self._keys: dict[tuple[int, str], Key] = {}
        if not isinstance(parameters, Mapping | Parameter) and not hasattr(parameters, "named_parameters"):
            parameters, named = self._groups(ordered(parameters))
            check_patterns("adamw", adamw, named)
        super().__init__(parameters, lr, weight_decay, matrices=True, **options)

    def _groups(self, given: Sequence[Any]) -> tuple[list[Any], list[tuple[str, Parameter]]]:
        """Return groups that all say whether they are matrices, and the parameters that are split here."""
        if not any(isinstance(item, Mapping) for item in given):
            named = with_names(given)
            return self._split(named), named
        found: list[Any] = []
        split: list[tuple[str, Parameter]] = []
        for item in given:
            if not isinstance(item, Mapping) or "matrices" in item or "params" not in item:
                found.append(item)  # what is wrong with a group is said where all groups are checked
                continue
            options = {name: value for name, value in item.items() if name not in ("params", "param_names")}
            held = [item["params"]] if isinstance(item["params"], Parameter) else item["params"]
            named = with_names(held)
            found += self._split(named, **options)
            split += named
        return found, split

    def add_param_group(self, group: Mapping[str, Any]) -> None:
        for part in self._groups([group])[0]:
            super().add_param_group(part)
        self.check_matrices()

    def check_options(self, options: dict[str, Any]) -> None:
        super().check_options(options)
        check_moments(options)

    def check_matrices(self) -> None:
        """Raise a ConfigError if a parameter of a group of matrices is none."""
        for number, group in enumerate(self.param_groups):
            for p in group["params"] if group["matrices"] else ():
                if p.matrix is None and p.ndim != 2:
                    raise ConfigError(
                        f"{p.name!r} of shape {p.shape} is in parameter group {number}, which {type(self).__name__} "
                        "updates as matrices: say how it is one, such as by parameter.matrix = (0, 1) (no dim counts "
                        "matrices, one dim is of inputs), or put it in a group with matrices=False, for AdamW"
                    )
                if p.dtype.kind == "c":
                    raise ConfigError(
                        f"{p.name!r} is of {p.dtype}, and {type(self).__name__} updates real matrices: put it in a "
                        "group with matrices=False, for AdamW"
                    )
                if p.matrix is not None and not _splits(p.matrix, p.ndim):
                    raise ConfigError(
                        f"{p.name!r} of shape {p.shape} has matrix = {p.matrix!r}: give how many dims count matrices, "
                        "and how many after them, one or more, are of inputs; at least one dim is left for outputs"
                    )

    @property
    def step_bytes(self) -> int:
        """The temporary bytes of a step on this rank: its elements of all matrices, those that it works on, and more.

        That is what is sent and received on the way from work to rest, or what is computed on the largest matrix.
        """
        rest, work, largest = Counter[int](), Counter[int](), Counter[int]()
        for p, size in self._hidden():
            grid = id(p.grid)
            rest[grid] += p.storage.nbytes(p.data).updated // p.dtype.itemsize * size
            work[grid] += -(-p.size // p.grid.size) * size
            for matrix in matrices_of(0, p.shape, split_of(p))[:1]:
                largest[grid] = max(largest[grid], self.temporary(matrix) * size)
        several = any(p.grid.size > 1 for p in self.parameters)
        moved = {grid: several * (rest[grid] + max(rest[grid], work[grid])) for grid in rest}
        return sum(rest[grid] + work[grid] + max(moved[grid], largest[grid]) for grid in rest)

    def _hidden(self) -> Iterator[tuple[Parameter, int]]:
        """Yield the parameters that are updated as matrices, with the bytes of an element of their states."""
        for group in self.param_groups:
            for p in group["params"] if group["matrices"] else ():
                yield p, states_of(p.dtype, self.flat.master)[0].itemsize

    def temporary(self, matrix: Matrix) -> int:
        """Return the elements that are held beside a matrix while its direction is computed."""
        return 4 * matrix.size + 3 * matrix.short**2

    # ------------------------------------------------------------------ a step
    def arrange(self) -> list[Entry]:
        self.check_matrices()
        return super().arrange()

    def apply(self) -> None:
        members: dict[tuple[int, str], list[Entry]] = {}
        entries = {id(e.parameter): e for e in self.flat.entries}
        for p in self.parameters:
            entry = entries[id(p)]
            if self.param_groups[entry.group]["matrices"] and p.storage.settled is not None and p.grid.inside:
                members.setdefault((id(p.grid), entry.dtype.str), []).append(entry)
        buffers, places = {}, {}
        for key, alike in members.items():
            backend = alike[0].data.grid.backend
            buffers[key], at = backend.empty((sum(e.size for e in alike),), alike[0].dtype), 0
            for entry in alike:
                places[id(entry.parameter)] = key, at
                at += entry.size
        for run in self.windows():
            if not self.matrices:
                self.update_others(run)
                continue
            for entry, part, first in segments(run):
                key, at = places[id(entry.parameter)]
                self.measure(run, part, buffers[key][at + first : at + first + part.stop - part.start])
        for key, alike in members.items():
            self.directions(alike, buffers[key])
        self.check_directions()
        for run in self.windows():
            if not self.matrices:
                continue
            for entry, part, first in segments(run):
                key, at = places[id(entry.parameter)]
                direction = buffers[key][at + first : at + first + part.stop - part.start]
                rate = self.lr * self.scale(matrix_of(entry))
                optimizers.matrix_step(run.p[part], direction, rate=rate, decay=self.lr * self.weight_decay)

    def update(self, run: Run) -> None:
        raise NotImplementedError(f"{type(self).__name__} needs whole matrices before it updates one: step()")

    def update_others(self, run: Run) -> None:
        """Make AdamW's step for parameters that lie side by side."""
        optimizers.adam(
            run.p, run.g, run.states["mean"], run.states["square"], lr=self.lr, betas=self.betas, eps=self.eps,
            weight_decay=self.weight_decay, decoupled=True, step=self.steps, factor=self.factor,
        )  # fmt: skip

    @abstractmethod
    def measure(self, run: Run, part: slice, out: Block) -> None:
        """Update the states by the gradients of a part of a run, and write to `out` what `directions` needs of it."""

    @abstractmethod
    def directions(self, entries: Sequence[Entry], buffer: Block) -> None:
        """Write the directions of the steps of these matrices over what `measure` wrote.  Collective over their grid.

        Parameters
        ----------
        entries : sequence of Entry
            All of one grid and dtype, in the order of the parameters.
        buffer : array
            Flat: this rank's elements of each, one after the other.
        """

    def check_directions(self) -> None:
        """Raise an error on all ranks if `directions` met one on any."""

    def scale(self, matrix: Matrix | None) -> float:
        """Return the factor of the learning rate of a parameter; `matrix` is its first, or None without elements."""
        return 1.0

    def changed(self, entries: Sequence[Entry], grid: Grid) -> bool:
        """Return True if what ranks update of these has changed on any rank since the last step.

        Collective over the grid if ranks share updates.
        """
        place = id(grid), entries[0].dtype.str
        key = tuple((id(e.parameter), e.start, e.size, e.data.layout, e.group) for e in entries)
        new = self._keys.get(place) != key
        self._keys[place] = key
        if any(e.partition.axes for e in entries):
            return any(grid.everyone.share(new, others="alike"))
        return new


def _splits(matrix: Any, ndim: int) -> bool:
    """Return True if a value of `Parameter.matrix` splits so many dims."""
    two = isinstance(matrix, Sequence) and len(matrix) == 2 and all(isinstance(n, SupportsIndex) for n in matrix)
    return two and matrix[0] >= 0 and matrix[1] >= 1 and sum(matrix) < ndim


def matrix_of(entry: Entry) -> Matrix | None:
    """Return the first matrix of a parameter; None if it has no elements."""
    return next(iter(matrices_of(0, entry.data.shape, split_of(entry.parameter))), None)
