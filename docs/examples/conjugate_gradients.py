# Conjugate gradients: mpiexec -n 4 python conjugate_gradients.py 500
import sys

import parlinalg as pla

n = int(sys.argv[1]) if len(sys.argv) > 1 else 500

x = pla.linspace(0, 1, n)
A = pla.eye(n) + pla.exp(-20 * abs(x[:, None] - x[None, :]))  # symmetric, positive definite
b = pla.sin(7 * x)

u = pla.zeros(n)
r = b - A @ u
p, rho = r, r @ r
while rho > 1e-30 * (b @ b):
    q = A @ p
    step = rho / (p @ q)
    u += step * p
    r -= step * q
    rho, last = r @ r, rho
    p = r + (rho / last) * p

pla.print0("norm of u:", float(pla.linalg.vector_norm(u)))
pla.print0("u at a third:", float(u[n // 3]))
assert pla.max(abs(A @ u - b)) < 1e-12
