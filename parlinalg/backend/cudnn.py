"""Attention of 16-bit floats on a GPU in one kernel a pass, which never writes the scores: FlashAttention, by cuDNN.

NVIDIA's `nvidia-cudnn-frontend` makes a graph of one operation for blocks of given shapes and strides, and cuDNN finds
the kernel, which then runs on any blocks alike.  Graphs are kept.  Where the package, a GPU or a kernel for these
blocks is missing, the functions say so by returning None, and attention is computed by products.

Source: Dao, "FlashAttention-2", 2023; cuDNN's "scaled dot product attention".
"""

from __future__ import annotations

import warnings
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from parlinalg.backend import namespace

Block = Any
Band = tuple[int, int]
ALIGNED = 8
"""Elements of 16 bits to whose multiples the kernels have addresses and steps: 16 bytes."""


class Place(NamedTuple):
    """The shape of a block as heads, [batch, heads, n, e], and its strides in elements."""

    shape: tuple[int, ...]
    steps: tuple[int, ...]


class Graph(NamedTuple):
    """A graph of one operation, the bytes of its workspace, and the handle of cuDNN that runs it."""

    graph: Any
    room: int
    handle: Any


def attention(q: Block, k: Block, v: Block, band: Band, scale: float) -> tuple[Block, Block] | None:
    """Return softmax(scale q kᵀ) v and the logarithms of the sums of exp(scores).

    Parameters
    ----------
    q : array
        Shape [batch, n, kv heads, g, e], of float16 or bfloat16.
    k, v : array
        Shape [batch, m, kv heads, e].
    band : (int, int)
        (after, upto): query i sees its keys j with i + upto < j <= i + after, every query one at least.
    scale : float

    Returns
    -------
    (array, array) or None
        As q, contiguous; and [batch, kv heads, g, n] in float32.  None where cuDNN cannot.
    """
    if _library() is None or (bounds := _bounds(q, k, band)) is None:
        return None
    xp, (b, n, heads, g, _) = namespace(q), q.shape
    q, k, v = (_aligned(x) for x in (q, k, v))
    out = xp.empty(q.shape, q.dtype)
    lse = xp.empty((b, heads, g, n), np.float32)
    blocks = [_by_head(x) for x in (q, k, v, out)] + [lse.reshape(b, heads * g, n, 1)]
    return (out, lse) if _run(_forward, blocks, bounds, scale) else None


def attention_grad(
    dout: Block, q: Block, k: Block, v: Block, out: Block, lse: Block, into: tuple[Block, Block, Block], band: Band,
    scale: float, add: tuple[bool, bool] = (False, False),
) -> bool:  # fmt: skip
    """Write the gradients of q, k and v to `into`, or add them there, as `add` says of q and of k and v.

    Arguments as of `attention`, what it returned, and the gradient of the result.  The sums are in the same order on
    every run.  Returns False where cuDNN cannot.
    """
    if _library() is None or (bounds := _bounds(q, k, band)) is None:
        return False
    xp, (b, n, heads, g, _) = namespace(q), q.shape
    dout, q, k, v, out = (_aligned(x) for x in (dout, q, k, v, out))
    apart = (add[0], add[1], add[1])
    found = [
        xp.empty(x.shape, q.dtype) if more or x.dtype != q.dtype or not _is_aligned(x) else x
        for x, more in zip(into, apart, strict=True)
    ]
    blocks = [_by_head(x) for x in (q, k, v, out, dout)] + [lse.reshape(b, heads * g, n, 1)]
    if not _run(_backward, blocks + [_by_head(x) for x in found], bounds, scale):
        return False
    for target, grad, more in zip(into, found, apart, strict=True):
        if more:
            target += grad
        elif grad is not target:
            target[...] = grad
    return True


def takes(q: Block, k: Block, band: Band) -> bool:
    """Return True if blocks of these shapes and a band are given to cuDNN where its package is."""
    return _bounds(q, k, band) is not None


def _bounds(q: Block, k: Block, band: Band) -> tuple[int | None, int | None] | None:
    """Return from where before and how far after its own place a query sees keys: what cuDNN calls bounds of a band.

    None stands for no bound; in place of both, for blocks and bands that are not taken: cuDNN's start at the first key.
    """
    if q.shape[-1] % ALIGNED or not (q.size and k.size):
        return None
    (after, upto), n, m = band, q.shape[1], k.shape[1]
    left = None if upto <= -n else -upto
    if after >= m - 1 and left is None:
        return None, None
    return (left, 0) if after == 0 and (left is None or (left > 0 and n <= m)) else None


def _by_head(x: Block) -> Block:
    """Return a block [batch, n, heads, e] or [batch, n, kv heads, g, e] as a view [batch, heads, n, e]."""
    if x.ndim == 5:
        b, n, heads, g, e = x.shape
        steps = (*x.strides[:2], x.strides[2] if g == 1 else x.strides[3], x.strides[4])
        x = namespace(x).lib.stride_tricks.as_strided(x, (b, n, heads * g, e), steps)
    return x.transpose(0, 2, 1, 3)


