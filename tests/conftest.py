"""How the tests run.

`python -m pytest` starts no MPI itself: it runs the tests on a single rank without MPI, and `test_runs.py` starts the
same tests under mpiexec on 2, 3, 4, … ranks and on the stand-in for CuPy, parts of them that `--seed` chooses.
`mpiexec -n 4 python -m pytest --with-mpi tests/grid` runs some of them on 4 ranks directly.  Marks:

- none: the test runs on any number of ranks;
- `serial`: it does not communicate, or starts its own ranks, and runs in the one-rank run without MPI only;
- `ranks(2, 4)`: it runs on these numbers of ranks only (5, 7, 12 and 16 ranks run only tests that name them);
  `ranks(1, full=(4,))`: with `--full` on those too;
- `always`: it runs on every one of them, in runs too that take a part of the tests;
- `core`: it runs on 4 ranks in any case, and one in six of them on 8 (grids of 2×2 and 2×2×2);
- `one_in(3)`, of a test that takes long or has many kin: where all tests are to run, at most one in three of these
  runs, which ones by `--seed`, as those of a run on several ranks; with `--full`, or asked for by its path, it runs;
- `mpi(min_size=2)`: it needs at least so many, as in pytest-mpi; every test that is not `serial` carries this mark,
  with `min_size=1` where it gives no other.  `--with-mpi` is implied, `--only-mpi` leaves the serial tests out.

The library's own plugin, `parlinalg.testing`, has the outcome of every test agreed by all ranks, lets rank 0 alone
print, and gives the fixtures `grid`, `serial_grid`, `make_grid` and `mpi_tmp_path`.  A skipped test fails the run,
unless its reason begins with "cannot be had here:".
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

STANDIN = Path(__file__).parent / "standin"
BACKEND = os.environ.get("PARLINALG_TEST_BACKEND", "numpy")  # cupy: the stand-in; gpu: CuPy itself
if BACKEND == "cupy":
    sys.path.insert(0, str(STANDIN))

from parlinalg import tunables  # noqa: E402
from parlinalg.comm.startup import launched  # noqa: E402
from parlinalg.testing.agreement import verdicts  # noqa: E402
from parlinalg.testing.plugin import passed  # noqa: E402
from tests.launching import ROOT  # noqa: E402
from tests.runs import (  # noqa: E402
    ALONE_SHARE,
    HERE_SHARE,
    MANY,
    WHOLE,
    WHOLE_SHARES,
    begin,
    chosen,
    seed_of,
    share_of,
    whole,
)
from tests.tuning import Tuning  # noqa: E402

pytest_plugins = ["parlinalg.testing"]

if os.environ.get("PARLINALG_TEST_COMPILED") == "1":
    tunables.COMPILED_SIZE = 1  # compiled loops for the tests' blocks too, which are small

RANKS = None if launched().by == "one" else launched().ranks
if RANKS is None:
    os.environ["PARLINALG_MPI"] = "0"  # MPI started here would be inherited by the mpiexec runs
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
os.environ.setdefault("MPLBACKEND", "Agg")
SIZE = RANKS or 1
COLLECTED = pytest.StashKey[list[pytest.Item]]()  # all tests, those of other numbers of ranks included
CORE = {4: 1, 8: 6}  # numbers of ranks at which one in so many tests of the core runs, whatever part a run takes
RARE = {5, 7, 12, 16}  # numbers of ranks at which only the tests run that name them
SERIAL = re.compile(r"^pytestmark = \[?pytest\.mark\.serial\b", re.MULTILINE)
UNAVAILABLE = "cannot be had here:"
collect_ignore = [] if BACKEND == "cupy" else ["backend/test_halves.py", "backend/test_standin.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parlinalg")
    group.addoption("--full", action="store_true", help="run the full sweeps, not samples of them")
    group.addoption("--runs", default="", help="which runs to start, as 2,4,4:cupy (default: all in test_runs.py)")
    group.addoption("--share", type=int, default=1, help="run one in so many of the tests, which ones by --seed")
    group.addoption("--seed", type=int, help="which part (default: PARLINALG_TEST_SEED, else the number of commits)")
    group.addoption("--run-paths", default="tests", help="what those runs run: paths, separated by spaces")


def pytest_configure(config: pytest.Config) -> None:
    if (
        SIZE > 1 and config.option.basetemp is None
    ):  # ranks that make pytest's numbered folders at once disturb each other
        folder = tempfile.mkdtemp(prefix="pytest-rank-")
        config.option.basetemp = folder
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    config.option.with_mpi = True  # mpiexec is noticed, and a test that needs more ranks is left out, not skipped
    for mark in (
        "serial: runs once, on one rank without MPI",
        "ranks(*sizes, full=()): runs on these numbers of ranks only, with --full on more",
        "always: runs on all of them, whatever part of the tests a run takes",
        "one_in(n): a test that takes long or has many kin: if all tests are to run, one in n of these runs",
        "core: runs on 4 ranks, one in six on 8, whatever part of the tests a run takes",
    ):
        config.addinivalue_line("markers", mark)
    if config.option.seed is None:
        config.option.seed = int(os.environ.get("PARLINALG_TEST_SEED") or seed_of())
    _hypothesis_profiles(config.getoption("--full"))


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.option.seed
    return f"seed {seed}: which tests run on several numbers of ranks; --seed {seed} repeats it"


def _hypothesis_profiles(full: bool) -> None:
    from hypothesis import HealthCheck, Phase, settings

    examples = 500 if full else 25
    settings.register_profile(
        "mpi",
        derandomize=True, database=None, deadline=None, print_blob=False, max_examples=examples,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
        # Shrinking on one rank would call the body out of step with the others.
        phases=[Phase.explicit, Phase.generate] if SIZE > 1 else tuple(Phase),
    )  # fmt: skip
    settings.load_profile("mpi")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if RANKS is not None and collection_path.suffix == ".py":  # thousands of items times all ranks
        return True if SERIAL.search(collection_path.read_text()) else None
    return None


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark every test that is not serial as pytest-mpi's users mark theirs."""
    if not item.get_closest_marker("serial") and not item.get_closest_marker("mpi"):
        mark = item.get_closest_marker("ranks")
        item.add_marker(pytest.mark.mpi(min_size=min(mark.args) if mark else 1))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if RANKS is None and BACKEND == "numpy":
        config.stash[COLLECTED] = list(items)
    share = config.getoption("--share")
    if RANKS is None and len(items) >= MANY and not config.getoption("--full"):
        share = max(share, HERE_SHARE)
    wanted, unwanted = [], []
    for item in items:
        (wanted if runs_on(item, SIZE, BACKEND, share) else unwanted).append(item)
    if unwanted:
        config.hook.pytest_deselected(items=unwanted)
        items[:] = wanted


