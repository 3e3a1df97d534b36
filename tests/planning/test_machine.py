"""Machines: the shipped files, what their figures mean, and the errors of wrong ones."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parlinalg.errors import ConfigError
from parlinalg.planning.machine import (
    DISK_READ,
    DISK_WRITE,
    FOLDER,
    OPERATIONS,
    Algorithm,
    Machine,
    Operation,
    load_machine,
    machine_text,
    machines,
    parse_machine,
)
from parlinalg.planning.trace import Attention, Gemm, Kernel
from tests.planning.machines import round_machine, text

pytestmark = pytest.mark.serial


@pytest.mark.parametrize("name", machines())
def test_shipped(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert load_machine(FOLDER / f"{name}.toml") == machine
    assert parse_machine(machine_text(machine)) == machine
    sources = [*(g.source for g in machine.gemm.values()), machine.kernels.source, machine.node.source]
    sources += [each.source for each in (machine.overlap, machine.host, machine.disk) if each is not None]
    assert all(len(source.split()) >= 3 for source in sources)
    assert {"float64", "float32"} <= machine.gemm.keys()
    large = machine.gemm_seconds(Gemm(1, 4096, 4096, 4096, "float32"))
    assert 2 * 4096**3 / large <= 1.2 * machine.peak("float32")
    for op in OPERATIONS:
        times = [machine.transfer(op, n, 2, 2, 2, 2).total for n in (8, 10**4, 10**6, 10**8)]
        assert 0 < times[0] <= times[-1] < math.inf


def test_rows_may_stand_in_any_order() -> None:
    """Rates of kernels, and waits for turns, are looked up among rows in the order of their sizes."""
    rows, turns = [[10, 1e4], [1000, 1e6], [100, 1e5]], [[4e-3, 4e-4], [1e-3, 1e-4], [2e-3, 3e-4]]
    tables = [
        text(slowdown=f"0.0\nturns = {sorted(waits) if s else waits}")
        .replace("[kernels]", f"[kernels]\nrates = {{ exp = {sorted(rates) if s else rates} }}")
        for s in (False, True) for rates, waits in [(rows, turns)]
    ]  # fmt: skip
    found, ordered = map(parse_machine, tables)
    assert found == ordered
    assert found.kernel_seconds(Kernel("exp", 0, 100, "float32")) == 1e-3
    assert found.overlap.turn(2e-3) == 3e-4


def test_names_of_shipped_machines() -> None:
    assert {"a100", "h100", "v100", "laptop", "hosts_200mbit", "hosts_1gbit"} <= set(machines())


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("rate = 1e9", "rate = 2e18", "m.toml: gemm.float32.rate = 2e.18: it should be .* at most 1e.18"),
        ("rate = 1e9", f"rate = 1{'0' * 400}", "m.toml: gemm.float32.rate = 10.*: it should be .* at most 1e.18"),
        ("rate = 1e9", "rate = -3", "m.toml: gemm.float32.rate = -3: it should be .* more than 1e.06"),
        ("rate = 1e9", 'rate = "fast"', "m.toml: gemm.float32.rate = 'fast': it should be a number"),
        ("rate = 1e9", "rate = nan", "m.toml: gemm.float32.rate = nan: it should be a number"),
        ("rate = 1e9\n", "", "m.toml: gemm.float32.rate is missing: the operations a second of large products"),
        ("rate = 1e9", "rate = 1e9\nrats = 2", "m.toml: gemm.float32.rats is no key of a machine; did you mean rate"),
        ("[[1000, 1000, 500, 1e9]]", "[[1, 2, 3]]", r"gemm.float32.points\[0\] = \[1, 2, 3\]: .* list of 4 num"),
        ("cores = 64", "cores = 0", "m.toml: cores = 0: it should be .* a whole number from 1"),
        ("cores = 64", "cores = 2.5", "m.toml: cores = 2.5: it should be .* a whole number"),
        ('memory = "1GiB"', "memory = -1", "m.toml: memory = -1: it should be the memory of a rank"),
        ('memory = "1GiB"', 'memory = "lots"', "m.toml: memory = 'lots': it should be the memory of a rank"),
        ("float32", "float31", "gemm.float31: rates are those of the dtypes float64, float32, bfloat16, float16"),
        (
            "latency = 0.0",
            'latency = 0.0\nsend.algorithms = [{ steps = "one", latency = 0.0, efficiency = 5e-324 }]',
            r"node.send.algorithms\[0\].efficiency = 5e-324: it should be a share of the bandwidth, at least 1e-06",
        ),
        (
            "rate = 1e9",
            "rate = 1e9\ntiles = [[128, 128, 1e-300]]",
            r"gemm.float32.tiles\[0\]\[2\] = 1e-300: it should be a share of the rate, at least 1e-06",
        ),
        ("latency = 0.0", "latency = 5", "node.latency = 5: it should be seconds, .* at most 1, such as 5e-6 for 5 µs"),
        ("overhead = 0.0", "overhead = 2", "kernels.overhead = 2: it should be seconds, .* such as 5e-6 for 5 µs"),
        ("bandwidth = 1e6", "bandwidth = 25", r"bandwidth = 25: it should be bytes a second, .* 3.1e9 for 25 Gbit/s"),
        ('memory = "1GiB"\n', "", r"m.toml: memory is missing: .*; it stands above the first \[table\]"),
        (
            "latency = 0.0",
            'latency = 0.0\nsend = "ring"',
            "node.send = 'ring': it should be a table with .* algorithms",
        ),
        ('progress = "asynchronous"', 'progress = "never"', 'overlap.progress = .never.: .* "asynchronous", "polls"'),
        ("asynchronous = false", "asynchronous = 0", "kernels.asynchronous = 0: it should be true or false"),
        ("[overlap]", "[overlay]", "m.toml: overlay is no key of a machine; did you mean overlap"),
        ("[node]", "[node.send]\n[node]", "m.toml is no TOML|node"),
        ('name = "round"', f"name = {'[' * 5000}{']' * 5000}", "m.toml has lists within lists too deeply"),
        (
            "slowdown = 0.0",
            "turns = [[0.0, 1e-4]]",
            r"overlap.turns\[0\]\[0\] = 0.0: it should be seconds, more than 0",
        ),
        ("slowdown = 0.0", "turns = [[1e-3, 0]]", r"overlap.turns\[0\]\[1\] = 0: it should be seconds, more than 0"),
        ("rate = 1e9", "rate = ", "m.toml is no TOML: "),
        ('name = "round"', 'name = " "', "m.toml: name = ' ': it should be a text that is not empty"),
    ],
)
def test_wrong_files(old: str, new: str, words: str) -> None:
    right = text()
    assert old in right
    with pytest.raises(ConfigError, match=words):
        parse_machine(right.replace(old, new, 1), "m.toml")


def test_a_file_may_begin_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    """Editors on Windows write one."""
    path = tmp_path / "m.toml"
    path.write_text(text(), encoding="utf-8-sig")
    assert load_machine(path) == parse_machine(text())


def test_names_in_other_letters_and_files_without_their_ending_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(text())
    for name, right in (("H100", "h100"), ("mine", "mine.toml")):
        with pytest.raises(ConfigError, match=rf"no machine '{name}' \(did you mean {right}\?\)"):
            load_machine(name)


@pytest.mark.parametrize("name", machines())
def test_times_of_operations_do_not_depend_on_what_was_asked_before(name: str) -> None:
    machine = load_machine(name)

    def seconds(machine: Machine, size: int) -> float:
        on_node = machine.ranks_on_node(size)
        return machine.transfer("all_gather", 1e5, 2, min(2, on_node), on_node, size).total

    times = {size: seconds(machine, size) for size in (2, 64, 8)}
    assert times == {size: seconds(load_machine(name), size) for size in times}


DISK = 'read = 1e6\nwrite = 5e5\nsize = "4GiB"\nsource = "by hand"\n'


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("read = 1e6\n", "", "m.toml: disk.read is missing: bytes a second that a rank reads while all ranks"),
        ("read = 1e6", "read = 2e15", "m.toml: disk.read = 2.*: it should be bytes a second of a disk, .* 1e.12"),
        ("write = 5e5", "write = 0", "m.toml: disk.write = 0: it should be bytes a second of a disk, at least"),
        ("write = 5e5", 'write = "fast"', "m.toml: disk.write = 'fast': it should be a number"),
        ('size = "4GiB"', "size = 12", "m.toml: disk.size = 12: it should be the space on the disk of a rank"),
        ('source = "by hand"\n', "", "m.toml: disk.source is missing"),
        ("size", "sise", "m.toml: disk.sise is no key of a machine; did you mean size"),
    ],
)
def test_wrong_disks(old: str, new: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_machine(f"{text()}\n[disk]\n{DISK.replace(old, new)}", "m.toml")


def test_a_disk_is_read_and_written_at_its_rates() -> None:
    machine = parse_machine(f"{text()}\n[disk]\n{DISK}")
    assert parse_machine(machine_text(machine)) == machine
    seconds = [machine.kernel_seconds(Kernel(name, 10**6, 1, "uint8")) for name in (DISK_READ, DISK_WRITE)]
    assert seconds == [1, 2]
    shared = machine.shared_by(8)  # four times the ranks that the node is meant for
    assert shared.kernel_seconds(Kernel(DISK_READ, 10**6, 1, "uint8")) == 4
    assert shared.disk is not None
    assert shared.disk.size == 1 << 30
    assert machine.shared_by(1) == machine


FUSED = 'forward = [[64, 1e7], [128, 2e7]]\nbackward = [[64, 5e6]]\nsource = "by hand"\n'


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("bfloat16", "float32", "m.toml: attention.float32: a fused kernel takes the dtypes bfloat16, float16"),
        ("forward = [[64, 1e7], [128, 2e7]]\n", "", r"m.toml: attention.bfloat16.forward is missing: rows features"),
        ("[[64, 5e6]]", "[]", r"m.toml: attention.bfloat16: forward and backward need a row at least, such as"),
        ("[64, 5e6]", "[64]", r"m.toml: attention.bfloat16.backward\[0\] = \[64\]: it should be a list of 2 numbers"),
    ],
)
def test_wrong_fused_attention(old: str, new: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_machine(f"{text()}\n[attention.bfloat16]\n{FUSED}".replace(old, new, 1), "m.toml")


def test_fused_attention_has_its_rates() -> None:
    """By the features of a head, between rows by logarithm; no faster than its bytes pass through memory; 16 bits."""
    machine = parse_machine(f"{text()}\n[attention.bfloat16]\n{FUSED}")
    assert not machine.fuses("bfloat16")
    fused = machine.with_fused_attention()
    assert parse_machine(machine_text(fused)) == fused
    assert [fused.fuses(dtype) for dtype in ("bfloat16", "float16", "float32", "")] == [True, True, False, False]
    library = machine.with_fused_attention("library")
    assert parse_machine(machine_text(library)) == library
    assert [library.fuses("bfloat16", own) for own in (True, False)] == [True, False]
    assert [fused.fuses("bfloat16", own) for own in (True, False)] == [True, True]

    def seconds(name: str, flops: int, width: int, nbytes: int = 8, given: str = "float16") -> float:
        event = Attention(f"attention.{name}", nbytes, 4, "float32", flops, width, given)
        return fused.kernel_seconds(event)

    assert [seconds("forward", 10**7, width) for width in (32, 64, 128, 256)] == pytest.approx([1, 1, 0.5, 0.5])
    assert seconds("forward", 10**7, 90) == pytest.approx(64 / 90)
    assert seconds("backward", 10**7, 128) == 2
    assert seconds("forward", 10**6, 128, 3 * 10**6) == 3
    assert seconds("forward", 10**6, 64, given="float32") == seconds("forward", 0, 64)
    with pytest.raises(ConfigError, match=r"round has no rates of fused attention: add a table \[attention.bfloat16\]"):
        round_machine().with_fused_attention()
    for where in ("true", '"library"'):
        with pytest.raises(ConfigError, match="round has no rates of fused attention"):
            parse_machine(f"fused_attention = {where}\n{text()}")
    with pytest.raises(ConfigError, match=r"""m.toml: fused_attention = 'own': it should be true .*"library" """):
        parse_machine(f'fused_attention = "own"\n{text()}', "m.toml")


def test_what_names_no_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match="machine=5 is no name of a machine, no path of its file and no Machine"):
        load_machine(5)  # type: ignore[arg-type]


def test_machines_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no machine 'a10' \(did you mean .*100\?\): shipped are a100"):
        load_machine("a10")
    with pytest.raises(ConfigError, match=r"cannot read the machine file .*none.toml: No such file"):
        load_machine(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="it is a folder"):
        load_machine(f"{tmp_path}/")
    (tmp_path / "m.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is no TOML"):
        load_machine(tmp_path / "m.toml")


def test_rates_of_products() -> None:
    bare = text().replace("points = [[1000, 1000, 500, 1e9]]\n", "").replace("bandwidth = 1e6", "bandwidth = 1e9")
    halved = parse_machine(bare.replace("rate = 1e9", "rate = 1e9\nhalf = [10, 0, 30]"))
    assert halved.gemm["float32"].at(10, 5, 30) == pytest.approx(0.25e9)
    assert halved.gemm_seconds(Gemm(3, 10, 5, 30, "float32")) == pytest.approx(3 * 2 * 10 * 5 * 30 / 0.25e9)
    assert halved.gemm_seconds(Gemm(3, 10, 0, 30, "float32")) == 0
    measured = parse_machine(bare.replace("rate = 1e9", "rate = 1e9\npoints = [[64, 64, 64, 5e8], [512, 64, 64, 2e9]]"))
    rates = measured.gemm["float32"]
    assert (rates.at(64, 64, 64), rates.at(512, 64, 64)) == (pytest.approx(5e8), pytest.approx(2e9))
    assert 5e8 < rates.at(181, 64, 64) < 2e9  # halfway between them
    assert rates.at(1e6, 1e6, 1e6) == pytest.approx(1e9, rel=0.05)  # far from both
    slow = parse_machine(bare.replace("bandwidth = 1e9", "bandwidth = 1e6"))
    assert slow.gemm_seconds(Gemm(1, 1, 1000, 1000, "float32")) == pytest.approx(4 * (10**6 + 2000) / 1e6)


def test_dtypes_computed_alike() -> None:
    machine = round_machine()
    assert machine.gemm_seconds(Gemm(1, 10, 10, 10, "complex64")) == pytest.approx(8e-6)
    assert machine.gemm_seconds(Gemm(1, 10, 10, 10, "float16")) == pytest.approx(2e-6)
    with pytest.raises(ConfigError, match=r"round has no rate of products in float64, only in float32: add .*float64"):
        machine.gemm_seconds(Gemm(1, 10, 10, 10, "float64"))


def test_rates_of_kernels() -> None:
    given = "bandwidth = 1e6\npoints = [[100, 4e6], [10000, 1e6]]\nrates = { exp = 1.5e3 }"
    machine = parse_machine(text().replace("bandwidth = 1e6", given, 1))
    assert machine.kernel_seconds(Kernel("add", 50, 1, "float32")) == pytest.approx(50 / 4e6)
    assert machine.kernel_seconds(Kernel("add", 1000, 1, "float32")) == pytest.approx(1000 / 2e6)
    assert machine.kernel_seconds(Kernel("add", 10**6, 1, "float32")) == pytest.approx(1)
    assert machine.kernel_seconds(Kernel("exp", 1000, 750, "float32")) == pytest.approx(0.5)


def test_measured_rates_of_kernels() -> None:
    """Rates hold at measured sizes, between them the mean of logarithms, beyond them the last; bytes add nothing."""
    given = 'bandwidth = 1e6\nrates = { "norms.norm" = [[100, 4e5], [10000, 1e5]] }'
    machine = parse_machine(text().replace("bandwidth = 1e6", given, 1))
    for elements, rate in ((50, 4e5), (100, 4e5), (1000, 2e5), (10000, 1e5), (10**6, 1e5)):
        seconds = machine.kernel_seconds(Kernel("norms.norm", 10**9, elements, "float32"))
        assert seconds == pytest.approx(elements / rate)
    assert machine.kernel_seconds(Kernel("add", 10**6, 1, "float32")) == pytest.approx(1)
    assert parse_machine(machine_text(machine)) == machine
    with pytest.raises(ConfigError, match=r"kernels.rates.norms.norm\[0\] = \[100\]: .* a list of 2 numbers"):
        parse_machine(text().replace("bandwidth = 1e6", 'bandwidth = 1e6\nrates = { "norms.norm" = [[100]] }', 1))


def test_measured_collectives() -> None:
    """At a measured point the point holds, near it too, and on the link of one rank a node only."""
    ways = '[{ steps = "ring", latency = 0.1, efficiency = 0.5 }]'
    way = f"all_gather = {{ algorithms = {ways}, points = [[4, 100000, 3.0]] }}"
    machine = parse_machine(text().replace("[overlap]", f"{way}\n\n[overlap]"))
    bare = parse_machine(text().replace("[overlap]", f"{way.partition(', points')[0]} }}\n\n[overlap]"))
    assert bare.transfer("all_gather", 10**5, 4, 1, 1, 4).total == pytest.approx(3 * 0.1 + 2)
    assert machine.transfer("all_gather", 10**5, 4, 1, 1, 4).total == pytest.approx(3)
    assert machine.transfer("all_gather", 1.1e5, 4, 1, 1, 4).total == pytest.approx(3 / 2.3 * 2.5, rel=0.01)
    shared = [m.transfer("all_gather", 10**5, 4, 2, 2, 4).total for m in (machine, bare)]
    assert shared[0] == shared[1]


def test_the_fastest_algorithm_counts() -> None:
    ways = '[{ steps = "log", latency = 0.1, efficiency = 0.5 }, { steps = "ring", latency = 0.1 }]'
    machine = parse_machine(text().replace("[overlap]", f"all_gather = {{ algorithms = {ways} }}\n\n[overlap]"))
    assert machine.transfer("all_gather", 100, 8, 1, 1, 8).latency == pytest.approx(0.3)
    assert machine.transfer("all_gather", 10**6, 8, 1, 1, 8).total == pytest.approx(0.7 + 10)


def test_a_rank_has_no_more_than_its_bandwidth() -> None:
    """However many of a node's interfaces are free, and a part of it where others share them."""
    machine = round_machine(ranks_per_node=8, rails=4)
    for ranks, seconds in ((2, 1.0), (4, 1.0), (8, 2.0)):
        assert machine.transfer("all_gather", 10**6, ranks, ranks, ranks, ranks).seconds == pytest.approx(seconds)


