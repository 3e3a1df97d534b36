"""Why a plan of a product was chosen, as text.  Pure."""

from __future__ import annotations

import heapq
from fractions import Fraction

from parlinalg.matmul.planner import MARGIN, Factors, MatmulPlan, Needs, Problem, Seconds, least_words, messages
from parlinalg.units import format_bytes, format_count, format_seconds, three_digits

RUNNERS_UP = 3
FASTER = 0.95  # a grid that takes less than this share of the chosen one's time is named
_NAMES = {"x": "A", "w": "B", "y": "C"}
_STREAMED = {"x": "n", "w": "m", "y": "k"}


def explain(plan: MatmulPlan, seconds: Seconds | None = None) -> str:
    """Return the plan's grid, words, bound, memory and kernel, and the grids that lost, one a line with the reason.

    With a function that tells the seconds of a grid's products and communication also times.
    """
    problem = Problem(plan.m, plan.n, plan.k, plan.ranks, plan.dtype, plan.limit)
    least = problem.least_block()
    rows = [
        (
            "product",
            f"A[{plan.m}, {plan.k}] · B[{plan.k}, {plan.n}] in {plan.dtype} over {format_count(plan.ranks, 'rank')}",
        ),
        ("grid", f"{_shape(plan.factors)} (parts of m × n × k); {_idle(plan)}"),
        ("block", _block(problem, plan.factors, least)),
        ("words", _words(plan)),
        ("bound", _bound(plan)),
        ("messages", f"{format_count(plan.messages, 'block')} received a rank"),
        ("memory", _memory(plan, problem)),
        ("kernel", _kernel(plan)),
    ]
    if seconds is not None:
        product, moves = seconds(plan.factors)
        parts = f"products {format_seconds(product)}, communication {format_seconds(moves)}"
        rows.append(("time", f"{format_seconds(product + moves)}: {parts}"))
    lines = [f"{name:<10}{text}" for name, text in rows]
    others = _others(problem, least, plan.factors)
    lines.append("runners-up" if others else "runners-up: none, no other grid can be formed")
    times = {} if seconds is None else {f: sum(seconds(f)) for f in (plan.factors, *others)}
    for f in others:
        time = f"{format_seconds(times[f]):>9} " if times else ""
        lines.append(f"  {_shape(f):<14} {time}{_lost(problem, least, f, plan.factors)}")
    quickest = min(times, key=times.__getitem__, default=plan.factors)
    if times and times[quickest] < FASTER * times[plan.factors]:
        lines.append(
            f"faster    {_shape(quickest)} takes the least time of these here, {format_seconds(times[quickest])} "
            f"instead of {format_seconds(times[plan.factors])}; the grid is chosen by words, on any machine the same"
        )
    return "\n".join(lines)


