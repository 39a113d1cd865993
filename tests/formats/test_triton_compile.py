"""Triton kernels built ahead of time: what is written, what is launched, what is refused."""

from __future__ import annotations

import ctypes
import json
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fakecuda import FakeCuda
from fakecuda.helpers import run_child

needed = pytest.importorskip("triton", reason="kernels are compiled by Triton")

import triton_kernels  # noqa: E402
from triton_kernels import add_kernel  # noqa: E402

from kernel_hub import DeviceArray, Kernel, registry  # noqa: E402
from kernel_hub.collection.manifest import open_collection  # noqa: E402
from kernel_hub.errors import (  # noqa: E402
    CompileError,
    CubinCorruptError,
    CubinNotFoundError,
    KernelHubError,
    MissingPackageError,
    ParamsError,
)
from kernel_hub.formats import triton  # noqa: E402

SIGNATURE = "*fp32:16,*fp32:16,*fp32:16,i32"
BLOCK = {"BLOCK": 256}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A collection: `add` for two architectures, and two configurations for one."""
    out = tmp_path_factory.mktemp("built")
    triton.compile(
        add_kernel, SIGNATURE, constexprs=BLOCK, arch="sm80,sm90", out=out, name="add"
    )  # fmt: skip
    configs = [{"BLOCK": 512}, needed.Config({"BLOCK": 512}, num_warps=8)]
    triton.compile_configs(add_kernel, configs, signature=SIGNATURE, arch=["sm90"], out=out)
    return out


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "kernels"))


def arrays(count: int = 3) -> list[DeviceArray]:
    return [DeviceArray.zeros(1000, "fp32") for _ in range(count)]


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_every_configuration_and_architecture_has_a_file_of_its_own(built: Path) -> None:
    kernels = triton.collection(built)
    assert len(kernels) == 3 and "add" in kernels and "sub" not in kernels
    one, two = (name for name in kernels if name != "add")
    assert one.startswith("add_kernel_BLOCK512_w") and one[:22] != two[:22]
    found = files(built)
    assert set(found) == {
        "manifest.json", "sm80/add.cubin", "sm90/add.cubin",
        f"sm90/{one}.cubin", f"sm90/{two}.cubin",
    }  # fmt: skip
    assert len({data for path, data in found.items() if path.endswith("cubin")}) == 4
    assert list(kernels.entries("add")) == ["sm80", "sm90"]
    assert {entry.target for entry in kernels.entries("add").values()} == {"sm_80", "sm_90a"}
    for data in found.values():
        assert str(Path(triton_kernels.__file__).parent).encode() not in data, "a folder of ours"


def test_what_is_kept_of_a_kernel(built: Path) -> None:
    add = triton.collection(built).function("add", arch="sm80")  # no GPU is asked
    assert [(a.name, a.type, a.divisors) for a in add.arguments] == [
        ("x_ptr", "*fp32", (16,)), ("y_ptr", "*fp32", (16,)), ("out_ptr", "*fp32", (16,)),
        ("n", "i32", (1,)),
    ]  # fmt: skip
    assert add.constexprs == BLOCK and add.metadata.num_warps == 4
    assert add.metadata.compute_capability == (8, 0)
    assert "float* x_ptr, float* y_ptr, float* out_ptr, int n" in add.signature


def test_only_declared_arguments_are_passed(built: Path, fakecuda: FakeCuda) -> None:
    add, (x, y, out) = triton.collection(built)["add"], arrays()
    add[(4,)](x, y, out, 1000)
    launch = fakecuda.launch()
    assert (launch.name, launch.gridDim, launch.blockDim) == ("add_kernel", (4, 1, 1), (128, 1, 1))
    pointers = tuple(struct.pack("<Q", array.ptr) for array in (x, y, out))
    assert launch.params is not None
    hidden = launch.params[4:]
    assert launch.params[:4] == (*pointers, struct.pack("<i", 1000))
    assert len(hidden) == add.metadata.num_hidden and not any(map(any, hidden))
    add((2, 1, 1), params={"n": 7, "x_ptr": x, "y_ptr": y, "out_ptr": out})
    assert fakecuda.launch().params == (*pointers, struct.pack("<i", 7), *hidden)


def test_clusters_and_dependent_launches(tmp_path: Path, fakecuda: FakeCuda) -> None:
    pytest.importorskip("triton", "3.4", reason="launch_pdl is new there")
    name = triton.compile(
        add_kernel, SIGNATURE, constexprs=BLOCK, arch="sm90", out=tmp_path, num_ctas=2,
        launch_pdl=True,
    )  # fmt: skip
    add = triton.collection(tmp_path)[name]
    add[3](*arrays(), 5)
    launch = fakecuda.launch()
    assert launch.gridDim == (6, 1, 1), "two blocks a program"
    # Triton 3.6 compiles it in; before, the launch has to say it.
    cluster = add.spec.cluster or tuple(launch.attribute(4, i) for i in range(3))
    assert cluster == (2, 1, 1)
    assert launch.attribute(6) == 1, "programmatic"
    with pytest.raises(ParamsError, match="for sm80: num_ctas=2: clusters need sm90"):
        triton.compile(add_kernel, SIGNATURE, constexprs=BLOCK, out=tmp_path, num_ctas=2)


def test_what_the_launch_refuses(built: Path, fakecuda: FakeCuda) -> None:
    add, (x, y, out) = triton.collection(built)["add"], arrays()
    before = fakecuda.calls("cuLaunchKernelEx") + fakecuda.calls("cuLaunchKernel")
    for args in ((x, y, out), (x, y, out, 5, 256), (x, y, out, 2.5), (x, y, out, 1 << 40)):
        with pytest.raises(ParamsError):
            add[4](*args)
    with pytest.raises(KernelHubError, match=r"x_ptr.*16"):
        add[4](ctypes.c_void_p(x.ptr + 4), y, out, 5)
    assert fakecuda.calls("cuLaunchKernelEx") + fakecuda.calls("cuLaunchKernel") == before


def test_the_image_follows_the_gpu(built: Path, make_fakecuda: Callable[..., FakeCuda]) -> None:
    for capability, token in (((8, 6), (8, 0)), ((9, 0), (9, 0))):
        make_fakecuda(capability=capability)
        assert triton.collection(built)["add"].metadata.compute_capability == token
    make_fakecuda(capability=(7, 5))
    with pytest.raises(CubinNotFoundError, match=r"(?s)sm_80 code.*sm_90a code.*build-triton"):
        triton.collection(built)["add"]
    with pytest.raises(CubinNotFoundError, match="sm80, sm90"):
        triton.collection(built).function("add", arch="sm89")


def test_a_launch_needs_no_triton(built: Path, fakecuda: FakeCuda) -> None:
    done = run_child(
        fakecuda,
        "import sys\n"
        "sys.modules['triton'] = None\n"
        "from kernel_hub import DeviceArray\n"
        "from kernel_hub.formats.triton import collection\n"
        f"add = collection({str(built)!r})['add']\n"
        "add[(1,)](*[DeviceArray.zeros(4, 'fp32') for _ in range(3)], 4)\n"
        "assert 'torch' not in sys.modules\n"
        "print(add.name)",
    )
    assert done.stdout == "add_kernel\n", done.stderr


def test_a_package_ships_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch, fakecuda: FakeCuda
) -> None:
    package = folder.parent / "shipping_triton"
    package.mkdir()
    (package / "__init__.py").write_text("")
    shutil.move(folder, package / "cubins")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(registry, "_packages", {"announced": "shipping_triton"})
    monkeypatch.setattr("kernel_hub.collection.manifest._collections", {})
    for name in ("announced", "shipping_triton"):
        assert triton.collection(name)["add"].name == "add_kernel"
    # To everything else these are shipped cubins like any other, hidden pointers included.
    plain = Kernel("add", package="shipping_triton").add_kernel
    assert plain.params is not None and len(plain.params) >= 4
    assert registry.announced.add is not None
    sys.modules.pop("shipping_triton", None)


def test_where_there_is_no_collection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for where in (tmp_path, str(tmp_path), tmp_path / "nothing"):
        with pytest.raises(CubinNotFoundError, match=r"manifest\.json"):
            triton.collection(where)
    with pytest.raises(CubinNotFoundError, match="no package 'no_such_package'"):
        triton.collection("no_such_package")
    with pytest.raises(ParamsError, match="folder"):
        triton.collection(7)  # type: ignore[arg-type]
    with pytest.raises(CubinNotFoundError, match="none has a 'triton' object"):
        triton.collection("kernel_hub").function("rope", arch="sm90")
    assert len(triton.collection("kernel_hub")) == 0


def test_a_name_stands_for_one_configuration(folder: Path) -> None:
    before = files(folder)
    triton.compile(add_kernel, SIGNATURE, constexprs=BLOCK, arch="sm90", out=folder, name="add")
    assert files(folder) == before, "the same build gives the same bytes"
    triton.compile(
        add_kernel, SIGNATURE, constexprs={"BLOCK": 128}, arch="sm90", out=folder, name="add"
    )
    kernels = triton.collection(folder)
    assert list(kernels.entries("add")) == ["sm90"], "that of another configuration is gone"
    assert not (folder / "sm80/add.cubin").exists()
    assert len(kernels) == 3 and kernels.function("add", arch="sm90").constexprs == {"BLOCK": 128}


def test_a_kernel_that_triton_did_not_make_is_left(tmp_path: Path) -> None:
    text = open_collection().manifest
    one = {name: text.cubins[name] for name in ("launch_probe",)}
    (tmp_path / "manifest.json").write_text(type(text)(one).to_json())
    with pytest.raises(KernelHubError, match="did not make"):
        triton.compile(
            add_kernel, SIGNATURE, constexprs=BLOCK, arch="sm90", out=tmp_path, name="launch_probe"
        )
    triton.compile(add_kernel, SIGNATURE, constexprs=BLOCK, arch="sm90", out=tmp_path, name="add")
    assert list(triton.collection(tmp_path)) == ["add"]
    assert '"launch_probe"' in (tmp_path / "manifest.json").read_text()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"constexprs": {}}, ParamsError, "'BLOCK' has no value in constexprs"),
        ({"signature": "*fp32,i32"}, ParamsError, "has 2 entries; add_kernel takes 5"),
        ({"signature": "*fp32,*fp32,*fp32,i33"}, ParamsError, "'n' is 'i33': .* i32, i64"),
        ({"signature": "*fp32,*fp32,*fp32,i32:8"}, ParamsError, "signature of 'n'"),
        ({"signature": "*fp32,*fp32,*fp32,"}, ParamsError, "signature of 'n'"),
        ({"signature": "*fp32,*fp32,*fp32,i32:"}, ParamsError, "signature of 'n'"),
        ({"signature": "*fp32,*fp32,*fp32,tensordesc<fp16[8,8]>:16"}, ParamsError, "of 'n'"),
        ({"signature": {"x_ptr": "*fp32"}}, ParamsError, "'y_ptr' has no type in signature"),
        ({"signature": {"z": "*fp32"}}, ParamsError, "names 'z'"),
        ({"signature": 7}, ParamsError, "signature is a int"),
        ({"constexprs": {"BLOCK": 256, "GROUP": 8}}, ParamsError, "names 'GROUP'"),
        ({"constexprs": {"BLOCK": 100}}, CompileError, "power of 2"),
        ({"num_warps": 3}, CompileError, "power of 2"),
        ({"num_warps": 0}, ParamsError, "num_warps=0"),
        ({"num_warp": 4}, ParamsError, "'num_warp'.*num_warps"),
        ({"BLOCK": 256, "constexprs": {}}, ParamsError, "'BLOCK' is an argument of the kernel"),
        ({"arch": "sm_90a"}, ParamsError, "arch takes tokens"),
        ({"arch": []}, ParamsError, "names no architecture"),
        ({"arch": "sm70"}, ParamsError, "before sm75"),
        ({"name": "../add"}, ParamsError, "name="),
        ({"fn": len}, ParamsError, "no @triton.jit function"),
        ({"fn": triton_kernels.broken_kernel}, CompileError, "(?s)broken_kernel.*no_such_function"),
    ],
)
def test_what_compile_refuses(
    options: dict[str, Any], error: type[Exception], says: str, tmp_path: Path
) -> None:
    given = {"fn": add_kernel, "signature": SIGNATURE, "constexprs": BLOCK, "arch": "sm90"}
    out = tmp_path / "kernels"
    with pytest.raises(error, match=says):
        triton.compile(**{**given, **options}, out=out)
    assert not out.exists(), "nothing is written"


def test_without_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingPackageError, match=r"kernel_hub\[triton\]"):
        triton.compile(add_kernel, SIGNATURE, constexprs=BLOCK, out=tmp_path / "kernels")


def test_signatures_by_name_with_constants_and_hints(tmp_path: Path) -> None:
    by_name = {"x_ptr": "*fp32:16", "y_ptr": "*fp32:16", "out_ptr": "*fp32:16", "n": "i32"}
    common: dict[str, Any] = {"arch": "sm90", "out": tmp_path}
    names = {
        triton.compile(add_kernel, by_name, constexprs=BLOCK, **common),
        triton.compile(add_kernel, {**by_name, "BLOCK": "256"}, **common),
        triton.compile(add_kernel, f"{SIGNATURE}, 256", **common),
    }
    assert len(names) == 1, "they say the same"
    kernels = triton.collection(tmp_path)
    one = triton.compile(add_kernel, "*fp32,*fp32,*fp32,i32:1,256", **common)
    folded = triton.collection(tmp_path).function(one, arch="sm90")
    assert [a.name for a in folded.arguments] == ["x_ptr", "y_ptr", "out_ptr"]
    assert folded.constexprs == {"n": 1, "BLOCK": 256} and len(kernels) == 1


def test_host_tensor_descriptors(tmp_path: Path) -> None:
    pytest.importorskip("triton", "3.4", reason="descriptors are made by the host since then")
    name = triton.compile(
        triton_kernels.copy_kernel, "tensordesc<fp16[64, 64]>, tensordesc<fp16[64,64]>",
        constexprs={"BLOCK": 64}, arch="sm80,sm90", out=tmp_path,
    )  # fmt: skip
    kernels = triton.collection(tmp_path)
    plain, tma = (kernels.function(name, arch=arch) for arch in ("sm80", "sm90"))
    assert len(plain.arguments) == len(tma.arguments) == 2
    assert not plain.metadata.descriptors, "a pointer and numbers"
    assert [one.block for one in tma.metadata.descriptors] == [(64, 64)] * 2


def test_too_much_shared_memory_is_known_without_a_gpu(tmp_path: Path) -> None:
    config = {"BLOCK": 128, "num_warps": 8, "num_stages": 3}
    common: dict[str, Any] = {"signature": "*fp16:16,*fp16:16", "out": tmp_path}
    built = triton.compile_configs(
        triton_kernels.square_kernel, [config], arch="sm86,sm90", **common
    )
    left, kept = built
    assert left.entry is None and "bytes of shared memory" in left.problem and left.arch == "sm86"
    assert kept.entry is not None and (tmp_path / kept.entry.file).is_file()
    with pytest.raises(CompileError, match=r"sm86 has 101376: .* or leave sm86 out of arch"):
        triton.compile(
            triton_kernels.square_kernel, "*fp16:16,*fp16:16", constexprs={"BLOCK": 128},
            num_warps=8, arch="sm90,sm86", out=tmp_path,
        )  # fmt: skip


def test_the_configurations_of_autotune(tmp_path: Path) -> None:
    built = triton.compile_configs(
        triton_kernels.tuned_kernel, signature=SIGNATURE, arch="sm90", out=tmp_path
    )
    assert [one.configuration.constexprs for one in built] == [{"BLOCK": 64}, {"BLOCK": 128}]
    assert [one.configuration.options["num_warps"] for one in built] == [2, 4]
    with pytest.raises(ParamsError, match=r"no @triton\.autotune"):
        triton.compile_configs(add_kernel, signature=SIGNATURE, arch="sm90", out=tmp_path)
    with pytest.raises(ParamsError, match=r"a dict or a triton\.Config"):
        triton.compile_configs(add_kernel, [64], signature=SIGNATURE, out=tmp_path)


def test_a_damaged_collection_is_not_written_to(folder: Path) -> None:
    for text in ("{", '{"format": 9, "cubins": {}}', '{"format": 1, "cubins": {"a": {"sm90": 3}}}'):
        (folder / "manifest.json").write_text(text)
        before = files(folder)
        with pytest.raises(CubinCorruptError, match=r"manifest\.json"):
            triton.compile(add_kernel, SIGNATURE, constexprs=BLOCK, arch="sm90", out=folder)
        assert files(folder) == before


def damaged(folder: Path, change: Callable[[dict[str, Any]], None]) -> triton.TritonCollection:
    """The collection with `change` made to what is said of `add` for sm90."""
    file = folder / "manifest.json"
    raw = json.loads(file.read_text())
    change(raw["cubins"]["add"]["sm90"]["functions"]["add_kernel"]["triton"])
    file.write_text(json.dumps(raw))
    return triton.collection(folder)


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        (["metadata"], None, "triton.metadata"),
        (["metadata"], {}, "triton.metadata"),
        (["metadata", "num_warps"], 5, "num_warps"),
        (["metadata", "num_warps"], 8, "256 threads"),
        (["metadata", "shared"], -1, "shared"),
        (["metadata", "shared"], 1 << 60, "shared"),
        (["metadata", "target", "arch"], 80, "for sm80, found at 'add_kernel' for sm90"),
        (["metadata", "name"], "other", "'other'"),
        (["arguments"], {}, "triton.arguments"),
        (["arguments"], [], "parameters"),
        (["arguments", 3, "type"], "i64", "parameter 3"),
        (["arguments", 0, "divisors"], [0], "arguments"),
        (["configuration"], 5, "triton.configuration"),
        (["configuration", "constexprs"], [], "configuration.constexprs"),
    ],
)
def test_hostile_json_names_file_and_field(
    folder: Path, path: list[Any], value: object, says: str
) -> None:
    def change(raw: Any) -> None:
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = value

    with pytest.raises(KernelHubError) as caught:
        damaged(folder, change).function("add", arch="sm90")
    assert str(folder / "manifest.json") in str(caught.value)
    assert says in str(caught.value)


def test_sizes_that_cannot_be_name_file_and_field(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(file.read_text().replace('"int", 4,', '"int", 1180591620717411,'))
    with pytest.raises(CubinCorruptError, match=r"manifest\.json: cubins\.add.*params"):
        triton.collection(folder).function("add", arch="sm90")


def test_a_changed_image_is_not_loaded(folder: Path, fakecuda: FakeCuda) -> None:
    cubin = folder / "sm90/add.cubin"
    cubin.write_bytes(cubin.read_bytes()[:-1] + b"!")
    with pytest.raises(CubinCorruptError, match="sha256 expected"):
        triton.collection(folder)["add"]
    cubin.unlink()
    with pytest.raises(CubinNotFoundError, match=r"add\.cubin"):
        triton.collection(folder)["add"]
    assert fakecuda.calls("cuLibraryLoadData") == 0
