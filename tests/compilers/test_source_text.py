"""What is read from source text without a compiler, and the user's cache of results."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kernel_hub import Kernel, cache_folder
from kernel_hub.compilers import nvrtc
from kernel_hub.compilers.declarations import read_instance
from kernel_hub.errors import (
    CompileError,
    CubinNotFoundError,
    KernelHubError,
    MissingPackageError,
    ParamsError,
)
from kernel_hub.image import source

TINY = Path(__file__).parents[1] / "cubin/data/tiny_sm90.cubin"

SOURCE = r"""
// template <typename T> __global__ void scale(T only_a_comment);
#define KERNEL(name) \
    __global__ void name(int only_a_macro)
#include <stdint.h>
namespace ns {
using real = double;
template <typename T, int kCount = 4>
__global__ void __launch_bounds__(256) scale(T* __restrict__ out, const T* x, T factor, int n) {
    if (n) { out[0] = "template <"[0]; }
}
template <class T> static __device__ T help(T x) { return x; }
__global__ void plain(real* x, unsigned long long n) {}
}
extern "C" __global__ void declared_twice(float* x, unsigned n);
extern "C" __global__ void declared_twice(float* y, unsigned m) {}
__global__ void overloaded(int a) {}
__global__ void overloaded(float a) {}
template <typename... Ts> __global__ void variadic(Ts... values) {}
template <typename T> __device__ T before(); __global__ void after(int* T) {}
"""


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("ns::scale<float>", "out float*, x float*, factor float, n int"),
        ("ns::scale<__half, 8>", "out __half*, x __half*, factor __half, n int"),
        ("ns::plain", "x double*, n uint64_t"),
        ("declared_twice", "x float*, n uint32_t"),
        ("after", "T int*"),
    ],
)
def test_an_instance_is_read_from_the_source(expression: str, expected: str) -> None:
    found = read_instance(SOURCE, expression, "here")
    assert ", ".join(" ".join(param) for param in found) == expected


@pytest.mark.parametrize(
    "expression",
    ["overloaded", "ns::scale", "ns::scale<int, 4, 5>", "variadic<int>", "nothing", "name"],
)
def test_what_is_not_certain_is_refused(expression: str) -> None:
    with pytest.raises(KernelHubError, match=r"^here"):
        read_instance(SOURCE, expression, "here")


def test_plain_names_of_mangled_ones() -> None:
    symbols = ["plain", "_Z5scalePfi", "_ZN2ns6nestedEPh", "_Z4overf", "_Z4overi", "_Z1fIfEvPT_"]
    assert source._plain_names(symbols) == {
        "plain": "plain",
        "scale": "_Z5scalePfi",
        "ns::nested": "_ZN2ns6nestedEPh",
        "_Z4overf": "_Z4overf",
        "_Z4overi": "_Z4overi",
        "_Z1fIfEvPT_": "_Z1fIfEvPT_",
    }


def test_options_that_look_into_files() -> None:
    options = ["-Ia", "-I", "/b", "--include-path=c", "-DI=1", "--pre-include=d.h", "-include", "e"]
    folders, headers = nvrtc.looked_into(options)
    assert folders == [Path("a").absolute(), Path("/b"), Path("c").absolute()]
    assert headers == ["d.h", "e"]


def test_the_state_of_included_files(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "sub").mkdir(parents=True)
    second.mkdir()
    (first / "sub" / "a.h").write_text('#include "b.h"\n')
    (first / "sub" / "b.h").write_text("#define B 1\n")

    def state(code: str = "#include <sub/a.h>\n", *included: str) -> list[str] | None:
        return nvrtc.include_state(code, included, [first, second])

    before = state()
    assert before is not None
    assert [Path(path).name for path in before if path.startswith("/")] == ["a.h", "b.h"]
    (first / "sub" / "b.h").write_text("#define B 2\n")
    changed = state()
    assert changed != before
    # A file that would be found first, or that __has_include asks for, counts once it is there.
    (second / "sub").mkdir()
    (second / "sub" / "a.h").write_text("")
    assert state() != changed
    asking = "#if __has_include(<late.h>)\n#endif\n"
    assert state(asking) == []
    (second / "late.h").write_text("")
    assert state(asking) != []
    assert state("", "late.h") != []
    assert state("#include HEADER\n") is None
    assert state(f'#include "{"x" * 5000}.h"\n') == [], "no name of a file"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"code": 5}, "pass CUDA C\\+\\+ as a str"),
        ({"code": "int x;\0"}, "a NUL"),
        ({"code": "// \ud800"}, "a lone surrogate"),
        ({"code": Path("/nowhere/x.cu")}, "cannot read '/nowhere/x.cu'"),
        ({"code": Path("a\0b")}, r"a\\x00b"),
        ({"code": TINY.parent}, "is a folder"),
        ({"code": TINY}, "is not UTF-8"),
        ({"options": 5}, "options=5"),
        ({"options": ["-O3", 5]}, "options="),
        ({"options": "-DN=1 -arch=sm_80"}, "arch='sm90'"),
        ({"options": ["--gpu-architecture=sm_80"]}, "arch='sm90'"),
        ({"options": "'"}, "as a shell takes it"),
        ({"options": ["-DN=\0"]}, "options="),
        *(
            ({"options": [f"{dash}{option}=file"]}, "writes files")
            for option in ("time", "create-pch", "pch-dir", "fdevice-time-trace")
            for dash in ("-", "--")
        ),
        *(
            ({"options": [option]}, f"holds '{option}': it makes no machine code")
            for option in ("-dlto", "--dlink-time-opt", "-optix-ir", "--optix-ir")
        ),
        ({"options": ["-dc"]}, "links nothing"),
        ({"options": ["--relocatable-device-code=true"]}, "links nothing"),
        ({"arch": "hopper"}, "arch='hopper'"),
        ({"arch": 90.0}, "arch=90.0"),
        ({"arch": (9, 0, 0)}, "arch="),
        ({"function_names": 5}, "function_names=5"),
        ({"function_names": [b"f"]}, r"function_names=\[b'f'\]"),
        ({"function_names": ["\ud800"]}, "a lone surrogate"),
        ({"function_names": ["f\0"]}, "a NUL"),
    ],
)
def test_wrong_arguments_need_no_compiler(arguments: dict[str, object], message: str) -> None:
    with pytest.raises((ParamsError, CompileError, CubinNotFoundError), match=message):
        Kernel.from_source(**{"code": "", "arch": "sm90", **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [5, [5], [None], [[]], [b"add"]])
def test_names_of_functions_are_text(names: Any) -> None:
    with pytest.raises(ParamsError, match="function_names="):
        Kernel(TINY, names)


class ObjectCode:
    """As cuda.core's: a sound cubin, but for what a test puts in."""

    def __init__(self, **given: object) -> None:
        self.__dict__.update({"code_type": "cubin", "code": TINY.read_bytes(), **given})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"code_type": 5}, "ObjectCode of 5"),
        ({"code": None}, "code is None, not a cubin"),
        ({"code": 5}, "code is 5"),
        ({"code": "/nowhere/x.cubin"}, "/nowhere/x.cubin"),
        ({"code_type": "ptx", "code": "\ud800\n"}, "neither cubin, fatbin nor PTX"),
        ({"symbol_mapping": 5}, "symbol_mapping is 5"),
        ({"symbol_mapping": {"f": b"\xff"}}, "no function '\ufffd'"),
    ],
)
def test_object_code_that_is_not_as_it_should_be(given: dict[str, object], words: str) -> None:
    with pytest.raises(KernelHubError, match=words):
        Kernel(ObjectCode(**given))
    named = ObjectCode(symbol_mapping={"f<int>": b"add"})
    assert Kernel(named).function_names == ["f<int>"]


