"""Modules: layers with parameters, one class for all parallel schemes."""

from typing import TYPE_CHECKING

from parlinalg import hints
from parlinalg.autograd.ops.attention_masks import BlockMask
from parlinalg.nn import init
from parlinalg.nn.activations import GELU, ReLU, Sigmoid, SiLU, SwiGLU, Tanh, activation
from parlinalg.nn.added_losses import add_loss, added_losses
from parlinalg.nn.attention import Attention
from parlinalg.nn.block import TransformerBlock
from parlinalg.nn.cache import KeyValueCache
from parlinalg.nn.containers import MLP, ModuleDict, ModuleList, Sequential
from parlinalg.nn.dropout import Dropout
from parlinalg.nn.embedding import Embedding, Positions
from parlinalg.nn.experts import MixtureOfExperts
from parlinalg.nn.generate import generate
from parlinalg.nn.images import AdaptiveAvgPool2d, AvgPool2d, Conv2d, MaxPool2d
from parlinalg.nn.layer import Layer
from parlinalg.nn.linear import Linear
from parlinalg.nn.models import GPT, BertEncoder, Llama, Mixtral, Qwen2Moe, ResNet, ViT, resnet18, resnet34, resnet50
from parlinalg.nn.module import Module
from parlinalg.nn.norms import BatchNorm1d, BatchNorm2d, LayerNorm, RMSNorm
from parlinalg.nn.recompute import recompute
from parlinalg.nn.vision import Classifier, PatchEmbedding
from parlinalg.random.draws import training_step
from parlinalg.sequence import sequence_positions

__all__ = [
    "GELU", "GPT", "MLP", "AdaptiveAvgPool2d", "Attention", "AvgPool2d", "BatchNorm1d", "BatchNorm2d", "BertEncoder",
    "BlockMask", "Classifier", "Conv2d", "Dropout", "Embedding", "KeyValueCache", "Layer", "LayerNorm", "Linear",
    "Llama", "MaxPool2d", "Mixtral", "MixtureOfExperts", "Module", "ModuleDict", "ModuleList", "PatchEmbedding",
    "Positions", "Qwen2Moe", "RMSNorm", "ReLU", "ResNet", "Sequential", "SiLU", "Sigmoid", "SwiGLU", "Tanh",
    "TransformerBlock", "ViT", "activation", "add_loss", "added_losses", "generate", "init", "recompute", "resnet18",
    "resnet34", "resnet50", "sequence_positions", "training_step",
]  # fmt: skip

if not TYPE_CHECKING:  # names of other libraries
    __getattr__ = hints.missing(__name__)
