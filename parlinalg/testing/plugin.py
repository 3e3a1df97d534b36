"""The pytest plugin: grids as fixtures, the markers of pytest-mpi, and one verdict over all ranks.

PYTEST_DONT_REWRITE: it asserts nothing.
"""

from __future__ import annotations

import importlib.util
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from parlinalg.comm import Comm, SingleComm, open_comm
from parlinalg.grid import Grid, factorizations
from parlinalg.testing.agreement import END, REPORT, OutOfStepError, agree, failures_of, verdicts

AXES = ("a", "b", "c")
MARKERS = (
    "mpi(min_size=1): needs --with-mpi and at least so many ranks",
    "mpi_skip: is skipped under --with-mpi",
    "mpi_xfail: is expected to fail under --with-mpi",
    "mpi_break: mpi_skip by its old name",
    "grids(*axes): the fixture grid has exactly these axes, of all sizes; else one, two and three: a, b, c",
)
PASSED, FAILED, SKIPPED, XFAILED, XPASSED = range(5)
"""The outcomes of a phase of a test; the last is a failure of a test that should have failed."""

_DEADLINE = pytest.StashKey[float]()
_PASSED = pytest.StashKey[bool]()


# ------------------------------------------------------------------------------------------ options and markers


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not _has_pytest_mpi(pluginmanager):
        _add_options(parser)


def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser) -> None:
    """Add the options if pytest-mpi, which is installed, turns out not to be loaded (`-p parlinalg.testing`)."""
    _add_options(parser)


def _has_pytest_mpi(pluginmanager: pytest.PytestPluginManager) -> bool:
    """Return True if pytest-mpi is loaded, or will be."""
    if pluginmanager.hasplugin("pytest_mpi"):
        return True
    found = importlib.util.find_spec("pytest_mpi") is not None and not pluginmanager.is_blocked("pytest_mpi")
    return found and not os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD")


def _add_options(parser: pytest.Parser) -> None:
    for name, text in (("--with-mpi", "run the tests marked mpi too"), ("--only-mpi", "run these alone")):
        try:
            parser.addoption(name, action="store_true", default=False, help=f"{text}, under mpiexec")
        except ValueError:  # pytest-mpi has added it
            return


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    for line in MARKERS:
        config.addinivalue_line("markers", line)
    exchange = verdicts(expected=_testing_mpi(config))
    if exchange is None:
        return
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        with capture.global_and_fixture_disabled(), suppress(OSError):  # it may be closed
            exchange.stderr = os.dup(2)
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if exchange.rank != 0 and terminal is not None:
        terminal._tw._file = open(os.devnull, "w")  # noqa: SIM115


def _testing_mpi(config: pytest.Config) -> bool:
    return bool(config.getoption("--with-mpi", False) or config.getoption("--only-mpi", False))


def pytest_report_header(config: pytest.Config) -> str | None:
    return None if ranks() == 1 else f"parlinalg: {ranks()} ranks, which agree on every outcome"


def ranks() -> int:
    """Return the number of ranks at hand."""
    exchange = verdicts()
    return 1 if exchange is None else exchange.size


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests as pytest-mpi does, unless it does so itself."""
    if config.pluginmanager.hasplugin("pytest_mpi"):
        return
    with_mpi, only_mpi = config.getoption("--with-mpi", False), config.getoption("--only-mpi", False)
    for item in items:
        if with_mpi:
            if item.get_closest_marker("mpi_skip") or item.get_closest_marker("mpi_break"):
                item.add_marker(pytest.mark.skip(reason="test does not work under mpi"))
            if item.get_closest_marker("mpi_xfail"):
                item.add_marker(pytest.mark.xfail(reason="test fails under mpi"))
        elif only_mpi and not item.get_closest_marker("mpi"):
            item.add_marker(pytest.mark.skip(reason="test does not use mpi"))
        elif not only_mpi and item.get_closest_marker("mpi"):
            item.add_marker(pytest.mark.skip(reason="need --with-mpi option to run"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.pluginmanager.hasplugin("pytest_mpi") or not _testing_mpi(item.config):
        return
    for mark in item.iter_markers("mpi"):
        if mark.args:
            raise ValueError("mpi mark does not take positional args; write mpi(min_size=2)")
        if ranks() < (least := mark.kwargs.get("min_size", 1)):
            pytest.skip(f"needs {least} ranks, and there are {ranks()}: mpiexec -n {least} python -m pytest --with-mpi")


# ------------------------------------------------------------------------------------------ one verdict


def pytest_collection_finish(session: pytest.Session) -> None:
    names = [item.nodeid for item in session.items]
    exchange = verdicts()
    if exchange is None:
        return
    try:
        agree("", f"the tests {names}", REPORT)
    except OutOfStepError:
        lists = exchange.gather(names)
        only = {rank: sorted(set(theirs) ^ set(lists[0])) for rank, theirs in enumerate(lists) if theirs != lists[0]}
        few = "; ".join(f"rank {rank}: {', '.join(diff[:3]) or 'another order'}" for rank, diff in only.items())
        raise pytest.UsageError(
            f"the ranks collected different tests (those that rank 0 and another rank do not share: {few}); "
            "parametrise over what is the same on all ranks and in the same order, never over a set"
        ) from None


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """Note when pytest-timeout would end the run: a failure should be named before."""
    item.stash[_DEADLINE] = time.monotonic() + settings.timeout


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Report on every rank what the phase came to on all of them."""
    report = yield
    if ranks() > 1:
        _settle(item, report)
    if report.when == "call":
        item.stash[_PASSED] = report.passed
    return report


