"""Derivatives of factorizations on every grid; where eigenvalues are equal; and that nothing is factored twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Grid, Layout, Tensor, linalg
from parlinalg.linalg import kernels, ranks, singular, spectral, systems
from parlinalg.linalg.factors import cholesky as cholesky_factors
from parlinalg.linalg.factors import lu as lu_factors
from parlinalg.linalg.factors import qr as qr_factors
from tests.autograd.cases import close, cut, numbers, tensor, value_and_gradients
from tests.autograd.decompositions import EXAMPLES, hermitian, polar, positive, projection, spaced, whole
from tests.autograd.test_functions import LAYOUTS, Case

pytestmark = pytest.mark.one_in(8)


@pytest.mark.parametrize("name", EXAMPLES)
def test_gradients(name: str, grid: Grid, serial: Grid, request: pytest.FixtureRequest) -> None:
    """Each example in one layout: as finite differences, and on several ranks some of them as on one."""
    seed, some = request.config.getoption("--seed"), 1 if grid.size == 1 else 3
    for i, example in enumerate(EXAMPLES[name]):
        if (i + seed) % some:
            continue
        layouts = [LAYOUTS[a.ndim][i % len(LAYOUTS[a.ndim])] for a in example.arrays]

        def function(*x: Tensor) -> Tensor:
            return example.function(linalg, *x)

        found = value_and_gradients(function, example.arrays, layouts, grid)
        if grid.size > 1:
            known = value_and_gradients(function, example.arrays, layouts, serial)
            for mine, right in zip(found, known, strict=True):
                close(mine, right, 1e-11)
        else:
            pla.check_gradients(
                function, [tensor(a, grid, l) for a, l in zip(example.arrays, layouts)], tol=1e-6, directions=2
            )


def backward_of(function: Callable[..., Tensor], inputs: list[Tensor], values: Callable[..., np.ndarray]) -> None:
    """Run the backward pass from the gradient that `values` makes for a shape and a dtype."""
    y = function(*inputs)
    y.backward(cut(values(y.shape, y.dtype), y.grid, y.layout.with_partial(())))


@pytest.mark.parametrize("name", EXAMPLES)
def test_gradients_that_are_not_finite(name: str, grid: Grid, request: pytest.FixtureRequest) -> None:
    """They make NaNs, as PyTorch's do, and no errors; on several ranks some of the examples."""
    seed, some = request.config.getoption("--seed"), 1 if grid.size == 1 else 3
    for i, example in enumerate(EXAMPLES[name]):
        if (i + seed) % some:
            continue
        inputs = [tensor(a, grid, LAYOUTS[a.ndim][i % len(LAYOUTS[a.ndim])]) for a in example.arrays]
        value = (np.nan, np.inf)[i % 2]
        with np.errstate(all="ignore"):
            backward_of(
                lambda *x: example.function(linalg, *x), inputs, lambda shape, dtype: np.full(shape, value, dtype)
            )
        for x in inputs:
            assert x.grad is not None
            assert not np.isfinite(x.grad.gather()).all()


STACKS: dict[str, Callable[[Tensor], Tensor]] = {
    "solve": lambda x: linalg.solve(x, x @ x),
    "solve_triangular": lambda x: linalg.solve_triangular(x, x @ x),
    "cholesky": lambda x: linalg.cholesky(positive(x)),
    "lu": lambda x: linalg.lu(x)[2],
    "qr": lambda x: linalg.qr(x).R,
    "lstsq": lambda x: linalg.lstsq(x, x @ x)[0],
    "eigvals": lambda x: abs(linalg.eigvals(x)),
    "expm": linalg.expm,
    "sqrtm": lambda x: linalg.sqrtm(linalg.matrix_power(x, 2)),
}


