"""A communicator of ranks that are imagined: this process is any one of them, and nothing is sent.

Calls go through the checks and the ledger of `Comm`, as those of real ranks.  Blocks without values receive none; the
integers and booleans that arrive are taken to be like this rank's own, sums of them are multiples of its own, and a
broadcast leaves what the block held: ids, counts and flags keep a program going, and none may rely on what they are.

Ranks of one node count as sharing memory, as real ones do, unless `PARLINALG_SHARED` is 0.
"""

from __future__ import annotations

import json
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np

from parlinalg.backend.shapes import Recorder, ShapesBackend, values_needed
from parlinalg.comm.base import DONE, Block, Comm, Handle, by_terms, check_members, combine_terms
from parlinalg.comm.group import Call
from parlinalg.comm.ledger import Book
from parlinalg.errors import CommError

_entered: ContextVar[ImaginedComm | None] = ContextVar("imagined", default=None)


def imagined_world() -> ImaginedComm | None:
    """Return the ranks that the program runs on, if they are imagined."""
    return _entered.get()


@contextmanager
def within(world: ImaginedComm) -> Iterator[ImaginedComm]:
    """Run what follows on imagined ranks: `open_comm` returns them."""
    token = _entered.set(world)
    try:
        yield world
    finally:
        _entered.reset(token)


class EndedError(CommError):
    """The error of an imagined rank that waits for what will not come, as when another one's program has ended."""


class Representatives:
    """Ranks that are imagined together, each in a thread: they stand for the others, and tell each other what differs.

    Parameters
    ----------
    stands : sequence of int
        For every rank of the world the rank that stands for it; a representative stands for itself.
    """

    def __init__(self, stands: Sequence[int]) -> None:
        self.stands, self._count = tuple(stands), len({*stands})
        self._changed = threading.Condition()
        self._values: dict[Hashable, dict[int, Any]] = {}
        self._sent: dict[Hashable, deque[np.ndarray]] = {}
        self._passed: dict[Hashable, list[np.ndarray]] = {}
        """By communicator, sender and distance: all messages, for receivers from ranks that the sender stands for."""
        self._left: set[int] = set()
        self._waiting: dict[int, tuple[Callable[[], bool], str]] = {}
        """By rank, what it waits for: whether that is there, and a text."""
        self._stuck: str | None = None

    def leave(self, rank: int) -> None:
        """Note that a representative's program has ended; ranks that still wait for it get an error."""
        with self._changed:
            self._left.add(rank)
            self._changed.notify_all()

    def exchange(
        self, key: Hashable, rank: int, members: Sequence[int], value: Any, axes: tuple[str, ...] = ()
    ) -> list[Any]:
        """Return the values of all members, those of the ranks that stand for them; waits for these."""
        wanted = list(dict.fromkeys(self.stands[m] for m in members))
        if absent := [m for m in wanted if m not in members]:
            raise CommError(
                f"ranks {members[:8]} exchange values that differ by rank, but the imagined ranks {absent[:8]}, which "
                "stand for some of them, do not take part; let ranks that do stand for them"
            )
        with self._changed:
            values = self._values.setdefault(key, {})
            values[rank] = value
            self._changed.notify_all()
            self._await(
                rank, lambda: all(m in values for m in wanted), [m for m in wanted if m not in values],
                f"share over {axes or 'all ranks'} with the ranks {wanted[:8]}",
            )  # fmt: skip
        return [values[self.stands[m]] for m in members]

    def put(self, place: Hashable, sender: int, to: int, tag: int, block: np.ndarray) -> None:
        """Send a block of values from one rank of a communicator to another."""
        sent = block.copy()
        with self._changed:
            self._sent.setdefault((place, sender, to, tag), deque()).append(sent)
            self._passed.setdefault((place, sender, to - sender), []).append(sent)
            self._changed.notify_all()

    def get_alike(
        self, rank: int, place: Hashable, stand: int, distance: int, number: int, whom: int, block: np.ndarray
    ) -> None:
        """Receive message `number` that rank `stand` of a communicator sends over a distance; waits for it.

        It takes the place of the message of a sender that is not imagined.  `whom` is the stand's rank in the world.
        """
        with self._changed:
            passed = self._passed.setdefault((place, stand, distance), [])
            what = f"a message from rank {whom}, which stands for others"
            self._await(rank, lambda: len(passed) > number, [whom], what)
            block.reshape(-1)[:] = passed[number].reshape(-1).view(block.dtype)

    def get(self, rank: int, key: Hashable, source: int, block: np.ndarray) -> None:
        """Receive a block of values; waits for it."""
        with self._changed:
            queue = self._sent.setdefault(key, deque())
            self._await(rank, lambda: bool(queue), [source], f"a message from rank {source}")
            block.reshape(-1)[:] = queue.popleft().reshape(-1).view(block.dtype)

    def _await(self, rank: int, there: Callable[[], bool], whom: Sequence[int], what: str) -> None:
        """Wait until something is there for a rank.

        Raises
        ------
        EndedError
            If it will never be: a program that it comes from has ended, or all ranks wait for each other.
        """
        self._waiting[rank] = there, what
        try:
            while not there():
                if self._stuck is None and (gone := [m for m in whom if m in self._left]):
                    raise EndedError(
                        f"rank {rank} waits for {what}: the program of rank {gone[0]} has ended without it"
                    )
                if self._stuck is None and self._all_wait():
                    first = list(self._waiting.items())[:8]
                    ends = "; ".join(f"rank {r} waits for {text}" for r, (_, text) in first)
                    self._stuck = f"the imagined ranks would wait for ever: {ends}"
                    self._changed.notify_all()
                if self._stuck is not None:
                    raise EndedError(self._stuck)
                self._changed.wait(1.0)
        finally:
            del self._waiting[rank]

    def _all_wait(self) -> bool:
        """Return True if all ranks whose programs go on wait for what is not there."""
        waiting = self._waiting.values()
        return len(waiting) + len(self._left) == self._count and not any(arrived() for arrived, _ in waiting)


