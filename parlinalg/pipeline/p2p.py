"""Point-to-point messages between the stages of a pipeline: trees of arrays, from one processor grid to another.

The first message of a kind is preceded by a description; then both sides know its form, and the receiver can post its
receives before the sender is there.  Sends never wait.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.create import dtype_named
from parlinalg.autograd import Tensor
from parlinalg.comm import Comm, Handle
from parlinalg.errors import ConfigError, LayoutError
from parlinalg.exchange import Rect, local, volume
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.pipeline.resharding import Route, Table, cached_route, counterpart_layout, input_role, layout_table
from parlinalg.pipeline.topology import PipelineTopology

#: What a tree is beside its tensors, as JSON can carry it: `["tensor"]`, `["value", 3]`, `["tuple", …]`, `["list", …]`
#: or `["dict", [key, …], …]`.
TreeSpec = list[Any]


def tree_flatten(tree: Any) -> tuple[TreeSpec, list[Tensor]]:
    """Return the form of a tree and its tensors, in order.

    Parameters
    ----------
    tree : Tensor, DistArray, None, bool, int, float, str, or tuple, list, dict with str keys of these

    Raises
    ------
    ConfigError
        If there is something else in it.

    Examples
    --------
    >>> tree_flatten({"a": (1, None)})
    (['dict', ['a'], ['tuple', ['value', 1], ['value', None]]], [])
    """
    found: list[Tensor] = []
    return _form(tree, found), found


def _form(tree: Any, found: list[Tensor]) -> TreeSpec:
    if isinstance(tree, Tensor | DistArray):
        found.append(tree if isinstance(tree, Tensor) else Tensor(tree))
        return ["tensor"]
    if tree is None or type(tree) in (bool, int, float, str):
        return ["value", tree]
    if type(tree) in (tuple, list):
        return [type(tree).__name__, *(_form(each, found) for each in tree)]
    if type(tree) is dict and all(type(key) is str for key in tree):
        return ["dict", list(tree), *(_form(each, found) for each in tree.values())]
    raise ConfigError(
        f"between the stages of a pipeline pass tensors, numbers, texts and None, in tuples, lists and dicts with text "
        f"keys, not a {type(tree).__name__}"
    )


def tree_unflatten(form: TreeSpec, tensors: list[Tensor]) -> Any:
    """Return the tree of a form with these tensors.

    >>> tree_unflatten(["list", ["value", 1], ["tuple"]], [])
    [1, ()]
    """
    left = iter(tensors)
    return _tree(form, left)


def _tree(form: TreeSpec, left: Any) -> Any:
    kind, *rest = form
    if kind == "tensor":
        return next(left)
    if kind == "value":
        return rest[0]
    if kind == "dict":
        return {key: _tree(each, left) for key, each in zip(rest[0], rest[1:], strict=True)}
    each = [_tree(one, left) for one in rest]
    return tuple(each) if kind == "tuple" else each


def summed(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors as they pass between stages, their terms summed.  Collective."""
    return [t.redistribute(t.layout.with_partial(())) if t.layout.partial else t for t in tensors]


if TYPE_CHECKING:
    from parlinalg.pipeline.model import PipelineModel

Block = Any
HEAD = 4096
"""Bytes of the announcement before the first message; more follow where they are too few."""
TAGS = 32767
"""Every MPI takes tags up to this one."""


class Edge(NamedTuple):
    """The boundary before a stage of a copy of the model, which microbatches cross."""

    stage: int
    copy: int = 0


class ArraySpec(NamedTuple):
    """An array that passes: its shape and dtype, its layouts before and after, and whether its gradient comes back."""

    shape: tuple[int, ...]
    dtype: str
    source: Layout
    target: Layout
    wants: bool


