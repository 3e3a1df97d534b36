"""Parameters and their gradients, or these alone, that rest on a disk, or in host memory beside a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, SupportsIndex

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import Parameter
from parlinalg.autograd.gradients import most_bytes
from parlinalg.autograd.tape import Node, Reducer
from parlinalg.comm.together import together
from parlinalg.errors import ConfigError, OffloadError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.nn import Module
from parlinalg.nn.init import Declared
from parlinalg.offload.agreement import agree, number, worlds
from parlinalg.offload.resting import DiskHome, HostHome, Resting, room
from parlinalg.offload.states import bytes_of
from parlinalg.parallel import DataParallel, GradientReducer, SequenceParallel


class OffloadedParameters:
    """Has a model's parameters rest elsewhere; each product maps or copies the one it needs, and lets it go after.

    The parameters keep their place in the model: modules, optimizers, `state_dict` see arrays as before.  On a disk
    values, and with `gradients` settled gradients too, lie in one file a rank, of which windows are mapped as they are
    used; the next one is read ahead.  From host memory beside a GPU each is copied when it is used.  Offloaded
    gradients are settled one by one, without their reducer, which is detached; one that does more than sum whole
    gradients (ZeRO, shared parameters, 16 bits) keeps them.

    Parameters
    ----------
    path : str or Path, optional
        The folder of the files.  None: host memory, for a grid whose blocks live on a GPU.
    least : int or str
        Parameters whose blocks have fewer bytes stay where they are.
    gradients : bool
        Whether gradients rest there too.
    values : bool
        Whether values do; without, their gradients alone.
    name : str
        What the files' names begin with.

    Sharded parameters (ZeRO 1 and 2) stay too: their owner keeps them in buckets.
    """

    def __init__(
        self, path: str | Path | None, *, least: SupportsIndex | str = "64KiB", gradients: bool = True,
        values: bool = True, name: str = "values",
    ) -> None:  # fmt: skip
        if not values and not gradients:
            raise ConfigError("OffloadedParameters of neither values nor gradients: give values=True or gradients=True")
        self.path = None if path is None else Path(path)
        self.least = bytes_of("least", least)
        self.gradients, self.values, self.name = gradients, values, name
        self.parameters: list[Parameter] = []
        self._home: DiskHome | HostHome | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._at = 0

    def initialize(self, model: Module, seed: int = 0) -> Any:
        """Make a model's parameters where they will rest, one at a time: `model.initialize(seed)` for a model that does
        not fit in memory.  Collective.  Returns the model.

        Raises
        ------
        OffloadError
            On all ranks, if the folder cannot be written or the disk is too small on any.
        """
        if not self.values:
            model.initialize(seed)
            self.place(model.parameters())
            return model
        declared = [
            d for m in model.modules() for d in m._parameters.values() if isinstance(d, Declared) and not d.buffer
        ]
        self._open([d.grid for d in declared], [d.nbytes for d in declared if self._large(d)])

        problems: list[OffloadError] = []

        def made(declared: Declared, name: str) -> DistArray:
            value = declared.make(seed, name)
            if self._large(declared) and not problems:
                try:
                    return self._rest(value)
                except OffloadError as error:
                    problems.append(error)
            return value

        model.initialize(seed, values=made)
        agree(worlds(d.grid for d in declared), problems[0] if problems else None, f"writing to {self.path}")
        self._adopt(model.parameters())
        return model

    def place(self, parameters: Iterable[Parameter]) -> None:
        """Move parameters, before their optimizer's first step.  Collective.

        Raises
        ------
        OffloadError
            On all ranks, if the folder cannot be written or the disk is too small.
        ConfigError
            On all ranks, if ZeRO holds what would be moved.
        """
        parameters = list(parameters)
        chosen = [p for p in parameters if p.shard is None and self._large(p)]
        reducers = list({id(p.reducer): p.reducer for p in chosen if p.reducer is not None}.values())
        alone = all(map(replaceable, reducers))
        if not self.values and not (alone and (chosen or not any(p.shard is not None for p in parameters))):
            raise ConfigError(
                "gradients that a reducer shares out (ZeRO), sums for shared parameters or sends in 16 bits stay in "
                "its buckets: by themselves they are offloaded with plain data parallelism; ZeRO's stage 2 shares them"
            )
        if not chosen and any(p.shard is not None and self._large(p) for p in parameters):
            raise ConfigError(
                "ZeRO's stages 1 and 2 keep the values in buckets that are gathered whole: parameters are offloaded "
                "with zero=dict(stage=0), or with stage=3, which cuts them"
            )
        self.gradients = self.gradients and alone
        for reducer in reducers if self.gradients else ():
            reducer.detach()  # type: ignore[attr-defined]
        self._open([p.grid for p in parameters], [int(p.block.nbytes) for p in chosen])
        moved: list[DistArray] = []
        together(
            worlds(p.grid for p in parameters), lambda: moved.extend(self._rest(p.data) for p in chosen if self.values),
            f"writing to {self.path}", (OffloadError,),
        )  # fmt: skip
        for p, data in zip(chosen if self.values else (), moved, strict=True):
            p.data = data
        self._adopt(chosen)

    def _large(self, p: Parameter | Declared) -> bool:
        """Whether a parameter goes: the same on all ranks, by the largest block of any."""
        return most_bytes(p.layout, p.shape, p.grid.sizes, p.dtype.itemsize) >= self.least

    def _open(self, grids: list[Grid], sizes: list[int]) -> None:
        if self._home is not None or not grids:
            raise ConfigError("OffloadedParameters are placed once, of a model that has parameters; make another one")
        cpu = all(g.backend.host_memory for g in grids)
        if self.path is None and cpu:
            raise ConfigError("parameters already are in host memory; give path=, a folder on a disk")
        comms = worlds(grids)
        problem: OffloadError | None = None
        nbytes = sum(map(room, sizes)) * (self.values + self.gradients)
        try:
            if self.path is None:
                self._home = HostHome(nbytes, grids[0].backend)
            else:
                self._home = DiskHome(self.path / f"{self.name}.{number(comms)}.window", nbytes)
                self._end = weakref.finalize(self, self._home.close)
        except OffloadError as error:
            problem = error
        agree(comms, problem, f"making {self.path}")

    def _rest(self, value: DistArray) -> DistArray:
        """The value, moved to its place."""
        assert self._home is not None
        made = self._new(value.dtype, value.shape, value.layout, value.grid)
        made.put(value.block.reshape(-1))
        return made

    def _new(self, dtype: np.dtype[Any], shape: tuple[int, ...], layout: Layout, grid: Grid) -> Resting:
        assert self._home is not None
        made = Resting(self._home, self._at, dtype, shape, layout, grid)
        self._at += room(made.nbytes_here)
        return made

    def _adopt(self, parameters: Iterable[Parameter]) -> None:
        self.parameters = [p for p in parameters if isinstance(p.data, Resting) or not self.values]
        for p in self.parameters:
            if self.gradients and p.node is not None:
                place = self._new(p.dtype, p.shape, p.layout, p.grid)
                p._node = RestingNode(p.node, place)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank that rest elsewhere."""
        return self._at

    def close(self) -> None:
        """Bring values and gradients back into memory, and take the files away."""
        for p in self.parameters:
            data, node = p.data, p.node
            if isinstance(data, Resting):
                p.data = DistArray(data.block.copy(), p.shape, p.layout, p.grid)
            if isinstance(node, RestingNode):
                p._node = node.back()
        self.discard()

    def discard(self) -> None:
        """Take the files away; the parameters are not used any more."""
        self.parameters = []
        if self._end is not None:
            self._end()
        self._home = self._end = None

    def __enter__(self) -> OffloadedParameters:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def replaceable(reducer: Reducer | None) -> bool:
    """Whether gradients come out the same when they are settled one by one: without ZeRO and the like."""
    if reducer is None:
        return True
    simple = isinstance(reducer, GradientReducer) and reducer.dtype is None
    return simple and all(isinstance(h, DataParallel | SequenceParallel) for h in reducer.handlers)  # type: ignore


