"""Traces of parts of a model: some of its layers on one rank of a mesh, with the library's own passes and update.

A part is run on imagined ranks: forward, backward, the reduction of its gradients and the update of its parameters.  A
whole model is one part where it has no pipeline, each stage is one where it has; single layers are parts by which a
search reckons what many layers take.  An optimizer that treats the matrices of all layers together makes its step in a
part of its own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from parlinalg.array import zeros
from parlinalg.array.create import dtype_named
from parlinalg.autograd import Tensor, no_sync
from parlinalg.autograd.parameter import settle
from parlinalg.backend import Backend
from parlinalg.backend.shapes import without_values
from parlinalg.errors import ConfigError
from parlinalg.exchange import volume
from parlinalg.grid import Grid
from parlinalg.layout import Cut, index_of
from parlinalg.nn import Module, ModuleList
from parlinalg.nn.added_losses import added_losses
from parlinalg.nn.experts import MixtureOfExperts
from parlinalg.nn.layer import Layer, layers_of
from parlinalg.offload.probe import ActivationProbe, ProbeStore
from parlinalg.offload.stores import OffloadedBytes, Store
from parlinalg.optim.flat import states_of
from parlinalg.parallel.buckets import Load, bucket_load, largest
from parlinalg.parallel.gatherer import Want, WeightGatherer
from parlinalg.parallel.handlers import ZeRO
from parlinalg.parallel.reducer import GradientReducer, replaceable
from parlinalg.pipeline.layer_costs import backward_of
from parlinalg.pipeline.run import InFlight
from parlinalg.pipeline.tied import BUCKET
from parlinalg.pipeline.topology import PipelineTopology
from parlinalg.planning.imagine import World, imagine
from parlinalg.planning.parts import (
    ASSUMED,
    NO_PASSES,
    SMALL,
    DeferredPeaks,
    Inputs,
    LastPeaks,
    LayerOutput,
    NextPasses,
    Part,
    Resident,
    Rest,
    Tie,
)
from parlinalg.random.draws import training_step
from parlinalg.redistribute import Move
from parlinalg.sequence import BatchPositions, using_positions
from parlinalg.train.choices import make_criterion
from parlinalg.train.config import TrainingConfig
from parlinalg.train.initialize import optimizer_for, reducer_for, update_for
from parlinalg.train.mesh import RING, Mesh, MeshSpec, resolve


class NoDisk(ProbeStore):
    """A store on a disk that takes no time, of arrays without values."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend = backend

    def put(self, raw: Any) -> OffloadedBytes:
        away = super().put(raw)
        away.hold = None
        return away

    def get(self, away: OffloadedBytes) -> Any:
        return self.backend.staging(away.nbytes, np.uint8)


