"""Everything that saves memory or lengthens sequences, combined: ten steps give the losses of one rank.

All cases run one body.  Sizes divide by nothing: 5 windows of 11 tokens, 259 ids, 5 heads of 7 features, an inside of
13, 3 experts.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg.comm import SingleComm
from parlinalg.grid import factorizations
from parlinalg.train import launch
from tests.agreement import once
from tests.conftest import BACKEND, SIZE
from tests.train.trainings import Training

STEPS, CLOSE, CLOSE_32 = 10, 1e-12, 1e-5
CLOSE_TURNED = 1e-10  # as in `test_preconditioned`: bases and roots are found by eigenvectors
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom … " * 6
SIZES = {
    "hidden_size": 35, "num_hidden_layers": 1, "num_attention_heads": 5, "intermediate_size": 13, "vocab_size": 259,
}  # fmt: skip
BASE: dict[str, Any] = {
    "dtype": "float64", "batch_size": 5, "steps": STEPS, "clip_grad_norm": 1.0,
    "optimizer": {"name": "adamw", "lr": 5e-3}, "lr_schedule": {"name": "cosine", "warmup": 2},
}  # fmt: skip
DROP = {"embd_pdrop": 0.1, "resid_pdrop": 0.1}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"name": "gpt", **SIZES, **DROP, "attn_pdrop": 0.1},
    "llama": {"name": "llama", **SIZES, "head_dim": 6, "num_key_value_heads": 5},
    "grouped": {"name": "llama", **SIZES, **DROP, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 6},
    "experts": {"name": "llama", **SIZES, "head_dim": 6, "num_local_experts": 3, "num_experts_per_tok": 2},
    "fine experts": {"name": "llama", **SIZES, "head_dim": 6, "num_local_experts": 5, "num_experts_per_tok": 3,
                     "norm_topk_prob": False, "shared_expert_intermediate_size": 6, "shared_expert_gate": True},
}  # fmt: skip
OPTIMIZERS = {
    "gpt, LAMB": {"name": "lamb", "lr": 5e-2}, "gpt, LARS": {"name": "lars", "lr": 5.0, "weight_decay": 0.1},
    "gpt, Muon": {"name": "muon", "lr": 1e-2, "weight_decay": 0.1, "adamw_lr": 5e-3},
    "experts, Muon": {"name": "muon", "lr": 1e-2, "adjust_lr_fn": "match_rms_adamw"},
}  # fmt: skip
MODELS |= {kind: MODELS[kind.partition(",")[0]] for kind in OPTIMIZERS}
PRECONDITIONED = {
    "experts, Shampoo": {"name": "shampoo", "lr": 1e-2, "precondition_frequency": 2, "grafting": "adam"},
    "experts, SOAP": {"name": "soap", "lr": 3e-3, "precondition_frequency": 2},
}  # fmt: skip
OPTIMIZERS |= PRECONDITIONED

Case = tuple[int, str, dict[str, Any]]


def one_d(size: int, **options: Any) -> dict[str, Any]:
    return {"size": size, "mode": "1d", **options}


def shaped(mode: str, *shape: int, **options: Any) -> dict[str, Any]:
    return {"mode": mode, "shape": shape, **options}


TWO = {"num_hidden_layers": 2}
MODELS |= {f"{kind}, two layers": MODELS[kind] | TWO for kind in ("gpt", "grouped", "experts")}
RING = {"size": 2}
ULYSSES = {"size": 2, "ulysses": 2}
BOTH = {"size": 4, "ulysses": 2}
DISK = {"optimizer": "disk"}
CASES: list[Case] = [
    (2, "gpt", {"data": 2, "zero": 1, "offload": DISK, "parts": 2}),
    (2, "gpt", {"data": 2, "zero": 3, "recompute": "block"}),
    (2, "grouped", {"sequence": {"size": 2, "ulysses": 2}, "parts": 2}),
    (2, "experts", {"data": 2, "zero": 2, "parts": 2, "packed": True}),
    (2, "gpt, two layers", {"data": 2, "zero": 3, "recompute": "block", "parts": 2, "precision": "float32"}),
    (2, "gpt", {"sequence": RING, "zero": 1, "parts": 2}),
    (2, "llama", {"sequence": ULYSSES, "zero": 2, "parts": 2}),
    (2, "gpt, two layers", {"sequence": RING, "zero": 3, "recompute": "block", "offload": DISK}),
    (2, "grouped", {"sequence": ULYSSES, "zero": 3, "parts": 2}),
    (2, "experts", {"sequence": RING, "zero": 3, "expert_axis": "s"}),
    (2, "gpt, Muon", {"sequence": RING, "zero": 2}),
    (3, "gpt", {"sequence": {"size": 3, "order": "striped"}, "recompute": "attention"}),
    (3, "llama", {"sequence": {"size": 3}, "zero": {"stage": 2, "accumulate": "whole"}, "parts": 2}),
    (3, "llama", {"data": 3, "zero": {"stage": 2}, "parts": 2}),
    (3, "experts", {"data": 3, "zero": 1}),
    (4, "gpt", {"data": 2, "tensor": one_d(2), "zero": 1, "parts": 3}),
    (4, "grouped", {"data": 2, "tensor": one_d(2, sequence_parallel=True), "zero": 3}),
    (4, "llama", {"data": 2, "tensor": shaped("2d", 2, 1), "zero": 2, "offload": DISK}),
    (4, "gpt", {"data": 2, "tensor": shaped("2d", 1, 2), "zero": 1}),
    (4, "experts, two layers", {"data": 2, "sequence": RING, "zero": 3, "packed": True, "parts": 3}),
    (4, "llama", {"sequence": BOTH}),
    (4, "llama", {"sequence": BOTH, "zero": 3, "parts": 2}),
    (4, "gpt", {"data": 2, "sequence": RING, "zero": 1, "parts": 2}),
    (4, "gpt", {"data": 2, "sequence": ULYSSES, "zero": {"stage": 3, "within": 2}}),
    (4, "experts", {"data": 2, "sequence": RING, "zero": 2, "expert_axis": "s"}),
    (4, "experts, Muon", {"data": 2, "sequence": RING, "zero": 3}),
    (4, "gpt", {"sequence": RING, "tensor": one_d(2), "zero": 3}),
    (4, "gpt", {"sequence": RING, "tensor": one_d(2), "recompute": "block", "parts": 2}),
    (4, "gpt", {"data": 4, "zero": {"stage": 2, "within": 2, "accumulate": "whole"}, "parts": 2}),
    (4, "gpt", {"data": 2, "sequence": RING, "zero": 3, "offload": {"optimizer": "disk", "activations": "disk"}}),
    (4, "experts", {"data": 4, "experts": 2}),
    (4, "experts", {"data": 4, "experts": 2, "zero": 1, "offload": DISK, "parts": 2}),
    (4, "experts, two layers", {"data": 4, "experts": 2, "zero": {"stage": 2, "accumulate": "whole"}, "packed": True}),
    (4, "experts, two layers", {"data": 4, "experts": 2, "zero": 3, "recompute": "block", "parts": 2}),
    (4, "experts", {"data": 4, "experts": 2, "zero": {"stage": 2, "within": 2}, "parts": 2}),
    (4, "experts", {"data": 4, "experts": 1, "zero": 2}),
    (4, "experts, Muon", {"data": 4, "experts": 2, "zero": 1}),
    (8, "experts", {"data": 4, "experts": 2, "tensor": one_d(2), "zero": 1, "parts": 2}),
    (8, "experts, two layers", {"data": 4, "experts": 2, "tensor": one_d(2, sequence_parallel=True), "zero": 3}),
    (8, "experts", {"data": 4, "experts": 2, "sequence": RING, "zero": 2}),
    (2, "fine experts", {"data": 2, "zero": 3, "recompute": "block"}),
    (2, "fine experts", {"sequence": RING, "zero": 3, "parts": 2}),
    (4, "fine experts", {"data": 4, "experts": 2, "zero": 1, "parts": 2}),
    (4, "fine experts", {"data": 2, "tensor": one_d(2, sequence_parallel=True), "zero": 2, "offload": DISK}),
    (4, "fine experts", {"tensor": shaped("2d", 2, 2), "recompute": "block"}),
    (8, "fine experts", {"data": 4, "experts": 2, "tensor": one_d(2), "zero": 3, "parts": 2}),
    (8, "fine experts", {"tensor": shaped("2.5d", 2, 2, 2), "parts": 2}),
    (8, "fine experts", {"tensor": shaped("3d", 2, 2, 2)}),
    (4, "gpt, LAMB", {"data": 2, "tensor": shaped("2d", 1, 2), "zero": 2}),
    (2, "gpt, Muon", {"data": 2, "zero": 2, "offload": DISK}),
    (2, "experts, Muon", {"data": 2, "zero": 1}),
    (4, "gpt, Muon", {"data": 2, "tensor": one_d(2), "zero": 1, "parts": 2}),
    (4, "experts, Muon", {"data": 2, "tensor": one_d(2), "zero": 3}),
    (8, "gpt, Muon", {"tensor": shaped("3d", 2, 2, 2)}),
    (6, "gpt, LARS", {"data": 2, "tensor": one_d(3), "zero": 3}),
    (6, "gpt", {"sequence": {"size": 3}, "tensor": shaped("2d", 1, 2), "recompute": "attention"}),
    (6, "llama", {"data": 3, "tensor": shaped("2d", 2, 1), "zero": {"stage": 3, "accumulate": "whole"}, "parts": 2}),
    (6, "experts", {"data": 2, "tensor": one_d(3), "zero": 2}),
    (8, "gpt", {"data": 2, "tensor": shaped("2.5d", 2, 2, 1), "zero": 1}),
    (8, "llama", {"data": 2, "tensor": shaped("3d", 2, 1, 2), "zero": 2, "parts": 2}),
    (8, "gpt", {"data": 2, "tensor": shaped("2.5d", 2, 1, 2, depth_on="k"), "zero": 3, "offload": DISK}),
    (8, "gpt, two layers", {"data": 2, "tensor": shaped("3d", 2, 1, 2), "zero": 3}),
    (8, "gpt", {"sequence": RING, "tensor": shaped("2d", 2, 2), "recompute": "block", "parts": 2}),
    (8, "grouped", {"data": 2, "sequence": {"size": 2, "ulysses": 2}, "tensor": one_d(2), "zero": 3}),
    (12, "gpt", {"data": 3, "tensor": shaped("2d", 2, 2), "zero": 3}),
    (12, "gpt", {"data": 2, "tensor": shaped("3d", 1, 2, 3), "zero": 1}),
    (12, "llama", {"sequence": {"size": 6, "ulysses": 2}, "tensor": one_d(2), "parts": 2}),
    (12, "experts", {"data": 2, "tensor": shaped("2.5d", 3, 2, 1), "zero": 2}),
]  # fmt: skip
CHOSEN = CASES if BACKEND == "numpy" else CASES[::3]  # for the stand-in, which differs in arrays alone


@pytest.fixture(scope="module")
def tale(world: Any) -> Iterator[Path]:
    """A file of text in a folder of its own, and there a folder of several; one for all ranks."""
    made = tempfile.mkdtemp(prefix="parlinalg-") if world.rank == 0 else ""
    path = Path(world.share(made)[0]) / "tale.txt"
    if world.rank == 0:
        path.write_text(TEXT)
        (path.parent / "several").mkdir()
        for i, n in enumerate((7, 90, 33, 210, 18)):
            (path.parent / "several" / f"{i}.txt").write_text(TEXT[50 * i : 50 * i + n])
    world.barrier()
    yield path
    world.barrier()
    if made:
        shutil.rmtree(made, ignore_errors=True)


def config(kind: str, path: Path, case: dict[str, Any]) -> dict[str, Any]:
    packed = case.get("packed", False)
    data = {
        "name": "text", "path": str(path.parent / "several" if packed else path), "sequence_length": 11,
        "validation": 0.15, "packed": packed,
    }  # fmt: skip
    model = MODELS[kind.partition(",")[0] if kind in PRECONDITIONED else kind] | {
        k: case[k] for k in ("recompute", "expert_axis") if k in case
    }
    parallel = {k: case[k] for k in ("data", "experts", "sequence", "tensor") if k in case}
    more = {k: case[k] for k in ("zero", "offload", "precision") if k in case}
    optimizer = OPTIMIZERS.get(kind, BASE["optimizer"])
    return {
        **BASE, "optimizer": optimizer, "data": data, "model": model, "parallel": parallel, **more,
        "gradient_accumulation": case.get("parts", 1),
    }  # fmt: skip


def run(comm: Any, settings: dict[str, Any], backend: str, out: Path) -> np.ndarray:
    """Losses and gradient norms, and last the loss of the validation."""
    with launch(settings, comm, backend) as mesh:
        training = Training(mesh, out)
        with training.away():
            steps = training.steps(STEPS)
            held = training.held()["loss"]
    return np.array([*((s.loss, s.norm) for s in steps), (held, 0.0)])


@cache
def serial(kind: str, path: Path, packed: bool, precision: str | None) -> np.ndarray:
    settings = config(kind, path, {"packed": packed, "precision": precision})
    return once(lambda: run(SingleComm(), settings, "numpy", path.parent))


def check(kind: str, case: dict[str, Any], tale: Path, world: Any, backend: str) -> None:
    close = CLOSE_TURNED if kind in PRECONDITIONED else CLOSE
    found, low = run(world, config(kind, tale, case), backend, tale.parent), case.get("precision")
    want = serial(kind, tale, case.get("packed", False), low)
    np.testing.assert_allclose(found, want, rtol=CLOSE_32 if low else close, err_msg=f"{kind} {case}")
    assert want[STEPS - 1, 0] < want[0, 0]


@pytest.mark.parametrize(
    ("kind", "case"), [pytest.param(k, c, marks=pytest.mark.ranks(n), id=f"{n}-{k}-{c}") for n, k, c in CHOSEN]
)
def test_losses_are_those_of_one_rank(kind: str, case: dict[str, Any], tale: Path, world: Any, backend: str) -> None:
    check(kind, case, tale, world, backend)


def drawn(ranks: int, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Combinations drawn from all, the first with ZeRO; for each number of ranks the same everywhere and always."""
    draw = random.Random(ranks)
    first = True
    while number:
        data, sequence, tensor = draw.choice([f for f in factorizations(ranks, 3) if f[0] > 1 or not first])
        kind = draw.choice(list(MODELS))
        heads = MODELS[kind].get("num_key_value_heads", 5)
        modes = ["1d", "2d", "2.5d", "3d"] if tensor > 1 else []
        mode = draw.choice(modes) if modes else None
        shape = draw.choice(factorizations(tensor, {"2d": 2}.get(mode or "", 3)))
        ulysses = draw.choice([u for u in range(1, sequence + 1) if sequence % u == 0])
        if ulysses * tensor > heads:
            ulysses = 1
        case: dict[str, Any] = {
            "data": data,
            "sequence": {"size": sequence, "ulysses": ulysses, "order": draw.choice([None, "zigzag", "striped"])},
            "recompute": draw.choice([None, "attention", "block"]),
            "parts": draw.choice([1, 2, 3]),
            "packed": draw.random() < 0.3,
            "precision": "float32" if draw.random() < 0.15 else None,
        }
        if mode == "1d":
            case["tensor"] = one_d(tensor, sequence_parallel=draw.random() < 0.5)
        elif mode is not None:
            case["tensor"] = shaped(
                mode, *shape, **({"depth_on": draw.choice(["batch", "k"])} if mode == "2.5d" else {})
            )
        within = draw.choice([None, *(n for n in range(1 + first, data + 1) if data % n == 0)])
        accumulate = draw.choice(["reduce-scatter", "whole"])
        if data > 1:
            case["zero"] = {"stage": draw.randrange(1 if first else 0, 4), "within": within, "accumulate": accumulate}
        if draw.random() < 0.3:
            places = [DISK, {"activations": "disk"}, {"optimizer": "disk", "parameters": "disk"}]
            shards = case.get("zero", {"stage": 0})["stage"] in (1, 2)  # their values do not leave the buckets
            case["offload"] = draw.choice(places[: 2 if shards else 3])
        number, first = number - 1, False
        yield kind, case