class ImaginedHandle(Handle):
    """A nonblocking operation of imagined ranks: it is done when it is waited for.

    A trace in which a collective operation is waited for that started before it has the start at its beginning.
    """

    __slots__ = ("_about", "_arrives", "_blocks", "_call", "_device", "_done", "_recorder")

    def __init__(
        self, device: ShapesBackend, about: tuple[Any, ...], *blocks: Block, arrives: Callable[[], None] | None = None
    ) -> None:
        self._device, self._about, self._blocks, self._done = device, about, blocks, False
        self._arrives, self._recorder = arrives, device.recorder
        self._call = None if self._recorder is None else self._recorder.start(*about)

    def wait(self) -> None:
        if not self._done:
            if self._arrives is not None:
                self._arrives()
            self._done, self._blocks, self._arrives = True, (), None
            recorder = self._device.recorder
            if recorder is not None and (call := self._number(recorder)) is not None:
                recorder.wait(call)
            self._recorder = None

    def test(self) -> bool:
        recorder = self._device.recorder
        if not self._done and recorder is not None and (call := self._number(recorder)) is not None:
            recorder.test(call)
        return self._done

    def _number(self, recorder: Recorder) -> int | None:
        """Return the number of the operation in a trace; None of a message that started before it."""
        if recorder is not self._recorder:
            if self._about[0] in ("send", "receive"):
                return None
            self._recorder, self._call = recorder, recorder.started_before(*self._about)
        return self._call


