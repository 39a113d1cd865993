"""Which part of a foreign image is loaded where, every refusal's list, and PTX: log and cache."""

from __future__ import annotations

import importlib.util
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from fakecuda import FakeCuda
from fakecuda.helpers import arrays
from tiny_images import MIXED, PTX, SM80, SM90, entry, fatbin, ptx

from kernel_hub import Kernel, cache_folder
from kernel_hub.collection.resolve import ptx_refusal, refusal
from kernel_hub.cubin import unpack
from kernel_hub.errors import (
    CubinCorruptError,
    CubinNotFoundError,
    CudaDriverError,
    DriverNotFoundError,
    FunctionNotFoundError,
    LaunchConfigError,
)
from kernel_hub.image.foreign import ForeignImage, driver_floor
from kernel_hub.launch import probing

DATA = Path(__file__).parents[1] / "cubin/data"
ADD = {"add": "float* out, float* a, float* b, int n"}
Make = Callable[..., FakeCuda]


def launch_add(kernel: Kernel) -> None:
    kernel.add(4, 256, params=[*arrays(), 1024])


@pytest.mark.parametrize(
    ("capability", "image", "label"),
    [((8, 0), SM80, "(sm_80)"), ((8, 9), SM80, "(sm_80)"), ((9, 0), SM90, "(sm_90)")],
)
def test_the_entry_that_runs_goes_to_the_driver_alone(
    capability: tuple[int, int], image: bytes, label: str
) -> None:
    chosen = ForeignImage(MIXED, "mixed.fatbin").choose(capability)
    assert (chosen.read(), chosen.kind, chosen.jit_target) == (image, "cubin", "")
    assert chosen.label == f"mixed.fatbin {label}"
    assert chosen.minimum_driver == 13000


def test_ptx_is_for_gpus_that_no_code_fits() -> None:
    chosen = ForeignImage(MIXED, "mixed.fatbin").choose((12, 0))
    assert (chosen.kind, chosen.jit_target) == ("ptx", "sm_120")
    assert chosen.read().rstrip() == PTX.encode().rstrip()
    assert chosen.label == "mixed.fatbin (PTX 9.0 for sm_90)"
    newer = ForeignImage(fatbin(ptx("sm_80"), ptx("sm_90", "9.1"), ptx("sm_100")), "three")
    assert b".target sm_90" in newer.choose((9, 0)).read()
    assert newer.choose((9, 0)).minimum_driver == 13010
    assert b".target sm_80" in newer.choose((8, 9)).read()


def test_a_fatbin_with_nothing_for_the_gpu_says_what_it_has(fakecuda: FakeCuda) -> None:
    fakecuda.set_capability(0, 7, 5)
    kernel = Kernel(MIXED, signatures=ADD)
    assert kernel.function_names == ["add"]
    with pytest.raises(CubinNotFoundError) as caught:
        launch_add(kernel)
    assert caught.value.rejected == {
        "sm_61": "sm_61 code runs on 6.x only, this GPU is 7.5",
        "sm_80": "sm_80 code runs on 8.x only, this GPU is 7.5",
        "sm_90": "sm_90 code runs on 9.x only, this GPU is 7.5",
        "compute_90": "PTX for sm_90 needs 9.0 or later, this GPU is 7.5",
    }
    for target, reason in caught.value.rejected.items():
        assert f"{target}: {reason}" in str(caught.value)
    assert "code=sm_75" in str(caught.value)
    assert not fakecuda.calls("cuLibraryLoadData") and not fakecuda.calls("cuLinkCreate_v2")


def test_entries_that_nobody_reads_are_named_even_on_their_gpu() -> None:
    linked = fatbin(entry(8, 90, b"link-time code"), entry(2, 61, b"\x7fELF"))
    with pytest.raises(CubinNotFoundError) as caught:
        ForeignImage(linked, "x").choose((6, 1))
    assert "before sm_70" in caught.value.rejected["sm_61"]
    with pytest.raises(CubinNotFoundError) as caught:
        ForeignImage(linked, "x").choose((9, 0))
    assert "nvlink" in caught.value.rejected["lto_90"]


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (fatbin(entry(2, 90, SM80)), r"sm_90: it holds cubin for sm_80"),
        (fatbin(ptx("sm_80"), entry(2, 90, SM90[:-64])), r"sm_90 is not read, because trunc"),
        (fatbin(entry(1, 90, b".version 9.0\n.target sm_80\n")), "it holds ptx for sm_80"),
    ],
)
def test_an_entry_that_is_not_what_it_says(image: bytes, words: str) -> None:
    with pytest.raises(CubinCorruptError, match=words):
        ForeignImage(image, "x").choose((9, 0))


