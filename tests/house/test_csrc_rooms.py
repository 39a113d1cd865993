"""Sources in folders of csrc: what the builder finds there, and who may include whom."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path, PurePosixPath

import pytest

from kernel_hub import build
from kernel_hub.collection.manifest import Manifest
from kernel_hub.compilers.nvcc import find_nvcc, find_sources, make_jobs
from kernel_hub.errors import KernelHubError

CSRC = Path(__file__).resolve().parents[2] / "csrc"
VOCABULARY = PurePosixPath("include/kernel_hub")
FILES = [PurePosixPath(path.relative_to(CSRC)) for path in sorted(CSRC.rglob("*.cu*"))]

try:
    find_nvcc()
    REASON = ""
except KernelHubError as missing:
    REASON = str(missing)

COPY = (
    '#include "room/copy.cuh"\nextern "C" __global__ void copy(int* x) { x[0] = copied(x[1]); }\n'
)
COPIED = "#pragma once\n__device__ __forceinline__ int copied(int x) { return x; }\n"


def write(csrc: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (csrc / name).parent.mkdir(parents=True, exist_ok=True)
        (csrc / name).write_text(text)


def test_headers_are_found_beside_the_source_in_include_and_from_csrc(tmp_path: Path) -> None:
    headers = ("include/anywhere.cuh", "other/far.cuh", "room/beside.cuh")
    included = '#include "beside.cuh"\n#include "other/far.cuh"\n#include "anywhere.cuh"\n'
    csrc, source = tmp_path / "csrc", tmp_path / "csrc/room/a.cu"
    write(csrc, {"room/a.cu": included, **dict.fromkeys(headers, "")})
    (job,) = make_jobs(source, ["sm80"], "13.0.88", csrc)
    assert sorted(job.files) == sorted(f"csrc/{name}" for name in (*headers, "room/a.cu"))
    assert (job.place, job.file) == ("csrc/room/a.cu", "sm80/a.cubin")


def test_a_name_is_that_of_one_source(tmp_path: Path) -> None:
    write(tmp_path, {"include/a.cu": "", ".old/a.cu": "", "a.cu": ""})
    assert find_sources(tmp_path) == {"a": tmp_path / "a.cu"}
    write(tmp_path, {"room/a.cu": ""})
    said = r"/a\.cu and .*/room/a\.cu would both be a\.cubin; rename one of them"
    with pytest.raises(KernelHubError, match=said):
        find_sources(tmp_path)


@pytest.mark.skipif(bool(REASON), reason=REASON)
def test_a_source_in_a_room_is_built_and_checked(tmp_path: Path) -> None:
    write(tmp_path / "csrc", {"room/copy.cu": COPY, "room/copy.cuh": COPIED})
    args = ["--csrc", str(tmp_path / "csrc"), "--out", str(tmp_path / "out"), "--arch", "sm80"]
    assert build.main(args) == build.main([*args, "--check"]) == 0
    text = (tmp_path / "out/manifest.json").read_text(encoding="utf-8")
    assert Manifest.from_json(text, where="").cubins["copy"]["sm80"].source == "csrc/room/copy.cu"


def may_include(file: PurePosixPath, header: PurePosixPath) -> bool:
    """The vocabulary; of its own room its folder, those above, and the sm90/ beside its folder.

    A .cu: the vocabulary and all of its room.
    """
    here, there = file.parent, header.parent
    if there == VOCABULARY or here == VOCABULARY:
        return there == VOCABULARY
    if file.suffix == ".cu":
        return there.is_relative_to(here.parts[0])
    above = (here, *here.parents[:-1])
    return there in above or (there.name == "sm90" and there.parent in above)


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_header_knows_the_vocabulary_and_its_room(file: PurePosixPath) -> None:
    text = (CSRC / file).read_text(encoding="utf-8")
    for name in re.findall(r'#include "(.+)"', text):
        root = "include" if name.startswith("kernel_hub/") else "."
        header = PurePosixPath(root, name)
        assert (CSRC / header).is_file(), f"{name}: headers are named by their path in csrc"
        assert may_include(file, header), f"{file} may not include {name}"


def namespace_of(file: PurePosixPath) -> str | None:
    found = re.findall(r"^namespace ([\w:]+) {$", (CSRC / file).read_text("utf-8"), re.MULTILINE)
    assert len(found) <= 1, f"{file} has {found}"
    return found[0] if found else None


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_folder_has_one_namespace(file: PurePosixPath) -> None:
    own = (
        "kernel_hub" if file.parent == VOCABULARY else "::".join(("kernel_hub", *file.parent.parts))
    )
    namespace = namespace_of(file)
    if file.suffix == ".cuh":
        assert namespace == own
    elif namespace is not None:  # a kernel's is that of the headers written for it
        assert namespace == own or namespace.startswith(f"{own}::")
        assert CSRC.joinpath(*namespace.split("::")[1:]).is_dir()


def test_a_type_is_written_once_in_a_namespace() -> None:
    places = defaultdict(list)
    defined = re.compile(
        r"^(?:struct|class|enum(?: class)?) (?:\w+\([^)]*\) )?(\w+)(?= [{:])", re.M
    )
    for file in FILES:
        for name in defined.findall((CSRC / file).read_text(encoding="utf-8")):
            # Kernels of one folder are not compiled together, its headers may be.
            if file.suffix == ".cuh":
                places[namespace_of(file), name].append(str(file))
    assert not {name: files for name, files in places.items() if len(files) > 1}
