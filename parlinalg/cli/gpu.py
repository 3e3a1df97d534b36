"""`parlinalg doctor --gpu`: compares what GPUs compute and communicate with NumPy, and measures the rates."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from parlinalg.array.create import dtype_named
from parlinalg.backend import Backend, cuda, select_backend
from parlinalg.backend.blas import gemm_rate, gemm_side
from parlinalg.backend.kernels import examples, samples
from parlinalg.cli.parser import mpiexec
from parlinalg.comm import Comm, open_comm
from parlinalg.comm.startup import launched
from parlinalg.comm.streams import tell
from parlinalg.errors import CommError, ConfigError
from parlinalg.grid import Grid, factorizations
from parlinalg.layout import Layout
from parlinalg.planning.kernel_rates import DeviceClock
from parlinalg.planning.link_times import BANDWIDTH_BYTES, collectives
from parlinalg.units import format_bytes

Block = Any
ROWS, WIDTH = 4096, 1024
"""The blocks that kernels are tried on: large enough to show a GPU's rate."""
ALLOWED = {"float64": 256.0, "float32": 256.0, "float16": 4.0, "bfloat16": 4.0}
"""Roundings (units of the dtype's eps, relative to the largest element) by which a result may differ from NumPy's in
float64.  Sums of many rows and exponentials take tens of them in 32 and 64 bits; 16-bit results are rounded once."""
LIMIT = 900.0  # seconds; the examination takes less than 180 where GPUs work

PLAN = """with one, this command would, in under three minutes:
  devices       list the GPUs, the driver, and the versions of CUDA, CuPy and NCCL
  rates         measure memory, copies to and from the host, and products of matrices in four dtypes
  kernels       compile the CUDA kernels for float64, float32, float16 and bfloat16, and compare each with NumPy
  collectives   compare each collective with the exact answer, staged through the host and by NCCL, and measure it
  products      multiply distributed matrices in four dtypes, and compare with NumPy
  training      make three steps of a small GPT on every scheme, and compare the losses with NumPy's on one rank
and end with code 1 if anything differs; `mpiexec -n RANKS parlinalg doctor --gpu` takes more ranks or several hosts"""


class ReportRow(NamedTuple):
    """A line of the table: what was tried, its result for people, and the problem, if there is one."""

    part: str
    what: str
    result: str
    problem: str = ""


class Check(NamedTuple):
    """A call of a kernel, which returns a block or several, and float64 or integer arrays to make it with."""

    name: str
    call: Callable[..., Any]
    inputs: tuple[np.ndarray, ...]

    def __call__(self, *blocks: Block) -> tuple[Block, ...]:
        found = self.call(*blocks)
        return found if isinstance(found, tuple) else (found,)


def run_gpu_checks(rows: int = ROWS) -> int:
    """Examine the GPUs, and print the table on rank 0.

    Parameters
    ----------
    rows : int
        The number of rows, of 1024 elements, that the kernels are tried on.

    Returns
    -------
    int
        The exit code: 0, also without a GPU; 1 if anything differs or fails.
    """
    start, alone = perf_counter(), launched().by == "one"
    try:
        select_backend("cupy")
    except ConfigError as error:
        if alone:
            tell(f"no GPU can be used here: {error}\n{PLAN}")
            return 0
        raise
    program = mpiexec() if alone else None
    if program is not None:  # this process must not start MPI, or the ranks would inherit it
        return _under_mpiexec(program, rows)
    comm = open_comm()
    failed = _examine(comm, rows, start)
    return int(bool(failed))


def _under_mpiexec(program: str, rows: int) -> int:
    """Run this command on several ranks: one a GPU, so that NCCL carries their blocks, or four on a single GPU."""
    devices = len(_devices())
    ranks = min(devices, 8) if devices > 1 else 4
    command = [program, "-n", str(ranks), sys.executable, "-m", "parlinalg", "doctor", "--gpu", "--rows", str(rows)]
    tell(f"running {' '.join(command)}")
    try:
        return subprocess.run(command, check=False, timeout=LIMIT).returncode
    except subprocess.TimeoutExpired:
        tell(f"failed: it took more than {LIMIT:.0f} s; the table ends where it hangs")
        return 1


def _examine(comm: Comm, rows: int, start: float) -> list[ReportRow]:
    """Try everything, printing as it goes; return the rows that failed.  Collective."""
    failed: list[ReportRow] = []
    with Grid({"ranks": comm.size}, comm, "cupy") as grid:
        backend = grid.backend
        parts: tuple[Callable[[], Iterator[ReportRow]], ...] = (
            lambda: _about(backend, comm), lambda: _alone(comm, backend, _rates(backend)),
            lambda: _alone(comm, backend, kernel_rows(backend, rows)),
            lambda: _collectives(comm, backend), lambda: _products(comm, backend), lambda: _training(comm, backend),
        )  # fmt: skip
        part = ""
        for make in parts:
            for row in make():
                worst = _agreed(comm, row)
                if comm.rank == 0:
                    mark = f"FAILED: {worst.problem}" if worst.problem else ""
                    tell(f"{row.part if row.part != part else '':<14}{row.what:<34}{worst.result:<44}{mark}".rstrip())
                part = row.part
                failed += [worst] if worst.problem else []
    if comm.rank == 0:
        verdict = f"{len(failed)} of the checks failed" if failed else "all checks passed"
        tell(f"\n{verdict}, in {perf_counter() - start:.0f} s")
    return failed