def test_a_damaged_entry_for_another_gpu_is_in_nobodys_way() -> None:
    """Only what is loaded must be sound; the driver is not asked about the rest."""
    image = ForeignImage(
        fatbin(entry(2, 80, SM80[:-64]), entry(2, 90, SM90), entry(9, 90, b"?")), "x"
    )
    assert image.names() == ["add"]
    assert image.choose((9, 0)).read() == SM90
    with pytest.raises(CubinCorruptError, match="sm_80 is not read, because truncated"):
        image.choose((8, 6))  # the driver would take the damaged one
    with pytest.raises(CubinNotFoundError) as caught:
        image.choose((12, 0))
    assert "neither PTX (1) nor cubin (2)" in str(caught.value)


def test_the_first_of_several_entries_for_one_architecture_counts() -> None:
    """As with the driver, measured: what the others hold is not offered."""
    huge = (DATA / "huge_sm90.cubin").read_bytes()
    image = ForeignImage(fatbin(entry(2, 90, SM90), entry(2, 90, huge), ptx("sm_80")), "x")
    assert image.names() == ["add"]
    assert image.choose((9, 0)).read() == SM90


def test_compressed_entries_that_only_the_driver_unpacks(
    fakecuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpack, "_zstd", lambda: None)
    whole = (DATA / "size.fatbin").read_bytes()
    with pytest.raises(FunctionNotFoundError, match=r"pass function_names=\["):
        Kernel(whole)
    kernel = Kernel(whole, ["add"])
    assert kernel._image.choose((9, 0)).read() == whole
    later = kernel._image.choose((12, 0))
    assert (later.kind, later.jit_target, later.minimum_driver) == ("fatbin", "sm_120", 13000)
    fakecuda.set_jit(SM90)
    fakecuda.set_capability(0, 12, 0)
    probed: list[bytes] = []
    monkeypatch.setattr(probing, "_ask", lambda image, *_: probed.append(image) or "")
    kernel.add.load()
    assert fakecuda.calls("cuLinkAddData_v2") == 1
    kernel.unload()
    kernel.add.load()
    assert probed == [whole]  # in a child process, and once for all
    # Code that can be read lists its functions; one that is only in what cannot be is let through.
    half = Kernel(DATA / "compressed.fatbin", ["add", "elsewhere"])
    assert Kernel(DATA / "compressed.fatbin").function_names == ["add"]
    assert half.elsewhere.spec.params is None


@pytest.mark.parametrize(
    ("capability", "target", "reason"),
    [
        ((8, 9), "sm_90", "PTX for sm_90 needs 9.0 or later, this GPU is 8.9"),
        ((10, 0), "sm_90a", "PTX for sm_90a runs on exactly 9.0, this GPU is 10.0"),
        ((9, 0), "sm_100f", "PTX for sm_100f runs on 10.x only, this GPU is 9.0"),
        ((10, 0), "sm_103f", "PTX for sm_103f needs 10.3 or later, this GPU is 10.0"),
        ((9, 0), "sm_90a", None), ((10, 3), "sm_100f", None), ((12, 0), "sm_50", None),
    ],
)  # fmt: skip
def test_ptx_targets(capability: tuple[int, int], target: str, reason: str | None) -> None:
    assert ptx_refusal(capability, target) == reason


def test_family_code_runs_on_later_minor_versions() -> None:
    assert refusal((10, 3), "sm_100f") is None
    assert "exactly 10.0" in str(refusal((10, 3), "sm_100a"))


