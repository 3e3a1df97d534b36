"""Imagined ranks against real ones: the calls, words and bytes of the same programs, on every rank."""

from __future__ import annotations

import gc
import importlib
import itertools
import math
import pickle
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, offload, optim, schemes
from parlinalg.autograd import ops
from parlinalg.backend.shapes import ShapesBackend
from parlinalg.linalg import costs as formulas
from parlinalg.linalg import matrices, systems
from parlinalg.linalg.tiles import Deal
from parlinalg.optim.preconditioned import newton_inverse_root
from parlinalg.parallel import GradientReducer, WeightGatherer, ZeRO, clip_gradient_norm, examine
from parlinalg.planning.trace import Attention, Gemm, Memory, Span, Start, Wait
from parlinalg.testing.memory import ArrayMemory, array_memory
from tests.models import KINDS, every_scheme, loss_of, make
from tests.pipeline.running import pipeline
from tests.training import sizes_for

Program = Callable[[], Any]


def rows(book: Any) -> dict[Any, tuple[int, int, int]]:
    return {key: (book.calls[key], book.words[key], book.bytes[key]) for key in sorted(book.calls)}


def both(world: Any, sizes: dict[str, int], program: Callable[[Any], None], **options: Any) -> Any:
    """Run a program on a real grid, and imagined as every rank is; their ledgers are equal row by row.

    Returns
    -------
    Book
        That of the imagined run.
    """
    with pla.ledger(world) as real:
        grid = pla.Grid(sizes, world, "numpy", idle=True)
        program(grid)
        grid.close()
    with pla.imagine(world.size, world.rank, node=world.local_size, **options) as found, pla.ledger(found.comm) as book:
        program(pla.Grid(sizes, idle=True))
    assert rows(book) == rows(real), sizes
    return book


def train_gpt(
    grid: Any,
    scheme: Any,
    stage: int = 0,
    steps: int = 2,
    *,
    kind: Any = nn.GPT,
    gathered: bool = False,
    optimizer: Any = optim.AdamW,
    **options: Any,
) -> None:
    sizes = {"vocab_size": 53, "max_position_embeddings": 16, "hidden_size": 24, "num_hidden_layers": 2}
    model = kind(
        **{**sizes, "num_attention_heads": 4, "dtype": "float32", "seed": 1, **options}, scheme=scheme, grid=grid
    )
    parameters = list(model.parameters())
    GradientReducer(parameters, [ZeRO(stage=stage)] if stage else [], 2000, 4000)
    if gathered:
        WeightGatherer(model)
    made = optimizer(parameters, lr=1e-3)
    numbers = np.random.default_rng(0).integers(0, 53, (2, 6, 16))
    ids, targets = (pla.distribute(a, grid, model.ids_layout) for a in numbers)
    for step in range(steps):
        with nn.training_step(step):
            loss, count = ops.cross_entropy_sum(model(ids), targets)
            (loss * (1 / count)).backward()
        made.step()
        made.zero_grad()


def cases(ranks: int, full: bool) -> list[tuple[str, Any, dict[str, int], int]]:
    """Schemes, grids and stages: of every scheme one grid and stage, or three with all stages."""
    draw = random.Random(ranks)
    found = []
    ulysses = {
        name: schemes.discover()[name].SCHEME.with_sequence("s", ulysses=True) for name in ("serial", "1d", "2d")
    }
    ulysses |= {f"data × {name}": scheme.with_data("data") for name, scheme in ulysses.items()}
    for name, scheme in (every_scheme() | {f"Ulysses × {name}": scheme for name, scheme in ulysses.items()}).items():
        shapes = sizes_for(scheme, ranks, 10**6)
        stages = [0, 1, 2] if "data" in scheme.axes and "weights cut" not in name else [0]
        for sizes in draw.sample(shapes, min(3 if full else 1, len(shapes))):
            found += [(name, scheme, sizes, s) for s in (stages if full else [draw.choice(stages)])]
    return found


@pytest.mark.always
@pytest.mark.one_in(4)
@pytest.mark.ranks(1, 4, 8)
@pytest.mark.parametrize("name", [case[0] for case in cases(4, False)])
def test_ledgers_of_training_are_those_of_real_ranks(world, name, full):
    words = compare_training(world, [case for case in cases(world.size, full) if case[0] == name])
    assert words or name == "serial" or world.size == 1


def compare_training(world: Any, found: list[tuple[str, Any, dict[str, int], int]]) -> int:
    """Compare ledgers of trainings on real and on imagined ranks; return the words that this rank receives in all."""
    words = 0
    for name, scheme, sizes, stage in found:
        gathered = name == "zero3" or "weights cut" in name
        enough = {"num_attention_heads": world.size, "hidden_size": 6 * world.size} if "Ulysses" in name else {}
        book = both(world, sizes, partial(train_gpt, scheme=scheme, stage=stage, gathered=gathered, **enough))
        words += book.words.total()
    return words


SIXTEEN = cases(16, True)


@pytest.mark.timeout(300)
@pytest.mark.ranks(16)
@pytest.mark.parametrize("name", dict.fromkeys(case[0] for case in SIXTEEN))
def test_ledgers_of_training_are_those_of_16_real_ranks(world, name):
    """Three grids of the scheme, with all stages of ZeRO: `mpiexec -n 16 python -m pytest tests/planning`."""
    words = compare_training(world, [case for case in SIXTEEN if case[0] == name])
    assert words or name == "serial"


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("name", ["muon", "muon/home", "muon/gram", "muon/grid", "shampoo", "shampoo/newton", "soap"])
def test_ledgers_of_matrix_optimizers_are_those_of_real_ranks(world, name, stage):
    """The parts that ranks update are known without asking, however Muon's iteration is carried out."""
    scheme = schemes.discover()["2d"].SCHEME.with_data("data")
    name, _, execution = name.partition("/")
    option = "root" if name == "shampoo" else "execution"
    optimizer = partial(optim.discover()[name], **({option: execution} if execution else {}))
    for sizes in sizes_for(scheme, world.size):
        program = partial(train_gpt, scheme=scheme, stage=stage, optimizer=optimizer)
        book = both(world, sizes, program, what_if=pla.WhatIf())
        assert execution == "grid" or book.words["all_to_all", tuple(sizes)] or world.size == 1


@pytest.mark.serial
@pytest.mark.parametrize("p", [2, 3, 4])
def test_newton_roots_take_the_steps_that_are_assumed(p):
    """Each step has its product with X, the power of T, and the product with M; at most `steps` are taken."""

    def products(assumed: int, **options: int) -> int:
        with pla.imagine(1, what_if=pla.WhatIf(iterations=assumed, number=0.0)) as world:
            a = pla.zeros((5, 5), grid=pla.Grid({"x": 1})).block
            with world.trace() as trace:
                newton_inverse_root(a, p, 1e-4, **options)
        return sum(event.calls for event in trace.events if isinstance(event, Gemm))

    a_step = 2 + {2: 1, 3: 2, 4: 2}[p]
    assert [products(1), products(7), products(7, steps=3)] == [a_step, 7 * a_step, 3 * a_step]