class ImaginedComm(Comm):
    """`size` ranks of which this process is number `rank`, `node` of them on each machine.

    Parameters
    ----------
    size, rank : int
    device : ShapesBackend
        The backend of all blocks.
    node : int
        Ranks of a machine: the first `node` are on the first one.
    """

    imagined = True

    def __init__(
        self, size: int, rank: int, device: ShapesBackend, *, node: int = 8, axes: tuple[str, ...] = (),
        world_ranks: tuple[int, ...] | None = None, nodes: tuple[int, ...] | None = None,
        books: list[Book] | None = None, together: Representatives | None = None,
    ) -> None:  # fmt: skip
        ranks = tuple(range(size)) if world_ranks is None else world_ranks
        places = tuple(r // node * node for r in ranks) if nodes is None else nodes
        self.device, self.together = device, together
        like = axes, size, hash(ranks)
        self._place = *like, device.count(like)
        """The same on the ranks that are imagined together, another one for each communicator."""
        self._shares = 0
        self._received: Counter[int] = Counter()
        """Messages with values so far from ranks that are not imagined, by these ranks."""
        super().__init__(size, rank, axes, ranks, places, [] if books is None else books, False)

    def sub(self, ranks: Sequence[int], axes: tuple[str, ...]) -> Comm:
        ranks = tuple(ranks)
        check_members(self, ranks)
        world, nodes = (tuple(of[r] for r in ranks) for of in (self.world_ranks, self.nodes))
        return ImaginedComm(  # of one rank too: its blocks have no values either
            len(ranks), ranks.index(self.rank), self.device, axes=axes, world_ranks=world, nodes=nodes,
            books=self.books, together=self.together,
        )  # fmt: skip

    def cartesian(self, sizes: Mapping[str, int]) -> Comm | None:
        need = math.prod(sizes.values())
        if need > self.size:
            raise CommError(f"the axes {dict(sizes)} need {need} ranks, but {self.size} are imagined")
        return self.sub(range(need), tuple(sizes)) if self.rank < need else None

    def free(self) -> None:
        self.shared = None

    # ------------------------------------------------------------------------------------------------ primitives
    def _post(
        self, op: str, nbytes: int, sent: int, wait: bool, *blocks: Block, peer: int | None = None, tag: int = 0,
        arrives: Callable[[], None] | None = None, most: int = 0,
    ) -> Handle:  # fmt: skip
        """Note the start of an operation that receives and sends so many bytes, and its end if this rank waits."""
        to = None if peer is None else self.world_ranks[peer]
        about = op, self.axes, self.world_ranks, nbytes, sent, to, tag, str(blocks[0].dtype) if blocks else "", most
        held = () if op == "send" else blocks  # a message has left its block long before a pipeline waits for it
        handle = ImaginedHandle(self.device, about, *held, arrives=arrives)
        if wait:
            handle.wait()
            return DONE
        return handle

    @property
    def packs(self) -> bool:
        return self.device.cpu  # GPUs are taken to have NCCL

    def _together(self, op: str, calls: Sequence[Call], counts: Sequence[int], reduction: str) -> Handle:
        if self.packs:
            return super()._together(op, calls, counts, reduction)
        return self._gather(calls, counts) if op == "all_gather" else self._scatter(calls, counts, reduction)

    def _all_gather(self, send: Block, recv: Block, counts: Sequence[int], wait: bool) -> Handle:
        return self._gather([Call(send, recv, counts)], counts, wait)

    def _gather(self, calls: Sequence[Call], counts: Sequence[int], wait: bool = False) -> Handle:
        for send, recv, _ in calls:
            _alike(send, recv)
        size = calls[0].send.itemsize
        own, most = size * counts[self.rank], size * (sum(counts) - min(counts))
        blocks = [block for call in calls for block in (call.send, call.recv)]
        moved, sent = size * sum(counts) - own, own * (self.size - 1)
        return self._post("all_gather", moved, sent, wait, *blocks, most=most)

    def _reduce_scatter(self, send: Block, recv: Block, counts: Sequence[int], op: str, wait: bool) -> Handle:
        return self._scatter([Call(send, recv, counts)], counts, op, wait)

    def _scatter(self, calls: Sequence[Call], counts: Sequence[int], op: str, wait: bool = False) -> Handle:
        blocks, arriving = [], []
        for send, recv, each in calls:
            terms, arrives = self._terms(recv, op)
            if isinstance(recv, np.ndarray) and isinstance(send, np.ndarray):
                start = sum(each[: self.rank])
                recv.reshape(-1)[:] = self._summed(send.reshape(-1)[start : start + recv.size], op)
            blocks += [send, recv, *terms]
            arriving += [] if arrives is None else [arrives]

        def arrive() -> None:
            for arrives in arriving:
                arrives()

        size = calls[0].send.itemsize
        moved, most = size * (sum(counts) - counts[self.rank]), size * (sum(counts) - min(counts))
        return self._post(
            "reduce_scatter", moved, moved, wait, *blocks, arrives=arrive if arriving else None, most=most
        )

    def _all_reduce(self, buffer: Block, op: str, wait: bool) -> Handle:
        words = self.all_reduce_words(buffer.size)
        own = buffer.size - words // 2
        part = [self.device.empty(own, buffer.dtype)] if by_terms(buffer.dtype) else []  # of the sum, until gathered
        terms, arrives = self._terms(part[0], op) if part else ([], None)
        if isinstance(buffer, np.ndarray):
            buffer[...] = self._summed(buffer, op)
        moved = words * buffer.itemsize
        return self._post("all_reduce", moved, moved, wait, buffer, *terms, *part, arrives=arrives)

    def _terms(self, out: Block, op: str) -> tuple[list[Block], Callable[[], None] | None]:
        """Return the terms of 16 bits that ranks exchange, held until the operation is done, and what then sums them.

        The kernel of the sum is noted now, and its scratch is held when the sum is formed.
        """
        if not by_terms(out.dtype):
            return [], None
        terms = self.device.empty((self.size, out.size), out.dtype)
        self.device.kernel("combine_terms", terms.nbytes + out.nbytes, terms.size, out.dtype)

        def arrives() -> None:
            with self.device.one_kernel():
                combine_terms(terms[:2], out.reshape(-1), op)  # the scratch of any number of them

        return [terms], arrives

    def _summed(self, values: np.ndarray, op: str) -> Any:
        return values * values.dtype.type(self.size) if op == "sum" else values

    def _broadcast(self, buffer: Block, root: int, wait: bool) -> Handle:
        nbytes = buffer.nbytes
        received, sent = (0, nbytes) if self.rank == root else (nbytes, 0)
        return self._post("broadcast", received, sent, wait, buffer, peer=root)

    def _all_to_all(
        self, send: Block, send_counts: Sequence[int], recv: Block, recv_counts: Sequence[int], wait: bool
    ) -> Handle:
        _alike(send, recv)
        received = (recv.size - recv_counts[self.rank]) * recv.itemsize
        sent = (send.size - send_counts[self.rank]) * send.itemsize
        return self._post("all_to_all", received, sent, wait, send, recv)

    def _send(self, buffer: Block, to: int, tag: int, wait: bool) -> Handle:
        if self.together is not None and isinstance(buffer, np.ndarray):
            self.together.put(self._place, self.rank, to, tag, buffer)
        return self._post("send", 0, buffer.nbytes, wait, buffer, peer=to, tag=tag)

    def _receive(self, buffer: Block, source: int, tag: int, wait: bool) -> Handle:
        arrives = None
        if self.together is not None and isinstance(buffer, np.ndarray):
            together, key, whom = self.together, (self._place, source, self.rank, tag), self.world_ranks[source]
            if together.stands[whom] == whom:
                arrives = partial(together.get, self.world_ranks[self.rank], key, whom, buffer)
            elif (stand := self._stand_of(source)) is not None:
                arrives = partial(
                    together.get_alike, self.world_ranks[self.rank], self._place, stand,
                    self.rank - source, self._received[source],
                    self.world_ranks[stand], buffer,
                )  # fmt: skip
                self._received[source] += 1
        return self._post("receive", buffer.nbytes, 0, wait, buffer, peer=source, tag=tag, arrives=arrives)

    def _stand_of(self, source: int) -> int | None:
        """Return the rank whose messages this rank takes for those of `source`, which is not imagined.

        That is the rank that stands for it.  If this rank itself does, it is the next imagined rank behind the source.
        None if the one that stands for it is not in this communicator.
        """
        assert self.together is not None
        stands, ranks = self.together.stands, self.world_ranks
        stand = stands[ranks[source]]
        if stand != ranks[self.rank]:
            return ranks.index(stand) if stand in ranks else None
        behind = range(source, self.size) if source > self.rank else range(source, -1, -1)
        for rank in behind:
            if stands[ranks[rank]] == ranks[rank]:
                return rank
        raise CommError(
            f"rank {stand} receives values from rank {ranks[source]}, for which it stands itself, and no rank behind "
            f"that one is imagined; let another rank stand for rank {ranks[source]}"
        )

    def _barrier(self) -> None:
        pass

    def attend(self, here: Callable[[], bool], seldom: bool = False) -> None:
        pass

    def share(self, value: Any, *, others: Any = None) -> list[Any]:
        payload = json.dumps(value)
        if self.size > 1 and callable(others):
            given = [value if r == self.rank else others(r) for r in range(self.size)]
            return _parsed([json.dumps(each) for each in given])
        if self.size > 1 and others != "alike" and self.together is not None:
            self._shares += 1
            key = (self._place, self._shares)
            found = self.together.exchange(key, self.world_ranks[self.rank], self.world_ranks, payload, self.axes)
            return _parsed(found)
        if self.size > 1 and others != "alike":
            raise values_needed(
                f"share over {self.axes or 'all ranks'} of what differs by rank",
                "imagine these ranks together, by pla.imagine_together(program, ranks, classes=...), with "
                "classes=lambda rank: 0 if all are alike; or give share others= as a function of the rank",
            )
        return _parsed([payload] * self.size)

    def _exchange(self, payload: bytes) -> list[bytes]:
        return [payload] * self.size


def _alike(send: Block, recv: Block) -> None:
    """Fill what is received of the values there are: the others' are taken to be like this rank's."""
    if isinstance(recv, np.ndarray) and isinstance(send, np.ndarray) and send.size:
        recv.reshape(-1)[:] = np.resize(send.reshape(-1).copy(), recv.size)


def _parsed(payloads: Sequence[str]) -> list[Any]:
    """Return the contents of payloads; thousands of ranks that share the same value share one object."""
    values = {payload: json.loads(payload) for payload in dict.fromkeys(payloads)}
    return [values[payload] for payload in payloads]
