"""What a NumPy user types: each line is evaluated with NumPy on arrays and on DistArrays, and none may raise."""

from __future__ import annotations

import re
import warnings
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.array import DistArray
from tests.cases import grids, layouts, terms

# A 6×5, B 6×5, S 5×5, T 3×4×2, u and v 6, w 5, i and j indices below 6, k 6 counts, z complex 6, m a mask 6×5,
# q a mask of 6, n 6×5 with NaNs, x sorted 6, c 0-d.
EXPRESSIONS = """
A + B
A - 2.5 * B
A @ S
A.T @ A
S @ S @ w
u @ v
A / (abs(B) + 1)
A // 2
A % 3
A ** 2
-A
abs(A)
A > B
(A > 0) & (B < 0)
~m
A[1:4, ::2]
A[-1]
A[:, 2]
A[::-1, ::-1]
A[i]
A[i, [0, 1, 4, 0]]
A[m]
A[q]
A[..., None]
A[q, 1]
A[j] * 2
A.sum()
A.sum(axis=0)
A.sum(1, keepdims=True)
A.mean(axis=(0, 1))
A.std(ddof=1)
A.var(axis=0)
A.max(1)
A.min()
A.argmax()
A.argmin(axis=1)
A.any()
A.all(0)
A.prod(axis=1)
np.ptp(A)
A.cumsum()
A.cumsum(axis=1)
A.cumsum(axis=1, dtype=np.float32)
A.astype(np.float32).cumsum(axis=1, dtype=np.dtype("float64"))
A.cumprod(0)
A.ravel()
A.flatten()
A.reshape(5, 6)
A.reshape(-1)
A.T
A.transpose(1, 0)
T.swapaxes(0, 2)
T.transpose(2, 0, 1)
A[None].squeeze()
A.tolist()
A.item(3)
A.item(2, 1)
A.nonzero()
A.round(1)
A.clip(-1, 1)
A.dot(w)
A.take([0, 2])
A.take(i, axis=0)
A.repeat(2, axis=1)
A.diagonal(1)
A.trace()
A.conj()
z.conjugate()
z.real
z.imag
A.astype(np.float32)
A.astype(int)
A.copy()
A.compress([True, False, True], axis=0)
A.argsort(axis=0, kind="stable")
x.searchsorted(v)
k.choose([u, v, x, u, v, x, u])
A.view(np.int64)
A.tobytes()
A.nbytes
A.size
len(A)
list(A)
[row.sum() for row in A]
float(c)
int(c)
round(u[2])
round(u[1], 1)
np.float32(u[1])
np.mean([u[0], u[1]]).item()
[np.asarray(v.sum()).item(), np.array([u[0], u.mean()]).tolist()]
f"{c:.3f}"
f"{A.sum():8.2e}"
bool((A == A).all())
2.0 in A
after(A, lambda a: a.fill(3))
after(A, lambda a: a.sort())
after(A, lambda a: a.sort(axis=0))
after(u, lambda a: a.partition(5))
after(A, lambda a: a.__setitem__((slice(None), 1), 7.0))
after(A, lambda a: a.__setitem__(a > 0, 0))
after(A, lambda a: a.__iadd__(1))
np.sum(A, axis=0, where=m)
np.sum(A, initial=10)
np.max(A, axis=1, initial=0, where=m)
np.min(A, initial=-2.0)
np.mean(A, where=m)
np.mean(A, axis=0, where=m)
np.std(A, axis=1, where=m)
np.var(A, where=m, ddof=1)
np.prod(A, axis=0, where=m, initial=2.0)
np.any(A > 1, where=m)
np.all(A > -9, axis=0, where=m)
np.add.reduce(A)
np.maximum.reduce(A, axis=1)
np.bitwise_or.reduce(k)
np.logical_xor.reduce(m, axis=0)
np.gcd.reduce(k + 1)
np.add.accumulate(A, axis=1)
np.maximum.accumulate(v)
np.add.outer(u, w)
np.multiply.outer(u, w)
np.subtract.outer(u, A)
np.add(A, B, where=m, out=A.copy())
np.divide(A, B, where=B != 0, out=A * 0)
np.where(m, A, B)
np.where(m)
np.select([A > 1, A < -1], [A, B], default=0)
np.select([m, A > 0], [A, 2.0], B)
np.choose(k, [u, v, x, u, v, x, 1.0])
np.choose(k, (u, v), mode="wrap")
np.piecewise(A, [A < 0, A >= 1], [-1, 1])
np.piecewise(u, [u < 0], [lambda y: -y, lambda y: y + 10])
np.nan_to_num(n)
np.nan_to_num(n, nan=7.0, posinf=1.0)
np.isnan(n)
np.isclose(A, B)
np.allclose(A, A)
np.array_equal(A, A.copy())
np.array_equiv(A, A[:1])
np.median(A)
np.median(A, axis=0)
np.median(A, axis=1, keepdims=True)
np.median(n, axis=0)
np.median(T, axis=(0, 2))
np.quantile(A, 0.3)
np.quantile(A, [0.1, 0.5, 0.9], axis=0)
np.quantile(u, 0.25, method="hazen")
np.percentile(A, 75)
np.percentile(A, [25, 50, 75], axis=1)
np.percentile(u, 40, method="nearest")
np.nanmedian(n)
np.nanmedian(n, axis=0)
np.nanquantile(n, 0.4, axis=1)
np.nanpercentile(n, [10, 90])
np.nansum(n)
np.nansum(n, axis=0)
np.nanprod(n, axis=1)
np.nanmean(n, axis=0)
np.nanmax(n)
np.nanmin(n, axis=1)
np.nanstd(n, axis=0)
np.nanvar(n)
np.nanargmax(n)
np.nanargmin(n, axis=1)
np.nancumsum(n, axis=0)
np.average(A)
np.average(A, axis=0, weights=abs(u) + 1)
np.average(A, weights=abs(B) + 1)
np.average(A, axis=1, weights=abs(w) + 1, returned=True)
np.ptp(A, axis=0)
np.cov(A)
np.cov(A, rowvar=False)
np.cov(u, v)
np.cov(A, bias=True, aweights=abs(w) + 1)
np.cov(A, fweights=[1, 2, 3, 1, 1])
np.corrcoef(A)
np.corrcoef(u, v)
np.histogram(A)
np.histogram(A, bins=5, range=(-2, 2))
np.histogram(A, bins=[-3, -1, 0, 4])
np.histogram(A, bins="auto")
np.histogram(A, bins=4, density=True)
np.histogram(A, bins=4, weights=abs(B))
np.histogram_bin_edges(A, bins="fd")
np.histogram2d(u, v, bins=3)
np.bincount(k)
np.bincount(k, minlength=9)
np.bincount(k, weights=u)
np.digitize(A, [-1, 0, 2])
np.digitize(A, x)
np.gradient(u)
np.gradient(A)
np.gradient(A, 0.5, axis=1)
np.gradient(A, np.arange(6.0) ** 2, np.arange(5.0), edge_order=2)
np.diff(A, axis=0)
np.diff(u, n=2)
np.diff(A, prepend=0)
np.diff(k, append=2.5)
np.diff(A, axis=0, prepend=c, append=A[:2])
np.ediff1d(A)
np.ediff1d(u, to_end=[9.0], to_begin=1.0)
np.trapezoid(A)
np.trapezoid(A, x=x, axis=0)
np.trapezoid(u, dx=0.5)
np.interp(A, [-2.0, 0.0, 3.0], [1.0, 5.0, 2.0])
np.interp(A, x, u)
np.interp(u, x, v, left=-1.0, right=1.0)
np.convolve(u, [1.0, 2.0, 1.0])
np.convolve(u, w, "same")
np.convolve(w, u, mode="valid")
np.correlate(u, w)
np.correlate(w, u, "full")
np.einsum("ij,jk->ik", A, S)
np.einsum("ij->j", A)
np.einsum("ii", S)
np.einsum("ii->i", S)
np.einsum("ij,ij->i", A, B)
np.einsum("i,j", u, w)
np.einsum("...i,i->...", A, w)
np.einsum("ij,jk,k", A, S, w, optimize=True)
np.tensordot(A, S, axes=1)
np.tensordot(T, T, axes=([0, 1], [0, 1]))
np.kron(A, S)
np.kron(u, w)
np.inner(A, S)
np.inner(u, v)
np.outer(u, w)
np.vdot(z, z)
np.dot(A, S)
np.matmul(A, S)
np.cross(A[:, :3], B[:, :3])
np.linalg.norm(A)
np.linalg.norm(A, axis=1)
np.linalg.norm(A, 1)
np.linalg.vector_norm(A, ord=3)
np.linalg.vector_norm(T, axis=(0, 2), keepdims=True)
np.linalg.matrix_norm(A, ord=1)
np.linalg.outer(u, w)
np.linalg.tensordot(A, S, axes=1)
np.linalg.cross(A[:, :3], B[:, :3])
np.linalg.trace(S)
np.linalg.diagonal(S, offset=1)
np.linalg.matrix_power(S, 3)
np.linalg.multi_dot([A, S, w])
np.trace(S, offset=1)
np.diag(S)
np.diag(u)
np.diagflat(A)
np.tril(S)
np.triu(S, 1)
np.sort(A)
np.sort(A, axis=None)
np.argsort(u, kind="stable")
np.partition(u, 5)
np.lexsort((u, k))
np.searchsorted(x, v)
np.unique(k)
np.unique(k, return_counts=True)
np.isin(k, [1, 3])
np.isin(k, k[:2], invert=True)
np.union1d(k, k + 2)
np.intersect1d(k, k + 1)
np.setdiff1d(k, [0, 1])
np.setxor1d(k, k + 1)
np.concatenate([A, B])
np.concatenate((A, B), axis=1)
np.stack([u, v])
np.stack([A, B], axis=-1)
np.vstack([u, v])
np.hstack([A, B])
np.dstack([A, B])
np.column_stack([u, v, x])
np.block([[A, B], [B, A]])
np.split(A, 3)
np.array_split(u, 4)
np.hsplit(A, 5)
np.append(A, B)
np.append(A, B, axis=0)
np.append(u, 1)
np.append(k, 2.5)
np.append(A, [1.0, 2.0])
np.insert(u, 2, 9.0)
np.insert(A, [1, 3], 7.0, axis=0)
np.insert(A, 1, u, axis=1)
np.delete(u, 2)
np.delete(A, [0, 4], axis=1)
np.delete(A, slice(1, 3), 0)
np.resize(u, (3, 5))
np.tile(u, 2)
np.tile(A, (2, 1))
np.repeat(u, 2)
np.roll(u, 2)
np.roll(A, 1, axis=0)
np.flip(A)
np.fliplr(A)
np.rot90(A)
np.rot90(A, 3)
np.pad(A, 1)
np.moveaxis(T, 0, -1)
np.rollaxis(T, 2)
np.expand_dims(A, 1)
np.broadcast_to(u[:, None], (6, 4))
np.broadcast_arrays(A, w)
np.atleast_1d(c)
np.atleast_2d(u)
np.atleast_3d(A)
np.ravel(A)
np.argwhere(A > 1)
np.flatnonzero(A > 1)
np.count_nonzero(A)
np.take_along_axis(A, np.argsort(A, axis=1, kind="stable"), axis=1)
np.extract(m, A)
np.compress([False, True], A, axis=1)
np.unravel_index(k, (3, 4))
np.ravel_multi_index((k % 2, k), (2, 7))
np.vander(u, 3)
np.polyval([1.0, 2.0, 3.0], A)
np.apply_along_axis(np.sort, 0, A)
np.apply_along_axis(lambda y: y.max() - y.min(), 1, A)
np.cumulative_sum(u, include_initial=True)
np.cumulative_prod(A, axis=1)
np.angle(z)
np.sinc(A)
np.fix(A)
np.real(z) + np.imag(z)
np.iscomplexobj(z)
np.maximum(A, 0)
np.clip(A, -1, None)
np.exp(-(A ** 2))
np.log1p(abs(A))
np.hypot(A, B)
np.sqrt(abs(A)).mean()
np.sign(A)
np.round(A, 1)
np.zeros_like(A)
np.full_like(A, 2)
np.ones_like(k)
np.copy(A)
np.shape(A)
np.ndim(A)
np.size(A, 0)
after(A, lambda a: np.fill_diagonal(a, 0))
after(A, lambda a: np.copyto(a, 1.5, where=a > 0))
after(A, lambda a: np.put_along_axis(a, np.argmax(a, axis=1, keepdims=True), 9.0, axis=1))
np.array_split(A, 2, axis=1)
np.trim_zeros(k)
np.meshgrid(u, w)
np.meshgrid(u, w, x, indexing="ij", sparse=True)
np.astype(A, np.float32)
np.unique_counts(k)
np.unique_inverse(k)
np.unique_values(A)
S[np.triu_indices_from(S, 1)]
A[np.tril_indices_from(A)]
S[np.diag_indices_from(S)]
after(A, lambda a: np.add.at(a, ([0, 0, 5], [1, 1, 4]), 2.0))
np.fft.fft(u)
np.result_type(A, np.float32)
(A - A.mean(0)) / A.std(0)
((A[:, None, :] - B[None, :, :]) ** 2).sum(-1)
np.exp(A) / np.exp(A).sum(1, keepdims=True)
A[np.argsort(A[:, 0], kind="stable")]
np.linalg.norm(A[:, None] - B[None], axis=-1).argmin(1)
""".strip().splitlines()


