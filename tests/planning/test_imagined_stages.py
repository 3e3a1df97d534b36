"""Few stages of an imagined pipeline that stand for all of them."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.autograd import ops
from parlinalg.nn.block import TransformerBlock
from parlinalg.pipeline.run import InFlight
from parlinalg.planning.trace import Gemm, Start, cut
from tests.planning.test_imagined import rows

CASES = [  # schedule, chunks, pipeline ranks, layers
    ("1f1b", 1, 8, 14),
    ("gpipe", 1, 8, 9),
    ("interleaved", 2, 6, 22),
    ("zb-h1", 1, 6, 10),
    ("zb-v", 2, 6, 22),
]


def train(world: Any, name: str, chunks: int, stages: int, layers: int, microbatches: int = 12) -> Any:
    """The ledger, the products and the live peak of a step, by a configuration."""
    config = {
        "parallel": {"data": 2, "pipeline": stages, "tensor": {"size": 2, "mode": "1d"}},
        "schedule": {"name": name, "microbatches": microbatches, **({"chunks": chunks} if chunks > 1 else {})},
    }
    with pla.launch(config) as mesh:
        model = nn.GPT(
            vocab_size=64, max_position_embeddings=8, hidden_size=16, num_hidden_layers=layers, num_attention_heads=4,
            dtype="float32", scheme=mesh.scheme, grid=mesh.grid,
        )  # fmt: skip
        ids = np.zeros((2 * microbatches, 8), np.int64)
        engine, feed, _, _ = pla.initialize(
            model, criterion=ops.cross_entropy_sum, train_dataloader=[(ids, ids)], mesh=mesh
        )
        with pla.ledger(mesh.world) as book, world.trace() as trace:
            pla.Trainer(engine).fit(feed, epochs=1)
    return rows(book), sum(e.flops for e in trace.events if isinstance(e, Gemm)), world.peak_memory


def classes(name: str, chunks: int, stages: int, layers: int) -> Any:
    config = {
        "parallel": {"data": 2, "pipeline": stages, "tensor": {"size": 2, "mode": "1d"}},
        "schedule": {"name": name, "microbatches": 12, **({"chunks": chunks} if chunks > 1 else {})},
    }
    return pla.classes_of_stages(config, 4 * stages, layers)


@pytest.mark.one_in(3)
@pytest.mark.serial
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_few_stages_stand_for_all(case):
    """Each has the ledger, work and memory that it has among all stages."""
    _, _, stages, _ = case
    each = partial(train, **dict(zip(("name", "chunks", "stages", "layers"), case, strict=True)))
    every = pla.imagine_together(each, 4 * stages, classes=lambda rank: rank // 2 % stages, what_if=pla.WhatIf())
    some = pla.imagine_together(each, 4 * stages, classes=classes(*case), what_if=pla.WhatIf())
    assert 3 <= len(some) < stages == len(every)
    assert some == {rank: every[rank] for rank in some}


@pytest.mark.one_in(3)
@pytest.mark.serial
def test_ranks_of_one_class_have_as_many_layers():
    case = "1f1b", 1, 8, 14
    of = classes(*case)
    every = pla.imagine_together(
        partial(train, name="1f1b", chunks=1, stages=8, layers=14), 32, classes=lambda rank: rank // 2 % 8,
        what_if=pla.WhatIf(),
    )  # fmt: skip
    for one in every:
        for other in every:
            same = every[one][1] == every[other][1]
            assert same or of(one) != of(other), (one, other)


@pytest.mark.serial
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("name", ["zb-h1", "zb-v"])
def test_products_for_gradients_of_weights_wait(name, zero, monkeypatch):
    """Half of those of a backward pass, among them that for the table to which the head is tied."""
    parallel = {"data": 2, "pipeline": 4, "tensor": {"size": 2, "mode": "1d"}}
    config = {"parallel": parallel, "zero": zero, "schedule": {"name": name, "microbatches": 4}, "batch_size": 8}

    def spanned(name: str, run: Any) -> Any:
        def within(self: InFlight, *args: Any, **options: Any) -> None:
            self.grid.backend.span(name, True)
            run(self, *args, **options)
            self.grid.backend.span(name, False)

        return within

    for part in ("backward", "parameters"):
        monkeypatch.setattr(InFlight, part, spanned(part, getattr(InFlight, part)))

    def program(world: Any) -> list[int]:
        with pla.launch(config) as mesh:
            model = nn.GPT(
                vocab_size=64, max_position_embeddings=8, hidden_size=16, num_hidden_layers=8, num_attention_heads=4,
                dtype="float32", scheme=mesh.scheme, grid=mesh.grid,
            )  # fmt: skip
            engine, *_ = pla.initialize(model, criterion=ops.cross_entropy_sum, mesh=mesh)
            ids = np.zeros((8, 8), np.int64)
            with world.trace() as trace:
                engine.execute_schedule(iter([(ids, ids)]))
        events = [[e for each in cut(trace, part) for e in each.events] for part in ("backward", "parameters")]
        return [sum(e.flops for e in each if isinstance(e, Gemm) and not e.attention) for each in events]

    for inputs, weights in pla.imagine_together(program, 16, what_if=pla.WhatIf()).values():
        assert inputs == weights > 0


@pytest.mark.serial
def test_work_does_not_grow_with_the_stages(monkeypatch):
    """GPT-3's stages: 64 of 96 layers are traced by the 8 layers of four of them."""
    declared, traced = [0], [0]
    made, forward = TransformerBlock.__init__, TransformerBlock.forward

    def count_made(self: Any, *args: Any, **kwargs: Any) -> None:
        declared[0] += 1
        made(self, *args, **kwargs)

    def count_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        traced[0] += 1
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(TransformerBlock, "__init__", count_made)
    monkeypatch.setattr(TransformerBlock, "forward", count_forward)
    case = "1f1b", 1, 64, 96
    each = partial(train, **dict(zip(("name", "chunks", "stages", "layers"), case, strict=True)), microbatches=4)
    found = pla.imagine_together(each, 256, classes=classes(*case), what_if=pla.WhatIf())
    assert len(found) == 4
    assert declared[0] == 4 * 96
    assert traced[0] <= 4 * 8


