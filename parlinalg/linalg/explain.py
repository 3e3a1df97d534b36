"""Why a plan of a factorization was chosen, as text.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from parlinalg.linalg import tile_sizes
from parlinalg.linalg.footprint import footprint
from parlinalg.linalg.planner import (
    SOLUTIONS,
    LinalgPlan,
    dealt,
    grid_and_tiles,
    kernel,
    layered_grids,
    layers_text,
    two_axis_grids,
)
from parlinalg.linalg.tile_sizes import Time
from parlinalg.units import ITEMSIZE, format_bytes, format_count, format_flops, format_seconds

RUNNERS_UP = 3


def explain(plan: LinalgPlan) -> str:
    """Return why a plan is as it is."""
    rows = [
        (plan.routine, _matrix(plan)), ("grid", _grid(plan)), ("tiles", _tiles(plan)), ("words", _words(plan)),
        *_parts(plan),
        ("messages", f"{format_count(plan.messages, 'collective call')} in which this rank takes part"),
        ("memory", _memory(plan)), ("time", _time(plan)),
        ("others", "; ".join(_others(plan)) or f"none, {_no_others(plan)}"),
    ]  # fmt: skip
    if plan.routine in tile_sizes.REPLICATED and plan.m == plan.n:
        rows.append(("2.5D", _replicated(plan)))
    return "\n".join(f"{name:<10}{text}" for name, text in rows)


def _no_others(plan: LinalgPlan) -> str:
    if plan.pivoting:
        return "on any grid whole columns are dealt alike"
    alone = plan.routine == "svd" and plan.alone
    return "on any grid one rank does this" if alone else "no other grid or size of tiles is possible"


def _matrix(plan: LinalgPlan) -> str:
    sides = f" X = B[{plan.m}, {plan.sides}]" if plan.routine in SOLUTIONS else ""
    sides += " with column pivoting" * plan.pivoting
    return f"A[{plan.m}, {plan.n}]{sides} in {plan.dtype} over {format_count(plan.ranks, 'rank')}"


def _grid(plan: LinalgPlan) -> str:
    deal = plan.deal
    made = ", ".join(f'"{axis}": {size}' for axis, size in plan.sizes.items())
    if plan.routine == "svd" and plan.alone:
        (m, n), name = plan.shape, "A" if plan.first is None else "R"
        return f"one rank on Grid({{{made}}}): it finds the singular values of {name}[{m}, {n}] sooner than all would"
    why = {
        "square": "as near to a square as its axes make",
        "tall": "rows alone are dealt, since the matrix is tall",
        "strips": "rows alone are dealt, one piece a rank as at rest, since the matrix is tall",
        "wide": "columns alone are dealt, since few ranks share memory and pass panels on at no cost",
    }[deal.shape if plan.ranks > 1 else "square"]
    if plan.m < plan.n and deal.shape == "tall" and plan.routine in ("lstsq", "svd"):
        why = "columns of A, which are the rows of Aᴴ, alone are dealt, since the matrix is wide"
    if not min(plan.m, plan.n):
        why = "the matrix is empty"
    if plan.pivoting:
        why = "whole columns are dealt, from which ranks choose without sums"
    return f"{layers_text(deal)}{deal.R}×{deal.C} on Grid({{{made}}}): {why}"


def _tiles(plan: LinalgPlan) -> str:
    if plan.pivoting:
        text = f"{plan.block} columns, {format_count(min(plan.m, plan.n), 'step')} of one column"
        if (first := plan.first) is not None:
            by = "its Gram matrix" if plan.gram else f"a QR factorization on tiles of {first.size} rows and columns"
            text += f", of R[{plan.n}, {plan.n}], which {by} gives"
        return text
    if plan.routine == "svd" and (plan.alone or plan.first is not None):
        return _tiles_of_svd(plan)
    text = f"{plan.block:,} rows and columns, {format_count(-(-min(plan.m, plan.n) // plan.block), 'step')}"
    own = dealt(plan.routine, *plan.shape, plan.sizes, None, plan.near, plan.depth).size
    text += "" if own == plan.block else f"; the model would choose {own}"
    if plan.gram:
        text += ", but only if the matrix is too ill conditioned for its Gram matrix; else all stays where it lies"
    return text


def _tiles_of_svd(plan: LinalgPlan) -> str:
    """Return the tiles of R, and of the QR factorization that gives it, as text."""
    n, first = min(plan.m, plan.n), plan.first
    if first is None:
        return "none: the matrix goes to the rank that finds its singular values"
    by = f"a QR factorization on tiles of {first.size} rows and columns"
    by = f"its Gram matrix, or {by} if the matrix is too ill conditioned," if plan.gram else by
    text = "none" if plan.alone else f"{plan.block:,} rows and columns, {format_count(-(-n // plan.block), 'step')}"
    return f"{text}, of R[{n}, {n}], which {by} gives"


def _words(plan: LinalgPlan) -> str:
    text = f"{plan.words:,} received by rank {plan.busiest}, which receives the most; at rest A lies in {plan.layout!r}"
    if plan.routine in ("lu", "solve") and plan.deal.R > 1:
        text += "; pivots are taken to fall evenly on the grid rows"
    alone = plan.routine == "svd" and plan.alone
    if plan.routine in ("eigh", "svd") and plan.ranks > 1 and not alone:
        text += "; those of divide and conquer are a bound"
    if plan.routine == "lstsq" and plan.ranks > 1:
        text += "; A is taken to have full rank"
    if plan.pivoting and plan.ranks > 1:
        text += "; the columns are taken to come in their order"
    if plan.routine in ("qr", "lstsq") and (plan.first or plan.deal).R > 1:
        text += "; panels are taken to be well conditioned"
    if plan.near and plan.ranks > 1 and plan.routine in ("cholesky", "eigh", "svd") and not alone:
        text += "; each rank is taken to have a core"
    return text


def _parts(plan: LinalgPlan) -> list[tuple[str, str]]:
    """Return a line for each part with the words and calls of the busiest rank."""
    found: dict[str, list[int]] = {}
    for part in plan.costs.parts:
        sums = found.setdefault(part.name, [0, 0])
        sums[0] += int(part.words[plan.busiest])
        sums[1] += int(part.calls[plan.busiest])
    wide = max(42, *(len(name) for name in found), 0)
    return [
        ("", f"{name:<{wide}}{words:>14,} in {format_count(calls, 'call')}")
        for name, (words, calls) in found.items() if calls
    ]  # fmt: skip


def _memory(plan: LinalgPlan) -> str:
    parts = ", ".join(f"{format_bytes(size)} {where}" for where, size in plan.memory.items())
    text = f"about {format_bytes(plan.need)} a rank: {parts}"
    if plan.routine == "qr" and plan.gram and not plan.pivoting:
        more = sum(footprint(plan, by_tiles=True)) * ITEMSIZE[plan.dtype]
        text += f"; {format_bytes(more)} if the matrix is too ill conditioned for its Gram matrix"
    return text


def _time(plan: LinalgPlan) -> str:
    total = plan.time.total
    if not total:
        return "none: there is nothing to compute"
    if plan.foreseen is not None:
        return str(plan.foreseen)
    parts = zip(Time._fields, plan.time, strict=True)
    shares = ", ".join(f"{name} {100 * part / total:.0f}%" for name, part in parts)
    text = f"that of {format_flops(total, 'FLOP')} in fast products"
    if plan.rate is not None:
        text = f"{format_seconds(total / plan.rate)} at {format_flops(plan.rate)}"
    return f"{text}, without the trips{' and if by tiles' * plan.gram}: {shares}"


def _others(plan: LinalgPlan) -> list[str]:
    """Return the neighbouring sizes of tiles and the best other grids, with the time that they take."""
    deal, best = plan.deal, plan.time.total or 1

    if plan.foreseen is not None and plan.slower:
        least = plan.foreseen.seconds or 1
        return [
            f"{grid_and_tiles(each)}: {_more(100 * (each.foreseen.seconds / least - 1))}"
            for each in plan.slower if each.foreseen is not None
        ]  # fmt: skip

    def line(name: str, other: LinalgPlan) -> str:
        more = 100 * (other.time.total / best - 1)
        text = f"{name}: {_more(more)}"
        if plan.limit is not None and other.need > plan.limit and (other is plan.faster or more < 0):
            need, limit = format_bytes(other.need, up=True), format_bytes(plan.limit)
            text += f", but it needs {need} a rank, more than {limit}"
        return text

    def other(grid: Mapping[str, int], b: int) -> LinalgPlan:
        return replace(plan, sizes=grid, block=b, faster=None)

    found = [] if plan.faster is None else [line(grid_and_tiles(plan.faster), plan.faster)]
    if plan.pivoting or (plan.routine == "svd" and plan.alone):
        return found
    kind, shape = kernel(plan.routine), plan.shape
    sizes = sorted({*tile_sizes.candidates(kind, *shape, deal.R, deal.C), plan.block})
    at = sizes.index(plan.block)
    found += [line(f"tiles of {b}", other(plan.sizes, b)) for b in (*sizes[max(0, at - 1) : at], *sizes[at + 1 :][:1])]
    grids = {}
    for grid, depth in layered_grids(plan.ranks, [plan.depth]):
        each = dealt(plan.routine, *shape, grid, None, plan.near, depth)
        if (each.R, each.C) != (deal.R, deal.C):
            grids[each.R, each.C] = other(grid, each.size)
    best_grids = sorted(grids.items(), key=lambda item: item[1].time.total)[:RUNNERS_UP]
    return found + [line(f"{R}×{C}", each) for (R, C), each in best_grids]


def _more(percent: float) -> str:
    return f"{abs(percent):.0f}% {'more' if percent > 0 else 'less'} time" if abs(percent) >= 0.5 else "as fast"


def _replicated(plan: LinalgPlan) -> str:
    """Return the words that several layers of ranks save, or would save (Solomonik and Demmel, 2011), as text."""
    half = plan.routine == "cholesky"

    def words(sizes: Mapping[str, int], depth: int) -> float:
        deal = dealt(plan.routine, plan.m, plan.n, sizes, plan.block, near=False, depth=depth)
        return tile_sizes.panel_words(plan.m, plan.n, deal.R, deal.C, deal.D, half=half)

    flat = min(words(grid, 1) for grid in two_axis_grids(plan.ranks))
    if plan.depth > 1:
        least, depth, chosen = words(plan.sizes, plan.depth), plan.depth, "are"
    else:
        found = [(words(*each), each[1]) for each in layered_grids(plan.ranks, range(2, plan.ranks + 1))]
        (least, depth), chosen = min(found, default=(flat, 1)), "would be"
    if least >= flat and plan.depth == 1:
        return f"one layer; on {format_count(plan.ranks, 'rank')} more would save no words"
    if least < flat:
        compared = f"not {flat:,.0f} or more, {100 * (1 - least / flat):.0f}% fewer"
    else:  # they were asked for, or save time
        compared = f"{100 * (least / max(flat, 1) - 1):.0f}% more than the {flat:,.0f} of one layer"
    first = "one layer; " if plan.depth == 1 else ""
    return f"{first}with {depth} layers panels and sums {chosen} {least:,.0f} words, {compared}, in the leading terms"