def test_methods_of_numpys_arrays_that_are_left_out() -> None:
    """Each has a reason: memory that is one rank's alone, or writing through views."""
    left = {name for name in dir(np.ndarray) if not name.startswith("_") and not hasattr(DistArray, name)}
    assert left <= {
        "base", "byteswap", "ctypes", "data", "dump", "dumps", "flags", "flat", "getfield", "itemset", "resize",
        "setfield", "setflags", "strides", "tofile", "tostring", "newbyteorder", "ptp",
    }  # fmt: skip


def after(a: Any, change: Any) -> Any:
    """Return a copy that a function has changed."""
    a = a.copy()
    change(a)
    return a


def values() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    some = {name: rng.integers(-9, 10, shape) / 4 for name, shape in
            {"A": (6, 5), "B": (6, 5), "S": (5, 5), "T": (3, 4, 2), "u": 6, "v": 6, "w": 5}.items()}  # fmt: skip
    n = some["A"].copy()
    n[1, 2] = n[3] = np.nan
    n[3, 4] = 1
    return {
        **some, "n": n, "i": rng.integers(-6, 6, 4), "j": rng.integers(0, 6, 4), "k": rng.integers(0, 7, 6),
        "z": some["u"] + 1j * some["v"], "m": rng.random((6, 5)) < 0.6, "q": rng.random(6) < 0.5,
        "x": np.sort(rng.choice(40, 6, replace=False)) / 8 - 2, "c": np.asarray(2.5),
    }  # fmt: skip


