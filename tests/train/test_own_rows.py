"""Loaders of which each rank reads its own rows: the losses of whole batches, and no row that is not the rank's."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.autograd import ops
from parlinalg.comm import SingleComm
from parlinalg.datasets import DataLoader, Sampler, Sharded
from parlinalg.errors import ConfigError, EngineError
from parlinalg.optim import AdamW

SAMPLES, ROWS, SIZES = 23, 7, (7, 11, 6, 9, 5)  # batches of 7, 7, 7 and 2 rows
SETTINGS: dict[str, Any] = {"dtype": "float64", "seed": 3, "clip_grad_norm": 0.5}
# Ranks, configuration, and the axes that cut the rows of the inputs.
GRIDS: list[tuple[int, dict[str, Any], tuple[str, ...]]] = [
    (1, {}, ()),
    (2, {"parallel": {"data": 2}, "zero": 1}, ("data",)),
    (2, {"parallel": {"tensor": {"size": 2, "mode": "1d"}}}, ()),
    (2, {"parallel": {"pipeline": 2}}, ()),
    (2, {"parallel": {"pipeline": 2}, "schedule": {"name": "zb-h1", "microbatches": 4}}, ()),  # more than 2 rows
    (3, {"parallel": {"data": 3}, "zero": 3}, ("data",)),
    (3, {"parallel": {"pipeline": 3}, "schedule": {"name": "gpipe", "microbatches": 2}}, ()),
    (4, {"parallel": {"tensor": {"mode": "2d"}}}, ("r",)),
    (4, {"parallel": {"data": 2, "tensor": {"size": 2, "mode": "1d"}}, "zero": 2}, ("data",)),
    (4, {"parallel": {"data": 2, "pipeline": 2}, "schedule": {"name": "1f1b", "microbatches": 2}}, ("data",)),
    (4, {"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, "schedule": "chimera"}, ()),
    (4, {"parallel": {"tensor": {"mode": "2.5d", "shape": (2, 2, 1)}}}, ("d", "r")),
    (4, {"parallel": {"tensor": {"mode": "3d", "shape": (2, 2, 1)}}}, ("i", "j")),
    (8, {"parallel": {"data": 2, "tensor": {"mode": "2d"}}}, ("data", "r")),
]  # fmt: skip
CASES = [
    pytest.param(c, a, marks=pytest.mark.ranks(n), id=f"{n}-{c.get('parallel')}-{c.get('schedule', '')}")
    for n, c, a in GRIDS
]


def arrays() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(SAMPLES, SIZES[0])), rng.integers(0, SIZES[-1], SAMPLES)
    y[rng.random(SAMPLES) < 0.2] = -100  # some do not count
    return x, y


class Asked:
    """A data set that notes which samples it is asked for."""

    def __init__(self, x: Any = None, y: Any = None) -> None:
        self.x, self.y = arrays() if x is None else (x, y)
        self.numbers: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        if not 0 <= i < len(self.x):
            raise IndexError(i)
        self.numbers.append(i)
        return self.x[i], self.y[i]


def order(epoch: int, seed: int = 5) -> np.ndarray:
    """The order of an epoch, written out."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch + 1])).permutation(SAMPLES)


def own(mesh: Any, axes: tuple[str, ...], parts: int, epoch: int, skip: int = 0) -> list[int]:
    """The rows of an epoch that this rank is to read, by NumPy's array_split, which cuts evenly."""
    found: list[int] = []
    for start in range(skip * ROWS, SAMPLES, ROWS):
        rows = order(epoch)[start : start + ROWS]
        for micro in np.array_split(rows, min(parts, len(rows))):
            for axis in axes:
                micro = np.array_split(micro, mesh.grid.sizes[axis])[mesh.grid.coords[axis]]
            found += micro.tolist()
    return found


def reads(engine: Any) -> bool:
    """Whether this rank has a stage that takes inputs, or labels."""
    return not engine.in_stages or any(stage.first or stage.last for stage in engine.model.chunks)


def mlp(mesh: Any, dropout: float = 0.25) -> nn.MLP:
    return nn.MLP(SIZES, mesh.scheme, mesh.grid, "gelu", dropout=dropout, dtype=np.float64)


