"""AdamW with two parameter groups, and Muon with what AdamW updates beside it, make the steps of PyTorch's."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from parlinalg.autograd import ops
from parlinalg.optim import AdamW, Muon, Scheduler, decay_groups
from tests.training import sizes_for

pytestmark = [pytest.mark.ranks(1, 2, 4), pytest.mark.timeout(180)]
STEPS, SIZES = 5, (6, 8, 6)


def batches():
    rng = np.random.default_rng(3)
    return [(rng.normal(size=(10, 6)), rng.integers(0, 6, 10)) for _ in range(STEPS)]


def model_of(scheme, grid):
    norm = nn.LayerNorm(6, scheme, grid, dtype="float64")
    return nn.Sequential(norm, *nn.MLP(SIZES, scheme, grid, "gelu", dtype="float64")).initialize(seed=1)


def peer(torch, path, state):
    """The losses and parameters of the same model and groups in PyTorch."""
    t = torch
    model = t.nn.Sequential(t.nn.LayerNorm(6), t.nn.Linear(6, 8), t.nn.GELU(), t.nn.Linear(8, 6)).double()
    for name, p in model.named_parameters():
        value = t.tensor(state[name])
        p.data = value.T.contiguous() if p.ndim == 2 else value
    named = dict(model.named_parameters())
    weights = [p for n, p in named.items() if p.ndim == 2]
    others = [p for n, p in named.items() if p.ndim < 2]
    optimizer = t.optim.AdamW(
        [{"params": weights, "weight_decay": 0.3}, {"params": others, "weight_decay": 0.0, "lr": 0.05}], lr=0.01
    )
    rate = t.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    for x, y in batches():
        loss = t.nn.functional.cross_entropy(model(t.tensor(x)), t.tensor(y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
        losses.append(loss.item())
    values = {n: (p.T if p.ndim == 2 else p).detach().numpy() for n, p in named.items()}
    np.savez(path, losses=losses, **values)


def trained(model, optimizer, scheme, grid, rate=None):
    """The losses of all steps."""
    losses = []
    for x, y in batches():
        flat = scheme.for_dims(2)
        out = model(pla.Tensor(pla.distribute(x, grid, flat.residual)))
        loss = ops.cross_entropy(out, pla.distribute(y, grid, pla.Layout(*out.layout.dims[:-1])))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rate is not None:
            rate.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["data", "2d", "1d"])
def test_two_groups_with_a_schedule(name, torch, on_root, peer_folder, make_grid, world):
    scheme = schemes.discover()[name].SCHEME
    grid = make_grid(sizes_for(scheme, world.size, 1)[0])
    model = model_of(scheme, grid)
    state, path = model.state_dict(), peer_folder / f"groups-{name}.npz"
    on_root(lambda: peer(torch, path, state))
    want = np.load(path)
    weights, others = decay_groups(model, 0.3)
    optimizer = AdamW([weights, {**others, "lr": 0.05}], lr=0.01)
    rate = Scheduler(optimizer, lambda step: 1 / (1 + step))
    losses = trained(model, optimizer, scheme, grid, rate)
    np.testing.assert_allclose(losses, want["losses"], rtol=1e-12)
    for key, value in model.state_dict().items():
        np.testing.assert_allclose(value, want[key], rtol=0, atol=1e-12, err_msg=key)


def muon_peer(torch, path, state, patch):
    """Losses and parameters of the same perceptron in PyTorch, whose iteration is made float64 too."""
    t = torch
    model = t.nn.Sequential(t.nn.Linear(6, 8), t.nn.GELU(), t.nn.Linear(8, 7), t.nn.GELU(), t.nn.Linear(7, 6)).double()
    for name, p in model.named_parameters():
        value = t.tensor(state[name])
        p.data = value.T.contiguous() if p.ndim == 2 else value
    named = dict(model.named_parameters())
    hidden = ["0.weight", "2.weight"]
    first = t.optim.Muon([named[n] for n in hidden], lr=0.02, weight_decay=0.1)
    rest = [p for n, p in named.items() if n not in hidden]
    second = t.optim.AdamW(rest, lr=3e-4, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
    losses = []
    with patch.context() as patched:
        patched.setattr(t.Tensor, "bfloat16", t.Tensor.clone)
        for x, y in batches():
            loss = t.nn.functional.cross_entropy(model(t.tensor(x)), t.tensor(y))
            for each in (first, second):
                each.zero_grad()
            loss.backward()
            for each in (first, second):
                each.step()
            losses.append(loss.item())
    values = {n: (p.T if p.ndim == 2 else p).detach().numpy() for n, p in named.items()}
    np.savez(path, losses=losses, **values)


@pytest.mark.parametrize("name", ["data", "2d", "1d"])
def test_muon(name, torch, on_root, peer_folder, make_grid, world, monkeypatch):
    scheme = schemes.discover()[name].SCHEME
    grid = make_grid(sizes_for(scheme, world.size, 1)[0])
    model = nn.MLP((6, 8, 7, 6), scheme, grid, "gelu", dtype="float64", seed=1)
    state, path = model.state_dict(), peer_folder / f"muon-{name}.npz"
    layers = {f"{i}.{kind}": state[f"{i}.{kind}"] for i in (0, 2, 4) for kind in ("weight", "bias")}
    on_root(lambda: muon_peer(torch, path, layers, monkeypatch))
    want = np.load(path)
    losses = trained(model, Muon(model.parameters(), weight_decay=0.1), scheme, grid)
    np.testing.assert_allclose(losses, want["losses"], rtol=1e-12)
    for key, value in model.state_dict().items():
        np.testing.assert_allclose(value, want[key], rtol=0, atol=1e-12, err_msg=key)
