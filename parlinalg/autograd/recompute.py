"""Values computed again in the backward pass, so that between the passes only the inputs are kept.

Chen et al., "Training deep nets with sublinear memory cost", 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from parlinalg.autograd.arrivals import Arrivals, Term
from parlinalg.autograd.tape import Node, Part, Reducer, Walk, only_noting, recorded, recording
from parlinalg.autograd.tensor import Tensor, record, record_again
from parlinalg.errors import LayoutError
from parlinalg.layout import Layout

Block = Any


def recompute(function: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """`function(*inputs, **named)`, of which only the inputs are kept: the backward pass calls the function again.

    Parameters
    ----------
    function : callable
        Gives one tensor, or a tuple of them, and when called again the same, bit for bit; for modules with dropout
        see `parlinalg.nn.recompute`.  Parameters and tensors that it closes over get their gradients too.
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
    results = result if isinstance(result, tuple) else (result,)
    for each in results:
        if not isinstance(each, Tensor):
            raise TypeError(f"recompute: the function gives Tensors, not {type(each).__name__}")
    if len(results) == 1 and results[0].node is not None:  # an input as it is
        return result
    made = _recomputed(lambda: function(*inputs, **named), results, tuple(used.values()))
    return made if isinstance(result, tuple) else made[0]


def _recomputed(
    function: Callable[[], Any], results: Sequence[Tensor], sources: Sequence[Node]
) -> tuple[Tensor, ...]:  # fmt: skip
    """The results on the tape.  The first has the sources; the others lead to it, and leave their gradients for it."""
    frames = [(r.shape, r.layout) for r in results]
    left: dict[int, Block] = {}

    def again(walk: Walk, grad: Block) -> None:
        with recorded() as since:
            found = function()
            ys = found if isinstance(found, tuple) else (found,)
            if (got := [(y.shape, y.layout) for y in ys]) != frames:
                raise LayoutError(
                    f"recompute: the function gave {_told(frames)}, and when called again in the backward pass "
                    f"{_told(got)}; it must give the same"
                )
            root = ys[0].node
            if left:
                grads = {0: grad, **left}
                left.clear()
                parts = [_given(grads[i], ys[i].layout.with_partial(())) for i in grads]
                root = record(ys[0].data, [ys[i] for i in grads], parts).node
        Inner(walk, root, grad, since, sources).go()

    first = record_again(results[0].data, sources, again)
    rest, zeros = first.layout.with_partial(()), first.grid.backend.zeros

    def leads(i: int) -> Part:
        def part(g: Block) -> Term:
            left[i] = g
            return zeros(first.block.shape, first.dtype), rest

        return part

    return (first, *(record(r.data, [first], [leads(i)]) for i, r in enumerate(results[1:], 1)))


def _given(block: Block, layout: Layout) -> Part:
    """A gradient that others may have a share in: a view of it, which nobody adds to."""
    return lambda _: (block[...], layout)


def _told(frames: Sequence[tuple[tuple[int, ...], Layout]]) -> str:
    return ", ".join(f"shape {shape} in {layout!r}" for shape, layout in frames)


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

    def completing(self, node: Node) -> Walk | None:
        found = super().completing(node)
        return found if found is None or node.age > self.since else self.outer.completing(node)

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
