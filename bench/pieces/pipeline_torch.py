r"""One piece of `bench/pipeline.py`: PyTorch's pipelines (`torch.distributed.pipelining`), over gloo.

usage: python -m torch.distributed.run --nproc-per-node P pipeline_torch.py \
           SCHEDULE SIZES MICROBATCHES COUNTS WARM STEPS

SCHEDULE is the name of one of its classes, such as Schedule1F1B or ScheduleGPipe, of one stage a rank; COUNTS the
layers of each stage (embedding, blocks, head), such as 3,3.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import Memory, Sizes, batches, one_thread, timed, weights
from gpt_torch import GPT, Block, load, optimizer_of
from torch import Tensor, nn
from torch.distributed import pipelining


class Embed(nn.Module):
    """The first layer of a model."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.embedding, self.positions = model.embedding, model.positions

    def forward(self, ids: Tensor) -> Tensor:
        return self.embedding(ids) + self.positions.weight


def layers(sizes: Sizes) -> list[nn.Module]:
    """All layers of the model, with the common weights; the head is not tied."""
    model = GPT(sizes)
    model.head = nn.Linear(sizes.d, sizes.vocab, bias=False)
    load(model, sizes, tied=False)
    blocks: list[Block] = list(model.blocks)  # type: ignore[arg-type]
    return [Embed(model), *blocks, nn.Sequential(model.norm, model.head)]


def prepared(name: str, sizes: Sizes, microbatches: int, counts: list[int]) -> Callable[[int], float]:
    """Return the function that makes step number i on this rank, and returns its loss on the last."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    first, last = rank == 0, rank == ranks - 1
    begin = sum(counts[:rank])
    module = nn.Sequential(*layers(sizes)[begin : begin + counts[rank]])
    stage = pipelining.PipelineStage(module, rank, ranks, torch.device("cpu"))

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    schedule = getattr(pipelining, name)(stage, microbatches, loss_of)
    optimizer = optimizer_of(module)
    data = [tuple(map(torch.from_numpy, batch)) for batch in batches(sizes)]

    def step(number: int) -> float:
        ids, targets = data[number % len(data)]
        losses: list[Tensor] = []
        schedule.step(*([ids] if first else []), target=targets if last else None, losses=losses if last else None)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).detach().mean()) if last else 0.0

    return step


def main() -> None:
    name, sizes, microbatches = sys.argv[1], Sizes.parse(sys.argv[2]), int(sys.argv[3])
    counts, warm, steps = [int(n) for n in sys.argv[4].split(",")], int(sys.argv[5]), int(sys.argv[6])
    torch.set_num_threads(one_thread())
    dist.init_process_group("gloo")
    step = prepared(name, sizes, microbatches, counts)
    told = {"torch": torch.__version__, "threads": torch.get_num_threads(), "parameters": parameters(sizes)}
    timed(step, warm, steps, dist.barrier, dist.get_rank() == dist.get_world_size() - 1, Memory(), **told)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads need not be waited for


def parameters(sizes: Sizes) -> int:
    """Return how many parameters the whole model has."""
    return sum(value.size for value in weights(sizes, tied=False).values())


if __name__ == "__main__":
    main()
