"""On emulated hosts: the suite's part for 8 ranks, and the interfaces' bytes against the ledger's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import HOSTS, Run, namespaces
from tests.launching import ROOT, child_environment

pytestmark = [pytest.mark.serial, pytest.mark.timeout(960)]

CHOSEN = ("comm/test_operations.py", "comm/test_adjoints.py", "matmul/test_api.py", "schemes", "nn/test_block.py")
"""What runs across hosts: collectives, redistribution, products, gradients; with --full all of the tests."""


def test_every_rank_has_a_host_of_its_own(across_hosts: Run) -> None:
    program = "from parlinalg.comm import open_comm; c = open_comm(); t = c.share(c.local_size); c.rank or print(*t)"
    done = across_hosts(3, ["-c", program], timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1"] * 3


def test_no_host_has_the_machines_congestion_control(across_hosts: Run) -> None:
    """With BBR blocks that go both ways at once take up to three times as long."""
    own = "open('/proc/sys/net/ipv4/tcp_congestion_control').read().strip()"
    program = f"from parlinalg.comm import open_comm; c = open_comm(); t = c.share({own}); c.rank or print(*t)"
    done = across_hosts(3, ["-c", program], timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["reno"] * 3


def test_the_hosts_of_a_core_are_one_group_of_the_scheduler(across_hosts: Run, cluster_name: str) -> None:
    """A rank that yields while it waits yields to the ranks of other hosts too."""
    cpu = Path("/sys/fs/cgroup/cpu")
    if not os.access(cpu if cpu.is_dir() else cpu.parent, os.W_OK) or (cpu.parent / "cgroup.events").exists():
        pytest.skip("cannot be had here: control groups of processors")
    groups = "[line.rpartition(':')[2] for line in open('/proc/self/cgroup').read().split()]"
    program = (
        f"from parlinalg.comm import open_comm; c = open_comm(); t = c.share({groups}); c.rank or print(*sum(t, []))"
    )
    done = across_hosts(3, ["-c", program], timeout=60)
    assert done.returncode == 0, done.stderr
    groups_told = [group for group in done.stdout.split() if group.startswith(f"/{cluster_name}")]
    here = sorted(os.sched_getaffinity(0))
    assert groups_told == [f"/{cluster_name}-{here[i % len(here)]}" for i in range(3)]
    assert not list(cpu.glob(f"{cluster_name}*"))


def test_hosts_have_the_cores_in_turn(across_hosts: Run) -> None:
    """A rank keeps its core: left to the system, ranks that poll hold others on the cores they have come to."""
    here = sorted(os.sched_getaffinity(0))
    hosts = len(here) + 1
    own = "sorted(__import__('os').sched_getaffinity(0))"
    program = f"from parlinalg.comm import open_comm; c = open_comm(); t = c.share({own}); c.rank or print(t)"
    done = across_hosts(hosts, ["-c", program], timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[here[i % len(here)]] for i in range(hosts)]


def test_a_failing_program_leaves_no_hosts_behind(across_hosts: Run, cluster_name: str) -> None:
    done = across_hosts(2, ["-c", "raise SystemExit(3)"], timeout=60)
    assert done.returncode == 3
    assert not [host for host in namespaces() if host.startswith(cluster_name)]


def test_a_stopped_run_leaves_no_hosts_and_no_processes_behind(cluster_name: str) -> None:
    command = [sys.executable, str(HOSTS), "run", "--name", cluster_name, "--hosts", "2", "--rate", "none", "--"]
    mark = f"import time; time.sleep(600)  # {cluster_name}"
    process = subprocess.Popen([*command, sys.executable, "-c", mark], cwd=ROOT, env=child_environment())
    try:
        end = time.monotonic() + 30
        while not _processes(mark) and time.monotonic() < end:
            time.sleep(0.1)
        assert _processes(mark)
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 128 + signal.SIGTERM
    assert not [host for host in namespaces() if host.startswith(cluster_name)]
    assert not _processes(mark)


def _processes(mark: str) -> list[int]:
    """The ranks whose command line ends with `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().split(b"\0")[1:3] == [b"-c", mark.encode()]:
                found.append(int(entry.name))
        except OSError:  # it ended meanwhile
            continue
    return found


def test_up_twice_and_down_twice(cluster_name: str) -> None:
    def call(what: str) -> None:
        command = [sys.executable, str(HOSTS), what, "--name", cluster_name, "--hosts", "2"]
        subprocess.run(command, check=True, timeout=60)

    try:
        call("up")
        call("up")
        assert [host for host in namespaces() if host.startswith(cluster_name)] == [
            f"{cluster_name}{i}" for i in (1, 2)
        ]
    finally:
        call("down")
    call("down")
    assert not [host for host in namespaces() if host.startswith(cluster_name)]


@pytest.mark.one_in(4)
def test_the_part_for_8_ranks_across_8_hosts(
    across_hosts: Run, full: bool, tmp_path: Path, runs_done: list[str]
) -> None:
    report = tmp_path / "report.json"
    paths = ["tests"] if full else [f"tests/{path}" for path in CHOSEN if (ROOT / "tests" / path).exists()]
    arguments = ["-m", "pytest", *paths, "-q", "-p", "no:cacheprovider", f"--rootdir={ROOT}", "--tb=short"]
    arguments += [] if full else ["--share", "2"]
    start = time.monotonic()
    env = {"PARLINALG_TEST_REPORT": str(report), "PARLINALG_TEST_BACKEND": "numpy"}
    done = across_hosts(8, arguments, timeout=840, **env)
    tail = f"{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, tail
    told = json.loads(report.read_text())
    outcomes = list(told["outcomes"].values())
    assert len(outcomes) == told["collected"], tail
    assert outcomes.count("passed") > 20, tail
    runs_done.append(f" 8 hosts: {outcomes.count('passed')} passed in {time.monotonic() - start:.0f} s")


@pytest.mark.one_in(4)
def test_interfaces_receive_what_the_ledger_says(across_hosts: Run, tmp_path: Path, runs_done: list[str]) -> None:
    result = tmp_path / "received.json"
    script = str(ROOT / "bench" / "cluster" / "received.py")
    options = ["--mb", "2", "--side", "512", "--tokens", "256", "--json", str(result)]
    done = across_hosts(8, [script, *options], timeout=300)
    assert done.returncode == 0, done.stderr
    rows = {row["operation"]: row for row in json.loads(result.read_text())["rows"]}
    assert {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"} < set(rows)
    assert sum(name.startswith("product") for name in rows) > 8
    assert sum(name.startswith("step") for name in rows) == 4
    for name, row in rows.items():
        assert row["ledger"] >= 1e6, row
        assert abs(row["ratio"] - 1) < 0.05, row
    ratios = [row["ratio"] for row in rows.values()]
    runs_done.append(f" 8 hosts: interfaces received {min(ratios):.3f} to {max(ratios):.3f} of the ledger's bytes")
