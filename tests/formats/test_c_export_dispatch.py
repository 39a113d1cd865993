"""Many configurations of a Triton kernel as one C function: it chooses what Python chooses."""

from __future__ import annotations

import ctypes
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from exported import COMPILERS, Dim3, cuda_include
from fakecuda import FakeCuda

pytest.importorskip("triton", reason="the collection is built by Triton")

import triton_variants as variants
from test_triton_dispatch import params
from triton_kernels import add_kernel, scale_kernel
from triton_variants import BLOCKS, NAMES, drawn, fitting

from kernel_hub import driver
from kernel_hub.errors import FunctionNotFoundError, ParamsError
from kernel_hub.formats import c_export, triton

INVALID, NO_BINARY = 1, 209


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("variants")
    variants.build(out, "sm80,sm90")
    return out


def linked(folder: Path, language: str, fake_path: str) -> ctypes.CDLL:
    """All sources of a folder as one library."""
    library = folder / f"liball_{language.replace('+', 'p')}.so"
    command = [*COMPILERS[language], "-Wall", "-Wextra", "-Werror", f"-I{cuda_include()}", "-O1"]
    sources = sorted(map(str, folder.glob("*.c")))
    command += ["-fPIC", "-shared", "-o", str(library), *sources, "-xnone", fake_path]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(library))


def c_values(values: dict[str, int]) -> list[Any]:
    pointers = [ctypes.c_uint64(values[name]) for name in NAMES[:3]]
    sizes = [ctypes.c_int(values["n"]), ctypes.c_int(values["stride"])]
    return [*pointers, *sizes, ctypes.c_float(values["scale"])]


@pytest.mark.parametrize("language", COMPILERS)
def test_c_chooses_what_python_chooses(
    context: FakeCuda, tmp_path: Path, built: Path, language: str
) -> None:
    written = c_export.export("scale_kernel", tmp_path, package=built)
    assert len(written) == 2 * (len(BLOCKS) * len(variants.ASSUMED) + 1) + 1
    library = linked(tmp_path, language, context.path)
    library.scale_kernel_algo_name.restype = ctypes.c_char_p
    found = triton.collection(built)
    kernel = found.kernel("scale_kernel")
    assert library.scale_kernel_get_num_algos() == 2
    names = [library.scale_kernel_algo_name(i) for i in (0, 1, 2, -1)]
    assert names == [*(name.encode() for name in kernel.algos), None, None]
    assert library.scale_kernel_load() == 0
    assert context.live("libraries") == len(BLOCKS) * len(variants.ASSUMED)
    rng = random.Random(9)
    stream = ctypes.c_void_p(0)
    seen = set()
    for _ in range(150):
        values, algo = drawn(rng), rng.randrange(2)
        kernel(**params(values), algo=algo, stream=0)
        wanted = context.launch()
        assert library.scale_kernel(stream, *c_values(values), ctypes.c_int(algo)) == 0
        launch = context.launch()
        assert (launch.gridDim, launch.params) == (wanted.gridDim, wanted.params), values
        assert len(launch.params or ()) == 2 + 6 - sum(fitting(values)[1:])
        kernel(**params(values), stream=0)
        wanted = context.launch()
        assert library.scale_kernel_default(stream, *c_values(values)) == 0
        assert context.launch().params == wanted.params
        assert context.launch().gridDim == wanted.gridDim
        seen.add((algo, fitting(values)))
    assert len(seen) == len(BLOCKS) * len(variants.ASSUMED)
    count = context.launch_count
    for algo in (2, -1):
        assert library.scale_kernel(stream, *c_values(values), ctypes.c_int(algo)) == INVALID
    assert library.scale_kernel_unload() == 0
    assert context.live("libraries") == len(BLOCKS) * len(variants.ASSUMED)  # Python's own
    context.set_capability(0, 7, 5)
    assert library.scale_kernel_default(stream, *c_values(values)) == NO_BINARY
    assert library.scale_kernel(stream, *c_values(values), ctypes.c_int(0)) == NO_BINARY
    assert library.scale_kernel_load() == NO_BINARY
    assert context.launch_count == count


