"""`kernel-hub build-triton`: configurations from the command line, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_run import ROOT, Run

pytest.importorskip("triton", reason="kernels are compiled by Triton")

from kernel_hub.formats import triton

KERNELS = str(ROOT / "tests/formats/triton_kernels.py")
ADD = f"{KERNELS}:add_kernel"
SIGNATURE = "*fp32:16, *fp32:16, *fp32:16, i32"


def test_several_configurations_in_one_go(kernel_hub_cli: Run, tmp_path: Path) -> None:
    ran = kernel_hub_cli(
        "build-triton", ADD, "--signature", SIGNATURE, "--arch", "sm80,sm90",
        "--config", "BLOCK=64,num_warps=2", "--config", "BLOCK=128", "--out", str(tmp_path),
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert "[4/4] building: sm90 add_kernel_BLOCK128_w4_s3" in ran.err
    kernels = triton.collection(tmp_path)
    assert [kernels.function(name, arch="sm80").constexprs for name in kernels] == [
        {"BLOCK": 128}, {"BLOCK": 64},
    ]  # fmt: skip
    assert kernels.function(min(kernels, key=len), arch="sm90").metadata.num_warps == 2
    for name in kernels:
        assert ran.out.count(name) == 2
    assert f"2 kernels in {tmp_path}" in ran.out


def test_one_configuration_with_types_by_name(kernel_hub_cli: Run, tmp_path: Path) -> None:
    ran = kernel_hub_cli(
        "build-triton", ADD, "--signature", "n=i32,x_ptr=*fp32,y_ptr=*fp32,out_ptr=*fp32:16",
        "--constexpr", "BLOCK=32", "--num-warps", "1", "--arch", "sm90", "--out", str(tmp_path),
    )  # fmt: skip
    assert ran.code == 0, ran.err
    kernels = triton.collection(tmp_path)
    (name,) = kernels
    assert name.startswith("add_kernel_BLOCK32_w1_s3_")
    assert [a.divisors for a in kernels.function(name, arch="sm90").arguments] == [
        (1,), (1,), (16,), (1,),
    ]  # fmt: skip


def test_autotune_and_what_is_left_out(kernel_hub_cli: Run, tmp_path: Path) -> None:
    ran = kernel_hub_cli(
        "build-triton", f"{KERNELS}:tuned_kernel", "--signature", SIGNATURE, "--autotune",
        "--arch", "sm90", "--out", str(tmp_path),
    )  # fmt: skip
    assert ran.code == 0 and len(triton.collection(tmp_path)) == 2, ran.err
    out = tmp_path / "square"
    ran = kernel_hub_cli(
        "build-triton", f"{KERNELS}:square_kernel", "--signature", "*fp16:16,*fp16:16",
        "--constexpr", "BLOCK=128", "--num-warps", "8", "--arch", "sm86", "--out", str(out),
    )  # fmt: skip
    assert ran.code == 1
    assert "left out: square_kernel_BLOCK128" in ran.out and "0 kernels" in ran.out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["add_kernel"], "FILE.py:NAME"),
        (["/nowhere/add.py:add_kernel"], "no file '/nowhere/add.py'"),
        ([f"{KERNELS}:add"], "has no 'add'; it has: add_kernel"),
        ([f"{KERNELS}:tl"], "no @triton.jit function"),
        ([ADD, "--constexpr", "BLOCK"], "--constexpr BLOCK: NAME=VALUE"),
        ([ADD, "--config", "BLOCK=64,num_warp=2"], "'num_warp'"),
        ([ADD, "--config", "BLOCK=tl.nothing"], "tl.nothing"),
        ([ADD, "--config", "BLOCK=64", "--autotune"], "one of them"),
        ([ADD, "--autotune"], "no @triton.autotune"),
        ([ADD, "--config", "BLOCK=100"], "power of 2"),
        ([ADD, "--config", "BLOCK=64", "--arch", "hopper"], "'hopper' is no architecture"),
    ],
)
def test_refusals_exit_with_2_and_write_nothing(
    argv: list[str], says: str, kernel_hub_cli: Run, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    rest = ["--signature", SIGNATURE, "--out", str(out)]
    ran = kernel_hub_cli("build-triton", *argv[:1], *rest, *argv[1:])
    assert ran.code == 2 and says in ran.err
    assert not out.exists()


def test_a_file_that_does_not_run(kernel_hub_cli: Run, tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text("import triton\nraise ValueError('half way')\n")
    ran = kernel_hub_cli(
        "build-triton", f"{file}:f", "--signature", "i32", "--out", str(tmp_path / "out")
    )
    assert ran.code == 2 and "ValueError: half way" in ran.err


def test_a_kept_grid_and_a_module(
    kernel_hub_cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests/formats"))
    for grid, code, words in (
        ("cdiv(n, BLOCK), 2", 0, "1 kernels in"),
        ("cdiv(m, BLOCK)", 2, "names 'm', unknown; integers are: n, BLOCK"),
        ("cdiv(n", 2, "expected ','"),
    ):
        ran = kernel_hub_cli(
            "build-triton", "triton_kernels:add_kernel", "--signature", SIGNATURE, "--constexpr",
            "BLOCK=64", "--arch", "sm90", "--grid", grid, "--out", str(tmp_path),
        )  # fmt: skip
        assert ran.code == code and words in ran.out + ran.err, ran.err
    kernels = triton.collection(tmp_path)
    (name,) = kernels
    assert kernels.function(name, arch="sm90").programs((None, None, None, 130)) == (3, 2, 1)
    for module, words in (
        ("no_such_module:add_kernel", "no_such_module cannot be imported"),
        ("triton_kernels:nothing", "triton_kernels has no 'nothing'; it has: add_kernel"),
        ("nothing.py:add_kernel", "no file 'nothing.py'"),
    ):
        ran = kernel_hub_cli(
            "build-triton", module, "--signature", SIGNATURE, "--out", str(tmp_path)
        )
        assert ran.code == 2 and words in ran.out + ran.err, ran.err
