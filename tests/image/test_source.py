"""Kernel.from_source with the real compiler, which needs no GPU, on the stand-in driver."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from fakecuda import FakeCuda

from kernel_hub import DeviceArray, Kernel, cache_folder
from kernel_hub.compilers import nvrtc
from kernel_hub.errors import (
    CompileError,
    CubinNotFoundError,
    DriverNotFoundError,
    FunctionNotFoundError,
    ParamsError,
)

core = pytest.importorskip("cuda.core", reason="the extra `jit` (cuda-core) is not installed")
ROOT = Path(__file__).resolve().parents[2]
SOURCE = """
struct Pair { float a; int b; };
template <typename T, int kCount = 2>
__global__ void scale(T* out, const T* __restrict__ x, float factor, T shift, unsigned n, Pair p) {
    int unused;
    if (threadIdx.x < n) out[threadIdx.x] = x[threadIdx.x] * T(factor) + shift + T(kCount + p.b);
}
namespace ns { __global__ void nested(long long* x, double d) { *x = d; } }
extern "C" __global__ void plain(float* x, int n) { x[0] = n; }
#ifdef WIDE
extern "C" __global__ void either(float* x, double scale) { x[0] = scale; }
#else
extern "C" __global__ void either(float* x, int scale) { x[0] = scale; }
#endif
#define REAL float
extern "C" __global__ void macro(REAL* x, REAL scale, int number) { x[0] = scale; }
"""
NAMES = ["scale<float>", "scale<int, 7>", "ns::nested", "plain"]


@pytest.fixture(autouse=True)
def folder(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """An empty cache folder a test."""
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv(cache_folder.VARIABLE, str(path))
    forget = nvrtc.cuda_headers.cache_clear
    forget()
    yield path
    forget()


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by the architecture of each run of the compiler."""
    runs: list[str] = []
    compile_source = nvrtc.compile_source

    def counted(code: str, name: str, options: list[str], names: list[str]) -> nvrtc.CompiledUnit:
        runs.append(options[0])
        return compile_source(code, name, options, names)

    monkeypatch.setattr(nvrtc, "compile_source", counted)
    return runs


def test_templates_have_names_and_types() -> None:
    kernel = Kernel.from_source(SOURCE, NAMES, arch="sm90")
    assert kernel.function_names == NAMES
    assert [kernel[name].signature for name in NAMES] == [
        "scale<float>(float* out, float* x, float factor, float shift, uint32_t n, Pair p)",
        "scale<int, 7>(int* out, int* x, float factor, int shift, uint32_t n, Pair p)",
        "ns::nested(int64_t* x, double d)",
        "plain(float* x, int n)",
    ]
    assert kernel.plain is kernel["plain"]
    assert "unused" in kernel.compiler_log
    with pytest.raises(FunctionNotFoundError, match="scale<float>"):
        kernel["scale<double>"]


def test_without_names_every_kernel_is_offered() -> None:
    kernel = Kernel.from_source(SOURCE, arch=(8, 0))
    assert sorted(kernel) == ["either", "macro", "ns::nested", "plain"]
    assert kernel["ns::nested"].signature == "ns::nested(int64_t* x, double d)"
    only_template = SOURCE.partition("namespace")[0]
    with pytest.raises(CompileError, match=r"function_names=\['scale<float>'\]"):
        Kernel.from_source(only_template, arch="sm80")


def test_types_that_the_source_leaves_open_stay_open() -> None:
    kernel = Kernel.from_source(SOURCE, arch="sm90")
    assert kernel.either.signature == "either(<8 bytes> arg0, <4 bytes> arg1)"
    assert kernel.macro.signature == "macro(REAL* x, float scale, int number)", "PTX tells floats"
    declared = Kernel.from_source(
        SOURCE, ["either", "scale<float>"], arch="sm90", options="-DWIDE",
        signatures={"either": "float* x, double scale"},
    )  # fmt: skip
    assert declared.either.signature == "either(float* x, double scale)"
    wide = Kernel.from_source(SOURCE, "either", arch="sm90", options=["-DWIDE"])  # type: ignore[arg-type]
    assert wide.either.signature == "either(<8 bytes> arg0, double arg1)"
    # What PTX contradicts is dropped: `float` is a macro for int here.
    lying = '#define float int\nextern "C" __global__ void f(float x, void* p) {}'
    assert Kernel.from_source(lying, arch="sm90").f.signature == "f(<4 bytes> arg0, <8 bytes> arg1)"


