"""Orders of the tokens of a cut sequence that give all ranks equal work in causal attention.

Query i of a causal sequence meets i + 1 keys, so that the last of P contiguous blocks has 2P - 1 times the work of the
first.  Other orders deal out early and late tokens to every rank.
"""

from __future__ import annotations

import numpy as np

from parlinalg.errors import ConfigError
from parlinalg.layout import pieces

ORDERS = ("contiguous", "striped", "zigzag")


def sequence_order(length: int, ranks: int, name: str = "zigzag") -> np.ndarray:
    """Return the permutation of the tokens whose balanced pieces are the ranks' blocks.

    Parameters
    ----------
    length : int
        The tokens of the sequence; any number, also fewer than there are ranks.
    ranks : int
        Over how many the sequence is cut.
    name : {"contiguous", "striped", "zigzag"}
        "contiguous": as they come.  "striped": token i on rank i mod P (Brandon et al., "Striped attention", 2023).
        "zigzag": of 2P chunks, rank r holds r and 2P - 1 - r.

    Returns
    -------
    array of int64
        Shape [length]: the position in the sequence of each token of the permuted one, `permuted = tokens[order]`; what
        `ops.attention` and `ops.ring_attention` take as `positions`.  `np.argsort(order)` brings the tokens back.

    Raises
    ------
    ConfigError
        If there is no such order.

    Examples
    --------
    >>> sequence_order(8, 2, "striped")
    array([0, 2, 4, 6, 1, 3, 5, 7])
    >>> sequence_order(8, 2, "zigzag")
    array([0, 1, 6, 7, 2, 3, 4, 5])
    """
    if length < 0 or ranks < 1:
        raise ConfigError(f"a sequence of {length} tokens over {ranks} ranks: at least 0 tokens and 1 rank are needed")
    if name == "contiguous":
        return np.arange(length, dtype=np.int64)
    if name == "striped":
        return np.concatenate([np.arange(r, length, ranks, dtype=np.int64) for r in range(ranks)])
    if name == "zigzag":
        return _zigzag(length, ranks)
    raise ConfigError(f"there is no order {name!r} of a sequence; the orders are {', '.join(map(repr, ORDERS))}")


def _zigzag(length: int, ranks: int) -> np.ndarray:
    blocks = pieces(length, ranks)
    late = [n // 2 for n in blocks]
    early = [n - m for n, m in zip(blocks, late, strict=True)]
    chunks = np.split(np.arange(length, dtype=np.int64), np.cumsum(early + late[::-1])[:-1])
    return np.concatenate([chunk for r in range(ranks) for chunk in (chunks[r], chunks[-1 - r])])