def whole_batches(epochs: int) -> list[tuple[np.ndarray, np.ndarray]]:
    x, y = arrays()
    return [(x[n], y[n]) for e in range(epochs) for n in np.split(order(e), range(ROWS, SAMPLES, ROWS))]


@cache
def serial(epochs: int = 2) -> list[float]:
    """The losses of steps of whole batches on one rank, and that of a test, written out."""
    with pla.launch(SETTINGS, SingleComm(), "numpy") as mesh:
        model = mlp(mesh).initialize(3)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        found = []
        for step, (x, y) in enumerate([*whole_batches(epochs), arrays()]):
            if step == 4 * epochs:
                model.eval()
            with nn.training_step(step):
                output = model(pla.distribute(x, mesh.grid, model.input_layout()))
                loss = ops.cross_entropy(output, pla.distribute(y, mesh.grid, pla.Layout(None)))
            found.append(loss.item())
            loss.backward()
            pla.parallel.clip_gradient_norm(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        return found


class Losses(pla.Hook):
    def __init__(self) -> None:
        self.found: list[float] = []

    def after_train_iter(self, trainer: Any, output: Any, label: Any, loss: float) -> None:
        self.found.append(loss)


def trained(mesh: Any, train: Any, test: Any, epochs: int = 2, hooks: Any = (), steps: int | None = None) -> Any:
    """An engine after training, with the losses of the steps and, after a whole training, that of a test."""
    engine, feed, held, _ = pla.initialize(
        mlp(mesh), lambda p: AdamW(p, lr=1e-2), ops.cross_entropy_sum, train, test, mesh=mesh
    )
    losses = Losses()
    trainer = pla.Trainer(engine, hooks=[losses, *hooks])
    trainer.fit(feed, epochs, steps=steps)
    return engine, losses.found if steps else [*losses.found, trainer.evaluate(held)], trainer


@pytest.mark.parametrize(("settings", "axes"), CASES)
def test_each_rank_reads_its_own_rows(
    settings: dict[str, Any], axes: tuple[str, ...], world: Any, backend: str
) -> None:
    with pla.launch({**SETTINGS, **settings}, world, backend) as mesh:
        data, held = Asked(), Asked()
        train = DataLoader(data, ROWS, shuffle=True, seed=5)
        engine, losses, _ = trained(mesh, train, DataLoader(held, SAMPLES))
        np.testing.assert_allclose(losses, serial(), rtol=1e-12)
        parts = engine.schedule.num_microbatches
        mine = [n for e in range(2) for n in own(mesh, axes, parts, e)] if reads(engine) else []
        assert sorted(data.numbers) == sorted(mine)
        assert len(held.numbers) < SAMPLES or not axes
        # along the axes that cut rows, an epoch takes each sample once
        everyone = world.share(
            [data.numbers, [mesh.rank("pipeline"), *(mesh.grid.coords[a] for a in rest(mesh, axes))]]
        )
        groups: dict[str, list[int]] = {}
        for numbers, key in everyone:
            groups.setdefault(repr(key), []).extend(numbers)
        for numbers in groups.values():
            assert not numbers or sorted(numbers) == sorted([*range(SAMPLES)] * 2)
        assert any(groups.values())


def rest(mesh: Any, axes: tuple[str, ...]) -> list[str]:
    return [axis for axis in mesh.grid.axes if axis not in axes]


@pytest.mark.ranks(1, 2, 4)
def test_the_calls_of_a_loop_with_accumulation(world: Any, backend: str) -> None:
    settings = {**SETTINGS, "gradient_accumulation": 2, "parallel": {"data": world.size}, "clip_grad_norm": None}
    with pla.launch(settings, world, backend) as mesh:
        found = []
        for source in (DataLoader(Asked(), 5, drop_last=True), [(x, y) for x, y in cut_by(5)]):
            engine, train, _, _ = pla.initialize(mlp(mesh), lambda p: AdamW(p, lr=1e-2), None, source)
            assert train is not None
            assert len(train) == 4
            losses = []
            for x, y in train:
                loss = engine.criterion(engine(x), y)
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
            found.append((losses, engine.model.state_dict()))
        np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-12)
        for name, value in found[1][1].items():
            np.testing.assert_allclose(found[0][1][name], value, rtol=0, atol=1e-13)


def cut_by(rows: int) -> list[tuple[np.ndarray, np.ndarray]]:
    x, y = arrays()
    return [(x[i : i + rows], y[i : i + rows]) for i in range(0, SAMPLES - rows + 1, rows)]


