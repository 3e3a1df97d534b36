"""The stand-in for CuPy refuses what CuPy or a GPU would; run where it is the backend."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import cupy as cp
import ml_dtypes
import numpy as np
import pytest

pytestmark = pytest.mark.ranks(1)

HOST = np.ones((3, 4))


@pytest.fixture
def x() -> Any:
    return cp.arange(12.0).reshape(3, 4)


REFUSED: dict[str, tuple[type[Exception], Callable[[Any], Any]]] = {
    "host operand": (TypeError, lambda x: x + HOST),
    "host operand first": (TypeError, lambda x: HOST + x),
    "host target": (TypeError, lambda x: np.add(HOST, 1, out=x)),
    "device values into a host array": (TypeError, lambda x: HOST.__setitem__(0, x[0])),
    "host values into a device array": (TypeError, lambda x: x.__setitem__(0, HOST[0])),
    "host argument": (TypeError, lambda x: cp.sum(HOST)),
    "host array in a list": (TypeError, lambda x: cp.concatenate([x, HOST])),
    "host array in an einsum": (TypeError, lambda x: cp.einsum("ij,ij->i", x, HOST)),
    "list operand": (TypeError, lambda x: cp.add(x, [1, 2, 3, 4])),
    "conversion": (TypeError, lambda x: np.asarray(x)),
    "buffer": (TypeError, lambda x: memoryview(x)),
    "address": (AttributeError, lambda x: x.__cuda_array_interface__),
    "index": (TypeError, lambda x: range(x.argmax())),
    "slice": (TypeError, lambda x: x[: x.argmax()]),
    "sum(where=)": (TypeError, lambda x: cp.sum(x, where=x > 1)),
    "np.sum(where=)": (TypeError, lambda x: np.sum(x, where=x > 1)),
    "max(initial=)": (TypeError, lambda x: x.max(initial=0)),
    "missing function": (AttributeError, lambda x: cp.geomspace),
    "missing function through NumPy": (TypeError, lambda x: np.block([x])),
    "missing method": (AttributeError, lambda x: x.ctypes),
    "missing ufunc method": (NotImplementedError, lambda x: cp.maximum.reduce(x)),
    "unsupported dtype": (ValueError, lambda x: cp.zeros(3, np.longdouble)),
    "truth of an array": (ValueError, lambda x: bool(x)),
    "float of an array": (TypeError, lambda x: float(x)),
    "hash": (TypeError, lambda x: hash(x)),
    "set of another dtype": (TypeError, lambda x: x.set(HOST.astype("f4"))),
    "get into another shape": (ValueError, lambda x: x.get(out=np.empty(12))),
    "loop that CuPy lacks": (TypeError, lambda x: cp.logical_not(x.astype(complex))),
    "loop that raises": (TypeError, lambda x: cp.subtract(x > 1, x > 2)),
    "number that the dtype lacks": (OverflowError, lambda x: x.astype(np.uint8) + -1),
    "sums of complex numbers by index": (TypeError, lambda x: cp.add.at(x.astype(complex), 0, 1)),
    "condition without a dtype": (AttributeError, lambda x: cp.where(True, x, x)),
    "bitwise of bfloat16": (TypeError, lambda x: cp.bitwise_and(x.astype(ml_dtypes.bfloat16), 1)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(x: Any, case: str) -> None:
    error, call = REFUSED[case]
    with pytest.raises(error):
        call(x)


def test_reductions_and_elements_are_arrays(x: Any) -> None:
    for value in (x.sum(), x[1, 2], cp.max(x), np.linalg.norm(x), x.mean(axis=(0, 1)), x.argmax()):
        assert isinstance(value, cp.ndarray)
        assert value.shape == ()
    assert float(x.sum()) == 66.0
    assert f"{x.sum():.1f}" == "66.0"
    assert x.max() > 3


def test_loops_are_those_of_cupy(x: Any) -> None:
    """The first to which operands can be cast; with Python's numbers as NumPy has it."""
    assert cp.sign(x > 1).dtype == np.int8  # NumPy has none
    assert (x.astype(np.float32) + 1j).dtype == np.complex64
    assert (x.astype(np.uint8) + 1).dtype == np.uint8
    assert (x.astype(np.uint8) > -1).all()
    assert (x.astype(np.int8) / 2).dtype == np.float64
    assert cp.add(x, 1, dtype=np.float32).dtype == np.float32


def test_of_several_nans_any_is_the_extreme(x: Any) -> None:
    x[1, :2] = np.nan
    assert int(x.argmin()) == int(cp.argmax(x)) == 5  # NumPy's is the first
    assert x.argmin(axis=0).tolist() == [1, 1, 0, 0]


def test_arithmetic(x: Any) -> None:
    np.testing.assert_array_equal((x @ x.T).get(), x.get() @ x.get().T)
    np.testing.assert_array_equal((1 - x**2 / np.float64(3)).get(), 1 - x.get() ** 2 / 3)
    assert (x / 0).dtype == np.float64  # a GPU does not warn
    assert isinstance(np.exp(x), cp.ndarray)
    assert isinstance(np.concatenate([x, x]), cp.ndarray)


def test_identity_and_views(x: Any) -> None:
    assert cp.add(x, x, out=x) is x
    assert cp.asarray(x) is x
    assert cp.ascontiguousarray(x) is x
    assert x.astype(float, copy=False) is x
    x[1:][...] = 0
    assert float(x[2].sum()) == 0
    before = x
    x += 1
    assert x is before
    assert x.T.data.ptr == x.data.ptr


def test_copies(x: Any) -> None:
    for other in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), x.copy()):
        other[...] = 7
        assert float(x[0, 0]) == 0


def test_an_unfinished_copy_has_no_values_yet(x: Any) -> None:
    host = x.get(blocking=False)
    assert host[0, 1] != 1
    cp.cuda.get_current_stream().synchronize()
    assert host[0, 1] == 1


def test_a_page_locked_array_is_not_reused_while_it_is_copied(x: Any) -> None:
    memory = cp.cuda.alloc_pinned_memory(x.nbytes)
    host = np.frombuffer(memory, x.dtype, x.size).reshape(x.shape)
    x.set(host)
    host[...] = 3
    with pytest.raises(RuntimeError, match="overwritten while"):
        cp.cuda.get_current_stream().synchronize()


def test_another_gpus_array_is_refused(x: Any) -> None:
    with cp.cuda.Device(1):
        other = cp.ones((3, 4))
    with pytest.raises(RuntimeError, match="GPU 1 is used while GPU 0"):
        x + other


def test_mpi_does_not_see_the_memory(x: Any) -> None:
    from mpi4py import MPI  # under mpiexec only: the mark

    with pytest.raises(TypeError):
        MPI.COMM_SELF.Bcast(x)
