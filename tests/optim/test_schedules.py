"""Learning-rate schedules."""

from __future__ import annotations

import math

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.optim import SGD, Scheduler
from parlinalg.optim.schedules import Constant, Cosine, Linear, Step, WarmUp


@pytest.mark.serial
@pytest.mark.parametrize(("schedule", "want"), [
    (Constant(), [1, 1, 1]),
    (Linear(4, 0.2), [1, 0.8, 0.6, 0.4, 0.2, 0.2]),
    (Cosine(4, 0.1), [0.1 + 0.45 * (1 + math.cos(math.pi * min(1, s / 4))) for s in range(7)]),
    (Step(2, 0.1), [1, 1, 0.1, 0.1, 0.01]),
    (WarmUp(2, Linear(2)), [0.5, 1, 1, 0.5, 0, 0]),
    (WarmUp(0), [1, 1]),
])  # fmt: skip
def test_schedules(schedule, want):
    np.testing.assert_allclose([schedule(s) for s in range(len(want))], want, rtol=1e-14, atol=1e-15)


@pytest.mark.serial
def test_scheduler_sets_the_rate_and_goes_on_where_it_was():
    with pla.Grid({"a": 1}) as grid:
        p = pla.Parameter(pla.zeros(3, grid, pla.Layout("a")))
        optimizer = SGD([p], 2.0)
        scheduler = Scheduler(optimizer, WarmUp(4))
        rates = [optimizer.lr]
        for _ in range(4):
            scheduler.step()
            rates.append(optimizer.lr)
        assert rates == [0.5, 1.0, 1.5, 2.0, 2.0]
        again = Scheduler(SGD([p], 7.0), WarmUp(4))
        again.load_state_dict({**scheduler.state_dict(), "steps": 1})
        assert again.optimizer.lr == again.lr == 1.0


@pytest.mark.serial
def test_bad_settings_say_what_would_be_right():
    with pytest.raises(pla.ConfigError, match="steps of at least 1, not 0"):
        Cosine(0)
    with pytest.raises(pla.ConfigError, match="every of at least 1, not -2"):
        Step(-2)
    with pytest.raises(pla.ConfigError, match="at least 0, not -1"):
        WarmUp(-1)