@pytest.mark.ranks(4, 6, 8, full=(12,))
def test_drawn_combinations_give_the_losses_of_one_rank(tale: Path, world: Any, backend: str, full: bool) -> None:
    for kind, case in drawn(SIZE, 60 if full else 1):
        check(kind, case, tale, world, backend)


def drawn_groups(ranks: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Groups that share experts, with each of Shampoo and SOAP in each stage of ZeRO; the rest is drawn."""
    draw = random.Random(ranks)
    for kind, stage in product(PRECONDITIONED, range(4)):
        data, other = draw.choice([(ranks, 1), (ranks, 1), (max(2, ranks // 2), ranks // max(2, ranks // 2))])
        experts = draw.choice([n for n in (1, 2) if data % n == 0])
        within = draw.choice([None, experts, data])
        case = {
            "data": data, "experts": experts, "parts": draw.choice([1, 2]), "packed": draw.random() < 0.3,
            "zero": {"stage": stage, "within": within, "accumulate": draw.choice(["reduce-scatter", "whole"])},
            "recompute": draw.choice([None, "block"]),
        }  # fmt: skip
        if other > 1:
            case |= draw.choice([{"sequence": RING}, {"tensor": one_d(other)}])
        yield kind, case


@pytest.mark.ranks(2, 4)
def test_preconditioned_experts_in_groups_give_the_losses_of_one_rank(
    tale: Path, world: Any, backend: str, full: bool
) -> None:
    for kind, case in list(drawn_groups(world.size))[:: 1 if full else 3]:
        check(kind, case, tale, world, backend)
