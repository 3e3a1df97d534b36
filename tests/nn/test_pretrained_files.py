"""The format of weights, and the tables of where tensors lie."""

from __future__ import annotations

import copy
import json
import os
import random
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest

from parlinalg import nn
from parlinalg.errors import ConfigError
from parlinalg.nn.pretrained import Part, Row, Settings, Writer, gpt2, llama, places, read_header
from parlinalg.schemes import for_mode

pytestmark = pytest.mark.serial

SERIAL = for_mode(None).SCHEME
GPT2 = {"vocab_size": 11, "max_position_embeddings": 9, "hidden_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 10, "tie_word_embeddings": False}  # fmt: skip
LLAMA = {"vocab_size": 11, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 3,
         "num_key_value_heads": 2, "intermediate_size": 10, "attention_bias": True, "mlp_bias": True,
         "tie_word_embeddings": False}  # fmt: skip


def test_a_packed_dim_is_split_and_put_where_it_belongs():
    row = Row("w", "h k u e", Part("q", "(k u e) h", ("u", 0, 2)), Part("v", "(k u e) h", ("u", 2, 3)))
    q, v = row.places({"h": 5, "k": 2, "u": 3, "e": 4})
    assert (q.shape, q.split, q.order, q.start) == ((16, 5), (2, 2, 4, 5), (3, 0, 1, 2), (0, 0, 0, 0))
    assert (v.shape, v.region) == ((8, 5), (range(5), range(2), range(2, 3), range(4)))
    x = np.arange(80).reshape(16, 5)
    assert q.seen(x)[3, 1, 0, 2] == x[1 * 8 + 0 * 4 + 2, 3]


@pytest.mark.parametrize(("arguments", "table"), [(GPT2, gpt2), (LLAMA, llama)])
def test_tables_fill_every_parameter_once_and_back(arguments, table):
    rng, tensors = np.random.default_rng(0), {}
    for parts in table.ARCHITECTURE.table(arguments).values():
        shape = tuple(max(p.region[d].stop for p in parts) for d in range(len(parts[0].start)))
        filled, values = np.zeros(shape, int), np.zeros(shape)
        for place in parts:
            assert place.tensor not in tensors
            tensors[place.tensor] = rng.normal(size=place.shape)
            part = tuple(slice(r.start, r.stop) for r in place.region)
            filled[part] += 1
            values[part] = place.seen(tensors[place.tensor])
        assert (filled == 1).all()
        for place in parts:
            assert np.array_equal(place.stored(values), tensors[place.tensor])


def test_dims_that_do_not_match_are_our_fault():
    with pytest.raises(ValueError, match="'q' has dims 'a b'"):
        places([Row("w", "a c", Part("q", "a b"))], {"a": 1, "b": 1, "c": 1}, 1)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_files_come_back(dtype, tmp_path):
    rng = np.random.default_rng(0)
    tensors = {"a": rng.normal(size=(3, 5)), "b": rng.normal(size=7), "none": np.zeros((0, 4)), "c": np.array(2.0)}
    tensors = {name: value.astype(dtype) for name, value in tensors.items()}
    path = tmp_path / "model.safetensors"
    writer = Writer(path, {n: t.shape for n, t in tensors.items()}, {n: t.dtype for n, t in tensors.items()})
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    assert not path.exists()
    writer.close()
    writer.appear()
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    for name, stored in read_header(path).items():
        assert stored.dtype == dtype
        assert np.array_equal(stored.mapped(), tensors[name])


@pytest.mark.parametrize("most", [1, 200, 700, 1900, 1 << 20])
def test_shards_have_one_tensor_at_least(most, tmp_path, make_grid):
    """A file takes the next tensors as long as they fit, and one in any case."""
    model = nn.Llama(
        **{**LLAMA, "head_dim": 4}, max_position_embeddings=4, scheme=SERIAL, grid=make_grid({"one": 1}), seed=0
    )
    model.save_pretrained(tmp_path, max_shard_size=most)
    files = [read_header(path) for path in sorted(tmp_path.glob("*.safetensors"))]
    sizes = [[stored.mapped().nbytes for stored in tensors.values()] for tensors in files]
    assert all(sizes)
    assert all(len(held) == 1 or sum(held) <= most for held in sizes)
    assert all(sum(held) + following[0] > most for held, following in pairwise(sizes))
    names = [name for tensors in files for name in tensors]
    table = llama.ARCHITECTURE.table(model.config)
    assert names == [place.tensor for parts in table.values() for place in parts]


def damaged(path, how):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if how == "tensors":
        data = data[:-3]
    elif how == "header":
        data = data[: length // 2]
    elif how == "empty":
        data = b""
    elif how == "longer":
        data += b"x"
    elif how == "no json":
        data = data[:8] + b"?" * length + data[8 + length :]
    else:
        if "b" in header:
            header["b"].update({"overlap": {"data_offsets": [0, 60]}, "gap": {"data_offsets": [64, 124]}}.get(how, {}))
        header["a"].update(
            {
                "offsets": {"data_offsets": [0, 4]}, "dtype": {"dtype": "F8_E4M3"}, "shape": {"shape": [3.5, 5]},
                "negative": {"shape": [-3, -5]}, "flag": {"shape": [True, 15]},
            }.get(how, {})
        )  # fmt: skip
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + data[8 + length :] + (bytes(4) if how == "gap" else b"")
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("tensors", "cut short: it has .* bytes, its header speaks of"),
        ("header", "cut short, or is not a safetensors"),
        ("empty", "it has 0 bytes"), ("longer", "longer than its tensors"), ("no json", "cannot be understood"),
        ("offsets", r"tensor 'a' of F32 and shape \(3, 5\)"), ("dtype", "dtype F8_E4M3; weights are read as F64"),
        ("overlap", "in bytes 0 to 60, and the one before it ends at 60"),
        ("gap", "in bytes 64 to 124, and the one before it ends at 60"), ("shape", r"'a' has the shape \[3\.5, 5\]"),
        ("negative", r"'a' has the shape \[-3, -5\]"), ("flag", r"'a' has the shape \[True, 15\]"),
    ],
)  # fmt: skip
def test_damaged_files_are_refused(how, words, tmp_path):
    path = tmp_path / "model.safetensors"
    names = ["a", "b"] if how in ("overlap", "gap") else ["a"]
    writer = Writer(path, dict.fromkeys(names, (3, 5)), dict.fromkeys(names, np.dtype(np.float32)))
    for name in names:
        writer.write(name, np.ones((3, 5), np.float32))
    writer.close()
    writer.appear()
    damaged(path, how)
    with pytest.raises(ConfigError, match=words) as caught:
        _ = [stored.dtype for stored in read_header(path).values()]
    assert str(path) in str(caught.value)


