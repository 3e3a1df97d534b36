"""`parlinalg plan`: plans, without running anything."""

from __future__ import annotations

import argparse

from parlinalg.cli.parser import Commands, speaks
from parlinalg.comm.streams import tell


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    plan = commands.add_parser("plan", help="explain the plan of a distributed product")
    what = plan.add_subparsers(metavar="WHAT", required=True)
    matmul = what.add_parser("matmul", help="the grid and kernel for C[M, N] = A[M, K] B[K, N]")
    for name in ("M", "N", "K"):
        matmul.add_argument(name, type=int)
    matmul.add_argument("--ranks", "-p", type=int, required=True, metavar="P", help="the ranks there are")
    matmul.add_argument("--memory", metavar="BYTES", help="what a rank may use, such as 4GiB (default: no limit)")
    matmul.add_argument("--dtype", default="float64", help="of A, B and C (default: %(default)s)")
    matmul.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan."""
    from parlinalg.matmul.planner import plan_matmul

    plan = plan_matmul(args.M, args.N, args.K, ranks=args.ranks, dtype=args.dtype, memory=args.memory)
    if speaks():
        tell(plan.explain())
    return 0
