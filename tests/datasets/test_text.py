"""Texts: what is read and what is refused; windows: the same on every grid, cut without communication."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parlinalg import sequence_order
from parlinalg.comm import ledger
from parlinalg.datasets import Passages, Windows, known_share, text, tokenizer
from parlinalg.errors import ConfigError
from parlinalg.grid import factorizations
from parlinalg.layout import Layout
from parlinalg.schemes import discover
from tests.conftest import SIZE

SIGNS = "Hello  wörld\n\t日本, 'x'\r\n"


@pytest.mark.serial
def test_the_text_that_comes_with_python() -> None:
    found = text()
    assert (found.name, found.tokenizer.vocab_size) == ("pydoc_data.topics", 256)
    assert found.train.tobytes().decode() + found.validation.tobytes().decode() == found.content
    assert len(found.validation) == found.validation_bytes
    assert 0.09 < len(found.validation) / len(found.train) < 0.12
    assert {"statement", "PEP"} <= found.words
    assert "bytes to train" in str(found)


@pytest.mark.serial
def test_folders_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name, content in {"b/a.txt": "second", "a.txt": "\ufefffirst", "c.md": "thïrd", ".git/x": "\xff"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    found = text(tmp_path, validation=0.2)
    assert found.content == "first\n\nsecond\n\nthïrd"
    assert found.validation.tobytes() == "thïrd"[1:].encode()
    (tmp_path / "b" / "b.bin").write_bytes(b"ab\xffc")
    with pytest.raises(ConfigError, match=r"b\.bin is not UTF-8: .*0xff\) at byte offset 2 of 4"):
        text(tmp_path)
    (tmp_path / "b" / "b.bin").write_bytes(b"abc\0")
    with pytest.raises(ConfigError, match=r"b\.bin is not text: it holds a zero byte at offset 3 of 4"):
        text(tmp_path)


@pytest.mark.serial
def test_wrong_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no text .*nothing"):
        text(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"holds no files"):
        text(tmp_path)
    (tmp_path / "a").write_text("abc")
    with pytest.raises(ConfigError, match=r"a: a share of 0\.1 of 3 characters leaves 3 to train and 0 to validate"):
        text(tmp_path / "a")


@pytest.mark.serial
def test_bytes_are_a_tokenizer_file_that_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer

    plain = tokenizer()
    plain.save(tmp_path)
    others = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert plain.decode([97, 300]) == "a\ufffd"
    assert others.encode(SIGNS).ids == plain.encode(SIGNS).tolist() == list(SIGNS.encode())
    assert others.decode(list(SIGNS.encode())) == plain.decode(list(SIGNS.encode())) == SIGNS
    assert plain.decode([0xFF, 65]) == "\ufffdA"
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert type(tokenizer(tmp_path)) is type(plain), "which needs no package"
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"pip install 'parlinalg\[text\]'"):
        tokenizer(tmp_path)


def words_file(folder: Path, *words: str) -> Path:
    """A `tokenizer.json` whose tokens are these words."""
    vocab = {word: i for i, word in enumerate(("[UNK]", *words))}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    content = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder / "tokenizer.json"


@pytest.mark.serial
def test_tokens_of_a_file(tmp_path: Path) -> None:
    file = words_file(tmp_path, "a", "rose", "is")
    (tmp_path / "rose.txt").write_text("a rose is a rose is a rose")
    found = text(tmp_path / "rose.txt", file, validation=0.25)
    assert found.tokenizer.unit == "token"
    assert (found.train.tolist(), found.validation.tolist(), found.validation_bytes) == ([1, 2, 3, 1, 2, 3], [1, 2], 6)
    assert found.tokenizer.vocab_size == 4
    assert found.tokenizer.decode([1, 2]) == "a rose"
    found.tokenizer.save(tmp_path)
    assert tokenizer(tmp_path).encode("is a").tolist() == [3, 1]
    for content, message in (("{", "not JSON"), ('{"model": 1}', "cannot be read as a tokenizer")):
        file.write_text(content)
        with pytest.raises(ConfigError, match=message):
            tokenizer(file)
    with pytest.raises(ConfigError, match=r"there is no tokenizer"):
        tokenizer(tmp_path / "none.json")


@pytest.mark.serial
@pytest.mark.parametrize("own", ["truncation", "padding"])
def test_a_tokenizers_own_lengths_change_no_text(own: str, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    lengths = {
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                    "pad_type_id": 0, "pad_token": "[UNK]"},
    }  # fmt: skip
    file = words_file(tmp_path, "a", "rose", "is")
    file.write_text(json.dumps({**json.loads(file.read_text()), own: lengths[own]}))
    found = tokenizer(file)
    assert found.encode("a rose is a rose").tolist() == [1, 2, 3, 1, 2]
    found.save(tmp_path)
    assert json.loads(file.read_text())[own] is None


@pytest.mark.serial
def test_a_word_that_no_token_stands_for_is_an_error_of_the_file(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    file = words_file(tmp_path, "a", "rose")
    content = json.loads(file.read_text())
    del content["model"]["vocab"]["[UNK]"]
    file.write_text(json.dumps(content))
    found = tokenizer(file)
    assert found.encode("a rose").tolist() == [1, 2]
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot make tokens of the text: .*\[UNK\]"):
        found.encode("a tulip")


@pytest.mark.serial
def test_known_words_are_counted() -> None:
    assert known_share("The cat, the dgo; x1 an 'if'", {"The", "the", "cat"}) == (0.75, 4)
    assert known_share("12 ab", ()) == (0.0, 0)


TOKENS = np.random.default_rng(1).integers(0, 200, 61).astype(np.uint8)


@pytest.mark.parametrize("name", sorted(discover()))
def test_windows_are_the_same_on_every_grid(name: str, make_grid: Callable[..., Any]) -> None:
    scheme = discover()[name].SCHEME
    if not scheme.axes:
        scheme = scheme.with_data("data")
    layout = Layout(*scheme.contract.x.dims[:2])
    grid = make_grid(dict(zip(scheme.axes, factorizations(SIZE, len(scheme.axes))[-1], strict=True)))
    windows = Windows(TOKENS, 7, 5, grid, layout, scheme.tokens, seed=3)
    passages = Passages(TOKENS, 7, 5, grid, layout, layout)
    with ledger(grid) as book:
        steps = [windows.at(step, parts=2) for step in (0, 1, 0)]
        held = list(passages)
    assert book.calls.total() == 0
    for step, parts in zip((0, 1, 0), steps, strict=True):
        starts = windows.starts(step)
        assert [(len(p), p.offset, p.x.layout, p.y.layout) for p in parts] == [
            (3, 0, layout, scheme.tokens), (2, 3, layout, scheme.tokens),
        ]  # fmt: skip
        want = TOKENS[starts[:, None] + np.arange(8)]
        assert (np.concatenate([p.x.gather() for p in parts]) == want[:, :-1]).all()
        assert (np.concatenate([p.y.gather() for p in parts]) == want[:, 1:]).all()
    assert (windows.starts(0) != windows.starts(1)).any()
    ids, targets = (np.concatenate([b.gather() for b in part]) for part in zip(*((b.x, b.y) for b in held)))
    assert ids.shape == (9, 7)
    assert (ids.ravel()[:60] == TOKENS[:-1]).all()
    assert (targets.ravel()[:60] == TOKENS[1:]).all()
    assert targets.ravel()[60:].tolist() == [-100] * 3
    assert ids.ravel()[60:].tolist() == [0] * 3
    assert [b.count for b in held] == [np.count_nonzero(b.y.gather() != -100) for b in held] == [35, 25]


@pytest.mark.parametrize("order", ["contiguous", "striped", "zigzag"])
def test_windows_in_another_order_and_of_packed_documents(order: str, make_grid: Callable[..., Any]) -> None:
    grid, layout, places = make_grid({"s": SIZE}), Layout(None, "s"), sequence_order(7, SIZE, order)
    starts = np.array([0, 3, 4, 30, 41])
    windows = Windows(TOKENS, 7, 5, grid, layout, layout, order=places, starts=starts)
    plain = Windows(TOKENS, 7, 5, grid, layout, layout)
    with ledger(grid) as book:
        (found,), (want,) = windows.at(0), plain.at(0)
    assert book.calls.total() == 0
    assert (found.positions == places).all()
    assert (found.x.gather() == want.x.gather()[:, places]).all()
    at = windows.starts(0)[:, None] + places
    documents = (at[..., None] >= starts).sum(-1)
    ends = np.isin(at + 1, starts)
    assert (found.documents == documents).all()
    assert (found.y.gather() == np.where(ends, -100, want.y.gather()[:, places])).all()
    assert (found.ignored, found.count, want.count) == (ends.sum(), 35 - ends.sum(), 35)
    held = list(Passages(TOKENS, 7, 5, grid, layout, layout, order=places, starts=starts))
    assert sum(b.count for b in held) == 60 - 4 == sum((b.y.gather() != -100).sum() for b in held)
    with pytest.raises(ConfigError, match=r"not a permutation of 0 to 6"):
        Windows(TOKENS, 7, 5, grid, layout, layout, order=np.zeros(7, int))


@pytest.mark.serial
def test_packed_texts_keep_their_files_apart(tmp_path: Path) -> None:
    for name, content in {"a": "one", "b": "two two", "c": "three"}.items():
        (tmp_path / name).write_text(content)
    found = text(tmp_path, validation=0.5, packed=True)
    assert (found.train.tobytes(), found.validation.tobytes()) == (b"onetwo ", b"twothree")
    assert found.train_starts is not None
    assert found.validation_starts is not None
    assert (found.train_starts.tolist(), found.validation_starts.tolist()) == ([0, 3], [0, 3])
    assert found.validation_bytes == 8
    assert text(tmp_path, validation=0.5).train_starts is None


@pytest.mark.serial
def test_windows_follow_one_another_over_epochs(make_grid: Callable[..., Any]) -> None:
    grid, layout = make_grid({"a": 1}), Layout(None, None)
    windows = Windows(TOKENS, 7, 4, grid, layout, layout)
    assert len(windows) == 2
    steps = [batch.x.gather() for epoch in range(2) for (batch,) in windows.epoch(epoch)]
    assert all((found == windows.at(i)[0].x.gather()).all() for i, found in enumerate(steps))
    assert len(Windows(TOKENS, 60, 3, grid, layout, layout)) == 1
    with pytest.raises(ConfigError, match=r"61 tokens, and a window of 61 positions needs 62"):
        Windows(TOKENS, 61, 3, grid, layout, layout)
    with pytest.raises(ConfigError, match=r"1 tokens, and a window of 3 positions needs 2"):
        Passages(TOKENS[:1], 3, 3, grid, layout, layout)
    with pytest.raises(ConfigError, match=r"batch_size must be at least 1, not 0"):
        Windows(TOKENS, 3, 0, grid, layout, layout)
