"""The checked mode (`PARLINALG_CHECK=1`): ranks compare what they are about to do before they do it."""

from __future__ import annotations

import json
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any

import numpy as np

from parlinalg.backend import backend_of
from parlinalg.comm.watch import grouped, ranks_text, slot
from parlinalg.errors import CommError, user_line

if TYPE_CHECKING:
    from parlinalg.comm.base import Comm


def check_same_call(comm: Comm, op: str, dtype: Any, counts: int | Sequence[int], more: Mapping[str, Any]) -> None:
    """Raise a CommError on every rank of `comm` unless all are about to make the same call.

    The calls are the same if their number on this communicator, operation, dtype, shape, count or counts, root and
    reduction are; in an all-to-all what rank i sends to rank j is what rank j expects from rank i.
    """
    listed = counts if isinstance(counts, int) else [int(n) for n in counts]
    call = {"op": op, "dtype": str(dtype), "counts": listed, **more}
    call |= {"number": comm._calls + 1, "line": user_line(sys._getframe(2))}
    slot.state = (monotonic(), comm, op, comm._calls + 1)
    try:
        calls = [json.loads(part) for part in comm._exchange(json.dumps(call, default=int).encode())]
    finally:
        slot.state = None
    if len({_key(c) for c in calls}) > 1:
        raise CommError(_sentence(comm, calls))
    if op == "all_to_all":
        for i, giver in enumerate(calls):
            for j, taker in enumerate(calls):
                if giver["counts"][j] != taker["receives"][i]:
                    raise CommError(
                        f"all_to_all over {comm.axes}: rank {i} sends rank {j} {giver['counts'][j]} elements "
                        f"(at {giver['line']}), but rank {j} expects {taker['receives'][i]} (at {taker['line']})"
                    )


def compare_states(comms: Iterable[Comm], state: Mapping[str, Any]) -> None:
    """Raise a CommError on every rank, in checked mode, unless all are about to load the same arrays."""
    for comm in comms:
        if comm.checked and comm.size > 1:
            sums = {name: f"checksum {array_checksum(np.asarray(array))}" for name, array in state.items()}
            compare(comm, "load_state_dict", sums, "pass the same global arrays on every rank")


def array_checksum(array: Any) -> str:
    """Return the checksum of an array's elements in C order, as eight digits."""
    host = np.ascontiguousarray(backend_of(array).to_host(array))  # of a view the elements may lie apart
    return f"{zlib.crc32(host.reshape(-1).view('u1').data):08x}"


SAMPLE = 1 << 9
"""Elements of a block that are compared where the checked mode is off: half of them its first, half its last."""


def sample_checksum(array: Any) -> str:
    """Return the checksum of the first and the last elements of an array, in C order: of all, if they are few."""
    if array.size <= SAMPLE:
        return array_checksum(array)
    rows = array
    while rows.ndim > 1:  # the first and last rows of the first and last rows, …
        rows = rows if len(rows) <= 2 else rows[:: len(rows) - 1]
        rows = rows.reshape(-1, *rows.shape[2:])
    half = SAMPLE // 2
    return array_checksum(rows[:half]) + array_checksum(rows[-half:])


def compare(
    comm: Comm, what: str, facts: Mapping[str, Any], right: str, block: Any = None, where: Any = None, *,
    always: bool = False,
) -> None:  # fmt: skip
    """Raise a CommError on every rank, in checked mode, unless all were given the same.

    Parameters
    ----------
    comm : Comm
    what : str
        The name of the call: "from_function".
    facts : dict of str to Any
        The values that should be equal on all ranks, by name: anything JSON can carry.
    right : str
        The advice in the message.
    block : array, optional
        This rank's block.
    where : list, optional
        The part of the global array in the block: blocks of the same part should be equal.
    always : bool
        Compare without the checked mode too; then only the first and last elements of large blocks.
    """
    if not (comm.checked or always) or comm.size == 1 or comm.imagined:
        return
    checksum = array_checksum if comm.checked else sample_checksum
    reported = comm.share([facts, where, None if block is None else checksum(block)], others="by rank")
    for name in facts:
        if any(theirs.get(name) != reported[0][0].get(name) for theirs, _, _ in reported):
            groups = _groups([str(theirs.get(name)) for theirs, _, _ in reported])
            raise CommError(f"the ranks over {comm.axes} give {what} different values of {name}: {groups}; {right}")
    for _, part, _ in reported:
        sums = {rank: theirs for rank, (_, at, theirs) in enumerate(reported) if at == part}
        if len(set(sums.values())) > 1:
            groups = _groups([f"checksum {text}" for text in sums.values()], list(sums))
            raise CommError(
                f"{what} makes blocks over {comm.axes} that should be replicas by their layout, but are not: {groups}; "
                f"{right}"
            )


