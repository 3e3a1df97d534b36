"""Modules: parameters and other modules under names."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from parlinalg.array import DistArray
from parlinalg.autograd import Buffer, Parameter, recording
from parlinalg.autograd.storage import together_on
from parlinalg.backend.memory import check_memory
from parlinalg.comm.check import compare_states
from parlinalg.comm.together import together
from parlinalg.errors import ConfigError
from parlinalg.grid import worlds
from parlinalg.nn.foreign import Names, foreign
from parlinalg.nn.init import Declared, Initializer, is_buffer
from parlinalg.nn.recompute import recomputed
from parlinalg.random.counter import check_seed
from parlinalg.state_dict import check_arrays


class Module:
    """A function with parameters.

    A subclass defines `forward`, and assigns its parameters and modules to attributes in `__init__`, after
    `super().__init__()`; parameters are declared there, and made when `initialize` is called on the whole model, since
    their values depend on their qualified names, and on nothing else that differs from grid to grid.

    Attributes
    ----------
    training : bool
        Set by `train` and `eval`.
    name : str or None
        The qualified name in the model that was initialized, such as "2.dropout"; None before.
    seed : int
        The seed the model was initialized with.
    recomputes : bool
        Whether only its inputs are kept for the backward pass; set by `parlinalg.nn.recompute`.
    around : callable or None
        What is called instead where operations are recorded, with the call, the module and its inputs; see
        `parlinalg.offload.OffloadedActivations`.

    Examples
    --------
    >>> import parlinalg as pla
    >>> from parlinalg import nn, schemes
    >>> grid, scheme = pla.Grid({"axis": 1}), schemes.discover()["serial"].SCHEME
    >>> model = nn.Sequential(nn.Linear(4, 3, scheme, grid), nn.ReLU()).initialize(seed=1)
    >>> [name for name, _ in model.named_parameters()]
    ['0.weight', '0.bias']
    """

    in_stages: ClassVar[bool] = False
    """True for a model that is cut into stages, of which each rank holds some: only schedules run it."""
    training: bool
    name: str | None
    seed: int
    recomputes: bool
    around: Callable[..., Any] | None
    _parameters: dict[str, Parameter | Declared]
    _modules: dict[str, Module]
    _declared: dict[str, Declared]

    def __init__(self) -> None:
        self.__dict__.update({register: {} for register in _REGISTERS})
        self.training = True
        self.name = None
        self.seed = 0
        self.recomputes = False
        self.around = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the result; called by calling the module."""
        raise NotImplementedError(f"{type(self).__name__} defines no forward()")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.around is not None and recording():
            return self.around(self._call, self, *args, **kwargs)
        return self._call(*args, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        if self.recomputes and recording():
            return recomputed(self, *args, **kwargs)
        return self.forward(*args, **kwargs)

    # ------------------------------------------------------------------ attributes
    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, Parameter | Declared | Module):
            self._check_registered(name)
            if getattr(type(self), name, None) is not None:
                raise ConfigError(
                    f"{type(self).__name__} has a method or class attribute {name!r}, which would hide the "
                    f"{type(value).__name__} assigned to it: give one of them another name"
                )
            self._unregister(name)
            if isinstance(value, Module):
                self._modules[name] = value
            else:
                self._parameters[name] = value
                if isinstance(value, Declared):
                    self._declared[name] = value
        else:
            if isinstance(value, _CONTAINERS) and any(_hidden(value)):
                self._check_registered(name)
                self._check_container(name, value, self._known())
            if "_modules" in self.__dict__:
                self._unregister(name)
            object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._modules or name in self._parameters:
            self._unregister(name)
        else:
            object.__delattr__(self, name)

    def _unregister(self, name: str) -> None:
        """Forget the attribute of this name, whatever it is."""
        for kind in (self.__dict__, self._parameters, self._modules, self._declared):
            kind.pop(name, None)

    def _check_registered(self, name: str) -> None:
        """Raise a ConfigError before `Module.__init__` has run."""
        if "_modules" not in self.__dict__:
            raise ConfigError(f"{type(self).__name__}.__init__ calls super().__init__() before it assigns {name!r}")

    def _known(self) -> set[int]:
        """Return the identities of all modules and parameters that have names."""
        modules = list(self.modules())
        held = [p for m in modules for kind in (m._parameters, m._declared) for p in kind.values()]
        return {id(each) for each in (*modules, *held)}

    def _check_container(self, name: str, value: Any, known: Collection[int]) -> None:
        """Raise a ConfigError if a list, tuple, set or dict holds modules or parameters that have no names."""
        for where, held in _hidden(value):
            if id(held) in known:
                continue
            if isinstance(held, Module):
                kind, instead = "module", "use nn.ModuleList([…]), nn.ModuleDict({…}) or nn.Sequential(…)"
            else:
                kind = "parameter"
                instead = "assign each to an attribute, or put the modules that hold them in an nn.ModuleList"
            raise ConfigError(
                f"{type(self).__name__}.{name}{where} is a {kind} ({type(held).__name__}) in a plain "
                f"{type(value).__name__}, where no {kind} is found: it would have no name and be neither trained nor "
                f"saved; {instead}"
            )

    def __getattr__(self, name: str) -> Any:
        held = self.__dict__
        if name in held.get("_modules", ()):
            return held["_modules"][name]
        if name in held.get("_parameters", ()):
            return self._made(name, held["_parameters"][name])
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @staticmethod
    def _made(name: str, parameter: Parameter | Declared) -> Parameter:
        if isinstance(parameter, Declared):
            raise ConfigError(
                f"parameter {name!r} of shape {parameter.shape} has no values yet; "
                "call initialize(seed) on the whole model"
            )
        return parameter

    # ------------------------------------------------------------------ members
    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """Yield this module and all within it, each once, with qualified names."""
        seen: set[int] = set()
        stack: list[tuple[str, Module]] = [(prefix, self)]
        while stack:
            name, module = stack.pop()
            if id(module) not in seen:
                seen.add(id(module))
                yield name, module
                stack.extend((_join(name, n), m) for n, m in reversed(module._modules.items()))

    def modules(self) -> Iterator[Module]:
        """Return this module and all within it, each once."""
        return (module for _, module in self.named_modules())

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Return all parameters, each once, with qualified names.

        Raises
        ------
        ConfigError
            If the model is not initialized, or one of its modules holds modules or parameters in a plain list or dict.
        """
        return ((name, p) for name, p in self.named_state(prefix) if not isinstance(p, Buffer))

    def parameters(self) -> Iterator[Parameter]:
        """Return all parameters, each once, in the order of their declaration."""
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self, prefix: str = "") -> Iterator[tuple[str, Buffer]]:
        """Return all buffers, values that no optimizer changes, such as running means, with qualified names."""
        return ((name, p) for name, p in self.named_state(prefix) if isinstance(p, Buffer))

    def buffers(self) -> Iterator[Buffer]:
        """Return all buffers, each once, in the order of their declaration."""
        return (buffer for _, buffer in self.named_buffers())

    def named_state(self, prefix: str = "") -> Iterator[tuple[str, Parameter]]:
        """Yield all parameters and buffers, each once, with qualified names: what `state_dict` and checkpoints hold.

        Raises
        ------
        ConfigError
            If the model is not initialized.
        """
        seen: set[int] = set()
        for name, module in self.named_modules(prefix):
            for own, held in module._parameters.items():
                parameter = self._made(_join(name, own), held)
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield _join(name, own), parameter
        self._check_containers()

    def _check_containers(self) -> None:
        """Raise a ConfigError if a list or dict was given modules or parameters after it was assigned."""
        known: set[int] = set()
        for module in self.modules():
            for name, value in module.__dict__.items():
                if isinstance(value, _CONTAINERS) and name not in _REGISTERS and any(_hidden(value)):
                    known = known or self._known()
                    module._check_container(name, value, known)

    # ------------------------------------------------------------------ state
    def start_from(self, rule: Callable[[str, Declared], Initializer | None]) -> None:
        """Choose other initializers, before `initialize`.

        Parameters
        ----------
        rule : callable
            From a declared parameter's qualified name and itself, its initializer; None leaves it.
        """
        for name, module in self.named_modules():
            for own, declared in module._declared.items():
                if not declared.buffer and (init := rule(_join(name, own), declared)) is not None:
                    module._declared[own] = replace(declared, init=init)
                    if module._parameters[own] is declared:
                        module._parameters[own] = module._declared[own]

    def initialize(
        self, seed: int = 0, prefix: str = "", values: Callable[[Declared, str], DistArray] | None = None,
        only: Collection[Module] | None = None,
    ) -> Any:  # fmt: skip
        """Name all parameters and modules, and make the declared ones' values.  To be called on the whole model.

        Parameters
        ----------
        seed : int
        prefix : str
            The qualified name of this module, where it is a part (a stage of a pipeline) of a larger model.
        values : callable, optional
            Makes the values of a parameter declared under a qualified name, instead of its initializer.
        only : collection of Module, optional
            Modules whose own parameters are made, those of a stage of a pipeline; the others' stay declared.

        Returns
        -------
        Module
            Itself.  Called again it starts again from new values, in the same parameters.
        """

        def made(declared: Declared, name: str) -> DistArray:
            return declared.make(seed, name) if values is None or declared.buffer else values(declared, name)

        self._check_containers()
        wanted = None if only is None else {id(module) for module in only}
        names = () if only is None else self.parameter_names()
        check_seed(seed)
        self._check_memory(wanted)
        for name, module in self.named_modules(prefix):
            module.name, module.seed = name, seed
            if wanted is not None and id(module) not in wanted:
                continue
            for own, held in module._parameters.items():
                qualified = _join(name, own)
                declared = module._declared.get(own)
                if isinstance(held, Parameter):
                    held.name = qualified
                    if declared is not None:
                        held.matrix = declared.matrix
                    if declared is not None:
                        held.data = made(declared, qualified)
                else:
                    kind = Buffer if held.buffer else Parameter
                    parameter = kind(made(held, qualified), qualified)
                    parameter.matrix, parameter.relatives = held.matrix, names
                    module._parameters[own] = parameter
        return self

    def parameter_names(self) -> tuple[str, ...]:
        """Return the qualified names of all parameters, also of those without values."""
        held = ((_join(name, own), p) for name, m in self.named_modules() for own, p in m._parameters.items())
        return tuple(name for name, p in held if not is_buffer(p))

    def _check_memory(self, wanted: Collection[int] | None) -> None:
        """Raise a ConfigError if this rank has too little memory for the values of modules of these identities."""
        own = [m for m in self.modules() if wanted is None or id(m) in wanted]
        held = [held for module in own for held in module._parameters.values() if isinstance(held, Declared)]
        for backend in dict.fromkeys(declared.grid.backend for declared in held):
            check_memory("a model of this size", sum(d.nbytes for d in held if d.grid.backend is backend), backend)

    def forget(self, modules: Iterable[Module] | None = None) -> None:
        """Leave the values of these modules' own declared parameters (by default of all within this one) again."""
        for module in self.modules() if modules is None else modules:
            for own, declared in module._declared.items():
                module._parameters[own] = declared

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return all parameters and buffers by qualified name as global NumPy arrays, on every rank.  Collective.

        Raises
        ------
        OffloadError
            On all ranks, if a value rests on a disk that fails on any.
        """
        found = {}
        for name, p in self.named_state():
            window = None
            if p.data.resident is None:  # open while it is gathered: that it can be is agreed on
                window = together_on([p], partial(getattr, p, "block"), f"reading {name}")
            found[name] = p.gather()
            del window
        return found

    def load_state_dict(
        self, state: Mapping[str, Any] | str | os.PathLike[str], *, names: Names | None = None,
        torch: bool | None = None,
    ) -> None:  # fmt: skip
        """Take the parameters and buffers that `state_dict` gave, on any grid, or those of a model of PyTorch.

        Collective; every rank is given the whole state, and takes its part.

        Parameters
        ----------
        state : mapping of str to array or tensor, or path
            Global arrays, tensors of PyTorch, or the path of a safetensors file, of which each rank reads its part.
        names : dict, list of pairs, or callable, optional
            From the names of the state to this model's: a dict of those that differ; regular expressions with their
            replacements, one after the other, as of `re.sub`; or a function.  None in place of a name leaves a tensor
            out.
        torch : bool, optional
            Whether weights lie as in PyTorch, those of a linear layer as [out, in] and of a convolution as [out, in,
            height, width]; here they lie as [in, out] and [height, width, in, out].  By default True for tensors and
            files, False for arrays.

        Raises
        ------
        ConfigError
            On all ranks, naming all that are missing, unexpected, misshapen or of no real numbers on any; then nothing
            has changed.
        OffloadError
            On all ranks, if a value rests on a disk that fails on any.
        """
        mine = dict(self.named_state())
        comms = worlds(p.grid for p in mine.values())
        want = {n: p.shape for n, p in mine.items()}

        def read() -> dict[str, Any]:
            arrays = foreign(self, state, names, torch)
            check_arrays("the model's state", want, arrays)
            return arrays

        arrays = together(comms, read, "loading the model's state")
        compare_states(comms, {name: arrays[name] for name in want})
        together_on(mine.values(), lambda: self._take(mine, arrays), "loading the model's state")

    def from_torch(self, name: str, array: np.ndarray) -> np.ndarray:
        """Return a view of an array as this module's own parameter `name`, from PyTorch's layer of the same kind.

        An array of another shape than PyTorch's layer has comes back as it is.
        """
        return array

    def _take(self, mine: Mapping[str, Parameter], state: Mapping[str, Any]) -> None:
        for name, p in mine.items():
            part = tuple(slice(r.start, r.stop) for r in p.grid.block(p.layout, p.shape))
            value = p.grid.backend.from_host(np.array(np.asarray(state[name])[part], p.dtype, order="C"))
            p.data.put(value.reshape(-1))
            p.written()

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""
        for parameter in self.parameters():
            parameter.grad = None

    def train(self, mode: bool = True) -> Any:
        """Set training mode (or, with False, evaluation mode); returns the module."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self) -> Any:
        """Set evaluation mode, in which dropout does nothing; returns the module."""
        return self.train(False)

    @property
    def multiplications(self) -> int:
        """Multiplications a row (a token) of this module's own products."""
        return 0

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters' blocks on this rank; known before they are made."""
        held = {id(p): p for m in self.modules() for p in m._parameters.values()}
        return sum(int(p.block.nbytes) if isinstance(p, Parameter) else p.nbytes for p in held.values())

    def extra_repr(self) -> str:
        """Return the module's settings, for `repr`."""
        return ""

    def __repr__(self) -> str:
        inner = [f"  ({n}): " + repr(m).replace("\n", "\n  ") for n, m in self._modules.items()]
        lines = "\n".join(["", *inner, ""]) if inner else self.extra_repr()
        return f"{type(self).__name__}({lines})"


_CONTAINERS = (list, tuple, dict, set, frozenset)
_REGISTERS = ("_parameters", "_modules", "_declared")


def _hidden(value: Any, where: str = "") -> Iterator[tuple[str, Module | Parameter | Declared]]:
    """Yield the modules and parameters in a list, tuple, set or dict and those within it, with their places."""
    stack, seen = [(where, value)], set()
    while stack:
        where, value = stack.pop()
        if isinstance(value, Module | Parameter | Declared):
            yield where, value
        elif isinstance(value, _CONTAINERS) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            stack += [(f"{where}[{key!r}]", held) for key, held in items]


@contextmanager
def buffers_kept(model: Module) -> Iterator[None]:
    """Give the buffers back their values at the end: passes within it only measure, and are no part of the training."""
    kept = [(p, p.block.copy()) for m in model.modules() for p in m._parameters.values() if isinstance(p, Buffer)]
    try:
        yield
    finally:
        for buffer, block in kept:
            buffer.block[...] = block


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
