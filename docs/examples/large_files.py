# Files larger than a rank's memory: mpiexec -n 4 python large_files.py FOLDER 3001 37
import sys
from pathlib import Path

import parlinalg as pla

folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
n, d = (int(word) for word in sys.argv[2:4]) if len(sys.argv) > 3 else (3001, 37)

i, j = pla.arange(n)[:, None], pla.arange(d)[None, :]
pla.save(folder / "samples.npy", pla.sin(i * (j + 1) / 7) * (j + 2) + j)  # each rank writes its part

samples = pla.load(folder / "samples.npy")  # and reads its part
scaled = (samples - pla.mean(samples, axis=0)) / pla.std(samples, axis=0)
pla.save(folder / "scaled.h5", scaled, compression="gzip")

covariance = pla.load(folder / "scaled.h5").T @ scaled / n
pla.save(folder / "covariance.zarr", covariance)

again = pla.load(folder / "covariance.zarr")
pla.print0("trace:", float(pla.linalg.trace(again)))
pla.print0("norm:", float(pla.linalg.matrix_norm(again)))
pla.print0("strongest:", float(pla.max(abs(pla.tril(again, k=-1)))))
