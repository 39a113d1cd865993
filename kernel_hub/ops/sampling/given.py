"""The arguments of ops that draw from rows of logits, and what is asked of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..core import common

# Of a batch, and of each of its rows.
BATCH = (
    "temperature top_k top_p min_p seed offset repetition_penalty presence_penalty "
    "frequency_penalty top_n"
)
ROWS = "bias token_bitmask prompt_bitmask output_counts"
_DTYPES = {
    "top_k": torch.int32, "top_n": torch.int32, "seed": torch.int64, "offset": torch.int64,
    "token_bitmask": torch.int32, "prompt_bitmask": torch.int32, "output_counts": torch.int32,
}  # fmt: skip


class SampleGiven(NamedTuple):
    """The arguments of the registered op."""

    logits: Any
    temperature: Any = None
    top_k: Any = None
    top_p: Any = None
    min_p: Any = None
    seed: Any = None
    offset: Any = None
    repetition_penalty: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    top_n: Any = None
    bias: Any = None
    token_bitmask: Any = None
    prompt_bitmask: Any = None
    output_counts: Any = None
    softcap: float = 0.0
    out: Any = None
    out_logprob: Any = None
    out_top_ids: Any = None
    out_top_logprobs: Any = None

    @property
    def tensors(self) -> tuple[Any, ...]:
        """In the order of `_writes`."""
        return (*self[:15], *self[16:])


def check_rows(op: str, given: SampleGiven) -> None:
    """What is drawn from and by, of an op that takes some of it."""
    logits = given.logits
    common.check_data(op, "logits", logits)
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise common.refuse(op, "logits", "shape (batch, vocab_size), at least one token", logits)
    batch_size, vocab_size = logits.shape
    if vocab_size > common.MAX_SIZE:
        raise common.refuse(op, "logits", f"at most {common.MAX_SIZE} tokens", logits)
    words = (batch_size, -(-vocab_size // 32))
    shapes: dict[str, tuple[Any, ...]] = {"token_bitmask": words, "prompt_bitmask": words}
    for argument in BATCH.split():
        check_one(op, given, argument, (batch_size,))
    for argument in ROWS.split():
        shape = shapes.get(argument, (batch_size, vocab_size))
        if argument == "bias" and given.bias is not None and _dim(given.bias) == 1:
            shape = (vocab_size,)
        check_one(op, given, argument, shape)
    if given.output_counts is None:
        for argument in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
            of_prompt = argument == "repetition_penalty" and given.prompt_bitmask is not None
            if getattr(given, argument) is not None and not of_prompt:
                raise common.refuse(op, argument, "output_counts with it", "none")
    common.check_number(op, "softcap", given.softcap, least=0.0)


def _dim(value: Any) -> int:
    return value.dim() if isinstance(value, torch.Tensor) else 0


def check_one(op: str, given: Any, argument: str, shape: tuple[int, ...]) -> None:
    """One of the tensors beside logits; one of the batch has no gaps."""
    value = getattr(given, argument)
    if value is not None:
        dtype = _DTYPES.get(argument, torch.float32)
        common.check_like(op, argument, value, shape, given.logits, dtypes=(dtype,))
        if len(shape) == 1 and argument != "bias" and shape[0] > 1 and value.stride(0) != 1:
            raise common.refuse(op, argument, "a contiguous tensor", value)


def row_strides(given: SampleGiven) -> list[int]:
    """Of logits, and of what changes them, as kernels take them."""
    logits = given.logits
    changes = given.bias, given.token_bitmask, given.prompt_bitmask, given.output_counts
    return [logits.stride(0) if logits.shape[0] > 1 else 0, *[stride_of_rows(x) for x in changes]]


def stride_of_rows(x: Any) -> int:
    return 0 if x is None or x.dim() == 1 else x.stride(0)
