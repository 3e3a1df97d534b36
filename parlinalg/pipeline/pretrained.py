"""Weights that people have, read by the stages of a pipeline."""

from __future__ import annotations

import os
from typing import Any

from numpy.typing import DTypeLike

from parlinalg.comm.together import together
from parlinalg.grid import Grid
from parlinalg.nn.pretrained import Pretrained
from parlinalg.pipeline.model import Partition, PipelineModel, split
from parlinalg.pipeline.place import Place
from parlinalg.pipeline.schedule import Schedule
from parlinalg.schemes import Scheme


def from_pretrained(
    kind: type[Pretrained], folder: str | os.PathLike[str], place: Place, schedule: Schedule, scheme: Scheme,
    grid: Grid, dtype: DTypeLike | None = None, *, partition: Partition = "uniform", seed: int = 0, **changes: Any,
) -> PipelineModel:  # fmt: skip
    """This rank's stages of the model of a folder; each rank reads what it holds.  Collective over all ranks.

    Parameters
    ----------
    kind : type
        `nn.GPT` or `nn.Llama`, as the folder has it.
    place, schedule, partition
        As of `split`.
    folder, scheme, grid, dtype, seed, changes
        As of `kind.from_pretrained`; scheme and grid are those of this rank's stages.
    """
    model, values = kind.declared_by(folder, scheme, grid, place.world, dtype, **changes)
    cut = split(model, place, schedule, partition)
    together(place.world, lambda: cut.initialize(seed, values=values), f"reading {os.fspath(folder)}")
    cut.eval()
    return cut
