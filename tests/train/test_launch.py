"""The mesh: who is where, and what is refused on all ranks alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from parlinalg.comm.together import together
from parlinalg.errors import ConfigError
from parlinalg.train.launch import launch
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
