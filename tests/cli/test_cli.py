"""The command line, as users start it: alone and under mpiexec."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg.backend import compiled
from parlinalg.cli import main
from parlinalg.cli.generate import ends
from parlinalg.errors import ConfigError
from tests.launching import ROOT, child_environment, launch, mpiexec

pytestmark = [pytest.mark.serial, pytest.mark.one_in(3), pytest.mark.timeout(150)]


def run(ranks: int, *arguments: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return launch(ranks, ["-m", "parlinalg", *arguments], cwd=cwd, env=env, timeout=140)


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def refused(done: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for part in parts:
        assert done.stderr.count(part) == 1, f"{part!r} should be said once in:\n{done.stderr}"


def test_version_and_help() -> None:
    assert re.fullmatch(r"parlinalg \d+\.\d+\.\d+\n", run(0, "--version").stdout)
    assert all(command in run(0, "--help").stdout for command in ("train", "generate", "plan", "doctor"))


def test_digits_on_four_ranks(tmp_path: Path) -> None:
    settings = ["--set", "parallel.tensor.size=4", "--set", "parallel.tensor.mode=2d"]
    done = run(4, "train", "digits", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(r"test accuracy (\d\.\d+) \(359 samples\)", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.96
    for part in (
        "r=2 × c=2: 4 ranks", "backend     numpy", "1 BLAS thread a rank", "| 2d | AG c | AG r |", "float32",
        "x Layout('r', 'c'), labels Layout('r'), logits Layout('r', 'c')", "a rank holds 31.52 KiB to 32.24 KiB",
        "2.weight [193, 97]  Layout('r', 'c')", "3 (pid ", "all_gather", "reduce_scatter",
    ):  # fmt: skip
        assert part in done.stdout
    assert "192/192" in done.stderr
    assert "samples/s=" in done.stderr
    out = tmp_path / "runs" / "digits"
    found = metrics(out)
    assert [m["step"] for m in found] == list(range(1, 193))
    keys = {"step", "loss", "accuracy", "lr", "samples_per_s", "grad_norm"}
    assert all(set(m) == keys for m in found[:-1])
    assert set(found[-1]) == {*keys, "test_loss", "test_accuracy"}
    assert found[-1]["loss"] < 0.2 < 2 < found[0]["loss"]
    assert (out / "metrics.png").read_bytes().startswith(b"\x89PNG")
    ranks = json.loads((out / "ranks.json").read_text())
    assert [r["rank"] for r in ranks] == [0, 1, 2, 3]
    assert ranks[2]["coords"] == {"r": 1, "c": 0}
    assert f"2 (pid {ranks[2]['pid']})" in done.stdout


def test_a_file_of_settings_and_data_of_ones_own(tmp_path: Path) -> None:
    y = np.arange(60) % 3
    np.savez(tmp_path / "data.npz", x=np.eye(3)[y] + 0.01, y=y)
    (tmp_path / "mine.py").write_text(
        "import math\nparallel = dict(data=2)\ndata = dict(path='data.npz', test=0.3)\nmodel = dict(hidden=[5])\n"
        "optimizer = dict(name='sgd', lr=0.5, momentum=0.9)\nbatch_size = 11\n"
    )
    done = run(2, "train", "mine.py", "--steps", "30", "--out", "there/it is", "--set", "seed=3", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test accuracy 1.0000 (18 samples)" in done.stdout
    assert "data=2: 2 ranks" in done.stdout
    assert len(metrics(tmp_path / "there" / "it is")) == 30


def test_a_file_of_samples_in_place_of_settings(tmp_path: Path) -> None:
    """With arrays x and y, or x_train and y_train; other files of data say what to do."""
    y = np.arange(60) % 3
    for i, names in enumerate((("x", "y"), ("x_train", "y_train"))):
        arrays: dict[str, Any] = dict(zip(names, (np.eye(3)[y].reshape(60, 3, 1) + 0.01, y), strict=True))
        np.savez(tmp_path / f"mine{i}.npz", **arrays)
    done = run(2, "train", "mine0.npz", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test accuracy 1.0000 (12 samples)" in done.stdout
    assert "3 features, 3 classes" in done.stdout
    assert len(metrics(tmp_path / "runs" / "mine0")) == 20
    done = run(2, "train", "mine1.npz", "--steps", "3", "--set", "model.hidden=5", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    refused(run(0, "train", "nothing.npz", cwd=tmp_path), "no data file 'nothing.npz'")
    refused(
        run(0, "train", "table.csv", cwd=tmp_path), "numpy.savez('mine.npz', x=samples, y=labels), and train mine.npz"
    )
    refused(run(0, "train", "tale.txt", cwd=tmp_path), "parlinalg train text --set data.path=FILE")


def test_a_text_is_trained_on_one_grid_and_written_on_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tale.txt").write_text("It was the best of times, it was the worst of times. " * 9)
    sizes = "dict(name='gpt', hidden_size=24, num_hidden_layers=1, num_attention_heads=3)"
    settings = ["data.path=tale.txt", "data.sequence_length=8", "batch_size=5", f"model={sizes}", "validate_every=7"]
    done = run(2, "train", "text", "--steps", "9", *(a for s in settings for a in ("--set", s)), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"validation loss \d\.\d+ nats a byte", done.stdout)
    assert "gpt(hidden_size=24" in done.stdout
    assert "9/9" in done.stderr
    assert [m["step"] for m in metrics(tmp_path / "runs" / "text") if "validation_loss" in m] == [7, 9]
    where = ["--set", "dtype=float64", "--set", "parallel.tensor=dict(mode='2d', shape=(1, 3))"]
    out = tmp_path / "runs" / "text"
    write = ["generate", str(out), "--prompt", "It was", "--max-new-tokens", "20", "--top-k", "9", "--seed", "3"]
    three = run(3, *write, *where)
    assert three.returncode == 0, three.stderr
    assert main([*write, "--set", "dtype=float64"]) == 0
    assert capsys.readouterr().out == three.stdout
    assert three.stdout.startswith("It was")
    assert run(3, *write, "--set", "dtype=float64", "--set", "parallel=dict(pipeline=3)").stdout == three.stdout

    def wrong(message: str, *more: str) -> None:
        assert main([*write, *more]) == 2
        assert message in capsys.readouterr().err

    wrong("--set optimizer.lr=1: generate takes settings of parallel", "--set", "optimizer.lr=1")
    (out / "model.safetensors").write_bytes(b"\1")
    wrong("model.safetensors")
    (out / "tokenizer.json").unlink()
    wrong("there is no tokenizer")


def test_one_rank_needs_no_mpi(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['mpi4py'] = None; from parlinalg.cli import main; sys.exit(main())"
    done = launch(0, ["-c", hidden, "train", "digits", "--steps", "3", "--out", str(tmp_path)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 steps in" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--set", "parallel.tensor=4"], ["has size 4 but no mode", "'2d'"]),
        (["--set", "parallel.tensor.mode=2.5d", "--set", "parallel.tensor.size=4"], ["needs a depth: 1 or 4"]),
        (["--set", "parallel.data=3"], ["there are 4 ranks", "mpiexec -n 3"]),
        (["--set", "optimiser.lr=1"], ["did you mean 'optimizer'"]),
        (["--set", "data=nothing.npz"], ["no data file 'nothing.npz'"]),
        (["--set", "parallel.pipeline=2", "--set", "schedule.name=1f2b"], ["schedule.name must be one of '1f1b'"]),
    ],
)
def test_wrong_settings_end_all_ranks_with_one_sentence(arguments: list[str], parts: list[str], tmp_path: Path) -> None:
    refused(run(4, "train", "digits", "--out", str(tmp_path), *arguments), *parts)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["train", "digist"], ["there is no configuration 'digist'"]),
        (["generate", "nowhere", "--prompt", "a"], ["there is no folder nowhere"]),
        (["generate", "nowhere", "--prompt", "a", "--temperature", "-1"], ["--temperature must be at least 0"]),
        (["train", "text", "--set", "data.path=nothing.txt"], ["there is no text 'nothing.txt'"]),
        (["train", "digits", "--fall-back"], ["--fall-back says how to resume: add --resume"]),
        (["train", "digits", "--steps", "0"], ["steps must be a whole number of at least 1"]),
        (["train", "digits", "--set", "seed"], ["KEY=VALUE"]),
        (["trian"], ["invalid choice: 'trian'"]),
        (["plan", "matmul", "3", "-1", "3", "--ranks", "2"], ["at least 0, not -1"]),
        (["plan", "elementwise", "9,4", "r,x", "--grid", "r=2"], ["names axis 'x', but the grid has the axes"]),
        (["plan", "elementwise", "9,4", "--grid", "r=2"], ["each operand is a shape and a layout; 1 argument given"]),
        (["plan", "elementwise", "9,4", "r,.", "5", ".", "--grid", "r=2"], ["do not broadcast together"]),
        (["plan", "elementwise", "9,a", "r,.", "--grid", "r=2"], ["whole numbers such as 1000,40"]),
        (["plan", "elementwise", "9,4", "r,.", "--grid", "2"], ["such as r=2,c=2"]),
        (["plan", "matmul", "999", "999", "999", "--ranks", "2", "--memory", "1KiB"], ["the least that would do is"]),
        (["plan", "solve", "9", "8", "--ranks", "2"], ["solve takes square matrices, not [9, 8]"]),
        (["plan", "lu", "9", "--grid", "2"], ["such as r=2,c=2"]),
        (["plan", "qr", "9", "8", "7", "--ranks", "2"], ["a matrix has rows and columns; 3 sizes are given"]),
        (["plan", "svd", "9"], ["one of the arguments --ranks/-p --grid is required"]),
    ],
)
def test_wrong_command_lines(arguments: list[str], parts: list[str]) -> None:
    refused(run(0, *arguments), *parts)


@pytest.mark.parametrize(
    ("content", "words"), [("{", "cannot be read"), ('{"eos_token_id": ["a"]}', r"a token's id.*'a'")]
)
def test_end_tokens_that_are_none_are_refused(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=f"generation_config.json.*{words}"):
        ends(tmp_path)


def test_one_rank_that_cannot_read_the_data_ends_all(tmp_path: Path) -> None:
    y = np.arange(20) % 2
    np.savez(tmp_path / "data.npz", x=np.ones((20, 3)), y=y)
    program = (
        "import os, sys, parlinalg.datasets.sets as sets; from pathlib import Path; from parlinalg.cli import main\n"
        "if os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')) == '1':\n"
        "    os.chdir('/')\n"
        "sys.exit(main(['train', 'digits', '--set', 'data=data.npz', '--out', 'out']))"
    )
    refused(launch(2, ["-c", program], cwd=tmp_path), "rank 1, reading the data: there is no data file 'data.npz'")


def test_nan_in_the_data_is_named(tmp_path: Path) -> None:
    x = np.ones((20, 3))
    x[7, 1] = np.nan
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(20) % 2)
    refused(run(2, "train", "digits", "--set", "data=data.npz", cwd=tmp_path), "x holds nan in sample 7")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signals_end_all_ranks_at_the_next_step(name: str, tmp_path: Path) -> None:
    command = [*mpiexec(), "-n", "3", sys.executable, "-m", "parlinalg", "train", "digits", "--set", "epochs=9999"]
    with (tmp_path / "printed").open("w") as printed:
        process = subprocess.Popen(
            [*command, "--out", str(tmp_path)], cwd=ROOT, env=child_environment(), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            file, end = tmp_path / "metrics.jsonl", time.monotonic() + 30
            while not (file.exists() and file.stat().st_size) and time.monotonic() < end:
                time.sleep(0.05)
            process.send_signal(signal.Signals[name])
            code = process.wait(20)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    text = (tmp_path / "printed").read_text()
    assert code == 128 + signal.Signals[name], text
    steps = re.search(rf"stopped by {name} after step (\d+) of", text)
    assert steps is not None, text
    assert len(metrics(tmp_path)) == int(steps[1])
    assert (tmp_path / "metrics.png").exists()
    assert "Traceback" not in text
    last = int(steps[1]) + 2
    more = ["--set", f"steps={last}", "--resume", "--checkpoint-every", "1"]
    done = run(0, "train", "digits", *more, "--out", str(tmp_path))  # on one rank now
    assert f"going on after step {steps[1]}" in done.stdout, done.stdout + done.stderr
    assert [m["step"] for m in metrics(tmp_path)] == list(range(1, last + 1))
    assert len(list((tmp_path / "checkpoints").iterdir())) == 3


def test_plan_explains_itself() -> None:
    done = run(0, "plan", "matmul", "4096", "4096", "4096", "--ranks", "65", "--memory", "4GiB", "--dtype", "float32")
    assert done.returncode == 0
    assert all(part in done.stdout for part in ("4×4×4", "rank 64 is idle", "float32", "words", "bound", "runners-up"))


@pytest.mark.parametrize("routine", ["solve", "cholesky", "lu", "qr", "lstsq", "eigh", "svd"])
def test_plan_explains_factorizations(routine: str) -> None:
    done = run(0, "plan", routine, "4096", "--ranks", "16", "--memory", "4GiB", "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    parts = (routine, "A[4096, 4096]", "float32 over 16 ranks", " on Grid({", "trip to work", "messages", "memory")
    assert all(part in done.stdout for part in parts), done.stdout
    assert ("\n2.5D      " in done.stdout) == (routine in ("solve", "cholesky", "lu"))


def test_plan_explains_qr_with_pivoting() -> None:
    done = run(0, "plan", "qr", "3000", "1500", "--pivoting", "--ranks", "16")
    assert done.returncode == 0, done.stderr
    parts = (
        "A[3000, 1500] with column pivoting", "1×16 on Grid", "32 columns, 1,500 steps", "of R[1500, 1500]",
        "choices of pivots", "in 1,500 calls", "messages", "memory", "on any grid whole columns are dealt alike",
    )  # fmt: skip
    assert all(part in done.stdout for part in parts), done.stdout
    assert run(0, "plan", "qr", "9", "--pivoting", "--block", "8", "-p", "2").returncode != 0


def test_plan_takes_tiles_and_measures_the_machine() -> None:
    done = run(2, "plan", "lu", "500", "400", "--grid", "r=1,c=2", "--block", "40", "--apart", "--measure")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1×2 on Grid") == 1
    assert "40 rows and columns, 10 steps; the model would choose " in done.stdout
    assert re.search(r"time +[\d.]+ [mµ]?s at [\d.]+ GFLOP/s, without the trips: products \d+%", done.stdout), (
        done.stdout
    )
    done = run(0, "plan", "solve", "500", "-p", "6", "--sides", "30", "--measure")
    assert "X = B[500, 30]" in done.stdout
    assert "GFLOP/s" in done.stdout


def test_plan_says_where_operands_meet() -> None:
    done = run(0, "plan", "elementwise", "1000,40", ".,c", "40", "r", "1000,1", "r,./c", "--grid", "r=2,c=3")
    assert done.returncode == 0, done.stderr
    parts = ("Layout(None, 'c')", "partial=", "received by all ranks", "operand 3", ": chosen", "6 ranks")
    assert all(part in done.stdout for part in parts), done.stdout


def test_plans_count_alike() -> None:
    """Words and sizes have commas, times three digits, and nouns their number, in all plans."""
    many = run(0, "plan", "matmul", "4096", "4096", "4096", "--ranks", "16", "--machine", "a100").stdout
    assert "words     5,242,880 received a rank (A 1,048,576, B 3,145,728, C 1,048,576)" in many
    assert "block     1,024 × 2,048 × 2,048, the busiest rank's" in many
    few = run(0, "plan", "matmul", "1", "1", "1", "--ranks", "2", "--machine", "laptop").stdout
    assert all(part in few for part in ("1 multiplication:", "moves 0.5 words", "words     0 received")), few
    assert "but in 1 message instead" in run(0, "plan", "matmul", "0", "10", "10", "--ranks", "7").stdout
    empty = run(0, "plan", "eigh", "0", "--ranks", "2").stdout
    assert "the matrix is empty" in empty
    assert "there is nothing to compute" in empty
    wide = run(0, "plan", "lstsq", "100", "1000", "--ranks", "4").stdout
    assert "alone are dealt, since the matrix is wide" in wide
    listed = [line for line in wide.splitlines() if line.startswith(10 * " ")]
    assert len({re.search(r"\d in \d", line).start() for line in listed}) == 1, wide  # type: ignore[union-attr]


def test_plan_train_explains_itself(tmp_path: Path) -> None:
    config = tmp_path / "mine.py"
    config.write_text('model = {"name": "mlp", "hidden": [64, 32]}\ndata = "digits"\nbatch_size = 4096\n')
    wanted = ("plan", "train", config, "--ranks", "4", "--machine", "a100", "--set", "parallel.tensor=1")
    done = run(0, *map(str, wanted), "--best", "3")
    assert done.returncode == 0, done.stderr
    parts = (
        "batches of 1438 samples, all that there are to train on (batch_size=4096 is more)", "candidates, ",
        "memory: of the fullest rank", "bubble: the idle share of a pipeline", "lost: kinds of candidates",
    )  # fmt: skip
    assert all(part in done.stdout for part in parts), done.stdout
    assert not re.search(r"\d[.\d]*e[-+]\d", done.stdout), done.stdout
    short = run(0, *map(str, wanted), "--memory", "20KiB")
    assert short.returncode == 2
    enough = re.search(r"(?:would do|they need) is ([\d.]+ KiB)", short.stderr)
    assert enough, short.stderr
    assert run(0, *map(str, wanted), "--memory", enough[1]).returncode == 0, short.stderr


def test_doctor_examines_one_rank_and_several() -> None:
    alone, many = run(0, "doctor"), run(2, "doctor")
    assert (alone.returncode, many.returncode) == (0, 0), alone.stderr + many.stderr
    for done in (alone, many):
        assert all(part in done.stdout for part in ("MPI", "BLAS", "backends", "float64", "GFLOP/s", "missing"))
    assert "mpiexec -n 4 parlinalg doctor" in alone.stdout
    assert f"kernels   {compiled.about()}" in alone.stdout
    assert many.stdout.count("ranks     2 (2 on ") == 1
    assert re.search(r"all_reduce +[\d.]+ µs +[\d.]+ GB/s", many.stdout)