def check_replicas(comm: Comm, block: Any, what: str) -> None:
    """Raise a CommError on every rank, in checked mode, unless all hold the same bits in `block`.

    Parameters
    ----------
    comm : Comm
        The ranks that should hold replicas.
    block : array
        This rank's block, of any dtype.
    what : str
        The name of the block in the message: "the weights of layer 2".
    """
    if not comm.checked or comm.size == 1:
        return
    sums = comm.share([array_checksum(block), list(block.shape), str(block.dtype)], others="alike")
    if any(one != sums[0] for one in sums):
        groups = _groups([f"checksum {crc} of shape {tuple(shape)} {dtype}" for crc, shape, dtype in sums])
        raise CommError(
            f"{what} should be the same on all ranks over {comm.axes}, but it is not: {groups}; make replicas from "
            "equal values, with one seed, and change them alike"
        )


def sites_differ(comm: Comm, sites: Sequence[str]) -> CommError:
    """Return the error of ranks whose shares come from different functions.  Collective: the ranks tell each other."""
    lines = [part.decode() for part in comm._exchange(user_line(sys._getframe(2)).encode())]
    texts = [f"{f'parlinalg.{site}' if site else 'share'} at {line}" for site, line in zip(sites, lines, strict=True)]
    return CommError(
        f"the ranks of the communicator over {comm.axes} make different calls: {_groups(texts)}; all should make the "
        "same calls in the same order: one of them skipped or added one"
    )


def failed_in_mpi(comm: Comm, op: str, error: Exception) -> CommError:
    """Return the error of an operation that MPI itself refuses."""
    first = str(error).partition("\n")[0]
    return CommError(
        f"{op} over {comm.axes}, at {user_line(sys._getframe(2))}, failed in MPI ({first}): the ranks probably make "
        "different calls here, or with blocks of different sizes; PARLINALG_CHECK=1 compares them first, and names them"
    )


def _key(call: Mapping[str, Any]) -> str:
    own = ("line", "receives") if call["op"] != "all_to_all" else ("line", "receives", "counts")
    return json.dumps({name: value for name, value in call.items() if name not in own}, sort_keys=True)


def _sentence(comm: Comm, calls: Sequence[Mapping[str, Any]]) -> str:
    texts = []
    for call in calls:
        args = [f"{name}={call[name]}" for name in ("root", "reduction") if name in call]
        if call["op"] not in ("barrier", "share"):
            args = [call["dtype"], f"counts {call['counts']}", *args]
        if "shape" in call and any(other.get("shape", call["shape"]) != call["shape"] for other in calls):
            args.append(f"shape {tuple(call['shape'])}")
        if any(other["number"] != call["number"] for other in calls):
            args.append(f"number {call['number']}")
        within = f" in parlinalg.{call['site']}" if call.get("site") else ""
        texts.append(f"{call['op']}({', '.join(args)}){within} at {call['line']}")
    return (
        f"the ranks of the communicator over {comm.axes} are about to make different calls: {_groups(texts)}; "
        "all should make the same call with the same dtype, counts, root and reduction"
    )


def _groups(texts: Sequence[str], ranks: Sequence[int] | None = None) -> str:
    """Return which ranks say what, as `ranks 0, 2: this; rank 1: that`."""
    found = grouped(dict(zip(range(len(texts)) if ranks is None else ranks, texts, strict=True)))
    return "; ".join(f"{ranks_text(r)}: {text}" for r, text in found)
