"""Sphinx's settings: `python -m sphinx -W -b html docs docs/_build/html`."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.util import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import parlinalg  # noqa: E402

project = "parlinalg"
author = "the parlinalg authors"
copyright = author
release = version = parlinalg.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "numpydoc",
]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
default_role = "py:obj"
add_module_names = False
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = f"parlinalg {release}"
html_copy_source = False
html_math_renderer = "mathml"

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"
numpydoc_show_class_members = False

# The modules of the reference, lowest layer first; each documents the names in its `__all__`.
MODULES = {
    "errors": "Errors",
    "hints": "Names of other libraries",
    "backend": "Where blocks live",
    "comm": "Ranks talking",
    "layout": "Layouts",
    "moves": "Changes of layout as pure data",
    "plan": "Plans of products",
    "grid": "Processor grids",
    "redistribute": "Changes of layout as communication",
    "array": "Distributed arrays",
    "array.namespace": "Functions of arrays",
    "random": "Random arrays",
    "matmul": "Distributed products",
    "matmul.assign": "How axes are assigned to a product",
    "matmul.bounds": "Lower bounds",
    "linalg": "Linear algebra",
    "fft": "Fourier transforms",
    "schemes": "Parallel schemes",
    "autograd": "Derivatives",
    "autograd.ops": "Operations with derivatives",
    "nn": "Layers",
    "nn.init": "Initial weights",
    "nn.pretrained": "Weights that people have",
    "optim": "Optimizers",
    "optim.schedules": "Learning rates",
    "datasets": "Data",
    "parallel": "Gradients over ranks",
    "offload": "Disks and host memory",
    "pipeline": "Pipelines",
    "pipeline.partition": "Partitions of layers",
    "pipeline.simulate": "Simulated pipelines",
    "pipeline.drawing": "Timelines of pipelines",
    "train": "Training",
    "train.config": "Configurations",
    "train.mesh": "Meshes of ranks",
    "train.map": "Which rank is where",
    "train.checkpoint": "Checkpoints",
    "train.language": "Language models in training",
    "train.recipes": "Recipes of configurations",
    "testing": "Tests",
    "cli": "Command line",
}


def public(module: Any) -> list[str]:
    """The names a module documents: those of `__all__`, else those it defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def write_reference(app: Any, config: Any) -> None:
    """One page a module, and the list of the package's own names, before Sphinx looks for pages."""
    folder = Path(app.srcdir) / "api" / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    listed, homes = [], {}
    for name, title in MODULES.items():
        try:
            module = import_module(f"parlinalg.{name}")
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("parlinalg"):
                raise
            continue
        own = {
            n: value for n in public(module) if id(value := getattr(module, n)) not in homes
        }  # once, where it begins
        names = [
            n
            for n, value in own.items()
            if callable(value) and value.__doc__ and not (getattr(value, "__module__", None) or "").startswith("numpy")
        ]
        homes.update({id(getattr(module, n)): f"{module.__name__}.{n}" for n in names})
        write(folder / f"{name}.rst", page(module, title, names))
        listed.append(f"   {name}")
    links = [homes[id(v)] for n in parlinalg.__all__ if id(v := getattr(parlinalg, n)) in homes]
    lines = ["The names of the package", "========================", "", ".. autosummary::", ""]
    write(folder / "names.rst", "\n".join([*lines, *(f"   ~{link}" for link in links), ""]))
    lines = ["The modules", "===========", "", ".. toctree::", "   :maxdepth: 1", "", *listed, ""]
    write(folder / "modules.rst", "\n".join(lines))


def page(module: Any, title: str, names: list[str]) -> str:
    """The reference of a module: its docstring, a table of its names, and each of them."""
    lines = [f"{title} (``{module.__name__}``)", "=" * 100, "", escaped((module.__doc__ or "").strip()), ""]
    lines += [f".. currentmodule:: {module.__name__}", "", ".. autosummary::", "", *(f"   {n}" for n in names), ""]
    for name in names:
        if isinstance(getattr(module, name), type):
            lines += [f".. autoclass:: {name}", "   :members:", "   :show-inheritance:", ""]
        else:
            lines += [f".. autofunction:: {name}", ""]
    return "\n".join(lines)


def write(path: Path, text: str) -> None:
    """Write a file unless it holds the text already, so that a second build reads less."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


_CODE = re.compile(r"(``.+?``|`[^`]+`)")


def escaped(text: str) -> str:
    """Prose in which `*`, `|` and `_` at a word's end mean themselves, as they do in this library's docstrings."""
    parts = _CODE.split(text)
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"(?<!\\)([*|])", r"\\\1", parts[i])
        parts[i] = re.sub(r"(?<=\w)_(?=\W|$)", r"\\_", parts[i])
    return "".join(parts)


def escape_docstring(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Escape what reStructuredText would take for markup; examples are left alone."""
    out: list[str] = []
    literal = False
    for line in lines:
        if line.strip().startswith(">>>"):
            literal = True
        elif not line.strip():
            literal = False
        out.append(line if literal else escaped(line))
    lines[:] = out


def leave_out_missing(app: Any, page: str, source: list[str]) -> None:
    """Leave the benchmarks out of the contents of a checkout that has not run them."""
    if page == "index" and not (Path(app.srcdir) / "benchmarks.md").exists():
        source[0] = source[0].replace("\nbenchmarks\n", "\n")


def render_math(self: Any, node: Any) -> None:
    """Write a formula as MathML, which browsers draw without a script; an inline one is a `math`, others a block."""
    inline = isinstance(node, nodes.math)
    text = convert(node.astext(), display="inline" if inline else "block")
    if "\\" in text:
        logging.getLogger(__name__).warning("a formula has a command that MathML lacks: %s", text, location=node)
    self.body.append(text if inline else f'<div class="math">{text}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> None:
    app.add_html_math_renderer("mathml", (render_math, None), (render_math, None))
    app.connect("source-read", leave_out_missing)
    app.connect("config-inited", write_reference)
    app.connect("autodoc-process-docstring", escape_docstring, priority=100)
