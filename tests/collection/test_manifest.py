"""manifest.json: reading lazily, writing deterministically, complaints, finding collections."""

from __future__ import annotations

import hashlib
import json
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from in_threads import in_threads

from kernel_hub.collection import manifest
from kernel_hub.collection.manifest import (
    Collection,
    CubinEntry,
    FunctionEntry,
    LaunchFacts,
    Manifest,
    ParamEntry,
    find_collection,
    open_collection,
)
from kernel_hub.errors import CubinCorruptError, CubinNotFoundError, ParamsError

IMAGE = b"an image"
BAD_NAMES = ("", ".", "..", ".x", "x.", "a b", "../x", "a\0b", "3")


FACTS = LaunchFacts("x: tiles", (256, 1, 1), 4096, {"block_m": 64, "stages": 3})
OLD = Path(__file__).parent.parent / "data" / "manifest_format_1.json"


def function(name: str, num_params: int = 2) -> FunctionEntry:
    params = tuple(ParamEntry(f"p{i}", "__nv_bfloat16*", 8, 8 * i) for i in range(num_params))
    launch = FACTS if name == "norm_bf16" else None
    return FunctionEntry(name, params, 32, 64, 0, 256, None, (2, 1, 1), None, False, launch=launch)


def cubin(name: str, arch: str, *functions: FunctionEntry, image: bytes = IMAGE) -> CubinEntry:
    return CubinEntry(
        name=name,
        arch=arch,
        file=f"{arch}/{name}.cubin",
        sha256=hashlib.sha256(image).hexdigest(),
        size_bytes=len(image),
        source=f"csrc/{name}.cu",
        source_sha256="0" * 64,
        toolkit="13.0.88",
        target=arch.replace("sm", "sm_"),
        flags=("-O3",),
        os_abi=65,
        abi_version=8,
        minimum_driver=13000,
        functions={f.name: f for f in functions},
    )


def sample() -> Manifest:
    return Manifest(
        {
            "rope": {"sm90": cubin("rope", "sm90", function("rope_bf16"), function("rope_fp16"))},
            "norm": {a: cubin("norm", a, function("norm_bf16")) for a in ("sm80", "sm90")},
        },
        {"native/launcher.so": "1" * 64},
    )


def raw() -> dict[str, Any]:
    value: dict[str, Any] = json.loads(sample().to_json())
    return value


@pytest.mark.parametrize("layout", ["own", "compact", "indented", "indent 0"])
def test_round_trip_from_any_layout(layout: str) -> None:
    text = sample().to_json()
    indent = {"compact": None, "indented": 2, "indent 0": 0}
    if layout != "own":
        text = json.dumps(json.loads(text), indent=indent[layout])
    read = Manifest.from_json(text, where="m.json")
    assert read == sample()
    assert read.to_json() == sample().to_json()


def test_to_json_is_sorted_and_ends_with_a_newline() -> None:
    text = sample().to_json()
    assert text.endswith("}\n")
    assert text.index('"norm"') < text.index('"rope"')
    assert json.loads(text)["format"] == manifest.FORMAT
    assert Manifest({}).to_json() == Manifest.from_json(Manifest({}).to_json(), where="m").to_json()


FUNCTION = ("cubins", "norm", "sm80", "functions", "norm_bf16")
CUBIN = ("cubins", "norm", "sm80")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), 3),
        (("format",), 0),
        (("files",), []),
        (("files", "native/launcher.so"), "abc"),
        (("params",), {}),
        (("params", 0), {}),
        (("params", 0, 0), "float*"),
        (("params", 0, 1), ["p1", "int", "4", 8]),
        (("launches", 0), []),
        (("launches", 0, "grid"), 3),
        (("launches", 0, "block"), [1, 1]),
        (("launches", 0, "shared_bytes"), -1),
        (("launches", 0, "stages"), "3"),
        (("format",), "1"),
        (("cubins",), []),
        (("cubins", "norm"), 3),
        (CUBIN, None),
        ((*CUBIN, "file"), "../../etc/passwd"),
        ((*CUBIN, "file"), "sm80/.."),
        ((*CUBIN, "file"), "/abs/x.cubin"),
        ((*CUBIN, "sha256"), "abc"),
        ((*CUBIN, "target"), ""),
        ((*CUBIN, "target"), "../../x"),
        ((*CUBIN, "target"), "compute_90"),
        ((*CUBIN, "size_bytes"), -1),
        ((*CUBIN, "size_bytes"), True),
        ((*CUBIN, "flags"), "-O3"),
        ((*CUBIN, "flags"), [3]),
        ((*CUBIN, "functions"), []),
        ((*CUBIN, "minimum_driver"), 1.5),
        (FUNCTION, []),
        ((*FUNCTION, "params"), {}),
        ((*FUNCTION, "params"), 1),
        ((*FUNCTION, "launch"), 1),
        ((*FUNCTION, "launch"), -1),
        ((*FUNCTION, "num_regs"), None),
        ((*FUNCTION, "max_threads"), "256"),
        ((*FUNCTION, "cluster"), [1, 2]),
        ((*FUNCTION, "cluster"), [0, 1, 1]),
        ((*FUNCTION, "required_block"), [1, 1, "1"]),
        ((*FUNCTION, "cooperative"), 1),
    ],
)
@pytest.mark.parametrize("own_layout", [True, False])
def test_a_bad_field_is_named_with_its_file(
    path: tuple[str | int, ...], value: object, own_layout: bool
) -> None:
    data = raw()
    inner: Any = data
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    text = json.dumps(data)
    lists = isinstance(data["params"], list) and isinstance(data["launches"], list)
    if own_layout and lists and path[0] != "format" and isinstance(data["cubins"], dict):
        cubins = (f"{json.dumps(name)}: {json.dumps(v)}" for name, v in data["cubins"].items())
        text = manifest._HEAD + json.dumps(data["files"])
        text += manifest._PARAMS + ",\n".join(map(json.dumps, data["params"]))
        text += manifest._LAUNCHES + ",\n".join(map(json.dumps, data["launches"]))
        text += manifest._CUBINS + ",\n".join(cubins) + manifest._TAIL
    with pytest.raises(CubinCorruptError) as caught:
        Manifest.from_json(text, where="here/m.json").to_json()
    field = str(path[-1]) if isinstance(path[-1], str) else f"[{path[-1]}]"
    assert "here/m.json" in str(caught.value)
    assert field in str(caught.value)