def runs_on(item: pytest.Item, ranks: int, backend: str, share: int) -> bool:
    """Return True if a test is one of a run on so many ranks, which takes one in `share` of those it need not."""
    full = item.config.getoption("--full")
    if item.get_closest_marker("serial"):
        if RANKS is not None or (ranks, backend) != (1, "numpy") or item.config.option.only_mpi:
            return False
        mark = item.get_closest_marker("one_in")
        few = full or len(item.config.stash[COLLECTED]) < MANY
        kin = share_of(item.nodeid, mark.args[0] if mark else 1)
        few = few or item.get_closest_marker("always")
        return bool(few) or chosen(item.name, 1, backend, kin, item.config.option.seed)
    if mark := item.get_closest_marker("ranks"):
        if ranks not in mark.args and not (full and ranks in mark.kwargs.get("full", ())):
            return False
    else:
        least = item.get_closest_marker("mpi").kwargs.get("min_size", 1)
        if ranks in RARE or least > ranks:
            return False
    named = item.get_closest_marker("always") or (ranks in CORE and item.get_closest_marker("core"))
    seed = item.config.option.seed
    if backend == "numpy" and (named or _home(item, whole(seed)) == ranks > 1):
        mark = item.get_closest_marker("one_in")
        few = full or "PARLINALG_TEST_REPORT" not in os.environ  # asked for, not launched by the run of all tests
        core = 1 if item.get_closest_marker("always") else CORE.get(ranks, 1)
        kin = core if named else ALONE_SHARE if _home(item) == ranks > min(WHOLE) else WHOLE_SHARES[ranks]
        kin = max(kin, mark.args[0]) if mark else kin
        return few or chosen(item.name, ranks, backend, kin, seed)
    return chosen(item.name, ranks, backend, 1 if full else share, seed)


