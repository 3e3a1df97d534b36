"""The words a scheme moves, and its row of the table of schemes, both read off its plans.  Pure."""

from __future__ import annotations

from collections.abc import Mapping

from parlinalg.layout import Layout
from parlinalg.moves import Step, moves
from parlinalg.plan import Plan
from parlinalg.schemes.scheme import Scheme

COLUMNS = ("x", "w", "y", "grad y", "dx", "dw")
_SHORT = {"all_gather": "AG", "reduce_scatter": "RS", "all_reduce": "AR", "all_to_all": "A2A", "exchange": "EX"}


def transitions(plan: Plan) -> dict[str, tuple[Layout, Layout]]:
    """Return the changes of layout in one product and its derivatives: for each column of the table (from, to).

    The gradient of y is brought to work once for both derivatives; x and w count as kept gathered for them.
    """
    dx, dw = plan.grad_x, plan.grad_w
    return {
        "x": (plan.x, plan.x_work),
        "w": (plan.w, plan.w_work),
        "y": (plan.y_work, plan.y),
        "grad y": (dx.x, dx.x_work),
        "dx": (dx.y_work, dx.y),
        "dw": (dw.y_work, dw.y),
    }


def communication_steps(plan: Plan, sizes: Mapping[str, int]) -> dict[str, tuple[Step, ...]]:
    """Return the steps of communication of one product and its derivatives, by column of the table."""
    return {column: moves(src, dst, sizes) for column, (src, dst) in transitions(plan).items()}


def product_words(
    plan: Plan, x: tuple[int, ...], w: tuple[int, ...], sizes: Mapping[str, int], coords: Mapping[str, int]
) -> dict[str, int]:
    """Return how many elements the rank at `coords` receives, by column of the table, for x and w of these shapes.

    Parameters
    ----------
    plan : Plan
    x, w : tuple of int
        The global shapes of x[*b, *m, *k] and w[*b, *k, *n].
    sizes, coords : dict of str to int
        The grid's axes, and the rank's place on them.

    Returns
    -------
    dict of str to int
        The forward pass is the sum of "x", "w" and "y"; the backward pass that of "grad y", "dx" and "dw", and of "x"
        and "w" once more where they are not kept.  "dw" is the sum over all axes that do not cut w too.
    """
    y = plan.result_shape(x, w)
    # the columns' arrays, with dims in the order of their plans: that of dw is w[*b, *k, *n]
    shapes = {"x": x, "w": w, "y": y, "grad y": y, "dx": x, "dw": w}
    return {
        column: sum(step.words(shapes[column], sizes, coords) for step in found)
        for column, found in communication_steps(plan, sizes).items()
    }


def scheme_words(
    scheme: Scheme, shape: tuple[int, int, int], inner: int, sizes: Mapping[str, int], coords: Mapping[str, int]
) -> dict[str, int]:
    """Return the elements that the rank at `coords` receives in a product into a block and one out of it, by column.

    `shape` is that of the residual stream [batch, sequence, hidden]; the weights are [hidden, inner], [inner, hidden].
    """
    batch, sequence, hidden = shape
    expand = product_words(scheme.expand, shape, (hidden, inner), sizes, coords)
    contract = product_words(scheme.contract, (batch, sequence, inner), (inner, hidden), sizes, coords)
    return {column: expand[column] + contract[column] for column in COLUMNS}


def table_row(scheme: Scheme) -> str:
    """Return the scheme's row of the table of schemes, in Markdown; columns: scheme, x, w, y, grad y, dx, dw.

    AR is an all-reduce, AG an all-gather, RS a reduce-scatter; "a / b" is a in expand and b in contract.

    Examples
    --------
    >>> from parlinalg.schemes import discover
    >>> print(table_row(discover()["2d"].SCHEME))
    | 2d | AG c | AG r | – | – | RS c | RS r |
    """
    expand, contract = _cells(scheme.expand, scheme), _cells(scheme.contract, scheme)
    name = scheme.name
    if pair := _exchanged(scheme):
        name, contract = f"{name} (contract: {pair[0]} and {pair[1]} exchanged)", expand
    cells = [e if e == c else f"{e} / {c}" for e, c in zip(expand, contract, strict=True)]
    return f"| {' | '.join([name, *cells])} |"


def table_of_schemes(schemes: Mapping[str, Scheme]) -> str:
    """Return the table of these schemes in Markdown, a row each."""
    head = f"| {' | '.join(['scheme', *COLUMNS])} |\n{'|---' * (len(COLUMNS) + 1)}|"
    return "\n".join([head, *(table_row(s) for s in schemes.values())])


def _cells(plan: Plan, scheme: Scheme) -> list[str]:
    found = communication_steps(plan, dict.fromkeys(scheme.axes, 2))
    return [", ".join(f"{_SHORT[s.op]} {' '.join(s.axes)}" for s in found[c] if s.op in _SHORT) or "–" for c in COLUMNS]


def _exchanged(scheme: Scheme) -> tuple[str, str] | None:
    """Return the two axes whose exchange turns expand into contract, if the scheme is made so."""
    pairs = ((a, b) for i, a in enumerate(scheme.axes) for b in scheme.axes[i + 1 :])
    if scheme.contract == scheme.expand:
        return None
    return next((p for p in pairs if scheme.contract == scheme.expand.renamed({p[0]: p[1], p[1]: p[0]})), None)
