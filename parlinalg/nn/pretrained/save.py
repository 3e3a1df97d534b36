"""Parameters to files that `transformers` reads, one parameter at a time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from parlinalg.array.create import dtype_named
from parlinalg.autograd import Parameter
from parlinalg.comm import Comm
from parlinalg.comm.together import together
from parlinalg.errors import ConfigError
from parlinalg.nn.pretrained.architecture import Architecture, Arguments, Place
from parlinalg.nn.pretrained.tensorfile import Writer

Shape = tuple[int, ...]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def save(
    folder: Path, parameters: Mapping[str, Parameter], architecture: Architecture, arguments: Arguments,
    settings: Mapping[str, Any], most: int, comm: Comm,
) -> None:  # fmt: skip
    """Write the parameters and the settings on rank 0, which holds one parameter at a time.  Collective.

    A parameter that ranks of several grids hold, as those of a pipeline's stages, is written as the first of them has
    it.

    Parameters
    ----------
    folder : Path
    parameters : dict of str to Parameter
        Those that this rank has blocks of.
    architecture : Architecture
    arguments : dict
        The model's.
    settings : dict
        What its `config.json` says of it.
    most : int
        Bytes of tensors in one file.
    comm : Comm
        All ranks of all parameters' grids.

    Raises
    ------
    ConfigError
        On all ranks, if rank 0 cannot write; then no file has changed.
    """
    table = architecture.table(arguments)
    held = _held(parameters, comm)
    if lacking := [name for name in table if name not in held]:
        raise ConfigError(f"no rank holds {', '.join(lacking)}: all ranks of a model's grids take part in saving it")
    dtypes = {place.tensor: dtype_named(held[name][1]) for name, places in table.items() for place in places}
    config = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "dtype": next(iter(dtypes.values())).name,
        **settings,
    }
    files = _Files(folder, table, dtypes, most)

    def on_root(step: Callable[[], None]) -> None:
        together(comm, step if comm.rank == 0 else lambda: None, f"saving to {folder}")

    try:
        on_root(lambda: folder.mkdir(parents=True, exist_ok=True))
        for name, places in table.items():
            values = _gathered(name, parameters, held[name], comm)
            on_root(lambda places=places, values=values: files.write(places, values))  # type: ignore[misc]
        on_root(lambda: files.finish(config))
    finally:
        files.discard()


def _held(parameters: Mapping[str, Parameter], comm: Comm) -> dict[str, tuple[int, str, Shape]]:
    """Return for each parameter its first rank in the first grid of `comm` that holds it, its dtype and shape."""
    places = {world_rank: rank for rank, world_rank in enumerate(comm.world_ranks)}
    mine = [[name, places[p.grid.world.world_ranks[0]], p.dtype.name, p.shape] for name, p in parameters.items()]
    found: dict[str, tuple[int, str, Shape]] = {}
    for theirs in comm.share(mine, others="by rank"):
        for name, first, dtype, shape in theirs:
            if name not in found or first < found[name][0]:
                found[name] = first, dtype, tuple(shape)
    return found


def _gathered(name: str, parameters: Mapping[str, Parameter], held: tuple[int, str, Shape], comm: Comm) -> Any:
    """Return the whole parameter on rank 0 of `comm`, None elsewhere."""
    first, dtype, shape = held
    p, values = parameters.get(name), None
    if p is not None and p.grid.world.world_ranks[0] == comm.world_ranks[first]:
        values = p.data.gather(root=0)
    if first == 0:
        return values
    if comm.rank == first:
        comm.send(np.ascontiguousarray(values), 0)
    if comm.rank != 0:
        return None
    values = np.empty(shape, dtype_named(dtype))
    comm.receive(values, first)
    return values


class _Files:
    """The files of a folder, written aside in the order of the table."""

    def __init__(
        self, folder: Path, table: Mapping[str, list[Place]], dtypes: Mapping[str, np.dtype[Any]], most: int
    ) -> None:
        self.folder, self.dtypes = folder, dtypes
        self.shapes = {p.tensor: p.shape for places in table.values() for p in places}
        self.sizes = {name: math.prod(shape) * dtypes[name].itemsize for name, shape in self.shapes.items()}
        self.files = named(shards(self.sizes, most))
        self._left = list(self.files)
        self._writers: list[Writer] = []

    def write(self, places: list[Place], parameter: np.ndarray) -> None:
        """Write the tensors of the next parameter."""
        for place in places:
            if not self._writers or not self._writers[-1].left:
                self._close()
                name = self._left.pop(0)
                shapes = {tensor: self.shapes[tensor] for tensor in self.files[name]}
                self._writers.append(Writer(self.folder / name, shapes, self.dtypes))
            self._writers[-1].write(place.tensor, place.stored(parameter))

    def finish(self, config: Mapping[str, Any]) -> None:
        """Give all files their names; of the two forms, one file or several with an index, the other one goes."""
        self._close()
        for writer in self._writers:
            writer.appear()
        self._writers.clear()
        if len(self.files) > 1:
            weight_map = {tensor: name for name, tensors in self.files.items() for tensor in tensors}
            _replace(
                self.folder / INDEX, {"metadata": {"total_size": sum(self.sizes.values())}, "weight_map": weight_map}
            )
        (self.folder / (WEIGHTS if len(self.files) > 1 else INDEX)).unlink(missing_ok=True)
        _replace(self.folder / "config.json", config)

    def _close(self) -> None:
        if self._writers:
            self._writers[-1].close()

    def discard(self) -> None:
        """Forget what has no name yet."""
        for writer in self._writers:
            writer.discard()


def shards(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Return the tensors of each file: as many as fit into `most` bytes, and one at least.

    >>> shards({"a": 3, "b": 3, "c": 9, "d": 1}, 6)
    [['a', 'b'], ['c'], ['d']]
    """
    files: list[list[str]] = [[]]
    held = 0
    for name, size in sizes.items():
        if files[-1] and held + size > most:
            files.append([])
            held = 0
        files[-1].append(name)
        held += size
    return files


def named(files: list[list[str]]) -> dict[str, list[str]]:
    """Return the same under the names of the files."""
    if len(files) == 1:
        return {WEIGHTS: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": tensors for i, tensors in enumerate(files, 1)}


def _replace(path: Path, values: Mapping[str, Any]) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(values, indent=2) + "\n", "utf-8")
    aside.replace(path)
