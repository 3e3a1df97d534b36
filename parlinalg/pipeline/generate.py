"""Generation through the stages of a pipeline: each rank keeps the keys and values of its own layers."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import Tensor
from parlinalg.errors import ConfigError
from parlinalg.nn.cache import KeyValueCache
from parlinalg.nn.generate import evaluating, placed
from parlinalg.pipeline.model import PipelineModel, Stage
from parlinalg.pipeline.p2p import P2P, Edge, summed, tree_flatten, tree_unflatten


class StageCaches:
    """The keys and values of this rank's stages, for as many tokens as all ranks know of.

    Attributes
    ----------
    length : int
        The number of tokens they hold.
    stages : dict of int to list of KeyValueCache
        By the number of the stage.
    """

    def __init__(self, stages: dict[int, list[KeyValueCache]]) -> None:
        self.length = 0
        self.stages = stages


class PipelineDecoder:
    """A causal model in a pipeline, as `parlinalg.nn.generate` sees it.

    The tokens of a step pass from stage to stage; of the logits of the last one the first rank of its grid chooses what
    comes next, and tells all.  Where a schedule trains two copies of the model, the first is used.  Making it is
    collective over all ranks of the mesh; its communicator is freed with the model's topology.

    Parameters
    ----------
    model : PipelineModel

    Raises
    ------
    ConfigError
        If the model's layers cannot go on from a cache: it is no causal language model.
    """

    def __init__(self, model: PipelineModel) -> None:
        if not hasattr(model.full_model, "cache"):
            raise ConfigError(
                f"{type(model.full_model).__name__} generates no text: its layers keep no keys and values of earlier "
                "tokens; a GPT and a Llama do"
            )
        self.model, self.topology, self.grid = model, model.topology, model.grid
        self.world = self.topology.world
        self.config: dict[str, Any] = model.full_model.config
        self.holders = [model.holder(number) for number in range(model.stages)]
        self.chooser = self.topology.ranks[self.holders[-1]][0]
        self.held: dict[int, Stage] = {stage.number: stage for stage in model.chunks if not stage.copy}
        self.p2p = P2P.of(model, self.topology.channel())
        self._turn = 0

    def cache(self, length: int) -> StageCaches:
        """Return empty caches for so many tokens, for each of this rank's stages."""
        return StageCaches({number: stage.caches(length) for number, stage in self.held.items()})

    def evaluating(self) -> AbstractContextManager[Any]:
        """Return a context in which dropout is off."""
        both = ExitStack()
        both.enter_context(evaluating(self.model.full_model))
        both.enter_context(evaluating(self.model))
        return both

    def logits(self, ids: np.ndarray, cache: StageCaches | None) -> np.ndarray | None:
        """Return the next token's logits on the chooser; see `parlinalg.nn.generate.Decoder`.  Collective."""
        batch, tokens = ids.shape
        cache = self.cache(tokens) if cache is None else cache
        self._turn += 1
        x: Any = None
        for number, stage in sorted(self.held.items()):
            if stage.first:
                x = placed(ids, self.model.full_model.ids_layout, self.grid)
            elif self.holders[number - 1] != self.topology.rank:
                x = self._received(number, (batch, tokens))
            x = stage.generate(x, cache.stages[number], cache.length)
            if not stage.last and self.holders[number + 1] != self.topology.rank:
                self._send(number + 1, x, (batch, tokens))
        cache.length += tokens
        values: np.ndarray | None = x.data.gather(root=0) if len(self.holders) - 1 in self.held else None
        self.p2p.finish()
        return None if values is None else values.reshape(batch, -1)

    def _send(self, number: int, x: Any, signature: tuple[int, int]) -> None:
        form, tensors = tree_flatten(x)
        self.p2p.send(Edge(number), self._turn, self.holders[number], signature, form, summed(tensors))

    def _received(self, number: int, signature: tuple[int, int]) -> Any:
        edge = Edge(number)
        blocks = self.p2p.take(self.p2p.post(edge, self._turn, self.holders[number - 1], signature))
        spec = self.p2p.spec(edge, signature)
        leaves = zip(blocks, spec.leaves, strict=True)
        tensors = [Tensor(DistArray(block, leaf.shape, leaf.target, self.grid)) for block, leaf in leaves]
        return tree_unflatten(spec.form, tensors)
