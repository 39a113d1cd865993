"""The builder: prototypes, what it refuses, incremental and reproducible builds with real nvcc."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from built_tree import NVCC, PLAIN_HEADER, Tree, needs_nvcc

from kernel_hub.compilers import nvcc
from kernel_hub.compilers.nvcc import built_for, find_nvcc, make_jobs
from kernel_hub.errors import KernelHubError

ROOT = Path(__file__).resolve().parent.parent

COPY = """
#include "copy.cuh"
#define EXPORT_COPY(T, name)                                                        \\
    extern "C" __global__ __launch_bounds__(256) void copy_##name(                  \\
        T* __restrict__ out, const T* __restrict__ x, int64_t stride, int n,        \\
        float scale, T bias, const __grid_constant__ CUtensorMap map, Index index) { \\
        copy(out, x + stride, n, scale, bias, &map, index);                         \\
    }
EXPORT_COPY(bf16, bf16)
EXPORT_COPY(float, fp32)
"""
HEADER = """
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <stdint.h>
using bf16 = __nv_bfloat16;
typedef unsigned int Word;
typedef Word Index;
template <typename T>
__device__ __forceinline__ void copy(
    T* out, const T* x, int n, float scale, T bias, const void* map, Index index) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = T(float(x[i + index]) * scale) + bias + T(*(const int*)map);
}
"""
SPILLING = """
extern "C" __global__ void spill(float* x, int n) {
    float a[64];
    for (int i = 0; i < 64; i++) a[i] = x[i];
    for (int i = 0; i < n; i++) a[(i * n) % 64] += a[i % 64];
    for (int i = 0; i < 64; i++) x[i] = a[i];
}
"""


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def copy_tree(tree: Tree) -> Tree:
    return tree.with_copy()


# Jobs and their digests: no compiler needed


def test_an_arch_suffix_names_the_only_arch_and_its_specific_target(tree: Tree) -> None:
    plain = make_jobs(tree.write("a.cu", ""), ["sm80", "sm90"], "13.0.88")
    assert [(job.target, job.file) for job in plain] == [
        ("sm_80", "sm80/a.cubin"),
        ("sm_90", "sm90/a.cubin"),
    ]
    (special,) = make_jobs(tree.write("a_sm90.cu", ""), ["sm90"], "13.0.88")
    assert special.target == "sm_90a"
    assert "-gencode=arch=compute_90a,code=sm_90a" in special.flags


def test_the_source_digest_covers_what_decides_the_bytes(tree: Tree) -> None:
    tree.write("include/outer.cuh", '#include "inner.cuh"\n')
    tree.write("include/inner.cuh", "int x;\n")
    source = tree.write("a.cu", '#include <outer.cuh>\n#include <stdint.h>\n#include "a.cu"\n')

    def digest(toolkit: str = "13.0.88") -> str:
        return make_jobs(source, ["sm80"], toolkit)[0].source_sha256

    digests = [digest(), digest("13.0.89")]
    tree.write("include/unrelated.cuh", "")
    assert digest() == digests[0]
    tree.write("include/inner.cuh", "int y;\n")
    digests.append(digest())
    source.write_text(source.read_text() + "// kernel_hub: flags: -maxrregcount=64\n")
    digests.append(digest())
    assert len(set(digests)) == len(digests)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("flags: -lineinfo", "-lineinfo"),
        ("flags: -Xptxas -O3,-v", "-v"),
        ("flags:", "not understood"),
        ("allow-local-memory:", "not understood"),
        ("allow_local_memory: typo", "not understood"),
        ("not-for: sm89", "not understood"),
        ("not-for: sm89:", "not understood"),
        ("not-for: Ada: as it says", "not understood"),
    ],
)
def test_directives_are_checked(tree: Tree, line: str, said: str) -> None:
    source = tree.write("a.cu", f"// kernel_hub: {line}\n")
    with pytest.raises(KernelHubError, match=said):
        make_jobs(source, ["sm80"], "13.0.88")


def test_a_source_leaves_an_arch_to_the_code_of_an_older_one(tree: Tree) -> None:
    archs = ["sm80", "sm89", "sm90"]
    source = tree.write("a.cu", "// kernel_hub: not-for: sm89: as it says\n")
    assert built_for(source, archs) == ["sm80", "sm90"]
    assert built_for(tree.write("b.cu", ""), archs) == archs
    assert built_for(tree.write("c_sm90.cu", ""), archs) == ["sm90"]


def test_without_nvcc_the_message_has_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NVCC", raising=False)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(nvcc.os, "access", lambda path, mode: False)
    with pytest.raises(KernelHubError, match=r'pip install "cuda-toolkit\[nvcc,nvvm,'):
        find_nvcc()


def test_nvcc_is_taken_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = tmp_path / "nvcc"
    fake.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("NVCC", str(fake))
    assert find_nvcc() == nvcc.Nvcc(str(fake), "12.8.93")
    assert find_nvcc().minimum_driver == 12000
    for bad in ("/nowhere/nvcc", sys.executable):
        monkeypatch.setenv("NVCC", bad)
        with pytest.raises(KernelHubError, match=bad):
            find_nvcc()


@pytest.mark.parametrize(
    ("args", "said"),
    [(["--arch", "hopper"], "sm80"), (["--jobs", "0"], "--jobs"), (["--nonsense"], "--nonsense")],
)
def test_bad_arguments(
    copy_tree: Tree, capsys: pytest.CaptureFixture[str], args: list[str], said: str
) -> None:
    with pytest.raises(SystemExit):
        copy_tree.build(*args)
    assert said in capsys.readouterr().err


@needs_nvcc
def test_build_records_what_source_and_cubin_say(tree: Tree) -> None:
    tree.write("copy.cu", COPY)
    tree.write("include/copy.cuh", HEADER)
    assert tree.build("--arch", "sm80,sm90") == 0
    entry = tree.entry("copy", "sm90")
    assert (entry.target, entry.toolkit, entry.source) == ("sm_90", NVCC.version, "csrc/copy.cu")
    assert entry.minimum_driver == NVCC.minimum_driver
    assert set(entry.functions) == {"copy_bf16", "copy_fp32"}
    function = entry.functions["copy_bf16"]
    assert (function.max_threads, function.local_bytes, function.cluster) == (256, 0, None)
    assert function.num_regs > 0
    assert [(p.name, p.type, p.size_bytes, p.offset_bytes) for p in function.params] == [
        ("out", "__nv_bfloat16*", 8, 0),
        ("x", "__nv_bfloat16*", 8, 8),
        ("stride", "int64_t", 8, 16),
        ("n", "int", 4, 24),
        ("scale", "float", 4, 28),
        ("bias", "__nv_bfloat16", 2, 32),
        ("map", "CUtensorMap", 128, 112),  # 128-byte aligned in the constant bank, not here
        ("index", "uint32_t", 4, 240),
    ]
    image = (tree.out / entry.file).read_bytes()
    assert (len(image), hashlib.sha256(image).hexdigest()) == (entry.size_bytes, entry.sha256)


@pytest.mark.slow
@needs_nvcc
def test_incremental(copy_tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    copy_tree.write("other.cu", 'extern "C" __global__ void other(int* out) { *out = 1; }\n')
    archs = ("--arch", "sm80")
    assert copy_tree.build(*archs) == 0
    before = copy_tree.digests()
    capsys.readouterr()

    def built() -> list[str]:
        assert copy_tree.build(*archs) == 0
        printed = capsys.readouterr().out
        return sorted(re.findall(r"\] sm80 (\w+): ", printed))

    assert built() == []
    copy_tree.write("include/copy.cuh", PLAIN_HEADER + "// changed\n")
    assert built() == ["copy"]
    (copy_tree.out / "sm80/other.cubin").write_bytes(b"damaged")
    assert built() == ["other"]
    (copy_tree.out / "manifest.json").write_text("damaged")
    assert built() == ["copy", "other"]
    copy_tree.write("include/copy.cuh", PLAIN_HEADER)
    built()
    assert copy_tree.digests() == before


@pytest.mark.slow
@needs_nvcc
def test_stale_cubins_go_and_other_archs_stay(copy_tree: Tree) -> None:
    gone = copy_tree.write("gone.cu", 'extern "C" __global__ void gone() {}\n')
    assert copy_tree.build("--arch", "sm80,sm90") == 0
    gone.unlink()
    (copy_tree.out / "sm89").mkdir()
    (copy_tree.out / "sm89/stray.cubin").write_bytes(b"")
    assert copy_tree.build("--arch", "sm80") == 0
    assert set(copy_tree.digests()) == {"manifest.json", "sm80/copy.cubin", "sm90/copy.cubin"}
    assert list(copy_tree.manifest().cubins) == ["copy"]


@needs_nvcc
def test_only(copy_tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    copy_tree.write("other.cu", "this does not compile\n")
    assert copy_tree.build("--arch", "sm80", "--only", "copy") == 0
    assert copy_tree.build("--only", "cpoy") == 1
    assert "copy" in capsys.readouterr().err


REFUSED = {
    "local memory": (SPILLING, ".cu", "spill \\("),
    "a survivor": (
        "static __device__ __noinline__ float f(float x) { return sinf(x); }\n"
        'extern "C" __global__ void k(float* x) { x[0] = f(x[1]); }\n',
        ".cu",
        "_INTERNAL_",
    ),
    "mangled": ("__global__ void k(float* x) { x[0] = 1; }\n", ".cu", 'lacks extern "C"'),
    "no kernel": ("__device__ int x;\n", ".cu", "exports no kernel"),
    "does not compile": ("int x = nothing;\n", ".cu", "nvcc failed(.|\n)*-cubin(.|\n)*nothing"),
    "template type": (
        "template <typename T> struct Box { T x; };\n"
        'extern "C" __global__ void k(int* out, Box<int> box) { *out = box.x; }\n',
        ".cu",
        "k: parameter 1 `Box<int> box`",
    ),
    "hidden include": (
        '#define WHERE "hidden.cuh"\n#include WHERE\n'
        'extern "C" __global__ void k(float* x) { x[0] = 1; }\n',
        ".cu",
        "hidden.cuh in a way",
    ),
    "serialised wgmma": (
        "#include <stdint.h>\n"
        "__device__ __forceinline__ void wgmma(float* d, uint64_t a) {\n"
        '    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 "\n'
        '                 "{%0, %1, %2, %3}, %4, %4, 1, 1, 1, 0, 0;"\n'
        '                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a));\n'
        "}\n"
        'extern "C" __global__ void k(float* x, uint64_t a, int n) {\n'
        "    float d[4] = {0, 0, 0, 0};\n"
        '    asm volatile("wgmma.fence.sync.aligned;");\n'
        "    for (int i = 0; i < n; i++) {\n        wgmma(d, a + i);\n        d[0] += 1;\n"
        "        wgmma(d, a - i);\n    }\n"
        '    asm volatile("wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;");\n'
        "    for (int i = 0; i < 4; i++) x[i] = d[i];\n}\n",
        "_sm90.cu",
        "serialised wgmma",
    ),
    "setmaxnreg ignored": (  # without launch bounds
        'extern "C" __global__ void k(int* x) {\n'
        '    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");\n    x[0] = 1;\n}\n',
        "_sm90.cu",
        "C7508",
    ),
}


@needs_nvcc
def test_refused(tree: Tree, capsys: pytest.CaptureFixture[str]) -> None:
    """All at once, and one failure does not stop the others."""
    tree.write("include/hidden.cuh", "")
    for i, (text, suffix, _) in enumerate(REFUSED.values()):
        tree.write(f"refused{i}{suffix}", text)
    tree.write("good.cu", 'extern "C" __global__ void good(float* x) { x[0] = 1; }\n')
    assert tree.build("--arch", "sm90") == 1
    printed = capsys.readouterr()
    blocks = re.split(r"^(?=error: )", printed.err, flags=re.MULTILINE)
    for i, (_, _, said) in enumerate(REFUSED.values()):
        own = [block for block in blocks if f"refused{i}" in block.split("\n")[0]]
        assert any(re.search(said, block) for block in own), (said, printed.err)
    assert f"{len(REFUSED)} FAILED" in printed.out and list(tree.manifest().cubins) == ["good"]


@needs_nvcc
def test_local_memory_with_a_reason(tree: Tree) -> None:
    tree.write("a.cu", "// kernel_hub: allow-local-memory: the index is data\n" + SPILLING)
    assert tree.build("--arch", "sm80") == 0
    assert tree.entry("a", "sm80").functions["spill"].local_bytes >= 256


@needs_nvcc
def test_flags_of_the_source_and_none_of_the_environment(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-lineinfo")
    tree.write(
        "a.cu", '// kernel_hub: flags: -DX=7\nextern "C" __global__ void k(int* x) { *x = X; }'
    )
    assert tree.build("--arch", "sm80") == 0
    assert "-DX=7" in tree.entry("a", "sm80").flags
    assert b"lineinfo" not in (tree.out / "sm80/a.cubin").read_bytes()


@needs_nvcc
def test_the_script_in_a_plain_checkout(copy_tree: Tree) -> None:
    """No site-packages at all (-S -I would hide PYTHONPATH too), and under a second when idle."""
    command = [str(ROOT / "build_cubins.sh"), "--csrc", str(copy_tree.csrc), "--arch", "sm80"]
    command += ["--out", str(copy_tree.out)]
    env = {**os.environ, "PYTHON": sys.executable, "PYTHONNOUSERSITE": "1"}
    subprocess.run(command, check=True, capture_output=True, env=env)
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
        seconds.append(time.perf_counter() - started)
        assert "0 built, 1 unchanged" in done.stdout
    assert min(seconds) < 1