def compare(got: Any, want: Any, line: str) -> None:
    if isinstance(want, list | tuple):
        assert len(got) == len(want), line
        for g, w in zip(got, want, strict=True):
            compare(g, w, line)
        return
    if isinstance(got, DistArray):
        held = got.grid.block_shape(got.layout, got.shape)
        assert tuple(got.block.shape) == held or not got.grid.inside, (line, got.block.shape, held)
        want, whole = np.asarray(want), got.gather()
        assert (whole.shape, whole.dtype) == (want.shape, want.dtype), (line, whole.shape, whole.dtype, want)
        if want.dtype.kind in "fc":
            np.testing.assert_allclose(whole, want, rtol=1e-12, atol=1e-12, err_msg=line)
        else:
            np.testing.assert_array_equal(whole, want, err_msg=line)
        return
    assert not isinstance(want, np.ndarray) or not want.ndim, (line, type(got))
    assert got == want, (line, got, want)


@pytest.mark.core
@pytest.mark.timeout(600)
@pytest.mark.parametrize("which", [0, 1])
def test_expressions_of_numpy_users(make_grid: Any, world: Any, which: int) -> None:
    grid = make_grid(grids(world.size)[which])
    plain = values()
    problems = []
    for number, line in enumerate(EXPRESSIONS):
        rng = np.random.default_rng(1000 * which + number)
        names = {"np": np, "after": after}
        used = set(re.findall(r"\b[A-Za-z]\b", line))
        for name, value in plain.items():
            if name not in used:
                continue
            choice = layouts(grid.axes, value.ndim, partial=value.dtype.kind in "fc" and name != "n")
            layout = grid.default_layout(value.shape) if rng.random() < 0.3 else choice[rng.integers(len(choice))]
            if line.startswith("after"):
                layout = layout.with_partial(())
            names[name] = terms(value, grid, layout) if layout.partial else pla.distribute(value, grid, layout)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            want = eval(line, {"np": np, "after": after, **plain})
            try:
                compare(eval(line, names), want, line)
                problem = ""
            except Exception as error:
                problem = f"{line}: {type(error).__name__}: {error}"
        found = next(filter(None, world.share(problem)), "")
        if found:
            problems.append(f"{found} {[f'{n}: {names[n].layout}' for n in plain if n in used]}")
    assert not problems, "\n\n".join(problems)


