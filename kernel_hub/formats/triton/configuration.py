"""What a Triton kernel is specialised to: argument types, constants and compiler options.

Knows names and values only: neither Triton's compiler nor files.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import ParamsError, nearest

_MAX_READABLE = 80
# What Triton calls element types, in all of its versions.
_ELEMENTS = frozenset(
    [
        *("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64"),
        *("fp16", "bf16", "fp32", "f32", "fp64"),
        *("fp8e4nv", "fp8e5", "fp8e4b15", "fp8e4b8", "fp8e5b16"),
    ]
)
_TYPE = re.compile(r"(?:(?P<stars>\*{1,2})k?)?(?P<element>\w+)|tensordesc<(\w+)\[[\d,]+\](,.*)?>")
# Constants inside of a tuple that are no numbers.
_WORDS = {"none": None, "true": True, "false": False}
_INT = re.compile(r"[+-]?\d{1,20}")
_FLOAT = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)


@dataclass(frozen=True)
class Configuration:
    """One specialisation of a kernel.

    signature: name -> type of the arguments that a launch passes, with the hint (`*fp16:16`); of a
    tuple the types in parentheses (`(*fp16:16,i32)`). constexprs: the values of the others.
    options: num_warps, num_stages and whatever else Triton's compiler takes. declared: the
    signature with the arguments that were said to equal one (`i32:1`), which constexprs has too.
    """

    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    options: Mapping[str, Any]
    declared: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """What a collection keeps of it."""
        return {
            "signature": dict(self.declared),
            "constexprs": {name: plain(value) for name, value in self.constexprs.items()},
            "options": {name: plain(value) for name, value in self.options.items()},
        }

    def name(self, function: str) -> str:
        """'add_BLOCK1024_w4_s3_1a2b3c4d': readable, and another one for any other configuration."""
        digest = hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()
        parts = [function, *(f"{name}{plain(v)}" for name, v in self.constexprs.items())]
        parts += [f"w{self.options['num_warps']}", f"s{self.options['num_stages']}"]
        readable = re.sub(r"[^A-Za-z0-9_]+", "_", "_".join(parts))[:_MAX_READABLE]
        return f"{readable}_{digest[:8]}"


def plain(value: Any) -> Any:
    """`value` as JSON can say it; a Triton dtype as its name."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    return str(value)


def configuration(
    function: str,
    names: Sequence[str],
    defaults: Mapping[str, Any],
    must_be_constant: frozenset[str],
    signature: str | Mapping[str, str],
    constexprs: Mapping[str, Any],
    options: Mapping[str, Any],
) -> Configuration:
    """The configuration that a caller describes, checked against the kernel's own arguments.

    function: the kernel's name, for messages. names: its arguments in order. defaults: values of
    those that may be left out. must_be_constant: those annotated constexpr.

    Raises ParamsError naming the argument.
    """
    constants = dict(constexprs)
    for name in constants:
        _known(function, name, names, "constexprs")
    given = _by_name(function, names, signature, constants, must_be_constant)
    types: dict[str, str] = {}
    ones: dict[str, str] = {}
    for name, text in given.items():
        _known(function, name, names, "signature")
        where = f"{function}: signature of {name!r}"
        kind, value = (tuple_text(where, text), None) if is_tuple(text) else entry(where, text)
        if kind == "":
            _constant(function, name, value, constants)
            if text.endswith(":1"):
                ones[name] = text.replace(" ", "")
        elif kind != "constexpr":
            types[name] = kind
    for name in names:
        if name in types and name in constants:
            raise ParamsError(
                f"{function}: {name!r} has the type {types[name]!r} in the signature and a value "
                "in constexprs: leave one out"
            )
        if name in types and name in must_be_constant:
            raise ParamsError(
                f"{function}: {name!r} is declared tl.constexpr: give its value in constexprs, "
                f"not a type ({types[name]!r})"
            )
        if name not in types and name not in constants:
            if name not in defaults:
                what = "value in constexprs" if name in must_be_constant else "type in signature"
                raise ParamsError(
                    f"{function}: argument {name!r} has no {what}; it takes: {', '.join(names)}"
                )
            constants[name] = defaults[name]
    return Configuration(
        {name: types[name] for name in names if name in types},
        {name: constants[name] for name in names if name in constants},
        dict(options),
        {name: {**types, **ones}[name] for name in names if name in types or name in ones},
    )


def _known(function: str, name: object, names: Sequence[str], where: str) -> None:
    if name not in names:
        raise ParamsError(
            f"{function}: {where} names {name!r}, which is no argument of it; it takes: "
            + ", ".join(nearest(name, names))
        )


def _constant(function: str, name: str, value: Any, constants: dict[str, Any]) -> None:
    known = constants.setdefault(name, value)
    if type(known) is not type(value) or known != value:
        raise ParamsError(
            f"{function}: {name!r} is {value!r} in the signature and {known!r} in constexprs"
        )


