"""Sources in folders of csrc: what the builder finds there, and who may include whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernel_hub import build
from kernel_hub.collection.manifest import Manifest
from kernel_hub.compilers.nvcc import find_nvcc, find_sources, make_jobs
from kernel_hub.errors import KernelHubError

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
