"""Words that one rank receives: counted, by the formula, and the lower bound, for every scheme and planned product.

    mpiexec -n 8 python bench/words.py [--json FILE]     # any number of ranks; a few seconds

For each scheme found in `parlinalg/schemes` the products into a block and out of it run forward and backward with x, w
and the gradient of y gathered once each, on uneven sizes, and the ledger counts.  "counted" is the rank that receives
the most; a row agrees if every rank's count is the formula's exactly.  The bound is that of three matrices that rest
cut evenly over all ranks (Al Daas et al., SPAA 2022): a scheme with replicas at rest may move fewer words.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import harness
import numpy as np

import parlinalg as pla
from parlinalg.comm import Comm, open_comm
from parlinalg.grid import factorizations
from parlinalg.layout import Layout
from parlinalg.matmul.bounds import memory_independent
from parlinalg.plan import Plan
from parlinalg.schemes import SchemeFile, discover, product_words
from parlinalg.schemes.shapes import NeedsShape

STREAM = (5, 21, 67)
"""Batch, sequence and hidden size: uneven on every grid."""
INNER = 131
PRODUCTS = {
    "square": (512, 512, 512), "tall": (4096, 256, 256), "wide": (256, 4096, 256), "large-k": (256, 256, 4096),
    "uneven": (509, 251, 1021),
}  # fmt: skip
Shape = tuple[int, ...]


def sizes_for(file: SchemeFile, ranks: int) -> dict[str, int]:
    """The sizes of a scheme's axes over so many ranks: its own choice, else its squarest shape."""
    if not file.SCHEME.axes:
        return {"one": 1}
    try:
        return file.sizes(ranks)
    except NeedsShape:
        shape = min(factorizations(ranks, len(file.SCHEME.axes)), key=lambda s: (max(s) / min(s), s))
        return file.sizes(ranks, shape)


def random(shape: Shape, layout: Layout, grid: pla.Grid) -> pla.DistArray:
    """Numbers that differ from block to block, and agree between replicas."""
    cut = layout.with_partial(())
    start = [r.start for r in grid.block(cut, shape)] if grid.inside else [0]
    block = np.random.default_rng(start).uniform(-1, 1, grid.block_shape(cut, shape))
    return pla.from_blocks(block, grid, cut, shape)


def counted(plan: Plan, x_shape: Shape, w_shape: Shape, grid: pla.Grid) -> dict[str, int]:
    """Return what the ledger counts on this rank in a product and its two derivatives."""
    nb, nm, nk = len(plan.b), len(plan.m), len(plan.k)
    dx, dw = plan.grad_x, plan.grad_w
    x, w = random(x_shape, plan.x, grid), random(w_shape, plan.w, grid)
    dy = random((*x_shape[: nb + nm], *w_shape[nb + nk :]), plan.y, grid)
    with pla.ledger(grid) as forward:
        xs, ws = x.redistribute(plan.x_work), w.redistribute(plan.w_work)
        pla.matmul(xs, ws, plan=replace(plan, x=plan.x_work, w=plan.w_work))
    with pla.ledger(grid) as backward:
        dys = dy.redistribute(dx.x_work)
        turned_w = ws.transpose((*range(nb), *range(nb + nk, ws.ndim), *range(nb, nb + nk)))
        turned_x = xs.transpose((*range(nb), *range(nb + nm, xs.ndim), *range(nb, nb + nm)))
        pla.matmul(dys, turned_w, plan=replace(dx, x=dx.x_work, w=dx.w_work))
        pla.matmul(turned_x, dys, plan=replace(dw, x=dw.x_work, w=dw.w_work))
    return {"forward": forward.words.total(), "backward": backward.words.total()}


