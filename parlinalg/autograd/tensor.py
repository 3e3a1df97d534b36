"""Tensors: distributed arrays that remember how they were made."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from parlinalg.array import DistArray
from parlinalg.array.core import Axis
from parlinalg.array.dispatch import flagged
from parlinalg.autograd.rule import Part, packing
from parlinalg.autograd.tape import Node, Walk, note, recording
from parlinalg.backend.shapes import label_memory, memory_label
from parlinalg.errors import LayoutError
from parlinalg.grid import Grid
from parlinalg.layout import Layout
from parlinalg.matmul import api
from parlinalg.plan import Plan

if TYPE_CHECKING:
    from parlinalg.autograd.parameter import Parameter

Block = Any
Scalar = int | float


@flagged
class Tensor:
    """A `DistArray` in a computation whose gradient may be asked for.

    Operations on tensors check layouts and never communicate, except products (by their plan) and operations whose
    meaning is a sum over a cut dim.  The gradient of a value has its dtype and layout; by a complex value u + iv it is
    ∂L/∂u + i ∂L/∂v, as in PyTorch.  The functions of `parlinalg` and NumPy's take tensors too
    (`parlinalg.autograd.functions`).

    Parameters
    ----------
    data : DistArray
        The value.
    requires_grad : bool
        Whether `backward()` of what is made from this tensor adds its gradient to `grad`.

    Examples
    --------
    >>> import numpy as np, parlinalg as pla
    >>> grid = pla.Grid({"r": 1})
    >>> x = pla.Tensor(pla.distribute(np.arange(3.0), grid, pla.Layout("r")), requires_grad=True)
    >>> (x * x).sum().backward()
    >>> x.grad.gather()
    array([0., 2., 4.])
    """

    __slots__ = ("__weakref__", "_data", "_node", "origin")

    def __init__(self, data: DistArray, requires_grad: bool = False) -> None:
        if not isinstance(data, DistArray):
            raise TypeError(
                f"a Tensor takes a DistArray, not {type(data).__name__}; distribute it first: "
                "parlinalg.distribute(array, grid, layout)"
            )
        self._data = data
        self._node: Node | None = None
        self.origin: tuple[Parameter, tuple[int, ...]] | None = None
        """Of a transposed view of a parameter: the parameter, and the order of its dims."""
        if requires_grad:
            self.requires_grad = True

    # ------------------------------------------------------------------ what it is
    @property
    def data(self) -> DistArray:
        """The value.  A leaf's may be replaced by one of the same shape, layout and dtype."""
        return self._data

    @data.setter
    def data(self, data: DistArray) -> None:
        old = self._data
        if (data.shape, data.dtype, data.grid.effective(data.layout)) != (
            old.shape,
            old.dtype,
            old.grid.effective(old.layout),
        ):
            raise LayoutError(
                f"new data of shape {data.shape}, {data.dtype}, {data.layout!r} for a tensor of shape {old.shape}, "
                f"{old.dtype}, {old.layout!r}; mend it by .astype({str(old.dtype)!r}) and "
                f".redistribute({old.layout!r})"
            )
        if (purpose := memory_label(old.resident)) == "weights":
            label_memory(data.resident, purpose)
        self._data = data

    @property
    def block(self) -> Block:
        """This rank's block."""
        return self._data.block

    @property
    def shape(self) -> tuple[int, ...]:
        return self._data.shape

    @property
    def ndim(self) -> int:
        return len(self._data.shape)

    @property
    def size(self) -> int:
        return self._data.size

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._data.dtype

    @property
    def layout(self) -> Layout:
        return self._data.layout

    @property
    def grid(self) -> Grid:
        return self._data.grid

    @property
    def node(self) -> Node | None:
        """Its place on the tape; None where it wants no gradient."""
        return self._node

    @property
    def requires_grad(self) -> bool:
        return self._node is not None

    @requires_grad.setter
    def requires_grad(self, wanted: bool) -> None:
        if not wanted:
            self._node = None
        elif self._node is None:
            if self.dtype.kind in "iub":
                raise TypeError(f"a tensor of dtype {self.dtype} has no gradient; convert it first: .astype('float32')")
            self._node = Node(self._data)

    @property
    def grad(self) -> DistArray | None:
        """The gradient that backward passes have added up so far in a leaf."""
        return None if self._node is None else self._node.grad

    @grad.setter
    def grad(self, value: DistArray | None) -> None:
        if self._node is None:
            if value is not None:
                raise RuntimeError("a tensor that wants no gradient (requires_grad=False) is given one")
            return
        self._node.grad = value

    def __repr__(self) -> str:
        wants = ", requires_grad=True" if self.requires_grad else ""
        return f"{type(self).__name__}(shape={self.shape}, dtype={self.dtype}, layout={self.layout!r}{wants})"

    def __str__(self) -> str:
        """Return `repr` and a summary of the values.  Collective: all ranks must print, or use `repr`."""
        from parlinalg.array.printing import summary

        return f"{self!r}\n{summary(self._data)}"

    # ------------------------------------------------------------------ gradients
    def backward(self, grad: Tensor | DistArray | None = None, *, retain: bool = False) -> None:
        """Add the gradient of this value to `grad` of every leaf it was made from.  Collective.

        Parameters
        ----------
        grad : Tensor or DistArray, optional
            The gradient of this value, in its layout; by default 1, for a value of one element.
        retain : bool
            Keep what another backward pass over the same values needs; by default it is freed on the way.

        Every gradient ends in its value's layout, except that within `no_sync` those of parameters stay partial.
        """
        start_walk(self, grad, retain=retain).run()

    def detach(self) -> Tensor:
        """Return the same value as a constant."""
        return Tensor(self._data)

    # ------------------------------------------------------------------ values
    def item(self) -> Any:
        """Return the element of a tensor of size 1, as a Python scalar, on every rank.  Collective unless whole."""
        return self._data.item()

    def gather(self, root: int | None = None) -> Any:
        """Return the global value as a NumPy array on every rank, or on rank `root` alone.  Collective."""
        return self._data.gather(root)

    # ------------------------------------------------------------------ operations
    def redistribute(self, layout: Layout) -> Tensor:
        """Return the same value in another layout.  Collective."""
        from parlinalg.autograd.ops.shapes import redistribute

        return redistribute(self, layout)

    def astype(self, dtype: Any, *, copy: bool = True) -> Tensor:
        """Return the same value in another floating dtype."""
        from parlinalg.autograd.ops.shapes import astype

        return astype(self, dtype)

    def summed(self) -> Tensor:
        """Return the same value with nothing left to sum.  Collective."""
        return self.redistribute(self.layout.with_partial(()))

    def copy(self) -> Tensor:
        """Return the same value: tensors are not written to."""
        return self

    def reshape(self, *shape: Any) -> Tensor:
        """Return the same elements in another shape, where blocks stay blocks."""
        from parlinalg.autograd.ops.shapes import reshape

        return reshape(self, shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)

    def transpose(self, *order: Any) -> Tensor:
        """Return a view with permuted dims, by default reversed."""
        from parlinalg.autograd.ops.shapes import transpose

        return transpose(self, order[0] if len(order) == 1 and not isinstance(order[0], int) else order or None)

    @property
    def T(self) -> Tensor:
        """The transposed value, a view."""
        return self.transpose()

    @property
    def mT(self) -> Tensor:
        """The last two dims exchanged, a view."""
        return self.transpose((*range(self.ndim - 2), self.ndim - 1, self.ndim - 2))

    def __getitem__(self, key: Any) -> Tensor:
        from parlinalg.autograd.ops.shapes import getitem

        return getitem(self, key)

    def sum(
        self, axis: Axis = None, dtype: Any = None, out: None = None, keepdims: bool = False, *, partial: bool = False
    ) -> Tensor:
        """Return the sum over dims; over cut ones complete, or with `partial` left partial."""
        from parlinalg.autograd.ops.reductions import sum

        refuse_out(out)
        return sum(self if dtype is None else self.astype(dtype), axis, keepdims, partial=partial)

    def mean(self, axis: Axis = None, dtype: Any = None, out: None = None, keepdims: bool = False) -> Tensor:
        """Return the mean over dims."""
        from parlinalg.autograd.ops.reductions import mean

        refuse_out(out)
        return mean(self if dtype is None else self.astype(dtype), axis, keepdims)

    # methods of arrays that call functions, which take tensors
    _reduce: Any = DistArray._reduce
    max: Any = DistArray.max
    min: Any = DistArray.min
    any: Any = DistArray.any
    all: Any = DistArray.all
    prod: Any = DistArray.prod
    var: Any = DistArray.var
    std: Any = DistArray.std
    argmax: Any = DistArray.argmax
    argmin: Any = DistArray.argmin
    argsort: Any = DistArray.argsort
    nonzero: Any = DistArray.nonzero
    cumsum: Any = DistArray.cumsum
    cumprod: Any = DistArray.cumprod
    take: Any = DistArray.take
    repeat: Any = DistArray.repeat
    diagonal: Any = DistArray.diagonal
    trace: Any = DistArray.trace
    clip: Any = DistArray.clip
    round: Any = DistArray.round
    dot: Any = DistArray.dot
    ravel: Any = DistArray.ravel
    flatten: Any = DistArray.flatten
    squeeze: Any = DistArray.squeeze
    swapaxes: Any = DistArray.swapaxes
    conjugate: Any = DistArray.conjugate
    tolist: Any = DistArray.tolist
    H: Any = DistArray.H
    device: Any = DistArray.device
    itemsize: Any = DistArray.itemsize
    nbytes: Any = DistArray.nbytes
    _scalar: Any = DistArray._scalar
    __float__: Any = DistArray.__float__
    __int__: Any = DistArray.__int__
    __complex__: Any = DistArray.__complex__
    __round__: Any = DistArray.__round__
    __format__: Any = DistArray.__format__
    __len__: Any = DistArray.__len__
    __iter__: Any = DistArray.__iter__
    __array_namespace__: Any = DistArray.__array_namespace__

    def conj(self) -> Tensor:
        """Return the conjugate of every element."""
        return self if self.dtype.kind != "c" else _NUMPY.conjugate(self)

    @property
    def real(self) -> Tensor:
        """The real parts."""
        from parlinalg.autograd.functions import real

        return real(self)

    @property
    def imag(self) -> Tensor:
        """The imaginary parts."""
        from parlinalg.autograd.functions import imag

        return imag(self)

    def __abs__(self) -> Tensor:
        from parlinalg.autograd.ops.elementwise import abs

        return abs(self)

    def __pos__(self) -> Tensor:
        return self

    def __rpow__(self, base: Any) -> Tensor:
        return _NUMPY.power(base, self)

    def __mod__(self, other: Any) -> Tensor:
        return _NUMPY.remainder(self, other)

    def __rmod__(self, other: Any) -> Tensor:
        return _NUMPY.remainder(other, self)

    def __floordiv__(self, other: Any) -> DistArray:
        return _NUMPY.floor_divide(self, other)

    def __rfloordiv__(self, other: Any) -> DistArray:
        return _NUMPY.floor_divide(other, self)

    def __add__(self, other: Any) -> Tensor:
        from parlinalg.autograd.ops.arithmetic import add

        return add(self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Tensor:
        from parlinalg.autograd.ops.arithmetic import subtract

        return subtract(self, other)

    def __rsub__(self, other: Any) -> Tensor:
        from parlinalg.autograd.ops.arithmetic import subtract

        return subtract(other, self)

    def __mul__(self, other: Any) -> Tensor:
        from parlinalg.autograd.ops.arithmetic import multiply

        return multiply(self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Tensor:
        from parlinalg.autograd.ops.arithmetic import divide

        return divide(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        from parlinalg.autograd.ops.arithmetic import divide

        return divide(other, self)

    def __pow__(self, exponent: Any) -> Tensor:
        from parlinalg.autograd.ops.arithmetic import power

        return power(self, exponent)

    def __neg__(self) -> Tensor:
        from parlinalg.autograd.ops.arithmetic import negative

        return negative(self)

    def __matmul__(self, other: Any) -> Tensor:
        from parlinalg.autograd.ops.product import matmul

        return matmul(self, other)

    def __rmatmul__(self, other: Any) -> Tensor:
        from parlinalg.autograd.ops.product import matmul

        return matmul(other, self)

    def __lt__(self, other: Any) -> DistArray:
        return _NUMPY.less(self, other)

    def __le__(self, other: Any) -> DistArray:
        return _NUMPY.less_equal(self, other)

    def __gt__(self, other: Any) -> DistArray:
        return _NUMPY.greater(self, other)

    def __ge__(self, other: Any) -> DistArray:
        return _NUMPY.greater_equal(self, other)

    def _refuse(self, other: object) -> Any:
        raise TypeError(
            "== and != do not compare tensors, which are keys of sets and dicts; compare their values: "
            "x.data == y.data, or parlinalg.equal(x, y)"
        )

    __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TypeError("a tensor has no truth value; take its number by .item()")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise TypeError(
            "a Tensor does not become a NumPy array by itself: this rank holds one block of it. Use .gather() for "
            "the global array, .block for this rank's part"
        )

    # ------------------------------------------------------------------ functions of arrays
    def __parlinalg_function__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        from parlinalg.autograd.primitives import call

        return call(function, args, kwargs)

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        from parlinalg.autograd.primitives import call_numpy

        return call_numpy(function, args, kwargs)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        from parlinalg.autograd.primitives import call_ufunc

        return call_ufunc(ufunc, method, inputs, kwargs)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(DistArray, name):
            raise AttributeError(
                f"a Tensor has no {name!r}, which DistArrays have; take it of the value, x.data, without a gradient",
                name=name, obj=self,
            )  # fmt: skip
        return object.__getattribute__(self, name)


_NUMPY: Any = np  # whose functions return Tensors, which its types do not know


def refuse_out(out: Any) -> None:
    """Raise an error if a result is to be written into an array: tensors are values."""
    if out is not None:
        raise TypeError("functions of tensors take no out=: tensors are not written to")


def start_walk(
    root: Tensor, grad: Tensor | DistArray | None = None, *, retain: bool = False, later: bool = False
) -> Walk:
    """Return the backward pass from `root`, ready to run.

    With `later` the parameters' part runs apart (see `Walk`).
    """
    node = root.node
    if node is None:
        raise RuntimeError(
            "backward() of a value that wants no gradient: no tensor with requires_grad=True is in it, or it was "
            "made within no_grad()"
        )
    layout = root.layout.with_partial(())
    if grad is None:
        if root.size != 1:
            raise ValueError(
                f"backward() of a value of shape {root.shape} needs its gradient: backward(grad), or a sum first"
            )
        block = root.data.xp.ones(root.block.shape, root.dtype)
    else:
        data = grad.data if isinstance(grad, Tensor) else grad
        if data.shape != root.shape:
            raise ValueError(f"backward() of a value of shape {root.shape} is given a gradient of shape {data.shape}")
        if data.layout != layout and root.grid.effective(data.layout) != root.grid.effective(layout):
            raise LayoutError(
                f"backward(): the gradient has {data.layout!r}, the value {root.layout!r}; mend it by "
                f".redistribute({layout!r})"
            )
        block = data.block
    return Walk(node, (block, layout), retain=retain, later=later)


def record(
    op: str, data: DistArray, inputs: Sequence[Tensor], parts: Sequence[Part | Callable[[Any], Any]],
    prepare: Part | Callable[[Block], Any] | None = None, *, takes_partial: bool = False,
) -> Tensor:  # fmt: skip
    """Return the result of an operation as a tensor, with the rule by which its gradient goes to the inputs.

    Parameters
    ----------
    op : str
        The operation's name, under which reports of memory list what it saves.
    data : DistArray
        The result.
    inputs : sequence of Tensor
    parts : sequence of Part or callable
        The rule, one part for each input: takes the gradient of the result, a block in the result's layout, and the
        arrays that the `Part` saves, and returns a term of the input's gradient: a block and its layout, which may be
        partial.  A function alone is a part that saves nothing.
    prepare : Part or callable, optional
        Makes of the gradient what all parts are given in its place.
    takes_partial : bool
        Whether the parts are linear and take the gradient as a term, (block, layout), which may be partial.

    Nothing is saved for inputs that want no gradient, nor within `no_grad`.

    Examples
    --------
    >>> import numpy as np, parlinalg as pla
    >>> from parlinalg.autograd import Part, record
    >>> grid = pla.Grid({"r": 1})
    >>> x = pla.Tensor(pla.distribute(np.arange(3.0), grid, pla.Layout("r")), requires_grad=True)
    >>> y = record("cube", x.data**3, [x], [Part(lambda g, x: (3 * g * x**2, pla.Layout("r")), x.block)])
    >>> y.sum().backward()
    >>> x.grad.gather()
    array([ 0.,  3., 12.])
    """
    result = Tensor(data)
    data.grid.poll()
    if recording():
        sources: list[Node] = []
        kept: list[Part] = []
        for x, part in zip(inputs, parts, strict=True):
            if x._node is not None:
                sources.append(x._node)
                kept.append(part if type(part) is Part else Part(part))
        if sources:
            shared = prepare if prepare is None or type(prepare) is Part else Part(prepare)
            if (pack := packing(_at_rest(inputs))) is not None:
                shared = None if shared is None else pack(shared)
                kept = [pack(part) for part in kept]
            for part in (*kept, *([] if shared is None else [shared])):
                for saved in part.saved:
                    if memory_label(saved) == "buffers":
                        label_memory(saved, "activations")
            result._node = Node(data, tuple(sources), tuple(kept), shared, takes_partial=takes_partial, op=op)
    else:
        note(t._node for t in inputs)
    return result


def record_again(op: str, data: DistArray, sources: Sequence[Node], again: Part) -> Tensor:
    """Return the result of operations on `sources` that were not recorded, and are done `again` in the backward pass.

    Parameters
    ----------
    again : Part
        Takes the walk, the gradient, and the saved arrays.
    """
    result = Tensor(data)
    if sources:
        pack = packing()
        result._node = Node(data, tuple(sources), recompute=again if pack is None else pack(again), op=op)
    return result


def _at_rest(inputs: Sequence[Tensor]) -> Iterator[Block]:
    """Yield the blocks of the inputs that are parameters, or transposed views of them."""
    from parlinalg.autograd.parameter import Parameter

    for x in inputs:
        if (isinstance(x, Parameter) or x.origin is not None) and (block := x.data.resident) is not None:
            yield block


def redistribute(x: Tensor | DistArray, layout: Layout) -> Any:
    """Redistribute a tensor or an array to another layout: the same value, cut otherwise.  Collective.

    No rank receives more elements than its new block lacks.  The gradient of a tensor goes back to the old layout.

    Parameters
    ----------
    x : Tensor or DistArray
    layout : Layout

    Returns
    -------
    Tensor or DistArray
        As x is.

    Examples
    --------
    >>> import numpy as np, parlinalg as pla
    >>> grid = pla.Grid({"r": 1})
    >>> pla.redistribute(pla.distribute(np.ones((4, 3)), grid, pla.Layout("r", None)), pla.Layout(None, "r")).layout
    Layout(None, 'r')
    """
    if not isinstance(x, Tensor | DistArray):
        raise TypeError(
            f"redistribute takes a Tensor or a DistArray, not {type(x).__name__}; distribute(array, grid, "
            "layout) makes one"
        )
    return x.redistribute(layout)


def matmul(a: Any, b: Any, plan: Plan | None = None, **options: Any) -> Any:
    """Multiply two arrays or two tensors.  Collective.

    Parameters
    ----------
    a, b : DistArray or Tensor
    plan : Plan, optional
        Which axes cut which dims at work, and how the operands and the result rest; by default that which moves the
        fewest words.
    **options
        For arrays `alpha`, `beta`, `out`, `layout` and `memory`, as of `parlinalg.matmul.api.matmul`; for tensors
        `keep`, `bias` and `memory`, as of `ops.matmul`.

    Returns
    -------
    DistArray or Tensor
        A tensor if one of the operands is one.
    """
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        from parlinalg.autograd.ops import product

        return product.matmul(a, b, plan, **options)
    return api.matmul(a, b, plan=plan, **options)


def as_tensor(value: Any) -> Tensor:
    """Return the value as a tensor; a DistArray is a constant."""
    if isinstance(value, Tensor):
        return value
    return Tensor(value)
