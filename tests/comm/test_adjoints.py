"""Movement is linear: the adjoint of an all-gather is a reduce-scatter, of a broadcast a sum at its root."""

from __future__ import annotations

import numpy as np
import pytest

from parlinalg.comm import Comm


def inner(comm: Comm, a: np.ndarray, b: np.ndarray) -> float:
    total = np.array([np.dot(a.reshape(-1), b.reshape(-1))])
    comm.all_reduce(total)
    return float(total[0])


def block(n: int, comm: Comm, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, comm.rank]).standard_normal(n)


def test_all_gather_and_reduce_scatter(comm: Comm, counts: list[int], limit: None) -> None:
    x, y = block(counts[comm.rank], comm, 1), block(sum(counts), comm, 2)
    fx, fy = np.empty(sum(counts)), np.empty(counts[comm.rank])
    comm.all_gather(x, fx, counts)
    comm.reduce_scatter(y, fy, counts)
    assert inner(comm, fx, y) == pytest.approx(inner(comm, x, fy), rel=1e-13, abs=1e-13)


def test_all_reduce_is_its_own_adjoint(comm: Comm, limit: None) -> None:
    x, y = block(13, comm, 1), block(13, comm, 2)
    fx, fy = x.copy(), y.copy()
    comm.all_reduce(fx)
    comm.all_reduce(fy)
    assert inner(comm, fx, y) == pytest.approx(inner(comm, x, fy), rel=1e-13)


def test_broadcast_and_sum_at_the_root(comm: Comm, limit: None) -> None:
    for root in range(comm.size):
        x, y = block(13, comm, 1), block(13, comm, 2)
        x *= comm.rank == root
        fx, fy = x.copy(), np.empty(13 * (comm.rank == root))
        comm.broadcast(fx, root)
        comm.reduce_scatter(y, fy, [13 * (r == root) for r in range(comm.size)])
        at_root = np.zeros(13)
        at_root[: fy.size] = fy
        assert inner(comm, fx, y) == pytest.approx(inner(comm, x, at_root), rel=1e-13)


def test_all_to_all_is_an_isometry(comm: Comm, limit: None) -> None:
    table = np.random.default_rng(5).integers(0, 12, (comm.size, comm.size))
    gives, gets = table[comm.rank].tolist(), table[:, comm.rank].tolist()
    x, y = block(sum(gives), comm, 1), block(sum(gets), comm, 2)
    fx, fy = np.empty(sum(gets)), np.empty(sum(gives))
    comm.all_to_all(x, gives, fx, gets)
    comm.all_to_all(y, gets, fy, gives)
    assert inner(comm, fx, y) == pytest.approx(inner(comm, x, fy), rel=1e-13, abs=1e-13)
