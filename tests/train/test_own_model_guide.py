"""The guide's model of one's own, as the page has it: the losses of a PyTorch program on every grid."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import pytest

import parlinalg as pla
from parlinalg.comm import SingleComm
from parlinalg.datasets import Sampler
from tests.agreement import once
from tests.launching import ROOT

PAGE = ROOT / "docs" / "guide" / "own_model.md"
GRIDS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (2, {"parallel": {"pipeline": 2}}),
    (2, {"parallel": {"data": 2}, "zero": 3}),
    (4, {"parallel": {"tensor": {"size": 4, "mode": "1d"}}}),
    (4, {"parallel": {"tensor": {"size": 4, "mode": "2d"}}}),
    (4, {"parallel": {"data": 2, "tensor": {"size": 2, "mode": "1d"}}, "zero": 3}),
    (8, {"parallel": {"tensor": {"size": 8, "mode": "3d"}}}),
    (8, {"parallel": {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}}),
    (8, {"parallel": {"data": 2, "pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}, "zero": 1}),
]  # fmt: skip


@cache
def program() -> dict[str, Any]:
    """The names that the page's program defines, without its last part, which trains."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    plain = [block for block in blocks if not block.startswith(">>>")]
    assert "train()" in plain[-1]
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile("\n".join(plain[:-1]), str(PAGE), "exec"), names)
    return names


def torch_losses() -> list[float]:
    """The same model and five steps of AdamW with two groups, written in PyTorch; its values are those of the seed."""
    torch = pytest.importorskip("torch", reason="cannot be had here: torch")
    names = program()
    f64 = torch.float64
    with pla.launch({}, SingleComm(), "numpy") as mesh:
        values = {n: torch.tensor(v, dtype=f64) for n, v in names["build"](mesh).initialize(1).state_dict().items()}
    for value in values.values():
        value.requires_grad_()

    def linear(name: str, x: Any) -> Any:
        return x @ values[f"{name}.weight"] + values[f"{name}.bias"]

    def norm(name: str, x: Any) -> Any:
        weight, bias = values[f"{name}.weight"], values[f"{name}.bias"]
        return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)

    def pair(name: str, x: Any) -> Any:
        return linear(f"{name}.back", torch.nn.functional.gelu(linear(f"{name}.out", x)))

    def model(x: Any) -> Any:
        x = linear("0.linear", x)
        for block in ("1", "2"):
            x = x + pair(f"{block}.over_tokens", norm(f"{block}.norm_tokens", x).mT).mT
            x = x + pair(f"{block}.over_features", norm(f"{block}.norm_features", x))
        return linear("3.linear", norm("3.norm", x).mean(1))

    flat = [v for n, v in values.items() if n.endswith("bias") or v.ndim < 2]
    deep = [v for n, v in values.items() if not n.endswith("bias") and v.ndim > 1]
    groups = [{"params": deep, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    images, losses = names["Images"](), []
    order = Sampler(len(images), seed=2).order(0)
    for step in range(5):
        x, y = zip(*(images[int(i)] for i in order[12 * step : 12 * step + 12]), strict=True)
        loss = torch.nn.functional.cross_entropy(model(torch.tensor(np.array(x))), torch.tensor(y))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def wanted() -> list[float]:
    found: list[float] = once(torch_losses)
    assert found[-1] < found[0]
    return found


@pytest.mark.parametrize("config", [pytest.param(c, marks=pytest.mark.ranks(n), id=f"{n}-{c}") for n, c in GRIDS])
def test_the_program_of_the_page(config: dict[str, Any], wanted: list[float], backend: str) -> None:
    np.testing.assert_allclose(program()["train"](backend=backend, **config), wanted, rtol=1e-12)
