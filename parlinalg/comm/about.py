"""What this process knows about its MPI."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from parlinalg.comm.startup import start_mpi
from parlinalg.errors import CommError


def about_mpi() -> dict[str, str]:
    """Facts about the MPI that mpi4py loads: `library`, `standard`, `mpi4py` and `threads`, or the `problem`."""
    try:
        own = version("mpi4py")
    except PackageNotFoundError:
        return {"problem": "mpi4py is not installed"}
    try:
        MPI = start_mpi()
    except CommError as error:
        return {"problem": str(error)}
    except (ImportError, RuntimeError) as error:
        return {"problem": f"mpi4py {own} cannot load an MPI library: {error}"}
    name, numbers = MPI.get_vendor()
    levels = {
        MPI.THREAD_SINGLE: "single", MPI.THREAD_FUNNELED: "funneled", MPI.THREAD_SERIALIZED: "serialized",
        MPI.THREAD_MULTIPLE: "multiple",
    }  # fmt: skip
    return {
        "library": f"{name} {'.'.join(map(str, numbers))}",
        "standard": ".".join(map(str, MPI.Get_version())),
        "mpi4py": own,
        "threads": levels[MPI.Query_thread()],
    }


def main() -> None:
    """Send one GPU buffer to this process itself by MPI: the trial that `parlinalg doctor` runs in a child process.

    Prints "yes" if the values arrive; an MPI that does not know GPU memory fails, or ends the process.
    """
    import numpy as np
    from mpi4py import MPI

    from parlinalg.backend import select

    backend = select("cupy")
    sent = backend.from_host(np.arange(1000, dtype=np.float64))
    received = backend.zeros(1000, np.float64)
    backend.synchronize()
    request = MPI.COMM_SELF.Irecv((received, 1000, MPI.DOUBLE), 0, 7)
    MPI.COMM_SELF.Send((sent, 1000, MPI.DOUBLE), 0, 7)
    request.Wait()
    MPI.COMM_SELF.Allreduce(MPI.IN_PLACE, (received, 1000, MPI.DOUBLE), MPI.SUM)
    backend.synchronize()
    print("yes" if (backend.to_host(received) == np.arange(1000)).all() else "values are lost")


if __name__ == "__main__":
    main()