def _alone(comm: Comm, backend: Backend, rows: Iterator[ReportRow]) -> Iterator[ReportRow]:
    """Yield the rows of a rank that has its GPU to itself: the first on it; meanwhile the others wait.  Collective."""
    places = comm.share((comm.nodes[comm.rank], backend.device), others="alike")
    first = places.index(places[comm.rank]) == comm.rank
    while True:
        row = next(rows, None) if first else None
        told = comm.share(row, others="alike")
        if told[0] is None:
            return
        yield row or ReportRow(*told[0])._replace(problem="")


def _agreed(comm: Comm, row: ReportRow) -> ReportRow:
    """Return this row, with the problems of all ranks.  Collective."""
    problems = comm.share(row.problem, others="alike")
    mine = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
    return row._replace(problem="; ".join(mine) if comm.size > 1 else row.problem)


# ------------------------------------------------------------------------------------- one GPU


def _devices() -> list[str]:
    from parlinalg.backend.cupy import devices

    return devices()


def _about(backend: Backend, comm: Comm) -> Iterator[ReportRow]:
    mine = comm.share(backend.device, others="alike")
    from parlinalg.backend.cupy import versions

    yield from (ReportRow("devices", f"GPU {i}", text) for i, text in enumerate(_devices()))
    yield from (ReportRow("devices", what, text) for what, text in versions().items())
    for device in dict.fromkeys(mine):
        ranks = [rank for rank, theirs in enumerate(mine) if theirs == device]
        yield ReportRow("devices", f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}", device)


def _rates(backend: Backend) -> Iterator[ReportRow]:
    block, host = backend.zeros(2**25, np.float64), backend.staging(2**25, np.float64)
    n = host.nbytes
    host[:] = 1
    seconds = timed(backend, block.copy)
    yield ReportRow("rates", "memory, read and written", f"{2 * n / seconds / 1e9:.0f} GB/s")
    seconds = timed(backend, lambda: backend.copy_from_host(host, block))
    yield ReportRow("rates", "host to device", f"{n / seconds / 1e9:.1f} GB/s")
    seconds = timed(backend, lambda: backend.copy_to_host(block, host))
    yield ReportRow("rates", "device to host", f"{n / seconds / 1e9:.1f} GB/s", "" if host.all() else "values are lost")
    for dtype in _dtypes():
        side = gemm_side(backend, dtype)
        rate = gemm_rate(backend, dtype, side)
        yield ReportRow("rates", f"product of {side}×{side}, {dtype}", f"{rate / 1e12:.2f} TFLOP/s")


def _dtypes() -> list[str]:
    """Return the dtypes of kernels that NumPy has here: bfloat16 comes with ml_dtypes."""
    found = []
    for name in cuda.DTYPES:
        try:
            dtype_named(name)
        except ImportError:
            continue
        found.append(name)
    return found


def timed(backend: Backend, call: Callable[[], Any]) -> float:
    """Return the seconds that the device takes for a call, after one to warm up: the least of several in 10 ms."""
    clock = DeviceClock(backend)
    clock(call)
    least, start = math.inf, perf_counter()
    while least == math.inf or perf_counter() - start < 0.01:
        least = min(least, clock(call))
    return least


def kernel_checks(rows: int, width: int = WIDTH) -> list[Check]:
    """Return a call of every kernel with arrays of so many rows to try it on."""
    arrays = samples(rows, width)
    return [Check(e.name, e.call, tuple(arrays[name] for name in e.inputs)) for e in examples()]


def error_of(check: Check, backend: Backend, dtype: str) -> tuple[float, float, int]:
    """Return a kernel's largest difference from NumPy in float64, in roundings; its seconds; and the bytes it moves.

    NumPy computes from the same rounded inputs, in float64; differences are relative to the largest element.
    """
    kind = dtype_named(dtype)
    given = [a.astype(kind) if a.dtype.kind == "f" else a for a in check.inputs]
    blocks = [backend.from_host(a) for a in given]
    found = check(*blocks)
    wide = [a.astype(np.float64) if a.dtype == kind else a for a in given]
    known = check(*wide)
    worst = 0.0
    for mine, right in zip(found, known, strict=True):
        host = backend.to_host(mine).astype(np.float64)
        difference = np.abs(host - right).max(initial=0.0)
        worst = max(worst, float(difference / np.abs(right).max(initial=np.finfo(np.float64).tiny)))
        if not np.isfinite(host).all():
            worst = math.inf
    size = sum(b.nbytes for b in (*blocks, *found))
    return worst / _eps(dtype), timed(backend, lambda: check(*blocks)), size


