"""Triton kernels that the tests compile; importing this needs Triton."""

import triton
import triton.language as tl


@triton.jit
def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x, y = tl.load(x_ptr + offsets, mask=mask), tl.load(y_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, x + y, mask=mask)


@triton.jit
def square_kernel(a_ptr, out_ptr, BLOCK: tl.constexpr):
    # Pipelined: the shared memory grows with the stages.
    offsets = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    sums = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for i in range(8):
        a = tl.load(a_ptr + offsets + i * BLOCK * BLOCK)
        b = tl.load(a_ptr + offsets + (i + 1) * BLOCK * BLOCK)
        sums += tl.dot(a, b)
    tl.store(out_ptr + offsets, sums.to(tl.float16))


@triton.jit
def copy_kernel(source, target, BLOCK: tl.constexpr):
    # Host tensor descriptors.
    at = [tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK]
    target.store(at, source.load(at))


@triton.jit
def broken_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    tl.store(out_ptr, tl.no_such_function(x_ptr))


tuned_kernel = triton.autotune(
    configs=[
        triton.Config({"BLOCK": 64}, num_warps=2),
        triton.Config({"BLOCK": 128}, num_warps=4),
    ],
    key=["n"],
)(add_kernel)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = depth < K - k
        a_ptrs = a_ptr + rows[:, None] * K + (k + depth)[None, :]
        b_ptrs = b_ptr + (k + depth)[:, None] * N + columns[None, :]
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & inside[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=inside[:, None] & (columns[None, :] < N), other=0.0)
        sums += tl.dot(a, b)
    c_ptrs = c_ptr + rows[:, None] * N + columns[None, :]
    tl.store(c_ptrs, sums.to(tl.float16), mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def tuple_kernel(pair, numbers, out_ptr, stride, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < numbers[0]
    sums = tl.load(pair[0] + offsets, mask=mask) * numbers[1][0]
    if numbers[1][1] is not None:
        sums += tl.load(pair[1] + offsets, mask=mask) + numbers[1][1]
    tl.store(out_ptr + offsets * stride, sums, mask=mask)


@triton.jit
def scale_kernel(x_ptr, bias_ptr, out_ptr, n, stride, scale, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets * stride, mask=mask) * scale
    if bias_ptr is not None:
        x += tl.load(bias_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets * stride, x, mask=mask)


@triton.jit
def widths_kernel(out_ptr, a8, b16, c32, d64, e8, f16, g32, h64, BLOCK: tl.constexpr):
    total = a8 + b16 + c32 + d64 + e8.to(tl.int64) + f16 + g32 + h64.to(tl.int64)
    tl.store(out_ptr + tl.arange(0, BLOCK), total.to(tl.int64))


@triton.jit
def warps_kernel(x_ptr, out_ptr, num_warps: tl.constexpr, BLOCK: tl.constexpr):
    # Reads the compiler's own option by its name, as Liger's sparsemax does.
    offsets = tl.program_id(0) * BLOCK * num_warps + tl.arange(0, BLOCK * num_warps)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) * num_warps)