def test_there_are_two_hundred_of_them() -> None:
    assert len(set(EXPRESSIONS)) == len(EXPRESSIONS) >= 200


@pytest.mark.core
@pytest.mark.parametrize("which", [0, 1])
def test_the_last_of_equal_indices_stays(make_grid: Any, world: Any, which: int) -> None:
    """`A[index] = values` writes in C order of the index, on any grid, whichever rank holds index and values."""
    grid = make_grid(grids(world.size)[which])
    rng = np.random.default_rng(5)
    for n, m in ((7, 40), (1, 5), (3, 9)):
        index, new = rng.integers(0, n, m), np.arange(m) + 1.0
        want = np.zeros(n)
        want[index] = new
        for target in layouts(grid.axes, 1, partial=False):
            for where in layouts(grid.axes, 1, partial=False):
                a = pla.zeros((n,), grid, target)
                a[pla.distribute(index, grid, where)] = pla.distribute(new, grid, where)
                compare(a, want, f"{target} {where}")
                a = pla.zeros((n,), grid, target)
                a[index] = pla.distribute(new, grid, where)
                compare(a, want, f"{target}, the index on every rank")
    rows = np.zeros((3, 4))
    rows[[1, 1, 2, 1]] = np.arange(16.0).reshape(4, 4)
    for target in layouts(grid.axes, 2, partial=False):
        a = pla.zeros((3, 4), grid, target)
        a[[1, 1, 2, 1]] = np.arange(16.0).reshape(4, 4)
        compare(a, rows, f"rows of {target}")
