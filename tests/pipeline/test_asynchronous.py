"""Asynchronous schedules equal their oracles; weights are stashed while they change."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, optim, schemes
from parlinalg.parallel import GradientReducer, ZeRO
from parlinalg.pipeline.stash import Stash
from tests.pipeline.oracles import Delayed, Perceptron, pipedream, two_buffered
from tests.training import mean_loss

DATA = schemes.discover()["data"].SCHEME


def rows(step, count=6, widths=(5, 3)):
    rng = np.random.default_rng(step)
    return [rng.normal(size=(count, n)) for n in widths]


# ------------------------------------------------------------------ the oracles
@pytest.mark.serial
@pytest.mark.parametrize("delay", [pipedream(3), two_buffered(3), lambda stage: 0], ids=["pipedream", "2bw", "none"])
def test_the_oracles_agree_with_each_other(delay):
    serial = schemes.discover()["serial"].SCHEME
    by_hand = Perceptron((5, 4, 4, 3))
    with pla.Grid({"one": 1}) as grid:
        linears = [nn.Linear(*w.shape, serial, grid, bias=False, dtype=np.float64) for w in by_hand.start]
        model = nn.Sequential(linears[0], nn.Tanh(), linears[1], nn.Tanh(), linears[2]).initialize(0)
        model.load_state_dict({f"{2 * s}.weight": w for s, w in enumerate(by_hand.start)})

        def losses_of(batch):
            error = model(pla.Tensor(batch.x)) - pla.Tensor(batch.y)
            return (error * error).sum() * 0.5, batch.count

        def placed(a):
            return pla.distribute(a, grid, pla.Layout(None, None))

        batches = [rows(t) for t in range(7)]
        parts = [
            [
                SimpleNamespace(x=placed(x[at]), y=placed(y[at]), offset=at.start, count=at.stop - at.start)
                for at in (slice(0, 4), slice(4, 6))
            ]
            for x, y in batches
        ]
        oracle = Delayed(model, optim.SGD(model.parameters(), 0.1), lambda name: int(name[0]) // 2, losses_of)
        losses = oracle.run(parts, delay)
        want, weights = by_hand.train(batches, 0.1, delay)
        np.testing.assert_allclose(losses, want, rtol=1e-12)
        for s, w in enumerate(weights):
            np.testing.assert_allclose(oracle.weights()[f"{2 * s}.weight"], w, rtol=1e-12, atol=1e-13)


# ------------------------------------------------------------------ the stash
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_version_stays_while_the_newest_is_updated(stage, make_grid, world):
    grid = make_grid({"data": world.size})

    def trained(stashed):
        """Of gradients one step late: what they are, and the weights; by a stash, or by writing weights back."""
        model = nn.MLP((5, 4, 3), DATA, grid, "gelu", dtype=np.float64, seed=5)
        reducer = GradientReducer(model.parameters(), [ZeRO(stage)] if stage else None, first_bucket=200, bucket=300)
        update = optim.AdamW(model.parameters(), 0.1)
        stash, losses, late, found = Stash(update), {}, {}, []

        def forward(t):
            x, _ = rows(t, 8)
            flat = DATA.for_dims(2)
            classes = pla.distribute(np.arange(8) % 3, grid, flat.tokens)
            losses[t] = mean_loss(model, pla.Tensor(pla.distribute(x, grid, flat.residual)), classes)

        if stashed:
            forward(0)
            for t in range(5):
                forward(t + 1)
                assert stash.newest == t
                stash.use(max(0, t - 1))
                losses[t].backward()
                if t:
                    stash.drop(t - 1)
                found += [p.updated[1].copy() for p in model.parameters()]
                stash.advance(keep=True)
                assert len(stash) == 2
                update.step()
                update.zero_grad()
            stash.drop(4)
            found += [p.gather() for p in model.parameters()]
            assert len({id(p.block) for p in model.parameters()}) == 4
        else:
            history = [model.state_dict()]
            for t in range(5):
                model.load_state_dict(history[max(0, t - 1)])
                forward(t)
                losses[t].backward()
                model.load_state_dict(history[-1])
                found += [p.updated[1].copy() for p in model.parameters()]
                update.step()
                update.zero_grad()
                history.append(model.state_dict())
            found += [p.gather() for p in model.parameters()]
        reducer.detach()
        return found

    for got, want in zip(trained(True), trained(False), strict=True):
        host = [a if isinstance(a, np.ndarray) else grid.backend.to_host(a) for a in (got, want)]
        np.testing.assert_allclose(*host, rtol=1e-12, atol=1e-13)
