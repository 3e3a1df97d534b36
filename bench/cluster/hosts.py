"""An emulated cluster: network namespaces as hosts on one bridge, every link shaped to a rate, MPICH across them.

    python bench/cluster/hosts.py run --hosts 8 --rate 200mbit -- python script.py     # up, mpiexec, down
    python bench/cluster/hosts.py up --name lab --hosts 8 --rate 1gbit                 # or one step at a time
    python bench/cluster/hosts.py exec --name lab --hosts 8 -- python script.py
    python bench/cluster/hosts.py down --name lab
    python bench/cluster/hosts.py run --hosts 3 --cut 2 --when FILE -- python script.py        # a link that breaks

Needs root, iproute2 (apt-get install iproute2), taskset of util-linux, and MPICH (pip install mpich).  Each host is
one node with one rank (more with --per-host) and an address of its own; a rank sees its interface as `e0`.  `up` of a
cluster that is there rebuilds it; `down` of one that is not is fine.  Whatever ends `run`, an error, Ctrl-C or SIGTERM,
takes it down.
With --cut the link of a host goes down as soon as the program has made FILE, which is then removed; the processes are
left to end by themselves, and a line of JSON lists the seconds that those of each host took from the cut (Hydra's own
proxy aside, which may wait for its launcher until TCP gives up), and at last mpiexec; null where they did not end.

The hosts share this machine's cores in turn: of two cores the odd hosts have one, and the even ones the other.  (Where
the system places them, ranks stay on the cores they have come to, as those that poll look busy: six of eight shared one
core in a run, and a step's time depended on which.)  A rank that waits polls, yielding its core between two looks.  The
hosts of a core are in one control group NAME-CORE, where control groups of processors can be made, so that ranks yield
to those of other hosts too (`harness.make_group`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402

MOST = 200  # hosts on one /24
CONGESTION = "reno"
"""How TCP finds its rate on every host, whatever the machine's own setting.

