"""A rank that fails, hangs or is killed in the middle of a factorization, and equal results on every number of ranks.

Each test starts its own ranks.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from tests.launching import launch

pytestmark = [pytest.mark.serial, pytest.mark.timeout(90)]

PROGRAM = """
import functools, os, signal, sys, time
from pathlib import Path
import numpy as np
import parlinalg as pla
from parlinalg.comm import open_comm, ranks_map

world, failed = open_comm(), Path(__file__).with_suffix(".failed")
grid = pla.Grid({"r": 2, "c": 2}, world)
n, calls, last = 420 if sys.argv[1] == "svd" else 300, 0, None  # of fewer columns one rank finds all
rng = np.random.default_rng(0)
a = rng.standard_normal((n, n))
a = pla.distribute(a @ a.T + np.eye(n), grid, pla.Layout("r", "c"))
b = pla.distribute(rng.standard_normal(n), grid, pla.Layout("r"))
name, *depth = sys.argv[1].split(" on layers ")
routine = functools.partial(getattr(pla.linalg, name), **(dict(depth=int(depth[0])) if depth else {}))
arguments = (a, b) if name in ("solve", "lstsq") else (a,)

def counted(function):
    def call(*args, **options):
        global calls
        calls += 1
        if calls == last:
            failed.touch()
            WHAT  # here
        return function(*args, **options)
    return call

for name in ("all_reduce", "broadcast", "all_gather", "all_to_all", "send", "receive", "attend"):
    setattr(type(world), name, counted(getattr(type(world), name)))

where = ranks_map(world)
if world.rank == 0:
    print(where, flush=True)
routine(*arguments)
world.barrier()
if world.rank == 1:
    assert calls >= 8, calls
    calls, last = 0, calls // 2 + 1
routine(*arguments)
print("done", flush=True)
"""
LAYERED = ["cholesky on layers 2", "solve on layers 2"]
ROUTINES = [*LAYERED, "cholesky", "solve", "inv", "qr", "lstsq", "eigh", "svd", "eig", "polar"]


def run(folder: Path, routine: str, what: str, **env: str):
    path = folder / "program.py"
    path.write_text(PROGRAM.replace("WHAT", what))
    done = launch(4, [str(path), routine], env=env, timeout=60)
    seconds = time.time() - path.with_suffix(".failed").stat().st_mtime  # loops may have been compiled before
    print(f"exit code {done.returncode} after {seconds:.1f} s\n{done.stdout}\n{done.stderr}")
    assert done.returncode not in (0, 124)
    assert "done" not in done.stdout
    return done, seconds


@pytest.mark.one_in(3)
@pytest.mark.parametrize("routine", ROUTINES)
def test_raising(tmp_path: Path, routine: str) -> None:
    """The error is printed with its rank, and all ranks end."""
    done, seconds = run(tmp_path, routine, "raise ValueError('boom')", PARLINALG_TIMEOUT="60")
    assert "[rank 1] ValueError: boom" in done.stderr
    assert seconds < 25


@pytest.mark.one_in(3)
@pytest.mark.parametrize("routine", ROUTINES)
def test_killed(tmp_path: Path, routine: str) -> None:
    """All ranks end; the map that was printed at the start names the rank of the process."""
    done, seconds = run(tmp_path, routine, "os.kill(os.getpid(), signal.SIGKILL)", PARLINALG_TIMEOUT="60")
    assert "'rank': 1, 'host'" in done.stdout
    assert seconds < 25


@pytest.mark.one_in(3)
@pytest.mark.parametrize("routine", [*LAYERED, "cholesky", "solve", "svd"])
def test_hanging(tmp_path: Path, routine: str) -> None:
    """The watchdog names the rank that never came, and where it is."""
    (path := tmp_path / "compiles.py").write_text(PROGRAM.replace("WHAT", "pass"))
    launch(4, [str(path), routine], env={"PARLINALG_TIMEOUT": "60"}, timeout=60)  # loops take seconds to compile
    done, seconds = run(tmp_path, routine, "time.sleep(60)", PARLINALG_TIMEOUT="5")
    at = next(i for i, line in enumerate(PROGRAM.splitlines(), 1) if "# here" in line)
    assert f"rank 1 never came: it is at {tmp_path}/program.py:{at}" in done.stderr
    assert seconds < 25


# ------------------------------------------------------------------------------------------------ equal results
RESULTS = """
import sys
import numpy as np
import parlinalg as pla
from parlinalg import linalg
from parlinalg.comm import open_comm

