"""What blocks of a model keep for the backward pass, put away meanwhile.

When a block's forward pass is done, the arrays that its rules hold are taken out of them and written; when the walk
back comes to a value, its arrays are there again, read ahead in the order of the walk: last in, first out (Rhu et al.,
"vDNN: virtualized deep neural networks", 2016).  In a pipeline several microbatches are under way: each has an order of
its own, and what only gradients of parameters need stays away until these are computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex

import numpy as np

from parlinalg.autograd import Parameter, Tensor
from parlinalg.autograd.tape import Node, reachable, walking
from parlinalg.backend import Backend
from parlinalg.errors import ConfigError, OffloadError
from parlinalg.nn import Module
from parlinalg.nn.steps import Draws, current
from parlinalg.offload.agreement import agree, number, worlds
from parlinalg.offload.extents import DiskStore, HostStore, Store
from parlinalg.offload.packing import Packer
from parlinalg.offload.states import bytes_of

Block = Any
Line = list["weakref.ref[Kept]"]


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
        self._lines: dict[int, Line] = {}
        self._draws: Draws | None = None
        self._passes = 0
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
        comms = worlds(p.grid for p in parameters)
        problem: OffloadError | None = None
        try:
            self._store = self._open(grid.backend, number(comms))
        except OffloadError as error:
            problem = error
        agree(comms, problem, f"making {self.path}")
        assert self._store is not None
        self._packer = Packer(self._store, grid.backend, self.least)
        self._end = weakref.finalize(self, self._store.close)
        for module in self.modules:
            module.around = self._around

    def _open(self, backend: Backend, number: int) -> Store:
        """What this process, of that number, puts arrays into."""
        if self.path is not None:
            return DiskStore(self.path / f"{self.name}.{number}.extents", self.pending)
        if backend.xp is np:
            raise ConfigError("activations already are in host memory; give path=, a folder on a disk")
        return HostStore(backend)

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
        line = self._line()
        for node in nodes:
            kept = Kept(self, packer, line)
            pairs = zip(node.parts or (), node.sources, strict=False)
            parts = tuple(kept.taken(part, weights=source.owner is not None) for part, source in pairs)
            prepare, again = kept.taken(node.prepare), kept.taken(node.again)
            if kept.cells:
                line.append(weakref.ref(kept))
                node.parts, node.prepare, node.again = parts, prepare, again

    def _line(self) -> Line:
        """The order of the forward pass under way: of each stage and microbatch, as these have walks of their own."""
        draws = current()
        if draws is not self._draws and self._packer is not None:
            self._draws = draws
            self._passes += 1
            self._packer.forget()
            self._lines = {k: line for k, line in self._lines.items() if any(each() is not None for each in line)}
        line = self._lines.setdefault(self._passes, [])
        line[:] = [each for each in line if each() is not None]
        return line

    def come(self, kept: Kept) -> None:
        """The walk has come to a value: what it needs of those before it in its line is read ahead."""
        line, walk = kept.line, walking()
        later = walk is not None and walk.later
        at = next((i for i in reversed(range(len(line))) if line[i]() is kept), None)
        if at is None:  # it was come to before
            return
        if not later or not kept.weights:
            del line[at]
        total = 0
        for reference in reversed(line[:at]):
            before = reference()
            if before is not None:
                total += before.soon(later)
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
    """What is missing of a value's rules.

    Attributes
    ----------
    line : list of weak references to Kept
        The values of its microbatch with something missing, in the order of their creation.
    walked, weights : list
        The cells in which arrays are missing: of what every walk needs, and of the parts for gradients of parameters.
    """

    def __init__(self, owner: OffloadedActivations, packer: Packer, line: Line) -> None:
        self.owner, self.packer, self.line = owner, packer, line
        self.walked: list[Any] = []
        self.weights: list[Any] = []

    @property
    def cells(self) -> list[Any]:
        """All of them."""
        return [*self.walked, *self.weights]

    def taken(self, rule: Callable[..., Any] | None, *, weights: bool = False) -> Any:
        """The rule without its arrays, which it first brings back: its own, since parts may run long after others."""
        cells: list[Any] = []
        bare = self.packer.rule(rule, cells, set())
        if not cells:
            return bare
        kind = self.weights if weights else self.walked
        kind += cells

        def ready(*args: Any) -> Any:
            self.owner.come(self)
            for cell in cells:
                cell.cell_contents = self.packer.back(cell.cell_contents)
            return bare(*args)

        return ready

    def soon(self, later: bool) -> int:
        """Begin to read, without what the gradients of parameters need if those are for `later`; returns the bytes."""
        cells = self.walked if later else self.cells
        away = {id(a): a for cell in cells for a in self.packer.held(cell.cell_contents)}
        return sum(map(self.packer.soon, away.values()))


def _memory(array: Block) -> Block:
    """The array whose memory a view is of."""
    while getattr(array, "base", None) is not None and isinstance(array.base, type(array)):
        array = array.base
    return array
