"""The cache folder: what is read from it, and what makes it be left alone.

Folders and files are put there by lot, as another user, a program with another umask or an accident
would; an oracle of the rule in words says what has to come of it.
"""

from __future__ import annotations

import os
import socket
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lots import Lots

from kernel_hub import cache_folder, tuning
from kernel_hub.errors import TableError

pytestmark = pytest.mark.skipif(
    not cache_folder._HAS_OWNERS, reason="files have no owners and modes on this system"
)
KEY = "ab" * 32
STRANGER = 54321


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """(device, inode) of what belongs to another user: only root could really give files away."""
    given: set[tuple[int, int]] = set()
    real = os.fstat

    def fstat(handle: int) -> os.stat_result:
        status = real(handle)
        if (status.st_dev, status.st_ino) in given:
            fields = list(status)
            fields[stat.ST_UID] = STRANGER
            return os.stat_result(fields)
        return status

    monkeypatch.setattr(cache_folder.os, "fstat", fstat)
    return given


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No folder was refused before; a umask that leaves the group everything."""
    monkeypatch.setattr(cache_folder, "_refused", {})
    before = os.umask(0o002)
    yield
    os.umask(before)


def give(others: set[tuple[int, int]], path: Path) -> None:
    status = path.lstat()
    others.add((status.st_dev, status.st_ino))


def loaded(kind: str = "ptx", key: str = KEY) -> tuple[bytes | None, list[str]]:
    """The entry, and the warnings of two looks at it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [cache_folder.load(kind, key) for _ in range(2)]
    assert found[0] == found[1] or found[1] is None
    return found[0], [str(warning.message) for warning in caught]


def put(base: Path, kind: str = "ptx", content: bytes = b"kept") -> Path:
    assert cache_folder.store(kind, KEY, content)
    return base / kind / KEY


def open_a_socket(path: Path) -> None:
    made = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    try:
        os.chdir(path.parent)  # its name may be too long for a socket's
        made.bind(path.name)
    finally:
        os.chdir(here)
        made.close()


# What an entry can have become, and whether it is still to be taken.
def _file(path: Path, _: Any) -> bool:
    return True


def _mode(bits: int, sound: bool) -> Any:
    def change(path: Path, _: Any) -> bool:
        path.chmod(bits)
        return sound

    return change


def _linked(path: Path, _: Any) -> bool:
    """A link to what would be sound."""
    there = path.with_name("elsewhere")
    path.rename(there)
    path.symlink_to(there)
    return False


def _dangling(path: Path, _: Any) -> bool:
    path.unlink()
    path.symlink_to("nowhere")
    return False


def _pipe(path: Path, _: Any) -> bool:
    path.unlink()
    os.mkfifo(path)
    return False


def _device(path: Path, _: Any) -> bool:
    """An endless device; where none can be made, a socket."""
    path.unlink()
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except (OSError, AttributeError):
        open_a_socket(path)
    return False


def _folder(path: Path, _: Any) -> bool:
    path.unlink()
    path.mkdir()
    return False


def _others(path: Path, others: set[tuple[int, int]]) -> bool:
    give(others, path)
    return False


def _cut(path: Path, _: Any) -> bool:
    path.write_bytes(path.read_bytes()[:-1])
    return False


def _huge(path: Path, _: Any) -> bool:
    os.truncate(path, cache_folder.MAX_BYTES + 1)
    return False


ENTRIES = [
    *(_file, _mode(0o644, True), _mode(0o444, True), _mode(0o664, False), _mode(0o602, False)),
    *(_linked, _dangling, _pipe, _device, _folder, _others, _cut, _huge),
]


# What its folder can have become, and whether the cache is still used.
def _loose(path: Path, _: Any) -> bool:
    path.chmod(0o775)
    return True


def _open_to_all(path: Path, _: Any) -> bool:
    path.chmod(0o777)
    return True


def _a_file(path: Path, _: Any) -> bool:
    path.rename(path.with_name("elsewhere"))
    path.write_text("")
    return False


FOLDERS = [_file, _file, _loose, _open_to_all, _linked, _a_file, _others]


