"""Dropout by counted random numbers."""

from __future__ import annotations

from parlinalg import random
from parlinalg.array.reductions import summed
from parlinalg.autograd import Part, Tensor, record
from parlinalg.errors import ConfigError
from parlinalg.nn.checks import real
from parlinalg.nn.module import Module
from parlinalg.random import dropping
from parlinalg.random.draws import Draws, current_draws
from parlinalg.sequence import token_positions


class Dropout(Module):
    """In training, sets elements to zero with probability p and multiplies the others by 1/(1 - p) (Srivastava et al.,
    2014); else does nothing.

    Which elements depends on the model's seed, this module's qualified name, the step (`training_step`), the call's
    number within it, and the element's index in the step's whole batch: it is the same on every grid, with any number
    of microbatches, and when computed again.

    Parameters
    ----------
    p : float
        At least 0 and below 1.
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = real("dropout's p", p, below=1)
        self._draws = Draws()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self.name is None:
            raise ConfigError("dropout draws by its qualified name; call initialize(seed) on the whole model first")
        draws = current_draws() or self._draws
        data = summed(x.data, "dropout")
        keep, grid, rest = self._draw(draws), data.grid, data.layout
        indices = _places(data.shape, grid.block(rest, data.shape))
        drop, table = dropping(keep, data.block, data.shape, indices, grid.backend)
        part = Part(lambda g, table: (drop(g, table), rest), table)
        return record("dropout", data.like(drop(data.block, table)), [x], [part])

    def _draw(self, draws: Draws) -> random.Bernoulli:
        """Return the elements kept; drawn by 16 bits each where p is not so small or large that they would not do."""
        bits = 16 if 2**-8 <= self.p <= 1 - 2**-8 else 32
        return random.Bernoulli(
            1 - self.p, bits, seed=self.seed, name=self.name or "", call=draws.call(self.name or ""), step=draws.step,
            start=draws.start,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"p={self.p}"


def _places(shape: tuple[int, ...], ranges: tuple[range, ...]) -> tuple[random.Indices, ...]:
    """Return the indices of a block's elements [batch, sequence, …] where the tokens lie in their order."""
    positions = token_positions().positions
    if positions is None or len(shape) < 3:
        return ranges
    token_positions().check(shape[1])
    return (ranges[0], positions[ranges[1].start : ranges[1].stop], *ranges[2:])
