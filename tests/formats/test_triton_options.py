"""Compiler options that a kernel also declares as arguments: one value for both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="kernels are compiled by Triton")

from triton_kernels import warps_kernel  # noqa: E402

from kernel_hub.errors import ParamsError  # noqa: E402
from kernel_hub.formats import triton as formats_triton  # noqa: E402

TYPES = "*fp32:16,*fp32:16"


def warps_of(folder: Path, name: str) -> tuple[int, int]:
    f = formats_triton.collection(folder).function(name, arch="sm90")
    assert f.spec.required_block == (32 * f.metadata.num_warps, 1, 1)
    return f.metadata.num_warps, f.constexprs["num_warps"]


@pytest.mark.parametrize(
    ("given", "warps"),
    [
        ({}, 4),
        ({"num_warps": 8}, 8),
        ({"constexprs": {"BLOCK": 32, "num_warps": 2}}, 2),
        ({"num_warps": 8, "constexprs": {"BLOCK": 32, "num_warps": 2}}, 2),
    ],
)
def test_num_warps_of_a_kernel(tmp_path: Path, given: dict[str, Any], warps: int) -> None:
    given = {"constexprs": {"BLOCK": 32}, **given}
    name = formats_triton.compile(warps_kernel, TYPES, arch="sm90", out=tmp_path, **given)
    assert warps_of(tmp_path, name) == (warps, warps)


def test_num_warps_of_configurations(tmp_path: Path) -> None:
    configs = [
        {"BLOCK": 32, "num_warps": 2},
        triton.Config({"BLOCK": 32}, num_warps=8),
        {"BLOCK": 64},
    ]
    built = formats_triton.compile_configs(
        warps_kernel, configs, signature=TYPES, arch="sm90", out=tmp_path
    )
    assert [warps_of(tmp_path, one.name) for one in built] == [(2, 2), (8, 8), (4, 4)]
    with pytest.raises(ParamsError, match="num_warps=64: a whole number from 1 to 32"):
        formats_triton.compile(
            warps_kernel,
            TYPES,
            constexprs={"BLOCK": 32, "num_warps": 64},
            arch="sm90",
            out=tmp_path,
        )