# ---------------------------------------------------------------------------------------------- files of others


def written(path):
    rng = np.random.default_rng(0)
    tensors = {"a": rng.normal(size=(3, 5)), "b": rng.normal(size=(7,)), "none": np.zeros((0, 4))}
    writer = Writer(path, {n: t.shape for n, t in tensors.items()}, {n: t.dtype for n, t in tensors.items()})
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()
    writer.appear()
    return tensors


def file_of(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


ODD = [
    -1, 2**31, 2**62, 2**63, 2**64, 10**30, 10**400, 0.5, 1e300, float("nan"), True, None, "", "F32", "../x", "\ud800",
    [], [0], [0, 0], [[0, 8]], [8, 0], [-8, 0], [0, 2**63], {}, {"a": 1}, [2**40] * 70, [10**18] * 100_000, "é" * 10**5,
]  # fmt: skip


def test_headers_changed_at_random(tmp_path, full):
    """What is not noticed is the same tensors, and no message is long."""
    path = tmp_path / "model.safetensors"
    tensors = written(path)
    contents = path.read_bytes()
    length = int.from_bytes(contents[:8], "little")
    header, data = json.loads(contents[8 : 8 + length]), contents[8 + length :]
    taken, said = 0, []
    trials = 20_000 if full else 400
    for seed in range(trials):
        draw, changed = random.Random(seed), copy.deepcopy(header)
        name = draw.choice([*tensors, "__metadata__"])
        key = draw.choice(["dtype", "shape", "data_offsets", None])
        odd = draw.choice(ODD)
        if key is None or name == "__metadata__":
            changed[name] = odd
        elif draw.random() < 0.2:
            del changed[name][key]
        elif draw.random() < 0.5 and isinstance(changed[name][key], list):
            changed[name][key][draw.randrange(len(changed[name][key]))] = odd
        else:
            changed[name][key] = odd
        text = json.dumps(changed).encode()
        path.write_bytes(file_of(text, data))
        try:
            found = read_header(path)
            assert {n: s.mapped().tolist() for n, s in found.items()} == {n: t.tolist() for n, t in tensors.items()}
            taken += 1
        except ConfigError as error:
            said.append(str(error))
    assert taken < trials / 2
    assert all(str(path) in text and len(text) < 600 for text in said)


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (file_of(b"{}", length=2**63), "its header alone 9223372036854775816"),
        (file_of(b"{}", length=2**64 - 1), "its header alone 18446744073709551623"),
        (file_of(b"{}", length=3), "its header alone 11"),
        (file_of(b"[" * 200_000), "nested too deep"),
        (file_of(b'{"a":' * 100_000), "nested too deep"),
        (file_of(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {"dtype": "F32", "shape": [1], '
                 b'"data_offsets": [0, 4]}}', bytes(4)), "the key 'a' twice"),
        (file_of(b'{"a": {"dtype": "F32", "shape": [2], "shape": [1], "data_offsets": [0, 4]}}', bytes(4)), "twice"),
        (file_of(b"\xff\xfe{\x00}\x00"), "not UTF-8"),
        (file_of(b"[]"), "cannot be understood"),
        (file_of(b"1" * 5000), "cannot be understood"),
        (file_of(b'{"a": {"dtype": "F32", "shape": [1, -1, -1], "data_offsets": [0, 4]}}', bytes(4)), r"\[1, -1, -1\]"),
    ],
    ids=range(11),
)  # fmt: skip
def test_headers_that_are_none(contents, words, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(contents)
    with pytest.raises(ConfigError, match=words):
        read_header(path)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    path = tmp_path / "model.safetensors"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="it is a FIFO, not a file"):
        read_header(path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="it is a FIFO, not a file"):
        Settings.read(tmp_path)
    path.unlink()
    tensors = written(tmp_path / "blob")
    path.symlink_to(tmp_path / "blob")  # as the cache of a hub has them
    stored = read_header(path)["a"]
    assert (stored.mapped() == tensors["a"]).all()
    os.truncate(path, 100)
    with pytest.raises(ConfigError, match="was changed, and does not have all of 'a'"):
        stored.mapped()


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"model_type": "gpt2", "model_type": "llama"}', "\udcff", "1" * 9999], ids=range(4)
)
def test_settings_that_are_none(text, tmp_path, make_grid):
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        Settings.read(tmp_path)
    grid, index = make_grid({"one": 1}), tmp_path / "model.safetensors.index.json"
    nn.Llama(**{**LLAMA, "head_dim": 4}, max_position_embeddings=4, scheme=SERIAL, grid=grid, seed=0).save_pretrained(
        tmp_path
    )
    (tmp_path / "model.safetensors").unlink()
    index.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=r"index\.json cannot be understood"):
        nn.Llama.from_pretrained(tmp_path, SERIAL, grid)
