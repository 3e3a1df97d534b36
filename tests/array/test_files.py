"""Arrays in files: every format on every grid, files of other programs, and what is left when something fails."""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tracemalloc
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

import parlinalg as pla
from parlinalg.array import files, formats
from parlinalg.errors import FileError
from parlinalg.layout import Layout
from tests.cases import DTYPES, GRIDS, check, grids, layouts, numbers, pairs, terms
from tests.launching import launch

SUFFIXES = [".npy", ".h5", ".zarr"]
SHAPES = [(), (0,), (5,), (1, 1), (7, 4), (3, 0), (2, 3, 5), (1, 13)]
each_format = pytest.mark.parametrize("suffix", SUFFIXES)


def plain(path, dataset=None):
    """The array that NumPy, h5py and zarr themselves find in a file."""
    if path.suffix == ".npy":
        return np.load(path)
    if path.suffix == ".h5":
        with h5py.File(path, "r") as file:
            return np.asarray(file[dataset or "data"][()])
    return np.asarray(zarr.open_array(store=str(path), path=dataset or "", mode="r")[()])


def on_first(world, function):
    """Call a function on rank 0 when all have come here, while the others wait."""
    world.barrier()
    if world.rank == 0:
        function()
    world.barrier()


def left(world, folder):
    """What is in a folder, once all ranks have come here."""
    world.barrier()
    found = sorted(os.listdir(folder))
    world.barrier()
    return found


@pytest.fixture(scope="module", params=[0, 1, 2], ids=["one axis", "two axes", "three axes"])
def grid(request, world, backend):
    return pla.Grid(grids(world.size)[request.param], world, backend, idle=True)


@pytest.fixture(scope="module")
def square(world, backend):
    """One grid of two axes, r and c."""
    return pla.Grid(dict(zip("rc", grids(world.size)[1].values())), world, backend, idle=True)


BUFFERS = [{"MOVE_BUFFER": 5, "FILE_RUN": 1 << 16}, {"MOVE_BUFFER": 5, "FILE_RUN": 1}, {"MOVE_BUFFER": 1 << 19}]


# ------------------------------------------------------------------------------------------ round trips


@each_format
def test_any_layout_there_and_back(grid, world, folder, tune, suffix):
    """What one layout writes NumPy, h5py and zarr read, and every other layout."""
    path = folder / f"x{suffix}"
    every = {n: layouts(grid.axes, n) for n in range(4)}

    @given(st.data())
    def body(data):
        tune(**data.draw(st.sampled_from(BUFFERS)), must=False)
        shape = data.draw(st.sampled_from(SHAPES))
        dtype = data.draw(st.sampled_from([np.float64, np.int16, np.complex64]))
        layout, other = (data.draw(st.sampled_from(every[len(shape)])) for _ in range(2))
        array = numbers(shape, dtype, data.draw(st.integers(0, 9)))
        x = terms(array, grid, layout)
        if shape and data.draw(st.booleans()):
            x, array = x.T, array.T
        pla.save(path, x)
        y = pla.load(path, grid=grid, layout=other)
        assert y.dtype == array.dtype
        assert y.layout == other
        check(y, array)
        on_first(world, lambda: np.testing.assert_array_equal(plain(path), array))

    body()
    assert left(world, folder) == [path.name]


@each_format
def test_every_dtype(make_grid, world, folder, suffix):
    grid = make_grid(grids(world.size)[1])
    path = folder / f"x{suffix}"
    for dtype in DTYPES:
        array = numbers((5, 6), dtype)
        pla.save(path, pla.distribute(array, grid, Layout("a", "b")))
        found = pla.load(path, grid=grid, layout=Layout(None, "b"))
        assert found.dtype == dtype
        check(found, array)
        bits = plain(path)
        assert bits.dtype.name == dtype.name or dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(bits.view(dtype), array)
        world.barrier()


@each_format
def test_from_one_grid_to_another_and_on_idle_ranks(make_grid, world, folder, suffix):
    array, path = numbers((9, 5)), folder / f"x{suffix}"
    whole = make_grid(GRIDS[world.size][0])
    part = make_grid({"r": max(1, world.size - 1), "c": 1})
    pla.save(path, pla.distribute(array, part, Layout("c", "r")))
    check(pla.load(path, grid=whole, layout=Layout("a", None)), array)
    pla.save(path, pla.distribute(array, whole, Layout(None, None)))
    found = pla.load(path, grid=part, layout=Layout("r", None, partial="c"))
    check(found, array)
    if not part.inside:
        assert found.block.size == 0
    pla.save(path, pla.distribute(np.array(2.5), part, Layout()))
    assert pla.load(path, grid=part).item() == 2.5


