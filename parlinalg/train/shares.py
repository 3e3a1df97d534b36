"""What data parallel ranks share out (ZeRO), as axes, a scheme and handlers.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from parlinalg.errors import ConfigError
from parlinalg.layout import as_cut
from parlinalg.parallel.handlers import Handler, ZeRO
from parlinalg.train.config import Config
from parlinalg.train.options import Zero
from parlinalg.train.parallel import DATA, RING, ULYSSES, Parallel

REPLICA = "replica"


def shared_out(parallel: Parallel, zero: Zero) -> Parallel:
    """The ranks with the data axis as two, where groups of ranks share (`within`), and weights cut for stage 3.

    Raises
    ------
    ConfigError
        If the groups do not divide the data parallel ranks.
    """
    if parallel.parts:
        parts = tuple(shared_out(part, zero) for part in parallel.parts)
        return replace(parts[0], parts=parts)
    if not zero.stage or DATA not in parallel.axes:
        return parallel
    scheme, axes, within = parallel.scheme, parallel.axes, zero.within or parallel.data
    if parallel.data % within:
        divisors = ", ".join(str(d) for d in range(1, parallel.data + 1) if parallel.data % d == 0)
        raise ConfigError(
            f"zero.within={within} does not divide the {parallel.data} data parallel ranks: it may be {divisors}"
        )
    if within < parallel.data:
        scheme = scheme.factored(DATA, (REPLICA, DATA))
        axes = {REPLICA: parallel.data // within, **{a: within if a == DATA else n for a, n in axes.items()}}
    if zero.stage == 3:
        scheme = scheme.with_weights_cut(DATA)
    return replace(parallel, scheme=scheme, axes=axes)


def gradient_handlers(config: Config, sizes: Mapping[str, int]) -> list[Handler]:
    """The handlers of gradients that a configuration asks for, on a grid with axes of these sizes."""
    given = [h for h in config.gradient_handler if not _idle(h, sizes)]
    zero = config.zero
    if zero.stage and DATA in sizes:
        given = [h for h in given if type(h).__name__ != "DataParallel"]  # ZeRO is what is done over that axis
        given.append(ZeRO(zero.stage, DATA, zero.accumulate))
    return given


def _idle(handler: Handler, sizes: Mapping[str, int]) -> bool:
    """Whether a handler is over dimensions of a configuration that have one rank here."""
    axes = as_cut(handler.axes)
    return set(axes) <= {DATA, REPLICA, RING, ULYSSES} and not set(axes) & set(sizes)


def said(config: Config, sizes: Mapping[str, int]) -> dict[str, str]:
    """What to say of it at the start: a head and a text."""
    zero = config.zero
    if not zero.stage:
        return {}
    ranks, copies = sizes.get(DATA, 1), sizes.get(REPLICA, 1)
    shared = ("optimizer states", "optimizer states and gradients", "optimizer states, gradients and parameters")
    if ranks == 1:
        return {"zero": f"stage {zero.stage}: nothing to share, there is one data parallel rank in a group"}
    groups = f", in {copies} groups that hold copies" if copies > 1 else ""
    return {"zero": f"stage {zero.stage}: {shared[zero.stage - 1]} shared by {ranks} ranks{groups}"}
