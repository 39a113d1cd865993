"""Triton kernels that must not be loaded or launched: nothing reaches the driver."""

from __future__ import annotations

import ctypes
import random
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakecuda import FakeCuda
from fakecuda.helpers import PROBE_CUBIN
from triton_data import DATA, NEWEST, copy, edit
from triton_data import words as triton_words

from kernel_hub import DeviceArray, Kernel
from kernel_hub.errors import (
    CubinCorruptError,
    CubinNotFoundError,
    FunctionNotFoundError,
    KernelHubError,
    LaunchConfigError,
    ParamsError,
)
from kernel_hub.formats import triton

# -- launches


@pytest.fixture
def add(fakecuda: FakeCuda) -> Any:
    f = triton.load(NEWEST, "add_kernel")
    f.load()
    return f


@pytest.fixture
def x(fakecuda: FakeCuda) -> DeviceArray:
    return DeviceArray.zeros(1024, "fp32")


def test_wrong_params_never_reach_the_driver(fakecuda: FakeCuda, add: Any, x: DeviceArray) -> None:
    half = DeviceArray.zeros(1024, "fp16")
    cases: list[tuple[Any, str]] = [
        ([x, x, x], "too few params: got 3, the kernel takes 4: float. x_ptr"),
        ([x, x, x, 16, 256], "too many params: got 5, the kernel takes 4"),
        ([x, x, x, 16, None, None], "too many params"),  # the hidden ones are not the caller's
        ([half, x, x, 16], r"params\[0\] \(x_ptr\): .* float\* .* fp16"),
        ([x, x, x, 1.5], r"params\[3\] \(n\)"),
        ([x, x, x, 1 << 31], r"params\[3\] \(n\)"),
        ([x, x, x, x], r"params\[3\] \(n\)"),
        ([16, x, x, 16], r"params\[0\] \(x_ptr\)"),
        ([x, "y", x, 16], r"params\[1\] \(y_ptr\)"),
        ([x[1:], x, x, 16], r"params\[0\] \(x_ptr\) is the address 0x\w+, which is not aligned"),
        ([x, x, x[3:], 16], r"\(out_ptr\) .* compile the kernel without that hint for out_ptr"),
        ([x, x, x, 20], r"3.9.0/add_kernel.json: params\[3\] \(n\) is 20, which is not divisible"),
        ({"x_ptr": x, "y_ptr": x, "out": x, "n": 16}, "missing out_ptr; unknown out"),
        (x, "not a list, tuple or dict"),
    ]
    for params, words in cases:
        with pytest.raises(ParamsError, match=words):
            add(1, params=params)
        with pytest.raises(ParamsError, match=words):
            add.bind(1, params=params)
        if isinstance(params, list):
            with pytest.raises(ParamsError, match=words):
                add[1](*params)
    assert fakecuda.launch_count == 0


