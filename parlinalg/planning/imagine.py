"""Programs on ranks that are imagined: `with imagine(ranks=3072, rank=5): ...`.

The program is the user's own: whatever takes a grid runs on arrays without values (`parlinalg.backend.shapes`), and
what it would send is counted (`parlinalg.comm.imagined`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from parlinalg.backend.shapes import ShapesBackend, WhatIf
from parlinalg.comm.imagined import EndedError, ImaginedComm, Representatives, within
from parlinalg.errors import ConfigError
from parlinalg.planning.trace import Attention, Factorization, Gemm, Kernel, Memory, Span, Start, Test, Trace, Wait

if TYPE_CHECKING:
    from parlinalg.train.mesh import Configuration

Result = TypeVar("Result")


class TraceRecorder:
    """A recorder that writes events to a trace."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self._add, self._calls = trace, trace.events.append, 0
        self._first = len(trace.events)

    def product(
        self, batch: int, m: int, n: int, k: int, dtype: str, calls: int, attention: str = "", fused: bool = False
    ) -> None:  # fmt: skip
        self._add(Gemm(batch, m, n, k, dtype, calls, attention, fused))

    def kernel(self, name: str, nbytes: int, elements: int, dtype: str) -> None:
        self._add(Kernel(name, nbytes, elements, dtype))

    def attention(
        self, name: str, nbytes: int, elements: int, dtype: str, flops: int, width: int, given: str, more: int,
        fused: bool,
    ) -> None:  # fmt: skip
        self._add(Attention(name, nbytes, elements, dtype, flops, width, given, more, fused))

    def factorization(self, name: str, nbytes: int, elements: int, dtype: str, flops: int, width: int) -> None:
        self._add(Factorization(name, nbytes, elements, dtype, flops, width))

    def memory(self, category: str, nbytes: int) -> None:
        self._add(Memory(category, nbytes))

    def start(
        self, op: str, axes: tuple[str, ...], ranks: tuple[int, ...], nbytes: int, sent: int, peer: int | None,
        tag: int, dtype: str, most: int,
    ) -> int:  # fmt: skip
        self._calls += 1
        self._add(Start(self._calls, op, axes, ranks, nbytes, sent, peer, tag, dtype, most))
        return self._calls

    def started_before(self, *about: Any) -> int:
        """Note, at the beginning of the trace, the start of an operation that was in flight then; as `start`."""
        self._calls += 1
        self.trace.events.insert(self._first, Start(self._calls, *about))
        self._first += 1
        return self._calls

    def test(self, call: int) -> None:
        self._add(Test(call))

    def wait(self, call: int) -> None:
        self._add(Wait(call))

    def span(self, name: str, begins: bool) -> None:
        self._add(Span(name, begins))


class World:
    """Imagined ranks, of which the program is one.

    Attributes
    ----------
    comm : ImaginedComm
        All ranks; ledgers of it count what this rank receives.
    device : ShapesBackend
    """

    def __init__(self, comm: ImaginedComm) -> None:
        self.comm, self.device = comm, comm.device

    @property
    def size(self) -> int:
        return self.comm.size

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def memory(self) -> dict[str, int]:
        """Bytes that this rank holds now, by category."""
        return {name: n for name, n in self.device.live.items() if n}

    @property
    def peak_memory(self) -> int:
        """The most bytes that this rank held at once, since `reset_peak` if that was called."""
        return self.device.peak

    def reset_peak(self) -> None:
        """Let `peak_memory` begin anew, with what is held now."""
        self.device.peak = self.device.held

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record what this rank does within a `with` block.

        Yields
        ------
        Trace
            It begins with what the rank holds, by category.  Of ranks that are imagined together it says for which
            others the rank stands.
        """
        together = self.comm.together
        alike = () if together is None else tuple(r for r, by in enumerate(together.stands) if by == self.rank)
        trace = Trace(self.rank, self.size, stands_for=alike)
        trace.events += [Memory(category, n) for category, n in self.device.live.items() if n]
        before, self.device.recorder = self.device.recorder, TraceRecorder(trace)
        try:
            yield trace
        finally:
            self.device.recorder = before

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Mark what happens within as a stretch with this name in the trace."""
        self.device.span(name, True)
        try:
            yield
        finally:
            self.device.span(name, False)

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.size}, {self.device!r})"


@contextmanager
def imagine(
    ranks: int, rank: int = 0, *, node: int = 8, target: str = "cpu", what_if: WhatIf | None = None
) -> Iterator[World]:
    """Run a program on imagined ranks, of which it is one, with arrays that have shapes and no values.

    Within the `with` block, grids made without a communicator are grids of these ranks.  Products, kernels, messages
    and memory are as on real ranks, but nothing is computed and nothing is sent.  Integers and booleans of up to
    2²⁴ elements keep their values; those received from other ranks are taken to be like this rank's own.

    Parameters
    ----------
    ranks : int
        The number of ranks.
    rank : int
        The rank that the program is.
    node : int
        Ranks on a machine: the first `node` are on the first one.
    target : {"cpu", "gpu"}
        The device that is imitated: the library takes the ways that it would take on NumPy's or on CuPy's arrays.
    what_if : WhatIf, optional
        The answers where values decide, such as the norm to which gradients are clipped.  Without it the question is an
        error, so that nothing is assumed unasked.

    Yields
    ------
    World

    Raises
    ------
    ConfigError
        If there is no such rank.
    ValuesNeeded
        Within, where the program depends on values; the message names the operation and the line.

    Examples
    --------
    >>> import parlinalg as pla
    >>> with imagine(ranks=64, rank=5) as world:
    ...     grid = pla.Grid({"r": 8, "c": 8})
    ...     with pla.ledger(grid) as book:
    ...         a = pla.ones((80_000, 80_000), grid, pla.Layout("r", "c"))
    ...         b = a @ a
    ...     print(b.block.shape, book.words.total())
    (10000, 10000) 1400000000
    """
    _check("imagined ranks", ranks=(ranks, 1), node=(node, 1), rank=(rank, 0))
    if rank >= ranks:
        raise ConfigError(f"rank={rank} is not among {ranks} imagined ranks, which are 0 to {ranks - 1}")
    with within(ImaginedComm(int(ranks), int(rank), ShapesBackend(target, what_if), node=int(node))) as comm:
        yield World(comm)


