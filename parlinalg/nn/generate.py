"""Continuing sequences of tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import no_grad
from parlinalg.comm import Comm, ImaginedComm
from parlinalg.comm.together import odd_one_out, together
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.nn.checks import whole
from parlinalg.nn.module import Module
from parlinalg.nn.sampling import Sampling

Stream = Callable[[int, int], Any]


class Decoder(Protocol):
    """A causal model as generation sees it, wherever its layers are; a model may have one, as `model.decoder()`.

    Attributes
    ----------
    world : Comm
        The ranks that generate together; all of them make every call.
    chooser : int
        The one of them that gets the logits, and chooses.
    config : dict
        The model's.
    """

    world: Comm
    chooser: int
    config: dict[str, Any]

    def cache(self, length: int) -> Any:
        """Return an empty cache for the keys and values of so many tokens of one batch."""

    def logits(self, ids: np.ndarray, cache: Any) -> np.ndarray | None:
        """Return the logits [batch, vocabulary] of the token after these [batch, sequence], on the chooser.

        Collective.

        With a cache these are the tokens after those it holds, and are added to it.
        """

    def evaluating(self) -> AbstractContextManager[None]:
        """Return a context in which dropout is off."""


class _Whole:
    """A model all of whose layers are on one grid."""

    def __init__(self, model: Any) -> None:
        self.model, self.world, self.chooser, self.config = model, model.grid.world, 0, model.config

    def cache(self, length: int) -> Any:
        return self.model.cache(length)

    def logits(self, ids: np.ndarray, cache: Any) -> np.ndarray | None:
        found = self.model(placed(ids, self.model.ids_layout, self.model.grid), cache=cache, last=True)
        values: np.ndarray | None = found.data.gather(root=0)
        return None if values is None else values.reshape(len(ids), -1)

    def evaluating(self) -> AbstractContextManager[None]:
        return evaluating(self.model)


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
        Any causal model with a `cache(length)`, called as `model(ids, cache=…)`, or with a `decoder()`, such as one
        whose layers are on the ranks of a pipeline; dropout is off.
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
        The seed of the draws.
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
        On all ranks, before anything is computed: a model without a cache, no prompt or an empty one, a token that is
        not in the vocabulary, a sequence that would be longer than the model's positions, options out of range, ranks
        that disagree.  Also on all ranks, if logits are not finite.
    """

    decoder = _decoder(model)

    def checked() -> tuple[list[np.ndarray], int, Sampling, frozenset[int]]:
        new = whole("max_new_tokens", max_new_tokens, 0)
        prompts = _prompts(input_ids, new, decoder.config)
        return prompts, new, Sampling(do_sample, temperature, top_k, top_p, seed), _ends(eos_token_id)

    prompts, new, sampling, ends = together(decoder.world, checked, "generating")
    _agreed(decoder.world, [[p.tolist() for p in prompts], new, repr(sampling), sorted(ends), use_cache])
    done: list[np.ndarray] = list(prompts)
    if new:
        with no_grad(), decoder.evaluating():
            for length in dict.fromkeys(len(p) for p in prompts):
                rows = [i for i, p in enumerate(prompts) if len(p) == length]
                ids = np.stack([prompts[i] for i in rows])
                for i, sequence in zip(rows, _continue(decoder, ids, rows, new, sampling, ends, use_cache, stream)):
                    done[i] = sequence
    return done


def _decoder(model: Any) -> Decoder:
    """Return the model as generation sees it."""
    if hasattr(model, "decoder"):
        found: Decoder = model.decoder()
        return found
    if not callable(getattr(model, "cache", None)):
        raise ConfigError(
            f"generate takes a causal model with a cache(length), such as GPT or Llama, not {type(model).__name__}"
        )
    return _Whole(model)


def _continue(
    decoder: Decoder, ids: np.ndarray, rows: list[int], most: int, sampling: Sampling, ends: frozenset[int],
    use_cache: bool, stream: Stream | None,
) -> list[np.ndarray]:  # fmt: skip
    """Return the sequences that begin with prompts of one length, [rows, length]."""
    batch, length = ids.shape
    cache = decoder.cache(length + most - 1) if use_cache else None
    every = np.concatenate([ids, np.zeros((batch, most), np.int64)], axis=1)
    stops = np.full(batch, length + most)
    for position in range(length, length + most):
        first = position - 1 if use_cache and position > length else 0
        tokens = _next(decoder, every[:, first:position], cache, sampling, rows, position)
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
    decoder: Decoder, ids: np.ndarray, cache: Any, sampling: Sampling, rows: list[int], position: int
) -> np.ndarray:  # fmt: skip
    """Return the tokens that follow; one rank chooses, so that ranks of unlike processors agree."""
    values = decoder.logits(ids, cache)
    tokens = np.empty(len(ids), np.int64)
    if isinstance(decoder.world, ImaginedComm):
        tokens[:] = decoder.world.device.assume("token", "the token that is chosen")
    elif values is not None:
        tokens[:] = sampling.choose(values, rows, position)
    decoder.world.broadcast(tokens, decoder.chooser)
    if (tokens < 0).any():
        raise ConfigError(
            f"prompt {rows[int(np.argmin(tokens))]}: the model's largest logit at position {position} is not finite; "
            "its weights are not, or their dtype is too narrow"
        )
    return tokens


def _prompts(input_ids: Any, most: int, config: dict[str, Any]) -> list[np.ndarray]:
    """Return the prompts as arrays, once they are known to fit the model."""
    try:
        given = [] if isinstance(input_ids, str) else [(prompt, np.asarray(prompt)) for prompt in input_ids]
    except (TypeError, ValueError):  # no sequence, or lists of several lengths in a prompt
        given = []
    if not given or any(not ids.ndim for _, ids in given):
        raise ConfigError(
            f"generate takes prompts, each a sequence of token ids, such as [[1, 2, 3]], not {input_ids!r}"
        )
    vocabulary, positions = config["vocab_size"], config["max_position_embeddings"]
    prompts = []
    for row, (prompt, ids) in enumerate(given):
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
    given: Any = eos_token_id.tolist() if isinstance(eos_token_id, np.ndarray) else eos_token_id
    several = given if isinstance(given, Collection) and not isinstance(given, str) else [given]
    return frozenset(whole("eos_token_id", i, None) for i in several)


def _agreed(world: Comm, wanted: list[Any]) -> None:
    """Raise unless all ranks want the same."""
    odd = odd_one_out(world, repr(wanted).encode())
    if odd is not None:
        raise ConfigError(
            f"rank {odd} passes other prompts or options to generate than rank 0; all ranks pass the same"
        )


def placed(ids: np.ndarray, layout: Layout, grid: Grid) -> DistArray:
    """Return ids that every rank has, cut for a model; nothing communicates."""
    part = tuple(slice(r.start, r.stop) for r in grid.block(layout, ids.shape))
    return DistArray(grid.backend.from_host(np.ascontiguousarray(ids[part])), ids.shape, layout, grid)


@contextmanager
def evaluating(model: Module) -> Iterator[None]:
    """Context in which the model is in evaluation mode; afterwards its modules have their modes back."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
