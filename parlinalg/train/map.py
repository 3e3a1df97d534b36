"""A page that shows the place of every rank of a configuration, folded where ranks are many.  Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

from parlinalg.train.choices import LANGUAGE
from parlinalg.train.config import TrainingConfig
from parlinalg.train.mesh import DIMENSIONS, OUTSIDE, MeshSpec, stages_text
from parlinalg.train.recipes import SIZES
from parlinalg.units import format_count

__all__ = ["rank_map"]

GROUPS = ("tensor", "sequence", "experts", "pipeline", "data")  # those of neighbours first
ROWS = 12  # lines of one list before it is folded
COLUMNS = 16  # ranks in a line

Nodes = Sequence[int]


def rank_map(
    spec: MeshSpec, nodes: Nodes | int | None = None, layers: Sequence[int] | None = None
) -> str:  # fmt: skip
    """Return a page about who is where: the dimensions and their groups, and which ranks hold which stage.

    Parameters
    ----------
    spec : MeshSpec
    nodes : sequence of int, or int, optional
        The node of each rank, or how many ranks a node has, one after the other.
    layers : sequence of int, optional
        How many layers each stage has.

    Returns
    -------
    str
        A text of at most about 50 lines, for any number of ranks.

    Examples
    --------
    >>> from parlinalg.train.mesh import resolve
    >>> parallel = dict(pipeline=2, tensor=dict(size=2, mode="1d"))
    >>> print(rank_map(resolve(dict(parallel=parallel), ranks=8), nodes=4))
    ranks       8 = data 2 × pipeline 2 × tensor 2 (1d: t=2), on 2 nodes of 4
      tensor    4 groups of 2 ranks, next to one another, such as 0, 1; within a node
      pipeline  4 groups of 2 ranks, 2 apart, such as 0, 2; within a node
      data      4 groups of 2 ranks, 4 apart, such as 0, 4; across 2 nodes
    data 0      pipeline 0: ranks 0–1, node 0; stage 0
                pipeline 1: ranks 2–3, node 0; stage 1
    data 1      pipeline 0: ranks 4–5, node 1
                pipeline 1: ranks 6–7, node 1
    """
    places = spec.places
    total = sum(map(len, places))
    where = [rank // nodes for rank in range(total)] if isinstance(nodes, int) else nodes
    lines = [_world(spec, total, where), *_groups(spec, where)]
    lines += _stages(spec, places, where, layers)
    lines += _grid(spec, places)
    return "\n".join(lines)


def _world(spec: MeshSpec, total: int, where: Nodes | None) -> str:
    parts = []
    for name in DIMENSIONS:
        size = getattr(spec, name)
        if size > 1 and not (name == "tensor" and spec.parts):
            parts.append(f"{name} {size}{_shape(spec, name)}")
    if spec.parts:
        shapes = [f"{part.tensor}{_shape(part, 'tensor')}" for part in spec.parts]
        parts.append(f"tensor {', '.join(shapes)}")
    spread = "" if where is None else f", on {_nodes_text(where)}"
    return f"{'ranks':<12}{total:,} = {' × '.join(parts) or 'data 1'}{spread}"


def _shape(spec: MeshSpec, name: str) -> str:
    """Return the axes of a dimension, where they tell more than its size."""
    axes = {a: n for a, n in spec.axes.items() if a in spec.axes_of(name)}
    text = " × ".join(f"{a}={n}" for a, n in axes.items())
    if name == "tensor":
        return f" ({spec.mode}: {text})" if spec.mode else ""
    return f" ({text})" if len(axes) > 1 else ""


def _nodes_text(where: Nodes) -> str:
    each = [len(list(ranks)) for ranks in _by_node(where).values()]
    if len(each) == 1:
        return "1 node"
    size = str(each[0]) if len(set(each)) == 1 else f"{min(each)} to {max(each)}"
    return f"{len(each):,} nodes of {size}"


def _by_node(where: Nodes) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for rank, node in enumerate(where):
        found.setdefault(node, []).append(rank)
    return found


def _groups(spec: MeshSpec, where: Nodes | None) -> list[str]:
    """Return the groups of each dimension of several ranks, and whether they stay within a node."""
    lines = []
    for name in GROUPS:
        groups = [ranks for ranks in spec.groups(name) if len(ranks) > 1]
        if groups:
            lines.append(f"  {name:<10}{_group_text(groups, where)}")
    return lines


def _group_text(groups: Sequence[Sequence[int]], where: Nodes | None) -> str:
    lengths = {len(g) for g in groups}
    size = str(max(lengths)) if len(lengths) == 1 else f"{min(lengths)} to {max(lengths)}"
    steps = {b - a for g in groups for a, b in pairwise(g)}
    apart = ", next to one another" if steps == {1} else f", {max(steps):,} apart" if len(steps) == 1 else ""
    text = f"{len(groups):,} group{'s' * (len(groups) > 1)} of {size} ranks{apart}, such as {_some(groups[0])}"
    if where is None:
        return text
    spans = [len({where[rank] for rank in g}) for g in groups]
    if max(spans) == 1:
        return f"{text}; within a node"
    least, most = min(spans), max(spans)
    return f"{text}; across {most if least == most else f'{least} to {most}'} nodes"


def _some(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return _span(ranks)
    return ", ".join(map(str, ranks)) if len(ranks) <= 4 else f"{ranks[0]}, {ranks[1]}, …, {ranks[-1]}"


def _span(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"


def _stages(
    spec: MeshSpec, places: Sequence[Sequence[int]], where: Nodes | None, layers: Sequence[int] | None
) -> list[str]:  # fmt: skip
    """Return for each index outside of the pipeline the ranks of each pipeline rank, which follow one another."""
    copies = math.prod(n for axis, n in spec.at(0).axes.items() if axis in spec.outer)
    if copies == len(places) == 1:
        return []
    inner, each = [len(ranks) // copies for ranks in places], spec.data // copies

    def data(first: int, last: int) -> str:
        return f"data {_span(range(each * first, each * (last + 1)))}"

    lines = []
    shown = min(copies, max(1, ROWS // len(places)))
    for d in range(shown):
        rows = []
        for p, ranks in enumerate(places):
            here = ranks[d * inner[p] : (d + 1) * inner[p]]
            node = "" if where is None else f", {_node_text([where[rank] for rank in here])}"
            grid = f", {' × '.join(f'{a}={n}' for a, n in spec.at(p).axes.items())}" if spec.parts else ""
            held = _held(p, spec, layers) if d == 0 else ""
            rows.append(f"{spec.label(p)}rank{'s' * (len(here) > 1)} {_span(here)}{node}{grid}{held}")
        lines += _headed(data(d, d) if spec.data > 1 else "in order", _folded(rows))
    if shown < copies:
        step = sum(inner)
        rest = data(shown, copies - 1)
        lines.append(f"{rest:<12}the same from rank {shown * step:,} on, {format_count(step, 'rank')} each")
    return lines


def _node_text(nodes: Sequence[int]) -> str:
    found = sorted(set(nodes))
    return f"node {found[0]}" if len(found) == 1 else f"nodes {_some(found)}"


def _held(rank: int, spec: MeshSpec, layers: Sequence[int] | None) -> str:
    if not (stages := spec.stages(rank)):
        return ""
    text = f"; {stages_text(stages)}"
    if layers is not None:
        counts = [layers[s] for s in stages]
        text += f" ({' + '.join(map(str, counts))} layer{'s' * (sum(counts) > 1)})"
    return text


def _folded(rows: Sequence[str]) -> list[str]:
    return list(rows) if len(rows) <= ROWS else [*rows[: ROWS // 2], "⋮", *rows[-ROWS // 4 :]]


def _headed(head: str, rows: Sequence[str]) -> list[str]:
    return [f"{head if i == 0 else '':<12}{row}" for i, row in enumerate(rows)]


def _grid(spec: MeshSpec, places: Sequence[Sequence[int]]) -> list[str]:
    """Return the ranks of the first grid as a table: a line for each index of all its axes but the last."""
    lines: list[str] = []
    drawn: list[Mapping[str, int]] = []
    for p, ranks in enumerate(places):
        axes = {a: n for a, n in spec.at(p).axes.items() if a not in OUTSIDE and n > 1}
        if len(axes) < 2 or axes in drawn:
            continue
        drawn.append(axes)
        *outer, last = axes
        wide = axes[last]
        rows = []
        for i in range(math.prod(axes[a] for a in outer)):
            left, at = i, []
            for axis in reversed(outer):
                left, index = divmod(left, axes[axis])
                at.append(f"{axis}={index}")
            line = [str(rank) for rank in ranks[i * wide : (i + 1) * wide]]
            line = line if len(line) <= COLUMNS else [*line[: COLUMNS // 2], "…", line[-1]]
            rows.append(f"{', '.join(reversed(at))}: {' '.join(line)}")
        lines += _headed("a grid", _folded(rows))
    return lines


def layer_counts(config: TrainingConfig, spec: MeshSpec) -> tuple[int, ...] | None:
    """Return the layers of each stage, with the embedding and the head; None if only the model itself can tell."""
    if config.model.name not in LANGUAGE:
        return None
    return spec.layer_counts(config.model.options.get("num_hidden_layers", SIZES["num_hidden_layers"]))
