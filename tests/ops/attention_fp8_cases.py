"""Cases of flash_attention in e4m3, dequantised and held against fp64.

The rule of the kernels: their rms error, relative to the rms of fp64 on the dequantised values, is
at most 1.15 times that of an fp32 computation that rounds its probabilities to e4m3 with room for
2^8 (and where V has scales of blocks, less the powers of two that these lie below the largest),
plus 0.004 (two roundings to bf16). lse is held to 3e-3 or 1.5 * 2^-13 of the largest score for each
32 of head_dim: Hopper adds 32 e4m3 products at a time to sums that it cuts off at 14 bits.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from kernel_hub.ops import flash_attention
from kernel_hub.testing.reference_attention import reference_attention

E4M3 = torch.float8_e4m3fn
TOKENS = 128


def scale_of(kind: str, name: str, batch: int, heads: int, tokens: int) -> torch.Tensor | None:
    """A random scale around 1/4 of a kind (SCALES of the test), for q, k or v."""
    blocks = kind == "blocks" or kind == f"{name} blocks"
    shape: tuple[int, ...] | None = (batch, heads, -(-tokens // TOKENS))
    if not blocks:
        shape = {"none": None, "tensor": (), "heads": (heads,), "batch": (batch, heads)}.get(
            kind, (batch, heads)
        )
    return None if shape is None else 0.25 * 2.0 ** (4 * torch.rand(shape) - 2)


def spread(scale: torch.Tensor | None, x: torch.Tensor, bounds: list[int] | None) -> torch.Tensor:
    """The scale of every element of x, which is (..., tokens, heads, head_dim)."""
    if scale is None or scale.numel() == 1:
        return torch.ones_like(x) * (1.0 if scale is None else scale.reshape(()))
    found = torch.ones_like(x)
    heads = scale.shape[0 if scale.dim() == 1 else 1]
    for row in range(scale.shape[0] if scale.dim() > 1 else 1):
        if scale.dim() == 1:
            part = found
        else:
            part = found[row] if bounds is None else found[bounds[row] : bounds[row + 1]]
        for head in range(x.shape[-2]):
            own = head * heads // x.shape[-2]
            if scale.dim() < 3:
                part[..., head, :] *= scale[own] if scale.dim() == 1 else scale[row, own]
            else:
                for start in range(0, part.shape[0], TOKENS):
                    part[start : start + TOKENS, head] *= scale[row, own, start // TOKENS]
    return found


class Case:
    """Inputs: e4m3 tensors with their scales, and the same dequantised."""

    def __init__(
        self, lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], heads: int = 2,
        kv_heads: int = 1, head_dim: int = 128, kind: str = "batch", varlen: bool = False,
        device: str = "cpu", seed: int = 0, magnitude: float = 1.0,
    ) -> None:  # fmt: skip
        torch.manual_seed(seed)
        batch = len(lengths_q)
        self.options: dict[str, Any] = {}
        self.truth: list[torch.Tensor] = []
        self.largest_score = 0.0
        self.tensors: list[torch.Tensor] = []
        for name, lengths, count in (
            ("q", lengths_q, heads), ("k", lengths_k, kv_heads), ("v", lengths_k, kv_heads),
        ):  # fmt: skip
            bounds = [0]
            for length in lengths:
                bounds.append(bounds[-1] + length)
            # Past the last sequence there are nans.
            shape = (bounds[-1] + 3, count, head_dim) if varlen else (
                batch, lengths[0], count, head_dim)  # fmt: skip
            own_scales = kv_heads if kind == "shared" else count  # of heads that share keys: one
            scale = scale_of(kind, name, batch, own_scales, max(lengths))
            x = torch.randn(shape) * (magnitude if name != "v" else 1.0)
            factors = spread(scale, x, bounds if varlen else None)
            # Values of the size of their scale times 3: blocks of V then differ by up to 16.
            stored = (x * 3).to(E4M3)
            if varlen:
                stored.view(torch.uint8)[bounds[-1] :] = 0x7F
                own = torch.tensor(bounds, dtype=torch.int32, device=device)
                side = "q" if name == "q" else "k"
                self.options |= {f"cu_seqlens_{side}": own, f"max_seqlen_{side}": max(lengths)}
            if name == "v":
                self.shares = self._shares(factors[..., 0], bounds if varlen else None).to(device)
            self.tensors.append(stored.to(device))
            self.truth.append((stored.float() * factors).to(device))
            self.options[f"{name}_scale"] = None if scale is None else scale.to(device)
        # Scores of a standard deviation about 1 whatever the scales.
        k = self.truth[1][: sum(lengths_k)] if varlen else self.truth[1]
        q = self.truth[0][: sum(lengths_q)] if varlen else self.truth[0]
        spread_of_scores = float(q.std() * k.std()) if k.numel() > 1 and q.numel() > 1 else 1.0
        scale = magnitude / max(spread_of_scores, 1e-3) / math.sqrt(head_dim)
        self.options["softmax_scale"] = scale
        self.tables = {
            name: self.options[name] for name in self.options if name.startswith("cu_seqlens")
        }
        self.tables["softmax_scale"] = scale
        self.rows = sum(lengths_q) if varlen else None

    @staticmethod
    def _shares(factors: torch.Tensor, bounds: list[int] | None) -> torch.Tensor:
        """(..., tokens, heads): V's scales over the largest one of their sequence and head."""
        if bounds is None:
            return factors / factors.amax(1, keepdim=True)
        shares = torch.ones_like(factors)
        for start, end in itertools.pairwise(bounds):
            if end > start:
                shares[start:end] = factors[start:end] / factors[start:end].amax(0)
        return shares

    def call(self, **more: Any) -> Any:
        return flash_attention(*self.tensors, **(self.options | more))

    def reference(self, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return reference_attention(*self.truth, causal=causal, **self.tables)

    def emulated(self, causal: bool) -> torch.Tensor:
        """fp32, P rounded to e4m3."""
        q, k, v = self.truth
        starts = self.tables.get("cu_seqlens_q")
        if starts is None:
            parts = zip(q, k, v, self.shares, strict=True)
            return torch.stack([self._one(*x, causal) for x in parts])
        starts, ends = starts.tolist(), self.tables["cu_seqlens_k"].tolist()
        out = torch.zeros_like(q)
        for i in range(len(starts) - 1):
            a, b = slice(starts[i], starts[i + 1]), slice(ends[i], ends[i + 1])
            out[a] = self._one(q[a], k[b], v[b], self.shares[b], causal)
        return out

    def _one(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shares: torch.Tensor, causal: bool
    ) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        share = shares.T.repeat_interleave(group, 0)[:, None].clamp_min(2.0**-30)
        share = torch.exp2(-torch.floor(-torch.log2(share)))
        scores = q @ k.transpose(1, 2) * self.options["softmax_scale"]
        if scores.numel():
            self.largest_score = max(self.largest_score, float(scores.abs().max()))
        if causal:
            at = torch.arange(q.shape[1], device=q.device)[:, None] + k.shape[1] - q.shape[1]
            hidden = torch.arange(k.shape[1], device=q.device) > at
            scores = scores.masked_fill(hidden, -math.inf)
        if not k.shape[1]:
            return torch.zeros_like(q).transpose(0, 1)
        largest = scores.amax(-1, keepdim=True)
        probs = torch.exp(scores - largest.masked_fill(largest == -math.inf, 0.0))
        rounded = (probs * share * 256).to(E4M3).float() / 256 / share
        sums = probs.sum(-1, keepdim=True)
        return (rounded @ v / sums.masked_fill(sums == 0, 1.0)).transpose(0, 1)

    def check(self, causal: bool, out: torch.Tensor, lse: torch.Tensor | None) -> float:
        """The relative rms error; AssertionError where the rule is broken."""
        truth, truth_lse = self.reference(causal)
        rows = slice(self.rows) if self.rows is not None else slice(None)
        truth, found = truth[rows], out[rows].double()
        assert not bool(found.isnan().any())
        size = max(float(truth.square().mean().sqrt()), 1e-30)
        error = float((found - truth).square().mean().sqrt()) / size
        budget = float((self.emulated(causal)[rows] - truth).square().mean().sqrt()) / size
        limit = 1.15 * budget + 0.004
        assert error <= limit, f"rms error {error:.4f}, limit {limit:.4f}, budget {budget:.4f}"
        if lse is not None:
            truth_lse, lse = truth_lse[..., rows], lse[..., rows]
            assert bool((torch.isinf(truth_lse) == torch.isinf(lse)).all())
            finite = torch.isfinite(truth_lse)
            distance = (lse.double() - truth_lse)[finite].abs()
            most = float(distance.max()) if distance.numel() else 0.0
            products = -(-out.shape[-1] // 32)
            limit = max(3e-3, 1.5 * 2.0**-13 * products * self.largest_score)
            assert most <= limit, f"lse error {most:.2g}, limit {limit:.2g}"
        return error