def imagine_together(
    program: Callable[[World], Result], ranks: int, *, classes: Callable[[int], Hashable] | None = None, node: int = 8,
    target: str = "cpu", what_if: WhatIf | None = None,
) -> dict[int, Result]:  # fmt: skip
    """Run a program on imagined ranks that differ, one of each class, each in a thread of its own.

    Ranks of a pipeline's stages hold other layers, and tell each other what passes between them.  So one rank of every
    stage is imagined, and stands for the others of its stage.

    Parameters
    ----------
    program : callable
        Takes the `World`, in which it is one rank.
    ranks : int
    classes : callable, optional
        The class of a rank, such as its stage or that of `classes_of_stages`; the first rank of each class stands for
        all of it.  By default every rank stands for itself alone.
    node, target, what_if
        As of `imagine`.

    Returns
    -------
    dict of int to object
        What the program returned, by the ranks that were imagined, in their order.

    Raises
    ------
    ConfigError
        If there is no rank, or no such target.
    Exception
        The error of the first rank that failed.

    Examples
    --------
    >>> import parlinalg as pla
    >>> def program(world):
    ...     grid = pla.Grid({"data": 4, "stage": 2})
    ...     return grid.coords["stage"], world.size
    >>> imagine_together(program, 8, classes=lambda rank: rank % 2)
    {0: (0, 8), 1: (1, 8)}
    """
    _check("imagined ranks", ranks=(ranks, 1), node=(node, 1))
    first: dict[Hashable, int] = {}
    stands = [first.setdefault(rank if classes is None else classes(rank), rank) for rank in range(ranks)]
    together = Representatives(stands)
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        device = ShapesBackend(target, what_if)
        try:
            with within(ImaginedComm(ranks, rank, device, node=node, together=together)) as comm:
                results[rank] = program(World(comm))
        except BaseException as error:  # told to the caller below
            errors[rank] = error
        finally:
            together.leave(rank)

    ShapesBackend(target, what_if)  # a wrong target is the caller's error
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in first.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        own = [rank for rank, error in errors.items() if not isinstance(error, EndedError)]
        raise errors[min(own or errors)]
    return {rank: results[rank] for rank in sorted(results)}


def classes_of_stages(config: Configuration, ranks: int, layers: int) -> Callable[[int], Hashable]:
    """Return the classes of ranks for `imagine_together` by what the stages of their pipeline hold.

    Ranks whose stages have as many layers are alike, apart from those with the first or the last stage.  A class is
    imagined by its first pipeline rank, which has the most microbatches in flight.  Ranks of one stage count as alike,
    even where a length that does not divide makes their blocks differ by an item.

    Every stage is a class of its own where stages have grids of their own, or are cut by what their layers cost.

    Parameters
    ----------
    config : dict, str, Path or TrainingConfig
        What `launch` takes.
    ranks : int
    layers : int
        The layers of the model between its embedding and its head.

    Returns
    -------
    callable
        From a rank to its class.

    Raises
    ------
    ConfigError
        If `launch` would refuse the configuration on so many ranks, or there are fewer layers than stages.

    Examples
    --------
    >>> stage = classes_of_stages({"parallel": {"pipeline": 8, "tensor": {"size": 2, "mode": "1d"}}}, 16, layers=16)
    >>> len({stage(rank) for rank in range(16)}), stage(2) == stage(13) != stage(14)
    (3, True)
    """
    from parlinalg.train.mesh import resolve

    _check("imagined ranks", ranks=(ranks, 1))
    _check("a model", layers=(layers, 0))
    spec = resolve(config, ranks)
    counts = spec.layer_counts(layers)
    position = {rank: p for p, group in enumerate(spec.places) for rank in group}
    if counts is None or spec.parts:
        return position.__getitem__
    last = len(counts) - 1
    held = [spec.stages(p) for p in range(spec.pipeline)]
    kinds = [  # a stage sends nothing to the next one on the same rank
        tuple((counts[n], n == 0, n == last, n + 1 in stages) for n in stages) for stages in held
    ]
    return lambda rank: kinds[position[rank]]


def _check(whose: str, **numbers: tuple[Any, int]) -> None:
    """Raise a ConfigError unless each is a whole number of at least the other one."""
    for name, (value, least) in numbers.items():
        if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
            raise ConfigError(f"{name} of {whose} should be a whole number of at least {least}, not {value!r}")
