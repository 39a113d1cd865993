"""No function of the ops takes many arguments by position; those that travel have names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import kernel_hub

OPS = Path(kernel_hub.__file__).parent / "ops"
MODULES = sorted(OPS.rglob("*.py"))
MOST = 11


def positional(path: Path) -> dict[str, int]:
    """Functions of a module and how many arguments each takes by position."""
    return {
        f"{node.name}:{node.lineno}": len(node.args.posonlyargs) + len(node.args.args)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(OPS)))
def test_few_arguments_go_by_position(path: Path) -> None:
    """The public ops too: what they take behind their tensors is keyword-only."""
    many = {name: count for name, count in positional(path).items() if count > MOST}
    assert not many, f"more than {MOST} arguments by position, pass a NamedTuple: {many}"


def test_what_travels_by_name_is_in_the_order_of_its_schemas() -> None:
    torch = pytest.importorskip("torch")
    from kernel_hub.ops.attention.forward_fp8 import Scales
    from kernel_hub.ops.attention.problem import TABLES, Options
    from kernel_hub.ops.kv_cache.append_checks import AppendGiven as Append
    from kernel_hub.ops.kv_cache.decode_plan import DecodeGiven as Decode
    from kernel_hub.ops.kv_cache.mla_plan import MlaGiven as Mla
    from kernel_hub.ops.projection.qkv_checks import QkvGiven as Qkv

    attention = ("flash_attention", "flash_attention_out", "flash_attention_backward",
                 "flash_attention_qkvpacked", "flash_attention_qkvpacked_backward")  # fmt: skip
    for names, op in (
        *((Options._fields, name) for name in attention),
        ((*Scales._fields, *Options._fields), "flash_attention_fp8"),
        ((*Scales._fields, *Options._fields), "flash_attention_fp8_out"),
        (Append._fields, "append_kv"),
        (Decode._fields, "decode_attention"),
        (Mla._fields, "mla_decode"),
        (Qkv._fields, "qkv_linear"),
    ):
        arguments = getattr(torch.ops.kernel_hub, op).default._schema.arguments
        found = [argument.name for argument in arguments]
        wanted = [f"{name}_scale" if name in ("q", "k", "v") and "fp8" in op else name
                  for name in names]  # fmt: skip
        first = found.index(wanted[0])
        assert found[first : first + len(wanted)] == wanted
        if op == "flash_attention":
            tensors = {x.name for x in arguments if "Tensor" in str(x.type)}
            assert tuple(name for name in Options._fields if name in tensors) == TABLES
