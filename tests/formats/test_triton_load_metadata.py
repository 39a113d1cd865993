"""Triton's json, damaged in every way or of what is not launched here: refused by field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from triton_data import copy, edit

from kernel_hub.errors import CubinCorruptError, CubinNotFoundError, KernelHubError
from kernel_hub.formats import triton


def target(**fields: Any) -> dict[str, Any]:
    return {"backend": "cuda", "arch": 90, "warp_size": 32, **fields}


def check_refused(
    folder: Path, fields: dict[str, Any], kind: type[KernelHubError], words: str
) -> None:
    """Metadata of such fields; the message names the file."""
    path = copy("add_kernel", folder)
    edit(path, **fields)
    with pytest.raises(kind, match=words) as caught:
        triton.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_warps": "abc"}, "num_warps is 'abc'; expected an int"),
        ({"num_warps": -1}, "num_warps is -1; expected 1 to 32"),
        ({"num_warps": 10**9}, "num_warps is 1000000000"),
        ({"num_warps": True}, "num_warps is True"),
        ({"num_warps": 8}, "num_warps 8 means 256 threads a block; the cubin is compiled for"),
        ({"num_warps": ...}, "has no 'num_warps'"),
        ({"shared": -5}, "shared is -5"),
        ({"shared": 1 << 40}, "shared is 1099511627776"),
        ({"shared": 1.5}, "shared is 1.5"),
        ({"shared": ...}, "has no 'shared'"),
        ({"name": ...}, "has no 'name'"),
        ({"name": 7}, "name is 7; expected a string"),
        ({"name": "other_kernel"}, "json: name: no function 'other_kernel' in .*add_kernel.cubin"),
        ({"name": "../../etc/passwd"}, "no function '../../etc/passwd'"),
        ({"num_ctas": 2}, "num_ctas is 2, the cubin is compiled for clusters of 1"),
        ({"num_ctas": 17}, "num_ctas is 17"),
        ({"cluster_dims": [2, 1, 1]}, "num_ctas is 1: their product must be that"),
        ({"cluster_dims": [1, 1]}, "expected three ints"),
        ({"clusterDims": [2, 1, 1]}, "num_ctas is 1: their product must be that"),
        ({"ctas_per_cga": [17, 1, 1]}, "ctas_per_cga is .* expected three ints"),
        ({"ctas_per_cga": [4, 8, 1]}, "ctas_per_cga is"),
        ({"ctas_per_cga": [2, 1, 1]}, "clusters of"),
        ({"cluster_dims": [0, 1, 1]}, "cluster_dims"),
        ({"target": ...}, "target is None"),
        ({"target": []}, "target"),
        ({"target": "cuda"}, "target"),
        ({"target": target(backend="hip")}, "target: backend is 'hip'"),
        ({"target": target(warp_size=64)}, "target: warp_size is 64"),
        ({"target": target(arch=80)}, "target.arch is 80, the cubin is for sm_?90"),
        ({"target": target(arch="sm_90")}, "target: arch is 'sm_90'"),
        ({"global_scratch_size": -1}, "global_scratch_size is -1"),
        ({"global_scratch_size": 1 << 60}, "global_scratch_size"),
        ({"global_scratch_size": ...}, "takes 6 parameters; declared are 4 and 1"),
        ({"global_scratch_align": 3}, "global_scratch_align is 3; a power of two"),
        ({"profile_scratch_size": 64}, "profile_scratch_size is 64; .* Proton"),
        ({"launch_pdl": 1}, "launch_pdl is 1; expected true or false"),
        ({"launch_cooperative_grid": "no"}, "launch_cooperative_grid is 'no'"),
        ({"tensordesc_meta": {}}, "tensordesc_meta is {}; a list"),
        ({"tensordesc_meta": 7}, "tensordesc_meta is 7; a list"),
        ({"tensordesc_meta": [7]}, r"tensordesc_meta\[0\] is 7; expected an object"),
        ({"tensordesc_meta": [{}]}, r"tensordesc_meta\[0\] has no 'block_size'"),
    ],
)
def test_hostile_metadata_is_named(tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    check_refused(tmp_path, fields, KernelHubError, words)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("swizzle", 4, "swizzle is 4"),
        ("elem_size", 0, "elem_size is 0"),
        ("elem_size", 4, "elem_size is 4, fp16 has another"),
        ("elem_type", 8, "elem_type 8 is not known"),
        ("elem_type", "f16", "elem_type is 'f16'"),
        ("block_size", [16], r"block_size \[16\], the kernel takes rank 2"),
        ("block_size", [16, 512], "block_size is .16, 512."),
        ("block_size", [], "block_size is"),
        ("fp4_padded", True, "fp4_padded is True"),
        ("is_im2col", True, "is_im2col is True"),
    ],
)
def test_hostile_descriptors_are_named(tmp_path: Path, field: str, value: Any, words: str) -> None:
    path = copy("desc_kernel", tmp_path)
    meta = json.loads(path.read_text())["tensordesc_meta"]
    edit(path, tensordesc_meta=[{**meta[0], field: value}])
    wanted = CubinNotFoundError if value is True else CubinCorruptError
    with pytest.raises(wanted, match=words) as caught:
        triton.load(path)
    assert str(path) in str(caught.value)
    edit(path, tensordesc_meta=[])
    with pytest.raises(
        CubinCorruptError, match="tensordesc_meta has 0 entries, desc_kernel takes 1"
    ):
        triton.load(path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"target": target(backend="hip", arch="gfx942")}, "backend is 'hip'; only 'cuda'"),
        ({"target": ["hip", "gfx90a"]}, "backend is 'hip'"),
        ({"target": ..., "arch": "gfx90a", "device_type": "hip"}, "backend is 'hip'"),
        ({"target": ..., "ctime": {"ttir": 1.5}}, "written by Triton 2.0, .*2.1 and later are"),
        ({"profile_scratch_size": 64}, "Proton"),
        ({"tensormaps_info": [{"globalAddressArgIdx": 0}]}, "Triton 2.2's and 2.3's experim"),
        ({"auto_tma_recipes": [{"desc_arg_index": 4}]}, "fbtriton makes of plain pointers"),
        ({"instrumentation_mode": "gsan"}, "global sanitizer"),
    ],
)
def test_what_is_whole_but_not_launched_here_is_not_called_corrupt(
    tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    check_refused(tmp_path, fields, CubinNotFoundError, words)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"kernel"', "null", "7", "{}", "\0", "[" * 100_000, '{"name": NaN}']
)
def test_what_is_no_metadata(tmp_path: Path, text: str) -> None:
    path = copy("add_kernel", tmp_path)
    path.write_text(text)
    with pytest.raises(CubinCorruptError, match=r"add_kernel\.json") as caught:
        triton.load(path)
    assert len(str(caught.value)) < 600