def _eps(dtype: str) -> float:
    return {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]


def kernel_rows(backend: Backend, rows: int) -> Iterator[ReportRow]:
    """Yield how far each kernel is from NumPy in each dtype, and its rate."""
    for dtype in _dtypes():
        fused = cuda.ready(backend.zeros(1, dtype_named(dtype)))
        yield ReportRow("kernels", dtype, "CUDA kernels are compiled" if fused else "unfused: no CUDA compiler here")
        for check in kernel_checks(rows):
            what, problem = f"  {check.name}", ""
            try:
                error, seconds, size = error_of(check, backend, dtype)
                result = f"{error:6.1f} roundings {seconds * 1e3:9.3f} ms {size / seconds / 1e9:8.1f} GB/s"
                if not error <= ALLOWED[dtype]:
                    problem = f"{error:.3g} roundings of {dtype}, of which {ALLOWED[dtype]:.0f} are allowed"
            except Exception as failure:  # one kernel that fails must not hide the others
                result, problem = "", f"{type(failure).__name__}: {failure}"
            yield ReportRow("kernels", what, result, problem)


# ------------------------------------------------------------------------------------- several ranks


def _transports(comm: Comm) -> Iterator[tuple[str, Comm | None, str]]:
    """Return the ways blocks may travel: (name, communicator or None, why not)."""
    yield "staged by MPI", comm, ""
    inner = comm.sub(range(comm.size), ("nccl",))
    try:
        from parlinalg.comm.nccl import nccl_over

        over = nccl_over(inner)
    except (CommError, ImportError) as error:
        inner.free()
        yield "NCCL", None, str(error)
    else:
        yield "NCCL", over, ""


def _collectives(comm: Comm, backend: Backend) -> Iterator[ReportRow]:
    exact = [*_dtypes(), "complex64", "int64"]  # whole numbers, so that every answer is exact
    for name, way, why in _transports(comm):
        if way is None:
            yield ReportRow("collectives", name, f"not tried: {why}")
            continue
        for op in CALLS:
            wrong = [dtype for dtype in exact if not collective_is_right(way, backend, op, dtype)]
            problem = f"wrong values in {', '.join(wrong)}" if wrong else ""
            yield ReportRow("collectives", f"{name}, {op}", "" if wrong else "exact", problem)
        if way.size > 1:
            for op, seconds, rate in collectives(way, backend):
                text = f"8 B {seconds * 1e6:.1f} µs, {format_bytes(BANDWIDTH_BYTES)} {rate / 1e9:.2f} GB/s received"
                yield ReportRow("collectives", f"{name}, {op}", text)
        if way is not comm:
            way.free()


def collective_is_right(comm: Comm, backend: Backend, op: str, dtype: str) -> bool:
    """Return True if a collective of uneven pieces of whole numbers gives the exact answer here.  Collective."""
    kind = dtype_named(dtype)
    counts = [3 * rank + 1 for rank in range(comm.size)]
    right, out = CALLS[op](comm, counts, lambda array: backend.from_host(np.asarray(array).astype(kind)))
    backend.synchronize()
    return bool(np.array_equal(backend.to_host(out), np.asarray(right, kind)))


def _all_gather(comm: Comm, counts: list[int], put: Callable[[Any], Block]) -> tuple[np.ndarray, Block]:
    mine, out = put(np.full(counts[comm.rank], comm.rank)), put(np.zeros(sum(counts)))
    comm.all_gather(mine, out, counts)
    return np.repeat(np.arange(comm.size), counts), out


