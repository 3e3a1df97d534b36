"""`parlinalg train`: the main job."""

from __future__ import annotations

import argparse
from pathlib import Path

from parlinalg.cli.parser import Commands
from parlinalg.errors import ConfigError


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    train = commands.add_parser(
        "train",
        help="train a model by a configuration",
        description="Train a model by a configuration: `mpiexec -n 4 parlinalg train text`.",
    )
    train.add_argument(
        "config",
        help="a Python file of settings, a shipped example (digits, text or hybrid), or a .npz file of samples x and "
        "labels y",
    )
    train.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="where metrics.jsonl, metrics.png, ranks.json and the trained model of a text go (runs/NAME)",
    )
    train.add_argument("--steps", type=int, metavar="N", help="optimizer steps, instead of the configuration's")
    train.add_argument("--resume", action="store_true", help="go on from the last checkpoint in DIR, if there is one")
    train.add_argument(
        "--fall-back", action="store_true", help="with --resume: if the last checkpoint is damaged, take an earlier one"
    )
    train.add_argument("--checkpoint-every", type=int, metavar="N", help="make a checkpoint every N steps")
    train.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="replace a value of the configuration, such as parallel.tensor.mode=2d; may be repeated",
    )  # fmt: skip
    train.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Train, and return the exit code."""
    if args.fall_back and not args.resume:
        raise ConfigError("--fall-back says how to resume: add --resume, or leave it out to train from the start")
    from parlinalg.train.run import train

    settings = list(args.settings)
    if args.steps is not None:
        settings.append(f"steps={args.steps}")
    if args.checkpoint_every is not None:
        settings.append(f"checkpoint.every={args.checkpoint_every}")
    out = args.out or Path("runs") / Path(args.config).stem
    return train(args.config, out, settings, resume=args.resume, fall_back=args.fall_back)