def _others(problem: Problem, least: int, chosen: Factors) -> list[Factors]:
    """Return the next best grids, then the obvious ones: one rank, one dim cut, the squarest 2D.

    Where the memory forbids the best grid it comes first.
    """
    limit = problem.limit
    balanced = [(pm, pn, pk) for pm, pn, pks in problem.balanced(least) for pk in pks]
    best = heapq.nsmallest(RUNNERS_UP + 1, balanced, key=problem.order)
    if limit is not None and least_words(problem.needs(best[0])) > limit:
        fitting = [f for f in balanced if least_words(problem.needs(f)) <= limit]
        best = [best[0], *heapq.nsmallest(RUNNERS_UP, fitting, key=problem.order)]
    p = problem.ranks
    side = max(d for d in range(1, int(p**0.5) + 2) if p % d == 0 and d * d <= p)
    plain: list[Factors] = [(1, 1, 1), (p, 1, 1), (1, p, 1), (1, 1, p), (side, p // side, 1)]
    others = [f for f in best if f != chosen][:RUNNERS_UP]
    return list(dict.fromkeys(f for f in [*others, *plain] if f != chosen))


def _lost(problem: Problem, least: int, factors: Factors, chosen: Factors) -> str:
    """Return why `factors` lost against `chosen`: the first of the rule's criteria in which it is worse."""
    words, won = problem.words(factors), problem.words(chosen)
    moved = f"moves {_words_of(words)} word{'s' * (words != 1)}"
    block = problem.block(factors)
    need = least_words(problem.needs(factors))
    if block > MARGIN * least:
        more = (
            f"{three_digits(block / least)} times" if block >= 2 * least else f"{100 * (block / least - 1):.0f}% above"
        )
        return f"{moved}, but its largest block product is {more} the least possible, more than 10%"
    if problem.limit is not None and need > problem.limit:
        return f"{moved}, but needs at least {format_bytes(need * problem.itemsize)} a rank"
    if words != won:
        return f"{moved}, {100 * float(words / won - 1):,.1f}% more" if won else f"{moved}, where none need move"
    if messages(factors) != messages(chosen):
        return f"{moved}, as few, but in {format_count(messages(factors), 'message')} instead of {messages(chosen)}"
    if block != problem.block(chosen):
        return f"{moved}, as few, but its largest block product is larger"
    return f"{moved}, as few: a tie, broken towards fewer ranks along k, then n, then m"


def _idle(plan: MatmulPlan) -> str:
    working, idle = plan.working_ranks, plan.ranks - plan.working_ranks
    text = f"{format_count(working, 'rank')} in the grid, "
    if idle == 0:
        text += "none idle"
    elif idle == 1:
        text += f"rank {working} is idle"
    else:
        text += f"ranks {working} to {plan.ranks - 1} are idle"
    parts = zip(plan.factors, (plan.m, plan.n, plan.k), strict=True)
    busy = 1
    for p, extent in parts:
        busy *= min(p, extent)
    idle = working - busy
    return text + (f"; {format_count(idle, 'rank')} of the grid {_have(idle)} empty blocks" if idle > 0 else "")


def _block(problem: Problem, factors: Factors, least: int) -> str:
    sizes = zip((problem.m, problem.n, problem.k), factors, strict=True)
    shape = " × ".join(f"{-(-extent // p):,}" for extent, p in sizes)
    block = problem.block(factors)
    over = "the least possible" if block == least else f"{100 * (block / least - 1):.1f}% above the least possible"
    return f"{shape}, the busiest rank's {format_count(block, 'multiplication')}: {over}"


def _words(plan: MatmulPlan) -> str:
    pm, pn, pk = plan.factors
    m, n, k = plan.m, plan.n, plan.k
    p = pm * pn * pk
    parts = (("A", m * k * (pn - 1)), ("B", k * n * (pm - 1)), ("C", m * n * (pk - 1)))
    moved = ", ".join(f"{name} {_words_of(Fraction(total, p))}" for name, total in parts if total)
    words = sum((Fraction(total, p) for _, total in parts), Fraction(0))
    return f"{_words_of(words)} received a rank" + (f" ({moved})" if moved else "")


def _bound(plan: MatmulPlan) -> str:
    text = f"{_words_of(plan.bound)} (whatever the memory), ratio {_ratio(plan.words, plan.bound)}"
    if plan.limited_bound is not None:
        text += f"; {_words_of(plan.limited_bound)} within this memory, ratio {_ratio(plan.words, plan.limited_bound)}"
    return text


def _ratio(words: float, bound: float) -> str:
    return f"{words / bound:.3f}" if bound else "1 (nothing to move)" if not words else "infinite"


def _memory(plan: MatmulPlan, problem: Problem) -> str:
    needs: Needs = problem.needs(plan.factors)
    rest = needs.rest * problem.itemsize
    buffers = format_bytes(plan.memory - rest)
    text = f"{format_bytes(plan.memory)} a rank: {format_bytes(rest)} at rest, {buffers} buffers"
    return text if plan.limit is None else f"{text}; {format_bytes(plan.limit)} allowed"


def _kernel(plan: MatmulPlan) -> str:
    if plan.kernel == "gather" or plan.stationary is None:
        return "gather: what a rank lacks is gathered whole"
    return f"stream: {_NAMES[plan.stationary]} is kept whole, panels of {plan.panel} along {_STREAMED[plan.stationary]}"


def _shape(factors: Factors) -> str:
    return "×".join(map(str, factors))


def _words_of(words: Fraction | float) -> str:
    """Return a mean of words over ranks as text: few with a digit behind the point, unless they are whole."""
    return f"{float(words):,.1f}" if words < 1000 and words != int(words) else f"{round(words):,}"


def _have(n: int) -> str:
    return "has" if n == 1 else "have"
