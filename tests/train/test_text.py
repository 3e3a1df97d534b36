"""Language models: the same losses and the same sample on every grid, and what is left for `parlinalg generate`."""

from __future__ import annotations

import errno
import json
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg.comm import SingleComm
from parlinalg.errors import ConfigError
from parlinalg.train import launch
from parlinalg.train.language import PretrainedHook, whole_words
from tests.agreement import once
from tests.conftest import BACKEND
from tests.train.trainings import Training, main

STEPS = 5
CLOSE = 1e-12  # relative
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 22}
BASE: dict[str, Any] = {
    "dtype": "float64",
    "batch_size": 5,
    "steps": STEPS,
    "optimizer": {"name": "adamw", "lr": 5e-3},
    "lr_schedule": {"name": "cosine", "warmup": 2},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt": {
        "model": {"name": "gpt", "embd_pdrop": 0.1, "attn_pdrop": 0.1, "max_position_embeddings": 11, **SIZES},
        "criterion": {"label_smoothing": 0.1},
        "clip_grad_norm": 0.5,
    },
    "llama": {"model": {"name": "llama", "num_key_value_heads": 2, **SIZES}},
}
CASES: list[tuple[int, str, dict[str, Any]]] = [
    (1, "llama", {"tensor": {"size": 1, "mode": "2d"}}),
    (2, "gpt", {"data": 2}),
    (2, "llama", {"tensor": {"size": 2, "mode": "1d"}}),
    (3, "gpt", {"tensor": {"size": 3, "mode": "1d"}}),
    (4, "gpt", {"tensor": {"mode": "2d"}}),
    (4, "llama", {"data": 2, "tensor": {"size": 2, "mode": "1d", "sequence_parallel": True}}),
    (8, "gpt", {"tensor": {"size": 8, "mode": "3d"}}),
    (2, "gpt", {"tensor": {"size": 2, "mode": "sequence"}}),
    (4, "gpt", {"sequence": 4}),
    (6, "gpt", {"sequence": {"size": 6, "ulysses": 2, "order": "striped"}}),
    (8, "llama", {"sequence": {"size": 4, "ulysses": 2}, "tensor": {"mode": "2d", "shape": (1, 2)}}),
]
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom … " * 6


@pytest.fixture(scope="module")
def tale(world: Any) -> Iterator[Path]:
    """A file of text in a directory of its own; one for all ranks."""
    made = tempfile.mkdtemp(prefix="parlinalg-") if world.rank == 0 else ""
    path = Path(world.share(made)[0]) / "tale.txt"
    if world.rank == 0:
        path.write_text(TEXT)
    world.barrier()
    yield path
    if made:
        shutil.rmtree(made, ignore_errors=True)


def config(variant: str, path: Path, parallel: dict[str, Any]) -> dict[str, Any]:
    data = {"name": "text", "path": str(path), "sequence_length": 7, "validation": 0.15}
    return {**BASE, **VARIANTS[variant], "data": data, "parallel": parallel}


def run(comm: Any, settings: dict[str, Any], backend: str, out: Path) -> tuple[list[float], str]:
    """The losses of the steps, that of the validation, and a text written on past the model's positions."""
    with launch(settings, comm, backend) as mesh:
        training = Training(mesh, out)
        found = [step.loss for step in training.steps()]
        found.append(training.held()["loss"])
        pieces: list[str] = []
        text = training.write("It was", 12, top_k=9, seed=3, report=pieces.append)
        assert "".join(pieces) == text
        return found, text


@cache
def serial(variant: str, path: Path) -> tuple[list[float], str]:
    return once(lambda: run(SingleComm(), config(variant, path, {}), "numpy", path.parent))


@pytest.mark.parametrize(
    ("variant", "parallel"), [pytest.param(v, p, marks=pytest.mark.ranks(n), id=f"{n}-{v}-{p}") for n, v, p in CASES]
)
def test_losses_and_texts_equal_the_serial_ones(
    variant: str, parallel: dict[str, Any], tale: Path, world: Any, backend: str
) -> None:
    settings = config(variant, tale, parallel)
    if variant == "gpt":
        settings["gradient_accumulation"] = 2
    found, text = run(world, settings, backend, tale.parent)
    want, words = serial(variant, tale)
    assert len(found) == len(want) == STEPS + 1
    assert want[-2] < want[0]
    np.testing.assert_allclose(found, want, rtol=CLOSE, err_msg=f"backend {BACKEND}")
    assert text == words


@pytest.mark.ranks(4)
def test_losses_on_packed_documents_equal_the_serial_ones(tale: Path, world: Any, backend: str) -> None:
    folder = tale.parent / "packed"
    if world.rank == 0:
        folder.mkdir()
        for i in range(9):
            (folder / f"{i}.txt").write_text(TEXT[i : 4 * i + 5])
    world.barrier()

    def settings(parallel: dict[str, Any]) -> dict[str, Any]:
        found = config("gpt", folder, parallel)
        return found | {"data": {**found["data"], "packed": True}, "gradient_accumulation": 2}

    found, _ = run(world, settings({"data": 2, "sequence": 2}), backend, folder)
    want, _ = once(lambda: run(SingleComm(), settings({}), "numpy", folder))
    np.testing.assert_allclose(found, want, rtol=CLOSE)
    short = settings({"sequence": 4})
    short["data"]["sequence_length"] = 3
    with pytest.raises(ConfigError, match=r"sequence_length=3 over .*size=4 leaves ranks without tokens"):
        run(world, short, backend, folder)
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(folder)


