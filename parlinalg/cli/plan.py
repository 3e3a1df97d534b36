"""`parlinalg plan`: plans, without running anything."""

from __future__ import annotations

import argparse
from pathlib import Path

from parlinalg.cli.parser import Commands, speaks
from parlinalg.comm.streams import tell
from parlinalg.errors import ConfigError, counted
from parlinalg.layout import Layout
from parlinalg.linalg.tile_sizes import FEW

ROUTINES = {
    "cholesky": "A = L Lᴴ", "lu": "P A = L U", "solve": "A X = B by LU", "qr": "A = Q R",
    "lstsq": "the X of least ‖A X - B‖",
    "eigh": "the eigenvalues and eigenvectors of a Hermitian matrix", "svd": "A = U S Vᴴ",
}  # fmt: skip


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    plan = commands.add_parser(
        "plan", help="plan a training, a product, a factorization or an elementwise operation, and say why so",
        description="Choose the grid of a product or a factorization, the layout of an elementwise operation, or the "
        "parallelism of a training, and print what it costs and why it was chosen. No MPI is needed, and nothing is "
        "run, except by --measure.",
    )  # fmt: skip
    what = plan.add_subparsers(metavar="WHAT", required=True)
    _add_matmul(what)
    _add_train(what)
    for name, matrix in ROUTINES.items():
        _add_routine(what, name, matrix)
    _add_elementwise(what)


def _add_matmul(what: Commands) -> None:
    """Add `parlinalg plan matmul`."""
    matmul = what.add_parser(
        "matmul", help="the grid and kernel for C[M, N] = A[M, K] B[K, N]",
        description="Print the grid that moves the fewest words for C[M, N] = A[M, K] B[K, N], these words and their "
        "lower bound, the memory of a rank, and the grids that lost.",
    )  # fmt: skip
    for name, of in (("M", "rows of A and C"), ("N", "columns of B and C"), ("K", "columns of A, rows of B")):
        matmul.add_argument(name, type=int, help=of)
    matmul.add_argument("--ranks", "-p", type=int, required=True, metavar="P", help="the ranks there are")
    matmul.add_argument("--memory", metavar="BYTES", help="what a rank may use, such as 4GiB (default: no limit)")
    matmul.add_argument("--dtype", default="float64", help="of A, B and C (default: %(default)s)")
    matmul.set_defaults(run=run_matmul)
    matmul.add_argument(
        "--machine", metavar="NAME|FILE",
        help="also predict times on a machine: a shipped one, such as a100, or a .toml file",
    )  # fmt: skip


def _add_routine(what: Commands, name: str, matrix: str) -> None:
    """Add `parlinalg plan` for a factorization."""
    routine = what.add_parser(
        name, help=f"the grid and the tiles for {matrix}",
        description=f"Print the grid and the tiles for {matrix}, the words, calls and memory of a rank, and the "
        "time by a model with the constants of parlinalg.tunables, or with measured ones (--measure).",
    )  # fmt: skip
    routine.add_argument(
        "size", metavar="N", type=int, nargs="+", help="rows and columns: one number of a square matrix, else two"
    )
    ranks = routine.add_mutually_exclusive_group(required=True)
    ranks.add_argument("--ranks", "-p", type=int, metavar="P", help="the ranks there are")
    ranks.add_argument("--grid", metavar="r=2,c=2", help="the axes of a grid and their sizes: plan for this one")
    if name in ("solve", "lstsq"):
        routine.add_argument("--sides", type=int, default=1, metavar="K", help="right-hand sides (default: 1)")
    routine.add_argument("--block", type=int, metavar="B", help="rows and columns of a tile (default: the least time)")
    if name == "qr":
        routine.add_argument(
            "--pivoting", action="store_true", help="with column pivoting, A[:, p] = Q R, which takes no --block"
        )
    if name in ("cholesky", "lu", "solve"):
        routine.add_argument(
            "--depth", type=int, metavar="D", help="layers of ranks that hold the whole matrix (2.5D)"
        )  # fmt: skip
    routine.add_argument("--memory", metavar="BYTES", help="what a rank may use, such as 4GiB (default: no limit)")
    routine.add_argument("--dtype", default="float64", help="of the matrix (default: %(default)s)")
    routine.add_argument(
        "--apart", action="store_true", help=f"the ranks share no memory (default: up to {FEW} ranks share it)"
    )
    times = routine.add_mutually_exclusive_group()
    times.add_argument(
        "--measure", action="store_true", help="measure products, and under mpiexec latency and bandwidth"
    )
    times.add_argument(
        "--machine", metavar="NAME|FILE",
        help="choose by predicted times on a machine: a shipped one, such as a100, or a .toml file",
    )  # fmt: skip
    routine.set_defaults(run=run_routine, routine=name)


def _add_elementwise(what: Commands) -> None:
    """Add `parlinalg plan elementwise`."""
    elementwise = what.add_parser(
        "elementwise",
        help="the layout in which operands meet",
        description="Print the layout of an elementwise operation, and the words it moves. An operand is a shape such "
        "as 1000,40 and a layout that names for each dim the axes which cut it, joined by +, or a dot: r,. or r+c,. or "
        ".,c/r, whose terms are not summed over r yet.",
    )
    elementwise.add_argument("operands", nargs="+", metavar="SHAPE LAYOUT", help="such as 1000,40 r,. 40 c")
    elementwise.add_argument("--grid", required=True, metavar="r=2,c=2", help="the grid's axes and their sizes")
    elementwise.set_defaults(run=run_elementwise)


