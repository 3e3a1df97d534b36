# Kernel ridge regression, its penalty chosen by leaving one out: mpiexec -n 4 python ridge.py 601
import sys

import parlinalg as pla

n = int(sys.argv[1]) if len(sys.argv) > 1 else 601

x = pla.linspace(0, 1, n)
y = pla.sin(9 * x) + 0.3 * pla.random.default_rng(0).standard_normal(n)
K = pla.exp(-((x[:, None] - x[None, :]) ** 2) / (2 * 0.1**2))

w, V = pla.linalg.eigh(K)  # once for all penalties
z = V.T @ y


def left_out(penalty):
    """Return the mean squared error of predicting each y from the others."""
    kept = w / (w + penalty)
    own = (V * V) @ kept  # the diagonal of K (K + penalty)⁻¹
    return pla.mean(((y - V @ (kept * z)) / (1 - own)) ** 2)


errors = {penalty: float(left_out(penalty)) for penalty in (0.001, 0.01, 0.1, 1.0, 10.0)}
penalty = min(errors, key=errors.get)
pla.print0("errors:", {key: f"{value:.10f}" for key, value in errors.items()})

weights = pla.linalg.cho_factor(K + penalty * pla.eye(n)).solve(y)
pla.print0("penalty:", penalty, "distance to the truth:", f"{float(pla.std(K @ weights - pla.sin(9 * x))):.10f}")
