"""`inspect`: shipped names, files of every kind, sections, and disassembly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_run import ROOT, Run

from kernel_hub.cli import inspect
from kernel_hub.cli.parts import inspect_text, sass
from kernel_hub.collection.manifest import open_collection
from kernel_hub.cubin import SectionInfo, unpack
from kernel_hub.errors import CubinCorruptError, KernelHubError
from kernel_hub.image import demangle

FATBIN = str(ROOT / "tests/cubin/data/plain.fatbin")
PTX = b""".version 8.8
.target sm_90a
.address_size 64
.visible .entry copy(.param .u64 out, .param .f32 scale)
{
    ret;
}
"""
PROBE = "launch_probe_5(float* out, float* x, float* y, int num_elements, float scale)"


@pytest.fixture
def cubin(tmp_path: Path) -> Path:
    """launch_probe for sm90 as a file of nobody's."""
    collection = open_collection()
    path = tmp_path / "mine.cubin"
    path.write_bytes(collection.read(collection.manifest.cubins["launch_probe"]["sm90"]))
    return path


def test_a_shipped_name_shows_each_architecture(kernel_hub_cli: Run) -> None:
    ran = kernel_hub_cli("inspect", "launch_probe")
    assert ran.code == 0
    assert [line.split(":")[0] for line in ran.out.splitlines() if ": cubin, " in line] == [
        f"{arch}/launch_probe.cubin" for arch in ("sm80", "sm89", "sm90")
    ]
    assert ran.out.count(PROBE) == 3
    assert "at most 1024" in ran.out and "csrc/examples/launch_probe.cu" in ran.out


def test_one_architecture_and_one_function_as_json(kernel_hub_cli: Run) -> None:
    arguments = ("launch_probe.cubin", "--arch", "sm90", "--function", "launch_probe_5", "--json")
    (one,) = json.loads(kernel_hub_cli("inspect", *arguments).out)
    assert (one["arch"], one["target"], one["kind"]) == ("sm90", "sm_90", "cubin")
    assert one["toolkit"][0] in (12, 13)
    assert list(one["functions"]) == ["launch_probe_5"]
    function = one["functions"]["launch_probe_5"]
    assert function["signature"] == PROBE
    assert [p["size_bytes"] for p in function["params"]] == [8, 8, 8, 4, 4]
    assert function["max_threads"] == 1024
    assert ".text.launch_probe_5" in {section["name"] for section in one["sections"]}
    assert len(one["manifest"]["sha256"]) == 64


def test_a_foreign_cubin_shows_sizes(kernel_hub_cli: Run, cubin: Path) -> None:
    ran = kernel_hub_cli("inspect", str(cubin))
    assert ran.code == 0
    sizes = ", ".join(["<8 bytes>"] * 3 + ["<4 bytes>"] * 2)
    assert f"launch_probe_5({sizes})" in ran.out
    assert "sha256" not in ran.out


def test_ptx(kernel_hub_cli: Run, tmp_path: Path) -> None:
    path = tmp_path / "copy.ptx"
    path.write_bytes(PTX)
    ran = kernel_hub_cli("inspect", str(path))
    assert "PTX 8.8 for sm_90a" in ran.out
    assert "copy(.u64 out, .f32 scale)" in ran.out
    refused = kernel_hub_cli("inspect", str(path), "--sass")
    assert refused.code == 2 and "--sass reads cubins" in refused.err


def test_a_fatbin_shows_its_entries(kernel_hub_cli: Run) -> None:
    path = FATBIN
    ran = kernel_hub_cli("inspect", path)
    assert ran.code == 0, ran.err
    for shown in ("cubin sm_80,", "cubin sm_90a,", "ptx compute_90,", "entry 2: ptx", "add("):
        assert shown in ran.out
    (one,) = json.loads(kernel_hub_cli("inspect", path, "--json").out)
    assert one["kind"] == "fatbin"
    assert [entry["contents"]["kind"] for entry in one["entries"]] == ["cubin", "cubin", "ptx"]


def test_a_compressed_entry_is_left_to_the_driver_where_nothing_unpacks_it(
    kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpack, "_zstd", lambda: None)
    path = str(ROOT / "tests/cubin/data/compressed.fatbin")
    ran = kernel_hub_cli("inspect", path)
    assert ran.code == 0 and ran.out.count("only the driver can unpack it") == 1
    assert "ptx compute_90, 858 B, PTX 9.0, compressed" in ran.out
    (one,) = json.loads(kernel_hub_cli("inspect", path, "--json").out)
    assert ["contents" in entry for entry in one["entries"]] == [True, True, False]