def scheme_row(name: str, file: SchemeFile, world: Comm) -> dict[str, Any]:
    """One scheme over all ranks, its two products added up."""
    sizes, scheme = sizes_for(file, world.size), file.SCHEME
    batch, sequence, hidden = STREAM
    mine = {"forward": [0, 0], "backward": [0, 0]}
    even, bound = True, 0.0
    with pla.Grid(sizes, world, idle=True) as grid:
        for plan, x, w in (
            (scheme.expand, STREAM, (hidden, INNER)),
            (scheme.contract, (batch, sequence, INNER), (INNER, hidden)),
        ):
            formula = product_words(plan, x, w, grid.sizes, grid.coords) if grid.inside else {}
            found = counted(plan, x, w, grid)
            for way, columns in (("forward", ("x", "w", "y")), ("backward", ("grad y", "dx", "dw"))):
                mine[way][0] += found[way]
                mine[way][1] += sum(formula.get(c, 0) for c in columns)
            bound += memory_independent(batch * sequence, w[1], w[0], grid.size)
            even &= all(set(la.cut_axes) >= set(scheme.axes) for la in (plan.x, plan.w, plan.y))
        everyone = world.share(mine)
    return {
        "scheme": name, "grid": sizes, "even": even, "bound": bound,
        **{way: max(m[way][0] for m in everyone) for way in mine},
        **{f"{way} formula": max(m[way][1] for m in everyone) for way in mine},
        "agrees": all(m[way][0] == m[way][1] for m in everyone for way in mine),
    }  # fmt: skip


def plan_row(name: str, shape: tuple[int, int, int], world: Comm) -> dict[str, Any]:
    """One product planned for all ranks."""
    m, n, k = shape
    found = pla.plan_matmul(m, n, k, ranks=world.size)
    with found.make_grid(world) as grid:
        plan = found.plan
        a, b = random((m, k), plan.x, grid), random((k, n), plan.w, grid)
        with pla.ledger(grid) as book:
            pla.matmul(a, b, plan=plan)
        formula = plan.words(a.shape, b.shape, grid.sizes, grid.coords) if grid.inside else 0
        everyone = world.share([book.words.total(), formula])
    return {
        "product": name, "m, n, k": shape, "grid": list(found.factors), "counted": max(e[0] for e in everyone),
        "mean": sum(e[0] for e in everyone) / found.working_ranks, "formula": found.words, "bound": found.bound,
        "ratio": found.words / found.bound if found.bound else 1.0, "agrees": all(e[0] == e[1] for e in everyone),
    }  # fmt: skip


def show(schemes: Sequence[dict[str, Any]], plans: Sequence[dict[str, Any]], ranks: int) -> str:
    batch, sequence, hidden = STREAM
    first = harness.table(
        (
            "scheme", "grid", "forward: counted", "formula", "bound", "backward: counted", "formula", "all cut at rest",
            "agrees",
        ),
        [
            (
                r["scheme"], " ".join(f"{a}={n}" for a, n in r["grid"].items()), f"{r['forward']:,}",
                f"{r['forward formula']:,}",
                f"{r['bound']:,.0f}", f"{r['backward']:,}", f"{r['backward formula']:,}", "yes" if r["even"] else "no",
                "exactly" if r["agrees"] else "NO",
            )
            for r in schemes
        ],
    )  # fmt: skip
    second = harness.table(
        ("product", "m, n, k", "grid", "counted: most", "mean", "formula", "bound", "formula / bound", "agrees"),
        [
            (
                r["product"], "×".join(map(str, r["m, n, k"])), "×".join(map(str, r["grid"])), f"{r['counted']:,}",
                f"{r['mean']:,.0f}",
                f"{r['formula']:,.0f}", f"{r['bound']:,.0f}", f"{r['ratio']:.3f}", "exactly" if r["agrees"] else "NO",
            )
            for r in plans
        ],
    )  # fmt: skip
    return (
        f"Words received in one product into a block and one out of it, {ranks} ranks; "
        f"x[{batch}, {sequence}, {hidden}], "
        f"w[{hidden}, {INNER}] and w[{INNER}, {hidden}]\n\n{first}\n\nPlanned products, {ranks} ranks\n\n{second}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()
    world = open_comm()
    schemes = [scheme_row(name, file, world) for name, file in discover().items()]
    plans = [plan_row(name, shape, world) for name, shape in PRODUCTS.items()]
    agrees = all(r["agrees"] for r in (*schemes, *plans))
    if world.rank == 0:
        print(show(schemes, plans, world.size), flush=True)
        if args.json:
            harness.write_json(args.json, {"ranks": world.size, "schemes": schemes, "plans": plans, "agrees": agrees})
    world.free()
    return 0 if agrees else 1


if __name__ == "__main__":
    raise SystemExit(main())