@pytest.mark.parametrize("count", [2, 9])
@pytest.mark.parametrize("name", STACKS)
def test_gradients_that_are_not_finite_of_one_matrix_of_a_stack(name: str, count: int, grid: Grid) -> None:
    """Those of the others are what they are without it."""

    def values(first: float) -> Callable[..., np.ndarray]:
        def made(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
            g = numbers(*shape, seed=4).astype(dtype)
            g[0] *= first
            return g

        return made

    a = spaced(count, 3, 3) + 4 * np.eye(3)
    found = []
    for first in (1.0, np.nan):
        x = tensor(a, grid, LAYOUTS[3][0])
        backward_of(STACKS[name], [x], values(first))
        assert x.grad is not None
        found.append(x.grad.gather())
    assert np.isnan(found[1][0]).any()
    close(found[1][1:], found[0][1:])


@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_single_precision(dtype: Any, widest: Grid) -> None:
    for name in ("qr", "eigh", "svd", "lu", "lstsq"):
        example = EXAMPLES[name][0]
        arrays = [a.astype(dtype) for a in example.arrays]
        found = value_and_gradients(
            lambda *x: example.function(linalg, *x), arrays, [LAYOUTS[2][0]] * len(arrays), widest
        )
        right = value_and_gradients(
            lambda *x: example.function(linalg, *x), [a.astype(np.result_type(dtype, float)) for a in arrays],
            [LAYOUTS[2][0]] * len(arrays), widest,
        )  # fmt: skip
        for mine, theirs in zip(found, right, strict=True):
            assert mine.dtype == dtype
            close(mine, theirs, 1e-3)


@pytest.mark.parametrize("shape", [(0, 0), (1, 1), (3, 0), (0, 2), (1, 4)], ids=str)
def test_small_matrices(shape: tuple[int, int], widest: Grid, serial: Grid) -> None:
    x = numbers(*shape) + 2
    functions: list[Callable[[Tensor], Any]] = [
        lambda x: linalg.svd(x, full_matrices=False).S,
        lambda x: linalg.svd(x).U ** 2,
        lambda x: linalg.qr(x).R ** 2,
        lambda x: linalg.lu(x)[2],
    ]
    if shape[0] == shape[1]:
        functions += [linalg.det, linalg.inv, linalg.eigvalsh, lambda x: linalg.solve(x, x), linalg.cholesky]
    for function in functions:
        found = value_and_gradients(function, [x], [Layout("a", "b")], widest)
        known = value_and_gradients(function, [x], [Layout("a", "b")], serial)
        for mine, right in zip(found, known, strict=True):
            close(mine, right)


# ------------------------------------------------------------------------------------------------ equal values
def turned(values: list[float], dtype: Any) -> np.ndarray:
    """A Hermitian matrix with these eigenvalues, in a basis of its own."""
    q = np.linalg.qr(spaced(len(values), len(values), seed=3, dtype=dtype))[0]
    a = (q * values) @ q.conj().T
    return (a + a.conj().T) / 2


EQUAL_EIGENVALUES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sums of functions of the values": lambda w, v: pla.sum(pla.exp(w)),
    "projections to spaces": lambda w, v: whole(v)[:, :3] @ whole(v)[:, :3].mT.conj(),
    "traces": lambda w, v: linalg.trace((whole(v) * whole(w) ** 3) @ whole(v).mT.conj()),
    "functions that are flat there": lambda w, v: (whole(v) * (whole(w) - 1) ** 2) @ whole(v).mT.conj(),
}


@pytest.mark.parametrize("dtype", [float, complex])
@pytest.mark.parametrize("name", EQUAL_EIGENVALUES)
def test_equal_eigenvalues(name: str, dtype: Any, grid: Grid) -> None:
    """Functions of eigenspaces have the derivative that finite differences find, and no NaNs."""
    x = tensor(turned([1, 1, 1, 2, 3], dtype), grid, LAYOUTS[2][0])
    pla.check_gradients(lambda x: EQUAL_EIGENVALUES[name](*linalg.eigh(hermitian(x))), [x], directions=2)


@pytest.mark.parametrize("name", ["expm", "sqrtm", "polar"])
def test_functions_of_matrices_with_equal_eigenvalues(name: str, grid: Grid) -> None:
    """Where eigenvectors have no derivative, these have."""

    def function(x: Tensor) -> Any:
        return sum(linalg.polar(x)) if name == "polar" else getattr(linalg, name)(x)

    for a in (turned([1, 1, 1, 2, 3], complex), np.eye(4), np.eye(4) + np.eye(4, k=1)):
        x = tensor(a, grid, LAYOUTS[2][0])
        pla.check_gradients(lambda x: function(x), [x], directions=1)


@pytest.mark.parametrize("values", [[1, 2, 3, 4], [-3, -1, 2, 5], [-4, -3, -2, -1]])
def test_roots_of_hermitian_matrices(values: list[float], grid: Grid) -> None:
    """Eigenvalues below 0 have imaginary roots, so that the root is not Hermitian."""
    x = tensor(turned(values, complex), grid, LAYOUTS[2][0])
    pla.check_gradients(lambda x: linalg.sqrtm(hermitian(x)), [x], directions=2)