def test_ptx_for_a_newer_gpu_or_driver_never_reaches_it(fakecuda: FakeCuda, tmp_path: Path) -> None:
    path = tmp_path / "later.ptx"
    path.write_text(PTX.replace("sm_90", "sm_100"))
    with pytest.raises(CubinNotFoundError, match=r"compute_100: PTX for sm_100 needs 10\.0"):
        Kernel(path).add.load()
    path.write_text(PTX.replace(".version 9.0", ".version 9.1"))
    with pytest.raises(DriverNotFoundError) as caught:
        Kernel(path).add.load()
    text = str(caught.value)
    assert "PTX 9.1 for sm_90" in text and "CUDA 13.1 or later" in text and "of CUDA 13.0" in text
    assert not fakecuda.calls("cuLinkCreate_v2") and not fakecuda.calls("cuLibraryLoadData")


@pytest.mark.parametrize(
    ("toolkit", "floor"), [(None, 12000), ((11, 1), 12000), ((12, 9), 12000), ((13, 4), 13000)]
)
def test_the_driver_that_code_needs(toolkit: tuple[int, int] | None, floor: int) -> None:
    assert driver_floor(toolkit) == floor


def test_ptx_as_text(fakecuda: FakeCuda) -> None:
    launch_add(Kernel(PTX, signatures=ADD))
    with pytest.raises(CubinCorruptError, match="neither cubin, fatbin nor PTX"):
        Kernel("__global__ void add() {}\n")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where compiled PTX goes in this test."""
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "ptx"


def test_ptx_is_compiled_once_and_kept(fakecuda: FakeCuda, cache: Path) -> None:
    fakecuda.set_jit(SM90, "ptxas info : Used 12 registers")
    kernel = Kernel(PTX.encode(), signatures=ADD)
    for _ in range(3):
        launch_add(kernel)
        assert kernel.jit_log() == "ptxas info : Used 12 registers"
        kernel.unload()
    assert fakecuda.calls("cuLinkComplete") == fakecuda.calls("cuLinkDestroy") == 1
    assert fakecuda.calls("cuLibraryLoadData") == 3
    assert fakecuda.launch().params is not None  # sizes: the machine code was loaded
    (kept,) = cache.iterdir()
    assert SM90 in kept.read_bytes()
    assert Kernel(SM90, signatures=ADD).jit_log() == ""


def test_each_text_and_gpu_and_driver_has_its_own(make_fakecuda: Make, cache: Path) -> None:
    for version in (13000, 13010):
        fake = make_fakecuda(devices=3, version=version)
        fake.set_jit(SM90)
        fake.set_capability(2, 12, 0)
        kernel = Kernel(PTX.encode(), signatures=ADD)
        for device in range(3):
            kernel.add.load(device)
        assert fake.calls("cuLinkComplete") == 2  # devices 0 and 1 are alike
        Kernel(PTX.encode() + b"\n").add.load(0)
        assert fake.calls("cuLinkComplete") == 3
    assert len(list(cache.iterdir())) == 6


@pytest.mark.parametrize("damaged", [b"", b"x" * 31, b"x" * 4000])
def test_a_damaged_entry_is_made_again(fakecuda: FakeCuda, cache: Path, damaged: bytes) -> None:
    fakecuda.set_jit(SM90)
    kernel = Kernel(PTX.encode(), signatures=ADD)
    kernel.load()
    kernel.unload()
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(damaged)
    with pytest.warns(RuntimeWarning, match="damaged and is made anew"):
        launch_add(kernel)
    assert kept.read_bytes() == whole
    assert fakecuda.calls("cuLinkComplete") == 2


def _jit_entry(image: bytes, log: bytes = b"said") -> bytes:
    return struct.pack("<I", len(log)) + log + image


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "it is 0 bytes"),
        (struct.pack("<I", 1 << 31) + SM90, "not an ELF image"),
        (_jit_entry(b"garbage"), "not an ELF image"),
        (_jit_entry(SM90[:700]), "truncated"),
        (_jit_entry((DATA / "huge_sm90.cubin").read_bytes()), "it holds no add"),
        (_jit_entry(PTX.encode()), "not an ELF image"),
    ],
)
def test_machine_code_is_read_before_the_driver_gets_it(
    fakecuda: FakeCuda, cache: Path, content: bytes, reason: str
) -> None:
    """An entry sealed as it should be, of something else."""
    fakecuda.set_jit(SM90, "of the driver")
    kernel = Kernel(PTX.encode(), signatures=ADD)
    kernel.load()
    kernel.unload()
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    assert cache_folder.store("ptx", kept.name, content)
    with pytest.warns(RuntimeWarning, match=f"{kept.name} is damaged and is made anew: .*{reason}"):
        launch_add(kernel)
    assert kernel.jit_log() == "of the driver"
    assert kept.read_bytes() == whole
    assert fakecuda.calls("cuLinkComplete") == 2


def test_entries_that_changed_places_are_not_taken(fakecuda: FakeCuda, cache: Path) -> None:
    """Two texts with one function of one signature: only the entry's name tells them apart."""
    texts = {"one": PTX.encode(), "two": PTX.encode() + b"\n"}
    for log, text in texts.items():
        fakecuda.set_jit(SM90, log)
        with Kernel(text) as kernel:
            assert kernel.jit_log() == log
    first, second = cache.iterdir()
    first.rename(cache / "first")
    second.rename(first)
    (cache / "first").rename(second)
    for log, text in texts.items():
        fakecuda.set_jit(SM90, log + " anew")
        with Kernel(text) as kernel, pytest.warns(RuntimeWarning, match="damaged"):
            assert kernel.jit_log() == log + " anew"


