"""Writes kernel_hub/ops/__init__.pyi: the ops' signatures, with overloads where an argument decides
what is returned. Run it after a signature has changed; a test compares."""

from __future__ import annotations

import inspect
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "kernel_hub/ops/__init__.pyi"
TENSOR = "torch.Tensor"
PAIR = f"tuple[{TENSOR}, {TENSOR}]"
_LSE = (
    "return_lse",
    {"Literal[False]": TENSOR, "Literal[True]": PAIR, "bool": f"{TENSOR} | {PAIR}"},
)


def _given(argument: str, without: str, with_it: str) -> tuple[str, dict[str, str]]:
    return argument, {"None": without, TENSOR: with_it}


# Op -> the argument that decides, and what is returned for each type of it; the first the default.
OVERLOADS = {
    "append_kv": _given("q", "None", TENSOR),
    "decode_attention": _LSE,
    "flash_attention": _LSE,
    "flash_attention_qkvpacked": _LSE,
    "qkv_linear": _given(
        "k_cache", f"tuple[{TENSOR}, {TENSOR}, {TENSOR}]", f"tuple[{TENSOR}, None, None]"
    ),
    "rms_norm": _given("residual", TENSOR, PAIR),
}
HEAD = '''\
"""The ops as type checkers see them; written by tools/op_types.py."""

from collections.abc import Sequence as Sequence
from typing import Literal, overload

import torch

'''


def signature(name: str, op: object, decides: str = "", kind: str = "", returns: str = "") -> str:
    """`def name(…) -> …: ...` with the argument that decides of that kind."""
    found = inspect.signature(op)  # type: ignore[arg-type]
    parts, keywords = [], False
    is_default = not kind or kind == next(iter(OVERLOADS[name][1]))
    for parameter in found.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            keywords = True
            parts.append("*")
        decisive = parameter.name == decides
        annotation = kind if decisive else parameter.annotation
        optional = parameter.default is not parameter.empty and (is_default or not decisive)
        default = f" = {parameter.default!r}" if optional else ""
        parts.append(f"{parameter.name}: {annotation}{default}".replace(" ", "\0"))
    body = textwrap.fill(
        ", ".join(parts), 96, initial_indent="    ", subsequent_indent="    ",
        break_long_words=False, break_on_hyphens=False,
    ).replace("\0", " ")  # fmt: skip
    return f"def {name}(\n{body},\n) -> {returns or found.return_annotation}: ...  # fmt: skip\n"


def text() -> str:
    """The whole file."""
    from kernel_hub import ops

    parts = [HEAD]
    for name in ops.__all__:
        op = getattr(ops, name)
        decides, kinds = OVERLOADS.get(name, ("", {}))
        parts += [
            f"@overload\n{signature(name, op, decides, kind, returns)}"
            for kind, returns in kinds.items()
        ] or [signature(name, op)]
    names = "".join(f'    "{name}",\n' for name in ops.__all__)
    return "".join(parts) + f"\n__all__ = [\n{names}]\n"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    TARGET.write_text(text(), encoding="utf-8")