EQUAL_SINGULAR_VALUES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "sums of functions of the values": lambda u, s, vh: pla.sum(pla.exp(s)),
    "polar factors": lambda u, s, vh: whole(u) @ whole(vh),
    "projections to spaces": lambda u, s, vh: whole(u)[:, 1:] @ whole(u)[:, 1:].mT.conj(),
    "functions that are flat there": lambda u, s, vh: (whole(u) * (whole(s) - 1) ** 2) @ whole(vh),
}


@pytest.mark.parametrize("dtype", [float, complex])
@pytest.mark.parametrize("name", EQUAL_SINGULAR_VALUES)
def test_equal_singular_values(name: str, dtype: Any, grid: Grid) -> None:
    u, _, vh = np.linalg.svd(spaced(6, 4, dtype=dtype), full_matrices=False)
    x = tensor((u * [2, 1, 1, 1]) @ vh, grid, LAYOUTS[2][0])
    pla.check_gradients(lambda x: EQUAL_SINGULAR_VALUES[name](*linalg.svd(x, full_matrices=False)), [x], directions=2)


def test_singular_matrices(grid: Grid) -> None:
    """Determinants have derivatives there, norms and pseudoinverses finite ones, and factors none."""
    for a in (
        spaced(5, 4) @ spaced(4, 5, seed=2),
        spaced(5, 5) * [[0], [1], [1], [1], [1]],
        np.diag([0.0, 0, 1, 2, 3]),
    ):
        x = tensor(a, grid, LAYOUTS[2][0])
        pla.check_gradients(linalg.det, [x], directions=2)
        for order in ("nuc", 2, -2):
            linalg.matrix_norm(x, ord=order).backward()
        assert x.grad is not None
        assert np.isfinite(x.grad.gather()).all()
    zeros = tensor(np.zeros((4, 4)), grid, LAYOUTS[2][0])
    for function in (linalg.svdvals, linalg.eigvalsh, linalg.pinv, lambda x: linalg.svd(x).U, linalg.det):
        function(zeros).sum().backward()
        assert np.isfinite(zeros.grad.gather()).all()  # type: ignore[union-attr]
    for function in (lambda x: linalg.qr(x).Q, lambda x: linalg.lu(x)[1]):
        with pytest.raises(np.linalg.LinAlgError, match="singular"):
            function(zeros).sum().backward()


