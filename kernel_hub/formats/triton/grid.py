"""Grid expressions: C's integers over a kernel's arguments, evaluated here and written out as C.

Knows text and numbers only. Values are 64-bit: '/' and '%' round towards zero, as in C.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import LaunchConfigError, ParamsError

_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+|\d+)[uUlL]{0,3}\b|(?:tl\.|triton\.)?([A-Za-z_]\w*)"
    r"|(<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%()<>?:,!~&|^]))"
)
_MAX_TEXT, _MAX_DEPTH = 2000, 64
# Types of arguments that a grid may name.
INTEGERS = frozenset(["i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64"])
_LOW, _HIGH = -(1 << 63), (1 << 63) - 1
_MAX_GRID = (1 << 31) - 1

Node = tuple[Any, ...]  # ("number", n), ("name", s) or (operator, operands …)


def _in_range(value: int) -> int:
    if not _LOW <= value <= _HIGH:
        raise OverflowError
    return value


def _quotient(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_BINARY: dict[
    str, tuple[int, Callable[[int, int], int]]
] = {  # (how tightly it binds, what it does)
    "|": (3, operator.or_),
    "^": (4, operator.xor),
    "&": (5, operator.and_),
    "==": (6, lambda a, b: int(a == b)),
    "!=": (6, lambda a, b: int(a != b)),
    "<": (7, lambda a, b: int(a < b)),
    "<=": (7, lambda a, b: int(a <= b)),
    ">": (7, lambda a, b: int(a > b)),
    ">=": (7, lambda a, b: int(a >= b)),
    "<<": (8, lambda a, b: a << b if 0 <= b < 63 else _HIGH + 1),
    ">>": (8, lambda a, b: a >> b if 0 <= b < 64 else _HIGH + 1),
    "+": (9, operator.add),
    "-": (9, operator.sub),
    "*": (10, operator.mul),
    "/": (10, _quotient),
    "%": (10, lambda a, b: a - b * _quotient(a, b)),
}
_LOGIC = {"||": 1, "&&": 2}
_UNARY: dict[str, Callable[[int], int]] = {
    "-": operator.neg,
    "+": operator.pos,
    "!": lambda a: int(not a),
    "~": operator.invert,
}
_CALLS: dict[str, Callable[[int, int], int]] = {
    "cdiv": lambda a, b: _quotient(_in_range(_in_range(a + b) - 1), b),
    "min": min,
    "max": max,
}
# C's own operators may divide by zero or leave 64 bits, so that functions stand for them.
_C_NAMES = {
    "+": "plus",
    "-": "minus",
    "*": "times",
    "/": "quotient",
    "%": "rest",
    "<<": "left",
    ">>": "right",
    "cdiv": "ceiling",
    "min": "smaller",
    "max": "larger",
}


class Grid:
    """The programs of a launch, as one to three expressions over the arguments' names.

    text: '(n + BLOCK - 1) / BLOCK, heads'. C's operators on integers, also `?:`, and cdiv(a, b),
    min(a, b), max(a, b). Raises ParamsError where it is none.
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str) or not 0 < len(text.strip()) <= _MAX_TEXT:
            raise ParamsError(f"grid={text!r:.80}: a text such as '(n + BLOCK - 1) / BLOCK, heads'")
        self.text = text.strip()
        parser = _Parser(self.text)
        self._axes = [parser.expression()]
        while parser.takes(","):
            self._axes.append(parser.expression())
        parser.end()
        if len(self._axes) > 3:
            raise parser.wrong(f"{len(self._axes)} sizes: a grid has up to three")
        self.names = frozenset(name for axis in self._axes for name in _names(axis))

    def __repr__(self) -> str:
        return f"Grid({self.text!r})"

    def __call__(self, values: Mapping[str, int]) -> tuple[int, int, int]:
        """The programs for these values. Raises LaunchConfigError."""
        try:
            found = [_evaluate(axis, values) for axis in self._axes]
        except (ZeroDivisionError, OverflowError) as error:
            why = "divides by zero" if isinstance(error, ZeroDivisionError) else "leaves 64 bits"
            raise LaunchConfigError(f"grid {self.text!r} {why} for {self._shown(values)}") from None
        if not all(0 <= size <= _MAX_GRID for size in found):
            raise LaunchConfigError(
                f"grid {self.text!r} is {tuple(found)} for {self._shown(values)}: each is from 0 "
                f"to {_MAX_GRID}"
            )
        x, y, z = (*found, 1, 1)[:3]
        return x, y, z

    def _shown(self, values: Mapping[str, int]) -> str:
        return ", ".join(f"{name}={values[name]}" for name in sorted(self.names))

    def as_c(self, spell: Callable[[str], str]) -> list[str]:
        """The three sizes as C expressions of int64_t.

        spell: how C spells a name. They call functions of export_grid.c.in, with an int `bad` in
        scope that these set where a value leaves 64 bits.
        """
        return [_c(axis, spell) for axis in [*self._axes, ("number", 1), ("number", 1)][:3]]


