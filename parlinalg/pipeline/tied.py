"""Parameters that several ranks of a pipeline hold: tied tables in its first and last stage, and copies of the model.

Each holder's gradient is settled over its own grid; then they are summed over the holders, before the norm, and each
holder makes the same update.  The first holder owns the parameter: its elements count in the norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from parlinalg.autograd import Parameter
from parlinalg.backend import namespace
from parlinalg.comm import Comm
from parlinalg.comm.base import Handle
from parlinalg.errors import ConfigError
from parlinalg.exchange import local
from parlinalg.layout import Layout
from parlinalg.parallel.buckets import MIB
from parlinalg.pipeline.model import PipelineModel
from parlinalg.pipeline.p2p import TAGS
from parlinalg.pipeline.resharding import Route, cached_route
from parlinalg.pipeline.schedule import Schedule

Block = Any
BUCKET = MIB
"""Bytes of gradients that are summed together; larger ones are summed alone, where they lie."""


class TiedParameter(NamedTuple):
    """A parameter that several pipeline ranks hold: these, the owner first, and its layout in each of their grids."""

    name: str
    holders: tuple[int, ...]
    layouts: tuple[Layout, ...]


class TiedParameters:
    """Sums the gradients of shared parameters over their holders.  Making it is collective over the pipeline.

    Where all grids are alike and the holders' ranks update the same elements, each sums what it updates, a shard of
    ZeRO or a block: an all-reduce over the holders.  Else the owner's grid gathers the others' blocks, whatever their
    grids and layouts, sums them in one order, and gives them back.

    Parameters
    ----------
    model : PipelineModel
    schedule : Schedule
        Says which ranks hold which stages, and their copies.
    comm : Comm
        A communicator of the ranks of `model.topology.world`.
    """

    def __init__(self, model: PipelineModel, schedule: Schedule, comm: Comm) -> None:
        self.topology = topology = model.topology
        self.comm = comm
        self.named = dict(model.named_parameters())
        self.position = topology.ranks[topology.rank].index(topology.world.rank)
        holders = {name: _holders(held.stages, schedule) for name, held in model.inventory.items()}
        shared = {name: ranks for name, ranks in holders.items() if len(ranks) > 1}
        self._owner = {name: ranks[0] for name, ranks in shared.items()}
        self._comms: dict[tuple[int, ...], Comm] = {}
        if not shared:
            self.parameters: list[TiedParameter] = []
            self.alike = True
            return
        everyone = comm.share(
            {n: p.layout.dims for n, p in self.named.items() if n in shared} if not self.position else {},
            others="by rank",
        )
        layouts = [{n: Layout(*dims) for n, dims in everyone[ranks[0]].items()} for ranks in topology.ranks]
        self.parameters = [TiedParameter(n, ranks, tuple(layouts[r][n] for r in ranks)) for n, ranks in shared.items()]
        for ranks in sorted({tuple(sorted(tie.holders)) for tie in self.parameters}):
            if topology.rank in ranks and topology.comm is not None:
                self._comms[ranks] = topology.comm.sub(ranks, ("pipeline",))
        self._spans = self._spans_here()
        self.alike = self._agreed()
        """True if all holders' ranks update the same elements."""

    def owns(self, parameter: Parameter) -> bool:
        """Return True if this pipeline rank counts a parameter in sums over the whole model."""
        return self._owner.get(parameter.name, self.topology.rank) == self.topology.rank

    def close(self) -> None:
        """Free the communicators."""
        for comm in self._comms.values():
            comm.free()
        self._comms.clear()

    # ------------------------------------------------------------------ sums
    def sum(self) -> None:
        """Give all holders of each shared parameter the sum of their settled gradients.  Collective."""
        if not self.parameters:
            return
        if self._spans_here() != self._spans:
            raise ConfigError(
                "the ranks no longer update the same elements of shared parameters as when the pipeline's worker was "
                "made; make another worker after attaching or detaching a gradient reducer"
            )
        for tie in self._mine:
            p = self.named[tie.name]
            if p.requires_grad and p.storage.settled is None:  # no microbatch reached it here, but may elsewhere
                p.storage.clear(p.data)
        if self.alike:
            self._sum_alike()
        else:
            for number, tie in enumerate(self.parameters):
                if self.topology.rank in tie.holders and self.named[tie.name].requires_grad:
                    self._sum_apart(number, tie)

    @property
    def _mine(self) -> list[TiedParameter]:
        return [tie for tie in self.parameters if self.topology.rank in tie.holders]

    def _spans_here(self) -> list[list[int]]:
        return [self._span(tie) for tie in self._mine]

    def _span(self, tie: TiedParameter) -> list[int]:
        """Return the elements of its block that this rank updates."""
        p = self.named[tie.name]
        return list(p.storage.partition(p.data)[:2])

    def _agreed(self) -> bool:
        """Return True if grids are alike and ranks update the same elements of shared parameters.  Collective."""
        if self.topology.comm is None:
            return False
        same = all(layout == tie.layouts[0] for tie in self.parameters for layout in tie.layouts)
        for holders, ties in self._grouped():
            theirs = self._comms[holders].share([self._span(t) for t in ties], others="by rank")
            same = same and all(each == theirs[0] for each in theirs)
        return all(self.comm.share(same, others="by rank"))

    def _grouped(self) -> Iterable[tuple[tuple[int, ...], list[TiedParameter]]]:
        """Return the parameters held here that the same ranks hold, in one order on all of them."""

        def key(tie: TiedParameter) -> tuple[int, ...]:
            return tuple(sorted(tie.holders))

        return [(holders, list(ties)) for holders, ties in groupby(sorted(self._mine, key=key), key)]

    def _sum_alike(self) -> None:
        for holders, ties in self._grouped():
            comm = self._comms[holders]
            for bucket in _buckets(p for t in ties if (p := self.named[t.name]).requires_grad):
                pieces = [p.storage.settled for p in bucket]
                _all_reduce(comm, pieces)
                for p, piece in zip(bucket, pieces, strict=True):
                    p.storage.changed(piece)

    def _sum_apart(self, number: int, tie: TiedParameter) -> None:
        """Sum the blocks of all holders on the owner's grid, and send the sum back."""
        p = self.named[tie.name]
        block = p.storage.whole(p.data)
        owner, *others = tie.holders
        tag = 1 + number % (TAGS - 1)
        if self.topology.rank == owner:
            for other in others:
                block += self._receive(block, self._route(tie, other, owner), other, tag)
            sent = [h for other in others for h in self._send(block, self._route(tie, owner, other), other, tag)]
        else:
            for handle in self._send(block, self._route(tie, self.topology.rank, owner), owner, tag):
                handle.wait()  # before there is memory for what comes
            sent = []
            block = self._receive(block, self._route(tie, owner, self.topology.rank), owner, tag)
        for handle in sent:
            handle.wait()
        p.storage.replace(block)

    def _route(self, tie: TiedParameter, source: int, target: int) -> Route:
        layouts, sizes = dict(zip(tie.holders, tie.layouts, strict=True)), self.topology.sizes
        shape = self.named[tie.name].shape
        return cached_route(
            shape, layouts[source], tuple(sizes[source].items()), layouts[target], tuple(sizes[target].items())
        )

    def _send(self, block: Block, route: Route, to: int, tag: int) -> list[Handle]:
        have, found = route.haves[self.position], []
        for target, part in route.sends(self.position):
            sent = block[local(part, have)].copy(order="C")
            found.append(self.comm.send(sent, self.topology.ranks[to][target], tag=tag, wait=False))
        return found

    def _receive(self, like: Block, route: Route, source: int, tag: int) -> Block:
        grid = next(iter(self.named.values())).grid
        out = grid.backend.empty(like.shape, like.dtype)
        want = route.wants[self.position]
        for sender, part in route.receives(self.position):
            got = grid.backend.empty(tuple(len(r) for r in part), like.dtype)
            self.comm.receive(got, self.topology.ranks[source][sender], tag=tag)
            out[local(part, want)] = got
        return out