def _add_train(what: Commands) -> None:
    """Add `parlinalg plan train`."""
    train = what.add_parser(
        "train", help="the fastest way to train a model on so many ranks of a machine",
        description="Search data, pipeline, sequence and tensor parallelism, schedules, microbatches, ZeRO, "
        "recomputation and dtype for the shortest step, where the configuration leaves them open; print the best, and "
        "why the others lost.",
    )  # fmt: skip
    train.add_argument("config", metavar="CONFIG", help="a Python file, or the name of a shipped example")
    train.add_argument("--ranks", "-p", type=int, required=True, metavar="P", help="the ranks there are")
    train.add_argument(
        "--machine", metavar="NAME|FILE",
        help="a shipped machine, or a .toml file of one (default: the configuration's)",
    )  # fmt: skip
    train.add_argument("--memory", metavar="BYTES", help="what a rank may use, such as 80GiB (default: the machine's)")
    train.add_argument(
        "--global-batch", type=int, metavar="N",
        help="samples of a step (default: the configuration's batch_size); all that there are where these are fewer",
    )  # fmt: skip
    fused = train.add_mutually_exclusive_group()
    fused.add_argument(
        "--fused-attention", action="store_true",
        help="count attention as one kernel of 16-bit products, by the machine's rates, as cuDNN computes it",
    )  # fmt: skip
    fused.add_argument(
        "--library-attention", action="store_const", const="library", dest="fused_attention",
        help="count only that attention as such a kernel which this library gives to cuDNN",
    )  # fmt: skip
    train.add_argument("--best", type=int, default=10, metavar="N", help="how many to show (default: %(default)s)")
    train.add_argument("--out", metavar="FILE", help="write the configuration of the best, for parlinalg train")
    train.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="replace a value of the configuration"
    )  # fmt: skip
    train.set_defaults(run=run_train)


def run_train(args: argparse.Namespace) -> int:
    """Print the plan of a training, and write its configuration."""
    from parlinalg.planning.search import plan_training

    if args.out and not (folder := Path(args.out).resolve().parent).is_dir():  # before a minute is spent
        raise ConfigError(f"--out {args.out}: there is no folder {folder}")
    if args.out and Path(args.out).is_dir():
        raise ConfigError(f"--out {args.out} is a folder: give the name of a file, such as best.py")
    plan = plan_training(
        args.config, ranks=args.ranks, machine=args.machine, memory=args.memory, global_batch=args.global_batch,
        best=args.best, settings=args.set, fused_attention=args.fused_attention,
    )  # fmt: skip
    if speaks():
        tell(plan.explain())
        if args.out:
            plan.write(args.out)
            tell(f"\nwritten to {args.out}")
    return 0


def run_matmul(args: argparse.Namespace) -> int:
    """Print the plan of a product."""
    from parlinalg.matmul.planner import plan_matmul
    from parlinalg.planning.machine import product_seconds

    plan = plan_matmul(args.M, args.N, args.K, ranks=args.ranks, dtype=args.dtype, memory=args.memory)
    seconds = None if args.machine is None else product_seconds(plan, args.machine)
    if speaks():
        tell(plan.explain(seconds))
    return 0


def run_routine(args: argparse.Namespace) -> int:
    """Print the plan of a factorization."""
    from parlinalg.linalg.planner import plan_linalg
    from parlinalg.planning.machine import load_machine
    from parlinalg.planning.measure import measure_constants

    if len(args.size) > 2:
        raise ConfigError(f"a matrix has rows and columns; {len(args.size)} sizes are given")
    constants, rate = measure_constants(args.dtype) if args.measure else (None, None)
    plan = plan_linalg(
        args.routine, *args.size, ranks=args.ranks, sizes=None if args.grid is None else _grid(args.grid),
        sides=getattr(args, "sides", 1), block=args.block, dtype=args.dtype, memory=args.memory,
        near=False if args.apart else None, constants=constants, rate=rate,
        depth=getattr(args, "depth", None), pivoting=getattr(args, "pivoting", False),
        machine=None if args.machine is None else load_machine(args.machine),
    )  # fmt: skip
    if speaks():
        tell(plan.explain())
    return 0


def run_elementwise(args: argparse.Namespace) -> int:
    """Print how the operands of an elementwise operation are brought together."""
    from parlinalg.array.align import plan_elementwise

    if len(args.operands) % 2:
        raise ConfigError(f"each operand is a shape and a layout; {counted(len(args.operands), 'argument')} given")
    pairs = zip(args.operands[::2], args.operands[1::2], strict=True)
    operands = [(_shape(shape), _layout(layout)) for shape, layout in pairs]
    plan = plan_elementwise(*operands, grid=_grid(args.grid))
    if speaks():
        tell(plan.explain())
    return 0


def _shape(text: str) -> tuple[int, ...]:
    if not all(size.isdecimal() for size in _parts(text)):
        raise ConfigError(f"a shape is whole numbers such as 1000,40, not {text!r}")
    return tuple(map(int, _parts(text)))


def _layout(text: str) -> Layout:
    dims, _, partial = text.partition("/")
    return Layout(
        *(None if cut == "." else tuple(cut.split("+")) for cut in _parts(dims)),
        partial=tuple(partial.split("+")) if partial else (),
    )


def _grid(text: str) -> dict[str, int]:
    parts = [part.partition("=")[::2] for part in _parts(text)]
    axes = dict(parts)
    if len(axes) < len(parts):
        raise ConfigError(f"a grid has axes of different names such as r=2,c=2, not {text!r}")
    if not axes or not all(name and size.isdecimal() and int(size) for name, size in axes.items()):
        raise ConfigError(f"a grid is axes and their sizes such as r=2,c=2, not {text!r}")
    return {name: int(size) for name, size in axes.items()}


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")] if text.strip() else []
