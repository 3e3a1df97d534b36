"""Convolution, pooling, batch norm and ResNet: the same under every scheme as on one rank, and as defined."""

from __future__ import annotations

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import Layout, nn, schemes
from parlinalg.autograd import ops
from parlinalg.comm.single import SingleComm
from parlinalg.grid import Grid
from parlinalg.nn.module import buffers_kept
from tests.training import every_scheme, sizes_for

SERIAL = schemes.for_mode(None).SCHEME
WHOLE = Layout(None, None, None, None)
BATCH, CLASSES = 5, 7


class Everything(nn.Module):
    """All layers of images, of sizes that no grid divides."""

    def __init__(self, scheme, grid):
        super().__init__()
        here, wide = (scheme, grid), {"dtype": "float64"}
        self.first = nn.Conv2d(3, 5, (3, 2), *here, "contract", stride=(2, 1), padding=(1, 0), **wide)
        self.norm = nn.BatchNorm2d(5, *here, **wide)
        self.inward = nn.Conv2d(5, 7, 3, *here, padding="same", dilation=2, **wide)
        self.inner = nn.BatchNorm2d(7, *here, "expand", momentum=None, eps=1e-3, **wide)
        self.outward = nn.Conv2d(7, 5, 1, *here, "contract", **wide)
        self.grouped_in = nn.Conv2d(5, 10, 3, *here, groups=5, padding=1, **wide)
        self.grouped_out = nn.Conv2d(10, 6, 2, *here, "contract", groups=2, bias=False, **wide)
        self.bare = nn.BatchNorm2d(6, *here, affine=False, track_running_stats=False, **wide)
        self.largest, self.mean = nn.MaxPool2d(3, 2, 1), nn.AvgPool2d((2, 3), 1, (1, 0), count_include_pad=False)
        self.pool = nn.AdaptiveAvgPool2d((3, 2))
        self.flat = nn.BatchNorm1d(6, *here, **wide)
        self.fc = nn.Linear(6, CLASSES, *here, **wide)

    def forward(self, images):
        x = self.norm(self.first(images.redistribute(self.first.input_layout)))
        x = x + self.outward(ops.relu(self.inner(self.inward(x))))
        x = self.bare(self.grouped_out(self.grouped_in(x)))
        x = self.pool(self.largest(x)) + self.pool(self.mean(x))
        return self.fc(self.flat(x[:, 1, 0]))


def model_of(scheme, grid):
    model = Everything(scheme, grid)
    model.start_from(lambda name, slot: nn.init.Normal(0.5, float(slot.init == nn.init.ones)))
    return model.initialize(1)


def found_by(scheme, grid, batch=BATCH):
    """Losses, gradients and buffers after two passes in training, and the loss in evaluation."""
    random, model = np.random.default_rng(0), model_of(scheme, grid)
    for passes in range(3):
        images = pla.Tensor(pla.distribute(random.normal(size=(batch, 9, 8, 3)), grid, Layout(None, *WHOLE.dims[1:])))
        labels = pla.distribute(random.integers(0, CLASSES, batch), grid, Layout(model.fc.plan(1).y.dims[0]))
        model.train(passes < 2)
        loss = ops.cross_entropy(model(images), labels)
        if passes < 2:
            loss.backward()
    return {"loss": loss.item()} | {n: p.grad.gather() for n, p in model.named_parameters()} | model.state_dict()


@pytest.fixture(scope="module")
def serial(backend):
    """What one rank finds."""
    return found_by(SERIAL, Grid({"axis": 1}, comm=SingleComm(), backend=backend))


@pytest.mark.parametrize("name", every_scheme())
def test_every_scheme_gives_what_one_rank_does(name, make_grid, world, serial, full):
    scheme = every_scheme()[name]
    for sizes in sizes_for(scheme, world.size, 99 if full else 1):
        found = found_by(scheme, make_grid(sizes))
        assert found.keys() == serial.keys()
        for what, right in serial.items():
            error = np.abs(found[what] - right).max() / max(1e-3, np.abs(right).max())
            assert error <= 1e-12, f"{what}: a relative difference of {error:.2g}"


def test_ranks_without_samples_and_ranks_outside_the_grid(make_grid, world, backend):
    """A batch of two on all ranks, and a grid that leaves one out."""
    want = found_by(SERIAL, Grid({"axis": 1}, comm=SingleComm(), backend=backend), 2)
    for sizes in ({"data": world.size}, {"data": max(1, world.size - 1)}):
        found = found_by(every_scheme()["data"], make_grid(sizes), 2)
        for what, right in want.items():
            assert np.abs(found[what] - right).max() <= 1e-12 * max(1e-3, np.abs(right).max()), what


