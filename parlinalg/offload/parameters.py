"""Parameters and their gradients, or these alone, that rest on a disk, or in host memory beside a GPU."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import Parameter, ParameterStorage, StorageBytes
from parlinalg.comm.together import together
from parlinalg.errors import ConfigError, OffloadError
from parlinalg.grid import Grid, worlds
from parlinalg.layout import Layout
from parlinalg.nn import Module
from parlinalg.nn.init import Declared
from parlinalg.offload.arrays import DiskHome, HostHome, OffloadedArray, room
from parlinalg.offload.disk import Closing, process_number, raise_together
from parlinalg.offload.states import bytes_of
from parlinalg.parallel.buckets import largest
from parlinalg.parallel.reducer import replaceable
from parlinalg.units import format_bytes

Block = Any
LEAST = "64KiB"
"""The bytes of the blocks of a parameter that is offloaded, at least."""


class OffloadedParameters(Closing):
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
        self, path: str | Path | None, *, least: SupportsIndex | str = LEAST, gradients: bool = True,
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
        raise_together(worlds(d.grid for d in declared), problems[0] if problems else None, f"writing to {self.path}")
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
        chosen = [p for p in parameters if p.storage.owner is None and self._large(p)]
        reducers = list({id(p.reducer): p.reducer for p in chosen if p.reducer is not None}.values())
        alone = all(map(replaceable, reducers))
        if not self.values and not (alone and (chosen or not any(p.storage.owner is not None for p in parameters))):
            raise ConfigError(
                "gradients that a reducer shares out (ZeRO), sums for shared parameters or sends in 16 bits stay in "
                "its buckets, and cannot be offloaded by themselves: leave offload.gradients out, or take zero stage "
                "0, parameters that each stage has for itself (tie_word_embeddings=False), gradients in their own dtype"
            )
        cut = [largest(p) for p in parameters if p.storage.gatherer is not None and p.storage.owner is None]
        if not chosen and cut:
            raise ConfigError(
                f"ZeRO's stage 3 leaves each rank at most {format_bytes(max(cut))} of a parameter, and what has fewer "
                f"than {format_bytes(self.least)} stays in memory, so that no parameter would be offloaded: leave "
                "offload.parameters out, take zero stage 0, which keeps parameters whole, or fewer data parallel ranks"
            )
        if not chosen and any(p.storage.owner is not None and self._large(p) for p in parameters):
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
        """Return True if a parameter is large enough: the same on all ranks, by the largest block of any."""
        return largest(p) >= self.least

    def _open(self, grids: list[Grid], sizes: list[int]) -> None:
        if self._home is not None or not grids:
            raise ConfigError("OffloadedParameters are placed once, of a model that has parameters; make another one")
        cpu = all(g.backend.host_memory for g in grids)
        if self.path is None and cpu:
            raise ConfigError("parameters already are in host memory; give path=, a folder on a disk")
        comms = worlds(grids)
        number = None if self.path is None else process_number(comms)
        nbytes = sum(map(room, sizes)) * (self.values + self.gradients)

        def make() -> None:
            if self.path is None:
                self._home = HostHome(nbytes, grids[0].backend)
            else:
                self._home = DiskHome(self.path / f"{self.name}.{number}.window", nbytes)
                self._end = weakref.finalize(self, self._home.close)

        together(comms, make, f"making {self.path}", (OffloadError,))

    def _rest(self, value: DistArray) -> DistArray:
        """Return the value, moved to its place."""
        assert self._home is not None
        made = self._new(value.dtype, value.shape, value.layout, value.grid)
        made.put(value.block.reshape(-1))
        return made

    def _new(self, dtype: np.dtype[Any], shape: tuple[int, ...], layout: Layout, grid: Grid) -> OffloadedArray:
        assert self._home is not None
        made = OffloadedArray(self._home, self._at, dtype, shape, layout, grid)
        self._at += room(made.nbytes_here)
        return made

    def _adopt(self, parameters: Iterable[Parameter]) -> None:
        self.parameters = [p for p in parameters if p.data.resident is None or not self.values]
        for p in self.parameters:
            if self.gradients and p.requires_grad:
                p.storage = OffloadedStorage(p, self._new(p.dtype, p.shape, p.layout, p.grid))

    @property
    def nbytes(self) -> int:
        """The bytes of this rank that are offloaded."""
        return self._at

    def close(self) -> None:
        """Bring values and gradients back into memory, and take the files away."""
        for p in self.parameters:
            if p.data.resident is None:
                p.data = p.data.like(p.block.copy())
            if isinstance(p.storage, OffloadedStorage):
                p.storage = p.storage.back()
        self.discard()

    def discard(self) -> None:
        """Take the files away; the parameters are not used any more."""
        self.parameters = []
        if self._end is not None:
            self._end()
        self._home = self._end = None


class OffloadedStorage(ParameterStorage):
    """The storage of a parameter whose gradient lies in a file or host memory, where it is settled by itself.

    Parameters
    ----------
    parameter : Parameter
    place : OffloadedArray
        Where the gradient is to lie.
    """

    __slots__ = ("_grad", "parameter", "place")

    def __init__(self, parameter: Parameter, place: OffloadedArray) -> None:
        self.parameter, self.place = weakref.ref(parameter), place
        super().__init__(parameter.storage)

    @property
    def grad(self) -> DistArray | None:
        """The gradient, in its place."""
        return self._grad

    @grad.setter
    def grad(self, value: DistArray | None) -> None:
        owner = self.parameter()
        if owner is not None and (owner.reducer is not None or owner.storage.owner is not None):
            raise ConfigError(
                f"the gradient of {owner.name!r} is offloaded, and is settled by itself: let no reducer have it "
                "(reducer.detach()), or do not offload gradients"
            )
        self._grad: OffloadedArray | None = None
        if value is not None:
            place = self.place
            self._grad = OffloadedArray(place.home, place.at, place.dtype, value.shape, value.layout, value.grid)
            self._grad.put(value.block.reshape(-1))

    def changed(self, settled: Block) -> None:
        if self._grad is not None:
            self._grad.put(settled.reshape(-1))

    def nbytes(self, data: DistArray) -> StorageBytes:
        whole = super().nbytes(data)
        return whole._replace(offloaded=whole.offloaded + whole.gradient)

    def back(self) -> ParameterStorage:
        """Return a storage that has the gradient in memory."""
        storage, held = ParameterStorage(self), self._grad
        storage.grad = None if held is None else held.like(held.block.copy())
        return storage
