"""A plan for training: the fastest ways found, and in words why others lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from parlinalg.errors import ConfigError, counted, enumerated
from parlinalg.planning.machine import OFFLOADS, Machine
from parlinalg.planning.predictor import Planned
from parlinalg.units import format_bytes, format_count, format_flops, format_seconds, three_digits


@dataclass(frozen=True, repr=False)
class TrainingPlan:
    """The fastest ways to train a model on so many ranks of a machine, and why others lost.

    Attributes
    ----------
    machine : Machine
    ranks, memory : int
        `memory` is the bytes a rank may use.
    batch, batch_size : int
        The samples of a step, and `batch_size` of the configuration: there may be fewer samples to train on.
    best : tuple of Planned
        The fastest first.
    lost : tuple of (str, int, str)
        The other candidates in groups: what a group has in common, its size, and why it lost.
    candidates : int
        How many candidates there are.
    traced : int
        How many were traced in full.
    proven : bool
        True if no candidate can be faster than the first, by its bound or its trace.
    seconds : float
        How long the search took.
    given : dict
        The configuration that was searched.
    language : bool
        True if the model is a language model, whose speed is in tokens.
    """

    machine: Machine
    ranks: int
    memory: int
    batch: int
    batch_size: int
    best: tuple[Planned, ...]
    lost: tuple[tuple[str, int, str], ...]
    candidates: int
    traced: int
    proven: bool
    seconds: float
    given: Mapping[str, Any] = field(default_factory=dict)
    language: bool = True

    def __repr__(self) -> str:
        first = self.best[0]
        return (
            f"TrainingPlan({counted(self.ranks, 'rank')} of {self.machine.name}: {first.candidate}, "
            f"{format_seconds(first.seconds)} a step; str() has the report)"
        )

    @property
    def configuration(self) -> dict[str, Any]:
        """The keys of the configuration that `parlinalg train` takes, with the best choices."""
        return self.best[0].candidate.values(self.given, self.batch_size)

    def write(self, path: str | PathLike[str]) -> None:
        """Write this configuration as a Python file.

        Raises
        ------
        ConfigError
            If the file cannot be written.
        """
        first = self.best[0]
        head = (
            f'"""Planned for {counted(self.ranks, "rank")} of {self.machine.name}: {first.candidate}.\n\nA step of '
            f"{counted(self.batch, 'sample')} is predicted to take {format_seconds(first.seconds)}, and "
            f'{format_bytes(first.bytes)} a rank.\n"""\n\n'
        )
        body = "".join(f"{name} = {value!r}\n" for name, value in self.configuration.items())
        try:
            Path(path).write_text(head + body, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None

    def _candidates(self) -> str:
        traced = "" if self.traced == self.candidates == 1 else f"{self.traced} of them "
        return f"{format_count(self.candidates, 'candidate')}, {traced}traced in full,"

    def _samples(self) -> str:
        if self.batch == self.batch_size:
            return counted(self.batch, "sample")
        return f"{counted(self.batch, 'sample')}, all that there are to train on (batch_size={self.batch_size} is more)"

    def _crowded(self) -> list[str]:
        """Return a line if a machine without a network has fewer places for ranks than there are ranks."""
        machine = self.machine
        if machine.network is not None or self.ranks <= machine.ranks_per_node:
            return []
        return [
            f"{machine.name} has no [network]: all {self.ranks} ranks are on one node, and share "
            f"{counted(machine.cores, 'core')} and the memory of {counted(machine.ranks_per_node, 'rank')}"
        ]

    def explain(self) -> str:
        """Return the plan as text: the best with their figures, and the others with why they lost."""
        unit = "tokens/s" if self.language else "samples/s"
        first = self.best[0]
        lines = [
            f"{counted(self.ranks, 'rank')} of {self.machine.name} ({self.machine.about}), "
            f"{format_bytes(self.memory)} a rank, batches of {self._samples()}",
            f"{self._candidates()} in {self.seconds:.1f} s; "
            + ("none can be faster than the first" if self.proven else "others may be faster than the first"),
            *self._crowded(),
            "",
        ]
        head = ("", "step", unit, "MFU", "memory", "words", "across nodes", "bubble", "")
        rows = [head]
        for i, p in enumerate(self.best, 1):
            rows.append((
                str(i), format_seconds(p.seconds), f"{p.throughput:,.0f}", shown_share(p.mfu), format_bytes(p.bytes),
                f"{p.words:,}", format_bytes(p.across), f"{100 * p.bubble:.0f}%", str(p.candidate),
            ))  # fmt: skip
        wide = [max(len(row[k]) for row in rows) for k in range(len(head) - 1)]
        for row in rows:
            lines.append("  ".join([*(text.rjust(w) for text, w in zip(row, wide, strict=False)), row[-1]]).rstrip())
        lines += [
            "",
            f"step: its time, and {unit} in it; MFU: the model's operations, as a share of what large products reach;",
            "memory: of the fullest rank; words, across nodes: what a rank receives in a step, and how much of it from",
            "groups that span nodes; bubble: the idle share of a pipeline",
        ]
        held = {**first.memory, "in host memory": first.host, "on a disk": first.disk}
        held = {name: n for name, n in held.items() if n or name in first.memory}
        lines += ["", "memory     " + ", ".join(f"{name} {format_bytes(n)}" for name, n in held.items())]
        causes = [f"{cause} {100 * s:.0f}%" for cause, s in list(first.causes.items())[:6] if s >= 0.005]
        lines.append("time       " + ", ".join(causes))
        lines.append(
            f"speed      {first.throughput / self.ranks:,.{0 if first.throughput >= 100 * self.ranks else 1}f} {unit} "
            f"and {format_flops(first.rate)} a rank; MFU is of {format_flops(first.rate / first.mfu)}, what large "
            "products reach"
        )
        if self.lost:
            lines += ["", "lost: kinds of candidates, how many, and why the best of them is slower or does not fit"]
            wide0 = max(len(what) for what, _, _ in self.lost)
            lines += [f"  {what:<{wide0}}  {count:>9,}  {why}" for what, count, why in self.lost]
        return "\n".join(lines)

    __str__ = explain

    def why(self) -> str:
        """Return in a line why the next best lost, or why there is none."""
        if len(self.best) > 1:
            other = self.best[1]
            return f"next is {other.candidate}: {why_slower(other, self.best[0])}"
        return "no other candidate can be trained" if not self.lost else f"others: {self.lost[0][2]}"


def shown_share(share: float) -> str:
    """Return a share in percent as text.

    >>> shown_share(0.413), shown_share(0.06), shown_share(0.0042), shown_share(1e-6)
    ('41%', '6.0%', '0.42%', '<0.01%')
    """
    if share < 1e-4:
        return "<0.01%"
    return f"{100 * share:.0f}%" if share >= 0.0995 else f"{100 * share:#.2g}%"


def shown_ratio(times: float) -> str:
    """Return how many times as long something takes as text.

    >>> shown_ratio(1.003), shown_ratio(2.5), shown_ratio(1810.96)
    ('1.00×', '2.50×', '1,811×')
    """
    return f"{three_digits(times)}×"


AS_FAST = 1.005
"""Times as long as the best up to which a plan is called as fast."""


def why_slower(other: Planned, best: Planned) -> str:
    """Return why a candidate lost against the best, in words: what costs the most of the difference."""
    times = other.seconds / best.seconds
    about = "" if other.traced else "about "
    if times < AS_FAST:
        more = other.bytes - best.bytes
        told = "as fast to half a percent" if other.traced or times > 0.995 else "about as fast, but not traced in full"
        return told + (f", with {format_bytes(more)} more memory" if more > 0 else "")
    reasons: list[tuple[float, str]] = []
    share = sum(s for cause, s in other.causes.items() if " over " in cause) * other.seconds
    own = sum(s for cause, s in best.causes.items() if " over " in cause) * best.seconds
    for name, mine, theirs in (
        ("across nodes", other.across, best.across), ("within nodes", other.within, best.within),
    ):  # fmt: skip
        if mine > 1.02 * theirs and share > own:
            ratio = mine / max(1, theirs)
            text = (
                f"moves {shown_ratio(ratio)} the bytes {name}" if ratio < 100 else f"moves {format_bytes(mine)} {name}"
            )
            reasons.append(((share - own) * (1.0 if name == "across nodes" else 0.5), text))
    again = other.candidate.recompute
    for cause in {**other.causes, **best.causes}:
        more_seconds = other.causes.get(cause, 0.0) * other.seconds - best.causes.get(cause, 0.0) * best.seconds
        verb = "takes" if cause == "launching" else "take"
        why = f"{cause} {verb} {format_seconds(max(0.0, more_seconds))} more"
        if cause == "idle":
            why = f"ranks idle {100 * other.causes.get(cause, 0.0):.0f}% of the step"
            if other.bubble > best.bubble:
                why = f"idles {100 * other.bubble:.0f}% in the pipeline's bubble"
        elif cause in OFFLOADS:
            what = enumerated([kind for kind, _ in other.candidate.offload or best.candidate.offload])
            why = f"{cause} ({what}) take {format_seconds(max(0.0, more_seconds))} more"
        elif cause in ("products", "other kernels") and again and again != best.candidate.recompute:
            why = f"computes {'attention' if again == 'attention' else 'blocks'} again"
        reasons.append((more_seconds * 0.99, why))
    return f"{about}{shown_ratio(times)} the time: {max(reasons)[1]}"
