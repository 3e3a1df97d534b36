"""What `parlinalg doctor --machine` measures, with few and short points, and the errors of its path."""

from __future__ import annotations

import argparse
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from parlinalg.backend import kernels
from parlinalg.backend.numpy import NUMPY
from parlinalg.cli import doctor
from parlinalg.comm import Comm
from parlinalg.errors import ConfigError, OffloadError, counted
from parlinalg.planning import kernel_rates, link_times, measure
from parlinalg.planning.machine import OPERATIONS, STEPS, GemmRate, load_machine, machine_text, parse_machine


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few points, each measured for a moment."""
    monkeypatch.setattr(kernel_rates, "GEMMS", kernel_rates.GEMMS[:3])
    monkeypatch.setattr(kernel_rates, "ON_GPU", ())  # too large for the stand-in
    monkeypatch.setattr(kernel_rates, "SUMS", kernel_rates.SUMS[:2])
    monkeypatch.setattr(link_times, "RECEIVED", link_times.RECEIVED[:3])
    monkeypatch.setattr(kernel_rates, "POINT_SECONDS", 0.002)
    for name in ("ROWS", "ROWS_ON_GPU"):
        monkeypatch.setattr(kernel_rates, name, ((64, 256), (128, 256)))
    monkeypatch.setattr(kernel_rates, "SHORT", (48, 256))
    monkeypatch.setattr(kernel_rates, "FAR", 1 << 20)
    monkeypatch.setattr(link_times, "PASSES", 1)
    monkeypatch.setattr(link_times, "MORE_PASSES", 1)
    monkeypatch.setattr(link_times, "BESIDE_BYTES", 1 << 12)
    monkeypatch.setattr(link_times, "TURNS", 1)
    monkeypatch.setattr(link_times, "BESIDE_SUMS", (1 << 8, 1 << 12))
    monkeypatch.setattr(link_times, "WAIT_SECONDS", 0.02)
    monkeypatch.setattr(link_times, "TURN_SECONDS", (0.0005, 0.001))


FUSED = {"forward 64": 2e12, "backward 64": 1e12, "forward 128": 0.0, "backward 128": 0.0}


@pytest.mark.timeout(150)
def test_measured_machine(brief, world, backend, monkeypatch) -> None:
    monkeypatch.setattr(measure, "fused_attention_rates", lambda backend: FUSED)
    found = measure.measure_machine(world, "here")
    assert found.fused_attention == "library"
    assert parse_machine(machine_text(found), "here.toml").name == "here"
    points = len(found.gemm["float32"].points)
    assert points == 3 if backend == "numpy" else 1 <= points <= 3  # of a GPU those that take longer than a launch
    for name in ("exp", "norms.norm", "attention.forward"):
        rows = found.kernels.rates[name]
        assert isinstance(rows, tuple)
        assert all(elements >= 1 << 14 and rate > 1e6 for elements, rate in rows)
        assert len(rows) == (3 if name.startswith("attention") else 2)
    assert 1e-7 < found.kernels.overhead < 1e-2
    if backend == "numpy":  # on a GPU each copy is a launch, as any operation
        assert found.kernels.piece is not None
        assert 0 <= found.kernels.piece < 1e-2
    assert len(found.overlap.turns) == (len(link_times.TURN_SECONDS) if world.size > 1 else 0)
    assert 0 <= found.overlap.waiting <= 1
    assert 0 <= found.overlap.receiving <= 1
    if world.size > 1:
        link = found.node if found.network is None else found.network
        for op in OPERATIONS:
            rows = link.operation(op).points
            assert {p for p, _, _ in rows} >= {2}
            assert all(seconds > 0 for _, _, seconds in rows)
            p, nbytes, seconds = rows[-1]
            assert link.operation(op).beside >= 1
            assert link.operation(op).computing == 1 or found.network is not None
            on_node = p if found.network is None else found.ranks_per_node  # a point is of ranks that are alone there
            again = found.transfer(op, nbytes, p, p, on_node, world.size).total
            assert again == pytest.approx(seconds, rel=1e-6)
        beside, computing, delay = link_times._beside(world, NUMPY, world, "all_gather", world.size, across=True)
        assert beside > 0
        assert math.isfinite(computing)
        assert -1 < delay < 10
        assert link_times._beside(world, NUMPY, world, "all_gather", world.size, across=False)[1:] == (1.0, 0.0)
        assert 0 <= link_times.poll_slowdown(world, NUMPY) <= 10


def test_a_round_while_the_machine_is_slow_does_not_count(brief, world, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every point is measured in each of three rounds, one after all the others."""
    speeds, measured = iter((1.0, 0.5, 1.0)), []

    def rates(backend: object, dtype: str) -> dict[str, float]:
        measured.append(dtype)
        speed[0] = next(speeds) if dtype == "float64" else speed[0]
        return {"64 64 64": 1e10 * speed[0], "256 256 256": 2e10 * speed[0]}

    def costs(backend: object, gemm: GemmRate) -> dict[str, float]:
        measured.append("kernels")
        assert gemm.at(64, 64, 64) == pytest.approx(1e10 * speed[0])
        sums = {f"sum {n}": 1e9 * speed[0] for n in kernel_rates.SUMS}
        return {"call": 1e-6, "overhead": 1e-5 / speed[0], "rate exp 65536": 1e8 * speed[0], **sums}

    speed = [0.0]
    monkeypatch.setattr(measure, "product_rates", rates)
    monkeypatch.setattr(measure, "operation_costs", costs)
    gemm, _, found = measure._computation(world, NUMPY, True, False, "by hand")
    assert measured == ["float64", "float32", "kernels"] * 3
    assert gemm["float32"].points == ((64, 64, 64, 1e10), (256, 256, 256, 2e10))
    assert (found.bandwidth, found.overhead) == (1e9, 1e-5)
    assert found.points[0][1] == 1e9
    assert found.rates["exp"] == ((65536, 1e8),) or found.rates["exp"] == 1e8


