"""Contenders of attention's backward: its kernels alone, in any order of adds or in one, or forward
and backward from Python."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kernel_hub.ops import flash_attention
from kernel_hub.ops.attention.backward import portable as backward_portable
from kernel_hub.ops.attention.problem import Problem
from kernel_hub.testing.reference_attention import reference_attention_backward

from .attention_peers import CUDNN, FA2, FA3, sdpa, xformers_fa3
from .attention_shapes import AttentionLot
from .contenders import DTYPES, Contender, Expected, Launch, Made, Peer, Source, Written

Grads = tuple[torch.Tensor, ...]
_SEVERAL_PAIRS = 1 << 28  # of a key head: up to it more than one is looked at
ANY_ORDER = "in any order"


class Operands(NamedTuple):
    """One input set, all (batch, seqlen, heads, head_dim), and lse (batch, heads, seqlen)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def problem_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Problem:
    """Dense (batch, seqlen, heads, head_dim)."""
    scale = 1 / math.sqrt(q.shape[-1])
    right = 0 if causal else -1
    return Problem(q, k, v, q.shape[0], q.shape[1], k.shape[1], scale, window_right=right)


def ours(given: Operands, grads: Grads, causal: bool, deterministic: bool = False) -> Launch:
    """Our kernels, into `grads`."""
    problem = problem_of(*given[:3], causal)
    return functools.partial(
        backward_portable.backward, problem, given.out, given.lse, given.dout, *grads,
        deterministic=deterministic,
    )  # fmt: skip


def by_fa3(given: Operands, grads: Grads, causal: bool) -> Launch:
    """FlashAttention-3's, into `grads`."""
    op, scale = xformers_fa3("bwd"), 1 / math.sqrt(given.q.shape[-1])
    q, k, v, dout, out, lse = given

    def run() -> Grads:
        op(dout, q, k, v, out, lse, *grads, softmax_scale=scale, is_causal=causal)
        return grads

    return run


def _flash(q: Any, k: Any, v: Any, causal: bool, group: int) -> Any:
    """FlashAttention-2's forward, of heads before tokens; group: copies of each key head."""
    if group > 1:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)


def _copies(given: Operands) -> int:
    """Of each key head that FlashAttention-2 is given: 1 where it takes groups."""
    q, k, v = (x[:1, :1].transpose(1, 2) for x in given[:3])
    try:
        _flash(q, k, v, False, 1)
    except RuntimeError:
        return given.q.shape[2] // given.k.shape[2]
    return 1


def by_flash(given: Operands, causal: bool) -> Callable[[], Grads]:
    """FlashAttention-2's, of its own forward; k's and v's gradients are of query heads where it
    takes no groups."""
    q, k, v, gradient = (x.transpose(1, 2) for x in given[:4])
    copies = _copies(given)
    if copies > 1:
        k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
    out, lse, *tables = _flash(q, k, v, causal, 1)[:8]
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward

    def run() -> Grads:
        grads = backward(
            gradient, q, k, v, out, lse, *tables[:4], 0.0, causal, *tables[4:6]
        )  # fmt: skip
        return tuple(x.transpose(1, 2) for x in grads)

    return run


def by_cudnn(given: Operands, causal: bool) -> Callable[[], Grads]:
    """cuDNN's, of its own forward."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in given[:3]]
    with torch.enable_grad():
        attended = sdpa(q, k, v, causal, CUDNN)()
    return lambda: torch.autograd.grad(attended, leaves, given.dout, retain_graph=True)


class _Fa3(torch.autograd.Function):  # type: ignore[misc]
    """FlashAttention-3's ops for autograd, as its own interface has them."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, scale: float, causal: bool) -> torch.Tensor:
        found = xformers_fa3()(q, k, v, softmax_scale=scale, is_causal=causal, num_splits=1)
        ctx.save_for_backward(q, k, v, *found[:2])
        ctx.rest = (scale, causal)
        return found[0]

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        scale, causal = ctx.rest
        grads = [torch.empty_like(x) for x in (q, k, v)]
        xformers_fa3("bwd")(dout, q, k, v, out, lse, *grads, softmax_scale=scale, is_causal=causal)
        return (*grads, None, None)


