"""Rates of products and kernels on this machine, and the overhead of an operation, measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import cycle
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from parlinalg.array.create import dtype_named, ones
from parlinalg.autograd import Tensor
from parlinalg.backend import Backend, cudnn, kernels
from parlinalg.backend.shapes import ShapesBackend
from parlinalg.comm import SingleComm
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.nn import GELU, LayerNorm, Linear, Sequential
from parlinalg.planning.imagine import TraceRecorder, imagine
from parlinalg.planning.machine import FusedAttention, GemmRate
from parlinalg.planning.trace import Gemm, Kernel, Trace
from parlinalg.schemes import discover

POINT_SECONDS = 0.02
"""Seconds in which a point is measured again and again, in each round."""
AHEAD_SECONDS = 0.002
"""Seconds of the product that keeps a GPU busy while the host launches what is timed."""
FAR, MOST_FAR = 1 << 26, 64
"""Bytes of operands and results that a measurement goes through in turn, so that they come from memory as in a step,
and the most sets of them."""
GEMMS = (
    (64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 512, 512), (1024, 1024, 1024), (2048, 2048, 512),
    (2048, 128, 256), (256, 1024, 256), (2048, 256, 32), (64, 64, 1024), (1024, 1024, 32), (16, 1024, 1024),
    (1024, 16, 1024), (64, 64, 16), (1024, 32, 256), (256, 32, 1024), (8, 512, 512), (2048, 512, 2048),
    (512, 2048, 2048), (2048, 512, 512), (2048, 512, 1024), (1024, 512, 2048), (512, 256, 2048), (1024, 256, 256),
    (128, 256, 1024), (64, 256, 64), (64, 64, 256),
)  # fmt: skip
"""The shapes m, n, k of the products that are measured."""
ON_GPU = (
    (4096, 4096, 4096), (8192, 8192, 8192), (8192, 1024, 4096), (2048, 8192, 1024), (8192, 8192, 128),
    (8192, 2048, 2048), (8192, 8192, 2048),
)  # fmt: skip
"""More shapes on a GPU."""
TILES = (
    (256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (256, 64, 0.85), (64, 256, 0.85), (128, 64, 0.75),
    (64, 128, 0.75), (64, 64, 0.6),
)  # fmt: skip
"""The tiles by which a GPU's library multiplies, and the shares of the rate that they reach, as in machines' files."""
ATTENTION, HEADS = (4, 2048, 2048), (64, 128)
"""The sequences, tokens and features by which a GPU's fused attention is measured, and the features of a head."""
LAUNCHES = 3.0
"""Products on a GPU that take fewer times as long as the shortest kernel say nothing of its rate."""
UFUNCS = ("exp", "log", "tanh", "sqrt", "power", "divide")
SUMS = tuple(3 << k for k in range(13, 27, 2))
"""Bytes read and written by the sums that measure the bandwidth."""
ROWS = ((512, 256), (2048, 512))
"""The sizes at which kernels are measured: blocks that fit into a core's cache, and larger ones."""
ROWS_ON_GPU = ((2048, 512), (8192, 2048))
"""Likewise on a GPU, where a block of a million elements is over as soon as it is begun."""
SHORT = (64, 256)
"""The size at which attention is measured too: its many operations on tiles take their time however short they are."""
LEAST_ELEMENTS = 1 << 14
"""Elements of a kernel's call from which on it is counted."""
CALLS_OF_KERNELS = 3
CHAIN, SIDE, PASSED, PIECE = 8, 64, 1 << 20, (64, 128)
"""The layers by which the overhead of an operation is measured, the sides of their matrices, the bytes that pass
through the cache between two operations, and the sides of the pieces by which the overhead of copies is measured."""


class DeviceClock:
    """Tells the seconds that the device of a backend takes for a call.

    On a GPU they are those between two events of the stream, behind a long product: when that is over, the host has
    launched all of the call, so that the device waits for no launch.
    """

    def __init__(self, backend: Any) -> None:
        self.backend: Backend = backend
        if backend.cuda:
            self.events = [backend.xp.cuda.Event() for _ in range(2)]
            self.ahead = _long_factor(backend)

    def __call__(self, call: Callable[[], Any]) -> float:
        if not self.backend.cuda:
            start = perf_counter()
            call()
            return perf_counter() - start
        xp, (begin, end) = self.backend.xp, self.events
        xp.matmul(self.ahead, self.ahead)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(xp.cuda.get_elapsed_time(begin, end)) / 1e3


