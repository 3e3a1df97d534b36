"""The documentation shows what the library does: its code runs, and its generated parts are up to date.

A Python block whose first line says `mpiexec -n 4` is a program of its own, run on so many ranks; the other blocks of
a page run one after the other in one process without MPI.  Blocks with `>>>` must print what they show.
"""

from __future__ import annotations

import doctest
import importlib.util
import re
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.launching import ROOT, launch

pytestmark = pytest.mark.serial

DOCS = ROOT / "docs"
PAGES = sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
ALL_PAGES = """
import pathlib, sys
for page in sys.argv[1:]:
    names = {"__name__": "page"}
    print(page, flush=True)
    exec(compile(pathlib.Path(page).read_text(), page, "exec"), names)
"""
RANKS = re.compile(r"# .*mpiexec -n (\d+)")


def blocks(page: Path) -> list[str]:
    """The page's Python blocks, each after as many empty lines as there are above it, so that errors name its lines."""
    text = page.read_text()
    return [text[: m.start(1)].count("\n") * "\n" + m[1] for m in BLOCK.finditer(text)]


def ranks_of(block: str) -> int | None:
    found = RANKS.match(block.lstrip())
    return int(found[1]) if found else None


def shows(block: str) -> bool:
    return block.lstrip().startswith(">>>")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", [p for p in PAGES if any(ranks_of(b) is None for b in blocks(p))], ids=name)
def test_code_of_a_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "page"}
    for block in (b for b in blocks(page) if ranks_of(b) is None):
        if shows(block):
            test = doctest.DocTestParser().get_doctest(block, names, page.name, str(page), 0)
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
            said: list[str] = []
            runner.run(test, out=said.append, clear_globs=False)
            assert not runner.failures, "".join(said)
            names.update(test.globs)
        else:
            exec(compile(block, str(page), "exec"), names)
    names.clear()  # functions that a page registers hold on to its names, and so to the mesh that it launched


@pytest.mark.timeout(300)
@pytest.mark.one_in(4)
def test_code_of_all_pages_on_ranks(tmp_path: Path) -> None:
    for i, page in enumerate(PAGES):
        plain = [b for b in blocks(page) if ranks_of(b) is None and not shows(b)]
        merged = ""
        for block in plain:
            merged += block[merged.count("\n") :]
        (tmp_path / f"{i:02}_{page.stem}.py").write_text(merged)
    files = sorted(p.name for p in tmp_path.glob("*.py"))
    done = launch(4, ["-c", ALL_PAGES, *files], timeout=270, cwd=tmp_path)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


PROGRAMS = [(p, b) for p in PAGES for b in blocks(p) if ranks_of(b)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("page", "program"), PROGRAMS, ids=[f"{name(p)}-{i}" for i, (p, _) in enumerate(PROGRAMS)])
def test_program_of_a_page(page: Path, program: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(program.lstrip())
    done = launch(ranks_of(program) or 1, [str(tmp_path / "program.py")], timeout=50, cwd=tmp_path)
    assert done.returncode == 0, f"{name(page)}:\n{program}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


@pytest.mark.always
@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=name)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    generate = load(DOCS / "generate.py")

    def run(ranks: int, arguments: list[str]) -> str:
        done = launch(ranks, arguments, timeout=50)
        assert done.returncode == 0, done.stderr
        return done.stdout

    text = page.read_text()
    assert generate.filled(text, run) == text, "run python docs/generate.py"


@pytest.mark.parametrize("ranks", [0, 4])
def test_entries_of_the_tables_of_other_libraries(ranks: int, tmp_path: Path) -> None:
    page = DOCS / "guide" / "coming_from.md"
    lines = [*blocks(page)]
    for row in re.findall(r"^\|(?!.*parlinalg \||---).*", page.read_text(), re.M):
        for code in re.findall("`([^`]+)`", row.split(" | ")[1]):
            lines.append(f"exec({code!r}, dict(globals(), A=A.copy(), a=a.copy()))")
    assert len(lines) > 70
    (tmp_path / "entries.py").write_text("\n".join(lines))
    done = launch(ranks, ["entries.py"], timeout=50, cwd=tmp_path)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


CONF = """
from pathlib import Path
__file__ = {conf!r}
exec(Path(__file__).read_text())
extensions = ["myst_parser"]
suppress_warnings = ["myst.xref_missing", "image.not_readable", "docutils"]
def setup(app):
    app.add_html_math_renderer("mathml", (render_math, None), (render_math, None))
"""


def test_formulas_are_drawn_without_a_network(tmp_path: Path) -> None:
    """The pages with formulas, built by the settings of the whole but for the reference, which takes minutes."""
    written = [p for p in PAGES if re.search(r"\$\$.+?\$\$", p.read_text(), re.S)]
    assert len(written) > 1
    (tmp_path / "conf.py").write_text(CONF.format(conf=str(DOCS / "conf.py")))
    (tmp_path / "index.md").write_text("# All\n```{toctree}\n" + "\n".join(p.stem for p in written) + "\n```\n")
    for page in written:
        (tmp_path / page.name).write_text(page.read_text())
    command = ["-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", ".", "html"]
    done = launch(0, command, timeout=50, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for page in written:
        html = (tmp_path / "html" / f"{page.stem}.html").read_text()
        assert html.count('Math/MathML" display="block"') == page.read_text().count("\n$$")
        assert "$" not in re.sub(r"(?s)<(script|pre|svg).*?</\1>", "", html)
        assert not re.search(r"""<(script|link|img|iframe)[^>]*["'](https?:)?//""", html)


def test_figures_are_up_to_date() -> None:
    figures = load(DOCS / "figures.py")
    for file in figures.FILES:
        assert (figures.FOLDER / f"{file}.svg").read_text() == figures.draw(file), "run python docs/figures.py"


def test_every_key_of_a_configuration_is_documented() -> None:
    from parlinalg.train import choices, config
    from parlinalg.train.schema import Section

    page = (DOCS / "guide" / "configuration.md").read_text()
    sections = [c for c in vars(config).values() if isinstance(c, type) and issubclass(c, Section)]
    keys = [f.name for section in sections for f in fields(section)]
    for table in (choices.DATASETS, choices.MODELS, choices.OPTIMIZERS, choices.LR_SCHEDULES, choices.CRITERIA):
        keys += [*table, *(key for kind in table.values() for key in kind.options)]
    assert not [key for key in dict.fromkeys(keys) if f"`{key}`" not in page]


@pytest.mark.parametrize(
    ("page", "file", "axes"),
    [("configuration", "my_config.py", {"data": 2, "t": 2}), ("text", "my_text.py", {"r": 2, "c": 2})],
)
def test_the_configurations_shown_are_right(page: str, file: str, axes: dict[str, int], tmp_path: Path) -> None:
    from parlinalg.train import resolve

    (shown,) = (b for b in blocks(DOCS / "guide" / f"{page}.md") if f"# {file}" in b)
    (tmp_path / file).write_text(shown)
    assert resolve(tmp_path / file, 4).axes == axes


def test_every_scheme_is_in_the_order_of_the_tables() -> None:
    generate = load(DOCS / "generate.py")
    assert set(generate.schemes()) == set(generate.ORDER)


def test_links_between_pages() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{name(page)} links to {target}"


def test_pages_name_no_place_of_one_machine() -> None:
    for page in [ROOT / "README.md", *PAGES]:
        assert not re.search(r"/(work|home|root|tmp)/", page.read_text()), page