@each_format
def test_the_default_grid_and_layout(grid, folder, suffix):
    with_default = pla.default_grid()
    pla.set_default_grid(grid)
    try:
        x = pla.ones((6, 4))
        pla.save(folder / f"x{suffix}", x)
        y = pla.load(str(folder / f"x{suffix}"))
        assert (y.grid, y.layout) == (grid, grid.default_layout((6, 4)))
        assert (x == y).all()
    finally:
        pla.set_default_grid(with_default)


@pytest.mark.parametrize("options", [
    {"suffix": ".h5", "compression": "gzip"}, {"suffix": ".h5", "compression": "lzf", "chunks": (3, 2)},
    {"suffix": ".hdf5", "chunks": (100, 1)}, {"suffix": ".zarr", "compression": "zstd"},
    {"suffix": ".zarr", "compression": "gzip", "chunks": (4, 3)}, {"suffix": ".zarr", "compression": "blosc"},
    {"suffix": ".zarr", "chunks": (1, 100)},
], ids=str)  # fmt: skip
def test_chunks_and_compression(grid, world, folder, tune, options):
    options = dict(options)
    array = np.arange(66.0).reshape(11, 6)
    path = folder / f"x{options.pop('suffix')}"
    tune(MOVE_BUFFER=7)
    for layout, other in pairs(layouts(grid.axes, 2), layouts(grid.axes, 2, partial=False), 6):
        pla.save(path, terms(array, grid, layout), **options)
        check(pla.load(path, grid=grid, layout=other), array)
        if world.rank == 0:
            if path.suffix == ".zarr":
                np.testing.assert_array_equal(plain(path), array)
                found = zarr.open_array(store=str(path), mode="r").chunks
            else:
                with h5py.File(path, "r") as file:
                    np.testing.assert_array_equal(file["data"][...], array)
                    found = file["data"].chunks
                    assert file["data"].compression == options.get("compression")
            assert "chunks" not in options or found == tuple(np.minimum(options["chunks"], array.shape))
        world.barrier()


@pytest.mark.serial
def test_chunks_fit_blocks(tune):
    def blocks(n, parts):
        return [(formats.piece(n, parts, i), range(6)) for i in range(parts)]

    assert formats._fitting_chunks(blocks(12, 3)) == (4, 6)
    assert formats._fitting_chunks(blocks(10, 3)) == (4, 6)
    tune(MOVE_BUFFER=12)
    assert formats._fitting_chunks(blocks(12, 3)) == (2, 6)
    assert formats._fitting_chunks(blocks(15, 3)) == (1, 6)  # 5 rows fall into no two or three equal parts
    assert formats._fitting_chunks([(), ()]) == ()
    pieces = list(formats._pieces((range(1, 6), range(6)), 12, (2, 1)))
    assert pieces == [(range(1, 2), range(6)), (range(2, 4), range(6)), (range(4, 6), range(6))]
    assert list(formats._pieces((range(4), range(6)), 3, (2, 2))) == [
        (range(i, i + 2), range(j, j + 2)) for i in (0, 2) for j in (0, 2, 4)
    ]  # a chunk is the least


# ------------------------------------------------------------------------------------------ files of other programs


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)], ids=str)
def test_files_of_numpy(square, world, folder, tune, order, version):
    tune(MOVE_BUFFER=5)
    for dtype in ("<f8", ">f8", ">i2", "?", ">c8"):
        array = np.asarray(numbers((7, 5, 3)).astype(dtype), order=order)

        def write():
            with open(folder / "x.npy", "wb") as file:
                np.lib.format.write_array(file, array, version)

        on_first(world, write)
        for layout, _ in pairs(layouts(square.axes, 3), [0], 4):
            found = pla.load(folder / "x.npy", grid=square, layout=layout)
            assert found.dtype == array.dtype.newbyteorder("=")
            assert found.block.dtype.isnative
            check(found, array)
        world.barrier()


