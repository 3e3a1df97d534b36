"""`parlinalg generate`: a model in a folder writes on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from parlinalg.cli.parser import Commands
from parlinalg.comm.streams import tell
from parlinalg.errors import CommError, ConfigError

KEYS = ("parallel", "backend", "dtype")  # of a configuration, that matter here


def add(commands: Commands) -> None:
    """Add the command to the parser."""
    generate = commands.add_parser(
        "generate",
        help="let a trained model write",
        description="Let a model write on after a prompt: `parlinalg generate runs/text --prompt 'The '`.",
    )
    generate.add_argument(
        "folder", type=Path, metavar="DIR",
        help="what `parlinalg train text` left, or a folder of Hugging Face's: config.json, model.safetensors and "
        "tokenizer.json",
    )  # fmt: skip
    generate.add_argument("--prompt", required=True, metavar="TEXT", help="what it writes on from")
    generate.add_argument("--max-new-tokens", type=int, default=200, metavar="N", help="the most tokens (%(default)s)")
    generate.add_argument(
        "--temperature", type=float, default=0.8, metavar="T",
        help="above 0: draw tokens from the probabilities' power 1/T (%(default)s); 0: take the likeliest",
    )  # fmt: skip
    generate.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens only")
    generate.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest that sum to P only")
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (%(default)s)")
    generate.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", dest="settings",
        help="where it runs: parallel (by default tensor parallel in mode 1d over all ranks), backend, and dtype (that "
        "of the weights); may be repeated",
    )  # fmt: skip
    generate.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the generated text on rank 0 as it is written."""
    from parlinalg.comm import open_comm
    from parlinalg.comm.together import together
    from parlinalg.datasets import tokenizer
    from parlinalg.train.language import continuation
    from parlinalg.train.mesh import launch

    _check(args)
    try:
        world = open_comm()
    except CommError as error:
        raise ConfigError(str(error)) from error
    settings = [s for s in args.settings if not s.startswith("dtype=")]
    dtype = next((s.partition("=")[2] for s in reversed(args.settings) if s not in settings), None)
    with launch({"parallel": {"tensor": {"mode": "1d"}}}, world, settings=settings) as mesh:
        kind = together(world, lambda: model_class(args.folder), "reading the model")
        tokens = together(world, lambda: tokenizer(args.folder), "reading the tokenizer")
        stops = together(world, lambda: ends(args.folder), "reading the model")
        model = mesh.from_pretrained(kind, args.folder, dtype)

        def write(text: str) -> None:
            if world.rank == 0:
                tell(text, end="")

        write(args.prompt)
        continuation(
            model, tokens, args.prompt, args.max_new_tokens, temperature=args.temperature, top_k=args.top_k,
            top_p=args.top_p, seed=args.seed, special=True, eos_token_id=stops, report=write,
        )  # fmt: skip
        write("\n")
    return 0


def model_class(folder: Path) -> Any:
    """Return the class of a folder's model, by the `model_type` of its `config.json`."""
    from parlinalg import nn
    from parlinalg.nn.pretrained import ARCHITECTURES
    from parlinalg.nn.pretrained.settings import Settings

    config = Settings.read(folder)
    return getattr(nn, config.one_of("model_type", ARCHITECTURES, "missing"))


def ends(folder: Path) -> int | Sequence[int] | None:
    """Return the tokens that end a text, from the folder's files."""
    from parlinalg.nn.pretrained.settings import Settings

    for name in ("generation_config.json", "config.json"):
        if not (folder / name).is_file():
            continue
        settings = Settings.read(folder, name)
        found: Any = settings.get("eos_token_id")
        if found is not None:
            if not all(isinstance(i, int) for i in (found if isinstance(found, list) else [found])):
                raise ConfigError(f"{settings.path}: eos_token_id is a token's id or a list of them, not {found!r}")
            return cast("int | list[int]", found)
    return None


def _check(args: argparse.Namespace) -> None:
    for setting in args.settings:
        if setting.partition("=")[0].partition(".")[0].strip() not in KEYS:
            raise ConfigError(f"--set {setting}: generate takes settings of {', '.join(KEYS)} only")
    for name, value, least in (("max-new-tokens", args.max_new_tokens, 0), ("temperature", args.temperature, 0)):
        if not value >= least:
            raise ConfigError(f"--{name} must be at least {least}, not {value}")
    from parlinalg.nn.sampling import Sampling

    Sampling(args.temperature > 0, args.temperature or 1.0, args.top_k, args.top_p)
    if not args.prompt:
        raise ConfigError("--prompt must have at least one character")
