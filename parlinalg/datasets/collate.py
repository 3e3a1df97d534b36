"""Trees of host arrays: samples stacked into batches, tensors of PyTorch converted, shapes compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np

from parlinalg.errors import EngineError

#: The form of a tree of arrays, as JSON can carry it: `["array", dtype, [length, …]]`, `["tuple", …]`, `["list", …]` or
#: `["dict", [key, …], …]`.
Form = list[Any]


def collate(items: Sequence[Any]) -> Any:
    """Stack samples into a batch: arrays and scalars along a new first dim, within tuples and dicts one by one.

    Parameters
    ----------
    items : sequence
        Arrays, numbers, tensors of PyTorch, or tuples, lists and dicts of these; all of one form.  A list of numbers is
        an array.

    Raises
    ------
    EngineError
        If two samples differ in shape, dtype, length or keys, or hold no numbers.

    Examples
    --------
    >>> x, y = collate([(np.zeros(3), 0), (np.ones(3), 1)])
    >>> x.shape, y
    ((2, 3), array([0, 1]))
    """
    return _stacked(list(items), "")


def _stacked(items: list[Any], where: str) -> Any:
    first = items[0]
    if isinstance(first, Mapping):
        _alike(items, where, lambda item: sorted(map(str, item)) if isinstance(item, Mapping) else type(item).__name__)
        return {key: _stacked([item[key] for item in items], f"{where}[{key!r}]") for key in first}
    if _several(first):
        _alike(items, where, lambda item: len(item) if _several(item) else type(item).__name__)
        return tuple(_stacked(list(part), f"{where}[{i}]") for i, part in enumerate(zip(*items, strict=True)))
    arrays = [host_array(item) for item in items]
    _alike(arrays, where, kind)
    return np.stack(arrays)


def _several(item: Any) -> bool:
    """Return True if a sample is made of parts, and is not an array written as a list of numbers."""
    return isinstance(item, tuple) or (isinstance(item, list) and not all(isinstance(each, Number) for each in item))


def _alike(items: list[Any], where: str, look: Callable[[Any], object]) -> None:
    """Raise an EngineError that names the first sample of another form than the first."""
    first = look(items[0])
    for i, item in enumerate(items):
        if (found := look(item)) != first:
            raise EngineError(
                f"samples of a batch are unlike: sample{where} is {first} in the first and {found} in number {i} of "
                "those read here; pad them to one shape in the dataset, or give a collate_fn that does"
            )


def host_array(given: Any) -> Any:
    """Return an array, a number, or a tensor of PyTorch as a NumPy array; PyTorch is not imported.

    Raises
    ------
    EngineError
        If it holds no numbers.
    """
    if is_tensor(given):
        given = given.detach().cpu()
        given = given.float().numpy() if str(given.dtype) == "torch.bfloat16" else given.numpy()
    try:
        found = np.asarray(given)
    except ValueError as error:
        raise EngineError(f"a sample holds {given!r}, which is not an array: {error}; give a collate_fn") from error
    if found.dtype.kind not in "fiub" and found.dtype.name != "bfloat16":
        raise EngineError(
            f"a sample holds {type(given).__name__} of dtype {found.dtype}, and batches are of real numbers: convert "
            "it in the dataset, or give a collate_fn that does"
        )
    return found


def is_tensor(given: Any) -> bool:
    """Return True for a tensor of PyTorch."""
    return type(given).__module__.partition(".")[0] == "torch" and hasattr(given, "detach")


def converted(tree: Any) -> Any:
    """Return a tree with tensors of PyTorch, and lists of numbers, as NumPy arrays; other leaves stay as they are."""
    return mapped(lambda leaf: host_array(leaf) if is_tensor(leaf) or (isinstance(leaf, list) and leaf) else leaf, tree)


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return the tree with a function applied to every leaf, such as an array or a list of numbers.

    Mappings become dicts.
    """
    if isinstance(tree, Mapping):
        return {key: mapped(function, value) for key, value in tree.items()}
    if _several(tree):
        return rebuilt(tree, [mapped(function, value) for value in tree])
    return function(tree)


def rebuilt(tree: Any, parts: Sequence[Any]) -> Any:
    """Return these parts as a list, a tuple or a named tuple, as `tree` is."""
    kind = type(tree)
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)


def leaves(tree: Any) -> Iterator[Any]:
    """Return the leaves of a tree, in their order."""
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, tuple | list):
        for each in tree:
            yield from leaves(each)
    else:
        yield tree


def form_of(tree: Any) -> Form:
    """Return the form of a tree of arrays, without the lengths of their first dims."""
    if isinstance(tree, Mapping):
        return ["dict", list(tree), *map(form_of, tree.values())]
    if isinstance(tree, tuple | list):
        return ["tuple" if isinstance(tree, tuple) else "list", *map(form_of, tree)]
    return ["array", tree.dtype.name, list(tree.shape[1:])]


def shaped(function: Callable[[str, tuple[int, ...], Any], Any], form: Form, tree: Any = None) -> Any:
    """Return a tree of this form, each leaf made by a function of a dtype's name, a shape without its first dim, and
    the leaf of `tree` there (None where there is no tree).
    """
    name, *rest = form
    if name == "array":
        return function(rest[0], tuple(rest[1]), tree)
    if name == "dict":
        keys, *rest = rest
        return {
            key: shaped(function, part, None if tree is None else tree[key])
            for key, part in zip(keys, rest, strict=True)
        }
    made = [shaped(function, part, None if tree is None else tree[i]) for i, part in enumerate(rest)]
    return tuple(made) if name == "tuple" else made


def kind(array: Any) -> str:
    """Return the dtype and shape of an array as text: "float64[6, 3]"."""
    return f"{array.dtype}{list(array.shape)}"


def form_text(form: Form) -> str:
    """Return a form as text: "(float64[…, 3], int64[…])"."""
    name, *rest = form
    if name == "array":
        return f"{rest[0]}[{', '.join(['…', *map(str, rest[1])])}]"
    if name == "dict":
        keys, *rest = rest
        return f"{{{', '.join(f'{key}: {form_text(part)}' for key, part in zip(keys, rest, strict=True))}}}"
    return f"({', '.join(map(form_text, rest))})"
