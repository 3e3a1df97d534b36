"""Continuing sequences of tokens."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import no_grad
from parlinalg.comm.together import odd_one_out, together
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.nn.module import Module
from parlinalg.nn.sampling import Sampling

Stream = Callable[[int, int], Any]


def generate(
    model: Any, input_ids: Sequence[Sequence[int]] | np.ndarray, max_new_tokens: int, *, do_sample: bool = False,
    temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None,
    eos_token_id: int | Collection[int] | None = None, seed: int = 0, use_cache: bool = True,
    stream: Stream | None = None,
) -> list[np.ndarray]:  # fmt: skip
    """Continue every prompt, token by token.  Collective; every rank passes the same and gets the same.

    A token depends on its prompt, the options, the number of the prompt among all, and the position: it is the same on
    every grid, with the cache and without, whatever the other prompts are, up to the rounding of the logits.

    Parameters
    ----------
    model : GPT or Llama
        Any causal model with a `cache(length)`, called as `model(ids, cache=…)`; dropout is off.
    input_ids : sequence of sequences of int, or array
        The prompts, of any lengths; those of one length are continued together.
    max_new_tokens : int
        The most tokens added to each.
    do_sample : bool
        Draw the next token from the probabilities; else take the likeliest.
    temperature, top_k, top_p
        What is drawn from: see `parlinalg.nn.sampling.Sampling`.
    eos_token_id : int or collection of int, optional
        A sequence ends with the first of these that comes.
    seed : int
        Of what is drawn.
    use_cache : bool
        Keep the keys and values of earlier tokens; else compute them again for every token.
    stream : callable, optional
        Called on every rank as `stream(row, token)` for every token, as soon as it is known.

    Returns
    -------
    list of array of int64
        Each prompt with the tokens added, the end token among them.

    Raises
    ------
    ConfigError
        On all ranks, before anything is computed: no prompt or an empty one, a token that is not in the vocabulary, a
        sequence that would be longer than the model's positions, options out of range, ranks that disagree.
    ValueError
        On all ranks, if logits are not finite.
    """

    def checked() -> tuple[list[np.ndarray], Sampling]:
        return _prompts(input_ids, max_new_tokens, model.config), Sampling(do_sample, temperature, top_k, top_p, seed)

    prompts, sampling = together(model.grid.world, checked, "generating")
    ends = _ends(eos_token_id)
    _agreed(model.grid, [[p.tolist() for p in prompts], max_new_tokens, repr(sampling), sorted(ends), use_cache])
    done: list[np.ndarray] = list(prompts)
    if max_new_tokens:
        with no_grad(), _evaluating(model):
            for length in dict.fromkeys(len(p) for p in prompts):
                rows = [i for i, p in enumerate(prompts) if len(p) == length]
                ids = np.stack([prompts[i] for i in rows])
                for i, sequence in zip(
                    rows, _continue(model, ids, rows, max_new_tokens, sampling, ends, use_cache, stream)
                ):
                    done[i] = sequence
    return done


def _continue(
    model: Any, ids: np.ndarray, rows: list[int], most: int, sampling: Sampling, ends: frozenset[int], use_cache: bool,
    stream: Stream | None,
) -> list[np.ndarray]:  # fmt: skip
    """The sequences that begin with prompts of one length, [rows, length]."""
    batch, length = ids.shape
    cache = model.cache(length + most - 1) if use_cache else None
    every = np.concatenate([ids, np.zeros((batch, most), np.int64)], axis=1)
    stops = np.full(batch, length + most)
    for position in range(length, length + most):
        first = position - 1 if use_cache and position > length else 0
        tokens = _next(model, every[:, first:position], cache, sampling, rows, position)
        every[:, position] = tokens
        for i in np.flatnonzero(stops > position):
            if stream is not None:
                stream(rows[i], int(tokens[i]))
            if int(tokens[i]) in ends:
                stops[i] = position + 1
        if (stops <= position + 1).all():
            break
    return [sequence[:stop].copy() for sequence, stop in zip(every, stops, strict=True)]


def _next(
    model: Any, ids: np.ndarray, cache: Any, sampling: Sampling, rows: list[int], position: int
) -> np.ndarray:  # fmt: skip
    """The tokens that follow; rank 0 chooses, so that ranks of unlike processors agree."""
    grid: Grid = model.grid
    part = tuple(slice(r.start, r.stop) for r in grid.block(model.ids_layout, ids.shape))
    block = grid.backend.from_host(np.ascontiguousarray(ids[part]))
    logits = model(DistArray(block, ids.shape, model.ids_layout, grid), cache=cache, last=True)
    values = logits.data.gather(root=0)
    tokens = np.empty(len(ids), np.int64)
    if grid.world.rank == 0:
        tokens[:] = sampling.choose(values.reshape(len(ids), -1), rows, position)
    grid.world.broadcast(tokens, 0)
    if (tokens < 0).any():
        raise ValueError(
            f"prompt {rows[int(np.argmin(tokens))]}: the model's largest logit at position {position} is not finite; "
            "its weights are not, or their dtype is too narrow"
        )
    return tokens


def _prompts(input_ids: Any, most: int, config: dict[str, Any]) -> list[np.ndarray]:
    """The prompts as arrays, once they are known to fit the model."""
    if (
        isinstance(input_ids, str)
        or not len(input_ids)
        or any(isinstance(p, int | np.integer | str) for p in input_ids)
    ):
        raise ConfigError(
            f"generate takes prompts, each a sequence of token ids, such as [[1, 2, 3]], not {input_ids!r}"
        )
    if operator.index(most) < 0:
        raise ConfigError(f"max_new_tokens is at least 0, not {most}")
    vocabulary, positions = config["vocab_size"], config["max_position_embeddings"]
    prompts = []
    for row, prompt in enumerate(input_ids):
        ids = np.asarray(prompt)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise ConfigError(f"prompt {row} is a sequence of at least one token id, not {prompt!r}")
        wrong = np.flatnonzero((ids < 0) | (ids >= vocabulary))
        if wrong.size:
            raise ConfigError(
                f"prompt {row} has token {ids[wrong[0]]} at position {wrong[0]}; the vocabulary has tokens 0 to "
                f"{vocabulary - 1}"
            )
        if len(ids) + most > positions:
            raise ConfigError(
                f"prompt {row} of {len(ids)} tokens and {most} new ones make {len(ids) + most}; the model has "
                f"{positions} positions"
            )
        prompts.append(ids.astype(np.int64))
    return prompts


def _ends(eos_token_id: int | Collection[int] | None) -> frozenset[int]:
    if eos_token_id is None:
        return frozenset()
    if isinstance(eos_token_id, Collection):
        return frozenset(operator.index(i) for i in eos_token_id)
    return frozenset((operator.index(eos_token_id),))


def _agreed(grid: Grid, wanted: list[Any]) -> None:
    """Raise unless all ranks want the same."""
    odd = odd_one_out(grid.world, repr(wanted).encode())
    if odd is not None:
        raise ConfigError(
            f"rank {odd} passes other prompts or options to generate than rank 0; all ranks pass the same"
        )


@contextmanager
def _evaluating(model: Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
