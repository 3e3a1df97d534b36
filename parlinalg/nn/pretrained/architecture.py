"""Architectures: their settings in both directions, and the tensors of files that make their parameters.  Pure.

A table has one row a parameter: the names of its dims, and the tensors that make it, each with the names of its own
dims, those in parentheses packed into one; `of` says which indices of one of the dims a tensor has alone:

    Row("attention.qkv.weight", "h k u e", Part("q_proj.weight", "(k u e) h", ("u", 0, g)), …)

is a tensor [k·g·e, h] of the queries, that lies in a parameter [h, k, u, e] at the first g of each u.  So a slice of a
parameter is a slice of a view of each of its tensors, and the way back is the same view taken backwards.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from parlinalg.nn.pretrained.settings import Settings

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """An architecture of Hugging Face's `transformers`, as one of our models.

    Attributes
    ----------
    model_type : str
        As `config.json` has it.
    class_name : str
        The class of `transformers` that reads what we write.
    prefix : str
        What the names of all tensors but the head's begin with; files of the model without its head lack it.
    arguments : callable
        The model's arguments of a `config.json`.
    settings : callable
        The `config.json` of the model's arguments.
    table : callable
        Where the tensors lie in the parameters, for the model's arguments.
    ignored : tuple of str
        Patterns of tensors that hold no weights.
    """

    model_type: str
    class_name: str
    prefix: str
    arguments: Callable[[Settings], dict[str, Any]]
    settings: Callable[[Arguments], dict[str, Any]]
    table: Callable[[Arguments], dict[str, list[Place]]]
    ignored: tuple[str, ...] = ()

    def places(self, arguments: Arguments, names: Collection[str]) -> dict[str, list[Place]]:
        """Return the table, with its tensors named as in files with these tensors."""
        table = self.table(arguments)
        if any(name.startswith(self.prefix) for name in names):
            return table
        return {
            parameter: [replace(place, tensor=place.tensor.removeprefix(self.prefix)) for place in places]
            for parameter, places in table.items()
        }

    def weights(self, names: Collection[str], arguments: Arguments) -> list[str]:
        """Return the names of the tensors that hold weights of their own."""
        ignored = [*self.ignored, r"lm_head\.weight"] if arguments.get("tie_word_embeddings", True) else self.ignored
        pattern = re.compile("|".join(f"(?:{p})" for p in ignored) or r"(?!)")
        return [name for name in names if not pattern.fullmatch(name)]


Shape = tuple[int, ...]
Range = tuple[str, int, int]


@dataclass(frozen=True)
class Part:
    """A tensor of a file.

    Attributes
    ----------
    tensor : str
        Its name; "{i}" is the layer's number.
    dims : str
        The names of its dims.
    of : (str, int, int), or tuple of these, optional
        The range it has of one of them, or of several.
    file : str, optional
        Its dims in the file, where they are others that hold the same elements in the same order.
    """

    tensor: str
    dims: str
    of: Range | tuple[Range, ...] | None = None
    file: str = ""

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The ranges it has of dims."""
        if self.of is None:
            return ()
        return (self.of,) if isinstance(self.of[0], str) else self.of


class Row:
    """A parameter, its dims, and the tensors that make it."""

    def __init__(self, parameter: str, dims: str, *parts: Part) -> None:
        self.parameter, self.dims, self.parts = parameter, dims, parts

    def in_layer(self, i: int) -> Row:
        """Return the row with this number of a layer in its names."""
        number = "{i}", str(i)
        parts = (replace(p, tensor=p.tensor.replace(*number)) for p in self.parts)
        return Row(self.parameter.replace(*number), self.dims, *parts)

    def places(self, sizes: Mapping[str, int]) -> list[Place]:
        """Return the place of each of the tensors in the parameter, for dims of these sizes."""
        return [_place(self.dims.split(), part, sizes) for part in self.parts]


@dataclass(frozen=True)
class Place:
    """The place of a tensor in a parameter.

    Attributes
    ----------
    tensor : str
    shape : tuple of int
        The tensor's shape in the file.
    split : tuple of int
        The same with packed dims apart.
    order : tuple of int
        The order of the split dims in the parameter.
    start : tuple of int
        The index in the parameter at which the tensor begins.
    """

    tensor: str
    shape: Shape
    split: Shape
    order: tuple[int, ...]
    start: tuple[int, ...]

    @property
    def region(self) -> tuple[range, ...]:
        """The parameter's indices that the tensor fills, for each dim."""
        return tuple(range(a, a + self.split[d]) for a, d in zip(self.start, self.order, strict=True))

    def seen(self, tensor: Any) -> Any:
        """Return the tensor as the parameter has it; a view."""
        return tensor.reshape(self.split).transpose(self.order)

    def stored(self, parameter: Any) -> Any:
        """Return the tensor as the file has it, of the whole parameter."""
        part = parameter[tuple(slice(r.start, r.stop) for r in self.region)]
        back = sorted(range(len(self.order)), key=lambda d: self.order[d])
        return part.transpose(back).reshape(self.shape)


def places(rows: Iterable[Row], sizes: Mapping[str, int], layers: int) -> dict[str, list[Place]]:
    """Return for each parameter the places of its tensors; rows with "{i}" in their names stand for all layers."""
    found: dict[str, list[Place]] = {}
    for row in in_layers(rows, layers):
        found[row.parameter] = row.places(sizes)
    return found


def in_layers(rows: Iterable[Row], layers: int) -> list[Row]:
    """Return the rows of every layer, in the order of the table.

    Those with "{i}" come layer by layer where the first one stands.

    >>> [r.parameter for r in in_layers([Row("a", "h"), Row("{i}.b", "h"), Row("{i}.c", "h")], 2)]
    ['a', '0.b', '0.c', '1.b', '1.c']
    """
    rows = list(rows)
    layered = [r for r in rows if "{i}" in r.parameter]
    found: list[Row] = []
    for row in rows:
        if row is (layered[0] if layered else None):
            found += [r.in_layer(i) for i in range(layers) for r in layered]
        elif "{i}" not in row.parameter:
            found.append(row)
    return found


def _place(dims: Sequence[str], part: Part, sizes: Mapping[str, int]) -> Place:
    starts = {name: first for name, first, _ in part.ranges}
    sizes = {**sizes, **{name: stop - first for name, first, stop in part.ranges}}
    packed = _groups(part.dims)
    flat = [name for group in packed for name in group]
    if sorted(flat) != sorted(dims):
        raise ValueError(f"tensor {part.tensor!r} has dims {part.dims!r}, its parameter {' '.join(dims)!r}")
    return Place(
        tensor=part.tensor,
        shape=tuple(math.prod(sizes[name] for name in group) for group in _groups(part.file) or packed),
        split=tuple(sizes[name] for name in flat),
        order=tuple(flat.index(name) for name in dims),
        start=tuple(starts.get(name, 0) for name in dims),
    )


def _groups(dims: str) -> list[list[str]]:
    """Return the names packed into each dim."""
    return [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", dims)]
