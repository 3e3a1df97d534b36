"""What the tape keeps for the backward pass: the arrays that its rules hold, by operation and layout."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from parlinalg.array import DistArray
from parlinalg.autograd.tape import Node, reachable
from parlinalg.autograd.tensor import Tensor
from parlinalg.backend.places import Places
from parlinalg.backend.visible import Visible
from parlinalg.layout import Layout


@dataclass
class Saved:
    """What one kind of operation keeps.

    Attributes
    ----------
    op : str
        The operation's name.
    layout : Layout
        That of the operation's result.
    tensors : int
        How many arrays.
    nbytes : int
        Their bytes on this rank.
    """

    op: str
    layout: Layout
    tensors: int = 0
    nbytes: int = 0


def saved(root: Tensor) -> list[Saved]:
    """The arrays that the backward pass from `root` holds on this rank, except the parameters; does not communicate.

    An array that several rules hold counts once, with the operation that was recorded first; of a view all of the
    memory that it keeps counts, and of a mask that attention was given, which it does not copy.

    Returns
    -------
    list of Saved
        In the order of first use.

    Examples
    --------
    >>> import numpy as np, parlinalg as pla
    >>> from parlinalg.autograd.saved import saved
    >>> grid = pla.Grid({"r": 1})
    >>> x = pla.Tensor(pla.distribute(np.arange(3.0), grid, pla.Layout("r")), requires_grad=True)
    >>> [(row.op, row.nbytes) for row in saved((x * x).sum())]
    [('multiply', 24)]
    """
    if root.node is None:
        return []
    nodes = list(reversed(reachable(root.node)))
    seen = {id(memory(p.data.block)) for p in _owners(nodes)}
    rows: dict[tuple[str, Layout], Saved] = {}
    for node in nodes:
        rules = [*(node.parts or ()), node.prepare, node.again]
        held = {id(a): a for rule in rules for a in _arrays(rule, set())}
        new = [a for key, a in held.items() if key not in seen]
        seen.update(held)
        if new:
            op = _name(node)
            row = rows.setdefault((op, node.layout), Saved(op, node.layout))
            row.tensors += len(new)
            row.nbytes += sum(int(a.nbytes) for a in new)
    return list(rows.values())


def arrays(holders: Iterable[Any]) -> dict[int, Any]:
    """The arrays that values on the tape (nodes), rules or walks keep on this rank, parameters too; no communication.

    Returns
    -------
    dict of int to array
        By identity; of a view all of the memory that it keeps.
    """
    found: dict[int, Any] = {}
    met: set[int] = set()
    for holder in holders:
        rules = [*(holder.parts or ()), holder.prepare, holder.again] if isinstance(holder, Node) else [holder]
        for rule in rules:
            found.update((id(a), a) for a in _arrays(rule, met))
    return found


def _owners(nodes: list[Node]) -> Iterator[Any]:
    for node in nodes:
        if node.owner is not None and (owner := node.owner()) is not None:
            yield owner


def _name(node: Node) -> str:
    """The operation that recorded a node: the function in which its rule was written."""
    rule: Any = next(iter(node.parts or ()), node.again)
    while isinstance(rule, functools.partial):
        rule = rule.func
    name = _outer(rule)
    if name.startswith("_"):  # a helper that several operations share holds the function of the operation itself
        cells = [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
        inner = [_outer(c) for c in cells if isinstance(c, FunctionType)]
        module: str = getattr(rule, "__module__", name).rpartition(".")[2]
        name = next((n for n in inner if not n.startswith("_")), module)
    return name


def _outer(rule: Any) -> str:
    name: str = getattr(rule, "__qualname__", type(rule).__name__)
    return name.partition(".")[0]


def memory(array: Any) -> Any:
    """The array whose memory a view keeps."""
    while getattr(array, "base", None) is not None and hasattr(array.base, "nbytes") and hasattr(array.base, "dtype"):
        array = array.base
    return array


def _arrays(held: Any, met: set[int]) -> Iterator[Any]:
    """All arrays that a rule keeps alive, by closure, container or attribute."""
    if held is None or isinstance(held, int | float | str | bytes | Layout | Node) or id(held) in met:
        return
    met.add(id(held))
    if hasattr(held, "nbytes") and hasattr(held, "flags"):  # an array of a backend
        if getattr(held, "ndim", 0):
            yield memory(held)
    elif isinstance(held, DistArray):
        yield from _arrays(held.block, met)
    elif isinstance(held, Tensor):
        yield from _arrays(held.data, met)
    elif isinstance(held, FunctionType):
        for cell in held.__closure__ or ():
            yield from _arrays(cell.cell_contents, met)
        yield from _arrays(held.__defaults__, met)
    elif isinstance(held, MethodType):
        yield from _arrays(held.__self__, met)
    elif isinstance(held, functools.partial):
        for part in (held.func, held.args, held.keywords):
            yield from _arrays(part, met)
    elif isinstance(held, dict):
        for part in held.values():
            yield from _arrays(part, met)
    elif isinstance(held, list | tuple):
        for part in held:
            yield from _arrays(part, met)
    elif isinstance(held, Visible | Places) or type(held).__module__.startswith("parlinalg.autograd"):
        yield from _arrays(getattr(held, "__dict__", None), met)
