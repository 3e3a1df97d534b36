"""Models of one's own: plain members, lists of modules, layers listed in every way, on every grid."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.autograd import ops
from parlinalg.comm import SingleComm
from parlinalg.errors import ConfigError
from parlinalg.optim import AdamW, decay_groups
from parlinalg.schemes.data import SCHEME as DATA
from tests.conftest import SIZE

CLOSE = 1e-12
SETTINGS: dict[str, Any] = {"dtype": "float64", "seed": 3}
PIPELINES: list[tuple[int, dict[str, Any]]] = [
    (2, {"parallel": {"pipeline": 2}}),
    (3, {"parallel": {"pipeline": 3}, "schedule": {"name": "gpipe", "microbatches": 2}}),
    (4, {"parallel": {"pipeline": 2, "data": 2}, "zero": 3, "schedule": {"name": "1f1b", "microbatches": 2}}),
]
GRIDS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"parallel": {"data": 2}, "zero": 3}),
    (3, {"parallel": {"data": 3}, "zero": 3}),
    (4, {"parallel": {"data": 2, "tensor": {"size": 2, "mode": "1d"}}, "zero": 3}),
    (4, {"parallel": {"tensor": {"size": 4, "mode": "2d"}}}),
]


class Unlisted(nn.Module):
    """A model without `layers()`."""

    def __init__(self, scheme: Any, grid: Any) -> None:
        super().__init__()
        own: dict[str, Any] = {"scheme": scheme, "grid": grid, "dtype": "float64"}
        self.norm = nn.LayerNorm(7, **own)
        self.inward = nn.Linear(7, 10, **own)
        self.act = nn.Tanh()
        self.outward = nn.Linear(10, 6, kind="contract", **own)
        self.blocks = nn.ModuleList(nn.MLP((6, n, 6), activation="gelu", **own) for n in (5, 9))
        self.head = nn.Linear(6, 5, **own)

    def forward(self, x: Any) -> Any:
        x = self.outward(self.act(self.inward(self.norm(x))))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Modules(Unlisted):
    """Its layers are plain modules."""

    def layers(self) -> list[Any]:
        return [self.norm, self.inward, self.act, self.outward, *self.blocks, self.head]


class Layers(Unlisted):
    """Its layers are `nn.Layer`s, some of which use several modules."""

    def layers(self) -> list[Any]:
        return [nn.Layer("in", lambda x: self.act(self.inward(self.norm(x))), (self.norm, self.inward, self.act)),
                nn.Layer("out", self.outward, (self.outward,)),
                *(nn.Layer(f"blocks.{i}", b, (b,)) for i, b in enumerate(self.blocks)),
                nn.Layer("head", self.head, (self.head,))]  # fmt: skip


class Mixture(Unlisted):
    """Its layers are modules and `nn.Layer`s, as it comes."""

    def layers(self) -> list[Any]:
        return [self.norm, nn.Layer("in", lambda x: self.act(self.inward(x)), (self.inward, self.act)), self.outward,
                *self.blocks, nn.Layer("head", self.head, (self.head,))]  # fmt: skip


class Stages(Unlisted):
    """A list of modules for each of two stages."""

    def __init__(self, scheme: Any, grid: Any) -> None:
        super().__init__(scheme, grid)
        self.stages = [[self.norm, self.inward, self.act, self.outward], [*self.blocks, self.head]]


class Bare(Unlisted):
    """A stage of an activation, and one of all the others."""

    def __init__(self, scheme: Any, grid: Any) -> None:
        super().__init__(scheme, grid)
        self.stages = [[self.act], [self.norm, self.inward, self.outward, *self.blocks, self.head]]

    def forward(self, x: Any) -> Any:
        for layer in (*self.stages[0], *self.stages[1]):
            x = layer(x)
        return x


class NormAlone(Unlisted):
    """A stage of a norm, which ZeRO's stage 3 leaves whole, and one of all the others."""

    def __init__(self, scheme: Any, grid: Any) -> None:
        super().__init__(scheme, grid)
        self.stages = [[self.norm], [self.inward, self.act, self.outward, *self.blocks, self.head]]


LISTED = [Modules, Layers, Mixture]


def pairs() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [(rng.normal(size=(11, 7)), rng.integers(0, 5, 11)) for _ in range(4)]


def trained(kind: type[Unlisted], settings: dict[str, Any], comm: Any, backend: str) -> tuple[list[float], Any, Any]:
    """Losses, the parameters after them, and what gathers weights."""
    with pla.launch({**SETTINGS, **settings}, comm, backend) as mesh:
        model = kind(mesh.scheme, mesh.grid)
        engine, feed, _, _ = pla.initialize(
            model, lambda p: AdamW(decay_groups(p, 0.3), lr=0.02), ops.cross_entropy_sum, pairs()
        )
        assert [g["weight_decay"] for g in engine.optimizer.param_groups] == [0.3, 0.0]
        losses = []
        for x, y in feed:
            if engine.schedule is not None:
                _, _, loss = engine.execute_schedule(iter([(x, y)]))
            else:
                loss = engine.criterion(engine(x), y)
                engine.backward(loss)
            engine.step()
            losses.append(float(loss if isinstance(loss, float) else loss.item()))
        gatherers = {id(g): g for p in engine.parameters() if (g := p.storage.gatherer) is not None}
        return losses, engine.model.state_dict(), list(gatherers.values())


@cache
def alone() -> tuple[list[float], Any]:
    return trained(Unlisted, {}, SingleComm(), "numpy")[:2]


