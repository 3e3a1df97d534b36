"""Text that a model writes on."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from parlinalg.datasets import Tokenizer
from parlinalg.nn.generate import generate

__all__ = ["continuation", "whole_words"]


def continuation(
    model: Any, tokenizer: Tokenizer, prompt: str, max_new_tokens: int, *, temperature: float = 1.0,
    top_k: int | None = None, top_p: float | None = None, seed: int = 0, special: bool = False,
    eos_token_id: int | Collection[int] | None = None, told: Callable[[str], None] | None = None,
) -> str:  # fmt: skip
    """Return what a model writes after a prompt, without the prompt; the same on every grid.  Collective.

    Where the model's positions end it goes on from the last half of them.

    Parameters
    ----------
    model : GPT or Llama
    tokenizer : Tokenizer
    prompt : str
    max_new_tokens : int
        The most tokens written.
    temperature : float
        Of what is drawn; at 0 the likeliest token is taken.
    top_k, top_p, seed, eos_token_id
        As of `parlinalg.nn.generate`.
    special : bool
        Whether the tokenizer adds its special tokens to the prompt.
    told : callable, optional
        Called on every rank with each further piece of the text, as soon as it is written.
    """
    ids = tokenizer.encode(prompt, special=special).astype(np.int64)
    config = getattr(model, "whole", model).config  # of a model in a pipeline, or that is whole
    most, end = config["max_position_embeddings"], len(ids) + max_new_tokens
    chosen: dict[str, Any] = {
        "do_sample": temperature > 0,
        "temperature": temperature or 1.0,
        "top_k": top_k,
        "top_p": top_p,
    }
    told_of = _Told(tokenizer, ids, told or (lambda text: None))
    while len(ids) < end:
        start = 0 if len(ids) < most else len(ids) - max(1, most // 2)
        new = min(end, start + most) - len(ids)
        # the seed moves on, since what is drawn depends on it and on the place among the positions
        (found,) = generate(
            model, [ids[start:].tolist()], new, seed=seed + start, eos_token_id=eos_token_id, stream=told_of, **chosen
        )
        ended = len(found) < len(ids) - start + new
        ids = np.concatenate([ids[:start], found])
        if ended:
            break
    told_of.rest()
    return told_of.text


class _Told:
    """The text of tokens that come one by one, told piece by piece: no piece ends within a character."""

    def __init__(self, tokenizer: Tokenizer, prompt: np.ndarray, told: Callable[[str], None]) -> None:
        self.tokenizer, self.told = tokenizer, told
        self.ids, self.text = prompt.tolist(), ""
        self.head = len(tokenizer.decode(self.ids))  # decoded with the prompt, since tokens may begin with a space

    def __call__(self, row: int, token: int) -> None:
        self.ids.append(token)
        whole = self.tokenizer.decode(self.ids)
        if not whole.endswith("\ufffd"):
            self._tell(whole)

    def rest(self) -> None:
        """Tell what was kept back at the end."""
        self._tell(self.tokenizer.decode(self.ids))

    def _tell(self, whole: str) -> None:
        begin = self.head + len(self.text)
        if len(whole) > begin:
            self.told(whole[begin:])
            self.text += whole[begin:]


def whole_words(text: str) -> str:
    """Return a text that was cut off, up to the end of its last whole word.

    >>> whole_words("the next wo")
    'the next'
    """
    return re.sub(r"\s+\S*$", "", text) if re.search(r"\S\s+\S*$", text) else text
