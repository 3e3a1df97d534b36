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
        help="how a configuration shares out ranks, without MPI",
        description="Which rank is where, as a configuration shares them out: `parlinalg map gpt3.py --ranks 3072`.",
    )
    found.add_argument("config", help="a Python file of settings, or a shipped example: digits, text or hybrid")
    found.add_argument("--ranks", "-p", type=int, required=True, metavar="P", help="the ranks there would be")
    found.add_argument("--ranks-per-node", type=int, metavar="N", help="and how many of them on a node")
    found.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="replace a value of the configuration, such as parallel.pipeline=4; may be repeated",
    )  # fmt: skip
    found.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the map."""
    from parlinalg.train.config import load
    from parlinalg.train.map import layer_counts, rank_map
    from parlinalg.train.parallel import share_out, with_zero
    from parlinalg.train.pipelines import schedule_for

    for name, value in (("ranks", args.ranks), ("ranks-per-node", args.ranks_per_node)):
        if value is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, not {value}")
    config = load(args.config, args.settings)
    parallel = with_zero(share_out(config.parallel, args.ranks), config.zero)
    schedule = schedule_for(config, parallel)
    layers = layer_counts(config, parallel, schedule)
    if speaks():
        lines = [f"{'scheme':<12}{parallel.scheme.name}"]
        if schedule is not None:
            lines.append(f"{'schedule':<12}{schedule.name}, {schedule.microbatches} microbatches")
        tell("\n".join([rank_map(parallel, schedule, args.ranks_per_node, layers), *lines]))
    return 0
