"""BLAS threads: the cores in the affinity mask over the ranks that share them, never above the user's limit."""

from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
import sys
import threading
from functools import partial
from time import sleep

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.backend import blas

pytestmark = pytest.mark.serial


@pytest.fixture(autouse=True)
def twelve_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "cores", lambda: set(range(12)))
    for name in blas.LIMITS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("ranks", "threads"), [(1, 12), (2, 6), (5, 2), (12, 1), (30, 1)])
def test_ranks_share_the_cores(ranks: int, threads: int) -> None:
    assert blas.set_blas_threads(ranks) == threads


@pytest.mark.parametrize(("value", "threads"), [("4", 4), ("4,2", 4), ("100", 6), ("", 6), ("many", 6), ("0", 6)])
def test_the_users_limit_holds(monkeypatch: pytest.MonkeyPatch, value: str, threads: int) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert blas.set_blas_threads(2) == threads


@pytest.mark.parametrize("without", [False, True], ids=["threadpoolctl", "ctypes"])
def test_the_library_obeys(monkeypatch: pytest.MonkeyPatch, without: bool) -> None:
    import threadpoolctl

    np.ones((4, 4)) @ np.ones((4, 4))
    controller = threadpoolctl.ThreadpoolController().select(user_api="blas")
    before = [library.num_threads for library in controller.lib_controllers]
    if without:
        monkeypatch.setitem(sys.modules, "threadpoolctl", None)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    try:
        assert blas.set_blas_threads(1) == 2
        path = next(lib for lib in controller.lib_controllers if "numpy" in lib.filepath)
        assert path.num_threads == 2
    finally:
        for library, threads in zip(controller.lib_controllers, before, strict=True):
            library.set_num_threads(threads)


SCIPY_LATER = """
import sys
import threadpoolctl
from parlinalg.backend import blas

without, sys.modules["threadpoolctl"] = {without}, None if {without} else threadpoolctl
blas.cores = lambda: set(range(4))
assert "scipy" not in sys.modules
blas.set_blas_threads(4)  # to one thread: two may be all that the machine has, which a library takes in any case
blas.scipy_linalg()
found = [library["num_threads"] for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"]
assert set(found) == {{1}}, found
blas.set_blas_threads(2)
found = [library["num_threads"] for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"]
assert set(found) == {{2}}, found
"""


@pytest.mark.parametrize("without", [False, True], ids=["threadpoolctl", "ctypes"])
def test_a_library_that_scipy_loads_later_obeys(without: bool) -> None:
    if without and any(blas._in_openblas(name) is None for name in ("scipy_openblas_get_num_threads64_",)):
        pytest.skip("cannot be had here: a NumPy with an OpenBLAS of its own")
    environment = {name: value for name, value in os.environ.items() if name not in blas.LIMITS}
    program = SCIPY_LATER.format(without=without)
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)


CHANGED = """
import sys
import threadpoolctl
from parlinalg.backend import blas

def found():
    return [library["num_threads"] for library in threadpoolctl.threadpool_info() if library["user_api"] == "blas"]

blas.cores = lambda: set(range(4))
blas.set_blas_threads(4)
{early}
if {chosen}:
    threadpoolctl.threadpool_limits(2, user_api="blas")
if {without}:
    sys.modules["threadpoolctl"] = None
blas.scipy_linalg()
assert set(found()) == {{2 if {chosen} else 1}}, found()
"""