class DeviceProbe(ActivationProbe):
    """A probe of an imagined device, whose arrays take no host memory: they may be larger than this one has."""

    @staticmethod
    def _room(shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray:
        return without_values(shape, dtype)


class HostProbe(ActivationProbe):
    """Offloads the activations of modules to a disk that takes no time, of blocks in host memory without values."""

    def _open(self, backend: Backend, number: int | None) -> Store:
        self._probed = NoDisk(backend)
        return self._probed


def layer_keys(model: Any) -> list[tuple[Any, ...]]:
    """Return for each layer of a declared model what tells it from others: layers with equal keys take equal work."""
    found = []
    for layer in _layers(model):
        held = [(p.shape, p.layout) for p in _parameters(layer)]
        found.append((layer.end, *held))
    keys: dict[Any, int] = {}
    first = [(i == 0, i == len(found) - 1, key) for i, key in enumerate(found)]
    return [(keys.setdefault(key, len(keys)), *key[:2]) for key in first]


def tied(layers: Iterable[Layer]) -> list[tuple[object, frozenset[int]]]:
    """Return the parameters that several of these layers hold, with the numbers of the layers."""
    found: dict[int, tuple[object, set[int]]] = {}
    for i, layer in enumerate(layers):
        for p in _parameters(layer):
            found.setdefault(id(p), (p, set()))[1].add(i)
    return [(p, frozenset(numbers)) for p, numbers in found.values() if len(numbers) > 1]


def elements_of_experts(model: Any) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Return for each layer of a declared model, and for all of it, the elements of experts and of all parameters.

    A router and a shared expert are no part of them: they are not cut where experts are.
    """

    def counted(layers: Iterable[Layer]) -> tuple[int, int]:
        modules = {id(m): m for layer in layers for m in layer.all_modules()}.values()
        every = {id(p): p for m in modules for p in m._parameters.values()}
        own = {
            id(p): p for m in modules if isinstance(m, MixtureOfExperts)
            for name, p in m._parameters.items() if name in MixtureOfExperts.CUT
        }  # fmt: skip
        return sum(math.prod(p.shape) for p in own.values()), sum(math.prod(p.shape) for p in every.values())

    every = _layers(model)
    return [counted([layer]) for layer in every], counted(every)


def ties(model: Any) -> list[frozenset[int]]:
    """Return for each parameter that several layers of a declared model hold the numbers of these layers."""
    return [numbers for _, numbers in tied(_layers(model))]


def _parameters(layer: Layer) -> list[Any]:
    """Return the parameters of a layer, declared or made."""
    return [p for m in layer.all_modules() for p in m._parameters.values()]


def _layers(model: Any) -> list[Layer]:
    layers = layers_of(model)
    if layers is None:
        raise ConfigError(f"{type(model).__name__} lists no layers, by which it could be planned: give it layers()")
    return layers


def declared(config: TrainingConfig, inputs: Inputs) -> Any:
    """Return the declared model of a configuration on one rank."""
    spec = resolve(config, 1)
    with _tried(), imagine(1, node=1, what_if=ASSUMED) as world, _mesh(config, spec, world) as mesh:
        return inputs.declare(config, mesh)


def busiest(spec: MeshSpec) -> int:
    """Return which rank of a stage's grid has the most work.

    Uneven blocks are larger on the first ranks.  Of a causal sequence's ring all ranks have the same work in zigzag
    order; in the others the last rank's queries see the most keys.
    """
    if spec.order_of(causal=True) == "zigzag" or RING not in spec.axes:
        return 0
    names = list(spec.axes)
    return (spec.axes[RING] - 1) * math.prod(spec.axes[axis] for axis in names[names.index(RING) + 1 :])


def trace_part(
    config: TrainingConfig, inputs: Inputs, ranks: int, rows: int, *, layers: tuple[int, int] | None = None,
    skip: tuple[int, int] = (0, 0), given: LayerOutput | None = None, stage: int = 0, node: int = 8,
    target: str = "cpu", update: bool = True, step: bool = True, shared: frozenset[int] = frozenset(),
    theirs: frozenset[int] = frozenset(), ends: bool = False, next_passes: NextPasses = NO_PASSES,
    probe: bool = True, elsewhere: bool = False,
) -> Part:  # fmt: skip
    """Return the traces of some layers of a configuration's model on one of its ranks.

    Parameters
    ----------
    config : TrainingConfig
    inputs : Inputs
    ranks : int
    rows : int
        Rows of a microbatch on all data parallel ranks together; 0 to trace the optimizer's step alone, without passes.
    layers : pair of int, optional
        The first layer and the one after the last; by default all.
    skip : pair of int
        Of them the first that is left out and the one after the last left out: those around them pass on the same.
    given : LayerOutput, optional
        The output of the layer before, unless these are the first.
    stage : int
        The pipeline rank that has them.
    node, target
        As of `imagine`.
    update : bool
        True to reduce gradients and update parameters; False for the passes of one microbatch alone.
    step : bool
        False to reduce gradients alone, without the optimizer's step and its states.
    shared : frozenset of int
        The numbers of the `Part.ties` of which other layers are in another stage of the same rank.
    theirs : frozenset of int
        Of these the ones that the rank reduces and updates with the other stage.
    ends : bool
        True if the pipeline rank has no blocks, only layers of the model's ends: then these offload their activations.
    next_passes : NextPasses
        The passes that may follow those of these layers.
    probe : bool
        True to trace also what blocks leave in memory if they offload their activations.
    elsewhere : bool
        True if values rest elsewhere, as of `Part.offloaded`: layers gather these again in the backward pass.
    """
    config = _gathered_at_once(config)
    spec = resolve(config, ranks)

    @contextmanager
    def on(rank: int) -> Iterator[_Run]:
        with (
            _tried(),
            imagine(ranks, spec.places[stage][rank], node=node, target=target, what_if=ASSUMED) as world,
            _mesh(config, spec, world) as mesh,
        ):
            yield run_on(world, mesh)

    def run_on(world: World, mesh: Mesh) -> _Run:
        model = inputs.declare(config, mesh)
        every = _layers(model)
        first, after = layers or (0, len(every))
        own = [layer for i, layer in enumerate(every[first:after], first) if not skip[0] <= i < skip[1]]
        run = _Run(
            config, inputs, world, mesh, model, own, first == 0, after == len(every), shared, theirs, ends, next_passes,
            on,
        )  # fmt: skip
        run.blocks = run.blocks if probe else []
        for module in run.held.modules() if elsewhere else ():
            if hasattr(module, "keep") and any(largest(p) >= SMALL for p in module._parameters.values()):
                module.keep = module.keep.replace("w", "")
        return run

    with on(busiest(spec)) as run:
        return run.part(rows, given, update, step) if rows else run.step()


def _gathered_at_once(config: TrainingConfig) -> TrainingConfig:
    """Return the configuration with ZeRO's gathers at the end of a step, where traces count them.

    Gathers that overlap the next forward pass (`overlap_gather`) take the same words, and no more time.
    """
    handlers = (replace(h, overlap_gather=False) if isinstance(h, ZeRO) else h for h in config.gradient_handler)
    return replace(config, zero=replace(config.zero, overlap_gather=False), gradient_handler=tuple(handlers))


def warn(config: TrainingConfig, inputs: Inputs, ranks: int) -> None:
    """Warn of what the model of a configuration warns of on so many ranks when it is declared."""
    spec = resolve(config, ranks)
    with imagine(ranks, what_if=ASSUMED) as world, _mesh(config, spec, world) as mesh:
        inputs.declare(config, mesh)


def _tried() -> AbstractContextManager[Any]:
    """Return a context without warnings to the user, who would get many about what a search only tries."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _mesh(config: TrainingConfig, spec: MeshSpec, world: World) -> Mesh:
    """Return the mesh around an imagined rank; `launch` would also ask the ranks for their hosts and cores."""
    topology = PipelineTopology.of(world.comm, spec.grids, spec.outer)
    group = topology.group if topology.size > 1 else world.comm
    grid = Grid(topology.sizes[topology.rank], group)
    return Mesh(grid, config, spec, topology)


class _Gatherer(WeightGatherer):
    """A weight gatherer that tells a run of gathers that start, and of layers that a pass enters."""

    def __init__(self, run: _Run, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.run = run

    def begin(self, wants: Sequence[Want]) -> dict[Want, Move]:
        device = self.run.world.device
        before = device.held
        moves = super().begin(wants)
        self.run.gathers.append(device.held - before)
        return moves

    def enter(self, backward: bool, block: int) -> None:
        super().enter(backward, block)
        self.run.entered(self, backward)

    def layers(self, backward: bool) -> int:
        """Return how many layers have weights that are gathered ahead in such a pass."""
        return len({at.block for at in self.known if at.backward is backward})


class _Layers(ModuleList):
    """The modules of layers, of which weights are gathered layer by layer, as those of the whole model."""

    def __init__(self, modules: Iterable[Module], layers: Sequence[Layer]) -> None:
        super().__init__(modules)
        self._listed = tuple(layers)

    def layers(self) -> list[Layer]:
        return list(self._listed)


class _Run:
    """Layers on the grid of one rank."""

    def __init__(
        self, config: TrainingConfig, inputs: Inputs, world: World, mesh: Mesh, model: Any, layers: Sequence[Layer],
        first: bool, last: bool, shared: frozenset[int], theirs: frozenset[int], ends: bool, next_passes: NextPasses,
        on: Callable[[int], AbstractContextManager[_Run]],
    ) -> None:  # fmt: skip
        self.config, self.inputs, self.world, self.model, self.layers = config, inputs, world, model, layers
        self.first, self.last, self.grid, self.next_passes, self.on = first, last, mesh.grid, next_passes, on
        self.alone = mesh.topology.size == 1
        modules = {id(m): m for layer in layers for m in layer.all_modules()}
        before = world.device.held
        model.initialize(config.seed, only=list(modules.values()))
        own = list({id(m): m for layer in layers for m in layer.modules}.values())
        self.held: Module = _Layers(own, layers)
        self.parameters = list(self.held.parameters())
        self.ties = [p for p, _ in tied(_layers(model))]
        self.theirs = [p for p in self.parameters if any(p is self.ties[i] for i in theirs)]
        self.updated = [p for p in self.parameters if all(p is not other for other in self.theirs)]
        chunks = [self.updated, [p for p in self.updated if any(p is self.ties[i] for i in shared)]]
        self.reducer = (
            reducer_for(config, mesh.grid, self.held, chunks, partial(_Gatherer, self)) if self.updated else None
        )
        if self.theirs and self.reducer is not None:
            GradientReducer(self.theirs, self.reducer.handlers, dtype=self.reducer.dtype)
        self.optimizer = optimizer_for(config, None, self.updated, model, mesh.grid)
        self.weights = world.device.held - before
        self.criterion = make_criterion(config.criterion)
        self.output: LayerOutput | None = None
        self.message = self.away = self.later = self.begun = self.ahead = 0
        self.peaks = 0, 0
        self.beside_step = 0
        self.gathers: list[int] = []
        """Bytes of the gathers that a microbatch starts together."""
        self.gathering = False
        """True to let the peak begin anew at each layer whose weights are gathered ahead; `begun` is the one before."""
        order = mesh.spec.token_order(inputs.length) if inputs.language else None
        found = [(int(p.storage.nbytes(p.data).value), largest(p) < SMALL) for p in self.parameters]
        self.largest = max((n for n, _ in found), default=0)
        self.small = sum(n for n, small in found if small)
        blocks = own if ends else [b for b in getattr(model, "blocks", ()) if id(b) in modules]
        self.blocks = [b for b in blocks if next(iter(b.parameters()), None) is not None]
        self.positions = None if order is None else BatchPositions(order)

    def part(self, rows: int, given: LayerOutput | None, update: bool, step: bool) -> Part:
        world, span = self.world, self.world.span
        gradients = states = pending = after = 0
        change: Callable[[], object] = self.optimizer.zero_grad
        if step:
            change = partial(update_for(self.config, self.optimizer), True, 1.0)
        held = world.device.held
        if update:  # a first step makes what later ones hold
            self.microbatch(rows, given, sync=False)
            gradients = max(0, world.device.held - held)
            self.settle()
            change()
            states = max(0, world.device.held - held - world.device.live["gradients"])  # a GPU's buckets stay
            world.reset_peak()
        rest, deferred, away, array, resident = self.weights + gradients + states, DeferredPeaks(), 0, 0, None
        with world.trace() as trace:
            with self._gathering():
                kept = self.microbatch(rows, given, sync=False)
            forward, backward, *_ = *self.gathers, 0, 0
            passes, calm = self._peak(), max(self.begun, world.peak_memory)
            if update and not self.alone:
                recorder, world.device.recorder = world.device.recorder, None
                self.microbatch(rows, given, sync=False)  # which adds to gradients
                passes, calm = max(passes, world.peak_memory), max(calm, world.peak_memory)
                if self.next_passes.again[True] and self._lone():  # its weights stay
                    calm = passes
                pending, deferred = self.deferred(rows, given, rest, kept)
                if self.gatherer is not None and self.next_passes != NO_PASSES:
                    following, self.next_passes = self.next_passes, NO_PASSES
                    _, calm_peaks = self.deferred(rows, given, rest, kept)
                    deferred = deferred._replace(calm_inputs=calm_peaks.inputs, calm_weights=calm_peaks.weights)
                    self.next_passes = following
                away, array, resident = self.offloaded(rows, given, update, rest, 0)
                world.device.recorder = recorder
            if update:
                with span("end"):
                    if self.alone:
                        self.microbatch(rows, given, sync=True)
                        passes = max(passes, world.peak_memory)
                        world.reset_peak()
                    else:
                        world.reset_peak()
                        with span("reduce"):
                            self.settle()
                    with span("update"):
                        change()
                after = world.peak_memory
        if update and step:
            after = max(after, rest + self.beside_of_fullest())
        own = {id(p): Tie.of(p) for p in self.parameters}
        own |= {id(p): own[id(p)]._replace(updated=0, most=0) for p in self.theirs}
        ending = LastPeaks()
        if update and not self.alone:
            ending, resident = self._endings(rows, given, rest, after, deferred.weights + pending, resident)
            after = 0
        else:
            if not update:
                rest = world.device.held
                pending, deferred = self.deferred(rows, given, rest, kept)
            away, array, resident = self.offloaded(rows, given, update, rest, after)
        each = [tie.updated for tie in own.values()]
        summed = sum(each)
        fuller = self.fuller(states / max(1, summed)) if update else Rest(0, 0, 0)
        more = self.beyond() if update and step else 0
        beside = sum(fuller) + more
        return Part(
            trace=trace, weights=self.weights + fuller.weights, gradients=gradients + fuller.gradients,
            states=states + fuller.states + more, kept=kept, pending=pending, peak=max(passes, after) + beside,
            output=self.output, message=self.message, away=away, array=array,
            largest=self.largest, small=self.small, count=len(self.parameters), recorded=step * self.recorded(),
            settled=replaceable(self.reducer), summed=summed, together=sum(n for n in each if n < BUCKET),
            apart=max((n for n in each if n >= BUCKET), default=0),
            ties=tuple(own.get(id(p), Tie(0, 0, 0, 0)) for p in self.ties),
            first_gathers=0 if self.gatherer is None else self.gatherer.first_gathers, gathered=(forward, backward),
            calm=calm + beside, deferred=deferred, last_peaks=ending, resident=resident, loads=self.loads(),
            lone=self._lone(),
        )  # fmt: skip

    def step(self, whole: bool = True) -> Part:
        """Return the trace of the optimizer's step alone, by gradients that no pass has made, with its states.

        Its peak is that of this rank, or with `whole` of the rank that works on the most matrices, if that is higher.
        """
        world, optimizer = self.world, self.optimizer
        self.settle()
        held = world.device.held
        optimizer.arrange()
        optimizer.steps = 1  # the first one may make what later ones refresh
        states = max(0, world.device.held - held)
        gradients = sum(int(p.storage.nbytes(p.data).gradient) for p in self.parameters)
        world.reset_peak()
        with world.trace() as trace, world.span("end"), world.span("update"):
            update_for(self.config, optimizer)(True, 1.0)
        beside, more = max(0, world.peak_memory - self.weights - gradients - states), self.beyond()
        self.beside_step = beside
        beside = max(beside, self.beside_of_fullest() if whole else 0)
        return Part(
            trace=trace, weights=self.weights, gradients=gradients, states=states + more, kept=0, pending=0,
            peak=self.weights + gradients + states + more + beside * self.alone, output=None, message=0,
            last_peaks=LastPeaks() if self.alone else LastPeaks(beside, beside), recorded=self.recorded(),
            ties=(Tie(0, 0, 0, 0),) * len(self.ties),
        )  # fmt: skip

    def beside_of_fullest(self) -> int:
        """Return the bytes beside what rests at the peak of a step on the rank that works on the most matrices; 0 if it
        is this one, or none works on whole matrices."""
        work = self.optimizer.work_of_ranks()
        fullest = max(work, key=lambda rank: (work[rank], rank == self.grid.rank), default=self.grid.rank)
        if fullest == self.grid.rank:
            return 0
        with self.on(fullest) as run:
            run.step(whole=False)
            return run.beside_step

    @property
    def gatherer(self) -> _Gatherer | None:
        """The gatherer of the weights, with ZeRO's stage 3."""
        found = next((p.storage.gatherer for p in self.parameters), None)
        return found if isinstance(found, _Gatherer) else None

    def loads(self) -> tuple[tuple[int | None, Load], ...]:
        """Return the loads of gradients whose sums a backward pass forms, with the numbers of those that are tied."""
        numbers = {id(p): i for i, p in enumerate(self.ties)}
        found = [] if self.reducer is None else self.reducer.loads()
        return tuple((numbers.get(id(p)), load) for p, load in found if load.transient or load.work)

    def beyond(self) -> int:
        """Return the bytes by which another rank has more states than this one, of those that lie whole on one rank and
        of parameters whose update ranks share: some parameters have more states than others."""
        grid = self.grid
        held = np.zeros(grid.size, np.int64)
        for state in self.optimizer.home_states():
            held[state.home] += math.prod(state.shape) * state.dtype.itemsize
        shared: dict[Cut, np.ndarray] = {}
        for entry in self.optimizer.flat.entries:
            if axes := entry.partition.axes:
                each = len(entry.names) * entry.dtype.itemsize
                parts = np.array(entry.partition.lengths, np.int64) * each
                shared[axes] = shared[axes] + parts if axes in shared else parts
        for axes, parts in shared.items():
            held += parts[[index_of(axes, grid.sizes, grid.coords_of(rank)) for rank in range(grid.size)]]
        return int(held.max() - held[grid.rank])

    def fuller(self, share: float) -> Rest:
        """Return the bytes at rest by which the grid's first rank has more than this one: the largest uneven parts are
        there.  `share` are the bytes of states by those that a rank updates; of shared updates `beyond` counts them."""
        weights = gradients = updated = 0
        for p in self.parameters if self.grid.rank else ():
            held, mine, most = p.storage.nbytes(p.data), p.storage.partition(p.data), p.storage.partition(p.data, 0)
            part = (most.stop - most.start - mine.stop + mine.start) * p.dtype.itemsize
            first = volume(p.layout.block(p.shape, p.grid.sizes, p.grid.coords_of(0)))
            block = first * p.dtype.itemsize - int(held.value)
            weights, updated = weights + block, updated + part * (not mine.axes)
            gradients += part if held.gradient == held.updated else block
        return Rest(*(max(0, n) for n in (weights, gradients, int(share * updated))))

    def recorded(self) -> int:
        """Return the bytes of the values that the rank updates and of which no state is the master."""
        master = self.optimizer.flat.master
        bare = [p for p in self.updated if not states_of(p.dtype, master)[1]]
        return sum(int(p.storage.nbytes(p.data).updated) for p in bare)

    def offloaded(
        self, rows: int, given: LayerOutput | None, update: bool, rest: int, after: int
    ) -> tuple[int, int, Resident | None]:  # fmt: skip
        """Run a microbatch that offloads the activations of the blocks, if there are any; return the bytes that it puts
        away, those of the largest array, and what is left in memory.

        `rest` is what is held before, `after` the peak of what follows the microbatches of a step without a pipeline.
        """
        if not self.blocks:
            return 0, 0, None
        with self._probe() as probe:
            self.world.reset_peak()
            with self._gathering():
                kept = self.microbatch(rows, given, sync=self.alone and update, probe=probe)
            transient = max(0, max(self.peaks[0], self._peak(), after) - rest - kept)
            (forward, backward), self.later = self.peaks, 0
            pending, deferred = 0, DeferredPeaks()
            if update and not self.alone:
                pending, deferred = self.deferred(rows, given, rest, kept, probe)
            resident = Resident(
                kept, pending, transient, deferred, LastPeaks(), forward - rest, backward - rest, self.later
            )
            return self.away, probe.array, resident

    @contextmanager
    def _probe(self) -> Iterator[ActivationProbe]:
        """Let the blocks offload their activations, to a store that takes no time."""
        kind = DeviceProbe if self.world.device.target == "gpu" else HostProbe
        with kind(self.parameters) as probe:
            probe.place(self.blocks)
            yield probe

    def _peak(self) -> int:
        """Return the peak of what ran within `_gathering`.

        Where another backward pass may follow, its first gathers are in flight from the last layer's on.
        """
        return max(self.begun, self.world.peak_memory + self._next())

    def _next(self) -> int:
        """Return the bytes of the first gathers of a backward pass that may follow a backward pass."""
        gatherer, found = self.gatherer, 0
        if gatherer is None:
            return 0
        if self.next_passes.again[True] and not self._lone():
            found = self.ahead
        other = self.next_passes.other
        for key, layer in zip(layer_keys(self.model), _layers(self.model), strict=True) if other else ():
            if key in other:
                found = max(found, gatherer.at_work(_parameters(layer)))
        return found

    def _lone(self) -> bool:
        """Return True if one layer alone has weights that are gathered ahead in a backward pass."""
        return self.gatherer is not None and self.gatherer.layers(backward=True) == 1

    @contextmanager
    def _gathering(self) -> Iterator[None]:
        """Let the peak begin anew at each layer whose weights are gathered ahead; `begun` is the peak before."""
        self.begun, self.gathering = 0, True
        yield
        self.gathering = False
        if self.gatherer is not None:
            self.gatherer.drop()

    def entered(self, gatherer: _Gatherer, backward: bool) -> None:
        """Note the peak before a layer that a pass enters.

        The weights of a pass through one layer alone stay gathered, if the next pass may be another one of these.
        """
        if self.gathering:
            self.begun = max(self.begun, self.world.peak_memory)
            self.world.reset_peak()
            if self.next_passes.again[backward] and gatherer.layers(backward) == 1:
                gatherer.retain()

    def settle(self) -> None:
        """Reduce the gradients, as the worker of a pipeline does after its last microbatch."""
        if self.reducer is not None:
            self.reducer.settle()
        settle(self.updated)

    def microbatch(self, rows: int, given: LayerOutput | None, sync: bool, probe: ActivationProbe | None = None) -> int:
        """Run a microbatch; return the bytes that are kept between its passes."""
        targets, held, span = self._targets(rows), self.world.device.held, self.world.span
        self.gathers.clear()
        x = [self._given(rows, given)]
        with self._training():
            with span("forward"):
                y, root = self._forward(x.pop(), targets)  # nothing else keeps what is given
            size = int(y.data.block.nbytes)
            if self.gatherer is not None:
                self.gatherer.drop()
            self.ahead = self.gathers[-1] if self.gatherer is not None and self.gatherer.ahead else 0
            kept = max(0, self.world.device.held - held - self.ahead - (0 if self.last else size))
            if probe is not None:
                self.away, forward = probe.nbytes, self.world.peak_memory
                self.world.reset_peak()
            if not self.last:
                self.output, self.message = LayerOutput(y.shape, y.layout, y.dtype.name), size
            del y
            with span("backward"), nullcontext() if sync else no_sync():
                if self.last:
                    (root * 1.0).backward()
                else:
                    backward_of([root])
            if probe is not None:
                self.peaks = forward, self.world.peak_memory
        return kept

    def ending(self, rows: int, given: LayerOutput | None, rest: int, after: int, later: int) -> LastPeaks:
        """Return the `LastPeaks`, by such a microbatch if sums of gradients take memory in the last one alone.

        `after` is the peak of what follows, `later` those beside `rest` of gradients of weights that come last.
        """
        after, loads = max(0, after - rest), list[Load]()
        if (reducer := self.reducer) is not None:
            each = [([slot.parameter for slot in b.slots], b.policy) for b in reducer.buckets if not b.transient]
            loads = [bucket_load((), group, policy, reducer.dtype) for group, policy in each]
        work = sorted(load.work for load in loads)
        if not (sums := sum(work[-max((load.most for load in loads), default=1) :])):
            return LastPeaks(after, after)
        self.world.reset_peak()
        x = self._given(rows, given)
        with self._training(), no_sync():
            unit, grads = self._unit(x, *self._forward(x, self._targets(rows)))
            del x
            unit.backward(grads, starts=True)
        self.settle()
        whole = max(after, self.world.peak_memory - rest)
        return LastPeaks(whole, max(whole, later), sums)

    def _endings(
        self, rows: int, given: LayerOutput | None, rest: int, after: int, later: int, resident: Resident | None
    ) -> tuple[LastPeaks, Resident | None]:  # fmt: skip
        """Return the `LastPeaks`, and `resident` with the one where the activations of blocks are offloaded."""
        ending = self.ending(rows, given, rest, after, later)
        if resident is None:
            return ending, None
        whole, later = min(ending.whole, resident.backward + ending.sums), resident.deferred.weights + resident.pending
        last = LastPeaks(whole, max(whole, later), ending.sums)
        if len(self.layers) > 1 and ending.sums:  # some start before the pass ends
            with self._probe():
                last = self.ending(rows, given, rest, after, later)
        return ending, resident._replace(last_peaks=last)

    def _unit(self, x: Any, y: Any, root: Any) -> tuple[InFlight, list[Any]]:
        """Return a microbatch between its passes, and the gradients of its outputs."""
        unit = InFlight(self.grid, [x] if isinstance(x, Tensor) else [], [] if self.last else [y])
        if self.last:
            unit.add(root, 1.0)
            return unit, []
        return unit, [zeros(y.shape, self.grid, y.layout, y.dtype).block]

    def deferred(
        self, rows: int, given: LayerOutput | None, rest: int, kept: int, probe: ActivationProbe | None = None
    ) -> tuple[int, DeferredPeaks]:  # fmt: skip
        """Run a microbatch whose gradients of weights come last; return what it keeps until then, and its peaks.

        `rest` is what is held before, `kept` what is kept from the forward pass on.
        """
        world, targets, held = self.world, self._targets(rows), self.world.device.held
        world.reset_peak()
        x = self._given(rows, given)
        with self._training(), no_sync():
            with self._gathering():
                y, root = self._forward(x, targets)
                forward = max(self.begun, world.peak_memory)
            unit, grads = self._unit(x, y, root)
            del x, y, root
            world.reset_peak()
            with self._gathering():
                unit.backward(grads, later=True)
                unit.input_gradients()
                grads.clear()
                self.later = 0 if probe is None else probe.nbytes
                inputs, before = self._peak(), world.device.held
                world.reset_peak()
                unit.parameters()
                weights, after = world.peak_memory + self._next(), world.device.held
            pending = max(0, before - held - (after - world.device.held))  # without what stays gathered
        forward, inputs, weights = (max(0, n - rest) for n in (forward - kept, inputs - kept, weights - pending))
        return pending, DeferredPeaks(forward, inputs, weights, inputs, weights)

    @contextmanager
    def _training(self) -> Iterator[None]:
        with training_step(0), added_losses(True), using_positions(self.positions):
            yield

    def _targets(self, rows: int) -> Any:
        return self.inputs.targets(self.model, rows, self.grid) if self.last else None

    def _forward(self, y: Any, targets: Any) -> tuple[Any, Any]:
        """Return the output of the layers, and the loss if they are the last ones, else the output again."""
        for layer in self.layers:
            y = layer.forward(y)
        return y, self.criterion(y, targets)[0] if self.last else y

    def _given(self, rows: int, given: LayerOutput | None) -> Any:
        if self.first:
            return self.inputs.first(self.model, rows, self.grid, self.config.model_dtype)
        assert given is not None
        data = zeros(given.shape, self.grid, given.layout, dtype_named(given.dtype))
        return Tensor(data, requires_grad=True)
