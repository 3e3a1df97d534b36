"""Models are the same under every scheme and mixture, on every grid, to the last gradient."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from parlinalg import schemes
from parlinalg.autograd.gradients import GradientAccumulator
from parlinalg.autograd.ops.softmax import Pieces
from parlinalg.random.draws import Draws
from tests.conftest import BACKEND
from tests.models import CLOSE, KINDS, alone, combinations, differences, every_scheme, gradients, losses

SERIAL = schemes.discover()["serial"].SCHEME
EVERY = pytest.mark.ranks(*range(1, 9), 12)


@pytest.fixture(scope="module")
def known(world: Any) -> Any:
    """Gradients and losses of one rank alone."""

    @cache
    def found(run: Any, kind: str, *args: Any, **options: Any) -> Any:
        with alone(world) as grid:
            got = run(kind, SERIAL, grid, *args, **options)
            return {name: array.gather() for name, array in got.items()} if run is gradients else got

    return found


def check(make_grid: Any, cases: Any, difference: Any) -> None:
    """The one body: no case differs from one rank alone."""
    every, wrong = every_scheme(), []
    for kind, name, sizes in cases:
        grid = make_grid(sizes)
        try:
            found = difference(kind, every[name], grid)
        except Exception as error:
            error.add_note(f"{kind}, {name}, {sizes}")
            raise
        grid.close()
        wrong += [f"{kind}, {name}, {sizes}: {each}" for each in found]
    assert not wrong, "\n".join(wrong)


@pytest.mark.core
@EVERY
@pytest.mark.always
def test_losses_and_gradients_are_those_of_one_rank(make_grid: Any, world: Any, known: Any, full: bool) -> None:
    def difference(kind: str, scheme: Any, grid: Any) -> list[str]:
        options = {"num_hidden_layers": 2} if full else {}
        return differences(gradients(kind, scheme, grid, **options), known(gradients, kind, **options))

    check(make_grid, combinations(world.size, full), difference)


@EVERY
def test_losses_of_training_with_dropout_are_those_of_one_rank(
    make_grid: Any, world: Any, known: Any, full: bool
) -> None:
    """Recomputed where the one rank keeps: dropout drops the same again."""

    def difference(kind: str, scheme: Any, grid: Any) -> list[str]:
        layers = {"num_hidden_layers": 2 if full or world.size <= 4 else 1}
        found = losses(kind, scheme, grid, p=0.1, recompute="block", **layers)
        want = known(losses, kind, p=0.1, **layers)
        error = max(abs(f / w - 1) for f, w in zip(found, want, strict=True))
        return [] if error <= CLOSE and want[-1] < want[0] else [f"{error}: {found} for {want}"]

    cases, draw = list(combinations(world.size, full)), random.Random(world.size)
    few = world.size > 4 or BACKEND != "numpy"
    kinds = KINDS[world.size // 2 % 2 :: 2] if few else KINDS
    sample = [draw.choice([case for case in cases if case[0] == kind]) for kind in kinds]
    check(make_grid, cases if full else sample, difference)


def unsummed(add: Any) -> Any:
    """Terms of gradients that forget the first axis over which they are to be summed."""

    def added(self: Any, term: Any, *, owned: bool) -> None:
        block, layout = term
        add(self, (block, layout.with_partial(layout.partial[1:])), owned=owned)

    return added


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("where", "name", "plant"),
    [(GradientAccumulator, "add", unsummed), (Pieces, "sum", lambda _: lambda self, numbers: numbers)],
    ids=["a gradient lacks a sum over ranks", "a row's sum is that of a piece"],
)
def test_a_planted_bug_is_caught(
    where: Any, name: str, plant: Any, make_grid: Any, world: Any, known: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, scheme, wanted = make_grid({"r": 2, "c": 2}), every_scheme()["2d"], known(gradients, "gpt")
    assert not any(world.share(differences(gradients("gpt", scheme, grid), wanted)))
    monkeypatch.setattr(where, name, plant(getattr(where, name)))
    assert any(world.share(differences(gradients("gpt", scheme, grid), wanted)))


@pytest.mark.serial
def test_dropout_that_is_not_the_same_again_is_caught(
    world: Any, known: Any, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(Draws, "copy", lambda self: self)
    with alone(world) as grid:
        assert losses("gpt", SERIAL, grid, 2, p=0.1, recompute="block") != known(losses, "gpt", p=0.1)[:2]
