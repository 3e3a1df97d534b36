"""Language models of text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from parlinalg.array import zeros
from parlinalg.autograd import Tensor
from parlinalg.autograd.ops import cross_entropy_sum
from parlinalg.backend.blas import gemm_rate, gemm_side
from parlinalg.backend.memory import check_memory
from parlinalg.comm.together import odd_one_out, together
from parlinalg.datasets import Batch, Passages, Text, Windows, known_share
from parlinalg.errors import ConfigError
from parlinalg.nn import GPT, Llama, auxiliary_losses, sequence_positions
from parlinalg.nn.auxiliary import AuxiliaryLosses
from parlinalg.sequence import sequence_order
from parlinalg.train.config import Config
from parlinalg.train.launch import Mesh
from parlinalg.train.pipelines import rows_of_a_microbatch
from parlinalg.train.sample import continuation, whole_words
from parlinalg.train.stages import staged
from parlinalg.train.task import Criterion, Outcome, Task

MODELS: dict[str, type[GPT] | type[Llama]] = {"gpt": GPT, "llama": Llama}
SEQUENCE = 128
HELD_TOKENS = 4096  # of a batch of the validation, at least
SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
SAMPLE = {"prompt": "\n", "max_new_tokens": 500, "temperature": 0.8}
TOP = 700.0  # exp of more is infinite


class Language(Task):
    """A model that tells the next token of a text at every position.

    Attributes
    ----------
    whole : GPT or Llama
        The model as it is declared; in a pipeline only its own stages have values.
    peak : float
        Floating-point operations a second of products on all ranks at once; measured by `opening`.
    """

    data: Text
    loader: Windows
    curves: ClassVar[Mapping[str, str]] = {"loss": "validation_loss", "tokens_per_s": ""}

    def __init__(self, config: Config, mesh: Mesh, data: Text) -> None:
        self.data, self.mesh = data, mesh
        odd = odd_one_out(mesh.world, data.train.data, data.validation.data, str(data.tokenizer.vocab_size).encode())
        if odd is not None:
            raise ConfigError(f"{data.name}: rank {odd} reads other tokens than rank 0; all ranks need the same files")
        self.length = int(config.data.options.get("sequence_length", SEQUENCE))
        self.whole = self._declared(config)
        shape = (rows_of_a_microbatch(config, mesh.parallel), self.length)
        if not config.offload:  # each block's input is kept for the backward pass
            hidden = math.prod(shape) * self.whole.config["hidden_size"] * np.dtype(np.float16).itemsize
            what = f"a microbatch of {shape[0]} windows of {shape[1]} tokens"
            check_memory(what, hidden // mesh.world.size, mesh.grid.backend)
        self.model = staged(
            config, mesh, self.whole, sample=lambda: zeros(shape, mesh.grid, self.whole.ids_layout, np.int64)
        )  # fmt: skip
        self.sampling = {**SAMPLE, "seed": config.seed, **config.sample}
        self.smoothed: Criterion = partial(cross_entropy_sum, **config.criterion.options)
        self.peak = math.nan
        rest = (mesh.grid, self.whole.ids_layout, self.whole.targets_layout)
        self.order = self._order()
        most = max(config.batch_size, HELD_TOKENS // self.length)

        def windows() -> tuple[Windows, Passages]:
            try:
                train = Windows(
                    data.train, self.length, config.batch_size, *rest, seed=config.seed, order=self.order,
                    starts=data.train_starts,
                )  # fmt: skip
            except ConfigError as error:
                raise ConfigError(f"{data.name}, the part to train on: {error}") from error
            return train, Passages(
                data.validation, self.length, most, *rest, order=self.order, starts=data.validation_starts
            )

        self.loader, self.held = together(mesh.world, windows, "cutting the text into windows")
        self.flops = self.whole.flops(config.batch_size, self.length)

    def _order(self) -> np.ndarray | None:
        """The order in which the tokens of a window lie; None: as they come."""
        parallel = self.mesh.parallel
        if self.length < parallel.sequence:
            raise ConfigError(
                f"data.sequence_length={self.length} over parallel.sequence.size={parallel.sequence} leaves ranks "
                f"without tokens: give at least {parallel.sequence} positions, or a sequence size of at most "
                f"{self.length}"
            )
        name = parallel.order_of(causal=True)
        return None if name == "contiguous" else sequence_order(self.length, parallel.ring, name)

    def _declared(self, config: Config) -> Any:
        options = {**SIZES, **config.model.options}
        vocabulary, length = self.data.tokenizer.vocab_size, self.length
        if options.setdefault("vocab_size", vocabulary) < vocabulary:
            raise ConfigError(
                f"model.vocab_size is {options['vocab_size']}, but the tokenizer has {vocabulary} tokens; leave it "
                f"out, or give at least {vocabulary}"
            )
        if options.setdefault("max_position_embeddings", length) < length:
            raise ConfigError(
                f"model.max_position_embeddings is {options['max_position_embeddings']}, less than "
                f"data.sequence_length, {length}; give at least {length}, or leave it out"
            )
        if config.model.name == "llama":
            options.setdefault("intermediate_size", 8 * options["hidden_size"] // 3)
        place: dict[str, Any] = {
            "scheme": self.mesh.scheme,
            "grid": self.mesh.grid,
            "dtype": config.model_dtype,
        }
        try:
            return MODELS[config.model.name](**options, **place)
        except ValueError as error:
            raise ConfigError(f"model: {error}") from error

    @contextmanager
    def context(self, batch: Batch) -> Iterator[AuxiliaryLosses]:
        collected = auxiliary_losses() if self.model.training else nullcontext(AuxiliaryLosses())
        with sequence_positions(batch.positions, batch.documents), collected as auxiliary:
            yield auxiliary

    def losses_of(self, output: Tensor, batch: Batch) -> tuple[Tensor, int, dict[str, float]]:
        criterion: Criterion = self.smoothed if self.model.training else cross_entropy_sum
        total, count = criterion(output, batch.y)
        return total, count, {}

    def metrics(self, outcome: Outcome, seconds: float) -> dict[str, float]:
        return {
            "loss": outcome.loss,
            "perplexity": math.exp(min(outcome.loss, TOP)),
            "lr": outcome.lr,
            "tokens_per_s": outcome.count / seconds,
            "mfu": self.flops / seconds / self.peak,
        }

    def held_metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        loss = means["loss"]
        found = {"validation_loss": loss, "validation_perplexity": math.exp(min(loss, TOP))}
        if self.data.tokenizer.unit != "byte":
            found["validation_nats_per_byte"] = loss * len(self.data.validation) / self.data.validation_bytes
        return found

    def layouts(self) -> str:
        model = self.whole
        order = self.mesh.parallel.order_of(causal=True)
        ordered = "" if order == "contiguous" else f", tokens in {order} order"
        return (
            f"ids {model.ids_layout!r}, targets {model.targets_layout!r}, residual stream "
            f"{model.scheme.residual!r}{ordered}"
        )

    def opening(self) -> dict[str, str]:
        backend, world = self.mesh.grid.backend, self.mesh.world
        dtype = str(self.whole.dtype)
        n = max(world.share(gemm_side(backend, dtype)))
        self.peak = sum(world.share(gemm_rate(backend, dtype, n, sustained=True)))
        return {
            "step": f"{self.flops / 1e9:.3g} GFLOP of the model",
            "peak": f"{self.peak / 1e9:.3g} GFLOP/s: {n} × {n} products in {dtype}, on all ranks at once",
        }

    def held_line(self, metrics: Mapping[str, float]) -> str:
        unit, loss = self.data.tokenizer.unit, metrics["validation_loss"]
        each = metrics.get("validation_nats_per_byte")
        bytes_ = "" if each is None else f", {each:.4f} nats a byte"
        return (
            f"validation loss {loss:.4f} nats a {unit}{bytes_}, perplexity {metrics['validation_perplexity']:.2f} "
            f"({len(self.data.validation) - 1:,} {unit}s)"
        )

    def closing(self, history: Sequence[Mapping[str, Any]]) -> list[str]:
        if not history:
            return []
        rate = len(history) / sum(1 / h["tokens_per_s"] for h in history)
        share = len(history) / sum(1 / h["mfu"] for h in history)
        return [f"{rate:,.0f} tokens a second in the steps, {share:.1%} of the peak"]

    def leave(self, out: Path, speaks: bool, done: bool) -> tuple[list[str], list[str]]:
        files = ["config.json", "model.safetensors", "tokenizer.json"]
        if "num_local_experts" in self.whole.config:
            files = files[2:]
        else:
            self.model.save_pretrained(out)
        if speaks:
            self.data.tokenizer.save(out)
        if not done or not self.sampling["max_new_tokens"]:
            return [], files
        options = dict(self.sampling)
        prompt = options.pop("prompt")
        text = whole_words(continuation(self.model, self.data.tokenizer, prompt, **options))
        share, count = known_share(text, self.data.words)
        if speaks:
            (out / "sample.txt").write_text(prompt + text, encoding="utf-8")
        lines = [
            "", "a sample:", f"{prompt}{text}", "",
            f"{share:.0%} of the sample's {count} words of three letters or more occur in the text",
        ]  # fmt: skip
        return lines, [*files, "sample.txt"]
