"""Fourier transforms on any grid and layout: NumPy's answers, and exactly the words of the plan."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import parlinalg as pla
from parlinalg.errors import LayoutError
from parlinalg.fft import plan
from parlinalg.layout import Layout
from tests.agreement import agreed
from tests.cases import COMPLEX, INTEGERS, grids, layouts, numbers, same, terms

ONE = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
MANY = ("fftn", "ifftn", "rfftn", "irfftn")
NORMS = ("backward", "ortho", "forward")
DTYPES = [np.dtype(t) for t in (np.float16, np.float32, np.float64, np.bool_)] + COMPLEX + INTEGERS[:5]


def tolerance(dtype):
    return 1e-5 if np.dtype(dtype) in (np.float32, np.complex64) else 1e-12


def transformed(x, name, *args, **kwargs):
    """The result of `pla.fft`, which received the words that its plan says and left its input as it was."""
    before = x.block.copy()
    axes = {"axes": (kwargs["axis"],)} if "axis" in kwargs else {"axes": kwargs.get("axes")}
    if (s := (kwargs["n"],) if kwargs.get("n") else kwargs.get("s")) is not None:
        axes["s"] = s
    planned = pla.fft.plan_fft(name, x, *args, **axes, layout=kwargs.get("layout"))
    with pla.ledger(x.grid) as book:
        y = getattr(pla.fft, name)(x, *args, **kwargs)
    if x.grid.inside and not x.layout.partial and not y.layout.partial:
        assert book.words.total() == planned.words(x.grid.coords), planned.steps
    assert (before == x.block).all()
    return y


DRAWN = st.fixed_dictionaries(
    {
        "shape": st.lists(st.integers(1, 7), min_size=2, max_size=4) | st.tuples(st.integers(1, 60)),
        "seed": st.integers(0, 10**6),
        "name": st.sampled_from(ONE + MANY),
        "dtype": st.sampled_from(DTYPES),
        "norm": st.sampled_from(NORMS),
        "sizes": st.lists(st.integers(1, 12), min_size=4, max_size=4) | st.none(),
        "to": st.sampled_from(("input", "transposed", "another")),
        "buffer": st.sampled_from((7, 1 << 19)),
    }
)


@given(DRAWN)
@agreed
def test_any_transform_of_any_array(world, backend, tune, drawn):
    shape, seed, name = tuple(drawn["shape"]), drawn["seed"], drawn["name"]
    dtype, rng = drawn["dtype"], np.random.default_rng(seed)
    if (_real(name) and dtype.kind == "c") or (name.startswith("i") and dtype.kind == "b"):
        return
    axes = [int(d) for d in rng.permutation(len(shape))[: 1 if name in ONE else rng.integers(1, len(shape) + 1)]]
    s = None if drawn["sizes"] is None else drawn["sizes"][: len(axes)]
    if s is None and name in ("irfft", "hfft", "irfftn") and shape[axes[-1]] == 1:
        return
    kwargs = {"norm": drawn["norm"]}
    kwargs |= {"axis": axes[0], "n": None if s is None else s[0]} if name in ONE else {"axes": axes, "s": s}
    tune(must=False, MOVE_BUFFER=drawn["buffer"])
    array = numbers(shape, dtype, seed)
    wide = array.astype(np.float32) if dtype == np.float16 else array  # NumPy would round the norm to 16 bits
    expected = getattr(np.fft, name)(wide, **kwargs)
    with pla.Grid(grids(world.size)[seed % 3], world, backend, idle=True) as grid:
        every = layouts(grid.axes, len(shape), partial=dtype.kind != "b")
        x = terms(array, grid, every[rng.integers(len(every))], seed)
        other = every[rng.integers(len(every))]
        to = {"input": None, "another": other if other.partial == x.layout.partial else other.with_partial(())}
        layout = to.get(drawn["to"], "transposed")
        y = transformed(x, name, **kwargs, layout=layout)
        if isinstance(layout, Layout) or (layout is None and dtype.kind in "fc"):
            assert y.layout == (layout or x.layout)
        same(y, expected, 30 * tolerance(expected.dtype) if x.layout.partial else tolerance(expected.dtype))


def _real(name):
    return name in ("rfft", "ihfft", "rfftn")


def signal(name, shape, dtype, seed=0):
    """Random numbers of float dtype, or of the complex dtype of that precision where the transform takes it."""
    rng = np.random.default_rng(seed)
    real = rng.standard_normal(shape).astype(dtype)
    return real if _real(name) else real + np.complex64(1j) * rng.standard_normal(shape).astype(dtype)


@pytest.fixture
def stays_cut(monkeypatch):
    """Plans whose cut lines stay cut."""
    monkeypatch.setattr(plan, "_freed", lambda *_: ())
    plan._search.cache_clear()
    yield
    plan._search.cache_clear()


@pytest.mark.parametrize("name", ONE)
def test_a_line_stays_cut(make_grid, world, stays_cut, name):
    """A line of n₁ n₂ points is transformed without being gathered, cut off, or continued by zeros."""
    grid = make_grid(grids(world.size)[1])
    for size, n in ((96, None), (96, 60), (60, 96), (98, None), (97, 15), (9, None), (1, 4), (100, 4)):
        for dtype in (np.float64, np.float32):
            array = signal(name, size, dtype)
            x = pla.distribute(array, grid, Layout(grid.axes))
            expected = getattr(np.fft, name)(array, n)
            same(transformed(x, name, n=n), expected, tolerance(expected.dtype))


@pytest.mark.parametrize("name", [*ONE, *MANY])
def test_lines_stay_cut_beside_others(make_grid, world, stays_cut, tune, name):
    tune(ranks=2, MOVE_BUFFER=50)
    grid = make_grid(grids(world.size)[2])
    for t, shape in enumerate(((6, 4, 10), (4, 9, 8), (9, 6, 12))):
        array = signal(name, shape, np.float64)
        for layout in layouts(grid.axes, 3)[7 * t :: 40]:
            x = terms(array, grid, layout)
            for axis in range(3):
                axes = {"axis": axis} if name in ONE else {"axes": (axis, (axis + 1) % 3)}
                same(transformed(x, name, **axes), getattr(np.fft, name)(array, **axes), 1e-10)


@pytest.mark.ranks(1, 2, 4, 6, 8)
def test_words_of_a_cube(make_grid, world):
    """Two transposes, of n³/p (1 - 1/p) words each; the last is saved where the result may stay as it lies."""
    for which in (0, 1):
        grid = make_grid(grids(world.size)[which])
        p, n, axes = grid.size, 2 * grid.size, grid.axes
        words = n**3 // p * (p - 1) // p
        half = (n // 2 + 1) * n * (n // p) * (p - 1) // p
        first, rest = axes[0], axes[1:]
        for layout in (
            Layout(axes, None, None), Layout(None, axes, None), Layout(None, None, axes), Layout(None, first, rest),
        ):  # fmt: skip
            x = pla.distribute(signal("fftn", (n,) * 3, np.float64), grid, layout)
            for name, array, there, back in (("fftn", x, words, words), ("ifftn", x, words, words),
                                             ("rfftn", x.real, half, half)):  # fmt: skip
                if name == "rfftn" and layout.dims[2]:
                    continue  # its first transpose moves the real numbers
                for to, expected in ((None, there + back), ("transposed", there)):
                    with pla.ledger(grid) as book:
                        y = getattr(pla.fft, name)(array, layout=to)
                    assert book.words.total() == expected, (name, layout, to)
                    assert y.layout == layout or to
            y = pla.fft.fftn(x, layout="transposed")
            z = pla.fft.ifftn(y, layout="transposed")
            same(z, x.gather(), 1e-12)
            assert grid.effective(z.layout).cut_axes == grid.effective(layout).cut_axes or len(axes) > 1


@pytest.mark.mpi(min_size=2)
def test_only_what_enters_moves(make_grid, world):
    """Of a dim that is cut off, what goes beyond stays where it is; zeros behind a dim's end are not sent."""
    p = world.size
    grid = make_grid({"a": p})
    rows, columns = 4 * p, 3 * p
    array = signal("fft", (rows, columns), np.float64)
    x = pla.distribute(array, grid, Layout("a", None))
    with pla.ledger(grid) as book:
        y = pla.fft.fft(x, rows // 2, 0, layout="transposed")
    own = max(0, min(rows // 2, 4 * (grid.rank + 1)) - 4 * grid.rank)  # of the rows that enter
    assert book.words.total() == 3 * (rows // 2 - own)
    same(y, np.fft.fft(array, rows // 2, 0), 1e-12)
    with pla.ledger(grid) as book:
        y = pla.fft.fft(x, 5 * rows, 0, layout="transposed")
    assert book.words.total() == 3 * (rows - 4)
    same(y, np.fft.fft(array, 5 * rows, 0), 1e-12)


def test_shifts(make_grid, world):
    grid = make_grid(grids(world.size)[-1])
    for t, (shape, axes) in enumerate((
        ((7, 4), None), ((5, 6), 0), ((6, 5), -1), ((3, 4, 5), (2, 0)), ((1, 9), None), ((11,), None), ((0, 3), None),
    )):  # fmt: skip
        array = numbers(shape, np.int64, seed=t)
        for layout in layouts(grid.axes, len(shape))[t::5]:
            x = terms(array, grid, layout)
            before = x.block.copy()
            for name in ("fftshift", "ifftshift"):
                y = getattr(pla.fft, name)(x, axes=axes)
                assert y.layout == layout
                same(y, getattr(np.fft, name)(array, axes))
                if grid.inside and y.block.size:
                    y.block[...] = 7
                    assert (before == x.block).all()
    even = pla.distribute(np.arange(4 * grid.size), grid, Layout(grid.axes))
    with pla.ledger(grid) as book:
        pla.fft.fftshift(even)
    assert book.words.total() == (4 * (grid.size > 1) if grid.size % 2 == 0 else book.words.total() and 4)


def test_frequencies(make_grid, world):
    grid = make_grid(grids(world.size)[1])
    for n in (1, 2, 7, 12):
        for name in ("fftfreq", "rfftfreq"):
            function, expected = getattr(pla.fft, name), getattr(np.fft, name)(n, 0.3)
            same(function(n, d=0.3, grid=grid), expected, 1e-15)
            x = function(n, 0.3, grid=grid, layout=Layout(None), dtype=np.float32)
            same(x, expected.astype(np.float32), 1e-6)
            assert x.layout == Layout(None)
    with pytest.raises(ValueError, match="fftfreq: a transform has at least 1 point, not 0"):
        pla.fft.fftfreq(0, grid=grid)
    with pytest.raises(TypeError, match="of a float dtype, not int64"):
        pla.fft.rfftfreq(4, grid=grid, dtype=np.int64)
    with pytest.raises(ValueError, match="not on 'moon'"):
        pla.fft.rfftfreq(4, grid=grid, device="moon")


@pytest.mark.parametrize("name", [*ONE, *MANY, "fft2", "ifft2", "rfft2", "irfft2", "fftshift", "ifftshift"])
def test_functions_of_numpy(make_grid, world, name):
    grid = make_grid(grids(world.size)[1])
    array = signal("rfft", (4, 6, 5), np.float64)
    x = pla.distribute(array, grid, Layout(None, grid.axes, None))
    function = getattr(np.fft, name)
    same(function(x), function(array), 1e-12)
    same(getattr(pla.fft, name)(x), function(array), 1e-12)
    if name.endswith("shift"):
        return
    with pytest.raises(TypeError, match=rf"np\.fft\.{name}\(out=\) is not defined on distributed arrays"):
        function(x, out=x)
    if name in ONE:
        same(function(x, 8, 1, "ortho"), function(array, 8, 1, "ortho"), 1e-12)
    else:
        same(function(a=x, s=(4, -1), axes=(1, 0)), function(array, (4, -1), (1, 0)), 1e-12)


@pytest.mark.mpi(min_size=2)
def test_ranks_outside_the_grid(world, backend):
    """They make every call, and hold empty blocks of the result's dtype."""
    with pla.Grid({"a": world.size - 1}, world, backend, idle=True) as grid:
        array = signal("rfftn", (5, 6), np.float32)
        x = pla.distribute(array, grid, Layout("a", None))
        for name in (*MANY, "fftshift"):
            for options in ({}, {"layout": "transposed"}) if name in MANY else ({},):
                y, expected = getattr(pla.fft, name)(x, **options), getattr(np.fft, name)(array)
                assert y.dtype == expected.dtype
                assert grid.inside or y.block.shape == (0, 0)
                same(y, expected, 1e-5)


def test_unusual_arrays(make_grid, world):
    grid = make_grid(grids(world.size)[1])
    layout = Layout(grid.axes, None)
    array = numbers((5, 6), np.float32)
    half = pla.distribute(array.astype(ml_dtypes.bfloat16), grid, layout)
    same(pla.fft.fft2(half), np.fft.fft2(array), 1e-5)
    same(pla.fft.irfft2(half), np.fft.irfft2(array), 1e-5)
    for shape in ((0, 4), (4, 0, 3)):
        empty = pla.zeros(shape, grid, Layout(grid.axes, *(None,) * (len(shape) - 1)))
        same(pla.fft.fft(empty), np.fft.fft(np.zeros(shape)))
        same(pla.fft.rfft(empty, 3, 0), np.fft.rfft(np.zeros(shape), 3, 0))
    turned = pla.distribute(np.arange(24.0).reshape(4, 6), grid, layout).T
    same(transformed(turned, "fft", axis=1), np.fft.fft(np.arange(24.0).reshape(4, 6).T), 1e-12)


def test_errors(make_grid, world):
    grid = make_grid({"a": world.size})
    x = pla.zeros((4, 5), grid, Layout("a", None))
    for call, kind, message in (
        (lambda: pla.fft.fft(x, axis=2), ValueError, "fft: axis 2 is out of bounds for array of dimension 2"),
        (lambda: pla.fft.fft(x, axis=-3), IndexError, "axis -3 is out of bounds"),
        (lambda: pla.fft.fftn(x, axes=(0, 5)), ValueError, "fftn: axis 5 is out of bounds"),
        (lambda: pla.fft.fftshift(x, axes=2), ValueError, "fftshift: axis 2 is out of bounds"),
        (lambda: pla.fft.fft(pla.zeros((), grid, Layout())), ValueError, "axis -1 is out of bounds"),
        (lambda: pla.fft.fftn(x, axes=(0, -2)), ValueError, r"fftn: axes \(0, -2\) name a dim twice"),
        (lambda: pla.fft.ifftshift(x, axes=(1, 1)), ValueError, r"axes \(1, 1\) name a dim twice"),
        (lambda: pla.fft.fftn(x, axes=()), ValueError, "fftn: there is no axis to transform"),
        (lambda: pla.fft.fftn(x, s=(3,), axes=(0, 1)), ValueError, r"s gives 1 sizes \(3,\) for 2 axes \(0, 1\)"),
        (lambda: pla.fft.fft(x, 0), ValueError, r"fft: 0 points along dim 1 of an array of shape \(4, 5\)"),
        (lambda: pla.fft.fft(x, -1), ValueError, "-1 points along dim 1"),
        (lambda: pla.fft.irfft(x[:, :1]), ValueError, "irfft: 0 points along dim 1"),
        (lambda: pla.fft.fft(pla.zeros((0,), grid, Layout("a"))), ValueError, "0 points along dim 0"),
        (lambda: pla.fft.fft(x, 2.5), TypeError, "'float' object cannot be interpreted as an integer"),
        (lambda: pla.fft.ifft(x, norm="both"), ValueError, """norm is "backward", "ortho" or "forward", not 'both'"""),
        (lambda: pla.fft.rfft(x * 1j), TypeError, "rfft takes real numbers, and this array is of dtype complex128"),
        (lambda: pla.fft.fft(np.ones(4)), TypeError, "fft takes a DistArray, not ndarray; distribute it first"),
        (lambda: pla.fft.fftshift(np.ones(4)), TypeError, "fftshift takes a DistArray, not ndarray"),
        (lambda: pla.fft.fft(x, layout="left"), LayoutError, """"transposed" or None, not 'left'"""),
        (lambda: pla.fft.fft(x, layout=Layout("a")), LayoutError, "describes 1 dims"),
    ):  # fmt: skip
        with pytest.raises(kind, match=message):
            call()


@pytest.mark.serial
def test_scipy_is_named_where_it_is_missing(monkeypatch):
    with pla.Grid({"a": 1}, backend="numpy") as grid:
        x = pla.zeros((4,), grid, Layout("a"))
        monkeypatch.setitem(sys.modules, "scipy.fft", None)
        monkeypatch.setitem(sys.modules, "scipy", None)
        with pytest.raises(ImportError, match="need SciPy: pip install scipy"):
            pla.fft.fft(x)