def test_structs_of_ptx_have_their_sizes(kernel_hub_cli: Run) -> None:
    path = str(ROOT / "tests/data/cxx_names.ptx")
    (one,) = json.loads(kernel_hub_cli("inspect", path, "--json").out)
    solve = one["functions"]["_ZN2ns5solveE7Problem"]
    assert solve["signature"] == "_ZN2ns5solveE7Problem(.align 8 .b8 param_0[40])"
    assert [param["size_bytes"] for param in solve["params"]] == [40]
    assert "solve(.align 8 .b8 param_0[40])" in kernel_hub_cli("inspect", path).out


@pytest.mark.skipif(demangle._reader() is None, reason="no C++ library that reads names")
@pytest.mark.parametrize("kind", ["cubin", "ptx"])
def test_kernels_have_their_cxx_names(kernel_hub_cli: Run, kind: str) -> None:
    path, name = str(ROOT / f"tests/data/cxx_names.{kind}"), "ns::scale<float, 4, false, (Kind)0>"
    symbol = "_ZN2ns5scaleIfLj4ELb0EL4Kind0EEEvPT_x"
    shown = kernel_hub_cli("inspect", path).out
    assert "  ns::scale<float, 4u, false, (Kind)0>(" in shown and f"    {symbol}\n" in shown
    assert shown.count("  plain(") == 1 and "    plain\n" not in shown
    for asked in (name, symbol):
        ran = kernel_hub_cli("inspect", path, "--function", asked, "--json")
        (one,) = json.loads(ran.out)
        assert list(one["functions"]) == [symbol]
        assert one["functions"][symbol]["cxx_name"] == "ns::scale<float, 4u, false, (Kind)0>"
    ran = kernel_hub_cli("inspect", path, "--function", "ns::scalp")
    assert ran.code == 2 and "ns::solve" in ran.err and "add(double*, int)" in ran.err
    ran = kernel_hub_cli("inspect", path, "--function", "add")
    assert ran.code == 2 and "2 kernels are called 'add': add(" in ran.err
    if kind == "cubin" and sass.find_nvdisasm():
        ran = kernel_hub_cli("inspect", path, "--function", name, "--sass")
        assert f".text.{symbol}" in ran.out and ".text.plain" not in ran.out


def test_an_lz4_entry_is_shown(kernel_hub_cli: Run) -> None:
    ran = kernel_hub_cli("inspect", str(ROOT / "tests/cubin/data/speed.fatbin"))
    assert "PTX 9.0, compressed" in ran.out and "add(.u64 param_0, .u64" in ran.out
    assert "a driver of CUDA 13.0 or later compiles it at load" in ran.out


def test_entries_of_old_gpus_are_shown_and_not_read(kernel_hub_cli: Run, tmp_path: Path) -> None:
    image = bytearray((ROOT / "tests/cubin/data/plain.fatbin").read_bytes())
    image[16 + 28] = 61
    (tmp_path / "old.fatbin").write_bytes(image)
    ran = kernel_hub_cli("inspect", str(tmp_path / "old.fatbin"))
    assert ran.code == 0
    assert "cubin sm_61, 3.3 KiB, not read, because an architecture before sm_70" in ran.out
    assert "cubin sm_90a, 3.8 KiB" in ran.out


def test_a_damaged_entry_does_not_hide_the_others(kernel_hub_cli: Run, tmp_path: Path) -> None:
    image = bytearray((ROOT / "tests/cubin/data/plain.fatbin").read_bytes())
    image[16 + 64 + 60] = 0  # the number of sections of the first entry's cubin
    (tmp_path / "half.fatbin").write_bytes(image)
    ran = kernel_hub_cli("inspect", str(tmp_path / "half.fatbin"))
    assert ran.code == 0
    assert "cubin sm_80, 3.3 KiB, not read, because " in ran.out
    assert "ELF header: 0 sections" in ran.out and "cubin sm_90a, 3.8 KiB" in ran.out


def test_what_is_unknown_is_named(cubin: Path, kernel_hub_cli: Run) -> None:
    image = cubin.read_bytes()
    assert "unknown:" not in kernel_hub_cli("inspect", str(cubin)).out
    cubin.write_bytes(image.replace(b".nv.callgraph\0", b".nv.callgriph\0"))
    ran = kernel_hub_cli("inspect", str(cubin))
    assert ran.code == 0 and "unknown: section .nv.callgriph, of a kind" in ran.out


