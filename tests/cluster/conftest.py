"""Emulated hosts for the tests of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.launching import ROOT, child_environment

HOSTS = ROOT / "bench" / "cluster" / "hosts.py"
NOT_HERE = 77

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def namespaces() -> list[str]:
    """The names of the network namespaces there are now."""
    folder = Path("/run/netns")
    return sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []


@pytest.fixture(scope="session")
def cluster_name() -> str:
    """A name that no other run of the tests has; ends with a letter, so that it is no prefix of another's hosts."""
    check = subprocess.run(
        [sys.executable, str(HOSTS), "check"], capture_output=True, text=True, timeout=60, check=False
    )
    if check.returncode == NOT_HERE:
        pytest.skip(f"cannot be had here: {check.stderr.strip()}")
    assert check.returncode == 0, check.stderr
    return f"t{os.getpid() % 100000}t"


@pytest.fixture
def across_hosts(cluster_name: str) -> Run:
    """`across_hosts(8, ["-m", "pytest", …], rate="1gbit")` runs Python across so many hosts, a rank each."""

    def run(
        hosts: int,
        arguments: list[str],
        rate: str = "1gbit",
        timeout: float = 300,
        options: Sequence[str] = (),
        **env: str,
    ) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable, str(HOSTS), "run", "--name", cluster_name, "--hosts", str(hosts), "--rate", rate,
            "--timeout", str(timeout), *options, "--", sys.executable, *arguments,
        ]  # fmt: skip
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout + 60, env=child_environment(env), cwd=ROOT,
            check=False,
        )  # fmt: skip

    return run
