"""What asynchronous pipelines compute, said again by one rank: delayed gradients, one step at a time.

PipeDream: W_s(t+1) = W_s(t) - η ∇_s f(W_0(t-p+1), …, W_{p-1}(t)); PipeDream-2BW: W(t+1) = W(t) - η ∇f(W(t-1)).  Where
a version before the first of a run is asked for, it is the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from parlinalg import nn
from parlinalg.autograd import no_sync

Weights = dict[str, np.ndarray]
Version = Callable[[int, int], int]
"""From a stage and a microbatch, the steps behind the weights that it uses there."""


def pipedream(stages: int, every: int = 1) -> Version:
    """Stage s is p - 1 - s microbatches behind."""
    return lambda stage, microbatch: max(0, microbatch - (stages - 1 - stage)) // every


def two_buffered(stages: int, every: int = 1) -> Version:
    """All stages are one step behind."""
    return lambda stage, microbatch: max(0, microbatch // every - 1)


class Perceptron:
    """Linear layers with tanh between them, one a stage, and half the squared error; all by hand, in NumPy."""

    def __init__(self, widths: Sequence[int], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.start = [rng.normal(size=both) / np.sqrt(both[0]) for both in pairwise(widths)]

    @staticmethod
    def gradients(weights: Sequence[np.ndarray], x: np.ndarray, y: np.ndarray) -> tuple[float, list[np.ndarray]]:
        """The sum of the losses of a batch, and its gradient by each stage's weight."""
        inputs = [x]
        for w in weights[:-1]:
            inputs.append(np.tanh(inputs[-1] @ w))
        error = inputs[-1] @ weights[-1] - y
        grad, found = error, []
        for w, given in zip(reversed(weights), reversed(inputs), strict=True):
            found.append(given.T @ grad)
            grad = (grad @ w.T) * (1 - given * given)
        return 0.5 * float((error * error).sum()), found[::-1]

    def train(
        self, batches: Sequence[tuple[np.ndarray, np.ndarray]], rate: float, version: Version
    ) -> tuple[list[float], list[np.ndarray]]:
        """The losses of a run with a step for each batch by its mean, and the weights after it."""
        history, losses = [self.start], []
        for t, (x, y) in enumerate(batches):
            used = [history[version(s, t)][s] for s in range(len(self.start))]
            loss, grads = self.gradients(used, x, y)
            losses.append(loss / len(x))
            history.append([w - rate * g / len(x) for w, g in zip(history[-1], grads, strict=True)])
        return losses, history[-1]


class Delayed:
    """A model of parlinalg on one rank, trained by any optimizer with gradients at older weights.

    Parameters
    ----------
    model : Module
    optimizer : Optimizer
        Of its parameters.
    stage_of : callable
        From a parameter's qualified name, its stage.
    losses_of : callable
        From a batch, the sum of its losses and their number.
    """

    def __init__(
        self, model: Any, optimizer: Any, stage_of: Callable[[str], int], losses_of: Callable[[Any], tuple[Any, int]]
    ) -> None:
        self.model, self.optimizer, self.stage_of, self.losses_of = model, optimizer, stage_of, losses_of

    def weights(self) -> Weights:
        return {name: p.block.copy() for name, p in self.model.named_parameters()}

    def put(self, weights: Weights) -> None:
        for name, p in self.model.named_parameters():
            p.block[...] = weights[name]

    def run(self, batches: Sequence[Sequence[Any]], version: Version, step: int = 0) -> list[float]:
        """A run between two flushes, of one optimizer step for the microbatches of each batch; their mean losses."""
        history, losses, at = [self.weights()], [], 0
        for parts in batches:
            count, total = max(1, sum(part.count for part in parts)), 0.0
            for j, part in enumerate(parts, at):
                self.put({name: history[version(self.stage_of(name), j)][name] for name in history[0]})
                with no_sync(), nn.training_step(step, part.offset):
                    loss, _ = self.losses_of(part)
                    (loss * (1 / count)).backward()
                total += loss.item()
            at += len(parts)
            losses.append(total / count)
            self.put(history[-1])
            self.optimizer.step()
            self.optimizer.zero_grad()
            history.append(self.weights())
        return losses