def test_a_damaged_file_is_named(cubin: Path, kernel_hub_cli: Run) -> None:
    cubin.write_bytes(cubin.read_bytes()[:1000])
    ran = kernel_hub_cli("inspect", str(cubin))
    assert ran.code == 2
    assert str(cubin) in ran.err and "at byte" in ran.err
    with pytest.raises(CubinCorruptError, match="neither cubin, fatbin nor PTX"):
        inspect.describe(inspect.ShownImage("text", b"hello"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("launch_prob",),
            "neither a file nor a cubin that kernel_hub ships",
        ),
        ((FATBIN, "--function", "ad"), f"no function 'ad' in {FATBIN}; it has: add"),
        ((FATBIN, "--arch", "sm75"), "nothing for sm75; it is for sm_80, sm_90a, compute_90"),
        ((str(ROOT),), "is a folder: name one of its files; kernel-hub inspect NAME --package"),
        (("launch_probe", "--arch", "sm61"), "shipped for sm80, sm89, sm90, not sm61"),
        (("launch_probe", "--function", "launch_prob_5"), "it has: launch_probe_5"),
        (("x", "--package", "no_such_package"), "no package 'no_such_package'"),
    ],
)
def test_wrong_names(kernel_hub_cli: Run, arguments: tuple[str, ...], message: str) -> None:
    ran = kernel_hub_cli("inspect", *arguments)
    assert ran.code == 2 and message in ran.err


def test_sections_of_functions_are_grouped() -> None:
    names = [".text.f", ".text.g", ".nv.constant0.f", ".rela.text.f", ".nv.info", ".nv.info.f"]
    groups = inspect_text.section_groups(SectionInfo(name, 0, 8, 1, 0) for name in names)
    assert groups == [
        (".text.*", 2, 16),
        (".nv.constant0.*", 1, 8),
        (".rela.text.*", 1, 8),
        (".nv.info", 1, 8),
        (".nv.info.*", 1, 8),
    ]


def test_what_a_launch_must_use() -> None:
    plain = {"required_block": None, "max_threads": None, "cluster": None, "cooperative": False}
    assert inspect_text.threads(plain) == "any"
    exact = {**plain, "required_block": (32, 4, 1), "cluster": (2, 1, 1), "cooperative": True}
    assert inspect_text.threads(exact) == "exactly 32 x 4 x 1, cluster 2 x 1 x 1, cooperative"


@pytest.mark.skipif(sass.find_nvdisasm() is None, reason="nvdisasm is not installed")
def test_sass_of_one_function(kernel_hub_cli: Run, cubin: Path) -> None:
    one = kernel_hub_cli("inspect", str(cubin), "--function", "launch_probe_5", "--sass").out
    both = kernel_hub_cli("inspect", str(cubin), "--sass").out
    assert one.count("EXIT") >= 1
    assert both.count("EXIT") > one.count("EXIT")


def test_sass_without_nvdisasm(
    kernel_hub_cli: Run, cubin: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sass, "find_nvdisasm", lambda: None)
    ran = kernel_hub_cli("inspect", str(cubin), "--sass")
    assert ran.code == 2 and sass.INSTALL in ran.err


def test_nvdisasm_that_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sass, "find_nvdisasm", lambda: "/bin/false")
    with pytest.raises(KernelHubError, match="/bin/false failed"):
        sass.disassemble(b"")


@pytest.mark.parametrize(
    ("options", "targets"),
    [
        (("--function", "add"), ["sm_80", "sm_90a", "compute_90"]),
        (("--arch", "sm_80", "--function", "add"), ["sm_80"]),
        (("--arch", "sm90"), ["sm_90a", "compute_90"]),
        (("--arch", "sm90a"), ["sm_90a"]),
    ],
)
def test_parts_of_a_fatbin(
    kernel_hub_cli: Run, options: tuple[str, ...], targets: list[str]
) -> None:
    assert kernel_hub_cli("inspect", FATBIN, *options).code == 0
    (one,) = json.loads(kernel_hub_cli("inspect", FATBIN, *options, "--json").out)
    assert [entry["target"] for entry in one["entries"]] == targets
    assert all(list(entry["contents"]["functions"]) == ["add"] for entry in one["entries"])


def test_arrays_in_a_source(kernel_hub_cli: Run, tmp_path: Path) -> None:
    kernel_hub_cli("export", "launch_probe", "--to", str(tmp_path))
    source = str(tmp_path / "launch_probe.c")
    assert kernel_hub_cli("inspect", source).out.count("launch_probe_12(") == 3
    ran = kernel_hub_cli(
        "inspect", source, "--arch", "sm89", "--function", "launch_probe_5", "--json"
    )
    (one,) = json.loads(ran.out)
    assert one["image"] == f"{source}: image_sm89" and list(one["functions"]) == ["launch_probe_5"]
    (tmp_path / "none.cpp").write_text("int x;")
    refused = kernel_hub_cli("inspect", str(tmp_path / "none.cpp"))
    assert refused.code == 2 and "no cubin, fatbin or PTX in" in refused.err
