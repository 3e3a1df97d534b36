"""Handlers of gradients: over which axes they are summed, and whether every rank gets the sums or a part.  Pure data.

The reducer does the same whatever the handler: it asks them what becomes of a parameter's gradient.  Axes that no
handler names are all-reduced wherever a gradient is partial over them, so that every gradient is settled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from parlinalg.errors import ConfigError
from parlinalg.layout import AxisSpec, Cut, Layout, as_cut

ACCUMULATE = ("reduce-scatter", "whole")


@dataclass(frozen=True)
class ReductionPolicy:
    """The way in which the gradient of a parameter is reduced.

    Attributes
    ----------
    scatter : tuple of str
        Axes over which the sums are reduce-scattered: each rank along them gets, and updates, a part.
    always : tuple of str
        Axes over which the ranks' gradients are terms of a sum whatever their layouts say.
    stage : int
        0, or that of the ZeRO handler.
    accumulate : str
        With stage 2 and 3: what microbatches within `no_sync` do.
    overlap_gather : bool
        Whether gathers of the updated values go on in the next forward pass.
    """

    scatter: Cut = ()
    always: Cut = ()
    stage: int = 0
    accumulate: str = "whole"
    overlap_gather: bool = False

    @property
    def keeps(self) -> bool:
        """True if whole gradients are kept between the passes of a step."""
        return self.stage < 2 or self.accumulate == "whole"


@dataclass(frozen=True)
class DataParallel:
    """Gradients are all-reduced over the axes that cut the batch.

    What the reducer does with no handler at all; it can be named to say so.
    """

    axes: AxisSpec = "data"


@dataclass(frozen=True)
class SequenceParallel:
    """Gradients are all-reduced over the axes that cut the sequence: the ring's, and Ulysses's within it."""

    axes: AxisSpec = ("s", "u")


@dataclass(frozen=True)
class SharedParameters:
    """Gradients of parameters that ranks along these axes hold copies of, and use in different places, are summed.

    Such as an embedding tied to a head in another stage of a pipeline: the layouts cannot say so.

    Parameters
    ----------
    names : sequence of str
        The parameters' qualified names, or patterns of them: "head.*".
    axes : str or tuple of str
    """

    names: Sequence[str]
    axes: AxisSpec

    def __post_init__(self) -> None:
        if isinstance(self.names, str) or not self.names:
            raise ConfigError(
                f"SharedParameters takes a list of parameters' names, such as ['head.*'], not {self.names!r}"
            )


@dataclass(frozen=True)
class ZeRO:
    """Ranks along these axes share the update of the parameters that they hold copies of (Rajbhandari et al., "ZeRO:
    memory optimizations toward training trillion parameter models", 2020).

    Gradients are reduce-scattered over the axes, each rank updates its part with its part of the optimizer's states,
    and the values are all-gathered: 2 Ψ (1 - 1/N) elements a step, those of an all-reduce.

    Parameters
    ----------
    stage : int
        1: the optimizer's states are shared.  2: the gradients too, but for the buckets in flight.  3: of parameters
        that the scheme cuts over these axes (`Scheme.with_weights_cut`) the values too; the others are as with 2.
    axes : str or tuple of str
        Outermost first.  Other axes over which a gradient is partial are all-reduced after, on the part alone: with
        ("replica", "data") on the grid and axes="data" the states are shared within "data", and copied across
        "replica".
    accumulate : {"reduce-scatter", "whole"}
        What microbatches within `no_sync` do with stages 2 and 3: reduce-scatter each one's gradients into the parts,
        or hold whole gradients until the last.  Stage 1 always holds them.
    overlap_gather : bool
        Start the all-gathers of the values after a step and wait for those of a bucket when the first of its parameters
        is read, in general by the next forward pass.  Until then reading a parameter's value is collective over
        `axes`.  Values that stage 3 cuts are gathered by `WeightGatherer`, with or without it.

    Raises
    ------
    ConfigError
        If the stage, `accumulate` or `overlap_gather` is none of these.
    """

    stage: int = 1
    axes: AxisSpec = "data"
    accumulate: str = "reduce-scatter"
    overlap_gather: bool = False

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3) or isinstance(self.stage, bool):
            raise ConfigError(f"ZeRO has the stages 1, 2 and 3, not {self.stage!r}; without a handler there is none")
        if self.accumulate not in ACCUMULATE:
            raise ConfigError(f"ZeRO accumulates by {' or '.join(map(repr, ACCUMULATE))}, not {self.accumulate!r}")
        if not isinstance(self.overlap_gather, bool):
            raise ConfigError(f"ZeRO's overlap_gather is True or False, not {self.overlap_gather!r}")


Handler = DataParallel | SequenceParallel | SharedParameters | ZeRO
KINDS: dict[str, type[Handler]] = {k.__name__: k for k in (DataParallel, SequenceParallel, SharedParameters, ZeRO)}


def check(handlers: Iterable[Handler], sizes: Mapping[str, int]) -> None:
    """Raise a ConfigError unless these handlers fit together, and a grid with axes of these sizes."""
    taken: dict[str, str] = {}
    for handler in handlers:
        kind = type(handler).__name__
        if kind not in KINDS:
            raise ConfigError(f"a gradient handler is one of {', '.join(KINDS)}, not {handler!r}")
        axes = as_cut(handler.axes)
        if not set(axes) & set(sizes):
            raise ConfigError(
                f"{kind} is over {axes}, but the grid has the axes {dict(sizes)}; name those that cut the batch or the "
                "sequence, or give the grid such an axis (its size may be 1)"
            )
        if isinstance(handler, SharedParameters):
            continue
        for axis in axes:
            if axis in taken:
                raise ConfigError(f"{taken[axis]} and {kind} are both over axis {axis!r}; use only one of them")
            taken[axis] = kind


def policy_of(handlers: Iterable[Handler], name: str, layout: Layout, sizes: Mapping[str, int]) -> ReductionPolicy:
    """Return the policy for the gradient of a parameter with this name and layout.

    Axes that cut the parameter, or have one rank, take no part.
    """

    def free(axes: AxisSpec) -> Cut:
        return tuple(a for a in as_cut(axes) if sizes.get(a, 1) > 1 and layout.where(a) is None)

    scatter: Cut = ()
    always: dict[str, None] = {}
    stage, accumulate, overlap = 0, "whole", False
    for handler in handlers:
        if isinstance(handler, ZeRO) and free(handler.axes):
            scatter = (*scatter, *free(handler.axes))
            stage, accumulate = handler.stage, "whole" if handler.stage == 1 else handler.accumulate
            overlap = overlap or handler.overlap_gather
        elif isinstance(handler, SharedParameters) and any(fnmatchcase(name, n) for n in handler.names):
            always.update(dict.fromkeys(free(handler.axes)))
    return ReductionPolicy(scatter, tuple(always), stage, accumulate, overlap)
