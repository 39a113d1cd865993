"""What read_cubin says of sound cubins, against what their sources say and against cuobjdump."""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import subprocess
import time
from pathlib import Path

import pytest

from kernel_hub.cubin import CubinInfo, image_kind, read_cubin
from kernel_hub.cubin.elf import read_elf
from kernel_hub.errors import CubinCorruptError

DATA = Path(__file__).parent / "data"
IMAGES = sorted(DATA.glob("*.cubin"))
FEATURES = [path for path in IMAGES if "features" in path.name]
NVCC, NVRTC, TRITON_90 = (13, 0), (12, 9), (13, 4)


def read(name: str) -> CubinInfo:
    return read_cubin((DATA / f"{name}.cubin").read_bytes())


def sizes(info: CubinInfo, function: str) -> list[tuple[int, int]]:
    return [(param.offset_bytes, param.size_bytes) for param in info.functions[function].params]


@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_every_image_is_accepted(path: Path) -> None:
    image = path.read_bytes()
    info = read_cubin(image)
    assert image_kind(image) == "cubin"
    assert info.size_bytes == len(image)
    assert info.functions
    assert all(section.offset <= len(image) for section in info.sections)
    assert all(0 < function.num_regs <= 255 for function in info.functions.values())


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_any_buffer_is_taken(kind: type) -> None:
    assert read_cubin(kind((DATA / "tiny_sm90.cubin").read_bytes())) == read("tiny_sm90")


@pytest.mark.parametrize(
    ("name", "arch", "target", "os_abi", "abi_version", "toolkit"),
    [
        ("features_sm80", "sm80", "sm_80", 0x41, 8, NVCC),
        ("features_sm89", "sm89", "sm_89", 0x41, 8, NVCC),
        ("features_sm90", "sm90", "sm_90", 0x41, 8, NVCC),
        ("features_sm90a", "sm90", "sm_90a", 0x41, 8, NVCC),
        ("nvrtc_features_sm80", "sm80", "sm_80", 0x33, 7, NVRTC),
        ("nvrtc_tiny_sm89", "sm89", "sm_89", 0x33, 7, NVRTC),
        ("nvrtc_features_sm90", "sm90", "sm_90", 0x33, 7, NVRTC),
        ("nvrtc_features_sm90a", "sm90", "sm_90a", 0x33, 7, NVRTC),
        ("triton_sm80", "sm80", "sm_80", 0x33, 7, NVRTC),
        ("triton_sm90", "sm90", "sm_90a", 0x41, 8, TRITON_90),
        ("linked_sm90", "sm90", "sm_90", 0x41, 8, NVCC),
        ("tiny_sm120", "sm120", "sm_120", 0x41, 8, NVCC),
        ("cuda117_tiny_sm70_lineinfo", "sm70", "sm_70", 0x33, 7, (11, 7)),
        ("cuda117_tiny_sm75", "sm75", "sm_75", 0x33, 7, (11, 7)),
        ("cuda117_features_sm80", "sm80", "sm_80", 0x33, 7, (11, 7)),
        ("cuda118_tiny_sm86_debug", "sm86", "sm_86", 0x33, 7, (11, 8)),
        ("cuda118_features_sm90", "sm90", "sm_90", 0x33, 7, (11, 8)),
        ("cuda120_tiny_sm90", "sm90", "sm_90", 0x33, 7, (12, 0)),
        ("cuda121_features_sm90a", "sm90", "sm_90a", 0x33, 7, (12, 1)),
        ("cuda124_pointers_sm90", "sm90", "sm_90", 0x33, 7, (12, 4)),
    ],
)
def test_target(
    name: str, arch: str, target: str, os_abi: int, abi_version: int, toolkit: tuple[int, int]
) -> None:
    info = read(name)
    assert (info.arch, info.target, info.toolkit) == (arch, target, toolkit)
    assert (info.os_abi, info.abi_version) == (os_abi, abi_version)
    assert info.arch_specific == target.endswith("a")
    assert info.compute_capability == divmod(int(arch[2:]), 10)


