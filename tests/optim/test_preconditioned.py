"""Shampoo and SOAP against their papers, written out plainly, wherever the parts of matrices lie."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, optim, schemes
from parlinalg.comm import SingleComm
from parlinalg.offload import plan
from parlinalg.optim.preconditioned import inverse_root, newton_inverse_root
from parlinalg.parallel.memory import estimate
from parlinalg.train import Checkpoints
from tests.agreement import once
from tests.optim.test_muon import KINDS, check, give, grids, losses, numbers, parameters, sharded
from tests.optim.test_optimizers import textbook_adamw

pytestmark = pytest.mark.one_in(8)

L = pla.Layout
STEPS = 5


def root_of(a, p, damping):
    values, vectors = np.linalg.eigh(a)
    return (vectors * (np.maximum(values, 0) + damping) ** (-1 / p)) @ vectors.T


def textbook_shampoo(p, grads, lr, momentum=0.9, beta2=1.0, damping=1e-4, every=20, most=8192, grafting=None):
    left, right, mean, square = np.zeros((len(p),) * 2), np.zeros((p.shape[1],) * 2), np.zeros_like(p), np.zeros_like(p)
    sides = (len(p) <= most) + (p.shape[1] <= most)
    for t, g in enumerate(grads):
        share = 1 if beta2 == 1 else 1 - beta2
        left, right = beta2 * left + share * (g @ g.T), beta2 * right + share * (g.T @ g)
        mean = momentum * mean + (1 - momentum) * g
        square = 0.999 * square + 0.001 * g * g
        if t % every == 0:
            fix = 1 if beta2 == 1 else 1 - beta2 ** (t + 1)
            a, b = (
                root_of(left / fix, 2 * max(1, sides), damping),
                root_of(right / fix, 2 * max(1, sides), damping),
            )
        d = a @ mean if len(p) <= most else mean
        d = d @ b if p.shape[1] <= most else d
        like = mean
        if grafting == "adam":
            like = mean / (1 - momentum ** (t + 1)) / (np.sqrt(square / (1 - 0.999 ** (t + 1))) + 1e-8)
        if grafting:
            d = d * (np.linalg.norm(like) / np.linalg.norm(d))
        p = p - lr * d
    return p


def textbook_blocks(p, grads, *args, size=None, **options):
    """Each block of at most `size` rows and columns as a matrix of its own; the longer ones come first."""
    if size is None:
        return textbook_shampoo(p, grads, *args, **options)
    rows, columns = (np.array_split(np.arange(n), max(1, -(-n // size))) for n in p.shape)
    found = np.empty_like(p)
    for r in rows:
        for c in columns:
            at = np.ix_(r, c)
            found[at] = textbook_shampoo(p[at], [g[at] for g in grads], *args, **options)
    return found


def textbook_soap(p, grads, lr, betas=(0.95, 0.95), eps=1e-8, every=10, most=10000, weight_decay=0.01):
    (b1, b2), sides = betas, [s for s in (0, 1) if p.shape[s] <= most]
    grams, bases = {s: np.zeros((p.shape[s],) * 2) for s in sides}, {s: np.eye(p.shape[s]) for s in (0, 1)}
    mean, square = np.zeros_like(p), np.zeros_like(p)

    def add(g):
        for s in sides:
            grams[s] = b2 * grams[s] + (1 - b2) * (g @ g.T if s == 0 else g.T @ g)

    for t, g in enumerate(grads):
        p = p - lr * weight_decay * p
        if t == 0:
            add(g)
            rank = np.linalg.matrix_rank(g)
            for s in sides:
                vectors = np.linalg.eigh(grams[s])[1][:, ::-1]
                null = vectors[:, rank:]  # of which any basis would do: that in which diag(1, 2, …) is diagonal
                numbers = np.arange(1.0, 1 + len(null))[:, None]
                bases[s] = np.hstack([vectors[:, :rank], null @ np.linalg.eigh(null.T @ (numbers * null))[1][:, ::-1]])
            continue
        mean = b1 * mean + (1 - b1) * g
        turned = bases[0].T @ g @ bases[1]
        square = b2 * square + (1 - b2) * turned**2
        rate = lr * np.sqrt(1 - b2**t) / (1 - b1**t)
        p = p - rate * bases[0] @ (bases[0].T @ mean @ bases[1] / (np.sqrt(square) + eps)) @ bases[1].T
        add(g)
        if t % every == 0:
            for s in sides:
                values = np.diag(bases[s].T @ grams[s] @ bases[s]).copy()
                null = values < 1e-13 * values.max()
                values[null] = 0
                order = np.argsort(-values, kind="stable")
                square = square[order] if s == 0 else square[:, order]
                product, rank, taken = grams[s] @ bases[s], np.linalg.matrix_rank(grams[s]), []
                for i in order:  # a product that depends on those before it gives no direction
                    basis = np.linalg.qr(product[:, taken])[0]
                    rest = product[:, i] - basis @ (basis.T @ product[:, i])
                    if len(taken) < rank and np.linalg.norm(rest) > 1e-10 * np.linalg.norm(grams[s], 2):
                        taken.append(i)
                others = [i for i in order if i not in taken]
                made, places = np.linalg.qr(np.hstack([product[:, taken], bases[s][:, others]]))[0], [*taken, *others]
                bases[s] = made[:, [places.index(i) for i in order]]
    return p


CASES = [
    (optim.Shampoo, textbook_shampoo, {"lr": 0.1}, {"precondition_frequency": 2}),
    (optim.Shampoo, textbook_shampoo, {"lr": 0.1, "momentum": 0.0, "beta2": 0.9}, {"max_precond_dim": 7}),
    (optim.Shampoo, textbook_shampoo, {"lr": 0.1, "grafting": "adam"}, {"precondition_frequency": 1}),
    (optim.Shampoo, textbook_shampoo, {"lr": 0.1, "grafting": "sgd", "damping": 0.1}, {"root": "newton"}),
    (optim.Shampoo, textbook_blocks, {"lr": 0.1, "grafting": "sgd"}, {"block_size": 4, "precondition_frequency": 2}),
    (optim.Shampoo, textbook_blocks, {"lr": 0.1}, {"block_size": 6, "max_precond_dim": 4}),
    (optim.SOAP, textbook_soap, {"lr": 0.01}, {"precondition_frequency": 2}),
    (optim.SOAP, textbook_soap, {"lr": 0.01, "betas": (0.8, 0.9), "weight_decay": 0.0}, {"max_precond_dim": 7}),
]
NAMES = {"precondition_frequency": "every", "max_precond_dim": "most", "block_size": "size"}


def wanted(textbook, options, more, steps):
    more = {NAMES[key]: value for key, value in more.items() if key in NAMES}
    found = []
    for i, (start, (shape, matrix, _)) in enumerate(zip(numbers(0), KINDS, strict=True)):
        grads = [g[i] for g in steps]
        if matrix is None:
            soap = textbook is textbook_soap
            betas, decay = (options.get("betas", (0.95, 0.95)), 0.01) if soap else ((0.9, 0.999), 0.0)
            decay = options.get("weight_decay", decay)
            lr = options["lr"] if soap else 3e-4
            found.append(textbook_adamw(start, grads, lr, weight_decay=decay, betas=betas))
        elif not start.size:
            found.append(start)
        else:
            batch, inputs = matrix
            flat = (-1, math.prod(shape[batch : batch + inputs]), math.prod(shape[batch + inputs :]))
            each = [
                textbook(p, list(g), **options, **more) for p, *g in zip(*(v.reshape(flat) for v in (start, *grads)))
            ]
            found.append(np.stack(each).reshape(shape))
    return found


@pytest.mark.core
@pytest.mark.parametrize(
    ("kind", "textbook", "options", "more", "zero"), [(*case, i % 2 > 0) for i, case in enumerate(CASES)]
)
def test_steps_are_those_of_the_paper(kind, textbook, options, more, zero, make_grid, world, full):
    steps = [numbers(1 + t) for t in range(STEPS)]
    want = wanted(textbook, options, more, steps)
    for sizes in grids(world.size, full)[-1:]:
        grid = make_grid(dict(zip("rcd", sizes, strict=True)))
        ps = parameters(grid)
        for p in ps if zero else ():
            sharded(p)
        optimizer = kind(ps, **options, **more)
        for grads in steps:
            give(ps, [2 * g for g in grads], zero)
            optimizer.step(0.5)
        check(ps, want, zero, 1e-11)


def gradients(rng, rows, columns):
    """Four gradients of each kind for which eigenvectors are not unique at first, or are not for long."""
    rank, size = max(1, min(rows, columns) // 2), (rows, columns)
    left, right = rng.normal(size=(rows, rank)), rng.normal(size=(rank, columns))
    turn = np.linalg.qr(rng.normal(size=(max(size),) * 2))[0][:rows, :columns]
    yield "rank one", [rng.normal(size=(rows, 1)) @ rng.normal(size=(1, columns)) for _ in range(4)]
    yield "low rank", [rng.normal(size=(rows, rank)) @ rng.normal(size=(rank, columns)) for _ in range(4)]
    yield "one range", [left @ rng.normal(size=(rank, columns)) for _ in range(4)]
    yield "the same", [1e4 * left @ right] * 4
    yield "zero rows", [rng.normal(size=size) * (np.arange(rows) % 3 > 0)[:, None] for _ in range(4)]
    yield "equal values", [turn, *(rng.normal(size=size) for _ in range(3))]
    yield "full rank", [rng.normal(size=size) for _ in range(4)]


@pytest.mark.core
@pytest.mark.parametrize("zero", [False, True], ids=["whole", "shared"])
@pytest.mark.parametrize("every", [1, 2])
def test_grids_whose_gradients_differ_by_rounding_agree(every, zero, make_grid, world, full):
    """SOAP's steps hang on no choice that rounding makes: of eigenvectors, of their order, of a rank."""
    rng = np.random.default_rng(every)
    kinds = [kind for shape in ((7, 11), (16, 5), (8, 8), (3, 9)) for kind in gradients(rng, *shape)]
    alone = pla.Grid({"r": 1, "c": 1, "d": 1}, world.sub((world.rank,), ()))
    for sizes in grids(world.size, full)[-1:]:
        grid, found = make_grid(dict(zip("rcd", sizes, strict=True))), []
        for place, noise in ((alone, 0), (grid, 2.2e-16)):
            ps = [
                pla.Parameter(pla.zeros(g[0].shape, grid=place, layout=L("r", "c")), f"p{i}")
                for i, (_, g) in enumerate(kinds)
            ]
            for p in ps:
                p.matrix = (0, 1)
                if zero and place is grid:
                    sharded(p)
            optimizer = optim.SOAP(ps, lr=0.1, precondition_frequency=every)
            for t in range(4):
                off = [1 + noise * rng.integers(-1, 2, size=g[t].shape) for _, g in kinds]
                give(ps, [g[t] * each for (_, g), each in zip(kinds, off, strict=True)], zero and place is grid)
                optimizer.step()
            found.append(ps)
        check(found[1], [p.gather() for p in found[0]], zero, 1e-10)
    alone.close()