def _holders(stages: Sequence[int], schedule: Schedule) -> tuple[int, ...]:
    """Return the pipeline ranks that hold a parameter of these stages, the owner first."""
    ranks = [schedule.holder(stage, copy) for copy in range(schedule.copies) for stage in sorted(stages)]
    return tuple(dict.fromkeys(ranks))


def _buckets(parameters: Iterable[Parameter]) -> Iterable[list[Parameter]]:
    """Yield parameters whose gradients, of one dtype, are summed together."""
    found: dict[str, list[Parameter]] = {}
    nbytes: dict[str, int] = {}
    for p in parameters:
        settled = p.storage.settled
        kind, size = settled.dtype, settled.nbytes
        if size >= BUCKET:
            yield [p]
            continue
        found.setdefault(kind.str, []).append(p)
        nbytes[kind.str] = nbytes.get(kind.str, 0) + size
        if nbytes[kind.str] >= BUCKET:
            yield found.pop(kind.str)
            nbytes.pop(kind.str)
    yield from found.values()


def _all_reduce(comm: Comm, pieces: Sequence[Block]) -> None:
    if len(pieces) == 1 and pieces[0].flags.c_contiguous:
        comm.all_reduce(pieces[0])
        return
    both = namespace(pieces[0]).concatenate([piece.reshape(-1) for piece in pieces])
    comm.all_reduce(both)
    at = 0
    for piece in pieces:
        piece[...] = both[at : at + piece.size].reshape(piece.shape)
        at += piece.size
