"""The tape: values in the order of their creation, and the backward pass over them.

A rule has one part for each input that wants a gradient.  A part takes the gradient of the value, in its layout, and
the arrays that were saved for it, and returns a term of its input's gradient: (block, layout).  What several parts need
(a gathered gradient) is prepared once and shared.  Parts are kept apart, so that those of parameters, and of weights
made of these, can run later than those of inputs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from parlinalg.array import DistArray
from parlinalg.autograd.gradients import GradientAccumulator, GradientScatter, Term
from parlinalg.autograd.rule import PackedArray, Part, is_array, without_hooks
from parlinalg.grid import Grid
from parlinalg.layout import Layout

if TYPE_CHECKING:
    from parlinalg.autograd.parameter import Parameter
    from parlinalg.autograd.storage import ParameterStorage

Block = Any

_recording: ContextVar[bool] = ContextVar("recording", default=True)
_syncing: ContextVar[bool] = ContextVar("syncing", default=True)
_used: ContextVar[dict[int, Node] | None] = ContextVar("used", default=None)
_walking: ContextVar[Walk | None] = ContextVar("walking", default=None)
_ages = itertools.count()


class Reducer(Protocol):
    """A reducer of gradients over the axes that do not cut their parameters, in buckets, during the backward pass."""

    def ready(self, parameter: Parameter, block: Block, layout: Layout, *, sync: bool) -> None:
        """Take the gradient of a parameter whose last term has arrived; `layout` may be partial, and has its cuts.

        It is to be added to what the parameter's storage holds, terms that `no_sync` left among them.
        Without `sync`, as within `no_sync`, it may stay a term.
        """

    def poll(self) -> None:
        """Progress pending communication; the backward pass calls this between nodes."""

    def finish(self, *, sync: bool) -> None:
        """End a backward pass: with `sync`, reduce all gradients, those of parameters not reached as zeros."""


class Node:
    """A value on the tape.

    Attributes
    ----------
    age : int
        Values are numbered in the order of their creation.
    shape, layout, dtype, grid
        Those of the value, to which its gradient settles.
    sources : tuple of Node
        The inputs that want a gradient; none in a leaf.
    op : str
        The name of the operation.
    parts : tuple of Part or None
        The rule, one part a source.  None once a walk has used it.
    prepare : Part or None
        What the parts are given, from the gradient; by default the gradient itself.
    recompute : Part or None
        For a recomputed value: runs the forward pass again and then its backward pass, given the walk and the incoming
        gradient.  None once a walk has used it.
    grad : DistArray or None
        The gradient of a leaf that is no parameter.
    owner : weak reference to a Parameter, or None
    late : bool
        True of parameters, and of values made of these alone by operations that save no arrays, such as transposed
        weights: no input's gradient waits for theirs.
    takes_partial : bool
        Whether the parts are linear and take the gradient as a term, (block, layout), which may be partial over axes
        that do not cut the value: it is summed later, where it has fewer elements.
    """

    __slots__ = (
        "age", "dtype", "grad", "grid", "late", "layout", "op", "owner", "parts", "prepare", "recompute", "shape",
        "sources", "takes_partial",
    )  # fmt: skip

    def __init__(
        self,
        data: DistArray,
        sources: tuple[Node, ...] = (),
        parts: tuple[Part, ...] = (),
        prepare: Part | None = None,
        recompute: Part | None = None,
        takes_partial: bool = False,
        op: str = "",
    ) -> None:
        self.age = next(_ages)
        self.op = op
        self.shape = data.shape
        self.layout = data.layout
        self.dtype = data.dtype
        self.grid: Grid = data.grid
        self.sources = sources
        self.parts: tuple[Part, ...] | None = parts
        self.prepare = prepare
        self.recompute = recompute
        self.grad: DistArray | None = None
        self.owner: weakref.ref[Parameter] | None = None
        self.takes_partial = takes_partial
        self.late: bool = bool(sources) and recompute is None and all(source.late for source in sources) and not any(
            is_array(s) or type(s) is PackedArray for rule in self.rules() for s in rule.saved
        )  # fmt: skip

    @property
    def used(self) -> bool:
        """True if a walk has used the rule up."""
        return self.parts is None and self.recompute is None

    def rules(self, *, late: bool = True) -> Iterator[Part]:
        """Iterate over the functions that run in a backward pass: the shared preparation, and the parts.

        Parameters
        ----------
        late : bool
            Whether the parts for gradients that may come later are among them.
        """
        for shared in (self.prepare, self.recompute):
            if shared is not None:
                yield shared
        for part, source in zip(self.parts or (), self.sources, strict=False):
            if late or not source.late:
                yield part

    def saved(self) -> Iterator[Any]:
        """Iterate over all that is saved for the rule: arrays, and what hooks packed them as.

        An array that several parts need comes several times.
        """
        for rule in self.rules():
            yield from _saved(rule)

    def accumulator(self) -> GradientAccumulator:
        """Return an empty sum for this value's gradient."""
        return GradientAccumulator(self.shape, self.layout, self.dtype, self.grid)

    def array(self, term: Term) -> DistArray:
        """Return a term of this value's gradient as an array."""
        return DistArray(term[0], self.shape, term[1], self.grid)

    @property
    def holder(self) -> Node | ParameterStorage:
        """The holder of a leaf's gradient: the storage of a parameter, or this node."""
        owner = self.owner() if self.owner is not None else None
        return self if owner is None else owner.storage

    def deposit(self, block: Block) -> None:
        """Add a settled gradient, whose block is nobody else's, to that of a leaf."""
        holder, new = self.holder, self.array((block, self.layout.with_partial(())))
        if (held := holder.grad) is None:
            holder.grad = new
        elif held.layout.partial:
            both = self.accumulator()
            both.add((held.block, held.layout), owned=True)
            both.add((block, new.layout), owned=True)
            holder.grad = self.array(both.settled())
        else:
            holder.grad = self.array((held.block + block, new.layout))


