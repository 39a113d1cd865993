"""One kernel in several configurations, chosen by its arguments and by the tuned table."""

from __future__ import annotations

import ctypes
import json
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakecuda import FakeCuda

pytest.importorskip("triton", reason="the collection is built by Triton")

import triton_variants as variants
from triton_kernels import add_kernel, scale_kernel
from triton_variants import BLOCKS, NAMES, assumed_by, drawn, fitting

from kernel_hub import DeviceArray
from kernel_hub.errors import (
    CubinCorruptError,
    CubinNotFoundError,
    LaunchConfigError,
    ParamsError,
    TableError,
)
from kernel_hub.formats import triton


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("variants")
    variants.build(out, "sm90")
    return out


def params(values: dict[str, int]) -> dict[str, Any]:
    given: dict[str, Any] = {name: ctypes.c_void_p(values[name]) for name in NAMES[:3]}
    given |= {"n": values["n"], "stride": values["stride"], "scale": float(values["scale"])}
    return given | ({} if values["bias_ptr"] else {"bias_ptr": None})


def test_the_one_that_assumes_the_most_runs(fakecuda: FakeCuda, built: Path) -> None:
    found = triton.collection(built)
    kernel = found.kernel("scale_kernel")
    assert kernel.algos == [f"BLOCK{block}_w4_s3" for block in BLOCKS]
    assert [argument.name for argument in kernel.arguments] == NAMES
    said = {name: assumed_by(name, found.described(name)) for name in found}
    assert len(set(said.values())) == len(said) == len(BLOCKS) * len(variants.ASSUMED)
    names = {found.function(name, arch="sm90"): name for name in found}
    rng = random.Random(3)
    seen = set()
    for _ in range(300):
        values, algo = drawn(rng), rng.randrange(2)
        chosen = names[kernel.select(**params(values), algo=algo)]
        assert said[chosen] == (BLOCKS[algo], fitting(values)), values
        assert kernel.select(*params(values).values(), algo=kernel.algos[algo]) is found[chosen]
        seen.add(chosen)
    assert seen == {*said}


def test_none_is_for_what_is_compiled_for_none(fakecuda: FakeCuda, tmp_path: Path) -> None:
    """Seen on a GPU: a configuration that reads the bias was launched without one."""
    variants.build(tmp_path / "two", "sm90", assumed=[variants.ASSUMED[0], variants.ASSUMED[-1]])
    kernel = triton.collection(tmp_path / "two").kernel("scale_kernel")
    values = {name: ctypes.c_void_p(0x10000) for name in NAMES[:3]}
    values |= {"n": 64, "stride": 1, "scale": 2.0}
    reads = len(kernel.select(**values).params or ())
    assert len(kernel.select(**values | {"bias_ptr": None}).params or ()) < reads
    for bias in (None, ctypes.c_void_p(0)):
        with pytest.raises(ParamsError, match="bias_ptr is None, and it reads it"):
            kernel.select(**values | {"bias_ptr": bias, "stride": 3})


def test_a_call_launches_on_the_kept_grid(fakecuda: FakeCuda, built: Path) -> None:
    kernel = triton.collection(built).kernel("scale_kernel")
    x, bias, out = (DeviceArray.zeros(4096, "fp32") for _ in range(3))
    kernel(x, bias, out, 4000, 1, 2.5, algo=1)
    launch = fakecuda.launch()
    assert (launch.gridDim, launch.blockDim) == ((8, 1, 1), (128, 1, 1))
    pointers = tuple(struct.pack("<Q", each.ptr) for each in (x, bias, out))
    tail = (struct.pack("<i", 4000), struct.pack("<f", 2.5), bytes(8), bytes(8))
    assert launch.params == (*pointers, *tail)  # the stride is compiled to be 1
    kernel(x, bias, out, n=4000, stride=2, scale=2.5)
    assert fakecuda.launch().gridDim == (16, 1, 1)
    assert fakecuda.launch().params[4] == struct.pack("<i", 2)  # type: ignore[index]
    kernel[(3, 2)](x, None, out, np.int32(16), ctypes.c_int(1), 2.5, stream=0)
    assert fakecuda.launch().gridDim == (3, 2, 1)
    assert fakecuda.launch().params[:2] == (pointers[0], pointers[2])  # type: ignore[index]
    launches = fakecuda.launch_count
    kernel(x, None, out, 0, 1, 2.5)  # an empty grid
    for given, words in (
        ((x, bias, out), "missing n, stride, scale; the kernel takes 6: float. x_ptr, "),
        ((x, bias, out, 1, 1, 2.0, 3), "too many params"),
        ((x, bias, out, 1.5, 1, 2.0), "n of scale_kernel is 1.5: a whole number"),
    ):
        with pytest.raises(ParamsError, match=words):
            kernel(*given)
    with pytest.raises(ParamsError, match="algo=2 of scale_kernel: 0 to 1, or one of BLOCK256"):
        kernel(x, bias, out, 1, 1, 2.0, algo=2)
    with pytest.raises(LaunchConfigError, match="each is from 0"):
        kernel(x, bias, out, -600, 1, 2.0)
    assert fakecuda.launch_count == launches


