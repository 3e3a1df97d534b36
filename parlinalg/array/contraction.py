"""Contractions of several arrays over any of their dims: einsum, tensordot, inner, outer, kron and cross products.

Two arrays are contracted by one product of matrices `A @ B`, with what they share and keep as batch dims, so that
the planner of products chooses what moves; where nothing is summed, or nothing but what both have is kept, by an
elementwise product.  Several are contracted in pairs, in the order of `np.einsum_path`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from itertools import pairwise
from string import ascii_letters, ascii_lowercase, ascii_uppercase
from typing import Any

import numpy as np

from parlinalg.array.core import DistArray, axis_of, delivered, dims_in_order, same_grid
from parlinalg.array.dispatch import primitive, takes_over
from parlinalg.array.joining import diagonal, stack
from parlinalg.array.reductions import settled, total
from parlinalg.array.shapes import reshape
from parlinalg.array.ufuncs import PRODUCT, operand

Labels = tuple[Hashable, ...]
SYMBOLS = ascii_uppercase + ascii_lowercase  # in the order in which an implicit output has them
_NUMPY: Any = np  # whose functions return DistArrays, which its types do not know


# ------------------------------------------------------------------------------------------------ two arrays
def contracted(a: DistArray, la: Labels, b: DistArray, lb: Labels, out: Labels) -> DistArray:
    """Return the sum of the products of two arrays over all labels of their dims that the result does not have.

    Parameters
    ----------
    la, lb : tuple
        A label for each dim.  Dims of one label have equal sizes, or one has size 1 and is repeated.
    out : tuple
        The labels of the result's dims, each once.
    """
    a, la = summed_out(a, la, (*lb, *out))
    b, lb = summed_out(b, lb, (*la, *out))
    (a, la), (b, lb) = _narrow(a, la, b, lb), _narrow(b, lb, a, la)
    (a, la), (b, lb) = summed_out(a, la, (*lb, *out)), summed_out(b, lb, (*la, *out))  # what one of them has now
    kind = np.result_type(a.dtype, b.dtype)
    both = [x for x in la if x in lb]
    batch, over = [x for x in both if x in out], [x for x in both if x not in out]
    left, right = [x for x in la if x not in lb], [x for x in lb if x not in la]
    found_labels = (*batch, *left, *right)
    if not over or not (left or right):
        a, b = _ordered(a, la, (*batch, *left, *over)), _ordered(b, lb, (*batch, *right, *over))
        if not over:
            a = a[(*(slice(None),) * (len(batch) + len(left)), *(None,) * len(right))]
            b = b[(*(slice(None),) * len(batch), *(None,) * len(left))]
        found = _NUMPY.multiply(a, b)
        if over:
            found = _total(found, tuple(range(len(batch), found.ndim)))
    else:
        sizes = dict(zip((*la, *lb), (*a.shape, *b.shape), strict=True))
        m, k, n = ([sizes[x] for x in group] for group in (left, over, right))
        lead = [sizes[x] for x in batch]
        x = _shaped(_ordered(a, la, (*batch, *left, *over)), (*lead, math.prod(m), math.prod(k)))
        y = _shaped(_ordered(b, lb, (*batch, *over, *right)), (*lead, math.prod(k), math.prod(n)))
        x, y = (v.astype(np.int32 if kind.kind == "b" else kind, copy=False) for v in (x, y))
        found = _shaped(PRODUCT[0](x, y), (*lead, *m, *n))
    return _ordered(found, found_labels, out).astype(kind, copy=False)


def summed_out(a: DistArray, labels: Labels, keep: Sequence[Hashable]) -> tuple[DistArray, Labels]:
    """Return the array with each label once, by diagonals, and without the labels that are not to be kept, by sums."""
    for x in dict.fromkeys(labels):
        while labels.count(x) > 1:
            d = labels.index(x)
            e = labels.index(x, d + 1)
            if a.shape[d] != a.shape[e]:
                raise ValueError(f"einsum: dims {d} and {e} of shape {a.shape} have one subscript, but unlike sizes")
            a = diagonal(settled(a, "einsum"), 0, d, e)
            labels = (*(y for i, y in enumerate(labels) if i not in (d, e)), x)
    over = tuple(d for d, x in enumerate(labels) if x not in keep)
    if over:
        a, labels = _total(a, over), tuple(x for x in labels if x in keep)
    return a, labels


def _total(a: DistArray, dims: tuple[int, ...]) -> DistArray:
    return a.any(dims) if a.dtype.kind == "b" else total(a, dims, a.dtype)


def _narrow(a: DistArray, la: Labels, b: DistArray, lb: Labels) -> tuple[DistArray, Labels]:
    """Return the array without its dims of size 1 that are repeated along the other array's."""
    size = dict(zip(lb, b.shape, strict=True))
    kept = [d for d, x in enumerate(la) if not (a.shape[d] == 1 and size.get(x, 1) != 1)]
    if len(kept) == a.ndim:
        return a, la
    return reshape(a, tuple(a.shape[d] for d in kept)), tuple(la[d] for d in kept)


