"""The sentences about ranks that wait, never came, or left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from parlinalg.comm.watch import State

Told = Mapping[str, Any]


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def wait_text(told: Told) -> str:
    """`all_reduce over ('r',) at train.py:12`."""
    return f"{told['op']} over {tuple(told['axes'])} at {told['line']}{_at(told)}"


def _at(told: Told) -> str:
    return f" ({told['doing']})" if "doing" in told else ""


def grouped(texts: Mapping[int, str]) -> list[tuple[list[int], str]]:
    """The ranks of each different text, in the order of the lowest ranks."""
    of: dict[str, list[int]] = {}
    for rank in sorted(texts):
        of.setdefault(texts[rank], []).append(rank)
    return [(ranks, text) for text, ranks in of.items()]


def stalled(
    me: int, state: State, asked: Iterable[int], told: Mapping[int, Told], places: Mapping[int, str], limit: float
) -> str:
    """What the watchdog of rank `me` says about a wait of more than `limit` seconds."""
    _, comm, op, number = state
    members = set(comm.world_ranks) if number >= 0 else {me, comm.world_ranks[-1 - number]}
    waiting, absent = {}, {}
    for rank in asked:
        answer = told.get(rank)
        place = f" ({places[rank]})" if rank in places else ""
        if answer is None:
            absent[rank] = (
                f"did not answer{place}: it is stopped, its host cannot be reached, or it is in a call that "
                "does not let other threads run"
            )
        elif answer.get("key") == comm.key and answer.get("number") == number:
            waiting[rank] = f"wait in {wait_text(answer)}"
        elif rank not in members:
            if "op" in answer:
                absent[rank] = f"waits elsewhere, in {wait_text(answer)}"
        else:
            calls = answer.get("calls")
            came = number > 0 and calls is not None and calls >= number
            before = "took part and went on" if came else "never came"
            absent[rank] = f"{before}: it {_doing(answer)}{place}"
    lines = [f"parlinalg: rank {me} gives up after {limit:g} s in {op} over {comm.axes} (PARLINALG_TIMEOUT={limit:g}):"]
    lines += [f"  {ranks_text(ranks)} {_verb(text, ranks)}" for ranks, text in grouped(waiting)]
    lines += [f"  {ranks_text(ranks)} {text}" for ranks, text in grouped(absent)]
    cause = disagreement({rank: answer for rank, answer in told.items() if "op" in answer})
    if cause:
        lines.append(f"  likely cause: {cause}")
        if not getattr(comm, "checked", False):
            lines.append("  PARLINALG_CHECK=1 compares the calls before they are made")
    elif not absent and len(set(waiting.values())) > 1:
        lines.append(
            "  all are in the same operation, but from different lines: a rank may have skipped or added a call"
        )
    elif not absent:
        lines.append("  all ranks are there: the transfer itself is slow or stuck")
    return "\n".join(lines)


def disagreement(waiting: Mapping[int, Told]) -> str:
    """Return the disagreement of ranks that wait for each other in different calls; empty if there is none.

    Parameters
    ----------
    waiting : dict of int to dict
        What the waiting ranks told (`watch.describe`), by their number in the world.
    """

    def call(rank: int) -> tuple[str, int, str]:
        return waiting[rank]["key"], waiting[rank]["number"], waiting[rank]["op"]

    def in_vain(rank: int, other: int) -> bool:
        key, number, _ = call(rank)
        return number > 0 and other in waiting[rank].get("ranks", ()) and waiting[other]["begun"].get(key, 0) < number

    for one in sorted(waiting):
        for other in sorted(waiting):
            alike = call(one)[:2] == call(other)[:2] and call(one)[1] > 0
            apart = call(one) != call(other) and (alike or (in_vain(one, other) and in_vain(other, one)))
            if one < other and apart:
                sides = [[rank for rank in sorted(waiting) if call(rank) == call(side)] for side in (one, other)]
                few, many = sorted(sides, key=len)
                return (
                    f"the ranks make different calls: {_are_in(few, waiting)} while {_are_in(many, waiting)}; a rank "
                    "skipped or added a call, or branched on what it alone knows"
                )
    return ""


def _are_in(ranks: Sequence[int], waiting: Mapping[int, Told]) -> str:
    told = waiting[ranks[0]]
    number = f" number {told['number']}" if told["number"] else ""
    lines = " and ".join(sorted({waiting[rank]["line"] for rank in ranks}))
    are = "are" if len(ranks) > 1 else "is"
    return f"{ranks_text(ranks)} {are} in {told['op']} over {tuple(told['axes'])}{number} at {lines}"


def _verb(text: str, ranks: Sequence[int]) -> str:
    return text if len(ranks) > 1 else "waits" + text.removeprefix("wait")


def _doing(told: Told) -> str:
    if "left" in told:
        return f"left early ({told['left']})"
    if "op" in told:
        return f"waits in {wait_text(told)}"
    return f"is at {told['line']}{_at(told)}, in no collective"


def left_early(me: int, how: str, waiting: Mapping[int, Told]) -> str:
    """What the exit hook of rank `me` says when others wait for it in vain."""
    texts = {rank: f"in {wait_text(told)}" for rank, told in waiting.items()}
    parts = [f"{ranks_text(ranks)} {'wait' if len(ranks) > 1 else 'waits'} {text}" for ranks, text in grouped(texts)]
    return f"parlinalg: rank {me} left early ({how}) while {', '.join(parts)}"


def unreachable(me: int, how: str, silent: Sequence[int], places: Mapping[int, str], seconds: float) -> str:
    """Return the report of rank `me`'s exit hook when the ranks it waits for have not answered for so long."""
    texts = {rank: f"did not answer{f' ({places[rank]})' if rank in places else ''}" for rank in silent}
    parts = [f"{ranks_text(ranks)} {text}" for ranks, text in grouped(texts)] or ["the others ended, out of its reach"]
    return (
        f"parlinalg: rank {me} waited at its end ({how}) for the other ranks, and heard of none that still runs for "
        f"{seconds:.0f} s: {'; '.join(parts)}"
    )


def vanished(me: int, gone: Sequence[int], places: Mapping[int, str], doing: str) -> str:
    """Return the report of rank `me` about ranks of its host whose processes are gone."""
    texts = [f"rank {rank} is gone ({places.get(rank, 'its process')})" for rank in gone]
    return (
        f"parlinalg: {', '.join(texts)}: killed, or ended without Python's knowledge; rank {me}, {doing}, ends the run"
    )
