"""One rank fails, hangs, leaves or is killed: the whole run ends within seconds and says which rank it was.

Each test starts its own ranks.  A program gets `comm`, a communicator of 3 ranks over the axis `r`, and a block `a`.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.launching import launch

pytestmark = [pytest.mark.serial, pytest.mark.one_in(3), pytest.mark.timeout(60)]

START = """
import os, signal, sys, time
import numpy as np
from parlinalg.comm import StopSignals, check_replicas, open_comm, ranks_map
world = open_comm()
comm = world.cartesian({"r": world.size})
a = np.ones(4)
comm.all_reduce(a)
"""


class Failed:
    """What came of a program."""

    def __init__(self, done: CompletedProcess[str], seconds: float) -> None:
        self.code, self.out, self.seconds = done.returncode, done.stdout, seconds
        self.err = done.stderr


SPECIAL = """
import os, sys, time
if sys.argv[1] == "hidden":
    if os.fork():
        time.sleep(60)
elif sys.argv[1] == "full":
    os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
elif sys.argv[1] == "closed":
    os.close(2)
else:
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 2)
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""Starts a program without a standard error that can be written, or hidden from the launcher behind its parent."""


@pytest.fixture
def run(tmp_path: Path):
    def started(program: str, ranks: int = 3, limit: float = 45, special: str = "", **env: str) -> Failed:
        path, start = tmp_path / "program.py", tmp_path / "start.py"
        path.write_text(START + program)
        start.write_text(SPECIAL)
        command = [str(start), special, str(path)] if special else [str(path)]
        begin = time.monotonic()
        done = launch(ranks, command, env={"PARLINALG_TIMEOUT": "2", **env}, timeout=limit)
        done.stderr = done.stderr.replace(f"{tmp_path}/", "")
        failed = Failed(done, time.monotonic() - begin)
        print(f"exit code {failed.code} after {failed.seconds:.1f} s\n{failed.out}\n{failed.err}")
        assert failed.code != 124, f"the run did not end within {limit} s"
        return failed

    return started


def line(program: str, text: str) -> str:
    """`program.py:12`, where `text` stands in the program."""
    lines = (START + program).splitlines()
    return f"program.py:{next(i for i, code in enumerate(lines, 1) if text in code)}"


def test_all_is_well(run) -> None:
    done = run("comm.all_reduce(a)\nif comm.rank == 0: time.sleep(1)\n")
    assert (done.code, done.err) == (0, "")


def test_sleeping_rank(run) -> None:
    program = "if comm.rank == 1:\n    time.sleep(60)\ncomm.all_reduce(a)  # here\n"
    done = run(program)
    assert done.code != 0
    assert done.seconds < 25
    assert "ranks 0, 2 wait in all_reduce over ('r',)" in done.err
    assert line(program, "# here") in done.err
    assert "rank 1 never came" in done.err
    assert line(program, "time.sleep") in done.err
    assert done.err.count("gives up") == 1


def test_stopped_rank(run) -> None:
    done = run("if comm.rank == 1:\n    os.kill(os.getpid(), signal.SIGSTOP)\ncomm.all_reduce(a)\n")
    assert done.code != 0
    assert "rank 1 did not answer" in done.err
    assert "pid" in done.err


def test_a_handle_that_waits(run) -> None:
    done = run("if comm.rank == 2:\n    time.sleep(60)\ncomm.all_reduce(a, wait=False).wait()\n")
    assert done.code != 0
    assert "ranks 0, 1 wait in all_reduce" in done.err
    assert "rank 2 never came" in done.err


def test_receive_without_send(run) -> None:
    done = run("if comm.rank == 0:\n    comm.receive(a, 2)\ntime.sleep(60)\n")
    assert done.code != 0
    assert "rank 0 waits in receive from 2" in done.err
    assert "rank 2 never came" in done.err
    assert "rank 1" not in done.err


def test_no_limit(run) -> None:
    done = run("if comm.rank == 1:\n    time.sleep(4)\ncomm.all_reduce(a)\n", PARLINALG_TIMEOUT="0")
    assert (done.code, done.err) == (0, "")


def test_raising_rank(run) -> None:
    program = "print('before')\nif comm.rank == 1:\n    raise ValueError('boom')\ncomm.all_reduce(a)\n"
    done = run(program)
    assert done.code != 0
    assert done.seconds < 25
    assert "[rank 1] ValueError: boom" in done.err
    assert f"line {line(program, 'boom').partition(':')[2]}" in done.err
    assert done.out.count("before") >= 1


def test_all_raise(run) -> None:
    done = run("raise ValueError('boom')\n")
    assert done.code != 0
    assert "[rank 0] ValueError: boom" in done.err
    assert done.err.count("ValueError: boom") < 3


def test_raising_thread(run) -> None:
    done = run(
        "import threading\nif comm.rank == 1:\n    threading.Thread(target=lambda: 1 / 0).start()\n"
        "comm.receive(a, (comm.rank + 1) % 3)\n"
    )
    assert done.code != 0
    assert "[rank 1] ZeroDivisionError" in done.err


def test_sys_exit(run) -> None:
    program = "if comm.rank == 1:\n    sys.exit(3)\ncomm.all_reduce(a)\n"
    done = run(program)
    assert done.code == 3
    assert done.seconds < 25
    assert "rank 1 left early (sys.exit(3) at" in done.err
    assert line(program, "sys.exit") in done.err
    assert "ranks 0, 2 wait in all_reduce over ('r',)" in done.err


def test_all_exit_alike(run) -> None:
    done = run("sys.exit(3)\n")
    assert done.code == 3
    assert "parlinalg" not in done.err
    assert "Abort" not in done.err


def test_early_return(run) -> None:
    done = run("if comm.rank != 1:\n    comm.all_reduce(a)\n")
    assert done.code != 0
    assert done.seconds < 25
    assert "rank 1 left early (at the end of its program) while ranks 0, 2 wait in all_reduce" in done.err


def test_two_leave_early(run) -> None:
    done = run("if comm.rank == 1:\n    comm.all_reduce(a)\n")
    assert done.code != 0
    assert "rank 0 left early" in done.err
    assert "rank 1 waits in all_reduce" in done.err


def test_left_without_sending(run) -> None:
    done = run("if comm.rank == 0:\n    comm.receive(a, 2)\n", PARLINALG_TIMEOUT="60")
    assert done.code != 0
    assert "rank 2 left early" in done.err
    assert "rank 0 waits in receive from 2" in done.err


def test_a_rank_that_took_part_may_leave(run) -> None:
    """Its last message is on the way, or read late: that is no reason to end the run."""
    done = run(
        "b = np.ones(10)\nif comm.rank == 1:\n    comm.send(b, 0)\n"
        "if comm.rank == 0:\n    time.sleep(1.5)\n    comm.receive(b, 1)\n"
    )
    assert (done.code, done.err) == (0, "")


def test_killed_rank(run) -> None:
    program = """
