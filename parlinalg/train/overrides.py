"""Values of a configuration given on the command line: `--set parallel.tensor.mode=2d`.  Pure."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from parlinalg.errors import ConfigError


def value_of(text: str) -> Any:
    """The value that a text on the command line means: a Python literal (`dict(a=1)` is one too), else the text itself.

    >>> value_of("4"), value_of("2.5d"), value_of("(1, 3)"), value_of("dict(size=4)")
    (4, '2.5d', (1, 3), {'size': 4})
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
        return ast.literal_eval(_Dicts().visit(tree))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return text


class _Dicts(ast.NodeTransformer):
    """`dict(a=1)` written as `{"a": 1}`, which is a literal."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        names = [k.arg for k in node.keywords]
        if isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args and None not in names:
            return ast.Dict(keys=[ast.Constant(n) for n in names], values=[k.value for k in node.keywords])
        return node


def override(config: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return a configuration with values replaced by settings such as "optimizer.lr=0.01", one after the other.

    A dict that is missing on the way is made; a number in place of a dict is its size (`parallel.tensor`; of
    `checkpoint` the steps between two), a name its name (`optimizer`).

    Raises
    ------
    ConfigError
        If a setting is not of the form key.key=value, or goes through a value that is no dict.
    """
    result = _copied(config)
    for setting in [settings] if isinstance(settings, str) else settings:
        if not isinstance(setting, str):
            raise ConfigError(f"settings are texts such as 'parallel.tensor.mode=2d', not {setting!r}")
        path, equals, text = setting.partition("=")
        keys = [key.strip() for key in path.split(".")]
        if not equals or not all(keys):
            raise ConfigError(f"--set takes KEY=VALUE, such as --set parallel.tensor.mode=2d, not {setting!r}")
        place = result
        for depth, key in enumerate(keys[:-1]):
            inside = place.get(key)
            if inside is None:
                inside = {}
            elif isinstance(inside, int) and not isinstance(inside, bool):
                inside = {"every" if key == "checkpoint" else "size": inside}
            elif isinstance(inside, str):
                inside = {"name": inside}
            if not isinstance(inside, dict):
                raise ConfigError(
                    f"--set {setting}: {'.'.join(keys[: depth + 1])} is {inside!r}, without keys; set it as a whole"
                )
            place[key] = inside
            place = inside
        place[keys[-1]] = value_of(text)
    return result


def _copied(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in config.items()}
