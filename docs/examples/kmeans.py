# k-means: mpiexec -n 4 python kmeans.py 5000 3 7
import sys

import parlinalg as pla

n, d, k = (int(word) for word in sys.argv[1:4]) if len(sys.argv) > 3 else (5000, 3, 7)

rng = pla.random.default_rng(0)  # the same numbers on any number of ranks
middles = 2 * rng.standard_normal((k, d))
points = middles[pla.arange(n) % k] + rng.standard_normal((n, d))

centers = points[:k, :]
while True:
    # |x - c|² = |x|² - 2 x·c + |c|², of which |x|² is the same for all centers
    distances = pla.sum(centers**2, axis=1) - 2 * (points @ centers.T)
    nearest = pla.argmin(distances, axis=1)
    member = pla.astype(nearest[:, None] == pla.arange(k), pla.float64)
    old, centers = centers, (member.T @ points) / pla.sum(member, axis=0)[:, None]
    if pla.max(abs(centers - old)) < 1e-13:
        break

pla.print0("points of each center:", pla.sum(member, axis=0).tolist())
pla.print0("centers:", centers.tolist())
pla.print0("inertia:", float(pla.sum((points - centers[nearest]) ** 2)))
