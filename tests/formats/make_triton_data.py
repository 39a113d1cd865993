"""Makes tests/formats/data/triton: small kernels as each version of Triton compiles and keeps them.

    python tests/formats/make_triton_data.py 3.6.0=/path/with/triton-3.6.0 fbtriton=/path/with/it …

needs no GPU. Each version runs in a Python of its own with that folder in front of its path. Line
information is left out, and paths of the machine are taken out of the texts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KEPT = (".cubin", ".json", ".ttir")
WITH_PTX = ("3.0.0", "3.6.0")
PLAIN = ("2.2.0", "3.0.0", "3.3.1", "3.6.0", "3.9.0")  # versions that also get matmul and cluster
FP32 = {"x_ptr": "*fp32", "y_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
POINTERS = ("x_ptr", "y_ptr", "out_ptr")
MATMUL = {
    **dict.fromkeys(("a_ptr", "b_ptr", "c_ptr"), "*fp16"),
    **dict.fromkeys(("M", "N", "K", "stride_am", "stride_bk", "stride_cm"), "i32"),
    "scale": "fp32",
    **dict.fromkeys(("BM", "BN", "BK"), "constexpr"),
}
MATMUL_DIVISIBLE = ("a_ptr", "b_ptr", "c_ptr", "K", "stride_am", "stride_bk", "stride_cm")
SCRATCH = {
    "x_ptr": "*fp32", "out_ptr": "*fp32", "M": "i32", "N": "i32", "BM": "constexpr",
    "BN": "constexpr",
}  # fmt: skip
DESC = {
    "x_desc": "tensordesc<fp16[16,128]>", "out_ptr": "*fp16", "M": "i32", "N": "i32",
    "scale": "fp32", "BM": "constexpr", "BN": "constexpr",
}  # fmt: skip
TUPLES = {
    "pair": ("*fp32", "*fp32"), "numbers": ("i32", ("fp32", "constexpr")), "out": "*fp32",
    "BLOCK": "constexpr",
}  # fmt: skip
COPY = {"x_desc": "tensordesc<fp16[64,64]>", "y_desc": "tensordesc<fp16[64,64]>", "n": "i32"}
TILE, WIDE = {"BM": 32, "BN": 32}, {"BM": 16, "BN": 128}


def kernels() -> dict[str, Any]:
    """The functions, made when Triton is there."""
    import triton
    import triton.language as tl

    globals()["tl"] = tl
    with contextlib.suppress(ImportError):
        from triton.language.extra import tlx

        globals()["tlx"] = tlx

    @triton.jit
    def add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        x = tl.load(x_ptr + offsets, mask=mask)
        y = tl.load(y_ptr + offsets, mask=mask)
        tl.store(out_ptr + offsets, x + y, mask=mask)

    @triton.jit
    def matmul_kernel(
        a_ptr, b_ptr, c_ptr, M, N, K, stride_am, stride_bk, stride_cm, scale,
        BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ):  # fmt: skip
        rows = tl.program_id(0) * BM + tl.arange(0, BM)
        columns = tl.program_id(1) * BN + tl.arange(0, BN)
        inner = tl.arange(0, BK)
        a = a_ptr + rows[:, None] * stride_am + inner[None, :]
        b = b_ptr + inner[:, None] * stride_bk + columns[None, :]
        sums = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, K, BK):
            left = tl.load(a, mask=(rows[:, None] < M) & (inner[None, :] + k < K), other=0.0)
            right = tl.load(b, mask=(inner[:, None] + k < K) & (columns[None, :] < N), other=0.0)
            sums += tl.dot(left, right)
            a += BK
            b += BK * stride_bk
        out = c_ptr + rows[:, None] * stride_cm + columns[None, :]
        mask = (rows[:, None] < M) & (columns[None, :] < N)
        tl.store(out, (sums * scale).to(tl.float16), mask=mask)

    @triton.jit
    def cluster_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
        offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        x = tl.load(x_ptr + offsets, mask=mask)
        y = tl.load(y_ptr + offsets, mask=mask)
        tl.store(out_ptr + offsets, x * y, mask=mask)

    @triton.jit
    def scratch_kernel(x_ptr, out_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
        x = tl.make_tensor_descriptor(x_ptr, [M, N], [N, 1], [BM, BN])
        out = tl.make_tensor_descriptor(out_ptr, [M, N], [N, 1], [BM, BN])
        row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
        out.store([row, column], x.load([row, column]) * 2)

    @triton.jit
    def desc_kernel(x_desc, out_ptr, M, N, scale, BM: tl.constexpr, BN: tl.constexpr):
        row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
        value = x_desc.load([row, column])
        rows, columns = row + tl.arange(0, BM), column + tl.arange(0, BN)
        mask = (rows[:, None] < M) & (columns[None, :] < N)
        out = out_ptr + rows[:, None] * N + columns[None, :]
        tl.store(out, (value * scale).to(tl.float16), mask=mask)

    @triton.jit
    def tuple_kernel(pair, numbers, out, BLOCK: tl.constexpr):
        offsets = tl.arange(0, BLOCK)
        mask = offsets < numbers[0]
        sums = tl.load(pair[0] + offsets, mask=mask) * numbers[1][0]
        sums += tl.load(pair[1] + offsets, mask=mask) + numbers[1][1]
        tl.store(out + offsets, sums, mask=mask)

    @triton.jit
    def tlx_copy(x_desc, y_desc, n, BM: tl.constexpr, BN: tl.constexpr):
        row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
        buffer = tlx.local_view(tlx.local_alloc((BM, BN), tl.float16, 1), 0)
        barrier = tlx.local_view(tlx.alloc_barriers(num_barriers=1, arrive_count=1), 0)
        tlx.barrier_expect_bytes(barrier, BM * BN * 2)
        tlx.async_descriptor_load(x_desc, buffer, [row, column], barrier)
        tlx.barrier_wait(bar=barrier, phase=0)
        tlx.async_descriptor_store(y_desc, buffer, [row, column])
        tlx.async_descriptor_store_wait(0)

    plain = (add_kernel, matmul_kernel, cluster_kernel, scratch_kernel, desc_kernel)
    return {fn.__name__: fn for fn in (*plain, tuple_kernel, tlx_copy)}


def jobs(version: str) -> Iterator[tuple[Any, ...]]:
    """(function, signature, constexprs, divisible by 16, options, compute capability)."""
    if version == "fbtriton":
        yield "tlx_copy", COPY, {"BM": 64, "BN": 64}, (), {"num_warps": 4}, 90
        options = {"num_warps": 4, "ctas_per_cga": (2, 1, 1)}
        yield "add_kernel", FP32, {"BLOCK": 256}, POINTERS, options, 90
        return
    yield "add_kernel", FP32, {"BLOCK": 256}, (*POINTERS, "n"), {"num_warps": 4}, 90
    yield "add_kernel", FP32, {"BLOCK": 256}, POINTERS, {"num_warps": 2}, 80
    if version in PLAIN:
        options = {"num_warps": 4, "num_ctas": 2}
        yield "cluster_kernel", FP32, {"BLOCK": 512}, POINTERS, options, 90
        tile = {"BM": 32, "BN": 32, "BK": 32}
        options = {"num_warps": 4, "num_stages": 3}
        yield "matmul_kernel", MATMUL, tile, MATMUL_DIVISIBLE, options, 90
    if tuple(map(int, version.split("."))) >= (3, 4):
        options = {"num_warps": 4}
        yield "desc_kernel", DESC, WIDE, ("out_ptr",), options, 90
        yield "desc_kernel", DESC, WIDE, (), options, 80
        if version in ("3.6.0", "3.9.0"):
            divisible = ((0, 0), (0, 1), "out")
            yield "tuple_kernel", TUPLES, {"BLOCK": 64, (1, 1, 1): 3}, divisible, options, 90
        if version != "3.5.0":
            yield "scratch_kernel", SCRATCH, TILE, ("x_ptr", "out_ptr", "N"), options, 90


def compile_all(version: str, out: Path) -> None:
    """Compile with the Triton of this process."""
    made = kernels()
    for name, *job, capability in jobs(version):
        with tempfile.TemporaryDirectory() as cache:
            os.environ["TRITON_CACHE_DIR"] = cache
            compile_one(made[name], *job, capability)
            folder = out / version / ("sm80" if capability == 80 else "")
            folder.mkdir(parents=True, exist_ok=True)
            with_ptx = name == "tlx_copy" or (name == "add_kernel" and version in WITH_PTX)
            kept = (*KEPT, ".ptx") if with_ptx else KEPT
            for path in Path(cache).rglob(f"{name}.*"):
                if path.suffix in kept:
                    (folder / path.name).write_bytes(without_paths(path))


def compile_one(
    fn: Any, signature: Any, constexprs: Any, divisible: Any, options: Any, capability: int
) -> None:
    """One kernel, in the words of this version of Triton."""
    import triton

    version = tuple(map(int, triton.__version__.split("+")[0].split(".")[:2]))
    index = fn.arg_names.index
    runtime = {name: kind for name, kind in signature.items() if kind != "constexpr"}
    divisors = [index(name) if isinstance(name, str) else name for name in divisible]
    if version < (3, 0):
        types = {index(name): kind for name, kind in runtime.items()}
        constants = {index(name): value for name, value in constexprs.items()}
        compile_before_3(version, fn, types, constants, divisors, options, capability)
        return
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if version < (3, 2):
        from triton.compiler import AttrsDescriptor

        source = ASTSource(
            fn,
            {index(name): kind for name, kind in runtime.items()},
            constants={index(name): value for name, value in constexprs.items()},
            attrs=AttrsDescriptor(tuple(divisors), ()),
        )
    elif version < (3, 3):
        from triton.backends.compiler import AttrsDescriptor

        properties = {"tt.divisibility": divisors, "tt.equal_to": []}
        attrs = AttrsDescriptor.from_dict({"arg_properties": properties, "cls": "AttrsDescriptor"})
        source = ASTSource(fn, runtime, constants=constexprs, attrs=attrs)
    else:
        paths = [i if isinstance(i, tuple) else (i,) for i in divisors]
        attrs = {path: [["tt.divisibility", 16]] for path in paths}
        source = ASTSource(fn, signature, constexprs=constexprs, attrs=attrs)
    triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def compile_before_3(
    version: Any, fn: Any, types: Any, constants: Any, divisors: Any, options: Any, capability: int
) -> None:
    """With Triton 2.1 to 2.3, whose launcher, made at the end, would need libcuda."""
    import triton
    from triton.compiler import compiler

    compiler.make_stub = lambda *_, **__: ""
    compiler.CompiledKernel = lambda *_: None
    if version < (2, 3):
        kind = triton.compiler.instance_descriptor
        config = kind(divisible_by_16=divisors, equal_to_1=[])
        given = {"signature": types, "constants": constants, "configs": [config], **options}
        triton.compile(fn, cc=capability, **given)
        return
    from triton.compiler.backends import cuda

    cuda.make_stub = compiler.make_stub
    attrs = triton.compiler.AttrsDescriptor(divisible_by_16=divisors, equal_to_1=[])
    source = compiler.ASTSource(fn, types, constants=constants, attrs=attrs)
    triton.compile(source, target=("cuda", capability), options=options)


def without_paths(path: Path) -> bytes:
    """The file, its texts without the paths of the machine that made it."""
    if path.suffix == ".cubin":
        return path.read_bytes()
    text = path.read_text()
    if path.suffix == ".json":
        found = json.loads(text)
        if "extern_libs" in found:
            # (name, path) each, in some versions with a digest after them.
            libs = found["extern_libs"] or []
            found["extern_libs"] = [[Path(str(part)).name for part in lib] for lib in libs]
        return json.dumps(found).encode()
    return re.sub(r'"(/[^"]*/)([^"/]+)"', r'"\2"', text).encode()


def main() -> None:
    """Every version named on the command line."""
    if sys.argv[1] == "--inside":
        compile_all(sys.argv[2], Path(sys.argv[3]))
        return
    for argument in sys.argv[1:]:
        version, _, folder = argument.partition("=")
        environment = {**os.environ, "PYTHONPATH": folder, "TRITON_DISABLE_LINE_INFO": "1"}
        command = [sys.executable, __file__, "--inside", version, str(HERE / "data/triton")]
        subprocess.run(command, check=True, env=environment)
        print(version)


if __name__ == "__main__":
    main()
