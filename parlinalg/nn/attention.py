"""The one attention layer."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from parlinalg import random
from parlinalg.array import DistArray
from parlinalg.autograd import Tensor, ops
from parlinalg.autograd.ops.attention import Drop
from parlinalg.autograd.ops.attention_masks import BlockMask, Mask, check_window
from parlinalg.autograd.ops.rotary import Frequencies
from parlinalg.errors import ConfigError
from parlinalg.grid import Grid
from parlinalg.layout import Cut, Layout, cut_lengths, span_of
from parlinalg.nn.cache import KeyValueCache
from parlinalg.nn.checks import placed, real, whole
from parlinalg.nn.init import Initializer
from parlinalg.nn.linear import Linear
from parlinalg.nn.module import Module
from parlinalg.random import factors
from parlinalg.random.draws import Draws, current_draws
from parlinalg.schemes import Scheme
from parlinalg.sequence import BatchPositions, token_positions


class Attention(Module):
    """Multi-head, grouped-query or cross-attention, by any scheme: heads are cut as the scheme cuts the inside of a
    block, unevenly if need be.

    Where the scheme cuts the sequence inside of a block, keys and values go round a ring (Liu et al., 2023); over its
    axes of Ulysses the cut is exchanged for one of the heads and back (Jacobs et al., DeepSpeed-Ulysses, 2023), and
    where there are fewer heads of keys than ranks each rank takes those that its queries meet.  With a mask of pairs,
    and with a cache, the whole cut is exchanged for one of the heads.  The tokens may lie in another order than that of
    their sequence, and belong to several documents: see `sequence_positions`.

    Parameters
    ----------
    hidden, heads : int
        The features of the residual stream, and the heads of the queries.
    scheme : Scheme or str
    grid : Grid
    kv_heads : int, optional
        The heads of keys and values, each shared by `heads / kv_heads` queries (Ainslie et al., GQA, 2023); by default
        as many as `heads`.
    head_dim : int, optional
        By default `hidden / heads`.
    bias, out_bias : bool
        The bias of the products into the layer and out of it; `out_bias` is by default as `bias`.
    causal, window
        As of `ops.attention`.
    rotary : float or array, optional
        The base of rotary positions, or the angles a position (see `ops.rotary`); by default none.
    dropout : float
        The probability of dropping an attention weight in training.
    cross : bool
        Keys and values come from another sequence, `context`.
    packed : bool
        Whether queries, keys and values are one product.  If not, and the scheme cuts the heads over more ranks than
        `kv_heads`, the axes are distributed: those that fit cut the heads of keys, and the others the queries of each,
        while they repeat the product of keys and values (see `Scheme.factored`).  If they are one product then, ranks
        beyond `kv_heads` have nothing to do in attention; rank 0 warns of it.
    keep_scores : bool
        As of `ops.attention`: False, the default, is selective recomputation.
    weight_init, out_init : callable, optional
        Initializers of the weights into the layer and out of it.
    seed, name : optional
        As of `Linear`.

    Attributes
    ----------
    qkv : Linear
        To (kv_heads, g + 2, head_dim), with g = heads / kv_heads: the queries of a group, its key, its value.
    q, kv : Linear
        In its place in cross-attention, or if not packed: to (kv_heads, g, head_dim) and (kv_heads, 2, head_dim).
    out : Linear
        From (kv_heads, g, head_dim) to hidden.

    Call it with x [batch, sequence, hidden] in the scheme's residual layout; the result has the same shape and layout.
    """

    qkv: Linear
    q: Linear
    kv: Linear
    out: Linear

    def __init__(
        self, hidden: int, heads: int, scheme: Scheme | str, grid: Grid, *, kv_heads: int | None = None,
        head_dim: int | None = None, bias: bool = True, out_bias: bool | None = None, causal: bool = False,
        window: int | None = None, rotary: Frequencies | None = None, dropout: float = 0.0, cross: bool = False,
        packed: bool = True, keep_scores: bool = False, dtype: DTypeLike = np.float32,
        weight_init: Initializer | None = None, out_init: Initializer | None = None, seed: int | None = None,
        name: str = "",
    ) -> None:  # fmt: skip
        super().__init__()
        scheme = placed(self, scheme, grid)
        kv_heads = heads if kv_heads is None else kv_heads
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise ConfigError(f"{heads} heads do not share {kv_heads} heads of keys evenly; kv_heads divides heads")
        if head_dim is None:
            if hidden % heads:
                raise ConfigError(f"{hidden} features do not fall into {heads} heads; give a head_dim")
            head_dim = hidden // heads
        head_dim = whole("attention's head_dim", head_dim)
        check_window(window)
        dropout = real("attention's dropout", dropout, below=1)
        if rotary is not None and not isinstance(rotary, np.ndarray):
            rotary = real("the base of attention's rotary positions", rotary, above=True)
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.group = heads // kv_heads
        self.scheme = scheme
        self.causal, self.window, self.rotary, self.cross = causal, window, rotary, cross
        self.dropout, self.keep_scores = dropout, keep_scores
        self._draws = Draws()
        common: dict[str, Any] = {"scheme": scheme, "grid": grid, "dtype": dtype}
        into = {"kind": "expand", "bias": bias, "weight_init": weight_init, **common}
        self.packed = packed and not cross
        inner: Cut = ()
        if self.packed:
            self.qkv = Linear(hidden, (kv_heads, self.group + 2, head_dim), **into)
        else:
            inner = _inner(scheme.inner.dims[-1], kv_heads, grid) if self.group > 1 else ()
            self.q = Linear(hidden, (kv_heads, self.group, head_dim), spread=inner, **into)
            self.kv = Linear(hidden, (kv_heads, 2, head_dim), shared=inner, **into)
        self.out = Linear(
            (kv_heads, self.group, head_dim), hidden, kind="contract", bias=bias if out_bias is None else out_bias,
            weight_init=out_init or weight_init, spread=inner, **common,
        )  # fmt: skip
        self.shares = _shares_heads(self, grid, inner)
        if not cross:
            _warn_of_idle_ranks(self, grid, inner)
        if seed is not None:
            self.initialize(seed, name)

    def forward(
        self, x: Tensor, context: Tensor | None = None, mask: Mask | BlockMask | None = None,
        key_padding: Mask | None = None, cache: KeyValueCache | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend.

        Parameters
        ----------
        x : Tensor
            [batch, sequence, hidden], in the scheme's residual layout.
        context : Tensor, optional
            Where keys and values come from in cross-attention: [batch, other sequence, hidden], in the same layout.
        mask, key_padding
            Which keys are seen, as of `ops.attention`; `key_padding` may also be cut as the token ids.
        cache : KeyValueCache, optional
            Holds the keys and values of earlier tokens; x are the tokens after them.
        """
        if (context is not None) != self.cross:
            raise ConfigError(f"attention with cross={self.cross} takes {'a' if self.cross else 'no'} context")
        if cache is not None and self.cross:
            raise ConfigError("cross-attention takes no cache: its keys come from the context")
        start = 0 if cache is None else cache.length
        now = token_positions()
        now.check(x.shape[1], x.shape[0])
        if (cache is not None and not now.natural) or (self.cross and now.documents is not None):
            raise ConfigError(
                "within sequence_positions attention takes no cache, and cross-attention no documents: generation "
                "takes tokens in their order"
            )
        kv: Tensor | None = None
        apart = self.shares or cache is not None
        if self.packed:
            q = self._turned(self.qkv(x), start, now)
            if apart:
                q, kv = ops.narrow(q, 3, 0, self.group), ops.narrow(q, 3, self.group, self.group + 2)
        else:
            q = self._turned(self.q(x), start, now, self.group)
            kv = self._turned(self.kv(x if context is None else context), start, now, 1)
        rest = q.layout if kv is None else Layout(*q.layout.dims)
        s = q.grid.effective(q.layout).dims[1]
        ring = () if mask is not None or cache is not None else tuple(a for a in s if a not in self.scheme.ulysses)
        q, kv = self._exchanged(q, kv, s[len(ring) :])
        if cache is not None and kv is not None:
            if kv.requires_grad:
                raise ConfigError("a cache is for generation; call the model within no_grad()")
            kv = Tensor(cache.append(kv.data))
        seen: dict[str, Any] = {
            "causal": self.causal, "window": self.window, "documents": now.documents, "dropout": self._draw(x),
            "positions": None if self.cross else now.positions,
        }  # fmt: skip
        if isinstance(key_padding, DistArray) and x.grid.effective(key_padding.layout).dims[1]:
            key_padding = key_padding.redistribute(Layout(q.layout.dims[0], None))
        if ring:
            y = ops.ring_attention(q, kv, axis=ring[0], key_padding=key_padding, **seen)
        else:
            y = ops.attention(
                q, kv, mask=mask, key_padding=key_padding, start=start, keep_scores=self.keep_scores, **seen
            )
        return self.out(self._back(y, rest))

    def _turned(self, z: Tensor, start: int, now: BatchPositions, parts: int | None = None) -> Tensor:
        if self.rotary is None:
            return z
        return ops.rotary(z, self.rotary, start=start, parts=parts, positions=now.positions)

    def _exchanged(self, q: Tensor, kv: Tensor | None, axes: Cut) -> tuple[Tensor, Tensor | None]:
        """Return queries, keys and values, with these cuts of the sequence exchanged for cuts of the heads."""
        if not axes:
            return q, kv
        if self.shares and kv is not None and len(axes) == len(self._ulysses(q.grid)):
            return self._over_heads(ops.reshape(q, (*q.shape[:2], self.heads, 1, self.head_dim)), axes), (
                ops.share_heads(kv, self.group, axes)
            )
        return self._over_heads(q, axes), None if kv is None else self._over_heads(kv, axes)

    @staticmethod
    def _over_heads(z: Tensor, axes: Cut) -> Tensor:
        b, s, heads, group, e = z.grid.effective(z.layout).dims
        return z.redistribute(Layout(b, s[: len(s) - len(axes)], heads + axes, group, e))

    def _back(self, y: Tensor, rest: Layout) -> Tensor:
        """Bring the result of attention back to the layout that its queries had before the exchange."""
        if y.shape[2] == self.kv_heads:
            return y if y.grid.effective(y.layout) == y.grid.effective(rest) else y.redistribute(rest)
        heads = y.redistribute(Layout(*rest.dims[:3], None, None))
        return ops.reshape(heads, (*y.shape[:2], self.kv_heads, self.group, self.head_dim))

    def _ulysses(self, grid: Grid) -> Cut:
        return tuple(a for a in self.scheme.ulysses if grid.sizes[a] > 1)

    def _draw(self, x: Tensor) -> Drop | None:
        """Return a function that draws the dropout factors of this call; None where nothing is dropped."""
        if not self.training or self.dropout == 0:
            return None
        if self.name is None:
            raise ConfigError("dropout draws by its qualified name; call initialize(seed) on the whole model first")
        draws = current_draws() or self._draws
        keep = random.Bernoulli(
            1 - self.dropout, 16, seed=self.seed, name=self.name, call=draws.call(self.name), step=draws.step,
            start=draws.start,
        )  # fmt: skip
        dtype = np.dtype(np.float64 if x.dtype == np.float64 else np.float32)
        backend = x.grid.backend
        return lambda shape, part: factors(keep, dtype, shape, part, backend)

    def extra_repr(self) -> str:
        kv = "" if self.kv_heads == self.heads else f", {self.kv_heads} heads of keys"
        return f"{self.heads} heads{kv} of {self.head_dim}"


