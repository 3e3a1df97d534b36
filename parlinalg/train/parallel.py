"""The `parallel` dict of a configuration: how the ranks are shared out.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parlinalg.errors import ConfigError
from parlinalg.grid import factorizations
from parlinalg.schemes import Scheme, for_mode, modes, modes_for
from parlinalg.sequence import ORDERS
from parlinalg.train.keys import flag, one_of, optional, refuse, section, several, whole

DATA = "data"
RING, ULYSSES = "s", "u"
TENSOR_KEYS = ("size", "mode", "shape", "depth", "depth_on", "sequence_parallel")
PARALLEL_KEYS = ("data", "pipeline", "sequence", "tensor")


@dataclass(frozen=True)
class Parallel:
    """The ranks shared out: world = data × pipeline × sequence × tensor.

    Attributes
    ----------
    data, pipeline, sequence, tensor : int
        The size of each dimension.
    ulysses : int
        Of the ranks of a sequence, over how many attention exchanges the cut for one of the heads; these groups form
        the ring.
    order : str or None
        In which the tokens of a sequence lie; None: as the model likes it (see `order_of`).
    mode : str or None
        Of tensor parallelism.
    axes : dict of str to int
        The axes of the processor grid and their sizes: "data" where it has ranks or there is no other, then "s", the
        ring, and "u", Ulysses, where they have ranks, then the tensor axes.
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
    ulysses: int = 1
    order: str | None = None

    @property
    def ring(self) -> int:
        """The ranks of the ring over which a sequence is cut."""
        return self.sequence // self.ulysses

    def order_of(self, causal: bool) -> str:
        """The order of tokens: as the configuration says, or "zigzag" where a causal model's work is to be balanced
        over a ring, else "contiguous"."""
        return self.order or ("zigzag" if causal and self.ring > 1 else "contiguous")


def share_out(given: object, ranks: int) -> Parallel:
    """Check the `parallel` dict and share out the ranks.

    Parameters
    ----------
    given : dict or None
        Keys, each optional: `data`, `pipeline`, `sequence`, `tensor`, each an int (its size) or a dict with `size`.
        `tensor` also has `mode` (None, "1d", "2d", "2.5d", "3d", "sequence"), `shape`, `depth` and `depth_on` ("batch"
        or "k") for "2.5d", and `sequence_parallel` for "1d".  The size of `data` is inferred where it is left out.
        Where `tensor` has a mode but neither size nor shape it takes all ranks that the others leave, in the shape
        nearest to a square or cube.  `sequence` also has `ulysses`, which divides its size: over so many ranks
        attention exchanges the cut of the sequence for one of the heads, and over the others it is a ring; and `order`
        ("zigzag", "striped" or "contiguous").  The mode "sequence" is its short form.
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
    sections["sequence"] = lambda where, value: _sized(where, value, SEQUENCE_CHECKS)
    checked = section("parallel", {} if given is None else given, sections)
    tensor: dict[str, Any] = checked.get("tensor", {})
    short = tensor.get("mode") == "sequence"
    if short and "sequence" in checked:
        raise ConfigError(
            "parallel.tensor.mode='sequence' is the short form of parallel.sequence: give sequence=dict(size=…) alone, "
            "and tensor another mode, or none"
        )
    cut = _sequence(checked.get("sequence", {}))
    pipeline, sequence = checked.get("pipeline", {}).get("size", 1), cut["size"]
    if pipeline > 1:
        raise ConfigError(
            f"parallel.pipeline={pipeline}: pipeline parallelism is not there yet; use pipeline=1 (data, sequence and "
            "tensor parallelism may be combined)"
        )
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
    if short:
        sequence, count, mode = count, 1, None
    elif sequence > 1:
        scheme, axes = _cut_sequence(scheme, axes, sequence, cut["ulysses"])
    if data > 1 or not axes:
        scheme, axes = scheme.with_data(DATA), {DATA: data, **axes}
    return Parallel(data, pipeline, sequence, count, mode, axes, scheme, cut["ulysses"], cut["order"])


def _sequence(given: Mapping[str, Any]) -> dict[str, Any]:
    """The size, Ulysses and order of a sequence's cuts, checked."""
    size, ulysses = given.get("size", 1), given.get("ulysses", 1)
    if size % ulysses:
        raise ConfigError(
            f"parallel.sequence.ulysses={ulysses} does not divide parallel.sequence.size={size}, the ranks of a "
            f"sequence: it may be {_divisors(size)}"
        )
    return {"size": size, "ulysses": ulysses, "order": given.get("order")}


def _cut_sequence(
    scheme: Scheme, axes: dict[str, int], size: int, ulysses: int
) -> tuple[Scheme, dict[str, int]]:  # fmt: skip
    """The scheme and the axes within sequence parallelism: Ulysses inside, the ring outside."""
    if ulysses > 1:
        scheme, axes = scheme.with_sequence(ULYSSES, ulysses=True), {ULYSSES: ulysses, **axes}
    if size > ulysses:
        scheme, axes = scheme.with_sequence(RING), {RING: size // ulysses, **axes}
    return scheme, axes


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
SEQUENCE_CHECKS = {"size": whole(1), "ulysses": whole(1), "order": optional(one_of(*ORDERS))}


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