def _reduce_scatter(comm: Comm, counts: list[int], put: Callable[[Any], Block]) -> tuple[np.ndarray, Block]:
    whole, at = np.arange(sum(counts)) % 13, sum(counts[: comm.rank])
    mine, out = put(whole * (comm.rank + 1)), put(np.zeros(counts[comm.rank]))
    comm.reduce_scatter(mine, out, counts)
    return whole[at : at + counts[comm.rank]] * (comm.size * (comm.size + 1) // 2), out


def _all_reduce(comm: Comm, counts: list[int], put: Callable[[Any], Block]) -> tuple[np.ndarray, Block]:
    whole = np.arange(sum(counts)) % 13
    out = put(whole * (comm.rank + 1))
    comm.all_reduce(out)
    return whole * (comm.size * (comm.size + 1) // 2), out


def _broadcast(comm: Comm, counts: list[int], put: Callable[[Any], Block]) -> tuple[np.ndarray, Block]:
    whole = np.arange(sum(counts)) % 13
    out = put(whole * (comm.rank == comm.size - 1))
    comm.broadcast(out, comm.size - 1)
    return whole, out


def _all_to_all(comm: Comm, counts: list[int], put: Callable[[Any], Block]) -> tuple[np.ndarray, Block]:
    numbers = np.arange(comm.size) + comm.rank
    mine, theirs = put(np.repeat(numbers, counts)), [counts[comm.rank]] * comm.size
    out = put(np.zeros(sum(theirs)))
    comm.all_to_all(mine, counts, out, theirs)
    return np.repeat(numbers, theirs), out


CALLS: dict[str, Callable[..., Any]] = {
    "all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "all_reduce": _all_reduce, "broadcast": _broadcast,
    "all_to_all": _all_to_all,
}  # fmt: skip


def _products(comm: Comm, backend: Backend) -> Iterator[ReportRow]:
    from parlinalg.array import distribute
    from parlinalg.matmul import matmul

    rows, columns = max(factorizations(comm.size, 2), key=min)
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((513, 700)), rng.standard_normal((700, 259))
    with Grid({"r": rows, "c": columns}, comm, backend.name) as grid:
        for dtype in _dtypes():
            kind = dtype_named(dtype)
            A, B = (distribute(m.astype(kind), grid, Layout("r", "c")) for m in (a, b))
            product = (A @ B).gather().astype(np.float64)
            right = a.astype(kind).astype(np.float64) @ b.astype(kind).astype(np.float64)
            error = float(np.abs(product - right).max() / np.abs(right).max()) / _eps(dtype)
            start = perf_counter()  # the second product: all is compiled
            matmul(A, B)
            backend.synchronize()
            seconds = perf_counter() - start
            allowed = ALLOWED[dtype]
            problem = "" if error <= allowed else f"{error:.3g} roundings, of which {allowed:.0f} are allowed"
            result = f"{error:6.1f} roundings {max(comm.share(seconds, others='alike')) * 1e3:9.3f} ms"
            yield ReportRow("products", f"513×700×259 on {rows}×{columns}, {dtype}", result, problem)


def _training(comm: Comm, backend: Backend) -> Iterator[ReportRow]:
    from parlinalg import schemes

    with Grid({"one": 1}, comm.sub((comm.rank,), ()), "numpy") as one:
        known, _ = _losses(schemes.discover()["serial"].SCHEME, one)
    for name, file in schemes.discover().items():
        try:
            sizes = file.sizes(comm.size) if file.SCHEME.axes else {"replica": comm.size}
        except ConfigError:  # a cube or a square that this number of ranks does not make: the first shape there is
            shapes = factorizations(comm.size, len(file.SCHEME.axes))
            sizes = dict(zip(file.SCHEME.axes, max(shapes, key=min), strict=True))
        with Grid(sizes, comm, backend.name) as grid:
            found, seconds = _losses(file.SCHEME, grid)
        error = max(abs(mine - right) / abs(right) for mine, right in zip(found, known, strict=True))
        problem = "" if error <= 1e-10 else f"losses differ by {error:.1e}, of which 1e-10 is allowed"
        shape = "×".join(map(str, sizes.values()))
        result = f"losses within {error:.1e} {max(comm.share(seconds, others='alike')) * 1e3:9.1f} ms a step"
        yield ReportRow("training", f"{name}, {shape}", result, problem)


def _losses(scheme: Any, grid: Grid) -> tuple[list[float], float]:
    """Return the losses of three steps of a small GPT in float64, and the seconds of the last one.  Collective."""
    from parlinalg.array import distribute
    from parlinalg.autograd import ops
    from parlinalg.nn import GPT
    from parlinalg.optim import AdamW
    from parlinalg.parallel import GradientReducer

    model = GPT(
        vocab_size=53, max_position_embeddings=16, hidden_size=48, num_hidden_layers=2, num_attention_heads=12,
        scheme=scheme, grid=grid, dtype="float64", seed=0,
    )  # fmt: skip
    GradientReducer(model.parameters())
    optimizer = AdamW(model.parameters(), 0.01)
    rng = np.random.default_rng(2)
    losses, seconds = [], 0.0
    for _ in range(3):
        ids, targets = rng.integers(0, 53, (2, 12, 16))
        start = perf_counter()
        shown = distribute(ids, grid, model.ids_layout)
        loss = ops.cross_entropy(model(shown), distribute(targets, grid, model.targets_layout))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds = perf_counter() - start
    return losses, seconds


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the examination to those of `doctor`."""
    parser.add_argument("--gpu", action="store_true", help="compare all that GPUs compute here with NumPy, with rates")
    parser.add_argument(
        "--rows", type=int, default=ROWS, help="rows of the blocks that kernels are tried on (%(default)s)"
    )
