"""The `parallel` dict of a configuration: how the ranks are shared out.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from parlinalg.errors import ConfigError
from parlinalg.grid import factorizations
from parlinalg.schemes import Scheme, for_mode, modes, modes_for
from parlinalg.sequence import ORDERS
from parlinalg.train.keys import Check, flag, listed, one_of, optional, refuse, section, several, whole
from parlinalg.train.options import Zero

__all__ = ["Parallel", "share_out", "with_zero"]

DATA, REPLICA = "data", "replica"
RING, ULYSSES = "s", "u"
PARTITIONS = ("uniform", "parameters", "flops", "time")
TENSOR_KEYS = ("size", "mode", "shape", "depth", "depth_on", "sequence_parallel")
PARALLEL_KEYS = ("data", "pipeline", "sequence", "tensor")
_ranks = whole(1, 1_000_000)


@dataclass(frozen=True)
class Parallel:
    """The ranks shared out: world = data × pipeline × sequence × tensor.

    Attributes
    ----------
    data, pipeline, sequence, tensor : int
        The size of each dimension; where the ranks of a pipeline have unlike grids, `tensor` is that of the first.
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
    partition : str or tuple of int
        How layers are shared out among the stages of a pipeline; a tuple is the layers of each.
    parts : tuple of Parallel
        By pipeline rank what its grid is, where they are unlike; else empty.
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
    partition: str | tuple[int, ...] = "uniform"
    parts: tuple[Parallel, ...] = ()

    def at(self, rank: int) -> Parallel:
        """What the grid of a pipeline rank is."""
        return self.parts[rank] if self.parts else self

    @property
    def grids(self) -> tuple[dict[str, int], ...]:
        """By pipeline rank: the axes of its grid and their sizes."""
        return tuple(self.at(p).axes for p in range(self.pipeline))

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
        ("zigzag", "striped" or "contiguous").  The mode "sequence" is its short form.  `pipeline` also has `partition`
        ("uniform", "parameters", "flops", "time" or the layers of each stage), and `tensor`, a list with what each of
        its ranks has in place of `tensor`.
    ranks : int
        The ranks there are.

    Raises
    ------
    ConfigError
        For an unknown key, a value out of range, a mode or shape that does not fit, or sizes that do not multiply to
        the ranks; the message says what would be right.
    """
    size = {"size": _ranks}
    checks = {"tensor": TENSOR_CHECKS, "sequence": SEQUENCE_CHECKS, "pipeline": PIPELINE_CHECKS}
    sections: dict[str, Check] = {key: partial(_sized, checks=checks.get(key, size)) for key in PARALLEL_KEYS}
    checked = section("parallel", {} if given is None else given, sections)
    tensor: dict[str, Any] = checked.get("tensor", {})
    if tensor.get("mode") == "sequence" and "sequence" in checked:
        raise ConfigError(
            "parallel.tensor.mode='sequence' is the short form of parallel.sequence: give sequence=dict(size=…) alone, "
            "and tensor another mode, or none"
        )
    cut = _sequence(checked.get("sequence", {}))
    pipeline, each = _pipeline(checked.get("pipeline", {}))
    if each is not None:
        if "tensor" in checked:
            raise ConfigError(
                "parallel.tensor and parallel.pipeline.tensor are both given: the one is of all ranks of the pipeline, "
                "the other of each; give one of them"
            )
        return _unlike(ranks, checked.get("data", {}).get("size"), pipeline, cut, each)
    data: int | None = checked.get("data", {}).get("size")
    others = pipeline["size"] * cut["size"]
    count = _count(tensor)
    if inferred := count is None:
        left = others * (data or 1)
        count = 1 if tensor.get("mode") is None or ranks % left else ranks // left
    data = _check_world(ranks, data, others, count)
    return _one(data, pipeline, cut, count, tensor, inferred)


def _count(tensor: Mapping[str, Any]) -> int | None:
    """The ranks of tensor parallelism as given, by size or shape."""
    count: int | None = tensor.get("size")
    if count is None and tensor.get("shape") is not None:
        count = _product(tensor["shape"])
    if tensor.get("mode") is None:
        _without_mode(1 if count is None else count, tensor)
    return count


def _one(
    data: int,
    pipeline: Mapping[str, Any],
    cut: Mapping[str, Any],
    count: int,
    tensor: Mapping[str, Any],
    inferred: bool = False,
) -> Parallel:
    """The ranks shared out, once each dimension has its size."""
    mode, sequence = tensor.get("mode"), cut["size"]
    if inferred and tensor.get("shape") is None and mode in ("2d", "2.5d", "3d"):
        tensor = {**tensor, "shape": _nearest(mode, count, tensor.get("depth"))}
    chosen = for_mode(mode, depth_on=tensor.get("depth_on"), sequence_parallel=tensor.get("sequence_parallel") or None)
    sizes = chosen.sizes(count, tensor.get("shape"), tensor.get("depth"))
    scheme, axes = chosen.SCHEME, dict(sizes)
    if mode == "sequence":
        sequence, count, mode = count, 1, None
    elif sequence > 1:
        scheme, axes = _cut_sequence(scheme, axes, sequence, cut["ulysses"])
    if data > 1 or not axes:
        scheme, axes = scheme.with_data(DATA), {DATA: data, **axes}
    return Parallel(
        data, pipeline["size"], sequence, count, mode, axes, scheme, cut["ulysses"], cut["order"], pipeline["partition"]
    )


def _pipeline(given: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[dict[str, Any], ...] | None]:
    """The size and partition of a pipeline, and the tensor parallelism of each of its ranks where that is given."""
    each, size = given.get("tensor"), given.get("size")
    partition = given.get("partition", "uniform")
    if each is not None:
        size = len(each) if size is None else size
        if len(each) != size:
            raise ConfigError(
                f"parallel.pipeline.tensor lists {len(each)} grids for a pipeline of {size} ranks: give {size}, or one "
                "for all by parallel.tensor"
            )
    size = 1 if size is None else size
    if size == 1 and "size" not in given and not isinstance(partition, str) and len(partition) > 1:
        raise ConfigError(
            f"parallel.pipeline.partition={list(partition)} shares out layers, but the pipeline has one rank: give "
            f"pipeline=dict(size={len(partition)}, …), or leave the partition out"
        )
    if size == 1:
        partition = "uniform"
    return {"size": size, "partition": partition}, each


def _unlike(
    ranks: int, data: int | None, pipeline: Mapping[str, Any], cut: Mapping[str, Any],
    each: Sequence[Mapping[str, Any]],
) -> Parallel:  # fmt: skip
    """The ranks shared out where the ranks of a pipeline have tensor parallelism of their own."""
    counts = []
    for p, tensor in enumerate(each):
        if tensor.get("mode") == "sequence":
            raise ConfigError(
                f"parallel.pipeline.tensor[{p}].mode='sequence': sequences are cut alike in the whole pipeline, by "
                "parallel.sequence=dict(size=…)"
            )
        count = _count(tensor)
        if count is None and tensor.get("mode") is not None:
            raise ConfigError(f"parallel.pipeline.tensor[{p}] needs a size or a shape, such as size=2")
        counts.append(1 if count is None else count)
    whole = cut["size"] * sum(counts)
    total = f"sequence × the pipeline's grids = {cut['size']} × ({' + '.join(map(str, counts))}) = {whole}"
    if ranks % whole or (data is not None and data * whole != ranks):
        asked = whole * (data or 1)
        raise ConfigError(
            f"{total}{'' if data is None else f', and data × that = {asked}'}, but there are {ranks} ranks: start with "
            f"mpiexec -n {asked}"
        )
    parts = tuple(_one(ranks // whole, pipeline, cut, n, t) for n, t in zip(counts, each, strict=True))
    return parts[0] if all(p == parts[0] for p in parts) else replace(parts[0], parts=parts)


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
    shape: tuple[int, ...] = several(_ranks, least=1)(where, value)
    return shape


TENSOR_CHECKS = {
    "size": optional(_ranks),
    "mode": one_of(None, *modes()),
    "shape": optional(_shape),
    "depth": optional(_ranks),
    "depth_on": optional(one_of("batch", "k")),
    "sequence_parallel": flag,
}


def _partition(where: str, value: Any) -> str | tuple[int, ...]:
    """How layers are shared out: a name, or the layers of each stage."""
    if isinstance(value, str):
        name: str = one_of(*PARTITIONS)(where, value)
        return name
    if not isinstance(value, Sequence):
        raise refuse(where, value, f"one of {listed(PARTITIONS)}, or a list of the layers of each stage")
    counts: tuple[int, ...] = several(whole(0), least=1)(where, value)
    return counts


def _grids(where: str, value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise refuse(where, value, "a list, with the tensor parallelism of each rank of the pipeline")
    found: tuple[dict[str, Any], ...] = several(lambda w, v: _sized(w, v, TENSOR_CHECKS), least=1)(where, value)
    return found


PIPELINE_CHECKS: dict[str, Check] = {"size": _ranks, "partition": _partition, "tensor": _grids}
SEQUENCE_CHECKS = {"size": _ranks, "ulysses": _ranks, "order": optional(one_of(*ORDERS))}


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
            what, n = ("tensor size", ranks // others) if ranks % others == 0 else ("pipeline × sequence", ranks)
            raise ConfigError(
                f"pipeline × sequence × tensor = {others * tensor} does not divide the {ranks} ranks there are: "
                f"start with a multiple of {others * tensor} ranks (mpiexec -n {others * tensor}), or use a {what} of "
                f"{_divisors(n)}"
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


def with_zero(parallel: Parallel, zero: Zero) -> Parallel:
    """Return the ranks with the data axis as two, where ZeRO is within groups, and weights cut for its stage 3.

    Raises
    ------
    ConfigError
        If the groups do not divide the data parallel ranks.
    """
    if parallel.parts:
        parts = tuple(with_zero(part, zero) for part in parallel.parts)
        return replace(parts[0], parts=parts)
    if not zero.stage or DATA not in parallel.axes:
        return parallel
    scheme, axes, within = parallel.scheme, parallel.axes, zero.within or parallel.data
    if parallel.data % within:
        divisors = ", ".join(str(d) for d in range(1, parallel.data + 1) if parallel.data % d == 0)
        raise ConfigError(
            f"zero.within={within} does not divide the {parallel.data} data parallel ranks: it may be {divisors}"
        )
    if within < parallel.data:
        scheme = scheme.factored(DATA, (REPLICA, DATA))
        axes = {REPLICA: parallel.data // within, **{a: within if a == DATA else n for a, n in axes.items()}}
    if zero.stage == 3:
        scheme = scheme.with_weights_cut(DATA)
    return replace(parallel, scheme=scheme, axes=axes)
