"""Trees of arrays: tuples, lists and dicts of them."""

from __future__ import annotations

from typing import Any

from parlinalg.autograd import Tensor


def detached(output: Any) -> Any:
    """The arrays of an output, or of a tree of them."""
    if isinstance(output, dict):
        return {key: detached(value) for key, value in output.items()}
    if isinstance(output, tuple | list):
        return type(output)(detached(value) for value in output)
    return output.data if isinstance(output, Tensor) else output


def size_of(label: Any) -> int:
    """The elements of a label, or of all of them in a tree."""
    if isinstance(label, dict):
        return sum(size_of(value) for value in label.values())
    if isinstance(label, tuple | list):
        return sum(size_of(value) for value in label)
    return int(label.size)