@contextmanager
def no_grad() -> Iterator[None]:
    """Context in which no operation is recorded: results need no gradient, and keep nothing for a backward pass."""
    token = _recording.set(False)
    try:
        yield
    finally:
        _recording.reset(token)


@contextmanager
def no_sync() -> Iterator[None]:
    """Context in which a backward pass leaves parameters' gradients unsummed over axes that do not cut them.

    They add up in `parameter.grad`, in a partial layout; the next backward pass outside settles the sum, so that
    several microbatches share one all-reduce.
    """
    token = _syncing.set(False)
    try:
        yield
    finally:
        _syncing.reset(token)


def recording() -> bool:
    """Return True if operations are recorded: not within `no_grad`."""
    return _recording.get()


def tracing() -> bool:
    """Return True if operations are recorded, or will be when they are computed again."""
    return _recording.get() or _used.get() is not None


def walking() -> Walk | None:
    """Return the backward pass that is running, or None."""
    return _walking.get()


@contextmanager
def only_noting(used: dict[int, Node]) -> Iterator[None]:
    """Context in which no operation is recorded, but inputs that require gradients are noted, by their ages."""
    tokens = _recording.set(False), _used.set(used)
    try:
        yield
    finally:
        _recording.reset(tokens[0])
        _used.reset(tokens[1])


@contextmanager
def recorded() -> Iterator[int]:
    """Context in which operations are recorded, even within `no_grad`; yields an age that all values made exceed."""
    tokens = _recording.set(True), _used.set(None)
    try:
        with without_hooks():
            yield next(_ages)
    finally:
        _recording.reset(tokens[0])
        _used.reset(tokens[1])


def note(inputs: Iterable[Node | None]) -> None:
    """Note which inputs of an operation that is not recorded want gradients, if that is asked for."""
    used = _used.get()
    if used is not None:
        used.update((node.age, node) for node in inputs if node is not None)


def reachable(root: Node, since: int = -1) -> list[Node]:
    """Return the root and all it was made from, the youngest first: no node comes before one made from it.

    Inputs of values with age ≤ `since` are not visited.
    """
    found: dict[int, Node] = {}
    stack = [root]
    while stack:
        node = stack.pop()
        if node.age not in found:
            found[node.age] = node
            if node.age > since:
                stack.extend(node.sources)
    return [found[age] for age in sorted(found, reverse=True)]


class Deferred(NamedTuple):
    """A part that is to run later: the arguments of `Walk.send`."""

    source: Node
    part: Part
    shared: Any
    grad: Block


