"""The parts of a checkpoint: what the files of one hold, which rank wrote it, and what is read of them."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import parlinalg as pla
from parlinalg import optim
from parlinalg.errors import CheckpointError, ConfigError
from parlinalg.nn.pretrained import Writer, read_header
from parlinalg.parallel import GradientReducer, ZeRO
from parlinalg.train.checkpoint import Index, Reader, read_index

Shape = tuple[int, ...]


def replicated(grid: pla.Grid, shapes: dict[str, Shape]) -> dict[str, pla.Parameter]:
    """Parameters that every rank of a grid holds whole."""
    values = {name: np.arange(float(math.prod(shape))).reshape(shape) for name, shape in shapes.items()}
    return {n: pla.Parameter(pla.distribute(a, grid, pla.Layout(*[None] * a.ndim)), n) for n, a in values.items()}


def sharded(grid: pla.Grid, parameters: dict[str, pla.Parameter]) -> optim.Optimizer:
    """An optimizer with one state, of which the ranks of the axis "data" have consecutive elements each, as of one flat
    array of all parameters; an element of it is its number within its parameter."""
    GradientReducer(parameters.values(), [ZeRO(1)], 1 << 30, 1 << 30)
    update = optim.SGD(list(parameters.values()), 0.1, momentum=0.9)
    for entry in update.arrange():
        (state,) = entry.names
        numbers = np.arange(entry.start, entry.start + entry.size, dtype=entry.dtype)
        update.flat.states.write(entry, state, grid.backend.from_host(numbers))
    return update


@pytest.mark.ranks(2, 3, 4, 8)
@given(shapes=st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=4))
def test_ranges_are_cut_into_few_rectangles(
    shapes: list[list[int]], folder: Path, make_grid: Callable[..., pla.Grid], world: Any
) -> None:
    """A rank's range of a flattened array is cut into at most 2·dims − 1 rectangles, in which each element is once."""
    grid, place = make_grid({"data": world.size}), folder / str(next(NUMBERS))
    held = replicated(grid, {f"p{i}": tuple(shape) for i, shape in enumerate(shapes)})
    update = sharded(grid, held)
    ranges = world.share([[e.parameter.name, e.start, e.size] for e in update.arrange()])
    checkpoints = pla.Checkpoints(place, grid.world, held, update, background=False)
    checkpoints.save(1)
    checkpoints.finish()
    with Reader(place / "step-00000001") as reader:
        for name, p in held.items():
            (state,) = (n for n in reader.index.tensors if n.startswith(f"optimizer.{name}."))
            rectangles = [r for r in reader.index.tensors[state].rectangles if math.prod(r.sizes)]
            flat = np.arange(p.size).reshape(p.shape)
            for rank, theirs in enumerate(ranges):
                ours = [c for c in rectangles if c.file.startswith(f"rank-{rank:05}.")]
                parts = [flat[tuple(slice(r.start, r.stop) for r in c.region)].reshape(-1) for c in ours]
                want = [i for n, start, size in theirs if n == name for i in range(start, start + size)]
                assert sorted(np.concatenate([np.arange(0), *parts]).tolist()) == want
                assert len(parts) <= max(1, 2 * len(p.shape) - 1)
            np.testing.assert_array_equal(reader.read(state), flat)
            np.testing.assert_array_equal(reader.read(f"model.{name}"), flat)
    grid.world.barrier()