def test_wrong_geometry_never_reaches_the_driver(
    fakecuda: FakeCuda, add: Any, x: DeviceArray
) -> None:
    params = [x, x, x, 16]
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((1, 256), {}, r"blockDim=256 of add_kernel: its num_warps 4 means \(128, 1, 1\)"),
        ((1, (32, 4, 1)), {}, "leave it out"),
        ((1, "128"), {}, "blockDim"),
        ((1, 128, 48), {}, r"sharedMemBytes=48 of add_kernel: it takes 0 \(shared in .*json"),
        ((1, 128, -1), {}, "sharedMemBytes=-1"),
        ((1, 128, "0"), {}, "sharedMemBytes='0'"),
        ((0,), {}, "gridDim"),
        ((-1,), {}, "gridDim"),
        ((1 << 31,), {}, "gridDim"),
        (((1, 65536, 1),), {}, "gridDim"),
        ((1.5,), {}, "gridDim"),
        ((1,), {"cluster": 2}, r"cluster=2 of add_kernel: it is compiled for \(1, 1, 1\)"),
        ((1,), {"cooperative": True}, "cooperative=True .* compiled for False"),
        ((1,), {"programmatic": True}, "programmatic"),
        ((1,), {"stream": "s"}, "stream"),
    ]
    for given, options, words in cases:
        with pytest.raises(LaunchConfigError, match=words):
            add(*given, params=params, **options)
    for grid, words in (
        ((1, 2, 3, 4), "1 to 3 ints"),
        (-1, "0 or more"),
        (lambda meta: (1,), "grid of add_kernel .programs. is a function"),
        ("4", "grid"),
    ):
        with pytest.raises(LaunchConfigError, match=words):
            add[grid]
    with pytest.raises(TypeError, match="unexpected"):
        add(1, params=params, num_warps=4)
    assert fakecuda.launch_count == 0


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (10, 0), (12, 0)])
def test_another_gpu_is_refused_before_anything_is_loaded(
    make_fakecuda: Callable[..., FakeCuda], capability: tuple[int, int]
) -> None:
    fake = make_fakecuda(capability=capability)
    x = DeviceArray.zeros(64, "fp32")
    with pytest.raises(CubinNotFoundError, match="sm_90a"):
        triton.load(NEWEST, "add_kernel")[1](x, x, x, 16)
    assert (fake.live("libraries"), fake.launch_count) == (0, 0)


def test_more_shared_memory_than_the_gpu_has(
    fakecuda: FakeCuda, x: DeviceArray, tmp_path: Path
) -> None:
    path = copy("add_kernel", tmp_path)
    edit(path, shared=300_000)
    f = triton.load(path)
    with pytest.raises(LaunchConfigError, match="sharedMemBytes=300000"):
        f[1](x, x, x, 16)
    assert fakecuda.launch_count == 0


# -- files


def test_files_of_two_kernels(tmp_path: Path) -> None:
    path = copy("add_kernel", tmp_path)
    shutil.copy(NEWEST / "scratch_kernel.cubin", tmp_path / "add_kernel.cubin")
    with pytest.raises(FunctionNotFoundError, match="it has: scratch_kernel"):
        triton.load(path)
    shutil.copy(PROBE_CUBIN, tmp_path / "add_kernel.cubin")
    with pytest.raises(FunctionNotFoundError, match="launch_probe_5"):
        triton.load(path)
    shutil.copy(NEWEST / "sm80/add_kernel.cubin", tmp_path / "add_kernel.cubin")
    with pytest.raises(CubinCorruptError, match=r"target\.arch is 90, the cubin is for sm_?80"):
        triton.load(path)
    copy("add_kernel", tmp_path)
    shutil.copy(DATA / "3.3.1/add_kernel.cubin", tmp_path / "add_kernel.cubin")
    with pytest.raises(ParamsError, match="takes 5 parameters; declared are 4 and 2 hidden"):
        triton.load(path)
    copy("scratch_kernel", tmp_path)
    shutil.copy(NEWEST / "add_kernel.cubin", tmp_path / "scratch_kernel.cubin")
    edit(tmp_path / "scratch_kernel.json", name="add_kernel")
    with pytest.raises(CubinCorruptError, match="ttir has no public function 'add_kernel'"):
        triton.load(tmp_path, "scratch_kernel")
    text = (tmp_path / "scratch_kernel.ttir").read_text()
    (tmp_path / "scratch_kernel.ttir").write_text(text.replace("@scratch_", "@add_"))
    with pytest.raises(
        ParamsError, match=r"parameter 2 \(M\) is declared int \(4 bytes\), .* takes 8"
    ):
        triton.load(tmp_path, "scratch_kernel")


