"""512 x 512 in fp16 through Triton: several configurations built ahead of time, the fastest chosen.

Built for two architectures without a GPU, and written out as C; measured, chosen by (M, N, K) and
compared with torch on one.
"""

import sys
import tempfile

import torch

from kernel_hub import KernelHubError, driver
from kernel_hub.formats import c_export
from kernel_hub.formats.triton import Problem, collection, compile_configs, tune

try:
    import triton
    import triton.language as tl
except ImportError:
    print("needs Triton to build: pip install triton")
    sys.exit(0)


@triton.jit
def matmul_kernel(
    a_ptr, b_ptr, c_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * K + depth[None, :]
    b_ptrs = b_ptr + depth[:, None] * N + columns[None, :]
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & (depth[None, :] < K - k), other=0.0)
        b = tl.load(b_ptrs, mask=(depth[:, None] < K - k) & (columns[None, :] < N), other=0.0)
        sums += tl.dot(a, b)
        a_ptrs += BLOCK_K
        b_ptrs += BLOCK_K * N
    c_ptrs = c_ptr + rows[:, None] * N + columns[None, :]
    tl.store(c_ptrs, sums.to(tl.float16), mask=(rows[:, None] < M) & (columns[None, :] < N))


CONFIGS = [
    {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
    {"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 64, "num_warps": 4, "num_stages": 4},
    {"BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3},
]


def launch(function, a, b, c):
    """One configuration's launch, on the grid that was kept with it."""
    function.run(a, b, c, a.shape[0], b.shape[1], a.shape[1])
    return c


def case(M, N, K):
    """One problem for `tune`, with inputs of its own."""
    a = torch.randn(M, K, device="cuda", dtype=torch.float16)
    b = torch.randn(K, N, device="cuda", dtype=torch.float16)
    c = torch.empty(M, N, device="cuda", dtype=torch.float16)
    return Problem(
        lambda function: launch(function, a, b, c),
        num_bytes=2 * (M * K + K * N + M * N),
        num_operations=2 * M * N * K,
    )


with tempfile.TemporaryDirectory() as folder:
    built = compile_configs(
        matmul_kernel, CONFIGS,
        signature="*fp16:16, *fp16:16, *fp16:16, i32:16, i32:16, i32:16",
        arch=["sm80", "sm90"], out=folder, grid="cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)",
    )  # fmt: skip
    kernels = collection(folder)
    for one in built:
        print(one.problem or kernels.function(one.name, arch=one.arch))

    for path in c_export.export("matmul_kernel", f"{folder}/c", package=folder):
        print(path.name)  # matmul_kernel_default(stream, a, b, c, M, N, K) chooses as below

    try:
        driver.get().primary_context(0)
    except KernelHubError as error:
        print(f"needs an NVIDIA GPU to launch: {error}")
        sys.exit(0)

    for found in tune(
        folder, case, [{"M": 512, "N": 512, "K": 512}, {"M": 64, "N": 4096, "K": 512}]
    ):
        times = ", ".join(f"{us:.2f}" for us in found.medians.values())
        print(f"{found.sizes}: {found.best} in {found.best_us:.2f} us (of {times})")

    a, b = torch.randn(2, 512, 512, device="cuda", dtype=torch.float16)
    c = torch.empty_like(a)
    kernels.kernel("matmul_kernel")(a, b, c, 512, 512, 512)  # of tuned.json, for these sizes
    torch.testing.assert_close(c, a @ b, rtol=1e-2, atol=1e-2)
    print(f"512 x 512 on {driver.get().device_name(0)}: equal to torch's")