@pytest.mark.ranks(1, 2, 4)
def test_going_on_in_the_middle_of_an_epoch(folder: Path, world: Any, backend: str) -> None:
    """On another grid too; batches before are not read again."""
    config = {**SETTINGS, "parallel": {"data": world.size}}
    with pla.launch(config, world, backend) as mesh:
        train = DataLoader(Asked(), ROWS, shuffle=True, seed=5)
        hook = pla.CheckpointHook(folder, 100)
        _, first, _ = trained(mesh, train, None, hooks=[hook], steps=3)
    other = {"parallel": {"tensor": {"mode": "2d"}}} if world.size == 4 else {}
    with pla.launch({**SETTINGS, **other}, world, backend) as mesh:
        data = Asked()
        hook = pla.CheckpointHook(folder, 100, resume=True)
        _, last, trainer = trained(mesh, DataLoader(data, ROWS, shuffle=True, seed=5), None, hooks=[hook], steps=8)
        assert trainer.step == 8
        np.testing.assert_allclose([*first, *last], serial()[:-1], rtol=1e-12)
        axes = ("r",) if world.size == 4 else ("data",)
        assert sorted(data.numbers) == sorted([*own(mesh, axes, 1, 0, skip=3), *own(mesh, axes, 1, 1)])


@pytest.mark.ranks(1, 2, 4)
def test_sequences_are_cut_after_the_reading(world: Any, backend: str) -> None:
    """Ranks of a sequence read the same rows; labels [rows, positions] too; labels in the inputs' dict pass."""
    parallel = {"sequence": world.size} if world.size < 4 else {"sequence": 2, "data": 2}
    rng = np.random.default_rng(0)
    ids, targets = rng.integers(0, 13, (10, 9)), rng.integers(0, 13, (10, 9))
    found = []
    for comm, own_rows in ((SingleComm(), False), (world, True)):
        config = {"dtype": "float64", "parallel": parallel if own_rows else {}}
        with pla.launch(config, comm, backend if own_rows else "numpy") as mesh:
            model = nn.GPT(
                vocab_size=13, max_position_embeddings=9, hidden_size=12, num_hidden_layers=1, num_attention_heads=2,
                scheme=mesh.scheme, grid=mesh.grid, dtype="float64",
            )  # fmt: skip
            data = Asked(ids, targets)
            source: Any = DataLoader(data, 4) if own_rows else [(ids[i : i + 4], targets[i : i + 4]) for i in (0, 4, 8)]
            engine, train, _, _ = pla.initialize(model, lambda p: AdamW(p, lr=1e-2), None, source)
            trainer = pla.Trainer(engine, hooks=[losses := Losses()])
            trainer.fit(train, 1)
            found.append(losses.found)
            if own_rows:
                everyone = world.share([data.numbers, mesh.rank("data")])
                for d in range(mesh.size("data")):
                    assert len({repr(n) for n, at in everyone if at == d}) == 1
                assert sorted({n for numbers, _ in everyone for n in numbers}) == list(range(10))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)