def test_files_of_h5py(square, world, folder, tune):
    tune(MOVE_BUFFER=5)
    array = numbers((7, 5))

    def write():
        with h5py.File(folder / "x.h5", "w") as file:
            file.create_dataset("big", data=array.astype(">f4"), chunks=(3, 2), compression="gzip", shuffle=True)
            file["group/whole"] = array.astype(np.int8)
            file["group/none"] = h5py.Empty("f4")
            file["text"] = "words"

    on_first(world, write)
    for layout, _ in pairs(layouts(square.axes, 2), [0], 4):
        found = pla.load(folder / "x.h5", grid=square, layout=layout, dataset="big")
        assert (found.dtype, found.block.dtype.isnative) == (np.float32, True)
        check(found, array)
        check(pla.load(folder / "x.h5", grid=square, layout=layout, dataset="/group/whole", dtype=float), array)
    for dataset, text in {
        None: r"dataset= is needed: it has the datasets 'big', 'group/none', 'group/whole', 'text'",
        "group": r"x.h5, dataset 'group', cannot be read: it has no such dataset; it has 'big', ",
        "group/none": "it is empty, without a shape",
        "text": "it holds object",
    }.items():
        with pytest.raises(FileError, match=text):
            pla.load(folder / "x.h5", grid=square, dataset=dataset)


def test_files_of_zarr(square, world, folder, tune):
    tune(MOVE_BUFFER=5)
    array = numbers((7, 5))

    def write():
        for name, options in {
            "two": {"zarr_format": 2, "dtype": ">f8"},
            "shards": {"shards": (4, 4), "chunks": (2, 2), "dtype": "f4"},
            "sparse": {"chunks": (2, 2), "dtype": "f8"},
        }.items():
            z = zarr.create_array(store=str(folder / f"{name}.zarr"), shape=array.shape, **options)
            z[: 4 if name == "sparse" else 7] = array[: 4 if name == "sparse" else 7]

    on_first(world, write)
    for layout, _ in pairs(layouts(square.axes, 2), [0], 4):
        for name in ("two", "shards"):
            check(pla.load(folder / f"{name}.zarr", grid=square, layout=layout), array)
        check(pla.load(folder / "sparse.zarr", grid=square, layout=layout), array * (np.arange(7) < 4)[:, None])


@pytest.mark.parametrize("suffix", [".h5", ".zarr"])
def test_other_datasets_of_a_file_stay(square, world, folder, suffix):
    path, array = folder / f"x{suffix}", numbers((4, 3))
    x = pla.distribute(array, square, square.default_layout(array.shape))
    pla.save(path, x, dataset="b/one")
    check(pla.load(path, grid=square), array)
    with pytest.raises(FileError, match="dataset 'b', cannot be written: it is a group: choose another name"):
        pla.save(path, x, dataset="b")
    check(pla.load(path, grid=square), array)
    pla.save(path, 2 * x, dataset="two")
    pla.save(path, 3 * x, dataset="b/one", chunks=(2, 2))
    check(pla.load(path, grid=square, dataset="two"), 2 * array)
    check(pla.load(path, grid=square, dataset="b/one"), 3 * array)
    np.testing.assert_array_equal(plain(path, "b/one"), 3 * array)
    with pytest.raises(FileError, match="dataset 'b', cannot be written: it is a group: choose another name"):
        pla.save(path, x, dataset="b")
    assert left(world, folder) == [path.name]
    check(pla.load(path, grid=square, dataset="two"), 2 * array)


def test_zarr_groups_keep_their_consolidated_metadata(square, world, folder):
    path, x = folder / "x.zarr", pla.ones((4, 3), square, Layout(None, None))
    pla.save(path, x, dataset="one")

    def consolidate():
        with pytest.warns(UserWarning, match="onsolidated"):
            zarr.consolidate_metadata(str(path))

    on_first(world, consolidate)
    pla.save(path, pla.ones((6,), square, Layout(None)), dataset="one")
    pla.save(path, x, dataset="two")
    assert zarr.open_group(store=str(path), mode="r")["one"].shape == (6,)
    assert pla.load(path, grid=square, dataset="two").shape == (4, 3)


