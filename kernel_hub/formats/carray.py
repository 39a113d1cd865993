"""Images kept as arrays in C or C++ sources: what bin2c, xxd -i and .cubin.cpp files hold.

Reads text only: nothing is compiled, and nothing but the listed numbers is believed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .._read import read_file
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
# How much before an array's numbers is read for its declaration, once its blanks are single ones.
_MAX_WORDS, _MAX_DECLARATION = 64, 512

# Every pattern here takes time in proportion to the text, whatever it holds. So a text without its
# closing quote ends with its line, and a ' within a number (1'000) begins none.
_COMMENT_OR_STRING = re.compile(
    r'"(?:\\.|[^"\\\n])*"?|' + r"(?<!\w)'(?:\\.|[^'\\\n])*'?" + r"|//[^\n]*|/\*.*?(?:\*/|\Z)",
    re.DOTALL,
)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
_LIST = re.compile(r"=\s*\{")
_ATTRIBUTES = re.compile(r"[\w\s(),]*")
# The digits are bounded, as 64 bits are all that an element or a length may need.
_NUMBER = re.compile(
    r"(0[xX][0-9a-fA-F]{1,64}|0[bB][01]{1,64}|0[0-7]{0,64}|[1-9][0-9]{0,63})[uUlL]{0,3}"
)
_LENGTH = re.compile(r"\b(\w+?)_(?:len|size)\s*=\s*([0-9]\w*)\s*;")


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
    text = read_file(source, _MAX_TEXT_BYTES).decode("utf-8", errors="replace")
    return loads(text.replace("\r\n", "\n"), str(source))


def loads(text: str, label: str = "the text") -> dict[str, bytes]:
    """The same from the source's text; `label` names it in messages."""
    if not isinstance(text, str):
        raise ParamsError(f"text={text!r:.60}: a str, not {type(text).__name__}")
    clean = _DIRECTIVE.sub("", _COMMENT_OR_STRING.sub(_blank, text))
    lengths = {match[1]: match[2] for match in _LENGTH.finditer(clean)}
    images: dict[str, bytes] = {}
    others = []
    for array in _arrays(clean, label):
        data = array.data
        stated = lengths.get(array.name, str(len(data)))
        # A text array may end in a zero that its length does not count.
        if _number(stated) not in (len(data), len(data) - data.endswith(b"\0")):
            raise CubinCorruptError(
                f"{label}: {array.name} (line {array.line}) has {len(data)} bytes, and the file "
                f"gives its length as {stated[:24]}: one of them was cut or edited"
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


def _blank(match: re.Match[str]) -> str:
    """Comments and texts become blanks; the lines stay where they are."""
    return re.sub(r"[^\n]", " ", match[0])


def _arrays(text: str, label: str) -> Iterator[_Array]:
    line, counted, before = 1, 0, 0
    for match in _LIST.finditer(text):
        declared = _declaration(text[before : match.start()])
        bracket, before = text.rfind("[", before, match.start()), match.end()
        if declared is None:
            continue
        width, name, size = declared
        line, counted = line + text.count("\n", counted, bracket), bracket
        where = f"{label}: {name} (line {line})"
        end = text.find("}", match.end())
        if end < 0:
            raise CubinCorruptError(f"{where} is cut off: the file ends within its numbers")
        data = _bytes(text[match.end() : end], width, where)
        _check_size(size, len(data) // width, where)
        before = end
        yield _Array(name, line, data)


def _declaration(text: str) -> tuple[int, str, str] | None:
    """(bytes of an element, name, size as written) of an array of integers that `text` ends with.

    That is: words of the type, the name, [size], and maybe attributes.
    """
    text = " ".join(text.rsplit(None, _MAX_WORDS)[-_MAX_WORDS:])[-_MAX_DECLARATION:]
    first, _, rest = text.rpartition("[")
    size, closed, attributes = rest.partition("]")
    if not closed or not _ATTRIBUTES.fullmatch(attributes):
        return None
    words = [word.rpartition(":")[2] for word in re.split(r"[^\w:\s]", first)[-1].split()]
    width = _width(words[:-1])
    return None if width is None else (width, words[-1], size.strip())


def _width(words: list[str]) -> int | None:
    """Bytes of an element, by the words before the array's name; None: no integer."""
    if {"double", "float"} & set(words):
        return None
    return next((width for word, width in _WIDTHS.items() if word in words), None)


def _bytes(body: str, width: int, where: str) -> bytes:
    tokens = body.replace(",", " ").split()
    if width == 1 and all(len(token) == 4 and token[:2] in ("0x", "0X") for token in tokens):
        try:
            return bytes.fromhex("".join([token[2:] for token in tokens]))
        except ValueError:  # a digit is wrong: below it is found and named
            pass
    values = np.empty(len(tokens), np.uint64)
    for i, token in enumerate(tokens):
        value = _number(token)
        if value is None:
            raise CubinCorruptError(f"{where}: element {i} is {token[:24]!r}, not a number")
        if value >= 1 << (8 * width):
            raise CubinCorruptError(
                f"{where}: element {i} is {token[:24]}, more than {width} bytes hold"
            )
        values[i] = value
    return values.astype(f"<u{width}").tobytes()


def _number(text: str) -> int | None:
    """What a C literal stands for; None where it is none, or longer than any 64 bits need."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    digits = match[1]
    return int(digits, 8 if digits.isdigit() and digits[0] == "0" else 0)


def _check_size(declared: str, count: int, where: str) -> None:
    """A size that is a literal must be right; a macro or an expression is not read."""
    literal = declared.isalnum() and declared[0].isdigit()
    if literal and _number(declared) != count:
        raise CubinCorruptError(
            f"{where} is declared with {declared[:24]} elements and lists {count}"
        )