class Two(nn.Module):
    """Takes a dict of two arrays."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(n, 6, mesh.scheme, mesh.grid, dtype=np.float64) for n in (4, 3))
        self.out = nn.Linear(6, 5, mesh.scheme, mesh.grid, "contract", dtype=np.float64)

    def forward(self, x: Any) -> Any:
        return self.out(self.a(x["a"]) * self.b(x["b"]))


@pytest.mark.ranks(1, 2, 4)
def test_samples_of_dicts_and_tuples(world: Any, backend: str) -> None:
    """As the data set gives them, and by a collate function; small last batches leave ranks without rows."""
    rng = np.random.default_rng(0)
    samples = [{"a": rng.normal(size=4), "b": rng.normal(size=3).tolist(), "y": int(i % 5)} for i in range(9)]
    pairs = [({"a": s["a"], "b": s["b"]}, s["y"]) for s in samples]
    whole = [
        (
            {k: np.array([s[k] for s in samples[i : i + 4]]) for k in "ab"},
            np.array([s["y"] for s in samples[i : i + 4]]),
        )
        for i in (0, 4, 8)
    ]

    def collate_fn(items: list[Any]) -> Any:
        x = {k: np.array([item[k] for item in items]) for k in "ab"}
        return x, np.array([item["y"] for item in items])

    found = []
    parallel = {"data": world.size} if world.size < 4 else {"tensor": {"mode": "2d"}}
    with pla.launch({"dtype": "float64", "parallel": parallel}, world, backend) as mesh:
        for source in (whole, DataLoader(pairs, 4), DataLoader(samples, 4, collate_fn=collate_fn)):
            engine, train, _, _ = pla.initialize(Two(mesh), lambda p: AdamW(p, lr=1e-2), None, source)
            pla.Trainer(engine, hooks=[losses := Losses()]).fit(train, 2)  # type: ignore[arg-type]
            found.append(losses.found)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-12)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-12)


class Pair(NamedTuple):
    a: Any
    b: Any


class Named(Two):
    """Takes a named tuple of two arrays, or a dict, and gives a named tuple."""

    def forward(self, x: Any) -> Any:
        if type(x) is tuple:  # of loaders of own rows
            x = Pair(*x)
        out = super().forward(x if isinstance(x, dict) else {"a": x.a, "b": x.b})
        return Pair(out, out * 2.0)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.ranks(1, 2, 4)
def test_batches_of_named_tuples_mappings_and_lists(parts: int, world: Any, backend: str) -> None:
    """Named tuples stay what they are, other mappings are dicts, and a list of numbers is an array."""
    rng = np.random.default_rng(0)
    whole = [({"a": rng.normal(size=(n, 4)), "b": rng.normal(size=(n, 3))}, rng.integers(0, 5, n)) for n in (5, 3)]
    samples = [(Pair(*(x[k][i] for k in "ab")), y[i]) for x, y in whole for i in range(len(y))]

    def lists(items: list[Any]) -> Any:
        return UserDict(zip("ab", map(np.array, zip(*(x for x, _ in items), strict=True)))), [int(y) for _, y in items]

    sources: list[Any] = [
        whole, [(Pair(**x), y) for x, y in whole], [(UserDict(x), y.tolist()) for x, y in whole],
        [Pair(OrderedDict(x), y) for x, y in whole], DataLoader(samples, 5, collate_fn=lists),
    ]  # fmt: skip
    found = []
    parallel = {"data": world.size} if world.size < 4 else {"tensor": {"mode": "2d"}}
    with pla.launch({"dtype": "float64", "parallel": parallel}, world, backend) as mesh:
        if mesh.size("data") == 1:
            sources.append(Sharded([(Pair(**x), y) for x, y in whole]))
        for source in sources:
            engine, train, _, _ = pla.initialize(
                Named(mesh), lambda p: AdamW(p, lr=1e-2), lambda output, y: ops.cross_entropy_sum(output.a, y), source
            )
            pla.Trainer(engine, pla.NonPipelineSchedule(parts), hooks=[losses := Losses()]).fit(train, 2)  # type: ignore[arg-type]
            found.append(losses.found)
    for each in found[1:]:
        np.testing.assert_allclose(each, found[0], rtol=1e-12)


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(parallel, marks=pytest.mark.ranks(n), id=f"{n}-{parallel}")
        for n, parallel in ((1, {}), (2, {"data": 2}), (2, {"sequence": 2}), (3, {"pipeline": 3}),
                            (4, {"tensor": {"mode": "2d"}}))
    ],
)  # fmt: skip
def test_images_of_own_rows_and_of_whole_batches(parallel: dict[str, Any], world: Any, backend: str) -> None:
    """A ViT's images have four dims, not the two of its sequences."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(7, 2, 6, 9)), rng.integers(0, 3, 7)
    sizes = {"image_size": (6, 9), "patch_size": 3, "num_channels": 2, "num_labels": 3, "hidden_size": 8,
             "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 7}  # fmt: skip

    def losses(comm: Any, name: str, parallel: dict[str, Any], source: Any) -> list[float]:
        with pla.launch({"dtype": "float64", "parallel": parallel}, comm, name) as mesh:
            model = nn.ViT(**sizes, scheme=mesh.scheme, grid=mesh.grid, dtype="float64")
            engine, train, _, _ = pla.initialize(model, lambda p: AdamW(p, lr=1e-2), None, source, mesh=mesh)
            pla.Trainer(engine, hooks=[found := Losses()]).fit(train, 2)  # type: ignore[arg-type]
            return found.found

    whole = [(x[:4], y[:4]), (x[4:], y[4:])]
    want = losses(SingleComm(), "numpy", {}, whole)
    for source in (whole, DataLoader(list(zip(x, y, strict=True)), 4)):
        np.testing.assert_allclose(losses(world, backend, parallel, source), want, rtol=1e-12)


@pytest.mark.ranks(2, 4)
def test_a_loader_that_gives_each_data_rank_its_own(world: Any, backend: str) -> None:
    """Equal to whole batches of the rows of data rank 0, then of rank 1; across tensor and pipeline ranks too."""
    for parallel, axes in (
        [({"data": 2}, 2), ({"pipeline": 2}, 1)] if world.size == 2 else
        [({"data": 2, "pipeline": 2}, 2), ({"data": 2, "tensor": {"size": 2, "mode": "1d"}}, 2), ({"data": 4}, 4)]
    ):  # fmt: skip
        x, y = arrays()
        config = {**SETTINGS, "parallel": parallel, "schedule": {"microbatches": 2}} if "pipeline" in parallel else {
            **SETTINGS, "parallel": parallel}  # fmt: skip
        with pla.launch(config, world, backend) as mesh:
            d, n = mesh.rank("data"), mesh.size("data")
            assert n == axes
            batches = [np.array_split(np.arange(10 * i, 10 * i + 10), n) for i in range(2)]
            shares = [(x[b[d]], y[b[d]]) for b in batches]
            whole = [(x[np.concatenate(b)], y[np.concatenate(b)]) for b in batches]
            found = []
            for source in (Sharded(shares), whole):
                engine, train, _, _ = pla.initialize(mlp(mesh, dropout=0.0), lambda p: AdamW(p, lr=1e-2), None, source)
                assert train is not None
                trainer = pla.Trainer(engine, hooks=[losses := Losses()])
                trainer.fit(train, 2)
                found.append([*losses.found, trainer.evaluate(train)])
            np.testing.assert_allclose(found[0], found[1], rtol=1e-12)


@pytest.mark.ranks(1, 2, 4)
def test_loaders_of_pytorch(world: Any, backend: str) -> None:
    """A Dataset, a DataLoader of whole batches, and one of a DistributedSampler; the order follows the epoch."""
    torch = pytest.importorskip("torch", reason="cannot be had here: torch")
    from torch.utils import data as td

    x, y = arrays()
    tensors = td.TensorDataset(torch.tensor(x), torch.tensor(y))
    found = []
    with pla.launch({**SETTINGS, "parallel": {"data": world.size}}, world, backend) as mesh:
        n, d = mesh.size("data"), mesh.rank("data")
        sampler = td.DistributedSampler(tensors, n, d, shuffle=True, seed=2)
        rows = []
        for epoch in range(2):  # the batches of all ranks, written out
            per_rank = []
            for rank in range(n):
                theirs = td.DistributedSampler(tensors, n, rank, shuffle=True, seed=2)
                theirs.set_epoch(epoch)
                per_rank.append(list(theirs))
            rows += [np.concatenate([r[i : i + 3] for r in per_rank]) for i in range(0, len(per_rank[0]), 3)]
        whole = [(x[r], y[r]) for r in rows]
        own_rows = td.DataLoader(tensors, 3, sampler=sampler)
        sources: list[tuple[Any, int]] = [
            (Sharded(own_rows), 2), (whole, 1), (td.DataLoader(tensors, ROWS), 2), (DataLoader(tensors, ROWS), 2),
        ]  # fmt: skip
        for source, epochs in sources:
            engine, train, _, _ = pla.initialize(mlp(mesh, 0.0), lambda p: AdamW(p, lr=1e-2), None, source)
            pla.Trainer(engine, hooks=[losses := Losses()]).fit(train, epochs)  # type: ignore[arg-type]
            found.append(losses.found)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)
    np.testing.assert_allclose(found[2], found[3], rtol=1e-12)


