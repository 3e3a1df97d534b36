"""Pipelines from lists of layers, from data, from pretrained weights, and from stages that users build by hand."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol
from weakref import ReferenceType, ref

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.array.create import dtype_named
from parlinalg.comm.together import together
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.nn.containers import Sequential
from parlinalg.nn.layer import Layer
from parlinalg.nn.module import Module
from parlinalg.nn.pretrained import Pretrained
from parlinalg.pipeline import registry
from parlinalg.pipeline.model import (
    ParameterInfo,
    PipelineModel,
    inventory_of,
    listed_layers,
    model_grid,
    split,
)
from parlinalg.pipeline.partition import Partition
from parlinalg.pipeline.schedule import Schedule
from parlinalg.pipeline.schedules import make_schedule
from parlinalg.pipeline.topology import PipelineTopology
from parlinalg.schemes import Scheme


class MeshLike(Protocol):
    """A mesh on which a pipeline is built, such as `parlinalg.launch` returns."""

    grid: Grid
    scheme: Scheme
    topology: PipelineTopology
    schedule: Schedule | None


def build_pipeline_model(
    model: Module, num_chunks: int = 1, *, mesh: MeshLike | None = None, partition: Partition | None = None,
    sample: Any = None, schedule: Schedule | None = None, seed: int | None = None,
) -> PipelineModel:  # fmt: skip
    """Cut a model into stages, and keep this rank's.  Collective.

    Parameters
    ----------
    model : Module
        A Sequential, or another that lists its layers.
    num_chunks : int
        The stages that a pipeline rank holds.
    mesh : Mesh, optional
        By default that of the model's grid.
    partition : optional
        As in `split`; by default as the mesh's configuration says.
    sample : optional
        As in `split`.
    schedule : Schedule, optional
        Says which rank holds which stage; by default the mesh's, or where that has other chunks, 1F1B or interleaved.
    seed : int, optional
        With it the values are made.

    Raises
    ------
    ConfigError
        If the model cannot be cut so; see `split`.
    """
    if not isinstance(model, Module):
        raise ConfigError(
            f"build_pipeline_model takes a model, such as nn.Sequential(*layers), not {type(model).__name__}; "
            "build_pipeline_model_from_cfg takes one as data"
        )
    mesh = _mesh(getattr(model_grid(model), "mesh", None) if mesh is None else mesh)
    if partition is None:
        partition = getattr(getattr(mesh, "parallel", None), "partition", "uniform")
    made = split(model, mesh.topology, _schedule(mesh, num_chunks, schedule), partition, sample)
    return made if seed is None else made.initialize(seed)


def build_pipeline_model_from_cfg(
    cfg: Mapping[str, Any] | Sequence[Any], num_chunks: int = 1, *, mesh: MeshLike | None = None,
    partition: Partition | None = None, sample: Any = None, schedule: Schedule | None = None, seed: int | None = None,
    dtype: Any = None,
) -> PipelineModel:  # fmt: skip
    """Build a model that is given as data, cut it into stages, and keep this rank's.  Collective.

    Parameters
    ----------
    cfg : list of dict, or dict
        The layers: dicts with a `type` of `parlinalg.pipeline.registry` and its arguments; or a dict with `layers`, and
        maybe `partition` and `dtype`.  Linear layers without a `kind` go alternately into a block and out of it.
    num_chunks, partition, sample, schedule, seed
        As in `build_pipeline_model`.
    mesh : Mesh, optional
        Its grid and scheme are those of the layers; by default the one that `parlinalg.launch` made, if one is open.
    dtype : dtype, optional
        By default as the mesh's configuration says.

    Raises
    ------
    ConfigError
        If a type or an argument is unknown, or the model cannot be cut.
    """
    mesh = _mesh(mesh)
    options: dict[str, Any] = {"layers": cfg}
    if isinstance(cfg, Mapping):
        unknown = [key for key in cfg if key not in ("layers", "partition", "dtype")]
        if unknown or "layers" not in cfg:
            raise ConfigError(
                f"a model as data is a list of layers, or a dict with layers=[…] and maybe partition and dtype; not "
                f"one with the keys {', '.join(map(repr, cfg))}"
            )
        options = dict(cfg)
    config = getattr(mesh, "config", None)
    dtype = dtype or options.get("dtype") or getattr(config, "model_dtype", None)
    model = together(
        mesh.topology.world,
        lambda: sequential_from_cfg(options["layers"], mesh.scheme, mesh.grid, dtype),
        "building the model",
    )
    partition = options.get("partition") if partition is None else partition
    return build_pipeline_model(
        model, num_chunks, mesh=mesh, partition=partition, sample=sample, schedule=schedule, seed=seed
    )  # fmt: skip


def sequential_from_cfg(layers: Sequence[Any], scheme: Scheme, grid: Grid, dtype: Any = None) -> Sequential:
    """Return a declared Sequential of the layers that are given as data.

    Linear layers without a `kind` go alternately into a block and out of it, as those of `nn.MLP`.
    """
    if not isinstance(layers, list | tuple) or not layers:
        raise ConfigError(f"layers is a list of dicts, such as [dict(type='Linear', …), …], not {layers!r}")
    try:
        made_dtype = dtype_named(dtype) if isinstance(dtype, str) else dtype
    except TypeError as error:
        raise ConfigError(f"dtype must be such as 'float32' or 'float64', not {dtype!r}") from error
    place = {"scheme": scheme, "grid": grid, "dtype": made_dtype}
    made, inward = [], True
    for i, given in enumerate(layers):
        if isinstance(given, Mapping) and given.get("type") == "Linear":
            given = {"kind": "expand" if inward else "contract", **given}
            inward = given["kind"] != "expand"
        made.append(registry.build_layer(given, place, f"layers[{i}]"))
    model = Sequential(*made)
    model.grid, model.scheme = grid, scheme
    return model


def build_by_hand(
    chunks: Module | Iterable[Module], *, mesh: MeshLike | None = None, schedule: Schedule | None = None,
    seed: int | None = None,
) -> PipelineModel:  # fmt: skip
    """Build a pipeline of stages that users make themselves, each rank those that `mesh.rank("pipeline")` is to hold.

    Collective.  Parameters are named by the number of their stage, as in a Sequential of the stages: "0.weight".

    Parameters
    ----------
    chunks : Module or iterable of Module
        In the order of `schedule.chunks[mesh.rank("pipeline")]`.
    mesh : Mesh, optional
        By default the one that `parlinalg.launch` made, if one is open.
    schedule, seed
        As in `build_pipeline_model`.

    Raises
    ------
    ConfigError
        On all ranks, if on any there are not as many as the schedule gives it.
    """
    given: list[Any] = [chunks] if isinstance(chunks, Module) or not isinstance(chunks, Iterable) else list(chunks)
    mesh = _mesh(mesh)
    topology, schedule = mesh.topology, _schedule(mesh, max(1, len(given)), schedule, by_hand=True)
    held = schedule.chunks[topology.rank]
    problem = ""
    if strange := [each for each in given if not isinstance(each, Module)]:
        problem = f"rank {topology.world.rank} builds a stage by hand that is {strange[0]!r}, no Module"
    elif len(given) != len(held):
        problem = (
            f"rank {topology.world.rank} builds {len(given)} stages by hand, but {schedule.name} gives it {len(held)}"
        )
    for theirs in topology.world.share(problem, others="alike"):
        if theirs:
            raise ConfigError(f"{theirs}: give one module for each of schedule.chunks[mesh.rank('pipeline')]")
    whole = Module()
    whole.grid, whole.scheme = mesh.grid, mesh.scheme
    parts = {}
    for chunk, module in zip(held, given, strict=True):
        setattr(whole, str(chunk.stage), module)
        cuttable = callable(getattr(module, "layers", None)) or hasattr(module, "stages")
        parts[chunk.stage] = listed_layers(module)[0] if cuttable else [Layer(str(chunk.stage), module, (module,))]
    mine = {
        name: [list(one.shape), one.dtype.name, one.buffer, *one.stages]
        for name, one in inventory_of(whole, parts).items()
    }  # fmt: skip
    first = topology.world.rank == topology.ranks[topology.rank][0]
    everyone = topology.world.share(
        [mine, {n: len(part) for n, part in parts.items()}] if first else [{}, {}], others="by rank"
    )
    inventory, counts = {}, {}
    for number in range(schedule.stages):
        theirs, lengths = everyone[topology.ranks[schedule.holder(number)][0]]
        counts[number] = lengths[str(number)]
        for name, (shape, dtype, buffer, stage) in theirs.items():
            if stage == number:
                inventory[name] = ParameterInfo(tuple(shape), np.dtype(dtype_named(dtype)), (stage,), buffer)
    made = PipelineModel(whole, parts, list(counts.values()), inventory, topology, schedule)
    return made if seed is None else made.initialize(seed)


class OpenMeshes:
    """The meshes that are launched and not closed: builders take the only one where none is given.

    Examples
    --------
    >>> import parlinalg as pla
    >>> with pla.launch({}) as mesh:
    ...     open_meshes.only() is mesh
    True
    """

    def __init__(self) -> None:
        self._found: list[ReferenceType[Any]] = []

    def add(self, mesh: Any) -> None:
        """Note a mesh that is launched."""
        self._found.append(ref(mesh))

    def remove(self, mesh: Any) -> None:
        """Forget a mesh that is closed."""
        self._found = [each for each in self._found if each() not in (None, mesh)]

    def _alive(self) -> list[Any]:
        return [mesh for each in self._found if (mesh := each()) is not None]

    def only(self) -> Any:
        """Return the mesh that is open; None where there is none.

        Raises
        ------
        ConfigError
            If there are several.
        """
        found = self._alive()
        if len(found) > 1:
            gc.collect()  # a mesh that nobody knows any more may lie in a cycle, for longer on one rank than on another
            found = self._alive()
        if len(found) > 1:
            raise ConfigError(
                f"{len(found)} meshes are launched and not closed: say which one by mesh=…, or close the others"
            )
        return found[0] if found else None


open_meshes = OpenMeshes()


def _mesh(mesh: Any) -> MeshLike:
    mesh = open_meshes.only() if mesh is None else mesh
    if not all(hasattr(mesh, name) for name in ("grid", "scheme", "topology")):
        given = "" if mesh is None else f", not {type(mesh).__name__}"
        raise ConfigError(f"a pipeline is built on a mesh: give mesh=parlinalg.launch(config){given}")
    found: MeshLike = mesh
    return found


def _schedule(mesh: MeshLike, chunks: int, given: Schedule | None, by_hand: bool = False) -> Schedule:
    """Return a schedule in which each rank holds so many stages."""
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ConfigError(f"num_chunks is a whole number of at least 1, not {chunks!r}")
    chosen = given or mesh.schedule
    if chosen is not None and (by_hand or len(chosen.chunks[mesh.topology.rank]) == chunks):
        return chosen
    if given is not None:
        raise ConfigError(
            f"num_chunks={chunks}, but a rank of the schedule {given.name!r} holds {len(given.chunks[0])} stages"
        )
    ranks = mesh.topology.size
    return make_schedule("1f1b", ranks, ranks) if chunks == 1 else make_schedule("interleaved", ranks, ranks, chunks)


def from_pretrained(
    kind: type[Pretrained], folder: str | os.PathLike[str], mesh: MeshLike, schedule: Schedule,
    dtype: DTypeLike | None = None, *, partition: Partition = "uniform", seed: int = 0, **changes: Any,
) -> PipelineModel:  # fmt: skip
    """Load this rank's stages of the model of a folder; each rank reads what it holds.  Collective over all ranks.

    Parameters
    ----------
    kind : type
        `nn.GPT` or `nn.Llama`, as the folder has it.
    mesh : Mesh
    schedule, partition
        As in `split`.
    folder, dtype, seed, changes
        As in `kind.from_pretrained`.
    """
    world = mesh.topology.world
    model, values = kind.declared_by(folder, mesh.scheme, mesh.grid, world, dtype, **changes)
    cut = split(model, mesh.topology, schedule, partition)
    together(world, lambda: cut.initialize(seed, values=values), f"reading {os.fspath(folder)}")
    cut.eval()
    return cut
