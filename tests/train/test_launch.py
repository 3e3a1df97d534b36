"""The mesh: who is where, and what is refused on all ranks alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parlinalg.comm.launchers import problem
from parlinalg.comm.together import together
from parlinalg.errors import CommError, ConfigError
from parlinalg.train import launch
from parlinalg.train.report import opening, places
from tests.conftest import SIZE


def test_by_default_every_rank_is_data_parallel(world: Any, backend: str) -> None:
    with launch(comm=world, backend=backend) as mesh:
        assert (mesh.size("data"), mesh.rank("data"), mesh.size("tensor"), mesh.rank("tensor")) == (
            SIZE, world.rank, 1, 0,
        )  # fmt: skip
        assert mesh.size("pipeline") == mesh.size("sequence") == 1
        assert f"data={SIZE}, pipeline=1" in repr(mesh)


@pytest.mark.ranks(8)
def test_data_and_tensor_axes(world: Any, backend: str) -> None:
    parallel = {"data": 2, "tensor": {"size": 4, "mode": "2d"}}
    with launch({"parallel": parallel}, world, backend) as mesh:
        assert mesh.grid.sizes == {"data": 2, "r": 2, "c": 2}
        assert mesh.axes("tensor") == ("r", "c")
        assert 4 * mesh.rank("data") + mesh.rank("tensor") == world.rank
        assert 2 * mesh.rank("r") + mesh.rank("c") == mesh.rank("tensor")
        total = mesh.grid.backend.from_host(np.array([float(world.rank)]))
        mesh.comm("data").all_reduce(total)
        assert float(total[0]) == 2 * mesh.rank("tensor") + 4
        assert mesh.scheme.name == "data × 2d"


@pytest.mark.ranks(8)
def test_axes_of_sequences(world: Any, backend: str) -> None:
    parallel = {"sequence": {"size": 4, "ulysses": 2}, "tensor": {"size": 2, "mode": "1d"}}
    with launch({"parallel": parallel}, world, backend) as mesh:
        assert mesh.grid.sizes == {"s": 2, "u": 2, "t": 2}
        assert (mesh.axes("sequence"), mesh.axes("tensor"), mesh.size("sequence")) == (("s", "u"), ("t",), 4)
        assert 2 * mesh.rank("sequence") + mesh.rank("tensor") == world.rank
        assert (mesh.parallel.ring, mesh.parallel.order_of(True), mesh.parallel.order_of(False)) == (
            2, "zigzag", "contiguous",
        )  # fmt: skip


def test_names_are_checked(world: Any, backend: str) -> None:
    with launch({}, world, backend) as mesh, pytest.raises(ConfigError, match=r"no 'date'; it has 'data', 'pipeline'"):
        mesh.rank("date")


def test_wrong_configurations_are_refused_on_all_ranks(world: Any) -> None:
    with pytest.raises(ConfigError, match=r"no mode"):
        launch({"parallel": {"tensor": SIZE + 1}}, world)
    with pytest.raises(ConfigError, match=r"did you mean 'parallel'"):
        launch({"paralel": {}}, world)


@pytest.mark.mpi(min_size=2)
def test_a_configuration_that_is_wrong_on_one_rank_is_refused_on_all(world: Any) -> None:
    with pytest.raises(ConfigError, match=r"rank 1, reading the configuration: .*'sed'.*did you mean 'seed'"):
        launch({"sed" if world.rank == 1 else "seed": 1}, world)
    with pytest.raises(ConfigError, match=r"rank 1 reads another configuration than rank 0"):
        launch({"seed": world.rank}, world)


@pytest.mark.mpi(min_size=2)
def test_together_fails_on_all_ranks(world: Any) -> None:
    def fail() -> int:
        if world.rank == 1:
            raise OSError("the disk is gone")
        return world.rank

    with pytest.raises(ConfigError, match=r"^rank 1, looking: the disk is gone$"):
        together(world, fail, "looking")
    assert together(world, lambda: world.rank) == world.rank


@pytest.mark.ranks(4, 6)
def test_ranks_of_a_pipeline_have_grids_of_their_own(world: Any, backend: str) -> None:
    """Data outermost, then the pipeline, then what is within a stage."""
    with launch({"parallel": {"data": SIZE // 2, "pipeline": 2}}, world, backend) as mesh:
        assert (mesh.rank("data"), mesh.rank("pipeline")) == divmod(world.rank, 2)
        assert (mesh.size("data"), mesh.size("pipeline"), mesh.size("tensor")) == (SIZE // 2, 2, 1)
        assert mesh.place.ranks == (tuple(range(0, SIZE, 2)), tuple(range(1, SIZE, 2)))
        assert mesh.world is world
        assert mesh.grid.rank_of(mesh.grid.coords) == mesh.place.ranks[mesh.place.rank].index(world.rank)
        total = mesh.grid.backend.from_host(np.array([float(world.rank)]))
        mesh.comm("pipeline").all_reduce(total)
        assert float(total[0]) == 4 * mesh.rank("data") + 1
        mesh.grid.everyone.all_reduce(total)
        assert float(total[0]) == sum(range(SIZE))
        assert (mesh.schedule.name, mesh.schedule.microbatches) == ("1f1b", 2)
    tensor = {"size": SIZE // 2, "mode": "1d"}
    with launch({"parallel": {"pipeline": 2, "tensor": tensor}}, world, backend) as mesh:
        assert world.rank == (mesh.rank("data") * 2 + mesh.rank("pipeline")) * (SIZE // 2) + mesh.rank("tensor")


@pytest.mark.ranks(6)
def test_every_rank_has_its_place(world: Any, backend: str) -> None:
    """`ranks.json` and the map at the start: of all ranks, also those of other stages."""
    parallel = {"data": 1, "pipeline": 3, "tensor": {"size": 2, "mode": "1d"}}
    with launch({"parallel": parallel, "schedule": "zb-v"}, world, backend) as mesh:
        found = places(mesh)
        assert [place["rank"] for place in found] == list(range(6))
        assert [place["coords"] for place in found] == [{"pipeline": r // 2, "t": r % 2} for r in range(6)]
        assert [place["stages"] for place in found[::2]] == [[0, 5], [1, 4], [2, 3]]
        text = opening(mesh, found, {}, {})
        assert "ranks       6 = pipeline 3 × tensor 2 (1d: t=2), on 1 node" in text
        assert "pipeline 2: ranks 4–5, node 0; stages 2, 3" in text


@pytest.mark.ranks(6)
def test_pipelines_of_unlike_grids(world: Any, backend: str) -> None:
    each = [{"size": 1}, {"size": 2, "mode": "1d"}]
    with launch({"parallel": {"pipeline": {"tensor": each}}}, world, backend) as mesh:
        assert mesh.place.ranks == ((0, 3), (1, 2, 4, 5))
        assert mesh.place.sizes == ({"data": 2}, {"data": 2, "t": 2})
        assert mesh.rank("data") == world.rank // 3
        assert mesh.rank("tensor") == max(0, world.rank % 3 - 1)
        assert mesh.scheme.name == ("data × 1d" if world.rank % 3 else "data × serial")
        with pytest.raises(ConfigError, match="grids of the pipeline's ranks are unlike"):
            mesh.comm("pipeline")
    with launch(
        {"parallel": {"pipeline": {"tensor": each}}, "zero": {"stage": 1, "within": 1}}, world, backend
    ) as mesh:
        assert mesh.grid.sizes["replica"] == mesh.size("data") == 2


@pytest.mark.mpi(min_size=2)
def test_wrong_pipelines_are_refused_on_all_ranks(world: Any) -> None:
    with pytest.raises(ConfigError, match=r"schedule: interleaved over .* with microbatches=1: it takes multiples of"):
        launch({"parallel": {"pipeline": SIZE}, "schedule": {"name": "interleaved", "microbatches": 1}}, world)
    with pytest.raises(ConfigError, match=r"there are \d+ ranks"):
        launch({"parallel": {"pipeline": SIZE + 1, "data": 1}}, world)


@pytest.mark.serial
def test_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    with launch({}, launcher="one") as mesh:
        assert mesh.world.size == 1
    for name in ("srun", "mpirun"):
        with pytest.raises(ConfigError, match=rf"launcher='{name}', but .* it was started alone: start with "):
            launch({}, launcher=name)
    with pytest.raises(ConfigError, match="launcher is one of 'auto', 'mpirun', 'srun' or 'one', not 'ssh'"):
        launch({}, launcher="ssh")
    with launch({}) as mesh, pytest.raises(ConfigError, match="comm gives some; give one of them"):
        launch({}, mesh.world, launcher="one")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "2")
    with pytest.raises(ConfigError, match=r"launcher='mpirun', but .* srun started it: start with mpiexec -n 4"):
        launch({}, launcher="mpirun")
    monkeypatch.delenv("PARLINALG_MPI", raising=False)
    with pytest.raises(CommError, match=r"srun started 4 processes, but each sees only itself.*srun --mpi=pmi2"):
        launch({}, launcher="srun")


SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_ID": "0"}


@pytest.mark.serial
@pytest.mark.parametrize(
    ("environ", "size", "rank", "message"),
    [
        ({}, 1, 0, ""),
        (SRUN, 4, 2, ""),
        (SRUN, 1, 0, "srun started 4 processes, but each sees only itself"),
        (SRUN, 4, 1, "rank 1 of 4, Slurm that it is task 2 of 4"),
        (SRUN, 8, 2, "rank 2 of 8, Slurm that it is task 2 of 4"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, 1, 0, ""),
        # mpiexec within a job: srun has started a daemon on each node
        ({**SRUN, "MPI_LOCALNRANKS": "8", "PMI_SIZE": "16"}, 16, 9, ""),
        ({**SRUN, "OMPI_COMM_WORLD_SIZE": "16"}, 16, 9, ""),
        # the script of sbatch itself
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, 1, 0, ""),
    ],
)  # fmt: skip
def test_slurm_and_mpi_agree_or_say_why_not(environ: dict[str, str], size: int, rank: int, message: str) -> None:
    told = problem(size, rank, environ)
    assert message in told
    assert bool(told) == bool(message)
