"""--check of the builder: what it finds, all of it or by lot; the same bytes from anywhere."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from built_tree import NVCC, PLAIN, PLAIN_HEADER, Tree, needs_nvcc

from kernel_hub import build
from kernel_hub.compilers.nvcc import make_jobs


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


@pytest.fixture
def copy_tree(tree: Tree) -> Tree:
    return tree.with_copy()


@pytest.mark.slow
@needs_nvcc
def test_check_is_quiet_about_a_faithful_tree_and_names_a_changed_one(
    copy_tree: Tree, capsys: pytest.CaptureFixture[str]
) -> None:
    archs = ("--arch", "sm80")
    assert copy_tree.build(*archs) == 0
    before = copy_tree.digests()
    assert copy_tree.build(*archs, "--check") == 0
    image = bytearray((copy_tree.out / "sm80/copy.cubin").read_bytes())
    image[-1] ^= 1
    (copy_tree.out / "sm80/copy.cubin").write_bytes(image)
    assert copy_tree.build(*archs, "--check") == 1
    assert "sm80/copy.cubin" in capsys.readouterr().err
    assert copy_tree.build(*archs) == 0
    manifest = copy_tree.out / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"scale"', '"eps"'))
    assert copy_tree.build(*archs, "--check") == 1
    assert copy_tree.build(*archs, "--clean") == 0
    assert copy_tree.digests() == before


@pytest.mark.slow
@needs_nvcc
def test_check_by_lot_compares_all_digests_and_builds_some(
    copy_tree: Tree, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(drawn: str) -> tuple[int, str]:
        archs = {lot: build._one_in(2, jobs, sizes, lot)[0].arch for lot in map(str, range(20))}
        lot = next(lot for lot, arch in archs.items() if arch == drawn)
        monkeypatch.setenv(build.LOT, lot)
        code = copy_tree.build("--check", "--arch", "sm80,sm90", "--one-in", "2")
        said = "".join(capsys.readouterr())
        assert f"one in 2, by lot: KERNEL_HUB_LOT={lot} draws the same" in said
        return code, said

    jobs = make_jobs(copy_tree.csrc / "copy.cu", ["sm80", "sm90"], NVCC.version)
    assert copy_tree.build("--arch", "sm80,sm90") == 0
    sizes = {entry.file: entry.size_bytes for entry in copy_tree.manifest().cubins["copy"].values()}
    files = ("csrc/include/copy.cuh", "cubins/sm80/copy.cubin", "cubins/manifest.json")
    header, image, manifest = (copy_tree.csrc.parent / file for file in files)
    digest = copy_tree.entry("copy", "sm80").sha256.encode()
    code, said = check("sm80")
    assert code == 0 and "1 cubins rebuilt" in said and "2 cubins: of these sources" in said
    for file in (header, image, manifest):  # seen though the other one is drawn
        before = file.read_bytes()
        after = before.replace(digest, digest[::-1]) if file == manifest else before + b" "
        file.write_bytes(after)
        code, said = check("sm90")
        assert code == 1 and "sm80/copy.cubin: edited" in said
        file.write_bytes(before)
    # What nvcc did not make, with its own digest in the manifest, only a build tells.
    other = image.read_bytes()[:-1] + bytes([image.read_bytes()[-1] ^ 1])
    image.write_bytes(other)
    changed = hashlib.sha256(other).hexdigest()
    manifest.write_bytes(manifest.read_bytes().replace(digest, changed.encode()))
    code, said = check("sm80")
    assert code == 1 and f"sm80/copy.cubin: sha256 {changed} there" in said
    assert check("sm90")[0] == 0


@pytest.mark.slow
@needs_nvcc
def test_same_bytes_from_any_directory_and_number_of_jobs(copy_tree: Tree, tmp_path: Path) -> None:
    assert copy_tree.build("--arch", "sm80,sm90", "--jobs", "2") == 0
    other = Tree(tmp_path / "some where/else")
    other.write("copy.cu", PLAIN)
    other.write("include/copy.cuh", PLAIN_HEADER)
    assert other.build("--arch", "sm90,sm80", "--jobs", "1") == 0
    assert copy_tree.digests() == other.digests()
