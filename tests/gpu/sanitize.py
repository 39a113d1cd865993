"""Every op over ugly shapes once, for compute-sanitizer (no comparison: tests/ops does that).

for tool in memcheck racecheck initcheck synccheck; do
    compute-sanitizer --tool $tool --error-exitcode 1 python tests/gpu/sanitize.py
done
"""

from __future__ import annotations

import itertools

import torch

from kernel_hub import Kernel, ops

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HIDDEN = (1, 8, 127, 256, 1000, 2048, 4096, 5120, 8192, 16384, 40000)
ROWS = (1, 3, 300)


def main() -> int:
    """Launch everything, wait, say how much it was."""
    count = 0
    with torch.no_grad():
        for dtype, hidden, rows in itertools.product(DTYPES, HIDDEN, ROWS):
            x = torch.randn(rows, hidden + 8, device="cuda", dtype=dtype)[:, :hidden]
            residual = torch.randn(rows, hidden, device="cuda", dtype=dtype)
            weight = torch.randn(hidden, device="cuda", dtype=dtype)
            ops.rms_norm(x, weight)
            ops.rms_norm(x, weight, residual=residual)
            ops.rms_norm(residual, weight, residual=x.contiguous(), out=residual)
            if hidden % 2 == 0:
                ops.silu_and_mul(x)
            count += 3 + (hidden % 2 == 0)
        for dtype, head_dim, heads, tokens, interleaved in itertools.product(
            DTYPES, (64, 80, 128, 256), ((32, 8), (5, 1)), (1, 7, 300), (False, True)
        ):
            q = torch.randn(tokens, heads[0], head_dim, device="cuda", dtype=dtype)
            k = torch.randn(tokens, heads[1], head_dim, device="cuda", dtype=dtype)
            angles = torch.randn(512, head_dim // 4, device="cuda")
            positions = torch.randint(0, 512, (tokens,), device="cuda")
            for where in (None, positions):
                ops.rope(q, k, angles.cos(), angles.sin(), where, interleaved=interleaved,
                         rotary_dim=head_dim // 2)  # fmt: skip
                count += 1
        a, b = (torch.randn(512, 512, device="cuda", dtype=torch.half) for _ in range(2))
        c = torch.empty(512, 512, device="cuda")
        Kernel("matmul_cache_kernel").matmul_cache_kernel_0d1d2d(
            (8, 8, 1), (32, 32, 1), 16384, None, [a, b, c]
        )
    torch.cuda.synchronize()
    print(f"{count + 1} launches")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