def _shares_heads(layer: Attention, grid: Grid, inner: Cut) -> bool:
    """Return True if there are fewer heads of keys than ranks, so that Ulysses distributes each one's queries."""
    over, cut = layer._ulysses(grid), tuple(a for a in layer.scheme.inner.dims[-1] if grid.sizes[a] > 1)
    ranks, tensor = span_of(over, grid.sizes), span_of(cut, grid.sizes)
    if ranks == 1:
        return False
    if layer.heads < ranks * tensor:
        most = max([n for n in range(1, ranks + 1) if ranks % n == 0 and n * tensor <= layer.heads], default=1)
        within = f" beside {tensor} tensor ranks that cut them too" if tensor > 1 else ""
        raise ConfigError(
            f"Ulysses over {ranks} ranks{within} cuts {layer.heads} heads, which leaves ranks without any: use "
            f"ulysses={most} and a ring over the rest, as in sequence=dict(size={ranks}, ulysses={most}), or at least "
            f"{ranks * tensor} heads"
        )
    if layer.kv_heads >= ranks * tensor:
        return False
    whole = [n * layer.group for n in cut_lengths(layer.kv_heads, cut, grid.sizes)]
    if inner or whole != cut_lengths(layer.heads, cut, grid.sizes):
        right = [str(n) for n in range(1, layer.kv_heads + 1) if layer.kv_heads % n == 0]
        raise ConfigError(
            f"Ulysses over {ranks} ranks shares {layer.kv_heads} heads of keys, which {tensor} tensor ranks do not "
            f"cut evenly: use tensor ranks that do ({', '.join(right)}), at least {ranks * tensor} heads of keys, or "
            f"a ring: ulysses=1"
        )
    return True


