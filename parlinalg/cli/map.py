"""`parlinalg map`: which rank is where, without running anything."""

from __future__ import annotations

import argparse

from parlinalg.cli.parser import Commands, speaks
from parlinalg.comm.streams import tell
from parlinalg.errors import ConfigError


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    found = commands.add_parser(
        "map",
        help="which rank is where, without MPI",
        description="Print which rank is where in the mesh of a configuration: `parlinalg map gpt3.py --ranks 3072`.",
    )
    found.add_argument("config", help="a Python file of settings, or a shipped example: digits, text or hybrid")
    found.add_argument("--ranks", "-p", type=int, required=True, metavar="P", help="the ranks there would be")
    found.add_argument("--ranks-per-node", type=int, metavar="N", help="and how many of them on a node")
    found.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="replace a value of the configuration, such as parallel.data=4; may be repeated",
    )  # fmt: skip
    found.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the map."""
    from parlinalg.train.config import load
    from parlinalg.train.map import layer_counts, rank_map
    from parlinalg.train.mesh import resolve

    for name, value in (("ranks", args.ranks), ("ranks-per-node", args.ranks_per_node)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, not {value}")
    config = load(args.config, args.settings)
    spec = resolve(config, args.ranks)
    lines = [rank_map(spec, args.ranks_per_node, layer_counts(config, spec)), f"{'scheme':<12}{spec.scheme.name}"]
    if spec.schedule is not None:
        count = spec.schedule.microbatches
        lines.append(f"{'schedule':<12}{spec.schedule.name}, {count} microbatch{'es' * (count != 1)}")
    if speaks():
        tell("\n".join(lines))
    return 0
