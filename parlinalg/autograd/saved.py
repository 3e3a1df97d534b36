"""Reports of the arrays that the tape keeps for the backward pass, by operation and layout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from parlinalg.autograd.rule import is_array, memory
from parlinalg.autograd.tape import Node, Walk, reachable
from parlinalg.autograd.tensor import Tensor
from parlinalg.layout import Layout


@dataclass
class Saved:
    """The arrays that one kind of operation saved.

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
    """List the arrays that are saved for the backward pass from `root` on this rank, without communication.

    Blocks of parameters do not count.  An array that several rules need counts once, with the operation that was
    recorded first; of a view all of the memory that it keeps counts, and of a mask that attention was given, which it
    does not copy.  Of what `saved_arrays_hooks` put in the place of arrays, arrays count.

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
    seen = {id(memory(block)) for p in _owners(nodes) if (block := p.data.resident) is not None}
    rows: dict[tuple[str, Layout], Saved] = {}
    for node in nodes:
        held = _memories(node.saved())
        new = [a for key, a in held.items() if key not in seen]
        seen.update(held)
        if new:
            row = rows.setdefault((node.op, node.layout), Saved(node.op, node.layout))
            row.tensors += len(new)
            row.nbytes += sum(int(a.nbytes) for a in new)
    return list(rows.values())


def arrays(holders: Iterable[Node | Walk]) -> dict[int, Any]:
    """Return the arrays that values on the tape and walks keep on this rank, parameters too, without communication.

    Returns
    -------
    dict of int to array
        By identity; of a view all of the memory that it keeps.
    """
    return _memories(value for holder in holders for value in holder.saved())


def _memories(values: Iterable[Any]) -> dict[int, Any]:
    """Return the arrays among values, by identity; of a view the array whose memory it keeps."""
    held = (memory(value) for value in values if is_array(value) and value.ndim)
    return {id(a): a for a in held}


def _owners(nodes: list[Node]) -> Iterator[Any]:
    for node in nodes:
        if node.owner is not None and (owner := node.owner()) is not None:
            yield owner
