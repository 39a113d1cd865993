"""Wrong arguments to load, compile, tune and collections: refused at once, nothing left behind."""

from __future__ import annotations

import json
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakecuda import FakeCuda
from triton_data import NEWEST

from kernel_hub import DeviceArray
from kernel_hub.errors import (
    CompileError,
    CubinCorruptError,
    DeviceOutOfMemoryError,
    KernelHubError,
    LaunchConfigError,
    ParamsError,
)
from kernel_hub.formats import triton

SIGNATURE = "*fp32:16,*fp32:16,*fp32:16,i32"
BLOCK = {"BLOCK": 256}


def copy(name: str, folder: Path) -> Path:
    for file in NEWEST.glob(f"{name}.*"):
        shutil.copy(file, folder)
    return folder / f"{name}.json"


# -- load


@pytest.mark.parametrize(("scratch", "grid"), [(256, (2**30, 2**13, 2**13)), (1 << 30, (2**25,))])
def test_scratch_beyond_the_device_is_not_cut(
    fakecuda: FakeCuda, tmp_path: Path, scratch: int, grid: tuple[int, ...]
) -> None:
    path = copy("scratch_kernel", tmp_path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "global_scratch_size": scratch}))
    f, x = triton.load(path), DeviceArray.zeros(64, "fp32")
    fakecuda.set_total_memory(0, 1 << 34)
    with pytest.raises(LaunchConfigError, match=r"global_scratch_size in .*json.* 17,179,869,184"):
        f[grid](x, x, 16, 16)
    with pytest.raises(LaunchConfigError, match="fewer blocks"):
        f.bind(grid, stream=0, params=[x, x, 16, 16])
    assert fakecuda.launch_count == 0
    f[(4,)](x, x, 16, 16)
    for size in (2**64 + 16, 2**70, (2**40, 2**40)):  # what ctypes would cut
        with pytest.raises(DeviceOutOfMemoryError, match="asked for"):
            DeviceArray.empty(size, "uint8")


@pytest.mark.parametrize(
    "signature",
    [
        SIGNATURE,
        f"{SIGNATURE}, 1024",  # as `compile` takes it, constants too
        {
            "x_ptr": "*fp32:16",
            "y_ptr": "*kfp32",
            "out_ptr": "*fp32",
            "n": "i32",
            "BLOCK": "constexpr",
        },
    ],
)
def test_a_signature_is_spelled_as_for_compiling(
    fakecuda: FakeCuda, tmp_path: Path, signature: Any
) -> None:
    path = copy("add_kernel", tmp_path)
    for with_names in (True, False):
        add = triton.load(path, signature=signature)
        # The files know of more than the signature says; without them it is all there is.
        assert add.arguments[0].divisors == (16,) and add.arguments[0].type == "*fp32"
        assert "float* " in add.signature and "void*" not in add.signature.partition("int")[0]
        wrong, x = DeviceArray.zeros(64, "fp64"), DeviceArray.zeros(64, "fp32")
        with pytest.raises(ParamsError, match=r"params\[1\].*fp64"):
            add[1](x, wrong, x, 16)
        with pytest.raises(ParamsError, match="not aligned"):
            add[1](x[1:], x, x, 16)
        if with_names:
            for suffix in (".ttir", ".ptx"):
                path.with_suffix(suffix).unlink(missing_ok=True)
    assert fakecuda.launch_count == 0


@pytest.mark.parametrize("wrong", ["*fp23", "*fp32:8", "*void:", "fp32*", "void", "***fp32", ""])
def test_a_type_that_triton_does_not_have(wrong: str) -> None:
    signature = {"x_ptr": wrong, "y_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32"}
    with pytest.raises(ParamsError, match=r"signature\['x_ptr'\] is .*; elements are bf16"):
        triton.load(NEWEST, "add_kernel", signature=signature)


@pytest.mark.parametrize("divisor", ["99999999999999", "9" * 5000, "7", "-16", "x", ""])
def test_a_divisibility_that_triton_does_not_write(tmp_path: Path, divisor: str) -> None:
    ttir = copy("add_kernel", tmp_path).with_suffix(".ttir")
    ttir.write_text(ttir.read_text().replace("divisibility = 16", f"divisibility = {divisor}"))
    with pytest.raises(CubinCorruptError, match=r"ttir: argument 0 .*tt.divisibility is") as caught:
        triton.load(ttir.with_suffix(".json"))
    assert len(str(caught.value)) < 300 + len(str(tmp_path))


