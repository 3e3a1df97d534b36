"""Modules: layers with parameters, one class for all parallel schemes."""

from parlinalg.nn import init
from parlinalg.nn.activations import GELU, ReLU, Sigmoid, SiLU, Tanh, activation
from parlinalg.nn.containers import MLP, Sequential
from parlinalg.nn.dropout import Dropout
from parlinalg.nn.linear import Linear
from parlinalg.nn.module import Module
from parlinalg.nn.steps import training_step

__all__ = [
    "GELU", "MLP", "Dropout", "Linear", "Module", "ReLU", "Sequential", "SiLU", "Sigmoid", "Tanh", "activation", "init",
    "training_step",
]  # fmt: skip
