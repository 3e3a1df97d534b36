"""Values computed again in the backward pass, so that between the passes only the inputs are kept.

Chen et al., "Training deep nets with sublinear memory cost", 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from parlinalg.autograd.arrivals import Arrivals
from parlinalg.autograd.tape import Node, Reducer, Walk, only_noting, recorded, recording
from parlinalg.autograd.tensor import Tensor, record_again
from parlinalg.errors import LayoutError

Block = Any


def recompute(function: Callable[..., Tensor], *inputs: Any, **named: Any) -> Tensor:
    """`function(*inputs, **named)`, of which only the inputs are kept: the backward pass calls the function again.

    Parameters
    ----------
    function : callable
        Gives one tensor, and when called again the same, bit for bit; for modules with dropout see
        `parlinalg.nn.recompute`.  Parameters and tensors that it closes over get their gradients too.
    *inputs, **named
        What it is given; those that are tensors stay in their layouts.

    The tape has one value for it, whose sources are all tensors with gradients that the function used.  Terms of their
    gradients are added up as without; parameters' go to their reducer as soon as the last has arrived, so that its
    all-reduces overlap with the rest of the walk.

    Examples
    --------
    >>> import numpy as np, parlinalg as pla
    >>> from parlinalg.autograd import ops, recompute
    >>> grid = pla.Grid({"r": 1})
    >>> x = pla.Tensor(pla.distribute(np.arange(3.0), grid, pla.Layout("r")), requires_grad=True)
    >>> recompute(lambda x: ops.exp(x) * x, x).sum().backward()
    >>> x.grad.gather().round(3)
    array([ 1.   ,  5.437, 22.167])
    """
    if not recording():
        return function(*inputs, **named)
    used: dict[int, Node] = {}
    with only_noting(used):
        result = function(*inputs, **named)
    if not isinstance(result, Tensor):
        raise TypeError(f"recompute: the function gives one Tensor, not {type(result).__name__}")
    if result.node is not None:  # an input as it is
        return result
    data, sources = result.data, tuple(used.values())
    shape, layout = data.shape, data.layout

    def again(walk: Walk, grad: Block) -> None:
        with recorded() as since:
            y = function(*inputs, **named)
        if (y.shape, y.layout) != (shape, layout):
            raise LayoutError(
                f"recompute: the function gave shape {shape} in {layout!r}, and when called again in the backward "
                f"pass {y.shape} in {y.layout!r}; it must give the same"
            )
        Inner(walk, y.node, grad, since, sources).go()

    return record_again(data, sources, again)


class Inner(Walk):
    """The walk back over values computed again, within the walk that asked for them.

    It ends at the sources: their terms go into the outer walk's sums, in the order in which they would without.
    """

    def __init__(self, outer: Walk, root: Node | None, grad: Block, since: int, sources: Sequence[Node]) -> None:
        self.outer, self.root, self.since = outer, root, since
        self.edges: dict[int, int] = {}
        self.waiting = {node.age: node for node in sources if node.owner is not None}
        """The parameters of which the outer walk waits for terms."""
        if root is not None:
            super().__init__(root, (grad, root.layout.with_partial(())), later=outer.later, since=since)
            self.homeward = outer.homeward
            known = {node.age for node in sources}
            if any(node.age <= since and node.age not in known for node in self.nodes):
                raise RuntimeError(
                    "recompute: when called again in the backward pass the function used tensors that it did not use "
                    "before; it must do the same each time"
                )

    def go(self) -> None:
        """Walk; parameters may be left for later."""
        if self.root is None:
            self.finish()
            return
        self.run()
        if self.later:
            self.outer.deferred.append(self.run_parameters)

    def _reducers(self) -> list[Reducer]:
        return self.outer.reducers

    def visit(self, node: Node) -> None:
        if node.age > self.since:
            super().visit(node)

    def sum_of(self, node: Node) -> Arrivals:
        return super().sum_of(node) if node.age > self.since else self.outer.sum_of(node)

    def all_arrived(self, node: Node) -> None:
        if node.age > self.since:
            super().all_arrived(node)
        else:
            self.outer.count(self.waiting.pop(node.age))

    def finish(self) -> None:
        """Parameters that were not reached take nothing; terms on their way and reducers are the outer walk's."""
        for node in self.waiting.values():
            if node.age not in self.edges:
                self.outer.count(node)
