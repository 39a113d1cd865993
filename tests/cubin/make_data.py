"""Builds tests/cubin/data/. Needs nvcc 13.0, NVRTC 12.9 and Triton; run by hand and committed.

pip install nvidia-cuda-nvrtc-cu12==12.9.86 triton && python tests/cubin/make_data.py
"""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

DATA = Path(__file__).parent / "data"
NVCC_IMAGES = {
    "features_sm80": ("features.cu", "80", []),
    "features_sm89": ("features.cu", "89", []),
    "features_sm90": ("features.cu", "90", []),
    "features_sm90a": ("features.cu", "90a", []),
    "cooperative_sm80": ("cooperative.cu", "80", []),
    "cooperative_sm90": ("cooperative.cu", "90", []),
    "tiny_sm80": ("tiny.cu", "80", []),
    "tiny_sm90": ("tiny.cu", "90", []),
    "tiny_sm90_lineinfo": ("tiny.cu", "90", ["-lineinfo"]),
    "tiny_sm90_debug": ("tiny.cu", "90", ["-G"]),
    "huge_sm80": ("huge.cu", "80", []),
    "huge_sm90": ("huge.cu", "90", []),
    "tiny_sm120": ("tiny.cu", "120", []),
}
NVRTC_IMAGES = {
    f"{source}_sm{arch}{mode.replace('-', '_')}": (f"{source}.cu", arch, [mode] if mode else [])
    for source, arch, mode in (
        ("features", "80", ""), ("features", "90", ""), ("features", "90a", ""), ("tiny", "80", ""),
        ("tiny", "89", ""), ("tiny", "90", ""), ("tiny", "90", "-lineinfo"),
    )
}  # fmt: skip


def main() -> None:
    """Write every image, the two generations side by side."""
    with tempfile.TemporaryDirectory() as temporary:
        build = Path(temporary)
        for source in DATA.glob("*.cu"):
            shutil.copy(source, build)
        os.chdir(build)
        for name, (source, arch, flags) in NVCC_IMAGES.items():
            target = f"arch=compute_{arch},code=sm_{arch}"
            includes = ["-include", "cstdio"] if source == "features.cu" else []
            run(
                "nvcc",
                "-cubin",
                "-O3",
                "-std=c++17",
                *includes,
                *flags,
                "-gencode",
                target,
                source,
                "-o",
                "out.cubin",
            )
            shutil.copy("out.cubin", DATA / f"{name}.cubin")
        for part in "ab":
            run("nvcc", "-rdc=true", "-arch=sm_90", "-c", f"linked_{part}.cu", "-o", f"{part}.o")
        run("nvcc", "-dlink", "-cubin", "-arch=sm_90", "a.o", "b.o", "-o", "out.cubin")
        shutil.copy("out.cubin", DATA / "linked_sm90.cubin")
        targets = [("80", "sm_80"), ("90a", "sm_90a"), ("90", "compute_90")]
        gencode = [f"-gencode=arch=compute_{arch},code={code}" for arch, code in targets]
        run(
            "nvcc", "-fatbin", "-no-compress", *gencode, "tiny.cu", "-o", str(DATA / "plain.fatbin")
        )
        run("nvcc", "-fatbin", *gencode, "tiny.cu", "-o", str(DATA / "compressed.fatbin"))
        run("nvcc", "-ptx", "-arch=compute_90", "tiny.cu", "-o", str(DATA / "tiny_sm90.ptx"))
    for name, (source, arch, flags) in NVRTC_IMAGES.items():
        text = (DATA / source).read_text()
        (DATA / f"nvrtc_{name}.cubin").write_bytes(nvrtc_compile(text, arch, flags))
    triton_compile()


def run(*command: str) -> None:
    """Run a compiler; its own words say what went wrong."""
    subprocess.run(command, check=True)


def nvrtc_compile(source: str, arch: str, flags: list[str]) -> bytes:
    """One source through NVRTC 12.9 to an ABI-7 cubin."""
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    assert spec and spec.submodule_search_locations, "pip install nvidia-cuda-nvrtc-cu12==12.9.86"
    folder = next(iter(spec.submodule_search_locations))
    library = ctypes.CDLL(glob.glob(os.path.join(folder, "lib", "libnvrtc.so.*"))[0])
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"k.cu", 0, None, None)
    options = [option.encode() for option in (f"-arch=sm_{arch}", "-std=c++17", *flags)]
    array = (ctypes.c_char_p * len(options))(*options)
    if library.nvrtcCompileProgram(program, len(options), array):
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        raise SystemExit(log.value.decode())
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, image)
    return image.raw


def triton_compile() -> None:
    """One Triton kernel for sm_80 (by its ptxas 12.9: ABI 7) and sm_90a (by a newer one: ABI 8)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton_kernel import add_kernel

    signature = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    for capability in (80, 90):
        source = ASTSource(add_kernel, signature, constexprs={"BLOCK": 1024})
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
        (DATA / f"triton_sm{capability}.cubin").write_bytes(compiled.asm["cubin"])
        if capability == 90:
            (DATA / "triton_sm90.ptx").write_text(compiled.asm["ptx"])


if __name__ == "__main__":
    main()
