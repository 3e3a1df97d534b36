"""A machine with round figures, for times computed by hand."""

from __future__ import annotations

from typing import Any

from parlinalg.planning.machine import Machine, parse_machine

TEXT = """
name = "round"
about = "1 GFLOP/s, 1 MB/s in memory and within a node, 0.1 MB/s between nodes"
ranks_per_node = {ranks_per_node}
cores = {cores}
memory = "1GiB"

[gemm.float32]
rate = 1e9
source = "by hand"
points = [[1000, 1000, 500, 1e9]]

[kernels]
overhead = {overhead}
bandwidth = 1e6
asynchronous = {asynchronous}
source = "by hand"

[node]
latency = {latency}
bandwidth = 1e6
rails = {rails}
source = "by hand"

[network]
latency = {latency}
bandwidth = {network}
rails = 1
processor = {processor}
source = "by hand"

[overlap]
progress = "{progress}"
window = {window}
slowdown = {slowdown}
source = "by hand"
"""


def round_machine(**figures: Any) -> Machine:
    """Return the machine with some figures changed."""
    return parse_machine(text(**figures))


def text(**figures: Any) -> str:
    usual = {
        "ranks_per_node": 2, "cores": 64, "overhead": 0.0, "asynchronous": "false", "latency": 0.0, "rails": 2,
        "network": 1e5, "processor": 0.0, "progress": "asynchronous", "window": 1e15, "slowdown": 0.0,
    }  # fmt: skip
    return TEXT.format(**usual | figures)
