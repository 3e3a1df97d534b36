"""Every scheme is a table: what moves, who sums, and how it is adapted, all pure."""

import pathlib

import pytest

import parlinalg.schemes
from parlinalg.errors import ConfigError, PlanError
from parlinalg.layout import Layout, coordinates
from parlinalg.moves import moves
from parlinalg.schemes import (
    Scheme,
    bias,
    discover,
    for_mode,
    modes,
    modes_for,
    product_words,
    scheme_words,
    table_of_schemes,
    table_row,
)
from parlinalg.schemes.scheme import table
from parlinalg.schemes.words import communication_steps, transitions

pytestmark = pytest.mark.serial

FILES = discover()
SCHEMES = {name: file.SCHEME for name, file in FILES.items()}
every = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)

# the design's table: x, w, y, grad y, dx, dw
ROWS = {
    "serial": "– – – – – –",
    "data": "– – – – – AR:data",
    "sequence": "– – – – – AR:s",
    "zero3": "– AG:data – – – RS:data",
    "1d": "– – –/AR:t – AR:t/– –",
    "1d with sequence cuts": "AG:t/– – –/RS:t –/AG:t RS:t/– –",
    "2d": "AG:c AG:r – – RS:c RS:r",
    "2.5d, depth on the batch": "AG:c AG:r – – RS:c RS:r,AR:d",
    "2.5d, depth on k": "AG:c/AG:d AG:r RS:d/RS:c AG:d/AG:c RS:c/RS:d RS:r",
    "3d": "AG:j/AG:l AG:i RS:l/RS:j AG:l/AG:j RS:j/RS:l RS:i",
}
OPS = {"AG": "all_gather", "RS": "reduce_scatter", "AR": "all_reduce"}


def expected(cell, which):
    """The (op, axes) of a cell of the table for expand (0) or contract (1)."""
    halves = cell.split("/")
    half = halves[min(which, len(halves) - 1)]
    return [] if half == "–" else [(OPS[s[:2]], (s[3:],)) for s in half.split(",")]


def test_every_file_is_found_and_in_the_table():
    folder = pathlib.Path(parlinalg.schemes.__path__[0])
    with_scheme = [f for f in folder.glob("*.py") if "\nSCHEME = " in f.read_text()]
    assert len(with_scheme) == len(FILES) == len(ROWS)
    assert set(FILES) == set(ROWS)


@every
def test_moves_are_those_of_the_design(scheme):
    sizes = dict.fromkeys(scheme.axes, 3)
    for which, plan in enumerate((scheme.expand, scheme.contract)):
        found = communication_steps(plan, sizes)
        for (column, taken), cell in zip(found.items(), ROWS[scheme.name].split(), strict=True):
            assert [(s.op, s.axes) for s in taken if s.op != "slice"] == expected(cell, which), (column, taken)


def test_rows_in_words():
    assert table_row(SCHEMES["2d"]) == "| 2d | AG c | AG r | – | – | RS c | RS r |"
    assert "| AG t / – | – | – / RS t | – / AG t | RS t / – | – |" in table_row(SCHEMES["1d with sequence cuts"])
    assert "3d (contract: j and l exchanged) | AG j | AG i | RS l | AG l | RS j | RS i |" in table_row(SCHEMES["3d"])
    assert len(table_of_schemes(SCHEMES).splitlines()) == len(SCHEMES) + 2


@every
def test_products_chain_without_moving(scheme):
    assert scheme.expand.y == scheme.contract.x == scheme.inner
    assert scheme.contract.y == scheme.expand.x == scheme.residual
    for plan in (scheme.expand, scheme.contract):
        assert plan.grad_x.x == plan.grad_w.w == plan.y
        assert plan.grad_x.y == plan.x
        assert plan.grad_w.y == plan.w
        assert plan.grad_x.grad_x.x == plan.x
        assert plan.grad_x.x_work == plan.grad_w.w_work  # gathered once for both
        named = {a for cut in (*plan.m, *plan.n, *plan.k) for a in cut}
        assert named | set(plan.w.cut_axes) <= set(scheme.axes)


