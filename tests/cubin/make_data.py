"""Builds tests/cubin/data/. Needs nvcc 13.0, NVRTC 12.9 and Triton; run by hand and committed.

    pip install nvidia-cuda-nvrtc-cu12==12.9.86 triton && python tests/cubin/make_data.py

What comes from CUDA 11.7 to 12.4 is made with the compilers in NVIDIA's wheels, fetched by pip;
`make_data.py early` makes that alone.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
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
    "genuine_sm80": ("genuine.cu", "80", []),
    "genuine_sm90": ("genuine.cu", "90", []),
    "tiny_sm120": ("tiny.cu", "120", []),
}
NVRTC_IMAGES = {
    f"{source}_sm{arch}{mode.replace('-', '_')}": (f"{source}.cu", arch, [mode] if mode else [])
    for source, arch, mode in (
        ("features", "80", ""), ("features", "90", ""), ("features", "90a", ""), ("tiny", "80", ""),
        ("tiny", "89", ""), ("tiny", "90", ""), ("tiny", "90", "-lineinfo"),
    )
}  # fmt: skip
# (source, arch, flag) by toolkit and compiler: its NVRTC, or its ptxas and the PTX of PTX_FROM.
EARLY_IMAGES = {
    ("11.7.99", "nvrtc"): [("features", "80", ""), ("tiny", "75", ""), ("tiny", "70", "-lineinfo")],
    ("11.8.89", "nvrtc"): [("features", "90", ""), ("tiny", "86", "-G"), ("tiny", "90", "-G")],
    ("11.8.89", "ptxas"): [("tiny", "90", "-lineinfo"), ("pointers", "90", "")],
    ("12.0.76", "ptxas"): [("tiny", "90", ""), ("pointers", "80", "")],
    ("12.1.105", "nvrtc"): [("features", "90a", ""), ("huge", "90", "")],
    ("12.4.127", "nvrtc"): [("pointers", "80", ""), ("pointers", "90", "")],
}  # fmt: skip
PTX_FROM = "11.8.89"


def main() -> None:
    """Write every image, the two generations side by side."""
    early()
    if sys.argv[1:] == ["early"]:
        return
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
        for mode in ("speed", "size"):  # LZ4 of PTX alone, zstd of all
            flags = ["-compress-mode", mode, *gencode]
            run("nvcc", "-fatbin", *flags, "tiny.cu", "-o", str(DATA / f"{mode}.fatbin"))
        run("nvcc", "-ptx", "-arch=compute_90", "tiny.cu", "-o", str(DATA / "tiny_sm90.ptx"))
    nvrtc = installed_nvrtc()
    for name, (source, arch, flags) in NVRTC_IMAGES.items():
        text = (DATA / source).read_text()
        (DATA / f"nvrtc_{name}.cubin").write_bytes(nvrtc_compile(text, f"sm_{arch}", flags, nvrtc))
    triton_compile()


def early() -> None:
    """Images of the toolkits before 12.8, one name a toolkit: cuda118_tiny_sm90.cubin."""
    with tempfile.TemporaryDirectory() as temporary:
        build = Path(temporary)
        for (version, compiler), images in EARLY_IMAGES.items():
            major, minor, _ = version.split(".")
            package = "nvidia-cuda-nvrtc" if compiler == "nvrtc" else "nvidia-cuda-nvcc"
            tools = fetch(f"{package}-cu{major}=={version}", build)
            for source, arch, flag in images:
                mode = flag.replace("-", "_").replace("_G", "_debug")
                name = f"cuda{major}{minor}_{source}_sm{arch}{mode}.cubin"
                text = (DATA / f"{source}.cu").read_text()
                flags = [flag] if flag else []
                if compiler == "nvrtc":
                    library = next(tools.rglob("libnvrtc.so.*"))
                    image = nvrtc_compile(text, f"sm_{arch}", flags, library)
                else:
                    library = next(
                        fetch(f"nvidia-cuda-nvrtc-cu11=={PTX_FROM}", build).rglob("libnvrtc.so.*")
                    )
                    ptx = build / "k.ptx"
                    made = nvrtc_compile(text, f"compute_{arch}", flags, library, "PTX")
                    ptx.write_bytes(made.rstrip(b"\0"))
                    output = build / "out.cubin"
                    ptxas = next(tools.rglob("ptxas"))
                    ptxas.chmod(0o755)
                    run(str(ptxas), f"-arch=sm_{arch}", *flags, str(ptx), "-o", str(output))
                    image = output.read_bytes()
                    if (version, source, flag) == (PTX_FROM, "pointers", ""):
                        (DATA / "cuda118_pointers_sm90.ptx").write_bytes(ptx.read_bytes())
                (DATA / name).write_bytes(image)


def fetch(requirement: str, folder: Path) -> Path:
    """A wheel of the package index, unpacked, not installed."""
    target = folder / requirement
    if not target.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder)]
        run(*command, requirement)
        name, _, version = requirement.partition("==")
        wheel = next(folder.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    return target


def run(*command: str) -> None:
    """Run a compiler; its own words say what went wrong."""
    subprocess.run(command, check=True)


def installed_nvrtc() -> Path:
    """NVRTC 12.9 as pip installed it."""
    spec = importlib.util.find_spec("nvidia.cuda_nvrtc")
    assert spec and spec.submodule_search_locations, "pip install nvidia-cuda-nvrtc-cu12==12.9.86"
    folder = next(iter(spec.submodule_search_locations))
    return next(Path(folder).rglob("libnvrtc.so.*"))


def nvrtc_compile(
    source: str, arch: str, flags: list[str], path: Path, kind: str = "CUBIN"
) -> bytes:
    """One source through the NVRTC at `path` to an ABI-7 cubin, or to PTX."""
    for builtins in path.parent.glob("libnvrtc-builtins.so*"):  # it would look for them elsewhere
        ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(path))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"k.cu", 0, None, None)
    options = [option.encode() for option in (f"-arch={arch}", "-std=c++17", *flags)]
    array = (ctypes.c_char_p * len(options))(*options)
    if library.nvrtcCompileProgram(program, len(options), array):
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, log)
        raise SystemExit(log.value.decode())
    getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    getattr(library, f"nvrtcGet{kind}")(program, image)
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
