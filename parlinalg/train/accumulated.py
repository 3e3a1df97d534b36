"""What the microbatches of a step weigh, as they come."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Accumulated:
    """The microbatches of a step so far: each one's mean loss weighs as it has targets.

    Attributes
    ----------
    rows : int
    targets : float
    reference : float
        The weight of the first one, in terms of which gradients are held; 0.0 before it.
    """

    def __init__(self) -> None:
        self.rows, self.targets, self.reference = 0, 0.0, 0.0
        self._whole: tuple[int, float] | None = None

    @contextmanager
    def expecting(self, rows: int, targets: int) -> Iterator[None]:
        """Within it come the microbatches of a batch that has so many in all."""
        self._whole = self.rows + rows, self.targets + targets
        try:
            yield
        finally:
            self._whole = None

    def add(self, targets: float) -> float:
        """Take in a microbatch's targets; gives what its mean loss weighs."""
        weight = max(1.0, float(targets))
        if not self.reference:
            self.reference = weight
        self.targets += targets
        return weight

    def hold(self, rows: int, targets: float, reference: float) -> None:
        """Be those of a whole step, whose gradients are held in terms of `reference`."""
        self.rows, self.targets, self.reference = rows, targets, reference

    @property
    def held(self) -> float:
        """What the gradient of the mean over all targets is multiplied by."""
        return max(1.0, self.targets) / self.reference

    def share(self, rows: int, targets: int) -> float:
        """What the terms that layers add weigh beside the mean loss of the next microbatch.

        They are means over its rows, so that they weigh as these do among the step's; where it is not known how many
        targets and rows are to come, as many a row as there were until now.
        """
        every, all_targets = self._whole or (self.rows + rows, self.targets + targets)
        return rows * max(1.0, all_targets) / max(1, every) / max(1, targets)