@dataclass(frozen=True)
class MessageSpec:
    """The form of the data that crosses an edge, without the values."""

    form: TreeSpec
    leaves: tuple[ArraySpec, ...]

    def packed(self) -> bytes:
        """Return the form as bytes."""
        leaves = [[leaf.shape, leaf.dtype, leaf.source.dims, leaf.target.dims, leaf.wants] for leaf in self.leaves]
        return json.dumps([self.form, leaves]).encode()

    @classmethod
    def unpacked(cls, data: bytes) -> MessageSpec:
        """Return the form from the bytes of `packed`."""
        form, leaves = json.loads(data)
        return cls(form, tuple(ArraySpec(tuple(s), d, Layout(*a), Layout(*b), w) for s, d, a, b, w in leaves))


@dataclass(eq=False)
class Incoming:
    """Arrays on their way to this rank.

    Attributes
    ----------
    blocks : list of array or None
        The receiving arrays; None is no array.
    parts : list of (Handle, array, tuple of slices, int)
        Rectangles that arrive apart, and where in which of the blocks they belong.
    """

    blocks: list[Block]
    handles: list[Handle] = field(default_factory=list)
    parts: list[tuple[Block, tuple[slice, ...], int]] = field(default_factory=list)

    def test(self) -> bool:
        """Return True if all arrays have arrived; lets MPI make progress."""
        return all(handle.test() for handle in self.handles)

    def wait(self) -> list[Block]:
        """Wait for the blocks, and return them."""
        for handle in self.handles:
            handle.wait()
        for part, where, i in self.parts:
            self.blocks[i][where] = part
        return self.blocks


