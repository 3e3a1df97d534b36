"""How the inputs of a model are cut, where they come as host arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import Tensor
from parlinalg.comm import Comm
from parlinalg.datasets.dataloader import Placement
from parlinalg.errors import EngineError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.nn import Module
from parlinalg.pipeline.model import PipelineModel
from parlinalg.schemes import Scheme
from parlinalg.train.feed import placed


def grid_of(model: Module) -> Grid:
    """Return the grid of a model: its own, or that of the first part which has one."""
    for module in model.modules():
        found = getattr(module, "grid", None)
        if isinstance(found, Grid):
            return found
        for held in module._parameters.values():
            return held.grid
    raise EngineError(
        f"{type(model).__name__} has no parameters, and no grid: there is nothing to train (modules "
        "in a plain list are not found: put them in an nn.Sequential, or in attributes)"
    )


def inputs_layout(model: Module, x: Any) -> Layout:
    """Return the layout of a host array of a model's inputs.

    A model may define `ids_layout`, `images_layout` or `input_layout(ndim)`.  Otherwise floating arrays are cut as the
    residual stream of the scheme of its first part that has one, and integers as ids, which have no features.
    """
    integers = np.asarray(x).dtype.kind in "iub"
    for name in ("ids_layout", "images_layout"):
        found = getattr(model, name, None)
        if isinstance(found, Layout):
            return found
    ndim = np.ndim(x)
    if callable(getattr(model, "input_layout", None)):
        layout: Layout = model.input_layout(ndim)
        return layout
    scheme = next((m.scheme for m in model.modules() if isinstance(getattr(m, "scheme", None), Scheme)), None)
    if scheme is None:
        raise EngineError(
            f"{type(model).__name__} does not define how its inputs are cut: give it an input_layout(ndim), or pass "
            "DistArrays"
        )
    return scheme.leading(ndim).tokens if integers else scheme.for_dims(ndim).residual


def placement(model: Module, grid: Grid, world: Comm, counts: Callable[[Any], int] | None = None) -> Placement:
    """Return the placement of the rows of batches that a model on this rank needs.

    Parameters
    ----------
    counts : callable, optional
        From a host array of labels, or a tree of them, the targets in it that count.
    """
    declared, needs = getattr(model, "whole", model), (True, True)
    if isinstance(model, PipelineModel):
        needs = any(stage.first for stage in model.chunks), any(stage.last for stage in model.chunks)
    mesh: Any = grid.mesh
    data = tuple(axis for axis in ("data",) if axis in grid.axes) if mesh is None else mesh.axes("data")
    group = 0 if mesh is None else mesh.topology.rank
    more = {} if counts is None else {"counts": counts}
    return Placement(
        grid, world, lambda dtype, ndim: inputs_layout(declared, np.empty((0,) * ndim, dtype)), dtype_of(model), needs,
        group, data, **more,
    )  # fmt: skip


def dtype_of(model: Module) -> np.dtype[Any] | None:
    """Return the dtype of a model's first parameter, of any stage; None without parameters."""
    if isinstance(model, PipelineModel):
        return next((np.dtype(p.dtype) for p in model.inventory.values()), None)
    return next((np.dtype(p.dtype) for m in model.modules() for p in m._parameters.values()), None)


def place_inputs(model: Module, x: Any, grid: Grid, dtype: np.dtype[Any] | None) -> Any:
    """Return a model's inputs, arrays or a tree, as `DistArray`s, floating ones in this dtype.  Collective."""
    if isinstance(x, dict):
        return {key: place_inputs(model, value, grid, dtype) for key, value in x.items()}
    if isinstance(x, tuple | list):
        return type(x)(place_inputs(model, value, grid, dtype) for value in x)
    if isinstance(x, Tensor | DistArray):
        return x
    return placed(x, grid, inputs_layout(model, x), dtype)
