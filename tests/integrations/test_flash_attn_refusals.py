"""Wrong calls of flash-attn's names: each is refused by the name of what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kernel_hub import flash_attn as two  # noqa: E402
from kernel_hub import flash_attn_interface as three  # noqa: E402
from kernel_hub.errors import TensorError  # noqa: E402
from kernel_hub.flash_attn import bert_padding as padding  # noqa: E402

half = torch.float16
Q, K = torch.zeros(2, 5, 4, 32, dtype=half), torch.zeros(2, 7, 2, 32, dtype=half)
Q1, K1 = Q[:, :1], K[:, :1]
RAGGED, BOUNDS = Q[0], torch.tensor([0, 2, 5], dtype=torch.int32)
LENGTHS, TABLE = BOUNDS[1:], torch.zeros(2, 1, dtype=torch.int32)
COS = torch.zeros(64, 16, dtype=half)
E4M3 = torch.float8_e4m3fn


def caches() -> tuple[Any, Any]:
    return torch.zeros(2, 64, 2, 32, dtype=half), torch.zeros(2, 64, 2, 32, dtype=half)


def step(*args: Any, **options: Any) -> Any:
    return two.flash_attn_with_kvcache(Q1, *caches(), *args, **options)


def varlen(*args: Any, **options: Any) -> Any:
    return two.flash_attn_varlen_func(RAGGED, RAGGED, RAGGED, *args, **options)


# The begin of the message -> the call.
WRONG: dict[str, Callable[[], Any]] = {
    "flash_attn_func: q: expected a torch tensor": lambda: two.flash_attn_func(None, K, K),  # type: ignore
    "flash_attention: q: expected shape": lambda: two.flash_attn_func(RAGGED, K, K),
    "flash_attention: q: expected dtype": lambda: two.flash_attn_func(Q.int(), K.int(), K.int()),
    "flash_attention: k: expected dtype": lambda: two.flash_attn_func(Q, K.bfloat16(), K),
    "flash_attention: k: expected device": lambda: two.flash_attn_func(Q.to("meta"), K, K),
    "flash_attn_func: v: expected q's head_dim 32": lambda: two.flash_attn_func(Q, K, K[..., :16]),
    "flash_attn_varlen_func: v: expected q's head_dim 32": (
        lambda: two.flash_attn_varlen_func(RAGGED, RAGGED, RAGGED[..., :16], BOUNDS, BOUNDS, 3, 3)
    ),
    "flash_attn_with_kvcache: v_cache: expected q's head_dim 32": (
        lambda: two.flash_attn_with_kvcache(Q1, caches()[0], caches()[1][..., :16])
    ),
    "flash_attn_func: dropout_p: expected 0.0, found 0.1: there is no dropout": (
        lambda: two.flash_attn_func(Q, K, K, 0.1)
    ),
    "flash_attention: window_size: expected two whole numbers from -1": (
        lambda: two.flash_attn_func(Q, K, K, window_size=(-2, 0))
    ),
    "flash_attention: softmax_scale: expected a finite number": (
        lambda: two.flash_attn_func(Q, K, K, 0.0, float("nan"))
    ),
    "flash_attention: alibi_slopes: expected shape": (
        lambda: two.flash_attn_func(Q, K, K, alibi_slopes=torch.zeros(3))
    ),
    "flash_attn_qkvpacked_func: qkv: expected a torch tensor": (
        lambda: two.flash_attn_qkvpacked_func(None)  # type: ignore
    ),
    "flash_attn_kvpacked_func: kv: expected shape (batch_size, seqlen, 2": (
        lambda: two.flash_attn_kvpacked_func(Q, K)
    ),
    "flash_attn_varlen_func: cu_seqlens_q: expected a torch tensor": (
        lambda: varlen([0, 2, 5], BOUNDS, 3, 3)
    ),
    "flash_attention: cu_seqlens_q: expected dtype int32": (
        lambda: varlen(BOUNDS.long(), BOUNDS, 3, 3)
    ),
    "flash_attention: max_seqlen_q: expected a whole number": (
        lambda: varlen(BOUNDS, BOUNDS, 3.0, 3)
    ),
    "flash_attn_varlen_func: k: expected shape (num_pages": (
        lambda: varlen(BOUNDS, BOUNDS, 3, 3, block_table=TABLE)
    ),
    "flash_attn_with_kvcache: q: expected shape": (
        lambda: two.flash_attn_with_kvcache(RAGGED[0], *caches())
    ),
    "flash_attn_with_kvcache: k_cache: expected 4 dimensions, the last contiguous": (
        lambda: two.flash_attn_with_kvcache(Q1, caches()[0].mT.contiguous().mT, caches()[1])
    ),
    "flash_attn_with_kvcache: v: expected a tensor, as k is one": lambda: step(K1),
    "flash_attn_with_kvcache: cache_seqlens: expected lengths": lambda: step(K1, K1),
    "flash_attn_with_kvcache: cache_seqlens: expected at least 0": lambda: step(cache_seqlens=-1),
    "flash_attn_with_kvcache: cache_seqlens: expected at most 63, as 64 tokens": (
        lambda: step(K1, K1, cache_seqlens=64)
    ),
    "decode_attention: cache_seqlens: expected a torch tensor": (
        lambda: step(cache_seqlens=[3, 4])
    ),
    "flash_attn_with_kvcache: rotary_cos: expected None where there is no new k": (
        lambda: step(rotary_cos=COS, rotary_sin=COS)
    ),
    "flash_attn_with_kvcache: cache_leftpad: expected None": lambda: step(cache_leftpad=LENGTHS),
    "flash_attn_with_kvcache: cache_batch_idx: expected None beside a block_table": (
        lambda: step(cache_batch_idx=LENGTHS, block_table=TABLE)
    ),
    "flash_attn_with_kvcache: cache_batch_idx: expected shape (2,), int32": (
        lambda: step(cache_batch_idx=LENGTHS.float())
    ),
    "decode_attention: num_splits": lambda: step(num_splits=-1),
    "flash_attn_func: softmax_scale: expected None or a scale (dropout_p, in this place": (
        lambda: three.flash_attn_func(Q, K, K, 0.0)
    ),
    "flash_attn_qkvpacked_func: softmax_scale: expected None or a scale": (
        lambda: three.flash_attn_qkvpacked_func(torch.zeros(1, 2, 3, 2, 32, dtype=half), 0.0)
    ),
    "flash_attn_func: qv: expected None": lambda: three.flash_attn_func(Q, K, K, qv=Q),
    "flash_attn_func: attention_chunk: expected 0": (
        lambda: three.flash_attn_func(Q, K, K, attention_chunk=4)
    ),
    "flash_attention: window_size: expected no window where q is float8": (
        lambda: three.flash_attn_func(Q.to(E4M3), K.to(E4M3), K.to(E4M3), window_size=(2, 0))
    ),
    "flash_attn_qkvpacked_func: qkv: expected shape (batch_size, seqlen, 9 + 2": (
        lambda: three.flash_attn_qkvpacked_func(Q, num_heads_q=9)
    ),
    "flash_attn_varlen_func: seqused_q: expected None": (
        lambda: three.flash_attn_varlen_func(
            RAGGED, RAGGED, RAGGED, BOUNDS, BOUNDS, 3, 3, seqused_q=LENGTHS
        )
    ),
    "flash_attention: cache_seqlens: expected None beside cu_seqlens_k": (
        lambda: three.flash_attn_varlen_func(
            RAGGED, RAGGED, RAGGED, BOUNDS, BOUNDS, 3, 3, seqused_k=LENGTHS
        )
    ),
    "flash_attn_with_kvcache: q: expected shape (batch_size, seqlen, heads": (
        lambda: three.flash_attn_with_kvcache(
            RAGGED, *caches(), K1, K1, rotary_cos=COS, rotary_sin=COS, cache_seqlens=LENGTHS,
            cu_seqlens_q=BOUNDS,
        )
    ),
    "flash_attn_with_kvcache: rotary_seqlens: expected shape (2,), int32": (
        lambda: three.flash_attn_with_kvcache(
            Q1, *caches(), K1, K1, None, COS, COS, LENGTHS, rotary_seqlens=LENGTHS.long()
        )
    ),
    "flash_attn_combine: lse_partial: expected the shape of out_partial": (
        lambda: three.flash_attn_combine(Q, K)
    ),
    "flash_attn_combine: out_dtype: expected a torch.dtype": (
        lambda: three.flash_attn_combine(Q.float(), torch.zeros(2, 5, 4), out_dtype="fp16")  # type: ignore
    ),
    "unpad_input: attention_mask: expected shape (2, 5)": (
        lambda: padding.unpad_input(Q, torch.ones(2, 4))
    ),
    "unpad_input: attention_mask: expected lengths that come to the 10 tokens": (
        lambda: padding.unpad_input(Q, torch.full((2, 5), 2))
    ),
    "unpad_input_for_concatenated_sequences: attention_mask_in_length: expected lengths": (
        lambda: padding.unpad_input_for_concatenated_sequences(Q, torch.full((2, 5), 9))
    ),
    "pad_input: indices: expected one index for each of the (5,) tokens": (
        lambda: padding.pad_input(RAGGED, torch.arange(4), 2, 5)
    ),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_it_is_named(message: str) -> None:
    with pytest.raises(TensorError) as caught:
        WRONG[message]()
    assert str(caught.value).startswith(message)


def test_a_keyword_misspelt_is_no_option() -> None:
    with pytest.raises(TypeError, match="casual"):
        two.flash_attn_func(Q, K, K, casual=True)  # type: ignore
    with pytest.raises(TypeError, match="block_table"):
        three.flash_attn_with_kvcache(Q1, *caches(), block_table=TABLE)  # type: ignore
