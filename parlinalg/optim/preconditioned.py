"""Optimizers with a preconditioner of each side of a matrix, which lie at the matrix's home rank: Shampoo and SOAP."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, ClassVar, Unpack

import numpy as np

from parlinalg.autograd import Parameter, Partition
from parlinalg.backend import backend_of, namespace
from parlinalg.backend.shapes import has_values
from parlinalg.errors import ConfigError, OffloadError
from parlinalg.grid import Grid
from parlinalg.layout import piece
from parlinalg.linalg import kernels
from parlinalg.optim.flat import Entry, FlatOptions, HomeState, InMemory, Run, states_of
from parlinalg.optim.groups import Group, Option
from parlinalg.optim.matrices import Exchange, Matrix, Slots, balanced, matrices_of, packed, resting, split_of
from parlinalg.optim.matrixwise import Matrixwise
from parlinalg.optim.optimizer import as_number, below_one, whole

Block = Any
GRAFTS = (None, "sgd", "adam")
ROOTS = ("eigh", "newton")
LEAST = 64
"""The rounding of the singular values of small matrices, in units of the largest one's."""
NOTHING = 2.0**-40
"""Elements below this part of the largest one count as zeros, of which rounding in float64 makes such; that in float32
makes larger ones, which stay."""


@dataclass
class Brought:
    """The exchanges that bring matrices home and their directions back, and the slots that this rank has at home."""

    bring: Exchange
    back: Exchange
    slots: Slots


