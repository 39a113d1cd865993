"""`list` and `verify`: what is shipped, and whether it is intact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_run import Run

from kernel_hub.cli import listing, verify
from kernel_hub.cli.parts import gather
from kernel_hub.collection.manifest import Collection, open_collection
from kernel_hub.errors import CubinNotFoundError


@pytest.fixture
def own() -> Collection:
    return open_collection()


def damaged(own: Collection, tmp_path: Path, **changes: object) -> tuple[Collection, str]:
    """A collection with launch_probe for sm90 alone, its entry changed."""
    entry = own.manifest.cubins["launch_probe"]["sm90"]
    file = tmp_path / entry.file
    file.parent.mkdir()
    file.write_bytes(own.read(entry))
    changed = entry._replace(**changes)  # type: ignore[arg-type]
    manifest = own.manifest._replace(cubins={"launch_probe": {"sm90": changed}})
    return Collection("kernel_hub", tmp_path, manifest), str(file)


def test_list_shows_every_cubin(kernel_hub_cli: Run, own: Collection) -> None:
    ran = kernel_hub_cli("list")
    assert ran.code == 0
    for name, entries in own.manifest.cubins.items():
        assert sum(line.split()[0] == name for line in ran.out.splitlines()) == len(entries)


def test_list_filters_by_arch_and_dtype(kernel_hub_cli: Run) -> None:
    rows = json.loads(kernel_hub_cli("list", "--arch", "sm90", "--dtype", "bf16", "--json").out)
    assert rows
    for row in rows:
        assert row["arch"] == "sm90"
        assert set(row["dtypes"]) == {"bf16"}
        assert row["dtypes"]["bf16"] == len(row["functions"])
        assert all("_bf16" in name for name in row["functions"])


def test_list_shows_signatures(kernel_hub_cli: Run) -> None:
    out = kernel_hub_cli("list", "--functions").out
    assert (
        out.count("launch_probe_5(float* out, float* x, float* y, int num_elements, float scale)")
        == 1
    )


def test_list_names_packages_it_cannot_read(
    kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch, own: Collection
) -> None:
    def opened(package: str) -> Collection:
        if package == "kernel_hub":
            return own
        raise CubinNotFoundError(f"package {package!r} ships no cubins")

    monkeypatch.setattr(gather, "open_collection", opened)
    monkeypatch.setattr(gather, "packages", lambda: {"theirs": "their_package"})
    assert "not readable: their_package: package" in kernel_hub_cli("list").out
    assert kernel_hub_cli("verify").code == 1


def test_what_is_shipped_is_intact(kernel_hub_cli: Run) -> None:
    ran = kernel_hub_cli("verify", "--json")
    report = json.loads(ran.out)
    assert [row for row in report["cubins"] if row["problem"]] == []
    assert (ran.code, report["unreadable"]) == (0, [])
    assert " are intact" in kernel_hub_cli("verify").out


def test_verify_finds_a_changed_byte(own: Collection, tmp_path: Path) -> None:
    collection, file = damaged(own, tmp_path)
    assert [row.problem for row in verify.verified([collection])] == [None]
    image = bytearray(Path(file).read_bytes())
    image[-1] ^= 1
    Path(file).write_bytes(image)
    (row,) = verify.verified([collection])
    assert row.problem is not None and "sha256" in row.problem


def test_verify_finds_a_missing_file(
    own: Collection, tmp_path: Path, kernel_hub_cli: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    collection, file = damaged(own, tmp_path)
    Path(file).unlink()
    monkeypatch.setattr(verify, "collections", lambda package: ([collection], []))
    ran = kernel_hub_cli("verify")
    assert ran.code == 1
    assert "cannot be read" in ran.out and "0 of 1 cubins are intact" in ran.out


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"target": "sm_90a"}, "the manifest says sm_90a"),
        ({"functions": {}}, "functions differ from the manifest: launch_probe_12, launch_probe_5"),
    ],
)
def test_verify_holds_the_elf_against_the_manifest(
    own: Collection, tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    collection, _ = damaged(own, tmp_path, **changes)
    (row,) = verify.verified([collection])
    assert row.problem is not None and problem in row.problem


def test_verify_compares_parameters(own: Collection, tmp_path: Path) -> None:
    functions = dict(own.manifest.cubins["launch_probe"]["sm90"].functions)
    one = functions["launch_probe_5"]
    functions["launch_probe_5"] = one._replace(params=one.params[:-1])
    collection, _ = damaged(own, tmp_path, functions=functions)
    (row,) = verify.verified([collection])
    assert row.problem is not None and "parameters of launch_probe_5" in row.problem


def test_listed_sizes_are_the_files(own: Collection) -> None:
    for row in listing.shipped([own]):
        entry = own.manifest.cubins[row.cubin][row.arch]
        assert row.size_bytes == len(own.read(entry))


@pytest.mark.parametrize("command", ["list", "verify", "inspect", "export"])
def test_a_folder_of_cubins(
    own: Collection, tmp_path: Path, kernel_hub_cli: Run, command: str
) -> None:
    collection, _ = damaged(own, tmp_path)
    (tmp_path / "manifest.json").write_text(collection.manifest.to_json())
    arguments = {"inspect": ["launch_probe"], "export": ["launch_probe", "--to"]}.get(command, [])
    arguments += [str(tmp_path / "out")] if command == "export" else ["--json"]
    ran = kernel_hub_cli(command, *arguments, "--package", str(tmp_path))
    assert ran.code == 0, ran.err
    if command == "export":
        assert "image_sm90" in (tmp_path / "out/launch_probe.c").read_text()
        return
    rows = json.loads(ran.out)
    rows = rows["cubins"] if command == "verify" else rows
    assert [row["arch"] for row in rows] == ["sm90"]
    if command != "inspect":
        assert [row["package"] for row in rows] == [str(tmp_path)]


@pytest.mark.parametrize("command", [["list"], ["verify"], ["inspect", "x"], ["export", "x"]])
@pytest.mark.parametrize("package", ["", ".x", "this"])
def test_a_package_that_is_none(
    kernel_hub_cli: Run, tmp_path: Path, command: list[str], package: str
) -> None:
    to = ["--to", str(tmp_path / "out")] if command[0] == "export" else []
    ran = kernel_hub_cli(*command, *to, "--package", package)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"kernel-hub {command[0]}: ") and repr(package) in ran.err
