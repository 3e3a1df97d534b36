"""States of models of PyTorch, as tensors and as files, in models of one's own."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from tests.training import sizes_for

pytestmark = [pytest.mark.ranks(1, 2, 4), pytest.mark.timeout(180)]
SHAPES = {"enc.weight": (8, 6), "enc.bias": (8,), "ln.weight": (8,), "ln.bias": (8,), "heads.weight": (12, 8),
          "heads.bias": (12,), "conv.weight": (4, 2, 3, 5), "conv.bias": (4,), "tok.weight": (7, 8)}  # fmt: skip
NAMES = [(r"^enc\.", "layers.0."), (r"^ln\.", "norm."), (r"^tok\.", "table."), (r"^position_ids$", None)]


class Net(nn.Module):
    def __init__(self, scheme, grid):
        super().__init__()
        own = {"scheme": scheme, "grid": grid, "dtype": "float64"}
        self.layers = nn.ModuleList([nn.Linear(6, 8, **own)])
        self.norm = nn.LayerNorm(8, **own)
        self.heads = nn.Linear(8, (3, 4), **own)
        self.conv = nn.Conv2d(2, 4, (3, 5), **own)
        self.table = nn.Embedding(7, 8, **own)


def values():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


def expected(dtype=np.float64):
    t = {name: value.astype(dtype) for name, value in values().items()}
    return {
        "layers.0.weight": t["enc.weight"].T, "layers.0.bias": t["enc.bias"], "norm.weight": t["ln.weight"],
        "norm.bias": t["ln.bias"], "heads.weight": t["heads.weight"].T.reshape(8, 3, 4),
        "heads.bias": t["heads.bias"].reshape(3, 4), "conv.weight": t["conv.weight"].transpose(2, 3, 1, 0),
        "conv.bias": t["conv.bias"], "table.weight": t["tok.weight"],
    }  # fmt: skip


def check(model, want):
    got = model.state_dict()
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert np.array_equal(got[name], value.astype(np.float64)), name


class Tensor:
    """What a tensor of PyTorch shows: ranks other than the first do not import it."""

    def __init__(self, array):
        self.array, self.dtype = array, f"torch.{array.dtype}"

    def detach(self):
        return self

    def cpu(self):
        return self

    def numpy(self):
        return self.array


@pytest.mark.parametrize("name", ["serial", "data", "2d", "3d"])
def test_tensors_under_other_names(name, torch, make_grid, world):
    scheme = schemes.discover()[name].SCHEME
    sizes = {"one": world.size} if name == "serial" else sizes_for(scheme, world.size, 1)[0]
    model = Net(scheme, make_grid(sizes)).initialize(seed=1)
    wrap = Tensor if torch is None else lambda a: torch.nn.Parameter(torch.tensor(a))
    state = {name: wrap(value) for name, value in values().items()}
    state["position_ids"] = wrap(np.arange(3.0))
    as_dict = {name: next((new for new in expected() if _alike(name, new)), name) for name in SHAPES}
    for names in (NAMES, {**as_dict, "position_ids": None}, lambda n: None if n == "position_ids" else as_dict[n]):
        model.initialize(seed=2)
        model.load_state_dict(state, names=names)
        check(model, expected())


def _alike(theirs, ours):
    return ours == theirs.replace("enc.", "layers.0.").replace("ln.", "norm.").replace("tok.", "table.")


def test_files_of_which_each_rank_reads_its_part(torch, on_root, peer_folder, make_grid, world):
    paths = {"float64": peer_folder / "state64.safetensors", "bfloat16": peer_folder / "state16.safetensors"}

    def write():
        from safetensors.torch import save_file

        for dtype, path in paths.items():
            tensors = {n: torch.tensor(v).to(getattr(torch, dtype)) for n, v in values().items()}
            save_file({**tensors, "position_ids": torch.arange(3)}, path)

    on_root(write)
    scheme = schemes.for_mode("2d").SCHEME
    model = Net(scheme, make_grid(sizes_for(scheme, world.size, 1)[0])).initialize(seed=1)
    for dtype, path in paths.items():
        model.load_state_dict(path, names=NAMES)
        check(model, expected(__import__("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.float64))


def test_half_tensors(torch, on_root, make_grid, world):
    if torch is not None:
        from parlinalg.nn.foreign import host

        tensor = torch.tensor(values()["enc.weight"]).to(torch.bfloat16).T
        assert np.array_equal(host(tensor).astype(np.float64), tensor.double().numpy())


def test_what_does_not_fit_changes_nothing(make_grid, world):
    scheme = schemes.for_mode("2d").SCHEME
    model = Net(scheme, make_grid(sizes_for(scheme, world.size, 1)[0])).initialize(seed=1)
    before = model.state_dict()
    state = {name: Tensor(value) for name, value in values().items()}
    state["more"], state["enc.weight"] = Tensor(np.zeros(2)), Tensor(np.zeros((8, 5)))
    del state["ln.bias"]
    words = r"missing: norm\.bias; unexpected: more; misshapen: layers\.0\.weight \(8, 5\) instead of \(6, 8\)"
    for given, names, match in [
        (state, NAMES, words),
        (state, {"enc.wieght": "layers.0.weight"}, "names has 'enc.wieght', which the state does not have"),
        (state, lambda n: "one", r"names make both 'enc\.weight' and 'enc\.bias' of the state 'one'"),
        ("nothing.safetensors", None, "there is no file or folder nothing.safetensors"),
        ([1], None, "a state is a dict of arrays or tensors, or the path of a safetensors file, not a list"),
    ]:
        with pytest.raises(pla.ConfigError, match=match):
            model.load_state_dict(given, names=names)
    assert all(np.array_equal(a, before[n]) for n, a in model.state_dict().items())


@pytest.mark.ranks(2)
def test_a_pipeline_takes_them_too(world, backend):
    from parlinalg.pipeline import split

    class Tower(nn.Module):
        def __init__(self, mesh):
            super().__init__()
            self.a = nn.Linear(6, 8, mesh.scheme, mesh.grid, dtype="float64")
            self.b = nn.Linear(8, 6, mesh.scheme, mesh.grid, "contract", dtype="float64")

        def layers(self):
            return [self.a, self.b]

    rng = np.random.default_rng(1)
    t = {"x.weight": rng.normal(size=(8, 6)), "x.bias": rng.normal(size=8), "y.weight": rng.normal(size=(6, 8)),
         "y.bias": rng.normal(size=6)}  # fmt: skip
    with pla.launch({"parallel": {"pipeline": 2}}, world, backend) as mesh:
        model = split(Tower(mesh), mesh.topology, mesh.schedule, "uniform").initialize(seed=1)
        model.load_state_dict({n: Tensor(a) for n, a in t.items()}, names=[("^x", "a"), ("^y", "b")])
        got = model.state_dict()
        assert np.array_equal(got["a.weight"], t["x.weight"].T)
        assert np.array_equal(got["b.weight"], t["y.weight"].T)
