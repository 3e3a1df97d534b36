"""The CUDA kernels, compiled by NVIDIA's run-time compiler for the GPUs in use; that needs no GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from parlinalg.backend import cuda
from parlinalg.backend.kernels import kernels

pytestmark = pytest.mark.serial
ARCHITECTURES = (75, 80, 90, 100)


class Compiler:
    """libnvrtc of the wheels `nvidia-cuda-nvrtc`, `nvidia-cuda-runtime` and `nvidia-cuda-cccl`."""

    def __init__(self, library: Path, headers: list[Path]) -> None:
        self.nvrtc = ctypes.CDLL(str(library))
        self.nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
        self.headers = headers

    def check(self, code: int, program: Any = None) -> None:
        if code:
            message = self.nvrtc.nvrtcGetErrorString(code).decode()
            raise RuntimeError(f"{message}\n{'' if program is None else self.text(program, 'ProgramLog')}")

    def text(self, program: Any, what: str) -> str:
        size = ctypes.c_size_t()
        self.check(getattr(self.nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self.check(getattr(self.nvrtc, f"nvrtcGet{what}")(program, buffer))
        return buffer.value.decode()

    def compile(self, source: str, architecture: int) -> str:
        """Return the PTX of a program for an architecture; raise a RuntimeError with the compiler's log."""
        program = ctypes.c_void_p()
        self.check(self.nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None))
        options = [*cuda.OPTIONS, f"--gpu-architecture=compute_{architecture}", *(f"-I{h}" for h in self.headers)]
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        try:
            self.check(self.nvrtc.nvrtcCompileProgram(program, len(options), given), program)
            return self.text(program, "PTX")
        finally:
            self.nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    found = sorted(library for root in roots for library in root.glob("cu*/lib/libnvrtc.so.*"))
    if not found:
        pytest.skip("cannot be had here: NVRTC (nvidia-cuda-nvrtc, for Linux)")
    return Compiler(found[-1], [found[-1].parent.parent / "include"])


@pytest.mark.parametrize("dtype", cuda.DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles(compiler: Compiler, architecture: int, dtype: str) -> None:
    names = {name for k in kernels() for name in re.findall(r"__global__ void (pla_\w+)\(", k.program)}
    assert len(names) >= 12
    ptx = compiler.compile(cuda.source(dtype), architecture)
    assert set(re.findall(r"\.visible \.entry (\w+)\(", ptx)) == names


def test_a_fault_in_a_kernel_is_found(compiler: Compiler) -> None:
    with pytest.raises(RuntimeError, match="undefined_number"):
        compiler.compile(cuda.source("float32").replace("W q = 0;", "W q = undefined_number;"), 80)
