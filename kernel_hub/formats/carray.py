"""Images kept as arrays in C or C++ sources: what bin2c, xxd -i and .cubin.cpp files hold.

Reads text only: nothing is compiled, and nothing but the listed numbers is believed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..cubin import image_kind
from ..errors import CubinCorruptError, CubinNotFoundError, ParamsError

# Bytes of an element, by the words of its type, the first that is there.
_WIDTHS = {
    **dict.fromkeys(("int8_t", "uint8_t", "char", "byte"), 1),
    **dict.fromkeys(("int16_t", "uint16_t", "short"), 2),
    **dict.fromkeys(("int32_t", "uint32_t"), 4),
    **dict.fromkeys(("int64_t", "uint64_t", "long"), 8),
    **dict.fromkeys(("int", "unsigned", "signed"), 4),
}
_MAX_TEXT_BYTES = 1 << 30

_COMMENT_OR_STRING = re.compile(
    r'"(?:\\.|[^"\\\n])*"|' + r"'(?:\\.|[^'\\\n])*'" + r"|//[^\n]*|/\*.*?(?:\*/|\Z)", re.DOTALL
)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
# type words, name, [size], anything up to the =, {
_ARRAY = re.compile(
    r"((?:\b(?!return\b)\w+(?:::\w+)*\s+)+)(\w+)\s*\[([^\]\n]*)\]\s*(?:[\w\s(),]*?)=\s*\{"
)
_NUMBER = re.compile(r"(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[uUlL]*")
_LENGTH = re.compile(r"\b(\w+?)_(?:len|size)\s*=\s*((?:0[xX])?[0-9a-fA-F]+)[uUlL]*\s*;")


@dataclass(frozen=True)
class _Array:
    name: str
    line: int
    data: bytes


def load(source: str | Path) -> dict[str, bytes]:
    """The images in a C or C++ file, by array name.

    source: path of the file. Arrays of 1, 2, 4 or 8-byte integers are read, in the order and byte
        order an x86 compiler would store them; those that hold no image are left out, and where
        the file also says an array's length (`NAME_len`, `NAME_size`), it must be that.

    Returns: {name: bytes} of cubins, fatbins and PTX; give one to `Kernel`.
    Raises: CubinNotFoundError when the file is missing or holds no image; CubinCorruptError, with
        file, array and line, for an array that is cut off or does not fit its own declaration.

        images = carray.load("fmha.cubin.cpp")
        kernel = Kernel(images["cubin_fmha_cu_cubin"])
    """
    if not isinstance(source, (str, Path)):
        raise ParamsError(f"source={source!r}: a path, not {type(source).__name__}")
    path = Path(source)
    return loads(_read_text(path), str(path))


def loads(text: str, label: str = "the text") -> dict[str, bytes]:
    """The same from the source's text; `label` names it in messages."""
    clean = _DIRECTIVE.sub("", _COMMENT_OR_STRING.sub(_blank, text))
    lengths = {match[1]: int(match[2], 0) for match in _LENGTH.finditer(clean)}
    images: dict[str, bytes] = {}
    others = []
    for array in _arrays(clean, label):
        data = array.data
        stated = lengths.get(array.name, len(data))
        # A text array may end in a zero that its length does not count.
        if stated != len(data) and not (stated == len(data) - 1 and data.endswith(b"\0")):
            raise CubinCorruptError(
                f"{label}: {array.name} (line {array.line}) has {len(data)} bytes, and the file "
                f"gives its length as {stated}: one of them was cut or edited"
            )
        try:
            image_kind(data)
        except CubinCorruptError:
            others.append(f"{array.name} ({len(data)} bytes, from {data[:4].hex(' ') or 'none'})")
            continue
        if images.setdefault(array.name, data) != data:
            raise CubinCorruptError(f"{label}: two different arrays are called {array.name}")
    if not images:
        found = f"arrays that hold none: {', '.join(others[:8])}" if others else "no integer array"
        raise CubinNotFoundError(f"no cubin, fatbin or PTX in {label}; it has {found}")
    return images


def _read_text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_TEXT_BYTES:
            raise CubinCorruptError(f"{path} is larger than {_MAX_TEXT_BYTES >> 20} MiB")
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError) as error:
        if isinstance(error, CubinCorruptError):
            raise
        raise CubinNotFoundError(f"cannot read {str(path)!r}: {error}") from error


def _blank(match: re.Match[str]) -> str:
    """Comments and texts become blanks; the lines stay where they are."""
    return re.sub(r"[^\n]", " ", match[0])


def _arrays(text: str, label: str) -> Iterator[_Array]:
    for match in _ARRAY.finditer(text):
        width = _width(match[1])
        if width is None:
            continue
        name, line = match[2], text.count("\n", 0, match.start(2)) + 1
        where = f"{label}: {name} (line {line})"
        end = text.find("}", match.end())
        if end < 0:
            raise CubinCorruptError(f"{where} is cut off: the file ends within its numbers")
        data = _bytes(text[match.end() : end], width, where)
        _check_size(match[3].strip(), len(data) // width, where)
        yield _Array(name, line, data)


def _width(words: str) -> int | None:
    """Bytes of an element, by the words before the array's name; None: no integer."""
    found = {word.rpartition("::")[2] for word in words.split()}
    if found & {"double", "float"}:
        return None
    return next((width for word, width in _WIDTHS.items() if word in found), None)


def _bytes(body: str, width: int, where: str) -> bytes:
    tokens = body.replace(",", " ").split()
    if width == 1 and all(len(token) == 4 and token[:2] in ("0x", "0X") for token in tokens):
        try:
            return bytes.fromhex("".join([token[2:] for token in tokens]))
        except ValueError:  # a digit is wrong: below it is found and named
            pass
    values = np.empty(len(tokens), np.uint64)
    for i, token in enumerate(tokens):
        number = _NUMBER.fullmatch(token)
        digits = number[1] if number else ""
        octal = len(digits) > 1 and digits[0] == "0" and digits.isdigit()
        if not number or (octal and set(digits) & {"8", "9"}):
            raise CubinCorruptError(f"{where}: element {i} is {token[:24]!r}, not a number")
        value = int(digits, 8) if octal else int(digits, 0)
        if value >= 1 << (8 * width):
            raise CubinCorruptError(
                f"{where}: element {i} is {token[:24]}, more than {width} bytes hold"
            )
        values[i] = value
    return values.astype(f"<u{width}").tobytes()


def _check_size(declared: str, count: int, where: str) -> None:
    number = _NUMBER.fullmatch(declared)
    if number and int(number[1], 0) != count:
        raise CubinCorruptError(
            f"{where} is declared with {int(number[1], 0)} elements and lists {count}"
        )
