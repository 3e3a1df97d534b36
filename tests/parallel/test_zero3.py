"""ZeRO's stage 3: weights gathered a block ahead and dropped, in both passes, change no loss and move 3 Ψ words."""

from __future__ import annotations

import random
import weakref

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from parlinalg.autograd import no_grad, no_sync
from parlinalg.comm import Handle
from parlinalg.errors import ConfigError
from parlinalg.optim import AdamW
from parlinalg.parallel import GradientReducer, WeightGatherer, ZeRO
from tests.agreement import once
from tests.cases import held
from tests.conftest import BACKEND
from tests.models import BATCH, HIDDEN, KINDS, VOCABULARY, alone, every_scheme, loss_of, make
from tests.training import sizes_for

CUT = {n: s for n, s in every_scheme().items() if n == "zero3" or "weights cut" in n}
ZERO3, DATA = (schemes.discover()[name].SCHEME for name in ("zero3", "data"))
SLACK = 8  # elements, of buckets that two ranks do not share evenly
EVERY = pytest.mark.ranks(1, 2, 3, 4, 6, 8, 12)


def trained(kind, scheme, grid, steps=10, *, zero=True, microbatches=1, accumulate="reduce-scatter", **options):
    """The losses of training with AdamW, the model and what gathers its weights."""
    model = make(kind, scheme, grid, **{"num_hidden_layers": 2, **options})
    gatherer = WeightGatherer(model, axes="data", accumulate=accumulate) if zero else None
    GradientReducer(model.parameters(), [ZeRO(3, accumulate=accumulate)] if zero else [], 2000, 4000)
    optimizer = AdamW(model.parameters(), 0.01)
    return [step(model, optimizer, number, microbatches) for number in range(steps)], model, gatherer, optimizer


