"""Write what the pages show of the library's own tables and output: `python docs/generate.py [--check]`.

A part of a page between `<!-- generated: NAME -->` and `<!-- end -->` is replaced by what the function of that name
returns, so that a page cannot drift from the library; a test runs the check.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from parlinalg.array import functions
from parlinalg.layout import coordinates
from parlinalg.linalg.planner import plan_linalg
from parlinalg.schemes import discover, scheme_words, table_of_schemes
from parlinalg.schemes.scheme import Scheme
from parlinalg.train import config
from parlinalg.train.schema import Section, documentation

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
ORDER = (
    "serial", "data", "zero3", "sequence", "1d", "1d with sequence cuts", "2d", "2.5d, depth on the batch",
    "2.5d, depth on k", "3d",
)  # fmt: skip
MARK = re.compile(r"(<!-- generated: ([\w .-]+) -->\n).*?(<!-- end -->)", re.S)
Runner = Callable[[int, list[str]], str]


def schemes() -> dict[str, Scheme]:
    """All schemes, those of the tables first and in their order."""
    found = {name: file.SCHEME for name, file in discover().items()}
    names = [n for n in ORDER if n in found] + [n for n in found if n not in ORDER]
    return {name: found[name] for name in names}


def axes(cut: tuple[str, ...]) -> str:
    return "–" if not cut else cut[0] if len(cut) == 1 else f"({' '.join(cut)})"


def table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def layouts() -> str:
    """The layouts at rest of every scheme with two leading dims."""

    def rows() -> Iterator[tuple[str, ...]]:
        for name, s in schemes().items():
            dims = (s.residual.dims, s.expand.w.dims, s.inner.dims, s.contract.w.dims)
            yield name, *(", ".join(axes(cut) for cut in d) for d in dims)

    return table(
        ("scheme", "x [batch, seq, k]", "w into a block [k, n]", "inside [batch, seq, n]", "w out of it"), rows()
    )


EIGHT = {
    "data": {"data": 8}, "zero3": {"data": 8}, "1d": {"t": 8}, "1d with sequence cuts": {"t": 8},
    "2d": {"r": 4, "c": 2}, "2.5d, depth on the batch": {"d": 2, "r": 2, "c": 2},
    "2.5d, depth on k": {"d": 2, "r": 2, "c": 2}, "3d": {"i": 2, "j": 2, "l": 2},
}  # fmt: skip
BATCH, SEQUENCE, HIDDEN, INNER = 16, 64, 256, 1024


def words() -> str:
    """The words of a layer into a block and one out of it on eight ranks, and the parameters a rank holds."""

    def rows() -> Iterator[tuple[str, ...]]:
        for name, sizes in EIGHT.items():
            scheme = discover()[name].SCHEME
            counted = [
                scheme_words(scheme, (BATCH, SEQUENCE, HIDDEN), INNER, sizes, at)
                for at in coordinates(tuple(sizes), sizes)
            ]
            forward = max(c["x"] + c["w"] + c["y"] for c in counted)
            backward = max(c["grad y"] + c["dx"] + c["dw"] for c in counted)
            first = dict.fromkeys(sizes, 0)
            held = 0
            for plan, shape in ((scheme.expand, (HIDDEN, INNER)), (scheme.contract, (INNER, HIDDEN))):
                rows, columns = plan.w.block_shape(shape, sizes, first)
                held += rows * columns
            grid = "×".join(str(n) for n in sizes.values())
            yield name, grid, f"{forward:,}", f"{backward:,}", f"{forward + backward:,}", f"{held:,}"

    return table(("scheme", "grid", "forward", "backward", "together", "weights per rank"), rows())


HALVES = "n²/2R (1 − 1/C) + n²/2C (1 − 1/R)"
LINALG = {
    "cholesky": f"{HALVES}; trips n²/p (1 − 1/p)",
    "lu": f"{HALVES} + n b (R − 1)/C for tournaments + n b (1 − 1/C) for corners; trips 3 n²/p (1 − 1/p)",
    "solve": "the same and n b/C (1 − 1/R) for the substitution; trips n²/p (1 − 1/p)",
    "qr": "n²/2R (1 − 1/C) + 2 n²/C (1 − 1/R) + 6 n b/C (1 − 1/R) + 2 n b (1 − 1/C); trips 3 n²/p (1 − 1/p)",
    "lstsq": "4 n² (1 − 1/p) for singular values + n²/2R (1 − 1/C) + n²/C (1 − 1/R) + 6 n b/C (1 − 1/R) "
    "+ 2 n b (1 − 1/C); trips 3 n²/p (1 − 1/p)",
    "eigh": "3 n² (1 − 1/p) + 2 n²/C (1 − 1/R); trips 5/2 n²/p (1 − 1/p)",
    "svd": "4 n² (1 − 1/p) + 4 n²/C (1 − 1/R); trips 5 n²/p (1 − 1/p)",
}
PIVOTED = "n² (1 − 1/p), half of it for Q, + 3 n (p − 1) for choices of pivots; trips 3 n²/p (1 − 1/p)"


def words_of_factorizations() -> str:
    """The words of factorizations to leading order, and exactly for an example, with the calls."""

    def rows() -> Iterator[tuple[str, ...]]:
        n, sizes = 4096, {"r": 4, "c": 4}
        counted = {f"`{name}`": (formula, plan_linalg(name, n, sizes=sizes).costs) for name, formula in LINALG.items()}
        counted["`qr(A, pivoting=True)`"] = PIVOTED, plan_linalg("qr", n, sizes=sizes, pivoting=True).costs
        for name, (formula, found) in counted.items():
            most = int(found.words.argmax())
            yield (
                name, formula, str(found.deal.size), f"{found.words.mean():,.0f}", f"{found.words[most]:,}",
                f"{found.calls[most]:,}",
            )  # fmt: skip

    return table(("routine", "words received, the mean of all ranks", "b", "n = 4096 on 4×4", "most", "calls"), rows())


def numpy_functions() -> str:
    """The functions of NumPy that take distributed arrays."""
    return ", ".join(f"`{name}`" for name in functions.names()) + "."


def keys_of(name: str, section: type[Section]) -> Callable[[], str]:
    """The keys of a section of a configuration, as its fields declare them."""
    head = "key" if section is config.TrainingConfig else f"key of `{name}`"
    left_out = ("parallel",) if section is config.TrainingConfig else ()
    rows = [row for row in documentation(section) if row[0].strip("`") not in left_out]
    return lambda: table((head, "value", "default"), iter(rows))


SECTIONS: dict[str, type[Section]] = {
    "a configuration": config.TrainingConfig, "parallel": config.ParallelConfig,
    "parallel.tensor": config.TensorConfig, "parallel.pipeline": config.PipelineConfig,
    "parallel.sequence": config.SequenceConfig, "schedule": config.ScheduleConfig, "zero": config.ZeroConfig,
    "precision": config.PrecisionConfig, "loss_scale": config.LossScaleConfig, "offload": config.OffloadConfig,
    "checkpoint": config.CheckpointConfig, "sample": config.SampleConfig,
}  # fmt: skip


def run_mpiexec(ranks: int, arguments: list[str]) -> str:
    """The standard output of `mpiexec -n RANKS python ARGUMENTS`."""
    beside = Path(sys.executable).parent / "mpiexec"
    program = str(beside) if beside.exists() else "mpiexec"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [program, "-n", str(ranks), sys.executable, *arguments],
        check=True, capture_output=True, text=True, timeout=120, env=env, cwd=ROOT,
    ).stdout  # fmt: skip


def output(ranks: int, *arguments: str) -> Callable[[Runner], str]:
    """The Markdown that a script of docs/examples prints on several ranks."""
    return lambda run: run(ranks, [str(DOCS / "examples" / arguments[0]), *arguments[1:]]).strip()


def example(ranks: int, *arguments: str) -> Callable[[Runner], str]:
    """The output of a script of docs/examples on several ranks."""

    text = output(ranks, *arguments)
    return lambda run: f"```text\n{text(run)}\n```"


def program(file: Path) -> Callable[[], str]:
    """The code of a script of docs/examples."""
    return lambda: f"```python\n{file.read_text().strip()}\n```"


PARTS: dict[str, Callable[[], str]] = {
    "schemes": lambda: table_of_schemes(schemes()),
    "layouts": layouts,
    "words": words,
    "numpy functions": numpy_functions,
    "words of factorizations": words_of_factorizations,
    **{f"program {file.stem}": program(file) for file in sorted((DOCS / "examples").glob("*.py"))},
    **{f"keys of {name}": keys_of(name, section) for name, section in SECTIONS.items()},
}
OUTPUTS: dict[str, Callable[[Runner], str]] = {
    "blocks data": example(2, "blocks.py", "data", "expand"),
    "blocks columns": example(2, "blocks.py", "1d", "expand"),
    "blocks rows": example(2, "blocks.py", "1d", "contract"),
    "communication": output(4, "communication.py"),
}


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)]


def filled(text: str, run: Runner = run_mpiexec) -> str:
    """A page with its generated parts as they should be."""

    def part(match: re.Match[str]) -> str:
        name = match[2]
        if name not in PARTS and name not in OUTPUTS:
            known = ", ".join([*PARTS, *OUTPUTS])
            raise SystemExit(f"no generated part is called {name!r}; there are {known}")
        body = PARTS[name]() if name in PARTS else OUTPUTS[name](run)
        return f"{match[1]}\n{body}\n\n{match[3]}"

    return MARK.sub(part, text)


def main() -> int:
    stale = []
    for page in pages():
        text = page.read_text()
        right = filled(text)
        if right != text:
            stale.append(str(page.relative_to(ROOT)))
            if "--check" not in sys.argv:
                page.write_text(right)
    if "--check" in sys.argv and stale:
        print(f"out of date: {', '.join(stale)}; run python docs/generate.py", file=sys.stderr)
        return 1
    print(f"{'rewritten' if stale else 'up to date'}: {', '.join(stale) or 'all pages'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
