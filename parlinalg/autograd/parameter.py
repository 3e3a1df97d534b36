"""Parameters: the leaves that training changes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from parlinalg.array import DistArray
from parlinalg.autograd.tape import Reducer
from parlinalg.autograd.tensor import Tensor

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
    """

    __slots__ = ("name", "reducer")

    def __init__(self, data: DistArray, name: str = "", requires_grad: bool = True) -> None:
        self.name = name
        self.reducer: Reducer | None = None
        super().__init__(data, requires_grad)

    @property
    def requires_grad(self) -> bool:
        return self._node is not None

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        Tensor.requires_grad.fset(self, wanted)  # type: ignore[attr-defined]
        if self._node is not None:
            self._node.owner = weakref.ref(self)

    def deposit(self, block: Block) -> None:
        """Add a settled gradient, whose block is nobody else's, to `grad`."""
        if self._node is not None:
            self._node.deposit(block)

    def __repr__(self) -> str:
        return f"Parameter({self.name!r}, shape={self.shape}, dtype={self.dtype}, layout={self.layout!r})"


def settle(parameters: Sequence[Parameter]) -> None:
    """Sum gradients that `no_sync` left partial, in the order of the parameters.  Collective.

    For parameters that no later backward pass reaches; `backward()` settles all those it reaches.
    """
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.layout.partial:
            parameter.grad = parameter.grad.summed()