@cache
def _long_factor(backend: Any) -> Any:
    """Return a matrix whose square takes a GPU AHEAD_SECONDS at least."""
    seconds, side = 0.0, 256
    while seconds < AHEAD_SECONDS and side < 1 << 14:
        side *= 2
        block = backend.zeros((side, side), np.float32)
        for _ in range(2):  # the first sets cuBLAS up
            backend.synchronize()
            start = perf_counter()
            backend.xp.matmul(block, block)
            backend.synchronize()
            seconds = perf_counter() - start
    return block


def seconds_of(call: Callable[[], Any], backend: Backend, limit: float = POINT_SECONDS) -> float:
    """Return the median of the seconds of a call, called for so many seconds, at least three times."""
    clock = DeviceClock(backend)
    clock(call)
    times: list[float] = []
    begin = perf_counter()
    while len(times) < 3 or perf_counter() - begin < limit:
        times.append(clock(call))
    return median(times)


def _in_turn(function: Callable[..., Any], backend: Backend, arrays: Sequence[Any], nbytes: int) -> Callable[[], None]:
    """Return what calls a function with one set of operands after the other, of so many bytes with the results.

    Each result is kept until its set's next turn, so that a call finds its operands and writes its result where a step
    would: not in the cache, where the last call has left them.
    """
    sets = [[backend.from_host(x.copy()) for x in arrays] for _ in range(min(MOST_FAR, max(1, FAR // nbytes)))]
    kept: list[Any] = [None] * len(sets)
    turns = cycle(range(len(sets)))

    def one() -> None:
        at = next(turns)
        kept[at] = None
        kept[at] = function(*sets[at])

    for _ in sets:
        one()
    return one


def product_rates(backend: Backend, dtype: str) -> dict[str, float]:
    """Return the operations a second of products, by their shapes: as they are, and with the first or the second
    operand turned, as in a backward pass, a third of each."""
    rng, found = np.random.default_rng(0), {}
    xp, kind = backend.xp, dtype_named(dtype)
    for m, n, k in (*GEMMS[:: 2 if dtype == "float64" else 1], *(ON_GPU if backend.cuda else ())):
        a, b = (rng.random(shape).astype(kind) for shape in ((m, k), (k, n)))
        seconds = 0.0
        for function, arrays in (
            (xp.matmul, (a, b)),
            (lambda a, b: xp.matmul(a.T, b), (np.ascontiguousarray(a.T), b)),
            (lambda a, b: xp.matmul(a, b.T), (a, np.ascontiguousarray(b.T))),
        ):
            call = _in_turn(function, backend, arrays, kind.itemsize * (m * k + k * n + m * n))
            seconds += seconds_of(call, backend, POINT_SECONDS / 3) / 3
        found[f"{m} {n} {k}"] = 2 * m * n * k / seconds
    return found


def fitted_products(rates: dict[str, float], source: str, processors: int = 0, floor: float = 0.0) -> GemmRate:
    """Return the formula that is nearest to measured points in logarithms, and the points.

    Where a GPU has so many processors, by tiles; products that take little longer than the shortest kernel (`floor`)
    tell no rate then.
    """
    points = [(*map(float, shape.split()), rate) for shape, rate in rates.items()]
    steps = (0.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
    halves: Iterable[tuple[float, float, float]] = ((a, b, c) for a in steps for b in steps for c in steps)
    tiles: tuple[tuple[int, int, float], ...] = ()
    if processors:
        tiles, halves = TILES, ((0.0, 0.0, c) for c in (*steps, 256.0, 512.0))
        long = [p for p in points if 2 * math.prod(p[:3]) > LAUNCHES * floor * p[3]]
        points = long or points
    fits = []
    for half in halves:
        one = GemmRate(1.0, source, half=half, tiles=tiles, units=max(1, processors))
        logs = [math.log(rate / one.at(*dims)) for *dims, rate in points]
        mean = sum(logs) / len(logs)
        fits.append((sum((x - mean) ** 2 for x in logs), math.exp(mean), half))
    _, rate, half = min(fits)
    return GemmRate(rate, source, half=half, tiles=tiles, units=max(1, processors), points=tuple(points))  # type: ignore[arg-type]


def fused_attention_rates(backend: Backend) -> dict[str, float]:
    """Return the operations a second of the fused kernels of causal attention in bfloat16, by pass and the features of
    a head: 0 where the device has no such kernel."""
    found = {f"{step} {e}": 0.0 for step in ("forward", "backward") for e in HEADS}
    batch, n, width = ATTENTION
    for e in HEADS if backend.cuda else ():
        shape = batch, n, width // e, e
        k = backend.from_host(np.random.default_rng(0).random(shape).astype(dtype_named("bfloat16")))
        q, given = k[..., None, :], ((0, -n), e**-0.5)
        if (made := cudnn.attention(q, k, k, *given)) is None:
            continue
        into = tuple(backend.xp.empty(x.shape, x.dtype) for x in (q, k, k))
        if not cudnn.attention_grad(q, q, k, k, *made, into, *given):
            continue
        work = batch * width * n * (n + 1) // 2
        forward = partial(cudnn.attention, q, k, k, *given)
        backward = partial(cudnn.attention_grad, q, q, k, k, *made, into, *given)
        found[f"forward {e}"] = 4 * work / seconds_of(forward, backend)
        found[f"backward {e}"] = 10 * work / seconds_of(backward, backend)
    return found


def fused_table(found: dict[str, float], source: str) -> dict[str, FusedAttention]:
    """Return the table of fused attention in a machine's file, from what `fused_attention_rates` found."""
    rows = {
        step: tuple((float(e), found[f"{step} {e}"]) for e in HEADS if found[f"{step} {e}"])
        for step in ("forward", "backward")
    }
    return {"bfloat16": FusedAttention(**rows, source=source)} if all(rows.values()) else {}


def operation_costs(backend: Backend, gemm: GemmRate) -> dict[str, float]:
    """Return the costs of operations: bandwidths by bytes, rates of kernels, and the overhead in seconds."""
    xp, found = backend.xp, {}
    few = backend.zeros((64, 2, 2), np.float32)
    found["call"] = seconds_of(lambda: xp.matmul(few, few), backend) / len(few)
    found["overhead"] = overhead(backend, gemm)
    for nbytes in SUMS:
        terms = [np.full(nbytes // 12, value, np.float32) for value in (1, 2)]
        found[f"sum {nbytes}"] = nbytes / seconds_of(_in_turn(xp.add, backend, terms, nbytes), backend)
    sizes = ROWS_ON_GPU if backend.cuda else ROWS
    for rows, width in sizes:
        x = np.random.default_rng(0).random((rows, width)).astype(np.float32) + np.float32(0.5)
        for name in UFUNCS:
            function = getattr(xp, name)
            call = _in_turn(function, backend, [x] * function.nin, x.nbytes * (function.nin + 1))
            found[f"rate {name} {x.size}"] = x.size / seconds_of(call, backend, POINT_SECONDS / 3)
    for rows, width, only in (*((*size, "") for size in sizes), (*SHORT, "attention")):
        found |= {
            f"rate {name} {size}": size / seconds
            for (name, size), seconds in _timed_kernels(backend, rows, width, gemm, found["call"], only).items()
        }
    return found


def overhead(backend: Backend, gemm: GemmRate, clock: Callable[[], float] = perf_counter) -> float:
    """Return the seconds of an operation beside its work: the interpreter, the tape, layouts and plans.

    Layers of a few thousand elements run forward and backward, and on imagined blocks tell what operations they make.
    Between them other bytes pass through a processor's cache, as those of large products do in a step: what the
    interpreter needs comes from farther away then.  Where a GPU computes meanwhile, these are the seconds of the host.
    """
    passes = Passes(backend, clock)
    with imagine(1, target="gpu" if backend.cuda else "cpu") as world:
        call = small_layers(Grid({"own": 1}, world.comm))
        with world.trace() as trace:
            call()
    gemms = [e for e in trace.events if isinstance(e, Gemm)]
    count = len(gemms) + sum(isinstance(e, Kernel) for e in trace.events)
    work = 0.0 if backend.cuda else sum(e.flops / gemm.at(e.m, e.n, e.k, e.batch) for e in gemms)
    with Grid({"own": 1}, SingleComm(), backend=backend.name) as grid:
        call = small_layers(grid)
        if not backend.cuda:
            grid.polled.append(passes)
        times: list[float] = []
        begin = perf_counter()
        while len(times) < 4 or perf_counter() - begin < 0.3:
            start, passes.seconds = clock(), 0.0
            call()
            times.append(clock() - start - passes.seconds)
            backend.synchronize()
    return max(1e-7, median(times[1:]) - work) / count


def small_layers(grid: Grid) -> Callable[[], None]:
    """Return a function that runs layers of a few thousand elements forward and backward."""
    scheme = discover()["serial"].SCHEME
    parts = [(LayerNorm(SIDE, scheme, grid), Linear(SIDE, SIDE, scheme, grid), GELU()) for _ in range(CHAIN)]
    own = [Sequential(*part) for part in parts]
    Sequential(*own).initialize(0)
    x = Tensor(ones((1, SIDE, SIDE), grid, Layout(None, None, None), dtype="float32"), requires_grad=True)

    def forward_and_backward() -> None:
        y = x
        for layer in own:
            y = y + layer(y)
        y.sum().backward()

    return forward_and_backward


def piece_seconds(backend: Backend) -> float:
    """Return the seconds of a copy of a piece of a block, of copies that follow each other, as before an operation
    between ranks."""
    rows, width = PIECE
    size = rows * width

    def pack(block: Any) -> Any:
        packed = backend.empty((CHAIN * size,), block.dtype)
        for i in range(CHAIN):
            packed[i * size : (i + 1) * size].reshape(rows, width)[...] = block[:, i * width : (i + 1) * width]
        return packed

    block = np.zeros((rows, CHAIN * width), np.float32)
    return seconds_of(_in_turn(pack, backend, [block], 2 * block.nbytes), backend) / CHAIN


class Passes:
    """Passes through memory between operations, and the seconds that they take."""

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.blocks = cycle([backend.zeros(PASSED // 4, np.float32) for _ in range(max(1, FAR // PASSED))])
        self.seconds = 0.0
        self.also: Callable[[], bool] = lambda: False

    def poll(self) -> None:
        self.also()
        start = self.clock()
        block = next(self.blocks)
        block += 1
        self.seconds += self.clock() - start


def rate_rows(found: dict[str, float]) -> dict[str, float | tuple[tuple[float, float], ...]]:
    """Return the measured rates of kernels by their names: rows of elements and elements a second."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for key, rate in found.items():
        if key.startswith("rate "):
            _, name, size = key.split()
            rows.setdefault(name, []).append((float(size), rate))
    return {name: tuple(sorted(points)) for name, points in rows.items()}


def _timed_kernels(
    backend: Backend, rows: int, width: int, gemm: GemmRate, call: float, only: str = ""
) -> dict[tuple[str, int], float]:  # fmt: skip
    """Return the seconds of a call of each kernel with its elements, medians over the calls of the examples, or of
    those whose names begin with `only`.

    Attention's are those beside its products.
    """
    clock = DeviceClock(backend)
    times: dict[tuple[str, int], list[float]] = {}

    def timed(kernel: kernels.Kernel[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        made: Any = None

        def one() -> None:
            nonlocal made
            made = kernel(*args, **named)

        kernels.Kernel.around = None  # kernels that are parts of this one are not timed apart
        try:
            seconds = clock(one)
        finally:
            kernels.Kernel.around = timed
        results = made if isinstance(made, tuple) else (made,)
        size = max((b.size for b in (*args, *results) if hasattr(b, "nbytes")), default=0)
        times.setdefault((kernel.name, size), []).append(seconds)
        return made

    samples = {
        name: a.astype(np.float32) if a.dtype == np.float64 else a for name, a in kernels.samples(rows, width).items()
    }
    found: dict[tuple[str, int], float] = {}
    for example in kernels.examples():
        if not example.name.startswith(only):
            continue
        given = [samples[name] for name in example.inputs]
        run = _in_turn(example.call, backend, given, 2 * sum(x.nbytes for x in given))
        times.clear()
        kernels.Kernel.around = timed
        try:
            for _ in range(CALLS_OF_KERNELS):
                run()
        finally:
            kernels.Kernel.around = None
        beside = _attention(example, samples, gemm, call)
        for (name, size), taken in times.items():
            elements, products = beside.get(name, (size, 0.0))
            if size >= LEAST_ELEMENTS:
                found[name, elements] = max(0.1 * median(taken), median(taken) - products)
    largest: dict[str, int] = {}
    for name, size in found:
        largest[name] = max(size, largest.get(name, 0))
    return {(name, size): found[name, size] for name, size in largest.items()}


def _attention(
    example: kernels.Example, samples: dict[str, np.ndarray], gemm: GemmRate, call: float
) -> dict[str, tuple[int, float]]:  # fmt: skip
    """Return the scores of the kernels of attention in an example, and the seconds of their products."""
    device, found = ShapesBackend("cpu"), dict[str, tuple[int, float]]()
    trace = Trace(0, 1)
    device.recorder = TraceRecorder(trace)
    if not example.name.startswith("attention"):
        return {}
    example.call(*(device.from_host(samples[name]) for name in example.inputs))
    products = 0.0
    for event in trace.events:
        if isinstance(event, Gemm):
            products += event.flops / gemm.at(event.m, event.n, event.k, event.batch) + call * event.calls
        elif isinstance(event, Kernel):
            if event.name.startswith("attention.") and products:
                found[event.name] = event.elements, products
            products = 0.0
    return found