def test_a_zarr_folder_is_replaced_only_by_its_like(square, world, folder):
    x = pla.ones((4, 3), square, Layout(None, None))
    pla.save(folder / "array.zarr", x)
    pla.save(folder / "group.zarr", x, dataset="one")

    def others():
        (folder / "mine.zarr").mkdir()
        (folder / "mine.zarr" / "thesis.txt").write_text("words")
        (folder / "file.zarr").write_text("words")

    on_first(world, others)
    for name, dataset, text in (
        ("array", "one", "the folder is one array: leave out dataset="), ("group", None, "give dataset="),
        ("mine", None, "cannot be written"), ("file", None, "it is a file, not a folder"),
    ):  # fmt: skip
        with pytest.raises(FileError, match=text):
            pla.save(folder / f"{name}.zarr", x, dataset=dataset)
    assert left(world, folder) == ["array.zarr", "file.zarr", "group.zarr", "mine.zarr"]
    assert (folder / "mine.zarr" / "thesis.txt").read_text() == "words"
    with pytest.raises(FileError, match=r"array.zarr, dataset 'one', cannot be read: it is one array"):
        pla.load(folder / "array.zarr", grid=square, dataset="one")


# ------------------------------------------------------------------------------------------ errors


@each_format
def test_missing_files_and_wrong_arguments(square, folder, suffix):
    x = pla.ones((4, 3), square, Layout(None, None))
    path = folder / f"x{suffix}"
    with pytest.raises(FileError, match=rf"^{path} cannot be read: .*[Nn]o such"):
        pla.load(path, grid=square)
    with pytest.raises(OSError, match=f"{folder}/none/x{suffix}.* cannot be written: there is no folder"):
        pla.save(folder / "none" / path.name, x)
    with pytest.raises(ValueError, match=r"'x.txt': the suffix of a path names its format, one of .npy, .h5, .hdf5, "):
        pla.save("x.txt", x)
    with pytest.raises(ValueError, match="the suffix of a path"):
        pla.load("x")
    with pytest.raises(TypeError, match=r"save takes a DistArray, not ndarray; parlinalg.asarray"):
        pla.save(path, np.ones(3))
    with pytest.raises(ValueError, match="compression='zip': "):
        pla.save(path, x, compression="zip")
    with pytest.raises(ValueError, match=r"chunks.*: (an array of shape \(4, 3\) has a positive|.npy files have none)"):
        pla.save(path, x, chunks=(2, 0) if suffix != ".npy" else (2, 2))
    if suffix == ".npy":
        for call in (lambda: pla.load(path, grid=square, dataset="x"), lambda: pla.save(path, x, dataset="x")):
            with pytest.raises(ValueError, match=r"an .npy file holds one array, which has no name"):
                call()
    else:
        with pytest.raises(ValueError, match=r"dataset='a/../b' is not a name"):
            pla.save(path, x, dataset="a/../b")
    pla.save(path, pla.ones((4, 3), square, Layout(None, None), dtype=np.int64))
    for dtype in (np.float32, np.int32, bool, np.uint64):
        with pytest.raises(TypeError, match=rf"{path.name}.* holds int64, which {np.dtype(dtype)} cannot hold"):
            pla.load(path, grid=square, dtype=dtype)
    assert pla.load(path, grid=square, dtype=complex).dtype == np.complex128
    with pytest.raises(pla.LayoutError, match="describes 1 dims"):
        pla.load(path, grid=square, layout=Layout("r"))


def test_damaged_npy_files(square, world, folder):
    path = folder / "x.npy"
    pla.save(path, pla.ones((40, 6), square, Layout(None, None)))
    data = path.read_bytes()
    world.barrier()
    for text, bad in {
        r"it is cut short: it has 200 bytes, float64 of shape \(40, 6\) takes 2048": data[:200],
        "it is longer than its array: it has 2049 bytes": data + b"?",
        "EOF: reading magic string": data[:4],
        "the magic string is not correct": b"XXXXXX" + data[6:],
        "its version .* is unknown": data[:6] + b"\x09" + data[7:],
        "Header does not contain the correct keys": data.replace(b"'shape'", b"'shaqe'"),
        "its header is damaged": data.replace(b"(40, 6)", b"(-4, 6)"),
        "it holds object": data.replace(b"'<f8'", b"'|O8'"),
        "it holds <U8": data.replace(b"'<f8'", b"'<U8'"),
    }.items():
        on_first(world, lambda bad=bad: path.write_bytes(bad))
        with pytest.raises(FileError, match=rf"^{path} cannot be read: {text}"):
            pla.load(path, grid=square)
        world.barrier()
    on_first(world, lambda: (path.unlink(), os.mkfifo(path)))
    with pytest.raises(FileError, match=r"it is a FIFO, not a file"):
        pla.load(path, grid=square)


