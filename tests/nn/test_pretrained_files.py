"""The format of weights, and the tables of where tensors lie."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from parlinalg.errors import ConfigError
from parlinalg.nn.pretrained import gpt2, llama
from parlinalg.nn.pretrained.save import shards
from parlinalg.nn.pretrained.table import Part, Row, places
from parlinalg.nn.pretrained.tensorfile import Writer, read_header

pytestmark = pytest.mark.serial

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


def test_shards_have_one_tensor_at_least():
    assert shards({"a": 9, "b": 1, "c": 1}, 2) == [["a"], ["b", "c"]]
    assert shards({"a": 9, "b": 1}, 10) == [["a", "b"]]


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
        ("tensors", "cut short: it has .* bytes, its header speaks of"), ("header", "cut short, or is no safetensors"),
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
