"""The transformer's block: it moves the words of its plans, and is the same with a context, and recomputed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Layout, nn, schemes
from parlinalg.autograd.saved import saved
from parlinalg.layout import index_of, piece, span_of
from parlinalg.moves import words
from parlinalg.parallel import GradientReducer
from parlinalg.schemes import Scheme, product_words
from tests.cases import placed
from tests.models import alone, differences
from tests.training import sizes_for

B, S, HIDDEN, HEADS, INNER = 5, 7, 20, 4, 13
SCHEMES = {name: file.SCHEME for name, file in schemes.discover().items()}


def all_reduced(n: int, axes: tuple[str, ...], grid: Any) -> int:
    """The words of an all-reduce of n numbers."""
    own = len(piece(n, span_of(axes, grid.sizes), index_of(axes, grid.sizes, grid.coords)))
    return 2 * (n - own)


def expected(scheme: Scheme, grid: Any) -> tuple[int, int]:
    """The words of a forward and a backward pass of a block, from the schemes' tables alone."""
    sizes, at, head = grid.sizes, grid.coords, HIDDEN // HEADS
    qkv, out = scheme.plan("expand", n=3), scheme.plan("contract", k=3)
    x, z, o, i = (B, S, HIDDEN), (B, S, HEADS, 3, head), (B, S, HEADS, 1, head), (B, S, INNER)
    products = [
        (qkv, x, (HIDDEN, *z[2:])),
        (out, o, (*o[2:], HIDDEN)),
        (scheme.plan("expand"), x, (HIDDEN, INNER)),
        (scheme.plan("contract"), i, (INNER, HIDDEN)),
    ]
    forward = backward = 0
    for plan, left, right in products:
        found = product_words(plan, left, right, sizes, at)
        forward += found["x"] + found["w"] + found["y"]
        backward += found["grad y"] + found["dx"] + found["dw"]
        bias = right[len(plan.k) :]
        rest = Layout(*plan.y.dims[len(plan.m) :])
        backward += words(rest.with_partial(lead(plan.y)), rest, bias, sizes, at)
    for axis in (a for a in scheme.ring if sizes[a] > 1):
        # keys and values of all others come round, in the backward pass again and with them the sums of their
        # gradients: all but those that begin here, of the rank before
        blocks = [len(piece(S, sizes[axis], i)) for i in range(sizes[axis])]
        batch, _, heads, *_ = grid.block_shape(qkv.y, z)
        token = 2 * batch * heads * head
        forward += token * (S - blocks[at[axis]])
        backward += token * (2 * S - blocks[at[axis]] - blocks[at[axis] - 1])
    residual = scheme.residual
    rows = math.prod(grid.block_shape(residual, x)[:2])
    row = residual.dims[-1]
    for _ in range(2):  # norms: mean, centred squares; both sums of their derivative; weight and bias
        forward += 2 * all_reduced(rows, row, grid)
        backward += all_reduced(2 * rows, row, grid)
        backward += 2 * words(Layout(row, partial=lead(residual)), Layout(row), (HIDDEN,), sizes, at)
    return forward, backward


def lead(layout: Layout) -> tuple[str, ...]:
    return tuple(a for dim in layout.dims[:2] for a in dim)


def make(scheme: Scheme, grid: Any, **options: Any) -> Any:
    block = nn.TransformerBlock(HIDDEN, HEADS, INNER, scheme, grid, causal=True, dtype="float64", **options)
    block.start_from(lambda name, declared: nn.init.Normal(0.3))
    return block.initialize(3)


def tensor(scheme: Scheme, grid: Any, seed: int = 0, sequence: int = S) -> pla.Tensor:
    x = np.random.default_rng(seed).normal(size=(B, sequence, HIDDEN))
    return pla.Tensor(placed(x, grid, scheme.residual), requires_grad=True)


def with_weights_cut(scheme: Scheme) -> Scheme:
    """The scheme within data parallelism, its weights cut over the data axis."""
    return scheme.with_data("data").with_weights_cut("data")


