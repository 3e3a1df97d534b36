"""Generation through the stages of a pipeline gives the tokens of one rank."""

from __future__ import annotations

from typing import Any

import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from parlinalg.pipeline import make_schedule, split
from parlinalg.train import launch
from tests.conftest import SIZE
from tests.models import ARGUMENTS, CLASSES, alone, anything

PROMPTS = [[1, 2, 3, 4], [5], [6, 7, 8, 9]]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.5, "seed": 3},
    "from the likeliest": {"do_sample": True, "top_k": 5, "top_p": 0.8, "eos_token_id": [3, 7]},
}
LAYERS = 3
ONE, TWO = {"size": 2, "mode": "1d"}, {"size": 4, "mode": "2d"}
UNLIKE = {"size": 2, "tensor": [{"size": 1}, ONE]}
GRIDS: dict[int, list[tuple[str, int | None, dict[str, Any]]]] = {
    2: [("1f1b", None, {"pipeline": 2}), ("interleaved", 2, {"pipeline": 2}), ("chimera", None, {"pipeline": 2})],
    3: [("1f1b", None, {"pipeline": UNLIKE})],
    4: [("1f1b", None, {"pipeline": 4}), ("zb-v", None, {"pipeline": 2, "tensor": ONE}),
        ("1f1b", None, {"pipeline": 2, "data": 2}), ("gpipe", None, {"pipeline": 2, "sequence": 2})],
    6: [("1f1b", None, {"pipeline": 3, "tensor": ONE})],
    8: [("1f1b", None, {"pipeline": 2, "tensor": TWO}), ("pipedream", None, {"pipeline": 2, "data": 2, "tensor": ONE})],
}  # fmt: skip


def declared(kind: str, scheme: Any, grid: Any) -> Any:
    options: dict[str, Any] = {**ARGUMENTS[kind], "num_hidden_layers": LAYERS, "dtype": "float64"}
    model = CLASSES[kind](scheme=scheme, grid=grid, **options)
    model.start_from(anything)
    return model


def written(model: Any, way: str, prompts: Any = PROMPTS, new: int = 3, **options: Any) -> list[list[int]]:
    return [row.tolist() for row in nn.generate(model, prompts, new, **WAYS[way], **options)]


@pytest.fixture(scope="module")
def wanted(world: Any) -> dict[str, dict[str, list[list[int]]]]:
    """What one rank alone writes, for each model and way."""
    found: dict[str, dict[str, list[list[int]]]] = {}
    with alone(world) as grid:
        for kind in ("gpt", "llama") if world.rank == 0 else ():
            model = declared(kind, schemes.discover()["serial"].SCHEME, grid).initialize(5)
            found[kind] = {way: written(model, way) for way in WAYS}
    return world.share(found)[0]  # type: ignore[no-any-return]


@pytest.mark.ranks(*GRIDS)
def test_the_tokens_of_one_rank(wanted: Any, world: Any, backend: str) -> None:
    for turn, (name, chunks, parallel) in enumerate(GRIDS[SIZE]):
        kind = ("gpt", "llama")[(turn + SIZE) % 2]
        with launch({"parallel": parallel}, world, backend) as mesh:
            schedule = make_schedule(name, mesh.topology.size, 2 * mesh.topology.size, chunks)
            model = split(declared(kind, mesh.scheme, mesh.grid), mesh.topology, schedule, "uniform").initialize(5)
            for way in WAYS:
                heard: list[tuple[int, int]] = []
                found = written(model, way, stream=lambda row, token, heard=heard: heard.append((row, token)))
                assert found == wanted[kind][way], (name, parallel, way)
                for row, prompt in enumerate(PROMPTS):
                    assert [t for r, t in heard if r == row] == found[row][len(prompt) :]
            assert written(model, "sampled", use_cache=False) == wanted[kind]["sampled"]
            assert model.training
            assert all(module.training for module in model.full_model.modules())


@pytest.mark.ranks(2)
def test_what_is_wrong_is_said_on_all_ranks(world: Any, backend: str) -> None:
    with launch({"parallel": {"pipeline": 2}}, world, backend) as mesh:
        schedule = make_schedule("1f1b", 2, 2)
        model = split(declared("gpt", mesh.scheme, mesh.grid), mesh.topology, schedule).initialize(5)
        for prompts, words in (([[1, 2, 11]], "prompt 0 has token 11"), ([[1] * 7], "7 tokens and 3 new ones make 10")):
            with pytest.raises(pla.ConfigError, match=words):
                nn.generate(model, prompts, 3)
        with pytest.raises(pla.ConfigError, match="rank 1 passes other prompts or options"):
            nn.generate(model, [[1 + world.rank]], 3)
        stages = [nn.Linear(3, 3, mesh.scheme, mesh.grid) for _ in range(2)]
        other = split(nn.Sequential(*stages), mesh.topology, schedule).initialize(0)
        with pytest.raises(pla.ConfigError, match="Sequential generates no text"):
            nn.generate(other, [[1]], 3)
