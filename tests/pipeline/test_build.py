"""Models as data, as lists of layers, and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.errors import ConfigError
from parlinalg.pipeline import (
    PipelineModel,
    build_by_hand,
    build_pipeline_model,
    build_pipeline_model_from_cfg,
    make_schedule,
    register,
    registered,
)
from parlinalg.train import launch
from tests.conftest import SIZE

LAYERS = [
    {"type": "Linear", "in_features": 3, "out_features": 16},
    {"type": "ReLU"},
    {"type": "Linear", "in_features": 16, "out_features": 16},
    {"type": "LayerNorm", "hidden": 16},
    {"type": "Sequential", "layers": [{"type": "Linear", "in_features": 16, "out_features": 5}, {"type": "Tanh"}]},
    {"type": "Dropout", "p": 0.25},
    {"type": "Linear", "in_features": 5, "out_features": 5, "bias": False},
    {"type": "GELU", "approximate": "tanh"},
]


def mesh_of(world: Any, backend: str, **more: Any) -> Any:
    return launch({"parallel": {"pipeline": SIZE}, "dtype": "float64", **more}, world, backend)


@pytest.mark.ranks(1, 2, 3)
def test_a_model_as_data_is_what_its_layers_are(world: Any, backend: str) -> None:
    with mesh_of(world, backend) as mesh:
        part = build_pipeline_model_from_cfg(LAYERS, mesh=mesh, seed=2)
        own: list[Any] = [
            nn.Linear(3, 16, mesh.scheme, mesh.grid, dtype=np.float64), nn.ReLU(),
            nn.Linear(16, 16, mesh.scheme, mesh.grid, "contract", dtype=np.float64),
            nn.LayerNorm(16, mesh.scheme, mesh.grid, dtype=np.float64),
            nn.Sequential(nn.Linear(16, 5, mesh.scheme, mesh.grid, dtype=np.float64), nn.Tanh()),
            nn.Dropout(0.25), nn.Linear(5, 5, mesh.scheme, mesh.grid, dtype=np.float64, bias=False), nn.GELU("tanh"),
        ]  # fmt: skip
        whole = nn.Sequential(*own)
        other = build_pipeline_model(nn.Sequential(*own), seed=2)
        whole.initialize(2)
        want = whole.state_dict()
        for found in (part, other):
            state = found.state_dict()
            assert list(state) == list(want)
            assert all(np.array_equal(state[n], want[n]) for n in want)
        assert part.counts == other.counts
        if SIZE == 1:
            x = pla.Tensor(pla.ones((4, 3), mesh.grid, pla.Layout(None, None), "float64"))
            with nn.training_step(1):
                right = whole(x).gather()
            with nn.training_step(1):
                assert np.array_equal(part(x).gather(), right)


@pytest.mark.ranks(1, 2, 3)
def test_chunks_and_partitions(world: Any, backend: str) -> None:
    layers = [{"type": "Linear", "in_features": 4, "out_features": 4} for _ in range(4 * SIZE)]
    with mesh_of(world, backend) as mesh:
        part = build_pipeline_model_from_cfg(layers, 2, mesh=mesh)
        assert [stage.number for stage in part.chunks] == [world.rank, world.rank + SIZE]
        assert part.counts == (2,) * (2 * SIZE)
        counts = [3, *[4] * (SIZE - 1)]
        counts[-1] += 4 * SIZE - sum(counts)
        part = build_pipeline_model_from_cfg({"layers": layers, "partition": counts, "dtype": "float32"}, mesh=mesh)
        assert part.counts == tuple(counts)
        assert part.inventory["0.weight"].dtype == np.float32
        with pytest.raises(ConfigError, match="num_chunks=2, but a rank of the schedule '1f1b' holds 1"):
            build_pipeline_model_from_cfg(layers, 2, mesh=mesh, schedule=make_schedule("1f1b", SIZE, 2))


@pytest.mark.ranks(1, 2, 3)
def test_stages_by_hand(world: Any, backend: str) -> None:
    """Each rank builds its own stage; names, states and counts are known on all ranks."""
    with mesh_of(world, backend) as mesh:
        rank = mesh.rank("pipeline")
        modules = [nn.Linear(3 + rank, 4 + rank, mesh.scheme, mesh.grid, dtype=np.float64)]
        own: Any = modules[0] if rank % 2 else nn.Sequential(*modules, nn.ReLU())
        part: PipelineModel = build_by_hand(own, mesh=mesh, seed=4)
        inner = ["0." if r % 2 == 0 else "" for r in range(SIZE)]
        assert list(part.inventory) == [f"{r}.{inner[r]}{n}" for r in range(SIZE) for n in ("weight", "bias")]
        assert part.counts == tuple(2 - r % 2 for r in range(SIZE))
        state = part.state_dict()
        assert [state[n].shape for n in state if n.endswith("weight")] == [(3 + r, 4 + r) for r in range(SIZE)]
        part.load_state_dict({n: a * 2 for n, a in state.items()})
        assert all(np.array_equal(a, 2 * state[n]) for n, a in part.state_dict().items())
        wrong = [own] * (1 + (rank == 0))
        with pytest.raises(ConfigError, match=r"rank 0 builds 2 stages by hand, but 1f1b gives it 1"):
            build_by_hand(wrong, mesh=mesh, schedule=make_schedule("1f1b", SIZE, 2))


@pytest.mark.serial
def test_a_layer_that_makes_another_is_given_its_type() -> None:
    block = {"type": "TransformerBlock", "hidden": 12, "heads": 4, "inner": 8}
    with launch({}) as mesh:
        part = build_pipeline_model_from_cfg(
            [{**block, "mlp": {"type": "MixtureOfExperts", "experts": 3, "top_k": 1}}], mesh=mesh
        ).initialize(0)  # fmt: skip
        mixture = next(m for m in part.modules() if isinstance(m, nn.MixtureOfExperts))
        assert (mixture.hidden, mixture.inner, mixture.experts, mixture.top_k) == (12, 8, 3, 1)
        with pytest.raises(ConfigError, match=r"layers\[0\]\.mlp .* no argument 'top': did you mean 'top_k'"):
            build_pipeline_model_from_cfg([{**block, "mlp": {"type": "MixtureOfExperts", "top": 3}}], mesh=mesh)


@register
class Scaled(nn.Module):
    """A layer of a user."""

    def __init__(self, by: float, grid: Any) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Any) -> Any:
        return x * self.by


@pytest.mark.serial
def test_users_add_types() -> None:
    register("Halved")(lambda: Scaled(0.5, None))
    with launch({}) as mesh:
        part = build_pipeline_model_from_cfg(
            [{"type": "Scaled", "by": 3.0}, {"type": "Halved"}, nn.ReLU()], mesh=mesh
        ).initialize(0)  # fmt: skip
        x = pla.Tensor(pla.ones((2, 3), mesh.grid, pla.Layout(None, None), "float64"))
        assert float(part(x).gather()[0, 0]) == 1.5
    assert {"Scaled", "Halved", "Linear"} <= set(registered())
    register(Scaled)  # again the same
    with pytest.raises(ConfigError, match="a type of layers 'Linear' is registered already"):
        register(Scaled, "Linear")
    with pytest.raises(ConfigError, match="takes a class, or a function that makes a module, not 3"):
        register(3)


@pytest.mark.serial
@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], r"layers is a list of dicts"),
        ({"layer": []}, r"a dict with layers=\[…\] .* not one with the keys 'layer'"),
        ([3], r"layers\[0\] is 3: a layer is a dict with a type"),
        ([{"in_features": 3}], r"layers\[0\] is .*a dict with a type, such as dict\(type='Linear'"),
        ([{"type": "Linaer"}], r"layers\[0\] has the type 'Linaer', .*did you mean 'Linear'\?  There are Adaptive"),
        ([{"type": "ReLU"}, {"type": "Linear", "in_featurs": 3}], r"layers\[1\] \(Linear\) has no argument "
         r"'in_featurs': did you mean 'in_features'\?  It takes in_features, out_features, kind"),
        ([{"type": "Linear", "in_features": 3}], r"\(Linear\): missing a required argument: 'out_features'"),
        ([{"type": "Sequential", "layers": [{"type": "Relu"}]}], r"layers\[0\].layers\[0\] has the .* mean 'ReLU'"),
        ([{"type": "Sequential"}], r"layers\[0\] \(Sequential\) takes layers=\[…\]"),
    ],
)  # fmt: skip
def test_wrong_data_says_what_is_right(layers: Any, message: str) -> None:
    with launch({}) as mesh, pytest.raises(ConfigError, match=message):
        build_pipeline_model_from_cfg(layers, mesh=mesh)


@pytest.mark.ranks(1, 2)
def test_what_is_no_model(world: Any, backend: str) -> None:
    """Told on all ranks, where one alone is wrong too."""
    alone = world.rank == SIZE - 1
    with mesh_of(world, backend) as mesh:
        part = build_pipeline_model_from_cfg(LAYERS, mesh=mesh)
        for right, make_schedule in {
            r"takes a model, such as nn\.Sequential\(\*layers\), not list": lambda: build_pipeline_model([part]),
            "is cut into stages already": lambda: build_pipeline_model(part),
            "give mesh=.*, not int": lambda: build_pipeline_model_from_cfg(LAYERS, mesh=3),
            "dtype must be such as .* not 'float63'": lambda: build_pipeline_model_from_cfg(
                LAYERS, mesh=mesh, dtype="float63"
            ),
            "partition is a name, or a list .* not 3": lambda: build_pipeline_model_from_cfg(
                LAYERS, mesh=mesh, partition=3
            ),
            "a parameter of shape .*-3.* cannot be": lambda: build_pipeline_model_from_cfg(
                [{"type": "Linear", "in_features": 3, "out_features": -3}] * SIZE, mesh=mesh
            ),
            f"rank {SIZE - 1} builds a stage by hand that is 3, no Module": lambda: build_by_hand(
                3 if alone else nn.ReLU(), mesh=mesh
            ),
            "'Linaer', which is not registered": lambda: build_pipeline_model_from_cfg(
                [{"type": "Linaer"}] if alone else LAYERS, mesh=mesh
            ),
        }.items():
            with pytest.raises(ConfigError, match=right):
                make_schedule()
        if SIZE > 1:
            with pytest.raises(ConfigError, match="rank 1 cuts another model than rank 0"):
                build_pipeline_model_from_cfg(LAYERS[:-1] if alone else LAYERS, mesh=mesh)


@pytest.mark.ranks(1, 2)
def test_the_mesh_that_is_launched(world: Any, backend: str) -> None:
    """The only one open is the default; none, or several, are told."""
    for build in (lambda: build_pipeline_model_from_cfg(LAYERS, 1), lambda: build_by_hand(nn.ReLU())):
        with pytest.raises(ConfigError, match="give mesh=parlinalg"):
            build()
    with mesh_of(world, backend) as mesh:
        given, found = (build_pipeline_model_from_cfg(LAYERS, seed=2, **m) for m in ({"mesh": mesh}, {}))
        assert given.grid is found.grid is mesh.grid
        theirs = dict(given.named_parameters())
        for name, parameter in found.named_parameters():
            np.testing.assert_array_equal(parameter.gather(), theirs[name].gather())
        assert build_by_hand([nn.ReLU() for _ in found.chunks]).grid is mesh.grid
        with (
            mesh_of(world, backend),
            pytest.raises(ConfigError, match="2 meshes are launched and not closed: say which"),
        ):
            build_pipeline_model_from_cfg(LAYERS)
        assert build_pipeline_model_from_cfg(LAYERS).grid is mesh.grid


@pytest.mark.ranks(1, 2)
def test_layers_that_are_no_list(world: Any, backend: str) -> None:
    class Odd(nn.Module):
        def __init__(self, mesh: Any, given: Any) -> None:
            super().__init__()
            self.inner, self.layers = nn.Linear(3, 3, mesh.scheme, mesh.grid), lambda: given

    with mesh_of(world, backend) as mesh:
        for given in (None, [], "inner"):
            with pytest.raises(ConfigError, match=r"Odd\.layers\(\) gives .*: it is a list of its layers"):
                build_pipeline_model(Odd(mesh, given))
