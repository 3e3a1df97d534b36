"""Further published tables, each written down here before any of its rows was predicted.

Rows are of `systems.Run`, seconds of a step as published or as they follow from the published tokens or sequences a
second.  The functions below the rows return the machines: shipped files with the interfaces, memory or links that the
source names.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from systems import Published, Run, llama

from parlinalg.planning.machine import Machine, load_machine


# ------------------------------------------------------------------------------------------------ A100s
def _internlm(
    ranks: int, tensor: int, tokens: float, within: int | None = None, microbatch: int | None = None
) -> Published:  # fmt: skip
    """Return a row of InternLM's tables, from tokens a second of a GPU; rows with a microbatch recompute."""
    count, rows = (4, 2 * tensor) if microbatch is None else (1, microbatch)
    run = llama(
        "7B", ranks, ranks // tensor * rows * count, tensor=tensor, microbatch=rows, sequence=2048, vocabulary=103168,
        zero=1, within=within, recompute=None if microbatch is None else "block",
    )  # fmt: skip
    name = f"InternLM 7B, {tensor} tensor, on {ranks:,}" + ", states within a node" * (within is not None)
    name += ", full recomputation" * (microbatch is not None)
    return Published(name, run, rows * count * 2048 / tensor / tokens)


INTERNLM = (
    _internlm(8, 1, 4062), _internlm(128, 1, 3571), _internlm(1024, 1, 2271), _internlm(128, 1, 3928, 8),
    _internlm(1024, 1, 3625, 8), _internlm(8, 2, 3822), _internlm(512, 2, 2992), _internlm(512, 2, 3589, 4),
    _internlm(8, 1, 3314, microbatch=8), _internlm(1024, 1, 3163, 8, 8),
)  # fmt: skip
"""InternLM, doc/en/train_performance.md, of 2023: A100 80GB, 4 interfaces of 100 Gbit/s a node; four microbatches."""


def _xtuner(size: str, ranks: int, thousands: int, ulysses: int, tokens: float) -> Published:
    """Return a row of XTuner's figures, from tokens a second of a GPU; each GPU has a sequence's tokens a step."""
    sequence = 1024 * thousands
    more = {"sequence": sequence, "vocabulary": 64000 if size == "Yi 34B" else 32000, "dtype": "float16", "zero": 3,
            "recompute": "block", "context": ulysses, "ulysses": ulysses}  # fmt: skip
    if size == "Yi 34B":
        run = Run(7168, 60, 56, ranks, ranks, kv_heads=8, intermediate=20480, dropout=0.0, **more)
    else:
        run = llama(size, ranks, ranks, **more)
    name = f"{size}, {sequence:,} tokens, {ulysses} Ulysses, on {ranks}"
    return Published(name, run, sequence / tokens)


XTUNER = (
    _xtuner("7B", 8, 8, 1, 3028.3), _xtuner("7B", 8, 32, 1, 2234.2), _xtuner("7B", 8, 128, 8, 948.6),
    _xtuner("7B", 8, 256, 8, 540.1), _xtuner("7B", 32, 1024, 16, 133.6), _xtuner("Yi 34B", 32, 32, 2, 491.5),
    _xtuner("Yi 34B", 32, 128, 8, 251.1), _xtuner("70B", 32, 8, 1, 216.8), _xtuner("70B", 32, 32, 4, 300.9),
    _xtuner("70B", 32, 128, 8, 144.7),
)  # fmt: skip
"""InternLM, XTuner, docs/zh_cn/acceleration/benchmark.rst: A100 80GB, DeepSpeed's ZeRO 3 and Ulysses, 2024."""


def _fsdp(name: str, sizes: tuple[int, ...], ranks: int, tokens: float, again: bool = False) -> Published:
    """Return a row of IBM's and PyTorch's posts, two sequences of 4,096 tokens a GPU; 7B is sharded within a node."""
    hidden, layers, heads, kv_heads, intermediate = sizes
    run = Run(hidden, layers, heads, ranks, 2 * ranks, microbatch=2, sequence=4096, vocabulary=32000, zero=3,
              within=None if again else 8, recompute="block" if again else None, dtype="bfloat16", dropout=0.0,
              kv_heads=kv_heads, intermediate=intermediate)  # fmt: skip
    return Published(name, run, 8192 / tokens)


