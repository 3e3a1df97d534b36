"""States of other programs' models: PyTorch's tensors and safetensors files, under other names and in other shapes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parlinalg.errors import ConfigError

if TYPE_CHECKING:
    from parlinalg.nn.module import Module

#: How names of a state become ours: a dict, pairs of a regular expression and its replacement, or a function.
Names = Mapping[str, str | None] | Sequence[tuple[str, str | None]] | Callable[[str], str | None]


def foreign(model: Module, state: Any, names: Names | None, torch: bool | None) -> dict[str, Any]:
    """Return the arrays of a state under a model's names and in its shapes, as views where they can be.

    Parameters
    ----------
    model : Module
        The whole model; it may be declared only.
    state : mapping of str to array or tensor, or path
        The path is that of a safetensors file, or of a folder of them with an index.
    names, torch
        As of `Module.load_state_dict`.

    Raises
    ------
    ConfigError
        If a file cannot be read, two names become one, or a name that is to be changed is not there.
    """
    if isinstance(state, str | os.PathLike):
        state, torch = _of_file(Path(state)), torch is None or torch
    elif not isinstance(state, Mapping):
        raise ConfigError(
            f"a state is a dict of arrays or tensors, or the path of a safetensors file, not a {type(state).__name__}"
        )
    elif torch is None:
        torch = any(hasattr(value, "detach") for value in state.values())
    found: dict[str, Any] = {}
    came: dict[str, str] = {}
    for theirs in state:
        ours = _renamed(theirs, names)
        if ours is None:
            continue
        if ours in came:
            raise ConfigError(f"names make both {came[ours]!r} and {theirs!r} of the state {ours!r}: leave one out")
        came[ours] = theirs
        found[ours] = state[theirs]
    if isinstance(names, Mapping) and (lost := [name for name in names if name not in state]):
        raise ConfigError(f"names has {', '.join(map(repr, lost))}, which the state does not have")
    found = {name: host(value) for name, value in found.items()}
    if torch:
        owners = {
            f"{name}.{own}" if name else own: (module, own)
            for name, module in model.named_modules()
            for own in module._parameters
        }
        for name in found.keys() & owners.keys():
            module, own = owners[name]
            found[name] = module.from_torch(own, found[name])
    return found


def host(value: Any) -> Any:
    """Return a tensor of PyTorch or of a file as a NumPy array, without a copy if it lies in host memory."""
    if hasattr(value, "mapped"):
        return value.mapped()
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":  # which NumPy has no name for
        import ml_dtypes

        torch = sys.modules["torch"]
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _of_file(path: Path) -> dict[str, Any]:
    from parlinalg.nn.pretrained.load import stored_in
    from parlinalg.nn.pretrained.tensorfile import read_header

    if not path.exists():
        raise ConfigError(f"there is no file or folder {path}")
    return dict(stored_in(path) if path.is_dir() else read_header(path))


def _renamed(name: str, names: Names | None) -> str | None:
    if names is None:
        return name
    if isinstance(names, Mapping):
        return names.get(name, name)
    if callable(names):
        return names(name)
    for pattern, replacement in names:
        if replacement is None:
            if re.search(pattern, name):
                return None
        else:
            name = re.sub(pattern, replacement, name)
    return name
