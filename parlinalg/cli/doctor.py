"""`parlinalg doctor`: what this machine gives, in a page."""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

import numpy as np

from parlinalg.backend import Backend, compiled, select_backend
from parlinalg.backend.blas import cores, gemm_rate, host_and_cores, sharing
from parlinalg.cli import gpu
from parlinalg.cli.parser import Commands, mpiexec
from parlinalg.comm import open_comm
from parlinalg.comm.shared import FOLDER
from parlinalg.comm.startup import about_mpi, bytes_held, clean, leftovers, report_left
from parlinalg.comm.streams import tell
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.planning.link_times import BANDWIDTH_BYTES, collectives
from parlinalg.planning.machine import load_machine, machine_text
from parlinalg.planning.measure import measure_disk, measure_machine
from parlinalg.units import format_bytes

EXTRAS = (
    ("mpi4py", "ranks that talk", "pip install mpi4py"),
    ("numba", "compiled kernels on CPUs", "pip install 'parlinalg[fast]'"),
    ("threadpoolctl", "BLAS threads set for every BLAS", "pip install 'parlinalg[train]'"),
    ("sklearn", "the digits example", "pip install 'parlinalg[train]'"),
    ("matplotlib", "plots of training", "pip install 'parlinalg[train]'"),
    ("tqdm", "the progress bar", "pip install 'parlinalg[train]'"),
    ("ml_dtypes", "bfloat16", "pip install 'parlinalg[train]'"),
    ("tokenizers", "texts as tokens of a tokenizer.json", "pip install 'parlinalg[text]'"),
    ("cupy", "GPUs", "pip install 'parlinalg[cupy13]' (CUDA 13), or parlinalg[cupy12] (CUDA 12)"),
    ("cudnn", "fused attention on GPUs", "pip install 'parlinalg[cudnn13]' (CUDA 13), or parlinalg[cudnn12] (CUDA 12)"),
)
TRIAL_SECONDS = 60
CONGESTION = Path("/proc/sys/net/ipv4/tcp_congestion_control")


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    doctor = commands.add_parser(
        "doctor", help="say what this machine gives", description="Say what this machine gives; also under mpiexec."
    )
    gpu.add_options(doctor)
    doctor.add_argument(
        "--clean", action="store_true",
        help=f"remove what dead runs of yours left in {FOLDER}, and do nothing else",
    )  # fmt: skip
    doctor.add_argument(
        "--machine", type=Path, metavar="FILE.toml",
        help="measure products, kernels and links in a minute (three where links are slow), write them as a machine's "
        "file, from which plans are made, and do nothing else; under mpiexec on any number of ranks and hosts",
    )  # fmt: skip
    doctor.add_argument(
        "--disk", type=Path, metavar="FOLDER",
        help="with --machine: also measure the disk of a folder, so that plans may offload to it",
    )  # fmt: skip
    doctor.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Examine, and print the page on rank 0; or clean up."""
    if args.clean:  # without MPI, which may have no room to start
        return _clean()
    if args.gpu:
        return gpu.run_gpu_checks(args.rows)
    if args.disk is not None and args.machine is None:
        raise ConfigError(f"--disk {args.disk} is measured for a machine's file: add --machine FILE.toml")
    if args.machine is not None:
        return _write_machine(args.machine, args.disk)
    mpi = about_mpi()
    comm = open_comm()
    with Grid({"ranks": comm.size}, comm) as grid:  # takes the backend and the BLAS threads that a run would
        hosts = comm.share(platform.node(), others="by rank")
        sharers = sharing(comm.share(host_and_cores(), others="by rank"), comm.rank)
        rates = comm.share([gemm_rate(grid.backend, dtype) for dtype in ("float32", "float64")], others="alike")
        measured = collectives(comm, grid.backend) if comm.size > 1 else []
        if comm.rank == 0:
            tell("\n".join(_page(mpi, grid, hosts, sharers, rates, measured)))
    return 0


def _write_machine(path: Path, disk: Path | None) -> int:
    """Measure this machine, and write its file on rank 0."""
    if path.suffix != ".toml":
        raise ConfigError(f"--machine {path}: the name of a machine's file ends with .toml")
    comm = open_comm()
    problem = ""
    if comm.rank == 0:  # before a minute is spent
        try:
            with open(path, "a", encoding="utf-8"):
                pass
        except OSError as error:
            problem = f"cannot write {path}: {error.strerror}"
    if problem := comm.share(problem)[0]:
        raise ConfigError(problem)
    start = perf_counter()
    measured = None if disk is None else measure_disk(comm, disk)  # first: its errors come soon
    found = replace(measure_machine(comm, path.stem), disk=measured)
    if comm.rank == 0:
        path.write_text(machine_text(found, "Rates are in operations, elements and bytes a second, times in seconds."))
        load_machine(path)
        tell(f"wrote {path}: {found.about}, in {perf_counter() - start:.0f} s")
    return 0


def _clean() -> int:
    """Remove the files of dead runs."""
    files = leftovers(0)
    size = format_bytes(bytes_held(files))
    clean(files)
    tell(f"removed {len(files)} file{'s' * (len(files) != 1)} of dead runs from {FOLDER}, {size}")
    return 0


def _page(
    mpi: dict[str, str],
    grid: Grid,
    hosts: list[str],
    sharers: int,
    rates: list[list[float]],
    measured: list[tuple[str, float, float]],
) -> list[str]:
    from parlinalg import __version__

    comm, backend, threads = grid.world, grid.backend, grid.threads
    lines = [f"parlinalg {__version__}, Python {platform.python_version()}, NumPy {np.__version__}", ""]
    lines += _rows("MPI", _mpi(mpi))
    by_host = ", ".join(f"{hosts.count(h)} on {h}" for h in dict.fromkeys(hosts))
    lines += _rows("ranks", [f"{comm.size} ({by_host})", *([] if comm.size > 1 else [_how_to_start()])])
    shared = "" if sharers == 1 else f", shared by {sharers} ranks"
    lines += _rows("cores", [f"{len(cores())} for rank 0{shared}"])
    if comm.local_size < comm.size and (tcp := congestion_control()):
        lines += _rows("TCP", [tcp])
    lines += _rows("BLAS", [f"{_blas()}, {threads} thread{'s' * (threads > 1)} a rank"])
    lines += _rows("memory", _shared_memory())
    lines += _rows("kernels", [compiled.about()])
    lines += _rows("backends", _backends(backend))
    lines += _rows("GEMM", [_rate(name, [r[i] for r in rates]) for i, name in enumerate(("float32", "float64"))])
    if measured:
        lines += ["", f"collectives over {comm.size} ranks ({backend.device}), the median of the ranks' times:"]
        size = format_bytes(BANDWIDTH_BYTES)
        lines.append(f"  {'operation':<16}{'8 B a rank':>14}{size + ': received a rank':>28}")
        for name, seconds, rate in measured:
            lines.append(f"  {name:<16}{seconds * 1e6:>11.1f} µs{rate / 1e9:>23.2f} GB/s")
    missing = [(what, how) for name, what, how in EXTRAS if find_spec(name) is None]
    lines += ["", "missing: nothing" if not missing else "missing:"]
    lines += [f"  {what}: {how}" for what, how in missing]
    return lines


def _shared_memory() -> list[str]:
    """Return the room for memory that ranks share, and what dead runs hold of it."""
    try:
        room = os.statvfs(FOLDER)
    except OSError:
        return [f"{FOLDER} is not there: ranks of a node share none"]
    free, whole = (format_bytes(blocks * room.f_frsize) for blocks in (room.f_bavail, room.f_blocks))
    left = leftovers()
    return [f"{FOLDER}: {free} of {whole} are free", *([report_left(left)] if left else [])]


def congestion_control() -> str:
    """Return how TCP finds its rate on this host, with a warning if it is BBR; empty where Linux does not say."""
    try:
        name = CONGESTION.read_text().strip()
    except OSError:
        return ""
    slow = ": slow where long blocks go both ways at once; cubic is not, if MPI runs over TCP" if "bbr" in name else ""
    return f"congestion control {name}{slow}"


def _rows(head: str, texts: list[str]) -> list[str]:
    return [f"{head if i == 0 else '':<10}{text}" for i, text in enumerate(texts)]


def _mpi(mpi: dict[str, str]) -> list[str]:
    if "problem" in mpi:
        return [f"none: {mpi['problem']}", "install one: pip install mpi4py mpich"]
    texts = [f"{mpi['library']} (standard {mpi['standard']}), mpi4py {mpi['mpi4py']}, threads: {mpi['threads']}"]
    if mpi["threads"] != "multiple":
        texts.append("the watchdog needs threads 'multiple': it is off")
    return texts


def _how_to_start() -> str:
    program = mpiexec()
    if program is None:
        return "there is no mpiexec on PATH: pip install mpich"
    return f"several: {program} -n 4 parlinalg doctor (measures the collectives too)"


def _blas() -> str:
    try:
        from threadpoolctl import threadpool_info
    except ImportError:
        blas = np.show_config("dicts")["Build Dependencies"]["blas"]
        return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()
    found = [i for i in threadpool_info() if i["user_api"] == "blas"]
    texts = (f"{i['internal_api']} {i.get('version') or ''} ({i.get('architecture', 'unknown')})" for i in found)
    return "; ".join(dict.fromkeys(texts)) or "unknown"


def _backends(backend: Backend) -> list[str]:
    try:
        gpu = select_backend("cupy")
    except ConfigError as error:
        return [f"numpy; {error}"]
    chosen = f"{backend.name} is chosen ({backend.device}); the first GPU is {gpu.device}"
    return [chosen, f"GPU buffers to MPI: {_gpu_buffers()}"]


def _gpu_buffers() -> str:
    """Return a text on whether MPI takes GPU memory, tried in a child process, which some MPIs end."""
    if "PMI_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ:
        return "tried by `parlinalg doctor` without mpiexec; staged through the host unless PARLINALG_CUDA_AWARE_MPI=1"
    try:
        done = subprocess.run(
            [sys.executable, "-c", "from parlinalg.comm.startup import try_gpu_buffers; try_gpu_buffers()"],
            capture_output=True, text=True, timeout=TRIAL_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "no (the trial hangs); they are staged through the host"
    if done.stdout.strip() == "yes":
        return "yes: PARLINALG_CUDA_AWARE_MPI=1 hands them over; by default they are staged through the host"
    return f"no (the trial ends with code {done.returncode}); they are staged through the host"


def _rate(dtype: str, rates: list[float]) -> str:
    mean = sum(rates) / len(rates)
    spread = f"({min(rates) / 1e9:.1f} to {max(rates) / 1e9:.1f})"
    each = "" if len(rates) == 1 else f" a rank, all {len(rates)} at work {spread}"
    return f"{dtype} {mean / 1e9:.1f} GFLOP/s{each}"
