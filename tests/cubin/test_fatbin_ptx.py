"""Fatbin frames and PTX headers: what they say, and the words of each refusal."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from kernel_hub.cubin import image_kind, read_cubin, read_fatbin, read_ptx
from kernel_hub.errors import CubinCorruptError

DATA = Path(__file__).parent / "data"
PLAIN = (DATA / "plain.fatbin").read_bytes()
PTX = (DATA / "tiny_sm90.ptx").read_text()


def test_fatbin() -> None:
    assert image_kind(PLAIN) == "fatbin"
    entries = read_fatbin(PLAIN).entries
    kinds = [(entry.kind, entry.compute_capability, entry.arch_specific) for entry in entries]
    assert kinds == [("cubin", (8, 0), False), ("cubin", (9, 0), True), ("ptx", (9, 0), False)]
    assert not any(entry.compressed for entry in entries)
    for entry in entries[:2]:
        assert entry.image is not None and len(entry.image) == entry.size_bytes
        info = read_cubin(entry.image)
        assert info.compute_capability == entry.compute_capability
        assert info.arch_specific == entry.arch_specific
    assert entries[2].image is not None
    assert list(read_ptx(entries[2].image).functions) == ["add"]


def test_compressed_fatbin() -> None:
    """nvcc compresses PTX: the entry has its real size and no image."""
    entries = read_fatbin((DATA / "compressed.fatbin").read_bytes()).entries
    assert [entry.compressed for entry in entries] == [False, False, True]
    assert entries[2].image is None
    assert entries[2].size_bytes > 500


@pytest.mark.parametrize(
    ("offset", "form", "value", "words"),
    [
        (0, "I", 1, "not a fatbin"),
        (4, "H", 2, "version 2"),
        (6, "H", 64, "header of 64 bytes"),
        (8, "Q", 1, "trailing bytes"),
        (8, "Q", 1 << 60, "truncated"),
        (16, "H", 9, "kind 9"),
        (16 + 4, "I", 0, "header of 0 bytes"),
        (16 + 4, "I", 1 << 31, "header of 2147483648 bytes"),
        (16 + 8, "Q", 1 << 62, "reaches beyond the end"),
        (16 + 8, "Q", 0, "reaches beyond the end"),
        (16 + 28, "I", 999, "sm_999"),
        (16 + 32, "I", 1 << 20, "name or options"),
        (16 + 40, "Q", 0x8011, "uncompressed"),
        (16 + 64, "I", 0, "holds no ELF image"),
    ],
)
def test_damaged_fatbin(offset: int, form: str, value: int, words: str) -> None:
    data = struct.pack("<" + form, value)
    with pytest.raises(CubinCorruptError, match=words):
        read_fatbin(PLAIN[:offset] + data + PLAIN[offset + len(data) :])


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
