"""Muon against its paper, written out plainly, however matrices are cut and their updates shared."""

from __future__ import annotations

import math
import random
import re
import tracemalloc
from contextlib import nullcontext

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, optim, schemes
from parlinalg.autograd import ops
from parlinalg.comm import SingleComm
from parlinalg.grid import factorizations
from parlinalg.layout import piece
from parlinalg.offload import DiskStates, HostStates
from parlinalg.optim.matrices import balanced
from parlinalg.optim.newton_schulz import executions, flops
from parlinalg.parallel.memory import estimate
from parlinalg.train import launch
from tests.agreement import once
from tests.optim.test_optimizers import shared_storage, textbook_adamw
from tests.train.trainings import Training

pytestmark = pytest.mark.one_in(8)

L = pla.Layout
EXECUTIONS = list(executions())
#: Shapes, how each is a matrix, and layouts over the axes r and c.
KINDS = [
    ((7, 11), (0, 1), L("r", "c")),
    ((13, 4), (0, 1), L(None, ("c", "r"))),
    ((6, 5), (0, 1), L("c", None)),
    ((9, 3, 2, 2), (0, 1), L("r", "c", None, None)),
    ((5, 2, 7), (0, 2), L("c", None, "r")),
    ((3, 4, 5), (1, 1), L("r", None, "c")),
    ((1, 6), (0, 1), L("r", "c")),
    ((0, 3), (0, 1), L("r", None)),
    ((8, 8), (0, 1), L(None, None)),
    ((5,), None, L("r")),
]


def orthogonal(u, steps=5):
    """The Newton–Schulz iteration of the paper's appendix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = u / max(np.linalg.norm(u), 1e-7)
    if u.shape[0] > u.shape[1]:
        x = x.T
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if u.shape[0] > u.shape[1] else x


def textbook_muon(p, grads, matrix, lr=0.02, momentum=0.95, nesterov=True, weight_decay=0.0, adjust="original"):
    batch, inputs = matrix
    rows = math.prod(p.shape[batch : batch + inputs])
    shape = (-1, rows, max(1, math.prod(p.shape[batch + inputs :])))
    m = np.zeros_like(p)
    for g in grads:
        m = momentum * m + (1 - momentum) * g
        u = momentum * m + (1 - momentum) * g if nesterov else m
        p = p - lr * weight_decay * p
        if p.size:
            o = np.stack([orthogonal(each) for each in u.reshape(shape)])
            n_in, n_out = shape[1:]
            scale = max(1, n_out / n_in) ** 0.5 if adjust == "original" else 0.2 * max(n_in, n_out) ** 0.5
            p = p - lr * scale * o.reshape(p.shape)
    return p


def numbers(seed):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape, _, _ in KINDS]


def parameters(grid):
    made = []
    for i, (v, (_, matrix, layout)) in enumerate(zip(numbers(0), KINDS, strict=True)):
        made.append(pla.Parameter(pla.distribute(v, grid, layout), f"p{i}"))
        made[-1].matrix = matrix
    return made


def sharded(p):
    """Share a parameter's update along the axis d, in parts that fit no row."""
    p.storage = shared_storage(p, "d")


def give(ps, grads, zero):
    for p, g in zip(ps, grads, strict=True):
        grad = pla.distribute(g, p.grid, p.layout)
        if zero:
            mine = p.storage.partition(p.data)
            p.storage.mine = grad.block.reshape(-1)[mine.start : mine.stop].copy()
        else:
            p.grad = grad


def check(ps, wanted, zero, close=1e-12):
    for p, want in zip(ps, wanted, strict=True):
        whole = pla.distribute(want, p.grid, p.layout).block.reshape(-1)
        mine = p.storage.partition(p.data)
        part = slice(mine.start, mine.stop) if zero else slice(None)
        np.testing.assert_allclose(
            p.grid.backend.to_host(p.block).reshape(-1)[part], p.grid.backend.to_host(whole)[part], close, close,
            err_msg=p.name,
        )  # fmt: skip


def grids(ranks, full=False):
    """Sizes of r, c and d: all, or two drawn."""
    found = factorizations(ranks, 3)
    return found if full or len(found) < 4 else random.Random(ranks).sample(found, 2)