def make(lot: AttentionLot, source: Source) -> Made:
    """The kernels of the backward, all given the same q, k, v and dout; ours and FlashAttention-3
    also the out and lse of our forward, the others those of their own."""
    case = _Case(lot, source)
    sets, causal = case.sets, lot.is_causal
    grads = [tuple(torch.empty_like(x) for x in given[:3]) for given in sets]
    written = Written(grads[0], lambda: case.sample(grads[0]), has_same_bits=False)
    launches = [ours(given, each, causal) for given, each in zip(sets, grads, strict=True)]
    ways: dict[str, Callable[[Operands], Callable[[], Grads]]] = {
        FA3: lambda given: by_fa3(given, tuple(torch.empty_like(x) for x in given[:3]), causal),
        FA2: lambda given: by_flash(given, causal),
        CUDNN: lambda given: by_cudnn(given, causal),
    }
    return Made(Contender(launches, written, case.expected), case.peers(ways), case.is_rotated)


def make_ordered(lot: AttentionLot, source: Source) -> Made:
    """The kernels of the backward with dq's sums in one order, beside the same in any."""
    case = _Case(lot, source)

    def contender(deterministic: bool) -> Contender:
        grads = [tuple(torch.empty_like(x) for x in given[:3]) for given in case.sets]
        launches = [
            functools.partial(
                backward_portable.backward, case.problem(given), given.out, given.lse, given.dout,
                *each, deterministic=deterministic,
            )
            for given, each in zip(case.sets, grads, strict=True)
        ]  # fmt: skip
        first = grads[0]
        written = Written(first, lambda: case.sample(first), has_same_bits=deterministic)
        return Contender(launches, written, case.expected)

    free = Peer((), functools.partial(contender, False))
    return Made(contender(True), {ANY_ORDER: free}, case.is_rotated)


