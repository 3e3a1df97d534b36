"""Generation gives the same tokens on every grid."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn, schemes
from parlinalg.comm import SingleComm
from tests.conftest import SIZE
from tests.models import alone, every_scheme, make
from tests.training import sizes_for

PROMPTS = [[1, 2, 3, 4], [5], [6, 7, 8, 9]]
WAYS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.5, "seed": 3},
    "from the likeliest": {"do_sample": True, "top_k": 5, "top_p": 0.8, "eos_token_id": [3, 7]},
}
SERIAL = schemes.discover()["serial"].SCHEME


def written(model, way, prompts=PROMPTS, new=3, **options):
    return [row.tolist() for row in nn.generate(model, prompts, new, **WAYS[way], **options)]


@pytest.fixture(scope="module")
def wanted(world):
    """What one rank alone writes, for each model and way."""
    with alone(world) as grid:
        models = {kind: make(kind, SERIAL, grid) for kind in ("gpt", "llama")}
        return {(kind, way): written(model, way) for kind, model in models.items() for way in WAYS}


def turns():
    """Every scheme of the folder and some mixtures, each with another model and way on another number of ranks."""
    plain = schemes.discover()
    for i, name in enumerate(every_scheme()):
        turn = i + SIZE
        if name in plain or turn % 8 == 0:
            yield name, ("gpt", "llama")[turn % 2], list(WAYS)[turn // 2 % len(WAYS)]


@pytest.mark.parametrize(("name", "kind", "way"), list(turns()))
def test_the_same_on_every_grid(name, kind, way, wanted, make_grid, world, full):
    scheme = every_scheme()[name]
    for sizes in sizes_for(scheme, world.size, 4 if full else 1):
        model = make(kind, scheme, make_grid(sizes))
        assert written(model, way) == wanted[kind, way]
        assert model.training


@pytest.mark.ranks(2, 3)
def test_experts_on_ranks_without_the_token(make_grid, world):
    """A step takes one token, and only one of the ranks that cut the sequence has it."""
    options = {"num_local_experts": 3, "num_experts_per_tok": 2}
    with alone(world) as grid:
        want = written(make("llama", SERIAL, grid, **options), "greedy")
    grid = make_grid({"s": world.size})
    assert written(make("llama", SERIAL.with_sequence("s"), grid, **options), "greedy") == want


@pytest.mark.serial
def test_rows_positions_cache_and_ends():
    with pla.Grid({"r": 1}) as grid:
        for kind in ("gpt", "llama"):
            model = make(kind, SERIAL, grid)
            for way in WAYS:
                heard = []
                found = written(model, way, stream=lambda row, token, heard=heard: heard.append((row, token)))
                assert found == written(model, way, use_cache=False)
                for row, prompt in enumerate(PROMPTS):
                    assert found[row][: len(prompt)] == prompt
                    assert [t for r, t in heard if r == row] == found[row][len(prompt) :]
                    assert len(found[row]) == len(prompt) + 3 or found[row][-1] in WAYS[way]["eos_token_id"]
                assert written(model, way, PROMPTS[:1]) == found[:1]
                assert written(model, way, np.array([PROMPTS[0], PROMPTS[2]]), 0) == [PROMPTS[0], PROMPTS[2]]
            longer = written(model, "sampled", [[1], [1]], 8)
            assert longer[0] != longer[1]
            assert longer[0][:5] == written(model, "sampled", [[1]], 4)[0]


class Known:
    """A model of one rank whose logits are the same after all tokens, as generation sees it."""

    world, chooser = SingleComm(), 0

    def __init__(self, *logits):
        self.values = np.array(logits)
        self.config = {"vocab_size": len(logits), "max_position_embeddings": 100}

    def decoder(self):
        return self

    def cache(self, length):
        return None

    def logits(self, ids, cache):
        return np.tile(self.values, (len(ids), 1))

    def evaluating(self):
        return nullcontext()


@pytest.mark.serial
def test_what_is_drawn():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=9)
    p = np.exp(logits) / np.exp(logits).sum()

    def shares(**options):
        drawn = [row[-1] for row in nn.generate(Known(*logits), [[0] * 5] * 1000, 1, do_sample=True, **options)]
        return np.bincount(drawn, minlength=9) / 1000

    def close(found, want):
        assert ((found > 0) == (want > 0)).all()
        assert np.abs(found - want).max() < 0.06

    close(shares(), p)
    close(shares(temperature=0.5), p**2 / (p**2).sum())
    best = np.argsort(-p)
    top = np.where(np.isin(range(9), best[:3]), p, 0)
    close(shares(top_k=3), top / top.sum())
    mass = p[best[:4]].sum()
    top = np.where(np.isin(range(9), best[:4]), p, 0)
    close(shares(top_p=mass - 1e-9), top / top.sum())
    close(shares(top_p=1e-9), np.eye(9)[best[0]])
    assert nn.generate(Known(1.0, 3.0, 3.0), [[0]], 1)[0].tolist() == [0, 1]
    cold = nn.generate(Known(1.0, 3.0, -np.inf), [[0]], 1, do_sample=True, temperature=1e-310)
    assert cold[0].tolist() == [0, 1]


@pytest.mark.serial
def test_every_row_draws_another_number_at_every_position():
    """3,600 draws from 20,000 tokens that are all as likely: as many differ as of numbers that do not depend on one
    another, to 4 standard deviations."""
    n, rows, new = 20_000, 60, 60
    drawn = np.array(nn.generate(Known(*np.zeros(n)), [[0]] * rows, new, do_sample=True))[:, 1:] / n
    differ = n * (1 - (1 - 1 / n) ** drawn.size)
    assert abs(len(np.unique(drawn)) - differ) < 70
    assert abs(drawn.mean() - 0.5) < 0.02
    assert max(abs(drawn.mean(axis) - 0.5).max() for axis in (0, 1)) < 0.15
    assert np.abs(np.bincount((drawn * 10).astype(int).reshape(-1)) - drawn.size / 10).max() < 75


WRONG = [
    ([], {}, "takes prompts"), ([1, 2], {}, r"such as \[\[1, 2, 3\]\], not \[1, 2\]"),
    ([[1], []], {}, "prompt 1 is"), ([[1], [0.5]], {}, "prompt 1 is"), ([[1], [-1]], {}, "prompt 1 has token -1"),
    ([[1, 2, 11]], {}, "prompt 0 has token 11 at position 2; .* 0 to 10"),
    ([[1], [1] * 5], {}, "5 tokens and 5 new ones make 10; .* 9 positions"),
    ([[1]], {"temperature": 0.0}, "temperature is above 0"), ([[1]], {"top_k": 2.5}, "top_k is a whole number .*2.5"),
    ([[1]], {"top_p": 1.5}, "top_p is above 0 and at most 1, not 1.5"), (None, {}, "takes prompts, .* not None"),
    ([[[1], [2, 3]]], {}, "takes prompts"), ([[1]], {"seed": 1.5}, r"seed is a whole number, not 1\.5"),
    ([[1]], {"eos_token_id": "a"}, "eos_token_id is a whole number, not 'a'"),
    ([[1]], {"eos_token_id": [2, 0.5]}, r"eos_token_id is a whole number, not 0\.5"),
    ([[1]], {"max_new_tokens": 2.5}, r"max_new_tokens is a whole number of at least 0, not 2\.5"),
    ([[1]], {"max_new_tokens": -1}, "max_new_tokens is a whole number of at least 0, not -1"),
]  # fmt: skip


def test_what_is_wrong_is_said_at_once(make_grid, world):
    model = make("gpt", SERIAL, make_grid({"one": world.size}))
    for prompts, options, words in WRONG:
        with pytest.raises(pla.ConfigError, match=words):
            nn.generate(model, prompts, **{"max_new_tokens": 5, **options})
    for other in (make("bert", SERIAL, model.grid), nn.ReLU()):
        with pytest.raises(
            pla.ConfigError, match=rf"causal model with a cache\(length\), .* not {type(other).__name__}"
        ):
            nn.generate(other, [[1]], 5)
    model.norm.bias.data = model.norm.bias.data * float("nan")
    for sample in (False, True):
        with pytest.raises(pla.ConfigError, match="prompt 0: the model's largest logit at position 1 is not finite"):
            nn.generate(model, [[1], [2, 3]], 1, do_sample=sample)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_disagree_are_told(make_grid, world):
    model = make("gpt", SERIAL, make_grid({"one": world.size}))
    with pytest.raises(pla.ConfigError, match="rank 1 passes other prompts"):
        nn.generate(model, [[1 + (world.rank == 1)]], 5)
    with pytest.raises(pla.ConfigError, match="rank 1, generating: top_k"):
        nn.generate(model, [[1]], 5, top_k=1 - (world.rank == 1))
    for name, wrong in {"max_new_tokens": 2.5, "eos_token_id": "a", "seed": 0.5}.items():
        with pytest.raises(pla.ConfigError, match=f"rank 1, generating: {name} is a whole number"):
            nn.generate(model, [[1]], **{"max_new_tokens": 5, **({name: wrong} if world.rank == 1 else {})})
    with pytest.raises(pla.ConfigError, match="rank 1, generating: generate takes prompts"):
        nn.generate(model, None if world.rank == 1 else [[1]], 5)
    ends = np.array([3, 7])
    assert written(model, "greedy", eos_token_id=ends) == written(model, "greedy", eos_token_id={7, 3})
