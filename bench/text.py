"""Steps until the text example reaches a loss, with AdamW and with Muon, tuned alike.

    python bench/text.py                                     # 6 trainings of 500 steps: about 20 minutes on one core
    python bench/text.py --optimizers muon --rates 1 --steps 300 350 400      # shorter schedules, at a known best rate

Every training is `parlinalg train text` on one rank with one BLAS thread, which computes the losses of every grid.  An
optimizer's learning rate is a middle value times each of `--rates`; everything else is alike, and what Muon leaves to
AdamW has AdamW's middle rate.  `--jobs` trainings run at once.  The loss is that of the held-out text, in nats a byte,
each `--every` steps.  Trainings whose folder has all their steps are not run again.  `docs/figures.py` draws what
`--json docs/figures/text_losses.json` writes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import harness

MIDDLE = {"adamw": 4e-3, "muon": 2e-2}
"""The learning rate that is multiplied by `--rates`."""
OPTIONS = {"adamw": {}, "muon": {"adamw_lr": MIDDLE["adamw"]}}
BOTH = {"betas": (0.9, 0.99), "weight_decay": 0.1}


def trained(optimizer: str, rate: float, steps: int, args: argparse.Namespace) -> dict[int, float]:
    """Return the losses on held-out text of a training, by the number of the step."""
    lr = MIDDLE[optimizer] * rate
    folder = Path(args.out) / f"{optimizer}-{lr:g}-{steps}"
    if (losses := validation(folder)).get(steps) is None:
        chosen = {"name": optimizer, "lr": lr, **BOTH, **OPTIONS[optimizer]}
        options = {
            "optimizer": chosen, "steps": steps, "validate_every": args.every, "sample.max_new_tokens": 1,
        }  # fmt: skip
        sets = [part for name, value in options.items() for part in ("--set", f"{name}={value}")]
        command = [sys.executable, "-m", "parlinalg", "train", "text", "--out", str(folder), *sets]
        env = harness.environment(harness.cores())
        harness.ran(command, env, timeout=args.timeout)
        losses = validation(folder)
    return losses


def validation(folder: Path) -> dict[int, float]:
    """Return the losses on held-out text in a training's folder."""
    file = folder / "metrics.jsonl"
    rows = map(json.loads, file.read_text().splitlines()) if file.exists() else ()
    return {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}


def show(results: list[dict[str, Any]], target: float) -> str:
    rows = [
        (r["optimizer"], f"{r['lr']:g}", r["steps"], f"{r['losses'][r['steps']]:.3f}", r["reached"] or "–")
        for r in sorted(results, key=lambda r: (r["optimizer"], r["steps"], r["lr"]))
    ]
    return harness.table(["optimizer", "lr", "steps", "loss at the end", f"steps to {target:g}"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizers", nargs="+", default=list(MIDDLE), choices=list(MIDDLE))
    parser.add_argument("--rates", nargs="+", type=float, default=[1, 0.5, 2], help="multiples of the middle rate")
    parser.add_argument("--steps", nargs="+", type=int, default=[500], help="lengths of the schedule")
    parser.add_argument("--every", type=int, default=25, help="steps between two losses on held-out text")
    parser.add_argument("--target", type=float, default=1.42, help="nats a byte")
    parser.add_argument("--jobs", type=int, default=harness.cores(), help="trainings at once")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds that one training may take")
    parser.add_argument("--out", help="keep the trainings here, and those that are there")
    parser.add_argument("--json", help="write the result here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.jobs) as pool:
        args.out = args.out or scratch
        every = list(product(args.steps, args.rates, args.optimizers))
        found = pool.map(lambda each: trained(each[2], each[1], each[0], args), every)
        results = [
            {
                "optimizer": optimizer, "lr": MIDDLE[optimizer] * rate, "steps": steps, "losses": losses,
                "reached": next((step for step, loss in sorted(losses.items()) if loss <= args.target), None),
            }
            for (steps, rate, optimizer), losses in zip(every, found, strict=True)
        ]  # fmt: skip
    print(show(results, args.target))
    if args.json:
        harness.write_json(args.json, {"target": args.target, "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