def _settle(item: pytest.Item, report: pytest.TestReport) -> None:
    """Make a report the same on all ranks."""
    exchange = verdicts()
    assert exchange is not None
    exchange.deadline = item.stash.get(_DEADLINE, math.inf)
    try:
        found = agree(report.longreprtext or "failed" if report.failed else "", _point(report), REPORT, _code(report))
    except OutOfStepError as error:
        report.outcome, report.longrepr = "failed", str(error)
        item.session.shouldstop = "the ranks are out of step"
        return
    codes = [verdict.code for verdict in found]
    if FAILED in codes or (XPASSED in codes and XFAILED not in codes):
        text = failures_of(found)
        if XFAILED in codes:
            text += f"\nexpected to fail, which it did on ranks {_those(codes, XFAILED)} of {len(codes)}"
        report.outcome, report.longrepr = "failed", text
    elif XFAILED in codes:
        report.outcome, report.wasxfail = "skipped", getattr(report, "wasxfail", "on another rank")
    elif SKIPPED in codes and PASSED in codes:
        report.outcome = "failed"
        report.longrepr = (
            f"skipped on ranks {_those(codes, SKIPPED)} of {len(codes)} alone; a test is skipped on all or on none"
        )
    if len(set(codes)) > 1:
        item.session.shouldstop = "the ranks may be out of step after a failure on some of them"
    if report.failed:
        exchange.before.append(item.nodeid)


def passed(item: pytest.Item) -> bool:
    """Return True if the body of a test has passed, on all ranks."""
    return item.stash.get(_PASSED, False)


def _point(report: pytest.TestReport) -> str:
    return report.nodeid if report.when == "call" else f"{report.when} of {report.nodeid}"


def _code(report: pytest.TestReport) -> int:
    expected = hasattr(report, "wasxfail")
    if report.failed:
        return XPASSED if expected or str(report.longrepr).startswith("[XPASS(strict)]") else FAILED
    return (XFAILED if expected else SKIPPED) if report.skipped else PASSED


def _those(codes: list[int], code: int) -> str:
    return ", ".join(str(rank) for rank, theirs in enumerate(codes) if theirs == code)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Wait for the others: those that still test learn that this rank does not any more."""
    agree("", "the end of the tests", END)


def pytest_internalerror(excrepr: object) -> None:
    exchange = verdicts()
    if exchange is not None:
        exchange.say(f"{excrepr}\n")
        exchange.end(f"rank {exchange.rank} of {exchange.size} had an internal error of pytest, and")


# ------------------------------------------------------------------------------------------ fixtures


@pytest.fixture(scope="session")
def parlinalg_backend() -> str:
    """Return the backend of the fixtures' grids; a `conftest.py` may have another one."""
    return "auto"


@pytest.fixture(scope="session")
def world() -> Comm:
    """A communicator of all ranks at hand."""
    return SingleComm() if ranks() == 1 else open_comm()


@pytest.fixture
def make_grid(request: pytest.FixtureRequest, world: Comm, parlinalg_backend: str) -> Iterator[Callable[..., Grid]]:
    """`make_grid({"r": 2, "c": 2})`: a grid over the ranks at hand, closed after the test.

    With fewer ranks in the grid than there are, the others idle, and may make every call.
    """
    made: list[Grid] = []

    def make(sizes: Mapping[str, int], **options: Any) -> Grid:
        made.append(Grid(sizes, **{"comm": world, "backend": parlinalg_backend, "idle": True, **options}))
        return made[-1]

    yield make
    if passed(request.node):
        for grid in reversed(made):
            grid.close()


@pytest.fixture
def grid(request: pytest.FixtureRequest, make_grid: Callable[..., Grid]) -> Grid:
    """Every grid of all ranks at hand, one a test: of one, two and three axes a, b and c, or those of `grids`."""
    return make_grid(request.param)


@pytest.fixture
def serial_grid(grid: Grid, make_grid: Callable[..., Grid]) -> Grid:
    """The twin of `grid` that has the same axes, of one rank each: this rank alone."""
    return make_grid(dict.fromkeys(grid.sizes, 1), comm=SingleComm(), backend=grid.backend.name)


@pytest.fixture
def mpi_tmp_path(world: Comm) -> Iterator[Path]:
    """An empty folder that all ranks see (`tmp_path` is another one on every rank)."""
    with tempfile.TemporaryDirectory(prefix="parlinalg-", ignore_cleanup_errors=True) as made:
        yield Path(world.share(made, others="alike")[0])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "grid" not in metafunc.fixturenames or not _is_ours(metafunc):
        return
    mark = metafunc.definition.get_closest_marker("grids")
    found = every_grid(ranks(), mark.args if mark else AXES, exact=mark is not None)
    names = ["x".join(map(str, sizes.values())) for sizes in found]
    metafunc.parametrize("grid", found, ids=names, indirect=True)


def _is_ours(metafunc: pytest.Metafunc) -> bool:
    """Return True if the fixture `grid` of this test is the plugin's, and not one of the tests' own."""
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs.get("argnames", "")
        if "grid" in (names.replace(",", " ").split() if isinstance(names, str) else names):
            return False
    definitions = metafunc._arg2fixturedefs.get("grid", ())
    return bool(definitions) and definitions[-1].func.__module__ == __name__


def every_grid(size: int, axes: tuple[str, ...] = AXES, exact: bool = False) -> list[dict[str, int]]:
    """Return the sizes of every grid over `size` ranks of the first one, two, … axes; with `exact` of all axes.

    >>> every_grid(4, ("r", "c"), exact=True)
    [{'r': 1, 'c': 4}, {'r': 2, 'c': 2}, {'r': 4, 'c': 1}]
    """
    counts = [len(axes)] if exact else range(1, len(axes) + 1)
    return [dict(zip(axes[:n], shape)) for n in counts for shape in sorted(factorizations(size, n))]
