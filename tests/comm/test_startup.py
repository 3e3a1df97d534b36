"""MPI leaves nothing in shared memory, and says so where there is too little of it."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from parlinalg.cli import doctor, main
from parlinalg.comm import startup
from tests.launching import launch, mpiexec, with_shared_memory

pytestmark = [pytest.mark.serial, pytest.mark.timeout(120)]

MAPPED = """
from mpi4py import rc
from parlinalg.comm import open_comm
comm = open_comm()
lines = [line.split(maxsplit=5)[-1].strip() for line in open("/proc/self/maps") if "/dev/shm/" in line]
from mpi4py import MPI
assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
comm.barrier()
named = [line for line in lines if not line.endswith("(deleted)")]
assert MPI.get_vendor()[0] != "MPICH" or (lines and not named), (lines, named)
"""


def test_memory_of_mpi_has_no_name_once_mpi_runs() -> None:
    for first in ("", "from mpi4py import MPI\n"):
        done = launch(2, ["-c", first + MAPPED])
        assert done.returncode == 0, done.stderr


def test_settings_of_mpi4py_hold() -> None:
    program = (
        "import mpi4py\nmpi4py.rc.thread_level = 'serialized'\n"
        "from parlinalg.comm.startup import start_mpi\nMPI = start_mpi()\n"
        "assert MPI.Query_thread() == MPI.THREAD_SERIALIZED\nassert mpi4py.rc.initialize\n"
    )
    assert launch(1, ["-c", program]).returncode == 0
    program = (
        "import mpi4py\nmpi4py.rc.initialize = False\nfrom parlinalg.comm.startup import start_mpi\n"
        "assert not start_mpi().Is_initialized()\n"
    )
    assert launch(1, ["-c", program]).returncode == 0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(startup, "FOLDER", str(tmp_path))
    return tmp_path


@pytest.fixture
def holder(folder: Path) -> Iterator[Path]:
    """A file that another process has mapped, but not open."""
    path = folder / "mpich_shm_mapped_0"
    path.write_bytes(b"\0" * mmap.PAGESIZE)
    program = (
        f"import mmap\nfile = open({str(path)!r}, 'r+b')\nmapped = mmap.mmap(file.fileno(), 0)\nfile.close()\n"
        "print(flush=True)\ninput()"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    yield path
    process.communicate(b"\n")


def test_what_dead_runs_left_is_found_and_removed(folder: Path, holder: Path) -> None:
    dead, young, other = folder / "mpich_shm_1_0", folder / "ucx_shm_posix_2", folder / "somebody's"
    for path in (dead, young, other):
        path.write_bytes(b"1" * 5000)
    (folder / "mpich_shm_folder").mkdir()
    (folder / "mpich_shm_link").symlink_to(other)
    for path in (dead, holder):
        os.utime(path, (time.time() - 61,) * 2)
    assert startup.leftovers() == [dead]
    assert startup.leftovers(0) == [dead, young]
    with young.open():
        assert startup.leftovers(0) == [dead]
    assert startup.bytes_held([dead, folder / "gone"]) == 8192
    assert "left 1 file there, 8.00 KiB; parlinalg doctor --clean removes them" in startup.report_left([dead])
    startup.clean([dead, folder / "gone"])
    assert not dead.exists()
    assert holder.exists()


def test_files_of_others_are_theirs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mpich_shm_1_0").touch()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert startup.leftovers(0) == []


def test_too_little_shared_memory_is_an_error_that_says_what_helps() -> None:
    program = "from parlinalg.comm import open_comm\nopen_comm().barrier()\nprint('went on')\n"
    done = launch(2, ["-c", program], command=with_shared_memory("1500k", *mpiexec()))
    assert done.returncode in (1, 2), done.stderr
    assert "/dev/shm has 1.46 MiB free of 1.46 MiB, but MPICH needs 2.04 MiB there for 2 ranks" in done.stderr
    assert "--shm-size=1g" in done.stderr
    env = {startup.CELLS: "4"}
    done = launch(2, ["-c", program], env=env, command=with_shared_memory("1500k", *mpiexec()))
    assert (done.returncode, done.stdout.count("went on")) == (0, 2), done.stderr


@pytest.mark.one_in(3)
def test_64_megabytes_are_enough_for_twelve_ranks() -> None:
    """Docker's default; two trainings of six ranks at the same time, say."""
    program = (
        "import os\nimport numpy as np\nfrom parlinalg.comm import open_comm\ncomm = open_comm()\n"
        "comm.all_reduce(np.ones(1 << 18))\nroom = os.statvfs('/dev/shm')\ncomm.barrier()\n"
        "assert (room.f_blocks - room.f_bfree) * room.f_frsize < 16e6\n"
    )
    done = launch(12, ["-c", program], command=with_shared_memory("64m", *mpiexec()))
    assert done.returncode == 0, done.stderr


def test_the_doctor_reports_and_cleans(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dead = folder / "mpich_shm_1_0"
    dead.write_bytes(b"1" * 5000)
    assert len(doctor._shared_memory()) == 1
    os.utime(dead, (0, 0))
    room, left = doctor._shared_memory()
    assert " are free" in room
    assert left == "dead runs left 1 file there, 8.00 KiB; parlinalg doctor --clean removes them"
    assert main(["doctor", "--clean"]) == 0
    assert "removed 1 file of dead runs" in capsys.readouterr().out
    assert not dead.exists()


@pytest.mark.parametrize(("name", "told"), [("bbr", "slow where"), ("cubic", "control cubic")])
def test_the_doctor_names_a_slow_congestion_control(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "CONGESTION", tmp_path / "tcp_congestion_control")
    assert not doctor.congestion_control()
    doctor.CONGESTION.write_text(f"{name}\n")
    assert told in doctor.congestion_control()
    assert ("slow" in doctor.congestion_control()) == (name == "bbr")