All kernels have Reno, and where nothing is lost it is as fast as cubic, the default of most.  BBR, which paces what it
sends, was slow at 200 Mbit/s for long blocks that go both ways at once: 128 KiB each way between two ranks took 2 to 3
times the link's time, all-to-alls of 64 KiB 3.5 times, all-reduces of 256 KiB 1.6 times; with Reno all take 1.05 times.
"""
CONGESTION_SETTING = "/proc/sys/net/ipv4/tcp_congestion_control"


class Cluster:
    """Namespaces NAME1, NAME2, … on the bridge NAMEbr, with the addresses 10.A.B.1, …; the bridge has .254."""

    def __init__(self, name: str, hosts: int) -> None:
        if not (name.isalnum() and name[-1].isalpha() and len(name) <= 8):
            raise SystemExit(
                f"the name of a cluster is at most 8 letters and digits and ends with a letter, not {name!r}"
            )
        if not 1 <= hosts <= MOST:
            raise SystemExit(f"a cluster has 1 to {MOST} hosts, not {hosts}")
        self.name, self.hosts, self.bridge = name, hosts, f"{name}br"

    def up(self, rate: str, mtu: int) -> None:
        """Make the hosts; what is left of a cluster of this name goes first."""
        self.down()
        net = free_net()
        for cores, hosts in Counter(self.cores()).items():
            harness.make_group(f"{self.name}-{cores}", hosts)
        try:
            ip("link", "add", self.bridge, "mtu", str(mtu), "type", "bridge")
            ip("addr", "add", f"{net}.254/24", "dev", self.bridge)
            ip("link", "set", self.bridge, "up")
            for i in range(1, self.hosts + 1):
                self._host(i, net, rate, mtu)
        except BaseException:
            self.down()
            raise

    def _host(self, i: int, net: str, rate: str, mtu: int) -> None:
        host, link = f"{self.name}{i}", f"{self.name}v{i}"
        ip("netns", "add", host)
        ip("link", "add", link, "mtu", str(mtu), "type", "veth", "peer", "name", "e0", "mtu", str(mtu), "netns", host)
        ip("link", "set", link, "master", self.bridge, "up")
        ip("-n", host, "addr", "add", f"{net}.{i}/24", "dev", "e0")
        ip("-n", host, "link", "set", "e0", "up")
        ip("-n", host, "link", "set", "lo", "up")
        command(*setting_congestion(host))
        if rate != "none":  # out of the host, and into it
            packet = longest_packet(rate, mtu)
            ip("-n", host, "link", "set", "e0", "gso_max_size", str(packet))
            ip("link", "set", link, "gso_max_size", str(packet))
            shape = ("root", "tbf", "rate", rate, "burst", str(2 * packet), "latency", "100ms")
            command("tc", "-n", host, "qdisc", "add", "dev", "e0", *shape)
            command("tc", "qdisc", "add", "dev", link, *shape)

    def down(self) -> None:
        """Remove all that `up` makes, whatever part of it is there."""
        here = {entry["name"] for entry in json.loads(ip("-j", "netns", "list") or "[]")}
        for host in sorted(here):
            if host.startswith(self.name) and host.removeprefix(self.name).isdigit():
                ip("netns", "del", host)  # its end of the link goes with it, and the other end too
        for link in json.loads(ip("-j", "link", "show")):
            if link["ifname"] == self.bridge or link["ifname"].removeprefix(f"{self.name}v").isdigit():
                subprocess.run(["ip", "link", "del", link["ifname"]], capture_output=True, check=False)
        for group in harness.group_folder("").glob(f"{self.name}-*"):
            harness.remove_group(group.name)

    @property
    def net(self) -> str:
        """The first three numbers of the addresses."""
        shown = json.loads(ip("-j", "addr", "show", "dev", self.bridge))
        address = next(a["local"] for entry in shown for a in entry["addr_info"] if a["family"] == "inet")
        return address.rpartition(".")[0]

    def mpiexec(self, program: Sequence[str], per_host: int) -> list[str]:
        """The command that runs a program across the hosts, a node each."""
        net = self.net
        hosts = ",".join(f"{net}.{i}" for i in range(1, self.hosts + 1))
        where = ["-localhost", f"{net}.254", "-iface", self.bridge, "-hosts", hosts, "-ppn", str(per_host)]
        launcher = ["-launcher", "ssh", "-launcher-exec", str(HERE / "enter.sh")]
        return [*harness.mpiexec(), *launcher, *where, "-n", str(self.hosts * per_host), *program]

    def cores(self) -> list[str]:
        """The cores of each host, as taskset takes them: one in turn, or equal parts of more cores than hosts."""
        here = sorted(os.sched_getaffinity(0))
        each = max(1, len(here) // self.hosts)
        return [",".join(str(here[(i * each + k) % len(here)]) for k in range(each)) for i in range(self.hosts)]

    def run(
        self, program: Sequence[str], per_host: int, timeout: float, cut: int = 0, when: str = ""
    ) -> int:  # fmt: skip
        """Run a program across the hosts and return its exit code, 124 when the time is up."""
        env = {**os.environ, "PARLINALG_CLUSTER": self.name, "PARLINALG_CLUSTER_CORES": " ".join(self.cores())}
        env |= {"PARLINALG_CLUSTER_GROUPS": str(harness.group_folder(self.name))}
        env |= {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}
        process = subprocess.Popen(self.mpiexec(program, per_host), env=env, start_new_session=True)
        try:
            if cut:
                took, start = self._cut(cut, Path(when), time.monotonic() + timeout)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(5)
                ended = None if process.poll() is None else round(time.monotonic() - start, 1)
                print(json.dumps([*took, ended]), flush=True)
                timeout = 0
            return process.wait(timeout)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            harness.end(process)
            self._end_ranks()

    def _cut(self, host: int, when: Path, end: float) -> tuple[list[float | None], float]:
        """Cut a host's link when the file is there; the seconds until each host had no rank left, None if it had, and
        when it was cut."""
        while not when.exists():
            if time.monotonic() > end:
                raise SystemExit(f"the program did not make {when}")
            time.sleep(0.05)
        ip("link", "set", f"{self.name}v{host}", "down")
        when.unlink()
        start = time.monotonic()
        took: list[float | None] = [None] * self.hosts
        while None in took and time.monotonic() < end:
            for i in range(self.hosts):
                if took[i] is None and not any(map(is_rank, self._processes(i + 1))):
                    took[i] = round(time.monotonic() - start, 1)
            time.sleep(0.1)
        return took, start

    def _processes(self, host: int) -> list[int]:
        """Return the processes that still run on a host."""
        shown = ["ip", "netns", "pids", f"{self.name}{host}"]
        return [int(p) for p in subprocess.run(shown, capture_output=True, text=True, check=False).stdout.split()]

    def _end_ranks(self) -> None:
        """End what still runs on the hosts: their processes are in sessions of their own."""
        for i in range(1, self.hosts + 1):
            for pid in self._processes(i):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue


def is_rank(pid: int) -> bool:
    """Return True if a process on a host is a rank, not the shell or the proxy that Hydra started it by."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() not in ("hydra_pmi_proxy", "sh")
    except OSError:  # it ended meanwhile
        return False


