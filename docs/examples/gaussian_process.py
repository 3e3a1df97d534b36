# Gaussian-process regression, trained by gradients: mpiexec -n 4 python gaussian_process.py 601
import math
import sys

import parlinalg as pla

n = int(sys.argv[1]) if len(sys.argv) > 1 else 601

x = pla.linspace(0, 1, n)
y = pla.sin(9 * x) + 0.3 * pla.random.default_rng(0).standard_normal(n)
squares = (x[:, None] - x[None, :]) ** 2
one = pla.astype(x[:, None] == x[None, :], pla.float64)

length, height, noise = (pla.Tensor(pla.asarray(math.log(v)), requires_grad=True) for v in (0.3, 0.5, 0.6))


def kernel():
    return pla.exp(2 * height) * pla.exp(-squares / 2 * pla.exp(-2 * length))


def surprise():
    """Return the negative logarithm of the probability of y, by its Cholesky factor."""
    L = pla.linalg.cholesky(kernel() + pla.exp(2 * noise) * one)
    z = pla.linalg.solve_triangular(L, y, lower=True)
    return pla.vecdot(z, z) / 2 + pla.sum(pla.log(pla.linalg.diagonal(L))) + n / 2 * math.log(2 * math.pi)


before = surprise().item()
for _ in range(40):
    surprise().backward()
    for parameter in (length, height, noise):
        parameter.data = parameter.data - parameter.grad / n
        parameter.grad = None

found = {name: math.exp(t.item()) for name, t in (("length", length), ("height", height), ("noise", noise))}
pla.print0("surprise:", f"{before:.8f}", "->", f"{surprise().item():.8f}")
pla.print0("trained:", {name: f"{value:.8f}" for name, value in found.items()})
mean = kernel().data @ pla.linalg.cho_factor(kernel().data + found["noise"] ** 2 * one).solve(y)
pla.print0("distance to the truth:", f"{float(pla.std(mean - pla.sin(9 * x))):.8f}")