@pytest.mark.core
@pytest.mark.mpi(min_size=2)
def test_words_are_the_sum_of_the_plans(make_grid: Any, world: Any, full: bool) -> None:
    every = {name: [s] if "data" in s.axes else [s, with_weights_cut(s)] for name, s in SCHEMES.items()}
    wrong = []
    for turn, (name, choice) in enumerate(every.items()):
        for scheme in choice if full else [choice[(turn + world.size // 2) % len(choice)]]:
            shapes = sizes_for(scheme, world.size, 10**6)
            with make_grid(shapes[turn % len(shapes)]) as grid:
                found, want = counted(scheme, grid), expected(scheme, grid)
                if found != (*want, 2 * want[0] + want[1]):
                    wrong.append((name, grid.sizes, found, want))
    assert not wrong


def counted(scheme: Scheme, grid: Any) -> tuple[int, ...]:
    """The words of a forward and a backward pass, and those of both when recomputed."""
    block, x = make(scheme, grid), tensor(scheme, grid)
    ones = pla.ones(x.shape, grid, scheme.residual)
    with pla.ledger(grid) as forward:
        y = block(x)
    with pla.ledger(grid) as backward:
        y.backward(ones)
    nn.recompute(block)
    with pla.ledger(grid) as again:
        block(x).backward(ones)
    return forward.words.total(), backward.words.total(), again.words.total()


def run(scheme: Scheme, grid: Any, **options: Any) -> dict[str, pla.DistArray]:
    """Output and gradients of a block that attends to a context too."""
    block = make(scheme, grid, cross=True, norm="rms", activation="swiglu", **options)
    GradientReducer(block.parameters())
    x, context = tensor(scheme, grid), tensor(scheme, grid, 1, S + 2)
    with nn.training_step(3):
        y = block(block(x, context), context)
    (y * y).sum().backward()
    named = {"x": x, "context": context, **dict(block.named_parameters())}
    return {"y": y.data, **{name: t.grad for name, t in named.items() if t.grad is not None}}


@pytest.mark.parametrize("pre_norm", [True, False], ids=["pre-norm", "post-norm"])
def test_context_and_recomputation_on_every_scheme(pre_norm: bool, make_grid: Any, world: Any, full: bool) -> None:
    options = {"pre_norm": pre_norm, "dropout": 0.2, "attention_dropout": 0.2}
    with alone(world) as grid:
        want = {name: array.gather() for name, array in run(SCHEMES["serial"], grid, **options).items()}
    assert len(want) == 20
    wrong = []
    for turn, (name, scheme) in enumerate(SCHEMES.items()):
        if not full and (turn + world.size) % 2 != pre_norm:
            continue
        shapes = sizes_for(scheme, world.size, 10**6)
        for recompute in ("attention", "block") if full else [("attention", "block")[turn // 2 % 2]]:
            with make_grid(shapes[turn % len(shapes)]) as grid:
                found = run(scheme, grid, recompute=recompute, **options)
                wrong += [(name, recompute, each) for each in differences(found, want)]
    assert not wrong


@pytest.mark.serial
def test_what_recomputation_keeps_and_that_it_is_the_same_bit_for_bit() -> None:
    scheme, kept, found = SCHEMES["2d"], {}, {}
    with pla.Grid({"r": 1, "c": 1}) as grid:
        for recompute in (None, "attention", "block"):
            block = make(scheme, grid, dropout=0.2, attention_dropout=0.2, recompute=recompute)
            x = tensor(scheme, grid)
            y = block(x)
            kept[recompute] = sum(row.nbytes for row in saved(y))
            (y * y).sum().backward()
            found[recompute] = [y.block.tobytes(), *(t.grad.block.tobytes() for t in (x, *block.parameters()))]
    assert found[None] == found["attention"] == found["block"]
    assert kept["block"] == x.block.nbytes
    assert kept["attention"] < kept[None]


@pytest.mark.serial
def test_what_is_wrong_is_said() -> None:
    scheme = SCHEMES["2d"]
    with pla.Grid({"r": 1, "c": 1}) as grid:
        for options, says in [
            ({"norm": "batch"}, "'layer' or 'rms', not 'batch'"),
            ({"recompute": "all"}, "None, 'attention' or 'block', not 'all'"),
        ]:
            with pytest.raises(pla.ConfigError, match=says):
                make(scheme, grid, **options)
        x = tensor(scheme, grid)
        with pytest.raises(pla.ConfigError, match=r"block\(x, context\)"):
            make(scheme, grid, cross=True)(x)
        with pytest.raises(pla.ConfigError, match="cross=True"):
            make(scheme, grid)(x, x)
