"""The mesh of ranks that a configuration asks for: resolved on paper by `resolve`, opened by `launch`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from parlinalg.backend.blas import host_and_cores, set_blas_threads, sharing
from parlinalg.comm import Comm, SingleComm, open_comm
from parlinalg.comm.startup import launched, place_on_node, ranks_map
from parlinalg.comm.together import odd_one_out, together
from parlinalg.errors import ConfigError, ScheduleError, counted
from parlinalg.grid import Grid, factorizations
from parlinalg.layout import coordinates, index_of
from parlinalg.nn.layer import Layer
from parlinalg.nn.pretrained import Pretrained
from parlinalg.pipeline.build import from_pretrained, open_meshes
from parlinalg.pipeline.partition import block_partition, given_partition
from parlinalg.pipeline.schedule import Schedule
from parlinalg.pipeline.schedules import make_schedule
from parlinalg.pipeline.topology import PipelineTopology, arrange
from parlinalg.schemes import Scheme, for_mode
from parlinalg.sequence import sequence_order
from parlinalg.train.config import ParallelConfig, ScheduleConfig, TensorConfig, TrainingConfig, ZeroConfig, load
from parlinalg.train.schema import listed, listed_divisors

__all__ = ["Mesh", "MeshSpec", "launch", "resolve"]

DATA, REPLICA = "data", "replica"
RING, ULYSSES = "s", "u"
DIMENSIONS = ("data", "pipeline", "sequence", "tensor")
OUTSIDE = (REPLICA, DATA)  # the axes of data parallelism, by default outside of the pipeline
OUTER_AXES = (*OUTSIDE, RING, ULYSSES)  # all but those of tensor parallelism
LAUNCHERS = ("auto", "mpirun", "srun", "one")
Configuration = TrainingConfig | Mapping[str, object] | str | Path | None


@dataclass(frozen=True)
class MeshSpec:
    """A configuration on a number of ranks: world = data × pipeline × sequence × tensor.

    Attributes
    ----------
    data, pipeline, sequence, tensor : int
        The size of each dimension; where the ranks of a pipeline have unlike grids, `tensor` is that of the first.
    mode : str or None
        Of tensor parallelism.
    axes : dict of str to int
        The axes of the processor grid and their sizes: "replica" and "data" where ZeRO shards, or experts are cut,
        within groups of data parallel ranks, else "data" where it has ranks or there is no other axis, "s", the ring,
        and "u", Ulysses, where they have ranks, then the tensor axes.
    scheme : Scheme
        The scheme on these axes.
    ulysses : int
        The ranks of a sequence among which attention exchanges heads; these groups form the ring.
    order : str or None
        The order of the tokens of a sequence; None: as the model likes it (see `order_of`).
    partition : str or tuple of int
        How layers are split into the stages of a pipeline; a tuple is the layers of each.
    parts : tuple of MeshSpec
        By pipeline rank the grid of each, where they are unlike; else empty.
    outer : tuple of str
        The axes outside of the pipeline: for each of their indices the ranks of its stages follow one another.  Ranks
        that share experts are inside, next to one another.
    experts : int
        The data parallel ranks over which `parallel.experts` cuts experts; 1 where it is left out.
    schedule : Schedule or None
        The order of work in the pipeline; None where it has one rank.
    """

    data: int
    pipeline: int
    sequence: int
    tensor: int
    mode: str | None
    axes: dict[str, int]
    scheme: Scheme
    ulysses: int = 1
    order: str | None = None
    partition: str | tuple[int, ...] = "uniform"
    parts: tuple[MeshSpec, ...] = ()
    outer: tuple[str, ...] = OUTSIDE
    experts: int = 1
    schedule: Schedule | None = field(default=None, compare=False)

    def at(self, rank: int) -> MeshSpec:
        """Return the grid of a pipeline rank."""
        return self.parts[rank] if self.parts else self

    @property
    def grids(self) -> tuple[dict[str, int], ...]:
        """The axes of the grid of every pipeline rank, with their sizes."""
        return tuple(self.at(p).axes for p in range(self.pipeline))

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """The world ranks of the grid of every pipeline rank, in its row-major order."""
        return arrange(self.grids, self.outer)

    def groups(self, dimension: str) -> list[tuple[int, ...]]:
        """Return the groups of world ranks that differ along a dimension only; "experts": those that share experts.

        Of a pipeline whose grids are unlike there are none.
        """
        if dimension == "pipeline":
            return [] if self.parts else list(zip(*self.places, strict=True))
        found = []
        for p, ranks in enumerate(self.places):
            found += _along(self.at(p).axes, self.at(p).axes_of(dimension), ranks)
        return found

    def label(self, rank: int) -> str:
        """Return what the lines of a report on a pipeline rank begin with; nothing where there is one rank only."""
        return f"pipeline {rank}: " if self.pipeline > 1 else ""

    def stages(self, rank: int) -> list[int]:
        """Return the stages that a pipeline rank holds; none without a pipeline."""
        return [] if self.schedule is None else self.schedule.held(rank)

    def layer_counts(self, depth: int) -> tuple[int, ...] | None:
        """Return the layers of each stage of a model with so many between its embedding and its head, these included.

        None without a pipeline, and where the model itself must be looked at.
        """
        if self.schedule is None or self.partition in ("parameters", "flops", "time"):
            return None
        layers = [Layer(str(i), lambda x: x, (), i in (0, depth + 1)) for i in range(depth + 2)]
        if isinstance(self.partition, str):
            return block_partition(layers, self.schedule.stages)
        return given_partition(self.partition, layers, self.schedule.stages)

    @property
    def ring(self) -> int:
        """The ranks of the ring over which a sequence is cut."""
        return self.sequence // self.ulysses

    def order_of(self, causal: bool) -> str:
        """Return the order of tokens: by default "zigzag" for a causal model on a ring, to balance its work, else
        "contiguous"."""
        return self.order or ("zigzag" if causal and self.ring > 1 else "contiguous")

    def token_order(self, length: int) -> np.ndarray | None:
        """Return the order in which a causal model has the tokens of its sequences; None: as they come."""
        if length < self.sequence:
            raise ConfigError(
                f"data.sequence_length={length} over parallel.sequence.size={self.sequence} leaves ranks without "
                f"tokens: give at least {self.sequence} positions, or a sequence size of at most {length}"
            )
        name = self.order_of(causal=True)
        return None if name == "contiguous" else sequence_order(length, self.ring, name)

    def axes_of(self, dimension: str) -> tuple[str, ...]:
        """Return the axes of the grid that a dimension spans, or "experts"; the pipeline spans none."""
        others = tuple(axis for axis in self.axes if axis not in OUTER_AXES)
        spans = {"data": OUTSIDE, "pipeline": (), "sequence": (RING, ULYSSES), "tensor": others}
        spans["experts"] = (DATA,) if self.experts > 1 else ()
        return tuple(axis for axis in self.axes if axis in spans[dimension])


def stages_text(stages: Sequence[int]) -> str:
    """Return the stages for a report.

    >>> stages_text([1]), stages_text([0, 3])
    ('stage 1', 'stages 0, 3')
    """
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def _along(sizes: Mapping[str, int], axes: Sequence[str], ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the groups of a grid's ranks that differ along these axes only."""
    strides, step = {}, 1
    for axis in reversed(list(sizes)):
        strides[axis] = step
        step *= sizes[axis]
    own, others = [0], [0]
    for axis, n in sizes.items():
        if axis in axes:
            own = [i + strides[axis] * k for i in own for k in range(n)]
        else:
            others = [i + strides[axis] * k for i in others for k in range(n)]
    return [tuple(ranks[base + i] for i in own) for base in others]