@pytest.mark.serial
def test_operands_come_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets are used in turn, as many as have the bytes together, and each result lives until its set's next turn."""
    monkeypatch.setattr(kernel_rates, "FAR", 3 * 24)
    seen, alive = [], []

    def add(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        seen.append(a.ctypes.data)
        made = a + b
        alive.append(weakref.ref(made))
        return made

    call = kernel_rates._in_turn(add, NUMPY, [np.ones(1), np.ones(1)], 24)
    assert len(set(seen)) == len(seen) == 3
    call()
    assert seen[3] == seen[0]
    assert [ref() is not None for ref in alive] == [False, True, True, True]


def test_ranks_that_do_not_measure_are_asleep(world, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those at work tell the others what they found, and nothing is in flight meanwhile, nor polled in the barrier."""
    crowded, barrier = [], world.barrier
    monkeypatch.setattr(world, "all_reduce", None)
    monkeypatch.setattr(world, "barrier", lambda: (crowded.append(world.crowded), barrier()))
    before = world.crowded
    found = measure._agreed(world, world.rank == world.size - 1, lambda: {"a": 1.0 + world.rank})
    assert found == {"a": float(world.size)}
    assert crowded == [before, True]
    assert world.crowded == before


@pytest.mark.serial
@pytest.mark.parametrize(("sets", "nodes", "threads", "shared", "units", "at_work", "bound"), [
    ("3333", "0000", 1, False, 2, "1100", False),  # left to the system
    ("3333", "0123", 1, True, 2, "1100", False),  # on emulated nodes
    ("1212", "0123", 1, True, 2, "1100", True),
    ("1122", "0123", 1, True, 2, "1010", False),  # bound, though not in turn
    ("12", "00", 1, False, 2, "11", False),  # a core each
    ("1248", "0000", 1, False, 4, "1111", False),
    ("3c3c", "0000", 2, False, 2, "1100", True),
    ("3c3c", "0000", 1, False, 4, "1111", False),
])  # fmt: skip
def test_where_ranks_run(
    sets: str, nodes: str, threads: int, shared: bool, units: int, at_work: str, bound: bool
) -> None:
    """Each rank's cores and node; ranks with a core each compute at once, whoever bound them."""
    of = [["a", cores] for cores in sets]
    found = [measure._placed(of, [*map(int, nodes)], rank, threads) for rank in range(len(sets))]
    assert [row[:2] for row in found] == [(shared, units)] * len(sets)
    assert "".join(str(int(row[2])) for row in found) == at_work
    assert {row[3] for row in found} == {bound}
    two = [["a", cores] for cores in sets] + [["b", cores] for cores in sets]
    apart = [*map(int, nodes), *(int(n) + 10 for n in nodes)]
    assert measure._placed(two, apart, len(sets), threads) == (shared, *found[0][1:])


@pytest.mark.serial
def test_slowdown_is_that_of_polls_while_nothing_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of 2 ms, two products of 1 ms, a poll of 0.25 ms in each: 0.75 ms more than 4; the message is sent when
    all ranks have computed."""
    now, log = 0.0, list[str]()

    def takes(name: str, seconds: float = 0.0) -> Callable[..., None]:
        def call(*args: object) -> None:
            nonlocal now
            now += seconds
            log.append(name)

        return call

    polls, product, layers = takes("poll", 0.00025), takes("product", 0.001), takes("layers", 0.002)
    awaited = SimpleNamespace(test=polls, wait=takes("wait"))
    comm = SimpleNamespace(
        size=2, rank=0, barrier=takes("barrier"), send=takes("send"), share=lambda x: [x, 0.9 * x],
        receive=lambda token, source, wait: log.append(f"receive from {source}") or awaited,
    )  # fmt: skip
    backend = SimpleNamespace(
        zeros=np.zeros, xp=SimpleNamespace(matmul=product), synchronize=lambda: None, cuda=False, name="numpy"
    )
    monkeypatch.setattr(
        link_times, "small_layers", lambda grid: lambda: (layers(), [each.poll() for each in grid.polled])
    )
    for module in (kernel_rates, link_times):
        monkeypatch.setattr(module, "perf_counter", lambda: now)
    assert link_times.poll_slowdown(cast(Any, comm), cast(Any, backend)) == pytest.approx(0.75 / 4)
    begun, sent = log.index("receive from 1"), log.index("send")
    assert log[begun + 1 : begun + 7] == ["layers", "poll", "product", "poll", "product", "poll"]
    assert set(log[begun + 7 : sent - 1]) == {"layers", "product", "poll"}
    assert log[sent - 1 : sent + 2] == ["barrier", "send", "wait"]


@pytest.mark.serial
@pytest.mark.parametrize(("base", "more"), [(0.1, [0.06, 0.0]), (0.015, [0.01, 0.0]), (0.001, [])])
def test_a_call_that_takes_long_does_not_make_all_longer(
    base: float, more: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call after a barrier is slow, and one of three long ones; of two ranks one takes no part."""
    clock, round_calls = [0.0], [0]
    comm = SimpleNamespace(barrier=lambda: round_calls.__setitem__(0, 0), share=lambda seconds: [seconds, 1e-9])

    def call() -> None:
        at = round_calls[0]
        round_calls[0] += 1
        clock[0] += 3 * base if at == 0 else base + (more[at - 1] if at <= len(more) else 0.0)

    monkeypatch.setattr(link_times, "perf_counter", lambda: clock[0])
    assert link_times._together(cast(Comm, comm), call) == pytest.approx(base)


@pytest.mark.serial
def test_long_operations_are_measured_in_fewer_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a link of 200 Mbit/s, all up to the first that takes longer than a round, the two after it half as often."""
    asked: list[int] = []

    def takes(comm: Comm, call: Callable[[], None]) -> float:
        call()
        return asked[-1] / 25e6

    def received(group: Comm, backend: object, op: str, nbytes: int, size: int) -> tuple[Callable[[], None], int]:
        return partial(asked.append, nbytes), nbytes

    comm = SimpleNamespace(size=2, rank=0, nodes=(0, 1), share=lambda x: [x, x])
    comm.sub = lambda ranks, axes: SimpleNamespace(size=2, rank=0, free=lambda: None)
    monkeypatch.setattr(link_times, "_received", received)
    monkeypatch.setattr(link_times, "_together", takes)
    monkeypatch.setattr(link_times, "_beside", lambda *args: (1.0, 2.0, 0.25))
    monkeypatch.setattr(link_times, "_processor", lambda *args: 0.0)
    link = link_times.measured_link(cast(Any, comm), NUMPY, [0, 1], 1, "by hand", 1.0)
    assert link is not None
    assert [n for _, n, _ in link.operation("send").points] == list(link_times.RECEIVED)
    found = link.operation("all_gather")
    assert (found.beside, found.computing, found.delay) == (1.0, 2.0, 0.25)
    times = [asked.count(n) // len(OPERATIONS) for n in link_times.RECEIVED]
    long = sum(n / 25e6 > link_times.ROUND_SECONDS for n in link_times.RECEIVED) - 1
    assert (long, times) == (2, [4] * (len(times) - 2) + [2] * 2)


@pytest.mark.serial
def test_overhead_without_the_passes_between_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass follows each operation, forward and backward, and its time does not count."""
    passes = []

    def poll(self: kernel_rates.Passes) -> None:
        passes.append(self)
        self.seconds += 1.0

    monkeypatch.setattr(kernel_rates.Passes, "poll", poll)
    assert kernel_rates.overhead(NUMPY, GemmRate(1e15, "by hand")) < 1e-7
    assert len(passes) >= 4 * kernel_rates.CHAIN * 8  # four runs; norm, product, GELU and sum of each layer, both ways


@pytest.mark.serial
def test_pieces_are_packed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is packed whole, its pieces in order, and the time is that of one of them."""
    packed = []

    def called(pack: Callable[[np.ndarray], np.ndarray], backend: object, arrays: list[np.ndarray], nbytes: int) -> str:
        rows, width = kernel_rates.PIECE
        block = np.arange(arrays[0].size, dtype=np.float32).reshape(arrays[0].shape)
        packed.append(pack(block).reshape(kernel_rates.CHAIN, rows, width))
        assert np.array_equal(np.concatenate(list(packed[0]), axis=1), block)
        assert nbytes == 2 * block.nbytes
        return "the call"

    monkeypatch.setattr(kernel_rates, "_in_turn", called)
    monkeypatch.setattr(kernel_rates, "seconds_of", lambda call, backend: 4.0 * (call == "the call"))
    assert kernel_rates.piece_seconds(NUMPY) == 4.0 / kernel_rates.CHAIN
    assert len(packed) == 1


@pytest.mark.serial
def test_fused_attention_without_a_backward_kernel_has_no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal takes no time, and is no rate."""
    monkeypatch.setattr(kernel_rates, "ATTENTION", (1, 64, 128))
    monkeypatch.setattr(kernel_rates.cudnn, "attention", lambda q, k, v, band, scale: (q, np.zeros(q.shape[:-1])))
    monkeypatch.setattr(kernel_rates.cudnn, "attention_grad", lambda dout, q, *others: q.shape[-1] == 64)
    monkeypatch.setattr(kernel_rates, "seconds_of", lambda call, backend: 0.5)
    backend = SimpleNamespace(cuda=True, from_host=lambda x: x, xp=np)
    found = kernel_rates.fused_attention_rates(cast(Any, backend))
    pairs = 128 * 64 * 65 // 2
    assert found == {"forward 64": 8.0 * pairs, "backward 64": 20.0 * pairs, "forward 128": 0.0, "backward 128": 0.0}
    (rates,) = kernel_rates.fused_table(found, "by hand").values()
    assert (rates.forward, rates.backward) == (((64.0, 8.0 * pairs),), ((64.0, 20.0 * pairs),))
    assert kernel_rates.fused_table(dict.fromkeys(found, 0.0), "by hand") == {}


@pytest.mark.serial
def test_scores_and_products_of_attention() -> None:
    """Causal attention of 2 × 4 heads over 16 tokens in one block: both products of all scores, in the given time."""
    samples = {name: a.astype(np.float32) for name, a in kernels.samples(16, 8).items()}
    example = next(e for e in kernels.examples() if e.name == "attention, causal")
    found = kernel_rates._attention(example, samples, GemmRate(1e9, "by hand"), 0.0)
    scores, seconds = found["attention.forward"]
    assert scores == 8 * 16 * 16
    assert seconds == pytest.approx(2 * 2 * scores * 64 / 1e9)
    other = next(e for e in kernels.examples() if not e.name.startswith("attention"))
    assert kernel_rates._attention(other, samples, GemmRate(1e9, "by hand"), 0.0) == {}


@pytest.mark.serial
def test_kernels_within_kernels_are_not_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """And calls are as before once all are timed, also if one fails."""

    def inner(x: Any) -> Any:
        return x + 1

    def outer(x: Any) -> Any:
        if failing:
            raise ArithmeticError
        return kernels.Kernel(inner, 1)(x)

    failing: list[bool] = []
    example = kernels.Example("both", lambda x: kernels.Kernel(outer, 1)(kernels.Kernel(inner, 1)(x)), ("x",))
    monkeypatch.setattr(kernels, "examples", lambda: [example])
    monkeypatch.setattr(kernels, "samples", lambda rows, width: {"x": np.ones((rows, width))})
    monkeypatch.setattr(kernel_rates, "FAR", 1 << 20)
    calls: list[str] = []

    def clock(backend: Any) -> Callable[[Callable[[], None]], float]:
        def timed(call: Callable[[], None]) -> float:
            calls.append("timed")
            call()
            return 2.0

        return timed

    monkeypatch.setattr(kernel_rates, "DeviceClock", clock)
    found = kernel_rates._timed_kernels(NUMPY, 128, 256, GemmRate(1e9, "by hand"), 0.0)
    assert sorted(found.values()) == [2.0, 2.0]
    assert len(calls) == 2 * kernel_rates.CALLS_OF_KERNELS
    assert {name.rpartition(".")[2] for name, _ in found} == {"inner", "outer"}
    assert kernels.Kernel.around is None
    failing.append(True)
    with pytest.raises(ArithmeticError):
        kernel_rates._timed_kernels(NUMPY, 128, 256, GemmRate(1e9, "by hand"), 0.0)
    assert kernels.Kernel.around is None


@pytest.mark.serial
def test_rates_by_size() -> None:
    found = {"rate exp 10": 3.0, "rate exp 5": 2.0, "overhead": 1.0, "rate a.b 7": 4.0}
    assert kernel_rates.rate_rows(found) == {"exp": ((5.0, 2.0), (10.0, 3.0)), "a.b": ((7.0, 4.0),)}


@pytest.mark.serial
def test_steps_are_found() -> None:
    """Latencies that grow with the ranks less one are a ring's; bytes reach a share of the bandwidth."""
    for steps, count in STEPS.items():
        rows = [(p, n, 1e-5 * count(p) + n / 5e8) for p in (2, 4, 8, 16) for n in (8.0, 1e6)]
        found = link_times._operation(rows, 1e9).algorithms[0]
        assert found.steps == {"there and back": "ring"}.get(steps, steps)  # twice as many steps of a ring
        assert found.latency * STEPS[found.steps](8) == pytest.approx(1e-5 * count(8), rel=0.01)
        assert found.efficiency == pytest.approx(0.5, rel=0.01)


@pytest.mark.serial
def test_formula_of_products_is_found() -> None:
    shapes = [(m, n, k) for m in (8, 64, 1024) for n in (8, 64, 1024) for k in (8, 64, 1024)]
    rates = {f"{m} {n} {k}": 1e11 * m / (m + 16) * n / (n + 8) * k / (k + 32) for m, n, k in shapes}
    found = kernel_rates.fitted_products(rates, "by hand")
    assert found.rate == pytest.approx(1e11)
    assert found.half == (16, 8, 32)


@pytest.mark.serial
def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    def run(machine: Path | None, disk: Path | None = None) -> None:
        doctor.run(argparse.Namespace(clean=False, gpu=False, machine=machine, disk=disk))

    with pytest.raises(ConfigError, match=r"the name of a machine's file ends with \.toml"):
        run(tmp_path / "here.json")
    with pytest.raises(ConfigError, match=r"cannot write .*here.toml: No such file or directory"):
        run(tmp_path / "no" / "here.toml")
    with pytest.raises(ConfigError, match=r"--disk .* is measured for a machine's file: add --machine FILE.toml"):
        run(None, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError, match=r"the offload folder .*file cannot be used: .*give path= a folder"):
        run(tmp_path / "here.toml", tmp_path / "file")
    assert load_machine("laptop").cores == 2


@pytest.mark.ranks(1, 2)
def test_a_disk_is_measured(world, mpi_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "DISK_FILE", 1 << 22)
    monkeypatch.setattr(measure, "DISK_TILE", 1 << 20)
    found = measure.measure_disk(world, mpi_tmp_path)
    assert found.read > 1e4
    assert found.write > 1e4
    assert found.size > 1 << 20
    assert f"on {counted(world.size, 'rank')} at once" in found.source
    assert not list(mpi_tmp_path.iterdir())
    laptop = replace(load_machine("laptop"), disk=found)
    assert parse_machine(machine_text(laptop)).disk.size == found.size


@pytest.mark.parametrize("op", OPERATIONS[:3])
def test_parts_of_operations_are_powers_of_two(op: str) -> None:
    for size in (2, 4, 8):
        for nbytes in link_times.RECEIVED:
            _, received = link_times._received(cast(Comm, SimpleNamespace(size=size)), NUMPY, op, nbytes, size)
            part = received // (size - 1) // (2 if op == "all_reduce" else 1)
            assert part.bit_count() == 1
            assert part == 8 or 0.7 < received / nbytes < 1.5


def test_a_time_in_which_all_took_long_does_not_get_in() -> None:
    """Short messages among 4 ranks took ten times as long as those among 8: they count as these do at most."""
    usual = [(p, n * (p - 1) // p, 1e-4 * p + 1e-8 * n) for p in (2, 4, 8) for n in (512, 4096, 1 << 20)]
    slow = [(p, n, 1e-2 if p == 4 and n < 10**4 else s) for p, n, s in usual]
    found = link_times._operation(slow, 1e8)
    by_place = {(p, n): s for p, n, s in found.points}
    assert all(s <= 1.001 * by_place[p, n] for p, n, s in usual)
    assert all(by_place[p, n] == s for p, n, s in usual if p != 4)
    assert by_place[4, 384] == by_place[8, 448]
    assert found.algorithms[0].latency < 1e-3