@pytest.mark.parametrize("path", FEATURES, ids=lambda path: path.stem)
def test_features(path: Path) -> None:
    info = read_cubin(path.read_bytes())
    expected = {"scale", "staged", "empty", "by_value", "calls"}
    if info.compute_capability == (9, 0):
        expected |= {"clustered"}
        assert info.functions["clustered"].cluster == (2, 1, 1)
        assert info.functions["clustered"].max_threads == 64
    assert set(info.functions) == expected

    assert sizes(info, "scale") == [(0, 8), (8, 8), (16, 4), (20, 4)]
    assert sizes(info, "by_value") == [(0, 80), (80, 1), (82, 2), (88, 8), (96, 8)]
    assert sizes(info, "empty") == []
    assert [param.ordinal for param in info.functions["scale"].params] == [0, 1, 2, 3]

    assert info.functions["scale"].max_threads == 256
    assert info.functions["staged"].max_threads == 128
    assert info.functions["empty"].max_threads is None
    assert info.functions["staged"].static_shared_bytes == 512
    assert info.functions["scale"].static_shared_bytes == 0
    assert info.functions["calls"].local_bytes >= 256
    assert info.functions["scale"].local_bytes == 0
    assert not any(function.cooperative for function in info.functions.values())
    assert all(function.required_block is None for function in info.functions.values())

    variables = {  # but for those that NVRTC 12.1 includes by itself
        name: variable.size_bytes
        for name, variable in info.globals.items()
        if "2nv6target" not in name
    }
    assert variables == {"table": 256, "counter": 4, "lookup": 32}
    assert info.globals["table"].section == ".nv.constant3"
    assert info.globals["counter"].section == ".nv.global"
    assert info.globals["lookup"].section == ".nv.global.init"


@pytest.mark.parametrize("name", ["cooperative_sm80", "cooperative_sm90"])
def test_grid_sync_is_seen(name: str) -> None:
    functions = read(name).functions
    assert functions["grid_wide"].cooperative
    assert not functions["block_wide"].cooperative


def test_cluster_bound() -> None:
    function = read("cooperative_sm90").functions["block_wide"]
    assert (function.max_cluster_rank, function.max_threads) == (8, 128)


@pytest.mark.parametrize("name", ["huge_sm80", "huge_sm90"])
def test_more_than_4_kib_of_params(name: str) -> None:
    assert sizes(read(name), "huge") == [(0, 4100), (4104, 8), (4112, 4)]


@pytest.mark.parametrize("name", ["triton_sm80", "triton_sm90"])
def test_triton(name: str) -> None:
    """Three pointers and n, then the two scratch pointers Triton adds; the block is fixed."""
    info = read(name)
    assert sizes(info, "add_kernel") == [(0, 8), (8, 8), (16, 8), (24, 4), (32, 8), (40, 8)]
    assert info.functions["add_kernel"].required_block == (128, 1, 1)


def test_a_stack_that_is_told_twice() -> None:
    """12.4 writes two sizes for a kernel that calls through pointers: the larger one counts."""
    assert read("cuda124_pointers_sm80").functions["pointers"].local_bytes == 8