IBM_7B, IBM_34B, IBM_70B = (4096, 32, 32, 32, 11008), (8192, 48, 64, 8, 22016), (8192, 80, 64, 8, 28672)
IBM = (
    _fsdp("IBM 7B on 128 A100s", IBM_7B, 128, 3700), _fsdp("IBM 34B on 128 A100s", IBM_34B, 128, 700, True),
    _fsdp("IBM 70B on 128 A100s", IBM_70B, 128, 370, True),
    _fsdp("IBM 7B on 128 A100s, compiled", IBM_7B, 128, 4414),
    _fsdp("IBM 70B on 128 A100s, compiled", IBM_70B, 128, 407, True),
)  # fmt: skip
"""PyTorch's blog, "Maximizing training throughput using PyTorch FSDP" and "… and torch.compile" (2024), A100 80GB."""

IBM_H100 = (
    _fsdp("IBM 7B on 96 H100s", IBM_7B, 96, 7500), _fsdp("IBM 34B on 96 H100s", IBM_34B, 96, 1550, True),
    _fsdp("IBM 70B on 96 H100s", IBM_70B, 96, 800, True),
)  # fmt: skip
"""The same posts, H100 80GB with 800 Gbit/s a node."""

IBM_COMPILED = (
    _fsdp("IBM 7B on 464 H100s, compiled", IBM_7B, 464, 9122),
    _fsdp("IBM 70B on 464 H100s, compiled", IBM_70B, 464, 894, True),
)
"""The second post, H100 80GB with 3,200 Gbit/s a node."""

NEOX = (
    Published(
        "GPT-NeoX-20B on 96",
        Run(6144, 44, 64, 96, 1536, 2, 4, microbatch=4, vocabulary=50432, zero=1, recompute="block", dropout=0.0),
        1830 * 3600 / 150000,
    ),
)
"""Black et al. 2022: 150,000 steps in 1,830 hours; configs/20B.yml.  Its blocks are parallel, the library's are not."""

OPT = Run(12288, 96, 96, 992, 992, 8, microbatch=8, vocabulary=50272, zero=3, recompute="block")
GLM = Run(
    12288, 70, 96, 768, 4224, 4, 8, vocabulary=150528, zero=1, recompute="block", kv_heads=96, intermediate=32768
)  # fmt: skip
LARGE = (
    Published("OPT-175B on 992", OPT, OPT.flops / (992 * 147e12)),
    Published("GLM-130B on 768", GLM, GLM.flops / (768 * 0.433 * 312e12)),
)
"""Zhang et al. 2022: FSDP beside 8 tensor ranks, 2M tokens a step, up to 147 teraFLOP/s a GPU.  Zeng et al. 2022: A100
40GB, 43.3% of 312 teraFLOP/s with what is recomputed.  By Narayanan's count of operations; what rests on FSDP's shards
between the passes is assumed."""

LLAMA_65B = (
    Published(
        "LLaMA 65B on 2,048",
        Run(8192, 80, 64, 2048, 2048, 8, vocabulary=32000, cuts=True, zero=1, dtype="bfloat16", dropout=0.0,
            kv_heads=64, intermediate=22016), 2048 / 380,
    ),
)  # fmt: skip
"""Touvron et al. 2023: 380 tokens a second of an A100 80GB, 4M tokens a step; the split is assumed."""


def _deepspeed(zero: int, microbatch: int, batch: int, rate: float, again: bool) -> Published:
    """Return a row of 8 GPUs, from sequences a second of all."""
    name = f"Llama 7B, ZeRO {zero}, {batch // 8 // microbatch} × {microbatch} sequences"
    run = llama("7B", 8, batch, microbatch=microbatch, sequence=4096, vocabulary=32000, zero=zero,
                recompute="block" if again else None)  # fmt: skip
    return Published(name + ", full recomputation" * again, run, batch / rate)


DEEPSPEED = (
    _deepspeed(2, 1, 64, 5.33, False), _deepspeed(2, 1, 64, 4.19, True), _deepspeed(2, 4, 64, 4.69, True),
    _deepspeed(3, 2, 64, 4.95, False), _deepspeed(3, 2, 64, 4.45, True), _deepspeed(3, 8, 64, 4.73, True),
    _deepspeed(3, 8, 128, 4.32, True),
)  # fmt: skip
"""chenyaofo, DeepSpeed 0.14.2 and Transformers on 8 A800 80GB (a gist, 2024); sequences a second are assumed."""