class Preconditioned(Matrixwise):
    """An optimizer that keeps its states of a parameter's matrices at one home rank, and computes their steps there.

    The parameters are distributed over all ranks of their grid, so that all have about the same to do.  A step brings
    the gradients home by one all-to-all, and the directions back by another.  Home states that are offloaded come to
    memory one parameter at a time.
    """

    max_precond_dim = Option[int]()
    precondition_frequency = Option[int]()
    _homes: dict[int, int]

    def __init__(self, parameters: Iterable[Any], lr: float, weight_decay: float, **options: Any) -> None:
        self._homes = {}
        self._problem: OffloadError | None = None
        self._brought: dict[tuple[int, str], Brought] = {}
        super().__init__(parameters, lr, weight_decay, **options)

    def check_options(self, options: dict[str, Any]) -> None:
        super().check_options(options)
        for name in ("max_precond_dim", "precondition_frequency"):
            whole(type(self).__name__, name, options[name])

    def states_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return () if group["matrices"] else self.OTHERS

    # ------------------------------------------------------------------ states at home
    @abstractmethod
    def shapes(self, p: Parameter, group: Group) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the states of a parameter, by their names: batch dims, and then a matrix's."""

    def homes(self) -> dict[int, int]:
        """Return the home rank of each parameter of matrices, by its identity; what has one keeps it."""
        new: dict[int, list[Parameter]] = {}
        for p in self._matrices():
            if id(p) not in self._homes:
                new.setdefault(id(p.grid), []).append(p)
        for alike in new.values():
            groups = {id(p): group for group in self.param_groups for p in group["params"]}
            costs = [self._cost(p, groups[id(p)]) for p in alike]
            self._homes |= dict(zip(map(id, alike), balanced(costs, alike[0].grid.size), strict=True))
        return self._homes

    @staticmethod
    def _cost(p: Parameter, group: Group) -> int:
        """Return about the flops of a parameter's roots or bases, in a unit of its own."""
        found = matrices_of(0, p.shape, split_of(p))
        if not found:
            return 0
        return len(found) * sum(
            a**3 + b**3 for a, b in product(*(map(len, parts) for parts in blocks(found[0], group)))
        )

    def _matrices(self) -> list[Parameter]:
        return [p for group in self.param_groups if group["matrices"] for p in group["params"]]

    def home_states(self) -> list[HomeState]:
        homes, found = self.homes(), []
        for group in self.param_groups:
            for p in group["params"] if group["matrices"] else ():
                dtype = states_of(p.dtype, self.flat.master)[0]
                mine = p.grid.inside and p.grid.rank == homes[id(p)]
                for name, shape in self.shapes(p, group).items():
                    entry = None
                    if mine:
                        entry = Entry(p, p.data, Partition(0, math.prod(shape)), dtype, (name,), home=True)
                    found.append(HomeState(p, name, shape, dtype, homes[id(p)], self.flat, entry))
        return sorted(found, key=lambda each: each.name)  # alike ones lie side by side

    def work_of_ranks(self) -> dict[int, int]:
        held, largest = Counter[int](), Counter[int]()
        for p in self._matrices():
            home = self.homes()[id(p)]
            held[home] += p.size
            for matrix in matrices_of(0, p.shape, split_of(p))[:1]:
                largest[home] = max(largest[home], self.temporary(matrix))
        return held + largest

    # ------------------------------------------------------------------ a step
    def measure(self, run: Run, part: slice, out: Block) -> None:
        out[...] = run.g[part]
        if self.factor != 1.0:
            out *= out.dtype.type(self.factor)

    def directions(self, entries: Sequence[Entry], buffer: Block) -> None:
        grid = entries[0].data.grid
        place = id(grid), entries[0].dtype.str
        homes = self.homes()
        if self.changed(entries, grid):
            self._brought[place] = self._exchanges(entries, grid, homes)
        made, backend = self._brought[place], grid.backend
        held = backend.empty((made.bring.size,), buffer.dtype)
        made.bring.run(buffer, held, backend)
        states: dict[int, list[HomeState]] = {}
        for state in self.home_states():
            if state.entry is not None:
                states.setdefault(id(state.parameter), []).append(state)
        try:
            self._problem = None
            with np.errstate(all="ignore"):
                for slot in made.slots:
                    self._direct_all(entries[slot.tensor], states[id(entries[slot.tensor].parameter)], slot.view(held))
        except OffloadError as error:  # the others wait for what they are sent
            self._problem = error
        made.back.run(held, buffer, backend)

    def _direct_all(self, entry: Entry, states: Sequence[HomeState], g: Block) -> None:
        """Replace the gradient of a parameter that is at home here by the directions of its matrices."""
        group, mine = self.param_groups[entry.group], {s.name: s.read().reshape(s.shape) for s in states}
        mine["count"] += 1
        step = int(mine["count"][0]) if has_values(g) else self.steps  # imagined parameters have gradients at each step
        for m in matrices_of(0, entry.data.shape, split_of(entry.parameter)):
            at = tuple(r.start for r in m.rect[: len(m.rect) - len(m.inputs) - len(m.outputs)])
            x = g[at].reshape(m.rows, m.columns)
            parts = {name: array[at] for name, array in mine.items() if name != "count"}
            parts |= {name: parts[name].reshape(m.rows, m.columns) for name in self.ALIKE if name in parts}
            for block, views in self._blocks(m, parts, group):
                x[block] = self.direct(x[block], views, step, group)
        if not isinstance(self.flat.states, InMemory):
            for s in states:
                self.flat.states.write(s.entry, s.name, mine[s.name])  # type: ignore[arg-type]

    def check_directions(self) -> None:
        def check() -> None:
            if self._problem is not None:
                raise self._problem

        self.flat.where_they_lie(check, "computing the steps of matrices at home")

    ALIKE: ClassVar[tuple[str, ...]] = ()
    """The states of a parameter's own shape."""

    def _blocks(
        self, m: Matrix, states: dict[str, Block], group: Group
    ) -> Iterator[tuple[tuple[slice, slice], dict[str, Block]]]:  # fmt: skip
        """Iterate over the blocks of a matrix, with views of their states."""
        used = {"left": 0, "right": 0}
        for parts in product(*blocks(m, group)):
            where = tuple(slice(r.start, r.stop) for r in parts)
            views = {name: states[name][where] for name in self.ALIKE if name in states}
            for side, n in zip(used, map(len, parts), strict=True):
                if n > group["max_precond_dim"]:
                    continue
                at = used[side]
                used[side] += n * n
                for name in states:
                    if name.startswith(side):
                        views[name] = states[name].reshape(-1)[at : at + n * n].reshape(n, n)
            yield where, views  # type: ignore[misc]

    def _exchanges(self, entries: Sequence[Entry], grid: Grid, homes: Mapping[int, int]) -> Brought:
        rest = resting(entries, grid)
        parts: list[list[tuple[int, Any, int]]] = [[] for _ in range(grid.size)]
        for number, e in enumerate(entries):
            if e.data.size:
                parts[homes[id(e.parameter)]].append((number, tuple(map(range, e.data.shape)), number))
        slots = [packed(each) for each in parts]
        cuts = [(*e.data.layout.cut_axes, *e.partition.axes) for e in entries]
        repeated = [tuple(a for a in grid.axes if a not in cut) for cut in cuts]
        bring, back = Exchange(grid, rest, slots, repeated), Exchange(grid, slots, rest, [()] * len(entries))
        return Brought(bring, back, slots[grid.everyone.rank])

    @abstractmethod
    def direct(self, g: Block, states: dict[str, Block], step: int, group: Group) -> Block:
        """Return the direction of a matrix's step from its gradient.

        Parameters
        ----------
        g : array
            [rows, columns].
        states : dict of str to array
            Of this matrix, to be changed in place.
        step : int
            The number of this parameter's step, from 1.
        group : dict
            Its parameter group.
        """

    def sides(self, p: Parameter, group: Group) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a parameter's preconditioners, of sides of at most `max_precond_dim`.

        Those of several blocks lie flat, one after the other.
        """
        batch, inputs = split_of(p)
        lead, first, second = p.shape[:batch], p.shape[batch : batch + inputs], p.shape[batch + inputs :]
        whole = Matrix(0, tuple(map(range, (*first, *second))), first, second)
        cut = blocks(whole, group)
        several = math.prod(map(len, cut)) > 1
        found: dict[str, tuple[int, ...]] = {}
        for side, lengths in zip(("left", "right"), zip(*product(*(map(len, each) for each in cut)), strict=True)):
            kept = [n for n in lengths if n <= group["max_precond_dim"]]
            if kept:
                found[side] = (*lead, sum(n * n for n in kept)) if several else (*lead, kept[0], kept[0])
        return found


def blocks(m: Matrix, group: Group) -> tuple[list[range], list[range]]:
    """Return the ranges of rows and of columns that cut a matrix into blocks of at most `block_size`, if that is set.

    All are of about the same length.

    Examples
    --------
    >>> blocks(Matrix(0, (range(5), range(3)), (5,), (3,)), {"block_size": 3})
    ([range(0, 3), range(3, 5)], [range(0, 3)])
    """
    size = group.get("block_size")

    def cut(n: int) -> list[range]:
        parts = max(1, -(-n // size)) if size else 1
        return [piece(n, parts, i) for i in range(parts)]

    return cut(m.rows), cut(m.columns)


class Shampoo(Preconditioned):
    """Shampoo (Gupta, Koren and Singer, "Shampoo: preconditioned stochastic tensor optimization", 2018).

    `L += g gᵀ`; `R += gᵀ g`; `m = momentum m + (1 - momentum) g`; `p -= lr (L + damping)^(-¼) m (R + damping)^(-¼)`.
    The roots are computed anew every `precondition_frequency` steps.  Matrices are those of `matrix_groups`; AdamW
    updates all other parameters.

    Parameters
    ----------
    parameters : iterable of Parameter, or of dict
        See `Optimizer`; groups without an option "matrices" are split by `matrix_groups`.
    lr : float
    momentum : float
        The decay of the running mean of gradients, at least 0 and below 1.
    beta2 : float
        1: the preconditioners are sums, as in the paper.  Below 1 they are running means `L = β₂ L + (1 - β₂) g gᵀ`,
        corrected for their start at zero (Shi et al., "A distributed data-parallel PyTorch implementation of the
        distributed Shampoo optimizer", 2023).
    damping : float
        Above 0.
    precondition_frequency : int
        Steps between two computations of the roots, at least 1.
    block_size : int, optional
        A matrix with a longer side is cut into blocks of at most so many rows and columns, of about the same lengths,
        and each is preconditioned as a matrix of its own, grafting included (Shi et al.).  None: none is cut.
    max_precond_dim : int
        A side of a matrix, or of a block of one, that is longer has no preconditioner; the other side's exponent is
        then -1/2.
    grafting : {None, "sgd", "adam"}
        Each matrix's direction is scaled to the norm of this optimizer's step (Anil et al., "Scalable second order
        optimization for deep learning", 2020).
    root : {"eigh", "newton"}
        Compute roots by eigenvalues, or by the coupled Newton iteration (Anil et al.).
    weight_decay : float
        Decoupled.
    adamw_lr, betas, eps, adamw
        As for `Muon`; Adam's step for `grafting` has the same betas and eps.
    master : bool or dtype, optional
        See `Optimizer`.

    Raises
    ------
    ConfigError
        If an option is out of its range, or the parameters are not as `Optimizer` takes them.
    """

    NAME: ClassVar[str] = "shampoo"
    ALIKE: ClassVar[tuple[str, ...]] = ("momentum", "square")
    momentum = Option[float]()
    beta2 = Option[float]()
    damping = Option[float]()
    block_size = Option[int | None]()
    grafting = Option[str | None]()
    root = Option[str]()

    def __init__(
        self, parameters: Iterable[Any], lr: float = 0.1, momentum: float = 0.9, *, beta2: float = 1.0,
        damping: float = 1e-4, precondition_frequency: int = 20, block_size: int | None = 1024,
        max_precond_dim: int = 8192, grafting: str | None = None, root: str = "eigh", weight_decay: float = 0.0,
        adamw_lr: float | None = 3e-4, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        adamw: Sequence[str] = (),
        **kept: Unpack[FlatOptions],
    ) -> None:  # fmt: skip
        super().__init__(
            parameters, lr, weight_decay, momentum=momentum, beta2=beta2, damping=damping, grafting=grafting, root=root,
            precondition_frequency=precondition_frequency, block_size=block_size, max_precond_dim=max_precond_dim,
            adamw=adamw, adamw_lr=adamw_lr, betas=betas, eps=eps, **kept,
        )  # fmt: skip

    def check_options(self, options: dict[str, Any]) -> None:
        super().check_options(options)
        below_one(momentum=options["momentum"])
        if not 0 < as_number(options["beta2"]) <= 1:
            raise ConfigError(f"Shampoo's beta2 is above 0 and at most 1, not {options['beta2']!r}")
        if options["block_size"] is not None:
            whole("Shampoo", "block_size", options["block_size"], ", or None")
        if not 0 < as_number(options["damping"]) < math.inf:
            raise ConfigError(f"Shampoo's damping is above 0, not {options['damping']!r}")
        for name, right in (("grafting", GRAFTS), ("root", ROOTS)):
            if options[name] not in right:
                raise ConfigError(f"Shampoo's {name} is {', '.join(map(repr, right))}, not {options[name]!r}")

    def shapes(self, p: Parameter, group: Group) -> dict[str, tuple[int, ...]]:
        sides = self.sides(p, group)
        roots = {f"{side}_root": shape for side, shape in sides.items()}
        own = ["momentum"] * bool(group["momentum"]) + ["square"] * (group["grafting"] == "adam")
        return {"count": (1,), **dict.fromkeys(own, tuple(p.shape)), **sides, **roots}

    def direct(self, g: Block, states: dict[str, Block], step: int, group: Group) -> Block:
        beta2, momentum = group["beta2"], group["momentum"]
        sides = [side for side in ("left", "right") if side in states]
        accumulate(g, states, sides, beta2)
        if (step - 1) % group["precondition_frequency"] == 0:
            correction = 1.0 if beta2 == 1 else 1 - beta2**step
            for side in sides:
                inverse = inverse_root if group["root"] == "eigh" else newton_inverse_root
                a, root = states[side] / correction, states[f"{side}_root"]
                root[...] = inverse(a, 2 * len(sides), group["damping"]) if finite(a) else math.nan
        mean = g
        if momentum:
            mean = states["momentum"]
            mean *= momentum
            mean += (1 - momentum) * g
        d = states["left_root"] @ mean if "left" in states else mean
        d = d @ states["right_root"] if "right" in states else d
        return d if group["grafting"] is None else self._grafted(d, mean, g, states, step, group)

    def _grafted(
        self, d: Block, mean: Block, g: Block, states: dict[str, Block], step: int, group: Group
    ) -> Block:  # fmt: skip
        xp, like = namespace(g), mean
        if group["grafting"] == "adam":
            square, beta = states["square"], group["betas"][1]
            square *= beta
            add_square(square, g, 1 - beta)
            size = xp.sqrt(square / (1 - beta**step))
            size += group["eps"]
            like = mean / (1 - group["momentum"] ** step)
            like /= size
        norm = float(xp.linalg.norm(d))
        return d * (float(xp.linalg.norm(like)) / norm) if norm else d


class SOAP(Preconditioned):
    """SOAP (Vyas et al., "SOAP: improving and stabilizing Shampoo using Adam", 2024): Adam in Shampoo's eigenbasis.

    `L = β₂ L + (1 - β₂) g gᵀ` and `R` alike; their eigenvectors Q are those of the first gradient, and every
    `precondition_frequency` steps `Q = qr(L Q)`, with the columns sorted by their Rayleigh quotients.  Adam's second
    moments are of `Qᵀ g Q`, and its step is taken back from there.  The first gradient only sets the bases up.  The
    matrices are those of `matrix_groups`; AdamW updates all other parameters.

    Parameters
    ----------
    parameters : iterable of Parameter, or of dict
        See `Optimizer`; groups without an option "matrices" are split by `matrix_groups`.
    lr : float
    betas : tuple of two floats
        Of Adam in the eigenbasis, and of AdamW; each at least 0 and below 1.
    eps : float
    precondition_frequency : int
        Steps between two refreshments of the bases, at least 1.
    max_precond_dim : int
        A longer side of a matrix has no preconditioner: its basis stays the identity.
    weight_decay : float
        Decoupled.
    adamw_lr : float, optional
        The learning rate of what AdamW updates; by default `lr`.
    adamw : sequence of str
        Further parameters for AdamW, by parts of their names; see `matrix_groups`.
    master : bool or dtype, optional
        See `Optimizer`.

    Raises
    ------
    ConfigError
        If an option is out of its range, or the parameters are not as `Optimizer` takes them.

    Notes
    -----
    Grids sum gradients in different orders, so these differ by rounding.  Where eigenvectors are not unique, since the
    first gradient has equal singular values or is of low rank, the bases are those in which diag(1, …, n) is diagonal.
    Elements of `Qᵀ g Q` below 2⁻⁴⁰ of its largest one may be zeros but for rounding, and count as zeros.  So two grids
    agree to rounding times the ratio of a preconditioner's largest eigenvalue to its smallest one that is not zero.
    They agree to about ε / δ where singular values differ by a part δ of the largest one that is more than rounding.
    In float32 the rounding in a direction that no gradient has counts as a gradient there, as for Adam; a larger
    `eps` damps it.
    """

    NAME: ClassVar[str] = "soap"
    ALIKE: ClassVar[tuple[str, ...]] = ("mean", "square")

    def __init__(
        self, parameters: Iterable[Any], lr: float = 3e-3, betas: tuple[float, float] = (0.95, 0.95), *,
        eps: float = 1e-8, precondition_frequency: int = 10, max_precond_dim: int = 10000, weight_decay: float = 0.01,
        adamw_lr: float | None = None, adamw: Sequence[str] = (), **kept: Unpack[FlatOptions],
    ) -> None:  # fmt: skip
        super().__init__(
            parameters, lr, weight_decay, precondition_frequency=precondition_frequency,
            max_precond_dim=max_precond_dim, adamw=adamw, adamw_lr=adamw_lr, betas=betas, eps=eps, **kept,
        )  # fmt: skip

    def shapes(self, p: Parameter, group: Group) -> dict[str, tuple[int, ...]]:
        sides = self.sides(p, group)
        bases = {f"{side}_basis": shape for side, shape in sides.items()}
        return {"count": (1,), "mean": tuple(p.shape), "square": tuple(p.shape), **sides, **bases}

    def direct(self, g: Block, states: dict[str, Block], step: int, group: Group) -> Block:
        xp, (beta1, beta2), sides = namespace(g), group["betas"], [s for s in ("left", "right") if s in states]
        if step == 1:
            accumulate(g, states, sides, beta2)
            if not finite(g):
                for side in sides:
                    states[f"{side}_basis"][...] = math.nan
                return xp.full_like(g, math.nan)
            left, values, right = kernels.routines(g).svd(g, full_matrices=False)
            limit = negligible(g)
            rank = self._rank(values, limit)
            for side, vectors in (("left", left), ("right", right.T)):
                if side in sides:
                    states[f"{side}_basis"][...] = completed(settled(vectors[:, :rank], values, limit))
            return xp.zeros_like(g)
        mean, square, t = states["mean"], states["square"], step - 1
        mean *= beta1
        mean += (1 - beta1) * g
        turned = self._turned(g, states)
        square *= beta2
        add_square(square, turned, 1 - beta2)
        del turned
        d = self._turned(mean, states)
        size = xp.sqrt(square)
        size += group["eps"]
        d /= size
        del size
        d = self._turned_back(d, states)
        d *= (1 - beta2**t) ** 0.5 / (1 - beta1**t)
        accumulate(g, states, sides, beta2)
        if t % group["precondition_frequency"] == 0:
            for side in sides:
                self._refresh(states, side)
        return d

    @staticmethod
    def _rank(values: Block, limit: float) -> int:
        """Return how many singular values count; all those of imagined gradients, if that is assumed."""
        if not has_values(values):
            return len(values) - (not backend_of(values).assume("conditioned", "the rank of a gradient"))
        return int((values > limit * values[:1]).sum())

    @staticmethod
    def _refresh(states: dict[str, Block], side: str) -> None:
        """Make one step of the power iteration, with the columns in the order of their eigenvalues so far.

        Where the preconditioner is of rank r < n, its products with the columns are dependent: the first r that are not
        make the basis of its range, and the other columns stay, but for their part in that.
        """
        a, basis, square = states[side], states[f"{side}_basis"], states["square"]
        xp, product = namespace(a), a @ basis
        values, tiny = xp.einsum("ij,ij->j", basis, product), negligible(a)
        order = xp.argsort(xp.where(values > tiny * values.max(), -values, 0), kind="stable")
        square[...] = square[order] if side == "left" else square[:, order]
        product = product[:, order]
        found, r = xp.linalg.qr(product)
        sizes = xp.abs(xp.diagonal(r))
        del r
        small = sizes <= tiny**0.5 * sizes.max()
        if has_values(small) and bool(small.any()):
            values = kernels.routines(a).eigvalsh(a)
            rank = int((values > tiny * values.max()).sum())
            places = xp.argsort(-sizes, kind="stable")
            taken, others = xp.sort(places[:rank]), xp.sort(places[rank:])
            if rank < len(a):  # those columns again, without what rounding left of the ones between them
                del found  # so that this takes no more memory than a preconditioner of full rank
                product = xp.concatenate([product[:, taken], basis[:, order[others]]], axis=1)
                basis[:, xp.concatenate([taken, others])] = xp.linalg.qr(product)[0]
                return
        basis[...] = found

    @staticmethod
    def _turned(x: Block, states: dict[str, Block]) -> Block:
        """Return a matrix in the eigenbases, without what is rounding of zeros: Adam would divide it by eps alone."""
        x = states["left_basis"].T @ x if "left" in states else x
        x = x @ states["right_basis"] if "right" in states else x
        xp = namespace(x)
        sizes = xp.abs(x)
        return xp.where(sizes < NOTHING * sizes.max(), 0, x)

    @staticmethod
    def _turned_back(x: Block, states: dict[str, Block]) -> Block:
        x = states["left_basis"] @ x if "left" in states else x
        return x @ states["right_basis"].T if "right" in states else x


def accumulate(g: Block, states: dict[str, Block], sides: Sequence[str], beta: float) -> None:
    """Add a gradient to the preconditioners of these sides: to running means, or with `beta` = 1 to sums."""
    for side in sides:
        a = states[side]
        a *= beta
        product = g @ g.T if side == "left" else g.T @ g
        product *= 1.0 if beta == 1 else 1 - beta
        a += product


def add_square(a: Block, g: Block, factor: float) -> None:
    """Add `factor g²`, element by element."""
    term = factor * g
    term *= g
    a += term


def finite(a: Block) -> bool:
    """Return True if a matrix has no NaNs or infinities, with which LAPACK fails or does not end; or has no values.

    What fails at a matrix's home would leave the other ranks waiting: its step is NaNs instead, as of other optimizers.
    """
    return not has_values(a) or kernels.finite(a)


def negligible(a: Block) -> float:
    """Return the part of a matrix's largest singular value up to which others may be rounding alone."""
    return max(*a.shape, LEAST) * float(namespace(a).finfo(a.dtype).eps)


def settled(vectors: Block, values: Block, limit: float) -> Block:
    """Return singular vectors, [n, rank], of which those of equal values diagonalize diag(1, …, n) on their span.

    Of equal values any basis would do; this one is unique but for signs.

    Parameters
    ----------
    vectors, values : array
        In falling order of the values; more of these than vectors may be given.
    limit : float
        How far apart equal values are at the most, in units of the largest one.

    Examples
    --------
    >>> import numpy as np
    >>> abs(settled(np.array([[0.6, 0.8], [0.8, -0.6]]), np.ones(2), 1e-14)).round(3).tolist()
    [[0.0, 1.0], [1.0, 0.0]]
    """
    xp, (n, rank) = namespace(vectors), vectors.shape
    if not has_values(values):
        return vectors
    sizes = values[:rank].tolist()
    cuts = [0, *(i for i in range(1, rank) if sizes[i - 1] - sizes[i] > limit * sizes[0]), rank]
    found, weights = vectors.copy(), xp.arange(1, n + 1, dtype=vectors.dtype)
    for start, stop in pairwise(cuts):
        if stop - start > 1:
            span = vectors[:, start:stop]
            found[:, start:stop] = span @ kernels.routines(span).eigh(span.T * weights @ span)[1][:, ::-1]
    return found


def completed(columns: Block) -> Block:
    """Return a square orthogonal matrix that begins with these orthonormal columns.

    On the complement the others diagonalize diag(1, …, n): they are unique but for signs.

    Examples
    --------
    >>> import numpy as np
    >>> abs(completed(np.array([[0.0], [1.0], [0.0]]))).round(3).tolist()
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    xp, (n, rank) = namespace(columns), columns.shape
    if rank == n:
        return columns
    rest = xp.eye(n, dtype=columns.dtype) - columns @ columns.T
    weights = xp.arange(1, n + 1, dtype=columns.dtype)
    _, vectors = kernels.routines(rest).eigh(rest * weights @ rest)
    return xp.concatenate([columns, vectors[:, ::-1][:, : n - rank]], axis=1)


def inverse_root(a: Block, p: int, damping: float) -> Block:
    """Return `(a + damping)^(-1/p)` of a positive semidefinite matrix, by its eigenvalues.

    Examples
    --------
    >>> import numpy as np
    >>> inverse_root(np.diag([15.0, 80.0]), 4, 1.0).round(3).tolist()
    [[0.5, 0.0], [0.0, 0.333]]
    """
    xp = namespace(a)
    values, vectors = kernels.routines(a).eigh(a)
    return (vectors * (xp.maximum(values, 0) + damping) ** (-1 / p)) @ vectors.T


def newton_inverse_root(a: Block, p: int, damping: float, steps: int = 100) -> Block:
    """Return `(a + damping)^(-1/p)` of a positive semidefinite matrix, by the coupled Newton iteration.

    `X = X T`; `M = Tᵖ M`, with `T = ((p + 1) - M) / p`, until M is the identity (Guo and Higham, "A Schur–Newton method
    for the matrix pth root and its inverse", 2006).  A matrix without values takes `iterations` steps of `WhatIf`.

    Examples
    --------
    >>> import numpy as np
    >>> newton_inverse_root(np.diag([15.0, 80.0]), 4, 1.0).round(3).tolist()
    [[0.5, 0.0], [0.0, 0.333]]
    """
    xp, known = namespace(a), has_values(a)
    if not known:
        why = "how many steps the coupled Newton iteration takes"
        steps = min(steps, int(backend_of(a).assume("iterations", why)))
    one = xp.eye(len(a), dtype=a.dtype)
    shifted = a.dtype.type(damping) * one
    shifted += a
    size = xp.linalg.norm(shifted)
    z = (1 + p) / (2 * float(size)) if known else 1.0
    x, m, error = z ** (1 / p) * one, z * shifted, np.inf
    del shifted
    for _ in range(steps):
        t = (p + 1) * one
        t -= m
        t /= p
        fresh, m = x @ t, xp.linalg.matrix_power(t, p) @ m
        distance = xp.linalg.norm(m - one)
        if known:
            now = float(distance)
            if not now < error:
                break  # rounding is all that is left
            error = now
        x = fresh
    return x
