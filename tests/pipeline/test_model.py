"""Models cut into stages: what each rank holds, and that one after the other they are the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from parlinalg.errors import ConfigError
from parlinalg.nn import Layer
from parlinalg.pipeline import PipelineModel, PipelineTopology, make_schedule, split
from parlinalg.train import Mesh, launch
from tests.conftest import SIZE

SERIAL = schemes.discover()["serial"].SCHEME
TINY = {"vocab_size": 11, "max_position_embeddings": 7, "hidden_size": 12, "num_hidden_layers": 5}


def gpt(scheme: Any, grid: Any, **options: Any) -> nn.GPT:
    sizes = {**TINY, "num_attention_heads": 3, "embd_pdrop": 0.1, "resid_pdrop": 0.1, **options}
    return nn.GPT(**sizes, scheme=scheme, grid=grid, dtype=np.float64)


def llama(scheme: Any, grid: Any) -> nn.Llama:
    return nn.Llama(
        **TINY, num_attention_heads=3, intermediate_size=20, scheme=scheme, grid=grid, dtype=np.float64
    )  # fmt: skip


def bert(scheme: Any, grid: Any) -> nn.BertEncoder:
    return nn.BertEncoder(
        **TINY, num_attention_heads=3, intermediate_size=20, scheme=scheme, grid=grid, dtype=np.float64
    )  # fmt: skip


def vit(scheme: Any, grid: Any) -> nn.ViT:
    return nn.ViT(
        image_size=8, patch_size=4, num_channels=3, num_labels=5, hidden_size=12, num_hidden_layers=5,
        num_attention_heads=3, intermediate_size=20, scheme=scheme, grid=grid, dtype=np.float64,
    )  # fmt: skip


def mlp(scheme: Any, grid: Any) -> nn.MLP:
    return nn.MLP((6, 7, 8, 9, 10), scheme, grid, dropout=0.2, dtype=np.float64)


MODELS: dict[str, Callable[[Any, Any], Any]] = {"gpt": gpt, "llama": llama, "bert": bert, "vit": vit, "mlp": mlp}


def inputs(name: str, model: Any) -> Any:
    random = np.random.default_rng(3)
    grid = model.grid if hasattr(model, "grid") else next(iter(model.parameters())).grid
    if name == "vit":
        return pla.distribute(random.normal(size=(3, 3, 8, 8)), grid, model.images_layout)
    if name == "mlp":
        return pla.distribute(random.normal(size=(3, 6)), grid, model.input_layout())
    return pla.distribute(random.integers(0, 11, (3, 7)), grid, model.ids_layout)


@contextmanager
def pipelined(world: Any, backend: str, **parallel: Any) -> Iterator[Mesh]:
    with launch({"parallel": parallel}, world, backend) as mesh:
        yield mesh


@pytest.mark.serial
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_stages_after_one_another_are_the_model(name: str, stages: int, make_grid: Callable[..., Any]) -> None:
    grid = make_grid({"data": 1})
    model, place = MODELS[name](SERIAL, grid), PipelineTopology.alone(sizes={"data": 1})
    part = split(
        model, place, make_schedule("1f1b", 1, 2) if stages == 1 else make_schedule("interleaved", 1, 2, stages)
    )
    part.initialize(3)
    serial = MODELS[name](SERIAL, grid).initialize(3)
    x = inputs(name, serial)
    with nn.training_step(4):
        want = serial(x)
    if name == "bert":
        want = serial.logits(want)
    with nn.training_step(4):
        found = part(x)
    assert np.array_equal(found.data.gather(), want.data.gather())
    assert dict(part.named_parameters()).keys() == dict(serial.named_parameters()).keys() == part.inventory.keys()
    assert sum(part.counts) == (7 if name != "mlp" else 10), "blocks and both ends, or linears, ReLUs and dropouts"


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", MODELS)
def test_ranks_hold_their_stages_only(name: str, world: Any, backend: str, make_grid: Callable[..., Any]) -> None:
    with pipelined(world, backend, pipeline=SIZE) as mesh:
        model = MODELS[name](mesh.scheme, mesh.grid)
        part: PipelineModel = split(model, mesh.topology, make_schedule("1f1b", SIZE, 2)).initialize(3)
        assert [stage.number for stage in part.chunks] == [world.rank]
        assert len(part.layers()) == part.counts[world.rank] >= 1
        names = world.share([n for n, _ in part.named_parameters()])
        held: dict[str, list[int]] = {}
        for number, theirs in enumerate(names):
            for n in theirs:
                held.setdefault(n, []).append(number)
        assert {n: held.stages for n, held in part.inventory.items()} == {n: tuple(s) for n, s in held.items()}
        tied = ["embedding.weight"] if name in ("gpt", "bert") else []
        assert list(part.shared) == tied
        assert all(part.owner(n) == 0 for n in tied)

        grid = make_grid({"data": SIZE})
        serial = MODELS[name](schemes.discover()["data"].SCHEME, grid).initialize(3)
        state, want = part.state_dict(), serial.state_dict()
        assert list(state) == list(want)
        assert all(np.array_equal(state[n], want[n]) for n in want)
        other = {n: a + 1 for n, a in want.items()}
        part.load_state_dict(other)
        assert all(np.array_equal(a, other[n]) for n, a in part.state_dict().items())


@pytest.mark.ranks(2, 4)
def test_a_model_with_values_leaves_those_of_other_stages(world: Any, backend: str) -> None:
    with pipelined(world, backend, pipeline=SIZE) as mesh:
        model = gpt(mesh.scheme, mesh.grid).initialize(5)
        whole = model.nbytes
        part = split(model, mesh.topology, make_schedule("1f1b", SIZE, 2))
        assert part.nbytes < whole
        assert model.nbytes == whole  # declared, not made
        with pytest.raises(ConfigError, match="has no values yet"):
            list(model.parameters())
        assert all(p.name for p in part.parameters())


class Twice(nn.Module):
    """A model with stages of its own."""

    def __init__(self, scheme: Any, grid: Any) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4, scheme, grid), nn.Linear(4, 3, scheme, grid, "contract")
        self.relu = nn.ReLU()

    def stages(self) -> list[Any]:
        return [self.one, [self.relu, Layer("last", self.two, (self.two,))]]


@pytest.mark.serial
def test_models_with_stages_of_their_own(make_grid: Callable[..., Any]) -> None:
    grid = make_grid({"data": 1})
    model, place = Twice(SERIAL, grid), PipelineTopology.alone(sizes={"data": 1})
    part = split(model, place, make_schedule("interleaved", 1, 2, 2))
    assert part.counts == (1, 2)
    assert [layer.name for layer in part.layers()] == ["one", "relu", "last"]
    with pytest.raises(ConfigError, match="has 2 stages of its own, but the schedule has 3"):
        split(Twice(SERIAL, grid), place, make_schedule("interleaved", 1, 3, 3))


class Listless(nn.Module):
    """A model that does not say what it is made of."""

    def __init__(self, scheme: Any, grid: Any) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4, scheme, grid), nn.Linear(4, 3, scheme, grid)


@pytest.mark.serial
def test_models_that_cannot_be_cut_are_refused(make_grid: Callable[..., Any]) -> None:
    grid, place, schedule = (
        make_grid({"data": 1}),
        PipelineTopology.alone(sizes={"data": 1}),
        make_schedule("1f1b", 1, 2),
    )
    model: Any = Listless(SERIAL, grid)
    with pytest.raises(ConfigError, match=r"Listless cannot be cut into stages: give it a method layers\(\)"):
        split(model, place, schedule)
    model.layers = lambda: [model.one]
    with pytest.raises(ConfigError, match=r"parameter 'two.weight' of Listless is in none of its layers"):
        split(model, place, schedule)
    model.layers = lambda: [model.one, nn.Linear(4, 3, SERIAL, grid)]
    with pytest.raises(ConfigError, match=r"layer 'Linear' of Listless uses a Linear that is not in the model"):
        split(model, place, schedule)
    model.layers = lambda: [model.one, "two"]
    with pytest.raises(ConfigError, match=r"lists a layer 'two'"):
        split(model, place, schedule)
    with pytest.raises(ConfigError, match=r"'1f1b' is of 2 pipeline ranks, but there are 1"):
        split(gpt(SERIAL, grid), place, make_schedule("1f1b", 2, 2))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("partition", ["parameters", "flops", "time"])
def test_partitions_by_cost(partition: str, world: Any, backend: str) -> None:
    """A model whose last layers are the dearest gives the first rank most layers; all ranks agree.

    Times are of a machine that others use too: there, only that the ranks agree.
    """
    with pipelined(world, backend, pipeline=SIZE) as mesh:
        wide = nn.Sequential(*(nn.Linear(n, m, mesh.scheme, mesh.grid) for n, m in WIDTHS))
        x = pla.ones((64, 8), mesh.grid, pla.Layout(None, None), "float32")
        part = split(wide, mesh.topology, make_schedule("1f1b", SIZE, 2), partition, sample=pla.Tensor(x))
        assert sum(part.counts) == len(WIDTHS)
        assert len(set(map(str, world.share(part.counts)))) == 1
        assert partition == "time" or part.counts[0] >= 12
        with pytest.raises(ConfigError, match="has no values yet"):
            list(wide.parameters())
        part.initialize(1)


WIDTHS = [(8, 8)] * 11 + [(8, 512), (512, 512), (512, 512), (512, 8)]


@pytest.mark.serial
def test_transformers_are_balanced_by_flops_and_time(make_grid: Callable[..., Any]) -> None:
    model, place = gpt(SERIAL, make_grid({"data": 1}), vocab_size=600), PipelineTopology.alone(sizes={"data": 1})
    assert sum(model.layer_flops(2, 7)) == model.flops(2, 7)
    assert len(model.layer_flops(2, 7)) == len(model.layers())
    ids = inputs("gpt", model)
    schedule = make_schedule("interleaved", 1, 2, 2)
    head = model.layer_flops(1, 7)
    assert head[0] == 0
    assert head[-1] > head[1]
    by_flops = split(model, place, schedule, "flops", sample=lambda: ids).counts
    assert by_flops == (5, 2)
    assert sum(split(model, place, schedule, "time", sample=ids).counts) == 7
    assert split(model, place, schedule, "parameters").counts == (3, 4)
    with pytest.raises(ConfigError, match=r"partition='time' measures the layers: cut the model by pipeline.split"):
        split(model, place, schedule, "time")
    with pytest.raises(ConfigError, match=r"partition is 'uniform', 'parameters', .*not 'even'"):
        split(model, place, schedule, "even")
    with pytest.raises(ConfigError, match=r"no layer of Sequential has products that are known"):
        split(nn.Sequential(nn.LayerNorm(3, SERIAL, model.grid), nn.ReLU()), place, schedule, "flops")


@pytest.mark.serial
def test_masks_go_through_the_stages_of_bert(make_grid: Callable[..., Any]) -> None:
    grid = make_grid({"data": 1})
    serial, place = bert(SERIAL, grid).initialize(2), PipelineTopology.alone(sizes={"data": 1})
    ids = inputs("bert", serial)
    mask = pla.distribute((np.arange(7) < 5) * np.ones((3, 1), int), grid, serial.ids_layout)
    part = split(bert(SERIAL, grid), place, make_schedule("interleaved", 1, 3, 3)).initialize(2)
    found = part({"ids": ids, "attention_mask": mask, "token_type_ids": ids * 0 + 1})
    want = serial.logits(serial(ids, mask, ids * 0 + 1))
    assert np.array_equal(found.gather(), want.gather())
    assert not np.array_equal(found.gather(), part({"ids": ids}).gather())
    with pytest.raises(ConfigError, match=r"a dict with ids and maybe attention_mask .* not one with 'id'"):
        part({"id": ids})