@pytest.mark.core
@pytest.mark.parametrize("zero", [False, True], ids=["whole", "shared"])
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_steps_are_those_of_the_paper(execution, zero, make_grid, world, full):
    steps = [numbers(1 + t) for t in range(3)]
    want = [
        textbook_adamw(start, [g[i] for g in steps], 1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-10)
        if matrix is None
        else textbook_muon(start, [g[i] for g in steps], matrix, weight_decay=0.1)
        for i, (start, (_, matrix, _)) in enumerate(zip(numbers(0), KINDS, strict=True))
    ]
    for sizes in grids(world.size, full):
        grid = make_grid(dict(zip("rcd", sizes, strict=True)))
        ps = parameters(grid)
        if zero:
            for p in ps:
                sharded(p)
        optimizer = optim.Muon(ps, execution=execution, weight_decay=0.1, adamw_lr=1e-3)
        for grads in steps:
            give(ps, [2 * g for g in grads], zero)
            optimizer.step(0.5)
        check(ps, want, zero)
        grid.close()


# ------------------------------------------------------------------ words
def held(p, zero):
    """For every rank, which elements of a parameter it updates."""
    found, index = [], np.arange(p.size).reshape(p.shape)
    for rank in range(p.grid.size):
        at = p.grid.coords_of(rank)
        block = p.layout.block(p.shape, p.grid.sizes, at)
        mine = index[tuple(slice(r.start, r.stop) for r in block)].reshape(-1)
        part = piece(len(mine), p.grid.sizes["d"], at["d"]) if zero else range(len(mine))
        found.append(set(mine[part.start : part.stop].tolist()))
    return found


def pieces_of(p):
    """The elements of each matrix of a parameter."""
    batch, _ = p.matrix
    count = math.prod(p.shape[:batch])
    return [set(each.tolist()) for each in np.arange(p.size).reshape(count, -1)] if p.size else []


@pytest.mark.parametrize("zero", [False, True], ids=["whole", "shared"])
@pytest.mark.parametrize("execution", ["home", "gram"])
def test_words_are_those_of_the_formula(execution, zero, make_grid, world):
    """In: what of its matrices, or slices, a rank lacks.  Out: what it updates and did not compute.  Between: sums."""
    sizes = grids(world.size)[-1]
    grid = make_grid(dict(zip("rcd", sizes, strict=True)))
    ps = [p for p in parameters(grid) if p.matrix is not None]
    for p in ps:
        p.block[...] = 0
        if zero:
            sharded(p)
    optimizer = optim.Muon(ps, execution=execution)
    give(ps, [n for n, (_, matrix, _) in zip(numbers(1), KINDS, strict=True) if matrix is not None], zero)
    optimizer.step()
    with pla.ledger(grid) as book:
        optimizer.step()
    (made,) = optimizer.executions.values()
    me, every = world.rank, [(p, m) for p in ps for m in pieces_of(p)]
    rest = {id(p): held(p, zero) for p in ps}
    sides = [(p.shape, p.matrix) for p, _ in every]
    rows = [math.prod(shape[b : b + i]) for shape, (b, i) in sides]
    columns = [math.prod(shape[b + i :]) for shape, (b, i) in sides]
    shorter = [min(pair) for pair in zip(rows, columns, strict=True)]
    if execution == "home":
        assert len(set(made.homes)) == min(world.size, len(every))
        work = [m if home == me else set() for (_, m), home in zip(every, made.homes, strict=True)]
        sums = 0
    else:
        work = []
        for (p, m), a, b in zip(every, rows, columns, strict=True):
            cut = p.layout.dims[p.matrix[0] :]
            long = cut[: p.matrix[1]] if a >= b else cut[p.matrix[1] :]
            first = [axis for axes in long for axis in axes]
            span = range(max(a, b))
            for axis in [*first, *(x for x in "rcd" if x not in first)]:
                part = piece(len(span), grid.sizes[axis], grid.coords[axis])
                span = span[part.start : part.stop]
            whole = np.array(sorted(m)).reshape(a, b)
            mine = whole[span.start : span.stop] if a >= b else whole[:, span.start : span.stop]
            work.append(set(mine.reshape(-1).tolist()))
        grams, count = sum(k * k for k in shorter), len(every)
        sums = sum(2 * (n - len(piece(n, world.size, me))) for n in (count, *[grams] * 5))
    lacks = sum(len(w - rest[id(p)][me]) for (p, _), w in zip(every, work, strict=True))
    returned = sum(len((m & rest[id(p)][me]) - w) for (p, m), w in zip(every, work, strict=True))
    several = world.size > 1
    assert book.words.total() == several * (lacks + returned + sums)
    assert book.calls.total() == several * (2 if execution == "home" else 8)
    assert made.cost().words >= several * (lacks + returned), "the cost is of the rank that receives the most"


