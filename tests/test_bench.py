"""Each benchmark runs, on tiny sizes, and tells what it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from tests.launching import ROOT, launch

BENCH = ROOT / "bench"
pytestmark = [pytest.mark.serial, pytest.mark.timeout(300)]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import harness

    return harness


@pytest.mark.one_in(3)
@pytest.mark.parametrize("ranks", [0, 3, 4])
def test_words_agree_on_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    result = tmp_path / "words.json"
    done = launch(ranks, [str(BENCH / "words.py"), "--json", str(result)], timeout=120, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(result.read_text())
    assert told["agrees"]
    assert told["ranks"] == max(1, ranks)
    assert {row["scheme"] for row in told["schemes"]} >= {"1d", "2d", "3d", "zero3"}
    for row in told["schemes"]:
        if row["even"]:
            assert row["forward"] >= row["bound"] - 1, row
    assert all(row["formula"] >= row["bound"] * (1 - 1e-12) for row in told["plans"])
    assert "| scheme" in done.stdout


@pytest.mark.one_in(3)
def test_matmul_takes_turns_and_tells_what_is_missing(tmp_path: Path) -> None:
    result = tmp_path / "matmul.json"
    options = [
        "--shapes",
        "64x48x32",
        "--ranks",
        "1",
        "2",
        "--rounds",
        "2",
        "--repeats",
        "2",
        "--crowded",
        "--json",
        str(result),
    ]
    done = launch(0, [str(BENCH / "matmul.py"), *options, "--heat", "/nowhere/python"], timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(result.read_text())
    rows = {(row["piece"], row["ranks"]): row for row in told["results"]["64x48x32"]["rows"]}
    assert {("gemm", 1), ("parlinalg", 1), ("parlinalg", 2)} <= set(rows)
    assert rows["gemm", 1]["samples"] == 8
    assert rows["parlinalg", 2]["samples"] == 4
    assert all(row["median_s"] > 0 for row in rows.values())
    assert rows["parlinalg", 2]["told"]["residual"] < 1e-12
    assert "heat" in told["missing"]
    assert told["machine"]["cores"] >= 1


@pytest.mark.one_in(3)
def test_factorizations_on_a_gpu_take_turns(tmp_path: Path) -> None:
    """On the stand-in for CuPy, to which PyTorch cannot be compared."""
    result = tmp_path / "linalg.json"
    options = ["--device", "cuda", "--sizes", "16", "32x4", "--rounds", "2", "--dtype", "float32", "--crowded"]
    env = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'standin'}"}
    command = [str(BENCH / "linalg.py"), *options, "--pieces", "parlinalg", "cupy", "--json", str(result)]
    done = launch(0, command, timeout=240, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(result.read_text())
    assert not told["missing"]
    assert {(row["routine"], *row["shape"]) for row in told["results"]} >= {("eigh", 16, 16), ("lstsq", 32, 4)}
    for row in told["results"]:
        assert {name: len(seconds) for name, seconds in row["seconds"].items()} == {"parlinalg": 10, "cupy": 10}
        assert all(seconds > 0 for seconds in row["median_s"].values())


def test_losses_that_differ_are_told(harness) -> None:
    rows = [{"piece": n, "losses": [4.0, x]} for n, x in (("a", 2.0), ("b", 2.001), ("c", 2.1), ("d", float("nan")))]
    told = harness.disagreements(rows, 1e-3)
    assert [line[:18] for line in told] == ["losses of c and a ", "losses of d and a "]


@pytest.mark.one_in(3)
def test_train_takes_turns_and_losses_agree(tmp_path: Path) -> None:
    result = tmp_path / "train.json"
    pieces = ["gemm:-:1", "parlinalg:serial:1", "parlinalg:1d:2", "parlinalg:data:2"]
    pieces += ["torch:serial:1"] if find_spec("torch") else []
    options = ["--models", "16x2x2x8x4x32", "--pieces", *pieces, "--rounds", "1", "--steps", "2", "--crowded"]
    done = launch(0, [str(BENCH / "train.py"), *options, "--json", str(result)], timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(result.read_text())
    (model,) = told["results"]
    rows = {row["piece"]: row for row in model["rows"]}
    assert set(rows) == set(pieces[1:])
    first = rows["parlinalg:serial:1"]["losses"]
    assert all(row["losses"] == pytest.approx(first, rel=1e-4) for row in rows.values())
    assert all(row["median_s"] > 0 and row["memory"] > 0 for row in rows.values())
    assert model["gemm"]["products_gflops"] > 0
    assert not any("losses" in line for line in told["short"])


@pytest.mark.one_in(3)
def test_pipelines_agree_on_losses_and_are_predicted(tmp_path: Path) -> None:
    result = tmp_path / "pipeline.json"
    pieces = [f"parlinalg:{name}:2" for name in ("zb-v", "pipedream-2bw")]
    pieces += ["torch:1f1b:2"] if find_spec("torch") else []
    options = ["--model", "16x4x2x8x4x32", "--microbatches", "4", "--batches", "2", "--rounds", "1", "--warm", "1"]
    options += ["--steps", "1", "--pieces", *pieces, "parlinalg:1f1b:8", "--crowded", "--json", str(result)]
    done = launch(0, [str(BENCH / "pipeline.py"), *options], timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(result.read_text())
    assert list(told["missing"]) == ["parlinalg:1f1b:8"]
    rows = {row["piece"]: row for row in told["rows"]}
    assert set(rows) == set(pieces)
    first = rows["parlinalg:zb-v:2"]["losses"]
    for piece, row in rows.items():
        assert (row["losses"] == pytest.approx(first, rel=1e-4)) == ("pipedream" not in piece)
        assert row["median_s"] > 0
        if piece.startswith("parlinalg"):
            costs = row["runs"][0]["costs"]
            stages = 4 if "zb-v" in piece else 2
            assert [len(costs[name]) for name in ("forward", "backward", "step")] == [stages, stages, 2]
            most = max(sum(costs[name][s] for name in ("forward", "backward")) for s in range(stages))
            assert row["predicted_s"] > 4 * most
            assert 0 < row["bubble"] < 1
    assert not any("losses" in line for line in told["short"])


@pytest.mark.one_in(3)
def test_ring_counts_the_balance_of_each_order(tmp_path: Path) -> None:
    result = tmp_path / "ring.json"
    options = ["--ranks", "2", "--lengths", "512", "--heads", "1", "--width", "8", "--rounds", "1", "--crowded"]
    done = launch(0, [str(BENCH / "ring.py"), *options, "--json", str(result)], timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    (told,) = json.loads(result.read_text())["results"]
    balance = {row["order"]: row["forward"] for row in told["rows"]}
    assert balance["zigzag"] > balance["striped"] > balance["contiguous"]
    assert all(row["words"] == 3 * 256 * 2 * 8 and row["seconds"] > 0 for row in told["rows"])


@pytest.mark.one_in(5)
def test_memory_is_beside_the_formula(tmp_path: Path) -> None:
    result = tmp_path / "memory.json"
    options = ["--ranks", "2", "--stages", "3", "--hidden", "16", "--layers", "2", "--heads", "2", "--batch", "2"]
    options += ["--vocabulary", "32", "--sequence", "8", "--bucket", "0.01", "--json", str(result)]
    launch(0, [str(BENCH / "memory.py"), *options], timeout=120)  # so small a model is not within 1 %
    (row,) = json.loads(result.read_text())["rows"]
    assert (row["ranks"], row["stage"]) == (2, 3)
    assert row["table"] == row["parameters"] * 16 / 2
    assert row["peak"] >= row["rest"] > 0.9 * row["table"]


@pytest.mark.one_in(5)
def test_memory_is_beside_that_of_imagined_ranks(tmp_path: Path) -> None:
    result, forms = tmp_path / "memory.json", ["ZeRO 3", "2d"]
    options = ["--imagined", "--hidden", "64", "--layers", "2", "--heads", "4", "--batch", "4", "--sequence", "16"]
    options += ["--vocabulary", "64", "--bucket", "0.1", "--forms", *forms, "--json", str(result)]
    done = launch(0, [str(BENCH / "memory.py"), *options], timeout=120)
    rows = json.loads(result.read_text())["rows"]
    assert [row["form"] for row in rows] == forms
    for row in rows:  # so small a model is not within 3 %
        assert row["imagined_rest"] == pytest.approx(row["rest"], rel=0.1)
        assert row["imagined_peak"] == pytest.approx(row["peak"], rel=0.2)
        assert row["peak"] > row["rest"] > 0
    apart = [row["form"] for row in rows if abs(row["imagined_peak"] / row["peak"] - 1) > 0.03]
    assert done.returncode == bool(apart), done.stdout + done.stderr
    assert f"peaks within 3%: {'NO: ' + '; '.join(apart) if apart else 'yes'}" in done.stdout


def test_a_peak_that_is_not_imagined_is_told(
    harness: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import memory

    rows = {"2d": (103, 1000, 1029), "3d": (90, 1000, 969)}

    def run(command: list[str], *_: Any) -> dict[str, Any]:
        form = command[command.index("--forms") + 1]
        rest, peak, imagined = (n * 2**20 for n in rows[form])
        return {"form": form, "rest": rest, "peak": peak, "imagined_rest": rest, "imagined_peak": imagined}

    monkeypatch.setattr(harness, "stop_cleanly", lambda: None)
    monkeypatch.setattr(harness, "run", run)
    for forms, code, line in ((["2d"], 0, "peaks within 3%: yes"), (["2d", "3d"], 1, "peaks within 3%: NO: 3d")):
        monkeypatch.setattr(sys, "argv", ["memory.py", "--imagined", "--forms", *forms])
        assert memory.main() == code
        assert line in capsys.readouterr().out


@pytest.mark.one_in(3)
def test_a_timeline_is_drawn(tmp_path: Path) -> None:
    picture, trace = tmp_path / "steps.png", tmp_path / "{case}.json"
    options = ["--hidden", "16", "--heads", "2", "--layers", "2", "--batch", "2", "--sequence", "8", "--rounds", "1"]
    options += ["--vocabulary", "32", "--png", str(picture), "--chrome", str(trace)]
    done = launch(2, [str(BENCH / "timeline.py"), *options], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert picture.stat().st_size > 10_000
    events = json.loads((tmp_path / "zero3.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    assert {"forward", "backward", "all_gather", "reduce_scatter"} <= {e["name"] for e in events}
    posted = sum(e["ph"] == "b" for e in events)
    assert posted == sum(e["ph"] == "e" for e in events) > 20


@pytest.mark.one_in(3)
def test_two_ranks_train_on_a_longer_sequence_than_one(tmp_path: Path) -> None:
    result = tmp_path / "long.json"
    sizes = ["--layers", "2", "--hidden", "16", "--limit", "1.5", "--tokens", "8", "16", "--ranks", "1", "2"]
    done = launch(0, [str(BENCH / "long.py"), *sizes, "--json", str(result)], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(result.read_text())
    assert told["ratio"] > 1.7
    assert told["error"] < 1e-12
    for row in told["rows"]:
        assert row["peak"] <= 1.5 * 2**20 < row["beyond_peak"]
        assert 1.9 < row["kept"]["16"] / row["kept"]["8"] < 2.1


def test_a_step_is_shared_out_by_functions() -> None:
    options = ["--model", "16x1x2x8x4x32", "--steps", "1", "--least", "0"]
    done = launch(0, [str(BENCH / "train_profile.py"), *options], timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "gemm" in done.stdout
    assert "parlinalg/backend/kernels/attention/__init__.py" in done.stdout


def test_a_crowded_machine_is_refused(
    harness, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import matmul

    monkeypatch.setattr(harness, "busy", lambda seconds=1.0: 0.5)
    monkeypatch.setattr(sys, "argv", ["matmul.py", "--wait", "0"])
    assert matmul.main() == 1
    assert "others use 50% of the cores" in capsys.readouterr().err


def test_tables_and_medians(harness) -> None:
    assert harness.spread([3.0]) == (3.0, 3.0, 3.0)
    assert harness.spread([4.0, 1.0, 2.0, 3.0, 5.0]) == (2.0, 3.0, 4.0)
    assert harness.table(("a", "b"), [(1, "xyz")]) == "| a | b   |\n|---|-----|\n| 1 | xyz |"


def test_a_piece_that_fails_or_hangs_is_an_error(harness) -> None:
    with pytest.raises(RuntimeError, match="failed with 3"):
        harness.run([sys.executable, "-c", "raise SystemExit(3)"], harness.environment())
    with pytest.raises(RuntimeError, match="longer than 1 s"):
        harness.run([sys.executable, "-c", "import time; time.sleep(60)"], harness.environment(), timeout=1)


def test_ranks_yield_to_each_other(harness) -> None:
    """All that a benchmark runs is in one control group, which goes with the benchmark."""
    if not harness.in_one_group():
        pytest.skip("cannot be had here: control groups of processors")
    ran = "import harness; print(harness.ran(['cat', '/proc/self/cgroup'], {}))"
    program = f"{ran}; print(harness.group_folder(harness.own_group()), harness.in_one_group())"
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=harness.environment(), check=True
    ).stdout.split()
    group, one = Path(told[-2]), told[-1]
    assert one == "True"
    made = any(line.endswith(f"/{group.name}") for line in told[:-2])
    assert made or not harness.sessions_apart()
    assert not group.exists()


@pytest.mark.parametrize(
    ("within", "code", "line"),
    [
        ({"digest": "a", "losses": [1.0], "peak": 5, "baseline": 1}, 0, "the same bits"),
        ({"digest": "b", "losses": [1.0], "peak": 5, "baseline": 1}, 1, "DIFFERENT"),
        ({"failed": "MemoryError: 3 bytes"}, 1, "FAILS within the limit: MemoryError: 3 bytes"),
        (RuntimeError("python piece failed with -6:"), 1, "FAILS within the limit: python piece failed with -6"),
    ],
)
def test_offload_fails_where_the_limited_run_does(
    within: Any, code: int, line: str, harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    spec = spec_from_file_location("bench_offload", BENCH / "offload.py")
    assert spec is not None
    assert spec.loader is not None
    bench = module_from_spec(spec)
    spec.loader.exec_module(bench)

    def trained(folder: Path, model: str, mode: str, limit: int | None = None, **options: Any) -> dict[str, Any]:
        if limit is None:
            return {"digest": "a", "losses": [1.0], "peak": 9, "baseline": 1, "states": 8, "parameters": 4}
        if mode == "memory":
            return {"failed": "MemoryError"}
        if isinstance(within, Exception):
            raise within
        return dict(within)

    monkeypatch.setattr(bench, "trained", trained)
    monkeypatch.setattr(harness, "stop_cleanly", lambda: None)
    monkeypatch.setattr(harness, "busy_at_start", lambda *_: 0.0)
    monkeypatch.setattr(sys, "argv", ["offload.py", "--path", str(tmp_path), "--parts", "limit", "--crowded"])
    assert bench.main() == code
    assert line in capsys.readouterr().out


@pytest.mark.one_in(3)
def test_offload_gives_the_same_bits_beside_the_disks_bandwidth(tmp_path: Path) -> None:
    result = tmp_path / "offload.json"
    options = ["--path", str(tmp_path), "--parts", "speed", "--model", "64x1x1x8", "--steps", "2", "--tile", "65536"]
    done = launch(0, [str(BENCH / "offload.py"), *options, "--crowded", "--json", str(result)], timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(result.read_text())["speed"]
    assert told["same"]
    assert all(told["bandwidth"][name] > 0 for name in ("write", "read", "both"))


@pytest.mark.one_in(3)
def test_a_measured_timeline_lies_over_the_simulated_one(tmp_path: Path) -> None:
    files = {kind: tmp_path / f"run.{kind}" for kind in ("svg", "chrome", "json")}
    options = ["--model", "16x2x2x8x4x32", "--microbatches", "4", "--steps", "2", "--schedule", "zb-h1"]
    options += [a for kind, path in files.items() for a in (f"--{kind}", str(path))]
    done = launch(2, [str(BENCH / "pipeline_timeline.py"), *options], timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "zb-h1 on 2 ranks" in done.stdout
    told = json.loads(files["json"].read_text())
    assert told["measured_ms"] > 0
    assert told["predicted_ms"] > 0
    assert len(told["costs_ms"]["weight"]) == 2
    measured = [e for e in json.loads(files["chrome"].read_text())["traceEvents"] if e["pid"] == 1 and e["ph"] == "X"]
    assert [e["name"] for e in measured if e["tid"] == 1][:4] == ["F0", "I0", "F1", "I1"]
    assert files["svg"].read_text().count(">measured<") == 2


@pytest.mark.one_in(3)
def test_checkpoints_are_saved_while_steps_go_on(tmp_path: Path) -> None:
    result = tmp_path / "checkpoint.json"
    options = ["--path", str(tmp_path), "--model", "16x1x2x8", "--steps", "5", "--rounds", "2", "--ranks", "2"]
    done = launch(
        0, [str(BENCH / "checkpoint.py"), *options, "--crowded", "--json", str(result)], timeout=120
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(result.read_text())["rows"]
    assert 0 < row["bytes"] - 12 * row["parameters"] < 30_000, "values and both moments once, and headers"
    assert len(row["rounds"]["complete"]) == 1
    assert row["without"] > 0
    assert row["with"] > row["copying"] > 0


@pytest.mark.one_in(3)
def test_arrays_are_compared(tmp_path: Path) -> None:
    result = tmp_path / "arrays.json"
    options = ["--elements", "65536", "--rounds", "1", "--repeats", "1", "--ranks", "1", "2", "--crowded"]
    done = launch(
        0, [str(BENCH / "arrays.py"), *options, "--json", str(result)], timeout=200, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(result.read_text())
    for name, seconds in told["seconds"].items():
        assert {"numpy 1", "parlinalg 1", "parlinalg 2"} <= set(seconds), name
        assert all(values[1] > 0 for values in seconds.values())


# ------------------------------------------------------------------ foresight


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, harness: Any) -> Any:
    for folder in ("foresight", "pieces"):
        monkeypatch.syspath_prepend(str(BENCH / folder))
    import measured

    return measured


def rows_of(*seconds: tuple[str, float, float]) -> dict[str, Any]:
    rows = [
        {"form": form, "seconds": real, "quartiles": [real, real], "samples": [real], "predicted": told, "bound": "it"}
        for form, real, told in seconds
    ]
    machine = {"cpu": "a processor", "cores": 2}
    return {"setting": "train:2", "date": "2000-01-01", "model": "m", "others": 0.0, "rows": rows, "machine": machine}


def test_predictions_are_judged(measured: Any) -> None:
    """Pairs that are apart by more than a tenth count, and an error is that of the prediction."""
    result = rows_of(("a", 1.0, 1.2), ("b", 1.05, 0.9), ("c", 1.5, 1.1), ("d", 2.0, 2.2))
    assert measured.wrong_order(result["rows"]) == ([("a", "c")], 5)
    told = measured.figures(result)
    assert (
        "Median error 17.1%, worst 26.7%; of 5 pairs further apart than 10%, 1 in the wrong order (a before c)" in told
    )
    assert told.endswith("missed.")
    assert measured.figures(rows_of(("a", 1.0, 1.05), ("b", 2.0, 1.9))).endswith("reached.")
    assert "| a    | 1000        | 1000–1000 | 1200         | +20.0% | it" in measured.section(result)


def test_plans_are_judged(measured: Any) -> None:
    """What is chosen is held against the fastest of its model, wherever it was predicted."""
    result = rows_of(("a", 1.0, 1.2), ("b", 1.04, 0.9), ("c", 2.0, 1.0), ("d", 1.5, 1.1))
    models = list(measured.PLANNED)
    for row, chosen, model in zip(result["rows"], (0, 1, 1, 0), (0, 0, 1, 1), strict=True):
        row |= {"chosen": bool(chosen), "model": models[model]}
    told = measured.section({**result, "setting": "plans:1gbit"})
    assert "links of 1 Gbit/s: what the planner chooses" in told
    assert "1.04 times as long as the fastest measured one" in told
    assert "predicted to be the fastest of these 1.04 times; goal 1.05: reached." in told
    assert "1.33 times as long" in told
    assert "missed." in told
    assert "| b (chosen) | 1040" in told


def test_forms_of_settings(measured: Any) -> None:
    assert measured.forms("train:4")[:4] == ["1d", "2d/1x4", "2d/2x2", "2d/4x1"]
    assert "serial" in measured.forms("train:2")
    assert len(measured.forms("hosts:1gbit")) == 10
    assert not {"interleaved", "zb-v"} & set(measured.forms("pipeline:4"))
    assert "zb-v" in measured.forms("pipeline:2")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("setting", ["train:2", "pipeline:2"])
def test_steps_are_measured_and_predicted(setting: str, tmp_path: Path) -> None:
    forms = {"train:2": ["1d", "2d/2x1", "zero3"], "pipeline:2": ["1f1b", "zb-v"]}[setting]
    options = ["--model", "32x4x2x16x4x64", "--microbatches", "2", "--forms", *forms, "--machine", "laptop"]
    options += ["--rounds", "1", "--steps", "2", "--crowded", "--out", str(tmp_path)]
    done = launch(0, [str(BENCH / "foresight" / "measured.py"), setting, *options], timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / f"{setting.replace(':', '_')}.json").read_text())["rows"]
    assert [row["form"] for row in rows] == forms
    assert all(row["seconds"] > 0 and row["predicted"] > 0 and len(row["samples"]) == 2 for row in rows)
    assert "Median error" in done.stdout
