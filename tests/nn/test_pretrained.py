"""Models from folders of weights and back, on every grid."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from parlinalg.nn.pretrained import Stored, Writer, read_header
from tests.models import make
from tests.training import sizes_for

SUMMA = schemes.for_mode("2d").SCHEME
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def grid(make_grid, world):
    return make_grid(sizes_for(SUMMA, world.size, 1)[0])


def same(one, other):
    a, b = one.state_dict(), other.state_dict()
    assert list(a) == list(b)
    assert all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("kind", "dtype"), [("gpt", "float64"), ("llama", "bfloat16")])
def test_a_model_moves_from_grid_to_grid(kind, dtype, grid, make_grid, world, folder):
    model = make(kind, SUMMA, grid, dtype=dtype, tie_word_embeddings=kind == "llama")
    model.save_pretrained(folder, max_shard_size=14000 if kind == "gpt" else "1GB")
    files = sorted(p.name for p in folder.iterdir())
    if kind == "llama":
        assert files == ["config.json", WEIGHTS]
    else:
        assert all(p.stat().st_size < 14000 + 2000 for p in folder.glob("*.safetensors"))
        assert files[:2] == ["config.json", f"model-00001-of-{len(files) - 2:05}.safetensors"]
    cube = schemes.for_mode("3d").SCHEME
    read = type(model).from_pretrained(folder, cube, make_grid(sizes_for(cube, world.size, 1)[0]))
    assert read.config == model.config
    assert read.dtype == model.dtype
    assert not read.training
    assert [p.name for p in read.parameters()] == [p.name for p in model.parameters()]
    same(model, read)
    world.barrier()
    read.save_pretrained(folder, max_shard_size="1GB" if kind == "gpt" else 14000)  # the other form takes its place
    same(model, type(model).from_pretrained(folder, SUMMA, grid))
    assert (folder / WEIGHTS).exists() != (folder / INDEX).exists()


def test_the_dtype_and_other_arguments_may_be_chosen(grid, folder):
    model = make("gpt", SUMMA, grid)
    model.save_pretrained(folder)
    read = nn.GPT.from_pretrained(folder, SUMMA, grid, dtype="float32", attn_pdrop=0.25)
    assert read.dtype == np.float32
    assert read.config == {**model.config, "attn_pdrop": 0.25}
    state = model.state_dict()
    assert all(np.array_equal(a, state[name].astype("float32")) for name, a in read.state_dict().items())
    with pytest.raises(pla.ConfigError, match=r"transformer.wpe.weight \(9, 20\) instead of \(12, 20\)"):
        nn.GPT.from_pretrained(folder, SUMMA, grid, max_position_embeddings=12)
    with pytest.raises(pla.ConfigError, match="no argument 'attn_drop'"):
        nn.GPT.from_pretrained(folder, SUMMA, grid, attn_drop=0.25)


OLDER = {"type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4,
          "original_max_position_embeddings": 6}  # fmt: skip


@pytest.mark.parametrize("scaling", [OLDER, LLAMA3, {"type": "default"}])
def test_scaled_rotary_positions_come_back_in_every_form(scaling, grid, folder):
    model = make("llama", SUMMA, grid, rope_scaling=scaling)
    model.save_pretrained(folder)
    read = nn.Llama.from_pretrained(folder, SUMMA, grid)
    assert read.config == model.config
    ids = pla.distribute(np.arange(9)[None], grid, model.ids_layout)
    logits, plain = model.eval()(ids).gather(), make("llama", SUMMA, grid)(ids).gather()
    assert np.array_equal(read(ids).gather(), logits)
    assert np.array_equal(plain, logits) == (scaling == {"type": "default"})
    if scaling is OLDER:
        modern = make("llama", SUMMA, grid, rope_scaling={"rope_type": "linear", "factor": 4.0})
        assert np.array_equal(modern(ids).gather(), logits)


def test_probabilities_of_dropout_come_back(grid, folder):
    model = make("llama", SUMMA, grid, p=0.25)
    model.save_pretrained(folder)
    read = nn.Llama.from_pretrained(folder, SUMMA, grid)
    assert read.config == model.config
    assert [m.p for m in read.modules() if isinstance(m, nn.Dropout)] == [0.25] * 3
    make("llama", SUMMA, grid).save_pretrained(folder)
    assert "resid_pdrop" not in json.loads((folder / "config.json").read_text())


class Counted(np.ndarray):
    """Counts the elements that are taken from a file."""

    taken = 0

    def __getitem__(self, key):
        found = super().__getitem__(key)
        Counted.taken += found.size
        return found


def test_a_rank_reads_its_part_alone(grid, folder, monkeypatch):
    make("llama", SUMMA, grid).save_pretrained(folder)
    mapped = Stored.mapped
    monkeypatch.setattr(Stored, "mapped", lambda self: mapped(self).view(Counted))
    Counted.taken = 0
    read = nn.Llama.from_pretrained(folder, SUMMA, grid)
    assert Counted.taken == sum(p.block.size for p in read.parameters())


def test_tensors_without_a_prefix_and_buffers(grid, world, folder):
    model = make("gpt", SUMMA, grid)
    model.save_pretrained(folder)
    if world.rank == 0:
        tensors = {name: stored.mapped().copy() for name, stored in read_header(folder / WEIGHTS).items()}
        tensors = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        tensors["h.0.attn.bias"] = np.ones((1, 1, 9, 9), np.float32)
        tensors["lm_head.weight"] = tensors["wte.weight"]  # tied, and written all the same
        write(folder / WEIGHTS, tensors)
    world.barrier()
    same(model, nn.GPT.from_pretrained(folder, SUMMA, grid))


def write(path, tensors):
    writer = Writer(path, {n: t.shape for n, t in tensors.items()}, {n: t.dtype for n, t in tensors.items()})
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()
    writer.appear()


def changed(**settings):
    def change(folder):
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, **settings}))

    return change


def tensors_of(change):
    def rewrite(folder):
        tensors = {name: stored.mapped().copy() for name, stored in read_header(folder / WEIGHTS).items()}
        change(tensors)
        write(folder / WEIGHTS, tensors)

    return rewrite


def index(name):
    def change(folder):
        (folder / WEIGHTS).unlink()
        (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))

    return change


def cut_short(folder):
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


FAULTS = [
    (shutil.rmtree, r"no folder .*/\d+"),
    (lambda f: (f / "config.json").unlink(), r"\d+ has no config.json; it has model.safetensors"),
    (lambda f: (f / "config.json").write_text("{"), r"config.json cannot be read"),
    (lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"), r"neither .* nor .*; it has .*convert them"),
    (changed(model_type="mamba"), r"config.json: model_type='mamba' is not known; known are 'gpt2' \(nn"),
    (changed(model_type=["llama"]), r"config.json: model_type=\['llama'\] is not known; known are"),
    (changed(model_type="gpt2"), "'gpt2' is read by nn.GPT, not nn.Llama"),
    (changed(hidden_act="relu6"), "hidden_act='relu6' is not supported; it may be silu, swish"),
    (changed(rope_parameters={"rope_type": "yarn"}), "'yarn' is not supported; it may be default, linear, llama3"),
    (changed(rope_parameters={"rope_type": "linear"}), "'linear' lacks factor"),
    (changed(rope_parameters={"rope_type": "linear", "factor": 0.0}), r"factor is a number above 0, not 0\.0"),
    (changed(rope_parameters={"factor": 2.0}), "config.json: rope_parameters has no rope_type, which is one of"),
    (changed(rope_parameters={"rope_theta": 0}), "config.json: rope_theta is a number above 0, not 0"),
    (changed(sliding_window=4), "sliding_window=4 is not supported"),
    (changed(quantization_config={"bits": 4}), "quantization_config=.* is not supported"),
    (changed(num_hidden_layers="two"), "num_hidden_layers is a whole number of at least 1, not 'two'"),
    (changed(num_attention_heads=3), "num_attention_heads=3 does not fall into num_key_value_heads=2"),
    (changed(hidden_size=21), r"/\d+, .* does not fit: misshapen: .*model.norm.weight \(20,\) instead of \(21,\)"),
    (tensors_of(lambda t: t.pop("model.norm.weight")), r"does not fit: missing: model.norm.weight$"),
    (tensors_of(lambda t: t.update(extra=t["model.norm.weight"])), "unexpected: extra"),
    (cut_short, "model.safetensors is cut short: it has .* bytes, its header speaks of"),
    (index("gone.safetensors"), "model.norm.weight is in 'gone.safetensors', which is not a file in"),
    (index("../x"), "'../x', which is not a file in"),
]  # fmt: skip


def test_a_bad_folder_is_refused_on_all_ranks(grid, world, folder):
    make("llama", SUMMA, grid).save_pretrained(folder / "good")
    if world.rank == 0:
        for i, (spoil, _) in enumerate(FAULTS):
            shutil.copytree(folder / "good", folder / str(i))
            spoil(folder / str(i))
    world.barrier()
    for i, (_, words) in enumerate(FAULTS):
        with pytest.raises(pla.ConfigError, match=words):
            nn.Llama.from_pretrained(folder / str(i), SUMMA, grid)


def test_a_folder_that_cannot_be_written_is_told_to_all_ranks(grid, world, folder):
    if world.rank == 0:
        (folder / "file").write_text("")
    world.barrier()
    with pytest.raises(pla.ConfigError, match="file/model"):
        make("gpt", SUMMA, grid).save_pretrained(folder / "file" / "model")
