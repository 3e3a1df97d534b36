"""Partitions of a model's layers into the stages of a pipeline.  Every layer is in exactly one stage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from parlinalg.errors import ConfigError
from parlinalg.nn.layer import Layer
from parlinalg.nn.module import Module
from parlinalg.pipeline.layer_costs import flops_of, parameters_of, seconds_of
from parlinalg.pipeline.topology import PipelineTopology

Counts = tuple[int, ...]
Partition = str | Sequence[int]


def uniform_partition(layers: int, stages: int) -> Counts:
    """Return as many layers for each stage as for the others, one more for the first ones where that leaves a rest.

    Parameters
    ----------
    layers, stages : int

    Raises
    ------
    ConfigError
        If there are more stages than layers.

    Examples
    --------
    >>> uniform_partition(30, 4)
    (8, 8, 7, 7)
    """
    check_stages(layers, stages)
    each, more = divmod(layers, stages)
    return tuple(each + (s < more) for s in range(stages))


def balanced_partition(costs: Sequence[float], stages: int) -> Counts:
    """Return the layers of each stage, such that the dearest stage costs least: of all such cuts the most even one.

    Parameters
    ----------
    costs : sequence of float
        Of each layer, at least 0.
    stages : int

    Raises
    ------
    ConfigError
        If there are more stages than layers, or a cost is below 0 or not finite.

    Examples
    --------
    >>> balanced_partition([5, 1, 1, 1, 1, 1], 2)
    (1, 5)
    >>> balanced_partition([1] * 30, 4)
    (8, 8, 7, 7)
    """
    check_stages(len(costs), stages)
    if not all(math.isfinite(c) and c >= 0 for c in costs):
        raise ConfigError(f"the costs of layers are numbers of at least 0, not {list(costs)}")
    before = np.concatenate([[0.0], np.cumsum(np.asarray(costs, np.float64))])
    most = _least(before, stages, square=False, most=math.inf)[0]
    return _least(before, stages, square=True, most=most * (1 + 1e-12))[1]


def _least(before: np.ndarray, stages: int, square: bool, most: float) -> tuple[float, Counts]:
    """Return the least maximum (or sum of squares) of the stages' costs, none above `most`, and the cut that has it.

    `before[i]` is the cost of the first i layers.  Stage by stage, from the last: `best[i]` is the least for the layers
    from i on.
    """
    n = len(before) - 1
    best = np.full(n + 1, math.inf)
    best[n] = 0.0
    taken = []
    for left in range(1, stages + 1):
        now, take = np.full(n + 1, math.inf), np.zeros(n + 1, int)
        for i in range(n - left + 1):
            own = before[i + 1 :] - before[i]
            rest = best[i + 1 :]
            value = own * own + rest if square else np.maximum(own, rest)
            value = np.where(own <= most, value, math.inf)
            last = len(value) - 1 - int(np.argmin(value[::-1]))  # of equal ones the longest
            now[i], take[i] = value[last], last + 1
        best = now
        taken.append(take)
    counts, i = [], 0
    for take in reversed(taken):
        counts.append(int(take[i]))
        i += counts[-1]
    return float(best[0]), tuple(counts)


def check_stages(layers: int, stages: int, ends: int = 0) -> None:
    """Raise a ConfigError unless each stage can have a layer; `ends` of the layers are the embedding and the head."""
    if stages > layers:
        included = " with its embedding and head" * (ends > 0)
        raise ConfigError(
            f"a pipeline of {stages} stages needs as many layers, but the model has {layers}{included}: use at most "
            f"{layers} stages (pipeline ranks × chunks of the schedule), or a deeper model"
        )


def given_partition(given: Sequence[int], layers: Sequence[Layer], stages: int) -> Counts:
    """Return the layers of each stage as the user lists them.

    Parameters
    ----------
    given : sequence of int
        The number of layers of each stage; of all layers, or without the model's ends (embedding and head), which then
        go with the first and the last stage.
    layers : sequence of Layer
        The model's, as its `layers()` lists them.
    stages : int

    Raises
    ------
    ConfigError
        If there are not as many numbers as stages, they do not sum to the layers, or a stage has none; the message says
        what would be right.
    """
    if not isinstance(given, Sequence) or not all(hasattr(n, "__index__") for n in given):
        raise ConfigError(f"partition is a name, or a list of the layers of each stage, not {given!r}")
    counts = tuple(given)
    inner = sum(not layer.end for layer in layers)
    like = list(uniform_partition(max(inner, stages), stages))
    if len(counts) != stages:
        raise ConfigError(
            f"the partition {list(counts)} has {len(counts)} numbers, but there are {stages} stages (pipeline ranks × "
            f"chunks of the schedule): give one for each, such as {like}"
        )
    whole = sum(counts)
    if whole == inner != len(layers):
        counts = with_ends(counts, layers)
    elif whole != len(layers):
        right = (
            f"{len(layers)} layers" if inner == len(layers) else f"{inner} blocks ({len(layers)} layers with both ends)"
        )
        raise ConfigError(
            f"the partition {list(given)} has {whole} layers in all, but the model has {right}: give numbers that sum "
            f"to {inner}, such as {like}"
        )
    if min(counts) < 1:
        empty = counts.index(min(counts))
        raise ConfigError(
            f"the partition {list(given)} leaves stage {empty} without a layer; give each at least one, such as {like}"
        )
    return counts


def with_ends(counts: Sequence[int], layers: Sequence[Layer]) -> Counts:
    """Return the layers of each stage, from those without the model's ends."""
    first = next((i for i, layer in enumerate(layers) if not layer.end), 0)
    last = next((i for i, layer in enumerate(reversed(layers)) if not layer.end), 0)
    found = list(counts)
    found[0] += first
    found[-1] += last
    return tuple(found)