def fixed(v, like):
    at = np.abs(like).argmax(axis=0), np.arange(v.shape[1])
    return v * (np.abs(like[at]) / like[at])

world = open_comm()
shapes = {1: {"r": 1, "c": 1}, 2: {"r": 1, "c": 2}, 3: {"r": 3, "c": 1}, 4: {"r": 2, "c": 2}}
grid = pla.Grid(shapes[world.size], world)
found = {}
for dtype in "dD":
    n, rng = 97, np.random.default_rng(1)
    def random(*shape):
        x = rng.standard_normal(shape)
        return (x + 1j * rng.standard_normal(shape) if dtype == "D" else x).astype(dtype)
    u, v = (np.linalg.qr(random(n, n))[0] for _ in range(2))
    a, b = (u * np.linspace(1, 1e-2, n)) @ v, random(n, 3)
    s = (u * np.linspace(1, 1e-2, n)) @ u.conj().T
    tall = random(2 * n, 40)
    every = pla.Layout("r", "c")
    A, B, S, T = (pla.distribute(x, grid, every) for x in (a, b, (s + s.conj().T) / 2, tall))
    R = linalg.qr(A).R.gather()
    q, r = (x.gather() for x in linalg.qr(T))
    w, x = (y.gather() for y in linalg.eigh(S))
    left, values, right = (y.gather() for y in linalg.svd(A))
    least = linalg.lstsq(T, pla.distribute(random(2 * n, 2), grid, every))
    signs = np.diag(r) / np.abs(np.diag(r))
    phases = fixed(right.conj().T, right.conj().T)
    results = {
        "cholesky": linalg.cholesky(S), "solve": linalg.solve(A, B), "refined": linalg.solve(A, B, refine=True),
        "lu_factor": linalg.lu_factor(A).solve(B, adjoint=True), "inv": linalg.inv(A), "det": linalg.det(A),
        "slogdet": linalg.slogdet(A).logabsdet, "triangular": linalg.solve_triangular(S, B, lower=True),
        "cho_factor": linalg.cho_factor(S).solve(B), "q": q * signs, "r": signs.conj()[:, None] * r,
        "R of a square matrix": np.abs(np.diag(R)), "eigh values": w, "eigh vectors": fixed(x, x),
        "eigvalsh": linalg.eigvalsh(S), "svd values": values, "svd left": fixed(left, right.conj().T),
        "svd right": phases, "svdvals": linalg.svdvals(T), "lstsq": least.x, "residuals": least.residuals,
        "lstsq values": least.s, "pinv": linalg.pinv(A), "expm": linalg.expm(A), "polar": linalg.polar(A).U,
        "eigvals": np.sort_complex(np.round(linalg.eigvals(S).gather(), 9)),
        "refined least squares": linalg.lstsq(T, B[:1, :2] * pla.ones((2 * n, 1), grid), refine=True).x,
    }
    for name, y in results.items():
        found[f"{name}, {dtype}"] = y.gather() if isinstance(y, pla.DistArray) else y
if world.rank == 0:
    np.savez(sys.argv[1], **found)
"""
CONDITION = 1e2
"""Of the matrices above, and of their vectors: values 1 / 97 apart."""


@pytest.mark.one_in(6)
def test_results_are_equal_on_every_number_of_ranks(tmp_path: Path) -> None:
    """To 1e-12 of the condition, what one number of ranks computes and what others do, from one seed.

    Vectors and the rows of R are compared with their phases fixed.
    """
    path = tmp_path / "results.py"
    path.write_text(RESULTS)
    found = []
    for ranks in (1, 2, 3, 4):
        done = launch(ranks, [str(path), str(tmp_path / f"{ranks}.npz")], timeout=60)
        assert done.returncode == 0, done.stderr
        with np.load(tmp_path / f"{ranks}.npz") as file:
            found.append({name: file[name] for name in file.files})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, right in found[0].items():
            scale = np.abs(right).max()
            assert other[name].dtype == right.dtype
            assert np.isfinite(right).all()
            assert np.abs(other[name] - right).max() <= 1e-12 * CONDITION * scale, name
    same = sum(np.array_equal(found[0][name], found[3][name]) for name in found[0])
    assert same < len(found[0]), "one program ran four times"
