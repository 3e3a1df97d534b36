"""Muon."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Unpack

from parlinalg.backend.kernels import optimizers
from parlinalg.errors import ConfigError
from parlinalg.optim.flat import Entry, FlatOptions, Run
from parlinalg.optim.groups import Option
from parlinalg.optim.matrices import Matrix, extent, matrices_of, split_of
from parlinalg.optim.matrixwise import Matrixwise
from parlinalg.optim.newton_schulz import (
    PUBLISHED,
    AtHome,
    Coefficients,
    Execution,
    Iteration,
    Team,
    choose,
    executions,
)
from parlinalg.optim.optimizer import as_number, below_one, whole

Block = Any
ADJUST = ("original", "match_rms_adamw")


class Muon(Matrixwise):
    """Muon (Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024), with AdamW for all else.

    `m = momentum m + (1 - momentum) g`; `u = momentum m + (1 - momentum) g`, or `u = m` without Nesterov's momentum;
    `p = (1 - lr weight_decay) p - lr scale O(u)`.  O takes the singular values of a matrix near 1: `X = u/‖u‖`, and
    `ns_steps` times `X = a X + (b A + c A²) X` with `A = X Xᵀ` of the shorter side (Newton–Schulz).  A weight of more
    than two dims is the matrix from all inputs to all outputs of its product; each expert has a matrix of its own.

    How the matrices come together is one of three executions, which differ in rounding only:

    - "home": each matrix has a home rank, so that all ranks have about the same to do; one all-to-all brings all
      matrices home, and one brings the steps back;
    - "gram": the ranks have slices of each matrix's longer side, compute their parts of `A`, sum them for all matrices
      in one all-reduce a Newton–Schulz step, and each multiplies its slice;
    - "grid": the weights stay where they are, and the products are the library's own over the grid.

    Parameters
    ----------
    parameters : iterable of Parameter, or of dict
        See `Optimizer`; groups without an option "matrices" are split by `matrix_groups`.
    lr : float
    momentum : float
        At least 0 and below 1.
    nesterov : bool
    ns_steps : int
        Steps of Newton–Schulz, at least 1.
    ns_coefficients : tuple of three floats
        a, b and c.
    adjust_lr_fn : {"original", "match_rms_adamw"}
        The scale: `√max(1, outputs / inputs)`, or `0.2 √max(outputs, inputs)`, with which steps are as large as AdamW's
        (Liu et al., "Muon is scalable for LLM training", 2025).
    weight_decay : float
        Decoupled, of matrices and of what AdamW updates.
    adamw_lr : float, optional
        The learning rate of what AdamW updates; None is `lr`.
    betas : tuple of two floats
        AdamW's decay rates of the running means.
    eps : float
        AdamW's.
    adamw : sequence of str
        Further parameters for AdamW, by parts of their names; see `matrix_groups`.
    execution : {"home", "gram", "grid"}, optional
        By default the one that costs least; see `parlinalg.optim.newton_schulz.Cost`.
    master : bool or dtype, optional
        See `Optimizer`.

    Raises
    ------
    ConfigError
        If an option is out of its range, or the parameters are not as `Optimizer` takes them.

    Notes
    -----
    The names of arguments, the defaults of Newton–Schulz and the form of the momentum are those of `torch.optim.Muon`.
    That one iterates in bfloat16, this one in the dtype of the states.  Weights are stored [inputs, outputs] here,
    transposed from PyTorch's.
    """

    NAME: ClassVar[str] = "muon"
    STATES: ClassVar[tuple[str, ...]] = ("momentum",)
    momentum = Option[float]()
    nesterov = Option[bool]()
    ns_steps = Option[int]()
    ns_coefficients = Option[Coefficients]()
    adjust_lr_fn = Option[str]()

    def __init__(
        self, parameters: Iterable[Any], lr: float = 0.02, momentum: float = 0.95, *, nesterov: bool = True,
        ns_steps: int = 5, ns_coefficients: Coefficients = PUBLISHED, adjust_lr_fn: str = "original",
        weight_decay: float = 0.0, adamw_lr: float | None = 3e-4, betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-10, adamw: Sequence[str] = (), execution: str | None = None, **kept: Unpack[FlatOptions],
    ) -> None:  # fmt: skip
        if execution is not None and execution not in list(executions()):
            raise ConfigError(f"Muon's execution is None, {', '.join(map(repr, executions()))}, not {execution!r}")
        self.execution = execution
        self.executions: dict[tuple[int, str], Execution] = {}
        super().__init__(
            parameters, lr, weight_decay, adamw=adamw, adamw_lr=adamw_lr, betas=betas, eps=eps, momentum=momentum,
            nesterov=nesterov, ns_steps=ns_steps, ns_coefficients=ns_coefficients, adjust_lr_fn=adjust_lr_fn, **kept,
        )  # fmt: skip

    def check_options(self, options: dict[str, Any]) -> None:
        super().check_options(options)
        below_one(momentum=options["momentum"])
        whole("Muon", "ns_steps", options["ns_steps"])
        given = options["ns_coefficients"]
        if not isinstance(given, Sequence) or len(given) != 3 or not all(map(math.isfinite, map(as_number, given))):
            raise ConfigError(f"Muon's ns_coefficients are three numbers, such as {PUBLISHED}, not {given!r}")
        options["ns_coefficients"] = tuple(map(float, given))
        if options["adjust_lr_fn"] not in ADJUST:
            raise ConfigError(
                f"Muon's adjust_lr_fn is {' or '.join(map(repr, ADJUST))}, not {options['adjust_lr_fn']!r}"
            )

    @property
    def step_bytes(self) -> int:
        """The temporary bytes of a step on this rank; those of all Gram matrices too where `execution` is "gram"."""
        grams = 0
        for p, size in self._hidden() if self.execution == "gram" else ():
            grams += size * sum(m.short**2 for m in matrices_of(0, p.shape, split_of(p)))
        return super().step_bytes + grams

    def states_of(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return self.STATES if group["matrices"] else self.OTHERS

    def measure(self, run: Run, part: slice, out: Block) -> None:
        optimizers.muon_momentum(
            run.g[part], run.states["momentum"][part], out, momentum=self.momentum, nesterov=self.nesterov,
            factor=self.factor,
        )  # fmt: skip

    def scale(self, matrix: Matrix | None) -> float:
        if matrix is None:
            return 1.0
        if self.adjust_lr_fn == "original":
            return math.sqrt(max(1.0, matrix.columns / matrix.rows))
        return 0.2 * math.sqrt(matrix.long)

    def directions(self, entries: Sequence[Entry], buffer: Block) -> None:
        grid = entries[0].data.grid
        place = id(grid), entries[0].dtype.str
        iterations = [self._iteration(e) for e in entries]
        if self.changed(entries, grid) or self.executions[place].team.iterations != iterations:
            self.executions[place] = choose(Team(entries, grid, iterations), self.execution)
        self.executions[place].run(buffer)

    def work_of_ranks(self) -> dict[int, int]:
        found = Counter[int]()
        for execution in self.executions.values():
            matrices = execution.team.matrices
            for rank, slots in enumerate(execution.slots if isinstance(execution, AtHome) else ()):
                largest = max((self.temporary(matrices[s.matrix]) for s in slots), default=0)
                found[rank] += extent(slots) + largest
        return found

    def _iteration(self, entry: Entry) -> Iteration:
        group = self.param_groups[entry.group]
        return Iteration(int(group["ns_steps"]), group["ns_coefficients"])
