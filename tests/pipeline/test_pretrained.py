"""A model cut into stages is written as the whole one is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg import nn
from parlinalg.comm import SingleComm
from parlinalg.errors import ConfigError
from parlinalg.pipeline import make_schedule, split
from parlinalg.train import launch

SIZES = {
    "vocab_size": 11, "max_position_embeddings": 7, "hidden_size": 12, "num_hidden_layers": 5,
    "num_attention_heads": 3, "intermediate_size": 20,
}  # fmt: skip
PARALLEL: dict[int, dict[str, Any]] = {
    2: {"pipeline": 2},
    4: {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}},
    6: {"data": 2, "pipeline": 3},
}


def staged(kind: type[Any], mesh: Any, name: str = "1f1b", chunks: int | None = None, **options: Any) -> Any:
    model = kind(**SIZES, **options, scheme=mesh.scheme, grid=mesh.grid, dtype=np.float64)
    if mesh.topology.size == 1:
        return model.initialize(5)
    return split(
        model, mesh.topology, make_schedule(name, mesh.topology.size, 2 * mesh.topology.size, chunks)
    ).initialize(5)


@pytest.mark.ranks(2, 4, 6)
@pytest.mark.parametrize(
    ("kind", "name", "chunks", "tied"),
    [(nn.GPT, "1f1b", None, True), (nn.Llama, "interleaved", 2, False), (nn.Llama, "chimera", None, True)],
)
def test_stages_write_the_whole_model(
    kind: Any, name: str, chunks: int | None, tied: bool, world: Any, backend: str, folder: Path
) -> None:
    if name == "chimera" and world.size == 6:
        chunks, name = None, "1f1b"  # Chimera takes even pipelines
    with launch({"parallel": PARALLEL[world.size]}, world, backend) as mesh:
        model = staged(kind, mesh, name, chunks, tie_word_embeddings=tied)
        model.save_pretrained(folder / "stages")
    if world.rank == 0:
        with launch({}, SingleComm(), "numpy") as mesh:
            staged(kind, mesh, tie_word_embeddings=tied).save_pretrained(folder / "whole")
        for file in (folder / "whole").iterdir():
            assert (folder / "stages" / file.name).read_bytes() == file.read_bytes(), file.name
    world.barrier()


@pytest.mark.ranks(2)
def test_what_cannot_be_written_is_refused(world: Any, backend: str, folder: Path) -> None:
    with launch({"parallel": {"pipeline": 2}}, world, backend) as mesh:
        with pytest.raises(ConfigError, match="num_local_experts=2 is not written"):
            staged(nn.Llama, mesh, num_local_experts=2).save_pretrained(folder)
        mlp = nn.MLP((3, 4, 5), mesh.scheme, mesh.grid)
        cut = split(mlp, mesh.topology, make_schedule("1f1b", 2, 2)).initialize(5)
        with pytest.raises(ConfigError, match="`transformers` has no model MLP"):
            cut.save_pretrained(folder)
