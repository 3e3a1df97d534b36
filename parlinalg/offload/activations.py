"""What blocks of a model keep for the backward pass, put away meanwhile.

When a block's forward pass is done, the arrays that its rules hold are taken out of them and written; when the walk
back comes to a value, its arrays are there again, read ahead in the order of the walk: last in, first out (Rhu et al.,
"vDNN: virtualized deep neural networks", 2016).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex

import numpy as np

from parlinalg.autograd import Parameter, Tensor
from parlinalg.autograd.tape import Node, reachable
from parlinalg.errors import ConfigError, OffloadError
from parlinalg.nn import Module
from parlinalg.offload.agreement import agree, number, worlds
from parlinalg.offload.extents import DiskStore, HostStore, Store
from parlinalg.offload.packing import Packer
from parlinalg.offload.states import bytes_of

Block = Any


class OffloadedActivations:
    """Has what modules keep for the backward pass rest on a disk, or in host memory beside a GPU.

    Parameters
    ----------
    path : str or Path, optional
        The folder of the files, one a rank.  None: host memory, for a grid whose blocks live on a GPU.
    least : int or str
        Arrays of fewer bytes stay.
    pending, ahead : int or str
        Bytes at most that wait to be written, and that are read ahead of the walk.
    name : str
        What the files' names begin with.

    Values come back bit for bit.  A module that is recomputed keeps only its inputs; these are put away.
    """

    def __init__(
        self, path: str | Path | None, *, least: SupportsIndex | str = "64KiB", pending: SupportsIndex | str = "64MiB",
        ahead: SupportsIndex | str = "64MiB", name: str = "activations",
    ) -> None:  # fmt: skip
        self.path = None if path is None else Path(path)
        self.name = name
        self.least = bytes_of("least", least)
        self.pending, self.ahead = bytes_of("pending", pending), bytes_of("ahead", ahead)
        self.modules: list[Module] = []
        self._store: Store | None = None
        self._packer: Packer | None = None
        self._line: list[weakref.ref[Kept]] = []
        self._end: weakref.finalize[Any, Any] | None = None

    def place(self, modules: Iterable[Module]) -> None:
        """Put away what these modules keep, from the next forward pass on: the blocks of a model.  Collective.

        Raises
        ------
        OffloadError
            On all ranks, if the folder cannot be written.
        """
        self.modules = list(modules)
        parameters = [p for m in self.modules for p in m.parameters()]
        if not parameters or self._store is not None:
            raise ConfigError("offloaded activations are placed once, for modules that have parameters")
        grid = parameters[0].grid
        cpu = grid.backend.xp is np
        if self.path is None and cpu:
            raise ConfigError("activations already are in host memory; give path=, a folder on a disk")
        comms = worlds(p.grid for p in parameters)
        problem: OffloadError | None = None
        try:
            if self.path is None:
                self._store = HostStore(grid.backend)
            else:
                self._store = DiskStore(self.path / f"{self.name}.{number(comms)}.extents", self.pending)
        except OffloadError as error:
            problem = error
        agree(comms, problem, f"making {self.path}")
        assert self._store is not None
        self._packer = Packer(self._store, grid.backend, self.least)
        self._end = weakref.finalize(self, self._store.close)
        for module in self.modules:
            module.around = self._around

    def _around(self, call: Callable[..., Any], module: Module, *args: Any, **kwargs: Any) -> Any:
        parameters = list(module.parameters())
        since = Node(parameters[0].data).age
        result = call(*args, **kwargs)
        results = result if isinstance(result, tuple) else (result,)
        nodes: dict[int, Node] = {}
        for each in results:
            if isinstance(each, Tensor) and each.node is not None:
                nodes.update((n.age, n) for n in reachable(each.node, since) if n.age > since)
        self._put_away([nodes[age] for age in sorted(nodes)], parameters)
        return result

    def _put_away(self, nodes: list[Node], parameters: list[Parameter]) -> None:
        packer = self._packer
        if packer is None:
            return
        packer.kept = {id(_memory(p.block)) for p in parameters if not p.data.RESTS}
        self._line = [k for k in self._line if k() is not None]
        for node in nodes:
            cells: list[Any] = []
            met: set[int] = set()
            parts = [packer.rule(p, cells, met) for p in node.parts or ()]
            prepare, again = packer.rule(node.prepare, cells, met), packer.rule(node.again, cells, met)
            if cells:
                kept = Kept(self, packer, cells)
                self._line.append(weakref.ref(kept))
                node.parts = tuple(kept.first(p) for p in parts)
                node.prepare = None if prepare is None else kept.first(prepare)
                node.again = None if again is None else kept.first(again)

    def come(self, kept: Kept) -> None:
        """The walk has come to a value: what it and those before it hold is read."""
        while self._line:
            last = self._line[-1]()
            if last is not None and last is not kept:
                break
            self._line.pop()
            if last is kept:
                break
        total = 0
        for reference in reversed(self._line):
            before = reference()
            if before is not None:
                total += before.soon()
            if total > self.ahead:
                break

    def close(self) -> None:
        """Let modules keep everything in memory again, and take the files away."""
        for module in self.modules:
            module.around = None
        self.modules = []
        if self._end is not None:
            self._end()
        self._store = self._packer = self._end = None

    def __enter__(self) -> OffloadedActivations:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Kept:
    """The cells of a value's rules in which arrays are missing."""

    def __init__(self, owner: OffloadedActivations, packer: Packer, cells: list[Any]) -> None:
        self.owner, self.packer, self.cells = owner, packer, cells

    def first(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """The rule, which first has its arrays brought back."""

        def ready(*args: Any) -> Any:
            self.back()
            return rule(*args)

        return ready

    def soon(self) -> int:
        """Begin to read; returns the bytes."""
        away = {id(a): a for cell in self.cells for a in self.packer.held(cell.cell_contents)}
        for each in away.values():
            self.packer.store.soon(each)
        return sum(a.nbytes for a in away.values())

    def back(self) -> None:
        """Put all arrays back."""
        if self.cells:
            self.owner.come(self)
            cells, self.cells = self.cells, []
            for cell in cells:
                cell.cell_contents = self.packer.back(cell.cell_contents)


def _memory(array: Block) -> Block:
    """The array whose memory a view is of."""
    while getattr(array, "base", None) is not None and isinstance(array.base, type(array)):
        array = array.base
    return array
