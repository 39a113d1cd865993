"""Kernel.image: the bytes that a device would be given, of every kind of image."""

from __future__ import annotations

import hashlib
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from fakecuda import FakeCuda

from kernel_hub import Kernel
from kernel_hub.collection.manifest import Collection, CubinEntry, find_collection
from kernel_hub.cubin import image_kind, read_cubin, read_fatbin, unpack
from kernel_hub.errors import (
    CubinCorruptError,
    CubinNotFoundError,
    CudaDriverError,
    FunctionNotFoundError,
    ParamsError,
)
from kernel_hub.image.shipped import ShippedImage
from kernel_hub.kernel import read_ahead

DATA = Path(__file__).parents[1] / "cubin/data"
ROOT = Path(__file__).parents[2]
ADD = {"add": "float* out, float* a, float* b, int n"}
CAPABILITIES = [(8, 0), (8, 6), (8, 9), (9, 0)]
Make = Callable[..., FakeCuda]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_a_shipped_cubin(make_fakecuda: Make, capability: tuple[int, int]) -> None:
    fake = make_fakecuda(capability=capability)
    kernel = Kernel("append_kv")
    image = kernel.image()
    arch = "sm90" if capability == (9, 0) else "sm80"  # 8.9 runs that too
    entry = find_collection("kernel_hub").manifest.cubins["append_kv"][arch]
    assert hashlib.sha256(image).hexdigest() == entry.sha256
    assert image == (ROOT / "cubins" / arch / "append_kv.cubin").read_bytes()
    assert fake.calls("cuLibraryLoadData") == fake.calls("cuDevicePrimaryCtxRetain") == 0
    kernel.load()
    assert kernel.image() == kernel.image(0) == image
    kernel.unload()
    assert kernel.image() == image


def test_one_image_a_device(make_fakecuda: Make) -> None:
    fake = make_fakecuda(devices=3)
    fake.set_capability(1, 8, 0)
    fake.set_capability(2, 7, 5)
    kernel = Kernel("rms_norm")
    assert [read_cubin(kernel.image(device)).arch for device in (0, 1)] == ["sm90", "sm80"]
    with pytest.raises(CubinNotFoundError, match=r"no cubin for compute capability 7\.5"):
        kernel.image(2)
    for wrong in (3, -1):
        with pytest.raises(CudaDriverError):
            kernel.image(wrong)
    with pytest.raises((ParamsError, ValueError, TypeError), match="device"):
        kernel.image("first")


def test_files_bytes_and_declared_types(fakecuda: FakeCuda) -> None:
    path = DATA / "tiny_sm90.cubin"
    for given in (path, str(path), path.read_bytes(), memoryview(path.read_bytes())):
        assert Kernel(given).image() == path.read_bytes()
    assert Kernel(path, ["add"], signatures=ADD).image() == path.read_bytes()
    assert Kernel(Kernel(path).image()).function_names == Kernel(path).function_names


@pytest.mark.parametrize("name", ["plain.fatbin", "speed.fatbin"])
def test_of_a_fatbin_the_entry_that_is_loaded(make_fakecuda: Make, name: str) -> None:
    """Also where it is packed (LZ4): what goes out is the text or code itself."""
    whole = (DATA / name).read_bytes()
    entries = [entry for entry in read_fatbin(whole).entries if entry.image]
    seen = set()
    for capability in [*CAPABILITIES, (12, 0)]:
        fake = make_fakecuda(capability=capability)
        fake.set_jit((DATA / "tiny_sm90.cubin").read_bytes())
        kernel = Kernel(whole)
        image = kernel.image()
        (entry,) = [entry for entry in entries if entry.image == image]
        assert (image_kind(image), image in whole) == (entry.kind, not entry.compressed)
        seen.add((entry.kind, entry.target, entry.compressed))
        kernel.load()
        assert kernel.image() == image
    is_packed = name == "speed.fatbin"
    assert seen == {
        ("cubin", "sm_80", False),
        ("cubin", "sm_90a", False),
        ("ptx", "sm_90", is_packed),
    }


def test_ptx_goes_out_as_text(fakecuda: FakeCuda) -> None:
    text = (DATA / "tiny_sm90.ptx").read_text()
    fakecuda.set_jit((DATA / "tiny_sm90.cubin").read_bytes())
    kernel = Kernel(text, signatures=ADD)
    assert kernel.image() == text.encode()
    kernel.load()  # machine code now, of this driver alone
    assert kernel.image() == text.encode()
    assert Kernel(kernel.image()).add.spec.params == Kernel(text).add.spec.params


def test_what_only_the_driver_unpacks(fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpack, "_zstd", lambda: None)
    whole = (DATA / "size.fatbin").read_bytes()
    assert Kernel(whole, ["add"]).image() == whole