def test_launch_on_the_gpu_at_hand(fakecuda: FakeCuda, compilations: list[str]) -> None:
    kernel = Kernel.from_source(SOURCE, NAMES)
    assert compilations == ["-arch=sm_90a"]
    out, x = (DeviceArray.zeros(64, "fp32") for _ in range(2))
    kernel["scale<float>"](1, 64, 0, None, [out, x, 0.5, 2.0, 64, struct.pack("<fi", 1.5, 3)])
    launch = fakecuda.launch()
    assert launch.name.startswith("_Z5scaleIfLi2EE")
    assert launch.params == (
        *(array.ptr.to_bytes(8, "little") for array in (out, x)),
        *(np.float32(value).tobytes() for value in (0.5, 2.0)),
        (64).to_bytes(4, "little"),
        struct.pack("<fi", 1.5, 3),
    )
    with pytest.raises(ParamsError, match="int32"):
        kernel["scale<int, 7>"](1, 64, 0, None, [out, x, 0.5, 2, 64, bytes(8)])


def test_another_gpu_of_another_architecture_is_compiled_for(
    make_fakecuda: Callable[..., FakeCuda], compilations: list[str]
) -> None:
    fake = make_fakecuda(devices=2)
    fake.set_capability(1, 8, 9)
    kernel = Kernel.from_source(SOURCE, ["plain"])
    kernel.load(1)
    assert compilations == ["-arch=sm_90a", "-arch=sm_89"]
    fixed = Kernel.from_source(SOURCE, ["plain"], arch="sm90")
    fixed.load(0)
    with pytest.raises(CubinNotFoundError, match="sm_90"):
        fixed.load(1)
    assert Kernel.from_source(SOURCE, ["plain"], device=1).plain.spec.arch == "sm89"


def test_without_a_gpu_the_architecture_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernel_hub import driver

    monkeypatch.setenv(driver.LIBRARY_VARIABLE, "/nowhere/libcuda.so.1")
    monkeypatch.setattr(driver.library, "_driver", None)
    with pytest.raises(DriverNotFoundError, match="arch='sm90'"):
        Kernel.from_source(SOURCE, NAMES)


@pytest.mark.parametrize(
    ("code", "names", "arch", "message", "log"),
    [
        ("__global__ void f() { nope(); }", ["f"], "sm90", "source.cu", "source.cu(1): error"),
        ("__global__ void f() {}", ["g"], "sm90", "functions g", '"g" is undefined'),
        ("template <class T> __global__ void f() {}", ["f"], "sm90", "f", "cannot determine"),
        ("", [], "sm19", "it compiles for sm75, sm80", "invalid value for --gpu-arch"),
        ("#include <no/such.h>", [], "sm90", "source.cu", "no/such.h"),
    ],
)
def test_the_error_has_the_compilers_log(
    code: str, names: list[str], arch: str, message: str, log: str
) -> None:
    with pytest.raises(CompileError) as caught:
        Kernel.from_source(code, names, arch=arch)
    first, _, rest = str(caught.value).partition("\n")
    assert message in first
    assert log in rest
    assert log in caught.value.log
    assert caught.value.__cause__ is not None


def test_where_cudas_headers_would_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "cuda_headers", lambda: ())
    with pytest.raises(CompileError, match=r"pip install nvidia-cuda-runtime\n.*cuda_fp16\.h"):
        Kernel.from_source("#include <cuda_fp16.h>", arch="sm90")


def test_options_go_to_the_compiler_as_they_are() -> None:
    code = 'extern "C" __global__ void f(int* x) { *x = VALUE; auto [a, b] = two(); }'
    options = ["-std=c++20", "-DVALUE=3", "--pre-include=two.h", f"-I{ROOT}"]
    with pytest.raises(CompileError, match=r"two\.h"):
        Kernel.from_source(code, arch="sm90", options=options)
    with pytest.raises(CompileError, match="unrecognized option -bogus"):
        Kernel.from_source(code, arch="sm90", options=["-bogus"])


def test_a_file_and_its_includes(tmp_path: Path, compilations: list[str]) -> None:
    (tmp_path / "lib").mkdir()
    header, source = tmp_path / "lib" / "value.h", tmp_path / "kernel.cu"
    header.write_text("#define VALUE 1\n")
    (tmp_path / "near.h").write_text("#include <value.h>\n")
    source.write_text('#include "near.h"\nextern "C" __global__ void f(int* x) { *x = VALUE; }\n')

    def image() -> bytes:
        kernel = Kernel.from_source(source, arch="sm90", options=[f"-I{tmp_path}/lib"])
        return kernel._image.choose((9, 0)).read()

    first = image()
    assert image() == first
    assert len(compilations) == 1
    header.write_text("#define VALUE 77\n")
    assert image() != first, "a changed header is compiled anew"
    assert len(compilations) == 2
    header.write_text("#define VALUE nonsense\n")
    with pytest.raises(CompileError, match=r"value\.h\(1\)|kernel\.cu\(2\)"):
        image()


