"""A stage: consecutive layers of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from parlinalg.autograd import Buffer, Parameter
from parlinalg.nn.cache import KeyValueCache
from parlinalg.nn.layer import Layer
from parlinalg.nn.module import Module


class Stage:
    """Consecutive layers of a model, as a rank holds them.

    Parameters
    ----------
    number : int
        In the order of the model, from 0.
    stages : int
        How many there are.
    layers : sequence of Layer
    names : mapping of int to str
        The qualified name of each module of the model, by its identity.
    copy : int
        Which replica of the model, in schedules that train two at once.

    Attributes
    ----------
    first, last : bool
        Whether it takes the model's inputs; whether it gives the model's outputs.
    """

    def __init__(
        self, number: int, stages: int, layers: Sequence[Layer], names: Mapping[int, str], copy: int = 0
    ) -> None:  # fmt: skip
        self.number, self.copy = number, copy
        self.first, self.last = number == 0, number == stages - 1
        self.layers = tuple(layers)
        self._names = names

    def __call__(self, x: Any) -> Any:
        """What the last layer gives, from what the stage before gave (the first: the model's inputs)."""
        for layer in self.layers:
            x = layer.forward(x)
        return x

    def generate(self, x: Any, caches: Sequence[KeyValueCache], start: int) -> Any:
        """The same for tokens from position `start` on, where `caches` holds keys and values of those before."""
        left = iter(caches)
        for layer in self.layers:
            if layer.cached is None:
                x = layer.forward(x)
            else:
                x = layer.cached(x, next(left) if layer.caches else None, start)
        return x

    def caches(self, length: int) -> list[KeyValueCache]:
        """Empty caches for so many tokens, one for each layer that keeps keys and values."""
        return [KeyValueCache(length) for layer in self.layers if layer.caches]

    def named_modules(self) -> Iterator[tuple[str, Module]]:
        """The modules of its layers and all within them, each once, with their names in the whole model."""
        seen: set[int] = set()
        for layer in self.layers:
            for own in layer.modules:
                for module in own.modules():
                    if id(module) not in seen:
                        seen.add(id(module))
                        yield self._names[id(module)], module

    def modules(self) -> Iterator[Module]:
        """The modules of its layers and all within them, each once."""
        return (module for _, module in self.named_modules())

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Its parameters, each once, with their names in the whole model."""
        seen: set[int] = set()
        for name, module in self.named_modules():
            for own in module._parameters:
                parameter = getattr(module, own)
                if id(parameter) not in seen and not isinstance(parameter, Buffer):
                    seen.add(id(parameter))
                    yield f"{name}.{own}" if name else own, parameter

    def parameters(self) -> Iterator[Parameter]:
        """Its parameters, each once."""
        return (parameter for _, parameter in self.named_parameters())

    def __repr__(self) -> str:
        names = [layer.name for layer in self.layers]
        told = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        return f"Stage({self.number}: {told}{f', copy {self.copy}' if self.copy else ''})"