@pytest.mark.serial
def test_a_step_of_gpt_3_on_3072_ranks():
    """Work and messages of its stages are those of the formulas, and a trace takes seconds."""
    microbatches, length, width, tensor = 16, 2048, 12288, 8
    config = {
        "parallel": {"data": 6, "pipeline": 64, "tensor": {"size": tensor, "mode": "1d"}},
        "schedule": {"name": "1f1b", "microbatches": microbatches},
        "zero": 1,
    }

    def program(world: Any) -> Any:
        with pla.launch(config) as mesh:
            model = nn.GPT(
                vocab_size=51200, max_position_embeddings=length, hidden_size=width, num_hidden_layers=96,
                num_attention_heads=96, dtype="float32", scheme=mesh.scheme, grid=mesh.grid,
            )  # fmt: skip
            ids = np.zeros((6 * microbatches, length), np.int64)
            engine, feed, _, _ = pla.initialize(
                model, criterion=ops.cross_entropy_sum, train_dataloader=[(ids, ids)], mesh=mesh
            )
            with world.trace() as trace:
                pla.Trainer(engine).fit(feed, epochs=1)
        return trace

    traces = pla.imagine_together(program, 3072, classes=pla.classes_of_stages(config, 3072, 96), what_if=pla.WhatIf())
    assert list(traces) == [0, 8, 256, 504]  # stages 0 and 63, and the first ones with 2 layers and with 1
    for rank, trace in traces.items():
        layers = {0: 2, 8: 2, 256: 1, 504: 1}[rank]
        flops = Counter()
        for event in trace.events:
            if isinstance(event, Gemm):
                flops[event.batch > 1] += event.flops
        products = 3 * layers * 24 * length * width**2 + (rank == 504) * 3 * 2 * length * width * 51200
        assert flops[False] == pytest.approx(microbatches * products / tensor, rel=0.01), rank
        sent = [e for e in trace.events if isinstance(e, Start) and e.op == "send" and e.sent > 2**20]
        ways = 1 if rank in (0, 504) else 2
        assert sum(e.sent for e in sent) == microbatches * ways * 4 * length * width, rank


@pytest.mark.serial
def test_a_rank_does_not_stand_for_the_one_before_it():
    each = partial(train, name="interleaved", chunks=2, stages=4, layers=6)
    with pytest.raises(pla.CommError, match="rank 0 receives values from rank 6, for which it stands itself"):
        pla.imagine_together(each, 16, classes=lambda rank: rank // 2 % 4 % 3, what_if=pla.WhatIf())


@pytest.mark.serial
def test_classes_where_stages_are_not_known_from_their_layers():
    """Each stage is a class where the layers' costs decide; without a pipeline all ranks are one."""
    by_cost = {"parallel": {"pipeline": {"size": 4, "partition": "parameters"}}}
    for config, expected in ((by_cost, [0, 1, 2, 3]), ({"parallel": {"data": 4}}, [0, 0, 0, 0])):
        of = pla.classes_of_stages(config, 4, 10)
        assert [of(rank) for rank in range(4)] == expected
    with pytest.raises(pla.ConfigError, match="4 stages needs as many layers, but the model has 3"):
        pla.classes_of_stages({"parallel": {"pipeline": 4}}, 4, 1)
    with pytest.raises(pla.ConfigError, match="layers of a model should be a whole number of at least 0"):
        pla.classes_of_stages({"parallel": {"pipeline": 4}}, 4, 2.5)


@pytest.mark.serial
def test_messages_of_ranks_that_are_not_imagined_come_in_order():
    """Rank 1 stands for rank 2, so rank 3 receives what rank 1 sends to its next rank, not what it sends elsewhere."""

    def program(world: Any) -> list[int]:
        got, found = np.zeros(1, np.int64), []
        for turn in range(3):
            if world.rank < 3:
                world.comm.send(np.array([10 * turn + world.rank]), world.rank + 1, tag=turn)
            if world.rank == 1:
                world.comm.send(np.array([-1]), 0)
            if world.rank == 0:
                world.comm.receive(got, 1)
            else:
                world.comm.receive(got, world.rank - 1, tag=turn)
            found.append(int(got[0]))
        return found

    found = pla.imagine_together(program, 4, classes=lambda rank: min(rank, 1) + rank // 3)
    assert found == {0: [-1, -1, -1], 1: [0, 10, 20], 3: [1, 11, 21]}
