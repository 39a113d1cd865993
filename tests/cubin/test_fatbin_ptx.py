"""Fatbin frames and PTX headers: what they say, and the words of each refusal."""

from __future__ import annotations

import random
import struct
import time
from pathlib import Path

import pytest

from kernel_hub.cubin import driver_of, image_kind, read_cubin, read_fatbin, read_ptx, unpack
from kernel_hub.errors import CubinCorruptError

DATA = Path(__file__).parent / "data"
PLAIN = (DATA / "plain.fatbin").read_bytes()
PTX = (DATA / "tiny_sm90.ptx").read_text()


def test_fatbin() -> None:
    assert image_kind(PLAIN) == "fatbin"
    entries = read_fatbin(PLAIN).entries
    kinds = [(entry.kind, entry.compute_capability, entry.suffix) for entry in entries]
    assert kinds == [("cubin", (8, 0), ""), ("cubin", (9, 0), "a"), ("ptx", (9, 0), "")]
    assert not any(entry.compressed for entry in entries)
    for entry in entries[:2]:
        assert entry.image is not None and len(entry.image) == entry.size_bytes
        info = read_cubin(entry.image)
        assert info.compute_capability == entry.compute_capability
        assert info.target == entry.target
    assert entries[2].image is not None
    assert list(read_ptx(entries[2].image).functions) == ["add"]


def test_a_compressed_entry_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry still has its size, target and version."""
    monkeypatch.setattr(unpack, "_zstd", lambda: None)
    entries = read_fatbin((DATA / "compressed.fatbin").read_bytes()).entries
    assert [entry.compressed for entry in entries] == [False, False, True]
    assert entries[2].image is None and not entries[2].unread
    assert entries[2].size_bytes > 500
    assert (entries[2].target, entries[2].version) == ("sm_90", (9, 0))


@pytest.mark.parametrize("name", ["speed", "compressed", "size"])
def test_unpacking(name: str) -> None:
    """nvcc's modes: PTX by LZ4, PTX by zstd, all by zstd; each unpacks to what `plain` holds."""
    if name != "speed" and unpack._zstd() is None:
        pytest.skip("no zstd: Python 3.14 or `pip install zstandard`")
    entries = read_fatbin((DATA / f"{name}.fatbin").read_bytes()).entries
    plain = read_fatbin(PLAIN).entries
    assert [entry.compressed for entry in entries] == [name == "size"] * 2 + [True]
    for entry, other in zip(entries, plain, strict=True):
        assert entry.image is not None and other.image is not None
        if entry.kind == "cubin":
            assert read_cubin(entry.image) == read_cubin(other.image)
        else:
            assert read_ptx(entry.image) == read_ptx(other.image)


@pytest.mark.parametrize("name", ["speed", "compressed", "size"])
def test_damage_in_a_compressed_entry(name: str) -> None:
    """Not read, or as long as it should be: the readers of its contents come next."""
    if name != "speed" and unpack._zstd() is None:
        pytest.skip("no zstd: Python 3.14 or `pip install zstandard`")
    image = (DATA / f"{name}.fatbin").read_bytes()
    rng, refused = random.Random(4), 0
    for _ in range(300):
        damaged = bytearray(image)
        for _ in range(rng.choice((1, 2, 8))):
            damaged[rng.randrange(len(image) - 300, len(image))] = rng.randrange(256)
        try:
            (entry,) = read_fatbin(bytes(damaged)).entries[2:]
        except CubinCorruptError:
            continue
        if entry.damaged:
            refused += "unpack" in entry.unread
        else:
            assert entry.image is not None and len(entry.image) <= entry.size_bytes
    assert refused > 30


def test_a_fatbin_is_unpacked_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(unpack.ROOM, unpack.LZ4, 800)
    entry = read_fatbin((DATA / "speed.fatbin").read_bytes()).entries[2]
    assert entry.image is None and entry.size_bytes == 858


def test_hostile_lz4_takes_linear_time() -> None:
    packed = b"\x10a\x01\x00" * 200_000 + b"\x10a"
    start = time.thread_time()
    assert unpack.unpack(packed, unpack.LZ4, 1_000_001, 0) == b"a" * 1_000_001
    for damaged in (packed[:-1] + b"\xff" * 9, b"\xff" * 100_000, b"\x0f\x01\x00" + b"\xff" * 9999):
        with pytest.raises(CubinCorruptError, match="unpack"):
            unpack.unpack(damaged, unpack.LZ4, 1_000_001, 0)
    assert time.thread_time() - start < 3


def test_entries_that_nobody_here_reads() -> None:
    """Code before sm_70, of an unknown architecture, or for a linker, says why; it is not read."""
    cases = {61: "before sm_70", 250: "unknown architecture"}
    for sm, words in cases.items():
        changed = PLAIN[: 16 + 28] + struct.pack("<I", sm) + PLAIN[16 + 32 :]
        entry = read_fatbin(changed).entries[0]
        assert words in entry.unread and entry.image is None and entry.target == f"sm_{sm}"
    linked = PLAIN[:16] + struct.pack("<H", 8) + PLAIN[18:]
    entry = read_fatbin(linked).entries[0]
    assert entry.kind == "ltoir" and "nvlink" in entry.unread


