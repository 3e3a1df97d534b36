"""Parameters from files: each rank reads its part of each tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.errors import ConfigError
from parlinalg.nn.init import Declared
from parlinalg.nn.pretrained.architecture import Architecture, Place
from parlinalg.nn.pretrained.settings import Settings, weights_of
from parlinalg.nn.pretrained.tensorfile import Stored, read_header
from parlinalg.state_dict import check_names


@dataclass(frozen=True)
class Found:
    """A folder whose settings and tensors are known to fit each other.

    Attributes
    ----------
    settings : Settings
        Its `config.json`.
    arguments : dict
        The model's.
    places : dict
        For each parameter where its tensors lie in it.
    stored : dict
        The tensors by name.
    """

    settings: Settings
    arguments: dict[str, Any]
    places: dict[str, list[Place]]
    stored: dict[str, Stored]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the first of the weights."""
        return self.stored[next(iter(self.places.values()))[0].tensor].dtype

    def make(self, declared: Declared, name: str) -> DistArray:
        """Return a parameter's values: this rank's block, made of its parts of the tensors alone."""
        block = declared.grid.block(declared.layout, declared.shape)
        host = np.empty(tuple(len(r) for r in block), declared.dtype)
        for place in self.places[name]:
            common = [_common(b, r) for b, r in zip(block, place.region, strict=True)]
            if all(common):
                tensor = place.seen(self.stored[place.tensor].mapped())
                host[_within(common, block)] = tensor[_within(common, place.region)]
        return DistArray(declared.grid.backend.from_host(host), declared.shape, declared.layout, declared.grid)


def read(folder: Path, wanted: Architecture, known: Mapping[str, str], changes: Mapping[str, Any]) -> Found:
    """Return the tensors of a folder after checking that they are those that the model needs; none is read.

    Parameters
    ----------
    folder : Path
    wanted : Architecture
    known : dict of str to str
        The model for each `model_type`, for messages.
    changes : dict
        Arguments of the model that differ from the folder's.

    Raises
    ------
    ConfigError
        Naming the folder, the file, and the key or the tensors that do not fit.
    """
    config = Settings.read(folder)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        raise ConfigError(
            f"{config.path}: model_type={kind!r} is not known; known are "
            f"{', '.join(f'{k!r} (nn.{name})' for k, name in known.items())}"
        )
    if kind != wanted.model_type:
        raise ConfigError(
            f"{config.path}: model_type={kind!r} is read by nn.{known[kind]}, not nn.{known[wanted.model_type]}"
        )
    config.only("quantization_config", None)
    arguments = {**wanted.arguments(config), **changes}
    stored = stored_in(folder)
    places = wanted.places(arguments, stored)
    shapes = {place.tensor: place.shape for held in places.values() for place in held}
    have = {name: stored[name].shape for name in wanted.weights(stored, arguments)}
    check_names(f"{folder}, as its config.json describes the model,", shapes, have)
    for name in shapes:
        _ = stored[name].dtype
    return Found(config, arguments, places, stored)


def stored_in(folder: Path) -> dict[str, Stored]:
    """Return the tensors of all files of a folder."""
    weights = weights_of(folder)
    if not isinstance(weights, dict):
        return read_header(weights[0])
    headers = {path: read_header(path) for path in dict.fromkeys(weights.values())}
    for tensor, path in weights.items():
        if tensor not in headers[path]:
            raise ConfigError(f"{path} has no tensor {tensor!r}, though the index says so")
    return {tensor: headers[path][tensor] for tensor, path in weights.items()}


def _common(a: range, b: range) -> range:
    return range(max(a.start, b.start), min(a.stop, b.stop))


def _within(part: Sequence[range], whole: Sequence[range]) -> tuple[slice, ...]:
    return tuple(slice(p.start - w.start, p.stop - w.start) for p, w in zip(part, whole, strict=True))
