"""What every operation asks of its arguments, whatever the transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from parlinalg.errors import CommError

if TYPE_CHECKING:
    from parlinalg.comm.base import Comm


def contiguous(comm: Comm, op: str, block: Any) -> None:
    if not block.flags.c_contiguous:
        raise CommError(
            f"{op} over {comm.axes}: the block of shape {block.shape} is not C-contiguous (strides {block.strides}); "
            "pass numpy.ascontiguousarray of it"
        )


def alike(comm: Comm, op: str, send: Any, recv: Any) -> None:
    if send.dtype is not recv.dtype and send.dtype != recv.dtype:
        raise CommError(f"{op} over {comm.axes}: send is {send.dtype} but recv {recv.dtype}; they should be the same")
    contiguous(comm, op, send)
    contiguous(comm, op, recv)


def counts_fit(comm: Comm, op: str, name: str, block: Any, counts: Sequence[int]) -> None:
    if len(counts) != comm.size or block.size != sum(counts):
        raise CommError(
            f"{op} over {comm.axes}: {name} has {block.size} elements on {comm.size} ranks, but {len(counts)} counts "
            f"{list(counts)} add up to {sum(counts)}; there should be one count a rank, adding up to {name}.size"
        )


def own_fits(comm: Comm, op: str, name: str, block: Any, counts: Sequence[int]) -> None:
    if block.size != counts[comm.rank]:
        raise CommError(
            f"{op} over {comm.axes}: {name} has {block.size} elements on rank {comm.rank}, "
            f"but counts[{comm.rank}] is {counts[comm.rank]}; they should be equal"
        )


def peer(comm: Comm, op: str, name: str, rank: int) -> None:
    if not 0 <= rank < comm.size:
        raise CommError(f"{op} over {comm.axes}: {name}={rank}, but the ranks are 0 to {comm.size - 1}")


def reduction(comm: Comm, op: str, name: str, block: Any) -> None:
    if name == "sum":
        if block.dtype.kind == "b":
            raise CommError(
                f"{op} over {comm.axes}: booleans have no sum; use op='max' (any) or op='min' (all), or send integers"
            )
    elif name not in ("max", "min"):
        raise CommError(f"{op} over {comm.axes}: op={name!r}, but the reductions are 'sum', 'max' and 'min'")
    elif block.dtype.kind == "c":
        raise CommError(f"{op} over {comm.axes}: {block.dtype} has no {name}; the only reduction of it is 'sum'")