def resolve(config: Configuration, ranks: int) -> MeshSpec:
    """Return the mesh that a configuration asks for on a number of ranks.  Pure.

    The size of `data` is inferred where it is left out.  Where `tensor` has a mode but neither size nor shape it takes
    all ranks that the others leave, in the shape nearest to a square or cube.

    Parameters
    ----------
    config : dict, str, Path or TrainingConfig
    ranks : int
        The ranks there are.

    Raises
    ------
    ConfigError
        If sizes do not multiply to the ranks, a shape, group of ZeRO or partition does not agree with them, or the
        schedule cannot run the microbatches; the message says what would be right.

    Examples
    --------
    >>> resolve(dict(parallel=dict(data=2, tensor=dict(size=4, mode="2d"))), ranks=8).axes
    {'data': 2, 'r': 2, 'c': 2}
    """
    config = load({} if config is None else config)
    parallel = config.parallel
    if parallel.auto:
        raise ConfigError(
            "parallel='auto' is chosen when `parlinalg train` starts; elsewhere give the sizes, such as those that "
            f"pla.plan_training(config, ranks={ranks}, machine=...).configuration has"
        )
    if parallel.pipeline.tensor is not None:
        found = _unlike(parallel, parallel.pipeline.tensor, ranks)
    else:
        others, tensor = parallel.pipeline.ranks * parallel.sequence.ranks, parallel.tensor
        count = tensor.ranks
        if count is None:
            left = others * (parallel.data.size or 1)
            count = 1 if ranks % left else ranks // left
            if tensor.mode in ("2d", "2.5d", "3d"):
                tensor = replace(tensor, shape=_nearest(tensor.mode, count, tensor.depth))
        found = _uniform(parallel, _data_ranks(parallel.data.size, others, count, ranks), tensor, count)
    found = _with_groups(found, parallel.experts, config.zero)
    return replace(found, schedule=_schedule(config, found))


