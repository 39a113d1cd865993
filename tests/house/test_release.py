"""`make release`: what it writes, and that a damaged or unequal build is none."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import shipped_tree
from test_packaging import needs_setuptools

from kernel_hub.collection.manifest import open_collection

ROOT = Path(__file__).resolve().parents[2]
DATE = 1_700_000_000
ANCHOR = "readme = HERE"  # a line of setup.py before which tests put one of their own

pytest.importorskip("cyclonedx", reason="the bill of materials is written with it")
pytestmark = [
    needs_setuptools,
    pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed"),
]


# What no wheel holds.
BESIDE = ("tests", "docs", "examples", "benchmarks", "csrc")


def commit_of(folder: Path, line: str = "", without: tuple[str, ...] = ()) -> None:
    """What git would hold, with a few cubins, committed in `folder`; `line` goes into setup.py."""
    shipped_tree.copy_to(folder, shipped_tree.FEW, without)
    shutil.copy(ROOT / ".gitignore", folder)
    setup = (folder / "setup.py").read_text()
    assert ANCHOR in setup
    (folder / "setup.py").write_text(setup.replace(ANCHOR, f"{line}\n{ANCHOR}"))
    dates = dict.fromkeys(("GIT_COMMITTER_DATE", "GIT_AUTHOR_DATE"), f"{DATE} +0000")
    person = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    for command in (("init", "-q"), ("add", "."), (*person, "commit", "-q", "-m", "One")):
        subprocess.run(["git", *command], cwd=folder, env={**os.environ, **dates}, check=True)


def release(folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/release.py", "--python", sys.executable, "--output", str(out)],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"},
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a release; something that is not committed lay beside it."""
    folder, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    commit_of(folder)
    (folder / "kernel_hub/left_over.py").write_text("")
    done = release(folder, out)
    assert done.returncode == 0, done.stderr
    assert "?? kernel_hub/left_over.py" in done.stderr
    return out


def test_a_release_is_four_files_and_their_sums_hold(released: Path) -> None:
    names = {path.name for path in released.iterdir()}
    archives = {"kernel_hub-0.1.0-py3-none-any.whl", "kernel_hub-0.1.0.tar.gz"}
    assert names == {*archives, "kernel_hub-0.1.0.cdx.json", "SHA256SUMS"}
    lines = (released / "SHA256SUMS").read_text().splitlines()
    assert {line[66:] for line in lines} == names - {"SHA256SUMS"}
    for line in lines:
        assert (
            line
            == f"{hashlib.sha256((released / line[66:]).read_bytes()).hexdigest()}  {line[66:]}"
        )
    with zipfile.ZipFile(released / "kernel_hub-0.1.0-py3-none-any.whl") as wheel:
        assert "kernel_hub/left_over.py" not in wheel.namelist()
        assert {info.date_time for info in wheel.infolist()} == {(2023, 11, 14, 22, 13, 20)}


def test_the_bill_has_all_machine_code_and_requirements(released: Path) -> None:
    bill = json.loads((released / "kernel_hub-0.1.0.cdx.json").read_text())
    root = bill["metadata"]["component"]
    assert bill["metadata"]["timestamp"].startswith("2023-11-14T22:13:20")
    assert (root["name"], root["version"], root["purl"]) == (
        *("kernel_hub", "0.1.0"),
        "pkg:pypi/kernel-hub@0.1.0",
    )
    told = {one["name"]: one["hashes"][0]["content"] for one in root["components"]}
    with zipfile.ZipFile(released / "kernel_hub-0.1.0-py3-none-any.whl") as wheel:
        code = [name for name in wheel.namelist() if re.search(r"\.(cubin|so)$", name)]
        assert told == {name: hashlib.sha256(wheel.read(name)).hexdigest() for name in code}
    cubins = open_collection().manifest.cubins
    assert sum(name.endswith(".cubin") for name in code) == sum(
        len(cubins[name]) for name in shipped_tree.FEW
    )
    assert sum(name.endswith(".so") for name in code) == 1
    for one in root["components"]:
        assert {"kernel_hub:source_sha256"} <= {each["name"] for each in one["properties"]}
    for reference in root["externalReferences"]:
        content = (released / reference["url"]).read_bytes()
        assert reference["hashes"][0]["content"] == hashlib.sha256(content).hexdigest()
    scopes = {one["name"]: one["scope"] for one in bill["components"]}
    assert [name for name, scope in scopes.items() if scope == "required"] == ["numpy"]
    assert {"torch", "rich", "cuda-core"} <= scopes.keys() and scopes["nvcc"] == "excluded"
    needs = {one["ref"]: one.get("dependsOn") for one in bill["dependencies"]}
    assert needs["kernel_hub"] == ["requirement:numpy"]


def test_the_bill_is_what_cyclonedx_defines(released: Path) -> None:
    pytest.importorskip("jsonschema", reason="cyclonedx validates with it")
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = (released / "kernel_hub-0.1.0.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    wrong = text.replace('"type": "library"', '"type": "librarian"', 1)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(wrong) is not None


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("(HERE / 'kernel_hub/_made.py').write_text(str(HERE))", "two builds of one commit differ"),
        ("raise SystemExit('nothing doing')", "was not built"),
        (
            "(HERE / 'cubins/sm90/rope.cubin').write_bytes(b'other')",
            "kernel_hub/cubins/sm90/rope.cubin in ",
        ),
    ],
    ids=["the path in it", "no build", "another cubin than the manifest's"],
)
def test_what_is_no_release_is_not_written(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "checkout").mkdir()
    commit_of(tmp_path / "checkout", line, without=BESIDE)
    done = release(tmp_path / "checkout", tmp_path / "dist")
    assert (done.returncode, said in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "dist").exists()
    if kept := re.search(r"both are in (\S+)\. No release", done.stderr):
        shutil.rmtree(kept[1])


def test_the_tools_of_a_release_are_exact() -> None:
    lines = (ROOT / "tools/release.lock").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", pin) for pin in pins)
    assert {"setuptools", "cyclonedx-python-lib"} <= {pin.partition("==")[0] for pin in pins}
    # Only there: what installs the package may use any that is not too old.
    assert 'requires = ["setuptools>=61"]' in (ROOT / "pyproject.toml").read_text()