@pytest.mark.parametrize(("ranks", "steps"), [(2, 1), (3, 2), (4, 2), (6, 3), (9, 4)])
def test_short_messages_of_any_number_of_ranks(ranks: int, steps: int) -> None:
    """A tree over p ranks is log2 p high, rounded up; a sum goes up and down."""
    machine = round_machine(ranks_per_node=16, latency=0.5)
    for op, times in (("broadcast", 1), ("all_gather", 1), ("all_reduce", 2)):
        assert machine.transfer(op, 1e-9, ranks, ranks, ranks, ranks).latency == pytest.approx(0.5 * steps * times)


def test_steps_between_nodes_and_within() -> None:
    """A ring over 3 nodes of 2 ranks has five steps, two of them between nodes."""
    ring = '{ algorithms = [{ steps = "ring", latency = 0.001 }] }'
    machine = parse_machine(text(latency=0.01).replace("[network]", f"all_gather = {ring}\n[network]"))
    network = replace(machine.network, all_gather=Operation((Algorithm("ring", 0.1),)))
    machine = replace(machine, network=network)
    assert machine.transfer("all_gather", 1e-9, 6, 2, 2, 6).latency == pytest.approx(2 * 0.1 + 3 * 0.001)


def test_transport_takes_longer_of_a_core_that_others_share() -> None:
    for cores, times in ((2, 1), (1, 2)):
        machine = round_machine(ranks_per_node=2, cores=cores, processor=1e-6)
        assert machine.transfer("all_gather", 10**5, 2, 1, 2, 4).processor == pytest.approx(0.1 * times)


