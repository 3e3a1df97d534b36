"""Weights as products use them: brought to work by their fetcher, where they have one."""

from __future__ import annotations

from typing import Any, NamedTuple

from parlinalg.autograd.arrivals import Term
from parlinalg.autograd.parameter import Parameter
from parlinalg.autograd.tape import Fetcher
from parlinalg.autograd.tensor import Tensor
from parlinalg.layout import Layout
from parlinalg.matmul.product import at_work

Block = Any


class Fetched(NamedTuple):
    """A parameter with a fetcher, and the order in which a product sees its dims."""

    parameter: Parameter
    fetcher: Fetcher
    order: tuple[int, ...]

    @property
    def back(self) -> tuple[int, ...]:
        """The order that undoes `order`."""
        return tuple(self.order.index(d) for d in range(len(self.order)))

    def at_work(self, work: Layout) -> Block:
        """The weight's block in the layout `work`."""
        block = self.fetcher.fetch(self.parameter, work.permuted(self.back))
        return block if self.order == self.back == tuple(range(len(self.order))) else block.transpose(self.order)

    def term(self, gradient: Term) -> Term:
        """A term of the parameter's gradient, from one of the weight's."""
        block, layout = gradient
        return block.transpose(self.back), layout.permuted(self.back)


def fetched(w: Tensor) -> Fetched | None:
    """The parameter that a weight is, or is a transposed view of, if that has a fetcher."""
    parameter, order = w.origin or (w, tuple(range(w.ndim)))
    if isinstance(parameter, Parameter) and parameter.fetcher is not None and parameter.grid.inside:
        return Fetched(parameter, parameter.fetcher, order)
    return None


def weight_at_work(w: Tensor, work: Layout) -> Block:
    """The block of a weight where the local product needs it."""
    found = fetched(w)
    return at_work(w.data, work) if found is None else found.at_work(work)
