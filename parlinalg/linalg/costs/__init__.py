"""Words and collective calls of factorizations, of every rank and step by step.  Pure data: nothing is sent.

The counts follow from the same dealt numbers that the factorizations work with, and equal those of the ledger exactly.
Words are elements, as the ledger counts them: a rank receives n − own in an all-gather of n elements, 2(n − own) in an
all-reduce, n in a broadcast (0 at its root), and in the trips to tiles and back the elements that it lacks.

Four things depend on the values of a matrix and are arguments: how many pivots of a panel each grid row has
(`winners`; by default as evenly as its rows allow), the columns that pivoting takes (`order`; by default one after the
other), which panels of QR are so ill conditioned that they take TSQR (`trees`; by default none) and how many
eigenvectors of each merge of divide and conquer are no longer known (`kept`; by default all).  One depends on the
machine: to how many ranks `eigh` and `svd` deal their reduction (`workers`; by default to all).
"""

from parlinalg.linalg.costs.counts import TO_WORK, Costs, Counts, Part, after, panels
from parlinalg.linalg.costs.least_squares import lstsq
from parlinalg.linalg.costs.orthogonal import by_triangle, orthogonal, pivoted, qr, qr_factor, small_triangle, turn
from parlinalg.linalg.costs.reductions import (
    bidiagonal,
    conquer,
    conquer_bidiagonal,
    eigh,
    joins,
    merges,
    svd,
    tridiagonal,
)
from parlinalg.linalg.costs.systems import (
    cho_factor,
    cholesky,
    even_winners,
    lu,
    lu_factor,
    positions,
    solve,
    solve_triangular,
    solved,
    substitute,
    winners_of,
)

__all__ = [
    "after",
    "bidiagonal",
    "by_triangle",
    "cho_factor",
    "cholesky",
    "conquer",
    "conquer_bidiagonal",
    "Costs",
    "Counts",
    "eigh",
    "even_winners",
    "joins",
    "lstsq",
    "lu",
    "lu_factor",
    "merges",
    "orthogonal",
    "panels",
    "Part",
    "pivoted",
    "positions",
    "qr",
    "qr_factor",
    "small_triangle",
    "solve",
    "solve_triangular",
    "solved",
    "substitute",
    "svd",
    "TO_WORK",
    "tridiagonal",
    "turn",
    "winners_of",
]