@pytest.mark.parametrize("chosen", [True, False], ids=["chosen", "given"])
@pytest.mark.parametrize("early", ["", "import scipy.linalg"], ids=["later", "earlier"])
@pytest.mark.parametrize("without", [False, True], ids=["threadpoolctl", "ctypes"])
def test_the_threads_that_a_program_chose_stay(without: bool, early: str, chosen: bool) -> None:
    """SciPy's library takes those of NumPy's, also where it was loaded before."""
    if blas._in_openblas("scipy_openblas_get_num_threads64_") is None:
        pytest.skip("cannot be had here: a NumPy with an OpenBLAS of its own")
    environment = {name: value for name, value in os.environ.items() if name not in blas.LIMITS}
    program = CHANGED.format(without=without, early=early, chosen=chosen)
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that BLAS is given, of a process with three."""
    given: list[int] = []
    monkeypatch.setattr(blas, "blas_threads", lambda: given[-1] if given else 3)
    monkeypatch.setattr(blas, "_set_openblas", lambda threads, packages: given.append(threads))
    return given


def test_workers_compute_side_by_side(three_threads: list[int]) -> None:
    """With the caller's handling of errors of NumPy, and each with a BLAS of one thread."""
    barrier = threading.Barrier(3, timeout=30)

    def task(i: int) -> tuple[int, str]:
        if i < 3:
            barrier.wait()  # nobody passes it alone
        return i, np.geterr()["over"]

    with np.errstate(over="raise"), blas.workers(5) as workers:
        assert workers.count == 3
        assert blas.blas_threads() == 1
        for _ in range(3):
            assert workers.run(partial(task, i) for i in range(7)) == [(i, "raise") for i in range(7)]
        assert workers.run([]) == []
        with blas.workers(5) as within:
            assert within.count == 1
    assert three_threads == [1, 3]


@pytest.mark.parametrize("most", [-1, 0, 1, 2])
def test_one_worker_has_the_whole_blas(three_threads: list[int], most: int) -> None:
    before = threading.active_count()
    with blas.workers(most) as workers:
        assert workers.count == 1
        assert workers.run([partial(divmod, 7, 2), threading.active_count]) == [(3, 1), before]
    assert three_threads == []


@pytest.mark.parametrize("wrong", [0, 1, 5])
def test_what_a_worker_raises_is_raised_when_all_have_ended(three_threads: list[int], wrong: int) -> None:
    ended = []

    def task(i: int) -> None:
        if i == wrong:
            raise np.linalg.LinAlgError(f"task {i}")
        sleep(0.05)
        ended.append(i)

    with pytest.raises(np.linalg.LinAlgError, match=f"^task {wrong}$"), blas.workers(3) as workers:
        workers.run(partial(task, i) for i in range(6))
    assert sorted(ended) == [i for i in range(6) if i != wrong]
    assert three_threads == [1, 3]


def test_only_ranks_on_the_same_cores_share_them() -> None:
    bound = [["a", "3"], ["a", "c"], ["b", "3"], ["b", "f"]]
    assert [blas.sharing(bound, rank) for rank in range(4)] == [1, 1, 2, 2]
    assert blas.sharing([blas.host_and_cores()], 0) == 1


def matrices(dtype):
    """y, x and w as they may lie: whole, as parts of wider ones, turned, with steps; and empty."""
    rng = np.random.default_rng(5)

    def drawn(*shape):
        return rng.integers(-9, 9, shape).astype(dtype)

    for m, n, k in ((7, 5, 3), (1, 6, 4), (6, 1, 1), (2, 2, 1), (1, 1, 1), (64, 70, 130)):
        y, x, w = drawn(m, n), drawn(m, k), drawn(k, n)
        yield y, x, w
        yield drawn(m, n + 3)[:, 2 : 2 + n], drawn(m, 2 * k)[:, k:], drawn(k, n + 1)[:, :n]
        yield y, drawn(k, m).T, drawn(n, k).T
        yield y, drawn(k, m + 2)[:, 1 : 1 + m].T, drawn(n, k + 1)[:, :k].T
        yield drawn(n, m).T, x, w
        yield y, drawn(m, 2 * k)[:, ::2], drawn(2 * k, n)[::2]
        yield y, x[::-1], w[:, ::-1]
        yield drawn(2, m, n), drawn(2, m, k), drawn(2, k, n)
    yield drawn(0, 4), drawn(0, 3), drawn(3, 4)
    yield drawn(4, 3), drawn(4, 0), drawn(0, 3)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.complex128, ">f8"])