where = ranks_map(comm)
if comm.rank == 0:
    print(where, flush=True)
comm.barrier()
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
comm.all_reduce(a)
"""
    done = run(program)
    assert done.code != 0
    assert done.seconds < 25
    assert "'rank': 1, 'host'" in done.out


def test_another_collective(run) -> None:
    program = "if comm.rank == 1:\n    comm.broadcast(a, 0)\nelse:\n    comm.all_reduce(a)\n"
    done = run(program, PARLINALG_CHECK="1")
    assert done.code != 0
    assert "CommError" in done.err
    assert "ranks 0, 2: all_reduce(float64, counts 4, reduction=sum) at" in done.err
    assert "rank 1: broadcast(float64, counts 4, root=0) at" in done.err
    assert line(program, "broadcast") in done.err


def test_another_collective_unchecked(run) -> None:
    """The watchdog names the calls that differ: by their numbers they should be one."""
    program = (
        "if comm.rank == 1:\n    comm.barrier()\nelse:\n"
        "    comm.all_gather(np.ones(9000), np.ones(27000), [9000] * 3)  # here\ntime.sleep(60)\n"
    )
    done = run(program)
    assert done.code != 0
    one = f"rank 1 is in barrier over ('r',) number 2 at {line(program, 'comm.barrier')}"
    others = f"ranks 0, 2 are in all_gather over ('r',) number 2 at {line(program, '# here')}"
    assert "slow or stuck" not in done.err
    assert f"likely cause: the ranks make different calls: {one} while {others}" in done.err
    assert "PARLINALG_CHECK=1" in done.err


@pytest.mark.parametrize("checked", ["0", "1"])
def test_calls_on_different_communicators(run, checked: str) -> None:
    """Each waits for the other in a call that the other never began."""
    program = "if comm.rank == 1:\n    world.share(1)\nelse:\n    comm.all_reduce(a)  # here\ntime.sleep(60)\n"
    done = run(program, PARLINALG_CHECK=checked)
    assert done.code != 0
    assert "rank 1 is in share over ()" in done.err
    assert "ranks 0, 2 are in all_reduce over ('r',) number 2" in done.err
    assert "likely cause: the ranks make different calls" in done.err


def test_a_call_from_different_lines(run) -> None:
    """The right calls on all ranks, of which one is late: nothing is said of different calls."""
    done = run("if comm.rank == 1:\n    comm.receive(a, 0)\ncomm.all_reduce(a)\n")
    assert done.code != 0
    assert "likely cause" not in done.err
    assert "rank 1 never came: it waits in receive from 0" in done.err


def test_blocks_of_different_sizes_unchecked(run) -> None:
    """What MPI itself refuses is told in our words."""
    done = run("b = np.ones(50000 if comm.rank == 1 else 10)\ncomm.broadcast(b, 1)  # here\ntime.sleep(60)\n")
    assert done.code != 0
    assert "CommError: broadcast over ('r',), at" in done.err
    assert "PARLINALG_CHECK=1 compares them first" in done.err


SKIPPED = """
import parlinalg as pla
grid = pla.Grid({"r": 3}, world)
ids = np.arange(12.0).reshape(4, 3)
for step in range(3):
    x = pla.distribute(ids, grid, pla.Layout("r", None))  # first
    if step == 1 and comm.rank == 1:
        continue  # this rank skips the rest of a step
    y = pla.from_blocks(x.block, grid, x.layout)  # second
