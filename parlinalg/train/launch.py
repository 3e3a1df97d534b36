"""From a configuration to the mesh of ranks it asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from parlinalg.backend.blas import host_and_cores as cores
from parlinalg.backend.blas import set_blas_threads, sharing
from parlinalg.comm import Comm, SingleComm, open_comm
from parlinalg.comm.startup import launched, place_on_node
from parlinalg.comm.together import odd_one_out, together
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.layout import index_of
from parlinalg.pipeline.build import open_meshes
from parlinalg.pipeline.schedule import Schedule
from parlinalg.pipeline.topology import PipelineTopology
from parlinalg.schemes import Scheme
from parlinalg.train.config import Config, load
from parlinalg.train.keys import listed
from parlinalg.train.parallel import DATA, REPLICA, RING, ULYSSES, Parallel, share_out, with_zero
from parlinalg.train.pipelines import schedule_for

LAUNCHERS = ("auto", "mpirun", "srun", "one")


class Mesh:
    """The ranks as a configuration shares them out.

    Attributes
    ----------
    grid : Grid
        Its axes: "data" where data parallelism has ranks (or there is no other axis), then "s" and "u" where the
        sequence is cut over a ring and by Ulysses, then the tensor axes.
    scheme : Scheme
        The parallel scheme on these axes.
    config : Config
    parallel : Parallel
        The sizes.
    topology : PipelineTopology
        Where this rank is in the pipeline; grid and scheme are those of its part of it.
    schedule : Schedule or None
        What the configuration's pipeline does; None where it has one rank.
    ends : ExitStack
        What ends with the mesh, before its communicators: files of offloaded states, say.
    """

    def __init__(
        self, grid: Grid, config: Config, parallel: Parallel, topology: PipelineTopology,
        schedule: Schedule | None = None,
    ) -> None:  # fmt: skip
        self.grid = grid
        self.config = config
        self.parallel = parallel
        self.topology = topology
        self.schedule = schedule
        self.scheme: Scheme = parallel.at(topology.rank).scheme
        self.ends = ExitStack()
        open_meshes.add(self)
        grid.mesh = self  # models know their grid, and `initialize` finds the mesh

    @property
    def world(self) -> Comm:
        """The communicator of all ranks of the mesh."""
        return self.topology.world

    def axes(self, name: str) -> tuple[str, ...]:
        """The axes of the grid that a dimension of the configuration, or an axis, spans; "pipeline" spans none.

        Parameters
        ----------
        name : str
            "data", "tensor", "pipeline", "sequence", or an axis of the grid.

        Raises
        ------
        ConfigError
            If it is neither.
        """
        if name == DATA:
            return tuple(a for a in (REPLICA, DATA) if a in self.grid.axes)
        if name == "pipeline":
            return ()
        if name == "sequence":
            return tuple(a for a in (RING, ULYSSES) if a in self.grid.axes)
        if name == "tensor":
            return tuple(a for a in self.grid.axes if a not in (REPLICA, DATA, RING, ULYSSES))
        if name in self.grid.axes:
            return (name,)
        known = dict.fromkeys(("data", "pipeline", "sequence", "tensor", *self.grid.axes))
        raise ConfigError(f"the mesh has no {name!r}; it has {listed(known)}")

    def size(self, name: str) -> int:
        """How many ranks a dimension ("data", "tensor", …) or an axis spans."""
        size = self.topology.size if name == "pipeline" else 1
        for axis in self.axes(name):
            size *= self.grid.sizes[axis]
        return size

    def rank(self, name: str) -> int:
        """This rank's number along a dimension or an axis; over several axes in row-major order."""
        if name == "pipeline":
            return self.topology.rank
        return index_of(self.axes(name), self.grid.sizes, self.grid.coords)

    def comm(self, name: str) -> Comm:
        """The communicator of the ranks that differ from this one along a dimension or an axis only.

        Raises
        ------
        ConfigError
            For "pipeline", if the grids of its ranks are unlike.
        """
        if name == "pipeline":
            if self.topology.comm is None:
                raise ConfigError(
                    f"the grids of the pipeline's ranks are unlike, {list(self.topology.sizes)}: no ranks differ in "
                    "the pipeline only; use mesh.world and mesh.topology.ranks"
                )
            return self.topology.comm
        return self.grid.comm(self.axes(name))

    def close(self) -> None:
        """End what ends with the mesh, and free the communicators.  Collective."""
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
        sizes = ", ".join(f"{n}={self.size(n)}" for n in ("data", "pipeline", "sequence", "tensor"))
        return f"Mesh({sizes}, scheme={self.scheme.name!r}, grid={self.grid!r})"


def launch(
    config: Config | Mapping[str, object] | str | Path | None = None,
    comm: object = None,
    backend: str | None = None,
    *,
    settings: Sequence[str] = (),
    launcher: str = "auto",
) -> Mesh:
    """Share out the ranks as a configuration says.  Collective.

    Parameters
    ----------
    config : dict, str, Path or Config, optional
        A configuration (its `parallel`, if any, matters here; all of it is checked), the path of one, or the name of a
        shipped example.  By default every rank is data parallel.
    comm : mpi4py communicator, Comm or None
        The ranks, by default all of `MPI.COMM_WORLD`.
    backend : {"auto", "numpy", "cupy"}, optional
        Where blocks live, by default as the configuration says.
    settings : sequence of str
        Values to replace, such as "parallel.tensor.mode=2d".
    launcher : {"auto", "mpirun", "srun", "one"}
        What started the ranks: "auto" takes it as it is, "mpirun" and "srun" refuse to go on where it was another, and
        "one" is this process alone, without MPI.

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

    def read() -> tuple[Config, Parallel, Schedule | None]:
        checked = load({} if config is None else config, settings)
        parallel = with_zero(share_out(checked.parallel, world.size), checked.zero)
        return checked, parallel, schedule_for(checked, parallel)

    checked, parallel, schedule = together(world, read, "reading the configuration")
    if (odd := odd_one_out(world, repr(checked).encode())) is not None:
        raise ConfigError(f"rank {odd} reads another configuration than rank 0; give all the same file and settings")
    topology = PipelineTopology.of(world, parallel.grids, (REPLICA, DATA))
    if world is not comm:
        topology.made.append(world)
    return Mesh(_grid(topology, backend or checked.backend), checked, parallel, topology, schedule)


def _started(comm: object, launcher: str) -> object:
    """What to open the communicator of, once the launcher is the one that is asked for."""
    if launcher not in LAUNCHERS:
        raise ConfigError(f"launcher is one of {listed(LAUNCHERS)}, not {launcher!r}")
    if launcher == "auto":
        return comm
    if comm is not None:
        raise ConfigError(
            f"launcher={launcher!r} says where all ranks come from, and comm gives some; give one of them"
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
    """This rank's grid, whose backend is that of the others', and whose BLAS threads leave them their cores."""
    sizes, world = topology.sizes[topology.rank], topology.world
    if topology.size == 1:
        return Grid(sizes, world, backend)
    grid = together(world, lambda: Grid(sizes, topology.group, backend), "making its grid")
    if len(set(world.share(grid.backend.cuda))) > 1:  # "auto" where only some ranks have a GPU
        grid.close()
        grid = Grid(sizes, topology.group, "numpy")
    grid.threads = set_blas_threads(sharing(world.share(cores()), world.rank, place_on_node(world)[1]))
    return grid
