"""The options of models whose perceptrons are mixtures of experts, under the names of `transformers.MixtralConfig`."""

from __future__ import annotations

from typing import Any

from parlinalg.grid import Grid
from parlinalg.layout import AxisSpec, as_cut


def expert_options(
    grid: Grid, num_local_experts: int | None, num_experts_per_tok: int, router_aux_loss_coef: float,
    capacity_factor: float | None, expert_axis: AxisSpec,
) -> tuple[dict[str, Any], dict[str, Any] | None]:  # fmt: skip
    """What a model's `config` says of its experts, and what `TransformerBlock` takes; nothing where it has none.

    Parameters
    ----------
    num_local_experts : int, optional
        None: perceptrons, no experts.
    num_experts_per_tok : int
    router_aux_loss_coef : float
    capacity_factor : float or None
    expert_axis : str, tuple of str or None
        "auto" is "data" where the grid has that axis, else none.
    """
    if num_local_experts is None:
        return {}, None
    auto = "data" if "data" in grid.sizes else None
    axis = as_cut(auto if expert_axis == "auto" and "auto" not in grid.sizes else expert_axis)
    said = {
        "num_local_experts": num_local_experts, "num_experts_per_tok": num_experts_per_tok,
        "router_aux_loss_coef": router_aux_loss_coef, "capacity_factor": capacity_factor,
    }  # fmt: skip
    made = {
        "experts": num_local_experts, "top_k": num_experts_per_tok, "aux_loss_coef": router_aux_loss_coef,
        "capacity_factor": capacity_factor, "axis": axis,
    }  # fmt: skip
    return said, made