"""


@pytest.mark.parametrize("checked", ["0", "1"])
def test_a_skipped_step(run, checked: str) -> None:
    """The ranks' calls are compared before their values are: no rank unpacks what another meant for something else."""
    done = run(SKIPPED, PARLINALG_CHECK=checked)
    assert done.code != 0
    assert "unpack" not in done.err
    assert "CommError: the ranks of the communicator over ()" in done.err
    assert f"parlinalg.array.create.from_blocks at {line(SKIPPED, '# second')}; rank 1: " in done.err
    assert f"parlinalg.array.create.distribute at {line(SKIPPED, '# first')}" in done.err


def test_interrupt(run) -> None:
    """Ctrl-C reaches one rank only, while the others wait for it."""
    done = run("if comm.rank == 1:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(1)\ncomm.all_reduce(a)\n")
    assert done.code != 0
    assert "Traceback" not in done.err


def test_a_stop_is_agreed(run) -> None:
    program = """
with StopSignals() as stop:
    for step in range(1000):
        if step == 3 and comm.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if name := stop.requested(comm):
            break
        time.sleep(0.01)
assert step < 200
assert all(there == [step, "SIGTERM"] for there in comm.share([step, name]))
"""
    done = run(program)
    assert (done.code, done.err) == (0, "")


def test_a_second_signal_ends_the_run_inside_a_collective(run) -> None:
    program = """
import threading
with StopSignals() as stop:
    if comm.rank == 1:
        def kick():
            for _ in range(2):
                time.sleep(1.2)
                os.kill(os.getpid(), signal.SIGTERM)
        threading.Thread(target=kick).start()
    if comm.rank == 2:
        time.sleep(30)
    comm.all_reduce(a)
"""
    done = run(program, PARLINALG_TIMEOUT="0")
    assert done.code != 0
    assert "a second SIGTERM ends the run at once" in done.err
    assert done.seconds < 25


STUCK = "time.sleep(60)\n"


@pytest.mark.parametrize(
    ("stderr", "program", "code"),
    [
        ("full", "raise ValueError('boom')\n", 1),
        ("full", STUCK, 1),
        ("full", "sys.exit(3)\n", 3),
        ("full", "kill(); time.sleep(1.5); kill(); time.sleep(60)\n", 143),
        ("closed", "raise ValueError('boom')\n", 1),
        ("broken", STUCK, 1),
    ],
    ids=["full, raise", "full, hang", "full, leave", "full, signal", "closed, raise", "broken, hang"],
)
def test_ranks_whose_stderr_cannot_be_written_end_the_run(run, stderr: str, program: str, code: int) -> None:
    start = "StopSignals().__enter__()\nkill = lambda: os.kill(os.getpid(), signal.SIGTERM)\n"
    program = f"{start}if comm.rank == 1:\n    {program.strip()}\ncomm.all_reduce(a)\n"
    done = run(program, special=stderr, PARLINALG_TIMEOUT="3")
    assert done.code == code
    assert done.seconds < 3 + 10 + 5  # and what starting takes


