"""BLAS threads: the cores in the affinity mask over the ranks that share them, never above the user's limit."""

from __future__ import annotations

import sys

import numpy as np
import pytest

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


def test_only_ranks_on_the_same_cores_share_them() -> None:
    bound = [["a", "3"], ["a", "c"], ["b", "3"], ["b", "f"]]
    assert [blas.sharing(bound, rank) for rank in range(4)] == [1, 1, 2, 2]
    assert blas.sharing([blas.place()], 0) == 1
