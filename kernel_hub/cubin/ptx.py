"""`read_ptx`: version, target and the parameters of each entry of a PTX text, not its code."""

from __future__ import annotations

import re

from ..errors import CubinCorruptError
from .elf import corrupt
from .model import PtxInfo, PtxParam

_VERSION = re.compile(r"\s*\.version\s+(\d{1,3})\.(\d{1,3})\s")
_TARGET = re.compile(r"\s*\.target\s+(sm_\d{2,3}[af]?)(?=[\s,])")
_ENTRY = re.compile(r"\.entry\s+([A-Za-z_$%][\w$]*)\s*(\()?")
_BLOCK = re.compile(r"\.reqntid\s+(\d{1,9})(?:\s*,\s*(\d{1,9}))?(?:\s*,\s*(\d{1,9}))?")
_BODY = re.compile(r"[{;]")
_MAX_DIRECTIVES = 512  # characters between an entry's parameters and its body
_COMMENT = re.compile(r"//|/\*")
_NAME = re.compile(r"([A-Za-z_$%][\w$]*)(?:\s*\[\s*(\d{1,9})\s*\])?\Z")

_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}
_HANDLES = {".texref": 8, ".samplerref": 8, ".surfref": 8}
_SPACES = {".global", ".const", ".shared", ".local", ".param"}

# PTX 8.0 to 8.4 came with CUDA 12.0 to 12.4, 9.N with 13.N.
_DRIVERS = {(8, 5): 12050, (8, 6): 12070, (8, 7): 12080, (8, 8): 12090}


def driver_of(version: tuple[int, int]) -> int:
    """The first driver (12000 is CUDA 12.0, the oldest one here) that compiles PTX of `version`."""
    major, minor = version
    if version in _DRIVERS:
        return _DRIVERS[version]
    if major > 8:
        return 1000 * (major + 4) + 10 * minor
    return 12000 + 10 * minor if major == 8 else 12000


def read_ptx(image: bytes | str) -> PtxInfo:
    """Read the header of a PTX text and the parameters of its entries.

    Args:
        image: the text; trailing NULs are tolerated.

    Returns: version, target and, for each entry, its parameters in order.
    Raises: CubinCorruptError when it is no PTX or an entry cannot be read.
    """
    text = _without_comments(_decode(image))
    version = _VERSION.match(text)
    if not version:
        corrupt("not PTX: it does not start with .version")
    target = _TARGET.match(text, version.end() - 1)
    if not target:
        corrupt("PTX without .target after .version")
    functions: dict[str, tuple[PtxParam, ...]] = {}
    blocks: dict[str, tuple[int, int, int]] = {}
    match = _ENTRY.search(text, target.end())
    while match:
        name, end = match[1], match.end()
        params: tuple[PtxParam, ...] = ()
        if match[2]:
            close = text.find(")", end)
            if close < 0:
                corrupt(f"PTX entry {name}: its parameter list has no end")
            params = _read_params(text[end:close], name)
            end = close
        directives = _BODY.split(text[end : end + _MAX_DIRECTIVES], maxsplit=1)[0]
        if block := _BLOCK.search(directives):
            x, y, z = (int(each or 1) for each in block.groups())
            blocks[name] = (x, y, z)
        if functions.setdefault(name, params) != params:
            corrupt(f"PTX entry {name} is declared twice, differently")
        match = _ENTRY.search(text, end)
    return PtxInfo((int(version[1]), int(version[2])), target[1], functions, blocks)


def looks_like_ptx(image: bytes) -> bool:
    """True when `image` starts, after blanks and comments, with .version."""
    try:
        return bool(_VERSION.match(_without_comments(_decode(image))))
    except CubinCorruptError:
        return False


def _decode(image: bytes | str) -> str:
    if isinstance(image, str):
        text = image
    else:
        try:
            text = bytes(image).decode("utf-8")
        except UnicodeDecodeError as error:
            raise CubinCorruptError("not PTX: it is no UTF-8 text", offset=error.start) from None
    text = text.rstrip("\0")
    if "\0" in text:
        corrupt("not PTX: a NUL inside the text", text.index("\0"))
    return text


def _without_comments(text: str) -> str:
    """`text` with each comment replaced by a blank; linear in its length."""
    parts: list[str] = []
    at = 0
    while match := _COMMENT.search(text, at):
        start = match.start()
        parts += (text[at:start], " ")
        if match[0] == "//":
            at = text.find("\n", start)
        else:
            at = text.find("*/", start + 2) + 2
            if at == 1:
                corrupt("PTX with a comment that has no end", start)
        if at < 0:
            return "".join(parts)
    parts.append(text[at:])
    return "".join(parts)


def _read_params(text: str, entry: str) -> tuple[PtxParam, ...]:
    """The parameters between the parentheses of an entry."""
    if not text.strip():
        return ()
    return tuple(_read_param(part, entry) for part in text.split(","))


def _read_param(text: str, entry: str) -> PtxParam:
    """`.param [.align N] .type [.ptr [.space] [.align N]] name[count]`"""
    words = text.split()
    size = align = 0
    kind = ""
    at = 1
    if words[:1] != [".param"]:
        corrupt(f"PTX entry {entry}: {text.strip()[:60]!r} is no parameter")
    while at < len(words) and words[at].startswith("."):
        word = words[at]
        if (
            word == ".align"
            and at + 1 < len(words)
            and words[at + 1].isdecimal()
            and len(words[at + 1]) < 6
        ):
            if not kind:  # after .ptr it is that of the memory pointed to
                align = int(words[at + 1])
            at += 1
        elif not kind and word in _HANDLES:
            kind, size = word, _HANDLES[word]
        elif not kind and word[1:2] in ("u", "s", "b", "f") and word[2:] in _SIZES:
            kind, size = word, _SIZES[word[2:]]
        elif not (kind and (word == ".ptr" or word in _SPACES)):
            corrupt(f"PTX entry {entry}: {word!r} in a parameter")
        at += 1
    name = _NAME.match(" ".join(words[at:]))
    if not name or not kind:
        corrupt(f"PTX entry {entry}: {text.strip()[:60]!r} is no parameter")
    return PtxParam(name[1], kind, size * int(name[2] or 1), align or size)
