"""Files and links that somebody planted where we write, or load from."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

import private
import pytest
from private import private_folder

from kernel_hub import Kernel
from kernel_hub.collection import manifest_write
from kernel_hub.image import shipped

SM90 = (Path(__file__).parents[1] / "cubin/data/tiny_sm90.cubin").read_bytes()


def test_a_manifest_is_not_written_through_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at its own name nor at the temporary one, which was the process's number."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    path = tmp_path / "cubins" / "manifest.json"
    path.parent.mkdir()
    path.symlink_to(precious)
    path.with_name(f".{path.name}.{os.getpid()}").symlink_to(precious)
    manifest_write.write(path, b"new")
    assert precious.read_text() == "mine"
    assert path.read_bytes() == b"new" and not path.is_symlink()
    # Even where the name is known: the file is made, never opened.
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    path.with_name(f".{path.name}.guessed").symlink_to(precious)
    with pytest.raises(FileExistsError):
        manifest_write.write(path, b"newer")
    assert precious.read_text() == "mine" and path.read_bytes() == b"new"


def test_a_manifest_has_the_modes_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        manifest_write.write(tmp_path / "new/x", b"")
    finally:
        os.umask(before)
    assert (tmp_path / "new/x").stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path / "new") == ["x"]


def test_a_file_that_was_changed_within_a_tick_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same size and times, and even the same inode: a clock of files has its steps."""
    other = SM90.replace(b"add", b"odd")
    path = tmp_path / "x.cubin"
    path.write_bytes(SM90)
    assert Kernel(path).function_names == ["add"]
    stamp = path.stat()
    path.write_bytes(other)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert Kernel(path).function_names == ["odd"]
    # By inode and change time: where neither is fresh, each of them tells.
    monkeypatch.setattr(shipped, "_FRESH_NS", 0)
    assert Kernel(path).function_names == ["odd"]
    other_path = tmp_path / "y"
    other_path.write_bytes(SM90)
    os.utime(other_path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    other_path.replace(path)
    assert Kernel(path).function_names == ["add"]


@pytest.mark.parametrize("planted", ["link", "file", "loose", "stranger"])
def test_libraries_of_the_tests_lie_in_a_folder_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    path = tmp_path / f"kernel_hub_any_{os.getuid()}"
    if planted == "link":
        (tmp_path / "elsewhere").mkdir()
        path.symlink_to("elsewhere")
    elif planted == "file":
        path.write_text("")
    elif planted == "loose":
        path.mkdir()
        path.chmod(0o777)
        (path / "libcuda.so").touch()
    else:
        path.mkdir()
        stranger = os.getuid() + 1
        monkeypatch.setattr(private.os, "getuid", lambda: stranger)
        path.rename(tmp_path / f"kernel_hub_any_{stranger}")
    with pytest.raises((RuntimeError, FileExistsError)):
        private_folder("any")


def test_a_folder_made_under_another_umask_is_tightened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    made = private_folder("any")
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o755)
    (made / "x.so").touch()
    assert private_folder("any").stat().st_mode & 0o777 == 0o700
