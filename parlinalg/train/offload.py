"""Offloading as a configuration asks for it, from the making of an engine until the mesh is closed."""

from __future__ import annotations

from typing import Any

from parlinalg.errors import ConfigError
from parlinalg.offload import kept, plan
from parlinalg.offload.probe import extrapolated
from parlinalg.train.config import TrainingConfig
from parlinalg.train.engine import Engine
from parlinalg.train.feed import Feed, rows_of
from parlinalg.train.mesh import Mesh
from parlinalg.train.schedules import EngineTask, LazyBatch, order_of, worker_of


def check_offload(config: TrainingConfig, mesh: Mesh | None, train: Any) -> None:
    """Raise a ConfigError if offloading could not end, or has a limit of memory and no batch to measure."""
    by_hand = "`with parlinalg.offload.plan(engine.model, engine.optimizer, …).apply():`"
    if config.offload.memory is not None and train is None:
        raise ConfigError(
            f"initialize: offload.memory={config.offload.memory} of the configuration decides by what the tape "
            "keeps of a microbatch of the first batch: give the train_dataloader here; or say what goes where, by "
            f"offload.optimizer, .activations and .parameters; or leave it out and train within {by_hand}, with "
            "memory=… and kept=…"
        )
    if config.offload and mesh is None:
        raise ConfigError(
            f"initialize: offload={config.offload.given()} of the configuration ends with the mesh, and the model's "
            f"grid was made without one: make it by launch, or leave it out and train within {by_hand}"
        )


def offload(config: TrainingConfig, mesh: Mesh, engine: Engine, train: Feed | None) -> None:
    """Offload by the configuration, until the mesh is closed.  Collective."""
    options, order = config.offload.given(), order_of(engine)
    if order is not None and order.asynchronous and "parameters" in options:
        raise ConfigError(
            f"offload.parameters={options['parameters']!r} with the schedule {order.name!r}, which keeps versions "
            "of weights in memory: offload the optimizer or activations, or take a synchronous schedule, such as "
            "'1f1b'"
        )
    if "optimizer" in options:
        options["optimizer_states"] = options.pop("optimizer")
    worker: Any = None if order is None else worker_of(engine, order)  # takes values as they are in memory
    if "memory" in options and train is not None:
        parts, rows = _microbatches(train, getattr(engine.schedule, "num_microbatches", 1), mesh.size("data"))
        if worker is None:
            options["kept"] = extrapolated({n: _kept(engine, part) for n, part in parts.items()}, rows)
        else:
            samples = {n: LazyBatch(engine, part, 0) for n, part in parts.items()}
            options["kept"] = worker.activation_memory(samples, EngineTask(engine, False), rows)
    engine.memory_plan = made = plan(engine.model, engine.optimizer, **options)
    mesh.ends.callback(engine.restore)
    engine.resources.enter_context(made.apply())


def _kept(engine: Engine, part: Any) -> int:
    with engine.probing(part) as loss:
        return kept(loss)


def _microbatches(train: Feed, parts: int, data: int) -> tuple[dict[int, Any], int]:
    """Return microbatches to measure, of one and two rows a data parallel rank, by their rows, and those of a real one.

    Collective.
    """

    def rows_in(part: Any) -> int:
        x, _ = part
        return rows_of(x)

    batch = rows_in(train.first(1))
    rows = -(-rows_in(train.first(parts)) // data)
    found: dict[int, Any] = {}
    for n in (1, 2):
        part = train.first(max(parts, batch // (n * data)))
        found.setdefault(-(-rows_in(part) // data), part)
    return {rows: found[rows]} if rows in found else found, rows
