"""Gradients across ranks: summed in buckets during the backward pass, and clipped by the whole model's norm."""

from parlinalg.parallel.clip import clip_gradient_norm, gradient_norm
from parlinalg.parallel.reducer import GradientReducer

__all__ = ["GradientReducer", "clip_gradient_norm", "gradient_norm"]