def _uniform(parallel: ParallelConfig, data: int, tensor: TensorConfig, count: int) -> MeshSpec:
    """Return the mesh with so many ranks of data and of tensor parallelism."""
    chosen = for_mode(tensor.mode, depth_on=tensor.depth_on, sequence_parallel=tensor.sequence_parallel or None)
    scheme, axes = chosen.SCHEME, dict(chosen.sizes(count, tensor.shape, tensor.depth))
    sequence, mode, cut = parallel.sequence.ranks, tensor.mode, parallel.sequence
    if mode == "sequence":
        sequence, count, mode = count, 1, None
    elif sequence > 1:  # Ulysses inside, the ring outside
        if cut.ulysses > 1:
            scheme, axes = scheme.with_sequence(ULYSSES, ulysses=True), {ULYSSES: cut.ulysses, **axes}
        if sequence > cut.ulysses:
            scheme, axes = scheme.with_sequence(RING), {RING: sequence // cut.ulysses, **axes}
    if data > 1 or not axes:
        scheme, axes = scheme.with_data(DATA), {DATA: data, **axes}
    stages = parallel.pipeline.ranks
    partition = parallel.pipeline.partition if stages > 1 else "uniform"
    return MeshSpec(data, stages, sequence, count, mode, axes, scheme, cut.ulysses, cut.order, partition)


def _unlike(parallel: ParallelConfig, each: Sequence[TensorConfig], ranks: int) -> MeshSpec:
    """Return the mesh where the ranks of a pipeline have tensor parallelism of their own."""
    counts, data, sequence = [], parallel.data.size, parallel.sequence.ranks
    for p, tensor in enumerate(each):
        if tensor.ranks is None:
            raise ConfigError(f"parallel.pipeline.tensor[{p}] needs a size or a shape, such as size=2")
        counts.append(tensor.ranks)
    inner = sequence * sum(counts)
    if ranks % inner or (data is not None and data * inner != ranks):
        asked = inner * (data or 1)
        raise ConfigError(
            f"sequence × the pipeline's grids = {sequence} × ({' + '.join(map(str, counts))}) = {inner}"
            f"{'' if data is None else f', and data × that = {asked}'}, but there {_number(ranks)}: start with "
            f"mpiexec -n {asked}"
        )
    parts = tuple(_uniform(parallel, ranks // inner, t, n) for n, t in zip(counts, each, strict=True))
    return parts[0] if all(p == parts[0] for p in parts) else replace(parts[0], parts=parts)


def _data_ranks(data: int | None, others: int, tensor: int, ranks: int) -> int:
    """Return the size of data with which all sizes multiply to the ranks."""
    if data is None:
        if ranks % (others * tensor):
            what, n = ("tensor size", ranks // others) if ranks % others == 0 else ("pipeline × sequence", ranks)
            raise ConfigError(
                f"pipeline × sequence × tensor = {others * tensor} does not divide the {counted(ranks, 'rank')} there "
                f"{'is' if ranks == 1 else 'are'}: "
                f"start with a multiple of {others * tensor} ranks (mpiexec -n {others * tensor}), or use a {what} of "
                f"{listed_divisors(n)}"
            )
        return ranks // (others * tensor)
    if data * others * tensor != ranks:
        fitting = "" if ranks % (others * tensor) else f"use data={ranks // (others * tensor)} or leave it out, or "
        raise ConfigError(
            f"data × pipeline × sequence × tensor = {data} × {others} × {tensor} = {data * others * tensor} "
            f"(pipeline × sequence = {others}), but there {_number(ranks)}: {fitting}start with mpiexec -n "
            f"{data * others * tensor}"
        )
    return data


def _number(ranks: int) -> str:
    return f"{'is' if ranks == 1 else 'are'} {counted(ranks, 'rank')}"


def _nearest(mode: str, size: int, depth: int | None) -> tuple[int, ...] | None:
    """Return the shape nearest to a square or cube; None with a depth that does not divide the ranks."""
    if mode == "2.5d" and depth is not None:
        flat = _nearest("2d", size // depth, None)
        return None if size % depth or flat is None else (depth, *flat)
    return min(factorizations(size, 2 if mode == "2d" else 3), key=lambda shape: (max(shape) - min(shape), shape))


def _with_groups(spec: MeshSpec, experts: int | None, zero: ZeroConfig) -> MeshSpec:
    """Return the mesh with the data axis as two, where experts are cut or ZeRO shards within groups of data parallel
    ranks, and weights cut for ZeRO's stage 3."""
    if spec.parts:
        parts = tuple(_with_groups(part, experts, zero) for part in spec.parts)
        return replace(parts[0], parts=parts)
    within = zero.within if zero.stage and DATA in spec.axes else None
    for name, size in (("parallel.experts", experts), ("zero.within", within)):
        if size is not None and spec.data % size:
            raise ConfigError(
                f"{name}={size} does not divide the {counted(spec.data, 'data parallel rank')}: it may be "
                f"{listed_divisors(spec.data)}"
            )
    if experts is not None and within not in (None, experts, spec.data):
        raise ConfigError(
            f"parallel.experts={experts} and zero.within={within} are groups of unlike sizes of the {spec.data} data "
            f"parallel ranks: give the same number, or leave zero.within out, so that ZeRO shards over all of them"
        )
    scheme, axes, group = spec.scheme, spec.axes, experts or within or spec.data
    if DATA in axes and group < spec.data:
        scheme = scheme.factored(DATA, (REPLICA, DATA))
        axes = {REPLICA: spec.data // group, **{a: group if a == DATA else n for a, n in axes.items()}}
    if zero.stage == 3 and (shards := zero_axes(zero, axes)):
        scheme = scheme.with_weights_cut(shards)
    outer = OUTSIDE if experts is None or spec.pipeline == 1 else (REPLICA,)
    return replace(spec, scheme=scheme, axes=axes, outer=outer, experts=experts or 1)


def zero_axes(zero: ZeroConfig, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes of a grid over which ZeRO shards.

    By default these are all axes of data parallelism and of the sequence: their ranks hold the same weights, and sum
    the gradients.  With `within`, groups of so many data parallel ranks shard, and both other groups and the ranks that
    share a sequence hold copies.  A parameter that one of the axes cuts, such as experts, is sharded over the others.

    >>> zero_axes(ZeroConfig(1), {"replica": 4, "data": 2, "s": 2}), zero_axes(ZeroConfig(1), {"u": 2, "t": 2})
    (('replica', 'data', 's'), ('u',))
    >>> zero_axes(ZeroConfig(1, 2), {"replica": 4, "data": 2, "s": 2})
    ('data',)
    """
    data = tuple(axis for axis in OUTSIDE if axis in sizes) if DATA in sizes else ()
    if zero.within is None:
        return (*data, *(axis for axis in (RING, ULYSSES) if axis in sizes))
    ranks = math.prod(sizes[axis] for axis in data)
    return data if zero.within == ranks else data[-1:]


def _schedule(config: TrainingConfig, spec: MeshSpec) -> Schedule | None:
    if spec.pipeline == 1:
        return None
    wish = config.schedule or ScheduleConfig()
    count = config.microbatches(spec.pipeline)
    try:
        made = make_schedule(wish.name, spec.pipeline, count, wish.chunks, every=wish.every)
    except ScheduleError as error:
        raise ConfigError(f"schedule: {error}") from error
    partition = spec.partition
    if not isinstance(partition, str) and len(partition) != made.stages:
        chunks = made.stages // made.ranks if made.copies == 1 else 1
        held = f"{made.ranks} ranks" + (f" × {chunks} chunks" if chunks > 1 else "")
        raise ConfigError(
            f"parallel.pipeline.partition={list(partition)} has {len(partition)} numbers, but the schedule "
            f"{wish.name!r} has {made.stages} stages ({held}): give {made.stages} numbers, or a name such as 'uniform'"
        )
    return made


class Mesh:
    """The ranks of a training, with their processor grids and communicators.

    Attributes
    ----------
    grid : Grid
        That of this rank's stage of the pipeline, with the axes of `spec.axes`.
    scheme : Scheme
        The parallel scheme on these axes.
    config : TrainingConfig
    spec : MeshSpec
        The sizes of the mesh.
    topology : PipelineTopology
        Where this rank is in the pipeline.
    schedule : Schedule or None
        The order of work in the pipeline; None where it has one rank.
    ends : ExitStack
        Closed with the mesh, before its communicators: files of offloaded states, say.
    """

    def __init__(self, grid: Grid, config: TrainingConfig, spec: MeshSpec, topology: PipelineTopology) -> None:
        self.grid = grid
        self.config = config
        self.spec = spec
        self.topology = topology
        self.schedule = spec.schedule
        self.scheme: Scheme = spec.at(topology.rank).scheme
        self.ends = ExitStack()
        open_meshes.add(self)
        grid.mesh = self  # models know their grid, and `initialize` finds the mesh

    @property
    def world(self) -> Comm:
        """The communicator of all ranks of the mesh."""
        return self.topology.world

    def axes(self, name: str) -> tuple[str, ...]:
        """Return the axes of the grid that a dimension of the configuration, or an axis, spans; "pipeline" spans none.

        Parameters
        ----------
        name : str
            "data", "tensor", "pipeline", "sequence", or an axis of the grid.

        Raises
        ------
        ConfigError
            If it is neither.
        """
        if name in DIMENSIONS:
            return self.spec.at(self.topology.rank).axes_of(name)
        if name in self.grid.axes:
            return (name,)
        known = dict.fromkeys((*DIMENSIONS, *self.grid.axes))
        raise ConfigError(f"the mesh has no {name!r}; it has {listed(known)}")

    def size(self, name: str) -> int:
        """Return the number of ranks that a dimension ("data", "tensor", …) or an axis spans."""
        size = self.topology.size if name == "pipeline" else 1
        for axis in self.axes(name):
            size *= self.grid.sizes[axis]
        return size

    def rank(self, name: str) -> int:
        """Return this rank's number along a dimension or an axis; over several axes in row-major order."""
        if name == "pipeline":
            return self.topology.rank
        return index_of(self.axes(name), self.grid.sizes, self.grid.coords)

    def comm(self, name: str) -> Comm:
        """Return the communicator of the ranks that differ from this one along a dimension or an axis only.

        Raises
        ------
        ConfigError
            For "pipeline", if the grids of its ranks are unlike.
        """
        if name == "pipeline":
            if self.topology.comm is None:
                raise ConfigError(
                    f"the grids of the pipeline's ranks differ, {list(self.topology.sizes)}: no ranks differ in the "
                    "pipeline only; use mesh.world and mesh.topology.ranks"
                )
            return self.topology.comm
        return self.grid.comm(self.axes(name))

    def where(self) -> list[dict[str, Any]]:
        """Return for every rank its host, pid and coordinates, in a pipeline also its stages.  Collective."""
        found = ranks_map(self.world)
        for p, ranks in enumerate(self.topology.ranks):
            sizes = self.topology.sizes[p]
            for rank, coords in zip(ranks, coordinates(tuple(sizes), sizes), strict=True):
                found[rank]["coords"] = coords
                if self.schedule is not None:
                    found[rank]["coords"] = {"pipeline": p, **coords}
                    found[rank]["stages"] = self.spec.stages(p)
        return found

    def by_stage(self, text: str) -> str:
        """Return what each stage of a pipeline reports, in a line each, with one for equal reports.  Collective."""
        if self.schedule is None:
            return text
        everyone, stages_of = self.world.share(text, others="by rank"), dict[str, list[int]]()
        for p, ranks in enumerate(self.topology.ranks):
            stages_of.setdefault(everyone[ranks[0]], []).extend(self.spec.stages(p))
        return f"\n{'':<12}".join(f"{stages_text(sorted(set(held)))}: {each}" for each, held in stages_of.items())

    def from_pretrained(self, kind: type[Pretrained], folder: str | Path, dtype: str | None = None) -> Any:
        """Load the model of a folder, on this rank's grid or, in a pipeline, this rank's stages of it.  Collective.

        Parameters
        ----------
        kind : type
            Such as `nn.Llama`, as the folder has it.
        folder : str or Path
        dtype : dtype, optional
            By default the weights' own.
        """
        if self.schedule is None:
            return kind.from_pretrained(folder, self.scheme, self.grid, dtype)
        return from_pretrained(kind, folder, self, self.schedule, dtype, partition=self.spec.partition)

    def close(self) -> None:
        """Close `ends`, and free the communicators.  Collective."""
        open_meshes.remove(self)
        self.ends.close()
        self.grid.close()
        self.topology.close()

    def __enter__(self) -> Mesh:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # an error on this rank must not wait for the others
            open_meshes.remove(self)
            self.ends.close()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{n}={self.size(n)}" for n in DIMENSIONS)
        return f"Mesh({sizes}, scheme={self.scheme.name!r}, grid={self.grid!r})"


def launch(
    config: Configuration = None,
    comm: object = None,
    backend: str | None = None,
    *,
    settings: Sequence[str] = (),
    launcher: str = "auto",
) -> Mesh:
    """Open the mesh of ranks that a configuration asks for.  Collective.

    Parameters
    ----------
    config : dict, str, Path or TrainingConfig, optional
        A configuration, the path of one, or the name of a shipped example.  By default every rank is data parallel.
    comm : mpi4py communicator, Comm or None
        The ranks, by default all of `MPI.COMM_WORLD`.
    backend : {"auto", "numpy", "cupy"}, optional
        Where blocks are kept, by default the configuration's.
    settings : sequence of str
        Values to replace, such as "parallel.tensor.mode=2d".
    launcher : {"auto", "mpirun", "srun", "one"}
        The program that started the ranks: "auto" is any, "mpirun" and "srun" refuse to go on where it was another,
        and "one" is this process alone, without MPI.

    Returns
    -------
    Mesh

    Raises
    ------
    CommError
        If Slurm and MPI disagree about the ranks; the message says how to start them.
    ConfigError
        On all ranks, if the configuration is wrong on any of them, does not fit the ranks, or differs between them.

    Examples
    --------
    >>> mesh = launch(dict(parallel=dict(tensor=dict(size=1, mode="2d"))))
    >>> mesh.size("tensor"), mesh.rank("data"), mesh.grid.sizes
    (1, 0, {'r': 1, 'c': 1})
    """
    world = open_comm(_started(comm, launcher))

    def read() -> tuple[TrainingConfig, MeshSpec]:
        parsed = load({} if config is None else config, settings)
        return parsed, resolve(parsed, world.size)

    checked, spec = together(world, read, "reading the configuration")
    if (odd := odd_one_out(world, repr(checked).encode())) is not None:
        raise ConfigError(f"rank {odd} reads another configuration than rank 0; give all the same file and settings")
    topology = PipelineTopology.of(world, spec.grids, spec.outer)
    if world is not comm:
        topology.made.append(world)
    return Mesh(_grid(topology, backend or checked.backend), checked, spec, topology)


def _started(comm: object, launcher: str) -> object:
    """Return what to open the communicator from; raise unless the launcher is the one that is asked for."""
    if launcher not in LAUNCHERS:
        raise ConfigError(f"launcher is one of {listed(LAUNCHERS)}, not {launcher!r}")
    if launcher == "auto":
        return comm
    if comm is not None:
        raise ConfigError(
            f"launcher={launcher!r} names where all ranks come from, and comm gives some; give one of them"
        )
    found = launched().by
    if launcher == "one":
        return SingleComm()
    if (launcher, found) not in (("mpirun", "mpiexec"), ("srun", "srun")):
        started = {"mpiexec": "mpiexec started it", "srun": "srun started it", "one": "it was started alone"}[found]
        right = {"mpirun": "mpiexec -n 4 python SCRIPT", "srun": "srun --mpi=pmi2 python SCRIPT, in a job of Slurm"}
        raise ConfigError(
            f"launcher={launcher!r}, but as far as this process knows {started}: start with {right[launcher]}, or "
            "leave launcher out"
        )
    return None


def _grid(topology: PipelineTopology, backend: str) -> Grid:
    """Return this rank's grid, with the backend of the others, and BLAS threads that leave them their cores."""
    sizes, world = topology.sizes[topology.rank], topology.world
    if topology.size == 1:
        return Grid(sizes, world, backend)
    grid = together(world, lambda: Grid(sizes, topology.group, backend), "making its grid")
    if len(set(world.share(grid.backend.cuda, others="alike"))) > 1:  # "auto" where only some ranks have a GPU
        grid.close()
        grid = Grid(sizes, topology.group, "numpy")
    if world.imagined:
        return grid
    grid.threads = set_blas_threads(
        sharing(world.share(host_and_cores(), others="by rank"), world.rank, place_on_node(world)[1])
    )
    return grid