@every
def test_axes_of_one_rank_move_nothing(scheme):
    ones = dict.fromkeys(scheme.axes, 1)
    for plan in (scheme.expand, scheme.contract):
        assert not any(moves(src, dst, ones) for src, dst in transitions(plan).values())


def parts(plan, sizes):
    def count(group):
        total = 1
        for axis in (a for cut in group for a in cut):
            total *= sizes[axis]
        return total

    return count(plan.m), count(plan.n), count(plan.k)


FULLY_CUT = ["2d", "2.5d, depth on k", "3d", "1d with sequence cuts", "zero3"]


@pytest.mark.parametrize("name", FULLY_CUT)
def test_even_words_are_the_formula(name):
    """Where inputs and output rest cut over all ranks, or need not move, the words are those of the formula."""
    scheme = SCHEMES[name]
    sizes = dict(zip(scheme.axes, (2, 4, 3), strict=False))
    shape, inner = (24, 24, 48), 96
    tokens, hidden = shape[0] * shape[1], shape[2]
    for plan, x, w in (
        (scheme.expand, shape, (hidden, inner)),
        (scheme.contract, (*shape[:2], inner), (inner, hidden)),
    ):
        pm, pn, pk = parts(plan, sizes)
        m, k, n = tokens, *w
        formula = m * k * (1 - 1 / pn) / (pm * pk) + k * n * (1 - 1 / pm) / (pk * pn) + m * n * (1 - 1 / pk) / (pm * pn)
        for coords in coordinates(scheme.axes, sizes):
            found = product_words(plan, x, w, sizes, coords)
            assert found["x"] + found["w"] + found["y"] == pytest.approx(formula)
            assert plan.words(x, w, sizes, coords) == found["x"] + found["w"] + found["y"]
            # each derivative moves its operand back the way it came
            assert (found["dx"], found["dw"], found["grad y"]) == (found["x"], found["w"], found["y"])