def fields_of(data: dict[str, Any], *path: str) -> list[str]:
    for key in path:
        data = data[key]
    return list(data)


@pytest.mark.parametrize(
    "path",
    [(key,) for key in fields_of(raw()) if key != "launches"]
    + [(*CUBIN, key) for key in fields_of(raw(), *CUBIN)]
    + [(*FUNCTION, key) for key in ("num_regs", "params")]
    + [("launches", 0, "grid")],
    ids=lambda path: path[-1],
)
def test_a_missing_field_is_named(path: tuple[str | int, ...]) -> None:
    data = raw()
    inner: Any = data
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    with pytest.raises(CubinCorruptError, match=rf"{path[-1]} must be .*missing"):
        Manifest.from_json(json.dumps(data), where="m.json").to_json()


def test_what_is_so_of_most_functions_is_left_out() -> None:
    data = raw()
    plain = function("f")._replace(
        static_shared_bytes=0, max_threads=None, cluster=None, launch=None
    )
    text = Manifest({"f": {"sm80": cubin("f", "sm80", plain)}}).to_json()
    assert json.loads(text)["cubins"]["f"]["sm80"]["functions"]["f"] == {
        "num_regs": 32,
        "params": 0,
    }
    assert Manifest.from_json(text, where="m").cubins["f"]["sm80"].functions["f"] == plain
    assert len(data["params"]) == len(data["launches"]) == 1  # each once


@pytest.mark.parametrize("own_layout", [True, False])
def test_format_1_is_read(own_layout: bool) -> None:
    text = OLD.read_text()
    if not own_layout:
        text = json.dumps(json.loads(text))
    read = Manifest.from_json(text, where="m.json")
    expected = sample().cubins
    assert list(read.cubins) == sorted(expected) and read.files == {}
    for name, archs in expected.items():
        for arch, entry in archs.items():
            plain = {n: f._replace(launch=None) for n, f in entry.functions.items()}
            assert read.cubins[name][arch] == entry._replace(functions=plain)
    assert json.loads(read.to_json())["format"] == 2


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '{"format": 1}', "[" * 100_000])
def test_text_that_is_no_manifest(text: str) -> None:
    with pytest.raises(CubinCorruptError, match=r"m\.json"):
        Manifest.from_json(text, where="m.json")


def test_a_broken_cubin_spoils_no_other() -> None:
    text = sample().to_json().replace('"sm80": {"file"', '"sm80": {"file" oops', 1)
    read = Manifest.from_json(text, where="m.json")
    assert list(read.cubins) == ["norm", "rope"]
    assert "rope_bf16" in read.cubins["rope"]["sm90"].functions
    with pytest.raises(CubinCorruptError, match=r"m\.json: cubins\.norm\.sm80 is not JSON"):
        read.cubins["norm"]["sm80"]


def test_a_large_one_costs_little_before_it_is_touched() -> None:
    functions = [function(f"f{i}", 12) for i in range(12)]
    archs = ("sm80", "sm89", "sm90")
    big = Manifest({f"k{i}": {a: cubin(f"k{i}", a, *functions) for a in archs} for i in range(80)})
    text = big.to_json()
    assert len(text) > 400_000  # as much as ours

    def milliseconds() -> float:
        started = time.perf_counter()
        read = Manifest.from_json(text, where="m.json")
        assert read.cubins["k7"]["sm90"].functions["f3"].params[11].offset_bytes == 88
        return (time.perf_counter() - started) * 1e3

    assert min(milliseconds() for _ in range(5)) < 5