# ------------------------------------------------------------------------------------------------ reuse
class Counted:
    """How often something was factored."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.times = 0
        for home, names in (
            (lu_factors, ("LU",)),
            (qr_factors, ("QR", "batches")),
            (cholesky_factors, ("Cholesky", "batches")),
            (kernels, ("lower",)),  # in place of Cholesky on one GPU
            (systems, ("batches",)),
            (spectral, ("Tridiagonal", "batches")),
            (singular, ("Bidiagonal", "batches", "_from_first_rank")),
            (ranks, ("Bidiagonal",)),
        ):
            for name in names:
                patch.setattr(home, name, self.counting(getattr(home, name)))

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.times += 1
            return function(*args, **kwargs)

        return run


REUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "solve": linalg.solve,
    "vectors": lambda a, b: linalg.solve(a, whole(b)[:, 0]),
    "refined": lambda a, b: linalg.solve(a, b, refine=True),
    "inv": lambda a, b: linalg.inv(a),
    "det": lambda a, b: linalg.det(a),
    "slogdet": lambda a, b: linalg.slogdet(a).logabsdet,
    "qr": lambda a, b: linalg.qr(a).Q.sum() + linalg.qr_factor(a.data).R.sum() * 0,
    "lu": lambda a, b: linalg.lu(a)[1].sum(),
    "cholesky": lambda a, b: linalg.cholesky(positive(a)),
    "eigh": lambda a, b: linalg.eigh(a).eigenvectors.sum() * linalg.eigvalsh(a).sum(),
    "svd": lambda a, b: linalg.svd(a, full_matrices=False).U,
    "lstsq": lambda a, b: linalg.lstsq(a, b).x,
    "pinv": lambda a, b: linalg.pinv(a),
    "cond": lambda a, b: linalg.cond(a),
}
TWICE = {"qr", "eigh", "lstsq"}  # the singular values of the triangle of lstsq are found


@pytest.mark.parametrize("name", REUSED)
def test_the_backward_pass_does_not_factor(name: str, widest: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    a, b = tensor(spaced(5, 5), widest, LAYOUTS[2][0]), tensor(numbers(5, 2), widest, LAYOUTS[2][1])
    y = REUSED[name](a, b)
    made = counted.times
    if widest.backend.cpu or widest.size == 1:  # the polar decomposition of several GPUs factors in every step
        assert made == 1 + (name in TWICE)
    y.sum().backward()
    assert counted.times == made


def test_factors_are_made_once(grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    """Solutions, determinants and all gradients come from one factorization."""
    counted = Counted(monkeypatch)
    array, sides = spaced(6, 6), numbers(6, 2)
    a, b = tensor(array, grid, LAYOUTS[2][0]), tensor(sides, grid, LAYOUTS[2][1])
    factor = linalg.lu_factor(a)
    x = factor.solve(factor.solve(b), adjoint=True)
    (x.sum() * factor.det() + factor.slogdet().logabsdet).backward()
    assert counted.times == 1
    c, d = tensor(array, grid, LAYOUTS[2][0]), tensor(sides, grid, LAYOUTS[2][1])
    y = linalg.solve(c.mT, linalg.solve(c, d))
    (y.sum() * linalg.det(c) + linalg.slogdet(c).logabsdet).backward()
    for mine, right in ((a, c), (b, d)):
        assert mine.grad is not None
        assert right.grad is not None
        close(mine.grad.gather(), right.grad.gather(), 1e-11)
    counted.times = 0
    s, e = positive(c), tensor(sides[:, 0].copy(), grid, LAYOUTS[1][0])
    z = linalg.cho_factor(s)
    (z.solve(e).sum() + z.solve(z.solve(d)).sum() + z.L.sum() + z.det() + z.slogdet().logabsdet).backward()
    assert counted.times == 1


@pytest.mark.parametrize("shape", [(5, 5), (3, 5, 5), (13, 3, 3)], ids=str)
@pytest.mark.parametrize("dtype", [float, complex])
def test_determinants_of_positive_matrices(shape: tuple[int, ...], dtype: Any, grid: Grid) -> None:
    """Those of Cholesky factors have the gradients of `det` and `slogdet`; what is above the diagonal is not read."""
    a = spaced(*shape, dtype=dtype)
    a = a @ a.conj().swapaxes(-1, -2) + np.eye(shape[-1])
    layout = grid.default_layout(shape)
    x, y = tensor(np.tril(a) + 7 * np.triu(np.ones(shape), 1), grid, layout), tensor(a, grid, layout)
    factor, (_, log) = linalg.cho_factor(x), linalg.slogdet(y)
    assert np.array_equal(factor.slogdet().sign.gather(), np.ones(shape[:-2]))
    ((3 * factor.det()).real.sum() - factor.slogdet().logabsdet.sum()).backward()
    ((3 * linalg.det(y)).real.sum() - log.sum()).backward()
    close(factor.det().data.gather(), np.linalg.det(a), 1e-11)
    close(x.grad.gather(), y.grad.gather(), 1e-11)
    assert x.grad.layout == y.grad.layout


@pytest.mark.parametrize("shape", [(5, 5), (3, 5, 5), (13, 3, 3)], ids=str)
@pytest.mark.parametrize("dtype", [float, complex])
def test_factors_of_constants(shape: tuple[int, ...], dtype: Any, widest: Grid) -> None:
    """A factorization of an array solves for tensors, with the gradients of `solve` and `lstsq`."""
    a, b = spaced(*shape, dtype=dtype), numbers(shape[-1], 2).astype(dtype)
    x = cut(a @ a.conj().swapaxes(-1, -2), widest, Layout(*[None] * len(shape)))
    for make in (linalg.lu_factor, linalg.cho_factor, linalg.qr_factor):
        factor = make(x)
        for side in (b, b[:, 0]):
            y = tensor(side, widest, Layout(*[None] * side.ndim))
            z = tensor(side, widest, Layout(*[None] * side.ndim))
            (abs(factor.solve(y)) ** 2).sum().backward()
            (abs(linalg.solve(x, z)) ** 2).sum().backward()
            close(y.grad.gather(), z.grad.gather(), 1e-8)
    adjoint = linalg.lu_solve(linalg.lu_factor(x), tensor(b, widest, Layout(None, None)), adjoint=True)
    assert adjoint.requires_grad


def test_hermitian_of_numpy(widest: Grid) -> None:
    """The gradient by matrices of which lower triangles are read is Hermitian."""
    for function in (np.linalg.pinv, lambda x, hermitian: np.linalg.svd(x, hermitian=hermitian)[1]):
        x = tensor(spaced(4, 4, dtype=complex) + 6 * np.eye(4), widest, Layout(None, None))
        pla.check_gradients(lambda x: function(hermitian(x), hermitian=True), [x], tol=1e-6, directions=2)
        function(x, hermitian=True).real.sum().backward()
        close(x.grad.gather(), x.grad.gather().conj().T, 1e-12)


def test_what_is_no_matrix(widest: Grid) -> None:
    for function in (linalg.eigh, linalg.eigvalsh, np.linalg.eigh):
        for shape in ((), (3,), (2, 3)):
            with pytest.raises(np.linalg.LinAlgError, match="eigh takes"):
                function(tensor(np.ones(shape), widest, Layout(*[None] * len(shape))))


def test_saved_arrays_of_factors_pass_hooks(widest: Grid) -> None:
    """The tiles of a factorization are saved arrays as others are, and nothing else is saved."""
    from parlinalg.autograd import saved_arrays_hooks

    packed: list[Any] = []

    def pack(array: Any) -> Any:
        packed.append(array)
        return array.copy()

    a, b = tensor(spaced(5, 5), widest, LAYOUTS[2][0]), tensor(numbers(5, 2), widest, LAYOUTS[2][1])
    with saved_arrays_hooks(pack, lambda array: array):
        y = linalg.solve(a, b)
    assert len(packed) == 2  # the tiles and the solution
    y.backward(cut(numbers(5, 2, seed=99), widest, y.layout))
    known = value_and_gradients(linalg.solve, [spaced(5, 5), numbers(5, 2)], [LAYOUTS[2][0], LAYOUTS[2][1]], widest)
    assert a.grad is not None
    close(a.grad.gather(), known[1])


def test_names_of_numpy(widest: Grid) -> None:
    a = spaced(5, 4)
    for function, size in (
        (lambda x: np.linalg.svd(x, full_matrices=False)[1], 4),
        (lambda x: np.linalg.svd(x, compute_uv=False), 4),
        (lambda x: np.linalg.eigh(x.T @ x, "U")[0], 4),
        (lambda x: np.linalg.qr(x, mode="r") ** 2, 16),
        (lambda x: np.linalg.lstsq(x, x[:, 0] if isinstance(x, np.ndarray) else whole(x)[:, 0], rcond=None)[0], 4),
        (lambda x: np.linalg.norm(x, "nuc"), 1),
        (np.linalg.pinv, 20),
        (np.linalg.cond, 1),
    ):
        x = tensor(a, widest, LAYOUTS[2][0])
        y = function(x)
        assert isinstance(y, Tensor)
        close(y.gather(), function(a), 1e-11)
        assert y.size == size
        y.sum().backward()
        assert x.grad is not None


def numpy_solution(a: Any, b: Any) -> Any:
    return np.linalg.lstsq(a, b, rcond=None)[0]


A, B, C, V, CUBES = spaced(4, 4), spaced(4, 4, seed=2), spaced(4, 4, dtype=complex), numbers(4), numbers(2, 4, 3)
BOTH = (0, 1)

#: Every function of `np.linalg` that has a derivative.
NUMPY: dict[str, list[Case]] = {
    "cholesky": [Case(lambda x, u=u: np.linalg.cholesky(positive(x), upper=u), A) for u in (False, True)],
    "cond": [Case(lambda x, p=p: np.linalg.cond(x, p), A) for p in (None, 1, "fro", -2, np.inf)],
    "cross": [
        Case(np.linalg.cross, numbers(4, 3), numbers(4, 3, seed=1)),
        Case(lambda x, y: np.linalg.cross(x, y, axis=1), CUBES[:, :3], numbers(2, 3, 3, seed=5)),
        Case(np.cross, numbers(4, 3), numbers(3), whole=(-1,)),
        Case(lambda x, y: np.cross(x, y, axisa=0, axisc=0), numbers(3, 5), numbers(5, 3, seed=1), whole=BOTH),
    ],
    "det": [Case(np.linalg.det, A), Case(np.linalg.det, C)],
    "diagonal": [Case(lambda x: np.linalg.diagonal(x, offset=1), CUBES)],
    "eig": [Case(lambda x: abs(whole(np.linalg.eig(x)[0])).sum() * 1.0, A)],
    "eigh": [Case(lambda x, u=u: np.linalg.eigh(hermitian(x), u)[0] ** 3, A) for u in "LU"],
    "eigvals": [Case(lambda x: abs(whole(np.linalg.eigvals(x))).sum() * 1.0, C)],
    "eigvalsh": [Case(lambda x: np.linalg.eigvalsh(hermitian(x)), C)],
    "inv": [Case(np.linalg.inv, A)],
    "lstsq": [Case(numpy_solution, spaced(5, 3), numbers(5, 2)), Case(numpy_solution, spaced(5, 3), numbers(5))],
    "matmul": [Case(np.linalg.matmul, A, B), Case(np.linalg.matmul, A, V)],
    "matrix_norm": [
        Case(lambda x, o=o: np.linalg.matrix_norm(x, ord=o, keepdims=o == 2), a)
        for o in ("fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)
        for a in (A, CUBES)
    ],
    "matrix_power": [Case(lambda x, n=n: np.linalg.matrix_power(x, n), A) for n in (-2, 0, 3)],
    "matrix_transpose": [Case(np.linalg.matrix_transpose, CUBES)],
    "multi_dot": [
        Case(lambda *x: np.linalg.multi_dot(x), numbers(3, 5), numbers(5, 2), numbers(2, 7)),
        Case(lambda *x: np.linalg.multi_dot(x), V, A, C, numbers(4, 3)),
        Case(lambda *x: np.linalg.multi_dot([*x, x[0]]), V, A),
        Case(lambda *x: np.linalg.multi_dot(x), A, V),
    ],
    "norm": [
        *(Case(lambda x, o=o: np.linalg.norm(x, o), A) for o in (None, "fro", "nuc", 1, -1, 2, -2, np.inf, -np.inf)),
        *(Case(lambda x, o=o: np.linalg.norm(x, o, axis=-1, keepdims=True), C) for o in (None, 1, 2.5, np.inf)),
        Case(lambda x: np.linalg.norm(x, 2, (0, 2)), CUBES),
        Case(np.linalg.norm, CUBES),
    ],
    "outer": [Case(np.linalg.outer, V, numbers(3), whole=(0,))],
    "pinv": [Case(np.linalg.pinv, spaced(5, 3)), Case(lambda x: np.linalg.pinv(x, rtol=1e-9), C)],
    "qr": [
        Case(lambda x: abs(np.linalg.qr(x, mode="r")), spaced(5, 3)),
        Case(lambda x: projection(whole(np.linalg.qr(x, "complete")[0])[:, 3:]), spaced(5, 3)),
    ],
    "slogdet": [Case(lambda x: np.linalg.slogdet(x)[1], A), Case(lambda x: np.linalg.slogdet(x)[0], C)],
    "solve": [Case(np.linalg.solve, A, B), Case(np.linalg.solve, A, V)],
    "svd": [
        Case(lambda x: np.linalg.svd(x, compute_uv=False), spaced(5, 3)),
        Case(lambda x: polar(*np.linalg.svd(x, full_matrices=False)), spaced(5, 3)),
        Case(lambda x: polar(*np.linalg.svd(hermitian(x), hermitian=True)), C),
    ],
    "svdvals": [Case(np.linalg.svdvals, spaced(3, 5))],
    "tensordot": [
        Case(lambda x, y: np.linalg.tensordot(x, y, axes=1), CUBES, spaced(3, 2)),
        Case(lambda x, y: np.linalg.tensordot(x, y, axes=((0, 2), (2, 0))), CUBES, numbers(3, 5, 2)),
    ],
    "tensorinv": [
        Case(np.linalg.tensorinv, spaced(6, 6).reshape(2, 3, 3, 2), whole=(0, 1, 2, 3)),
        Case(lambda x: np.linalg.tensorinv(x, ind=1), spaced(6, 6).reshape(6, 3, 2)),
    ],
    "tensorsolve": [
        Case(np.linalg.tensorsolve, spaced(6, 6).reshape(2, 3, 6), numbers(2, 3)),
        Case(lambda x, y: np.linalg.tensorsolve(x, y, axes=(0,)), spaced(6, 6).reshape(6, 2, 3), numbers(2, 3)),
    ],
    "trace": [Case(lambda x: np.linalg.trace(x, offset=-1), CUBES), Case(np.linalg.trace, C)],
    "vecdot": [
        Case(np.linalg.vecdot, C, spaced(4, 4, seed=3, dtype=complex)),
        Case(lambda x, y: np.linalg.vecdot(x, y, axis=0), A, B),
    ],
    "vector_norm": [
        *(Case(lambda x, o=o: np.linalg.vector_norm(x, ord=o, axis=(0, 2)), CUBES) for o in (1, 2, 3, np.inf, -np.inf)),
        Case(lambda x: np.linalg.vector_norm(x, axis=1, keepdims=True), C),
        Case(np.linalg.vector_norm, C),
    ],
}
NUMPY_CONSTANT = {"matrix_rank": (lambda x: np.linalg.matrix_rank(x), lambda x: np.linalg.matrix_rank(x[..., 0]))}


@pytest.mark.serial
def test_every_function_of_np_linalg_has_its_line() -> None:
    names = {name for name in np.linalg.__all__ if name != "LinAlgError"}
    assert names == {*NUMPY, *NUMPY_CONSTANT}


@pytest.mark.parametrize("name", NUMPY)
def test_functions_of_np_linalg(name: str, grid: Grid, request: pytest.FixtureRequest) -> None:
    """Values are NumPy's, and gradients those of finite differences; operands may be tensors or arrays."""
    seed, some = request.config.getoption("--seed"), 1 if grid.size == 1 else 3
    for i, case in enumerate(NUMPY[name]):
        if (i + seed) % some and len(NUMPY[name]) > 1:
            continue
        every = case.layouts() if max(a.ndim for a in case.arrays) < 4 else [[Layout("a", "b", None, None)]]
        layouts = every[i % len(every)]
        inputs = [tensor(a, grid, layout) for a, layout in zip(case.arrays, layouts, strict=True)]
        y = case.function(*inputs)
        assert isinstance(y, Tensor)
        close(y.gather(), case.function(*case.arrays), 1e-11)
        pla.check_gradients(case.function, inputs, tol=1e-6, directions=1)
        for only in range(len(inputs)) if len(inputs) > 1 else ():
            mixed = case.function(*(x if k == only else x.data for k, x in enumerate(inputs)))
            assert mixed.requires_grad
            close(mixed.gather(), y.gather())


