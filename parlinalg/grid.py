"""Processor grids: Cartesian communicators whose axes have names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Protocol

from parlinalg.backend import Backend, select_backend
from parlinalg.backend.blas import cores_of, host_and_cores, set_blas_threads, sharing
from parlinalg.comm import Comm, ImaginedComm, between_gpus, open_comm
from parlinalg.comm.single import SingleComm
from parlinalg.comm.startup import place_on_node
from parlinalg.errors import GridError
from parlinalg.layout import Cut, Layout, coordinates, index_of

#: The largest tag that every MPI takes is 32767.
MOST_TICKETS = 32000


class Pollable(Protocol):
    """An object with communication in progress."""

    def poll(self) -> None:
        """Let it progress, without waiting."""


class Device(str):
    """The device of an array, "cpu" or "cuda", and the grid on which arrays made for it live.

    So libraries that make arrays with `device=x.device` make them on the grid of x.

    Attributes
    ----------
    grid : Grid
    """

    grid: Grid

    def __new__(cls, name: str, grid: Grid) -> Device:
        device = super().__new__(cls, name)
        device.grid = grid
        return device


class Grid:
    """A Cartesian processor grid with named axes, and the backend of the arrays on it.

    Parameters
    ----------
    sizes : dict of str to int
        The axes' names and sizes, outermost first; the ranks are numbered in row-major order of their coordinates.
    comm : mpi4py communicator, Comm or None
        The ranks that form the grid, by default all of `MPI.COMM_WORLD` (one rank where MPI is not installed).  It is
        duplicated, never used itself.
    backend : {"auto", "numpy", "cupy", "shapes"}
        The backend of the blocks; "auto" is CuPy where every rank has a GPU, else NumPy.  The blocks of "shapes" have
        no values; it is the only one of imagined ranks (`parlinalg.imagine`), where "auto" chooses it.
    idle : bool
        Allow fewer ranks in the grid than in `comm`: the first ones form the grid, the others hold blocks of size zero
        and may make every call.

    Making a grid is collective over `comm`, and sets the number of BLAS threads of this process.  Within `with grid:`
    it is the default grid of the array functions; at the end it is closed.

    Attributes
    ----------
    sizes : dict of str to int
    size : int
        The number of ranks in the grid.
    rank : int
        This rank's number in `comm`.
    inside : bool
        True if this rank is in the grid.
    coords : dict of str to int
        This rank's coordinates, by axis (empty outside the grid).
    backend : Backend
    world : Comm
        All ranks of `comm`, also those outside the grid.
    cores : int
        The cores of this rank's node on which ranks of the grid may run; of imagined ranks each has one.

    Raises
    ------
    GridError
        If the sizes do not fit the ranks (the message lists the shapes that would), or ranks disagree about them.

    Examples
    --------
    >>> with Grid({"r": 1, "c": 1}) as grid:
    ...     print(grid)
    Grid({'r': 1, 'c': 1}, backend='numpy')
    """

    def __init__(
        self, sizes: Mapping[str, int], comm: object = None, backend: str = "auto", *, idle: bool = False
    ) -> None:
        self.world: Comm = open_comm(comm)
        self._owns_world = self.world is not comm
        self._subs: dict[Cut, Comm] = {}
        self._effective: dict[Layout, Layout] = {}
        self._closed = False
        self._tickets = 0
        self.polled: list[Pollable] = []
        """Objects with communication in progress while values are computed."""
        self.closing: list[Callable[[], None]] = []
        """Functions that complete what is in progress, to be called before the communicators are freed."""
        self.mesh: Any = None
        """The mesh of which the grid is a part, where `parlinalg.launch` made it."""
        try:
            self.sizes = self._agreed(sizes, backend, idle)
            self.size = math.prod(self.sizes.values())
            self.rank = self.world.rank
            self.inside = self.rank < self.size
            self.backend = self._agreed_backend(backend)
        except BaseException:
            if self._owns_world:
                self.world.free()
            raise
        self.coords = self.coords_of(self.rank) if self.inside else {}
        cart = self.world.cartesian(self.sizes)
        self._cart: Comm = SingleComm() if cart is None else between_gpus(cart, self.backend)
        if self.world.imagined:
            self.threads, self._cores = 1, self.size
            return
        local_ranks = place_on_node(self.world)[1]
        places = self.world.share(host_and_cores(), others="by rank")
        self.threads = set_blas_threads(sharing(places, self.rank, local_ranks))
        self._cores = cores_of(places[: self.size], places[self.rank][0])

    @property
    def cores(self) -> int:
        return self._cores

    def _agreed(self, sizes: Mapping[str, int], backend: str, idle: bool) -> dict[str, int]:
        """Return the sizes, once all ranks have the same valid ones; a bad call on any rank raises on all."""
        problem = _problem(sizes, self.world.size, idle)
        mine = [problem, {} if problem else {a: int(n) for a, n in sizes.items()}, str(backend)]
        everyone = self.world.share(mine, others="alike")
        for reported, *_ in everyone:
            if reported:
                raise GridError(reported)
        for rank, theirs in enumerate(everyone):
            if theirs[1:] != mine[1:] or list(theirs[1]) != list(mine[1]):
                raise GridError(
                    f"rank {rank} makes a grid {theirs[1]} with backend {theirs[2]!r}, rank {self.world.rank} one of "
                    f"{mine[1]} with backend {backend!r}; all ranks must make the same grid"
                )
        return {a: int(n) for a, n in sizes.items()}

    def _agreed_backend(self, name: str) -> Backend:
        local_rank = place_on_node(self.world)[0]
        try:
            chosen, problem = self._selected(name, local_rank), ""
        except Exception as error:  # told to all ranks below
            chosen, problem = None, f"rank {self.rank}: {error}"
        replies = self.world.share([problem, chosen.name if chosen else ""], others="alike")
        for theirs, _ in replies:
            if theirs:
                raise GridError(f"backend {name!r} cannot be used: {theirs}")
        if chosen is None or any(theirs != chosen.name for _, theirs in replies):
            chosen = select_backend("numpy", local_rank)  # "auto" where only some ranks have a GPU
        return chosen

    def _selected(self, name: str, local_rank: int) -> Backend:
        if not isinstance(self.world, ImaginedComm):
            return select_backend(name, local_rank)
        device = self.world.device
        if name not in ("auto", "shapes", "numpy" if device.cpu else "cupy"):
            raise GridError(f"the imagined ranks have {device.device}; leave backend out, or pass 'shapes'")
        return device

    @property
    def axes(self) -> Cut:
        return tuple(self.sizes)

    @property
    def device(self) -> Device:
        """The device of the blocks of arrays on it, "cpu" or "cuda", which knows its grid."""
        return Device("cpu" if self.backend.host_memory else "cuda", self)

    def coords_of(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank of the grid."""
        if not 0 <= rank < self.size:
            raise GridError(f"rank {rank} is not in {self!r}, which has {self.size} ranks")
        coords = {}
        for axis in reversed(self.axes):
            rank, coords[axis] = divmod(rank, self.sizes[axis])
        return {axis: coords[axis] for axis in self.axes}

    def rank_of(self, coords: Mapping[str, int]) -> int:
        """Return the rank at these coordinates."""
        return index_of(self.axes, self.sizes, coords)

    def comm(self, axes: Cut) -> Comm:
        """Return the communicator of the ranks that differ from this one only along `axes`, in row-major order.

        Its first use is collective over those ranks; it is kept until the grid is closed.
        """
        self.check_open()
        if (found := self._subs.get(axes)) is not None:
            return found
        for axis in axes:
            if axis not in self.sizes:
                raise GridError(f"no axis {axis!r} in the grid, which has {self.sizes}")
        key = tuple(a for a in axes if self.sizes[a] > 1)
        if key not in self._subs:
            self._subs[key] = self._make_comm(key)
        self._subs[axes] = self._subs[key]
        return self._subs[key]

    def check_open(self) -> None:
        """Raise GridError if the grid is closed."""
        if self._closed:
            raise GridError("this grid is closed; make arrays and products before close() or inside `with`")

    def _make_comm(self, axes: Cut) -> Comm:
        if not axes or not self.inside:
            return SingleComm()
        if axes == tuple(a for a, n in self.sizes.items() if n > 1):
            return self._cart
        ranks = [self.rank_of({**self.coords, **at}) for at in coordinates(axes, self.sizes)]
        return self._cart.sub(ranks, axes)

    def effective(self, layout: Layout) -> Layout:
        """Return the layout without axes of one rank, which cut nothing."""
        found = self._effective.get(layout)
        if found is None:
            found = self._effective[layout] = layout.without([a for a in layout.axes if self.sizes[a] == 1])
        return found

    def ticket(self) -> int:
        """Return the next number to tell this grid's operations in progress apart, the same on all ranks."""
        self._tickets = self._tickets % MOST_TICKETS + 1
        return self._tickets

    def poll(self) -> None:
        """Make communication progress; called between operations, since MPI progresses only within its calls."""
        for each in self.polled:
            each.poll()

    @property
    def everyone(self) -> Comm:
        """The communicator of all ranks in the grid, in row-major order."""
        return self.comm(self.axes)

    def default_layout(self, shape: tuple[int, ...]) -> Layout:
        """Return the layout of an array of this shape for which none is given.

        Each axis, outermost first, cuts the dim whose pieces are the longest so far, the first of several; a piece of
        one item is cut no more.  Every axis counts as if it had two ranks: so the layout depends on the shape and the
        axes' names alone, not on the number of ranks.

        Examples
        --------
        >>> grid = Grid({"r": 1, "c": 1})
        >>> grid.default_layout((6, 6)), grid.default_layout((1000, 3)), grid.default_layout((1,))
        (Layout('r', 'c'), Layout(('r', 'c'), None), Layout(None))
        """
        return default_layout(self.axes, shape)

    def block(self, layout: Layout, shape: tuple[int, ...]) -> tuple[range, ...]:
        """Return for each dim the range of global indices in this rank's block (empty ranges outside the grid)."""
        return layout.block(shape, self.sizes, self.coords) if self.inside else tuple(range(0) for _ in shape)

    def block_shape(self, layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(len(r) for r in self.block(layout, shape))

    def close(self) -> None:
        """Free the communicators.  Collective over the grid's ranks; its arrays cannot communicate afterwards."""
        if self._closed:
            return
        for complete in list(self.closing):
            complete()
        self._closed = True
        for comm in {id(c): c for c in self._subs.values() if c is not self._cart}.values():
            comm.free()
        self._subs.clear()
        self._cart.free()
        if self._owns_world:
            self.world.free()

    def __enter__(self) -> Grid:
        _entered.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self in _entered:
            _entered.remove(self)
        if kind is None:  # an error on this rank must not wait for the others
            self.close()

    def __repr__(self) -> str:
        return f"Grid({self.sizes}, backend={self.backend.name!r})"


def default_layout(axes: Cut, shape: tuple[int, ...]) -> Layout:
    """Return the default layout of arrays on a grid with these axes; see `Grid.default_layout`."""
    dims: list[Cut] = [()] * len(shape)
    lengths = list(shape)
    for axis in axes:
        longest = max(range(len(shape)), key=lambda d: lengths[d], default=-1)
        if longest >= 0 and lengths[longest] > 1:
            dims[longest] = (*dims[longest], axis)
            lengths[longest] = -(-lengths[longest] // 2)
    return Layout(*dims)


_entered: list[Grid] = []
_default: list[Grid] = []


def default_grid() -> Grid:
    """Return the grid of arrays for which none is given: of the innermost `with grid:`, else the one that was set.

    If none was set, a grid `{"r": …, "c": …}` of all ranks is made, with as many rows as columns or the next more.  The
    first use is collective then.
    """
    if _entered:
        return _entered[-1]
    if not _default or _default[-1]._closed:
        world = open_comm(None)
        columns = max(d for d in range(1, world.size + 1) if world.size % d == 0 and d * d <= world.size)
        set_default_grid(Grid({"r": world.size // columns, "c": columns}, world))
    return _default[-1]


def set_default_grid(grid: Grid | None) -> None:
    """Set the grid of arrays for which none is given; None restores a near-square one of all ranks.

    Raises
    ------
    GridError
        If the grid is closed.
    """
    if grid is not None and grid._closed:
        raise GridError("a closed grid cannot be the default one")
    _default[:] = [] if grid is None else [grid]


def worlds(grids: Iterable[Grid]) -> list[Comm]:
    """Return the communicators over all ranks of each grid, once each, in order."""
    return list({id(g.world): g.world for g in grids}.values())


def _problem(sizes: Mapping[str, int], ranks: int, idle: bool) -> str:
    """Return the problem with the sizes of a grid over so many ranks, or an empty string."""
    if not isinstance(sizes, Mapping) or not sizes:
        return f'a grid takes a dict of axis names and sizes, such as {{"r": 2, "c": 2}}, not {sizes!r}'
    for axis, n in sizes.items():
        if not isinstance(axis, str) or not axis:
            return f"a grid's axes have names, such as 'r'; {axis!r} is not a name"
        if isinstance(n, bool) or not hasattr(n, "__index__") or int(n) < 1:
            return f"axis {axis!r} of a grid needs a size of at least 1, not {n!r}"
    total = math.prod(int(n) for n in sizes.values())
    if total == ranks or (idle and total < ranks):
        return ""
    shapes = factorizations(ranks, len(sizes))
    fitting = ", ".join(str(dict(zip(sizes, s, strict=True))) for s in shapes[:24]) + (
        ", …" if len(shapes) > 24 else ""
    )
    return f"a grid {dict(sizes)} takes {total} ranks, but there are {ranks}; shapes that fit: {fitting}"


def factorizations(n: int, parts: int) -> list[tuple[int, ...]]:
    """Return all ordered ways to write n as a product of `parts` positive integers.

    >>> factorizations(4, 2)
    [(1, 4), (2, 2), (4, 1)]
    """
    if parts == 1:
        return [(n,)]
    return [(d, *rest) for d in range(1, n + 1) if n % d == 0 for rest in factorizations(n // d, parts - 1)]