# ------------------------------------------------------------------------------------------------ V100s
ONEFLOW = tuple(
    Published(
        f"{hidden} × {layers}, {data} × {tensor} × {pipeline}, batch {batch}",
        Run(hidden, layers, heads, data * tensor * pipeline, batch, tensor, pipeline, microbatch=microbatch,
            vocabulary=50688, recompute="block", fused=True),
        seconds / 1000,
    )
    for hidden, layers, heads, data, tensor, pipeline, batch, microbatch, seconds in (
        (1536, 16, 16, 1, 1, 1, 2, 2, 406.16), (1536, 16, 16, 8, 1, 1, 16, 2, 417.95),
        (1536, 16, 16, 16, 1, 1, 32, 2, 489.67), (1536, 16, 16, 32, 1, 1, 64, 2, 518.64),
        (1536, 16, 16, 1, 8, 1, 16, 16, 642.13), (3072, 16, 32, 1, 16, 1, 16, 16, 4819.29),
        (1536, 16, 16, 2, 4, 1, 16, 8, 539.69), (2304, 24, 24, 4, 8, 1, 32, 8, 1480.34),
        (1536, 16, 16, 8, 1, 4, 512, 2, 4006.31), (2304, 24, 24, 2, 4, 4, 512, 8, 13117.18),
    )
)  # fmt: skip
"""OneFlow, DLPerf, OneFlow/LanguageModeling/GPT: V100 16GB, one interface of 100 Gbit/s a node, 2021."""


# ------------------------------------------------------------------------------------------------ H100s and H200s
def _grok(
    ranks: int, layers: int, pipeline: int, context: int, sequence: int, seconds: float, batch: int = 1024
) -> Published:  # fmt: skip
    """Return a row of Grok-1's scaling: 4 tensor ranks, and 8 data ranks that cut the experts, at first fewer."""
    run = Run(6144, layers, 48, ranks, batch, 4, pipeline, 8 if pipeline > 1 else 1, sequence=sequence,
              vocabulary=128256, cuts=True, zero=1, within=8 if ranks > 512 else None, dtype="bfloat16", dropout=0.0,
              fused=True, kv_heads=8, intermediate=32768, context=context, experts=8, capacity=1.0)  # fmt: skip
    return Published(f"Grok-1, {layers} layers, on {ranks:,}", run, seconds)


GROK = (
    _grok(8, 2, 1, 1, 4096, 24.03), _grok(16, 4, 1, 1, 4096, 21.52), _grok(32, 4, 1, 1, 4096, 10.64),
    _grok(64, 8, 1, 2, 8192, 20.64), _grok(128, 16, 2, 2, 8192, 20.64), _grok(256, 32, 4, 2, 8192, 20.7),
    _grok(512, 64, 8, 2, 8192, 20.83), _grok(1024, 64, 8, 2, 8192, 21.0, 2048),
    _grok(2048, 64, 8, 2, 8192, 21.09, 4096),
)  # fmt: skip
"""NVIDIA, dgxc-benchmarking, grok1/README_314b.md: NeMo, bfloat16; 8 experts, two for a token, capacity 1."""

NEMOTRON = (
    *(
        Published(
            f"Nemotron 15B on {ranks:,}",
            Run(6144, 32, 48, ranks, 4 * ranks, 4, microbatch=4, sequence=4096, vocabulary=256000, cuts=True, zero=1,
                dtype="bfloat16", dropout=0.0, fused=True, kv_heads=8, intermediate=16384), seconds,
        )
        for ranks, seconds in ((16, 2.812), (64, 2.845), (512, 2.875), (2048, 2.887))
    ),
    *(
        Published(
            f"Nemotron 340B on {ranks:,}",
            Run(18432, 96, 96, ranks, ranks // 4, 8, 8, 12, sequence=4096, vocabulary=256000, cuts=True, zero=1,
                dtype="bfloat16", dropout=0.0, fused=True, kv_heads=8, intermediate=49152), seconds,
        )
        for ranks, seconds in ((128, 4.61), (256, 4.67), (1024, 4.73), (2048, 4.84))
    ),
)  # fmt: skip
"""NVIDIA, dgxc-benchmarking, nemotron/README_15b.md and README_340b.md: NeMo, bfloat16.  Perceptrons of 4 h without a
gate are written as gated ones of 8/3 h, which have the same weights and products."""

