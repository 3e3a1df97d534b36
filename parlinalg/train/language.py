"""Language models in training: their metrics, the folder they are written to, and the text they write."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from parlinalg.backend.blas import gemm_rate, gemm_side
from parlinalg.comm.together import together
from parlinalg.datasets import Text, Tokenizer, known_share
from parlinalg.errors import ConfigError
from parlinalg.nn.generate import generate
from parlinalg.train.config import SampleConfig
from parlinalg.train.hooks import Hook
from parlinalg.train.mesh import Mesh

if TYPE_CHECKING:
    from parlinalg.train.trainer import Trainer

__all__ = ["LanguageHook", "PretrainedHook", "continuation", "whole_words"]

TOP = 700.0  # exp of more is infinite


class LanguageHook(Hook):
    """Measures the perplexity of a language model, and its speed in tokens a second and as a share of the peak (MFU).

    Parameters
    ----------
    mesh : Mesh
    data : Text
    model : GPT or Llama
    flops : float
        Floating-point operations of a step.

    Attributes
    ----------
    peak : float
        Floating-point operations a second of products on all ranks at once.
    """

    def __init__(self, mesh: Mesh, data: Text, model: Any, flops: float) -> None:
        self.mesh, self.data, self.dtype, self.flops = mesh, data, str(model.dtype), flops
        self.peak = math.nan
        self._steps, self._seconds, self._targets = 0, 0.0, 0.0

    def measure(self) -> dict[str, str]:
        """Measure the peak; return lines that say what it is and what a step takes.  Collective."""
        backend, world = self.mesh.grid.backend, self.mesh.world
        n = max(world.share(gemm_side(backend, self.dtype), others="alike"))
        self.peak = sum(world.share(gemm_rate(backend, self.dtype, n, sustained=True), others="alike"))
        return {
            "step": f"{self.flops / 1e9:.3g} GFLOP of the model",
            "peak": f"{self.peak / 1e9:.3g} GFLOP/s: {n} × {n} products in {self.dtype}, on all ranks at once",
        }

    def before_train(self, trainer: Trainer) -> None:
        if math.isnan(self.peak):
            self.measure()

    def after_train_iter(self, trainer: Trainer, output: Any, label: Any, loss: float) -> None:
        seconds = trainer.seconds
        self._steps, self._seconds = self._steps + 1, self._seconds + seconds
        self._targets += trainer.targets
        trainer.add_metrics({
            "perplexity": _perplexity(loss), "tokens_per_s": trainer.targets / seconds,
            "mfu": self.flops / seconds / self.peak,
        })  # fmt: skip

    def after_test(self, trainer: Trainer) -> None:
        trainer.add_metrics(self.held(trainer.step_metrics))

    def held(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of the validation that follow from its loss."""
        if "validation_loss" not in metrics:
            return {}
        loss = metrics["validation_loss"]
        found = {"validation_loss": loss, "validation_perplexity": _perplexity(loss)}
        if self.data.tokenizer.unit != "byte":
            found["validation_nats_per_byte"] = loss * len(self.data.validation) / self.data.validation_bytes
        return found

    def describe(self, metrics: Mapping[str, float]) -> str:
        """Return a line that reports a validation."""
        unit, each = self.data.tokenizer.unit, metrics.get("validation_nats_per_byte")
        bytes_ = "" if each is None else f", {each:.4f} nats a byte"
        return (
            f"validation loss {metrics['validation_loss']:.4f} nats a {unit}{bytes_}, perplexity "
            f"{metrics['validation_perplexity']:.2f} ({len(self.data.validation) - 1:,} {unit}s)"
        )

    def finish(self, trainer: Trainer) -> list[str]:
        if not self._steps:
            return []
        share = self._steps * self.flops / self._seconds / self.peak
        return [f"{self._targets / self._seconds:,.0f} tokens a second in the steps, {share:.1%} of the peak"]


def _perplexity(loss: float) -> float:
    return math.exp(min(loss, TOP))