def same(got: tuple[list[float], Any, Any]) -> None:
    losses, state = alone()
    np.testing.assert_allclose(got[0], losses, rtol=CLOSE)
    assert got[1].keys() == state.keys()
    for name, value in state.items():
        np.testing.assert_allclose(got[1][name], value, rtol=0, atol=CLOSE)


@pytest.mark.ranks(*sorted({n for n, _ in GRIDS}))
@pytest.mark.parametrize("kind", [Unlisted, *LISTED])
def test_losses_are_those_of_one_rank(kind: Any, world: Any, backend: str) -> None:
    for settings in (s for n, s in GRIDS if n == SIZE):
        got = trained(kind, settings, world, backend)
        same(got)
        if settings.get("zero") == 3:
            (gatherer,) = got[2]
            blocks = {gatherer.block_of[i] for i in range(len(gatherer.parameters))}
            assert len(blocks) == {Unlisted: 6, Modules: 6, Layers: 5, Mixture: 6}[kind]
            assert gatherer.missed == 0


@pytest.mark.ranks(*sorted({n for n, _ in PIPELINES}))
@pytest.mark.parametrize("kind", [*LISTED, Stages])
def test_pipelines_give_the_losses_of_one_rank(kind: Any, world: Any, backend: str) -> None:
    for settings in (s for n, s in PIPELINES if n == SIZE):
        if kind is Stages and settings["parallel"]["pipeline"] != 2:
            continue
        same(trained(kind, settings, world, backend))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", [Bare, NormAlone])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_stage_without_weights_to_cut_trains(kind: Any, schedule: str, world: Any, backend: str) -> None:
    """With ZeRO's stage 3 it raised on the ranks of that stage alone; the others waited."""
    form = {"parallel": {"pipeline": 2, "data": 2}, "schedule": {"name": schedule, "microbatches": 2}}
    want, *_ = trained(kind, {}, SingleComm(), "numpy")
    for zero in (0, 3):
        got, *_ = trained(kind, {**form, "zero": zero}, world, backend)
        np.testing.assert_allclose(got, want, rtol=CLOSE)


@pytest.mark.ranks(4)
def test_a_model_of_which_no_weight_is_cut_is_refused_on_all_ranks(world: Any, backend: str) -> None:
    with pla.launch({**SETTINGS, "parallel": {"pipeline": 2, "data": 2}, "zero": 3}, world, backend) as mesh:
        for kind in (Bare, NormAlone, Stages):
            with pytest.raises(ConfigError, match="no weight of this model rests cut by it"):
                pla.initialize(kind(DATA, mesh.grid), AdamW, ops.cross_entropy_sum)


@pytest.mark.ranks(1, 2)
def test_groups_that_a_configuration_names(world: Any, backend: str) -> None:
    parallel = {"parallel": {"pipeline": SIZE}} if SIZE > 1 else {}
    for no_decay, decayed in [(True, 7), (["norm", "bias"], 7), (["blocks.*"], 8), (False, None)]:
        optimizer = {"name": "adamw", "lr": 0.02, "weight_decay": 0.3, "no_decay": no_decay}
        with pla.launch({**SETTINGS, **parallel, "optimizer": optimizer}, world, backend) as mesh:
            engine, *_ = pla.initialize(Modules(mesh.scheme, mesh.grid), criterion=ops.cross_entropy_sum)
            groups = engine.optimizer.param_groups
            assert [g["weight_decay"] for g in groups] == ([0.3] if decayed is None else [0.3, 0.0])
            if decayed is not None:
                assert sum(world.share(len(groups[0]["params"]))) == decayed
    for wrong in ("bias", [3], [""]):
        with pytest.raises(ConfigError, match=r"optimizer\.no_decay"):
            pla.launch({"optimizer": {"name": "adamw", "no_decay": wrong}}, world, backend)


@pytest.mark.ranks(2)
def test_unlike_groups_are_told_on_all_ranks(world: Any, backend: str) -> None:
    def groups(parameters: Any) -> Any:
        named = decay_groups(parameters, 0.1)
        return named if world.rank == 0 else [{**named[0], "weight_decay": 0.2}, named[1]]

    def fewer(parameters: Any) -> Any:
        return decay_groups(parameters, 0.1) if world.rank == 0 else list(parameters)

    for settings, make, words in [
        ({"data": 2}, groups, "parameter groups of rank 1 have other options or parameters than those of rank 0"),
        ({"pipeline": 2}, fewer, "optimizer of rank 1 has 1 parameter groups, that of rank 0 2: make the same groups"),
    ]:
        with pla.launch({**SETTINGS, "parallel": settings}, world, backend) as mesh:
            model = Modules(mesh.scheme, mesh.grid)
            with pytest.raises(ConfigError, match=words):
                pla.initialize(model, lambda p, make=make: AdamW(make(p), lr=0.1), ops.cross_entropy_sum)


@pytest.mark.ranks(2)
def test_a_model_that_lists_no_layers_cannot_be_cut(world: Any, backend: str) -> None:
    class Member(nn.Module):
        def __init__(self, scheme: Any, grid: Any) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(7, 5, scheme, grid)])

    with pla.launch({**SETTINGS, "parallel": {"pipeline": 2}}, world, backend) as mesh:
        for kind, words in [
            (Unlisted, r"Unlisted cannot be cut into stages: give it a method layers\(\)"),
            (Member, r"its member `layers`, a ModuleList, does not say .*: give it another name"),
        ]:
            with pytest.raises(ConfigError, match=words):
                pla.initialize(kind(mesh.scheme, mesh.grid), AdamW, ops.cross_entropy_sum)