def step(model, optimizer, number, microbatches=1):
    optimizer.zero_grad()
    total = 0.0
    for i in range(microbatches):
        rows = slice(BATCH * i // microbatches, BATCH * (i + 1) // microbatches)
        with nn.training_step(number, rows.start):
            loss = loss_of(model, number % 3, rows) * ((rows.stop - rows.start) / BATCH)
        if i < microbatches - 1:
            with no_sync():
                loss.backward()
        else:
            loss.backward()
        total += loss.item()
    optimizer.step()
    return total


def serial(world, kind, **options):
    def losses():
        with alone(world) as grid:
            return trained(kind, schemes.discover()["serial"].SCHEME, grid, zero=False, **options)[0]

    return once(losses)


def cases(ranks, full):
    """(model, scheme, sizes): all, or a few of the schemes on one grid each, with one model, drawn."""
    draw = random.Random(ranks)
    drawn = draw.choice(KINDS)
    for i, (name, scheme) in enumerate(CUT.items()):
        shapes = [s for s in sizes_for(scheme, ranks, 10**6) if full or s["data"] > 1 or ranks == 1]
        if full:
            yield from ((kind, name, sizes) for kind in KINDS for sizes in shapes)
        elif (i + ranks) % 4 == 0:
            yield drawn, name, draw.choice(shapes)


@pytest.mark.core
@EVERY
def test_losses_are_those_of_one_rank(make_grid, world, full, tune):
    """With dropout; every other case recomputes its blocks, and every third one packs no weights."""
    few = not full and (world.size > 8 or BACKEND != "numpy")
    want, steps = {}, 10 if full else 4
    for i, (kind, name, sizes) in enumerate(cases(world.size, full)):
        if few and i:
            break
        grid = make_grid(sizes)
        if kind not in want:
            want[kind] = serial(world, kind, p=0.1, steps=steps)
        again = {"recompute": "block"} if (i + world.size) % 2 else {}
        tune(must=False, GROUPED_PIECE=0 if (i + world.size) % 3 == 0 else 1 << 16)
        got, _, gatherer, _ = trained(kind, CUT[name], grid, steps, p=0.1, **again)
        grid.close()  # MPI has 2048 communicators
        np.testing.assert_allclose(got, want[kind], rtol=1e-12, err_msg=f"{kind}, {name}, {sizes}, {again}")
        assert gatherer.missed == 0
        assert len(gatherer.known) >= 7  # embedding, two blocks and head, and back


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("accumulate", ["reduce-scatter", "whole"])
def test_microbatches(accumulate, make_grid, world):
    options = {"microbatches": 2, "p": 0.1, "steps": 3}
    grid = make_grid({"replica": world.size // 2, "data": 2})
    scheme = schemes.discover()["data"].SCHEME.with_data("replica").with_weights_cut("data")
    got, model, gatherer, optimizer = trained("gpt", scheme, grid, accumulate=accumulate, **options)
    np.testing.assert_allclose(got, serial(world, "gpt", **options), rtol=1e-12)
    with pla.ledger(grid) as book:
        step(model, optimizer, 4, 2)
    blocks, table = blocks_words(model), own_words(model.embedding.weight)
    small = sum(p.size for p in model.parameters() if p.layout.where("data") is None) // 2
    times = {"reduce-scatter": 2, "whole": 1}[accumulate]
    assert abs(received(book, "all_gather") - 2 * (2 * blocks + 3 * table) - small) <= SLACK
    assert abs(received(book, "reduce_scatter") - times * (blocks + 2 * table + small)) <= SLACK
    assert gatherer.missed == 0


def received(book, op):
    return sum(words for (name, _), words in book.words.items() if name == op)


def own_words(p):
    """What one gather or reduce-scatter of a weight receives."""
    return p.size - p.block.size


def blocks_words(model):
    return sum(own_words(p) for p in model.blocks.parameters() if p.layout.where("data") is not None)


@pytest.mark.ranks(2, 3, 4, 8, 12)
@pytest.mark.parametrize("recompute", [None, "block"])
def test_three_times_the_words_of_the_weights(recompute, make_grid, world):
    """A gather in each pass and a reduce-scatter, recomputed or not; a tied table is gathered for the look-up too, and
    its two uses' gradients go home apart."""
    grid = make_grid({"data": world.size})
    _, model, _, optimizer = trained("gpt", ZERO3, grid, 2, recompute=recompute)
    with pla.ledger(grid) as book:
        step(model, optimizer, 2)
    table = own_words(model.embedding.weight)
    assert model.embedding.weight.shape == (VOCABULARY, HIDDEN)
    shared = sum(p.size - p.updated[0].size for p in model.parameters() if p.storage.owner is not None)
    blocks = blocks_words(model)
    assert received(book, "all_gather") == 2 * blocks + 3 * table + shared
    assert received(book, "reduce_scatter") == blocks + 2 * table + shared
    assert book.words.total() - received(book, "all_reduce") == 3 * blocks + 5 * table + 2 * shared


@pytest.mark.ranks(2, 3, 4, 8)
@pytest.mark.parametrize("piece", [1 << 16, 0])
@pytest.mark.parametrize("recompute", [None, "block"])
def test_a_block_is_gathered_by_one_call(recompute, piece, make_grid, world, tune):
    """And its gradients go home by two; where weights may not be packed, each has calls of its own."""
    tune(GROUPED_PIECE=piece)
    grid, layers = make_grid({"data": world.size}), 3
    _, model, gatherer, optimizer = trained("gpt", ZERO3, grid, 2, recompute=recompute, num_hidden_layers=layers)
    with pla.ledger(grid) as book:
        step(model, optimizer, 2)
    buckets = sum(b.scatter != () for b in model.embedding.weight.reducer.buckets)
    weights = sum(p.layout.where("data") is not None for p in model.blocks[0].parameters())
    assert weights == 4
    table = 3  # gathered for the look-up, and for the head in both passes
    gathers, scatters = book.calls["all_gather", ("data",)], book.calls["reduce_scatter", ("data",)]
    assert gathers - buckets - table == 2 * layers * (1 if piece else weights)
    if piece:  # the head's, and those of the look-up with the last of the first block
        assert scatters - buckets == 2 * layers + 1
    else:
        assert scatters - buckets == layers * weights + 2
    assert gatherer.first_gathers == 1
    assert gatherer.missed == 0


@pytest.mark.ranks(2, 4, 6)
def test_packed_weights_have_the_same_bits(make_grid, world, tune):
    """In 32 bits, and in 16 with masters in 32: sums of two terms, and those in the order of the ranks, do too."""
    for kind, dtype in (("gpt", "float64"), ("llama", "bfloat16")):
        found = []
        for piece in (0, 1 << 16):
            tune(GROUPED_PIECE=piece)
            grid = make_grid({"replica": world.size // 2, "data": 2})
            scheme = DATA.with_data("replica").with_weights_cut("data")
            losses, model, _, _ = trained(kind, scheme, grid, 3, dtype=dtype, p=0.1)
            found.append((losses, [held(p.data).copy() for p in model.parameters()]))
        assert found[0][0] == found[1][0]
        for one, other in zip(found[0][1], found[1][1], strict=True):
            np.testing.assert_array_equal(one, other)


class Noted(Handle):
    """A handle that tells once when its operation is done."""

    def __init__(self, handle, done):
        self.handle, self.done = handle, done

    def test(self):
        if not self.handle.test():
            return False
        self.wait()
        return True

    def wait(self):
        self.handle.wait()
        self.done()


class UnderWay:
    """Bytes of the larger buffers of operations that are started and not done, now and at the most."""

    def __init__(self, patch, comm, name, buffer, but=lambda buffer: False):
        self.live, self.most, self.single = {}, 0, 0
        plain = getattr(comm, name)

        def call(me, *args, wait=True, **options):
            if wait or but(args[buffer]):
                return plain(me, *args, wait=wait, **options)
            key = self.enter(args[buffer].nbytes)
            return Noted(plain(me, *args, wait=False, **options), lambda: self.live.pop(key, None))

        patch.setattr(comm, name, call)

    def enter(self, nbytes):
        key = object()
        self.live[key] = nbytes
        self.single, self.most = max(self.single, nbytes), max(self.most, sum(self.live.values()))
        return key


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("recompute", [None, "block"])
def test_never_more_than_two_blocks_are_gathered(recompute, make_grid, world, monkeypatch):
    """Under way, or there and not yet dropped."""
    grid = make_grid({"data": world.size})
    gathered = UnderWay(monkeypatch, type(grid.comm(("data",))), "all_gather", 1)
    gather, there = WeightGatherer.gather, set()

    def counted(self, parameter, work):
        found = gather(self, parameter, work)
        if work != parameter.layout and id(found) not in there:
            there.add(id(found))
            weakref.finalize(found, there.remove, id(found))
            weakref.finalize(found, gathered.live.pop, gathered.enter(found.nbytes))
        return found

    monkeypatch.setattr(WeightGatherer, "gather", counted)
    _, model, _, _ = trained("gpt", ZERO3, grid, 4, num_hidden_layers=4, recompute=recompute)
    block = max(sum(8 * p.size for p in b.parameters() if p.ndim > 1) for b in model.blocks)
    assert block < gathered.most <= 2 * block
    assert not gathered.live


@pytest.mark.ranks(2, 4)
def test_gradients_under_way_are_at_most_a_block(make_grid, world, monkeypatch):
    """Terms on their way home take no more bytes at any time than the largest block's weights, whose number is known
    from the first pass on; several are under way at once."""
    for sizes in [{"data": world.size}, {"replica": world.size // 2, "data": 2}][: world.size // 2]:
        scheme = ZERO3 if len(sizes) == 1 else DATA.with_data("replica").with_weights_cut("data")
        grid = make_grid(sizes)
        _, model, gatherer, optimizer = trained("gpt", scheme, grid, 2, num_hidden_layers=3)
        buckets = model.embedding.weight.reducer.buckets

        def small(sent, buckets=buckets):  # of what stage 3 leaves whole
            return any(b.data is not None and np.may_share_memory(sent, b.data) for b in buckets)

        with monkeypatch.context() as patch:
            sent = UnderWay(patch, type(grid.comm(("data",))), "reduce_scatter", 0, small)
            step(model, optimizer, 2, 2)
        block = max(sum(8 * p.size for p in b.parameters() if p.ndim > 1) for b in model.blocks)
        assert gatherer.limit <= block
        assert sent.single < sent.most <= gatherer.limit
        assert not sent.live


@pytest.mark.ranks(2, 3)
def test_another_order_falls_back(make_grid, world):
    """Blocks left out, another order, and validation between steps: what is gathered ahead is right, or dropped."""

    def losses(scheme, grid, zero):
        _, model, gatherer, optimizer = trained("gpt", scheme, grid, 0, zero=zero, num_hidden_layers=3)
        found, blocks = [], list(model.blocks)
        orders = ["012", "012", "02", "012", "210", "012", "1", "012"]
        for number, order in enumerate(orders):
            model.blocks = nn.Sequential(*(blocks[int(i)] for i in order))
            found.append(step(model, optimizer, number))
            if number % 2:
                with no_grad():
                    found.append(loss_of(model, 7).item())
        return found, gatherer

    with alone(world) as one:
        want = losses(schemes.discover()["serial"].SCHEME, one, False)[0]
    got, gatherer = losses(ZERO3, make_grid({"data": world.size}), True)
    np.testing.assert_allclose(got, want, rtol=1e-12)
    assert gatherer.missed > 0


@pytest.mark.ranks(2)
def test_planted_bugs_are_caught(make_grid, world, monkeypatch):
    """Weights gathered before the update, and gradients that come home without those of the other ranks."""
    want = serial(world, "gpt", steps=4)

    def differs():
        got = trained("gpt", ZERO3, make_grid({"data": world.size}), 4)[0]
        return not np.allclose(got, want, rtol=1e-12, atol=0)

    assert not differs()
    gather, old = WeightGatherer.gather, {}

    def stale(self, parameter, work):
        found = gather(self, parameter, work)
        return old.setdefault((parameter.name, work), found.copy())

    with monkeypatch.context() as m:
        m.setattr(WeightGatherer, "gather", stale)
        assert differs()
    with make_grid({"data": world.size}) as grid:
        comm = type(grid.comm(("data",)))
    scatter = comm.reduce_scatter

    def alone(self, send, recv, counts, **options):
        return scatter(self, send if self.rank == 0 else send * 0, recv, counts, **options)

    with monkeypatch.context() as m:
        m.setattr(comm, "reduce_scatter", alone)
        assert differs()


def test_bad_calls_are_told(make_grid, world):
    grid = make_grid({"data": world.size})
    model = make("gpt", schemes.discover()["data"].SCHEME, grid)
    with pytest.raises(ConfigError, match=r"no weight of this model rests cut by it; .*with_weights_cut\('data'\)"):
        WeightGatherer(model, axes="data")
    model = make("gpt", ZERO3, grid)
    with pytest.raises(ConfigError, match="'reduce-scatter' or 'whole', not 'all'"):
        WeightGatherer(model, accumulate="all")
    gatherer = WeightGatherer(model, axes="data")
    with pytest.raises(ConfigError, match="has a weight gatherer already"):
        WeightGatherer(model)
    gatherer.detach()
    assert not grid.polled
    assert all(p.storage.gatherer is None for p in model.parameters())