class P2P:
    """This rank's messages to and from the stages before and after its own.

    Parameters
    ----------
    topology : PipelineTopology
    comm : Comm
        A communicator of the ranks of `topology.world`, for these messages alone.
    grid : Grid
        This rank's.
    tables : sequence of dict
        By pipeline rank: the layouts of its scheme (see resharding.layout_table).
    input_roles : dict of Edge to str or None
        The input of the first product in each stage or after it (see `resharding.input_role`).
    """

    def __init__(
        self, topology: PipelineTopology, comm: Comm, grid: Grid, tables: Sequence[Table],
        input_roles: dict[Edge, str | None],
    ) -> None:  # fmt: skip
        self.topology, self.comm, self.grid = topology, comm, grid
        self.tables, self.input_roles = tables, input_roles
        self.position = topology.ranks[topology.rank].index(topology.world.rank)
        """This rank's position in the row-major order of its grid."""
        self._axes = [tuple(sizes.items()) for sizes in topology.sizes]
        self._specs: dict[tuple[Edge, Hashable], MessageSpec] = {}
        self._sent: deque[Handle] = deque()
        self._coming: dict[Incoming, None] = {}
        numbers = {edge: i for i, edge in enumerate(sorted(input_roles))}
        self._numbers = numbers
        self._turns = (TAGS - 1) // max(1, 2 * len(numbers))

    @classmethod
    def of(cls, model: PipelineModel, comm: Comm) -> P2P:
        """Return the messages between a model's stages, once all ranks know each other's layouts.  Collective."""
        topology, grid = model.topology, model.grid
        roles = [input_role(m for layer in s.layers for m in layer.modules) for s in model.chunks]
        first = comm.rank == topology.ranks[topology.rank][0]
        everyone = comm.share([layout_table(model.scheme, grid.sizes), roles] if first else None, others="by rank")
        tables, inputs = zip(*(everyone[ranks[0]] for ranks in topology.ranks), strict=True)
        edges = {
            Edge(chunk.stage, chunk.copy): role
            for held, found in zip(model.schedule.chunks, inputs, strict=True)
            for chunk, role in zip(held, found, strict=True)
        }
        for edge in sorted(edges, reverse=True):  # a stage without products gives the next one what it takes
            edges[edge] = edges[edge] or edges.get(edge._replace(stage=edge.stage + 1))
        return cls(topology, comm, grid, tables, edges)

    # ------------------------------------------------------------------ what passes
    def known(self, edge: Edge, signature: Hashable) -> bool:
        """Return True if this rank knows the form of data at an edge, for microbatches like this one."""
        return (edge, signature) in self._specs

    def spec(self, edge: Edge, signature: Hashable) -> MessageSpec:
        """Return the form of data at an edge."""
        return self._specs[edge, signature]

    def _spec_of(self, edge: Edge, peer: int, form: TreeSpec, tensors: Sequence[Tensor]) -> MessageSpec:
        here, there = self.topology.rank, peer
        leaves = []
        for t in tensors:
            source = self.grid.effective(t.layout)
            target = counterpart_layout(
                source, self.topology.sizes[here], self.tables[here], self.topology.sizes[there], self.tables[there],
                self.input_roles[edge], t.dtype.kind not in "iub",
            )  # fmt: skip
            leaves.append(ArraySpec(t.shape, t.dtype.name, source, target, t.node is not None))
        return MessageSpec(form, tuple(leaves))

    # ------------------------------------------------------------------ forward
    def send(
        self, edge: Edge, microbatch: int, peer: int, signature: Hashable, form: TreeSpec, tensors: Sequence[Tensor]
    ) -> MessageSpec:  # fmt: skip
        """Start to send what a stage gave to the pipeline rank that holds the next one.

        Parameters
        ----------
        edge : Edge
            That of the stage that receives.
        signature : hashable
            Microbatches of the same signature have the same form at every edge.

        Raises
        ------
        LayoutError
            If they do not, or an array has no layout on the other grid.
        """
        found = self._spec_of(edge, peer, form, tensors)
        tag = self._tag(edge, microbatch, back=False)
        if not self.known(edge, signature):
            self._specs[edge, signature] = found
            self._announce(found.packed(), peer, tag)
        elif found != self.spec(edge, signature):
            raise LayoutError(
                f"what passes to stage {edge.stage} was {self.spec(edge, signature)} for a microbatch like this, and "
                f"now is {found}: its shapes may depend on the shapes of a batch only"
            )
        for leaf, tensor in zip(found.leaves, tensors, strict=True):
            self._send(tensor.block, self._route(leaf, peer, back=False, outward=True), peer, tag)
        return found

    def post(self, edge: Edge, microbatch: int, peer: int, signature: Hashable) -> Incoming:
        """Post the receives of a stage's inputs; waits only if their form is not known yet."""
        tag = self._tag(edge, microbatch, back=False)
        if not self.known(edge, signature):
            self._specs[edge, signature] = MessageSpec.unpacked(self._announced(peer, tag))
        leaves = self.spec(edge, signature).leaves
        return self._post([(leaf, self._route(leaf, peer, back=False, outward=False)) for leaf in leaves], peer, tag)

    # ------------------------------------------------------------------ backward
    def send_back(
        self, edge: Edge, microbatch: int, peer: int, signature: Hashable, grads: Sequence[DistArray | None]
    ) -> None:  # fmt: skip
        """Start to send the gradients of what a stage got; None is a gradient of zeros."""
        tag = self._tag(edge, microbatch, back=True)
        for leaf, grad in zip(self.spec(edge, signature).leaves, grads, strict=True):
            if leaf.wants:
                route = self._route(leaf, peer, back=True, outward=True)
                self._send(self._zeros(leaf) if grad is None else grad.block, route, peer, tag)

    def post_back(self, edge: Edge, microbatch: int, peer: int, signature: Hashable) -> Incoming:
        """Post the receives of the gradients of a stage's outputs."""
        leaves = self.spec(edge, signature).leaves
        routes = [(leaf, self._route(leaf, peer, back=True, outward=False) if leaf.wants else None) for leaf in leaves]
        return self._post(routes, peer, self._tag(edge, microbatch, back=True))

    # ------------------------------------------------------------------ progress
    def poll(self) -> None:
        """Make communication progress, which MPI does only within its calls."""
        while self._sent and self._sent[0].test():
            self._sent.popleft()
        for incoming in self._coming:
            if not incoming.test():
                return

    def take(self, incoming: Incoming) -> list[Block]:
        """Wait for arrays to arrive."""
        blocks = incoming.wait()
        self._coming.pop(incoming, None)
        return blocks

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        while self._sent:
            self._sent.popleft().wait()

    # ------------------------------------------------------------------ blocks
    def _tag(self, edge: Edge, microbatch: int, *, back: bool) -> int:
        """Return the tag of a message, which repeats after `_turns` microbatches."""
        return 1 + (2 * self._numbers[edge] + back) * self._turns + microbatch % self._turns

    def _route(self, leaf: ArraySpec, peer: int, *, back: bool, outward: bool) -> Route:
        """Return the route of an array, or with `back` of its gradient; `outward` is from this rank."""
        mine, theirs = self._axes[self.topology.rank], self._axes[peer]
        one, other = (leaf.target, leaf.source) if back else (leaf.source, leaf.target)
        return cached_route(leaf.shape, one, mine if outward else theirs, other, theirs if outward else mine)

    def _zeros(self, leaf: ArraySpec) -> Block:
        shape = self.grid.block_shape(leaf.target, leaf.shape)
        return self.grid.backend.zeros(shape, dtype_named(leaf.dtype))

    def _send(self, block: Block, route: Route, peer: int, tag: int) -> None:
        have = route.haves[self.position]
        for target, part in route.sends(self.position):
            sent = block if part == have else block[local(part, have)]
            if not sent.flags.c_contiguous:
                sent = sent.copy(order="C")
            self._sent.append(self.comm.send(sent, self.topology.ranks[peer][target], tag=tag, wait=False))

    def _post(self, routes: Sequence[tuple[ArraySpec, Route | None]], peer: int, tag: int) -> Incoming:
        found = Incoming([None] * len(routes))
        for i, (leaf, route) in enumerate(routes):
            if route is None:
                continue
            dtype, want = dtype_named(leaf.dtype), route.wants[self.position]
            block = found.blocks[i] = self.grid.backend.empty(_shape(want), dtype)
            for source, part in route.receives(self.position):
                whole = volume(part) == block.size
                got = block if whole else self.grid.backend.empty(_shape(part), dtype)
                if not whole:
                    found.parts.append((got, local(part, want), i))
                found.handles.append(
                    self.comm.receive(got, self.topology.ranks[peer][source], tag=tag, wait=False)
                )  # fmt: skip
        self._coming[found] = None
        return found

    # ------------------------------------------------------------------ announcements
    def _announce(self, data: bytes, peer: int, tag: int) -> None:
        """Tell the ranks of another grid, each by one of this one, in one order with what follows."""
        head = np.zeros(HEAD, np.uint8)
        head[:8] = np.frombuffer(len(data).to_bytes(8, "little"), np.uint8)
        first = data[: HEAD - 8]
        head[8 : 8 + len(first)] = np.frombuffer(first, np.uint8)
        rest = np.frombuffer(data[HEAD - 8 :], np.uint8)
        theirs = self.topology.ranks[peer]
        for target, rank in enumerate(theirs):
            if self._announcer(target, len(theirs), len(self.topology.ranks[self.topology.rank])) == self.position:
                for part in (head, rest):
                    if part.size:
                        self._sent.append(self.comm.send(part, rank, tag=tag, wait=False))

    def _announced(self, peer: int, tag: int) -> bytes:
        """Receive the form of data that the other grid's rank announces."""
        ours, theirs = self.topology.ranks[self.topology.rank], self.topology.ranks[peer]
        source = theirs[self._announcer(self.position, len(ours), len(theirs))]
        head = np.empty(HEAD, np.uint8)
        self.comm.receive(head, source, tag=tag)
        length = int.from_bytes(head[:8].tobytes(), "little")
        data = head[8 : 8 + length].tobytes()
        if len(data) < length:
            rest = np.empty(length - len(data), np.uint8)
            self.comm.receive(rest, source, tag=tag)
            data += rest.tobytes()
        return data

    @staticmethod
    def _announcer(target: int, targets: int, sources: int) -> int:
        return target * sources // targets


def _shape(rect: Rect) -> tuple[int, ...]:
    return tuple(len(each) for each in rect)