class Walk:
    """A backward pass from `root`, whose gradient is `term`.  `run()` is all of it.

    With `later=True`, `run()` computes the gradients of inputs only; `run_parameters()` then computes those of values
    that are `late`, from what `run()` prepared and kept.  The walk stops at values with age ≤ `since`.
    With `starts=True` sums of gradients start as these arrive, also within `no_sync`; who walks has to settle them.
    """

    def __init__(
        self, root: Node, term: Term, *, retain: bool = False, later: bool = False, since: int = -1,
        starts: bool = False,
    ) -> None:  # fmt: skip
        self.nodes = reachable(root, since)
        self.retain, self.later, self.starts = retain, later, starts
        self.deferred: list[Deferred | Node | Walk] = []  # in the order of the walk
        self.scatter = GradientScatter()
        self.sync = starts or _syncing.get()
        self.arrived: dict[int, GradientAccumulator] = {}
        self.edges: dict[int, int] = {}  # the terms of each parameter that have not arrived
        for source in (root, *(s for node in self.nodes if node.age > since for s in node.sources)):
            if source.owner is not None:
                self.edges[source.age] = self.edges.get(source.age, 0) + 1
        self.reducers = self._reducers()
        self.arrive(root, term)

    def _reducers(self) -> list[Reducer]:
        """Return the reducers of the parameters reached, once each, the oldest parameter's first."""
        found: dict[int, Reducer] = {}
        for node in reversed(self.nodes):
            owner = node.owner() if node.owner is not None else None
            if owner is not None and owner.reducer is not None:
                found.setdefault(id(owner.reducer), owner.reducer)
        return list(found.values())

    def run(self) -> None:
        """Walk from the youngest value to the oldest; every rank issues the same collectives in the same order."""
        token = _walking.set(self)
        try:
            for node in self.nodes:
                if node.owner is None:
                    self.visit(node)
                    self.poll()
            if not self.later:
                self.finish()
        finally:
            _walking.reset(token)

    def poll(self) -> None:
        """Progress pending communication: MPI progresses only within its calls."""
        for reducer in self.reducers:
            reducer.poll()
        self.scatter.poll()
        self.nodes[0].grid.poll()

    def visit(self, node: Node) -> None:
        """Finish a value's gradient and run its rule, or put that off; for a leaf, add it to the stored gradient."""
        if self.later and node.late:
            self.deferred.append(node)
            return
        got = self.arrived.pop(node.age, None)
        if not node.sources:
            if got is not None:
                block, _ = got.settled()
                node.deposit(got.own(block))
            return
        if node.used:
            raise RuntimeError(
                "backward() meets values that an earlier backward() has used up; pass retain=True to that one, or "
                "compute them again"
            )
        if got is None:
            for source in node.sources:
                self.arrive(source, None)
        elif node.recompute is not None:
            node.recompute(self, got.settled()[0])
        elif (part := self.taker(node)) is not None:
            given = [got.settled()[0]]
            del got
            self.arrive(node.sources[0], part(given), None)
        else:
            if node.takes_partial:
                grad, layout = got.summed()
                shared = (grad, layout)
            else:
                grad, _ = got.settled()
                shared = grad if node.prepare is None else node.prepare(grad)
            for source, part in zip(node.sources, node.parts or (), strict=True):
                if self.later and source.late:
                    self.deferred.append(Deferred(source, part, shared, grad))
                else:
                    self.send(source, part, shared, grad)
        if not self.retain:  # what the rule holds is freed as the walk goes
            node.parts = node.prepare = node.recompute = None

    def taker(self, node: Node) -> Part | None:
        """Return the only part of a node's rule if it runs now and takes the gradient, else None."""
        if len(node.sources) > 1 or not node.parts or not node.parts[0].takes:
            return None
        return None if self.later and node.sources[0].late else node.parts[0]

    def send(self, source: Node, part: Part, shared: Any, grad: Block) -> None:
        """Send on a term of a source's gradient, by its part of the rule."""
        self.arrive(source, part([shared] if part.takes else shared), shared, grad)

    def run_parameters(self) -> None:
        """Compute the gradients of the parameters, after a `run()` that left them for later."""
        self.deferred.reverse()
        self.later = False
        token = _walking.set(self)
        try:
            while self.deferred:
                each = self.deferred.pop()
                if isinstance(each, Walk):
                    each.run_parameters()
                elif isinstance(each, Node):
                    self.visit(each)
                else:
                    self.send(*each)
                del each  # and what it holds is freed
                self.poll()
            self.finish()
        finally:
            _walking.reset(token)

    def saved(self) -> Iterator[Any]:
        """Iterate over all arrays that the walk holds: those of parts that run later, and sums of gradients so far."""
        for each in self.deferred:
            if isinstance(each, Walk):
                yield from each.saved()
            elif isinstance(each, Deferred):
                yield from _saved(each.part)
                yield from _arrays(each.shared)
                yield each.grad
        for sums in self.arrived.values():
            yield from sums.terms.values()

    def upcoming(self) -> Iterator[PackedArray]:
        """Iterate over the packed arrays that the walk will still need, in its order.

        With `later`, arrays that only the gradients of parameters need are skipped until `run_parameters`.
        """
        for node in self.nodes:  # those behind the walk have nothing that waits
            for rule in node.rules(late=not self.later):
                yield from _packed(rule)
        if not self.later:
            for each in reversed(self.deferred):
                if isinstance(each, Deferred):
                    yield from _packed(each.part)

    def arrive(self, node: Node, term: Term | None, *others: Any) -> None:
        """Take a term of a node's gradient, computed from what `others` hold; None is no term where one was due."""
        if (term := self.scatter.formed(self, node, term)) is not None:
            block = term[0]
            ours = bool(others) and block.base is None and not any(block is other for other in others)
            if self.scatter.takes(self, node, term, ours):
                return
            self.sum_of(node).add(term, owned=ours)
        if node.owner is not None:
            self.count(node)

    def landed(self, node: Node, term: Term) -> None:
        """Take a term of a parameter's gradient that has come to the layout in which the parameter rests."""
        self.sum_of(node).add(term, owned=True)
        self.count(node)

    def sum_of(self, node: Node) -> GradientAccumulator:
        """Return the sum of the terms of a node's gradient so far."""
        if node.age not in self.arrived:
            self.arrived[node.age] = node.accumulator()
        return self.arrived[node.age]

    def count(self, node: Node) -> None:
        """Count one term less for which a parameter waits."""
        self.edges[node.age] -= 1
        if not self.edges[node.age]:
            self.all_arrived(node)

    def completing(self, node: Node) -> Walk | None:
        """Return the walk that a parameter's gradient leaves, if the next term is all of it."""
        return self if self.edges[node.age] == 1 and node.age not in self.arrived else None

    def all_arrived(self, node: Node) -> None:
        """Note that the last term of a parameter's gradient is here."""
        if (got := self.arrived.pop(node.age, None)) is not None:
            self.complete(node, got)

    def complete(self, node: Node, got: GradientAccumulator) -> None:
        """Give the complete gradient of a parameter to the reducer."""
        owner = node.owner() if node.owner is not None else None
        if owner is not None and owner.reducer is not None:
            owner.reducer.ready(owner, *got.summed(), sync=self.sync)
            return
        holder = node.holder
        held = holder.grad
        if held is not None and (held.layout.partial or not self.sync):
            got.add((held.block, held.layout), owned=True)
            holder.grad = None
        if not self.sync:
            block, layout = got.summed()
            holder.grad = node.array((got.own(block), layout))
        else:
            block, _ = got.settled()
            node.deposit(got.own(block))

    def finish(self) -> None:
        self.scatter.finish(self)
        if not self.starts:
            for reducer in self.reducers:
                reducer.finish(sync=self.sync)


def _saved(part: Part) -> Iterator[Any]:
    return (s.value if type(s) is PackedArray else s for s in part.saved)


def _packed(part: Part) -> Iterator[PackedArray]:
    return (s for s in part.saved if type(s) is PackedArray and s.waits)


def _arrays(value: Any) -> Iterator[Block]:
    """Yield the arrays in what `prepare` gave: one, or a tuple or list of them."""
    if isinstance(value, tuple | list):
        for each in value:
            yield from _arrays(each)
    elif is_array(value):
        yield value