def early(image: bytes, version: int, segments: bool) -> bytes:
    """An image of 11.7 or 11.8 in the frame of an earlier toolkit: see `layout`."""
    header = list(struct.unpack_from("<16sHHIQQQIHHHHHH", image))
    end = header[6] + 64 * header[12]  # of the section table
    tail = b""
    if segments:  # without that of the program headers themselves
        table = [list(s) for s in struct.iter_unpack("<IIQQQQQQ", image[end:])]
        table = [s for s in table if (s[0], s[2]) != (1, end)]
        table[0][5:7] = [56 * len(table)] * 2
        tail = b"".join(struct.pack("<IIQQQQQQ", *s) for s in table)
    header[5], header[9], header[10] = (end, 56, len(tail) // 56) if segments else (0, 0, 0)
    header[3] = version
    return struct.pack("<16sHHIQQQIHHHHHH", *header) + image[64:end] + tail


@pytest.mark.parametrize(("version", "segments"), [(114, True), (115, False), (117, False)])
@pytest.mark.parametrize("name", ["cuda118_features_sm90", "cuda118_tiny_sm86_debug"])
def test_frames_of_early_toolkits(name: str, version: int, segments: bool) -> None:
    """What toolkits before 11.8 left out may be missing from theirs, and from no other's."""
    image = (DATA / f"{name}.cubin").read_bytes()
    records = [f.offset for f in read_cubin(image).sections if f.name.startswith(".nv.info.")]
    made = bytearray(early(image, version, segments))
    for offset in records:  # they may not name a later toolkit than the image's
        at = made.index(b"\x04\x37\x04\x00", offset)
        made[at + 4] = version
    info = read_cubin(bytes(made))
    assert info.toolkit == divmod(version, 10)
    assert info.functions == read_cubin(image).functions
    for other in (120,) if segments else (118, 120):  # some builds of 11.8 leave it out too
        made[20] = other
        with pytest.raises(CubinCorruptError):
            read_cubin(bytes(made))
    with pytest.raises(CubinCorruptError):
        read_cubin(bytes(made) + bytes(56))


@pytest.mark.parametrize("version", [101, 110])
def test_frames_of_cuda_10_and_11_0(version: int) -> None:
    """Two loads whose sizes leave out padding (10.x) or reach up to the section headers."""
    image = bytearray((DATA / "cuda117_features_sm80.cubin").read_bytes())
    shoff, count = struct.unpack_from("<Q", image, 40)[0], struct.unpack_from("<H", image, 60)[0]
    table = [struct.unpack_from("<IIQQQQIIQQ", image, shoff + 64 * i) for i in range(count)]
    seen = [s for s in table if s[2] & 3 == 2]
    stored, placed = ([s for s in table if s[2] & 3 == 3 and (s[1] == 8) == is_placed]
                      for is_placed in (False, True))  # fmt: skip
    start, end = stored[0][4], stored[-1][4] + stored[-1][5]
    packed = sum(s[5] for s in seen)
    whole = seen[-1][4] + seen[-1][5] - seen[0][4]
    read_bytes = packed if version == 101 else whole
    # 0x200 bytes of staged and 4 of counter; 11.0 aligns the one behind the other.
    placed_bytes = 0x200 if version == 101 else 0x200 + 16
    assert packed < whole and max(s[5] for s in placed) == 0x200
    phoff, size = len(image), 3 * 56
    loads = [
        (6, 5, phoff, 0, 0, size, size, 8),
        (1, 5, seen[0][4], 0, 0, read_bytes, read_bytes, 8),
        (1, 6, start, 0, 0, shoff - start, end - start + placed_bytes, 8),
    ]
    struct.pack_into("<I", image, 20, version)
    struct.pack_into("<QQ", image, 32, phoff, shoff)
    struct.pack_into("<HH", image, 54, 56, 3)
    for record in re.finditer(rb"\x04\x37\x04\x00.\x00\x00\x00", image):
        image[record.start() + 4] = version
    made = bytes(image) + b"".join(struct.pack("<IIQQQQQQ", *load) for load in loads)
    info = read_cubin(made)
    assert info.toolkit == divmod(version, 10) and info.unknown == ()
    assert info.functions == read("cuda117_features_sm80").functions
    for at in (phoff + 56 + 32, phoff + 112 + 32, phoff + 112 + 40):
        wrong = bytearray(made)
        wrong[at] ^= 8
        (text,) = read_cubin(bytes(wrong)).unknown
        assert "program headers that divide the sections as no known toolkit does" in text


@pytest.mark.parametrize("arch", [80, 90])
def test_what_was_once_called_corrupt(arch: int) -> None:
    """16-bit atomics, a barrier's copies, dynamic shared memory aligned beside variables."""
    info = read(f"genuine_sm{arch}")
    assert info.unknown == ()
    kernels = ["add_half", "add_bf16", "swap16", "one", "two", "copies"]
    assert sorted(info.functions) == sorted(kernels)
    assert {name: v.size_bytes for name, v in info.globals.items()} == {"started": 12, "empty": 20}


@pytest.mark.parametrize(("code", "value"), [(0x0C, 2), (0x0D, 0x100)])
def test_what_a_linker_says_of_compatibility(code: int, value: int) -> None:
    """nvJitLink 13.4 of relocatable code for sm_90a of nvcc 13.0; ptxas 13.4 says 0 and 0x101."""
    image = bytearray((DATA / "triton_sm90.cubin").read_bytes())
    (section,) = [s for s in read_elf(bytes(image)).sections if s.name == ".nv.compat"]
    at = image.index(bytes([2 if code == 0x0C else 3, code]), section.offset)
    assert at < section.offset + section.size
    image[at + 2 : at + 4] = value.to_bytes(2, "little")
    assert read_cubin(bytes(image)).unknown == ()


def test_code_that_is_not_padded() -> None:
    """Large functions of ptxas 12.4 may end anywhere: so do 31 images of sgl_kernel 0.1.9."""
    image = bytearray((DATA / "genuine_sm90.cubin").read_bytes())
    shoff, count = struct.unpack_from("<Q", image, 40)[0], struct.unpack_from("<H", image, 60)[0]
    at = [shoff + 64 * i for i in range(count)]
    table = [struct.unpack_from("<IIQQQQIIQQ", image, one) for one in at]
    texts = [i for i, s in enumerate(table) if s[1] == 1 and s[2] & 7 == 6]
    symbols = next(s for s in table if s[1] == 2)
    first = texts[0]  # the next one begins where it did
    assert table[first + 1][8] == 128
    for missing, is_whole in ((112, True), (16, True), (8, False)):
        made = bytearray(image)
        size = table[first][5] - missing
        struct.pack_into("<Q", made, at[first] + 32, size)
        made[table[first][4] + size : table[first + 1][4]] = bytes(missing)
        with pytest.raises(CubinCorruptError):  # its function has another size
            read_cubin(bytes(made))
        for symbol in range(symbols[4], symbols[4] + symbols[5], 24):
            _, info, _, section, _, _ = struct.unpack_from("<IBBHQQ", made, symbol)
            if info & 15 == 2 and section == first:
                struct.pack_into("<Q", made, symbol + 16, size)
        if is_whole:
            assert read_cubin(bytes(made)).unknown == ()
        else:
            with pytest.raises(CubinCorruptError, match="no whole instructions"):
                read_cubin(bytes(made))


def test_cuda_9_is_unknown() -> None:
    """Its images are read (232 of MXNet's for CUDA 9.2), but none could be given to a driver."""
    image = bytearray(early((DATA / "cuda117_tiny_sm75.cubin").read_bytes(), 117, False))
    assert read_elf(bytes(image)).unknown == []
    image[20] = 92
    (said,) = read_elf(bytes(image)).unknown
    assert said.startswith("code of CUDA 9.2, ")
    image[20] = 89
    with pytest.raises(CubinCorruptError, match="belongs to no known toolkit"):
        read_elf(bytes(image))


def test_linked_image_lists_kernels_only() -> None:
    info = read("linked_sm90")
    assert list(info.functions) == ["caller"]
    assert info.functions["caller"].static_shared_bytes == 40


def cuobjdump() -> str | None:
    """NVIDIA's own reader, from PATH or its wheel."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or []) if spec else []
    wheel = [str(path) for folder in folders for path in Path(folder).glob("cu*/bin/cuobjdump")]
    return shutil.which("cuobjdump") or (wheel[0] if wheel else None)


@pytest.mark.skipif(cuobjdump() is None, reason="no cuobjdump: pip install nvidia-cuda-cuobjdump")
@pytest.mark.parametrize("path", IMAGES, ids=lambda path: path.stem)
def test_against_cuobjdump(path: Path) -> None:
    info = read_cubin(path.read_bytes())
    done = subprocess.run(
        [str(cuobjdump()), "-res-usage", str(path)], capture_output=True, text=True, check=False
    )
    if (
        info.toolkit in ((12, 0), (12, 1))
        and "not contain device code" in done.stdout + done.stderr
    ):
        pytest.skip("cuobjdump of 12.9 and later does not know the sm_90 of CUDA 12.0 and 12.1")
    assert not done.returncode, done.stderr
    found = dict(re.findall(r"Function (\S+):\n\s*(REG.*)", done.stdout))
    for name, function in info.functions.items():
        usage = {
            key: int(value) for key, value in re.findall(r"([A-Z]+)(?:\[0\])?:(\d+)", found[name])
        }
        assert usage["REG"] == function.num_regs
        reserved = 1024 if usage["SHARED"] and info.compute_capability >= (9, 0) else 0
        assert usage["SHARED"] - reserved == function.static_shared_bytes
        assert usage["STACK"] <= function.local_bytes or usage["STACK"] == 0
        last = function.params[-1] if function.params else None
        base = usage["CONSTANT"] - (last.offset_bytes + last.size_bytes if last else 0)
        capability = info.compute_capability
        bases = {(8, 0): (0x160, 0x1A80), (9, 0): (0x210,)}.get(capability, (0x160,))
        assert base in (bases if capability < (10, 0) else (0x380,))


def test_reading_is_quick() -> None:
    """Six kernels take 0.4 ms; ten times that is a fault of the reader, not of a busy machine."""
    image = (DATA / "features_sm90.cubin").read_bytes()
    best = 1.0
    for _ in range(20):
        start = time.perf_counter()
        read_cubin(image)
        best = min(best, time.perf_counter() - start)
    assert best < 4e-3
