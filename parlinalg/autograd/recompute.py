"""Values computed again in the backward pass, so that between the passes only the inputs are kept.

Chen et al., "Training deep nets with sublinear memory cost", 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from parlinalg.array import DistArray
from parlinalg.autograd.gradients import GradientAccumulator, Term
from parlinalg.autograd.parameter import Parameter
from parlinalg.autograd.rule import Part, is_array
from parlinalg.autograd.tape import Node, Reducer, Walk, only_noting, recorded, recording
from parlinalg.autograd.tensor import Tensor, record, record_again
from parlinalg.errors import LayoutError
from parlinalg.layout import Layout

Block = Any


def recompute(function: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """Return `function(*inputs, **named)`, but keep only its inputs: the backward pass calls the function again.

    Parameters
    ----------
    function : callable
        Gives one tensor, or a tuple of them, which may be a named one and have DistArrays, constants, among them.  When
        called again it gives the same, bit for bit; for modules with dropout see `parlinalg.nn.recompute`.  Parameters
        and tensors that it closes over get their gradients too.
    *inputs, **named
        What it is given; those that are tensors stay in their layouts.  The arrays in them, and in tuples, lists and
        dicts of them, are saved for the backward pass.  Arrays that the function closes over are its own to keep: they
        are neither counted as saved nor go through `saved_arrays_hooks`.

    The tape has one value for it, whose sources are all tensors with gradients that the function used.  Terms of their
    gradients are added up as without; parameters' go to their reducer as soon as the last has arrived, so that its
    all-reduces overlap with the rest of the backward pass.

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
    for each in result if isinstance(result, tuple) else (result,):
        if not isinstance(each, Tensor) and not (isinstance(each, DistArray) and isinstance(result, tuple)):
            raise TypeError(f"recompute: the function gives Tensors, not {type(each).__name__}")
    results = _tensors(result)
    if not results or (len(results) == 1 and results[0].node is not None):  # constants, or an input as it is
        return result
    arrays: list[Block] = []
    made_again = taken_apart((inputs, named), arrays)

    def call(arrays: Sequence[Block]) -> Any:
        inputs, named = made_again(arrays)
        return function(*inputs, **named)

    made = iter(_recomputed(call, arrays, results, tuple(used.values())))
    if not isinstance(result, tuple):
        return next(made)
    kind = getattr(type(result), "_make", type(result))  # a named tuple, such as that of an SVD, or another one
    return kind(next(made) if isinstance(each, Tensor) else each for each in result)


def _tensors(result: Any) -> tuple[Tensor, ...]:
    """Return the tensors among what a function gives."""
    return tuple(x for x in (result if isinstance(result, tuple) else (result,)) if isinstance(x, Tensor))


def taken_apart(value: Any, arrays: list[Block]) -> Callable[[Sequence[Block]], Any]:
    """Append the arrays of a value to `arrays`, and return what makes the value again from all of these.

    Parameters
    ----------
    value : object
        An array, a DistArray, a Tensor, or a tuple, list or dict of them; parameters, arrays that do not stay in
        memory, and everything else stay as they are.
    """
    at = len(arrays)
    if isinstance(value, tuple | list):
        makes = [taken_apart(each, arrays) for each in value]
        kind = getattr(type(value), "_make", type(value))
        return lambda found: kind([make(found) for make in makes])
    if isinstance(value, dict):
        each = {key: taken_apart(v, arrays) for key, v in value.items()}
        return lambda found: {key: make(found) for key, make in each.items()}
    if isinstance(value, Tensor) and not isinstance(value, Parameter):
        data, node, origin = taken_apart(value.data, arrays), value.node, value.origin
        return lambda found: _tensor(data(found), node, origin)
    if isinstance(value, DistArray) and (block := value.resident) is not None:
        arrays.append(block)
        shape, layout, grid, order = value.shape, value.layout, value.grid, value.order
        return lambda found: DistArray(found[at], shape, layout, grid, order)
    if is_array(value):
        arrays.append(value)
        return lambda found: found[at]
    return lambda _: value


def _tensor(data: DistArray, node: Node | None, origin: Any) -> Tensor:
    made = Tensor(data)
    made._node, made.origin = node, origin
    return made


def _recomputed(
    function: Callable[[Sequence[Block]], Any], arrays: Sequence[Block], results: Sequence[Tensor],
    sources: Sequence[Node],
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the results on the tape: the first has the sources, and the others leave their gradients for it."""
    frames = [(r.shape, r.layout) for r in results]
    left: dict[int, Block] = {}

    def again(walk: Walk, grad: Block, *arrays: Block) -> None:
        with recorded() as since:
            ys = _tensors(function(arrays))
            if (got := [(y.shape, y.layout) for y in ys]) != frames:
                raise LayoutError(
                    f"recompute: the function gave {_listed(frames)}, and when called again in the backward pass "
                    f"{_listed(got)}; it must give the same"
                )
            root = ys[0].node
            if left:
                grads = {0: grad, **left}
                left.clear()
                parts = [_given(grads[i], ys[i].layout.with_partial(())) for i in grads]
                root = record("recompute", ys[0].data, [ys[i] for i in grads], parts).node
        Inner(walk, root, grad, since, sources).go()

    first = record_again("recompute", results[0].data, sources, Part(again, *arrays))
    rest, local, dtype, zeros = first.layout.with_partial(()), first.block.shape, first.dtype, first.grid.backend.zeros

    def leads(i: int) -> Part:
        def part(g: Block) -> Term:
            left[i] = g
            return zeros(local, dtype), rest

        return Part(part)

    return (first, *(record("recompute", r.data, [first], [leads(i)]) for i, r in enumerate(results[1:], 1)))


def _given(block: Block, layout: Layout) -> Part:
    """Return a gradient that others may have a share in: a view of it, which nobody adds to."""
    return Part(lambda _, block: (block[...], layout), block)


def _listed(frames: Sequence[tuple[tuple[int, ...], Layout]]) -> str:
    return ", ".join(f"shape {shape} in {layout!r}" for shape, layout in frames)


class Inner(Walk):
    """The backward pass over recomputed values, within the walk that asked for them.

    It ends at the sources: their terms go into the outer walk's sums, in the order in which they would without.
    """

    def __init__(self, outer: Walk, root: Node | None, grad: Block, since: int, sources: Sequence[Node]) -> None:
        self.outer, self.root, self.since = outer, root, since
        self.edges: dict[int, int] = {}
        self.waiting = {node.age: node for node in sources if node.owner is not None}
        """The parameters of which the outer walk waits for terms."""
        if root is not None:
            super().__init__(root, (grad, root.layout.with_partial(())), later=outer.later, since=since)
            self.scatter = outer.scatter
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
            self.outer.deferred.append(self)

    def _reducers(self) -> list[Reducer]:
        return self.outer.reducers

    def visit(self, node: Node) -> None:
        if node.age > self.since:
            super().visit(node)

    def sum_of(self, node: Node) -> GradientAccumulator:
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
        """Do nothing: unreached parameters take nothing; terms on their way and reducers are the outer walk's."""
        for node in self.waiting.values():
            if node.age not in self.edges:
                self.outer.count(node)