@pytest.mark.parametrize("name", NUMPY_CONSTANT)
def test_constants_of_np_linalg(name: str, widest: Grid) -> None:
    x = tensor(A, widest, Layout("a", None))
    for function in NUMPY_CONSTANT[name]:
        assert int(function(x)) == function(A)


TAKING: dict[str, Callable[[Tensor], Tensor]] = {
    "cholesky": linalg.cholesky,
    "q": lambda x: linalg.qr(x).Q,
    "r": lambda x: linalg.qr(x).R,
    "eigenvectors": lambda x: linalg.eigh(x).eigenvectors,
    "u": lambda x: linalg.svd(x).U,
    "vh": lambda x: linalg.svd(x).Vh,
    "pinv": linalg.pinv,
}
"""Functions whose rules free the gradient that they are given."""


@pytest.mark.parametrize("name", TAKING)
def test_gradients_that_rules_free_are_still_those_of_others(name: str, grid: Grid) -> None:
    """That of the caller, of a second backward pass, and of another value that is given the same block."""
    a = numbers(7, 7, seed=3)
    a = a @ a.T + 7 * np.eye(7)
    x, y = (tensor(a, grid, grid.default_layout(a.shape)) for _ in range(2))
    one, two = TAKING[name](x), TAKING[name](y)
    both = one + two
    seed = numbers(7, 7, seed=4)
    g = pla.distribute(seed, grid, both.layout)
    both.backward(g, retain=True)
    np.testing.assert_array_equal(g.gather(), seed)
    assert x.grad is not None
    assert y.grad is not None
    first = x.grad.gather()
    close(y.grad.gather(), first)
    both.backward(g)
    np.testing.assert_array_equal(g.gather(), seed)
    close(x.grad.gather(), 2 * first)