def test_running_statistics_as_pytorch_has_them(make_grid, world):
    """Over two batches: by momentum, or as their mean; the variance is the unbiased one; eval() leaves them."""
    grid, random = make_grid({"data": world.size}), np.random.default_rng(3)
    scheme, batches = every_scheme()["data"], [random.normal(1, 2, (5, 3, 2)) for _ in range(2)]
    for momentum in (0.1, None):
        norm = nn.BatchNorm1d(2, scheme, grid, momentum=momentum, dtype="float64").initialize(0)
        mean, variance = np.zeros(2), np.ones(2)
        for i, x in enumerate(batches):
            factor, rows = 1 / (i + 1) if momentum is None else momentum, x.reshape(-1, 2)
            mean, variance = mean + factor * (rows.mean(0) - mean), variance + factor * (rows.var(0, ddof=1) - variance)
            with pla.no_grad() if i else nn.training_step(0):
                norm(pla.Tensor(pla.distribute(x, grid, Layout("data", None, None))))
        norm.eval()
        y = norm(pla.Tensor(pla.distribute(batches[0], grid, Layout("data", None, None)))).gather()
        state = norm.state_dict()
        np.testing.assert_allclose(state["running_mean"], mean, rtol=0, atol=1e-12)
        np.testing.assert_allclose(state["running_var"], variance, rtol=0, atol=1e-12)
        np.testing.assert_allclose(y, (batches[0] - mean) / np.sqrt(variance + 1e-5), rtol=0, atol=1e-12)
        assert state["num_batches_tracked"] == 2
        assert state["num_batches_tracked"].shape == ()
        assert [name for name, _ in norm.named_parameters()] == ["weight", "bias"]
        assert [name for name, _ in norm.named_buffers()] == ["running_mean", "running_var", "num_batches_tracked"]
        assert norm.initialize(0).state_dict()["num_batches_tracked"] == 0


def test_buffers_of_another_grid_are_taken_and_measuring_leaves_them(make_grid, world, folder):
    one = model_of(SERIAL, Grid({"axis": 1}, comm=SingleComm()))
    state = {name: np.abs(np.random.default_rng(4).normal(size=a.shape)) for name, a in one.state_dict().items()}
    state["norm.num_batches_tracked"], state["inner.num_batches_tracked"] = np.array(3), np.array(4)
    state["flat.num_batches_tracked"] = np.array(5)
    grid = make_grid(sizes_for(every_scheme()["2d"], world.size, 1)[0])
    model = model_of(every_scheme()["2d"], grid)
    model.load_state_dict(state)
    images = pla.Tensor(pla.distribute(np.ones((3, 9, 8, 3)) * np.arange(3), grid, WHOLE))
    with buffers_kept(model), pla.no_grad():
        model(images)
        assert model.state_dict()["norm.num_batches_tracked"] == 4
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(value, state[name])
    saved = pla.Checkpoints(folder, world, dict(model.named_state()), background=False)
    saved.save(1)
    other = model_of(every_scheme()["1d"], make_grid({"t": world.size}))
    pla.Checkpoints(saved.folder, world, dict(other.named_state())).load()
    for name, value in other.state_dict().items():
        np.testing.assert_array_equal(value, state[name])


SMALL = {"channels": 2, "width": 3, "dtype": "float64"}


def resnet_of(scheme, grid, recompute=False, block="basic"):
    """Losses and gradients of two steps in microbatches of a ResNet, and its state."""
    random, model = np.random.default_rng(0), nn.ResNet(block, (1, 2), CLASSES, scheme=scheme, grid=grid, **SMALL)
    model.start_from(lambda name, slot: nn.init.Normal(0.5, float(slot.init == nn.init.ones)))
    model.initialize(2)
    for layer in model.layers()[1:-1] if recompute else ():
        nn.recompute(layer.modules[0])
    losses = []
    for _ in range(2):
        images = pla.distribute(random.normal(size=(BATCH, 2, 18, 15)), grid, model.images_layout)
        labels = pla.distribute(random.integers(0, CLASSES, BATCH), grid, model.targets_layout)
        loss = ops.cross_entropy(model(images), labels)
        losses.append(loss.item())
        loss.backward()
    return {"losses": np.array(losses)} | {n: p.grad.gather() for n, p in model.named_parameters()}, model.state_dict()


@pytest.fixture(scope="module")
def serial_resnets(backend):
    """What one rank finds, for both kinds of blocks."""
    grid = Grid({"axis": 1}, comm=SingleComm(), backend=backend)
    return {block: resnet_of(SERIAL, grid, block=block) for block in ("basic", "bottleneck")}