def test_a_product_is_added(dtype):
    for y, x, w in matrices(dtype):
        around = y if y.base is None else y.base.copy()
        want = y + x @ w
        blas.add_product(y, x, w)
        np.testing.assert_array_equal(y, want)
        if y.ndim == 2 and around.shape == (y.shape[0], y.shape[1] + 3):  # what is beside it stays
            np.testing.assert_array_equal(y.base[:, :2], around[:, :2])


@pytest.fixture(params=["numpy", "scipy"])
def library(request, monkeypatch):
    """The library whose BLAS is called: that in NumPy's wheel, or SciPy's, where NumPy is none."""
    if request.param == "scipy":
        monkeypatch.setattr(blas, "_in_openblas", lambda *names: None)
    elif blas.blas_threads() is None:
        pytest.skip("cannot be had here: a NumPy with an OpenBLAS of its own")


@pytest.mark.usefixtures("library")
def test_a_product_of_two_host_matrices_is_added_by_the_blas():
    done = [blas.added(y, x, w) for y, x, w in matrices(np.float64) if y.ndim == 2 and y.size and x.size]
    assert sum(done) > 0.6 * len(done)


def whole_numbers(rng, dtype, *shape):
    real, imaginary = rng.integers(-9, 9, (2, *shape))
    return (real + 1j * imaginary if np.dtype(dtype).kind == "c" else real).astype(dtype)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
def test_a_square_is_added_to_the_lower_triangle(dtype):
    whole = partial(whole_numbers, np.random.default_rng(7), dtype)

    for n, k in itertools.product((1, 2, 7, 64), (1, 3, 40)):
        around, x = whole(n + 2, n + 3), whole(n, k + 2)[:, 1 : k + 1]
        at = np.arange(n)
        around[at + 1, at + 2] = around[at + 1, at + 2].real  # as on the diagonal of a Hermitian matrix
        want = around.copy()
        want[1:-1, 2:-1] -= np.tril(x @ x.conj().T)
        assert blas.added_square(around[1:-1, 2:-1], x, -1)
        np.testing.assert_array_equal(around, want)
        assert n == 1 or not blas.added_square(around[1:-1, 2:-1].T, x)  # BLAS takes rows
        np.testing.assert_array_equal(around, want)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
def test_products_with_an_upper_triangle(dtype):
    whole = partial(whole_numbers, np.random.default_rng(8), dtype)

    for n, k, adjoint, order in itertools.product((1, 2, 7, 64), (1, 3, 40), (False, True), "CF"):
        t, around = np.array(whole(n, n), order=order), whole(n + 2, k + 3)
        want, upper = around.copy(), np.triu(t)  # what is below t's diagonal is not read
        want[1:-1, 2:-1] = (upper.conj().T if adjoint else upper) @ around[1:-1, 2:-1]
        if blas.multiplied(t, around[1:-1, 2:-1], adjoint=adjoint):
            np.testing.assert_array_equal(around, want)
        else:  # the conjugate of what lies there turned
            assert (adjoint, order, np.dtype(dtype).kind) == (True, "F", "c")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
