"""`parlinalg schedule`, which needs no MPI."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parlinalg.cli import main
from tests.launching import launch

pytestmark = pytest.mark.serial

PAGE = """\
rank 0  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
rank 1  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .

time             18, of which the busiest rank works 12
bubble fraction  0.3333
idle by rank     6 6 6
microbatches     3 2 1 held by rank at most
"""


def test_a_page_without_mpi(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('there is no MPI here')")
    done = launch(0, ["-m", "parlinalg", "schedule", "1f1b", "--stages", "3", "--microbatches", "4"],
                  env={"PYTHONPATH": str(tmp_path)}, timeout=60)  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, PAGE, "")


def test_options_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {kind: tmp_path / f"a.{kind}" for kind in ("svg", "png", "chrome")}
    ask = ["schedule", "interleaved", "-p", "2", "-m", "4", "--chunks", "3", "--costs", "1,1.5,0.5", "--latency", "0"]
    assert main([*ask, *(a for kind, path in files.items() for a in (f"--{kind}", str(path)))]) == 0
    said = capsys.readouterr().out
    assert "bubble fraction  0.0769" in said  # (2 − 1) / (3·4 + 2 − 1)
    assert said.endswith("".join(f"wrote {path}\n" for path in files.values()))
    assert files["svg"].read_text().startswith("<svg ")
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert max(e.get("dur", 0) for e in json.loads(files["chrome"].read_text())["traceEvents"]) == 1500
    assert main(["schedule", "1f1b", "-p", "2", "-m", "1", "--latency", "1.5"]) == 0
    assert "time             9," in capsys.readouterr().out  # 1 + 1.5 + 1 + 2 + 1.5 + 2
    assert main(["schedule", "1f1b", "-p", "2", "-m", "3", "--cores", "1"]) == 0
    assert "time             18," in capsys.readouterr().out
    assert main(["schedule", "pipedream", "-p", "2", "-m", "4", "--every", "2"]) == 0
    assert "weights          2 1 versions by rank" in capsys.readouterr().out
    assert main(["schedule", "chimera", "-p", "2", "-m", "4"]) == 0
    assert "copies           2 of the model" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("1f2b -p 2 -m 2", "there are 1f1b, chimera, gpipe, interleaved, pipedream, pipedream-2bw, zb-h1, zb-v"),
        ("interleaved -p 4 -m 6", "it takes multiples of 4, such as 4 or 8"),
        ("1f1b -p 2 -m 2 --chunks 2", "a rank holds one stage"),
        ("1f1b -p 2 -m 2 --costs 1,2", "--costs 1,2: it takes three numbers F,B,W, such as 1,2,1"),
        ("1f1b -p 2 -m 2 --costs 1,nan,0", "a cost backward=nan"),
        ("1f1b -p 2 -m 2 --latency -1", "a cost latency=-1.0"),
        ("1f1b -p 2 -m 2 --svg no/such/folder.svg", "cannot write no/such/folder.svg: No such file or directory"),
    ],
)
def test_what_is_wrong_is_told(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *arguments.split()]) == 2
    assert message in capsys.readouterr().err