def check_names(
    grid: Grid, signature: Mapping[str, str], constexprs: Mapping[str, Any], kernel: str
) -> None:
    """Raises ParamsError unless integer arguments and constants of `kernel` are all it names."""
    for name in sorted(grid.names):
        kind, value = signature.get(name, "").partition(":")[0], constexprs.get(name)
        if kind not in INTEGERS and not isinstance(value, int):
            what = f"which is {kind or value!r}" if name in {*signature, *constexprs} else "unknown"
            known = [n for n, text in signature.items() if text.partition(":")[0] in INTEGERS]
            known += [n for n, each in constexprs.items() if isinstance(each, int)]
            raise ParamsError(
                f"grid {grid.text!r} of {kernel} names {name!r}, {what}; integers are: "
                + (", ".join(known) or "none")
            )


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens: list[tuple[str, str]] = []
        self._at = self._depth = 0
        place = 0
        while place < len(text.rstrip()):
            match = _TOKEN.match(text, place)
            if match is None:
                raise ParamsError(f"grid {text!r:.80}: {text[place:].strip()[:12]!r} is not known")
            kind = ("number", "name", "sign")[(match.lastindex or 1) - 1]
            self._tokens.append((kind, match[match.lastindex or 0]))
            place = match.end()

    def wrong(self, what: str) -> ParamsError:
        return ParamsError(f"grid {self._text!r:.80}: {what}")

    def _next(self) -> tuple[str, str]:
        return self._tokens[self._at] if self._at < len(self._tokens) else ("end", "the end")

    def takes(self, sign: str) -> bool:
        found = self._next() == ("sign", sign)
        self._at += found
        return found

    def _need(self, sign: str) -> None:
        if not self.takes(sign):
            raise self.wrong(f"expected {sign!r}, found {self._next()[1]!r}")

    def end(self) -> None:
        if self._next()[0] != "end":
            raise self.wrong(f"{self._next()[1]!r} does not belong there")

    def expression(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self.wrong("nested too deeply")
        condition = self._binary(1)
        if self.takes("?"):
            yes = self.expression()
            self._need(":")
            condition = ("?", condition, yes, self.expression())
        self._depth -= 1
        return condition

    def _binary(self, least: int) -> Node:
        left = self._unary()
        while self._next()[0] == "sign":
            sign = self._next()[1]
            binds = _LOGIC.get(sign) or _BINARY.get(sign, (0,))[0]
            if binds < least or not binds:
                break
            self._at += 1
            left = (sign, left, self._binary(binds + 1))
        return left

    def _unary(self) -> Node:
        kind, text = self._next()
        self._at += 1
        if kind == "number":
            octal = text[0] == "0" and text.isdigit() and text != "0"
            try:
                value = int(text, 8 if octal else 0)
            except ValueError:
                value = _HIGH + 1
            if value > _HIGH:
                raise self.wrong(f"{text[:24]} is no number of 64 bits")
            return ("number", value)
        if kind == "name":
            if not self.takes("("):
                return ("name", text)
            if text not in _CALLS:
                raise self.wrong(f"no function {text!r}: {', '.join(_CALLS)} are")
            first = self.expression()
            self._need(",")
            second = self.expression()
            self._need(")")
            return (text, first, second)
        if kind == "sign" and text == "(":
            inner = self.expression()
            self._need(")")
            return inner
        if kind == "sign" and text in _UNARY:
            self._depth += 1
            if self._depth > _MAX_DEPTH:
                raise self.wrong("nested too deeply")
            inner = self._unary()
            self._depth -= 1
            return ("unary", text, inner)
        raise self.wrong(f"expected a number or a name, found {text!r}")


def _names(node: Node) -> list[str]:
    if node[0] == "name":
        return [node[1]]
    return [name for part in node[1:] if isinstance(part, tuple) for name in _names(part)]


def _evaluate(node: Node, values: Mapping[str, int]) -> int:
    kind = node[0]
    if kind == "number":
        return int(node[1])
    if kind == "name":
        value = int(values[node[1]])
    elif kind == "?":
        return _evaluate(node[2] if _evaluate(node[1], values) else node[3], values)
    elif kind in _LOGIC:
        first = bool(_evaluate(node[1], values))
        return int(first if first == (kind == "||") else bool(_evaluate(node[2], values)))
    elif kind == "unary":
        value = _UNARY[node[1]](_evaluate(node[2], values))
    else:
        work = _CALLS[kind] if kind in _CALLS else _BINARY[kind][1]
        value = work(_evaluate(node[1], values), _evaluate(node[2], values))
    return _in_range(value)


def _c(node: Node, spell: Callable[[str], str]) -> str:
    kind = node[0]
    if kind == "number":
        return f"INT64_C({node[1]})"
    if kind == "name":
        return spell(node[1])
    parts = [_c(part, spell) for part in node[1:] if isinstance(part, tuple)]
    if kind == "?":
        return f"({parts[0]} ? {parts[1]} : {parts[2]})"
    if kind == "unary":
        sign = node[1]
        negated = f"minus(0, {parts[0]}, &bad)" if sign == "-" else f"({sign}{parts[0]})"
        return f"(int64_t){negated}" if sign == "!" else negated
    if kind in _C_NAMES:
        return f"{_C_NAMES[kind]}({parts[0]}, {parts[1]}, &bad)"
    truth = "" if kind in "|^&" else "(int64_t)"  # C++ has a type of its own for it
    return f"{truth}({parts[0]} {kind} {parts[1]})"
