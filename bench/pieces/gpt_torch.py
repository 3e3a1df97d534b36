"""One piece of `bench/train.py`: PyTorch: on one core or GPU, tensor parallel by DTensor, or data parallel by DDP.

usage: python gpt_torch.py serial|compiled SIZES WARM STEPS [DEVICE DTYPE]
       python -m torch.distributed.run --nproc-per-node P gpt_torch.py tensor|data SIZES WARM STEPS
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from gpt import LEARNING_RATE, Memory, Sizes, batches, one_thread, timed, weights
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        d = sizes.d
        self.head_dim = sizes.head_dim
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        z = self.qkv(self.norm1(x)).view(b, s, -1, 3, self.head_dim)  # the heads of this rank
        q, k, v = z.permute(3, 0, 2, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, s, -1))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(sizes.vocab, sizes.d), nn.Embedding(sizes.seq, sizes.d)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.d)
        self.head = nn.Linear(sizes.d, sizes.vocab, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def load(model: GPT, sizes: Sizes, *, tied: bool = True) -> None:
    """The common weights; a Linear's are transposed."""
    ours = {"attention.qkv": "qkv", "attention.out": "out", "mlp.0": "up", "mlp.2": "down"}
    linears = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - {id(model.embedding.weight)}
    mine = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in weights(sizes, tied=tied).items():
            for theirs, short in ours.items():
                name = name.replace(theirs, short)
            p, new = mine.pop(name), torch.from_numpy(value)
            p.copy_(new.T if id(p) in linears else new)
    if mine:
        raise RuntimeError(f"parameters without weights: {', '.join(mine)}")


def cut(model: GPT, ranks: int) -> None:
    """Tensor parallel: blocks by columns and rows, embedding and head by vocabulary."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (ranks,))
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(len(model.blocks)):
        plan |= {
            f"blocks.{i}.qkv": ColwiseParallel(), f"blocks.{i}.out": RowwiseParallel(),
            f"blocks.{i}.up": ColwiseParallel(), f"blocks.{i}.down": RowwiseParallel(),
        }  # fmt: skip
    parallelize_module(model, mesh, plan)
    model.head.weight = model.embedding.weight


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Fused AdamW; DTensors and tensors are not updated in one call."""
    groups: dict[type, list[nn.Parameter]] = {}
    for p in model.parameters():
        groups.setdefault(type(p.data), []).append(p)
    return torch.optim.AdamW([{"params": g} for g in groups.values()], lr=LEARNING_RATE, weight_decay=0.01, fused=True)


class Allocated(Memory):
    """Bytes that tensors on the GPU take."""

    def start(self) -> int:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


def main() -> None:
    mode, sizes = sys.argv[1], Sizes.parse(sys.argv[2])
    warm, steps = int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(one_thread())
    device, dtype = sys.argv[5:7] or ("cpu", "float32")
    rank, ranks, barrier = 0, 1, lambda: None
    alone = mode in ("serial", "compiled")
    if not alone:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank, ranks, barrier = dist.get_rank(), dist.get_world_size(), dist.barrier
    model: Any = GPT(sizes)
    load(model, sizes)
    model.to(device, getattr(torch, dtype))
    data = [tuple(torch.from_numpy(part).to(device) for part in batch) for batch in batches(sizes)]
    context: Any = nullcontext
    if mode == "tensor":
        from torch.distributed.tensor.parallel import loss_parallel

        cut(model, ranks)
        context = loss_parallel
    optimizer = optimizer_of(model)
    if mode == "data":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
        data = [(i.chunk(ranks)[rank], t.chunk(ranks)[rank]) for i, t in data]

    def loss_of(ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1).float(), targets.flatten())

    forward = torch.compile(loss_of) if mode == "compiled" else loss_of

    def step(number: int) -> float:
        with context():
            loss = forward(*data[number % len(data)])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float((loss.full_tensor() if mode == "tensor" else loss).item())

    memory = Allocated() if device == "cuda" else Memory()
    timed(step, warm, steps, barrier, rank == 0, memory, torch=torch.__version__, threads=torch.get_num_threads())
    if not alone:
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads need not be waited for


if __name__ == "__main__":
    main()
