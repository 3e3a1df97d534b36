"""One microbatch on its way through one stage: forward, and back in one part or in two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import Tensor
from parlinalg.autograd.rule import Part
from parlinalg.autograd.tape import Node, Walk, reachable
from parlinalg.grid import Grid
from parlinalg.layout import Layout

Block = Any


class Passage:
    """What a stage keeps of a microbatch between its forward and its backward pass.

    Parameters
    ----------
    grid : Grid
    inputs : sequence of Tensor
        What the stage got, leaves of its tape.
    outputs : sequence of Tensor
        What it gave; only their places on the tape are kept.
    """

    def __init__(self, grid: Grid, inputs: Sequence[Tensor], outputs: Sequence[Tensor] = ()) -> None:
        self.grid = grid
        self.inputs = [t.node for t in inputs]  # their values are the rules' to keep
        self.outputs = [t.node for t in outputs]
        self.terms: list[tuple[Node, float]] = []
        """Terms of the loss that this stage has, and what the gradient of each is."""
        self._walk: Walk | None = None

    def add(self, term: Tensor | float, factor: float) -> None:
        """Have a term of the loss, whose gradient is `factor`."""
        if isinstance(term, Tensor) and term.node is not None:
            self.terms.append((term.node, factor))

    def backward(self, grads: Sequence[Block | None] = (), *, later: bool = False, starts: bool = False) -> None:
        """Walk back from the gradients of all outputs at once, and from the terms of the loss.

        Parameters
        ----------
        grads : sequence of array or None
            This rank's blocks, which nobody else needs.  None where there is no gradient.
        later : bool
            Leave the gradients of parameters for `parameters`.
        starts : bool
            Start the sums of gradients as they arrive: no other pass adds to them before they are settled.
        """
        sources: list[Node] = []
        parts: list[Part] = []
        for node, grad in zip(self.outputs, grads or [None] * len(self.outputs), strict=True):
            if node is not None and grad is not None:
                sources.append(node)
                parts.append(_gives(grad, node.layout.with_partial(())))
        for node, factor in self.terms:
            shape = self.grid.block_shape(node.layout, node.shape)
            grad = self.grid.backend.from_host(np.full(shape, factor, node.dtype))
            sources.append(node)
            parts.append(_gives(grad, node.layout.with_partial(())))
        self.outputs, self.terms = [], []
        if sources:
            start = DistArray(self.grid.backend.zeros((), np.float32), (), Layout(), self.grid)
            root = Node(start, tuple(sources), tuple(parts))
            walk = Walk(root, (start.block, start.layout), later=later, starts=starts)
            walk.run()
            if later:
                self._walk = walk

    def parameters(self) -> None:
        """The gradients of parameters that `backward` left."""
        walk, self._walk = self._walk, None
        if walk is not None:
            walk.run_parameters()

    def holders(self) -> list[Node | Walk]:
        """What keeps arrays for passes to come: values on the tape, or the walk that left gradients of parameters."""
        if self._walk is not None:
            return [self._walk]
        roots = [*(node for node in self.outputs if node is not None), *(node for node, _ in self.terms)]
        found = {node.age: node for root in roots for node in reachable(root)}
        return [found[age] for age in sorted(found)]

    def input_gradients(self) -> list[DistArray | None]:
        """The gradients of what the stage got, and forget that."""
        grads = [None if node is None else node.grad for node in self.inputs]
        self.inputs = []
        return grads


def _gives(block: Block, layout: Layout) -> Part:
    return Part(lambda _, block: (block, layout), block)
