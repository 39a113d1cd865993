"""Writes kernel_hub/ops/__init__.pyi: the ops' signatures, with overloads where an argument decides
what is returned. Run it after a signature has changed; a test compares."""

from __future__ import annotations

import inspect
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "kernel_hub/ops/__init__.pyi"
TENSOR = "Tensor"
PAIR = f"tuple[{TENSOR}, {TENSOR}]"
# Of one overload: what the arguments that decide are, and what is returned.
Overload = tuple[dict[str, str], str]
_LSE: list[Overload] = [
    ({"return_lse": "Literal[False]"}, TENSOR),
    ({"return_lse": "Literal[True]"}, PAIR),
    ({"return_lse": "bool"}, f"{TENSOR} | {PAIR}"),
]


def _given(argument: str, without: str, with_it: str) -> list[Overload]:
    return [({argument: "None"}, without), ({argument: TENSOR}, with_it)]


_NORM: list[Overload] = [
    ({"residual": "None", "out_dtype": "None"}, TENSOR),
    ({"residual": TENSOR, "adds_after": "Literal[False]", "out_dtype": "None"}, PAIR),
    ({"residual": TENSOR, "adds_after": "Literal[True]", "out_dtype": "None"}, TENSOR),
    ({"out_dtype": "torch.dtype"}, f"{TENSOR} | tuple[{TENSOR}, ...]"),
]
_GATED: list[Overload] = [
    ({"out_dtype": "None"}, TENSOR),
    ({"out_dtype": "torch.dtype"}, f"{TENSOR} | {PAIR}"),
]
_QUANTIZE: list[Overload] = [({"scale": "None"}, PAIR), ({"scale": TENSOR}, TENSOR)]
_LOGPROB: list[Overload] = [
    ({name.replace("return_lse", "return_logprob"): kind for name, kind in given.items()}, found)
    for given, found in _LSE
]
# Op -> its overloads; the first is that of the defaults.
OVERLOADS = {
    "append_kv": _given("q", "None", TENSOR),
    "decode_attention": _LSE,
    "flash_attention": _LSE,
    "flash_attention_qkvpacked": _LSE,
    "gelu": _GATED,
    "gelu_and_mul": _GATED,
    "layer_norm": _NORM,
    "mla_decode": _LSE,
    "qkv_linear": _given(
        "k_cache", f"tuple[{TENSOR}, {TENSOR}, {TENSOR}]", f"tuple[{TENSOR}, None, None]"
    ),
    "quantize_e4m3": _QUANTIZE,
    "relu_squared": _GATED,
    "rms_norm": _NORM,
    "sample": _LOGPROB,
    "silu_and_mul": _GATED,
    "swigluoai_and_mul": _GATED,
}
HEAD = '''\
"""The ops as type checkers see them; written by tools/op_types.py."""

from collections.abc import Sequence as Sequence
from typing import Literal, overload

import torch
from torch import Tensor

'''


def _short(annotation: str) -> str:
    return annotation.replace("torch.Tensor", TENSOR)


def signature(name: str, op: object, kinds: dict[str, str] = {}, returns: str = "") -> str:  # noqa: B006
    """`def name(…) -> …: ...` with the arguments that decide of those kinds."""
    found = inspect.signature(op)  # type: ignore[arg-type]
    parts, keywords = [], False
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            keywords = True
            parts.append("*")
        kind = kinds.get(parameter.name, parameter.annotation)
        taken = {"None": None, "Literal[False]": False}.get(kind, ...)
        optional = parameter.default is not parameter.empty and (
            parameter.name not in kinds or taken is parameter.default
        )
        default = f" = {parameter.default!r}" if optional else ""
        parts.append(f"{parameter.name}: {_short(kind)}{default}".replace(" ", "\0"))
    body = textwrap.fill(
        ", ".join(parts), 96, initial_indent="    ", subsequent_indent="    ",
        break_long_words=False, break_on_hyphens=False,
    ).replace("\0", " ")  # fmt: skip
    result = returns or _short(found.return_annotation)
    return f"def {name}(\n{body},\n) -> {result}: ...  # fmt: skip\n"


def text() -> str:
    """The whole file."""
    from kernel_hub import ops

    parts = [HEAD]
    for name in ops.__all__:
        op = getattr(ops, name)
        parts += [
            f"@overload\n{signature(name, op, kinds, returns)}"
            for kinds, returns in OVERLOADS.get(name, [])
        ] or [signature(name, op)]
    names = textwrap.fill(
        ", ".join(f'"{name}"' for name in ops.__all__), 96, initial_indent="    ",
        subsequent_indent="    ",
    )  # fmt: skip
    return "".join(parts) + f"\n__all__ = [\n{names},\n]  # fmt: skip\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    TARGET.write_text(text(), encoding="utf-8")