def _ordered(a: DistArray, labels: Sequence[Hashable], order: Sequence[Hashable]) -> DistArray:
    return a if tuple(labels) == tuple(order) else a.transpose([list(labels).index(x) for x in order])


def _shaped(a: DistArray, shape: tuple[int, ...]) -> DistArray:
    return a if a.shape == shape else reshape(a, shape)


# ------------------------------------------------------------------------------------------------ einsum
def einsum(
    *operands: Any, out: Any = None, optimize: Any = False, dtype: Any = None, casting: Any = "safe", order: Any = "K"
) -> DistArray:
    """Return the sum of products of arrays that subscripts describe, as `np.einsum`.

    Parameters
    ----------
    *operands : str and DistArrays, or DistArrays each followed by a list of integers
        Subscripts such as "ij,jk", "...ii->...i", or with spaces, in all of NumPy's forms.
    optimize : bool, str or list
        The order in which pairs are contracted, as of `np.einsum_path`; by default the greedy one.

    Raises
    ------
    ValueError
        If subscripts and shapes do not fit each other.
    """
    inputs, output, arrays = parsed(operands)
    if order not in ("K", "C", "A"):
        raise TypeError(f"einsum(order={order!r}): the blocks of a DistArray lie in C order; leave order= out")
    kind = np.result_type(*(a.dtype for a in arrays)) if dtype is None else np.dtype(dtype)
    if odd := next((a for a in arrays if not np.can_cast(a.dtype, kind, casting)), None):
        raise TypeError(f"einsum: {odd.dtype} does not become {kind} under casting={casting!r}")
    terms: list[tuple[DistArray, Labels]] = [
        (a.astype(kind, copy=False), tuple(labels)) for a, labels in zip(arrays, inputs, strict=True)
    ]
    for step in _path(inputs, output, arrays, optimize):
        chosen = [terms.pop(i) for i in sorted(step, reverse=True)][::-1]
        keep = tuple(dict.fromkeys((*output, *(x for _, labels in terms for x in labels))))
        a, la = chosen[0]
        for i, (b, lb) in enumerate(chosen[1:], 2):
            later = (*keep, *(x for _, labels in chosen[i:] for x in labels))
            rest = tuple(x for x in dict.fromkeys((*la, *lb)) if x in later)
            a, la = contracted(a, la, b, lb, rest), rest
        terms.append((a, la))
    a, la = summed_out(*terms[0], output)
    found = _ordered(a, la, tuple(output))
    found = found.copy() if any(found.block is x.block for x in arrays) else found
    return delivered(found, out, "einsum")


def einsum_path(*operands: Any, optimize: Any = "greedy") -> tuple[list[Any], str]:
    """Return the order in which `einsum` contracts pairs, and a report, as `np.einsum_path`."""
    inputs, output, arrays = parsed(operands)
    return np.einsum_path(_written(inputs, output), *map(_stand_in, arrays), optimize=optimize)


def _path(inputs: list[str], output: str, arrays: list[DistArray], optimize: Any) -> list[tuple[int, ...]]:
    optimize = "greedy" if optimize is False or optimize is True else optimize
    path, _ = np.einsum_path(_written(inputs, output), *map(_stand_in, arrays), optimize=optimize)
    return path[1:]


def _written(inputs: list[str], output: str) -> str:
    return ",".join(inputs) + "->" + output


def _stand_in(a: DistArray) -> Any:
    """Return a NumPy array of the same shape that takes no memory."""
    return np.broadcast_to(np.zeros((), a.dtype), a.shape)