def make_eager(lot: AttentionLot, source: Source) -> Made:
    """Forward and backward through autograd, timed as Python calls them."""
    case = _Case(lot, source)
    causal, scale, copies = lot.is_causal, 1 / math.sqrt(lot.heads[2]), _copies(case.sets[0])

    def through(
        attend: Callable[..., torch.Tensor], is_turned: bool = False
    ) -> Callable[[Operands], Callable[[], Grads]]:
        """attend: of q, k, v; is_turned: heads before tokens, as torch's ops have them."""

        def launch_of(given: Operands) -> Callable[[], Grads]:
            leaves = tuple(x.detach().requires_grad_() for x in given[:3])

            def run() -> Grads:
                with torch.enable_grad():
                    if is_turned:
                        out = attend(*(x.transpose(1, 2) for x in leaves)).transpose(1, 2)
                    else:
                        out = attend(*leaves)
                    found: Grads = torch.autograd.grad(out, leaves, given.dout)
                return found

            return run

        return launch_of

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _flash(q, k, v, causal, copies)[0]
        return found

    def cudnn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, causal, False
        )[0]
        return found

    def fa3(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Fa3.apply(q, k, v, scale, causal)
        return found

    ways = {FA3: through(fa3), FA2: through(flash, True), CUDNN: through(cudnn, True)}
    own = case.contender(through(functools.partial(flash_attention, causal=causal)))
    return Made(own, case.peers(ways), case.is_rotated, is_eager=True)


class _Case:
    """Input sets with what our forward makes of them, and what some gradients must be."""

    def __init__(self, lot: AttentionLot, source: Source) -> None:
        self.lot, self.dtype = lot, DTYPES[lot.dtype]
        heads, kv_heads, _ = lot.heads
        self.group = heads // kv_heads
        # Of ragged sequences, which lie side by side.
        self.bounds = [0, *itertools.accumulate(lot.seqlens_q)] if lot.is_ragged else []
        self.table = torch.tensor(self.bounds, dtype=torch.int32, device=source.device)
        count = source.num_sets(lot.num_bytes)
        self.sets = [self._operands(source) for _ in range(count)]
        self.is_rotated = source.is_rotated(count, lot.num_bytes)
        self.picks = [(lot.batch_size - 1, kv_heads - 1)]  # (sequence, key head)
        if lot.pairs * self.group < _SEVERAL_PAIRS * lot.batch_size and heads > self.group:
            self.picks.append((0, 0))
        self.expected = [each for pick in self.picks for each in self._expected(*pick)]

    def problem(self, given: Operands) -> Problem:
        """What our kernels are asked."""
        lot, longest = self.lot, max(self.lot.seqlens_q)
        left, right = lot.window
        return Problem(
            *given[:3], lot.batch_size, longest, longest, 1 / math.sqrt(lot.heads[2]), left,
            0 if lot.is_causal else right, cu_seqlens_q=self.table if self.bounds else None,
            cu_seqlens_k=self.table if self.bounds else None,
        )  # fmt: skip

    def _operands(self, source: Source) -> Operands:
        lot = self.lot
        heads, kv_heads, head_dim = lot.heads
        rows = (sum(lot.seqlens_q),) if self.bounds else (lot.batch_size, lot.seqlens_q[0])
        q, dout = (source.normal(*rows, heads, head_dim, dtype=self.dtype) for _ in range(2))
        k, v = (source.normal(*rows, kv_heads, head_dim, dtype=self.dtype) for _ in range(2))
        tables: dict[str, Any] = {}
        if self.bounds:
            longest = max(lot.seqlens_q)
            tables = {
                "cu_seqlens_q": self.table, "cu_seqlens_k": self.table,
                "max_seqlen_q": longest, "max_seqlen_k": longest,
            }  # fmt: skip
        out, lse = flash_attention(
            q, k, v, causal=lot.is_causal, window_size=lot.window, return_lse=True, **tables
        )
        return Operands(q, k, v, dout, out, lse)

    def _of(self, x: torch.Tensor, sequence: int, heads: slice) -> torch.Tensor:
        """Some heads of a sequence, which stays a dimension."""
        if self.bounds:
            x, sequence = x[self.bounds[sequence] : self.bounds[sequence + 1]][None], 0
        return x[sequence : sequence + 1, :, heads]

    def _heads(self, kv_head: int) -> tuple[slice, slice]:
        """Those of q and of k."""
        first = kv_head * self.group
        return slice(first, first + self.group), slice(kv_head, kv_head + 1)

    def _expected(self, sequence: int, kv_head: int) -> list[Expected]:
        """dq of a key head's query heads; dk and dv, summed over them one by one."""
        heads, of_keys = self._heads(kv_head)
        q, dout, k, v = (
            self._of(self.sets[0][i], sequence, each)
            for i, each in ((0, heads), (3, heads), (1, of_keys), (2, of_keys))
        )
        how = {"causal": self.lot.is_causal, "window_size": self.lot.window}
        found = []
        for dtype in (torch.float64, self.dtype):
            parts = [
                reference_attention_backward(
                    q[:, :, i : i + 1], k, v, dout[:, :, i : i + 1], **how, dtype=dtype
                )
                for i in range(self.group)
            ]
            dq, dk, dv = zip(*parts, strict=True)
            found.append((torch.cat(dq, 2), sum(dk), sum(dv)))
        return [Expected(truth, own) for truth, own in zip(*found, strict=True)]

    def sample(self, grads: Grads) -> Sequence[torch.Tensor]:
        """What is looked at of dq, dk and dv; those of query heads are summed."""
        found = []
        for sequence, kv_head in self.picks:
            heads, of_keys = self._heads(kv_head)
            dq, dk, dv = grads
            found.append(self._of(dq, sequence, heads))
            for grad in (dk, dv):
                if grad.shape[-2] == dq.shape[-2] and self.group > 1:
                    found.append(self._of(grad, sequence, heads).sum(2, keepdim=True))
                else:
                    found.append(self._of(grad, sequence, of_keys))
        return found

    def contender(self, launch_of: Callable[[Operands], Callable[[], Grads]]) -> Contender:
        """A launch returns its gradients; the last ones of the first set are looked at."""
        kept: dict[str, Grads] = {}
        calls = [launch_of(given) for given in self.sets]

        def keeping() -> None:
            kept["grads"] = calls[0]()

        written = Written([], lambda: self.sample(kept["grads"]))
        return Contender([keeping, *calls[1:]], written, self.expected)

    def peers(self, ways: dict[str, Callable[[Operands], Callable[[], Grads]]]) -> dict[str, Peer]:
        return {
            name: Peer((name,), functools.partial(self.contender, way))
            for name, way in ways.items()
        }