def test_all_reduces_cost_twice():
    shape, hidden, inner = (4, 6, 8), 8, 12
    one = scheme_words(SCHEMES["1d"], shape, inner, {"t": 4}, {"t": 1})
    assert one == {"x": 0, "w": 0, "y": 2 * 192 * 3 // 4, "grad y": 0, "dx": 2 * 192 * 3 // 4, "dw": 0}
    data = scheme_words(SCHEMES["data"], shape, inner, {"data": 4}, {"data": 1})
    assert sum(data.values()) == data["dw"] == 2 * 2 * hidden * inner * 3 // 4
    cuts = scheme_words(SCHEMES["1d with sequence cuts"], (4, 8, 8), inner, {"t": 4}, {"t": 1})
    assert sum(cuts.values()) == 4 * 256 * 3 // 4


@every
def test_uneven_words_lack_exactly_what_is_gathered(scheme):
    """Uneven: a gather receives what the block at work holds beyond the block at rest, in each rank."""
    sizes = dict(zip(scheme.axes, (2, 3, 2), strict=False))
    shape, inner = (5, 7, 11), 13
    for coords in coordinates(scheme.axes, sizes):
        for plan, x, w in (
            (scheme.expand, shape, (11, inner)),
            (scheme.contract, (*shape[:2], inner), (inner, 11)),
        ):
            found = product_words(plan, x, w, sizes, coords)
            for column, dims, rest, work in (("x", x, plan.x, plan.x_work), ("w", w, plan.w, plan.w_work)):
                lacks = size(work.block_shape(dims, sizes, coords)) - size(rest.block_shape(dims, sizes, coords))
                assert found[column] == lacks
            back = plan.grad_w.words((x[2], *x[:2]), (*x[:2], w[1]), sizes, coords)
            assert found["dw"] + found["grad y"] + found["x"] == back
            assert found["dx"] + found["grad y"] + found["w"] == plan.grad_x.words(
                (*x[:2], w[1]), w[::-1], sizes, coords
            )
        assert sum(scheme_words(scheme, shape, inner, sizes, coords).values()) >= 0


def size(shape):
    total = 1
    for n in shape:
        total *= n
    return total


@every
@pytest.mark.parametrize("leading", [0, 1, 2, 3, 4])
@pytest.mark.parametrize(("outer", "inner"), [(1, 1), (1, 2), (2, 3)])
def test_adapted_plans_keep_their_moves(scheme, leading, outer, inner):
    other = scheme.leading(leading)
    assert scheme.for_dims(leading + 1) == other
    assert other.residual.ndim == leading + 1
    assert other.expand.y == other.contract.x
    wide = scheme.wide(outer, inner)
    assert wide.residual.ndim == 2 + outer
    assert wide.inner.ndim == 2 + inner
    both = scheme.plan("expand", leading=leading, k=outer, n=inner)
    assert both.x.dims[leading:] == (scheme.expand.x.dims[2], *((),) * (outer - 1))
    assert both.w.dims == (scheme.expand.w.dims[0], *((),) * (outer - 1), scheme.expand.w.dims[1], *((),) * (inner - 1))
    assert bias(both) == Layout(scheme.expand.y.dims[2], *((),) * (inner - 1))
    if leading:
        sizes = dict.fromkeys(scheme.axes, 2)
        for here, there in zip(
            communication_steps(scheme.expand, sizes).values(), communication_steps(both, sizes).values()
        ):
            assert [(s.op, s.axes) for s in here] == [(s.op, s.axes) for s in there]


def test_adapted_layouts():
    assert SCHEMES["3d"].leading(1).residual == Layout(("i", "j"), "l")
    assert SCHEMES["1d with sequence cuts"].leading(1).residual == Layout("t", None)
    assert SCHEMES["3d"].leading(3).residual == Layout(("i", "j"), None, None, "l")
    assert SCHEMES["2d"].tokens == Layout("r", None)
    assert SCHEMES["2d"].leading(1).tokens == Layout("r")
    mixed = SCHEMES["3d"].with_sequence("s").with_data("data")
    assert mixed.axes == ("data", "s", "i", "j", "l")
    assert mixed.residual == Layout(("data", "i", "j"), "s", "l")
    assert mixed.expand.w == SCHEMES["3d"].expand.w
    assert mixed.leading(1).residual == Layout(("data", "i", "s", "j"), "l")  # j goes last: it is gathered
    zero = SCHEMES["2d"].with_data("data").with_weights_cut("data")
    assert zero.expand.w == Layout(("r", "data"), "c")
    taken = communication_steps(zero.expand, dict.fromkeys(zero.axes, 2))
    assert [(s.op, s.axes) for s in taken["w"]] == [("all_gather", ("r", "data"))]
    assert [(s.op, s.axes) for s in taken["dw"]] == [("reduce_scatter", ("r", "data"))]


def test_adapting_what_cannot_be_says_so():
    scheme = SCHEMES["2d"]
    with pytest.raises(PlanError, match="adapt the scheme's own plan"):
        scheme.leading(1).leading(3)
    with pytest.raises(PlanError, match="'expand' and 'contract'"):
        scheme.plan("widen")
    with pytest.raises(PlanError, match="cannot be adapted"):
        scheme.plan("expand", k=0)
    with pytest.raises(PlanError, match="add 'data' first"):
        scheme.leading(1).with_data("data")
    plan = table(("r", None), n="c", k=None, x=Layout("r", None, "c"), w=Layout("r", "c"), y=Layout("r", None, None))
    with pytest.raises(PlanError, match="must agree"):
        Scheme("wrong", ("r", "c"), plan, plan)
    with pytest.raises(PlanError, match="has the axes"):
        Scheme("short", ("r",), scheme.expand, scheme.contract)


@pytest.mark.parametrize(
    ("name", "args", "sizes"),
    [
        ("serial", (1,), {}),
        ("1d", (3,), {"t": 3}),
        ("data", (3,), {"data": 3}),
        ("2d", (4,), {"r": 2, "c": 2}),
        ("2d", (6, (2, 3)), {"r": 2, "c": 3}),
        ("2.5d, depth on k", (8, None, 2), {"d": 2, "r": 2, "c": 2}),
        ("2.5d, depth on the batch", (4, None, 1), {"d": 1, "r": 2, "c": 2}),
        ("2.5d, depth on k", (6, (1, 2, 3)), {"d": 1, "r": 2, "c": 3}),
        ("3d", (8,), {"i": 2, "j": 2, "l": 2}),
        ("3d", (6, (1, 2, 3)), {"i": 1, "j": 2, "l": 3}),
        ("3d", (1,), {"i": 1, "j": 1, "l": 1}),
        ("3d", (10**6,), {"i": 100, "j": 100, "l": 100}),
    ],
)
def test_sizes(name, args, sizes):
    found = FILES[name].sizes(*args)
    assert found == sizes
    assert tuple(found) == SCHEMES[name].axes


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        ("2d", (6,), r"2d tensor parallelism over 6 ranks needs a shape: \(1, 6\), \(2, 3\), \(3, 2\) or \(6, 1\)"),
        ("2d", (6, (2, 2)), r"shape=\(2, 2\) does not fit .* 6 ranks.*\(2, 3\)"),
        ("2d", (4, (2, 2), 1), "depth=1 is for mode '2.5d'"),
        ("2d", (4, (4,)), r"axes are \(r, c\)"),
        ("2d", (4, (-2, -2)), r"it may be \(1, 4\)"),
        ("2.5d, depth on k", (8, None, 3), "does not divide the 8 ranks.*1, 2, 4 or 8"),
        ("2.5d, depth on k", (8, None, 1), r"depth=1 leaves no square: \(1, 1, 8\), \(1, 2, 4\)"),
        ("2.5d, depth on k", (8, (2, 2, 2), 4), "contradicts"),
        ("2.5d, depth on k", (8,), "needs a depth: 2 or 8"),
        ("3d", (6,), r"needs a shape: .*\(1, 2, 3\)"),
        ("1d", (4, (2, 2)), "one axis"),
        ("1d", (4, None, 2), "leave it out"),
        ("serial", (2,), "give a mode"),
    ],
)
def test_sizes_that_do_not_fit_say_what_would(name, args, says):
    with pytest.raises(ConfigError, match=says):
        FILES[name].sizes(*args)


