"""All storages of a parameter answer alike: the gradient, what is updated, and how many bytes lie where."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.autograd import ParameterStorage
from parlinalg.grid import factorizations
from parlinalg.offload import OffloadedParameters
from parlinalg.offload.parameters import OffloadedStorage
from parlinalg.parallel import GradientReducer, WeightGatherer, ZeRO, table
from parlinalg.parallel.zero import SharedStorage

SHAPE, WHOLE = (7, 5), pla.Layout(None, None)


def made(kind, grid, folder, end):
    """Parameters in storages of a kind, whose gradients are 1 + their numbers."""
    ps = [pla.Parameter(pla.random.normal(SHAPE, grid, WHOLE, seed=i), f"p{i}") for i in range(3)]
    if kind.startswith("zero"):
        GradientReducer(ps, [ZeRO(int(kind[-1]))], first_bucket=1, bucket=400)
    elif kind != "whole":
        folder = folder if grid.backend.host_memory else None
        end.enter_context(OffloadedParameters(folder, least=0, values=kind == "values and gradients")).place(ps)
    y = sum(((p * (1.0 + i)).sum() for i, p in enumerate(ps)), start=pla.Tensor(pla.zeros((), grid, pla.Layout())))
    y.backward()
    return ps


@pytest.mark.parametrize("kind", ["whole", "zero 1", "zero 2", "gradients", "values and gradients"])
def test_every_storage_answers_alike(kind, make_grid, world, folder):
    grid = make_grid({"data": world.size})
    itemsize, n = 8, SHAPE[0] * SHAPE[1]
    with ExitStack() as end:
        ps = made(kind, grid, folder, end)
        want = table(ps, [ZeRO(int(kind[-1]))] if kind.startswith("zero") else [], first_bucket=1, bucket=400)
        for what, each in (("values", "value"), ("gradients", "gradient")):
            assert want[what] == sum(getattr(p.storage.nbytes(p.data), each) for p in ps)
        for i, p in enumerate(ps):
            storage, part = p.storage, p.storage.partition(p.data)
            shared = kind.startswith("zero") and world.size > 1
            assert type(storage) is (
                SharedStorage if shared else OffloadedStorage if kind.endswith("gradients") else ParameterStorage
            )
            assert sum(world.share(part.stop - part.start)) == (n if shared else n * world.size)
            value, grad = p.updated
            assert value.size == grad.size == part.stop - part.start
            assert sum(world.share(part.stop - part.start if p.counted else 0)) == n, "each element counts once"
            to_host = grid.backend.to_host
            np.testing.assert_array_equal(to_host(storage.whole(p.data)), np.full(SHAPE, 1.0 + i))
            settled = storage.settled
            settled[...] *= 3
            storage.changed(settled)
            del settled  # of an offloaded gradient on a GPU it is a copy
            np.testing.assert_array_equal(to_host(storage.whole(p.data)), np.full(SHAPE, 3.0 + 3 * i))
            block = grid.backend.from_host(np.arange(n, dtype=float).reshape(SHAPE))
            storage.replace(block)
            np.testing.assert_array_equal(to_host(storage.whole(p.data)), to_host(block))
            np.testing.assert_array_equal(to_host(p.updated[1]), np.arange(n)[part.start : part.stop])
            storage.clear(p.data)
            assert not to_host(storage.whole(p.data)).any()
            found, mine = storage.nbytes(p.data), (part.stop - part.start) * itemsize
            assert found.value == n * itemsize
            assert found.updated == mine
            assert found.gradient == (mine if kind == "zero 2" else n * itemsize)
            away = {"gradients": 1, "values and gradients": 2}.get(kind, 0)
            assert found.offloaded == away * n * itemsize
            p.grad = None
            assert storage.settled is None
            assert p.updated[1] is None


def test_a_storage_takes_over_what_the_one_before_had(make_grid, world, folder, backend):
    """A gatherer stays where the update comes to be shared and is whole again, in any order; a gradient moves."""
    grid = make_grid({"data": world.size})
    scheme = pla.schemes.discover()["zero3"].SCHEME
    model = pla.nn.Linear(2 * world.size, 3, scheme, grid).initialize(seed=0)
    bias = model.bias
    gatherer = WeightGatherer(model)
    reducer = GradientReducer(model.parameters(), [ZeRO(3)])
    assert bias.storage.gatherer is gatherer
    reducer.detach()
    assert type(bias.storage) is ParameterStorage
    assert bias.storage.gatherer is gatherer
    gatherer.detach()
    assert bias.storage.gatherer is None
    if backend == "numpy":
        p = pla.Parameter(pla.ones(SHAPE, grid, WHOLE), "p")
        (p * 2.0).sum().backward()
        with OffloadedParameters(folder, least=0) as away:
            away.place([p])
            assert p.data.resident is None
            np.testing.assert_array_equal(p.grad.block, np.full(SHAPE, 2.0))
            p.data.put(np.full(4, 5.0), 3)
        assert p.data.resident is p.block
        p.data.put(np.full(2, 7.0), 30)
        p.data.put(p.block.reshape(-1)[:3], 0)
        np.testing.assert_array_equal(p.block.reshape(-1), [1.0] * 3 + [5.0] * 4 + [1.0] * 23 + [7.0] * 2 + [1.0] * 3)
        np.testing.assert_array_equal(p.grad.block, np.full(SHAPE, 2.0))


@pytest.mark.core
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_the_partition_of_every_rank_is_known_on_all(stage, make_grid, world):
    """Blocks that the ranks hold differ in size, and buckets have several parameters."""
    for sizes in factorizations(world.size, 3):
        grid = make_grid(dict(zip(("t", "data", "u"), sizes, strict=True)))
        layouts = [("t", None), (None, ("u", "t")), (None, None), ("u", "t"), ("t", None)]
        ps = [pla.Parameter(pla.zeros((7 + i, 5), grid, pla.Layout(*cut)), f"p{i}") for i, cut in enumerate(layouts)]
        if stage:
            GradientReducer(ps, [ZeRO(stage)], first_bucket=1, bucket=700)
        for p in ps:
            every = world.share(p.storage.partition(p.data))
            assert [list(p.storage.partition(p.data, rank)[:2]) for rank in range(world.size)] == [e[:2] for e in every]
        grid.close()
