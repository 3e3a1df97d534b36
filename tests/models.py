"""Small models of every kind, of sizes that no grid divides, and every scheme and grid to run them on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import parlinalg as pla
from parlinalg import nn, schemes
from parlinalg.autograd import ops
from parlinalg.nn.init import Declared, Initializer
from parlinalg.optim import AdamW
from parlinalg.parallel import GradientReducer
from parlinalg.schemes import Scheme
from tests.cases import held, placed
from tests.training import sizes_for

BATCH, SEQUENCE, VOCABULARY, HIDDEN, HEADS = 5, 7, 11, 20, 4
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "num_attention_heads": HEADS}
TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 9, **SIZES}
CLOSE = 1e-12  # relative to the largest element


CLASSES: dict[str, Any] = {"gpt": nn.GPT, "llama": nn.Llama, "bert": nn.BertEncoder, "vit": nn.ViT}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "gpt": TEXT,
    "llama": {**TEXT, "intermediate_size": 13, "num_key_value_heads": 2, "head_dim": 6},
    "bert": {**TEXT, "intermediate_size": 13},
    "vit": {**SIZES, "intermediate_size": 13, "image_size": (6, 9), "patch_size": 3, "num_channels": 2,
            "num_labels": VOCABULARY},
}  # fmt: skip
DROPOUTS = {
    "gpt": ("embd_pdrop", "resid_pdrop", "attn_pdrop"),
    "llama": ("embd_pdrop", "resid_pdrop", "attention_dropout"),
    "bert": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
    "vit": ("hidden_dropout_prob", "attention_probs_dropout_prob"),
}
KINDS = list(CLASSES)


def loss_of(model: Any, step: int = 0, rows: slice = slice(None)) -> pla.Tensor:
    """The mean loss of a batch, or of some of its rows, the same on every grid."""
    rng = np.random.default_rng(step)
    grid = model.grid
    if isinstance(model, nn.ViT):
        images = rng.normal(size=(BATCH, 2, 6, 9)).astype(model.dtype)[rows]
        classes = placed(rng.integers(0, VOCABULARY, BATCH)[rows], grid, model.targets_layout)
        return ops.cross_entropy(model(placed(images, grid, model.images_layout)), classes)
    ids, targets, types = rng.integers(0, VOCABULARY, (3, BATCH, SEQUENCE))[:, rows]
    shown = placed(ids, grid, model.ids_layout)
    if not isinstance(model, nn.BertEncoder):
        return ops.cross_entropy(model(shown), placed(targets, grid, model.targets_layout))
    real = np.arange(SEQUENCE) < rng.integers(1, SEQUENCE + 1, (len(ids), 1))
    targets[(rng.random(targets.shape) < 0.5) | ~real] = -100
    mask, types = (placed(a.astype(int), grid, model.ids_layout) for a in (real, types % 2))
    logits = model.logits(model(shown, mask, types))
    return ops.cross_entropy(logits, placed(targets, grid, model.targets_layout))


def anything(name: str, declared: Declared) -> Initializer:
    """Initial values that no part of a model can do without: biases are not zeros."""
    return nn.init.Normal(0.3, float(declared.init == nn.init.ones))


def make(kind: str, scheme: Scheme, grid: Any, start: Any = anything, p: float = 0.0, **options: Any) -> Any:
    """A model with one layer and initial values by a rule, all of its dropouts with probability p."""
    defaults = {**ARGUMENTS[kind], **dict.fromkeys(DROPOUTS[kind], p), "num_hidden_layers": 1, "dtype": "float64"}
    model = CLASSES[kind](scheme=scheme, grid=grid, **{**defaults, **options})
    model.start_from(start)
    return model.initialize(5)


def gradients(kind: str, scheme: Scheme, grid: Any, **options: Any) -> dict[str, pla.DistArray]:
    """The loss and the gradient of every parameter."""
    model = make(kind, scheme, grid, **options)
    GradientReducer(model.parameters())
    loss = loss_of(model)
    loss.backward()
    found = {"loss": loss.data}
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert (p.grad.layout, p.grad.dtype) == (p.layout, p.dtype), name
        found[name] = p.grad
    return found


def losses(kind: str, scheme: Scheme, grid: Any, steps: int = 10, **options: Any) -> list[float]:
    """The losses of training with AdamW."""
    model = make(kind, scheme, grid, **options)
    GradientReducer(model.parameters(), first_bucket=2000, bucket=4000)
    optimizer = AdamW(model.parameters(), 0.01)
    return stepped(model, optimizer, range(steps), 3)


def stepped(model: Any, optimizer: Any, steps: range, batches: int) -> list[float]:
    """The losses of training steps, which take so many batches in turn."""
    found = []
    for step in steps:
        with nn.training_step(step):
            loss = loss_of(model, step % batches)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def every_scheme() -> dict[str, Scheme]:
    """All schemes that the folder lists, and all their mixtures: within data and sequence parallelism, and with the
    weights cut over the data axis."""
    found = {name: file.SCHEME for name, file in schemes.discover().items()}
    mixed = {}
    for name, scheme in found.items():
        if "s" not in scheme.axes:
            mixed[f"sequence × {name}"] = scheme.with_sequence("s")
        if "data" not in scheme.axes:
            mixed[f"data × {name}"] = within = scheme.with_data("data")
            mixed[f"data × {name}, weights cut"] = within.with_weights_cut("data")
            if "s" not in scheme.axes:
                mixed[f"data × sequence × {name}"] = scheme.with_sequence("s").with_data("data")
    return found | mixed


def combinations(ranks: int, full: bool) -> Iterator[tuple[str, str, dict[str, int]]]:
    """(model, scheme, grid): all, or every scheme of the folder with two models and half of the mixtures with one, each
    on a grid drawn from all shapes; other numbers of ranks take the others."""
    draw = random.Random(ranks)  # the same on all ranks
    plain = schemes.discover()
    for i, (name, scheme) in enumerate(every_scheme().items()):
        shapes = sizes_for(scheme, ranks, 10**6)
        turn = i + ranks + ranks // 4
        for k, kind in enumerate(KINDS):
            chosen = (turn + k) % 2 == 0 if name in plain else (turn % 2 == 0 and turn // 2 % len(KINDS) == k)
            if full or ranks == 1 or chosen:
                for sizes in shapes if full else [draw.choice(shapes)]:
                    yield kind, name, sizes


@contextmanager
def alone(world: Any) -> Iterator[Any]:
    """A grid of this rank alone."""
    with pla.Grid({"one": 1}, world.sub((world.rank,), ()), "numpy") as grid:
        yield grid


def differences(found: dict[str, pla.DistArray], want: dict[str, np.ndarray], tol: float = CLOSE) -> list[str]:
    """Where this rank's blocks differ from a global array by more than that share of its largest element; does not
    communicate, so that ranks with differences stay in step."""
    assert found.keys() == want.keys()
    wrong = []
    for name, value in want.items():
        array = found[name]
        part = array.grid.block(array.layout, array.shape)
        mine = value[tuple(slice(r.start, r.stop) for r in part)]
        error = np.abs(held(array).astype(np.float64) - mine).max(initial=0.0)
        if not error <= tol * np.abs(value).max():
            wrong.append(f"{name} by {error:.1e} of {np.abs(value).max():.1e}")
    return wrong