def tuned(folder: Path, sections: list[dict[str, Any]], keys: list[str]) -> None:
    table = {"format": 1, "tables": {"scale_kernel": {"keys": keys, "gpus": sections}}}
    (folder / "tuned.json").write_text(json.dumps(table))


@pytest.mark.parametrize("seed", range(5))
def test_the_tuned_table_is_followed_as_in_python(
    make_fakecuda: Callable[..., FakeCuda], tmp_path: Path, built: Path, seed: int
) -> None:
    """Sections of several GPUs, drawn by lot; on each GPU the choice of Python for the sizes."""
    rng = random.Random(seed)
    folder = Path(shutil.copytree(built, tmp_path / "collection"))
    found = triton.collection(folder)
    entries = {name: found.entries(name) for name in found}
    keys = ["n", "stride"] if seed else ["n"]
    sections = []
    gpus = [("sm90", "NVIDIA H100", 114), ("sm80", "NVIDIA A100", 108), ("sm75", "T4", 40)]
    if seed:
        gpus.append(("sm90" if seed < 3 else "sm80", "Fake GPU 0", 132))  # the stand-in's own
    for arch, gpu, sms in gpus:
        choices = {}
        for power in range(12):
            # By turns where only n counts: a size taken for its neighbour shows.
            text = " ".join(f"{key}={1 << rng.randrange(0, 12)}" for key in keys)
            block = BLOCKS[power % 2] if keys == ["n"] else rng.choice(BLOCKS)
            text = f"n={1 << power}" if keys == ["n"] else text
            name = rng.choice([n for n in sorted(entries) if f"BLOCK{block}_" in n])
            sha256 = entries[name]["sm90" if arch == "sm75" else arch].sha256
            choices[text] = {"function": name, "us": 1.0, "sha256": sha256}
        sections.append({"arch": arch, "gpu": gpu, "num_sms": sms, "choices": choices})
    rng.shuffle(sections)
    tuned(folder, sections, keys)
    c_export.export("scale_kernel", tmp_path / "out", package=folder)
    header = (tmp_path / "out/scale_kernel.h").read_text()
    assert f"the fastest for such {', '.join(keys)} (measured on" in header
    fake = make_fakecuda(capability=(9, 0) if seed < 3 else (8, 0))
    library = linked(tmp_path / "out", "c", fake.path)
    kernel = triton.collection(folder).kernel("scale_kernel")
    chosen = set()
    with driver.get().on_device(0):
        for _ in range(300):
            values = drawn(rng)
            values["n"] = 1 << rng.randrange(0, 14) | rng.randrange(3)
            values["stride"] = rng.choice([1, 2, 3, 64, 1000])
            algo = BLOCKS.index(kernel.select(**params(values)).constexprs["BLOCK"])
            assert library.scale_kernel_default(ctypes.c_void_p(0), *c_values(values)) == 0
            assert fake.launch().gridDim[0] == -(-values["n"] // BLOCKS[algo]), values
            chosen.add(algo)
    assert chosen == {0, 1}


def test_a_table_by_other_sizes_is_left_to_the_caller(
    context: FakeCuda, tmp_path: Path, built: Path
) -> None:
    folder = Path(shutil.copytree(built, tmp_path / "collection"))
    name = next(iter(triton.collection(folder)))
    sha256 = triton.collection(folder).entries(name)["sm90"].sha256
    choice = {"function": name, "us": 1.0, "sha256": sha256}
    section = {"arch": "sm90", "gpu": "x", "num_sms": 1, "choices": {"rows=8": choice}}
    tuned(folder, [section], ["rows"])
    c_export.export("scale_kernel", tmp_path / "out", package=folder)
    header = (tmp_path / "out/scale_kernel.h").read_text()
    assert "the first (the tuned table goes by sizes that are no arguments)" in header


def test_configurations_without_a_grid_take_programs(context: FakeCuda, tmp_path: Path) -> None:
    folder = tmp_path / "collection"
    variants.build(folder, "sm90", grid=None)
    c_export.export(folder, tmp_path / "out", archs="sm90", prefix="my_")
    library = linked(tmp_path / "out", "c", context.path)
    values = {"x_ptr": 0x1000, "bias_ptr": 0, "out_ptr": 0x1000, "n": 16, "stride": 1, "scale": 2}
    for function, last in (("my_scale_kernel", [ctypes.c_int(1)]), ("my_scale_kernel_default", [])):
        given = [Dim3(3, 2, 1), *c_values(values), *last]
        assert library[function](ctypes.c_void_p(0), *given) == 0
        assert (context.launch().gridDim, len(context.launch().params or ())) == ((3, 2, 1), 6)


def test_what_makes_no_dispatcher(context: FakeCuda, tmp_path: Path, built: Path) -> None:
    folder, out = tmp_path / "collection", tmp_path / "out"
    block = {"BLOCK": 64}
    common: dict[str, Any] = {"constexprs": block, "arch": "sm90", "out": folder}
    types = "*fp32,*fp32,*fp32,i32"
    triton.compile(add_kernel, types, **common, name="plain")
    triton.compile(add_kernel, types, **common, name="gridded", grid="n")
    with pytest.raises(ParamsError, match="add_kernel: built without a grid: plain; build all"):
        c_export.export("add_kernel", out, package=folder)
    triton.compile(add_kernel, types, **common, name="gridded")
    triton.compile(add_kernel, types.replace("fp32", "fp16"), **common, name="half")
    with pytest.raises(ParamsError, match="different types: x_ptr is"):
        c_export.export("add_kernel", out, package=folder)
    triton.compile(add_kernel, types, **common, name="add_kernel")
    scale = "*fp32,*fp32,*fp32,i32,i32,2.5,64"
    triton.compile(scale_kernel, scale, arch="sm90", out=folder, name="scaled")
    with pytest.raises(FunctionNotFoundError, match="is called add_kernel too"):
        options = c_export.writing._Options(None, "", False, False, {})
        found = c_export.writing.find_collection(folder)
        list(
            c_export.writing._configurations(
                found, triton.collection(folder), "add_kernel", options
            )
        )
    # A folder still goes out whole: each by its own name, what can be is one function.
    written = {path.stem for path in c_export.export(folder, out)}
    assert written == {
        "CMakeLists",
        "add_kernel",
        "gridded",
        "half",
        "plain",
        "scaled",
        "scale_kernel",
    }
    half = "*fp32,*fp32,*fp32,i32,i32,bf16,64"
    triton.compile(scale_kernel, half, arch="sm90", out=tmp_path / "two", name="bits")
    assert c_export.export("scale_kernel", tmp_path / "three", package=tmp_path / "two")


def test_constants_that_c_compares(context: FakeCuda, tmp_path: Path) -> None:
    """None, whole numbers and floats that one configuration folds away and another takes."""
    folder = tmp_path / "collection"
    common: dict[str, Any] = {
        "constexprs": {"BLOCK": 64},
        "arch": "sm90",
        "out": folder,
        "grid": "n",
    }
    takes = dict(zip(NAMES, ("*fp32", "*fp32", "*fp32", "i32", "i32", "fp32"), strict=True))
    triton.compile(scale_kernel, takes, **common)
    less = {name: kind for name, kind in takes.items() if name not in ("scale", "stride")}
    common["constexprs"] = {"BLOCK": 64, "scale": 0.5, "stride": 4}
    triton.compile(scale_kernel, less, **common)
    c_export.export("scale_kernel", tmp_path / "out", package=folder)
    library = linked(tmp_path / "out", "c", context.path)
    kernel = triton.collection(folder).kernel("scale_kernel")
    for stride, scale, count in ((4, 0.5, 6), (4, 0.25, 8), (3, 0.5, 8)):
        values = [*[ctypes.c_uint64(64)] * 3, ctypes.c_int(5), ctypes.c_int(stride)]
        code = library.scale_kernel_default(ctypes.c_void_p(0), *values, ctypes.c_float(scale))
        assert (code, len(context.launch().params or ())) == (0, count)
        x = ctypes.c_void_p(64)
        kernel(x, x, x, 5, stride, scale, stream=0)
        assert len(context.launch().params or ()) == count


def test_the_command(tmp_path: Path, built: Path, context: FakeCuda) -> None:
    command = [sys.executable, "-m", "kernel_hub", "export", "scale_kernel", "--to"]
    command += [str(tmp_path), "--package", str(built), "--arch", "sm90"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "scale_kernel.c" in done.stdout + done.stderr
    linked(tmp_path, "c", context.path)
