"""What the benchmarks share: whether the machine is idle, how ranks are started, medians, tables and JSON.

Nothing here imports MPI: the scripts start the ranks of every piece they compare, one piece at a time.
"""

from __future__ import annotations

import argparse
import atexit
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median, quantiles
from typing import Any

BENCH = Path(__file__).resolve().parent
ROOT = BENCH.parent
BUSY = 0.05
"""The share of the cores that may be in use by others when a measurement begins."""
LAUNCHER_VARIABLES = ("PMI", "OMPI_", "PRTE_", "HYDRA")
GROUPS = Path("/sys/fs/cgroup")


class Unavailable(Exception):
    """A piece that cannot be had here; its text is the reason."""


def cores() -> int:
    """The cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ticks() -> tuple[int, int]:
    """Clock ticks since boot: (busy, all), over all cores; time stolen by other virtual machines is busy."""
    fields = [int(f) for f in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(fields) - fields[3] - fields[4], sum(fields)


def busy(seconds: float = 1.0) -> float:
    """The share of all cores in use during the next `seconds`, from 0 to 1."""
    before = _ticks()
    time.sleep(seconds)
    after = _ticks()
    return (after[0] - before[0]) / max(1, after[1] - before[1])


def wait_until_idle(limit: float, seconds: float = 1.0) -> float:
    """Wait at most `limit` seconds until the cores are idle; returns the share last seen in use."""
    end = time.monotonic() + limit
    while (share := busy(seconds)) > BUSY and time.monotonic() < end:
        time.sleep(min(2.0, limit))
    return share


def busy_at_start(limit: float, crowded: bool) -> float | None:
    """The share in use as a measurement begins; None, told, if the cores are not idle in `limit` seconds nor may be."""
    share = wait_until_idle(0 if crowded else limit)
    if share > BUSY and not crowded:
        print(
            f"others use {100 * share:.0f}% of the cores: wait until they are idle, or measure anyway with --crowded",
            file=sys.stderr,
        )
        return None
    return share


def machine() -> dict[str, Any]:
    """The machine and the software that a figure belongs to."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    caches = {f: _read(f"/sys/devices/system/cpu/cpu0/cache/index{i}/size") for i, f in ((2, "L2"), (3, "L3"))}
    memory = next((ln.split()[1] for ln in _read("/proc/meminfo").splitlines() if ln.startswith("MemTotal")), "0")
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": cores(),
        **{name: size for name, size in caches.items() if size},
        "ranks_in_one_scheduling_group": in_one_group(),
        "memory_gib": round(int(memory) / 2**20, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: found for name in ("numpy", "mpi4py", "mpich", "openmpi") if (found := installed(name))},
    }