def test_damaged_hdf5_files(square, world, folder):
    path, array = folder / "x.h5", np.random.default_rng(0).random((40, 30))
    pla.save(path, pla.distribute(array, square, Layout(None, None)), chunks=(10, 10))
    data = path.read_bytes()
    flipped = bytearray(data)
    at = data.index(array[15:16, 5:7].tobytes())
    flipped[at] ^= 1
    for text, bad in {"": data[:-500], "dataset 'data', ": bytes(flipped), " ": b"words"}.items():
        world.barrier()
        on_first(world, lambda bad=bad: path.write_bytes(bad))
        with pytest.raises(FileError, match=rf"{path}.*{text}.*cannot be read: "):
            pla.load(path, grid=square)


def test_damaged_zarr_folders(square, world, folder):
    path, array = folder / "x.zarr", np.random.default_rng(0).random((40, 30))
    pla.save(path, pla.distribute(array, square, Layout(None, None)), chunks=(10, 10), dataset="a")
    chunk, about = path / "a" / "c" / "1" / "0", path / "a" / "zarr.json"
    data = chunk.read_bytes()
    for text, change in {
        "its chunk c/1/0 is missing": chunk.unlink,
        "cut short": lambda: chunk.write_bytes(data[:-7]),
        "changed": lambda: chunk.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:]),
        "metadata": lambda: about.write_text(about.read_text()[:50]),
    }.items():
        on_first(world, change)
        name = r"(, dataset 'a',)?" if text == "metadata" else ", dataset 'a',"
        text = {"cut short": "Stored and computed", "changed": "Stored and computed", "metadata": ""}.get(text, text)
        with pytest.raises(FileError, match=rf"{path}{name} cannot be read: {text}"):
            pla.load(path, grid=square, dataset="a")
        world.barrier()


@each_format
@pytest.mark.mpi(min_size=2)
def test_one_rank_that_cannot_read(square, world, folder, suffix, monkeypatch):
    """Its error is that of all ranks, whether it meets it at first or in the middle."""
    path = folder / f"x{suffix}"
    pla.save(path, pla.ones((40, 6), square, Layout(None, None)))

    def fails(*_):
        raise PermissionError(errno.EACCES, "Permission denied")

    last = world.size - 1
    for name in ("open", "read"):
        with monkeypatch.context() as patch:
            if world.rank == last:
                patch.setattr(files._format(path, pla.comm.SingleComm()), name, fails)
            text = rf"^rank {last}, reading: {path}.* cannot be read: Permission denied"
            with pytest.raises(FileError, match=text):
                pla.load(path, grid=square)
        assert pla.load(path, grid=square).shape == (40, 6)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_see_different_files(square, world, folder):
    np.save(folder / f"{min(world.rank, 1)}.npy", np.ones(4 + min(world.rank, 1)))
    world.barrier()
    os.replace(folder / "1.npy", folder / "other.npy") if world.rank == 1 else None
    world.barrier()
    path = folder / ("0.npy" if world.rank == 0 else "other.npy")
    with pytest.raises(FileError, match=r"rank 0 finds <f8\(4,\), rank 1 <f8\(5,\); all ranks must see the same file"):
        pla.load(path, grid=square)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_save_differently(square, world, folder):
    x = pla.ones((4, 3), square, Layout(None, None))
    with pytest.raises(FileError, match=r"ranks save differently: rank 0 with .*0.npy'.*, rank 1 with .*1.npy'"):
        pla.save(folder / f"{world.rank}.npy", x)
    with pytest.raises(FileError, match=r"ranks save differently"):
        pla.save(folder / "x.zarr", x, chunks=(1 + min(world.rank, 1), 1))
    assert left(world, folder) == []


