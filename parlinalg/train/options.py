"""Options of a configuration that change how a training computes, not what: precision and shared memory.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from parlinalg.errors import ConfigError
from parlinalg.parallel.handlers import ACCUMULATE, KINDS, Handler, ZeRO
from parlinalg.pipeline.schedules import discover
from parlinalg.train.keys import (
    Check,
    check_keys,
    listed,
    one_of,
    optional,
    real,
    refuse,
    section,
    several,
    text,
    whole,
)
from parlinalg.units import parse_bytes

NAMES = {"bf16": "bfloat16", "fp16": "float16"}
LOW = ("bfloat16", "float16", "float32")
_scaler: dict[str, Check] = {
    "start": real(0, above=True), "growth_every": whole(1), "least": real(0, above=True), "most": real(0, above=True),
}  # fmt: skip


@dataclass(frozen=True)
class Precision:
    """Mixed precision.

    Attributes
    ----------
    dtype : str or None
        Of the model's weights, gradients and arithmetic; the optimizer's weights have the configuration's.  None: the
        configuration's too.
    loss_scale : dict, float or None
        Options of a dynamic scale, a scale that stays, or none.
    communicate : str or None
        The dtype in which gradients travel; None is their own.
    """

    dtype: str | None = None
    loss_scale: Mapping[str, Any] | float | None = None
    communicate: str | None = None


@dataclass(frozen=True)
class Pipelining:
    """The order of work in a pipeline.

    Attributes
    ----------
    name : str
        Of a file of `parlinalg.pipeline.schedules`.
    microbatches : int or None
        Into which a step's batch is cut; None: as `gradient_accumulation` says, or as many as the pipeline has ranks.
    chunks : int or None
        Stages a rank holds, for schedules that take several; None: as the schedule likes it.
    every : int or None
        In asynchronous schedules, the microbatches of an optimizer step; None: as the schedule likes it.
    """

    name: str = "1f1b"
    microbatches: int | None = None
    chunks: int | None = None
    every: int | None = None


@dataclass(frozen=True)
class Zero:
    """What data parallel ranks share out: see `parlinalg.parallel.ZeRO`.

    Attributes
    ----------
    stage : int
        0: nothing.  1: the optimizer's states.  2: gradients too.  3: parameters too.
    within : int or None
        Groups of so many data parallel ranks share, and the groups hold copies.  None: all share.
    accumulate : {"reduce-scatter", "whole"}
        What microbatches do with stages 2 and 3.
    """

    stage: int = 0
    within: int | None = None
    accumulate: str = "reduce-scatter"


def precision(where: str, value: Any) -> Precision:
    """A check of `precision`: a name, or a dict with the keys of `Precision`."""
    if value is None:
        return Precision()
    given = {"dtype": value} if isinstance(value, str) else value
    found = section(
        where, given, {"dtype": optional(_low), "loss_scale": _loss_scale, "communicate": optional(_communicate)}
    )
    dtype = found.get("dtype")
    if dtype == "float16" and "loss_scale" not in found:
        found["loss_scale"] = {}
    if found.get("communicate") == "16":
        found["communicate"] = dtype if dtype in ("bfloat16", "float16") else "bfloat16"
    return Precision(**found)


def _low(where: str, value: Any) -> str:
    name: str = NAMES.get(value, value) if isinstance(value, str) else value
    if name not in LOW:
        raise refuse(where, value, f"one of {listed((*NAMES, *LOW))}, or None for none")
    return name


def _loss_scale(where: str, value: Any) -> Any:
    if value is None or value == "dynamic":
        return None if value is None else {}
    if isinstance(value, Mapping):
        return section(where, value, _scaler)
    if isinstance(value, str):
        raise refuse(where, value, "'dynamic', a dict with its options, a number that stays, or None")
    return real(0, above=True)(where, value)


def _communicate(where: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        value = "float32" if value == 32 else str(value)
    found: str = one_of("16", "bfloat16", "float16", "float32")(where, "float32" if value == "32" else value)
    return found


def pipelining(where: str, value: Any) -> Pipelining | None:
    """A check of `schedule`: a name, or a dict with the keys of `Pipelining`."""
    if value is None:
        return None
    given = {"name": value} if isinstance(value, str) else value
    count = optional(whole(1, 100_000))
    checks: dict[str, Check] = {
        "name": one_of(*sorted(discover())),
        "microbatches": count,
        "chunks": count,
        "every": count,
    }
    return Pipelining(**section(where, given, checks))


def zero(where: str, value: Any) -> Zero:
    """A check of `zero`: a stage, or a dict with the keys of `Zero`."""
    given = {"stage": value} if isinstance(value, int) and not isinstance(value, bool) else value
    checks: dict[str, Check] = {"stage": _stage, "within": optional(whole(1)), "accumulate": one_of(*ACCUMULATE)}
    return Zero(**section(where, {} if given is None else given, checks))


def _stage(where: str, value: Any) -> int:
    if value not in (0, 1, 2, 3) or isinstance(value, bool):
        raise refuse(where, value, "0 (off), 1 (optimizer states), 2 (gradients too) or 3 (parameters too)")
    return int(value)


def handlers(where: str, value: Any) -> tuple[Handler, ...]:
    """A check of `gradient_handler`: a list of dicts, each with a `type` and that handler's options."""
    given = [] if value is None else value
    return tuple(several(_handler)(where, given))


def _handler(where: str, value: Any) -> Handler:
    given = {"type": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping) or "type" not in given:
        raise refuse(where, value, f"a dict with a type, one of {listed(KINDS)}")
    name = given["type"]
    if not isinstance(name, str) or name not in KINDS:
        raise refuse(f"{where}.type", name, f"one of {listed(KINDS)}")
    options: dict[str, Any] = {key: v for key, v in given.items() if key != "type"}
    check_keys(f"{where} ({name})", options, [f.name for f in fields(KINDS[name])])
    lacking = [repr(f.name) for f in fields(KINDS[name]) if f.default is MISSING and f.name not in options]
    if lacking:
        raise ConfigError(f"{where} ({name}) needs {' and '.join(lacking)}")
    axes = options.get("axes", "")
    if not isinstance(axes, str):
        options["axes"] = tuple(several(text, least=1)(f"{where}.axes", axes))
    try:
        made = KINDS[name](**options)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from error
    if isinstance(made, ZeRO) and made.stage == 3:
        raise ConfigError(f"{where}: stage 3 cuts the weights of the model: use zero=dict(stage=3), and leave this out")
    return made


def offload(where: str, value: Any) -> Mapping[str, Any]:
    """A check of `offload`: where the states of the optimizer, activations, parameters and gradients lie."""
    place = one_of(None, "host", "disk")
    checks: dict[str, Check] = {
        "optimizer": place, "activations": place, "parameters": place, "gradients": place,
        "path": optional(text), "memory": optional(_memory),
    }  # fmt: skip
    found = section(where, {} if value is None else value, checks)
    found = {key: v for key, v in found.items() if v is not None}
    if set(found) == {"path"}:
        raise ConfigError(f"{where} has a path, and nothing that lies there: add optimizer='disk', or memory='4GiB'")
    return found


def _memory(where: str, value: Any) -> int:
    if isinstance(value, str):
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
    found: int = whole(1)(where, value)
    return found