def write_collection(root: Path) -> None:
    (root / "sm80").mkdir(parents=True)
    entry = cubin("norm", "sm80", function("norm_bf16"))
    (root / entry.file).write_bytes(IMAGE)
    (root / "manifest.json").write_text(Manifest({"norm": {"sm80": entry}}).to_json())


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a new package in tmp_path, importable, without cubins yet."""
    name = f"pkg_{hashlib.sha256(str(tmp_path).encode()).hexdigest()[:12]}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    return name


def read_norm(collection: Collection) -> bytes:
    return collection.read(collection.manifest.cubins["norm"]["sm80"])


@pytest.mark.parametrize("place", ["inside", "beside", "zip"])
def test_open_collection(
    place: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_collection(tmp_path / "cubins" if place == "beside" else tmp_path / package / "cubins")
    if place == "zip":
        with zipfile.ZipFile(tmp_path / "p.zip", "w") as archive:
            for file in (tmp_path / package).rglob("*.*"):
                archive.write(file, file.relative_to(tmp_path))
        monkeypatch.setattr(sys, "path", [str(tmp_path / "p.zip"), *sys.path[1:]])
    collection = open_collection(package)
    assert read_norm(collection) == IMAGE
    assert ("p.zip" in str(collection.root)) == (place == "zip")
    assert open_collection(package) is collection


def test_one_collection_for_all_threads(package: str, tmp_path: Path) -> None:
    write_collection(tmp_path / package / "cubins")
    found: list[Collection] = []

    def work() -> None:
        found.append(open_collection(package))

    in_threads(*[work] * 8)
    assert len(found) == 8 and len({id(c) for c in found}) == 1


def test_no_cubins_names_where_it_looked(package: str, tmp_path: Path) -> None:
    with pytest.raises(CubinNotFoundError) as caught:
        open_collection(package)
    assert str(tmp_path / package / "cubins") in str(caught.value)
    assert str(tmp_path / "cubins") in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ("not_there_at_all", CubinNotFoundError, "no package 'not_there_at_all'"),
        ("not_there_at_all.x", CubinNotFoundError, "not_there_at_all is not found"),
        *((name, CubinNotFoundError, "neither the name of a package") for name in BAD_NAMES),
        ("this", CubinNotFoundError, "ships no cubins"),
        ("this.x", CubinNotFoundError, "ships no cubins"),
        ("numpy.not_there_at_all", CubinNotFoundError, "is not found"),
        ("__main__", CubinNotFoundError, "__main__"),
        (None, ParamsError, "package=None"),
        ([], ParamsError, r"package=\[\]"),
    ],
)
def test_no_such_package(
    asked: Any,
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")  # where some of these would be folders
    for find in (open_collection, find_collection):
        with pytest.raises(error, match=message):
            find(asked)
    assert "this" not in sys.modules  # looked for, never run


def test_a_packages_code_is_not_run(package: str, tmp_path: Path) -> None:
    (tmp_path / package / "__init__.py").write_text("raise SystemExit")
    with pytest.raises(CubinNotFoundError, match="ships no cubins"):
        open_collection(package)
    write_collection(tmp_path / package / "cubins")
    assert read_norm(open_collection(package)) == IMAGE
    assert package not in sys.modules


def test_a_folder_of_cubins(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "any where"
    write_collection(folder)
    for asked in (folder, str(folder)):
        assert read_norm(find_collection(asked)) == IMAGE
    write_collection(tmp_path / package / "cubins")
    assert read_norm(find_collection(package)) == IMAGE
    for place in (tmp_path, package, tmp_path / "\0", tmp_path / ("long" * 1000)):
        if place != package:
            with pytest.raises(CubinNotFoundError, match=r"nor a folder with a manifest\.json"):
                find_collection(place)
    write_collection(tmp_path / "kernel_hub")
    monkeypatch.chdir(tmp_path)
    assert "norm" not in find_collection("kernel_hub").manifest.cubins  # ours stays ours
    (folder / "manifest.json").write_bytes(b"\xff")
    with pytest.raises(CubinCorruptError, match=r"manifest\.json cannot be read"):
        find_collection(folder)


def test_read_shows_both_digests(package: str, tmp_path: Path) -> None:
    write_collection(tmp_path / package / "cubins")
    collection = open_collection(package)
    file = tmp_path / package / "cubins/sm80/norm.cubin"
    file.write_bytes(b"changed")
    with pytest.raises(CubinCorruptError) as caught:
        read_norm(collection)
    assert hashlib.sha256(IMAGE).hexdigest() in str(caught.value)
    assert hashlib.sha256(b"changed").hexdigest() in str(caught.value)
    file.unlink()
    with pytest.raises(CubinNotFoundError, match=r"norm\.cubin is in the manifest but"):
        read_norm(collection)


def test_entries_do_not_change() -> None:
    with pytest.raises(AttributeError):
        cubin("norm", "sm80").arch = "sm90"  # type: ignore[misc]