class RestingNode(Node):
    """The place on the tape of a parameter whose gradient rests elsewhere."""

    __slots__ = ("_held", "_place")

    def __init__(self, node: Node, place: Resting) -> None:
        for name in Node.__slots__:
            if name != "grad":
                setattr(self, name, getattr(node, name))
        self._place = place
        self._held: Resting | None = None
        self.grad = node.grad

    @property
    def grad(self) -> DistArray | None:
        """The gradient of the leaf."""
        return self._held

    @grad.setter
    def grad(self, value: DistArray | None) -> None:
        owner = self.owner() if self.owner is not None else None
        if owner is not None and (owner.reducer is not None or owner.shard is not None):
            raise ConfigError(
                f"the gradient of {owner.name!r} is offloaded, and is settled by itself: let no reducer have it "
                "(reducer.detach()), or do not offload gradients"
            )
        if value is None or isinstance(value, Resting):
            self._held = value
            return
        place = self._place
        self._held = Resting(place.home, place.at, place.dtype, value.shape, value.layout, value.grid)
        self._held.put(value.block.reshape(-1))

    def back(self) -> Node:
        """A node whose gradient is in memory."""
        node = Node.__new__(Node)
        for name in Node.__slots__:
            if name != "grad":
                setattr(node, name, getattr(self, name))
        held = self._held
        node.grad = None if held is None else held.like(held.block.copy())
        return node