def parsed(operands: Sequence[Any]) -> tuple[list[str], str, list[DistArray]]:
    """Return the subscripts of each operand and of the result, a letter for each dim, and the operands."""
    if not operands:
        raise ValueError("einsum takes subscripts and at least one array")
    if isinstance(operands[0], str):
        text, values = operands[0].replace(" ", ""), list(operands[1:])
    else:
        pairs = list(zip(operands[::2], operands[1::2], strict=False))
        values = [value for value, _ in pairs]
        text = ",".join(_letters(labels) for _, labels in pairs)
        text += "->" + _letters(operands[-1]) if len(operands) % 2 else ""
    arrays: list[Any] = [operand(value, "einsum") for value in values]
    if odd := next((a for a in arrays if not isinstance(a, DistArray)), None):
        raise TypeError(f"einsum takes DistArrays, not the scalar {odd!r}; multiply by it with *")
    same_grid(arrays)
    left, arrow, right = text.partition("->")
    inputs = left.split(",")
    if len(inputs) != len(arrays):
        raise ValueError(f"einsum: {text!r} describes {len(inputs)} arrays, but {len(arrays)} are given")
    for part in (*inputs, right):
        letters = part.replace("...", "", 1)
        if odd_one := next((x for x in letters if x not in ascii_letters), None):
            raise ValueError(f"einsum: {part!r} has {odd_one!r}; subscripts are letters, '...', ',' and '->'")
    free = [x for x in SYMBOLS if x not in text]
    dots = 0
    for part, a in zip(inputs, arrays, strict=True):
        named = len(part.replace("...", ""))
        if named > a.ndim or (named < a.ndim and "..." not in part):
            raise ValueError(f"einsum: {part!r} names {named} dims of an array of shape {a.shape}")
        dots = max(dots, a.ndim - named if "..." in part else 0)
    if dots > len(free):
        raise ValueError(f"einsum: {text!r} with {dots} dims for '...' has more than {len(SYMBOLS)} subscripts")
    shared = "".join(free[:dots])
    full = [
        part.replace("...", shared[dots - (a.ndim - len(part.replace("...", ""))) :] if a.ndim >= len(part) - 2 else "")
        for part, a in zip(inputs, arrays, strict=True)
    ]
    if arrow:
        output = right.replace("...", shared)
        if dots and "..." not in right:
            raise ValueError(f"einsum: {text!r}: the result needs '...' for the {dots} dims that '...' stands for")
    else:
        once = [x for x in sorted(set("".join(inputs)) - {"."}) if "".join(full).count(x) == 1]
        output = shared + "".join(once)
    for x in output:
        if output.count(x) > 1:
            raise ValueError(f"einsum: {text!r} has {x!r} in the result twice")
        if not any(x in part for part in full):
            raise ValueError(f"einsum: {text!r} has {x!r} in the result, but in no array")
    sizes: dict[str, int] = {}
    for part, a in zip(full, arrays, strict=True):
        for x, n in zip(part, a.shape, strict=True):
            if sizes.setdefault(x, n) not in (n, 1) and n != 1:
                raise ValueError(f"einsum: {x!r} stands for dims of {sizes[x]} and of {n} items in {text!r}")
            sizes[x] = n if sizes[x] == 1 else sizes[x]
    return full, output, arrays


def _letters(labels: Any) -> str:
    return "".join("..." if x is ... else SYMBOLS[x] for x in labels)


