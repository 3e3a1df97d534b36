"""Settings read from a `config.json`, with errors that name the file, the key and what it may be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parlinalg.errors import ConfigError
from parlinalg.files import read_json
from parlinalg.nn import checks


class Settings:
    """The values of a `config.json`.

    Parameters
    ----------
    values : dict
    path : Path
        The file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self.values, self.path = values, path

    @classmethod
    def read(cls, folder: Path, name: str = "config.json") -> Settings:
        """Return the `config.json` of a folder, or another file of settings.

        Raises
        ------
        ConfigError
            If there is no such folder or file, or it is no object in JSON.
        """
        path = folder / name
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}; from_pretrained takes one with config.json and weights")
        try:
            values = read_json(path)
        except FileNotFoundError:
            raise ConfigError(f"{folder} has no {name}; it has {_listing(folder)}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path} holds no object, but {type(values).__name__}")
        return cls(values, path)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key; the default where it is missing or null."""
        value = self.values.get(name)
        return default if value is None else value

    def whole(self, name: str, default: int | None = None) -> int:
        """Return a positive integer; raise for others."""
        return checks.whole(f"{self.path}: {name}", self.get(name, default))

    def real(self, name: str, default: float) -> float:
        """Return a number of at least 0; raise for others."""
        return checks.real(f"{self.path}: {name}", self.get(name, default))

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false; raise for others."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.path}: {name} is true or false, not {value!r}")
        return value

    def one_of(self, name: str, known: Mapping[str, Any], default: str) -> Any:
        """Return the value of a name."""
        value = self.get(name, default)
        if not isinstance(value, str) or value not in known:
            raise ConfigError(f"{self.path}: {name}={value!r} is not supported; it may be {', '.join(known)}")
        return known[value]

    def divides(self, part: str, n: int, whole: str, total: int) -> int:
        """Return n, of key `part`; raise unless it divides the value of another."""
        if total % n:
            raise ConfigError(f"{self.path}: {whole}={total} does not fall into {part}={n}; give a divisor of {total}")
        return n

    def only(self, name: str, value: Any) -> None:
        """Refuse another value than the one that the model computes with; missing is this one."""
        if self.get(name, value) != value:
            raise ConfigError(f"{self.path}: {name}={self.get(name)!r} is not supported; it may be {value!r}")


def _listing(folder: Path) -> str:
    names = sorted(p.name for p in folder.iterdir())
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "") if names else "no files"


def weights_of(folder: Path) -> list[Path] | dict[str, Path]:
    """Return the files of a folder's weights: one, or by the name of each tensor where there is an index.

    Raises
    ------
    ConfigError
        If there are none, or the index cannot be understood or names a file that is missing.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        older = " (convert them: save_pretrained of transformers)" if any(folder.glob("*.bin")) else ""
        raise ConfigError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json; it has {_listing(folder)}{older}"
        )
    try:
        names = {str(k): str(v) for k, v in read_json(index)["weight_map"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} cannot be understood: {type(error).__name__}: {str(error)[:200]}") from None
    for tensor, name in names.items():
        if Path(name).name != name or not (folder / name).is_file():
            raise ConfigError(f"{index} says that {tensor} is in {name!r}, which is not a file in {folder}")
    return {tensor: folder / name for tensor, name in names.items()}