@pytest.mark.parametrize("package", ["h5py", "zarr"])
def test_a_missing_package_is_named_with_its_extra(square, world, folder, package, monkeypatch):
    if world.rank == world.size - 1:
        monkeypatch.setitem(sys.modules, package, None)
    suffix, extra = {"h5py": (".hdf5", "hdf5"), "zarr": (".zarr", "zarr")}[package]
    where = rf" \(missing on rank {world.size - 1}\)" if world.size > 1 else ""
    text = rf"^{suffix} files need the package {package}{where}: pip install 'parlinalg\[{extra}\]'"
    with pytest.raises(ImportError, match=text):
        pla.load(folder / f"x{suffix}", grid=square)
    with pytest.raises(ImportError, match=text):
        pla.save(folder / f"x{suffix}", pla.ones(3, square, Layout(None)))
    assert left(world, folder) == []


@each_format
@pytest.mark.parametrize("step", ["create", "attach", "write", "finish", "appear"])
def test_a_failed_save_leaves_the_old_file(square, world, folder, tune, suffix, step, monkeypatch):
    tune(MOVE_BUFFER=7, must=False)
    path, array = folder / f"x{suffix}", numbers((8, 6))
    pla.save(path, pla.distribute(array, square, Layout(None, None)))
    kind = files._format(path, pla.comm.SingleComm())
    last = 0 if step in ("create", "appear") or suffix == ".h5" else world.size - 1
    calls = []

    def fails(self, *given):
        calls.append(given)
        if step != "write" or len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return plainly(self, *given)

    plainly = getattr(kind, step)
    x = pla.distribute(numbers((8, 6), seed=1), square, Layout(*(square.axes,), None))
    for fault in (fails, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)):
        if fault is not fails and world.size > 1:
            continue  # the others would wait
        with monkeypatch.context() as patch:
            if world.rank == last:
                patch.setattr(kind, step, fault)
            expected = FileError if fault is fails else KeyboardInterrupt
            who = f"^rank {last}, writing: " if world.size > 1 and fault is fails else ""
            with pytest.raises(expected, match=f"{who}.*No space left on device; .* are free in" if who else None):
                pla.save(path, x)
        assert left(world, folder) == [path.name]
        check(pla.load(path, grid=square, layout=Layout(None, None)), array)
    pla.save(path, x)
    assert (pla.load(path, grid=square, layout=x.layout) == x).all()


FULL = """
import os, resource, sys
import numpy as np
import parlinalg as pla
folder, suffix, kind = sys.argv[1:]
path = os.path.join(folder, "x" + suffix)
grid = pla.default_grid()
small, large = pla.ones((10, 10)), pla.random.uniform((800, 800), grid, grid.default_layout((800, 800)), seed=1)
pla.save(path, small)
if kind == "limit":
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    pla.save(path, large)
except pla.FileError as error:
    sys.stdout.write(f"error {error}\\n")  # one write, so that lines of ranks do not mix
found = pla.load(path)
sys.stdout.write(f"old {found.shape} {float(found.sum())} {os.listdir(folder)}\\n")
"""


@pytest.mark.serial
@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["disk", "limit"])
@each_format
def test_a_full_disk(tmp_path, suffix, kind):
    """All ranks say so, the old file stays, and nothing else."""
    if kind == "disk" and (os.geteuid() or not shutil.which("unshare")):
        pytest.skip("cannot be had here: only root mounts a small disk")
    prefix = ()
    if kind == "disk":
        mount = f'mount -t tmpfs -o size=2m small {tmp_path} && exec "$@"'
        prefix = ("unshare", "-m", "sh", "-c", mount, "sh")
    from tests.launching import mpiexec

    done = launch(2, ["-c", FULL, str(tmp_path), suffix, kind], command=(*prefix, *mpiexec()))
    if kind == "disk" and "unshare" in done.stderr:
        pytest.skip("cannot be had here: no mount namespaces")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    errors = [line for line in lines if line.startswith("error")]
    assert len(errors) == 2, done.stdout + done.stderr
    assert all(f"{tmp_path}/x{suffix}" in line and "cannot be written" in line for line in errors)
    assert ("space" if kind == "disk" else "large") in errors[0].lower() or suffix == ".h5"
    assert lines.count(f"old (10, 10) 100.0 ['x{suffix}']") == 2, done.stdout


