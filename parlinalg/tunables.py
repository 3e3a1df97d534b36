"""Sizes that decide how work is cut up: tiles, pieces, buffers, and the lengths from which another way is taken.

No result depends on them but in rounding.  They are read when they are used, as `tunables.NAME`, never imported by
name, so that a test can give them values at which small arrays take every way.
"""

from __future__ import annotations

import os

from parlinalg.errors import ConfigError

INT_MAX = 2**31 - 1


def _max_count() -> int:
    text = os.environ.get("PARLINALG_MAX_COUNT") or str(INT_MAX)
    if not text.isdecimal() or not 1 <= int(text) <= INT_MAX:
        raise ConfigError(f"PARLINALG_MAX_COUNT={text!r} should be a whole number of elements from 1 to {INT_MAX}")
    return int(text)


# ------------------------------------------------------------------------------------------ computing
COMPILED_SIZE = 1 << 12
"""Elements below which NumPy computes: a training so small would wait longer for its loops to be compiled."""

OPTIMIZER_TILE = 1 << 15
"""Elements of a tile of an update on a CPU: few enough to stay in the cache."""

OPTIMIZER_DEVICE_TILE = 1 << 24
"""Elements of a tile of an update on a GPU, which has no such cache."""

WORD_FLOPS = 256
"""Floating-point operations that take as long as receiving an element, where ways to compute a step are compared."""

CALL_FLOPS = 1 << 19
"""Floating-point operations that take as long as a collective call of few elements."""

GEMM_DEPTH = 40
"""The inner dim at which products of matrices run at half their rate."""

GEMV_STRIP = 1 << 19
"""Bytes of a few long rows that one thread multiplies by a vector at a time."""

GEMV_ROW = 1 << 15
"""Bytes of a row from which on rows are multiplied by a vector a few at a time."""

STACKED_PRODUCT = 1 << 30
"""Multiplications of a product of 16-bit matrices on a GPU from which on each product of a stack is a call of its own:
cast to float32, as a stack is, it takes twice as long, 5 µs more for so many on an H100, and the casts take as much."""

PANEL_SLOWNESS = 2
"""How many times longer than in products an operation takes in the factorization of a panel of columns."""

STEP_FLOPS = 1 << 22
"""Floating-point operations that take as long as a step of a factorization beside its operations, words and calls."""

HOST_SVD = 256
"""Rows and columns up to which LAPACK on the host finds the singular values of a small matrix of one on a GPU: cuSOLVER
takes 24 ms for 256 × 256 in float64 on an H100."""

POLAR_SVD = {4: 1024, 8: 2048}
"""Rows from which one GPU finds the singular vectors of a square matrix by its polar decomposition, by the bytes of a
real number: on an H100 it took 143 ms for 1024 × 1024 in float32, cuSOLVER's `gesvd` 183, for 2048 × 2048 in float64
357 and 440, but for 1024 × 1024 in float64 152 and 133."""

SVD_BY_ONE = 384
"""Columns up to which one rank may find the singular values of a matrix that others have too, or that it gathers: on 2
cores 2 ranks took 64 ms for values and vectors of 384 × 384, one of them 26."""

LAYER_BYTES = 1 << 30
"""Bytes of a rank's tiles up to which a factorization may take several layers of ranks without being told (2.5D)."""

ATTENTION_POLL = 1 << 20
"""Scores of attention between two polls of communication in progress."""

FUSED_QUERIES = 64
"""Queries from which one kernel of cuDNN is to compute attention on a GPU: one is made for each size, which takes tens
of milliseconds."""

CUDA_THREADS = 256
"""Threads of a block of a CUDA kernel."""

RANDOM_TILE = 1 << 15
"""Random words made at a time: few enough to stay in the cache with what is computed from them."""

RANDOM_JUMP = 1 << 10
"""Random words left out between two runs that cost less to make and drop than to jump over."""

# ------------------------------------------------------------------------------------------ communicating
MAX_COUNT: int = _max_count()
"""The most elements that one MPI call carries, the sum over all ranks' counts (`PARLINALG_MAX_COUNT`)."""

MOVE_BUFFER = 1 << 19
"""Elements of a piece of a change of layout, or a MOVE_SHARE-th of the largest block if that is more."""

MOVE_SHARE = 16
"""A large block moves in about so many pieces: each takes far longer than a latency, and one sent and one received add
an eighth of the block to the memory of a move."""

MOVE_COMMON = 1 << 18
"""Elements a rank that ranks of one node hand over at a time in shared memory: few enough to stay in the cache."""

TILES_MOVED = 1 << 18
"""Elements a rank that travel at a time between rest and a factorization: few enough to stay in the cache."""

GROUPED_PIECE = 1 << 16
"""The most bytes of a rank's piece with which a gather or a reduce-scatter is packed with others into one call, where
packing takes copies: steps of ZeRO 3 on 2 and 4 ranks of one node, and on 8 hosts at 1 Gbit/s, took as long with pieces
of up to 256 KiB packed as with none, and 10 to 12% longer with all."""

LONG_SUM = 1 << 19
"""Bytes from which between nodes a blocking all-reduce goes in two steps."""

LONG_MESSAGE = 1 << 20
"""Bytes from which between nodes a broadcast among any number of ranks goes along a chain."""

CHAIN_PIECE = 1 << 18
"""The most bytes that a broadcast along a chain passes on at a time."""

CHAIN_LEAST = 1 << 14
"""The least bytes of such a piece, which on a fast link takes longer than a latency; a broadcast goes along a chain
from so many bytes a rank on."""

SHARED_BYTES = 1 << 18
"""Bytes below which blocks travel as messages between the ranks of a node, which needs fewer barriers."""

SHARED_SPARE = 2
"""The multiple of the requested bytes that must be free in the memory ranks share, which MPI uses too."""

# ------------------------------------------------------------------------------------------ writing
CHECKPOINT_SPLIT = 1 << 24
"""Bytes above which a rectangle that several ranks hold is written by several."""

CHECKPOINT_PAGE = 1 << 18
"""Bytes of a checkpoint that have a checksum of their own."""

FILE_RUN = 1 << 12
"""Bytes of the shortest run of elements that a rank writes to a shared file itself: shorter ones are exchanged first,
so that ranks write rows."""