def test_modes():
    assert modes() == ["1d", "2.5d", "2d", "3d", "sequence"]
    assert for_mode(None).SCHEME.name == "serial"
    assert for_mode("1d").SCHEME.name == "1d"
    assert for_mode("1d", sequence_parallel=True).SCHEME.name == "1d with sequence cuts"
    assert for_mode("2.5d").SCHEME.name == "2.5d, depth on the batch"
    assert for_mode("2.5d", depth_on="k", sequence_parallel=False).SCHEME.name == "2.5d, depth on k"
    with pytest.raises(ConfigError, match=r"None, 1d, 2\.5d, 2d, 3d or sequence"):
        for_mode("4d")
    with pytest.raises(ConfigError, match="'batch' or 'k'"):
        for_mode("2.5d", depth_on="n")
    with pytest.raises(ConfigError, match="leave it out"):
        for_mode("2d", sequence_parallel=True)
    text = modes_for(4)
    for substance in ("'1d'", "'2d'", "1 or 4", "(1, 2, 2)", "'sequence'"):
        assert substance in text


def test_axes_that_cut_the_sequence():
    """Those of Ulysses exchange their cuts for heads, all of them; one more may be a ring."""
    one = discover()["serial"].SCHEME.with_sequence("u", ulysses=True)
    two = one.with_sequence("v", ulysses=True)
    assert (one.ulysses, one.ring) == (("u",), ())
    assert (two.ulysses, two.ring) == (("v", "u"), ())
    assert two.with_sequence("s").ring == ("s",)