@pytest.mark.ranks(1, 4, full=(8,))
@pytest.mark.parametrize("sizes", [(4, 1), (2, 2), (1, 4)], ids=str)
def test_ledgers_of_array_functions_are_those_of_real_ranks(world, sizes, monkeypatch):
    monkeypatch.setattr(pla.Grid, "cores", 64)  # real ranks have a core each, as imagined ones do

    def program(grid):
        a = pla.distribute(np.eye(45), grid, pla.Layout("r", "c"))
        b = pla.distribute(np.ones((45, 7)), grid, pla.Layout("r", "c"))
        pla.linalg.cho_factor(a, block=8).solve(b)
        pla.linalg.solve_triangular(a, b)
        pla.fft.fftn(a)
        pla.fft.rfft(a, axis=0)
        (a @ a).redistribute(pla.Layout("c", "r")).sum(axis=0)
        pla.mean(a.T + a, axis=1)
        pla.cumsum(a, axis=0)
        pla.average(b, axis=0, weights=b + 1)
        for function in (pla.angle, pla.sinc, pla.nanargmax, pla.histogram, np.i0, np.isreal):
            function(b)
        for each in (b // 3.0, pla.isclose(a, a.T), pla.expm1(b * 1j), pla.convolve(b[:, 0], b[:, 1])):
            each.sum()
        counts = pla.distribute(np.arange(45 * 7).reshape(45, 7) % 17, grid, pla.Layout("r", "c"))
        for x in (b, counts):  # along a dim that is cut, where the lines are moved to lie whole
            pla.median(x, axis=0)
            pla.quantile(x, [0.2, 0.5], axis=1)
        for x in (counts, counts[0], counts[:, 0]):  # as many bins as are asked for, whatever the values
            np.histogram(x)
            np.histogram(x, 5, (0, 20), weights=x)
            np.histogram(x, [1, 4, 9])
        known = pla.distribute(np.arange(0, 20, 3), grid, pla.Layout(None))
        pla.searchsorted(known, counts)
        np.digitize(counts, known)
        np.bincount(known)

    grid = dict(zip("rc", sizes if world.size == 4 else (world.size, 1), strict=True))
    both(world, grid, program, what_if=pla.WhatIf())


# ------------------------------------------------------------------ pipelines


def pipeline_rows(comm: Any, name: str, parallel: dict[str, Any], layers: int, chunks: int | None, zero: int) -> Any:
    """The ledger of two steps of a pipeline."""
    with (
        pla.ledger(comm) as book,
        pipeline(comm, "auto", name, parallel, 4, layers, chunks=chunks, zero=zero) as pipe,
    ):
        for step in range(2):
            pipe.worker.step(pipe.batches(step), pipe.work, step, 0.1)
            pipe.worker.examine(pipe.optimizer.parameters)
            pipe.optimizer.step(0.5)
            pipe.optimizer.zero_grad()
    return rows(book)


PIPELINES = [
    ("gpipe", {"pipeline": 4}, 4, None, 0),
    ("1f1b", {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, 3, None, 0),
    ("interleaved", {"pipeline": 2, "data": 2}, 4, 2, 1),
    ("zb-h1", {"pipeline": 4}, 5, None, 0),
    ("zb-v", {"pipeline": 4}, 8, None, 0),
    ("chimera", {"pipeline": 4}, 4, None, 0),
]


@pytest.mark.one_in(3)
@pytest.mark.ranks(4)
@pytest.mark.parametrize(("name", "parallel", "layers", "chunks", "zero"), PIPELINES, ids=[p[0] for p in PIPELINES])
def test_ledgers_of_pipelines_are_those_of_real_ranks(world, name, parallel, layers, chunks, zero):
    given = name, parallel, layers, chunks, zero
    real = pipeline_rows(world, *given)
    found = pla.imagine_together(
        lambda w: pipeline_rows(w.comm, *given), world.size, node=world.local_size, what_if=pla.WhatIf()
    )
    assert found[world.rank] == real


@pytest.mark.serial
def test_a_stage_stands_for_its_ranks():
    def program(world):
        return pipeline_rows(
            world.comm, "1f1b", {"pipeline": 2, "data": 2, "tensor": {"size": 2, "mode": "1d"}}, 2, None, 0
        )

    every = pla.imagine_together(program, 8, what_if=pla.WhatIf())
    some = pla.imagine_together(program, 8, classes=lambda rank: rank // 2 % 2, what_if=pla.WhatIf())
    assert list(some) == [0, 2]
    assert some == {rank: every[rank] for rank in some}


@pytest.mark.serial
def test_the_error_of_one_rank_ends_all():
    def program(world):
        if world.rank == 2:
            raise RuntimeError("rank 2 had enough")
        return world.comm.share(world.rank, others="by rank")

    with pytest.raises(RuntimeError, match="rank 2 had enough"):
        pla.imagine_together(program, 4)


@pytest.mark.serial
def test_ranks_that_wait_for_each_other_are_told():
    def program(world):
        comm, block = pla.Grid({"r": 2}).comm("r"), np.zeros(3, np.int64)
        comm.receive(block, 1 - comm.rank)
        comm.send(block, 1 - comm.rank)

    with pytest.raises(pla.CommError, match=r"would wait for ever: .*rank 1 waits for a message from rank 0"):
        pla.imagine_together(program, 2)


@pytest.mark.serial
def test_an_engine_runs_on_one_imagined_rank():
    """As the tutorial's program on real ranks; a training without a pipeline needs no other imagined ranks."""
    config = {"parallel": {"data": 4, "tensor": {"size": 8, "mode": "1d"}}, "zero": 1, "clip_grad_norm": 1.0}
    together = pla.imagine_together(
        lambda w: fit(w.comm, config), 32, classes=lambda rank: rank // 16, what_if=pla.WhatIf()
    )
    for rank, found in together.items():
        with pla.imagine(32, rank, what_if=pla.WhatIf()) as world:
            assert fit(world.comm, config) == found


@pytest.mark.always
@pytest.mark.ranks(1, 2, 3, 4, 6)
def test_ledgers_of_elements_by_indices_are_those_of_real_ranks(world):
    """Indices that all ranks have, which choose elements of few ranks, of all, or of none."""

    def program(grid):
        a = pla.zeros((41, 37), grid, pla.Layout("r", "c"))
        line = np.arange(37)
        for key in ((line, line), np.array([38, 39, 40]), (np.array([[0, -1], [20, 3]]), 5), (3, 4), np.array([], int)):
            pla.exp(a[key])
        pla.exp(a[:, np.array([36, 0, 0])])
        a[line[5:9]] = pla.ones((4, 37), grid, pla.Layout(None, "c"))
        a[line, 3], a[7, 8] = 2.0, 1.0
        np.add.at(a, line, 1.0)
        pla.linalg.trace(a)
        np.diag(np.diagonal(a, 2))

    for r in [r for r in range(1, world.size + 1) if world.size % r == 0]:
        both(world, {"r": r, "c": world.size // r}, program)


@pytest.mark.ranks(1, 4)
def test_ledgers_of_masks_that_all_ranks_have_are_those_of_real_ranks(world):
    """NumPy's masks of rows and of elements, of dims that are not cut evenly."""

    def program(grid: Any) -> None:
        draw = np.random.default_rng(0)
        rows, elements = draw.random(13) < 0.4, draw.random((13, 5)) < 0.4
        for layout in (pla.Layout("r", "c"), pla.Layout(("c", "r"), None), pla.Layout(None, ("r", "c"))):
            a = pla.ones((13, 5), grid, layout)
            for mask in (rows, elements, np.zeros(13, bool), np.zeros((13, 5), bool)):
                found = a[mask]
                assert found.shape == (np.count_nonzero(mask), *a.shape[mask.ndim :])
                pla.exp(found)
            pla.compress(rows, a, axis=0)
            a[elements] = 2.0

    for r in [r for r in range(1, world.size + 1) if world.size % r == 0]:
        both(world, {"r": r, "c": world.size // r}, program)


@pytest.mark.serial
def test_distributed_indices_choose_elements_on_every_imagined_rank():
    """What others ask for is not known, and lies in no other rank's block."""
    for rank in range(4):
        with pla.imagine(4, rank):
            grid = pla.Grid({"r": 2, "c": 2})
            a = pla.zeros((40, 30), grid, pla.Layout("r", "c"))
            back = pla.arange(39, -1, -1, grid=grid)
            assert a[back].shape == (40, 30)
            a[back, 0] = 1.0


@pytest.mark.ranks(1, 4)
def test_ledgers_of_distributed_indices_that_ranks_ask_alike_are_those_of_real_ranks(world):
    """As many elements are taken to be asked of a rank as it asks of each: of its own rows, of those of another."""

    def program(grid):
        a, cut = pla.zeros((48, 37), grid, pla.Layout("r", None)), pla.Layout("r")
        for index in (np.arange(48), np.arange(48)[::-1], np.arange(48) * 11 % 48):
            pla.exp(a[pla.distribute(index, grid, cut)])
            a[pla.distribute(index, grid, cut), 3] = 2.0
        pla.exp(pla.repeat(a, 3, axis=0))

    both(world, {"r": world.size}, program)


@pytest.mark.ranks(1, 4)
def test_ledgers_of_numbers_that_meet_arrays_are_those_of_real_ranks(world):
    """Numbers of arrays that a rank has whole, left and right of distributed ones, and functions of such arrays."""

    def program(grid):
        v = pla.random.normal((31,), grid, pla.Layout("r"), seed=1)
        x, line, first = v[:, None] + v, np.linspace(-1, 1, 9), v.gather()[0]
        assert first.shape == ()
        for found in (first * x, x / first, pla.sum(v).gather() * x, pla.maximum(first, x), first > x):
            assert isinstance(found, pla.DistArray)
            assert found.shape == (31, 31)
        y = first * pla.Tensor(x) + first
        assert y.layout == x.layout
        assert pla.full((31, 3), first, grid, pla.Layout("r", None)).dtype == pla.full_like(x, v.gather()[:1]).dtype
        pla.sum(np.polyval(v.gather()[:4], x) + np.polyval(v[:4], x) + pla.interp(x, line, line))
        pla.sum(pla.histogram2d(v, v, bins=4, range=[[-1, 1], [-2, 2]])[0])
        with pytest.raises(TypeError, match="of this rank alone"):
            v.gather() * v

    both(world, {"r": world.size}, program, what_if=pla.WhatIf())


@pytest.mark.serial
@pytest.mark.parametrize("name", ["ones", "full", "ones_like", "eye", "linspace", "arange", "from_function"])
def test_arrays_without_values_take_no_memory(name):
    with pla.imagine(4, 1):
        grid, layout = pla.Grid({"r": 4}), pla.Layout("r", None)
        where = {"grid": grid, "layout": layout}
        one = {"grid": grid, "layout": pla.Layout("r")}
        make = {
            "ones": lambda: pla.ones((20_000, 5000), **where),
            "full": lambda: pla.full((20_000, 5000), 2.5, **where),
            "ones_like": lambda: pla.ones_like(pla.zeros((20_000, 5000), **where)),
            "eye": lambda: pla.eye(10_000, **where),
            "linspace": lambda: pla.linspace(0, 1, 10**8, **one),
            "arange": lambda: pla.arange(10**8, **one),
            "from_function": lambda: pla.from_function(lambda i, j: i + j, (20_000, 5000), **where, dtype="float64"),
        }[name]
        tracemalloc.start()
        try:
            assert make().block.nbytes >= 2 * 10**8
            assert tracemalloc.get_traced_memory()[1] < 10**7
        finally:
            tracemalloc.stop()


# ------------------------------------------------------------------ memory and traces


def measured(memory: ArrayMemory, step: Callable[[], None]) -> tuple[int, int]:
    """Bytes of this rank's arrays of NumPy between two steps, and at the most within one."""
    for _ in range(2):
        step()
    gc.collect()
    held = memory.held
    memory.reset_peak()
    step()
    return held, memory.peak


SMALL = {
    "vocab_size": 512, "max_position_embeddings": 16, "hidden_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "dtype": "float32", "seed": 1,
}  # fmt: skip


def step_of(model: Any, optimizer: Any, x: Any, targets: Any) -> None:
    """Make a step of training by the mean of the cross entropy."""
    loss, count = ops.cross_entropy_sum(model(x), targets)
    (loss * (1 / count)).backward()
    optimizer.step()
    optimizer.zero_grad()


def training(
    grid: Any, stage: int, dtype: str = "float32", make: Callable[..., Any] = optim.AdamW
) -> Callable[[], None]:
    scheme = schemes.discover()["zero3" if stage == 3 else "data"].SCHEME
    model = nn.GPT(
        vocab_size=1024, max_position_embeddings=16, hidden_size=192, num_hidden_layers=3, num_attention_heads=8,
        scheme=scheme, grid=grid, dtype=dtype, seed=1,
    )  # fmt: skip
    parameters = list(model.parameters())
    GradientReducer(parameters, [ZeRO(stage=stage)] if stage else [], 1 << 20, 1 << 20)
    if stage == 3:
        WeightGatherer(model)
    optimizer = make(parameters, lr=1e-4)
    ids, targets = (
        pla.distribute(a, grid, model.ids_layout) for a in np.random.default_rng(0).integers(0, 1024, (2, 8, 16))
    )
    return partial(step_of, model, optimizer, ids, targets)


@pytest.mark.always
@pytest.mark.one_in(2)
@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_memory_is_what_numpy_takes(world, stage, monkeypatch):
    compare_memory(world, partial(training, stage=stage), monkeypatch)


@pytest.mark.one_in(2)
@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("name", ["muon", "muon/gram", "shampoo", "shampoo/newton", "shampoo/adam", "soap"])
def test_memory_of_matrix_optimizers_is_what_numpy_takes(world, name, monkeypatch):
    """Temporaries of the optimizers, and the copies of LAPACK's matrices in double precision."""
    name, _, how = name.partition("/")
    option = {"gram": "execution", "newton": "root", "adam": "grafting"}.get(how, "")
    make = partial(optim.discover()[name], **({option: how} if option else {}))
    if name in ("shampoo", "soap"):  # gradients are of low rank, of 128 tokens
        make = partial(make, precondition_frequency=1)
    compare_memory(world, partial(training, stage=0, make=make), monkeypatch)


@pytest.mark.one_in(2)
@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("stage", [0, 2])
def test_memory_of_16_bit_sums_is_what_numpy_takes(world, stage, monkeypatch):
    """The terms that ranks exchange are held until the sums are waited for."""
    make = partial(optim.SGD, momentum=0.9)
    compare_memory(world, partial(training, stage=stage, dtype="bfloat16", make=make), monkeypatch)


@pytest.mark.one_in(2)
@pytest.mark.ranks(1, 4)
def test_memory_of_products_over_grids_is_what_numpy_takes(world, monkeypatch):
    """Muon's iteration on matrices that stay where they are computes in place."""

    def make(grid: Any) -> Callable[[], None]:
        model = nn.MLP((600, 600, 600), schemes.discover()["data"].SCHEME, grid, seed=1)
        GradientReducer(model.parameters(), [])
        optimizer = optim.Muon(model.parameters(), execution="grid")
        samples = np.ones((8, 600), np.float32), np.zeros(8, np.int64)
        x, labels = (pla.distribute(a, grid, pla.Layout("data", *(None,) * (a.ndim - 1))) for a in samples)
        return partial(step_of, model, optimizer, x, labels)

    compare_memory(world, make, monkeypatch)


@pytest.mark.serial
@pytest.mark.parametrize(("dtype", "stage", "most"), [("bfloat16", 0, 1), ("bfloat16", 2, 1), ("float32", 2, 2)])
def test_buckets_in_flight(dtype, stage, most):
    """The terms of 16-bit sums go when a poll finds them: with those of one bucket the peak depends on it less."""
    with pla.imagine(4) as world:
        step = training(pla.Grid({"data": 4}), stage, dtype, partial(optim.SGD, momentum=0.9))
        step()
        with world.trace() as trace:
            step()
    under_way, counts = set(), [0]
    for event in trace.events:
        if isinstance(event, Start) and event.op == ("reduce_scatter" if stage else "all_reduce") and event.nbytes > 64:
            under_way.add(event.call)
        elif isinstance(event, Wait):
            under_way.discard(event.call)
        counts.append(len(under_way))
    assert max(counts) == most


def compare_memory(world: Any, make: Callable[[Any], Callable[[], None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare what the arrays of a training on a grid take with what they take on imagined ranks."""
    monkeypatch.setenv("PARLINALG_SHARED", "0")  # what ranks have in common is no array of NumPy's
    with pla.Grid({"data": world.size}, world, "numpy") as grid:
        gc.collect()
        with array_memory() as memory:
            before = memory.held
            rest, peak = (n - before for n in measured(memory, make(grid)))
    with pla.imagine(world.size, world.rank, node=world.local_size, what_if=pla.WhatIf()) as found:
        step = make(pla.Grid({"data": world.size}))
        for _ in range(2):
            step()
        gc.collect()
        held = sum(found.memory.values())
        found.reset_peak()
        step()
    assert held == pytest.approx(rest, rel=0.03)
    assert found.peak_memory == pytest.approx(peak, rel=0.03)


def small_training(seed: int, ranks: int) -> tuple[dict[str, Any], dict[str, Any], Callable[..., Any]]:
    """A configuration, the sizes of a GPT whose step takes 1 to 10 MB, and an optimizer, by a random seed."""
    rng = random.Random(seed)
    config: dict[str, Any] = {"batch_size": 2 * ranks}
    shape = [2, ranks // 2]
    modes: list[dict[str, Any]] = [
        {"mode": "1d"}, {"mode": "1d", "sequence_parallel": True}, {"mode": "2d", "shape": shape},
        {"mode": "2.5d", "shape": [*shape, 1], "depth_on": rng.choice(["batch", "k"])},
        {"mode": "3d", "shape": [*shape, 1]},
    ]  # fmt: skip
    way = rng.choice(["data", "data", "tensor", "mixed", "sequence", "pipeline", "pipeline"])
    layers = rng.choice([2, 3])
    if way == "data":
        config |= {"parallel": {"data": ranks}, "zero": rng.randrange(4)}
    elif way == "tensor":
        config |= {"parallel": {"tensor": {"size": ranks, **rng.choice(modes)}}}
    elif way == "mixed":
        config |= {"parallel": {"data": ranks // 2, "tensor": {"size": 2, "mode": "1d"}}, "zero": rng.randrange(3)}
    elif way == "sequence":
        config |= {"parallel": {"sequence": {"size": ranks}}, "zero": rng.randrange(4)}
    else:
        stages = rng.choice([2, ranks])
        name = rng.choice(["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
        config |= {"parallel": {"pipeline": stages, "data": ranks // stages}, "batch_size": 2 * ranks}
        config["schedule"] = {"name": name, "microbatches": 2 * stages, **({"chunks": 2} if name[0] == "i" else {})}
        layers = stages * (2 if name in ("interleaved", "zb-v") else 1)
    if (precision := rng.choice([None, None, "fp16", "bf16"])) is not None:
        config["precision"] = precision
    names = ["adamw", "sgd", "lars", "lamb", "muon", *["grid", "shampoo", "soap"] * (config.get("zero") != 3)]
    name = rng.choice(names)
    if name == "grid":
        make: Callable[..., Any] = partial(optim.Muon, execution="grid")
    elif name in ("shampoo", "soap"):
        make = partial(optim.discover()[name], precondition_frequency=1)
    else:
        make = partial(optim.discover()[name], lr=1e-4)
    sizes = {
        "vocab_size": rng.choice([96, 1536]), "max_position_embeddings": ranks * rng.choice([3, 16]),
        "hidden_size": ranks * rng.choice([12, 24, 36]), "num_hidden_layers": layers, "num_attention_heads": 2 * ranks,
        "recompute": rng.choice([None, None, "block", "attention"]), "attn_pdrop": rng.choice([0, 0, 0.1]), "seed": 1,
    }  # fmt: skip
    return config, sizes, make


@pytest.mark.one_in(2)
@pytest.mark.ranks(4, full=(6,))
def test_memory_of_small_models_is_what_numpy_takes(world, full, monkeypatch):
    """Random configurations: most of what they take comes and goes, and a good part is the scratch of kernels."""
    monkeypatch.setenv("PARLINALG_SHARED", "0")
    for seed in range(40) if full else (1, 5, 16):
        config, sizes, make = small_training(seed, world.size)

        def stepper(comm: Any, backend: str, config=config, sizes=sizes, make=make) -> tuple[Any, Callable[[], None]]:
            mesh = pla.launch(config, comm, backend)
            model = nn.GPT(**sizes, scheme=mesh.scheme, grid=mesh.grid, dtype=mesh.config.model_dtype)
            engine, *_ = pla.initialize(model, make, criterion=ops.cross_entropy_sum, mesh=mesh)
            shape = config["batch_size"], sizes["max_position_embeddings"]
            ids, targets = np.random.default_rng(0).integers(0, sizes["vocab_size"], (2, *shape))

            def step() -> None:
                engine.zero_grad()
                if "schedule" in config:
                    engine.execute_schedule(iter([(ids, targets)]), return_output_label=False)
                else:
                    x, y = (pla.distribute(a, mesh.grid, model.ids_layout) for a in (ids, targets))
                    engine.backward(engine.criterion(engine(x), y))
                engine.step()

            return mesh, step

        mesh, step = stepper(world, "numpy")
        step()  # loops are compiled
        mesh.close()
        del mesh, step
        gc.collect()
        with array_memory() as memory:
            before = memory.held
            mesh, step = stepper(world, "numpy")
            rest, peak = (n - before for n in measured(memory, step))
            mesh.close()
        del mesh, step

        def program(found: Any, stepper=stepper) -> tuple[int, int]:
            _, step = stepper(found.comm, "auto")
            for _ in range(2):
                step()
            held = sum(found.memory.values())
            found.reset_peak()
            step()
            return held, found.peak_memory

        every = pla.imagine_together(program, world.size, node=world.local_size, what_if=pla.WhatIf())
        held, most = every[world.rank]
        assert held == pytest.approx(rest, rel=0.03), (seed, config, sizes, make)
        assert most == pytest.approx(peak, rel=0.03), (seed, config, sizes, make)


@pytest.mark.serial
@pytest.mark.parametrize("dtype", ["float64", "float32", "complex64"])
@pytest.mark.parametrize("shape", [(200, 200), (300, 150), (150, 300)], ids=str)
@pytest.mark.parametrize("name", ["qr", "svd", "eigh", "inv", "cholesky"])
def test_memory_of_factorizations_is_what_numpy_takes(name, shape, dtype):
    """NumPy copies what is not in double precision, and QR its matrix."""
    a = np.random.default_rng(0).standard_normal(shape).astype(dtype)
    options = {"full_matrices": False} if name == "svd" else {}
    if name not in ("qr", "svd"):
        a = (a @ a.T + 10 * len(a) * np.eye(len(a))).astype(dtype)
    tracemalloc.start()
    try:
        found = getattr(np.linalg, name)(a, **options)
        real = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    with pla.imagine(1, what_if=pla.WhatIf()) as world:
        b = pla.zeros(a.shape, grid=pla.Grid({"x": 1}), dtype=dtype).block
        held = world.device.held
        world.reset_peak()
        again = getattr(world.device.xp.linalg, name)(b, **options)
        assert world.peak_memory - held == pytest.approx(real, rel=0.03)
    assert np.shape(found[0]) == again[0].shape


@pytest.mark.serial
@pytest.mark.parametrize("name", ["any", "all", "count_nonzero", "argmax", "argmin", "max", "min", "sum", "prod"])
def test_reductions_of_arrays_with_values_are_numpys(name):
    xp = ShapesBackend().xp
    a = np.array([[3, 1, 2], [0, 5, 4]])
    for axis in (None, 0, 1):
        np.testing.assert_array_equal(getattr(xp, name)(a, axis=axis), getattr(np, name)(a, axis=axis))
        want = getattr(np, name)(a, axis=axis, keepdims=True)
        np.testing.assert_array_equal(getattr(xp, name)(a, axis=axis, keepdims=True), want)


@pytest.mark.serial
@pytest.mark.parametrize("target", ["cpu", "gpu"])
@pytest.mark.parametrize(
    ("parallel", "options"),
    [({"data": 2}, {}), ({"tensor": {"size": 2, "mode": "1d"}}, {}), ({"sequence": 2}, {"num_local_experts": 4})],
    ids=["data", "1d", "experts on a ring"],
)  # fmt: skip
def test_more_tokens_than_keep_values_are_imagined(parallel, options, target, monkeypatch):
    """Ids and targets without values lie within the vocabulary, and all count, if the `WhatIf` says so."""
    config = {"parallel": parallel, "batch_size": 256, "criterion": {"name": "cross_entropy", "label_smoothing": 0.1}}

    def program(world: Any) -> tuple[Any, int, int]:
        with pla.launch(config) as mesh:
            model = nn.GPT(
                vocab_size=64, max_position_embeddings=16, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                dtype="float32", scheme=mesh.scheme, grid=mesh.grid, **options,
            )  # fmt: skip
            ids = np.random.default_rng(0).integers(0, 64, (256, 16))
            engine, feed, *_ = pla.initialize(model, train_dataloader=[(ids, ids)], mesh=mesh)
            with pla.ledger(mesh.world) as book, world.trace() as trace:
                pla.Trainer(engine).fit(feed, epochs=1)
            given = pla.distribute(ids, mesh.grid, model.targets_layout)
            assert ops.count_targets(given) == ids.size
        return rows(book), sum(e.flops for e in trace.events if isinstance(e, Gemm)), world.peak_memory

    few = pla.imagine_together(program, 2, what_if=pla.WhatIf(), target=target)
    for module in ("parlinalg.backend.shapes", "parlinalg.array.create"):
        monkeypatch.setattr(importlib.import_module(module), "SMALL", 1000)
    with pytest.raises(pla.ValuesNeeded, match=r"WhatIf\(finite="):
        pla.imagine_together(program, 2, target=target)
    many = pla.imagine_together(program, 2, what_if=pla.WhatIf(), target=target)
    for rank, (book, flops, peak) in few.items():
        assert many[rank][:2] == (book, flops)
        assert peak <= many[rank][2] <= 1.05 * peak  # with the integers, which are counted


@pytest.mark.serial
def test_memory_by_category():
    with pla.imagine(4) as world:
        grid = pla.Grid({"data": 4})
        step = training(grid, 1)
        step()
        with world.trace() as trace:
            step()
        live = Counter({})
        for event in trace.events:
            if isinstance(event, Memory):
                live[event.category] += event.nbytes
        assert {name: n for name, n in live.items() if n} == world.memory
        weights, gradients, states = (world.memory[name] for name in ("weights", "gradients", "states"))
        assert weights == gradients == 2 * states  # two moments of a fourth
        assert "activations" not in world.memory


@pytest.mark.serial
@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_states_on_the_host_are_no_memory_of_a_gpu(target):
    held = {}
    for home in (None, offload.HostStates("64KiB")):
        with pla.imagine(4, target=target) as world:
            grid = pla.Grid({"data": 4})
            parameters = list(nn.GPT(**SMALL, scheme=schemes.discover()["data"].SCHEME, grid=grid).parameters())
            GradientReducer(parameters, [ZeRO(stage=1)])
            optimizer = optim.AdamW(parameters)
            if home is not None:
                optimizer.place(home)
            for p in parameters:
                p.grad = pla.zeros(p.shape, grid, p.layout, dtype="float32")
            optimizer.step()
            held[home is None] = sum(world.memory.values())
            states = 2 * sum(p.size for p in parameters) * 4 / 4
    saved = held[True] - held[False]
    assert saved > 0.8 * states if target == "gpu" else abs(saved) < 0.2 * states


@pytest.mark.serial
@pytest.mark.parametrize("kind", ["optimizer", "activations", "parameters"])
@pytest.mark.parametrize("parallel", [{"data": 2}, {"pipeline": 2}])
def test_what_goes_to_a_disk_is_not_imagined(kind, parallel, tmp_path):
    """The error comes before anything is written."""
    config = {"parallel": parallel, "offload": {kind: "disk", "path": str(tmp_path / "away")}}

    def program(world):
        with pla.launch(config) as mesh:
            batch = np.zeros((4, 16), np.int64), np.zeros((4, 16), np.int64)
            model = nn.GPT(**{**SMALL, "seed": None}, scheme=mesh.scheme, grid=mesh.grid)
            engine, feed, _, _ = pla.initialize(model, criterion=ops.cross_entropy_sum, train_dataloader=[batch])
            pla.Trainer(engine).fit(feed, epochs=1)

    with pytest.raises(pla.ValuesNeeded, match=r"offloading to a disk depends on values.*leave it out of what is"):
        pla.imagine_together(program, 2, what_if=pla.WhatIf())
    assert not list(tmp_path.rglob("*.*"))


@pytest.mark.serial
def test_layers_are_not_measured_on_imagined_ranks():
    """Each of them would measure other times, and cut the model elsewhere."""

    def program(world):
        with pla.launch({"parallel": {"pipeline": {"size": 2, "partition": "time"}}}) as mesh:
            x = np.zeros((4, 5), np.float32)
            pla.initialize(nn.MLP((5, 6, 7, 3), mesh.scheme, mesh.grid), train_dataloader=[(x, np.zeros(4, np.int64))])

    with pytest.raises(pla.ConfigError, match=r"partition='time' measures .* on imagined ranks .* give 'flops'"):
        pla.imagine_together(program, 2, what_if=pla.WhatIf())


@pytest.mark.serial
@pytest.mark.parametrize(
    ("given", "right"),
    [
        ({"norm": "x"}, "norm='x' should be a number"),
        ({"norm": float("nan")}, "norm=nan should be at least 0"),
        ({"number": None}, "number=None should be a number"),
        ({"iterations": 2.5}, "iterations=2.5 should be a whole number"),
        ({"token": -1}, "token=-1 should be at least 0"),
        ({"routing": 3}, "routing=3 should be 'even' or"),
        ({"routing": [1, "a"]}, "should be 'even' or the experts' loads"),
        ({"finite": "no"}, "finite='no' should be True or False"),
        ({"selected": "all"}, "selected='all' should be a number"),
    ],
    ids=str,
)
def test_wrong_assumptions(given, right):
    with pytest.raises(pla.ConfigError, match=right):
        pla.WhatIf(**given)


@pytest.mark.serial
@pytest.mark.parametrize("what_if", ["even", {"norm": 2.0}, True], ids=str)
def test_assumptions_are_a_what_if(what_if):
    with pytest.raises(pla.ConfigError, match=r"what_if=.* should be a pla.WhatIf"), pla.imagine(4, what_if=what_if):
        pass
    with pytest.raises(pla.ConfigError, match=r"what_if=.* should be a pla.WhatIf"):
        pla.imagine_together(lambda world: None, 4, what_if=what_if)


@pytest.mark.serial
def test_the_line_is_the_users_where_another_package_asks():
    """NumPy's checks, SciPy's and the standard library's read elements in their own files."""
    import scipy.linalg

    with pla.imagine(4):
        block = pla.ones((8, 8), pla.Grid({"r": 4}), pla.Layout(None, None)).block
        for ask in (lambda: scipy.linalg.lu(block), lambda: np.testing.assert_allclose(block, 1.0)):
            with pytest.raises(pla.ValuesNeeded, match=r"\(at [^ ]*test_imagined\.py:\d+\)"):
                ask()


@pytest.mark.serial
def test_a_trace_has_the_products_and_the_messages():
    with pla.imagine(8, 3) as world:
        grid = pla.Grid({"r": 4, "c": 2})
        with pla.ledger(grid) as book, world.trace() as trace:
            a = pla.ones((64, 32), grid, pla.Layout("r", "c"))
            b = pla.ones((32, 48), grid, pla.Layout("r", "c"))
            with world.span("product"):
                a @ b
    products = [e for e in trace.events if isinstance(e, Gemm)]
    assert sum(e.flops for e in products) == 2 * 64 * 32 * 48 // 8
    starts = [e for e in trace.events if isinstance(e, Start)]
    assert (len(starts), sum(e.nbytes for e in starts)) == (book.calls.total(), book.bytes.total())
    waits = [e.call for e in trace.events if isinstance(e, Wait)]
    assert sorted(waits) == [e.call for e in starts]
    assert [(e.name, e.begins) for e in trace.events if isinstance(e, Span)] == [("product", True), ("product", False)]
    assert {e.axes for e in starts} <= {("r",), ("c",), ("r", "c")}
    assert all(set(e.ranks) <= set(range(8)) and 3 in e.ranks for e in starts)


@pytest.mark.serial
def test_traces_have_the_bytes_of_the_ledger():
    """Of each operation, with blocks that no number of ranks divides; all ranks together send what they receive, but
    the root of a broadcast, which sends its block to one other."""
    received, sent = Counter(), Counter()
    for rank in range(3):
        with pla.imagine(3, rank) as world, pla.ledger(world.comm) as book, world.trace() as trace:
            comm, empty = world.comm, world.device.empty
            counts = [4, 2, 1]
            comm.all_gather(empty(counts[rank], "float64"), empty(7, "float64"), counts)
            comm.reduce_scatter(empty(7, "float32"), empty(counts[rank], "float32"), counts)
            comm.all_reduce(empty(7, "float64"))
            comm.broadcast(empty(5, "float64"), 1)
            comm.all_to_all(empty(6, "float64"), [1, 2, 3], empty(3 * (rank + 1), "float64"), [rank + 1] * 3)
        for op in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"):
            (start,) = [e for e in trace.events if isinstance(e, Start) and e.op == op]
            assert start.nbytes == book.bytes[op, ()], (rank, op)
            received[op] += start.nbytes
            sent[op] += start.sent * (2 if op == "broadcast" else 1)
    assert received == sent


@pytest.mark.serial
@pytest.mark.parametrize(("rank", "rows"), [(0, 1), (2, 0)])
def test_what_is_received_of_uneven_blocks(rank: int, rows: int):
    """One row over four ranks: the first has it and receives nothing; what the others receive is noted too."""
    with pla.imagine(4, rank) as world:
        grid = pla.Grid({"r": 4})
        with world.trace() as trace:
            a = pla.ones((1, 32), grid, pla.Layout("r", None), dtype="float64")
            pla.redistribute(a, pla.Layout(None, None))
    (start,) = [e for e in trace.events if isinstance(e, Start)]
    assert (start.op, start.nbytes, start.most) == ("all_gather", 256 * (1 - rows), 256)


# ------------------------------------------------------------------ what runs, and what is refused

GRID = {"data": 2, "r": 2, "c": 2}


def on_2d(kind: str, **options: Any) -> Any:
    return make(kind, schemes.discover()["2d"].SCHEME.with_data("data"), pla.Grid(GRID), **options)


@pytest.mark.one_in(3)
@pytest.mark.serial
@pytest.mark.parametrize("target", ["cpu", "gpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_models_run(kind, target):
    with pla.imagine(8, 5, target=target) as world, world.trace() as trace:
        loss_of(on_2d(kind, p=0.1)).backward()
    assert any(isinstance(e, Gemm) for e in trace.events)


@pytest.mark.serial
def test_masters_clipping_and_experts_run():
    with pla.imagine(8, 5, what_if=pla.WhatIf(norm=4.0)):
        model = on_2d("llama", dtype="bfloat16", num_local_experts=4, num_experts_per_tok=2)
        parameters = list(model.parameters())
        GradientReducer(parameters, [ZeRO(stage=1)])
        optimizer = optim.AdamW(parameters, master=True)
        loss_of(model).backward()
        assert clip_gradient_norm(parameters, 1.0) == pytest.approx(4.0)
        assert examine(parameters, 2.0) == (4.0, True)
        optimizer.step()
        state = optimizer.state_dict()
        assert state
        assert {name: value.shape for name, value in model.state_dict().items()}


@pytest.mark.serial
def test_generation_takes_the_assumed_token():
    with pla.imagine(8, 5, what_if=pla.WhatIf(token=7)):
        (found,) = nn.generate(on_2d("gpt"), [[1, 2]], max_new_tokens=3)
    assert found.tolist() == [1, 2, 7, 7, 7]


@pytest.mark.serial
def test_recomputation_runs():
    with pla.imagine(8, 5) as world:
        model = on_2d("gpt")
        nn.recompute(model)
        with world.trace() as trace:
            loss_of(model).backward()
        again = sum(e.flops for e in trace.events if isinstance(e, Gemm))
    with pla.imagine(8, 5) as world:
        model = on_2d("gpt")
        with world.trace() as trace:
            loss_of(model).backward()
        assert again > sum(e.flops for e in trace.events if isinstance(e, Gemm))


@pytest.mark.serial
def test_values_are_refused_by_name_and_line():
    with pla.imagine(4) as world:
        grid = pla.Grid({"r": 4})
        a = pla.ones((8, 8), grid, pla.Layout("r", None))
        with pytest.raises(pla.ValuesNeeded, match=r"conversion to a NumPy array .*test_imagined\.py:\d+"):
            np.asarray(a.block)
        with pytest.raises(pla.ValuesNeeded, match="the truth of an array"):
            bool(a.block[0, 0] > 0)
        with pytest.raises(pla.ValuesNeeded, match=r"number .*what_if=pla\.WhatIf\(number="):
            float(a.block[0, 0])
        with (
            pytest.raises(pla.ValuesNeeded, match=r"the truth of an array .*test_imagined\.py:\d+"),
            pla.imagine(4, what_if=pla.WhatIf()),
        ):
            bool((pla.ones((8, 8), pla.Grid({"r": 4})) > 0).all())
        with pytest.raises(pla.ValuesNeeded, match="differs by rank"):
            world.comm.share(world.rank)
        with pytest.raises(pla.ValuesNeeded, match="nonzero"):
            np.nonzero(a.block)
    with pla.imagine(8, 5):
        model = on_2d("gpt")
        GradientReducer(model.parameters())
        loss_of(model).backward()
        with pytest.raises(pla.ValuesNeeded, match="norm of the gradients"):
            clip_gradient_norm(model.parameters(), 1.0)


@pytest.mark.serial
@pytest.mark.parametrize("dtype", ["float64", "int64"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sort", "a sort along a dim that is cut"), ("argsort", "a sort along a dim that is cut"),
        ("unique_values", "a sort along a dim that is cut"), ("unique_all", "a sort along a dim that is cut"),
        ("median", "a median or quantile over a dim that is cut"),
        ("nonzero", r"the number of elements that each rank chooses|int\(\) of an array"),
    ],
)  # fmt: skip
def test_what_values_of_other_ranks_decide_is_refused(name, text, dtype):
    """Whole numbers keep their values, but those of other ranks are not known: no ledger is made up from them."""
    with pla.imagine(4):
        line = pla.ones((40,), pla.Grid({"r": 4}), pla.Layout("r"), dtype=dtype)
        with pytest.raises(pla.ValuesNeeded, match=rf"({text}) .*test_imagined\.py:\d+"):
            getattr(pla, name)(line)


@pytest.mark.serial
@pytest.mark.parametrize("dtype", ["float64", "int64"])
@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda x: pla.searchsorted(x, x), "a search in sorted values along a dim that is cut"),
        (lambda x: np.digitize(x, x), "a search in sorted values along a dim that is cut"),
        (lambda x: np.bincount(x.astype("int64")), "the number of bins of bincount of an array that is cut"),
        (lambda x: np.histogram(x, "sqrt"), "the number of bins of histogram by the rule 'sqrt' of an array that is"),
        (lambda x: np.histogram_bin_edges(x, "auto"), "the number of bins of histogram_bin_edges by the rule 'auto'"),
    ],
)  # fmt: skip
def test_what_values_of_other_ranks_count_is_refused(function, text, dtype):
    """The number of bins, and whom a rank asks where a value lies."""
    with pla.imagine(4, what_if=pla.WhatIf()):
        line = pla.ones((40,), pla.Grid({"r": 4}), pla.Layout("r"), dtype=dtype)
        with pytest.raises(pla.ValuesNeeded, match=rf"{text} .*test_imagined\.py:\d+"):
            function(line)


@pytest.mark.serial
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"ranks": 0}, "ranks of imagined ranks should be a whole number of at least 1, not 0"),
        ({"ranks": 4, "rank": 4}, "rank=4 is not among 4 imagined ranks"),
        ({"ranks": 4, "node": 0}, "node"),
        ({"ranks": 4, "target": "tpu"}, "target='tpu' cannot be imagined"),
    ],
)
def test_bad_worlds(given, text):
    with pytest.raises(pla.ConfigError, match=text), pla.imagine(**given):
        pass


@pytest.mark.serial
def test_grids_of_imagined_ranks():
    with pla.imagine(4):
        assert pla.Grid({"r": 4}).backend.name == "shapes"
        assert pla.Grid({"r": 4}, backend="numpy").backend.name == "shapes"
        with pytest.raises(pla.GridError, match="takes 3 ranks, but there are 4"):
            pla.Grid({"r": 3})
        with pytest.raises(pla.GridError, match="an imagined CPU"):
            pla.Grid({"r": 4}, backend="cupy")
    assert pla.Grid({"r": 1}).backend.name == "numpy"


@pytest.mark.serial
def test_moves_do_not_grow_in_number_with_the_blocks():
    calls = []
    for n in (1 << 12, 1 << 16):
        with pla.imagine(64, 9, node=8):
            grid = pla.Grid({"r": 8, "c": 8})
            a = pla.zeros((n, n), grid, pla.Layout("r", "c"))
            with pla.ledger(grid) as book:
                a.redistribute(pla.Layout("c", "r"))
            calls.append(book.calls.total())
    assert calls[1] <= 16 * calls[0]
    assert max(calls) < 400


# ------------------------------------------------------------------ trainings of a configuration

CONFIG = {"optimizer": {"name": "adamw", "lr": 1e-3}, "lr_schedule": {"name": "cosine"}, "clip_grad_norm": 1.0}
TRAININGS = {
    "ZeRO": {"zero": 1, "parallel": {"data": 2, "tensor": {"size": 2, "mode": "1d"}}},
    "offload": {"zero": 2, "parallel": {"data": 4}, "offload": {"optimizer": "host"}},
    "pipeline": {
        "parallel": {"data": 2, "pipeline": 2},
        "schedule": {"name": "1f1b", "microbatches": 2},
        "zero": 1,
    },
    "stage of two": {"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, "gradient_accumulation": 2},
    "16 bits": {"precision": "bfloat16", "parallel": {"data": 4}, "zero": 1},
}


def fit(comm: Any, config: dict[str, Any], traced: Any = None, **options: Any) -> Any:
    """The ledger of a training of two batches by a configuration, as a script of the user's has it."""
    with pla.launch({**CONFIG, **config}, comm, "auto") as mesh:
        sizes = {"hidden_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4, "seed": 1, **options}
        model = nn.GPT(
            vocab_size=53, max_position_embeddings=16, dtype="bfloat16" if "precision" in config else "float32",
            scheme=mesh.scheme, grid=mesh.grid, **sizes,
        )  # fmt: skip
        samples = np.random.default_rng(0).integers(0, 53, (2, 2, 8, 16))
        engine, feed, _, rate = pla.initialize(
            model, criterion=ops.cross_entropy_sum, train_dataloader=[tuple(each) for each in samples], mesh=mesh
        )
        with pla.ledger(mesh.world) as book, traced() if traced else nullcontext() as trace:
            pla.Trainer(engine, lr_scheduler=rate).fit(feed, epochs=1)
    return trace if traced else rows(book)


@pytest.mark.one_in(3)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", TRAININGS)
def test_ledgers_of_trainers_are_those_of_real_ranks(world, name):
    real = fit(world, TRAININGS[name])
    found = pla.imagine_together(
        lambda w: fit(w.comm, TRAININGS[name]), world.size, node=world.local_size, what_if=pla.WhatIf()
    )
    assert found[world.rank] == real


FORMS: list[dict[str, Any]] = [  # of 8 ranks
    {
        "zero": 1, "parallel": {"data": 2, "pipeline": 2, "tensor": {"size": 2, "mode": "1d"}},
        "schedule": {"name": "1f1b", "microbatches": 2},
    },
    {"zero": 2, "parallel": {"data": 2, "tensor": {"size": 4, "mode": "2d"}}},
    {"parallel": {"tensor": {"size": 8, "mode": "3d"}}},
    {"parallel": {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}},
    {"zero": 3, "parallel": {"data": 2, "sequence": {"size": 4, "ulysses": 2}}},
    {"zero": 1, "parallel": {"sequence": {"size": 8, "ulysses": 4}}},
    {"zero": 2, "parallel": {"data": 2, "sequence": 2, "tensor": {"size": 2, "mode": "1d"}}},
    {
        "zero": 3, "parallel": {"pipeline": 2, "sequence": {"size": 4, "ulysses": 2}},
        "schedule": {"name": "1f1b", "microbatches": 2},
    },
    {"parallel": {"data": 2, "pipeline": 4}, "schedule": {"name": "zb-h1", "microbatches": 4}},
]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.ranks(8)
@pytest.mark.parametrize("config", FORMS, ids=lambda config: str(config["parallel"]))
def test_ledgers_of_forms_of_training_on_8_ranks(world, config):
    real = fit(world, config)
    found = pla.imagine_together(lambda w: fit(w.comm, config), 8, node=world.local_size, what_if=pla.WhatIf())
    assert found[world.rank] == real


def of_16(name: str, **schedule: int) -> dict[str, Any]:
    """A pipeline of four stages under a schedule, with data and tensor parallelism and ZeRO."""
    parallel = {"data": 2, "pipeline": 4, "tensor": {"size": 2, "mode": "1d"}}
    return {"zero": 1, "parallel": parallel, "schedule": {"name": name, "microbatches": 4, **schedule}}


FORMS_OF_16: dict[str, dict[str, Any]] = {
    "data × 2d, ZeRO 2": {"zero": 2, "parallel": {"data": 4, "tensor": {"size": 4, "mode": "2d"}}},
    "data × pipeline × 2d, ZeRO 1": {
        "zero": 1, "parallel": {"data": 2, "pipeline": 2, "tensor": {"size": 4, "mode": "2d"}},
        "schedule": {"name": "1f1b", "microbatches": 2},
    },
    "data × pipeline × sequence × 1d": {
        "parallel": {"data": 2, "pipeline": 2, "sequence": 2, "tensor": {"size": 2, "mode": "1d"}},
        "schedule": {"name": "1f1b", "microbatches": 2},
    },
    "2.5d": {"parallel": {"tensor": {"size": 16, "mode": "2.5d", "depth": 4}}},
    "2.5d, depth on k": {"parallel": {"tensor": {"size": 16, "mode": "2.5d", "depth": 4, "depth_on": "k"}}},
    "3d": {"parallel": {"tensor": {"size": 16, "mode": "3d", "shape": [4, 2, 2]}}},
    "1d, sequence cuts": {"parallel": {"data": 4, "tensor": {"size": 4, "mode": "1d", "sequence_parallel": True}}},
    "ring × Ulysses, ZeRO 3": {"zero": 3, "parallel": {"data": 2, "sequence": {"size": 8, "ulysses": 2}}},
    "ring": {"parallel": {"sequence": 16}},
    "offload": {"zero": 2, "parallel": {"data": 16}, "offload": {"optimizer": "host"}},
    "gpipe": of_16("gpipe"), "1f1b": of_16("1f1b"), "interleaved": of_16("interleaved", chunks=2),
    "zb-h1": of_16("zb-h1"), "zb-v": of_16("zb-v"), "chimera": of_16("chimera"),
    **{name: {**of_16(name), "zero": 0, "clip_grad_norm": None} for name in ("pipedream", "pipedream-2bw")},
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.ranks(16)
@pytest.mark.parametrize("name", FORMS_OF_16)
def test_ledgers_of_forms_of_training_on_16_ranks(world, name):
    """Rank 0 imagines them all: 16 times 16 imagined ranks would take minutes."""
    config = FORMS_OF_16[name]
    model = {"num_hidden_layers": 8, "tie_word_embeddings": not name.startswith("pipedream")}
    real = world.share(repr(fit(world, config, **model)))
    if world.rank == 0:
        found = pla.imagine_together(
            lambda w: fit(w.comm, config, **model), 16, node=world.local_size, what_if=pla.WhatIf()
        )
        assert [repr(found[rank]) for rank in range(16)] == real


@pytest.mark.serial
def test_a_configuration_is_traced():
    config = {"parallel": {"data": 2, "pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, "zero": 1}
    traces = pla.imagine_together(
        lambda w: fit(None, config, w.trace), 16, classes=lambda rank: rank // 4 % 2, what_if=pla.WhatIf()
    )
    assert list(traces) == [0, 4]
    for rank, trace in traces.items():
        starts = [e for e in trace.events if isinstance(e, Start)]
        assert trace.rank == rank
        assert {"send", "receive", "all_gather"} <= {e.op for e in starts}
        assert any(isinstance(e, Gemm) for e in trace.events)
    assert sum(e.nbytes for e in traces[0].events if isinstance(e, Memory)) > 0


# ------------------------------------------------------------------ factorizations

DEALS = [  # grid, layout, layers
    ({"r": 2, "c": 2}, ("r", "c"), 1),
    ({"r": 4, "c": 1}, ("r", None), 1),
    ({"r": 1, "c": 4}, (None, "c"), 1),
    ({"r": 2, "c": 3}, ("c", "r"), 1),
    ({"d": 2, "r": 2, "c": 2}, ("r", ("c", "d")), 1),
    ({"d": 2, "r": 2, "c": 2}, ("r", "c"), 2),
    ({"r": 4, "c": 6}, (None, ("r", "c")), 1),
]


@pytest.mark.one_in(3)
@pytest.mark.serial
@pytest.mark.parametrize(("sizes", "cuts", "depth"), DEALS, ids=str)
@pytest.mark.parametrize("kind", ["square", "tall", "wide"])
def test_words_of_factorizations_are_those_of_the_formulas(sizes, cuts, depth, kind, monkeypatch):
    monkeypatch.setattr(matrices, "arrangement", lambda *_: kind)
    monkeypatch.setattr(matrices, "block_size", lambda *_: 16)
    layout, ranks = pla.Layout(*cuts), math.prod(sizes.values())
    dtype = np.dtype("complex64" if kind == "tall" else "float64")

    def check(routine, formula, *shape, depth=1):
        with pla.ledger(grid) as book:
            routine()
        costs = formulas.Costs(Deal(sizes, 16, kind, depth), dtype.itemsize, grid.world.size)
        words, calls = formula(costs).book(grid.rank)
        assert dict(book.calls) == dict(calls), (rank, shape)
        assert {key: n for key, n in book.words.items() if n} == {key: n for key, n in words.items() if n}, shape

    for rank, shape in itertools.product({0, ranks // 2, ranks - 1}, [(150, 150), (97, 97), (210, 66), (40, 140)]):
        (m, n), la = shape, pla.linalg
        with pla.imagine(ranks, rank, what_if=pla.WhatIf()):
            grid = pla.Grid(sizes)
            a, b = (pla.ones((m, k), grid, layout, dtype=dtype) for k in (n, 5))
            check(
                lambda: la.lu_factor(a, depth=depth),
                lambda c: formulas.lu_factor(c, layout, shape),
                *shape,
                depth=depth,
            )
            if depth == 1:
                check(lambda: la.lu(a), lambda c: formulas.lu(c, layout, shape), *shape)
                check(lambda: la.qr_factor(a), lambda c: formulas.qr_factor(c, layout, shape), *shape)
                check(lambda: la.qr(a), lambda c: formulas.qr(c, layout, shape), *shape)
                mode = "reduced" if rank == 0 else "r"
                check(
                    lambda: la.qr(a, mode=mode, pivoting=True),
                    lambda c: formulas.pivoted(c, layout, shape, mode=mode),
                    *shape,
                )
            if m == n:
                check(
                    lambda: systems.solved(a, b, depth),
                    lambda c: formulas.solve(c, layout, n, 5, layout),
                    n,
                    depth=depth,
                )
                check(lambda: la.cholesky(a, depth=depth), lambda c: formulas.cholesky(c, layout, n), n, depth=depth)
        trees = pla.WhatIf(conditioned=False)
        if depth == 1:
            with pla.imagine(ranks, rank, what_if=trees):
                grid = pla.Grid(sizes)
                a = pla.ones(shape, grid, layout, dtype=dtype)
                every = range(0, min(shape), 16) if Deal(sizes, 16, kind).R > 1 else ()
                check(lambda: la.qr_factor(a), lambda c: formulas.qr_factor(c, layout, shape, trees=every), *shape)


@pytest.mark.ranks(1, 4)
def test_ledgers_of_iterations_are_those_of_real_ranks(world):
    def program(grid, steps):
        a = pla.distribute(np.diag(np.arange(1.0, 46)), grid, pla.Layout("r", "c"))
        b = pla.distribute(np.ones((45, 3)), grid, pla.Layout("r", "c"))
        for pipelined in (False, True):
            pla.linalg.cg(a, b, rtol=0, maxiter=steps, pipelined=pipelined)

    sizes = {"r": 2, "c": 2} if world.size == 4 else {"r": 1, "c": 1}
    for steps in (1, 7):
        both(world, sizes, partial(program, steps=steps), what_if=pla.WhatIf(iterations=7))


@pytest.mark.serial
def test_factorizations_ask_what_to_assume():
    with pla.imagine(4, what_if=None):
        grid = pla.Grid({"r": 2, "c": 2})
        a = pla.ones((40, 40), grid, pla.Layout("r", "c"))
        pivoted = partial(pla.linalg.qr, pivoting=True)
        for routine in (pla.linalg.lu_factor, pla.linalg.qr, pivoted, pla.linalg.cholesky, pla.linalg.inv):
            with pytest.raises(pla.ValuesNeeded, match=r"test_imagined\.py:\d+.*what_if=pla\.WhatIf\("):
                routine(a)
    with pytest.raises(pla.ConfigError, match="pivots='none' is not known"):
        pla.WhatIf(pivots="none")


@pytest.mark.serial
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_of_16_bits_on_gpus(dtype):
    """Those of CPUs are cast to float32."""
    for target, expected in (("gpu", dtype), ("cpu", "float32")):
        with pla.imagine(ranks=4, target=target) as world:
            a = pla.ones((64, 64), pla.Grid({"r": 4}), pla.Layout("r", None), dtype=dtype)
            with world.trace() as trace:
                assert (a @ a).dtype.name == dtype
        assert [e.dtype for e in trace.events if isinstance(e, Gemm)] == [expected]


@pytest.mark.serial
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_products_of_large_experts_have_16_bits_on_gpus(dtype):
    """Each of the four products of two experts that a rank has is one of 16 bits; small ones go as a stack."""

    def dtypes(width):
        with pla.imagine(ranks=4, target="gpu", what_if=pla.WhatIf(routing="even")) as world:
            grid = pla.Grid({"data": 4})
            layer = nn.MixtureOfExperts(
                1024, width, 8, "data", grid, top_k=1, capacity_factor=1.0, axis="data", dtype=dtype, bias=False, seed=1
            )
            x = pla.ones((4, 1024, 1024), grid, pla.Layout("data", None, None), dtype=dtype)
            with world.trace() as trace:
                layer(pla.Tensor(x, requires_grad=True)).sum().backward()
        return [(e.batch, e.dtype) for e in trace.events if isinstance(e, Gemm) and width in (e.m, e.n, e.k)]

    assert dtypes(4096) == [(1, dtype)] * 12
    assert dtypes(64) == [(2, "float32")] * 6


@pytest.mark.serial
@pytest.mark.parametrize("rank", range(4))
def test_targets_are_counted_where_a_rank_has_few_or_none(rank):
    with pla.imagine(4, rank):
        targets = pla.zeros((5, 3), pla.Grid({"r": 4}), pla.Layout("r", None), dtype="int64")
        assert ops.count_targets(targets) == 15
        none = pla.zeros((2, 3), targets.grid, pla.Layout("r", None), dtype="int64")
        assert ops.count_targets(none) == 6


@pytest.mark.serial
def test_a_stage_of_one_rank_has_no_values() -> None:
    """Its grid is one of imagined ranks, and tells of no messages within."""

    def program(world):
        mesh = pla.launch({"parallel": {"pipeline": 2}})
        with world.trace() as trace, pla.ledger(mesh.grid) as book:
            a = pla.ones((64, 64), mesh.grid, pla.Layout(None, None), dtype="float32")
            total = (a @ a).sum(axis=0)
        names = [e.op for e in trace.events if isinstance(e, Start)]
        gemms = [e for e in trace.events if isinstance(e, Gemm)]
        return mesh.grid.backend.name, names, len(gemms), book.calls.total(), total.shape

    for told in pla.imagine_together(program, 2).values():
        assert told == ("shapes", [], 1, 0, (64,))


@pytest.mark.serial
@pytest.mark.parametrize("name", ["complex128", "float16", "bool", "bfloat16"])
def test_arrays_of_dtypes_from_elsewhere(name: str) -> None:
    """A dtype that was pickled, or whose byte order was set, is equal to NumPy's and another object."""
    with pla.imagine(ranks=2):
        grid = pla.Grid({"a": 2})
        kind = pla.zeros(2, grid, dtype=name).dtype
        block = grid.backend.empty((3, 2), pickle.loads(pickle.dumps(kind)))
    assert (block.dtype, block.nbytes) == (kind, 6 * kind.itemsize)


@pytest.mark.serial
@pytest.mark.parametrize("ring", [1, 2])
def test_attention_counts_the_pairs_that_are_seen(ring):
    """Causal attention of 16-bit floats over s tokens has s (s + 1) / 2 pairs, or on a ring a share of them that all
    ranks have alike: 2 products of them forward and 5 backward, and as many products of blocks of scores before it."""
    batch, length, heads, width = 2, 1536, 4, 16
    with pla.imagine(ring, what_if=pla.WhatIf(), target="gpu") as world:
        grid = pla.Grid({"s": ring})
        layout = pla.Layout(None, "s" if ring > 1 else None, None, None, None)
        x = pla.Tensor(pla.zeros((batch, length, heads, 3, width), grid, layout, "bfloat16"), requires_grad=True)
        order = pla.sequence_order(length, ring, "zigzag") if ring > 1 else None
        with world.trace() as trace:
            if ring > 1:
                y = ops.ring_attention(x, axis="s", causal=True, positions=order)
            else:
                y = ops.attention(x, causal=True)
            ops.sum(y).backward()
    kernels = [e for e in trace.events if isinstance(e, Attention)]
    flops = Counter[str]()
    for e in kernels:
        flops[e.name] += e.flops
        assert (e.width, e.given, e.dtype) == (width, "bfloat16", "float32")
    once = 2 * batch * heads * width * (length * (length + 1) // 2)
    shares = {name: n * ring / once for name, n in flops.items()}
    assert shares == pytest.approx({"attention.forward": 2, "attention.backward": 5}, rel=0 if ring == 1 else 1e-3)
    inside = [e for e in trace.events if isinstance(e, Gemm) and e.attention]
    assert {e.attention for e in inside} == {"bfloat16"}
    blocks = sum(2 * width * e.elements * (2 if e.name.endswith("forward") else 5) for e in kernels)
    assert flops.total() < blocks == sum(e.flops for e in inside)


@pytest.mark.serial
def test_rotary_tables_without_values_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cosines of 8,192 positions in each layer were most of the time of a Llama's trace."""
    with pla.imagine(1) as world:
        grid = pla.Grid({"a": 1})
        x = pla.zeros((1, 8, 2, 3, 16), grid, pla.Layout(None, None, None, None, None), "float32")
        monkeypatch.delattr(np, "cos")
        held = world.device.held
        y = ops.rotary(pla.Tensor(x, requires_grad=True))
        assert world.device.held == held + y.data.block.nbytes + 2 * 8 * 8 * 4  # cosines and sines are kept


def _fused(x: Any, target: str = "gpu", order: str | None = None, **options: Any) -> set[tuple[str, bool]]:
    """Return the passes of attention on an imagined device, and whether the library would fuse them."""
    shape, dtype = x
    with pla.imagine(2 if order else 1, what_if=pla.WhatIf(), target=target) as world:
        grid = pla.Grid({"s": world.size})
        layout = pla.Layout(None, "s" if order else None, None, None, None)
        x = pla.Tensor(pla.zeros(shape, grid, layout, dtype), requires_grad=True)
        with world.trace() as trace:
            if order:
                at = None if order == "contiguous" else pla.sequence_order(shape[1], 2, order)
                y = ops.ring_attention(x, axis="s", positions=at, **options)
            else:
                y = ops.attention(x, **options)
            ops.sum(y).backward()
    found: set[tuple[str, bool]] = set()
    inside: set[bool] = set()
    for e in trace.events:
        if isinstance(e, Gemm) and e.attention:
            inside.add(e.fused)
        elif isinstance(e, Attention):
            assert inside == {e.fused}  # as its products
            found.add((e.name.partition(".")[2], e.fused))
            inside = set()
    return found


LONG = (2, 256, 2, 3, 16)


@pytest.mark.serial
@pytest.mark.parametrize(
    ("shape", "options", "fused"),
    [
        (LONG, {}, True), (LONG, {"causal": True, "window": 40}, True), (LONG, {"order": "contiguous"}, True),
        (LONG, {"order": "contiguous", "causal": True}, True), (LONG, {"target": "cpu"}, False),
        (LONG, {"dtype": "float32"}, False), (LONG, {"keep_scores": True}, False), (LONG, {"window": 40}, False),
        (LONG, {"dropout": lambda shape, at: np.ones(shape)}, False), (LONG, {"documents": [100, 156]}, False),
        (LONG, {"mask": np.tri(256, dtype=bool)}, False), (LONG, {"key_padding": np.ones((2, 256), bool)}, False),
        (LONG, {"order": "zigzag", "causal": True}, False),
        ((2, 63, 2, 3, 16), {}, False), ((2, 64, 2, 3, 16), {}, True), ((2, 256, 2, 3, 12), {}, False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)  # fmt: skip
def test_traces_tell_where_attention_is_fused(shape: tuple[int, ...], options: dict[str, Any], fused: bool) -> None:
    """Where the library gives 16-bit attention on a GPU to cuDNN, and where products compute it."""
    options = dict(options)
    found = _fused((shape, options.pop("dtype", "bfloat16")), **options)
    assert found == {("forward", fused), ("backward", fused)}


@pytest.mark.serial
def test_traces_tell_of_each_piece_of_a_ring() -> None:
    """Striped: of a rank's own keys a query sees those up to its place, of another's one fewer, which cuDNN refuses."""
    found = _fused((LONG, "bfloat16"), order="striped", causal=True)
    assert found == {(name, fused) for name in ("forward", "backward") for fused in (True, False)}