def block_partition(layers: Sequence[Layer], stages: int) -> Counts:
    """Return the layers of each stage, by a uniform partition of the blocks.

    The model's ends go with the first and the last stage; where there are more stages than blocks, the partition is
    that of all layers.

    Parameters
    ----------
    layers : sequence of Layer
        The model's, as its `layers()` lists them.
    stages : int

    Raises
    ------
    ConfigError
        If there are more stages than layers.
    """
    inner = sum(not layer.end for layer in layers)
    check_stages(len(layers), stages, len(layers) - inner)
    return (
        with_ends(uniform_partition(inner, stages), layers)
        if inner >= stages
        else uniform_partition(len(layers), stages)
    )


def layers_per_stage(
    model: Module, layers: Sequence[Layer], stages: int, partition: Partition, topology: PipelineTopology,
    sample: Any = None,
) -> tuple[int, ...]:  # fmt: skip
    """Return the layers of each stage, the same on all ranks."""
    if not isinstance(partition, str):
        return given_partition(partition, layers, stages)
    check_stages(len(layers), stages, sum(layer.end for layer in layers))
    if partition == "uniform":
        return block_partition(layers, stages)
    if partition == "time" and topology.world.imagined:
        raise ConfigError(
            "partition='time' measures the layers, and on imagined ranks they take no time: give 'flops', "
            "'parameters' or 'uniform', or the list of layers that a real run cuts"
        )
    if partition == "parameters":
        return balanced_partition(parameters_of(layers), stages)
    sample = sample() if callable(sample) else sample
    if partition == "flops":
        return balanced_partition(flops_of(model, layers, sample), stages)
    if partition != "time":
        raise ConfigError(
            "partition is 'uniform', 'parameters', 'flops', 'time' or a list of the layers of each stage, not "
            f"{partition!r}"
        )
    if sample is None:
        raise ConfigError(
            "partition='time' measures the layers: cut the model by pipeline.split(…, sample=…), with what it "
            "takes, of a microbatch's shape; or give parlinalg.initialize a train_dataloader, or sample=…"
        )
    return balanced_partition(seconds_of(model, layers, sample, topology.world), stages)