NUMBERS = count()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("cut", [False, True])
def test_shards_that_differ_between_copies_and_ties_count_once(
    cut: bool, tune: Any, folder: Path, world: Any, backend: str
) -> None:
    """Two grids hold a tied parameter, the second one with shards that end elsewhere, or cut: the first one's counts.

    Ranks that hold the same rectangle share it out, whatever grid they are of.
    """
    tune(CHECKPOINT_SPLIT=16)
    first = world.rank < 2
    with pla.Grid({"data": 2}, world.sub((0, 1) if first else (2, 3), ()), backend) as grid:
        held = replicated(grid, {"tied": (8,), "less": (2,)} if first else {"tied": (8,), "more": (5,)})
        if cut and not first:
            held["tied"] = pla.Parameter(pla.distribute(np.arange(8.0), grid, pla.Layout("data")), "tied")
        update = sharded(grid, held)
        checkpoints = pla.Checkpoints(folder / "saved", world, held, update)
        checkpoints.save(1)
        checkpoints.finish()
        index = read_index(folder / "saved" / "step-00000001")
        writers = {}
        for name, entry in index.tensors.items():
            seen = np.zeros(entry.shape, int)
            for rectangle in entry.rectangles:
                seen[tuple(slice(r.start, r.stop) for r in rectangle.region)] += 1
            assert (seen == 1).all(), name
            writers[name] = {int(rectangle.file[5:10]) for rectangle in entry.rectangles}
        (tied,) = (name for name in index.tensors if name.startswith("optimizer.tied."))
        (more,) = (name for name in index.tensors if name.startswith("optimizer.more."))
        assert writers["model.tied"] <= ({0, 1} if cut else {0, 1, 2, 3})
        assert cut or writers["model.tied"] & {2, 3}, "copies help"
        assert writers[tied] == {0, 1}
        assert writers[more] <= {2, 3}
        for p in held.values():
            p.block[...] = -1
        for entry in update.arrange():
            update.flat.states.write(entry, entry.names[0], grid.backend.from_host(np.full(entry.size, -1.0)))
        assert checkpoints.load().step == 1
        for name, p in held.items():
            np.testing.assert_array_equal(p.gather(), np.arange(p.size), err_msg=name)
        for entry in update.arrange():
            found = grid.backend.to_host(update.flat.states.read(entry, entry.names[0])).reshape(-1)
            (rows,) = grid.block(entry.parameter.layout, entry.parameter.shape)
            np.testing.assert_array_equal(found, rows[entry.start : entry.start + entry.size])
        world.barrier()


@pytest.mark.ranks(2)
def test_ranks_that_hold_something_else_under_a_name_are_told(folder: Path, world: Any, backend: str) -> None:
    with pla.Grid({"data": 2}, world, backend) as grid:
        halves = pla.Parameter(pla.distribute(np.arange(8.0), grid, pla.Layout("data")), "m")
        lacking = pla.Checkpoints(folder / "saved", world, {"m": halves} if world.rank == 0 else {})
        with pytest.raises(ConfigError, match=r"'model\.m' has 8 elements, of which .* hold 4: all ranks that hold"):
            lacking.save(1)
        lacking.release()
    with pla.Grid({"data": 1}, world.sub((world.rank,), ()), backend) as grid:
        values = np.arange(8, dtype=("float64", "float32")[world.rank])
        tied = {"tied": pla.Parameter(pla.distribute(values, grid, pla.Layout(None)), "tied")}
        unlike = pla.Checkpoints(folder / "other", world, tied)
        with pytest.raises(ConfigError, match=r"rank 1 holds 'model\.tied' as float32\(8,\), others as float64\(8,\)"):
            unlike.save(1)
        unlike.release()


# ---------------------------------------------------------------------------------------------- what is read
PAGE = 32