JAX = (
    *(
        Published(
            f"MaxText Llama 2 70B on {ranks:,}",
            llama("70B", ranks, 2 * ranks, microbatch=2, sequence=4096, vocabulary=32000, zero=3, recompute="block",
                  within=128 if ranks > 256 else None),
            seconds,
        )
        for ranks, seconds in ((64, 6.999), (256, 7.153), (512, 7.091), (2048, 7.066))
    ),
    *(
        Published(
            f"Paxml GPT 5B on {ranks}",
            Run(4096, 24, 32, ranks, 4 * ranks, microbatch=4, zero=3, within=8, dtype="bfloat16", dropout=0.0), seconds,
        )
        for ranks, seconds in ((16, 0.634), (32, 0.639), (64, 0.643), (128, 0.651))
    ),
)  # fmt: skip
"""NVIDIA, dgxc-benchmarking, maxtext/README_70b.md and paxml/README_5b.md: JAX, bfloat16."""


def _kempner(size: str, ranks: int, tensor: int, microbatch: int, count: int, seconds: float) -> Published:
    """Return a row of KempnerForge's tables: FSDP2 over the data ranks beside tensor ranks."""
    hidden, layers, heads, intermediate = KEMPNER_SIZES[size]
    data = ranks // tensor
    run = Run(hidden, layers, heads, ranks, data * microbatch * count, tensor, microbatch=microbatch, sequence=4096,
              vocabulary=128256, cuts=True, recompute="block", zero=3 if data > 1 else 0, dtype="bfloat16",
              communicate="float32", dropout=0.0, kv_heads=8, intermediate=intermediate)  # fmt: skip
    return Published(f"{size}, {tensor} tensor × {data} FSDP", run, seconds)


KEMPNER_SIZES = {
    "7B": (4096, 32, 32, 14336), "13B": (5120, 40, 40, 17920), "70B": (8192, 80, 64, 28672),
    "175B": (12288, 96, 96, 39680),
}  # fmt: skip
KEMPNER = (
    _kempner("7B", 1, 1, 2, 4, 3.13), _kempner("7B", 4, 1, 4, 2, 3.36), _kempner("7B", 4, 4, 4, 2, 1.30),
    _kempner("7B", 4, 2, 4, 2, 2.52), _kempner("13B", 8, 1, 4, 4, 14.81), _kempner("13B", 8, 4, 4, 4, 4.79),
    _kempner("7B", 32, 4, 4, 2, 1.68), _kempner("70B", 32, 4, 2, 4, 14.85), _kempner("13B", 160, 4, 4, 4, 4.91),
    _kempner("175B", 360, 4, 8, 1, 19.09),
)  # fmt: skip
"""Kempner Institute, KempnerForge, benchmarks/mfu_scaling, weak_scaling_160gpu, 175b_360gpu: H200, 4 a node, 2026."""

FLAGPERF = (
    Published("Llama 3 8B on 8 A100s", llama("8B", 8, 512, pipeline=2, zero=1), 512 * 8192 / 8 / 3698.7),
    Published("Llama 3 8B on 8 H100s", llama("8B", 8, 512, tensor=2, cuts=True, zero=1), 512 * 8192 / 8 / 8103),
    Published("Llama 3 8B on 16 H100s", llama("8B", 16, 512, tensor=2, cuts=True, zero=1), 512 * 8192 / 16 / 7914),
    Published("Llama 3 70B on 64 H100s", llama("70B", 64, 512, tensor=8, pipeline=4, cuts=True, zero=1),
              512 * 8192 / 64 / 851),
    *(
        Published(
            f"Llama 2 70B on 32 H800s, {tensor} × {pipeline}",
            llama("70B", 32, 44, tensor=tensor, pipeline=pipeline, cuts=True, zero=1, sequence=4096, vocabulary=32000),
            44 * 4096 / 32 / tokens,
        )
        for tensor, pipeline, tokens in ((8, 4, 641.93), (4, 8, 791.37))
    ),
)  # fmt: skip
"""BAAI, FlagPerf, training/nvidia/{llama3_8B,llama3_70B,llama2_70B}-megatron: Megatron-Core, bfloat16, 2024."""


