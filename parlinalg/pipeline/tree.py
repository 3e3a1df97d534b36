"""Trees of tensors: what a stage gives to the next one, taken apart and put together again."""

from __future__ import annotations

from typing import Any

from parlinalg.array import DistArray
from parlinalg.autograd import Tensor
from parlinalg.errors import ConfigError

#: What a tree is beside its tensors, as JSON can carry it: `["tensor"]`, `["value", 3]`, `["tuple", …]`, `["list", …]`
#: or `["dict", [key, …], …]`.
Form = list[Any]


def take_apart(tree: Any) -> tuple[Form, list[Tensor]]:
    """The form of a tree and its tensors, in their order.

    Parameters
    ----------
    tree : Tensor, DistArray, None, bool, int, float, str, or tuple, list, dict with str keys of these

    Raises
    ------
    ConfigError
        If there is something else in it.

    Examples
    --------
    >>> take_apart({"a": (1, None)})
    (['dict', ['a'], ['tuple', ['value', 1], ['value', None]]], [])
    """
    found: list[Tensor] = []
    return _form(tree, found), found


def _form(tree: Any, found: list[Tensor]) -> Form:
    if isinstance(tree, Tensor | DistArray):
        found.append(tree if isinstance(tree, Tensor) else Tensor(tree))
        return ["tensor"]
    if tree is None or type(tree) in (bool, int, float, str):
        return ["value", tree]
    if type(tree) in (tuple, list):
        return [type(tree).__name__, *(_form(each, found) for each in tree)]
    if type(tree) is dict and all(type(key) is str for key in tree):
        return ["dict", list(tree), *(_form(each, found) for each in tree.values())]
    raise ConfigError(
        f"between the stages of a pipeline pass tensors, numbers, texts and None, in tuples, lists and dicts with text "
        f"keys, not a {type(tree).__name__}"
    )


def put_together(form: Form, tensors: list[Tensor]) -> Any:
    """The tree of that form with these tensors.

    >>> put_together(["list", ["value", 1], ["tuple"]], [])
    [1, ()]
    """
    left = iter(tensors)
    return _tree(form, left)


def _tree(form: Form, left: Any) -> Any:
    kind, *rest = form
    if kind == "tensor":
        return next(left)
    if kind == "value":
        return rest[0]
    if kind == "dict":
        return {key: _tree(each, left) for key, each in zip(rest[0], rest[1:], strict=True)}
    each = [_tree(one, left) for one in rest]
    return tuple(each) if kind == "tuple" else each