def test_no_configuration_fits(fakecuda: FakeCuda, built: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(built, tmp_path / "some"))
    found = triton.collection(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in found:
        if not assumed_by(name, found.described(name))[1][1]:
            del manifest["cubins"][name]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    kernel = triton.collection(folder).kernel("scale_kernel")
    x = ctypes.c_void_p(0x1000)
    with pytest.raises(ParamsError, match=r"be None\n.*: n is 0x11, not divisible by 16\n"):
        kernel(x, x, x, 17, 1, 1.0)
    with pytest.raises(ParamsError, match=r"arguments with algo=1\n.*_BLOCK512.*be 1\n"):
        kernel(x, None, x, 16, 2, 1.0, algo=1)
    assert fakecuda.launch_count == 0


def test_the_tuned_table_chooses_the_algo(fakecuda: FakeCuda, built: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(built, tmp_path / "tuned"))
    found = triton.collection(folder)
    best = {
        block: next(
            name
            for name in found
            if assumed_by(name, found.described(name)) == (block, (True, False, False))
        )
        for block in BLOCKS
    }

    def write(keys: list[str], choices: dict[str, int], arch: str = "sm90") -> None:
        section = {
            "arch": arch, "gpu": "another", "num_sms": 7,
            "choices": {
                text: {"function": best[block], "us": 1.0, "sha256": found.image_of(best[block])}
                for text, block in choices.items()
            },
        }  # fmt: skip
        table = {"format": 1, "tables": {"scale_kernel": {"keys": keys, "gpus": [section]}}}
        (folder / "tuned.json").write_text(json.dumps(table))

    write(["n"], {"n=1024": 512, "n=8192": 256})
    kernel = triton.collection(folder).kernel("scale_kernel")
    x = ctypes.c_void_p(0x1000)
    for n, block in ((1000, 512), (16, 512), (2048, 512), (4096, 256), (8192, 256), (100_000, 256)):
        for stride in (1, 3):
            chosen = kernel.select(x, None, x, n, stride, 1.0)
            assert chosen.constexprs["BLOCK"] == block, n
            assert ("stride" in chosen.constexprs) == (stride == 1 and n % 16 == 0)
    assert kernel.select(x, None, x, 1000, 1, 1.0, algo=0).constexprs["BLOCK"] == 256
    write(["rows"], {"rows=1024": 512})  # no argument: the caller asks tuned() itself
    kernel = triton.collection(folder).kernel("scale_kernel")
    assert kernel.select(x, None, x, 1000, 1, 1.0).constexprs["BLOCK"] == 256
    assert triton.collection(folder).tuned().name(rows=7) == best[512]


def test_each_gpu_has_its_own_functions_and_choices(
    make_fakecuda: Callable[..., FakeCuda],
    built: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = make_fakecuda(devices=2)
    fake.set_capability(1, 8, 0)
    variants.build(tmp_path, "sm80,sm90")
    kernel = triton.collection(tmp_path).kernel("scale_kernel")
    for device, arch in ((0, "sm90"), (1, "sm80"), (0, "sm90")):
        for module in ("dispatcher", "tuned_file"):
            name = f"kernel_hub.formats.triton.ahead.{module}.current_device"
            monkeypatch.setattr(name, lambda device=device: device)
        monkeypatch.setattr(
            "kernel_hub.arrays.interop.current_device", lambda device=device: device
        )
        x = DeviceArray.zeros(64, "fp32", device=device)
        assert kernel.select(x, None, x, 64, 1, 1.0).spec.arch == arch
        kernel(x, None, x, 64, 1, 1.0)
        assert fake.launch().device == device
    (tmp_path / "tuned.json").write_text("{")
    with pytest.raises(TableError, match=r"tuned\.json: cannot be read"):
        triton.collection(tmp_path).kernel("scale_kernel").select(x, None, x, 64, 1, 1.0)


def test_what_makes_no_family(fakecuda: FakeCuda, tmp_path: Path) -> None:
    types = "*fp32,*fp32,*fp32,i32"
    first = triton.compile(add_kernel, types, constexprs={"BLOCK": 64}, arch="sm90", out=tmp_path)
    found = triton.collection(tmp_path)
    assert found.kernels() == ["add_kernel"]
    assert found.kernel("add_kernel").algos == ["BLOCK64_w4_s3"]
    with pytest.raises(CubinNotFoundError, match="has no kernel 'other'; it has: add_kernel"):
        found.kernel("other")
    with pytest.raises(LaunchConfigError, match=r"no grid was kept with it: .*--grid"):
        found[first].run(None, None, None, 4)
    half = types.replace("fp32", "fp16")
    triton.compile(add_kernel, half, constexprs={"BLOCK": 64}, arch="sm90", out=tmp_path)
    with pytest.raises(ParamsError, match=r"different types: x_ptr is \*fp\d+ in add_kernel_"):
        triton.collection(tmp_path).kernel("add_kernel")


def test_a_kept_grid_is_checked_when_it_is_built_and_read(
    fakecuda: FakeCuda, tmp_path: Path
) -> None:
    def build(grid: Any, **options: Any) -> str:
        signature = {**dict.fromkeys(NAMES[:3], "*fp32"), "n": "i32", "stride": "i32:1",
                     "scale": "fp32"}  # fmt: skip
        return triton.compile(
            scale_kernel, signature, constexprs={"BLOCK": 64}, arch="sm90", out=tmp_path,
            grid=grid, **options,
        )  # fmt: skip

    for grid, words in (
        ("n / rows", "names 'rows', unknown; integers are: n, stride, BLOCK"),
        ("x_ptr", r"names 'x_ptr', which is '\*fp32'"),
        ("scale", "names 'scale', which is 'fp32'"),
        ("n +", "expected a number"),
        (4, "a text such as"),
    ):
        with pytest.raises(ParamsError, match=words):
            build(grid)
    assert not any(tmp_path.iterdir())
    name = build("n / BLOCK * stride, 2")
    again = build("n / BLOCK", name="other")
    found = triton.collection(tmp_path)
    x = DeviceArray.zeros(64, "fp32")
    found[name].run(x, x, x, n=640, scale=1.0)
    assert fakecuda.launch().gridDim == (10, 2, 1)
    found[again].run(x, x, x, 640, 1.0, stream=0)
    assert fakecuda.launch().gridDim == (10, 1, 1)
    assert repr(found[name].grid) == "Grid('n / BLOCK * stride, 2')"
    manifest = tmp_path / "manifest.json"
    text = manifest.read_text()
    for wrong, words in (
        ('"grid": 7', "triton.grid: grid=7: a text"),
        ('"grid": "n /"', "triton.grid: .*expected a number"),
        ('"grid": "exit"', "triton.grid: .*names 'exit', unknown"),
    ):
        manifest.write_text(text.replace('"grid": "n / BLOCK * stride, 2"', wrong))
        with pytest.raises(CubinCorruptError, match=words):
            triton.collection(tmp_path)[name]
        with pytest.raises(CubinCorruptError, match=words):
            triton.collection(tmp_path).kernel("scale_kernel")
