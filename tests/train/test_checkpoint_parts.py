"""The parts of a checkpoint: rectangles, who writes which, and what is read of a chunk."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parlinalg.errors import ConfigError
from parlinalg.nn.pretrained.tensorfile import Writer, read_header
from parlinalg.train.checkpoint_index import Chunk, Entry, Index, checksums, inside, meet, volume
from parlinalg.train.checkpoint_load import Reader
from parlinalg.train.checkpoint_pieces import rectangles, share_out
from parlinalg.train.checkpoint_writer import header_of

pytestmark = pytest.mark.serial


@given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_ranges_are_cut_into_few_rectangles(shape: list[int], data: st.DataObject) -> None:
    n = math.prod(shape)
    start = data.draw(st.integers(0, n))
    stop = data.draw(st.integers(start, n))
    flat = np.arange(n).reshape(shape)
    found = list(rectangles(tuple(shape), start, stop))
    parts = [flat[tuple(slice(a, a + k) for a, k in zip(*corner, strict=True))].reshape(-1) for corner in found]
    assert np.concatenate([np.arange(0), *parts]).tolist() == list(range(start, stop))
    assert len(found) <= max(1, 2 * len(shape) - 1)


def test_shards_that_differ_between_copies_and_ties_count_once(tune: Any) -> None:
    tune(CHECKPOINT_SPLIT=16)

    def held(name: str, group: int, counted: bool, *corners: Any) -> list[Any]:
        return [name, "float64", [8], group, counted, 8, [list(corner) for corner in corners]]

    whole, low, high, other = ([0], [8]), ([0], [5]), ([5], [3]), ([0], [4])
    everyone = [
        [held("tied", 0, True, whole), held("m", 0, True, low)],
        [held("tied", 0, False, whole), held("m", 0, True, high)],
        [held("tied", 2, True, whole), held("m", 0, False, other)],  # a copy whose shards end elsewhere
        [held("tied", 2, True, ([0], [4]))],
    ]
    seen: dict[str, Any] = {"tied": np.zeros(8, int), "m": np.zeros(8, int)}
    writers = set()
    for rank in range(4):
        for name, corners in share_out(everyone, rank).items():
            for (a,), (n,) in corners:
                seen[name][a : a + n] += 1
                writers.add((name, rank))
    assert all((count == 1).all() for count in seen.values())
    assert {("tied", 2), ("m", 0), ("m", 1)} <= writers
    assert not {("m", 2), ("tied", 3)} & writers
    with pytest.raises(ConfigError, match=r"'m' has 8 elements, of which .* hold 5"):
        share_out(everyone[:1], 0)
    everyone[1][0][1] = "float32"
    with pytest.raises(ConfigError, match="rank 1 holds 'tied' as float32"):
        share_out(everyone, 0)


@given(data=st.data())
def test_any_part_of_a_tensor_is_read_from_any_chunks(data: st.DataObject, tmp_path_factory: Any) -> None:
    """Chunks and the rectangle that is wanted are drawn; no page is read that has nothing of it."""
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    array = np.random.default_rng(0).normal(size=shape)
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    corners = [()]
    for cut in cuts:
        corners = [(*c, (a, b)) for c in corners for a, b in pairwise(cut)]
    folder = tmp_path_factory.mktemp("chunks")
    parts = {str(i): array[tuple(slice(*r) for r in corner)] for i, corner in enumerate(corners)}
    writer = Writer(folder / "f", {n: p.shape for n, p in parts.items()}, dict.fromkeys(parts, array.dtype))
    for name, part in parts.items():
        writer.write(name, part)
    writer.close()
    writer.appear()
    found = read_header(folder / "f")
    chunks = tuple(
        Chunk("f", found[str(i)].offset, tuple(a for a, _ in corner), tuple(b - a for a, b in corner),
              checksums(np.ascontiguousarray(parts[str(i)]).reshape(-1).view(np.uint8).data, 32))
        for i, corner in enumerate(corners)
    )  # fmt: skip
    index = Index(0, {}, {"f": header_of(folder / "f")}, {"x": Entry("float64", shape, chunks)}, 32)
    assert Index.parse(index.text(), "f") == index
    region = tuple(range(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape)
    out = np.empty(tuple(map(len, region)))
    with Reader(folder, index) as reader:
        reader._fill("x", index.tensors["x"], region, out)
        due = sum(_pages_of(c, region) for c in chunks if volume(meet(c.region, region)))
        assert reader.bytes_read == (due + index.files["f"].header if volume(region) else 0)
    np.testing.assert_array_equal(out, array[tuple(slice(r.start, r.stop) for r in region)])


def _pages_of(chunk: Any, region: Any) -> int:
    """Bytes of the pages, of 32, that have elements of a region."""
    flat = np.arange(math.prod(chunk.sizes)).reshape(chunk.sizes)
    part = flat[inside(meet(chunk.region, region), chunk.region)]
    return sum(min(32, 8 * flat.size - 32 * page) for page in set((part // 4).reshape(-1).tolist()))
