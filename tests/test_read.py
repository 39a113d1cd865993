"""Files that somebody names: what is no ordinary file, or too large, is refused at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernel_hub import Kernel
from kernel_hub.errors import CubinCorruptError, CubinNotFoundError
from kernel_hub.files import read_file

SM90 = Path(__file__).parent / "cubin/data/tiny_sm90.cubin"


def test_a_file_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"12345678")
    assert read_file(path, 8) == read_file(str(path)) == b"12345678"
    with pytest.raises(CubinCorruptError, match=r"x is larger than"):
        read_file(path, 7)
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CubinCorruptError, match="larger than the 1024 MiB"):
        read_file(sparse)


@pytest.mark.skipif(not Path("/proc/self/maps").is_file(), reason="there is no /proc here")
def test_a_file_that_holds_more_than_it_says() -> None:
    with pytest.raises(CubinCorruptError, match="larger"):
        read_file("/proc/self/maps", 10)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes with names here")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pipe.cubin", "a pipe or a device"),
        ("zero.cubin", "a pipe or a device"),
        ("folder.cubin", "is a folder"),
        ("loop.cubin", "loop.cubin"),
        ("missing.cubin", "missing.cubin"),
        ("a\0b.cubin", r"a\\x00b\.cubin"),
        ("\ud800.cubin", r"\\ud800\.cubin"),
        ("x" * 5000 + ".cubin", "too long"),
    ],
)
def test_what_is_no_ordinary_file(tmp_path: Path, name: str, words: str) -> None:
    os.mkfifo(tmp_path / "pipe.cubin")
    (tmp_path / "zero.cubin").symlink_to("/dev/zero")
    (tmp_path / "loop.cubin").symlink_to("loop.cubin")
    (tmp_path / "folder.cubin").mkdir()
    for read in (read_file, Kernel):
        with pytest.raises(CubinNotFoundError, match=words) as caught:
            read(tmp_path / name)
        assert isinstance(caught.value, FileNotFoundError)


def test_a_kernel_of_an_ordinary_file(tmp_path: Path) -> None:
    (tmp_path / "link.cubin").symlink_to(SM90)
    assert Kernel(tmp_path / "link.cubin").function_names == ["add"]
