"""transformers' masks as lengths: which keys each query sees, without the matrix of it.

Knows transformers' mask functions and nothing of ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Seen(NamedTuple):
    """Which keys a call of attention sees: key j of a sequence where start <= j < end, and

        causal:  j <= i + end - seqlen_q          for query i: the last stands at the last key
        window:  |i + end - seqlen_q - j| < window

    starts, ends: (batch_size,) int32, or None: 0, and all keys there are. window: 0 is none; the
    keys after a query count too unless causal, and then distances up to window itself.
    """

    is_causal: bool
    window: int
    starts: torch.Tensor | None
    ends: torch.Tensor | None


def encode(seen: Seen, batch_size: int, device: Any) -> torch.Tensor:
    """`seen` as an int32 tensor of four dimensions, which transformers hands on untouched.

    Shape (batch_size, 1 if causal else 2, 1 + window, how many of ends and starts there are): what
    launches need on the host lies in the shape, what kernels read in the values. The middle
    dimensions are expanded, so they take no memory.
    """
    given = [values for values in (seen.ends, seen.starts) if values is not None]
    if given:
        bounds = torch.stack(given).T
    else:
        bounds = torch.empty((batch_size, 0), dtype=torch.int32, device=device)
    shape = (batch_size, 1 if seen.is_causal else 2, 1 + seen.window, len(given))
    mask = bounds[:, None, None, :].expand(shape)
    if not _is_tracing():
        mask._kernel_hub_seen = decode(mask)  # views, once a forward
    return mask


def is_encoded(mask: Any) -> bool:
    """Whether `mask` came from `encode`; transformers' own masks are bool or floating point."""
    return isinstance(mask, torch.Tensor) and mask.dtype is torch.int32 and mask.dim() == 4


def decode(mask: torch.Tensor) -> Seen:
    """The opposite of `encode`."""
    seen: Seen | None = None if _is_tracing() else getattr(mask, "_kernel_hub_seen", None)
    if seen is not None:
        return seen
    _, causal, window, count = mask.shape
    ends = mask[:, 0, 0, 0].contiguous() if count else None
    starts = mask[:, 0, 0, 1].contiguous() if count > 1 else None
    return Seen(causal == 1, window - 1, starts, ends)


def dense(seen: Seen, batch_size: int, seqlen_q: int, seqlen_k: int, device: Any) -> torch.Tensor:
    """(batch_size, 1, seqlen_q, seqlen_k) bool, true where a query sees a key."""
    ends = seen.ends
    if ends is None:
        ends = torch.full((batch_size,), seqlen_k, dtype=torch.int32, device=device)
    ends = ends[:, None, None]
    keys = torch.arange(seqlen_k, device=device)
    places = torch.arange(seqlen_q, device=device)[:, None] + ends - seqlen_q
    sees = (keys < ends).expand(batch_size, seqlen_q, seqlen_k)
    if seen.is_causal:
        sees = sees & (keys <= places)
    if seen.window:
        reach = seen.window - 1 if seen.is_causal else seen.window
        sees = sees & ((places - keys).abs() <= reach)
    if seen.starts is not None:
        sees = sees & (keys >= seen.starts[:, None, None])
    return sees[:, None]


def lengths_mask(
    batch_size: int,
    *args: Any,
    kv_length: int,
    q_length: int | None = None,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    cache_position: torch.Tensor | None = None,
    device: Any = None,
    **more: Any,
) -> torch.Tensor:
    """transformers' mask of attention "kernel_hub": lengths and left pads where it is such a mask,
    else the dense one of "sdpa", which the attention passes on to torch.

    q_offset, kv_offset: the number in its sequence of the first query, and of the first key. Older
        versions give cache_position, (q_length,), instead of q_length and q_offset.
    attention_mask: (batch_size, tokens), true where a token is no pad.
    Rows of pads, which nobody reads, see any keys or none.
    """
    if args:
        raise TypeError(
            f"kernel_hub's mask of attention: expected arguments by name, found {len(args)} more "
            "by position: this version of transformers calls masks in a way that is not known"
        )
    given = {
        "batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset,
        "attention_mask": attention_mask, **more,
    }  # fmt: skip
    if mask_function is not None:
        given["mask_function"] = mask_function
    if cache_position is not None:
        given["cache_position"] = cache_position
        q_length, q_offset = cache_position.shape[0], cache_position[0]
        device = cache_position.device
    else:
        given.update(q_length=q_length, q_offset=q_offset, device=device)
    pattern = pattern_of(mask_function)
    seen = None
    if pattern is not None and q_length is not None:
        if device is None:
            device = "cpu" if attention_mask is None else attention_mask.device
        sizes = (batch_size, q_length, kv_length, q_offset, kv_offset)
        seen = _seen(*pattern, *sizes, attention_mask, device)
    if seen is not None:
        return encode(seen, batch_size, device)
    given.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
    return _sdpa_mask()(**given)


