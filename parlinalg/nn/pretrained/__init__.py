"""Weights that people have: folders of `config.json` and safetensors files, as `transformers` writes and reads them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from numpy.typing import DTypeLike

from parlinalg.array import DistArray
from parlinalg.autograd import Parameter
from parlinalg.comm import Comm
from parlinalg.comm.together import together
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.nn.init import Declared
from parlinalg.nn.module import Module
from parlinalg.nn.pretrained import bert, gpt2, llama, mixtral, qwen2_moe, vit
from parlinalg.nn.pretrained.architecture import Architecture, Part, Place, Row, places
from parlinalg.nn.pretrained.load import read
from parlinalg.nn.pretrained.save import save
from parlinalg.nn.pretrained.settings import Settings
from parlinalg.nn.pretrained.tensorfile import Stored, Writer, read_header
from parlinalg.schemes import Scheme
from parlinalg.units import parse_bytes

__all__ = [
    "ARCHITECTURES", "Architecture", "Part", "Place", "Pretrained", "Row", "Settings", "Stored", "Writer", "bert",
    "gpt2", "llama", "mixtral", "places", "qwen2_moe", "read_header", "vit",
]  # fmt: skip

#: The model for each `model_type`.
ARCHITECTURES = {
    "gpt2": "GPT", "llama": "Llama", "mixtral": "Mixtral", "qwen2_moe": "Qwen2Moe", "bert": "BertEncoder", "vit": "ViT",
}  # fmt: skip
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


class Pretrained(Module):
    """A model whose weights people have.

    Attributes
    ----------
    architecture : Architecture
        Which one of `transformers` it is.
    token_ids : dict
        The ids of special tokens that the folder's `config.json` names: "bos_token_id", "eos_token_id", "pad_token_id".
    """

    architecture: ClassVar[Architecture]
    token_ids: Mapping[str, Any] = dict.fromkeys(TOKENS)
    config: dict[str, Any]
    grid: Grid

    @classmethod
    def from_pretrained(
        cls, folder: str | os.PathLike[str], scheme: Scheme | str, grid: Grid, dtype: DTypeLike | None = None, *,
        seed: int = 0, **changes: Any,
    ) -> Self:  # fmt: skip
        """Return the model of a folder that Hugging Face's `save_pretrained`, or ours, has written; in evaluation mode.

        It reads `config.json` and `model.safetensors`, or the files that `model.safetensors.index.json` names; each
        rank reads the part of each tensor that it holds, and nothing else.  Collective.

        Parameters
        ----------
        folder : path
        scheme : Scheme or str
        grid : Grid
        dtype : dtype, optional
            The dtype of the model; by default that of the weights in the folder.
        seed : int
            The seed of dropout, once `train()` is called.
        **changes
            Arguments of the model that differ from the folder's, such as `attn_pdrop=0.1`.

        Raises
        ------
        ConfigError
            On all ranks, before any weight is read: a folder or file that is missing or cut short, an architecture or
            setting that is not known, a tensor that is missing, unexpected or misshapen; the message names it.
        """
        model, values = cls.declared_by(folder, scheme, grid, grid.world, dtype, **changes)
        together(grid.world, lambda: model.initialize(seed, values=values), f"reading {Path(folder)}")
        return model.eval()

    @classmethod
    def declared_by(
        cls, folder: str | os.PathLike[str], scheme: Scheme | str, grid: Grid, comm: Comm,
        dtype: DTypeLike | None = None, **changes: Any,
    ) -> tuple[Self, Callable[[Declared, str], DistArray]]:  # fmt: skip
        """Return the model of a folder without values, and what `initialize` makes them by; no weight is read yet.

        Collective over `comm`, all ranks that read the folder, such as those of a pipeline's stages; the rest is as of
        `from_pretrained`.
        """
        path = Path(folder)
        found = together(comm, lambda: read(path, cls.architecture, ARCHITECTURES, changes), f"reading {path}")
        make: Any = cls
        model: Self = make(
            **found.arguments, scheme=scheme, grid=grid, dtype=found.dtype if dtype is None else dtype
        )  # fmt: skip
        model.token_ids = {name: found.settings.get(name) for name in TOKENS}
        return model, found.make

    @property
    def unwritable(self) -> str:
        """The reason why the model is not written in the format of `transformers`; empty where it is."""
        experts, mixtures = self.config.get("num_local_experts"), (mixtral.ARCHITECTURE, qwen2_moe.ARCHITECTURE)
        biased = self.config.get("qkv_bias"), self.config.get("attention_bias")
        if self.architecture is llama.ARCHITECTURE and biased[0] not in (None, biased[1]):
            return (
                f"a Llama with qkv_bias={biased[0]} and attention_bias={biased[1]} is not written in the format of "
                "`transformers`; state_dict() gives its weights"
            )
        if experts is None or self.architecture in mixtures:
            return ""
        return (
            f"a model with num_local_experts={experts} is not written in the format of `transformers`; state_dict() "
            "gives its weights"
        )

    def save_pretrained(self, folder: str | os.PathLike[str], max_shard_size: int | str = "5GB") -> None:
        """Write the model so that `transformers` loads it: `config.json` and `model.safetensors`.  Collective.

        Rank 0 writes, and holds one parameter at a time.

        Parameters
        ----------
        folder : path
            It is made if need be; files of the same names are replaced once all new ones are written.
        max_shard_size : int or str
            Weights of more bytes than this, such as "5GB", are written in several files and an index.

        Raises
        ------
        ConfigError
            On all ranks, if rank 0 cannot write, or the model has experts.
        """
        self.save_parameters(folder, dict(self.named_parameters()), self.grid.world, max_shard_size)

    def save_parameters(
        self, folder: str | os.PathLike[str], parameters: Mapping[str, Parameter], comm: Comm,
        max_shard_size: int | str = "5GB",
    ) -> None:  # fmt: skip
        """Save as `save_pretrained` does, a model whose parameters lie on several grids, such as a pipeline's stages.

        Parameters
        ----------
        parameters : dict of str to Parameter
            Those that this rank has blocks of, by their names in this model.
        comm : Comm
            All ranks.
        """
        if self.unwritable:
            raise ConfigError(f"{type(self).__name__}: {self.unwritable}")
        settings = {**self.architecture.settings(self.config), **self.token_ids}
        save(Path(folder), parameters, self.architecture, self.config, settings, parse_bytes(max_shard_size), comm)
