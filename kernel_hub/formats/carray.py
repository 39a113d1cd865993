"""Images kept as arrays in C or C++ sources: what bin2c, xxd -i and .cubin.cpp files hold.

Reads text only: nothing is compiled, and nothing but the listed numbers is believed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..cubin import image_kind, read_cubin, read_fatbin
from ..errors import CubinCorruptError, CubinNotFoundError, ParamsError, listed
from ..files import read_file

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
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+(\w+)[ \t]*$", re.MULTILINE)
_MAX_MACROS = 8
_LIST = re.compile(r"=\s*\{")
_ATTRIBUTES = re.compile(r"[\w\s(),]*")
# The digits are bounded, as 64 bits are all that an element or a length may need.
_NUMBER = re.compile(
    r"(0[xX][0-9a-fA-F]{1,64}|0[bB][01]{1,64}|0[0-7]{0,64}|[1-9][0-9]{0,63})[uUlL]{0,3}"
)
_LENGTH = re.compile(r"\b(\w+?)_(?:len|size)\s*=\s*([0-9]\w*)\s*;")


@dataclass(frozen=True)
class _Array:
    """`data` are the listed bytes, up to what is `wrong`; `num_bytes` those that it has in C."""

    name: str
    where: str
    data: bytes
    num_bytes: int
    wrong: str


def load(source: str | Path) -> dict[str, bytes]:
    """The images in a C or C++ file, by array name.

    source: path of the file. Arrays of 1, 2, 4 or 8-byte integers are read, in the order and byte
        order an x86 compiler would store them; those that hold no image are left out. Names and
        sizes may be macros that the file defines. Where an array is declared longer than its
        numbers, they must be a whole image; where the file also says an array's length
        (`NAME_len`, `NAME_size`), it must be that.

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
    clean = _COMMENT_OR_STRING.sub(_blank, text)
    macros = _macros(clean)
    clean = _DIRECTIVE.sub("", clean)
    lengths = {match[1]: match[2] for match in _LENGTH.finditer(clean)}
    images: dict[str, bytes] = {}
    others: list[str] = []
    damaged: list[CubinCorruptError] = []
    for array in _arrays(clean, macros, label):
        data = array.data
        try:
            if array.wrong:
                raise CubinCorruptError(f"{array.where}{array.wrong}")
            _check_length(array, lengths.get(array.name))
            image_kind(data)
        except CubinCorruptError as error:
            # What begins as an image is one: only its own damage can refuse the file.
            if _begins_as_image(data):
                raise
            if array.wrong:
                damaged.append(error)
            start = data[:4].hex(" ") or "none"
            others.append(f"{array.name} ({array.num_bytes} bytes, from {start})")
            continue
        if images.setdefault(array.name, data) != data:
            raise CubinCorruptError(f"{label}: two different arrays are called {array.name}")
    if not images and damaged:
        raise damaged[0]
    if not images:
        found = f"arrays that hold none: {listed(others, 8)}" if others else "no integer array"
        raise CubinNotFoundError(f"no cubin, fatbin or PTX in {label}; it has {found}")
    return images


def _macros(text: str) -> dict[str, str]:
    """Names that the file itself defines as one other name or number, and never as two."""
    found: dict[str, str] = {}
    for match in _MACRO.finditer(text):
        name, value = match[1], match[2]
        found[name] = value if found.get(name, value) == value else ""
    return {name: value for name, value in found.items() if value}


def _resolved(text: str, macros: dict[str, str]) -> str:
    for _ in range(_MAX_MACROS):
        if text not in macros:
            break
        text = macros[text]
    return text


def _begins_as_image(data: bytes) -> bool:
    starts = (b"\x7fELF", b"\x50\xed\x55\xba", b".version")
    return any(data and data[:8].startswith(start[: len(data)]) for start in starts)


def _check_length(array: _Array, stated: str | None) -> None:
    """What the file says of an array's length, and an image with zeros after it, or an error."""
    data = array.data
    # A text array may end in a zero that its length does not count.
    fitting = (len(data), len(data) - data.endswith(b"\0"), array.num_bytes)
    if stated is not None and _number(stated) not in fitting:
        raise CubinCorruptError(
            f"{array.where} has {len(data)} bytes, and the file gives its length as "
            f"{stated[:24]}: one of them was cut or edited"
        )
    if array.num_bytes > len(data) and not _is_whole(data):
        raise CubinCorruptError(
            f"{array.where} is declared with {array.num_bytes} bytes and lists {len(data)}, which "
            "are no whole image: it was cut or edited"
        )


def _is_whole(data: bytes) -> bool:
    """Whether the listed numbers are all of an image: C fills the rest of an array with zeros."""
    try:
        kind = image_kind(data)
        if kind != "ptx":
            (read_cubin if kind == "cubin" else read_fatbin)(data)
    except CubinCorruptError:
        return False
    return True


def _blank(match: re.Match[str]) -> str:
    """Comments and texts become blanks; the lines stay where they are."""
    return re.sub(r"[^\n]", " ", match[0])


def _arrays(text: str, macros: dict[str, str], label: str) -> Iterator[_Array]:
    line, counted, before = 1, 0, 0
    for match in _LIST.finditer(text):
        declared = _declaration(text[before : match.start()])
        bracket, before = text.rfind("[", before, match.start()), match.end()
        if declared is None:
            continue
        width, name, size = declared
        name = _resolved(name, macros)
        line, counted = line + text.count("\n", counted, bracket), bracket
        end = text.find("}", match.end())
        if end >= 0:
            data, wrong = _bytes(text[match.end() : end], width)
        else:
            data, wrong = _bytes(text[match.end() :], width)
            wrong = " is cut off: the file ends within its numbers"
        count = _stated(_resolved(size, macros), len(data) // width)
        if not wrong and (count is None or count < len(data) // width):
            wrong = f" is declared with {size[:24]} elements and lists {len(data) // width}"
        yield _Array(name, f"{label}: {name} (line {line})", data, (count or 0) * width, wrong)
        before = max(before, end)


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


def _bytes(body: str, width: int) -> tuple[bytes, str]:
    """(the bytes listed, what is wrong with the first element that is none)."""
    tokens = body.replace(",", " ").split()
    if width == 1 and all(len(token) == 4 and token[:2] in ("0x", "0X") for token in tokens):
        try:
            return bytes.fromhex("".join([token[2:] for token in tokens])), ""
        except ValueError:  # a digit is wrong: below it is found and named
            pass
    values = np.empty(len(tokens), np.uint64)
    wrong = ""
    for i, token in enumerate(tokens):
        value = _number(token)
        if value is None:
            wrong = f": element {i} is {token[:24]!r}, not a number"
        elif value >= 1 << (8 * width):
            wrong = f": element {i} is {token[:24]}, more than {width} bytes hold"
        else:
            values[i] = value
            continue
        values = values[:i]
        break
    return values.astype(f"<u{width}").tobytes(), wrong


def _number(text: str) -> int | None:
    """What a C literal stands for; None where it is none, or longer than any 64 bits need."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    digits = match[1]
    return int(digits, 8 if digits.isdigit() and digits[0] == "0" else 0)


def _stated(declared: str, count: int) -> int | None:
    """Elements that a size says: a literal's number, None for a wrong one; of what is not read (no
    size, a macro of another file, an expression) the listed `count`."""
    literal = declared.isalnum() and declared[0].isdigit()
    return _number(declared) if literal else count
