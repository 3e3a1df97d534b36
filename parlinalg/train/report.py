"""What a training says at its start and at its end."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parlinalg.autograd import Parameter
from parlinalg.comm.places import ranks_map
from parlinalg.layout import coordinates
from parlinalg.schemes import table_of_schemes
from parlinalg.train.launch import Mesh
from parlinalg.train.map import rank_map
from parlinalg.units import format_bytes

_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")  # of a block
SHOWN = 64  # ranks named one by one


def places(mesh: Mesh) -> list[dict[str, Any]]:
    """For every rank its host, pid and coordinates, in a pipeline also its stages, on every rank.  Collective."""
    found = ranks_map(mesh.world)
    for p, ranks in enumerate(mesh.place.ranks):
        sizes = mesh.place.sizes[p]
        for rank, coords in zip(ranks, coordinates(tuple(sizes), sizes), strict=True):
            found[rank]["coords"] = coords
            if mesh.schedule is not None:
                found[rank]["coords"] = {"pipeline": p, **coords}
                found[rank]["stages"] = [chunk.stage for chunk in mesh.schedule.chunks[p]]
    return found


def write_ranks(out: Path, ranks: Sequence[Mapping[str, Any]]) -> None:
    """Write `ranks.json`: when a rank is killed the launcher names its pid, and this says which rank it was."""
    (out / "ranks.json").write_text(json.dumps(ranks, indent=1) + "\n")


def opening(
    mesh: Mesh, ranks: Sequence[Mapping[str, Any]], parameters: Mapping[str, Parameter], settings: Mapping[str, object]
) -> str:
    """What runs where: scheme, grid, layouts, backend, ranks, and the bytes of parameters a rank holds.  Collective.

    Parameters
    ----------
    ranks : list of dict
        Those of `places`.
    parameters : dict of str to Parameter
        By name.
    settings : dict of str to object
        Further lines: a head and a text each.
    """
    grid = mesh.grid
    held = mesh.world.share(sum(p.block.nbytes for p in parameters.values()))
    first = mesh.world.rank == mesh.place.ranks[mesh.place.rank][0]
    mine = {name: [p.size, p.data.nbytes] for name, p in parameters.items()} if first else {}
    whole: dict[str, list[int]] = {}
    for theirs in mesh.world.share(mine) if mesh.place.size > 1 else [mine]:
        whole |= theirs
    count, total = (sum(of[i] for of in whole.values()) for i in (0, 1))
    each = format_bytes(min(held)) + (f" to {format_bytes(max(held))}" if max(held) > min(held) else "")
    axes = " × ".join(f"{a}={n}" for a, n in grid.sizes.items())
    threads = f"{grid.threads} BLAS thread{'s' * (grid.threads > 1)} a rank"
    rows = {
        "grid": f"{axes}: {grid.size} rank{'s' * (grid.size > 1)}",
        "backend": f"{grid.backend.name} ({grid.backend.device}), {threads}",
        "scheme": mesh.scheme.name,
        **settings,
        "parameters": f"{count:,} ({format_bytes(total)}); a rank holds {each}",
    }
    lines = [f"{head:<12}{text}" for head, text in rows.items()]
    lines += _parameters(parameters)
    lines += ["", table_of_schemes({"": mesh.scheme}), ""]
    lines += _ranks(ranks)
    if mesh.world.size > 1:
        hosts = [place["host"] for place in ranks]
        lines += ["", rank_map(mesh.parallel, mesh.schedule, [hosts.index(host) for host in hosts])]
    return "\n".join(lines)


def by_stage(mesh: Mesh, text: str) -> str:
    """What each stage of a pipeline has to say, in a line each; of those that say the same in one.  Collective."""
    if mesh.schedule is None:
        return text
    everyone = mesh.world.share(text)
    said: dict[str, list[int]] = {}
    for held, ranks in zip(mesh.schedule.chunks, mesh.place.ranks, strict=True):
        said.setdefault(everyone[ranks[0]], []).extend(chunk.stage for chunk in held)
    lines = []
    for each, stages in said.items():
        numbers = sorted(set(stages))
        lines.append(f"stage{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}: {each}")
    return f"\n{'':<12}".join(lines)


def _parameters(parameters: Mapping[str, Parameter]) -> list[str]:
    """A line for each parameter; for those of like blocks one line for all."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name, p in parameters.items():
        before, number, after = (*_NUMBER.split(name, maxsplit=1), "", "")[:3]
        alike.setdefault((f"{before}{{}}{after} {list(p.shape)}", repr(p.layout)), []).append(number)
    heads = [name.format("…".join(dict.fromkeys((i[0], i[-1])))) for (name, _), i in alike.items()]
    wide = max(map(len, heads), default=0)
    return [f"  {head:<{wide}}  {layout}" for head, (_, layout) in zip(heads, alike, strict=True)]


def _ranks(ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    hosts: dict[str, list[str]] = {}
    for rank, place in enumerate(ranks):
        hosts.setdefault(place["host"], []).append(f"{rank} (pid {place['pid']})")
    if len(ranks) > SHOWN:
        return [f"ranks       {len(ranks)} on {len(hosts)} hosts: see ranks.json"]
    heads = ["ranks", *[""] * (len(hosts) - 1)]
    lines = [f"on {host}: {', '.join(texts)}" for host, texts in hosts.items()]
    return [f"{head:<12}{line}" for head, line in zip(heads, lines, strict=True)]