@pytest.mark.serial
@given(data=st.data())
def test_any_part_of_a_tensor_is_read_from_any_rectangles(data: st.DataObject, tmp_path_factory: Any) -> None:
    """A checkpoint written by hand, as the guide says what is in one, with rectangles that are drawn, as is the one
    that is wanted; no page is read that has nothing of it."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    array = np.random.default_rng(0).normal(size=shape)
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    corners: list[Any] = [()]
    for cut in cuts:
        corners = [(*c, (a, b)) for c in corners for a, b in pairwise(cut)]
    folder = tmp_path_factory.mktemp("rectangles") / "step-00000000"
    folder.mkdir()
    parts = {str(i): array[tuple(slice(*r) for r in corner)] for i, corner in enumerate(corners)}
    writer = Writer(folder / "f", {n: p.shape for n, p in parts.items()}, dict.fromkeys(parts, array.dtype))
    for name, part in parts.items():
        writer.write(name, part)
    writer.close()
    writer.appear()
    header = write_index(folder, shape, [(corner, parts[str(i)]) for i, corner in enumerate(corners)])
    region = tuple(range(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape)
    with Reader(folder) as reader:
        found = reader.read("x", region)
        due = sum(pages_of(corner, region) for corner in corners)
        assert reader.bytes_read == (due + header if math.prod(map(len, region)) else 0)
        assert Index.parse(reader.index.text(), "f") == reader.index
        np.testing.assert_array_equal(reader.read("x"), array)
    np.testing.assert_array_equal(found, array[tuple(slice(r.start, r.stop) for r in region)])


def write_index(folder: Path, shape: Shape, rectangles: list[tuple[Any, np.ndarray]]) -> int:
    """Write the index of a tensor "x", whose rectangles the file "f" has by their numbers; its header's length."""
    contents, stored = (folder / "f").read_bytes(), read_header(folder / "f")
    header = 8 + int.from_bytes(contents[:8], "little")
    listed = []
    for i, (corner, part) in enumerate(rectangles):
        bytes_ = np.ascontiguousarray(part).tobytes()
        pages = [bytes_[at : at + PAGE] for at in range(0, len(bytes_), PAGE)]
        listed.append({
            "file": "f", "at": stored[str(i)].offset, "offsets": [a for a, _ in corner],
            "sizes": [b - a for a, b in corner], "crc32": "".join(f"{zlib.crc32(page):08x}" for page in pages),
        })  # fmt: skip
    body = {
        "step": 0, "training": {}, "page": PAGE, "files": {"f": [len(contents), header, zlib.crc32(contents[:header])]},
        "tensors": {"x": {"dtype": "float64", "shape": list(shape), "chunks": listed}},
    }  # fmt: skip
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    head = {"format": "parlinalg checkpoint", "version": 1, "digest": digest, "body": body}
    (folder / "index.json").write_text(json.dumps(head))
    return header


def pages_of(corner: Any, region: tuple[range, ...]) -> int:
    """Bytes of the pages of a rectangle that have elements of a region."""
    sizes = [b - a for a, b in corner]
    flat = np.arange(math.prod(sizes)).reshape(sizes)
    common = [(max(a, r.start), min(b, r.stop)) for (a, b), r in zip(corner, region, strict=True)]
    if any(first >= stop for first, stop in common):
        return 0
    part = flat[tuple(slice(f - a, s - a) for (f, s), (a, _) in zip(common, corner, strict=True))]
    pages = set((part * 8 // PAGE).reshape(-1).tolist())
    return sum(min(PAGE, 8 * flat.size - PAGE * page) for page in pages)


@pytest.mark.serial
def test_what_cannot_be_read_is_told(tmp_path: Path, make_grid: Any) -> None:
    held = replicated(make_grid({"data": 1}), {"a": (3, 4), "b": ()})
    checkpoints = pla.Checkpoints(tmp_path, pla.comm.SingleComm(), held)
    checkpoints.save(7)
    checkpoints.finish()
    with Reader(str(tmp_path / "step-00000007")) as reader:
        assert reader.index.step == 7
        assert float(reader.read("model.b")) == 0.0
        assert reader.read("model.a", (range(1, 3), range(4))).tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
        with pytest.raises(CheckpointError, match=r"has no tensor 'a'; it has model\.a, model\.b"):
            reader.read("a")
        for region in ((range(3),), (range(4), range(4)), (range(3), range(0, 4, 2)), (range(-1, 2), range(4))):
            with pytest.raises(CheckpointError, match=r"has the shape \(3, 4\): the region .* give a range for each"):
                reader.read("model.a", region)
    with pytest.raises(CheckpointError, match=r"is not a checkpoint, or was not completed: it has no index\.json"):
        Reader(tmp_path)