def _warn_of_idle_ranks(layer: Attention, grid: Grid, inner: Cut) -> None:
    """Warn on rank 0 if ranks have no heads because there are fewer of keys."""
    axes = tuple(a for a in layer.scheme.inner.dims[-1] if grid.sizes[a] > 1)
    outer = tuple(a for a in axes if a not in inner)
    ranks, keys = span_of(axes, grid.sizes), min(layer.kv_heads, span_of(outer, grid.sizes))
    idle = ranks - keys * min(layer.group, ranks // span_of(outer, grid.sizes))
    if idle <= 0 or layer.group == 1 or (inner and layer.heads < ranks) or not grid.inside or grid.world.rank:
        return
    apart = "With packed=False they distribute the queries too, evenly over two axes"
    warnings.warn(
        f"attention's {layer.heads} heads share {layer.kv_heads} heads of keys, which {ranks} ranks cut: {idle} of the "
        f"ranks have no heads. {'Take the axis as two' if inner else apart}, the outer one of at most {layer.kv_heads} "
        f"ranks (Scheme.factored); or use fewer tensor ranks",
        stacklevel=3,
    )


def _inner(axes: Cut, kv_heads: int, grid: Grid) -> Cut:
    """Return the innermost of the axes that cut the heads, beginning with the first that leaves a rank no key head."""
    ranks = 1
    for i, axis in enumerate(axes):
        ranks *= grid.sizes[axis]
        if ranks > kv_heads:
            return axes[i:]
    return ()