@pytest.mark.parametrize("stderr", ["full", "closed"])
def test_a_run_without_stderr_goes_on(run, stderr: str) -> None:
    program = "import warnings\nwarnings.warn('nobody hears')\ncomm.all_reduce(a)\nprint(a[0])\n"
    done = run(program, special=stderr, PYTHONUNBUFFERED="")
    assert done.code == 0
    assert done.out.count("9.0") == 3  # lines of several ranks may run into one another


CHILDREN = """
bodies = {
    "pass": 0,
    "sys.exit(5)": 5,
    "raise SystemExit(6)": 6,
    "os._exit(7)": 7,
    "raise ValueError('of the child')": 1,
    "raise KeyboardInterrupt": -2,
    "comm.barrier()": 1 if comm.size > 1 else 0,
    "open_comm()": 1,
    "import atexit; atexit.register(print, 'its own', flush=True)": 0,
}
for body in bodies if comm.rank == 0 else ():
    begin = time.monotonic()
    pid = os.fork()
    if pid == 0:
        break
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == bodies[body], body
    assert time.monotonic() - begin < 4, body
    pid = None
if comm.rank == 0 and pid == 0:
    exec(body)  # and falls off the end of the program
else:
    import multiprocessing
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        assert pool.map(abs, [-1, -2]) == [1, 2]
    process = context.Process(target=sys.exit, args=(8,))
    process.start()
    process.join(5)
    assert process.exitcode == 8
    comm.all_reduce(a)
    assert a[0] == comm.size ** 2
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forked_process_leaves_at_once_and_touches_no_mpi(run, ranks: int) -> None:
    done = run(CHILDREN, ranks=ranks, PARLINALG_TIMEOUT="30")
    assert done.code == 0
    assert done.out == "its own\n"
    assert "ValueError: of the child" in done.err
    assert "forked from a rank of MPI" in done.err
    assert ("barrier on the communicator over" in done.err.lower()) == (ranks > 1)


def test_a_signal_to_a_forked_process_does_not_stop_its_parent(run) -> None:
    program = """
with StopSignals() as stop:
    pid = os.fork() if comm.rank == 1 else None
    if pid == 0:
        time.sleep(60)
    if pid:
        time.sleep(0.3)
        os.kill(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    assert stop.requested(comm) is None
"""
    assert run(program).code == 0


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("raise SystemExit(4)", 4, "rank 1 left early (SystemExit(4)"),
        ("os._exit(7)", 7, "rank 1 of 3 ends the run by os._exit(7) at "),
        (
            "try:\n        sys.exit(3)\n    except SystemExit:\n        pass",
            1,
            "left early (at the end of its program)",
        ),
    ],
)
def test_the_code_of_a_rank_that_leaves_is_kept(run, end: str, code: int, told: str) -> None:
    done = run(f"if comm.rank == 1:\n    {end}\nelse:\n    comm.all_reduce(a)\n")
    assert done.code == code
    assert told in done.err


def test_all_raise_system_exit(run) -> None:
    done = run("raise SystemExit(4)\n")
    assert (done.code, done.err) == (4, "")


def test_the_code_of_a_system_exit_stays_an_attribute() -> None:
    """It is read by others than the interpreter too, once communicators are open."""
    program = "error = SystemExit(3)\nassert error.code == 3\nerror.code = 'text'\nassert error.code == 'text'\n"
    program += "del error.code\nassert error.code is None\nassert SystemExit(1, 2).code == (1, 2)\n"
    done = launch(1, ["-c", "from parlinalg.comm import open_comm; open_comm()\n" + program])
    assert (done.returncode, done.stderr) == (0, "")


def test_a_rank_that_is_gone_is_named_where_the_launcher_lets_the_others_be(run) -> None:
    """As srun does, unless it is told otherwise."""
    program = "if comm.rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ncomm.all_reduce(a)\n"
    done = run(program, special="hidden", PARLINALG_TIMEOUT="60")
    assert done.code != 0
    assert done.seconds < 25
    assert "rank 1 is gone (host " in done.err
    assert "rank 0, waiting in all_reduce over ('r',) at " in done.err


def test_a_rank_that_is_gone_at_the_end_of_the_others(run) -> None:
    program = "if comm.rank == 1:\n    time.sleep(0.5)\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    done = run(program, special="hidden", PARLINALG_TIMEOUT="60")
    assert done.code != 0
    assert "rank 1 is gone (host " in done.err


def test_a_signal_keeps_its_number(run) -> None:
    done = run("if comm.rank == 1:\n    os.kill(os.getpid(), signal.SIGSEGV)\ncomm.all_reduce(a)\n")
    assert done.code in (signal.SIGSEGV, 128 + signal.SIGSEGV)