# -- what Triton builds


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("built")
    triton.compile(
        kernel(), SIGNATURE, constexprs=BLOCK, num_warps=8, arch="sm90", out=out, name="add"
    )  # fmt: skip
    return out


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "kernels"))


def kernel() -> Any:
    pytest.importorskip("triton", reason="kernels are compiled by Triton")
    from triton_kernels import add_kernel

    return add_kernel


# What a function says, and its parameters: [name, type, size, offset] each.
Params = list[list[Any]]


def fewer_params(said: dict[str, Any], params: Params) -> None:
    params.pop()
    del said["triton"]["metadata"]["profile_scratch_size"]


def wider_n(said: dict[str, Any], params: Params) -> None:
    params[3][1:3] = ["int64_t", 8]
    said["triton"]["arguments"][3]["type"] = "i64"


def fewer_warps(said: dict[str, Any], _: Params) -> None:
    said["required_block"] = None
    said["triton"]["metadata"]["num_warps"] = 4


def clusters(said: dict[str, Any], _: Params) -> None:
    said["cluster"] = [2, 1, 1]
    said["triton"]["metadata"]["num_ctas"] = 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (fewer_params, r"add_kernel.params .*the cubin says"),
        (wider_n, r"add_kernel.params .*\(24, 8\).*the cubin says .*\(24, 4\)"),
        (fewer_warps, r"required_block is None, the cubin says \(256, 1, 1\)"),
        (clusters, r"cluster is \(2, 1, 1\), the cubin says None"),
    ],
)
def test_a_manifest_that_the_cubin_contradicts(
    folder: Path,
    fakecuda: FakeCuda,
    change: Callable[[dict[str, Any], Params], None],
    says: str,
) -> None:
    pytest.importorskip("triton", "3.6", reason="others compile less of it into the cubin")
    file = folder / "manifest.json"
    raw = json.loads(file.read_text())
    said = raw["cubins"]["add"]["sm90"]["functions"]["add_kernel"]
    change(said, raw["params"][said["params"]])
    file.write_text(json.dumps(raw))
    with pytest.raises(CubinCorruptError, match=rf"manifest\.json: cubins\.add\.sm90.*{says}"):
        triton.collection(folder)["add"]
    assert fakecuda.calls("cuLibraryLoadData") == 0


def test_an_image_of_another_architecture(folder: Path, fakecuda: FakeCuda) -> None:
    triton.compile(
        kernel(), SIGNATURE, constexprs=BLOCK, num_warps=8, arch="sm80,sm90", out=folder, name="add"
    )  # fmt: skip
    file = folder / "manifest.json"
    raw = json.loads(file.read_text())
    other = raw["cubins"]["add"]["sm80"]
    raw["cubins"]["add"]["sm90"].update({key: other[key] for key in ("file", "sha256")})
    file.write_text(json.dumps(raw))
    with pytest.raises(CubinCorruptError, match=r"for sm_90a: .* sm80/add.cubin .* for sm_80"):
        triton.collection(folder)["add"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"constexprs": 5}, "constexprs=5: expected a dict"),
        ({"constexprs": [1]}, "constexprs="),
        ({"constexprs": "BLOCK=5"}, "constexprs="),
        ({"arch": None}, "arch=None"),
        ({"arch": 5}, "arch=5"),
        ({"arch": [5]}, "arch=5"),
        ({"out": None}, "out=None: expected the path of a folder"),
        ({"out": 5}, "out=5"),
        ({"out": b"k"}, "out=b'k'"),
        ({"out": "a\0b"}, "out="),
        ({"out": ""}, "out=''"),
        ({"out": __file__}, "it is a file"),
        ({"num_warps": 64}, "num_warps=64: a whole number from 1 to 32"),
        ({"name": "x" * 300}, "name=.*up to 200"),
        ({"signature": "foo,*fp32,*fp32,i32"}, "signature of 'x_ptr' is 'foo'"),
        ({"configs": 5}, "configs=5: expected a list"),
        ({"configs": []}, "configs=.*at least one"),
        ({"configs": [{"BLOCK": 64}]}, "'BLOCK' is 64 in one of configs and 256 in constexprs"),
    ],
)
def test_what_compile_refuses_before_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kernel_hub.formats.triton.ahead.compiling.compiled", None)
    usual: dict[str, Any] = {
        "signature": SIGNATURE,
        "constexprs": BLOCK,
        "arch": "sm90",
        "out": "k",
    }
    given = {**usual, **given}
    call: Any = triton.compile_configs if "configs" in given else triton.compile
    with pytest.raises(KernelHubError, match=says):
        call(kernel(), **given)
    assert not list(tmp_path.iterdir())