def test_a_compiled_source(make_fakecuda: Make) -> None:
    pytest.importorskip("cuda.core", reason="the extra `jit` (cuda-core) is not installed")
    make_fakecuda()
    code = 'extern "C" __global__ void put(float* out, float x) { *out = x; }'
    kernel = Kernel.from_source(code, arch="sm90")
    image = kernel.image()
    assert list(read_cubin(image).functions) == ["put"]
    assert Kernel(image).put.signature == "put(<8 bytes> arg0, <4 bytes> arg1)"
    make_fakecuda(capability=(8, 0))
    with pytest.raises(CubinNotFoundError):
        kernel.image()


def test_a_shipped_file_that_changed(
    fakecuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a load: by its digest."""
    shipped = tmp_path / "shipped_cubins_of_a_test" / "cubins"
    (shipped / "sm90").mkdir(parents=True)
    (shipped.parent / "__init__.py").touch()
    for file in ("manifest.json", "sm90/launch_probe.cubin"):
        shutil.copy(ROOT / "cubins" / file, shipped / file)
    monkeypatch.syspath_prepend(tmp_path)
    kernel = Kernel("launch_probe", package=shipped.parent.name)
    path = shipped / "sm90/launch_probe.cubin"
    assert kernel.image() == path.read_bytes()
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CubinCorruptError, match="sha256"):
        kernel.image()


def test_what_is_shipped_is_listed_when_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[str] = []
    names = ShippedImage.names
    monkeypatch.setattr(
        ShippedImage, "names", lambda image: listed.append(image.label) or names(image)
    )
    kernel = Kernel("launch_probe")
    function = kernel.launch_probe_5
    assert kernel["launch_probe_5"] is function and not listed
    assert not hasattr(kernel, "_repr_html_")
    with pytest.raises(FunctionNotFoundError, match="launch_probe_5"):
        kernel["launch_probe_05"]
    assert listed
    assert kernel.function_names == names(kernel._image) == [*kernel]
    assert "launch_probe_5" in kernel and "launch_probe_05" not in kernel and 5 not in kernel
    with pytest.raises(FunctionNotFoundError):
        kernel[5]  # type: ignore[index]
    only = Kernel("launch_probe", ["launch_probe_5"])
    assert only.function_names == ["launch_probe_5"]
    other = next(name for name in kernel if name != "launch_probe_5")
    with pytest.raises(FunctionNotFoundError):
        only[other]


def test_a_shipped_image_is_read_ahead_once(
    monkeypatch: pytest.MonkeyPatch, fakecuda: FakeCuda
) -> None:
    reads: list[str] = []
    read = Collection.read

    def noted(collection: Collection, entry: CubinEntry) -> bytes:
        reads.append(entry.arch)
        return read(collection, entry)

    monkeypatch.setattr(Collection, "read", noted)
    kernel = Kernel("launch_probe")
    for _ in range(2):
        read_ahead(kernel, (9, 0))
    assert reads == ["sm90"] and fakecuda.calls("cuLibraryLoadData") == 0
    kernel.load()
    assert reads == ["sm90"] and fakecuda.calls("cuLibraryLoadData") == 1
    read_ahead(kernel, (9, 0))  # nobody would ask for it again
    read_ahead(kernel, (7, 0))  # nothing is shipped for it: the load says so
    read_ahead(Kernel(DATA / "tiny_sm90.cubin"), (9, 0))
    assert reads == ["sm90"] and not kernel._shipped._ahead  # type: ignore[union-attr]
    expected = (ROOT / "cubins/sm90/launch_probe.cubin").read_bytes()
    assert kernel.image() == expected and reads == ["sm90"] * 2


def test_a_load_waits_for_what_is_being_read_ahead(
    monkeypatch: pytest.MonkeyPatch, fakecuda: FakeCuda
) -> None:
    reads, is_reading, may_end = [0], threading.Event(), threading.Event()
    read = Collection.read

    def slow(collection: Collection, entry: CubinEntry) -> bytes:
        reads[0] += 1
        is_reading.set()
        assert may_end.wait(20)
        return read(collection, entry)

    monkeypatch.setattr(Collection, "read", slow)
    kernel = Kernel("launch_probe")
    ahead = threading.Thread(target=read_ahead, args=(kernel, (9, 0)))
    ahead.start()
    assert is_reading.wait(20)
    load = threading.Thread(target=kernel.load)
    load.start()
    load.join(0.1)
    assert load.is_alive()
    may_end.set()
    load.join(20)
    ahead.join(20)
    assert reads == [1] and fakecuda.calls("cuLibraryLoadData") == 1


def test_a_damaged_image_is_said_by_the_load_and_not_ahead(
    monkeypatch: pytest.MonkeyPatch, fakecuda: FakeCuda
) -> None:
    def refuse(collection: Collection, entry: CubinEntry) -> bytes:
        raise CubinCorruptError("damaged")

    kernel = Kernel("launch_probe")
    with monkeypatch.context() as patched:
        patched.setattr(Collection, "read", refuse)
        read_ahead(kernel, (9, 0))
        with pytest.raises(CubinCorruptError, match="damaged"):
            kernel.load()
    kernel.load()
    assert fakecuda.calls("cuLibraryLoadData") == 1
