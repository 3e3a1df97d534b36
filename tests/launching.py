"""Start programs on several ranks from a process that has no MPI itself."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
TELL_MPI = "from mpi4py import MPI; c = MPI.COMM_WORLD; c.rank or print(c.size, MPI.Get_library_version().split()[0])"


@cache
def mpiexec() -> tuple[str, ...]:
    """The mpiexec of the MPI that mpi4py loads, with the options that let ranks share cores.

    Raises
    ------
    RuntimeError
        If there is none, or it belongs to another MPI.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    if program is None:
        raise RuntimeError("no mpiexec beside Python or on PATH; pip install mpich")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=False).stdout
    command = (program, "--oversubscribe", "--allow-run-as-root") if "Open MPI" in version else (program,)
    told = launch(2, ["-c", TELL_MPI], command=command, timeout=60).stdout.split()
    if told[:1] != ["2"]:
        raise RuntimeError(
            f"{program} ({version.splitlines()[0]}) started 2 ranks that do not see each other ({' '.join(told)}): "
            "mpi4py loads another MPI; install one of mpich and openmpi beside it"
        )
    return command


def with_shared_memory(size: str, *command: str) -> tuple[str, ...]:
    """The command with a /dev/shm of its own and of this size, such as "64m"; skips the test where that needs root."""
    mount = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"', "sh")
    try:
        tried = subprocess.run([*mount, "true"], capture_output=True, timeout=30, check=False).returncode
    except OSError:
        tried = 127
    if tried:
        pytest.skip("cannot be had here: a /dev/shm of one's own needs root")
    return (*mount, *command)


def child_environment(extra: Mapping[str, str] = {}) -> dict[str, str]:
    """The environment of a rank: one thread each, this source tree, and nothing of an MPI that runs already."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PMI", "OMPI_", "PRTE_", "HYDRA"))}
    env.pop("PARLINALG_MPI", None)
    env.update(dict.fromkeys(THREADS, "1"), MPLBACKEND="Agg", PARLINALG_TIMEOUT=env.get("PARLINALG_TIMEOUT", "45"))
    env["OMPI_MCA_mpi_yield_when_idle"] = "1"  # Open MPI's waiting ranks would keep the cores they share with others
    env["MPIR_CVAR_ENABLE_HEAVY_YIELD"] = "1"  # MPICH's: they sleep, so that tests that wait leave the cores to others
    paths = [str(ROOT), env.get("PYTHONPATH", "")]
    if env.get("PARLINALG_TEST_BACKEND") == "cupy":
        paths.insert(0, str(ROOT / "tests" / "standin"))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    env.update(extra)
    return env


def launch(
    ranks: int,
    arguments: Sequence[str],
    *,
    env: Mapping[str, str] = {},
    timeout: float = 60,
    cwd: str | os.PathLike[str] | None = None,
    command: Sequence[str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` on so many ranks (0: without mpiexec); its standard output and error come back apart.

    `command` is what starts it, by default mpiexec.

    When the time is up all its processes are killed, and the return code is 124.
    """
    if command is None:
        command = mpiexec() if ranks else ()
    prefix = [*command, "-n", str(ranks)] if ranks else [*command]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [*prefix, sys.executable, *arguments],
            stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=child_environment(env), cwd=cwd or ROOT,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            code = 124
        finally:
            _end(process)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess([*prefix, *arguments], code, *texts)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher and its ranks: first by the launcher, which knows all of them, then by force."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    process.wait()
