"""The names of TensorRT-LLM's fmha_v2 kernels, cubins and arrays, read into fields."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

from ...errors import FunctionNotFoundError, ParamsError

LAYOUTS = ("qkv", "q_kv", "q_k_v", "q_paged_kv")
# The older name is of kernels that know no chunks.
SLIDING = ("sliding_or_chunked_causal", "sliding_window_causal")
_ATTRIBUTES = (
    r"alibi|softmax|softcapping|skipSoftmax|sage_[0-9]+_[0-9]+_[0-9]+|output_(?:fp16|bf16)|mtp|scale_max|"
    "tma_ws|tma|ldgsts"
)
_COUNT = r"[1-9][0-9]{0,5}"
# (field, pattern, what the reader should find there); a name is these in a row.
_HEAD = [("dtype", "(fp16|bf16|e4m3)(?:_(fp32))?", "a dtype: fp16, bf16 or e4m3, then maybe _fp32")]
_FLASH = [
    *_HEAD,
    ("steps", f"_({_COUNT})_({_COUNT})", "_<q_step>_<kv_step>"),
    ("layout", "_S_(qkv|q_kv|q_k_v|q_paged_kv)(?=_)", "_S_ and a layout: " + ", ".join(LAYOUTS)),
    ("head_dim", f"_({_COUNT})(?:x({_COUNT}))?(?=_)", "_<head_dim> or _<head_dim>x<head_dim_v>"),
]
_WHOLE = [*_HEAD, ("sizes", f"_({_COUNT})_({_COUNT})(?=_)", "_<seq_len>_<head_dim>")]
_TAIL = [
    ("mask", f"(?:_(causal|{'|'.join(SLIDING)}|custom_mask)(?=_))?", "a mask"),
    ("attributes", f"((?:_(?:{_ATTRIBUTES})(?=_))*)", "attributes"),
    ("arch", r"_sm([0-9]{2,3})(?=_|\Z)", "_sm<NN>, after attributes that are known here"),
    (
        "kernel",
        r"(_kernel(?:_nl_tiled|_nl)?)?\Z",
        "the end, _kernel, _kernel_nl or _kernel_nl_tiled",
    ),
]
_WRAPPING = re.compile(r"(?:cubin_)?(.*?)(?:(?:_cu|\.cu)?[._]cubin(?:\.cpp|_len)?|\.cu)?")


@dataclass(frozen=True)
class KernelName:
    """One name's fields. `mask` and `variant` are None for a cubin or array that holds several.

    text: the name without `cubin_` and `_cu_cubin`.
    dtype, accumulation: 'fp16', 'bf16', 'e4m3'; 'fp16' or 'fp32'.
    q_step, kv_step: rows of Q and of K that one step handles; None where the whole sequence, of at
        most `seq_len` tokens, is one (not flash attention).
    layout: 'qkv', 'q_kv', 'q_k_v' or 'q_paged_kv'.
    mask: 'padding', 'causal', 'sliding_or_chunked_causal' ('sliding_window_causal' in older
        kernels) or 'custom_mask'.
    attributes: 'alibi', 'softcapping', 'softmax', 'tma_ws', 'output_bf16', …, in the name's order.
    arch: 'sm80', 'sm90', ….
    variant: 'nl', 'nl_tiled', 'tma_ws' or 'plain'.
    """

    text: str
    dtype: str
    accumulation: str
    q_step: int | None
    kv_step: int | None
    seq_len: int | None
    layout: str
    head_dim: int
    head_dim_v: int
    mask: str | None
    attributes: tuple[str, ...]
    arch: str
    variant: str | None

    def __str__(self) -> str:
        return self.text

    @property
    def out_dtype(self) -> str:
        """The dtype of what the kernel writes."""
        given = [a.removeprefix("output_") for a in self.attributes if a.startswith("output_")]
        return given[0] if given else self.dtype

    def matches(self, **fields: Any) -> bool:
        """Whether every given field has that value; `attributes` in any order."""
        for field, value in fields.items():
            if field not in self.__dataclass_fields__:
                known = ", ".join(self.__dataclass_fields__)
                raise ParamsError(f"{field}={value!r}: a kernel's name has no such field; {known}")
            mine = getattr(self, field)
            if field == "attributes":
                mine, value = set(mine), _words(value)
            if mine != value:
                return False
        return True


def _words(attributes: Any) -> set[str]:
    """One attribute, or some, as a set."""
    given = (attributes,) if isinstance(attributes, str) else attributes
    if isinstance(given, (tuple, list, set, frozenset)) and all(isinstance(w, str) for w in given):
        return set(given)
    raise ParamsError(
        f"attributes={attributes!r:.80}: a str, or a tuple, list or set of some; () for none"
    )


def parse_name(name: str) -> KernelName:
    """The fields of a kernel symbol, a cubin's file name or an array's name.

    Raises FunctionNotFoundError, with the place where the name leaves the grammar.
    """
    if not isinstance(name, str):
        raise ParamsError(f"name={name!r:.80}: a str, not {type(name).__name__}")
    return _parse(name)


@functools.lru_cache(maxsize=4096)
def _parse(name: str) -> KernelName:
    match = _WRAPPING.fullmatch(name)
    text = match[1] if match else name
    flash = text.startswith("fmha_v2_flash_attention_")
    prefix = "fmha_v2_flash_attention_" if flash else "fmha_v2_"
    if not text.startswith(prefix):
        raise FunctionNotFoundError(f"{name!r} is no fmha_v2 name: it does not begin with fmha_v2_")
    found: dict[str, re.Match[str]] = {}
    at = len(prefix)
    for field, pattern, expected in (_FLASH if flash else _WHOLE) + _TAIL:
        part = re.compile(pattern).match(text, at)
        if part is None:
            raise FunctionNotFoundError(
                f"{name!r} is no fmha_v2 name known here: at {text[at:]!r} expected {expected}"
            )
        found[field], at = part, part.end()
    return _fields(text, flash, found)


def _fields(text: str, flash: bool, found: dict[str, re.Match[str]]) -> KernelName:
    attributes = tuple(re.findall(f"_({_ATTRIBUTES})(?=_|$)", found["attributes"][1] + "_"))
    symbol = found["kernel"][1]
    variant = None
    if "tma_ws" in attributes:
        variant = "tma_ws"
    elif symbol:
        variant = symbol.removeprefix("_kernel").lstrip("_") or "plain"
    head_dim = int(found["head_dim"][1] if flash else found["sizes"][2])
    return KernelName(
        text=text,
        dtype=found["dtype"][1],
        accumulation=found["dtype"][2] or ("fp16" if found["dtype"][1] == "fp16" else "fp32"),
        q_step=int(found["steps"][1]) if flash else None,
        kv_step=int(found["steps"][2]) if flash else None,
        seq_len=None if flash else int(found["sizes"][1]),
        layout=found["layout"][1] if flash else "qkv",
        head_dim=head_dim,
        head_dim_v=int(found["head_dim"][2] or head_dim) if flash else head_dim,
        mask=found["mask"][1] or ("padding" if symbol else None),
        attributes=attributes,
        arch=f"sm{found['arch'][1]}",
        variant=variant,
    )