def _is_aligned(x: Block) -> bool:
    """Return True if the kernels can read and write a block where it lies: heads at equal steps, features together.

    Negative steps are refused, and steps of 0, by which a broadcast block repeats its elements.
    """
    unit, steps = ALIGNED * x.itemsize, list(zip(x.shape[:-1], x.strides[:-1], strict=True))
    if x.strides[-1] != x.itemsize or _address(x) % unit or any(s < 0 or s % unit for _, s in steps):
        return False
    if any(n > 1 and not s for n, s in steps):
        return False
    return x.ndim == 4 or x.shape[3] == 1 or x.shape[2] == 1 or x.strides[2] == x.shape[3] * x.strides[3]


def _aligned(x: Block) -> Block:
    return x if _is_aligned(x) else x.copy()  # also of a contiguous block at an odd address


def _place(x: Block) -> Place:
    """Return the shape and strides of a block; a stride of 0, of a dim of one element, becomes one beyond the block."""
    steps = [s // x.itemsize for s in x.strides]
    beyond = max(n * s for n, s in zip(x.shape, steps, strict=True))
    return Place(x.shape, tuple(s or beyond for s in steps))


def _address(x: Block) -> int:
    return int(x.data.ptr)


def _run(make: Any, blocks: list[Block], bounds: tuple[int | None, int | None], scale: float) -> bool:
    """Run an operation on the current stream; False if there is no kernel for it."""
    xp = namespace(blocks[0])
    places = tuple(map(_place, blocks))
    device = xp.cuda.get_device_id()
    graph = _graph(make, device, blocks[0].dtype.name, places, bounds, float(scale))
    if graph is None:
        return False
    _library().set_stream(handle=graph.handle, stream=xp.cuda.get_current_stream().ptr)
    room = xp.empty(max(1, graph.room), np.uint8)
    graph.graph.execute({i + 1: _address(x) for i, x in enumerate(blocks)}, _address(room), handle=graph.handle)
    return True


@cache
def _library() -> Any:
    """Return the package; None where it is missing, or, with a warning, where it cannot be loaded."""
    try:
        import cudnn
    except ModuleNotFoundError:
        return None
    except Exception as error:  # no library of cuDNN's, or two: what the package raises depends on its version
        warnings.warn(f"cuDNN's package cannot be loaded; attention runs by products, slower: {error}", stacklevel=2)
        return None
    return cudnn


@cache
def _handle(device: int) -> Any:
    return _library().create_handle()


@lru_cache(maxsize=256)
def _graph(
    make: Any, device: int, dtype: str, places: tuple[Place, ...], bounds: tuple[int | None, int | None], scale: float
) -> Graph | None:
    """Return the graph of an operation; None if cuDNN has no kernel for it, with a warning that says why."""
    library = _library()
    try:
        handle = _handle(device)
        graph = library.pygraph(
            io_data_type=_kind(dtype), intermediate_data_type=library.data_type.FLOAT,
            compute_data_type=library.data_type.FLOAT, handle=handle,
        )  # fmt: skip
        options: dict[str, Any] = {"attn_scale": scale}
        if bounds[1] is not None:
            options |= {
                "diagonal_alignment": library.diagonal_alignment.TOP_LEFT, "diagonal_band_right_bound": bounds[1],
            }  # fmt: skip
            if bounds[0] is not None:
                options["diagonal_band_left_bound"] = bounds[0]
        make(library, graph, dtype, places, options)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([library.heur_mode.A, library.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return Graph(graph, int(graph.get_workspace_size()), handle)
    except (library.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        what = f"{dtype} of shapes {places[0].shape} and {places[1].shape}"
        warnings.warn(f"cuDNN has no attention for {what}, which runs by products, slower: {first}", stacklevel=2)
        return None


def _kind(dtype: str) -> Any:
    kinds = _library().data_type
    return {"float16": kinds.HALF, "bfloat16": kinds.BFLOAT16}[dtype]


def _given(graph: Any, number: int, place: Place, kind: Any) -> Any:
    """Return a tensor that the graph reads."""
    return graph.tensor(dim=list(place.shape), stride=list(place.steps), data_type=kind, uid=number)


def _made(tensor: Any, number: int, place: Place, kind: Any) -> None:
    """Make a tensor an output of the graph, with the shape, strides and dtype of the block that receives it."""
    tensor.set_output(True).set_dim(list(place.shape)).set_stride(list(place.steps)).set_data_type(kind).set_uid(number)


def _forward(library: Any, graph: Any, dtype: str, places: tuple[Place, ...], options: dict[str, Any]) -> None:
    """Add the forward pass to a graph: of q, k and v, numbers 1 to 3, to the result and the logarithms."""
    kind = _kind(dtype)
    q, k, v = (_given(graph, i + 1, places[i], kind) for i in range(3))
    out, stats = graph.sdpa(q=q, k=k, v=v, generate_stats=True, **options)
    _made(out, 4, places[3], kind)
    _made(stats, 5, places[4], library.data_type.FLOAT)


def _backward(library: Any, graph: Any, dtype: str, places: tuple[Place, ...], options: dict[str, Any]) -> None:
    """Add the backward pass to a graph: of q, k, v, the result, its gradient and the logarithms, 1 to 6."""
    kind = _kind(dtype)
    q, k, v, out, dout = (_given(graph, i + 1, places[i], kind) for i in range(5))
    stats = _given(graph, 6, places[5], library.data_type.FLOAT)
    grads = graph.sdpa_backward(
        q=q, k=k, v=v, o=out, dO=dout, stats=stats, use_deterministic_algorithm=True, **options
    )  # fmt: skip
    for i, grad in enumerate(grads):
        _made(grad, 7 + i, places[6 + i], kind)