def test_the_architecture_of_a_gpu() -> None:
    assert [source._own_arch(c) for c in ((8, 9), (9, 0), (12, 1))] == [
        *("sm_89", "sm_90a", "sm_121a"),
    ]


def test_without_cuda_core(monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc._bindings.cache_clear()
    for name in ("cuda", "cuda.pathfinder", "cuda.bindings"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(MissingPackageError, match=r"pip install 'kernel_hub\[jit\]'") as caught:
        Kernel.from_source("", arch="sm90")
    assert isinstance(caught.value, ImportError)
    nvrtc._bindings.cache_clear()


# ---- the cache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    return tmp_path


def test_what_is_stored_comes_back(folder: Path) -> None:
    key = cache_folder.key("text", b"bytes", 7)
    assert key != cache_folder.key("textbytes", 7) != cache_folder.key("text", "bytes7")
    assert cache_folder.load("kind", key) is None
    assert cache_folder.store("kind", key, b"content")
    assert cache_folder.load("kind", key) == b"content"
    assert cache_folder.load("other", key) is None
    assert [path.name for path in (folder / "kind").iterdir()] == [key], "nothing half-written"


@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 40])
def test_a_damaged_entry_is_gone_with_a_warning(folder: Path, damage: bytes) -> None:
    cache_folder.store("kind", "entry", b"content")
    path = folder / "kind" / "entry"
    path.write_bytes(damage or path.read_bytes()[:-1])
    with pytest.warns(RuntimeWarning, match=r"entry.*damaged"):
        assert cache_folder.load("kind", "entry") is None
    assert not path.exists()