def test_a_damaged_ttir(tmp_path: Path) -> None:
    path = copy("add_kernel", tmp_path)
    ttir = path.with_suffix(".ttir")
    text = ttir.read_text()
    head, _, tail = text.partition("%n: i32")
    for damaged, words in (
        ("", "has no public function"),
        (head, "its list of arguments has no end"),
        (head + "%n: !tt.odd<f7>" + tail, "argument 3 .* has a type that is not known here"),
        (head + "n: i32" + tail, "argument 3 of add_kernel: 'n: i32"),
        (text.replace("divisibility = 16", "divisibility = 0"), "tt.divisibility is 0"),
        (text.replace("!tt.ptr<f32>", "i32", 1), r"parameter 0 \(x_ptr\) is declared int"),
        ("tt.func public @add_kernel(" + "%x: i32, " * 2000 + ")", "argument"),
        ("tt.func public @add_kernel(" + "(" * (1 << 21), "no end"),
    ):
        ttir.write_text(damaged)
        with pytest.raises((CubinCorruptError, ParamsError), match=words):
            triton.load(path)
    ttir.write_bytes(bytes(range(256)))
    with pytest.raises(CubinCorruptError, match=r"add_kernel\.ttir"):
        triton.load(path)
    ttir.unlink()
    assert triton.load(path).arguments[0].type is None


def test_cut_and_changed_files_are_refused_or_load(tmp_path: Path) -> None:
    """Whatever is done to the files, an error of ours or a kernel comes out."""
    rng = random.Random(0)
    path = copy("desc_kernel", tmp_path)
    refused = 0
    for suffix in (".cubin", ".json", ".ttir"):
        file = path.with_suffix(suffix)
        whole = file.read_bytes()
        for trial in range(60):
            data = bytearray(whole)
            if trial % 2:
                del data[rng.randrange(len(data)) :]
            else:
                for _ in range(rng.randint(1, 8)):
                    data[rng.randrange(len(data))] = rng.randrange(256)
            file.write_bytes(data)
            try:
                triton.load(path)
            except KernelHubError as error:
                refused += 1
                assert "desc_kernel" in str(error)
        file.write_bytes(whole)
    assert refused > 60
    assert triton.load(path).name == "desc_kernel"


def test_paths_that_lead_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    outside = tmp_path / "outside"
    outside.mkdir()
    path = copy("add_kernel", outside)
    copy("scratch_kernel", outside)
    for wrong, name, words in (
        ("../outside", None, "no file or folder '../outside'"),
        ("nothing", None, "no hash or kernel in Triton's cache"),
        (cache, None, "holds no .json"),
        (outside, None, "holds several kernels: give name=, one of add_kernel, scratch_kernel"),
        (outside, "matmul_kernel", "holds no kernel name='matmul_kernel'"),
        (path, "scratch_kernel", "holds add_kernel, not name='scratch_kernel'"),
        (tmp_path / "x.cubin", None, "no file .*x.cubin"),
        (tmp_path / "x.json", None, "no file .*x.cubin"),
        ("nul\0byte", None, "nul"),
        ("x" * 5000, None, "x"),
    ):
        with pytest.raises(CubinNotFoundError, match=words):
            triton.load(wrong, name)
    for name in ("../outside/add_kernel", "", "..", "a/b", 7, "a\0"):
        with pytest.raises(ParamsError, match="name="):
            triton.load(outside, name)  # type: ignore[arg-type]
    for wrong in (7, None, b"x", ""):
        with pytest.raises(ParamsError, match="path="):
            triton.load(wrong)  # type: ignore[arg-type]
    path.with_suffix(".cubin").unlink()
    with pytest.raises(CubinNotFoundError, match="a launch needs both"):
        triton.load(path)


