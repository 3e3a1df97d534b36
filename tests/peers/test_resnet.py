"""ResNet-18 computes what the same network of PyTorch computes: results, gradients, running statistics, two stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg import nn
from parlinalg.array import DistArray
from parlinalg.autograd import ops
from parlinalg.nn.models.resnet import turned
from parlinalg.optim import SGD
from tests.cases import placed
from tests.conftest import SIZE
from tests.peers.test_transformers import near
from tests.training import every_scheme, sizes_for

pytestmark = [pytest.mark.ranks(1, 2, 4), pytest.mark.timeout(120)]
BATCH, CLASSES, SIDE, PARTS, RATE = 6, 7, 8, 2, 0.1


def torch_resnet(torch: Any, width: int) -> Any:
    """ResNet-18 for small images, with torchvision's names."""
    layer = torch.nn

    class Block(layer.Module):  # type: ignore[misc]
        def __init__(self, channels: int, out: int, stride: int) -> None:
            super().__init__()
            self.conv1 = layer.Conv2d(channels, out, 3, stride, 1, bias=False)
            self.bn1 = layer.BatchNorm2d(out)
            self.conv2 = layer.Conv2d(out, out, 3, 1, 1, bias=False)
            self.bn2 = layer.BatchNorm2d(out)
            if stride != 1 or channels != out:
                shortcut = layer.Conv2d(channels, out, 1, stride, bias=False)
                self.downsample = layer.Sequential(shortcut, layer.BatchNorm2d(out))

        def forward(self, x: Any) -> Any:
            y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
            return torch.relu(y + (self.downsample(x) if hasattr(self, "downsample") else x))

    class ResNet(layer.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.bn1 = layer.Conv2d(3, width, 3, 1, 1, bias=False), layer.BatchNorm2d(width)
            for i in range(4):
                out = width * 2**i
                first = Block(max(width, out // 2), out, 2 if i else 1)
                setattr(self, f"layer{i + 1}", layer.Sequential(first, Block(out, out, 1)))
            self.fc = layer.Linear(8 * width, CLASSES)

        def forward(self, x: Any) -> Any:
            x = torch.relu(self.bn1(self.conv1(x)))
            for i in range(4):
                x = getattr(self, f"layer{i + 1}")(x)
            return self.fc(x.mean((2, 3)))

    torch.manual_seed(0)
    made = ResNet().double()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:  # ones and zeros would hide a wrong place
                parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(BATCH, 3, SIDE, SIDE)), random.integers(0, CLASSES, BATCH)


def compute(torch: Any, width: int, path: Path) -> None:
    """Leave what PyTorch computes: at once, after two steps in microbatches, and in evaluation after those."""
    model = torch_resnet(torch, width)
    found = {f"start {n}": v.numpy().copy() for n, v in model.state_dict().items()}
    x, y = (torch.tensor(a) for a in data())
    found["logits"] = (logits := model(x)).detach().numpy()
    loss = torch.nn.functional.cross_entropy(logits, y)
    loss.backward()
    found["loss"] = loss.item()
    found |= {f"grad {n}": p.grad.numpy() for n, p in model.named_parameters()}
    found |= {f"once {n}": v.numpy().copy() for n, v in model.state_dict().items()}
    model = torch_resnet(torch, width)
    sgd = torch.optim.SGD(model.parameters(), RATE)
    for step in range(2):
        sgd.zero_grad()
        total = 0.0
        for images, labels in zip(x.chunk(PARTS), y.chunk(PARTS), strict=True):
            part = torch.nn.functional.cross_entropy(model(images), labels, reduction="sum") / BATCH
            part.backward()
            total += part.item()
        sgd.step()
        found[f"loss {step}"] = total
    found |= {f"then {n}": v.numpy() for n, v in model.state_dict().items()}
    found["used"] = model.eval()(x).detach().numpy()
    np.savez(path, **found)


@pytest.fixture(scope="module")
def want(torch, on_root, peer_folder, request):
    """What PyTorch computes, and the width."""
    width = 64 if request.config.getoption("--full") else 6
    path = peer_folder / "resnet18.npz"
    on_root(lambda: compute(torch, width, path))
    return width, np.load(path)


def part_of(want: Any, kind: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(f"{kind} "): want[key] for key in want.files if key.startswith(f"{kind} ")}


def small_resnet(scheme: Any, grid: Any, width: int) -> nn.ResNet:
    return nn.resnet18(CLASSES, width=width, small_images=True, scheme=scheme, grid=grid, dtype="float64")


@pytest.mark.parametrize("name", ["data", "1d", "2d", "3d", "2.5d", "2.5d, depth on k", "zero3", "sequence"])
def test_results_and_gradients(name, want, make_grid, world):
    width, right = want
    scheme = next(s for key, s in every_scheme().items() if key.startswith(name))
    grid = make_grid(sizes_for(scheme, world.size, 1)[0])
    model = small_resnet(scheme, grid, width).initialize(0)
    model.load_torch(part_of(right, "start"))
    x, y = data()
    logits = model(placed(x, grid, model.images_layout))
    loss = ops.cross_entropy(logits, placed(y, grid, model.targets_layout))
    loss.backward()
    near(logits.gather(), right["logits"], 1e-10)
    near(np.array(loss.item()), right["loss"], 1e-10)
    grads = part_of(right, "grad")
    assert grads.keys() == dict(model.named_parameters()).keys()
    for parameter, p in model.named_parameters():
        near(p.grad.gather(), turned(grads[parameter]), 1e-10)
    state = model.state_dict()
    for key, value in part_of(right, "once").items():
        near(state[key], turned(value), 1e-10)


MESHES = {
    1: [({}, 0)], 2: [({"pipeline": 2}, 0), ({"tensor": {"size": 2, "mode": "1d"}}, 0), ({}, 3)],
    4: [({"pipeline": 2}, 0), ({"pipeline": 2}, 1), ({"pipeline": 2}, 3), ({"pipeline": 4}, 0),
        ({"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, 0)],
}  # fmt: skip


@pytest.mark.ranks(*MESHES)
@pytest.mark.parametrize(("parallel", "zero"), MESHES.get(SIZE, MESHES[2]), ids=str)
def test_training_in_microbatches_and_stages(parallel, zero, want, world, backend):
    """Two steps in two microbatches, each with statistics of its own, through a pipeline or without one."""
    width, right = want
    config = {"parallel": parallel, "dtype": "float64", "zero": {"stage": zero}}
    with pla.launch(config, world, backend) as mesh:
        model = small_resnet(mesh.scheme, mesh.grid, width)
        batches = [data(), data()]
        schedule = pla.PipelineSchedule(PARTS)
        engine, feed, _, _ = pla.initialize(
            model, lambda p: SGD(p, RATE), ops.cross_entropy_sum, batches, schedule=schedule
        )
        engine.model.load_state_dict({n: turned(v) for n, v in part_of(right, "start").items()})
        engine.train()
        for step, _ in enumerate(batches):
            _, _, loss = schedule.forward_backward_step(engine, iter(feed), return_output_label=False)
            engine.step()
            near(np.array(loss), right[f"loss {step}"], 1e-10)
        state, then = engine.model.state_dict(), part_of(right, "then")
        assert state.keys() == then.keys()
        for key, value in then.items():
            near(state[key], turned(value), 1e-10)


@pytest.mark.ranks(2, 4)
def test_two_stages_by_hand(want, world, backend):
    """Stages chosen by `mesh.rank("pipeline")`, that send each other activations and gradients."""
    width, right = want
    with pla.launch({"parallel": {"pipeline": 2}, "dtype": "float64"}, world, backend) as mesh:
        whole, (x, y) = small_resnet(mesh.scheme, mesh.grid, width), data()
        first = mesh.rank("pipeline") == 0
        mine = whole.layers()[:5] if first else whole.layers()[5:]
        stage = nn.ModuleList([m for layer in mine for m in layer.modules])
        whole.initialize(0, only=list(stage.modules()))
        names = {
            id(p): n
            for n, p in [(f"{n}.{own}", p) for n, m in whole.named_modules() for own, p in m._parameters.items()]
        }
        start = part_of(right, "start")
        for module in stage.modules():
            for p in module._parameters.values():
                p.block[...] = placed(turned(start[names[id(p)]]), mesh.grid, p.layout).block
        shape, cut, comm = (
            (BATCH, SIDE // 2, SIDE // 2, 2 * width),
            mesh.scheme.images("contract"),
            mesh.comm("pipeline"),
        )
        block = mesh.grid.backend.zeros(mesh.grid.block_shape(cut, shape), np.float64)
        if first:
            out = placed(x, mesh.grid, whole.images_layout)
            for layer in mine:
                out = layer.forward(out)
            assert (out.shape, out.layout) == (shape, cut)
            comm.send(out.block, 1)
            comm.receive(block, 1)
            out.backward(DistArray(block, shape, cut, mesh.grid))
        else:
            comm.receive(block, 0)
            given = out = pla.Tensor(DistArray(block, shape, cut, mesh.grid), requires_grad=True)
            for layer in mine:
                out = layer.forward(out)
            loss = ops.cross_entropy(out, placed(y, mesh.grid, whole.targets_layout))
            loss.backward()
            comm.send(given.grad.block, 0)
            near(np.array(loss.item()), right["loss"], 1e-10)
        grads, once = part_of(right, "grad"), part_of(right, "once")
        for module in stage.modules():
            for p in module._parameters.values():
                name = names[id(p)]
                found, known = (p, once[name]) if name not in grads else (p.grad, grads[name])
                near(found.gather(), turned(known), 1e-10)
