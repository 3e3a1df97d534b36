"""Eigenvalues, singular values and least squares on imagined ranks: the ledgers of the formulas, and of real ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import linalg
from parlinalg.grid import factorizations
from parlinalg.linalg import costs as formulas
from parlinalg.linalg import divide, factors, least_squares, spectral
from parlinalg.linalg.tiles import Deal
from tests.planning.test_imagined import DEALS, both

SHAPES = [(150, 150), (97, 97), (210, 66), (40, 140), (300, 7), (1, 5), (0, 4)]


@pytest.mark.one_in(3)
@pytest.mark.serial
@pytest.mark.parametrize(("sizes", "cuts"), [d[:2] for d in DEALS if d[2] == 1], ids=str)
def test_ledgers_are_those_of_the_formulas(sizes, cuts, monkeypatch):
    """Without deflation the formulas' bounds of divide and conquer are exact."""
    monkeypatch.setattr(factors, "arrangement", lambda *_: "square")
    monkeypatch.setattr(factors, "block_size", lambda *_: 16)
    layout, ranks = pla.Layout(*cuts), math.prod(sizes.values())

    def check(routine: Callable[[], Any], formula: Callable[..., Any], itemsize: int, what: Any) -> None:
        with pla.ledger(grid) as book:
            routine()
        words, calls = formula(formulas.Costs(Deal(sizes, 16, "square", 1), itemsize, ranks)).book(grid.rank)
        assert dict(book.calls) == dict(calls), what
        assert {key: n for key, n in book.words.items() if n} == {key: n for key, n in words.items() if n}, what

    for rank in sorted({0, ranks // 2, ranks - 1}):
        with pla.imagine(ranks, rank, what_if=pla.WhatIf()):
            grid = pla.Grid(sizes)
            for shape in SHAPES:
                m, n = shape
                x = pla.zeros(shape, grid, layout, dtype="complex64" if m == 97 else "float64")
                size = x.dtype.itemsize
                if m == n:
                    check(lambda: linalg.eigh(x), lambda c: formulas.eigh(c, layout, n), size, (rank, shape))
                    check(
                        lambda: linalg.eigh(x, subset_by_index=(3, 9)), lambda c: formulas.eigh(c, layout, n, 7), size,
                        (rank, shape, "subset"),
                    )  # fmt: skip
                check(
                    lambda: linalg.svd(x, full_matrices=False),
                    lambda c: formulas.svd(c, layout, shape, full_matrices=False), size, (rank, shape),
                )  # fmt: skip


def matrix(n: int, seed: int = 0) -> np.ndarray:
    """A Hermitian matrix of which no merge of divide and conquer knows a vector before."""
    draw = np.random.default_rng(seed)
    q, _ = np.linalg.qr(draw.standard_normal((n, n)))
    return (q * np.linspace(1, 2, n)) @ q.T


def grids(ranks: int) -> list[tuple[dict[str, int], Any]]:
    """The grids of so many ranks with a layout; of 8, which take long on few cores, one of three axes."""
    if ranks == 8:
        return [({"r": 2, "c": 2, "d": 2}, pla.Layout("r", ("d", "c")))]
    return [({"r": r, "c": c}, pla.Layout("r", "c")) for r, c in factorizations(ranks, 2)]


@pytest.fixture
def deflated(monkeypatch):
    """The numbers of vectors that merges know before, on real ranks."""
    counts, plain = [], divide._deflated

    def counted(d: Any, *args: Any) -> Any:
        kept, rest = plain(d, *args)
        counts.append(len(rest))
        return kept, rest

    monkeypatch.setattr(divide, "_deflated", counted)
    monkeypatch.setattr(spectral, "workers", lambda tiles: tiles)  # else it depends on the cores of this machine
    return counts


@pytest.mark.ranks(1, 2, 3, 4, 8)
@pytest.mark.parametrize("complex_", [False, True], ids=["real", "complex"])
def test_ledgers_of_spectra_are_those_of_real_ranks(world, complex_, deflated):
    def program(grid: Any) -> None:
        a, r = pla.distribute(dense, grid, layout), pla.distribute(dense[:, : 2 * n // 3], grid, layout)
        linalg.eigh(a)
        linalg.svd(a)
        if world.size == 8:
            return
        linalg.eigh(a, subset_by_index=(20, 40))
        linalg.eigvalsh(a)
        linalg.svd(r, full_matrices=False)
        linalg.svdvals(r.mT)
        linalg.pinv(r)
        linalg.matrix_rank(a[:, :20])
        linalg.eigh(pla.distribute(np.stack([dense[:9, :9]] * 5), grid))

    n = 70 if world.size == 8 else 150
    dense = matrix(n)
    if complex_:
        phases = np.exp(1j * np.arange(n))
        dense = phases[:, None] * dense * phases.conj()
    for sizes, layout in grids(world.size):
        both(world, sizes, program, what_if=pla.WhatIf())
    assert deflated or world.size == 1
    assert not any(deflated)


@pytest.mark.ranks(1, 2, 3, 4, 8)
def test_ledgers_of_least_squares_are_those_of_real_ranks(world, deflated, monkeypatch):
    def program(grid: Any) -> None:
        a, b = pla.distribute(dense, grid, layout), pla.distribute(sides, grid, layout)
        found = [linalg.lstsq(a, b), linalg.lstsq(a.mT, b[:n]), linalg.lstsq(a[:n], b[:n]), linalg.lstsq(a, b[:, 0])]
        assert [each.rank for each in found] == [n] * 4

    n, draw = 12 if world.size == 8 else 60, np.random.default_rng(1)
    dense, sides = draw.standard_normal((200, n)), draw.standard_normal((200, 3))
    for alone in (True, False):
        monkeypatch.setattr(least_squares, "by_one", lambda n, sizes, alone=alone: alone)
        for sizes, layout in grids(world.size):
            both(world, sizes, program, what_if=pla.WhatIf())


@pytest.mark.serial
def test_dependent_columns_have_one_singular_value_of_zero():
    with pla.imagine(4, 1, what_if=pla.WhatIf(conditioned=False)):
        grid = pla.Grid({"r": 4})
        a, b = (pla.zeros((90, n), grid, pla.Layout("r", None)) for n in (20, 2))
        found = linalg.lstsq(a, b)
        assert (found.rank, found.x.shape, found.residuals.shape, found.s.shape) == (19, (20, 2), (0,), (20,))


ASKED = {
    "eigh": (linalg.eigh, "which vectors a merge of divide and conquer finds", "deflation"),
    "svd": (linalg.svd, "which vectors a merge of divide and conquer finds", "deflation"),
    "eigvalsh": (linalg.eigvalsh, "whether the elements are finite", "finite"),
    "lstsq": (lambda a: linalg.lstsq(a, a[:, :2]), "the rank of a matrix", "conditioned"),
}


@pytest.mark.serial
@pytest.mark.parametrize("name", ASKED)
def test_without_a_policy_the_question_is_an_error(name, monkeypatch):
    """Each question is answered by its own field, and the error has the line of the program."""
    function, why, field = ASKED[name]
    with pla.imagine(4, 1) as world:
        a = pla.zeros((150, 150), pla.Grid({"r": 2, "c": 2}), pla.Layout("r", "c"))
        plain = world.device.assume

        def assume(asked: str, text: str) -> Any:
            return plain(asked, text) if asked == field and why in text else getattr(pla.WhatIf(), asked)

        monkeypatch.setattr(world.device, "assume", assume)
        with pytest.raises(pla.ValuesNeeded, match=rf"{why} .*test_imagined_linalg\.py:\d+.*WhatIf\({field}="):
            function(a)


@pytest.mark.serial
@pytest.mark.parametrize("given", [{"pivots": "first"}, {"deflation": 0.5}, {"routing": "odd"}], ids=str)
def test_unknown_answers_are_refused(given):
    ((name, value),) = given.items()
    with pytest.raises(pla.ConfigError, match=f"{name}={value!r} is not known; what can be assumed is"):
        pla.WhatIf(**given)


@pytest.mark.serial
def test_several_imagined_gpus():
    """They find eigenvalues and least squares as hosts do; singular values begin by an iteration, which is refused."""
    with pla.imagine(4, target="gpu", what_if=pla.WhatIf()):
        a = pla.zeros((150, 150), pla.Grid({"r": 2, "c": 2}), pla.Layout("r", "c"))
        linalg.eigh(a)
        linalg.svdvals(a)
        linalg.lstsq(a, a[:, :2])
        with pytest.raises(pla.ValuesNeeded, match=r"steps of a polar decomposition.*test_imagined_linalg\.py:\d+"):
            linalg.svd(a)


@pytest.mark.serial
def test_values_choose_a_subset_of_values():
    with pla.imagine(4, what_if=pla.WhatIf()):
        a = pla.zeros((90, 90), pla.Grid({"r": 4}), pla.Layout("r", None))
        with pytest.raises(pla.ValuesNeeded, match=r"subset_by_value .*test_imagined_linalg\.py:\d+"):
            linalg.eigh(a, subset_by_value=(0.0, 1.0))
