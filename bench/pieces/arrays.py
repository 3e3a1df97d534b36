"""Operations on arrays by one library, timed: `arrays.py LIBRARY ELEMENTS REPEATS FOLDER [OPERATION …]`.

NumPy in one process, parlinalg and Heat under mpiexec, Dask with one thread a rank (`BENCH_WORKERS`).  An operation
makes its operands, runs once uncounted, then `REPEATS` times, each from a barrier to the last rank's end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

LIBRARY, ELEMENTS, REPEATS, FOLDER = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
CLUSTERS, FEATURES = 8, 16
Operation = Callable[[], Any]


def forget(path: Path) -> None:
    """Write a file's pages out and drop them from memory, so that it is read from the disk."""
    for each in [path, *path.rglob("*")] if path.is_dir() else [path]:
        if each.is_file():
            with each.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def edge(elements: int) -> int:
    """The edge of a cube of about so many elements, a multiple of 8."""
    return max(8, round(elements ** (1 / 3)) // 8 * 8)


def of_namespace(xp: Any, name: str, draw: Callable[..., Any], done: Callable[[Any], Any]) -> Operation:
    """An operation in the names of the Array API standard, which NumPy and parlinalg have alike."""
    n = ELEMENTS
    if name == "elementwise":
        x, y = draw((n,)), draw((n,))
        return lambda: done(xp.sqrt(x * x + y * y) * 2.0 - x)
    if name == "reduction":
        x = draw((n // 64, 64))
        return lambda: (float(xp.sum(x)), done(xp.std(x, axis=0)))
    if name == "sort":
        x = draw((n // 4,))
        return lambda: done(xp.sort(x))
    if name == "running sum":
        x = draw((n,))
        return lambda: done(xp.cumulative_sum(x))
    if name == "mask":
        x = draw((n,))
        return lambda: done(x[x > 0.5])
    if name == "index array":
        x, at = draw((n // 4,)), xp.astype(draw((n // 4,)) * (n // 4), xp.int64)
        return lambda: done(x[at])
    if name == "fft 3-d":
        k = edge(n // 2)
        x = draw((k, k, k)) + 1j * draw((k, k, k))
        return lambda: done(xp.fft.fftn(x))
    if name == "k-means step":
        points, centres = draw((n // FEATURES, FEATURES)), draw((CLUSTERS, FEATURES))
        numbers = xp.arange(CLUSTERS)

        def step() -> Any:
            distances = xp.sum(centres * centres, axis=1)[None, :] - 2.0 * (points @ centres.T)
            member = xp.astype(xp.argmin(distances, axis=1)[:, None] == numbers[None, :], xp.float64)
            return done((member.T @ points) / xp.sum(member, axis=0)[:, None])

        return step
    raise KeyError(name)


def numpy_operation(name: str) -> Operation:
    import numpy as np

    rng = np.random.default_rng(0)
    if name == "random":
        return lambda: rng.normal(size=ELEMENTS)
    if not name.startswith(("load", "save")):
        return of_namespace(np, name, rng.random, lambda x: x)
    a = rng.random((ELEMENTS // 1024, 1024))
    way, _, suffix = name.partition(" ")
    path = FOLDER / f"numpy{suffix}"

    def save() -> None:
        if suffix == ".npy":
            np.save(path, a)
        elif suffix == ".h5":
            import h5py

            with h5py.File(path, "w") as file:
                file["data"] = a
        else:
            import zarr

            zarr.create_array(path, data=a, overwrite=True)
        for each in [path, *path.rglob("*")] if path.is_dir() else [path]:
            if each.is_file():
                with each.open("rb") as file:
                    os.fsync(file.fileno())

    if way == "save":
        return save
    save()

    def load() -> Any:
        if suffix == ".npy":
            return np.load(path)
        if suffix == ".h5":
            import h5py

            with h5py.File(path) as file:
                return file["data"][...]
        import zarr

        return zarr.load(path)

    return cold(load, path, lambda: None)


def parlinalg_operation(name: str) -> Operation:
    import parlinalg as pla

    rng = pla.random.default_rng(0)
    if name == "random":
        return lambda: rng.normal(size=ELEMENTS)
    if not name.startswith(("load", "save")):
        return of_namespace(pla, name, lambda shape: rng.uniform(size=shape), lambda x: x)
    a = rng.uniform(size=(ELEMENTS // 1024, 1024))
    way, _, suffix = name.partition(" ")
    path, world = FOLDER / f"parlinalg{suffix}", pla.default_grid().world
    if way == "save":
        return lambda: pla.save(path, a)
    pla.save(path, a)
    return cold(lambda: pla.load(path), path, world.barrier, world.rank)


def cold(load: Operation, path: Path, barrier: Operation, rank: int = 0) -> Operation:
    """A load of a file that is not in memory; to forget it is not timed, see `main`."""

    def prepare() -> None:
        if rank == 0:
            forget(path)
        barrier()

    load.__dict__["prepare"] = prepare
    return load


def heat_operation(name: str) -> Operation:
    import heat as ht

    n = ELEMENTS
    ht.random.seed(0)
    if name == "elementwise":
        x, y = ht.random.rand(n, split=0, dtype=ht.float64), ht.random.rand(n, split=0, dtype=ht.float64)
        return lambda: ht.sqrt(x * x + y * y) * 2.0 - x
    if name == "reduction":
        x = ht.random.rand(n // 64, 64, split=0, dtype=ht.float64)
        return lambda: (float(ht.sum(x)), ht.std(x, axis=0))
    if name == "sort":
        x = ht.random.rand(n // 4, split=0, dtype=ht.float64)
        return lambda: ht.sort(x)
    if name == "running sum":
        x = ht.random.rand(n, split=0, dtype=ht.float64)
        return lambda: ht.cumsum(x, 0)
    if name == "mask":
        x = ht.random.rand(n, split=0, dtype=ht.float64)
        return lambda: x[x > 0.5]
    if name == "random":
        return lambda: ht.random.randn(n, split=0, dtype=ht.float64)
    if name == "fft 3-d":
        k = edge(n // 2)
        x = ht.random.rand(k, k, k, split=0, dtype=ht.float64) + 1j * ht.random.rand(k, k, k, split=0, dtype=ht.float64)
        return lambda: ht.fft.fftn(x)
    if name == "k-means step":
        points = ht.random.rand(n // FEATURES, FEATURES, split=0, dtype=ht.float64)
        centres = ht.random.rand(CLUSTERS, FEATURES, dtype=ht.float64)
        numbers = ht.arange(CLUSTERS)

        def step() -> Any:
            distances = ht.sum(centres * centres, axis=1)[None, :] - 2.0 * (points @ centres.T)
            member = (ht.argmin(distances, axis=1)[:, None] == numbers[None, :]).astype(ht.float64)
            return (member.T @ points) / ht.sum(member, axis=0)[:, None]

        return step
    raise KeyError(name)


def dask_operation(name: str) -> Operation:
    import dask
    import dask.array as da

    workers, n = int(os.environ.get("BENCH_WORKERS", "1")), ELEMENTS
    dask.config.set(scheduler="threads", num_workers=workers)
    rng = da.random.default_rng(0)
    draw = lambda shape: rng.random(shape, chunks=(-(-shape[0] // workers), *shape[1:])).persist()  # noqa: E731
    if name == "elementwise":
        x, y = draw((n,)), draw((n,))
        return lambda: (da.sqrt(x * x + y * y) * 2.0 - x).persist()  # noqa: PLW0108 - the graph is a part of it
    if name == "reduction":
        x = draw((n // 64, 64))
        return lambda: dask.compute(da.sum(x), da.std(x, axis=0))
    if name == "running sum":
        x = draw((n,))
        return lambda: da.cumsum(x).persist()
    if name == "mask":
        x = draw((n,))
        return lambda: x[x > 0.5].persist()  # noqa: PLW0108 - the index is a part of the operation
    if name == "random":
        return lambda: rng.normal(size=n, chunks=-(-n // workers)).persist()
    if name == "fft 3-d":
        k = edge(n // 2)
        x = (draw((k, k, k)) + 1j * draw((k, k, k))).persist()
        last = lambda: da.fft.fftn(x, axes=(1, 2)).rechunk((k, -(-k // workers), k))  # noqa: E731
        return lambda: da.fft.fft(last(), axis=0).persist()
    if name == "k-means step":
        points, centres = draw((n // FEATURES, FEATURES)), rng.random((CLUSTERS, FEATURES)).persist()

        def step() -> Any:
            distances = da.sum(centres * centres, axis=1)[None, :] - 2.0 * (points @ centres.T)
            member = (da.argmin(distances, axis=1)[:, None] == da.arange(CLUSTERS)[None, :]).astype(float)
            return ((member.T @ points) / da.sum(member, axis=0)[:, None]).persist()

        return step
    raise KeyError(name)


def main() -> None:
    barrier: Operation = lambda: None  # noqa: E731
    rank = 0
    if LIBRARY in ("parlinalg", "heat"):
        if LIBRARY == "parlinalg":
            import parlinalg as pla

            world = pla.default_grid().world
            barrier, rank = world.barrier, world.rank
        else:
            from mpi4py import MPI

            barrier, rank = MPI.COMM_WORLD.Barrier, MPI.COMM_WORLD.Get_rank()
    told: dict[str, list[float]] = {}
    for name in sys.argv[5:]:
        with suppress(KeyError):
            operation = globals()[f"{LIBRARY}_operation"](name)
            prepare = getattr(operation, "prepare", lambda: None)
            seconds = []
            for _ in range(REPEATS + 1):
                prepare()
                barrier()
                start = time.perf_counter()
                found = operation()
                barrier()
                seconds.append(time.perf_counter() - start)
                del found
            told[name] = seconds[1:]
    if rank == 0:
        print(json.dumps(told))


if __name__ == "__main__":
    main()