def _nanotron(data: int, tensor: int, pipeline: int, microbatch: int, seconds: float) -> Published:
    """Return a row of nanotron's runs of a Llama of a billion parameters."""
    run = Run(2048, 24, 32, data * tensor * pipeline, 1024, tensor, pipeline, microbatch=microbatch, sequence=4096,
              vocabulary=50264, cuts=tensor > 1, zero=1 if data > 1 else 0, dtype="bfloat16", dropout=0.0, kv_heads=32,
              intermediate=4096)  # fmt: skip
    return Published(f"llama-1B, {data} × {tensor} × {pipeline}, microbatch {microbatch}", run, seconds)


NANOTRON = (
    _nanotron(1, 8, 1, 32, 92.1), _nanotron(2, 4, 1, 8, 18.8), _nanotron(4, 2, 1, 8, 15.8),
    _nanotron(2, 2, 2, 1, 46.8), _nanotron(4, 4, 1, 16, 10.3), _nanotron(1, 4, 4, 4, 17.8), _nanotron(1, 8, 2, 8, 18.2),
    _nanotron(2, 1, 8, 4, 28.1), _nanotron(16, 4, 1, 2, 4.80), _nanotron(16, 4, 1, 4, 2.84),
)  # fmt: skip
"""Hugging Face, nanotron/old_bench, log_metrics.csv: H100, data × tensor × pipeline ranks, 2024."""


# ------------------------------------------------------------------------------------------------ machines
def with_interfaces(name: str, count: int, bandwidth: float, **more: Any) -> Machine:
    """Return a shipped machine whose nodes have so many network interfaces of a bandwidth, of which 93% is reached."""
    machine = load_machine(name)
    assert machine.network is not None
    network = replace(machine.network, rails=count, bandwidth=0.93 * bandwidth)
    return replace(machine, network=network, **more)


def a100_40gb(interfaces: int = 4) -> Machine:
    """Return nodes of 8 A100s of 40 GB, whose memory has 1,555 GB/s, with so many interfaces of 200 Gbit/s."""
    machine = with_interfaces("a100", interfaces, 2.5e10, memory=40 * 10**9)
    return replace(machine, kernels=replace(machine.kernels, bandwidth=0.64 * 1.555e12))


def v100_16gb() -> Machine:
    """Return nodes of 8 V100s of 16 GB with one interface of 100 Gbit/s."""
    return with_interfaces("v100", 1, 1.25e10, memory=16 * 10**9)


def slower_links(name: str, share: float) -> Machine:
    """Return an A800 or H800: the A100 or H100 with a share of its NVLinks."""
    machine = load_machine(name)
    return replace(machine, node=replace(machine.node, bandwidth=share * machine.node.bandwidth))


def h800() -> Machine:
    """Return nodes of 8 H800s: 400 of 900 GB/s of NVLink, and interfaces of 200 Gbit/s."""
    machine = slower_links("h100", 4 / 9)
    assert machine.network is not None
    return replace(machine, network=replace(machine.network, bandwidth=0.93 * 2.5e10))


def four_h200() -> Machine:
    """Return nodes of 4 H200s: memory of 141 GB and 4.8 TB/s, joined without a switch, so that sums go along rings."""
    machine = with_interfaces("h100", 4, 5e10, memory=141 * 10**9, ranks_per_node=4, cores=4)
    kernels = replace(machine.kernels, bandwidth=0.64 * 4.8e12)
    node = replace(machine.node, rails=4, all_reduce=load_machine("a100").node.all_reduce)
    return replace(machine, kernels=kernels, node=node)


def large_machines() -> list[Machine]:
    """Return the machine of each row of `LARGE`."""
    return [load_machine("a100"), a100_40gb(8)]


def flagperf_machines() -> list[Machine]:
    """Return the machine of each row of `FLAGPERF`."""
    return [load_machine("a100"), *[load_machine("h100")] * 3, *[h800()] * 2]
