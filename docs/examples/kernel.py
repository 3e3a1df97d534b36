# Regression with a Gaussian kernel: mpiexec -n 4 python kernel.py 601
import sys

import parlinalg as pla

n = int(sys.argv[1]) if len(sys.argv) > 1 else 601

x = pla.linspace(0, 1, n)
y = pla.sin(9 * x) + 0.3 * pla.random.default_rng(0).standard_normal(n)

squares = (x[:, None] - x[None, :]) ** 2


def predicted(width):
    """Return at every x the mean of the other y, weighted by a Gaussian of the distance."""
    weights = pla.exp(-squares / (2 * width**2))
    weights[pla.eye(n, dtype=pla.bool)] = 0.0  # leave one out
    return (weights @ y) / pla.sum(weights, axis=1)


errors = {width: float(pla.mean((y - predicted(width)) ** 2)) for width in (0.01, 0.02, 0.04, 0.08, 0.16)}
width = min(errors, key=errors.get)
pla.print0("errors:", errors)
pla.print0("width:", width, "distance to the truth:", float(pla.std(predicted(width) - pla.sin(9 * x))))
