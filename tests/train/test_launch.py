"""The mesh: who is where, and what is refused on all ranks alike."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg.comm import together
from parlinalg.errors import CommError, ConfigError
from parlinalg.train import launch
from tests.conftest import SIZE
from tests.launching import launch as start
from tests.train.trainings import main


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
        assert (mesh.spec.ring, mesh.spec.order_of(True), mesh.spec.order_of(False)) == (
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
        assert mesh.topology.ranks == (tuple(range(0, SIZE, 2)), tuple(range(1, SIZE, 2)))
        assert mesh.world is world
        assert mesh.grid.rank_of(mesh.grid.coords) == mesh.topology.ranks[mesh.topology.rank].index(world.rank)
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
@pytest.mark.usefixtures("quick")
def test_every_rank_has_its_place(
    seven: Path, folder: Path, world: Any, backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """`ranks.json` and the map at the start: of all ranks, also those of other stages."""
    parallel = {"data": 1, "pipeline": 3, "tensor": {"size": 2, "mode": "1d"}}
    settings = {"parallel": parallel, "schedule": "zb-v", "backend": backend, "steps": 1, "data": str(seven),
                "model": {"hidden": (9, 8, 7, 6, 5)}, "checkpoint": False}  # fmt: skip
    assert main(settings, folder, comm=world) == 0
    world.barrier()
    found = json.loads((folder / "ranks.json").read_text())
    assert [place["rank"] for place in found] == list(range(6))
    assert [place["coords"] for place in found] == [{"pipeline": r // 2, "t": r % 2} for r in range(6)]
    assert [place["stages"] for place in found[::2]] == [[0, 5], [1, 4], [2, 3]]
    text = capfd.readouterr().out
    if world.rank == 0:
        assert "ranks       6 = pipeline 3 × tensor 2 (1d: t=2), on 1 node" in text
        assert "pipeline 2: ranks 4–5, node 0; stages 2, 3" in text


@pytest.mark.ranks(6)
def test_pipelines_of_unlike_grids(world: Any, backend: str) -> None:
    each = [{"size": 1}, {"size": 2, "mode": "1d"}]
    with launch({"parallel": {"pipeline": {"tensor": each}}}, world, backend) as mesh:
        assert mesh.topology.ranks == ((0, 3), (1, 2, 4, 5))
        assert mesh.topology.sizes == ({"data": 2}, {"data": 2, "t": 2})
        assert mesh.rank("data") == world.rank // 3
        assert mesh.rank("tensor") == max(0, world.rank % 3 - 1)
        assert mesh.scheme.name == ("data × 1d" if world.rank % 3 else "data × serial")
        with pytest.raises(ConfigError, match="grids of the pipeline's ranks differ"):
            mesh.comm("pipeline")
    with launch(
        {"parallel": {"pipeline": {"tensor": each}}, "zero": {"stage": 1, "within": 1}}, world, backend
    ) as mesh:
        assert mesh.grid.sizes["replica"] == mesh.size("data") == 2


@pytest.mark.ranks(4, 8)
def test_data_parallel_ranks_share_within_groups(world: Any, backend: str) -> None:
    parallel = {"tensor": {"size": SIZE // 4, "mode": "1d"}}

    def made(zero: object, parallel: dict[str, Any] = parallel) -> tuple[dict[str, int], Any]:
        with launch({"parallel": parallel, "zero": zero}, world, backend) as mesh:
            return mesh.grid.sizes, mesh.scheme

    whole = made(None)
    assert whole[0] == {"data": 4, "t": SIZE // 4}
    assert made({"stage": 0, "within": 2}) == whole
    assert made(2)[0] == whole[0]
    sizes, scheme = made({"stage": 3, "within": 2})
    assert sizes == {"replica": 2, "data": 2, "t": SIZE // 4}
    assert scheme.axes == ("replica", "data", "t")
    assert {"data", "t"} <= set(scheme.expand.w.cut_axes)
    with pytest.raises(ConfigError, match=r"zero\.within=3 does not divide the 4 data parallel ranks: .* 1, 2 or 4"):
        made({"stage": 1, "within": 3})
    alone = {"tensor": {"mode": "1d"}}
    assert made({"stage": 2, "within": 2}, alone) == made(None, alone)
    groups = {**parallel, "experts": 2}
    assert made(None, groups)[0] == made(1, groups)[0] == sizes, "at every stage"
    assert {"replica", "data"} <= set(made(3, groups)[1].expand.w.cut_axes)
    assert not {"replica"} & set(made({"stage": 3, "within": 2}, groups)[1].expand.w.cut_axes)
    assert made({"stage": 3, "within": 4}, groups)[1] == made(3, groups)[1]
    assert made(1, {**parallel, "experts": 4})[0] == whole[0]
    with pytest.raises(
        ConfigError, match=r"parallel\.experts=2 and zero\.within=1 are groups of unlike sizes of the 4 "
    ):
        made({"stage": 1, "within": 1}, groups)


@pytest.mark.ranks(8)
def test_ranks_that_share_experts_are_next_to_one_another(world: Any, backend: str) -> None:
    """The pipeline is outside of them, and inside of the groups that hold copies."""
    with launch({"parallel": {"pipeline": 2, "experts": 2}}, world, backend) as mesh:
        assert mesh.topology.ranks == ((0, 1, 4, 5), (2, 3, 6, 7))
        assert mesh.rank("data") == 2 * (world.rank // 4) + world.rank % 2
        assert (mesh.rank("pipeline"), mesh.grid.sizes) == (world.rank // 2 % 2, {"replica": 2, "data": 2})


@pytest.mark.ranks(2, 4)
@pytest.mark.usefixtures("quick")
def test_gradients_are_reduced_once_whatever_handlers_are_named(
    seven: Path, folder: Path, world: Any, backend: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """ZeRO is what is done over the data axis; a handler of an axis of one rank does nothing; the opening says so."""
    base = {"steps": 1, "data": str(seven), "model": {"hidden": (9,)}, "checkpoint": False, "backend": backend}

    def trained(**more: Any) -> tuple[list[Any], list[str]]:
        capfd.readouterr()
        assert main({**base, **more}, folder, comm=world) == 0
        world.barrier()
        text = world.share(capfd.readouterr().out)[0]
        counted = text[text.index("communication of rank 0") : text.index("written to")]
        metrics = json.loads((folder / "metrics.jsonl").read_text())
        words = re.findall(r"^.*$", counted, re.MULTILINE)
        return [metrics["loss"], metrics["grad_norm"], *words], re.findall(r"^zero +(.*)$", text, re.MULTILINE)

    want = trained(zero=2)
    assert trained(zero=2, gradient_handler=["DataParallel"]) == want
    assert want[1] == [f"stage 2: optimizer states and gradients shared by {SIZE} ranks"]
    tensor = {"parallel": {"tensor": {"mode": "1d"}}}
    want = trained(**tensor)
    assert want[1] == []
    assert trained(**tensor, gradient_handler=["DataParallel", "SequenceParallel"]) == want
    assert trained(**tensor, zero=2)[1] == ["stage 2: nothing to share, there is one rank in a group"]
    if SIZE == 4:
        said = "stage 2: optimizer states and gradients shared by 2 ranks, in 2 groups that hold copies"
        assert trained(zero={"stage": 2, "within": 2})[1] == [said]
        assert trained(zero=2, parallel={"experts": 2})[1] == [
            f"stage 2: optimizer states and gradients shared by {SIZE} ranks"
        ]


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


SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_ID": "0"}
ALONE = "srun started 4 processes, but each sees only itself"
SLURM: list[tuple[int, dict[str, str], list[int], str]] = [
    # ranks by mpiexec, or 0; what Slurm says, but for the number of the task; the tasks of the ranks; the problem
    (0, {}, [], ""),
    (4, SRUN, [0, 1, 2, 3], ""),
    (0, SRUN, [0], ALONE),
    (0, SRUN, [2], ALONE),
    (4, SRUN, [0, 2, 1, 3], "rank 1 of 4, Slurm that it is task 2 of 4"),
    (4, {**SRUN, "SLURM_STEP_NUM_TASKS": "2"}, [0, 1, 0, 1], "rank 0 of 4, Slurm that it is task 0 of 2"),
    (4, {**SRUN, "SLURM_STEP_NUM_TASKS": "8"}, [0, 1, 2, 3], "rank 0 of 4, Slurm that it is task 0 of 8"),
    (0, {**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, [0], ""),
    # mpiexec within a job: srun has started a daemon on each node
    (4, {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "MPI_LOCALNRANKS": "2", "PMI_SIZE": "4"}, [0, 0, 1, 1], ""),
    (4, {**SRUN, "SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "4"}, [0, 0, 1, 1], ""),
    # the script of sbatch itself
    (0, {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}, [0], ""),
]
MEET = """
import json, os, sys
from parlinalg.comm import open_comm
from parlinalg.errors import CommError
world, said = open_comm(), []
for environ, tasks in json.loads(sys.argv[1]):
    for name in [n for n in os.environ if n.startswith(("SLURM_", "PMI_", "OMPI_COMM_", "MPI_LOCAL"))]:
        del os.environ[name]
    os.environ.update(environ)
    if tasks:
        os.environ["SLURM_PROCID"] = str(tasks[world.rank])
    try:
        open_comm().free()
        said.append("")
    except CommError as error:
        said.append(str(error))
everyone = world.share(said)
if world.rank == 0:
    print(json.dumps(everyone))
"""


@pytest.mark.serial
@pytest.mark.parametrize("ranks", [0, 4])
def test_slurm_and_mpi_agree_or_say_why_not(ranks: int) -> None:
    """On all ranks alike."""
    rows = [(environ, tasks, message) for n, environ, tasks, message in SLURM if n == ranks]
    done = start(ranks, ["-c", MEET, json.dumps([row[:2] for row in rows])])
    assert done.returncode == 0, done.stderr
    for told in json.loads(done.stdout):
        for text, (environ, tasks, message) in zip(told, rows, strict=True):
            assert message in text, (environ, tasks)
            assert bool(text) == bool(message), (environ, tasks)
