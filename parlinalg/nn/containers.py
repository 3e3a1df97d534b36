"""Modules made of modules."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from itertools import pairwise
from typing import Any, Self, overload

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.nn.activations import activation as activation_module
from parlinalg.nn.checks import placed, whole
from parlinalg.nn.dropout import Dropout
from parlinalg.nn.init import Initializer
from parlinalg.nn.layer import Layer
from parlinalg.nn.linear import Linear
from parlinalg.nn.module import Module
from parlinalg.schemes import Scheme


class ModuleList(Module):
    """A list of modules, named "0", "1", …, as `torch.nn.ModuleList`.

    It is indexed, sliced and changed as a list; a module's parameters are found, named ("layers.0.weight"), trained and
    saved, which those in a plain list are not.  It has no `forward`: the model that holds it calls its members.

    Parameters
    ----------
    modules : iterable of Module, optional

    Raises
    ------
    TypeError
        If a member is no module.

    Examples
    --------
    >>> import parlinalg as pla
    >>> from parlinalg import nn, schemes
    >>> grid, scheme = pla.Grid({"axis": 1}), schemes.discover()["serial"].SCHEME
    >>> layers = nn.ModuleList(nn.Linear(4, 4, scheme, grid, bias=False) for _ in range(2))
    >>> layers.append(nn.Linear(4, 3, scheme, grid, bias=False))
    ModuleList(
      (0): Linear(4 → 4, serial: expand)
      (1): Linear(4 → 4, serial: expand)
      (2): Linear(4 → 3, serial: expand)
    )
    >>> len(layers[1:]), [name for name, _ in layers.initialize(seed=1).named_parameters()]
    (2, ['0.weight', '1.weight', '2.weight'])
    """

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        self.extend(modules)

    def __iter__(self) -> Iterator[Module]:
        return iter(self._modules.values())

    def __len__(self) -> int:
        return len(self._modules)

    @overload
    def __getitem__(self, index: int) -> Module: ...
    @overload
    def __getitem__(self, index: slice) -> ModuleList: ...
    def __getitem__(self, index: int | slice) -> Module:
        found = list(self)[index]
        if isinstance(found, Module):
            return found
        return Sequential(*found) if isinstance(self, Sequential) else ModuleList(found)

    def __setitem__(self, index: int, module: Module) -> None:
        members = list(self)
        members[index] = _module(self, module)
        self._renumber(members)

    def __delitem__(self, index: int | slice) -> None:
        members = list(self)
        del members[index]
        self._renumber(members)

    def __add__(self, other: Iterable[Module]) -> ModuleList:
        members = [*self, *_listed(self, other)]
        return Sequential(*members) if isinstance(self, Sequential) else ModuleList(members)

    def __iadd__(self, other: Iterable[Module]) -> Self:
        return self.extend(other)

    def append(self, module: Module) -> Self:
        """Add a module at the end; returns the list."""
        return self.extend([module])

    def extend(self, modules: Iterable[Module]) -> Self:
        """Add modules at the end; returns the list."""
        self._renumber([*self, *_listed(self, modules)])
        return self

    def insert(self, index: int, module: Module) -> Self:
        """Add a module before the one at an index; returns the list."""
        members = list(self)
        members.insert(index, _module(self, module))
        self._renumber(members)
        return self

    def pop(self, index: int = -1) -> Module:
        """Take a module out and return it."""
        module = self[index]
        del self[index]
        return module

    def _renumber(self, members: Iterable[Module]) -> None:
        self._modules.clear()
        self._modules.update((str(i), module) for i, module in enumerate(members))


class ModuleDict(Module):
    """Modules by names, as `torch.nn.ModuleDict`: a dict whose values are found, named, trained and saved.

    Parameters
    ----------
    modules : mapping of str to Module, or iterable of pairs, optional

    Raises
    ------
    TypeError
        If a key is no string or a value no module.
    ConfigError
        If a key is empty or has a dot: keys are parts of qualified names.

    Examples
    --------
    >>> from parlinalg import nn
    >>> steps = nn.ModuleDict({"in": nn.GELU(), "out": nn.ReLU()})
    >>> list(steps), "in" in steps, steps["out"]
    (['in', 'out'], True, ReLU())
    """

    def __init__(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]] = ()) -> None:
        super().__init__()
        self.update(modules)

    def __getitem__(self, key: str) -> Module:
        return self._modules[key]

    def __setitem__(self, key: str, module: Module) -> None:
        if not isinstance(key, str):
            raise TypeError(f"the keys of a ModuleDict are strings, not {key!r}")
        if not key or "." in key:
            raise ConfigError(f"a key of a ModuleDict is part of a qualified name, without dots, not {key!r}")
        self._modules[key] = _module(self, module)

    def __delitem__(self, key: str) -> None:
        del self._modules[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    def __contains__(self, key: object) -> bool:
        return key in self._modules

    def keys(self) -> KeysView[str]:
        """Return the names, in the order in which they were added."""
        return self._modules.keys()

    def values(self) -> ValuesView[Module]:
        """Return the modules."""
        return self._modules.values()

    def items(self) -> ItemsView[str, Module]:
        """Return the pairs of a name and a module."""
        return self._modules.items()

    def pop(self, key: str) -> Module:
        """Take a module out and return it."""
        return self._modules.pop(key)

    def clear(self) -> None:
        """Take all modules out."""
        self._modules.clear()

    def update(self, modules: Mapping[str, Module] | Iterable[tuple[str, Module]]) -> None:
        """Add modules by their names, in place of those of the same names."""
        held = modules if isinstance(modules, Mapping | ModuleDict) else dict(modules)
        for key, module in held.items():
            self[key] = module


def _module(owner: Module, given: Any) -> Module:
    if not isinstance(given, Module):
        raise TypeError(f"{type(owner).__name__} holds modules, not a {type(given).__name__}")
    return given


def _listed(owner: Module, given: Any) -> list[Module]:
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise TypeError(f"{type(owner).__name__} takes a list of modules, not a {type(given).__name__}")
    return [_module(owner, each) for each in given]


class Sequential(ModuleList):
    """Modules one after the other, named "0", "1", …; a `ModuleList` that can be called.

    Parameters
    ----------
    *modules : Module
        Called in this order, each on what the one before gives.
    """

    def __init__(self, *modules: Module) -> None:
        super().__init__(modules)

    def forward(self, x: Any) -> Any:
        for module in self:
            x = module(x)
        return x

    def layers(self) -> list[Layer]:
        """Return the modules as the layers that a pipeline cuts."""
        return [Layer(name, module, (module,)) for name, module in self._modules.items()]


class MLP(Sequential):
    """A perceptron: linear layers, alternately into a block and out of it, with an activation between two.

    Parameters
    ----------
    sizes : sequence of int
        The features of the input, of each hidden layer, and of the output.
    scheme : Scheme or str
    grid : Grid
    activation : str
        As of `parlinalg.nn.activation`, such as "relu" or "gelu_tanh"; with a gated one, such as "swiglu", a hidden
        layer of m features puts out (m, 2): gates and values.
    dropout : float
        The probability of dropping an element after an activation.
    bias : bool
    dtype : dtype
    head : bool
        Whether the last layer is the last of a model, as of `Linear`; False for a perceptron within one.
    weight_init : callable, optional
        As of `Linear`.
    seed : int, optional
        With a seed the model is initialized at once; else by `initialize(seed)`.

    The input is cut as the scheme's residual stream, and so is the output of an even number of layers; that of an odd
    number is cut as the inside of a block (`output_layout`).
    """

    def __init__(
        self, sizes: Sequence[int], scheme: Scheme | str, grid: Grid, activation: str = "relu", *, dropout: float = 0.0,
        bias: bool = True, head: bool = True, dtype: DTypeLike = np.float32, weight_init: Initializer | None = None,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        if len(sizes) < 2:
            raise ConfigError(f"an MLP needs the sizes of its input and its output at least, not {list(sizes)}")
        sizes = [whole("a size of an MLP", n) for n in sizes]
        scheme = placed(self, scheme, grid)
        layers: list[Module] = []
        gated = activation_module(activation).gated
        for i, (n, m) in enumerate(pairwise(sizes)):
            if i:
                layers.append(activation_module(activation))
                if dropout:
                    layers.append(Dropout(dropout))
            kind = "contract" if i % 2 else "expand"
            out = (m, 2) if gated and i < len(sizes) - 2 else m
            last = head and i == len(sizes) - 2
            layers.append(
                Linear(n, out, scheme, grid, kind, bias=bias, head=last, dtype=dtype, weight_init=weight_init)
            )
        super().__init__(*layers)
        self.scheme = scheme
        self.products = len(sizes) - 1
        if seed is not None:
            self.initialize(seed)

    def input_layout(self, ndim: int = 2) -> Layout:
        """Return the layout of the input, of `ndim` dims."""
        return self.scheme.for_dims(ndim).residual

    def output_layout(self, ndim: int = 2) -> Layout:
        """Return the layout of the output."""
        scheme = self.scheme.for_dims(ndim)
        return scheme.inner if self.products % 2 else scheme.residual