def test_what_is_built_does_not_follow_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = kernel()
    import triton as compiler

    seen: list[Any] = []
    compile_it = compiler.compile

    def watched(*args: Any, **options: Any) -> Any:
        seen.append(compile_it(*args, **options))
        return seen[-1]

    monkeypatch.setattr(compiler, "compile", watched)
    for value in ("0", "1"):
        monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", value)
        triton.compile(add, SIGNATURE, constexprs=BLOCK, arch=" sm_90", out=tmp_path)
    assert [one.metadata.enable_fp_fusion for one in seen] == [True, True]
    (name,) = triton.collection(tmp_path)
    off = triton.compile(
        add, SIGNATURE, constexprs=BLOCK, arch="sm90", out=tmp_path, enable_fp_fusion=False
    )
    assert off != name and seen[-1].metadata.enable_fp_fusion is False


def test_what_a_collection_refuses(folder: Path, fakecuda: FakeCuda) -> None:
    kernels: Any = triton.collection(folder)
    same = kernels.function("add", arch="sm_90")
    assert same is kernels.function("add", device=types.SimpleNamespace(device_id=0))
    for call, says in (
        (lambda: kernels[[]], "a kernel's name is a string"),
        (lambda: kernels[5], "a kernel's name is a string"),
        (lambda: kernels.function("add", arch=[]), "arch=.*no architecture: "),
        (lambda: kernels.function("add", arch=5), "arch=5"),
        (lambda: kernels.function("add", device="x"), "device='x'"),
        (lambda: kernels.function("add", device=1.5), "device=1.5"),
        (lambda: kernels.tuned([]), "table="),
    ):
        with pytest.raises(KernelHubError, match=says):
            call()


def test_a_file_that_ends_the_process(tmp_path: Path) -> None:
    kernel()
    from kernel_hub.formats.triton.ahead.frontend import from_file

    file = tmp_path / "ends.py"
    file.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(CompileError, match=r"(?s)ends\.py cannot be executed.*SystemExit: 3"):
        from_file(file, "add_kernel")


def launching(result: Any) -> Any:
    return lambda **sizes: lambda function: result


TUNE: list[tuple[dict[str, Any], str]] = [
    ({"case": None}, "case=None: a function of the sizes n"),
    ({"case": lambda n: None}, r"case of {'n': 5} returned None"),
    ({"case": lambda n: triton.Problem(5)}, "launch=5"),  # type: ignore[arg-type]
    ({"case": lambda n: triton.Problem(len, num_bytes="x")}, "num_bytes='x'"),  # type: ignore[arg-type]
    ({"case": launching(None)}, r"launch of {'n': 5} is None: expected the output"),
    ({"case": launching(5)}, r"launch of {'n': 5} is 5"),
    ({"shapes": None}, "shapes: .* got None"),
    ({"shapes": [5]}, "shapes: .* one is 5"),
    ({"shapes": {"n": 5}}, "shapes: .* got {"),
    ({"shapes": [{5: 5}]}, "shapes: .* one is {5: 5}"),
    ({"shapes": [{"a b": 5}]}, "shapes: .* one is {'a b'"),
    ({"shapes": [{"n": "x"}]}, "shapes: n='x': a whole number"),
    ({"shapes": [{"n": -5}]}, "shapes: n=-5"),
    ({"names": 5}, "names=5: a list"),
    ({"names": "add"}, "names='add': a list"),
    ({"table": 5}, "table=5"),
    ({"rounds": 0}, "rounds=0"),
    ({"rounds": "x"}, "rounds='x'"),
]


@pytest.mark.parametrize(("given", "says"), TUNE, ids=[says for _, says in TUNE])
def test_what_tune_refuses(
    folder: Path, fakecuda: FakeCuda, given: dict[str, Any], says: str
) -> None:
    pytest.importorskip("torch", reason="configurations are compared as torch tensors")
    before = sorted(folder.iterdir())
    given = {"case": launching(None), "shapes": [{"n": 5}], **given}
    with pytest.raises(ParamsError, match=says):
        triton.tune(folder, **given)
    assert sorted(folder.iterdir()) == before, "nothing is written"