# ------------------------------------------------------------------------------------------------ products by name
def pairs_of_dims(first: Sequence[int], second: Sequence[int], axes: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the dims of arrays of two shapes that `tensordot` sums over in pairs."""
    if isinstance(axes, int | np.integer):
        n = int(axes)
        if not 0 <= n <= min(len(first), len(second)):
            raise ValueError(f"tensordot over {n} dims of arrays of {len(first)} and {len(second)} dims")
        left, right = tuple(range(len(first) - n, len(first))), tuple(range(n))
    else:
        if not isinstance(axes, tuple | list | np.ndarray) or len(axes) != 2:
            raise TypeError(f"tensordot: axes is a whole number, or the dims of x1 and those of x2, not {axes!r}")
        lists = [d.tolist() if isinstance(d, np.ndarray) else d for d in axes]
        left, right = dims_in_order(lists[0], len(first)), dims_in_order(lists[1], len(second))
    if [first[d] for d in left] != [second[d] for d in right]:
        raise ValueError(f"tensordot: dims {left} of {tuple(first)} do not match dims {right} of {tuple(second)}")
    return left, right


def tensordot(a: Any, b: Any, axes: Any = 2) -> DistArray:
    """Return the sums of products over the last `axes` dims of a and the first of b, or over two lists of dims."""
    a, b = _array(a, "tensordot"), _array(b, "tensordot")
    left, right = pairs_of_dims(a.shape, b.shape, axes)
    la: Labels = tuple(range(a.ndim))
    lb: Labels = tuple(left[right.index(d)] if d in right else a.ndim + d for d in range(b.ndim))
    out = (*(x for x in la if x not in left), *(a.ndim + d for d in range(b.ndim) if d not in right))
    return contracted(a, la, b, lb, out)


def inner(a: Any, b: Any) -> DistArray:
    """Return the sums of products over the last dims of both; `a * b` where one has no dims."""
    a, b = operand(a, "inner"), operand(b, "inner")
    if not (isinstance(a, DistArray) and isinstance(b, DistArray)) or not a.ndim or not b.ndim:
        return a * b
    if a.shape[-1] != b.shape[-1]:
        raise ValueError(f"inner: shapes {a.shape} and {b.shape} do not end in the same number of items")
    return tensordot(a, b, (-1, -1))


def outer(a: Any, b: Any) -> DistArray:
    """Return the products of every element of one array with every element of another, [m, n]."""
    a, b = _array(a, "outer"), _array(b, "outer")
    return _NUMPY.multiply(reshape(a, (a.size, 1)), reshape(b, (1, b.size)))


def kron(a: Any, b: Any) -> DistArray:
    """Return the Kronecker product: the blocks of b, each times an element of a."""
    a, b = operand(a, "kron"), operand(b, "kron")
    if not isinstance(a, DistArray) or not isinstance(b, DistArray) or not a.ndim or not b.ndim:
        return a * b
    n = max(a.ndim, b.ndim)
    first, second = ((1,) * (n - x.ndim) + x.shape for x in (a, b))
    x = reshape(a, tuple(m for size in first for m in (size, 1)))
    y = reshape(b, tuple(m for size in second for m in (1, size)))
    return reshape(_NUMPY.multiply(x, y), tuple(p * q for p, q in zip(first, second, strict=True)))


def cross(a: Any, b: Any, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None) -> DistArray:
    """Return the cross products of vectors of three elements along a dim of each."""
    if axis is not None:
        axisa = axisb = axisc = axis
    a, b = _array(a, "cross"), _array(b, "cross")
    a, b = (_NUMPY.moveaxis(x, axis_of(at, x.ndim), -1) for x, at in ((a, axisa), (b, axisb)))
    if a.shape[-1] != 3 or b.shape[-1] != 3:
        raise ValueError(f"cross takes vectors of 3 elements, not of {a.shape[-1]} and {b.shape[-1]}")
    a, b = (x.redistribute(x.layout.with_partial(()).with_dim(x.ndim - 1, None)) for x in (a, b))
    (a0, a1, a2), (b0, b1, b2) = ([x[..., i] for i in range(3)] for x in (a, b))
    found = [a1 * b2 - a2 * b1, a2 * b0 - a0 * b2, a0 * b1 - a1 * b0]
    return stack(found, axis_of(axisc, found[0].ndim + 1))


@primitive
def multi_dot(arrays: Sequence[Any], out: Any = None) -> DistArray:
    """Return the product of two or more matrices, in an order of few operations.

    The first may be a vector, a row, and the last one a vector, a column; `out` takes the product.

    Raises
    ------
    ValueError
        If there are fewer than two, or the columns of one are not as many as the rows of the next.
    LinAlgError
        If one has other dims.
    """
    given = [_array(a, "linalg.multi_dot") for a in arrays]
    return einsum(chain(given), *given, out=out, optimize="greedy")


def chain(given: Sequence[Any]) -> str:
    """Return the subscripts of a product of matrices, the first and last of which may be vectors."""
    if len(given) < 2:
        raise ValueError(f"multi_dot takes at least two arrays, not {len(given)}")
    for i, a in enumerate(given):
        if a.ndim != 2 and not (a.ndim == 1 and i in (0, len(given) - 1)):
            raise np.linalg.LinAlgError(f"multi_dot takes matrices, and vectors at the ends; one has shape {a.shape}")
    for a, b in pairwise(given):
        if a.shape[-1] != b.shape[0]:
            raise ValueError(f"multi_dot: shapes {a.shape} and {b.shape} do not fit each other")
    letters = [SYMBOLS[i : i + 2] for i in range(len(given))]
    letters[0] = letters[0] if given[0].ndim == 2 else letters[0][1]
    letters[-1] = letters[-1] if given[-1].ndim == 2 else letters[-1][0]
    ends = [letters[0][0] if given[0].ndim == 2 else "", letters[-1][1] if given[-1].ndim == 2 else ""]
    return _written(letters, "".join(ends))


def _array(value: Any, name: str) -> DistArray:
    """Return an operand with nothing left to sum; what takes its place as it is."""
    if takes_over(value):
        return value
    found = operand(value, name)
    if not isinstance(found, DistArray):
        raise ValueError(f"np.{name} takes arrays with dims, not the scalar {value!r}; multiply by it with *")
    return settled(found, name)