@pytest.mark.parametrize(
    ("signature", "words"),
    [
        ([], "signature is a list"),
        ({"x": "*fp32"}, "declares 1 arguments .* compiled with 4: x_ptr, y_ptr, out_ptr, n"),
        ({"a": "*fp32", "b": "*fp32", "c": "*fp32", "n": "int"}, r"signature\['n'\] is 'int'"),
        ({"a": "*fp32", "b": "*fp32", "c": "*fp32", "n": 7}, r"signature\['n'\] is 7"),
        ({"a": "*fp32", "b": "*fp32", "c": "*fp32", "n": "i64"}, r"parameter 3 \(n\) is declared"),
        ({"a": "tensordesc<fp32[]>"}, "tensordesc<fp32..>': expected a type"),
    ],
)
def test_signatures_that_do_not_fit(signature: Any, words: str) -> None:
    with pytest.raises(ParamsError, match=words):
        triton.load(NEWEST, "add_kernel", signature=signature)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({}, "arguments is a dict"),
        ([7], r"arguments\[0\] is a int"),
        ([{"name": ""}], "name is ''"),
        ([{"name": "x", "type": 3}], "type is 3"),
        ([{"name": "x", "divisors": [0]}], "divisors is"),
        ([{"name": "x", "divisors": [1, 1]}], "divisors is"),
        ([{"name": "x", "parts": "i32"}], "parts is"),
        ([{"name": "x", "parts": ["nvTmaDesc", "i64"], "divisors": [1, 1]}], "not those of a"),
    ],
)
def test_arguments_from_a_collection_are_checked(found: Any, words: str) -> None:
    from kernel_hub.formats.triton.signature import arguments_from_json

    with pytest.raises(CubinCorruptError, match=words) as caught:
        arguments_from_json(found, "manifest.json")
    assert "manifest.json" in str(caught.value)


# -- opened as a plain Kernel


def test_a_kernel_of_tritons_is_told_what_launches_it(
    fakecuda: FakeCuda, x: DeviceArray, tmp_path: Path
) -> None:
    copy("add_kernel", tmp_path)
    path = tmp_path / "add_kernel.cubin"
    hint = r"formats\.triton\.load\(.*add_kernel\.cubin.\) knows its block"
    with pytest.warns(RuntimeWarning, match=hint):
        kernel = Kernel(str(path))
    typed = {"add_kernel": "float* x, float* y, float* out, int n, void* a, void* b"}
    with pytest.warns(RuntimeWarning, match=hint):
        declared = Kernel(path, signatures=typed)
    for given in (
        (1, 128, 0, 0, [x, x, x]),
        (1, 32, 0, 0, [x, x, x, ctypes.c_int(7), None, None]),
        (1,),
    ):
        for function in (kernel.add_kernel, declared.add_kernel):
            with pytest.raises((ParamsError, LaunchConfigError, TypeError), match=hint) as caught:
                function(*given)
            assert str(caught.value).count("formats.triton.load") == 1
    assert fakecuda.launch_count == 0
    declared.add_kernel(1, 128, 0, 0, [x, x, x, 7, None, None])  # whoever knows may
    assert fakecuda.launch().params[:2] == triton_words(x.ptr, x.ptr)  # type: ignore[index]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        triton.load(path)[1](x, x, x, 16)
        for text in ("{}", "[1]", "no json", '{"num_warps": 4}'):
            path.with_suffix(".json").write_text(text)
            Kernel(path)
        path.with_suffix(".json").unlink()
        Kernel(path)


def test_a_refused_kernel_of_tritons_is_built_with_triton(
    make_fakecuda: Callable[..., FakeCuda], tmp_path: Path
) -> None:
    make_fakecuda(capability=(8, 9))
    copy("add_kernel", tmp_path)
    path, x = tmp_path / "add_kernel.cubin", DeviceArray.zeros(16, "fp32")
    with pytest.warns(RuntimeWarning):
        plain = Kernel(path)
    for launch in (
        lambda: plain.load(),
        lambda: triton.load(path)[1](x, x, x, 16),
        lambda: triton.load(path).load(),
    ):
        with pytest.raises(CubinNotFoundError, match=r"build-triton .* --arch sm89") as caught:
            launch()
        assert "nvcc" not in str(caught.value)
        assert caught.value.rejected.keys() == {"sm_90a"}
    path.with_suffix(".json").unlink()
    with pytest.raises(CubinNotFoundError, match="nvcc -cubin -arch=sm_89"):
        Kernel(path).load()