def _sdpa_mask() -> Callable[..., Any]:
    from transformers.masking_utils import AttentionMaskInterface

    return AttentionMaskInterface._global_mapping["sdpa"]


def _is_tracing() -> bool:
    return torch.compiler.is_compiling()


def _seen(
    is_causal: bool,
    window: int,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any,
    kv_offset: Any,
    attention_mask: torch.Tensor | None,
    device: Any,
) -> Seen | None:
    """The mask as lengths, or None where it is none of those. Waits for the device where there is
    an attention_mask; while tracing, which cannot, a mask is not looked at."""
    if not is_causal:
        if attention_mask is None:
            return Seen(False, window, None, None)
        if _is_tracing() or window:
            return None
        return _padded(False, 0, attention_mask, int(kv_offset), kv_length)
    is_whole = (
        not isinstance(q_offset, torch.Tensor)
        and not isinstance(kv_offset, torch.Tensor)
        and q_offset + q_length - kv_offset == kv_length
        and q_length == kv_length
    )
    if attention_mask is not None:
        if _is_tracing():
            return None
        end = int(q_offset) + q_length - int(kv_offset)
        seen = _padded(True, window, attention_mask, int(kv_offset), end)
        if seen is None or seen.starts is not None:
            return seen
    if is_whole:
        return Seen(True, window, None, None)
    end = q_offset + q_length - kv_offset
    if isinstance(end, torch.Tensor):
        ends = end.to(device=device, dtype=torch.int32).expand(batch_size)
    else:
        ends = torch.full((batch_size,), end, dtype=torch.int32, device=device)
    return Seen(True, window, None, ends)


def _padded(
    is_causal: bool, window: int, attention_mask: torch.Tensor, first: int, end: int
) -> Seen | None:
    """What (batch_size, tokens) says of keys first to first + end: None where a sequence has pads
    between its tokens. Causal: pads after the tokens are no matter, no token comes after them."""
    tokens = attention_mask[:, first : first + end].bool()
    if tokens.shape[1] < end:
        tokens = torch.nn.functional.pad(tokens, (0, end - tokens.shape[1]))
    if bool(tokens.all()):
        return Seen(is_causal, window, None, None)
    count = tokens.sum(-1)
    starts = tokens.int().argmax(-1)
    ends = end - tokens.flip(-1).int().argmax(-1)
    is_whole = bool(((ends - starts == count) | (count == 0)).all())
    if not is_whole:
        return None
    has_starts = bool((starts > 0).any())
    if is_causal:
        ends = torch.full_like(ends, end)
        if not has_starts:
            return Seen(True, window, None, None)
        # A sequence of pads alone sees nothing.
        starts = torch.where(count == 0, ends, starts)
    else:
        ends = torch.where(count == 0, starts, ends)
    return Seen(is_causal, window, starts.int() if has_starts else None, ends.int())


def pattern_of(mask_function: Callable[..., Any] | None) -> tuple[bool, int] | None:
    """(causal, window) of one of transformers' mask functions; None: another mask."""
    atoms = [("causal", 0)] if mask_function is None else _atoms(mask_function)
    if atoms is None:
        return None
    is_causal = ("causal", 0) in atoms
    windows = [atom for atom in atoms if atom[1]]
    if len(windows) > 1:
        return None
    if not windows:
        return is_causal, 0
    kind, window = windows[0]
    # Keys before a query alone are bounded by a left window; one of both sides has its end too.
    return (is_causal, window) if (kind == "left") == is_causal else None


def _atoms(mask_function: Callable[..., Any]) -> list[tuple[str, int]] | None:
    """(kind, window) of each mask that transformers joined to one; None where one is unknown."""
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return [("causal", 0)]
    if mask_function is getattr(masking_utils, "bidirectional_mask_function", None):
        return []
    # torch.compile cannot look into a closure.
    if _is_tracing() or getattr(mask_function, "__module__", None) != masking_utils.__name__:
        return None
    # Its factories are closures: their names and what they closed over say which mask it is.
    factory = mask_function.__qualname__.partition(".")[0]
    names = mask_function.__code__.co_freevars
    cells = zip(names, mask_function.__closure__ or (), strict=True)
    values = {name: cell.cell_contents for name, cell in cells}
    if factory == "and_masks":
        joined = [_atoms(each) for each in values["mask_functions"]]
        return None if None in joined else [atom for atoms in joined for atom in atoms or ()]
    if factory == "sliding_window_overlay":
        return [("left", values["sliding_window"])]
    if factory == "sliding_window_bidirectional_overlay":
        return [("both", values["sliding_window"])]
    if factory == "packed_sequence_mask_function":
        # Sequences of a row are numbered from 0 on: all 0 is one a row.
        return None if bool(values["packed_sequence_mask"][:, -1].any()) else []
    return None