@pytest.mark.parametrize(
    ("offset", "form", "value", "words"),
    [
        (0, "I", 1, "not a fatbin"),
        (4, "H", 2, "version 2"),
        (6, "H", 64, "header of 64 bytes"),
        (8, "Q", 1, "trailing bytes"),
        (8, "Q", 1 << 60, "truncated"),
        (16 + 4, "I", 0, "header of 0 bytes"),
        (16 + 4, "I", 1 << 31, "header of 2147483648 bytes"),
        (16 + 8, "Q", 1 << 62, "reaches beyond the end"),
        (16 + 8, "Q", 0, "reaches beyond the end"),
        (16 + 32, "I", 1 << 20, "name or options"),
        (16 + 40, "Q", 0x8011, "uncompressed"),
    ],
)
def test_damaged_fatbin(offset: int, form: str, value: int, words: str) -> None:
    data = struct.pack("<" + form, value)
    with pytest.raises(CubinCorruptError, match=words):
        read_fatbin(PLAIN[:offset] + data + PLAIN[offset + len(data) :])


@pytest.mark.parametrize(
    ("offset", "form", "value", "words", "damaged"),
    [
        (16, "H", 9, "kind 9", False),
        (18, "H", 0x102, "version 0x102", False),
        (16 + 28, "I", 999, "an unknown architecture", False),
        (16 + 24, "H", 99, "version 1.99", False),
        (16 + 64, "I", 0, "holds no ELF image", True),
    ],
)
def test_one_entry_that_cannot_be_read(
    offset: int, form: str, value: int, words: str, damaged: bool
) -> None:
    """It says why, and the others are read as ever."""
    data = struct.pack("<" + form, value)
    entries = read_fatbin(PLAIN[:offset] + data + PLAIN[offset + len(data) :]).entries
    assert words in entries[0].unread and entries[0].image is None
    assert entries[0].damaged == damaged
    assert entries[1:] == read_fatbin(PLAIN).entries[1:]


@pytest.mark.parametrize("length", [0, 15, 16, 40, len(PLAIN) - 1])
def test_truncated_fatbin(length: int) -> None:
    with pytest.raises(CubinCorruptError):
        read_fatbin(PLAIN[:length])


@pytest.mark.parametrize("image", [PTX, PTX.encode(), PTX.encode() + b"\0"])
def test_ptx(image: str | bytes) -> None:
    info = read_ptx(image)
    assert info.version >= (9, 0)
    assert info.target == "sm_90"
    params = info.functions["add"]
    assert [(param.type, param.size_bytes, param.align) for param in params] == [
        (".u64", 8, 8), (".u64", 8, 8), (".u64", 8, 8), (".u32", 4, 4),
    ]  # fmt: skip
    assert params[0].name == "add_param_0"
    assert image_kind(PTX.encode()) == "ptx"


def test_triton_ptx() -> None:
    """Pointer attributes, and an arch-specific target."""
    info = read_ptx((DATA / "triton_sm90.ptx").read_bytes())
    assert info.target == "sm_90a"
    assert [param.type for param in info.functions["add_kernel"]] == [
        ".u64", ".u64", ".u64", ".u32", ".u64", ".u64",
    ]  # fmt: skip


def test_ptx_by_value_params_and_comments() -> None:
    text = """
    // .version 1.0 in a comment
    /* .entry not_this( */
    .version 8.6
    .target sm_80, texmode_independent
    .address_size 64
    .visible .entry big(
        .param .align 64 .b8 map[128], // a struct
        .param .u64 .ptr .global .align 16 out,
        .param .f32 s
    ) .maxntid 128 { ret; }
    .visible .entry none() { ret; }
    .visible .entry bare { ret; }
    """
    info = read_ptx(text)
    assert (info.version, info.target) == ((8, 6), "sm_80")
    assert list(info.functions) == ["big", "none", "bare"]
    found = [(p.name, p.type, p.size_bytes, p.align) for p in info.functions["big"]]
    assert found == [("map", ".b8", 128, 64), ("out", ".u64", 8, 8), ("s", ".f32", 4, 4)]
    assert info.functions["none"] == info.functions["bare"] == ()


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (b"\xff\xfe", "no UTF-8 text"),
        ("", "does not start with .version"),
        ("void f() {}", "does not start with .version"),
        (".version 8.0\nadd", "without .target"),
        (".version 8.0\n.target sm_90\n\0\n", "NUL inside"),
        (".version 8.0\n.target sm_90\n/* open", "comment that has no end"),
        (".version 8.0\n.target sm_90\n.entry f(", "no end"),
        (".version 8.0\n.target sm_90\n.entry f(int x)", "is no parameter"),
        (".version 8.0\n.target sm_90\n.entry f(.param .u65 x)", "in a parameter"),
        (".version 8.0\n.target sm_90\n.entry f(.param .u64)", "is no parameter"),
        (".version 8.0\n.target sm_90\n.entry f(.param .u64 a) .entry f()", "declared twice"),
    ],
)
def test_damaged_ptx(image: str | bytes, words: str) -> None:
    with pytest.raises(CubinCorruptError, match=words):
        read_ptx(image)


@pytest.mark.parametrize(
    ("version", "driver"),
    [((6, 5), 12000), ((7, 8), 12000), ((8, 0), 12000), ((8, 4), 12040), ((8, 5), 12050),
     ((8, 7), 12080), ((8, 8), 12090), ((9, 0), 13000), ((9, 4), 13040)],
)  # fmt: skip
def test_the_driver_a_ptx_version_needs(version: tuple[int, int], driver: int) -> None:
    assert driver_of(version) == driver
