# Principal components: mpiexec -n 4 python pca.py 5000 40 3
import sys

import parlinalg as pla

n, d, k = (int(word) for word in sys.argv[1:4]) if len(sys.argv) > 3 else (5000, 40, 3)

rng = pla.random.default_rng(0)
hidden = rng.standard_normal((n, k)) * (k - pla.arange(k)) * 3  # k directions of falling variance
samples = hidden @ rng.standard_normal((k, d)) + rng.standard_normal((n, d)) + 5

centered = samples - pla.mean(samples, axis=0)
U, s, Vh = pla.linalg.svd(centered, full_matrices=False)  # by QR first, as there are many rows
variances = s**2 / (n - 1)
pla.print0("explained:", [round(v, 10) for v in (variances / pla.sum(variances))[: k + 1].tolist()])

components = Vh[:k, :]
scores = centered @ components.T
rest = centered - scores @ components
pla.print0("left over:", float(pla.sum(rest**2)))
assert abs(pla.sum(rest**2) / pla.sum(s[k:] ** 2) - 1) < 1e-9
assert pla.max(abs(pla.linalg.eigvalsh(pla.cov(samples, rowvar=False))[-k:] - pla.flip(variances[:k]))) < 1e-8
