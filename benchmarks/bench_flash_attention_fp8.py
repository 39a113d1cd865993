"""flash_attention in e4m3 beside FlashAttention-3's FP8 forward, and our own bf16, in one run.

q, k and v are e4m3 with a scale for each (batch, key head); 16k tokens in all. Each contender's
output is held against fp64 on the dequantised values first (the last queries of a sequence), by its
rms error relative to the rms of the truth, beside that of an fp32 computation that rounds its
probabilities to e4m3. Burst: 6 ms of launches after 35 ms of idling, contenders in random order,
medians of the rounds; sustained: after half a second of launches back to back. TFLOP/s count
4 * head_dim operations a (query, key) pair seen. Writes
benchmarks/results/<gpu>_attention_fp8.json.
"""

from __future__ import annotations

import math
import sys
from functools import partial
from typing import Any

import torch
from bench_flash_attention import HEADS, MODELS, SHAPES
from harness import OURS, Launch, Report, arguments, burst, sustained
from lot.attention import quantised
from lot.attention_peers import FA3, fa3
from lot.contenders import E4M3

from kernel_hub import ops

BF16 = f"{OURS} bf16"
BLOCKS = f"{OURS} scales of blocks"
CHECKED_ROWS = 128
# Over the error of the computation that rounds its probabilities alone.
MOST_ERROR = 1.15


class Case:
    """One shape: launches, operations, and how wrong an output is."""

    def __init__(
        self, title: str, batch: int, seqlen: int, heads: tuple[int, int], head_dim: int,
        causal: bool,
    ) -> None:  # fmt: skip
        mask = "causal" if causal else "full"
        self.name = f"{title} {batch} x {seqlen} h{heads[0]}/{heads[1]} d{head_dim} {mask} e4m3"
        self.flops = 4.0 * batch * heads[0] * seqlen * seqlen * head_dim * (0.5 if causal else 1)
        self.causal = causal
        (q, self.q_scale), (k, self.k_scale), (v, self.v_scale) = (
            quantised(torch.randn(batch, seqlen, count, head_dim, device="cuda"))
            for count in (heads[0], heads[1], heads[1])
        )
        # FlashAttention-3 takes q's scales by key head.
        group = heads[0] // heads[1]
        self.q_scale = self.q_scale[:, ::group].contiguous()
        self.tensors = (q, k, v)
        self.softmax_scale = 1 / math.sqrt(head_dim)
        own = partial(
            ops.flash_attention, q, k, v, causal=causal, q_scale=self.q_scale, k_scale=self.k_scale,
            v_scale=self.v_scale,
        )  # fmt: skip
        blocks = self.v_scale[:, :, None].expand(-1, -1, -(-seqlen // 128)).contiguous()
        by_head = (self.q_scale.repeat_interleave(group, 1), self.k_scale, self.v_scale)
        wide = [
            (x.float() * scale[:, None, :, None]).bfloat16()
            for x, scale in zip(self.tensors, by_head, strict=True)
        ]
        self.launches: dict[str, Launch] = {
            OURS: own,
            BLOCKS: partial(own, v_scale=blocks),
            BF16: partial(ops.flash_attention, *wide, causal=causal),
        }
        try:
            peer = fa3()
            self.launches[FA3] = lambda: peer(
                q, k, v, softmax_scale=self.softmax_scale, is_causal=causal, num_splits=1,
                q_descale=self.q_scale, k_descale=self.k_scale, v_descale=self.v_scale,
            )[0]  # fmt: skip
            self.launches[FA3]()
        except Exception as error:  # noqa: BLE001  a peer that fails is left out, and said
            self.launches.pop(FA3, None)
            print(f"left out in {self.name}: {FA3}: {str(error)[:200]}", file=sys.stderr)

    def errors(self) -> dict[str, float]:
        """Relative rms errors on the last rows of the last sequence's first head; "rounded" is the
        computation in fp32 with e4m3 probabilities."""
        scales = (self.q_scale[-1, 0], self.k_scale[-1, 0], self.v_scale[-1, 0])
        q, k, v = (
            x[-1, :, 0].double() * scale.double()
            for x, scale in zip(self.tensors, scales, strict=True)
        )
        q = q[-CHECKED_ROWS:]
        scores = q @ k.T * self.softmax_scale
        if self.causal:
            at = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device="cuda")[:, None]
            hidden = torch.arange(k.shape[0], device="cuda") > at
            scores = scores.masked_fill(hidden, -math.inf)
        probs = torch.exp(scores - scores.amax(-1, keepdim=True))
        sums = probs.sum(-1, keepdim=True)
        truth = probs @ v / sums
        size = truth.square().mean().sqrt()

        def error(out: torch.Tensor) -> float:
            return float((out.double() - truth).square().mean().sqrt() / size)

        rounded = ((probs * 64).to(E4M3).float() / 64) @ v.float() / sums.float()
        found = {"rounded": error(rounded)}
        for name, launch in self.launches.items():
            if name != BF16:
                found[name] = error(launch()[-1, -CHECKED_ROWS:, 0])
        return found


def main() -> int:
    """Measure, write, print."""
    options = arguments(__doc__, rounds=9, quick={"rounds": 5})
    report = Report("attention_fp8", options)
    made: list[tuple[Any, ...]] = []
    shapes = SHAPES[1::2] if options.quick else SHAPES
    for head_dim in (128,) if options.quick else (128, 64, 256):
        for causal in (False, True):
            for batch, seqlen in shapes:
                heads = HEADS[head_dim]
                made.append(("prefill", batch, seqlen, (heads, heads), head_dim, causal))
    if not options.quick:
        made += [(name, 4, 4096, heads, 128, True) for name, heads in MODELS.items()]
    for given in made:
        case = Case(*given)
        errors = case.errors()
        shown = ", ".join(f"{name} {error:.4f}" for name, error in errors.items())
        print(f"{case.name}: rms errors {shown}", flush=True)
        most = MOST_ERROR * errors["rounded"] + 4e-3
        report.failures += [
            f"{case.name}: {name}: rms error {errors[name]:.4f}, at most {most:.4f}"
            for name in (OURS, BLOCKS)
            if not errors[name] <= most
        ]
        long = given[2] == 16384 and given[4] == 128 and not options.quick
        for way, measure in ({"burst": burst} | ({"sustained": sustained} if long else {})).items():
            rates = {
                name: [case.flops / ms / 1e9 for ms in values]
                for name, values in measure(case.launches, options.rounds).items()
            }
            medians = report.case(f"{case.name} {way}", rates, "TFLOP/s", ratio_to=FA3)
            for peer, rate in medians.items():
                if peer != OURS:
                    report.ahead(f"{peer} d{given[4]}", medians[OURS] / rate)
            shown = ", ".join(f"{name} {rate:.0f}" for name, rate in medians.items())
            print(f"{case.name} {way}: {shown} TFLOP/s", flush=True)
        report.write()
        del case
        torch.cuda.empty_cache()
    return report.finish()


if __name__ == "__main__":
    with torch.no_grad():
        sys.exit(main())