def test_triangles_are_solved_in_place(dtype, threads, monkeypatch):
    monkeypatch.setattr(blas, "blas_threads", lambda: threads)  # one calls SciPy's in any case
    whole, flags = partial(whole_numbers, np.random.default_rng(9), dtype), (False, True)
    for n, k, right, lower, adjoint, unit, order in itertools.product((1, 2, 7, 64), (1, 3, 40), *[flags] * 4, "CF"):
        used = (np.tril if lower else np.triu)(whole(n, n), -1 if lower else 1) / dtype(16 * n)
        t = np.where(np.tri(n, k=-1, dtype=bool) == lower, used, np.nan)  # the other triangle is not read
        used[np.arange(n), np.arange(n)] = t[np.arange(n), np.arange(n)] = 1
        if not unit:
            used[np.arange(n), np.arange(n)] = t[np.arange(n), np.arange(n)] = whole(n) + 20
        t, operation = np.array(t, dtype, order=order), used.conj().T if adjoint else used
        x, around = whole(*((k, n) if right else (n, k))), whole(*((k + 2, n + 3) if right else (n + 2, k + 3)))
        want = around.copy()
        want[1:-1, 2:-1] = x
        around[1:-1, 2:-1] = x @ operation if right else operation @ x
        if blas.substituted(t, around[1:-1, 2:-1], right=right, lower=lower, adjoint=adjoint, unit=unit):
            np.testing.assert_allclose(around, want, rtol=0, atol=500 * np.finfo(dtype).eps)
            around[1:-1, 2:-1] = want[1:-1, 2:-1]
            np.testing.assert_array_equal(around, want)  # what is around it stays
        else:  # the conjugate of what lies there turned
            assert (adjoint, order, np.dtype(dtype).kind) == (True, "F", "c")


@pytest.mark.parametrize("letter", [b"int", b"int64_t"])
def test_integers_are_those_that_scipy_declares(letter, monkeypatch):
    monkeypatch.setattr(blas, "_declaration", lambda capsule: b"void (%s *, %s *)" % (letter, letter))
    assert blas.scipy_integer.__wrapped__().itemsize == (4 if letter == b"int" else 8)


def with_64_bits(module, name, arguments):
    """A function of SciPy's as where it was built with integers of 64 bits: it reads and writes all of them."""
    function, declared = wheels(module, name, arguments), blas._declaration(capsules(module)[name]).decode()
    at = [i for i, kind in enumerate(declared.partition("(")[2].split(",")) if kind.strip(" )") == "int *"]

    def run(*given):
        given = [ctypes.addressof(each._obj) if hasattr(each, "_obj") else each for each in given]
        wide = {i: ctypes.c_int64.from_address(given[i]) for i in at}
        narrow = {i: (ctypes.c_int * 4096)(n.value if abs(n.value) < 1 << 20 else -1) for i, n in wide.items()}
        function(*(narrow.get(i, each) for i, each in enumerate(given)))
        for i, n in wide.items():
            n.value = narrow[i][0]

    return run


def capsules(module):
    return getattr(blas.scipy_linalg(), module).__pyx_capi__


wheels = blas.of_scipy


@pytest.fixture
def integers_of_64_bits(monkeypatch):
    if blas.scipy_integer().itemsize == 8:
        pytest.skip("SciPy's are")
    monkeypatch.setattr(blas, "_in_openblas", lambda *names: None)
    monkeypatch.setattr(blas, "of_scipy", with_64_bits)
    monkeypatch.setattr(blas, "scipy_integer", lambda: np.dtype(np.int64))
    blas._of_scipy.cache_clear()
    yield
    blas._of_scipy.cache_clear()


@pytest.mark.usefixtures("integers_of_64_bits")
def test_where_scipy_was_built_with_integers_of_64_bits():
    """From SciPy 1.18 on its BLAS and LAPACK for Cython may have them; 32 bits and what lay beside them were read."""
    whole = partial(whole_numbers, np.random.default_rng(10), np.float64)
    y, x, w = whole(5, 4), whole(5, 3), whole(3, 4)
    want = y + x @ w
    assert blas.added(y, x, w)
    np.testing.assert_array_equal(y, want)
    n = 70  # more than a leaf of divide and conquer
    a = np.random.default_rng(11).standard_normal((n, n))
    with pla.Grid({"r": 1}) as grid:
        a_ = pla.distribute(a, grid, pla.Layout("r", None))
        t = pla.distribute(np.triu(a) + 9 * np.eye(n), grid, pla.Layout("r", None))
        np.testing.assert_allclose(pla.linalg.svdvals(a_).gather(), np.linalg.svd(a, compute_uv=False), atol=1e-10)
        w_, v = pla.linalg.eigh(a_ + a_.T)
        np.testing.assert_allclose(w_.gather(), np.linalg.eigvalsh(a + a.T), atol=1e-10)
        np.testing.assert_allclose((a + a.T) @ v.gather(), v.gather() * w_.gather(), atol=1e-10)
        values, vectors = pla.linalg.eig(a_)
        np.testing.assert_allclose(a @ vectors.gather(), vectors.gather() * values.gather(), atol=1e-10)
        found = pla.linalg.solve_triangular(t, a_).gather()
        np.testing.assert_allclose(t.gather() @ found, a, atol=1e-10)


