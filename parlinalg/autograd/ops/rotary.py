"""Rotary positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from parlinalg.array.reductions import summed
from parlinalg.autograd.rule import Part
from parlinalg.autograd.tensor import Tensor, as_tensor, record
from parlinalg.backend.kernels.embeddings import rotary_tables, rotate
from parlinalg.backend.memory import check_memory
from parlinalg.errors import LayoutError

Frequencies = float | np.ndarray


def rotary_frequencies(width: int, base: float = 10000.0) -> np.ndarray:
    """Return the angles a position, `base ** (-2 i / width)` for pair i of `width` features; float64, on the host."""
    if width % 2:
        raise ValueError(f"rotary positions turn pairs of features; a head's width of {width} is odd")
    check_memory(f"rotary positions of {width} features", 4 * width)
    return base ** (-np.arange(0, width, 2, dtype=np.float64) / max(1, width))


def rotary(
    z: Any, frequencies: Frequencies = 10000.0, *, start: int = 0, parts: int | None = None,
    positions: np.ndarray | None = None,
) -> Tensor:  # fmt: skip
    """Turn queries and keys by their positions (Su et al., "RoFormer", 2021).

    Feature i of the first half of a head's features is turned with feature i of the second half, as Llama and Hugging
    Face have it: (x₁, x₂) becomes (x₁ cos - x₂ sin, x₂ cos + x₁ sin).

    Parameters
    ----------
    z : Tensor
        Shape [b, s, heads, parts, e], such as the packed queries, key and value of `attention`; e and the parts are
        whole.
    frequencies : float or array
        The base of `rotary_frequencies`, or the angles a position of each pair, on the host; fewer than e / 2 leave the
        last features as they are.
    start : int
        The position of the first of s.
    parts : int, optional
        How many of the parts are turned, the first ones; by default all but the last, which is the value.
    positions : array of int, optional
        [s], on the host: the position of each, in place of those that count up from `start`.
    """
    z = as_tensor(z)
    x = summed(z.data, "rotary")
    if x.ndim != 5:
        raise ValueError(f"rotary takes [b, s, heads, parts, e], not {x.shape}")
    width = x.shape[4]
    angles = rotary_frequencies(width, frequencies) if isinstance(frequencies, int | float) else frequencies
    if 2 * len(angles) > width:
        raise ValueError(f"rotary: {len(angles)} frequencies turn {2 * len(angles)} features, a head has {width}")
    turned = x.shape[3] - 1 if parts is None else parts
    cuts = x.layout.dims
    if any(x.grid.sizes[a] > 1 for a in (*cuts[4], *(cuts[3] if turned < x.shape[3] else ()))):
        right = x.layout.with_dim(3, None).with_dim(4, None)
        raise LayoutError(
            f"rotary: z of shape {x.shape} is {x.layout!r}; a head's parts and features must be whole: mend it by "
            f".redistribute({right!r})"
        )
    rest = x.layout
    if not x.grid.inside:
        return record("rotary", x, [z], [lambda g: (g, rest)])
    here = x.grid.block(rest, x.shape)[1]
    places = range(start + here.start, start + here.stop) if positions is None else positions[here.start : here.stop]
    cos, sin = rotary_tables(angles, places, x.block)
    own = x.block.shape[3] if turned == x.shape[3] else turned
    y = x.like(rotate(x.block, cos, sin, own))
    part = Part(lambda g, cos, sin: (rotate(g, cos, sin, own, back=True), rest), cos, sin)
    return record("rotary", y, [z], [part])
