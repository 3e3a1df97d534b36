"""Language models with the weights of `transformers` compute what `transformers` computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from parlinalg.autograd import ops
from parlinalg.nn.pretrained.tensorfile import read_header
from tests.peers.references import CASES, NEW, inputs, make
from tests.training import sizes_for

pytestmark = [pytest.mark.ranks(1, full=(2, 4)), pytest.mark.timeout(120)]
UNKEPT = {"_name_or_path", "n_inner"}  # the latter is written out
TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
SCHEMES = {"2d": "float64", "3d": "float32", "1d with sequence cuts": "float64"}
#: In float64 scaled angles are those of `references`; in float32 they are those of `transformers` itself.
RUNS = [(case, name) for case in CASES for name in SCHEMES if name in ("2d", "3d") or case in ("gpt2", "llama")]


@pytest.fixture(scope="module")
def case(request, torch, on_root, peer_folder):
    """A model's name, and the folder of its weights."""
    folder = peer_folder / request.param.replace(" ", "-")
    on_root(lambda: make(torch, request.param, folder))
    return getattr(nn, CASES[request.param][0]), folder


def near(got: np.ndarray, want: np.ndarray, tolerance: float) -> None:
    error, scale = np.abs(got.astype(np.float64) - want).max(), np.abs(want).max()
    assert got.shape == want.shape
    assert error <= tolerance * max(scale, 1e-3), (error, scale)  # a key's bias alone has no gradient


def gradients(model: Any, folder: Path) -> dict[str, np.ndarray]:
    """The gradients, by the names and in the shapes of the file's tensors."""
    names = read_header(folder / "model.safetensors")
    held = {name: p.grad.gather() for name, p in model.named_parameters()}
    places = model.architecture.places(model.config, names)
    return {place.tensor: place.stored(held[name]) for name, found in places.items() for place in found}


@pytest.mark.parametrize(("case", "name"), RUNS, indirect=["case"])
def test_logits_gradients_and_tokens(name, case, make_grid, world):
    made, folder = case
    scheme, dtype = schemes.discover()[name].SCHEME, SCHEMES[name]
    grid = make_grid(sizes_for(scheme, world.size, 1)[0])
    want = np.load(folder.with_suffix(f".{dtype}.npz"))
    model = made.from_pretrained(folder, scheme, grid, dtype=dtype)
    ids, targets = inputs()
    logits = model(pla.distribute(ids, grid, model.ids_layout))
    near(logits.gather(), want["logits"], TOLERANCE[dtype])
    ops.cross_entropy(logits, pla.distribute(targets, grid, model.targets_layout)).backward()
    for tensor, gradient in gradients(model, folder).items():
        near(gradient, want[f"grad {tensor}"], TOLERANCE[dtype])
    written = nn.generate(model, ids[:, :4], NEW)
    assert np.array_equal(written, want["written"])


@pytest.mark.parametrize("case", CASES, indirect=True)
def test_weights_go_back_bit_for_bit(case, make_grid, world, torch, on_root, peer_folder):
    made, folder = case
    scheme = schemes.for_mode("2d").SCHEME
    grid = make_grid(sizes_for(scheme, world.size, 1)[0])
    model = made.from_pretrained(folder, scheme, grid)
    assert model.dtype == np.float32
    back = peer_folder / f"back-{folder.name}"
    model.save_pretrained(back / "whole")
    model.save_pretrained(back / "pieces", max_shard_size=2000)
    on_root(lambda: compare(torch, folder, [back / "whole", back / "pieces"]))
    again = made.from_pretrained(back / "pieces", scheme, grid)
    assert all(np.array_equal(a.block, b.block) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def compare(torch: Any, folder: Path, written: list[Path]) -> None:
    """What `transformers` reads of the folders we have written is what it has written itself."""
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(folder)
    state, settings = original.state_dict(), original.config.to_dict()
    for where in written:
        read, said = AutoModelForCausalLM.from_pretrained(where, output_loading_info=True)
        assert type(read) is type(original)
        assert not any(said.values()), said
        assert state.keys() == read.state_dict().keys()
        assert all(torch.equal(value, state[name]) for name, value in read.state_dict().items())
        now = read.config.to_dict()
        assert {name for name, value in settings.items() if now.get(name) != value} <= UNKEPT
