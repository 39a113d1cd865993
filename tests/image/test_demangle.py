"""C++ kernels by the name that their source gives them, and by the one in the image."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from fakecuda import FakeCuda

from kernel_hub import Kernel
from kernel_hub.errors import FunctionNotFoundError, ParamsError
from kernel_hub.image import demangle

ROOT = Path(__file__).parents[2]
CUBIN, PTX = (ROOT / f"tests/data/cxx_names.{kind}" for kind in ("cubin", "ptx"))
DEQUANTIZE = "_Z20kDequantizeBlockwiseIfLi512ELi64ELi8ELi2EEvPfPhS0_PT_ii"
SCALE = "_ZN2ns5scaleIhLj4ELb1EL4Kind1EEEvPT_x"
# Symbols of kernels in public wheels (bitsandbytes, xgboost, CUB, PyTorch), and what they are.
PUBLIC = {
    DEQUANTIZE: "kDequantizeBlockwise<float, 512, 64, 8, 2>",
    "_Z35kOptimizerStatic8bit1StateBlockwiseI13__nv_bfloat16Li4ELi256ELi1EEvPT_S2_PhfffifPfS4_ffbi":
        "kOptimizerStatic8bit1StateBlockwise<__nv_bfloat16, 4, 256, 1>",
    "_ZN3cub53CUB_200302_500_520_600_610_700_750_800_860_890_900_NS11EmptyKernelIvEEvv":
        "cub::CUB_200302_500_520_600_610_700_750_800_860_890_900_NS::EmptyKernel<void>",
    "_ZN7cutlass6KernelINS_4gemm6kernel4GemmIfLi3EEEEEvNT_6ParamsE":
        "cutlass::Kernel<cutlass::gemm::kernel::Gemm<float, 3> >",
    "_ZN12_GLOBAL__N_15applyIiXadL_Z4funcPFviEEEEEvPT_":
        "(anonymous namespace)::apply<int, &(func(void (*)(int)))>",
    "_Z3addPfS_i": "add",
}  # fmt: skip

readable = pytest.mark.skipif(
    demangle._reader() is None, reason="no C++ library that reads names on this machine"
)


@readable
@pytest.mark.parametrize("symbol", PUBLIC)
def test_names_of_public_kernels(symbol: str) -> None:
    assert demangle.cxx_name(symbol) == PUBLIC[symbol]
    assert demangle.symbol_of(PUBLIC[symbol], PUBLIC) == symbol
    assert demangle.symbol_of(demangle.demangled(symbol), PUBLIC) == symbol


def test_what_is_no_mangled_name() -> None:
    for text in ("rms_norm", "_Z", "_Zé", "_Z3ad", "", "Z3addPfS_i", "_ZN" + "9" * 70_000):
        assert demangle.demangled(text) == demangle.cxx_name(text) == text
    assert demangle.symbol_of("rms_norm", ["rms_norm"]) is None  # it is no C++ name


@readable
def test_a_kernel_by_its_cxx_name(fakecuda: FakeCuda) -> None:
    for image in (CUBIN, PTX):
        kernel = Kernel(image)
        asked = kernel["kDequantizeBlockwise<float, 512, 64, 8, 2>"]
        assert asked is kernel[DEQUANTIZE] is getattr(kernel, DEQUANTIZE)
        assert asked is getattr(kernel, "kDequantizeBlockwise<float, 512, 64, 8, 2>")
        assert asked.name == DEQUANTIZE
        assert len(kernel) == len(set(kernel)) == 8  # names as the image has them
        for name in (
            "kDequantizeBlockwise<float,512,64,8,2>",
            "void kDequantizeBlockwise<float, (int)512, (int)64, (int)8, (int)2>"
            "(float *, unsigned char *, float *, float *, int, int)",  # as NVIDIA's tools write it
        ):
            assert kernel[name] is asked and name in kernel
        for name in (
            "ns::scale<unsigned char, 4, true, (Kind)1>",
            "ns::scale<unsigned char, 4u, (bool)1, (Kind)1>",
            "ns::scale<unsigned  char,(unsigned int)4,1,(Kind)1>",
        ):
            assert kernel[name].name == SCALE
        assert kernel["ns::solve"].params[0].size_bytes == 40
        assert kernel.plain.name == "plain"
        for wrong in ("ns::scale", "scale<float, 4, false>", "kDequantizeBlockwise", "solve", "ns"):
            assert wrong not in kernel and not hasattr(kernel, wrong)
            with pytest.raises(FunctionNotFoundError, match=r"it has: .*ns::solve"):
                kernel[wrong]
        assert 5 not in kernel and None not in kernel


@readable
def test_overloads_go_by_their_parameters() -> None:
    kernel = Kernel(CUBIN)
    assert kernel["add(float*, int)"].name == "_Z3addPfi"
    assert kernel["add(double *,int)"].name == "_Z3addPdi"
    with pytest.raises(FunctionNotFoundError, match=r"2 kernels are called 'add': add\(double\*, "):
        kernel["add"]
    assert kernel["_Z3addPfi"].name == "_Z3addPfi"


@readable
def test_functions_and_signatures_by_cxx_names(fakecuda: FakeCuda) -> None:
    names = ["ns::solve", "kDequantizeBlockwise<float, 512, 64, 8, 2>", "add(float*, int)"]
    signatures = {names[1]: "float* code, uint8_t* a, float* absmax, float* out, int b, int n"}
    kernel = Kernel(CUBIN, names, signatures=signatures)
    assert kernel.function_names == ["_ZN2ns5solveE7Problem", DEQUANTIZE, "_Z3addPfi"]
    assert kernel[names[1]].signature.startswith(f"{DEQUANTIZE}(float* code, uint8_t* a")
    kernel[names[1]](1, 64, params=[None, None, None, None, 512, 0])
    assert fakecuda.launch().name == DEQUANTIZE
    assert kernel["add"].name == "_Z3addPfi" and "add(double*, int)" not in kernel
    with pytest.raises(FunctionNotFoundError, match=r"no function 'ns::sulve' in .* it has: "):
        Kernel(CUBIN, ["ns::sulve"])
    with pytest.raises(ParamsError, match="declares 1 parameters, the function takes 6"):
        Kernel(CUBIN, signatures={names[1]: ["int"]})


def test_without_a_library_that_reads_names(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cached in (demangle.demangled, demangle.cxx_name, demangle._forms):
        cached.cache_clear()
    monkeypatch.setattr(demangle, "_reader", lambda: None)
    try:
        kernel = Kernel(CUBIN)
        assert kernel[DEQUANTIZE].name == DEQUANTIZE
        with pytest.raises(FunctionNotFoundError, match=DEQUANTIZE):
            kernel["kDequantizeBlockwise<float, 512, 64, 8, 2>"]
    finally:
        for cached in (demangle.demangled, demangle.cxx_name, demangle._forms):
            cached.cache_clear()


def test_names_that_are_there_load_no_library() -> None:
    code = (
        "from kernel_hub import Kernel; from kernel_hub.image import demangle; "
        f"Kernel({str(CUBIN)!r})['{DEQUANTIZE}']; print(demangle._reader.cache_info().misses)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == "0", done.stderr


@readable
def test_any_symbol_is_read_or_left() -> None:
    """Names come from files that nobody vouches for: bytes of real ones changed by lot."""
    rng = random.Random(5)
    real = [*PUBLIC, *Kernel(CUBIN)]
    alphabet = "_ZNSTIELKPRhifjlmxvbdX0123456789tsaB"
    for _ in range(20_000):
        text = list(rng.choice(real))
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(text) + 1)
            text[at : at + rng.randint(0, 3)] = rng.choices(alphabet, k=rng.randint(0, 8))
        symbol = "".join(text)
        assert isinstance(demangle.cxx_name(symbol), str)
        assert symbol not in demangle._forms(symbol)
    deep = "_Z1f" + "P" * 60_000 + "v"
    assert demangle.demangled(deep).startswith(("f(void*", "_Z1f"))
