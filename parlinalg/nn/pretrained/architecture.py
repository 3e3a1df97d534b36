"""What is known of an architecture: its settings in both directions, and its table of tensors."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from parlinalg.nn.pretrained.settings import Settings
from parlinalg.nn.pretrained.table import Place

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Architecture:
    """An architecture of Hugging Face's `transformers`, as one of our models.

    Attributes
    ----------
    model_type : str
        As `config.json` has it.
    class_name : str
        The class of `transformers` that reads what we write.
    prefix : str
        What the names of all tensors but the head's begin with; files of the model without its head lack it.
    arguments : callable
        The model's arguments of a `config.json`.
    settings : callable
        The `config.json` of the model's arguments.
    table : callable
        Where the tensors lie in the parameters, for the model's arguments.
    ignored : tuple of str
        Patterns of tensors that hold no weights.
    """

    model_type: str
    class_name: str
    prefix: str
    arguments: Callable[[Settings], dict[str, Any]]
    settings: Callable[[Arguments], dict[str, Any]]
    table: Callable[[Arguments], dict[str, list[Place]]]
    ignored: tuple[str, ...] = ()

    def places(self, arguments: Arguments, names: Collection[str]) -> dict[str, list[Place]]:
        """The table, with its tensors named as in files with these tensors."""
        table = self.table(arguments)
        if any(name.startswith(self.prefix) for name in names):
            return table
        return {
            parameter: [replace(place, tensor=place.tensor.removeprefix(self.prefix)) for place in places]
            for parameter, places in table.items()
        }

    def weights(self, names: Collection[str], arguments: Arguments) -> list[str]:
        """Those of the tensors that hold weights of their own."""
        ignored = [*self.ignored, r"lm_head\.weight"] if arguments.get("tie_word_embeddings", True) else self.ignored
        pattern = re.compile("|".join(f"(?:{p})" for p in ignored) or r"(?!)")
        return [name for name in names if not pattern.fullmatch(name)]