def test_roots_are_inverse_roots():
    rng = np.random.default_rng(0)
    for n, p in ((1, 2), (5, 4), (30, 4), (30, 2)):
        g = rng.normal(size=(n, 2 * n))
        a = g @ g.T
        for root in (inverse_root(a, p, 0.5), newton_inverse_root(a, p, 0.5)):
            power = np.linalg.matrix_power(root, p) @ (a + 0.5 * np.eye(n))
            np.testing.assert_allclose(power, np.eye(n), atol=1e-9)
    np.testing.assert_allclose(newton_inverse_root(np.zeros((3, 3)), 4, 1e-4), 10 * np.eye(3), rtol=1e-12)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("when", [0, 1])
@pytest.mark.parametrize("kind", [optim.Shampoo, partial(optim.Shampoo, root="newton"), optim.SOAP])
def test_gradients_that_are_no_numbers_make_nans(kind, when, bad, make_grid, world):
    """Of their parameter alone, on all ranks: LAPACK refuses them, or does not end, on the one that is its home."""
    grid = make_grid({"r": world.size})
    shapes = [(7, 5), (6, 6), (4,)]
    ps = [pla.Parameter(pla.ones(s, grid=grid, layout=L("r", *[None] * (len(s) - 1))), f"p{s}") for s in shapes]
    for p in ps[:2]:
        p.matrix = (0, 1)
    optimizer = kind(ps, precondition_frequency=1)
    for step in range(3):
        grads = [np.random.default_rng(step).normal(size=s) for s in shapes]
        if step == when:
            grads[0][2, 3] = bad
        give(ps, grads, False)
        optimizer.step()
    assert np.isnan(ps[0].gather()).all()
    assert all(np.isfinite(p.gather()).all() for p in ps[1:])