def test_homes_are_balanced():
    draw = random.Random(0)
    for _ in range(20):
        ranks, costs = draw.randint(1, 7), [draw.randint(1, 100) for _ in range(draw.randint(0, 30))]
        loads = [0] * ranks
        for home, cost in zip(balanced(costs, ranks), costs, strict=True):
            loads[home] += cost
        best = max([*costs, -(-sum(costs) // ranks)], default=0)
        assert max(loads) <= 4 / 3 * best + max(costs, default=0) / 3
    assert balanced([3, 3, 1], 3, lambda item, rank: int(rank == 2 - item)) == [2, 1, 0]


def test_the_cheapest_execution_is_chosen(make_grid, world, tune):
    """Many small matrices go home; one is sliced, or multiplied where it lies, as words and calls cost."""
    grid = make_grid({"r": 1, "c": world.size})

    def chosen(shapes, layout):
        ps = [pla.Parameter(pla.distribute(np.ones(s), grid, layout), f"p{i}") for i, s in enumerate(shapes)]
        optimizer = optim.Muon(ps)
        for p in ps:
            p.grad = pla.distribute(np.ones(p.shape), grid, layout)
        optimizer.step()
        (made,) = optimizer.executions.values()
        costs = {name: kind(made.team).cost() for name, kind in executions().items()}
        assert all(costs[made.NAME].total <= cost.total for cost in costs.values())
        assert optim.Muon(ps, execution="gram").execution == "gram"
        return made.NAME, costs

    assert chosen([(6, 8)] * 4, L(None, "c"))[0] == "home"
    tune(must=world.size > 1, CALL_FLOPS=0, WORD_FLOPS=0)
    name, costs = chosen([(4, 400)], L(None, "c"))
    assert name == ("home" if world.size == 1 else "grid"), costs
    assert costs["home"].flops == 5 * flops(4, 400)
    tune(must=world.size > 1, CALL_FLOPS=1000, WORD_FLOPS=0)
    assert chosen([(4, 400)], L(None, "c"))[0] == ("home" if world.size == 1 else "gram")


# ------------------------------------------------------------------ states
@pytest.mark.parametrize("execution", EXECUTIONS)
def test_states_move_from_grid_to_grid(execution, make_grid, world):
    one, two = (make_grid(dict(zip("rcd", s, strict=True))) for s in ((1, 1, world.size), (world.size, 1, 1)))
    first, second = parameters(one), parameters(two)
    a = optim.Muon(first, execution=execution)
    for p in first:
        sharded(p)
    give(first, numbers(1), True)
    a.step()
    state = a.state_dict()
    assert sorted(state["states"]["p0"]) == ["momentum"]
    assert sorted(state["states"]["p9"]) == ["mean", "square"]
    b = optim.Muon(second)
    b.load_state_dict(state)
    for p, q in zip(first, second, strict=True):
        mine = p.storage.partition(p.data)
        part = one.backend.empty((p.block.size,), p.dtype)
        one.comm(("d",)).all_gather(p.block.reshape(-1)[mine.start : mine.stop].copy(), part, list(mine.lengths))
        q.data = pla.DistArray(part.reshape(p.shape), p.shape, L.replicated(p.ndim), one).to_grid(two, q.layout)
    give(second, numbers(2), False)
    give(first, numbers(2), True)
    a.step()
    b.step()
    want = [textbook(i, [numbers(1)[i], numbers(2)[i]]) for i in range(len(KINDS))]
    check(first, want, True)
    check(second, want, False)


def textbook(i, grads):
    start, matrix = numbers(0)[i], KINDS[i][1]
    if matrix is None:
        return textbook_adamw(start, grads, 3e-4, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-10)
    return textbook_muon(start, grads, matrix)


def test_states_that_come_in_tiles_give_the_same_steps(make_grid, world, folder, backend):
    grid = make_grid({"r": world.size, "c": 1, "d": 1})
    ps, big = parameters(grid), np.random.default_rng(4).normal(size=(60, 90))
    ps.append(pla.Parameter(pla.distribute(big, grid, L(None, "r")), "big"))
    optimizer = optim.Muon(ps)
    steps = [[*numbers(1 + t), np.random.default_rng(50 + t).normal(size=big.shape)] for t in range(3)]
    with DiskStates(folder, tile=4096) if backend == "numpy" else nullcontext(HostStates(tile=4096)) as place:
        optimizer.place(place)
        for grads in steps:
            give(ps, grads, False)
            optimizer.step()
        want = [textbook(i, [g[i] for g in steps]) for i in range(len(KINDS))]
        check(ps, [*want, textbook_muon(big, [g[-1] for g in steps], (0, 1))], False)


def test_memory_counts_the_states_of_each_group(make_grid, world):
    grid = make_grid({"data": world.size})
    model = nn.MLP([6, 8, 4], schemes.discover()["data"].SCHEME, grid, seed=1, dtype="float64")
    optimizer = optim.Muon(model.parameters())
    found = estimate(model, optimizer)
    assert found.states == 8 * (6 * 8 + 2 * (8 + 8 * 4 + 4))
    optimizer.arrange()
    assert optimizer.flat.states.nbytes == found.states
    assert found.step == optimizer.step_bytes
    assert found.total == found.values + found.gradients + found.states + max(found.transient, found.step)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_step_takes_the_memory_that_is_foreseen(execution, make_grid, world, backend):
    grid = make_grid({"r": world.size})
    for layout in (L(None, "r"), L(None, None)):
        ps = [pla.Parameter(pla.distribute(np.ones((160, 192)), grid, layout), f"p{i}") for i in range(2 * world.size)]
        optimizer = optim.Muon(ps, execution=execution)
        for p in ps:
            p.grad = pla.distribute(np.random.default_rng(0).normal(size=p.shape), grid, layout)
        optimizer.step()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        optimizer.step()
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        assert peak < 1.1 * optimizer.step_bytes + (1 << 19) or backend != "numpy", layout


# ------------------------------------------------------------------ groups
def test_groups_and_what_is_refused(make_grid, world):
    grid = make_grid({"axis": world.size})
    scheme = schemes.discover()["1d"].SCHEME
    sizes = {"vocab_size": 11, "max_position_embeddings": 8, "hidden_size": 12, "num_attention_heads": 4}
    model = nn.GPT(
        **sizes, num_hidden_layers=1, tie_word_embeddings=False, num_local_experts=2, expert_axis=None,
        scheme=scheme, grid=make_grid({"t": world.size}), seed=1,
    )  # fmt: skip
    matrices, others = optim.Muon(model.parameters()).param_groups
    names = [p.name.removeprefix("blocks.0.") for p in matrices["params"]]
    assert names == ["attention.qkv.weight", "attention.out.weight", "mlp.expand", "mlp.contract"]
    assert {p.matrix for p in matrices["params"]} == {(0, 1), (0, 3), (1, 1)}
    assert matrices["lr"] == 0.02
    assert others["lr"] == 3e-4
    assert {"embedding.weight", "head.weight", "blocks.0.mlp.router"} <= {p.name for p in others["params"]}
    plain = nn.GPT(**sizes, num_hidden_layers=1, scheme=scheme, grid=model.grid, seed=1)
    hidden = [p.name.removeprefix("blocks.0.") for p in optim.Muon(plain.parameters()).param_groups[0]["params"]]
    assert hidden == ["attention.qkv.weight", "attention.out.weight", "mlp.0.weight", "mlp.2.weight"]
    more = optim.Muon(model.parameters(), adamw=["qkv", "*.contract"], adamw_lr=None)
    assert [p.name for p in more.param_groups[0]["params"]] == ["blocks.0.attention.out.weight", "blocks.0.mlp.expand"]
    assert more.param_groups[1]["lr"] == 0.02
    decayed = optim.Muon(optim.decay_groups(model, 0.1))
    assert [(g["weight_decay"], g["matrices"]) for g in decayed.param_groups] == [
        (0.1, True), (0.1, False), (0.0, True), (0.0, False),
    ]  # fmt: skip
    cube = pla.Parameter(pla.distribute(np.ones((2, 3, 4)), grid, L(None, None, None)), "cube")
    cube.grad = cube.data
    with pytest.raises(pla.ConfigError, match=r"'cube' of shape \(2, 3, 4\) is in parameter group 0.*matrices=False"):
        optim.Muon([{"params": [cube], "matrices": True}]).step()
    optim.Muon([cube]).step()
    for wrong in ((1, 2), (0, 3), (0, 0), (-1, 1), (0.0, 1.0), "01", (1,)):
        cube.matrix = wrong
        for kind in (optim.Muon, optim.Shampoo, optim.SOAP):
            with pytest.raises(pla.ConfigError, match=r"'cube' of shape \(2, 3, 4\) has matrix = .*for outputs"):
                kind([cube]).step()
    for options, says in [
        ({"execution": "house"}, "execution is None, 'home', 'gram', 'grid', not 'house'"),
        ({"execution": ["home"]}, "execution is None, .*, not \\['home'\\]"),
        ({"eps": math.inf}, "eps is above 0, not inf"),
        ({"adjust_lr_fn": "sum"}, "adjust_lr_fn is 'original' or 'match_rms_adamw', not 'sum'"),
        ({"ns_steps": 0}, "ns_steps is a whole number of at least 1, not 0"),
        ({"ns_steps": 2.5}, "ns_steps is a whole number of at least 1, not 2.5"),
        ({"ns_coefficients": (1, 2, "x")}, "ns_coefficients are three numbers"),
        ({"lr": "x"}, "lr is at least 0, not 'x'"),
        ({"lr": math.inf}, "lr is at least 0, not inf"),
        ({"ns_coefficients": (1, 2)}, "three numbers, such as .* not \\(1, 2\\)"),
        ({"momentum": 1.0}, "momentum is at least 0 and below 1"),
        ({"adamw": "head"}, r"list of parts of names, such as \['head'\]"),
    ]:
        with pytest.raises(pla.ConfigError, match=says):
            optim.Muon([cube], **options)
    with pytest.raises(pla.ConfigError, match=r"unknown option 'momentun' .did you mean 'momentum'"):
        optim.Muon([{"params": [cube], "momentun": 0.9}])


# ------------------------------------------------------------------ trainings
CONFIG = {
    "dtype": "float64", "batch_size": 8, "steps": 4, "data": "digits", "clip_grad_norm": 1.0,
    "model": {"name": "mlp", "hidden": (13, 9, 11)}, "optimizer": {"name": "muon", "lr": 0.02, "no_decay": True},
}  # fmt: skip


def losses(comm, settings, backend, out):
    with launch(settings, comm, backend) as mesh:
        return [step.loss for step in Training(mesh, out).steps()]


@pytest.mark.ranks(2, 4)
def test_a_pipeline_makes_the_steps_of_one_rank(world, folder, backend):
    want = once(lambda: losses(SingleComm(), CONFIG, "numpy", folder / "alone"))
    parallel = {"pipeline": 2, "data": world.size // 2}
    more = {"schedule": {"name": "1f1b", "microbatches": 2}, "zero": 1 if world.size > 2 else 0}
    found = losses(world, {**CONFIG, "parallel": parallel, **more}, backend, folder)
    np.testing.assert_allclose(found, want, rtol=1e-12)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("kind", ["muon", "shampoo", "soap"])
def test_patterns_that_match_no_parameter(world, folder, backend, kind):
    """A pattern is in some name of the whole model, on whichever stage; the others are said on all ranks."""
    stages = min(world.size, 2)
    more = {"parallel": {"pipeline": stages, "data": world.size // stages}, "model": {"name": "mlp", "hidden": (13,)}}
    if stages > 1:
        more["parallel"]["pipeline"] = {"size": 2, "partition": (1, 2)}  # the second begins with an activation

    def groups(*adamw, no_decay=True):
        config = {**CONFIG, **more, "optimizer": {"name": kind, "adamw": adamw, "no_decay": no_decay}}
        with launch(config, world, backend) as mesh:
            groups = Training(mesh, folder).optimizer.param_groups
            return mesh.rank("pipeline"), [p.name for group in groups for p in group["params"] if group["matrices"]]

    assert groups("0.w")[1] == []
    stage, matrices = groups("0.bias")
    assert matrices == ([] if stage else ["0.weight"])
    for wrong in ("nosuch", "*.w"):
        with pytest.raises(pla.ConfigError, match=rf"{re.escape(repr(wrong))}.* are '0.weight', .*'2.bias'"):
            groups("0.w", wrong)
        with pytest.raises(
            pla.ConfigError, match=rf"no_decay has {re.escape(repr(wrong))}.*; the names are '0.weight'"
        ):
            groups("0.w", no_decay=["2.w", wrong])
    assert groups("0.w", no_decay=["2.w", "*.bias"])[1] == []


@pytest.mark.serial
def test_patterns_of_a_list_of_parameters():
    with pla.Grid({"one": 1}) as grid:
        model = nn.MLP((3, 4, 5, 6, 7), "serial", grid, seed=1)
        for made in (optim.matrix_groups, optim.Muon):
            given = list(model.parameters()) if made is optim.Muon else model
            says = "adamw has 'embedding', which is in no parameter's name; the names are .*'4.bias' and 2 more$"
            with pytest.raises(pla.ConfigError, match=says):
                made(given, adamw=["0.", "embedding"])
            for wrong in ("0.", [3], 3, None, ["0.", ""]):
                with pytest.raises(pla.ConfigError, match="adamw is a list of parts of names, such as"):
                    made(given, adamw=wrong)
        with pytest.raises(pla.ConfigError, match=r"adamw is a list of parts of names, .* not \[3\]"):
            optim.Muon([{"params": list(model.parameters()), "matrices": False}], adamw=[3])
        some = optim.Muon([{"params": [model[0].weight]}, {"params": iter([model[2].weight])}], adamw=["2."])
        assert [len(g["params"]) for g in some.param_groups] == [1, 0, 0, 1]
        some.add_param_group({"params": [model[4].weight]})


TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it "
    "was the epoch of belief, it was the epoch of incredulity, it was the season of Light, it was the season of "
)


@pytest.mark.serial
@pytest.mark.one_in(6)
def test_fewer_steps_than_adamw():
    """The steps until a small GPT knows a text to 1 nat a letter: 17 with Muon, 26 with AdamW at its best rate."""
    letters = np.frombuffer(TEXT.encode(), np.uint8)
    ids = np.searchsorted(np.unique(letters), letters)
    windows = np.stack([ids[i : i + 17] for i in range(0, len(ids) - 16, 9)])

    def steps(kind, lr):
        with pla.Grid({"one": 1}) as grid:
            model = nn.GPT(
                vocab_size=ids.max() + 1, max_position_embeddings=16, hidden_size=24, num_attention_heads=2,
                num_hidden_layers=2, scheme=schemes.discover()["serial"].SCHEME, grid=grid, seed=3,
            )  # fmt: skip
            x = pla.distribute(windows[:, :-1], grid, model.ids_layout)
            y = pla.distribute(windows[:, 1:], grid, model.targets_layout)
            optimizer = kind(model.parameters(), lr)
            for step in range(50):
                loss = ops.cross_entropy(model(x), y)
                if loss.item() < 1:
                    break
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return step

    adamw = min(steps(optim.AdamW, lr) for lr in (0.01, 0.02))
    assert steps(lambda p, lr: optim.Muon(p, lr, adamw_lr=0.02), 0.06) < 0.8 * adamw