def test_all_to_all_leaves_by_the_own_share() -> None:
    machine = round_machine(ranks_per_node=2)
    away = machine.transfer("all_to_all", 3 * 10**5, 4, 2, 2, 4)  # two of three others are on the other node
    assert away.seconds == pytest.approx(2 * 10**5 / (1e5 / 2))


@settings(max_examples=60, derandomize=True, database=None, deadline=None)
@given(
    st.sampled_from(machines()), st.sampled_from(OPERATIONS), st.integers(2, 64), st.sampled_from([1, 2, 4, 8]),
    st.floats(256, 1e9), st.floats(1, 8),
)  # fmt: skip
def test_more_bytes_take_no_less(name: str, op: str, ranks: int, local: int, nbytes: float, times: float) -> None:
    machine = load_machine(name)
    local = ranks if machine.network is None else min(local, ranks, machine.ranks_per_node)
    on_node = max(local, machine.ranks_per_node)
    few, more = (machine.transfer(op, n, ranks, local, on_node, ranks).total for n in (nbytes, nbytes * times))
    assert more >= 0.6 * few  # between measured points the sums are not smooth


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
@pytest.mark.parametrize("name", ["a100", "h100", "v100"])
def test_gathers_between_nodes_of_gpus_are_rings(name: str, op: str) -> None:
    """NCCL's model of a ring (src/graph/tuning.cc): 1.9 (LL128) to 3.4 µs (Simple) a step over NVLink, 4.0 to 9.6
    between nodes, of which there are as many as other ranks and other nodes."""
    machine = load_machine(name)
    for nodes in (16, 192):
        least, most = ((8 * nodes - nodes) * a + (nodes - 1) * b for a, b in ((1.9e-6, 4e-6), (3.4e-6, 9.6e-6)))
        assert least < machine.transfer(op, 8, 8 * nodes, 8, 8, 8 * nodes).total < most


def test_a_switch_that_adds_moves_fewer_bytes() -> None:
    """8 H100s: all-reduces of 1 GiB at 480 GB/s of what rings move, 2 (p - 1) / p of it, and all-gathers at 360."""
    node = load_machine("h100")
    received = 2 * 7 * 2**30 / 8
    rates = [received / node.transfer(op, received, 8, 8, 8, 8).total for op in ("all_reduce", "all_gather")]
    assert rates == pytest.approx([4.8e11, 3.6e11], rel=0.01)


def test_products_with_vectors_pass_memory_once():
    machine = load_machine("a100")
    seconds = machine.gemm_seconds(Gemm(1, 1, 1, 1 << 28, "float32"))
    assert seconds == pytest.approx(2 * 4 * 2**28 / machine.kernels.bandwidth, rel=0.01)


def test_results_of_few_tiles_are_cut_along_k():
    rate = load_machine("a100").gemm["float16"]
    assert rate.at(384, 384, 1 << 16) > 4 * rate.at(384, 384, 256)
    whole = 256 * 12, 128 * 9  # one round of all processors: nothing to gain
    assert rate.at(*whole, 4096) == pytest.approx(rate.rate * 4096 / (4096 + 64))
