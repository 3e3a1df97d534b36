"""Classifiers of samples."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import numpy as np

from parlinalg.array import zeros
from parlinalg.array.create import dtype_named
from parlinalg.autograd import Tensor
from parlinalg.autograd.ops import cross_entropy_sum
from parlinalg.comm.together import odd_one_out
from parlinalg.datasets import Batch, Loader, Samples
from parlinalg.errors import ConfigError
from parlinalg.layout import Layout
from parlinalg.nn import MLP
from parlinalg.train.config import Config
from parlinalg.train.launch import Mesh
from parlinalg.train.metrics import correct
from parlinalg.train.pipelines import rows_of_a_microbatch
from parlinalg.train.stages import staged
from parlinalg.train.task import Criterion, Outcome, Task

HIDDEN = (128,)
TEST_BATCH = 256  # samples the test takes at a time, at least


class Classify(Task):
    """An MLP that tells the class of a sample.

    Attributes
    ----------
    whole : MLP
        The model as it is declared; in a pipeline only its own stages have values.
    """

    data: Samples
    curves: ClassVar[Mapping[str, str]] = {"loss": "test_loss", "accuracy": "test_accuracy"}

    def __init__(self, config: Config, mesh: Mesh, data: Samples) -> None:
        options = dict(config.model.options)
        sizes = (data.features, *options.pop("hidden", HIDDEN), data.classes)
        self.data = data
        if (odd := odd_one_out(mesh.world, *(np.ascontiguousarray(a).data for a in data.arrays))) is not None:
            raise ConfigError(f"{data.name}: rank {odd} reads other samples than rank 0; all ranks need the same files")
        dtype = dtype_named(config.model_dtype)
        self.whole = MLP(sizes, mesh.scheme, mesh.grid, dtype=dtype, **options)
        shape = (rows_of_a_microbatch(config, mesh.parallel), data.features)
        layout = self.whole.input_layout()
        self.model = staged(
            config, mesh, self.whole, sample=lambda: Tensor(zeros(shape, mesh.grid, layout, dtype))
        )  # fmt: skip
        self.criterion: Criterion = partial(cross_entropy_sum, **config.criterion.options)
        x_layout, y_layout = self.whole.input_layout(), Layout(self.whole.output_layout().dims[0])
        self.loader: Loader = Loader(
            data.x, data.y, config.batch_size, mesh.grid, x_layout, y_layout, dtype=dtype, seed=config.seed
        )
        self.held: Loader = Loader(
            data.x_test, data.y_test, max(config.batch_size, TEST_BATCH), mesh.grid, x_layout, y_layout,
            dtype=dtype, shuffle=False,
        )  # fmt: skip

    def losses_of(self, output: Tensor, batch: Batch) -> tuple[Tensor, int, dict[str, float]]:
        loss, count = self.criterion(output, batch.y)
        return loss, count, {"accuracy": correct(output.data, batch.y)}

    def metrics(self, outcome: Outcome, seconds: float) -> dict[str, float]:
        return {
            "loss": outcome.loss,
            "accuracy": outcome.means["accuracy"],
            "lr": outcome.lr,
            "samples_per_s": outcome.samples / seconds,
        }

    def held_metrics(self, means: Mapping[str, float]) -> dict[str, float]:
        return {"test_loss": means["loss"], "test_accuracy": means["accuracy"]}

    def layouts(self) -> str:
        loader = self.loader
        return f"x {loader.x_layout!r}, labels {loader.y_layout!r}, logits {self.whole.output_layout()!r}"

    def held_line(self, metrics: Mapping[str, float]) -> str:
        return f"test accuracy {metrics['test_accuracy']:.4f} ({len(self.data.x_test)} samples)"
