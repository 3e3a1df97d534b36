"""The things that a configuration chooses by name: how each is made, and the checks of its options.

The options are the keyword arguments of the things themselves: models, data sets, optimizers, learning rates, losses.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast, get_type_hints

from parlinalg import datasets, optim
from parlinalg.autograd import Parameter
from parlinalg.autograd.ops import cross_entropy_sum
from parlinalg.errors import ConfigError
from parlinalg.nn import GPT, MLP, Llama
from parlinalg.nn.activations import hidden_acts
from parlinalg.optim import muon, preconditioned
from parlinalg.optim.newton_schulz import executions
from parlinalg.optim.schedules import Constant, Cosine, Linear, Scheduler, Step, WarmUp
from parlinalg.train.losses import Criterion
from parlinalg.train.schema import (
    Check,
    Choice,
    Kind,
    choice,
    flag,
    integer,
    one_of,
    optional,
    real,
    refuse,
    several,
    text,
)

LANGUAGE = ("gpt", "llama")  # models that read text
_dropout = real(0, 1, below=True)
_fraction = real(0, 1, above=True, below=True)
_positive = real(0, above=True)


def _hidden(where: str, value: Any) -> Any:
    return several(integer(1))(where, [value] if isinstance(value, int) else value)


def _axes(where: str, value: Any) -> Any:
    return text(where, value) if isinstance(value, str) else several(text, least=1)(where, value)


DATASETS = {
    "digits": Kind(datasets.digits, {"test": _fraction}),
    "npz": Kind(datasets.npz, {"path": text, "test": _fraction}),
    "text": Kind(
        datasets.text,
        {
            "path": optional(text), "tokenizer": optional(text), "sequence_length": integer(1),
            "validation": _fraction, "packed": flag,
        },
    ),
}  # fmt: skip
_language: dict[str, Check] = {
    "vocab_size": integer(1),
    "max_position_embeddings": integer(1),
    "hidden_size": integer(1),
    "num_hidden_layers": integer(1, 100_000),
    "num_attention_heads": integer(1),
    "intermediate_size": integer(1),
    "tie_word_embeddings": flag,
    "initializer_range": _positive,
    "embd_pdrop": _dropout,
    "resid_pdrop": _dropout,
    "recompute": one_of(None, "attention", "block"),
    "num_local_experts": integer(1),
    "num_experts_per_tok": integer(1),
    "norm_topk_prob": flag,
    "shared_expert_intermediate_size": integer(0),
    "shared_expert_gate": flag,
    "router_aux_loss_coef": real(0),
    "capacity_factor": optional(_positive),
    "expert_axis": optional(_axes),
}
MODELS = {
    "mlp": Kind(
        MLP,
        {
            "hidden": _hidden, "activation": one_of(*hidden_acts()), "dropout": _dropout,
            "bias": flag,
        },
    ),
    "gpt": Kind(GPT, {**_language, "hidden_act": text, "attn_pdrop": _dropout, "layer_norm_eps": _positive}),
    "llama": Kind(
        Llama,
        {
            **_language, "num_key_value_heads": integer(1), "head_dim": integer(1), "packed": flag,
            "rope_theta": _positive, "rms_norm_eps": _positive, "attention_dropout": _dropout,
        },
    ),
}  # fmt: skip


def _no_decay(where: str, value: Any) -> bool | tuple[str, ...]:
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        raise refuse(where, value, "True, False, or a list of parts of parameters' names, such as ['bias', 'norm']")
    found: tuple[str, ...] = several(text)(where, value)
    return found


#: Checks of optimizers' options by name; of others by type.
_options: dict[str, Check] = {
    "lr": real(0), "weight_decay": real(0), "betas": several(_dropout, length=2), "eps": _positive,
    "momentum": _dropout, "trust": _positive, "adamw": several(text), "adamw_lr": optional(real(0)),
    "ns_steps": integer(1), "ns_coefficients": several(real(-math.inf), length=3),
    "adjust_lr_fn": one_of(*muon.ADJUST), "execution": one_of(None, *executions()), "beta2": real(0, 1, above=True),
    "damping": _positive, "precondition_frequency": integer(1), "max_precond_dim": integer(1),
    "block_size": optional(integer(1)),
    "grafting": one_of(*preconditioned.GRAFTS), "root": one_of(*preconditioned.ROOTS),
}  # fmt: skip
_types: dict[type, Check] = {float: real(-math.inf), bool: flag, int: integer(0), str: text}


def _optimizer(made: type[optim.Optimizer]) -> Kind:
    """Return an optimizer as a choice: its options are the arguments of the class."""
    checks: dict[str, Check] = {"no_decay": _no_decay}
    types = get_type_hints(made.__init__)
    for name, argument in inspect.signature(made).parameters.items():
        if name != "parameters" and argument.kind is not argument.VAR_KEYWORD:
            checks[name] = _options[name] if name in _options else _types[types[name]]
    return Kind(made, checks, made.DEFAULTS)


OPTIMIZERS = {name: _optimizer(made) for name, made in optim.discover().items()}
_warmup: dict[str, Check] = {"warmup": integer(0)}
LR_SCHEDULES = {
    "constant": Kind(lambda steps: Constant(), _warmup),
    "cosine": Kind(Cosine, {**_warmup, "end": real(0, 1)}),
    "linear": Kind(Linear, {**_warmup, "end": real(0, 1)}),
    "step": Kind(
        lambda steps, **options: Step(**options),
        {**_warmup, "every": integer(1), "factor": real(0, 1, above=True)},
    ),
}
CRITERIA = {"cross_entropy": Kind(cross_entropy_sum, {"label_smoothing": _dropout})}


# ---------------------------------------------------------------------------------------------- checks
def data(where: str, value: Any) -> Choice:
    """Check a choice of data; the path of a file stands for the data in it."""
    path = value if isinstance(value, str) else value.get("path") if isinstance(value, Mapping) else None
    if isinstance(path, str) and path not in DATASETS and (isinstance(value, Mapping) or Path(path).suffix):
        name = "npz" if path.endswith(".npz") else "text"
        value = {"name": name, **(value if isinstance(value, Mapping) else {"path": path})}
    chosen: Choice = choice(DATASETS)(where, value)
    if chosen.name == "npz" and "path" not in chosen.options:
        raise ConfigError(f"{where} (npz) needs a path: data=dict(path='FILE.npz') of a file with arrays x and y")
    return chosen


def lr_schedule(where: str, value: Any) -> Choice:
    """Check a choice of a schedule of the learning rate."""
    chosen: Choice = choice(LR_SCHEDULES)(where, value)
    if chosen.name == "step" and "every" not in chosen.options:
        raise ConfigError(f"{where} (step) needs every=…, the steps after which the rate falls")
    return chosen


# ---------------------------------------------------------------------------------------------- making
def make_optimizer(chosen: Choice, parameters: Sequence[Parameter], **more: Any) -> optim.Optimizer:
    """Return an optimizer of these parameters."""
    kind = OPTIMIZERS[chosen.name]
    options: dict[str, Any] = {**kind.defaults, **chosen.options, **more}
    names, given = options.pop("no_decay", False), cast(Any, parameters)
    if names is not False:
        decay = options.pop("weight_decay", inspect.signature(kind.make).parameters["weight_decay"].default)
        given = optim.decay_groups(parameters, weight_decay=decay, no_decay=None if names is True else names)
    made: optim.Optimizer = kind.make(given, **options)
    return made


def make_scheduler(chosen: Choice, optimizer: optim.Optimizer, steps: int) -> Scheduler:
    """Return the schedule of the learning rate over so many steps."""
    options = dict(chosen.options)
    warmup = options.pop("warmup", 0)
    then = LR_SCHEDULES[chosen.name].make(max(1, steps - warmup), **options)
    return Scheduler(optimizer, WarmUp(warmup, then) if warmup else then)


def make_criterion(chosen: Choice) -> Criterion:
    """Return a function from logits and targets to the sum of the losses and their number."""
    return partial(CRITERIA[chosen.name].make, **chosen.options)