@pytest.mark.ranks(4)
def test_what_a_training_leaves(tale: Path, world: Any, backend: str, capfd: pytest.CaptureFixture[str]) -> None:
    out = tale.parent / "out"
    settings = config("gpt", tale, {"tensor": {"mode": "2d"}})
    settings |= {"steps": 3, "validate_every": 2, "backend": backend, "sample": {"prompt": "It ", "max_new_tokens": 20}}
    assert main(settings, out, comm=world) == 0
    world.barrier()
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    keys = {"step", "loss", "perplexity", "lr", "tokens_per_s", "mfu", "grad_norm"}
    held = {"validation_loss", "validation_perplexity"}
    assert [set(m) for m in found] == [keys, keys | held, keys | held]
    assert all(abs(m["perplexity"] / np.exp(m["loss"]) - 1) < 1e-12 and m["mfu"] > 0 for m in found)
    names = {f.name for f in out.iterdir()}
    assert names == {
        "metrics.jsonl", "metrics.png", "ranks.json", "config.json", "model.safetensors", "tokenizer.json",
        "sample.txt", "checkpoints",
    }  # fmt: skip
    sample = (out / "sample.txt").read_text()
    assert sample.startswith("It ")
    if world.rank == 0:
        said = capfd.readouterr().out
        for part in ("to validate, vocabulary 256", "GFLOP/s: 768 × 768 products in float64", "nats a byte", sample,
                     "words of three letters or more occur in the text", "tokens a second", "model.safetensors",
                     "blocks.0…1.norm1.weight [24]"):  # fmt: skip
            assert part in said, part


WRONG = [
    (
        {"data": {"sequence_length": 500}, "model": {"max_position_embeddings": 500}},
        r"tale\.txt, the part to train on: .* has \d+ tokens, and a window of 500",
    ),
    ({"model": {"vocab_size": 255}}, r"model\.vocab_size is 255, but the tokenizer has 256"),
    ({"model": {"max_position_embeddings": 6}}, r"max_position_embeddings is 6, less than data\.sequence_length, 7"),
    ({"model": {"num_attention_heads": 5}}, r"hidden_size=24 .*num_attention_heads=5"),
    ({"data": {"tokenizer": "nothing.json"}}, r"there is no tokenizer 'nothing\.json'"),
    ({"data": {"path": "nothing.txt"}}, r"there is no text 'nothing\.txt'"),
]  # fmt: skip


@pytest.mark.serial
@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], message: str, tale: Path) -> None:
    settings = config("gpt", tale, {})
    for key, values in changes.items():
        settings[key] = {**settings[key], **values}
    with pytest.raises(ConfigError, match=message):
        run(SingleComm(), settings, "numpy", tale.parent)


@pytest.mark.serial
def test_texts_end_with_a_whole_word() -> None:
    assert [whole_words(t) for t in ("one two thr", "one", " one", "a\n\nb c ")] == [
        "one two",
        "one",
        " one",
        "a\n\nb c",
    ]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["ranks.json", "tokenizer.json", "sample.txt"])
def test_a_disk_that_is_full_at_the_ends_is_an_error_on_all_ranks(
    name: str, tale: Path, folder: Path, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 writes these files alone."""
    plain = Path.write_text

    def write_text(self: Path, *args: Any, **options: Any) -> int:
        if self.name == name:
            raise OSError(errno.ENOSPC, "No space left on device", str(self))
        return plain(self, *args, **options)

    monkeypatch.setattr(Path, "write_text", write_text)
    more = {"data": {"name": "text", "path": str(tale), "sequence_length": 7}, "sample": {"max_new_tokens": 2}}
    config = {**BASE, **VARIANTS["llama"], "steps": 1, "checkpoint": False, **more}
    with pytest.raises(ConfigError, match=f"rank 0, writing .*No space left on device.*{name}"):
        main(config, folder / "out", comm=world)


@pytest.mark.serial
def test_a_sample_is_written_whatever_its_characters(tale: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer may decode half of a surrogate pair, which UTF-8 cannot hold."""
    monkeypatch.setattr(PretrainedHook, "_sample", lambda *_: ("It … \ud83d was", []))
    settings = config("llama", tale, {}) | {"steps": 1, "checkpoint": False, "sample": {"max_new_tokens": 2}}
    assert main(settings, folder / "out", comm=SingleComm()) == 0
    assert (folder / "out" / "sample.txt").read_text(encoding="utf-8") == "It … ? was"


@pytest.mark.ranks(1, 2)
@pytest.mark.usefixtures("quick")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of overflows
def test_a_training_ends_in_order_where_the_model_cannot_write_a_sample(
    tale: Path, folder: Path, world: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first step makes the weights infinite; the others are skipped."""
    data = {"name": "text", "path": str(tale), "sequence_length": 7}
    more = {"optimizer": {"name": "sgd", "lr": 1e308}, "skip_nonfinite": True, "model": {"name": "gpt", **SIZES}}
    assert main({**BASE, **more, "data": data}, folder, comm=world) == 0
    world.barrier()
    assert (folder / "tokenizer.json").exists()
    assert not (folder / "sample.txt").exists()
    if world.rank == 0:
        assert "no sample is written: prompt 0: the model's largest logit" in capfd.readouterr().out


@pytest.mark.ranks(2)
def test_ranks_that_read_other_texts_are_told(world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # each rank's own
    Path("own.txt").write_text(TEXT + "!" * world.rank)
    config = {**BASE, "parallel": {"data": 2}, "data": {"name": "text", "path": "own.txt"}}
    with pytest.raises(ConfigError, match=r"own\.txt: rank 1 reads other tokens than rank 0"):
        main(config, tmp_path, comm=world)
