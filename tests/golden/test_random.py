"""Random numbers on every grid against a file of their bits that a program in plain Python has made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.datasets import Loader
from tests.cases import grids, held
from tests.golden import make
from tests.golden.settings import load

GOLDEN = load("random")
L = pla.Layout
STREAMS = [pytest.param(numbers, id=repr(numbers["key"])) for numbers in GOLDEN["streams"]]


def floats(bits: list[str]) -> np.ndarray:
    return np.array([float.fromhex(text) for text in bits]).reshape(make.SHAPE)


def layouts(grid: Any) -> list[pla.Layout]:
    """Cuts of three dims by all axes of a grid, each dim once the one that is cut by most."""
    a, *rest = grid.axes
    return [L(a, *(rest + [None, None])[:2]), L(None, tuple(grid.axes), None), L(None, tuple(rest), a), L(*[None] * 3)]


def check(found: Any, want: np.ndarray) -> None:
    part = tuple(slice(r.start, r.stop) for r in found.grid.block(found.layout, found.shape))
    assert held(found).tobytes() == want[part].tobytes()


@pytest.mark.parametrize("numbers", STREAMS)
def test_bits_on_every_grid(numbers: dict[str, Any], make_grid: Any, world: Any) -> None:
    """Exactly the bits but for normals of the tails, which go through the machine's logarithm: those to two units."""
    seed, name, call, step = numbers["key"]
    key = {"seed": seed, "name": name, "call": call, "step": step}
    uniform, normal = floats(numbers["uniform"]), floats(numbers["normal"])
    integers = np.array(numbers["integers"]).reshape(make.SHAPE)
    kept = np.array([bit == "1" for bit in numbers["bernoulli"]]).reshape(make.SHAPE)
    for sizes in grids(world.size):
        grid = make_grid(sizes)
        for layout in layouts(grid):
            check(pla.random.uniform(make.SHAPE, grid, layout, low=-2.0, high=3.0, **key), uniform)
            check(pla.random.integers(make.SHAPE, grid, layout, -3, 9, **key), integers)
            check(pla.random.bernoulli(make.SHAPE, grid, layout, 0.3, **key), kept)
            check(pla.random.uniform((3, 7, 3), grid, layout, low=-2.0, high=3.0, start=2, **key), uniform[2:])
            z = pla.random.normal(make.SHAPE, grid, layout, **key)
            part = tuple(slice(r.start, r.stop) for r in grid.block(layout, make.SHAPE))
            np.testing.assert_array_max_ulp(held(z), normal[part], maxulp=2)


@pytest.mark.parametrize("case", GOLDEN["dropout"], ids=lambda case: f"p={case['p']}, from {case['start']}")
def test_dropout_on_every_grid(case: dict[str, Any], make_grid: Any, world: Any) -> None:
    want = floats(case["factors"])
    for sizes in grids(world.size):
        grid = make_grid(sizes)
        for layout in layouts(grid):
            model = nn.Dropout(case["p"])
            model.initialize(case["seed"], case["name"])
            with nn.training_step(case["step"], case["start"]):
                x = pla.Tensor(pla.distribute(np.ones(make.SHAPE), grid, layout), requires_grad=True)
                y = model(x)
            check(y.data, want)
            pla.autograd.ops.sum(y * y).backward()
            np.testing.assert_array_equal(held(x.grad), 2 * held(y.data) ** 2)


def test_orders_of_epochs(make_grid: Any, world: Any) -> None:
    grid = make_grid({"a": world.size})
    for case in GOLDEN["permutations"]:
        found = pla.random.permutation(case["n"], seed=case["seed"], epoch=case["epoch"])
        assert found.tolist() == case["order"]
    for case in GOLDEN["epochs"]:
        rows = np.arange(case["n"])
        loader = Loader(rows[:, None], rows, 7, grid, L("a", None), L("a"), dtype=np.float64, seed=case["seed"])
        order = np.array(case["order"])
        for i, parts in enumerate(loader.epoch(case["epoch"], parts=3)):
            for batch in parts:
                want = order[7 * i + batch.offset :][: len(batch)]
                check(batch.y, want)
                check(batch.x, want[:, None].astype(float))


@pytest.mark.serial
def test_the_program_still_gives_the_files_numbers() -> None:
    found = make.random()
    assert {name: found[name] for name in found if name != "versions"} == {
        name: GOLDEN[name] for name in GOLDEN if name != "versions"
    }


@pytest.mark.serial
def test_words_of_any_width_are_the_files() -> None:
    """Those that NumPy's generator gives too, taken from the middle of a stream."""
    for numbers in GOLDEN["streams"]:
        key = np.array(make.counted.hashed(*numbers["key"]), np.uint64)
        raw = np.random.Philox(key=key, counter=0).random_raw(make.FIRST + 20).astype("<u8")
        for bits, words in numbers["words"].items():
            found = raw.view(f"<u{int(bits) // 8}")[make.FIRST :][:20]
            assert [f"{w:x}" for w in found.tolist()] == words