def _home(item: pytest.Item, whole: int = min(WHOLE)) -> int:
    """The number of ranks at which a test runs in any case, where all tests that can run on `whole` ranks do: these, or
    the least that it runs on; of tests of one rank the run without MPI."""
    if item.get_closest_marker("serial"):
        return 1
    if mark := item.get_closest_marker("ranks"):
        return whole if whole in mark.args else min(mark.args)
    return max(whole, item.get_closest_marker("mpi").kwargs.get("min_size", 1))


def pytest_collection_finish(session: pytest.Session) -> None:
    if RANKS is None and BACKEND == "numpy" and COLLECTED in session.config.stash:  # not after errors of --maxfail
        begin(session.items, session.config, partial(_files, session.config.stash[COLLECTED]))


def _files(items: list[pytest.Item], ranks: int, backend: str, share: int) -> list[str]:
    """The files of the tests of a run: reading all files costs each of its ranks some seconds."""
    found = dict.fromkeys(item.path for item in items if runs_on(item, ranks, backend, share))
    return [str(path.relative_to(ROOT)) for path in found]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    _refuse_skip(report)
    return report


def _refuse_skip(report: pytest.TestReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if UNAVAILABLE not in reason:
            report.outcome = "failed"
            report.longrepr = f"skipped: {reason!r}; a test may be skipped only for a reason '{UNAVAILABLE} …'"


class Counts:
    """What became of the tests, for the launcher."""

    def __init__(self) -> None:
        self.collected = 0
        self.outcomes: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collected = len(session.items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.outcomes[report.nodeid] = report.outcome

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        path = os.environ.get("PARLINALG_TEST_REPORT")
        exchange = verdicts()
        if path and (exchange is None or exchange.rank == 0):
            Path(path).write_text(json.dumps({"collected": self.collected, "outcomes": self.outcomes}))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if RANKS is not None and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK  # a folder of tests that are serial, or of other numbers of ranks


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.pluginmanager.register(Counts(), "parlinalg-counts")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for line in config.stash.get(RUNS_DONE, []):
        terminalreporter.write_line(line)


RUNS_DONE = pytest.StashKey[list[str]]()


@pytest.fixture
def runs_done(request: pytest.FixtureRequest) -> list[str]:
    """Lines about the runs under mpiexec, printed at the end."""
    return request.config.stash.setdefault(RUNS_DONE, [])


@pytest.fixture(scope="session")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether to run full sweeps (`--full`)."""
    return bool(request.config.getoption("--full"))


@pytest.fixture(scope="session")
def backend() -> str:
    """The backend of this run: "numpy", or "cupy" (its stand-in, unless PARLINALG_TEST_BACKEND=gpu)."""
    return "numpy" if BACKEND == "numpy" else "cupy"


@pytest.fixture(scope="session")
def parlinalg_backend(backend: str) -> str:
    """The backend of the grids that the plugin makes."""
    return backend


@pytest.fixture(scope="session")
def xp(backend: str) -> Any:
    """The array module of this run."""
    from parlinalg.backend import select_backend

    return select_backend(backend).xp


@pytest.fixture(scope="session")
def world() -> Any:
    """parlinalg's communicator over all ranks of this run."""
    from parlinalg.comm import open_comm

    return open_comm()


@pytest.fixture
def tune(request: pytest.FixtureRequest, world: Any) -> Iterator[Tuning]:
    """`tune(MOVE_BUFFER=7)` gives tunables other values for this test, which fails if no rank reads them (`Tuning`).

    That is checked where the test always runs: on more ranks blocks may be too small for the value to matter.
    """
    tuning = Tuning(SIZE)
    yield tuning
    tuning.restore()
    if passed(request.node) and _home(request.node) >= SIZE:
        tuning.check(world)


@pytest.fixture
def folder(mpi_tmp_path: Path) -> Path:
    """An empty folder that all ranks see (`tmp_path` is another one on every rank)."""
    return mpi_tmp_path
