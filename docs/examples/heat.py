# The heat equation on a plate: mpiexec -n 4 python heat.py 101 83 200
import sys

import parlinalg as pla

rows, columns, steps = (int(word) for word in sys.argv[1:4]) if len(sys.argv) > 3 else (101, 83, 200)

u = pla.zeros((rows, columns))
u[0, :] = 100.0  # one edge is hot, and so is a spot
u[rows // 2 : rows // 2 + 5, columns // 3 : columns // 3 + 5] = 80.0

for _ in range(steps):
    around = u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2]
    u[1:-1, 1:-1] += 0.2 * (around - 4 * u[1:-1, 1:-1])

pla.print0("mean:", float(pla.mean(u)))
pla.print0("along the middle:", u[:: max(rows // 7, 1), columns // 2].tolist())
hottest = int(pla.argmax(u[1:, :]))
pla.print0("hottest below the edge:", divmod(hottest, columns), float(pla.max(u[1:, :])))
