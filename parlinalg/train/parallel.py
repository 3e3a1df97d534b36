"""The `parallel` dict of a configuration: how the ranks are shared out.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parlinalg.errors import ConfigError
from parlinalg.grid import factorizations
from parlinalg.schemes import Scheme, for_mode, modes, modes_for
from parlinalg.train.keys import flag, one_of, optional, refuse, section, several, whole

DATA = "data"
TENSOR_KEYS = ("size", "mode", "shape", "depth", "depth_on", "sequence_parallel")
PARALLEL_KEYS = ("data", "pipeline", "sequence", "tensor")


@dataclass(frozen=True)
class Parallel:
    """The ranks shared out: world = data × pipeline × sequence × tensor.

    Attributes
    ----------
    data, pipeline, sequence, tensor : int
        The size of each dimension.
    mode : str or None
        Of tensor parallelism.
    axes : dict of str to int
        The axes of the processor grid and their sizes: "data" where it has ranks or there is no other, then the tensor
        axes.
    scheme : Scheme
        The scheme on these axes.
    """

    data: int
    pipeline: int
    sequence: int
    tensor: int
    mode: str | None
    axes: dict[str, int]
    scheme: Scheme


def share_out(given: object, ranks: int) -> Parallel:
    """Check the `parallel` dict and share out the ranks.

    Parameters
    ----------
    given : dict or None
        Keys, each optional: `data`, `pipeline`, `sequence`, `tensor`, each an int (its size) or a dict with `size`.
        `tensor` also has `mode` (None, "1d", "2d", "2.5d", "3d", "sequence"), `shape`, `depth` and `depth_on` ("batch"
        or "k") for "2.5d", and `sequence_parallel` for "1d".  The size of `data` is inferred where it is left out.
        Where `tensor` has a mode but neither size nor shape it takes all ranks that the others leave, in the shape
        nearest to a square or cube.
    ranks : int
        The ranks there are.

    Raises
    ------
    ConfigError
        For an unknown key, a value out of range, a mode or shape that does not fit, or sizes that do not multiply to
        the ranks; the message says what would be right.
    """
    size = {"size": whole(1)}
    sections = {key: lambda where, value: _sized(where, value, size) for key in PARALLEL_KEYS}
    sections["tensor"] = lambda where, value: _sized(where, value, TENSOR_CHECKS)
    sections["sequence"] = lambda where, value: _sized(where, value, {**size, "ulysses": whole(1)})
    checked = section("parallel", {} if given is None else given, sections)
    pipeline, sequence = (checked.get(key, {}).get("size", 1) for key in ("pipeline", "sequence"))
    for name, count in (("pipeline", pipeline), ("sequence", sequence)):
        if count > 1:
            raise ConfigError(
                f"parallel.{name}={count}: {name} parallelism is not there yet; use {name}=1 (data and tensor "
                "parallelism may be combined)"
            )
    tensor: dict[str, Any] = checked.get("tensor", {})
    data: int | None = checked.get("data", {}).get("size")
    others = pipeline * sequence
    mode, shape = tensor.get("mode"), tensor.get("shape")
    count = tensor.get("size")
    if count is None and shape is not None:
        count = _product(shape)
    inferred = count is None
    if count is None:
        left = others * (data or 1)
        count = 1 if mode is None or ranks % left else ranks // left
    if mode is None:
        _without_mode(count, tensor)
    data = _check_world(ranks, data, others, count)
    if inferred and shape is None and mode in ("2d", "2.5d", "3d"):
        tensor = {**tensor, "shape": _nearest(mode, count, tensor.get("depth"))}
    chosen = for_mode(mode, depth_on=tensor.get("depth_on"), sequence_parallel=tensor.get("sequence_parallel") or None)
    sizes = chosen.sizes(count, tensor.get("shape"), tensor.get("depth"))
    scheme, axes = chosen.SCHEME, dict(sizes)
    if data > 1 or not axes:
        scheme, axes = scheme.with_data(DATA), {DATA: data, **axes}
    return Parallel(data, pipeline, sequence, count, mode, axes, scheme)


def _shape(where: str, value: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = several(whole(1), least=1)(where, value)
    return shape


TENSOR_CHECKS = {
    "size": optional(whole(1)),
    "mode": one_of(None, *modes()),
    "shape": optional(_shape),
    "depth": optional(whole(1)),
    "depth_on": optional(one_of("batch", "k")),
    "sequence_parallel": flag,
}


def _sized(where: str, value: Any, checks: Mapping[str, Any]) -> dict[str, Any]:
    """A dict from an int, which is its size, or from a dict."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"size": value}
    if not isinstance(value, Mapping):
        raise refuse(where, value, f"a number of ranks, or a dict with the keys {', '.join(checks)}")
    return section(where, value, checks)


def _product(shape: Sequence[int]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def _without_mode(size: int, tensor: Mapping[str, Any]) -> None:
    """Refuse tensor ranks, or options of a mode, where no mode is named."""
    if size > 1:
        raise ConfigError(
            f"parallel.tensor has size {size} but no mode: add mode=…, such as tensor=dict(size={size}, mode='1d'); "
            f"{size} ranks allow the modes {modes_for(size)}"
        )
    for key in ("shape", "depth", "depth_on"):
        if tensor.get(key) is not None:
            raise ConfigError(
                f"parallel.tensor.{key}={tensor[key]!r} needs a mode, such as mode='2.5d'; give it, or leave {key} out"
            )
    if tensor.get("sequence_parallel"):
        raise ConfigError("parallel.tensor.sequence_parallel=True needs mode='1d'")


def _check_world(ranks: int, data: int | None, others: int, tensor: int) -> int:
    """The size of data, such that all sizes multiply to the ranks."""
    if data is None:
        if ranks % (others * tensor):
            raise ConfigError(
                f"pipeline × sequence × tensor = {others * tensor} does not divide the {ranks} ranks there are: "
                f"start with a multiple of {others * tensor} ranks (mpiexec -n {others * tensor}), or use a "
                f"tensor size of {_divisors(ranks // others if ranks % others == 0 else ranks)}"
            )
        return ranks // (others * tensor)
    if data * others * tensor != ranks:
        fitting = "" if ranks % (others * tensor) else f"use data={ranks // (others * tensor)} or leave it out, or "
        raise ConfigError(
            f"data × pipeline × sequence × tensor = {data} × {others} × {tensor} = {data * others * tensor} "
            f"(pipeline × sequence = {others}), but there are {ranks} ranks: {fitting}start with mpiexec -n "
            f"{data * others * tensor}"
        )
    return data


def _divisors(n: int) -> str:
    found = [str(d) for d in range(1, n + 1) if n % d == 0]
    return " or ".join(filter(None, [", ".join(found[:-1]), found[-1]]))


def _nearest(mode: str, size: int, depth: int | None) -> tuple[int, ...] | None:
    """The shape nearest to a square or cube; with a depth that does not divide the ranks, none."""
    if mode == "2.5d" and depth is not None:
        flat = _nearest("2d", size // depth, None)
        return None if size % depth or flat is None else (depth, *flat)
    return min(factorizations(size, 2 if mode == "2d" else 3), key=lambda shape: (max(shape) - min(shape), shape))