def _by_name(
    function: str,
    names: Sequence[str],
    signature: Any,
    constants: Mapping[str, Any],
    must_be_constant: frozenset[str],
) -> dict[str, Any]:
    """{name: text}: as given, or from Triton's text, which is by position."""
    if isinstance(signature, Mapping):
        return dict(signature)
    if not isinstance(signature, str):
        raise ParamsError(
            f"{function}: signature is a {type(signature).__name__}: a text like "
            "'*fp16:16,*fp16:16,i32' or a dict name -> type"
        )
    parts = split(signature)
    run_time = [name for name in names if name not in constants]
    declared = [name for name in run_time if name not in must_be_constant]
    # All arguments, constants as numbers among them (as Triton's own tool has it), or the others.
    for candidates in (names, run_time, declared):
        if len(candidates) == len(parts):
            return dict(zip(candidates, parts, strict=True))
    raise ParamsError(
        f"{function}: signature {signature!r} has {len(parts)} entries; {function} takes "
        f"{len(names)} ({', '.join(names)}), of which {', '.join(declared) or 'none'} need a type"
    )


def split(text: str) -> list[str]:
    """At commas outside of brackets: 'tensordesc<fp16[64,64]>,i32' has two parts."""
    parts, depth = [""], 0
    for char in text:
        depth += (char in "[<(") - (char in "]>)")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    parts = [part.strip() for part in parts]
    return [] if parts == [""] else parts


def is_tuple(given: object) -> bool:
    """Whether an entry of a signature is a tuple: of Python, or in parentheses."""
    return isinstance(given, (tuple, list)) or (isinstance(given, str) and given.strip()[:1] == "(")


def tuple_text(where: str, given: Any) -> str:
    """A tuple of types as text, checked: '(*fp32:16,(i32,3))'."""
    if not is_tuple(given):
        if given is None or isinstance(given, (bool, int, float)):
            return str(given).lower()
        text = str(given).replace(" ", "")
        if text not in _WORDS:
            kind, _ = entry(where, text)
            if kind == "constexpr":
                raise ParamsError(f"{where}: in a tuple a constant is given by its value: (i32, 3)")
        return text
    if isinstance(given, str):
        given = given.strip()
        if given[-1] != ")":
            raise ParamsError(f"{where} is {given!r:.80}: a tuple ends with ')'")
        given = split(given[1:-1].rstrip().removesuffix(","))
    if not given:
        raise ParamsError(f"{where}: an empty tuple has no types")
    parts = [tuple_text(where, item) for item in given]
    return f"({','.join(parts)}{',' if len(parts) == 1 else ''})"


def leaves(name: str, text: str) -> Iterator[tuple[tuple[int, ...], str, str, Any]]:
    """(path, name, type with its hint or '', value of a constant) of each element of an argument.

    A plain argument is one, with an empty path; the elements of `x` are called x.0, x.1.0, …
    """
    if not is_tuple(text):
        kind, value = ("", _WORDS[text]) if text in _WORDS else entry(name, text)
        yield (), name, kind, value
        return
    for i, part in enumerate(split(text[1:-1].removesuffix(","))):
        for path, leaf, kind, value in leaves(f"{name}.{i}", part):
            yield (i, *path), leaf, kind, value


def entry(where: str, text: object) -> tuple[str, Any]:
    """(type with its hint, None), or ('', value of a constant), of one entry of a signature.

    Raises ParamsError that begins with `where`.
    """
    if not isinstance(text, str):
        raise ParamsError(f"{where} is {text!r:.80}: a text like '*fp16:16' or 'i32'")
    text = text.replace(" ", "")
    kind, colon, hint = text.partition(":")
    value = number(kind)
    if value is not None and not colon:
        return "", value
    hints = ("",) if kind.startswith("tensordesc") else ("", ":16", ":1")
    if not _is_type(kind) or colon + hint not in hints:
        raise ParamsError(
            f"{where} is {text!r:.80}: expected a type such as '*fp16', 'i32', 'fp32', "
            "'tensordesc<fp16[64,64]>', after it ':16' or ':1', or the number of a constant; "
            f"elements are {', '.join(sorted(_ELEMENTS))}"
        )
    # Triton folds an argument that equals one into the code.
    return (text, None) if hint != "1" else ("", 1)


def _is_type(kind: str) -> bool:
    match = _TYPE.fullmatch(kind)
    if match is None:
        return False
    element = match["element"] or match[3]
    return element in _ELEMENTS or kind == "constexpr" or bool(match["stars"] and element == "void")


def number(text: str) -> int | float | None:
    """The number that `text` is, or None."""
    if _INT.fullmatch(text):
        return int(text)
    if not _FLOAT.fullmatch(text):
        return None
    value = float(text)
    return value if math.isfinite(value) else None