def test_code_that_the_reader_does_not_know_runs_and_is_not_kept(
    fakecuda: FakeCuda, cache: Path
) -> None:
    fakecuda.set_jit(SM90 + b"of a later driver")
    kernel = Kernel(PTX.encode(), signatures=ADD)
    launch_add(kernel)
    assert fakecuda.launch_count == 1
    assert not cache.exists()


@pytest.mark.parametrize("value", ["0", "file"])
def test_without_a_cache(
    fakecuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """Off, or a folder that cannot be: the launch goes on."""
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv(cache_folder.VARIABLE, value if value == "0" else str(tmp_path / value))
    launch_add(Kernel(PTX.encode(), signatures=ADD))
    assert fakecuda.calls("cuLinkComplete") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_ptx_that_does_not_compile(fakecuda: FakeCuda, cache: Path) -> None:
    fakecuda.fail_jit(218, "ptxas application ptx input, line 31; error : Unknown opcode")
    with pytest.raises(CudaDriverError, match=r"JIT log: .*line 31; error") as caught:
        Kernel(PTX.encode()).add.load()
    assert (caught.value.call, caught.value.code) == ("cuLinkAddData_v2", 218)
    assert "PTX 9.0 for sm_90" in str(caught.value) and "for sm_90" in str(caught.value)
    assert fakecuda.calls("cuLinkDestroy") == 1
    assert not cache.exists()


def test_a_required_block_is_known_before_the_driver(fakecuda: FakeCuda, cache: Path) -> None:
    text = PTX.replace("\n)\n{", "\n)\n.reqntid 128, 1, 1\n{")
    kernel = Kernel(text.encode(), signatures=ADD)
    assert kernel.add.spec.required_block == (128, 1, 1)
    with pytest.raises(LaunchConfigError, match="128"):
        launch_add(kernel)


@pytest.mark.skipif(
    importlib.util.find_spec("cpm_kernels") is None, reason="cpm_kernels is not installed"
)
def test_fatbins_of_cuda_11_1() -> None:
    spec = importlib.util.find_spec("cpm_kernels")
    assert spec is not None and spec.origin is not None
    paths = sorted(Path(spec.origin).parent.glob("kernels/cuda/*.fatbin"))
    assert len(paths) > 8
    for path in paths:
        image = ForeignImage(path.read_bytes(), path.name)
        assert image.names()
        assert image.choose((8, 9)).label == f"{path.name} (sm_86)"
        with pytest.raises(CubinNotFoundError) as caught:
            image.choose((9, 0))
        assert set(caught.value.rejected) == {f"sm_{a}" for a in (61, 62, 70, 72, 75, 80, 86)}