@pytest.mark.ranks(2, 4)
def test_what_is_wrong_is_told_on_all_ranks(world: Any, backend: str) -> None:
    x, y = arrays()
    last = world.rank == world.size - 1

    def fit(source: Any) -> None:
        engine, *_ = pla.initialize(mlp(mesh), lambda p: AdamW(p, lr=1e-2), None, mesh=mesh)
        pla.Trainer(engine).fit(source, 1)

    class Longer(Asked):
        def __len__(self) -> int:
            return SAMPLES + 1

    with pla.launch({**SETTINGS, "parallel": {"data": world.size}}, world, backend) as mesh:
        with pytest.raises(
            ConfigError, match=f"rank {world.size - 1} has {SAMPLES - 1} samples, that of rank 0 {SAMPLES}"
        ):
            fit(DataLoader(Asked(x[1:], y[1:]) if last else Asked(), 8))
        with pytest.raises(EngineError, match=r"other samples for a batch than that of rank 0: .* same seed"):
            fit(DataLoader(Asked(), 8, shuffle=True, seed=world.rank))
        ragged = [(np.zeros(7 + (i == 5)), 0) for i in range(8)]
        with pytest.raises(EngineError, match=r"rank \d+: .*unlike: .* float64\[7\] .* float64\[8\]"):
            fit(DataLoader(ragged, 8, collate_fn=None))
        wide = [(np.zeros(7 if i < 4 else 8), 0) for i in range(8)]
        with pytest.raises(EngineError, match=r"rank \d .*\(float64\[…, 8\], int64\[…\]\).* rank 0 .*pad to a length"):
            fit(DataLoader(wide, 8))
        with pytest.raises(EngineError, match=r"a pair .* not a dict of 2: give a collate_fn"):
            fit(DataLoader([{"x": 0, "y": 1}] * 8, 8))
        with pytest.raises(EngineError, match=r"labels of shape \(1,\) for \d samples"):
            fit(DataLoader(Asked(), 8, collate_fn=lambda items: (np.zeros((len(items), 7)), np.zeros(1, int))))
        with pytest.raises(EngineError, match="dtype <U"):
            fit(DataLoader([("text", 0)] * 8, 8))
        with pytest.raises(EngineError, match=r"parlinalg\.datasets\.Sharded"):
            fit([(x[world.rank : world.rank + 2], y[world.rank : world.rank + 2])])
        with pytest.raises(EngineError, match=f"batches of rank {world.size - 1} end, those of other ranks"):
            fit(Sharded(Listed([(x, y)] * (1 if last else 2), 2)))
        with pytest.raises(EngineError, match="distributed evenly over"):
            fit(Sharded([(x[: 4 - world.rank // 2 * 2 + world.rank], y[: 4 - world.rank // 2 * 2 + world.rank])]))
        with pytest.raises(ConfigError, match=r"give it to parlinalg\.initialize"):
            iter(DataLoader(Asked(), 8))
    parallel = {"tensor": {"size": world.size, "mode": "1d"}}
    with pla.launch({**SETTINGS, "parallel": parallel}, world, backend) as mesh:
        with pytest.raises(EngineError, match=r"same data rank, 0, and give different rows: .*num_replicas"):
            fit(Sharded([(x[world.rank : world.rank + 2], y[:2])]))
        refused = True
    assert refused


class Listed:
    """Pairs that say they are so many."""

    def __init__(self, pairs: list[Any], length: int) -> None:
        self.pairs, self.length = pairs, length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        return iter(self.pairs)


@pytest.mark.serial
def test_what_a_loader_is_given() -> None:
    with pytest.raises(ConfigError, match="no length: define __len__"):
        DataLoader(type("Unsized", (), {"__getitem__": lambda self, i: i})())
    with pytest.raises(ConfigError, match="no __getitem__; what gives batches itself"):
        DataLoader(iter([]))
    with pytest.raises(ConfigError, match="has no samples"):
        DataLoader([])
    with pytest.raises(ConfigError, match="batch_size must be at least 1, not 0"):
        DataLoader([1], 0)
    with pytest.raises(ConfigError, match="sampler gives the order"):
        DataLoader([1], sampler=Sampler(1), shuffle=True)
    with pytest.raises(ConfigError, match=r"a sampler has order\(epoch\)"):
        DataLoader([1], sampler=[0])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="whole number of at least 0 and below"):
        DataLoader([1], seed=1 << 64)
    with pytest.raises(ConfigError, match="collate_fn is a function"):
        DataLoader([1], collate_fn=3)  # type: ignore[arg-type]
    assert len(DataLoader([1] * 7, 3)) == 3
    assert len(DataLoader([1] * 7, 3, drop_last=True)) == 2
