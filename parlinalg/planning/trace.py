"""The trace of a program on one rank: its products, kernels, communication and memory, in program order."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Gemm:
    """`batch` products of m×k and k×n matrices; `calls` BLAS calls make them.

    `attention` is the dtype of the queries whose scores they make or use, empty for all other products; `fused` as of
    `Attention`.
    """

    batch: int
    m: int
    n: int
    k: int
    dtype: str
    calls: int = 1
    attention: str = ""
    fused: bool = False

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiplication and an addition counted as two."""
        return 2 * self.batch * self.m * self.n * self.k


@dataclass(frozen=True, slots=True)
class Kernel:
    """Work on blocks that is no product, by the kernel's name in the registry, or NumPy's of a single operation.

    `nbytes` are those of all blocks given and made, each once, `elements` those of the largest of them.  A chain that
    runs in tiles is one kernel.  Attention has its products before it, as `Gemm`s, and as `elements` its scores.
    """

    name: str
    nbytes: int
    elements: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Attention(Kernel):
    """The kernel of attention, after its products, and what a fused kernel that does all would compute.

    `flops` are the operations of the products on the pairs that are seen, without those that a block of scores then
    hides; `width` is the features of a head, `given` the dtype of the queries.  `more` are the bytes of scores and of
    copies of blocks, which pass through memory where the kernel is not fused.  `fused` says that the library would take
    its fused kernel for them on a GPU with cuDNN's package: not with dropout, say.
    """

    flops: int
    width: int
    given: str
    more: int = 0
    fused: bool = False


@dataclass(frozen=True, slots=True)
class Factorization(Kernel):
    """A factorization of a block, a solution with a triangle, or what else LAPACK computes, with its operations.

    `flops` are those that its products of blocks have, whose inner dim is `width`.  `nbytes` are all that pass through
    memory, those of its products with vectors included.
    """

    flops: int
    width: int


@dataclass(frozen=True, slots=True)
class Start:
    """The start of communication number `call` of the trace; a blocking call is a `Start` and its `Wait`.

    `op` and `axes` are those of the ledger, `ranks` the world ranks of the communicator, `nbytes` what this rank
    receives, as the ledger counts it, `sent` what it sends (over all ranks as much as is received; the root of a
    broadcast sends its block once, and others pass it on), `peer` the world rank at the other end of a send or receive,
    or the root of a broadcast.  Where blocks are uneven `most` is what the rank receives that receives the most.
    """

    call: int
    op: str
    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    nbytes: int
    sent: int = 0
    peer: int | None = None
    tag: int = 0
    dtype: str = ""
    most: int = 0

    @property
    def message(self) -> bool:
        """True for one end of a message between two ranks; a broadcast has a root, and is none."""
        return self.op in ("send", "receive")


@dataclass(frozen=True, slots=True)
class Test:
    """A look at communication number `call`: without one, MPI makes no progress outside its calls."""

    call: int


@dataclass(frozen=True, slots=True)
class Wait:
    """The end of communication number `call`."""

    call: int


@dataclass(frozen=True, slots=True)
class Memory:
    """`nbytes` more (if negative, fewer) are live in a category: weights, gradients, states, activations, buffers."""

    category: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Span:
    """A named stretch of the program begins or ends: forward, backward, step, an instruction of a schedule."""

    name: str
    begins: bool


Event = Gemm | Kernel | Start | Test | Wait | Memory | Span


@dataclass
class Trace:
    """The events of one rank, which stands for the ranks `stands_for` of a world of `size`."""

    rank: int
    size: int
    events: list[Event] = field(default_factory=list)
    stands_for: tuple[int, ...] = ()


def cut(trace: Trace, name: str, *, messages: bool = True, most: float = math.inf) -> list[Trace]:
    """Return the parts of a trace within the spans of a name, one trace for each.

    Operations that a part waits for and that were started before it are started at its beginning.

    Parameters
    ----------
    trace : Trace
    name : str
    messages : bool
        False to leave out sends and receives, which a pipeline's simulation has by itself.
    most : int, optional
        The number of parts to look for.
    """
    found: list[Trace] = []
    starts = {e.call: e for e in trace.events if isinstance(e, Start)}
    left_out = {call for call, e in starts.items() if e.message} if not messages else set()
    inside: list[Any] | None = None
    depth = 0
    for event in trace.events:
        if isinstance(event, Span) and event.name == name:
            depth += 1 if event.begins else -1
            if event.begins and depth == 1:
                inside = []
            elif not depth and inside is not None:
                own = {e.call for e in inside if isinstance(e, Start)}
                asked = dict.fromkeys(e.call for e in inside if isinstance(e, Wait | Test))
                before = [starts[call] for call in asked if call in starts and call not in own]
                found.append(Trace(trace.rank, trace.size, [*before, *inside], trace.stands_for))
                inside = None
                if len(found) >= most:
                    break
        elif inside is not None and getattr(event, "call", None) not in left_out:
            inside.append(event)
    return found