@pytest.mark.parametrize("turn", range(150))
def test_only_what_nobody_else_can_have_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: set[tuple[int, int]], turn: int
) -> None:
    lots = Lots("cache", turn)
    base = tmp_path / "scratch" / "kernel_hub"
    if lots.random() < 0.5:  # an ancestor may be a link
        (tmp_path / "scratch").mkdir()
        (tmp_path / "home").symlink_to("scratch")
        base = tmp_path / "home" / "kernel_hub"
    monkeypatch.setenv(cache_folder.VARIABLE, str(base))
    kind = lots.choice(["source", "ptx", "probed"])
    path = put(base, kind)
    of_entry, of_folder = lots.choice(ENTRIES), lots.choice(FOLDERS)
    is_sound = of_entry(path, others)
    is_used = of_folder(path.parent, others)
    said = f"{lots}: {of_entry.__name__} in {of_folder.__name__}"

    found, texts = loaded(kind)
    assert found == (b"kept" if is_sound and is_used else None), said
    if not is_used:
        assert (
            len(texts) == 1 and "is not used" in texts[0] and cache_folder.VARIABLE in texts[0]
        ), said
        assert cache_folder.problem() and not cache_folder.store(kind, KEY, b"new"), said
        return
    assert len(texts) == (0 if is_sound else 2 if of_entry is _folder else 1), f"{said}: {texts}"
    assert not cache_folder.problem(), said
    assert not path.parent.stat().st_mode & 0o022, f"{said}: the folder was not tightened"
    if of_entry is not _folder:
        others.clear()  # a new file may get the inode of the old
        assert cache_folder.store(kind, KEY, b"new") and loaded(kind) == (b"new", []), said


def test_what_is_made_is_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / "a" / "b"
    monkeypatch.setenv(cache_folder.VARIABLE, str(base))
    path = put(base)
    assert [stat.S_IMODE(each.stat().st_mode) for each in (base, path.parent, path)] == [
        0o700, 0o700, 0o600,
    ]  # fmt: skip
    assert os.listdir(path.parent) == [KEY]


def test_a_root_of_ours_is_tightened_and_one_of_others_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that holds other things too, or is sticky as /tmp is, is not ours to change."""
    for name, mode, more, left in (
        ("ours", 0o775, "", 0o755),
        ("shared", 0o775, "of a colleague", 0o775),
        ("tmp", 0o1777, "", 0o1777),
    ):
        base = tmp_path / name
        base.mkdir()
        base.chmod(mode)
        if more:
            (base / more).touch()
        monkeypatch.setenv(cache_folder.VARIABLE, str(base))
        put(base)
        assert loaded() == (b"kept", [])
        assert stat.S_IMODE(base.stat().st_mode) == left, name


def test_a_folder_that_stays_loose_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems make up their modes, and changing them does nothing."""
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    put(tmp_path).parent.chmod(0o777)
    monkeypatch.setattr(cache_folder.os, "fchmod", lambda *_: None)
    found, texts = loaded()
    assert found is None and len(texts) == 1 and "cannot be changed" in texts[0]
    assert "mode 777" in cache_folder.problem()


def test_a_planted_link_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path / "cache"))
    path = put(tmp_path / "cache")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    path.unlink()
    path.symlink_to(precious)
    assert cache_folder.store("ptx", KEY, b"new")
    assert precious.read_text() == "mine" and loaded() == (b"new", [])


def test_a_full_disk_leaves_the_old_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    path = put(tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache_folder.os, "replace", full)
        assert not cache_folder.store("ptx", KEY, b"new")
    assert loaded() == (b"kept", []) and os.listdir(path.parent) == [KEY]


def test_without_owners_the_kind_of_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on Windows, where modes say little."""
    monkeypatch.setattr(cache_folder, "_HAS_OWNERS", False)
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    path = put(tmp_path)
    path.parent.chmod(0o777)
    path.chmod(0o666)
    assert loaded() == (b"kept", [])
    _pipe(path, None)
    found, texts = loaded()
    assert found is None and "no ordinary file" in texts[0]
    assert cache_folder.private_folder("nvrtc_headers") == tmp_path / "nvrtc_headers"


@pytest.mark.parametrize("change", [_linked, _pipe, _others, _mode(0o664, False)])
def test_a_users_table_is_held_to_the_same_rule(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    others: set[tuple[int, int]],
    change: Any,
) -> None:
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    table = tuning.Table("any", key=("n",), bucket="m", cubins=(), check=lambda *_, **__: "")
    try:
        path = table.user_file(tuning.Gpu((9, 0), 132, "some GPU"))
        assert path is not None
        text = '{"format": 1, "op": "any", "function": "any_{dtype}_{variant}", "gpus": []}'
        tuning.write(path, text)
        assert table.sections_of(path) == [] and stat.S_IMODE(path.stat().st_mode) == 0o600
        change(path, others)
        with pytest.raises(TableError, match=r"cannot be read: (it|others)"):
            table.sections_of(path)
        others.clear()
        tuning.write(path, text)
        assert table.sections_of(path) == []
    finally:
        del tuning.tables["any"]


def test_headers_go_into_a_folder_of_ours_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: set[tuple[int, int]]
) -> None:
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    made = cache_folder.private_folder("nvrtc_headers")
    assert made == tmp_path / "nvrtc_headers"
    give(others, made)
    with pytest.warns(RuntimeWarning, match=f"belongs to the user {STRANGER}"):
        assert cache_folder.private_folder("nvrtc_headers") is None