@pytest.mark.parametrize(("name", "block", "recompute"), [
    ("2d", "basic", True), ("3d", "bottleneck", False), ("data", "basic", True), ("1d", "bottleneck", True),
    ("2.5d, depth on k", "basic", False), ("zero3", "basic", True), ("data × 1d with sequence cuts", "basic", False),
])  # fmt: skip
def test_resnets_of_every_scheme(name, block, recompute, make_grid, world, serial_resnets):
    """Values computed again in the backward pass leave the running statistics alone."""
    grid = make_grid(sizes_for(every_scheme()[name], world.size, 1)[0])
    for found, want in zip(
        resnet_of(every_scheme()[name], grid, recompute, block), serial_resnets[block], strict=True
    ):  # fmt: skip
        assert found.keys() == want.keys()
        for what, right in want.items():
            assert np.abs(found[what] - right).max() <= 1e-12 * max(1, np.abs(right).max()), what


@pytest.mark.serial
def test_torchvision_names_and_counts():
    """Those of torchvision's documentation: 11,689,512 and 25,557,032 parameters."""
    with Grid({"axis": 1}) as grid:
        counts = {
            "resnet18": (11_689_512, 122, 9),
            "resnet34": (21_797_672, 218, 17),
            "resnet50": (25_557_032, 320, 17),
        }
        for name, (parameters, tensors, blocks) in counts.items():
            model = getattr(nn, name)(scheme=SERIAL, grid=grid)
            slots = [(f"{n}.{own}", slot) for n, m in model.named_modules() for own, slot in m._parameters.items()]
            assert sum(np.prod(slot.shape) for _, slot in slots if not slot.buffer) == parameters
            assert len(slots) == tensors
            assert len(model.layers()) == len(model.layer_flops(1, 1)) == blocks + 1
            assert {"layer2.0.downsample.1.running_var", "layer4.1.conv2.weight", "fc.bias"} <= {n for n, _ in slots}


@pytest.mark.serial
def test_adaptive_and_average_pooling_at_the_borders():
    """As the definitions of PyTorch have it, by hand."""
    with Grid({"axis": 1}) as grid:
        x = pla.Tensor(pla.distribute(np.arange(1.0, 6).reshape(1, 1, 5, 1), grid, WHOLE))
        assert nn.AdaptiveAvgPool2d((1, 3))(x).gather().ravel().tolist() == [1.5, 3, 4.5]
        assert nn.AdaptiveAvgPool2d()(x).gather().ravel().tolist() == [3]
        assert nn.AvgPool2d((1, 3), 2, (0, 1))(x).gather().ravel().tolist() == [1, 3, 3]
        assert nn.AvgPool2d((1, 3), 2, (0, 1), False)(x).gather().ravel().tolist() == [1.5, 3, 4.5]
        assert nn.MaxPool2d((1, 3), 2, (0, 1))(x).gather().ravel().tolist() == [2, 4, 5]


@pytest.mark.serial
def test_what_is_wrong_is_said():
    with Grid({"axis": 1}) as grid:
        here = (SERIAL, grid)
        with pytest.raises(pla.ConfigError, match="from 4 to 6 channels does not fall into 4 groups"):
            nn.Conv2d(4, 6, 3, *here, groups=4)
        with pytest.raises(pla.ConfigError, match="padding='same' has stride 1, not 2"):
            nn.Conv2d(4, 6, 3, *here, stride=2, padding="same")
        with pytest.raises(pla.ConfigError, match="'valid' or 'same', not 'full'"):
            nn.Conv2d(4, 6, 3, *here, padding="full")
        with pytest.raises(pla.ConfigError, match="at least 1, not 0"):
            nn.Conv2d(4, 6, (3, 0), *here)
        with pytest.raises(pla.ConfigError, match=r"at most half of a window|is at most half"):
            nn.MaxPool2d(2, padding=2)
        x = pla.Tensor(pla.zeros((2, 4, 5, 5), grid, WHOLE, "float32"))
        with pytest.raises(
            pla.LayoutError, match=r"width, 4\], not \(2, 4, 5, 5\); mend .* by x.transpose\(0, 2, 3, 1\)"
        ):
            nn.Conv2d(4, 6, 3, *here, seed=0)(x)
        with pytest.raises(pla.LayoutError, match="with 4 channels, not an array of shape"):
            nn.BatchNorm2d(4, *here).initialize(0)(x)
        with pytest.raises(ValueError, match="one value a channel"):
            nn.BatchNorm2d(5, *here).initialize(0)(x[:1, :1, :1])
        with pytest.raises(pla.ConfigError, match="'basic' or 'bottleneck', not 'wide'"):
            nn.ResNet("wide", (1,), scheme=SERIAL, grid=grid)
        model = nn.ResNet("basic", (1,), 3, width=2, scheme=SERIAL, grid=grid, seed=0)
        with pytest.raises(ValueError, match=r"\[batch, 3, height, width\], not \(2, 4, 5, 5\)"):
            model(x)
        with pytest.raises(pla.ConfigError, match=r"missing: conv1\.weight"):
            model.load_torch({})