def test_an_entry_under_another_name_is_gone_with_a_warning(folder: Path) -> None:
    cache_folder.store("kind", "entry", b"content")
    (folder / "kind" / "entry").rename(folder / "kind" / "other")
    with pytest.warns(RuntimeWarning, match=r"other is damaged"):
        assert cache_folder.load("kind", "other") is None
    assert not list((folder / "kind").iterdir())


SYMBOLS = {"f": "add"}
TYPES = {"f": [("x", "float*")] * 3 + [("n", "int")]}


@pytest.mark.parametrize(
    "changed",
    [
        None, [], 0, {}, {"symbols": 5}, {"symbols": {"f": 5}}, {"symbols": {"f": "nothing"}},
        {"types": 5}, {"types": {"f": 5}}, {"types": {"f": [1]}}, {"types": {"f": [[1, 2]]}},
        {"types": {"f": [["a", "float*"]]}}, {"types": {"f": [["a", "double"]] * 4}},
        {"log": None}, {"more": 1}, {"image": b"garbage"}, {"image": b""},
    ],
)  # fmt: skip
def test_an_entry_of_a_source_is_checked_whole(folder: Path, changed: Any) -> None:
    """Sealed as it should be, and not what from_source writes."""
    head, image = changed, TINY.read_bytes()
    if changed:
        head = {"symbols": SYMBOLS, "types": TYPES, "log": "", **changed}
        image = head.pop("image", image)
    assert cache_folder.store("source", "entry", json.dumps(head).encode() + b"\n" + image)
    with pytest.warns(RuntimeWarning, match="entry is damaged and is made anew: ."):
        assert source._read_entry("entry", "here") is None
    assert not (folder / "source" / "entry").exists()


def test_an_entry_of_a_source_comes_back(folder: Path) -> None:
    cache_folder.store("source", "entry", source._entry(TINY.read_bytes(), SYMBOLS, TYPES, "said"))
    image, log = source._read_entry("entry", "here") or pytest.fail("it is sound")
    assert log == "said"
    assert image.spec("f").prototype() == "f(float* x, float* x, float* x, int n)"


def test_a_folder_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv(cache_folder.VARIABLE, str(folder / "file"))
    assert not cache_folder.store("kind", "entry", b"content")
    assert cache_folder.load("kind", "entry") is None


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache_folder.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder.folder("ptx") == Path("/xdg/kernel_hub/ptx")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder.root() == Path(os.path.expanduser("~"), ".cache", "kernel_hub")
    monkeypatch.setenv(cache_folder.VARIABLE, "0")
    assert cache_folder.root() is None
    assert not cache_folder.store("kind", "entry", b"content")
    assert cache_folder.load("kind", "entry") is None
