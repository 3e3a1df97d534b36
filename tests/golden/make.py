"""Write the golden files: `python -m tests.golden.make`, in an environment with PyTorch (the extra "peers").

`losses.json` is made by `programs` (PyTorch) and `random.json` by `counted` (plain Python), neither of which imports
parlinalg.  A file changes only where what is to be computed changes: look at what differs before it is kept.
"""

from __future__ import annotations

import json
import platform
from importlib.metadata import version
from typing import Any

from tests.golden import counted
from tests.golden.settings import FOLDER, MODELS

COMMAND = "python -m tests.golden.make"
KEYS: list[tuple[int, str, int, int]] = [(0, "", 0, 0), (3, "blocks.1.attention", 2, 17)]
FIRST, SHAPE = 1000, (5, 7, 3)  # where words are taken from a stream, and the shape of arrays


def losses() -> dict[str, Any]:
    from tests.golden import programs

    return {
        "made by": "tests/golden/programs.py, a PyTorch program independent of parlinalg",
        "command": COMMAND,
        "versions": {"python": platform.python_version(), "numpy": version("numpy"), "torch": version("torch")},
        "models": {model: programs.golden(model) for model in MODELS},
    }


def numbers(key: tuple[int, str, int, int]) -> dict[str, Any]:
    stream, n = counted.hashed(*key), SHAPE[0] * SHAPE[1] * SHAPE[2]
    return {
        "key": list(key),
        "words": {str(bits): [f"{w:x}" for w in counted.words(stream, bits, FIRST, 20)] for bits in (64, 32, 16)},
        "uniform": [u.hex() for u in counted.uniform(stream, n, -2.0, 3.0)],
        "normal": [z.hex() for z in counted.normal(stream, n)],
        "integers": counted.integers(stream, n, -3, 9),
        "bernoulli": "".join("01"[k] for k in counted.kept(stream, 32, 0.3, 0, n)[0]),
    }


def random() -> dict[str, Any]:
    return {
        "made by": "tests/golden/counted.py, plain Python independent of parlinalg and NumPy",
        "command": COMMAND,
        "versions": {"python": platform.python_version()},
        "streams": [numbers(key) for key in KEYS],
        "dropout": [
            {"seed": 5, "name": "dropout", "step": 4, "p": p, "start": start,
             "factors": [f.hex() for f in counted.dropout(5, "dropout", 4, p, SHAPE, start)]}
            for p, start in ((0.1, 0), (0.5, 2), (0.001, 0))
        ],
        "permutations": [
            {"seed": seed, "epoch": epoch, "n": n, "order": counted.permutation(seed, epoch, n)}
            for seed, epoch, n in ((0, 0, 30), (7, 3, 101))
        ],
        "epochs": [
            {"seed": seed, "epoch": epoch, "n": n, "order": counted.shuffled((seed, epoch + 1), n)}
            for seed, epoch, n in ((0, 0, 30), (7, 3, 101))
        ],
    }  # fmt: skip


def text(found: Any, indent: str = "") -> str:
    """JSON with a line for each list of numbers, so that differences can be read."""
    if isinstance(found, dict):
        inner = indent + " "
        lines = ",\n".join(f"{inner}{json.dumps(name)}: {text(value, inner)}" for name, value in found.items())
        return f"{{\n{lines}\n{indent}}}"
    if isinstance(found, list) and any(isinstance(value, dict) for value in found):
        return f"[{', '.join(text(value, indent) for value in found)}]"
    return json.dumps(found)


if __name__ == "__main__":
    for name, made in (("random", random), ("losses", losses)):
        (FOLDER / f"{name}.json").write_text(text(made()) + "\n")
