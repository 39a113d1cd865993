"""launch_probe_5 written in Triton, for the launch benchmark (Triton reads its source's file)."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def kernel(out, x, y, num_elements, scale, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = x + scale * y."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_elements
    value = tl.load(x + offsets, mask) + scale * tl.load(y + offsets, mask)
    tl.store(out + offsets, value, mask)
