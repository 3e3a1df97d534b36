"""Text that a model writes on."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from parlinalg.datasets import Tokenizer


def continuation(model: Any, tokenizer: Tokenizer, prompt: str, max_new_tokens: int, **options: Any) -> str:
    """What a model writes after a prompt, without the prompt.  Collective.

    Parameters
    ----------
    model : GPT or Llama
    tokenizer : Tokenizer
    prompt : str
        At least one token of it.
    max_new_tokens : int
    **options
        Of `parlinalg.nn.generate`: temperature, top_k, top_p, seed.
    """
    from parlinalg.nn import generate

    ids = tokenizer.encode(prompt).astype(np.int64)
    written = generate(model, ids[None], max_new_tokens, **options)
    return tokenizer.decode(written[0, len(ids) :])


def whole_words(text: str) -> str:
    """A text that was cut off, up to the end of its last whole word.

    >>> whole_words("the next wo")
    'the next'
    """
    return re.sub(r"\s+\S*$", "", text) if re.search(r"\S\s+\S*$", text) else text
