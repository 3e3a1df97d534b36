"""Parameters: the leaves that training changes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd.storage import ParameterStorage
from parlinalg.autograd.tape import Reducer
from parlinalg.autograd.tensor import Tensor
from parlinalg.backend.shapes import label_memory
from parlinalg.errors import LayoutError
from parlinalg.grid import Grid
from parlinalg.redistribute import check_block_replicas

Block = Any


class Parameter(Tensor):
    """A leaf that training changes.

    Its gradient stays partial during a backward pass over axes that do not cut it.  Then its reducer settles it,
    together with those of other parameters; without a reducer the backward pass does.

    Parameters
    ----------
    data : DistArray
    name : str
        Its qualified name, unique in a model.

    Attributes
    ----------
    reducer : Reducer or None
    storage : ParameterStorage
        Where the value and the gradient lie, and which part of them this rank updates.
    matrix : tuple of two ints, or None
        How the value is a matrix, or several, that a hidden product multiplies by: the number of leading dims that
        count matrices, and of dims after them that are inputs; the others are outputs.  None: it is none, such as an
        embedding, a norm, a bias, or the weights of a head.  A layer says so of its parameters; by default those of two
        dims are one, of (0, 1).
    relatives : sequence of str
        The names of all parameters of the model, where this rank has made those of some of its modules alone, such as
        of a stage of a pipeline.
    writes : int
        How often the value was written to in place, but for an optimizer's updates; see `written`.
    """

    __slots__ = ("matrix", "name", "reducer", "relatives", "storage", "writes")

    def __init__(self, data: DistArray, name: str = "", requires_grad: bool = True) -> None:
        self.name = name
        self.reducer: Reducer | None = None
        self.storage = ParameterStorage()
        self.relatives: Sequence[str] = ()
        self.writes = 0
        self.matrix: tuple[int, int] | None = (0, 1) if data.ndim == 2 else None
        super().__init__(data, requires_grad)
        label_memory(data.resident, "weights")
        if data.grid.world.checked:
            check_block_replicas(
                data.block, data.layout, data.grid, f"the parameter {name!r}" if name else "a parameter"
            )

    @property
    def requires_grad(self) -> bool:
        return self._node is not None

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        Tensor.requires_grad.fset(self, wanted)  # type: ignore[attr-defined]
        if self._node is None:
            self.storage.grad = None
        else:
            self._node.owner, self._node.late = weakref.ref(self), True

    @property
    def grad(self) -> DistArray | None:
        """The gradient that backward passes have added up so far; None forgets what the storage has settled too."""
        return None if self._node is None else self.storage.grad

    @grad.setter
    def grad(self, value: DistArray | None) -> None:
        if value is None:
            self.storage.forget()
        elif self._node is None:
            Tensor.grad.fset(self, value)  # type: ignore[attr-defined]
        else:
            label_memory(value.resident, "gradients")
            self.storage.grad = value

    @property
    def updated(self) -> tuple[Block, Block]:
        """Flat views of the elements that this rank updates, and of their settled gradient or None."""
        return self.storage.updated(self._data)

    @property
    def counted(self) -> bool:
        """True if this rank counts the elements that it updates in sums over the whole grid.

        It is at coordinate 0 of every axis that neither cuts the parameter nor shares its update.
        """
        layout, axes = self.layout, self.storage.axes
        free = (i for a, i in self.grid.coords.items() if layout.where(a) is None and a not in axes)
        return self.grid.inside and not any(free)

    def check_settled(self) -> None:
        """Raise a LayoutError if the gradient is a sum not formed yet."""
        grad = self.storage.grad
        if grad is not None and grad.layout.partial:
            raise LayoutError(
                f"the gradient of {self.name!r} is {grad.layout!r}, not summed yet; make the last backward pass of a "
                "step outside no_sync()"
            )

    def written(self) -> None:
        """Count a write to the value in place, after which an optimizer's master of it takes the value."""
        self.writes += 1

    def deposit(self, block: Block) -> None:
        """Add a settled gradient, whose block is nobody else's, to `grad`."""
        if self._node is not None:
            self._node.deposit(block)

    def __repr__(self) -> str:
        return f"Parameter({self.name!r}, shape={self.shape}, dtype={self.dtype}, layout={self.layout!r})"


class Buffer(Parameter):
    """A value of a module that no optimizer changes, such as the running mean of a batch norm.

    It is part of a model's state and of checkpoints, and none of its parameters.  Ranks that hold the same block write
    the same values to it.
    """

    __slots__ = ()

    def __init__(self, data: DistArray, name: str = "") -> None:
        super().__init__(data, name, requires_grad=False)

    def __repr__(self) -> str:
        return f"Buffer({self.name!r}, shape={self.shape}, dtype={self.dtype}, layout={self.layout!r})"


def settle(parameters: Sequence[Parameter]) -> None:
    """Sum gradients that `no_sync` left partial, in the order of the parameters.  Collective.

    For parameters that no later backward pass reaches; `backward()` settles all those it reaches.
    """
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout.partial:
            parameter.grad = parameter.grad.summed()


def distinct(parameters: Iterable[Parameter]) -> list[Parameter]:
    """Return the parameters, each once."""
    return list({id(p): p for p in parameters}.values())


def gradients(parameters: Iterable[Parameter]) -> Iterator[tuple[Parameter, Block]]:
    """Iterate over parameters that have a gradient, each once, with this rank's part of the settled one, flat.

    The part is taken from the storage when it is asked for, a view where it lies in C order.

    Raises
    ------
    LayoutError
        If a gradient is not settled.
    """
    once = distinct(parameters)
    for p in once:
        p.check_settled()
    for p in once:
        part = p.updated[1]
        if part is not None:
            yield p, part


def sums_over_ranks(parameters: Sequence[Parameter], terms: Sequence[Block]) -> np.ndarray:
    """Return for each parameter the sum of all ranks' terms.  Collective over the grids of the parameters.

    Parameters
    ----------
    terms : sequence of arrays without dims, or None
        This rank's terms in float64, one a parameter; None where it has none (see `Parameter.counted`).

    Returns
    -------
    numpy.ndarray
        In float64, on every rank, those outside the grid too.
    """
    totals = np.zeros(len(parameters))
    grids: dict[int, Grid] = {id(p.grid): p.grid for p in parameters}
    for grid in grids.values():
        where = [i for i, p in enumerate(parameters) if p.grid is grid]
        mine = grid.backend.zeros((len(where),), np.float64)
        for at, i in enumerate(where):
            if terms[i] is not None:
                mine[at] = terms[i]
        grid.everyone.all_reduce(mine)
        if grid.size < grid.world.size:  # ranks outside the grid learn them too, so that all take the same way
            grid.world.broadcast(mine, 0)
        if grid.backend.values:
            totals[where] = grid.backend.to_host(mine)
        else:  # the assumed sum, spread over all
            totals[where] = grid.backend.assume("norm", "the norm of the gradients") ** 2 / len(parameters)
    return totals
