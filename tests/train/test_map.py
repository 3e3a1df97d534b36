"""The map of ranks: right for a few ranks, readable for thousands, without MPI."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from parlinalg.cli import main
from parlinalg.train.map import rank_map
from parlinalg.train.mesh import resolve

pytestmark = pytest.mark.serial

GPT3 = """
parallel = dict(data=6, pipeline=8, tensor=dict(size=64, mode="2d"))
schedule = dict(name="interleaved", microbatches=64, chunks=2)
model = dict(name="gpt", hidden_size=12288, num_hidden_layers=96, num_attention_heads=96)
"""


def test_a_map_of_a_few_ranks() -> None:
    parallel = {"pipeline": 2, "sequence": 2, "tensor": {"size": 2, "mode": "1d"}}
    spec = resolve({"parallel": parallel, "schedule": {"name": "zb-v", "microbatches": 4}}, 16)
    assert rank_map(spec, 4, [1, 2, 3, 4]).splitlines() == [
        "ranks       16 = data 2 × pipeline 2 × sequence 2 × tensor 2 (1d: t=2), on 4 nodes of 4",
        "  tensor    8 groups of 2 ranks, next to one another, such as 0, 1; within a node",
        "  sequence  8 groups of 2 ranks, 2 apart, such as 0, 2; within a node",
        "  pipeline  8 groups of 2 ranks, 4 apart, such as 0, 4; across 2 nodes",
        "  data      8 groups of 2 ranks, 8 apart, such as 0, 8; across 2 nodes",
        "data 0      pipeline 0: ranks 0–3, node 0; stages 0, 3 (1 + 4 layers)",
        "            pipeline 1: ranks 4–7, node 1; stages 1, 2 (2 + 3 layers)",
        "data 1      pipeline 0: ranks 8–11, node 2",
        "            pipeline 1: ranks 12–15, node 3",
        "a grid      s=0: 0 1",
        "            s=1: 2 3",
    ]


def test_ranks_that_share_experts() -> None:
    """Their groups are within the stages of a pipeline, and have a line of their own."""
    spec = resolve({"parallel": {"data": 8, "pipeline": 2, "experts": 4}}, 16)
    assert rank_map(spec, 4).splitlines() == [
        "ranks       16 = data 8 (replica=2 × data=4) × pipeline 2, on 4 nodes of 4",
        "  experts   4 groups of 4 ranks, next to one another, such as 0–3; within a node",
        "  pipeline  8 groups of 2 ranks, 4 apart, such as 0, 4; across 2 nodes",
        "  data      2 groups of 8 ranks, such as 0, 1, …, 11; across 2 nodes",
        "data 0–3    pipeline 0: ranks 0–3, node 0; stage 0",
        "            pipeline 1: ranks 4–7, node 1; stage 1",
        "data 4–7    pipeline 0: ranks 8–11, node 2",
        "            pipeline 1: ranks 12–15, node 3",
    ]
    for experts, line in (
        (4, "  experts   2 groups of 4 ranks, next to one another, such as 0–3; across 2 nodes"),
        (8, "  experts   1 group of 8 ranks, next to one another, such as 0–7; across 4 nodes"),
        (1, None),
    ):
        without, found = (
            rank_map(resolve({"parallel": {"data": 8, **more}}, 8), 2).splitlines()
            for more in ({}, {"experts": experts})
        )
        assert found[1:] == [*([] if line is None else [line]), *without[1:]]
    inside = {"data": 4, "experts": 2, "sequence": 2, "tensor": {"size": 2, "mode": "1d"}}
    assert rank_map(resolve({"parallel": inside}, 16)).splitlines()[1:5] == [
        "  tensor    8 groups of 2 ranks, next to one another, such as 0, 1",
        "  sequence  8 groups of 2 ranks, 2 apart, such as 0, 2",
        "  experts   8 groups of 2 ranks, 4 apart, such as 0, 4",
        "  data      4 groups of 4 ranks, 4 apart, such as 0, 4, 8, 12",
    ]


def test_grids_that_are_unlike() -> None:
    each = [{"size": 1}, {"mode": "2d", "shape": (2, 2)}]
    text = rank_map(resolve({"parallel": {"pipeline": {"tensor": each}}}, 10), nodes=[0] * 7 + [1] * 3)
    assert text.splitlines() == [
        "ranks       10 = data 2 × pipeline 2 × tensor 1, 4 (2d: r=2 × c=2), on 2 nodes of 3 to 7",
        "  tensor    2 groups of 4 ranks, next to one another, such as 1–4; across 1 to 2 nodes",
        "  data      5 groups of 2 ranks, 5 apart, such as 0, 5; across 1 to 2 nodes",
        "data 0      pipeline 0: rank 0, node 0, data=2; stage 0",
        "            pipeline 1: ranks 1–4, node 0, data=2 × r=2 × c=2; stage 1",
        "data 1      pipeline 0: rank 5, node 0, data=2",
        "            pipeline 1: ranks 6–9, nodes 0, 1, data=2 × r=2 × c=2",
        "a grid      r=0: 1 2",
        "            r=1: 3 4",
    ]


def mapped(folder: Path, capsys: pytest.CaptureFixture[str], text: str, *options: str) -> list[str]:
    """What the command prints of a configuration."""
    (folder / "config.py").write_text(text)
    assert main(["map", str(folder / "config.py"), *options]) == 0
    return capsys.readouterr().out.splitlines()


def test_groups_that_share_states_and_one_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensor, zero = 'parallel = dict(tensor=dict(size=2, mode="1d"))', "zero = dict(stage={}, within=2)"
    found = mapped(tmp_path, capsys, f"{tensor}\n{zero.format(1)}", "--ranks", "8")
    assert found[0] == "ranks       8 = data 4 (replica=2 × data=2) × tensor 2 (1d: t=2)"
    whole = mapped(tmp_path, capsys, tensor, "--ranks", "8")
    assert whole[0] == "ranks       8 = data 4 × tensor 2 (1d: t=2)"
    assert mapped(tmp_path, capsys, f"{tensor}\n{zero.format(0)}", "--ranks", "8") == whole, "nothing is shared"
    alone = mapped(tmp_path, capsys, tensor, "--ranks", "2")
    assert mapped(tmp_path, capsys, f"{tensor}\n{zero.format(2)}", "--ranks", "2") == alone, "with nobody"
    assert rank_map(resolve(None, 1)) == "ranks       1 = data 1"


def test_grids_that_are_unlike_share_within_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grids = (
        'parallel = dict(sequence=2, pipeline=dict(tensor=[dict(size=2, mode="1d"), dict(mode="2d", shape=(2, 2))]))'
    )
    found = mapped(tmp_path, capsys, f"{grids}\nzero = dict(stage=3, within=1)", "--ranks", "24")
    assert sum("replica=2 × data=1 × s=2 × t=2" in line for line in found) == 2
    assert sum("replica=2 × data=1 × s=2 × r=2 × c=2" in line for line in found) == 2


@pytest.mark.parametrize("parallel", [{"data": 6, "pipeline": 8}, {"data": 48, "pipeline": 1}, {"pipeline": 384}])
def test_thousands_of_ranks_are_folded(parallel: dict[str, int]) -> None:
    many: dict[str, Any] = {**parallel, "tensor": {"size": 8, "mode": "3d"}}
    text = rank_map(resolve({"parallel": many}, 384 * (8 if "data" not in parallel else 1)), nodes=8)
    assert len(text.splitlines()) < 30
    assert max(map(len, text.splitlines())) < 120


def test_the_command_needs_no_mpi(tmp_path: Path) -> None:
    config = tmp_path / "gpt3.py"
    config.write_text(GPT3)
    code = (
        "import sys; sys.modules['mpi4py'] = None\nfrom parlinalg.cli import main\n"
        f"sys.exit(main(['map', {str(config)!r}, '--ranks', '3072', '--ranks-per-node', '8']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "ranks       3,072 = data 6 × pipeline 8 × tensor 64 (2d: r=8 × c=8), on 384 nodes of 8"
    assert len(lines) < 30
    assert "            pipeline 7: ranks 448–511, nodes 56–63; stages 7, 15 (6 + 7 layers)" in lines
    assert "data 1–5    the same from rank 512 on, 512 ranks each" in lines
    assert lines[-1] == "schedule    interleaved, 64 microbatches"
    layers = sum(int(n) for line in lines for counts in re.findall(r"\((.*) layers\)", line) for n in counts.split("+"))
    assert layers == 96 + 2


def test_what_does_not_fit_is_refused(tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "c.py"
    config.write_text(GPT3)
    for more, message in [
        (["--ranks", "3000"], "data × pipeline × sequence × tensor = 6 × 8 × 64 = 3072"),
        (["--ranks", "1"], "but there is 1 rank: start with mpiexec -n 3072"),
        (["--ranks", "0"], "--ranks must be at least 1, not 0"),
        (["--ranks", "3072", "--set", "schedule.microbatches=6"], "interleaved over 8 ranks with microbatches=6"),
        (["--ranks", "3072", "--set", "parallel.pipeline.partition=[48, 48]"], "has 2 numbers, but the schedule"),
        (
            ["--ranks", "3072", "--set", "model.num_hidden_layers=10"],
            "16 stages needs as many layers",
        ),
    ]:
        assert main(["map", str(config), *more]) == 2
        assert message in capsys.readouterr().err