class PretrainedHook(Hook):
    """Leaves a language model as a folder that `parlinalg generate` and `from_pretrained` read, and a text by it.

    A text is written where all steps were made; a line says why, if the model cannot write one.  Models that
    `transformers` does not have are not written.

    Parameters
    ----------
    folder : str or Path
    data : Text
        Whose tokenizer is left, and in whose words those of the text are looked up.
    sampling : SampleConfig, optional
        How the text is written.
    """

    def __init__(self, folder: str | Path, data: Text, sampling: SampleConfig | None = None) -> None:
        self.folder, self.data = Path(folder), data
        self.sampling = sampling or SampleConfig()

    def finish(self, trainer: Trainer) -> list[str]:
        model, world = trainer.engine.model, trainer.engine.world
        files = ["config.json", "model.safetensors", "tokenizer.json"]
        if getattr(model, "full_model", model).unwritable:
            files = files[2:]
        else:
            model.save_pretrained(self.folder)
        lines: list[str] = []
        sample: str | None = None
        if not trainer.signal and self.sampling.max_new_tokens:
            try:
                sample, lines = self._sample(model)
                files.append("sample.txt")
            except ConfigError as error:  # on all ranks, such as of weights that are not finite
                lines = [f"no sample is written: {error}"]

        def write() -> None:
            if not world.rank:
                self.data.tokenizer.save(self.folder)
                if sample is not None:
                    (self.folder / "sample.txt").write_text(sample, encoding="utf-8", errors="replace")

        together(world, write, f"writing to {self.folder}")
        self.files = [str(self.folder / name) for name in files]
        return lines

    def _sample(self, model: Any) -> tuple[str, list[str]]:
        """Return a text that the model writes, with its prompt, and lines that show it.  Collective."""
        how, prompt = self.sampling, self.sampling.prompt
        written = whole_words(
            continuation(
                model, self.data.tokenizer, prompt, how.max_new_tokens, temperature=how.temperature, top_k=how.top_k,
                top_p=how.top_p, seed=how.seed or 0,
            )
        )  # fmt: skip
        share, count = known_share(written, self.data.words)
        return prompt + written, [
            "", "a sample:", f"{prompt}{written}", "",
            f"{share:.0%} of the sample's {count} words of three letters or more occur in the text",
        ]  # fmt: skip


# ---------------------------------------------------------------------------------------------- text
def continuation(
    model: Any, tokenizer: Tokenizer, prompt: str, max_new_tokens: int, *, temperature: float = 1.0,
    top_k: int | None = None, top_p: float | None = None, seed: int = 0, special: bool = False,
    eos_token_id: int | Collection[int] | None = None, report: Callable[[str], None] | None = None,
) -> str:  # fmt: skip
    """Return the text that a model generates after a prompt, without the prompt; the same on every grid.  Collective.

    Where the model's positions end, the last half of them is the new prompt.

    Parameters
    ----------
    model : GPT or Llama
    tokenizer : Tokenizer
    prompt : str
    max_new_tokens : int
        The most tokens written.
    temperature : float
        The temperature of the draws; at 0 the likeliest token is taken.
    top_k, top_p, seed, eos_token_id
        As of `parlinalg.nn.generate`.
    special : bool
        Whether the tokenizer adds its special tokens to the prompt.
    report : callable, optional
        Called on every rank with each further piece of the text, as soon as it is written.
    """
    ids = tokenizer.encode(prompt, special=special).astype(np.int64)
    config = getattr(model, "full_model", model).config  # of a model in a pipeline, or of the model itself
    most, end = config["max_position_embeddings"], len(ids) + max_new_tokens
    chosen: dict[str, Any] = {
        "do_sample": temperature > 0,
        "temperature": temperature or 1.0,
        "top_k": top_k,
        "top_p": top_p,
    }
    written = _Stream(tokenizer, ids, report or (lambda text: None))
    while len(ids) < end:
        start = 0 if len(ids) < most else len(ids) - max(1, most // 2)
        new = min(end, start + most) - len(ids)
        # the seed moves on, since what is drawn depends on it and on the place among the positions
        (found,) = generate(
            model, [ids[start:].tolist()], new, seed=seed + start, eos_token_id=eos_token_id, stream=written, **chosen
        )
        ended = len(found) < len(ids) - start + new
        ids = np.concatenate([ids[:start], found])
        if ended:
            break
    written.finish()
    return written.text


class _Stream:
    """The text of tokens that come one by one, reported piece by piece: no piece ends within a character."""

    def __init__(self, tokenizer: Tokenizer, prompt: np.ndarray, report: Callable[[str], None]) -> None:
        self.tokenizer, self.report = tokenizer, report
        self.ids, self.text = prompt.tolist(), ""
        self.head = len(tokenizer.decode(self.ids))  # decoded with the prompt, since tokens may begin with a space

    def __call__(self, row: int, token: int) -> None:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids)
        if not text.endswith("\ufffd"):
            self._report(text)

    def finish(self) -> None:
        """Report what was kept back at the end."""
        self._report(self.tokenizer.decode(self.ids))

    def _report(self, text: str) -> None:
        begin = self.head + len(self.text)
        if len(text) > begin:
            self.report(text[begin:])
            self.text += text[begin:]


def whole_words(text: str) -> str:
    """Return a text that was cut off, up to the end of its last whole word.

    >>> whole_words("the next wo")
    'the next'
    """
    return re.sub(r"\s+\S*$", "", text) if re.search(r"\S\s+\S*$", text) else text
