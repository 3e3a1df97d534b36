"""The command line: `parlinalg COMMAND …`, alone or under mpiexec."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from parlinalg.cli import doctor, generate, map, plan, schedule, train
from parlinalg.cli.parser import Parser, speaks
from parlinalg.comm.streams import complain, lost
from parlinalg.errors import ParlinalgError

COMMANDS = (train, generate, plan, schedule, map, doctor)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns
    -------
    int
        The exit code: 0; 1 if standard output could not be written; 2 for a wrong command line or configuration; 128 +
        the signal's number after a signal.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # where the terminal's encoding lacks a character
    args = parser().parse_args(arguments)
    try:
        code: int = args.run(args)
    except ParlinalgError as error:
        if speaks():
            complain(f"parlinalg: {error}")
        return 2
    return code or int(lost())


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    from parlinalg import __version__

    top = Parser(prog="parlinalg", description="Distributed linear algebra and training on processor grids.")
    top.add_argument("--version", action="version", version=f"parlinalg {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add(commands)
    return top