@pytest.mark.parametrize("kind", [optim.Shampoo, partial(optim.Shampoo, block_size=4), optim.SOAP])
def test_states_move_from_grid_to_grid(kind, make_grid, world, folder):
    """By the state of the optimizer, and by a checkpoint; homes differ, since grids do."""
    steps = [numbers(1 + t) for t in range(5)]
    one, two = (make_grid(dict(zip("rcd", s, strict=True))) for s in ((1, 1, world.size), (world.size, 1, 1)))
    third = pla.Grid({"r": 1, "c": 1, "d": 1}, world.sub((world.rank,), ()))
    first, second, alone = parameters(one), parameters(two), parameters(third)
    a, b, c = (kind(ps, precondition_frequency=2) for ps in (first, second, alone))
    for grads in steps[:3]:
        give(first, grads, False)
        a.step()
    saved = Checkpoints(folder, world, {p.name: p for p in first}, a, background=False)
    saved.save(3)
    saved.settle()
    Checkpoints(folder, world, {p.name: p for p in second}, b).load()
    b.steps = 3
    c.load_state_dict(a.state_dict())
    for p, q in zip(first, alone, strict=True):
        q.data = pla.distribute(p.gather(), third, q.layout)
    for grads in steps[3:]:
        for optimizer, ps in ((a, first), (b, second), (c, alone)):
            give(ps, grads, False)
            optimizer.step()
    for p, q, r in zip(first, second, alone, strict=True):
        np.testing.assert_allclose(q.gather(), p.gather(), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(r.gather(), p.gather(), rtol=1e-12, atol=1e-12)
    third.close()


def test_memory_homes_and_what_is_refused(make_grid, world):
    grid = make_grid({"data": world.size})
    model = nn.MLP([6, 8, 8, 4], schemes.discover()["data"].SCHEME, grid, seed=1, dtype="float64")
    optimizer = optim.SOAP(model.parameters(), max_precond_dim=7)
    found = estimate(model, optimizer)
    own, other = 1 + 2 * 48 + 2 * 36, 1 + 2 * 64  # mean and square; gram and basis of the side of 6
    homes = own + other if world.size == 1 else max(own, other)
    assert found.states == 8 * (2 * (8 + 8 + 8 * 4 + 4) + homes)
    assert sorted(optimizer.homes().values()) == ([0, 0] if world.size == 1 else [0, 1])
    if grid.backend.host_memory:
        assert plan(model, optimizer, memory=found.total, path="nowhere").places == {}
        with pytest.raises(pla.ConfigError, match="is too little"):
            plan(model, optimizer, memory=found.step, path="nowhere")
    for kind, options, says in [
        (optim.SOAP, {"precondition_frequency": 0}, "frequency is a whole number of at least 1, not 0"),
        (optim.Shampoo, {"max_precond_dim": 0}, "Shampoo's max_precond_dim is a whole number of at least 1, not 0"),
        (optim.SOAP, {"precondition_frequency": 2.5}, "is a whole number of at least 1, not 2.5"),
        (optim.Shampoo, {"block_size": "8"}, "is a whole number of at least 1, or None, not '8'"),
        (optim.Shampoo, {"block_size": 0}, "Shampoo's block_size is a whole number of at least 1, or None, not 0"),
        (optim.Shampoo, {"damping": 0.0}, "damping is above 0, not 0.0"),
        (optim.Shampoo, {"damping": math.inf}, "damping is above 0, not inf"),
        (optim.Shampoo, {"beta2": 1.5}, "beta2 is above 0 and at most 1, not 1.5"),
        (optim.Shampoo, {"grafting": "rms"}, "grafting is None, 'sgd', 'adam', not 'rms'"),
        (optim.Shampoo, {"root": "svd"}, "root is 'eigh', 'newton', not 'svd'"),
    ]:
        with pytest.raises(pla.ConfigError, match=says):
            kind(model.parameters(), **options)


@pytest.mark.parametrize("kind", [optim.Shampoo, optim.SOAP])
def test_values_do_not_stay_where_they_were(kind):
    """They move to flat buffers in the first step; states at home kept the memory of those before."""
    with pla.imagine(ranks=2, what_if=pla.WhatIf()) as world:
        grid = pla.Grid({"data": 2})
        model = nn.MLP([6, 8, 8, 4], schemes.discover()["data"].SCHEME, grid, seed=1, dtype="float64")
        optimizer, before = kind(model.parameters()), world.memory["weights"]
        for p in model.parameters():
            p.grad = pla.zeros(p.shape, grid, p.layout, p.dtype)
        optimizer.step()
        assert world.memory["weights"] == before


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", ["shampoo", "soap"])
def test_trainings_make_the_steps_of_one_rank(name, world, folder, backend):
    settings = {
        "dtype": "float64", "batch_size": 96, "steps": 4, "data": "digits", "clip_grad_norm": 1.0,
        "model": {"name": "mlp", "hidden": (5, 6, 4)},
        "optimizer": {"name": name, "lr": 0.01, "precondition_frequency": 2, "max_precond_dim": 10},
    }  # fmt: skip
    want = once(lambda: losses(SingleComm(), settings, "numpy", folder / "alone"))
    parallel = {"pipeline": 2, "data": world.size // 2} if name == "soap" else {"data": world.size}
    more = {"schedule": {"name": "1f1b", "microbatches": 2}} if name == "soap" else {}
    settings = {**settings, "parallel": parallel, "zero": min(2, world.size // 2), **more}
    found = losses(world, settings, backend, folder)
    np.testing.assert_allclose(found, want, rtol=1e-10)