def installed(name: str) -> str | None:
    """The version of an installed distribution."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def mpiexec(python: str = sys.executable) -> list[str]:
    """The mpiexec beside a Python (its MPI from PyPI), else the one on PATH, with what lets ranks share cores."""
    beside = Path(python).parent / "mpiexec"
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    if program is None:
        raise Unavailable(f"no mpiexec beside {python} or on PATH: pip install mpich")
    told = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    return [program, "--oversubscribe", "--allow-run-as-root"] if "Open MPI" in told else [program]


def environment(ranks: int = 1, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a piece: BLAS threads × ranks = cores, this source tree first, no MPI's leftovers."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    threads = str(max(1, cores() // ranks))
    env.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), str(BENCH), env.get("PYTHONPATH", "")]))
    env.update(extra or {})
    return env


def group_folder(name: str) -> Path:
    """Return the folder of a control group of processors: of version 1 of control groups, or of version 2."""
    first = GROUPS / "cpu"
    return (first if first.is_dir() else GROUPS) / name


def make_group(name: str, sessions: int) -> None:
    """Make a control group of processors, with the weight of so many sessions, where this is possible.

    Linux puts each session into a scheduling group of its own (sched(7), autogroup), and Hydra starts each rank in a
    session.  A rank that waits yields its core, but only to ranks of its group: a rank alone in its group keeps the
    core until the clock's next tick.  In one control group all ranks yield to each other, as under batch systems.

    A group had better be of processes bound to one core.  Where it is busy on several, Linux gives it another weight on
    each of them at every tick, and some versions (6.18 does; "Revert 6d71a9c61604" of February 2026 mends it) then lose
    count of the time it has had: what is not of the group does not run on that core until the group sleeps.  Runs on
    emulated hosts stood so, their ranks in one group: a kernel thread that merges pages (khugepaged) held the lock of a
    rank's memory, and did not run beside three ranks that waited for that one and yielded their core.
    """
    group = group_folder(name)
    with suppress(OSError):
        group.mkdir()
        if (shares := group / "cpu.shares").exists():
            shares.write_text(str(1024 * sessions))
        else:
            (GROUPS / "cgroup.subtree_control").write_text("+cpu")
            (group / "cpu.weight").write_text(str(min(10_000, 100 * sessions)))


def remove_group(name: str) -> None:
    """Remove a control group; leave it if it is not there or a process of it has not ended."""
    with suppress(OSError):
        group_folder(name).rmdir()


def joined(name: str, command: Sequence[str]) -> list[str]:
    """Return a command that runs another one in a control group, if the group is there."""
    group = group_folder(name)
    return [*(["sh", "-c", 'echo $$ >"$0/cgroup.procs"; exec "$@"', str(group)] if group.is_dir() else []), *command]


@cache
def own_group() -> str:
    """Return the name of the control group of all that this process runs, which goes as this process ends.

    None is made where sessions are not apart in any case.
    """
    name = f"parlinalg{os.getpid()}"
    if sessions_apart():
        make_group(name, cores())
        atexit.register(remove_group, name)
    return name


def sessions_apart() -> bool:
    """Return True if Linux gives each session of this process a scheduling group of its own."""
    here = [line.split(":", 2)[1:] for line in _read("/proc/self/cgroup").splitlines()]
    grouped = any(path != "/" for names, path in here if names == "" or "cpu" in names.split(","))
    return _read("/proc/sys/kernel/sched_autogroup_enabled") == "1" and not grouped


def in_one_group() -> bool:
    """Return True if all ranks of a piece that `ran` runs are in one scheduling group."""
    return group_folder(own_group()).is_dir() or not sessions_apart()


def run(command: Sequence[str], env: Mapping[str, str], timeout: float = 600) -> Any:
    """Run a piece as `ran` does, and return what it tells: JSON on the last line of its output."""
    return json.loads(ran(command, env, timeout).strip().splitlines()[-1])


def ran(command: Sequence[str], env: Mapping[str, str], timeout: float = 600) -> str:
    """Run a command in a session of its own, all ranks in one control group if possible, and return its output.

    Raises
    ------
    RuntimeError
        If it fails or takes longer than `timeout` seconds; its processes are ended.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    with subprocess.Popen(
        joined(own_group(), command), **pipes, text=True, env=dict(env), start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{' '.join(command)} took longer than {timeout} s") from None
        finally:
            end(process)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed with {process.returncode}:\n{out[-2000:]}\n{err[-2000:]}")
    return out


def end(process: subprocess.Popen[Any]) -> None:
    """End a process that leads its session, first by asking (a launcher ends its ranks), then by force."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def in_turns(parser: argparse.ArgumentParser) -> None:
    """The options of a script whose pieces take turns."""
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2, help="steps not counted")
    parser.add_argument("--steps", type=int, default=4, help="timed steps a piece and round")
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for idle cores")
    parser.add_argument("--crowded", action="store_true", help="measure even if the cores are not idle, and say so")
    parser.add_argument("--json", help="write the result here")


def piece(text: str) -> str:
    """An argument that names a piece: library:kind:ranks."""
    parts = text.split(":")
    if len(parts) != 3 or not all(parts) or not parts[2].isdigit() or int(parts[2]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not library:kind:ranks, such as torch:serial:1")
    return text


def begin(args: argparse.Namespace, missing: Callable[[], Mapping[str, str]]) -> tuple[float, dict[str, str]] | None:
    """The share of the cores in use, and the pieces that cannot be had with the reasons, told; None if the cores are
    not idle."""
    stop_cleanly()
    share = busy_at_start(args.wait, args.crowded)
    if share is None:
        return None
    lacks = dict(missing())
    for piece, reason in lacks.items():
        print(f"without {piece}: {reason}", file=sys.stderr)
    return share, lacks


def stop_cleanly() -> None:
    """Let SIGTERM raise SystemExit, so that what was started is ended."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high


def disagreements(rows: Sequence[Mapping[str, Any]], tolerance: float) -> list[str]:
    """Pieces whose losses are not those of the first, relative; each with its losses."""
    odd = []
    for row in rows[1:]:
        want, have = rows[0]["losses"], row["losses"]
        apart = [abs(a - b) / abs(a) for a, b in zip(want, have)]
        if not all(each <= tolerance for each in apart):  # nor where one is no number
            worst = max(apart, key=lambda each: (math.isnan(each), each))
            odd.append(f"losses of {row['piece']} and {rows[0]['piece']} differ by {worst:.1e}: {have} {want}")
    return odd


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table whose columns are aligned for reading as text too."""
    texts = [[str(cell) for cell in row] for row in (head, *rows)]
    wide = [max(len(row[c]) for row in texts) for c in range(len(head))]
    lines = [f"| {' | '.join(cell.ljust(w) for cell, w in zip(row, wide))} |" for row in texts]
    return "\n".join([lines[0], f"|{'|'.join('-' * (w + 2) for w in wide)}|", *lines[1:]])


def write_json(path: str | os.PathLike[str], result: Mapping[str, Any]) -> None:
    """Write a result with the machine it belongs to; the file is complete or not there."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f"{target.name}.part")
    aside.write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    aside.replace(target)
