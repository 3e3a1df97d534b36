"""Training steps on real ranks beside what the timeline predicts of them, in one run.

    python bench/foresight/measured.py train:2          # bench/train.py's GPT under 1D, 2D, data parallel and ZeRO
    python bench/foresight/measured.py train:4 pipeline:2 pipeline:4
    python bench/foresight/measured.py gpu:1            # GPTs of several sizes in bfloat16, on one GPU
    python bench/foresight/measured.py hosts:200mbit hosts:1gbit        # bench/schemes.py on 8 emulated hosts
    python bench/foresight/measured.py plans:1gbit --machine hosts_1gbit     # what the planner chooses, and others

The forms take turns: every round starts each of them once, on emulated hosts all together.  Between the rounds
`parlinalg doctor --machine` measures the machine, unless --machine names a file; then each form's program is run on
imagined ranks, and its events on the machine.  So the speed that a shared machine has today is that of both.  No step
is timed for the machine's file.

For "plans" the planner is asked for three models on the emulated hosts: for its choice among all plans, and for that
among those of each of `FAMILIES`.  All are trained, in turn; what is chosen should be the fastest, or within 5%.

A setting that takes long can be measured form by form: `--forms 1f1b --add` keeps the rows of the others.

A result is written to bench/foresight/results/, of which `published.py --write` makes a part of the page; the measured
machine beside it, as SETTING.toml, if --keep names a folder.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BENCH = HERE.parent
sys.path[:0] = [str(BENCH), str(BENCH / "pieces")]

import harness  # noqa: E402
import pipeline  # noqa: E402
import schemes  # noqa: E402
import train  # noqa: E402
from gpt import Sizes  # noqa: E402

RESULTS = HERE / "results"
MODEL = train.MODELS["d512"]
TRAIN = ("serial", "1d", "2d", "data", "zero1", "zero2", "zero3")
ON_GPU = ("1024x12x16x1024x8x32768", "2048x4x16x2048x4x32768", "4096x4x32x2048x2x32768", train.MODELS["gpu"])
"""The GPTs of the setting gpu:1, each a form."""
APART = 1.1
"""Steps whose times differ by more than this ratio should be ordered by the prediction."""
GOALS = {"train": (0.1, 0.1), "pipeline": (0.1, 0.1), "hosts": (0.1, 0.2), "gpu": (0.1, 0.1)}
"""By setting, the most that predictions should be off: in the median, and at worst."""
OF_FASTEST = 1.05
"""The most that the chosen plan's step should take, as a multiple of the fastest measured one's."""
HOSTS = 8
STUCK = 100
"""Seconds that a rank on emulated hosts may wait before it says for what, and ends the run."""
TEXT = {"name": "text", "sequence_length": 64, "validation": 0.1}
PLANNED: dict[str, tuple[dict[str, Any], str | None]] = {
    "much computing": ({
        "model": {"name": "gpt", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8},
        "data": TEXT, "batch_size": 32,
    }, None),
    "much communication": ({
        "model": {"name": "gpt", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8},
        "data": TEXT, "batch_size": 8,
    }, None),
    "little memory": ({
        "model": {"name": "gpt", "hidden_size": 384, "num_hidden_layers": 4, "num_attention_heads": 8},
        "data": TEXT, "batch_size": 16,
    }, "48MiB"),
}  # fmt: skip
"""By name the configurations that are planned, and the memory that a rank may use."""
ONE = {"pipeline": 1, "sequence": 1}
FAMILIES: tuple[dict[str, Any], ...] = (
    {"data": HOSTS}, {"tensor": {"mode": "1d"}, **ONE}, {"tensor": {"mode": "2d"}, **ONE},
    {"tensor": {"mode": "3d"}, **ONE}, {"pipeline": 2}, {"pipeline": 4}, {"sequence": 2, "pipeline": 1},
)  # fmt: skip
"""What `parallel` gives, of the forms beside which the chosen one is measured."""
Step = Callable[[int], object]


# ------------------------------------------------------------------------------------------------ what is run
def forms(setting: str) -> list[str]:
    """Return the forms of a setting such as train:2, with the sizes that numbers of ranks do not give."""
    kind, where = setting.split(":")
    if kind == "hosts":
        return list(schemes.SHAPES[HOSTS])
    if kind == "gpu":
        return list(ON_GPU)
    ranks = int(where)
    if kind == "pipeline":
        layers = Sizes.parse(pipeline.MODEL).layers
        return [s for s in pipeline.OURS if ranks * pipeline.CHUNKS.get(s, 1) <= layers]
    shapes = [f"2d/{r}x{ranks // r}" for r in range(1, ranks + 1) if ranks % r == 0]
    return [form for name in TRAIN if name != "serial" or ranks == 2 for form in (shapes if name == "2d" else [name])]


def ranks_of(setting: str, form: str) -> int:
    kind, where = setting.split(":")
    return HOSTS if kind == "hosts" else 1 if form == "serial" else int(where)


def prepared(setting: str, form: str, world: Any, args: argparse.Namespace) -> tuple[Step, int]:
    """Return what makes a step of a form on imagined ranks, and the batches of one."""
    kind, _ = setting.split(":")
    if kind in ("train", "gpu"):
        from gpt_parlinalg import prepared as train_step

        if kind == "gpu":
            return train_step("serial", Sizes.parse(form), "cupy", "bfloat16")[1], 1
        return train_step(form, Sizes.parse(args.model), "numpy", "float32")[1], 1
    if kind == "hosts":
        case = schemes.make(form, world.comm, schemes.arguments([]))
        return lambda number: case.step(), 1
    from pipeline_parlinalg import prepared as pipeline_step

    batches = args.batches if form in pipeline.LATE else 1
    sizes, ranks = Sizes.parse(args.model), world.size
    counts = pipeline.counts(sizes.layers, ranks * pipeline.CHUNKS.get(form, 1))
    return pipeline_step(form, sizes, args.microbatches, counts, batches).step, batches


# ------------------------------------------------------------------------------------------------ predicted
def predicted(setting: str, form: str, machine: Any, args: argparse.Namespace) -> Any:
    """Return the timeline of a step of a form, and the batches in it."""
    import parlinalg as pla
    from parlinalg.planning.timeline import timeline

    ranks, node = ranks_of(setting, form), 1 if setting.startswith("hosts") else ranks_of(setting, form)

    def program(world: Any) -> tuple[Any, int]:
        step, batches = prepared(setting, form, world, args)
        for number in range(2):  # what a first step makes is there in the later ones
            step(number)
        with world.trace() as trace:
            step(2)
        return trace, batches

    os.environ["PARLINALG_MPI"] = "0"  # this process is no rank; those that it starts are
    if setting.startswith("pipeline"):
        told = pla.imagine_together(program, ranks, node=node, what_if=pla.WhatIf())
        traces, batches = [trace for trace, _ in told.values()], next(iter(told.values()))[1]
    else:  # all ranks do the same
        target = "gpu" if setting.startswith("gpu") else "cpu"
        with pla.imagine(ranks, target=target, node=node, what_if=pla.WhatIf()) as world:
            trace, batches = program(world)
        traces = [trace]
    del os.environ["PARLINALG_MPI"]
    return timeline(traces, machine, on_node=node), batches


# ------------------------------------------------------------------------------------------------ measured
def doctor(setting: str, path: Path) -> None:
    """Measure the machine, on the ranks of a setting."""
    kind, where = setting.split(":")
    program = ["-m", "parlinalg", "doctor", "--machine", str(path)]
    if kind == "hosts":
        run_on_hosts(where, [sys.executable, *program])
    else:
        env = harness.environment(1, one_thread())
        harness.ran([*harness.mpiexec(), "-n", where, sys.executable, *program], env, timeout=240)


def spent() -> tuple[float, float, float]:
    """Seconds since boot in which cores were busy, all seconds of them, and those that were spent by what was started
    here."""
    busy, whole = harness._ticks()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    rate = os.sysconf("SC_CLK_TCK")
    return busy / rate, whole / rate, used.ru_utime + used.ru_stime


def used_by_others(before: Sequence[float], after: Sequence[float]) -> float:
    """The share of the cores that others used meanwhile; on emulated hosts the system's work for the links too."""
    busy, whole, own = (b - a for a, b in zip(before, after, strict=True))
    return max(0.0, busy - own) / max(1e-9, whole)


