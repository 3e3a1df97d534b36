"""A mixture of experts: perceptrons of which every token takes a few."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from parlinalg.array.create import dtype_named
from parlinalg.autograd import Parameter, Tensor, ops
from parlinalg.autograd.ops.dispatch import add_bias
from parlinalg.autograd.ops.routing import Queues
from parlinalg.backend.halves import work_dtype
from parlinalg.errors import ConfigError, LayoutError
from parlinalg.grid import Grid
from parlinalg.layout import AxisSpec, Cut, Layout, as_cut, span_of
from parlinalg.moves import words
from parlinalg.nn import init
from parlinalg.nn.activations import activation as activation_module
from parlinalg.nn.added_losses import add_loss, collecting
from parlinalg.nn.checks import flag, placed, whole
from parlinalg.nn.containers import MLP
from parlinalg.nn.init import Declared, Initializer
from parlinalg.nn.module import Module
from parlinalg.plan import Plan
from parlinalg.schemes import Scheme
from parlinalg.sequence import token_positions


@dataclass(frozen=True)
class Way:
    """One way of tokens through the experts.

    Attributes
    ----------
    tokens : Layout
        The layout to which the residual stream is brought before tokens are sent.
    expand, contract : Plan
        The plans of the products, in which the experts are a batch dim.
    router : Plan
    """

    tokens: Layout
    expand: Plan
    contract: Plan
    router: Plan

    @property
    def back(self) -> Layout:
        """In which tokens come back, before it is settled which terms are summed."""
        return Layout(*self.tokens.dims[:2], self.contract.y.dims[-1], partial=self.contract.y.partial)


class MixtureOfExperts(Module):
    """Perceptrons, of which every token takes those that a router gives the highest scores; by any scheme.

    Tokens go to `top_k` of the experts (Lepikhin et al., "GShard", 2021; with one Fedus et al., "Switch transformers",
    2022; with many small ones Dai et al., "DeepSeekMoE", 2024).  Of equal scores the first expert's counts.  A sequence
    is a routing group: of its tokens an expert takes `ceil(top_k · sequence · capacity_factor / experts)`, first
    choices before second ones and so on, each in the order of the sequence; what an expert does not take adds nothing,
    so that the token's residual stream passes.  A shared expert, which every token passes, is added (DeepSeekMoE).

    Parameters
    ----------
    hidden, inner, experts : int
        Features of the residual stream and inside of an expert, and the number of experts.
    scheme : Scheme or str
    grid : Grid
    top_k : int
        From 1 to all experts.
    normalize_gates : bool, optional
        True: the gates of a token's experts are divided by their sum (GShard, Mixtral, Qwen3), which is the softmax
        over their scores; False: they are the probabilities (Switch, DeepSeekMoE, Qwen1.5).  By default True where
        `top_k` is at least 2: a single gate would be 1, and the router would learn nothing from the output.
    shared : int
        Features inside of the shared expert, an `MLP` of the same activation; 0 for none.  Several shared experts are
        one as wide as all of them.
    shared_gate : bool
        Whether what the shared expert gives is multiplied by the sigmoid of a score of its own (Qwen1.5-MoE, 2024).
    capacity_factor : float or None
        None: experts take every token.
    axis : str, tuple of str or None
        The axes of the grid that cut the experts, evenly or not: such as "data" or "s", along which tokens travel by
        all-to-all, or one of the scheme's own, which then cuts nothing else of the experts.  The scheme's other axes
        cut an expert's products as any others.
    activation : str
        As of `MLP`.
    bias : bool
    aux_loss_coef, z_loss_coef : float
        Coefficients of the loss terms that the layer adds (`added_losses`): `ops.balance_loss` and `ops.z_loss`.
    dtype : dtype
        Scores are float32 at least.
    weight_init : callable, optional
        As of `Linear`.
    seed, name : optional
        As of `Linear`.

    Attributes
    ----------
    router : Parameter
        [hidden, experts].
    expand, contract : Parameter
        [experts, hidden, inner] (with "swiglu" [experts, hidden, inner, 2]) and [experts, inner, hidden].
    expand_bias, contract_bias : Parameter or None
        [experts, inner] and [experts, hidden].
    shared : MLP or None
    shared_gate : Parameter or None
        [hidden, 1].

    Call it with the residual stream [batch, sequence, hidden] in the scheme's layout for it, which the result keeps.

    Raises
    ------
    ConfigError
        If the grid has no such axis, or a number is not one that can be; the message says what can.
    """

    #: The names of the parameters that `axis` cuts; all tokens meet the others.
    CUT = ("expand", "contract", "expand_bias", "contract_bias")

    router: Parameter
    expand: Parameter
    contract: Parameter
    expand_bias: Parameter | None
    contract_bias: Parameter | None
    shared: MLP | None
    shared_gate: Parameter | None

    def __init__(
        self, hidden: int, inner: int, experts: int, scheme: Scheme | str, grid: Grid, *, top_k: int = 2,
        normalize_gates: bool | None = None, shared: int = 0, shared_gate: bool = False,
        capacity_factor: float | None = 1.25, axis: AxisSpec = None, activation: str = "gelu_tanh", bias: bool = True,
        aux_loss_coef: float = 0.01, z_loss_coef: float = 0.0, dtype: DTypeLike = np.float32,
        weight_init: Initializer | None = None, seed: int | None = None, name: str = "",
    ) -> None:  # fmt: skip
        super().__init__()
        scheme = placed(self, scheme, grid)
        self.axis = as_cut(axis)
        check(experts, top_k, capacity_factor, self.axis, grid.sizes)
        self.normalize_gates = normalizes(normalize_gates, top_k)
        shared = whole("shared, the features inside of the shared expert,", shared, 0)
        if flag("shared_gate", shared_gate) and not shared:
            raise ConfigError("shared_gate=True of experts without a shared one: give its features inside, shared=…")
        self.hidden, self.inner, self.experts = hidden, inner, experts
        self.scheme, self.grid, self.top_k, self.capacity_factor = scheme, grid, top_k, capacity_factor
        self.aux_loss_coef, self.z_loss_coef, self.keep = aux_loss_coef, z_loss_coef, "xw"
        self.activation = activation_module(activation)
        self.gated = self.activation.gated
        self._ways: dict[tuple[int, int], tuple[Way, Queues]] = {}
        expand, contract = self.plans()
        made = weight_init or init.Kaiming(gain=1 / math.sqrt(3))
        outputs = (inner, 2) if self.gated else (inner,)
        one = dtype_named(dtype)

        def declared(
            shape: tuple[int, ...], layout: Layout, init: Initializer, fan: int, matrix: tuple[int, int] | None = None
        ) -> Any:
            return Declared(shape, layout, grid, one, init, fan, shape[-1], matrix=matrix)

        scores = Layout(scheme.residual.dims[2], None)
        self.router = declared((hidden, experts), scores, made, hidden)
        self.expand = declared((experts, hidden, *outputs), expand.w, made, hidden, (1, 1))
        self.contract = declared((experts, inner, hidden), contract.w, made, inner, (1, 1))
        self.expand_bias = self.contract_bias = None
        if bias:
            self.expand_bias = declared((experts, *outputs), _bias(expand), init.zeros, hidden)
            self.contract_bias = declared((experts, hidden), _bias(contract), init.zeros, inner)
        self.shared = self.shared_gate = None
        if shared:
            self.shared = MLP(
                (hidden, shared, hidden), scheme, grid, activation=activation, bias=bias, head=False, dtype=dtype,
                weight_init=weight_init,
            )  # fmt: skip
        if shared_gate:
            self.shared_gate = declared((hidden, 1), scores, made, hidden)
        if seed is not None:
            self.initialize(seed, name)

    # ------------------------------------------------------------------ plans
    def plans(self) -> tuple[Plan, Plan]:
        """Return the products' plans over [experts, groups, capacity, features]: the scheme's, in which the axes of the
        experts cut nothing else."""
        n = 2 if self.gated else 1
        return _by_expert(self.scheme.plan("expand", n=n), self.axis), _by_expert(self.scheme.contract, self.axis)

    def capacity(self, length: int) -> int:
        """Return the number of tokens of a sequence of this length that an expert takes."""
        if self.capacity_factor is None:
            return length
        return min(length, math.ceil(self.top_k * length * self.capacity_factor / self.experts - 1e-9))

    def way(self, batch: int, length: int) -> tuple[Way, Queues]:
        """Return the way that moves the fewest words, and its queues.

        Axes of the residual stream that do not cut the products (2D's columns) are gathered for them in any case: of
        the tokens before they are sent, or of the queues, which are `top_k · capacity_factor` times as many, after.
        What is gathered first is sent whole.
        """
        known = self._ways.get((batch, length))
        if known is None:
            found = [(way, self._queues(way, batch, length)) for way in self._candidates()]
            known = min(found, key=lambda each: self.words(*each))
            self._ways[batch, length] = known
        return known

    def _queues(self, way: Way, batch: int, length: int) -> Queues:
        return Queues(way.tokens, self.axis, self.experts, self.capacity(length), (batch, length), self.grid)

    def _candidates(self) -> list[Way]:
        expand, contract = self.plans()
        rest, own = self.scheme.residual, self.axis
        into, out = self.scheme.expand, self.scheme.contract
        found = []
        if into.m == out.m:  # else tokens would come back cut otherwise than they were sent
            lead = [tuple(a for a in cut if a in m or a in own) for cut, m in zip(rest.dims, into.m, strict=False)]
            found.append(
                (Layout(*lead, expand.k[0]), replace(expand, x=expand.x_work), replace(contract, y=contract.y_work))
            )
        features = tuple(a for a in rest.dims[2] if a not in own)
        found.append((Layout(*rest.dims[:2], features), expand, contract))
        return [Way(at, e, c, self._router_plan(at)) for at, e, c in found if _fits(at, e, c, own)]

    def _router_plan(self, at: Layout) -> Plan:
        rest = self.scheme.residual
        b, s, h = rest.dims
        return Plan(m=(b, s), n=((),), k=(h,), x=rest, w=Layout(h, None), y=Layout(*at.dims[:2], None))

    def words(self, way: Way, queues: Queues) -> float:
        """Return about how many words a rank receives in a forward pass by this way, without those of the router.

        The exchange is counted as if tokens were sent evenly; the other words are exact, for the first rank.
        """
        sizes, rest = self.grid.sizes, self.scheme.residual
        first = dict.fromkeys(sizes, 0)
        shape, buffer = (*queues.shape, self.hidden), (*queues.buffer, self.hidden)
        ranks = span_of(queues.crossed, sizes)
        back = way.back.with_partial((*way.back.partial, *queues.replicating))
        plain, contract = way.expand.x, way.contract
        moved = words(rest, way.tokens, shape, sizes, first) + words(back, rest, shape, sizes, first)
        moved += words(plain, way.expand.x_work, buffer, sizes, first)
        moved += words(contract.y_work, contract.y, buffer, sizes, first)
        sent = sum(math.prod(shape) / span_of(at.cut_axes, sizes) for at in (way.tokens, way.back))
        return moved + self.top_k * sent * (1 - 1 / ranks)

    # ------------------------------------------------------------------ the pass
    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 3 or x.shape[2] != self.hidden:
            raise LayoutError(f"these experts take inputs of shape [batch, sequence, {self.hidden}], not {x.shape}")
        way, queues = self.way(*x.shape[:2])
        wide = work_dtype(x.dtype)
        scores = ops.matmul(ops.astype(x, wide), ops.astype(self.router, wide), way.router)
        probabilities = ops.softmax(scores)
        given = token_positions()
        given.check(x.shape[1])
        routing = ops.route(scores.data, queues, self.top_k, given.positions)
        gates = ops.chosen(probabilities, routing)
        if self.normalize_gates:
            gates = gates / gates.sum(-1, keepdims=True)
        z = ops.matmul(ops.dispatch(x, routing), self.expand, way.expand, keep=self.keep)
        z = self.activation(z if self.expand_bias is None else add_bias(z, self.expand_bias))
        y = ops.matmul(z, self.contract, way.contract, keep=self.keep)
        if self.contract_bias is not None:
            y = add_bias(y, self.contract_bias)
        if collecting():
            self._add_terms(probabilities, scores, routing)
        y = ops.combine(y, gates, routing, self.scheme.residual)
        return y if self.shared is None else y + self._of_all(x, self.shared)

    def _of_all(self, x: Tensor, shared: MLP) -> Tensor:
        """Return what the shared expert adds."""
        y: Tensor = shared(x)
        if self.shared_gate is None:
            return y
        gate: Tensor = ops.sigmoid(ops.matmul(x, self.shared_gate, self._router_plan(self.scheme.residual)))
        return y * gate

    def _add_terms(self, probabilities: Tensor, scores: Tensor, routing: Any) -> None:
        if self.aux_loss_coef:
            add_loss(ops.balance_loss(probabilities, routing) * self.aux_loss_coef)
        if self.z_loss_coef:
            add_loss(ops.z_loss(scores) * self.z_loss_coef)

    @property
    def multiplications(self) -> int:
        per_token = self.experts + self.top_k * self.inner * (3 if self.gated else 2)
        return self.hidden * (per_token + ("shared_gate" in self._parameters))  # the shared expert counts its own

    def extra_repr(self) -> str:
        cut = f", cut over {', '.join(self.axis)}" if self.axis else ""
        return f"{self.experts} × ({self.hidden} → {self.inner}), top {self.top_k}, {self.scheme.name}{cut}"


def check(
    experts: int, top_k: int, capacity_factor: float | None, axis: Cut, sizes: Mapping[str, int]
) -> None:  # fmt: skip
    """Raise a ConfigError unless such experts can be on a grid with these axes."""
    if not isinstance(experts, int) or experts < 1:
        raise ConfigError(f"the number of experts is a whole number of at least 1, not {experts!r}")
    if whole("top_k", top_k) > experts:
        most = "top_k=1" if experts == 1 else f"a top_k from 1 to {experts}"
        raise ConfigError(f"top_k={top_k} of {experts} experts; take {most}, or at least {top_k} experts")
    number = isinstance(capacity_factor, int | float) and not isinstance(capacity_factor, bool)
    if capacity_factor is not None and not (number and 0 < capacity_factor < math.inf):
        raise ConfigError(
            f"capacity_factor is above 0, such as 1.25, or None for experts that take every token; not "
            f"{capacity_factor!r}"
        )
    if unknown := [a for a in axis if a not in sizes]:
        raise ConfigError(
            f"experts are to be cut over {', '.join(map(repr, unknown))}, but the grid has the axes {dict(sizes)}; "
            "take one of these, or axis=None to have all experts on every rank"
        )
    if len(set(axis)) != len(axis):
        raise ConfigError(f"experts are to be cut over {axis}, which names an axis twice")


def normalizes(given: bool | None, top_k: int) -> bool:
    """Return True if gates are divided by their sum: as given, or where there are several."""
    return top_k > 1 if given is None else flag("normalize_gates", given)


def _by_expert(plan: Plan, axis: Cut) -> Plan:
    """Return the plan with the experts as a batch dim, cut by these axes, which cut nothing else."""

    def cuts(group: tuple[Cut, ...]) -> tuple[Cut, ...]:
        return tuple(tuple(a for a in cut if a not in axis) for cut in group)

    def at(layout: Layout) -> Layout:
        rest = layout.without(axis)
        return Layout(axis, *rest.dims, partial=rest.partial)

    return Plan(
        m=cuts(plan.m), n=cuts(plan.n), k=cuts(plan.k), b=(axis,), x=at(plan.x), w=at(plan.w), y=at(plan.y)
    )  # fmt: skip


def _fits(tokens: Layout, expand: Plan, contract: Plan, axis: Cut) -> bool:
    """Return True if the plans take and give queues of tokens in this layout."""
    lead = (axis, *(tuple(a for a in cut if a not in axis) for cut in tokens.dims[:2]))
    return expand.x.dims[:3] == lead == contract.y.dims[:3]


def _bias(plan: Plan) -> Layout:
    """Return biases [experts, *n], cut as y rests."""
    dims = plan.y.dims
    return Layout(dims[0], *dims[1 + len(plan.m) :])


def perceptrons(
    grid: Grid, num_local_experts: int | None, *, num_experts_per_tok: int, norm_topk_prob: bool | None,
    shared_expert_intermediate_size: int | None, shared_expert_gate: bool, router_aux_loss_coef: float,
    capacity_factor: float | None, expert_axis: AxisSpec,
) -> tuple[dict[str, Any], Callable[..., MixtureOfExperts] | None]:  # fmt: skip
    """Return the entries of a model's `config` about experts, and the `mlp` of its blocks.

    Parameters
    ----------
    num_local_experts : int, optional
        None: no experts, but plain perceptrons.
    num_experts_per_tok : int
    norm_topk_prob : bool, optional
    shared_expert_intermediate_size : int, optional
        None or 0: no shared expert.
    shared_expert_gate : bool
    router_aux_loss_coef : float
    capacity_factor : float or None
    expert_axis : str, tuple of str or None
        "auto" is "data" where the grid has that axis, else none.

    Raises
    ------
    ConfigError
        If a token is to go to more experts than there are, the grid has no such axis, or there is a shared expert
        beside none.
    """
    inside = whole("shared_expert_intermediate_size", shared_expert_intermediate_size or 0, 0)
    if num_local_experts is None:
        if inside:
            raise ConfigError(
                f"shared_expert_intermediate_size={inside} without num_local_experts: a shared expert stands beside "
                "others; give num_local_experts=…, or a wider intermediate_size"
            )
        return {}, None
    choices, experts = whole("num_experts_per_tok", num_experts_per_tok), whole("num_local_experts", num_local_experts)
    if choices > experts:
        most = "" if experts == 1 else f" to {experts}"
        raise ConfigError(
            f"num_experts_per_tok={choices} with num_local_experts={experts}: a token goes to that many of them; give "
            f"num_experts_per_tok=1{most}, or at least {choices} experts"
        )
    auto = "data" if "data" in grid.sizes else None
    axis = as_cut(auto if expert_axis == "auto" and "auto" not in grid.sizes else expert_axis)
    if not set(axis) <= set(grid.sizes):
        raise ConfigError(
            f"expert_axis={expert_axis!r}, but the grid has the axes {dict(grid.sizes)}: give one of these, or None to "
            "have all experts on every rank"
        )
    normalized = normalizes(norm_topk_prob, choices)
    settings = {
        "num_local_experts": experts, "num_experts_per_tok": choices, "norm_topk_prob": normalized,
        "router_aux_loss_coef": router_aux_loss_coef, "capacity_factor": capacity_factor,
    }  # fmt: skip
    if inside:
        settings |= {"shared_expert_intermediate_size": inside, "shared_expert_gate": shared_expert_gate}
    mlp = partial(
        MixtureOfExperts, experts=experts, top_k=choices, normalize_gates=normalized, shared=inside,
        shared_gate=shared_expert_gate, aux_loss_coef=router_aux_loss_coef, capacity_factor=capacity_factor, axis=axis,
    )  # fmt: skip
    return settings, mlp
