"""From the gradients of a step to parameters: the norm, clipping, the scale of the loss, and skipped steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from parlinalg.autograd import Parameter
from parlinalg.errors import ConfigError
from parlinalg.optim import Optimizer
from parlinalg.parallel.clip import Gradients, above_zero, clip_gradient_value, clipping, examine
from parlinalg.parallel.precision import Unscaled, overflowing
from parlinalg.train.schema import check_values, integer, real

#: What looks at the gradients of the whole model, of which these parameters are this rank's.
Examine = Callable[[Sequence[Parameter], float], Gradients]


class Updated(NamedTuple):
    """The outcome of a step.

    Attributes
    ----------
    norm : float
        The 2-norm of the gradient of the whole model, before clipping.
    changed : bool
        Whether parameters were changed: not where the loss or a gradient is not finite and such steps are skipped.
    """

    norm: float
    changed: bool


@dataclass
class Update:
    """Changes the parameters by their gradients.

    Attributes
    ----------
    optimizer : Optimizer
    clip : float or None
        The largest norm of the gradient of the whole model.
    clip_value : float or None
        The largest element of the gradient.
    scaler : LossScaler or Unscaled
    skip_nonfinite : bool
        Whether a step whose loss or gradient is not finite leaves all as it is; with a `LossScaler` it always does.
    examine : callable
        From parameters and what their gradients are multiplied by, the norm over the whole model and whether all is
        finite; a pipeline looks at all stages.

    Raises
    ------
    ConfigError
        If a limit to clip by is not above 0.
    """

    optimizer: Optimizer
    clip: float | None = None
    clip_value: float | None = None
    scaler: Unscaled = field(default_factory=Unscaled)
    skip_nonfinite: bool = False
    examine: Examine = examine

    def __post_init__(self) -> None:
        for what, limit in (("norm", self.clip), ("value", self.clip_value)):
            if limit is not None:
                above_zero(limit, what)

    @property
    def scale(self) -> float:
        """The factor of the loss before the backward pass."""
        return self.scaler.scale

    @property
    def scales(self) -> bool:
        """True if the loss is scaled, as for float16."""
        return self.scaler.scales

    @property
    def skips(self) -> bool:
        """True if steps that are not finite are skipped."""
        return self.skip_nonfinite or self.scaler.scales

    def tolerance(self) -> AbstractContextManager[Any]:
        """Return a context without warnings of overflows, where steps that are not finite are skipped."""
        return overflowing() if self.skips else nullcontext()

    def __call__(self, finite: bool, scale: float) -> Updated:
        """Make the step, and forget the gradients.  Collective.

        Parameters
        ----------
        finite : bool
            Whether the loss is.
        scale : float
            What the gradients are multiplied by.
        """
        parameters = self.optimizer.parameters
        found = self.examine(parameters, scale)
        finite = finite and found.finite
        changes = finite or not self.skips
        if changes:
            if finite:
                self._clip_value(scale)
            self.optimizer.step(clipping(found.norm, self.clip) / scale)
        self.scaler.update(finite)
        self.optimizer.zero_grad()
        return Updated(found.norm, changes)

    def _clip_value(self, scale: float) -> None:
        if self.clip_value is not None:
            parameters = self.optimizer.parameters
            most = min([float(np.finfo(np.float32).max), *(_most(p.dtype) for p in parameters)])
            clip_gradient_value(parameters, min(self.clip_value * scale, most))

    def of_one_stage(self) -> None:
        """Make a step of this rank's stages, whatever others do: for asynchronous schedules."""
        self._clip_value(1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check_asynchronous(self, name: str) -> None:
        """Raise a ConfigError if a step needs what is known of all stages at one time alone."""
        wanted = {
            "clip_grad_norm": self.clip is not None,
            "a loss scale (precision='fp16')": self.scales,
            "skip_nonfinite": self.skip_nonfinite,
        }
        if any(wanted.values()):
            found = next(what for what, wants in wanted.items() if wants)
            raise ConfigError(
                f"{found} with the schedule {name!r}: its stages make their steps at different times, so that there is "
                "no gradient of the whole model; leave it out (clip_grad_value and bf16 go), or take a synchronous "
                "schedule, such as '1f1b'"
            )

    # ------------------------------------------------------------------ state
    def progress(self) -> dict[str, Any]:
        """Return the state of the loss scale and of the optimizer beside its arrays, as plain values for JSON."""
        optimizer = self.optimizer
        return {
            "scaler": self.scaler.state_dict(),
            "optimizer": {"steps": optimizer.steps, "lr": optimizer.lr, "groups": optimizer.options()},
        }

    def check_progress(self, progress: Mapping[str, Any]) -> None:
        """Raise an error unless `set_progress` can take this."""
        check_values("optimizer", progress["optimizer"], {"steps": integer(0), "lr": real(0)})
        if self.scales and progress["scaler"] is not None:
            checks = {"scale": real(0, above=True), "good": integer(0), "skipped": integer(0)}
            check_values("scaler", progress["scaler"], checks)

    def set_progress(self, progress: Mapping[str, Any]) -> None:
        """Restore what `progress` gave."""
        if progress["scaler"] is not None:
            self.scaler.load_state_dict(progress["scaler"])
        saved = progress["optimizer"]
        if "groups" in saved:
            self.optimizer.set_options(saved["groups"])
        elif len(self.optimizer.param_groups) == 1:
            self.optimizer.lr = float(saved["lr"])
        self.optimizer.steps = int(saved["steps"])


def _most(dtype: np.dtype[Any]) -> float:
    """Return the largest number of a dtype that gradients have."""
    return 65504.0 if dtype == np.float16 else math.inf