def test_sizes_beyond_integers_of_32_bits_are_not_given_to_those(monkeypatch):
    monkeypatch.setattr(blas, "blas_threads", lambda: 1)
    found, least = blas._cblas("trsm", np.dtype(float), blas.LARGEST + 1, 1), blas._in_openblas("scipy_cblas_dtrsm64_")
    assert found is least
    monkeypatch.setattr(blas, "_in_openblas", lambda *names: None)
    assert blas._cblas("gemm", np.dtype(float), 3, blas.LARGEST + 1) is None
    assert blas._cblas("gemm", np.dtype(float), 3, blas.LARGEST) is not None


def test_a_read_only_sum_is_refused():
    y = np.ones((3, 3))
    y.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        blas.add_product(y, np.ones((3, 3)), np.ones((3, 3)))


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
@pytest.mark.parametrize("loops", [False, True], ids=["blas", "loop"])
def test_a_matrix_is_read_once_for_products_from_both_sides(dtype, loops, tune, monkeypatch):
    tune(COMPILED_SIZE=1 if loops else 1 << 60)
    monkeypatch.setattr(blas, "blas_threads", lambda: 1)
    monkeypatch.setattr(blas, "CACHE", 40 * np.dtype(dtype).itemsize)
    rng = np.random.default_rng(5)

    def whole(*shape):
        real, imaginary = rng.integers(-9, 9, (2, *shape))
        return (real + 1j * imaginary if np.dtype(dtype).kind == "c" else real).astype(dtype)

    for m, n in itertools.product((0, 1, 3, 4, 7, 8, 13), (0, 1, 5, 8, 21)):
        a, top, left = whole(m + 3, n + 2), 3 if m % 2 else 0, 2 if n % 2 else 0
        rest = a[top:, left:]
        z, x = whole(rest.shape[0]), whole(rest.shape[1])
        below, right = whole(*z.shape), whole(*x.shape)
        want = below + rest @ x, right + rest.conj().T @ z
        blas.add_from_both_sides(below, right, a, (top, left), x, z)
        np.testing.assert_array_equal(below, want[0])
        np.testing.assert_array_equal(right, want[1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex64, np.complex128])
@pytest.mark.parametrize("loops", [False, True], ids=["blas", "loop"])
def test_of_a_hermitian_matrix_the_lower_triangle_is_read(dtype, loops, tune, monkeypatch):
    if not blas.has_hermitian(np.dtype(dtype)):
        pytest.skip("cannot be had here: a NumPy with an OpenBLAS of its own")
    tune(COMPILED_SIZE=1 if loops else 1 << 60)
    monkeypatch.setattr(blas, "blas_threads", lambda: 1)
    rng = np.random.default_rng(6)
    for n, top in itertools.product((1, 2, 3, 4, 5, 8, 9, 14), (0, 1)):
        a = rng.integers(-9, 9, (n, n)).astype(dtype)
        if np.dtype(dtype).kind == "c":
            a += 1j * np.tril(rng.integers(-9, 9, (n, n)), -1).astype(dtype)
        lower, rest = np.tril(a), np.tril(a)[top:, top:]
        x, y = (rng.integers(-9, 9, n - top).astype(dtype) for _ in range(2))
        want = y + (rest + np.tril(rest, -1).conj().T) @ x
        blas.add_hermitian(y, lower + np.triu(np.full((n, n), 5, dtype), 1), top, x)
        np.testing.assert_array_equal(y, want)