def missing() -> str | None:
    """Why no cluster can be made here; None if one can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid():
        return "network namespaces need root"
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("taskset", "util-linux")):
        if shutil.which(program) is None:
            return f"no {program}: apt-get install {package}"
    probe = f"plp{os.getpid() % 100000}"
    for attempt in (
        ("ip", "netns", "add", probe),
        ("ip", "link", "add", f"{probe}v", "type", "veth", "peer", "name", "e0", "netns", probe),
        ("ip", "link", "set", f"{probe}v", "gso_max_size", str(1 << 16)),
        ("tc", "qdisc", "add", "dev", f"{probe}v", "root", "tbf", "rate", "1gbit", "burst", "256k", "latency", "100ms"),
        setting_congestion(probe),
    ):
        done = subprocess.run(attempt, capture_output=True, text=True, check=False)
        if done.returncode:
            break
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    if done.returncode:
        return f"`{' '.join(attempt)}` failed: {done.stderr.strip()}"
    try:
        if "Open MPI" in " ".join(harness.mpiexec()) or "--oversubscribe" in harness.mpiexec():
            return "the launcher is Hydra's: pip install mpich"
    except harness.Unavailable as reason:
        return str(reason)
    return None


def ip(*arguments: str) -> str:
    return command("ip", *arguments)


def command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def setting_congestion(host: str) -> tuple[str, ...]:
    """Return the command that sets a host's congestion control."""
    return "ip", "netns", "exec", host, "sh", "-c", f"echo {CONGESTION} > {CONGESTION_SETTING}"


def longest_packet(rate: str, mtu: int) -> int:
    """Return the bytes of the longest packets, which are cut into frames where they leave a link.

    A link lets two of them pass at once after a pause, since the system may look after it late: what it carries in 0.8
    ms.  With one of 128 KiB at 200 Mbit/s, operations that followed computing were for nothing: one that brings 128 KiB
    took 0.5 ms after a pause of 10 ms, where the link takes 5.2, and takes 5.0 now.  With a third as much, all-to-alls
    at 1 Gbit/s took 1.3 to 1.5 times the link's time; they take 1.1 to 1.2 times.
    """
    found = re.fullmatch(r"([0-9.]+)([kmgt]?)bit", rate.lower())
    bits = float(found[1]) * 1000 ** " kmgt".index(found[2] or " ") if found else 1e9
    return min(1 << 16, max(mtu + 100, round(bits / 8 * 0.4e-3)))


def free_net() -> str:
    """Three numbers of a private network that no interface or route of this machine uses."""
    used = ip("addr", "show") + ip("route", "show", "table", "all")
    for offset in range(256):
        net = f"10.77.{(os.getpid() + offset) % 256}"
        if f"{net}." not in used:
            return net
    raise RuntimeError("all networks 10.77.*.0/24 are in use: take down clusters that are left over (ip netns list)")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["up", "down", "exec", "run", "check"])
    parser.add_argument("--name", help="of the cluster; `run` makes one up")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate", default="200mbit", help="of every link, each way, as tc writes it; none: unshaped")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--per-host", type=int, default=1, help="ranks on a host")
    parser.add_argument("--cut", type=int, default=0, help="number of the host whose link is cut")
    parser.add_argument("--when", default="", help="the file that the program makes when it should be")
    parser.add_argument("--timeout", type=float, default=600, help="seconds the program may take")
    parser.epilog = "what to run on every rank comes after --"
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:at], argparse.Namespace(program=sys.argv[at + 1 :]))
    if args.cut and not (args.when and 1 <= args.cut <= args.hosts):
        parser.error("--cut takes the number of one of the hosts, and --when a file that the program makes")
    if args.name is None:
        if args.what in ("up", "down", "exec"):
            parser.error(f"{args.what} needs --name")
        args.name = f"pl{os.getpid() % 100000}h"
    if args.what in ("exec", "run") and not args.program:
        parser.error("what should run? give it after --")
    return args


def main() -> int:
    args = arguments()
    if reason := missing():
        print(f"no emulated hosts here: {reason}", file=sys.stderr)
        return 77
    if args.what == "check":
        return 0

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    cluster = Cluster(args.name, args.hosts)
    if args.what == "down":
        cluster.down()
        return 0
    if args.what == "exec":
        return cluster.run(args.program, args.per_host, args.timeout, args.cut, args.when)
    cluster.up(args.rate, args.mtu)
    if args.what == "up":
        return 0
    try:
        return cluster.run(args.program, args.per_host, args.timeout, args.cut, args.when)
    finally:
        cluster.down()


if __name__ == "__main__":
    sys.exit(main())
