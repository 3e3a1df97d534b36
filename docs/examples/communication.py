"""Print a table, in Markdown, of what functions receive: `mpiexec -n 4 python docs/examples/communication.py`.

A count is that of the rank that receives most.  One that the formula beside it does not give is an error.
"""

import tempfile
from fractions import Fraction
from pathlib import Path

import numpy as np

import parlinalg as pla

n, m = 144, 48
N = n * n

# Expressions, and the words that the rank receives which gets most: exactly, or at most (≤), or within 5% (≈).  Where
# there is no formula they depend on the values.  N elements are in v, w, A and B, n in x and y, m³ in K; p = r·c ranks.
ROWS = """
pla.exp(v), v + w, A * B, pla.where(v > 0, v, w)          | 0
pla.zeros((n, n)), pla.arange(N), pla.asarray(y)          | 0
A.T, A[:, None, :], pla.tril(A), pla.stack([v, w])        | 0
v[:-1], pla.reshape(A, (n, 12, 12))                       | 0
pla.load(file)                                            | 0
pla.sum(v), pla.mean(A), pla.linalg.vector_norm(v), v @ w | 2
pla.std(v)                                                | 4
pla.max(v)                                                | ≤ 4
pla.argmax(v)                                             | 2*(p-1)
pla.cumulative_sum(v)                                     | p-1
v[5], float(v[5])                                         | 1
v[1:], pla.diff(v), pla.roll(v, 1)                        | 1
A[1:-1, 1:-1]                                             | ≤ 2*n*(1/r+1/c)
A[5]                                                      | ≤ n/c
A[:, 5]                                                   | ≤ n/r
pla.sum(A, axis=0)                                        | 2*n/c*(1-1/r)
pla.sum(A, axis=1)                                        | 2*n/r*(1-1/c)
pla.argmax(A, axis=0)                                     | 2*n/c*(r-1)
pla.cumulative_sum(A, axis=0)                             | n/c*(r-1)
A + x[:, None]                                            | n/r-n/p
A + x                                                     | ≤ n/c
x[:, None] * y[None, :]                                   | n-n/p
A @ x                                                     | ≤ n/c+n/r*(1-1/c)
x @ A                                                     | ≤ n/r*(1-1/c)+n/c*(1-1/r)+n/p
print(A)                                                  |
v[v > 1]                                                  |
v[order]                                                  | ≈ 2*N/p*(1-1/p)
pla.searchsorted(v, x)                                    |
pla.sort(v)                                               | ≤ 1.3*N/p
pla.argsort(v)                                            | ≤ 2.6*N/p
pla.unique_values(v)                                      |
pla.flip(v), v[::-1]                                      | N/p
A + A.T                                                   | ≤ N/p
pla.concat([v, w])                                        | ≤ 2*N/p
pla.reshape(A, (N,))                                      | N/p*(1-1/c)
pla.save(file, A)                                         | N/p*(1-1/c)
pla.sort(A, axis=0)                                       | 2*N/p*(1-1/r)
pla.fft.fft(A)                                            | 2*N/p*(1-1/c)
pla.fft.fft(v)                                            | ≤ N-N/p
pla.fft.fftn(K)                                           | 2*m*m*m/p*(1-1/p)
A @ B                                                     | N/r*(1-1/c)+N/c*(1-1/r)
A.gather()                                                | N-N/p
"""

grid = pla.default_grid()
r, c = grid.sizes.values()
p = r * c
rng = np.random.default_rng(0)
folder = grid.world.share(tempfile.mkdtemp())[0]
names = {
    "pla": pla, "print": str, "N": N, "n": n, "file": Path(folder) / "A.npy",
    "order": pla.asarray(rng.permutation(N)),
    **{name: pla.asarray(rng.standard_normal(N)) for name in "vw"},
    **{name: pla.asarray(rng.standard_normal(n)) for name in "xy"},
    **{name: pla.asarray(rng.standard_normal((n, n))) for name in "AB"},
    "K": pla.asarray(rng.standard_normal((m, m, m))),
}  # fmt: skip
pla.save(names["file"], names["A"])
sizes = {name: Fraction(value) for name, value in {"N": N, "n": n, "m": m, "p": p, "r": r, "c": c}.items()}


def apart(expressions: str) -> list[str]:
    """Return the expressions of a line, which commas outside of brackets part."""
    parts, depth = [""], 0
    for letter in expressions.strip():
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def shown(formula: str) -> str:
    """Return a formula as it is written on paper."""
    for code, paper in {"m*m*m": "m³", "*": " ", "-": " − ", "+": " + ", "  ": " "}.items():
        formula = formula.replace(code, paper)
    return formula


pla.print0(f"| function | words received | {r}×{c} ranks | calls |\n|---|---|--:|--:|")
for row in ROWS.strip().splitlines():
    expressions, formula = row.rsplit("|", 1)
    formula = formula.strip()
    most = [0, 0]  # words and calls of the row
    for expression in apart(expressions):
        with pla.ledger(grid) as book:
            eval(expression, names)
        counts = grid.world.share([book.words.total(), book.calls.total()])
        words, calls = map(max, zip(*counts, strict=True))
        most = [max(most[0], words), max(most[1], calls)]
        if formula:
            right = eval(formula.strip("≤≈ "), sizes) if p > 1 else 0
            least, largest = {"≤": (0, right), "≈": (0.95 * right, 1.05 * right)}.get(formula[0], (right, right))
            if not least <= words <= largest:
                raise ValueError(f"{expression} on a {r}×{c} grid: {words} words, {formula} gives {right}")
    code = ", ".join(f"`{each}`" for each in apart(expressions))
    pla.print0(f"| {code} | {shown(formula) or 'by the values'} | {most[0]:,} | {most[1]} |")