def test_a_toolkits_headers_are_not_followed(tmp_path: Path, compilations: list[str]) -> None:
    (tmp_path / "cuda_runtime_api.h").write_text("#include MACRO\n")
    header = tmp_path / "cuda_own.h"
    code = '#include <cuda_own.h>\nextern "C" __global__ void f(int* x) { *x = N; }'
    for text, runs in (("#define N 1\n", 1), (None, 1), ("#define N 100\n", 2)):
        if text:
            header.write_text(text)
        Kernel.from_source(code, arch="sm90", options=["-I", str(tmp_path)])
        assert len(compilations) == runs


def test_cuda_headers_are_found() -> None:
    code = """
        #include <cuda_fp16.h>
        #include <cuda_bf16.h>
        template <typename T> __global__ void f(T* x, T y) { *x = y; }
    """
    if not nvrtc.cuda_headers():
        pytest.skip("this NVRTC brings no headers, and no CUDA toolkit is installed")
    kernel = Kernel.from_source(code, ["f<__half>", "f<__nv_bfloat16>"], arch="sm90")
    assert kernel["f<__half>"].signature == "f<__half>(__half* x, __half y)"
    assert kernel["f<__nv_bfloat16>"].params[1].info.dtype == "bf16"  # type: ignore[index]


def test_the_second_time_comes_from_the_cache(folder: Path, compilations: list[str]) -> None:
    first = Kernel.from_source(SOURCE, NAMES, arch="sm90")
    again = Kernel.from_source(SOURCE, NAMES, arch="sm90")
    assert repr(again) == repr(first)
    assert again.compiler_log == first.compiler_log != ""
    assert len(compilations) == len(list((folder / "source").iterdir())) == 1
    for other in (
        {"arch": "sm_90a"}, {"options": ["-DN=1"]}, {"function_names": NAMES[:1]},
        {"code": SOURCE + " "}, {"function_names": None},
    ):  # fmt: skip
        Kernel.from_source(**{"code": SOURCE, "function_names": NAMES, "arch": "sm90", **other})  # type: ignore[arg-type]
    assert len(compilations) == 6
    Kernel.from_source(SOURCE, NAMES, arch="sm90", cache=False)
    assert len(compilations) == 7


def test_a_damaged_entry_is_compiled_anew(folder: Path, compilations: list[str]) -> None:
    Kernel.from_source(SOURCE, NAMES, arch="sm90")
    (entry,) = (folder / "source").iterdir()
    entry.write_bytes(entry.read_bytes()[:-100])
    with pytest.warns(RuntimeWarning, match="damaged"):
        kernel = Kernel.from_source(SOURCE, NAMES, arch="sm90")
    assert len(compilations) == 2
    assert kernel.function_names == NAMES
    Kernel.from_source(SOURCE, NAMES, arch="sm90")
    assert len(compilations) == 2


def test_a_hit_does_not_load_cuda_core(folder: Path) -> None:
    Kernel.from_source(SOURCE, ["plain"], arch="sm90")
    code = (
        f"import sys; from kernel_hub import Kernel; k = Kernel.from_source({SOURCE!r}, ['plain'], "
        "arch='sm90'); print(k.plain.signature, 'cuda.core' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "plain(float* x, int n) False\n", done.stderr


def test_object_code_of_cuda_core(fakecuda: FakeCuda, tmp_path: Path) -> None:
    program = core.Program(SOURCE, "c++", core.ProgramOptions(arch="sm_90"))
    made = program.compile("cubin", name_expressions=["scale<float>", "plain"])
    kernel = Kernel(made, signatures={"plain": "float* x, int n"})
    assert sorted(kernel) == ["_ZN2ns6nestedEPxd", "either", "macro", "plain", "scale<float>"]
    x = DeviceArray.zeros(4, "fp32")
    kernel.plain(1, 1, 0, None, [x, 5])
    assert fakecuda.launch().params == (x.ptr.to_bytes(8, "little"), (5).to_bytes(4, "little"))
    assert Kernel(made, ["scale<float>"]).function_names == ["scale<float>"]

    path = tmp_path / "made.cubin"
    path.write_bytes(made.code)
    assert "plain" in Kernel(core.ObjectCode.from_cubin(str(path)))
    assert "plain" in Kernel(core.ObjectCode.from_cubin(bytes(made.code)))
    ptx = b".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry f()\n{\n ret;\n}\n"
    assert Kernel(core.ObjectCode.from_ptx(ptx)).function_names == ["f"]
    with pytest.raises(ParamsError, match="'ltoir'"):
        Kernel(core.ObjectCode.from_ltoir(b"anything"))