def one_thread() -> dict[str, str]:
    return dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def run_on_hosts(rate: str, program: Sequence[str]) -> None:
    """Run a program on emulated hosts."""
    hosts = [str(BENCH / "cluster" / "hosts.py"), "run", "--hosts", str(HOSTS), "--rate", rate]
    hosts += ["--timeout", "290"]
    env = harness.environment(1, {**one_thread(), "PARLINALG_TIMEOUT": str(STUCK)})
    harness.ran([sys.executable, *hosts, "--", *program], env, timeout=300)


def a_round(setting: str, names: Sequence[str], args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of steps of each form, in one round."""
    kind, where = setting.split(":")
    if kind == "hosts":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "told.json"
            program = [sys.executable, str(BENCH / "schemes.py"), "--rounds", str(args.steps), "--json", str(path)]
            run_on_hosts(where, [*program, "--schemes", *names])
            return {row["scheme"]: row["samples"] for row in json.loads(path.read_text())["rows"]}
    found = {}
    for form in names:
        piece = f"parlinalg:{form}:{ranks_of(setting, form)}"
        if kind == "train":
            line, env = train.command(piece, args.model, args.warm, args.steps, "cpu", "float32")
        elif kind == "gpu":
            line, env = train.command("parlinalg:serial:1", form, args.warm, args.steps, "cuda", "bfloat16")
        else:
            line, env = pipeline.command(piece, Sizes.parse(args.model), args.model, args)
        told = harness.run(line, env, timeout=240)
        batches = told.get("batches", 1)
        found[form] = [s / batches for s in told["seconds"]]
    return found


def compare(setting: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of a setting: measured and predicted seconds of each form."""
    from parlinalg.planning.machine import load_machine

    names = [f for f in forms(setting) if not args.forms or f in args.forms]
    samples: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(args.machine or Path(args.keep or folder) / f"{setting.replace(':', '_')}.toml")
        others, before = [], spent()
        for number in range(args.rounds):
            if number == args.rounds // 2 and not args.machine:
                doctor(setting, path)
            others.append(harness.busy(0.5))
            for name, seconds in a_round(setting, names, args).items():
                samples[name] += seconds
            print(f"{setting}: round {number + 1} of {args.rounds}", file=sys.stderr, flush=True)
        others.append(used_by_others(before, spent()))
        machine = load_machine(path if path.suffix == ".toml" else str(args.machine))
        rows = []
        for name in names:
            step, batches = predicted(setting, name, machine, args)
            low, middle, high = harness.spread(samples[name])
            rows.append({
                "form": name, "seconds": middle, "quartiles": [low, high], "samples": samples[name],
                "predicted": step.seconds / batches, "bound": step.bound(),
            })  # fmt: skip
    return {
        "setting": setting, "date": time.strftime("%Y-%m-%d"), "about": machine.about, "model": args.model,
        "machine_file": Path(args.machine).name if args.machine else None, "others": max(others), "rows": rows,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ the planner's choice
def planned(name: str, machine: Any) -> list[dict[str, Any]]:
    """Return the plan that is chosen for a model, then the best of each family: what they are, and their keys."""
    import parlinalg as pla

    config, memory = PLANNED[name]
    found: dict[str, dict[str, Any]] = {}
    for given in ("auto", *FAMILIES):
        values = {**config, "parallel": given}
        try:
            plan = pla.plan_training(values, ranks=HOSTS, machine=machine, memory=memory, best=1)
        except pla.PlanError:  # none of the family fits
            continue
        first = plan.best[0]
        row = {"form": str(first.candidate), "predicted": first.seconds, "values": plan.configuration}
        found.setdefault(row["form"], {**row, "chosen": not found})
    return list(found.values())


def compare_plans(setting: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the rows of all models: measured and predicted seconds of each plan."""
    from parlinalg.planning.machine import load_machine

    if not args.machine:
        raise SystemExit("plans are made for a machine that is known: give --machine")
    machine, where = load_machine(args.machine), setting.split(":")[1]
    names = [name for name in PLANNED if not args.forms or name in args.forms]
    others, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, name in enumerate(names):
            kept = Path(args.keep or folder) / f"plans_{where}_{list(PLANNED).index(name)}.json"
            if not kept.exists():
                kept.write_text(json.dumps(planned(name, machine)))
            plans = json.loads(kept.read_text())
            if args.only_plan:
                continue
            samples: list[list[float]] = [[] for _ in plans]
            path, before = Path(folder) / f"plans{number}.json", spent()
            for turn in range(args.rounds):
                order = range(len(plans)) if turn % 2 == 0 else range(len(plans) - 1, -1, -1)
                path.write_text(json.dumps([plans[i]["values"] for i in order]))
                program = [sys.executable, str(BENCH / "pieces" / "planned.py"), str(path), str(args.steps)]
                run_on_hosts(where, program)
                for i, seconds in zip(order, json.loads(Path(f"{path}.told").read_text()), strict=True):
                    samples[i] += seconds
            others.append(used_by_others(before, spent()))
            for plan, seconds in zip(plans, samples, strict=True):
                low, middle, high = harness.spread(seconds)
                told = {key: plan[key] for key in ("form", "predicted", "chosen")}
                rows.append({"model": name, **told, "seconds": middle, "quartiles": [low, high], "samples": seconds})
    return {
        "setting": setting, "date": time.strftime("%Y-%m-%d"), "about": machine.about, "model": "planned",
        "machine_file": Path(args.machine).name, "others": max(others, default=0.0), "rows": rows,
    }  # fmt: skip


def plans_section(result: dict[str, Any]) -> str:
    """The part of the page of plans: a table a model."""
    parts = []
    for name in dict.fromkeys(row["model"] for row in result["rows"]):
        config, memory = PLANNED[name]
        model = config["model"]
        rows = sorted((r for r in result["rows"] if r["model"] == name), key=lambda r: r["seconds"])
        chosen = next(r for r in rows if r["chosen"])
        said = min(rows, key=lambda r: r["predicted"])
        ratio, other = (r["seconds"] / rows[0]["seconds"] for r in (chosen, said))
        reached = "reached" if ratio <= OF_FASTEST else "missed"
        body = [
            (
                r["form"] + (" (chosen)" if r["chosen"] else ""), f"{1e3 * r['seconds']:.0f}",
                f"{1e3 * r['quartiles'][0]:.0f}–{1e3 * r['quartiles'][1]:.0f}", f"{1e3 * r['predicted']:.0f}",
                f"{100 * error(r):+.1f}%",
            )
            for r in rows
        ]  # fmt: skip
        about = (
            f"{name.capitalize()}: a GPT of width {model['hidden_size']} and {model['num_hidden_layers']} layers, "
            f"{config['batch_size']} sequences of {TEXT['sequence_length']}"
            + (f", {memory} a rank" if memory else "")
            + f". The chosen plan takes {ratio:.2f} times as long as the fastest measured one, that which is predicted "
            f"to be the fastest of these {other:.2f} times; goal {OF_FASTEST:.2f}: {reached}."
        )
        parts += [about, harness.table(("plan", "measured ms", "quartiles", "predicted ms", "error"), body)]
    place = result["setting"].split(":")[1].replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")
    head = (
        f"### {HOSTS} emulated hosts, links of {place}: what the planner chooses\n\nIts choice among all plans, "
        f"and among those of some families of forms, for three models. {result['date']}, {result['machine']['cpu']}, "
        f"{result['machine']['cores']} cores, of which others used {100 * result['others']:.0f}%."
    )
    return "\n\n".join([head, *parts])


# ------------------------------------------------------------------------------------------------ told
def error(row: dict[str, Any]) -> float:
    return float(row["predicted"] / row["seconds"] - 1)


def wrong_order(rows: Sequence[dict[str, Any]]) -> tuple[list[tuple[str, str]], int]:
    """Return the pairs further apart than `APART` whose order is predicted wrongly, the faster first, and how many
    pairs are so far apart."""
    apart = [(a, b) for a, b in itertools.permutations(rows, 2) if b["seconds"] > APART * a["seconds"]]
    return [(a["form"], b["form"]) for a, b in apart if a["predicted"] >= b["predicted"]], len(apart)


def figures(result: dict[str, Any]) -> str:
    """A line: the errors and the pairs, beside what is to be reached."""
    errors = [abs(error(row)) for row in result["rows"]]
    middle, worst = statistics.median(errors), max(errors)
    wrong, apart = wrong_order(result["rows"])
    most = GOALS[result["setting"].partition(":")[0]]
    verdict = "reached" if middle <= most[0] and worst <= most[1] and not wrong else "missed"
    pairs = f"of {apart} pairs further apart than {100 * (APART - 1):.0f}%, {len(wrong)} in the wrong order"
    named = f" ({'; '.join(f'{a} before {b}' for a, b in wrong)})" if wrong else ""
    goal = f"goal {100 * most[0]:.0f}% and {100 * most[1]:.0f}%, no pair: {verdict}"
    return f"Median error {100 * middle:.1f}%, worst {100 * worst:.1f}%; {pairs}{named}; {goal}."


def table(result: dict[str, Any]) -> str:
    rows = [
        (
            r["form"], f"{1e3 * r['seconds']:.0f}", f"{1e3 * r['quartiles'][0]:.0f}–{1e3 * r['quartiles'][1]:.0f}",
            f"{1e3 * r['predicted']:.0f}", f"{100 * error(r):+.1f}%", r["bound"],
        )
        for r in sorted(result["rows"], key=lambda r: r["seconds"])
    ]  # fmt: skip
    head = ("form", "measured ms", "quartiles", "predicted ms", "error", "what bounds it, as predicted")
    return harness.table(head, rows)


TITLES = {
    "train": "{} ranks of one machine: GPTs under tensor and data parallelism",
    "pipeline": "{} ranks of one machine: pipelines",
    "hosts": f"{HOSTS} emulated hosts, links of {{}}",
    "gpu": "One GPU",
}
MODELS = {
    "train": "The GPT of `bench/train.py` ({}: width, layers, heads, sequence, batch, vocabulary), float32, AdamW.",
    "pipeline": "The GPT of `bench/pipeline.py` ({}), 8 microbatches.",
    "gpu": "GPTs as in `bench/train.py --device cuda` (forms are width, layers, heads, …), bfloat16, AdamW.",
    "hosts": "All schemes of `bench/schemes.py`: hidden 256, 2 layers, batch 16 × sequence 64.",
}


def section(result: dict[str, Any]) -> str:
    """The part of the page of a result."""
    kind, where = result["setting"].split(":")
    if kind == "plans":
        return plans_section(result)
    place = where.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")
    device = result["machine"]["cpu"] if kind != "gpu" else result["about"].partition("GPU 0 (")[2].partition(")")[0]
    about = (
        f"{MODELS[kind].format(result['model'])} {result['date']}, {device}, "
        f"{result['machine']['cores']} cores, of which others used {100 * result['others']:.0f}%."
    )
    return f"### {TITLES[kind].format(place)}\n\n{about}\n\n{table(result)}\n\n{figures(result)}"


def sections() -> str:
    """The part of the page of all results."""
    order = [*(f"{kind}_{n}" for kind in ("train", "pipeline") for n in (2, 4)), "gpu_1", "hosts_200mbit"]
    order += ["hosts_1gbit", "plans_200mbit", "plans_1gbit"]
    found = [RESULTS / f"{name}{model}.json" for name in order for model in ("", "_d1024")]
    return "\n\n".join(section(json.loads(path.read_text())) for path in found if path.exists())


def setting(text: str) -> str:
    """An argument that names a setting."""
    kind, _, where = text.partition(":")
    if (
        kind not in (*GOALS, "plans")
        or not where
        or (kind in ("train", "pipeline") and (not where.isdigit() or int(where) < 2))
        or (kind == "gpu" and where != "1")
    ):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no setting: train:RANKS, pipeline:RANKS, gpu:1, hosts:RATE or plans:RATE with a rate as tc "
            "writes it"
        )
    return text


def result_file(setting: str, args: argparse.Namespace) -> Path:
    """Return the file for the result of a setting: with the model's name, if it is not the usual one."""
    other = next((f"_{name}" for name, model in train.MODELS.items() if model == args.model != MODEL), "")
    return Path(args.out or RESULTS) / f"{setting.replace(':', '_')}{other}.json"


def joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return a result with the rows of both runs; those of the later one where both have a form."""
    for name in ("setting", "model"):
        if old[name] != new[name]:
            raise SystemExit(f"--add: the result there is of {name} {old[name]}, this one of {new[name]}")
    what = "model" if new["setting"].startswith("plans") else "form"
    again = {row[what] for row in new["rows"]}
    rows = [row for row in old["rows"] if row[what] not in again] + new["rows"]
    return {**new, "others": max(old["others"], new["others"]), "rows": rows}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="+", type=setting, help="such as train:2, pipeline:4, hosts:1gbit")
    parser.add_argument("--forms", nargs="+", help="only these, such as 1d zero3")
    parser.add_argument("--machine", help="a machine's file or name, instead of measuring one")
    parser.add_argument("--keep", help="a folder for the measured machine's file, made if there is none")
    parser.add_argument("--model", default=MODEL, help="d, layers, heads, sequence, batch, vocabulary (%(default)s)")
    parser.add_argument("--microbatches", type=int, default=8, help="of pipelines")
    parser.add_argument("--batches", type=int, default=4, help="between two flushes of an asynchronous pipeline")
    parser.add_argument("--out", help=f"the folder for results ({RESULTS.name} beside this script)")
    parser.add_argument("--add", action="store_true", help="keep the other forms' rows of the result that is there")
    parser.add_argument("--only-plan", action="store_true", help="make the plans, and leave them in --keep")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--warm", type=int, default=1, help="steps not counted")
    parser.add_argument("--steps", type=int, default=4, help="timed steps a form and round")
    parser.add_argument("--wait", type=float, default=60, help="seconds to wait for idle cores")
    parser.add_argument("--crowded", action="store_true", help="measure even if the cores are not idle, and say so")
    return parser.parse_args()


def main() -> int:
    args = arguments()
    harness.stop_cleanly()
    if args.keep:
        Path(args.keep).mkdir(parents=True, exist_ok=True)
    if harness.busy_at_start(args.wait, args.crowded) is None:
        return 1
    for name in args.settings:
        result = (compare_plans if name.startswith("plans") else compare)(name, args)
        if args.only_plan:
            continue
        out = result_file(name, args)
        if args.add and out.exists():
            result = joined(json.loads(out.read_text()), result)
        harness.write_json(out, result)
        print(f"\n{section(json.loads(out.read_text()))}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
