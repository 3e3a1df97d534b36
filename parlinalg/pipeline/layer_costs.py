"""Costs of the layers of a model, by which a partition balances its stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import Parameter, Tensor, no_sync
from parlinalg.comm import Comm
from parlinalg.errors import ConfigError
from parlinalg.nn.init import is_buffer
from parlinalg.nn.layer import Layer
from parlinalg.nn.module import Module, buffers_kept
from parlinalg.pipeline.p2p import tree_flatten, tree_unflatten
from parlinalg.random.draws import training_step

ROUNDS = 3
"""Passes that are measured, after one that is not; the shortest counts."""


def parameters_of(layers: Sequence[Layer]) -> list[float]:
    """Return the elements of the parameters of each layer, on all ranks together; known before they are made."""
    found = []
    for layer in layers:
        held = {id(p): p for m in layer.all_modules() for p in m._parameters.values()}
        found.append(float(sum(math.prod(p.shape) for p in held.values() if not is_buffer(p))))
    return found


def flops_of(model: Module, layers: Sequence[Layer], sample: Any = None) -> list[float]:
    """Return the floating-point operations of a forward and backward pass of each layer.

    A model may know them, by `layer_flops(batch, sequence)`; of others the products count.

    Parameters
    ----------
    model : Module
    layers : sequence of Layer
    sample : Tensor or DistArray, optional
        What the first layer takes: its second dim is the length of sequences, by default the most that the model takes.

    Raises
    ------
    ConfigError
        If no layer has a product.
    """
    known = getattr(model, "layer_flops", None)
    if callable(known):
        shape: tuple[int, ...] = getattr(sample, "shape", ())
        config = getattr(model, "config", {})
        length = shape[1] if len(shape) == 2 else config.get("max_position_embeddings", 1)
        return [float(f) for f in known(1, length)]
    found = []
    for layer in layers:
        found.append(6.0 * sum(m.multiplications for m in layer.all_modules()))
    if not any(found):
        raise ConfigError(
            f"partition='flops': no layer of {type(model).__name__} has products that are known, and the model no "
            "layer_flops(batch, sequence): use 'time', which measures, 'parameters' or 'uniform'"
        )
    return found


def seconds_of(model: Module, layers: Sequence[Layer], sample: Any, world: Comm) -> list[float]:
    """Return the seconds of a forward and backward pass of each layer, on the slowest rank.  Collective.

    Every pipeline rank measures every layer, on its own grid; layers without values get some meanwhile, one layer at a
    time.

    Parameters
    ----------
    model : Module
    layers : sequence of Layer
    sample : Tensor, DistArray, or tree of them
        What the first layer takes.
    world : Comm
        All ranks, which learn the same.
    """
    found, x = [], sample
    for layer in layers:
        modules = layer.all_modules()
        bare = [m for m in modules if not all(isinstance(p, Parameter) for p in m._parameters.values())]
        model.initialize(model.seed, only=bare)
        best, y = math.inf, None
        for i in range(ROUNDS + 1):
            form, inputs = tree_flatten(x)
            leaves: list[Any] = [Tensor(t.data, requires_grad=t.data.dtype.kind not in "biu") for t in inputs]
            arrays = isinstance(x, DistArray)  # ids, as the layer takes them
            whole = tree_unflatten(form, [t.data if arrays and not t.requires_grad else t for t in leaves])
            began = perf_counter()
            with no_sync(), training_step(0), buffers_kept(model):
                y = layer.forward(whole)
                backward_of(tree_flatten(y)[1])
            if i:
                best = min(best, perf_counter() - began)
        for m in modules:
            for p in m._parameters.values():
                if isinstance(p, Parameter):
                    p.grad = None
        model.forget(bare)
        form, outputs = tree_flatten(y)
        x = tree_unflatten(form, [t.detach() for t in outputs])
        found.append(best)
    everyone = np.array(world.share(found, others="alike"))
    return [float(t) for t in everyone.max(0)]


def backward_of(outputs: Sequence[Tensor]) -> None:
    """Run a backward pass from all outputs at once, with any gradient."""
    roots = [t for t in outputs if t.requires_grad]
    if len(roots) == 1 and not roots[0].layout.partial:
        roots[0].backward(roots[0].data)
    elif roots:
        total = roots[0].sum()
        for t in roots[1:]:
            total = total + t.sum()
        total.backward()
