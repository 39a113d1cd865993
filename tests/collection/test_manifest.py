"""manifest.json: reading lazily, writing deterministically, complaints, finding collections."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import threading
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from kernel_hub.collection import manifest
from kernel_hub.collection.manifest import (
    Collection,
    CubinEntry,
    FunctionEntry,
    Manifest,
    ParamEntry,
    find_collection,
    open_collection,
)
from kernel_hub.errors import CubinCorruptError, CubinNotFoundError, ParamsError

IMAGE = b"an image"
BAD_NAMES = ("", ".", "..", ".x", "x.", "a b", "../x", "a\0b", "3")


def function(name: str, num_params: int = 2) -> FunctionEntry:
    params = tuple(ParamEntry(f"p{i}", "__nv_bfloat16*", 8, 8 * i) for i in range(num_params))
    return FunctionEntry(name, params, 32, 64, 0, 256, None, (2, 1, 1), None, False)


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
        }
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


def test_entries_are_hashable_values() -> None:
    assert len({cubin("norm", "sm80"), cubin("norm", "sm80"), cubin("norm", "sm90")}) == 2


FUNCTION = ("cubins", "norm", "sm80", "functions", "norm_bf16")
CUBIN = ("cubins", "norm", "sm80")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("format",), 2),
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
        ((*FUNCTION, "params", 0), "float*"),
        ((*FUNCTION, "params", 1, "size_bytes"), "8"),
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
    if own_layout and len(path) > 1:
        lines = (f"{json.dumps(name)}: {json.dumps(v)}" for name, v in data["cubins"].items())
        text = manifest._HEAD + ",\n".join(lines) + manifest._TAIL
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
    [(*CUBIN, key) for key in fields_of(raw(), *CUBIN)]
    + [(*FUNCTION, key) for key in fields_of(raw(), *FUNCTION)],
    ids=lambda path: path[-1],
)
def test_a_missing_field_is_named(path: tuple[str, ...]) -> None:
    data = raw()
    inner: Any = data
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    with pytest.raises(CubinCorruptError, match=rf"{path[-1]} must be .*missing"):
        Manifest.from_json(json.dumps(data), where="m.json").to_json()


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


def test_a_megabyte_costs_little_before_it_is_touched() -> None:
    functions = [function(f"f{i}", 12) for i in range(12)]
    archs = ("sm80", "sm89", "sm90")
    big = Manifest({f"k{i}": {a: cubin(f"k{i}", a, *functions) for a in archs} for i in range(40)})
    text = big.to_json()
    assert len(text) > 1_000_000

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

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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
    with pytest.raises(dataclasses.FrozenInstanceError):
        cubin("norm", "sm80").arch = "sm90"  # type: ignore[misc]
