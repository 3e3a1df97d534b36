"""Factorizations of one block without values: what `parlinalg.backend.cusolver` is for blocks on a GPU."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from parlinalg.backend.shapes import values_needed

Block = Any


def raising() -> AbstractContextManager[None]:
    """Return a context in which failures raise LinAlgError; nothing fails here."""
    return nullcontext()


def substitute(
    t: Block, b: Block, *, right: bool = False, lower: bool = False, adjoint: bool = False, unit: bool = False
) -> None:
    """Note that b is replaced by the solution of `op(t) x = b`, half the work of a product."""
    b.device.kernel("trsm", t.nbytes + 2 * b.nbytes, b.size * len(t), b.dtype)


def cholesky(a: Block) -> int:
    """Note that the lower triangle of a is replaced by its Cholesky factor; return 0, if minors are to be positive."""
    a.device.assume("finite", "whether a matrix is positive definite")
    a.device.kernel("potrf", 2 * a.nbytes, a.size * len(a), a.dtype)
    return 0


def lu(a: Block) -> Any:
    """Raise a ValuesNeeded: values choose the pivots."""
    raise values_needed("the pivots of lu")


def qr(a: Block) -> Any:
    """Raise a ValuesNeeded: values decide whether a panel is factored by its Gram matrix."""
    raise values_needed("a panel of qr")
