"""A model cut into stages, of which each rank holds its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import Buffer, Parameter
from parlinalg.comm.together import odd_one_out, together
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.nn.cache import KeyValueCache
from parlinalg.nn.containers import ModuleList, Sequential
from parlinalg.nn.foreign import Names, foreign
from parlinalg.nn.init import Declared, is_buffer
from parlinalg.nn.layer import Layer, as_layer, layers_of
from parlinalg.nn.module import Module
from parlinalg.nn.pretrained import Pretrained
from parlinalg.pipeline.partition import Partition, layers_per_stage
from parlinalg.pipeline.schedule import Schedule
from parlinalg.pipeline.topology import PipelineTopology
from parlinalg.schemes import Scheme
from parlinalg.state_dict import check_arrays

if TYPE_CHECKING:
    from parlinalg.pipeline.generate import PipelineDecoder


class Stage:
    """Consecutive layers of a model, as a rank holds them.

    Parameters
    ----------
    number : int
        Its index in the order of the model, from 0.
    stages : int
        The number of stages.
    layers : sequence of Layer
    names : mapping of int to str
        The qualified name of each module of the model, by its identity.
    copy : int
        The replica of the model, in schedules that train two at once.

    Attributes
    ----------
    first, last : bool
        True for the stage that takes the model's inputs; for the one that returns its outputs.
    """

    def __init__(
        self, number: int, stages: int, layers: Sequence[Layer], names: Mapping[int, str], copy: int = 0
    ) -> None:  # fmt: skip
        self.number, self.copy = number, copy
        self.first, self.last = number == 0, number == stages - 1
        self.layers = tuple(layers)
        self._names = names

    def __call__(self, x: Any) -> Any:
        """Return the last layer's output for the previous stage's output (for the first stage, the model's inputs)."""
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def generate(self, x: Any, caches: Sequence[KeyValueCache], start: int) -> Any:
        """Return the output for tokens from position `start` on; `caches` holds keys and values of earlier ones."""
        left = iter(caches)
        for layer in self.layers:
            if layer.cached is None:
                x = layer.forward(x)
            else:
                x = layer.cached(x, next(left) if layer.caches else None, start)
        return x

    def caches(self, length: int) -> list[KeyValueCache]:
        """Return empty caches for so many tokens, one for each layer that keeps keys and values."""
        return [KeyValueCache(length) for layer in self.layers if layer.caches]

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """Yield the modules of its layers and all within them, each once, with their names in the whole model."""
        found = {id(m): m for layer in self.layers for m in layer.all_modules()}
        yield from ((self._names[key], module) for key, module in found.items())

    def modules(self) -> Iterator[Module]:
        """Yield the modules of its layers and all within them, each once."""
        return (module for _, module in self.named_modules())

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield its parameters, each once, with their names in the whole model."""
        seen: set[int] = set()
        for name, module in self.named_modules():
            for own in module._parameters:
                parameter = getattr(module, own)
                if id(parameter) not in seen and not isinstance(parameter, Buffer):
                    seen.add(id(parameter))
                    yield f"{name}.{own}" if name else own, parameter

    def parameters(self) -> Iterator[Parameter]:
        """Yield its parameters, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def __repr__(self) -> str:
        names = [layer.name for layer in self.layers]
        label = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        return f"Stage({self.number}: {label}{f', copy {self.copy}' if self.copy else ''})"


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter or buffer of the whole model, known on every rank.

    Attributes
    ----------
    shape : tuple of int
    dtype : dtype
    stages : tuple of int
        The stages that hold it; the first owns it.
    buffer : bool
        True if it is a buffer, which no optimizer changes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stages: tuple[int, ...]
    buffer: bool = False


class PipelineModel(Module):
    """This rank's stages of a model.

    Names of parameters and modules are those of the whole model, so values, dropout and saved states are the same on
    every grid and in every split.

    Parameters
    ----------
    full_model : Module
        The model, declared on this rank's grid.
    parts : dict of int to sequence of Layer
        The layers of this rank's stages, at least, by number.
    counts : sequence of int
        The layers of each stage.
    inventory : dict of str to ParameterInfo
        All parameters and buffers of the whole model.
    topology : PipelineTopology
    schedule : Schedule
        Its `chunks` say which stages a rank holds.

    Attributes
    ----------
    full_model : Module
        Only the modules of this rank's stages have values.
    chunks : tuple of Stage
        In the order of `schedule.chunks[topology.rank]`.
    schedule : Schedule
    counts : tuple of int
    stages : int
    topology : PipelineTopology
    inventory : dict of str to ParameterInfo
        All parameters and buffers of the whole model.
    shared : dict of str to tuple of int
        The names of those that several stages hold, such as the table of an embedding that is the head too, and the
        stages; the first owns it.
    grid : Grid
    scheme : Scheme or None
        The scheme of the whole model, where it has one.
    """

    in_stages: ClassVar[bool] = True
    full_model: Module
    grid: Grid
    scheme: Scheme | None
    _own: list[Module]

    def __init__(
        self, full_model: Module, parts: Mapping[int, Sequence[Layer]], counts: Sequence[int],
        inventory: Mapping[str, ParameterInfo], topology: PipelineTopology, schedule: Schedule,
    ) -> None:  # fmt: skip
        super().__init__()
        object.__setattr__(self, "full_model", full_model)  # its names are its own, without a prefix
        self.counts, self.stages, self.topology = tuple(counts), len(counts), topology
        self._decoder: PipelineDecoder | None = None
        self.schedule = schedule
        self._names = {id(module): name for name, module in full_model.named_modules()}
        self.inventory = dict(inventory)
        self.shared = {name: held.stages for name, held in self.inventory.items() if len(held.stages) > 1}
        _check_buffers(self.inventory, schedule)
        self.chunks = tuple(
            Stage(chunk.stage, self.stages, parts[chunk.stage], self._names, chunk.copy)
            for chunk in schedule.chunks[topology.rank]
        )
        own = {id(m): m for stage in self.chunks for m in stage.modules()}
        object.__setattr__(self, "_own", [m for _, m in full_model.named_modules() if id(m) in own])
        full_model.forget([m for m in full_model.modules() if id(m) not in own])
        grid = model_grid(full_model)
        if grid is None:
            raise ConfigError(
                f"{type(full_model).__name__} has no parameters and no `grid`: a pipeline needs its arrays' grid"
            )
        self.grid = grid
        self.scheme = getattr(full_model, "scheme", None)
        self._tell_names()

    @property
    def stage_numbers(self) -> tuple[int, ...]:
        """The numbers of this rank's stages."""
        return tuple(stage.number for stage in self.chunks)

    @property
    def blocks(self) -> list[Module]:
        """The modules of this rank's layers, without those of the model's ends where there are others."""
        inner = [layer for layer in self.layers() if not layer.end] or self.layers()
        return list({id(m): m for layer in inner for m in layer.modules}.values())

    @property
    def batch_needs(self) -> tuple[bool, bool]:
        """True for inputs, and for labels, if this rank needs them: it has the first stage, or the last."""
        return any(stage.first for stage in self.chunks), any(stage.last for stage in self.chunks)

    @property
    def input_dtype(self) -> np.dtype[Any] | None:
        """The dtype of the first parameter of all stages; None without parameters."""
        return next((np.dtype(held.dtype) for held in self.inventory.values()), None)

    def forward(self, x: Any) -> Any:
        """Return the whole model's outputs, where this rank holds all of its stages, in order."""
        if self.stage_numbers != tuple(range(self.stages)):
            raise ConfigError(
                f"this rank holds {', '.join(map(str, self.chunks))} of {self.stages} stages: the model runs by its "
                "pipeline, a stage at a time (parlinalg.pipeline.Worker)"
            )
        for stage in self.chunks:
            x = stage(x)
        return x

    def layers(self) -> list[Layer]:
        """Return the layers of this rank's stages."""
        return [layer for stage in self.chunks for layer in stage.layers]

    def owner(self, name: str) -> int:
        """Return the pipeline rank that owns a parameter of the whole model."""
        return self.holder(self.inventory[name].stages[0])

    def holder(self, stage: int, copy: int = 0) -> int:
        """Return the pipeline rank that holds a stage."""
        return self.schedule.holder(stage, copy)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of the whole model, for models that have one."""
        config: dict[str, Any] = self.full_model.config
        return config

    def decoder(self) -> PipelineDecoder:
        """Return the model as generation sees it.  The first call is collective over all ranks of the mesh."""
        from parlinalg.pipeline.generate import PipelineDecoder

        if self._decoder is None:
            self._decoder = PipelineDecoder(self)
        return self._decoder

    # ------------------------------------------------------------------ members
    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield this module under the empty name, then those of its stages, with their names in the whole model."""
        yield prefix, self
        for module in self._own:
            name = self._names[id(module)]
            yield (f"{prefix}.{name}" if prefix and name else prefix or name), module

    def _check_containers(self) -> None:
        self.full_model._check_containers()

    # ------------------------------------------------------------------ state
    def start_from(self, rule: Callable[[str, Declared], Any]) -> None:
        self.full_model.start_from(rule)

    def initialize(
        self, seed: int = 0, prefix: str = "", values: Callable[[Declared, str], DistArray] | None = None,
        only: Collection[Module] | None = None,
    ) -> Any:  # fmt: skip
        """Make the values of this rank's stages: those that the whole model has with this seed."""
        self.name, self.seed = prefix, seed
        self.full_model.initialize(seed, prefix, values, self._own if only is None else only)
        self._tell_names()
        return self

    def parameter_names(self) -> tuple[str, ...]:
        """Return the names of all parameters of the whole model."""
        return tuple(name for name, held in self.inventory.items() if not held.buffer)

    def _tell_names(self) -> None:
        """Tell the parameters of this rank's stages the names of those of all stages."""
        names = self.parameter_names()
        for held in (p for module in self._own for p in module._parameters.values()):
            if isinstance(held, Parameter):
                held.relatives = names

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return all parameters and buffers of the whole model by name as global NumPy arrays, on every rank.

        Collective over all ranks.

        A parameter that several stages hold is in it once, as its owner has it.
        """
        mine = dict(self.named_state())
        state, world = {}, self.topology.world
        for name, held in self.inventory.items():
            owner = self.owner(name)
            if owner == self.topology.rank:
                whole = mine[name].gather()
            else:
                whole = np.empty(held.shape, held.dtype)
            if self.topology.size > 1:
                whole = np.ascontiguousarray(whole).reshape(held.shape)
                world.broadcast(whole, self.topology.ranks[owner][0])
            state[name] = whole
        return state

    def load_state_dict(
        self, state: Mapping[str, Any] | str | os.PathLike[str], *, names: Names | None = None,
        torch: bool | None = None,
    ) -> None:  # fmt: skip
        """Take the parameters of the whole model; arguments as in `Module.load_state_dict`.

        Raises
        ------
        ConfigError
            On all ranks, naming all that are missing, unexpected, misshapen or of no real numbers in the whole model on
            any; then nothing has changed.
        """
        want = {name: held.shape for name, held in self.inventory.items()}

        def read() -> dict[str, Any]:
            arrays = foreign(self.full_model, state, names, torch)
            check_arrays("the model's state", want, arrays)
            return arrays

        arrays = together(self.topology.world, read, "loading the model's state")
        super().load_state_dict({name: arrays[name] for name, _ in self.named_state()}, torch=False)

    def save_pretrained(self, folder: str | os.PathLike[str], max_shard_size: int | str = "5GB") -> None:
        """Write the whole model so that `transformers` loads it; see `Pretrained.save_pretrained`.  Collective.

        Raises
        ------
        ConfigError
            On all ranks, if rank 0 cannot write, `transformers` has no such model, or the model has experts.
        """
        if not isinstance(self.full_model, Pretrained):
            raise ConfigError(
                f"`transformers` has no model {type(self.full_model).__name__}; state_dict() gives its weights"
            )
        self.full_model.save_parameters(folder, dict(self.named_parameters()), self.topology.world, max_shard_size)

    def train(self, mode: bool = True) -> Any:
        self.full_model.train(mode)
        return super().train(mode)

    def extra_repr(self) -> str:
        return (
            f"{type(self.full_model).__name__}, {self.counts} layers a stage; here {', '.join(map(str, self.chunks))}"
        )


def split(
    model: Module, topology: PipelineTopology, schedule: Schedule, partition: Partition = "uniform", sample: Any = None
) -> PipelineModel:  # fmt: skip
    """Cut a model into the stages of a schedule, and keep this rank's.  Collective over all ranks.

    Parameters
    ----------
    model : Module
        Declared on this rank's grid, better without values: those of other stages are dropped.  It lists its layers by
        `layers()`, or its stages by `stages`.
    topology : PipelineTopology
    schedule : Schedule
    partition : {"uniform", "parameters", "flops", "time"} or sequence of int
        Partition of the layers: as many in each stage, such that the stages' parameters, FLOPs or measured times are
        as even as can be, or the layers of each stage.
    sample : Tensor, DistArray or tree of them; or callable
        An input of the model, of a microbatch's shape; a callable makes it.  Needed for "time".

    Raises
    ------
    ConfigError
        If the schedule is not of the pipeline's size, the model cannot be cut, has fewer layers than there are stages,
        or a partition by hand does not fit.
    """
    if isinstance(model, PipelineModel):
        raise ConfigError(f"{model!r} is cut into stages already: cut the whole model")
    declared: list[Any] = [schedule.name, schedule.ranks, schedule.stages, partition]
    for name, module in model.named_modules():
        declared += [name, type(module).__name__, [(n, p.shape, str(p.dtype)) for n, p in module._parameters.items()]]
    if (odd := odd_one_out(topology.world, repr(declared).encode())) is not None:
        raise ConfigError(
            f"rank {odd} cuts another model than rank 0, or cuts it otherwise: declare the same whole model on all "
            "ranks; pipeline.build_by_hand takes stages that each rank makes itself"
        )
    if schedule.ranks != topology.size:
        raise ConfigError(
            f"the schedule {schedule.name!r} is of {schedule.ranks} pipeline ranks, but there are {topology.size}; "
            "make it for as many"
        )
    layers, counts = listed_layers(model)
    if counts is None:
        counts = layers_per_stage(model, layers, schedule.stages, partition, topology, sample)
    elif len(counts) != schedule.stages:
        raise ConfigError(
            f"{type(model).__name__} has {len(counts)} stages of its own, but the schedule has {schedule.stages} "
            "(pipeline ranks × chunks); give both as many, or let the model list its layers"
        )
    ends = [0, *accumulate(counts)]
    parts = {number: layers[a:b] for number, (a, b) in enumerate(pairwise(ends))}
    return PipelineModel(model, parts, counts, inventory_of(model, parts), topology, schedule)


def listed_layers(model: Module) -> tuple[list[Layer], tuple[int, ...] | None]:
    """Return a model's layers in order and, if the model lists its own stages, the number of layers in each.

    A model has `layers()`, a list of `Layer` or Module, or `stages` (a list, or a method that gives one): of each stage
    a `Layer` or Module, or a list of them.

    Raises
    ------
    ConfigError
        If it has neither, or an item is not a layer.
    """
    own = getattr(model, "stages", None)
    if own is not None:
        listed = own() if callable(own) and not isinstance(own, Module) else own
        stages = [list(s) if not isinstance(s, Layer | Module) or _no_forward(s) else [s] for s in listed]
        return [as_layer(model, x) for stage in stages for x in stage], tuple(len(stage) for stage in stages)
    layers = layers_of(model)
    if layers is None:
        held = getattr(model, "layers", None)
        renamed = (
            f" (its member `layers`, a {type(held).__name__}, does not say what is done before, after and between them:"
            " give it another name)" if isinstance(held, Module) else ""
        )  # fmt: skip
        raise ConfigError(
            f"{type(model).__name__} cannot be cut into stages: give it a method layers() that lists them (of "
            "nn.Layer or Module, each taking what the one before gives), a list `stages`, or make it an nn.Sequential"
            f"{renamed}; one stage of a model, made on its rank alone, is for pipeline.build_by_hand"
        )
    return layers, None


def _no_forward(stage: Layer | Module) -> bool:
    """Return True if a stage is a list of modules, which are called one after the other."""
    return isinstance(stage, ModuleList) and not isinstance(stage, Sequential)


def inventory_of(model: Module, parts: Mapping[int, Sequence[Layer]]) -> dict[str, ParameterInfo]:
    """Return all parameters and buffers of a model by name, with the stages that hold them.

    Raises
    ------
    ConfigError
        If a parameter is in no layer, or a layer has a module that is not in the model.
    """
    stages: dict[int, list[int]] = {}
    known = {id(module) for module in model.modules()}
    for number, part in parts.items():
        for layer in part:
            for module in layer.all_modules():
                if id(module) not in known:
                    raise ConfigError(
                        f"layer {layer.name!r} of {type(model).__name__} uses a {type(module).__name__} that is not in "
                        "the model: assign it to an attribute of the model, so that it has a name"
                    )
                held = stages.setdefault(id(module), [])
                if number not in held:
                    held.append(number)
    found: dict[str, ParameterInfo] = {}
    names: dict[int, str] = {}
    for name, module in model.named_modules():
        for own, p in module._parameters.items():
            qualified = f"{name}.{own}" if name else own
            if id(module) not in stages:
                raise ConfigError(
                    f"parameter {qualified!r} of {type(model).__name__} is in none of its layers: list the module that "
                    "holds it in the `modules` of each layer that uses it"
                )
            first = names.setdefault(id(p), qualified)
            before = found[first].stages if first in found else ()
            both = tuple(sorted({*before, *stages[id(module)]}))
            found[first] = ParameterInfo(tuple(p.shape), np.dtype(p.dtype), both, is_buffer(p))
    return found


def _check_buffers(inventory: Mapping[str, ParameterInfo], schedule: Schedule) -> None:
    """Raise a ConfigError if a buffer would have two holders, which would write different values to it."""
    for name, held in inventory.items():
        if held.buffer and (schedule.copies > 1 or len(held.stages) > 1):
            twice = f"the schedule {schedule.name!r}" if schedule.copies > 1 else f"stages {held.stages}"
            raise ConfigError(
                f"buffer {name!r} would be held twice, by {twice}: each copy would see a part of the microbatches, and "
                "running statistics would differ; use another schedule, or a batch norm with track_running_stats=False"
            )


def model_grid(model: Module) -> Grid | None:
    """Return the grid of a model's arrays, if it has one or has parameters."""
    grid: Grid | None = getattr(model, "grid", None)
    return grid or next((p.grid for m in model.modules() for p in m._parameters.values()), None)
