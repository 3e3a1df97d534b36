"""Text that a model writes on."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import numpy as np

from parlinalg.datasets import Tokenizer
from parlinalg.nn.generate import generate


def continuation(
    model: Any, tokenizer: Tokenizer, prompt: str, max_new_tokens: int, *, temperature: float = 1.0,
    top_k: int | None = None, top_p: float | None = None, seed: int = 0, special: bool = False,
    eos_token_id: int | Collection[int] | None = None,
) -> str:  # fmt: skip
    """What a model writes after a prompt, without the prompt; the same on every grid.  Collective.

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
    """
    ids = tokenizer.encode(prompt, special=special).astype(np.int64)
    most, begin, end = model.config["max_position_embeddings"], len(ids), len(ids) + max_new_tokens
    chosen: dict[str, Any] = {
        "do_sample": temperature > 0,
        "temperature": temperature or 1.0,
        "top_k": top_k,
        "top_p": top_p,
    }
    while len(ids) < end:
        start = 0 if len(ids) < most else len(ids) - max(1, most // 2)
        new = min(end, start + most) - len(ids)
        # the seed moves on, since what is drawn depends on it and on the place among the positions
        (found,) = generate(model, [ids[start:].tolist()], new, seed=seed + start, eos_token_id=eos_token_id, **chosen)
        ended = len(found) < len(ids) - start + new
        ids = np.concatenate([ids[:start], found])
        if ended:
            break
    whole, head = tokenizer.decode(ids), tokenizer.decode(ids[:begin])
    return whole[len(head) :] if whole.startswith(head) else tokenizer.decode(ids[begin:])


def whole_words(text: str) -> str:
    """A text that was cut off, up to the end of its last whole word.

    >>> whole_words("the next wo")
    'the next'
    """
    return re.sub(r"\s+\S*$", "", text) if re.search(r"\S\s+\S*$", text) else text