KILLED = """
import os, signal, sys
import parlinalg as pla
from parlinalg.array import files
path = sys.argv[1]
kind = files._format(path, pla.comm.SingleComm())
grid = pla.default_grid()
pla.save(path, pla.ones((10, 10)))
plainly = kind.write
def write(self, *given):
    plainly(self, *given)
    if grid.rank == (0 if path.endswith(".h5") else 1):
        os.kill(os.getpid(), signal.SIGKILL)
kind.write = write
pla.save(path, 2 * pla.ones((10, 10)))
print("not reached")
"""


@pytest.mark.serial
@each_format
def test_a_rank_killed_in_mid_write(tmp_path, suffix):
    """The file is the old one, and the next save goes its way."""
    path = tmp_path / f"x{suffix}"
    done = launch(2, ["-c", KILLED, str(path)], timeout=50)
    assert done.returncode
    assert "not reached" not in done.stdout
    np.testing.assert_array_equal(plain(path), np.ones((10, 10)))
    with pla.Grid({"r": 1, "c": 1}, backend="numpy") as grid:
        pla.save(path, pla.zeros((3,), grid, Layout("r")))
        assert pla.load(path, grid=grid).shape == (3,)


@pytest.mark.serial
def test_links_and_permissions_stay(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "x.npy").symlink_to(tmp_path / "there" / "y.npy")
    with pla.Grid({"r": 1}, backend="numpy") as grid:
        for n in (3, 4, 5):
            pla.save(tmp_path / "x.npy", pla.ones((n,), grid, Layout(None)))
            assert n == 3 or (tmp_path / "x.npy").stat().st_mode & 0o777 == 0o640
            assert np.load(tmp_path / "there" / "y.npy").shape == (n,)
            (tmp_path / "there" / "y.npy").chmod(0o640)
    assert (tmp_path / "x.npy").is_symlink()


@pytest.mark.serial
def test_folders_change_places_where_the_system_exchanges_none(tmp_path, monkeypatch):
    from parlinalg import files as plain_files

    monkeypatch.setattr(plain_files, "_exchanged", lambda *_: False)
    with pla.Grid({"r": 1}, backend="numpy") as grid:
        for n in (3, 4):
            pla.save(tmp_path / "x.zarr", pla.ones((n,), grid, Layout(None)))
            assert pla.load(tmp_path / "x.zarr", grid=grid).shape == (n,)
    assert os.listdir(tmp_path) == ["x.zarr"]
    Path(tmp_path, "aside").mkdir()
    with pytest.raises(OSError), monkeypatch.context() as patch:  # noqa: PT012
        rename, kept = os.rename, str(tmp_path / "aside")
        patch.setattr(os, "rename", lambda a, b: rename(a, b) if str(a) != kept else os.stat(kept + "/missing"))
        plain_files.replace(tmp_path / "aside", tmp_path / "x.zarr")
    assert sorted(os.listdir(tmp_path)) == ["aside", "x.zarr"]
    assert plain(tmp_path / "x.zarr").shape == (4,)


# ------------------------------------------------------------------------------------------ memory


@each_format
@pytest.mark.ranks(1, 4)
def test_memory_is_the_block_and_some_pieces(make_grid, world, folder, tune, suffix, backend):
    """The largest way: blocks that share rows, terms to be summed, another cut to read."""
    if backend != "numpy":
        pytest.skip("cannot be had here: what the stand-in allocates is not a device's")
    grid = make_grid(grids(world.size)[1])
    tune(MOVE_BUFFER=1 << 13)
    piece, shape = 8 << 13, (1024, 1024)
    block = 8 * shape[0] * shape[1] // world.size
    x = pla.random.uniform(shape, grid, Layout(None, ("a", "b")), seed=0)
    pla.save(folder / f"x{suffix}", x)  # what is imported and made once
    assert (pla.load(folder / f"x{suffix}", grid=grid, layout=x.layout) == x).all()
    tracemalloc.start()
    try:
        for source in (x, x.T):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            pla.save(folder / f"x{suffix}", source)
            assert tracemalloc.get_traced_memory()[1] - before < 16 * piece + (1 << 19)
        for layout in (Layout("a", "b"), Layout(("b", "a"), None)):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            y = pla.load(folder / f"x{suffix}", grid=grid, layout=layout)
            assert tracemalloc.get_traced_memory()[1] - before < block + 16 * piece + (1 << 19)
            del y
    finally:
        tracemalloc.stop()
