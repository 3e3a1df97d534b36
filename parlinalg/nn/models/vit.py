"""ViT (Dosovitskiy et al., "An image is worth 16×16 words: transformers for image recognition at scale", 2021)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.array import DistArray
from parlinalg.autograd import Tensor
from parlinalg.grid import Grid
from parlinalg.nn.block import TransformerBlock
from parlinalg.nn.containers import Sequential
from parlinalg.nn.dropout import Dropout
from parlinalg.nn.embedding import Positions
from parlinalg.nn.layer import Layer
from parlinalg.nn.models.transformer import Transformer, activation, spread
from parlinalg.nn.norms import LayerNorm
from parlinalg.nn.pretrained import Pretrained, vit
from parlinalg.nn.vision import Classifier, PatchEmbedding
from parlinalg.schemes import Scheme

Size = int | tuple[int, int]


class ViT(Transformer, Pretrained):
    """A classifier of images of ViT's shape, on every grid.

    Parameters
    ----------
    image_size, patch_size : int or (int, int)
        Height and width; an image's are multiples of a patch's.
    num_channels, hidden_size, num_hidden_layers, num_attention_heads, intermediate_size : int
        As in `transformers.ViTConfig`; the defaults are those of ViT base.
    num_labels : int
        The classes.
    hidden_act : str
        As of `GPT`.
    hidden_dropout_prob, attention_probs_dropout_prob : float
        As of `BertEncoder`.
    layer_norm_eps, initializer_range : float
    qkv_bias : bool
        Whether the products into attention have biases.
    pool : {"first", "mean"}
        What the classifier takes: the class token, or the mean of all.
    scheme, grid, dtype, seed, recompute
        As of `GPT`.

    Attributes
    ----------
    patches, positions, dropout, blocks, norm, classifier : Module
    images_layout : Layout
        In which images [batch, channels, height, width] are to rest.
    targets_layout : Layout
        In which classes [batch] are to rest.

    Call it with images; the logits are [batch, num_labels].
    """

    architecture = vit.ARCHITECTURE

    def __init__(
        self, *, image_size: Size = 224, patch_size: Size = 16, num_channels: int = 3, num_labels: int = 2,
        hidden_size: int = 768, num_hidden_layers: int = 12, num_attention_heads: int = 12,
        intermediate_size: int = 3072, hidden_act: str = "gelu", hidden_dropout_prob: float = 0.0,
        attention_probs_dropout_prob: float = 0.0, layer_norm_eps: float = 1e-12, initializer_range: float = 0.02,
        qkv_bias: bool = True, pool: str = "first", scheme: Scheme | str, grid: Grid, dtype: DTypeLike = np.float32,
        seed: int | None = None, recompute: str | None = None, **unknown: Any,
    ) -> None:  # fmt: skip
        config: dict[str, Any] = {
            "image_size": image_size, "patch_size": patch_size, "num_channels": num_channels, "num_labels": num_labels,
            "hidden_size": hidden_size, "num_hidden_layers": num_hidden_layers,
            "num_attention_heads": num_attention_heads, "intermediate_size": intermediate_size,
            "hidden_act": activation("ViT", hidden_act), "hidden_dropout_prob": hidden_dropout_prob,
            "attention_probs_dropout_prob": attention_probs_dropout_prob, "layer_norm_eps": layer_norm_eps,
            "initializer_range": initializer_range, "qkv_bias": qkv_bias, "pool": pool,
        }  # fmt: skip
        super().__init__(config, unknown, scheme, grid, dtype)
        own: dict[str, Any] = {"scheme": scheme, "grid": grid, "dtype": self.dtype}
        c, hidden, eps = self.config, self.config["hidden_size"], self.config["layer_norm_eps"]
        self.patches = PatchEmbedding(c["image_size"], c["patch_size"], c["num_channels"], hidden, **own)
        self.positions = Positions(1 + self.patches.patches, hidden, **own)
        self.dropout = Dropout(hidden_dropout_prob)
        self.blocks = Sequential(*(
            TransformerBlock(
                hidden, c["num_attention_heads"], c["intermediate_size"], eps=eps,
                activation=c["hidden_act"], qkv_bias=c["qkv_bias"], attention_dropout=attention_probs_dropout_prob,
                dropout=hidden_dropout_prob, recompute=recompute, **own,
            )
            for _ in range(c["num_hidden_layers"])
        ))  # fmt: skip
        self.norm = LayerNorm(hidden, eps=eps, **own)
        self.classifier = Classifier(hidden, c["num_labels"], pool=pool, **own)
        self.images_layout = self.patches.images_layout
        self.targets_layout = self.classifier.targets_layout
        self.start_from(spread(initializer_range))
        if seed is not None:
            self.initialize(seed)

    def forward(self, images: Tensor | DistArray) -> Tensor:
        """Return the logits of the classes."""
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.logits(x)

    def embed(self, images: Tensor | DistArray) -> Tensor:
        """Return the residual stream before the blocks."""
        x: Tensor = self.dropout(self.positions(self.patches(images)))
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits, from the residual stream after the blocks."""
        z: Tensor = self.classifier(self.norm(x))
        return z

    def flops(self, batch: int, sequence: int | None = None) -> int:
        """Return the floating-point operations of a forward and backward pass; the sequence is that of the patches."""
        return super().flops(batch, 1 + self.patches.patches)

    def layer_flops(self, batch: int, sequence: int | None = None) -> list[int]:
        """Return what `flops` does, of each of the `layers`."""
        return super().layer_flops(batch, 1 + self.patches.patches)

    def outside(self, batch: int, sequence: int) -> tuple[int, int]:
        """Return the multiplications of the forward pass outside of the blocks: of the patches, and of the classes."""
        patch = self.config["num_channels"] * self.patches.patch[0] * self.patches.patch[1]
        hidden = self.config["hidden_size"]
        return batch * self.patches.patches * patch * hidden, batch * self.config["num_labels"] * hidden

    def ends(self) -> tuple[Layer, Layer]:
        return (
            Layer("embedding", self.embed, (self.patches, self.positions, self.dropout), True),
            Layer("head", self.logits, (self.norm, self.classifier), True),
        )
