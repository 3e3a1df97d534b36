"""The registry of kernels: every kernel is tried, and computed by the form that its blocks' backend can run."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg.backend import Backend, backend_of, compiled, cuda, kernels
from parlinalg.backend.cuda import DTYPES
from parlinalg.backend.kernels import Kernel, examples, samples
from parlinalg.backend.numpy import NumpyBackend
from parlinalg.backend.shapes import ShapesBackend, WhatIf
from parlinalg.testing.memory import array_memory

pytestmark = pytest.mark.serial
FOLDER = Path(kernels.__file__).parent


def made(alike: int = 1) -> Kernel:
    """A kernel that is not registered, with forms that say which was called."""

    def plain(x: Any, y: Any = None) -> str:
        """Return the plain form's name."""
        return "plain"

    found = Kernel(plain, alike)
    found.compiled(lambda x, y=None: NotImplemented if y is ... else "compiled")
    found.cuda("text")(lambda x, y=None: NotImplemented if y is ... else "cuda")
    return found


def test_every_kernel_is_tried_by_an_example(monkeypatch: pytest.MonkeyPatch) -> None:
    called, call = set(), Kernel.__call__

    def noting(self: Kernel, *args: Any, **named: Any) -> Any:
        called.add(self.name)
        return call(self, *args, **named)

    monkeypatch.setattr(Kernel, "__call__", noting)
    arrays = samples(33, 16)
    for each in examples():
        each.call(*(arrays[name] for name in each.inputs))
    names = [k.name for k in kernels.kernels()]
    assert len(names) == len(set(names)) >= 30
    assert called == set(names)
    assert len({e.name for e in examples()}) == len(examples())


ON_HOST = ("dropout", "sum of squares")
"""Examples that make arrays of their own on the host, or ask for a value."""


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("call", [e for e in examples() if e.name not in ON_HOST], ids=lambda call: call.name)
def test_scratch_is_that_of_imagined_blocks(call: Any, dtype: Any, full: bool) -> None:
    """At the peak of a call, with tiles and temporaries, arrays without values take what NumPy's take."""
    for rows, width in [(600, 160), *[(33, 16), (40_000, 8), (3, 70_000)] * full]:
        arrays = {
            name: a.astype(dtype) if a.dtype.kind == "f" else a
            for name, a in samples(rows, width).items() if name in call.inputs
        }  # fmt: skip
        inputs = [arrays[name] for name in call.inputs]
        call.call(*inputs)  # loops are compiled
        with array_memory() as memory:
            before = memory.held
            found = call.call(*inputs)
            held, peak = memory.held - before, memory.peak - before
        device = ShapesBackend(what_if=WhatIf())
        blocks = [device.from_host(a) for a in inputs]
        before, device.peak = device.held, device.held
        again = call.call(*blocks)
        kept = again if isinstance(again, tuple) else (again,)
        indices = sum(a.nbytes for a in (*inputs, *kept) if a.dtype.kind in "iu")  # have values, and do not count
        assert device.held - before == pytest.approx(held, abs=512 + indices)
        assert device.peak - before == pytest.approx(peak, rel=0.005, abs=512 + 8 * indices)
        del found, again


def test_every_module_of_the_folder_is_a_family_of_kernels() -> None:
    families = {k.name.partition(".")[0] for k in kernels.kernels()}
    assert families == {p.stem for p in FOLDER.iterdir() if p.stem not in ("__init__", "__pycache__")}


def test_a_family_needs_neither_numba_nor_cupy() -> None:
    for path in FOLDER.rglob("*.py"):
        if path.name != "loops.py":  # attention's, which its compiled form imports
            for node in ast.parse(path.read_text()).body:
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [getattr(node, "module", "")]
                assert not {str(n).split(".")[0] for n in names} & {"numba", "llvmlite", "cupy"}, path


def test_the_cuda_program_has_every_kernel_once() -> None:
    for dtype in DTYPES:
        text = cuda.source(dtype)
        assert all(text.count(k.program) == 1 for k in kernels.kernels() if k.program)
    assert sum(bool(k.program) for k in kernels.kernels()) >= 9


def test_a_call_takes_the_form_of_its_backend(monkeypatch: pytest.MonkeyPatch, tune: Any) -> None:
    tune(must=False, COMPILED_SIZE=4)
    monkeypatch.setattr(compiled, "available", lambda: True)
    tried = made()
    assert tried(np.ones(4)) == "compiled"
    assert tried(np.ones(3)) == "plain"  # small
    assert tried(np.ones(4, np.float16)) == "plain"
    assert tried(np.ones(4), ...) == "plain"  # the compiled form declines
    assert made(alike=2)(np.ones(4), np.ones(4, np.float32)) == "plain"
    monkeypatch.setattr(compiled, "available", lambda: False)
    assert tried(np.ones(4)) == "plain"
    assert tried.__doc__ == "Return the plain form's name."


def test_a_backend_with_cuda_takes_the_cuda_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NumpyBackend, "cuda", True)
    monkeypatch.setattr(cuda, "_module", lambda xp, name: object())
    tried = made()
    assert tried(np.ones(3)) == "cuda"
    assert tried(np.ones(0)) == "plain"
    assert tried(np.ones(3, int)) == "plain"
    assert tried(np.ones(3), ...) == "plain"
    monkeypatch.setattr(cuda, "_module", lambda xp, name: None)  # CuPy cannot compile
    assert tried(np.ones(3)) == "plain"


def test_the_flags_of_numpy() -> None:
    backend: Backend = backend_of(np.ones(1))
    assert (backend.host_memory, backend.cpu, backend.cuda, backend.adds_products) == (True, True, False, True)


def test_nothing_outside_asks_for_a_backends_name() -> None:
    """What blocks can do is said by the flags of their backend."""
    root = FOLDER.parent.parent
    for path in root.rglob("*.py"):
        if FOLDER.parent in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                for side in (node.left, *node.comparators):
                    text = ast.unparse(side)
                    assert not text.endswith("backend.name"), f"{path}:{node.lineno}: ask a flag of the backend"
                    bare = any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops)
                    assert not (bare and text == "np"), f"{path}:{node.lineno}: ask a flag of the backend"


def test_a_kernel_is_importable_by_the_name_that_it_is_registered_under() -> None:
    for found in kernels.kernels():
        family, _, name = found.name.rpartition(".")
        assert getattr(importlib.import_module(f"parlinalg.backend.kernels.{family}"), name) is found
